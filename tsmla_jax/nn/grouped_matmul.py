"""Rows times the weights of their groups, as a kernel: the products of a mixture of experts.

Written in Pallas for GPUs (Triton). Rows are sorted by group and padded to blocks of one group each; a program of the
kernel makes a tile of one block. So every weight in use is read about once, however few the rows of its group, and no
weight of another group. Weights may be block-scaled: they are read in one byte and widened on the way.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tsmla_jax.nn.block_scaled import BLOCK, BlockScaled
from tsmla_jax.nn.row_blocks import Blocks
from tsmla_jax.nn.tiles import Tile
from tsmla_jax.nn.triton import plgpu, why_no_triton

# Four e4m3 values become four bf16: the bits moved to their places are the value times 2^-120, also of subnormals.
_WIDEN = """{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
and.b32 c, c, 0x07f007f0;
and.b32 d, d, 0x07f007f0;
lop3.b32 c, a, 0x80008000, c, 0xea;
lop3.b32 d, b, 0x80008000, d, 0xea;
mov.b32 a, 0x7b807b80;
mul.rn.bf16x2 $0, c, a;
mul.rn.bf16x2 $1, d, a;
}"""


# The same in f16, which the hardware knows: two instructions for four values instead of ten.
_WIDEN_TO_F16 = """{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}"""

HALF_SCALE = 2.0**-4
"""f16 activations are multiplied by it: they reach 2^20, and near 0 their steps are 2^-20."""


def halved(x: jax.Array) -> jax.Array:
    """Activations x of any shape as f16 that a product with `Tile.half` takes: x * HALF_SCALE. Eleven bits of each
    value are kept, three more than bf16 has. What is greater than 2^20 becomes infinite, and its product not finite."""
    return (x.astype(jnp.float32) * HALF_SCALE).astype(jnp.float16)


def why_not_kernel(dtype: Any, columns: int, depth: int, narrow: bool) -> list[str]:
    """Why `grouped_matmul` can't run a product on jax's default device; empty if it can.

    Args:
      dtype: of x.
      columns, depth: N and K.
      narrow: whether the weights are block-scaled.
    """
    if reasons := why_no_triton():
        return reasons
    legal = (jnp.bfloat16,) if narrow else (jnp.bfloat16, jnp.float16)
    if dtype not in legal:
        return [f"dtype is {jnp.dtype(dtype).name}; legal: {', '.join(jnp.dtype(one).name for one in legal)}"]
    if columns % 64 or depth % (BLOCK if narrow else 64):
        return [f"the weights are {columns} x {depth}; legal: multiples of 64 and of {BLOCK if narrow else 64}"]
    return []


def grouped_matmul(
    x: jax.Array,
    weight: jax.Array | BlockScaled,
    blocks: Blocks,
    tile: Tile,
    *,
    gated: bool = False,
    gather: bool = False,
    limit: float | None = None,
) -> jax.Array:
    """Every place's row times its group's weight.

    Args:
      x: [T, K], with `gather`, where blocks.rows names the row at each place; else [NB * block, K], a row a place.
      weight: [G, N, K], of at least blocks.num_groups groups.
      blocks: of `make_blocks`, with a block of at least 16.
      gated: the weight's first half and its second make silu(x first) * (x second), of N / 2 columns.
      limit: of `gated_mlp`.

    Returns:
      [NB * block, N] in x's dtype; places without a row hold something. With tile.half x is f16 (`halved`), gated
      products are so, too, and others are bf16.

    Raises:
      ValueError: tile.half with weights that aren't block-scaled, or with x of another dtype than f16; tile.splits with
        a gated product, or that doesn't divide the K / tile.depth loads of a sum.
    """
    narrow = isinstance(weight, BlockScaled)
    if tile.half and not (narrow and x.dtype == jnp.float16):
        raise ValueError(f"{tile.half=} with x of {x.dtype}; legal: x of float16 and block-scaled weights")
    columns, steps = weight.shape[1] // (2 if gated else 1), weight.shape[2] // tile.depth
    if steps % tile.splits or (gated and tile.splits > 1):
        raise ValueError(f"{tile.splits=} of {steps} loads, {gated=}; legal: a divisor of the loads, 1 if gated")
    block = blocks.rows.shape[0] // blocks.groups.shape[0]
    operands = (weight.values, weight.scales) if isinstance(weight, BlockScaled) else (weight,)
    dtype = jnp.bfloat16 if tile.half and not gated else x.dtype
    out = pl.pallas_call(
        functools.partial(_kernel, _Kind(blocks.num_groups, block, tile, gated, gather, limit, narrow)),
        grid=(blocks.groups.shape[0], columns // tile.columns, tile.splits),
        out_shape=jax.ShapeDtypeStruct(
            (tile.splits, blocks.rows.shape[0], columns), dtype if tile.splits == 1 else jnp.float32
        ),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=jax.default_backend() == "cpu",
        name="grouped_matmul_gated" if gated else "grouped_matmul",
    )(blocks.rows, blocks.groups, x, *operands)
    return out[0] if tile.splits == 1 else out.sum(axis=0).astype(dtype)


@dataclass(frozen=True)
class _Kind:
    """The static part of a kernel: groups, places of a block, and arguments of `grouped_matmul`."""

    num_groups: int
    block: int
    tile: Tile
    gated: bool
    gather: bool
    limit: float | None
    narrow: bool


def _kernel(kind: _Kind, rows_ref: Any, groups_ref: Any, x_ref: Any, weight_ref: Any, *others: Any) -> None:
    """One tile. others: the scales of a narrow weight, and the result."""
    *scales, out_ref = others
    tile, block = kind.tile, kind.block
    _, rows_of_weight, depth = weight_ref.shape
    index, column, part = pl.program_id(0), pl.program_id(1) * tile.columns, pl.program_id(2)
    group = groups_ref[index]
    places = pl.ds(index * block, block)

    @pl.when(group < kind.num_groups)
    def make_tile() -> None:
        rows = index * block + jnp.arange(block, dtype=jnp.int32)
        if kind.gather:
            # A place without a row may hold any number.
            rows = jnp.clip(rows_ref[places], 0, x_ref.shape[0] - 1)

        def product(x: jax.Array, begin: Any, at: Any) -> jax.Array:
            values = plgpu.load(weight_ref.at[group, pl.ds(begin, tile.columns), pl.ds(at, tile.depth)])
            out = plgpu.dot(x, _widen(values, x.dtype) if kind.narrow else values, trans_b=True)
            return out * scales[0][group, begin // BLOCK, at // BLOCK] if kind.narrow else out

        def add(step: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            at = step * tile.depth
            x = plgpu.load(x_ref.at[rows[:, None], (at + jnp.arange(tile.depth, dtype=jnp.int32))[None, :]])
            begins = (column, rows_of_weight // 2 + column) if kind.gated else (column,)
            return tuple(total + product(x, begin, at) for total, begin in zip(sums, begins, strict=True))

        zero = jnp.zeros((block, tile.columns), jnp.float32)
        share = depth // tile.depth // tile.splits
        first = part * share
        sums = lax.fori_loop(first, first + share, add, (zero, zero) if kind.gated else (zero,))
        if tile.half:
            sums = tuple(total / HALF_SCALE for total in sums)
        out = sums[0]
        if kind.gated:
            gate, up = sums
            if kind.limit is not None:
                gate, up = jnp.minimum(gate, kind.limit), jnp.clip(up, -kind.limit, kind.limit)
            out = gate / (1 + jnp.exp(-gate)) * up
            out = halved(out) if tile.half else out
        mask = None
        if kind.gather and kind.num_groups == 1 and tile.splits > 1:
            # One group's rows come first, and nobody adds the parts of the places behind them.
            written = index * block + jnp.arange(block, dtype=jnp.int32) < x_ref.shape[0]
            mask = jnp.broadcast_to(written[:, None], out.shape)
        target = out_ref.at[part, places, pl.ds(column, tile.columns)]
        plgpu.store(target, out.astype(out_ref.dtype), mask=mask)


def _widen(values: jax.Array, dtype: Any) -> jax.Array:
    """e4m3 to bf16 or f16. The compiler's own conversion goes through f32, one value at a time."""
    if jax.default_backend() == "cpu":
        return values.astype(dtype)
    (wide,) = plgpu.elementwise_inline_asm(
        _WIDEN_TO_F16 if dtype == jnp.float16 else _WIDEN,
        args=[values],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(values.shape, dtype)],
    )
    return wide
