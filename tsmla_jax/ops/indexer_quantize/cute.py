"""indexer_quantize by the CuTe DSL kernel: one custom call, one launch. Tokens are partitioned, heads are not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.indexer_quantize import reference
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_kernels.catalog import INDEXER_QUANTIZE
from tsmla_kernels.contract.packed import IndexerQuantizeSpec
from tsmla_kernels.sparse_cache.config import indexer_quantize_config

Results = tuple[jax.Array, jax.Array]


def why_not(spec: IndexerQuantizeSpec) -> list[str]:
    """The reasons why the kernel can't run this call; empty if it can."""
    return device.why_not(INDEXER_QUANTIZE) + INDEXER_QUANTIZE.reasons(spec)


def indexer_quantize(q: jax.Array, weights: jax.Array, *angles: jax.Array, spec: IndexerQuantizeSpec) -> Results:
    """q8 and the folded weights, as the public indexer_quantize documents them."""
    if 0 in weights.shape:
        return jnp.zeros(q.shape, jnp.float8_e4m3fn), jnp.zeros(weights.shape, jnp.float32)
    run = _transformable(dataclasses.replace(spec, num_tokens=1), device.arch_for(INDEXER_QUANTIZE))
    results: Results = run(q, weights, *angles)
    return results


@functools.cache
def _transformable(spec: IndexerQuantizeSpec, arch: str) -> Callable[..., Any]:
    """The call as a function (q, weights[, cos, sin]) -> (q8, weights), of any number of tokens."""
    rotates = spec.rotation is not None

    def on_device(q: jax.Array, weights: jax.Array, *angles: jax.Array) -> Results:
        rows = weights.size
        config = indexer_quantize_config(dataclasses.replace(spec, num_tokens=weights.shape[0]))
        inputs = (q.reshape(rows, q.shape[-1]), weights.reshape(rows), *angles)
        q8, folded = kernel_call(INDEXER_QUANTIZE, config, inputs, ((rows, q.shape[-1]), (rows,)), arch=arch)
        return q8.reshape(q.shape), folded.reshape(weights.shape)

    def fold(run: Callable[..., Any], axis_size: int, *arrays: jax.Array) -> Results:
        q8, folded = run(*map(transforms.fold_rows, arrays))
        return q8.reshape(arrays[0].shape), folded.reshape(arrays[1].shape)

    def derivative(*arrays: jax.Array) -> Results:
        return reference.indexer_quantize(*arrays, spec=spec)

    return transforms.transformable(
        on_device,
        rule="t h d, t h" + (", t c, t c" if rotates else "") + " -> t h d, t h",
        fixed=("h", "d", "c") if rotates else ("h", "d"),
        partition=_partition,
        fold=fold,
        derivative=derivative,
    )


def _partition(shapes: Sequence[Any]) -> transforms.Partition:
    """Tokens as those of q, everything else whole: the constants need all heads."""
    tokens = transforms.named_axes(shapes[0])[0]
    q, weights = P(tokens, None, None), P(tokens, None)
    return (q, weights, *(P(tokens, None) for _ in shapes[2:])), (q, weights)
