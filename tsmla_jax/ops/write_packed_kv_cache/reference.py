"""The definition of write_packed_kv_cache: rotate, pack, put the rows into their slots."""

from __future__ import annotations

import jax

from tsmla_jax.ops.rotation import rotate
from tsmla_jax.ops.selected.blocks import put_rows
from tsmla_jax.ops.selected.layouts import kept_slots, pack_v32_rows
from tsmla_kernels.contract.packed import PackedWriteSpec


def write_packed_kv_cache(
    kv_cache: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
    slot_mapping: jax.Array,
    *angles: jax.Array,
    spec: PackedWriteSpec,
) -> jax.Array:
    """The new cache, as the public write_packed_kv_cache documents it."""
    if spec.rotates:
        cos, sin = angles
        k_rope = rotate(k_rope, cos, sin, interleave=spec.rope_interleave, layout=spec.rope_layout)
    return put_rows(kv_cache, pack_v32_rows(latent, k_rope), kept_slots(slot_mapping, spec.cache))
