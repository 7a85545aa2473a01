"""Sinks and greatest logits of mla_prefill, mla_prefill_kv: the definition by hand, gradients, and every implementation
beside the reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax
from tests.jax.ops import prefill_calls
from tests.jax.ops.prefill_calls import HEADS, KV_LENS, Q_LENS, attend, attend_kv

SINKS = jnp.asarray([-2.0, 0.5, 3.0, 30.0], jnp.float32)


def operands(dtype: Any = jnp.float32) -> list[jax.Array]:
    arrays = [np.array(x) for x in prefill_calls.arrays(k_dim=24, v_dim=16, dtype=dtype)]
    for x, end in zip(arrays, (sum(Q_LENS), sum(KV_LENS), sum(KV_LENS)), strict=True):
        x[end:] = np.nan
    return [jnp.asarray(x) for x in arrays]


def compiled(run: Any) -> Any:
    """As a whole: eagerly, each operation would be compiled for itself."""
    return jax.jit(run, static_argnames=("return_lse", "return_max_logits"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.sampled(2)
def test_by_hand(implementation: str, causal: bool) -> None:
    """Row by row: a softmax over the keys and one logit more, and the greatest of the keys' logits."""
    q, k, v = operands()
    run = compiled(attend(implementation, causal=causal, sinks=SINKS, return_max_logits=True))
    out, lse, greatest = jax.device_get(run(q, k, v))
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    sinks = np.asarray(SINKS, np.float64)
    first_q, first_k = np.cumsum((0, *Q_LENS)), np.cumsum((0, *KV_LENS))
    for request, (n, m) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
        for i in range(n):
            row, seen = first_q[request] + i, min(m, i + 1 + m - n) if causal else m
            keys = slice(first_k[request], first_k[request] + max(seen, 0))
            logits = 0.07 * np.einsum("hd,khd->hk", q[row], k[keys])
            weights = np.exp(logits - np.logaddexp(np.logaddexp.reduce(logits, axis=1), sinks)[:, None])
            want = np.einsum("hk,khv->hv", weights, v[keys])
            np.testing.assert_allclose(out[row], want, rtol=2e-5, atol=2e-6)
            np.testing.assert_allclose(lse[row], np.logaddexp.reduce(logits, axis=1), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(greatest[row], logits.max(1, initial=-np.inf), rtol=1e-5, atol=1e-5)
    assert (out[sum(Q_LENS) :] == 0).all() and (greatest[sum(Q_LENS) :] == -np.inf).all()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_what_is_returned(implementation: str) -> None:
    q, k, v = operands()
    run = compiled(attend(implementation, sinks=SINKS))
    out, lse, greatest = run(q, k, v, return_max_logits=True)
    alone, with_greatest = run(q, k, v, return_lse=False), run(q, k, v, return_lse=False, return_max_logits=True)
    np.testing.assert_array_equal(alone, out)
    for got, want in zip(with_greatest, (out, greatest), strict=True):
        np.testing.assert_array_equal(got, want)
    assert greatest.shape == lse.shape and greatest.dtype == lse.dtype
    nothing = tsmla_jax.mla_prefill(
        q[:0],
        k[:0],
        v[:0],
        cu_seqlens_q=jnp.zeros(1, jnp.int32),
        max_q_len=0,
        softmax_scale=1.0,
        return_max_logits=True,
    )
    assert [x.shape for x in nothing] == [(0, HEADS, 16), (0, HEADS)]


def test_a_score_that_is_not_finite() -> None:
    """max_logits is NaN where lse is."""
    q, k, v = operands()
    q, k = np.abs(q), np.array(k)
    k[0] = np.inf
    for implementation in ("xla", "reference"):
        _, lse, greatest = jax.device_get(compiled(attend(implementation, return_max_logits=True))(q, k, v))
        assert (np.isnan(lse) == np.isnan(greatest)).all() and np.isnan(lse[0]).all()


def loss(run: Any, *arrays: jax.Array, sinks: jax.Array, use_lse: bool = True) -> jax.Array:
    out, lse = run(*arrays, sinks=sinks)
    rows = jnp.where(lse == -jnp.inf, 0, jnp.cos(lse)) if use_lse else 0
    return jnp.sin(3 * out.astype(jnp.float32)).sum() + jnp.sum(rows)


@pytest.mark.parametrize("use_lse", [False, True])
@pytest.mark.parametrize("shared_rope", [False, True])
@pytest.mark.sampled(2)
def test_gradients(shared_rope: bool, use_lse: bool) -> None:
    """ "xla" beside the reference, whose gradient is jax's own; a sink may have nearly all weight, or none."""
    arrays = [np.asarray(x, np.float32) for x in (prefill_calls.layer_arrays() if shared_rope else operands())]
    sinks = np.array(SINKS)
    sinks[0], sinks[3] = -np.inf, 60

    def gradients(implementation: str) -> Any:
        run = (attend_kv if shared_rope else attend)(implementation)
        of_all = jax.grad(lambda arrays, sinks: loss(run, *arrays, sinks=sinks, use_lse=use_lse), (0, 1))
        return jax.jit(of_all)(arrays, sinks)

    if not shared_rope:  # the reference's own gradient has no place for NaN
        arrays = [np.nan_to_num(x) for x in arrays]
    (got, got_sinks), (want, want_sinks) = gradients("xla"), gradients("reference")
    for a, b in zip((*got, got_sinks), (*want, want_sinks), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    assert (np.asarray(got_sinks)[1:3] != 0).all()


@pytest.mark.parametrize("sink", [95.0, np.inf])
def test_gradients_of_a_sink_with_all_weight(sink: float) -> None:
    """lse is without the sink, and keeps its gradient."""
    arrays = [np.nan_to_num(x) for x in operands()]
    sinks = jnp.full(HEADS, sink, jnp.float32)

    def gradients(implementation: str) -> Any:
        run = attend(implementation)
        return jax.jit(jax.grad(lambda arrays, sinks: loss(run, *arrays, sinks=sinks), (0, 1)))(arrays, sinks)

    (got, got_sinks), (want, want_sinks) = gradients("xla"), gradients("reference")
    for a, b in zip((*got, got_sinks), (*want, want_sinks), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    assert (np.asarray(got[0]) != 0).any()


def test_max_logits_carry_no_derivative() -> None:
    q, k, v = map(np.nan_to_num, operands())
    for implementation in ("xla", "reference"):
        run = attend(implementation, return_max_logits=True)
        derivative = jax.grad(lambda q, run=run: jnp.where(jnp.isfinite(x := run(q, k, v)[2]), x, 0).sum())
        assert (np.asarray(jax.jit(derivative)(q)) == 0).all()


def test_transformations() -> None:
    """vmap of sinks alone and of all, and half precision of sinks."""
    q, k, v = operands()
    run = compiled(attend("xla", return_max_logits=True))
    many = np.stack([SINKS, -np.asarray(SINKS)])
    each = jax.device_get(jax.jit(jax.vmap(lambda sinks: run(q, k, v, sinks=sinks)))(many))
    for i, sinks in enumerate(many):
        for got, want in zip(each, run(q, k, v, sinks=sinks), strict=True):
            np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-6)
    half = np.asarray(SINKS, jnp.bfloat16)
    np.testing.assert_array_equal(run(q, k, v, sinks=half)[0], run(q, k, v, sinks=np.float32(half))[0])


def test_what_is_refused() -> None:
    q, k, v = operands()
    with pytest.raises(ValueError, match=r"sinks: got shape \[3\]; axis 0 must be 4"):
        attend("xla")(q, k, v, sinks=SINKS[:3])
    with pytest.raises(ValueError, match=r"sinks: got dtype int32; legal: float16"):
        attend("xla")(q, k, v, sinks=SINKS.astype(jnp.int32))
    with pytest.raises(TypeError, match="return_max_logits: got int; legal: True or False"):
        attend("xla")(q, k, v, return_max_logits=1)
