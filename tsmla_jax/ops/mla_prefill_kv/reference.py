"""The definition of mla_prefill_kv: make k and v, then mla_prefill."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tsmla_jax.ops.inputs import Scales
from tsmla_jax.ops.mla_prefill import reference
from tsmla_kernels.contract import PrefillSpec

Results = tuple[jax.Array, ...]


def mla_prefill_kv(
    q: jax.Array,
    kv: jax.Array,
    k_rope: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_kv: jax.Array,
    scales: Scales,
    *selection: jax.Array,
    spec: PrefillSpec,
    sinks: jax.Array | None = None,
    attend: Callable[..., Results] = reference.mla_prefill,
) -> Results:
    """out, lse and, if the spec has them, max_logits as the public mla_prefill_kv documents them. spec: the spec of the
    call on k and v. attend: the mla_prefill to use.
    """
    k, v = expand(kv, k_rope, spec.qk_head_dim)
    return attend(q, k, v, cu_seqlens_q, cu_seqlens_kv, scales, *selection, spec=spec, sinks=sinks)


def expand(kv: jax.Array, k_rope: jax.Array, k_dim: int) -> tuple[jax.Array, jax.Array]:
    """k [Tk, H, K] and v [Tk, H, V], from kv and k_rope."""
    nope = k_dim - k_rope.shape[1]
    rope = jnp.broadcast_to(k_rope[:, None], (*kv.shape[:2], k_rope.shape[1]))
    return jnp.concatenate([kv[..., :nope], rope], axis=-1), kv[..., nope:]
