"""Saving whole models: transformers computes the same with them, and `load_model` reads the same parameters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from examples import make_checkpoint
from tests.jax.generate import transformers_models
from tests.jax.generate.tiny import tiny_config, tiny_tensors, write_tiny
from tsmla_jax.generate import ModelConfig, load_model, model, save_model, saving
from tsmla_jax.generate.model import fold
from tsmla_jax.nn import Checkpoint, CheckpointError
from tsmla_jax.nn.products.block_scaled import BlockScaled


def assert_same(got: Any, want: Any) -> None:
    """Bit by bit, structure and dtypes too."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["v3", "v2-lite", "v3.2", "v4"])
def test_transformers_loads_what_was_saved(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, dtypes and values are those of transformers' own file, and so are the logits of its model."""
    monkeypatch.setattr(model, "_LONG_SUM", 8)
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    transformers_models.reference_tokens(name, [[1]], 1, theirs)
    config = ModelConfig.from_hf(theirs)
    params = load_model(theirs, config)
    save_model(ours, fold(params, config), config, max_shard_bytes=300_000)
    (ours / "config.json").write_bytes((theirs / "config.json").read_bytes())
    saved, original = Checkpoint(ours), Checkpoint(theirs)
    assert saved.names() == original.names() and len(list(ours.glob("*.safetensors"))) > 1
    for tensor in original.names():
        assert_same(saved.stored(tensor), original.stored(tensor))
    assert_same(load_model(ours, config), params)
    if name == "v4":  # the one whose names transformers changes
        kind = getattr(transformers, f"{transformers_models.MODELS[name][0]}ForCausalLM")
        with torch.no_grad():
            one, other = (kind.from_pretrained(folder)(torch.arange(40)[None]).logits for folder in (theirs, ours))
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize("model", ["v2", "v3", "v4"])
def test_a_base_keeps_its_names_files_and_other_tensors(model: str, tmp_path: Path) -> None:
    """DeepSeek's own names in V4, and the layers of multi-token prediction."""
    fields = tiny_config(model)
    drafting = "mtp.0.norm.weight" if model == "v4" else f"model.layers.{fields['num_hidden_layers']}.enorm.weight"
    tensors = {**tiny_tensors(fields), drafting: np.arange(32, dtype=np.float32)}
    base = write_tiny(tmp_path / "base", tensors, model)
    config = ModelConfig.from_hf(base)
    params = jax.tree.map(lambda x: x + 1 if x.dtype == jnp.float32 else x, load_model(base, config))
    save_model(tmp_path / "new", params, config, base=base)
    assert Checkpoint(tmp_path / "new").names() == tuple(sorted(tensors))
    np.testing.assert_array_equal(Checkpoint(tmp_path / "new").read(drafting), tensors[drafting])
    assert ModelConfig.from_hf(tmp_path / "new") == config
    assert_same(load_model(tmp_path / "new", config), params)


def test_block_scaled_experts_are_saved_as_they_are(tmp_path: Path) -> None:
    fields = tiny_config(hidden_size=128, intermediate_size=128, moe_intermediate_size=128, n_shared_experts=2)
    tensors = dict(make_checkpoint.stored(iter(tiny_tensors(fields).items()), "float32", True))
    base = write_tiny(tmp_path / "base", tensors, **fields)
    config = ModelConfig.from_hf(base)
    params = load_model(base, config, keep_fp8=True)
    assert any(isinstance(x, BlockScaled) for x in params["layers"][-1]["mlp"].values())
    # kv_b_proj, which is wide here, is all that hinders: base's is fp8.
    with pytest.raises(ValueError, match=r"kv_b_proj\.weight' has no block scales"):
        save_model(tmp_path / "refused", params, config, base=base)
    save_model(tmp_path / "new", params, config)
    (tmp_path / "new" / "config.json").write_bytes((base / "config.json").read_bytes())
    assert_same(load_model(tmp_path / "new", config, keep_fp8=True), params)
    stored = Checkpoint(tmp_path / "new")
    for name in tensors:
        if "kv_b_proj" not in name:
            assert_same(stored.stored(name), tensors[name])


def test_experts_split_for_a_mesh_are_saved_once(tiny_model: tuple[ModelConfig, Any], tmp_path: Path) -> None:
    """Two devices: four of the eight experts each, and both the shared one behind them (`mesh.put_params`)."""
    config, params = tiny_model
    split = [dict(layer) for layer in params["layers"]]
    ids = jnp.array([0, 1, 2, 3, 8, 4, 5, 6, 7, 8])
    split[-1]["mlp"] = {**split[-1]["mlp"], **{name: split[-1]["mlp"][name][ids] for name in ("gate_up", "down")}}
    save_model(tmp_path, {**params, "layers": split}, config)
    assert_same(load_model(tmp_path, config), params)


def test_dtype_is_of_what_load_model_has_a_dtype_for(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", model="v4")
    config = ModelConfig.from_hf(base)
    save_model(tmp_path / "new", load_model(base, config), config, base=base, dtype=jnp.bfloat16)
    assert_same(load_model(tmp_path / "new", config, dtype=jnp.bfloat16), load_model(base, config, dtype=jnp.bfloat16))
    kinds = {Checkpoint(tmp_path / "new").info(name).dtype for name in Checkpoint(tmp_path / "new").names()}
    assert kinds == {np.dtype(np.float32), np.dtype(np.int64), np.dtype(ml_dtypes.bfloat16)}


def test_unused_weights_of_split_experts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two devices with four experts each and one unused weight behind them (`stack_size`), none of them shared."""
    monkeypatch.setattr(saving, "stack_size", lambda count, *sizes: count + (count == 4))
    moe = replace(ModelConfig.from_hf(tiny_config()).moe, num_shared=0)  # type: ignore[type-var]
    ids = jnp.array([0, 1, 2, 3, 100, 4, 5, 6, 7, 100])
    stack = BlockScaled(jnp.broadcast_to(ids[:, None, None], (10, 2, 2)), jnp.arange(8.0).reshape(8, 1, 1))
    routed, _ = saving._experts("mlp", stack, moe)  # type: ignore[arg-type]
    assert [int(expert.values[0, 0]) for expert in routed] == [*range(8)]


def test_refuses_parameters_of_another_model(tiny_model: tuple[ModelConfig, Any], tmp_path: Path) -> None:
    config, params = tiny_model
    with pytest.raises(ValueError, match="has 1 layers; legal: the config's, 2"):
        save_model(tmp_path / "a", {**params, "layers": params["layers"][:1]}, config)
    layers = [dict(layer) for layer in params["layers"]]
    layers[-1]["mlp"] = {**layers[-1]["mlp"], "down": layers[-1]["mlp"]["down"][:-1]}
    with pytest.raises(ValueError, match=r"layers\.1\.mlp has 8 experts; legal: 8 routed ones, and 1 shared"):
        save_model(tmp_path / "a", {**params, "layers": layers}, config)
    with pytest.raises(ValueError, match=r"^params: embed has shape \(101, 32\); legal: \(101, 64\)"):
        save_model(tmp_path / "a", params, replace(config, hidden_size=64))
    with pytest.raises(ValueError, match=r"^params: model\.layers\.0\.mlp has width 48; legal: .* 40$"):
        save_model(tmp_path / "a", params, replace(config, intermediate_size=40))
    fields = tiny_config()
    bias = {"model.layers.0.self_attn.o_proj.bias": np.ones(32, np.float32)}
    base = write_tiny(tmp_path / "base", {**tiny_tensors(fields), **bias})
    with pytest.raises(CheckpointError, match=r"without 1 of the tensors: 'model\.layers\.0\.self_attn\.o_proj\.bias'"):
        save_model(tmp_path / "b", params, config, base=base)
    assert not (tmp_path / "b").exists()
    (tmp_path / "c").mkdir()
    with pytest.raises(CheckpointError, match="without 1 of the tensors"):
        save_model(tmp_path / "c", params, config, base=base)
    assert not list((tmp_path / "c").iterdir())
    assert json.loads((base / "config.json").read_text()) == fields
