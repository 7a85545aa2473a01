"""The checkpoint reader and the attention loader: formats, fp8 blocks, and every way a checkpoint can be broken."""

import builtins
import errno
import json
import os
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from examples.make_checkpoint import quantize_blocks
from tests.jax.nn.checkpoints import FIELDS, Tensors, attention_tensors, write_sharded, write_single
from tsmla_jax.nn import (
    Checkpoint,
    CheckpointError,
    MLAConfig,
    load_hf_attention,
    param_shapes,
    v32,
)
from tsmla_jax.nn.checkpoints.checkpoint import INDEX_NAME, SINGLE_NAME
from tsmla_jax.nn.checkpoints.dequantise import dequantise_blocks

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="needs safetensors: pip install 'tsmla-jax[hf]'")


def assert_matches(params: dict[str, Any], tensors: Tensors, fields: dict[str, Any] = FIELDS, layer: int = 2) -> None:
    """Each parameter, elementwise, is the checkpoint's [out, in] weight at the place its axes say."""
    config = MLAConfig.from_hf(fields)
    assert {name: array.shape for name, array in params.items()} == param_shapes(config)
    start = f"model.layers.{layer}.self_attn."
    heads, nope, value = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    for head in range(heads):
        rows = slice(head * config.qk_head_dim, (head + 1) * config.qk_head_dim)
        q_name = "q_proj" if config.q_lora_rank is None else "q_b_proj"
        np.testing.assert_array_equal(params[q_name][:, head].T, tensors[f"{start}{q_name}.weight"][rows])
        kv_b = tensors[f"{start}kv_b_proj.weight"][head * (nope + value) : (head + 1) * (nope + value)]
        np.testing.assert_array_equal(params["w_uk"][head], kv_b[:nope])
        np.testing.assert_array_equal(params["w_uv"][head], kv_b[nope:])
        columns = slice(head * value, (head + 1) * value)
        np.testing.assert_array_equal(params["o_proj"][head].T, tensors[f"{start}o_proj.weight"][:, columns])
    np.testing.assert_array_equal(
        np.asarray(params["kv_a_proj_with_mqa"]).T, tensors[f"{start}kv_a_proj_with_mqa.weight"]
    )
    np.testing.assert_array_equal(params["kv_a_layernorm"], tensors[f"{start}kv_a_layernorm.weight"])
    if config.q_lora_rank is not None:
        np.testing.assert_array_equal(np.asarray(params["q_a_proj"]).T, tensors[f"{start}q_a_proj.weight"])
        np.testing.assert_array_equal(params["q_a_layernorm"], tensors[f"{start}q_a_layernorm.weight"])


@pytest.mark.parametrize("write", [write_single, write_sharded])
@pytest.mark.parametrize("q_lora_rank", [40, None])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_loads_every_weight(tmp_path: Path, write: Any, q_lora_rank: int | None, dtype: Any) -> None:
    fields = {**FIELDS, "q_lora_rank": q_lora_rank}
    tensors = attention_tensors(fields, dtype=dtype)
    write(tmp_path, tensors, fields)
    params = load_hf_attention(tmp_path, 2)
    assert all(array.dtype == dtype for array in params.values())
    assert_matches(params, tensors, fields)


def test_loads_biases_and_converts(tmp_path: Path) -> None:
    fields = {**FIELDS, "attention_bias": True}
    tensors = attention_tensors(fields)
    write_single(tmp_path, tensors, fields)
    params = load_hf_attention(tmp_path, 2, dtype=jnp.bfloat16)
    for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
        expected = tensors[f"model.layers.2.self_attn.{name}.bias"].astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(params[f"{name}_bias"], expected)


def test_other_prefix_and_an_open_checkpoint(tmp_path: Path) -> None:
    tensors = attention_tensors()
    plain = {name.removeprefix("model."): array for name, array in tensors.items()}
    write_sharded(tmp_path, plain)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names() == tuple(sorted(plain))
    assert "layers.2.self_attn.o_proj.weight" in checkpoint and "o_proj" not in checkpoint
    info = checkpoint.info("layers.2.self_attn.o_proj.weight")
    assert info.shape == (200, 60) and info.dtype == np.float32
    params = load_hf_attention(checkpoint, 2, prefix="layers.{layer}.self_attn.")
    assert_matches(params, tensors)


def test_lone_file_of_another_name(tmp_path: Path) -> None:
    safetensors_numpy.save_file({"a": np.arange(6, dtype=np.int32)}, tmp_path / "weights.safetensors")
    np.testing.assert_array_equal(Checkpoint(tmp_path).read("a"), np.arange(6))


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_fp8_round_trip(tmp_path: Path, write: Any) -> None:
    """Blocks with ragged edges in both axes: exactly the defined product, and within fp8's rounding of the weight."""
    tensors = attention_tensors()
    stored: Tensors = {}
    expected: Tensors = {}
    for name, weight in tensors.items():
        if weight.ndim == 1:
            stored[name] = expected[name] = weight.astype(ml_dtypes.bfloat16)
            continue
        quantised, scales = quantize_blocks(weight)
        stored[name], stored[f"{name}_scale_inv"] = quantised, scales
        spread = np.kron(scales, np.ones((128, 128), np.float32))[: weight.shape[0], : weight.shape[1]]
        expected[name] = quantised.astype(np.float32) * spread
    ragged = stored["model.layers.2.self_attn.q_a_proj.weight_scale_inv"]
    assert ragged.shape == (1, 2)  # 40 x 200: neither axis a multiple of 128
    write(tmp_path, stored)
    exact = load_hf_attention(tmp_path, 2, dtype=jnp.float32)
    assert_matches(exact, expected)
    for name, weight in tensors.items():
        # e4m3 has 3 mantissa bits: half a step is 2^-4 of the value, and 2^-10 of the largest scale for tiny ones.
        error = np.abs(expected[name] - weight)
        assert (error <= 2**-4 * np.abs(weight) + 2**-10 * np.abs(weight).max() / 448 + 1e-6).all()
    default = load_hf_attention(tmp_path, 2)
    assert default["o_proj"].dtype == jnp.bfloat16
    assert_matches(default, {name: array.astype(ml_dtypes.bfloat16) for name, array in expected.items()})


def test_block_size_of_the_config(tmp_path: Path) -> None:
    quantised = np.ones((4, 6), ml_dtypes.float8_e4m3fn)
    scales = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    fields = {**FIELDS, "quantization_config": {"weight_block_size": [2, 2]}}
    write_single(tmp_path, {"a": quantised, "a_scale_inv": scales}, fields)
    np.testing.assert_array_equal(Checkpoint(tmp_path).read("a", dtype=np.float32), np.kron(scales, np.ones((2, 2))))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": [128]}}))
    with pytest.raises(CheckpointError, match=r"config\.json: field 'weight_block_size' must be two positive integers"):
        Checkpoint(tmp_path)
    with pytest.raises(
        ValueError, match=r"scales: got shape \(2, 3\); legal: \(1, 1\), for a weight of shape \(4, 6\)"
    ):
        dequantise_blocks(quantised, scales)


def test_every_fp8_code() -> None:
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(2, 128)
    got = dequantise_blocks(codes, np.full((1, 1), 0.5, np.float32))
    np.testing.assert_array_equal(got, codes.astype(np.float32) * 0.5)


@pytest.mark.parametrize("name", ["q_a_proj.weight", "kv_a_layernorm.weight", "kv_b_proj.weight", "o_proj.weight"])
def test_missing_tensor(tmp_path: Path, name: str) -> None:
    tensors = attention_tensors()
    del tensors[f"model.layers.2.self_attn.{name}"]
    write_single(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=f"tensor 'model.layers.2.self_attn.{name}' is missing"):
        load_hf_attention(tmp_path, 2)


def test_missing_layer_and_negative_layer(tmp_path: Path) -> None:
    write_single(tmp_path, attention_tensors())
    with pytest.raises(CheckpointError, match=r"tensor 'model\.layers\.7\.self_attn\.q_a_proj\.weight' is missing"):
        load_hf_attention(tmp_path, 7)
    with pytest.raises(TypeError, match="layer: got str; legal: a static int >= 0"):
        load_hf_attention(tmp_path, "2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layer: got -1; legal: an int >= 0"):
        load_hf_attention(tmp_path, -1)


def test_misshapen_tensor(tmp_path: Path) -> None:
    tensors = attention_tensors()
    name = "model.layers.2.self_attn.kv_b_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    write_single(tmp_path, tensors)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: tensor '.*kv_b_proj\.weight' must have shape \(132"
    ):
        load_hf_attention(tmp_path, 2)


def test_fp8_without_scales_or_with_wrong_ones(tmp_path: Path) -> None:
    weight, scales = quantize_blocks(np.random.default_rng(0).normal(size=(130, 10)))
    write_single(tmp_path, {"w": weight})
    with pytest.raises(CheckpointError, match=r"'w' is float8_e4m3fn but its block scales 'w_scale_inv' are missing"):
        Checkpoint(tmp_path).read("w")
    write_single(tmp_path, {"w": weight, "w_scale_inv": scales.reshape(1, 2)})
    with pytest.raises(CheckpointError, match=r"'w_scale_inv' must have shape \(2, 1\).*got \(1, 2\)"):
        Checkpoint(tmp_path).read("w")
    write_single(tmp_path, {"w": weight.reshape(-1), "w_scale_inv": scales})
    with pytest.raises(CheckpointError, match=r"fp8 tensor 'w' has shape \(1300,\) .*; legal: 2 axes, or 3"):
        Checkpoint(tmp_path).read("w")
    for wrong in (scales.astype(np.int32), scales > 0):
        write_single(tmp_path, {"w": weight, "w_scale_inv": wrong})
        with pytest.raises(CheckpointError, match=f"'w_scale_inv' is {wrong.dtype.name}; legal for block scales: "):
            Checkpoint(tmp_path).read("w")
    for value in (-1, np.nan, np.inf):
        write_single(tmp_path, {"w": weight, "w_scale_inv": np.full_like(scales, value)})
        with pytest.raises(CheckpointError, match="'w_scale_inv' has scales that are negative or not finite"):
            Checkpoint(tmp_path).read("w")


def test_scales_of_a_wide_tensor_are_not_passed_over(tmp_path: Path) -> None:
    write_single(tmp_path, {"w": np.ones((4, 4), np.float32), "w_scale_inv": np.full((1, 1), 2, np.float32)})
    with pytest.raises(CheckpointError, match="'w' is float32 and has block scales 'w_scale_inv'; legal: "):
        Checkpoint(tmp_path).read("w")


def test_float16_holds_all_values_or_none_is_read(tmp_path: Path) -> None:
    weight, scales = quantize_blocks(np.full((2, 2), 1e5))
    tensors = {"large": np.full((2, 2), 1e5, np.float32), "w": weight, "w_scale_inv": scales}
    write_single(tmp_path, tensors | {"infinite": np.full((2, 2), np.inf, np.float32)})
    checkpoint = Checkpoint(tmp_path)
    for name in ("large", "w"):
        with pytest.raises(CheckpointError, match=f"'{name}' has values past the greatest float16, 65504"):
            checkpoint.read(name, dtype=np.float16)
    assert np.isinf(checkpoint.read("infinite", dtype=np.float16)).all()


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_integers_are_no_weights(tmp_path: Path, dtype: Any) -> None:
    """Of a checkpoint in int8 with a scale a row, whose numbers alone are none of the model's."""
    tensors = attention_tensors()
    name = "model.layers.2.self_attn.o_proj.weight"
    tensors[name] = tensors[name].astype(np.int8)
    write_single(tmp_path, tensors | {f"{name}_scale": np.ones((200, 1), np.float32)})
    with pytest.raises(CheckpointError, match=f"{SINGLE_NAME}: tensor '{name}' is int8 and can't be read as "):
        load_hf_attention(tmp_path, 2, dtype=dtype)
    with pytest.raises(CheckpointError, match="is float32 and can't be read as int32"):
        Checkpoint(tmp_path).read(f"{name}_scale", dtype=np.int32)


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    write_single(tmp_path, attention_tensors())
    file = tmp_path / SINGLE_NAME
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated, or not a safetensors file"):
        load_hf_attention(tmp_path, 2)


def test_truncated_shard_names_the_shard(tmp_path: Path) -> None:
    write_sharded(tmp_path, attention_tensors())
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: truncated"):
        load_hf_attention(tmp_path, 2)


def test_missing_index_shard_or_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such checkpoint directory"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds neither"):
        Checkpoint(tmp_path)
    write_sharded(tmp_path, attention_tensors())
    index = (tmp_path / INDEX_NAME).read_text()
    (tmp_path / INDEX_NAME).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: the index is missing"):
        Checkpoint(tmp_path)
    (tmp_path / INDEX_NAME).write_text(index)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors: the shard is missing"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a readable JSON index"),
        ("[]", "must hold an object 'weight_map'"),
        ('{"weight_map": {"a": 3}}', "must hold an object 'weight_map'"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "must be a plain file name"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "not a readable JSON index: 'a' has two values, 'x' and 'y'"),
    ],
)
def test_bad_index(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


def test_index_that_misplaces_a_tensor(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"a": np.ones(3), "b": np.ones(3)}, shards=2)
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": shards[1], "b": shards[1]}}))
    with pytest.raises(CheckpointError, match="tensor 'a' is missing, though"):
        Checkpoint(tmp_path).read("a")


def test_unknown_tensor_type(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / SINGLE_NAME).write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*F4"):
        Checkpoint(tmp_path)


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "safetensors":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"tsmla-jax\[hf\]"):
        load_hf_attention(tmp_path, 0)


def test_integers_with_scales_for_blocks_are_not_fp4(tmp_path: Path) -> None:
    """The file's own shape, in whatever name the scales have; fp4 has a scale for 32 values of a row."""
    weight = np.zeros((128, 256), np.int8)
    for scale in ("a.weight_scale_inv", "a.scale"):
        write_single(tmp_path, {"a.weight": weight, scale: np.ones((1, 2), np.float32)})
        for shape in ((128, 256), (128, 512), None):
            with pytest.raises(CheckpointError) as error:
                Checkpoint(tmp_path).read("a.weight", shape=shape)
            assert f"'a.weight' is int8, with scales '{scale}' of shape (1, 2), and can't be read" in str(error.value)
            assert "512" not in str(error.value)


def test_a_layer_in_another_format_is_refused_by_its_tensors(tmp_path: Path) -> None:
    """A plain layer beside quantised experts is read, whatever config.json says of the model."""
    tensors = attention_tensors()
    fields = {**FIELDS, "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}
    packed = {"model.layers.2.mlp.experts.0.up_proj.weight_packed": np.zeros(3, np.int32)}
    write_single(tmp_path, tensors | packed, fields)
    assert_matches(load_hf_attention(tmp_path, 2), tensors)
    name = "model.layers.2.self_attn.o_proj"
    tensors[f"{name}.weight_packed"] = tensors.pop(f"{name}.weight").astype(np.int32)
    write_single(tmp_path, tensors, fields)
    with pytest.raises(CheckpointError, match=f"tensor '{name}.weight_packed' is of quantised weights in a "):
        load_hf_attention(tmp_path, 2)


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "\ud800", "..", "", "sub", "loop", "pipe"])
def test_names_of_shards_that_are_no_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(CheckpointError, match=f"though {INDEX_NAME} names it"):
        Checkpoint(tmp_path)


def test_folders_that_can_not_be_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their errors are the system's, and name the path."""
    long = tmp_path / ("a" * 300)
    with pytest.raises(CheckpointError, match="aaa: cannot be read: File name too long"):
        Checkpoint(long)
    with pytest.raises(ValueError, match="aaa: cannot read the config: File name too long"):
        MLAConfig.from_hf(long)
    write_sharded(tmp_path, {"a": np.ones(3), "b": np.ones(3)}, shards=2)

    is_file = Path.is_file

    def forbidden(path: Path) -> bool:
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", forbidden)
    with pytest.raises(CheckpointError, match=r"-of-00002\.safetensors: cannot be read: Permission denied, though"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_indexer_that_is_not_finite(value: float, tmp_path: Path) -> None:
    """It only chooses keys: no result shows that it chose others."""
    fields = {**FIELDS, "model_type": "deepseek_v32", "index_n_heads": 2, "index_head_dim": 16, "index_topk": 3}
    shapes = v32.hf_attention_shapes(v32.V32Config.from_hf(fields))
    tensors = {f"model.layers.0.self_attn.{name}": np.ones(shape, np.float32) for name, shape in shapes.items()}
    name = "model.layers.0.self_attn.indexer.weights_proj.weight"
    tensors[name][1, 2] = value
    write_single(tmp_path, tensors, fields)
    with pytest.raises(CheckpointError, match=f"tensor '{name}' has NaN or infinite values; legal: finite values"):
        v32.load_hf_attention(tmp_path, 0)
