"""Mistral Small 4's configs and checkpoints: the text model beside one of images, and what is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.jax.generate.tiny import tiny_config, tiny_tensors, write_tiny
from tsmla_jax.generate import ModelConfig, load_model
from tsmla_jax.nn import MLAConfig, QueryScale

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="needs safetensors: pip install 'tsmla-jax[hf]'")

ROPE = {
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 48,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
    "partial_rotary_factor": 1 / 3,
}


def fields(**changed: Any) -> dict[str, Any]:
    """A config.json with toy dimensions."""
    config = tiny_config(model_type="mistral4", rope_parameters=ROPE, n_group=1, topk_group=1)
    absent = ("topk_method", "scoring_func", "rope_theta", "rope_scaling")
    return {name: value for name, value in config.items() if name not in absent} | changed


def test_the_text_model_beside_one_of_images(tmp_path: Path) -> None:
    config = fields()
    tensors = {name: x for name, x in tiny_tensors(tiny_config()).items() if "correction_bias" not in name}
    write_tiny(tmp_path / "text", tensors)
    (tmp_path / "text" / "config.json").write_text(json.dumps(config))
    named = {f"language_model.{name}": value for name, value in tensors.items()}
    named["vision_tower.patch_conv.weight"] = np.zeros((2, 2), np.float32)
    safetensors_numpy.save_file(named, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": config}))

    read = ModelConfig.from_hf(tmp_path)
    assert read == ModelConfig.from_hf(config)
    assert isinstance(read.attention, MLAConfig) and read.attention.query_scale == QueryScale(0.1, 48)
    assert read.moe is not None and (read.moe.routing, read.moe.norm_topk_prob) == ("greedy", True)
    found, wanted = load_model(tmp_path, read), load_model(tmp_path / "text", read)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="n_group: got 2; legal: 1"):
        ModelConfig.from_hf(fields(n_group=2))
    with pytest.raises(ValueError, match="text_config: model_type: got 'mistral'; legal: 'mistral4'"):
        ModelConfig.from_hf({"model_type": "mistral3", "text_config": {**fields(), "model_type": "mistral"}})
