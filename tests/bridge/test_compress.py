"""compress_write_kv_cache on torch tensors: as in jax, step after step."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tsmla_bridge
import tsmla_jax
from tests.bridge.test_sparse import as_torch
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
def test_the_results_are_those_of_jax(kind: str, ratio: int, overlap: bool, channels: int) -> None:
    rng = np.random.default_rng(ratio)
    width = channels * (1 + overlap)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    ape, weight, cos_sin = drawn(ratio, width), drawn(channels), drawn(64, ROPE)
    tables = jnp.asarray([[4, 2, 7], [0, PAGES, 1], [8, 3, -1]], jnp.int32)  # pages that don't exist are not written
    cache, state = empty(kind, channels), sparse.init_compressor_state(
        4, ratio=ratio, channels=channels, overlap=overlap, spare=1
    )
    mine = [as_torch(x) for x in (cache, *state)]
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
        rest = map(as_torch, (weight, cos_sin, tables))
        given = (mine[0], as_torch(kv_score), as_torch(ape), *mine[1:], *rest)
        placed = {name: as_torch(x) for name, x in where.items()}
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
    with pytest.raises(NotImplementedError, match="the tensors are on cpu"):
        tsmla_bridge.compress_write_kv_cache(*arrays, **where, **options, implementation="cute")
