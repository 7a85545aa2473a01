"""gather_kv_cache in portable XLA: each row's slot, then one gather of the rows asked for."""

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
    offsets = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)])
    request, position, owned = row_owner(offsets, spec.total_len)
    token = starts[request] + position
    owned &= (token >= 0) & (token < spec.max_pages * spec.page_size)
    token = jnp.where(owned, token, 0)
    page = block_tables[request, token // spec.page_size]
    page = jnp.where(owned, jnp.clip(page, 0, spec.num_pages - 1), 0)
    rows = kv_cache[page, token % spec.page_size]
    if kv_scale is not None:
        dtype = accumulation_dtype(spec.kv_dtype)
        rows = rows.astype(dtype) * as_scale(kv_scale, dtype)
    return jnp.where(owned[:, None], rows.astype(spec.out_dtype), 0)
