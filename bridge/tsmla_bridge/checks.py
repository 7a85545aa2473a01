"""What only the data can show, checked under TSMLA_CHECK=1: that waits for the device. While a CUDA graph is captured
there are no values to check."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tsmla_bridge import devices
from tsmla_kernels.contract import values as data_checks


def values(check: Callable[..., None], spec: object, *tensors: torch.Tensor | None) -> None:
    """Call `check` (of tsmla_kernels.contract.values) on the tensors as numpy arrays, if TSMLA_CHECK asks for it."""
    if not data_checks.enabled():
        return
    given = [tensor for tensor in tensors if tensor is not None]
    if given and devices.kind(given[0].device) == "cuda" and devices.is_capturing():
        return
    check(spec, *(tensor.cpu().numpy() for tensor in given))
