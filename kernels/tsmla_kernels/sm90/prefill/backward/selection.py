"""Key selection by bits, for the gradient. There scores are transposed, so that a row has one key's scores: a lane has
the scores of 2 keys and 16 queries.

All keys of a warp are in one word of a query. A lane loads the words of two of a step's 64 queries, and the lanes
exchange them when they mask.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from tsmla_kernels.sm90.prefill.backward.config import Q_ROWS
from tsmla_kernels.sm90.prefill.backward.memory import GROUP_KEYS, Step, Tile, Traits
from tsmla_kernels.sm90.prefill.memory import Selection, ThreadIndex
from tsmla_kernels.sm90.prefill.selection import ALL_KEYS, WORD_KEYS

WARP_QUERIES = 32  # queries of a step whose words the lanes of a warp load at once


class SelectedQueries:
    """Device code of a compute warpgroup's selection."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    @cute.jit
    def load(self, selection: Selection, tiles: cute.Tensor, at: Step, t: ThreadIndex) -> cute.Tensor:
        """Load the words that have the warp's keys: those of queries `lane` and `lane` + 32 of the step. A query that
        selects all keys, or that is past the request's end, gets a word with all bits set."""
        words = cute.make_rmem_tensor((Q_ROWS // WARP_QUERIES,), Int32)
        slot, first_query = at.slot, at.queries * Q_ROWS
        first_key = tiles[Tile.ORDER, slot] * self.traits.key_rows + t.group * GROUP_KEYS + (t.thread // 32) * 16
        column, width = first_key // WORD_KEYS, Int32(selection.words.shape[1])
        rows = tiles[Tile.ROWS, slot] - first_query
        first_row = tiles[Tile.FIRST_ROW, slot] + first_query
        for i in cutlass.range_constexpr(Q_ROWS // WARP_QUERIES):
            query = t.lane + i * WARP_QUERIES
            place = Int32(ALL_KEYS)
            if query < rows:
                place = cutlass.min(selection.rows[first_row + query], Int32(selection.words.shape[0]) - 1)
            word = cutlass.select_(place < 0, Int32(-1), Int32(0))
            if (place >= 0) & (column < width):
                word = (selection.words.iterator + (Int64(place) * width + column))[0]
            words[i] = word
        return words

    @cute.jit
    def mask(self, s: cute.Tensor, loaded: cute.Tensor, t: ThreadIndex) -> None:
        """Set a score to -inf if its query does not select its key."""
        for g in cutlass.range_constexpr(Q_ROWS // 8):
            first = g * 8 % WARP_QUERIES
            for e in cutlass.range_constexpr(2):
                source = first + (t.lane % 4) * 2 + e
                word = cute.arch.shuffle_sync(loaded[g * 8 // WARP_QUERIES], offset=source) >> (t.row % WORD_KEYS)
                for i in cutlass.range_constexpr(2):
                    s[i, 2 * g + e] = cutlass.select_(word & (1 << (8 * i)) != 0, s[i, 2 * g + e], -Float32.inf)
