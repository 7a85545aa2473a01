"""Configs and checkpoints of Mistral Small 4 and Large 3: a text model beside one of images, Mistral's own format, and
what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.jax.generate.tiny import tiny_config, tiny_tensors, write_tiny
from tsmla_jax.generate import ModelConfig, load_model
from tsmla_jax.nn import MLAConfig, QueryScale, load_hf_attention

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


PARAMS: dict[str, Any] = {
    "dim": 32,
    "n_layers": 2,
    "head_dim": 24,
    "hidden_dim": 48,
    "n_heads": 2,
    "n_kv_heads": 2,
    "rope_theta": 10000.0,
    "norm_eps": 1e-6,
    "vocab_size": 101,
    "tied_embeddings": False,
    "max_position_embeddings": 4096,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "kv_lora_rank": 32,
    "v_head_dim": 16,
    "yarn": {"original_max_position_embeddings": 48, "factor": 8, "apply_scale": False, "beta": 32, "alpha": 1},
    "llama_4_scaling": {"original_max_position_embeddings": 48, "beta": 0.1},
    "moe": {
        "expert_parallel": 1,
        "expert_model_parallel": 1,
        "route_every_n": 1,
        "first_k_dense_replace": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_expert_groups": 1,
        "num_expert_groups_per_tok": 1,
        "routed_scale": 1.5,
        "expert_hidden_dim": 16,
        "num_shared_experts": 1,
    },
    "vision_encoder": {"hidden_size": 8},
}
"""Mistral Large 3's params.json, with toy dimensions."""
NAMES = {
    "model.embed_tokens.": "tok_embeddings.",
    "model.norm.": "norm.",
    "lm_head.": "output.",
    "model.layers.": "layers.",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate.": "gate.",
    "mlp.shared_experts.": "shared_experts.",
    "mlp.experts.": "experts.",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
"""Parts of names, and what Mistral's own checkpoints have in their place, as vLLM and SGLang rename them."""


def own_name(name: str) -> str:
    for part, own in NAMES.items():
        name = name.replace(part, own)
    return name


def test_mistral_large_3_in_its_own_format(tmp_path: Path) -> None:
    """params.json beside two shards under Mistral's names: the same model as one in transformers' format."""
    config = fields(first_k_dense_replace=1, routed_scaling_factor=1.5, norm_topk_prob=True, eos_token_id=2)
    tensors = {name: x for name, x in tiny_tensors(tiny_config()).items() if "correction_bias" not in name}
    (tmp_path / "theirs").mkdir()
    safetensors_numpy.save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    own = {own_name(name): value for name, value in tensors.items()}
    own["vision_encoder.patch_conv.weight"] = np.zeros((2, 2), np.float32)
    shards = {name: f"consolidated-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(sorted(own))}
    for shard in set(shards.values()):
        safetensors_numpy.save_file({name: own[name] for name in own if shards[name] == shard}, tmp_path / shard)
    (tmp_path / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))

    read = ModelConfig.from_hf(tmp_path)
    assert replace(read, dtype="float32") == ModelConfig.from_hf(config)
    found, wanted = (load_model(path, read, dtype="float32") for path in (tmp_path, tmp_path / "theirs"))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)
    layer = load_hf_attention(tmp_path, 1)
    np.testing.assert_array_equal(layer["q_a_proj"], wanted["layers"][1]["attention"]["q_a_proj"])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, r"params.json: quantization: got .*; legal: None"),
        ({"moe": None}, "must have 'kv_lora_rank' and 'moe'"),
        ({"moe": [1]}, r"moe: got \[1\]; legal: an object"),
        ({"kv_lora_rank": None}, "must have 'kv_lora_rank' and 'moe'"),
        ({"moe": {**PARAMS["moe"], "num_expert_groups": 4}}, "n_group: got 4; legal: 1"),
        ({"moe": {**PARAMS["moe"], "use_load_balancing_bias": True}}, "moe: use_load_balancing_bias: got True"),
        ({"yarn": {**PARAMS["yarn"], "apply_scale": True}}, "yarn: apply_scale: got True; legal: False"),
        (
            {"llama_4_scaling": {"original_max_position_embeddings": 96, "beta": 0.1}},
            "yarn: original_max_position_embeddings: got 48; legal: 96",
        ),
        ({"sliding_window": 4096}, "sliding_window: got 4096"),
    ],
)
def test_params_that_are_refused(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | change))
    with pytest.raises(ValueError, match=text):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize("keep", [False, True])
def test_fp8_with_a_scale_for_each_matrix(keep: bool, tmp_path: Path) -> None:
    """As Mistral Small 4 is published: experts in stacks, fixed scales of activations, which are left out."""
    config = fields(hidden_size=160)  # wider than a block
    quantised = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    rng = np.random.default_rng(0)

    def narrow(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Values, a scale for each matrix, and what they stand for."""
        shape = (len(weight), 1, 1) if weight.ndim == 3 else ()
        scale = rng.uniform(0.5, 2, shape).astype(np.float32)
        values = weight.astype(ml_dtypes.float8_e4m3fn)
        return values, scale, values.astype(np.float32) * scale

    tensors = {name: x for name, x in tiny_tensors(tiny_config(hidden_size=160)).items() if "bias" not in name}
    stacks: dict[str, np.ndarray] = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: [tensors.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(8)]
            for part in ("gate", "up", "down")
            if f"{prefix}.0.{part}_proj.weight" in tensors
        }
        if parts:
            gate_up = [np.concatenate(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
            stacks |= {f"{prefix}.gate_up_proj": np.stack(gate_up), f"{prefix}.down_proj": np.stack(parts["down"])}
    stored, wide = {}, {}
    for name, weight in (tensors | stacks).items():
        if "_proj" not in name:
            stored[name] = wide[name] = weight
            continue
        stored[name], stored[f"{name}_scale_inv"], wide[name] = narrow(weight)
        stored[f"{name.removesuffix('.weight')}{'_' if name in stacks else '.'}activation_scale"] = np.ones(
            (), np.float32
        )
    for folder, held, more in (("fp8", stored, {"quantization_config": quantised}), ("wide", wide, {})):
        (tmp_path / folder).mkdir()
        safetensors_numpy.save_file(held, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps(config | more))
    read = ModelConfig.from_hf(tmp_path / "fp8")
    found = load_model(tmp_path / "fp8", read, keep_fp8=keep)
    wanted = load_model(tmp_path / "wide", read)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)
    layer_found = load_hf_attention(tmp_path / "fp8", 1, dtype="float32")
    np.testing.assert_array_equal(layer_found["w_uk"], wanted["layers"][1]["attention"]["w_uk"])
