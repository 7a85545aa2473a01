"""The PyTorch front end of the MLA kernels. Importing it imports neither torch nor jax: torch comes with the first use
of a name other than `__version__`, jax only with `to_jax`, `to_torch` and `jax_function`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tsmla_kernels import __version__

if TYPE_CHECKING:
    from tsmla_bridge.engines import tokenspeed_mla as tokenspeed_mla
    from tsmla_bridge.engines.install import install_as_flash_mla, install_as_tokenspeed_mla
    from tsmla_bridge.interop import jax_function, to_jax, to_torch
    from tsmla_bridge.ops.cache_ops import gather_kv_cache, write_kv_cache
    from tsmla_bridge.ops.compress import compress_write_kv_cache
    from tsmla_bridge.ops.indexer_logits import indexer_logits
    from tsmla_bridge.ops.indexer_topk import indexer_topk
    from tsmla_bridge.ops.indexer_training import indexer_loss, indexer_selected_logits
    from tsmla_bridge.ops.merge import merge_attention_states
    from tsmla_bridge.ops.mla_decode import mla_decode
    from tsmla_bridge.ops.mla_prefill import mla_prefill
    from tsmla_bridge.ops.mla_prefill_kv import mla_prefill_kv
    from tsmla_bridge.ops.packed_caches import indexer_quantize, write_indexer_cache, write_packed_kv_cache
    from tsmla_bridge.ops.products import block_scaled_matmul, grouped_block_scaled_matmul, quantize_blocks
    from tsmla_bridge.ops.select_topk import select_topk
    from tsmla_bridge.ops.selection_bits import selection_bits
    from tsmla_bridge.ops.sparse_mla import sparse_mla
    from tsmla_bridge.runtime.paging import init_cache, slots
    from tsmla_bridge.runtime.workspace import (
        Workspace,
        decode_workspace_size,
        indexer_topk_workspace_size,
        sparse_workspace_size,
    )

_MODULES = {
    "Workspace": "runtime.workspace",
    "block_scaled_matmul": "ops.products",
    "compress_write_kv_cache": "ops.compress",
    "decode_workspace_size": "runtime.workspace",
    "gather_kv_cache": "ops.cache_ops",
    "grouped_block_scaled_matmul": "ops.products",
    "indexer_quantize": "ops.packed_caches",
    "indexer_logits": "ops.indexer_logits",
    "indexer_loss": "ops.indexer_training",
    "indexer_selected_logits": "ops.indexer_training",
    "indexer_topk": "ops.indexer_topk",
    "indexer_topk_workspace_size": "runtime.workspace",
    "init_cache": "runtime.paging",
    "install_as_flash_mla": "engines.install",
    "install_as_tokenspeed_mla": "engines.install",
    "jax_function": "interop",
    "merge_attention_states": "ops.merge",
    "mla_decode": "ops.mla_decode",
    "mla_prefill": "ops.mla_prefill",
    "mla_prefill_kv": "ops.mla_prefill_kv",
    "quantize_blocks": "ops.products",
    "select_topk": "ops.select_topk",
    "selection_bits": "ops.selection_bits",
    "slots": "runtime.paging",
    "sparse_mla": "ops.sparse_mla",
    "sparse_workspace_size": "runtime.workspace",
    "to_jax": "interop",
    "to_torch": "interop",
    "tokenspeed_mla": "engines.install",
    "write_indexer_cache": "ops.packed_caches",
    "write_kv_cache": "ops.cache_ops",
    "write_packed_kv_cache": "ops.packed_caches",
}

__all__ = [
    "Workspace",
    "__version__",
    "block_scaled_matmul",
    "compress_write_kv_cache",
    "decode_workspace_size",
    "gather_kv_cache",
    "grouped_block_scaled_matmul",
    "indexer_logits",
    "indexer_loss",
    "indexer_quantize",
    "indexer_selected_logits",
    "indexer_topk",
    "indexer_topk_workspace_size",
    "init_cache",
    "install_as_flash_mla",
    "install_as_tokenspeed_mla",
    "jax_function",
    "merge_attention_states",
    "mla_decode",
    "mla_prefill",
    "mla_prefill_kv",
    "quantize_blocks",
    "select_topk",
    "selection_bits",
    "slots",
    "sparse_mla",
    "sparse_workspace_size",
    "to_jax",
    "to_torch",
    "write_indexer_cache",
    "write_kv_cache",
    "write_packed_kv_cache",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError('tsmla_bridge needs torch: pip install "tsmla-jax[torch]"', name="torch") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
