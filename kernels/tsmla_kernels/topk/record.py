"""The records of select_topk, for Hopper and newer architectures, and of indexer_topk, which launches it on Hopper
behind the indexer's logits."""

from __future__ import annotations

from tsmla_kernels.contract.sparse import IndexerTopkSpec
from tsmla_kernels.kernel import V32_MODEL, Chain, Config, Kernel, Operand
from tsmla_kernels.options import indexer_topk_spec, topk_spec
from tsmla_kernels.sm90.logits.record import INDEXER_LOGITS
from tsmla_kernels.topk.chunks import chunks_of, indexer_topk_reasons
from tsmla_kernels.topk.config import ARCHS, TopkConfig, topk_config, topk_reasons


def topk_operands(config: TopkConfig) -> tuple[Operand, ...]:
    """The operands of select_topk. The logits' array and the words of a selection begin at a multiple of 16 bytes, each
    row of logits at any multiple of 4. Block tables have a row for each row of logits or, if config.row_requests, for
    each request."""
    starts = (Operand("row_starts", "int32", (None,), align=4),) if config.row_starts else ()
    tables = (Operand("block_tables", "int32", (None, None), align=4),) if config.page_size else ()
    requests = (Operand("row_requests", "int32", (None,), align=4),) if config.row_requests else ()
    counts = (Operand("counts", "int32", (None,), output=True, align=4),) if config.page_size else ()
    scores = (Operand("scores", "float32", (None, config.k), output=True, align=4),) if config.scores else ()
    selected = Operand("indices", "int32", (None, config.k), output=True, align=4)
    if config.bits:
        selected = Operand("selection", "int32", (None, None), output=True)
    return (
        Operand("logits", "float32", (None, None), wide=True),
        Operand("seq_lens", "int32", (None,), align=4),
        *starts,
        *tables,
        *requests,
        selected,
        *counts,
        *scores,
    )


SELECT_TOPK = Kernel(
    name="select_topk",
    archs=ARCHS,
    launcher="tsmla_kernels.topk.kernel:SelectTopk",
    config=TopkConfig,
    operands=topk_operands,
    spec_from_options=topk_spec,
    reasons=topk_reasons,
    config_for=topk_config,
    presets=(),
)


def _configs_of_chunks(spec: IndexerTopkSpec) -> tuple[Config, Config]:
    plan = chunks_of(spec)
    assert plan.logits is not None  # the kernel's, by default
    return plan.logits, plan.topk


INDEXER_TOPK = Chain(
    name="indexer_topk",
    kernels=(INDEXER_LOGITS, SELECT_TOPK),
    spec_from_options=indexer_topk_spec,
    reasons=indexer_topk_reasons,
    configs_for=_configs_of_chunks,
    presets=((V32_MODEL, (("index_n_heads", "64"), ("k", "2048"))),),
)
