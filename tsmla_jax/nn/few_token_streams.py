"""V4's residual streams in a step of one token: a mix is two kernels on Hopper, the writing before it included.

The first kernel writes the last block's result to the streams and projects them, the second one makes the next block's
input and the mix's weights. What they compute is `tsmla_jax.generate.streams`. Axes: T tokens, N streams, C columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tsmla_jax.nn.few_tokens import run
from tsmla_jax.nn.norms import Norm
from tsmla_jax.ops import device
from tsmla_kernels.sm90.few_tokens import record
from tsmla_kernels.sm90.few_tokens.streams_config import (
    COLUMNS,
    SUMS,
    ReadStreamsSpec,
    WriteStreamsSpec,
    write_streams_reasons,
)


class Unwritten(NamedTuple):
    """Streams to which a block's result is still to be written.

    Attributes:
      out: the block's result [T, C].
      write: the weights of the writing, f32 [T, N].
      mix: the weights of the mixing, f32 [T, N, N].
      streams: [T, N, C], as the block has read them.
    """

    out: jax.Array
    write: jax.Array
    mix: jax.Array
    streams: jax.Array


class Mixed(NamedTuple):
    """Results of a mix: the next block's normed input [T, C], the weights of the writing f32 [T, N] and of the mixing
    f32 [T, N, N], and the streams [T, N, C] that were read."""

    read: jax.Array
    write: jax.Array
    mix: jax.Array
    streams: jax.Array


def why_not(streams: jax.Array) -> list[str]:
    """Why `mix_by_kernel` can't serve streams [T, N, C] on jax's default device; empty if it can."""
    if streams.shape[0] != 1:  # said first: most other steps are of many tokens
        return [f"there are {streams.shape[0]} tokens; Pallas' kernels mix the streams of several tokens faster"]
    if reasons := device.why_not(record.FEW_TOKEN_WRITE_STREAMS) + device.why_not_by_default():
        return reasons
    if streams.dtype != jnp.bfloat16:
        return [f"streams are {streams.dtype}; the kernels of few tokens take bfloat16"]
    tokens, count, columns = streams.shape
    return write_streams_reasons(WriteStreamsSpec(tokens, count, columns))


def mix_by_kernel(
    params: Mapping[str, jax.Array],
    given: jax.Array | Unwritten,
    norm: Norm,
    *,
    rounds: int,
    eps: float,
    norm_eps: float,
) -> Mixed:
    """A mix of streams, to which a block's result is written first if they are `Unwritten`.

    Args:
      params: as in `tsmla_jax.generate.streams.read_streams`.
      given: streams [T, N, C] in bf16, or `Unwritten` ones.
      norm: the norm of the next block's input.
      rounds: the number of Sinkhorn's rounds.
      eps: added to the divisors of these rounds.
      norm_eps: the epsilon of the streams' norm before the projection.
    """
    streams = given.streams if isinstance(given, Unwritten) else given
    tokens, count, columns = streams.shape
    flat, wide = streams.reshape(tokens, -1), jnp.float32
    spec: Any = WriteStreamsSpec(tokens, count, columns, written=isinstance(given, Unwritten))
    inputs: tuple[Any, ...] = (flat, params["fn"].astype(wide))
    shapes: tuple[tuple[int, ...], ...] = ((columns // COLUMNS, tokens, SUMS),)
    if isinstance(given, Unwritten):
        inputs += (given.out.astype(flat.dtype), given.write, given.mix.reshape(tokens, -1))
        shapes += (flat.shape,)
    sums, *new = run(record.FEW_TOKEN_WRITE_STREAMS, spec, inputs, *shapes)
    flat = new[0] if new else flat
    spec = ReadStreamsSpec(tokens, count, columns, rounds, eps, norm_eps, norm.eps)
    inputs = (sums, flat, *(array.astype(wide) for array in (params["base"], params["scale"], norm.weight)))
    shapes = ((tokens, columns), (tokens, count), (tokens, count * count))
    read, write, mix = run(record.FEW_TOKEN_READ_STREAMS, spec, inputs, *shapes)
    return Mixed(read, write, mix.reshape(tokens, count, count), flat.reshape(streams.shape))
