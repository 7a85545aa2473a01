"""The selection of keys by bits: loading a block's words, and the mask that they make.

A word has the bits of 32 keys of one query row. An accumulator of scores has, in a lane, 2 of every 8 keys of a row, so
after a shift by the lane's first key the lane's bits are at the same 8 places of every word.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.prefill.config import GROUP_ROWS
from tsmla_kernels.sm90.prefill.memory import KernelTraits, Rows, Selected, Selection, ThreadIndex, Tile

ALL_KEYS = -1  # in place of the index of a row of words: the query row selects all keys
WORD_KEYS = 32


class SelectedKeys:
    """Device code of a compute warpgroup's selection."""

    def __init__(self, traits: KernelTraits) -> None:
        self.traits = traits
        self.words = traits.block // WORD_KEYS

    def registers(self) -> Selected:
        """Registers for the places and the words of a thread's two rows."""
        words = cute.make_rmem_tensor(cute.make_layout((2, self.words), stride=(self.words, 1)), Int32)
        return Selected(cute.make_rmem_tensor((2,), Int32), words)

    @cute.jit
    def find_rows(
        self, selection: Selection, selected: Selected, tiles: cute.Tensor, slot: Int32, thread: ThreadIndex
    ) -> None:
        """Look up which rows of `selection.words` the thread's two query rows of a tile have. An index past the last
        row is replaced by the last row's, so that wrong indices do not lead to reads outside of the array."""
        first_row = tiles[Tile.FIRST_ROW, slot] + thread.group * GROUP_ROWS
        group_rows = tiles[Tile.ROWS, slot] - thread.group * GROUP_ROWS
        for i in cutlass.range_constexpr(2):
            row = thread.row + 8 * i
            place = Int32(ALL_KEYS)
            if row < group_rows:
                place = cutlass.min(selection.rows[first_row + row], Int32(selection.words.shape[0]) - 1)
            selected.places[i] = place

    @cute.jit
    def load(self, selection: Selection, selected: Selected, block_index: Int32) -> None:
        """Load the words of block `block_index`. Keys past a row's last word are not selected, unless the row selects
        all keys."""
        width = Int32(selection.words.shape[1])
        for i in cutlass.range_constexpr(2):
            place, words = selected.places[i], selected.words[i, None]
            words.fill(cutlass.select_(place < 0, Int32(-1), Int32(0)))
            if (place >= 0) & ((block_index + 1) * self.words <= width):
                start = Int64(place) * width + block_index * self.words
                first = (selection.words.iterator + start).align(4 * self.words)
                line = cute.make_tensor(first, cute.make_layout(self.words))
                cute.autovec_copy(line, words)

    @cute.jit
    def mask(self, rows: Rows, block_index: Int32, lane: Int32, limited: cutlass.Constexpr[bool]) -> None:
        """Set the scores of block `block_index` that a row does not select to -inf; if `limited`, also those past the
        row's limit."""
        s, words = rows.s, rows.selected.words
        first = (lane % 4) * 2
        for i in cutlass.range_constexpr(2):
            for w in cutlass.range_constexpr(self.words):
                word = words[i, w]
                if const_expr(limited):
                    word = self.below(word, rows.limit[i] - block_index * self.traits.block - w * WORD_KEYS)
                word >>= first
                for c in cutlass.range_constexpr(WORD_KEYS // 4):
                    column = w * (WORD_KEYS // 4) + c
                    bit = word & (1 << ((c // 2) * 8 + c % 2))
                    s[i, column] = cutlass.select_(bit != 0, s[i, column], -Float32.inf)

    def below(self, word: Int32, bits: Int32) -> Int32:
        """The lowest `bits` bits of a word: none if `bits` is negative, all from 32 on."""
        return cute.arch.inline_ptx(
            "{ .reg .b32 n; max.s32 n, {$r1}, 0; shl.b32 n, 0xffffffff, n; not.b32 n, n; and.b32 {$w0}, {$r0}, n; }",
            write_only_types=[Int32],
            read_only_args=[word, bits],
        )
