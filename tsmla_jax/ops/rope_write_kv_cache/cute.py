"""rope_write_kv_cache by the CuTe DSL kernel, in place when the cache is donated: one custom call, one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.inputs import describe_call, scale_operand
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.rope_write_kv_cache import xla
from tsmla_kernels.cache_ops import config as cache_config
from tsmla_kernels.catalog import ROPE_WRITE_KV_CACHE
from tsmla_kernels.contract import cache as cache_contract
from tsmla_kernels.contract.cache import RopeWriteSpec

Results = tuple[jax.Array, jax.Array]


def why_not(spec: RopeWriteSpec) -> list[str]:
    """The reasons why the kernel can't run this call; empty if it can."""
    return device.why_not(ROPE_WRITE_KV_CACHE) + ROPE_WRITE_KV_CACHE.reasons(spec)


def rope_write_kv_cache(
    kv_cache: jax.Array,
    q_nope: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
    slot_mapping: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    spec: RopeWriteSpec,
    q_scale: float | jax.Array | None,
    kv_scale: float | jax.Array | None,
) -> Results:
    """The query and the new cache, as the public rope_write_kv_cache documents them."""
    arch = device.arch_for(ROPE_WRITE_KV_CACHE)
    run = _transformable(cache_config.rope_write_config(spec), arch)
    scales = (scale_operand(q_scale), scale_operand(kv_scale))
    results: Results = run(kv_cache, q_nope, q_rope, latent, k_rope, slot_mapping, cos, sin, *scales)
    return results


@functools.cache
def _transformable(config: cache_config.RopeWriteConfig, arch: str) -> Callable[..., Any]:
    """The call as a function (kv_cache, q_nope, q_rope, latent, k_rope, slot_mapping, cos, sin, q_scale [1], kv_scale
    [1]) -> (q, kv_cache)."""

    def on_device(kv_cache: jax.Array, q_nope: jax.Array, q_rope: jax.Array, *others: jax.Array) -> Results:
        tokens, heads, _ = q_nope.shape
        rows = (array.reshape(tokens * heads, array.shape[-1]) for array in (q_nope, q_rope))
        inputs = (kv_cache, *rows, *others)
        shapes = ((tokens * heads, config.head_dim), kv_cache.shape)
        q, written = kernel_call(ROPE_WRITE_KV_CACHE, config, inputs, shapes, arch=arch)
        return q.reshape(tokens, heads, config.head_dim), written

    return transforms.transformable(
        on_device,
        rule="p z d, t h l, t h r, t l, t r, t, t c, t c, a, b -> t h d, p z d",
        fixed=("z", "d", "t", "l", "r", "c", "a", "b"),
        partition=_partition,
        fold=_fold,
        derivative=functools.partial(_derivative, config),
        shared=2,
        slots=5,
    )


def _partition(shapes: Sequence[Any]) -> transforms.Partition:
    cache = P(transforms.named_axes(shapes[0])[0], None, None)
    heads = P(None, transforms.named_axes(shapes[1])[1] or transforms.named_axes(shapes[2])[1], None)
    rows = P(None, None)
    return (cache, heads, heads, rows, rows, P(None), rows, rows, P(None), P(None)), (heads, cache)


def _fold(run: Callable[..., Any], axis_size: int, kv_cache: jax.Array, *arrays: jax.Array) -> Results | None:
    *tokens, slots, cos, sin, q_scale, kv_scale = arrays
    if (folded := transforms.fold_pages(kv_cache, slots)) is None:
        return None
    rows = transforms.fold_rows
    q, written = run(folded[0], *map(rows, tokens), folded[1], rows(cos), rows(sin), q_scale, kv_scale)
    return q.reshape(axis_size, -1, *q.shape[1:]), written.reshape(kv_cache.shape)


def _derivative(config: cache_config.RopeWriteConfig, *arrays: jax.Array) -> Results:
    *rest, q_scale, kv_scale = arrays
    names = ("kv_cache", "q_nope", "q_rope", "latent", "k_rope", "slot_mapping", "cos", "sin")
    spec = describe_call(
        cache_contract.rope_write_spec,
        **dict(zip(names, rest, strict=True)),
        q_dtype=config.q_dtype,
        rope_interleave=config.rope_interleave,
        rope_layout=config.rope_layout,
    )
    return xla.by_scatter(*rest, spec=spec, q_scale=q_scale[0], kv_scale=kv_scale[0])
