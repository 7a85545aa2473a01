"""TSMLA_CHECK=1: errors in values are reported with their request; without the switch nothing is reported."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax

pytestmark = pytest.mark.usefixtures("quick_compilation")


def decode(seq_lens: Any, block_tables: Any, cu_seqlens_q: Any = None) -> jax.Array:
    ragged = {} if cu_seqlens_q is None else {"cu_seqlens_q": cu_seqlens_q, "max_q_len": 2}
    shape = (3, 1, 2, 48) if cu_seqlens_q is None else (4, 2, 48)
    return tsmla_jax.mla_decode(
        jnp.ones(shape), jnp.ones((6, 16, 48)), block_tables, seq_lens, softmax_scale=0.1, latent_dim=32, **ragged
    )


def prefill(cu_q: Any, cu_kv: Any) -> jax.Array:
    x = jnp.ones((6, 2, 8))
    return tsmla_jax.mla_prefill(
        x, x, x, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, max_q_len=4, max_kv_len=5, softmax_scale=0.1
    )


def write(slots: Any) -> jax.Array:
    return tsmla_jax.write_kv_cache(jnp.ones((6, 16, 8)), jnp.ones((3, 8)), None, slots)


def gather(starts: Any, lens: Any, block_tables: Any) -> jax.Array:
    return tsmla_jax.gather_kv_cache(jnp.ones((6, 16, 8)), block_tables, starts, lens, total_len=40)


TABLES = [[0, 1], [2, 3], [4, 5]]
WRONG = [
    (decode, ([5, 33, 0], TABLES), r"seq_lens: request 1 has 33 keys; legal: 0 to 32"),
    (decode, ([5, 3, -1], TABLES), r"seq_lens: request 2 has -1 keys"),
    (decode, ([5, 17, 0], [[0, 1], [2, 6], [4, 5]]), r"block_tables: request 1 names page 6 in entry 1.*legal: 0 to 5"),
    (decode, ([5, 5, 5], [[0, 1], [2, 3], [-1, 5]]), r"block_tables: request 2 names page -1 in entry 0"),
    (decode, ([5, 5, 5], TABLES, [0, 2, 1, 3]), r"cu_seqlens_q: request 1 has -1 tokens"),
    (decode, ([5, 5, 5], TABLES, [0, 1, 4, 4]), r"cu_seqlens_q: request 1 has 3 tokens; legal: at most max_q_len = 2"),
    (decode, ([5, 5, 5], TABLES, [1, 1, 2, 3]), r"cu_seqlens_q: starts at 1; legal: 0"),
    (decode, ([5, 5, 5], TABLES, [0, 2, 4, 5]), r"cu_seqlens_q: ends at 5; legal: at most the 4"),
    (prefill, ([0, 2, 1], [0, 1, 2]), r"cu_seqlens_q: request 1 has -1 tokens"),
    (prefill, ([0, 1, 2], [0, 0, 6]), r"cu_seqlens_kv: request 1 has 6 tokens; legal: at most max_kv_len = 5"),
    (write, ([0, 96, 3],), r"slot_mapping: token 1 goes to slot 96; legal: -1, or 0 to 95"),
    (write, ([0, 4, -2],), r"slot_mapping: token 2 goes to slot -2"),
    (write, ([7, 0, 7],), r"slot_mapping: tokens 0 and 2 both go to slot 7"),
    (gather, ([0, 30, 0], [3, 3, 3], TABLES), r"starts, lens: request 1 asks for 3 tokens from 30 on"),
    (gather, ([0, 16, 0], [3, 3, 3], [[0, 1], [2, 9], [4, 5]]), r"block_tables: request 1 names page 9 in entry 1"),
    (gather, ([0, 0, 0], [20, 20, 20], TABLES), r"lens: 60 tokens in all; legal: at most total_len = 40"),
]
RIGHT = [
    (decode, ([0, 32, 16], [[9, -3], [2, 3], [4, 2**31 - 1]])),
    (decode, ([0, 32, 16], TABLES, [0, 2, 2, 3])),
    (prefill, ([0, 0, 4], [0, 5, 6])),
    (write, ([95, -1, 0],)),
    (gather, ([0, 17, 0], [0, 15, 16], [[7, 7], [-1, 3], [4, 99]])),
]


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
