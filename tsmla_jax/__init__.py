"""DeepSeek's multi-head latent attention (MLA) for JAX: paged decode and prefill, their caches, and a Flax layer.

`tsmla_jax.sparse` holds what surrounds the sparse attention of V3.2 and V4, `tsmla_jax.nn` the layers,
`tsmla_jax.generate` whole models. Importing tsmla_jax touches no device, compiles nothing and does not import jax: the
module behind a name is imported when the name is first used. jax must be installed.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from tsmla_kernels import __version__

if TYPE_CHECKING:
    from tsmla_jax import generate, nn, sparse
    from tsmla_jax.ops.block_scaled_matmul.api import block_scaled_matmul
    from tsmla_jax.ops.compress_kv.api import compress_kv
    from tsmla_jax.ops.compress_write_kv_cache.api import compress_write_kv_cache
    from tsmla_jax.ops.device import export_disabled_checks, register_custom_calls
    from tsmla_jax.ops.explain import explain
    from tsmla_jax.ops.gather_kv_cache.api import gather_kv_cache
    from tsmla_jax.ops.grouped_block_scaled_matmul.api import grouped_block_scaled_matmul
    from tsmla_jax.ops.indexer_logits.api import indexer_logits
    from tsmla_jax.ops.indexer_loss.api import indexer_loss
    from tsmla_jax.ops.indexer_selected_logits.api import indexer_selected_logits
    from tsmla_jax.ops.indexer_topk.api import indexer_topk
    from tsmla_jax.ops.merge_attention_states.api import merge_attention_states
    from tsmla_jax.ops.mla_decode.api import mla_decode
    from tsmla_jax.ops.mla_prefill.api import mla_prefill
    from tsmla_jax.ops.mla_prefill_kv.api import mla_prefill_kv
    from tsmla_jax.ops.operation import Preference
    from tsmla_jax.ops.paging import init_cache, slots
    from tsmla_jax.ops.quantize_blocks.api import quantize_blocks
    from tsmla_jax.ops.rope_write_kv_cache.api import rope_write_kv_cache
    from tsmla_jax.ops.select_topk.api import select_topk
    from tsmla_jax.ops.selection_bits.api import selection_bits
    from tsmla_jax.ops.sparse_mla.api import sparse_mla
    from tsmla_jax.ops.write_kv_cache.api import write_kv_cache

if importlib.util.find_spec("jax") is None:
    raise ImportError(
        'tsmla_jax needs jax: pip install "tsmla-jax[jax]", or "tsmla-jax[cuda13]" on a machine with an NVIDIA GPU;'
        " tsmla_bridge is the front end for PyTorch, without jax",
        name="jax",
    )

# The modules of the names that are not operations. Each operation is in ops/<name>/api.py.
_MODULES = {
    "Preference": "ops.operation",
    "explain": "ops.explain",
    "export_disabled_checks": "ops.device",
    "init_cache": "ops.paging",
    "register_custom_calls": "ops.device",
    "slots": "ops.paging",
}
_PACKAGES = ("generate", "nn", "sparse")

__all__ = [
    "Preference",
    "__version__",
    "block_scaled_matmul",
    "compress_kv",
    "compress_write_kv_cache",
    "explain",
    "export_disabled_checks",
    "gather_kv_cache",
    "generate",
    "grouped_block_scaled_matmul",
    "indexer_logits",
    "indexer_loss",
    "indexer_selected_logits",
    "indexer_topk",
    "init_cache",
    "merge_attention_states",
    "mla_decode",
    "mla_prefill",
    "mla_prefill_kv",
    "nn",
    "quantize_blocks",
    "register_custom_calls",
    "rope_write_kv_cache",
    "select_topk",
    "selection_bits",
    "slots",
    "sparse",
    "sparse_mla",
    "write_kv_cache",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES.get(name, f"ops.{name}.api")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
