"""block_scaled_matmul by the CuTe DSL kernel: one custom call, one launch. Rows of x and of the weight are partitioned,
and vmap's axis is folded into x's rows where all calls have one weight."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.block_scaled_matmul.xla import ALTERNATIVE
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_kernels import contract
from tsmla_kernels.catalog import BLOCK_SCALED_MATMUL
from tsmla_kernels.contract import FP8
from tsmla_kernels.contract.products import BLOCK, ProductSpec
from tsmla_kernels.sm90.products.config import product_config


def why_not(spec: ProductSpec) -> list[str]:
    """The reasons why the kernel can't run this call; empty if it can."""
    return device.why_not(BLOCK_SCALED_MATMUL) + BLOCK_SCALED_MATMUL.reasons(spec)


def block_scaled_matmul(
    x: jax.Array, weight: jax.Array, x_scales: jax.Array | None, weight_scales: jax.Array, *, spec: ProductSpec
) -> jax.Array:
    """out [T, N] as the public block_scaled_matmul documents it."""
    if spec.num_rows == 0:
        return jnp.zeros((0, spec.num_columns), spec.out_dtype)
    arch = device.arch_for(BLOCK_SCALED_MATMUL)
    run = _transformable(spec.x_dtype, spec.out_dtype, arch, device.num_sms(arch))
    rows = (x,) if x_scales is None else (x, x_scales)
    out: jax.Array = run(*rows, weight, weight_scales)
    return out


@functools.cache
def _transformable(x_dtype: str, out_dtype: str, arch: str, num_sms: int) -> Callable[..., Any]:
    """The call as a function (x[, x_scales], weight, weight_scales) -> out."""
    scaled = x_dtype == FP8

    def on_device(x: jax.Array, *others: jax.Array) -> jax.Array:
        *x_scales, weight, weight_scales = others
        rows, columns = x.shape[0], weight.shape[0]  # the rows of this device decide
        config = product_config(ProductSpec(rows, x.shape[1], columns, None, out_dtype, x_dtype), num_sms)
        arrays = (x, weight, *x_scales, weight_scales)
        return kernel_call(BLOCK_SCALED_MATMUL, config, arrays, ((rows, columns),), arch=arch)[0]

    def fold(run: Callable[..., Any], axis_size: int, *arrays: jax.Array) -> jax.Array:
        *rows, weight, weight_scales = arrays
        out: jax.Array = run(*map(transforms.fold_rows, rows), weight, weight_scales)
        return out.reshape(axis_size, -1, out.shape[-1])

    return transforms.transformable(
        on_device,
        rule=f"t k,{' t s,' * scaled} n k, m s -> t n",
        fixed=("k", "s"),
        partition=_partition,
        fold=fold,
        shared=2,
        derivative=functools.partial(refuse, "block_scaled_matmul"),
    )


def refuse(op: str, *_: jax.Array) -> NoReturn:
    """Raise the error for a derivative of the kernel's call."""
    raise contract.not_differentiable(op, ALTERNATIVE)


def _partition(shapes: Sequence[Any]) -> transforms.Partition:
    """x's rows as they are, the weight's rows where devices have whole blocks of them; terms whole."""
    rows = transforms.named_axes(shapes[0])[0]
    columns = column_axes(shapes[-2], rows)
    ours, theirs = P(rows, None), P(columns, None)
    return (*(ours,) * (len(shapes) - 2), theirs, theirs), P(rows, columns)


def column_axes(weight: Any, rows: Any = None) -> Any:
    """The mesh axes of the weight's rows [..., N, K]; None where a device would have a part of a block, or where x's
    rows are split over them."""
    axes = transforms.named_axes(weight)[-2]
    names = axes if isinstance(axes, tuple) else (axes,)
    if axes is None or set(names) & set(rows if isinstance(rows, tuple) else (rows,)):
        return None
    assert isinstance(weight.sharding, NamedSharding)
    parts = functools.reduce(lambda count, name: count * weight.sharding.mesh.shape[name], names, 1)
    return None if weight.shape[-2] % (BLOCK * parts) else axes
