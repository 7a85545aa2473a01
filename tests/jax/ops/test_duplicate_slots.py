"""TSMLA_CHECK=1: two rows of one slot are found by every operation that writes a cache, in both front ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tsmla_bridge
import tsmla_jax
from tsmla_jax import sparse

ROWS = {"latent": np.ones((4, 512), np.float32), "k_rope": np.ones((4, 64), np.float32)}
KEYS, PACKED, PLAIN = np.zeros((3, 16, 132), np.uint8), np.zeros((3, 16, 656), np.uint8), np.zeros((3, 16, 576), "f4")
ROPE_WRITE = ROWS | {
    "kv_cache": PLAIN,
    "q_nope": np.ones((4, 2, 512), np.float32),
    "q_rope": np.ones((4, 2, 64), np.float32),
    "cos": np.ones((4, 32), np.float32),
    "sin": np.ones((4, 32), np.float32),
}
Write = Callable[..., Any]
WRITERS: dict[str, tuple[Write, dict[str, Any]]] = {
    "write_kv_cache": (tsmla_jax.write_kv_cache, ROWS | {"kv_cache": PLAIN}),
    "rope_write_kv_cache": (tsmla_jax.rope_write_kv_cache, ROPE_WRITE),
    "write_packed_kv_cache": (sparse.write_packed_kv_cache, ROWS | {"kv_cache": PACKED}),
    "write_indexer_cache": (sparse.write_indexer_cache, {"k_cache": KEYS, "k": np.ones((4, 128), np.float32)}),
    "write_v4_cache": (sparse.write_v4_cache, {"kv_cache": PLAIN[..., :512].copy(), "kv": ROWS["latent"]}),
}
IN_TORCH = [name for name in WRITERS if hasattr(tsmla_bridge, name)]


def in_jax(name: str, slots: Any) -> None:
    function, arrays = WRITERS[name]
    function(**arrays, slot_mapping=np.asarray(slots, np.int32))


def in_torch(name: str, slots: Any, dtype: torch.dtype = torch.int32) -> None:
    arrays = {key: torch.tensor(value) for key, value in WRITERS[name][1].items()}
    getattr(tsmla_bridge, name)(**arrays, slot_mapping=torch.tensor(slots, dtype=dtype))


def entries(write: str) -> tuple[Write, dict[str, Any]]:
    """compress_write_kv_cache of two requests, each of which completes two entries of four tokens; by `write`'s end."""
    tokens = 8
    given = {
        "cache": np.zeros((3, 16, 512), np.float32),
        "kv_score": np.ones((2 * tokens, 2, 512), np.float32),
        "ape": np.ones((4, 512), np.float32),
        "norm_weight": np.ones(512, np.float32),
        "cos_sin": np.ones((9, 64), np.float32),
        "state_slots": np.int32([0, 1]),
        "seq_lens": np.int32([tokens, tokens]),
        "cu_seqlens_q": np.int32([0, tokens, 2 * tokens]),
    }
    state = sparse.init_compressor_state(2, ratio=4, channels=512, overlap=False)
    options = {"ratio": 4, "overlap": False, "eps": 1e-6}
    if write == "jax":
        return tsmla_jax.compress_write_kv_cache, given | options | {"state": state}
    as_torch = {name: torch.tensor(array) for name, array in given.items()}
    rings = {"state": state.kv_score, "state_positions": state.positions}
    rings = {name: torch.tensor(np.array(ring)) for name, ring in rings.items()}
    return tsmla_bridge.compress_write_kv_cache, as_torch | rings | options


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")


@pytest.mark.parametrize("name", WRITERS)
def test_in_jax(name: str) -> None:
    in_jax(name, [-1, 7, -1, -1])
    with pytest.raises(ValueError, match="slot_mapping: tokens 1 and 3 both go to slot 7; legal: slots that differ"):
        in_jax(name, [-1, 7, -1, 7])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", IN_TORCH)
def test_in_torch(name: str, dtype: torch.dtype) -> None:
    in_torch(name, [-1, 7, -1, -1], dtype)
    with pytest.raises(ValueError, match="slot_mapping: tokens 1 and 3 both go to slot 7; legal: slots that differ"):
        in_torch(name, [-1, 7, -1, 7], dtype)


@pytest.mark.parametrize("front_end", ["jax", "torch"])
def test_compressed_entries(front_end: str) -> None:
    function, given = entries(front_end)
    make = torch.tensor if front_end == "torch" else jnp.asarray
    numbers = {"dtype": torch.int32} if front_end == "torch" else {"dtype": jnp.int32}
    for tables in ([[2, -1], [1, -1]], [[-1, 0], [-1, 0]], [[5, 0], [5, 0]]):  # pages that don't exist hold nothing
        function(**given, block_tables=make(tables, **numbers))
        function, given = entries(front_end)  # torch writes the state in place
    message = "block_tables: entry 0 of request 0 and entry 0 of request 1 both go to slot 32; legal: entries"
    with pytest.raises(ValueError, match=message):
        function(**given, block_tables=make([[2, -1], [2, -1]], **numbers))
