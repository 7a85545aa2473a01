"""The definition of mla_decode: gather every key, score them all, softmax in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_jax.ops.inputs import Scales, accumulation_dtype, as_scale
from tsmla_jax.ops.ragged import to_packed, to_padded
from tsmla_kernels.contract import DecodeSpec


def mla_decode(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array | None,
    visible_lens: jax.Array | None,
    scales: Scales,
    *,
    spec: DecodeSpec,
) -> tuple[jax.Array, jax.Array]:
    """out and lse as the public mla_decode documents them; both are always returned. Differentiable."""
    dtype = accumulation_dtype(spec.q_dtype)
    q_len = jnp.full((spec.batch,), spec.max_q_len, jnp.int32)
    if cu_seqlens_q is not None:
        q_len = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
        q = to_padded(q, cu_seqlens_q, spec.max_q_len)
        visible_lens = None if visible_lens is None else to_padded(visible_lens, cu_seqlens_q, spec.max_q_len)
    q = q.astype(dtype) * as_scale(scales.q, dtype)

    num_keys = spec.max_pages * spec.page_size
    position = jnp.arange(num_keys)
    seq_lens = jnp.clip(seq_lens, 0, num_keys)
    used = position < seq_lens[:, None]
    page_used = jnp.arange(spec.max_pages) * spec.page_size < seq_lens[:, None]
    pages = jnp.where(page_used, jnp.clip(block_tables, 0, spec.num_pages - 1), 0)
    kv = kv_cache[pages].reshape(spec.batch, num_keys, spec.head_dim).astype(dtype) * as_scale(scales.k, dtype)
    kv = jnp.where(used[..., None], kv, 0)  # an unused slot may hold NaN, and 0 * NaN is NaN
    # A new token's key may hold NaN too, and must not reach the queries that don't see it, nor their derivatives: its
    # score is NaN, which its queries' softmax hands on, and its numbers enter no product.
    is_nan = jnp.isnan(kv)
    values = jnp.where(jnp.isfinite(kv), kv, 0)[..., : spec.latent_dim]
    kv = jnp.where(is_nan, 0, kv)

    scores = jnp.einsum("bshd,bkd->bshk", q, kv, precision="highest") * as_scale(scales.softmax, dtype)
    scores = jnp.where(is_nan.any(-1)[:, None, None], jnp.nan, scores)
    visible = used[:, None, :]
    if visible_lens is not None:
        visible = visible & (position < visible_lens[..., None])
    elif spec.causal:
        query = jnp.arange(spec.max_q_len)[None, :]
        end = seq_lens[:, None] - (q_len[:, None] - 1) + query
        visible = visible & (position < end[..., None])
    visible = visible[:, :, None, :]
    any_visible = visible.any(-1)
    scores = jnp.where(visible, scores, -jnp.inf)
    # A row that sees nothing has no maximum; 0 stands in for it, so that no inf - inf arises.
    maximum = jax.lax.stop_gradient(jnp.where(any_visible, scores.max(-1), 0))
    weights = jnp.exp(scores - maximum[..., None])
    total = weights.sum(-1)
    out = jnp.einsum("bshk,bkl->bshl", weights, values, precision="highest")
    out = out / jnp.where(any_visible, total, 1)[..., None]
    lse = jnp.where(any_visible, maximum + jnp.log(jnp.where(any_visible, total, 1)), -jnp.inf)

    out, lse = out.astype(spec.out_dtype), lse.astype(spec.lse_dtype)
    if cu_seqlens_q is not None:
        out = to_packed(out, cu_seqlens_q, spec.total_q_len, 0.0)
        lse = to_packed(lse, cu_seqlens_q, spec.total_q_len, -jnp.inf)
    return out, lse
