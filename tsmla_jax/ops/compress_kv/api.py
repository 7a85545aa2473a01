"""compress_kv: V4's compressor, which pools the latents of a window of tokens into one entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tsmla_jax.ops.inputs import describe_call
from tsmla_jax.ops.operation import Implementation, Operation, Preference, same_spec
from tsmla_jax.ops.selected import checks
from tsmla_jax.ops.selected.compressor import CompressedEntries, CompressorState, describe_state
from tsmla_kernels.contract import compress as compress_contract

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Int32


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
    implementation: Preference = None,
) -> tuple[CompressedEntries, CompressorState]:
    """Pool the tokens of every window that the new tokens complete; prefill, chunks and single decode steps alike.

    An entry ends at a position p with (p + 1) % ratio == 0. Its weights are, for each channel, the softmax of score +
    ape[position % ratio] over the window's tokens, and it is the weighted sum of their kv. The window is the last
    `ratio` tokens. With overlap it is the last 2 * ratio tokens: the older half uses the first C columns, the newer
    half the second C. Tokens before the sequence began have no weight. With "xla" any split of a sequence into calls
    gives bitwise the same entries and states. Source: DeepSeek-V4, section 2.3.

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
      NotImplementedError: the named implementation can't run this call, or a derivative of "xla" is asked for under
        jax.jit; "reference" has one.
    """
    spec, chosen = OPERATION.choose(**locals())
    kv_score, ape, state_slots, cu_seqlens_q = map(jnp.asarray, (kv_score, ape, state_slots, cu_seqlens_q))
    rings = (jnp.asarray(state.kv_score), jnp.asarray(state.positions))
    seq_lens = checks.compress(spec, jnp.asarray(seq_lens), cu_seqlens_q, state_slots, rings[1])
    if spec.num_tokens == 0 or spec.num_requests == 0:
        padding = jnp.full((spec.num_entries,), -1, jnp.int32)
        kv = jnp.zeros((spec.num_entries, spec.channels), jnp.float32)
        return CompressedEntries(kv, padding, padding), CompressorState(*rings)
    rows = PartitionSpec(None, None), PartitionSpec(None), PartitionSpec(None)
    given = (kv_score, ape, rings, state_slots, seq_lens, cu_seqlens_q)
    entries, rings = chosen.call(given, lambda: (rows, jax.tree.map(same_spec, rings)), spec=spec)
    return CompressedEntries(*entries), CompressorState(*rings)


def _spec(*, state: CompressorState, **arguments: Any) -> compress_contract.CompressSpec:
    return describe_call(compress_contract.compress_spec, **describe_state(state), **arguments)


def _implementations() -> Mapping[str, Implementation]:
    from tsmla_jax.ops.compress_kv import reference, xla

    return {"xla": Implementation(xla.compress_kv), "reference": Implementation(reference.compress_kv)}


OPERATION = Operation(compress_kv, _spec, _implementations)
