"""The definition of rope_write_kv_cache: the separate steps, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tsmla_jax.ops.quantize import to_cache_dtype
from tsmla_jax.ops.rotation import rotate
from tsmla_jax.ops.write_kv_cache import reference
from tsmla_kernels.contract.cache import RopeWriteSpec


def rope_write_kv_cache(
    kv_cache: jax.Array,
    q_nope: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
    slot_mapping: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    spec: RopeWriteSpec,
    q_scale: float | jax.Array | None,
    kv_scale: float | jax.Array | None,
    write: Callable[..., jax.Array] = reference.write_kv_cache,
) -> tuple[jax.Array, jax.Array]:
    """The query and the new cache, as the public rope_write_kv_cache documents them; `write` is the write_kv_cache to
    use."""
    turn = functools.partial(rotate, interleave=spec.rope_interleave, layout=spec.rope_layout)
    q = jnp.concatenate([q_nope, turn(q_rope, cos[:, None], sin[:, None])], axis=-1)
    q = to_cache_dtype(q, q_scale, spec.q_dtype)
    if spec.write.num_pages == 0:
        return q, kv_cache
    return q, write(kv_cache, latent, turn(k_rope, cos, sin), slot_mapping, spec=spec.write, kv_scale=kv_scale)
