"""The definition of grouped_block_scaled_matmul: rows times every group's weight; the own group's product is kept."""

from __future__ import annotations

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
    weight_scales: jax.Array | None,
    cu_rows: jax.Array,
    rows: jax.Array | None,
    *,
    spec: ProductSpec,
) -> reference.Result:
    """The result as the public grouped_block_scaled_matmul documents it."""
    x, x_scales = picked(x, rows), None if x_scales is None else picked(x_scales, rows)
    row = jnp.arange(x.shape[0], dtype=jnp.int32)

    def add(out: jax.Array, group: tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        values, scales, begin, end = group
        product = reference.product(x, values, x_scales, scales)
        own = (row >= begin) & (row < end)
        return jnp.where(own[:, None], product, out), None

    start = jnp.zeros((x.shape[0], weight.shape[1]), jnp.float32)
    operands = (weight[: cu_rows.shape[0] - 1], weight_scales, cu_rows[:-1], cu_rows[1:])
    given = [array for array in (x, x_scales, *operands) if array is not None]
    return reference.finished(lax.scan(add, carry(start, *given), operands)[0], spec)


def picked(array: jax.Array, rows: jax.Array | None) -> jax.Array:
    """The rows of an array that `rows` names, or all of them. An index past either end picks the nearest row."""
    return array if rows is None else array[jnp.clip(rows, 0, array.shape[0] - 1)]
