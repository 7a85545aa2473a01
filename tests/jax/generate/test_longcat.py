"""LongCat-Flash: layers of two attentions and two MLPs, experts whose result is added late, and experts that return
their input. Logits and tokens are compared with transformers' in test_transformers.py."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.jax.generate.test_saving import assert_same
from tests.jax.generate.tiny import TINY
from tsmla_jax.generate import ModelConfig, load_model, save_model
from tsmla_jax.generate.config import MoEConfig
from tsmla_jax.generate.expert_parallel import gather_tokens, mixture_of_split_experts
from tsmla_jax.generate.mesh import MeshShape, make_mesh, param_specs
from tsmla_jax.generate.moe import mixture_of_experts
from tsmla_jax.nn import Checkpoint, MLAConfig, load_hf_attention, param_shapes
from tsmla_jax.nn.mla.names import longcat_name, stored_names

FIELDS: dict[str, Any] = {
    **{name: value for name, value in TINY.items() if name not in ("intermediate_size", "moe_intermediate_size")},
    "model_type": "longcat_flash",
    "architectures": ["LongcatFlashForCausalLM"],
    "attention_method": "MLA",
    "torch_dtype": "float32",
    "rope_theta": 10000000.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "routed_scaling_factor": 6.0,
    "num_layers": 2,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 16,
    "moe_topk": 3,
    "zero_expert_num": 4,
    "zero_expert_type": "identity",
}
FIELDS = {name: value for name, value in FIELDS.items() if name not in ("num_hidden_layers", "num_experts_per_tok")}


def test_a_published_config() -> None:
    config = ModelConfig.from_hf(FIELDS)
    assert (config.num_layers, config.mlp_layers) == (4, ("shortcut", "dense") * 2)
    assert (config.intermediate_size, config.rms_norm_eps, config.max_position_embeddings) == (48, 1e-5, 4096)
    moe = config.moe
    assert moe is not None and (moe.num_experts, moe.num_zero, moe.top_k, moe.intermediate_size) == (8, 4, 3, 16)
    assert (moe.routing, moe.scoring, moe.norm_topk_prob, moe.routed_scaling_factor) == (
        "noaux_tc", "softmax", False, 6.0,
    )  # fmt: skip
    assert moe.choice.num_experts == 12 and moe.num_shared == 0
    attention = MLAConfig.from_hf(FIELDS)
    assert config.attention == attention and attention.scale_latents
    assert attention.softmax_scale == pytest.approx(24**-0.5 * (32 / 24) ** 0.5)
    assert ModelConfig.from_hf({**FIELDS, "num_hidden_layers": 4, "use_mla": 1}) == config


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"zero_expert_type": "copy"}, "zero_expert_type: got 'copy'; legal: 'identity', None"),
        ({"norm_topk_prob": True}, "norm_topk_prob: got True; legal: False, None"),
        ({"num_hidden_layers": 3}, "num_hidden_layers: got 3; legal: 2, 4, None"),
        ({"moe_topk": None}, "field 'moe_topk' must be int, got None"),
        ({"router_bias": True}, "router_bias: got True; legal: False"),
        ({"attention_method": "LSA"}, "attention_method: got 'LSA'; legal: 'MLA'"),
        ({"mla_scale_q_lora": False}, "mla_scale_q_lora: got False; legal: True"),
        ({"q_lora_rank": None}, "q_lora_rank: got None; legal with scale_latents"),
        ({"index_topk": 2048}, "index_topk: got 2048"),
        ({"ngram_vocab_size_ratio": 78}, "ngram_vocab_size_ratio: got 78"),
    ],
)
def test_fields_that_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ModelConfig.from_hf({**FIELDS, **change})


NAMES = {
    "model.layers.3.self_attn.1.q_a_proj.weight": "model.layers.7.self_attn.q_a_proj.weight",
    "model.layers.3.mlps.0.up_proj.weight": "model.layers.6.mlp.up_proj.weight",
    "model.layers.3.input_layernorm.1.weight": "model.layers.7.input_layernorm.weight",
    "model.layers.3.mlp.router.classifier.weight": "model.layers.6.shortcut.gate.weight",
    "model.layers.3.mlp.router.e_score_correction_bias": "model.layers.6.shortcut.gate.e_score_correction_bias",
    "model.layers.3.mlp.experts.10.down_proj.weight": "model.layers.6.shortcut.experts.10.down_proj.weight",
    "model.norm.weight": "model.norm.weight",
    "model.mtp.layers.0.enorm.weight": "model.mtp.layers.0.enorm.weight",
}


def test_names_of_tensors() -> None:
    assert stored_names(NAMES) == {own: stored for stored, own in NAMES.items()}
    assert [longcat_name(own) for own in NAMES.values()] == list(NAMES)
    others = ["model.layers.0.self_attn.q_a_proj.weight", "model.layers.0.mlp.experts.0.up_proj.weight"]
    assert stored_names(others) == {name: name for name in others}


def random_tree(config: ModelConfig) -> Any:
    """Parameters as `load_model` returns them."""
    moe, hidden, attention = config.moe, config.hidden_size, config.attention
    assert moe is not None and isinstance(attention, MLAConfig)
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    layers = []
    for kind in config.mlp_layers:
        layer: dict[str, Any] = {"attention_norm": draw(hidden), "mlp_norm": draw(hidden)}
        layer["attention"] = {name: draw(*shape) for name, shape in param_shapes(attention).items()}
        layer["mlp"] = {"gate_up": draw(96, hidden), "down": draw(hidden, 48)}
        if kind == "shortcut":
            layer["shortcut"] = experts_of(moe, hidden, draw)
        layers.append(layer)
    vocabulary = (config.vocab_size, hidden)
    return {"embed": draw(*vocabulary), "norm": draw(hidden), "layers": layers, "lm_head": draw(*vocabulary)}


def experts_of(moe: MoEConfig, hidden: int, draw: Any) -> dict[str, jax.Array]:
    count, width, choices = moe.num_experts, moe.intermediate_size, moe.choice.num_experts
    return {
        "router": draw(choices, hidden), "correction_bias": 0.1 * draw(choices),
        "gate_up": draw(count, 2 * width, hidden), "down": draw(count, hidden, width),
    }  # fmt: skip


def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    """Under LongCat-Flash's names; a layer's attentions count one by one."""
    pytest.importorskip("safetensors", reason="needs safetensors: pip install 'tsmla-jax[hf]'")
    config = ModelConfig.from_hf(FIELDS)
    params = random_tree(config)
    save_model(tmp_path / "new", params, config)
    checkpoint = Checkpoint(tmp_path / "new")
    assert {"model.layers.1.self_attn.1.o_proj.weight", "model.layers.0.mlp.router.classifier.weight"} <= set(
        checkpoint.names()
    )
    assert_same(load_model(tmp_path / "new", config), params)
    save_model(tmp_path / "again", params, config, base=tmp_path / "new")
    assert_same(load_model(tmp_path / "again", config), params)
    attention = config.attention
    own = load_hf_attention(tmp_path / "new", 3, config=attention)
    assert_same(own, params["layers"][3]["attention"])
    with pytest.raises(ValueError, match=r"model\.layers\.4\.self_attn"):
        load_hf_attention(tmp_path / "new", 4, config=attention)


def test_experts_split_over_devices() -> None:
    """Two devices with tokens of their own, and two that share them."""
    moe = MoEConfig(8, 3, 16, 0, "noaux_tc", 1, 1, False, 6.0, "softmax", num_zero=4)
    rng = np.random.default_rng(1)
    params = experts_of(moe, 32, lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32))
    x, tokens = jnp.asarray(rng.normal(size=(10, 32)), jnp.float32), jnp.arange(10, dtype=jnp.int32)
    valid = tokens != 6
    want = jax.jit(partial(mixture_of_experts, config=moe))(params, x, valid, tokens=tokens)
    shape = MeshShape(expert=2, context=2)
    mesh = make_mesh(shape)
    assert mesh is not None
    layer = {"mlp": {"gate_up": jnp.zeros((2, 2)), "down": jnp.zeros((2, 1))}, "shortcut": params}
    specs = param_specs({"layers": [layer]}, 4)["layers"][0]["shortcut"]
    assert specs["gate_up"] != P() and specs["router"] == P()

    def split(params: Any, x: jax.Array, valid: jax.Array, tokens: jax.Array) -> jax.Array:
        return mixture_of_split_experts(params, x, gather_tokens(tokens, valid, shape), moe, shape)

    rows = P("expert")
    run = jax.jit(jax.shard_map(split, mesh=mesh, in_specs=(specs, rows, rows, rows), out_specs=rows, check_vma=False))
    got = run(params, x, valid, tokens)
    kept = np.asarray(valid)
    np.testing.assert_allclose(np.asarray(got)[kept], np.asarray(want)[kept], rtol=0, atol=2e-5 * np.abs(want).max())
