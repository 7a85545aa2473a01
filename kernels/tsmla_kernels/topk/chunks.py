"""indexer_topk: the kernels of indexer_logits and select_topk, launched in turn on chunks of query rows. Imports no
cutlass.

The top-k's kernel selects from any float32 logits. So where the GPU has no kernel of the logits, or it doesn't take the
call, the front end's own operations compute a chunk's logits for it.

The logits of a chunk are in a workspace whose size does not grow with the query tokens. DESIGN.md of the logits' kernel
says why the chunks are as large as they are.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from tsmla_kernels.sm90.logits.config import LogitsConfig, logits_config, logits_reasons
from tsmla_kernels.sm100 import logits_config as sm100
from tsmla_kernels.topk.config import TopkConfig, topk_config, topk_reasons

if TYPE_CHECKING:
    from tsmla_kernels.contract.sparse import IndexerLogitsSpec, IndexerTopkSpec

WORKSPACE_BYTES = 128 << 20
"""The size of a chunk's logits. Smaller chunks would stay in the L2 cache, but need more launches of fewer rows, which
costs more than it saves."""
ROW_MULTIPLE = 16
"""If there are several chunks, each has a multiple of this many rows, because the logits' kernel lets up to this many
query tokens read a block of keys together. With more than 2,097,152 columns, this many rows exceed WORKSPACE_BYTES."""
HOPPER = "sm_90a"
LOGIT_BYTES = 4
ROW_BYTES = 8
"""Bytes that the logits kernel of a ragged call writes for each row: how many keys the row sees, and the row's request,
both int32."""


class Chunks(NamedTuple):
    """How a call is launched: the number of query rows of a chunk, and each kernel's configuration for all chunks. The
    last chunk ends at the last row. logits is None where no kernel computes the logits."""

    rows: int
    logits: LogitsConfig | sm100.LogitsConfig | None
    topk: TopkConfig

    def starts(self, num_tokens: int) -> list[int]:
        """The first row of each chunk. The last chunk computes again the rows that it shares with the chunk before."""
        return [min(start, num_tokens - self.rows) for start in range(0, num_tokens, self.rows)]


def chunk_rows(num_tokens: int, num_columns: int, workspace: int | None = None) -> int:
    """How many rows a chunk of logits of `num_columns` columns has. workspace: bytes for the logits; None means
    WORKSPACE_BYTES."""
    fitting = (WORKSPACE_BYTES if workspace is None else workspace) // (LOGIT_BYTES * num_columns)
    return min(num_tokens, max(fitting // ROW_MULTIPLE, 1) * ROW_MULTIPLE)


def logits_of_rows(spec: IndexerTopkSpec, rows: int) -> IndexerLogitsSpec:
    """The logits of a call's chunk of `rows` query tokens, each with a row of the block table of its own."""
    return dataclasses.replace(spec.logits, num_tokens=rows, num_requests=rows, ragged=False)


def workspace_bytes(max_tokens: int, max_columns: int) -> int:
    """The most bytes that a call of at most `max_tokens` query tokens and `max_columns` columns needs, for a chunk's
    logits and for all rows' ROW_BYTES."""
    row = LOGIT_BYTES * max_columns
    return min(max_tokens * row, max(WORKSPACE_BYTES, ROW_MULTIPLE * row)) + ROW_BYTES * max_tokens


def indexer_topk_reasons(spec: IndexerTopkSpec) -> list[str]:
    """Why the two kernels cannot run this call; empty if they can."""
    return logits_reasons(spec.logits) + selection_reasons(spec)


def selection_reasons(spec: IndexerTopkSpec) -> list[str]:
    """Why the top-k kernel cannot select from chunks of this call's logits; empty if it can."""
    reasons = topk_reasons(spec.topk)
    if not isinstance(spec.logits.num_tokens, int):
        reasons.append(f"num_tokens (T) is {spec.logits.num_tokens}; chunks of query rows take a static T")
    return reasons


def chunks_of(
    spec: IndexerTopkSpec,
    num_sms: int = 132,
    workspace: int | None = None,
    *,
    arch: str = HOPPER,
    logits_kernel: bool = True,
) -> Chunks:
    """The launches that serve `spec`, a call with at least one query token and one column, on a GPU of `arch` with
    `num_sms` multiprocessors. workspace: as in chunk_rows. logits_kernel: whether a kernel computes the logits, as
    it does where `no_logits_kernel` has no reasons."""
    ragged, rows = spec.logits.ragged, chunk_rows(spec.logits.num_tokens, spec.num_columns, workspace)
    page_size = spec.logits.cache.page_size if spec.return_slots else 0
    topk = topk_config(dataclasses.replace(spec.topk, num_tokens=rows, page_size=page_size))
    topk = dataclasses.replace(topk, row_requests=ragged and spec.return_slots, scores=spec.return_scores)
    if not logits_kernel:
        return Chunks(rows, None, topk)
    if arch in sm100.ARCHS:
        return Chunks(rows, sm100.logits_config(logits_of_rows(spec, rows), num_sms), topk)
    # logits_config gets the spec of the whole call, because it groups query tokens by the mean number of tokens per
    # request there. In one chunk most requests may have no tokens.
    topk = dataclasses.replace(topk, follows=True)
    return Chunks(rows, dataclasses.replace(logits_config(spec.logits, num_sms), writes_rows=ragged), topk)
