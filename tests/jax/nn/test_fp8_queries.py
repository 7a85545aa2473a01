"""What fp8 caches and fp8 queries cost whole attention layers: the errors of y that docs/guides/fp8.md states."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsmla_jax.nn import MLAConfig, Step, functional, param_shapes, v4, v32

TOKENS, PAGE = 512, 64
PAGES = TOKENS // PAGE
# One layer of DeepSeek-V3 with fewer heads and a narrower x. yarn's factor is that of V3, and so is the softmax's.
FIELDS: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 256, "num_attention_heads": 4, "kv_lora_rank": 512, "q_lora_rank": 128,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
Attend = Callable[..., jax.Array]
"""(params, x, dtype of the caches, kv_scale, q_scale) -> y."""


def random_params(shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Matrices that keep the size of what they multiply; norms near 1."""
    params = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        inputs = shape[-1] if name in ("w_uk", "w_uv") else np.prod(shape[:-1] if name == "o_proj" else shape[:1])
        params[name] = values / np.sqrt(inputs) if len(shape) > 1 else 1 + 0.1 * values
    return params


def step() -> Step:
    tables, lens = jnp.arange(PAGES, dtype=jnp.int32)[None], jnp.asarray([TOKENS], jnp.int32)
    return Step.ragged(tables, lens, jnp.asarray([0, TOKENS]), total_tokens=TOKENS, page_size=PAGE)


def dense_layer() -> tuple[Attend, dict[str, tuple[int, ...]]]:
    config = MLAConfig.from_hf(FIELDS)

    def attend(params: Any, x: jax.Array, dtype: Any, **scales: Any) -> jax.Array:
        cache = jnp.zeros((PAGES, PAGE, config.cache_dim), dtype)
        return functional.decode(params, config, x, cache, step(), **scales)[0]

    return attend, param_shapes(config)


def v32_layer() -> tuple[Attend, dict[str, tuple[int, ...]]]:
    """All keys are chosen, so that nothing of the error is another choice."""
    indexer = {"index_n_heads": 2, "index_head_dim": 64, "index_topk": TOKENS}
    config = v32.V32Config.from_hf({**FIELDS, "model_type": "deepseek_v32", **indexer})

    def attend(params: Any, x: jax.Array, dtype: Any, **scales: Any) -> jax.Array:
        cache = v32.init_cache(config, PAGES, PAGE, kv_dtype=dtype, indexer_dtype=jnp.float32)
        return v32.attend(params, config, x, cache, step(), **scales)[0]

    return attend, v32.param_shapes(config)


def v4_layer() -> tuple[Attend, dict[str, tuple[int, ...]]]:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 64}
    config = v4.V4Config(kind="hca", ratio=128, **sizes)

    def attend(params: Any, x: jax.Array, dtype: Any, **scales: Any) -> jax.Array:
        pages = {"window_pages": PAGES, "compressed_pages": 1, "num_states": 1, "page_size": PAGE}
        zero, table = jnp.zeros(1, jnp.int32), v4.rope_table(config, TOKENS)
        tables = {"state_slots": zero, "compressed_tables": zero[None], "cos_sin": table, "page_size": PAGE}
        cache = v4.init_cache(config, **pages, dtype=dtype)
        return v4.attend(params, config, x, cache, v4.make_step(config, step(), **tables), **scales)[0]

    return attend, v4.param_shapes(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "dtype", "of_cache", "of_both"),
    [
        pytest.param(dense_layer, "float8_e4m3fn", 0.043, 0.056, id="dense, fp8"),
        pytest.param(v32_layer, "uint8", 0.038, 0.053, id="V3.2, packed"),
        pytest.param(v32_layer, "float8_e4m3fn", 0.043, 0.057, id="V3.2, fp8"),
        pytest.param(v4_layer, "uint8", 0.031, 0.039, id="V4, packed"),
        pytest.param(v4_layer, "float8_e4m3fn", 0.033, 0.041, id="V4, fp8"),
    ],
)
def test_errors_of_layers(layer: Any, dtype: str, of_cache: float, of_both: float) -> None:
    attend, shapes = layer()
    rng = np.random.default_rng(0)
    params, x = random_params(shapes, rng), rng.standard_normal((TOKENS, 256)).astype(np.float32)
    narrow = functools.partial(jax.jit(attend, static_argnums=2), params, x, jnp.dtype(dtype))
    kv_scale = {} if dtype == "uint8" else {"kv_scale": jnp.float32(1)}
    exact = np.float64(jax.jit(attend, static_argnums=2)(params, x, jnp.dtype("float32")))

    def error(y: jax.Array) -> float:
        return float(np.linalg.norm(np.float64(y) - exact) / np.linalg.norm(exact))

    assert abs(error(narrow(**kv_scale)) - of_cache) < 0.1 * of_cache
    for q_scale in (1.0, 2.0**-6):  # as good as each other: e4m3 is a floating point format
        found = error(narrow(**kv_scale, q_scale=jnp.float32(q_scale)))
        assert abs(found - of_both) < 0.1 * of_both
