"""select_topk in portable XLA: XLA's own top-k on blocks of rows, its ties and padding made exact."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.select_topk.reference import ascending
from tsmla_jax.sparse.blocks import over_token_blocks
from tsmla_kernels.contract.sparse import TopKSpec

BLOCK_BYTES = 4 << 20
"""Bound on the block of logits that is sorted at a time; the sort's own workspace is a small multiple of it."""


def select_topk(logits: jax.Array, seq_lens: jax.Array, *, spec: TopKSpec) -> jax.Array:
    """positions [T, k] as the public select_topk documents them."""
    (num_tokens, num_keys), k = logits.shape, spec.k
    if num_keys == 0 or num_tokens == 0:
        return jnp.full((num_tokens, k), -1, jnp.int32)

    def block(logits: jax.Array, lens: jax.Array) -> tuple[jax.Array]:
        in_row = jnp.arange(num_keys, dtype=jnp.int32) < lens[:, None]
        nan = in_row & jnp.isnan(logits)
        value = jnp.where(in_row & ~nan, logits, -jnp.inf)
        # XLA orders -0.0 below 0.0, and a sum of relus times negative weights is -0.0 as often as not.
        value = jnp.where(value == 0, jnp.zeros_like(value), value)

        def sort_all() -> jax.Array:
            return jnp.lexsort((-value, nan, ~in_row), axis=-1).astype(jnp.int32)[:, : min(k, num_keys)]

        # Ties go to the lower index, so a -inf inside the row comes before those past its end, but not before NaN.
        order = lax.cond(nan.any(), sort_all, lambda: lax.top_k(value, min(k, num_keys))[1])
        order = jnp.pad(order, ((0, 0), (0, max(0, k - num_keys))))
        positions = jnp.where(jnp.arange(k, dtype=jnp.int32) < lens[:, None], order, -1)
        return (ascending(positions) if spec.order == "position" else positions,)

    (positions,) = over_token_blocks(
        block,
        (logits, seq_lens),
        (jax.ShapeDtypeStruct((num_tokens, k), jnp.int32),),
        block=max(1, BLOCK_BYTES // (num_keys * logits.dtype.itemsize)),
    )
    return positions
