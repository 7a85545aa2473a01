"""The contents of a stage of decode's ring: keys or rows of Q, and the P of the keys."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from tsmla_kernels.sm90.decode.config import DecodeConfig
from tsmla_kernels.sm90.decode.memory import PIECES_KEPT
from tsmla_kernels.sm90.latent.memory import Shared
from tsmla_kernels.sm90.latent.ring import Ring, RingLayout
from tsmla_kernels.sm90.warp import DTYPES


def decode_ring(config: DecodeConfig) -> Ring:
    """The ring of a decode kernel."""
    dtype = DTYPES[config.cache_dtype]
    if config.fp8_cache:
        if config.fp8_p:
            p_dtype, p_swizzle = dtype, SmemLayoutAtomKind.K_SW64
        else:
            p_dtype, p_swizzle = cutlass.Float16, SmemLayoutAtomKind.K_SW128
        p_offset = config.block * config.head_dim
    else:
        p_dtype, p_swizzle = dtype, SmemLayoutAtomKind.K_SW64
        # P overwrites the rope columns of its own keys, which nothing reads once S exists. If R is 0, P has bytes of
        # its own behind the keys.
        p_offset = config.block * config.latent_dim * 2
    layout = RingLayout(
        stages=config.stages,
        block=config.block,
        p_rows=config.p_rows,
        dtype=dtype,
        q_dtype=DTYPES[config.dtype],
        p_dtype=p_dtype,
        p_swizzle=p_swizzle,
        stage_elements=config.stage_bytes // (dtype.width // 8),
        p_offset=p_offset,
        pieces_kept=PIECES_KEPT,
        # A piece takes two stages or more, so the ring holds at most stages / 2 pieces. If the cache has 16 bits, the
        # value warps read the factors of a piece's rows before they release its last stage; if it is fp8, afterwards.
        inverses_kept=config.stages // 2 + 1 if config.fp8_cache else (config.stages + 1) // 2,
        releasing_lanes=4 if config.transposed_out else 1,
        cluster=config.cluster,
    )
    return Ring(layout)


class Stages:
    """Keys and queries in the stages of `ring`.

    Attributes:
      mixed: whether Q has 16 bits and keys are e4m3.
      keys_swizzle, q_swizzle: the swizzles of rows of keys and of Q.
      q_rows: how many query rows a stage holds. depth: how many columns a key has. column_tiles: depth / 64.
      box: keys of one TMA copy, fewer than a stage holds if a page is shorter.
      ring, dtype, q_dtype, stages, block, stage_elements: as in Ring.
    """

    def __init__(self, config: DecodeConfig, ring: Ring) -> None:
        self.ring, self.mixed = ring, config.mixed
        self.dtype, self.q_dtype, self.stages = ring.dtype, ring.q_dtype, ring.stages
        self.block, self.stage_elements = ring.block, ring.stage_elements
        self.q_rows, self.depth, self.column_tiles = config.q_rows, config.head_dim, config.head_dim // 64
        self.box = min(config.block, config.page_size)
        wide, narrow = SmemLayoutAtomKind.K_SW128, SmemLayoutAtomKind.K_SW64
        self.keys_swizzle = narrow if config.fp8_cache else wide
        self.q_swizzle = narrow if config.fp8_scores else wide

    @cute.jit
    def keys(self, ring: cute.Pointer):
        """The keys of all stages."""
        tile = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(self.keys_swizzle, self.dtype), (self.block, self.depth), (0, 1)
        )
        layout = cute.make_layout((*tile.outer.shape, self.stages), stride=(*tile.outer.stride, self.stage_elements))
        return cute.make_tensor(cute.recast_ptr(ring, tile.inner, dtype=self.dtype), layout)

    @cute.jit
    def stage_keys(self, shared: Shared, address: Int32):
        """The keys of the stage at `address`, for WGMMA."""
        pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.smem, assumed_align=1024)
        swizzle = warpgroup.make_smem_layout_atom(self.keys_swizzle, self.dtype).inner
        return cute.make_tensor(
            cute.recast_ptr(pointer, swizzle, dtype=self.dtype), cute.slice_(shared.keys.layout, (None, None, 0))
        )

    @cute.jit
    def boxes(self, s_k: cute.Tensor, keys: cutlass.Constexpr[int]):
        """The ring as TMA boxes of `keys` rows: (key, column, column tile in the box, box among the block's keys, box
        among the columns, stage)."""
        tiles = self.column_tiles if const_expr(keys == self.block) else 1
        return cute.make_tensor(
            s_k.iterator,
            cute.make_layout(
                ((8, keys // 8), 64, tiles, self.block // keys, self.column_tiles // tiles, self.stages),
                stride=((64, 512), 1, 64 * self.block, 64 * keys, 64 * self.block * tiles, self.stage_elements),
            ),
        )

    @cute.jit
    def q_boxes(self, s_k: cute.Tensor):
        """The ring as TMA boxes of Q's rows. If Q has the keys' dtype, a stage has as many rows of Q as keys."""
        if const_expr(self.mixed):
            swizzle = warpgroup.make_smem_layout_atom(self.q_swizzle, self.q_dtype).inner
            boxes = cute.make_tensor(
                cute.recast_ptr(s_k.iterator, swizzle, dtype=self.q_dtype),
                cute.make_layout(
                    ((8, self.q_rows // 8), 64, self.column_tiles, 1, 1, self.stages),
                    stride=((64, 512), 1, 64 * self.q_rows, 0, 0, self.stage_elements // 2),
                ),
            )
        else:
            boxes = self.boxes(s_k, self.block)
        return boxes
