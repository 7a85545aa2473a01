"""Checkpoints of random weights from a seed, in the format of Hugging Face and of DeepSeek's own fp8 weights: this
project and other engines then compute with the same numbers.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsmla_jax.generate import ModelConfig
from tsmla_jax.nn import hf_attention_shapes
from tsmla_jax.nn.checkpoints.checkpoint_writer import save_checkpoint
from tsmla_jax.nn.products.block_scaled import BLOCK

SEED = 0
GREATEST_E4M3 = 400.0  # of the values before their scales

Shape = tuple[int, ...]


def tensor_shapes(fields: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of all tensors of a V2 or V3 checkpoint, layer by layer."""
    config = ModelConfig.from_hf(fields)
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None

    def mlp(prefix: str, width: int) -> Iterator[tuple[str, Shape]]:
        yield f"{prefix}.gate_proj.weight", (width, hidden)
        yield f"{prefix}.up_proj.weight", (width, hidden)
        yield f"{prefix}.down_proj.weight", (hidden, width)

    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        for name, shape in hf_attention_shapes(config.attention).items():
            yield f"{prefix}.self_attn.{name}", shape
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if not config.is_moe_layer(index):
            yield from mlp(f"{prefix}.mlp", config.intermediate_size)
            continue
        yield f"{prefix}.mlp.gate.weight", (moe.num_experts, hidden)
        if moe.routing == "noaux_tc":
            yield f"{prefix}.mlp.gate.e_score_correction_bias", (moe.num_experts,)
        for expert in range(moe.num_experts):
            yield from mlp(f"{prefix}.mlp.experts.{expert}", moe.intermediate_size)
        yield from mlp(f"{prefix}.mlp.shared_experts", moe.num_shared * moe.intermediate_size)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config.vocab_size, hidden)


def write_checkpoint(directory: Path, fields: dict[str, Any]) -> None:
    """Writes config.json and shards of random tensors, drawn from SEED on jax's device; every device draws the same.

    Matrices have the variance of 1 / (their inputs), norms are 1 and biases 0. With a quantization_config projections
    are e4m3, with scales for blocks of 128 x 128 that give them the same variance.
    """
    narrow = "quantization_config" in fields

    def drawn() -> Iterator[tuple[str, Any]]:
        for index, (name, shape) in enumerate(tensor_shapes(fields)):
            yield from _draw(index, name, shape, narrow).items()

    print(f"{directory}: writing random weights", flush=True)
    save_checkpoint(directory, drawn())
    # Last: a directory that has a config.json is complete.
    (directory / "config.json").write_text(json.dumps(fields, indent=1))


def _is_projection(name: str) -> bool:
    """Whether checkpoints of fp8 weights hold a matrix in e4m3: not the embedding, the head and the routers."""
    return name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight"))


def _draw(index: int, name: str, shape: Shape, narrow: bool) -> dict[str, Any]:
    """A tensor and, if it is in e4m3, its scales, by their names."""
    if len(shape) == 1:
        is_bias = name.endswith("_bias")
        return {name: np.full(shape, 0 if is_bias else 1, np.float32 if is_bias else jnp.bfloat16)}
    greatest = math.sqrt(3 / shape[-1])
    key = jax.random.fold_in(jax.random.key(SEED), index)
    if not (narrow and _is_projection(name)):
        return {name: np.asarray(_uniform(key, shape, greatest, jnp.bfloat16))}
    blocks = tuple(-(-size // BLOCK) for size in shape)
    return {
        name: np.asarray(_uniform(key, shape, GREATEST_E4M3, jnp.float8_e4m3fn)),
        f"{name}_scale_inv": np.full(blocks, greatest / GREATEST_E4M3, np.float32),
    }


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _uniform(key: jax.Array, shape: Shape, greatest: float, dtype: Any) -> jax.Array:
    """Uniform values between -greatest and greatest."""
    return (jax.random.uniform(key, shape, jnp.float32, -1, 1) * greatest).astype(dtype)
