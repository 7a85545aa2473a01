"""The least that a step of a whole model must read or multiply, on one device of a mesh."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from examples.whole_models.random_model import shapes
from tsmla_jax.generate import ModelConfig
from tsmla_jax.generate.config import LayerAttention
from tsmla_jax.generate.mesh import MeshShape, head_spec
from tsmla_jax.nn import MLAConfig, V32Config
from tsmla_kernels.contract.layouts import V4_PACKED, V32_PACKED


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def decode_bytes(config: ModelConfig, narrow: bool, batch: int, context: int, mesh: MeshShape) -> float:
    """Bytes that a device must read in a decode step of `batch` texts of `context` tokens: the caches, and once each
    weight; among its experts only as many as the texts can be expected to choose if all experts are equally likely.

    narrow: as in `random_model.shapes`."""
    moe = config.moe
    assert moe is not None
    params = shapes(config, narrow)
    total = float(_bytes({**params, "embed": ()}))
    chosen = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** (batch / mesh.data)) / mesh.expert_shards
    for layer in params["layers"]:
        if "router" in layer["mlp"]:
            stacks = jax.tree.leaves([layer["mlp"]["gate_up"], layer["mlp"]["down"]])
            each = sum(math.prod(stack.shape[1:]) * stack.dtype.itemsize for stack in stacks)
            total += each * (chosen + moe.num_shared) - _bytes(stacks)
    if head_spec(config.vocab_size, mesh.expert_shards) != P():
        total -= _bytes(params["lm_head"]) * (1 - 1 / mesh.expert_shards)
    texts, layers = batch / mesh.replicas / mesh.context, range(config.num_layers)
    return total + texts * sum(_cache_bytes_read(config.layer(index).attention, context) for index in layers)


def _cache_bytes_read(attention: LayerAttention, context: int) -> float:
    """Bytes of a layer's caches that a step reads for a text of `context` tokens: all latents, in 16 bits; in models
    whose caches are packed by default, the indexer's keys, if there are any, and the rows that a token attends to."""
    if isinstance(attention, MLAConfig):
        return context * attention.cache_dim * 2
    if isinstance(attention, V32Config):
        keys = context * (attention.index_head_dim + 4) * attention.has_indexer
        return keys + min(attention.index_topk, context) * V32_PACKED.row_bytes
    entries = selected = context // attention.ratio if attention.ratio else 0
    keys = 0
    if attention.kind == "csa":
        selected, keys = min(attention.index_topk, entries), entries * (attention.index_head_dim + 4)
    return keys + (min(attention.sliding_window, context) + selected) * V4_PACKED.row_bytes


def _products_with_keys(attention: LayerAttention, length: int) -> float:
    """How many terms a layer's products of a token with keys have, on average over a prompt of `length` tokens. The
    indexer's terms, which are in fp8, count half."""
    seen = length / 2
    if isinstance(attention, MLAConfig):
        return attention.num_attention_heads * (attention.qk_head_dim + attention.v_head_dim) * seen
    if isinstance(attention, V32Config):
        mla, indexer = attention.mla, attention.index_n_heads * attention.index_head_dim * attention.has_indexer
        absorbed = (mla.cache_dim + mla.kv_lora_rank) * min(attention.index_topk, seen)
        expanded = (mla.qk_head_dim + mla.v_head_dim) * seen  # of all keys, by the mask
        return mla.num_attention_heads * min(absorbed, expanded) + indexer * seen / 2
    entries = seen / attention.ratio if attention.ratio else 0
    indexer = attention.index_n_heads * attention.index_head_dim * entries / 2 if attention.kind == "csa" else 0
    selected = min(attention.index_topk, entries) if attention.kind == "csa" else entries
    rows = min(attention.sliding_window, seen) + selected
    return attention.num_attention_heads * 2 * attention.head_dim * rows + indexer


def prefill_products(config: ModelConfig, tokens: int, length: int) -> float:
    """Operations of the products for so many tokens of prompts of `length` tokens, without the head's, which sees only
    the last token of each."""
    moe = config.moe
    assert moe is not None
    weights = 0.0
    for layer in shapes(config, False)["layers"]:
        weights += sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(layer["attention"]))
        matrices = sum(math.prod(layer["mlp"][name].shape) for name in ("gate_up", "down"))
        if "router" in layer["mlp"]:
            matrices *= (moe.top_k + moe.num_shared) / (moe.num_experts + moe.num_shared)
        weights += matrices
    scores = sum(_products_with_keys(config.layer(index).attention, length) for index in range(config.num_layers))
    return 2 * tokens * (weights + scores)
