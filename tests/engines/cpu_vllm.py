"""Makes vllm, unpacked from a wheel that was built for CUDA, run on a machine without a GPU. To be imported first."""

from __future__ import annotations

from typing import Any

import torch

_empty, _zeros, _tensor = torch.empty, torch.zeros, torch.tensor


def _unpinned(make: Any) -> Any:
    """The function that makes tensors, without pinned memory, which only CUDA has."""
    return lambda *sizes, pin_memory=False, **options: make(*sizes, **options)


torch.empty, torch.zeros, torch.tensor = _unpinned(_empty), _unpinned(_zeros), _unpinned(_tensor)

import vllm.platforms  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

vllm.platforms._current_platform = CpuPlatform()

import vllm.utils.torch_utils  # noqa: E402

vllm.utils.torch_utils.PIN_MEMORY = False

import vllm.model_executor.layers.attention.mla_attention as mla_attention  # noqa: E402

mla_attention.PIN_MEMORY = False


class _ElsewhereThanCpu(CpuPlatform):
    """So that the layer reads its cache by the operation that GPUs use, which takes fp8 too."""

    def is_cpu(self) -> bool:
        return False


mla_attention.current_platform = _ElsewhereThanCpu()
