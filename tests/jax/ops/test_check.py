"""TSMLA_CHECK=1: errors in values are reported with their request; without the switch nothing is reported."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax
from tests.oracles.wrong_values import RIGHT, TABLES, WRONG, decode


def ints(arguments: tuple[Any, ...]) -> list[np.ndarray]:
    return [np.asarray(x, np.int32) for x in arguments]


UNSOUND = ([0, 4, 2, 9], [5, 0, 3, 7], [-3, 2, 2, 99])
"""Offsets of three requests in six rows that decrease, begin behind 0, or leave the rows."""


@pytest.mark.parametrize("offsets", UNSOUND)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_unsound_offsets_give_rows_of_the_right_shape(implementation: str, offsets: list[int]) -> None:
    """Rows without meaning, as the docstrings say, and made of the arguments alone: no NaN comes from elsewhere."""
    q, cache = jnp.ones((6, 2, 48)), jnp.ones((6, 16, 48))
    tables, lens = jnp.arange(6, dtype=jnp.int32).reshape(3, 2), jnp.asarray([20, 3, 7], jnp.int32)
    starts = jnp.asarray(offsets, jnp.int32)
    out = tsmla_jax.mla_decode(
        q, cache, tables, lens, softmax_scale=0.1, latent_dim=32, cu_seqlens_q=starts, max_q_len=2,
        implementation=implementation,
    )  # fmt: skip
    assert out.shape == (6, 2, 32) and jnp.isin(jnp.round(out, 3), jnp.asarray([0.0, 1.0])).all()
    for operation in (tsmla_jax.mla_decode, tsmla_jax.mla_prefill):
        assert "nsound" in (operation.__doc__ or "") and "TSMLA_CHECK" in (operation.__doc__ or "")


@pytest.mark.parametrize(("call", "arguments", "message"), WRONG)
def test_wrong_data_is_named(
    call: Any, arguments: tuple[Any, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(*ints(arguments))  # unchecked, it reads inside the cache and says nothing
    monkeypatch.setenv("TSMLA_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        call(*ints(arguments))


@pytest.mark.parametrize(("call", "arguments", "message"), [WRONG[0], WRONG[5], WRONG[9], WRONG[10], WRONG[13]])
def test_wrong_data_is_named_under_jit(
    call: Any, arguments: tuple[Any, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.jit(functools.partial(call))(*ints(arguments)))


@pytest.mark.parametrize(("call", "arguments"), RIGHT)
def test_right_data_passes_and_gives_the_same(
    call: Any, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = call(*ints(arguments))
    monkeypatch.setenv("TSMLA_CHECK", "1")
    np.testing.assert_array_equal(call(*ints(arguments)), want)
    np.testing.assert_allclose(jax.jit(functools.partial(call))(*ints(arguments)), want, atol=1e-6)


def test_check_under_vmap_and_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    lens = np.int32([[5, 5, 5], [5, 40, 5]])
    with pytest.raises(jax.errors.JaxRuntimeError, match="request 1 has 40 keys"):
        jax.block_until_ready(jax.jit(jax.vmap(lambda n: decode(n, np.int32(TABLES))))(lens))
    cu = np.int32([0, 2, 4])
    x = jnp.ones((6, 2, 8))

    def total(q: jax.Array, cu: jax.Array) -> jax.Array:
        return tsmla_jax.mla_prefill(
            q, x, x, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_q_len=4, max_kv_len=5, softmax_scale=0.1
        ).sum()

    assert np.isfinite(jax.jit(jax.grad(total))(x, cu)).all()


@pytest.mark.parametrize("value", ["0", ""])
def test_off_values(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", value)
    decode(*ints(([5, 33, 0], TABLES)))
