"""The router's choice of experts as one kernel: from logits to the experts of each token and their weights.

By XLA it is four kernels and more (scores, a copy, a sort, the groups), which a step of few tokens mostly waits for.
Written in Pallas for GPUs (Triton): a program holds one token's scores in registers.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tsmla_jax.nn.products import triton
from tsmla_jax.nn.products.triton import plgpu

_LEAST = -jnp.inf
_NEVER = -(2**31)


class Choice(NamedTuple):
    """How a token's experts are chosen and weighed; static.

    top_k        experts K of a token
    num_shared   shared experts S after them
    scoring      from logits to scores: "softmax", "sigmoid" or "sqrtsoftplus"
    groups       how many groups of equal size the experts have; 1 is no groups
    topk_groups  how many of the groups a token may use
    normalizes   whether the routed experts' weights of a token are divided by their sum
    factor       multiplies these weights after that
    """

    top_k: int
    num_shared: int
    scoring: str
    groups: int
    topk_groups: int
    normalizes: bool
    factor: float


def why_not(num_experts: int) -> list[str]:
    """Why `choose` can't serve so many experts on jax's default device; empty if it can."""
    words = f"there are {num_experts} experts; the kernel holds at most 1024 scores in registers"
    return triton.why_not((num_experts > 1024, words))


def choose(
    logits: jax.Array, correction_bias: jax.Array | None, valid: jax.Array | None, choice: Choice
) -> tuple[jax.Array, jax.Array]:
    """The experts of each token and their weights, from the router's logits.

    Args:
      logits: [T, E] f32, or partial sums of them [P, T, E], which are added over P.
      correction_bias: [E], added to the scores for the choice, not for the weights; or None. With it a group counts as
        the sum of its two greatest biased scores, without it as its greatest score.
      valid: [T] bool, False for padding; None if there is no padding.
      choice: how experts are chosen and weighed.

    Returns:
      experts [T, K + S] i32 and their weights [T, K + S] f32. First the K routed experts, which all differ: by score
      plus bias, the greatest first, ties by the expert's index, NaN before all numbers and -inf after them, as in
      `jax.lax.top_k`. Then the shared ones, E to E + S - 1, with weight 1. All experts of padding are E + S.
    """
    operands = [logits]
    if correction_bias is not None:
        operands.append(correction_bias.astype(jnp.float32))
    if valid is not None:
        operands.append(valid.astype(jnp.int32))
    if logits.ndim == 2:
        operands[0] = logits[None]
    num_tokens, num_experts = logits.shape[-2:]
    shape = (num_tokens, choice.top_k + choice.num_shared)
    if not num_tokens:
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    experts, weights = pl.pallas_call(
        functools.partial(_choose, choice, correction_bias is not None, valid is not None),
        grid=(num_tokens,),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=1 if num_experts <= 256 else 4, num_stages=1),
        interpret=jax.default_backend() == "cpu",
        name="choose_experts",
    )(*operands)
    return experts, weights


def _choose(form: Choice, has_bias: bool, has_padding: bool, logits_ref: Any, *others: Any) -> None:
    """Choose one token's experts.

    others: the bias if there is one, whether each token is valid if some are not, and the two results.
    """
    *inputs, experts_ref, weights_ref = others
    token, num_experts = pl.program_id(0), logits_ref.shape[2]
    lanes = jnp.arange(pl.next_power_of_2(num_experts), dtype=jnp.int32)
    exists = lanes < num_experts
    parts = [
        plgpu.load(logits_ref.at[part, token, lanes], mask=exists, other=_LEAST) for part in range(logits_ref.shape[0])
    ]
    scores = _scores(sum(parts[1:], parts[0]), form.scoring)
    choice = scores
    if has_bias:
        choice = choice + plgpu.load(inputs[0].at[lanes], mask=exists, other=0.0)
    choice = jnp.where(exists, choice, _LEAST)
    if form.groups > 1:
        choice = _limit_to_groups(choice, lanes, num_experts // form.groups, form, best=2 if has_bias else 1)
    order = jnp.where(exists, _order(choice), _NEVER)
    count = form.top_k + form.num_shared
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

    shared = num_experts - form.top_k + places  # places from top_k on keep these; choose_next writes those before
    begin = order, shared, jnp.zeros(places.shape, jnp.float32)
    _, experts, weights = lax.fori_loop(0, form.top_k, choose_next, begin)
    if form.normalizes:
        weights = weights / (weights.sum() + 1e-20)
    weights = jnp.where(places < form.top_k, weights * form.factor, 1.0)
    if has_padding:
        experts = jnp.where(inputs[-1][token] != 0, experts, num_experts + form.num_shared)
    plgpu.store(experts_ref.at[token, places], experts, mask=places < count)
    plgpu.store(weights_ref.at[token, places], weights, mask=places < count)


def _scores(logits: jax.Array, scoring: str) -> jax.Array:
    """The router's scores; lanes without an expert have logits of -inf."""
    if scoring == "softmax":
        powers = jnp.exp(logits - logits.max())
        return powers / powers.sum()
    if scoring == "sigmoid":
        return 1 / (1 + jnp.exp(-logits))
    return jnp.sqrt(jnp.maximum(logits, 0) + jnp.log1p(jnp.exp(-jnp.abs(logits))))


def _order(choice: jax.Array) -> jax.Array:
    """Integers in the order of these floats, all greater than _NEVER. NaN becomes the greatest, so that it shows in the
    result."""
    bits = lax.bitcast_convert_type(jnp.where(jnp.isnan(choice), jnp.nan, choice), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _first_greatest(order: jax.Array, lanes: jax.Array) -> jax.Array:
    """The first lane with the greatest value."""
    return jnp.where(order == order.max(), lanes, lanes.shape[0]).min()


def _limit_to_groups(choice: jax.Array, lanes: jax.Array, size: int, form: Choice, best: int) -> jax.Array:
    """The choice with -inf outside the best groups, which have `size` experts each. A group counts as its best expert
    or, if `best` is 2, as the sum of its best two, and as infinite if that is NaN."""
    groups = jnp.arange(pl.next_power_of_2(form.groups), dtype=jnp.int32)
    owner = lanes // size
    belongs = owner[None, :] == groups[:, None]
    counted = jnp.where(jnp.isnan(choice), jnp.inf, choice)
    members = jnp.where(belongs, counted[None, :], _LEAST)
    value = members.max(axis=1)
    if best == 2:
        past = lanes.shape[0]
        first = jnp.where(members == value[:, None], lanes[None, :], past).min(axis=1)
        value = value + jnp.where(lanes[None, :] == first[:, None], _LEAST, members).max(axis=1)
        value = jnp.where(jnp.isnan(value), jnp.inf, value)
    value = jnp.where(groups < form.groups, value, _LEAST)
    # A group is among the best if fewer than topk_groups others precede it: better ones, and equal ones before it.
    one, other = value[:, None], value[None, :]
    better = (other > one) | ((other == one) & (groups[None, :] < groups[:, None]))
    allowed = better.astype(jnp.int32).sum(axis=1) < form.topk_groups
    return jnp.where((belongs & allowed[:, None]).astype(jnp.int32).max(axis=0) > 0, choice, _LEAST)
