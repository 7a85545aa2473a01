"""mla_prefill by the CuTe DSL kernels: their operands, the derivative (that of "xla" from the kernel's results), how
vmap's axis becomes heads, and how heads are split over devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.inputs import Scales, describe_call
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.mla_prefill import blackwell, xla
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_PREFILL, MLA_PREFILL_SM100
from tsmla_kernels.contract import PrefillSpec
from tsmla_kernels.sm90.prefill import config as sm90_prefill
from tsmla_kernels.sm100 import config as sm100

Results = tuple[jax.Array, jax.Array]
Saved = tuple[tuple[jax.Array, ...], Results]
"""The operands and the results of a call, which its derivative needs."""


def why_not(spec: PrefillSpec) -> list[str]:
    """The reasons why no kernel can run this call; empty if one can."""
    if device.target_arch() not in MLA_PREFILL_SM100.archs:
        return device.why_not(MLA_PREFILL) + sm90_prefill.prefill_reasons(spec)
    reasons = device.why_not(MLA_PREFILL_SM100) + sm100.prefill_reasons(spec)
    return reasons or device.why_not_made(MLA_PREFILL_SM100, sm100.prefill_config(spec))


def notes(spec: PrefillSpec) -> list[str]:
    """What a user should know about this architecture's kernels."""
    return [sm100.NOTICE] if device.target_arch() in MLA_PREFILL_SM100.archs else []


def mla_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_kv: jax.Array,
    scales: Scales,
    *,
    spec: PrefillSpec,
) -> Results:
    """out and lse as the public mla_prefill documents them; both are always returned. Reverse-mode differentiable."""
    operand = scales.operand()
    results: Results = _differentiable(static_part(spec, operand))(q, k, v, operand, cu_seqlens_q, cu_seqlens_kv)
    return results


@dataclass(frozen=True)
class Call:
    """The static part of a call, without its shapes. The bounds on lengths are for the derivative and for Blackwell;
    static_scales are the scales where a kernel takes them by value."""

    causal: bool
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
            return_lse=True,
        )


def static_part(spec: PrefillSpec, scales: jax.Array | np.ndarray) -> Call:
    """The static part of the call that `spec` describes."""
    arch = device.arch_for(MLA_PREFILL)
    by_value = arch in MLA_PREFILL_SM100.archs and isinstance(scales, np.ndarray)
    static_scales = (float(scales[0]), float(scales[1])) if by_value else None
    return Call(spec.causal, spec.max_q_len, spec.max_kv_len, arch, device.num_sms(arch), static_scales)


@functools.cache
def _differentiable(call: Call) -> Callable[..., Any]:
    """The call as a function (q, k, v, scales, cu_seqlens_q, cu_seqlens_kv) -> (out, lse)."""

    def derivative(saved: Saved, cotangents: Results) -> tuple[jax.Array | None, ...]:
        q, k, v, _, *offsets = saved[0]
        return backward(call.spec(q, k, v, *offsets), saved, cotangents)

    return transforms.with_backward(_transformable(call), derivative)


def backward(spec: PrefillSpec, saved: Saved, cotangents: Results) -> tuple[jax.Array | None, ...]:
    """The cotangents of q, k, v and the scales; the offsets have none."""
    (q, k, v, scales, *offsets), results = saved
    d_q, d_k, d_v, d_logit_scale, d_v_scale, *_ = xla.backward(
        spec, ((q, k, v, scales[0], scales[1], *offsets), results), cotangents
    )
    return d_q, d_k, d_v, jnp.stack([d_logit_scale, d_v_scale]), None, None


@functools.cache
def _transformable(call: Call) -> Callable[..., Any]:
    """The call without its derivative."""

    def on_device(q: jax.Array, k: jax.Array, v: jax.Array, scales: jax.Array, *offsets: jax.Array) -> Results:
        spec = call.spec(q, k, v, *offsets)
        if call.arch not in MLA_PREFILL_SM100.archs:
            return on_hopper(call, spec, (q, k, v, *offsets, scales))
        return blackwell.on_one_device(
            q, k, v, scales, *offsets, spec=spec, static_scales=call.static_scales, arch=call.arch
        )

    return transforms.transformable(
        on_device,
        rule="t h k, s h k, s h v, c, b, b -> t h v, t h",
        fixed=("t", "k", "s", "v", "c", "b"),
        partition=_partition,
        fold=_fold,
        shared=3,
    )


def on_hopper(call: Call, spec: PrefillSpec, inputs: tuple[jax.Array, ...], rope_dim: int = 0) -> Results:
    """The Hopper kernel on the arrays of one device, whose number of heads may be a part of the whole.

    inputs: the kernel's operands (rope_dim as in PrefillConfig decides whether they are k and v, or kv and k_rope)."""
    workspaces = sm90_prefill.prefill_workspaces(spec.batch, call.num_sms)
    rows = (spec.total_q_len, spec.num_heads)
    out, lse, *_ = kernel_call(
        MLA_PREFILL,
        sm90_prefill.prefill_config(spec, rope_dim),
        inputs,
        ((*rows, spec.v_head_dim), rows, *(shape for shape, _ in workspaces.values())),
        arch=call.arch,
    )
    return out, lse


def _fold(
    run: Callable[..., Results], axis_size: int, q: jax.Array, k: jax.Array, v: jax.Array, *shared: jax.Array
) -> Results:
    """vmap's axis V, leading in q, k and v, becomes V * H heads of one call."""
    q, k, v = (x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3]) for x in (q, k, v))
    out, lse = run(q, k, v, *shared)
    split = (out.shape[0], axis_size, -1)
    return out.reshape(*split, out.shape[2]).swapaxes(0, 1), lse.reshape(split).swapaxes(0, 1)


def _partition(shapes: Sequence[Any]) -> transforms.Partition:
    """Heads split everything that has them. Rows can't be split: where a request ends is only known on the device."""
    heads = transforms.named_axes(shapes[0])[1]
    rows, line = P(None, heads, None), P(None)
    return (rows, rows, rows, line, line, line), (rows, P(None, heads))
