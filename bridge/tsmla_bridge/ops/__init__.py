"""The operations: each module imported here has public functions and the torch operators that torch.compile sees in
their place.

All are imported together: an exported program may call any of the operators."""

# ruff: noqa: F401  (importing a module registers its operators)

from tsmla_bridge.ops import (
    cache_ops,
    compress,
    indexer_logits,
    indexer_topk,
    indexer_training,
    merge,
    mla_decode,
    mla_prefill,
    mla_prefill_kv,
    packed_caches,
    products,
    select_topk,
    selection_bits,
    sparse_mla,
)
