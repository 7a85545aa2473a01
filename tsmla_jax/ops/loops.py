"""Arrays whose types differ between devices as other arrays' do, which loops and kernels' calls need in shard_map."""

from __future__ import annotations

import jax
from jax import lax


def carry(initial: jax.Array, *operands: jax.Array) -> jax.Array:
    """`initial` typed as differing between the devices of every mesh axis along which an operand does.

    A loop's carry must have one type; a constant start is the same everywhere until the body mixes sharded data into
    it, which shard_map would refuse."""
    axes = frozenset().union(*map(_varying_axes, operands)) - _varying_axes(initial)
    return lax.pcast(initial, tuple(sorted(axes)), to="varying") if axes else initial


def _varying_axes(x: jax.Array) -> frozenset[str]:
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)  # its name since jax 0.10; `vma` before
    return frozenset(manual.varying if manual is not None else getattr(aval, "vma", ()))
