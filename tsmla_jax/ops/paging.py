"""Helpers of a paged cache: how to make one, and the slots that positions have in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from tsmla_jax.ops.inputs import describe, result_dtype_name
from tsmla_kernels.contract import paging

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Int32


def init_cache(
    num_pages: int, *, page_size: int = 64, head_dim: int = 576, dtype: Any = jnp.bfloat16
) -> Float[Array, "P Z D"]:
    """A paged latent cache of zeros, [num_pages, page_size, head_dim].

    Args:
      num_pages: P, the pages that all requests share.
      page_size: Z, tokens a page.
      head_dim: D, the latent's width and rope's: 512 + 64 in DeepSeek-V2, V3 and Kimi-K2.
      dtype: float16, bfloat16, float8_e4m3fn, float32 or float64.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
    """
    return jnp.zeros(
        paging.check_new_cache(num_pages, page_size, head_dim, str(result_dtype_name("dtype", dtype))), dtype
    )


def slots(
    block_tables: Int32[Array, "B M"],
    positions: Int32[Array, "*tokens"],
    page_size: int,
    *,
    requests: Int32[Array, " T"] | None = None,
) -> Int32[Array, "*tokens"]:
    """Cache slots of token positions, as `write_kv_cache` takes them: table[position // Z] * Z + position % Z.

    Args:
      block_tables: [B, M] int32 or int64, the pages of each request in order.
      positions: [B] or [B, S] int32 or int64, positions of each request's tokens, from 0; or [T] with `requests`.
      page_size: Z, static.
      requests: [T] int32 or int64, the request of each token; -1 for padding. None: row b of `positions` is request
        b's.

    Returns:
      int32 like positions; -1, which writers skip, if there is no such request, a position is negative or past the
      request's table, or its page is negative or too large for slots of int32.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
    """
    arrays = {"block_tables": block_tables, "positions": positions}
    asked = None if requests is None else describe("requests", requests)
    described = [describe(name, array) for name, array in arrays.items()]
    size = paging.check_slots(described[0], described[1], asked, page_size)
    tables, at = _int32(block_tables), _int32(positions)
    num_requests, max_pages = tables.shape
    if 0 in (num_requests, max_pages):
        return jnp.full(at.shape, -1, jnp.int32)
    rows = jnp.arange(num_requests).reshape(-1, *[1] * (at.ndim - 1)) if requests is None else _int32(requests)
    page = tables[jnp.clip(rows, 0, num_requests - 1), jnp.clip(at // size, 0, max_pages - 1)]
    inside = (rows >= 0) & (rows < num_requests) & (at >= 0) & (at // size < max_pages) & paging.has_slots(page, size)
    return jnp.where(inside, page * size + at % size, -1)


def _int32(integers: Any) -> jax.Array:
    """Integers as int32. Those of 64 bits are clipped, not cut: 2^32 + 5 must not become 5."""
    if integers.dtype.itemsize > jnp.int32.dtype.itemsize:
        library, limits = jnp if isinstance(integers, jax.Array) else np, jnp.iinfo(jnp.int32)
        integers = library.clip(integers, limits.min, limits.max)
    return jnp.asarray(integers, jnp.int32)
