"""select_topk in portable XLA: XLA's own top-k on blocks of rows, corrected so that ties and padding are exact."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.select_topk.reference import Results, ascending, results_of, rows_of
from tsmla_jax.ops.selected import numerics
from tsmla_jax.ops.selected.blocks import over_token_blocks
from tsmla_jax.ops.selection_bits import xla as bits_xla
from tsmla_kernels.contract.sparse import TopKSpec

BLOCK_BYTES = 4 << 20
"""Bound on the block of logits that is sorted at a time; the sort's own workspace is a small multiple of it."""


def select_topk(logits: jax.Array, seq_lens: jax.Array, *others: jax.Array, spec: TopKSpec) -> Results:
    """The results as the public select_topk documents them."""
    (num_tokens, num_keys), k = logits.shape, spec.k
    rows = rows_of(spec, seq_lens, *others)
    if num_keys == 0 or num_tokens == 0:
        if spec.bits:
            return jnp.zeros((num_tokens, spec.width), jnp.int32)
        return results_of(spec, rows, jnp.full((num_tokens, k), -1, jnp.int32))

    def block(logits: jax.Array, lens: jax.Array, starts: jax.Array) -> tuple[jax.Array]:
        column = jnp.arange(num_keys, dtype=jnp.int32)
        in_row = column < lens[:, None]
        if spec.row_starts:
            column = column - starts[:, None]
            in_row = (column >= 0) & (column < lens[:, None])
        unusual = (in_row & numerics.is_unordered(logits)).any()
        value = jnp.where(in_row, logits, -jnp.inf)
        # XLA orders -0.0 below 0.0, and a sum of relus times negative weights is -0.0 as often as not.
        value = jnp.where(value == 0, jnp.zeros_like(value), value)

        def sort_all() -> jax.Array:
            keys = ~numerics.ordered(logits), ~in_row
            return jnp.lexsort(keys, axis=-1).astype(jnp.int32)[:, : min(k, num_keys)]

        # Ties go to the lower index, so a -inf inside the row comes before those past its end, but not before NaN.
        # If rows have starts, there may also be -inf before the row, at lower indices than the row's own -inf.
        if spec.row_starts:
            unusual |= (in_row & jnp.isneginf(logits)).any()
        order = lax.cond(unusual, sort_all, lambda: lax.top_k(value, min(k, num_keys))[1])
        order = jnp.pad(order, ((0, 0), (0, max(0, k - num_keys)))) - starts[:, None]
        positions = jnp.where(jnp.arange(k, dtype=jnp.int32) < lens[:, None], order, -1)
        return (ascending(positions) if spec.order == "position" else positions,)

    (positions,) = over_token_blocks(
        block,
        (logits, rows.lens, rows.starts),
        (jax.ShapeDtypeStruct((num_tokens, k), jnp.int32),),
        block=max(1, BLOCK_BYTES // (num_keys * logits.dtype.itemsize)),
    )
    if spec.bits:
        return bits_xla.selection_bits(positions, spec=spec.selection)
    return results_of(spec, rows, positions)
