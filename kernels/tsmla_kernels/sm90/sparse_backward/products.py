"""WGMMA products of sparse_mla's gradient. For a tile of heads and a block of keys:

    S = Q K^T    P = exp(scale S - lse)    dP = dO V^T    dS = scale P (share dP + shift)
    dQ += dS K   dKV = dS^T Q + (share P)^T dO

One warpgroup computes scores (scores.py); the others compute the keys' gradients (key_gradients.py). All have parts of
dQ's columns, in registers for all blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu.warpgroup import Field
from cutlass.utils import hopper_helpers as sm90

from tsmla_kernels.sm90.operands import Block, operand, transposed
from tsmla_kernels.sm90.sparse_backward.config import BLOCK, TILE_HEADS
from tsmla_kernels.sm90.sparse_backward.memory import (
    COLUMN_TILE,
    NARROW,
    WIDE,
    Item,
    Mma,
    Shared,
    ThreadIndex,
    Traits,
)
from tsmla_kernels.sm90.warp import transpose_quad


class Columns(NamedTuple):
    """Some columns of a block: from `first` on, before `end`."""

    first: int
    end: int


class Products:
    """Device code that issues products, and that stores dQ."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    def make_mmas(self) -> Mma:
        dtype, k_major, mn_major = self.traits.dtype, OperandMajorMode.K, OperandMajorMode.MN

        def mma(a_major: OperandMajorMode, b_major: OperandMajorMode, rows: int, columns: int) -> cute.TiledMma:
            return sm90.make_trivial_tiled_mma(dtype, dtype, a_major, b_major, Float32, (1, 1, 1), (rows, columns))

        return Mma(
            scores_first=mma(k_major, k_major, TILE_HEADS, BLOCK),
            scores=mma(k_major, k_major, TILE_HEADS, BLOCK),
            wide_dq=mma(k_major, mn_major, TILE_HEADS, WIDE),
            dq=mma(k_major, mn_major, TILE_HEADS, NARROW),
            dkv_first=mma(mn_major, mn_major, BLOCK, self.traits.chunk_columns),
            dkv=mma(mn_major, mn_major, BLOCK, self.traits.chunk_columns),
        )

    def set_flags(self, mma: Mma) -> None:
        """Say which products add to their accumulators. Called once, before any role begins: a change while products
        run would serialise them."""
        for products, adds in zip(mma, (False, True, True, True, False, True), strict=True):
            products.set(Field.ACCUMULATE, adds)

    @cute.jit
    def issue(
        self,
        products: cutlass.Constexpr[tuple[cute.TiledMma, cute.TiledMma]],
        acc: cute.Tensor,
        queries: cute.Pointer,
        heads: cutlass.Constexpr[Block],
        keys: cute.Pointer,
        columns: cutlass.Constexpr[Columns],
        t: ThreadIndex,
    ):
        """Issue A B^T over some columns: A is the block `heads` at `queries`; B has the rows of a block of keys,
        at `keys`."""
        thr = products[0].get_slice(t.thread)
        of_keys = self.traits.keys._replace(columns=heads.columns)
        a = products[0].make_fragment_A(thr.partition_A(operand(self.traits.dtype, queries, Int32(0), heads)))
        b = products[0].make_fragment_B(thr.partition_B(operand(self.traits.dtype, keys, Int32(0), of_keys)))
        for k in cutlass.range_constexpr(columns.first // 16, columns.end // 16):
            product = products[0] if const_expr(k == 0) else products[1]
            cute.gemm(product, acc, a[None, None, k], b[None, None, k], acc)

    def make_dq(self, mma: Mma, widths: tuple[int, ...], t: ThreadIndex) -> list[cute.Tensor]:
        """Accumulators of neighbouring parts of dQ, with zeros."""
        parts = []
        for width in widths:
            products = mma.wide_dq if width == WIDE else mma.dq
            shape = products.get_slice(t.thread).partition_shape_C((TILE_HEADS, width))
            parts.append(cute.make_rmem_tensor(shape, Float32))
            parts[-1].fill(0.0)
        return parts

    def issue_dq(
        self, dq: list[cute.Tensor], mma: Mma, widths: tuple[int, ...], first: Int32, shared: Shared, t: ThreadIndex
    ) -> None:
        """Issue dQ += dS K for parts of these widths from column `first` on."""
        block = self.traits.keys
        for acc, width in zip(dq, widths, strict=True):
            products = mma.wide_dq if width == WIDE else mma.dq
            thr = products.get_slice(t.thread)
            offset = first * (block.pitch * self.traits.element_bytes)
            keys = transposed(operand(self.traits.dtype, shared.keys, offset, block._replace(columns=width)))
            scores = operand(self.traits.dtype, shared.ds, Int32(0), self.traits.scores)
            a = products.make_fragment_A(thr.partition_A(scores))
            b = products.make_fragment_B(thr.partition_B(keys))
            for k in range(BLOCK // 16):
                cute.gemm(products, acc, a[None, None, k], b[None, None, k], acc)
            first = first + width

    @cute.jit
    def issue_keys(
        self,
        acc: cute.Tensor,
        products: cutlass.Constexpr[tuple[cute.TiledMma, cute.TiledMma]],
        scores: cute.Pointer,
        queries: cute.Pointer,
        column: Int32,
        t: ThreadIndex,
    ):
        """Issue scores^T queries, a part of dKV, for the chunk of columns from `column` on."""
        thr = products[0].get_slice(t.thread)
        columns = Block(TILE_HEADS, self.traits.chunk_columns, COLUMN_TILE, TILE_HEADS)
        weights = transposed(operand(self.traits.dtype, scores, Int32(0), self.traits.scores))
        a = products[0].make_fragment_A(thr.partition_A(weights))
        offset = column * (TILE_HEADS * self.traits.element_bytes)
        of_queries = transposed(operand(self.traits.dtype, queries, offset, columns))
        b = products[0].make_fragment_B(thr.partition_B(of_queries))
        for k in cutlass.range_constexpr(TILE_HEADS // 16):
            product = products[0] if const_expr(k == 0) else products[1]
            cute.gemm(product, acc, a[None, None, k], b[None, None, k], acc)

    def store_dq(
        self, dq: list[cute.Tensor], widths: tuple[int, ...], d_q: cute.Tensor, first: Int32, item: Item,
        t: ThreadIndex,
    ) -> None:  # fmt: skip
        """Store parts of dQ of these widths from column `first` on."""
        for acc, width in zip(dq, widths, strict=True):
            self.store_part(acc, d_q, first, width, item, t)
            first = first + width

    @cute.jit
    def store_part(
        self, dq: cute.Tensor, d_q: cute.Tensor, first: Int32, columns: cutlass.Constexpr[int], item: Item,
        t: ThreadIndex,
    ):  # fmt: skip
        """Store `columns` columns of dQ from `first` on."""
        groups, quad = columns // 8, t.lane % 4
        # A lane's part of the accumulator as [2 rows, a quarter of the columns]: 2 of every 8 columns.
        values = cute.make_tensor(dq.iterator, cute.make_layout((2, (2, groups)), stride=(2, (1, 4))))
        for i in cutlass.range_constexpr(2):
            head = item.first_head + t.row + 8 * i
            at_row = (Int64(item.token) * item.heads + head) * self.traits.head_dim + first
            # The four lanes of a row exchange columns, so that of every four groups of 8 columns each lane has one
            # whole, and a row's stores fill whole sectors.
            line = cute.make_tensor(
                (d_q.iterator + (at_row + quad * 8)).align(16), cute.make_layout((8, groups // 4), stride=(1, 32))
            )
            pairs = cute.make_rmem_tensor((8,), self.traits.dtype)
            words = cute.recast_tensor(pairs, Int32)
            for g in cutlass.range_constexpr(groups // 4):
                for j in cutlass.range_constexpr(4):
                    pairs[2 * j] = values[i, 8 * g + 2 * j].to(self.traits.dtype)
                    pairs[2 * j + 1] = values[i, 8 * g + 2 * j + 1].to(self.traits.dtype)
                transpose_quad(words, quad)
                if head < item.heads:
                    cute.autovec_copy(pairs, line[None, g])
