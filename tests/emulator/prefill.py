"""What the prefill kernels compute, on a CPU: the kernels' own operands, as the wrapper passes them, through the
reference."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tsmla_jax.ops.inputs import Scales
from tsmla_jax.ops.mla_prefill import reference
from tsmla_kernels import contract
from tsmla_kernels.kernel import Kernel
from tsmla_kernels.sm90.prefill.backward.config import BackwardConfig
from tsmla_kernels.sm90.prefill.config import PrefillConfig

Results = tuple[jax.Array, ...]


def expanded(q: jax.Array, kv: jax.Array, k_rope: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v from the operands of mla_prefill_kv."""
    nope = q.shape[2] - k_rope.shape[1]
    rope = jnp.broadcast_to(k_rope[:, None], (*kv.shape[:2], k_rope.shape[1]))
    return q, jnp.concatenate([kv[..., :nope], rope], -1), kv[..., nope:]


def emulate(
    *arrays: jax.Array,
    kernel: Kernel,
    config: PrefillConfig | BackwardConfig,
    arch: str,
    result_shapes: tuple[tuple[int, ...], ...],
) -> list[jax.Array]:
    """What a kernel computes from its own operands, through the reference; its workspaces are left as garbage."""
    operands = kernel.operands(config)
    given = dict(zip((operand.name for operand in operands if not operand.output), arrays, strict=True))
    names = ("q", "kv", "k_rope") if config.rope_dim else ("q", "k", "v")
    cu_seqlens_q, cu_seqlens_kv, scales = (given[name] for name in ("cu_seqlens_q", "cu_seqlens_kv", "scales"))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None) -> Results:
        if config.rope_dim:
            q, k, v = expanded(q, k, v)
        spec = contract.PrefillSpec(
            batch=cu_seqlens_q.shape[0] - 1,
            total_q_len=q.shape[0],
            total_kv_len=k.shape[0],
            max_q_len=q.shape[0],
            max_kv_len=k.shape[0],
            num_heads=q.shape[1],
            qk_head_dim=config.qk_head_dim,
            v_head_dim=config.v_head_dim,
            q_dtype=q.dtype.name,
            kv_dtype=q.dtype.name,
            causal=config.causal,
            selection=config.selection,
            sinks="sinks" in given,
            max_logits=getattr(config, "max_logits", False),
        )
        selected = [given[name] for name in ("selection", "selection_rows") if name in given]
        factors = Scales(scales[0], v=scales[1])
        return reference.mla_prefill(q, k, v, cu_seqlens_q, cu_seqlens_kv, factors, *selected, spec=spec, sinks=sinks)

    inputs = [given[name] for name in names]
    if isinstance(config, BackwardConfig):
        given_sinks = [given["sinks"]] if config.sinks else []
        results = _gradients(attend, [*inputs, *given_sinks], *(given[name] for name in ("out", "lse", "dout", "dlse")))
    else:
        results = attend(*inputs, given.get("sinks"))
    outputs = [operand for operand in operands if operand.output]
    workspaces: list[Any] = [
        jnp.full(shape, 123, operand.dtype)
        for operand, shape in zip(outputs[len(results) :], result_shapes[len(results) :], strict=True)
    ]
    return [*results, *workspaces]


def _gradients(
    attend: Callable[..., Results],
    inputs: list[jax.Array],
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
) -> list[jax.Array]:
    """The gradients of the inputs, by the reference in float32. They are NaN if `out` and `lse` are not its results."""
    results, derivative = jax.vjp(attend, *(x.astype(jnp.float32) for x in inputs))
    seen = lse != -jnp.inf  # rows that see no key have no gradient, whatever the cotangents are there
    d_inputs = derivative((jnp.where(seen[..., None], d_out, 0).astype(jnp.float32), jnp.where(seen, d_lse, 0)))
    differs = jnp.abs(jnp.where(seen, lse - results[1], 0)).max() > 1e-3
    differs |= jnp.abs(out.astype(jnp.float32) - results[0]).max() > 2e-2
    return [jnp.where(differs, jnp.nan, d).astype(x.dtype) for d, x in zip(d_inputs, inputs, strict=True)]
