"""The definition of block_scaled_matmul: both operands as the numbers that they stand for, and one product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.quantize_blocks import reference
from tsmla_kernels.contract.products import BLOCK, PACKED, PACKED_BLOCK, ProductSpec, QuantizeBlocksSpec
from tsmla_kernels.contract.rules import FP8

Result = jax.Array | tuple[jax.Array, jax.Array]


def block_scaled_matmul(
    x: jax.Array, weight: jax.Array, x_scales: jax.Array | None, weight_scales: jax.Array, *, spec: ProductSpec
) -> Result:
    """The result as the public block_scaled_matmul documents it."""
    return finished(product(x, weight, x_scales, weight_scales), spec)


def product(
    x: jax.Array, weight: jax.Array, x_scales: jax.Array | None, weight_scales: jax.Array | None
) -> jax.Array:  # fmt: skip
    """The product itself, [T, N] float32. weight_scales: None if the weight has 16 bits."""
    if weight_scales is None:
        columns = weight.astype(jnp.float32)
    elif weight.dtype == PACKED:
        columns = unpacked(weight, weight_scales)
    else:
        columns = widened(weight, spread(weight_scales, weight.shape[0], axis=0))
    rows = widened(x, x_scales)
    return jnp.matmul(rows, columns.T, precision=lax.Precision.HIGHEST)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of e2m1 without their sign."""


def unpacked(weight: jax.Array, scales: jax.Array) -> jax.Array:
    """Packed weights [..., K / 2] of e2m1 times the powers of two [..., K / 32] that their scales' exponents give, in
    float32: [..., K]."""
    codes = jnp.stack([weight & 15, weight >> 4], axis=-1).reshape(*weight.shape[:-1], -1)
    values = jnp.array([*E2M1, *(-value for value in E2M1)], jnp.float32)[codes]
    return values * jnp.repeat(power(scales), PACKED_BLOCK, axis=-1)[..., : values.shape[-1]]


def power(exponents: jax.Array) -> jax.Array:
    """2 to the power of (exponents - 127), in float32; NaN for 255."""
    bits = exponents.astype(jnp.int32) << 23
    bits = jnp.where(exponents == 0, 1 << 22, jnp.where(exponents == 255, 0x7FC00000, bits))
    return lax.bitcast_convert_type(bits, jnp.float32)


def finished(product: jax.Array, spec: ProductSpec) -> Result:
    """The result of a call, made from its product [T, N] float32: gated if asked for, then rounded or quantised."""
    if spec.gated:
        gate, up = jnp.split(product, 2, axis=-1)
        if spec.limit is not None:
            gate, up = jnp.minimum(gate, spec.limit), jnp.clip(up, -spec.limit, spec.limit)
        product = jax.nn.silu(gate) * up
    if spec.out_dtype == FP8:
        blocks = QuantizeBlocksSpec(product.shape, "float32", power_of_two=False)
        return reference.quantize_blocks(product, spec=blocks)
    return product.astype(spec.out_dtype)


def widened(values: jax.Array, scales: jax.Array | None) -> jax.Array:
    """Values [..., K] times their scales [..., K / 128], if they have any, in float32."""
    wide = values.astype(jnp.float32)
    return wide if scales is None else wide * spread(scales, values.shape[-1], axis=-1)


def spread(scales: jax.Array, size: int, axis: int) -> jax.Array:
    """The scales, of 128 elements each, repeated along an axis: one for each of its `size` elements."""
    return lax.slice_in_dim(jnp.repeat(scales, BLOCK, axis=axis), 0, size, axis=axis % scales.ndim)
