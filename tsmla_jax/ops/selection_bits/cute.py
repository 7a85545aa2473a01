"""selection_bits by the CuTe DSL kernel: one custom call, one launch. Rows are partitioned as those of the positions,
and vmap's axis is folded into them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_kernels.catalog import SELECTION_BITS
from tsmla_kernels.contract.selection import SelectionBitsSpec
from tsmla_kernels.selection.config import SelectionBitsConfig, selection_bits_config


def why_not(spec: SelectionBitsSpec) -> list[str]:
    """The reasons why the kernel can't run this call; empty if it can."""
    return device.why_not(SELECTION_BITS) + SELECTION_BITS.reasons(spec)


def selection_bits(positions: jax.Array, *others: jax.Array, spec: SelectionBitsSpec) -> jax.Array:
    """The words as the public selection_bits documents them."""
    if 0 in positions.shape:
        return jnp.zeros((positions.shape[0], spec.num_words), jnp.int32)
    config, arch = selection_bits_config(spec), device.arch_for(SELECTION_BITS)
    words: jax.Array = _transformable(config, spec.num_words, arch)(positions, *others)
    return words


@functools.cache
def _transformable(config: SelectionBitsConfig, num_words: int, arch: str) -> Callable[..., Any]:
    """The call as a function (positions[, lengths][, starts]) -> words."""

    def on_device(positions: jax.Array, *others: jax.Array) -> jax.Array:
        shapes = ((positions.shape[0], num_words),)
        return kernel_call(SELECTION_BITS, config, (positions, *others), shapes, arch=arch)[0]

    def fold(run: Callable[..., Any], axis_size: int, *arrays: jax.Array) -> jax.Array:
        words: jax.Array = run(*map(transforms.fold_rows, arrays))
        return words.reshape(axis_size, -1, num_words)

    def partition(shapes: Sequence[Any]) -> transforms.Partition:
        """The sharding: rows as in the positions, columns whole."""
        rows = transforms.named_axes(shapes[0])[0]
        return tuple(P(rows, *(None,) * (len(shape.shape) - 1)) for shape in shapes), P(rows, None)

    return transforms.transformable(
        on_device,
        rule=f"t k{', t' * (config.lengths + config.starts)} -> t w",
        fixed=("k", "w"),
        partition=partition,
        fold=fold,
    )
