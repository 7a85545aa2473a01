"""mla_prefill_kv by the Hopper kernel, which reads kv and k_rope where they lie. What jax's transformations make of a
call is as in cute.py, but that vmap makes one call after another."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import cute_call
from tsmla_jax.ops.arrays import as_scale
from tsmla_jax.ops.loops import carry
from tsmla_jax.ops.mla_prefill import xla
from tsmla_jax.ops.mla_prefill.packed import expand
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_PREFILL
from tsmla_kernels.contract import PrefillSpec
from tsmla_kernels.sm90.prefill import config as sm90_prefill

Results = tuple[jax.Array, jax.Array]


def why_not(spec: PrefillSpec, rope_dim: int) -> list[str]:
    """Why kv and k_rope can't be read as they are in a call that the kernels can run on k and v; empty if they can."""
    return cute_call.why_not(MLA_PREFILL) + sm90_prefill.shared_rope_reasons(spec, rope_dim)


def mla_prefill_kv(
    q: jax.Array,
    kv: jax.Array,
    k_rope: jax.Array,
    *,
    spec: PrefillSpec,
    cu_seqlens_q: jax.Array,
    cu_seqlens_kv: jax.Array,
    softmax_scale: float | jax.Array,
) -> Results:
    """out and lse as the public mla_prefill_kv documents them; both are always returned. spec is that of the call on k
    and v. Reverse-mode differentiable."""
    arch = cute_call.target_arch()
    if arch is None:
        raise contract.not_runnable("mla_prefill_kv", "cute", why_not(spec, k_rope.shape[1]))
    scales = jnp.stack([as_scale(softmax_scale, jnp.float32), jnp.ones((), jnp.float32)])
    operands = (q, kv, k_rope, scales, cu_seqlens_q, cu_seqlens_kv)
    attend = _differentiable(spec.causal, spec.max_q_len, spec.max_kv_len, arch, cute_call.num_sms(arch))
    # Typed alike before the custom derivative, so that shard_map sums a replicated operand's cotangent by itself.
    return attend(*(carry(x, *operands) for x in operands))


@functools.cache
def _differentiable(causal: bool, max_q_len: int, max_kv_len: int, arch: str, num_sms: int) -> Callable[..., Results]:
    """The call as a function (q, kv, k_rope, scales, cu_seqlens_q, cu_seqlens_kv) -> (out, lse)."""

    def spec(q: jax.Array, kv: jax.Array, k_rope: jax.Array, cu_seqlens_q: jax.Array) -> PrefillSpec:
        dtype = jnp.dtype(q.dtype).name
        return PrefillSpec(
            batch=cu_seqlens_q.shape[0] - 1,
            total_q_len=q.shape[0],
            total_kv_len=kv.shape[0],
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
            num_heads=q.shape[1],
            qk_head_dim=q.shape[2],
            v_head_dim=kv.shape[2] - q.shape[2] + k_rope.shape[1],
            q_dtype=dtype,
            kv_dtype=dtype,
            causal=causal,
            return_lse=True,
        )

    # custom_partitioning reads the parameters' number from the signature.
    def on_device(q: Any, kv: Any, k_rope: Any, scales: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any) -> Results:
        described = spec(q, kv, k_rope, cu_seqlens_q)
        workspaces = sm90_prefill.prefill_workspaces(described.batch, num_sms)
        out, lse, *_ = cute_call.cute_call(
            MLA_PREFILL,
            sm90_prefill.prefill_config(described, k_rope.shape[1]),
            (q, kv, k_rope, cu_seqlens_q, cu_seqlens_kv, scales),
            ((*q.shape[:2], described.v_head_dim), q.shape[:2], *(shape for shape, _ in workspaces.values())),
            arch=arch,
        )
        return out, lse

    partitioned = custom_partitioning(on_device)
    partitioned.def_partition(
        partition=lambda mesh, args, _: (mesh, on_device, *_shardings(mesh, args)[::-1]),
        infer_sharding_from_operands=lambda mesh, args, _: _shardings(mesh, args)[1],
        sharding_rule="t h k, s h w, s r, c, b, b -> t h v, t h",
        need_replication_factors=("t", "k", "s", "w", "r", "c", "b", "v"),
    )
    batched = custom_vmap(lambda *arrays: partitioned(*arrays))

    @batched.def_vmap
    def one_after_another(
        axis_size: int, in_batched: Sequence[bool], *arrays: jax.Array
    ) -> tuple[Results, tuple[bool, bool]]:
        whole = tuple(
            a if given else jnp.broadcast_to(a, (axis_size, *a.shape))
            for a, given in zip(arrays, in_batched, strict=True)
        )
        return lax.map(lambda each: batched(*each), whole), (True, True)

    run = jax.jit(batched)

    def forward(*operands: jax.Array) -> tuple[Results, tuple[tuple[jax.Array, ...], Results]]:
        results = run(*operands)
        return results, (operands, results)

    def backward(saved: tuple[tuple[jax.Array, ...], Results], cotangents: Results) -> tuple[jax.Array | None, ...]:
        (q, kv, k_rope, scales, cu_seqlens_q, cu_seqlens_kv), results = saved
        described = spec(q, kv, k_rope, cu_seqlens_q)
        (k, v), contract_keys = jax.vjp(functools.partial(expand, k_dim=described.qk_head_dim), kv, k_rope)
        operands = (q, k, v, scales[0], scales[1], cu_seqlens_q, cu_seqlens_kv)
        d_q, d_k, d_v, d_logit_scale, d_v_scale, _, _ = xla.backward(described, (operands, results), cotangents)
        return d_q, *contract_keys((d_k, d_v)), jnp.stack([d_logit_scale, d_v_scale]), None, None

    attend = jax.custom_vjp(lambda *operands: run(*operands))
    attend.defvjp(forward, backward)
    return attend


def _shardings(mesh: Any, shapes: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, Any]]:
    """Operands' and results' shardings: q's along heads, everything else whole."""
    spec = tuple(shapes[0].sharding.spec) if isinstance(shapes[0].sharding, NamedSharding) else ()
    heads = (*spec, None, None)[1]
    rows, line = P(None, heads, None), P(None)
    named = functools.partial(NamedSharding, mesh)
    return tuple(map(named, (rows, rows, P(None, None), line, line, line))), (named(rows), named(P(None, heads)))
