"""Whether a kernel computes the logits of indexer_topk's call. Apart from chunks.py, because the launcher that is asked
here imports the catalog of kernels, and this imports chunks.py. Imports no cutlass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tsmla_kernels import launch
from tsmla_kernels.kernel import written_for
from tsmla_kernels.sm90.logits.record import INDEXER_LOGITS
from tsmla_kernels.sm100 import logits_config as sm100
from tsmla_kernels.sm100.record import INDEXER_LOGITS_SM100
from tsmla_kernels.topk.chunks import chunk_rows, logits_of_rows

if TYPE_CHECKING:
    from tsmla_kernels.contract.sparse import IndexerTopkSpec


def no_logits_kernel(spec: IndexerTopkSpec, arch: str) -> list[str]:
    """Why a GPU of `arch` has no kernel for the logits of this call, which the top-k kernel can run; empty if it has
    one."""
    kernel = written_for(arch, INDEXER_LOGITS, INDEXER_LOGITS_SM100)
    if kernel is INDEXER_LOGITS:
        return kernel.arch_reasons(arch) or kernel.reasons(spec.logits)
    rows = logits_of_rows(spec, chunk_rows(spec.logits.num_tokens, max(spec.num_columns, 1)))
    return kernel.reasons(rows) or launch.why_not_made(kernel, sm100.logits_config(rows), arch)
