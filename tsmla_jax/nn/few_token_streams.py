"""V4's residual streams in a step of one token: a mix is two kernels on Hopper, the writing before it included.

The first kernel writes the last block's result to the streams and projects them, the second one makes the next block's
input and the mix's weights. Together they compute what `tsmla_jax.generate.streams` does. Axes: T tokens, N streams, C
columns.
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
    if streams.shape[0] != 1:  # said first: most steps that can't run here have several tokens
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
      eps: added to the divisors of these rounds, to the mixing's weights before them, and to the reading's weights.
      norm_eps: the epsilon of the streams' norm before the projection.
    """
    tokens, count, columns = _streams_of(given).shape
    spec = ReadStreamsSpec(tokens, count, columns, rounds, eps, norm_eps, norm.eps)
    flat, (read, write, mix) = _read(params, given, norm, spec, (tokens, count), (tokens, count * count))
    return Mixed(read, write, mix.reshape(tokens, count, count), flat.reshape(tokens, count, columns))


def close_by_kernel(
    params: Mapping[str, jax.Array], given: jax.Array | Unwritten, norm: Norm, *, eps: float, norm_eps: float
) -> jax.Array:
    """The norm [T, C] of the result of `tsmla_jax.generate.streams.close_streams`, by kernels. If `given` is
    `Unwritten`, the last block's result is written to the streams first.

    Args:
      params: as in `close_streams`.
      given, eps, norm_eps: as in `mix_by_kernel`.
      norm: the norm of the vector that `close_streams` returns.
    """
    tokens, count, columns = _streams_of(given).shape
    spec = ReadStreamsSpec(tokens, count, columns, 1, eps, norm_eps, norm.eps, mixes=False)
    return _read(params, given, norm, spec)[1][0]


def _streams_of(given: jax.Array | Unwritten) -> jax.Array:
    return given.streams if isinstance(given, Unwritten) else given


def _read(
    params: Mapping[str, jax.Array],
    given: jax.Array | Unwritten,
    norm: Norm,
    spec: ReadStreamsSpec,
    *shapes: tuple[int, ...],
) -> tuple[jax.Array, list[jax.Array]]:
    """The written streams [T, N C], and the results of `spec`: the next block's input [T, C], then arrays of these
    `shapes`."""
    flat, wide = _streams_of(given).reshape(spec.tokens, -1), jnp.float32
    written = isinstance(given, Unwritten)
    writing = WriteStreamsSpec(spec.tokens, spec.count, spec.columns, written, spec.mixes)
    inputs: tuple[Any, ...] = (flat, params["fn"].astype(wide))
    results: tuple[tuple[int, ...], ...] = ((spec.columns // COLUMNS, spec.tokens, SUMS),)
    if isinstance(given, Unwritten):
        inputs += (given.out.astype(flat.dtype), given.write, given.mix.reshape(spec.tokens, -1))
        results += (flat.shape,)
    sums, *new = run(record.FEW_TOKEN_WRITE_STREAMS, writing, inputs, *results)
    flat = new[0] if new else flat
    inputs = (sums, flat, *(array.astype(wide) for array in (params["base"], params["scale"], norm.weight)))
    return flat, run(record.FEW_TOKEN_READ_STREAMS, spec, inputs, (spec.tokens, spec.columns), *shapes)
