"""Softmax of S^T, keys by query rows, for the kernels that widen keys in registers.

Each of the four softmax warps has 16 keys of a block and all query rows, so the four must agree in every block whether
a row's maximum has moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from tsmla_kernels.sm90.constants import LOWEST
from tsmla_kernels.sm90.latent.memory import Place, Running, Shared
from tsmla_kernels.sm90.latent.query import two_halves
from tsmla_kernels.sm90.latent.softmax import RESCALE_BITS, any_of_warps, sync_softmax, tree
from tsmla_kernels.sm90.latent.words import greatest, times
from tsmla_kernels.sm90.warp import store_transposed


def p_row(lane, warp):
    """The byte offset in P of the row that a lane first passes to stmatrix: 8 keys of one of the first 16 query
    rows."""
    return (lane // 16 * 8 + lane % 8) * 128 + (((warp * 2 + lane // 8 % 2) ^ (lane % 8)) << 4)


class Exchange(NamedTuple):
    """Shared-memory scratch for reducing over the keys of the four softmax warps.

    Attributes:
      of_lanes: partials of each row: one for each lane that has scores of the row (decode), or one for each warp
        (sparse_mla).
      changes: for each row, the change of its maximum and the factor for its sum.
      maxima: the running row maxima (kept here to save registers).
    """

    of_lanes: cute.Tensor
    changes: cute.Tensor
    maxima: cute.Tensor


class KeyScores(Protocol):
    """The state that `KeySoftmax` needs of a lane whose scores are S^T (keys by query rows).

    Attributes:
      exchanged: shared-memory scratch of the warpgroup. p_words: P, packed into the words that are stored.
      running: the lane's maxima and sums. place: the thread's place.
    """

    exchanged: Exchange
    p_words: cute.Tensor
    running: Running
    place: Place


Combine = Callable[[Float32, Float32], Float32]
OverKeys = Callable[[Combine, cute.Tensor, cute.Tensor, Int32], cute.Tensor]
"""(combine, values, of_lanes, thread) reduces the lanes' `values` of each row over all keys. Threads 4 i to 4 i + 3 get
rows 2 i and 2 i + 1; threads past the last row get 0."""


class KeySoftmax:
    """The softmax of a block's S^T. Each of the four softmax warps has 16 of the block's keys and all query rows.

    Attributes:
      p_rows: how many rows P has. p_dtype: the dtype of P. over_keys: reduces over all keys (see OverKeys).
      token_rows: how many rows a token has, if tokens see different keys; None if all rows see the same keys.
    """

    def __init__(
        self, p_rows: int, p_dtype: type[cutlass.Numeric], over_keys: OverKeys, token_rows: int | None = None
    ) -> None:
        self.p_rows, self.p_dtype, self.over_keys, self.token_rows = p_rows, p_dtype, over_keys, token_rows

    @cute.jit
    def softmax_of_keys(
        self, s: cute.Tensor, first: Int32, scale: Float32, held: KeyScores, shared: Shared, index: Int32
    ):  # fmt: skip
        """Turn S into P, relative to the rows' maxima m (base 2, scaled), two rows per word. Add the rows' sums to l.

        If `held.running.highest` is there, the block's greatest P are taken into it, and follow the maxima.

        The maxima are updated if a P would exceed 2**RESCALE_BITS, and always in a piece's first block (`first` is 1).
        If token_rows is set, `first` has a bit for each token: whether the block has the token's first keys. The four
        warps have different keys of the same rows, so they vote and reduce together.
        """
        lags = any_of_warps(first | self.make_relative(s, scale, held.running))
        if lags != 0:
            self.update_maxima(s, first, held, held.running.highest, shared, index)
        if held.place.lane == 0:
            shared.moved[held.place.thread // 32, index] = lags
        self.exponentials(s, held, held.running.highest)

    @cute.jit
    def make_relative(self, s: cute.Tensor, scale: Float32, running: Running) -> Int32:
        """Scale S, and subtract the rows' maxima. Return 1 if a P of the lane would exceed 2**RESCALE_BITS, otherwise
        0."""
        for v in cutlass.range_constexpr(self.p_rows // 8):
            for e in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    s[e, i, v] = s[e, i, v] * scale - running.m[e, v]
        top = tree(cute.arch.fmax, [s[e, i, v] for v in range(self.p_rows // 8) for e in range(2) for i in range(2)])
        return Int32(top > RESCALE_BITS)

    @cute.jit
    def update_maxima(
        self, s: cute.Tensor, first: Int32, held: KeyScores, highest: cute.Tensor | None, shared: Shared, index: Int32
    ):
        """Update the rows' maxima, and make S, l and `highest`, unless it is None, relative to the new ones. `first` is
        as in softmax_of_keys."""
        changes, maxima, l, rescale = held.exchanged.changes, held.exchanged.maxima, held.running.l, shared.rescale
        t, lane = held.place.thread, held.place.lane
        tops = cute.make_rmem_tensor(l.layout, Float32)
        for v in cutlass.range_constexpr(self.p_rows // 8):
            for e in cutlass.range_constexpr(2):
                tops[e, v] = cute.arch.fmax(s[e, 0, v], s[e, 1, v])
        found = self.over_keys(cute.arch.fmax, tops, held.exchanged.of_lanes, t)
        if t % 4 == 0 and t < 2 * self.p_rows:
            four = cute.make_rmem_tensor((4,), Float32)
            if const_expr(self.token_rows is not None):
                first = (first >> (t // 2 // self.token_rows)) & 1
            for e in cutlass.range_constexpr(2):
                # A maximum only rises, except in the first block, where it starts as 0 and may also fall, but not below
                # LOWEST, because -inf - -inf is NaN.
                rise = cute.arch.fmax(found[e], Float32(first) * LOWEST)
                factor = cute.math.exp2(-cute.arch.fmax(rise, 0.0), fastmath=True)
                four[2 * e], four[2 * e + 1] = rise, factor
                row = t // 2 + e
                rescale[row, index] = factor
                maxima[row, 0] = maxima[row, 0] + rise
            cute.autovec_copy(four, cute.make_tensor((changes.iterator + t).align(16), cute.make_layout(4)))
        sync_softmax()
        for v in cutlass.range_constexpr(self.p_rows // 8):
            four = cute.make_rmem_tensor((4,), Float32)
            cute.autovec_copy(
                cute.make_tensor((changes.iterator + (16 * v + lane % 4 * 4)).align(16), cute.make_layout(4)), four
            )
            for e in cutlass.range_constexpr(2):
                l[e, v] = l[e, v] * four[2 * e + 1]
                for i in cutlass.range_constexpr(2):
                    s[e, i, v] = s[e, i, v] - four[2 * e]
            if const_expr(highest is not None):
                highest[v] = times(highest[v], two_halves(four[1], four[3]))

    @cute.jit
    def exponentials(self, s: cute.Tensor, held: KeyScores, highest: cute.Tensor | None):
        """Write P to `held.p_words`, and add the rows' sums to l. Take the greatest P into `highest`, unless it is
        None."""
        l, p_words = held.running.l, held.p_words
        pair = cute.make_rmem_tensor((2,), self.p_dtype)
        for v in cutlass.range_constexpr(self.p_rows // 8):
            p = [[cute.math.exp2(s[e, i, v], fastmath=True) for i in range(2)] for e in range(2)]
            for e in cutlass.range_constexpr(2):
                l[e, v] += p[e][0] + p[e][1]
            for i in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    pair[e] = p[e][i].to(self.p_dtype)
                p_words[i, v] = cute.recast_tensor(pair, Int32)[0]
            if const_expr(highest is not None):
                highest[v] = greatest(highest[v], p_words[0, v], p_words[1, v])

    @cute.jit
    def store_p_of_keys(self, address: Int32, p_words: cute.Tensor):
        """Store a warp's P, which registers have as keys by rows, to shared memory as rows by keys."""
        for v in cutlass.range_constexpr(0, self.p_rows // 8, 2):
            four = [p_words[i, v + j] for j in range(2) for i in range(2)]
            store_transposed(address + 1024 * v, *four)  # eight rows of 128 bytes
        cute.arch.sync_warp()
