"""Absorbed MLA decode with queries and a paged latent cache of e4m3, for Hopper. DESIGN.md says why it is so.

Four warpgroups of a CTA share 64 query rows (token * H + head) and a ring of 64-key stages:

  warpgroup 0   scores: S = Q K^T (fp8 WGMMA), softmax, P into shared memory as f16
  1 and 2       values: O^T[half] += V^T[half] P^T (f16 WGMMA), V^T through registers: transposed by ldmatrix, widened
                there; rescale, epilogue. First warp of 2: the schedule
  3             one warp: the copies

P is not rounded to fp8, which would be most of the output's error. Merging is decode_combine's.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, OperandSource, SmemLayoutAtomKind

from tsmla_kernels.sm90.decode.config import ROWS, DecodeConfig
from tsmla_kernels.sm90.decode.kernel import DecodeKernel
from tsmla_kernels.sm90.decode.memory import (
    COPY_STATE_WORDS,
    Arrays,
    Copies,
    CopyState,
    KeyRange,
    Piece,
    Place,
    Results,
    Running,
    Schedule,
    Scored,
    Scores,
    Stage,
    Taken,
    Tma,
)
from tsmla_kernels.sm90.decode.ring import TABLE_AHEAD
from tsmla_kernels.sm90.decode.schedule import MAX_SORTED, STATE_WORDS
from tsmla_kernels.sm90.warp import LOG2_E, element, quotient

OVERHEAD = 5  # what starting a piece costs, in key blocks: Q, the first keys' latency, the epilogue
RESCALE_BITS = 8.0  # how far the running maximum may lag: P of f16 holds that much, and rounds it no worse
EARLY_STEPS = 8  # 32-column steps of Q K^T that are still to come when the values' warpgroups are let loose
AHEAD = 2  # fragments of V^T, 64 latents of 32 keys each, that a warpgroup has in registers as fp8, or on their way
WIDE = 4  # of their halves, 16 keys each, that it has there as f16


class HeldFp8(NamedTuple):
    """What the softmax warpgroup holds from piece to piece.

    Attributes:
      mma_qk: Q K^T. q: Q in shared memory. t_q: the same, as its operand.
      acc, probabilities: S and P of a block, which may be one. r_p: P as it is stored.
      p_offset: where the lane's row of P lies in a stage.
      running: the rows' maxima and sums. scale: of the logits, base 2. results: where rows are finished.
      place: of the thread. signals: 1 if its lane arrives in `signal`.
    """

    mma_qk: cute.TiledMma
    q: cute.Tensor
    t_q: cute.Tensor
    acc: cute.Tensor
    probabilities: cute.Tensor
    r_p: cute.Tensor
    p_offset: Int32
    running: Running
    scale: Float32
    results: Results
    place: Place
    signals: Int32


class HeldValues(NamedTuple):
    """What a value warpgroup holds from piece to piece.

    Attributes:
      mma_pv: V^T P^T. acc, o: O^T, as it has it, and by query rows and latents.
      wide: halves of V^T's fragments as f16. narrow: fragments as fp8.
      offset: where the lane's first values lie in a stage.
      thread, lane: in the warpgroup and in the warp.
    """

    mma_pv: cute.TiledMma
    acc: cute.Tensor
    o: cute.Tensor
    r_v: cute.Tensor
    narrow: cute.Tensor
    offset: Int32
    thread: Int32
    lane: Int32


class Reading(NamedTuple):
    """Where values are read: this block's and the next one's address; whether that one's keys must be awaited, and by
    which barrier and parity."""

    here: Int32
    next_here: Int32
    awaited: Int32
    full: cute.Pointer
    phase: Int32


class LatentPlace(NamedTuple):
    """What a lane of a value warpgroup stores: its first latent, and the column of `inverse` with its rows' factors."""

    kept: Int32
    first_latent: Int32
    lane: Int32


class OutRows(NamedTuple):
    """The rows of a lane that are stored: their factors lie in column `kept` of `inverse`; `valid` rows count."""

    inverse: cute.Tensor
    kept: Int32
    lane: Int32
    valid: Int32


class MlaDecodeFp8(DecodeKernel):
    """One compiled decode: `config` is static, all shapes but H, L, R and Z are dynamic.

    Operands of the launcher: as MlaDecode's, q and kv_cache of e4m3, out of bf16.
    """

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config, cutlass.Float8E4M3FN, cutlass.Float16)
        self.partial_is_lane_order = False
        self.keys_swizzle = self.q_swizzle = SmemLayoutAtomKind.K_SW64
        self.p_swizzle = SmemLayoutAtomKind.K_SW128
        self.p_offset = self.block * self.depth
        self.overhead = OVERHEAD
        self.pieces_kept, self.lookahead = 8, 4
        self.m_tiles = self.half // 64  # of a values' warpgroup
        self.kept_rows, self.kept_dtype = ROWS, self.dtype  # of Q where it stays
        self.loads_keys = False  # whether the scores' warps read keys by ordinary loads, and not by WGMMA
        self.rescale_bits = RESCALE_BITS
        self.inverses_kept = self.stages // 2 + 1  # a piece takes two stages or more
        # With few rows the scores are what the others wait for; with many, registers and instructions are dear.
        self.speculates = self.p_rows < ROWS
        self.threads, self.releasing_lanes = 512, 4
        # Scores, values, copies: what 512 threads start with.
        self.registers = (104, 192, 24) if self.p_rows == ROWS else (120, 184, 24)

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
        q: cute.Tensor,
        kv_cache: cute.Tensor,
        block_tables: cute.Tensor,
        seq_lens: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        scales: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        split_info: cute.Tensor,
    ):
        tma = self.tensor_maps(q, kv_cache)
        k_major = OperandMajorMode.K
        mma_qk = self.score_mma()
        # Latents are its rows, query rows its columns.
        mma_pv = sm90.make_trivial_tiled_mma(
            self.p_dtype, self.p_dtype, k_major, k_major, Float32, (1, 1, 1), (64, self.p_rows), OperandSource.RMEM
        )

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, self.stages]
            empty: cute.struct.MemRange[Int64, self.stages]
            ready: cute.struct.MemRange[Int64, self.stages]
            pieces: cute.struct.MemRange[Int32, self.pieces_kept * len(Piece)]
            rescale: cute.struct.Align[cute.struct.MemRange[Float32, self.stages * ROWS], 16]
            moved: cute.struct.Align[cute.struct.MemRange[Int32, self.stages * 4], 16]
            inverse: cute.struct.Align[cute.struct.MemRange[Float32, self.inverses_kept * ROWS], 16]
            schedule_state: cute.struct.MemRange[Int32, STATE_WORDS]
            copy_state: cute.struct.MemRange[Int32, COPY_STATE_WORDS]
            pages: cute.struct.MemRange[Int32, TABLE_AHEAD]
            exchange: cute.struct.Align[cute.struct.MemRange[Float32, self.config.exchanged_words], 16]
            q: cute.struct.Align[cute.struct.MemRange[self.kept_dtype, self.kept_rows * self.depth], 1024]
            ring: cute.struct.Align[cute.struct.MemRange[self.dtype, self.stages * self.stage_elements], 1024]

        self.check_storage(Storage)
        num_clusters = self.num_clusters(seq_lens, split_info)
        attend = self.attend(
            q, *tma, block_tables, seq_lens, cu_seqlens_q, scales, out, lse,
            partial_out, partial_lse, split_info, mma_qk, mma_pv, num_clusters,
        )  # fmt: skip
        self.launch(attend, num_clusters, stream, partial_out, partial_lse, split_info, out, lse)

    @cute.kernel
    def attend(
        self,
        q: cute.Tensor,
        tma_q: cute.CopyAtom,
        tma_q_tensor: cute.Tensor,
        tma_k: cute.CopyAtom,
        tma_k_tensor: cute.Tensor,
        block_tables: cute.Tensor,
        seq_lens: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        scales: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        split_info: cute.Tensor,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        num_clusters: Int32,
    ):
        """One CTA: set up the barriers, find the first piece of work, then each warpgroup its role."""
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tidx // 128)
        rank = cute.arch.make_warp_uniform(block_idx % self.cluster)
        cluster_index = cute.arch.make_warp_uniform(block_idx // self.cluster)

        early = self.early_numbers(seq_lens, cu_seqlens_q)
        smem = utils.SmemAllocator()
        storage = smem.allocate(self.storage)
        ring = self.ring_of(storage)

        if warp_idx == 12:
            cpasync.prefetch_descriptor(tma_q)
            cpasync.prefetch_descriptor(tma_k)
        if warp_idx >= 13:
            self.prefetch_operands(q, block_tables, warp_idx - 13)
        if warp_idx == 0:
            self.init_barriers(ring)
        self.sync_barriers()

        state = storage.schedule_state.get_tensor(cute.make_layout(STATE_WORDS))
        # In the stage that Q comes to, which no other CTA fills.
        order = cute.make_tensor(
            cute.recast_ptr(storage.ring.data_ptr(), dtype=Int32), cute.make_layout(MAX_SORTED)
        )
        schedule = Schedule(
            block_tables, seq_lens, cu_seqlens_q, partial_lse, split_info, ring.pieces, state, num_clusters,
            cluster_index, rank, lse.shape[0], order,
        )  # fmt: skip
        copies = Copies(
            Tma(tma_q, tma_q_tensor, tma_k, tma_k_tensor), block_tables, ring.keys, ring.pieces,
            storage.copy_state.get_tensor(cute.make_layout(COPY_STATE_WORDS)),
            storage.pages.get_tensor(cute.make_layout(TABLE_AHEAD)), ring.full, rank,
        )  # fmt: skip
        arrays = Arrays(
            block_tables, seq_lens, cu_seqlens_q, scales, out, lse, partial_out, partial_lse, split_info
        )
        if warp_idx == 12:
            self.begin_schedule(schedule, early)
            self.next_piece(Int32(0), schedule)
            self.begin_copies(copies)
        cute.arch.sync_threads()
        if group == 3:
            cute.arch.setmaxregister_decrease(self.registers[2])
            if warp_idx == 12:
                self.copy(ring.empty, copies)
        else:
            if group == 0:
                cute.arch.setmaxregister_decrease(self.registers[0])
                q_tile = cute.tile_to_shape(
                    warpgroup.make_smem_layout_atom(self.q_swizzle, self.kept_dtype),
                    (self.kept_rows, self.depth), (0, 1),
                )  # fmt: skip
                s_q = storage.q.get_tensor(q_tile.outer, swizzle=q_tile.inner)
                self.score(arrays, ring, (s_q, storage.exchange.data_ptr()), mma_qk, rank)
            else:
                cute.arch.setmaxregister_increase(self.registers[1])
                self.accumulate(arrays, ring, mma_pv, group - 1, warp_idx, schedule)
            # Idle warps must not signal: `combine` would launch immediately and occupy the SM while waiting.
            cute.arch.griddepcontrol_launch_dependents()
        self.end()

    # ---- copies (one warp)

    @cute.jit
    def copy(self, empty: cute.Pointer, copies: cutlass.Constexpr):
        """Fill the ring, and each stage again when all have released it, to the end of this cluster's work."""
        state = copies.state
        self.fill_ring(copies)
        index, phase = Int32(0), Int32(0)
        while state[CopyState.ENDED] == 0:
            cute.arch.mbarrier_wait(empty + index, phase)
            self.produce(index, copies)
            index, phase = self.advance(index, phase)

    # ---- scores and softmax

    def score_mma(self) -> cute.TiledMma:
        """Q K^T of a block."""
        k_major = OperandMajorMode.K
        return sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, k_major, k_major, Float32, (1, 1, 1), (ROWS, self.block)
        )

    @cute.jit
    def begin_scores(
        self,
        arrays: cutlass.Constexpr,
        ring: cutlass.Constexpr,
        q: cutlass.Constexpr,
        mma_qk: cute.TiledMma,
        rank: Int32,
    ):
        """What the softmax warpgroup holds from piece to piece, a HeldFp8. `q` is Q's place in shared memory first."""
        s_q = q[0]
        tidx, _, _ = cute.arch.thread_idx()
        t = tidx % 128
        lane = self.kept(t % 32)
        signals = Int32(self.signals(lane))
        warp_here = cute.arch.make_warp_uniform(t // 32)
        scale = arrays.scales[0] * LOG2_E
        results = Results(ring.inverse, arrays.lse, arrays.partial_lse, arrays.scales[1], rank)

        t_q = mma_qk.make_fragment_A(mma_qk.get_slice(t).partition_A(s_q))
        acc = cute.make_rmem_tensor(mma_qk.get_slice(t).partition_shape_C((ROWS, self.block)), Float32)
        probabilities = cute.make_rmem_tensor(acc.layout, Float32) if const_expr(self.speculates) else acc

        # A lane's row of P, of 128 bytes: its first 16 bytes, or the second, exchanged by the swizzle.
        r_p = cute.make_rmem_tensor(acc.layout, self.p_dtype)
        p_row = warp_here * 16 + lane % 16
        p_offset = self.kept(self.p_offset + p_row * 128 + (((lane // 16) ^ (p_row & 7)) << 4))

        place = Place(t, warp_here, lane, warp_here * 16 + lane // 4)
        running = Running(cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32))
        return HeldFp8(mma_qk, s_q, t_q, acc, probabilities, r_p, p_offset, running, scale, results, place, signals)

    @cute.jit
    def take_q(
        self,
        piece: cutlass.Constexpr,
        number: Int32,
        stage: cutlass.Constexpr,
        held: cutlass.Constexpr,
        ring: cutlass.Constexpr,
    ):
        """Q from its stage to where it stays, in 16-byte words: the same bytes in the same order."""
        t = held.place.thread
        q_words = cute.make_layout((4, 128, ROWS * self.depth // (16 * 128)), stride=(1, 4, 512))
        plain = cute.make_swizzle(0, 4, 3)
        q_there = cute.make_tensor(cute.recast_ptr(held.q.iterator, plain, dtype=Float32), q_words)
        word = cute.make_rmem_tensor((4,), Float32)
        q_here = cute.make_tensor(
            cute.recast_ptr(ring.keys[None, None, stage.index].iterator, plain, dtype=Float32), q_words
        )
        # All four warps have read the Q that is there.
        self.sync_softmax()
        for i in cutlass.range(cute.size(q_words, mode=[2]), unroll=3):
            cute.autovec_copy(q_here[None, t, i], word)
            cute.autovec_copy(word, q_there[None, t, i])
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync_softmax()
        self.q_is_read(number)
        self.signal(ring.ready, stage.index, held.place.lane)
        index, phase = self.advance(stage.index, stage.phase)
        return Taken(index, phase, held.scale)

    @cute.jit
    def score_blocks(
        self,
        piece: cutlass.Constexpr,
        number: Int32,
        blocks: cutlass.Constexpr,
        taken: cutlass.Constexpr,
        held: cutlass.Constexpr,
        ring: cutlass.Constexpr,
    ):
        """Q K^T, softmax and P of a piece's key blocks."""
        mma_qk, acc = held.mma_qk, held.acc
        place, running = held.place, held.running
        by_rows = cute.make_layout((2, (2, self.block // 8)), stride=(2, (1, 4)))
        scores = Scores(
            cute.make_tensor(acc.iterator, by_rows), cute.make_tensor(held.probabilities.iterator, by_rows)
        )
        steps = self.depth // 32
        index, phase = taken.index, taken.phase
        self.begin_rows(running)
        seen_by_all = self.seen_by_all(piece)
        previous, address = index, self.address(ring.keys, index)
        following, phase_following = self.advance(index, phase)
        arrived, stored = Int32(0), Int32(0)
        # The blocks with a mask in a loop of their own: to jump over it takes 20 cycles of the others.
        unmasked = cutlass.min(cutlass.max(quotient(seen_by_all, self.block), blocks.begin), blocks.end)
        for masked in cutlass.range_constexpr(2):
            first, last = (blocks.begin, unmasked) if const_expr(masked == 0) else (unmasked, blocks.end)
            for b in cutlass.range(first, last, unroll=1):
                stage_keys, _ = self.stage_tensors(ring, address)
                t_k = mma_qk.make_fragment_B(mma_qk.get_slice(place.thread).partition_B(stage_keys))
                if arrived == 0:
                    cute.arch.mbarrier_wait(ring.full + index, phase)
                warpgroup.fence()
                mma_qk.set(Field.ACCUMULATE, False)
                for k in cutlass.range_constexpr(steps):
                    if const_expr(k == steps - EARLY_STEPS):
                        # The tensor cores take turns, as in MlaDecode.
                        self.signal_if(stored, ring.ready, previous)
                    cute.gemm(mma_qk, acc, held.t_q[None, None, k], t_k[None, None, k], acc)
                    mma_qk.set(Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                previous, index, phase = index, following, phase_following
                address_here = address
                ahead = self.look_ahead(index, phase, ring)
                arrived, address = ahead.arrived, ahead.address
                following, phase_following = ahead.following, ahead.phase
                if const_expr(masked == 1):
                    self.mask(scores.s, b, piece, place)
                self.softmax(scores, running, held.scale, place, ring, previous)
                held.r_p.store(held.probabilities.load().to(self.p_dtype))
                self.store_p(address_here + held.p_offset, cute.recast_tensor(held.r_p, Int32))
                stored = held.signals
        return Scored(index, phase, previous)

    @cute.jit
    def finish_piece(
        self,
        piece: cutlass.Constexpr,
        number: Int32,
        b_end: Int32,
        last: Int32,
        held: cutlass.Constexpr,
        ring: cutlass.Constexpr,
    ):
        """Finish the rows."""
        self.finish(held.running, held.place, piece, number, held.results)

    # ---- values

    @cute.jit
    def accumulate(
        self,
        arrays: cutlass.Constexpr,
        ring: cutlass.Constexpr,
        mma_pv: cute.TiledMma,
        half: Int32,
        warp_idx: Int32,
        schedule: cutlass.Constexpr,
    ):
        """Warpgroups 1 and 2: O^T[half] += V^T[half] P^T and the epilogue; one of their warps schedules.

        A warp has half / 4 latents, in tiles of 16, the 16 bytes of a key that ldmatrix takes as one row: the lane's
        latents of a tile are two neighbours, the rows g and g + 8 of the product.
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
        r_v = cute.make_rmem_tensor((8, WIDE), self.p_dtype)
        narrow = cute.make_rmem_tensor((4, AHEAD), Int32)
        first_tile = half * (self.half // 16) + (t // 32) * self.m_tiles  # of 16 latents
        # Where this lane's key of the first 32 has the first tile's columns, in a stage.
        offset = self.kept(
            (first_tile // 4) * (64 * self.block) + lane * 64 + (((first_tile % 4) ^ ((lane >> 1) & 3)) << 4)
        )
        held = HeldValues(mma_pv, acc, o, r_v, narrow, offset, t, lane)

        index, phase, number = Int32(0), Int32(0), Int32(0)
        if warp_idx == 8:
            # The first copies do not wait for these.
            for i in cutlass.range(1, self.lookahead, unroll=1):
                self.next_piece(i, schedule)
            self.meet_for_first_pieces()
        running = Int32(1)
        while running == 1:
            # Every use of a stage, Q's too, goes full -> ready -> empty, so that the three barriers stay in step.
            cute.arch.mbarrier_wait(ring.ready + index, phase)
            piece, b_begin, b_end = self.described(number, ring.pieces)
            if b_begin == b_end:
                running = Int32(0)
            else:
                self.wait_for_q_read(number)
                self.release(index, ring.empty)
                index, phase = self.advance(index, phase)
                if const_expr(self.q_rows < self.kept_rows):
                    if piece[Piece.Q_STAGES] > 1:
                        cute.arch.mbarrier_wait(ring.ready + index, phase)
                        self.release(index, ring.empty)
                        index, phase = self.advance(index, phase)
                index, phase = self.add_blocks(piece, number, KeyRange(b_begin, b_end), Stage(index, phase), held, ring)
                place = LatentPlace(number % self.inverses_kept, first_tile * 16, lane)
                self.store(o, place, piece, arrays, ring.inverse, schedule.rank)
                if warp_idx == 8:
                    self.next_piece(number + self.lookahead, schedule)
                number += 1

    @cute.jit
    def add_blocks(
        self,
        piece: cutlass.Constexpr,
        number: Int32,
        blocks: cutlass.Constexpr,
        stage: cutlass.Constexpr,
        held: cutlass.Constexpr,
        ring: cutlass.Constexpr,
    ):
        """O of a piece's key blocks; returns the stage behind them and its parity."""
        mma_pv, lane, narrow, r_v, offset = held.mma_pv, held.lane, held.narrow, held.r_v, held.offset
        thr = mma_pv.get_slice(held.thread)
        a_shape, tile_shape = thr.partition_shape_A((64, 16)), thr.partition_shape_C((64, self.p_rows))
        index, phase = stage.index, stage.phase
        full, ready, moved = ring.full, ring.ready, ring.moved
        keys = self.uniform(piece[Piece.KEYS])
        held.acc.fill(0.0)
        begun, address = Int32(0), self.address(ring.keys, index)  # whether this block's first values are in `narrow`
        for b in cutlass.range(blocks.begin, blocks.end, unroll=1):
            _, stage_p = self.stage_tensors(ring, address)
            t_p = mma_pv.make_fragment_B(thr.partition_B(stage_p))
            here = address + offset
            if begun == 0:
                cute.arch.mbarrier_wait(full + index, phase)
                if (b + 1) * self.block > keys:
                    # P is 0 past the end, but unused slots may hold NaN: 0 * NaN must not reach O. The scores
                    # have read these keys, and no other warp reads this one's latents.
                    cute.arch.mbarrier_wait(ready + index, phase)
                    if const_expr(self.loads_keys):
                        self.wait_for_keys_read(number)
                    self.clear(here, keys - b * self.block, lane)
                for g in cutlass.range_constexpr(AHEAD):
                    self.read_values(here, g, narrow)
            following, phase_following = self.advance(index, phase)
            address = self.address(ring.keys, following)
            begun, next_here = Int32(0), here
            # V^T is read beside the product, the next block's beginning too: the scores, which want shared
            # memory for themselves, are not at work then. If the next block cannot be read yet (missing, or it needs
            # zeroing), re-read this block; the result is discarded.
            if b + 1 < blocks.end and (b + 2) * self.block <= keys:
                begun, next_here = Int32(1), address + offset
            cute.arch.mbarrier_wait(ready + index, phase)
            # By the lanes that arrive at `empty` for the warp, as is `rescale`: so racecheck can follow it.
            flag = Int32(0)
            if lane < self.releasing_lanes:
                flag = moved[lane, index]
            cute.arch.fence_proxy("async.shared", space="cta")  # the scores' writes of P, as in MlaDecode
            # The scores have begun with the next block before they let this one's product begin: so it is there
            # already, and the answer is read later, for it takes its time.
            awaited = begun
            if cute.arch.mbarrier_test_wait(full + following, phase_following):
                awaited = Int32(0)
            reading = Reading(here, next_here, awaited, full + following, phase_following)
            for n in cutlass.range_constexpr(WIDE):  # while the flag comes
                self.widen(n, narrow, r_v)
                self.read_on(n, reading, narrow)
            self.rescale_out(held.o, ring.rescale, flag, index, lane)
            for n in cutlass.range_constexpr(4 * self.m_tiles):
                if const_expr(n >= WIDE):
                    warpgroup.wait_group(WIDE - 1)
                    self.widen(n, narrow, r_v)
                    self.read_on(n, reading, narrow)
                warpgroup.fence()
                a = cute.make_tensor(r_v[None, n % WIDE].iterator, cute.make_layout(a_shape))
                g, k = n // 2, n % 2
                tile = cute.make_tensor(held.acc.iterator + g // 2 * (self.p_rows // 2), cute.make_layout(tile_shape))
                cute.gemm(mma_pv, tile, a[None, None, 0], t_p[None, None, 2 * (g % 2) + k], tile)
                warpgroup.commit_group()
            warpgroup.wait_group(0)
            self.release(index, ring.empty)
            index, phase = following, phase_following
        return index, phase

    @cute.jit
    def columns(self, here: Int32, tile: cutlass.Constexpr[int]):
        """The address of a lane's 16 bytes, of tile `tile` of its warp, where `here` is that of the first tile's."""
        # Four tiles in 64 bytes, exchanged by the swizzle; two warps share them where a warp has only two tiles.
        return here ^ (tile << 4)

    @cute.jit
    def clear(self, here: Int32, first: Int32, lane: Int32):
        """Zero the columns that this warp reads of the keys from `first` on."""
        zeros = cute.make_rmem_tensor((16,), self.dtype)
        cute.recast_tensor(zeros, Int32).fill(0)
        for h in cutlass.range_constexpr(self.block // 32):
            if lane + 32 * h >= first:
                for tile in cutlass.range_constexpr(self.m_tiles):
                    address = self.columns(here, tile) + h * (32 * 64)
                    target = cute.make_ptr(self.dtype, address, cute.AddressSpace.smem, assumed_align=16)
                    cute.autovec_copy(zeros, cute.make_tensor(target, cute.make_layout(16)))
        cute.arch.fence_proxy("async.shared", space="cta")  # the next copy into this stage comes after
        cute.arch.sync_warp()

    @cute.jit
    def read_values(self, here: Int32, g: cutlass.Constexpr[int], narrow: cute.Tensor):
        """Fragment g of V^T, 32 keys of a tile of latents, into its column of `narrow`."""
        fragment = narrow[None, g % AHEAD]
        address = self.columns(here, g // 2) + (g % 2) * (32 * 64)
        # Two keys of two neighbouring latents a word.
        fragment[0], fragment[1], fragment[2], fragment[3] = self.load_transposed(address)

    @cute.jit
    def read_on(self, n: cutlass.Constexpr[int], reading: cutlass.Constexpr, narrow: cute.Tensor):
        """Behind half n of the fragments: where that is a fragment's last, read another one in its place: this block's
        next, or one of the next block's first, when its keys are there."""
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
    def widen(self, n: cutlass.Constexpr[int], narrow: cute.Tensor, r_v: cute.Tensor):
        """Half n of the fragments of V^T as f16, a latent's two keys together."""
        words = cute.make_rmem_tensor((2,), Int32)
        for i in cutlass.range_constexpr(2):
            word = narrow[2 * (n % 2) + i, n // 2 % AHEAD]
            words[i] = Int32(cute.arch.prmt(word, word, 0x3120))
        cute.make_tensor(r_v[None, n % WIDE].iterator, cute.make_layout(8)).store(
            cute.recast_tensor(words, self.dtype).load().to(self.p_dtype)
        )

    @cute.jit
    def two_rows(self, values: cute.Tensor, column: Int32, v: cutlass.Constexpr[int], lane: Int32, pair: cute.Tensor):
        """The lane's two query rows of the v-th eight, of column `column` of `values`, into `pair`."""
        source = (values.iterator + (column * ROWS + 8 * v + lane % 4 * 2)).align(8)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), pair)

    @cute.jit
    def rescale_out(self, o: cute.Tensor, rescale: cute.Tensor, flag: Int32, index: Int32, lane: Int32):
        """Multiply O by what the scores' running maxima moved, in the 16 rows of each lane whose flag says that they
        did."""
        flags = cute.arch.vote_ballot_sync(flag != 0)
        if flags != 0:
            factors = cute.make_rmem_tensor((2,), Float32)
            for v in cutlass.range_constexpr(self.p_rows // 8):
                if (flags & (1 << (v // 2))) != 0:
                    factors.fill(1.0)
                    if lane < self.releasing_lanes:
                        self.two_rows(rescale, index, v, lane, factors)
                    for i in cutlass.range_constexpr(2):
                        factors[i] = cute.arch.shuffle_sync(factors[i], lane % 4)
                    for i in cutlass.range_constexpr(2):
                        for tile in cutlass.range_constexpr(self.m_tiles):
                            for e in cutlass.range_constexpr(2):
                                o[i, e, v, tile] = o[i, e, v, tile] * factors[i]

    @cute.jit
    def store(
        self,
        o: cute.Tensor,
        place: cutlass.Constexpr,
        piece: cutlass.Constexpr,
        arrays: cutlass.Constexpr,
        inverse: cute.Tensor,
        rank: Int32,
    ):
        """O times 1 / row sum, of `inverse`, to `out`, or to the piece's slot of partial_out."""
        lane = place.lane
        out_row, valid_rows, slot = piece[Piece.ROW], piece[Piece.VALID_ROWS], piece[Piece.SLOT]
        # Eight lanes' pairs of neighbouring latents fill a sector.
        row_low, column = lane % 4 * 2, place.first_latent + lane // 4 * 2
        rows = OutRows(inverse, place.kept, lane, valid_rows)
        if slot < 0:
            target = element(arrays.out, Int64(out_row + row_low) * self.latent + column, 4)
            self.store_rows(target, o, rows, self.out_dtype)
        else:
            row = self.partial_row(slot, rank * ROWS + row_low)
            target = element(arrays.partial_out, row * self.latent + column, 2 * self.partial_dtype.width // 8)
            self.store_rows(target, o, rows, self.partial_dtype)

    @cute.jit
    def store_rows(self, target: cute.Pointer, o: cute.Tensor, rows: cutlass.Constexpr, dtype: cutlass.Constexpr):
        """A lane's part of O from `target` on: two latents of every tile and, of each eight, two rows."""
        lines = cute.make_tensor(
            target,
            cute.make_layout((2, 2, self.p_rows // 8, self.m_tiles), stride=(1, self.latent, 8 * self.latent, 16)),
        )
        pair = cute.make_rmem_tensor((2,), dtype)
        factors = cute.make_rmem_tensor((2,), Float32)
        for v in cutlass.range_constexpr(self.p_rows // 8):
            if 8 * v < rows.valid:
                self.two_rows(rows.inverse, rows.kept, v, rows.lane, factors)
                for i in cutlass.range_constexpr(2):
                    if rows.lane % 4 * 2 + (8 * v + i) < rows.valid:
                        for tile in cutlass.range_constexpr(self.m_tiles):
                            for e in cutlass.range_constexpr(2):
                                pair[e] = (o[i, e, v, tile] * factors[i]).to(dtype)
                            cute.autovec_copy(pair, lines[None, i, v, tile])
