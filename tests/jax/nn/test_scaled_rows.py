"""f16 activations with scales: as exact as bf16 or better, however small or great they are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsmla_jax.generate import moe
from tsmla_jax.nn.products.block_scaled import BlockScaled
from tsmla_jax.nn.products.linear import linear_by_kernel
from tsmla_jax.nn.products.scaled_rows import ScaledRows, scaled_rows

BACKENDS = pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
SIZES = [1e-30, 1e-7, 1e-5, 3e-5, 1e-4, 1.0, 1e4, 1e7, 1e30]
BF16 = 1.8e-3
"""The error of results rounded to bf16, by their root mean square: 1.65e-3 to 1.75e-3, and little beside it."""


def narrow(rng: np.random.Generator, *shape: int) -> BlockScaled:
    scales = rng.uniform(0.5, 2, (*shape[:-2], *(-(-size // 128) for size in shape[-2:]))) / shape[-1] ** 0.5
    values = jnp.asarray(rng.standard_normal(shape), jnp.float8_e4m3fn)
    return BlockScaled(values, jnp.asarray(scales, jnp.float32))


def widened(weight: Any) -> np.ndarray:
    rows, columns = weight.shape[-2:]
    scales = np.kron(np.asarray(weight.scales, np.float64), np.ones((128, 128)))[..., :rows, :columns]
    return np.asarray(weight.values, np.float64) * scales


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def skip_unless(backend: str) -> None:
    if jax.default_backend() != backend:
        pytest.skip(f"jax's default device is no {backend}")


@BACKENDS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("depth", [128, 384, 7168])
def test_values_times_scales_are_the_activations(depth: int, size: float, backend: str) -> None:
    skip_unless(backend)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, depth)) * size, jnp.bfloat16).at[1, :100].set(0)
    rows = jax.jit(scaled_rows)(x)
    assert rows.values.dtype == jnp.float16 and rows.scales.shape == (3, depth // 128) and rows.width == 128
    assert np.abs(np.asarray(rows.values, np.float32)).max() < 2
    back = np.asarray(rows.values, np.float64) * np.repeat(np.asarray(rows.scales, np.float64), 128, axis=1)
    # What is lost lies 2^-25 below the greatest of 128 values.
    np.testing.assert_allclose(back, np.asarray(x, np.float64), atol=size * 2.0**-21, rtol=0)
    assert np.log2(np.asarray(rows.scales)).astype(int).tolist() == np.log2(np.asarray(rows.scales)).tolist()


@BACKENDS
def test_what_is_no_number_shows_in_its_row(backend: str) -> None:
    skip_unless(backend)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((20, 256)), jnp.bfloat16)
    weight = narrow(rng, 128, 256)
    clean = np.asarray(linear_by_kernel(x, weight), np.float32)
    for value in (jnp.nan, jnp.inf, -jnp.inf):
        out = np.asarray(linear_by_kernel(x.at[7, 200].set(value), weight), np.float32)
        assert not np.isfinite(out[7]).any()
        others = np.arange(20) != 7
        np.testing.assert_array_equal(out[others], clean[others])
    greatest = jnp.finfo(jnp.bfloat16).max
    out = np.asarray(linear_by_kernel(x.at[7].set(0).at[7, 200].set(greatest), weight), np.float64)
    expected = widened(weight)[:, 200] * float(greatest)
    inside = np.abs(expected) < float(greatest) / 2
    np.testing.assert_allclose(out[7][inside], expected[inside], rtol=2**-8)


@BACKENDS
@pytest.mark.parametrize("size", SIZES)
def test_linears_of_any_size(size: float, backend: str) -> None:
    skip_unless(backend)
    rng = np.random.default_rng(2)
    weight, x = narrow(rng, 128, 512), jnp.asarray(rng.standard_normal((12, 512)) * size, jnp.bfloat16)
    expected = np.asarray(x, np.float64) @ widened(weight).T
    assert rms(np.asarray(jax.jit(linear_by_kernel)(x, weight), np.float64) - expected) <= BF16 * rms(expected)


@BACKENDS
@pytest.mark.parametrize("inner", [1e-10, 1e-7, 1e-5, 3e-5, 1e-4, 1.0, 1e4, 1e8])
@pytest.mark.parametrize(("tokens", "pairs"), [(2, 1), (9, 2), (40, 2)])
@pytest.mark.sampled(5)
def test_experts_whose_inner_activations_are_of_any_size(
    tokens: int, pairs: int, inner: float, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are products silu(g) u, and so of any size: by all tiles that few tokens take, of 64 and of 128 columns.
    Where a GPU has a kernel that keeps them in bf16, by that kernel too."""
    skip_unless(backend)
    monkeypatch.setattr(moe, "why_not_grouped", lambda *_: [])
    rng = np.random.default_rng(3)
    count, hidden, width = 4, 256, 256
    gate_up, down = narrow(rng, count, 2 * width, hidden), narrow(rng, count, hidden, width)
    # The size is in the half that the activation does not bend, and for small ones in both.
    up = gate_up.scales.at[:, width // 128 :].multiply(inner if inner > 1 else inner**0.5)
    gate = up if inner > 1 else up.at[:, : width // 128].multiply(inner**0.5)
    gate_up = BlockScaled(gate_up.values, gate)
    x = jnp.asarray(rng.standard_normal((tokens, hidden)), jnp.bfloat16)
    experts = np.stack([rng.permutation(count)[:pairs] for _ in range(tokens)]).astype(np.int32)
    weights = rng.random((tokens, pairs)).astype(np.float32)

    def mixed() -> np.ndarray:
        return np.asarray(
            jax.jit(lambda *given: moe.mix_experts(*given))(x, experts, weights, gate_up, down), np.float64
        )

    results = [(mixed(), 2)] if moe.takes_scaled_products(x.dtype, gate_up, down) else []
    monkeypatch.setattr(moe, "takes_scaled_products", lambda *_: False)
    results.append((mixed(), 1))
    wide_up, wide_down, expected = widened(gate_up), widened(down), np.zeros((tokens, hidden))
    for token in range(tokens):
        for expert, weight in zip(experts[token], weights[token], strict=True):
            g, u = np.split(wide_up[expert] @ np.asarray(x[token], np.float64), 2)
            expected[token] += weight * (wide_down[expert] @ (g / (1 + np.exp(-g)) * u))
    # The products of each expert are rounded to bf16 before they are added, and cancel in part.
    for out, roundings in results:
        assert rms(out - expected) <= 1.2 * roundings**0.5 * BF16 * rms(expected)


def test_zeros_stay_zeros() -> None:
    rows = scaled_rows(jnp.zeros((2, 256), jnp.bfloat16))
    assert isinstance(rows, ScaledRows) and not np.asarray(rows.values).any() and np.isfinite(rows.scales).all()
