"""A decode step of up to 16 tokens of the MLA layer, norm and residual included, by `nn.few_tokens`."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp

import tsmla_jax
from tsmla_jax.nn import few_tokens
from tsmla_jax.nn.checkpoints.weights import Params
from tsmla_jax.nn.mla.config import MLAConfig
from tsmla_jax.nn.mla.projections import scaled_q
from tsmla_jax.nn.mla.rope import query_scale, rope_cos_sin
from tsmla_jax.nn.norms import Norm
from tsmla_jax.nn.step import Step


def why_not(
    params: Params,
    config: MLAConfig,
    x: jax.Array,
    norm: Norm,
    kv_cache: jax.Array,
    *,
    quantises: bool = False,
    context_axis: str | None = None,
    implementation: str | None = None,
) -> list[str]:
    """Why `decode` of x [T, E] can't run by the kernels for few tokens, or can't run at all; empty if it can.

    quantises: whether there is a q_scale. context_axis: as in `functional.decode`. The others: as in `decode`."""
    if "in_proj" not in params:
        return ["parameters are not folded"]
    if config.attention_bias or context_axis is not None or implementation not in (None, "cute"):
        return ["the layer has biases, devices share its keys, or another implementation is asked for"]
    if config.output_gate is not None:
        return ["the layer has an output gate"]
    if config.latent_scale != 1:
        return [f"latents are multiplied by {config.latent_scale:.4g}"]
    matrices = ("in_proj", "o_proj") if config.q_lora_rank is None else ("in_proj", "q_b_proj", "o_proj")
    reasons = few_tokens.why_not_dtypes(x, *(params[name] for name in matrices), norm=norm)
    angles = jax.ShapeDtypeStruct((x.shape[0], config.qk_rope_head_dim // 2), jnp.float32)
    rope = _rope(config, cast(jax.Array, angles), cast(jax.Array, angles))
    latent = Norm(params["kv_a_layernorm"], config.a_layernorm_eps)
    w_uk = params["w_uk"]
    return reasons or few_tokens.why_not_queries(x, w_uk, rope, latent, kv_cache, quantises=quantises)


def _rope(config: MLAConfig, cos: jax.Array, sin: jax.Array) -> few_tokens.Rope:
    return few_tokens.Rope(cos, sin, config.rope_interleave, config.rope_layout)


def decode(
    params: Params,
    config: MLAConfig,
    x: jax.Array,
    norm: Norm,
    kv_cache: jax.Array,
    step: Step,
    *,
    kv_scale: float | jax.Array | None = None,
    q_scale: float | jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """x + functional.decode(norm(x)), and the cache with the new tokens written.

    Args:
        params, config: a folded layer for which `why_not` is empty.
        x: [T, E], the tokens of a ragged step, or one token of each request in a dense step.
        norm: the norm before attention.
        kv_cache, step, kv_scale, q_scale, implementation: as in `functional.decode`.
    """
    dense = step.cu_seqlens_q is None
    shape = (x.shape[0], 1) if dense else (x.shape[0],)
    positions = step.positions(shape)
    angles = [part.reshape(x.shape[0], -1) for part in rope_cos_sin(config, positions)]
    joint = few_tokens.matmul(x, params["in_proj"], norm=norm)
    q = joint
    if config.q_lora_rank is not None:
        low = Norm(params["q_a_layernorm"], config.a_layernorm_eps)
        q = few_tokens.matmul(joint, params["q_b_proj"], norm=low)
    if (scale := query_scale(config, positions)) is not None:
        q = scaled_q(q, scale.reshape(-1))
    absorbed, kv_cache = few_tokens.queries(
        q,
        joint,
        params["w_uk"],
        kv_cache,
        step.slot_mapping.reshape(-1),
        norm=Norm(params["kv_a_layernorm"], config.a_layernorm_eps),
        rope=_rope(config, angles[0], angles[1]),
        q_scale=q_scale,
        kv_scale=kv_scale,
    )
    options: dict[str, Any] = {
        "softmax_scale": config.softmax_scale,
        "latent_dim": config.kv_lora_rank,
        "q_scale": q_scale,
        "kv_scale": kv_scale,
    }
    absorbed = absorbed.reshape(*shape, *absorbed.shape[1:])
    tables, lens, w_uv = step.block_tables, step.seq_lens, params["w_uv"]
    if dense and not few_tokens.why_not_attend(absorbed, kv_cache, tables, lens, w_uv, **options):
        heads = few_tokens.attend_by_kernel(absorbed, kv_cache, tables, lens, w_uv, **options)
    else:
        options |= {"cu_seqlens_q": step.cu_seqlens_q, "max_q_len": step.max_q_len, "implementation": implementation}
        out = tsmla_jax.mla_decode(absorbed, kv_cache, tables, lens, **options)
        out = cast(jax.Array, out).reshape(x.shape[0], -1, config.kv_lora_rank).astype(x.dtype)
        heads = jnp.einsum("thl,hvl->thv", out, w_uv).reshape(x.shape[0], -1)
    return few_tokens.matmul(heads, params["o_proj"], residual=x), kv_cache
