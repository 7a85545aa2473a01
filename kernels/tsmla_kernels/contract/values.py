"""The checks that TSMLA_CHECK=1 asks for: of arrays' values, which no shape or dtype shows, as numpy arrays.

Reading the values costs a synchronisation with the device, hence the switch. Without the checks the implementations
still read and write only inside the cache. The front ends share these functions, so a wrong value reads the same from
jax and from torch. Each raises ValueError naming the argument, and takes its static arguments before the arrays.
"""

from __future__ import annotations

import os

import numpy as np

from tsmla_kernels.contract import CacheGatherSpec, CacheWriteSpec, DecodeSpec, PrefillSpec
from tsmla_kernels.contract.compress import CompressSpec, CompressWriteSpec
from tsmla_kernels.contract.layouts import slots_of_rows, valid_slots
from tsmla_kernels.contract.products import ProductSpec
from tsmla_kernels.contract.sparse import IndexerLogitsSpec, SparseMLASpec


def enabled() -> bool:
    """Whether TSMLA_CHECK asks for checks; read at every call (under jit: at every trace)."""
    return os.environ.get("TSMLA_CHECK", "0") not in ("", "0")


# ---- the dense operations


def decode(
    spec: DecodeSpec,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
    cu_seqlens_q: np.ndarray | None = None,
    visible_lens: np.ndarray | None = None,
) -> None:
    """Check that lengths fit the table, used pages exist, cu_seqlens_q is sound and no token sees more keys than there
    are."""
    capacity = block_tables.shape[1] * spec.page_size
    for request, length in enumerate(seq_lens.tolist()):
        if not 0 <= length <= capacity:
            raise ValueError(
                f"seq_lens: request {request} has {length} keys; legal: 0 to {capacity}, what its"
                f" {block_tables.shape[1]} pages of {spec.page_size} hold"
            )
        _check_pages(f"request {request}", block_tables[request], 0, -(-length // spec.page_size), spec.num_pages)
    if cu_seqlens_q is not None:
        _check_offsets("cu_seqlens_q", cu_seqlens_q, spec.total_q_len, "max_q_len", spec.max_q_len)
    if visible_lens is not None:
        starts = np.arange(spec.batch + 1) * spec.max_q_len if cu_seqlens_q is None else cu_seqlens_q
        owner = np.repeat(np.arange(spec.batch), np.diff(starts)).tolist()
        first, visible = int(starts[0]), visible_lens.flatten()[starts[0] :].tolist()
        for token, (of, count) in enumerate(zip(owner, visible, strict=False)):
            if not 0 <= count <= seq_lens[of]:
                raise ValueError(
                    f"visible_lens: token {first + token} sees {count} keys; legal: 0 to {seq_lens[of]}, the keys of"
                    f" its request {of}"
                )


def prefill_selection(num_rows: int, selection_rows: np.ndarray) -> None:
    """Check that each of selection_rows is -1 or the index of one of selection's rows."""
    wrong = np.flatnonzero((selection_rows < -1) | (selection_rows >= num_rows))
    if wrong.size:
        token = int(wrong[0])
        raise ValueError(
            f"selection_rows: got {selection_rows[token]} for query token {token}; legal: -1 to R - 1 = {num_rows - 1},"
            " R from selection"
        )


def prefill(spec: PrefillSpec, cu_seqlens_q: np.ndarray, cu_seqlens_kv: np.ndarray) -> None:
    """Check that both arrays of offsets are sound."""
    _check_offsets("cu_seqlens_q", cu_seqlens_q, spec.total_q_len, "max_q_len", spec.max_q_len)
    _check_offsets("cu_seqlens_kv", cu_seqlens_kv, spec.total_kv_len, "max_kv_len", spec.max_kv_len)


def cache_write(spec: CacheWriteSpec, slots: np.ndarray) -> None:
    """Check that every slot is -1 or in the cache, and that none is written twice."""
    slot_mapping(spec.num_pages * spec.page_size, slots)


def cache_gather(spec: CacheGatherSpec, lens: np.ndarray, starts: np.ndarray, block_tables: np.ndarray) -> None:
    """Check that each range lies in its request's table, used pages exist and the result has room for all rows."""
    capacity = block_tables.shape[1] * spec.page_size
    for request, (start, length) in enumerate(zip(starts.tolist(), lens.tolist(), strict=True)):
        if start < 0 or length < 0 or start + length > capacity:
            raise ValueError(
                f"starts, lens: request {request} asks for {length} tokens from {start} on; legal: inside the"
                f" {capacity} that its {block_tables.shape[1]} pages of {spec.page_size} hold"
            )
        if length:
            first, last = start // spec.page_size, -(-(start + length) // spec.page_size)
            _check_pages(f"request {request}", block_tables[request], first, last, spec.num_pages)
    total = int(lens.sum(dtype=np.int64))
    if total > spec.total_len:
        raise ValueError(f"lens: {total} tokens in all; legal: at most total_len = {spec.total_len}")


def slot_mapping(num_slots: int, slots: np.ndarray, *, page_size: int = 1, page_span: int = 1) -> None:
    """Check that every slot is -1 or that of a row of the cache, and that none is written twice. page_size of each
    page's page_span slots are rows."""
    wrong = np.flatnonzero((slots != -1) & ~slots_of_rows(slots, num_slots, page_size, page_span))
    if wrong.size:
        token = int(wrong[0])
        raise ValueError(
            f"slot_mapping: token {token} goes to slot {slots[token]}; legal: -1, or 0 to {num_slots - 1}"
            f"{_rows_only(page_size, page_span)}"
        )
    writer: dict[int, int] = {}
    for token, slot in enumerate(slots.tolist()):
        if slot == -1:
            continue
        if slot in writer:
            raise ValueError(
                f"slot_mapping: tokens {writer[slot]} and {token} both go to slot {slot}; legal: slots that differ"
            )
        writer[slot] = token


# ---- the sparse operations


def sparse_mla(spec: SparseMLASpec, indices: np.ndarray, lengths: np.ndarray | None = None) -> None:
    """Check that lengths are 0 to K, and that the active indices are slots of their cache. -1 is legal without lengths
    and at the end of a window."""
    if lengths is not None:
        _check_counts("lengths: token {} has {} active indices", lengths, spec.num_selected, f"K = {spec.num_selected}")
    window = spec.num_selected if spec.compressed is None else spec.window
    parts = [(indices[:, :window], spec.cache), (indices[:, window:], spec.compressed or spec.cache)]
    active = np.ones(indices.shape, bool) if lengths is None else np.arange(spec.num_selected) < lengths[:, None]
    bad = active & (indices != -1) & ~np.concatenate([valid_slots(*part) for part in parts], axis=1)
    # A window may hold fewer tokens than columns: -1 then fills its end. Everywhere else a length says where a row
    # ends, and a -1 before that end is a mistake.
    if lengths is not None:
        hole = active & (indices == -1)
        if spec.compressed is not None:
            later = np.flip(np.logical_or.accumulate(np.flip(indices[:, :window] >= 0, 1), 1), 1)
            hole[:, :window] &= later
        bad |= hole
    where = np.argwhere(bad)
    if where.size:
        token, column = where[0].tolist()
        cache = parts[column >= window][1]
        legal = f"0 to {cache.num_slots - 1}{_rows_only(cache.page_size, cache.span)}"
        if lengths is None:
            legal = f"-1, or {legal}"
        elif spec.compressed is not None and column < window:
            legal += ", or -1 in the window's last columns"
        raise ValueError(
            f"indices: token {token} selects slot {indices[token, column]} in column {column}, which is active; "
            f"legal: {legal}"
        )


def indexer_logits(
    spec: IndexerLogitsSpec, seq_lens: np.ndarray, block_tables: np.ndarray, cu_seqlens_q: np.ndarray | None = None
) -> None:
    """Check that lengths fit the table, used pages exist and cu_seqlens_q is sound."""
    page_size = spec.cache.page_size
    capacity = spec.max_pages * page_size
    for row, length in enumerate(seq_lens.tolist()):
        owner, verb = ("request", "has") if spec.ragged else ("token", "sees")
        if not 0 <= length <= capacity:
            raise ValueError(f"seq_lens: {owner} {row} {verb} {length} keys; legal: 0 to {capacity}")
        _check_pages(f"{owner} {row}", block_tables[row], 0, -(-length // page_size), spec.cache.num_pages)
    if cu_seqlens_q is not None:
        cu_seqlens(spec.num_tokens, cu_seqlens_q)


def selected(columns: int, num_slots: int, indices: np.ndarray, lengths: np.ndarray | None = None) -> None:
    """Check that the active indices are -1 or slots of the cache, and that lengths are 0 to the number of columns."""
    active = np.ones(indices.shape, bool)
    if lengths is not None:
        _check_counts("lengths: token {} has {} active indices", lengths, columns, f"K = {columns}")
        active = np.arange(columns) < lengths[:, None]
    where = np.argwhere(active & ((indices >= num_slots) | (indices < -1)))
    if where.size:
        token, column = where[0].tolist()
        raise ValueError(
            f"indices: token {token} selects slot {indices[token, column]} in column {column}, which is active; "
            f"legal: -1, or 0 to {num_slots - 1}"
        )


def topk_lens(capacity: int, seq_lens: np.ndarray) -> None:
    """Check that the lengths of rows of logits are 0 to `capacity`, the number of columns."""
    _check_counts("seq_lens: token {} has {} logits", seq_lens, capacity)


def topk_rows(capacity: int, seq_lens: np.ndarray, row_starts: np.ndarray) -> None:
    """Check that each row of logits, from its start to start + length, lies within the `capacity` columns."""
    for token, (start, length) in enumerate(zip(row_starts.tolist(), seq_lens.tolist(), strict=True)):
        if start < 0 or length < 0 or start + length > capacity:
            raise ValueError(
                f"row_starts, seq_lens: token {token} has {length} logits from column {start} on; legal: inside the"
                f" {capacity} columns"
            )


def compress(
    spec: CompressSpec,
    seq_lens: np.ndarray,
    cu_seqlens_q: np.ndarray,
    state_slots: np.ndarray,
    ring_positions: np.ndarray,
) -> None:
    """Check that offsets and states are sound, and that each request continues where its state left off."""
    cu_seqlens(spec.num_tokens, cu_seqlens_q)
    lens = np.diff(cu_seqlens_q)
    owner: dict[int, int] = {}
    for request, (end, length, slot) in enumerate(
        zip(seq_lens.tolist(), lens.tolist(), state_slots.tolist(), strict=True)
    ):
        if length == 0:
            continue
        if length > end:
            raise ValueError(
                f"seq_lens: request {request} has length {end} and {length} new tokens; legal: at least those"
            )
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
        start = end - length
        # The next entry to complete pools tokens that came before this call: those must be in the ring.
        first = (start // spec.ratio - (spec.overlap - 1)) * spec.ratio
        for position in range(max(first, 0), start):
            held = ring_positions[slot, position % spec.ring]
            if held != position:
                raise ValueError(
                    f"seq_lens: request {request} continues at position {start}, but its state holds position {held} "
                    f"where {position} belongs; legal: positions that follow one another, skipping none"
                )


def compress_write(
    spec: CompressWriteSpec,
    seq_lens: np.ndarray,
    cu_seqlens_q: np.ndarray,
    state_slots: np.ndarray,
    ring_positions: np.ndarray,
    block_tables: np.ndarray,
) -> None:
    """Check what `compress` checks, and that no two entries that the new tokens complete go to one slot."""
    compress(spec.compress, seq_lens, cu_seqlens_q, state_slots, ring_positions)
    writer: dict[int, tuple[int, int]] = {}
    for request, (end, length) in enumerate(zip(seq_lens.tolist(), np.diff(cu_seqlens_q).tolist(), strict=True)):
        for entry in range((end - length) // spec.compress.ratio, end // spec.compress.ratio):
            column, offset = divmod(entry, spec.page_size)
            page = int(block_tables[request, column]) if column < block_tables.shape[1] else -1
            if not 0 <= page < spec.num_pages:
                continue  # such an entry is not written
            slot = page * spec.page_size + offset
            if slot in writer:
                other, its_entry = writer[slot]
                raise ValueError(
                    f"block_tables: entry {its_entry} of request {other} and entry {entry} of request {request} both go"
                    f" to slot {slot}; legal: entries that are written lie in pages of their request alone"
                )
            writer[slot] = request, entry


def cu_seqlens(num_tokens: int, offsets: np.ndarray) -> None:
    """Check that the offsets begin at 0, never decrease, and end within the `num_tokens` rows."""
    if offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any() or offsets[-1] > num_tokens:
        raise ValueError(
            f"cu_seqlens_q: got {offsets.tolist()}; legal: from 0, never decreasing, to at most {num_tokens}"
        )


def grouped_product(spec: ProductSpec, cu_rows: np.ndarray, rows: np.ndarray | None = None) -> None:
    """Check that cu_rows begins at 0, never decreases and ends within the result's rows, and that each entry of `rows`
    in a group is a row of x."""
    whose = "x's rows" if rows is None else "the size of rows"
    if cu_rows[0] != 0 or (cu_rows[1:] < cu_rows[:-1]).any() or cu_rows[-1] > spec.num_rows:
        raise ValueError(
            f"cu_rows: got {cu_rows.tolist()}; legal: from 0, never decreasing, to at most {spec.num_rows}, {whose}"
        )
    count = spec.num_picked
    if rows is None or count is None:
        return
    if (wrong := ((rows < 0) | (rows >= count))[: cu_rows[-1]]).any():
        place = int(np.flatnonzero(wrong)[0])
        raise ValueError(f"rows: got {rows[place]} at {place}; legal: 0 to {count - 1}, x's rows")


def segment_ids(name: str, max_segments: int, ids: np.ndarray) -> None:
    """Check that each row of ids [B, S] has at most `max_segments` runs of an id other than 0, and no id in two
    runs. name: the argument that errors name."""
    for row, line in enumerate(ids):
        starts = np.flatnonzero((line != 0) & (np.diff(line, prepend=0) != 0))
        if len(starts) > max_segments:
            raise ValueError(
                f"{name}: row {row} has {len(starts)} segments; legal: at most max_segments={max_segments}"
            )
        found, counts = np.unique(line[starts], return_counts=True)
        if (counts > 1).any():
            raise ValueError(
                f"{name}: row {row} has the id {found[counts > 1][0]} in more than one run; legal: one run for each id,"
                " as each run is a segment"
            )


def decode_lens(total_tokens: int, lens: np.ndarray) -> None:
    """Check the numbers of query tokens of the requests: none is negative, and their sum is at most `total_tokens`."""
    for request, length in enumerate(lens.tolist()):
        if length < 0:
            raise ValueError(f"decode_lens: request {request} has {length} query tokens; legal: 0 or more")
    total = int(lens.sum(dtype=np.int64))
    if total > total_tokens:
        raise ValueError(f"decode_lens: {total} query tokens in all; legal: at most total_tokens = {total_tokens}")


def positions(capacity: int, array: np.ndarray) -> None:
    """Check that each position is in its block table, or negative."""
    bad = np.argwhere(array >= capacity)
    if bad.size:
        row, column = bad[0].tolist()
        raise ValueError(
            f"positions: row {row} asks for position {array[row, column]} in column {column}; legal: at most "
            f"{capacity - 1}, what its block table holds"
        )


def rope_positions(num_positions: int, array: np.ndarray) -> None:
    """Check that the positions of rows to rotate are in the table of cos and sin, or negative."""
    bad = np.flatnonzero(array >= num_positions)
    if bad.size:
        raise ValueError(
            f"positions: row {bad[0]} has position {array[bad[0]]}; legal: at most {num_positions - 1}, "
            f"the last of cos_sin"
        )


def rows_of_slots(name: str, slots: np.ndarray, lengths: np.ndarray | None = None) -> None:
    """Check that slots come first in each row and -1 behind them; if there are lengths, that the first lengths[t]
    entries of row t are not -1."""
    ends = (slots >= 0).sum(axis=1) if lengths is None else lengths
    holes = np.argwhere((slots < 0) & (np.arange(slots.shape[1]) < ends[:, None]))
    if holes.size:
        token, column = holes[0].tolist()
        raise ValueError(
            f"{name}: token {token} has {slots[token, column]} in column {column}, before the end of its "
            f"{ends[token]} slots; legal: slots first, -1 behind them"
        )


def counts(name: str, capacity: int, array: np.ndarray) -> None:
    """Check counts of active slots: each is at least 0 and at most `capacity`, the number of columns for slots."""
    _check_counts(name + ": token {} has {} slots", array, capacity)


# ---- what several check


def _rows_only(page_size: int, page_span: int) -> str:
    """The end of the legal slots of pages that are strided wider than their rows; "" if they are not."""
    if page_size == page_span:
        return ""
    return f", of each {page_span} the first {page_size}, as page_size is {page_size} and page_span {page_span}"


def _check_counts(text: str, array: np.ndarray, most: int, legal: str = "") -> None:
    """Check that each count is 0 to `most`; `text` names the argument and has places for the token and its count."""
    for token, count in enumerate(array.tolist()):
        if not 0 <= count <= most:
            raise ValueError(f"{text.format(token, count)}; legal: 0 to {legal or most}")


def _check_pages(owner: str, table: np.ndarray, first: int, last: int, num_pages: int) -> None:
    """Check that entries [first, last) of the owner's row of the block table name pages that exist."""
    used = table[first:last]
    bad = np.flatnonzero((used < 0) | (used >= num_pages))
    if bad.size:
        entry = first + int(bad[0])
        raise ValueError(
            f"block_tables: {owner} names page {table[entry]} in entry {entry}, which it uses;"
            f" legal: 0 to {num_pages - 1}"
        )


def _check_offsets(name: str, offsets: np.ndarray, total: int, bound_name: str, bound: int) -> None:
    if offsets[0] != 0:
        raise ValueError(f"{name}: starts at {offsets[0]}; legal: 0")
    for request, length in enumerate(np.diff(offsets.astype(np.int64)).tolist()):  # in int32 a difference may wrap
        if length < 0:
            raise ValueError(f"{name}: request {request} has {length} tokens; legal: offsets that never decrease")
        if length > bound:
            raise ValueError(f"{name}: request {request} has {length} tokens; legal: at most {bound_name} = {bound}")
    if offsets[-1] > total:
        raise ValueError(f"{name}: ends at {offsets[-1]}; legal: at most the {total} packed tokens")
