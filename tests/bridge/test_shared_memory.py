"""A place for a result that lies in an argument's memory is refused: a launch would read what it has written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tsmla_bridge

OFFSETS = torch.tensor([0, 3, 5], dtype=torch.int32)
TABLES, LENS = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([3, 9], dtype=torch.int32)
POOL = torch.randn(4, 16, 64)
SELF = {"cu_seqlens_q": OFFSETS, "max_q_len": 3, "softmax_scale": 0.1}


def decode(q: torch.Tensor, cache: torch.Tensor, **places: Any) -> Any:
    return tsmla_bridge.mla_decode(q, cache, TABLES, LENS, softmax_scale=0.1, latent_dim=64, **places)


def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **places: Any) -> Any:
    return tsmla_bridge.mla_prefill(q, k, v, **SELF, **places)


def prefill_kv(q: torch.Tensor, kv: torch.Tensor, **places: Any) -> Any:
    return tsmla_bridge.mla_prefill_kv(q, kv, torch.randn(5, 0), **SELF, **places)


def sparse(q: torch.Tensor, cache: torch.Tensor, **places: Any) -> Any:
    indices = torch.zeros(5, 4, dtype=torch.int32)
    return tsmla_bridge.sparse_mla(q, cache, indices, softmax_scale=0.1, latent_dim=64, **places)


Q = torch.randn(2, 1, 4, 64)
ROWS = torch.randn(5, 4, 64)
ONE = torch.randn(5 * 4 * 64 + 5 * 4)
FP8 = torch.float8_e4m3fn
X, WEIGHT = torch.randn(128, 128).bfloat16(), torch.randn(128, 128).to(FP8)
SCALES = torch.ones(1, 1)
COUNTS = torch.tensor([3, 2], dtype=torch.int32)
LOGITS, POSITIONS = torch.randn(2, 4), torch.zeros(2, 4, dtype=torch.int32)
PLACE = torch.randn(2, 32)
INDEX = (torch.randn(2, 4, 32), PLACE.view(-1)[:8].view(2, 4), POOL[..., :32].contiguous(), TABLES, LENS)

CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "decode q": (lambda: decode(Q, POOL, out=Q), "out: got memory of q"),
    "decode cache": (lambda: decode(Q, POOL, out=POOL.view(-1)[:512].view(2, 1, 4, 64)), "out: got memory of kv_cache"),
    "decode slice of a pool": (
        lambda: decode(Q, POOL.view(2, 2, 16, 64)[:, 0], out=POOL.view(-1)[:512].view(2, 1, 4, 64)),
        "out: got memory of kv_cache",
    ),
    "decode lse": (
        lambda: decode(Q, POOL, return_lse=True, lse=Q.view(-1)[:8].view(2, 1, 4)),
        "lse: got memory of q",
    ),
    "prefill v": (lambda: prefill(ROWS, ROWS + 1, V := ROWS + 2, out=V), "out: got memory of v"),
    "prefill k": (lambda: prefill(ROWS, K := ROWS + 1, ROWS + 2, out=K), "out: got memory of k"),
    "prefill lse of out": (
        lambda: prefill(
            ROWS, ROWS, ROWS, return_lse=True, out=ONE[:1280].view(5, 4, 64), lse=ONE[1270:1290].view(5, 4)
        ),
        "lse: got memory of out",
    ),
    "prefill_kv kv": (
        lambda: prefill_kv(ROWS, KV := torch.randn(5, 4, 128), out=KV.view(-1)[:1280].view(5, 4, 64)),
        "out: got memory of kv",
    ),
    "sparse q": (lambda: sparse(ROWS, POOL, out=ROWS), "out: got memory of q"),
    "sparse cache": (
        lambda: sparse(ROWS, POOL, out=POOL.view(-1)[:1280].view(5, 4, 64)),
        "out: got memory of kv_cache",
    ),
    "product": (lambda: tsmla_bridge.block_scaled_matmul(X, WEIGHT, None, SCALES, out=X), "out: got memory of x"),
    "topk": (
        lambda: tsmla_bridge.select_topk(LOGITS, COUNTS, 2, block_tables=TABLES, page_size=2, counts=COUNTS),
        "counts: got memory of seq_lens",
    ),
    "topk slots": (
        lambda: tsmla_bridge.select_topk(LOGITS, COUNTS, 2, block_tables=TABLES, page_size=2, out=TABLES),
        "out: got memory of block_tables",
    ),
    "bits": (lambda: tsmla_bridge.selection_bits(POSITIONS, 100, out=POSITIONS), "out: got memory of positions"),
    "logits": (lambda: tsmla_bridge.indexer_logits(*INDEX, out=PLACE), "out: got memory of weights"),
    "indexer_topk": (
        lambda: tsmla_bridge.indexer_topk(*INDEX, k=2, return_slots=True, counts=LENS),
        "counts: got memory of seq_lens",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_shared_memory_is_refused_by_name(name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(ValueError, match=f"^{message}; legal: memory of its own"):
        call()


def test_neighbours_in_one_tensor_share_nothing() -> None:
    both = torch.randn(2, 5, 4, 64)
    expected = prefill(both[0].clone(), ROWS, ROWS)
    assert prefill(both[0], ROWS, ROWS, out=both[1]) is not None
    torch.testing.assert_close(both[1], expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["q", "kv_cache"])
def test_a_sparse_layout_is_refused_by_name(name: str) -> None:
    given = {"q": Q, "kv_cache": POOL}
    given[name] = given[name].to_sparse()
    with pytest.raises(TypeError, match=rf"^{name}: got a tensor of layout torch\.sparse_coo; legal: torch\.strided"):
        decode(given["q"], given["kv_cache"])


def test_indexer_operations_name_what_is_no_tensor() -> None:
    q, weights, cache = INDEX[:3]
    indices = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"^weights: got list; legal: a torch\.Tensor"):
        tsmla_bridge.indexer_selected_logits(q, [1.0], cache, indices)
    loss = {"q": torch.randn(2, 4, 64), "kv_cache": POOL, "lse": torch.randn(2, 4), "softmax_scale": 0.1}
    for name in ("q", "kv_cache", "lse", "sinks"):
        with pytest.raises(TypeError, match=rf"^{name}: got list; legal: a torch\.Tensor"):
            tsmla_bridge.indexer_loss(q, weights, cache, **{**loss, "indices": indices, name: [1.0]})


def test_compress_names_its_own_arguments() -> None:
    arguments = {
        "cache": torch.zeros(2, 16, 8), "kv_score": torch.zeros(3, 2, 8), "ape": torch.zeros(4, 8),
        "state": torch.zeros(2, 4, 2, 8), "state_positions": torch.zeros(2, 3, dtype=torch.int32),
        "norm_weight": torch.ones(8), "cos_sin": torch.ones(9, 4), "block_tables": TABLES,
        "state_slots": LENS * 0, "seq_lens": LENS, "cu_seqlens_q": OFFSETS, "ratio": 4, "overlap": False, "eps": 1e-6,
    }  # fmt: skip
    with pytest.raises(
        ValueError, match=r"^state_positions: got shape \[2, 3\]; axis 1 must be 4 \(ring, as in state\)"
    ):
        tsmla_bridge.compress_write_kv_cache(**arguments)
