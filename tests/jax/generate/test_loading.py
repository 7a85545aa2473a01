"""Configs and checkpoints of whole models: fields and tensors that are read, and those refused by name."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from examples import make_checkpoint
from tests.jax.generate.tiny import tiny_config, tiny_tensors, write_tiny
from tsmla_jax.generate import Engine, EngineOptions, ModelConfig, load_model, save_model
from tsmla_jax.generate.loading import ProgressBar
from tsmla_jax.generate.mesh import MeshShape, make_mesh, put_params
from tsmla_jax.nn import Checkpoint
from tsmla_jax.nn.products.block_scaled import BlockScaled
from tsmla_jax.nn.v4.names import module_name

V2_LITE = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_hidden_layers": 27, "num_attention_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "rope_theta": 10000, "vocab_size": 102400, "eos_token_id": 100001,
    "max_position_embeddings": 163840, "torch_dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip


def test_a_real_config_is_read() -> None:
    config = ModelConfig.from_hf(V2_LITE)
    assert config.moe is not None and (config.moe.num_experts, config.moe.top_k, config.moe.num_shared) == (64, 6, 2)
    assert [config.is_moe_layer(layer) for layer in (0, 1, 26)] == [False, True, True]
    assert config.eos_token_ids == (100001,) and config.dtype == "bfloat16" and not config.tie_word_embeddings
    assert config.attention.kv_lora_rank == 512 and config.attention.q_lora_rank is None
    dense = ModelConfig.from_hf({**V2_LITE, "n_routed_experts": None})
    assert dense.moe is None and not dense.is_moe_layer(5)
    # V3 and Kimi-K2 as transformers writes them, without the routing's name; experts in every second layer.
    renamed = {key: value for key, value in V2_LITE.items() if key not in ("topk_method", "scoring_func")}
    v3 = ModelConfig.from_hf({**renamed, "model_type": "kimi_k2", "moe_layer_freq": 2, "eos_token_id": [3, 4]})
    assert v3.moe is not None and v3.moe.routing == "noaux_tc" and v3.eos_token_ids == (3, 4)
    assert [v3.is_moe_layer(layer) for layer in (0, 1, 2)] == [False, False, True]


ROUTING = ("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "n_shared_experts")


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"])
def test_absent_fields_have_the_defaults_of_transformers(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = {"deepseek_v2": "v3", "deepseek_v3": "v3", "deepseek_v32": "v3.2", "deepseek_v4": "v4"}[model_type]
    fields = tiny_config(model, model_type=model_type, n_routed_experts=64, num_experts_per_tok=8)
    others = ("topk_method", "scoring_func", "first_k_dense_replace", "max_position_embeddings", "eos_token_id")
    for name in (*ROUTING, *others, "num_hash_layers"):
        fields.pop(name, None)
    config, theirs = ModelConfig.from_hf(fields), transformers.AutoConfig.for_model(model_type)
    assert config.moe is not None
    ours = {
        "norm_topk_prob": config.moe.norm_topk_prob,
        "routed_scaling_factor": config.moe.routed_scaling_factor,
        "n_group": config.moe.n_group,
        "topk_group": config.moe.topk_group,
        "n_shared_experts": config.moe.num_shared,
        "max_position_embeddings": config.max_position_embeddings,
        "eos_token_id": config.eos_token_ids[0],
        "first_k_dense_replace": config.mlp_layers.count("dense") if model_type == "deepseek_v2" else 3,
    }
    groups = {"n_group": 1, "topk_group": 1}  # None in V2 and nothing in V4: one group
    for name, value in ours.items():
        legal = getattr(theirs, name, None)
        assert value == (groups.get(name, value) if legal is None else legal), name
    if model_type == "deepseek_v4":
        hashed = ModelConfig.from_hf({**fields, "num_hidden_layers": 5, "compress_ratios": [0, 4, 4, 4, 4]})
        assert list(hashed.mlp_layers) == theirs.mlp_layer_types[:5]


REQUIRED = (
    "hidden_size", "vocab_size", "intermediate_size", "moe_intermediate_size", "n_routed_experts",
    "num_experts_per_tok", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "v_head_dim", "rope_theta",
)  # fmt: skip


@pytest.mark.parametrize("field", REQUIRED)
def test_sizes_have_no_defaults(field: str) -> None:
    """Without n_routed_experts the model would be dense, or be taken for one of transformers' 256 experts."""
    fields = tiny_config("v3")
    del fields[field]
    with pytest.raises(ValueError, match=f"field '{field}' is missing"):
        ModelConfig.from_hf(fields)


@pytest.mark.parametrize("field", [*ROUTING, "first_k_dense_replace", "max_position_embeddings", "eos_token_id"])
def test_a_model_type_that_transformers_lacks_must_give_every_field(field: str) -> None:
    fields = {**V2_LITE, "model_type": "kimi_k2", "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    with pytest.raises(ValueError, match=f"field '{field}' is missing"):
        ModelConfig.from_hf({name: value for name, value in fields.items() if name != field})


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        ("v2-lite", "model_type", "llama"),
        ("v2-lite", "hidden_act", "gelu"),
        ("v2-lite", "torch_dtype", "int8"),
        ("v2-lite", "vocab_size", None),
        ("v2-lite", "num_hidden_layers", 0),
        ("v2-lite", "moe_intermediate_size", None),
        ("v2-lite", "moe_intermediate_size", 0),
        ("v2-lite", "n_shared_experts", -1),
        ("v2-lite", "routed_scaling_factor", float("nan")),
        ("v2-lite", "rms_norm_eps", -1e-6),
        ("v2-lite", "topk_method", "random"),
        ("v2-lite", "scoring_func", "sigmoid"),
        ("v2-lite", "num_experts_per_tok", 65),
        ("v2-lite", "eos_token_id", "end"),
        ("v2-lite", "kv_lora_rank", None),
        ("v3.2", "index_topk", None),
        ("v3.2", "norm_topk_prob", "null"),
        ("v3.2", "q_lora_rank", "none"),
        ("v3.2", "scoring_func", "sqrtsoftplus"),
        ("v3.2", "layer_types", ["indexed_attention", "full_attention"]),
        ("v3.2", "mlp_layer_types", ["dense"]),
        ("v3.2", "mlp_layer_types", ["dense", "hash_moe"]),
        ("v4", "compress_ratios", [0, 4, 64]),
        ("v4", "compress_ratios", [0, 4]),
        ("v4", "compress_ratios", None),
        ("v4", "mlp_layer_types", ["moe", "moe", "dense"]),
        ("v4", "scoring_func", "softmax"),
        ("v4", "norm_topk_prob", False),
        ("v4", "n_shared_experts", 2),
        ("v4", "n_routed_experts", None),
        ("v4", "num_key_value_heads", 2),
        ("v4", "n_group", 4),
        ("v4", "attention_bias", True),
        ("v4", "hc_mult", 0),
        ("v4", "hc_sinkhorn_iters", 0),
        ("v4", "hc_eps", float("inf")),
        ("v4", "swiglu_limit", -1.0),
        ("v4", "o_groups", 3),
        ("v4", "moe_intermediate_size", None),
    ],
)
def test_bad_fields_are_named(model: str, field: str, value: Any, tmp_path: Path) -> None:
    fields = {**(V2_LITE if model == "v2-lite" else tiny_config(model)), field: value}
    if value is None:
        del fields[field]
    elif value == "null":
        fields[field] = None
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=field) as error:
        ModelConfig.from_hf(tmp_path)
    # Errors of one layer of V4 name the file at their end.
    assert str(tmp_path / "config.json") in str(error.value)
    assert model == "v4" or str(error.value).startswith(str(tmp_path / "config.json"))


def test_products_are_checked_before_a_tensor_is_read(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(tiny_config("v2"))
    with pytest.raises(ValueError, match=r"^fp8_products: got 'fp8'; legal: None, 'quantized', 'exact'$"):
        load_model(tmp_path, config, fp8_products="fp8")


def test_a_model_without_experts_has_no_layers_of_experts() -> None:
    fields = tiny_config("v2", n_routed_experts=None)
    with pytest.raises(ValueError, match=r"mlp_layer_types = .*; legal: a list of at least 2, each dense$"):
        ModelConfig.from_hf({**fields, "mlp_layer_types": ["dense", "sparse"]})
    assert ModelConfig.from_hf({**fields, "mlp_layer_types": ["dense", "dense"]}).moe is None


def test_a_v2_checkpoint_is_read_to_the_last_tensor(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(write_tiny(tmp_path, model="v2"))
    assert config.moe is not None and (config.moe.routing, config.moe.scoring) == ("greedy", "softmax")
    assert config.layer(0).attention.q_lora_rank is None
    params = load_model(tmp_path, config)
    assert "correction_bias" not in params["layers"][1]["mlp"] and "q_proj" in params["layers"][1]["attention"]
    assert make_checkpoint.make_checkpoint(tmp_path / "demo", model="v2") > 0


def test_generation_config_has_the_last_word_on_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V2_LITE))
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [7, 8]}')
    assert ModelConfig.from_hf(tmp_path).eos_token_ids == (7, 8)
    generation.write_text('{"eos_token_id": null}')
    assert ModelConfig.from_hf(tmp_path).eos_token_ids == ()
    generation.write_text("{}")
    assert ModelConfig.from_hf(tmp_path).eos_token_ids == (100001,)
    for target in ("/dev/zero", "/nowhere"):  # neither read without end nor passed over
        generation.unlink()
        generation.symlink_to(target)
        with pytest.raises(ValueError, match=r"generation_config\.json: cannot read the config"):
            ModelConfig.from_hf(tmp_path)


def test_every_tensor_is_where_it_belongs(tiny_checkpoint: Path, tiny_model: tuple[ModelConfig, Any]) -> None:
    _, params = tiny_model
    tensors = tiny_tensors(tiny_config())
    dense, sparse = params["layers"]
    np.testing.assert_array_equal(params["lm_head"], tensors["lm_head.weight"])
    gate, up = (tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    np.testing.assert_array_equal(dense["mlp"]["gate_up"], np.concatenate([gate, up]))
    np.testing.assert_array_equal(sparse["mlp"]["down"][5], tensors["model.layers.1.mlp.experts.5.down_proj.weight"])
    np.testing.assert_array_equal(
        sparse["mlp"]["correction_bias"], tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    )
    np.testing.assert_array_equal(
        sparse["attention"]["kv_a_proj_with_mqa"].T, tensors["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert count == sum(tensor.size for tensor in tensors.values())


def test_tied_models_have_no_head_and_extra_layers_are_left_alone(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    tensors = tiny_tensors(config)
    assert "lm_head.weight" not in tensors
    # A multi-token-prediction layer comes after the last one.
    extra = {name.replace("layers.1.", "layers.2."): value for name, value in tensors.items() if "layers.1." in name}
    write_tiny(tmp_path, {**tensors, **extra}, tie_word_embeddings=True)
    params = load_model(tmp_path, ModelConfig.from_hf(tmp_path))
    assert "lm_head" not in params and len(params["layers"]) == 2


def test_a_tied_embedding_that_is_stored_twice_is_saved_twice(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config(tie_word_embeddings=True))
    stored = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    config = ModelConfig.from_hf(write_tiny(tmp_path / "base", stored, tie_word_embeddings=True))
    params = load_model(tmp_path / "base", config)
    save_model(tmp_path / "new", {**params, "embed": params["embed"] + 1}, config, base=tmp_path / "base")
    np.testing.assert_array_equal(load_model(tmp_path / "new", config)["embed"], params["embed"] + 1)


def test_a_dtype_is_refused_under_its_field(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    fields.pop("torch_dtype", None)
    with pytest.raises(ValueError, match=r": dtype = 'int8'; legal: 'float32'"):
        ModelConfig.from_hf({**fields, "dtype": "int8"})


def test_block_scaled_fp8_weights(tmp_path: Path) -> None:
    config = tiny_config(hidden_size=160, moe_intermediate_size=136)
    plain = tiny_tensors(config)
    stored = dict(make_checkpoint.stored(iter(plain.items()), "float32", True))
    name = "model.layers.1.mlp.experts.3.gate_proj.weight"
    assert stored[name].dtype == ml_dtypes.float8_e4m3fn and stored[f"{name}_scale_inv"].shape == (2, 2)
    write_tiny(tmp_path, stored, hidden_size=160, moe_intermediate_size=136)
    params = load_model(tmp_path, ModelConfig.from_hf(tmp_path), dtype=jnp.float32)
    loaded = np.asarray(params["layers"][1]["mlp"]["gate_up"][3][:136])
    scales = np.kron(stored[f"{name}_scale_inv"], np.ones((128, 128), np.float32))[:136, :160]
    np.testing.assert_array_equal(loaded, stored[name].astype(np.float32) * scales)
    # e4m3 has 3 bits of mantissa: half a unit is a sixteenth, and below its normal range 2^-10 of a block's scale.
    assert (np.abs(loaded - plain[name]) <= np.abs(plain[name]) / 16 + 2**-10 * scales).all()


@pytest.mark.parametrize("model", ["v3", "v3.2"])
@pytest.mark.sampled(2)
def test_fp8_weights_stay_narrow_and_mean_the_same(model: str, tmp_path: Path) -> None:
    """Kept as they are stored, with the shared expert behind the others; the generated texts are those of wide ones."""
    sizes = {"hidden_size": 160, "intermediate_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 8}
    plain = tiny_tensors(tiny_config(model, **sizes))
    write_tiny(tmp_path, dict(make_checkpoint.stored(iter(plain.items()), "float32", True)), model, **sizes)
    config = ModelConfig.from_hf(tmp_path)
    kept, wide = (load_model(tmp_path, config, keep_fp8=keep) for keep in (True, False))
    dense, sparse = kept["layers"]
    narrow = {name for name, value in sparse["attention"].items() if isinstance(value, BlockScaled)}
    assert narrow == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"}
    for layer, other in zip((dense, sparse), wide["layers"], strict=True):
        for name in ("gate_up", "down"):
            assert isinstance(layer["mlp"][name], BlockScaled)
            np.testing.assert_array_equal(layer["mlp"][name].widened(jnp.float32), other["mlp"][name])
    assert sparse["mlp"]["gate_up"].shape == (9, 256, 160)
    options = EngineOptions(page_size=4, chunk=8)
    texts = [Engine(params, config, options).generate([[1, 2, 3], [4] * 11], 6) for params in (kept, wide)]
    assert texts[0].tokens == texts[1].tokens
    assert texts[0].figures.weight_bytes < 0.5 * texts[1].figures.weight_bytes
    for products in ("exact", "quantized"):
        params = load_model(tmp_path, config, keep_fp8=True, fp8_products=products)
        assert params["layers"][1]["mlp"]["down"].products == products
        tokens = Engine(params, config, options).generate([[1, 2, 3], [4] * 11], 6).tokens
        assert tokens == texts[1].tokens if products == "exact" else [len(text) for text in tokens] == [6, 6]


@pytest.mark.parametrize("merged", [False, True])
def test_a_mesh_gets_its_parts_as_they_are_read(
    merged: bool, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every device's parameters are those that it gets from a model in memory, and no more than a shard of experts is
    read at once."""
    directory, config = tiny_checkpoint, ModelConfig.from_hf(tiny_checkpoint)
    if merged:
        tensors, prefix = tiny_tensors(tiny_config()), "model.layers.1.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{prefix}.{expert}.{name}_proj.weight") for expert in range(8)])
            for name in ("gate", "up", "down")
        )
        tensors |= {f"{prefix}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{prefix}.down_proj": down}
        directory = write_tiny(tmp_path, tensors)
    shape = MeshShape(data=2, expert=2, context=2)
    want = put_params(make_mesh(shape), load_model(directory, config), config)
    largest = []
    read = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda *args, **named: largest.append(read(*args, **named)) or largest[-1])
    got = load_model(directory, config, mesh=shape)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.sharding == other.sharding and one.dtype == other.dtype
        for here, there in zip(one.addressable_shards, other.addressable_shards, strict=True):
            assert here.device == there.device
            np.testing.assert_array_equal(here.data, there.data)
    assert {value.shape[0] for value in largest if value.ndim == 3} == ({8 // 4} if merged else set())
    assert got["layers"][1]["mlp"]["down"].addressable_shards[0].data.shape == (8 // 4 + 1, 32, 16)


def test_gate_and_up_that_share_a_block_are_widened(tmp_path: Path) -> None:
    sizes = {"hidden_size": 160, "moe_intermediate_size": 136}
    plain = tiny_tensors(tiny_config(**sizes))
    write_tiny(tmp_path, dict(make_checkpoint.stored(iter(plain.items()), "float32", True)), **sizes)
    params = load_model(tmp_path, ModelConfig.from_hf(tmp_path), keep_fp8=True)
    assert not isinstance(params["layers"][1]["mlp"]["gate_up"], BlockScaled)
    assert isinstance(params["layers"][1]["attention"]["o_proj"], BlockScaled)


def test_parameters_take_the_dtype_asked_for(tiny_checkpoint: Path) -> None:
    params = load_model(tiny_checkpoint, ModelConfig.from_hf(tiny_checkpoint), dtype="bfloat16")
    routing = params["layers"][1]["mlp"]
    assert routing["router"].dtype == routing["correction_bias"].dtype == jnp.float32
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params["layers"][0])} == {"bfloat16"}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("v3", "model.embed_tokens.weight"),
        ("v3", "lm_head.weight"),
        ("v3", "model.norm.weight"),
        ("v3", "model.layers.0.mlp.up_proj.weight"),
        ("v3", "model.layers.1.self_attn.kv_b_proj.weight"),
        ("v3", "model.layers.1.post_attention_layernorm.weight"),
        ("v3", "model.layers.1.mlp.gate.weight"),
        ("v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("v3", "model.layers.1.mlp.experts.7.down_proj.weight"),
        ("v3", "model.layers.1.mlp.shared_experts.gate_proj.weight"),
        ("v3.2", "model.layers.0.self_attn.indexer.wk.weight"),
        ("v3.2", "model.layers.1.self_attn.indexer.k_norm.bias"),
        ("v3.2", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("v4", "hc_head_fn"),
        ("v4", "layers.0.hc_attn_base"),
        ("v4", "layers.0.attn.attn_sink"),
        ("v4", "layers.0.ffn.gate.tid2eid"),
        ("v4", "layers.1.ffn.gate.bias"),
        ("v4", "layers.1.attn.indexer.compressor.ape"),
        ("v4", "layers.2.attn.compressor.wkv.weight"),
        ("v4", "layers.2.ffn.experts.7.w2.weight"),
    ],
)
def test_missing_and_misshapen_tensors_are_named(model: str, name: str, tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config(model))
    directory = write_tiny(tmp_path / "misshapen", {**tensors, name: tensors[name][1:]}, model)
    with pytest.raises(ValueError) as error:
        load_model(directory, ModelConfig.from_hf(directory))
    assert repr(name) in str(error.value) and str(tensors[name].shape) in str(error.value)
    del tensors[name]
    directory = write_tiny(tmp_path / "missing", tensors, model)
    with pytest.raises(ValueError, match="missing") as error:
        load_model(directory, ModelConfig.from_hf(directory))
    # A checkpoint that lacks a tensor has no spelling for it: the modules' own is named.
    assert repr(module_name(name) if model == "v4" else name) in str(error.value)
    assert str(directory) in str(error.value)


class Terminal:
    """A stderr that is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("with_tqdm", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_progress_bar_ends_full(with_tqdm: bool, enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if with_tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    bar = ProgressBar(3, "loading", enabled=enabled)
    for _ in range(3):
        bar.step()
    bar.close()
    assert ("3/3" in terminal.text) == enabled == terminal.text.endswith("\n")
