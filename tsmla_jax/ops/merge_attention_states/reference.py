"""The definition of merge_attention_states: stack the parts and take the weighted mean."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_kernels.contract import MergeSpec


def merge_attention_states(
    outs: tuple[jax.Array, ...], lses: tuple[jax.Array, ...], *, spec: MergeSpec
) -> tuple[jax.Array, jax.Array]:
    """out and lse, as the public merge_attention_states documents them."""
    dtype = jnp.dtype(spec.sum_dtype)
    lse = jnp.stack(lses).astype(dtype)
    seen = ~jnp.isinf(lse)  # true for NaN, too, which must not look like a row without keys
    lse = jnp.where(seen, lse, -jnp.inf)  # FlashAttention and FlashMLA write +inf for a row that saw no key
    out = jnp.where(seen[..., None], jnp.stack(outs).astype(dtype), 0)
    any_seen = seen.any(0)
    maximum = jax.lax.stop_gradient(jnp.where(any_seen, lse.max(0), 0))
    # The inner where keeps -inf away from exp, whose derivative there would meet 0 * inf.
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, lse - maximum, 0)), 0)
    total = jnp.where(any_seen, weights.sum(0), 1)
    merged = (weights[..., None] * out).sum(0) / total[..., None]
    merged_lse = jnp.where(any_seen, maximum + jnp.log(total), -jnp.inf)
    return merged.astype(spec.out_dtype), merged_lse.astype(spec.lse_dtype)
