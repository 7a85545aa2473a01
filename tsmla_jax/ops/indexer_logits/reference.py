"""The definition of indexer_logits: gather every key, score them all."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_jax.ops.ragged import seen_keys
from tsmla_jax.ops.selected.indexer import read_indexer_pages
from tsmla_kernels.contract.sparse import IndexerLogitsSpec


def indexer_logits(
    q: jax.Array,
    weights: jax.Array,
    k_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array | None = None,
    *,
    spec: IndexerLogitsSpec,
) -> jax.Array:
    """logits [T, M * Z] as the public indexer_logits documents them."""
    num_keys = spec.max_pages * spec.cache.page_size
    if 0 in (spec.num_tokens, spec.num_requests, num_keys):
        return jnp.full((spec.num_tokens, num_keys), -jnp.inf, jnp.float32)
    if cu_seqlens_q is not None:
        request, seq_lens = seen_keys(seq_lens, cu_seqlens_q, spec.num_tokens)
        block_tables = block_tables[request]
    if not spec.cache.packed:
        # The cache is widened before pages are gathered, so that its gradient is summed in float32.
        k_cache = k_cache.astype(jnp.float32)
    used = jnp.arange(num_keys) < seq_lens[:, None]
    keys, scales = read_indexer_pages(k_cache, jnp.clip(block_tables, 0, spec.cache.num_pages - 1), spec.cache)
    keys = keys.reshape(spec.num_tokens, num_keys, spec.head_dim).astype(jnp.float32)
    keys = jnp.where(used[..., None], keys, 0)  # an unused slot may hold NaN, and 0 * NaN in a derivative is NaN
    dots = jnp.einsum("thd,tkd->thk", q.astype(jnp.float32), keys, precision="highest")
    terms = jnp.where(used[:, None], jax.nn.relu(dots), 0)  # a token without keys may be NaN, as padding is
    logits = jnp.einsum("th,thk->tk", weights.astype(jnp.float32), terms, precision="highest")
    if scales is not None:
        logits = logits * jnp.where(used, scales.reshape(logits.shape), 0)
    return jnp.where(used, logits, -jnp.inf)
