"""The selections from two caches as one: the indices and lengths that `sparse_mla` takes. One Triton kernel makes them
on a GPU; torch's operations do so on a CPU and without Triton."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from tsmla_bridge.engines.triton_kernels import may_signal, triton_kernel

_BLOCK = 256
"""Columns that one program of the kernel writes."""


class Columns(NamedTuple):
    """Slots of a cache that each query token sees, [T, K] int32, and how many of the K columns count, int32: for each
    request [B] or, in what `joined` returns, for each token [T]; None for all K."""

    slots: torch.Tensor
    lengths: torch.Tensor | None


def joined(near: Columns, far: Columns, multiple: int) -> Columns:
    """The columns of `near`, followed by the columns of `far` and by -1 up to a multiple of `multiple` columns. The
    result has a length for each token if `far` has lengths. Columns of `near` past its lengths become -1."""
    tokens, window = near.slots.shape
    count = far.slots.shape[1]
    width = -(-(window + count) // multiple) * multiple
    out = near.slots.new_empty(tokens, width)
    lengths = None if far.lengths is None else near.slots.new_empty(tokens)
    if tokens:
        join = _kernel() if near.slots.is_cuda else None
        (_join_by_torch if join is None else join)(near, far, out, lengths)
    return Columns(out, lengths)


def per_token(lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    """Lengths of each request [B] as lengths of each token [T]; the same tensor if every request has one token."""
    each = tokens // max(1, len(lengths))
    return lengths if each <= 1 else lengths.repeat_interleave(each)


def _join_by_torch(near: Columns, far: Columns, out: torch.Tensor, lengths: torch.Tensor | None) -> None:
    """Write what `joined` returns to `out` and `lengths`, by torch's operations: several kernels."""
    (tokens, window), count = near.slots.shape, far.slots.shape[1]
    out[:, :window] = near.slots
    if near.lengths is not None:
        columns = torch.arange(window, device=out.device, dtype=torch.int32)
        out[:, :window].masked_fill_(columns >= per_token(near.lengths, tokens)[:, None], -1)
    out[:, window : window + count] = far.slots
    out[:, window + count :] = -1
    if lengths is not None and far.lengths is not None:
        torch.add(per_token(far.lengths, tokens), window, out=lengths)


@functools.cache
def _kernel() -> Any:
    """The kernel of `joined`; None without Triton."""
    found = triton_kernel("tsmla_bridge.engines.flash_mla.joining_kernel", "join")
    if found is None:
        return None
    triton, compiled = found

    def run(near: Columns, far: Columns, out: torch.Tensor, lengths: torch.Tensor | None) -> None:
        (tokens, window), count, width = near.slots.shape, far.slots.shape[1], out.shape[1]
        requests = {len(each) for each in (near.lengths, far.lengths) if each is not None}
        compiled[tokens, triton.cdiv(width, _BLOCK)](
            near.slots, near.lengths, far.slots, far.lengths, out, lengths,
            near.slots.stride(0), far.slots.stride(0), tokens // (requests.pop() if requests else tokens),
            window, count, width, HAS_NEAR=near.lengths is not None, HAS_FAR=lengths is not None, BLOCK=_BLOCK,
            SIGNALS=may_signal(near.slots.device),
        )  # fmt: skip

    return run
