"""DeepSeek's multi-head latent attention (MLA) for JAX: paged decode and prefill, their caches, and a Flax layer.

Importing this touches no device, compiles nothing and imports neither flax, torch nor cutlass.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tsmla_jax.ops.compress_kv.api import (
    CompressedEntries,
    CompressorState,
    compress_kv,
    init_compressor_state,
)
from tsmla_jax.ops.explain import explain
from tsmla_jax.ops.gather_kv_cache.api import gather_kv_cache
from tsmla_jax.ops.indexer_logits.api import indexer_logits
from tsmla_jax.ops.merge_attention_states.api import merge_attention_states
from tsmla_jax.ops.mla_decode.api import mla_decode
from tsmla_jax.ops.mla_prefill.api import mla_prefill
from tsmla_jax.ops.mla_prefill.packed import mla_prefill_kv
from tsmla_jax.ops.rope_write_kv_cache.api import rope_write_kv_cache
from tsmla_jax.ops.select_topk.api import select_topk
from tsmla_jax.ops.sparse_mla.api import sparse_mla
from tsmla_jax.ops.write_kv_cache.api import write_kv_cache
from tsmla_jax.sparse.indexer import indexer_quantize, write_indexer_cache
from tsmla_jax.sparse.layouts import (
    pack_v4_rows,
    pack_v32_rows,
    unpack_v4_rows,
    unpack_v32_rows,
    write_packed_kv_cache,
    write_v4_cache,
)
from tsmla_jax.sparse.metadata import (
    expand_decode_metadata,
    localize_context_lens,
    positions_to_slots,
    remap_slots,
)
from tsmla_jax.sparse.v4 import (
    MixedIndices,
    apply_rope,
    build_mixed_sparse_indices,
    compressed_slots,
    init_v4_cache,
    norm_rope,
    resolve_cache_dtype,
    rope_table,
    window_slots,
)
from tsmla_kernels import __version__

if TYPE_CHECKING:
    from tsmla_jax.ops.cute_call import export_disabled_checks, register_custom_calls

__all__ = [
    "CompressedEntries",
    "CompressorState",
    "MixedIndices",
    "__version__",
    "apply_rope",
    "build_mixed_sparse_indices",
    "compress_kv",
    "compressed_slots",
    "expand_decode_metadata",
    "explain",
    "export_disabled_checks",
    "gather_kv_cache",
    "indexer_logits",
    "indexer_quantize",
    "init_compressor_state",
    "init_v4_cache",
    "localize_context_lens",
    "merge_attention_states",
    "mla_decode",
    "mla_prefill",
    "mla_prefill_kv",
    "nn",
    "norm_rope",
    "pack_v4_rows",
    "pack_v32_rows",
    "positions_to_slots",
    "register_custom_calls",
    "remap_slots",
    "resolve_cache_dtype",
    "rope_table",
    "rope_write_kv_cache",
    "select_topk",
    "sparse_mla",
    "unpack_v4_rows",
    "unpack_v32_rows",
    "window_slots",
    "write_indexer_cache",
    "write_kv_cache",
    "write_packed_kv_cache",
    "write_v4_cache",
]


def __getattr__(name: str) -> Any:
    if name == "nn":  # imports flax, so only on demand
        return importlib.import_module("tsmla_jax.nn")
    if name in ("export_disabled_checks", "register_custom_calls"):  # what launches kernels isn't needed without them
        return getattr(importlib.import_module("tsmla_jax.ops.cute_call"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
