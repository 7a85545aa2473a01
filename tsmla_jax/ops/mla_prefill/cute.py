"""mla_prefill by the CuTe DSL kernels: their operands, and what jax's transformations make of a call.

From the outside in: the derivative is that of "xla", from the kernel's out and lse (custom_vjp), vmap folds its axis
into the heads (custom_vmap), partitioning splits heads (custom_partitioning), and what remains is one custom call on
the shapes of one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import cute_call
from tsmla_jax.ops.arrays import as_scale
from tsmla_jax.ops.loops import carry
from tsmla_jax.ops.mla_prefill import blackwell, xla
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_PREFILL, MLA_PREFILL_SM100
from tsmla_kernels.contract import PrefillSpec
from tsmla_kernels.sm90.prefill import config as sm90_prefill
from tsmla_kernels.sm100 import config as sm100

Results = tuple[jax.Array, jax.Array]


def why_not(spec: PrefillSpec) -> list[str]:
    """The reasons why no kernel can run this call; empty if one can."""
    if cute_call.target_arch() not in MLA_PREFILL_SM100.archs:
        return cute_call.why_not(MLA_PREFILL) + sm90_prefill.prefill_reasons(spec)
    reasons = cute_call.why_not(MLA_PREFILL_SM100) + sm100.prefill_reasons(spec)
    return reasons or cute_call.why_not_made(MLA_PREFILL_SM100, sm100.prefill_config(spec))


def why_not_by_default(spec: PrefillSpec) -> list[str]:
    """The reasons against the kernels that stand only when implementation is None."""
    return cute_call.why_not_by_default()


def notes(spec: PrefillSpec) -> list[str]:
    """What is to be known of the kernels of this architecture."""
    return [sm100.NOTICE] if cute_call.target_arch() in MLA_PREFILL_SM100.archs else []


def mla_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    spec: PrefillSpec,
    cu_seqlens_q: jax.Array,
    cu_seqlens_kv: jax.Array,
    softmax_scale: float | jax.Array,
    q_scale: float | jax.Array | None,
    k_scale: float | jax.Array | None,
    v_scale: float | jax.Array | None,
) -> Results:
    """out and lse as the public mla_prefill documents them; both are always returned. Reverse-mode differentiable."""
    arch = cute_call.target_arch()
    if arch is None:
        raise contract.not_runnable("mla_prefill", "cute", why_not(spec))
    call = _Call(spec.causal, spec.max_q_len, spec.max_kv_len, arch, cute_call.num_sms(arch))
    scales = _scales(softmax_scale, q_scale, k_scale, v_scale)
    if arch in MLA_PREFILL_SM100.archs and isinstance(scales, np.ndarray):
        call = replace(call, static_scales=(float(scales[0]), float(scales[1])))
    operands = (q, k, v, scales, cu_seqlens_q, cu_seqlens_kv)
    # Typed alike before the custom derivative, so that shard_map sums a replicated operand's cotangent by itself.
    arrays = [x for x in operands if isinstance(x, jax.Array)]
    return _differentiable(call)(*(carry(jnp.asarray(x), *arrays) for x in operands))


def _scales(
    softmax_scale: float | jax.Array,
    q_scale: float | jax.Array | None,
    k_scale: float | jax.Array | None,
    v_scale: float | jax.Array | None,
) -> jax.Array | np.ndarray:
    """The kernel's operand: what logits and what outputs are multiplied by. Python numbers are multiplied here, so that
    they reach the device as a constant and cost no computation there."""
    given = (softmax_scale, *(1.0 if scale is None else scale for scale in (q_scale, k_scale, v_scale)))
    if all(isinstance(scale, float | int) for scale in given):
        return np.array([given[0] * given[1] * given[2], given[3]], np.float32)
    softmax, query, key, value = (as_scale(scale, jnp.float32) for scale in given)
    return jnp.stack([softmax * query * key, value])


@dataclass(frozen=True)
class _Call:
    """What is static in a call beside its shapes. The bounds on lengths are for the derivative and for Blackwell;
    static_scales are the scales where a kernel takes them by value."""

    causal: bool
    max_q_len: int
    max_kv_len: int
    arch: str
    num_sms: int
    static_scales: tuple[float, float] | None = None

    def spec(self, q: jax.Array, k: jax.Array, v: jax.Array, cu_seqlens_q: jax.Array) -> PrefillSpec:
        """The spec of a call on these arrays, which may be those of one device, or of several calls."""
        dtype = jnp.dtype(q.dtype).name
        return PrefillSpec(
            batch=cu_seqlens_q.shape[0] - 1,
            total_q_len=q.shape[0],
            total_kv_len=k.shape[0],
            max_q_len=self.max_q_len,
            max_kv_len=self.max_kv_len,
            num_heads=q.shape[1],
            qk_head_dim=q.shape[2],
            v_head_dim=v.shape[2],
            q_dtype=dtype,
            kv_dtype=dtype,
            causal=self.causal,
            return_lse=True,
        )


# ---- the derivative


@functools.cache
def _differentiable(call: _Call) -> Callable[..., Results]:
    """The call as a function (q, k, v, scales, cu_seqlens_q, cu_seqlens_kv) -> (out, lse)."""
    run = _transformable(call)

    def forward(*operands: jax.Array) -> tuple[Results, tuple[tuple[jax.Array, ...], Results]]:
        results = run(*operands)
        return results, (operands, results)

    def backward(saved: tuple[tuple[jax.Array, ...], Results], cotangents: Results) -> tuple[jax.Array | None, ...]:
        (q, k, v, scales, cu_seqlens_q, cu_seqlens_kv), results = saved
        operands = (q, k, v, scales[0], scales[1], cu_seqlens_q, cu_seqlens_kv)
        spec = call.spec(q, k, v, cu_seqlens_q)
        d_q, d_k, d_v, d_logit_scale, d_v_scale, _, _ = xla.backward(spec, (operands, results), cotangents)
        return d_q, d_k, d_v, jnp.stack([d_logit_scale, d_v_scale]), None, None

    attend = jax.custom_vjp(lambda *operands: run(*operands))
    attend.defvjp(forward, backward)
    return attend


# ---- the custom call


@functools.cache
def _transformable(call: _Call) -> Callable[..., Results]:
    """The call without its derivative, for one set of arrays."""

    # custom_partitioning reads the parameters' number from the signature.
    def on_device(q: Any, k: Any, v: Any, scales: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any) -> Results:
        return _on_one_device(call, q, k, v, scales, cu_seqlens_q, cu_seqlens_kv)

    partitioned = custom_partitioning(on_device)
    partitioned.def_partition(
        partition=functools.partial(_partition, on_device),
        infer_sharding_from_operands=_infer_shardings,
        sharding_rule="t h k, s h k, s h v, c, b, b -> t h v, t h",
        need_replication_factors=("t", "k", "s", "v", "c", "b"),
    )
    batched = custom_vmap(lambda *arrays: partitioned(*arrays))
    batched.def_vmap(functools.partial(_fold_vmap, call))
    return jax.jit(batched)


def _on_one_device(
    call: _Call,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scales: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_kv: jax.Array,
) -> Results:
    """The kernel on the arrays of one device, whose number of heads may be a part of the whole."""
    spec = call.spec(q, k, v, cu_seqlens_q)
    if call.arch in MLA_PREFILL_SM100.archs:
        operands = (q, k, v, scales, cu_seqlens_q, cu_seqlens_kv)
        return blackwell.on_one_device(*operands, spec=spec, static_scales=call.static_scales, arch=call.arch)
    workspaces = sm90_prefill.prefill_workspaces(spec.batch, call.num_sms)
    out, lse, *_ = cute_call.cute_call(
        MLA_PREFILL,
        sm90_prefill.prefill_config(spec),
        (q, k, v, cu_seqlens_q, cu_seqlens_kv, scales),
        ((*q.shape[:2], v.shape[2]), q.shape[:2], *(shape for shape, _ in workspaces.values())),
        arch=call.arch,
    )
    return out, lse


# ---- vmap


def _fold_vmap(
    call: _Call, axis_size: int, in_batched: Sequence[bool], *arrays: jax.Array
) -> tuple[Results, tuple[bool, bool]]:
    """vmap's axis V, leading where an array has it, becomes V * H heads of one call. Calls with other lengths or scales
    can't be one call: they come one after another."""
    run = _transformable(call)
    whole = [
        a if batched else jnp.broadcast_to(a, (axis_size, *a.shape))
        for a, batched in zip(arrays, in_batched, strict=True)
    ]
    if any(in_batched[3:]):
        return lax.map(lambda each: run(*each), tuple(whole)), (True, True)
    q, k, v = (x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3]) for x in whole[:3])
    out, lse = run(q, k, v, *arrays[3:])
    split = (out.shape[0], axis_size, -1)
    return (out.reshape(*split, out.shape[2]).swapaxes(0, 1), lse.reshape(split).swapaxes(0, 1)), (True, True)


# ---- partitioning

# Heads split everything that has them. Rows can't be split: where a request ends is only known on the device.


def _shardings(mesh: Any, shapes: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, Any]]:
    """Operands' and results' shardings: q's along heads, everything else whole."""
    spec = tuple(shapes[0].sharding.spec) if isinstance(shapes[0].sharding, NamedSharding) else ()
    heads = (*spec, None, None)[1]
    rows, line = P(None, heads, None), P(None)
    named = functools.partial(NamedSharding, mesh)
    return tuple(map(named, (rows, rows, rows, line, line, line))), (named(rows), named(P(None, heads)))


def _partition(
    on_device: Callable[..., Results], mesh: Any, arg_shapes: Sequence[Any], result_shape: Any
) -> tuple[Any, ...]:
    operands, results = _shardings(mesh, arg_shapes)
    return mesh, on_device, results, operands


def _infer_shardings(mesh: Any, arg_shapes: Sequence[Any], result_shape: Any) -> tuple[Any, Any]:
    return _shardings(mesh, arg_shapes)[1]
