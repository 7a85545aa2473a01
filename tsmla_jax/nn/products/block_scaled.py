"""Weights in e4m3 with a scale for every block of 128 x 128, as DeepSeek-V3's checkpoints hold them.

They stay narrow on the device: a product reads one byte for each weight and widens it in registers, and a product of
many rows may widen the whole matrix first. If the weight's `products` is "quantized", activations are quantised, as in
the inference code that comes with the model, and the kernel widens no weight. Source: DeepSeek-V3 (arXiv:2412.19437),
section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from tsmla_jax.nn.products.mxfp4 import MXFP4
from tsmla_jax.ops.block_scaled_matmul.api import OPERATION as BLOCK_SCALED_MATMUL
from tsmla_jax.ops.exporting import exportable
from tsmla_jax.ops.quantize_blocks.api import quantize_blocks
from tsmla_kernels.contract.products import ProductSpec

BLOCK = 128
PRODUCTS = (None, "quantized", "exact")
"""How products with block-scaled weights are computed; see BlockScaled."""


def stack_size(count: int, rows: int, columns: int) -> int:
    """The length of a stack of `count` e4m3 weights [rows, columns] with its padding: at least count.

    The compiler of `grouped_matmul` counts the elements of an array of at most 2^32 bytes in signed 32 bits. A stack
    with more than 2^31 and at most 2^32 elements gets unused weights at its end, so that its elements are counted in 64
    bits."""
    size = count * rows * columns
    return 2**32 // (rows * columns) + 1 if 2**31 < size <= 2**32 else count


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockScaled:
    """A weight of 2 axes, or a stack of them: values [..., N, K] float8_e4m3fn, and scales f32 [..., N / 128, K / 128]
    (rounded up), that multiply them.

    Attributes:
      values, scales: those arrays; K is the axis that a product sums over.
      products: how products with the weight are computed. "quantized": by block_scaled_matmul (a stack's by
        grouped_block_scaled_matmul), with activations quantised to e4m3 with a scale for 128 terms. "exact": by the
        same operations, with activations as they are; `linear` leaves many rows to XLA, and products of few tokens may
        be kernels of `nn.few_tokens`. None: as "exact" where the kernel of block_scaled_matmul is chosen
        (`products_of`), but one row times a small matrix is left to XLA; elsewhere by `grouped_matmul` or XLA.
    """

    values: jax.Array
    scales: jax.Array
    products: str | None = field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.values.shape

    def widened(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The values times their scales, [..., N, K]: multiplied in f32, then converted to `dtype`."""
        rows, columns = self.values.shape[-2:]
        scales = jnp.repeat(jnp.repeat(self.scales, BLOCK, axis=-2)[..., :rows, :], BLOCK, axis=-1)[..., :columns]
        return (self.values.astype(jnp.float32) * scales).astype(dtype)


def widened(weight: jax.Array | BlockScaled | MXFP4, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The weight, widened to `dtype` if it is block-scaled or MXFP4; any other array is returned as it is."""
    return weight.widened(dtype) if isinstance(weight, BlockScaled | MXFP4) else weight


def why_not_by_kernel(dtype: Any, columns: int, depth: int) -> list[str]:
    """Why the kernel of block_scaled_matmul can't run, or isn't chosen for, exact products on jax's default device;
    empty if it is chosen.

    Args:
      dtype: the dtype of the activations.
      columns, depth: N and K.
    """
    name = jnp.dtype(dtype).name
    return BLOCK_SCALED_MATMUL.why_not("cute", ProductSpec(1, depth, columns, None, name, name), named=False)


def products_of(weight: BlockScaled, dtype: Any) -> str | None:
    """How products of activations of this dtype with a weight are computed: its `products`; if that is None, "exact" by
    the kernel of block_scaled_matmul where that is chosen, else None."""
    if weight.products is None and not why_not_by_kernel(dtype, *weight.shape[-2:]):
        return "exact"
    return weight.products


def quantized(x: jax.Array, weight: BlockScaled) -> tuple[jax.Array, jax.Array | None]:
    """x [..., K] as a product with `weight` takes it: its values, and their scales if they are quantised."""
    return quantize_blocks(x) if weight.products == "quantized" else (x, None)


def with_products(params: Any, products: str | None) -> Any:
    """The pytree `params` with `products` set in each of its block-scaled weights; ValueError unless it is one of
    PRODUCTS."""
    if products not in PRODUCTS:
        raise ValueError(f"products: got {products!r}; legal: {', '.join(map(repr, PRODUCTS))}")

    def one(leaf: Any) -> Any:
        return replace(leaf, products=products) if isinstance(leaf, BlockScaled) else leaf

    return jax.tree.map(one, params, is_leaf=lambda leaf: isinstance(leaf, BlockScaled))
