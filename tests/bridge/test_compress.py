"""compress_write_kv_cache on torch tensors: as in jax, step after step."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tsmla_bridge
import tsmla_jax
from tests.bridge.inputs import TorchInAGraph, tensor
from tsmla_bridge import compress_reference
from tsmla_jax import sparse
from tsmla_jax.sparse import CompressorState

PAGES, ROPE = 9, 32


def empty(kind: str, channels: int) -> jax.Array:
    if kind == "v4":
        return sparse.init_v4_cache(PAGES, layout="packed", cache_dtype="fp8")
    if kind == "indexer":
        return jnp.zeros((PAGES, 8, channels + 4), jnp.uint8)
    return jnp.zeros((PAGES, 8, channels), kind)


def as_numbers(x: torch.Tensor | jax.Array) -> np.ndarray:
    narrow = isinstance(x, torch.Tensor) and x.dtype in (torch.float8_e4m3fn, torch.bfloat16)
    return np.asarray(x.float() if narrow else x, np.float32)


@pytest.mark.parametrize(
    ("kind", "ratio", "overlap", "channels"),
    [("v4", 4, True, 512), ("indexer", 4, True, 64), ("bfloat16", 3, True, 48), ("float8_e4m3fn", 8, False, 64)],
)
def test_the_results_are_those_of_jax(
    kind: str, ratio: int, overlap: bool, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compress_reference, "torch", TorchInAGraph())
    rng = np.random.default_rng(ratio)
    width = channels * (1 + overlap)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    ape, weight, cos_sin = drawn(ratio, width), drawn(channels), drawn(64, ROPE)
    tables = jnp.asarray([[4, 2, 7], [0, PAGES, 1], [8, 3, -1]], jnp.int32)  # pages that don't exist are not written
    cache, state = (
        empty(kind, channels),
        sparse.init_compressor_state(4, ratio=ratio, channels=channels, overlap=overlap, spare=1),
    )
    mine = [tensor(x) for x in (cache, *state)]
    options = {"ratio": ratio, "overlap": overlap, "eps": 1e-6}
    options |= {"kv_scale": 0.03} if kind == "float8_e4m3fn" else {}
    jitted = jax.jit(functools.partial(tsmla_jax.compress_write_kv_cache, **options))
    lens = np.zeros(3, np.int64)
    for new in ([9, 0, 41], [17, 30, 1], [1, 1, 1], [2, 1, 2], [1, 1, 0]):
        lens = lens + new
        where = {
            "state_slots": jnp.asarray([3, 0, 2], jnp.int32),
            "seq_lens": jnp.asarray(lens, jnp.int32),
            "cu_seqlens_q": jnp.asarray([0, *np.cumsum(new)], jnp.int32),
        }
        kv_score = drawn(52, 2, width)  # as many rows in each step: one program serves all
        cache, state = jitted(cache, kv_score, ape, state, weight, cos_sin, tables, **where)
        rest = map(tensor, (weight, cos_sin, tables))
        given = (mine[0], tensor(kv_score), tensor(ape), *mine[1:], *rest)
        placed = {name: tensor(x) for name, x in where.items()}
        assert tsmla_bridge.compress_write_kv_cache(*given, **placed, **options) is mine[0]
    assert isinstance(state, CompressorState)
    for got, want in zip(mine[1:], state, strict=True):
        np.testing.assert_array_equal(got, want)
    got, want = as_numbers(mine[0]), np.asarray(cache, np.float32)
    assert np.mean(got != want) < 0.002 and (want != 0).mean() > 0.02


def test_no_token_writes_nothing_and_refusals_are_the_contracts() -> None:
    cache = torch.ones(2, 8, 64)
    state, positions = torch.zeros(1, 4, 2, 64), torch.full((1, 4), -1, dtype=torch.int32)
    weight, cos_sin, tables = torch.ones(64), torch.ones(4, 8), torch.zeros(1, 1, dtype=torch.int32)
    where = {name: torch.zeros(1, dtype=torch.int32) for name in ("state_slots", "seq_lens")}
    where["cu_seqlens_q"] = torch.zeros(2, dtype=torch.int32)
    arrays = (cache, torch.zeros(0, 2, 64), torch.zeros(4, 64), state, positions, weight, cos_sin, tables)
    options = {"ratio": 4, "overlap": False, "eps": 1e-6}
    tsmla_bridge.compress_write_kv_cache(*arrays, **where, **options)
    assert (cache == 1).all() and (positions == -1).all()
    with pytest.raises(ValueError, match="cache: got rows of width 32"):
        tsmla_bridge.compress_write_kv_cache(torch.ones(2, 8, 32), *arrays[1:], **where, **options)
    with pytest.raises(ValueError, match=r"page_size: got 4; legal for a cache of three axes: None or Z, 8"):
        tsmla_bridge.compress_write_kv_cache(*arrays, **where, **options, page_size=4)
    with pytest.raises(NotImplementedError, match="the tensors are on cpu"):
        tsmla_bridge.compress_write_kv_cache(*arrays, **where, **options, implementation="cute")


def call_of_two(cache: torch.Tensor, state: torch.Tensor, positions: torch.Tensor, **changed: Any) -> None:
    """Eight new tokens of two requests, two entries each."""
    draw = torch.Generator().manual_seed(0)
    width = 512 if cache.dim() == 2 else 64
    arrays = (
        torch.randn(16, 2, width, generator=draw),
        torch.randn(4, width, generator=draw),
        state,
        positions,
        torch.randn(width, generator=draw),
        torch.randn(8, 8, generator=draw),
        torch.tensor([[1], [2]], dtype=torch.int32),
    )
    where = {"state_slots": [1, 0], "seq_lens": [8, 8], "cu_seqlens_q": [0, 8, 16]}
    placed = {name: torch.tensor(value, dtype=torch.int32) for name, value in where.items()}
    options = {"ratio": 4, "overlap": False, "eps": 1e-6, "page_size": 4 if cache.dim() == 2 else None}
    tsmla_bridge.compress_write_kv_cache(cache, *arrays, **placed, **(options | changed))


@pytest.mark.parametrize("kind", ["v4", "indexer", "plain"])
def test_caches_and_states_with_gaps_are_written(kind: str) -> None:
    shape = {"v4": (3, 2880), "indexer": (3, 4, 68), "plain": (3, 4, 64)}[kind]
    dtype = torch.float32 if kind == "plain" else torch.uint8
    width = 512 if kind == "v4" else 64
    dense = torch.zeros(shape, dtype=dtype), torch.zeros(2, 4, 2, width), torch.full((2, 4), -1, dtype=torch.int32)
    apart = [torch.stack([x, x], 2)[:, :, 0] for x in dense]  # every second element of axis 1
    assert not any(x.is_contiguous() for x in apart)
    call_of_two(*dense)
    call_of_two(*apart)
    assert all(torch.equal(a, b) for a, b in zip(apart, dense, strict=True)) and dense[0].any()


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"overlap": 1}, TypeError, "overlap: got int; legal: True or False, static"),
        ({"overlap": None}, TypeError, "overlap: got NoneType; legal: True or False, static"),
        ({"eps": float("nan")}, ValueError, "eps: got nan; legal: a finite number, at least 0"),
        ({"eps": 10**400}, ValueError, "eps: got 10+; legal: a finite number, at least 0"),
        ({"eps": -1e-6}, ValueError, "eps: got -1e-06; legal: a finite number, at least 0"),
    ],
)
def test_static_options_that_are_not_legal(option: dict[str, Any], error: type[Exception], message: str) -> None:
    cache, state = torch.zeros(3, 4, 64), torch.zeros(2, 4, 2, 64)
    with pytest.raises(error, match=message):
        call_of_two(cache, state, torch.full((2, 4), -1, dtype=torch.int32), **option)
    assert not cache.any() and not state.any()


def test_rows_before_the_first_requests_leave_nothing_behind() -> None:
    rng = np.random.default_rng(0)
    rows, ape, cos_sin = (
        torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in ((9, 2, 128), (4, 128), (64, 32))
    )
    found = []
    for before in (0, 2, 6):  # 6: more than an entry's
        state, positions = torch.zeros(2, 8, 2, 128), torch.full((2, 8), -1, dtype=torch.int32)
        cache, tables = torch.zeros(4, 8, 64), torch.tensor([[0, 1], [2, 1]], dtype=torch.int32)
        tsmla_bridge.compress_write_kv_cache(
            cache, torch.cat((torch.ones(before, 2, 128), rows)), ape, state, positions, torch.ones(64), cos_sin,
            tables, state_slots=torch.arange(2, dtype=torch.int32), seq_lens=torch.tensor([5, 4], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, 5, 9], dtype=torch.int32) + before, ratio=4, overlap=True, eps=1e-6,
        )  # fmt: skip
        found.append((cache, state, positions))
    for same, *others in zip(*found, strict=True):
        assert all(torch.equal(same, other) for other in others)
