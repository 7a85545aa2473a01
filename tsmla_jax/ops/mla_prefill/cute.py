"""mla_prefill by the CuTe DSL kernels: their operands, the folding of vmap's axis into heads, and the splitting of
heads over devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.inputs import Scales
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.mla_prefill import backward, blackwell
from tsmla_jax.ops.mla_prefill.call import Planned, Results, planned, refuse_second_derivative
from tsmla_kernels.catalog import MLA_PREFILL, MLA_PREFILL_SM100
from tsmla_kernels.contract import PrefillSpec
from tsmla_kernels.sm90.prefill import config as sm90_prefill
from tsmla_kernels.sm100 import config as sm100
from tsmla_kernels.sm100.dense_arrays import PrefillArrays


def why_not(spec: PrefillSpec) -> list[str]:
    """The reasons why no kernel can run this call; empty if one can."""
    if device.target_arch() not in MLA_PREFILL_SM100.archs:
        return device.why_not(MLA_PREFILL) + MLA_PREFILL.reasons(spec)
    reasons = device.why_not(MLA_PREFILL_SM100) + MLA_PREFILL_SM100.reasons(spec)
    return reasons or device.why_not_made(MLA_PREFILL_SM100, sm100.prefill_config(spec))


def notes(spec: PrefillSpec) -> list[str]:
    """Notes for users about this architecture's kernels, and about the derivative of a call that these kernels can
    run.
    """
    arch = device.target_arch()
    about = [sm100.NOTICE] if arch in MLA_PREFILL_SM100.archs else []
    return about if arch is None or why_not(spec) else [*about, backward.note(spec, arch)]


def mla_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_kv: jax.Array,
    scales: Scales,
    *selection: jax.Array,
    spec: PrefillSpec,
    sinks: jax.Array | None = None,
) -> Results:
    """out, lse and, if the spec has them, max_logits as the public mla_prefill documents them. Reverse-mode
    differentiable."""
    operand = scales.operand()
    attend = _differentiable(planned(spec, operand))
    given = (q, k, v) if sinks is None else (q, k, v, sinks.astype(jnp.float32))
    results: Results = attend(*given, operand, cu_seqlens_q, cu_seqlens_kv, *selection)
    return results


@functools.cache
def _differentiable(call: Planned) -> Callable[..., Any]:
    """The call as a function (q, k, v, [sinks,] scales, cu_seqlens_q, cu_seqlens_kv, *selection) -> Results."""
    return transforms.with_backward(_transformable(call), functools.partial(backward.backward, call))


@functools.cache
def _transformable(call: Planned) -> Callable[..., Any]:
    """The call without its derivative."""

    def on_device(q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> Results:
        sinks, (scales, *offsets), selection = call.split(others)
        spec = call.spec_of(q, k, offsets[0])
        if call.arch not in MLA_PREFILL_SM100.archs:
            return on_hopper(call, spec, (q, k, v, *offsets, *selection, *sinks, scales))
        return blackwell.on_one_device(
            PrefillArrays(q, k, v, *offsets), scales, spec=spec, static_scales=call.static_scales, arch=call.arch
        )

    return transforms.transformable(
        on_device,
        rule=f"t h k, s h k, s h v{', h' * call.spec.sinks}, c, b, b{', r w, t' * call.spec.selection}"
        f" -> t h v, t h{', t h' * call.spec.max_logits}",
        fixed=("t", "k", "s", "v", "c", "b", *("r", "w") * call.spec.selection),
        partition=functools.partial(_partition, call),
        fold=functools.partial(_fold, call),
        shared=5 if call.spec.selection else 3,
        derivative=refuse_second_derivative,
    )


def on_hopper(call: Planned, spec: PrefillSpec, inputs: tuple[jax.Array, ...], rope_dim: int = 0) -> Results:
    """The Hopper kernel on the arrays of one device, which may have only a part of the heads.

    inputs: the kernel's operands (rope_dim as in PrefillConfig decides whether they are k and v, or kv and k_rope)."""
    workspaces = sm90_prefill.prefill_workspaces(spec.batch, call.num_sms)
    rows = (spec.total_q_len, spec.num_heads)
    found = kernel_call(
        MLA_PREFILL,
        sm90_prefill.prefill_config(spec, rope_dim),
        inputs,
        ((*rows, spec.v_head_dim), rows, *[rows] * spec.max_logits, *(shape for shape, _ in workspaces.values())),
        arch=call.arch,
    )
    return tuple(found[: -len(workspaces)])


def _fold(call: Planned, run: Callable[..., Results], axis_size: int, *arrays: jax.Array) -> Results:
    """vmap's axis V, leading in q, k, v and the sinks, becomes V * H heads of one call."""
    sinks, shared, selection = call.split(arrays[3:])
    headed = (x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3]) for x in arrays[:3])
    out, *rows = run(*headed, *(x.reshape(-1) for x in sinks), *shared, *selection)
    split = (out.shape[0], axis_size, -1)
    return out.reshape(*split, out.shape[2]).swapaxes(0, 1), *(x.reshape(split).swapaxes(0, 1) for x in rows)


def _partition(call: Planned, shapes: Sequence[Any]) -> transforms.Partition:
    """The sharding: heads are split in every array that has them. Rows can't be split: where a request ends is known
    only on the device.
    """
    heads = transforms.named_axes(shapes[0])[1]
    rows = P(None, heads, None)
    sinks, *others = call.split(shapes[3:])
    shared = tuple(P(*(None,) * len(shape.shape)) for shapes in others for shape in shapes)
    return (rows, rows, rows, *(P(heads) for _ in sinks), *shared), (rows, *[P(None, heads)] * call.num_rows)
