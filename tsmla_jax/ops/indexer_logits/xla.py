"""indexer_logits in portable XLA: blocks of tokens, and for each of them blocks of pages.

Beyond the operands and the result there is one block of keys and of per-head scores at a time, some MiB; pages past the
longest sequence of a block of tokens are never visited.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.loops import carry
from tsmla_jax.ops.ragged import seen_keys
from tsmla_jax.ops.transforms import refuse_derivative, without_derivative
from tsmla_jax.sparse.blocks import over_token_blocks
from tsmla_jax.sparse.indexer import read_indexer_pages
from tsmla_kernels.contract.sparse import IndexerLogitsSpec

BLOCK_KEYS = 512
"""Keys a step: enough to fill a matrix product."""
BLOCK_BYTES = 4 << 20
"""Bound on the float32 block of keys or of per-head scores, whichever is larger."""


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
    page_size = spec.cache.page_size
    num_keys = spec.max_pages * page_size
    if 0 in (spec.num_tokens, spec.num_requests, num_keys):
        return jnp.full((spec.num_tokens, num_keys), -jnp.inf, jnp.float32)
    if cu_seqlens_q is not None:
        request, seq_lens = seen_keys(seq_lens, cu_seqlens_q, spec.num_tokens)
        block_tables = block_tables[request]
    pages_per_block = min(max(1, BLOCK_KEYS // page_size), spec.max_pages)
    block_keys = pages_per_block * page_size
    # e4m3 and 16-bit products are exact in any fast matrix product.
    narrow = spec.cache.packed or (q.dtype.itemsize <= 2 and k_cache.dtype.itemsize <= 2)
    precision = lax.Precision.DEFAULT if narrow else lax.Precision.HIGHEST

    def block(q: jax.Array, weights: jax.Array, tables: jax.Array, lens: jax.Array) -> tuple[jax.Array]:
        query = q.astype(jnp.float32)
        operands = (q, weights, k_cache, tables, lens)

        def step(i: jax.Array, out: jax.Array) -> jax.Array:
            entry = jnp.minimum(i * pages_per_block, spec.max_pages - pages_per_block)
            page = lax.dynamic_slice_in_dim(tables, entry, pages_per_block, axis=1)
            keys, scales = read_indexer_pages(k_cache, jnp.clip(page, 0, spec.cache.num_pages - 1), spec.cache)
            position = entry * page_size + jnp.arange(block_keys, dtype=jnp.int32)
            used = position < lens[:, None]
            keys = keys.reshape(-1, block_keys, spec.head_dim).astype(jnp.float32)
            keys = jnp.where(used[..., None], keys, 0)  # an unused slot may hold NaN: 0 * NaN in a derivative is NaN
            dots = lax.dot_general(query, keys, (((2,), (2,)), ((0,), (0,))), precision=precision)
            part = jnp.einsum("th,thk->tk", weights, jnp.maximum(dots, 0.0), precision="highest")
            if scales is not None:
                part = part * jnp.where(used, scales.reshape(part.shape), 0)
            part = jnp.where(used, part, -jnp.inf)
            return lax.dynamic_update_slice_in_dim(out, part, entry * page_size, axis=1)

        start = jnp.full((q.shape[0], num_keys), -jnp.inf, jnp.float32)
        blocks = (jnp.minimum(lens.max(), num_keys) + (block_keys - 1)) // block_keys
        return (lax.fori_loop(0, blocks, step, carry(start, *operands)),)

    widest = max(spec.head_dim, spec.num_heads) * block_keys * 4
    at_once = max(1, BLOCK_BYTES // widest)
    (logits,) = over_token_blocks(
        block,
        (q, weights.astype(jnp.float32), block_tables, seq_lens),
        (jax.ShapeDtypeStruct((spec.num_tokens, num_keys), jnp.float32),),
        block=at_once,
        varying_with=(k_cache,),
    )
    alternative = "use implementation='reference'"
    if isinstance(spec.num_tokens, int) and spec.num_tokens > at_once:  # a block's number of passes is never known
        found: jax.Array = refuse_derivative(logits, (), f"indexer_logits of more than {at_once} tokens", alternative)
        return found
    found = without_derivative(logits, seq_lens.max(initial=0), "indexer_logits", alternative)
    return found
