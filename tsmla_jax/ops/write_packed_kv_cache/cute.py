"""write_packed_kv_cache by the CuTe DSL kernel, in place when the cache is donated: one custom call, one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from tsmla_jax.ops import device, transforms
from tsmla_kernels.catalog import WRITE_PACKED_KV_CACHE
from tsmla_kernels.contract.packed import PackedWriteSpec
from tsmla_kernels.sparse_cache.config import PackedWriteConfig, packed_write_config


def why_not(spec: PackedWriteSpec) -> list[str]:
    """The reasons why the kernel can't run this call; empty if it can."""
    return device.why_not(WRITE_PACKED_KV_CACHE) + WRITE_PACKED_KV_CACHE.reasons(spec)


def write_packed_kv_cache(kv_cache: jax.Array, *arrays: jax.Array, spec: PackedWriteSpec) -> jax.Array:
    """The new cache, as the public write_packed_kv_cache documents it. Bytes have no derivative."""
    run = _transformable(packed_write_config(spec), device.arch_for(WRITE_PACKED_KV_CACHE))
    written: jax.Array = run(kv_cache, *map(jax.lax.stop_gradient, arrays))
    return written


@functools.cache
def _transformable(config: PackedWriteConfig, arch: str) -> Callable[..., Any]:
    """The call as a function (kv_cache, latent, k_rope, slot_mapping[, cos, sin]) -> kv_cache."""
    rule = "p z d, t l, t r, t" + (", t c, t c" if config.rotates else "")
    return transforms.row_writer(WRITE_PACKED_KV_CACHE, config, arch, rule=rule, slots=3)
