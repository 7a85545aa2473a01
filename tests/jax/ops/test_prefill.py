"""mla_prefill: the reference against an independent oracle, xla against the reference, gradients and their memory."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import tsmla_jax
from tests.jax.ops.programs import assert_same_lse
from tests.oracles import attention as oracle

IMPLEMENTATIONS = ("reference", "xla")
STATIC = ("max_q_len", "max_kv_len", "causal")
RUN = {
    name: jax.jit(
        functools.partial(tsmla_jax.mla_prefill, return_lse=True, implementation=name), static_argnames=STATIC
    )
    for name in IMPLEMENTATIONS
}


class Packed(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    cu_q: np.ndarray
    cu_kv: np.ndarray


def packed(
    q_lens: list[int],
    kv_lens: list[int],
    *,
    heads: int = 2,
    qk: int = 24,
    v: int = 16,
    padding: int = 0,
    dtype: str = "float32",
    seed: int = 0,
) -> Packed:
    """Random packed inputs, `padding` more rows of NaN after each."""
    rng = np.random.default_rng(seed)
    cu_q, cu_kv = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (q_lens, kv_lens))
    arrays = []
    for cu, width in ((cu_q, qk), (cu_kv, qk), (cu_kv, v)):
        rows = rng.standard_normal((int(cu[-1]) + padding, heads, width), np.float32)
        rows[cu[-1] :] = np.nan
        arrays.append(rows.astype(jnp.dtype(dtype)))
    return Packed(*arrays, cu_q, cu_kv)


def run(name: str, x: Packed, *, causal: bool = True, scale: float = 0.2, **options: object) -> tuple[np.ndarray, ...]:
    longest = {"max_q_len": int(np.diff(x.cu_q).max()), "max_kv_len": int(np.diff(x.cu_kv).max())}
    out, lse = RUN[name](
        x.q,
        x.k,
        x.v,
        cu_seqlens_q=x.cu_q,
        cu_seqlens_kv=x.cu_kv,
        softmax_scale=scale,
        causal=causal,
        **(longest | options),
    )
    return np.asarray(out), np.asarray(lse)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [True, False])
def test_equals_the_oracle(name: str, causal: bool) -> None:
    # Zero-length queries and keys, more queries than keys, and lengths across the tile and block sizes of xla.
    x = packed([0, 5, 130, 40, 7, 3], [7, 0, 200, 300, 3, 1], padding=9, seed=1)
    out, lse = run(name, x, causal=causal)
    want, want_lse = oracle.prefill(x.q, x.k, x.v, x.cu_q, x.cu_kv, scale=0.2, causal=causal)
    np.testing.assert_allclose(out, want, atol=5e-6)
    assert_same_lse(lse, want_lse, 5e-6)


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "heads", "qk", "v"),
    [([300, 1], [300, 600], 3, 192, 128), ([64], [64], 1, 128, 128), ([1] * 5, [513, 2, 256, 257, 1], 16, 32, 48)],
)
@pytest.mark.parametrize("causal", [True, False])
def test_xla_equals_reference(q_lens: list[int], kv_lens: list[int], heads: int, qk: int, v: int, causal: bool) -> None:
    x = packed(q_lens, kv_lens, heads=heads, qk=qk, v=v, seed=2)
    out, lse = run("xla", x, causal=causal, scale=qk**-0.5)
    want, want_lse = run("reference", x, causal=causal, scale=qk**-0.5)
    np.testing.assert_allclose(out, want, atol=2e-5)
    assert_same_lse(lse, want_lse, 2e-5)


def test_bf16_error_is_at_most_twice_that_of_plain_bf16() -> None:
    x = packed([256], [256], heads=4, qk=192, v=128, dtype="bfloat16", seed=3)
    exact, exact_lse = oracle.prefill(x.q, x.k, x.v, x.cu_q, x.cu_kv, scale=192**-0.5, causal=True)
    out, lse = run("xla", x, scale=192**-0.5)
    scores = jnp.einsum("qhd,khd->hqk", x.q, x.k) * jnp.bfloat16(192**-0.5)
    scores = jnp.where(jnp.tril(jnp.ones((256, 256), bool)), scores, -jnp.inf)
    plain = jnp.einsum("hqk,khv->qhv", jax.nn.softmax(scores, axis=-1), x.v)
    assert out.dtype == jnp.bfloat16
    assert np.abs(out.astype(np.float64) - exact).max() <= 2 * np.abs(np.asarray(plain, np.float64) - exact).max()
    assert_same_lse(lse, exact_lse, 1e-5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_fp8_with_its_three_scales(name: str) -> None:
    x = packed([20, 3], [40, 5], dtype="float8_e4m3fn", seed=4)
    out, lse = run(name, x, q_scale=0.5, k_scale=2.0, v_scale=0.25)
    q, k, v = (a.astype(np.float64) for a in (x.q, x.k, x.v))
    want, want_lse = oracle.prefill(q * 0.5, k * 2.0, v * 0.25, x.cu_q, x.cu_kv, scale=0.2, causal=True)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=2**-8, atol=1e-5)
    assert_same_lse(lse, want_lse, 1e-5)


def loss(name: str, x: Packed, causal: bool, q: jax.Array, k: jax.Array, v: jax.Array, scales: jax.Array) -> jax.Array:
    """Something that depends on every output, with lse of rows that see nothing left out."""
    out, lse = tsmla_jax.mla_prefill(
        q,
        k,
        v,
        cu_seqlens_q=x.cu_q,
        cu_seqlens_kv=x.cu_kv,
        max_q_len=150,
        max_kv_len=300,
        softmax_scale=scales[0],
        q_scale=scales[1],
        k_scale=scales[2],
        v_scale=scales[3],
        causal=causal,
        return_lse=True,
        implementation=name,
    )
    return (jnp.sin(out) * jnp.arange(1.0, 1.0 + out.shape[-1])).sum() + jnp.where(lse == -jnp.inf, 0, lse**2).sum()


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_equal_the_reference(causal: bool) -> None:
    x = packed([0, 5, 140, 7], [7, 0, 300, 3], padding=3, seed=5)
    scales = jnp.asarray([0.2, 1.5, 0.75, 2.0], jnp.float32)
    grads = {
        name: jax.jit(jax.grad(functools.partial(loss, name, x, causal), argnums=(0, 1, 2, 3)))(x.q, x.k, x.v, scales)
        for name in IMPLEMENTATIONS
    }
    for got, want in zip(grads["xla"], grads["reference"], strict=True):
        assert np.isfinite(got).all()
        assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_gradients_equal_finite_differences(name: str) -> None:
    with jax.enable_x64(True):
        x = packed([4, 2], [6, 1], dtype="float64", seed=6)
        scales = jnp.asarray([0.2, 1.5, 0.75, 2.0], jnp.float64)
        function = jax.jit(functools.partial(loss, name, x, True))
        check_grads(function, (x.q, x.k, x.v, scales), order=1, modes=["rev"], rtol=1e-6)


def test_memory_of_the_gradient_is_linear_in_the_tokens() -> None:
    def temporaries(tokens: int) -> int:
        def total(q: jax.Array, k: jax.Array, v: jax.Array, cu: jax.Array) -> jax.Array:
            out = tsmla_jax.mla_prefill(
                q,
                k,
                v,
                cu_seqlens_q=cu,
                cu_seqlens_kv=cu,
                max_q_len=tokens,
                max_kv_len=tokens,
                softmax_scale=0.1,
                implementation="xla",
            )
            return out.sum()

        row = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        shapes = (
            row((tokens, 4, 64)),
            row((tokens, 4, 64)),
            row((tokens, 4, 64)),
            jax.ShapeDtypeStruct((2,), jnp.int32),
        )
        compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # One score matrix of 16384 tokens would be 4 GB.
    small, large = temporaries(4096), temporaries(16384)
    assert large <= 4 * small
    assert large < 8 * 16384 * 4 * 64 * 4


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_empty_shapes(name: str) -> None:
    for tokens, keys, batch in [(0, 3, 1), (3, 0, 1), (3, 3, 0)]:
        cu_q = jnp.asarray([0, tokens][: batch + 1], jnp.int32)
        cu_kv = jnp.asarray([0, keys][: batch + 1], jnp.int32)
        out, lse = tsmla_jax.mla_prefill(
            jnp.ones((tokens, 2, 8)),
            jnp.ones((keys, 2, 8)),
            jnp.ones((keys, 2, 4)),
            cu_seqlens_q=cu_q,
            cu_seqlens_kv=cu_kv,
            max_q_len=tokens,
            max_kv_len=keys,
            softmax_scale=0.1,
            return_lse=True,
            implementation=name,
        )
        assert out.shape == (tokens, 2, 4)
        assert (np.asarray(out) == 0).all()
        assert np.isneginf(np.asarray(lse)).all()


@settings(max_examples=12)
@given(
    lens=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), min_size=3, max_size=3),
    causal=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_ragged_batch(lens: list[tuple[int, int]], causal: bool, seed: int) -> None:
    q_lens, kv_lens = [n for n, _ in lens], [m for _, m in lens]
    x = packed(q_lens, kv_lens, padding=120, seed=seed)
    x = Packed(x.q[:90], x.k[:120], x.v[:120], x.cu_q, x.cu_kv)  # one shape for every example
    out, lse = run("xla", x, causal=causal, max_q_len=30, max_kv_len=40)
    want, want_lse = oracle.prefill(x.q, x.k, x.v, x.cu_q, x.cu_kv, scale=0.2, causal=causal)
    np.testing.assert_allclose(out, want, atol=5e-6)
    assert_same_lse(lse, want_lse, 5e-6)
