"""The ring of shared-memory stages that the gathered keys and P go through."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from tsmla_kernels.sm90.constants import FP8
from tsmla_kernels.sm90.decode.memory import Shared
from tsmla_kernels.sm90.decode.ring import Ring
from tsmla_kernels.sm90.sparse.config import GATHER_WARPS, SparseConfig
from tsmla_kernels.sm90.sparse.memory import PIECES_KEPT
from tsmla_kernels.sm90.warp import DTYPES


class SparseRing(Ring):
    """The ring of the sparse kernel: rows of a cache as they lie there, `pitch` bytes apart. Q has a place of its own.

    Attributes: those of Ring that the dense decode's mixed variant uses; pitch: as in SparseConfig.
    scales_of_group: bytes of a group of columns in V4's table of scales.
    """

    pieces_kept = PIECES_KEPT

    def __init__(self, config: SparseConfig) -> None:
        self.mixed, self.cluster = True, 1
        self.dtype, self.q_dtype, self.p_dtype = DTYPES[FP8], DTYPES[config.dtype], cutlass.Float16
        self.p_swizzle = SmemLayoutAtomKind.K_SW128
        # Tiles of 64 columns: 576 are a multiple of these alone.
        self.q_swizzle = SmemLayoutAtomKind.K_SW64 if config.fp8_queries else self.p_swizzle
        self.stages, self.block, self.p_rows = config.stages, config.decode.block, config.decode.p_rows
        self.pitch, self.itemsize = config.pitch, 1
        self.stage_elements, self.p_offset = config.stage_bytes, config.keys_bytes
        self.elements = self.stages * self.stage_elements
        self.releasing_lanes = 4
        self.scales_of_group = 2 * self.block  # bytes of V4's table of scales
        self.inverses_kept = self.stages + 1  # a piece takes a stage or more

    def scale_place(self, key):
        """Offset of a key's scale in a group's part of V4's table of scales.

        The value lane with keys 2 q, 2 q + 1 of every eight reads its pairs at once: [q, eight, key of two]."""
        return key // 2 % 4 * (self.block // 2) + key // 8 * 4 + key % 2 * 2

    @cute.jit
    def stage_views(self, ring: cute.Pointer):
        """The keys, as bytes, and the P of all stages."""
        keys = cute.make_tensor(ring, cute.make_layout((self.stage_elements, self.stages)))
        swizzle, layout = self.p_layout()
        p_layout = cute.make_layout((*layout.shape, self.stages), stride=(*layout.stride, self.stage_elements // 2))
        p = cute.make_tensor(cute.recast_ptr(ring + self.p_offset, swizzle, dtype=self.p_dtype), p_layout)
        return keys, p

    def p_layout(self):
        """The swizzle and the layout of a stage's P."""
        atom = warpgroup.make_smem_layout_atom(self.p_swizzle, self.p_dtype)
        tile = cute.tile_to_shape(atom, (self.p_rows, self.block), (0, 1))
        return tile.inner, tile.outer

    @cute.jit
    def stage_p(self, shared: Shared, address: Int32):
        """The P of the stage at `address`, for WGMMA."""
        pointer = cute.make_ptr(self.p_dtype, address + self.p_offset, cute.AddressSpace.smem, assumed_align=1024)
        swizzle = warpgroup.make_smem_layout_atom(self.p_swizzle, self.p_dtype).inner
        return cute.make_tensor(
            cute.recast_ptr(pointer, swizzle, dtype=self.p_dtype), cute.slice_(shared.p.layout, (None, None, 0))
        )

    @cute.jit
    def init_barriers(self, shared: Shared):
        """Initialise the ring's barriers."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(shared.full + i, GATHER_WARPS)
                cute.arch.mbarrier_init(shared.empty + i, 8 * self.releasing_lanes)
                cute.arch.mbarrier_init(shared.ready + i, 4 * 8)  # signal() of the four softmax warps
