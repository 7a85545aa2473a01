"""Q of the sparse kernel: one TMA copy per piece brings Q to its place. There queries of 16 bits become f16, except
bf16 columns that are multiplied by the bf16 columns of packed rows."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from tsmla_kernels.sm90.latent.query import MOVE, QueryCopy, Sources, four_words, two_bf16
from tsmla_kernels.sm90.latent.ring import Ring
from tsmla_kernels.sm90.latent.softmax import sync_softmax
from tsmla_kernels.sm90.sparse.config import SparseConfig
from tsmla_kernels.sm90.sparse.memory import Query
from tsmla_kernels.sm90.warp import quotient, remainder


class SparseQuery:
    """Copies Q to its place in shared memory, and converts it there. If bf16 numbers are too large or too small for
    f16, Q is read again from global memory.

    Attributes:
      copy: converts Q to f16. swizzle: the swizzle of Q's rows. row_bytes: bytes of a row.
      tiles: how many groups of 64 columns a row has. depth, p_rows, q_dtype: as in QueryCopy.
    """

    def __init__(self, config: SparseConfig, ring: Ring) -> None:
        self.depth, self.p_rows, self.q_dtype = config.head_dim, ring.p_rows, ring.q_dtype
        self.copy = QueryCopy(
            self,
            depth=self.depth,
            p_rows=self.p_rows,
            q_dtype=self.q_dtype,
            natural_from=config.e4m3_columns // 16,
            as_they_are=config.bf16_columns,
            in_place=True,
        )
        self.tiles = config.head_dim // 64
        # The tiles have 64 columns, because 576 is a multiple of 64 but not of 128.
        self.swizzle = SmemLayoutAtomKind.K_SW64 if config.fp8_queries else SmemLayoutAtomKind.K_SW128
        self.row_bytes = self.depth * self.q_dtype.width // 8

    def tensor_map(self, q: cute.Tensor):
        """The TMA atom and tensor of q: p_rows rows in tiles of 64 columns."""
        atom = warpgroup.make_smem_layout_atom(self.swizzle, q.element_type)
        box = (self.p_rows, 64, self.tiles)
        rows = cute.make_tensor(q.iterator, cute.make_layout((q.shape[0], 64, self.tiles), stride=(q.stride[0], 1, 64)))
        layout = cute.tile_to_shape(atom, box, (0, 1, 2))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), rows, layout, box)

    @cute.jit
    def request(self, row: Int32, query: Query):
        """Request the Q of the row tile whose first query row is `row`. One warp calls it."""
        swizzle = warpgroup.make_smem_layout_atom(self.swizzle, self.q_dtype).inner
        place = cute.make_tensor(
            cute.recast_ptr(query.place, swizzle, dtype=self.q_dtype),
            cute.make_layout(((8, self.p_rows // 8), 64, self.tiles, 1), stride=((64, 512), 1, 64 * self.p_rows, 0)),
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(query.full, self.p_rows * self.row_bytes)
        source = cute.local_tile(cute.domain_offset((row, 0, 0), query.tma), (self.p_rows, 64, self.tiles), (0, 0, 0))
        to, from_q = cpasync.tma_partition(
            query.atom, 0, cute.make_layout(1), cute.group_modes(place, 0, 3), cute.group_modes(source, 0, 3)
        )
        cute.copy(query.atom, from_q, to[None, 0], tma_bar_ptr=query.full)

    @cute.jit
    def keep(self, target: Int32, sources: Sources, valid_rows: Int32, t: Int32, tops: cute.Tensor):
        """Convert Q to f16. Return the factor by which the logits must be multiplied."""
        return self.copy.keep(target, sources, valid_rows, t, tops)

    @cute.jit
    def row(self, sources: Sources, row: Int32, kind: cutlass.Constexpr[int]):
        """The address of row `row`, in shared memory if `kind` is MOVE, else in global memory. `sources` are Q's place
        and the address of the tile's first row in global memory."""
        place, rows = sources
        return place + row * 128 if const_expr(kind == MOVE) else rows + Int64(row) * self.row_bytes

    @cute.jit
    def words(self, source: Int32 | Int64, row: Int32, tile: Int32, chunk: Int32, kind: cutlass.Constexpr[int]):
        """Four words of a row that begins at `source`: the 16 bytes with index `chunk` in tile `tile` of 64 columns."""
        if const_expr(kind == MOVE):
            words = four_words(source + tile * (self.p_rows * 128) + ((chunk ^ (row & 7)) << 4))
        else:
            address = source + (tile * 128 + chunk * 16)
            pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=16)
            words = cute.make_tensor(pointer, cute.make_layout(4))
        return words


def chunk_64(row, chunk):
    """The byte offset of a row's 16 bytes with index `chunk` in a tile of 64 columns of e4m3, which has a swizzle of 64
    bytes."""
    return row * 64 + ((chunk ^ (row // 2 & 3)) << 4)


class Fp8Query(SparseQuery):
    """Q of e4m3, which keeps its dtype, in tiles of 64 columns. After these tiles lies a bf16 copy of those columns of
    Q that are multiplied by columns of bf16 keys."""

    def __init__(self, config: SparseConfig, ring: Ring) -> None:
        super().__init__(config, ring)
        self.bf16_tiles = (config.head_dim - config.e4m3_columns) // 64
        self.bf16_place = self.p_rows * self.depth  # bytes from Q's place

    @cute.jit
    def keep(self, target: Int32, sources: Sources, valid_rows: Int32, t: Int32, tops: cute.Tensor):
        """Zero the rows from `valid_rows` on, and make the bf16 copy. Return 1, the factor by which the logits must be
        multiplied. `sources` and `tops` are not used."""
        row, first = remainder(t, self.p_rows), quotient(t, self.p_rows)
        step = 128 // self.p_rows
        quad = cute.make_rmem_tensor((4,), Int32)
        quad.fill(0)
        if row >= valid_rows:
            for i in cutlass.range(first, 4 * self.tiles, step, unroll=1):
                there = target + quotient(i, 4) * (64 * self.p_rows) + row * 64 + remainder(i, 4) * 16
                cute.autovec_copy(quad, four_words(there))
        if const_expr(self.bf16_tiles > 0):
            last = target + (self.tiles - self.bf16_tiles) * (64 * self.p_rows)
            rows = target + self.bf16_place + row * 128
            for chunk in cutlass.range(first, 4, step, unroll=1):
                quad.fill(0)
                if row < valid_rows:
                    cute.autovec_copy(four_words(last + chunk_64(row, chunk)), quad)
                for h in cutlass.range_constexpr(2):
                    wide = four_words(rows + (((2 * chunk + h) ^ (row & 7)) << 4))
                    cute.autovec_copy(self.as_bf16(quad[2 * h], quad[2 * h + 1]), wide)
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_softmax()
        return Float32(1.0)

    def as_bf16(self, low: Int32, high: Int32) -> cute.Tensor:
        """Convert eight numbers of e4m3 to bf16, which is exact."""
        narrow, wide = cute.make_rmem_tensor((2,), Int32), cute.make_rmem_tensor((4,), Int32)
        narrow[0], narrow[1] = low, high
        eight = cute.make_rmem_tensor((8,), cutlass.Float16)
        eight.store(cute.recast_tensor(narrow, self.q_dtype).load().to(cutlass.Float16))
        for i in range(4):
            wide[i] = two_bf16(eight[2 * i].to(Float32), eight[2 * i + 1].to(Float32))
        return wide
