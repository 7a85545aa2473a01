"""What only the data of a sparse op can show, checked under TSMLA_CHECK=1 in the manner of `tsmla_jax.ops.checks`.

Every function returns its first array, behind the verdict.
"""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from tsmla_jax.ops.checks import behind
from tsmla_kernels.contract.sparse import CompressSpec, IndexerLogitsSpec, SparseMLASpec


def decode_lens(lens: jax.Array, total_tokens: int) -> jax.Array:
    """Query tokens a request: not negative, and all of them fit the rows."""
    return behind(partial(_check_decode_lens, total_tokens), lens)


def positions(array: jax.Array, capacity: int) -> jax.Array:
    """Positions within a sequence: each in its block table, or negative."""
    return behind(partial(_check_positions, capacity), array)


def rope_positions(array: jax.Array, num_positions: int) -> jax.Array:
    """Positions of rows to rotate: in the table of cos and sin, or negative."""
    return behind(partial(_check_rope_positions, num_positions), array)


def slot_mapping(slots: jax.Array, num_slots: int) -> jax.Array:
    """Slots to write: -1 or in the cache, none twice."""
    return behind(partial(_check_slots, num_slots), slots)


def sparse_mla(spec: SparseMLASpec, indices: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """indices, behind the check that the active ones are slots of their cache."""
    arrays = (indices,) if lengths is None else (indices, lengths)
    return behind(partial(_check_sparse_mla, spec), *arrays)


def indexer_logits(spec: IndexerLogitsSpec, seq_lens: jax.Array, block_tables: jax.Array) -> jax.Array:
    """seq_lens, behind the check that lengths fit the table and used pages exist."""
    return behind(partial(_check_indexer_logits, spec), seq_lens, block_tables)


def topk_lens(seq_lens: jax.Array, capacity: int) -> jax.Array:
    """Lengths of the rows of logits: 0 to the number of columns."""
    return behind(partial(_check_topk_lens, capacity), seq_lens)


def compress(
    spec: CompressSpec, seq_lens: jax.Array, cu_seqlens_q: jax.Array, state_slots: jax.Array, ring_positions: jax.Array
) -> jax.Array:
    """seq_lens, behind the check that each request continues where its state left off."""
    return behind(partial(_check_compress, spec), seq_lens, cu_seqlens_q, state_slots, ring_positions)


def cu_seqlens(array: jax.Array, num_tokens: int) -> jax.Array:
    """Where each request's new tokens start, and their end: in order, and within the tokens there are."""
    return behind(partial(_check_cu_seqlens, num_tokens), array)


def rows_of_slots(name: str, slots: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
    """Rows whose slots come first, -1 behind them; with lengths, no -1 in the first lengths[t] of row t."""
    return behind(partial(_check_rows_of_slots, name), *((slots,) if lengths is None else (slots, lengths)))


def counts(name: str, array: jax.Array, capacity: int) -> jax.Array:
    """Counts of active slots: 0 to the number of columns that hold them."""
    return behind(partial(_check_counts, name, capacity), array)


def _check_decode_lens(total_tokens: int, lens: np.ndarray) -> None:
    for request, length in enumerate(lens.tolist()):
        if length < 0:
            raise ValueError(f"decode_lens: request {request} has {length} query tokens; legal: 0 or more")
    total = int(lens.sum(dtype=np.int64))
    if total > total_tokens:
        raise ValueError(f"decode_lens: {total} query tokens in all; legal: at most total_tokens = {total_tokens}")


def _check_positions(capacity: int, array: np.ndarray) -> None:
    bad = np.argwhere(array >= capacity)
    if bad.size:
        row, column = bad[0].tolist()
        raise ValueError(
            f"positions: row {row} asks for position {array[row, column]} in column {column}; legal: -1, or 0 to "
            f"{capacity - 1}, what its block table holds"
        )


def _check_rope_positions(num_positions: int, array: np.ndarray) -> None:
    bad = np.flatnonzero(array >= num_positions)
    if bad.size:
        raise ValueError(
            f"positions: row {bad[0]} has position {array[bad[0]]}; legal: at most {num_positions - 1}, "
            f"the last of cos_sin"
        )


def _check_slots(num_slots: int, slots: np.ndarray) -> None:
    writer: dict[int, int] = {}
    for token, slot in enumerate(slots.tolist()):
        if slot == -1:
            continue
        if not 0 <= slot < num_slots:
            raise ValueError(f"slot_mapping: token {token} goes to slot {slot}; legal: -1, or 0 to {num_slots - 1}")
        if slot in writer:
            raise ValueError(f"slot_mapping: tokens {writer[slot]} and {token} both go to slot {slot}")
        writer[slot] = token


def _check_sparse_mla(spec: SparseMLASpec, indices: np.ndarray, lengths: np.ndarray | None = None) -> None:
    columns = np.arange(spec.num_selected)
    if lengths is not None:
        for token, length in enumerate(lengths.tolist()):
            if not 0 <= length <= spec.num_selected:
                raise ValueError(
                    f"lengths: token {token} has {length} active indices; legal: 0 to K = {spec.num_selected}"
                )
    first = spec.cache.num_slots
    limit = np.full(spec.num_selected, first)
    if spec.compressed is not None:
        limit[spec.window :] = spec.compressed.num_slots
    active = np.ones(indices.shape, bool) if lengths is None else columns < lengths[:, None]
    bad = active & ((indices >= limit) | (indices < -1))
    # A row's window may hold fewer tokens than columns, its end then filled up with -1; everywhere else a length says
    # where a row ends, and a -1 before that is a mistake.
    if lengths is not None:
        hole = active & (indices == -1)
        if spec.compressed is not None:
            window = indices[:, : spec.window]
            later = np.flip(np.logical_or.accumulate(np.flip(window >= 0, 1), 1), 1)
            hole[:, : spec.window] &= later
        bad |= hole
    where = np.argwhere(bad)
    if where.size:
        token, column = where[0].tolist()
        raise ValueError(
            f"indices: token {token} selects slot {indices[token, column]} in column {column}, which is active; "
            f"legal: 0 to {limit[column] - 1}"
        )


def _check_indexer_logits(spec: IndexerLogitsSpec, seq_lens: np.ndarray, block_tables: np.ndarray) -> None:
    capacity = spec.max_pages * spec.cache.page_size
    for token, length in enumerate(seq_lens.tolist()):
        if not 0 <= length <= capacity:
            raise ValueError(f"seq_lens: token {token} sees {length} keys; legal: 0 to {capacity}")
        used = block_tables[token, : -(-length // spec.cache.page_size)]
        bad = np.flatnonzero((used < 0) | (used >= spec.cache.num_pages))
        if bad.size:
            raise ValueError(
                f"block_tables: token {token} names page {used[bad[0]]} in entry {bad[0]}, which it uses; legal: 0 to "
                f"{spec.cache.num_pages - 1}"
            )


def _check_topk_lens(capacity: int, seq_lens: np.ndarray) -> None:
    for token, length in enumerate(seq_lens.tolist()):
        if not 0 <= length <= capacity:
            raise ValueError(f"seq_lens: token {token} has {length} logits; legal: 0 to {capacity}")


def _check_compress(
    spec: CompressSpec,
    seq_lens: np.ndarray,
    cu_seqlens_q: np.ndarray,
    state_slots: np.ndarray,
    ring_positions: np.ndarray,
) -> None:
    lens = np.diff(cu_seqlens_q)
    _check_cu_seqlens(spec.num_tokens, cu_seqlens_q)
    owner: dict[int, int] = {}
    for request, (end, length, slot) in enumerate(
        zip(seq_lens.tolist(), lens.tolist(), state_slots.tolist(), strict=True)
    ):
        if length == 0:
            continue
        if slot == -1 and length < end:
            raise ValueError(
                f"state_slots: request {request} has no state (-1) and continues at position {end - length}; legal: "
                f"-1 for new tokens from position 0 on"
            )
        if slot == -1:
            continue
        if not 0 <= slot < spec.num_states:
            raise ValueError(
                f"state_slots: request {request} has state {slot}; legal: -1, or 0 to {spec.num_states - 1}"
            )
        if slot in owner:
            raise ValueError(f"state_slots: requests {owner[slot]} and {request} both have state {slot}")
        owner[slot] = request
        if length > end:
            raise ValueError(
                f"seq_lens: request {request} has length {end} and {length} new tokens; legal: at least those"
            )
        start = end - length
        # The next entry to complete pools the tokens of its window that came before this call, out of the ring.
        first = (start // spec.ratio - (spec.overlap - 1)) * spec.ratio
        for position in range(max(first, 0), start):
            held = ring_positions[slot, position % spec.ring]
            if held != position:
                raise ValueError(
                    f"seq_lens: request {request} continues at position {start}, but its state holds position {held} "
                    f"where {position} belongs; legal: positions that follow one another, skipping none"
                )


def _check_cu_seqlens(num_tokens: int, array: np.ndarray) -> None:
    if array[0] != 0 or (np.diff(array) < 0).any() or array[-1] > num_tokens:
        raise ValueError(
            f"cu_seqlens_q: got {array.tolist()}; legal: from 0, never decreasing, to at most {num_tokens}"
        )


def _check_rows_of_slots(name: str, slots: np.ndarray, lengths: np.ndarray | None = None) -> None:
    ends = (slots >= 0).sum(axis=1) if lengths is None else lengths
    holes = np.argwhere((slots < 0) & (np.arange(slots.shape[1]) < ends[:, None]))
    if holes.size:
        token, column = holes[0].tolist()
        raise ValueError(
            f"{name}: token {token} has {slots[token, column]} in column {column}, before the end of its "
            f"{ends[token]} slots; legal: slots first, -1 behind them"
        )


def _check_counts(name: str, capacity: int, counts: np.ndarray) -> None:
    for token, count in enumerate(counts.tolist()):
        if not 0 <= count <= capacity:
            raise ValueError(f"{name}: token {token} has {count} slots; legal: 0 to {capacity}")
