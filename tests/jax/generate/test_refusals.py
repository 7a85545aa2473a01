"""Fields that would make another model of a checkpoint without a word: refused by name."""

from typing import Any

import pytest

from tests.jax.generate.tiny import tiny_config
from tsmla_jax.generate import ModelConfig

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
