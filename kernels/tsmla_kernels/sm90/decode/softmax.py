"""Softmax of a block of decode's scores, in the registers where WGMMA left them."""

from __future__ import annotations

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from tsmla_kernels.sm90.constants import LOWEST
from tsmla_kernels.sm90.decode.config import DecodeConfig
from tsmla_kernels.sm90.decode.memory import ThreadScores
from tsmla_kernels.sm90.latent.memory import Described, Piece, Place, Results, Running, Shared
from tsmla_kernels.sm90.latent.shape import ROWS
from tsmla_kernels.sm90.latent.softmax import RESCALE_BITS, RowResults, tree
from tsmla_kernels.sm90.warp import uniform

FP8_P_HEADROOM = 6.0
"""P of e4m3 is 2^6 where the score is the greatest. So P down to 2^-12 of the greatest keeps all bits of e4m3, and P up
to 2^RESCALE_BITS is finite."""


class Softmax:
    """The softmax of a block's S, query rows by keys. ScoresMixed, whose scores are S^T, uses only seen_by_all, visible
    and results.

    Attributes:
      heads, causal, visible_lens, block: as in DecodeConfig.
      rescale_bits: P may be as large as 2**rescale_bits before the running maximum is updated. 0: the maximum is always
        up to date.
      headroom: the running maximum is kept below the greatest score by that much (base 2). P of e4m3 then has more of
        its range below the greatest P.
      speculates: whether P is computed before it is known whether the running maximum lags.
      results: writes the results of a row.
    """

    def __init__(self, config: DecodeConfig, inverses_kept: int) -> None:
        self.heads, self.causal, self.block = config.num_heads, config.causal, config.block
        self.visible_lens, self.results = config.visible_lens, RowResults(config.shape, inverses_kept)
        if config.fp8_cache:
            # f16 holds P of up to 2**RESCALE_BITS with the same relative error as P of up to 1. With few rows the value
            # warpgroups wait for the scores, so P is computed before the maximum is known. With 64 rows the maximum is
            # found first, because registers and instructions are scarce.
            self.rescale_bits, self.speculates = RESCALE_BITS, config.p_rows < ROWS
            self.headroom = FP8_P_HEADROOM if config.fp8_p else 0.0
        else:
            self.headroom = 0.0
            # Updating the maximum in every block costs 2 % of the time if memory is the limit (up to 64 rows), but more
            # than 10 % if arithmetic is the limit: see LOG.md.
            self.rescale_bits = 0.0 if config.cluster == 1 else RESCALE_BITS
            self.speculates = self.rescale_bits > 0.0

    @cute.jit
    def begin_rows(self, running: Running):
        """Reset the lane's rows."""
        for i in cutlass.range_constexpr(2):
            running.m[i] = Float32(LOWEST)
            running.l[i] = Float32(0.0)

    @cute.jit
    def seen_by_all(self, piece: Described):
        """How many keys every row of a piece sees. Blocks of these keys need no mask."""
        seen = uniform(piece[Piece.KEYS])
        if const_expr(self.visible_lens):
            seen = uniform(cutlass.min(seen, piece[Piece.FEWEST_KEYS]))
        if const_expr(self.causal):
            seen = uniform(cutlass.min(seen, piece[Piece.FIRST_TOKEN_KEYS] + piece[Piece.ROW_IN_REQUEST] // self.heads))
        return seen

    @cute.jit
    def mask(self, s: cute.Tensor, b: Int32, piece: Described, place: Place, visible_lens: cute.Tensor | None = None):
        """Set the scores of keys that a row does not see to -inf. visible_lens: as in Arrays."""
        keys = piece[Piece.KEYS]
        for i in cutlass.range_constexpr(2):
            limit = keys
            if const_expr(visible_lens is not None):
                limit = self.visible(piece, place.row_low + 8 * i, visible_lens)
            if const_expr(self.causal):
                token = (piece[Piece.ROW_IN_REQUEST] + place.row_low + 8 * i) // self.heads
                limit = cutlass.min(keys, piece[Piece.FIRST_TOKEN_KEYS] + token)
            for c in cutlass.range_constexpr(self.block // 4):
                column = b * self.block + (c // 2) * 8 + (place.lane % 4) * 2 + c % 2
                if column >= limit:
                    s[i, c] = -Float32.inf

    @cute.jit
    def visible(self, piece: Described, row: Int32, visible_lens: cute.Tensor):
        """How many keys a piece's row sees. A row past the last token sees as many as that token."""
        token = cutlass.min((piece[Piece.ROW] + row) // self.heads, visible_lens.shape[0] - 1)
        return cutlass.min(piece[Piece.KEYS], visible_lens[token])

    @cute.jit
    def run(self, scores: ThreadScores, running: Running, scale: Float32, place: Place, shared: Shared, index: Int32):
        """Turn S into P, relative to the running maximum m (base 2, scaled). Add the row sums to l.

        The running maximum m is updated only if P could exceed 2**rescale_bits, which becomes rare after the first
        blocks. `moved` then tells the value warps to multiply this warp's 16 rows of O by `rescale`. If `speculates`, P
        is first computed with the old m. If a sum of P exceeds 2**rescale_bits, m is updated and P is computed again
        from S, so p and s must not share registers.
        """
        s, p, m, l = scores.s, scores.p, running.m, running.l
        rescale, moved = shared.rescale, shared.moved
        total = cute.make_rmem_tensor((2,), Float32)
        high = cute.make_rmem_tensor((2,), Float32)
        if const_expr(self.speculates):
            self.exponentials(s, p, m, scale, total)
            # A sum is at least its greatest term, so no P exceeds the limit unless a sum does.
            limit = 2.0**self.rescale_bits
            lags = total[0] > limit or total[1] > limit
        else:
            self.maxima(s, high)
            lags = high[0] * scale > m[0] + self.rescale_bits or high[1] * scale > m[1] + self.rescale_bits
        any_lags = cute.arch.vote_any_sync(lags)
        if any_lags:
            if const_expr(self.speculates):
                self.maxima(s, high)
            for i in cutlass.range_constexpr(2):
                top = high[i]
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2))
                new = top * scale
                if const_expr(self.headroom > 0.0):
                    new = new - self.headroom
                new = cute.arch.fmax(m[i], new)
                factor = cute.math.exp2(m[i] - new, fastmath=True)
                m[i] = new
                l[i] = l[i] * factor
                if place.lane % 4 == 0:
                    rescale[place.row_low + 8 * i, index] = factor
            if const_expr(self.speculates):
                self.exponentials(s, p, m, scale, total)
        if place.lane == 0:
            moved[place.warp, index] = Int32(any_lags)
        if const_expr(not self.speculates):
            self.exponentials(s, p, m, scale, total)
        for i in cutlass.range_constexpr(2):
            l[i] += total[i]

    @cute.jit
    def maxima(self, s: cute.Tensor, high: cute.Tensor):
        """Find the greatest of the lane's scores in each row."""
        for i in cutlass.range_constexpr(2):
            tops = [cute.arch.fmax(s[i, 2 * c], s[i, 2 * c + 1]) for c in range(self.block // 8)]
            high[i] = tree(cute.arch.fmax, tops)

    @cute.jit
    def exponentials(self, s: cute.Tensor, p: cute.Tensor, m: cute.Tensor, scale: Float32, total: cute.Tensor):
        """Compute P from the lane's scores, and the sum of the lane's P in each row."""
        for i in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(self.block // 4):
                p[i, c] = cute.math.exp2(s[i, c] * scale - m[i], fastmath=True)
            total[i] = tree(operator.add, [p[i, c] for c in range(self.block // 4)])

    @cute.jit
    def finish(self, running: Running, place: Place, piece: Described, number: Int32, results: Results):
        """Add up the sums of the four lanes of a row. Write the row's factor for the epilogue, and its log-sum-exp."""
        for i in cutlass.range_constexpr(2):
            total = running.l[i]
            total += cute.arch.shuffle_sync_bfly(total, offset=1)
            total += cute.arch.shuffle_sync_bfly(total, offset=2)
            if place.lane % 4 == 0:
                self.results.finish_row(place.row_low + 8 * i, (total, running.m[i]), piece, number, results)
