"""MLAConfig: known models, both spellings of rope, and refused fields."""

import copy
import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax.nn.hf_fields import V3
from tsmla_jax.nn import MLAConfig, QueryScale, V4Config, V32Config, YarnConfig
from tsmla_jax.nn.mla.rope import apply_rope, rope_cos_sin
from tsmla_jax.nn.yarn import inverse_frequencies, yarn_mscale

V2_SCALING = {**V3["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707}
V2 = {**V3, "hidden_size": 5120, "rope_scaling": V2_SCALING}
V2_LITE = {**V2, "hidden_size": 2048, "num_attention_heads": 16, "q_lora_rank": None}
KIMI_K2 = {
    **V3,
    "num_attention_heads": 64,
    "rope_theta": 50000.0,
    "rope_scaling": {**V3["rope_scaling"], "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
}


@pytest.mark.parametrize(
    ("fields", "scale"),
    [(V3, 0.1352337789), (V2, 0.1147213868), (V2_LITE, 0.1147213868), (KIMI_K2, 0.1308608)],
    ids=["v3", "v2", "v2-lite", "kimi-k2"],
)
def test_known_softmax_scales(fields: dict[str, Any], scale: float) -> None:
    config = MLAConfig.from_hf(fields)
    assert config.softmax_scale == pytest.approx(scale, rel=1e-7)
    assert config.rope_magnitude == 1.0
    assert config.q_lora_rank == fields["q_lora_rank"]
    assert (config.num_attention_heads, config.cache_dim, config.qk_head_dim) == (
        fields["num_attention_heads"],
        576,
        192,
    )


def test_softmax_scale_without_mscale_all_dim_is_plain() -> None:
    plain = MLAConfig(hidden_size=8, num_attention_heads=1)
    assert plain.softmax_scale == 192**-0.5
    yarn = dataclasses.replace(plain, yarn=YarnConfig(40.0, 4096))
    assert yarn.softmax_scale == 192**-0.5
    # ms(40, 1) / ms(40, 0), and then the ratio of two different ones.
    assert yarn.rope_magnitude == pytest.approx(0.1 * math.log(40) + 1)
    both = dataclasses.replace(plain, yarn=YarnConfig(40.0, 4096, mscale=0.5, mscale_all_dim=1.0))
    assert both.rope_magnitude == pytest.approx((0.05 * math.log(40) + 1) / (0.1 * math.log(40) + 1))
    assert yarn_mscale(1.0, 1.0) == 1.0


def test_transformers_5_spelling() -> None:
    scaling = {key: value for key, value in V3["rope_scaling"].items() if key != "type"}
    new = {"rope_theta": 10000, "rope_type": "yarn", **scaling}
    without = {key: value for key, value in V3.items() if key not in ("rope_theta", "rope_scaling")}
    old = MLAConfig.from_hf(V3)
    assert MLAConfig.from_hf({**without, "rope_parameters": new}) == old
    assert MLAConfig.from_hf({**V3, "rope_parameters": new}) == old
    assert MLAConfig.from_hf({**V3, "rope_scaling": None, "rope_parameters": new}) == old
    plain = MLAConfig.from_hf({**without, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}})
    assert plain.yarn is None and plain.rope_theta == 500.0


def test_config_saved_by_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="writes the config: pip install 'tsmla-jax[dev]'")
    for name, fields in (("DeepseekV3Config", V3), ("DeepseekV2Config", V2_LITE)):
        own = copy.deepcopy({key: value for key, value in fields.items() if key != "model_type"})
        getattr(transformers, name)(**own).save_pretrained(tmp_path)
        assert MLAConfig.from_hf(tmp_path) == MLAConfig.from_hf(fields)


def test_reads_a_file_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3))
    assert MLAConfig.from_hf(tmp_path) == MLAConfig.from_hf(str(tmp_path / "config.json")) == MLAConfig.from_hf(V3)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kv_lora_rank": None}, "field 'kv_lora_rank' must be int, got None"),
        ({"kv_lora_rank": "512"}, "field 'kv_lora_rank' must be int, got '512'"),
        ({"hidden_size": 0}, "hidden_size: got 0; legal: a positive integer"),
        ({"hidden_size": True}, "field 'hidden_size' must be int, got True"),
        ({"q_lora_rank": 1.5}, "field 'q_lora_rank' must be int, got 1.5"),
        ({"q_lora_rank": -1}, "q_lora_rank: got -1; legal: a positive integer or None"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: got 63; legal: even"),
        ({"rope_theta": None}, "field 'rope_theta' is missing"),
        ({"rope_theta": "1e4"}, "field 'rope_theta' must be float"),
        ({"rope_scaling": "yarn"}, "field 'rope_scaling' must be dict"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "'rope_scaling.type' must be 'default' or 'yarn', got 'lin",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: field 'factor' is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "field 'original_max_position_embeddings' is missing"),
        ({"rope_scaling": {**V2_SCALING, "factor": 0.5}}, "factor: got 0.5; legal: at least 1"),
        ({"rope_scaling": {**V2_SCALING, "truncate": False}}, "rope_scaling.truncate: got False; legal: True"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "'rope_theta' and 'rope_parameters.rope_theta' disagree"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor: got 0.5; l"),
        ({"rope_interleave": "yes"}, "field 'rope_interleave' must be bool"),
    ],
)
def test_bad_fields(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as error:
        MLAConfig.from_hf({**V3, **change})
    assert text in str(error.value)


@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "v_head_dim", "q_lora_rank", "rope_theta"])
def test_missing_fields(name: str) -> None:
    with pytest.raises(ValueError, match=f"field '{name}' is missing"):
        MLAConfig.from_hf({key: value for key, value in V3.items() if key != name})


def test_a_model_without_mla_lacks_the_latent() -> None:
    with pytest.raises(ValueError, match="field 'kv_lora_rank' is missing"):
        MLAConfig.from_hf({"hidden_size": 64, "num_attention_heads": 4})


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ValueError, match=r"config\.json: cannot read the config"):
        MLAConfig.from_hf(tmp_path)
    with pytest.raises(ValueError, match=r"^deepseek-ai/DeepSeek-V3: .* no such file; .*nothing is downloaded"):
        MLAConfig.from_hf("deepseek-ai/DeepSeek-V3")
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: cannot be read as JSON"):
        MLAConfig.from_hf(tmp_path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json: must hold a JSON object, got list"):
        MLAConfig.from_hf(tmp_path)
    path.write_text(json.dumps({**V3, "v_head_dim": -3}))
    with pytest.raises(ValueError, match=r"config\.json: MLAConfig: v_head_dim: got -3"):
        MLAConfig.from_hf(tmp_path)
    with pytest.raises(TypeError, match="source: got int; legal: a mapping, or the path"):
        MLAConfig.from_hf(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (partial(MLAConfig, 8, 1), "rope_theta"),
        (partial(MLAConfig, 8, 1), "a_layernorm_eps"),
        (partial(QueryScale, period=8), "beta"),
        (partial(V4Config, "csa", hidden_size=8, num_attention_heads=8, q_lora_rank=8), "ratio"),
        (partial(V4Config, "csa", 4, 8, 8, 8), "rope_theta"),
        (partial(V4Config, "csa", 4, 8, 8, 8), "rms_norm_eps"),
        (partial(YarnConfig, original_max_position_embeddings=8), "factor"),
        (partial(YarnConfig, 2.0, 8), "attention_factor"),
    ],
)
def test_a_text_in_place_of_a_number_is_refused_by_name(make: partial[object], name: str) -> None:
    with pytest.raises(ValueError, match=rf"{make.func.__name__}: {name}: got '2'; legal: "):
        make(**{name: "2"})


def test_bad_direct_values() -> None:
    with pytest.raises(ValueError, match="rope_layout: got 'pairs'; legal: 'interleaved' or 'halves'"):
        MLAConfig(hidden_size=8, num_attention_heads=1, rope_layout="pairs")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rope_theta: got 0\.5; legal: a finite number above 1"):
        MLAConfig(hidden_size=8, num_attention_heads=1, rope_theta=0.5)
    for value in (-1e-6, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"a_layernorm_eps: got {value}; legal: a finite number, at least 0"):
            MLAConfig(hidden_size=8, num_attention_heads=1, a_layernorm_eps=value)
    with pytest.raises(ValueError, match="rope_theta: got inf; legal: a finite number above 1"):
        MLAConfig(hidden_size=8, num_attention_heads=1, rope_theta=float("inf"))
    with pytest.raises(ValueError, match=r"beta: got -0\.5; legal: a finite number, at least 0"):
        QueryScale(-0.5, 8192)
    with pytest.raises(ValueError, match="period: got 0; legal: a positive integer"):
        QueryScale(0.1, 0)
    scaled = MLAConfig(hidden_size=8, num_attention_heads=1, q_lora_rank=4, query_scale=QueryScale(0.1, 8192))
    with pytest.raises(ValueError, match=r"mla\.query_scale: got QueryScale\(.*\); legal: None"):
        V32Config(scaled)


def test_yarn_frequencies_of_v3() -> None:
    """64 ln(4096 / (32 * 2 pi)) / (2 ln 1e4) = 10.47, and for one rotation 22.51: kept up to 10, over 40 from 23."""
    config = MLAConfig.from_hf(V3)
    base = 10000.0 ** (-np.arange(32) / 32)
    frequencies = inverse_frequencies(64, config.rope_theta, config.yarn)
    ratio = frequencies / base
    np.testing.assert_allclose(ratio[:11], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[23:], 1 / 40, rtol=1e-6)
    np.testing.assert_allclose(ratio[16], 1 + 6 / 13 * (1 / 40 - 1), rtol=1e-6)
    assert frequencies.dtype == np.float32


def test_yarn_frequencies_of_kimi_k2() -> None:
    """Both boundaries are one rotation, 64 ln(4096 / (2 pi)) / (2 ln 5e4) = 19.16: a step between pairs 19 and 20."""
    config = MLAConfig.from_hf(KIMI_K2)
    ratio = inverse_frequencies(64, config.rope_theta, config.yarn) * 50000.0 ** (np.arange(32) / 32)
    np.testing.assert_allclose(ratio, np.where(np.arange(32) < 20, 1.0, 1 / 32), rtol=1e-6)


def test_layouts_hold_the_same_values() -> None:
    """Pairs and halves are permutations of each other, and rotate pair i by position * frequency i."""
    pairs = MLAConfig(hidden_size=8, num_attention_heads=1, qk_rope_head_dim=8)
    halves = dataclasses.replace(pairs, rope_layout="halves")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 8)), jnp.float32)
    positions = jnp.asarray([0, 1, 5, 100, 4097], jnp.int32)
    cos, sin = rope_cos_sin(pairs, positions)
    in_pairs = np.asarray(apply_rope(pairs, x, cos, sin))
    in_halves = np.asarray(apply_rope(halves, x, cos, sin))
    np.testing.assert_array_equal(in_halves, np.concatenate([in_pairs[:, 0::2], in_pairs[:, 1::2]], axis=1))
    as_complex = np.asarray(x[:, 0::2]) + 1j * np.asarray(x[:, 1::2])
    angle = np.asarray(positions)[:, None] * 10000.0 ** (-np.arange(4) / 4)
    rotated = as_complex * np.exp(1j * angle)
    np.testing.assert_allclose(in_pairs[:, 0::2], rotated.real, atol=1e-3)
    np.testing.assert_allclose(in_pairs[:, 1::2], rotated.imag, atol=1e-3)
    # A checkpoint whose columns are halves already, of the same values, rotates to the same.
    as_halves = dataclasses.replace(halves, rope_interleave=False)
    permuted = jnp.concatenate([x[:, 0::2], x[:, 1::2]], axis=1)
    np.testing.assert_array_equal(np.asarray(apply_rope(as_halves, permuted, cos, sin)), in_halves)


def test_from_hf_keeps_the_checkpoints_order() -> None:
    assert MLAConfig.from_hf(V3).rope_layout == "interleaved"
    assert MLAConfig.from_hf(V3, rope_layout="halves").rope_layout == "halves"
    assert MLAConfig.from_hf({**V3, "rope_interleave": False}).rope_layout == "halves"


def test_a_config_is_static_under_jit() -> None:
    import jax
    import jax.numpy as jnp

    from tsmla_jax.nn import V4Config, V32Config, functional, init_params

    config = MLAConfig(hidden_size=8, num_attention_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
                       v_head_dim=8)  # fmt: skip
    params = init_params(jax.random.key(0), config)
    x, starts = jnp.ones((4, 8)), jnp.array([0, 4], jnp.int32)
    prefill = jax.jit(functional.prefill, static_argnames="max_q_len")
    assert prefill(params, config, x, cu_seqlens_q=starts, max_q_len=4)[0].shape == (4, 8)
    for kind in (MLAConfig, V32Config, V4Config):
        assert jax.tree.leaves(object.__new__(kind)) == []
    del params["w_uk"]
    with pytest.raises(ValueError, match="params: got no 'w_uk'; legal: the weights of param_shapes"):
        functional.prefill(params, config, x, cu_seqlens_q=starts, max_q_len=4)
    with pytest.raises(TypeError, match=r"key: got MLAConfig; legal: a key of jax.random"):
        init_params(config, jax.random.key(0))  # type: ignore[arg-type, type-var]
    with pytest.raises(TypeError, match=r"key: got int; legal: a key of jax.random"):
        init_params(0, config)  # type: ignore[arg-type]
