"""Functions around the sparse attention of DeepSeek-V3.2 and V4: packed caches, slots, index rows, norm and rope.

Scores, the choice of keys, compression and attention (indexer_logits, select_topk, compress_kv, sparse_mla) are in
`tsmla_jax` itself.
"""

from tsmla_jax.ops.indexer_quantize.api import indexer_quantize
from tsmla_jax.ops.selected.compressor import CompressedEntries, CompressorState, init_compressor_state
from tsmla_jax.ops.selected.layouts import (
    pack_v4_rows,
    pack_v32_rows,
    unpack_v4_rows,
    unpack_v32_rows,
    write_v4_cache,
)
from tsmla_jax.ops.selected.metadata import (
    DecodeMetadata,
    expand_decode_metadata,
    expand_pools,
    localize_context_lens,
    positions_to_slots,
    remap_slots,
)
from tsmla_jax.ops.selected.v4 import (
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
from tsmla_jax.ops.write_indexer_cache.api import write_indexer_cache
from tsmla_jax.ops.write_packed_kv_cache.api import write_packed_kv_cache

__all__ = [
    "CompressedEntries",
    "CompressorState",
    "DecodeMetadata",
    "MixedIndices",
    "apply_rope",
    "build_mixed_sparse_indices",
    "compressed_slots",
    "expand_decode_metadata",
    "expand_pools",
    "indexer_quantize",
    "init_compressor_state",
    "init_v4_cache",
    "localize_context_lens",
    "norm_rope",
    "pack_v4_rows",
    "pack_v32_rows",
    "positions_to_slots",
    "remap_slots",
    "resolve_cache_dtype",
    "rope_table",
    "unpack_v4_rows",
    "unpack_v32_rows",
    "window_slots",
    "write_indexer_cache",
    "write_packed_kv_cache",
    "write_v4_cache",
]


def __dir__() -> list[str]:
    return sorted(__all__)
