"""rope_write_kv_cache in portable XLA: the separate steps, fused as far as XLA does it, in place when the cache is
donated."""

from __future__ import annotations

import jax

from tsmla_jax.ops.rope_write_kv_cache.reference import Scale, query_and_key
from tsmla_jax.ops.write_kv_cache import xla as write
from tsmla_kernels.rope_contract import RopeWriteSpec


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


def by_scatter(
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
    """rope_write_kv_cache by a scatter on every platform: this one can be differentiated in reverse mode."""
    q, k_rope = query_and_key(q_nope, q_rope, k_rope, cos, sin, spec=spec, q_scale=q_scale)
    return q, write.by_scatter(kv_cache, latent, k_rope, slot_mapping, spec=spec.write, kv_scale=kv_scale)
