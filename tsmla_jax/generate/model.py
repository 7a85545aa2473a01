"""A DeepSeek-V2/V3 decoder as pure functions over a pytree of parameters.

Attention is `tsmla_jax.nn.functional`: chunks of prompts in the expanded form, decode in the absorbed form, both over a
paged latent cache. Every function works under `jax.jit`; an engine compiles `decoder_layer` once for the dense and once
for the expert layers, so that compilation takes the same time for 2 layers and for 61.

Axes: T tokens of a step (ragged, requests packed one after the other), B requests, M pages a request at most, N rows
whose logits are wanted, V vocabulary, C hidden width, P pages, Z page size, D width of a cached token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tsmla_jax.generate.config import ModelConfig
from tsmla_jax.generate.moe import gated_mlp, mixture_of_experts
from tsmla_jax.nn import functional

Phase = Literal["prefill", "decode"]

# {"embed": [V, C], "layers": [layer, ...], "norm": [C], "lm_head": [V, C] unless tied}; a layer is
# {"attention_norm": [C], "attention": as in tsmla_jax.nn.functional.param_shapes, "mlp_norm": [C], "mlp": ...};
# "mlp" is {"gate_up": [2 I, C], "down": [C, I]} in a dense layer, else as moe.mixture_of_experts takes it.
Params = Mapping[str, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """The tokens of one step and where they belong; all i32.

    Attributes:
      tokens: [T] ids; those from cu_seqlens_q[B] on are padding.
      cu_seqlens_q: [B + 1], where each request's new tokens start.
      context_lens: [B], tokens of each request that are in the cache already.
      block_tables: [B, M], the pages of each request.
      slot_mapping: [T], the cache slot of each new token; -1 for padding.
    """

    tokens: jax.Array
    cu_seqlens_q: jax.Array
    context_lens: jax.Array
    block_tables: jax.Array
    slot_mapping: jax.Array


@dataclass(frozen=True)
class StepOptions:
    """What is static about a step.

    Attributes:
      phase: "prefill" attends in the expanded form, "decode" in the absorbed one.
      max_q_len: bound of the new tokens of one request.
      context_chunk: prefill alone: cached tokens of each request that one pass expands.
      implementation: of the operations; None is the best that can run.
    """

    phase: Phase
    max_q_len: int
    context_chunk: int = 512
    implementation: str | None = None


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    """Embeddings of tokens [T]: [T, C]."""
    return params["embed"][tokens]


def decoder_layer(
    layer: Params,
    config: ModelConfig,
    x: jax.Array,
    kv_cache: jax.Array,
    batch: Batch,
    kv_scale: jax.Array | None,
    options: StepOptions,
) -> tuple[jax.Array, jax.Array]:
    """One layer: attention, then the MLP or the experts, each behind a norm and around a residual.

    Args:
      layer: its parameters; those of the MLP say whether it has experts.
      config, options: static.
      x: [T, C].
      kv_cache: [P, Z, D], this layer's.
      batch: the step.
      kv_scale: of an fp8 cache, else None.

    Returns:
      x and the cache, with the new tokens written (in place if it is donated).
    """
    normed = functional.rms_norm(x, layer["attention_norm"], config.rms_norm_eps)
    if options.phase == "prefill":
        attended, kv_cache = functional.prefill_with_context(
            layer["attention"],
            config.attention,
            normed,
            kv_cache,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_q_len=options.max_q_len,
            block_tables=batch.block_tables,
            context_lens=batch.context_lens,
            slot_mapping=batch.slot_mapping,
            context_chunk=options.context_chunk,
            kv_scale=kv_scale,
            implementation=options.implementation,
        )
    else:
        attended, kv_cache = functional.decode(
            layer["attention"],
            config.attention,
            normed,
            kv_cache,
            block_tables=batch.block_tables,
            seq_lens=batch.context_lens + jnp.diff(batch.cu_seqlens_q),
            slot_mapping=batch.slot_mapping,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_q_len=options.max_q_len,
            kv_scale=kv_scale,
            implementation=options.implementation,
        )
    # Rows of padding mean nothing after attention; what they hold must not reach the experts' blocks as NaN.
    valid = batch.slot_mapping >= 0
    x = x + jnp.where(valid[:, None], attended, 0)
    normed = functional.rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
    mlp = layer["mlp"]
    if "router" in mlp:
        assert config.moe is not None
        return x + mixture_of_experts(mlp, normed, valid, config.moe), kv_cache
    return x + gated_mlp(normed, mlp["gate_up"], mlp["down"]), kv_cache


def logits(params: Params, config: ModelConfig, x: jax.Array, rows: jax.Array) -> jax.Array:
    """Logits after the tokens x[rows]: f32 [N, V] from x [T, C] and rows [N] i32."""
    normed = functional.rms_norm(x[rows], params["norm"], config.rms_norm_eps)
    output = params["embed"] if config.tie_word_embeddings else params["lm_head"]
    return jnp.einsum("nc,vc->nv", normed, output, preferred_element_type=jnp.float32)


def forward(
    params: Params,
    config: ModelConfig,
    kv_caches: Sequence[jax.Array],
    batch: Batch,
    rows: jax.Array,
    kv_scale: jax.Array | None,
    options: StepOptions,
) -> tuple[jax.Array, list[jax.Array]]:
    """A whole step: the logits [N, V] after the tokens at `rows`, and the caches with the new tokens written.

    Args:
      kv_caches: one [P, Z, D] a layer.
      rows: [N] i32, indices into the step's tokens.
      others: as in `decoder_layer`.
    """
    x = embed(params, batch.tokens)
    caches = []
    for layer, kv_cache in zip(params["layers"], kv_caches, strict=True):
        x, kv_cache = decoder_layer(layer, config, x, kv_cache, batch, kv_scale, options)
        caches.append(kv_cache)
    return logits(params, config, x, rows), caches
