"""The definition of grouped_block_scaled_matmul: every row times every group's weight, and of these its own."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.ops.block_scaled_matmul import reference
from tsmla_jax.ops.loops import carry
from tsmla_kernels.contract.products import ProductSpec


def grouped_block_scaled_matmul(
    x: jax.Array,
    weight: jax.Array,
    x_scales: jax.Array | None,
    weight_scales: jax.Array,
    cu_rows: jax.Array,
    *,
    spec: ProductSpec,
) -> jax.Array:
    """out [T, N] as the public grouped_block_scaled_matmul documents it."""
    dense = dataclasses.replace(spec, num_groups=None)
    row = jnp.arange(x.shape[0], dtype=jnp.int32)

    def add(out: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        values, scales, begin, end = group
        product = reference.block_scaled_matmul(x, values, x_scales, scales, spec=dense)
        own = (row >= begin) & (row < end)
        return jnp.where(own[:, None], product, out), None

    start = jnp.zeros((x.shape[0], weight.shape[1]), spec.out_dtype)
    operands = (weight[: weight_scales.shape[0]], weight_scales, cu_rows[:-1], cu_rows[1:])
    given = [array for array in (x, x_scales, *operands) if array is not None]
    return lax.scan(add, carry(start, *given), operands)[0]
