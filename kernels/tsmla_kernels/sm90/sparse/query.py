"""Q of the sparse kernel: one TMA copy a piece, to the place where Q stays, and there into f16."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from tsmla_kernels.sm90.decode.memory import Described, Piece
from tsmla_kernels.sm90.decode.query import COPY, QueryCopy, four_words
from tsmla_kernels.sm90.sparse.config import SparseConfig
from tsmla_kernels.sm90.sparse.memory import Query
from tsmla_kernels.sm90.sparse.ring import SparseRing


class SparseQuery(QueryCopy):
    """Q in place. Where bf16 numbers exceed f16's range they are read once more, from global memory."""

    def __init__(self, config: SparseConfig, ring: SparseRing) -> None:
        super().__init__(config.head_dim, ring.p_rows, ring.p_rows, ring.q_dtype)
        self.natural_from, self.as_they_are = config.e4m3_columns // 16, config.bf16_columns
        self.tiles = config.head_dim // 64
        self.swizzle = ring.q_swizzle

    def tensor_map(self, q: cute.Tensor):
        """The TMA atom and tensor of q: p_rows rows in tiles of 64 columns."""
        atom = warpgroup.make_smem_layout_atom(self.swizzle, q.element_type)
        box = (self.p_rows, 64, self.tiles)
        rows = cute.make_tensor(
            q.iterator, cute.make_layout((q.shape[0], 64, self.tiles), stride=(q.stride[0], 1, 64))
        )
        layout = cute.tile_to_shape(atom, box, (0, 1, 2))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), rows, layout, box)

    @cute.jit
    def request(self, piece: Described, query: Query):
        """Request a piece's Q; by one warp."""
        swizzle = warpgroup.make_smem_layout_atom(self.swizzle, self.q_dtype).inner
        place = cute.make_tensor(
            cute.recast_ptr(query.place, swizzle, dtype=self.q_dtype),
            cute.make_layout(
                ((8, self.p_rows // 8), 64, self.tiles, 1), stride=((64, 512), 1, 64 * self.p_rows, 0)
            ),
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(query.full, self.p_rows * self.depth * 2)
        source = cute.local_tile(
            cute.domain_offset((piece[Piece.ROW], 0, 0), query.tma), (self.p_rows, 64, self.tiles), (0, 0, 0)
        )
        to, from_q = cpasync.tma_partition(
            query.atom, 0, cute.make_layout(1), cute.group_modes(place, 0, 3), cute.group_modes(source, 0, 3)
        )
        cute.copy(query.atom, from_q, to[None, 0], tma_bar_ptr=query.full)

    @cute.jit
    def row_source(self, sources: tuple[Int32, Int64], row: Int32, kind: cutlass.Constexpr[int]):
        """Where row `row` begins; `sources` are Q's place and the tile's first row in global memory."""
        place, rows = sources
        return place + row * 128 if const_expr(kind == COPY) else rows + Int64(row) * (self.depth * 2)

    @cute.jit
    def source_words(self, source, row: Int32, tile: Int32, chunk: Int32, kind: cutlass.Constexpr[int]):
        """Four words of a row: 16 bytes `chunk` of 64 columns `tile`. `source` is what row_source returned."""
        if const_expr(kind == COPY):
            words = four_words(source + tile * (self.p_rows * 128) + ((chunk ^ (row & 7)) << 4))
        else:
            address = source + (tile * 128 + chunk * 16)
            pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=16)
            words = cute.make_tensor(pointer, cute.make_layout(4))
        return words
