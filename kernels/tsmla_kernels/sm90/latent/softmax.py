"""Common parts of the latent attention kernels' softmax: barriers of its warpgroup, reductions, a row's results."""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from tsmla_kernels.sm90.constants import LN_2, LOG2_E
from tsmla_kernels.sm90.latent.memory import (
    SOFTMAX_THREADS,
    Barrier,
    Described,
    Piece,
    Results,
)
from tsmla_kernels.sm90.latent.shape import ROWS, LatentShape


def tree(combine: Callable[[Float32, Float32], Float32], values: list[Float32]) -> Float32:
    """Reduce values, whose number is a power of 2, as a tree: a chain would wait for one latency per value."""
    while len(values) > 1:
        values = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


@cute.jit
def share_beside_sink(lse: Float32, sink: Float32):
    """The keys' part of a row's weight; the rest belongs to its head's sink. `lse` is the log-sum-exp of the row's
    scores, in base 2."""
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(sink * LOG2_E - lse, fastmath=True))


@cute.jit
def greatest_logit(highest: Float32, total: Float32):
    """A row's greatest logit in base e, of `highest` in base 2; NaN if the row's sum `total` is not finite."""
    return highest * LN_2 + (total - total)


def sync_softmax() -> None:
    """Synchronise the softmax warpgroup."""
    cute.arch.barrier(barrier_id=Barrier.SOFTMAX, number_of_threads=SOFTMAX_THREADS)


def any_of_warps(holds: Int32) -> Int32:
    """Whether `holds` is 1 in any thread of the softmax warpgroup. Also synchronises the warpgroup."""
    return cute.arch.inline_ptx(
        "{ .reg .pred holds, any; setp.ne.s32 holds, {$r0}, 0; "
        f"barrier.cta.red.or.pred any, {Barrier.SOFTMAX:d}, {SOFTMAX_THREADS}, holds; "
        "selp.s32 {$w0}, 1, 0, any; }",
        write_only_types=[Int32],
        read_only_args=[holds],
    )


RESCALE_BITS = 8.0  # the running maximum (base 2) is updated if a row's maximum exceeds it by more than this


class RowResults:
    """Writes a row's results when all keys of a piece are done.

    Attributes:
      inverses_kept: as in Ring. partial_needs_scale: as in LatentShape.
    """

    def __init__(self, shape: LatentShape, inverses_kept: int) -> None:
        self.inverses_kept, self.partial_needs_scale = inverses_kept, shape.partial_needs_scale

    @cute.jit
    def finish_row(
        self,
        row: Int32,
        sums: tuple[Float32, Float32],
        piece: Described,
        number: Int32,
        results: Results,
        sink: Float32 | None = None,
        highest: Float32 | None = None,
    ):
        """Write a row's log-sum-exp, and the factor by which the epilogue multiplies its row of O: 1 / sum, times the
        output's scale and the share that a sink leaves, unless `combine` multiplies by these. `sums` are the row's
        (sum, maximum); `sink` is its head's sink, or None if heads have no sinks. `highest` is the row's greatest score
        (base 2, scaled), which is written as a logit, or None if the call returns no greatest logits."""
        total, m = sums
        inverse, lse, partial_lse = results.inverse, results.lse, results.partial_lse
        slot = piece[Piece.SLOT]
        factor = Float32(0.0)
        value = -Float32.inf
        if total > 0.0 or total != total:
            factor = cute.arch.rcp_approx(total)
            value = m + cute.math.log2(total, fastmath=True)
        if const_expr(self.partial_needs_scale) or slot < 0:
            factor = factor * results.out_scale
        if const_expr(sink is not None):
            if slot < 0 and factor != 0.0:
                factor = factor * share_beside_sink(value, sink)
        inverse[row, number % self.inverses_kept] = factor
        logit = greatest_logit(highest, total) if const_expr(highest is not None) else None
        if row < piece[Piece.VALID_ROWS]:
            if slot < 0:
                lse[piece[Piece.ROW] + row] = value * LN_2
                if const_expr(highest is not None):
                    results.max_logits[piece[Piece.ROW] + row] = logit
            else:
                partial_lse[slot, 0, results.rank * ROWS + row] = value
                if const_expr(highest is not None):
                    partial_lse[slot, 3, results.rank * ROWS + row] = logit
                if const_expr(not self.partial_needs_scale):
                    for half in cutlass.range_constexpr(2):
                        partial_lse[slot, 1 + half, results.rank * ROWS + row] = results.out_scale
