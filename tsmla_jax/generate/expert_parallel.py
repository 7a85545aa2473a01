"""A mixture of experts whose experts are split over devices, inside `jax.shard_map`.

Every device sees the tokens of all devices that share the experts, and computes what its own experts make of them; sums
go back to the tokens' devices. Several devices on the axis EXPERT need two collectives a layer, however many they are:
an all-gather of the activations and an all-to-all of what each device made of the others' tokens, which the tokens'
device adds up. Over the axis CONTEXT, whose devices have the same tokens, the sums are added. Each device computes the
router's choice anew: sending it would be two collectives more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tsmla_jax.generate.config import MoEConfig
from tsmla_jax.generate.mesh import CONTEXT, EXPERT, EXPERT_SHARDS, MeshShape
from tsmla_jax.generate.moe import choose_experts, gated_mlp, mix_experts, takes_scaled_rows, without_zero
from tsmla_jax.nn import context_parallel
from tsmla_jax.nn.products.router import project


def gather_tokens(tokens: jax.Array, valid: jax.Array, mesh: MeshShape) -> jax.Array:
    """The ids of the tokens of all N devices of the axis EXPERT, one device after the other, -1 for padding; i32 [N T]
    from tokens [T] and valid [T]. All layers of a step share it."""
    tokens = jnp.where(valid, tokens, -1)
    return lax.all_gather(tokens, EXPERT, tiled=True) if mesh.expert > 1 else tokens


def mixture_of_split_experts(
    params: Mapping[str, Any], x: jax.Array, tokens: jax.Array, config: MoEConfig, mesh: MeshShape
) -> jax.Array:
    """`moe.mixture_of_experts` of this device's tokens.

    Args:
      params: as in `moe.mixture_of_experts`, but gate_up and down hold the experts of this device's shard, and after
        them the shared experts, unless these have parameters of their own (`mesh.put_params`).
      x: [T, C], the same on all devices of the axis CONTEXT.
      tokens: [N T], the result of `gather_tokens`.
      config: sizes and routing.
      mesh: sizes of the axes.

    Returns:
      [T, C] in x's dtype, the same on all devices of the axis CONTEXT.
    """
    every = lax.all_gather(x, EXPERT, tiled=True) if mesh.expert > 1 else x
    shared_apart = "shared_down" in params
    num_shared = 0 if shared_apart else config.num_shared
    load = every.shape[0] * (config.top_k + num_shared) // mesh.expert_shards
    with_rows = takes_scaled_rows(every.dtype, params["gate_up"], params["down"], load)
    logits, scaled = project(every, params["router"], with_rows=with_rows)
    experts, weights = choose_experts(params, every, config.choice, tokens, logits=logits)
    kept = None
    if config.num_zero:
        experts, kept = without_zero(experts, weights, config)
    if shared_apart:
        experts, weights = experts[:, : config.top_k], weights[:, : config.top_k]
    each, rows = config.num_experts // mesh.expert_shards, jnp.arange(every.shape[0], dtype=jnp.int32)[:, None]

    # A token visits the shared experts on one device only: its own or, if several devices have the token, one of these.
    own = (rows // x.shape[0] == lax.axis_index(EXPERT)) & (rows % mesh.context == lax.axis_index(CONTEXT))
    routed = experts - lax.axis_index(EXPERT_SHARDS) * each
    is_shared = experts >= config.num_experts
    held = jnp.where(is_shared, own & (num_shared > 0), (routed >= 0) & (routed < each))
    held &= (tokens >= 0)[:, None]
    here = jnp.where(is_shared, experts - config.num_experts + each, routed)
    absent = min(params["gate_up"].shape[0], params["down"].shape[0])
    mixed = mix_experts(
        every,
        jnp.where(held, here, absent),
        weights,
        params["gate_up"],
        params["down"],
        config.swiglu_limit,
        load=load,
        rows=scaled,
    )
    if mesh.expert > 1:
        # In 16 bits an all-to-all moves half the bytes of a reduce-scatter in float32. It rounds the sum of each device
        # once; a reduce-scatter in 16 bits would also round between the additions.
        parts = mixed.astype(x.dtype).reshape(mesh.expert, *x.shape)
        mixed = lax.all_to_all(parts, EXPERT, split_axis=0, concat_axis=0).astype(jnp.float32).sum(axis=0)
    if mesh.context > 1:
        mixed = context_parallel.add_rows(mixed.astype(x.dtype), CONTEXT)
    first = lax.axis_index(EXPERT) * x.shape[0] if mesh.expert > 1 else 0
    if shared_apart:
        shared = gated_mlp(x, params["shared_gate_up"], params["shared_down"], config.swiglu_limit)
        valid = lax.dynamic_slice_in_dim(tokens, first, x.shape[0]) >= 0
        mixed = mixed.astype(jnp.float32) + jnp.where(valid[:, None], shared.astype(jnp.float32), 0)
    if kept is not None:
        own_kept = lax.dynamic_slice_in_dim(kept, first, x.shape[0])
        mixed = mixed.astype(jnp.float32) + own_kept[:, None] * x.astype(jnp.float32)
    return mixed.astype(x.dtype)
