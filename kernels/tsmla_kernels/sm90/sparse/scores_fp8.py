"""S^T = K Q^T of the sparse kernel for queries of e4m3: fp8 WGMMA on the keys as they lie in the cache.

If rows have scales, each group of columns with one scale has a separate sum. This sum is multiplied in f32 by its keys'
scales when it is added to the other groups' sums. Columns of bf16 keep their 16 bits. If rows have no scales, the
tensor cores add up all columns. Softmax and P are the same as for other queries.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, SmemLayoutAtomKind

from tsmla_kernels.sm90.latent.memory import Shared
from tsmla_kernels.sm90.latent.shape import ROWS
from tsmla_kernels.sm90.sparse.config import SparseConfig
from tsmla_kernels.sm90.sparse.memory import Held, QueryOperands, QueryTile
from tsmla_kernels.sm90.sparse.query import Fp8Query
from tsmla_kernels.sm90.sparse.scores import SparseScores
from tsmla_kernels.sm90.sparse.stages import Stages
from tsmla_kernels.sm90.warp import load_matrices

GROUP = 128  # columns of e4m3 whose products are issued together; V3.2's rows have one scale for them
FRAGMENTS = GROUP // 32  # fragments (16 keys, 32 bytes) of a group, which a warp reads together


class Columns(NamedTuple):
    """Columns whose products are issued together: the offsets of their fragments in a key's row, the index of the first
    step of Q that they are multiplied by, and whether they are bf16."""

    fragments: list[int]
    first_step: int
    bf16: bool


def columns_of(config: SparseConfig) -> list[Columns]:
    """The columns of a key in the order in which they are multiplied."""
    narrow = [32 * g for g in range(config.e4m3_columns // 32)]
    groups = [Columns(narrow[n : n + FRAGMENTS], n, False) for n in range(0, len(narrow), FRAGMENTS)]
    steps = (config.head_dim - config.e4m3_columns) // 16
    return groups + ([Columns([config.rope_offset + 32 * g for g in range(steps)], 0, True)] if steps else [])


class SparseScoresFp8(SparseScores):
    """K Q^T of gathered keys with queries of e4m3.

    Attributes:
      columns: the result of columns_of.
      scaled: whether rows have scales. If they have, each entry of `columns` but the last has a sum of its own.
      buffers: how many sets of fragments fit into registers. With two, WGMMA reads one set while the other is loaded.
    """

    def __init__(self, config: SparseConfig, stages: Stages) -> None:
        super().__init__(config, stages)
        ring = self.ring
        self.query, self.k_dtype = Fp8Query(config, ring), ring.dtype
        self.columns = columns_of(config)
        self.scaled = config.scale_group > 0
        self.buffers = 1 if self.scaled and ring.p_rows == ROWS else 2  # two would spill with 64 rows and scales

    def query_operands(self, mma_qk: cute.TiledMma, q_place: Int32, t: Int32) -> QueryOperands:
        """The QueryOperands for the Q at `q_place`: mma_qk for e4m3 columns and a second MMA for bf16 columns. If no
        column is bf16, the second MMA is mma_qk, too."""
        t_q = self.query_operand(mma_qk, QueryTile(self.k_dtype, self.query.swizzle, self.depth), q_place, t)
        if not self.columns[-1].bf16:
            return QueryOperands(mma_qk, t_q, mma_qk, t_q)
        mma_16 = self.mma_of(cutlass.BFloat16)
        mma_16.set(Field.ACCUMULATE, True)
        tile = QueryTile(cutlass.BFloat16, SmemLayoutAtomKind.K_SW128, 64 * self.query.bf16_tiles)
        t_q_16 = self.query_operand(mma_16, tile, q_place + self.query.bf16_place, t)
        return QueryOperands(mma_qk, t_q, mma_16, t_q_16)

    def registers_of_keys(self, acc: cute.Tensor) -> tuple[cute.Tensor | None, cute.Tensor, cute.Tensor | None]:
        """`part`, `narrow` and `wide` of Held. `part` is None if rows have no scales; `wide` is always None."""
        narrow = cute.make_rmem_tensor((4, self.buffers * FRAGMENTS), Int32)
        return cute.make_rmem_tensor(acc.layout, Float32) if self.scaled else None, narrow, None

    @cute.jit
    def multiply(self, address: Int32, stored: Int32, previous: Int32, held: Held, shared: Shared):
        """Issue K Q^T of the stage at `address` into `acc`. Before the last products, let the value warps begin the
        previous block's P V."""
        here, scales, last = address + held.k_offset, address + held.scales_offset, len(self.columns) - 1
        self.read_columns(here, 0, held.narrow)
        for n in cutlass.range_constexpr(last + 1):
            if const_expr(n == last):
                # Let the value warps begin the previous block's P V, as in Scores16bit.
                self.ring.signal_if(stored, shared.ready, previous)
            self.issue(n, held)
            if const_expr(n < last):
                if const_expr(self.scaled):
                    self.read_factors(scales, n, held.factors)
                    if const_expr(self.buffers > 1):
                        self.read_columns(here, n + 1, held.narrow)
                    warpgroup.wait_group(0)
                    if const_expr(self.buffers == 1):
                        self.read_columns(here, n + 1, held.narrow)
                    self.add(n, held)
                else:
                    if const_expr(n > 0):
                        warpgroup.wait_group(1)
                    self.read_columns(here, n + 1, held.narrow)

    @cute.jit
    def read_columns(self, here: Int32, n: cutlass.Constexpr[int], narrow: cute.Tensor):
        """Read entry n of `columns` of this warp's keys."""
        for i in cutlass.range_constexpr(len(self.columns[n].fragments)):
            fragment = narrow[None, self.buffer(n, i)]
            fragment[0], fragment[1], fragment[2], fragment[3] = load_matrices(here + self.columns[n].fragments[i])

    def buffer(self, n: int, i: int) -> int:
        """The place in `narrow` of fragment i of entry n of `columns`."""
        return n % self.buffers * FRAGMENTS + i

    @cute.jit
    def issue(self, n: cutlass.Constexpr[int], held: Held):
        """Issue the products of entry n of `columns`."""
        columns, first, last = self.columns[n], n == 0, n + 1 == len(self.columns)
        into = held.part if const_expr(self.scaled and not last) else held.acc
        if const_expr(columns.bf16):
            mma, t_q, dtype, width = held.mma_16, held.t_q_16, cutlass.BFloat16, 16
        else:
            mma, t_q, dtype, width = held.mma_qk, held.t_q, self.k_dtype, 32
            mma.set(Field.ACCUMULATE, not self.scaled and not first)
        a_shape = mma.get_slice(held.place.thread).partition_shape_A((self.block, width))
        warpgroup.fence()
        for i in cutlass.range_constexpr(len(columns.fragments)):
            of_keys = cute.recast_ptr(held.narrow[None, self.buffer(n, i)].iterator, dtype=dtype)
            a = cute.make_tensor(of_keys, cute.make_layout(a_shape))
            cute.gemm(mma, into, a[None, None, 0], t_q[None, None, columns.first_step + i], into)
            mma.set(Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def add(self, n: cutlass.Constexpr[int], held: Held):
        """Add the sum of entry n of `columns`, multiplied by its keys' scales, to S^T."""
        by_rows = cute.make_layout((2, 2, self.p_rows // 8), stride=(1, 2, 4))
        s, part = (cute.make_tensor(x.iterator, by_rows) for x in (held.acc, held.part))
        for i in cutlass.range_constexpr(2):
            scale = held.factors[i].bitcast(Float32)
            for v in cutlass.range_constexpr(self.p_rows // 8):
                for e in cutlass.range_constexpr(2):
                    # An explicit fma: otherwise the compiler fuses the first group's multiplication with the second
                    # group's addition, and keeps both sums in registers.
                    if const_expr(n == 0):
                        s[e, i, v] = part[e, i, v] * scale
                    else:
                        s[e, i, v] = cute.math.fma(part[e, i, v], scale, s[e, i, v])
