"""Where the tokens of a compressed entry's window lie: among the call's new tokens, or in the state's ring."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tsmla_jax.ops.ragged import row_owner
from tsmla_kernels.contract.compress import CompressSpec


class Entries(NamedTuple):
    """The entries that a call completes, with padding after them: each entry's last token, that token's request and
    position (-1 for padding), and the number of entries."""

    token: jax.Array
    request: jax.Array
    position: jax.Array
    total: jax.Array


def completed_entries(spec: CompressSpec, seq_lens: jax.Array, cu_seqlens_q: jax.Array) -> Entries:
    """The entries that the new tokens complete, in the tokens' order."""
    request, position, owned = token_positions(spec, seq_lens, cu_seqlens_q)
    completes = owned & ((position + 1) % spec.ratio == 0)
    # A completing token's place is the number of completing tokens before it. Others go past the end and are dropped.
    place = jnp.where(completes, jnp.cumsum(completes, dtype=jnp.int32) - 1, spec.num_entries)
    rows = jnp.arange(spec.num_tokens, dtype=jnp.int32)
    empty = jnp.zeros((spec.num_entries,), jnp.int32)
    return Entries(
        token=empty.at[place].set(rows, mode="drop"),
        request=empty.at[place].set(request, mode="drop"),
        position=(empty - 1).at[place].set(position, mode="drop"),
        total=completes.sum(dtype=jnp.int32),
    )


def token_positions(
    spec: CompressSpec, seq_lens: jax.Array, cu_seqlens_q: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(request, position in its sequence, belongs to a request) of every new token."""
    request, local, owned = row_owner(cu_seqlens_q, spec.num_tokens)
    start = seq_lens - jnp.diff(cu_seqlens_q)
    return request, start[request] + local, owned


def window_rows(
    spec: CompressSpec,
    token: jax.Array,
    position: jax.Array,
    start: jax.Array,
    state_slot: jax.Array,
    kv_score: jax.Array,
    ape: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """kv and biased score [e, window, C] of the tokens that each of e entries pools, the oldest first.

    token, position: of the entry's last token; start: position of its request's first new token; state_slot: its ring.
    Tokens before the sequence began have score -inf. With two series the older half reads the
    first and the newer half the second.
    """
    back = spec.window - 1 - jnp.arange(spec.window, dtype=jnp.int32)
    at = position[:, None] - back
    series = jnp.broadcast_to(jnp.arange(spec.window, dtype=jnp.int32) // spec.ratio, at.shape)
    row = jnp.clip(token[:, None] - back, 0, spec.num_tokens - 1)
    slot = jnp.broadcast_to(jnp.clip(state_slot, 0, spec.num_states - 1)[:, None], at.shape)
    phase = at % spec.ratio
    new = kv_score.reshape(spec.num_tokens, 2, spec.overlap, spec.channels)
    old = state.reshape(spec.num_states, spec.ring, 2, spec.overlap, spec.channels)
    bias = ape.reshape(spec.ratio, spec.overlap, spec.channels)
    is_new = (at >= start[:, None])[..., None]
    ring = at % spec.ring
    kv = jnp.where(is_new, new[row, 0, series], old[slot, ring, 0, series])
    score = jnp.where(is_new, new[row, 1, series] + bias[phase, series], old[slot, ring, 1, series])
    seen = (at >= 0)[..., None]
    return jnp.where(seen, kv, 0), jnp.where(seen, score, -jnp.inf)


def updated_state(
    spec: CompressSpec,
    kv_score: jax.Array,
    ape: jax.Array,
    state: tuple[jax.Array, jax.Array],
    state_slots: jax.Array,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The rings (kv_score, positions) with the last new tokens of every request written over the oldest rows."""
    rows, positions = state
    if spec.num_tokens <= spec.num_requests * spec.ring:
        token = jnp.arange(spec.num_tokens, dtype=jnp.int32)
        request, position, keep = token_positions(spec, seq_lens, cu_seqlens_q)
        keep &= position >= seq_lens[request] - spec.ring  # older tokens' rows are overwritten anyway
    else:
        lens = jnp.diff(cu_seqlens_q)
        local = lens[:, None] - spec.ring + jnp.arange(spec.ring, dtype=jnp.int32)
        request = jnp.repeat(jnp.arange(spec.num_requests, dtype=jnp.int32), spec.ring)
        token = (cu_seqlens_q[:-1, None] + local).reshape(-1)
        position = (seq_lens[:, None] - lens[:, None] + local).reshape(-1)
        keep = (local >= 0).reshape(-1) & (token < spec.num_tokens)
        token = jnp.clip(token, 0, max(spec.num_tokens - 1, 0))
    slot = state_slots[request]
    slot = jnp.where(keep & (slot >= 0), slot, spec.num_states)
    new = kv_score[token]
    new = new.at[:, 1].add(ape[position % spec.ratio])
    ring = position % spec.ring
    return (
        rows.at[slot, ring].set(new, mode="drop"),
        positions.at[slot, ring].set(position, mode="drop"),
    )
