"""grouped_block_scaled_matmul in portable XLA: jax.lax.ragged_dot of block after block of terms, or, of weights without
scales, of all terms."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

from tsmla_jax.ops.block_scaled_matmul.reference import Result, finished, spread
from tsmla_jax.ops.block_scaled_matmul.xla import ALTERNATIVE, block_of, factors, unpacked_blocks, whole_blocks
from tsmla_jax.ops.grouped_block_scaled_matmul.reference import picked
from tsmla_jax.ops.loops import carry
from tsmla_jax.ops.transforms import refuse_derivative
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
) -> Result:
    """The result as the public grouped_block_scaled_matmul documents it."""
    x, x_scales = picked(x, rows), None if x_scales is None else picked(x_scales, rows)
    row, weight = jnp.arange(x.shape[0], dtype=jnp.int32), weight[: cu_rows.shape[0] - 1]
    used = (row < cu_rows[-1])[:, None]
    if weight_scales is None:
        rows = jnp.where(used, x, jnp.zeros((), x.dtype))
        columns = weight.transpose(0, 2, 1)
        total = _ragged_dot(rows, columns, cu_rows, lax.Precision.DEFAULT)
        total = jnp.where(used, total, 0)
        return finished(
            refuse_derivative(total, [x, weight, cu_rows], "grouped_block_scaled_matmul", ALTERNATIVE), spec
        )
    if spec.packed:
        weight, weight_scales = unpacked_blocks(weight, weight_scales)
    group = jnp.clip(jnp.searchsorted(cu_rows, row, side="right") - 1, 0, weight.shape[0] - 1)
    terms, columns = whole_blocks(jnp.where(used, x, jnp.zeros((), x.dtype))), whole_blocks(weight)

    def step(b: jax.Array, total: jax.Array) -> jax.Array:
        ours, theirs = (block_of(values, b).astype(narrow) for values in (terms, columns))
        product = _ragged_dot(ours, theirs.transpose(0, 2, 1), cu_rows, precision)
        scales = lax.dynamic_index_in_dim(weight_scales, b, axis=2, keepdims=False)[group]
        product *= spread(scales, weight.shape[1], axis=1)
        if x_scales is not None:
            product *= lax.dynamic_slice_in_dim(x_scales, b, 1, axis=1)
        return total + jnp.where(used, product, 0)

    narrow, precision = factors(x, spec)
    operands = [array for array in (x, weight, x_scales, weight_scales, cu_rows) if array is not None]
    start = carry(jnp.zeros((x.shape[0], weight.shape[1]), jnp.float32), *operands)
    total = lax.fori_loop(0, weight_scales.shape[2], step, start)
    refused: jax.Array = refuse_derivative(total, operands, "grouped_block_scaled_matmul", ALTERNATIVE)
    return finished(refused, spec)


def _ragged_dot(rows: jax.Array, columns: jax.Array, cu_rows: jax.Array, precision: lax.Precision) -> jax.Array:
    """jax.lax.ragged_dot to float32, without a derivative, which the caller refuses."""
    product: jax.Array = _sequential(precision)(lax.stop_gradient(rows), lax.stop_gradient(columns), jnp.diff(cu_rows))
    return product


@functools.cache
def _sequential(precision: lax.Precision) -> Callable[..., jax.Array]:
    """jax.lax.ragged_dot; under vmap one call after another, since jax can't batch some of its operands without the
    others."""
    return sequential_vmap(lambda rows, columns, sizes: lax.ragged_dot(rows, columns, sizes, precision, jnp.float32))
