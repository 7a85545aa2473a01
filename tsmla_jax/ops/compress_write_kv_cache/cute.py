"""compress_write_kv_cache by the CuTe DSL kernel, in place when cache and state are donated: one custom call, one
launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.inputs import scale_operand
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_kernels.catalog import COMPRESS_WRITE_KV_CACHE
from tsmla_kernels.contract.compress import CompressWriteSpec
from tsmla_kernels.sparse_cache.compress_config import (
    CompressWriteConfig,
    compress_write_config,
)

Results = tuple[jax.Array, tuple[jax.Array, jax.Array]]
ALTERNATIVE = "train on the entries of compress_kv, with implementation='reference'"


def why_not(spec: CompressWriteSpec) -> list[str]:
    """The reasons why the kernel can't run this call; empty if it can."""
    return device.why_not(COMPRESS_WRITE_KV_CACHE) + COMPRESS_WRITE_KV_CACHE.reasons(spec)


def compress_write_kv_cache(
    cache: jax.Array,
    state: tuple[jax.Array, jax.Array],
    seq_lens: jax.Array,
    *arrays: jax.Array,
    spec: CompressWriteSpec,
    kv_scale: float | jax.Array | None,
) -> Results:
    """The cache and the state, as the public compress_write_kv_cache documents them. Not differentiable."""
    run = _transformable(compress_write_config(spec), device.arch_for(COMPRESS_WRITE_KV_CACHE))
    kv_score, ape, norm_weight, cos_sin, block_tables, state_slots, cu_seqlens_q = arrays
    inputs = (kv_score, ape, state_slots, seq_lens, cu_seqlens_q, norm_weight, cos_sin, block_tables)
    operands = (cache, *state, *inputs, jnp.asarray(scale_operand(kv_scale)))
    results = run(*map(jax.lax.stop_gradient, operands))
    written, rows, positions = transforms.refuse_derivative(results, operands, "compress_write_kv_cache", ALTERNATIVE)
    return written, (rows, positions)


@functools.cache
def _transformable(config: CompressWriteConfig, arch: str) -> Callable[..., Any]:
    """The call as a function of the launcher's inputs -> (cache, state, positions)."""

    def on_device(
        cache: jax.Array, state: jax.Array, positions: jax.Array, kv_score: jax.Array, *others: jax.Array
    ) -> tuple[jax.Array, ...]:
        rows = state.reshape(*state.shape[:2], -1)
        inputs = (cache, rows, positions, kv_score.reshape(kv_score.shape[0], -1), *others)
        shapes = (cache.shape, rows.shape, positions.shape)
        written, new_rows, new_positions = kernel_call(COMPRESS_WRITE_KV_CACHE, config, inputs, shapes, arch=arch)
        return written, new_rows.reshape(state.shape), new_positions

    pages = "p y" if config.cache == "v4" else "p z d"
    state = "n q s w, n q"
    return transforms.transformable(
        on_device,
        rule=f"{pages}, {state}, t s w, r w, b, b, e, c, i j, b m, a -> {pages}, {state}",
        fixed=tuple(factor for factor in f"{pages} n q s w t r b e c i j m a".split()),
        partition=_partition,
    )


def _partition(shapes: Sequence[Any]) -> transforms.Partition:
    """Everything whole on every device."""
    whole = tuple(P(*(None,) * len(shape.shape)) for shape in shapes)
    return whole, whole[:3]
