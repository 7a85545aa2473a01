"""The top-k kernel on a GPU, inside jax, against numpy: both orders, and rows that are hard to select from."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax

pytestmark = pytest.mark.gpu

ROWS, K = 6, 512
ORDERS = ("value", "position")


@pytest.fixture(autouse=True)
def needs_the_kernel() -> None:
    arrays = jax.ShapeDtypeStruct((ROWS, 1024), jnp.float32), jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    if reasons := tsmla_jax.explain("select_topk", *arrays, K, implementation="cute").reasons["cute"]:
        pytest.skip("; ".join(reasons))


def logits_of(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(shape[-1])
    values = rng.standard_normal(shape)
    if kind == "relu-like":
        values = np.maximum(values, 0) * rng.choice([-1.0, 1.0], shape)
    elif kind == "equal":
        values = np.full(shape, 1.5)
    elif kind == "nan":
        values = np.where(rng.random(shape) < 0.7, np.nan, values)
    return values.astype(np.float32)


def lens_of(columns: int) -> np.ndarray:
    """A length for each of ROWS rows: none, fewer than k, k, all."""
    return np.asarray([columns, 0, 7, K, columns // 2, columns - 1], np.int32)


def select(name: str | None, order: str) -> Callable[..., jax.Array]:
    """The compiled call."""
    return jax.jit(functools.partial(tsmla_jax.select_topk, k=K, order=order, implementation=name))


def wanted(logits: np.ndarray, lens: np.ndarray, order: str, starts: np.ndarray | None = None) -> np.ndarray:
    """The positions that select_topk defines, row by row."""
    positions = np.full((len(logits), K), -1, np.int32)
    for row, length in enumerate(lens):
        start = 0 if starts is None else starts[row]
        values = logits[row, start : start + length]
        nan = np.isnan(values)
        best = np.lexsort((np.arange(len(values)), np.where(nan, 0, -values), nan))[:K]
        positions[row, : len(best)] = np.sort(best) if order == "position" else best
    return positions


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("columns", [1021, 8192, 20011, 70001])
@pytest.mark.parametrize("kind", ["random", "relu-like", "equal", "nan"])
def test_every_kind_of_row(kind: str, columns: int, order: str) -> None:
    logits, lens = logits_of(kind, (ROWS, columns)), lens_of(columns)
    np.testing.assert_array_equal(select("cute", order)(logits, lens), wanted(logits, lens, order))


@pytest.mark.parametrize("columns", [1021, 8192, 20011, 70001, 131072])
@pytest.mark.parametrize("kind", ["random", "equal", "nan"])
def test_bits_are_those_of_the_positions(kind: str, columns: int) -> None:
    logits, lens = logits_of(kind, (ROWS, columns)), lens_of(columns)
    run = jax.jit(functools.partial(tsmla_jax.select_topk, k=K, return_bits=True, implementation="cute"))
    positions = jnp.asarray(wanted(logits, lens, "position"))
    want = tsmla_jax.selection_bits(positions, columns, implementation="reference")
    np.testing.assert_array_equal(run(logits, lens), want)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_shorter_than_k(order: str) -> None:
    logits, lens = logits_of("random", (ROWS, 77)), np.asarray([77, 0, 1, 76, 40, 3], np.int32)
    np.testing.assert_array_equal(select("cute", order)(logits, lens), wanted(logits, lens, order))


@pytest.mark.parametrize("order", ORDERS)
def test_under_vmap(order: str) -> None:
    logits, lens = logits_of("random", (3, ROWS, 1021)), np.stack([lens_of(1021)] * 3)
    got = jax.jit(jax.vmap(select("cute", order)))(logits, lens)
    for i in range(3):
        np.testing.assert_array_equal(got[i], wanted(logits[i], lens[i], order))
    one_length = jax.vmap(select("cute", order), (0, None))(logits, lens[0])
    np.testing.assert_array_equal(one_length, got)


def test_named_and_under_a_gradient() -> None:
    logits, lens = jnp.asarray(logits_of("random", (ROWS, 1021))), jnp.asarray(lens_of(1021))
    assert tsmla_jax.explain("select_topk", logits, lens, K, order="position", implementation="cute").chosen == "cute"

    def largest(name: str | None, logits: jax.Array) -> jax.Array:
        positions = select(name, "value")(logits, lens)
        return jnp.where(positions >= 0, jnp.take_along_axis(logits, jnp.maximum(positions, 0), 1), 0).sum()

    got, want = (jax.grad(functools.partial(largest, name))(logits) for name in ("cute", "reference"))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("columns", [1021, 20011, 70001])
@pytest.mark.parametrize("kind", ["random", "equal", "nan"])
def test_rows_that_begin_anywhere(kind: str, columns: int, order: str) -> None:
    starts = np.asarray([0, 5, 131, columns // 3, columns - 600, columns], np.int32)
    lens = np.asarray([columns, K + 1, 777, columns // 2, 600, 0], np.int32)
    logits = logits_of(kind, (ROWS, columns))
    run = functools.partial(tsmla_jax.select_topk, k=K, order=order, implementation="cute")
    got = jax.jit(run)(logits, lens, row_starts=jnp.asarray(starts))
    np.testing.assert_array_equal(got, wanted(logits, lens, order, starts))


@pytest.mark.parametrize("with_starts", [False, True])
@pytest.mark.parametrize("page_size", [64, 48])
@pytest.mark.parametrize("columns", [1021, 20011, 70001])
def test_slots_and_counts(columns: int, page_size: int, with_starts: bool) -> None:
    width = columns // page_size  # the last positions lie past the table
    tables = np.random.default_rng(columns).integers(0, 1000, (ROWS, width)).astype(np.int32)
    starts = np.asarray([3, 0, 9, 100, 17, 1], np.int32) if with_starts else np.zeros(ROWS, np.int32)
    lens = np.minimum(lens_of(columns), columns - starts)
    arrays = {"block_tables": jnp.asarray(tables)} | ({"row_starts": jnp.asarray(starts)} if with_starts else {})
    run = functools.partial(tsmla_jax.select_topk, k=K, order="position", page_size=page_size, implementation="cute")
    for kind in ("random", "equal"):
        logits = logits_of(kind, (ROWS, columns))
        slots, counts = jax.jit(run)(logits, lens, **arrays)
        positions = wanted(logits, lens, "position", starts)
        page = positions // page_size
        pages = np.take_along_axis(tables, np.clip(page, 0, width - 1), 1)
        inside = (positions >= 0) & (page < width)
        np.testing.assert_array_equal(slots, np.where(inside, pages * page_size + positions % page_size, -1))
        np.testing.assert_array_equal(counts, np.minimum(lens, K))


def test_none_chooses_the_kernel() -> None:
    logits, lens = jnp.zeros((ROWS, 1021)), jnp.asarray(lens_of(1021))
    assert tsmla_jax.explain("select_topk", logits, lens, K).chosen == "cute"
