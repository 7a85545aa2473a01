"""A planned call of mla_prefill's or mla_prefill_kv's kernels, which the forward and the backward pass share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from tsmla_jax.ops import device
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_PREFILL, MLA_PREFILL_SM100
from tsmla_kernels.contract import PrefillSpec

Results = tuple[jax.Array, ...]
"""out and lse, and max_logits if the spec has them."""
Saved = tuple[tuple[jax.Array, ...], Results]
"""The operands and the results of a call, which its derivative needs."""
Cotangents = tuple[jax.Array | None, ...]
"""The cotangents of a call's operands; None for the offsets and the selection."""

SEVERAL_TIMES = "implementation='reference' can be differentiated several times"
"""The alternative that the error names where the gradient's own derivative is asked for."""


class Planned(NamedTuple):
    """A call's spec without sizes, and the GPU that it is planned for. static_scales: the scales, if a kernel takes
    them by value. The spec keeps its bounds on lengths, which XLA's derivative and the Blackwell kernels need."""

    spec: PrefillSpec
    arch: str
    num_sms: int
    static_scales: tuple[float, float] | None

    @property
    def num_rows(self) -> int:
        """How many results have one value for each row and head: lse, and max_logits if the call returns it."""
        return 1 + self.spec.max_logits

    def split(self, others: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """The operands after the first three, in three tuples: the sinks (if any); the scales and the two arrays of
        offsets; the arrays of a selection (if any).
        """
        first = int(self.spec.sinks)
        return tuple(others[:first]), tuple(others[first : first + 3]), tuple(others[first + 3 :])

    def spec_of(self, q: Any, k: Any, cu_seqlens_q: jax.Array) -> PrefillSpec:
        """The spec of the call on these arrays, which may be the arrays of one device, or of several calls that vmap
        made one. `k` may also be kv.
        """
        return self.spec.with_sizes_of(q.shape, k.shape, cu_seqlens_q.shape)


def planned(spec: PrefillSpec, scales: jax.Array | np.ndarray) -> Planned:
    """The call that `spec` describes, planned for the GPU that is there."""
    arch = device.arch_for(MLA_PREFILL)
    by_value = arch in MLA_PREFILL_SM100.archs and isinstance(scales, np.ndarray)
    static_scales = (float(scales[0]), float(scales[1])) if by_value else None
    return Planned(spec.without_sizes(), arch, device.num_sms(arch), static_scales)


def refuse_second_derivative(*_: jax.Array) -> NoReturn:
    """Refuses the derivative of the kernels themselves, which only a second derivative asks for."""
    raise contract.not_differentiable("the gradient of mla_prefill", SEVERAL_TIMES)
