"""Rows times the weights of their groups, as a kernel: the products of a mixture of experts.

Written in Pallas for GPUs (Triton). Rows are sorted by group and padded to blocks of one group each; a program of the
kernel makes a tile of one block. The weights of a group without rows are not read. Weights may be block-scaled: they
are read as bytes and widened in registers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tsmla_jax.nn.products import triton
from tsmla_jax.nn.products.block_scaled import BLOCK, BlockScaled
from tsmla_jax.nn.products.row_blocks import Blocks
from tsmla_jax.nn.products.scaled_rows import ScaledRows, scaled
from tsmla_jax.nn.products.tiles import Tile, fitting_stages
from tsmla_jax.nn.products.triton import compute_capability, dot, plgpu, shared_memory


def _moved(right: int, kept: str, multiply: str) -> str:
    """PTX that widens four e4m3 values to 16 bits. It moves their bits to their places, which makes each value, also a
    subnormal, smaller by a power of two. The instructions of `multiply` make up for that power."""
    return f"""{{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, {right};
shr.u32 d, b, {right};
and.b32 c, c, {kept};
and.b32 d, d, {kept};
lop3.b32 c, a, 0x80008000, c, 0xea;
lop3.b32 d, b, 0x80008000, d, 0xea;
{multiply}
}}"""


# For bf16 the power is 2^-120. An A100 multiplies two bf16 only in an instruction that also adds: it adds -0.
_WIDEN = _moved(
    4,
    "0x07f007f0",
    """mov.b32 a, 0x7b807b80;
mov.b32 b, 0x80008000;
fma.rn.bf16x2 $0, c, a, b;
fma.rn.bf16x2 $1, d, a, b;""",
)

# The hardware converts e4m3 to f16: two instructions for four values instead of ten.
_WIDEN_TO_F16 = """{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}"""

# For GPUs without that conversion, such as the A100: the power is 2^-8.
_MOVE_TO_F16 = _moved(
    1,
    "0x3f803f80",
    """mov.b32 a, 0x5c005c00;
mul.rn.f16x2 $0, c, a;
mul.rn.f16x2 $1, d, a;""",
)
_KNOWS_E4M3 = 8, 9


def why_not(dtype: Any, columns: int, depth: int, narrow: bool) -> list[str]:
    """Why `grouped_matmul` can't run a product on jax's default device; empty if it can.

    Args:
      dtype: the dtype of x.
      columns, depth: N and K.
      narrow: whether the weights are block-scaled.
    """
    name, legal = jnp.dtype(dtype).name, ("bfloat16",) if narrow else ("bfloat16", "float16")
    multiple = BLOCK if narrow else 64
    sizes = f"the weights are {columns} x {depth}; legal: multiples of 64 and of {multiple}"
    return triton.why_not(
        (name not in legal, f"dtype is {name}; legal: {', '.join(legal)}"), (columns % 64 or depth % multiple, sizes)
    )


def grouped_matmul(
    x: jax.Array | ScaledRows,
    weight: jax.Array | BlockScaled,
    blocks: Blocks,
    tile: Tile,
    *,
    gated: bool = False,
    gather: bool = False,
    limit: float | None = None,
) -> jax.Array | ScaledRows:
    """Every place's row times the transpose of its group's weight.

    Args:
      x: [T, K], with `gather`, where blocks.rows names the row at each place; else [NB * block, K], a row a place. With
        tile.half, and only then, `ScaledRows`, whose scales are for BLOCK columns or a divisor of that.
      weight: [G, N, K], of at least blocks.num_groups groups.
      blocks: as `make_blocks` makes them, with a block of at least 16.
      tile: the tile of a program.
      gather: whether x has rows that `blocks` names, and not a row for each place.
      gated: whether the result is silu(gate) * up, of N / 2 columns: gate is the product with the first N / 2 rows of
        the group's weight, up the one with its last N / 2 rows.
      limit: if gated, `gate` is clipped to at most limit, and `up` to [-limit, limit]; None means no limit.

    Returns:
      [NB * block, N] in x's dtype, or gated [NB * block, N / 2]. With tile.half products are bf16, and gated ones
      `ScaledRows`, with a scale for every tile.columns. Places without a row hold any values.

    Raises:
      ValueError: tile.half with weights that aren't block-scaled, or with another x than `ScaledRows`; `ScaledRows`
        without tile.half; tile.splits with a gated product, or that doesn't divide the K / tile.depth loads of a sum.
    """
    narrow = isinstance(weight, BlockScaled)
    values, *row_scales = x if isinstance(x, ScaledRows) else (x,)
    if tile.half != bool(row_scales) or (tile.half and not narrow):
        given = (
            f"x of {'ScaledRows' if row_scales else values.dtype} and {'block-scaled' if narrow else 'plain'} weights"
        )
        legal = "True, with ScaledRows and block-scaled weights; or False, with an array x"
        raise ValueError(f"tile.half: got {tile.half} with {given}; legal: {legal}")
    columns, steps = weight.shape[1] // (2 if gated else 1), weight.shape[2] // tile.depth
    if steps % tile.splits or (gated and tile.splits > 1):
        got = f"{tile.splits} with {steps} loads and gated={gated}"
        raise ValueError(f"tile.splits: got {got}; legal: a divisor of the loads, 1 if gated")
    block = blocks.rows.shape[0] // max(1, blocks.groups.shape[0])
    operands = (weight.values, weight.scales) if isinstance(weight, BlockScaled) else (weight,)
    stages = fitting_stages(tile, block, operands[0].dtype.itemsize, gated=gated, most=shared_memory())
    kind = _Kind(
        num_groups=blocks.num_groups,
        block=block,
        tile=tile,
        gated=gated,
        gather=gather,
        limit=limit,
        narrow=narrow,
        width=min(x.width, tile.depth) if isinstance(x, ScaledRows) else tile.depth,
    )
    dtype = (jnp.float16 if gated else jnp.bfloat16) if tile.half else values.dtype
    places = blocks.rows.shape[0]
    shapes = [jax.ShapeDtypeStruct((tile.splits, places, columns), dtype if tile.splits == 1 else jnp.float32)]
    if tile.half and gated:
        shapes.append(jax.ShapeDtypeStruct((places, columns // tile.columns), jnp.float32))
    if not places:
        none = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
        return ScaledRows(none[0][0], none[1]) if len(none) > 1 else none[0][0].astype(dtype)
    out, *scales = pl.pallas_call(
        functools.partial(_kernel, kind),
        grid=(blocks.groups.shape[0], columns // tile.columns, tile.splits),
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=stages),
        interpret=jax.default_backend() == "cpu",
        name="grouped_matmul_gated" if gated else "grouped_matmul",
    )(blocks.rows, blocks.groups, values, *row_scales, *operands)
    if scales:
        return ScaledRows(out[0], scales[0])
    return out[0] if tile.splits == 1 else out.sum(axis=0).astype(dtype)


@dataclass(frozen=True)
class _Kind:
    """The static part of a kernel: how many groups there are, places of a block, arguments of `grouped_matmul`, whether
    the weights are block-scaled (`narrow`), and how many columns of x are multiplied at a time (`width`)."""

    num_groups: int
    block: int
    tile: Tile
    gated: bool
    gather: bool
    limit: float | None
    narrow: bool
    width: int


def _kernel(kind: _Kind, rows_ref: Any, groups_ref: Any, x_ref: Any, *others: Any) -> None:
    """Compute one tile of the product.

    others: the scales of x if tile.half is set, the weight, the weight's scales if the weight is narrow, the product,
    and the product's scales if tile.half and gated are set.
    """
    tile, block, narrow = kind.tile, kind.block, kind.narrow
    row_scales, others = others[: int(tile.half)], others[int(tile.half) :]
    weight_ref, scales, results = others[0], others[1 : 1 + int(narrow)], others[1 + int(narrow) :]
    _, rows_of_weight, depth = weight_ref.shape
    index, tile_column, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    column = tile_column * tile.columns
    group = groups_ref[index]
    places = pl.ds(index * block, block)

    @pl.when(group < kind.num_groups)
    def make_tile() -> None:
        rows = index * block + jnp.arange(block, dtype=jnp.int32)
        if kind.gather:
            # A place without a row may hold any number.
            rows = jnp.clip(rows_ref[places], 0, x_ref.shape[0] - 1)

        def product(x: jax.Array, row_scale: Any, begin: Any, at: Any) -> jax.Array:
            values = plgpu.load(weight_ref.at[group, pl.ds(begin, tile.columns), pl.ds(at, kind.width)])
            out = dot(x, _widen(values, x.dtype) if narrow else values, trans_b=True)
            if not narrow:
                return out
            scale = scales[0][group, begin // BLOCK, at // BLOCK]
            return out * (scale if row_scale is None else (row_scale * scale)[:, None])

        def add(step: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            begins = (column, rows_of_weight // 2 + column) if kind.gated else (column,)
            for piece in range(tile.depth // kind.width):
                at, row_scale = step * tile.depth + piece * kind.width, None
                x = plgpu.load(x_ref.at[rows[:, None], (at + jnp.arange(kind.width, dtype=jnp.int32))[None, :]])
                if row_scales:
                    row_scale = plgpu.load(row_scales[0].at[rows, at * row_scales[0].shape[1] // depth])
                sums = tuple(
                    total + product(x, row_scale, begin, at) for total, begin in zip(sums, begins, strict=True)
                )
            return sums

        zero = jnp.zeros((block, tile.columns), jnp.float32)
        share = depth // tile.depth // tile.splits
        first = part * share
        sums = lax.fori_loop(first, first + share, add, (zero, zero) if kind.gated else (zero,))
        out = sums[0]
        if kind.gated:
            gate, up = sums
            if kind.limit is not None:
                gate, up = jnp.minimum(gate, kind.limit), jnp.clip(up, -kind.limit, kind.limit)
            out = gate / (1 + jnp.exp(-gate)) * up
            if tile.half:
                out, out_scale = scaled(out)
                results[1][places, tile_column] = out_scale
        mask = None
        if kind.gather and kind.num_groups == 1 and tile.splits > 1:
            # A single group's rows come first, and nobody reads the results of the places after them.
            written = index * block + jnp.arange(block, dtype=jnp.int32) < x_ref.shape[0]
            mask = jnp.broadcast_to(written[:, None], out.shape)
        target = results[0].at[part, places, pl.ds(column, tile.columns)]
        plgpu.store(target, out.astype(results[0].dtype), mask=mask)


def _widen(values: jax.Array, dtype: Any) -> jax.Array:
    """Widen e4m3 to bf16 or f16. The compiler's own conversion goes through f32, one value at a time."""
    if jax.default_backend() == "cpu":
        return values.astype(dtype)
    to_f16 = _WIDEN_TO_F16 if compute_capability() >= _KNOWS_E4M3 else _MOVE_TO_F16
    (wide,) = plgpu.elementwise_inline_asm(
        to_f16 if dtype == jnp.float16 else _WIDEN,
        args=[values],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(values.shape, dtype)],
    )
    return wide
