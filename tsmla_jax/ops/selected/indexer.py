"""The indexer before its logits: the pieces of its queries and weights, and reading its key cache, plain or packed.

Source: DeepSeek-V3.2-Exp's lightning indexer, with the cache layout of vLLM and SGLang (132 bytes a key).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_jax.ops.rotation import rotate
from tsmla_jax.ops.selected import numerics
from tsmla_jax.ops.selected.blocks import fetch
from tsmla_kernels.contract.layouts import IndexerCacheSpec
from tsmla_kernels.contract.packed import Rotation


def fold_weights(weights: jax.Array, head_dim: int) -> jax.Array:
    """Head weights times the constants of the indexer's logits, head_dim^-0.5 * heads^-0.5; float32."""
    constant = jnp.float32(head_dim**-0.5 * weights.shape[-1] ** -0.5)
    return weights.astype(jnp.float32) * constant


def rotate_columns(x: jax.Array, angles: tuple[jax.Array, ...], rotation: Rotation) -> jax.Array:
    """x [..., Di] in float32, with rope applied to the rotation's columns. angles: cos and sin, broadcastable to [...,
    R / 2].
    """
    cos, sin = angles
    end = rotation.offset + rotation.dim
    before, rope, behind = jnp.split(x.astype(jnp.float32), [rotation.offset, end], axis=-1)
    if rotation.layout == "interleaved":
        rope = numerics.rotate_pairs(rope, cos, sin)
    else:
        rope = rotate(rope, cos, sin, interleave=False, layout="halves")
    return jnp.concatenate([before, rope, behind], axis=-1)


def read_indexer_pages(
    k_cache: jax.Array, pages: jax.Array, spec: IndexerCacheSpec
) -> tuple[jax.Array, jax.Array | None]:
    """Keys [..., Z, Di] as stored, and their scales [..., Z] (None for a plain cache), of pages [...] in bounds."""
    raw = fetch(k_cache, pages, lambda cache, at: cache[at])
    if not spec.packed:
        return raw, None
    raw = jax.lax.collapse(raw, pages.ndim)
    scales_at = spec.page_size * spec.head_dim
    keys = numerics.from_bytes(raw[..., :scales_at], numerics.E4M3)
    scales = numerics.from_bytes(raw[..., scales_at:], jnp.float32)
    return keys.reshape(*pages.shape, spec.page_size, spec.head_dim), scales
