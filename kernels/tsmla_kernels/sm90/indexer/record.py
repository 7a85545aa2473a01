"""select_topk on Hopper: its operands and its record."""

from __future__ import annotations

from functools import partial

from tsmla_kernels.kernel import Kernel, Operand
from tsmla_kernels.options import config_of, topk_spec
from tsmla_kernels.sm90.indexer.config import TopkConfig, topk_config, topk_reasons


def topk_operands(config: TopkConfig) -> tuple[Operand, ...]:
    """Rows of logits may begin at any multiple of 4 bytes; the array itself begins at one of 16."""
    starts = (Operand("row_starts", "int32", (None,), align=4),) if config.row_starts else ()
    tables = (Operand("block_tables", "int32", (None, None), align=4),) if config.page_size else ()
    counts = (Operand("counts", "int32", (None,), output=True, align=4),) if config.page_size else ()
    return (
        Operand("logits", "float32", (None, None), wide=True),
        Operand("seq_lens", "int32", (None,), align=4),
        *starts,
        *tables,
        Operand("indices", "int32", (None, config.k), output=True, align=4),
        *counts,
    )


SELECT_TOPK = Kernel(
    name="select_topk",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.indexer.topk:SelectTopk",
    config=TopkConfig,
    operands=topk_operands,
    from_options=partial(config_of, topk_spec, topk_reasons, topk_config),
    presets=(),
)
