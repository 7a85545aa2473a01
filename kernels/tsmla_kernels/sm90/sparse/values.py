"""O^T += V^T P^T of the sparse kernel: V^T becomes f16 in registers and, if rows have scales, is multiplied by them."""

from __future__ import annotations

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from tsmla_kernels.sm90.latent.memory import Blocks, Described, Piece, Schedule, Shared, two_rows
from tsmla_kernels.sm90.latent.query import two_halves
from tsmla_kernels.sm90.latent.softmax import tree
from tsmla_kernels.sm90.latent.values import AHEAD, WIDE, Held, OutRows, Reading, ValueWalk, WideValues
from tsmla_kernels.sm90.latent.walk import Walk
from tsmla_kernels.sm90.latent.words import as_f16, times
from tsmla_kernels.sm90.sparse.config import SparseConfig
from tsmla_kernels.sm90.sparse.gather import Gatherer
from tsmla_kernels.sm90.sparse.memory import Arrays
from tsmla_kernels.sm90.sparse.stages import Stages
from tsmla_kernels.sm90.warp import kept, load_transposed

LAST_TILE = 3  # the index of the last of a warp's tiles of 16 latents, which is bf16 in V4's upper half


def last_row(lane: Int32, pitch: int, chunk: Int32, chunks: int) -> Int32:
    """The byte offset, in a stage, of the 16 bytes that a lane passes to ldmatrix. The key is one of the first 16.

    Matrices 0 and 1 have the first eight keys, matrices 2 and 3 the next eight. Matrices 0 and 2 have 16 bytes of each
    key, with index `chunk`; matrices 1 and 3 have the 16 bytes with index chunk + chunks.
    """
    return (lane // 16 * 8 + lane % 8) * pitch + (chunk + lane // 8 % 2 * chunks) * 16


def singles_of(target: cute.Pointer, further: Int32, dtype: type[cutlass.Numeric], layout: cute.Layout) -> cute.Tensor:
    """The elements that begin `further` elements after `target`, which a lane stores one by one."""
    size = dtype.width // 8
    address = target.toint() + Int64(further) * size
    return cute.make_tensor(cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=size), layout)


class SparseValues:
    """P V of gathered rows.

    Attributes:
      wide: the part shared with decode's values. lookahead: as in Values. half, latent, m_tiles: as in WideValues.
      pitch: as in SparseConfig. copier: the gathering warps.
      steps_at_once: for how many steps of 16 keys a lane has scales in registers at once.
    """

    def __init__(self, config: SparseConfig, stages: Stages, walk: Walk, gatherer: Gatherer) -> None:
        self.config, self.ring, self.stages = config, stages.ring, stages
        self.walk, self.copier, self.lookahead = walk, gatherer, config.lookahead
        self.wide = WideValues(config.shape, self.ring)
        self.latent, self.half, self.m_tiles = self.wide.latent, self.wide.half, self.wide.m_tiles
        self.block, self.p_rows, self.p_dtype = self.ring.block, self.ring.p_rows, self.ring.p_dtype
        self.pitch = config.pitch
        self.steps_at_once = 1 if config.layout == "v4" else self.block // 16

    def mma(self) -> cute.TiledMma:
        """The MMA of V^T P^T."""
        return self.wide.mma()

    @cute.jit
    def accumulate(
        self, arrays: Arrays, shared: Shared, mma_pv: cute.TiledMma, half: Int32, warp_idx: Int32, schedule: Schedule
    ):  # fmt: skip
        """Run warpgroups 1 and 2: see latent.values.ValueWalk."""
        ValueWalk(self).run(arrays, shared, mma_pv, half, warp_idx, schedule)

    def fragments(self) -> tuple[cute.Tensor | None, cute.Tensor | None, cute.Tensor | None]:
        """`wide`, `narrow` and `factors` of Held."""
        return self.wide.fragments()

    def offset(self, half: Int32, first_tile: Int32, lane: Int32) -> Int32:
        """The offset in a stage of this lane's first values."""
        return kept(self.first_values(first_tile, lane))

    def first_tile(self, half: Int32, warp: Int32) -> Int32:
        """The first tile of 16 latents of a warp of value warpgroup `half`."""
        return half * (self.half // 16) + warp * self.m_tiles

    def first_values(self, first_tile: Int32, lane: Int32) -> Int32:
        """The byte offset in a stage of tile `first_tile` of key `lane`."""
        return lane * self.pitch + first_tile * 16

    def first_latent(self, first_tile: Int32) -> Int32:
        """The warp's first latent column. It is computed again here, so that nothing derived from it stays in a
        register between pieces."""
        tidx, _, _ = cute.arch.thread_idx()
        warp = kept(tidx) // 32 - 4
        return self.first_tile(warp // 4, warp % 4) * 16

    def wait_for_piece(self, index: Int32, phase: Int32, shared: Shared) -> None:
        """Wait until the next piece has been described; `index` is its first stage."""
        cute.arch.mbarrier_wait(shared.full + index, phase)

    def wait_for_sums(self, number: Int32) -> None:
        """Do nothing: the rows' factors are written before the last P of a piece is signalled."""

    def pass_q(self, piece: Described, number: Int32, index: Int32, phase: Int32, shared: Shared):
        """Do nothing: Q is not copied through the ring."""
        return index, phase

    @cute.jit
    def look_at(self, piece: Described, held: Held, arrays: Arrays):
        """If O is not finite, let the group's tokens gather for themselves in the next launch.

        A key with NaN or an infinity makes O NaN for all of the group's tokens, also for those that do not select the
        key, because 0 * NaN is NaN. The next launch writes these tokens' results anew."""
        if const_expr(self.config.tokens > 1):
            zeros = [Float32(0.0)] * 4  # several sums, because an addition waits for the one before
            for i in cutlass.range_constexpr(cute.size(held.acc)):
                zeros[i % 4] = cute.math.fma(held.acc[i], Float32(0.0), zeros[i % 4])
            wrong = tree(operator.add, zeros)
            lane, tokens = held.lane, self.config.tokens
            if cute.arch.vote_any_sync(wrong != 0.0):  # NaN
                token = piece[Piece.REQUEST] * tokens + lane
                if lane < tokens and token < arrays.token_lengths.shape[0]:
                    length = arrays.token_lengths[token]
                    arrays.token_lengths[token] = cutlass.max(length, ~length)

    @cute.jit
    def add_blocks(
        self, blocks: Blocks, number: Int32, index: Int32, phase: Int32, held: Held, shared: Shared
    ) -> tuple[Int32, Int32]:
        """Add P V of a piece's blocks to O. Return the stage after them and its parity."""
        of_piece = held
        mma_pv, lane, narrow, wide = held.mma_pv, held.lane, held.narrow, held.wide
        thr = mma_pv.get_slice(held.thread)
        a_shape, tile_shape = thr.partition_shape_A((64, 16)), thr.partition_shape_C((64, self.p_rows))
        full, ready = shared.full, shared.ready
        held.acc.fill(0.0)
        factors = cute.make_rmem_tensor((2, self.steps_at_once), Int32)
        # `begun`: whether this block's first values are in `narrow`.
        begun, address = Int32(0), self.ring.address(shared.keys, index)
        for b in cutlass.range(blocks.begin, blocks.end, unroll=1):
            held = of_piece
            if const_expr(self.config.layout == "v4"):
                # `kept` passes the offset through a shuffle, so that values derived from the offset are computed in
                # every block and not kept from block to block.
                held = of_piece._replace(offset=kept(of_piece.offset))
            t_p = mma_pv.make_fragment_B(thr.partition_B(self.ring.stage_p(shared, address)))
            here = address + held.offset
            if begun == 0:
                cute.arch.mbarrier_wait(full + index, phase)
                for g in cutlass.range_constexpr(AHEAD):
                    self.read_values(here, g, narrow)
            address_here = address
            self.read_factors(address_here, held, 0, factors)
            following, phase_following = self.ring.advance(index, phase)
            address = self.ring.address(shared.keys, following)
            begun, next_here = Int32(0), here
            # V^T is read during the product, and so is the beginning of the next block's V^T, as in ValuesFp8.
            if b + 1 < blocks.end:
                begun, next_here = Int32(1), address + held.offset
            cute.arch.mbarrier_wait(ready + index, phase)
            flag = Int32(0)
            if lane < self.ring.releasing_lanes:
                flag = shared.moved[lane, index]
            # Order the softmax warps' writes of P before WGMMA's reads, as in Values16bit.
            cute.arch.fence_proxy("async.shared", space="cta")
            awaited = begun
            if cute.arch.mbarrier_test_wait(full + following, phase_following):
                awaited = Int32(0)
            reading = Reading(here, next_here, awaited, full + following, phase_following)
            for n in cutlass.range_constexpr(WIDE):  # while the flag is loaded
                self.widen_next(n, address_here, reading, factors, held)
            self.wide.rescale_out(held.o, shared.rescale, flag, index, lane)
            for n in cutlass.range_constexpr(4 * self.m_tiles):
                if const_expr(n >= WIDE):
                    warpgroup.wait_group(WIDE - 1)
                    self.widen_next(n, address_here, reading, factors, held)
                warpgroup.fence()
                a = cute.make_tensor(wide[None, n % WIDE].iterator, cute.make_layout(a_shape))
                g, k = n // 2, n % 2
                tile = cute.make_tensor(held.acc.iterator + g // 2 * (self.p_rows // 2), cute.make_layout(tile_shape))
                cute.gemm(mma_pv, tile, a[None, None, 0], t_p[None, None, 2 * (g % 2) + k], tile)
                warpgroup.commit_group()
            warpgroup.wait_group(0)
            self.ring.release(index, shared.empty)
            index, phase = following, phase_following
        return index, phase

    @cute.jit
    def read_values(self, here: Int32, g: cutlass.Constexpr[int], narrow: cute.Tensor):
        """Read fragment g of V^T, 32 keys of a tile of latents, into its column of `narrow`."""
        # A word has the values of two neighbouring latents for two keys.
        self.load(here + (g // 2 * 16 + (g % 2) * (32 * self.pitch)), narrow[None, g % AHEAD])

    def load(self, address: Int32, fragment: cute.Tensor) -> None:
        """Read four matrices, transposed, into a column of `narrow`."""
        fragment[0], fragment[1], fragment[2], fragment[3] = load_transposed(address)

    @cute.jit
    def read_factors(self, address: Int32, held: Held, n: cutlass.Constexpr[int], factors: cute.Tensor):
        """Read the scales of `steps_at_once` steps of V^T, from the block's step n on.

        Step n has tile n // 4 of this warp's latents and the 16 keys from 16 (n % 4) on. factors[i, j] has, as two
        f16, the scales of keys 8 i + 2 q and 8 i + 2 q + 1 among the 16 keys of step n + j; q is lane % 4.
        """
        table = address + self.config.scales_offset
        quad = held.lane % 4
        if const_expr(self.config.layout == "v32"):
            group = self.tile_of(held) // (self.config.scale_group // 16)
            first = table + (group * 4 + quad * (2 * self.pitch))
            pair = cute.make_rmem_tensor((2,), Float32)
            for j in cutlass.range_constexpr(self.steps_at_once):
                for i in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        there = first + (16 * j + 8 * i + e) * self.pitch
                        pointer = cute.make_ptr(Float32, there, cute.AddressSpace.smem, assumed_align=4)
                        pair[e] = cute.make_tensor(pointer, cute.make_layout(1))[0]
                    factors[i, j] = two_halves(pair[0], pair[1])
        elif const_expr(self.config.layout == "v4"):
            group = (self.tile_of(held) + n // 4) // (self.config.scale_group // 16)
            first = table + (group * self.stages.scales_of_group + self.stages.scale_place(2 * quad))
            there = cute.make_ptr(Int32, first + n % 4 * 8, cute.AddressSpace.smem, assumed_align=8)
            cute.autovec_copy(cute.make_tensor(there, cute.make_layout(2)), factors[None, 0])

    def tile_of(self, held: Held) -> Int32:
        """The index of this warp's first tile, computed from the offset of the lane's values."""
        return (held.offset - held.lane * self.pitch) // 16

    @cute.jit
    def widen_scaled(self, n: cutlass.Constexpr[int], narrow: cute.Tensor, wide: cute.Tensor, factors: cute.Tensor):
        """Convert step n of V^T, half a fragment, to f16, and, if rows have scales, multiply it by its keys' scales."""
        self.wide.widen(n, narrow, wide)
        if const_expr(self.config.scale_group > 0):
            pairs = cute.recast_tensor(wide[None, n % WIDE], Int32)
            for i in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    # Pair 2 i + e has latent e of the lane's two latents, and two keys of half i of the 16 keys.
                    pairs[2 * i + e] = times(pairs[2 * i + e], factors[i, n % self.steps_at_once])

    @cute.jit
    def narrow_to_wide(self, n: cutlass.Constexpr[int], narrow: cute.Tensor, wide: cute.Tensor):
        """Convert step n of V^T, 16 keys of a tile of latents, from the cache's 16-bit dtype to f16."""
        words = cute.recast_tensor(wide[None, n % WIDE], Int32)
        for i in cutlass.range_constexpr(4):
            words[i] = as_f16(narrow[i, n % AHEAD], self.config.kv_dtype)

    @cute.jit
    def widen_next(
        self,
        n: cutlass.Constexpr[int],
        address: Int32,
        reading: Reading,
        factors: cute.Tensor,
        held: Held,
    ):
        """Do step n of V^T: widen the values that have been read, and read the next ones."""
        self.widen_scaled(n, held.narrow, held.wide, factors)
        self.wide.read_on(n, reading, held.narrow, self.read_values)

    @cute.jit
    def store_rows(
        self, target: cute.Pointer, o: cute.Tensor, rows: OutRows, valid_rows: Int32, dtype: type[cutlass.Numeric]
    ):
        """Store a lane's part of O from `target` on."""
        self.wide.store_pairs(target, o, rows, valid_rows, dtype)


class PlainValues(SparseValues):
    """P V of rows of 16 bits, as V^T P^T. A lane has rows lane // 4 and lane // 4 + 8 of a product tile. They are
    the latents of the same indices; in SparseValues they are two neighbouring latents."""

    def first_values(self, first_tile: Int32, lane: Int32) -> Int32:
        """The byte offset in a stage at which this lane reads tile `first_tile` of its key (one of the first 16)."""
        return last_row(lane, self.pitch, 2 * first_tile, 1)

    @cute.jit
    def read_values(self, here: Int32, g: cutlass.Constexpr[int], narrow: cute.Tensor):
        """Read step g of V^T, 16 keys of a tile of latents, into its column of `narrow`."""
        self.load(here + (g // 4 * 32 + (g % 4) * (16 * self.pitch)), narrow[None, g % AHEAD])

    @cute.jit
    def widen_next(
        self,
        n: cutlass.Constexpr[int],
        address: Int32,
        reading: Reading,
        factors: cute.Tensor,
        held: Held,
    ):
        """Do step n of V^T: convert the values that have been read to f16, and read the next ones."""
        narrow, last = held.narrow, 4 * self.m_tiles
        self.narrow_to_wide(n, narrow, held.wide)
        if const_expr(n + AHEAD < last):
            self.read_values(reading.here, n + AHEAD, narrow)
        else:
            if const_expr(n + AHEAD == last):
                if reading.awaited == 1:
                    cute.arch.mbarrier_wait(reading.full, reading.phase)
            self.read_values(reading.next_here, n + AHEAD - last, narrow)

    @cute.jit
    def store_rows(
        self, target: cute.Pointer, o: cute.Tensor, rows: OutRows, valid_rows: Int32, dtype: type[cutlass.Numeric]
    ):
        """Store a lane's part of O. `target` is the address at which this part would begin if the lane had pairs of
        neighbouring latents."""
        shape, strides = (2, 2, self.p_rows // 8, self.m_tiles), (8, self.latent, 8 * self.latent, 16)
        singles = singles_of(target, -(rows.lane // 4), dtype, cute.make_layout(shape, stride=strides))
        factors = cute.make_rmem_tensor((2,), Float32)
        for v in cutlass.range_constexpr(self.p_rows // 8):
            if 8 * v < valid_rows:
                two_rows(rows.inverse, rows.kept, v, rows.lane, factors)
                for i in cutlass.range_constexpr(2):
                    if rows.lane % 4 * 2 + (8 * v + i) < valid_rows:
                        for tile in cutlass.range_constexpr(self.m_tiles):
                            for e in cutlass.range_constexpr(2):
                                singles[e, i, v, tile] = (o[i, e, v, tile] * factors[i]).to(dtype)


class V4Values(SparseValues):
    """P V of V4 rows, whose last 64 latents are bf16.

    In the upper warpgroup 16 of these are the last tile of each warp; all other tiles of both warpgroups are e4m3. Both
    warpgroups run the same code, because code that runs once is slow to fetch: a last tile is read 16 keys at a time
    and converted to f16 both from bf16 and from e4m3, and one of the two results is taken.
    """

    def first_tile(self, half: Int32, warp: Int32) -> Int32:
        """The first tile of 16 latents of a warp."""
        return half * (self.half // 16) + warp * (self.m_tiles - half)

    @cute.jit
    def widen_next(
        self,
        n: cutlass.Constexpr[int],
        address: Int32,
        reading: Reading,
        factors: cute.Tensor,
        held: Held,
    ):
        """Do step n of V^T: widen the values that have been read, and read the next ones. A fragment of a last tile has
        16 keys."""
        narrow, last = held.narrow, 4 * LAST_TILE
        if const_expr(n < last):
            self.widen_scaled(n, narrow, held.wide, factors)
        else:
            self.widen_last(n, narrow, held, factors)
        if const_expr(n + 1 < last + 4):
            self.read_factors(address, held, n + 1, factors)
        if const_expr(n + 3 < last):
            self.wide.read_on(n, reading, narrow, self.read_values)
        elif const_expr(n < last and n % 2 == 1):
            self.read_last(n // 2 + AHEAD - last // 2, address, held)
        elif const_expr(n >= last and n + AHEAD < last + 4):
            self.read_last(n + AHEAD - last, address, held)
        elif const_expr(n >= last):
            if const_expr(n + AHEAD == last + 4):
                if reading.awaited == 1:
                    cute.arch.mbarrier_wait(reading.full, reading.phase)
            self.read_values(reading.next_here, n % AHEAD, narrow)

    @cute.jit
    def read_last(self, r: cutlass.Constexpr[int], address: Int32, held: Held):
        """Read 16 keys of this warp's last tile, from key 16 r on."""
        lane, tile = held.lane, self.tile_of(held)
        row = last_row(lane, self.pitch, tile + LAST_TILE, 0)
        if self.upper(tile):
            row = last_row(lane, self.pitch, (self.config.rope_offset // 16) + held.thread // 32 * 2, 1)
        self.load(address + row + 16 * r * self.pitch, held.narrow[None, r % AHEAD])

    def upper(self, tile: Int32) -> cutlass.Boolean:
        """Whether a warp whose first tile is `tile` has latents of bf16."""
        return tile >= self.half // 16

    @cute.jit
    def widen_last(self, n: cutlass.Constexpr[int], narrow: cute.Tensor, held: Held, factors: cute.Tensor):
        """Convert a step of a last tile to f16 both from bf16 and from e4m3, and take the result that fits the tile."""
        bf16 = -Int32(self.upper(self.tile_of(held)))
        pairs = cute.recast_tensor(held.wide[None, n % WIDE], Int32)
        four = cute.make_rmem_tensor((4,), Int32)
        for i in cutlass.range_constexpr(4):
            four[i] = narrow[i, n % AHEAD]
        keys = cute.make_rmem_tensor((2,), Int32)
        for i in cutlass.range_constexpr(2):
            keys[i] = Int32(cute.arch.prmt(four[2 * i], four[2 * i], 0x3120))
        eight = cute.make_rmem_tensor((8,), self.p_dtype)
        eight.store(cute.recast_tensor(keys, self.ring.dtype).load().to(self.p_dtype))
        narrow_pairs = cute.recast_tensor(eight, Int32)
        for i in cutlass.range_constexpr(4):
            e4m3 = times(narrow_pairs[i], factors[i // 2, n % self.steps_at_once])
            pairs[i] = (as_f16(four[i], "bfloat16") & bf16) | (e4m3 & ~bf16)

    @cute.jit
    def store_rows(
        self, target: cute.Pointer, o: cute.Tensor, rows: OutRows, valid_rows: Int32, dtype: type[cutlass.Numeric]
    ):
        """Store a lane's part of O: pairs of neighbouring latents from `target` on. The last tile's latents, which are
        1 or 8 apart, are stored one by one."""
        tidx, _, _ = cute.arch.thread_idx()
        lines = cute.make_tensor(
            target, cute.make_layout((2, 2, self.p_rows // 8, LAST_TILE), stride=(1, self.latent, 8 * self.latent, 16))
        )
        further, apart = Int32(16 * LAST_TILE), Int32(1)
        if self.upper(rows.first_latent // 16):
            column = self.config.e4m3_columns + tidx % 128 // 32 * 16 + rows.lane // 4
            further, apart = column - (rows.first_latent + rows.lane // 4 * 2), Int32(8)
        layout = cute.make_layout((2, 2, self.p_rows // 8), stride=(apart, self.latent, 8 * self.latent))
        singles = singles_of(target, further, dtype, layout)
        pair = cute.make_rmem_tensor((2,), dtype)
        factors = cute.make_rmem_tensor((2,), Float32)
        for v in cutlass.range_constexpr(self.p_rows // 8):
            if 8 * v < valid_rows:
                two_rows(rows.inverse, rows.kept, v, rows.lane, factors)
                for i in cutlass.range_constexpr(2):
                    if rows.lane % 4 * 2 + (8 * v + i) < valid_rows:
                        for tile in cutlass.range_constexpr(self.m_tiles):
                            for e in cutlass.range_constexpr(2):
                                pair[e] = (o[i, e, v, tile] * factors[i]).to(dtype)
                            if const_expr(tile < LAST_TILE):
                                cute.autovec_copy(pair, lines[None, i, v, tile])
                            else:
                                for e in cutlass.range_constexpr(2):
                                    singles[e, i, v] = pair[e]
