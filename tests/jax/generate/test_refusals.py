"""Fields, tensors and formats that would make another model of a checkpoint without a word: refused by name."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.jax.generate.tiny import tiny_config, tiny_tensors, write_tiny
from tsmla_jax.generate import ModelConfig, load_model
from tsmla_jax.nn import Checkpoint, CheckpointError

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="needs safetensors: pip install 'tsmla-jax[hf]'")

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("model", "name", "value"),
    [
        ("v3", "model_type", "kimi_linear"),
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


def write_integers(directory: Path, tensors: dict[str, Any]) -> Path:
    """A tiny checkpoint with tensors of types that the examples don't write."""
    write_tiny(directory, {})
    safetensors_numpy.save_file(tensors, directory / "model.safetensors")
    return directory


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


@pytest.mark.parametrize(
    ("group", "text"),
    [
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "got 'compressed-tensors' with format 'nvfp4",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method: got 'modelopt' with quant_algo 'NVFP4'"),
        (
            {"quant_method": "awq", "bits": 4},
            "quant_method: got 'awq' with bits 4; legal: 'fp8' with scales for blocks",
        ),
        ({"quant_method": "gptq"}, "quant_method: got 'gptq'"),
        ({"quant_method": "mxfp4"}, "quant_method: got 'mxfp4'"),
        ({"quant_method": "bitsandbytes"}, "quant_method: got 'bitsandbytes'"),
        ({"load_in_4bit": True}, "quant_method: got None with load_in_4bit True"),
        ({"quant_method": 8}, "quant_method: got 8"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme: got 'static'; legal: 'dynamic'"),
        ("int8", "quantization_config: got 'int8'; legal: an object or null"),
    ],
)
def test_formats_that_are_not_read(group: Any, text: str, tmp_path: Path) -> None:
    """Before a tensor is read: there is none."""
    write_tiny(tmp_path, {"x": np.zeros(1, np.float32)}, quantization_config=group)
    refused(tmp_path, text)


def test_formats_named_elsewhere(tmp_path: Path) -> None:
    none = {"x": np.zeros(1, np.float32)}
    refused(
        write_tiny(tmp_path / "mlx", none, quantization={"group_size": 64, "bits": 4}), "quantization: quant_method"
    )
    refused(write_tiny(tmp_path / "old", none, compression_config={"format": "dense"}), "compression_config: quant_")
    (write_tiny(tmp_path / "beside", none) / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}})
    )
    refused(tmp_path / "beside", "hf_quant_config.json: quantization: quant_method: got None with quant_algo 'NVFP4'")


def test_formats_that_are_read(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    for index, group in enumerate(
        (fp8, {**fp8, "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}, {}, None)
    ):
        directory = write_tiny(tmp_path / str(index), quantization_config=group)
        assert len(load_model(directory, ModelConfig.from_hf(directory))["layers"]) == 2


EXPERT = "model.layers.1.mlp.experts.3.down_proj"


@pytest.mark.parametrize(
    ("tensors", "name"),
    [
        ({"weight_packed": np.zeros((4, 2), np.int32), "weight_scale": np.ones((4, 1), np.float32)}, "weight_packed"),
        ({"weight": np.zeros((4, 8), np.uint8), "weight_scale_2": np.ones((), np.float32)}, "weight_scale_2"),
        ({"qweight": np.zeros((4, 2), np.int32), "qzeros": np.zeros((1, 2), np.int32)}, "qweight"),
        ({"weight": np.zeros((9, 1), np.uint8), "weight.absmax": np.ones(4, np.float32)}, "weight.absmax"),
        (
            {"weight": np.zeros((4, 8), ml_dtypes.float8_e4m3fn), "weight_scale": np.ones((), np.float32)},
            "weight_scale",
        ),
    ],
)
def test_tensors_show_a_format_that_config_json_does_not_name(
    tensors: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any tensor is read."""
    whole = tiny_tensors(tiny_config())
    del whole[f"{EXPERT}.weight"]
    write_integers(tmp_path, {**whole, **{f"{EXPERT}.{end}": value for end, value in tensors.items()}})
    monkeypatch.setattr(Checkpoint, "_raw", lambda *_: pytest.fail("a tensor was read"))
    refused(
        tmp_path, f"tensor '{EXPERT}.{name}' is of quantised weights in a format that isn't read; legal: 'fp8' with"
    )


def test_integers_with_scales_for_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny_tensors(tiny_config())
    name = f"{EXPERT}.weight"
    whole |= {name: np.zeros((32, 16), np.int8), f"{name}_scale_inv": np.ones((1, 1), np.float32)}
    monkeypatch.setattr(Checkpoint, "_raw", lambda *_: pytest.fail("a tensor was read"))
    directory = write_integers(tmp_path, whole)
    refused(directory, f"{name!r} is int8, with scales '{name}_scale_inv' of shape (1, 1), and can't be read as")
