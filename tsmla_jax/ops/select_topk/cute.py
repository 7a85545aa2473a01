"""select_topk by the CuTe DSL kernel: one custom call, one launch. Rows are partitioned, and vmap's axis is folded
into them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.select_topk.reference import Results, results_of, rows_of
from tsmla_kernels.catalog import SELECT_TOPK
from tsmla_kernels.contract.sparse import TopKSpec
from tsmla_kernels.topk.config import topk_config


def why_not(spec: TopKSpec) -> list[str]:
    """The reasons why the kernel can't run this call; empty if it can."""
    return device.why_not(SELECT_TOPK) + SELECT_TOPK.reasons(spec)


def select_topk(logits: jax.Array, seq_lens: jax.Array, *others: jax.Array, spec: TopKSpec) -> Results:
    """The results that the public select_topk documents. Positions have no derivative, as in XLA."""
    if 0 in logits.shape or (spec.page_size and 0 in others[-1].shape):
        if spec.bits:
            return jnp.zeros((logits.shape[0], spec.width), jnp.int32)
        nothing = jnp.full((logits.shape[0], spec.k), -1, jnp.int32)
        return results_of(spec, rows_of(spec, seq_lens, *others), nothing)
    run = _transformable(dataclasses.replace(spec, num_tokens=0, num_columns=0), device.arch_for(SELECT_TOPK))
    results: Results = run(lax.stop_gradient(logits), seq_lens, *others)
    return results


@functools.cache
def _transformable(spec: TopKSpec, arch: str) -> Callable[..., Any]:
    """The call as a function (logits, seq_lens[, row_starts][, block_tables]) -> positions [T, k], words [T, W], or
    slots [T, k] and counts [T]; it takes any number of rows and columns, whatever the spec has."""

    def on_device(logits: jax.Array, *others: jax.Array) -> Results:
        rows, columns = logits.shape
        # The rows of this device decide.
        local = dataclasses.replace(spec, num_tokens=rows, num_columns=columns)
        config = topk_config(local)
        shapes = ((rows, local.width), (rows,)) if spec.page_size else ((rows, local.width),)
        results = kernel_call(SELECT_TOPK, config, (logits, *others), shapes, arch=arch)
        return (results[0], results[1]) if spec.page_size else results[0]

    def fold(run: Callable[..., Any], axis_size: int, *arrays: jax.Array) -> Results:
        results = run(*map(transforms.fold_rows, arrays))
        apart: Results = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), results)
        return apart

    starts, tables = ", t" if spec.row_starts else "", ", t m" if spec.page_size else ""
    return transforms.transformable(
        on_device,
        rule=f"t n, t{starts}{tables} -> t k" + (", t" if spec.page_size else ""),
        fixed=("n", "k", "m") if spec.page_size else ("n", "k"),
        partition=functools.partial(_partition, bool(spec.page_size)),
        fold=fold,
    )


def _partition(has_slots: bool, shapes: Sequence[Any]) -> transforms.Partition:
    """The sharding: rows as in the logits, columns whole."""
    rows = transforms.named_axes(shapes[0])[0]
    operands = tuple(P(rows, *(None,) * (len(shape.shape) - 1)) for shape in shapes)
    return operands, (P(rows, None), P(rows)) if has_slots else P(rows, None)
