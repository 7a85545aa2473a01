"""S^T = K Q^T, softmax and P of the sparse kernel.

K is widened to f16 in registers and multiplied by its scales there. The bf16 columns of packed rows keep their dtype if
queries are bf16, and become f16 if queries are f16 (for queries of e4m3 see scores_fp8.py). The gathering warps say
which keys of a block exist; the scores of the other keys are replaced by -inf.
"""

from __future__ import annotations

import operator

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, OperandSource

from tsmla_kernels.sm90.constants import LOG2_E
from tsmla_kernels.sm90.latent.key_softmax import Exchange, KeySoftmax, p_row
from tsmla_kernels.sm90.latent.memory import (
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
from tsmla_kernels.sm90.latent.query import two_halves
from tsmla_kernels.sm90.latent.scores import ScoreMma, ScoreWalk
from tsmla_kernels.sm90.latent.shape import ROWS
from tsmla_kernels.sm90.latent.softmax import RowResults, sync_softmax
from tsmla_kernels.sm90.latent.words import as_f16, times
from tsmla_kernels.sm90.sparse.config import PARTIALS_PAD, SparseConfig
from tsmla_kernels.sm90.sparse.greatest import NO_BLOCK, GreatestP, ReadBackSoftmax, tops_of
from tsmla_kernels.sm90.sparse.memory import (
    GATHER_ROWS,
    Arrays,
    Held,
    QueryOperands,
    QueryTile,
    Scratch,
    Step,
)
from tsmla_kernels.sm90.sparse.query import SparseQuery
from tsmla_kernels.sm90.sparse.reduction import KeyReduction
from tsmla_kernels.sm90.sparse.stages import Stages
from tsmla_kernels.sm90.warp import kept, load_matrices, remainder, uniform

EARLY_STEPS = 2  # 16-column steps of K Q^T that remain when the previous block's P V may begin
# Fragments of K (16 keys, 32 bytes) that a warp has in registers or is loading, in the cache's dtype. WGMMA reads a
# packed row's last four fragments, if they stay bf16, from these registers: none of the four must overwrite another.
KEYS_AHEAD = 4
KEYS_WIDE = 4  # steps of 16 columns that a warp has in registers as f16
FEWER_WIDE = 3  # the same if rows' greatest P take registers, and packed rows or further operands do
SCALES_EARLY = 2  # steps between reading a group's scales and their use
LEAST_BITS = 0xFF800000 - (1 << 32)  # -inf, as the bits of an f32


def key_row(lane: Int32, warp: Int32, pitch: int) -> Int32:
    """The byte offset in a stage of the row that a lane passes to ldmatrix: 16 of the first 32 bytes of a key."""
    return (warp * 16 + lane % 16) * pitch + lane // 16 * 16


class SparseScores:
    """K Q^T of gathered keys.

    Attributes:
      k_dtype: the dtype in which the cache's e4m3 columns are multiplied. keys_wide: KEYS_WIDE or FEWER_WIDE.
      greatest_p: takes rows' greatest P; None without greatest logits, or if P is also multiplied by two scales.
      fragments: the offsets of the 32-byte fragments in a row. steps: the Steps of K Q^T, in order.
    """

    def __init__(self, config: SparseConfig, stages: Stages) -> None:
        self.config, self.stages, self.pitch = config, stages, config.pitch
        self.ring = ring = stages.ring
        self.block, self.depth = ring.block, config.head_dim
        # A piece can have only one stage, so softmax warps can be too far ahead for the PIECE_BARRIERS barriers.
        self.sums_later = False
        self.p_rows, self.p_dtype, self.k_dtype = ring.p_rows, ring.p_dtype, ring.p_dtype
        self.greatest_p = GreatestP(ring) if config.max_logits and not config.two_scales else None
        more = config.layout == "v4" or (self.greatest_p is None and (config.lengths or config.sinks))
        self.keys_wide = FEWER_WIDE if config.max_logits and ring.p_rows == ROWS and more else KEYS_WIDE
        self.query = SparseQuery(config, ring)
        self.row_results = RowResults(config.shape, ring.inverses_kept)
        self.over_keys = KeyReduction(ring.p_rows).over_keys
        token_rows = config.num_heads if config.tokens > 1 else None
        self.key_softmax = KeySoftmax(ring.p_rows, ring.p_dtype, self.over_keys, token_rows)
        self.softmax: KeySoftmax | ReadBackSoftmax = self.key_softmax
        if self.greatest_p is not None:
            self.softmax = ReadBackSoftmax(self.key_softmax, self.greatest_p)
        narrow = config.e4m3_columns // 32
        rope = range((config.head_dim - config.e4m3_columns) // 16)
        self.fragments = [32 * g for g in range(narrow)] + [config.rope_offset + 32 * g for g in rope]
        group = config.scale_group
        self.steps = [Step(n // 2, n % 2, 16 * n // group if group else None) for n in range(2 * narrow)] + [
            Step(narrow + g, None, None) for g in rope
        ]

    def mma(self) -> ScoreMma:
        """The MMA of K Q^T of a block."""
        return ScoreMma(self.mma_of(self.k_dtype))

    def mma_of(self, dtype: type) -> cute.TiledMma:
        """The MMA of K Q^T of columns of this dtype."""
        k_major, shape = OperandMajorMode.K, (self.block, self.p_rows)
        return sm90.make_trivial_tiled_mma(
            dtype, dtype, k_major, k_major, Float32, (1, 1, 1), shape, OperandSource.RMEM
        )

    @cute.jit
    def score(self, arrays: Arrays, shared: Shared, scratch: Scratch, mma: ScoreMma):
        """Run warpgroup 0: see latent.scores.ScoreWalk."""
        ScoreWalk(self).run(self.begin(arrays, shared, scratch, mma), shared)

    @cute.jit
    def begin(self, arrays: Arrays, shared: Shared, scratch: Scratch, mma: ScoreMma) -> Held:
        """Request the first piece's Q, unless that has been done, and set up the softmax warpgroup's registers."""
        config = self.config
        tidx, _, _ = cute.arch.thread_idx()
        t = kept(tidx % 128)
        lane = t % 32
        warp_here = cute.arch.make_warp_uniform(t // 32)
        first, b_begin, b_end = self.ring.described(Int32(0), shared.pieces)
        if const_expr(not config.whole) and warp_here == 0 and b_begin != b_end:
            self.query.request(first[Piece.ROW], scratch.query)
        # The address is in a uniform register, as in Ring.address, because the steps' descriptors are made from it.
        q_place = uniform(scratch.query.place.toint())
        signals, exchange = Int32(self.ring.signals(lane)), scratch.exchange
        out_scale = arrays.scales[1] if const_expr(config.layout == "plain") else Float32(1.0)
        results = Results(
            inverse=shared.inverse, lse=arrays.lse, partial_lse=arrays.partial_lse, out_scale=out_scale, rank=Int32(0),
            sinks=arrays.sinks, max_logits=arrays.max_logits,
        )  # fmt: skip

        mma_qk, t_q, mma_16, t_q_16 = self.query_operands(mma.main, q_place, t)
        acc = cute.make_rmem_tensor(mma_qk.get_slice(t).partition_shape_C((self.block, self.p_rows)), Float32)
        part, narrow, wide = self.registers_of_keys(acc)
        factors = cute.make_rmem_tensor((2,), Int32)
        k_offset = kept(key_row(lane, warp_here, self.pitch))
        first_key = warp_here * 16 + lane // 4
        of_key = first_key * self.pitch if const_expr(config.layout == "v32") else self.stages.scale_place(first_key)
        scales_offset = kept(of_key + config.scales_offset)
        p_offset = kept(self.ring.p_offset + p_row(lane, warp_here))
        p_words = cute.make_rmem_tensor((2, self.p_rows // 8), Int32)
        of_a_warp = self.p_rows + PARTIALS_PAD
        exchanged = Exchange(
            cute.make_tensor(exchange, cute.make_layout((2, self.p_rows // 2, 4), stride=(1, 2, of_a_warp))),
            cute.make_tensor(exchange + 4 * of_a_warp, cute.make_layout((4, self.p_rows // 2))),
            cute.make_tensor(exchange + 4 * of_a_warp + 2 * self.p_rows, cute.make_layout((self.p_rows, 1))),
        )
        l = cute.make_rmem_tensor(cute.make_layout((2, self.p_rows // 8)), Float32)
        m = cute.make_rmem_tensor(l.layout, Float32)
        words = self.p_rows // 8 if self.greatest_p is None else 1
        highest = cute.make_rmem_tensor((words,), Int32) if const_expr(config.max_logits) else None
        place = Place(t, warp_here, lane, lane % 4 * 2)
        return Held(
            mma_qk=mma_qk,
            t_q=t_q,
            mma_16=mma_16,
            t_q_16=t_q_16,
            query=scratch.query,
            acc=acc,
            part=part,
            narrow=narrow,
            wide=wide,
            factors=factors,
            k_offset=k_offset,
            scales_offset=scales_offset,
            p_offset=p_offset,
            p_words=p_words,
            exchanged=exchanged,
            running=Running(m, l, highest),
            valid=scratch.valid,
            of_tokens=scratch.of_tokens,
            scales=arrays.scales,
            results=results,
            place=place,
            signals=signals,
        )

    def query_operands(self, mma_qk: cute.TiledMma, q_place: Int32, t: Int32) -> QueryOperands:
        """The QueryOperands for the Q at `q_place`. The second MMA is for columns that are multiplied as bf16."""
        q = QueryTile(self.k_dtype, self.query.swizzle, self.depth)
        t_q = self.query_operand(mma_qk, q, q_place, t)
        if not self.config.bf16_columns:
            return QueryOperands(mma_qk, t_q, mma_qk, t_q)
        mma_16 = self.mma_of(self.ring.q_dtype)
        mma_16.set(Field.ACCUMULATE, True)
        t_q_16 = self.query_operand(mma_16, q._replace(dtype=self.ring.q_dtype), q_place, t)
        return QueryOperands(mma_qk, t_q, mma_16, t_q_16)

    def query_operand(self, mma: cute.TiledMma, tile: QueryTile, place: Int32, t: Int32) -> cute.Tensor:
        """Q at `place` as the operand of `mma`."""
        atom = warpgroup.make_smem_layout_atom(tile.swizzle, tile.dtype)
        layout = cute.tile_to_shape(atom, (self.p_rows, tile.columns), (0, 1))
        pointer = cute.make_ptr(tile.dtype, place, cute.AddressSpace.smem, assumed_align=1024)
        s_q = cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=tile.dtype), layout.outer)
        return mma.make_fragment_B(mma.get_slice(t).partition_B(s_q))

    def registers_of_keys(self, acc: cute.Tensor) -> tuple[cute.Tensor | None, cute.Tensor, cute.Tensor | None]:
        """`part`, `narrow` and `wide` of Held. `part` is None: it is not used."""
        narrow, wide = (cute.make_rmem_tensor((4, count), Int32) for count in (KEYS_AHEAD, self.keys_wide))
        return None, narrow, wide

    @cute.jit
    def wait_for_piece(self, number: Int32, index: Int32, phase: Int32, shared: Shared):
        """Wait until piece `number` has been described. For the second piece this means to wait until its first stage
        is full. The first one is described before the warps take their roles, and the others early enough (see
        DESIGN.md, Prefill), so their rows may arrive while Q is taken."""
        if number == 1:
            cute.arch.mbarrier_wait(shared.full + index, phase)

    @cute.jit
    def take_q(self, piece: Described, number: Int32, index: Int32, phase: Int32, held: Held, shared: Shared) -> Taken:
        """Wait for Q, and convert it to the form in which it is multiplied. Q is requested here, unless the piece is
        the first or request_next has requested its Q."""
        t, query = held.place.thread, held.query
        if const_expr(not (self.config.early_q and self.config.whole)):
            # With early_q, later pieces' Q has been requested by request_next.
            not_requested = number == 1 if const_expr(self.config.early_q) else number > 0
            if not_requested:
                # All four warps have read the previous Q: they have met since their last product with that Q.
                if held.place.warp == 0:
                    self.query.request(piece[Piece.ROW], query)
        scale = held.scales[0] * LOG2_E  # loaded before the waits below, to overlap them
        if const_expr(self.config.layout == "plain"):
            scale = scale * held.scales[1]
        sync_softmax()  # before the maxima that finish_piece has read are overwritten
        if t < self.p_rows:
            held.exchanged.maxima[t, 0] = Float32(0.0)
        cute.arch.mbarrier_wait(query.full, number & 1)
        place = query.place.toint()
        rows = query.q.iterator.toint() + cutlass.Int64(piece[Piece.ROW]) * self.query.row_bytes
        factor = self.query.keep(place, (place, rows), piece[Piece.VALID_ROWS], t, held.exchanged.changes)
        return Taken(index, phase, scale * factor)

    @cute.jit
    def score_blocks(self, blocks: Blocks, number: Int32, taken: Taken, held: Held, shared: Shared) -> Scored:
        """Compute K Q^T, softmax and P of a piece's blocks."""
        place, running = held.place, held.running
        # Modes: query row of two, key of two, and the index of a group of eight query rows.
        s = cute.make_tensor(held.acc.iterator, cute.make_layout((2, 2, self.p_rows // 8), stride=(1, 2, 4)))
        index, phase = taken.index, taken.phase
        running.l.fill(0.0)
        if const_expr(self.config.max_logits):
            running.highest.fill(0 if self.greatest_p is None else NO_BLOCK)
        previous, address = index, self.ring.address(shared.keys, index)
        following, phase_following = self.ring.advance(index, phase)
        arrived, stored = Int32(0), Int32(0)
        fresh = Int32((1 << self.config.tokens) - 1)  # a bit for each token: whether it has seen no key
        exist = cute.make_rmem_tensor((4,), Int32)
        for b in cutlass.range(blocks.begin, blocks.end, unroll=1):
            if arrived == 0:
                cute.arch.mbarrier_wait(shared.full + index, phase)
            self.multiply(address, stored, previous, held, shared)
            # The maxima are loaded before the product ends, because the load takes time.
            for v in cutlass.range_constexpr(self.p_rows // 8):
                two_rows(held.exchanged.maxima, Int32(0), v, place.lane, running.m[None, v])
            warpgroup.wait_group(0)
            cute.autovec_copy(held.valid[None, index], exist)
            previous, index, phase = index, following, phase_following
            address_here = address
            ahead = self.ring.look_ahead(index, phase, shared)
            arrived, address = ahead.arrived, ahead.address
            following, phase_following = ahead.following, ahead.phase
            if const_expr(self.config.two_scales):
                self.scale_keys(s, b, held)
            # A row has no maximum before its first key.
            if const_expr(self.config.tokens > 1):
                self.mask_tokens(s, previous, held)
                first = fresh & (exist[0] | exist[1] | exist[2] | exist[3])
            else:
                if (exist[0] & exist[1] & exist[2] & exist[3]) != (1 << GATHER_ROWS) - 1:
                    self.mask_keys(s, held.valid[place.warp, previous], place.lane)
                first = fresh & Int32((exist[0] | exist[1] | exist[2] | exist[3]) != 0)
            fresh = fresh ^ first
            self.softmax.softmax_of_keys(s, first, taken.scale, held, shared, previous)
            if const_expr(self.config.two_scales):
                self.scale_p(b, held)
            self.key_softmax.store_p_of_keys(address_here + held.p_offset, held.p_words)
            if const_expr(self.config.early_p):
                # The piece's last P is signalled when its rows' factors have been written.
                self.ring.signal_if(held.signals & Int32(b + 1 < blocks.end), shared.ready, previous)
            else:
                stored = held.signals
        if const_expr(self.greatest_p is not None):
            sync_softmax()  # the last P has been stored, and `changes` have been read
            self.greatest_p.finish(
                previous, kept(place.thread), running.highest, tops_of(held.exchanged, self.p_rows), shared
            )
        if const_expr(self.config.early_q):
            self.request_next(number, held, shared)
        return Scored(index, phase, previous)

    @cute.jit
    def request_next(self, number: Int32, held: Held, shared: Shared):
        """Request the Q of the piece after piece `number`. All four warps have finished the last K Q^T of piece
        `number`, because they voted after it. After the first piece nothing is requested unless `whole`, because the
        second one may not have been described yet."""
        if number > (-1 if self.config.whole else 0) and held.place.warp == 0:
            following, b_begin, b_end = self.ring.described(number + 1, shared.pieces)
            if b_begin != b_end:
                self.query.request(following[Piece.ROW], held.query)

    @cute.jit
    def further_scale(self, i: cutlass.Constexpr[int], b: Int32, held: Held) -> Float32:
        """The scale of the cache that has the lane's i-th key of block b, divided by the first cache's scale."""
        scale = Float32(1.0)
        if b * self.block + held.place.warp * 16 + held.place.lane // 4 + 8 * i >= self.config.window:
            scale = held.scales[2] / held.scales[1]
        return scale

    @cute.jit
    def scale_keys(self, s: cute.Tensor, b: Int32, held: Held):
        """Multiply the scores of the second cache's keys by the second cache's scale divided by the first cache's."""
        for i in cutlass.range_constexpr(2):
            scale = self.further_scale(i, b, held)
            for v in cutlass.range_constexpr(self.p_rows // 8):
                for e in cutlass.range_constexpr(2):
                    s[e, i, v] = s[e, i, v] * scale

    @cute.jit
    def scale_p(self, b: Int32, held: Held):
        """Multiply the P of the second cache's keys by the second cache's scale divided by the first cache's."""
        for i in cutlass.range_constexpr(2):
            scale = self.further_scale(i, b, held)
            for v in cutlass.range_constexpr(self.p_rows // 8):
                held.p_words[i, v] = times(held.p_words[i, v], two_halves(scale, scale))

    @cute.jit
    def multiply(self, address: Int32, stored: Int32, previous: Int32, held: Held, shared: Shared):
        """Issue K Q^T of the stage at `address` into `acc`. Before the last steps, let the value warps begin the
        previous block's P V."""
        mma_qk, acc, narrow, wide = held.mma_qk, held.acc, held.narrow, held.wide
        a_shape = mma_qk.get_slice(held.place.thread).partition_shape_A((self.block, 16))
        here = address + held.k_offset
        for g in cutlass.range_constexpr(KEYS_AHEAD):
            self.read_keys(here, g, narrow)
        scales, factors = address + held.scales_offset, held.factors
        if const_expr(self.config.scale_group > 0):
            self.read_factors(scales, 0, factors)
            self.make_pairs(factors)
        awaited = cute.make_rmem_tensor((2,), Int32)  # the next group's scales
        mma_qk.set(Field.ACCUMULATE, False)
        for n in cutlass.range_constexpr(len(self.steps)):
            step = self.steps[n]
            if const_expr(n >= self.keys_wide):
                warpgroup.wait_group(self.keys_wide - 1)
            self.widen_keys(n, narrow, wide, held.factors)
            if const_expr(self.ends_group(n + SCALES_EARLY)):
                self.read_factors(scales, step.group + 1, awaited)
            if const_expr(self.ends_group(n)):
                for i in cutlass.range_constexpr(2):
                    factors[i] = awaited[i]
                self.make_pairs(factors)
            if const_expr(step.half != 0 and step.fragment + KEYS_AHEAD < len(self.fragments)):
                self.read_keys(here, step.fragment + KEYS_AHEAD, narrow)
            if const_expr(n == len(self.steps) - EARLY_STEPS and not self.config.early_p):
                # Let the value warps begin the previous block's P V, as in Scores16bit.
                self.ring.signal_if(stored, shared.ready, previous)
            warpgroup.fence()
            if const_expr(step.half is None and self.config.bf16_columns):
                of_keys, dtype = narrow[None, step.fragment % KEYS_AHEAD], self.ring.q_dtype
            else:
                of_keys, dtype = wide[None, n % self.keys_wide], self.p_dtype
            a = cute.make_tensor(cute.recast_ptr(of_keys.iterator, dtype=dtype), cute.make_layout(a_shape))
            if const_expr(step.half is None and self.config.bf16_columns):
                cute.gemm(held.mma_16, acc, a[None, None, 0], held.t_q_16[None, None, n], acc)
            else:
                cute.gemm(mma_qk, acc, a[None, None, 0], held.t_q[None, None, n], acc)
            mma_qk.set(Field.ACCUMULATE, True)
            warpgroup.commit_group()

    def zero_keys(self, piece: Described, b_end: Int32, last: Int32, held: Held, shared: Shared) -> None:
        """Do nothing: gathering warps zero the rows that do not exist."""

    @cute.jit
    def finish_piece(self, piece: Described, number: Int32, held: Held, shared: Shared):
        """Add up the row sums over all keys. Write the rows' factors for the epilogue, their log-sum-exps and, if the
        call returns them, greatest logits."""
        t = kept(held.place.thread)  # so that rows' addresses are computed again for each piece, and need no registers
        tops = (None, None)
        if const_expr(self.config.max_logits and self.greatest_p is None):
            greatest = cute.make_rmem_tensor((self.p_rows // 4,), Float32)
            greatest.store(cute.recast_tensor(held.running.highest, self.p_dtype).load().to(Float32))
            tops = self.over_keys(cute.arch.fmax, greatest, held.exchanged.of_lanes, t)
            sync_softmax()  # before the partials are overwritten
        sinks = self.sinks_of(piece, t, held)  # before the sums, because loads take time
        totals = self.over_keys(operator.add, held.running.l, held.exchanged.of_lanes, t)
        if t % 4 == 0 and t < 2 * self.p_rows:
            for e in cutlass.range_constexpr(2):
                row = t // 2 + e
                maximum = held.exchanged.maxima[row, 0]
                highest = None
                if const_expr(self.config.max_logits):
                    top = tops[e] if const_expr(self.greatest_p is None) else tops_of(held.exchanged, self.p_rows)[row]
                    highest = maximum + cute.math.log2(top, fastmath=True)
                self.row_results.finish_row(row, (totals[e], maximum), piece, number, held.results, sinks[e], highest)

    @cute.jit
    def sinks_of(self, piece: Described, t: Int32, held: Held) -> cute.Tensor | tuple[None, None]:
        """The sinks of the two rows that thread t finishes; None for each if heads have no sinks."""
        sinks = (None, None)
        if const_expr(self.config.sinks):
            sinks = cute.make_rmem_tensor((2,), Float32)
            for e in cutlass.range_constexpr(2):
                if const_expr(self.config.tokens > 1):
                    head = remainder(t // 2 + e, self.config.num_heads)
                else:
                    # Rows past the last head also have sums; they read the last head's sink.
                    head = cutlass.min(piece[Piece.ROW_IN_REQUEST] + t // 2 + e, self.config.num_heads - 1)
                sinks[e] = held.results.sinks[head]
        return sinks

    @cute.jit
    def read_keys(self, here: Int32, g: cutlass.Constexpr[int], narrow: cute.Tensor):
        """Read fragment g of this warp's keys into its column of `narrow`."""
        fragment = narrow[None, g % KEYS_AHEAD]
        fragment[0], fragment[1], fragment[2], fragment[3] = load_matrices(here + self.fragments[g])

    def ends_group(self, n: int) -> bool:
        """Whether step n is the last one of a group of columns with one scale, and another such group follows."""
        group = self.steps[n].group if n + 1 < len(self.steps) else None
        return group is not None and self.steps[n + 1].group == group + 1

    @cute.jit
    def read_factors(self, address: Int32, group: cutlass.Constexpr[int], factors: cute.Tensor):
        """Read the scales of the lane's two keys for a group of columns. `address` is that of the first key's scale for
        group 0."""
        dtype = Float32 if self.config.layout == "v32" else cutlass.Uint16
        for i in cutlass.range_constexpr(2):
            if const_expr(self.config.layout == "v32"):
                there = address + (i * (8 * self.pitch) + 4 * group)
            else:
                there = address + (i * self.stages.scale_place(8) + group * self.stages.scales_of_group)
            pointer = cute.make_ptr(dtype, there, cute.AddressSpace.smem, assumed_align=dtype.width // 8)
            number = cute.make_tensor(pointer, cute.make_layout(1))[0]
            factors[i] = number.bitcast(Int32) if const_expr(self.config.layout == "v32") else Int32(number)

    def make_pairs(self, factors: cute.Tensor) -> None:
        """Convert each scale that read_factors has read to a pair of equal f16."""
        for i in range(2):
            if self.config.layout == "v32":
                number = factors[i].bitcast(Float32)
                factors[i] = two_halves(number, number)
            else:
                factors[i] = Int32(cute.arch.prmt(factors[i], factors[i], 0x1010))

    @cute.jit
    def widen_keys(self, n: cutlass.Constexpr[int], narrow: cute.Tensor, wide: cute.Tensor, factors: cute.Tensor):
        """Convert step n of K to f16, as WGMMA's first operand. A step is 16 columns of the warp's 16 keys; a lane has
        four columns of two keys."""
        fragment, half, group = self.steps[n]
        if const_expr(half is None and self.config.bf16_columns):
            pass  # WGMMA takes these in the dtype in which they were read
        elif const_expr(half is None):
            for i in cutlass.range_constexpr(4):
                wide[i, n % self.keys_wide] = as_f16(narrow[i, fragment % KEYS_AHEAD], self.config.kv_dtype)
        else:
            words = cute.make_rmem_tensor((2,), Int32)
            for i in cutlass.range_constexpr(2):
                words[i] = narrow[2 * half + i, fragment % KEYS_AHEAD]
            eight = cute.make_rmem_tensor((8,), self.p_dtype)
            eight.store(cute.recast_tensor(words, self.ring.dtype).load().to(self.p_dtype))
            pairs = cute.recast_tensor(eight, Int32)
            for i in cutlass.range_constexpr(4):
                # Reorder four columns of one key, then four of the other, to two columns of each key, then the other
                # two of each.
                pair = pairs[2 * (i % 2) + i // 2]
                if const_expr(group is not None):
                    pair = times(pair, factors[i % 2])
                wide[i, n % self.keys_wide] = pair

    @cute.jit
    def mask_keys(self, s: cute.Tensor, exist: Int32, lane: Int32):
        """Set the scores of this warp's keys that do not exist to -inf."""
        for i in cutlass.range_constexpr(2):
            if ((exist >> (lane // 4 + 8 * i)) & 1) == 0:
                for v in cutlass.range_constexpr(self.p_rows // 8):
                    for e in cutlass.range_constexpr(2):
                        s[e, i, v] = -Float32.inf

    @cute.jit
    def mask_tokens(self, s: cute.Tensor, index: Int32, held: Held):
        """Set each score of stage `index` whose row's token does not select the key to -inf. There are no branches,
        because in nearly every block each token has such keys."""
        numbers = cute.make_tensor(cute.recast_ptr(s.iterator, dtype=Int32), s.layout)
        eights, least = self.config.num_heads // 8, Int32(LEAST_BITS)
        for i in cutlass.range_constexpr(2):
            of_tokens = Int32(held.of_tokens[held.place.warp * GATHER_ROWS + held.place.lane // 4 + 8 * i, index])
            for token in cutlass.range_constexpr(self.config.tokens):
                kept_bits = -((of_tokens >> token) & 1)
                for v in cutlass.range_constexpr(token * eights, (token + 1) * eights):
                    for e in cutlass.range_constexpr(2):
                        numbers[e, i, v] = (numbers[e, i, v] & kept_bits) | (least & ~kept_bits)
