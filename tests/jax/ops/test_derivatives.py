"""The table of docs/guides/derivatives.md: which operation has a derivative in which mode, and what the others say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax
from tests.jax.ops.prefill_calls import arrays, attend, attend_kv, layer_arrays
from tests.jax.ops.programs import ints
from tsmla_jax import sparse

Arrays = tuple[jax.Array, ...]


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def total(results: Any) -> jax.Array:
    """The sum of the finite numbers of all results in floating point."""
    leaves = [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32).sum() for x in leaves), jnp.float32(0))


def write_call(implementation: str, *floats: jax.Array) -> Any:
    return tsmla_jax.write_kv_cache(*floats, ints([17, -1, 4]), implementation=implementation)


def rope_write_call(implementation: str, cache: jax.Array, *floats: jax.Array) -> Any:
    angles = normal(9, 3, 4)
    where = (ints([17, -1, 4]), jnp.cos(angles), jnp.sin(angles))
    return tsmla_jax.rope_write_kv_cache(cache, *floats, *where, implementation=implementation)


def gather_call(implementation: str, cache: jax.Array) -> Any:
    tables, starts, lens = ints([[1, 0]]), ints([5]), ints([20])
    return tsmla_jax.gather_kv_cache(cache, tables, starts, lens, total_len=22, implementation=implementation)


def indexer_call(implementation: str, *floats: jax.Array) -> Any:
    return tsmla_jax.indexer_logits(*floats, ints([[1, 0], [0, 1]]), ints([20, 3]), implementation=implementation)


def selected_call(implementation: str, *floats: jax.Array) -> Any:
    return tsmla_jax.indexer_selected_logits(*floats, ints([[3, -1, 17], [5, 5, 0]]), implementation=implementation)


def loss_call(implementation: str, *floats: jax.Array) -> Any:
    attention = normal(3, 2, 2, 24), normal(4, 2, 16, 24), jnp.ones((2, 2))
    where = {"indices": ints([[3, -1, 17], [5, 2, 0]]), "softmax_scale": 0.3}
    return tsmla_jax.indexer_loss(*floats, *attention, **where, implementation=implementation)


def compress_call(implementation: str, kv_score: jax.Array, ape: jax.Array) -> Any:
    state = sparse.init_compressor_state(2, ratio=4, channels=8, overlap=False)
    where = {"state_slots": ints([1]), "seq_lens": ints([9]), "cu_seqlens_q": ints([0, 9])}
    entries, _ = tsmla_jax.compress_kv(
        kv_score, ape, state, **where, ratio=4, overlap=False, implementation=implementation
    )
    return entries.kv


def merge_call(implementation: str, *floats: jax.Array) -> Any:
    return tsmla_jax.merge_attention_states(*floats, implementation=implementation)


def sparse_call(implementation: str, q: jax.Array, cache: jax.Array) -> Any:
    indices = ints([[3, 0, 17, -1]])
    return tsmla_jax.sparse_mla(
        q, cache, indices, softmax_scale=0.3, latent_dim=16, return_lse=True, implementation=implementation
    )


def decode_call(implementation: str, q: jax.Array, cache: jax.Array) -> Any:
    where = (ints([[1, 0]]), ints([20]))
    return tsmla_jax.mla_decode(
        q, cache, *where, softmax_scale=0.3, latent_dim=16, return_lse=True, implementation=implementation
    )


def prefill_call(implementation: str, *floats: jax.Array) -> Any:
    return attend(implementation)(*floats)


def prefill_kv_call(implementation: str, *floats: jax.Array) -> Any:
    return attend_kv(implementation)(*floats)


PREFILL = {
    "mla_prefill": (prefill_call, tuple(arrays(k_dim=24, v_dim=16, dtype=jnp.float32))),
    "mla_prefill_kv": (prefill_kv_call, tuple(x.astype(jnp.float32) for x in layer_arrays())),
}
BOTH_MODES: dict[str, tuple[Callable[..., Any], Arrays]] = {
    "write_kv_cache": (write_call, (normal(0, 2, 16, 24), normal(1, 3, 16), normal(2, 3, 8))),
    "rope_write_kv_cache": (
        rope_write_call,
        (normal(0, 2, 16, 24), normal(1, 3, 2, 16), normal(2, 3, 2, 8), normal(3, 3, 16), normal(4, 3, 8)),
    ),
    "gather_kv_cache": (gather_call, (normal(0, 2, 16, 24),)),
}
INDEXER: Arrays = (normal(0, 2, 3, 8), normal(1, 2, 3), normal(2, 2, 16, 8))
REVERSE_MODE = PREFILL | {
    "merge_attention_states": (merge_call, (normal(0, 2, 5, 3, 8), normal(1, 2, 5, 3))),
    "indexer_logits": (indexer_call, INDEXER),
    "indexer_selected_logits": (selected_call, INDEXER),
    "indexer_loss": (loss_call, INDEXER),
    "sparse_mla": (sparse_call, (normal(0, 1, 2, 24), normal(1, 2, 16, 24))),
}
LOOPS = {
    "compress_kv": (compress_call, (normal(0, 9, 2, 8), normal(1, 4, 8))),
}
REFUSED = {
    "mla_decode": (decode_call, (normal(0, 1, 1, 2, 24), normal(1, 2, 16, 24)), "train through mla_prefill"),
}


def gradient(call: Callable[..., Any], implementation: str, floats: Arrays) -> Any:
    loss = jax.jit(jax.grad(lambda *x: total(call(implementation, *x)), tuple(range(len(floats)))))
    return loss(*floats)


def tangent(call: Callable[..., Any], implementation: str, floats: Arrays) -> Any:
    ones = tuple(map(jnp.ones_like, floats))
    return jax.jit(lambda *x: jax.jvp(lambda *x: total(call(implementation, *x)), x, ones)[1])(*floats)


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * max(1.0, float(np.abs(b).max())))


@pytest.mark.parametrize("op", BOTH_MODES)
def test_both_modes(op: str) -> None:
    call, floats = BOTH_MODES[op]
    for derive in (gradient, tangent):
        assert_same(derive(call, "xla", floats), derive(call, "reference", floats))


@pytest.mark.parametrize("op", REVERSE_MODE)
def test_reverse_mode_alone(op: str) -> None:
    call, floats = REVERSE_MODE[op]
    assert_same(gradient(call, "xla", floats), gradient(call, "reference", floats))
    with pytest.raises(TypeError, match="forward-mode"):
        tangent(call, "xla", floats)
    assert np.isfinite(tangent(call, "reference", floats))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="emulates the kernels on CPUs")
@pytest.mark.usefixtures("emulated_prefill")
@pytest.mark.parametrize(("call", "make"), [(prefill_call, arrays), (prefill_kv_call, layer_arrays)])
def test_forward_mode_of_the_kernels(call: Callable[..., Any], make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="forward-mode"):
        tangent(call, "cute", tuple(make()))


@pytest.mark.parametrize("op", LOOPS)
def test_loops_of_unknown_length(op: str) -> None:
    call, floats = LOOPS[op]
    for derive in (gradient, tangent):
        with pytest.raises(NotImplementedError, match=f"{op} under jax.jit has no derivative .*'reference'"):
            derive(call, "xla", floats)
        want = derive(call, "reference", floats)
        with jax.disable_jit():
            assert_same(derive(call, "xla", floats), want)


def gradient_norm(call: Callable[..., Any], implementation: str, floats: Arrays, x: jax.Array) -> jax.Array:
    return jnp.square(jax.grad(lambda x: total(call(implementation, x, *floats[1:])))(x)).sum()


@pytest.mark.parametrize("op", PREFILL)
def test_second_derivatives_in_xla(op: str) -> None:
    call, floats = PREFILL[op]
    want = jax.jit(jax.grad(lambda x: gradient_norm(call, "reference", floats, x)))(floats[0])
    assert np.isfinite(want).all()
    message = "the gradient of mla_prefill has no derivative in this implementation; implementation='ref"
    second = jax.grad(lambda x: gradient_norm(call, "xla", floats, x))
    for run in (second, jax.jit(second)):
        with pytest.raises(NotImplementedError, match=message):
            run(floats[0])


def test_logits_of_packed_keys_have_no_derivative() -> None:
    q = jnp.zeros((2, 3, 8), jnp.float8_e4m3fn)
    cache, where = jnp.zeros((2, 16, 12), jnp.uint8), (ints([[1, 0], [0, 1]]), ints([20, 3]))

    def loss(weights: jax.Array) -> jax.Array:
        return total(tsmla_jax.indexer_logits(q, weights, cache, *where, implementation="xla"))

    with pytest.raises(NotImplementedError, match=r"indexer_logits of quantised values has no .* train on plain keys"):
        jax.grad(loss)(normal(1, 2, 3))


@pytest.mark.parametrize("derive", [gradient, tangent])
@pytest.mark.parametrize("op", REFUSED)
def test_refused(op: str, derive: Callable[..., Any]) -> None:
    call, floats, instead = REFUSED[op]
    with pytest.raises(NotImplementedError, match=f"{op} has no derivative in this implementation; {instead}"):
        derive(call, "xla", floats)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(derive(call, "reference", floats)))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_positions_carry_no_derivative(implementation: str) -> None:
    logits = normal(0, 2, 9)

    def loss(logits: jax.Array) -> jax.Array:
        positions = tsmla_jax.select_topk(logits, ints([9, 4]), 3, implementation=implementation)
        return (positions * jnp.float32(2)).sum()

    assert not jax.jit(jax.grad(loss))(logits).any()


SEES = ints([[0, 1], [2, 3], [-1, -1], [4, 5]])
TEXTS: dict[str, Any] = {"block_tables": ints([[0], [1]]), "seq_lens": ints([3, 4]), "cu_seqlens_q": ints([0, 1, 2])}
OF_NO_KEYS: dict[str, Callable[..., Any]] = {
    # Of each operation, a function of (implementation, q, keys, a number for each token and head, a scale). Tokens 2
    # and 3, or 2 alone, see no key.
    "sparse_mla": lambda name, q, keys, _, scale: tsmla_jax.sparse_mla(
        q, keys, SEES, softmax_scale=scale, q_scale=scale, latent_dim=8, implementation=name
    ),
    "indexer_logits": lambda name, q, keys, weights, _: tsmla_jax.indexer_logits(
        q, weights, keys, **TEXTS, implementation=name
    ),
    "indexer_selected_logits": lambda name, q, keys, weights, _: tsmla_jax.indexer_selected_logits(
        q, weights, keys, SEES, implementation=name
    ),
    "indexer_loss": lambda name, q, keys, weights, scale: tsmla_jax.indexer_loss(
        q, weights, keys, jnp.ones((4, 2, 8)), keys, jnp.ones((4, 2)), softmax_scale=scale, indices=SEES,
        implementation=name,
    ),
    "mla_decode": lambda name, q, keys, _, scale: tsmla_jax.mla_decode(
        q, keys, **TEXTS, max_q_len=2, softmax_scale=scale, q_scale=scale, latent_dim=8, implementation=name
    ),
    "mla_decode of no keys": lambda name, q, keys, _, scale: tsmla_jax.mla_decode(
        q[:, None], keys, ints([[0], [1], [0], [1]]), ints([3, 4, 0, 1]), softmax_scale=scale, q_scale=scale,
        latent_dim=8, implementation=name,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "implementation"),
    [(op, name) for op in OF_NO_KEYS for name in ("xla", "reference") if name == "reference" or "decode" not in op],
)
def test_a_query_without_keys_may_be_nan(op: str, implementation: str) -> None:
    """As padding is: no derivative knows of it."""
    q, keys, weights = normal(0, 4, 2, 8), normal(1, 2, 4, 8), normal(2, 4, 2)

    def gradients(q: jax.Array) -> Arrays:
        run = OF_NO_KEYS[op]
        found: Arrays = jax.jit(jax.grad(lambda *x: total(run(implementation, *x)), (0, 1, 2, 3)))(
            q, keys, weights, jnp.float32(0.3)
        )
        return found

    want = gradients(q.at[2].set(0))
    for got, expected in zip(gradients(q.at[2].set(jnp.nan)), want, strict=True):
        np.testing.assert_array_equal(got, expected)
