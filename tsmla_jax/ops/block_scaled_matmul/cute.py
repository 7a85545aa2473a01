"""block_scaled_matmul by the CuTe DSL kernel: one custom call, one launch. Rows of x and of the weight are partitioned,
and vmap's axis is folded into x's rows where all calls have one weight."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.block_scaled_matmul.reference import Result
from tsmla_jax.ops.block_scaled_matmul.xla import ALTERNATIVE
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_kernels import contract
from tsmla_kernels.catalog import BLOCK_SCALED_MATMUL
from tsmla_kernels.contract import FP8
from tsmla_kernels.contract.products import BLOCK, ProductSpec, blocks_of
from tsmla_kernels.sm90.products.config import product_config


def why_not(spec: ProductSpec) -> list[str]:
    """The reasons why the kernel can't run this call; empty if it can."""
    return device.why_not(BLOCK_SCALED_MATMUL) + BLOCK_SCALED_MATMUL.reasons(spec)


def block_scaled_matmul(
    x: jax.Array, weight: jax.Array, x_scales: jax.Array | None, weight_scales: jax.Array, *, spec: ProductSpec
) -> Result:
    """The result as the public block_scaled_matmul documents it."""
    if spec.num_rows == 0:
        return nothing(spec)
    arch = device.arch_for(BLOCK_SCALED_MATMUL)
    run = _transformable(without_sizes(spec), arch, device.num_sms(arch))
    rows = (x,) if x_scales is None else (x, x_scales)
    out: Result = run(*rows, weight, weight_scales)
    return out


def without_sizes(spec: ProductSpec) -> ProductSpec:
    """The spec without the sizes that are read from arrays."""
    picked = None if spec.num_picked is None else 1
    return dataclasses.replace(spec, num_rows=1, num_terms=1, num_columns=1, num_groups=None, num_picked=picked)


def shapes_of(spec: ProductSpec) -> list[tuple[Any, ...]]:
    """The shapes of the kernel's results."""
    scales = (spec.num_rows, blocks_of(spec.out_columns))
    return [(spec.num_rows, spec.out_columns), *([scales] if spec.out_dtype == FP8 else [])]


def nothing(spec: ProductSpec) -> Result:
    """The result of a call without rows."""
    values, *scales = (
        jnp.zeros(shape, dtype) for shape, dtype in zip(shapes_of(spec), (spec.out_dtype, jnp.float32), strict=False)
    )
    return (values, scales[0]) if scales else values


@functools.cache
def _transformable(form: ProductSpec, arch: str, num_sms: int) -> Callable[..., Any]:
    """The call as a function (x[, x_scales], weight, weight_scales) -> out or its values and scales. form: the spec
    `without_sizes`."""
    scaled = form.x_dtype == FP8

    def on_device(x: jax.Array, *others: jax.Array) -> Result:
        *x_scales, weight, weight_scales = others
        sizes: dict[str, Any] = {"num_rows": x.shape[0], "num_terms": x.shape[1], "num_columns": weight.shape[0]}
        spec = dataclasses.replace(form, **sizes)  # the rows of this device decide
        arrays = (x, weight, *x_scales, weight_scales)
        out = kernel_call(BLOCK_SCALED_MATMUL, product_config(spec, num_sms), arrays, shapes_of(spec), arch=arch)
        return (out[0], out[1]) if form.out_dtype == FP8 else out[0]

    def fold(run: Callable[..., Any], axis_size: int, *arrays: jax.Array) -> Any:
        *rows, weight, weight_scales = arrays
        results = run(*map(transforms.fold_rows, rows), weight, weight_scales)
        return jax.tree.map(lambda out: out.reshape(axis_size, -1, out.shape[-1]), results)

    results, whole = results_of(form, "t")
    return transforms.transformable(
        on_device,
        rule=f"t k,{' t s,' * scaled} {weight_axes(form)} -> {results}",
        fixed=("k", "p", "u", *(name for name in whole if name != "m")) if form.packed else ("k", "s", *whole),
        partition=functools.partial(_partition, form),
        fold=fold,
        shared=2,
        derivative=functools.partial(refuse, "block_scaled_matmul"),
    )


def weight_axes(form: ProductSpec) -> str:
    """A weight and its scales in a sharding rule, without the axis of groups: packed ones have scales for each row."""
    return "n p, n u" if form.packed else "n k, m s"


def refuse(op: str, *_: jax.Array) -> NoReturn:
    """Raise the error for a derivative of the kernel's call."""
    raise contract.not_differentiable(op, ALTERNATIVE)


def results_of(form: ProductSpec, row: str) -> tuple[str, tuple[str, ...]]:
    """The results in a sharding rule whose rows are the factor `row`, and which factors of the weight's rows and of the
    results are never split: all if the product is gated, since a column is then made of both halves of the weight."""
    if not form.gated:
        return f"{row} n", ()
    return (f"{row} g, {row} h", ("n", "m", "g", "h")) if form.out_dtype == FP8 else (f"{row} g", ("n", "m", "g"))


def _partition(form: ProductSpec, shapes: Sequence[Any]) -> transforms.Partition:
    """A call's partition: x's rows as they are split; the weight's rows as by `column_axes`, or whole if the product is
    gated. Terms are never split."""
    rows = transforms.named_axes(shapes[0])[0]
    columns = None if form.gated else column_axes(shapes[-2], rows)
    ours, theirs, out = P(rows, None), P(columns, None), P(rows, columns)
    results = (out, out) if form.out_dtype == FP8 else out
    return (*(ours,) * (len(shapes) - 2), theirs, theirs), results


def column_axes(weight: Any, rows: Any = None) -> Any:
    """The mesh axes over which the rows of a weight [..., N, K] are split; None if a device would get part of a block,
    or if x's rows are split over one of these axes."""
    axes = transforms.axes_apart(transforms.named_axes(weight)[-2], rows)
    if axes is None:
        return None
    names = axes if isinstance(axes, tuple) else (axes,)
    assert isinstance(weight.sharding, NamedSharding)
    parts = functools.reduce(lambda count, name: count * weight.sharding.mesh.shape[name], names, 1)
    return None if weight.shape[-2] % (BLOCK * parts) else axes
