"""grouped_block_scaled_matmul by the CuTe DSL kernel: one custom call, one launch. The weights' rows are partitioned.
The rows of x are whole on every device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.block_scaled_matmul.cute import (
    column_axes,
    nothing,
    refuse,
    results_of,
    shapes_of,
    weight_axes,
    without_sizes,
)
from tsmla_jax.ops.block_scaled_matmul.reference import Result
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
    weight_scales: jax.Array | None,
    cu_rows: jax.Array,
    rows: jax.Array | None,
    *,
    spec: ProductSpec,
) -> Result:
    """out, or its values and scales, as the public grouped_block_scaled_matmul documents them."""
    if spec.num_rows == 0:
        return nothing(spec)
    arch = device.arch_for(GROUPED_BLOCK_SCALED_MATMUL)
    run = _transformable(without_sizes(spec), arch, device.num_sms(arch))
    given = [array for array in (x, x_scales, rows, cu_rows, weight, weight_scales) if array is not None]
    out: Result = run(*given)
    return out


@functools.cache
def _transformable(form: ProductSpec, arch: str, num_sms: int) -> Callable[..., Any]:
    """The call as a function (x[, x_scales][, rows], cu_rows, weight[, weight_scales]) -> out or its values and scales.
    form: the spec `without_sizes`."""
    scaled, picks, blocks = form.x_dtype == FP8, form.num_picked is not None, not form.plain

    def on_device(x: jax.Array, *others: jax.Array) -> Result:
        weight_scales = others[len(others) - blocks :]
        *given, cu_rows, weight = others[: len(others) - blocks]
        x_scales, rows = given[:scaled], given[scaled:]
        sizes: dict[str, Any] = {
            "num_terms": x.shape[1],
            "num_columns": weight.shape[1],
            "num_groups": cu_rows.shape[0] - 1,
        }
        sizes |= {"num_rows": rows[0].shape[0], "num_picked": x.shape[0]} if picks else {"num_rows": x.shape[0]}
        spec = dataclasses.replace(form, **sizes)
        arrays = (x, weight, *x_scales, *weight_scales, cu_rows, *rows)
        config = product_config(spec, num_sms)
        out = kernel_call(GROUPED_BLOCK_SCALED_MATMUL, config, arrays, shapes_of(spec), arch=arch)
        return (out[0], out[1]) if form.out_dtype == FP8 else out[0]

    results, whole = results_of(form, "r" if picks else "t")
    weight, of_weight = weight_axes(form).split(", ")
    absent = {"m", "s", "p", "u"} - (set() if form.plain else {"p", "u"} if form.packed else {"m", "s"})
    absent |= set() if picks else {"r"}
    absent |= {"e"} if form.plain else set()
    return transforms.transformable(
        on_device,
        rule=f"t k,{' t s,' * scaled}{' r,' * picks} b, w {weight}{f', e {of_weight}' * blocks} -> {results}",
        fixed=tuple(
            name for name in ("t", "k", "s", "r", "b", "w", *whole[:1], "p", "e", "u", *whole[1:]) if name not in absent
        ),
        partition=functools.partial(_partition, form),
        derivative=functools.partial(refuse, "grouped_block_scaled_matmul"),
    )


def _partition(form: ProductSpec, shapes: Sequence[Any]) -> transforms.Partition:
    """The weights' rows where devices have whole blocks of them, of a gated product whole; everything else whole."""
    of_weight = 1 if form.plain else 2
    columns = None if form.gated else column_axes(shapes[-of_weight])
    theirs, out = P(None, columns, None), P(None, columns)
    whole = tuple(P(*(None,) * len(each.shape)) for each in shapes[:-of_weight])
    return (*whole, *(theirs,) * of_weight), (out, out) if form.out_dtype == FP8 else out
