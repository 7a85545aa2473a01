"""The record of indexer_logits on Hopper."""

from __future__ import annotations

from tsmla_kernels.kernel import Kernel, Operand
from tsmla_kernels.options import indexer_logits_spec
from tsmla_kernels.sm90.constants import FP8
from tsmla_kernels.sm90.logits.config import HEAD_DIM, LogitsConfig, logits_config, logits_reasons


def logits_operands(config: LogitsConfig) -> tuple[Operand, ...]:
    """The operands, for T query tokens and B requests; B is T if requests have one token each. row_lens and
    row_requests have an entry for each row of the call up to the launch's last row; the last T entries are for the
    launch's rows."""
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
    launcher="tsmla_kernels.sm90.logits.kernel:IndexerLogits",
    config=LogitsConfig,
    operands=logits_operands,
    spec_from_options=indexer_logits_spec,
    reasons=logits_reasons,
    config_for=logits_config,
    presets=(),
)
