"""Reducing numbers of query rows over the keys of the sparse kernel's four softmax warps."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from tsmla_kernels.sm90.latent.key_softmax import Combine
from tsmla_kernels.sm90.latent.softmax import sync_softmax


class KeyReduction:
    """Reduces over keys: within each warp first, so that shared memory needs one partial for each warp and row.

    Attributes:
      p_rows: how many rows P has.
    """

    def __init__(self, p_rows: int) -> None:
        self.p_rows = p_rows

    @cute.jit
    def over_keys(self, combine: Combine, values: cute.Tensor, of_lanes: cute.Tensor, t: Int32):
        """Reduce the lanes' `values` of each row over all keys by `combine`: see key_softmax.OverKeys. First reduce
        within each warp; as long as a lane has more than two values, each exchange halves their number. Then reduce
        over the warps."""
        lane, rows = t % 32, self.p_rows // 8
        mine = cute.make_rmem_tensor((2, rows), Float32)
        for i in cutlass.range_constexpr(2 * rows):
            mine[i] = values[i]
        for step in cutlass.range_constexpr(3):
            offset, half = 16 >> step, (rows >> step) // 2
            if const_expr(half > 0):
                # -1 in lanes that keep the upper half: a selection without a branch.
                upper = -((lane // offset) & 1)
                for i in cutlass.range_constexpr(2 * half):
                    low, high = mine[i].bitcast(Int32), mine[i + 2 * half].bitcast(Int32)
                    change = (low ^ high) & upper
                    own, sent = (low ^ change).bitcast(Float32), (high ^ change).bitcast(Float32)
                    mine[i] = combine(own, cute.arch.shuffle_sync_bfly(sent, offset=offset))
            else:
                for e in cutlass.range_constexpr(2):
                    mine[e] = combine(mine[e], cute.arch.shuffle_sync_bfly(mine[e], offset=offset))
        pair = cute.make_rmem_tensor((2,), Float32)
        for e in cutlass.range_constexpr(2):
            pair[e] = mine[e]
        if lane % (32 // rows) < 4:
            cute.autovec_copy(pair, of_lanes[None, 4 * (lane // (32 // rows)) + lane % 4, t // 32])
        sync_softmax()
        found = cute.make_rmem_tensor((2,), Float32)
        found.fill(0.0)
        if t < 2 * self.p_rows:
            cute.autovec_copy(of_lanes[None, t // 4, t % 4], found)
            for e in cutlass.range_constexpr(2):
                for offset in cutlass.range_constexpr(2):
                    found[e] = combine(found[e], cute.arch.shuffle_sync_bfly(found[e], offset=1 << offset))
        return found
