"""Attention weights under their Hugging Face names, turned into the parameters of `tsmla_jax.nn.functional`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tsmla_jax.nn.checkpoint import Checkpoint
from tsmla_jax.nn.config import MLAConfig


def hf_attention_shapes(config: MLAConfig) -> dict[str, tuple[int, ...]]:
    """Names below `self_attn.` and shapes ([out, in]) of one attention layer in a Hugging Face checkpoint."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if config.q_lora_rank is None:
        shapes["q_proj.weight"] = (heads * config.qk_head_dim, hidden)
    else:
        shapes["q_a_proj.weight"] = (config.q_lora_rank, hidden)
        shapes["q_a_layernorm.weight"] = (config.q_lora_rank,)
        shapes["q_b_proj.weight"] = (heads * config.qk_head_dim, config.q_lora_rank)
    shapes["kv_a_proj_with_mqa.weight"] = (config.cache_dim, hidden)
    shapes["kv_a_layernorm.weight"] = (config.kv_lora_rank,)
    shapes["kv_b_proj.weight"] = (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank)
    shapes["o_proj.weight"] = (hidden, heads * config.v_head_dim)
    if config.attention_bias:
        if config.q_lora_rank is not None:
            shapes["q_a_proj.bias"] = (config.q_lora_rank,)
        shapes["kv_a_proj_with_mqa.bias"] = (config.cache_dim,)
        shapes["o_proj.bias"] = (hidden,)
    return shapes


def params_from_hf(
    config: MLAConfig, tensors: Mapping[str, Any], dtype: DTypeLike | None = None
) -> dict[str, jax.Array]:
    """Parameters from the arrays of one attention layer.

    Args:
        config: the layer's shape.
        tensors: arrays by their name below `self_attn.`, shaped as `hf_attention_shapes` says.
        dtype: of the parameters; None keeps each array's own.

    Returns:
        the pytree described at `tsmla_jax.nn.params.param_shapes`.

    Raises:
        ValueError: a tensor is missing or has another shape; names it.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, shape in hf_attention_shapes(config).items():
        if name not in tensors:
            raise ValueError(f"tensor {name!r} is missing")
        array = np.asarray(tensors[name])
        if array.shape != shape:
            raise ValueError(f"tensor {name!r} must have shape {shape}, got {array.shape}")
        arrays[name] = array
    heads, nope, value = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    params: dict[str, np.ndarray[Any, Any]] = {}
    for name, array in arrays.items():
        key, kind = name.rsplit(".", 1)
        if kind == "bias":
            params[f"{key}_bias"] = array
        elif key in ("q_proj", "q_b_proj"):
            params[key] = array.T.reshape(-1, heads, config.qk_head_dim)
        elif key == "kv_b_proj":
            per_head = array.reshape(heads, nope + value, config.kv_lora_rank)
            params["w_uk"], params["w_uv"] = per_head[:, :nope], per_head[:, nope:]
        elif key == "o_proj":
            params[key] = array.T.reshape(heads, value, config.hidden_size)
        else:
            params[key] = array.T  # one axis: the same
    return {key: jnp.asarray(array, dtype=dtype) for key, array in params.items()}


def load_hf_attention(
    checkpoint_dir: str | Path | Checkpoint,
    layer: int,
    *,
    config: MLAConfig | None = None,
    dtype: DTypeLike | None = None,
    prefix: str = "model.layers.{layer}.self_attn.",
) -> dict[str, jax.Array]:
    """The parameters of one attention layer, from safetensors under the Hugging Face names.

    Args:
        checkpoint_dir: the checkpoint's folder, or a `Checkpoint` already open (its headers are then read once for all
            layers).
        layer: index of the layer.
        config: the layer's shape; None reads `config.json` of the folder.
        dtype: of the parameters; None keeps the stored dtype, bfloat16 for block-scaled fp8 weights.
        prefix: what comes before `q_proj.weight` and the others; `{layer}` stands for the index.

    Returns:
        the pytree described at `tsmla_jax.nn.params.param_shapes`.

    Raises:
        ValueError: the config or a tensor is missing or misshapen, a file is truncated, or layer is negative; the text
            names the file and the tensor.
        ImportError: the package safetensors is not installed (`pip install 'tsmla-jax[hf]'`).
    """
    if layer < 0:
        raise ValueError(f"{layer=} must be >= 0")
    checkpoint = checkpoint_dir if isinstance(checkpoint_dir, Checkpoint) else Checkpoint(checkpoint_dir)
    if config is None:
        config = MLAConfig.from_hf(checkpoint.directory)
    start = prefix.format(layer=layer)
    tensors = {
        name: checkpoint.read(start + name, shape=shape, dtype=dtype)
        for name, shape in hf_attention_shapes(config).items()
    }
    return params_from_hf(config, tensors)
