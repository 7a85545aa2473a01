"""Products with weights that may be block-scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tsmla_jax.nn import batch_invariant
from tsmla_jax.nn.batch_invariant import BatchInvariant
from tsmla_jax.nn.products import grouped_matmul as grouped
from tsmla_jax.nn.products.block_scaled import BLOCK, BlockScaled, products_of, quantized, widened
from tsmla_jax.nn.products.grouped_matmul import grouped_matmul
from tsmla_jax.nn.products.row_blocks import Blocks
from tsmla_jax.nn.products.scaled_rows import scaled_rows
from tsmla_jax.nn.products.tiles import MANY_ROWS, MANY_WIDENED_ROWS, linear_tile
from tsmla_jax.ops.block_scaled_matmul.api import block_scaled_matmul

_MOST_SUMMED = 1 << 23
"""Elements of a matrix up to which XLA makes a row's product a sum along the matrix' rows, and widens them as it reads
them. For a larger one it calls a matrix product, and writes the whole matrix widened first: five times the bytes."""


def contract(x: jax.Array, weight: jax.Array | BlockScaled, axes: int = 1) -> jax.Array:
    """The product of x's last `axes` axes with the weight's first, or with the K of a block-scaled weight.

    Args:
      x: [..., *I].
      weight: [*I, *O], or block-scaled [N, K] with K = prod(I), for which the result is [..., N].

    Returns:
      [..., *O], in x's dtype if a plain weight has that dtype, too.
    """
    if isinstance(weight, BlockScaled):
        return linear(x.reshape(*x.shape[: x.ndim - axes], weight.shape[1]), weight)
    return jnp.tensordot(x, weight, axes=axes, out_sharding=_out_sharding(x, weight, axes))


def _out_sharding(x: jax.Array, weight: jax.Array, axes: int) -> NamedSharding | None:
    """Where the product goes if the axes that it sums over are split over a mesh's explicit axes: jax wants that said.
    None, and so jax's own choice, everywhere else."""
    left, right = jax.typeof(x).sharding, jax.typeof(weight).sharding
    if AxisType.Explicit not in right.mesh.axis_types or not any(right.spec[:axes]):
        return None
    return NamedSharding(right.mesh, PartitionSpec(*left.spec[: x.ndim - axes], *right.spec[axes:]))


def linear(x: jax.Array, weight: jax.Array | BatchInvariant | BlockScaled) -> jax.Array:
    """x [..., K] times the transpose of weight [N, K]: [..., N], in x's dtype if a plain weight has that dtype, too.

    A `BatchInvariant` weight goes to `batch_invariant.linear`, and XLA multiplies by a plain one.
    A block-scaled weight whose `products` is "quantized" goes to block_scaled_matmul, with quantised x. For any other
    block-scaled weight the first of these decides:
    - x has more than MANY_WIDENED_ROWS rows; or it has one row, `products` is None and the matrix has at most
      _MOST_SUMMED elements: XLA widens the weight to x's dtype, and multiplies.
    - `products_of` is "exact": block_scaled_matmul, whose kernel widens the weight as it reads it. Without the kernel
      XLA multiplies block by block and then by the blocks' scales.
    - x has at most MANY_ROWS rows, and `grouped_matmul` can run: its kernel, which widens the weight as it reads it.
    - Otherwise XLA widens the weight to x's dtype, and multiplies.
    """
    if isinstance(weight, BatchInvariant):
        return batch_invariant.linear(x, weight.values)
    if not isinstance(weight, BlockScaled):
        return x @ weight.T
    rows, (columns, depth) = math.prod(x.shape[:-1]), weight.shape
    if by_scaled_products(rows, weight, x.dtype):
        values, scales = quantized(x.reshape(rows, depth), weight)
        out = scaled_product(values, scales, weight, out_dtype=x.dtype.name)
        return cast(jax.Array, out).reshape(*x.shape[:-1], -1)
    if _by_xla(rows, weight) or rows > MANY_ROWS or grouped.why_not(x.dtype, columns, depth, narrow=True):
        return x @ weight.widened(x.dtype).T
    out = linear_by_kernel(x.reshape(rows, depth), weight)
    return out.reshape(*x.shape[:-1], columns)


def _by_xla(rows: int, weight: BlockScaled) -> bool:
    """Whether a product of so many rows is left to XLA even where a kernel could run, unless it is quantised: with many
    rows, or with one row times a small matrix whose `products` is None."""
    summed = rows == 1 and math.prod(weight.shape) <= _MOST_SUMMED and weight.products is None
    return summed or rows > MANY_WIDENED_ROWS


def by_scaled_products(rows: int, weight: BlockScaled, dtype: Any) -> bool:
    """Whether `linear` of so many rows of this dtype is block_scaled_matmul."""
    products = products_of(weight, dtype)
    return products == "quantized" or (products == "exact" and not _by_xla(rows, weight))


def scaled_product(
    values: jax.Array, scales: jax.Array | None, weight: BlockScaled, **form: Any
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """block_scaled_matmul of values [T, K], and their scales if they have any, with a weight.

    form: its options.
    """
    return block_scaled_matmul(values, weight.values, scales, weight.scales, **form)


def linear_by_kernel(x: jax.Array, weight: BlockScaled) -> jax.Array:
    """`linear` of x [T, K] and a block-scaled weight [N, K] by the kernel of `grouped_matmul`, as its only group."""
    rows = x.shape[0]
    if not rows:
        return jnp.zeros((0, weight.shape[0]), x.dtype)
    block, tile = linear_tile(rows, *weight.shape)
    places = jnp.minimum(jnp.arange(-(-rows // block) * block, dtype=jnp.int32), rows - 1)
    blocks = Blocks(places, jnp.zeros(places.shape[0] // block, jnp.int32), places[:rows, None], 1)
    stack = replace(weight, values=weight.values[None], scales=weight.scales[None])
    out = grouped_matmul(scaled_rows(x) if tile.half else x, stack, blocks, tile, gather=True)
    return cast(jax.Array, out)[:rows]


def product(params: Mapping[str, Any], name: str, x: jax.Array) -> jax.Array:
    """x [..., K] times the layer's matrix `name`: [..., *O] if the matrix is [K, *O], or [..., N] if the layer is
    folded and the matrix [N, K]. Folded layers have an in_proj."""
    return linear(x, params[name]) if "in_proj" in params else contract(x, params[name])


def rows_of(weight: jax.Array | BlockScaled, inputs: int = 1) -> jax.Array | BlockScaled:
    """A weight [*I, *O], of `inputs` axes I, as [prod(O), prod(I)]; a block-scaled one is so already."""
    if isinstance(weight, BlockScaled):
        return weight
    return weight.reshape(math.prod(weight.shape[:inputs]), -1).T


def weight_of(rows: jax.Array | BlockScaled, *shape: int) -> jax.Array | BlockScaled:
    """The inverse of `rows_of`: the weight of this shape, [*I, *O]; a block-scaled one stays [N, K]."""
    return rows if isinstance(rows, BlockScaled) else rows.T.reshape(shape)


def split_rows(weight: jax.Array | BlockScaled, first: int) -> tuple[jax.Array | BlockScaled, jax.Array | BlockScaled]:
    """The two weights that `joined_rows` joined. `first` is how many rows the first one has or, if negative, minus the
    rows of the second."""
    if not isinstance(weight, BlockScaled):
        return weight[:first], weight[first:]
    first %= weight.shape[0]
    blocks = first // BLOCK
    return (
        replace(weight, values=weight.values[:first], scales=weight.scales[:blocks]),
        replace(weight, values=weight.values[first:], scales=weight.scales[blocks:]),
    )


def joined_rows(weights: Sequence[jax.Array | BlockScaled]) -> jax.Array | BlockScaled:
    """Weights [N1, K], [N2, K], ... as one [N1 + N2 + ..., K]; block-scaled if all are, and all but the last have whole
    blocks. Otherwise block-scaled ones are widened to the dtype of the first plain weight, or to bfloat16."""
    whole = all(weight.shape[0] % BLOCK == 0 for weight in weights[:-1])
    if whole and all(isinstance(weight, BlockScaled) for weight in weights):
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *weights)
    dtype = next((weight.dtype for weight in weights if isinstance(weight, jax.Array)), jnp.bfloat16)
    return jnp.concatenate([widened(weight, dtype) for weight in weights])
