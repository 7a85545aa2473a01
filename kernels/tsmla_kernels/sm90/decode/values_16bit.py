"""O += P V of decode for queries and cache of 16 bits, and the epilogue."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field

from tsmla_kernels.sm90.decode.config import DecodeConfig
from tsmla_kernels.sm90.decode.copies import Copier
from tsmla_kernels.sm90.decode.memory import LOOKAHEAD, Arrays, Copies
from tsmla_kernels.sm90.decode.stages import Stages
from tsmla_kernels.sm90.latent.combine import partial_row
from tsmla_kernels.sm90.latent.memory import SCHEDULE_WARP, Described, Piece, Schedule, Shared
from tsmla_kernels.sm90.latent.shape import ROWS
from tsmla_kernels.sm90.latent.softmax import tree
from tsmla_kernels.sm90.latent.walk import PieceWalk
from tsmla_kernels.sm90.warp import DTYPES, element, transpose_quad, uniform


class OutPlace(NamedTuple):
    """A thread of a value warpgroup: its half of the columns (0 or 1), its lane, and the first of its two rows."""

    half: Int32
    lane: Int32
    row_low: Int32


class Values16bit:
    """P V with P and V of 16 bits, both in shared memory."""

    def __init__(self, config: DecodeConfig, stages: Stages, walk: PieceWalk, copier: Copier) -> None:
        self.shape, self.ring, self.stages, self.walk, self.copier = config.shape, stages.ring, stages, walk, copier
        self.block, self.latent, self.half = config.block, config.latent_dim, config.latent_dim // 2
        self.out_dtype, self.partial_dtype = DTYPES[config.out_dtype], DTYPES[config.shape.partial_dtype]
        self.partial_needs_scale = config.shape.partial_needs_scale

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
                self.store(o, (inverse_low, inverse_high), OutPlace(half, lane, row_low), piece, arrays, schedule.rank)
                if warp_idx == SCHEDULE_WARP:
                    self.walk.next_piece(number + LOOKAHEAD, schedule)
                number += 1

    @cute.jit
    def store(
        self,
        o: cute.Tensor,
        inverses: tuple[Float32, Float32],
        place: OutPlace,
        piece: Described,
        arrays: Arrays,
        rank: Int32,
    ):
        """Store O times the rows' factors to `out` or to the piece's slot of partial_out. inverses: the factors of the
        lane's two rows."""
        half, lane = place.half, place.lane
        out_row, valid_rows, slot = piece[Piece.ROW], piece[Piece.VALID_ROWS], piece[Piece.SLOT]
        quad = lane % 4
        groups = self.half // 8
        column = half * self.half + quad * 8
        for i in cutlass.range_constexpr(2):
            row = place.row_low + 8 * i
            factor = inverses[i]
            # A lane has 2 columns of each group of 8. It stores 8 columns at once, as many as it has of four groups.
            if slot < 0:
                # The four lanes of a row exchange columns, so that each lane has one whole group of the four.
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
                    transpose_quad(words, quad)
                    if row < valid_rows:
                        cute.autovec_copy(pairs, line[None, g])
            else:
                # Columns are stored in lane order, which takes the fewest instructions; `combine` exchanges them.
                tile_row = rank * ROWS + row
                partial_lse = arrays.partial_lse
                if const_expr(self.partial_needs_scale):
                    factor, scale = self.fit(o, i, factor)
                    if quad == 0 and row < valid_rows:
                        partial_lse[slot, 1 + half, tile_row] = scale
                line = cute.make_tensor(
                    element(arrays.partial_out, partial_row(slot, tile_row, self.shape) * self.latent + column, 16),
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
        """Return (factor / scale, scale) such that row i of O times factor / scale is in f16's range.

        The scale is a power of 2, so scaling loses no bits. f16 then keeps 11 bits of a number that is at least 2^-14
        of the greatest in the row's half; bf16 would keep 8.
        """
        tops = [cute.math.absf(o[i, c]) for c in range(self.half // 4)]
        # factor / scale must also be finite for a row of zeros.
        top = cute.arch.fmax(tree(cute.arch.fmax, tops), 2.0**-100)
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2))
        # The greatest power of 2 that is at most top * factor and has a reciprocal.
        power = (top * factor).bitcast(Int32) & 0x7F800000
        power = cutlass.min(cutlass.max(power, 1 << 23), 253 << 23)
        return factor * (Int32(254 << 23) - power).bitcast(Float32), power.bitcast(Float32)
