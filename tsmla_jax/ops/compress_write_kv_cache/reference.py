"""The definition of compress_write_kv_cache: the separate steps, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tsmla_jax.ops.compress_kv import reference
from tsmla_jax.ops.selected.layouts import write_v4_cache
from tsmla_jax.ops.selected.v4 import norm_rope
from tsmla_jax.ops.write_indexer_cache.api import write_indexer_cache
from tsmla_kernels.contract.compress import CompressWriteSpec

Rings = tuple[jax.Array, jax.Array]


def compress_write_kv_cache(
    cache: jax.Array,
    state: Rings,
    seq_lens: jax.Array,
    kv_score: jax.Array,
    ape: jax.Array,
    norm_weight: jax.Array,
    cos_sin: jax.Array,
    block_tables: jax.Array,
    state_slots: jax.Array,
    cu_seqlens_q: jax.Array,
    *,
    spec: CompressWriteSpec,
    kv_scale: float | jax.Array | None,
    compress: Callable[..., Any] = reference.compress_kv,
) -> tuple[jax.Array, Rings]:
    """The cache and the state, as the public compress_write_kv_cache documents them; `compress` is the compress_kv to
    use."""
    entries, state = compress(kv_score, ape, state, state_slots, seq_lens, cu_seqlens_q, spec=spec.compress)
    kv, requests, positions = entries
    first = jnp.minimum(positions * spec.compress.ratio, cos_sin.shape[0] - 1)
    rows = norm_rope(kv, norm_weight, first, cos_sin, eps=spec.eps)
    slots = _slots(spec, requests, positions, block_tables)
    if spec.cache == "indexer":
        return write_indexer_cache(cache, rows, slots, implementation="reference"), state
    page_size = spec.page_size if spec.cache == "v4" else None
    return write_v4_cache(cache, rows, slots, kv_scale=kv_scale, page_size=page_size), state


def _slots(spec: CompressWriteSpec, requests: jax.Array, positions: jax.Array, block_tables: jax.Array) -> jax.Array:
    """The slot of each entry; -1 for padding and for entries of pages that don't exist."""
    if not block_tables.shape[1]:
        return jnp.full(positions.shape, -1, jnp.int32)
    entry = jnp.maximum(positions, 0) // spec.page_size
    inside = (positions >= 0) & (entry < block_tables.shape[1])
    page = block_tables[jnp.maximum(requests, 0), jnp.where(inside, entry, 0)]
    inside &= (page >= 0) & (page < spec.num_pages)
    return jnp.where(inside, page * spec.page_size + positions % spec.page_size, -1)
