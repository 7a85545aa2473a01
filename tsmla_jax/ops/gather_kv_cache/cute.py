"""gather_kv_cache by the CuTe DSL kernel: one custom call, one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.gather_kv_cache import xla
from tsmla_jax.ops.inputs import describe_call, scale_operand
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_kernels import contract
from tsmla_kernels.cache_ops import config as cache_config
from tsmla_kernels.catalog import GATHER_KV_CACHE
from tsmla_kernels.contract import CacheGatherSpec


def why_not(spec: CacheGatherSpec) -> list[str]:
    """The reasons why the kernel can't run this call; empty if it can."""
    return device.why_not(GATHER_KV_CACHE) + GATHER_KV_CACHE.reasons(spec)


def gather_kv_cache(
    kv_cache: jax.Array,
    block_tables: jax.Array,
    starts: jax.Array,
    lens: jax.Array,
    *,
    spec: CacheGatherSpec,
    kv_scale: float | jax.Array | None,
) -> jax.Array:
    """The packed rows, as the public gather_kv_cache documents them."""
    arch = device.arch_for(GATHER_KV_CACHE)
    # A symbolic size belongs to one export, and functools.cache can't tell it from another export's.
    make = _transformable if isinstance(spec.total_len, int) else _transformable.__wrapped__
    run = make(cache_config.gather_config(spec), arch, spec.total_len)
    result: jax.Array = run(kv_cache, block_tables, starts, lens, scale_operand(kv_scale))
    return result


@functools.cache
def _transformable(config: cache_config.GatherConfig, arch: str, total_len: Any) -> Callable[..., Any]:
    """The call as a function (kv_cache, block_tables, starts, lens, kv_scale [1]) -> rows [total_len, D]."""

    def on_device(
        kv_cache: jax.Array, block_tables: jax.Array, starts: jax.Array, lens: jax.Array, kv_scale: jax.Array
    ) -> jax.Array:
        inputs = (kv_cache, block_tables, starts, lens, kv_scale)
        shape = (total_len, config.head_dim)
        return kernel_call(GATHER_KV_CACHE, config, inputs, (shape,), arch=arch)[0]

    def fold(
        run: Callable[..., Any],
        axis_size: int,
        kv_cache: jax.Array,
        block_tables: jax.Array,
        starts: jax.Array,
        lens: jax.Array,
        kv_scale: jax.Array,
    ) -> jax.Array:
        pages, page_size, width = kv_cache.shape[1:]
        block_tables = jnp.clip(block_tables, 0, pages - 1)
        block_tables += (jnp.arange(axis_size, dtype=jnp.int32) * pages)[:, None, None]
        # The rows that a problem leaves unused go to one request more, whose tokens lie past its table: they are 0.
        ends = jnp.minimum(jnp.cumsum(jnp.maximum(lens, 0), axis=1, dtype=jnp.int32), total_len)
        ends = jnp.concatenate([jnp.zeros_like(ends[:, :1]), ends, jnp.full_like(ends[:, :1], total_len)], axis=1)
        block_tables = jnp.pad(block_tables, ((0, 0), (0, 1), (0, 0)))
        starts = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=block_tables.shape[2] * page_size)
        rows = _transformable(config, arch, axis_size * total_len)(
            kv_cache.reshape(axis_size * pages, page_size, width),
            *map(transforms.fold_rows, (block_tables, starts, jnp.diff(ends, axis=1))),
            kv_scale,
        )
        return rows.reshape(axis_size, total_len, width)

    def derivative(
        kv_cache: jax.Array, block_tables: jax.Array, starts: jax.Array, lens: jax.Array, kv_scale: jax.Array
    ) -> jax.Array:
        spec = describe_call(
            contract.cache_gather_spec,
            kv_cache=kv_cache,
            block_tables=block_tables,
            starts=starts,
            lens=lens,
            total_len=total_len,
            out_dtype=config.out_dtype,
        )
        return xla.gather_kv_cache(kv_cache, block_tables, starts, lens, spec=spec, kv_scale=kv_scale[0])

    return transforms.transformable(
        on_device,
        rule="p z d, b m, b, b, c -> n d",
        fixed=("p", "z", "d", "b", "m", "c", "n"),
        partition=_partition,
        fold=fold,
        shared=1,
        derivative=derivative,
    )


def _partition(shapes: Sequence[Any]) -> transforms.Partition:
    return (P(None, None, None), P(None, None), P(None), P(None), P(None)), P(None, None)
