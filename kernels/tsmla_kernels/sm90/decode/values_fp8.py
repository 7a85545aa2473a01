"""O^T += V^T P^T of decode over a cache of e4m3."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import Field

from tsmla_kernels.sm90.decode.config import DecodeConfig
from tsmla_kernels.sm90.decode.copies import Copier
from tsmla_kernels.sm90.decode.memory import LOOKAHEAD, Arrays, Copies
from tsmla_kernels.sm90.decode.stages import Stages
from tsmla_kernels.sm90.latent.memory import Barrier, Blocks, Described, Piece, Schedule, Shared
from tsmla_kernels.sm90.latent.shape import ROWS
from tsmla_kernels.sm90.latent.values import AHEAD, WIDE, Held, OutArrays, OutRows, Reading, ValueWalk, WideValues
from tsmla_kernels.sm90.latent.walk import PieceWalk
from tsmla_kernels.sm90.warp import kept, load_transposed, uniform


class ValuesFp8:
    """P V with V of e4m3, and P of f16 or e4m3.

    Attributes:
      wide: the part that sparse's values share. lookahead: as in Values. half, latent, m_tiles: as in WideValues.
      scores_load_keys: whether the softmax warps read keys by ordinary loads instead of by WGMMA.
    """

    def __init__(self, config: DecodeConfig, stages: Stages, walk: PieceWalk, copier: Copier) -> None:
        self.config, self.ring, self.stages = config, stages.ring, stages
        self.walk, self.copier, self.lookahead = walk, copier, LOOKAHEAD
        self.block, self.p_rows = config.block, config.p_rows
        self.scores_load_keys = config.mixed
        self.wide = WideValues(config.shape, self.ring)
        self.latent, self.half, self.m_tiles = self.wide.latent, self.wide.half, self.wide.m_tiles

    def mma(self) -> cute.TiledMma:
        """The MMA of V^T P^T."""
        return self.wide.mma()

    def fragments(self) -> tuple[cute.Tensor | None, cute.Tensor | None, cute.Tensor | None]:
        """`wide`, `narrow` and `factors` of Held."""
        return self.wide.fragments()

    @cute.jit
    def accumulate(
        self,
        arrays: Arrays,
        shared: Shared,
        mma_pv: cute.TiledMma,
        half: Int32,
        warp_idx: Int32,
        schedule: Schedule,
        copies: Copies,
    ):
        """Run warpgroups 1 and 2: see latent.values.ValueWalk. The copying warp is in another warpgroup."""
        ValueWalk(self).run(arrays, shared, mma_pv, half, warp_idx, schedule)

    def offset(self, half: Int32, first_tile: Int32, lane: Int32) -> Int32:
        """The byte offset in a stage at which this lane's first values begin."""
        return kept(self.first_values(first_tile, lane))

    def look_at(self, piece: Described, held: Held, arrays: OutArrays) -> None:
        """Do nothing."""

    def wait_for_sums(self, number: Int32) -> None:
        """Wait until the factors of piece `number`'s rows have been written."""
        self.ring.wait_for(Barrier.SUMS, number)

    def first_tile(self, half: Int32, warp: Int32) -> Int32:
        """The index of the first tile of 16 latents that warp `warp` of value warpgroup `half` has."""
        return half * (self.half // 16) + warp * self.m_tiles

    def first_latent(self, first_tile: Int32) -> Int32:
        """The column of out and partial_out that holds the first latent of tile `first_tile`."""
        return first_tile * 16

    def first_values(self, first_tile: Int32, lane: Int32) -> Int32:
        """The byte offset in a stage at which this lane reads tile `first_tile` of its key (one of the first 32)."""
        return (first_tile // 4) * (64 * self.block) + lane * 64 + (((first_tile % 4) ^ ((lane >> 1) & 3)) << 4)

    def wait_for_piece(self, index: Int32, phase: Int32, shared: Shared) -> None:
        """Wait until the next piece has been described; `index` is its first stage.

        Every use of a stage, also by Q, goes full -> ready -> empty, so that the three barriers stay in step.
        """
        cute.arch.mbarrier_wait(shared.ready + index, phase)

    @cute.jit
    def pass_q(self, piece: Described, number: Int32, index: Int32, phase: Int32, shared: Shared):
        """Release the stages that held Q. Return the next stage and the parity of that stage."""
        self.ring.wait_for(Barrier.Q_READ, number)
        self.ring.release(index, shared.empty)
        index, phase = self.ring.advance(index, phase)
        if const_expr(self.config.q_may_take_two_stages):
            if piece[Piece.Q_STAGES] > 1:
                cute.arch.mbarrier_wait(shared.ready + index, phase)
                self.ring.release(index, shared.empty)
                index, phase = self.ring.advance(index, phase)
        return index, phase

    @cute.jit
    def add_blocks(
        self, blocks: Blocks, number: Int32, index: Int32, phase: Int32, held: Held, shared: Shared
    ) -> tuple[Int32, Int32]:
        """Add P V of a piece's key blocks to O. Return the next stage and the parity of that stage."""
        mma_pv, lane, narrow, wide, offset = held.mma_pv, held.lane, held.narrow, held.wide, held.offset
        thr = mma_pv.get_slice(held.thread)
        halves = self.wide.halves
        a_shape, tile_shape = thr.partition_shape_A((64, 32 // halves)), thr.partition_shape_C((64, self.p_rows))
        full, ready, moved = shared.full, shared.ready, shared.moved
        keys = uniform(blocks.piece[Piece.KEYS])
        few = self.p_rows < ROWS
        if const_expr(not few):
            held.acc.fill(0.0)
        # `begun`: whether this block's first values are in `narrow`.
        begun, address = Int32(0), self.ring.address(shared.keys, index)
        for b in cutlass.range(blocks.begin, blocks.end, unroll=1):
            stage_p = self.ring.stage_p(shared, address)
            t_p = mma_pv.make_fragment_B(thr.partition_B(stage_p))
            here = address + offset
            if begun == 0:
                cute.arch.mbarrier_wait(full + index, phase)
                if (b + 1) * self.block > keys:
                    # P is 0 past the end, but unused slots may hold NaN, and 0 * NaN must not reach O. So this warp
                    # zeroes its latents of those keys, which no other value warp reads, after the softmax warps have
                    # read the keys.
                    cute.arch.mbarrier_wait(ready + index, phase)
                    if const_expr(self.scores_load_keys):
                        self.ring.wait_for(Barrier.KEYS_READ, number)
                    self.clear(here, keys - b * self.block, lane)
                for g in cutlass.range_constexpr(AHEAD):
                    self.read_values(here, g, narrow)
            following, phase_following = self.ring.advance(index, phase)
            address = self.ring.address(shared.keys, following)
            begun, next_here = Int32(0), here
            # V^T is read during the product, and so is the beginning of the next block's V^T: Q K^T, which needs all of
            # shared memory's bandwidth, does not run then. If the piece has no next block, or that block needs zeroing,
            # this block is read again, and the result is discarded.
            if b + 1 < blocks.end and (b + 2) * self.block <= keys:
                begun, next_here = Int32(1), address + offset
            cute.arch.mbarrier_wait(ready + index, phase)
            # Only the lanes that arrive on `empty` read `moved` and `rescale`: racecheck tracks no other lanes.
            flag = Int32(0)
            # With few rows a piece's first product replaces the old O: this takes fewer instructions, which run once in
            # a short piece.
            adds = cutlass.Boolean(True)
            if const_expr(few):
                adds = b > blocks.begin
            if lane < self.ring.releasing_lanes and adds:
                flag = moved[lane, index]
            # Order the softmax warps' writes of P before WGMMA's reads, as in Values16bit.
            cute.arch.fence_proxy("async.shared", space="cta")
            # The softmax warpgroup started the next block before it signalled this one, so the next block has usually
            # arrived. The poll's answer is used later, because polling is slow.
            awaited = begun
            if cute.arch.mbarrier_test_wait(full + following, phase_following):
                awaited = Int32(0)
            reading = Reading(here, next_here, awaited, full + following, phase_following)
            for n in cutlass.range_constexpr(WIDE):  # while the flag is loaded
                self.wide.widen(n, narrow, wide)
                self.wide.read_on(n, reading, narrow, self.read_values)
            self.wide.rescale_out(held.o, shared.rescale, flag, index, lane)
            for n in cutlass.range_constexpr(2 * halves * self.m_tiles):
                if const_expr(n >= WIDE):
                    warpgroup.wait_group(WIDE - 1)
                    self.wide.widen(n, narrow, wide)
                    self.wide.read_on(n, reading, narrow, self.read_values)
                warpgroup.fence()
                a = cute.make_tensor(wide[None, n % WIDE].iterator, cute.make_layout(a_shape))
                g, k = n // halves, n % halves
                tile = cute.make_tensor(held.acc.iterator + g // 2 * (self.p_rows // 2), cute.make_layout(tile_shape))
                if const_expr(few):
                    mma_pv.set(Field.ACCUMULATE, adds if n % (2 * halves) == 0 else True)
                cute.gemm(mma_pv, tile, a[None, None, 0], t_p[None, None, halves * (g % 2) + k], tile)
                warpgroup.commit_group()
            warpgroup.wait_group(0)
            self.ring.release(index, shared.empty)
            index, phase = following, phase_following
        return index, phase

    @cute.jit
    def columns(self, here: Int32, tile: cutlass.Constexpr[int]):
        """The address of the lane's 16 bytes in tile `tile` of the warp's tiles; `here` is the address for tile 0."""
        # The swizzle permutes four tiles of 16 bytes. If a warp has only two tiles, two warps share such a group of
        # four.
        return here ^ (tile << 4)

    @cute.jit
    def clear(self, here: Int32, first: Int32, lane: Int32):
        """Zero this warp's columns of the keys from `first` on."""
        zeros = cute.make_rmem_tensor((16,), self.ring.dtype)
        cute.recast_tensor(zeros, Int32).fill(0)
        for h in cutlass.range_constexpr(self.block // 32):
            if lane + 32 * h >= first:
                for tile in cutlass.range_constexpr(self.m_tiles):
                    address = self.columns(here, tile) + h * (32 * 64)
                    target = cute.make_ptr(self.ring.dtype, address, cute.AddressSpace.smem, assumed_align=16)
                    cute.autovec_copy(zeros, cute.make_tensor(target, cute.make_layout(16)))
        cute.arch.fence_proxy("async.shared", space="cta")  # before the next copy into this stage
        cute.arch.sync_warp()

    @cute.jit
    def read_values(self, here: Int32, g: cutlass.Constexpr[int], narrow: cute.Tensor):
        """Read fragment g of V^T, 32 keys of a tile of latents, into column g % AHEAD of `narrow`."""
        fragment = narrow[None, g % AHEAD]
        address = self.columns(here, g // 2) + (g % 2) * (32 * 64)
        # A word has two neighbouring latents of two keys.
        fragment[0], fragment[1], fragment[2], fragment[3] = load_transposed(address)

    @cute.jit
    def store_rows(
        self, target: cute.Pointer, o: cute.Tensor, rows: OutRows, valid_rows: Int32, dtype: type[cutlass.Numeric]
    ):
        """Store a lane's part of O from `target` on."""
        self.wide.store_pairs(target, o, rows, valid_rows, dtype)
