"""The definition of rope_write_kv_cache: the separate steps, one after the other."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from tsmla_jax.ops.quantize import to_cache_dtype
from tsmla_jax.ops.rotation import rotate
from tsmla_jax.ops.write_kv_cache import reference as write
from tsmla_kernels.rope_contract import RopeWriteSpec

Scale = float | jax.Array | None


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
    q_scale: Scale,
    kv_scale: Scale,
) -> tuple[jax.Array, jax.Array]:
    """The query and the new cache, as the public rope_write_kv_cache documents them."""
    q, k_rope = query_and_key(q_nope, q_rope, k_rope, cos, sin, spec=spec, q_scale=q_scale)
    if spec.write.num_pages == 0:
        return q, kv_cache
    return q, write.write_kv_cache(kv_cache, latent, k_rope, slot_mapping, spec=spec.write, kv_scale=kv_scale)


def query_and_key(
    q_nope: jax.Array,
    q_rope: jax.Array,
    k_rope: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    spec: RopeWriteSpec,
    q_scale: Scale,
) -> tuple[jax.Array, jax.Array]:
    """q [T, H, D] in its dtype, and the rotated k_rope [T, R]."""
    turn = functools.partial(rotate, interleave=spec.rope_interleave, layout=spec.rope_layout)
    q = jnp.concatenate([q_nope, turn(q_rope, cos[:, None], sin[:, None])], axis=-1)
    return to_cache_dtype(q, q_scale, spec.q_dtype), turn(k_rope, cos, sin)
