"""Which kernels of V4's attention, before and behind it, serve which calls of one token. Imports no cutlass."""

from __future__ import annotations

from dataclasses import dataclass

from tsmla_kernels.sm90.few_tokens.config import LOADED_TERMS, MOST_TERMS, TOKEN_TILE, UNIT

MOST_POOLED = 2
MULTIPROCESSORS = 132
"""CTAs of few_token_outputs, at most."""


@dataclass(frozen=True)
class InputsSpec:
    """A call of few_token_inputs: tokens and terms (K) of the products; the first weight's rows, of which the last
    `tail` have a result of their own; and the rows of each of the other weights."""

    tokens: int
    terms: int
    rows: int
    tail: int = 0
    pooled: tuple[int, ...] = ()


@dataclass(frozen=True)
class InputsConfig:
    """The static facts that an object of few_token_inputs is compiled for.

    Attributes:
      loads: how often LOADED_TERMS are loaded to bring all terms.
      tail: whether the first weight's last rows have a result of their own.
      pooled: how many weights have results in float32.
    """

    loads: int = 2
    tail: bool = False
    pooled: int = 1


@dataclass(frozen=True)
class OutputsSpec:
    """A call of few_token_outputs: tokens; G groups; K terms and N weight rows of a group; D columns of a head, of
    which the last R have rope."""

    tokens: int
    groups: int
    terms: int
    rows: int
    head_dim: int = 512
    rope_dim: int = 64


@dataclass(frozen=True)
class OutputsConfig:
    """The static facts that an object of few_token_outputs is compiled for.

    Attributes:
      loads: as in InputsConfig.
      tiles: how many tiles of TOKEN_TILE weight rows a CTA has.
      head_dim, rope_dim: D and R.
    """

    loads: int = 2
    tiles: int = 8
    head_dim: int = 512
    rope_dim: int = 64


def _reasons(name: str, tokens: int, terms: int) -> list[str]:
    reasons = [] if tokens == 1 else [f"there are {tokens} tokens; {name} takes one"]
    if terms % (2 * UNIT) or not 0 < terms <= MOST_TERMS:
        reasons.append(f"a weight has {terms} terms; {name} takes multiples of {2 * UNIT} to {MOST_TERMS}")
    return reasons


def inputs_reasons(spec: InputsSpec) -> list[str]:
    """Why few_token_inputs can't run this call; empty if it can."""
    reasons = _reasons("few_token_inputs", spec.tokens, spec.terms)
    for rows in (spec.rows - spec.tail, spec.tail, *spec.pooled):
        if rows % TOKEN_TILE or rows < 0:
            reasons.append(f"a result has {rows} columns; few_token_inputs takes multiples of {TOKEN_TILE}")
    if not 1 <= len(spec.pooled) <= MOST_POOLED:
        reasons.append(
            f"there are {len(spec.pooled)} weights of compressors; few_token_inputs takes 1 or {MOST_POOLED}"
        )
    return reasons


def inputs_config(spec: InputsSpec) -> InputsConfig:
    """The configuration that serves `spec`."""
    return InputsConfig(-(-spec.terms // LOADED_TERMS), bool(spec.tail), len(spec.pooled))


def outputs_reasons(spec: OutputsSpec) -> list[str]:
    """Why few_token_outputs can't run this call; empty if it can."""
    reasons = _reasons("few_token_outputs", spec.tokens, spec.terms)
    if spec.terms % spec.head_dim:
        reasons.append(
            f"a group has {spec.terms} terms of heads of {spec.head_dim}; few_token_outputs takes whole heads"
        )
    if spec.rope_dim % 8 or not 0 <= spec.rope_dim <= spec.head_dim:
        reasons.append(f"{spec.rope_dim} columns have rope; few_token_outputs takes multiples of 8")
    if spec.rows % TOKEN_TILE or not spec.rows or not spec.groups:
        reasons.append(f"a group has {spec.rows} weight rows; few_token_outputs takes multiples of {TOKEN_TILE}")
    return reasons


def outputs_config(spec: OutputsSpec) -> OutputsConfig:
    """The configuration that serves `spec`."""
    tiles = spec.rows // TOKEN_TILE
    fewest = -(-spec.groups * tiles // MULTIPROCESSORS)
    # A CTA's tiles are of one group.
    of_cta = next(count for count in range(1, tiles + 1) if tiles % count == 0 and count >= min(fewest, tiles))
    return OutputsConfig(-(-spec.terms // LOADED_TERMS), of_cta, spec.head_dim, spec.rope_dim)
