"""O += P V of decode for queries and cache of 16 bits, and the epilogue."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field

from tsmla_kernels.sm90.decode.config import DecodeConfig
from tsmla_kernels.sm90.decode.copies import Copier
from tsmla_kernels.sm90.decode.memory import LOOKAHEAD, Arrays, Copies
from tsmla_kernels.sm90.decode.stages import Stages
from tsmla_kernels.sm90.latent.memory import SCHEDULE_WARP, Piece, Schedule, Shared
from tsmla_kernels.sm90.latent.row_outputs import OutPlace, RowOutputs
from tsmla_kernels.sm90.latent.shape import ROWS
from tsmla_kernels.sm90.latent.walk import PieceWalk
from tsmla_kernels.sm90.warp import uniform


class Values16bit:
    """P V with P and V of 16 bits, both in shared memory."""

    def __init__(self, config: DecodeConfig, stages: Stages, walk: PieceWalk, copier: Copier) -> None:
        self.ring, self.stages, self.walk, self.copier = stages.ring, stages, walk, copier
        self.block, self.half = config.block, config.latent_dim // 2
        self.outputs = RowOutputs(config.shape)

    def mma(self) -> cute.TiledMma:
        """The MMA of P V: 64 query rows by half of the latents."""
        dtype = self.ring.dtype
        return sm90.make_trivial_tiled_mma(
            dtype, dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1), (ROWS, self.half)
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
        """Run warpgroups 1 and 2: O[:, half] += P V[:, half] and the epilogue. One of their warps copies, another one
        schedules."""
        moved, rescale, inverse = shared.moved, shared.rescale, shared.inverse
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
        if warp_idx == self.copier.warp:
            self.copier.fill(copies)
        if warp_idx == SCHEDULE_WARP:
            # The first piece has been described before. The next ones follow only here, so that the first copies do not
            # wait for them.
            for i in cutlass.range(1, LOOKAHEAD, unroll=1):
                self.walk.next_piece(i, schedule)
            self.copier.meet_for_first_pieces()
        pending, phase_of_pending = Int32(-1), Int32(0)
        inverse_low, inverse_high = Float32(0.0), Float32(0.0)
        running = Int32(1)
        while running == 1:
            # Every use of a stage, also by Q, goes full -> ready -> empty, so that the three barriers stay in step.
            cute.arch.mbarrier_wait(shared.ready + index, phase)
            piece, b_begin, b_end = self.ring.described(number, shared.pieces)
            if b_begin == b_end:
                running = Int32(0)
            else:
                for _ in cutlass.range(uniform(piece[Piece.Q_STAGES]), unroll=1):
                    cute.arch.mbarrier_wait(shared.ready + index, phase)
                    self.copier.refill(pending, phase_of_pending, shared.empty, warp_idx, copies)
                    pending, phase_of_pending = index, phase
                    self.ring.release(index, shared.empty)
                    index, phase = self.ring.advance(index, phase)
                acc.fill(0.0)
                for b in cutlass.range(b_begin, b_end, unroll=1):
                    address = self.ring.address(shared.keys, index)
                    stage_keys = self.stages.stage_keys(shared, address)
                    stage_p = self.ring.stage_p(shared, address)
                    values = cute.make_tensor(stage_keys.iterator, cute.select(stage_keys.layout, mode=[1, 0]))
                    values = cute.local_tile(values, (self.half, self.block), (half, 0))
                    t_v = mma_pv.make_fragment_B(thr.partition_B(values))
                    t_p = mma_pv.make_fragment_A(thr.partition_A(stage_p))
                    cute.arch.mbarrier_wait(shared.ready + index, phase)
                    # Order the softmax warps' writes of P and of zeros before WGMMA's reads. The readers execute the
                    # fence, because the softmax warpgroup is the critical path.
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
                    # While WGMMA runs, refill the stage that was released last.
                    self.copier.refill(pending, phase_of_pending, shared.empty, warp_idx, copies)
                    warpgroup.wait_group(0)
                    pending, phase_of_pending = index, phase
                    if b + 1 == b_end:
                        kept = number % self.ring.inverses_kept
                        inverse_low, inverse_high = inverse[row_low, kept], inverse[row_low + 8, kept]
                    self.ring.release(index, shared.empty)
                    index, phase = self.ring.advance(index, phase)
                place = OutPlace(half, lane, row_low)
                self.outputs.store(o, (inverse_low, inverse_high), place, piece, arrays, schedule.rank)
                if warp_idx == SCHEDULE_WARP:
                    self.walk.next_piece(number + LOOKAHEAD, schedule)
                number += 1
