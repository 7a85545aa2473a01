"""O^T += V^T P^T of decode over a cache of e4m3, and the epilogue.

f16 WGMMA takes V^T from registers, to which ldmatrix transposes it and where it is widened. P stays f16: rounding it to
fp8 would cause most of the output's error.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, OperandSource

from tsmla_kernels.sm90.decode.combine import partial_row
from tsmla_kernels.sm90.decode.config import ROWS, DecodeConfig
from tsmla_kernels.sm90.decode.copies import Copier
from tsmla_kernels.sm90.decode.memory import (
    LOOKAHEAD,
    SCHEDULE_WARP,
    Arrays,
    Barrier,
    Blocks,
    Copies,
    Described,
    Piece,
    Schedule,
    Shared,
    two_rows,
)
from tsmla_kernels.sm90.decode.ring import Ring
from tsmla_kernels.sm90.decode.walk import PieceWalk
from tsmla_kernels.sm90.warp import DTYPES, element, kept, load_transposed, uniform

AHEAD = 2  # fragments of V^T (64 latents, 32 keys) that a warpgroup has or is loading in registers, as fp8
WIDE = 4  # halves of fragments (16 keys) that it has in registers as f16


class Held(NamedTuple):
    """What a value warpgroup holds from piece to piece.

    Attributes:
      mma_pv: V^T P^T. acc, o: O^T as its accumulators, and as (query row, latent, eight rows, tile).
      wide: halves of V^T's fragments as f16. narrow: fragments as fp8.
      offset: of the lane's first values in a stage.
      thread, lane: the thread's number in its warpgroup and in its warp.
      factors: 1 / row sum of the lane's rows, if those are read before the last stage is released.
    """

    mma_pv: cute.TiledMma
    acc: cute.Tensor
    o: cute.Tensor
    wide: cute.Tensor
    narrow: cute.Tensor
    offset: Int32
    thread: Int32
    lane: Int32
    factors: Any = None  # a tensor, or None


class Reading(NamedTuple):
    """Where values are read: the addresses in this block's and in the next block's stage, whether to wait for the next
    block's keys, and that stage's barrier and parity."""

    here: Int32
    next_here: Int32
    awaited: Int32
    full: cute.Pointer
    phase: Int32


class OutRows(NamedTuple):
    """What a lane stores: its rows' factors are column `kept` of `inverse`, or `factors`; its first latent; its number
    in the warp."""

    inverse: cute.Tensor
    kept: Int32
    first_latent: Int32
    lane: Int32
    factors: Any = None  # a tensor, or None


class ValuesFp8:
    """P V with P of f16 and V of e4m3.

    Attributes:
      m_tiles: how many tiles of 64 latents a value warpgroup has.
      lookahead: a piece is described this many pieces before the value warpgroups reach it.
      scores_load_keys: whether the softmax warps read keys by ordinary loads instead of by WGMMA.
      neighbours: how many neighbouring latents a lane has.
    """

    neighbours = 2

    def __init__(self, config: DecodeConfig, ring: Ring, walk: PieceWalk, copier: Copier | Any) -> None:
        self.config, self.ring, self.walk, self.copier = config, ring, walk, copier
        self.block, self.latent, self.half = config.block, config.latent_dim, config.latent_dim // 2
        self.out_dtype, self.partial_dtype = DTYPES[config.out_dtype], DTYPES[config.partial_dtype]
        self.p_dtype, self.p_rows = ring.p_dtype, ring.p_rows
        self.m_tiles = self.half // 64
        self.scores_load_keys, self.lookahead = config.mixed, LOOKAHEAD

    def mma(self) -> cute.TiledMma:
        """The MMA of V^T P^T: 64 latents by query rows."""
        dtype, k_major = self.p_dtype, OperandMajorMode.K
        return sm90.make_trivial_tiled_mma(
            dtype, dtype, k_major, k_major, Float32, (1, 1, 1), (64, self.p_rows), OperandSource.RMEM
        )

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
        """Warpgroups 1 and 2: O^T[half] += V^T[half] P^T and the epilogue; one of their warps schedules.

        A warp has half / 4 latents, in tiles of 16: the 16 bytes of a key that ldmatrix takes as one row. A lane has
        two neighbouring latents of a tile, which are rows g and g + 8 of the product.
        """
        tidx, _, _ = cute.arch.thread_idx()
        t = tidx % 128
        lane = t % 32
        acc = cute.make_rmem_tensor(mma_pv.get_slice(t).partition_shape_C((self.half, self.p_rows)), Float32)
        mma_pv.set(Field.ACCUMULATE, True)
        # (query row of two, latent of two, eight query rows, tile)
        o = cute.make_tensor(
            acc.iterator, cute.make_layout((2, 2, self.p_rows // 8, self.m_tiles), stride=(1, 2, 4, self.p_rows // 2))
        )
        wide, narrow, factors = self.fragments()
        first_tile = self.first_tile(half, t // 32)
        held = Held(mma_pv, acc, o, wide, narrow, self.offset(half, first_tile, lane), t, lane, factors)

        index, phase, number = Int32(0), Int32(0), Int32(0)
        if warp_idx == SCHEDULE_WARP:
            # After the first piece, so that the first copies do not wait for these.
            for i in cutlass.range(1, self.lookahead, unroll=1):
                self.walk.next_piece(i, schedule)
            self.copier.meet_for_first_pieces()
        running = Int32(1)
        while running == 1:
            self.wait_for_piece(index, phase, shared)
            blocks = self.ring.described(number, shared.pieces)
            if blocks.begin == blocks.end:
                running = Int32(0)
            else:
                index, phase = self.pass_q(blocks.piece, number, index, phase, shared)
                index, phase = self.add_blocks(blocks, number, index, phase, held, shared)
                self.wait_for_sums(number)
                kept_at, first_latent = number % self.ring.inverses_kept, self.first_latent(first_tile)
                rows = OutRows(shared.inverse, kept_at, first_latent, lane, factors)
                self.store(o, rows, blocks.piece, arrays, schedule.rank)
                if warp_idx == SCHEDULE_WARP:
                    self.walk.next_piece(number + self.lookahead, schedule)
                number += 1

    def fragments(self) -> tuple[cute.Tensor | None, cute.Tensor | None, cute.Tensor | None]:
        """`wide`, `narrow` and `factors` of Held."""
        return cute.make_rmem_tensor((8, WIDE), self.p_dtype), cute.make_rmem_tensor((4, AHEAD), Int32), None

    def offset(self, half: Int32, first_tile: Int32, lane: Int32) -> Int32:
        """Offset in a stage of this lane's first values."""
        return kept(self.first_values(first_tile, lane))

    def wait_for_sums(self, number: Int32) -> None:
        """Wait until piece `number`'s row sums are there."""
        self.ring.wait_for(Barrier.SUMS, number)

    def first_tile(self, half: Int32, warp: Int32) -> Int32:
        """The first tile of 16 latents of a warp of value warpgroup `half`."""
        return half * (self.half // 16) + warp * self.m_tiles

    def first_latent(self, first_tile: Int32) -> Int32:
        """The first latent of a tile, for a piece's results."""
        return first_tile * 16

    def first_values(self, first_tile: Int32, lane: Int32) -> Int32:
        """Offset in a stage of the columns of tile `first_tile` of this lane's key, of the first 32 keys."""
        return (first_tile // 4) * (64 * self.block) + lane * 64 + (((first_tile % 4) ^ ((lane >> 1) & 3)) << 4)

    def wait_for_piece(self, index: Int32, phase: Int32, shared: Shared) -> None:
        """Wait until the next piece has been described; `index` is its first stage.

        Every use of a stage, Q's too, goes full -> ready -> empty, so that the three barriers stay in step.
        """
        cute.arch.mbarrier_wait(shared.ready + index, phase)

    @cute.jit
    def pass_q(self, piece: Described, number: Int32, index: Int32, phase: Int32, shared: Shared):
        """Release the stages that have had Q. Return the stage after them and its parity."""
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
        """Add P V of a piece's key blocks to O. Return the stage after them and its parity."""
        mma_pv, lane, narrow, wide, offset = held.mma_pv, held.lane, held.narrow, held.wide, held.offset
        thr = mma_pv.get_slice(held.thread)
        a_shape, tile_shape = thr.partition_shape_A((64, 16)), thr.partition_shape_C((64, self.p_rows))
        full, ready, moved = shared.full, shared.ready, shared.moved
        keys = uniform(blocks.piece[Piece.KEYS])
        few = self.p_rows < ROWS
        if const_expr(not few):
            held.acc.fill(0.0)
        # `begun`: whether this block's first values are in `narrow`.
        begun, address = Int32(0), self.ring.address(shared.keys, index)
        for b in cutlass.range(blocks.begin, blocks.end, unroll=1):
            _, stage_p = self.ring.stage_tensors(shared, address)
            t_p = mma_pv.make_fragment_B(thr.partition_B(stage_p))
            here = address + offset
            if begun == 0:
                cute.arch.mbarrier_wait(full + index, phase)
                if (b + 1) * self.block > keys:
                    # P is 0 past the end, but unused slots may hold NaN, and 0 * NaN must not reach O. The softmax
                    # warps have read these keys by then, and no other warp reads this warp's latents.
                    cute.arch.mbarrier_wait(ready + index, phase)
                    if const_expr(self.scores_load_keys):
                        self.ring.wait_for(Barrier.KEYS_READ, number)
                    self.clear(here, keys - b * self.block, lane)
                for g in cutlass.range_constexpr(AHEAD):
                    self.read_values(here, g, narrow)
            following, phase_following = self.ring.advance(index, phase)
            address = self.ring.address(shared.keys, following)
            begun, next_here = Int32(0), here
            # V^T is read during the product, the beginning of the next block's too: Q K^T, which needs all of shared
            # memory's bandwidth, does not run then. If the next block cannot be read yet (missing, or it needs
            # zeroing), re-read this block; the result is discarded.
            if b + 1 < blocks.end and (b + 2) * self.block <= keys:
                begun, next_here = Int32(1), address + offset
            cute.arch.mbarrier_wait(ready + index, phase)
            # Only the lanes that arrive on `empty` read `moved` and `rescale`: racecheck tracks no others.
            flag = Int32(0)
            # The first product of few rows replaces what O held: fewer instructions, which run once in a short piece.
            adds = cutlass.Boolean(True)
            if const_expr(few):
                adds = b > blocks.begin
            if lane < self.ring.releasing_lanes and adds:
                flag = moved[lane, index]
            cute.arch.fence_proxy("async.shared", space="cta")  # for the writes of P, as in Values16bit
            # The softmax warpgroup started the next block before it released this block's product, so the next block
            # has usually arrived. The poll's answer is used later, because it is slow.
            awaited = begun
            if cute.arch.mbarrier_test_wait(full + following, phase_following):
                awaited = Int32(0)
            reading = Reading(here, next_here, awaited, full + following, phase_following)
            for n in cutlass.range_constexpr(WIDE):  # while the flag comes
                self.widen(n, narrow, wide)
                self.read_on(n, reading, narrow)
            self.rescale_out(held.o, shared.rescale, flag, index, lane)
            for n in cutlass.range_constexpr(4 * self.m_tiles):
                if const_expr(n >= WIDE):
                    warpgroup.wait_group(WIDE - 1)
                    self.widen(n, narrow, wide)
                    self.read_on(n, reading, narrow)
                warpgroup.fence()
                a = cute.make_tensor(wide[None, n % WIDE].iterator, cute.make_layout(a_shape))
                g, k = n // 2, n % 2
                tile = cute.make_tensor(held.acc.iterator + g // 2 * (self.p_rows // 2), cute.make_layout(tile_shape))
                if const_expr(few):
                    mma_pv.set(Field.ACCUMULATE, adds if n % 4 == 0 else True)
                cute.gemm(mma_pv, tile, a[None, None, 0], t_p[None, None, 2 * (g % 2) + k], tile)
                warpgroup.commit_group()
            warpgroup.wait_group(0)
            self.ring.release(index, shared.empty)
            index, phase = following, phase_following
        return index, phase

    @cute.jit
    def columns(self, here: Int32, tile: cutlass.Constexpr[int]):
        """The address of a lane's 16 bytes of tile `tile` of its warp; `here` is the address for the first tile."""
        # The swizzle permutes four tiles of 64 bytes; two warps share these if a warp has only two tiles.
        return here ^ (tile << 4)

    @cute.jit
    def clear(self, here: Int32, first: Int32, lane: Int32):
        """Zero the columns that this warp reads, of the keys from `first` on."""
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
        """Read fragment g of V^T, 32 keys of a tile of latents, into its column of `narrow`."""
        fragment = narrow[None, g % AHEAD]
        address = self.columns(here, g // 2) + (g % 2) * (32 * 64)
        # A word holds two keys of two neighbouring latents.
        fragment[0], fragment[1], fragment[2], fragment[3] = load_transposed(address)

    @cute.jit
    def read_on(self, n: cutlass.Constexpr[int], reading: Reading, narrow: cute.Tensor):
        """After half n: if it was the last half of a fragment, read another fragment in its place. That is this block's
        next one, or one of the next block's first, once the next block's keys have arrived."""
        g, groups = n // 2, 2 * self.m_tiles
        if const_expr(n % 2 == 1):
            if const_expr(g + AHEAD < groups):
                self.read_values(reading.here, g + AHEAD, narrow)
            else:
                if const_expr(g + AHEAD == groups):
                    if reading.awaited == 1:
                        cute.arch.mbarrier_wait(reading.full, reading.phase)
                self.read_values(reading.next_here, g % AHEAD, narrow)

    @cute.jit
    def widen(self, n: cutlass.Constexpr[int], narrow: cute.Tensor, wide: cute.Tensor):
        """Widen half n of the fragments of V^T to f16, with a latent's two keys side by side."""
        words = cute.make_rmem_tensor((2,), Int32)
        for i in cutlass.range_constexpr(2):
            word = narrow[2 * (n % 2) + i, n // 2 % AHEAD]
            words[i] = Int32(cute.arch.prmt(word, word, 0x3120))
        cute.make_tensor(wide[None, n % WIDE].iterator, cute.make_layout(8)).store(
            cute.recast_tensor(words, self.ring.dtype).load().to(self.p_dtype)
        )

    @cute.jit
    def rescale_out(self, o: cute.Tensor, rescale: cute.Tensor, flag: Int32, index: Int32, lane: Int32):
        """Multiply O by `rescale`. Lane i's flag says whether 16 rows, from row 16 i on, need it."""
        flags = cute.arch.vote_ballot_sync(flag != 0)
        if flags != 0:
            factors = cute.make_rmem_tensor((2,), Float32)
            for v in cutlass.range_constexpr(self.p_rows // 8):
                if (flags & (1 << (v // 2))) != 0:
                    factors.fill(1.0)
                    if lane < self.ring.releasing_lanes:
                        two_rows(rescale, index, v, lane, factors)
                    for i in cutlass.range_constexpr(2):
                        factors[i] = cute.arch.shuffle_sync(factors[i], lane % 4)
                    for i in cutlass.range_constexpr(2):
                        for tile in cutlass.range_constexpr(self.m_tiles):
                            for e in cutlass.range_constexpr(2):
                                o[i, e, v, tile] = o[i, e, v, tile] * factors[i]

    @cute.jit
    def store(self, o: cute.Tensor, rows: OutRows, piece: Described, arrays: Arrays, rank: Int32):
        """Store O times `inverse`, 1 / row sum, to `out` or to the piece's slot of partial_out."""
        lane = rows.lane
        out_row, valid_rows, slot = piece[Piece.ROW], piece[Piece.VALID_ROWS], piece[Piece.SLOT]
        # Neighbouring latents of eight lanes fill a sector.
        row_low, column = lane % 4 * 2, rows.first_latent + lane // 4 * self.neighbours
        if slot < 0:
            target = element(
                arrays.out, Int64(out_row + row_low) * self.latent + column, self.neighbours * self.out_dtype.width // 8
            )
            self.store_rows(target, o, rows, valid_rows, self.out_dtype)
        else:
            row = partial_row(slot, rank * ROWS + row_low, self.config)
            target = element(
                arrays.partial_out, row * self.latent + column, self.neighbours * self.partial_dtype.width // 8
            )
            self.store_rows(target, o, rows, valid_rows, self.partial_dtype)

    @cute.jit
    def store_rows(
        self, target: cute.Pointer, o: cute.Tensor, rows: OutRows, valid_rows: Int32, dtype: cutlass.Constexpr
    ):
        """Store a lane's part of O from `target` on: two latents of every tile, two rows of every eight."""
        lines = cute.make_tensor(
            target,
            cute.make_layout((2, 2, self.p_rows // 8, self.m_tiles), stride=(1, self.latent, 8 * self.latent, 16)),
        )
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
                            cute.autovec_copy(pair, lines[None, i, v, tile])
