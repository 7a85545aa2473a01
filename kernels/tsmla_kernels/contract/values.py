"""What only the data can show: the checks that TSMLA_CHECK=1 asks for, on the values themselves, as numpy arrays.

Reading them costs a synchronisation, hence the switch. Without it the implementations still read and write only inside
the cache. Both front ends call these, so that a wrong value reads the same from jax and from torch.
"""

from __future__ import annotations

import os

import numpy as np

from tsmla_kernels.contract import CacheGatherSpec, CacheWriteSpec, DecodeSpec, PrefillSpec


def enabled() -> bool:
    """Whether TSMLA_CHECK asks for checks; read at every call (under jit: at every trace)."""
    return os.environ.get("TSMLA_CHECK", "0") not in ("", "0")


def decode(
    spec: DecodeSpec, seq_lens: np.ndarray, block_tables: np.ndarray, cu_seqlens_q: np.ndarray | None = None
) -> None:
    """ValueError unless lengths fit the table, used pages exist and cu_seqlens_q is sound."""
    capacity = block_tables.shape[1] * spec.page_size
    for request, length in enumerate(seq_lens.tolist()):
        if not 0 <= length <= capacity:
            raise ValueError(
                f"seq_lens: request {request} has {length} keys; legal: 0 to {capacity}, what its"
                f" {block_tables.shape[1]} pages of {spec.page_size} hold"
            )
        _check_pages(request, block_tables[request], 0, -(-length // spec.page_size), spec.num_pages)
    if cu_seqlens_q is not None:
        _check_offsets("cu_seqlens_q", cu_seqlens_q, spec.total_q_len, "max_q_len", spec.max_q_len)


def prefill(spec: PrefillSpec, cu_seqlens_q: np.ndarray, cu_seqlens_kv: np.ndarray) -> None:
    """ValueError unless both arrays of offsets are sound."""
    _check_offsets("cu_seqlens_q", cu_seqlens_q, spec.total_q_len, "max_q_len", spec.max_q_len)
    _check_offsets("cu_seqlens_kv", cu_seqlens_kv, spec.total_kv_len, "max_kv_len", spec.max_kv_len)


def cache_write(spec: CacheWriteSpec, slot_mapping: np.ndarray) -> None:
    """ValueError unless every slot is -1 or in the cache, and none is written twice."""
    slots = spec.num_pages * spec.page_size
    writer: dict[int, int] = {}
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot == -1:
            continue
        if not 0 <= slot < slots:
            raise ValueError(f"slot_mapping: token {token} goes to slot {slot}; legal: -1, or 0 to {slots - 1}")
        if slot in writer:
            raise ValueError(f"slot_mapping: tokens {writer[slot]} and {token} both go to slot {slot}")
        writer[slot] = token


def cache_gather(spec: CacheGatherSpec, lens: np.ndarray, starts: np.ndarray, block_tables: np.ndarray) -> None:
    """ValueError unless each range lies in its request's table, used pages exist and the rows fit."""
    capacity = block_tables.shape[1] * spec.page_size
    for request, (start, length) in enumerate(zip(starts.tolist(), lens.tolist(), strict=True)):
        if start < 0 or length < 0 or start + length > capacity:
            raise ValueError(
                f"starts, lens: request {request} asks for {length} tokens from {start} on; legal: inside the"
                f" {capacity} that its {block_tables.shape[1]} pages of {spec.page_size} hold"
            )
        if length:
            first, last = start // spec.page_size, -(-(start + length) // spec.page_size)
            _check_pages(request, block_tables[request], first, last, spec.num_pages)
    total = int(lens.sum(dtype=np.int64))
    if total > spec.total_len:
        raise ValueError(f"lens: {total} tokens in all; legal: at most total_len = {spec.total_len}")


def _check_pages(request: int, table: np.ndarray, first: int, last: int, num_pages: int) -> None:
    used = table[first:last]
    bad = np.flatnonzero((used < 0) | (used >= num_pages))
    if bad.size:
        entry = first + int(bad[0])
        raise ValueError(
            f"block_tables: request {request} names page {table[entry]} in entry {entry}, which it uses;"
            f" legal: 0 to {num_pages - 1}"
        )


def _check_offsets(name: str, offsets: np.ndarray, total: int, bound_name: str, bound: int) -> None:
    if offsets[0] != 0:
        raise ValueError(f"{name}: starts at {offsets[0]}; legal: 0")
    for request, length in enumerate(np.diff(offsets).tolist()):
        if length < 0:
            raise ValueError(f"{name}: request {request} has {length} tokens; legal: offsets that never decrease")
        if length > bound:
            raise ValueError(f"{name}: request {request} has {length} tokens; legal: at most {bound_name} = {bound}")
    if offsets[-1] > total:
        raise ValueError(f"{name}: ends at {offsets[-1]}; legal: at most the {total} packed tokens")
