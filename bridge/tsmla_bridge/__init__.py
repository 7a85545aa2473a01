"""The PyTorch front end of the MLA kernels. Imports no jax, and torch only when something of it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tsmla_kernels import __version__

if TYPE_CHECKING:
    from tsmla_bridge.engines import tokenspeed_mla as tokenspeed_mla
    from tsmla_bridge.engines.install import install_as_tokenspeed_mla
    from tsmla_bridge.interop import jax_function, to_jax, to_torch
    from tsmla_bridge.ops.cache_ops import gather_kv_cache, write_kv_cache
    from tsmla_bridge.ops.merge import merge_attention_states
    from tsmla_bridge.ops.mla_decode import mla_decode
    from tsmla_bridge.ops.mla_prefill import mla_prefill
    from tsmla_bridge.runtime.workspace import Workspace, decode_workspace_size

_MODULES = {
    "Workspace": "runtime.workspace",
    "decode_workspace_size": "runtime.workspace",
    "gather_kv_cache": "ops.cache_ops",
    "install_as_tokenspeed_mla": "engines.install",
    "jax_function": "interop",
    "merge_attention_states": "ops.merge",
    "mla_decode": "ops.mla_decode",
    "mla_prefill": "ops.mla_prefill",
    "to_jax": "interop",
    "to_torch": "interop",
    "tokenspeed_mla": "engines.install",
    "write_kv_cache": "ops.cache_ops",
}

__all__ = [
    "Workspace",
    "__version__",
    "decode_workspace_size",
    "gather_kv_cache",
    "install_as_tokenspeed_mla",
    "jax_function",
    "merge_attention_states",
    "mla_decode",
    "mla_prefill",
    "to_jax",
    "to_torch",
    "write_kv_cache",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
