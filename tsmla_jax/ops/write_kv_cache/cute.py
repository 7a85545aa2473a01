"""write_kv_cache by the CuTe DSL kernel, in place when the cache is donated: one custom call whose result is its first
operand's memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.inputs import describe_call, scale_operand
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.write_kv_cache import xla
from tsmla_kernels import contract
from tsmla_kernels.cache_ops import config as cache_config
from tsmla_kernels.catalog import WRITE_KV_CACHE
from tsmla_kernels.contract import CacheWriteSpec


def why_not(spec: CacheWriteSpec) -> list[str]:
    """The reasons why the kernel can't run this call; empty if it can."""
    return device.why_not(WRITE_KV_CACHE) + WRITE_KV_CACHE.reasons(spec)


def write_kv_cache(
    kv_cache: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
    slot_mapping: jax.Array,
    *,
    spec: CacheWriteSpec,
    kv_scale: float | jax.Array | None,
) -> jax.Array:
    """The new cache, as the public write_kv_cache documents it."""
    arch = device.arch_for(WRITE_KV_CACHE)
    run = _transformable(cache_config.write_config(spec), arch)
    result: jax.Array = run(kv_cache, latent, k_rope, slot_mapping, scale_operand(kv_scale))
    return result


@functools.cache
def _transformable(config: cache_config.WriteConfig, arch: str) -> Callable[..., Any]:
    """The call as a function (kv_cache, latent, k_rope, slot_mapping, kv_scale [1]) -> kv_cache."""

    def on_device(
        kv_cache: jax.Array, latent: jax.Array, k_rope: jax.Array, slot_mapping: jax.Array, kv_scale: jax.Array
    ) -> jax.Array:
        k_rope = k_rope if config.rope_dim else latent  # an array without columns has no address to pass
        inputs = (kv_cache, latent, k_rope, slot_mapping, kv_scale)
        return kernel_call(WRITE_KV_CACHE, config, inputs, (kv_cache.shape,), arch=arch)[0]

    return transforms.transformable(
        on_device,
        rule="p z d, t l, t r, t, c -> p z d",
        fixed=("z", "d", "t", "l", "r", "c"),
        partition=_partition,
        fold=_fold,
        derivative=_derivative,
        shared=1,
        slots=3,
    )


def _partition(shapes: Sequence[Any]) -> transforms.Partition:
    cache = P(transforms.named_axes(shapes[0])[0], None, None)
    return (cache, P(None, None), P(None, None), P(None), P(None)), cache


def _fold(
    run: Callable[..., Any],
    axis_size: int,
    kv_cache: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
    slots: jax.Array,
    kv_scale: jax.Array,
) -> jax.Array | None:
    if (folded := transforms.fold_pages(kv_cache, slots)) is None:
        return None
    written = run(folded[0], transforms.fold_rows(latent), transforms.fold_rows(k_rope), folded[1], kv_scale)
    return written.reshape(kv_cache.shape)


def _derivative(
    kv_cache: jax.Array, latent: jax.Array, k_rope: jax.Array, slots: jax.Array, kv_scale: jax.Array
) -> jax.Array:
    spec = describe_call(contract.cache_write_spec, kv_cache=kv_cache, latent=latent, k_rope=k_rope, slot_mapping=slots)
    return xla.by_scatter(kv_cache, latent, k_rope, slots, spec=spec, kv_scale=kv_scale[0])
