"""selection_bits in portable XLA: positions are sorted, so that each key adds its bit once, and memory grows with
positions and words alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.selection_bits.reference import keys_of
from tsmla_kernels.contract.selection import WORD_KEYS, SelectionBitsSpec


def selection_bits(positions: jax.Array, *others: jax.Array, spec: SelectionBitsSpec) -> jax.Array:
    """The words as the public selection_bits documents them."""
    keys = jnp.sort(keys_of(positions, *others, spec=spec), axis=1)
    before = jnp.concatenate([jnp.full_like(keys[:, :1], -1), keys[:, :-1]], axis=1)
    bits = jnp.where(keys > before, jnp.uint32(1) << (keys % WORD_KEYS).astype(jnp.uint32), jnp.uint32(0))
    rows = jnp.arange(positions.shape[0])[:, None]
    words = jnp.zeros((positions.shape[0], spec.num_words), jnp.uint32)
    words = words.at[rows, jnp.maximum(keys, 0) // WORD_KEYS].add(bits)
    return lax.bitcast_convert_type(words, jnp.int32)
