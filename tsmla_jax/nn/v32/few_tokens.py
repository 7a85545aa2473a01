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
from tsmla_jax.nn.v32.functional import Attended, Options, V32Cache, attend_projected
from tsmla_jax.nn.v32.projections import Angles, Projected, finished_queries, normed_keys


def why_not(params: Params, config: V32Config, x: jax.Array, norm: Norm, options: Options) -> list[str]:
    """Why `attend` of x [T, E] can't run by the kernels for few tokens, or can't run at all; empty if it can."""
    mla = config.mla
    if "in_proj" not in params or mla.q_lora_rank is None:
        return ["parameters are not folded, or the query has no low rank"]
    if mla.attention_bias or options.context_axis is not None or options.implementation not in (None, "cute"):
        return ["the layer has biases, devices share its keys, or another implementation is asked for"]
    names = ["in_proj", "q_b_proj", "o_proj"]
    names += ["indexer_wk", "indexer_weights_proj", "indexer_wq_b"] if config.has_indexer else []
    if x.shape[0] > few_tokens.MOST_TOKENS:
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

    def project(params: Params, config: V32Config, x: jax.Array, angles: Angles, quantise: bool | None) -> Projected:
        mla = config.mla
        joint = few_tokens.matmul(x, params["in_proj"], norm=norm)
        low = Norm(params["q_a_layernorm"], mla.a_layernorm_eps)
        q = few_tokens.matmul(joint, params["q_b_proj"], norm=low)
        q_nope, q_rope = rotated_q(mla, q.reshape(x.shape[0], -1, mla.qk_head_dim), *angles)
        latent, k_rope = jnp.split(joint[:, -mla.cache_dim :], [mla.kv_lora_rank], axis=-1)
        asked = None
        if quantise is not None:
            of_low = few_tokens.matmul(joint, params["indexer_wq_b"], norm=low)
            weights = few_tokens.matmul(x, params["indexer_weights_proj"], norm=norm)
            asked = finished_queries(config, of_low, weights, angles, quantise=quantise)
        keys = few_tokens.matmul(x, params["indexer_wk"], norm=norm) if config.has_indexer else None
        return Projected(
            rms_norm(latent, params["kv_a_layernorm"], mla.a_layernorm_eps),
            k_rope,
            keys=None if keys is None else normed_keys(params, keys),
            asked=asked,
            q_nope=q_nope,
            q_rope=q_rope,
            out=lambda heads: few_tokens.matmul(heads.reshape(x.shape[0], -1), params["o_proj"], residual=x),
        )

    return attend_projected(
        params, config, x, cache, step, selected=selected, keep=keep, options=options, project=project
    )
