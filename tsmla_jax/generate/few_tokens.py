"""The dense MLP of a step of up to 16 tokens, or the experts of a step of one token, with norm and residual, by
`nn.few_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from tsmla_jax.generate.config import MoEConfig
from tsmla_jax.generate.moe import choose_experts
from tsmla_jax.nn import few_tokens
from tsmla_jax.nn.norms import Norm
from tsmla_kernels.sm90.few_tokens.config import ChoiceSpec, too_long


def why_not(params: Mapping[str, Any], config: MoEConfig | None, x: jax.Array, norm: Norm | None) -> list[str]:
    """Why `mlp` can't run by the kernels for few tokens; empty if it can. The arguments are `mlp`'s."""
    gate_up, down = params["gate_up"], params["down"]
    if "router" not in params:
        return few_tokens.why_not_matmul(x, gate_up, norm, gated=True) or few_tokens.why_not_matmul(x, down)
    assert config is not None
    if x.shape[0] != 1:
        return ["several tokens share experts: products of groups of rows read their weights faster"]
    (_, hidden, width), choices = down.shape, config.top_k + config.num_shared
    if too_long(hidden, None if norm is None else norm.eps) or too_long(choices * width, None):
        sizes = f"the token has {hidden} columns, and {choices} experts of {width}"
        return [f"{sizes}, too many for one token's kernels: products of groups of rows read their weights faster"]
    return few_tokens.why_not_experts(x, gate_up, down, choices, norm)


def mlp(
    params: Mapping[str, Any],
    config: MoEConfig | None,
    x: jax.Array,
    norm: Norm | None,
    valid: jax.Array,
    tokens: jax.Array,
    *,
    residual: bool = True,
) -> jax.Array:
    """The gated MLP or, with a router, the mixture of experts, of norm(x), plus x if `residual`: [T, C].

    Args:
      params: {"gate_up", "down"} of `moe.gated_mlp` or, with a router, as in `moe.mixture_of_experts`.
      config: the experts' sizes and routing; not read without a router.
      x: [T, C].
      norm: the norm before the MLP; None if x is normed.
      valid: [T] bool, False for padding, whose rows mean nothing.
      tokens: [T] i32, ids of the tokens.
      residual: whether x is added.
    """
    gate_up, down, more = params["gate_up"], params["down"], x if residual else None
    if "router" not in params:
        return few_tokens.matmul(few_tokens.matmul(x, gate_up, norm=norm, gated=True), down, residual=more)
    assert config is not None
    logits = few_tokens.router_logits(x, params["router"], norm=norm)
    spec = _choice(config, x.shape[1], gate_up, norm)
    if "expert_table" in params or few_tokens.why_not_choose_up(x, gate_up, spec, norm):
        experts, weights = choose_experts(params, x, config, tokens, valid, logits[None])
        inner = few_tokens.experts_up(x, gate_up, experts, norm=norm, limit=config.swiglu_limit)
    else:
        bias = params["correction_bias"] if config.routing == "noaux_tc" else None
        inner, experts, weights = few_tokens.choose_up_by_kernel(x, gate_up, logits, bias, spec, norm=norm, down=down)
    return few_tokens.experts_down(inner, down, experts, weights, residual=more)


def _choice(config: MoEConfig, hidden: int, gate_up: few_tokens.Weight, norm: Norm | None) -> ChoiceSpec:
    """The spec of the choice of one token's experts, and of their first products."""
    return ChoiceSpec(
        hidden,
        config.intermediate_size,
        few_tokens.weight_dtype(gate_up),
        config.num_experts,
        config.top_k,
        config.num_shared,
        routing=config.routing,
        scoring=str(config.scoring),
        n_group=config.n_group,
        topk_group=config.topk_group,
        norm_topk_prob=config.norm_topk_prob,
        routed_scaling_factor=float(config.routed_scaling_factor),
        eps=None if norm is None else norm.eps,
        limit=config.swiglu_limit,
    )
