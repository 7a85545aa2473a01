"""The indexer's kernels on Hopper, indexer_logits and select_topk, and indexer_topk, which launches both."""

from __future__ import annotations

from tsmla_kernels.contract.sparse import IndexerTopkSpec
from tsmla_kernels.kernel import V32_MODEL, Chain, Kernel, Operand
from tsmla_kernels.options import indexer_logits_spec, indexer_topk_spec, topk_spec
from tsmla_kernels.sm90.constants import FP8
from tsmla_kernels.sm90.indexer.chunks import chunks_of, indexer_topk_reasons
from tsmla_kernels.sm90.indexer.config import TopkConfig, topk_config, topk_reasons
from tsmla_kernels.sm90.indexer.logits_config import HEAD_DIM, LogitsConfig, logits_config, logits_reasons


def topk_operands(config: TopkConfig) -> tuple[Operand, ...]:
    """Rows of logits may begin at any multiple of 4 bytes; the array itself begins at one of 16. Block tables have a
    row for each of the T rows, or with row_requests for each request."""
    starts = (Operand("row_starts", "int32", (None,), align=4),) if config.row_starts else ()
    tables = (Operand("block_tables", "int32", (None, None), align=4),) if config.page_size else ()
    requests = (Operand("row_requests", "int32", (None,), align=4),) if config.row_requests else ()
    counts = (Operand("counts", "int32", (None,), output=True, align=4),) if config.page_size else ()
    scores = (Operand("scores", "float32", (None, config.k), output=True, align=4),) if config.scores else ()
    return (
        Operand("logits", "float32", (None, None), wide=True),
        Operand("seq_lens", "int32", (None,), align=4),
        *starts,
        *tables,
        *requests,
        Operand("indices", "int32", (None, config.k), output=True, align=4),
        *counts,
        *scores,
    )


SELECT_TOPK = Kernel(
    name="select_topk",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.indexer.topk:SelectTopk",
    config=TopkConfig,
    operands=topk_operands,
    spec_from_options=topk_spec,
    reasons=topk_reasons,
    config_for=topk_config,
    presets=(),
)


def logits_operands(config: LogitsConfig) -> tuple[Operand, ...]:
    """T query tokens; B requests, or T where requests have one token each. row_lens and row_requests have an entry for
    each of the T rows, and before them one for each row of the call that is before these."""
    requests = (Operand("cu_seqlens_q", "int32", (None,), align=4),) if config.ragged else ()
    by_products = ("row_lens", "row_requests") if config.writes_rows else ()
    width, dtype = (HEAD_DIM + 4, "uint8") if config.packed else (HEAD_DIM, FP8)
    return (
        Operand("q", FP8, (None, config.num_heads, HEAD_DIM)),
        Operand("weights", "float32", (None, config.num_heads)),
        Operand("k_cache", dtype, (None, config.page_size, width), wide=True),
        Operand("block_tables", "int32", (None, None), align=4),
        Operand("seq_lens", "int32", (None,), align=4),
        *requests,
        Operand("logits", "float32", (None, None), output=True),
        *(Operand(name, "int32", (None,), output=True, align=4) for name in by_products),
    )


INDEXER_LOGITS = Kernel(
    name="indexer_logits",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.indexer.logits:IndexerLogits",
    config=LogitsConfig,
    operands=logits_operands,
    spec_from_options=indexer_logits_spec,
    reasons=logits_reasons,
    config_for=logits_config,
    presets=(),
)


def _configs_of_chunks(spec: IndexerTopkSpec) -> tuple[LogitsConfig | None, TopkConfig]:
    plan = chunks_of(spec)
    return plan.logits, plan.topk


INDEXER_TOPK = Chain(
    name="indexer_topk",
    kernels=(INDEXER_LOGITS, SELECT_TOPK),
    spec_from_options=indexer_topk_spec,
    reasons=indexer_topk_reasons,
    configs_for=_configs_of_chunks,
    presets=((V32_MODEL, (("index_n_heads", "64"), ("k", "2048"))),),
)
