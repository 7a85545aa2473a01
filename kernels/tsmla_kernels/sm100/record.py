"""The kernels for Blackwell, of packages by other authors: their operands and their records."""

from __future__ import annotations

from tsmla_kernels.contract import attention_out_dtype
from tsmla_kernels.kernel import Kernel, Operand
from tsmla_kernels.options import decode_spec, indexer_logits_spec, prefill_spec, sparse_mla_spec
from tsmla_kernels.sm100 import config as sm100
from tsmla_kernels.sm100 import logits_config, sparse_config
from tsmla_kernels.sm100.packages import CUDNN, FLASHINFER, TOKENSPEED


def sm100_decode_operands(config: sm100.DecodeConfig) -> tuple[Operand, ...]:
    """The operands of decode. S and H are dynamic sizes, although `config` has them, because the package's host code
    computes with them at the launch."""
    head_dim = sm100.LATENT_DIM + sm100.ROPE_DIM
    return (
        Operand("q", config.dtype, (None, None, None, head_dim), wide=True),
        Operand("kv_cache", config.dtype, (None, config.page_size, head_dim), wide=True),
        Operand("block_tables", "int32", (None, None), align=4),
        Operand("seq_lens", "int32", (None,), align=4),
        Operand("visible_lens", "int32", (None, None), align=4),
        *_sm100_outputs(
            config.traced_scales,
            Operand("out", attention_out_dtype(config.dtype), (None, None, None, sm100.LATENT_DIM), output=True),
            Operand("lse", "float32", (None, None, None), output=True, align=4),
            Operand("workspace", "int8", (None, None), output=True, align=32),
        ),
    )


def sm100_prefill_operands(config: sm100.PrefillConfig) -> tuple[Operand, ...]:
    """The operands of prefill. The tokens of all requests are packed, as in mla_prefill."""
    return (
        Operand("q", config.dtype, (None, None, sm100.QK_HEAD_DIM)),
        Operand("k", config.dtype, (None, None, sm100.QK_HEAD_DIM)),
        Operand("v", config.dtype, (None, None, sm100.V_HEAD_DIM)),
        Operand("cu_seqlens_q", "int32", (None,), align=4),
        Operand("cu_seqlens_kv", "int32", (None,), align=4),
        *_sm100_outputs(
            config.traced_scales,
            Operand("out", attention_out_dtype(config.dtype), (None, None, sm100.V_HEAD_DIM), output=True),
            Operand("lse", "float32", (None, None), output=True, align=4),
            Operand("longest_q", "int8", (None,), output=True, align=1),
        ),
    )


def _sm100_outputs(traced_scales: bool, *outputs: Operand) -> tuple[Operand, ...]:
    """The outputs with the scales: one array before the outputs if traced_scales, else SCALE_OPERANDS behind them."""
    if traced_scales:
        return (Operand("scales", "float32", (2,), align=4), *outputs)
    return (*outputs, *(Operand(name, "int8", (None,), output=True, align=1) for name in sm100.SCALE_OPERANDS))


def sm100_logits_operands(config: logits_config.LogitsConfig) -> tuple[Operand, ...]:
    """The operands of the indexer's logits, for T query tokens that have a row of the block table each."""
    width = logits_config.HEAD_DIM
    return (
        Operand("q", "float8_e4m3fn", (None, config.num_heads, width)),
        Operand("weights", "float32", (None, config.num_heads)),
        Operand("k_cache", "uint8", (None, config.page_size, logits_config.ROW_BYTES), wide=True),
        Operand("block_tables", "int32", (None, None), align=4),
        Operand("seq_lens", "int32", (None,), align=4),
        Operand("schedule", "int32", (config.num_ctas + 1, 2)),
        Operand("logits", "float32", (None, None), output=True),
    )


def sm100_sparse_operands(config: sparse_config.SparseConfig) -> tuple[Operand, ...]:
    """The operands of attention over selected rows, for rows of 64 query heads."""
    heads, latent_dim = sparse_config.HEADS, sparse_config.LATENT_DIM
    return (
        Operand("q", config.dtype, (None, heads, config.head_dim), wide=True),
        Operand("rows", config.dtype, (None, config.head_dim), wide=True),
        Operand("indices", "int32", (None, None), wide=True, align=32),
        Operand("lengths", "int32", (None,), align=4),
        *_sm100_outputs(
            False,
            Operand("out", config.dtype, (None, heads, latent_dim), output=True, wide=True),
            Operand("max_logits", "float32", (None, heads), output=True, align=4),
            Operand("lse", "float32", (None, heads), output=True, align=4),
        ),
    )


MLA_DECODE_SM100 = Kernel(
    name="mla_decode_sm100",
    archs=sm100.ARCHS,
    launcher="tsmla_kernels.sm100.mla_decode:MlaDecode",
    config=sm100.DecodeConfig,
    operands=sm100_decode_operands,
    spec_from_options=decode_spec,
    reasons=sm100.decode_reasons,
    config_for=sm100.decode_config,
    flags=("traced_scales",),
    compiler_options=sm100.COMPILER_OPTIONS,
    package=TOKENSPEED,
)

MLA_PREFILL_SM100 = Kernel(
    name="mla_prefill_sm100",
    archs=sm100.ARCHS,
    launcher="tsmla_kernels.sm100.mla_prefill:MlaPrefill",
    config=sm100.PrefillConfig,
    operands=sm100_prefill_operands,
    spec_from_options=prefill_spec,
    reasons=sm100.prefill_reasons,
    config_for=sm100.prefill_config,
    flags=("traced_scales",),
    compiler_options=sm100.COMPILER_OPTIONS,
    package=TOKENSPEED,
)

INDEXER_LOGITS_SM100 = Kernel(
    name="indexer_logits_sm100",
    archs=logits_config.ARCHS,
    launcher="tsmla_kernels.sm100.logits:IndexerLogits",
    config=logits_config.LogitsConfig,
    operands=sm100_logits_operands,
    spec_from_options=indexer_logits_spec,
    reasons=logits_config.logits_reasons,
    config_for=logits_config.logits_config,
    presets=(),
    package=FLASHINFER,
)

SPARSE_MLA_SM100 = Kernel(
    name="sparse_mla_sm100",
    archs=sparse_config.ARCHS,
    launcher="tsmla_kernels.sm100.sparse:SparseMla",
    config=sparse_config.SparseConfig,
    operands=sm100_sparse_operands,
    spec_from_options=sparse_mla_spec,
    reasons=sparse_config.sparse_reasons,
    config_for=sparse_config.sparse_config,
    presets=(),
    compiler_options=sparse_config.COMPILER_OPTIONS,
    package=CUDNN,
)
