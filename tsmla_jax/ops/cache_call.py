"""What the cache kernels' custom calls have in common: jax's transformations of an operation on slots of a paged cache.

From the outside in: derivatives are those of the operation in XLA (custom_jvp), vmap folds its axis into the tokens and
the pages (custom_vmap), partitioning keeps pages and heads where they are (custom_partitioning), and what remains is
one custom call on the shapes of one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import cute_call
from tsmla_jax.ops.arrays import as_scale

PROVEN = ("sm_90a",)
"""The architectures on which the kernels have run; on others they must be named."""

MAX_SLOTS = 2**31
"""Slots are int32."""

Partition = tuple[tuple[P, ...], Any]
"""The specs of operands, and of the results."""


def why_not_by_default() -> list[str]:
    """The reasons against the cache kernels that stand only when implementation is None."""
    arch = cute_call.target_arch()
    unproven = (
        [] if arch is None or arch in PROVEN else [f"the kernel has not been run on {arch} by us; it can be named"]
    )
    return cute_call.why_not_by_default() + unproven


def scale_operand(scale: float | jax.Array | None) -> jax.Array | np.ndarray:
    """A scale as the kernels take it, float32 [1]. A Python number is a constant and costs no computation."""
    if scale is None or isinstance(scale, float | int):
        return np.array([1.0 if scale is None else scale], np.float32)
    return as_scale(scale, jnp.float32).reshape(1)


def transformable(
    on_device: Callable[..., Any],
    *,
    rule: str,
    fixed: tuple[str, ...],
    partition: Callable[[Sequence[Any]], Partition],
    fold: Callable[..., Any],
    derivative: Callable[..., Any],
    scales: int = 1,
    slots: int | None = None,
) -> Callable[..., Any]:
    """`on_device`, a function of arrays, the last of which are scales, under jax's transformations.

    Args:
      rule: the sharding rule of custom_partitioning. fixed: its factors that are never split.
      partition: the specs that the operands' and results' shapes (with shardings) should have.
      fold: of (run, axis_size, *arrays), all batched but the scales: one call of `run` in the place of axis_size of
        them, or None where it takes that many.
      derivative: the same function in XLA, differentiable.
      scales: how many of the operands are scales.
      slots: which operand holds the slots, where the first one is a cache whose pages may be split.
    """

    def shardings(mesh: Any, shapes: Sequence[Any]) -> tuple[Any, Any]:
        operands, results = partition(shapes)
        named = functools.partial(NamedSharding, mesh)
        return tuple(map(named, operands)), jax.tree.map(named, results, is_leaf=lambda x: isinstance(x, P))

    def split(mesh: Any, shapes: Sequence[Any], _: Any) -> tuple[Any, ...]:
        operands, results = shardings(mesh, shapes)
        pages = operands[0].spec[0]

        def local(*arrays: jax.Array) -> Any:
            if slots is None or pages is None:
                return on_device(*arrays)
            first = lax.axis_index(pages) * (arrays[0].shape[0] * arrays[0].shape[1])
            here = jnp.where(arrays[slots] < 0, -1, arrays[slots] - first)  # those of other devices are out of range
            return on_device(*arrays[:slots], here, *arrays[slots + 1 :])

        return mesh, local, results, operands

    partitioned = custom_partitioning(on_device)
    partitioned.def_partition(
        partition=split,
        infer_sharding_from_operands=lambda mesh, shapes, _: shardings(mesh, shapes)[1],
        sharding_rule=rule,
        need_replication_factors=fixed,
    )
    batched = custom_vmap(lambda *arrays: partitioned(*arrays))

    @batched.def_vmap
    def over_axis(axis_size: int, in_batched: Sequence[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        whole = [
            array if given else jnp.broadcast_to(array, (axis_size, *array.shape))
            for array, given in zip(arrays, in_batched, strict=True)
        ]
        # One call has one set of scales, so calls that differ in them can't be one.
        folded = None if any(in_batched[-scales:]) else fold(run, axis_size, *whole[:-scales], *arrays[-scales:])
        results = lax.map(lambda each: run(*each), tuple(whole)) if folded is None else folded
        return results, jax.tree.map(lambda _: True, results)

    @jax.custom_jvp
    def cache_kernel(*arrays: jax.Array) -> Any:
        return batched(*arrays)

    @cache_kernel.defjvp
    def jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        return run(*primals), jax.jvp(derivative, primals, tangents)[1]

    run: Callable[..., Any] = jax.jit(cache_kernel)
    return run


def fold_pages(kv_cache: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """Caches [V, P, Z, D] and slots [V, T] as one cache of V * P pages, and V * T slots; None if there are more than
    int32 can count."""
    axis_size, pages, page_size, width = kv_cache.shape
    each = pages * page_size
    if not isinstance(pages, int) or axis_size * each > MAX_SLOTS:
        return None
    first = jnp.arange(axis_size, dtype=jnp.int32)[:, None] * each
    folded = jnp.where((slots >= 0) & (slots < each), slots + first, -1)
    return kv_cache.reshape(axis_size * pages, page_size, width), folded.reshape(-1)


def fold_rows(array: jax.Array) -> jax.Array:
    """[V, T, ...] as [V * T, ...]."""
    return array.reshape(-1, *array.shape[2:])
