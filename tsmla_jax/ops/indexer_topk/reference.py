"""The definition of indexer_topk: select_topk of indexer_logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_jax.ops.indexer_logits import reference as logits_reference
from tsmla_jax.ops.ragged import seen_keys
from tsmla_jax.ops.select_topk import reference as topk_reference
from tsmla_jax.ops.select_topk.reference import Results
from tsmla_kernels.contract.sparse import IndexerTopkSpec


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
    """What the public indexer_topk documents."""
    if 0 in (spec.logits.num_tokens, spec.logits.num_requests, spec.num_columns):
        return nothing_selected(spec)
    operands = (q, weights, k_cache, block_tables, seq_lens, cu_seqlens_q)
    logits = logits_reference.indexer_logits(*operands, spec=spec.logits)
    request, seen = rows_of(spec, seq_lens, cu_seqlens_q)
    tables = (block_tables[request],) if spec.return_slots else ()
    return topk_reference.select_topk(logits, seen, *tables, spec=spec.topk)


def rows_of(spec: IndexerTopkSpec, seq_lens: jax.Array, cu_seqlens_q: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """For each query token: its row of the block table, and how many keys it sees."""
    if cu_seqlens_q is not None:
        return seen_keys(seq_lens, cu_seqlens_q, spec.logits.num_tokens)
    return jnp.arange(spec.logits.num_tokens, dtype=jnp.int32), seq_lens


def nothing_selected(spec: IndexerTopkSpec) -> Results:
    """The results of a call without query tokens, requests or keys."""
    tokens = spec.logits.num_tokens
    positions = jnp.full((tokens, spec.k), -1, jnp.int32)
    return (positions, jnp.zeros(tokens, jnp.int32)) if spec.return_slots else positions
