"""Facts about a device that engines ask the package tokenspeed_mla for."""

from __future__ import annotations

import functools

import torch


@functools.cache
def get_num_sm(device: torch.device) -> int:
    """The number of multiprocessors of a CUDA device, by which engines size the decode workspace; 1 for a CPU.

    Args:
      device: a CUDA device, or a CPU.
    """
    if torch.device(device).type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
