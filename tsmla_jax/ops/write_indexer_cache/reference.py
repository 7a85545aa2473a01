"""The definition of write_indexer_cache: rotate, quantise, scatter keys and scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_jax.ops.quantize import to_cache_dtype
from tsmla_jax.ops.selected import numerics
from tsmla_jax.ops.selected.blocks import put_rows
from tsmla_jax.ops.selected.indexer import rotate_columns
from tsmla_jax.ops.selected.layouts import kept_slots
from tsmla_kernels.contract.layouts import INDEXER
from tsmla_kernels.contract.packed import IndexerWriteSpec


def write_indexer_cache(
    k_cache: jax.Array, k: jax.Array, slot_mapping: jax.Array, *angles: jax.Array, spec: IndexerWriteSpec
) -> jax.Array:
    """The new cache, as the public write_indexer_cache documents it."""
    cache = spec.cache
    slots = kept_slots(slot_mapping, cache.as_plain())
    if spec.rotation is not None:
        k = rotate_columns(k, angles, spec.rotation)
    if not cache.packed:
        return put_rows(k_cache, to_cache_dtype(k, None, k_cache.dtype.name), slots)
    values, scales, _ = numerics.quantize_pow2(k, INDEXER.key_floor)
    page, offset = slots // cache.page_size, slots % cache.page_size
    pages: jax.Array = k_cache.reshape(cache.num_pages, -1)
    pages = numerics.scatter_bytes(pages, page, offset * cache.head_dim, numerics.to_bytes(values))
    scales_at = cache.page_size * cache.head_dim + offset * INDEXER.scale_bytes
    pages = numerics.scatter_bytes(pages, page, scales_at, numerics.to_bytes(jnp.expand_dims(scales, 1)))
    return pages.reshape(k_cache.shape)
