"""write_indexer_cache by the CuTe DSL kernel, in place when the cache is donated: one custom call, one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from tsmla_jax.ops import device, transforms
from tsmla_kernels.catalog import WRITE_INDEXER_CACHE
from tsmla_kernels.contract.packed import IndexerWriteSpec
from tsmla_kernels.sparse_cache.config import IndexerWriteConfig, indexer_write_config


def why_not(spec: IndexerWriteSpec) -> list[str]:
    """The reasons why the kernel can't run this call; empty if it can."""
    return device.why_not(WRITE_INDEXER_CACHE) + WRITE_INDEXER_CACHE.reasons(spec)


def write_indexer_cache(k_cache: jax.Array, *arrays: jax.Array, spec: IndexerWriteSpec) -> jax.Array:
    """The new cache, as the public write_indexer_cache documents it. Bytes have no derivative."""
    run = _transformable(indexer_write_config(spec), device.arch_for(WRITE_INDEXER_CACHE))
    written: jax.Array = run(k_cache, *map(jax.lax.stop_gradient, arrays))
    return written


@functools.cache
def _transformable(config: IndexerWriteConfig, arch: str) -> Callable[..., Any]:
    """The call as a function (k_cache, k, slot_mapping[, cos, sin]) -> k_cache."""
    rule = "p z d, t l, t" + (", t c, t c" if config.rope_dim else "")
    return transforms.row_writer(WRITE_INDEXER_CACHE, config, arch, rule=rule, slots=2)
