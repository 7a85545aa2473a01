"""The V3.2 indexer: quantisation, logits over paged keys, and the exact top-k."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

import tsmla_jax
from tests.jax.ops.programs import ints, lower
from tests.oracles import sparse as oracle
from tsmla_jax import sparse
from tsmla_jax.ops import device

P, Z, M, T, HEADS, DIM = 7, 4, 5, 6, 3, 128
IMPLEMENTATIONS = ("xla", "reference")


REFERENCE = jax.jit(functools.partial(tsmla_jax.indexer_logits, implementation="reference"))


def problem(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    seq_lens = np.asarray([0, 1, 4, 5, 17, M * Z])
    tables = rng.integers(0, P, (T, M))
    for row, length in zip(tables, seq_lens, strict=True):
        row[-(-length // Z) :] = 10**6  # never read
    return {
        "q": rng.standard_normal((T, HEADS, DIM)).astype(np.float32),
        "weights": rng.standard_normal((T, HEADS)).astype(np.float32),
        "keys": rng.standard_normal((P * Z, DIM)).astype(np.float32),
        "tables": tables,
        "seq_lens": seq_lens,
    }


def keys_of(x: dict[str, np.ndarray], rows: np.ndarray) -> list[np.ndarray]:
    pages = rows.reshape(P, Z, -1)
    return [
        np.asarray([pages[table[s // Z], s % Z] for s in range(n)]).reshape(n, rows.shape[1])
        for table, n in zip(x["tables"], x["seq_lens"], strict=True)
    ]


def test_quantised_queries() -> None:
    x = problem()
    q = x["q"] * np.exp2(np.arange(T) - 40.0)[:, None, None].astype(np.float32)
    q[0, 0] = 0
    values, weights = jax.jit(sparse.indexer_quantize)(q, x["weights"])
    for t in range(T):
        for h in range(HEADS):
            exponent = oracle.scale_exponent(np.abs(q[t, h]).max(), 1e-10)
            want = oracle.e4m3(q[t, h] / np.float32(2.0**exponent))
            assert np.array_equal(np.asarray(values[t, h]).view(np.uint8), want.view(np.uint8))
            constant = DIM**-0.5 * HEADS**-0.5
            np.testing.assert_allclose(weights[t, h], x["weights"][t, h] * 2.0**exponent * constant, rtol=3e-7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_logits_over_packed_keys(implementation: str) -> None:
    x = problem()
    empty = jnp.zeros((P, Z, DIM + 4), jnp.uint8)
    cache = jax.jit(sparse.write_indexer_cache)(empty, x["keys"], jnp.arange(P * Z, dtype=jnp.int32))
    q8, weights = jax.jit(sparse.indexer_quantize)(x["q"], x["weights"])
    run = jax.jit(functools.partial(tsmla_jax.indexer_logits, implementation=implementation))
    got = run(q8, weights, cache, ints(x["tables"]), ints(x["seq_lens"]))
    stored = np.stack(
        [
            oracle.e4m3(k / np.float32(s)).astype(np.float64) * s
            for k in x["keys"]
            for s in [2.0 ** oracle.scale_exponent(np.abs(k).max(), 1e-4)]
        ]
    )
    want = oracle.indexer_logits(np.asarray(q8, np.float64), np.asarray(weights), keys_of(x, stored), M * Z)
    assert np.array_equal(np.isneginf(got), np.isneginf(want))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_logits_over_plain_keys_beside_nan(implementation: str) -> None:
    x = problem(1)
    used = {int(t[s // Z]) * Z + s % Z for t, n in zip(x["tables"], x["seq_lens"], strict=True) for s in range(n)}
    x["keys"][sorted(set(range(P * Z)) - used)] = np.nan
    cache = x["keys"].reshape(P, Z, DIM)
    run = jax.jit(functools.partial(tsmla_jax.indexer_logits, implementation=implementation))
    got = run(x["q"], x["weights"], cache, ints(x["tables"]), ints(x["seq_lens"]))
    want = oracle.indexer_logits(x["q"], x["weights"], keys_of(x, x["keys"]), M * Z)
    assert np.array_equal(np.isneginf(got), np.isneginf(want))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradient_of_plain_keys(implementation: str, dtype: Any) -> None:
    """Also of keys of 16 bits, which are fetched as integers."""
    x = problem()
    given = [jnp.asarray(x[name], dtype) for name in ("q", "keys")]

    @jax.jit
    def gradient(q: jax.Array, keys: jax.Array) -> jax.Array:
        def loss(keys: jax.Array) -> jax.Array:
            logits = tsmla_jax.indexer_logits(
                q, x["weights"], keys.reshape(P, Z, DIM), ints(x["tables"]), ints(x["seq_lens"]),
                implementation=implementation,
            )  # fmt: skip
            return jnp.where(logits == -jnp.inf, 0, jnp.sin(logits)).sum()

        return jax.grad(loss)(keys)

    want = np.zeros((P * Z, DIM))
    q, keys = (np.asarray(each, np.float64) for each in given)
    for t, length in enumerate(x["seq_lens"]):
        for s in range(length):
            slot = x["tables"][t, s // Z] * Z + s % Z
            dots = q[t] @ keys[slot]
            slope = np.cos(x["weights"][t] @ np.maximum(dots, 0))
            want[slot] += slope * ((x["weights"][t] * (dots > 0)) @ q[t])
    got = gradient(*given)
    assert got.dtype == dtype
    np.testing.assert_allclose(np.float64(got), want, rtol=2e-2 if dtype != jnp.float32 else 1e-3, atol=2e-2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_requests_of_several_tokens(implementation: str) -> None:
    x = problem(5)
    q_lens, lens = [2, 0, T - 4, 1], [M * Z, 3, T - 6, 0]  # requests with fewer keys than tokens, and a row of none
    rng = np.random.default_rng(5)
    tables = rng.integers(0, P, (len(lens), M))
    cache = x["keys"].reshape(P, Z, DIM)
    run = jax.jit(functools.partial(tsmla_jax.indexer_logits, implementation=implementation))
    offsets = ints(np.cumsum([0, *q_lens]))
    got = run(x["q"], x["weights"], cache, ints(tables), ints(lens), cu_seqlens_q=offsets)
    owners = [r for r, count in enumerate(q_lens) for _ in range(count)] + [0]
    seen = [lens[r] - count + 1 + i for r, count in enumerate(q_lens) for i in range(count)] + [0]
    rows = ints(tables[owners]), ints(np.maximum(seen, 0))
    want = REFERENCE(x["q"], x["weights"], cache, *rows)
    assert np.array_equal(np.isneginf(got), np.isneginf(want))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("tokens", "requests", "pages"), [(2, 0, M), (0, 2, M), (2, 2, 0), (0, None, M)])
def test_nobody_or_no_key(tokens: int, requests: int | None, pages: int, implementation: str) -> None:
    """Over packed keys; without requests each token has a row of the block table."""
    rows = tokens if requests is None else requests
    offsets = None if requests is None else ints(np.linspace(0, tokens, requests + 1))
    call = (
        jnp.ones((tokens, HEADS, DIM), jnp.float8_e4m3fn),
        jnp.ones((tokens, HEADS)),
        jnp.zeros((P, Z, DIM + 4), jnp.uint8),
        jnp.zeros((rows, pages), jnp.int32),
        jnp.zeros(rows, jnp.int32),
    )
    options = {"cu_seqlens_q": offsets, "implementation": implementation}
    logits = tsmla_jax.indexer_logits(*call, **options)
    assert logits.shape == (tokens, pages * Z) and np.isneginf(logits).all()
    positions = tsmla_jax.indexer_topk(*call, k=3, **options)
    slots, counts = tsmla_jax.indexer_topk(*call, k=3, return_slots=True, **options)
    assert isinstance(positions, jax.Array) and np.array_equal(positions, slots)
    assert slots.shape == (tokens, 3) and (np.asarray(slots) == -1).all() and not np.asarray(counts).any()


def test_blocks_of_tokens_and_of_keys_change_nothing() -> None:
    rng = np.random.default_rng(2)
    tokens, pages, size, table = 41, 40, 64, 19
    q = jnp.asarray(rng.standard_normal((tokens, HEADS, 8)), jnp.bfloat16)
    weights = rng.standard_normal((tokens, HEADS)).astype(np.float32)
    cache = jnp.asarray(rng.standard_normal((pages, size, 8)), jnp.bfloat16)
    tables, lens = rng.integers(0, pages, (tokens, table)), rng.integers(0, table * size + 1, tokens)
    lens[:20] = np.minimum(lens[:20], 70)
    args = (q, weights, cache, ints(tables), ints(lens))
    got = jax.jit(tsmla_jax.indexer_logits)(*args)
    np.testing.assert_allclose(got, REFERENCE(*args), rtol=1e-5, atol=1e-5)


def test_shards_of_heads_are_summed() -> None:
    x = problem(3)
    mesh = Mesh(np.asarray(jax.devices()[:3]), "x")
    cache = x["keys"].reshape(P, Z, DIM)
    whole = REFERENCE(x["q"], x["weights"], cache, ints(x["tables"]), ints(x["seq_lens"]))
    spec = PartitionSpec
    args = (x["q"], x["weights"], cache, ints(x["tables"]), ints(x["seq_lens"]))

    def heads(q: jax.Array, weights: jax.Array, *rest: jax.Array) -> jax.Array:
        return jax.lax.psum(tsmla_jax.indexer_logits(q, weights, *rest), "x")

    by_head = jax.shard_map(
        heads, mesh=mesh, in_specs=(spec(None, "x"), spec(None, "x"), spec(), spec(), spec()), out_specs=spec()
    )
    np.testing.assert_allclose(jax.jit(by_head)(*args), whole, rtol=1e-5, atol=1e-4)


@settings(max_examples=60)
@given(
    rows=st.lists(
        st.lists(
            st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 1e-30, 3e-39, 1.5e-45, -3e-39, float("-inf")]),
            min_size=9,
            max_size=9,
        ),
        min_size=3,
        max_size=3,
    ),
    lens=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    k=st.sampled_from([1, 4, 12]),
)
def test_topk_is_exact_with_ties(rows: list[list[float]], lens: list[int], k: int) -> None:
    logits = np.asarray(rows, np.float32)
    want = [oracle.topk([float(v) for v in row], n, k) for row, n in zip(rows, lens, strict=True)]
    for implementation in IMPLEMENTATIONS:
        assert TOPK[implementation](logits, ints(lens), k).tolist() == want, implementation
        got = TOPK[implementation](logits, ints(lens), k, order="position")
        assert got.tolist() == [ascending(row) for row in want], implementation


def ascending(row: list[int]) -> list[int]:
    """A row of positions in order="position"."""
    return sorted(row, key=lambda position: (position < 0, position))


TOPK = {
    name: jax.jit(
        functools.partial(tsmla_jax.select_topk, implementation=name), static_argnums=2, static_argnames="order"
    )
    for name in IMPLEMENTATIONS
}


def test_topk_of_long_rows_in_blocks() -> None:
    rng = np.random.default_rng(0)
    logits = np.round(rng.standard_normal((300, 4097)), 2).astype(np.float32)  # many ties
    lens = rng.integers(0, 4098, 300)
    logits[np.arange(4097) >= lens[:, None]] = np.nan
    got = np.asarray(TOPK["xla"](logits, ints(lens), 64))
    assert np.array_equal(got, TOPK["reference"](logits, ints(lens), 64))
    for t in (0, 7, 299):
        assert got[t].tolist() == oracle.topk(list(map(float, logits[t, : lens[t]])), int(lens[t]), 64)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_topk_of_subnormal_logits(dtype: Any) -> None:
    """XLA compares them as 0 on CPUs."""
    steps = np.asarray([[0, 1, 3, 9, 20, -1, -3, 0, -0.0, np.nan]])
    rows = (steps * float(jnp.finfo(dtype).smallest_subnormal)).astype(dtype)
    assert 0 < rows[0, 1] < jnp.finfo(dtype).tiny
    for name, run in TOPK.items():
        assert run(rows, ints([10]), 10).tolist() == [[4, 3, 2, 1, 0, 7, 8, 5, 6, 9]], name
        assert run(rows, ints([9]), 3, order="position").tolist() == [[2, 3, 4]], name
    assert tsmla_jax.select_topk(jnp.asarray([[0, 1e-45, 3e-39, 1e-38, 2e-38]]), ints([5]), 3).tolist() == [[4, 3, 2]]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_topk_of_subnormal_logits_of_rows_that_start_later(implementation: str) -> None:
    logits = jnp.asarray([[3.0, 1e-45, 3e-39, -jnp.inf, 2e-39, 0.0]])
    got = tsmla_jax.select_topk(logits, ints([5]), 6, row_starts=ints([1]), implementation=implementation)
    assert got.tolist() == [[1, 3, 0, 4, 2, -1]]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("starts", [False, True])
def test_bits_of_a_topk_are_those_of_its_positions(implementation: str, starts: bool) -> None:
    rng = np.random.default_rng(4)
    logits = np.round(rng.standard_normal((6, 300)), 1).astype(np.float32)
    logits[2, ::3] = np.nan
    lens, first = ints([300, 0, 290, 7, 150, 41]), ints([0, 3, 10, 250, 77, 1])
    lens = jnp.minimum(lens, 300 - first) if starts else lens
    options: dict[str, Any] = {"row_starts": first} if starts else {}
    positions = tsmla_jax.select_topk(logits, lens, 40, **options, implementation="reference")
    got = tsmla_jax.select_topk(logits, lens, 40, **options, return_bits=True, implementation=implementation)
    assert got.shape == (6, 12) and got.dtype == jnp.int32
    assert np.array_equal(got, tsmla_jax.selection_bits(positions, 300, implementation="reference"))
    nothing = tsmla_jax.select_topk(logits[:0], lens[:0], 40, return_bits=True, implementation=implementation)
    assert nothing.shape == (0, 12)


def test_bits_and_slots_are_not_returned_together() -> None:
    tables = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="return_bits: got True with block_tables; legal: False"):
        tsmla_jax.select_topk(  # type: ignore[call-overload]
            jnp.zeros((1, 8)), ints([8]), 2, block_tables=tables, page_size=4, return_bits=True
        )
    with pytest.raises(TypeError, match="return_bits: got int; legal: True or False, static"):
        tsmla_jax.select_topk(jnp.zeros((1, 8)), ints([8]), 2, return_bits=1)  # type: ignore[call-overload]


def test_topk_ranks_nan_last() -> None:
    logits = np.asarray([[np.nan, -5.0, np.nan, 3.0]], np.float32)
    below = np.asarray([[np.nan, -np.inf, np.nan, 3.0, -np.inf, -np.inf]], np.float32)
    for run in TOPK.values():
        assert run(logits, ints([4]), 2).tolist() == [[3, 1]]
        assert run(below, ints([5]), 6).tolist() == [[3, 1, 4, 0, 2, -1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((T, HEADS, DIM), np.float32)}, "q: got dtype float32; with a packed k_cache"),
        ({"weights": np.zeros((T, 2), np.float32)}, "weights: got shape.*Hi, q's heads"),
        ({"weights": np.zeros((T, HEADS), np.int32)}, "weights: got dtype int32"),
        ({"k_cache": jnp.zeros((P, Z, 100), jnp.uint8)}, "k_cache: got keys of width 96; q's Di is 128"),
        ({"k_cache": jnp.zeros((P, 132), jnp.uint8)}, "k_cache: got shape"),
        ({"block_tables": ints(np.zeros((2, M)))}, "block_tables.*expand_decode_metadata"),
        ({"seq_lens": jnp.zeros(T)}, "seq_lens: got dtype float32; legal: int32"),
        ({"cu_seqlens_q": ints(np.zeros(3))}, "cu_seqlens_q: .*B \\+ 1, B from block_tables"),
    ],
)
def test_refuses(change: dict[str, object], message: str) -> None:
    args = {
        "q": jnp.zeros((T, HEADS, DIM), jnp.float8_e4m3fn),
        "weights": jnp.zeros((T, HEADS)),
        "k_cache": jnp.zeros((P, Z, DIM + 4), jnp.uint8),
        "block_tables": ints(np.zeros((T, M))),
        "seq_lens": ints(np.zeros(T)),
    }
    with pytest.raises(ValueError, match=message):
        tsmla_jax.indexer_logits(**(args | change))


def test_names_of_implementations() -> None:
    logits = jnp.zeros((1, 4))
    with pytest.raises(ValueError, match="implementation: got 'fast'"):
        tsmla_jax.select_topk(logits, ints([1]), 2, implementation="fast")
    with pytest.raises(ValueError, match="implementation: got b'xla'"):
        tsmla_jax.select_topk(logits, ints([1]), 2, implementation=b"xla")
    with pytest.raises(NotImplementedError, match="logits' dtype is bfloat16; the sm_90 top-k kernel takes float32"):
        tsmla_jax.select_topk(logits.astype(jnp.bfloat16), ints([1]), 2, implementation="cute")
    with pytest.raises(ValueError, match=r"order: got 'index'; legal: 'value', 'position'$"):
        tsmla_jax.select_topk(logits, ints([1]), 2, order="index")
    with pytest.raises(TypeError, match="k: got"):
        jax.jit(tsmla_jax.select_topk)(logits, ints([1]), 2)
    assert tsmla_jax.explain("select_topk", logits, ints([1]), 2).chosen == "xla"


def test_checks_see_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    args = (jnp.zeros((2, 1, 8)), jnp.zeros((2, 1)), jnp.zeros((3, 4, 8)))
    with pytest.raises(ValueError, match="seq_lens: token 1 sees 9 keys; legal: 0 to 8"):
        tsmla_jax.indexer_logits(*args, ints([[0, 1], [0, 1]]), ints([8, 9]))
    with pytest.raises(ValueError, match="block_tables: token 1 names page 3 in entry 1, which it uses; legal: 0 to 2"):
        tsmla_jax.indexer_logits(*args, ints([[0, 3], [0, 3]]), ints([4, 5]))
    with pytest.raises(ValueError, match="seq_lens: request 1 has 9 keys; legal: 0 to 8"):
        tsmla_jax.indexer_logits(*args, ints([[0, 1], [0, 1]]), ints([8, 9]), cu_seqlens_q=ints([0, 1, 2]))
    with pytest.raises(ValueError, match=r"cu_seqlens_q: .* never decreasing, to at most 2"):
        tsmla_jax.indexer_logits(*args, ints([[0, 1], [0, 1]]), ints([8, 8]), cu_seqlens_q=ints([0, 3, 2]))
    with pytest.raises(ValueError, match="seq_lens: token 0 has 5 logits; legal: 0 to 4"):
        tsmla_jax.select_topk(jnp.zeros((1, 4)), ints([5]), 2)


@pytest.mark.usefixtures("cache_directory")
def test_topk_is_one_kernel_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    run = functools.partial(tsmla_jax.select_topk, k=4, order="position", implementation="cute")
    struct = jax.ShapeDtypeStruct
    text = lower(run, struct((3, 9), jnp.float32), struct((3,), jnp.int32))
    assert text.count(f"@{device.TARGET}(") == 1
    assert device.TARGET not in lower(run, struct((3, 0), jnp.float32), struct((3,), jnp.int32))
