"""Triton kernels of the engines' helpers: whether Triton is there, and whether a kernel may signal the next one."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch

from tsmla_bridge.runtime.devices import capability


def triton_kernel(module: str, name: str) -> tuple[Any, Any] | None:
    """Triton and its kernel `name` of `module`; None without Triton, which torch for CUDA brings along."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("triton"), getattr(importlib.import_module(module), name)


def may_signal(device: torch.device) -> bool:
    """Whether a Triton kernel on this device may let the next kernel begin before it has ended: on Hopper and later,
    with a Triton that has the instruction."""
    return device.type == "cuda" and _has_signal() and capability(device.index)[0] >= 9


@functools.cache
def _has_signal() -> bool:
    language = importlib.import_module("triton.language")
    return hasattr(getattr(language.extra, "cuda", None), "gdc_launch_dependents")
