"""The definition of select_topk: sort every row, stably."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_kernels.contract.sparse import TopKSpec


def select_topk(logits: jax.Array, seq_lens: jax.Array, *, spec: TopKSpec) -> jax.Array:
    """positions [T, k] as the public select_topk documents them."""
    num_keys, k = logits.shape[1], spec.k
    in_row = jnp.arange(num_keys) < seq_lens[:, None]
    nan = jnp.isnan(logits)
    value = jnp.where(in_row & ~nan, logits, -jnp.inf)
    # The last key of lexsort decides first; NaN goes behind -inf, what is past the row's length behind everything.
    order = jnp.lexsort((-value, nan, ~in_row), axis=-1).astype(jnp.int32)
    order = jnp.pad(order[:, :k], ((0, 0), (0, max(0, k - num_keys))))
    positions = jnp.where(jnp.arange(k) < seq_lens[:, None], order, -1)
    return ascending(positions) if spec.order == "position" else positions


def ascending(positions: jax.Array) -> jax.Array:
    """Each row sorted, -1 behind all positions: it is the greatest unsigned number."""
    return jnp.sort(positions.astype(jnp.uint32), axis=-1).astype(jnp.int32)
