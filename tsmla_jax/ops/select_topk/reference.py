"""The definition of select_topk: sort every row, stably."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tsmla_jax.ops.selected import numerics
from tsmla_jax.ops.selection_bits import reference as bits_reference
from tsmla_kernels.contract.sparse import TopKSpec

Results = jax.Array | tuple[jax.Array, jax.Array]
"""Positions, or the words of their bits; or slots and counts."""


class Rows(NamedTuple):
    """The part of the logits that each row has: lengths [T] clipped to the array, first columns [T], and block tables
    [T, M] or None.
    """

    lens: jax.Array
    starts: jax.Array
    block_tables: jax.Array | None


def rows_of(spec: TopKSpec, seq_lens: jax.Array, *others: jax.Array) -> Rows:
    """The rows of a call. others: row_starts and block_tables, if the call has them."""
    starts = jnp.zeros_like(seq_lens)
    if spec.row_starts:
        starts = jnp.clip(others[0], 0, spec.num_columns)
    lens = jnp.clip(seq_lens, 0, spec.num_columns - starts)
    return Rows(lens, starts, others[-1] if spec.page_size else None)


def select_topk(logits: jax.Array, seq_lens: jax.Array, *others: jax.Array, spec: TopKSpec) -> Results:
    """The results as the public select_topk documents them."""
    num_keys, k = logits.shape[1], spec.k
    rows = rows_of(spec, seq_lens, *others)
    column = jnp.arange(num_keys) - rows.starts[:, None]
    in_row = (column >= 0) & (column < rows.lens[:, None])
    # The last key of lexsort decides first: columns outside the row come after all of the row's.
    order = jnp.lexsort((~numerics.ordered(logits), ~in_row), axis=-1).astype(jnp.int32)
    order = jnp.pad(order[:, :k], ((0, 0), (0, max(0, k - num_keys)))) - rows.starts[:, None]
    positions = jnp.where(jnp.arange(k) < rows.lens[:, None], order, -1)
    if spec.bits:
        return bits_reference.selection_bits(positions, spec=spec.selection)
    return results_of(spec, rows, ascending(positions) if spec.order == "position" else positions)


def results_of(spec: TopKSpec, rows: Rows, positions: jax.Array) -> Results:
    """The positions; or, if there are block tables, the positions' slots and how many positions each row selects."""
    if rows.block_tables is None:
        return positions
    counts = jnp.minimum(rows.lens, spec.k)
    width = rows.block_tables.shape[1]
    if width == 0:
        return jnp.full_like(positions, -1), counts
    page = positions // spec.page_size
    pages = jnp.take_along_axis(rows.block_tables, jnp.clip(page, 0, width - 1), axis=1)
    inside = (positions >= 0) & (page < width)
    return jnp.where(inside, pages * spec.page_size + positions % spec.page_size, -1), counts


def ascending(positions: jax.Array) -> jax.Array:
    """Each row sorted, with -1 after all positions: as an unsigned integer -1 is the greatest."""
    return jnp.sort(positions.astype(jnp.uint32), axis=-1).astype(jnp.int32)
