"""select_topk and the packed caches on torch tensors: as in jax, as operators, and what they refuse."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tsmla_bridge
import tsmla_jax
from tests.bridge.inputs import tensor
from tsmla_jax import sparse

ROWS, COLUMNS, K = 5, 37, 12
JAX_TOPK = jax.jit(
    functools.partial(tsmla_jax.select_topk, k=K, implementation="reference"),
    static_argnames=("order", "page_size", "return_bits"),
)


def logits_of(kind: str) -> np.ndarray:
    rng = np.random.default_rng(3)
    values = np.round(rng.standard_normal((ROWS, COLUMNS)), 1)
    if kind == "nan":
        values = np.where(rng.random(values.shape) < 0.5, np.nan, values)
        values[:, 3:9] = -np.inf
    return np.where(values == 0, -0.0, values).astype(np.float32)


@pytest.mark.parametrize("options", ["", "starts", "slots", "starts slots", "starts bits"])
@pytest.mark.parametrize("order", ["value", "position"])
@pytest.mark.parametrize("kind", ["ties", "nan"])
def test_topk_is_that_of_jax(kind: str, order: str, options: str) -> None:
    rng = np.random.default_rng(0)
    lens, arrays, static = np.asarray([COLUMNS, 0, 5, K, 30], np.int32), {}, {"order": order}
    if "starts" in options:
        arrays["row_starts"] = np.asarray([0, 3, 8, 20, 7], np.int32)
        lens = np.minimum(lens, COLUMNS - arrays["row_starts"])
    if "slots" in options:
        arrays["block_tables"] = rng.integers(0, 90, (ROWS, 4)).astype(np.int32)
        static["page_size"] = 8  # the last positions lie past the table
    if "bits" in options:
        static["return_bits"] = True
    logits = logits_of(kind)
    got = tsmla_bridge.select_topk(
        *map(tensor, (logits, lens)), K, **{name: tensor(x) for name, x in arrays.items()}, **static
    )
    want = JAX_TOPK(logits, lens, **arrays, **static)
    for a, b in zip(jax.tree.leaves(jax.tree.map(np.asarray, got)), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_topk_into_given_tensors() -> None:
    logits, lens = tensor(logits_of("ties")), torch.full((ROWS,), COLUMNS, dtype=torch.int32)
    out, counts = torch.zeros(ROWS, K, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    assert tsmla_bridge.select_topk(logits, lens, K, out=out) is out
    np.testing.assert_array_equal(out, tsmla_bridge.select_topk(logits, lens, K))
    tables = torch.arange(ROWS * 5, dtype=torch.int32).reshape(ROWS, 5)
    options = {"block_tables": tables, "page_size": 8}
    results = tsmla_bridge.select_topk(logits, lens, K, **options, out=out, counts=counts)
    assert results[0] is out and results[1] is counts and counts.tolist() == [K] * ROWS
    with pytest.raises(ValueError, match=r"counts: got a tensor without block_tables"):
        tsmla_bridge.select_topk(logits, lens, K, counts=counts)
    with pytest.raises(ValueError, match=r"out: got int32\[5, 11\]; legal: int32\[5, 12\]"):
        tsmla_bridge.select_topk(logits, lens, K, out=torch.zeros(ROWS, 11, dtype=torch.int32))


def test_topk_refuses_as_jax_does() -> None:
    logits, lens = tensor(logits_of("ties")), torch.full((ROWS,), COLUMNS, dtype=torch.int32)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"order": "index"}, "order: got 'index'; legal: 'value', 'position'"),
        ({"page_size": 4}, "page_size: got 4 without block_tables"),
        ({"block_tables": torch.zeros(ROWS, 2, dtype=torch.int32)}, "page_size: got None with block_tables"),
        ({"row_starts": torch.zeros(3, dtype=torch.int32)}, "row_starts: got shape"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            tsmla_bridge.select_topk(logits, lens, K, **options)
        numbers = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        with pytest.raises(ValueError, match=message):
            tsmla_jax.select_topk(logits.numpy(), lens.numpy(), K, **numbers)
    with pytest.raises(NotImplementedError, match="the tensors are on cpu"):
        tsmla_bridge.select_topk(logits, lens, K, implementation="cute")


def rows_of(width: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    values = np.random.default_rng(width).standard_normal((9, width)) * 3
    values[2] *= 1e-6
    return jnp.asarray(values).astype(dtype)


def angles() -> tuple[jax.Array, jax.Array]:
    turn = np.random.default_rng(1).uniform(0, 6, (9, 32)).astype(np.float32)
    return jnp.cos(turn), jnp.sin(turn)


SLOTS = np.asarray([3, -1, 0, 31, 77, 12, -1, 5, 16], np.int32)


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize(
    ("op", "width", "inputs"),
    [
        ("write_packed_kv_cache", 656, (512, 64)),
        ("write_indexer_cache", 132, (128,)),
    ],
)
def test_caches_are_written_as_in_jax(op: str, width: int, inputs: tuple[int, ...], rotates: bool) -> None:
    cache = np.random.default_rng(5).integers(0, 256, (2, 16, width), np.uint8)
    arrays = (cache, *map(rows_of, inputs), SLOTS, *(angles() if rotates else ()))
    want = jax.jit(getattr(sparse, op))(*arrays)
    given = tensor(cache)
    assert getattr(tsmla_bridge, op)(given, *map(tensor, arrays[1:])) is given
    differ = np.asarray(given) != np.asarray(want)
    assert differ.mean() < (0.001 if rotates else 1e-9)
    again = tensor(cache)
    *rows, slots = map(tensor, arrays[1 : 2 + len(inputs)])
    getattr(tsmla_bridge, op)(again, *rows, slots.long(), *map(tensor, arrays[2 + len(inputs) :]))
    assert torch.equal(again, given)


def test_indexer_caches_with_gaps_are_written() -> None:
    dense, k, slots = torch.zeros(2, 16, 132, dtype=torch.uint8), tensor(rows_of(128)), tensor(SLOTS)
    apart = torch.stack([dense, dense], 2)[:, :, 0]
    for cache in (dense, apart):
        tsmla_bridge.write_indexer_cache(cache, k, slots)
    assert not apart.is_contiguous() and torch.equal(apart, dense) and dense.any()


def test_plain_fp8_keys_saturate_as_in_jax() -> None:
    k = tensor(np.asarray([[1e3] * 8, [-1e9] * 8, [np.nan] * 8], np.float32))
    slots = torch.arange(3, dtype=torch.int32)
    mine = tsmla_bridge.write_indexer_cache(torch.zeros(1, 4, 8).to(torch.float8_e4m3fn), k, slots)
    for name in ("xla", "reference"):
        cache = jnp.zeros((1, 4, 8), jnp.float8_e4m3fn)
        want = sparse.write_indexer_cache(cache, k.numpy(), slots.numpy(), implementation=name)
        np.testing.assert_array_equal(mine.float(), np.asarray(want, np.float32))
        assert want[0, :2, 0].tolist() == [448.0, -448.0]


def test_no_token_and_only_skipped_ones_write_nothing() -> None:
    cache = tensor(np.random.default_rng(5).integers(0, 256, (2, 16, 132), np.uint8))
    before = cache.clone()
    k = tensor(rows_of(128))
    tsmla_bridge.write_indexer_cache(cache, k[:0], torch.zeros(0, dtype=torch.int32))
    tsmla_bridge.write_indexer_cache(cache, k, torch.full((9,), -1, dtype=torch.int32))
    assert torch.equal(cache, before)


@pytest.mark.parametrize("rotates", [False, True])
def test_queries_are_those_of_jax(rotates: bool) -> None:
    q, weights = rows_of(4 * 128).reshape(9, 4, 128), rows_of(4)
    turn = angles() if rotates else ()
    q8, folded = tsmla_bridge.indexer_quantize(*map(tensor, (q, weights, *turn)))
    want, wanted = jax.jit(sparse.indexer_quantize)(q, weights, *turn)
    differ = np.asarray(q8.view(torch.uint8)) != np.asarray(want.view(jnp.uint8))
    assert differ.mean() < (0.002 if rotates else 1e-9)
    np.testing.assert_allclose(folded, wanted, rtol=1e-6)


@pytest.mark.parametrize(("shape", "axis"), [((2, 3, 0), "Di"), ((2, 0, 8), "Hi")])
def test_queries_of_no_column_or_head_are_refused(shape: tuple[int, ...], axis: str) -> None:
    q, weights = np.zeros(shape, np.float32), np.zeros(shape[:2], np.float32)
    with pytest.raises(ValueError, match=rf"q: got shape \[.*\]; {axis} must be at least 1"):
        tsmla_bridge.indexer_quantize(torch.from_numpy(q), torch.from_numpy(weights))
    with pytest.raises(ValueError, match=rf"q: got shape \[.*\]; {axis} must be at least 1"):
        sparse.indexer_quantize(q, weights)


@pytest.mark.parametrize("rotates", [False, True])
def test_quantized_queries_are_dense_whatever_the_strides(rotates: bool) -> None:
    q, weights = torch.randn(4, 9, 128).transpose(0, 1), torch.randn(4, 9).t()
    turn = tuple(map(tensor, angles())) if rotates else ()
    results = tsmla_bridge.indexer_quantize(q, weights, *turn)
    with FakeTensorMode() as mode:
        fakes = tsmla_bridge.indexer_quantize(*map(mode.from_tensor, (q, weights, *turn)))
    for result, fake, dense in zip(results, fakes, (q, weights), strict=True):
        assert result.stride() == fake.stride() == dense.contiguous().stride()


def test_operators_are_seen_by_the_compiler() -> None:
    logits, lens = tensor(logits_of("ties")), torch.full((ROWS,), COLUMNS, dtype=torch.int32)
    cache, k = torch.zeros(2, 16, 132, dtype=torch.uint8), tensor(rows_of(128))
    slots = torch.arange(9, dtype=torch.int32)

    def step(logits: torch.Tensor, cache: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tsmla_bridge.write_indexer_cache(cache, k, slots)
        return tsmla_bridge.select_topk(logits, lens, K, order="position"), cache

    want = step(logits, cache.clone(), k)
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(logits, cache.clone(), k)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
