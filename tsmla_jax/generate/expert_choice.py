"""The router's choice of experts as one kernel: from logits to the experts of each token and their weights.

By XLA it is four kernels and more (scores, a copy, a sort, the groups), which a step of few tokens mostly waits for.
Written in Pallas for GPUs (Triton): a program holds one token's scores in registers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tsmla_jax.generate.config import MoEConfig
from tsmla_jax.nn.products.triton import plgpu, why_no_triton

NO_BIAS = "correction_bias = None; legal with routing 'noaux_tc': an array [E]"
_LEAST = -jnp.inf
_NEVER = -(2**31)


def why_not_by_kernel(config: MoEConfig) -> list[str]:
    """Why `choose_by_kernel` can't serve this routing on jax's default device; empty if it can."""
    if reasons := why_no_triton():
        return reasons
    if config.num_experts > 1024:
        return [f"a token has {config.num_experts} experts; the kernel holds at most 1024 scores in registers"]
    return []


def choose_by_kernel(
    logits: jax.Array, correction_bias: jax.Array | None, valid: jax.Array | None, config: MoEConfig
) -> tuple[jax.Array, jax.Array]:
    """`moe.choose_experts` from the router's logits on, where the scores choose.

    Args:
      logits: [T, E] f32, or [S, T, E], whose sum over S they are.
      correction_bias: [E], with noaux_tc alone; others ignore it.
      valid: [T] bool, False for padding; None if there is none.
      config: the routing, and how many shared experts there are.

    Returns:
      experts [T, K + S] i32 and their weights [T, K + S] f32: the routed ones, the greatest choice first, ties by the
      expert's index; a choice that is no number comes before all others, and one of -inf behind them, as in
      `jax.lax.top_k`: K different experts, however many choices are finite. Then the shared ones, E to E + S - 1, with
      weight 1. All experts of padding are E + S.

    Raises:
      ValueError: noaux_tc without a correction_bias.
    """
    operands = [logits]
    if config.routing == "noaux_tc":
        if correction_bias is None:
            raise ValueError(NO_BIAS)
        operands.append(correction_bias.astype(jnp.float32))
    if valid is not None:
        operands.append(valid.astype(jnp.int32))
    if logits.ndim == 2:
        operands[0] = logits[None]
    num_tokens, num_experts = logits.shape[-2:]
    shape = (num_tokens, config.top_k + config.num_shared)
    if not num_tokens:
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    experts, weights = pl.pallas_call(
        functools.partial(_choose, config, valid is not None),
        grid=(num_tokens,),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=1 if num_experts <= 256 else 4, num_stages=1),
        interpret=jax.default_backend() == "cpu",
        name="choose_experts",
    )(*operands)
    return experts, weights


def _choose(config: MoEConfig, has_padding: bool, logits_ref: Any, *others: Any) -> None:
    """One token. others: the bias with noaux_tc, whether the token is valid if some are not, and the two results."""
    *inputs, experts_ref, weights_ref = others
    token, num_experts = pl.program_id(0), config.num_experts
    lanes = jnp.arange(pl.next_power_of_2(num_experts), dtype=jnp.int32)
    exists = lanes < num_experts
    parts = [
        plgpu.load(logits_ref.at[part, token, lanes], mask=exists, other=_LEAST) for part in range(logits_ref.shape[0])
    ]
    scores = _scores(sum(parts[1:], parts[0]), config)
    choice = scores
    if config.routing == "noaux_tc":
        choice = choice + plgpu.load(inputs[0].at[lanes], mask=exists, other=0.0)
    choice = jnp.where(exists, choice, _LEAST)
    if config.routing != "greedy" and config.n_group > 1:
        choice = _limit_to_groups(choice, lanes, config)
    order = jnp.where(exists, _order(choice), _NEVER)
    count = config.top_k + config.num_shared
    places = jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32)

    def choose_next(place: Any, chosen: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        left, experts, weights = chosen
        expert = _first_greatest(left, lanes)
        weight = jnp.where(lanes == expert, scores, 0).sum()
        here = places == place
        return (
            jnp.where(lanes == expert, _NEVER, left),
            jnp.where(here, expert, experts),
            jnp.where(here, weight, weights),
        )

    shared = num_experts - config.top_k + places  # of the places behind the routed ones
    begin = order, shared, jnp.zeros(places.shape, jnp.float32)
    _, experts, weights = lax.fori_loop(0, config.top_k, choose_next, begin)
    if config.norm_topk_prob:
        weights = weights / (weights.sum() + 1e-20)
    weights = jnp.where(places < config.top_k, weights * config.routed_scaling_factor, 1.0)
    if has_padding:
        experts = jnp.where(inputs[-1][token] != 0, experts, num_experts + config.num_shared)
    plgpu.store(experts_ref.at[token, places], experts, mask=places < count)
    plgpu.store(weights_ref.at[token, places], weights, mask=places < count)


def _scores(logits: jax.Array, config: MoEConfig) -> jax.Array:
    """The router's scores; lanes without an expert have logits of -inf."""
    if config.scoring == "softmax":
        powers = jnp.exp(logits - logits.max())
        return powers / powers.sum()
    if config.scoring == "sigmoid":
        return 1 / (1 + jnp.exp(-logits))
    return jnp.sqrt(jnp.maximum(logits, 0) + jnp.log1p(jnp.exp(-jnp.abs(logits))))


def _order(choice: jax.Array) -> jax.Array:
    """Integers in the order of these floats, greater than _NEVER: what is no number is the greatest, so that it shows
    in the result."""
    bits = lax.bitcast_convert_type(jnp.where(jnp.isnan(choice), jnp.nan, choice), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _first_greatest(order: jax.Array, lanes: jax.Array) -> jax.Array:
    """The first lane with the greatest value."""
    return jnp.where(order == order.max(), lanes, lanes.shape[0]).min()


def _limit_to_groups(choice: jax.Array, lanes: jax.Array, config: MoEConfig) -> jax.Array:
    """-inf outside the topk_group best groups; a group counts its best, or with a bias the sum of its best two, and as
    infinite where that is no number."""
    groups = jnp.arange(pl.next_power_of_2(config.n_group), dtype=jnp.int32)
    owner = lanes // (config.num_experts // config.n_group)
    belongs = owner[None, :] == groups[:, None]
    counted = jnp.where(jnp.isnan(choice), jnp.inf, choice)
    members = jnp.where(belongs, counted[None, :], _LEAST)
    best = members.max(axis=1)
    if config.routing == "noaux_tc":
        past = lanes.shape[0]
        first = jnp.where(members == best[:, None], lanes[None, :], past).min(axis=1)
        best = best + jnp.where(lanes[None, :] == first[:, None], _LEAST, members).max(axis=1)
        best = jnp.where(jnp.isnan(best), jnp.inf, best)
    best = jnp.where(groups < config.n_group, best, _LEAST)
    # A group is among the best if fewer than topk_group are better, or equal and before it.
    one, other = best[:, None], best[None, :]
    better = (other > one) | ((other == one) & (groups[None, :] < groups[:, None]))
    allowed = better.astype(jnp.int32).sum(axis=1) < config.topk_group
    return jnp.where((belongs & allowed[:, None]).astype(jnp.int32).max(axis=0) > 0, choice, _LEAST)
