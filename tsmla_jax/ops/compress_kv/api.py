"""compress_kv: V4's compressor, which pools the latents of a window of tokens into one entry."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from tsmla_jax.ops import dispatch
from tsmla_jax.ops.arrays import describe
from tsmla_jax.sparse import checks
from tsmla_kernels import contract
from tsmla_kernels.contract import sparse as sparse_contract

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


class CompressorState(NamedTuple):
    """The last tokens of every request, as a ring: the token at position p lies in row p % ring.

    kv_score   [N, ring, 2, W] float32: kv, and score with its position bias added
    positions  [N, ring] int32: the position that each row holds, -1 for none; read by the checks of TSMLA_CHECK=1 only

    A ring longer than the window of one entry lets as many tokens be taken back (rejected drafts) as it is longer: call
    again with a smaller seq_len.
    """

    kv_score: jax.Array
    positions: jax.Array


class CompressedEntries(NamedTuple):
    """The entries that a call completed, in the tokens' order; padding behind them.

    kv         [E, C] float32: pooled, before norm and rope; 0 for padding
    requests   [E] int32: the request of each, -1 for padding
    positions  [E] int32: its place in the request's compressed sequence, last token's position // ratio; -1 for padding
    """

    kv: jax.Array
    requests: jax.Array
    positions: jax.Array


def init_compressor_state(
    num_states: int, *, ratio: int, channels: int, overlap: bool, spare: int = 0
) -> CompressorState:
    """An empty CompressorState for `num_states` requests.

    overlap: whether entries pool two windows from two series (ratio 4), so that rows are 2 * channels wide.
    spare: how many tokens a request may take back.
    """
    num_states = contract.static_int("num_states", num_states, minimum=1)
    ratio = contract.static_int("ratio", ratio, minimum=1)
    channels = contract.static_int("channels", channels, minimum=1)
    spare = contract.static_int("spare", spare)
    series = 2 if overlap else 1
    ring = ratio * series + spare
    return CompressorState(
        jnp.zeros((num_states, ring, 2, series * channels), jnp.float32), jnp.full((num_states, ring), -1, jnp.int32)
    )


def compress_kv(
    kv_score: Float[Array, "T 2 W"],
    ape: Float[Array, "ratio W"],
    state: CompressorState,
    *,
    state_slots: Int32[Array, " B"],
    seq_lens: Int32[Array, " B"],
    cu_seqlens_q: Int32[Array, " B+1"],
    ratio: int,
    overlap: bool,
    implementation: str | None = None,
) -> tuple[CompressedEntries, CompressorState]:
    """Pool the tokens of every window that the new tokens complete; prefill, chunks and single decode steps alike.

    At a position p with (p + 1) % ratio == 0: softmax over the window's tokens, a channel at a time, of
    score + ape[pos % ratio] weighs their kv. The window is the last `ratio` tokens; with overlap
    the last 2 * ratio, of which the older half is read from the first C columns and the newer half from the second;
    tokens before the sequence began have no weight.
    Any split of a sequence into calls gives bitwise the same entries and states. Source: DeepSeek-V4, section 2.3.

    Axes: T new tokens over all requests, B requests, W row width (C, or 2 C with overlap), C channels, N states.

    Args:
      kv_score: [T, 2, W] float32, h W_kv and h W_gate, packed by request. Rows past cu_seqlens_q[B] are padding.
      ape: [ratio, W] float32.
      state: CompressorState; in place under donation.
      state_slots: [B] int32, the state of each request, -1 to leave none behind (its new tokens must start at 0).
      seq_lens: [B] int32, tokens of each request, the new ones included.
      cu_seqlens_q: [B + 1] int32, where each request's new tokens start, and their end.
      ratio: tokens an entry; static (4 and 128 in V4).
      overlap: whether rows hold two series; static (ratio 4 in V4).
      implementation: "xla" (blocks of entries), "reference", or None for the best that can run.

    Returns:
      (CompressedEntries with E = min(T, T // ratio + B), the new CompressorState).

    Raises:
      TypeError, ValueError: an argument is not legal. Under TSMLA_CHECK=1 also cu_seqlens_q that decrease, a state
        out of range or used twice, or positions that don't follow on those in the state.
      NotImplementedError: the named implementation can't run this call.
    """
    described = spec(
        kv_score,
        ape,
        state,
        state_slots=state_slots,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        ratio=ratio,
        overlap=overlap,
    )
    run = dispatch.select("compress_kv", described, implementation)
    kv_score, ape, state_slots, cu_seqlens_q = map(jnp.asarray, (kv_score, ape, state_slots, cu_seqlens_q))
    rings = (jnp.asarray(state.kv_score), jnp.asarray(state.positions))
    seq_lens = checks.compress(described, jnp.asarray(seq_lens), cu_seqlens_q, state_slots, rings[1])
    if described.num_tokens == 0 or described.num_requests == 0:
        empty = jnp.full((0,), -1, jnp.int32)
        return CompressedEntries(jnp.zeros((0, described.channels), jnp.float32), empty, empty), CompressorState(*rings)
    entries, rings = run(kv_score, ape, rings, state_slots, seq_lens, cu_seqlens_q, spec=described)
    return CompressedEntries(*entries), CompressorState(*rings)


def spec(
    kv_score: jax.Array,
    ape: jax.Array,
    state: CompressorState,
    *,
    state_slots: jax.Array,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array,
    ratio: int,
    overlap: bool,
) -> sparse_contract.CompressSpec:
    """The contract's spec of a call of compress_kv (arrays or ShapeDtypeStructs); raises as compress_kv does."""
    return sparse_contract.compress_spec(
        kv_score=describe("kv_score", kv_score),
        ape=describe("ape", ape),
        state=describe("state.kv_score", state.kv_score),
        state_positions=describe("state.positions", state.positions),
        state_slots=describe("state_slots", state_slots),
        seq_lens=describe("seq_lens", seq_lens),
        cu_seqlens_q=describe("cu_seqlens_q", cu_seqlens_q),
        ratio=ratio,
        overlap=overlap,
    )
