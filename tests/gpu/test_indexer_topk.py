"""indexer_topk by its kernels on a GPU, inside jax and from torch: in one chunk of rows and in several, as defined on
scores that are exact, and as the two operations on random ones; CUDA graphs and memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import tsmla_bridge
import tsmla_jax
from tests.gpu.front_ends import tensor
from tsmla_jax.ops.indexer_topk import cute
from tsmla_kernels.topk import chunks

pytestmark = pytest.mark.gpu

HEADS, DIM, Z, K = 64, 128, 64, 512
E4M3 = ml_dtypes.float8_e4m3fn
Arguments = dict[str, np.ndarray]
Q_LENS, LENS = (40, 0, 1, 130, 4, 9), (4000, 77, 1, 3111, 2, 0)
"""Requests without tokens, with fewer keys than tokens, and without keys."""


@pytest.fixture(autouse=True)
def needs_the_kernel() -> None:
    given = {name: jnp.asarray(x) for name, x in arguments(ragged=True).items()}
    if reasons := tsmla_jax.explain("indexer_topk", **given, k=K, implementation="cute").reasons["cute"]:
        pytest.skip("; ".join(reasons))


@pytest.fixture(params=["one chunk", "several"])
def by_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All rows at once, or chunks of 48 of the rows of `arguments`, which cut requests in two."""
    if request.param == "several":
        monkeypatch.setattr(chunks, "WORKSPACE_BYTES", 50 * 4 * Z * pages_of(max(LENS)))
    cute._transformable.cache_clear()  # jax keeps the programs of these shapes
    yield
    cute._transformable.cache_clear()


def pages_of(keys: int) -> int:
    return -(-keys // Z) + 1


def arguments(ragged: bool, exact: bool = True) -> Arguments:
    """Arguments over packed keys, the last row of no request. Scores are `exact` where all numbers are small integers;
    many then tie. What no token sees holds NaN; entries of the block table behind a request's pages are illegal."""
    rng = np.random.default_rng(len(LENS))
    counts = [-(-n // Z) for n in LENS]
    num_pages, width, tokens = sum(counts) + 2, pages_of(max(LENS)), sum(Q_LENS) + 1

    def numbers(*shape: int) -> np.ndarray:
        return (rng.integers(-2, 3, shape) if exact else rng.standard_normal(shape)).astype(np.float32)

    keys, scales = numbers(num_pages, Z, DIM).astype(E4M3), np.full((num_pages, Z), np.nan, np.float32)
    tables = rng.choice([-1, num_pages + 5, 1 << 30], (len(LENS), width)).astype(np.int32)
    pages, first = rng.permutation(num_pages), 0
    for r, n in enumerate(LENS):
        tables[r, : counts[r]] = mine = pages[first : first + counts[r]]
        first += counts[r]
        slots = np.arange(n)
        scales[mine[slots // Z] if n else slots, slots % Z] = 2.0 ** rng.integers(-2, 3, n)
    parts = keys.view(np.uint8).reshape(num_pages, -1), scales.view(np.uint8).reshape(num_pages, -1)
    given = {
        "q": numbers(tokens, HEADS, DIM).astype(E4M3),
        "weights": numbers(tokens, HEADS),
        "k_cache": np.concatenate(parts, 1).reshape(num_pages, Z, DIM + 4),
    }
    lens, offsets = np.asarray(LENS, np.int32), np.cumsum([0, *Q_LENS]).astype(np.int32)
    if ragged:
        return given | {"block_tables": tables, "seq_lens": lens, "cu_seqlens_q": offsets}
    owner = np.repeat(np.arange(len(LENS)), Q_LENS)
    seen = lens[owner] - np.asarray(Q_LENS)[owner] + 1 + np.arange(tokens - 1) - offsets[owner]
    given |= {name: given[name][:-1] for name in ("q", "weights")}
    return given | {"block_tables": tables[owner], "seq_lens": np.maximum(seen, 0).astype(np.int32)}


def through_jax(given: Arguments, name: str = "cute", **options: Any) -> list[np.ndarray]:
    run = jax.jit(functools.partial(tsmla_jax.indexer_topk, k=K, implementation=name, **options))
    arrays = {argument: jnp.asarray(x) for argument, x in given.items()}
    return [np.asarray(x) for x in jax.tree.leaves(run(**arrays))]


def through_torch(given: Arguments, **options: Any) -> list[np.ndarray]:
    tensors = {name: tensor(x) for name, x in given.items()}
    found = tsmla_bridge.indexer_topk(**tensors, k=K, implementation="cute", **options)
    return [x.cpu().numpy() for x in (found if isinstance(found, tuple) else (found,))]


FRONT_ENDS: dict[str, Callable[..., list[np.ndarray]]] = {"jax": through_jax, "torch": through_torch}


@pytest.mark.usefixtures("by_chunks")
@pytest.mark.parametrize("front_end", list(FRONT_ENDS))
@pytest.mark.parametrize("returned", ["", "return_slots", "return_scores", "return_slots return_scores", "return_bits"])
@pytest.mark.parametrize("ragged", [False, True])
def test_as_defined(ragged: bool, returned: str, front_end: str) -> None:
    given, options = arguments(ragged), dict.fromkeys(returned.split(), True)
    got = FRONT_ENDS[front_end](given, **options)
    for one, other in zip(got, through_jax(given, "xla", **options), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("by_chunks")
@pytest.mark.parametrize("ragged", [False, True])
def test_as_the_two_operations(ragged: bool) -> None:
    given = {name: tensor(x) for name, x in arguments(ragged, exact=False).items()}
    logits = tsmla_bridge.indexer_logits(**given, implementation="cute")
    lens = torch.isfinite(logits).sum(1).int()
    want = tsmla_bridge.select_topk(logits, lens, K, order="position", implementation="cute")
    assert torch.equal(tsmla_bridge.indexer_topk(**given, k=K, implementation="cute"), want)


@pytest.mark.usefixtures("by_chunks")
def test_in_a_graph_with_new_lengths() -> None:
    given = {name: tensor(x) for name, x in arguments(ragged=True).items()}
    rows = given["q"].shape[0]
    options = {"k": K, "return_slots": True}
    size = tsmla_bridge.indexer_topk_workspace_size(max_tokens=rows, max_keys=Z * given["block_tables"].shape[1])
    memory: dict[str, Any] = {
        "out": torch.empty(rows, K, dtype=torch.int32, device="cuda"),
        "counts": torch.empty(rows, dtype=torch.int32, device="cuda"),
        "workspace": tsmla_bridge.Workspace(size),
    }
    tsmla_bridge.indexer_topk(**given, **options, **memory, implementation="cute")
    memory["workspace"].release()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tsmla_bridge.indexer_topk(**given, **options, **memory)
    for change in (0, 300):
        given["seq_lens"].copy_((given["seq_lens"] - change).clamp(min=0))
        graph.replay()
        want = tsmla_bridge.indexer_topk(**given, **options, implementation="reference")
        assert torch.equal(memory["out"], want[0]) and torch.equal(memory["counts"], want[1])


@pytest.mark.usefixtures("by_chunks")
def test_under_vmap() -> None:
    given = {name: jnp.asarray(x) for name, x in arguments(ragged=False).items()}

    def call(weights: Any) -> Any:
        return tsmla_jax.indexer_topk(**(given | {"weights": weights}), k=K, implementation="cute")

    twice = jnp.stack([given["weights"], -given["weights"]])
    got = jax.jit(jax.vmap(call))(twice)
    for i in range(2):
        np.testing.assert_array_equal(got[i], call(twice[i]))


def test_under_the_compiler() -> None:
    given = {name: tensor(x) for name, x in arguments(ragged=True).items()}
    compiled = torch.compile(tsmla_bridge.indexer_topk, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**given, k=K), tsmla_bridge.indexer_topk(**given, k=K))


def test_memory_is_bounded() -> None:
    tokens, keys = 4096, 1 << 17
    given = {
        "q": torch.zeros(tokens, HEADS, DIM, dtype=torch.float8_e4m3fn, device="cuda"),
        "weights": torch.ones(tokens, HEADS, device="cuda"),
        "k_cache": torch.zeros(keys // Z, Z, DIM + 4, dtype=torch.uint8, device="cuda"),
        "block_tables": torch.arange(keys // Z, dtype=torch.int32, device="cuda")[None],
        "seq_lens": torch.tensor([keys], dtype=torch.int32, device="cuda"),
        "cu_seqlens_q": torch.tensor([0, tokens], dtype=torch.int32, device="cuda"),
    }
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = tsmla_bridge.indexer_topk(**given, k=2048, return_slots=True, implementation="cute")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 300 << 20
    assert torch.equal(found[0][0], torch.arange(2048, dtype=torch.int32, device="cuda"))  # all scores tie
    structs = {
        name: jax.ShapeDtypeStruct(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in given.items()
    }
    run = functools.partial(tsmla_jax.indexer_topk, k=2048, return_slots=True, implementation="cute")
    used = jax.jit(run).lower(**structs).compile().memory_analysis()
    assert used.temp_size_in_bytes < 300 << 20


def test_none_chooses_the_kernels() -> None:
    given = {name: jnp.asarray(x) for name, x in arguments(ragged=True).items()}
    assert tsmla_jax.explain("indexer_topk", **given, k=K).chosen == "cute"
