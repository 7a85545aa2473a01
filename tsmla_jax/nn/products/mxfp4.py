"""Weights in MXFP4: e2m1, with a power of two for every 32 values of a row, as DeepSeek-V4's checkpoints hold experts.

Where grouped_block_scaled_matmul has a kernel for them, they stay in four bits on the device. The kernel makes bfloat16
of them as it reads them, exactly but for the least scale, 2^-127, which becomes 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tsmla_jax.ops.block_scaled_matmul.reference import unpacked
from tsmla_jax.ops.exporting import exportable
from tsmla_jax.ops.grouped_block_scaled_matmul.api import OPERATION
from tsmla_kernels.contract.products import BLOCK, ProductSpec


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MXFP4:
    """A weight of 2 axes, or a stack of them.

    Attributes:
      values: uint8 [..., N, K / 2], two numbers a byte, the first in the lower four bits.
      scales: uint8 [..., N, K / 32], the exponents of their powers of two, with 127 added.
    """

    values: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, [..., N, K]."""
        return *self.values.shape[:-1], 2 * self.values.shape[-1]

    def widened(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The weight's numbers, [..., N, K], in `dtype`."""
        return unpacked(self.values, self.scales).astype(dtype)


def can_be_kept(hidden: int, width: int) -> bool:
    """Whether experts of these sizes can stay in four bits: the kernel takes whole blocks of terms."""
    return hidden % BLOCK == 0 and width % BLOCK == 0


def why_not_mxfp4(dtype: Any, hidden: int, width: int) -> list[str]:
    """Why the kernel of grouped_block_scaled_matmul can't run, or isn't chosen for, experts in MXFP4 on jax's default
    device; empty if it is chosen.

    Args:
      dtype: the dtype of the activations.
      hidden, width: C and I.
    """
    return why_not_experts(dtype, hidden, width, packed=True)


def why_not_experts(dtype: Any, hidden: int, width: int, **form: Any) -> list[str]:
    """`why_not_mxfp4` for experts whose weights are of the form that ProductSpec's options `form` describe."""
    name = jnp.dtype(dtype).name
    first = ProductSpec(1, hidden, 2 * width, 1, name, name, gated=True, **form)
    second = ProductSpec(1, width, hidden, 1, name, name, **form)
    reasons = [reason for spec in (first, second) for reason in OPERATION.why_not("cute", spec, named=False)]
    return list(dict.fromkeys(reasons))
