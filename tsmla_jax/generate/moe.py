"""The MLPs of a DeepSeek decoder: the gated dense one, the router, and the mixture of experts.

Pure functions over parameters. Routing follows DeepSeek-V2 (arXiv:2405.04434, section 2.2), DeepSeek-V3
(arXiv:2412.19437, section 2.1.2) and, for scores of sqrt(softplus), tables of experts by token id and clipped MLPs,
DeepSeek-V4 (section 2.1).
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.generate.config import MoEConfig

_MAX_BLOCK_ROWS = 128


def gated_mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array, limit: float | None = None) -> jax.Array:
    """silu(x W_gate) * (x W_up), projected down.

    Args:
      x: [T, C].
      gate_up: [2 I, C], the gate's rows first.
      down: [C, I].
      limit: x W_gate is at most that, x W_up between its negative and it; None for no limit.

    Returns:
      [T, C] in x's dtype.
    """
    gate, up = jnp.split(x @ gate_up.T, 2, axis=-1)
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (jax.nn.silu(gate) * up) @ down.T


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
      correction_bias: [E], for "noaux_tc" alone: added to the scores that select, not to the weights.
      config: the routing.
      experts: [T, K] i32, the experts where something else has chosen them (a table by token id); the scores are then
        their weights alone.

    Returns:
      experts [T, K] i32 and their weights [T, K] f32.
    """
    logits = x.astype(jnp.float32) @ router.astype(jnp.float32).T
    scores = _score(logits, config)
    if experts is None:
        choice = scores
        if config.routing == "noaux_tc":
            if correction_bias is None:
                raise ValueError("correction_bias = None; legal with routing 'noaux_tc': an array [E]")
            choice = _limit_to_groups(scores + correction_bias.astype(jnp.float32), config, best=2)
        elif config.routing == "group_limited_greedy":
            choice = _limit_to_groups(scores, config, best=1)
        _, experts = lax.top_k(choice, config.top_k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return experts.astype(jnp.int32), weights * config.routed_scaling_factor


def _score(logits: jax.Array, config: MoEConfig) -> jax.Array:
    if config.scoring == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    return jax.nn.sigmoid(logits) if config.scoring == "sigmoid" else jnp.sqrt(jax.nn.softplus(logits))


def _limit_to_groups(choice: jax.Array, config: MoEConfig, best: int) -> jax.Array:
    """Scores [T, E], -inf outside each token's topk_group best groups; a group counts the sum of its `best` best."""
    if config.n_group == 1:
        return choice
    grouped = choice.reshape(choice.shape[0], config.n_group, -1)
    group_scores = lax.top_k(grouped, best)[0].sum(axis=-1)
    _, chosen = lax.top_k(group_scores, config.topk_group)
    allowed = jax.nn.one_hot(chosen, config.n_group, dtype=jnp.bool_).any(axis=1)
    return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


def _block_rows(rows: int, num_experts: int) -> int:
    """Rows an expert's block holds: about the mean load of an expert, a power of two in 8 to 128."""
    size = 8
    while size < _MAX_BLOCK_ROWS and size * num_experts < rows:
        size *= 2
    return size


def apply_experts(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    valid: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    limit: float | None = None,
) -> jax.Array:
    """The weighted sum of each token's routed experts.

    The (token, expert) pairs are sorted by expert and cut into blocks of one expert each; a loop runs over the blocks
    that exist. Work and weight traffic follow the experts in use, shapes stay static, and nothing of size E x T is
    made (`lax.ragged_dot` makes it on a CPU).

    Args:
      x: [T, C].
      experts, weights: [T, K], from `route`.
      valid: [T] bool; padding tokens visit no expert and get 0.
      gate_up: [E, 2 I, C]; down: [E, C, I].
      limit: as in `gated_mlp`.

    Returns:
      [T, C] in x's dtype.
    """
    num_tokens, top_k = experts.shape
    num_experts = gate_up.shape[0]
    rows = num_tokens * top_k
    block = _block_rows(rows, num_experts)

    # Padding sorts behind every expert, where no block reaches.
    row_expert = jnp.where(valid[:, None], experts, num_experts).reshape(rows)
    order = jnp.argsort(row_expert, stable=True)
    # Both searches compare everything at once: the default one is a loop, which costs a GPU a launch for every step.
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
        rows_out = gated_mlp(rows_in, gate_up[expert], down[expert], limit)
        # A last block runs over into the next expert's rows; that expert's own blocks come later and overwrite them.
        return lax.dynamic_update_slice_in_dim(out, rows_out, start, axis=0)

    out = lax.fori_loop(0, block_ends[-1], one_block, jnp.zeros_like(x_sorted))
    per_pair = out[jnp.argsort(order)].reshape(num_tokens, top_k, -1).astype(jnp.float32)
    mixed = (per_pair * weights[:, :, None]).sum(axis=1)
    return jnp.where(valid[:, None], mixed, 0).astype(x.dtype)


def mixture_of_experts(
    params: Mapping[str, jax.Array], x: jax.Array, valid: jax.Array, config: MoEConfig, tokens: jax.Array
) -> jax.Array:
    """Routed experts plus the shared ones.

    Args:
      params: "router" [E, C], "gate_up" [E, 2 I, C], "down" [E, C, I]; with noaux_tc "correction_bias" [E], or, in a
        layer whose experts go by token id, "expert_table" i32 [V, K]; with shared experts "shared_gate_up" [2 I S, C]
        and "shared_down" [C, I S].
      x: [T, C].
      valid: [T] bool, False for padding.
      config: sizes and routing.
      tokens: [T] i32, ids of the tokens.

    Returns:
      [T, C] in x's dtype.
    """
    chosen = params["expert_table"][tokens] if "expert_table" in params else None
    experts, weights = route(x, params["router"], params.get("correction_bias"), config, chosen)
    limit = config.swiglu_limit
    out = apply_experts(x, experts, weights, valid, params["gate_up"], params["down"], limit)
    if config.num_shared:
        out = out + gated_mlp(x, params["shared_gate_up"], params["shared_down"], limit)
    return out
