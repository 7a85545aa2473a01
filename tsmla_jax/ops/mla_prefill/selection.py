"""The selection of keys by bits: the arrays that implementations are given, and which keys each token selects by
them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops import checks
from tsmla_kernels.contract import PrefillSpec
from tsmla_kernels.contract.selection import WORD_KEYS

Selection = tuple[jax.Array, ...]
"""Nothing, or the words [R, W] and each query token's row of them [Tq] (negative: it selects all keys)."""


def operands(spec: PrefillSpec, selection: jax.Array | None, selection_rows: jax.Array | None) -> Selection:
    """The selection's arrays; without selection_rows, token t has row t."""
    if selection is None:
        return ()
    words = jnp.asarray(selection)
    if selection_rows is None:
        return words, jnp.arange(spec.total_q_len, dtype=jnp.int32)
    return words, checks.prefill_selection(words.shape[0], jnp.asarray(selection_rows))


def selected(words: jax.Array, rows: jax.Array, positions: jax.Array) -> jax.Array:
    """Whether each token selects the keys at `positions` [N]: [T, N] bool. rows: [T], each token's row of the words.
    Keys past the last word are not selected; a row index past the last row counts as the last.
    """
    word = lax.shift_right_logical(positions, jnp.int32(WORD_KEYS.bit_length() - 1))
    inside = (positions >= 0) & (word < words.shape[1])
    each = words[jnp.clip(rows, 0, words.shape[0] - 1)[:, None], jnp.where(inside, word, 0)]
    bits = lax.shift_right_logical(each, jnp.broadcast_to(positions % WORD_KEYS, each.shape)) & 1
    return (rows[:, None] < 0) | (inside & (bits != 0))
