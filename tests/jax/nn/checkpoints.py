"""Checkpoints of one attention layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tsmla_jax.nn import (
    MLAConfig,
    hf_attention_shapes,
)
from tsmla_jax.nn.checkpoints.checkpoint import INDEX_NAME, SINGLE_NAME

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="needs safetensors: pip install 'tsmla-jax[hf]'")

Tensors = dict[str, np.ndarray[Any, Any]]

FIELDS: dict[str, Any] = {
    "hidden_size": 200,
    "num_attention_heads": 3,
    "q_lora_rank": 40,
    "kv_lora_rank": 136,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "rope_theta": 10000.0,
    "attention_bias": False,
}


def write_single(folder: Path, tensors: Tensors, fields: dict[str, Any] = FIELDS) -> None:
    (folder / "config.json").write_text(json.dumps(fields))
    safetensors_numpy.save_file(tensors, folder / SINGLE_NAME)


def write_sharded(folder: Path, tensors: Tensors, fields: dict[str, Any] = FIELDS, shards: int = 3) -> None:
    (folder / "config.json").write_text(json.dumps(fields))
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        safetensors_numpy.save_file(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def attention_tensors(fields: dict[str, Any] = FIELDS, layer: int = 2, dtype: Any = np.float32) -> Tensors:
    rng = np.random.default_rng(3)
    shapes = hf_attention_shapes(MLAConfig.from_hf(fields))
    return {
        f"model.layers.{layer}.self_attn.{name}": rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()
    }
