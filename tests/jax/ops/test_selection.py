"""The selection of keys by bits: selection_bits, and mla_prefill and mla_prefill_kv with a selection."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tests.jax.ops import prefill_calls
from tests.jax.ops.prefill_calls import KV_LENS, PADDING, Q_LENS, offsets
from tsmla_jax.ops.mla_prefill_kv.reference import expand

TOKENS, KEYS = sum(Q_LENS) + PADDING, max(KV_LENS)


def bits_of(words: Any) -> np.ndarray:
    """Words as bools [R, 32 W]."""
    words = np.asarray(words).view(np.uint32)
    return ((words[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1).reshape(len(words), -1).astype(bool)


def selection(seed: int = 0, tokens: int = TOKENS, keys: int = KEYS) -> tuple[np.ndarray, np.ndarray]:
    """Words of about half of the keys, of none for the first token, and rows, some of which select all keys."""
    rng = np.random.default_rng(seed)
    words = rng.integers(-(2**31), 2**31, (tokens, 4 * -(-keys // 128)), np.int64).astype(np.int32)
    rows = rng.permutation(tokens).astype(np.int32)
    words[rows[0]] = 0
    rows[2::5] = -1
    return words, rows


def masked(
    q: Any, k: Any, v: Any, words: np.ndarray, rows: np.ndarray, *, causal: bool, q_lens: Any = Q_LENS,
    kv_lens: Any = KV_LENS, scale: float = 0.07,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The definition in numpy's float64: a softmax over the keys that a row sees and selects."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], -np.inf)
    bits = bits_of(words)
    first_row = first_key = 0
    for n, m in zip(q_lens, kv_lens, strict=True):
        for i in range(n):
            t = first_row + i
            sees = np.arange(m) <= i + m - n if causal else np.ones(m, bool)
            if rows[t] >= 0:
                sees &= bits[rows[t], :m]
            keys = first_key + np.flatnonzero(sees)
            if keys.size:
                scores = np.einsum("hd,khd->hk", q[t], k[keys]) * scale
                greatest = scores.max(-1, keepdims=True)
                weights = np.exp(scores - greatest)
                lse[t] = greatest[:, 0] + np.log(weights.sum(-1))
                out[t] = np.einsum("hk,khv->hv", weights / weights.sum(-1, keepdims=True), v[keys])
        first_row, first_key = first_row + n, first_key + m
    return out, lse


def call(implementation: str, words: Any, rows: Any = None, **options: Any) -> Callable[..., Any]:
    return jax.jit(prefill_calls.attend(implementation, selection=words, selection_rows=rows, **options))


# ---- selection_bits


@pytest.mark.parametrize("given", [(), ("lengths",), ("starts",), ("lengths", "starts")])
@pytest.mark.parametrize("num_keys", [1, 128, 300])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_bits_of_positions(implementation: str, num_keys: int, given: tuple[str, ...]) -> None:
    rng = np.random.default_rng(num_keys)
    positions = rng.integers(-3, num_keys + 60, (6, 40), np.int32)
    positions[1], positions[2] = -1, 5
    positions[3, :2] = 2**31 - 1, -(2**31)
    each = {"lengths": np.int32([40, 40, 0, 7, 99, -1]), "starts": np.int32([0, 3, 0, 50, -4, 9])}
    options = {name: each[name] for name in given}
    words = tsmla_jax.selection_bits(positions, num_keys, **options, implementation=implementation)
    assert words.shape == (6, 4 * -(-num_keys // 128)) and words.dtype == jnp.int32
    want = np.zeros((6, 32 * words.shape[1]), bool)
    for t in range(6):
        count = max(int(options["lengths"][t]), 0) if "lengths" in options else 40
        start = max(int(options["starts"][t]), 0) if "starts" in options else 0
        keys = positions[t, :count].astype(np.int64) - start
        want[t, keys[(keys >= 0) & (keys < want.shape[1])]] = True
    np.testing.assert_array_equal(bits_of(words), want)


def test_bits_of_nothing() -> None:
    assert tsmla_jax.selection_bits(np.zeros((0, 3), np.int32), 5).shape == (0, 4)
    assert not np.any(tsmla_jax.selection_bits(np.zeros((2, 0), np.int32), 5))


def test_bits_under_transformations() -> None:
    positions = np.random.default_rng(0).integers(-3, 200, (3, 4, 20), np.int32)
    run = functools.partial(tsmla_jax.selection_bits, num_keys=200, implementation="xla")
    want = np.stack([run(x) for x in positions])
    np.testing.assert_array_equal(jax.jit(jax.vmap(run))(positions), want)
    scope = export.SymbolicScope()
    symbolic = jax.ShapeDtypeStruct(export.symbolic_shape("t, k", scope=scope), jnp.int32)
    exported = export.deserialize(export.export(jax.jit(run))(symbolic).serialize())
    np.testing.assert_array_equal(exported.call(positions[0]), want[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"positions": np.zeros((2, 3), np.int64)}, r"positions: got dtype int64; legal: int32"),
        ({"positions": np.zeros(3, np.int32)}, r"positions: .* of rank 1; legal: \[T, k\]"),
        ({"num_keys": 0}, r"num_keys: got 0; legal: an int >= 1"),
        ({"lengths": np.zeros(3, np.int32)}, r"lengths: got shape \[3\]; axis 0 must be 2 \(T from positions\)"),
        ({"starts": np.zeros((2, 1), np.int32)}, r"starts: .* of rank 2; legal: \[T\]"),
    ],
)
def test_bits_of_illegal_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tsmla_jax.selection_bits(**({"positions": np.zeros((2, 3), np.int32), "num_keys": 5} | arguments))


# ---- attention of selected keys


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("with_rows", [True, False])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.sampled(2)
def test_values(implementation: str, with_rows: bool, causal: bool) -> None:
    arrays = prefill_calls.arrays(dtype=jnp.float32)
    words, rows = selection()
    given = rows if with_rows else None
    out, lse = call(implementation, words, given, causal=causal)(*arrays)
    want = masked(*arrays, words, rows if with_rows else np.arange(TOKENS), causal=causal)
    np.testing.assert_allclose(out, want[0], atol=2e-6)
    np.testing.assert_allclose(lse, want[1], atol=2e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_long_requests(implementation: str) -> None:
    """Several tiles of queries, blocks of keys and words."""
    q_lens, kv_lens, heads = (150, 40), (520, 40), 2
    rng = np.random.default_rng(1)
    sizes = ((sum(q_lens), 24), (sum(kv_lens), 24), (sum(kv_lens), 16))
    arrays = [rng.normal(size=(rows, heads, width)).astype(np.float32) for rows, width in sizes]
    words, rows = selection(2, sum(q_lens), max(kv_lens))
    options = {"cu_seqlens_q": offsets(q_lens), "cu_seqlens_kv": offsets(kv_lens)}
    options |= {"max_q_len": max(q_lens), "max_kv_len": max(kv_lens), "softmax_scale": 0.3}
    out, lse = call(implementation, words, rows, **options)(*arrays)
    want = masked(*arrays, words, rows, causal=True, q_lens=q_lens, kv_lens=kv_lens, scale=0.3)
    np.testing.assert_allclose(out, want[0], atol=5e-6)
    np.testing.assert_allclose(lse, want[1], atol=5e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_all_keys_selected_is_the_dense_attention(implementation: str) -> None:
    arrays = prefill_calls.arrays()
    want = prefill_calls.attend(implementation)(*arrays)
    none = np.zeros((1, 4), np.int32)
    for words, rows in ((np.full((TOKENS, 4), -1, np.int32), None), (none, np.full(TOKENS, -1, np.int32))):
        for a, b in zip(call(implementation, words, rows)(*arrays), want, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.sampled(2)
def test_chunks_of_context_merge_to_the_whole(implementation: str) -> None:
    """Words of a chunk are made of the positions from its start on."""
    rng = np.random.default_rng(4)
    tokens, context, chunk = 6, 300, 128
    q, k, v = (rng.normal(size=(n, 2, d)).astype(np.float32) for n, d in ((tokens, 24), (context, 24), (context, 16)))
    positions = rng.integers(-1, context, (tokens, 50), np.int32)
    offsets_q = offsets((tokens,))

    @jax.jit
    def attend(k: jax.Array, v: jax.Array, first: jax.Array) -> Any:
        count = len(k)
        words = tsmla_jax.selection_bits(positions, count, starts=jnp.full(tokens, first))
        return tsmla_jax.mla_prefill(
            q,
            k,
            v,
            cu_seqlens_q=offsets_q,
            cu_seqlens_kv=offsets((count,)),
            max_q_len=tokens,
            max_kv_len=count,
            softmax_scale=0.2,
            causal=False,
            return_lse=True,
            selection=words,
            implementation=implementation,
        )

    slices = [(slice(first, first + chunk), np.int32(first)) for first in range(0, context, chunk)]
    parts = [attend(k[part], v[part], first) for part, first in slices]
    merged = tsmla_jax.merge_attention_states(*zip(*parts, strict=True))
    for a, b in zip(merged, attend(k, v, np.int32(0)), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6)


def loss_of(function: Callable[..., Any]) -> Callable[..., jax.Array]:
    def loss(*arrays: jax.Array) -> jax.Array:
        out, lse = function(*arrays)
        weights = jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (out * weights).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    return loss


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.sampled(2)
def test_gradient(causal: bool) -> None:
    """That of XLA's loop against automatic differentiation of the definition; keys that no row selects have none."""
    arrays = prefill_calls.arrays(dtype=jnp.float32)
    words, rows = selection()
    rows[:] = np.maximum(rows, 0)
    words[:, 0] &= ~1  # nobody selects the first key of a request
    got, want = (
        jax.jit(jax.grad(loss_of(call(name, words, rows, causal=causal)), (0, 1, 2)))(*arrays)
        for name in ("xla", "reference")
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    for d in got[1:]:
        assert not np.any(d[0]) and np.any(d[1])


def test_gradient_of_kv_and_k_rope() -> None:
    arrays = [np.asarray(x, np.float32) for x in prefill_calls.layer_arrays()]
    words, rows = selection()

    def attend(name: str) -> Any:
        return jax.jit(prefill_calls.attend_kv(name, selection=words, selection_rows=rows))

    got, want = (attend(name)(*arrays) for name in ("xla", "reference"))
    expanded = masked(arrays[0], *expand(arrays[1], arrays[2], 192), words, rows, causal=True)
    for a, b, c in zip(got, want, expanded, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6)
        np.testing.assert_allclose(a, c, atol=3e-6)
    grads = [jax.jit(jax.grad(loss_of(attend(name)), (0, 1, 2)))(*arrays) for name in ("xla", "reference")]
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5)


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.sampled(2)
def test_the_kernels_call(emulated_prefill: None, mesh: jax.sharding.Mesh, layer: bool) -> None:
    """The kernel's operands, and its call under grad, vmap and heads over devices."""
    arrays = prefill_calls.layer_arrays() if layer else prefill_calls.arrays()
    words, rows = selection()

    def attend(name: str) -> Any:
        make = prefill_calls.attend_kv if layer else prefill_calls.attend
        return jax.jit(make(name, selection=words, selection_rows=rows))

    got, want = attend("cute")(*arrays), attend("reference")(*arrays)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), atol=1e-2)

    def loss(function: Any, *arrays: Any) -> Any:
        return jnp.sin(function(*arrays)[0].astype(jnp.float32)).sum()

    grads = [
        jax.jit(jax.grad(functools.partial(loss, attend(name)), (0, 1, 2)))(*arrays) for name in ("cute", "reference")
    ]
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), atol=5e-2)
    several = [np.stack([x, 2 * np.asarray(x)]) for x in arrays]
    by_vmap = [jax.jit(jax.vmap(attend(name)))(*several) for name in ("cute", "reference")]
    for a, b in zip(*by_vmap, strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), atol=1e-2)
    specs = (P(None, "model"), P(None, "model"), P() if layer else P(None, "model"))
    sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    for a, b in zip(attend("cute")(*sharded), got, strict=True):
        np.testing.assert_array_equal(a, b)


WORDS = np.zeros((5, 4), np.int32)
LEGAL: dict[str, Any] = {
    "q": np.zeros((5, 4, 24), np.float32),
    "k": np.zeros((7, 4, 24), np.float32),
    "v": np.zeros((7, 4, 16), np.float32),
    "cu_seqlens_q": np.zeros(3, np.int32),
    "cu_seqlens_kv": np.zeros(3, np.int32),
    "max_q_len": 5,
    "max_kv_len": 7,
    "softmax_scale": 0.1,
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"selection_rows": np.zeros(5, np.int32)}, r"selection_rows: got an array without selection"),
        ({"selection": WORDS.astype(np.int64)}, r"selection: got dtype int64; legal: int32"),
        ({"selection": WORDS[0]}, r"selection: got shape \[4\] of rank 1; legal: \[R, W\]"),
        ({"selection": WORDS[:, :3]}, r"selection: got shape \[5, 3\]; its W must be a multiple of 4, at least 4"),
        ({"selection": WORDS, "max_kv_len": 129}, r"at least 8: a bit for each of max_kv_len = 129 keys"),
        (
            {"selection": WORDS[:4]},
            r"selection: got shape \[4, 4\]; axis 0 must be 5 \(Tq from q, as selection_rows is",
        ),
        ({"selection": WORDS, "selection_rows": np.zeros(4, np.int32)}, r"selection_rows: .*axis 0 must be 5"),
        ({"selection": WORDS[:0], "selection_rows": np.zeros(5, np.int32)}, r"selection: .*R must be at least 1"),
    ],
)
def test_illegal_selections(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tsmla_jax.mla_prefill(**(LEGAL | arguments))


def test_checked_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    rows = np.int32([0, -1, 4, 5, 0])
    with pytest.raises(ValueError, match=r"selection_rows: got 5 for query token 3; legal: -1 to R - 1 = 4"):
        tsmla_jax.mla_prefill(**LEGAL, selection=WORDS, selection_rows=rows)


def test_explain_names_a_selection_that_the_kernel_refuses(for_hopper: None) -> None:
    narrow = {**LEGAL, "q": jnp.zeros((5, 4, 64), jnp.bfloat16), "k": jnp.zeros((7, 4, 64), jnp.bfloat16)}
    narrow["v"] = narrow["k"]
    reasons = tsmla_jax.explain("mla_prefill", **narrow, selection=WORDS).reasons["cute"]
    assert any(
        "64 and 64 with a selection; the sm_90 prefill kernel takes 192 and 128, 256 and 256" in x for x in reasons
    )
