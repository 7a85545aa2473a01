"""Rows whose visible scores are all -inf, as queries that overflowed float16 make them: NaN, as 0 / 0 weights are, and
not what a row that sees no key has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import tsmla_jax

IMPLEMENTATIONS = ("xla", "reference")
KEYS = np.ones((2, 16, 24), np.float32)
STARTS = np.int32([0, 2, 3])


def decode(q: jax.Array, **options: Any) -> Any:
    return tsmla_jax.mla_decode(q[:, None], KEYS, np.int32([[0], [1], [1]]), np.int32([3, 16, 0]), **options)


def sparse(q: jax.Array, **options: Any) -> Any:
    return tsmla_jax.sparse_mla(q, KEYS, np.int32([[3, -1], [16, 31], [-1, -1]]), **options)


def two_caches(q: jax.Array, **options: Any) -> Any:
    slots = np.int32([[3, -1, -1, -1], [-1, -1, 16, -1], [-1, 32, -1, -1]])
    return tsmla_jax.sparse_mla(q, KEYS, slots, compressed_kv_cache=KEYS, window=2, sinks=np.zeros(1), **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("call", [decode, sparse, two_caches])
def test_absorbed(call: Callable[..., Any], implementation: str) -> None:
    """The third token sees no key."""
    q = np.full((3, 1, 24), -np.inf, np.float32)
    q[1] = 1
    options = {"softmax_scale": 0.3, "latent_dim": 16, "return_lse": True, "implementation": implementation}
    out, lse = jax.jit(functools.partial(call, **options))(q)
    out, lse = np.asarray(out).reshape(3, 16), np.asarray(lse).reshape(3)
    assert np.isnan(out[0]).all() and np.isnan(lse[0])
    assert np.isfinite(out[1]).all() and np.isfinite(lse[1])
    assert (out[2] == 0).all() and lse[2] == -np.inf


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.sampled(2)
def test_prefill_and_its_gradient(implementation: str) -> None:
    """The gradient of an overflow is no zero: loss scaling would not see it. The last row belongs to no request."""
    keys = np.ones((3, 1, 8), np.float32)

    @jax.jit
    def attend(q: jax.Array) -> tuple[jax.Array, jax.Array]:
        return tsmla_jax.mla_prefill(
            q,
            keys,
            keys,
            cu_seqlens_q=STARTS,
            cu_seqlens_kv=STARTS,
            max_q_len=2,
            max_kv_len=2,
            softmax_scale=0.3,
            return_lse=True,
            implementation=implementation,
        )

    q = np.ones((4, 1, 8), np.float32)
    q[0] = -np.inf
    out, lse = jax.device_get(attend(q))
    assert np.isnan(out[0]).all() and np.isnan(lse[0]).all()
    assert np.isfinite(out[1:3]).all() and (out[3] == 0).all() and (lse[3] == -np.inf).all()
    gradient = jax.jit(jax.grad(lambda q: attend(q)[0].sum()))(q)
    assert np.isnan(np.asarray(gradient)[0]).all()
