"""Registering tsmla_bridge.tokenspeed_mla under the name of the package that engines import."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import torch

from tsmla_bridge import blackwell, devices

_SUBMODULES = ("mla_decode", "mla_kv_pack_quantize_fp8", "mla_prefill", "utils")


def install_as_tokenspeed_mla() -> ModuleType:
    """Make `import tokenspeed_mla` find tsmla_bridge.tokenspeed_mla in this process, and return what it finds.

    Call it before the engine imports the package, in each process that runs the model. On a machine with Blackwell GPUs
    where the real package is installed, that one is returned and nothing is changed: its kernels are written for them.

    Raises RuntimeError if the real package was imported already: what others took from it would stay as it is.
    """
    name = blackwell.PACKAGE
    ours = importlib.import_module("tsmla_bridge.tokenspeed_mla")
    there = sys.modules.get(name)
    if there is ours:
        return ours
    on_blackwell = torch.cuda.is_available() and devices.is_blackwell(devices.current_device())
    if on_blackwell and (there is not None or importlib.util.find_spec(name)):
        return importlib.import_module(name)
    if there is not None:
        raise RuntimeError(f"{name} was imported already; call install_as_tokenspeed_mla() before the engine does")
    sys.modules[name] = ours
    for submodule in _SUBMODULES:
        sys.modules[f"{name}.{submodule}"] = importlib.import_module(f"{ours.__name__}.{submodule}")
    return ours
