"""Which kernels of V4's residual streams serve which calls. Imports no cutlass."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tsmla_kernels.sm90.few_tokens.config import token_reasons

COLUMNS = 32
"""Columns of all streams that a CTA of few_token_write_streams has: one a lane."""
MOST_STREAMS = 4
MOST_COLUMNS = 8192
LOADED_COLUMNS = 2048
"""Columns of a stream that a CTA of few_token_read_streams loads at once."""
SUMS = 32
"""Words of a token's sums of a CTA: those of the products, that of the squares, and unused ones."""


def mix_rows(count: int, mixes: bool = True) -> int:
    """The weights of a mix of `count` streams: of the reading and, if `mixes`, of the writing and the mixing."""
    return (2 + count) * count if mixes else count


@dataclass(frozen=True)
class WriteStreamsSpec:
    """A call of few_token_write_streams: `tokens` tokens with `count` streams of `columns` each; written, mixes: as in
    WriteStreamsConfig."""

    tokens: int
    count: int
    columns: int
    written: bool = True
    mixes: bool = True


@dataclass(frozen=True)
class WriteStreamsConfig:
    """The static facts that an object of few_token_write_streams is compiled for.

    Attributes:
      count: the streams of a token.
      written: whether a block's result is written to the streams first.
      mixes: whether a block follows; behind the last layer streams are only read.
    """

    count: int = 4
    written: bool = True
    mixes: bool = True


@dataclass(frozen=True)
class ReadStreamsSpec:
    """A call of few_token_read_streams: `tokens` tokens with `count` streams of `columns` each; the other fields as in
    ReadStreamsConfig."""

    tokens: int
    count: int
    columns: int
    rounds: int = 20
    eps: float = 1e-6
    norm_eps: float = 1e-6
    input_eps: float = 1e-6
    mixes: bool = True


@dataclass(frozen=True)
class ReadStreamsConfig:
    """The static facts that an object of few_token_read_streams is compiled for.

    Attributes:
      count: the streams of a token.
      loads: how often LOADED_COLUMNS are loaded to bring all columns of a stream.
      rounds, eps: Sinkhorn's rounds, and what is added to their divisors and to the weights of the reading and of the
        mixing.
      norm_eps: of the norm of all streams as one vector, before they are projected.
      input_eps: of the norm of the mix that is read.
      mixes: as in WriteStreamsConfig.
    """

    count: int = 4
    loads: int = 2
    rounds: int = 20
    eps: float = 1e-6
    norm_eps: float = 1e-6
    input_eps: float = 1e-6
    mixes: bool = True


def _reasons(tokens: int, count: int, columns: int) -> list[str]:
    reasons = token_reasons(tokens)
    if not 1 <= count <= MOST_STREAMS:
        reasons.append(f"there are {count} streams; the kernels of few tokens take 1 to {MOST_STREAMS}")
    if columns % COLUMNS or not 0 < columns <= MOST_COLUMNS:
        reasons.append(
            f"a stream has {columns} columns; the kernels of few tokens take multiples of {COLUMNS} to {MOST_COLUMNS}"
        )
    return reasons


def write_streams_reasons(spec: WriteStreamsSpec) -> list[str]:
    """Why few_token_write_streams can't run this call; empty if it can."""
    return _reasons(spec.tokens, spec.count, spec.columns)


def write_streams_config(spec: WriteStreamsSpec) -> WriteStreamsConfig:
    """The configuration that serves `spec`."""
    return WriteStreamsConfig(spec.count, spec.written, spec.mixes)


def read_streams_reasons(spec: ReadStreamsSpec) -> list[str]:
    """Why few_token_read_streams can't run this call; empty if it can."""
    return _reasons(spec.tokens, spec.count, spec.columns)


def read_streams_config(spec: ReadStreamsSpec) -> ReadStreamsConfig:
    """The configuration that serves `spec`."""
    fields = dataclasses.asdict(spec)
    _, columns = fields.pop("tokens"), fields.pop("columns")
    return ReadStreamsConfig(**fields, loads=-(-columns // LOADED_COLUMNS))
