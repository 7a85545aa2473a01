"""The definition of indexer_selected_logits: gather every selected key, score them all."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_kernels.contract.indexer import SelectedLogitsSpec
from tsmla_kernels.contract.layouts import valid_slots


def indexer_selected_logits(
    q: jax.Array,
    weights: jax.Array,
    k_cache: jax.Array,
    indices: jax.Array,
    lengths: jax.Array | None = None,
    *,
    spec: SelectedLogitsSpec,
) -> jax.Array:
    """logits [T, K] as the public indexer_selected_logits documents them."""
    valid = valid_slots(indices, spec.cache.as_plain())
    if lengths is not None:
        valid &= jnp.arange(spec.num_selected) < lengths[:, None]
    keys = k_cache.reshape(-1, spec.head_dim)[jnp.where(valid, indices, 0)].astype(weights.dtype)
    keys = jnp.where(valid[..., None], keys, 0)  # an unused slot may hold NaN
    dots = jnp.einsum("thd,tkd->thk", q.astype(weights.dtype), keys, precision="highest")
    terms = jnp.where(valid[:, None], jax.nn.relu(dots), 0)  # a token without keys may be NaN, as padding is
    logits = jnp.einsum("th,thk->tk", weights, terms, precision="highest")
    return jnp.where(valid, logits, -jnp.inf)
