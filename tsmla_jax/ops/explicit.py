"""Running an implementation on arrays whose sharding is part of their type: jax's explicit mesh axes, the default kind.

There, gathers and reshapes of sharded axes are refused instead of partitioned. Inside, an implementation sees those
axes as automatic ones; outside, its results have the sharding that follows from the operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec


def call(
    run: Callable[..., Any], arrays: Sequence[Any], out_specs: Callable[[], Any], *, spec: Any, **options: Any
) -> Any:
    """run(*arrays, spec=spec, **options), where out_specs() gives the results' PartitionSpecs if axes are explicit."""
    operands = [x for x in jax.tree.leaves((arrays, options)) if isinstance(x, jax.Array)]
    mesh = next((mesh for mesh in map(_mesh, operands) if AxisType.Explicit in mesh.axis_types), None)
    if mesh is None:
        return run(*arrays, spec=spec, **options)

    def automatic(arrays: Sequence[Any], options: dict[str, Any]) -> Any:
        return run(*arrays, spec=spec, **options)

    axes = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)
    with jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
        return jax.sharding.auto_axes(automatic, axes=axes, out_sharding=out_specs())(arrays, options)


def row_specs(x: jax.Array) -> tuple[PartitionSpec, PartitionSpec]:
    """The specs of an array like x with another last axis, and of one without it: of an out and its lse."""
    rows = tuple(_spec(x))[: x.ndim - 1]
    rows += (None,) * (x.ndim - 1 - len(rows))
    return PartitionSpec(*rows, None), PartitionSpec(*rows)


def same_spec(x: jax.Array) -> PartitionSpec:
    """The spec of an array sharded like x."""
    return _spec(x)


def _mesh(x: jax.Array) -> Any:
    return jax.typeof(x).sharding.mesh


def _spec(x: jax.Array) -> PartitionSpec:
    return jax.typeof(x).sharding.spec
