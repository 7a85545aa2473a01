"""write_kv_cache in portable XLA: one scatter of rows, in place when the cache is donated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from tsmla_kernels.contract import CacheWriteSpec

from tsmla_jax.ops.quantize import to_cache_dtype


def write_kv_cache(
    kv_cache: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
    slot_mapping: jax.Array,
    *,
    spec: CacheWriteSpec,
    kv_scale: float | jax.Array | None,
) -> jax.Array:
    """The new cache, as the public write_kv_cache documents it."""
    rows = to_cache_dtype(jnp.concatenate([latent, k_rope], axis=-1), kv_scale, spec.kv_dtype)
    # A negative index would count from the end: what must not be written goes past the end, where "drop" drops it.
    page = jnp.where(slot_mapping < 0, spec.num_pages, slot_mapping // spec.page_size)
    return kv_cache.at[page, slot_mapping % spec.page_size].set(rows, mode="drop")
