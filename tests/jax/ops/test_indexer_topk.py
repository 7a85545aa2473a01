"""indexer_topk: as its definition says whatever the blocks, in bounded memory, and by chunks of two kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax
from tests.emulator import operations
from tests.jax.ops.programs import calls, ints, primitives
from tsmla_jax.ops.indexer_topk import xla
from tsmla_kernels.topk import chunks

HEADS, DIM, PAGES, Z, M, T, K = 8, 128, 5, 16, 4, 23, 6
REQUESTS = [0, 5, 5, 20, 22]  # one has no token, and the last row is of no request


def arrays(ragged: bool, dtype: Any = jnp.float32, tokens: int = T) -> dict[str, jax.Array]:
    """Arguments; with `ragged` a row of the block table for each request. Many scores tie: weights are small integers,
    and most scores of few keys are 0. What no token may read is a page of NaN, or an illegal page."""
    rng = np.random.default_rng(1)
    rows = len(REQUESTS) - 1 if ragged else tokens
    lens = np.asarray([M * Z, 7, 11, 1]) if ragged else rng.integers(0, M * Z + 1, tokens)
    used = np.arange(M) < -(-lens[:, None] // Z)
    unused = rng.choice([-1, PAGES - 1, np.iinfo(np.int32).max], (rows, M))
    keys = rng.integers(-1, 2, (PAGES, Z, DIM)).astype(np.float32)
    keys[-1] = np.nan
    given = {
        "q": jnp.asarray(rng.integers(-2, 3, (tokens, HEADS, DIM)), dtype),
        "weights": jnp.asarray(rng.integers(-1, 2, (tokens, HEADS)), jnp.float32),
        "k_cache": jnp.asarray(keys, dtype),
        "block_tables": ints(np.where(used, rng.integers(0, PAGES - 1, (rows, M)), unused)),
        "seq_lens": ints(lens),
    }
    return given | ({"cu_seqlens_q": ints(REQUESTS)} if ragged else {})


def select(name: str, k: int = K, **options: bool) -> Callable[..., Any]:
    """The compiled call."""
    run = functools.partial(tsmla_jax.indexer_topk, k=k, implementation=name, **options)
    return jax.jit(lambda given: run(**given))


def equal(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of two pages or 2 k keys, and blocks of some tokens."""
    monkeypatch.setattr(xla, "MIN_WINDOW", 2 * Z)
    monkeypatch.setattr(xla, "BLOCK_BYTES", 9 * 4 * 3 * Z)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("k", [K, 17, M * Z + 3])  # a window of 2 pages, of 3, which overlap, and of all
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.sampled(3)
def test_windows_of_keys_select_what_all_logits_select(ragged: bool, k: int) -> None:
    given = arrays(ragged)
    weights = given["weights"]
    unusual = np.array(weights)
    unusual[[3, 4, 6, 8]] = np.asarray([np.nan, np.inf, -np.inf, 0])[:, None]
    options = {"return_slots": True, "return_scores": True}
    run, want = select("xla", k, **options), select("reference", k, **options)
    for kind in (weights, unusual):
        equal(run(given | {"weights": kind}), want(given | {"weights": kind}))
    alone = select("xla", k, return_scores=True)(given)
    equal(alone, select("reference", k, return_scores=True)(given))
    equal(alone[0], select("xla", k)(given))


@pytest.mark.parametrize("ragged", [False, True])
def test_what_is_defined(ragged: bool) -> None:
    given = arrays(ragged)
    logits = tsmla_jax.indexer_logits(**given)
    requests = [0] * 5 + [2] * 15 + [3] * 2 + [0] if ragged else range(T)
    tables = given["block_tables"][jnp.asarray(list(requests))]
    lens = ints((np.asarray(logits) != -np.inf).sum(1))
    equal(select("reference")(given), tsmla_jax.select_topk(logits, lens, K, order="position"))
    want = tsmla_jax.select_topk(logits, lens, K, order="position", block_tables=tables, page_size=Z)
    equal(select("reference", return_slots=True)(given), want)
    positions, scores = select("reference", return_scores=True)(given)
    equal(positions, select("reference")(given))
    for row, (places, of_row) in enumerate(zip(np.asarray(positions), np.asarray(scores), strict=True)):
        equal(of_row, [np.asarray(logits)[row, place] if place >= 0 else -np.inf for place in places])
    equal(select("reference", return_slots=True, return_scores=True)(given), (*want, scores))


@pytest.mark.parametrize("name", ["xla", "reference"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.usefixtures("small_blocks")
def test_bits_are_those_of_the_positions(ragged: bool, name: str) -> None:
    given = arrays(ragged)
    want = tsmla_jax.selection_bits(select("reference")(given), M * Z, implementation="reference")
    equal(select(name, return_bits=True)(given), want)


@pytest.mark.parametrize("other", ["return_slots", "return_scores"])
def test_bits_are_returned_alone(other: str) -> None:
    with pytest.raises(ValueError, match=f"return_bits: got True with {other}; legal: False"):
        select("xla", return_bits=True, **{other: True})(arrays(ragged=False))


def test_memory_does_not_grow_with_the_keys() -> None:
    struct = jax.ShapeDtypeStruct
    tokens, width = 4096, 128
    for keys in (1 << 13, 1 << 17):
        pages = keys // 64
        given = {
            "q": struct((tokens, 64, width), jnp.bfloat16),
            "weights": struct((tokens, 64), jnp.float32),
            "k_cache": struct((pages, 64, width), jnp.bfloat16),
            "block_tables": struct((1, pages), jnp.int32),
            "seq_lens": struct((1,), jnp.int32),
            "cu_seqlens_q": struct((2,), jnp.int32),
        }
        used = select("xla", 2048, return_scores=True).lower(given).compile().memory_analysis()
        assert used.temp_size_in_bytes < 100 << 20  # logits would be 2 GB
        assert chunks.workspace_bytes(tokens, keys) == (128 << 20) + 8 * tokens


def test_positions_have_no_derivative() -> None:
    given = arrays(ragged=True)

    def first(weights: jax.Array, name: str) -> jax.Array:
        return (weights * (select(name)(given | {"weights": weights})[0, 0] + 1)).sum()

    slopes = [jax.grad(first)(given["weights"], name) for name in ("xla", "reference")]
    equal(*slopes)
    assert np.asarray(slopes[0]).any()


def test_scores_have_a_derivative_in_the_definition_alone() -> None:
    given = arrays(ragged=True)

    def total(weights: jax.Array, name: str) -> jax.Array:
        positions, scores = select(name, return_scores=True)(given | {"weights": weights})
        return jnp.where(positions >= 0, scores, 0).sum()

    slope = jax.grad(total)(given["weights"], "reference")
    positions = select("reference")(given)

    def of_logits(weights: jax.Array) -> jax.Array:
        logits = tsmla_jax.indexer_logits(**(given | {"weights": weights}), implementation="reference")
        return jnp.where(positions >= 0, jnp.take_along_axis(logits, jnp.maximum(positions, 0), axis=1), 0).sum()

    equal(slope, jax.grad(of_logits)(given["weights"]))
    with pytest.raises(NotImplementedError, match=r"indexer_topk \(its scores\) has no derivative.*'reference'"):
        jax.grad(total)(given["weights"], "xla")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((T, HEADS, DIM), jnp.int32)}, "q: got dtype int32"),
        ({"weights": jnp.zeros((T, 2))}, "weights: got shape.*Hi, q's heads"),
        ({"block_tables": ints(np.zeros((2, M)))}, "seq_lens: got shape.*B from block_tables"),
        ({"cu_seqlens_q": ints(np.zeros(3))}, "cu_seqlens_q: .*B \\+ 1, B from block_tables"),
        ({"k": 0}, "k: got 0"),
        ({"implementation": "fast"}, "implementation: got 'fast'"),
    ],
)
def test_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tsmla_jax.indexer_topk(**(arrays(ragged=True) | {"k": K} | change))


def test_refuses_what_is_not_static() -> None:
    with pytest.raises(TypeError, match="return_slots: got int; legal: True or False, static"):
        tsmla_jax.indexer_topk(**arrays(ragged=True), k=K, return_slots=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="return_scores: got int; legal: True or False, static"):
        tsmla_jax.indexer_topk(**arrays(ragged=True), k=K, return_scores=1)  # type: ignore[call-overload]


def test_explanations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    struct = jax.ShapeDtypeStruct
    arguments = (
        struct((4096, 64, 128), jnp.float8_e4m3fn),
        struct((4096, 64), jnp.float32),
        struct((4096, 64, 132), jnp.uint8),
        struct((1, 2048), jnp.int32),
        struct((1,), jnp.int32),
    )
    offsets = struct((2,), jnp.int32)
    found = tsmla_jax.explain("indexer_topk", *arguments, 2048, cu_seqlens_q=offsets, implementation="cute")
    assert found.chosen == "cute"
    assert "the logits of 256 query rows, 128.0 MiB, then their top-k; 16 times, by chunks of rows" in str(found)
    wide = (struct(arguments[0].shape, jnp.float32), arguments[1], struct((4096, 64, 128), jnp.bfloat16))
    found = tsmla_jax.explain("indexer_topk", *wide, *arguments[3:], 2048, cu_seqlens_q=offsets, implementation="cute")
    assert "the logits as xla computes them: q's dtype is float32; the sm_90 indexer kernel takes" in str(found)
    found = tsmla_jax.explain("indexer_topk", *arguments, 5000, cu_seqlens_q=offsets, implementation="cute")
    assert found.chosen is None and "k is 5000; the sm_90 top-k kernel takes at most 4096" in str(found)


# ---- the kernels, emulated


@pytest.fixture
def small_chunks(cache_directory: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of eight rows."""
    if jax.default_backend() != "cpu":
        pytest.skip("emulates the kernels on CPUs")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    monkeypatch.setattr(chunks, "WORKSPACE_BYTES", 9 * 4 * M * Z)
    monkeypatch.setattr(chunks, "ROW_MULTIPLE", 4)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("returned", ["", "return_slots", "return_scores", "return_slots return_scores", "return_bits"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.sampled(3)
def test_chunks_of_rows(ragged: bool, returned: str) -> None:
    given, options = arrays(ragged, jnp.float8_e4m3fn), dict.fromkeys(returned.split(), True)
    run, want = select("cute", **options), select("reference", **options)
    assert calls(jax.make_jaxpr(run)(given)) == 2  # in a loop over the chunks
    with operations.emulated():
        equal(run(given), want(given))
        few = {name: x[:4] if x.shape[0] == T else x for name, x in given.items()}  # one chunk
        if ragged:
            few["cu_seqlens_q"] = jnp.minimum(given["cu_seqlens_q"], 4)
        equal(run(few), want(few))


@pytest.mark.usefixtures("cache_directory")
@pytest.mark.parametrize("returned", ["", "return_slots return_scores"])
@pytest.mark.parametrize("ragged", [False, True])
def test_one_chunk_is_two_kernels_and_nothing_else(
    ragged: bool, returned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    given = arrays(ragged, jnp.float8_e4m3fn)
    names = primitives(jax.make_jaxpr(select("cute", **dict.fromkeys(returned.split(), True)))(given))
    assert names.count("tsmla_kernel_call") == 2
    wrappers = {"jit", "custom_vmap_call", "custom_partitioning", "custom_jvp_call", "stop_gradient"}
    assert set(names) <= wrappers | {"tsmla_kernel_call"}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("ragged", [False, True])
def test_chunks_of_logits_that_the_kernel_does_not_take(ragged: bool) -> None:
    given = arrays(ragged)
    run = select("cute", return_slots=True)
    assert calls(jax.make_jaxpr(run)(given)) == 1
    with operations.emulated():
        equal(run(given), select("reference", return_slots=True)(given))


@pytest.mark.usefixtures("small_chunks")
def test_a_derivative_passes_by_the_kernels() -> None:
    given = arrays(ragged=False, dtype=jnp.float8_e4m3fn)

    def first(weights: jax.Array) -> jax.Array:
        return (weights * (select("cute")(given | {"weights": weights})[0, 0] + 1)).sum()

    assert calls(jax.make_jaxpr(jax.grad(first))(given["weights"])) == 2


@pytest.mark.usefixtures("small_chunks")
def test_batches_are_rows_of_the_chunks() -> None:
    given = arrays(ragged=False, dtype=jnp.float8_e4m3fn, tokens=6)
    axes = {name: None if name == "k_cache" else 0 for name in given}
    twice = {name: x if name == "k_cache" else jnp.stack([x, x[::-1]]) for name, x in given.items()}
    run = jax.vmap(select("cute", return_slots=True, return_scores=True), (axes,))
    assert calls(jax.make_jaxpr(run)(twice)) == 2
    with operations.emulated():
        got = jax.jit(run)(twice)
    want = select("reference", return_slots=True, return_scores=True)(given)
    equal([x[0] for x in got], list(want))
    equal([x[1, ::-1] for x in got], list(want))


@pytest.mark.usefixtures("small_chunks")
def test_nothing_to_select_from_launches_nothing() -> None:
    given = arrays(ragged=True, dtype=jnp.float8_e4m3fn)
    empty = given | {"block_tables": given["block_tables"][:, :0]}
    assert calls(jax.make_jaxpr(select("cute", return_slots=True))(empty)) == 0
    for name in ("cute", "xla", "reference"):
        slots, counts, scores = select(name, return_slots=True, return_scores=True)(empty)
        assert (np.asarray(slots) == -1).all() and not np.asarray(counts).any() and np.isneginf(scores).all()


def test_the_workspace_is_bounded() -> None:
    for tokens, columns, rows in ((64, 1 << 17, 64), (4096, 1 << 17, 256), (4096, 1 << 15, 1024), (7, 1 << 20, 7)):
        assert chunks.chunk_rows(tokens, columns) == rows
        assert 4 * rows * columns + 8 * tokens <= chunks.workspace_bytes(tokens, columns) <= (128 << 20) + 8 * tokens
    assert chunks.chunk_rows(100, 1 << 22) == 16  # rows too long for as many
    assert chunks.workspace_bytes(100, 1 << 22) == (16 << 24) + 800


def test_the_best_of_subnormal_scores_are_kept() -> None:
    """XLA compares them as 0 on CPUs. Places without a key stay behind keys of NaN."""
    best = xla.Best(jnp.asarray([[1e-45, 3e-39, -jnp.inf]]), ints([[0, 1, -1]]))
    more = xla.Best(jnp.asarray([[2e-39, jnp.nan, -1e-45]]), ints([[4, 5, 6]]))
    assert jax.jit(xla.merge)(best, more).positions.tolist() == [[1, 4, 0]]
    wide = xla.Best(*(jnp.pad(x, ((0, 0), (0, 3)), constant_values=-1) for x in best))
    assert jax.jit(xla.merge)(wide, more).positions.tolist() == [[1, 4, 0, 6, 5, -1]]
