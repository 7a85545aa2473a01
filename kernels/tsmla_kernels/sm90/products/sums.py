"""The math warpgroups: they sum the products of the blocks of terms (blocks.py) in float32, and store the sums
(results.py)."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import Field

from tsmla_kernels.sm90.products.blocks import (
    Held,
    PackedBlocks,
    Part,
    PlainBlocks,
    TokenBlocks,
    WeightBlocks,
    WideBlocks,
    leave,
)
from tsmla_kernels.sm90.products.config import GROUP_ROWS, ProductConfig
from tsmla_kernels.sm90.products.memory import Arrays, Lane, Mma, Place, Shared, Tile, wait_busily
from tsmla_kernels.sm90.products.results import Results
from tsmla_kernels.sm90.products.tiles import Tiles
from tsmla_kernels.sm90.warp import advance, kept, uniform

Blocks = PackedBlocks | WideBlocks | TokenBlocks | WeightBlocks


class Turn(NamedTuple):
    """The next stage, and the phase of its barriers."""

    index: Int32
    phase: Int32


class Registers(NamedTuple):
    """A lane's registers: the product of a block (if weights are plain, the sums), the sums of all waves, and what
    `held` of the products returns."""

    acc: cute.Tensor
    sums: cute.Tensor
    held: Held | None


class Sums:
    """Device functions of the math warpgroups.

    A product has 64 rows. A lane has rows r and r + 8 of them, and two of every eight columns, in the order [column of
    two, row of two, eight columns]. Rows are weight rows and columns are tokens or, with tokens_first, the reverse.
    """

    def __init__(self, config: ProductConfig, tiles: Tiles) -> None:
        self.config, self.tiles = config, tiles
        self.values = config.columns // 2  # sums of a lane in each wave
        self.results = Results(config)
        self.tail: Blocks | None = None
        self.plain = PlainBlocks(config) if config.plain else None
        if config.wide:
            kind = PackedBlocks if config.packed else WideBlocks
            self.blocks: Blocks = kind(config, config.tokens)
            if config.tail:
                self.tail = kind(config, config.tail)
        else:
            self.blocks = TokenBlocks(config) if config.tokens_first else WeightBlocks(config)

    def mma(self) -> Mma:
        """The tiled MMAs of a block's product."""
        blocks = self.plain or self.blocks
        return Mma(blocks.mma(), blocks.mma())

    @cute.jit
    def run(self, arrays: Arrays, shared: Shared, mma: Mma, place: Place, group: Int32) -> None:
        """Run math warpgroup `group`: compute its rows of all tiles of this CTA."""
        config = self.config
        thread = cute.arch.thread_idx()[0] % 128
        lane = kept(thread % 32)
        mma.first.set(Field.ACCUMULATE, False)
        mma.more.set(Field.ACCUMULATE, True)
        sums = cute.make_rmem_tensor((self.values, config.waves), Float32)
        registers = self.registers(mma, sums, thread)
        index, phase = Int32(0), Int32(0)
        slot, turn = Int32(0), Int32(0)
        item, walk = place.cluster, self.tiles.start()
        if const_expr(config.handed):
            tile, slot, turn = self.tiles.take(shared, slot, turn)
        else:
            tile, walk = self.tiles.find(item, walk, arrays, place)
        while tile.group >= 0:
            sums.fill(0.0)
            part = Part(group, 0, thread)
            if const_expr(config.plain):
                if tile.rows > group * GROUP_ROWS:
                    index, phase = self.sum_plain(shared, mma, sums, Turn(index, phase), tile, part)
                else:
                    index, phase = self.skip_blocks(shared, Turn(index, phase), tile)
            elif const_expr(config.tail == 0):
                index, phase = self.sum_blocks(shared, mma, registers, Turn(index, phase), tile, part, False)
            elif const_expr(config.tokens_first):
                # A warpgroup whose tokens all lie past the group leaves the tensor cores to the others.
                if tile.rows > group * GROUP_ROWS:
                    index, phase = self.sum_blocks(shared, mma, registers, Turn(index, phase), tile, part, False)
                else:
                    index, phase = self.skip_blocks(shared, Turn(index, phase), tile)
            elif tile.rows > config.tail:
                index, phase = self.sum_blocks(shared, mma, registers, Turn(index, phase), tile, part, False)
            else:
                index, phase = self.sum_tail(shared, registers, Turn(index, phase), tile, part)
            if const_expr(config.splits > 1):
                self.meet(shared, sums, place, group * 128 + thread)
            if config.splits == 1 or place.rank == 0:
                self.results.store(arrays, shared, sums, tile, Lane(group, thread // 32, lane))
            item += place.clusters
            if const_expr(config.handed):
                tile, slot, turn = self.tiles.take(shared, slot, turn)
            else:
                tile, walk = self.tiles.find(item, walk, arrays, place)

    def registers(self, mma: Mma, sums: cute.Tensor, thread: Int32) -> Registers:
        """A lane's registers. Plain weights need none but the sums."""
        if self.plain:
            return Registers(sums, sums, None)
        shape = mma.first.get_slice(thread).partition_shape_C((GROUP_ROWS, self.config.columns))
        return Registers(cute.make_rmem_tensor(shape, Float32), sums, self.blocks.held())

    def products(self, few: bool) -> Blocks:
        """The products of a tile or, if `few`, of its first config.tail tokens."""
        return self.tail if few and self.tail is not None else self.blocks

    @cute.jit
    def sum_blocks(
        self,
        shared: Shared,
        mma: Mma,
        registers: Registers,
        turn: Turn,
        tile: Tile,
        part: Part,
        few: cutlass.Constexpr[bool],
    ) -> tuple[Int32, Int32]:
        """Add the products of the tile's blocks to the sums. Returns the next stage and its phase. few: as in
        `products`."""
        config = self.config
        index, phase = turn
        scales = shared.scales.toint() + self.products(few).scale_offset(tile.column, part.group, part.thread)
        for _ in cutlass.range(uniform(tile.begin), uniform(tile.end), unroll=1):
            wait_busily(shared.full + index, phase)
            for wave in cutlass.range_constexpr(config.waves):
                of_wave = Part(part.group, wave, part.thread)
                acc = registers.acc
                if const_expr(config.packed):
                    acc = cute.make_tensor(registers.sums[None, wave].iterator, acc.layout)
                self.products(few).multiply(shared, mma, acc, registers.held, index, of_wave)
                factors = scales + index * (config.scale_words * 4) + wave * self.products(few).wave_scales
                last = shared.empty + index if const_expr(wave == config.waves - 1) else None
                self.products(few).add(registers.sums[None, wave], acc, factors, last)
            index, phase = advance(index, phase, config.stages)
        return index, phase

    @cute.jit
    def sum_tail(
        self, shared: Shared, registers: Registers, turn: Turn, tile: Tile, part: Part
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """`sum_blocks` of the tile's first config.tail tokens."""
        mma = Mma(self.products(True).mma(), self.products(True).mma())
        mma.first.set(Field.ACCUMULATE, False)
        mma.more.set(Field.ACCUMULATE, True)
        acc = cute.make_rmem_tensor(
            mma.first.get_slice(part.thread).partition_shape_C((GROUP_ROWS, self.config.tail)), Float32
        )
        few = Registers(acc, registers.sums, registers.held)
        return self.sum_blocks(shared, mma, few, turn, tile, part, True)

    @cute.jit
    def sum_plain(
        self, shared: Shared, mma: Mma, sums: cute.Tensor, turn: Turn, tile: Tile, part: Part
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """`sum_blocks` of plain weights. A block's product runs while the next one is issued."""
        index, phase = turn
        before = index
        for b in cutlass.range(uniform(tile.begin), uniform(tile.end), unroll=1):
            wait_busily(shared.full + index, phase)
            self.plain.multiply(shared, mma, sums, index, part)
            warpgroup.wait_group(1)
            if b > tile.begin:
                leave(shared.empty + before, self.config)
            before = index
            index, phase = advance(index, phase, self.config.stages)
        warpgroup.wait_group(0)
        if tile.end > tile.begin:
            leave(shared.empty + before, self.config)
        return index, phase

    @cute.jit
    def skip_blocks(self, shared: Shared, turn: Turn, tile: Tile) -> tuple[Int32, Int32]:
        """Release the stages of the tile's blocks unread."""
        index, phase = turn
        for _ in cutlass.range(uniform(tile.begin), uniform(tile.end), unroll=1):
            wait_busily(shared.full + index, phase)
            leave(shared.empty + index, self.config)
            index, phase = advance(index, phase, self.config.stages)
        return index, phase

    # ---- parts of a sum

    @cute.jit
    def meet(self, shared: Shared, sums: cute.Tensor, place: Place, thread: Int32) -> None:
        """Hand this CTA's sums to the cluster's first CTA, which adds the sums in the order of the CTAs. The sums
        take the place of the first CTA's stages, once no CTA of the cluster needs its own stages any more."""
        config = self.config
        partial = shared.weight.toint() + thread * 16
        meet_cluster()
        count = self.values * config.waves
        flat = cute.make_tensor(sums.iterator, cute.make_layout(count))
        if place.rank > 0:
            target = partial + (place.rank - 1) * config.partial_bytes
            for i in cutlass.range_constexpr(count // 4):
                store_first(target + i * (config.threads * 16), *(flat[4 * i + j] for j in range(4)))
        meet_cluster()
        if place.rank == 0:
            for rank in cutlass.range_constexpr(config.splits - 1):
                for i in cutlass.range_constexpr(count // 4):
                    offset = rank * config.partial_bytes + i * (config.threads * 16)
                    pointer = cute.make_ptr(Float32, partial + offset, cute.AddressSpace.smem, assumed_align=16)
                    four = cute.make_rmem_tensor((4,), Float32)
                    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), four)
                    for j in cutlass.range_constexpr(4):
                        flat[4 * i + j] = flat[4 * i + j] + four[j]


def store_first(address: Int32, *values: Float32) -> None:
    """Store four floats at this address of shared memory in the cluster's first CTA."""
    cute.arch.inline_ptx(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, {$r0}, 0;"
        " st.shared::cluster.v4.f32 [a], {{$r1}, {$r2}, {$r3}, {$r4}}; }",
        read_only_args=[address, *values],
    )


def meet_cluster() -> None:
    """Wait for all threads of the cluster; what each wrote into shared memory is then seen by all."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
