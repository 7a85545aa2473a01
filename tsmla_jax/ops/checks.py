"""Checks of values, which no shape or dtype shows, under TSMLA_CHECK=1.

Where the arrays' values are known, a check raises ValueError at the call. Under jit and vmap it runs on the host while
the program runs, and its text arrives in jax's runtime error. That synchronises with the device, and jax.export can't
serialise it, hence the switch.
Without the checks the implementations still read and write only inside the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tsmla_kernels.contract import CacheGatherSpec, CacheWriteSpec, DecodeSpec, PrefillSpec, values
from tsmla_kernels.contract.products import ProductSpec

enabled = values.enabled


def decode(
    spec: DecodeSpec,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    cu_seqlens_q: jax.Array | None,
    visible_lens: jax.Array | None = None,
) -> jax.Array:
    """seq_lens, behind the check that lengths fit the table, used pages exist, cu_seqlens_q is sound and no token sees
    more keys than there are."""
    optional = {"cu_seqlens_q": cu_seqlens_q, "visible_lens": visible_lens}
    given = {name: array for name, array in optional.items() if array is not None}

    def check(seq_lens: np.ndarray, block_tables: np.ndarray, *others: np.ndarray) -> None:
        values.decode(spec, seq_lens, block_tables, **dict(zip(given, others, strict=True)))

    return behind(check, seq_lens, block_tables, *given.values())


def prefill(spec: PrefillSpec, cu_seqlens_q: jax.Array, cu_seqlens_kv: jax.Array) -> jax.Array:
    """cu_seqlens_q, behind the check of both arrays of offsets."""
    return behind(partial(values.prefill, spec), cu_seqlens_q, cu_seqlens_kv)


def prefill_selection(num_rows: int, selection_rows: jax.Array) -> jax.Array:
    """selection_rows, behind the check that each is -1 or a row of the selection."""
    return behind(partial(values.prefill_selection, num_rows), selection_rows)


def cache_write(spec: CacheWriteSpec, slot_mapping: jax.Array) -> jax.Array:
    """slot_mapping, behind the check that every slot is -1 or in the cache and none is written twice."""
    return behind(partial(values.cache_write, spec), slot_mapping)


def cache_gather(spec: CacheGatherSpec, lens: jax.Array, starts: jax.Array, block_tables: jax.Array) -> jax.Array:
    """lens, behind the check that each range lies in its request's table, used pages exist and the rows fit."""
    return behind(partial(values.cache_gather, spec), lens, starts, block_tables)


def grouped_product(spec: ProductSpec, cu_rows: jax.Array, rows: jax.Array | None) -> jax.Array:
    """cu_rows, behind the check that it ascends from 0 and does not end past the result's rows, and that each entry of
    `rows` in a group is a row of x."""
    return behind(partial(values.grouped_product, spec), cu_rows, *(() if rows is None else (rows,)))


def behind(check: Callable[..., None], first: jax.Array, *others: jax.Array) -> jax.Array:
    """`first`, after `check` has run on all the arrays if checks are on. `check` takes numpy arrays and may raise
    ValueError."""
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
