"""Checks of what only the data can show, under TSMLA_CHECK=1: reading the data waits for the device. While a CUDA graph
is captured there are no values to check."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tsmla_bridge.runtime import devices
from tsmla_kernels.contract import values


def check(checker: Callable[..., None], spec: object, *tensors: torch.Tensor | None) -> None:
    """Call `checker`, which takes arguments as a function of tsmla_kernels.contract.values does, on the tensors' values
    if TSMLA_CHECK asks and no CUDA graph is captured."""
    if not values.enabled():
        return
    given = [tensor for tensor in tensors if tensor is not None]  # the checkers take None for those that a call lacks
    if given and devices.kind(given[0].device) == "cuda" and devices.is_capturing():
        return
    checker(spec, *(None if tensor is None else tensor.cpu().numpy() for tensor in tensors))
