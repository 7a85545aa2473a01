"""A step of up to 16 tokens of the V3.2 layer, norm and residual included, by `nn.few_tokens`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsmla_jax.nn import few_tokens
from tsmla_jax.nn.checkpoints.weights import Params
from tsmla_jax.nn.mla.projections import rotated_q
from tsmla_jax.nn.norms import Norm, rms_norm
from tsmla_jax.nn.step import Step
from tsmla_jax.nn.v32.config import V32Config
from tsmla_jax.nn.v32.functional import Attended, Options, V32Cache, attend_projected, form_of
from tsmla_jax.nn.v32.projections import KEY_NORM_EPS, Angles, Projected, finished_queries, normed_keys


def why_not(params: Params, config: V32Config, x: jax.Array, norm: Norm, options: Options) -> list[str]:
    """Why `attend` of x [T, E] can't run by the kernels for few tokens; empty if it can."""
    mla = config.mla
    if "in_proj" not in params or mla.q_lora_rank is None:
        return ["parameters are not folded, or the query has no low rank"]
    if mla.attention_bias or options.context_axis is not None or options.implementation not in (None, "cute"):
        return ["the layer has biases, devices share its keys, or another implementation is asked for"]
    names = ["in_proj", "q_b_proj", "o_proj"]
    names += ["indexer_wk", "indexer_weights_proj", "indexer_wq_b"] if config.has_indexer else []
    if not 1 <= x.shape[0] <= few_tokens.MOST_TOKENS:
        return [f"there are {x.shape[0]} tokens; the kernels of few tokens take 1 to {few_tokens.MOST_TOKENS}"]
    return few_tokens.why_not_dtypes(x, *(params[name] for name in names), norm=norm)


def attend(
    params: Params,
    config: V32Config,
    x: jax.Array,
    norm: Norm,
    cache: V32Cache,
    step: Step,
    options: Options,
    *,
    selected: jax.Array | None = None,
    keep: bool = False,
) -> Attended:
    """x + functional.attend(norm(x)), the caches, and the positions. The arguments are those of `functional.attend`,
    with folded params.

    keep: whether the caller wants positions."""
    form = form_of(config, step, x, form=options.form, quantised=options.q_scale is not None)

    def project(params: Params, config: V32Config, x: jax.Array, angles: Angles, quantise: bool | None) -> Projected:
        mla = config.mla
        joint = few_tokens.matmul(x, params["in_proj"], norm=norm)
        low = Norm(params["q_a_layernorm"], mla.a_layernorm_eps)
        q = few_tokens.matmul(joint, params["q_b_proj"], norm=low)
        asked = None
        if quantise is not None:
            of_low = few_tokens.matmul(joint, params["indexer_wq_b"], norm=low)
            weights = few_tokens.matmul(x, params["indexer_weights_proj"], norm=norm)
            asked = finished_queries(config, of_low, weights, angles, quantise=quantise)
        keys = few_tokens.matmul(x, params["indexer_wk"], norm=norm) if config.has_indexer else None
        made = Projected(
            latent=None,
            k_rope=None,
            keys=None,
            asked=asked,
            q_nope=None,
            q_rope=None,
            out=lambda heads: few_tokens.matmul(heads.reshape(x.shape[0], -1), params["o_proj"], residual=x),
        )
        made = _with_keys(made, params, config, keys, cache, step, angles)
        latent_norm = Norm(params["kv_a_layernorm"], mla.a_layernorm_eps)
        rope = few_tokens.Rope(angles.cos, angles.sin, mla.rope_interleave, mla.rope_layout)
        quantises = options.q_scale is not None
        if form.name == "mask" or few_tokens.why_not_queries(
            x, params["w_uk"], rope, latent_norm, cache.kv, quantises=quantises
        ):
            q_nope, q_rope = rotated_q(mla, q.reshape(x.shape[0], -1, mla.qk_head_dim), *angles)
            latent, k_rope = jnp.split(joint[:, -mla.cache_dim :], [mla.kv_lora_rank], axis=-1)
            return made._replace(latent=rms_norm(latent, *latent_norm), k_rope=k_rope, q_nope=q_nope, q_rope=q_rope)
        absorbed, kv_cache = few_tokens.queries(
            q,
            joint,
            params["w_uk"],
            cache.kv,
            step.slot_mapping,
            norm=latent_norm,
            rope=rope,
            q_scale=options.q_scale,
            kv_scale=options.kv_scale,
        )
        return made._replace(absorbed=absorbed, kv_cache=kv_cache)

    return attend_projected(
        params, config, x, cache, step, selected=selected, keep=keep, options=options, project=project
    )


def _with_keys(
    made: Projected,
    params: Params,
    config: V32Config,
    keys: jax.Array | None,
    cache: V32Cache,
    step: Step,
    angles: Angles,
) -> Projected:
    """`made` with the indexer's keys [T, Di] normed or, where a kernel can do that, written into their cache."""
    if keys is None or cache.indexer is None:
        return made
    norm = few_tokens.LayerNorm(params["indexer_k_norm"], params["indexer_k_norm_bias"], KEY_NORM_EPS)
    rope = few_tokens.Rope(angles.cos, angles.sin, config.index_rope_layout == "interleaved", config.index_rope_layout)
    if few_tokens.why_not_index_keys(keys, rope, norm, cache.indexer):
        return made._replace(keys=normed_keys(params, keys))
    written = few_tokens.write_index_keys_by_kernel(cache.indexer, keys, step.slot_mapping, norm=norm, rope=rope)
    return made._replace(index_cache=written)
