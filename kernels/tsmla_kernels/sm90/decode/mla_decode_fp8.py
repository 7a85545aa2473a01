"""Absorbed MLA decode with queries and a paged latent cache of e4m3, for Hopper. DESIGN.md says why it is so.

Four warpgroups of a CTA share 64 query rows (token * H + head) and a ring of 64-key stages:

  warpgroup 0   scores: S = Q K^T (fp8 WGMMA), softmax, P into shared memory as f16
  1 and 2       values: O^T[half] += V^T[half] P^T (f16 WGMMA), V^T through registers: transposed by ldmatrix, widened
                there; rescale, epilogue. First warp of 2: the schedule
  3             one warp: the copies

P is not rounded to fp8, which would be most of the output's error. Merging is decode_combine's.
"""

from __future__ import annotations

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
from tsmla_kernels.sm90.decode.ring import TABLE_AHEAD
from tsmla_kernels.sm90.decode.schedule import DESCRIPTOR_WORDS, SORTED, WALK_WORDS
from tsmla_kernels.sm90.warp import LOG2_E, element, quotient

OVERHEAD = 5  # what starting a piece costs, in key blocks: Q, the first keys' latency, the epilogue
RESCALE_BITS = 8.0  # how far the running maximum may lag: P of f16 holds that much, and rounds it no worse
EARLY_STEPS = 8  # 32-column steps of Q K^T that are still to come when the values' warpgroups are let loose
AHEAD = 2  # fragments of V^T, 64 latents of 32 keys each, that a warpgroup has in registers as fp8, or on their way
WIDE = 4  # of their halves, 16 keys each, that it has there as f16


class MlaDecodeFp8(DecodeKernel):
    """One compiled decode: `config` is static, all shapes but H, L, R and Z are dynamic.

    Operands of the launcher: as MlaDecode's, q and kv_cache of e4m3, out of bf16.
    """

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config, cutlass.Float8E4M3FN, cutlass.Float16)
        self.swapped = False
        self.keys_swizzle = self.q_swizzle = SmemLayoutAtomKind.K_SW64
        self.p_swizzle = SmemLayoutAtomKind.K_SW128
        self.p_offset = self.block * self.depth
        self.overhead = OVERHEAD
        self.descriptors, self.lookahead = 8, 4
        self.m_tiles = self.half // 64  # of a values' warpgroup
        self.kept_rows, self.kept_dtype = ROWS, self.dtype  # of Q where it stays
        self.loads_keys = False  # whether the scores' warps read keys by ordinary loads, and not by WGMMA
        self.rescale_bits = RESCALE_BITS
        self.inverses = self.stages // 2 + 1  # a piece takes two stages or more
        # With few rows the scores are what the others wait for; with many, registers and instructions are dear.
        self.speculate = self.p_rows < ROWS
        self.threads, self.leavers = 512, 4
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
        tma_q, tma_q_tensor, tma_k, tma_k_tensor = self.tensor_maps(q, kv_cache)
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
            descriptor: cute.struct.MemRange[Int32, self.descriptors * DESCRIPTOR_WORDS]
            rescale: cute.struct.Align[cute.struct.MemRange[Float32, self.stages * ROWS], 16]
            moved: cute.struct.Align[cute.struct.MemRange[Int32, self.stages * 4], 16]
            inverse: cute.struct.Align[cute.struct.MemRange[Float32, self.inverses * ROWS], 16]
            walk: cute.struct.MemRange[Int32, WALK_WORDS]
            fill: cute.struct.MemRange[Int32, 8]
            pages: cute.struct.MemRange[Int32, TABLE_AHEAD]
            exchange: cute.struct.Align[cute.struct.MemRange[Float32, self.config.exchanged_words], 16]
            q: cute.struct.Align[cute.struct.MemRange[self.kept_dtype, self.kept_rows * self.depth], 1024]
            ring: cute.struct.Align[cute.struct.MemRange[self.dtype, self.stages * self.stage_elements], 1024]

        self.check_storage(Storage)
        parts = self.parts(seq_lens, split_info)
        attend = self.attend(
            q, tma_q, tma_q_tensor, tma_k, tma_k_tensor, block_tables, seq_lens, cu_seqlens_q, scales, out, lse,
            partial_out, partial_lse, split_info, mma_qk, mma_pv, parts,
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
        s_k, s_p = self.ring_tensors(storage.ring.data_ptr())

        if warp_idx == 12:
            cpasync.prefetch_descriptor(tma_q)
            cpasync.prefetch_descriptor(tma_k)
        if warp_idx >= 13:
            self.prefetch_operands(q, block_tables, warp_idx - 13)
        if warp_idx == 0:
            self.init_barriers(full, empty, ready)
        self.sync_barriers()

        walk = storage.walk.get_tensor(cute.make_layout(WALK_WORDS))
        # In the stage that Q comes to, which no other CTA fills.
        order = cute.make_tensor(cute.recast_ptr(storage.ring.data_ptr(), dtype=Int32), cute.make_layout(SORTED))
        fill = storage.fill.get_tensor(cute.make_layout(8))
        pages = storage.pages.get_tensor(cute.make_layout(TABLE_AHEAD))
        schedule = (
            block_tables, seq_lens, cu_seqlens_q, partial_lse, split_info, descriptor, walk, parts, part, rank,
            lse.shape[0], order,
        )  # fmt: skip
        copies = (
            tma_q, tma_q_tensor, tma_k, tma_k_tensor, block_tables, s_k, descriptor, fill, pages, full, rank,
        )  # fmt: skip
        if warp_idx == 12:
            self.begin_schedule(schedule, early)
            self.next_piece(Int32(0), schedule)
            self.begin_copies(copies)
        cute.arch.sync_threads()
        if group == 3:
            cute.arch.setmaxregister_decrease(self.registers[2])
            if warp_idx == 12:
                self.copy(empty, copies)
        else:
            if group == 0:
                cute.arch.setmaxregister_decrease(self.registers[0])
                q_tile = cute.tile_to_shape(
                    warpgroup.make_smem_layout_atom(self.q_swizzle, self.kept_dtype),
                    (self.kept_rows, self.depth), (0, 1),
                )  # fmt: skip
                s_q = storage.q.get_tensor(q_tile.outer, swizzle=q_tile.inner)
                self.score(
                    scales, lse, partial_lse, s_q, s_k, s_p, descriptor, rescale, moved, inverse, full, ready, mma_qk,
                    rank, storage.exchange.data_ptr(),
                )  # fmt: skip
            else:
                cute.arch.setmaxregister_increase(self.registers[1])
                self.accumulate(
                    out, partial_out, s_k, s_p, descriptor, rescale, moved, inverse, full, empty, ready, mma_pv,
                    group - 1, rank, warp_idx, schedule,
                )  # fmt: skip
            # Not by the warps without work: `combine` would come at once, and wait in the way.
            cute.arch.griddepcontrol_launch_dependents()
        self.end()

    # ---- copies (one warp)

    @cute.jit
    def copy(self, empty: cute.Pointer, copies: cutlass.Constexpr):
        """Fill the ring, and each stage again when all have left it, to the end of this cluster's work."""
        fill = copies[7]
        self.fill_ring(copies)
        index, phase = Int32(0), Int32(0)
        while fill[5] == 0:
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
    def score(
        self,
        scales: cute.Tensor,
        lse: cute.Tensor,
        partial_lse: cute.Tensor,
        s_q: cute.Tensor,
        s_k: cute.Tensor,
        s_p: cute.Tensor,
        descriptor: cute.Tensor,
        rescale: cute.Tensor,
        moved: cute.Tensor,
        inverse: cute.Tensor,
        full: cute.Pointer,
        ready: cute.Pointer,
        mma_qk: cute.TiledMma,
        rank: Int32,
        exchange: cute.Pointer,
    ):
        """Warpgroup 0: for every block of keys Q K^T, softmax and P."""
        tidx, _, _ = cute.arch.thread_idx()
        t = tidx % 128
        lane = self.kept(t % 32)
        signals = Int32(self.signals(lane))
        warp_here = cute.arch.make_warp_uniform(t // 32)
        scale = scales[0] * LOG2_E
        out_scale = scales[1]

        thr_qk = mma_qk.get_slice(t)
        t_q = mma_qk.make_fragment_A(thr_qk.partition_A(s_q))
        acc = cute.make_rmem_tensor(thr_qk.partition_shape_C((ROWS, self.block)), Float32)
        probabilities = cute.make_rmem_tensor(acc.layout, Float32) if const_expr(self.speculate) else acc
        by_rows = cute.make_layout((2, (2, self.block // 8)), stride=(2, (1, 4)))
        s, p = cute.make_tensor(acc.iterator, by_rows), cute.make_tensor(probabilities.iterator, by_rows)
        steps = self.depth // 32
        # Q in a stage and where it stays, in 16-byte words: the same bytes in the same order.
        q_words = cute.make_layout((4, 128, ROWS * self.depth // (16 * 128)), stride=(1, 4, 512))
        plain = cute.make_swizzle(0, 4, 3)
        q_there = cute.make_tensor(cute.recast_ptr(s_q.iterator, plain, dtype=Float32), q_words)
        word = cute.make_rmem_tensor((4,), Float32)

        # A lane's row of P, of 128 bytes: its first 16 bytes, or the second, exchanged by the swizzle.
        r_p = cute.make_rmem_tensor(acc.layout, self.p_dtype)
        p_words = cute.recast_tensor(r_p, Int32)
        p_row = warp_here * 16 + lane % 16
        p_offset = self.kept(self.p_offset + p_row * 128 + (((lane // 16) ^ (p_row & 7)) << 4))

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
                q_here = cute.make_tensor(
                    cute.recast_ptr(s_k[None, None, index].iterator, plain, dtype=Float32), q_words
                )
                # All four warps have read the Q that is there.
                cute.arch.barrier(barrier_id=1, number_of_threads=128)
                for i in cutlass.range(cute.size(q_words, mode=[2]), unroll=3):
                    cute.autovec_copy(q_here[None, t, i], word)
                    cute.autovec_copy(word, q_there[None, t, i])
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=1, number_of_threads=128)
                self.q_is_read(piece)
                self.signal(ready, index, lane)
                index, phase = self.advance(index, phase)

                self.begin_rows(m, l)
                seen_by_all = self.seen_by_all(descriptor, at)
                previous, address = index, self.address(s_k, index)
                following, phase_following = self.advance(index, phase)
                arrived, stored = Int32(0), Int32(0)
                # The blocks with a mask in a loop of their own: to jump over it takes 20 cycles of the others.
                unmasked = cutlass.min(cutlass.max(quotient(seen_by_all, self.block), b_begin), b_end)
                for masked in cutlass.range_constexpr(2):
                    first, last = (b_begin, unmasked) if const_expr(masked == 0) else (unmasked, b_end)
                    for b in cutlass.range(first, last, unroll=1):
                        stage_keys, _ = self.stage_tensors(s_k, s_p, address)
                        t_k = mma_qk.make_fragment_B(thr_qk.partition_B(stage_keys))
                        if arrived == 0:
                            cute.arch.mbarrier_wait(full + index, phase)
                        warpgroup.fence()
                        mma_qk.set(Field.ACCUMULATE, False)
                        for k in cutlass.range_constexpr(steps):
                            if const_expr(k == steps - EARLY_STEPS):
                                # The tensor cores take turns, as in MlaDecode.
                                self.signal_if(stored, ready, previous)
                            cute.gemm(mma_qk, acc, t_q[None, None, k], t_k[None, None, k], acc)
                            mma_qk.set(Field.ACCUMULATE, True)
                        warpgroup.commit_group()
                        warpgroup.wait_group(0)
                        previous, index, phase = index, following, phase_following
                        address_here = address
                        arrived, address, following, phase_following = self.look_ahead(full, index, phase, s_k)
                        if const_expr(masked == 1):
                            self.mask(s, b, descriptor, at, row_low, lane)
                        self.softmax(s, p, m, l, scale, rescale, moved, row_low, lane, warp_here, previous)
                        r_p.store(probabilities.load().to(self.p_dtype))
                        self.store_p(address_here + p_offset, p_words)
                        stored = signals
                self.finish(l, m, inverse, lse, partial_lse, out_scale, row_low, lane, descriptor, at, rank, piece)
                self.signal(ready, previous, lane)
                piece += 1

    # ---- values

    @cute.jit
    def accumulate(
        self,
        out: cute.Tensor,
        partial_out: cute.Tensor,
        s_k: cute.Tensor,
        s_p: cute.Tensor,
        descriptor: cute.Tensor,
        rescale: cute.Tensor,
        moved: cute.Tensor,
        inverse: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        ready: cute.Pointer,
        mma_pv: cute.TiledMma,
        half: Int32,
        rank: Int32,
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
        thr = mma_pv.get_slice(t)
        acc = cute.make_rmem_tensor(thr.partition_shape_C((self.half, self.p_rows)), Float32)
        mma_pv.set(Field.ACCUMULATE, True)
        # (query row of two, latent of two, eight query rows, tile)
        o = cute.make_tensor(
            acc.iterator, cute.make_layout((2, 2, self.p_rows // 8, self.m_tiles), stride=(1, 2, 4, self.p_rows // 2))
        )
        r_v = cute.make_rmem_tensor((8, WIDE), self.p_dtype)
        narrow = cute.make_rmem_tensor((4, AHEAD), Int32)
        a_shape, tile_shape = thr.partition_shape_A((64, 16)), thr.partition_shape_C((64, self.p_rows))
        first_tile = half * (self.half // 16) + (t // 32) * self.m_tiles  # of 16 latents
        # Where this lane's key of the first 32 has the first tile's columns, in a stage.
        offset = self.kept(
            (first_tile // 4) * (64 * self.block) + lane * 64 + (((first_tile % 4) ^ ((lane >> 1) & 3)) << 4)
        )

        index, phase, piece = Int32(0), Int32(0), Int32(0)
        if warp_idx == 8:
            # The first copies do not wait for these.
            for i in cutlass.range(1, self.lookahead, unroll=1):
                self.next_piece(i, schedule)
            cute.arch.barrier(barrier_id=2, number_of_threads=64)
        running = Int32(1)
        while running == 1:
            # Every use of a stage, Q's too, goes full -> ready -> empty, so that the three barriers stay in step.
            cute.arch.mbarrier_wait(ready + index, phase)
            at, b_begin, b_end = self.described(descriptor, piece)
            if b_begin == b_end:
                running = Int32(0)
            else:
                self.wait_for_q_read(piece)
                self.leave(index, empty)
                index, phase = self.advance(index, phase)
                if const_expr(self.q_rows < self.kept_rows):
                    if descriptor[9, at] > 1:  # Q came in two stages
                        cute.arch.mbarrier_wait(ready + index, phase)
                        self.leave(index, empty)
                        index, phase = self.advance(index, phase)
                keys = self.uniform(descriptor[2, at])
                acc.fill(0.0)
                begun, address = Int32(0), self.address(s_k, index)  # whether this block's first values are in `narrow`
                for b in cutlass.range(b_begin, b_end, unroll=1):
                    _, stage_p = self.stage_tensors(s_k, s_p, address)
                    t_p = mma_pv.make_fragment_B(thr.partition_B(stage_p))
                    here = address + offset
                    if begun == 0:
                        cute.arch.mbarrier_wait(full + index, phase)
                        if (b + 1) * self.block > keys:
                            # P is 0 past the end, but unused slots may hold NaN: 0 * NaN must not reach O. The scores
                            # have read these keys, and no other warp reads this one's latents.
                            cute.arch.mbarrier_wait(ready + index, phase)
                            if const_expr(self.loads_keys):
                                self.wait_for_keys_read(piece)
                            self.clear(here, keys - b * self.block, lane)
                        for g in cutlass.range_constexpr(AHEAD):
                            self.read_values(here, g, narrow)
                    following, phase_following = self.advance(index, phase)
                    address = self.address(s_k, following)
                    begun, next_here = Int32(0), here
                    # V^T is read beside the product, the next block's beginning too: the scores, which want shared
                    # memory for themselves, are not at work then. If that block has keys to be zeroed, or there is
                    # none, this one's once more, to no end.
                    if b + 1 < b_end and (b + 2) * self.block <= keys:
                        begun, next_here = Int32(1), address + offset
                    cute.arch.mbarrier_wait(ready + index, phase)
                    # By the lanes that arrive at `empty` for the warp, as is `rescale`: so racecheck can follow it.
                    flag = Int32(0)
                    if lane < self.leavers:
                        flag = moved[lane, index]
                    cute.arch.fence_proxy("async.shared", space="cta")  # the scores' writes of P, as in MlaDecode
                    # The scores have begun with the next block before they let this one's product begin: so it is there
                    # already, and the answer is read later, for it takes its time.
                    awaited = begun
                    if cute.arch.mbarrier_test_wait(full + following, phase_following):
                        awaited = Int32(0)
                    for n in cutlass.range_constexpr(WIDE):  # while the flag comes
                        self.widen(n, narrow, r_v)
                        self.read_on(n, here, next_here, awaited, full + following, phase_following, narrow)
                    self.rescale_out(o, rescale, flag, index, lane)
                    for n in cutlass.range_constexpr(4 * self.m_tiles):
                        if const_expr(n >= WIDE):
                            warpgroup.wait_group(WIDE - 1)
                            self.widen(n, narrow, r_v)
                            self.read_on(n, here, next_here, awaited, full + following, phase_following, narrow)
                        warpgroup.fence()
                        a = cute.make_tensor(r_v[None, n % WIDE].iterator, cute.make_layout(a_shape))
                        g, k = n // 2, n % 2
                        tile = cute.make_tensor(
                            acc.iterator + g // 2 * (self.p_rows // 2), cute.make_layout(tile_shape)
                        )
                        cute.gemm(mma_pv, tile, a[None, None, 0], t_p[None, None, 2 * (g % 2) + k], tile)
                        warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    self.leave(index, empty)
                    index, phase = following, phase_following
                self.store(
                    out, partial_out, o, inverse, piece % self.inverses, first_tile * 16, lane, descriptor, at, rank
                )
                if warp_idx == 8:
                    self.next_piece(piece + self.lookahead, schedule)
                piece += 1

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
        words = narrow[None, g % AHEAD]
        address = self.columns(here, g // 2) + (g % 2) * (32 * 64)
        # Two keys of two neighbouring latents a word.
        words[0], words[1], words[2], words[3] = self.load_transposed(address)

    @cute.jit
    def read_on(
        self,
        n: cutlass.Constexpr[int],
        here: Int32,
        next_here: Int32,
        awaited: Int32,
        full: cute.Pointer,
        phase: Int32,
        narrow: cute.Tensor,
    ):
        """Behind half n of the fragments: where that is a fragment's last, read another one in its place: this block's
        next, or one of the next block's first, when its keys are there."""
        g, groups = n // 2, 2 * self.m_tiles
        if const_expr(n % 2 == 1):
            if const_expr(g + AHEAD < groups):
                self.read_values(here, g + AHEAD, narrow)
            else:
                if const_expr(g + AHEAD == groups):
                    if awaited == 1:
                        cute.arch.mbarrier_wait(full, phase)
                self.read_values(next_here, g % AHEAD, narrow)

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
    def two_rows(self, values: cute.Tensor, at: Int32, v: cutlass.Constexpr[int], lane: Int32, pair: cute.Tensor):
        """The lane's two query rows of the v-th eight, of column `at` of `values`, into `pair`."""
        source = cute.make_tensor((values.iterator + (at * ROWS + 8 * v + lane % 4 * 2)).align(8), cute.make_layout(2))
        cute.autovec_copy(source, pair)

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
                    if lane < self.leavers:
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
        out: cute.Tensor,
        partial_out: cute.Tensor,
        o: cute.Tensor,
        inverse: cute.Tensor,
        kept: Int32,
        first_latent: Int32,
        lane: Int32,
        descriptor: cute.Tensor,
        at: Int32,
        rank: Int32,
    ):
        """O times 1 / row sum, column `kept` of `inverse`, to `out`, or to the piece's slot of partial_out."""
        out_row, valid_rows, slot = descriptor[5, at], descriptor[6, at], descriptor[7, at]
        # Eight lanes' pairs of neighbouring latents fill a sector.
        row_low, column = lane % 4 * 2, first_latent + lane // 4 * 2
        if slot < 0:
            self.store_rows(
                element(out, Int64(out_row + row_low) * self.latent + column, 4), o, inverse, kept, lane, valid_rows,
                self.out_dtype,
            )  # fmt: skip
        else:
            row = self.partial_row(slot, rank * ROWS + row_low)
            self.store_rows(
                element(partial_out, row * self.latent + column, 2 * self.partial_dtype.width // 8), o, inverse, kept,
                lane, valid_rows, self.partial_dtype,
            )  # fmt: skip

    @cute.jit
    def store_rows(
        self,
        target: cute.Pointer,
        o: cute.Tensor,
        inverse: cute.Tensor,
        kept: Int32,
        lane: Int32,
        valid_rows: Int32,
        dtype: cutlass.Constexpr,
    ):
        """A lane's part of O from `target` on: two latents of every tile and, of each eight, two rows."""
        lines = cute.make_tensor(
            target,
            cute.make_layout((2, 2, self.p_rows // 8, self.m_tiles), stride=(1, self.latent, 8 * self.latent, 16)),
        )
        pair = cute.make_rmem_tensor((2,), dtype)
        factors = cute.make_rmem_tensor((2,), Float32)
        for v in cutlass.range_constexpr(self.p_rows // 8):
            if 8 * v < valid_rows:
                self.two_rows(inverse, kept, v, lane, factors)
                for i in cutlass.range_constexpr(2):
                    if lane % 4 * 2 + (8 * v + i) < valid_rows:
                        for tile in cutlass.range_constexpr(self.m_tiles):
                            for e in cutlass.range_constexpr(2):
                                pair[e] = (o[i, e, v, tile] * factors[i]).to(dtype)
                            cute.autovec_copy(pair, lines[None, i, v, tile])
