"""The nnx layer: the functional form with its parameters, from Hugging Face weights, and the package without flax."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx", reason="MLAttention needs flax: pip install 'tsmla-jax[flax]'")

from tests.jax.nn.drawn import draw_mla  # noqa: E402
from tsmla_jax.nn import (  # noqa: E402
    MLAConfig,
    MLAttention,
    Step,
    functional,
    hf_attention_shapes,
    param_shapes,
)

CONFIG = MLAConfig(
    hidden_size=48,
    num_attention_heads=3,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    q_lora_rank=24,
)


def paged_arguments(page_size: int = 4) -> dict[str, Any]:
    """A batch of two requests of 7 and 3 tokens whose last two are new."""
    tables, seq_lens = jnp.asarray([[1, 3], [0, 2]], jnp.int32), jnp.asarray([7, 3], jnp.int32)
    cache = jax.random.normal(jax.random.key(5), (4, page_size, CONFIG.cache_dim))
    return {"kv_cache": cache, "step": Step.dense(tables, seq_lens, new_tokens=2, page_size=page_size)}


def test_layer_is_the_functional_form() -> None:
    layer = MLAttention(CONFIG, rngs=nnx.Rngs(0))
    assert {name: value.shape for name, value in layer.params.items()} == param_shapes(CONFIG)
    assert set(nnx.state(layer, nnx.Param)) == set(param_shapes(CONFIG))
    x = jax.random.normal(jax.random.key(1), (2, 5, 48))
    flat = x.reshape(10, 48)
    cu = jnp.asarray([0, 5, 10], jnp.int32)
    arguments = paged_arguments()

    @jax.jit
    def functions(params: Any) -> Any:
        prefilled = functional.prefill(params, CONFIG, flat, cu_seqlens_q=cu, max_q_len=5, implementation="reference")
        return prefilled, functional.decode(params, CONFIG, x[:, :2], implementation="reference", **arguments)

    @nnx.jit
    def methods(layer: MLAttention) -> Any:
        ragged = {"cu_seqlens_q": cu, "max_q_len": 5, "implementation": "reference"}
        prefilled = layer.prefill(flat, **ragged)
        decoded = layer.decode(x[:, :2], implementation="reference", **arguments)
        return prefilled, decoded, layer(x, implementation="reference"), layer(flat, **ragged)

    prefilled, decoded = functions(layer.params)
    got_prefilled, got_decoded, called, called_ragged = methods(layer)
    for got, expected in zip((*got_prefilled, *got_decoded), (*prefilled, *decoded), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)
    np.testing.assert_allclose(called.reshape(10, 48), prefilled[0], atol=1e-6)
    np.testing.assert_allclose(called_ragged, prefilled[0], atol=1e-6)


def test_context_path_of_the_layer() -> None:
    """Two tokens on top of a cached context: the answer of a decode step."""
    layer = MLAttention(CONFIG, rngs=nnx.Rngs(2))
    arguments = paged_arguments()
    x = jax.random.normal(jax.random.key(1), (2, 2, 48))
    expected, expected_cache = nnx.jit(MLAttention.decode)(layer, x, **arguments)
    dense = arguments["step"]
    cu_seqlens_q = jnp.asarray([0, 2, 4], jnp.int32)
    step = Step(dense.block_tables, dense.seq_lens, dense.slot_mapping.reshape(-1), cu_seqlens_q, max_q_len=2)
    y, cache = nnx.jit(MLAttention.prefill_with_context, static_argnames=("context_chunk", "context_passes"))(
        layer, x.reshape(4, 48), arguments["kv_cache"], step, context_chunk=3, context_passes=2
    )
    np.testing.assert_allclose(y.reshape(2, 2, 48), expected, atol=1e-5)
    np.testing.assert_allclose(cache, expected_cache, atol=1e-6)


@pytest.mark.parametrize("name", ["prefill", "prefill_with_context", "decode"])
def test_a_method_takes_what_its_function_takes(name: str) -> None:
    method, function = (inspect.signature(getattr(of, name)).parameters for of in (MLAttention, functional))
    assert list(method)[1:] == list(function)[2:]
    assert all(method[each].default == function[each].default for each in list(method)[1:])


def test_gradients_reach_every_parameter() -> None:
    layer = MLAttention(CONFIG, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 5, 48))
    gradients = nnx.jit(nnx.grad(lambda layer: jnp.sum(layer(x) ** 2)))(layer)
    sizes = {name: float(jnp.abs(value[...]).max()) for name, value in gradients.items()}
    assert set(sizes) == set(param_shapes(CONFIG))
    assert all(np.isfinite(size) and size > 1e-3 for size in sizes.values()), sizes


def test_from_hf(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.numpy", reason="needs safetensors").save_file
    sizes = ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "v_head_dim", "rope_theta")
    fields = {name: getattr(CONFIG, name) for name in (*sizes, "qk_nope_head_dim", "qk_rope_head_dim")}
    rng = np.random.default_rng(0)
    tensors = {
        f"model.layers.1.self_attn.{name}": rng.normal(size=shape).astype(np.float32)
        for name, shape in hf_attention_shapes(CONFIG).items()
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file(tensors, tmp_path / "model.safetensors")
    layer = MLAttention.from_hf(tmp_path, 1, dtype=jnp.bfloat16)
    assert layer.config == CONFIG
    expected = tensors["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"].T
    np.testing.assert_array_equal(layer.params["kv_a_proj_with_mqa"], expected.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.self_attn\.q_a_proj\.weight' is missing"):
        MLAttention.from_hf(tmp_path, 0)


def test_refused_arguments() -> None:
    with pytest.raises(ValueError, match="MLAttention needs params, or rngs to draw them"):
        MLAttention(CONFIG)
    params = draw_mla(jax.random.key(0), CONFIG)
    with pytest.raises(ValueError, match=r"'w_uv' must have shape \(3, 12, 32\)"):
        MLAttention(CONFIG, params={**params, "w_uv": params["w_uk"]})
    layer = MLAttention(CONFIG, params=params)
    x = jnp.zeros((2, 5, 48))
    with pytest.raises(ValueError, match=r"x \[B, S, E\] must have neither"):
        layer(x, max_q_len=5)
    with pytest.raises(ValueError, match="needs cu_seqlens_q and max_q_len"):
        layer(x[0])
    with pytest.raises(ValueError, match=r"legal: \[B, S, E\] or \[T, E\] with E = 48"):
        layer(x[..., :-1])
    with pytest.raises(ValueError, match=r"x: got shape \[1, 2, 5, 48\]; legal: \[B, S, E\] or \[T, E\]"):
        layer(x[None], cu_seqlens_q=jnp.array([0, 10], jnp.int32), max_q_len=10)


def test_package_without_flax() -> None:
    """Importing tsmla_jax.nn brings no flax, torch or safetensors; using MLAttention says what to install."""
    code = """
import sys
import tsmla_jax.nn
heavy = {"flax", "torch", "transformers", "safetensors"} & set(sys.modules)
assert not heavy, heavy
sys.modules["flax"] = None
assert tsmla_jax.nn.MLAConfig(8, 1).softmax_scale == 192 ** -0.5
try:
    tsmla_jax.nn.MLAttention
except ImportError as error:
    print(error)
try:
    tsmla_jax.nn.MLAttentio
except AttributeError as error:
    print(error)
"""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{root}:{root / 'kernels'}", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'tsmla-jax[flax]'" in done.stdout
    assert "has no attribute 'MLAttentio'" in done.stdout


def test_everything_but_the_layers_is_there_without_flax() -> None:
    program = "import sys; sys.modules['flax'] = None; from tsmla_jax.nn import *; print(Step, 'V4Attention' in dir())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert "nn.step.Step" in done.stdout and done.stdout.split()[-1] == "False"


@pytest.mark.parametrize("step", [None, (1, 2)])
def test_a_step_that_is_none_is_named(step: Any) -> None:
    layer = MLAttention(CONFIG, rngs=nnx.Rngs(0))
    cache, legal = paged_arguments()["kv_cache"], "legal: a Step, which Step.dense or Step.ragged makes"
    with pytest.raises(ValueError, match=f"step: got .*{legal}"):
        layer.decode(jnp.zeros((2, 1, 48)), cache, step)
    with pytest.raises(ValueError, match=f"step: got .*{legal}"):
        layer.prefill_with_context(jnp.zeros((2, 48)), cache, step, context_chunk=4)
