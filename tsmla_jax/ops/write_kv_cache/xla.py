"""write_kv_cache in portable XLA, in place when the cache is donated.

Rows are scattered, except on CPUs. There XLA converts a whole 16-bit or fp8 cache to float32 and back around a scatter,
but not around a loop of slice updates.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.loops import carry
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
    arguments = _rows_and_places(latent, k_rope, slot_mapping, spec, kv_scale)
    kv_cache = carry(kv_cache, arguments[0], slot_mapping)
    return _place(kv_cache, *arguments)


def by_scatter(
    kv_cache: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
    slot_mapping: jax.Array,
    *,
    spec: CacheWriteSpec,
    kv_scale: float | jax.Array | None,
) -> jax.Array:
    """write_kv_cache by a scatter on every platform, which can be differentiated in reverse mode."""
    return _scatter(kv_cache, *_rows_and_places(latent, k_rope, slot_mapping, spec, kv_scale))


def _rows_and_places(
    latent: jax.Array,
    k_rope: jax.Array,
    slot_mapping: jax.Array,
    spec: CacheWriteSpec,
    kv_scale: float | jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The rows in the cache's dtype, their pages and offsets, and whether each has a legal slot."""
    rows = to_cache_dtype(jnp.concatenate([latent, k_rope], axis=-1), kv_scale, spec.kv_dtype)
    page, offset = slot_mapping // spec.page_size, slot_mapping % spec.page_size
    return rows, page, offset, (slot_mapping >= 0) & (page < spec.num_pages)


def _scatter(kv_cache: jax.Array, rows: jax.Array, page: jax.Array, offset: jax.Array, legal: jax.Array) -> jax.Array:
    # Skipped rows go past the end, where mode="drop" drops them.
    return kv_cache.at[jnp.where(legal, page, kv_cache.shape[0]), offset].set(rows, mode="drop")


@jax.custom_jvp
def _place(kv_cache: jax.Array, rows: jax.Array, page: jax.Array, offset: jax.Array, legal: jax.Array) -> jax.Array:
    """The cache with the rows written that have a legal slot, in place. The derivative is that of a scatter: the loop
    has none in reverse mode.
    """
    return lax.platform_dependent(kv_cache, rows, page, offset, legal, cpu=_slice_by_slice, default=_scatter)


@_place.defjvp
def _place_jvp(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    return _place(*primals), jax.jvp(_scatter, primals, tangents)[1]


def _slice_by_slice(
    kv_cache: jax.Array, rows: jax.Array, page: jax.Array, offset: jax.Array, legal: jax.Array
) -> jax.Array:
    # The tokens to write come first, and the loop ends after them: to skip a token inside the loop would read the
    # cache.
    order = jnp.argsort(~legal, stable=True)

    def write(i: jax.Array, cache: jax.Array) -> jax.Array:
        token = order[i]
        where = (page[token], offset[token], jnp.zeros((), page.dtype))  # of one dtype, under jax_enable_x64 too
        return lax.dynamic_update_slice(cache, rows[token][None, None], where)

    return lax.fori_loop(0, legal.sum(dtype=jnp.int32), write, kv_cache)
