"""indexer_logits in portable XLA: blocks of tokens, and for each of them blocks of pages.

Beyond the operands and the result there is one block of keys and of per-head scores at a time, some MiB; pages past the
longest sequence of a block of tokens are never visited. The gradient, which plain keys have, is taken by blocks, too,
and needs one float32 sum for each number of a key.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.indexer_selected_logits.xla import logits_gradient
from tsmla_jax.ops.loops import carry
from tsmla_jax.ops.ragged import seen_keys
from tsmla_jax.ops.selected import index_scores
from tsmla_jax.ops.selected.blocks import over_token_blocks
from tsmla_jax.ops.selected.index_scores import Columns
from tsmla_jax.ops.selected.indexer import read_indexer_pages
from tsmla_jax.ops.transforms import refuse_derivative, with_backward
from tsmla_kernels.contract import FP8
from tsmla_kernels.contract.indexer import SelectedLogitsSpec
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
    num_keys = spec.max_pages * spec.cache.page_size
    if 0 in (spec.num_tokens, spec.num_requests, num_keys):
        return jnp.full((spec.num_tokens, num_keys), -jnp.inf, jnp.float32)
    request = jnp.arange(spec.num_tokens, dtype=jnp.int32)
    if cu_seqlens_q is not None:
        request, seq_lens = seen_keys(seq_lens, cu_seqlens_q, spec.num_tokens)
    arrays = (q, weights.astype(jnp.float32), k_cache, block_tables, request, seq_lens)
    run = partial(_logits, spec)
    logits: jax.Array
    if spec.cache.packed or FP8 in (spec.q_dtype, spec.cache_dtype):
        alternative = "train on plain keys of 16 or 32 bits, or use implementation='reference'"
        logits = refuse_derivative(run(*arrays), arrays[:3], "indexer_logits of quantised values", alternative)
    else:
        logits = with_backward(run, partial(_backward, spec))(*arrays)
    return logits


def _logits(
    spec: IndexerLogitsSpec,
    q: jax.Array,
    weights: jax.Array,
    k_cache: jax.Array,
    block_tables: jax.Array,
    request: jax.Array,
    seq_lens: jax.Array,
) -> jax.Array:
    """The logits of tokens that see the first seq_lens [T] keys of the texts of rows request [T] of the tables."""
    page_size = spec.cache.page_size
    num_keys = spec.max_pages * page_size
    if spec.ragged:
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
    (logits,) = over_token_blocks(
        block,
        (q, weights, block_tables, seq_lens),
        (jax.ShapeDtypeStruct((spec.num_tokens, num_keys), jnp.float32),),
        block=max(1, BLOCK_BYTES // widest),
        varying_with=(k_cache,),
    )
    return logits


def _backward(spec: IndexerLogitsSpec, saved: Any, d_logits: jax.Array) -> tuple[Any, ...]:
    (q, weights, k_cache, block_tables, request, seq_lens), _ = saved
    scored = SelectedLogitsSpec(
        num_tokens=spec.num_tokens,
        num_heads=spec.num_heads,
        head_dim=spec.head_dim,
        num_selected=spec.max_pages * spec.cache.page_size,
        cache=spec.cache,
        q_dtype=spec.q_dtype,
        weights_dtype="float32",
        cache_dtype=spec.cache_dtype,
    )

    def columns_of(request: jax.Array, seen: jax.Array) -> Columns:
        return index_scores.paged_columns(block_tables, request, seen, spec.cache)

    block = index_scores.tokens_at_once(index_scores.BLOCK_COLUMNS, spec.head_dim, spec.num_heads)
    found = logits_gradient(scored, (q, weights, k_cache), (request, seq_lens), columns_of, d_logits, block=block)
    return (*found, None, None, None)
