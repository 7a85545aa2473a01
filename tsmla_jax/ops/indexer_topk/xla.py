"""indexer_topk in portable XLA: blocks of tokens, and for each of them windows of keys and a running top-k.

Beyond the operands and the result, memory holds one window's logits of a block of tokens and the best keys so far: some
MiB, however many keys there are; windows past the longest sequence of a block of tokens are never visited.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.indexer_logits import xla as logits_xla
from tsmla_jax.ops.indexer_topk.reference import Results, nothing_selected, rows_of, unpacked
from tsmla_jax.ops.loops import carry
from tsmla_jax.ops.selected import numerics
from tsmla_jax.ops.selected.blocks import over_token_blocks
from tsmla_jax.ops.selection_bits import xla as bits_xla
from tsmla_kernels.contract.sparse import IndexerTopkSpec
from tsmla_kernels.topk.chunks import logits_of_rows

MIN_WINDOW = 4096
"""Keys between two merges into the running top-k, or twice k if that is more: the merge sorts the k best so far
again.
"""
BLOCK_BYTES = 4 << 20
"""Bound on the float32 logits of a window of keys and a block of tokens; the sort's own workspace is a small multiple
of it."""


class Best(NamedTuple):
    """The best keys of each token so far, in descending order: their logits, and their positions (-1 if there is no
    key).
    """

    logits: jax.Array
    positions: jax.Array


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
    tokens, num_keys, page_size = spec.logits.num_tokens, spec.num_columns, spec.logits.cache.page_size
    if 0 in (tokens, spec.logits.num_requests, num_keys):
        return unpacked(nothing_selected(spec))
    pages = min(-(-max(MIN_WINDOW, 2 * spec.k) // page_size), spec.logits.max_pages)
    window = pages * page_size
    kept = min(spec.k, num_keys)
    request, seen = rows_of(spec, seq_lens, cu_seqlens_q)
    seen = jnp.clip(seen, 0, num_keys)

    def block(q: jax.Array, weights: jax.Array, request: jax.Array, seen: jax.Array) -> tuple[jax.Array, ...]:
        rows = q.shape[0]
        of_window = dataclasses.replace(logits_of_rows(spec, rows), max_pages=pages)

        def step(i: jax.Array, best: Best) -> Best:
            # The last window ends with the table; keys that it shares with the window before have been merged already.
            entry = jnp.minimum(i * pages, spec.logits.max_pages - pages)
            tables = lax.dynamic_slice_in_dim(block_tables, entry, pages, axis=1)[request]
            lens = jnp.clip(seen - entry * page_size, 0, window)
            logits = logits_xla.indexer_logits(q, weights, k_cache, tables, lens, spec=of_window)
            position = entry * page_size + jnp.arange(window, dtype=jnp.int32)
            fresh = (position >= i * window) & (position < seen[:, None])
            return merge(best, Best(logits, jnp.where(fresh, position, -1)))

        varying = (q, weights, k_cache, block_tables, request, seen)
        none = Best(jnp.full((rows, kept), -jnp.inf, jnp.float32), jnp.full((rows, kept), -1, jnp.int32))
        best = Best(*(carry(x, *varying) for x in none))
        if pages == spec.logits.max_pages:
            best = step(jnp.zeros((), jnp.int32), best)
        else:
            best = lax.fori_loop(0, (seen.max() + (window - 1)) // window, step, best)
        return by_position(best, spec.k)[: 1 + spec.return_scores]

    outs = tuple(jax.ShapeDtypeStruct((tokens, spec.k), dtype) for dtype in (jnp.int32, jnp.float32))
    positions, *scores = over_token_blocks(
        block,
        (q, weights, request, seen),
        outs[: 1 + spec.return_scores],
        block=max(1, BLOCK_BYTES // (4 * window)),
        varying_with=(k_cache, block_tables),
    )
    if spec.return_bits:
        return bits_xla.selection_bits(positions, spec=spec.topk.selection)
    if not spec.return_slots:
        return unpacked((positions, *scores))
    page = jnp.where(positions < 0, 0, positions // page_size)
    slots = block_tables[request[:, None], page] * page_size + positions % page_size
    return jnp.where(positions < 0, -1, slots), jnp.minimum(seen, spec.k), *scores


def by_position(best: Best, k: int) -> tuple[jax.Array, jax.Array]:
    """Positions [T, k] in ascending order and their logits; after the last key the position is -1 and the logit
    -inf.
    """
    padding = ((0, 0), (0, k - best.positions.shape[1]))
    positions = jnp.pad(best.positions, padding, constant_values=-1)
    logits = jnp.where(positions < 0, -jnp.inf, jnp.pad(best.logits, padding))
    # -1 is the greatest unsigned number.
    order, logits = lax.sort((positions.astype(jnp.uint32), logits), num_keys=1)
    return order.astype(jnp.int32), logits


def merge(best: Best, more: Best) -> Best:
    """The best keys among those of `best` and `more`; all keys of `more` lie after those of `best` in their
    sequences.
    """
    kept = best.logits.shape[1]
    logits, positions = (jnp.concatenate(pair, axis=1) for pair in zip(best, more, strict=True))
    is_key = positions >= 0
    value = jnp.where(is_key, logits, -jnp.inf)
    # XLA orders -0.0 below 0.0, and a sum of relus times negative weights is -0.0 as often as not.
    value = jnp.where(value == 0, jnp.zeros_like(value), value)

    def sort_all() -> jax.Array:
        return jnp.lexsort((~numerics.ordered(logits), ~is_key), axis=-1).astype(jnp.int32)[:, :kept]

    # Ties go to the lower index, so to the lower position. But a place without a key also has the logit -inf, and would
    # not lose against a key of -inf.
    unusual = (is_key & (numerics.is_unordered(logits) | jnp.isneginf(logits))).any()
    order = lax.cond(unusual, sort_all, lambda: lax.top_k(value, kept)[1])
    return Best(jnp.take_along_axis(logits, order, axis=1), jnp.take_along_axis(positions, order, axis=1))
