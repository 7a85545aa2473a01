"""The indexer_logits kernel on a GPU against float64, inside jax and from torch: ragged and flat, odd sizes, no keys,
NaN in what no token sees, and addresses beyond 2^32 bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import tsmla_bridge
import tsmla_jax
from tests.gpu.front_ends import tensor

pytestmark = pytest.mark.gpu

DIM = 128
E4M3 = ml_dtypes.float8_e4m3fn
STEP = 2.0**-12
"""The legal error of logits as a part of the sum of |weight| |q| |k|: fp8 WGMMA aligns 32 products to the largest."""


class Problem(NamedTuple):
    """Arguments, and the float64 results with the bounds of their errors."""

    arguments: dict[str, np.ndarray]
    logits: np.ndarray
    bound: np.ndarray


class Shape(NamedTuple):
    """query tokens and keys of each request, heads, page size, width of the logits in pages, packed or plain keys."""

    q_lens: tuple[int, ...]
    lens: tuple[int, ...]
    heads: int = 64
    page_size: int = 64
    max_pages: int = 0
    packed: bool = True


@pytest.fixture(autouse=True)
def needs_the_kernel() -> None:
    arrays = (
        jax.ShapeDtypeStruct((4, 64, DIM), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((4, 64), jnp.float32),
        jax.ShapeDtypeStruct((8, 64, DIM + 4), jnp.uint8),
        jax.ShapeDtypeStruct((4, 2), jnp.int32),
        jax.ShapeDtypeStruct((4,), jnp.int32),
    )
    if reasons := tsmla_jax.explain("indexer_logits", *arrays, implementation="cute").reasons["cute"]:
        pytest.skip("; ".join(reasons))


def problem(shape: Shape, ragged: bool) -> Problem:
    """A random problem. Slots behind a request's end hold NaN, the block table behind its pages -1 or more than P."""
    rng = np.random.default_rng(sum(shape.lens) + shape.heads)
    size, requests = shape.page_size, len(shape.lens)
    counts = [-(-n // size) for n in shape.lens]
    max_pages, num_pages = shape.max_pages or max(*counts, 1), sum(counts) + 2
    pages = rng.permutation(num_pages)
    tables = rng.choice([-1, num_pages + 5, 1 << 30], (requests, max_pages)).astype(np.int32)
    keys = np.full((num_pages, size, DIM), np.nan, np.float32).astype(E4M3)
    scales = np.full((num_pages, size), np.nan, np.float32)
    tokens = sum(shape.q_lens) + (1 if ragged else 0)  # the last row is of no request
    q = rng.standard_normal((tokens, shape.heads, DIM)).astype(E4M3)
    weights = rng.standard_normal((tokens, shape.heads)).astype(np.float32)
    logits = np.full((tokens, max_pages * size), -np.inf)
    bound = np.zeros_like(logits)
    row, first = 0, 0
    for r, (s, n) in enumerate(zip(shape.q_lens, shape.lens, strict=True)):
        mine = pages[first : first + counts[r]]
        first += counts[r]
        tables[r, : counts[r]] = mine
        k = rng.standard_normal((n, DIM)).astype(E4M3)
        scale = (rng.random(n) + 0.1).astype(np.float32) if shape.packed else np.ones(n, np.float32)
        slots = mine[np.arange(n) // size] if n else np.zeros(0, int), np.arange(n) % size
        keys[slots], scales[slots] = k, scale
        for i in range(s):
            seen = max(0, n - s + 1 + i)
            dots = np.float64(q[row]) @ np.float64(k[:seen]).T
            sizes = np.abs(np.float64(q[row])) @ np.abs(np.float64(k[:seen])).T
            logits[row, :seen] = np.float64(weights[row]) @ np.maximum(dots, 0) * scale[:seen]
            bound[row, :seen] = np.abs(np.float64(weights[row])) @ sizes * scale[:seen]
            row += 1
    cache = keys
    if shape.packed:
        parts = keys.view(np.uint8).reshape(num_pages, -1), scales.view(np.uint8).reshape(num_pages, -1)
        cache = np.concatenate(parts, 1).reshape(num_pages, size, DIM + 4)
    lens = np.asarray(shape.lens, np.int32)
    offsets = np.cumsum([0, *shape.q_lens]).astype(np.int32)
    arguments = {"q": q, "weights": weights, "k_cache": cache}
    if ragged:
        arguments |= {"block_tables": tables, "seq_lens": lens, "cu_seqlens_q": offsets}
    else:
        owner = np.repeat(np.arange(requests), shape.q_lens)
        seen_keys = lens[owner] - np.asarray(shape.q_lens)[owner] + 1 + np.arange(tokens) - offsets[owner]
        arguments |= {"block_tables": tables[owner], "seq_lens": np.maximum(seen_keys, 0).astype(np.int32)}
    return Problem(arguments, logits, bound)


def through_jax(arguments: dict[str, np.ndarray]) -> np.ndarray:
    run = jax.jit(functools.partial(tsmla_jax.indexer_logits, implementation="cute"))
    return np.asarray(run(**{name: jnp.asarray(x) for name, x in arguments.items()}))


def through_torch(arguments: dict[str, np.ndarray]) -> np.ndarray:
    given = {name: tensor(x) for name, x in arguments.items()}
    return tsmla_bridge.indexer_logits(**given, implementation="cute").cpu().numpy()


FRONT_ENDS: dict[str, Callable[[dict[str, np.ndarray]], np.ndarray]] = {"jax": through_jax, "torch": through_torch}


def assert_right(got: np.ndarray, want: Problem) -> None:
    assert np.array_equal(np.isneginf(got), np.isneginf(want.logits))
    seen = np.isfinite(want.logits)
    assert np.isfinite(got[seen]).all()
    assert (np.abs(got[seen] - want.logits[seen]) <= STEP * want.bound[seen] + 1e-30).all()


DECODE = {
    "one request": Shape((1,), (8192,)),
    "one token each": Shape((1,) * 5, (1000, 0, 63, 64, 4097), max_pages=128),
    "2 tokens": Shape((2,) * 8, tuple(500 + 61 * i for i in range(8))),
    "4 tokens": Shape((4,) * 8, tuple(500 + 61 * i for i in range(8))),
    "ragged": Shape((4, 3, 1, 0, 5, 4), (1500, 129, 77, 50, 2, 0), max_pages=64),
    "many short requests": Shape((1, 2) * 150, tuple(37 * i % 400 for i in range(300))),
    "plain keys": Shape((3, 1, 4), (1000, 77, 300), packed=False, page_size=32),
}
PREFILL = {
    "chunk": Shape((333,), (1200,)),
    "ragged": Shape((100, 37, 1, 64), (600, 37, 500, 70)),
    "all new": Shape((130, 64), (130, 64), page_size=128),
}


@pytest.mark.parametrize("front_end", list(FRONT_ENDS))
@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("name", list(DECODE))
def test_decode(name: str, ragged: bool, front_end: str) -> None:
    case = problem(DECODE[name], ragged)
    assert_right(FRONT_ENDS[front_end](case.arguments), case)


@pytest.mark.parametrize("front_end", list(FRONT_ENDS))
@pytest.mark.parametrize("name", list(PREFILL))
def test_prefill(name: str, front_end: str) -> None:
    case = problem(PREFILL[name], ragged=True)
    assert_right(FRONT_ENDS[front_end](case.arguments), case)


@pytest.mark.parametrize(("heads", "page_size"), [(8, 16), (24, 32), (96, 128), (128, 16), (128, 64)])
def test_heads_and_pages(heads: int, page_size: int) -> None:
    for q_lens in ((3, 1, 4), (40, 9, 0)):
        case = problem(Shape(q_lens, (400, 77, 300), heads, page_size), ragged=True)
        assert_right(through_torch(case.arguments), case)


def test_every_block_is_new_and_old_results_do_not_matter() -> None:
    """Twice into one tensor that held NaN, and in a CUDA graph, after the lengths have changed."""
    case = problem(Shape((2, 2), (900, 300)), ragged=True)
    given = {name: tensor(x) for name, x in case.arguments.items()}
    out = torch.full(case.logits.shape, float("nan"), device="cuda")
    assert tsmla_bridge.indexer_logits(**given, out=out) is out
    assert_right(out.cpu().numpy(), case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tsmla_bridge.indexer_logits(**given, out=out)
    given["seq_lens"].copy_(torch.tensor([65, 0], dtype=torch.int32))
    out.fill_(float("nan"))
    graph.replay()
    assert torch.isfinite(out).sum(1).tolist() == [64, 65, 0, 0, 0]
    assert torch.isneginf(out).sum().item() == out.numel() - 129


def test_under_vmap_and_a_derivative() -> None:
    case = problem(DECODE["one token each"], ragged=False)
    given = {name: jnp.asarray(x) for name, x in case.arguments.items()}

    def call(weights: Any, name: str) -> Any:
        return tsmla_jax.indexer_logits(**(given | {"weights": weights}), implementation=name)

    twice = jnp.stack([given["weights"], -given["weights"]])
    got = jax.jit(jax.vmap(functools.partial(call, name="cute")))(twice)
    assert_right(np.asarray(got[0]), case)

    weights = given["weights"]
    changes = [jax.jvp(functools.partial(call, name=name), (weights,), (weights,))[1] for name in ("cute", "reference")]
    seen = np.isfinite(case.logits)
    np.testing.assert_allclose(changes[0][seen], changes[1][seen], rtol=1e-4, atol=1e-2)


def test_addresses_beyond_32_bits() -> None:
    case = problem(Shape((4,), (300,)), ragged=True)
    given = {name: tensor(x) for name, x in case.arguments.items()}
    small, far = given["k_cache"], (1 << 32) // (64 * (DIM + 4)) + 7
    given["k_cache"] = torch.zeros(far + len(small), 64, DIM + 4, dtype=torch.uint8, device="cuda")
    given["k_cache"][far:] = small
    used = given["block_tables"] < len(small)
    given["block_tables"] = torch.where(used & (given["block_tables"] >= 0), given["block_tables"] + far, 0).int()
    assert_right(tsmla_bridge.indexer_logits(**given, implementation="cute").cpu().numpy(), case)


def test_results_beyond_32_bits() -> None:
    rows, width = 17_000, 65_536  # 4.5 GB
    case = problem(Shape((1,), (100,)), ragged=False)
    given = {name: tensor(x) for name, x in case.arguments.items()}
    tables = given["block_tables"].new_zeros(rows, width // 64)
    tables[:, :2] = given["block_tables"]
    lens = torch.zeros(rows, dtype=torch.int32, device="cuda")
    lens[-1] = 100
    many = {name: given[name].expand(rows, *given[name].shape[1:]).contiguous() for name in ("q", "weights")}
    logits = tsmla_bridge.indexer_logits(
        **many, k_cache=given["k_cache"], block_tables=tables, seq_lens=lens, implementation="cute"
    )
    assert torch.isneginf(logits[:-1]).all() and torch.isneginf(logits[-1, 100:]).all()
    want = case.logits[0, :100]
    assert (np.abs(logits[-1, :100].cpu().numpy() - want) <= STEP * case.bound[0, :100]).all()
