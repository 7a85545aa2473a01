"""The definition of mla_decode: gather every key, score them all, softmax in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tsmla_jax.ops.inputs import Scales, accumulation_dtype, as_scale
from tsmla_jax.ops.loops import carry
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
    q_len = jnp.full((spec.batch,), spec.max_q_len, jnp.int32)
    if cu_seqlens_q is not None:
        q_len = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
        q = to_padded(q, cu_seqlens_q, spec.max_q_len)
        visible_lens = None if visible_lens is None else to_padded(visible_lens, cu_seqlens_q, spec.max_q_len)
    requests = (q, block_tables, seq_lens, q_len, visible_lens)
    if spec.batch_invariant:
        # One request and one page at a time: the order of a product's additions depends on its shape.
        def one(request: tuple[jax.Array | None, ...]) -> tuple[jax.Array, jax.Array]:
            found = _attend(spec, kv_cache, scales, *jax.tree.map(lambda x: x[None], request))
            return jax.tree.map(lambda x: x[0], found)

        out, lse = jax.lax.map(one, requests)
    else:
        out, lse = _attend(spec, kv_cache, scales, *requests)
    out, lse = out.astype(spec.out_dtype), lse.astype(spec.lse_dtype)
    if cu_seqlens_q is not None:
        out = to_packed(out, cu_seqlens_q, spec.total_q_len, 0.0)
        lse = to_packed(lse, cu_seqlens_q, spec.total_q_len, -jnp.inf)
    return out, lse


def _attend(
    spec: DecodeSpec,
    kv_cache: jax.Array,
    scales: Scales,
    q: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    q_len: jax.Array,
    visible_lens: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """out [B, S, H, L] and lse [B, S, H] of queries q [B, S, H, D], of which each request has the first q_len[b]."""
    dtype = accumulation_dtype(spec.q_dtype)
    num_keys = spec.max_pages * spec.page_size
    position = jnp.arange(num_keys)
    seq_lens = jnp.clip(seq_lens, 0, num_keys)
    used = position < seq_lens[:, None]
    page_used = jnp.arange(spec.max_pages) * spec.page_size < seq_lens[:, None]
    pages = jnp.where(page_used, jnp.clip(block_tables, 0, spec.num_pages - 1), 0)
    kv = kv_cache[pages].reshape(q.shape[0], num_keys, spec.head_dim).astype(dtype) * as_scale(scales.k, dtype)
    kv = jnp.where(used[..., None], kv, 0)  # an unused slot may hold NaN, and 0 * NaN is NaN
    # A new token's key may hold NaN too, which must reach neither queries that don't see the key nor their derivatives.
    # So its score is set to NaN, which the softmax of the queries that see it hands on, and its values enter no
    # product.
    is_nan = jnp.isnan(kv)
    values = jnp.where(jnp.isfinite(kv), kv, 0)[..., : spec.latent_dim]
    kv = jnp.where(is_nan, 0, kv)

    query = jnp.arange(spec.max_q_len)[None, :]
    visible = used[:, None, :] & (query < q_len[:, None])[..., None]
    if visible_lens is not None:
        visible = visible & (position < visible_lens[..., None])
    elif spec.causal:
        end = seq_lens[:, None] - (q_len[:, None] - 1) + query
        visible = visible & (position < end[..., None])
    visible = visible[:, :, None, :]
    any_visible = visible.any(-1)
    # A query that sees no key, as padding, may be NaN, and 0 * NaN in a derivative is NaN.
    q = jnp.where(any_visible[..., None], q.astype(dtype), 0) * as_scale(scales.q, dtype)
    scores = _scores(spec, q, kv) * as_scale(scales.softmax, dtype)
    scores = jnp.where(is_nan.any(-1)[:, None, None], jnp.nan, scores)
    scores = jnp.where(visible, scores, -jnp.inf)
    # A row that sees nothing has no maximum; 0 stands in for it, so that no inf - inf arises.
    maximum = jax.lax.stop_gradient(jnp.where(any_visible, scores.max(-1), 0))
    weights = jnp.exp(scores - maximum[..., None])
    total, out = _sums(spec, weights, values)
    out = out / jnp.where(any_visible, total, 1)[..., None]
    return out, jnp.where(any_visible, maximum + jnp.log(jnp.where(any_visible, total, 1)), -jnp.inf)


def _scores(spec: DecodeSpec, q: jax.Array, kv: jax.Array) -> jax.Array:
    """The products q . k with all keys kv [B, M Z, D]: [B, S, H, M Z]."""

    def scores(kv: jax.Array) -> jax.Array:
        return jnp.einsum("bshd,bkd->bshk", q, kv, precision="highest")

    if not spec.batch_invariant:
        return scores(kv)
    pages = jax.lax.map(scores, _by_page(spec, kv, 1))
    return jnp.moveaxis(pages, 0, -2).reshape(*q.shape[:3], -1)


def _sums(spec: DecodeSpec, weights: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums over the keys of the weights [B, S, H, M Z], and of weight times value [B, M Z, L]."""

    def sums(weights: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        return weights.sum(-1), jnp.einsum("bshk,bkl->bshl", weights, values, precision="highest")

    if not spec.batch_invariant:
        return sums(weights, values)

    def add(state: tuple[jax.Array, jax.Array], page: tuple[jax.Array, jax.Array]) -> Any:
        return jax.tree.map(jnp.add, state, sums(*page)), None

    pages = _by_page(spec, weights, 3), _by_page(spec, values, 1)
    start = jnp.zeros_like(weights[..., 0]), jnp.zeros((*weights.shape[:3], values.shape[-1]), weights.dtype)
    state: tuple[jax.Array, jax.Array]
    state, _ = jax.lax.scan(add, jax.tree.map(lambda x: carry(x, weights, values), start), pages)
    return state


def _by_page(spec: DecodeSpec, x: jax.Array, axis: int) -> jax.Array:
    """x with its axis of M Z keys cut into pages: that axis becomes Z, and a new axis of M pages comes first."""
    shape = (*x.shape[:axis], spec.max_pages, spec.page_size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)
