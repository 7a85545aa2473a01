"""The arguments and results of products with block scales: block_scaled_matmul, grouped_block_scaled_matmul and
quantize_blocks.

Imports neither jax nor torch. Axes: T rows of activations, K terms of a sum, N columns of the result, E groups. Blocks
have 128 terms, of weights 128 x 128; K and N need not be whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from tsmla_kernels.contract.rules import (
    FP8,
    FP8_MAX,
    Array,
    Dim,
    check_array,
    check_at_least_one,
    check_dtype,
    check_rank,
    check_static_last,
    listed,
    show,
    static_bool,
)

BLOCK = 128
"""Terms, and weight rows, that share a scale."""
LEAST_AMAX = 1e-10
"""A block's greatest magnitude is taken to be at least this, so that a block of zeros has a scale."""
INVERSE_MAX = 1 / FP8_MAX
"""A block's scale is this, rounded to float32, times its greatest magnitude: compilers divide by a constant in ways
that differ in the last bit, which decides how a value between two of e4m3 is rounded; they multiply in one way."""
QUANTIZED = ("float16", "bfloat16", "float32")
"""Dtypes that quantize_blocks takes, those of a product's result, and of activations without scales."""


@dataclass(frozen=True)
class ProductSpec:
    """The static facts of one block_scaled_matmul call, or of a grouped one. num_groups is None without groups; x has
    scales if it is e4m3."""

    num_rows: Dim
    num_terms: Dim
    num_columns: Dim
    num_groups: Dim | None
    out_dtype: str
    x_dtype: str = FP8


@dataclass(frozen=True)
class QuantizeBlocksSpec:
    """The static facts of one quantize_blocks call."""

    shape: tuple[Dim, ...]
    in_dtype: str
    power_of_two: bool


def blocks_of(size: Dim) -> Dim:
    """Blocks that hold so many terms or rows, the last of which may be a part."""
    return -(-size // BLOCK)


def product_spec(
    *, x: Array, weight: Array, x_scales: Array | None, weight_scales: Array, out_dtype: str = "bfloat16"
) -> ProductSpec:
    """The spec of block_scaled_matmul, or ValueError / TypeError naming the argument that is not legal."""
    return _spec(x, weight, x_scales, weight_scales, None, out_dtype)


def grouped_product_spec(
    *,
    x: Array,
    weight: Array,
    x_scales: Array | None,
    weight_scales: Array,
    cu_rows: Array,
    out_dtype: str = "bfloat16",
) -> ProductSpec:
    """The spec of grouped_block_scaled_matmul, or ValueError / TypeError naming the argument that is not legal."""
    return _spec(x, weight, x_scales, weight_scales, cu_rows, out_dtype)


def _spec(
    x: Array, weight: Array, x_scales: Array | None, weight_scales: Array, cu_rows: Array | None, out_dtype: str
) -> ProductSpec:  # fmt: skip
    stack = "" if cu_rows is None else "E "
    check_array("x", x, "T K", (FP8, *QUANTIZED))
    check_at_least_one("x", x.shape, 1, "K")
    rows, terms = x.shape
    check_rank("weight", weight, f"{stack}N K")
    check_dtype("weight", weight, (FP8,))
    groups: Dim = None
    if stack:
        check_rank("weight_scales", weight_scales, "E N/128 K/128")
        groups = weight_scales.shape[0]
        check_at_least_one("weight_scales", weight_scales.shape, 0, "E")
        if isinstance(groups, int) and isinstance(weight.shape[0], int) and weight.shape[0] < groups:
            got = f"weight: got shape {show(weight.shape)}"
            raise ValueError(f"{got}; axis 0 must be at least {groups} (E, weight_scales' groups)")
    group_sizes = [(weight.shape[0], "E, weight's groups")] if stack else []
    columns = weight.shape[-2]
    check_at_least_one("weight", weight.shape, len(weight.shape) - 2, "N")
    check_array("weight", weight, f"{stack}N K", (FP8,), *group_sizes, (columns, "N"), (terms, "K, x's terms"))
    blocks = (blocks_of(terms), "K / 128 rounded up")
    if x_scales is None:
        if x.dtype == FP8:
            raise ValueError(f"x_scales: got None; legal: float32 [T, K/128] with x of {FP8}")
    elif x.dtype != FP8:
        raise ValueError(f"x_scales: got an array with x of {x.dtype}; legal: None")
    else:
        check_array("x_scales", x_scales, "T K/128", ("float32",), (rows, "T, x's rows"), blocks)
    check_array(
        "weight_scales", weight_scales, f"{stack}N/128 K/128", ("float32",), *([(groups, "E")] if stack else []),
        (blocks_of(columns), "N / 128 rounded up"), blocks,
    )  # fmt: skip
    if cu_rows is not None:
        check_array("cu_rows", cu_rows, "E + 1", ("int32",), (groups + 1, "E + 1, of weight_scales' groups"))
    if out_dtype not in QUANTIZED:
        raise ValueError(f"out_dtype: got {out_dtype!r}; legal: {listed([repr(name) for name in QUANTIZED])}")
    return ProductSpec(rows, terms, columns, groups, out_dtype, x.dtype)


def quantize_blocks_spec(*, x: Array, power_of_two: bool = False) -> QuantizeBlocksSpec:
    """The spec of quantize_blocks, or ValueError / TypeError naming the argument that is not legal."""
    if not x.shape:
        raise ValueError("x: got shape [] of rank 0; legal: [..., K]")
    check_dtype("x", x, QUANTIZED)
    check_static_last("x", x)
    return QuantizeBlocksSpec(tuple(x.shape), x.dtype, static_bool("power_of_two", power_of_two))
