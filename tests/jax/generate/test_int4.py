"""Experts in int4 of compressed-tensors, and the text model beside one of images: Kimi-K2-Thinking and K2.5."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.jax.generate.tiny import tiny_config, tiny_tensors, write_tiny
from tsmla_jax.generate import ModelConfig, load_model, save_model
from tsmla_jax.nn import Checkpoint, CheckpointError
from tsmla_jax.nn.checkpoints.dequantise import dequantise_int4

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="needs safetensors: pip install 'tsmla-jax[hf]'")

# As Kimi-K2-Thinking's config.json has it.
WEIGHTS: dict[str, Any] = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4, "observer": "minmax",
    "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
}  # fmt: skip
SCHEME = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": WEIGHTS}
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {"group_0": SCHEME},
}
# Two rows that compressed-tensors 0.20 packs from values of -8 to 7.
PACKED = [1640443267, -380656373, 1640443267, -380656373]
VALUES = [-5, 0, 5, -6, -1, 4, -7, -2, 3, -8, -3, 2, 7, -4, 1, 6] * 2
SIZES = {"moe_intermediate_size": 40, "hidden_size": 64}  # rows of two whole groups, and of one and a part


def test_values_as_compressed_tensors_packs_them() -> None:
    packed, scales = np.asarray([PACKED], np.int32), np.asarray([[0.5]], np.float32)
    np.testing.assert_array_equal(dequantise_int4(packed, scales, 32), [[value * 0.5 for value in VALUES]])
    short = np.asarray([[1640443267, 42251]], np.int32)  # twelve values
    np.testing.assert_array_equal(dequantise_int4(short, scales, 12), [[value * 0.5 for value in VALUES[:12]]])
    with pytest.raises(
        ValueError, match=r"packed, scales: got shapes \(1, 4\) and \(1, 1\) with columns = 33; legal: \(1, 5\)"
    ):
        dequantise_int4(packed, scales, 33)


def packed(weight: np.ndarray[Any, Any]) -> tuple[dict[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """A weight in three tensors by the ends of their names, and the values that these have."""
    rows, columns = weight.shape
    groups = -(-columns // 32)
    whole = np.pad(weight, ((0, 0), (0, groups * 32 - columns))).reshape(rows, groups, 32)
    scales = np.abs(whole).max(-1).astype(np.float32) / 7
    codes = np.rint(whole / scales[..., None]).astype(np.int64)
    wide = (codes * scales[..., None]).astype(np.float32).reshape(rows, -1)[:, :columns]
    eights = (codes.reshape(rows, -1, 8) + 8) << (4 * np.arange(8))
    words = eights.sum(-1).astype(np.uint32).view(np.int32)[:, : -(-columns // 8)]
    shape = np.asarray([rows, columns], np.int64)
    return {"packed": np.ascontiguousarray(words), "scale": scales, "shape": shape}, wide


def write(directory: Path, *, text_model: bool = False, **changed: np.ndarray[Any, Any]) -> Path:
    """A checkpoint whose routed experts are int4, beside the same one widened, in the folder "wide"."""
    config = tiny_config(**SIZES)
    narrow, wide = {}, {}
    for name, weight in tiny_tensors(config).items():
        if ".experts." not in name:
            narrow[name] = wide[name] = weight
            continue
        parts, wide[name] = packed(weight)
        narrow |= {f"{name}_{part}": value for part, value in parts.items()}
    write_tiny(directory / "wide", wide, **SIZES)
    narrow |= changed
    config["quantization_config"] = INT4
    if text_model:
        narrow = {f"language_model.{name}": value for name, value in narrow.items()}
        narrow["vision_tower.patch_embed.proj.weight"] = np.zeros((2, 2), np.float32)
        config = {"model_type": "kimi_k25", "text_config": config, "vision_config": {}}
    safetensors_numpy.save_file(narrow, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("text_model", [False, True])
def test_a_model_of_int4_experts_is_the_widened_one(text_model: bool, tmp_path: Path) -> None:
    config = ModelConfig.from_hf(write(tmp_path, text_model=text_model))
    assert config == ModelConfig.from_hf(tmp_path / "wide")
    found, wanted = (load_model(path, config) for path in (tmp_path, tmp_path / "wide"))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match=r"base: tensor .*weight_packed' is of an int4 weight; legal: "):
        save_model(tmp_path / "saved", found, config, base=tmp_path)


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (["x"], r"config_groups: got \['x'\]; legal: an object, or null"),
        ({"g": "x"}, r"config_groups.g: got 'x'; legal: an object"),
        ({"g": {"weights": [1]}}, r"config_groups.g: weights: got \[1\]; legal: an object, or null"),
    ],
)
def test_malformed_groups_of_compressed_tensors_are_refused(groups: Any, text: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, quantization_config={**INT4, "config_groups": groups})
    with pytest.raises(CheckpointError, match=text):
        load_model(tmp_path, ModelConfig.from_hf(tmp_path))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"num_bits": 8},
            r"config_groups.group_0.weights: num_bits: got 8; legal: 4, None; of compressed-tensors' formats, only",
        ),
        ({"symmetric": False}, "symmetric: got False; legal: True"),
        ({"group_size": 128}, "group_size: got 128; legal: 32"),
        ({"strategy": "channel"}, "strategy: got 'channel'; legal: 'group'"),
        ({"type": "float"}, "type: got 'float'; legal: 'int'"),
        ({"actorder": "group"}, "actorder: got 'group'; legal: None"),
        ({"num_bits": None}, "weights: field 'num_bits' is missing"),
    ],
)
def test_other_weights_of_compressed_tensors_are_refused(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    scheme = {**SCHEME, "weights": {**WEIGHTS, **change}}
    write_tiny(tmp_path, quantization_config={**INT4, "config_groups": {"group_0": scheme}})
    with pytest.raises(CheckpointError, match=text):
        load_model(tmp_path, ModelConfig.from_hf(tmp_path))


@pytest.mark.parametrize(
    ("end", "value", "text"),
    [
        (
            "packed",
            np.zeros((40, 7), np.int32),
            r"weight_packed' must have shape \(40, 8\) and be int32, got \(40, 7\)",
        ),
        ("packed", np.zeros((40, 8), np.float32), "weight_packed' must have .* got .* and float32"),
        (
            "scale",
            np.ones((40, 1), np.float32),
            r"weight_scale' must have shape \(40, 2\) .*a scale for every 32 values",
        ),
        ("scale", np.full((40, 2), np.nan, np.float32), "weight_scale' has scales that are not finite"),
        ("shape", np.asarray([40, 60], np.int64), r"weight' must have shape \(40, 64\), got \(40, 60\)"),
        ("shape", np.asarray([40], np.int64), r"weight' must have shape \(40, 64\), got \(40,\)"),
        ("shape", np.asarray(40, np.int64), r"weight' must have shape \(40, 64\), got \(40,\)"),
        ("shape", np.asarray([40, 64], np.float32), r"weight' must have shape \(40, 64\), got \(40\.0, 64\.0\)"),
    ],
)
def test_parts_that_do_not_fit(end: str, value: np.ndarray[Any, Any], text: str, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.0.gate_proj.weight"
    write(tmp_path, **{f"{name}_{end}": value})
    with pytest.raises(CheckpointError, match=text):
        load_model(tmp_path, ModelConfig.from_hf(tmp_path))
    assert Checkpoint(tmp_path).is_int4(name) and not Checkpoint(tmp_path / "wide").is_int4(name)


def test_text_models_that_are_refused() -> None:
    config = tiny_config(**SIZES)
    with pytest.raises(ValueError, match="text_config: model_type: got 'deepseek_v2'"):
        ModelConfig.from_hf({"model_type": "kimi_k25", "text_config": {**config, "model_type": "deepseek_v2"}})
    with pytest.raises(ValueError, match="'text_config' is missing"):
        ModelConfig.from_hf({"model_type": "kimi_k25"})
