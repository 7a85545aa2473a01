"""S^T = K Q^T, softmax and P of decode for 16-bit queries over a cache of e4m3.

K Q^T is multiplied in f16, which represents every e4m3 value. K is the operand that WGMMA takes from registers: it is
widened there, and nothing is written back to shared memory. Each of the four softmax warps has 16 keys of a block of 64
and all query rows, so the four must agree in every block whether a row's maximum has moved. Q is f16 in shared memory;
bf16 queries that are too large or too small for f16 are multiplied by a power of 2.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, OperandSource

from tsmla_kernels.sm90.constants import LOG2_E
from tsmla_kernels.sm90.decode.config import SHARERS, DecodeConfig
from tsmla_kernels.sm90.decode.memory import Arrays, Scratch
from tsmla_kernels.sm90.decode.query import StagedQuery
from tsmla_kernels.sm90.decode.scores import Scores
from tsmla_kernels.sm90.decode.stages import Stages
from tsmla_kernels.sm90.latent.key_softmax import Combine, Exchange, KeySoftmax, p_row
from tsmla_kernels.sm90.latent.memory import (
    Barrier,
    Blocks,
    Described,
    Piece,
    Place,
    Results,
    Running,
    Scored,
    Shared,
    Taken,
    two_rows,
)
from tsmla_kernels.sm90.latent.query import QueryCopy
from tsmla_kernels.sm90.latent.scores import ScoreMma
from tsmla_kernels.sm90.latent.shape import ROWS
from tsmla_kernels.sm90.latent.softmax import sync_softmax
from tsmla_kernels.sm90.warp import kept, load_matrices, uniform

EARLY_STEPS = 4  # 16-column steps of K Q^T that remain when the previous block's P V may begin
KEYS_AHEAD = 4  # fragments of K (16 keys, 32 columns) that a warp has in registers or is loading, as fp8
KEYS_WIDE = 4  # halves of fragments (16 keys, 16 columns) that a warp has in registers as f16


def key_row(lane, warp):
    """The byte offset in a stage of the row (16 fp8 columns of a key) that a lane passes to ldmatrix for fragment 0."""
    key = warp * 16 + lane % 16
    return key * 64 + (((lane // 16) ^ ((key >> 1) & 3)) << 4)


def key_fragment(first, g, block):
    """The byte offset of a lane's row for fragment g of 32 columns; `first` is the result of key_row."""
    return (first ^ ((g % 2) << 5)) + (g // 2) * (block * 64)


class Held(NamedTuple):
    """The softmax warpgroup's registers from piece to piece.

    Attributes:
      mma_qk: the MMA of K Q^T. q: Q in shared memory. t_q: the same Q as an operand.
      acc: S^T of a block. narrow, wide: fragments of K as fp8, and halves of fragments as f16.
      k_offset, p_offset: the offsets of the lane's row of K and of P in a stage. p_words: P, packed into the words that
        are stored.
      exchanged: shared-memory scratch of the warpgroup. running: the lane's maxima and sums.
      scales: as in Arrays. results: the arrays for finished rows.
      place: the thread's place. signals: 1 if the lane arrives in Ring.signal.
      visible_lens: as in Arrays.
    """

    mma_qk: cute.TiledMma
    q: cute.Tensor
    t_q: cute.Tensor
    acc: cute.Tensor
    narrow: cute.Tensor
    wide: cute.Tensor
    k_offset: Int32
    p_offset: Int32
    p_words: cute.Tensor
    exchanged: Exchange
    running: Running
    scales: cute.Tensor
    results: Results
    place: Place
    signals: Int32
    visible_lens: cute.Tensor | None = None


class ScoresMixed(Scores):
    """K Q^T with 16-bit queries and keys of e4m3. q_dtype, q_elements: dtype and element count of Q in shared
    memory. Q has p_rows rows there."""

    def __init__(self, config: DecodeConfig, stages: Stages) -> None:
        super().__init__(config, stages)
        ring = self.ring
        self.heads, self.causal = config.num_heads, config.causal
        self.p_dtype, self.p_rows = ring.p_dtype, ring.p_rows
        self.q_dtype, self.q_elements = ring.p_dtype, config.p_rows * config.head_dim
        source = StagedQuery(config.q_rows)
        self.query = QueryCopy(source, depth=config.head_dim, p_rows=ring.p_rows, q_dtype=ring.q_dtype)
        self.key_softmax = KeySoftmax(ring.p_rows, ring.p_dtype, self.over_keys)

    def mma(self) -> ScoreMma:
        """The MMA of K Q^T of a block."""
        dtype, k_major, shape = self.p_dtype, OperandMajorMode.K, (self.block, self.p_rows)
        return ScoreMma(
            sm90.make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), shape, OperandSource.RMEM)
        )

    @cute.jit
    def begin(self, arrays: Arrays, shared: Shared, scratch: Scratch, mma: ScoreMma, rank: Int32) -> Held:
        """Set up the softmax warpgroup's registers."""
        q_tile = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(self.stages.q_swizzle, self.q_dtype), (self.p_rows, self.depth), (0, 1)
        )
        s_q = cute.make_tensor(cute.recast_ptr(scratch.q, q_tile.inner, dtype=self.q_dtype), q_tile.outer)
        mma_qk, exchange = mma.main, scratch.exchange
        tidx, _, _ = cute.arch.thread_idx()
        t = kept(tidx % 128)
        lane = t % 32
        signals = Int32(self.ring.signals(lane))
        warp_here = cute.arch.make_warp_uniform(t // 32)
        results = Results(shared.inverse, arrays.lse, arrays.partial_lse, arrays.scales[1], rank)

        t_q = mma_qk.make_fragment_B(mma_qk.get_slice(t).partition_B(s_q))
        acc = cute.make_rmem_tensor(mma_qk.get_slice(t).partition_shape_C((self.block, self.p_rows)), Float32)
        narrow = cute.make_rmem_tensor((4, KEYS_AHEAD), Int32)
        wide = cute.make_rmem_tensor((4, KEYS_WIDE), Int32)
        k_offset = kept(key_row(lane, warp_here))
        p_offset = kept(self.ring.p_offset + p_row(lane, warp_here))
        p_words = cute.make_rmem_tensor((2, self.p_rows // 8), Int32)
        exchanged = Exchange(
            cute.make_tensor(exchange, cute.make_layout((2, self.p_rows // 2, SHARERS))),
            cute.make_tensor(exchange + self.p_rows * SHARERS, cute.make_layout((4, self.p_rows // 2))),
            cute.make_tensor(exchange + self.p_rows * (SHARERS + 2), cute.make_layout((self.p_rows, 1))),
        )
        l = cute.make_rmem_tensor(cute.make_layout((2, self.p_rows // 8)), Float32)
        m = cute.make_rmem_tensor(l.layout, Float32)
        place = Place(t, warp_here, lane, lane % 4 * 2)
        return Held(
            mma_qk=mma_qk,
            q=s_q,
            t_q=t_q,
            acc=acc,
            narrow=narrow,
            wide=wide,
            k_offset=k_offset,
            p_offset=p_offset,
            p_words=p_words,
            exchanged=exchanged,
            running=Running(m, l),
            scales=arrays.scales,
            results=results,
            place=place,
            signals=signals,
            visible_lens=arrays.visible_lens,
        )

    @cute.jit
    def take_q(self, piece: Described, number: Int32, index: Int32, phase: Int32, held: Held, shared: Shared) -> Taken:
        """Copy Q from its one or two stages to its place outside the ring, as f16."""
        t, lane, maxima = held.place.thread, held.place.lane, held.exchanged.maxima
        first_index, second_index = index, index
        index, phase = self.ring.advance(index, phase)
        q_stages = Int32(1)
        if const_expr(self.config.q_may_take_two_stages):
            q_stages = uniform(piece[Piece.Q_STAGES])
            if q_stages > 1:
                cute.arch.mbarrier_wait(shared.full + index, phase)
                second_index = index
                index, phase = self.ring.advance(index, phase)
        # All four warps must have read the previous Q before it is overwritten.
        sync_softmax()
        if t < self.p_rows:
            maxima[t, 0] = Float32(0.0)
        valid_rows, tops = piece[Piece.VALID_ROWS], held.exchanged.changes
        sources = (self.ring.address(shared.keys, first_index), self.ring.address(shared.keys, second_index))
        q_factor = self.query.keep(held.q.iterator.toint(), sources, valid_rows, t, tops)
        scale = held.scales[0] * LOG2_E * q_factor
        self.ring.arrive_for(Barrier.Q_READ, number)
        self.ring.signal(shared.ready, first_index, lane)
        if const_expr(self.config.q_may_take_two_stages):
            if q_stages > 1:
                self.ring.signal(shared.ready, second_index, lane)
        return Taken(index, phase, scale)

    @cute.jit
    def score_blocks(self, blocks: Blocks, number: Int32, taken: Taken, held: Held, shared: Shared) -> Scored:
        """Do Q K^T, softmax and P for a piece's key blocks."""
        mma_qk, acc, narrow, wide = held.mma_qk, held.acc, held.narrow, held.wide
        place, running = held.place, held.running
        # Modes: one of two query rows, one of two keys, one of the groups of eight query rows.
        s = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, self.p_rows // 8), stride=(1, 2, 4)))
        a_shape = mma_qk.get_slice(place.thread).partition_shape_A((self.block, 16))
        steps = self.depth // 16
        index, phase = taken.index, taken.phase
        running.l.fill(0.0)
        seen_by_all = self.softmax.seen_by_all(blocks.piece)
        previous, address = index, self.ring.address(shared.keys, index)
        following, phase_following = self.ring.advance(index, phase)
        arrived, stored = Int32(0), Int32(0)
        for b in cutlass.range(blocks.begin, blocks.end, unroll=1):
            if arrived == 0:
                cute.arch.mbarrier_wait(shared.full + index, phase)
            here = address + held.k_offset
            for g in cutlass.range_constexpr(KEYS_AHEAD):
                self.read_keys(here, g, narrow)
            mma_qk.set(Field.ACCUMULATE, False)
            for n in cutlass.range_constexpr(steps):
                if const_expr(n >= KEYS_WIDE):
                    warpgroup.wait_group(KEYS_WIDE - 1)
                self.widen_keys(n, narrow, wide)
                if const_expr(n % 2 == 1 and n // 2 + KEYS_AHEAD < steps // 2):
                    self.read_keys(here, n // 2 + KEYS_AHEAD, narrow)
                if const_expr(n == steps - EARLY_STEPS):
                    # Let the value warps begin the previous block's P V, as in Scores16bit.
                    self.ring.signal_if(stored, shared.ready, previous)
                warpgroup.fence()
                a = cute.make_tensor(
                    cute.recast_ptr(wide[None, n % KEYS_WIDE].iterator, dtype=self.p_dtype), cute.make_layout(a_shape)
                )
                cute.gemm(mma_qk, acc, a[None, None, 0], held.t_q[None, None, n], acc)
                mma_qk.set(Field.ACCUMULATE, True)
                warpgroup.commit_group()
            # The maxima are loaded while the product runs, because the load takes time.
            for v in cutlass.range_constexpr(self.p_rows // 8):
                two_rows(held.exchanged.maxima, Int32(0), v, place.lane, running.m[None, v])
            warpgroup.wait_group(0)
            previous, index, phase = index, following, phase_following
            address_here = address
            ahead = self.ring.look_ahead(index, phase, shared)
            arrived, address = ahead.arrived, ahead.address
            following, phase_following = ahead.following, ahead.phase
            if (b + 1) * self.block > seen_by_all:
                if const_expr(held.visible_lens is not None):
                    self.mask_invisible_keys(s, b, blocks.piece, place.thread, held.visible_lens)
                else:
                    self.mask_keys(s, b, blocks.piece, place.thread)
                if (b + 1) * self.block > uniform(blocks.piece[Piece.KEYS]):
                    self.ring.arrive_for(Barrier.KEYS_READ, number)
            self.key_softmax.softmax_of_keys(s, Int32(b == blocks.begin), taken.scale, held, shared, previous)
            self.key_softmax.store_p_of_keys(address_here + held.p_offset, held.p_words)
            stored = held.signals
        return Scored(index, phase, previous)

    @cute.jit
    def finish_piece(self, piece: Described, number: Int32, held: Held, shared: Shared):
        """Add up the row sums over all keys. Write the rows' factors for the epilogue, and their log-sum-exps."""
        t = held.place.thread
        totals = self.over_keys(operator.add, held.running.l, held.exchanged.of_lanes, t)
        if t % 4 == 0 and t < 2 * self.p_rows:
            for e in cutlass.range_constexpr(2):
                row = t // 2 + e
                sums = (totals[e], held.exchanged.maxima[row, 0])
                self.softmax.results.finish_row(row, sums, piece, number, held.results)

    @cute.jit
    def read_keys(self, here: Int32, g: cutlass.Constexpr[int], narrow: cute.Tensor):
        """Read fragment g of the warp's keys into column g % KEYS_AHEAD of `narrow`. A word: four columns of a key."""
        fragment = narrow[None, g % KEYS_AHEAD]
        fragment[0], fragment[1], fragment[2], fragment[3] = load_matrices(key_fragment(here, g, self.block))

    @cute.jit
    def widen_keys(self, n: cutlass.Constexpr[int], narrow: cute.Tensor, wide: cute.Tensor):
        """Widen half n of the fragments of K to f16, as WGMMA's first operand. A half is 16 columns of 16 keys; a lane
        has four columns of two keys."""
        words = cute.make_rmem_tensor((2,), Int32)
        for i in cutlass.range_constexpr(2):
            words[i] = narrow[2 * (n % 2) + i, n // 2 % KEYS_AHEAD]
        eight = cute.make_rmem_tensor((8,), self.p_dtype)
        eight.store(cute.recast_tensor(words, self.ring.dtype).load().to(self.p_dtype))
        pairs = cute.recast_tensor(eight, Int32)
        for i in cutlass.range_constexpr(4):
            # `pairs` has four columns of one key, then four of the other. WGMMA takes two columns of each key, then the
            # other two of each.
            wide[i, n % KEYS_WIDE] = pairs[2 * (i % 2) + i // 2]

    @cute.jit
    def mask_keys(self, s: cute.Tensor, b: Int32, piece: Described, t: Int32):
        """Set the scores of keys that a row does not see to -inf."""
        for i in cutlass.range_constexpr(2):
            key = b * self.block + t // 32 * 16 + t % 32 // 4 + 8 * i
            first_row = Int32(0)  # the first row that sees the key
            if const_expr(self.causal):
                first_row = (key + 1 - piece[Piece.FIRST_TOKEN_KEYS]) * self.heads - piece[Piece.ROW_IN_REQUEST]
            if key >= piece[Piece.KEYS]:
                first_row = Int32(ROWS)
            first_row -= t % 4 * 2
            for v in cutlass.range_constexpr(self.p_rows // 8):
                for e in cutlass.range_constexpr(2):
                    if 8 * v + e < first_row:
                        s[e, i, v] = -Float32.inf

    @cute.jit
    def mask_invisible_keys(self, s: cute.Tensor, b: Int32, piece: Described, t: Int32, visible_lens: cute.Tensor):
        """Set the scores of keys that a row does not see to -inf, if visible_lens says how many keys it sees."""
        first_key = b * self.block + t // 32 * 16 + t % 32 // 4
        for v in cutlass.range_constexpr(self.p_rows // 8):
            for e in cutlass.range_constexpr(2):
                limit = self.softmax.visible(piece, 8 * v + e + t % 4 * 2, visible_lens)
                for i in cutlass.range_constexpr(2):
                    if first_key + 8 * i >= limit:
                        s[e, i, v] = -Float32.inf

    @cute.jit
    def over_keys(self, combine: Combine, values: cute.Tensor, of_lanes: cute.Tensor, t: Int32):
        """Reduce the lanes' `values` of each row over all keys by `combine`. Threads 4 i to 4 i + 3 get rows 2 i and
        2 i + 1; threads past the last row get 0."""
        lane = t % 32
        pair = cute.make_rmem_tensor((2,), Float32)
        for v in cutlass.range_constexpr(self.p_rows // 8):
            for e in cutlass.range_constexpr(2):
                pair[e] = values[e, v]
            cute.autovec_copy(pair, of_lanes[None, 4 * v + lane % 4, t // 4 // 8 * 8 + lane // 4])
        sync_softmax()
        found = cute.make_rmem_tensor((2,), Float32)
        found.fill(0.0)
        if t < 2 * self.p_rows:
            cute.autovec_copy(of_lanes[None, t // 4, t % 4], found)
            for i in cutlass.range(1, SHARERS // 4, unroll=SHARERS // 4 - 1):
                cute.autovec_copy(of_lanes[None, t // 4, t % 4 + 4 * i], pair)
                for e in cutlass.range_constexpr(2):
                    found[e] = combine(found[e], pair[e])
            for e in cutlass.range_constexpr(2):
                for offset in cutlass.range_constexpr(2):
                    found[e] = combine(found[e], cute.arch.shuffle_sync_bfly(found[e], offset=1 << offset))
        return found
