"""The static part of a call of mla_prefill's or mla_prefill_kv's kernels, which the forward and the backward pass
share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np

from tsmla_jax.ops import device
from tsmla_jax.ops.inputs import describe_call
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_PREFILL, MLA_PREFILL_SM100
from tsmla_kernels.contract import PrefillSpec

Results = tuple[jax.Array, jax.Array]
Saved = tuple[tuple[jax.Array, ...], Results]
"""The operands and the results of a call, which its derivative needs."""
Cotangents = tuple[jax.Array | None, ...]
"""The cotangents of a call's operands; None for the offsets."""

SEVERAL_TIMES = "implementation='reference' can be differentiated several times"
"""What to do where the gradient's own derivative is refused."""


@dataclass(frozen=True)
class Call:
    """The static part of a call, without its shapes. The bounds on lengths are for the derivative in XLA and for
    Blackwell; static_scales are the scales where a kernel takes them by value."""

    causal: bool
    deterministic: bool
    max_q_len: int
    max_kv_len: int
    arch: str
    num_sms: int
    static_scales: tuple[float, float] | None

    def spec(self, q: Any, k: Any, v: Any, cu_seqlens_q: jax.Array, cu_seqlens_kv: jax.Array) -> PrefillSpec:
        """The spec of a call on these arrays, which may be those of one device, or of several calls."""
        return describe_call(
            contract.prefill_spec,
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            max_q_len=self.max_q_len,
            max_kv_len=self.max_kv_len,
            softmax_scale=1.0,
            causal=self.causal,
            deterministic=self.deterministic,
        )


def static_part(spec: PrefillSpec, scales: jax.Array | np.ndarray) -> Call:
    """The static part of the call that `spec` describes."""
    arch = device.arch_for(MLA_PREFILL)
    by_value = arch in MLA_PREFILL_SM100.archs and isinstance(scales, np.ndarray)
    return Call(
        causal=spec.causal,
        deterministic=spec.deterministic,
        max_q_len=spec.max_q_len,
        max_kv_len=spec.max_kv_len,
        arch=arch,
        num_sms=device.num_sms(arch),
        static_scales=(float(scales[0]), float(scales[1])) if by_value else None,
    )


def refuse_second_derivative(*_: jax.Array) -> NoReturn:
    """The derivative of the kernels themselves, which only a derivative of their gradient asks for."""
    raise contract.not_differentiable("the gradient of mla_prefill", SEVERAL_TIMES)
