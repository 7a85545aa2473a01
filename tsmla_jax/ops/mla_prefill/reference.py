"""The definition of mla_prefill: every query row against every key row, with a mask that says who sees whom."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_jax.ops.inputs import Scales, accumulation_dtype, as_scale
from tsmla_jax.ops.mla_prefill.selection import selected
from tsmla_jax.ops.mla_prefill.sinks import share
from tsmla_jax.ops.ragged import row_owner
from tsmla_kernels.contract import PrefillSpec


def mla_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_kv: jax.Array,
    scales: Scales,
    *selection: jax.Array,
    spec: PrefillSpec,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """out, lse and, if the spec has them, max_logits as the public mla_prefill documents them. Differentiable."""
    dtype = accumulation_dtype(spec.q_dtype)
    q_request, q_position, q_owned = row_owner(cu_seqlens_q, spec.total_q_len)
    kv_request, kv_position, kv_owned = row_owner(cu_seqlens_kv, spec.total_kv_len)
    q_owned &= q_position < spec.max_q_len
    kv_owned &= kv_position < spec.max_kv_len
    visible = (q_request[:, None] == kv_request) & q_owned[:, None] & kv_owned
    if spec.causal:
        q_len, kv_len = cu_seqlens_q[1:] - cu_seqlens_q[:-1], cu_seqlens_kv[1:] - cu_seqlens_kv[:-1]
        last_visible = q_position + (kv_len - q_len)[q_request]
        visible &= kv_position <= last_visible[:, None]
    if spec.selection:
        words, rows = selection
        visible &= selected(words, rows, kv_position)
    visible = visible[:, None, :]

    # Padding rows may hold NaN, and 0 * NaN is NaN.
    q = jnp.where(q_owned[:, None, None], q.astype(dtype), 0) * as_scale(scales.q, dtype)
    k = jnp.where(kv_owned[:, None, None], k.astype(dtype), 0) * as_scale(scales.k, dtype)
    v = jnp.where(kv_owned[:, None, None], v.astype(dtype), 0) * as_scale(scales.v, dtype)
    scores = jnp.einsum("qhd,khd->qhk", q, k, precision="highest") * as_scale(scales.softmax, dtype)
    scores = jnp.where(visible, scores, -jnp.inf)
    any_visible = visible.any(-1)
    # A row that sees nothing has no maximum; 0 stands in for it, so that no inf - inf arises.
    maximum = jax.lax.stop_gradient(jnp.where(any_visible, scores.max(-1), 0))
    weights = jnp.exp(scores - maximum[..., None])
    total = jnp.where(any_visible, weights.sum(-1), 1)
    out = jnp.einsum("qhk,khv->qhv", weights, v, precision="highest") / total[..., None]
    lse = jnp.where(any_visible, maximum + jnp.log(total), -jnp.inf)
    if sinks is not None:
        out = out * share(lse, sinks, any_visible)[..., None]
    results = out.astype(spec.out_dtype), lse.astype(spec.lse_dtype)
    if not spec.max_logits:
        return results
    greatest = jnp.where(any_visible, maximum + (total - total), -jnp.inf)  # NaN where lse is
    return *results, jax.lax.stop_gradient(greatest.astype(spec.lse_dtype))
