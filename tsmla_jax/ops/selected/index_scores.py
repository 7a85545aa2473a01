"""An indexer's scores of plain keys and their gradient: blocks of tokens, and for each of them blocks of columns.

Column s of a token is a key: the one in slot indices[t, s], or the one at position s of the token's text. Memory holds
the operands, the results, one gathered block at a time (some tens of MiB), and in the gradient one sum for each number
of a key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.selected.blocks import fetch
from tsmla_kernels.contract.indexer import SelectedLogitsSpec
from tsmla_kernels.contract.layouts import IndexerCacheSpec, valid_slots

BLOCK_COLUMNS = 256
"""Columns a step: enough to fill a matrix product."""
BLOCK_BYTES = 32 << 20
"""Bound on the float32 block of gathered keys or of per-head scores, whichever is larger: a GPU needs large blocks."""

State = TypeVar("State")


class Block(NamedTuple):
    """Columns first to first + C - 1 of a block of tokens: legal slots [t, C], and which of them are keys [t, C]."""

    first: jax.Array
    slots: jax.Array
    valid: jax.Array


class Columns(NamedTuple):
    """The columns of a block of tokens.

    at: takes a first column; returns the Block of `width` columns from it on.
    width: how many columns a step has.
    total: how many columns a row has.
    active: the most columns that a row of the block uses.
    """

    at: Callable[[jax.Array], Block]
    width: int
    total: int
    active: jax.Array

    def fold(self, step: Callable[[State, Block], State], state: State) -> State:
        """The state after `step` has taken every column in use once."""
        if not self.total:
            return state

        def body(i: jax.Array, state: State) -> State:
            # The last step moves back to end at the last column, and skips the columns that the step before has taken.
            first = jnp.minimum(i * self.width, self.total - self.width)
            block = self.at(first)
            column = first + jnp.arange(self.width, dtype=jnp.int32)
            return step(state, block._replace(valid=block.valid & (column >= i * self.width)))

        used = jnp.clip(self.active, 0, self.total)
        return lax.fori_loop(0, (used + (self.width - 1)) // self.width, body, state)


def selected_columns(indices: jax.Array, lengths: jax.Array, cache: IndexerCacheSpec) -> Columns:
    """The Columns of indices [t, K]: the first lengths[t] columns of each row count."""
    count = indices.shape[1]
    width = min(BLOCK_COLUMNS, count)

    def at(first: jax.Array) -> Block:
        slots = lax.dynamic_slice_in_dim(indices, first, width, axis=1)
        column = first + jnp.arange(width, dtype=jnp.int32)
        valid = valid_slots(slots, cache.as_plain()) & (column < lengths[:, None])
        return Block(first, jnp.where(valid, slots, 0), valid)

    return Columns(at, width, count, lengths.max())


def paged_columns(tables: jax.Array, request: jax.Array, seen: jax.Array, cache: IndexerCacheSpec) -> Columns:
    """The Columns of texts: column s of token t is position s of the text with row request[t] of the block tables [B,
    M], if s < seen[t].
    """
    count = tables.shape[1] * cache.page_size
    width = min(BLOCK_COLUMNS, count)

    def at(first: jax.Array) -> Block:
        position = first + jnp.arange(width, dtype=jnp.int32)
        pages = tables[request[:, None], position // cache.page_size]
        valid = (position < seen[:, None]) & (pages >= 0) & (pages < cache.num_pages)
        slots = pages * cache.page_size + position % cache.page_size
        return Block(first, jnp.where(valid, slots, 0), valid)

    return Columns(at, width, count, seen.max())


def tokens_at_once(columns: int, *widths: int) -> int:
    """How many tokens a block takes if every token has `columns` rows of these widths."""
    return max(1, BLOCK_BYTES // (4 * max(1, columns) * max(widths)))


def dot(equation: str, a: jax.Array, b: jax.Array, narrow: bool, dtype: jnp.dtype) -> jax.Array:
    """The product in `dtype`. narrow: whether queries and keys have 16 bits. A GPU's fast products take these exactly,
    and round a gradient's float32 values to tf32."""
    if narrow and a.dtype == b.dtype and a.dtype.itemsize == 2:
        return jnp.einsum(equation, a, b, preferred_element_type=dtype)
    precision = lax.Precision.DEFAULT if narrow else lax.Precision.HIGHEST
    return jnp.einsum(equation, a.astype(dtype), b.astype(dtype), precision=precision)


def are_narrow(spec: SelectedLogitsSpec) -> bool:
    """Whether queries and keys have 16 bits."""
    return {spec.q_dtype, spec.cache_dtype} <= {"bfloat16", "float16"}


def rows_in(cache: jax.Array, block: Block) -> jax.Array:
    """The keys [t, C, D] of a block, from a plain cache [P, Z, D]. Columns that are no key give 0: their slot may hold
    NaN.
    """
    rows = cache.reshape(-1, cache.shape[-1])
    return jnp.where(block.valid[..., None], fetch(rows, block.slots, lambda rows, at: rows[at]), 0)


class Scores(NamedTuple):
    """One block's products of queries and keys [t, Hi, C], and its logits [t, C]."""

    dots: jax.Array
    logits: jax.Array


def score(q: jax.Array, weights: jax.Array, keys: jax.Array, narrow: bool) -> Scores:
    """The scores of q [t, Hi, Di] and weights [t, Hi], in the weights' dtype, over keys [t, C, Di]."""
    dots = dot("thd,tkd->thk", q, keys, narrow, weights.dtype)
    return Scores(dots, jnp.einsum("th,thk->tk", weights, jnp.maximum(dots, 0), precision="highest"))


class Gradient(NamedTuple):
    """The gradient summed so far: of queries [t, Hi, Di] and weights [t, Hi], those of a block or of all tokens, and of
    every key [P Z, Di]."""

    q: jax.Array
    weights: jax.Array
    keys: jax.Array


def add_gradient(
    total: Gradient,
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    *,
    block: Block,
    dots: jax.Array,
    d_logits: jax.Array,
    narrow: bool,
) -> Gradient:
    """`total` plus the gradient from one block of columns, whose logits have the cotangent d_logits [t, C]."""
    dtype = weights.dtype
    # A token without keys may be NaN, as padding is, and 0 * NaN is NaN.
    terms = jnp.where(block.valid[:, None, :], jnp.maximum(dots, 0), 0)
    d_weights = jnp.einsum("thk,tk->th", terms, d_logits, precision="highest")
    d_dots = jnp.where(dots > 0, weights[..., None] * d_logits[:, None, :], 0)
    d_q = dot("thk,tkd->thd", d_dots, keys, narrow, dtype)
    d_keys = dot("thk,thd->tkd", d_dots, q, narrow, dtype)
    where = jnp.where(block.valid, block.slots, total.keys.shape[0])  # past the end: dropped
    d_keys = total.keys.at[where.reshape(-1)].add(d_keys.reshape(-1, d_keys.shape[-1]), mode="drop")
    return Gradient(total.q + d_q, total.weights + d_weights, d_keys)


def gradient_over_blocks(
    body: Callable[..., Gradient],
    operands: tuple[jax.Array, ...],
    start: Gradient,
    *,
    block: int,
) -> Gradient:
    """The gradient of all tokens, each part in its dtype in `start`.

    Args:
      body: takes the Gradient so far of the block's queries and weights (zero in tokens that count) and of all keys,
        which of the block's tokens count, and the block's rows of the operands; returns the Gradient with the block's
        part added.
      operands: arrays with T rows.
      start: zeros in the shapes that the gradient of all tokens has.
      block: how many tokens a block has.
    """
    num_rows = start.q.shape[0]
    block = min(block, num_rows)

    def step(i: jax.Array, total: Gradient) -> Gradient:
        # The last block moves back to end at the last row; rows that it shares with the block before don't count again.
        first = jnp.minimum(i * block, num_rows - block)
        fresh = first + jnp.arange(block, dtype=jnp.int32) >= i * block
        rows = (fetch(x, first, lambda x, at: lax.dynamic_slice_in_dim(x, at, block, axis=0)) for x in operands)
        held = [
            lax.dynamic_slice_in_dim(x, first, block, axis=0).astype(total.keys.dtype) for x in (total.q, total.weights)
        ]
        mine = body(Gradient(held[0], held[1], total.keys), fresh, *rows)
        q, weights = (
            lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), first, axis=0)
            for x, part in ((total.q, mine.q), (total.weights, mine.weights))
        )
        return Gradient(q, weights, mine.keys)

    return lax.fori_loop(0, -(-num_rows // block), step, start)
