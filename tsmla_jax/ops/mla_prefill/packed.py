"""mla_prefill_kv: mla_prefill on keys and values as the layer makes them, without copies of them.

The projection kv_b gives each head's keys without their rope columns and its values side by side, and the rope columns
are the same for all heads. The Hopper kernel reads both where they lie; elsewhere k and v are made of them first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from tsmla_jax.ops import checks, dispatch, explicit
from tsmla_jax.ops.arrays import Scale, describe
from tsmla_jax.ops.mla_prefill import api
from tsmla_kernels.contract import PrefillSpec

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


def mla_prefill_kv(
    q: Float[Array, "Tq H K"],
    kv: Float[Array, "Tk H N+V"],
    k_rope: Float[Array, "Tk R"],
    *,
    cu_seqlens_q: Int32[Array, " B+1"],
    cu_seqlens_kv: Int32[Array, " B+1"],
    max_q_len: int,
    max_kv_len: int,
    softmax_scale: Scale,
    causal: bool = True,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Float[Array, "Tq H V"] | tuple[Float[Array, "Tq H V"], Float[Array, "Tq H"]]:
    """mla_prefill with k = [kv[..., :N] | k_rope for every head] and v = kv[..., N:], where N = K - R.

    On Hopper neither the slices nor the broadcast are made: in DeepSeek's shapes (K 192, R 64, V 128) that saves
    reading and writing 640 bytes a token and head.

    Args:
      q: [Tq, H, K], rope columns last.
      kv: [Tk, H, N + V], as kv_b gives it: keys without their rope columns, then values. q's dtype.
      k_rope: [Tk, R] with rotation applied, shared by all heads. q's dtype.
      others: as in `mla_prefill`.

    Returns:
      As `mla_prefill`; derivatives in reverse mode too.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call, with every reason.
    """
    k_struct, v_struct = _expanded_structs(q, kv, k_rope)
    offsets: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    static: dict[str, Any] = {"max_q_len": max_q_len, "max_kv_len": max_kv_len, "causal": causal}
    spec = api.spec(
        q, k_struct, v_struct, **offsets, **static, softmax_scale=softmax_scale, return_lse=return_lse
    )  # fmt: skip
    run = dispatch.select("mla_prefill", spec, implementation)
    if 0 in (spec.batch, spec.total_q_len, spec.total_kv_len, spec.max_q_len, spec.max_kv_len):
        k, v = (jnp.zeros(x.shape, x.dtype) for x in (k_struct, v_struct))
        return api.mla_prefill(
            q, k, v, **offsets, **static, softmax_scale=softmax_scale, return_lse=return_lse,
            implementation=implementation,
        )  # fmt: skip
    q, kv, k_rope, cu_q, cu_kv = map(jnp.asarray, (q, kv, k_rope, cu_seqlens_q, cu_seqlens_kv))
    cu_q = checks.prefill(spec, cu_q, cu_kv)
    out, lse = explicit.call(
        _as_it_is(run, spec, k_rope.shape[1]) or functools.partial(_expanded, run),
        (q, kv, k_rope),
        lambda: explicit.row_specs(q),
        spec=spec,
        cu_seqlens_q=cu_q,
        cu_seqlens_kv=cu_kv,
        softmax_scale=softmax_scale,
    )
    return (out, lse) if return_lse else out


def _as_it_is(run: Callable[..., Any], spec: PrefillSpec, rope_dim: int) -> Callable[..., Any] | None:
    """The function that reads kv and k_rope where they lie; None if the implementation chosen for k and v has none."""
    if not run.__module__.endswith(".cute"):
        return None
    from tsmla_jax.ops.mla_prefill import cute_kv

    return None if cute_kv.why_not(spec, rope_dim) else cute_kv.mla_prefill_kv


def _expanded(
    run: Callable[..., Any], q: jax.Array, kv: jax.Array, k_rope: jax.Array, *, spec: PrefillSpec, **options: Any
) -> tuple[jax.Array, jax.Array]:
    k, v = expand(kv, k_rope, spec.qk_head_dim)
    return run(q, k, v, spec=spec, **options, q_scale=None, k_scale=None, v_scale=None)


def expand(kv: jax.Array, k_rope: jax.Array, k_dim: int) -> tuple[jax.Array, jax.Array]:
    """k [Tk, H, K] and v [Tk, H, V] of kv and k_rope."""
    nope = k_dim - k_rope.shape[1]
    rope = jnp.broadcast_to(k_rope[:, None], (*kv.shape[:2], k_rope.shape[1]))
    return jnp.concatenate([kv[..., :nope], rope], axis=-1), kv[..., nope:]


def _expanded_structs(q: Any, kv: Any, k_rope: Any) -> tuple[Any, Any]:
    """k and v as jax.ShapeDtypeStruct; ValueError names the argument that can't be."""
    described = {name: describe(name, x) for name, x in (("q", q), ("kv", kv), ("k_rope", k_rope))}
    for name, rank, legal in (("q", 3, "[Tq, H, K]"), ("kv", 3, "[Tk, H, K - R + V]"), ("k_rope", 2, "[Tk, R]")):
        if len(described[name].shape) != rank:
            raise ValueError(f"{name}: got shape {list(described[name].shape)}; legal: {legal}")
    (_, heads, k_dim), (rows, kv_heads, width), (rope_rows, rope_dim) = (x.shape for x in described.values())
    if rope_rows != rows:
        raise ValueError(f"k_rope: got shape {[rope_rows, rope_dim]}; its Tk must equal kv's, {rows}")
    if not 1 <= rope_dim < k_dim:
        raise ValueError(
            f"k_rope: got shape {[rope_rows, rope_dim]}; its R must be between 1 and q's K - 1 = {k_dim - 1}"
        )
    if width <= k_dim - rope_dim:
        raise ValueError(
            f"kv: got shape {[rows, kv_heads, width]}; its last axis must be wider than K - R = {k_dim - rope_dim},"
            " the columns of the keys"
        )
    if kv_heads != heads:
        raise ValueError(f"kv: got shape {[rows, kv_heads, width]}; its H must equal q's, {heads}")
    for name in ("kv", "k_rope"):
        if described[name].dtype != described["q"].dtype:
            raise ValueError(
                f"{name}: got dtype {described[name].dtype}; q, kv and k_rope must have one dtype, and q has"
                f" {described['q'].dtype}"
            )
    dtype = jnp.dtype(kv.dtype)
    v_dim = width - (k_dim - rope_dim)
    return jax.ShapeDtypeStruct((rows, heads, k_dim), dtype), jax.ShapeDtypeStruct((rows, heads, v_dim), dtype)
