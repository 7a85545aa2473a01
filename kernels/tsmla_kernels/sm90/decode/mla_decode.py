"""Absorbed MLA decode over a paged latent cache, bf16 and f16, for Hopper. DESIGN.md beside this says why it is so.

Three warpgroups of a CTA share 64 query rows (token * H + head) and a ring of 32-key stages:

  warpgroup 0   scores: keeps Q in registers, S = Q K^T (WGMMA, A from registers), softmax, P into shared memory
  1 and 2       values: O[:, half] += P V[:, half] (WGMMA from shared memory), rescale, epilogue
                first warp of 1: the copies (Q and keys go through the same ring); first warp of 2: the schedule

A second, small kernel merges the requests that several CTAs (or clusters) shared; it is launched with programmatic
dependent launch behind the first.
"""

from __future__ import annotations

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
from tsmla_kernels.sm90.decode.ring import TABLE_AHEAD
from tsmla_kernels.sm90.decode.schedule import DESCRIPTOR_WORDS, SORTED, WALK_WORDS
from tsmla_kernels.sm90.decode.softmax import tree
from tsmla_kernels.sm90.warp import DTYPES, LOG2_E, element

OVERHEAD = 5  # what starting a piece costs, in key blocks: Q, the first keys' latency, the epilogue
RESCALE_BITS = 8.0  # how far the running maximum may lag where arithmetic is the bound: following it at once takes 10 %
EARLY_STEPS = 9  # 16-column steps of Q K^T that are still to come when the values' warpgroups are let loose


class MlaDecode(DecodeKernel):
    """One compiled decode: `config` is static, all shapes but H, L, R and Z are dynamic.

    Operands of the launcher: q [N, D] (N = T * H rows), kv_cache [P, Z, D], block_tables [B, M] i32, seq_lens [B] i32,
    cu_seqlens_q [B + 1] i32 (read only when ragged: pass seq_lens otherwise), scales [2] f32 (logits' scale, output's
    scale), out [N, L], lse [N] f32 (natural log), and the workspaces of `choose.workspace_shapes`.
    """

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config, DTYPES[config.dtype], DTYPES[config.dtype])
        self.swapped = True
        self.keys_swizzle = self.q_swizzle = SmemLayoutAtomKind.K_SW128
        self.p_swizzle = SmemLayoutAtomKind.K_SW64
        # P takes the place of its own keys' rope columns, which nothing reads once S is there.
        self.p_offset = self.block * self.latent * 2
        self.overhead = OVERHEAD
        # Ring of piece descriptors, filled `lookahead` pieces before the slowest reader: as many as the stages that are
        # filled ahead may belong to.
        self.descriptors, self.lookahead = 8, 4
        # Q's 16-column steps that stay in shared memory, for want of registers: the rope's, where L is 512.
        self.shared_steps = 4 if self.depth > 512 else 0
        # 0: the greatest P of a row is exactly 1, and no rounding touches it. Free where memory is the bound.
        self.rescale_bits = 0.0 if config.cluster == 1 else RESCALE_BITS
        self.speculate = self.rescale_bits > 0.0
        # A piece takes two stages or more; the values read its row sums before they leave its last.
        self.inverses = (self.stages + 1) // 2
        self.threads, self.leavers = 384, 1
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
        tma_q, tma_q_tensor, tma_k, tma_k_tensor = self.tensor_maps(q, kv_cache)
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
            descriptor: cute.struct.MemRange[Int32, self.descriptors * DESCRIPTOR_WORDS]
            rescale: cute.struct.MemRange[Float32, self.stages * ROWS]
            moved: cute.struct.MemRange[Int32, self.stages * 4]
            inverse: cute.struct.MemRange[Float32, self.inverses * ROWS]
            walk: cute.struct.MemRange[Int32, WALK_WORDS]
            fill: cute.struct.MemRange[Int32, 8]
            pages: cute.struct.MemRange[Int32, TABLE_AHEAD]
            q_rope: cute.struct.Align[cute.struct.MemRange[dtype, max(ROWS * 16 * self.shared_steps, 8)], 1024]
            ring: cute.struct.Align[cute.struct.MemRange[dtype, self.stages * self.stage_elements], 1024]

        self.check_storage(Storage)
        parts = self.parts(seq_lens, split_info)
        attend = self.attend(
            q, tma_q, tma_q_tensor, tma_k, tma_k_tensor, block_tables, seq_lens, cu_seqlens_q, scales, out, lse,
            partial_out, partial_lse, split_info, mma_qk, mma_qk_shared, mma_pv, parts,
        )  # fmt: skip
        self.launch(attend, parts, stream, partial_out, partial_lse, split_info, out, lse)

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
        parts: Int32,
    ):
        """One CTA: set up the barriers, find the first piece of work, then each warpgroup its role."""
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tidx // 128)
        rank = cute.arch.make_warp_uniform(block_idx % self.cluster)
        part = cute.arch.make_warp_uniform(block_idx // self.cluster)

        early = self.early_numbers(seq_lens, cu_seqlens_q)
        smem = utils.SmemAllocator()
        storage = smem.allocate(self.storage)
        full, empty, ready = storage.full.data_ptr(), storage.empty.data_ptr(), storage.ready.data_ptr()
        descriptor, rescale, moved, inverse = self.factors(storage)
        ring = storage.ring.data_ptr()
        s_k, s_p = self.ring_tensors(ring)

        if warp_idx == 4:
            cpasync.prefetch_descriptor(tma_q)
            cpasync.prefetch_descriptor(tma_k)
        if warp_idx >= 9:
            self.prefetch_operands(q, block_tables, warp_idx - 9)
        if warp_idx == 0:
            self.init_barriers(full, empty, ready)
        self.sync_barriers()

        atom = warpgroup.make_smem_layout_atom(self.keys_swizzle, self.dtype)
        q_atom = cute.tile_to_shape(atom, (ROWS, 64), (0, 1))
        s_q_rope = storage.q_rope.get_tensor(q_atom.outer, swizzle=q_atom.inner)
        walk = storage.walk.get_tensor(cute.make_layout(WALK_WORDS))
        # In the stage that Q comes to, which no other CTA fills.
        order = cute.make_tensor(cute.recast_ptr(ring, dtype=Int32), cute.make_layout(SORTED))
        fill = storage.fill.get_tensor(cute.make_layout(8))
        pages = storage.pages.get_tensor(cute.make_layout(TABLE_AHEAD))
        schedule = (
            block_tables, seq_lens, cu_seqlens_q, partial_lse, split_info, descriptor, walk, parts, part, rank,
            lse.shape[0], order,
        )  # fmt: skip
        copies = (
            tma_q, tma_q_tensor, tma_k, tma_k_tensor, block_tables, s_k, descriptor, fill, pages, full, rank,
        )  # fmt: skip
        if warp_idx == 4:
            self.begin_schedule(schedule, early)
            self.next_piece(Int32(0), schedule)
            self.begin_copies(copies)
        cute.arch.sync_threads()
        if group == 0:
            cute.arch.setmaxregister_increase(self.registers[0])
            self.score(
                scales, lse, partial_lse, s_k, s_p, descriptor, rescale, moved, inverse, full, ready, mma_qk,
                mma_qk_shared, s_q_rope, rank,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_decrease(self.registers[1])
            self.accumulate(
                out, partial_out, partial_lse, s_k, s_p, descriptor, rescale, moved, inverse, empty, ready, mma_pv,
                group - 1, rank, warp_idx, schedule, copies,
            )  # fmt: skip
        cute.arch.griddepcontrol_launch_dependents()
        self.end()

    @cute.jit
    def stage(self, s_k: cute.Tensor, s_p: cute.Tensor, index: Int32):
        """The keys and the P of stage `index`, for WGMMA."""
        return self.stage_tensors(s_k, s_p, self.address(s_k, index))

    @cute.jit
    def score(
        self,
        scales: cute.Tensor,
        lse: cute.Tensor,
        partial_lse: cute.Tensor,
        s_k: cute.Tensor,
        s_p: cute.Tensor,
        descriptor: cute.Tensor,
        rescale: cute.Tensor,
        moved: cute.Tensor,
        inverse: cute.Tensor,
        full: cute.Pointer,
        ready: cute.Pointer,
        mma_qk: cute.TiledMma,
        mma_qk_shared: cute.TiledMma,
        s_q_rope: cute.Tensor,
        rank: Int32,
    ):
        """Warpgroup 0: Q into registers once a piece, then for every block of keys Q K^T, softmax and P."""
        tidx, _, _ = cute.arch.thread_idx()
        t = tidx % 128
        lane = self.kept(t % 32)
        signals = Int32(self.signals(lane))
        warp_here = cute.arch.make_warp_uniform(t // 32)
        scale = scales[0] * LOG2_E
        out_scale = scales[1]

        thr_qk = mma_qk.get_slice(t)
        register_columns = self.depth - 16 * self.shared_steps
        r_q = cute.make_rmem_tensor(thr_qk.partition_shape_A((ROWS, register_columns)), self.dtype)
        t_q_rope = mma_qk_shared.make_fragment_A(mma_qk_shared.get_slice(t).partition_A(s_q_rope))
        acc = cute.make_rmem_tensor(thr_qk.partition_shape_C((ROWS, self.block)), Float32)
        probabilities = cute.make_rmem_tensor(acc.layout, Float32) if const_expr(self.speculate) else acc
        by_rows = cute.make_layout((2, (2, self.block // 8)), stride=(2, (1, 4)))
        s, p = cute.make_tensor(acc.iterator, by_rows), cute.make_tensor(probabilities.iterator, by_rows)
        steps = self.depth // 16

        # Q's rows lie in two stages of 32: a warp reads the one that holds its 16 rows, as if it were the first.
        load_q = cute.make_tiled_copy_A(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype), mma_qk)
        thr_load_q = load_q.get_slice(t % 64)
        q_atom = warpgroup.make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, self.dtype)
        tile_layout = cute.tile_to_shape(q_atom, (self.block, register_columns), (0, 1)).outer
        # 64 rows for the copy's tile, of which slices 0 to 63 touch the first 32 alone.
        q_shape = ((*tile_layout.shape[0], 2), tile_layout.shape[1])
        q_stride = ((*tile_layout.stride[0], 0), tile_layout.stride[1])
        q_tile_layout = cute.make_layout(q_shape, stride=q_stride)

        # A lane's row of P, of 64 bytes: its first 16 bytes, or the second, exchanged by the swizzle.
        r_p = cute.make_rmem_tensor(acc.layout, self.dtype)
        p_words = cute.recast_tensor(r_p, Int32)
        p_row = warp_here * 16 + lane % 16
        p_offset = self.kept(self.p_offset + p_row * 64 + (((lane // 16) ^ ((p_row >> 1) & 3)) << 4))

        # Rows of Q's rope as 16-byte words, in a stage and where they stay: the same bytes in the same order.
        words = cute.make_layout((4, 128, 2), stride=(1, 4, 512))
        rope_there = cute.make_tensor(
            cute.recast_ptr(s_q_rope.iterator, cute.make_swizzle(0, 4, 3), dtype=Float32),
            cute.make_layout((4, 128, 2, 2), stride=(1, 4, 512, 1024)),
        )
        rope_word = cute.make_rmem_tensor((4,), Float32)
        zero_words = cute.make_tensor(
            cute.recast_ptr(s_k.iterator, cute.make_swizzle(0, 4, 3), dtype=Float32),
            cute.make_layout(
                (32, self.block, self.latent // 64, self.stages),
                stride=(1, 32, 32 * self.block, self.stage_elements // 2),
            ),
        )

        row_low = warp_here * 16 + lane // 4
        m = cute.make_rmem_tensor((2,), Float32)
        l = cute.make_rmem_tensor((2,), Float32)
        index, phase, piece = Int32(0), Int32(0), Int32(0)
        running = Int32(1)
        while running == 1:
            cute.arch.mbarrier_wait(full + index, phase)
            at, b_begin, b_end = self.described(descriptor, piece)
            if b_begin == b_end:
                running = Int32(0)
                self.signal(ready, index, lane)
            else:
                # Q into registers. Its rows 32 and up are in the next stage, if the row tile has as many.
                first_index = index
                q_index = index
                index, phase = self.advance(index, phase)
                q_stages = self.uniform(descriptor[9, at])
                if q_stages == 2:
                    cute.arch.mbarrier_wait(full + index, phase)
                    if warp_here >= 2:
                        q_index = index
                q_stage = s_k[None, None, q_index]
                q_tile = cute.make_tensor(q_stage.iterator, q_tile_layout)
                cute.copy(load_q, thr_load_q.partition_S(q_tile), thr_load_q.retile(r_q))
                if const_expr(self.shared_steps > 0):
                    for h in cutlass.range(q_stages, unroll=1):
                        stage_of = first_index
                        if h == 1:
                            stage_of = index
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
                    cute.arch.barrier(barrier_id=1, number_of_threads=128)
                self.signal(ready, first_index, lane)
                if q_stages == 2:
                    self.signal(ready, index, lane)
                    index, phase = self.advance(index, phase)

                self.begin_rows(m, l)
                seen_by_all = self.seen_by_all(descriptor, at)
                previous, address = index, self.address(s_k, index)
                following, phase_following = self.advance(index, phase)
                arrived, stored = Int32(0), Int32(0)
                for b in cutlass.range(b_begin, b_end, unroll=1):
                    stage_keys, _ = self.stage_tensors(s_k, s_p, address)
                    t_k = mma_qk.make_fragment_B(thr_qk.partition_B(stage_keys))
                    if arrived == 0:
                        cute.arch.mbarrier_wait(full + index, phase)
                    warpgroup.fence()
                    mma_qk.set(Field.ACCUMULATE, False)
                    mma_qk_shared.set(Field.ACCUMULATE, True)
                    for k in cutlass.range_constexpr(steps):
                        if const_expr(k == steps - EARLY_STEPS):
                            # The tensor cores take turns: P V of the block before runs during this block's softmax. It
                            # is let loose as long before the end of Q K^T as its warps take to wake up: a step that
                            # meets P V there waits for a whole instruction of it, eight times its own length.
                            self.signal_if(stored, ready, previous)
                        if const_expr(k < steps - self.shared_steps):
                            cute.gemm(mma_qk, acc, r_q[None, None, k], t_k[None, None, k], acc)
                        else:
                            q_step = t_q_rope[None, None, k - steps + self.shared_steps]
                            cute.gemm(mma_qk_shared, acc, q_step, t_k[None, None, k], acc)
                        mma_qk.set(Field.ACCUMULATE, True)
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    previous, index, phase = index, following, phase_following
                    address_here = address
                    arrived, address, following, phase_following = self.look_ahead(full, index, phase, s_k)
                    if (b + 1) * self.block > seen_by_all:
                        self.mask(s, b, descriptor, at, row_low, lane)
                    self.softmax(s, p, m, l, scale, rescale, moved, row_low, lane, warp_here, previous)
                    r_p.store(probabilities.load().to(self.dtype))
                    # All four warps have read these keys' rope columns: P may overwrite them.
                    cute.arch.barrier(barrier_id=1, number_of_threads=128)
                    self.store_p(address_here + p_offset, p_words)
                    stored = signals
                # P is 0 past the end, but unused slots may hold NaN: 0 * NaN must not reach O.
                for row in cutlass.range(
                    cutlass.max(descriptor[2, at] - (b_end - 1) * self.block, 0), self.block, unroll=1
                ):
                    for c in cutlass.range_constexpr(self.latent // 256):
                        zero_words[lane, row, warp_here + 4 * c, previous] = Float32(0.0)
                self.finish(l, m, inverse, lse, partial_lse, out_scale, row_low, lane, descriptor, at, rank, piece)
                self.signal(ready, previous, lane)
                piece += 1

    @cute.jit
    def accumulate(
        self,
        out: cute.Tensor,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        s_k: cute.Tensor,
        s_p: cute.Tensor,
        descriptor: cute.Tensor,
        rescale: cute.Tensor,
        moved: cute.Tensor,
        inverse: cute.Tensor,
        empty: cute.Pointer,
        ready: cute.Pointer,
        mma_pv: cute.TiledMma,
        half: Int32,
        rank: Int32,
        warp_idx: Int32,
        schedule: cutlass.Constexpr,
        copies: cutlass.Constexpr,
    ):
        """Warpgroups 1 and 2: O[:, half] += P V[:, half] and the epilogue; two of their warps copy and schedule."""
        tidx, _, _ = cute.arch.thread_idx()
        t = tidx % 128
        lane = t % 32
        row_low = (t // 32) * 16 + lane // 4
        thr = mma_pv.get_slice(t)
        acc = cute.make_rmem_tensor(thr.partition_shape_C((ROWS, self.half)), Float32)
        groups = self.half // 8
        mma_pv.set(Field.ACCUMULATE, True)
        o = cute.make_tensor(acc.iterator, cute.make_layout((2, (2, groups)), stride=(2, (1, 4))))

        index, phase, piece = Int32(0), Int32(0), Int32(0)
        if warp_idx == 4:
            self.fill_ring(copies)
        if warp_idx == 8:
            # The first copies do not wait for these.
            for i in cutlass.range(1, self.lookahead, unroll=1):
                self.next_piece(i, schedule)
            cute.arch.barrier(barrier_id=2, number_of_threads=64)
        pending, phase_of_pending = Int32(-1), Int32(0)
        inverse_low, inverse_high = Float32(0.0), Float32(0.0)
        running = Int32(1)
        while running == 1:
            # Every use of a stage, Q's too, goes full -> ready -> empty, so that the three barriers stay in step.
            cute.arch.mbarrier_wait(ready + index, phase)
            at, b_begin, b_end = self.described(descriptor, piece)
            if b_begin == b_end:
                running = Int32(0)
            else:
                for _ in cutlass.range(self.uniform(descriptor[9, at]), unroll=1):
                    cute.arch.mbarrier_wait(ready + index, phase)
                    self.refill(pending, phase_of_pending, empty, warp_idx, copies)
                    pending, phase_of_pending = index, phase
                    self.leave(index, empty)
                    index, phase = self.advance(index, phase)
                acc.fill(0.0)
                for b in cutlass.range(b_begin, b_end, unroll=1):
                    stage_keys, stage_p = self.stage(s_k, s_p, index)
                    values = cute.make_tensor(stage_keys.iterator, cute.select(stage_keys.layout, mode=[1, 0]))
                    values = cute.local_tile(values, (self.half, self.block), (half, 0))
                    t_v = mma_pv.make_fragment_B(thr.partition_B(values))
                    t_p = mma_pv.make_fragment_A(thr.partition_A(stage_p))
                    cute.arch.mbarrier_wait(ready + index, phase)
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
                    self.refill(pending, phase_of_pending, empty, warp_idx, copies)
                    warpgroup.wait_group(0)
                    pending, phase_of_pending = index, phase
                    if b + 1 == b_end:
                        kept = piece % self.inverses
                        inverse_low, inverse_high = inverse[row_low, kept], inverse[row_low + 8, kept]
                    self.leave(index, empty)
                    index, phase = self.advance(index, phase)
                self.store(
                    out, partial_out, partial_lse, o, inverse_low, inverse_high, row_low, lane, half, descriptor, at,
                    rank,
                )  # fmt: skip
                if warp_idx == 8:
                    self.next_piece(piece + self.lookahead, schedule)
                piece += 1

    @cute.jit
    def refill(self, index: Int32, phase: Int32, empty: cute.Pointer, warp_idx: Int32, copies: cutlass.Constexpr):
        """The copying warp fills a stage, when all have left it. index -1: there is none."""
        if warp_idx == 4 and index >= 0:
            cute.arch.mbarrier_wait(empty + index, phase)
            self.produce(index, copies)

    @cute.jit
    def store(
        self,
        out: cute.Tensor,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        o: cute.Tensor,
        inverse_low: Float32,
        inverse_high: Float32,
        row_low: Int32,
        lane: Int32,
        half: Int32,
        descriptor: cute.Tensor,
        at: Int32,
        rank: Int32,
    ):
        """O / row sum to `out`, or to the piece's slot of partial_out."""
        out_row, valid_rows, slot = descriptor[5, at], descriptor[6, at], descriptor[7, at]
        quad = lane % 4
        groups = self.half // 8
        column = half * self.half + quad * 8
        for i in cutlass.range_constexpr(2):
            row = row_low + 8 * i
            factor = inverse_low if const_expr(i == 0) else inverse_high
            # A lane holds 2 columns of each group of 8, and stores 8 for each four groups.
            if slot < 0:
                # The four lanes of a row swap so that each has one group of the four.
                line = cute.make_tensor(
                    element(out, Int64(out_row + row) * self.latent + column, 16),
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
                if const_expr(self.scaled):
                    factor, scale = self.fit(o, i, factor)
                    if quad == 0 and row < valid_rows:
                        partial_lse[slot, 1 + half, tile_row] = scale
                line = cute.make_tensor(
                    element(partial_out, self.partial_row(slot, tile_row) * self.latent + column, 16),
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
