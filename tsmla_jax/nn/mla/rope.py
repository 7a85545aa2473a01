"""MLA's rotary position embedding: fp32 angles, and the two layouts a rotated vector can be stored in."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_jax.nn.mla.config import MLAConfig
from tsmla_jax.nn.yarn import inverse_frequencies
from tsmla_jax.ops.rotation import rotate


def rope_cos_sin(config: MLAConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every pair's angle times `config.rope_magnitude`, f32 [..., R / 2], for integer positions [...]; 1
    and 0 if the config rotates nothing.

    Angles are products in fp32 for a model of any dtype: bf16 can't tell position 4096 from 4097.
    """
    if not config.rotates:
        shape = (*positions.shape, config.qk_rope_head_dim // 2)
        return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
    frequencies = inverse_frequencies(config.qk_rope_head_dim, config.rope_theta, config.yarn)
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies)
    magnitude = jnp.float32(config.rope_magnitude)
    return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude


def query_scale(config: MLAConfig, positions: jax.Array) -> jax.Array | None:
    """The factor of queries at integer positions [...], f32 [...]; None if the config has none."""
    scale = config.query_scale
    if scale is None:
        return None
    return 1.0 + scale.beta * jnp.log1p((positions // scale.period).astype(jnp.float32))


def apply_rope(config: MLAConfig, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates rope vectors.

    Args:
        config: the layer's shape, which has the two orders of columns.
        x: [..., R], in the order of the checkpoint's columns (`config.rope_interleave`).
        cos, sin: f32, broadcastable to [..., R / 2].

    Returns:
        [..., R] in x's dtype, stored as `config.rope_layout` says.
    """
    return rotate(x, cos, sin, interleave=config.rope_interleave, layout=config.rope_layout)
