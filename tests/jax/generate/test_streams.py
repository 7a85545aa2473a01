"""V4's residual streams against their formulas, a token at a time in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsmla_jax.generate import streams
from tsmla_jax.generate.config import StreamsConfig
from tsmla_jax.nn.norms import Norm

COUNT, WIDTH, TOKENS = 3, 10, 6
CONFIG = StreamsConfig(count=COUNT, sinkhorn_iterations=20, eps=1e-6, norm_eps=1e-5)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def random_params(rows: int, scales: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    shapes = {"fn": (rows, COUNT * WIDTH), "base": (rows,), "scale": (scales,)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((TOKENS, COUNT, WIDTH), np.float32)


def weights(params: dict[str, np.ndarray], token: np.ndarray) -> np.ndarray:
    flat = token.astype(np.float64).reshape(-1)
    return params["fn"].astype(np.float64) @ (flat / np.sqrt((flat**2).mean() + 1e-5))


def test_a_block_reads_and_writes_the_streams(x: np.ndarray) -> None:
    params = random_params((2 + COUNT) * COUNT, 3)
    norm = np.random.default_rng(1).standard_normal(WIDTH, np.float32)
    read, write, mix = jax.jit(lambda *arrays: streams.read_streams(*arrays, Norm(norm, 1e-4), CONFIG))(params, x)
    after = streams.write_streams(jnp.tanh(read), write, mix, x)
    base, scale = params["base"].astype(np.float64), params["scale"].astype(np.float64)
    for token in range(TOKENS):
        w = weights(params, x[token])
        reading = sigmoid(w[:COUNT] * scale[0] + base[:COUNT]) + 1e-6
        writing = 2 * sigmoid(w[COUNT : 2 * COUNT] * scale[1] + base[COUNT : 2 * COUNT])
        mixing = np.exp((w[2 * COUNT :] * scale[2] + base[2 * COUNT :]).reshape(COUNT, COUNT))
        mixing = mixing / mixing.sum(1, keepdims=True) + 1e-6
        for iteration in range(2 * 20 - 1):  # columns first and last
            mixing = mixing / (mixing.sum(iteration % 2, keepdims=True) + 1e-6)
        np.testing.assert_allclose(mix[token], mixing, atol=1e-5)
        collapsed = reading @ x[token]
        normed = collapsed / np.sqrt((collapsed**2).mean() + 1e-4) * norm
        np.testing.assert_allclose(read[token], normed, rtol=1e-5, atol=1e-5)
        out = np.tanh(normed)
        expected = [writing[n] * out + sum(mixing[m, n] * x[token, m] for m in range(COUNT)) for n in range(COUNT)]
        np.testing.assert_allclose(after[token], expected, rtol=1e-5, atol=1e-5)
    # The purpose of the rounds: nothing grows or shrinks by being mixed. Columns come last; rows end some percent off.
    np.testing.assert_allclose(np.asarray(mix).sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(np.asarray(mix).sum(2), 1, atol=0.05)


def test_rounds_of_the_mixing_are_no_loop(x: np.ndarray) -> None:
    """A GPU would launch a loop's kernels one by one, outside of CUDA graphs."""
    norm = Norm(jnp.ones(WIDTH), 1e-4)
    read = jax.jit(lambda *arrays: streams.read_streams(*arrays, norm, CONFIG))
    assert "stablehlo.while" not in read.lower(random_params((2 + COUNT) * COUNT, 3), x).as_text()


def test_streams_open_equal_and_close_weighed(x: np.ndarray) -> None:
    opened = np.asarray(streams.open_streams(jnp.asarray(x[:, 0]), CONFIG))
    assert opened.shape == x.shape and (opened == x[:, :1]).all()
    params = random_params(COUNT, 1)
    closed = np.asarray(streams.close_streams(params, jnp.asarray(x), CONFIG))
    for token in range(TOKENS):
        w = sigmoid(weights(params, x[token]) * params["scale"] + params["base"]) + 1e-6
        np.testing.assert_allclose(closed[token], w @ x[token], rtol=1e-5, atol=1e-5)


def test_streams_keep_their_dtype(x: np.ndarray) -> None:
    narrow = jnp.asarray(x, jnp.bfloat16)
    params, norm = random_params((2 + COUNT) * COUNT, 3), Norm(jnp.ones(WIDTH), 1e-4)
    read, write, mix = streams.read_streams(params, narrow, norm, CONFIG)
    assert (read.dtype, write.dtype, mix.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    assert streams.write_streams(read, write, mix, narrow).dtype == jnp.bfloat16
    assert streams.close_streams(random_params(COUNT, 1), narrow, CONFIG).dtype == jnp.bfloat16
