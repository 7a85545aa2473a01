"""The derivative of the prefill kernels' calls: the kernel of the gradient where it can run, else "xla"'s loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import transforms
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.mla_prefill import xla
from tsmla_jax.ops.mla_prefill.call import Call, Cotangents, Results, Saved, refuse_second_derivative
from tsmla_kernels.catalog import MLA_PREFILL_BACKWARD
from tsmla_kernels.contract import PrefillSpec
from tsmla_kernels.sm90.prefill import backward_config as sm90_backward

Gradients = tuple[jax.Array, jax.Array, jax.Array]
"""Those of q, k and v, or of q, kv and k_rope."""


def why_no_kernel(spec: PrefillSpec, arch: str) -> list[str]:
    """The reasons why the kernel can't compute the gradient of this call; empty if it can."""
    if arch not in MLA_PREFILL_BACKWARD.archs:
        legal = ", ".join(MLA_PREFILL_BACKWARD.archs)
        return [f"the architecture is {arch}; {MLA_PREFILL_BACKWARD.name} is written for {legal}"]
    return sm90_backward.backward_reasons(spec)


def note(spec: PrefillSpec, arch: str) -> str:
    """Which backward pass a differentiated call runs, for `explain`."""
    reasons = why_no_kernel(spec, arch)
    return f"its derivative is that of xla: {'; '.join(reasons)}" if reasons else "its derivative is a kernel too"


def backward(call: Call, saved: Saved, cotangents: Results) -> Cotangents:
    """The cotangents of q, k, v, the scales and the offsets, in this order, from a call's operands in this order, its
    results and their cotangents."""
    (q, k, v, scales, *offsets), results = saved
    spec = call.spec(q, k, v, *offsets)
    if not why_no_kernel(spec, call.arch):
        return by_kernel(call, saved, cotangents)
    d_q, d_k, d_v, d_logit_scale, d_v_scale, *_ = xla.backward(
        spec, ((q, k, v, scales[0], scales[1], *offsets), results), cotangents
    )
    return d_q, d_k, d_v, jnp.stack([d_logit_scale, d_v_scale]), None, None


def by_kernel(call: Call, saved: Saved, cotangents: Results) -> Cotangents:
    """`backward` by the kernel; k and v may also be kv and k_rope. A scale's cotangent is NaN where the scale is 0."""
    (q, *keys, scales, cu_seqlens_q, cu_seqlens_kv), (out, lse) = saved
    d_out, d_lse = cotangents
    run = _transformable(call, keys[1].ndim == 2)
    d_q, *d_keys = run(q, *keys, out, lse, d_out, d_lse, scales, cu_seqlens_q, cu_seqlens_kv)
    # q is a factor of the logits as their scale is, and out is proportional to its own scale.
    d_scales = jnp.stack([_dot(d_q, q), _dot(out, d_out)]) / scales
    return d_q, *d_keys, d_scales, None, None


@jax.jit
def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum of the products of a and b. Rows of no request have a = 0, and b may be NaN there."""
    return jnp.where(a == 0, 0, a.astype(jnp.float32) * b.astype(jnp.float32)).sum()


@functools.cache
def _transformable(call: Call, shared_rope: bool) -> Callable[..., Gradients]:
    """The kernel as a function of q, k and v (or kv and k_rope), out, lse, their cotangents, scales and offsets. vmap
    makes one call after another where heads share the rope columns."""
    keys, columns = ("s h w, s r", ("w", "r")) if shared_rope else ("s h k, s h v", ())
    return transforms.transformable(
        functools.partial(_on_device, call),
        rule=f"t h k, {keys}, t h v, t h, t h v, t h, c, b, b -> t h k, {keys}",
        fixed=("t", "k", "s", *columns, "v", "c", "b"),
        partition=functools.partial(_partition, shared_rope),
        fold=None if shared_rope else _fold,
        shared=3,
        derivative=refuse_second_derivative,
        summed=2 if shared_rope else None,
    )


def _on_device(
    call: Call, q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, *others: jax.Array
) -> Gradients:
    """The kernel on the arrays of one device, whose number of heads may be a part of the whole."""
    lse, d_out, d_lse, scales, *offsets = others
    rows, heads = k.shape[:2]
    shapes = (jax.ShapeDtypeStruct((rows, heads, width), q.dtype) for width in (q.shape[2], out.shape[2]))
    spec = call.spec(q, *shapes, *offsets)
    config = sm90_backward.backward_config(spec, v.shape[1] if v.ndim == 2 else 0)
    workspaces = sm90_backward.backward_workspaces(
        config, spec.batch, spec.total_q_len, spec.total_kv_len, spec.num_heads, call.num_sms
    )
    d_q, d_k, d_v, *_ = kernel_call(
        MLA_PREFILL_BACKWARD,
        config,
        (q, k, v, *offsets, scales, out, lse, d_out, d_lse),
        (q.shape, k.shape, v.shape, *(shape for shape, _ in workspaces.values())),
        arch=call.arch,
    )
    return d_q, d_k, d_v


def _fold(run: Callable[..., Gradients], axis_size: int, *arrays: jax.Array) -> Gradients:
    """vmap's axis V, leading in all arrays but the scales and offsets, becomes V * H heads of one call."""
    *batched, scales, cu_seqlens_q, cu_seqlens_kv = arrays
    folded = (x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in batched)
    d_q, d_k, d_v = run(*folded, scales, cu_seqlens_q, cu_seqlens_kv)
    return tuple(x.reshape(x.shape[0], axis_size, -1, x.shape[2]).swapaxes(0, 1) for x in (d_q, d_k, d_v))


def _partition(shared_rope: bool, shapes: Sequence[Any]) -> transforms.Partition:
    """q's sharding along heads; what has no heads is whole."""
    heads = transforms.named_axes(shapes[0])[1]
    rows, terms, line = P(None, heads, None), P(None, heads), P(None)
    gradients = (rows, rows, P(None, None) if shared_rope else rows)
    return (*gradients, rows, terms, rows, terms, line, line, line), gradients
