"""Keys selected by bits on a GPU: jax's calls of the kernels against the definition, torch's in CUDA graphs, and V3.2's
layer in both forms."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tsmla_bridge
import tsmla_jax
from tsmla_jax.nn import MLAConfig, Step, v32

pytestmark = pytest.mark.gpu

TOKENS, KEYS, HEADS, K = 300, 700, 3, 96
OPTIONS: dict[str, Any] = {"max_q_len": 200, "max_kv_len": 500, "softmax_scale": 192**-0.5, "return_lse": True}


@pytest.fixture(autouse=True)
def hopper() -> None:
    if reasons := tsmla_jax.explain("selection_bits", np.zeros((2, 3), np.int32), 5).reasons["cute"]:
        pytest.skip("; ".join(reasons))


def operands(dtype: Any = jnp.bfloat16) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    rng = np.random.default_rng(0)
    shapes = ((TOKENS, HEADS, 192), (KEYS, HEADS, 192), (KEYS, HEADS, 128))
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    positions = jnp.asarray(rng.integers(-1, 500, (TOKENS, K)), jnp.int32)
    rows = jnp.where(jnp.arange(TOKENS) % 7 == 3, -1, jnp.arange(TOKENS)).astype(jnp.int32)
    return arrays, {
        "cu_seqlens_q": jnp.array([0, 100, 300], jnp.int32),
        "cu_seqlens_kv": jnp.array([0, 200, 700], jnp.int32),
        "selection": tsmla_jax.selection_bits(positions, 500),
        "selection_rows": rows,
    }


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_values(dtype: Any, causal: bool) -> None:
    arrays, named = operands(dtype)
    run = functools.partial(tsmla_jax.mla_prefill, **OPTIONS, causal=causal)
    out, lse = jax.jit(functools.partial(run, implementation="cute"))(*arrays, **named)
    want, want_lse = run(*arrays, **named, implementation="reference")
    error = jnp.linalg.norm((out - want).astype(jnp.float32)) / jnp.linalg.norm(want.astype(jnp.float32))
    assert error < (0.066 if dtype == jnp.float8_e4m3fn else 5e-3)
    seen = np.isfinite(want_lse)
    assert np.array_equal(np.isfinite(lse), seen)
    np.testing.assert_allclose(np.asarray(lse)[seen], np.asarray(want_lse)[seen], atol=5e-3)


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(deterministic: bool) -> None:
    arrays, named = operands()

    def loss(name: str, *arrays: jax.Array) -> jax.Array:
        options = OPTIONS | {"return_lse": False, "deterministic": deterministic, "implementation": name}
        return jnp.sin(tsmla_jax.mla_prefill(*arrays, **named, **options).astype(jnp.float32)).sum()

    gradient = [jax.jit(jax.grad(functools.partial(loss, name), (0, 1, 2))) for name in ("cute", "reference")]
    got, want = (function(*arrays) for function in gradient)
    for a, b in zip(got, want, strict=True):
        assert jnp.linalg.norm((a - b).astype(jnp.float32)) < 1e-2 * jnp.linalg.norm(b.astype(jnp.float32))
    if deterministic:
        for a, b in zip(got, gradient[0](*arrays), strict=True):
            assert jnp.array_equal(a, b)


def test_in_a_cuda_graph(hopper_in_torch: None) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((TOKENS, HEADS, 192), (TOKENS, HEADS, 192), (TOKENS, HEADS, 128))
    q, k, v = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for shape in shapes)
    positions = torch.randint(-1, TOKENS, (TOKENS, K), device="cuda", generator=generator, dtype=torch.int32)
    offsets = torch.tensor([0, TOKENS], dtype=torch.int32, device="cuda")
    options = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_q_len": TOKENS, "max_kv_len": TOKENS}

    def run(implementation: str | None = None) -> torch.Tensor:
        bits = tsmla_bridge.selection_bits(positions, TOKENS, implementation=implementation)
        out = tsmla_bridge.mla_prefill(
            q, k, v, **options, softmax_scale=0.07, selection=bits, implementation=implementation
        )
        assert isinstance(out, torch.Tensor)
        return out

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    positions.copy_(positions.flip(0).clone())
    graph.replay()
    torch.cuda.synchronize()
    want = run("reference").float()
    assert (out.float() - want).norm() < 5e-3 * want.norm()


def test_the_layers_forms_agree() -> None:
    mla = MLAConfig(hidden_size=256, num_attention_heads=16, q_lora_rank=128)
    config = v32.V32Config(mla, index_n_heads=64, index_topk=64)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), v32.init_params(jax.random.key(0), config))
    lens, cu = jnp.array([400, 90], jnp.int32), jnp.array([0, 300, 390], jnp.int32)
    tables = jnp.arange(14, dtype=jnp.int32).reshape(2, 7)
    x = jax.random.normal(jax.random.key(1), (400, 256), jnp.bfloat16)

    def run(form: str) -> jax.Array:
        cache = v32.init_cache(config, 14, 64, kv_dtype=jnp.uint8)
        first = Step.ragged(tables[:1], jnp.array([100], jnp.int32), jnp.array([0, 100], jnp.int32), total_tokens=100,
                            page_size=64)  # fmt: skip
        _, cache = v32.attend(params, config, x[:100], cache, first, form="direct")
        step = Step.ragged(tables, lens, cu, total_tokens=390, page_size=64)
        return v32.attend(params, config, x[:390], cache, step, form=form)[0].astype(jnp.float32)

    direct, mask = run("direct"), run("mask")
    assert jnp.linalg.norm(mask - direct) < 2e-2 * jnp.linalg.norm(direct)
