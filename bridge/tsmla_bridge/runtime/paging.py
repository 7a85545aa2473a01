"""Helpers for a paged cache of torch tensors: a new cache, and the slots of positions in it."""

from __future__ import annotations

import torch

from tsmla_bridge.runtime.tensors import describe, named_dtype, same_device
from tsmla_kernels.contract import paging


def init_cache(
    num_pages: int,
    *,
    page_size: int = 64,
    head_dim: int = 576,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | int | None = None,
) -> torch.Tensor:
    """A paged latent cache of zeros, [num_pages, page_size, head_dim].

    Args:
      num_pages: P, the pages that all requests share.
      page_size: Z, tokens a page.
      head_dim: D, the sum of the latent's and the rope's widths: 512 + 64 in DeepSeek-V2, V3 and Kimi-K2.
      dtype: float16, bfloat16, float8_e4m3fn, float32 or float64.
      device: the cache's device; None is torch's default device.

    Raises:
      TypeError, ValueError: an argument other than device is not legal; the message names it, what it got and what is
        legal. For device torch raises its own errors.
    """
    shape = paging.check_new_cache(num_pages, page_size, head_dim, named_dtype("dtype", dtype))
    return torch.zeros(shape, dtype=dtype, device=device)


def slots(
    block_tables: torch.Tensor,
    positions: torch.Tensor,
    page_size: int,
    *,
    requests: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cache slots of token positions, as write_kv_cache takes them: table[position // Z] * Z + position % Z. No value
    is read on the host, so a CUDA graph can capture it.

    Args:
      block_tables: [B, M] int32 or int64, the pages of each request in order.
      positions: [B] or [B, S] int32 or int64, positions of each request's tokens, from 0; or [T] with requests.
      page_size: Z.
      requests: [T] int32 or int64, the request of each token; -1 for padding. None: row b of positions is request b's.

    Returns:
      int32 in positions' shape; -1, which writers skip, where there is no such request, a position is negative or past
      the request's table, or its page is negative or too large for slots of int32.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
    """
    asked = None if requests is None else describe("requests", requests)
    tables, at = describe("block_tables", block_tables), describe("positions", positions)
    size = paging.check_slots(tables, at, asked, page_size)
    same_device("block_tables", block_tables, {"positions": positions, "requests": requests})
    num_requests, max_pages = block_tables.shape
    if 0 in (num_requests, max_pages):
        return torch.full_like(positions, -1, dtype=torch.int32)
    rows = requests
    if rows is None:
        rows = torch.arange(num_requests, device=positions.device).view(-1, *[1] * (positions.ndim - 1))
    column = positions // size  # compared with max_pages: max_pages * size need not be an int32
    page = block_tables[rows.clamp(0, num_requests - 1).long(), column.clamp(0, max_pages - 1).long()]
    inside = (rows >= 0) & (rows < num_requests) & (column >= 0) & (column < max_pages) & paging.has_slots(page, size)
    return torch.where(inside, page * size + positions % size, -1).to(torch.int32)
