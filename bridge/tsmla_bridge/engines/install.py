"""The modules tokenspeed_mla and flash_mla under the names that engines import."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import torch

from tsmla_bridge import blackwell
from tsmla_bridge.engines import flash_mla, tokenspeed_mla
from tsmla_bridge.runtime import devices

_SUBMODULES = ("mla_decode", "mla_kv_pack_quantize_fp8", "mla_prefill", "utils")


def alias(name: str) -> None:
    """Make tokenspeed_mla and its submodules importable as `name`: the same modules, not second copies of them."""
    sys.modules[name] = tokenspeed_mla
    for submodule in _SUBMODULES:
        sys.modules[f"{name}.{submodule}"] = sys.modules[f"{tokenspeed_mla.__name__}.{submodule}"]


def install_as_tokenspeed_mla() -> ModuleType:
    """Make `import tokenspeed_mla` give tsmla_bridge.tokenspeed_mla in this process, and return the module it gives.

    Call it before the engine imports the package, in each process that runs the model. If the current device is a
    Blackwell GPU and the real package is installed, that package is returned and nothing is changed: its kernels are
    written for Blackwell.

    Otherwise raises RuntimeError if the real package was imported already: what others took from it would stay as it
    is.
    """
    name = blackwell.PACKAGE
    imported = sys.modules.get(name)
    if imported is tokenspeed_mla:
        return tokenspeed_mla
    on_blackwell = torch.cuda.is_available() and devices.is_blackwell(devices.current_device())
    if on_blackwell and (imported is not None or importlib.util.find_spec(name)):
        return importlib.import_module(name)
    if imported is not None:
        raise RuntimeError(f"{name} was imported already; call install_as_tokenspeed_mla() before the engine does")
    alias(name)
    return tokenspeed_mla


def install_as_flash_mla() -> ModuleType:
    """Make `import flash_mla` give tsmla_bridge.engines.flash_mla in this process, and return that module.

    Call it before the engine imports the package, in each process that runs the model.

    Raises RuntimeError if the real package was imported already: what others took from it would stay as it is.
    """
    imported = sys.modules.get("flash_mla")
    if imported is not None and imported is not flash_mla:
        raise RuntimeError("flash_mla was imported already; call install_as_flash_mla() before the engine does")
    sys.modules["flash_mla"] = flash_mla
    for submodule in ("flash_mla_interface", "fused_norm_rope_attn_rope_cast"):
        sys.modules[f"flash_mla.{submodule}"] = getattr(flash_mla, submodule)
    return flash_mla
