"""Arguments of `sparse_mla` from what vLLM has: slots and counts from the positions that an indexer selected, and a
query's two parts in one tensor. One Triton kernel makes them on a GPU; torch's operations do so on a CPU and without
Triton."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, NamedTuple

import torch

Pair = tuple[torch.Tensor, torch.Tensor]

_HEADS = 16
"""Heads whose queries one program of the kernel joins."""


class Pages(NamedTuple):
    """Where the requests' tokens lie: table [B, M] int32, the pages of each request; page_size, the tokens of a page;
    step, the rows from one page to the next."""

    table: torch.Tensor
    page_size: int
    step: int


class Selected(NamedTuple):
    """slots [T, K] int32; counts [T] int32, how many of the K columns count; and q [T, H, L + R]."""

    slots: torch.Tensor
    counts: torch.Tensor
    q: torch.Tensor


def selected(positions: torch.Tensor, requests: torch.Tensor, pages: Pages, q: torch.Tensor | Pair) -> Selected:
    """The slots and counts of positions [T, K] int32, and q in one tensor. `requests` [T] int32 says of which request
    a token's positions are.

    A negative position, and one past the table, gets the slot -1, which selects nothing. A token's count is the number
    of its columns up to the last one with another slot.
    """
    if isinstance(q, tuple):
        latent, rope = q
        joined = latent.new_empty(*latent.shape[:-1], latent.shape[-1] + rope.shape[-1])
    else:
        joined = q
    out = Selected(positions.new_empty(positions.shape), positions.new_empty(len(positions)), joined)
    if len(positions):
        make = _kernel() if positions.is_cuda else None
        (_make_by_torch if make is None else make)(positions, requests, pages, q, out)
    return out


def _make_by_torch(
    positions: torch.Tensor, requests: torch.Tensor, pages: Pages, q: torch.Tensor | Pair, out: Selected
) -> None:
    """Write what `selected` returns to `out`, by torch's operations: several kernels."""
    last = pages.table.shape[1] - 1
    page = positions.div(pages.page_size, rounding_mode="floor")
    valid = (page >= 0) & (page <= last)
    first = pages.table[requests.long()].gather(1, page.clamp(0, last).long()) * pages.step
    out.slots.copy_(torch.where(valid, first + positions % pages.page_size, -1))
    columns = torch.arange(1, positions.shape[1] + 1, dtype=torch.int32, device=positions.device)
    torch.amax(valid * columns, 1, out=out.counts)
    if isinstance(q, tuple):
        torch.cat(q, -1, out=out.q)


@functools.cache
def _kernel() -> Any:
    """The kernel of `selected`; None without Triton, which torch for CUDA brings along."""
    if importlib.util.find_spec("triton") is None:
        return None
    triton, language = importlib.import_module("triton"), importlib.import_module("triton.language")
    can_signal = hasattr(getattr(language.extra, "cuda", None), "gdc_launch_dependents")
    compiled = importlib.import_module("tsmla_bridge.engines.vllm.slots_kernel").tsmla_slots

    def run(
        positions: torch.Tensor, requests: torch.Tensor, pages: Pages, q: torch.Tensor | Pair, out: Selected
    ) -> None:
        (tokens, columns), table = positions.shape, pages.table
        joins = isinstance(q, tuple)
        latent, rope = q if isinstance(q, tuple) else (q, q)
        heads = latent.shape[1]
        compiled[tokens, 1 + joins * triton.cdiv(heads, _HEADS)](
            positions, requests, table, latent, rope, out.slots, out.counts, out.q, positions.stride(0),
            table.stride(0), *latent.stride()[:2], *rope.stride()[:2], columns, table.shape[1], pages.step, heads,
            PAGE_SIZE=pages.page_size, COLUMNS=triton.next_power_of_2(columns), LATENT=latent.shape[2],
            ROPE=rope.shape[2], HEADS=_HEADS, JOINS=joins, SIGNALS=can_signal and positions.is_cuda,
        )  # fmt: skip

    return run
