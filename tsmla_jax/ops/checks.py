"""What only the data can show, checked under TSMLA_CHECK=1.

Outside of jit the check raises ValueError at the call. Under jit it runs on the host while the program runs, and
surfaces as jax's runtime error carrying the same text; that is a synchronisation, and jax.export can't serialise it,
hence the switch. Without it the implementations still read and write only inside the cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tsmla_kernels.contract import CacheGatherSpec, CacheWriteSpec, DecodeSpec, PrefillSpec


def enabled() -> bool:
    """Whether TSMLA_CHECK asks for checks; read at every call (under jit: at every trace)."""
    return os.environ.get("TSMLA_CHECK", "0") not in ("", "0")


def decode(spec: DecodeSpec, seq_lens: jax.Array, block_tables: jax.Array, cu_seqlens_q: jax.Array | None) -> jax.Array:
    """seq_lens, behind the check that lengths fit the table, used pages exist and cu_seqlens_q is sound."""
    if cu_seqlens_q is None:
        return behind(partial(_check_decode, spec), seq_lens, block_tables)
    return behind(partial(_check_decode, spec), seq_lens, block_tables, cu_seqlens_q)


def prefill(spec: PrefillSpec, cu_seqlens_q: jax.Array, cu_seqlens_kv: jax.Array) -> jax.Array:
    """cu_seqlens_q, behind the check of both arrays of offsets."""
    return behind(partial(_check_prefill, spec), cu_seqlens_q, cu_seqlens_kv)


def cache_write(spec: CacheWriteSpec, slot_mapping: jax.Array) -> jax.Array:
    """slot_mapping, behind the check that every slot is -1 or in the cache and none is written twice."""
    return behind(partial(_check_cache_write, spec), slot_mapping)


def cache_gather(spec: CacheGatherSpec, lens: jax.Array, starts: jax.Array, block_tables: jax.Array) -> jax.Array:
    """lens, behind the check that each range lies in its request's table, used pages exist and the rows fit."""
    return behind(partial(_check_cache_gather, spec), lens, starts, block_tables)


def behind(check: Callable[..., None], first: jax.Array, *others: jax.Array) -> jax.Array:
    """`first`, unless `check` (of numpy arrays) objects."""
    if not enabled():
        return first
    if not any(isinstance(x, jax.core.Tracer) for x in (first, *others)):
        check(*map(np.asarray, (first, *others)))
        return first

    def on_host(*arrays: np.ndarray) -> np.ndarray:
        check(*map(np.asarray, arrays))
        return np.zeros((), np.int32)

    # The result depends on the callback's, so that the computation waits for the verdict.
    verdict = jax.pure_callback(on_host, jax.ShapeDtypeStruct((), jnp.int32), first, *others, vmap_method="sequential")
    return first + verdict


def _check_decode(
    spec: DecodeSpec, seq_lens: np.ndarray, block_tables: np.ndarray, cu_seqlens_q: np.ndarray | None = None
) -> None:
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


def _check_prefill(spec: PrefillSpec, cu_seqlens_q: np.ndarray, cu_seqlens_kv: np.ndarray) -> None:
    _check_offsets("cu_seqlens_q", cu_seqlens_q, spec.total_q_len, "max_q_len", spec.max_q_len)
    _check_offsets("cu_seqlens_kv", cu_seqlens_kv, spec.total_kv_len, "max_kv_len", spec.max_kv_len)


def _check_cache_write(spec: CacheWriteSpec, slot_mapping: np.ndarray) -> None:
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


def _check_cache_gather(spec: CacheGatherSpec, lens: np.ndarray, starts: np.ndarray, block_tables: np.ndarray) -> None:
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
