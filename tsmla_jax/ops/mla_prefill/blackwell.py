"""mla_prefill on Blackwell: the operands of TokenSpeed's kernel for a call on one device, made safe for any input.

The kernel's causal loop never ends at a tile whose queries all see no key. A request with many more queries than keys
has such a tile. Its queries that see nothing therefore become a request of their own without keys, which the kernel
handles. A tile of v includes rows behind its request, with a weight of 0, so they must not be NaN. Rows behind the last
request become zeros here; rows of another request are that request's to keep finite.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.ragged import row_owner
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_PREFILL_SM100
from tsmla_kernels.contract import PrefillSpec
from tsmla_kernels.sm100 import config as sm100


def on_one_device(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scales: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_kv: jax.Array,
    *,
    spec: PrefillSpec,
    static_scales: tuple[float, float] | None,
    arch: str,
) -> tuple[jax.Array, jax.Array]:
    """out and lse of a call whose arrays lie on one device; spec describes those.

    Args:
      scales: [2] float32, the factors of the logits and of the outputs. static_scales: the same as numbers if they are
        known, so that the launch can pass them by value.

    Raises NotImplementedError where vmap made the call larger than the kernel can index.
    """
    if reasons := MLA_PREFILL_SM100.reasons(spec):
        raise contract.not_runnable("mla_prefill", "cute", reasons)
    config = sm100.prefill_config(spec, traced_scales=static_scales is None)
    starts_q = jnp.clip(cu_seqlens_q, 0, spec.total_q_len)
    starts_kv = jnp.clip(cu_seqlens_kv, 0, spec.total_kv_len)
    q_lens, kv_lens = jnp.diff(starts_q), jnp.diff(starts_kv)
    kernel_q, kernel_kv = starts_q, starts_kv
    if config.causal and spec.max_q_len > sm100.PREFILL_ROWS:
        kernel_q, kernel_kv = unseeing_apart(starts_q, starts_kv)
    else:  # A request's first tile holds its last query. If one is longer than max_q_len, nothing is computed.
        starts_q = kernel_q = jnp.where((q_lens > spec.max_q_len).any(), 0, starts_q)

    v = v.at[starts_kv[-1] + jnp.arange(sm100.KEY_TILE, dtype=jnp.int32)].set(jnp.zeros((), v.dtype), mode="drop")
    outputs = ((*q.shape[:2], sm100.V_HEAD_DIM), q.shape[:2], (spec.max_q_len,))
    inputs = (q, k, v, kernel_q, kernel_kv)
    out, lse, *_ = kernel_call(
        MLA_PREFILL_SM100,
        config,
        inputs if static_scales else (*inputs, scales),
        outputs if static_scales is None else (*outputs, *((size,) for size in sm100.scale_sizes(*static_scales))),
        arch=arch,
    )
    request, position, owned = row_owner(starts_q, spec.total_q_len)
    keys = kv_lens[request]
    visible = jnp.minimum(keys, position + 1 + keys - q_lens[request]) if spec.causal else keys
    seen = (owned & (position < spec.max_q_len) & (visible > 0))[:, None]
    return jnp.where(seen[..., None], out, jnp.zeros((), out.dtype)), jnp.where(seen, lse, -jnp.inf)


def unseeing_apart(starts_q: jax.Array, starts_kv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Offsets [2 B + 1] of queries and of keys: each request's queries that see no key under a causal mask come before
    it as a request without keys."""
    q_lens, kv_lens = jnp.diff(starts_q), jnp.diff(starts_kv)
    unseeing = jnp.clip(q_lens - kv_lens, 0, jnp.maximum(q_lens, 0))
    return _interleave(starts_q, starts_q[:-1] + unseeing), _interleave(starts_kv, starts_kv[:-1])


def _interleave(starts: jax.Array, middles: jax.Array) -> jax.Array:
    """Offsets [2 B + 1] that cut each request of `starts` [B + 1] in two, at `middles` [B]."""
    return jnp.concatenate([jnp.stack([starts[:-1], middles], axis=1).reshape(-1), starts[-1:]])
