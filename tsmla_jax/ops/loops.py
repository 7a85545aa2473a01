"""Types of arrays in shard_map: loops and kernel calls need arrays typed as varying over the same mesh axes."""

from __future__ import annotations

import jax
from jax import lax


def carry(initial: jax.Array, *operands: jax.Array) -> jax.Array:
    """`initial`, typed as varying over every mesh axis over which an operand varies.

    A loop's carry must keep its type: a constant start has the same value on all devices, the body mixes sharded data
    into it, and shard_map would refuse this change of type.
    """
    axes = frozenset().union(*map(_varying_axes, operands)) - _varying_axes(initial)
    return lax.pcast(initial, tuple(sorted(axes)), to="varying") if axes else initial


def _varying_axes(x: jax.Array) -> frozenset[str]:
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)  # its name since jax 0.10; `vma` before
    return frozenset(manual.varying if manual is not None else getattr(aval, "vma", ()))
