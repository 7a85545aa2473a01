"""DeepSeek's multi-head latent attention (MLA) for JAX: paged decode and prefill, their caches, and a Flax layer.

Importing this touches no device, compiles nothing and imports neither flax, torch nor cutlass.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from tsmla_jax.ops.explain import explain
from tsmla_jax.ops.gather_kv_cache.api import gather_kv_cache
from tsmla_jax.ops.merge_attention_states.api import merge_attention_states
from tsmla_jax.ops.mla_decode.api import mla_decode
from tsmla_jax.ops.mla_prefill.api import mla_prefill
from tsmla_jax.ops.write_kv_cache.api import write_kv_cache

__all__ = [
    "explain",
    "gather_kv_cache",
    "merge_attention_states",
    "mla_decode",
    "mla_prefill",
    "nn",
    "write_kv_cache",
]


def __getattr__(name: str) -> ModuleType:
    if name == "nn":  # imports flax, so only on demand
        return importlib.import_module("tsmla_jax.nn")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
