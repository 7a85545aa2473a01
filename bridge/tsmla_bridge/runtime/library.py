"""torch as the library for the rules on arrays that both front ends share (tsmla_kernels.arrays)."""

from __future__ import annotations

import functools

import torch

from tsmla_kernels.arrays import Library


def library_of(device: torch.device) -> Library:
    """The library for tensors on this device."""
    return Library(torch, functools.partial(torch.arange, dtype=torch.int32, device=device), _take)


def _take(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    if tensor.element_size() > 1:
        return tensor[indices]
    return tensor.view(torch.uint8)[indices].view(tensor.dtype)  # not every release of torch indexes float8
