"""select_topk by the CuTe DSL kernel: one custom call, one launch. Rows are partitioned, and vmap's axis is folded
into them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_kernels.catalog import SELECT_TOPK
from tsmla_kernels.contract.sparse import TopKSpec
from tsmla_kernels.sm90.indexer.config import topk_config, topk_reasons


def why_not(spec: TopKSpec) -> list[str]:
    """The reasons why the kernel can't run this call; empty if it can."""
    return device.why_not(SELECT_TOPK) + topk_reasons(spec)


def why_not_by_default() -> list[str]:
    """The reasons why implementation=None must not pick the kernel."""
    untested = 'the kernel is untested inside jax on a GPU; pass implementation="cute" to use it anyway'
    return [*device.why_not_by_default(), untested]


def select_topk(logits: jax.Array, seq_lens: jax.Array, *, spec: TopKSpec) -> jax.Array:
    """positions [T, k] as the public select_topk documents them. Positions have no derivative, as in XLA."""
    if 0 in logits.shape:
        return jnp.full((logits.shape[0], spec.k), -1, jnp.int32)
    run = _transformable(spec.k, spec.order, device.arch_for(SELECT_TOPK))
    positions: jax.Array = run(lax.stop_gradient(logits), seq_lens)
    return positions


@functools.cache
def _transformable(k: int, order: str, arch: str) -> Callable[..., Any]:
    """The call as a function (logits, seq_lens) -> positions [T, k]."""

    def on_device(logits: jax.Array, seq_lens: jax.Array) -> jax.Array:
        rows, columns = logits.shape
        config = topk_config(TopKSpec(rows, columns, k, order))  # the rows of this device decide
        return kernel_call(SELECT_TOPK, config, (logits, seq_lens), ((rows, k),), arch=arch)[0]

    def fold(run: Callable[..., Any], axis_size: int, logits: jax.Array, seq_lens: jax.Array) -> jax.Array:
        positions: jax.Array = run(*map(transforms.fold_rows, (logits, seq_lens)))
        return positions.reshape(axis_size, -1, k)

    return transforms.transformable(on_device, rule="t n, t -> t k", fixed=("n", "k"), partition=_partition, fold=fold)


def _partition(shapes: Sequence[Any]) -> transforms.Partition:
    """Rows as those of the logits, columns whole."""
    rows = transforms.named_axes(shapes[0])[0]
    return (P(rows, None), P(rows)), P(rows, None)
