"""Arguments of `sparse_mla` from what vLLM has: slots and counts from the positions that an indexer selected, and, for
kernels that don't read a query in two tensors, the query in one. One Triton kernel makes them on a GPU; torch's
operations do so on a CPU and without Triton."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from tsmla_bridge.engines.triton_kernels import may_signal, triton_kernel

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
    """slots [T, K] int32; counts [T] int32, how many of the K columns count; and joined [T, H, L + R], the query
    in one tensor, or None."""

    slots: torch.Tensor
    counts: torch.Tensor
    joined: torch.Tensor | None


def selected(positions: torch.Tensor, requests: torch.Tensor, pages: Pages, parts: Pair | None = None) -> Selected:
    """The slots and counts of positions [T, K] int32, and the two parts of a query, if given, in one tensor. `requests`
    [T] int32 says of which request a token's positions are.

    A negative position, and one past the table, gets the slot -1, which selects nothing. A token's count is the number
    of its columns up to the last one with another slot.
    """
    joined = None
    if parts is not None:
        latent, rope = parts
        joined = latent.new_empty(*latent.shape[:-1], latent.shape[-1] + rope.shape[-1])
    out = Selected(positions.new_empty(positions.shape), positions.new_empty(len(positions)), joined)
    if len(positions):
        make = _kernel() if positions.is_cuda else None
        (_make_by_torch if make is None else make)(positions, requests, pages, parts, out)
    return out


def _make_by_torch(
    positions: torch.Tensor, requests: torch.Tensor, pages: Pages, parts: Pair | None, out: Selected
) -> None:
    """Write what `selected` returns to `out`, by torch's operations: several kernels."""
    last = pages.table.shape[1] - 1
    page = positions.div(pages.page_size, rounding_mode="floor")
    valid = (page >= 0) & (page <= last)
    first = pages.table[requests.long()].gather(1, page.clamp(0, last).long()) * pages.step
    out.slots.copy_(torch.where(valid, first + positions % pages.page_size, -1))
    columns = torch.arange(1, positions.shape[1] + 1, dtype=torch.int32, device=positions.device)
    torch.amax(valid * columns, 1, out=out.counts)
    if parts is not None:
        torch.cat(parts, -1, out=out.joined)


@functools.cache
def _kernel() -> Any:
    """The kernel of `selected`; None without Triton."""
    found = triton_kernel("tsmla_bridge.engines.vllm.slots_kernel", "tsmla_slots")
    if found is None:
        return None
    triton, compiled = found

    def run(positions: torch.Tensor, requests: torch.Tensor, pages: Pages, parts: Pair | None, out: Selected) -> None:
        (tokens, columns), table = positions.shape, pages.table
        sizes = (0,) * 7
        if parts is not None:
            latent, rope = parts
            sizes = (*latent.stride()[:2], *rope.stride()[:2], *latent.shape[1:], rope.shape[2])
        *strides, heads, latent_dim, rope_dim = sizes
        compiled[tokens, 1 + triton.cdiv(heads, _HEADS)](
            positions, requests, table, *(parts or (None, None)), out.slots, out.counts, out.joined,
            positions.stride(0), table.stride(0), *strides, columns, table.shape[1], pages.step, heads,
            PAGE_SIZE=pages.page_size, COLUMNS=triton.next_power_of_2(columns), LATENT=latent_dim, ROPE=rope_dim,
            HEADS=_HEADS, JOINS=parts is not None, SIGNALS=may_signal(positions.device),
        )  # fmt: skip

    return run
