"""The ring of the kernel that has Q in registers. A stage has 32 keys and their P, or 32 rows of Q, in WGMMA's
layout."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from tsmla_kernels.sm90.latent.memory import Shared
from tsmla_kernels.sm90.latent.ring import Ring, RingLayout
from tsmla_kernels.sm90.latent.shape import ROWS
from tsmla_kernels.sm90.sparse.config import BLOCK, GATHER_WARPS, SparseConfig
from tsmla_kernels.sm90.sparse.memory import PIECES_KEPT
from tsmla_kernels.sm90.warp import DTYPES

KEYS = BLOCK // 2  # keys, or rows of Q, of a stage
STAGES_OF_BLOCK = BLOCK // KEYS
TILE = 64  # columns of a tile of WGMMA's layout
LINE = 2 * TILE  # bytes of a tile's row


def rows_ring(config: SparseConfig) -> Ring:
    """The ring. Q goes through it."""
    dtype = DTYPES[config.kv_dtype]
    layout = RingLayout(
        stages=config.stages,
        block=KEYS,
        p_rows=ROWS,
        dtype=dtype,
        q_dtype=dtype,
        p_dtype=dtype,
        p_swizzle=SmemLayoutAtomKind.K_SW64,
        stage_elements=config.stage_bytes // 2,
        p_offset=config.keys_bytes,
        pieces_kept=PIECES_KEPT,
        inverses_kept=config.stages + 1,  # a piece takes a stage or more
        releasing_lanes=1,
        filling_warps=33 * GATHER_WARPS,  # each lane when its copies have landed, and a lane of each warp for `valid`
    )
    return Ring(layout)


class RowStages:
    """Keys, or rows of Q, in the stages of `ring`. depth: how many columns they have."""

    swizzle = SmemLayoutAtomKind.K_SW128

    def __init__(self, config: SparseConfig, ring: Ring) -> None:
        self.ring, self.block, self.depth = ring, ring.block, config.head_dim

    @cute.jit
    def keys(self, ring: cute.Pointer):
        """The keys of all stages."""
        atom = warpgroup.make_smem_layout_atom(self.swizzle, self.ring.dtype)
        tile = cute.tile_to_shape(atom, (self.block, self.depth), (0, 1))
        shape, strides = (*tile.outer.shape, self.ring.stages), (*tile.outer.stride, self.ring.stage_elements)
        pointer = cute.recast_ptr(ring, tile.inner, dtype=self.ring.dtype)
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=strides))

    @cute.jit
    def stage_keys(self, shared: Shared, address: Int32):
        """The keys of the stage at `address`, for WGMMA."""
        pointer = cute.make_ptr(self.ring.dtype, address, cute.AddressSpace.smem, assumed_align=1024)
        swizzle = warpgroup.make_smem_layout_atom(self.swizzle, self.ring.dtype).inner
        return cute.make_tensor(
            cute.recast_ptr(pointer, swizzle, dtype=self.ring.dtype),
            cute.slice_(shared.keys.layout, (None, None, 0)),
        )
