"""Configs and checkpoints of V3.2 and V4: every spelling of the names, narrow formats, and refusals by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_array_equal

from examples import make_checkpoint
from tests.jax.generate.tiny import tiny_config, tiny_tensors, write_tiny
from tsmla_jax.generate import ModelConfig, load_model, moe, save_model
from tsmla_jax.generate.expert_parallel import gather_tokens, mixture_of_split_experts
from tsmla_jax.generate.explaining import explain_experts
from tsmla_jax.generate.mesh import EXPERT, MeshShape, make_mesh, param_specs, put_params
from tsmla_jax.nn import Checkpoint, CheckpointError, v4
from tsmla_jax.nn.products.mxfp4 import MXFP4
from tsmla_jax.nn.v4.names import module_name

Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def v4_tensors() -> Tensors:
    return tiny_tensors(tiny_config("v4"))


def load(directory: Path, tensors: Tensors | None = None, model: str = "v4", **overrides: Any) -> Any:
    write_tiny(directory, tensors, model=model, **overrides)
    return load_model(directory, ModelConfig.from_hf(directory))


def test_a_v4_config_is_read() -> None:
    config = ModelConfig.from_hf(tiny_config("v4"))
    assert isinstance(config.attention, tuple)
    assert [(layer.kind, layer.ratio) for layer in config.attention] == [("sliding", 0), ("csa", 4), ("hca", 128)]
    assert config.mlp_layers == ("hash_moe", "moe", "moe") and all(map(config.is_moe_layer, range(3)))
    moe, streams = config.moe, config.streams
    assert moe is not None and (moe.routing, moe.scoring, moe.swiglu_limit) == ("noaux_tc", "sqrtsoftplus", 1.0)
    assert streams is not None and (streams.count, streams.sinkhorn_iterations) == (2, 20)
    # As transformers writes it; a multi-token-prediction layer may be listed behind the others.
    listed = tiny_config("v4", mlp_layer_types=["hash_moe", "moe", "moe", "moe"])
    assert ModelConfig.from_hf({**listed, "num_hash_layers": None}) == config


def test_a_v32_config_is_read() -> None:
    fields = tiny_config("v3.2")
    config = ModelConfig.from_hf(fields)
    assert config.mlp_layers == ("dense", "moe") and config.moe is not None and config.moe.scoring == "sigmoid"
    assert config.attention == config.layer(1).attention and config.streams is None
    del fields["first_k_dense_replace"]
    assert ModelConfig.from_hf({**fields, "mlp_layer_types": ["dense", "sparse"]}) == config


def test_every_tensor_of_v4_is_where_it_belongs(v4_tensors: Tensors, tmp_path: Path) -> None:
    params = load(tmp_path, v4_tensors)
    sliding, csa, hca = params["layers"]
    assert_array_equal(params["embed"], v4_tensors["embed.weight"])
    assert_array_equal(params["lm_head"], v4_tensors["head.weight"])
    assert_array_equal(params["streams"]["fn"], v4_tensors["hc_head_fn"])
    assert_array_equal(sliding["attention_streams"]["scale"], v4_tensors["layers.0.hc_attn_scale"])
    assert_array_equal(sliding["mlp_streams"]["base"], v4_tensors["layers.0.hc_ffn_base"])
    assert_array_equal(sliding["mlp"]["expert_table"], v4_tensors["layers.0.ffn.gate.tid2eid"])
    assert_array_equal(hca["mlp"]["correction_bias"], v4_tensors["layers.2.ffn.gate.bias"])
    queries = csa["attention"]["indexer_q_b_proj"].reshape(24, -1).T
    assert_array_equal(queries, v4_tensors["layers.1.attn.indexer.wq_b.weight"])
    assert_array_equal(csa["attention"]["indexer_position_bias"], v4_tensors["layers.1.attn.indexer.compressor.ape"])
    assert_array_equal(hca["attention"]["compressor_kv_norm"], v4_tensors["layers.2.attn.compressor.norm.weight"])
    gate, up = (v4_tensors[f"layers.1.ffn.experts.5.w{n}.weight"] for n in (1, 3))
    assert_array_equal(csa["mlp"]["gate_up"][5], np.concatenate([gate, up]))
    # The shared expert comes behind the eight routed ones.
    assert_array_equal(csa["mlp"]["down"][8], v4_tensors["layers.1.ffn.shared_experts.w2.weight"])
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == sum(tensor.size for tensor in v4_tensors.values())


def as_saved(name: str) -> str:
    """The spelling of transformers' save_pretrained."""
    whole = {"embed.weight": "model.embed_tokens.weight", "head.weight": "head.weight"}
    if name.startswith("hc_head_"):
        return f"model.hc_head.{name.removeprefix('hc_head_').join(('hc_', ''))}"
    return whole.get(name, f"model.{name.replace('attn.kv_norm', 'attn.norm')}")


@pytest.mark.parametrize("rename", [as_saved, module_name])
def test_all_spellings_are_one_model(rename: Callable[[str], str], v4_tensors: Tensors, tmp_path: Path) -> None:
    plain = load(tmp_path / "plain", v4_tensors)
    renamed = {rename(name): value for name, value in v4_tensors.items()}
    assert len(renamed) == len(v4_tensors) and len(set(renamed) - set(v4_tensors)) >= len(renamed) - 1
    for mine, other in zip(*map(jax.tree.leaves, (plain, load(tmp_path / "renamed", renamed))), strict=True):
        assert_array_equal(mine, other)
    layer = v4.load_hf_attention(tmp_path / "renamed", 1)
    assert_array_equal(layer["indexer_weights_proj"], plain["layers"][1]["attention"]["indexer_weights_proj"])


def test_experts_in_one_tensor(v4_tensors: Tensors, tmp_path: Path) -> None:
    """As transformers' modules hold them."""
    merged = {module_name(name): value for name, value in v4_tensors.items()}
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: [merged.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(8)]
            for part in ("gate", "up", "down")
        }
        merged[f"{prefix}.gate_up_proj"] = np.stack(
            [np.concatenate(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        )
        merged[f"{prefix}.down_proj"] = np.stack(parts["down"])
    plain, other = load(tmp_path / "plain", v4_tensors), load(tmp_path / "merged", merged)
    for mine, theirs in zip(*map(jax.tree.leaves, (plain, other)), strict=True):
        assert_array_equal(mine, theirs)


def test_what_v4_computes_in_f32_stays_f32(v4_tensors: Tensors, tmp_path: Path) -> None:
    write_tiny(tmp_path, v4_tensors, model="v4")
    params = load_model(tmp_path, ModelConfig.from_hf(tmp_path), dtype="bfloat16")
    layer = params["layers"][1]
    wide = {name for name, value in layer["attention"].items() if value.dtype == jnp.float32}
    assert wide == {
        "q_a_norm", "kv_norm", "sinks", "compressor_position_bias", "compressor_kv_norm", "indexer_position_bias",
        "indexer_kv_norm",
    }  # fmt: skip
    kept = [layer["attention_norm"], layer["mlp_norm"], params["norm"], layer["mlp"]["router"]]
    kept += jax.tree.leaves([layer["attention_streams"], layer["mlp_streams"], params["streams"]])
    assert {leaf.dtype.name for leaf in kept} == {"float32"}
    assert layer["mlp"]["gate_up"].dtype == params["embed"].dtype == jnp.bfloat16


def test_a_tied_v4_has_no_head(v4_tensors: Tensors, tmp_path: Path) -> None:
    # A copy of the embedding may lie beside it, and nothing else.
    copy = {**v4_tensors, "head.weight": v4_tensors["embed.weight"]}
    assert "lm_head" not in load(tmp_path / "copy", copy, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"'head\.weight' differs from 'embed\.weight', though config.json ties"):
        load(tmp_path / "another", v4_tensors, tie_word_embeddings=True)
    assert "head.weight" not in tiny_tensors(tiny_config("v4", tie_word_embeddings=True))


def test_drafting_weights_are_left_alone(v4_tensors: Tensors, tmp_path: Path) -> None:
    extra = {f"mtp.0.{name}": np.zeros(3, np.float32) for name in ("e_proj.weight", "attn.wq_a.weight")}
    extra["layers.3.attn.wq_a.weight"] = np.zeros(3, np.float32)
    assert len(load(tmp_path, {**v4_tensors, **extra})["layers"]) == 3


@pytest.mark.parametrize(
    ("model", "extra"),
    [
        ("v3.2", "model.layers.1.self_attn.indexer.wk.bias"),
        ("v3.2", "model.layers.0.mlp.gate.weight"),
        ("v4", "layers.0.attn.compressor.ape"),
        ("v4", "layers.2.attn.indexer.wq_b.weight"),
        ("v3", "model.layers.0.self_attn.indexer.wk.weight"),
    ],
)
def test_tensors_of_another_model_are_refused(model: str, extra: str, tmp_path: Path) -> None:
    tensors = {**tiny_tensors(tiny_config(model)), extra: np.zeros((2, 2), np.float32)}
    with pytest.raises(CheckpointError, match="without 1 of the tensors") as error:
        load(tmp_path, tensors, model)
    assert repr(extra) in str(error.value) and str(tmp_path) in str(error.value)


def test_two_spellings_of_one_tensor_are_refused(v4_tensors: Tensors, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.sinks"
    with pytest.raises(CheckpointError, match=r"attn_sink' and 'model.layers.0.self_attn.sinks' are two spellings"):
        load(tmp_path, {**v4_tensors, name: v4_tensors["layers.0.attn.attn_sink"]})


@pytest.mark.parametrize("expert", [-1, 8])
def test_tables_of_experts_that_are_not_there_are_refused(expert: int, v4_tensors: Tensors, tmp_path: Path) -> None:
    table = v4_tensors["layers.0.ffn.gate.tid2eid"].copy()
    table[7, 1] = expert
    with pytest.raises(CheckpointError, match=r"gate.tid2eid' names experts .*; legal: 0 to 7"):
        load(tmp_path, {**v4_tensors, "layers.0.ffn.gate.tid2eid": table})


def write_raw(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """A safetensors file of types that numpy has no names for."""
    header, body = {}, b""
    for name, (kind, shape, data) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_fp4_experts_and_power_of_two_scales(tmp_path: Path) -> None:
    """The formats of V4's checkpoints, from bytes written by hand."""
    # Two e2m1 values a byte, the lower bits first: 0x21 is 0.5 and 1, 0xF7 is 6 and -6; 32 values share a scale.
    packed = bytes([0x21, 0xF7] + [0] * 14 + [0x42] * 16)
    scales = bytes([127 + 3, 127 - 1])  # 8 and 1/2
    e4m3 = bytes([0x38, 0xB8] * 2)  # 1 and -1
    write_raw(
        tmp_path / "model.safetensors",
        {
            "w1.weight": ("I8", (1, 32), packed),
            "w1.scale": ("F8_E8M0", (1, 2), scales),
            "w2.weight": ("I8", (1, 32), packed),
            "w2.scale": ("U8", (1, 2), scales),
            "wq_a.weight": ("F8_E4M3", (2, 2), e4m3),
            "wq_a.scale": ("F8_E8M0", (1, 1), bytes([129])),
            "tid2eid": ("I8", (1, 4), bytes([1, 2, 3, 4])),
            "bad.weight": ("I8", (1, 32), packed),
            "bad.scale": ("F8_E8M0", (1, 1), bytes([129])),
        },
    )
    checkpoint = Checkpoint(tmp_path)
    expected = np.array([[4, 8, 48, -48, *[0] * 28, *[0.5, 1.0] * 16]], np.float32)
    for name in ("w1.weight", "w2.weight"):
        assert_array_equal(checkpoint.read(name, shape=(1, 64), dtype=np.float32), expected)
    assert checkpoint.read("w1.weight").dtype == ml_dtypes.bfloat16
    assert_array_equal(checkpoint.read("wq_a.weight", dtype=np.float32), [[4, -4], [4, -4]])
    assert_array_equal(checkpoint.read("tid2eid"), [[1, 2, 3, 4]])
    with pytest.raises(CheckpointError, match=r"'w1.weight' must have shape \(1, 32\), got \(1, 64\)"):
        checkpoint.read("w1.weight", shape=(1, 32))
    with pytest.raises(CheckpointError, match=r"'bad.scale' must have shape \(1, 2\)"):
        checkpoint.read("bad.weight")


def test_a_v4_checkpoint_in_its_own_formats(v4_tensors: Tensors, tmp_path: Path) -> None:
    """fp8 projections and fp4 experts with their scales beside them, all read or accounted for."""
    raw = {
        name: ("I64" if value.dtype == np.int64 else "F32", value.shape, value.tobytes())
        for name, value in v4_tensors.items()
    }
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (16, 16), np.uint8)
    expert, query = "layers.1.ffn.experts.3.w1", "layers.2.attn.wq_a"
    raw[f"{expert}.weight"] = ("I8", (16, 16), codes.tobytes())
    raw[f"{expert}.scale"] = ("F8_E8M0", (16, 1), bytes([127, 128] * 8))
    raw[f"{query}.weight"] = ("F8_E4M3", (24, 32), bytes([0x38] * 24 * 32))
    raw[f"{query}.scale"] = ("F8_E8M0", (1, 1), bytes([125]))
    write_tiny(tmp_path, model="v4")
    write_raw(tmp_path / "model.safetensors", raw)
    params = load_model(tmp_path, ModelConfig.from_hf(tmp_path))
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values += [-value for value in values]
    rows = [[values[code] for byte in row for code in (byte & 15, byte >> 4)] for row in codes.tolist()]
    scales = np.array([[1], [2]] * 8)
    assert_array_equal(params["layers"][1]["mlp"]["gate_up"][3][:16], np.array(rows) * scales)
    assert (np.asarray(params["layers"][2]["attention"]["q_a_proj"]) == 0.25).all()
    del raw[f"{expert}.scale"]
    write_raw(tmp_path / "model.safetensors", raw)
    with pytest.raises(CheckpointError, match=r"experts.3.w1.weight' must have shape \(16, 32\), got \(16, 16\)"):
        load_model(tmp_path, ModelConfig.from_hf(tmp_path))


def write_mxfp4(directory: Path) -> ModelConfig:
    """Writes a tiny V4 with experts in MXFP4."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128}
    tensors, rng = tiny_tensors(tiny_config("v4", **sizes)), np.random.default_rng(1)
    raw = {
        name: ("I64" if value.dtype == np.int64 else "F32", value.shape, value.tobytes())
        for name, value in tensors.items()
    }
    for name in [name for name in raw if ".experts." in name]:
        raw[name] = ("I8", (128, 64), rng.integers(0, 256, (128, 64), np.uint8).tobytes())
        exponents = rng.integers(118, 122, (128, 4), np.uint8)
        raw[f"{name.removesuffix('.weight')}.scale"] = ("F8_E8M0", (128, 4), exponents.tobytes())
    write_tiny(directory, tensors, model="v4", **sizes)
    write_raw(directory / "model.safetensors", raw)
    return ModelConfig.from_hf(directory)


def test_mxfp4_experts_on_a_mesh(tmp_path: Path) -> None:
    """Each device has its experts, and the shared ones' parameters; a layer computes what it does on one device."""
    config = write_mxfp4(tmp_path)
    assert config.moe is not None
    shape, count = MeshShape(expert=2, context=2), config.moe.num_experts
    one, split = (load_model(tmp_path, config, keep_fp8=True, mesh=mesh) for mesh in (MeshShape(), shape))
    placed = put_params(make_mesh(shape), one, config)
    for params in (split, placed):
        for layer in params["layers"]:
            mlp = layer["mlp"]
            assert isinstance(mlp["down"], MXFP4) and mlp["down"].values.shape == (count, 128, 64)
            assert {shard.data.shape[0] for shard in mlp["down"].values.addressable_shards} == {count // 4}
    with pytest.raises(ValueError, match=r"^params: gate_up of layer 0 has shape .* split for another mesh"):
        put_params(None, {**one, "layers": [{**one["layers"][0], "mlp": _first_half(one["layers"][0]["mlp"])}]}, config)
    x = np.random.default_rng(0).standard_normal((10, 128), np.float32)
    ids = jnp.array([3, 1, 4, 1, 5, 9, 2, 6, -1, -1], jnp.int32)
    mlp, specs = split["layers"][1]["mlp"], param_specs(split, 4)["layers"][1]["mlp"]

    def of_device(mlp: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
        return mixture_of_split_experts(mlp, x, gather_tokens(ids, ids >= 0, shape), config.moe, shape)

    mesh, rows = make_mesh(shape), P(EXPERT)
    run = jax.shard_map(of_device, mesh=mesh, in_specs=(specs, rows, rows), out_specs=rows, check_vma=False)
    whole = jax.jit(lambda mlp, x: moe.mixture_of_experts(mlp, x, ids >= 0, config.moe, ids))
    want = whole(one["layers"][1]["mlp"], x)
    np.testing.assert_allclose(jax.jit(run)(mlp, x, ids), want, rtol=1e-4, atol=1e-4)


def _first_half(mlp: dict[str, Any]) -> dict[str, Any]:
    """An MLP with the first half of its experts."""
    stacks = {name: jax.tree.map(lambda array: array[: len(array) // 2], mlp[name]) for name in ("gate_up", "down")}
    return {**mlp, **stacks}


@pytest.mark.slow
def test_mxfp4_experts_stay_in_four_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, rng = write_mxfp4(tmp_path), np.random.default_rng(2)
    assert config.moe is not None
    kept, wide = (load_model(tmp_path, config, keep_fp8=keep) for keep in (True, False))
    own, other = kept["layers"][1]["mlp"], wide["layers"][1]["mlp"]
    assert isinstance(own["down"], MXFP4) and own["down"].values.shape == (config.moe.num_experts, 128, 64)
    assert_array_equal(own["gate_up"].widened(np.float32), other["gate_up"][: config.moe.num_experts])
    x, ids = jnp.float32(rng.standard_normal((9, 128))), jnp.arange(9, dtype=jnp.int32)
    valid = jnp.arange(9) < 7
    got, want = (moe.mixture_of_experts(mlp, x, valid, config.moe, ids) for mlp in (own, other))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert not np.asarray(got)[7:].any()
    with monkeypatch.context() as patch:  # by grouped_block_scaled_matmul, of few pairs and of many
        patch.setattr(moe, "why_not_mxfp4", lambda *_: [])
        for count in (9, 9 * 130):
            many, all_valid = jnp.tile(x, (count // 9, 1)), jnp.tile(valid, count // 9)
            out = moe.mixture_of_experts(own, many, all_valid, config.moe, jnp.tile(ids, count // 9))
            np.testing.assert_allclose(out, np.tile(want, (count // 9, 1)), rtol=1e-4, atol=5e-5)
    (choice,) = explain_experts(kept, "bfloat16")
    assert choice.implementation == "widened" and choice.why.startswith("not grouped_block_scaled_matmul: ")
    assert put_params(None, kept, config)["layers"][1]["mlp"]["down"] is own["down"]
    save_model(tmp_path / "saved", kept, config)
    again = load_model(tmp_path / "saved", config)["layers"][1]["mlp"]
    assert_array_equal(again["gate_up"], other["gate_up"])
    assert_array_equal(again["down"], other["down"])
    with pytest.raises(CheckpointError, match=r"must have shape \(128, 64\), got \(128, 128\)"):
        Checkpoint(tmp_path).read_fp4("layers.1.ffn.experts.0.w1.weight", shape=(128, 64))


@pytest.mark.parametrize("model", ["v3.2", "v4"])
def test_the_demo_writes_them_too(model: str, tmp_path: Path) -> None:
    make_checkpoint.make_checkpoint(tmp_path, model=model)
    config = ModelConfig.from_hf(tmp_path)
    layer = config.layer(1).attention
    assert config.dtype == "bfloat16" and getattr(layer, "head_dim", 512) == 512
    assert load_model(tmp_path, config)["embed"].shape == (config.vocab_size, 256)
    with pytest.raises(ValueError, match="fp8: got True with model 'v4'; legal: False"):
        make_checkpoint.make_checkpoint(tmp_path, model="v4", fp8=True)
