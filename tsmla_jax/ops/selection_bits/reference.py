"""The definition of selection_bits: which positions a row has, key by key, packed into words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_kernels.contract.selection import WORD_KEYS, SelectionBitsSpec


def selection_bits(positions: jax.Array, *others: jax.Array, spec: SelectionBitsSpec) -> jax.Array:
    """The words as the public selection_bits documents them. others: lengths and starts, if they are given."""
    keys = keys_of(positions, *others, spec=spec)
    num_keys = spec.num_words * WORD_KEYS
    rows = jnp.arange(positions.shape[0])[:, None]
    # Column num_keys takes the positions that select nothing.
    chosen = jnp.zeros((positions.shape[0], num_keys + 1), bool).at[rows, jnp.where(keys < 0, num_keys, keys)].set(True)
    bits = chosen[:, :num_keys].reshape(-1, spec.num_words, WORD_KEYS).astype(jnp.uint32)
    words = (bits << jnp.arange(WORD_KEYS, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32)


def keys_of(positions: jax.Array, *others: jax.Array, spec: SelectionBitsSpec) -> jax.Array:
    """The keys [T, k] of a row's words that its positions select, -1 for a position that selects none."""
    given = iter(others)
    counts = jnp.ones(positions.shape, bool)
    if spec.lengths:
        counts = jnp.arange(positions.shape[1]) < next(given)[:, None]
    starts = jnp.maximum(next(given), 0)[:, None] if spec.starts else jnp.zeros((), jnp.int32)
    keys = jnp.where(positions >= starts, positions - starts, -1)
    return jnp.where(counts & (keys < spec.num_words * WORD_KEYS), keys, -1)
