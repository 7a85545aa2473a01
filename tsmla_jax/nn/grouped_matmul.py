"""Rows times the weights of their groups, as a kernel: the products of a mixture of experts.

Written in Pallas for GPUs (Triton). Rows are sorted by group and padded to blocks of one group each; a program of the
kernel makes a tile of one block. So every weight in use is read about once, however few the rows of its group, and no
weight of another group. Weights may be block-scaled: they are read in one byte and widened on the way.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tsmla_jax.nn.block_scaled import BLOCK, BlockScaled

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:
    # jax says that a release to come will have it no more.
    plgpu = None  # type: ignore[assignment]

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


class Blocks(NamedTuple):
    """Which rows make a block, and of which group.

    rows    [NB * block] i32, the row of x at each place; places without one have some row's number
    groups  [NB] i32, the group of each block; `num_groups` for a block without rows
    places  [T, K] i32, where each of a row's K groups has its place; past the last one for a row without groups
    num_groups  static
    """

    rows: jax.Array
    groups: jax.Array
    places: jax.Array
    num_groups: int


@dataclass(frozen=True)
class Tile:
    """The tile of a program.

    Attributes:
      columns: of the result.
      depth: terms of the sum that are loaded at once.
      warps, stages: of the program; loads run stages - 1 ahead.
      swapped: the tensor cores take the weights as their first factor, whose rows must be many, and x as the second.
    """

    columns: int
    depth: int
    warps: int
    stages: int
    swapped: bool = False


def why_not_kernel(dtype: Any, columns: int, depth: int, narrow: bool) -> list[str]:
    """Why `grouped_matmul` can't run a product on jax's default device; empty if it can.

    Args:
      dtype: of x.
      columns, depth: N and K.
      narrow: whether the weights are block-scaled.
    """
    if plgpu is None:
        return [f"jax {jax.__version__} has no Pallas for Triton"]
    if jax.default_backend() != "gpu":
        return [f"it is a kernel for NVIDIA GPUs; jax's default device is a {jax.default_backend()}"]
    legal = (jnp.bfloat16,) if narrow else (jnp.bfloat16, jnp.float16)
    if dtype not in legal:
        return [f"dtype is {jnp.dtype(dtype).name}; legal: {', '.join(jnp.dtype(one).name for one in legal)}"]
    if columns % 64 or depth % (BLOCK if narrow else 64):
        return [f"the weights are {columns} x {depth}; legal: multiples of 64 and of {BLOCK if narrow else 64}"]
    return []


def make_blocks(groups: jax.Array, num_groups: int, block: int) -> Blocks:
    """Sorts the pairs (row, group) of groups [T, K] i32 by group, each group's made whole blocks of `block` places.

    A pair whose group is num_groups has no place."""
    num_rows, most = groups.shape
    pairs = num_rows * most
    if num_rows == 1:
        # No two pairs of one row share a group.
        places = jnp.arange(most, dtype=jnp.int32)[None] * block
        return Blocks(jnp.zeros(pairs * block, jnp.int32), groups[0], places, num_groups)
    count = min(pairs, pairs // block + min(num_groups, pairs))
    flat = groups.reshape(pairs)
    order = jnp.arange(pairs, dtype=jnp.int32)
    if pairs <= 2048:
        # Comparing every pair with every other is one small kernel; a sort is many.
        rank = ((flat[:, None] == flat) & (order[:, None] > order)).sum(axis=1, dtype=jnp.int32)
        sizes = (flat[:, None] == jnp.arange(num_groups)).sum(axis=0, dtype=jnp.int32)
    else:
        sizes = jnp.zeros(num_groups + 1, jnp.int32).at[flat].add(1)
        sorted_pairs = jnp.argsort(flat, stable=True)
        begins = jnp.cumsum(sizes) - sizes
        rank = jnp.zeros(pairs, jnp.int32).at[sorted_pairs].set(order - begins[flat[sorted_pairs]])
        sizes = sizes[:num_groups]
    blocks = (sizes + block - 1) // block
    earlier = jnp.arange(num_groups)[:, None] > jnp.arange(num_groups)
    begins = (earlier * blocks).sum(axis=1, dtype=jnp.int32)
    places = jnp.where(flat < num_groups, begins[jnp.minimum(flat, num_groups - 1)] * block + rank, count * block)
    block_groups = (begins + blocks <= jnp.arange(count)[:, None]).sum(axis=1, dtype=jnp.int32)
    rows = jnp.zeros(count * block, jnp.int32).at[places].set(order // most, mode="drop")
    return Blocks(rows, block_groups, places.reshape(num_rows, most), num_groups)


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
      [NB * block, N] in x's dtype; places without a row hold something.
    """
    narrow = isinstance(weight, BlockScaled)
    columns = weight.shape[1] // (2 if gated else 1)
    block = blocks.rows.shape[0] // blocks.groups.shape[0]
    operands = (weight.values, weight.scales) if isinstance(weight, BlockScaled) else (weight,)
    return pl.pallas_call(
        functools.partial(_kernel, _Kind(blocks.num_groups, block, tile, gated, gather, limit, narrow)),
        grid=(blocks.groups.shape[0], columns // tile.columns),
        out_shape=jax.ShapeDtypeStruct((blocks.rows.shape[0], columns), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=jax.default_backend() == "cpu",
        name="grouped_matmul_gated" if gated else "grouped_matmul",
    )(blocks.rows, blocks.groups, x, *operands)


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
    index, column = pl.program_id(0), pl.program_id(1) * tile.columns
    group = groups_ref[index]
    places = pl.ds(index * block, block)

    @pl.when(group < kind.num_groups)
    def make_tile() -> None:
        rows = rows_ref[places] if kind.gather else index * block + jnp.arange(block, dtype=jnp.int32)

        def product(x: jax.Array, begin: Any, at: Any) -> jax.Array:
            part = plgpu.load(weight_ref.at[group, pl.ds(begin, tile.columns), pl.ds(at, tile.depth)])
            wide = _widen(part) if kind.narrow else part
            factors = (wide, x) if tile.swapped else (x, wide)
            out = plgpu.dot(*factors, trans_b=True)
            return out * scales[0][group, begin // BLOCK, at // BLOCK] if kind.narrow else out

        def add(step: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            at = step * tile.depth
            x = plgpu.load(x_ref.at[rows[:, None], (at + jnp.arange(tile.depth, dtype=jnp.int32))[None, :]])
            begins = (column, rows_of_weight // 2 + column) if kind.gated else (column,)
            return tuple(total + product(x, begin, at) for total, begin in zip(sums, begins, strict=True))

        zero = jnp.zeros((tile.columns, block) if tile.swapped else (block, tile.columns), jnp.float32)
        sums = lax.fori_loop(0, depth // tile.depth, add, (zero, zero) if kind.gated else (zero,))
        out = sums[0]
        if kind.gated:
            gate, up = sums
            if kind.limit is not None:
                gate, up = jnp.minimum(gate, kind.limit), jnp.clip(up, -kind.limit, kind.limit)
            out = gate / (1 + jnp.exp(-gate)) * up
        out = (out.T if tile.swapped else out).astype(out_ref.dtype)
        plgpu.store(out_ref.at[places, pl.ds(column, tile.columns)], out)


def _widen(values: jax.Array) -> jax.Array:
    """e4m3 to bf16. The compiler's own conversion goes through f32, one value at a time."""
    if jax.default_backend() == "cpu":
        return values.astype(jnp.bfloat16)
    (wide,) = plgpu.elementwise_inline_asm(
        _WIDEN,
        args=[values],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(values.shape, jnp.bfloat16)],
    )
    return wide
