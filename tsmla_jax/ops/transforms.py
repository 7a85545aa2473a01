"""jax's transformations of a kernel's call, written once for all kernels.

From the outside in: a derivative, vmap (custom_vmap), partitioning over devices (custom_partitioning), and inside one
custom call on the shapes of one device.

A program over several devices is exported through shard_map: automatic partitioning calls back into this process, which
jax can't serialise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.loops import carry
from tsmla_kernels import contract
from tsmla_kernels.kernel import Config, Kernel

MAX_SLOTS = 2**31
"""Slots are int32."""

_NO_MESH = jax.sharding.AbstractMesh((), ())

Partition = tuple[tuple[P, ...], Any]
"""The specs of operands, and of the results."""


class Summed(NamedTuple):
    """Results that are sums over axes of the first operand. Devices that split one of these axes add up their
    results.
    """

    results: tuple[int, ...]
    axes: tuple[int, ...]


def transformable(
    on_device: Callable[..., Any],
    *,
    rule: str,
    fixed: tuple[str, ...],
    partition: Callable[[Sequence[Any]], Partition],
    fold: Callable[..., Any] | None = None,
    shared: int = 0,
    unexpanded: tuple[int, ...] = (),
    derivative: Callable[..., Any] | None = None,
    slots: int | None = None,
    summed: Summed | None = None,
) -> Callable[..., Any]:
    """`on_device`, a function of arrays, under jax's transformations.

    Args:
      rule: the sharding rule of custom_partitioning. fixed: the rule's factors that are never split.
      partition: the specs that the operands' and results' shapes (with shardings) should have.
      fold: called with (run, axis_size, *arrays), all batched but the shared ones: one call of `run` in the place of
        axis_size calls. It may return None if one call can't hold them all. Without a fold there is one call after
        another.
      shared: how many operands at the end must be the same for all calls that are folded into one. If vmap batches one
        of them, there is one call after another.
      unexpanded: operands that `fold` takes without the batch axis when vmap gives them none.
      derivative: the same function in XLA, whose derivative is taken in either mode; it may raise to refuse. If it is
        None, the only derivative is that of `with_backward`; if both are given, only second derivatives use this one.
      slots: the operand that holds slots, if the first operand is a cache whose pages may be split.
      summed: results that the devices add up, if there are any.
    """

    def shardings(mesh: Any, shapes: Sequence[Any]) -> tuple[Any, Any]:
        operands, results = partition(shapes)
        named = functools.partial(NamedSharding, mesh)
        return tuple(map(named, operands)), jax.tree.map(named, results, is_leaf=lambda x: isinstance(x, P))

    def split(mesh: Any, shapes: Sequence[Any], _: Any) -> tuple[Any, ...]:
        operands, results = shardings(mesh, shapes)
        pages = operands[0].spec[0]
        mesh_axes = [] if summed is None else [operands[0].spec[axis] for axis in summed.axes]
        split_axes = jax.tree.leaves([axis for axis in mesh_axes if axis is not None])

        def local(*arrays: jax.Array) -> Any:
            # The computation of one device has no mesh, whatever jax.set_mesh has set: otherwise jax 0.12 would leave
            # sharding annotations in it, which nothing resolves any more.
            with jax.sharding.use_abstract_mesh(_NO_MESH):
                return on_shapes(*arrays)

        def on_shapes(*arrays: jax.Array) -> Any:
            if summed is not None and split_axes:
                parts = list(on_device(*arrays))
                for i in summed.results:
                    parts[i] = lax.psum(parts[i].astype(jnp.float32), tuple(split_axes)).astype(parts[i].dtype)
                return tuple(parts)
            if slots is None or pages is None:
                return on_device(*arrays)
            first = lax.axis_index(pages) * (arrays[0].shape[0] * arrays[0].shape[1])
            here = jnp.where(arrays[slots] < 0, -1, arrays[slots] - first)  # other devices' slots are out of range
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
        def expand(i: int) -> jax.Array:
            return arrays[i] if in_batched[i] else jnp.broadcast_to(arrays[i], (axis_size, *arrays[i].shape))

        each = range(len(arrays))
        results = None
        if fold is not None and not any(in_batched[len(arrays) - shared :]):
            kept = (*unexpanded, *each[len(arrays) - shared :])
            results = fold(run, axis_size, *(arrays[i] if i in kept else expand(i) for i in each))
        if results is None:
            results = lax.map(lambda one: run(*one), tuple(map(expand, each)))
        return results, jax.tree.map(lambda _: True, results)

    if derivative is None:
        run: Callable[..., Any] = jax.jit(batched)
        return run

    differentiable = jax.custom_jvp(lambda *arrays: batched(*arrays))

    @differentiable.defjvp
    def jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        tangents_out = jax.jvp(derivative, primals, tangents)[1]
        return run(*primals), tangents_out

    run = jax.jit(differentiable)
    return run


def row_writer(kernel: Kernel, config: Config, arch: str, *, rule: str, slots: int) -> Callable[..., Any]:
    """A kernel that writes one row for each token into slots of its first operand, as a function of its inputs under
    jax's transformations other than derivatives. Pages may be split; all tokens are on every device.

    Args:
      rule: the sharding rule of the operands; its first three factors are the cache's axes.
      slots: the operand that holds slots.
    """

    def on_device(cache: jax.Array, *arrays: jax.Array) -> jax.Array:
        return kernel_call(kernel, config, (cache, *arrays), (cache.shape,), arch=arch)[0]

    def partition(shapes: Sequence[Any]) -> Partition:
        cache = P(named_axes(shapes[0])[0], None, None)
        return (cache, *(P(*(None,) * len(shape.shape)) for shape in shapes[1:])), cache

    def fold(run: Callable[..., Any], axis_size: int, cache: jax.Array, *arrays: jax.Array) -> jax.Array | None:
        if (folded := fold_pages(cache, arrays[slots - 1])) is None:
            return None
        rows = list(map(fold_rows, arrays))
        rows[slots - 1] = folded[1]
        return run(folded[0], *rows).reshape(cache.shape)

    factors = dict.fromkeys(rule.replace(",", "").split())
    return transformable(
        on_device,
        rule=f"{rule} -> p z d",
        fixed=tuple(factor for factor in factors if factor != "p"),
        partition=partition,
        fold=fold,
        slots=slots,
    )


def with_backward(run: Callable[..., Any], backward: Callable[[Any, Any], tuple[Any, ...]]) -> Callable[..., Any]:
    """`run`, a function of arrays, with a derivative in reverse mode.

    backward: takes (operands, results) and the results' cotangents; returns the operands' cotangents.
    """

    def forward(*operands: jax.Array) -> tuple[Any, tuple[tuple[jax.Array, ...], Any]]:
        results = run(*operands)
        return results, (operands, results)

    differentiable = jax.custom_vjp(lambda *operands: run(*operands))
    differentiable.defvjp(forward, backward)

    def call(*operands: Any) -> Any:
        # All operands get one varying type before the custom derivative: shard_map then sums a replicated operand's
        # cotangent.
        arrays = [x for x in operands if isinstance(x, jax.Array)]
        return differentiable(*(carry(jnp.asarray(x), *arrays) for x in operands))

    return call


@jax.jit
def sum_of_products(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum of the products of a and b, float32. Rows of padding, in which a is 0, may be NaN in b."""
    return jnp.where(a == 0, 0, a.astype(jnp.float32) * b.astype(jnp.float32)).sum()


def without_derivative(results: Any, known: Any, op: str, alternative: str) -> Any:
    """`results` of a loop whose number of passes depends on the array `known`. Under jax.jit that number is not known,
    and such a loop has no derivative in reverse mode: to ask for one, in either mode, raises a NotImplementedError that
    says so.
    """
    if not isinstance(known, jax.core.Tracer):
        return results
    return refuse_derivative(results, (), f"{op} under jax.jit", alternative)


def refuse_derivative(results: Any, operands: Sequence[jax.Array], op: str, alternative: str) -> Any:
    """`results`, for which a derivative raises a NotImplementedError, be it of one of them or of one of `operands`,
    from which they were computed without a derivative.
    """
    leaves, structure = jax.tree.flatten(results)

    @jax.custom_jvp
    def same(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return arrays[: len(leaves)]

    @same.defjvp
    def refuse(primals: Any, tangents: Any) -> NoReturn:
        raise contract.not_differentiable(op, alternative)

    return jax.tree.unflatten(structure, same(*leaves, *operands))


def named_axes(shape: Any) -> tuple[Any, ...]:
    """The mesh axes of each dimension of a custom partitioning's operand; None for every dimension if the operand's
    sharding has no names.
    """
    spec = tuple(shape.sharding.spec) if isinstance(shape.sharding, NamedSharding) else ()
    return spec + (None,) * (len(shape.shape) - len(spec))


def axes_apart(axes: Any, others: Any) -> Any:
    """The mesh axes of a dimension, or None if one of them is among `others`, those of another dimension: an array can
    be split along a mesh axis once."""
    of_axes, of_others = (each if isinstance(each, tuple) else (each,) for each in (axes, others))
    return None if set(of_axes) & set(of_others) else axes


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
