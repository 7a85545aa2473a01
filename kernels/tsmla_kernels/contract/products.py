"""The arguments and results of products with block scales: block_scaled_matmul, grouped_block_scaled_matmul and
quantize_blocks.

Imports neither jax nor torch. Axes: T rows of activations, K terms of a sum, N columns of the result, E groups. Blocks
have 128 terms, of weights 128 x 128; K and N need not be whole blocks. Weights of e2m1 (MXFP4) are packed, two a byte,
and have a scale for 32 of a row. Groups may also have weights of 16 bits, without scales.
"""

from __future__ import annotations

import sys
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
"""Terms, and rows of e4m3 weights, that share a scale."""
PACKED, PACKED_BLOCK = "uint8", 32
"""The dtype of packed weights and of their scales' exponents, and how many weights of a row share a scale."""
LEAST_AMAX = 1e-10
"""A block's greatest magnitude is taken to be at least this, so that a block of zeros has a scale."""
INVERSE_MAX = 1 / FP8_MAX
"""A block's scale is this, rounded to float32, times its greatest magnitude: compilers divide by a constant in ways
that differ in the last bit, which decides how a value between two of e4m3 is rounded; they multiply in one way."""
PLAIN = ("bfloat16", "float16")
"""Dtypes of weights without scales, which are also those of their activations."""
QUANTIZED = ("float16", "bfloat16", "float32")
"""Dtypes that quantize_blocks takes, those of a product's result without scales, and of activations without scales."""


@dataclass(frozen=True)
class ProductSpec:
    """The static facts of one block_scaled_matmul call, or of a grouped one. x has scales if it is e4m3, and so has the
    result if it is e4m3.

    Attributes:
      num_rows: how many rows the result has. num_columns: how many rows the weight has.
      num_groups: None without groups.
      num_picked: how many rows x has, if `rows` picks the result's rows from them; else None.
      packed: whether the weight has two numbers of e2m1 in a byte. plain: whether it has x's 16 bits, and no scales.
      gated, limit: as in block_scaled_matmul.
    """

    num_rows: Dim
    num_terms: Dim
    num_columns: Dim
    num_groups: Dim | None
    out_dtype: str
    x_dtype: str = FP8
    gated: bool = False
    limit: float | None = None
    num_picked: Dim | None = None
    packed: bool = False
    plain: bool = False

    @property
    def out_columns(self) -> Dim:
        """Columns of the result."""
        return self.num_columns // 2 if self.gated else self.num_columns


@dataclass(frozen=True)
class QuantizeBlocksSpec:
    """The static facts of one quantize_blocks call."""

    shape: tuple[Dim, ...]
    in_dtype: str
    power_of_two: bool


def blocks_of(size: Dim) -> Dim:
    """How many blocks hold `size` terms or rows; the last block may be incomplete."""
    return -(-size // BLOCK)


def product_spec(
    *,
    x: Array,
    weight: Array,
    x_scales: Array | None,
    weight_scales: Array,
    gated: bool = False,
    limit: float | None = None,
    out_dtype: str = "bfloat16",
) -> ProductSpec:
    """The spec of block_scaled_matmul, or ValueError / TypeError naming the argument that is not legal."""
    return _spec(_Operands(x, weight, x_scales, weight_scales), _Form(gated, limit, out_dtype))


def grouped_product_spec(
    *,
    x: Array,
    weight: Array,
    x_scales: Array | None,
    weight_scales: Array | None,
    cu_rows: Array,
    rows: Array | None = None,
    gated: bool = False,
    limit: float | None = None,
    out_dtype: str = "bfloat16",
) -> ProductSpec:
    """The spec of grouped_block_scaled_matmul, or ValueError / TypeError naming the argument that is not legal."""
    return _spec(_Operands(x, weight, x_scales, weight_scales, cu_rows, rows), _Form(gated, limit, out_dtype))


@dataclass(frozen=True)
class _Operands:
    """The arrays of a product; cu_rows and rows are None without groups."""

    x: Array
    weight: Array
    x_scales: Array | None
    weight_scales: Array | None
    cu_rows: Array | None = None
    rows: Array | None = None


@dataclass(frozen=True)
class _Form:
    """The static arguments of a product."""

    gated: bool
    limit: float | None
    out_dtype: str


def _spec(operands: _Operands, form: _Form) -> ProductSpec:
    if operands.cu_rows is not None and operands.weight.dtype in PLAIN:
        return _plain_spec(operands, operands.cu_rows, form)
    x, weight, x_scales = operands.x, operands.weight, operands.x_scales
    weight_scales, cu_rows = operands.weight_scales, operands.cu_rows
    if weight_scales is None:
        check_dtype("weight", weight, (FP8, PACKED, *PLAIN))
        or_none = f"or None with a weight of {listed(PLAIN)}"  # only groups may have none
        raise ValueError(f"weight_scales: got None with a weight of {weight.dtype}; legal: an array, {or_none}")
    stack = "" if cu_rows is None else "E "
    check_array("x", x, "T K", (FP8, *QUANTIZED))
    check_at_least_one("x", x.shape, 1, "K")
    rows, terms = x.shape
    packed = weight.dtype == PACKED
    axes, of_scales = (f"{stack}N K/2", f"{stack}N K/32") if packed else (f"{stack}N K", f"{stack}N/128 K/128")
    check_rank("weight", weight, axes)
    check_dtype("weight", weight, (FP8, PACKED))
    groups: Dim = None
    if stack:
        check_rank("weight_scales", weight_scales, of_scales)
        groups = weight_scales.shape[0]
        check_at_least_one("weight_scales", weight_scales.shape, 0, "E")
        if isinstance(groups, int) and isinstance(weight.shape[0], int) and weight.shape[0] < groups:
            got = f"weight: got shape {show(weight.shape)}"
            raise ValueError(f"{got}; axis 0 must be at least {groups} (E, weight_scales' groups)")
    group_sizes = [(weight.shape[0], "E, weight's groups")] if stack else []
    columns = weight.shape[-2]
    check_at_least_one("weight", weight.shape, len(weight.shape) - 2, "N")
    in_row = (_half(x), "K / 2, of x's terms") if packed else (terms, "K, x's terms")
    check_array("weight", weight, axes, (FP8, PACKED), *group_sizes, (columns, "N"), in_row)
    blocks = (blocks_of(terms), "K / 128 rounded up")
    if x_scales is None:
        if packed and x.dtype == FP8:
            raise ValueError(f"x: got dtype {FP8} with a weight of {PACKED}; legal: {', '.join(QUANTIZED)}")
        if x.dtype == FP8:
            raise ValueError(f"x_scales: got None; legal: float32 [T, K/128] with x of {FP8}")
    elif packed:
        raise ValueError(f"x_scales: got an array with a weight of {PACKED}; legal: None, with x of 16 or 32 bits")
    elif x.dtype != FP8:
        raise ValueError(f"x_scales: got an array with x of {x.dtype}; legal: None")
    else:
        check_array("x_scales", x_scales, "T K/128", ("float32",), (rows, "T, x's rows"), blocks)
    rows_of_scales = (columns, "N") if packed else (blocks_of(columns), "N / 128 rounded up")
    if packed:
        blocks = (-(-terms // PACKED_BLOCK), "K / 32 rounded up")
    check_array(
        "weight_scales", weight_scales, of_scales, (PACKED if packed else "float32",),
        *([(groups, "E")] if stack else []), rows_of_scales, blocks,
    )  # fmt: skip
    if cu_rows is not None:
        check_array("cu_rows", cu_rows, "E + 1", ("int32",), (groups + 1, "E + 1, of weight_scales' groups"))
    return _checked_spec(operands, form, columns, groups, packed=packed)


def _plain_spec(operands: _Operands, cu_rows: Array, form: _Form) -> ProductSpec:
    """The spec of a grouped product with a weight of 16 bits, whose groups are those of cu_rows."""
    x, weight = operands.x, operands.weight
    check_array("x", x, "T K", (weight.dtype,))
    check_at_least_one("x", x.shape, 1, "K")
    for name, scales in (("x_scales", operands.x_scales), ("weight_scales", operands.weight_scales)):
        if scales is not None:
            raise ValueError(f"{name}: got an array with a weight of {weight.dtype}; legal: None")
    check_array("cu_rows", cu_rows, "E + 1", ("int32",))
    check_rank("weight", weight, "E N K")
    groups, (count, columns, _) = cu_rows.shape[0] - 1, weight.shape
    check_at_least_one("weight", weight.shape, 1, "N")
    check_array("weight", weight, "E N K", PLAIN, (count, "E"), (columns, "N"), (x.shape[1], "K, x's terms"))
    if isinstance(groups, int) and groups < 1:
        raise ValueError(f"cu_rows: got shape {show(cu_rows.shape)}; axis 0 must be at least 2 (E + 1)")
    if isinstance(groups, int) and isinstance(count, int) and count < groups:
        got = f"weight: got shape {show(weight.shape)}"
        raise ValueError(f"{got}; axis 0 must be at least {groups} (E, cu_rows' groups)")
    return _checked_spec(operands, form, columns, groups, plain=True)


def _checked_spec(
    operands: _Operands, form: _Form, columns: Dim, groups: Dim, *, packed: bool = False, plain: bool = False
) -> ProductSpec:
    """The spec of operands whose x, weight and scales are checked; checks `rows` and the form."""
    x = operands.x
    rows, terms = x.shape
    return ProductSpec(
        rows if operands.rows is None else _picked_rows(operands.rows, x),
        terms,
        columns,
        num_groups=groups,
        out_dtype=form.out_dtype,
        x_dtype=x.dtype,
        gated=form.gated,
        limit=_check_form(form, operands.weight),
        num_picked=None if operands.rows is None else rows,
        packed=packed,
        plain=plain,
    )


def _picked_rows(rows: Array, x: Array) -> Dim:
    """How many rows of x `rows` picks."""
    check_array("rows", rows, "R", ("int32",))
    check_at_least_one("x", x.shape, 0, "T, with rows")
    return rows.shape[0]


def _half(x: Array) -> Dim:
    """Bytes of a row of packed weights."""
    terms = x.shape[1]
    if not isinstance(terms, int) or terms % 2:
        raise ValueError(f"x: got shape {show(x.shape)}; K must be even, and static, with a weight of {PACKED}")
    return terms // 2


def _check_form(form: _Form, weight: Array) -> float | None:
    """Check the static arguments, and return the limit of a gated product."""
    columns, limit = weight.shape[-2], form.limit
    legal = (*QUANTIZED, FP8) if static_bool("gated", form.gated) else QUANTIZED
    if form.out_dtype not in legal:
        with_gated = "" if form.gated else f", and with gated {FP8!r}"
        names = listed([repr(name) for name in legal])
        raise ValueError(f"out_dtype: got {form.out_dtype!r}; legal: {names}{with_gated}")
    if form.gated and (columns % 2 if isinstance(columns, int) else True):
        raise ValueError(f"weight: got shape {show(weight.shape)}; N must be even, and static, with gated")
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        raise TypeError(f"limit: got {type(limit).__name__}; legal: None, or with gated a static number above 0")
    if not form.gated or not limit > 0 or (isinstance(limit, int) and limit > sys.float_info.max):
        got = limit if form.gated else f"{limit} without gated"
        raise ValueError(f"limit: got {got}; legal: None, or with gated a number above 0")
    return float(limit)


def quantize_blocks_spec(*, x: Array, power_of_two: bool = False) -> QuantizeBlocksSpec:
    """The spec of quantize_blocks, or ValueError / TypeError naming the argument that is not legal."""
    if not x.shape:
        raise ValueError("x: got shape [] of rank 0; legal: [..., K]")
    check_dtype("x", x, QUANTIZED)
    check_static_last("x", x)
    return QuantizeBlocksSpec(tuple(x.shape), x.dtype, static_bool("power_of_two", power_of_two))
