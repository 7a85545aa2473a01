"""V3.2's and V4's layers on a GPU, where their caches are written by kernels, against the same layers on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax
from tsmla_jax.nn import MLAConfig, Step, v4, v32
from tsmla_jax.ops import device

pytestmark = pytest.mark.gpu

PAGES, PAGE, LENGTH, HIDDEN = 8, 64, 200, 192
V32 = v32.V32Config(
    MLAConfig(hidden_size=HIDDEN, num_attention_heads=4, q_lora_rank=64, rope_interleave=True),
    index_n_heads=16,
    index_topk=512,
)
V4 = functools.partial(
    v4.V4Config,
    hidden_size=HIDDEN,
    num_attention_heads=8,
    q_lora_rank=64,
    o_groups=4,
    o_lora_rank=48,
    index_n_heads=16,
)
CONFIGS = {"v3.2": V32, "csa": V4(kind="csa", ratio=4), "hca": V4(kind="hca", ratio=128)}
KERNELS = {"v3.2": 4, "csa": 4, "hca": 1}
"""Kernels that write a layer's caches or choose its keys."""


@pytest.fixture(autouse=True)
def needs_the_kernel() -> None:
    arrays = jax.ShapeDtypeStruct((1, 64, 128), jnp.bfloat16), jax.ShapeDtypeStruct((1, 64), jnp.bfloat16)
    if reasons := tsmla_jax.explain("indexer_quantize", *arrays).reasons["cute"]:
        pytest.skip("; ".join(reasons))


def layer(name: str) -> tuple[Any, Any, Any, Any]:
    """(attend's module, config, parameters, empty packed caches); norms of ones, everything else of unit rows."""
    config = CONFIGS[name]
    family: Any = v32 if name == "v3.2" else v4
    rng = np.random.default_rng(len(name))
    shapes = v32.param_shapes(config) if name == "v3.2" else v4.param_shapes(config)
    params = {
        key: np.ones(shape, np.float32)
        if len(shape) == 1
        else (rng.standard_normal(shape) / np.sqrt(np.prod(shape[:-1]) if "o_" in key else shape[0])).astype(np.float32)
        for key, shape in shapes.items()
    }
    if name == "v3.2":
        cache: Any = v32.init_cache(config, PAGES, PAGE, kv_dtype=jnp.uint8)
    else:
        sizes = {"window_pages": PAGES, "compressed_pages": PAGES, "num_states": 3, "page_size": PAGE}
        cache = v4.init_cache(config, **sizes, dtype=jnp.uint8)
    return family, config, params, cache


def outputs(name: str) -> tuple[list[np.ndarray], str]:
    """The layer's results for a prompt of two texts and three decode steps, and the decode step's program."""
    family, config, params, cache = layer(name)
    tables = jnp.asarray(np.random.default_rng(0).permutation(PAGES).reshape(2, -1), jnp.int32)
    x = np.random.default_rng(1).standard_normal((2, LENGTH, HIDDEN)).astype(np.float32)

    @jax.jit
    def run(x: jax.Array, cache: Any, seq_lens: jax.Array, offsets: jax.Array) -> tuple[jax.Array, Any]:
        step: Any = Step.ragged(tables, seq_lens, offsets, total_tokens=x.shape[0], page_size=PAGE)
        if name != "v3.2":
            step = v4.make_step(
                config,
                step,
                state_slots=jnp.asarray([2, 0], jnp.int32),
                compressed_tables=tables[::-1],
                cos_sin=v4.rope_table(config, LENGTH),
                page_size=PAGE,
            )
        return family.attend(params, config, x, cache, step)

    prompt, found = LENGTH - 3, []
    where = jnp.asarray([prompt] * 2, jnp.int32), jnp.asarray([0, prompt, 2 * prompt], jnp.int32)
    y, cache = run(np.concatenate(x[:, :prompt]), cache, *where)
    found.append(np.asarray(y))
    for position in range(prompt, LENGTH):
        where = jnp.asarray([position + 1] * 2, jnp.int32), jnp.asarray([0, 1, 2], jnp.int32)
        y, cache = run(x[:, position], cache, *where)
        found.append(np.asarray(y))
    return found, run.lower(x[:, 0], cache, *where).as_text()


@pytest.mark.parametrize("name", CONFIGS)
def test_as_on_the_cpu(name: str) -> None:
    with jax.default_matmul_precision("float32"):  # a GPU's own choice is TF32, with 10 bits of fraction
        got, text = outputs(name)
        with jax.default_device(jax.devices("cpu")[0]):
            want, cpu_text = outputs(name)
    assert text.count(f"@{device.TARGET}(") >= KERNELS[name]
    assert device.TARGET not in cpu_text
    # Products in float32 round differently, and then a value here and there to another e4m3 number.
    for a, b in zip(got, want, strict=True):
        assert np.sqrt(np.mean((a - b) ** 2)) < 0.02 * np.sqrt(np.mean(b**2))
