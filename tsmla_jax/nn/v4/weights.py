"""The parameters of one DeepSeek-V4 layer, under our names and Hugging Face's.

Axes: E hidden width, H heads, D head width, G output groups, Hi and Di heads and width of the indexer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from tsmla_jax.nn.checkpoint import Checkpoint
from tsmla_jax.nn.v4.config import V4Config
from tsmla_jax.nn.v4.names import stored_names
from tsmla_jax.nn.weights import (
    LAYER_PREFIX,
    arrays_from_hf,
    hf_shapes,
    open_checkpoint,
    read_tensors,
    specs_over_heads,
)

_HF_PREFIX = {"compressor": "compressor.", "indexer": "compressor.indexer."}


def param_shapes(config: V4Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter.

    q_a_proj [E, rank], q_a_norm [rank], q_b_proj [rank, H, D], kv_proj [E, D], kv_norm [D], sinks [H],
    o_a_proj [G, H D / G, o_rank], o_b_proj [G o_rank, E]. With a compressor, of row width W (D, or 2 D when windows
    overlap): compressor_kv_proj and compressor_gate_proj [E, W], compressor_position_bias [ratio, W] and
    compressor_kv_norm [D]. With an indexer the same four as indexer_*, D replaced by Di, and indexer_q_b_proj
    [rank, Hi, Di] and indexer_weights_proj [E, Hi].
    """
    heads, width, hidden, rank = config.num_attention_heads, config.head_dim, config.hidden_size, config.q_lora_rank
    groups = config.o_groups
    shapes: dict[str, tuple[int, ...]] = {
        "q_a_proj": (hidden, rank),
        "q_a_norm": (rank,),
        "q_b_proj": (rank, heads, width),
        "kv_proj": (hidden, width),
        "kv_norm": (width,),
        "sinks": (heads,),
        "o_a_proj": (groups, heads * width // groups, config.o_lora_rank),
        "o_b_proj": (groups * config.o_lora_rank, hidden),
    }
    for name, channels in config.compressors:
        columns = channels * (2 if config.overlap else 1)
        shapes[f"{name}_kv_proj"] = (hidden, columns)
        shapes[f"{name}_gate_proj"] = (hidden, columns)
        shapes[f"{name}_position_bias"] = (config.ratio, columns)
        shapes[f"{name}_kv_norm"] = (channels,)
    if config.kind == "csa":
        shapes["indexer_q_b_proj"] = (rank, config.index_n_heads, config.index_head_dim)
        shapes["indexer_weights_proj"] = (hidden, config.index_n_heads)
    return shapes


def param_specs(config: V4Config, heads_axis: str | None) -> dict[str, PartitionSpec]:
    """How to split the parameters over the heads: `heads_axis` names the mesh axis, whose size divides o_groups.

    Heads, sinks and output groups are split; the shared latent, the compressors and the indexer are replicated, as the
    caches are. Under `shard_map`, `attend` returns the partial sum over the local heads, for the caller to psum.
    """
    return specs_over_heads(param_shapes(config), heads_axis)


def hf_attention_shapes(config: V4Config) -> dict[str, tuple[int, ...]]:
    """Names below `self_attn.` and shapes ([out, in]) of one layer in a Hugging Face checkpoint."""
    return hf_shapes(param_shapes(config), _hf_name)


def _hf_name(name: str) -> str:
    owner, _, rest = name.partition("_")
    if owner not in _HF_PREFIX:
        return name if name == "sinks" else f"{name}.weight"
    if rest == "position_bias":
        return f"{_HF_PREFIX[owner]}{rest}"
    return f"{_HF_PREFIX[owner]}{'scorer.' if rest == 'weights_proj' else ''}{rest}.weight"


def params_from_hf(
    config: V4Config, tensors: Mapping[str, Any], dtype: DTypeLike | None = None
) -> dict[str, jax.Array]:
    """Parameters from the arrays of one layer by their name below `self_attn.`.

    Raises ValueError for a tensor that is missing or has another shape than `hf_attention_shapes` says.
    """
    arrays = arrays_from_hf(param_shapes(config), _hf_name, tensors)
    return {name: jnp.asarray(array, dtype=dtype) for name, array in arrays.items()}


def load_hf_attention(
    checkpoint_dir: str | Path | Checkpoint,
    layer: int,
    *,
    config: V4Config | None = None,
    dtype: DTypeLike | None = None,
    prefix: str = LAYER_PREFIX,
) -> dict[str, jax.Array]:
    """The parameters of one V4 layer from safetensors; arguments and errors of `tsmla_jax.nn.load_hf_attention`.

    Names may be spelled in any of the ways of `tsmla_jax.nn.v4.names`.
    """
    checkpoint = open_checkpoint(checkpoint_dir, layer)
    config = V4Config.from_hf(checkpoint.directory, layer) if config is None else config
    shapes, stored = hf_attention_shapes(config), stored_names(checkpoint)
    return params_from_hf(config, read_tensors(checkpoint, prefix.format(layer=layer), shapes, dtype, stored))
