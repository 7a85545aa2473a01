"""block_scaled_matmul in portable XLA: block after block of terms, whose products of numbers of 16 bits are exact."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.block_scaled_matmul.reference import Result, finished, spread, unpacked
from tsmla_jax.ops.loops import carry
from tsmla_jax.ops.transforms import refuse_derivative
from tsmla_kernels.contract.products import BLOCK, ProductSpec, blocks_of

ALTERNATIVE = "use implementation='reference'"


def block_scaled_matmul(
    x: jax.Array, weight: jax.Array, x_scales: jax.Array | None, weight_scales: jax.Array, *, spec: ProductSpec
) -> Result:
    """The result as the public block_scaled_matmul documents it."""
    if spec.packed:
        weight, weight_scales = unpacked_blocks(weight, weight_scales)
    rows, columns = whole_blocks(x), whole_blocks(weight)

    def step(b: jax.Array, total: jax.Array) -> jax.Array:
        ours, theirs = (block_of(values, b).astype(narrow) for values in (rows, columns))
        product = jnp.matmul(ours, theirs.T, preferred_element_type=jnp.float32, precision=precision)
        scales = spread(lax.dynamic_index_in_dim(weight_scales, b, axis=1, keepdims=False), weight.shape[0], axis=0)
        if x_scales is not None:
            product *= lax.dynamic_slice_in_dim(x_scales, b, 1, axis=1)
        return total + product * scales

    narrow, precision = factors(x, spec)
    operands = [array for array in (x, weight, x_scales, weight_scales) if array is not None]
    start = carry(jnp.zeros((x.shape[0], weight.shape[0]), jnp.float32), *operands)
    total = lax.fori_loop(0, weight_scales.shape[1], step, start)
    refused: jax.Array = refuse_derivative(total, operands, "block_scaled_matmul", ALTERNATIVE)
    return finished(refused, spec)


def unpacked_blocks(weight: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Packed weights in bfloat16, which holds them exactly, and scales of 1 for their blocks of 128 x 128."""
    wide = unpacked(weight, scales).astype(jnp.bfloat16)
    blocks = (*weight.shape[:-2], blocks_of(weight.shape[-2]), blocks_of(wide.shape[-1]))
    return wide, jnp.ones(blocks, jnp.float32)


def factors(x: jax.Array, spec: ProductSpec) -> tuple[jnp.dtype, lax.Precision]:
    """The dtype to which x and the weights are converted for the product, and a precision at which neither loses bits.
    float16 x meets packed weights in float32: they may be too small or too large for float16."""
    if x.dtype == jnp.float32 or (spec.packed and x.dtype == jnp.float16):
        return jnp.dtype(jnp.float32), lax.Precision.HIGHEST
    return jnp.dtype(jnp.float16 if x.dtype == jnp.float16 else jnp.bfloat16), lax.Precision.DEFAULT


def whole_blocks(values: jax.Array) -> jax.Array:
    """Values [..., K] with zeros up to whole blocks of terms."""
    rest = -values.shape[-1] % BLOCK
    return jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, rest)]) if rest else values


def block_of(values: jax.Array, b: jax.Array) -> jax.Array:
    """The terms of block `b`, of values [..., K]."""
    return lax.dynamic_slice_in_dim(values, b * BLOCK, BLOCK, axis=-1)
