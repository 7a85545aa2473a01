"""Saving: what was loaded comes out as it was stored, transformers' layers take it, and the rest is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from examples.make_checkpoint import quantize_blocks
from tests.jax.nn import hf_layers
from tests.jax.nn.checkpoints import FIELDS, attention_tensors, write_sharded, write_single
from tsmla_jax.nn import (
    Checkpoint,
    CheckpointError,
    MLAConfig,
    functional,
    load_hf_attention,
    params_from_hf,
    params_to_hf,
    save_hf_attention,
    v4,
    v32,
)
from tsmla_jax.nn.checkpoints.checkpoint import INDEX_NAME, SINGLE_NAME
from tsmla_jax.nn.checkpoints.checkpoint_writer import save_checkpoint
from tsmla_jax.nn.products.block_scaled import BlockScaled
from tsmla_jax.nn.v4.names import module_name, stored_name

pytest.importorskip("safetensors", reason="needs safetensors: pip install 'tsmla-jax[hf]'")


def assert_same(got: Any, want: Any) -> None:
    """Bit by bit, names and dtypes too."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def own_tensors(fields: dict[str, Any], dtype: Any = np.float32) -> dict[str, Any]:
    prefix = "model.layers.2.self_attn."
    return {name.removeprefix(prefix): array for name, array in attention_tensors(fields, dtype=dtype).items()}


@pytest.mark.parametrize("q_lora_rank", [40, None])
@pytest.mark.parametrize("bias", [False, True])
def test_params_to_hf_inverts_params_from_hf_and_fold(q_lora_rank: int | None, bias: bool) -> None:
    fields = {**FIELDS, "q_lora_rank": q_lora_rank, "attention_bias": bias}
    config, tensors = MLAConfig.from_hf(fields), own_tensors(fields, ml_dtypes.bfloat16)
    params = params_from_hf(config, tensors)
    assert_same(params_to_hf(config, params), tensors)
    assert_same(params_to_hf(config, functional.fold(params, config)), tensors)
    wide = params_to_hf(config, params, jnp.float32)
    assert_same(wide, {name: array.astype(np.float32) for name, array in tensors.items()})


@pytest.mark.parametrize("name", ["v3.2", "sliding", "csa", "hca"])
def test_transformers_layers_take_what_is_saved(name: str, tmp_path: Path) -> None:
    """The tensors of transformers' own layer, by its names; and the file that holds them gives the same parameters."""
    case = hf_layers.case(name)
    tensors = case.family.params_to_hf(case.config, case.params)
    assert_same({key: tensors[key] for key in case.tensors}, case.tensors)
    assert len(tensors) == len(case.tensors)
    case.family.save_hf_attention(tmp_path, {case.layer: case.params}, config={case.layer: case.config})
    assert_same(case.family.load_hf_attention(tmp_path, case.layer, config=case.config), case.params)
    folded = case.family.functional.fold(case.params, case.config)
    assert_same(case.family.params_to_hf(case.config, folded), tensors)


def test_a_layer_of_transformers_computes_the_same_after_saving(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from safetensors.torch import load_file
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

    case = hf_layers.case("v3.2")
    v32.save_hf_attention(tmp_path, {0: case.params}, config=case.config)
    config = DeepseekV32Config(
        **hf_layers.V32_FIELDS, rope_parameters=dict(hf_layers.V32_ROPE), attn_implementation="eager"
    )
    layer = modeling.DeepseekV32Attention(config, 0)
    prefix = "model.layers.0.self_attn."
    layer.load_state_dict({name.removeprefix(prefix): t for name, t in load_file(tmp_path / SINGLE_NAME).items()})
    length = case.x.shape[1]
    x, positions = torch.tensor(case.x), torch.arange(length)[None].expand(2, -1)
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None].expand(2, 1, -1, -1)
    with torch.no_grad():
        rotary = modeling.DeepseekV32RotaryEmbedding(config)
        y = layer(x, rotary(x, position_ids=positions), mask, position_ids=positions)[0]
    np.testing.assert_array_equal(y.numpy(), case.y)


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_a_base_gives_everything_else(tmp_path: Path, write: Any) -> None:
    """Layer 2 is another one; layer 3, the head, a table of integers and the config are the base's."""
    base, new = tmp_path / "base", tmp_path / "new"
    base.mkdir()
    tensors = {**attention_tensors(), **attention_tensors(layer=3), "table": np.arange(5), "head": np.ones((2, 3))}
    write(base, tensors)
    (base / "tokenizer.json").write_text("{}")
    params = {name: value + 1 for name, value in load_hf_attention(base, 2).items()}
    save_hf_attention(new, {2: params}, base=base)
    assert_same(load_hf_attention(new, 2), params)
    assert_same(load_hf_attention(new, 3), load_hf_attention(base, 3))
    assert Checkpoint(new).names() == tuple(sorted(tensors))
    np.testing.assert_array_equal(Checkpoint(new).read("table"), np.arange(5))
    assert json.loads((new / "config.json").read_text()) == FIELDS and (new / "tokenizer.json").is_file()


def test_large_checkpoints_have_shards_and_an_index(tmp_path: Path) -> None:
    config = MLAConfig.from_hf(FIELDS)
    params = {layer: params_from_hf(config, own_tensors(FIELDS)) for layer in (0, 1)}
    save_hf_attention(tmp_path, params, config=config, max_shard_bytes=100_000)
    files = sorted(path.name for path in tmp_path.glob("*"))
    assert files[-1] == INDEX_NAME and len(files) > 3
    assert files[0] == f"model-00001-of-{len(files) - 1:05}.safetensors"
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    names = [f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in own_tensors(FIELDS)]
    assert sorted(index["weight_map"]) == sorted(names)
    assert index["metadata"]["total_size"] == sum(4 * p.size for layer in params.values() for p in layer.values())
    for layer in (0, 1):
        assert_same(load_hf_attention(tmp_path, layer, config=config), params[layer])


def test_block_scaled_weights_stay_so(tmp_path: Path) -> None:
    fields = {**FIELDS, "hidden_size": 256, "q_lora_rank": 128}
    config, tensors = MLAConfig.from_hf(fields), own_tensors(fields)
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"):
        tensors[f"{name}.weight"] = BlockScaled(*quantize_blocks(tensors[f"{name}.weight"]))  # type: ignore[arg-type]
    params = params_from_hf(config, tensors)
    for name, message in (
        ("kv_b_proj.weight", "tensor 'kv_b_proj.weight': got BlockScaled; legal: an array, which is split"),
        ("q_a_proj.weight", "tensor 'q_a_proj.weight' must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            params_from_hf(config, {**tensors, name: tensors["o_proj.weight"]})
    assert_same(params_to_hf(config, params, jnp.float32), tensors)
    # The first of the joined matrices has whole blocks, so that the two come apart again.
    folded = functional.fold(params, config)
    assert isinstance(folded["in_proj"], BlockScaled)
    assert_same(params_to_hf(config, folded), tensors)
    save_hf_attention(tmp_path / "base", {0: params}, config=config)
    (tmp_path / "base" / "config.json").write_text(json.dumps(fields))
    wide = load_hf_attention(tmp_path / "base", 0, dtype=jnp.float32)
    np.testing.assert_array_equal(wide["q_a_proj"].T, params["q_a_proj"].widened(jnp.float32))
    save_hf_attention(tmp_path / "again", {0: params}, base=tmp_path / "base")
    assert_same(load_hf_attention(tmp_path / "again", 0, dtype=jnp.float32), wide)
    with pytest.raises(ValueError, match=r"q_a_proj\.weight' has no block scales, and in base .* it has them; legal"):
        save_hf_attention(tmp_path / "wide", {0: wide}, base=tmp_path / "base")
    assert not (tmp_path / "wide").exists()


def test_scales_in_powers_of_two_as_v4_has_them(tmp_path: Path) -> None:
    """Under base's own name and dtype; scales that are no powers of two don't fit there."""
    values = np.ones((4, 6), ml_dtypes.float8_e4m3fn)
    base = {"a.weight": values, "a.scale": np.full((1, 1), 0.5, ml_dtypes.float8_e8m0fnu)}
    save_checkpoint(tmp_path / "base", base.items())
    given = Checkpoint(tmp_path / "base")
    new = BlockScaled(values, np.full((1, 1), 0.25, np.float32))  # type: ignore[arg-type]
    save_checkpoint(tmp_path / "new", [("a.weight", new)], base=given)
    assert Checkpoint(tmp_path / "new").info("a.scale").dtype == ml_dtypes.float8_e8m0fnu
    got = Checkpoint(tmp_path / "new").read("a.weight", dtype=np.float32)
    np.testing.assert_array_equal(got, np.full((4, 6), 0.25))
    odd = BlockScaled(values, np.full((1, 1), 0.3, np.float32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'a\.scale' is float8_e8m0fnu in base"):
        save_checkpoint(tmp_path / "odd", [("a.weight", odd)], base=given)


def test_refuses_what_it_cannot_save(tmp_path: Path) -> None:
    config = MLAConfig.from_hf(FIELDS)
    params = params_from_hf(config, own_tensors(FIELDS))
    without = {name: value for name, value in params.items() if name != "w_uv"}
    with pytest.raises(ValueError, match="params: 'w_uv' is missing"):
        params_to_hf(config, without)
    with pytest.raises(ValueError, match="params: 'sinks' is unknown"):
        params_to_hf(config, {**params, "sinks": jnp.zeros(3)})
    with pytest.raises(ValueError, match="w_uk is float32 and w_uv bfloat16; legal: one dtype"):
        params_to_hf(config, {**params, "w_uv": params["w_uv"].astype(jnp.bfloat16)})
    with pytest.raises(ValueError, match="dtype: got float8_e4m3fn; legal: float32, bfloat16, float16"):
        params_to_hf(config, params, jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="config: got None without a base; legal"):
        save_hf_attention(tmp_path / "a", {0: params})
    with pytest.raises(ValueError, match="config: layer 0 is missing"):
        save_hf_attention(tmp_path / "a", {0: params}, config={1: config})
    with pytest.raises(ValueError, match=r"layers: got indices \[\]"):
        save_hf_attention(tmp_path / "a", {}, config=config)
    with pytest.raises(ValueError, match="max_shard_bytes: got 0; legal"):
        save_hf_attention(tmp_path / "a", {0: params}, config=config, max_shard_bytes=0)
    with pytest.raises(ValueError, match="comes twice"):
        save_hf_attention(tmp_path / "a", {0: params, 1: params}, config=config, prefix="self_attn.")
    assert not (tmp_path / "a").exists()
    save_hf_attention(tmp_path / "a", {0: params}, config=config)
    with pytest.raises(ValueError, match=r"model\.safetensors: is there already"):
        save_hf_attention(tmp_path / "a", {0: params}, config=config)
    with pytest.raises(CheckpointError, match=r"layers\.1\..* is missing"):
        save_hf_attention(tmp_path / "b", {1: params}, config=config, base=tmp_path / "a")


def test_loading_refuses_a_layers_other_tensors(tmp_path: Path) -> None:
    """As `load_model` does; rope's frequencies are no weights, and other layers' tensors are no concern."""
    start = "model.layers.2.self_attn."
    extra = {f"{start}o_proj.bias": np.ones(200, np.float32)}
    (tmp_path / "bias").mkdir()
    write_single(tmp_path / "bias", {**attention_tensors(), **extra})
    with pytest.raises(CheckpointError, match=r"without 1 of the tensors: 'model\.layers\.2\.self_attn\.o_proj\.bias'"):
        load_hf_attention(tmp_path / "bias", 2)
    kept = {f"{start}rotary_emb.inv_freq": np.ones(4, np.float32), "model.layers.1.self_attn.o_proj.bias": np.ones(1)}
    write_single(tmp_path, {**attention_tensors(), **kept})
    assert load_hf_attention(tmp_path, 2)["o_proj"].shape == (3, 20, 200)


def test_v4_names_are_inverted() -> None:
    for name in ("csa", "hca", "sliding"):
        case = hf_layers.case(name)
        for tensor in v4.hf_attention_shapes(case.config):
            whole = f"model.layers.0.self_attn.{tensor}"
            assert stored_name(whole) != whole and module_name(stored_name(whole)) == whole


def test_mistrals_index_of_base_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    write_single(tmp_path / "base", {"a.weight": np.ones((2, 3), np.float32)})
    (tmp_path / "base" / SINGLE_NAME).rename(tmp_path / "base" / "consolidated-1.safetensors")
    index = {"weight_map": {"a.weight": "consolidated-1.safetensors"}}
    (tmp_path / "base" / "consolidated.safetensors.index.json").write_text(json.dumps(index))
    new = np.full((2, 3), 2.0, np.float32)
    save_checkpoint(tmp_path / "new", [("a.weight", new)], base=Checkpoint(tmp_path / "base"))
    np.testing.assert_array_equal(Checkpoint(tmp_path / "new").read("a.weight", dtype=np.float32), new)
