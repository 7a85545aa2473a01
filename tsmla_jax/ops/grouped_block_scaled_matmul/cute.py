"""grouped_block_scaled_matmul by the CuTe DSL kernel: one custom call, one launch. The weights' rows are partitioned,
x's are whole on every device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.block_scaled_matmul.cute import column_axes, refuse
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_kernels.catalog import GROUPED_BLOCK_SCALED_MATMUL
from tsmla_kernels.contract import FP8
from tsmla_kernels.contract.products import ProductSpec
from tsmla_kernels.sm90.products.config import product_config


def why_not(spec: ProductSpec) -> list[str]:
    """The reasons why the kernel can't run this call; empty if it can."""
    return device.why_not(GROUPED_BLOCK_SCALED_MATMUL) + GROUPED_BLOCK_SCALED_MATMUL.reasons(spec)


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
    if spec.num_rows == 0:
        return jnp.zeros((0, spec.num_columns), spec.out_dtype)
    arch = device.arch_for(GROUPED_BLOCK_SCALED_MATMUL)
    run = _transformable(spec.x_dtype, spec.out_dtype, arch, device.num_sms(arch))
    rows = (x,) if x_scales is None else (x, x_scales)
    out: jax.Array = run(*rows, cu_rows, weight, weight_scales)
    return out


@functools.cache
def _transformable(x_dtype: str, out_dtype: str, arch: str, num_sms: int) -> Callable[..., Any]:
    """The call as a function (x[, x_scales], cu_rows, weight, weight_scales) -> out."""
    scaled = x_dtype == FP8

    def on_device(x: jax.Array, *others: jax.Array) -> jax.Array:
        *x_scales, cu_rows, weight, weight_scales = others
        (rows, terms), columns, groups = x.shape, weight.shape[1], weight_scales.shape[0]
        config = product_config(ProductSpec(rows, terms, columns, groups, out_dtype, x_dtype), num_sms)
        arrays = (x, weight, *x_scales, weight_scales, cu_rows)
        return kernel_call(GROUPED_BLOCK_SCALED_MATMUL, config, arrays, ((rows, columns),), arch=arch)[0]

    return transforms.transformable(
        on_device,
        rule=f"t k,{' t s,' * scaled} b, w n k, e m s -> t n",
        fixed=("t", "k", "s", "b", "w", "e"),
        partition=_partition,
        derivative=functools.partial(refuse, "grouped_block_scaled_matmul"),
    )


def _partition(shapes: Sequence[Any]) -> transforms.Partition:
    """The weights' rows where devices have whole blocks of them, everything else whole."""
    columns = column_axes(shapes[-2])
    whole, theirs = P(None, None), P(None, columns, None)
    return (*(whole,) * (len(shapes) - 3), P(None), theirs, theirs), P(None, columns)
