"""Absorbed MLA decode over a paged latent cache, bf16 and f16, for Hopper. DESIGN.md beside this says why it is so.

Three warpgroups of a CTA share 64 query rows (token * H + head) and a ring of 32-key stages:

  warpgroup 0   scores: keeps Q in registers, S = Q K^T (WGMMA, A from registers), softmax, P into shared memory
  1 and 2       values: O[:, half] += P V[:, half] (WGMMA from shared memory), rescale, epilogue
                first warp of 1: the copies (Q and keys go through the same ring); first warp of 2: the schedule

A second, small kernel merges the requests that several CTAs (or clusters) shared; it is launched with programmatic
dependent launch behind the first.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, OperandSource, SmemLayoutAtomKind

from tsmla_kernels.sm90.decode.config import ROWS, DecodeConfig
from tsmla_kernels.sm90.decode.kernel import DecodeKernel
from tsmla_kernels.sm90.decode.memory import (
    COPY_STATE_WORDS,
    Arrays,
    Copies,
    OutPlace,
    Piece,
    Place,
    Results,
    Running,
    Schedule,
    Scored,
    Scores,
    Taken,
    Tma,
)
from tsmla_kernels.sm90.decode.ring import TABLE_AHEAD
from tsmla_kernels.sm90.decode.schedule import MAX_SORTED, STATE_WORDS
from tsmla_kernels.sm90.decode.softmax import tree
from tsmla_kernels.sm90.warp import DTYPES, LOG2_E, element

OVERHEAD = 5  # what starting a piece costs, in key blocks: Q, the first keys' latency, the epilogue
RESCALE_BITS = 8.0  # how far the running maximum may lag where arithmetic is the bound: following it at once takes 10 %
EARLY_STEPS = 9  # 16-column steps of Q K^T that are still to come when the values' warpgroups are let loose


class Held(NamedTuple):
    """What the softmax warpgroup holds from piece to piece.

    Attributes:
      mma_qk, mma_qk_shared: Q K^T with Q from registers, and from shared memory.
      r_q: Q in registers. t_q_rope: the rest of it, as an operand of mma_qk_shared. q_rope: the same, as rows.
      acc, probabilities: S and P of a block, which may be one. r_p: P as it is stored.
      p_offset: where the lane's row of P lies in a stage.
      running: the rows' maxima and sums. scale: of the logits, base 2. results: where rows are finished.
      place: of the thread. signals: 1 if its lane arrives in `signal`.
    """

    mma_qk: cute.TiledMma
    mma_qk_shared: cute.TiledMma
    r_q: cute.Tensor
    t_q_rope: cute.Tensor
    q_rope: cute.Tensor
    acc: cute.Tensor
    probabilities: cute.Tensor
    r_p: cute.Tensor
    p_offset: Int32
    running: Running
    scale: Float32
    results: Results
    place: Place
    signals: Int32


class MlaDecode(DecodeKernel):
    """One compiled decode: `config` is static, all shapes but H, L, R and Z are dynamic.

    Operands of the launcher: q [N, D] (N = T * H rows), kv_cache [P, Z, D], block_tables [B, M] i32, seq_lens [B] i32,
    cu_seqlens_q [B + 1] i32 (read only when ragged: pass seq_lens otherwise), scales [2] f32 (logits' scale, output's
    scale), out [N, L], lse [N] f32 (natural log), and the workspaces of `choose.workspace_shapes`.
    """

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config, DTYPES[config.dtype], DTYPES[config.dtype])
        self.partial_is_lane_order = True
        self.keys_swizzle = self.q_swizzle = SmemLayoutAtomKind.K_SW128
        self.p_swizzle = SmemLayoutAtomKind.K_SW64
        # P takes the place of its own keys' rope columns, which nothing reads once S is there.
        self.p_offset = self.block * self.latent * 2
        self.overhead = OVERHEAD
        # Ring of piece descriptors, filled `lookahead` pieces before the slowest reader: as many as the stages that are
        # filled ahead may belong to.
        self.pieces_kept, self.lookahead = 8, 4
        # Q's 16-column steps that stay in shared memory, for want of registers: the rope's, where L is 512.
        self.shared_steps = 4 if self.depth > 512 else 0
        # 0: the greatest P of a row is exactly 1, and no rounding touches it. Free where memory is the bound.
        self.rescale_bits = 0.0 if config.cluster == 1 else RESCALE_BITS
        self.speculates = self.rescale_bits > 0.0
        # A piece takes two stages or more; the values read its row sums before they leave its last.
        self.inverses_kept = (self.stages + 1) // 2
        self.threads, self.releasing_lanes = 384, 1
        self.registers = (184, 160)  # scores, values: 184 + 2 x 160 is what 384 threads start with

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
        dtype = self.dtype
        tma = self.tensor_maps(q, kv_cache)
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        mma_qk = sm90.make_trivial_tiled_mma(
            dtype, dtype, k_major, k_major, Float32, (1, 1, 1), (ROWS, self.block), OperandSource.RMEM
        )
        mma_qk_shared = sm90.make_trivial_tiled_mma(
            dtype, dtype, k_major, k_major, Float32, (1, 1, 1), (ROWS, self.block)
        )
        mma_pv = sm90.make_trivial_tiled_mma(dtype, dtype, k_major, mn_major, Float32, (1, 1, 1), (ROWS, self.half))

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, self.stages]
            empty: cute.struct.MemRange[Int64, self.stages]
            ready: cute.struct.MemRange[Int64, self.stages]
            pieces: cute.struct.MemRange[Int32, self.pieces_kept * len(Piece)]
            rescale: cute.struct.MemRange[Float32, self.stages * ROWS]
            moved: cute.struct.MemRange[Int32, self.stages * 4]
            inverse: cute.struct.MemRange[Float32, self.inverses_kept * ROWS]
            schedule_state: cute.struct.MemRange[Int32, STATE_WORDS]
            copy_state: cute.struct.MemRange[Int32, COPY_STATE_WORDS]
            pages: cute.struct.MemRange[Int32, TABLE_AHEAD]
            q_rope: cute.struct.Align[cute.struct.MemRange[dtype, max(ROWS * 16 * self.shared_steps, 8)], 1024]
            ring: cute.struct.Align[cute.struct.MemRange[dtype, self.stages * self.stage_elements], 1024]

        self.check_storage(Storage)
        num_clusters = self.num_clusters(seq_lens, split_info)
        attend = self.attend(
            q, *tma, block_tables, seq_lens, cu_seqlens_q, scales, out, lse,
            partial_out, partial_lse, split_info, mma_qk, mma_qk_shared, mma_pv, num_clusters,
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
        mma_qk_shared: cute.TiledMma,
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

        if warp_idx == 4:
            cpasync.prefetch_descriptor(tma_q)
            cpasync.prefetch_descriptor(tma_k)
        if warp_idx >= 9:
            self.prefetch_operands(q, block_tables, warp_idx - 9)
        if warp_idx == 0:
            self.init_barriers(ring)
        self.sync_barriers()

        atom = warpgroup.make_smem_layout_atom(self.keys_swizzle, self.dtype)
        q_atom = cute.tile_to_shape(atom, (ROWS, 64), (0, 1))
        s_q_rope = storage.q_rope.get_tensor(q_atom.outer, swizzle=q_atom.inner)
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
        if warp_idx == 4:
            self.begin_schedule(schedule, early)
            self.next_piece(Int32(0), schedule)
            self.begin_copies(copies)
        cute.arch.sync_threads()
        if group == 0:
            cute.arch.setmaxregister_increase(self.registers[0])
            self.score(arrays, ring, s_q_rope, (mma_qk, mma_qk_shared), rank)
        else:
            cute.arch.setmaxregister_decrease(self.registers[1])
            self.accumulate(arrays, ring, mma_pv, group - 1, warp_idx, schedule, copies)
        cute.arch.griddepcontrol_launch_dependents()
        self.end()

    # ---- scores

    @cute.jit
    def begin_scores(
        self,
        arrays: cutlass.Constexpr,
        ring: cutlass.Constexpr,
        q_rope: cute.Tensor,
        mma: cutlass.Constexpr,
        rank: Int32,
    ):
        """What the softmax warpgroup holds from piece to piece, a Held."""
        mma_qk, mma_qk_shared = mma
        tidx, _, _ = cute.arch.thread_idx()
        t = tidx % 128
        lane = self.kept(t % 32)
        signals = Int32(self.signals(lane))
        warp_here = cute.arch.make_warp_uniform(t // 32)
        scale = arrays.scales[0] * LOG2_E
        results = Results(ring.inverse, arrays.lse, arrays.partial_lse, arrays.scales[1], rank)

        register_columns = self.depth - 16 * self.shared_steps
        r_q = cute.make_rmem_tensor(mma_qk.get_slice(t).partition_shape_A((ROWS, register_columns)), self.dtype)
        t_q_rope = mma_qk_shared.make_fragment_A(mma_qk_shared.get_slice(t).partition_A(q_rope))
        acc = cute.make_rmem_tensor(mma_qk.get_slice(t).partition_shape_C((ROWS, self.block)), Float32)
        probabilities = cute.make_rmem_tensor(acc.layout, Float32) if const_expr(self.speculates) else acc

        # A lane's row of P, of 64 bytes: its first 16 bytes, or the second, exchanged by the swizzle.
        r_p = cute.make_rmem_tensor(acc.layout, self.dtype)
        p_row = warp_here * 16 + lane % 16
        p_offset = self.kept(self.p_offset + p_row * 64 + (((lane // 16) ^ ((p_row >> 1) & 3)) << 4))

        place = Place(t, warp_here, lane, warp_here * 16 + lane // 4)
        running = Running(cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32))
        return Held(
            mma_qk, mma_qk_shared, r_q, t_q_rope, q_rope, acc, probabilities, r_p, p_offset, running, scale, results,
            place, signals,
        )  # fmt: skip

    @cute.jit
    def take_q(
        self,
        piece: cutlass.Constexpr,
        number: Int32,
        stage: cutlass.Constexpr,
        held: cutlass.Constexpr,
        ring: cutlass.Constexpr,
    ):
        """Q into registers. Its rows 32 and up are in the next stage, if the row tile has as many."""
        t, s_k = held.place.thread, ring.keys
        # Q's rows lie in two stages of 32: a warp reads the one that holds its 16 rows, as if it were the first.
        load_q = cute.make_tiled_copy_A(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype), held.mma_qk
        )
        thr_load_q = load_q.get_slice(t % 64)
        q_atom = warpgroup.make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, self.dtype)
        tile_layout = cute.tile_to_shape(
            q_atom, (self.block, self.depth - 16 * self.shared_steps), (0, 1)
        ).outer
        # 64 rows for the copy's tile, of which slices 0 to 63 touch the first 32 alone.
        q_shape = ((*tile_layout.shape[0], 2), tile_layout.shape[1])
        q_stride = ((*tile_layout.stride[0], 0), tile_layout.stride[1])
        q_tile_layout = cute.make_layout(q_shape, stride=q_stride)

        first_index, q_index = stage.index, stage.index
        index, phase = self.advance(stage.index, stage.phase)
        q_stages = self.uniform(piece[Piece.Q_STAGES])
        if q_stages == 2:
            cute.arch.mbarrier_wait(ring.full + index, phase)
            if held.place.warp >= 2:
                q_index = index
        q_stage = s_k[None, None, q_index]
        q_tile = cute.make_tensor(q_stage.iterator, q_tile_layout)
        cute.copy(load_q, thr_load_q.partition_S(q_tile), thr_load_q.retile(held.r_q))
        if const_expr(self.shared_steps > 0):
            self.keep_q_rope((first_index, index), q_stages, held, ring)
        self.signal(ring.ready, first_index, held.place.lane)
        if q_stages == 2:
            self.signal(ring.ready, index, held.place.lane)
            index, phase = self.advance(index, phase)
        return Taken(index, phase, held.scale)

    @cute.jit
    def keep_q_rope(
        self, stages: cutlass.Constexpr, q_stages: Int32, held: cutlass.Constexpr, ring: cutlass.Constexpr
    ):
        """Rows of Q's rope from one or two `stages` to where they stay, as 16-byte words: the same bytes in the same
        order."""
        t, s_k = held.place.thread, ring.keys
        first_index, second_index = stages
        words = cute.make_layout((4, 128, 2), stride=(1, 4, 512))
        rope_there = cute.make_tensor(
            cute.recast_ptr(held.q_rope.iterator, cute.make_swizzle(0, 4, 3), dtype=Float32),
            cute.make_layout((4, 128, 2, 2), stride=(1, 4, 512, 1024)),
        )
        rope_word = cute.make_rmem_tensor((4,), Float32)
        for h in cutlass.range(q_stages, unroll=1):
            stage_of = first_index
            if h == 1:
                stage_of = second_index
            rope_here = cute.make_tensor(
                cute.recast_ptr(
                    s_k[None, None, stage_of].iterator + self.block * self.latent,
                    cute.make_swizzle(0, 4, 3), dtype=Float32,
                ),
                words,
            )  # fmt: skip
            for i in cutlass.range_constexpr(2):
                cute.autovec_copy(rope_here[None, t, i], rope_word)
                cute.autovec_copy(rope_word, rope_there[None, t, i, h])
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync_softmax()

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
        mma_qk, mma_qk_shared, acc = held.mma_qk, held.mma_qk_shared, held.acc
        place, running = held.place, held.running
        by_rows = cute.make_layout((2, (2, self.block // 8)), stride=(2, (1, 4)))
        scores = Scores(
            cute.make_tensor(acc.iterator, by_rows), cute.make_tensor(held.probabilities.iterator, by_rows)
        )
        steps = self.depth // 16
        index, phase = taken.index, taken.phase
        self.begin_rows(running)
        seen_by_all = self.seen_by_all(piece)
        previous, address = index, self.address(ring.keys, index)
        following, phase_following = self.advance(index, phase)
        arrived, stored = Int32(0), Int32(0)
        for b in cutlass.range(blocks.begin, blocks.end, unroll=1):
            stage_keys, _ = self.stage_tensors(ring, address)
            t_k = mma_qk.make_fragment_B(mma_qk.get_slice(place.thread).partition_B(stage_keys))
            if arrived == 0:
                cute.arch.mbarrier_wait(ring.full + index, phase)
            warpgroup.fence()
            mma_qk.set(Field.ACCUMULATE, False)
            mma_qk_shared.set(Field.ACCUMULATE, True)
            for k in cutlass.range_constexpr(steps):
                if const_expr(k == steps - EARLY_STEPS):
                    # The tensor cores take turns: P V of the block before runs during this block's softmax. It
                    # is let loose as long before the end of Q K^T as its warps take to wake up: a step that
                    # meets P V there waits for a whole instruction of it, eight times its own length.
                    self.signal_if(stored, ring.ready, previous)
                if const_expr(k < steps - self.shared_steps):
                    cute.gemm(mma_qk, acc, held.r_q[None, None, k], t_k[None, None, k], acc)
                else:
                    q_step = held.t_q_rope[None, None, k - steps + self.shared_steps]
                    cute.gemm(mma_qk_shared, acc, q_step, t_k[None, None, k], acc)
                mma_qk.set(Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            previous, index, phase = index, following, phase_following
            address_here = address
            ahead = self.look_ahead(index, phase, ring)
            arrived, address = ahead.arrived, ahead.address
            following, phase_following = ahead.following, ahead.phase
            if (b + 1) * self.block > seen_by_all:
                self.mask(scores.s, b, piece, place)
            self.softmax(scores, running, held.scale, place, ring, previous)
            held.r_p.store(held.probabilities.load().to(self.dtype))
            # All four warps have read these keys' rope columns: P may overwrite them.
            self.sync_softmax()
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
        """Zero the keys past the end, and finish the rows. P is 0 there, but unused slots may hold NaN: 0 * NaN must
        not reach O."""
        zero_words = cute.make_tensor(
            cute.recast_ptr(ring.keys.iterator, cute.make_swizzle(0, 4, 3), dtype=Float32),
            cute.make_layout(
                (32, self.block, self.latent // 64, self.stages),
                stride=(1, 32, 32 * self.block, self.stage_elements // 2),
            ),
        )
        for row in cutlass.range(
            cutlass.max(piece[Piece.KEYS] - (b_end - 1) * self.block, 0), self.block, unroll=1
        ):
            for c in cutlass.range_constexpr(self.latent // 256):
                zero_words[held.place.lane, row, held.place.warp + 4 * c, last] = Float32(0.0)
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
        copies: cutlass.Constexpr,
    ):
        """Warpgroups 1 and 2: O[:, half] += P V[:, half] and the epilogue; two of their warps copy and schedule."""
        moved, rescale, inverse = ring.moved, ring.rescale, ring.inverse
        tidx, _, _ = cute.arch.thread_idx()
        t = tidx % 128
        lane = t % 32
        row_low = (t // 32) * 16 + lane // 4
        thr = mma_pv.get_slice(t)
        acc = cute.make_rmem_tensor(thr.partition_shape_C((ROWS, self.half)), Float32)
        groups = self.half // 8
        mma_pv.set(Field.ACCUMULATE, True)
        o = cute.make_tensor(acc.iterator, cute.make_layout((2, (2, groups)), stride=(2, (1, 4))))

        index, phase, number = Int32(0), Int32(0), Int32(0)
        if warp_idx == 4:
            self.fill_ring(copies)
        if warp_idx == 8:
            # The first copies do not wait for these.
            for i in cutlass.range(1, self.lookahead, unroll=1):
                self.next_piece(i, schedule)
            self.meet_for_first_pieces()
        pending, phase_of_pending = Int32(-1), Int32(0)
        inverse_low, inverse_high = Float32(0.0), Float32(0.0)
        running = Int32(1)
        while running == 1:
            # Every use of a stage, Q's too, goes full -> ready -> empty, so that the three barriers stay in step.
            cute.arch.mbarrier_wait(ring.ready + index, phase)
            piece, b_begin, b_end = self.described(number, ring.pieces)
            if b_begin == b_end:
                running = Int32(0)
            else:
                for _ in cutlass.range(self.uniform(piece[Piece.Q_STAGES]), unroll=1):
                    cute.arch.mbarrier_wait(ring.ready + index, phase)
                    self.refill(pending, phase_of_pending, ring.empty, warp_idx, copies)
                    pending, phase_of_pending = index, phase
                    self.release(index, ring.empty)
                    index, phase = self.advance(index, phase)
                acc.fill(0.0)
                for b in cutlass.range(b_begin, b_end, unroll=1):
                    stage_keys, stage_p = self.stage_tensors(ring, self.address(ring.keys, index))
                    values = cute.make_tensor(stage_keys.iterator, cute.select(stage_keys.layout, mode=[1, 0]))
                    values = cute.local_tile(values, (self.half, self.block), (half, 0))
                    t_v = mma_pv.make_fragment_B(thr.partition_B(values))
                    t_p = mma_pv.make_fragment_A(thr.partition_A(stage_p))
                    cute.arch.mbarrier_wait(ring.ready + index, phase)
                    # Orders the scores' writes, of P and of zeros, before WGMMA's reads: here, since there it would be
                    # part of the chain that everything waits for.
                    cute.arch.fence_proxy("async.shared", space="cta")
                    if moved[row_low // 16, index] != 0:
                        low, high = rescale[row_low, index], rescale[row_low + 8, index]
                        for c in cutlass.range_constexpr(self.half // 4):
                            o[0, c] = o[0, c] * low
                            o[1, c] = o[1, c] * high
                    warpgroup.fence()
                    for k in cutlass.range_constexpr(self.block // 16):
                        cute.gemm(mma_pv, acc, t_p[None, None, k], t_v[None, None, k], acc)
                    warpgroup.commit_group()
                    # While that runs: fill the stage that was left before.
                    self.refill(pending, phase_of_pending, ring.empty, warp_idx, copies)
                    warpgroup.wait_group(0)
                    pending, phase_of_pending = index, phase
                    if b + 1 == b_end:
                        kept = number % self.inverses_kept
                        inverse_low, inverse_high = inverse[row_low, kept], inverse[row_low + 8, kept]
                    self.release(index, ring.empty)
                    index, phase = self.advance(index, phase)
                self.store(o, (inverse_low, inverse_high), OutPlace(half, lane, row_low), piece, arrays, schedule.rank)
                if warp_idx == 8:
                    self.next_piece(number + self.lookahead, schedule)
                number += 1

    @cute.jit
    def refill(self, index: Int32, phase: Int32, empty: cute.Pointer, warp_idx: Int32, copies: cutlass.Constexpr):
        """The copying warp fills a stage, when all have released it. index -1: there is none."""
        if warp_idx == 4 and index >= 0:
            cute.arch.mbarrier_wait(empty + index, phase)
            self.produce(index, copies)

    @cute.jit
    def store(
        self,
        o: cute.Tensor,
        inverses: cutlass.Constexpr,
        place: cutlass.Constexpr,
        piece: cutlass.Constexpr,
        arrays: cutlass.Constexpr,
        rank: Int32,
    ):
        """O / row sum to `out`, or to the piece's slot of partial_out. `inverses` are of the lane's two rows."""
        half, lane = place.half, place.lane
        out_row, valid_rows, slot = piece[Piece.ROW], piece[Piece.VALID_ROWS], piece[Piece.SLOT]
        quad = lane % 4
        groups = self.half // 8
        column = half * self.half + quad * 8
        for i in cutlass.range_constexpr(2):
            row = place.row_low + 8 * i
            factor = inverses[i]
            # A lane holds 2 columns of each group of 8, and stores 8 for each four groups.
            if slot < 0:
                # The four lanes of a row swap so that each has one group of the four.
                line = cute.make_tensor(
                    element(arrays.out, Int64(out_row + row) * self.latent + column, 16),
                    cute.make_layout((8, groups // 4), stride=(1, 32)),
                )
                pairs = cute.make_rmem_tensor((8,), self.out_dtype)
                words = cute.recast_tensor(pairs, Int32)
                for g in cutlass.range_constexpr(groups // 4):
                    for j in cutlass.range_constexpr(4):
                        pairs[2 * j] = (o[i, 8 * g + 2 * j] * factor).to(self.out_dtype)
                        pairs[2 * j + 1] = (o[i, 8 * g + 2 * j + 1] * factor).to(self.out_dtype)
                    self.transpose_quad(words, quad)
                    if row < valid_rows:
                        cute.autovec_copy(pairs, line[None, g])
            else:
                # As they lie, for the fewest instructions: `combine` swaps.
                tile_row = rank * ROWS + row
                partial_lse = arrays.partial_lse
                if const_expr(self.partial_needs_scale):
                    factor, scale = self.fit(o, i, factor)
                    if quad == 0 and row < valid_rows:
                        partial_lse[slot, 1 + half, tile_row] = scale
                line = cute.make_tensor(
                    element(arrays.partial_out, self.partial_row(slot, tile_row) * self.latent + column, 16),
                    cute.make_layout((8, groups // 4), stride=(1, 32)),
                )
                eight = cute.make_rmem_tensor((8,), self.partial_dtype)
                for g in cutlass.range_constexpr(groups // 4):
                    for j in cutlass.range_constexpr(8):
                        eight[j] = (o[i, 8 * g + j] * factor).to(self.partial_dtype)
                    if row < valid_rows:
                        cute.autovec_copy(eight, line[None, g])

    @cute.jit
    def fit(self, o: cute.Tensor, i: cutlass.Constexpr[int], factor: Float32):
        """(factor / scale, scale) with which row i of O times factor / scale lies in f16's range: a power of 2, so that
        no bit is lost. f16 keeps 11 bits of what is within 2^14 of the row's greatest, where bf16 would keep 8."""
        tops = [cute.math.absf(o[i, c]) for c in range(self.half // 4)]
        # Of a row of zeros, factor / scale must still be finite.
        top = cute.arch.fmax(tree(cute.arch.fmax, tops), 2.0**-100)
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2))
        # The power of 2 at or below it, within what has a reciprocal.
        power = (top * factor).bitcast(Int32) & 0x7F800000
        power = cutlass.min(cutlass.max(power, 1 << 23), 253 << 23)
        return factor * (Int32(254 << 23) - power).bitcast(Float32), power.bitcast(Float32)
