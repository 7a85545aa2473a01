"""The definition of sparse_mla: gather every selected row, score them all, softmax in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from tsmla_jax.ops.inputs import Scale, Scales, accumulation_dtype, as_scale
from tsmla_jax.ops.selected.layouts import gather_rows
from tsmla_kernels.contract.layouts import valid_slots
from tsmla_kernels.contract.sparse import SparseMLASpec

Results = tuple[jax.Array, ...]


def sparse_mla(
    q: jax.Array,
    caches: tuple[jax.Array, ...],
    indices: jax.Array,
    lengths: jax.Array | None,
    sinks: jax.Array | None,
    scales: Scales,
    kv_scales: tuple[Scale | None, ...],
    *,
    spec: SparseMLASpec,
) -> Results:
    """out, lse and, if the spec has them, max_logits as the public sparse_mla documents them. Differentiable.

    caches and their kv_scales are kv_cache and, if there is one, compressed_kv_cache."""
    run = functools.partial(_attend, spec, caches, sinks, scales, kv_scales)
    if not spec.batch_invariant:
        return run(q, indices, lengths)

    # One token at a time: the order of a product's additions depends on its shape.
    def one(token: tuple[jax.Array | None, ...]) -> Results:
        return jax.tree.map(lambda x: x[0], run(*jax.tree.map(lambda x: x[None], token)))

    results: Results = jax.lax.map(one, (q, indices, lengths))
    return results


def _attend(
    spec: SparseMLASpec,
    caches: tuple[jax.Array, ...],
    sinks: jax.Array | None,
    scales: Scales,
    kv_scales: tuple[Scale | None, ...],
    q: jax.Array,
    indices: jax.Array,
    lengths: jax.Array | None,
) -> Results:
    """The results of tokens [T]."""
    dtype = accumulation_dtype(spec.q_dtype)
    parts, masks = [], []
    sections = [(spec.cache, indices[:, : spec.window])]
    if spec.compressed is not None:
        sections.append((spec.compressed, indices[:, spec.window :]))
    for (cache_spec, slots), cache, scale in zip(sections, caches, kv_scales, strict=True):
        valid = valid_slots(slots, cache_spec)
        if cache_spec.layout == "plain":
            # The cache is widened before rows are gathered, so that its gradient is summed in the wide dtype.
            cache = cache.astype(dtype)
        parts.append(gather_rows(cache, jnp.where(valid, slots, 0), cache_spec, dtype) * as_scale(scale, dtype))
        masks.append(valid)
    valid = jnp.concatenate(masks, axis=1)
    if lengths is not None:
        valid &= jnp.arange(spec.num_selected) < lengths[:, None]
    kv = jnp.where(valid[..., None], jnp.concatenate(parts, axis=1), 0)  # an unused slot may hold NaN

    seen = valid.any(-1)[:, None]
    # The query of a token without keys may be NaN, and 0 * NaN in a derivative is NaN.
    query = jnp.where(seen[..., None], q.astype(dtype), 0) * as_scale(scales.q, dtype)
    scores = jnp.einsum("thd,tkd->thk", query, kv, precision="highest") * as_scale(scales.softmax, dtype)
    scores = jnp.where(valid[:, None, :], scores, -jnp.inf)
    # A row that sees nothing has no maximum; 0 stands in for it, so that no inf - inf arises.
    maximum = jax.lax.stop_gradient(jnp.where(seen, scores.max(-1, initial=-jnp.inf), 0))
    weights = jnp.exp(scores - maximum[..., None])
    total = jnp.where(seen, weights.sum(-1), 1)
    out = jnp.einsum("thk,tkl->thl", weights, kv[..., : spec.latent_dim], precision="highest") / total[..., None]
    lse = jnp.where(seen, maximum + jnp.log(total), -jnp.inf)
    if sinks is not None:
        share = jax.nn.sigmoid(jnp.where(seen, lse, 0) - sinks.astype(dtype))
        out = out * share[..., None]
    results = out.astype(spec.out_dtype), lse.astype(spec.lse_dtype)
    if not spec.max_logits:
        return results
    greatest = jnp.where(seen, maximum + (total - total), -jnp.inf)  # NaN where lse is
    return *results, jax.lax.stop_gradient(greatest.astype(spec.lse_dtype))
