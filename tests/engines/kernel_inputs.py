"""What the kernels demand of the tensors of a call, asked of the calls that an engine's code makes on a CPU.

There the operations are torch's, which read a tensor of any strides at any address. On a GPU such a call raises, or
copies. `demand` makes the operations refuse it here too.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from tsmla_bridge.ops import mla_decode, mla_prefill, sparse_mla
from tsmla_bridge.runtime import tensors

ROW_ALIGN, INDEX_ALIGN = 16, 4  # bytes: of what TMA reads, and of int32


def _dense(**given: torch.Tensor | None) -> None:
    for name, tensor in given.items():
        if tensor is not None:
            tensors.check_dense(name, tensor)
            _aligned(name, tensor)


def _aligned(name: str, tensor: torch.Tensor) -> None:
    align = INDEX_ALIGN if tensor.dtype == torch.int32 else ROW_ALIGN
    assert tensor.data_ptr() % align == 0, f"{name}: got address {tensor.data_ptr():#x}; the kernel aligns to {align}"


def _query(q: Any, given: dict[str, Any]) -> None:
    if isinstance(q, tuple):
        for part in q:
            _aligned("q", part)
        tensors.query_of_pair(q, given["latent_dim"])
    else:
        _dense(q=q)


def _decode(q: Any, kv_cache: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, **given: Any) -> None:
    _query(q, given)
    _dense(seq_lens=seq_lens, cu_seqlens_q=given.get("cu_seqlens_q"), visible_lens=given.get("visible_lens"))
    _aligned("kv_cache", kv_cache)
    step = tensors.page_step(tensors.without_head_axis(kv_cache))
    if step == 1 and tensors.table_width(block_tables) != block_tables.shape[1] and given.get("batch_invariant"):
        _dense(block_tables=block_tables)


def _prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> None:
    _dense(q=q, k=k, cu_seqlens_q=given["cu_seqlens_q"], cu_seqlens_kv=given["cu_seqlens_kv"], out=given.get("out"))
    _aligned("v", v)
    if not v.is_contiguous():
        tensors.wide_shape("v", v)


def _sparse(q: Any, kv_cache: torch.Tensor, indices: torch.Tensor, lengths: Any = None, **given: Any) -> None:
    _query(q, given)
    _dense(indices=indices, lengths=lengths, sinks=given.get("sinks"))
    _aligned("kv_cache", kv_cache)
    if kv_cache.dim() == 3:  # V4's pages are bytes [P, bytes]
        tensors.page_step(kv_cache)


def demand() -> None:
    """Make the three operations of attention, as the plug-ins call them, check their arguments so."""
    checks: tuple[tuple[ModuleType, str, Callable[..., None]], ...] = (
        (mla_decode, "mla_decode", _decode), (mla_prefill, "mla_prefill", _prefill), (sparse_mla, "sparse_mla", _sparse)
    )  # fmt: skip
    for module, name, check in checks:
        setattr(module, name, _checked(getattr(module, name), check))


def _checked(operation: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        check(*arguments, **options)
        return operation(*arguments, **options)

    return call
