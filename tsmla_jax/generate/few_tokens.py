"""The MLP or the experts of a step of up to 16 tokens, norm and residual included, by `nn.few_tokens`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from tsmla_jax.generate.config import MoEConfig
from tsmla_jax.generate.moe import choose_experts
from tsmla_jax.nn import few_tokens
from tsmla_jax.nn.norms import Norm


def why_not(params: Mapping[str, Any], config: MoEConfig | None, x: jax.Array, norm: Norm) -> list[str]:
    """Why `mlp` would not run by the kernels of few tokens; empty if it would. Arguments as there."""
    gate_up, down = params["gate_up"], params["down"]
    if "router" not in params:
        return few_tokens.why_not_matmul(x, gate_up, norm, gated=True) or few_tokens.why_not_matmul(x, down)
    assert config is not None
    return few_tokens.why_not_experts(x, gate_up, down, config.top_k + config.num_shared, norm)


def mlp(
    params: Mapping[str, Any],
    config: MoEConfig | None,
    x: jax.Array,
    norm: Norm,
    valid: jax.Array,
    tokens: jax.Array,
) -> jax.Array:
    """x plus the gated MLP, or the mixture of experts, of norm(x).

    Args:
      params: as of `moe.gated_mlp`, or of `moe.mixture_of_experts`, if it has a router.
      config: the experts'; None without a router.
      x: [T, C].
      norm: the one before the MLP.
      valid: [T] bool, False for padding, whose rows mean nothing.
      tokens: [T] i32, ids of the tokens.
    """
    gate_up, down = params["gate_up"], params["down"]
    if "router" not in params:
        return few_tokens.matmul(few_tokens.matmul(x, gate_up, norm=norm, gated=True), down, residual=x)
    assert config is not None
    logits = few_tokens.router_logits(x, params["router"], norm=norm)
    experts, weights = choose_experts(params, x, config, tokens, valid, logits[None])
    inner = few_tokens.experts_up(x, gate_up, experts, norm=norm, limit=config.swiglu_limit)
    return few_tokens.experts_down(inner, down, experts, weights, residual=x)
