"""The MLPs of a decoder: the gated dense one, the router, and the mixture of experts.

Pure functions over parameters. Routing follows DeepSeek-V2 (arXiv:2405.04434, section 2.2), DeepSeek-V3
(arXiv:2412.19437, section 2.1.2) and, for scores of sqrt(softplus), tables of experts by token id and clipped MLPs,
DeepSeek-V4 (section 2.1).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.generate.config import MoEConfig
from tsmla_jax.nn.products import expert_choice
from tsmla_jax.nn.products import grouped_matmul as grouped
from tsmla_jax.nn.products.block_scaled import BLOCK, BlockScaled, products_of, quantized, widened
from tsmla_jax.nn.products.grouped_matmul import grouped_matmul
from tsmla_jax.nn.products.linear import by_scaled_products, linear, scaled_product
from tsmla_jax.nn.products.mxfp4 import MXFP4, why_not_experts, why_not_mxfp4
from tsmla_jax.nn.products.router import project, router_logits
from tsmla_jax.nn.products.row_blocks import make_blocks, picked_rows, sort_rows
from tsmla_jax.nn.products.scaled_rows import ScaledRows, scaled, scaled_rows
from tsmla_jax.nn.products.tiles import COPIED_PAIRS, PLAIN_PAIRS, WIDENED_BYTES, WIDENED_PAIRS, expert_tiles
from tsmla_jax.ops.grouped_block_scaled_matmul.api import grouped_block_scaled_matmul
from tsmla_kernels.contract.products import PLAIN

_MAX_BLOCK_ROWS = 128

Weight = jax.Array | BlockScaled | MXFP4
_Grouped = jax.Array | BlockScaled


def gated_mlp(
    x: jax.Array, gate_up: jax.Array | BlockScaled, down: jax.Array | BlockScaled, limit: float | None = None
) -> jax.Array:
    """silu(x W_gate) * (x W_up), projected down.

    Args:
      x: [T, C].
      gate_up: [2 I, C], the gate's rows first.
      down: [C, I].
      limit: x W_gate is clipped to at most limit, x W_up to [-limit, limit]; None means no limit.

    Returns:
      [T, C] in x's dtype.
    """
    weights = [weight for weight in (gate_up, down) if isinstance(weight, BlockScaled)]
    if len(weights) < 2 or not all(by_scaled_products(x.shape[0], weight, x.dtype) for weight in weights):
        return linear(activate(linear(x, gate_up), limit), down)
    first, second = weights
    form: dict[str, Any] = {"gated": True, "limit": limit, "out_dtype": _inner_dtype(x, second)}
    inner = scaled_product(*quantized(x, first), first, **form)
    return _down(functools.partial(scaled_product, weight=second), inner, x.dtype)


def _inner_dtype(x: jax.Array, down: Weight) -> str:
    """The dtype of the gated activations before the product with `down`. If x is float16 and they are not quantised,
    they stay in float32 until each row has a scale, because float16 would lose bits of products of small numbers.
    """
    if isinstance(down, BlockScaled) and down.products == "quantized":
        return "float8_e4m3fn"
    return "float32" if x.dtype == jnp.float16 else x.dtype.name


def _down(
    product: Callable[..., Any], inner: jax.Array | tuple[jax.Array, jax.Array], dtype: jax.typing.DTypeLike
) -> jax.Array:
    """The product of the gated activations (in the dtype that `_inner_dtype` returns) with the last weight.

    Args:
      product: takes values, their scales or None, and `out_dtype`.
      inner: the gated activations [R, I], and their scales if they are quantised.
      dtype: the dtype of the result [R, C].
    """
    name = jnp.dtype(dtype).name
    if isinstance(inner, tuple):
        return cast(jax.Array, product(*inner, out_dtype=name))
    if inner.dtype != jnp.float32:
        return cast(jax.Array, product(inner, None, out_dtype=name))
    values, scales = scaled(inner)
    return cast(jax.Array, (product(values, None, out_dtype="float32") * scales[:, None]).astype(name))


def activate(gate_up: jax.Array, limit: float | None) -> jax.Array:
    """silu(gate) * up, [..., I], from gate_up [..., 2 I] with the gate first; limit as in `gated_mlp`."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up


def route(
    x: jax.Array,
    router: jax.Array,
    correction_bias: jax.Array | None,
    config: MoEConfig,
    experts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Chooses the experts of each token. All in f32, as the models were trained.

    Args:
      x: [T, C].
      router: [E, C].
      correction_bias: [E], used only by "noaux_tc": added to the scores that select, not to the weights.
      config: the routing.
      experts: [T, K] i32, the experts if a table by token id has chosen them already; the scores then only weigh them.

    Returns:
      experts [T, K] i32 and their weights [T, K] f32. NaN scores come first, equal scores go by the expert's index, and
      -inf comes last: so a token has K different experts, however many scores are finite.

    Raises:
      ValueError: the method is noaux_tc, and correction_bias and experts are None.
    """
    return _route(router_logits(x, router), correction_bias, config, experts)


def _route(
    logits: jax.Array, correction_bias: jax.Array | None, config: MoEConfig, experts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The results of `route`, from the logits [T, E] f32."""
    scores = _score(logits, config)
    if experts is None and (config.routing == "greedy" or (config.routing != "noaux_tc" and config.n_group == 1)):
        # The scores that select are also the weights: no second kernel has to look the weights up.
        weights, experts = lax.top_k(_without_sign(scores), config.top_k)
    else:
        if experts is None:
            bias = _bias_of(correction_bias, config)
            choice, best = (scores, 1) if bias is None else (scores + bias, 2)
            _, experts = lax.top_k(_without_sign(_limit_to_groups(choice, config, best)), config.top_k)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return experts.astype(jnp.int32), weights * config.routed_scaling_factor


def _bias_of(correction_bias: jax.Array | None, config: MoEConfig) -> jax.Array | None:
    """The bias [E], in f32, that is added to the scores that choose; None if the routing has no bias. Raises a
    ValueError if the routing has one and `correction_bias` is None."""
    if config.routing != "noaux_tc":
        return None
    if correction_bias is None:
        raise ValueError("correction_bias = None; legal with routing 'noaux_tc': an array [E]")
    return correction_bias.astype(jnp.float32)


def _without_sign(choice: jax.Array) -> jax.Array:
    """The scores `choice` with positive NaN: a negative NaN would come last in `jax.lax.top_k`."""
    return jnp.where(jnp.isnan(choice), jnp.nan, choice)


def _score(logits: jax.Array, config: MoEConfig) -> jax.Array:
    if config.scoring == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    return jax.nn.sigmoid(logits) if config.scoring == "sigmoid" else jnp.sqrt(jax.nn.softplus(logits))


def _limit_to_groups(choice: jax.Array, config: MoEConfig, best: int) -> jax.Array:
    """Scores [T, E], -inf outside each token's topk_group best groups; a group's score is the sum of its `best` largest
    scores.
    """
    if config.n_group == 1:
        return choice
    grouped = choice.reshape(choice.shape[0], config.n_group, choice.shape[1] // config.n_group)
    scores = grouped.max(axis=-1) if best == 1 else _sum_of_best_two(grouped)
    # A group with a NaN is among the best, so that the NaN shows in the result.
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    # Groups are compared in pairs: a top_k of so few groups would be three more kernels.
    one, other = scores[:, :, None], scores[:, None, :]
    earlier = jnp.arange(config.n_group) < jnp.arange(config.n_group)[:, None]
    better = (other > one) | ((other == one) & earlier)
    allowed = better.sum(axis=-1) < config.topk_group
    return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


def _sum_of_best_two(x: jax.Array) -> jax.Array:
    """The sum of the two largest values along the last axis, as one reduction of pairs (largest, second largest)."""

    def merge(some: tuple[jax.Array, jax.Array], others: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        second = jnp.maximum(jnp.minimum(some[0], others[0]), jnp.maximum(some[1], others[1]))
        return jnp.maximum(some[0], others[0]), second

    none = jnp.array(-jnp.inf, x.dtype)
    first, second = lax.reduce((x, jnp.full_like(x, none)), (none, none), merge, (x.ndim - 1,))
    return first + second


def mix_experts(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    gate_up: Weight,
    down: Weight,
    limit: float | None = None,
    load: int | None = None,
    rows: ScaledRows | None = None,
) -> jax.Array:
    """The weighted sum of each token's experts.

    Args:
      x: [T, C].
      experts, weights: [T, K], as `choose_experts` returns them; the index one past the last expert adds nothing.
      gate_up, down: [E, 2 I, C] and [E, C, I], maybe block-scaled or in MXFP4, maybe with unused weights at the end.
      limit: as in `gated_mlp`.
      load: how many of the T K choices are expected to name an expert that is here; None is all.
      rows: x as `scaled_rows` makes it, if the caller has it already.

    Returns:
      [T, C] f32.
    """
    if not x.shape[0]:
        return jnp.zeros(x.shape, jnp.float32)
    # A stack may have more weights than there are experts (block_scaled.stack_size).
    num_experts = min(gate_up.shape[0], down.shape[0])
    _, hidden, width = down.shape
    pairs = experts.size if load is None else load
    grouped = not why_not_grouped(x.dtype, hidden, width, isinstance(down, BlockScaled))
    plain = (pairs >= PLAIN_PAIRS * num_experts or not grouped) and not why_not_plain(x.dtype, gate_up, down)
    if plain or takes_scaled_products(x.dtype, gate_up, down):
        per_pair = _sorted_experts(x, experts, gate_up, down, limit, load)
    elif isinstance(down, MXFP4):  # no kernel takes these weights: widen them, as a loader would have done
        wide_gate_up, wide_down = (widened(weight, x.dtype) for weight in (gate_up, down))
        return mix_experts(x, experts, weights, wide_gate_up, wide_down, limit, load)
    elif grouped:
        given = x if rows is None else rows
        per_pair = _grouped_experts(given, experts, cast(_Grouped, gate_up), down, limit, pairs)
    elif jax.default_backend() == "cpu":
        per_pair = _experts_in_turn(x, experts, gate_up, down, limit)
    else:
        per_pair = _ragged_experts(x, experts, gate_up, down, limit)
    weighted = per_pair.astype(jnp.float32) * weights[:, :, None]
    return jnp.where((experts < num_experts)[:, :, None], weighted, 0).sum(axis=1)


def takes_scaled_products(dtype: Any, gate_up: Weight, down: Weight) -> bool:
    """Whether grouped_block_scaled_matmul multiplies activations of this dtype with these experts, in fp8 or MXFP4."""
    if isinstance(gate_up, MXFP4) and isinstance(down, MXFP4):
        return not why_not_mxfp4(dtype, *down.shape[1:])
    if not isinstance(gate_up, BlockScaled) or not isinstance(down, BlockScaled):
        return False
    # With products=None only the kernel will do, and it takes no block of scales that has both gate and up rows.
    if down.shape[2] % BLOCK and None in (gate_up.products, down.products):
        return False
    return all(products_of(weight, dtype) is not None for weight in (gate_up, down))


def why_not_plain(dtype: Any, gate_up: Any, down: Any) -> list[str]:
    """Why the kernel of grouped_block_scaled_matmul can't run on jax's default device, or isn't chosen, for experts
    with weights in the 16-bit dtype of their activations; empty if it can run and is chosen.

    Args:
      dtype: the dtype of the activations.
      gate_up, down: the stacks, or descriptions of them.
    """
    name = jnp.dtype(dtype).name
    if name not in PLAIN or any(getattr(weight, "dtype", None) != jnp.dtype(dtype) for weight in (gate_up, down)):
        legal = " or ".join(PLAIN)
        return [f"grouped_block_scaled_matmul takes weights without scales in {legal}, with activations of that dtype"]
    return why_not_experts(dtype, *down.shape[1:], plain=True)


def why_not_grouped(dtype: Any, hidden: int, width: int, narrow: bool) -> list[str]:
    """Why the experts of a step can't run by `grouped_matmul`; empty if they can.

    Args:
      dtype: the dtype of the activations.
      hidden, width: C and I.
      narrow: whether the weights are block-scaled.
    """
    products = ((2 * width, hidden), (hidden, width))
    reasons = [reason for shape in products for reason in grouped.why_not(dtype, *shape, narrow)]
    # A reason that holds for both products is given once.
    return list(dict.fromkeys(reasons))


def takes_scaled_rows(dtype: Any, gate_up: Weight, down: Weight, load: int) -> bool:
    """Whether `mix_experts` of `load` pairs takes activations of this dtype as `ScaledRows`."""
    _, hidden, width = down.shape
    return (
        isinstance(down, BlockScaled)
        and not takes_scaled_products(dtype, gate_up, down)
        and not why_not_grouped(dtype, hidden, width, True)
        and not _widened_first(gate_up, down, load)
    )


def _widened_first(gate_up: Weight, down: Weight, load: int) -> bool:
    """Whether experts' weights are widened to 16 bits before their products: this pays if an expert has many rows."""
    num_experts = min(gate_up.shape[0], down.shape[0])
    return load >= WIDENED_PAIRS * num_experts and 2 * math.prod(gate_up.shape) <= WIDENED_BYTES


def _grouped_experts(
    x: jax.Array | ScaledRows,
    experts: jax.Array,
    gate_up: _Grouped,
    down: _Grouped,
    limit: float | None,
    load: int,
) -> jax.Array:
    """Results of each token's experts, [T, K, C]: two products of all experts in use, on an NVIDIA GPU. If each expert
    has many rows (WIDENED_PAIRS) and the stack is not too large, its weights are widened to x's dtype first.

    x: `ScaledRows` only if `takes_scaled_rows` says so. load: as in `mix_experts`."""
    num_experts, (_, hidden, width) = min(gate_up.shape[0], down.shape[0]), down.shape
    if isinstance(x, jax.Array) and _widened_first(gate_up, down, load):
        gate_up, down = widened(gate_up, x.dtype), widened(down, x.dtype)
    block, tile_up, tile_down = expert_tiles(load, num_experts, hidden, width, isinstance(down, BlockScaled))
    blocks = make_blocks(experts, num_experts, block)
    x = scaled_rows(x) if tile_up.half and isinstance(x, jax.Array) else x
    inner = grouped_matmul(x, gate_up, blocks, tile_up, gated=True, gather=True, limit=limit)
    out = cast(jax.Array, grouped_matmul(inner, down, blocks, tile_down))
    # A choice without an expert here gets the values of some row, which the caller drops.
    return out[jnp.minimum(blocks.places, out.shape[0] - 1)]


def _sorted_experts(
    x: jax.Array, experts: jax.Array, gate_up: Weight, down: Weight, limit: float | None, load: int | None
) -> jax.Array:
    """Results of each token's experts, [T, K, C], by grouped_block_scaled_matmul. The `products` of block-scaled
    weights says whether x and the activations between the two products are quantised. load: as in `mix_experts`.
    """
    num_experts = min(gate_up.shape[0], down.shape[0])
    rows, cu_rows, places = sort_rows(experts, num_experts)
    # All pairs without an expert here share one row, whose values the caller drops: if experts are split over devices,
    # most pairs have none.
    places = jnp.where(experts < num_experts, places, 0)

    def product(values: jax.Array, scales: jax.Array | None, weight: Weight, **form: Any) -> Any:
        theirs = (weight, None) if isinstance(weight, jax.Array) else (weight.values, weight.scales)
        return grouped_block_scaled_matmul(values, theirs[0], scales, theirs[1], cu_rows, **form)

    gated: dict[str, Any] = {"rows": rows, "gated": True, "limit": limit, "out_dtype": _inner_dtype(x, down)}
    given = quantized(x, gate_up) if isinstance(gate_up, BlockScaled) else (x, None)
    if _copies_rows(x, gate_up, experts.size if load is None else load, num_experts):
        given, gated["rows"] = jax.tree.map(lambda array: picked_rows(array, rows), given), None
    inner = product(*given, weight=gate_up, **gated)
    return _down(functools.partial(product, weight=down), inner, x.dtype)[places]


def _copies_rows(x: jax.Array, gate_up: Weight, load: int, num_experts: int) -> bool:
    """Whether the rows of x are copied, expert by expert, before the first products of `load` (token, expert) pairs."""
    if isinstance(gate_up, jax.Array):
        return load >= PLAIN_PAIRS * num_experts
    if not isinstance(gate_up, BlockScaled) or x.dtype.itemsize != 2:
        return False
    ranges = COPIED_PAIRS["quantized" if gate_up.products == "quantized" else "exact"]
    return any(fewest * num_experts <= load <= most * num_experts for fewest, most in ranges)


def _ragged_experts(x: jax.Array, experts: jax.Array, gate_up: Weight, down: Weight, limit: float | None) -> jax.Array:
    """Results of each token's experts by XLA's ragged product, if no kernel can run. In some versions of XLA that
    product multiplies every row with every expert."""
    num_tokens, top_k = experts.shape
    count = min(gate_up.shape[0], down.shape[0])
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = (experts.reshape(-1)[:, None] == jnp.arange(count)).sum(axis=0, dtype=jnp.int32)

    def product(rows: jax.Array, weight: Weight) -> jax.Array:
        return lax.ragged_dot(rows, widened(weight, x.dtype)[:count].swapaxes(1, 2), sizes)

    out = product(activate(product(x[order // top_k], gate_up), limit), down)
    return out[jnp.argsort(order)].reshape(num_tokens, top_k, out.shape[-1])


def _block_rows(rows: int, num_experts: int) -> int:
    """How many rows a block of an expert holds: about the mean load of an expert, as a power of two from 8 to 128."""
    size = 8
    while size < _MAX_BLOCK_ROWS and size * num_experts < rows:
        size *= 2
    return size


def _experts_in_turn(x: jax.Array, experts: jax.Array, gate_up: Weight, down: Weight, limit: float | None) -> jax.Array:
    """Results of each token's experts, one block of one expert after the other: for a CPU, which has no launches to
    wait for.

    The (token, expert) pairs are sorted by expert and cut into blocks of one expert each; a loop runs over the blocks
    that exist. Work and weight traffic follow the experts in use, and shapes stay static. No array of activations has
    E x T rows, as `lax.ragged_dot` makes one on a CPU.
    """
    num_tokens, top_k = experts.shape
    num_experts = min(gate_up.shape[0], down.shape[0])
    rows = num_tokens * top_k
    block = _block_rows(rows, num_experts)

    # Padding comes after the rows of all experts, where no block begins.
    row_expert = experts.reshape(rows)
    order = jnp.argsort(row_expert, stable=True)
    # Both searches compare all pairs at once: the default method is a loop.
    experts_up_to = jnp.arange(num_experts + 1, dtype=jnp.int32)
    row_starts = jnp.searchsorted(row_expert[order], experts_up_to, method="compare_all").astype(jnp.int32)
    blocks = (row_starts[1:] - row_starts[:-1] + block - 1) // block
    block_ends = jnp.cumsum(blocks)
    # Every expert in use has at most one block that is not full.
    most_blocks = jnp.arange(rows // block + min(num_experts, rows), dtype=jnp.int32)
    block_expert = jnp.searchsorted(block_ends, most_blocks, side="right", method="compare_all").astype(jnp.int32)

    x_sorted = jnp.pad(x[order // top_k], ((0, block), (0, 0)))

    def one_block(index: jax.Array, out: jax.Array) -> jax.Array:
        expert = block_expert[index]
        start = row_starts[expert] + (index - (block_ends[expert] - blocks[expert])) * block
        rows_in = lax.dynamic_slice_in_dim(x_sorted, start, block)
        own_gate_up, own_down = jax.tree.map(lambda weight: weight[expert], (gate_up, down))
        rows_out = gated_mlp(rows_in, own_gate_up, own_down, limit)
        # An expert's last block may run over into the next expert's rows; that expert's own blocks come later and
        # overwrite them.
        return lax.dynamic_update_slice_in_dim(out, rows_out, start, axis=0)

    out = lax.fori_loop(0, block_ends[-1], one_block, jnp.zeros_like(x_sorted))
    return out[jnp.argsort(order)].reshape(num_tokens, top_k, out.shape[-1])


def mixture_of_experts(
    params: Mapping[str, Any], x: jax.Array, valid: jax.Array, config: MoEConfig, tokens: jax.Array
) -> jax.Array:
    """Routed experts plus the shared ones, which are experts that every token visits with weight 1.

    Args:
      params: "router" [E, C], "gate_up" [E + S, 2 I, C] and "down" [E + S, C, I], the S shared experts last; or, if the
        routed experts are in MXFP4, only the routed ones, and "shared_gate_up" [2 S I, C] and "shared_down" [C, S I];
        with noaux_tc "correction_bias" [E], or, in a layer whose experts go by token id, "expert_table" i32 [V, K].
        Experts that return their input have no weights: only rows of the router and the bias, after those of the
        others.
      x: [T, C].
      valid: [T] bool, False for padding.
      config: sizes and routing.
      tokens: [T] i32, ids of the tokens.

    Returns:
      [T, C] in x's dtype.
    """
    stacks, pairs = (params["gate_up"], params["down"]), x.shape[0] * (config.top_k + config.num_shared)
    logits, rows = project(x, params["router"], with_rows=takes_scaled_rows(x.dtype, *stacks, pairs))
    experts, weights = choose_experts(params, x, config.choice, tokens, valid, logits)
    kept = None
    if config.num_zero:
        experts, kept = without_zero(experts, weights, config)
    if "shared_down" in params:  # the stacks have only the routed experts
        experts, weights = jnp.minimum(experts, config.num_experts)[:, : config.top_k], weights[:, : config.top_k]
    mixed = mix_experts(x, experts, weights, *stacks, config.swiglu_limit, rows=rows)
    if "shared_down" in params:
        shared = gated_mlp(x, params["shared_gate_up"], params["shared_down"], config.swiglu_limit)
        mixed += jnp.where(valid[:, None], shared.astype(jnp.float32), 0)
    if kept is not None:
        mixed += kept[:, None] * x.astype(jnp.float32)
    return mixed.astype(x.dtype)


def without_zero(experts: jax.Array, weights: jax.Array, config: MoEConfig) -> tuple[jax.Array, jax.Array]:
    """The choices [T, K], with num_experts in place of an expert without weights; and for each token the sum [T] of the
    weights of its experts without weights, which return their input. Ids past all of these add nothing to it.
    """
    zero = (experts >= config.num_experts) & (experts < config.num_experts + config.num_zero)
    return jnp.minimum(experts, config.num_experts), jnp.where(zero, weights, 0).sum(axis=1)


def choose_experts(
    params: Mapping[str, Any],
    x: jax.Array,
    config: MoEConfig,
    tokens: jax.Array,
    valid: jax.Array | None = None,
    logits: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The experts of each token and their weights, as `route` returns them: the routed ones, then the shared ones with
    ids from num_experts on. If `valid` is given, padding tokens get the id one past the last expert. logits: the
    partial sums [S, T, E] of `router.project`, if the caller has them. The other arguments are those of
    `mixture_of_experts`, with its `config.choice` as config.
    """
    bias = params.get("correction_bias")
    logits = project(x, params["router"], with_rows=False)[0] if logits is None else logits
    if "expert_table" not in params and not expert_choice.why_not(config.num_experts):
        return expert_choice.choose(logits, _bias_of(bias, config), valid, choice_of(config))
    chosen = params["expert_table"][tokens] if "expert_table" in params else None
    experts, weights = _route(logits.sum(axis=0), bias, config, chosen)
    if config.num_shared:
        shared = (x.shape[0], config.num_shared)
        ids = jnp.arange(config.num_experts, config.num_experts + config.num_shared, dtype=jnp.int32)
        experts = jnp.concatenate([experts, jnp.broadcast_to(ids, shared)], axis=1)
        weights = jnp.concatenate([weights, jnp.ones(shared, weights.dtype)], axis=1)
    if valid is not None:
        experts = jnp.where(valid[:, None], experts, config.num_experts + config.num_shared)
    return experts, weights


def choice_of(config: MoEConfig) -> expert_choice.Choice:
    """The routing as the kernel of the choice takes it."""
    return expert_choice.Choice(
        config.top_k, config.num_shared, cast(str, config.scoring), 1 if config.routing == "greedy" else config.n_group,
        config.topk_group, config.norm_topk_prob, config.routed_scaling_factor,
    )  # fmt: skip
