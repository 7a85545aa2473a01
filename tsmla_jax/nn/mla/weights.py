"""The parameters of one MLA layer as a plain pytree: names and shapes, ours and Hugging Face's.

Each weight has an axis for heads of its own, so that tensor parallelism is a matter of one axis; kv_b_proj is kept as
the two parts that are used apart, W_UK and W_UV.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from tsmla_jax.nn.checkpoint import Checkpoint
from tsmla_jax.nn.mla.config import MLAConfig
from tsmla_jax.nn.weights import (
    LAYER_PREFIX,
    arrays_from_hf,
    hf_shapes,
    open_checkpoint,
    random_params,
    read_tensors,
    specs_over_heads,
)


def param_shapes(config: MLAConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter.

    q_proj [E, H, N + R], or q_a_proj [E, rank], q_a_layernorm [rank] and q_b_proj [rank, H, N + R];
    kv_a_proj_with_mqa [E, L + R] (latent first, rope last); kv_a_layernorm [L]; w_uk [H, N, L] and w_uv [H, V, L] (the
    two parts of Hugging Face's kv_b_proj); o_proj [H, V, E]; with attention_bias also q_a_proj_bias,
    kv_a_proj_with_mqa_bias and o_proj_bias.
    """
    heads, hidden, rank = config.num_attention_heads, config.hidden_size, config.q_lora_rank
    shapes: dict[str, tuple[int, ...]] = {}
    if rank is None:
        shapes["q_proj"] = (hidden, heads, config.qk_head_dim)
    else:
        shapes["q_a_proj"] = (hidden, rank)
        shapes["q_a_layernorm"] = (rank,)
        shapes["q_b_proj"] = (rank, heads, config.qk_head_dim)
    shapes["kv_a_proj_with_mqa"] = (hidden, config.cache_dim)
    shapes["kv_a_layernorm"] = (config.kv_lora_rank,)
    shapes["w_uk"] = (heads, config.qk_nope_head_dim, config.kv_lora_rank)
    shapes["w_uv"] = (heads, config.v_head_dim, config.kv_lora_rank)
    shapes["o_proj"] = (heads, config.v_head_dim, hidden)
    if config.attention_bias:
        if rank is not None:
            shapes["q_a_proj_bias"] = (rank,)
        shapes["kv_a_proj_with_mqa_bias"] = (config.cache_dim,)
        shapes["o_proj_bias"] = (hidden,)
    return shapes


def param_specs(config: MLAConfig, heads_axis: str | None) -> dict[str, PartitionSpec]:
    """How to split the parameters over the heads (tensor parallelism): `heads_axis` names the mesh axis.

    The projections to and from the latent have no heads and are replicated, as the latent cache is.
    """
    return specs_over_heads(param_shapes(config), heads_axis)


def init_params(key: jax.Array, config: MLAConfig, dtype: DTypeLike = jnp.float32) -> dict[str, jax.Array]:
    """Random parameters: normal with variance 1 / fan-in, norms 1, biases 0. For training from scratch and tests."""
    return random_params(key, param_shapes(config), dtype)


def hf_attention_shapes(config: MLAConfig) -> dict[str, tuple[int, ...]]:
    """Names below `self_attn.` and shapes ([out, in]) of one attention layer in a Hugging Face checkpoint."""
    return hf_shapes(_stored_shapes(config), hf_name)


def hf_name(name: str) -> str:
    """The tensor behind a parameter, below `self_attn.`."""
    return f"{name.removesuffix('_bias')}.bias" if name.endswith("_bias") else f"{name}.weight"


def _stored_shapes(config: MLAConfig) -> dict[str, tuple[int, ...]]:
    """The parameters as a checkpoint divides them: w_uk and w_uv are the rows of one tensor."""
    shapes = param_shapes(config)
    heads, nope, latent = shapes.pop("w_uk")
    _, value, _ = shapes.pop("w_uv")
    return {**shapes, "kv_b_proj": (heads, nope + value, latent)}


def params_from_hf(
    config: MLAConfig, tensors: Mapping[str, Any], dtype: DTypeLike | None = None
) -> dict[str, jax.Array]:
    """Parameters from the arrays of one attention layer.

    Args:
        config: the layer's shape.
        tensors: arrays by their name below `self_attn.`, shaped as `hf_attention_shapes` says.
        dtype: of the parameters; None keeps each array's own.

    Returns:
        the pytree described at `tsmla_jax.nn.param_shapes`.

    Raises:
        ValueError: a tensor is missing or has another shape; names it.
    """
    arrays = arrays_from_hf(_stored_shapes(config), hf_name, tensors)
    kv_b = arrays.pop("kv_b_proj")
    arrays["w_uk"], arrays["w_uv"] = np.split(kv_b, [config.qk_nope_head_dim], axis=1)
    return {name: jnp.asarray(array, dtype=dtype) for name, array in arrays.items()}


def load_hf_attention(
    checkpoint_dir: str | Path | Checkpoint,
    layer: int,
    *,
    config: MLAConfig | None = None,
    dtype: DTypeLike | None = None,
    prefix: str = LAYER_PREFIX,
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
        the pytree described at `tsmla_jax.nn.param_shapes`.

    Raises:
        ValueError: the config or a tensor is missing or misshapen, a file is truncated, or layer is negative; the text
            names the file and the tensor.
        ImportError: the package safetensors is not installed (`pip install 'tsmla-jax[hf]'`).
    """
    checkpoint = open_checkpoint(checkpoint_dir, layer)
    config = MLAConfig.from_hf(checkpoint.directory) if config is None else config
    shapes = hf_attention_shapes(config)
    return params_from_hf(config, read_tensors(checkpoint, prefix.format(layer=layer), shapes, dtype))
