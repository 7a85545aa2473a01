"""The definition of gather_kv_cache: lay every request's whole cache out, then pick its range."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_jax.ops.inputs import accumulation_dtype, as_scale
from tsmla_jax.ops.ragged import row_owner
from tsmla_kernels.contract import CacheGatherSpec


def gather_kv_cache(
    kv_cache: jax.Array,
    block_tables: jax.Array,
    starts: jax.Array,
    lens: jax.Array,
    *,
    spec: CacheGatherSpec,
    kv_scale: float | jax.Array | None,
) -> jax.Array:
    """The packed rows, as the public gather_kv_cache documents them."""
    dtype = accumulation_dtype(spec.kv_dtype)
    num_keys = spec.max_pages * spec.page_size
    everything = kv_cache[jnp.clip(block_tables, 0, spec.num_pages - 1)].reshape(spec.batch, num_keys, spec.head_dim)
    offsets = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)])
    request, position, owned = row_owner(offsets, spec.total_len)
    token = starts[request] + position
    owned &= (token >= 0) & (token < num_keys)
    rows = everything[request, jnp.clip(token, 0, num_keys - 1)].astype(dtype) * as_scale(kv_scale, dtype)
    return jnp.where(owned[:, None], rows, 0).astype(spec.out_dtype)
