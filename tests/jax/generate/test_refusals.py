"""Fields, tensors and formats that would make another model of a checkpoint without a word: refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jax.generate.tiny import tiny_config, tiny_tensors, write_tiny
from tsmla_jax.generate import ModelConfig, load_model
from tsmla_jax.nn import CheckpointError

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("model", "name", "value"),
    [
        ("v3", "model_type", "glm4_moe_lite"),
        ("v3", "rope_scaling", {**YARN, "apply_yarn_scaling": False}),
        ("v3", "rope_scaling", {**YARN, "attn_factor": 0.87}),
        ("v3", "mla_scale_q_lora", True),
        ("v3", "mlp_bias", True),
        ("v3", "swiglu_limit", 10.0),
        ("v3", "hc_mult", 4),
        ("v3", "num_hash_layers", 3),
        ("v3", "num_experts", 16),
        ("v3", "residual_multiplier", 0.2),
        ("v3", "scale_emb", 12),
        ("v3", "final_logit_softcapping", 30.0),
        ("v3", "zero_expert_num", 4),
        ("v3", "router_bias", True),
        ("v3", "routed_expert_hidden_size", 8),
        ("v3", "hidden_activation", "gelu"),
        ("v3", "sandwich_norm", True),
        ("v3", "shared_expert_gate", True),
        ("v3.2", "index_topk_freq", 4),
        ("v3.2", "indexer_types", ["full", "shared"]),
        ("v3.2", "indexer_rope_interleave", True),
        ("v4", "index_topk_freq", 2),
        ("v4", "hc_pre_from_prev_sublayer", True),
        ("v4", "kv_source_layer_ids", [0]),
        ("v4", "engram_layer_ids", [1]),
        ("v4", "n_hash_layers", 2),
        ("v4", "mlp_bias", True),
    ],
)
def test_fields_of_another_model(model: str, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        ModelConfig.from_hf(tiny_config(model, **{name: value}))


@pytest.mark.parametrize("model", ["v2", "v3", "v3.2", "v4"])
def test_fields_that_say_nothing(model: str) -> None:
    nothing = {
        "mlp_bias": False,
        "num_experts": 8,
        "num_local_experts": 8,
        "residual_multiplier": 1.0,
        "zero_expert_num": 0,
        "hidden_activation": None,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.001,
        "num_nextn_predict_layers": 1,
        "dspark_n_routed_experts": 4,
        "embedding_initializer_range": 0.02,
        "pretraining_tp": 1,
        "attention_dropout": 0.1,
        "use_cache": True,
        "a_field_of_someone": {"run": 3},
    }
    assert ModelConfig.from_hf(tiny_config(model, **nothing)) == ModelConfig.from_hf(tiny_config(model))


def refused(directory: Path, text: str) -> None:
    with pytest.raises(CheckpointError) as error:
        load_model(directory, ModelConfig.from_hf(directory))
    assert text in str(error.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("v3", "model.layers.1.mlp.gate.weight"),
        ("v3.2", "model.layers.0.self_attn.indexer.wk.weight"),
        ("v3.2", "model.layers.1.self_attn.indexer.k_norm.bias"),
        ("v4", "layers.1.ffn.gate.bias"),
        ("v4", "layers.0.ffn.gate.weight"),
        ("v4", "layers.1.attn.indexer.weights_proj.weight"),
        ("v4", "layers.1.attn.indexer.compressor.ape"),
    ],
)
def test_values_that_only_choose_are_finite(model: str, name: str, value: float, tmp_path: Path) -> None:
    """No logit shows that others were chosen."""
    tensors = tiny_tensors(tiny_config(model))
    tensors[name].flat[1] = value
    refused(write_tiny(tmp_path, tensors, model), f"model.safetensors: tensor {name!r} has NaN or infinite values")


def test_a_table_of_experts_does_not_wrap_around(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config("v4"))
    name = "layers.0.ffn.gate.tid2eid"
    tensors[name] = tensors[name].astype(np.int64) + 2**32
    refused(write_tiny(tmp_path, tensors, "v4"), "gate.tid2eid' names experts 42949")
