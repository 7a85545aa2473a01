"""The definition of indexer_topk: select_topk of indexer_logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from tsmla_jax.ops.indexer_logits import reference as logits_reference
from tsmla_jax.ops.ragged import seen_keys
from tsmla_jax.ops.select_topk import reference as topk_reference
from tsmla_kernels.contract.sparse import IndexerTopkSpec

Results = jax.Array | tuple[jax.Array, ...]
"""Positions, or slots and counts; then scores where they are asked for; or the words of the selection. One array
alone is no tuple."""


def indexer_topk(
    q: jax.Array,
    weights: jax.Array,
    k_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array | None = None,
    *,
    spec: IndexerTopkSpec,
) -> Results:
    """The results as the public indexer_topk documents them."""
    if 0 in (spec.logits.num_tokens, spec.logits.num_requests, spec.num_columns):
        return unpacked(nothing_selected(spec))
    operands = (q, weights, k_cache, block_tables, seq_lens, cu_seqlens_q)
    logits = logits_reference.indexer_logits(*operands, spec=spec.logits)
    request, seen = rows_of(spec, seq_lens, cu_seqlens_q)
    tables = block_tables[request] if spec.return_slots else block_tables
    selected = topk_reference.select_topk(logits, seen, *((tables,) if spec.topk.page_size else ()), spec=spec.topk)
    if isinstance(selected, tuple) or not spec.return_scores:
        return selected
    return with_scores(spec, logits, selected, tables, seen)


def with_scores(
    spec: IndexerTopkSpec, logits: jax.Array, positions: jax.Array, block_tables: jax.Array, seen: jax.Array
) -> tuple[jax.Array, ...]:
    """The results of a call with return_scores, from rows of logits, the positions selected in them, each row's block
    table and how many keys each row sees.
    """
    scores = jnp.where(positions >= 0, jnp.take_along_axis(logits, jnp.maximum(positions, 0), axis=1), -jnp.inf)
    if not spec.return_slots:
        return positions, scores
    of_slots = dataclasses.replace(spec.topk, page_size=spec.logits.cache.page_size)
    rows = topk_reference.rows_of(of_slots, seen, block_tables)
    slots, counts = topk_reference.results_of(of_slots, rows, positions)
    return slots, counts, scores


def rows_of(spec: IndexerTopkSpec, seq_lens: jax.Array, cu_seqlens_q: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """For each query token: its row of the block table, and how many keys it sees."""
    if cu_seqlens_q is not None:
        return seen_keys(seq_lens, cu_seqlens_q, spec.logits.num_tokens)
    return jnp.arange(spec.logits.num_tokens, dtype=jnp.int32), seq_lens


def nothing_selected(spec: IndexerTopkSpec) -> tuple[jax.Array, ...]:
    """The results, always as a tuple, of a call that has no query tokens, no requests or no keys."""
    tokens = spec.logits.num_tokens
    if spec.return_bits:
        return (jnp.zeros((tokens, spec.topk.width), jnp.int32),)
    positions = jnp.full((tokens, spec.k), -1, jnp.int32)
    counts = (jnp.zeros(tokens, jnp.int32),) if spec.return_slots else ()
    scores = (jnp.full((tokens, spec.k), -jnp.inf, jnp.float32),) if spec.return_scores else ()
    return positions, *counts, *scores


def unpacked(results: tuple[jax.Array, ...]) -> Results:
    """Results as a call returns them."""
    return results if len(results) > 1 else results[0]
