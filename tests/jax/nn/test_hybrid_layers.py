"""Layers of latent attention among linear ones: those that rotate nothing, and those with a gate before o_proj.

Ling 3's and Kimi-Linear's prefill is compared with transformers' in test_known_models.py. Kimi-K3's model is not there;
its layer is written out below, as vLLM's model computes it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax.nn.conftest import TINY
from tests.jax.nn.drawn import draw_mla
from tsmla_jax.nn import MLAConfig, Step, functional, params_from_hf, params_to_hf
from tsmla_jax.nn.mla import few_tokens
from tsmla_jax.nn.norms import Norm

K3: dict[str, Any] = {
    "model_type": "kimi_k3",
    "text_config": {
        **{name: value for name, value in TINY.items() if name != "rope_theta"},
        "q_lora_rank": 48,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "rms_norm_eps": 1e-3,
        "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 8, "num_heads": 4},
    },
}
LING: dict[str, Any] = {
    **TINY, "model_type": "bailing_hybrid", "q_lora_rank": None, "layer_group_size": 6, "kda_lower_bound": -5.0,
}  # fmt: skip
LENGTH, PAGE = 21, 8


def written_out(tensors: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Kimi-K3's layer in float64, of x [T, E]."""
    heads, nope, rope, value, latent = 4, 24, 16, 20, 32

    def norm(rows: np.ndarray, name: str) -> np.ndarray:
        return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-3) * tensors[f"{name}.weight"]

    def times(rows: np.ndarray, name: str) -> np.ndarray:
        return rows @ tensors[f"{name}.weight"].T

    q = times(norm(times(x, "q_a_proj"), "q_a_layernorm"), "q_b_proj").reshape(-1, heads, nope + rope)
    joint = times(x, "kv_a_proj_with_mqa")
    kv = times(norm(joint[:, :latent], "kv_a_layernorm"), "kv_b_proj").reshape(-1, heads, nope + value)
    shared = np.broadcast_to(joint[:, None, latent:], (len(x), heads, rope))
    keys = np.concatenate([kv[..., :nope], shared], axis=-1)
    scores = np.einsum("qhd,khd->hqk", q, keys) * (nope + rope) ** -0.5
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hqk,khv->qhv", weights / weights.sum(-1, keepdims=True), kv[..., nope:])
    gate = 1 / (1 + np.exp(-times(x, "g_proj")))
    return times(out.reshape(len(x), -1) * gate, "o_proj")


def layer(fields: dict[str, Any]) -> tuple[MLAConfig, dict[str, jax.Array], np.ndarray]:
    """A layer's config, random parameters, and its input [T, E]."""
    config = MLAConfig.from_hf(fields)
    params = draw_mla(jax.random.key(0), config)
    return config, params, np.random.default_rng(0).normal(size=(LENGTH, config.hidden_size))


def test_kimi_k3() -> None:
    config, params, x = layer(K3)
    assert (config.rotates, config.output_gate, config.a_layernorm_eps) == (False, "element", 1e-3)
    tensors = params_to_hf(config, params)
    assert tensors["g_proj.weight"].shape == (4 * 20, 64)
    for name, value in params_from_hf(config, tensors).items():
        np.testing.assert_array_equal(value, params[name])
    want = written_out({name: np.asarray(value, np.float64) for name, value in tensors.items()}, x)
    starts = jnp.asarray([0, LENGTH], jnp.int32)
    run = jax.jit(functional.prefill, static_argnames=("config", "max_q_len"))
    y = run(params, config, jnp.asarray(x, jnp.float32), cu_seqlens_q=starts, max_q_len=LENGTH)[0]
    np.testing.assert_allclose(y, want, rtol=0, atol=3e-6 * np.abs(want).max())


@pytest.mark.parametrize("fields", [K3, LING], ids=["kimi-k3", "ling-3"])
def test_chunks_and_decode_are_one_prefill(fields: dict[str, Any]) -> None:
    config, params, x = layer(fields)
    folded = functional.fold(params, config)
    for name, value in functional.unfold(folded, config).items():
        np.testing.assert_array_equal(value, params[name])
    x = jnp.asarray(x, jnp.float32)

    @jax.jit
    def run(params: Any, folded: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole = functional.prefill(params, config, x, cu_seqlens_q=jnp.asarray([0, LENGTH]), max_q_len=LENGTH)[0]
        tables, cache = jnp.asarray([[2, 0, 1]], jnp.int32), jnp.zeros((3, PAGE, config.cache_dim))
        found, done = [], 0
        for count in (11, LENGTH - 12):
            starts, lens = jnp.asarray([0, count], jnp.int32), jnp.asarray([done + count], jnp.int32)
            step = Step.ragged(tables, lens, starts, total_tokens=count, max_q_len=count, page_size=PAGE)
            given = x[done : done + count]
            y, cache = functional.prefill_with_context(folded, config, given, cache, step, context_chunk=8)
            found, done = [*found, y], done + count
        step = Step.dense(tables, jnp.asarray([LENGTH], jnp.int32), page_size=PAGE)
        y, _ = functional.decode(folded, config, x[None, -1:], cache, step)
        return whole, jnp.concatenate([*found, y[0]])

    want, got = run(params, folded, x)
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-6 * np.abs(want).max())


def test_what_is_refused() -> None:
    config, params, x = layer(LING)
    assert (config.rotates, config.output_gate) == (True, "head")
    with pytest.raises(ValueError, match="x: got None; legal with an output_gate"):
        functional.project_out(params, config, jnp.zeros((3, 4, 20)))
    starts, ungated = jnp.array([0, len(x)], jnp.int32), {name: w for name, w in params.items() if name != "g_proj"}
    with pytest.raises(ValueError, match="params: got no 'g_proj'; legal: the weights of param_shapes"):
        functional.prefill(ungated, config, jnp.asarray(x), cu_seqlens_q=starts, max_q_len=len(x))
    folded = functional.fold(params, config)
    norm = Norm(jnp.ones(config.hidden_size), 1e-6)
    reasons = few_tokens.why_not(folded, config, jnp.asarray(x), norm, jnp.zeros((3, PAGE, config.cache_dim)))
    assert reasons == ["the layer has an output gate"]
    with pytest.raises(ValueError, match="output_gate: got 'row'; legal: 'head', 'element', None"):
        MLAConfig(hidden_size=8, num_attention_heads=1, output_gate="row")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="text_config: mla_use_output_gate: got False; legal: True"):
        MLAConfig.from_hf({**K3, "text_config": {**K3["text_config"], "mla_use_output_gate": False}})
    with pytest.raises(ValueError, match="mla_use_nope: got True"):
        MLAConfig.from_hf({**LING, "mla_use_nope": True})
