"""The top-k kernel on a GPU, inside jax, against the reference: both orders, and rows that are hard to select from."""

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax

pytestmark = pytest.mark.gpu

ROWS, K = 6, 512
ORDERS = ("value", "position")


@pytest.fixture(scope="module")
def compiled_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("topk-objects")


@pytest.fixture(autouse=True)
def shared_cache(cache_directory: Path, compiled_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One object cache for the module."""
    arrays = jax.ShapeDtypeStruct((ROWS, 1024), jnp.float32), jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    if reasons := tsmla_jax.explain("select_topk", *arrays, K, implementation="cute").reasons["cute"]:
        pytest.skip("; ".join(reasons))
    monkeypatch.setenv("TSMLA_CACHE_DIR", str(compiled_cache))


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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("columns", [1021, 8192, 20011, 70001])
@pytest.mark.parametrize("kind", ["random", "relu-like", "equal", "nan"])
def test_as_the_reference(kind: str, columns: int, order: str) -> None:
    logits, lens = logits_of(kind, (ROWS, columns)), lens_of(columns)
    got, want = (select(name, order)(logits, lens) for name in ("cute", "reference"))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_shorter_than_k(order: str) -> None:
    logits, lens = logits_of("random", (ROWS, 77)), np.asarray([77, 0, 1, 76, 40, 3], np.int32)
    np.testing.assert_array_equal(select("cute", order)(logits, lens), select("reference", order)(logits, lens))


@pytest.mark.parametrize("order", ORDERS)
def test_under_vmap(order: str) -> None:
    logits, lens = logits_of("random", (3, ROWS, 1021)), np.stack([lens_of(1021)] * 3)
    got = jax.jit(jax.vmap(select("cute", order)))(logits, lens)
    for i in range(3):
        np.testing.assert_array_equal(got[i], select("reference", order)(logits[i], lens[i]))
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
