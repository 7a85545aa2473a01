"""The softmax of a block of scores: S to P, the rows' maxima and sums, and O brought to the new maximum."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from tsmla_kernels.sm90.prefill.memory import Buffers, Products, Rows, Stage, release
from tsmla_kernels.sm90.prefill.operand_p import OperandP
from tsmla_kernels.sm90.prefill.traits import KernelTraits

# fp8: P is scaled by 2^5, so that values above 2^-11 of the greatest one when the maximum last moved keep all their
# bits. The scale is a power of two, so that this greatest value itself is exact. The maximum moves when a sum of four
# values of P passes e4m3's greatest value, 3.8 bits later at most.
P_SCALE_BITS = 5
E4M3_MAX = 448.0


class Softmax:
    """Device code of the softmax in a compute warpgroup."""

    def __init__(self, traits: KernelTraits) -> None:
        self.traits = traits
        self.operand_p = OperandP(traits)

    @cute.jit
    def mask(self, rows: Rows, n: Int32, lane: Int32):
        """Set the scores of block `n` that a row does not see to -inf."""
        s, limit = rows.s, rows.limit
        for i in cutlass.range_constexpr(2):
            seen = limit[i] - n * self.traits.block - (lane % 4) * 2
            for c in cutlass.range_constexpr(self.traits.block // 4):
                s[i, c] = cutlass.select_((c // 2) * 8 + c % 2 < seen, s[i, c], -Float32.inf)

    @cute.jit
    def update_maximum(self, rows: Rows):
        """Raise the rows' running maximum to that of S, and rescale the sums. Returns the factors for O's rows."""
        s, maximum, total = rows.s, rows.maximum, rows.total
        factor = cute.make_rmem_tensor((2,), Float32)
        for i in cutlass.range_constexpr(2):
            # Four chains hide the latency of a comparison.
            highs = [s[i, c] for c in range(4)]
            for c in cutlass.range_constexpr(4, self.traits.block // 4):
                highs[c % 4] = cute.arch.fmax(highs[c % 4], s[i, c])
            high = cute.arch.fmax(cute.arch.fmax(highs[0], highs[1]), cute.arch.fmax(highs[2], highs[3]))
            new = self.raised(maximum[i], high, rows.scale)
            factor[i] = cute.math.exp2(maximum[i] - new, fastmath=True)
            maximum[i] = new
            total[i] = total[i] * factor[i]
        return factor

    def raised(self, maximum: Float32, high: Float32, scale: Float32):
        """A row's maximum, base 2 and scaled, after the greatest score `high` of one of its four lanes."""
        high = cute.arch.fmax(high, cute.arch.shuffle_sync_bfly(high, offset=1))
        high = cute.arch.fmax(high, cute.arch.shuffle_sync_bfly(high, offset=2))
        return cute.arch.fmax(maximum, high * scale - P_SCALE_BITS if self.traits.fp8 else high * scale)

    @cute.jit
    def exponentiate(self, rows: Rows, i: cutlass.Constexpr[int]):
        """Replace row `i` of S by P, and add P to the row's sum."""
        s, maximum, total = rows.s, rows.maximum, rows.total
        sums = [total[i], Float32(0.0)]
        for c in cutlass.range_constexpr(self.traits.block // 4):
            p = cute.math.exp2(s[i, c] * rows.scale - maximum[i], fastmath=True)
            s[i, c] = p
            sums[c % 2] += p
        total[i] = sums[0] + sums[1]

    @cute.jit
    def finish_block(self, products: Products, rows: Rows, v: Buffers, v_stage: Stage):
        """Turn S into P with its exact maximum, and release V of the block before once its product is done."""
        traits, o = self.traits, rows.o
        factor = self.update_maximum(rows)
        moved = cute.arch.vote_any_sync(factor[0] != 1.0 or factor[1] != 1.0)
        self.exponentiate(rows, 0)
        if const_expr(not traits.fp8):
            # V arrived long ago, but this wait ends a basic block: the assembler moves the wait for O up to the start
            # of its block. O is done by now, and the rest of the softmax hides the wait's latency.
            cute.arch.mbarrier_wait(v.full + v_stage.index, v_stage.phase)
            warpgroup.wait_group(0)
            release(v.empty + v_stage.index)
        if moved:
            if const_expr(traits.fp8):
                warpgroup.wait_group(0)
            for c in cutlass.range_constexpr(traits.v_head_dim // 4):
                o[0, c] = o[0, c] * factor[0]
                o[1, c] = o[1, c] * factor[1]
        self.exponentiate(rows, 1)
        if const_expr(traits.fp8):
            # The branch above ends a basic block, so the assembler puts this wait right behind the branch. The product
            # before has then read P, so that P's memory is free too.
            warpgroup.wait_group(0)
            release(v.empty + v_stage.index)
        self.operand_p.write(products.acc_s, products.p_target)
