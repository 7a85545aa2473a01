"""Which top-k kernel serves a call: static configurations. Imports no cutlass.

One object serves every number of rows and columns; `topk_config` picks how a row is shared out from both.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tsmla_kernels.contract.sparse import TopKSpec

MAX_K = 4096
MAX_COLUMNS = (1 << 31) - 256  # positions, rounded up to a unit, are counted in int32
ORDERS = ("value", "position")
UNIT = 128  # columns that a warp reads at once: 16 bytes a lane
BINS = 4096  # of a histogram
MAX_LISTED = 512  # keys of one bin that are ranked among each other instead of being counted once more
SMEM_BYTES = 232_448  # of a CTA


@dataclasses.dataclass(frozen=True)
class TopkConfig:
    """What an object of select_topk is compiled for. Rows and columns are dynamic.

    Attributes:
      k: positions of a row.
      order: "position", ascending, or "value", descending with ties by position.
      page_size: Z of the block table through which positions become slots; 0 where positions are written.
      row_starts: whether rows begin at columns of their own.
      cluster: CTAs that share a row. warps: warps of a CTA.
      stages, stage_units: shared memory of a warp, in copies and in UNITs of a copy. A row that fits into the cluster's
        shared memory is read once, a longer one once for every pass.
      eager: copy a row's columns, as many as the array has, before its length is known; for few rows.
    """

    k: int
    order: str = "position"
    page_size: int = 0
    row_starts: bool = False
    cluster: int = 1
    warps: int = 16
    stages: int = 4
    stage_units: int = 2
    eager: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def listed(self) -> int:
        """Keys of one bin that are ranked among each other."""
        return min(MAX_LISTED, self.threads)

    @property
    def sorted_entries(self) -> int:
        """Places of the buffer that order="value" sorts: the power of two that holds k."""
        return 1 << max(6, (self.k - 1).bit_length()) if self.order == "value" else 1

    @property
    def row_columns(self) -> int:
        """Columns of a row that the cluster's shared memory holds, wherever the row begins."""
        return self.cluster * self.warps * (self.stages * self.stage_units) * UNIT - UNIT

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA, alignment aside."""
        ring = self.warps * self.stages * (self.stage_units * UNIT * 4 + 8)
        return ring + BINS * 4 + self.listed * (8 + 8 + 4 + 4) + self.sorted_entries * 8 + 1024


def topk_reasons(spec: TopKSpec, order: str = "position", page_size: int | None = None) -> list[str]:
    """Why the kernel cannot run this call; empty if it can."""
    reasons = []
    if spec.k > MAX_K:
        reasons.append(f"k is {spec.k}; the sm_90 top-k kernel takes at most {MAX_K}")
    if spec.num_columns > MAX_COLUMNS:
        reasons.append(f"N is {spec.num_columns}; the sm_90 top-k kernel takes at most {MAX_COLUMNS}")
    if order not in ORDERS:
        reasons.append(f"order is {order!r}; the sm_90 top-k kernel takes {' or '.join(ORDERS)}")
    if order == "value" and page_size:
        reasons.append("slots are written by position; order is 'value'")
    return reasons


def topk_config(
    spec: TopKSpec, order: str = "position", page_size: int | None = None, row_starts: bool = False
) -> TopkConfig:
    """The configuration that serves `spec`: a few for all sizes, so that few objects are compiled."""
    rows, columns = spec.num_tokens, spec.num_columns
    few = rows <= 16
    if columns <= 1 << 13:
        shape = (1, 32, 2, 2) if rows <= 132 else (1, 16, 4, 1)
    elif columns <= 1 << 15:
        shape = (4, 32, 2, 2) if rows <= 32 else (2, 16, 4, 2) if rows > 132 else (1, 32, 4, 2)
    else:
        shape = (8, 32, 4, 1) if rows <= 16 else (8, 16, 4, 2)
    cluster, warps, stages, stage_units = shape
    return TopkConfig(
        k=spec.k,
        order=order,
        page_size=page_size or 0,
        row_starts=row_starts,
        cluster=cluster,
        warps=warps,
        stages=stages,
        stage_units=stage_units,
        eager=few and not row_starts,
    )
