"""The real package tokenspeed_mla on Blackwell, where tsmla_bridge's module of that name hands its calls over to it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import torch

from tsmla_bridge.runtime import devices
from tsmla_kernels import contract

PACKAGE = "tokenspeed_mla"


def package() -> ModuleType | None:
    """The real package tokenspeed_mla; None if it isn't installed, or its name belongs to tsmla_bridge's module."""
    imported = sys.modules.get(PACKAGE)
    if imported is not None:
        return None if imported.__name__.startswith("tsmla_bridge") else imported
    return importlib.import_module(PACKAGE) if importlib.util.find_spec(PACKAGE) else None


def is_device(device: torch.device) -> bool:
    """Whether this is a GPU that the package tokenspeed_mla is written for."""
    return devices.kind(device) == "cuda" and devices.is_blackwell(devices.index_of(device))


def runs(op: str, tensor: torch.Tensor) -> bool:
    """Whether the package tokenspeed_mla runs a call on this tensor: it does on GPUs of compute capability 10.x.

    NotImplementedError if the package can't be called."""
    if not is_device(tensor.device):
        return False
    if reasons := why_not():
        raise contract.not_runnable(op, "cute", reasons)
    return True


def why_not() -> list[str]:
    """Why the package tokenspeed_mla can't be called; empty if it can."""
    if package() is not None:
        return []
    if PACKAGE in sys.modules:
        return [f"{PACKAGE} was replaced by tsmla_bridge's module, which has no kernel for Blackwell"]
    return ["on Blackwell the package tokenspeed-mla runs the call, and it isn't installed"]
