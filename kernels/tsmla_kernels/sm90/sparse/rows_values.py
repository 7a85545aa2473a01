"""O += P V of plain rows of 16 bits, both in shared memory, for the kernel that has Q in registers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field

from tsmla_kernels.sm90.latent.memory import SCHEDULE_WARP, Piece, Schedule, Shared
from tsmla_kernels.sm90.latent.row_outputs import OutPlace, RowOutputs
from tsmla_kernels.sm90.latent.shape import ROWS
from tsmla_kernels.sm90.latent.walk import Walk
from tsmla_kernels.sm90.sparse.config import LATENT_DIM, SparseConfig
from tsmla_kernels.sm90.sparse.memory import Arrays
from tsmla_kernels.sm90.sparse.rows_gather import RowGatherer
from tsmla_kernels.sm90.sparse.rows_stages import STAGES_OF_BLOCK, RowStages
from tsmla_kernels.sm90.warp import uniform


class RowValues:
    """P V, and the epilogue.

    Attributes:
      lookahead: as in SparseConfig. copier: the gathering warps.
      half: how many latents a value warpgroup has. quarter: how many of them an instruction takes. ptxas takes none
        with 256 columns in a kernel of 512 threads.
    """

    def __init__(self, config: SparseConfig, stages: RowStages, walk: Walk, gatherer: RowGatherer) -> None:
        self.ring, self.stages, self.walk, self.copier = stages.ring, stages, walk, gatherer
        self.block, self.lookahead = stages.block, config.lookahead
        self.half, self.quarter = LATENT_DIM // 2, LATENT_DIM // 4
        self.outputs = RowOutputs(config.shape)

    def mma(self) -> cute.TiledMma:
        """The MMA of P V: 64 query rows by a quarter of the latents."""
        dtype = self.ring.dtype
        return sm90.make_trivial_tiled_mma(
            dtype, dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1), (ROWS, self.quarter)
        )

    @cute.jit
    def accumulate(
        self, arrays: Arrays, shared: Shared, mma_pv: cute.TiledMma, half: Int32, warp_idx: Int32, schedule: Schedule
    ):
        """Run warpgroups 1 and 2: O[:, half] += P V[:, half] and the epilogue. One of their warps also schedules."""
        moved, rescale, inverse = shared.moved, shared.rescale, shared.inverse
        tidx, _, _ = cute.arch.thread_idx()
        t = tidx % 128
        lane = t % 32
        row_low = (t // 32) * 16 + lane // 4
        thr = mma_pv.get_slice(t)
        acc = cute.make_rmem_tensor((self.half // 2,), Float32)
        tile_layout = cute.make_layout(thr.partition_shape_C((ROWS, self.quarter)))
        tiles = [cute.make_tensor(acc.iterator + i * (self.quarter // 2), tile_layout) for i in range(2)]
        mma_pv.set(Field.ACCUMULATE, True)
        o = cute.make_tensor(acc.iterator, cute.make_layout((2, (2, self.half // 8)), stride=(2, (1, 4))))
        index, phase, number = Int32(0), Int32(0), Int32(0)
        if warp_idx == SCHEDULE_WARP:
            # The first piece has been described before. The next ones follow only here, so that the first copies do not
            # wait for them.
            for i in cutlass.range(1, self.lookahead, unroll=1):
                self.walk.next_piece(i, schedule)
            self.copier.meet_for_first_pieces()
        inverse_low, inverse_high = Float32(0.0), Float32(0.0)
        running = Int32(1)
        while running == 1:
            cute.arch.mbarrier_wait(shared.ready + index, phase)
            piece, b_begin, b_end = self.ring.described(number, shared.pieces)
            if b_begin == b_end:
                running = Int32(0)
            else:
                # Every use of a stage, also by Q, goes full -> ready -> empty, so that the three barriers stay in step.
                for _ in cutlass.range(uniform(piece[Piece.Q_STAGES]), unroll=1):
                    cute.arch.mbarrier_wait(shared.ready + index, phase)
                    self.ring.release(index, shared.empty)
                    index, phase = self.ring.advance(index, phase)
                acc.fill(0.0)
                for b in cutlass.range(STAGES_OF_BLOCK * b_begin, STAGES_OF_BLOCK * b_end, unroll=1):
                    address = self.ring.address(shared.keys, index)
                    keys, p = self.stages.stage_keys(shared, address), self.ring.stage_p(shared, address)
                    values = cute.make_tensor(keys.iterator, cute.select(keys.layout, mode=[1, 0]))
                    quarters = [
                        cute.local_tile(values, (self.quarter, self.block), (2 * half + i, 0)) for i in range(2)
                    ]
                    t_v = [mma_pv.make_fragment_B(thr.partition_B(quarter)) for quarter in quarters]
                    t_p = mma_pv.make_fragment_A(thr.partition_A(p))
                    cute.arch.mbarrier_wait(shared.ready + index, phase)
                    # Order the writes of P and of keys before WGMMA's reads.
                    cute.arch.fence_proxy("async.shared", space="cta")
                    if moved[row_low // 16, index] != 0:
                        low, high = rescale[row_low, index], rescale[row_low + 8, index]
                        for c in cutlass.range_constexpr(self.half // 4):
                            o[0, c] = o[0, c] * low
                            o[1, c] = o[1, c] * high
                    warpgroup.fence()
                    for k in cutlass.range_constexpr(self.block // 16):
                        for i in cutlass.range_constexpr(2):
                            cute.gemm(mma_pv, tiles[i], t_p[None, None, k], t_v[i][None, None, k], tiles[i])
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    if b + 1 == STAGES_OF_BLOCK * b_end:
                        column = number % self.ring.inverses_kept
                        inverse_low, inverse_high = inverse[row_low, column], inverse[row_low + 8, column]
                    self.ring.release(index, shared.empty)
                    index, phase = self.ring.advance(index, phase)
                place = OutPlace(half, lane, row_low)
                self.outputs.store(o, (inverse_low, inverse_high), place, piece, arrays, schedule.rank)
                if warp_idx == SCHEDULE_WARP:
                    self.walk.next_piece(number + self.lookahead, schedule)
                number += 1
