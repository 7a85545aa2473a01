"""The definition of write_kv_cache: quantise the rows, then set them one by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_jax.ops.quantize import to_cache_dtype
from tsmla_kernels.contract import CacheWriteSpec


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

    def write(cache: jax.Array, token: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        slot, row = token
        page, offset = slot // spec.page_size, slot % spec.page_size
        legal = (slot >= 0) & (page < spec.num_pages)
        page = jnp.clip(page, 0, spec.num_pages - 1)
        return cache.at[page, offset].set(jnp.where(legal, row, cache[page, offset])), None

    return jax.lax.scan(write, kv_cache, (slot_mapping, rows))[0]
