"""Models that store DeepSeek's tensors: those whose layer is DeepSeek's are computed, the others refused by name."""

import functools
import importlib
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax.nn.conftest import TINY, YARN
from tests.jax.nn.hf_fields import V3
from tests.jax.nn.hf_layers import V4_FIELDS, V4_YARN, V32_FIELDS
from tsmla_jax.nn import MLAConfig, QueryScale, V4Config, V32Config, functional, load_hf_attention, params_from_hf, v32
from tsmla_jax.nn.checkpoints.known_fields import MLA_TYPES, V4_TYPES, V32_TYPES, check_mla

V32: dict[str, Any] = {
    **V3,
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
V4: dict[str, Any] = {**V4_FIELDS, "model_type": "deepseek_v4", "index_topk": 5, "rope_scaling": V4_YARN}

# Where transformers has the layer of a model type: its package, and the prefix of its classes.
SAME_LAYERS = {
    "axk1": ("axk1", "AXK1"),
    "bailing_hybrid": ("bailing_hybrid", "BailingHybrid"),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3"),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLite"),
    "kimi_linear": ("kimi_linear", "KimiLinear"),
    "longcat_flash": ("longcat_flash", "LongcatFlash"),
    "mistral4": ("mistral4", "Mistral4"),
    "sarvam_mla": ("deepseek_v3", "DeepseekV3"),
    "youtu": ("youtu", "Youtu"),
}


def module(package: str, kind: str) -> Any:
    """transformers' "configuration" or "modeling" of a model."""
    pytest.importorskip("transformers", reason="has the other models: pip install 'tsmla-jax[dev]'")
    return importlib.import_module(f"transformers.models.{package}.{kind}_{package}")


def hf_config(package: str, **fields: Any) -> Any:
    """A configuration of the model that has latents: the package's first one with kv_lora_rank."""
    found = vars(module(package, "configuration")).values()
    owner = next(one for one in found if isinstance(one, type) and "kv_lora_rank" in dir(one))
    return owner(**fields)


@functools.cache
def prefill() -> Any:
    return jax.jit(functional.prefill, static_argnames=("config", "max_q_len"))


@pytest.mark.parametrize("model_type", SAME_LAYERS)
def test_the_same_layer(model_type: str) -> None:
    """One program serves all but five models: their configs are equal. mistral4's text crosses the steps
    of its queries' factor twice."""
    package, name = SAME_LAYERS[model_type]
    modeling = module(package, "modeling")
    import torch

    rope: dict[str, Any] = {"rope_scaling": dict(YARN)}
    if model_type == "mistral4":
        more = {"rope_theta": 1e4, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}
        rope = {"rope_parameters": {**YARN, **more}}
    rope |= {"head_dim": TINY["qk_rope_head_dim"]} if model_type == "longcat_flash" else {}
    fields = {**TINY, "q_lora_rank": 48, "attn_implementation": "eager", **rope}
    theirs = hf_config(model_type, **fields)
    torch.manual_seed(4)
    kind = "MLA" if model_type == "longcat_flash" else "Attention"
    layer = getattr(modeling, f"{name}{kind}")(theirs, 0)
    for key, parameter in layer.named_parameters():
        scale, shift = (0.2, 1.0) if "layernorm" in key else (parameter.shape[-1] ** -0.5, 0.0)
        parameter.data = torch.randn_like(parameter) * scale + shift
    x, positions = torch.randn(1, 40, TINY["hidden_size"]), torch.arange(40)[None]
    mask = torch.full((40, 40), torch.finfo(torch.float32).min).triu(1)[None, None]
    given: dict[str, Any] = {"position_ids": positions} if model_type == "mistral4" else {}
    if model_type != "kimi_linear":
        given["position_embeddings"] = getattr(modeling, f"{name}RotaryEmbedding")(theirs)(x, positions)
    with torch.no_grad():
        y = layer(hidden_states=x, attention_mask=mask, **given)[0][0].numpy()

    saved = json.loads(theirs.to_json_string())
    assert saved["model_type"] == model_type
    config = MLAConfig.from_hf(saved)
    params = params_from_hf(config, {key: value.numpy() for key, value in layer.state_dict().items()})
    cu_seqlens = jnp.asarray([0, 40], jnp.int32)
    ours = prefill()(params, config, jnp.asarray(x[0].numpy()), cu_seqlens_q=cu_seqlens, max_q_len=40)[0]
    np.testing.assert_allclose(ours, y, rtol=0, atol=2e-6 * np.abs(y).max())


def test_every_model_type_is_compared() -> None:
    """V3.2, GLM-5 and V4 elsewhere, Kimi-K3 in test_hybrid_layers.py; Kimi-K2 has no layer of its own in transformers,
    which reads them as V3's."""
    assert set(SAME_LAYERS) == set(MLA_TYPES) - {"kimi_k2", "kimi_k3", *V32_TYPES}


def packages_with_latents() -> list[str]:
    """Models of transformers whose configuration has latents."""
    transformers = pytest.importorskip("transformers", reason="has the other models: pip install 'tsmla-jax[dev]'")
    files = (Path(transformers.__file__).parent / "models").glob("*/configuration_*.py")
    return sorted(
        file.parent.name for file in files if re.search(r"^    kv_lora_rank: ", file.read_text(), re.MULTILINE)
    )


def test_other_models_are_refused_by_name() -> None:
    known = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite"}
    refused = set()
    for package in packages_with_latents():
        fields = json.loads(hf_config(package).to_json_string())
        model_type = fields["model_type"]
        if model_type in (*MLA_TYPES, *V4_TYPES):
            known.add(model_type)
            continue
        refused.add(model_type)
        for read in (MLAConfig.from_hf, V32Config.from_hf, lambda fields: V4Config.from_hf(fields, 0)):
            with pytest.raises(ValueError, match=f"^config: model_type: got '{model_type}'; legal: .*deepseek_v"):
                read(fields)
    assert refused >= {"glm5_next_text", "minicpm3"}
    assert known <= {*MLA_TYPES, *V4_TYPES}


def test_a_layer_of_another_model_is_refused(tmp_path: Path) -> None:
    """Before any tensor is looked for."""
    pytest.importorskip("safetensors", reason="needs safetensors: pip install 'tsmla-jax[hf]'")
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    for fields, load in (
        ({**V32, "model_type": "glm5_next"}, v32.load_hf_attention),
        ({**V3, "model_type": "minicpm3"}, load_hf_attention),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        with pytest.raises(ValueError, match=f"config.json: model_type: got '{fields['model_type']}'; legal: "):
            load(tmp_path, 0)


def test_a_field_of_another_deepseek_model_is_refused_as_such() -> None:
    with pytest.raises(ValueError, match="index_topk: got 2048; legal: None, as models of this type have no such f"):
        MLAConfig.from_hf({**V3, "model_type": "deepseek_v3", "index_topk": 2048})


def test_a_config_without_a_model_type_is_taken_by_its_fields() -> None:
    for fields, read in ((V3, MLAConfig.from_hf), (V32, V32Config.from_hf), (V32, MLAConfig.from_hf)):
        assert read({key: value for key, value in fields.items() if key != "model_type"}) == read(fields)
    assert V32_TYPES == ("deepseek_v32", "glm_moe_dsa")


MISTRAL: dict[str, Any] = {
    **{name: value for name, value in V3.items() if name not in ("rope_scaling", "rope_theta")},
    "model_type": "mistral4",
    "qk_nope_head_dim": 64,
    "kv_lora_rank": 256,
    "max_position_embeddings": 1048576,
    "rope_parameters": {
        "type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "max_position_embeddings": 1048576,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
        "partial_rotary_factor": 0.5,
    },
}


def test_the_query_scale_of_mistral() -> None:
    """Fields as transformers' defaults, which are those of Mistral Small 4."""
    assert MLAConfig.from_hf(MISTRAL).query_scale == QueryScale(0.1, 8192)
    rope = MISTRAL["rope_parameters"]
    for change, text in (
        ({"partial_rotary_factor": 0.25}, r"partial_rotary_factor: got 0\.25; legal: 1, 0\.5, None"),
        ({"llama_4_scaling_beta": "0.1"}, "field 'llama_4_scaling_beta' must be float"),
        ({"attn_factor": 2}, "attn_factor: got 2"),
        ({"max_position_embeddings": 8192}, "'rope_parameters.max_position_embeddings' disagree: 1048576 and 8192"),
    ):
        with pytest.raises(ValueError, match=text):
            MLAConfig.from_hf({**MISTRAL, "rope_parameters": {**rope, **change}})
    without = {**MISTRAL, "rope_parameters": {**rope, "llama_4_scaling_beta": 0}}
    assert MLAConfig.from_hf(without).query_scale is None
    fewer = {key: rope[key] for key in rope if key not in ("max_position_embeddings", "partial_rotary_factor")}
    with pytest.raises(ValueError, match=r"llama_4_scaling_beta: got 0\.1; legal: 0, None"):
        MLAConfig.from_hf({**MISTRAL, "model_type": "deepseek_v3", "rope_parameters": fewer})


@pytest.mark.parametrize(
    ("model_type", "legal"),
    [("kimi_linear", "full_attention' or 'linear_attention"), ("deepseek_v3", "full_attention")],
)
def test_an_error_names_every_legal_kind_of_layer(model_type: str, legal: str) -> None:
    with pytest.raises(ValueError, match=f"layer_types: got .*; legal: '{legal}' for each layer"):
        check_mla({"model_type": model_type, "layer_types": ["window"]}, "config")


OTHER_LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("mla", {"mla_scale_q_lora": True}),
    ("mla", {"mla_scale_kv_lora": True}),
    ("mla", {"llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 8192}}),
    ("mla", {"attn_output_gate": True}),
    ("mla", {"mla_use_output_gate": True}),
    ("mla", {"mla_use_nope": True}),
    ("mla", {"use_mla": False}),
    ("mla", {"use_qk_norm": True}),
    ("mla", {"no_rope_layers": [1, 0]}),
    ("mla", {"attention_multiplier": 0.5}),
    ("mla", {"attn_logit_softcapping": 30.0}),
    ("mla", {"add_full_attention_sink_bias": True}),
    ("mla", {"sliding_window": 128}),
    ("mla", {"layer_types": ["full_attention", "linear_attention"]}),
    ("mla", {"linear_attn_config": {"kda_layers": [1]}}),
    ("mla", {"layer_group_size": 4}),
    ("mla", {"partial_rotary_factor": 0.5}),
    ("mla", {"original_max_position_embeddings": 8192}),
    ("mla", {"qk_head_dim": 128}),
    ("mla", {"index_topk": 2048}),
    ("mla", {"use_bidirectional_attention": True}),
    ("v32", {"mla_scale_q_lora": True}),
    ("v32", {"index_topk_freq": 4}),
    ("v32", {"index_topk_pattern": "FFSS"}),
    ("v32", {"indexer_types": ["full", "shared"]}),
    ("v32", {"indexer_rope_interleave": True}),
    ("v32", {"index_k_norm_type": "rms"}),
    ("v32", {"index_kpool": 4}),
    ("v32", {"index_local_tokens": 64}),
    ("v32", {"use_index_cache": True}),
    ("v32", {"cli_factor": 2}),
    ("v32", {"layer_types": ["indexed_attention", "full_attention"]}),
    ("v4", {"index_topk_freq": 2}),
    ("v4", {"indexer_types": ["full", "full", "shared"]}),
    ("v4", {"kv_source_layer_ids": [0]}),
    ("v4", {"index_source_layer_ids": [0]}),
    ("v4", {"candidate_source_layer_id": 1}),
    ("v4", {"candidate_topk_blocks": 8}),
    ("v4", {"engram_layer_ids": [1]}),
    ("v4", {"q_head_norm": False}),
    ("v4", {"attention_bias": True}),
    ("v4", {"num_key_value_heads": 2}),
    ("v4", {"window_size": 64}),
    ("v4", {"partial_rotary_factor": 0.5}),
]
GLM: dict[str, Any] = {
    **{name: value for name, value in V32.items() if name != "rope_scaling"},
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 7,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": V32["rope_theta"]},
}


@pytest.mark.parametrize(
    ("change", "full"),
    [
        ({}, "1111111"),
        ({"index_topk_freq": 1}, "1111111"),
        ({"index_topk_freq": 3}, "1100100"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 3}, "1110010"),
        ({"index_topk_pattern": "FSSFSSF"}, "1001001"),
        ({"indexer_types": ["full", *["shared"] * 7], "index_topk_freq": 3}, "1000000"),
        (
            {
                "indexer_types": ["full"] * 3 + ["shared"] * 2 + ["full", "shared"],
                "index_topk_freq": 3,
                "index_skip_topk_offset": 3,
            },
            "1110010",
        ),
    ],
)
def test_which_layers_share_a_choice(change: dict[str, Any], full: str) -> None:
    """As transformers' configuration says, and each layer's own config."""
    theirs = hf_config("glm_moe_dsa", **{name: x for name, x in {**GLM, **change}.items() if name != "model_type"})
    assert "".join(str(int(kind == "full")) for kind in theirs.indexer_types[:7]) == full
    for fields in ({**GLM, **change}, json.loads(theirs.to_json_string())):
        configs = [V32Config.from_hf(fields, layer) for layer in range(7)]
        assert "".join(str(int(config.has_indexer)) for config in configs) == full
        assert all(config.index_rope_interleave for config in configs)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"indexer_types": ["shared"] + ["full"] * 6}, "indexer_types: the first layer has no indexer"),
        ({"indexer_types": ["full"] * 6}, "indexer_types: got 6 entries; legal: one for each of 7 layers"),
        ({"indexer_types": ["full"] * 6 + ["none"]}, "indexer_types: got .*; legal: 'full' or 'shared' for each layer"),
        ({"index_topk_freq": 0}, "index_topk_freq: got 0; legal: at least 1"),
        ({"index_skip_topk_offset": 0}, "index_skip_topk_offset: got 0; legal: at least 1"),
        (
            {"indexer_types": ["full"] * 7, "index_topk_freq": 4, "index_skip_topk_offset": 3},
            "indexer_types and index_topk_freq disagree on whether layer 3 has an indexer",
        ),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave: got False; legal: True"),
        ({"rope_interleave": False}, "rope_interleave: got False; legal: True"),
        ({"index_kpool": 4}, "index_kpool: got 4"),
        ({"mla_scale_q_lora": True}, "mla_scale_q_lora: got True"),
    ],
)
def test_glm_fields_that_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        V32Config.from_hf({**GLM, **change})
    with pytest.raises(ValueError, match="layer: got 7; legal: 0 to 6"):
        V32Config.from_hf(GLM, 7)
    with pytest.raises(ValueError, match="layer: got -1; legal: an int >= 0"):
        V32Config.from_hf(GLM, -1)
    with pytest.raises(TypeError, match="layer: got str; legal: a static int >= 0"):
        V32Config.from_hf(GLM, "1")  # type: ignore[arg-type]


READ = {
    "mla": (V3, MLAConfig.from_hf),
    "v32": (V32, V32Config.from_hf),
    "v4": (V4, lambda fields: V4Config.from_hf(fields, 1)),
}


@pytest.mark.parametrize(
    ("family", "change"), OTHER_LAYERS, ids=lambda value: "-".join(value) if isinstance(value, dict) else value
)
def test_fields_of_another_layer(family: str, change: dict[str, Any]) -> None:
    fields, read = READ[family]
    (name,) = change
    with pytest.raises(ValueError, match=rf"\b{name}\b.*"):
        read({**fields, **change})


@pytest.mark.parametrize("family", READ)
def test_fields_that_say_nothing(family: str) -> None:
    """Null, the default, or about training, drafts and how to compute."""
    fields, read = READ[family]
    nothing = {name: None for one, change in OTHER_LAYERS if one == family for name in change}
    nothing |= {
        "attention_dropout": 0.1,
        "attn_implementation": "sdpa",
        "use_flash_attention": True,
        "mtp_loss_scaling_factor": 0.3,
    }
    nothing |= {"mla_scale_q_lora": False, "attn_output_gate": False, "linear_attn_config": {}, "index_local_tokens": 0}
    nothing |= {"residual_multiplier": 1.0}
    if family == "mla":
        nothing |= {"layer_types": ["full_attention"] * 2, "sliding_window": 4096, "use_sliding_window": False}
        nothing |= {"partial_rotary_factor": 1.0, "qk_head_dim": 192, "use_mla": True, "index_topk": None}
    else:
        nothing |= {"index_topk_freq": 1, "index_topk_pattern": "FFF", "indexer_types": ["full"] * 3}
        nothing |= {"indexer_rope_interleave": False, "index_skip_topk_offset": 2}
    if family == "v4":
        nothing |= {
            "candidate_source_layer_id": -1,
            "engram_layer_ids": [],
            "q_head_norm": True,
            "num_key_value_heads": 1,
        }
    assert read({**fields, **nothing}) == read(fields)


ROPE_KEYS: dict[str, Any] = {
    "apply_yarn_scaling": False,
    "attn_factor": 0.87,
    "extrapolation_factor": 2.0,
    "truncate": False,
    "llama_4_scaling_beta": 0.1,
    "mrope_section": [8, 12, 12],
    "low_freq_factor": 1.0,
    "partial_rotary_factor": 0.5,
    "a_key_of_tomorrow": 3,
}


@pytest.mark.parametrize("family", READ)
@pytest.mark.parametrize("key", ROPE_KEYS)
def test_unknown_keys_of_rope(family: str, key: str) -> None:
    fields, read = READ[family]
    for group in ("rope_scaling", "rope_parameters"):
        scaling = {**fields["rope_scaling"], key: ROPE_KEYS[key]}
        changed = {**fields, "rope_scaling": None, group: scaling}
        with pytest.raises(ValueError, match=rf"{key}: got "):
            read(changed)


@pytest.mark.parametrize("family", READ)
def test_keys_of_rope_that_say_nothing(family: str) -> None:
    fields, read = READ[family]
    default = {"apply_yarn_scaling": True, "attn_factor": 1.0, "extrapolation_factor": 1, "truncate": True}
    scaling = {**fields["rope_scaling"], **default, "finetuned": True, "mrope_section": None, "llama_4_scaling_beta": 0}
    assert read({**fields, "rope_scaling": scaling}) == read(fields)


@pytest.mark.parametrize(
    ("scaling", "text"),
    [
        ({"factor": 40}, "rope_scaling.factor: got 40; legal: 1 or None with rope_type 'default'"),
        ({"rope_type": "default", "attention_factor": 2.0}, "rope_scaling.attention_factor: got 2.0; legal: 1 or None"),
        ({**YARN, "factor": float("inf")}, "factor: got inf; legal: a finite number"),
        ({**YARN, "mscale": float("nan")}, "mscale: got nan; legal: a finite number"),
        ({**YARN, "attention_factor": 0.0}, "attention_factor: got 0.0; legal: above 0"),
        ({"full_attention": YARN}, "rope_scaling.full_attention: got "),
    ],
)
def test_values_of_rope(scaling: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        MLAConfig.from_hf({**V3, "rope_scaling": scaling})
    with pytest.raises(ValueError, match="rope_theta: got inf; legal: a finite number"):
        MLAConfig.from_hf({**V3, "rope_theta": float("inf")})
    with pytest.raises(ValueError, match="field 'rope_theta' must be float, got an integer past float64"):
        MLAConfig.from_hf({**V3, "rope_theta": 10**400})


def test_v4_rope_of_two_spellings() -> None:
    nested = {
        "main": {"rope_theta": 10000.0},
        "compress": {**V4_YARN, "rope_theta": 40000.0, "partial_rotary_factor": 0.25},
    }
    fields = {key: value for key, value in V4.items() if key != "rope_scaling"}
    assert V4Config.from_hf({**fields, "rope_parameters": nested}, 1) == V4Config.from_hf(V4, 1)
    for change, text in (
        ({**V4, "rope_parameters": nested}, "'rope_scaling' and 'rope_parameters' disagree"),
        ({**fields, "rope_parameters": {**nested, "truncate": False}}, "rope_parameters: got 'truncate'"),
        ({**fields, "rope_parameters": {"compress": nested["compress"]}}, "rope_parameters.compress: got "),
        (
            {**fields, "rope_parameters": {**nested, "compress": {**nested["compress"], "partial_rotary_factor": 0.5}}},
            r"rope_parameters.compress: partial_rotary_factor: got 0.5; legal: 8 / 32, the rotated part of head_dim",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            V4Config.from_hf(change, 1)


def test_v4_partial_rotary_factor_is_not_cut() -> None:
    """100 * 0.58 is 57.99999999999999."""
    fields = V4 | {"head_dim": 100, "index_head_dim": 100, "partial_rotary_factor": 0.58}
    assert V4Config.from_hf(fields | {"qk_rope_head_dim": 58}, 1).rope_dim == 58
    assert V4Config.from_hf(fields | {"qk_rope_head_dim": None}, 1).rope_dim == 58


def test_v32_fields_of_transformers() -> None:
    """What it saves says nothing more than its defaults."""
    saved = json.loads(hf_config("deepseek_v32", **V32_FIELDS).to_json_string())
    assert V32Config.from_hf(saved).index_topk == V32_FIELDS["index_topk"]
