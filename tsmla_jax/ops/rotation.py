"""Rotating rope vectors by given angles, in the two layouts in which engines store them."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleave: bool, layout: str) -> jax.Array:
    """The rotated vectors, in x's dtype; computed in float32 at least.

    Args:
      x: [..., R]; pair i is columns 2i and 2i + 1 if `interleave` is set, else i and i + R / 2.
      cos, sin: float32, broadcastable to [..., R / 2].
      layout: the order of the result's columns: "interleaved" (pairs 2i, 2i + 1) or "halves" (i, i + R / 2).
    """
    half = x.shape[-1] // 2
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    pairs = (wide[..., 0::2], wide[..., 1::2]) if interleave else (wide[..., :half], wide[..., half:])
    first, second = pairs
    rotated = (first * cos - second * sin, second * cos + first * sin)
    if layout == "interleaved":
        return jnp.stack(rotated, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
