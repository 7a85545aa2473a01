"""The definition of compress_kv: every entry's window at once, and a softmax over it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_jax.ops.compress_kv.windows import completed_entries, updated_state, window_rows
from tsmla_kernels.contract.compress import CompressSpec


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
    """Entries (kv, requests, positions) and state, as the public compress_kv documents them. Differentiable."""
    entry = completed_entries(spec, seq_lens, cu_seqlens_q)
    real = entry.position >= 0
    start = (seq_lens - jnp.diff(cu_seqlens_q))[entry.request]
    kv, score = window_rows(
        spec, entry.token, jnp.maximum(entry.position, 0), start, state_slots[entry.request], kv_score, ape, state[0]
    )
    pooled = (jax.nn.softmax(score, axis=1) * kv).sum(axis=1)
    new_state = updated_state(spec, kv_score, ape, state, state_slots, seq_lens, cu_seqlens_q)
    return (
        jnp.where(real[:, None], pooled, 0),
        jnp.where(real, entry.request, -1),
        jnp.where(real, entry.position // spec.ratio, -1),
    ), new_state
