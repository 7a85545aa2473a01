"""Softmax of S, query rows by keys, in the registers where WGMMA left it."""

from __future__ import annotations

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from tsmla_kernels.sm90.constants import LOWEST
from tsmla_kernels.sm90.latent.memory import Place, Running, Shared
from tsmla_kernels.sm90.latent.softmax import RESCALE_BITS, tree


class RowSoftmax:
    """The softmax of a stage's S. A lane has two rows of `block` // 4 keys each; P takes the place of S.

    Attributes:
      max_logits: whether `Running.highest` follows the rows' greatest scores, which are not multiplied by the scale.
    """

    def __init__(self, block: int, max_logits: bool) -> None:
        self.block, self.max_logits = block, max_logits

    @cute.jit
    def begin_rows(self, running: Running):
        """Reset the lane's rows."""
        for i in cutlass.range_constexpr(2):
            running.m[i] = Float32(LOWEST)
            running.l[i] = Float32(0.0)
        if const_expr(self.max_logits):
            running.highest.fill(-Float32.inf)

    @cute.jit
    def run(self, s: cute.Tensor, running: Running, scale: Float32, place: Place, shared: Shared, index: Int32):
        """Turn S into P, relative to the running maximum m (base 2, scaled). Add the row sums to l.

        The running maximum is updated only if P could exceed 2**RESCALE_BITS, which becomes rare after the first
        blocks. `moved` then tells the value warps to multiply this warp's 16 rows of O by `rescale`.
        """
        m, l = running.m, running.l
        rescale, moved = shared.rescale, shared.moved
        total = cute.make_rmem_tensor((2,), Float32)
        high = cute.make_rmem_tensor((2,), Float32)
        self.maxima(s, high)
        if const_expr(self.max_logits):
            for i in cutlass.range_constexpr(2):
                running.highest[i] = cute.arch.fmax(running.highest[i], high[i])
        lags = high[0] * scale > m[0] + RESCALE_BITS or high[1] * scale > m[1] + RESCALE_BITS
        any_lags = cute.arch.vote_any_sync(lags)
        if any_lags:
            for i in cutlass.range_constexpr(2):
                top = high[i]
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2))
                new = cute.arch.fmax(m[i], top * scale)
                factor = cute.math.exp2(m[i] - new, fastmath=True)
                m[i] = new
                l[i] = l[i] * factor
                if place.lane % 4 == 0:
                    rescale[place.row_low + 8 * i, index] = factor
        if place.lane == 0:
            moved[place.warp, index] = Int32(any_lags)
        for i in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(self.block // 4):
                s[i, c] = cute.math.exp2(s[i, c] * scale - m[i], fastmath=True)
            total[i] = tree(operator.add, [s[i, c] for c in range(self.block // 4)])
        for i in cutlass.range_constexpr(2):
            l[i] += total[i]

    @cute.jit
    def maxima(self, s: cute.Tensor, high: cute.Tensor):
        """Find the greatest of the lane's scores in each row."""
        for i in cutlass.range_constexpr(2):
            tops = [cute.arch.fmax(s[i, 2 * c], s[i, 2 * c + 1]) for c in range(self.block // 8)]
            high[i] = tree(cute.arch.fmax, tops)
