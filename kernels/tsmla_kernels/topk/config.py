"""Which top-k kernel serves a call: static configurations. Imports no cutlass.

A compiled kernel serves any number of rows and columns. By these two numbers `topk_config` picks how many CTAs share a
row.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tsmla_kernels.contract.sparse import TopKSpec

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_107a")  # CTAs of sm_120a have too little shared memory
MAX_K = 4096
MAX_COLUMNS = (1 << 31) - 256  # positions, rounded up to a unit, are counted in int32
MANY_ROWS = 1 << 20  # takes the place of a symbolic number of rows
UNIT = 128  # columns that a warp reads at once: 16 bytes per lane
BINS = 4096  # bins of a histogram
FEW_ROWS = 264  # two rows for each of 132 multiprocessors
MAX_BIT_COLUMNS = 32 * BINS  # the words of a row's bits take the place of a histogram


@dataclasses.dataclass(frozen=True)
class TopkConfig:
    """The static choices of a compiled select_topk. Rows and columns are dynamic.

    Attributes:
      k: how many positions of a row are selected.
      order: "position", ascending, or "value", descending with ties by position.
      page_size: if not 0, slots are written instead of positions, through a block table of pages of this size.
      row_starts: whether each row begins at a column of its own.
      row_requests: whether the block table has a row for each request, and an operand says the request of each row of
        logits. Otherwise the block table has a row for each row of logits. Only if page_size is not 0.
      scores: whether the selected logits are also written.
      bits: whether the words of the selection are written in the place of positions. One CTA has the row.
      cluster: how many CTAs share a row. warps: how many warps a CTA has.
      stages, stage_units: each warp's shared memory in ExactSearch: how many copies may be in flight, and how many
        UNITs a copy has. If a warp's part of the row fits, it is copied once; otherwise every walk copies it again.
      held: most chunks of a row in a CTA's shared memory or registers; a chunk has 16 bytes for each thread.
      most_chunks: most chunks of a CTA's share of a row: rows with more are left to ExactSearch. If a share has more
        than `held` chunks, the CTA first holds a sample, and then reads its share.
      depth: chunks that a thread reads at once.
      in_registers: whether RegisterSearch takes the row, which one CTA holds as a whole.
      most_listed: most keys of one bin that are ranked against each other instead of being counted in finer bins.
      eager: whether copies begin before the row's length is known, so that all columns of the array are copied. Set
        only for small arrays.
      follows: whether the previous launch is the kernel of indexer_logits. select_topk then starts before that kernel
        has ended, and waits for its end.
    """

    k: int
    order: str = "position"
    page_size: int = 0
    row_starts: bool = False
    row_requests: bool = False
    scores: bool = False
    bits: bool = False
    cluster: int = 1
    warps: int = 16
    stages: int = 4
    stage_units: int = 2
    eager: bool = False
    held: int = 4
    most_chunks: int = 4
    depth: int = 4
    in_registers: bool = False
    most_listed: int = 512
    follows: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def least_ctas(self) -> int:
        """How many CTAs must fit into a multiprocessor's registers; 0 leaves this to the compiler. The compiler allows
        too few registers if slots are written by a cluster of 8 or by RegisterSearch; this is 1 then."""
        return 1 if self.page_size and (self.cluster == 8 or self.in_registers) else 0

    @property
    def listed(self) -> int:
        """Most keys of one bin that are ranked against each other."""
        return min(self.most_listed, self.threads)

    @property
    def sorted_entries(self) -> int:
        """How many entries are sorted if order is "value": the least power of two that is at least k and 64. With
        another order the array of entries has 1, which nothing reads."""
        return 1 << max(6, (self.k - 1).bit_length()) if self.order == "value" else 1

    @property
    def streams(self) -> bool:
        """Whether a CTA's share of a row may be more than the CTA holds."""
        return self.most_chunks > self.held

    @property
    def histograms(self) -> int:
        return 2 if self.streams else 1

    @property
    def kept(self) -> int:
        """Columns that a thread has room to keep: its share of 1.5 k, five standard deviations, and 4 more."""
        expected = 1.5 * self.k / (self.threads * self.cluster)
        return math.ceil(expected + 5 * math.sqrt(expected)) + 4

    @property
    def held_words(self) -> int:
        """Words of shared memory for the held columns; reused for the kept columns or ExactSearch's ring."""
        kept = self.kept + 1 if self.streams else 0
        return max(self.threads * max(4 * self.held, kept), self.warps * self.stages * self.stage_units * UNIT)

    @property
    def mark_words(self) -> int:
        return self.threads * -(-self.most_chunks // 4)


def topk_reasons(spec: TopKSpec) -> list[str]:
    """Why the kernel cannot run this call; empty if it can."""
    reasons = []
    if spec.dtype != "float32":
        reasons.append(f"logits' dtype is {spec.dtype}; the sm_90 top-k kernel takes float32")
    if spec.k > MAX_K:
        reasons.append(f"k is {spec.k}; the sm_90 top-k kernel takes at most {MAX_K}")
    if not isinstance(spec.num_columns, int):
        reasons.append(f"num_columns (N) is {spec.num_columns}; the sm_90 top-k kernel takes a static N")
    elif spec.num_columns > MAX_COLUMNS:
        reasons.append(f"num_columns (N) is {spec.num_columns}; the sm_90 top-k kernel takes at most {MAX_COLUMNS}")
    if spec.order == "value" and spec.page_size:
        reasons.append("slots are written by position; order is 'value'")
    if spec.bits and isinstance(spec.num_columns, int) and spec.num_columns > MAX_BIT_COLUMNS:
        limit = f"the sm_90 top-k kernel writes bits of at most {MAX_BIT_COLUMNS} columns"
        reasons.append(f"num_columns (N) is {spec.num_columns}; {limit}")
    return reasons


def topk_config(spec: TopKSpec) -> TopkConfig:
    """The configuration that serves `spec`. There are only a few for all sizes, so that few kernels are compiled. The
    number of rows may be symbolic."""
    rows, columns = spec.num_tokens, spec.num_columns
    if not isinstance(rows, int) or spec.bits:
        rows = MANY_ROWS  # bits are of prompts, which have many rows
    # (cluster, warps, held, most_chunks). Several CTAs share a long row if there are few rows, or if it has more than
    # 131,072 columns.
    if columns <= 1 << 13:
        shape = (1, 16, 4, 4) if rows <= FEW_ROWS else (1, 8, 8, 8)
    elif columns <= 1 << 15:
        shape = (4, 16, 4, 4) if rows <= 32 else (2, 32, 4, 4) if rows <= 66 else (1, 32, 8, 8)
        if rows > 132:
            shape = (1, 16, 4, 16)
    elif columns <= 1 << 17:
        shape = (2, 32, 2, 16) if rows <= 66 else (1, 32, 4, 32)
        if rows <= 16:
            # Writing slots takes more registers than 32 warps leave, whatever the size of a page.
            shape = (8, 16, 8, 8) if spec.page_size else (8, 32, 4, 4)
    else:
        shape = (8, 16, 8, 64)
    cluster, warps, held, most_chunks = shape
    return TopkConfig(
        k=spec.k,
        order="position" if spec.bits else spec.order,  # bits have no order
        page_size=spec.page_size,
        row_starts=spec.row_starts,
        bits=spec.bits,
        cluster=cluster,
        warps=warps,
        stages=4,
        stage_units=1,
        eager=rows * columns <= 1 << 20 and not spec.row_starts,
        held=held,
        most_chunks=most_chunks,
        in_registers=columns <= 1 << 13 and rows <= FEW_ROWS,
        most_listed=144 if columns <= 1 << 13 and rows > FEW_ROWS else 512,
    )
