"""Packed ("ragged") tokens: which request a row belongs to, and going between [T, ...] and [B, S, ...]."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from tsmla_jax.ops.library import LIBRARY
from tsmla_kernels import arrays
from tsmla_kernels.arrays import RowOwner


@functools.partial(jax.jit, static_argnames="num_rows", inline=True)  # a call outside of jit compiles one program
def row_owner(cu_seqlens: jax.Array, num_rows: int) -> RowOwner:
    """For each of num_rows packed rows: its request, its position in that request, and whether any request owns it.

    cu_seqlens is [B + 1]. Rows before cu_seqlens[0] or from cu_seqlens[B] on belong to no request; their request and
    position are in bounds and meaningless."""
    return arrays.row_owner(LIBRARY, cu_seqlens, num_rows)


def to_padded(packed: jax.Array, cu_seqlens: jax.Array, max_len: int) -> jax.Array:
    """[T, ...] -> [B, max_len, ...]. After a request's end come the rows that follow it, and after the last row that
    row again: any values, but never rows out of bounds."""
    index = cu_seqlens[:-1, None] + jnp.arange(max_len, dtype=jnp.int32)
    return packed[jnp.clip(index, 0, packed.shape[0] - 1)]


def to_packed(padded: jax.Array, cu_seqlens: jax.Array, num_rows: int, fill: float) -> jax.Array:
    """[B, S, ...] -> [num_rows, ...]; rows that belong to no request, and rows past a request's S-th token, are
    `fill`.
    """
    request, position, owned = row_owner(cu_seqlens, num_rows)
    owned &= position < padded.shape[1]
    packed = padded[request, jnp.minimum(position, padded.shape[1] - 1)]
    return jnp.where(owned.reshape(-1, *[1] * (packed.ndim - 1)), packed, jnp.asarray(fill, packed.dtype))


def seen_keys(seq_lens: jax.Array, cu_seqlens: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """For each of num_rows packed query tokens: its request, and how many keys it sees: token i of S sees the first
    seq_len - (S - 1) + i. A row that belongs to no request sees none."""
    request, position, owned = row_owner(cu_seqlens, num_rows)
    lens = seq_lens[request] - (cu_seqlens[request + 1] - cu_seqlens[request]) + 1 + position
    return request, jnp.where(owned, jnp.maximum(lens, 0), 0)
