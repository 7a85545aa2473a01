"""The kernels of the packed caches: their operands and their records."""

from __future__ import annotations

from tsmla_kernels.cache_ops.config import ARCHS
from tsmla_kernels.contract.layouts import INDEXER, V32_PACKED
from tsmla_kernels.kernel import ITEMSIZE, V32_MODEL, Kernel, Operand
from tsmla_kernels.options import (
    compress_write_spec,
    indexer_quantize_spec,
    indexer_write_spec,
    packed_write_spec,
)
from tsmla_kernels.sparse_cache import compress_config
from tsmla_kernels.sparse_cache import config as packed_config


def _angles(given: bool) -> tuple[Operand, ...]:
    """The operands cos and sin, [T, R / 2] or with wider rows, if `given`."""
    return (Operand("cos", "float32", (None, None)), Operand("sin", "float32", (None, None))) if given else ()


def packed_write_operands(config: packed_config.PackedWriteConfig) -> tuple[Operand, ...]:
    """The operands. Rows of latent, k_rope, cos and sin may be wider than their columns; only the first columns are
    read."""
    cache = (None, None, V32_PACKED.row_bytes)
    return (
        Operand("kv_cache", "uint8", cache, wide=True),
        Operand("latent", config.in_dtype, (None, None)),
        Operand("k_rope", config.in_dtype, (None, None)),
        Operand("slot_mapping", config.slot_dtype, (None,), align=ITEMSIZE[config.slot_dtype]),
        *_angles(config.rotates),
        Operand("new_kv_cache", "uint8", cache, True, wide=True, alias="kv_cache"),
    )


def indexer_write_operands(config: packed_config.IndexerWriteConfig) -> tuple[Operand, ...]:
    """The operands. Rows of k, cos and sin may be wider than their columns; only the first columns are read."""
    cache = (None, None, INDEXER.row_bytes)
    return (
        Operand("k_cache", "uint8", cache, wide=True),
        Operand("k", config.in_dtype, (None, None)),
        Operand("slot_mapping", config.slot_dtype, (None,), align=ITEMSIZE[config.slot_dtype]),
        *_angles(config.rope_dim > 0),
        Operand("new_k_cache", "uint8", cache, True, wide=True, alias="k_cache"),
    )


def indexer_quantize_operands(config: packed_config.IndexerQuantizeConfig) -> tuple[Operand, ...]:
    """The operands, for N = T * Hi rows of q and weights. Rows of q, cos and sin may be wider than their columns."""
    return (
        Operand("q", config.in_dtype, (None, None)),
        Operand("weights", config.weights_dtype, (None,), align=4),
        *_angles(config.rope_dim > 0),
        Operand("q8", "float8_e4m3fn", (None, INDEXER.head_dim), output=True),
        Operand("folded_weights", "float32", (None,), output=True, align=4),
    )


def compress_write_operands(config: compress_config.CompressWriteConfig) -> tuple[Operand, ...]:
    """The operands. A row of kv_score or of the state has W columns of kv, then W of scores."""
    row = 2 * config.width
    cache: tuple[int | None, ...] = (None, None, config.channels)
    dtype = config.cache
    if config.cache == "v4":
        cache, dtype = (None, None), "uint8"
    elif config.cache == "indexer":
        cache, dtype = (None, None, INDEXER.row_bytes), "uint8"
    return (
        Operand("cache", dtype, cache, wide=True),
        Operand("state", "float32", (None, None, row), wide=True),
        Operand("state_positions", "int32", (None, None), align=4),
        Operand("kv_score", "float32", (None, row), wide=True),
        Operand("ape", "float32", (config.ratio, config.width)),
        Operand("state_slots", "int32", (None,), align=4),
        Operand("seq_lens", "int32", (None,), align=4),
        Operand("cu_seqlens_q", "int32", (None,), align=4),
        Operand("norm_weight", config.weight_dtype, (config.channels,)),
        Operand("cos_sin", "float32", (None, config.rope_dim)),
        Operand("block_tables", "int32", (None, None), align=4),
        Operand("kv_scale", "float32", (1,), align=4),
        Operand("new_cache", dtype, cache, True, wide=True, alias="cache"),
        Operand("new_state", "float32", (None, None, row), True, wide=True, alias="state"),
        Operand("new_positions", "int32", (None, None), True, align=4, alias="state_positions"),
    )


WRITE_PACKED_KV_CACHE = Kernel(
    name="write_packed_kv_cache",
    archs=ARCHS,
    launcher="tsmla_kernels.sparse_cache.kernels:WritePackedKvCache",
    config=packed_config.PackedWriteConfig,
    operands=packed_write_operands,
    spec_from_options=packed_write_spec,
    reasons=packed_config.packed_write_reasons,
    config_for=packed_config.packed_write_config,
    presets=((V32_MODEL, ()),),
)

WRITE_INDEXER_CACHE = Kernel(
    name="write_indexer_cache",
    archs=ARCHS,
    launcher="tsmla_kernels.sparse_cache.kernels:WriteIndexerCache",
    config=packed_config.IndexerWriteConfig,
    operands=indexer_write_operands,
    spec_from_options=indexer_write_spec,
    reasons=packed_config.indexer_write_reasons,
    config_for=packed_config.indexer_write_config,
    presets=((V32_MODEL, (("key_dtype", "float32"),)),),
)

INDEXER_QUANTIZE = Kernel(
    name="indexer_quantize",
    archs=ARCHS,
    launcher="tsmla_kernels.sparse_cache.kernels:IndexerQuantize",
    config=packed_config.IndexerQuantizeConfig,
    operands=indexer_quantize_operands,
    spec_from_options=indexer_quantize_spec,
    reasons=packed_config.indexer_quantize_reasons,
    config_for=packed_config.indexer_quantize_config,
    presets=((V32_MODEL, (("index_n_heads", "64"),)),),
)

COMPRESS_WRITE_KV_CACHE = Kernel(
    name="compress_write_kv_cache",
    archs=ARCHS,
    launcher="tsmla_kernels.sparse_cache.compress:CompressWriteKvCache",
    config=compress_config.CompressWriteConfig,
    operands=compress_write_operands,
    spec_from_options=compress_write_spec,
    reasons=compress_config.compress_write_reasons,
    config_for=compress_config.compress_write_config,
    presets=(),
)
