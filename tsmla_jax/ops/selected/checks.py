"""Checks of the sparse operations' values under TSMLA_CHECK=1, as `tsmla_jax.ops.checks` does for the dense ones.

Every function returns its first array, which then waits for the verdict.
"""

from __future__ import annotations

from functools import partial

import jax

from tsmla_jax.ops.checks import behind
from tsmla_kernels.contract import values
from tsmla_kernels.contract.compress import CompressSpec
from tsmla_kernels.contract.layouts import CacheSpec
from tsmla_kernels.contract.sparse import IndexerLogitsSpec, SparseMLASpec


def decode_lens(lens: jax.Array, total_tokens: int) -> jax.Array:
    """Checks how many query tokens each request has: no count is negative, and all tokens fit the rows."""
    return behind(partial(values.decode_lens, total_tokens), lens)


def positions(array: jax.Array, capacity: int) -> jax.Array:
    """Checks positions within a sequence: each is in its block table, or negative."""
    return behind(partial(values.positions, capacity), array)


def rope_positions(array: jax.Array, num_positions: int) -> jax.Array:
    """Checks positions of rows to rotate: each is in the table of cos and sin, or negative."""
    return behind(partial(values.rope_positions, num_positions), array)


def slot_mapping(slots: jax.Array, cache: CacheSpec) -> jax.Array:
    """Checks slots to write: each is -1 or that of a row of the cache, and no slot comes twice."""
    check = partial(values.slot_mapping, cache.num_slots, page_size=cache.page_size, page_span=cache.span)
    return behind(check, slots)


def sparse_mla(spec: SparseMLASpec, indices: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """indices, after the check that lengths are from 0 to K, and that the active ones are slots of their cache, or -1
    without lengths or at the end of a window."""
    arrays = (indices,) if lengths is None else (indices, lengths)
    return behind(partial(values.sparse_mla, spec), *arrays)


def selected(columns: int, num_slots: int, indices: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """indices, after the check that the active ones are -1 or slots, and that lengths are from 0 to the number of
    columns.
    """
    arrays = (indices,) if lengths is None else (indices, lengths)
    return behind(partial(values.selected, columns, num_slots), *arrays)


def indexer_logits(
    spec: IndexerLogitsSpec, seq_lens: jax.Array, block_tables: jax.Array, cu_seqlens_q: jax.Array | None
) -> jax.Array:
    """seq_lens, after the check that lengths fit the table, used pages exist and cu_seqlens_q is sound."""
    offsets = () if cu_seqlens_q is None else (cu_seqlens_q,)
    return behind(partial(values.indexer_logits, spec), seq_lens, block_tables, *offsets)


def topk_lens(seq_lens: jax.Array, capacity: int) -> jax.Array:
    """Checks the lengths of rows of logits: each is from 0 to the number of columns."""
    return behind(partial(values.topk_lens, capacity), seq_lens)


def topk_rows(seq_lens: jax.Array, row_starts: jax.Array, capacity: int) -> jax.Array:
    """seq_lens, after the check that rows that begin at row_starts lie inside the columns."""
    return behind(partial(values.topk_rows, capacity), seq_lens, row_starts)


def compress(
    spec: CompressSpec, seq_lens: jax.Array, cu_seqlens_q: jax.Array, state_slots: jax.Array, ring_positions: jax.Array
) -> jax.Array:
    """seq_lens, after the check that each request continues where its state left off."""
    return behind(partial(values.compress, spec), seq_lens, cu_seqlens_q, state_slots, ring_positions)


def cu_seqlens(array: jax.Array, num_tokens: int) -> jax.Array:
    """Checks the offsets of the requests' new tokens: they begin at 0, never decrease and lie within the tokens."""
    return behind(partial(values.cu_seqlens, num_tokens), array)


def rows_of_slots(name: str, slots: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
    """Checks that in each row all slots come before all -1; with lengths, that the first lengths[t] entries of row t
    are no -1.
    """
    return behind(partial(values.rows_of_slots, name), *((slots,) if lengths is None else (slots, lengths)))


def counts(name: str, array: jax.Array, capacity: int) -> jax.Array:
    """Checks counts of active slots: each is from 0 to `capacity`, the number of columns for slots."""
    return behind(partial(values.counts, name, capacity), array)
