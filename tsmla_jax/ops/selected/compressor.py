"""The data of compress_kv: the state that V4's compressor keeps of each request, and the entries that it makes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tsmla_jax.ops.exporting import exportable
from tsmla_jax.ops.inputs import describe
from tsmla_kernels import contract


@exportable
class CompressorState(NamedTuple):
    """The last tokens of every request, as a ring: the token at position p lies in row p % ring.

    If the ring has n tokens more than one entry pools, a request can take back up to n tokens (rejected drafts) by a
    call whose new tokens begin earlier.

    Attributes:
      kv_score: [N, ring, 2, W] float32: kv, and score with its position bias added.
      positions: [N, ring] int32: the position that each row holds, -1 if it holds none; only the checks of
        TSMLA_CHECK=1 read it.
    """

    kv_score: jax.Array
    positions: jax.Array


@exportable
class CompressedEntries(NamedTuple):
    """The entries that a call completed, in the order of the tokens, then padding.

    Attributes:
      kv: [E, C] float32: pooled, before norm and rope; 0 for padding.
      requests: [E] int32: the request of each entry, -1 for padding.
      positions: [E] int32: the entry's index in the request's compressed sequence, which is its last token's position
        // ratio; -1 for padding.
    """

    kv: jax.Array
    requests: jax.Array
    positions: jax.Array


def describe_state(state: Any) -> dict[str, contract.Array]:
    """The descriptions of a state's arrays, by their names in the specs. TypeError unless it is a CompressorState."""
    if not isinstance(state, CompressorState):
        raise contract.not_an_array("state", state, "a CompressorState")
    return {
        "state": describe("state.kv_score", state.kv_score),
        "state_positions": describe("state.positions", state.positions),
    }


def init_compressor_state(
    num_states: int, *, ratio: int, channels: int, overlap: bool, spare: int = 0
) -> CompressorState:
    """An empty CompressorState for `num_states` requests.

    Args:
      num_states: N, at least 1.
      ratio: tokens an entry, at least 1.
      channels: C, width of an entry.
      overlap: whether entries pool two windows from two series (ratio 4), so that rows are 2 * channels wide.
      spare: how many tokens a request may take back.

    Raises:
      TypeError, ValueError: a size is no int, or too small; overlap is no bool.
    """
    num_states = contract.static_int("num_states", num_states, minimum=1)
    ratio = contract.static_int("ratio", ratio, minimum=1)
    channels = contract.static_int("channels", channels, minimum=1)
    spare = contract.static_int("spare", spare)
    series = 2 if contract.static_bool("overlap", overlap) else 1
    ring = ratio * series + spare
    return CompressorState(
        jnp.zeros((num_states, ring, 2, series * channels), jnp.float32), jnp.full((num_states, ring), -1, jnp.int32)
    )
