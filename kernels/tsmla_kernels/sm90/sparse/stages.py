"""The contents of a stage of the sparse kernel's ring: rows as they lie in a cache, their P, and V4's scales."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from tsmla_kernels.sm90.constants import FP8
from tsmla_kernels.sm90.latent.ring import Ring, RingLayout
from tsmla_kernels.sm90.sparse.config import GATHER_WARPS, SparseConfig
from tsmla_kernels.sm90.sparse.memory import PIECES_KEPT
from tsmla_kernels.sm90.warp import DTYPES


def sparse_ring(config: SparseConfig) -> Ring:
    """The ring of the sparse kernel. Its elements are bytes, because a stage mixes dtypes. Q has a place outside the
    ring."""
    layout = RingLayout(
        stages=config.stages,
        block=config.shape.block,
        p_rows=config.shape.p_rows,
        dtype=DTYPES[FP8],
        q_dtype=DTYPES[config.dtype],
        p_dtype=cutlass.Float16,
        p_swizzle=SmemLayoutAtomKind.K_SW128,
        stage_elements=config.stage_bytes,
        p_offset=config.keys_bytes,
        pieces_kept=PIECES_KEPT,
        inverses_kept=config.stages + 1,  # a piece takes a stage or more
        releasing_lanes=4,
        filling_warps=GATHER_WARPS,
    )
    return Ring(layout)


class Stages:
    """Gathered rows in the stages of `ring`, `pitch` bytes apart.

    Attributes:
      pitch: as in SparseConfig. scales_of_group: how many bytes of V4's table of scales each group of columns has.
    """

    def __init__(self, config: SparseConfig, ring: Ring) -> None:
        self.ring, self.block, self.pitch = ring, ring.block, config.pitch
        self.scales_of_group = 2 * self.block

    def keys(self, ring: cute.Pointer) -> cute.Tensor:
        """All stages, as bytes."""
        return cute.make_tensor(ring, cute.make_layout((self.ring.stage_elements, self.ring.stages)))

    def scale_place(self, key: Int32 | int) -> Int32 | int:
        """The byte offset of a key's scale in a group's part of V4's table of scales.

        That part has the order [q, eight, key of two]: a value lane has keys 2 q and 2 q + 1 of every eight keys (q is
        lane % 4), and reads several such pairs at once."""
        return key // 2 % 4 * (self.block // 2) + key // 8 * 4 + key % 2 * 2
