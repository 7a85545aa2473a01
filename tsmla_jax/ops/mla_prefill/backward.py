"""The derivative of the prefill kernels' calls: the kernel of the gradient if it can run, else the loop of "xla"."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import transforms
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.mla_prefill import xla
from tsmla_jax.ops.mla_prefill.call import Cotangents, Planned, Results, Saved, refuse_second_derivative
from tsmla_kernels.catalog import MLA_PREFILL_BACKWARD
from tsmla_kernels.contract import PrefillSpec
from tsmla_kernels.sm90.prefill.backward import config as sm90_backward

Gradients = tuple[jax.Array, ...]
"""The gradients of q, k and v, or of q, kv and k_rope; and of the sinks if there are any."""


class Operands(NamedTuple):
    """The arrays that the kernel reads; the fields k and v may also hold kv and k_rope."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    out: jax.Array
    lse: jax.Array
    d_out: jax.Array
    d_lse: jax.Array
    scales: jax.Array
    cu_seqlens_q: jax.Array
    cu_seqlens_kv: jax.Array
    selection: jax.Array | None = None
    selection_rows: jax.Array | None = None

    @property
    def selected(self) -> tuple[jax.Array, ...]:
        """The selection's arrays, if there are any."""
        return () if self.selection is None or self.selection_rows is None else (self.selection, self.selection_rows)


HEADED = 7
"""How many operands, from the first on, have an axis of vmap's calls where these are folded into one. The sinks after
them have one, too; all other operands are then the same in every call."""


def why_no_kernel(spec: PrefillSpec, arch: str) -> list[str]:
    """The reasons why the kernel can't compute the gradient of this call; empty if it can."""
    return MLA_PREFILL_BACKWARD.arch_reasons(arch) or MLA_PREFILL_BACKWARD.reasons(spec)


def note(spec: PrefillSpec, arch: str) -> str:
    """Which backward pass a differentiated call runs, for `explain`."""
    reasons = why_no_kernel(spec, arch)
    return f"its derivative is that of xla: {'; '.join(reasons)}" if reasons else "its derivative is a kernel too"


def backward(call: Planned, saved: Saved, cotangents: Results) -> Cotangents:
    """The cotangents of the call's operands: q, k, v, the sinks (if any), the scales, the offsets and the selection.
    saved: the operands in this order, and the results.
    """
    (q, k, v, *others), results = saved
    sinks, (scales, *offsets), selection = call.split(others)
    spec = call.spec_of(q, k, offsets[0])
    if not why_no_kernel(spec, call.arch):
        return by_kernel(call, saved, cotangents)
    d_q, d_k, d_v, d_logit_scale, d_v_scale, *found = xla.backward(
        spec, ((q, k, v, scales[0], scales[1], *offsets, *selection, *sinks), results), cotangents
    )
    unknown = found[: len(offsets) + len(selection)]
    return d_q, d_k, d_v, *found[len(unknown) :], jnp.stack([d_logit_scale, d_v_scale]), *unknown


def by_kernel(call: Planned, saved: Saved, cotangents: Results) -> Cotangents:
    """`backward` by the kernel; k and v may also be kv and k_rope. A scale's cotangent is NaN if the scale is 0."""
    (q, k, v, *others), (out, lse, *_) = saved
    d_out, d_lse, *_ = cotangents
    sinks, (scales, *offsets), selection = call.split(others)
    shared = (*offsets, *selection)
    d_q, *found = _transformable(call, v.ndim == 2)(q, k, v, out, lse, d_out, d_lse, *sinks, scales, *shared)
    # q is a factor of the logits as their scale is, and out is proportional to its own scale.
    d_scales = jnp.stack([transforms.sum_of_products(d_q, q), transforms.sum_of_products(out, d_out)]) / scales
    return d_q, *found, d_scales, *(None for _ in shared)


@functools.cache
def _transformable(call: Planned, shared_rope: bool) -> Callable[..., Gradients]:
    """The kernel as a function of Operands. Under vmap there is one call after another if heads share the rope
    columns.
    """
    keys, columns = ("s h w, s r", ("w", "r")) if shared_rope else ("s h k, s h v", ())
    sinks, selection = ", h" * call.spec.sinks, ", n m, t" * call.spec.selection
    return transforms.transformable(
        functools.partial(_on_device, call),
        rule=f"t h k, {keys}, t h v, t h, t h v, t h{sinks}, c, b, b{selection} -> t h k, {keys}{sinks}",
        fixed=("t", "k", "s", *columns, "v", "c", "b", *("n", "m") * call.spec.selection),
        partition=functools.partial(_partition, call, shared_rope),
        fold=None if shared_rope else functools.partial(_fold, call),
        shared=5 if call.spec.selection else 3,
        derivative=refuse_second_derivative,
        summed=transforms.Summed((2,), (1,)) if shared_rope else None,
    )


def _on_device(call: Planned, *arrays: jax.Array) -> Gradients:
    """The kernel on the arrays of one device, which may have only a part of the heads."""
    sinks = arrays[HEADED : HEADED + call.spec.sinks]
    x = Operands(*arrays[:HEADED], *arrays[HEADED + len(sinks) :])
    spec = call.spec_of(x.q, x.k, x.cu_seqlens_q)
    config = sm90_backward.backward_config(spec, x.v.shape[1] if x.v.ndim == 2 else 0)
    workspaces = sm90_backward.backward_workspaces(
        config, spec.batch, spec.total_q_len, spec.total_kv_len, spec.num_heads, call.num_sms
    )
    gradients = kernel_call(
        MLA_PREFILL_BACKWARD,
        config,
        (
            *(x.q, x.k, x.v, x.cu_seqlens_q, x.cu_seqlens_kv, *x.selected, *sinks),
            *(x.scales, x.out, x.lse, x.d_out, x.d_lse),
        ),
        (x.q.shape, x.k.shape, x.v.shape, *(s.shape for s in sinks), *(shape for shape, _ in workspaces.values())),
        arch=call.arch,
    )
    return tuple(gradients[: 3 + len(sinks)])


def _fold(call: Planned, run: Callable[..., Gradients], axis_size: int, *arrays: jax.Array) -> Gradients:
    """vmap's axis V, leading in all arrays but the shared ones, becomes V * H heads of one call."""
    shared = HEADED + call.spec.sinks
    folded = (x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in arrays[:HEADED])
    found = run(*folded, *(x.reshape(-1) for x in arrays[HEADED:shared]), *arrays[shared:])
    of_rows = (x.reshape(x.shape[0], axis_size, -1, x.shape[2]).swapaxes(0, 1) for x in found[:3])
    return *of_rows, *(x.reshape(axis_size, -1) for x in found[3:])


def _partition(call: Planned, shared_rope: bool, shapes: Sequence[Any]) -> transforms.Partition:
    """The sharding of q along heads; arrays without heads are whole."""
    heads = transforms.named_axes(shapes[0])[1]
    rows, terms, sinks = P(None, heads, None), P(None, heads), (P(heads),) * call.spec.sinks
    gradients = (rows, rows, P(None, None) if shared_rope else rows)
    shared = tuple(P(*(None,) * len(shape.shape)) for shape in shapes[HEADED + len(sinks) :])
    return (*gradients, rows, terms, rows, terms, *sinks, *shared), (*gradients, *sinks)
