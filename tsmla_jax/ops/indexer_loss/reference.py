"""The definition of indexer_loss: gather every key, all scores, both distributions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.indexer_selected_logits import reference as selected_logits
from tsmla_jax.ops.ragged import seen_keys
from tsmla_jax.ops.selected.layouts import gather_rows
from tsmla_kernels.contract.indexer import IndexerLossSpec
from tsmla_kernels.contract.layouts import valid_slots

Index = tuple[jax.Array, jax.Array, jax.Array]
Attention = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array]
Where = tuple[jax.Array | None, ...]


def indexer_loss(
    index: Index, attention: Attention, where: Where, *, spec: IndexerLossSpec, head_axis: str | None
) -> jax.Array:
    """loss [T] as the public indexer_loss documents it.

    index: the indexer's q, weights and cache. attention: q, kv_cache, lse, sinks and the softmax scale. where: indices
    and lengths, or block_tables, seq_lens and cu_seqlens_q."""
    slots = selected_slots(spec, where)
    dtype = index[1].dtype
    if 0 in slots.shape:
        return jnp.zeros(slots.shape[:1], dtype)
    valid = slots >= 0
    logits = selected_logits.indexer_selected_logits(*index, slots, spec=spec.index)
    q, kv_cache, lse, sinks, scale = attention
    keys = gather_rows(kv_cache, jnp.where(valid, slots, 0), spec.cache, dtype)
    keys = jnp.where(valid[..., None], keys, 0)  # an unused slot may hold NaN
    dots = jnp.einsum("thd,tkd->thk", q.astype(dtype), keys, precision="highest") * scale.astype(dtype)
    total = total_of(lse.astype(dtype), sinks, head_axis)
    probabilities = jnp.where(valid[:, None], jnp.exp(dots - total[..., None]), 0).sum(1)
    if head_axis is not None:
        probabilities = lax.psum(probabilities, head_axis)
    mass = probabilities.sum(-1, keepdims=True)
    seen = mass != 0  # true for NaN, too, which must not look like a row without keys
    probabilities = lax.stop_gradient(probabilities / jnp.where(seen, mass, 1))
    # A row without a key has no maximum; zeros stand in for its logits, so that no derivative is NaN.
    logits = jnp.where(valid | ~seen, jnp.where(valid, logits, 0), -jnp.inf)
    log_choice = jnp.where(valid, jax.nn.log_softmax(logits, axis=-1), 0)
    positive = probabilities != 0
    log_p = jnp.log(jnp.where(positive, probabilities, 1))
    return jnp.where(positive, probabilities * (log_p - log_choice), 0).sum(-1)


FAR = 40.0
"""How far a sink may be above lse in all heads before a token's probabilities, which are divided by their sum, are made
larger: they must not become too small for exp."""


def selected_slots(spec: IndexerLossSpec, where: Where) -> jax.Array:
    """The slot of every column [T, N], -1 where a token has no key."""
    if not spec.paged:
        indices, lengths = where
        assert indices is not None
        valid = valid_slots(indices, spec.cache)
        if lengths is not None:
            valid &= jnp.arange(spec.num_columns) < lengths[:, None]
        return jnp.where(valid, indices, -1)
    tables, lens, offsets = where
    assert tables is not None and lens is not None
    if 0 in (spec.num_requests, spec.num_columns):
        return jnp.zeros((spec.num_tokens, 0), jnp.int32)
    if offsets is not None:
        request, lens = seen_keys(lens, offsets, spec.num_tokens)
        tables = tables[request]
    position = jnp.arange(spec.num_columns, dtype=jnp.int32)
    pages = tables[:, position // spec.cache.page_size]
    slots = pages * spec.cache.page_size + position % spec.cache.page_size
    return jnp.where((position < lens[:, None]) & (pages >= 0) & (pages < spec.cache.num_pages), slots, -1)


def total_of(lse: jax.Array, sinks: jax.Array | None, head_axis: str | None) -> jax.Array:
    """The logarithm of each head's sum, its sink included; 0 in place of -inf, where there is no key to divide. Where
    it is more than FAR above lse in all heads, all have the same term less."""
    lse = jnp.where(jnp.isneginf(lse), 0, lse)
    if sinks is None:
        return lse
    total = jnp.logaddexp(lse, sinks.astype(lse.dtype))
    common = (total - lse).min(-1, keepdims=True)
    if head_axis is not None:
        common = lax.pmin(common, head_axis)
    return total - jnp.where(jnp.isposinf(common), 0, jnp.maximum(common - FAR, 0))
