"""The router's logits: f32 on every device, by XLA and by the kernel, and what the kernel leaves for the experts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsmla_jax.generate import moe
from tsmla_jax.generate.config import MoEConfig
from tsmla_jax.nn.products import router
from tsmla_jax.nn.products.block_scaled import BlockScaled
from tsmla_jax.nn.products.scaled_rows import ScaledRows, scaled_rows

BACKENDS = pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
DTYPES = pytest.mark.parametrize("router_dtype", ["float32", "bfloat16"])


def random_inputs(tokens: int, experts: int, width: int, dtype: str, router_dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(tokens + experts)
    x, weights = (rng.standard_normal((rows, width)).astype(np.float32) for rows in (tokens, experts))
    return jnp.asarray(x, dtype), jnp.asarray(weights / width**0.5, router_dtype)


def error(logits: Any, x: jax.Array, weights: jax.Array) -> float:
    """The greatest error, by the greatest logit."""
    expected = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    return float(np.abs(np.asarray(logits, np.float64) - expected).max() / np.abs(expected).max())


@BACKENDS
@DTYPES
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("tokens", [1, 2, 64])
def test_logits_are_those_of_f32(tokens: int, dtype: str, router_dtype: str, backend: str) -> None:
    if jax.default_backend() != backend:
        pytest.skip(f"jax's default device is no {backend}")
    x, weights = random_inputs(tokens, 256, 7168 if backend == "gpu" else 512, dtype, router_dtype)
    # XLA's own sums of f32, in whatever order.
    assert error(jax.jit(router.router_logits)(x, weights), x, weights) <= 4e-6
    parts, _ = jax.jit(lambda *arrays: router.project(*arrays, with_rows=False))(x, weights)
    by_kernel = not router.why_not(x, weights)
    assert error(parts.sum(axis=0), x, weights) <= (1e-6 if by_kernel else 4e-6)
    assert by_kernel == (backend == "gpu" and dtype == "bfloat16")


@BACKENDS
@DTYPES
@pytest.mark.parametrize(("tokens", "experts", "width"), [(1, 64, 256), (17, 20, 128), (65, 160, 384), (1100, 72, 256)])
@pytest.mark.sampled(3)
def test_the_kernel_makes_logits_and_scaled_rows(
    tokens: int, experts: int, width: int, router_dtype: str, backend: str
) -> None:
    if jax.default_backend() != backend:
        pytest.skip(f"jax's default device is no {backend}")
    x, weights = random_inputs(tokens, experts, width, "bfloat16", router_dtype)
    x = x * jnp.exp2(jnp.arange(tokens) % 60 - 30.0).astype(jnp.bfloat16)[:, None]
    parts, rows = jax.jit(lambda *arrays: router.project_by_kernel(*arrays, with_rows=True))(x, weights)
    expected = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    per_token = np.abs(np.asarray(parts.sum(axis=0), np.float64) - expected).max(axis=1)
    assert (per_token <= 1e-6 * np.abs(expected).max(axis=1)).all()
    assert isinstance(rows, ScaledRows) and rows.width == 128
    for got, wanted in zip(rows, scaled_rows(x), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_f32_products_of_a_router_say_their_precision() -> None:
    """On a GPU an f32 product without it is TF32's."""
    for dtypes in (("bfloat16", "float32"), ("float32", "float32"), ("float16", "bfloat16"), ("bfloat16", "bfloat16")):
        text = jax.jit(router.router_logits).lower(*random_inputs(2, 8, 16, *dtypes)).as_text()
        assert text.count("dot_general") == text.count("precision = [HIGHEST, HIGHEST]") == 1


def test_which_logits_are_made_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(tokens: int, width: int, dtype: str, router_dtype: str = "float32") -> str:
        shapes = jax.ShapeDtypeStruct((tokens, width), dtype), jax.ShapeDtypeStruct((8, width), router_dtype)
        return "; ".join(router.why_not(*shapes))  # type: ignore[arg-type]

    assert "a cpu" in reason(2, 128, "bfloat16")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert reason(2, 128, "bfloat16") == reason(1, 128, "bfloat16", "bfloat16") == ""
    assert "no tokens" in reason(0, 128, "bfloat16")
    assert "200 wide; legal: a multiple of 128" in reason(2, 200, "bfloat16")
    assert "x is float32 and the router float32; legal" in reason(2, 128, "float32")


def test_experts_take_the_rows_that_the_router_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel less: nothing else scales x."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config = MoEConfig(8, 2, 128, 1, "greedy", 1, 1, False, 1.0)

    def stack(*shape: int) -> Any:
        scales = jax.ShapeDtypeStruct((shape[0], shape[1] // 128, shape[2] // 128), jnp.float32)
        return BlockScaled(jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn), scales)  # type: ignore[arg-type]

    params = {"router": jax.ShapeDtypeStruct((8, 256), jnp.float32), "gate_up": stack(9, 256, 256)}
    params["down"] = stack(9, 256, 128)
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((3, 256), jnp.bfloat16), ((3,), bool))]
    tokens = jax.ShapeDtypeStruct((3,), jnp.int32)
    traced = jax.make_jaxpr(lambda p, x, valid, ids: moe.mixture_of_experts(p, x, valid, config, ids))
    text = str(traced(params, *shapes, tokens))
    assert "name=router_logits" in text and "name=scale_rows" not in text
    params["router"] = jax.ShapeDtypeStruct((8, 256), jnp.float16)
    text = str(traced(params, *shapes, tokens))
    assert "name=router_logits" not in text and "name=scale_rows" in text
