"""The V3.2 indexer before its logits: quantising queries and keys, and the 132-byte key cache.

Source: DeepSeek-V3.2-Exp's lightning indexer, with the cache layout of vLLM and SGLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from tsmla_jax.ops.inputs import describe, describe_as
from tsmla_jax.sparse import numerics
from tsmla_jax.sparse.blocks import fetch, put_rows
from tsmla_jax.sparse.layouts import masked_slots
from tsmla_kernels.contract import FLOATS, rules
from tsmla_kernels.contract.layouts import INDEXER, IndexerCacheSpec, indexer_cache_spec

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, UInt8


def indexer_quantize(
    q: Float[Array, "T Hi Di"], weights: Float[Array, "T Hi"]
) -> tuple[Float[Array, "T Hi Di"], Float[Array, "T Hi"]]:
    """Quantise indexer queries to e4m3 and fold their scales, and the logits' constants, into the head weights.

    Args:
      q: [T, Hi, Di] (64 heads of 128), rope applied.
      weights: [T, Hi], the head weights as projected.

    Returns:
      q8 [T, Hi, Di] float8_e4m3fn with the power-of-two scale s = 2^ceil(log2(max(amax, 1e-10) / 448)) a row, and
      w' [T, Hi] float32 = weights * s * Di^-0.5 * Hi^-0.5.

    Raises:
      ValueError: shapes or dtypes that are not legal.
    """
    num_tokens, num_heads, head_dim = describe_as("q", q, "T Hi Di", FLOATS).shape
    describe_as("weights", weights, "T Hi", FLOATS, (num_tokens, "T, q's tokens"), (num_heads, "Hi, q's heads"))
    values, scales, _ = numerics.quantize_pow2(jnp.asarray(q), INDEXER.query_floor)
    return values, fold_weights(jnp.asarray(weights), head_dim) * scales


def fold_weights(weights: jax.Array, head_dim: int) -> jax.Array:
    """Head weights times head_dim^-0.5 * heads^-0.5, the constants of the indexer's logits; float32."""
    constant = jnp.float32(head_dim**-0.5 * weights.shape[-1] ** -0.5)
    return weights.astype(jnp.float32) * constant


def write_indexer_cache(
    k_cache: UInt8[Array, "P Z Di+4"], k: Float[Array, "T Di"], slot_mapping: Int32[Array, " T"]
) -> UInt8[Array, "P Z Di+4"]:
    """Write indexer keys into their cache; slot = page * Z + offset, -1 is skipped; in place under donation.

    Args:
      k_cache: uint8 [P, Z, Di + 4]; a page's bytes are Z keys of Di e4m3 and then Z scales of f32, 132 bytes a token
        when Di is 128. Or plain floats [P, Z, Di], which hold the keys as they are.
      k: [T, Di], normed and rope applied; quantised with scale 2^ceil(log2(max(amax, 1e-4) / 448)).
      slot_mapping: [T] int32.

    Raises:
      ValueError: shapes or dtypes that are not legal. Under TSMLA_CHECK=1 also a slot outside the cache or given twice.
    """
    spec = indexer_cache_spec(describe("k_cache", k_cache))
    described = describe_as("k", k, "T Di", FLOATS)
    rules.check_size("k", described, 1, spec.head_dim, "Di, k_cache's key width")
    slots = masked_slots(slot_mapping, described, spec.as_plain())
    k_cache, k = jnp.asarray(k_cache), jnp.asarray(k)
    if not spec.packed:
        return put_rows(k_cache, k.astype(k_cache.dtype), slots)
    values, scales, _ = numerics.quantize_pow2(k, INDEXER.key_floor)
    page, offset = slots // spec.page_size, slots % spec.page_size
    pages = k_cache.reshape(spec.num_pages, -1)
    pages = numerics.scatter_bytes(pages, page, offset * spec.head_dim, numerics.to_bytes(values))
    scales_at = spec.page_size * spec.head_dim
    pages = numerics.scatter_bytes(
        pages, page, scales_at + offset * INDEXER.scale_bytes, numerics.to_bytes(scales[:, None])
    )
    return pages.reshape(k_cache.shape)


def read_indexer_pages(
    k_cache: jax.Array, pages: jax.Array, spec: IndexerCacheSpec
) -> tuple[jax.Array, jax.Array | None]:
    """Keys [..., Z, Di] as stored, and their scales [..., Z] (None for a plain cache), of pages [...] in bounds."""
    raw = fetch(k_cache, pages, lambda cache, at: cache[at])
    if not spec.packed:
        return raw, None
    raw = raw.reshape(*pages.shape, -1)
    scales_at = spec.page_size * spec.head_dim
    keys = numerics.from_bytes(raw[..., :scales_at], numerics.E4M3)
    scales = numerics.from_bytes(raw[..., scales_at:], jnp.float32)
    return keys.reshape(*pages.shape, spec.page_size, spec.head_dim), scales
