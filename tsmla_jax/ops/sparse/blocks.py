"""Loops over blocks of query tokens, so that an op's workspace doesn't grow with the number of tokens."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.loops import carry


def over_token_blocks(
    body: Callable[..., tuple[jax.Array, ...]],
    operands: tuple[jax.Array, ...],
    outs: tuple[jax.ShapeDtypeStruct, ...],
    *,
    block: int,
    varying_with: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, ...]:
    """The results of `body` on blocks of `block` rows of every operand, put together again.

    outs are the shapes of the whole results, rows first. The last block is moved back to end at the last row and
    recomputes what it shares with the one before: nothing is padded or copied. varying_with are further arrays that the
    body reads, for shard_map's types.
    """
    num_rows = outs[0].shape[0]
    block = min(block, num_rows)
    if block == num_rows:
        return body(*operands)

    def step(i: jax.Array, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = jnp.minimum(i * block, num_rows - block)
        parts = body(*(lax.dynamic_slice_in_dim(x, start, block, axis=0) for x in operands))
        return tuple(
            lax.dynamic_update_slice_in_dim(x, part, start, axis=0) for x, part in zip(results, parts, strict=True)
        )

    start = tuple(carry(jnp.zeros(out.shape, out.dtype), *operands, *varying_with) for out in outs)
    return lax.fori_loop(0, -(-num_rows // block), step, start)
