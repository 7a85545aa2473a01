"""A selection of keys as bits: its layout, and the arguments of selection_bits. Imports neither jax nor torch.

A selection is int32 words [R, W]. Bit j of word w of a row stands for key 32 w + j, counted from the first key of the
row's request (or from where the row's words begin). W is a multiple of SELECTION_WORDS, so that a kernel reads the bits
of 128 keys as one aligned load.
"""

from __future__ import annotations

from dataclasses import dataclass

from tsmla_kernels.contract.rules import Array, Dim, check_ints, static_int

WORD_KEYS = 32
"""Keys of a word."""

SELECTION_WORDS = 4
"""W is a multiple of this."""


def selection_words(num_keys: int) -> int:
    """W, the words of a row that has bits for num_keys keys."""
    return -(-num_keys // (WORD_KEYS * SELECTION_WORDS)) * SELECTION_WORDS


@dataclass(frozen=True)
class SelectionBitsSpec:
    """One call of selection_bits: num_tokens is T, num_selected k, num_words W. lengths, starts: whether they are
    given."""

    num_tokens: Dim
    num_selected: Dim
    num_words: int
    lengths: bool
    starts: bool


def selection_bits_spec(
    *, positions: Array, num_keys: int, lengths: Array | None = None, starts: Array | None = None
) -> SelectionBitsSpec:
    """The spec of selection_bits, or ValueError / TypeError naming the argument that is not legal."""
    num_keys = static_int("num_keys", num_keys, minimum=1)
    check_ints("positions", positions, "T k")
    tokens, selected = positions.shape
    for name, array in (("lengths", lengths), ("starts", starts)):
        if array is not None:
            check_ints(name, array, "T", (tokens, "T from positions"))
    return SelectionBitsSpec(tokens, selected, selection_words(num_keys), lengths is not None, starts is not None)
