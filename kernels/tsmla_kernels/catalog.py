"""The lists of kernels and of what launches several. Each record is in the record.py of its folder. Imports no cutlass,
jax or torch."""

from tsmla_kernels.cache_ops.record import GATHER_KV_CACHE, ROPE_WRITE_KV_CACHE, WRITE_KV_CACHE
from tsmla_kernels.merge.record import MERGE_ATTENTION_STATES
from tsmla_kernels.selection.record import SELECTION_BITS
from tsmla_kernels.sm90.decode.record import MLA_DECODE
from tsmla_kernels.sm90.few_tokens.record import (
    FEW_TOKEN_CHOOSE_UP,
    FEW_TOKEN_EXPERTS_DOWN,
    FEW_TOKEN_EXPERTS_UP,
    FEW_TOKEN_INDEX_KEY,
    FEW_TOKEN_INPUTS,
    FEW_TOKEN_MATMUL,
    FEW_TOKEN_OUTPUTS,
    FEW_TOKEN_QUERIES,
    FEW_TOKEN_READ_STREAMS,
    FEW_TOKEN_ROUTER,
    FEW_TOKEN_VALUES,
    FEW_TOKEN_WINDOW,
    FEW_TOKEN_WRITE_STREAMS,
)
from tsmla_kernels.sm90.logits.record import INDEXER_LOGITS
from tsmla_kernels.sm90.prefill.record import MLA_PREFILL, MLA_PREFILL_BACKWARD
from tsmla_kernels.sm90.products.record import BLOCK_SCALED_MATMUL, GROUPED_BLOCK_SCALED_MATMUL, QUANTIZE_BLOCKS
from tsmla_kernels.sm90.sparse.record import SPARSE_MLA, SPARSE_MLA_UNION
from tsmla_kernels.sm90.sparse_backward.record import SPARSE_MLA_BACKWARD
from tsmla_kernels.sm100.record import (
    INDEXER_LOGITS_SM100,
    MLA_DECODE_SM100,
    MLA_PREFILL_SM100,
    SPARSE_MLA_SM100,
)
from tsmla_kernels.sparse_cache.record import (
    COMPRESS_WRITE_KV_CACHE,
    INDEXER_QUANTIZE,
    WRITE_INDEXER_CACHE,
    WRITE_PACKED_KV_CACHE,
)
from tsmla_kernels.topk.record import INDEXER_TOPK, SELECT_TOPK

KERNELS = {
    kernel.name: kernel
    for kernel in (
        MLA_DECODE,
        MLA_PREFILL,
        MLA_PREFILL_BACKWARD,
        MLA_DECODE_SM100,
        MLA_PREFILL_SM100,
        INDEXER_LOGITS_SM100,
        SPARSE_MLA_SM100,
        WRITE_KV_CACHE,
        ROPE_WRITE_KV_CACHE,
        GATHER_KV_CACHE,
        MERGE_ATTENTION_STATES,
        INDEXER_LOGITS,
        SELECT_TOPK,
        SELECTION_BITS,
        SPARSE_MLA,
        SPARSE_MLA_UNION,
        SPARSE_MLA_BACKWARD,
        WRITE_PACKED_KV_CACHE,
        WRITE_INDEXER_CACHE,
        INDEXER_QUANTIZE,
        COMPRESS_WRITE_KV_CACHE,
        BLOCK_SCALED_MATMUL,
        GROUPED_BLOCK_SCALED_MATMUL,
        QUANTIZE_BLOCKS,
        FEW_TOKEN_INDEX_KEY,
        FEW_TOKEN_MATMUL,
        FEW_TOKEN_QUERIES,
        FEW_TOKEN_ROUTER,
        FEW_TOKEN_EXPERTS_UP,
        FEW_TOKEN_CHOOSE_UP,
        FEW_TOKEN_EXPERTS_DOWN,
        FEW_TOKEN_WINDOW,
        FEW_TOKEN_WRITE_STREAMS,
        FEW_TOKEN_READ_STREAMS,
        FEW_TOKEN_INPUTS,
        FEW_TOKEN_OUTPUTS,
        FEW_TOKEN_VALUES,
    )
}

CHAINS = {INDEXER_TOPK.name: INDEXER_TOPK}
