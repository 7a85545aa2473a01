"""Rotary position embedding: fp32 angles, and the two layouts a rotated vector can be stored in."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from tsmla_jax.nn.mla.config import MLAConfig
from tsmla_jax.nn.yarn import YarnConfig
from tsmla_jax.ops.rotation import rotate


def _yarn_boundary(rotations: float, dim: int, theta: float, original_len: int) -> float:
    """The (fractional) pair index whose angle turns `rotations` times over the original context."""
    return dim * math.log(original_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def inverse_frequencies(rope_dim: int, theta: float, yarn: YarnConfig | None) -> np.ndarray:
    """Angle per position of each of rope_dim / 2 rope pairs: f32 [R / 2], highest frequency first.

    With yarn, pairs below the low boundary keep theta^(-2i/R), those above the high one are divided by `factor`, and a
    linear ramp blends the two in between.
    """
    base = 1.0 / theta ** (np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim)
    if yarn is None:
        return base.astype(np.float32)
    args = (rope_dim, theta, yarn.original_max_position_embeddings)
    low = max(math.floor(_yarn_boundary(yarn.beta_fast, *args)), 0)
    high = min(math.ceil(_yarn_boundary(yarn.beta_slow, *args)), rope_dim - 1)
    # Equal boundaries make the ramp a step; the small width only avoids 0 / 0.
    width = high - low if high != low else 1e-3
    ramp = np.clip((np.arange(rope_dim // 2) - low) / width, 0.0, 1.0)
    return (base * (1.0 - ramp) + base / yarn.factor * ramp).astype(np.float32)


def rope_cos_sin(config: MLAConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every pair's angle, f32 [..., R / 2], for integer positions [...].

    Angles are products in fp32 for a model of any dtype: bf16 can't tell position 4096 from 4097.
    """
    frequencies = inverse_frequencies(config.qk_rope_head_dim, config.rope_theta, config.yarn)
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies)
    magnitude = jnp.float32(config.rope_magnitude)
    return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude


def apply_rope(config: MLAConfig, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates rope vectors.

    Args:
        x: [..., R], in the order of the checkpoint's columns (`config.rope_interleave`).
        cos, sin: f32, broadcastable to [..., R / 2].

    Returns:
        [..., R] in x's dtype, stored as `config.rope_layout` says.
    """
    return rotate(x, cos, sin, interleave=config.rope_interleave, layout=config.rope_layout)
