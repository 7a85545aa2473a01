"""nn.batch_invariant on a GPU, with DeepSeek-V2-Lite's sizes: a row has the same bits in any batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsmla_jax.nn import batch_invariant

pytestmark = pytest.mark.gpu

BATCHES = (slice(0, 1), slice(5, 133), slice(700, 1213), slice(1024, 2048))


def random(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(jnp.bfloat16)


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(f"uint{8 * x.dtype.itemsize}")


@pytest.mark.parametrize("terms, columns", [(2048, 3072), (2048, 576), (2048, 2048), (11_264, 2048), (2048, 22_528)])
def test_a_product(terms: int, columns: int) -> None:
    """Of rows that Hopper's kernel multiplies, and of fewer, for which Pallas' has the same bits."""
    x, weight = random(0, 2048, terms), random(1, columns, terms, scale=terms**-0.5)
    together = jax.jit(batch_invariant.linear)(x, weight)
    for rows in BATCHES:
        assert (bits(jax.jit(batch_invariant.linear)(x[rows], weight)) == bits(together)[rows]).all()
    order = np.random.default_rng(0).permutation(2048)
    assert (bits(jax.jit(batch_invariant.linear)(x[order], weight)) == bits(together)[order]).all()
    want = np.asarray(jnp.matmul(x, weight.T, preferred_element_type=jnp.float32))
    np.testing.assert_allclose(np.asarray(together, np.float32), want, rtol=2**-8, atol=2e-3)


@pytest.mark.parametrize("terms, columns", [(128, 512), (512, 128)])
def test_a_product_of_each_head(terms: int, columns: int) -> None:
    x, weight = random(0, 2048, 16, terms), random(1, 16, columns, terms, scale=terms**-0.5)

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        return batch_invariant.linear_by_heads(x, weight)

    together = run(x)
    for rows in BATCHES:
        assert (bits(run(x[rows])) == bits(together)[rows]).all()
    want = np.asarray(jnp.einsum("thk,hnk->thn", x, weight, preferred_element_type=jnp.float32))
    np.testing.assert_allclose(np.asarray(together, np.float32), want, rtol=2**-8, atol=2e-3)


@pytest.mark.parametrize("width", [512, 2048, 7168])
def test_a_norm(width: int) -> None:
    x, weight = random(0, 2048, width), random(1, width)

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        return batch_invariant.rms_norm(x, weight, 1e-6)

    together, wide = run(x), np.asarray(x, np.float64)
    for rows in BATCHES:
        assert (bits(run(x[rows])) == bits(together)[rows]).all()
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(weight, np.float64)
    np.testing.assert_allclose(np.asarray(together, np.float64), want, rtol=2**-7, atol=1e-6)


def test_a_softmax_over_a_vocabulary() -> None:
    logits = jax.random.normal(jax.random.key(0), (2048, 102_400))
    together = jax.jit(batch_invariant.log_softmax)(logits)
    for rows in BATCHES:
        assert (bits(jax.jit(batch_invariant.log_softmax)(logits[rows])) == bits(together)[rows]).all()
    np.testing.assert_allclose(together[:64], jax.nn.log_softmax(logits[:64]), rtol=1e-6, atol=2e-5)
