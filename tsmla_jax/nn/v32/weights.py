"""The parameters of one DeepSeek-V3.2 layer: MLA's and those of its indexer, under our names and Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from tsmla_jax.nn.checkpoint import Checkpoint
from tsmla_jax.nn.mla import weights as mla
from tsmla_jax.nn.v32.config import V32Config
from tsmla_jax.nn.weights import (
    LAYER_PREFIX,
    arrays_from_hf,
    hf_shapes,
    open_checkpoint,
    read_tensors,
    specs_over_heads,
)


def param_shapes(config: V32Config) -> dict[str, tuple[int, ...]]:
    """Those of `tsmla_jax.nn.param_shapes`, and indexer_wq_b [rank, Hi, Di], indexer_wk [E, Di], indexer_k_norm [Di]
    and its bias indexer_k_norm_bias, indexer_weights_proj [E, Hi]."""
    return {**mla.param_shapes(config.mla), **_indexer_shapes(config)}


def _indexer_shapes(config: V32Config) -> dict[str, tuple[int, ...]]:
    heads, width, hidden = config.index_n_heads, config.index_head_dim, config.mla.hidden_size
    return {
        "indexer_wq_b": (cast(int, config.mla.q_lora_rank), heads, width),
        "indexer_wk": (hidden, width),
        "indexer_k_norm": (width,),
        "indexer_k_norm_bias": (width,),
        "indexer_weights_proj": (hidden, heads),
    }


def param_specs(config: V32Config, heads_axis: str | None) -> dict[str, PartitionSpec]:
    """Those of `tsmla_jax.nn.param_specs`; the indexer is replicated, as its cache is: every device must choose the
    same keys. Under `shard_map`, `attend` returns the partial sum over the local heads, for the caller to psum."""
    return specs_over_heads(param_shapes(config), heads_axis)


def hf_attention_shapes(config: V32Config) -> dict[str, tuple[int, ...]]:
    """Names below `self_attn.` and shapes ([out, in]) of one layer in a Hugging Face checkpoint."""
    return {**mla.hf_attention_shapes(config.mla), **hf_shapes(_indexer_shapes(config), _indexer_hf_name)}


def _indexer_hf_name(name: str) -> str:
    return f"indexer.{mla.hf_name(name.removeprefix('indexer_'))}"


def params_from_hf(
    config: V32Config, tensors: Mapping[str, Any], dtype: DTypeLike | None = None
) -> dict[str, jax.Array]:
    """Parameters from the arrays of one layer by their name below `self_attn.`.

    Raises ValueError for a tensor that is missing or has another shape than `hf_attention_shapes` says.
    """
    params = mla.params_from_hf(config.mla, tensors, dtype)
    indexer = arrays_from_hf(_indexer_shapes(config), _indexer_hf_name, tensors)
    return {**params, **{name: jnp.asarray(array, dtype=dtype) for name, array in indexer.items()}}


def load_hf_attention(
    checkpoint_dir: str | Path | Checkpoint,
    layer: int,
    *,
    config: V32Config | None = None,
    dtype: DTypeLike | None = None,
    prefix: str = LAYER_PREFIX,
) -> dict[str, jax.Array]:
    """The parameters of one V3.2 layer from safetensors; arguments and errors of `tsmla_jax.nn.load_hf_attention`."""
    checkpoint = open_checkpoint(checkpoint_dir, layer)
    config = V32Config.from_hf(checkpoint.directory) if config is None else config
    shapes = hf_attention_shapes(config)
    return params_from_hf(config, read_tensors(checkpoint, prefix.format(layer=layer), shapes, dtype))
