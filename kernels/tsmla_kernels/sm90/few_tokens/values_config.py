"""Which calls few_token_values serves. Imports no cutlass."""

from __future__ import annotations

from dataclasses import dataclass

LATENT = 512
"""Columns of a latent."""
PARTIALS = ("float32", "float16")
ROWS = 8
"""Rows of W_UV that a CTA has at least: one a warp."""
FEWEST_CTAS = 128


@dataclass(frozen=True)
class ValuesSpec:
    """A call of few_token_values, behind mla_decode's first kernel.

    Attributes:
      tokens: how many there are. heads: H. latent_dim: L. rows: the rows V of W_UV for each head.
      tile_rows: heads whose pieces lie together, as in the decode's LatentShape.
      partial_dtype, lane_order: as in ValuesConfig.
    """

    tokens: int
    heads: int
    latent_dim: int
    rows: int
    tile_rows: int
    partial_dtype: str
    lane_order: bool


@dataclass(frozen=True)
class ValuesConfig:
    """The static facts that an object of few_token_values is compiled for.

    Attributes:
      partial_dtype: the dtype of the pieces' results. lane_order: as LatentShape.partial_is_lane_order.
      rows: rows of W_UV that a CTA has.
    """

    partial_dtype: str = "float32"
    lane_order: bool = False
    rows: int = 16


def values_reasons(spec: ValuesSpec) -> list[str]:
    """Why few_token_values can't run this call; empty if it can."""
    reasons = [] if spec.tokens == 1 else [f"there are {spec.tokens} tokens; few_token_values takes one"]
    if spec.latent_dim != LATENT or spec.partial_dtype not in PARTIALS:
        given = f"latents have {spec.latent_dim} columns, their pieces are {spec.partial_dtype}"
        reasons.append(f"{given}; few_token_values takes {LATENT} and {', '.join(PARTIALS)}")
    if spec.heads > spec.tile_rows:
        reasons.append(f"there are {spec.heads} heads in tiles of {spec.tile_rows}; few_token_values takes one tile")
    if spec.rows % ROWS or not spec.rows:
        reasons.append(f"W_UV has {spec.rows} rows for a head; few_token_values takes multiples of {ROWS}")
    return reasons


def values_config(spec: ValuesSpec) -> ValuesConfig:
    """The configuration that serves `spec`."""
    rows = spec.rows
    while rows % (2 * ROWS) == 0 and spec.heads * (spec.rows // rows) < FEWEST_CTAS:
        rows //= 2
    return ValuesConfig(spec.partial_dtype, spec.lane_order, rows)
