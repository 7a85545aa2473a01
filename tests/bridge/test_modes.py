"""Modes of torch that change other code's numbers change no operation's: autocast, the default dtype and device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tsmla_bridge
from tsmla_bridge.engines import tokenspeed_mla

TABLES, LENS = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([25], dtype=torch.int32)
STARTS = torch.tensor([0, 3], dtype=torch.int32)
CACHE = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
WORKSPACE = torch.zeros(1 << 20, dtype=torch.int8)
PACKED = {"cu_seqlens_q": STARTS, "cu_seqlens_kv": STARTS, "max_q_len": 3, "max_kv_len": 3, "softmax_scale": 0.3}
DECODE = {"softmax_scale": 0.3, "latent_dim": 48}
SLOTS = torch.tensor([[3, 17, -1], [0, 1, 2], [31, 30, -1]], dtype=torch.int32)


def gradient() -> torch.Tensor:
    q = ROWS.clone().requires_grad_()
    tsmla_bridge.mla_prefill(q, ROWS, ROWS, **PACKED).sum().backward()
    assert q.grad is not None
    return q.grad


def window() -> Any:
    return tokenspeed_mla.tokenspeed_mla_decode(
        ROWS[None, :1], CACHE, WORKSPACE, 48, 16, TABLES, LENS, 25, 0.3, window_left=9, return_lse=True
    )


DRAW = torch.Generator().manual_seed(3)
KV_SCORE, APE, FACTORS = (torch.randn(*shape, generator=DRAW) for shape in ((16, 2, 64), (4, 64), (64,)))
PLACES = [torch.tensor(x, dtype=torch.int32) for x in ([[1], [2]], [1, 0], [8, 8], [0, 8, 16])]


def compressed() -> torch.Tensor:
    """The e4m3 entries that eight new tokens of two requests leave, with a scale that bfloat16 doesn't hold."""
    cache = torch.zeros(3, 8, 64, dtype=torch.float32, device="cpu").to(torch.float8_e4m3fn)
    state = torch.zeros(2, 4, 2, 64, dtype=torch.float32, device="cpu")
    positions = torch.full((2, 4), -1, dtype=torch.int32, device="cpu")
    tables, slots, lens, starts = PLACES
    tsmla_bridge.compress_write_kv_cache(
        cache, KV_SCORE, APE, state, positions, FACTORS, COS_SIN, tables,
        state_slots=slots, seq_lens=lens, cu_seqlens_q=starts, ratio=4, overlap=False, eps=1e-6, kv_scale=0.03,
    )  # fmt: skip
    return cache


PACKED_WEIGHT = torch.randint(0, 256, (40, 48), dtype=torch.uint8, generator=DRAW)
EXPONENTS = torch.randint(120, 130, (40, 3), dtype=torch.uint8, generator=DRAW)
X, COS_SIN = torch.randn(5, 96, generator=DRAW), torch.randn(8, 8, generator=DRAW)

CALLS: dict[str, Callable[[], Any]] = {
    "compress_write_kv_cache": compressed,
    "block_scaled_matmul": lambda: tsmla_bridge.block_scaled_matmul(X, PACKED_WEIGHT, None, EXPONENTS),
    "mla_decode": lambda: tsmla_bridge.mla_decode(ROWS[None], CACHE, TABLES, LENS, **DECODE, return_lse=True),
    "mla_prefill": lambda: tsmla_bridge.mla_prefill(ROWS, ROWS, ROWS, **PACKED, return_lse=True),
    "the gradient of mla_prefill": gradient,
    "sparse_mla": lambda: tsmla_bridge.sparse_mla(ROWS, CACHE, SLOTS, **DECODE, return_lse=True),
    "indexer_logits": lambda: tsmla_bridge.indexer_logits(ROWS, WEIGHTS, CACHE, TABLES, LENS, cu_seqlens_q=STARTS),
    "indexer_logits of no key": lambda: tsmla_bridge.indexer_logits(
        ROWS, WEIGHTS, CACHE, TABLES[:, :0], LENS, cu_seqlens_q=STARTS
    ),
    "indexer_topk": lambda: tsmla_bridge.indexer_topk(ROWS, WEIGHTS, CACHE, TABLES, LENS, k=5, cu_seqlens_q=STARTS),
    "indexer_quantize": lambda: tsmla_bridge.indexer_quantize(ROWS, WEIGHTS),
    "a window of tokenspeed_mla": window,
}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_the_results_are_the_same(name: str, mode: str) -> None:
    want = CALLS[name]()
    with MODES[mode]():
        got = CALLS[name]()
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    for a, b in pairs:
        assert a.dtype == b.dtype and torch.equal(a.cpu().float(), b.float())
