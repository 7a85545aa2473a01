"""block_scaled_matmul in portable XLA: block after block of terms, whose products of numbers of 16 bits are exact."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.block_scaled_matmul.reference import Result, finished, spread
from tsmla_jax.ops.loops import carry
from tsmla_jax.ops.transforms import refuse_derivative
from tsmla_kernels.contract.products import BLOCK, ProductSpec

ALTERNATIVE = "use implementation='reference'"


def block_scaled_matmul(
    x: jax.Array, weight: jax.Array, x_scales: jax.Array | None, weight_scales: jax.Array, *, spec: ProductSpec
) -> Result:
    """out [T, N] as the public block_scaled_matmul documents it."""
    rows, columns = whole_blocks(x), whole_blocks(weight)

    def step(b: jax.Array, total: jax.Array) -> jax.Array:
        ours, theirs = (block_of(values, b).astype(narrow) for values in (rows, columns))
        product = jnp.matmul(ours, theirs.T, preferred_element_type=jnp.float32, precision=precision)
        scales = spread(lax.dynamic_index_in_dim(weight_scales, b, axis=1, keepdims=False), weight.shape[0], axis=0)
        if x_scales is not None:
            product *= lax.dynamic_slice_in_dim(x_scales, b, 1, axis=1)
        return total + product * scales

    narrow, precision = factors(x)
    operands = [array for array in (x, weight, x_scales, weight_scales) if array is not None]
    start = carry(jnp.zeros((x.shape[0], weight.shape[0]), jnp.float32), *operands)
    total = lax.fori_loop(0, weight_scales.shape[1], step, start)
    refused: jax.Array = refuse_derivative(total, operands, "block_scaled_matmul", ALTERNATIVE)
    return finished(refused, spec)


def factors(x: jax.Array) -> tuple[jnp.dtype, lax.Precision]:
    """The dtype in which x is multiplied with e4m3, and the precision that loses nothing of it."""
    if x.dtype == jnp.float32:
        return x.dtype, lax.Precision.HIGHEST
    return jnp.dtype(jnp.float16 if x.dtype == jnp.float16 else jnp.bfloat16), lax.Precision.DEFAULT


def whole_blocks(values: jax.Array) -> jax.Array:
    """Values [..., K] with zeros up to whole blocks of terms."""
    rest = -values.shape[-1] % BLOCK
    return jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, rest)]) if rest else values


def block_of(values: jax.Array, b: jax.Array) -> jax.Array:
    """The terms of block `b`, of values [..., K]."""
    return lax.dynamic_slice_in_dim(values, b * BLOCK, BLOCK, axis=-1)
