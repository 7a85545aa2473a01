"""indexer_selected_logits in portable XLA: blocks of tokens, and for each of them blocks of columns."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.loops import carry
from tsmla_jax.ops.selected import index_scores
from tsmla_jax.ops.selected.blocks import over_token_blocks
from tsmla_jax.ops.selected.index_scores import Block, Columns, Gradient
from tsmla_jax.ops.transforms import refuse_derivative, with_backward
from tsmla_kernels.contract.indexer import SelectedLogitsSpec


def indexer_selected_logits(
    q: jax.Array,
    weights: jax.Array,
    k_cache: jax.Array,
    indices: jax.Array,
    lengths: jax.Array | None = None,
    *,
    spec: SelectedLogitsSpec,
) -> jax.Array:
    """logits [T, K] as the public indexer_selected_logits documents them."""
    if 0 in (spec.num_tokens, spec.num_selected):
        return jnp.full((spec.num_tokens, spec.num_selected), -jnp.inf, weights.dtype)
    if lengths is None:
        lengths = jnp.full((spec.num_tokens,), spec.num_selected, jnp.int32)
    run = with_backward(partial(_logits, spec), partial(_backward, spec))
    logits: jax.Array = run(q, weights, k_cache, indices, lengths)
    return logits


def _logits(
    spec: SelectedLogitsSpec,
    q: jax.Array,
    weights: jax.Array,
    k_cache: jax.Array,
    indices: jax.Array,
    lengths: jax.Array,
) -> jax.Array:
    narrow = index_scores.are_narrow(spec)

    def block(q: jax.Array, weights: jax.Array, indices: jax.Array, lengths: jax.Array) -> tuple[jax.Array]:
        columns = index_scores.selected_columns(indices, lengths, spec.cache)

        def step(out: jax.Array, block: Block) -> jax.Array:
            found = index_scores.score(q, weights, index_scores.rows_in(k_cache, block), narrow).logits
            held = lax.dynamic_slice_in_dim(out, block.first, columns.width, axis=1)
            part = jnp.where(block.valid, found, held)
            return lax.dynamic_update_slice_in_dim(out, part, block.first, axis=1)

        start = jnp.full(indices.shape, -jnp.inf, weights.dtype)
        return (columns.fold(step, carry(start, q, weights, k_cache, indices, lengths)),)

    (logits,) = over_token_blocks(
        block,
        (q, weights, indices, lengths),
        (jax.ShapeDtypeStruct(indices.shape, weights.dtype),),
        block=_block(spec),
        varying_with=(k_cache,),
    )
    return logits


def _backward(spec: SelectedLogitsSpec, saved: Any, d_logits: jax.Array) -> tuple[Any, ...]:
    (q, weights, k_cache, indices, lengths), _ = saved

    def columns_of(indices: jax.Array, lengths: jax.Array) -> Columns:
        return index_scores.selected_columns(indices, lengths, spec.cache)

    found = logits_gradient(spec, (q, weights, k_cache), (indices, lengths), columns_of, d_logits, block=_block(spec))
    return (*found, None, None)


def _block(spec: SelectedLogitsSpec) -> int:
    width = min(index_scores.BLOCK_COLUMNS, spec.num_selected)
    return index_scores.tokens_at_once(width, spec.head_dim, spec.num_heads)


def logits_gradient(
    spec: SelectedLogitsSpec,
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    rows: tuple[jax.Array, ...],
    columns_of: Any,
    d_logits: jax.Array,
    *,
    block: int,
) -> tuple[jax.Array, ...]:
    """The gradient of q, weights and k_cache.

    Args:
      spec: the spec of the call.
      arrays: q, weights and k_cache.
      rows: what says which keys the tokens have, a row a token.
      columns_of: takes a block of `rows`; returns their Columns.
      d_logits: the cotangent [T, columns].
      block: tokens at once.
    """
    q, weights, k_cache = arrays
    narrow, dtype = index_scores.are_narrow(spec), weights.dtype

    def body(total: Gradient, fresh: jax.Array, *operands: jax.Array) -> Gradient:
        q, weights, d_logits, *where = operands
        columns: Columns = columns_of(*where)

        def step(total: Gradient, block: Block) -> Gradient:
            block = block._replace(valid=block.valid & fresh[:, None])
            keys = index_scores.rows_in(k_cache, block)
            dots = index_scores.score(q, weights, keys, narrow).dots
            mine = lax.dynamic_slice_in_dim(d_logits, block.first, columns.width, axis=1)
            mine = jnp.where(block.valid, mine, 0)  # the cotangent of -inf may be NaN
            return index_scores.add_gradient(
                total, q, weights, keys, block=block, dots=dots, d_logits=mine, narrow=narrow
            )

        return columns.fold(step, total)

    start = Gradient(
        jnp.zeros(q.shape, q.dtype),
        jnp.zeros(weights.shape, dtype),
        jnp.zeros((spec.cache.num_pages * spec.cache.page_size, spec.head_dim), dtype),
    )
    varying = (*arrays, *rows, d_logits)
    found = index_scores.gradient_over_blocks(
        body, (q, weights, d_logits, *rows), Gradient(*(carry(x, *varying) for x in start)), block=block
    )
    results = (found.q, found.weights, found.keys.reshape(k_cache.shape).astype(k_cache.dtype))
    derived: tuple[jax.Array, ...] = refuse_derivative(
        results, varying, "the gradient of an indexer's logits", "implementation='reference' has it"
    )
    return derived
