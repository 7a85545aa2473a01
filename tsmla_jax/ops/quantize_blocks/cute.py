"""quantize_blocks by the CuTe DSL kernel: one custom call, one launch. Rows are partitioned as x's are, and vmap's axis
is one more axis of rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.quantize_blocks import reference
from tsmla_kernels.catalog import QUANTIZE_BLOCKS
from tsmla_kernels.contract.products import QuantizeBlocksSpec, blocks_of
from tsmla_kernels.sm90.products.config import quantize_config

Results = tuple[jax.Array, jax.Array]


def why_not(spec: QuantizeBlocksSpec) -> list[str]:
    """The reasons why the kernel can't run this call; empty if it can."""
    return device.why_not(QUANTIZE_BLOCKS) + QUANTIZE_BLOCKS.reasons(spec)


def quantize_blocks(x: jax.Array, *, spec: QuantizeBlocksSpec) -> Results:
    """values and scales, as the public quantize_blocks documents them."""
    if 0 in x.shape:
        scales = (*x.shape[:-1], blocks_of(x.shape[-1]))
        return jnp.zeros(x.shape, jnp.float8_e4m3fn), jnp.zeros(scales, jnp.float32)
    arch = device.arch_for(QUANTIZE_BLOCKS)
    results: Results = _transformable(spec.power_of_two, arch, device.num_sms(arch))(x)
    return results


@functools.cache
def _transformable(power_of_two: bool, arch: str, num_sms: int) -> Callable[..., Any]:
    """The call as a function of x, of any shape and dtype."""

    def on_device(x: jax.Array) -> Results:
        rows, terms = math.prod(x.shape[:-1]), x.shape[-1]
        config = quantize_config(QuantizeBlocksSpec(x.shape, x.dtype.name, power_of_two), num_sms)
        shapes = ((rows, terms), (rows, blocks_of(terms)))
        values, scales = kernel_call(QUANTIZE_BLOCKS, config, (x.reshape(rows, terms),), shapes, arch=arch)
        return values.reshape(x.shape), scales.reshape(*x.shape[:-1], -1)

    def derivative(x: jax.Array) -> Results:
        return reference.quantize_blocks(x, spec=QuantizeBlocksSpec(x.shape, x.dtype.name, power_of_two))

    return transforms.transformable(
        on_device,
        rule="... k -> ... k, ... s",
        fixed=("k", "s"),
        partition=_partition,
        fold=lambda run, axis_size, x: run(x),
        derivative=derivative,
    )


def _partition(shapes: Sequence[Any]) -> transforms.Partition:
    """Specs with the rows split as the rows of x are, and the columns whole."""
    rows = P(*transforms.named_axes(shapes[0])[:-1], None)
    return (rows,), (rows, rows)
