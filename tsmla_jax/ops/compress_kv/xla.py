"""compress_kv in portable XLA: blocks of entries, pooled in a fixed order of operations.

Only the blocks that hold completed entries are visited: a decode step that completes none reads no window. Beyond the
operands and results there is one block of windows at a time (BLOCK_BYTES, in a few forms).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.compress_kv.windows import completed_entries, updated_state, window_rows
from tsmla_jax.ops.selected.blocks import over_token_blocks
from tsmla_jax.ops.selected.numerics import tree_max, tree_sum
from tsmla_jax.ops.transforms import without_derivative
from tsmla_kernels.contract.compress import CompressSpec

BLOCK_BYTES = 2 << 20
"""Bound on the float32 block of windows [entries, window, C]."""


def compress_kv(
    kv_score: jax.Array,
    ape: jax.Array,
    state: tuple[jax.Array, jax.Array],
    state_slots: jax.Array,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array,
    *,
    spec: CompressSpec,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Entries (kv, requests, positions) and state, as the public compress_kv documents them."""
    entry = completed_entries(spec, seq_lens, cu_seqlens_q)
    real = entry.position >= 0
    start = (seq_lens - jnp.diff(cu_seqlens_q))[entry.request]

    def block(token: jax.Array, position: jax.Array, start: jax.Array, slot: jax.Array) -> tuple[jax.Array]:
        kv, score = window_rows(spec, token, jnp.maximum(position, 0), start, slot, kv_score, ape, state[0])
        # Results must not depend on a compiler's choices for this shape. So there is no plain reduction, and barriers
        # keep products from being fused into sums.
        shifted = lax.optimization_barrier(score - tree_max(score, axis=1)[:, None])
        weight = lax.optimization_barrier(jnp.exp(shifted))
        product = lax.optimization_barrier(weight * kv)
        pooled, total = lax.optimization_barrier((tree_sum(product, axis=1), tree_sum(weight, axis=1)))
        pooled = pooled / total
        return (jnp.where((position >= 0)[:, None], pooled, 0),)

    (pooled,) = over_token_blocks(
        block,
        (entry.token, entry.position, start, state_slots[entry.request]),
        (jax.ShapeDtypeStruct((spec.num_entries, spec.channels), jnp.float32),),
        block=max(1, BLOCK_BYTES // (spec.window * spec.channels * 4)),
        varying_with=(kv_score, ape, state[0], seq_lens, cu_seqlens_q),
        num_used=entry.total,
    )
    pooled = without_derivative(pooled, entry.total, "compress_kv", "use implementation='reference'")
    new_state = updated_state(spec, kv_score, ape, state, state_slots, seq_lens, cu_seqlens_q)
    return (
        pooled,
        jnp.where(real, entry.request, -1),
        jnp.where(real, entry.position // spec.ratio, -1),
    ), new_state
