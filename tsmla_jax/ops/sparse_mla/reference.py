"""The definition of sparse_mla: gather every selected row, score them all, softmax in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_jax.ops.arrays import Scale, accumulation_dtype, as_scale
from tsmla_jax.sparse.layouts import gather_rows, valid_slots
from tsmla_kernels.contract.sparse import SparseMLASpec


def sparse_mla(
    q: jax.Array,
    kv_cache: jax.Array,
    indices: jax.Array,
    lengths: jax.Array | None,
    compressed_kv_cache: jax.Array | None,
    sinks: jax.Array | None,
    *,
    spec: SparseMLASpec,
    softmax_scale: Scale,
    q_scale: Scale | None,
    kv_scale: Scale | None,
    compressed_kv_scale: Scale | None,
) -> tuple[jax.Array, jax.Array]:
    """out and lse as the public sparse_mla documents them; both are always returned. Differentiable."""
    dtype = accumulation_dtype(spec.q_dtype)
    parts, masks = [], []
    for cache, cache_spec, scale, columns in (
        (kv_cache, spec.cache, kv_scale, slice(0, spec.window)),
        (compressed_kv_cache, spec.compressed, compressed_kv_scale, slice(spec.window, None)),
    ):
        if cache is None or cache_spec is None:
            continue
        valid = valid_slots(indices[:, columns], cache_spec)
        rows = gather_rows(cache, jnp.where(valid, indices[:, columns], 0), cache_spec, dtype) * as_scale(scale, dtype)
        parts.append(rows)
        masks.append(valid)
    valid = jnp.concatenate(masks, axis=1)
    if lengths is not None:
        valid &= jnp.arange(spec.num_selected) < lengths[:, None]
    kv = jnp.where(valid[..., None], jnp.concatenate(parts, axis=1), 0)  # an unused slot may hold NaN

    query = q.astype(dtype) * as_scale(q_scale, dtype)
    scores = jnp.einsum("thd,tkd->thk", query, kv, precision="highest") * as_scale(softmax_scale, dtype)
    scores = jnp.where(valid[:, None, :], scores, -jnp.inf)
    seen = valid.any(-1)[:, None]
    # A row that sees nothing has no maximum; 0 stands in for it, so that no inf - inf arises.
    maximum = jax.lax.stop_gradient(jnp.where(seen, scores.max(-1, initial=-jnp.inf), 0))
    weights = jnp.exp(scores - maximum[..., None])
    total = jnp.where(seen, weights.sum(-1), 1)
    out = jnp.einsum("thk,tkl->thl", weights, kv[..., : spec.latent_dim], precision="highest") / total[..., None]
    lse = jnp.where(seen, maximum + jnp.log(total), -jnp.inf)
    if sinks is not None:
        share = jax.nn.sigmoid(jnp.where(seen, lse, 0) - sinks.astype(dtype))
        out = out * share[..., None]
    return out.astype(spec.out_dtype), lse.astype(spec.lse_dtype)
