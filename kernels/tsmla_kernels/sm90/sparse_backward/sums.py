"""The sums of the caches' gradients in global memory, to which compute warpgroups add from their registers: float32, or
int32 if deterministic.

A thread of an accumulator [BLOCK keys, COLUMN_TILE columns] has two keys, 8 apart, and 2 of every 8 columns. Additions
are fastest if a warp adds 128 contiguous bytes of a key at once. So four lanes exchange their columns of four keys.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.sparse_backward.memory import COLUMN_TILE, Shared, Sums, ThreadIndex, Traits
from tsmla_kernels.sm90.warp import transpose_quad


class Place(NamedTuple):
    """A block whose rows are kept: its index among these, and -1 if nothing is to be added, otherwise 0."""

    index: Int32
    hidden: Int32


class Adder:
    """Device code of a compute warpgroup that adds a block's gradient to the sums."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    @cute.jit
    def add(
        self,
        acc: cute.Tensor,
        sums: Sums,
        shared: Shared,
        place: Place,
        chunk: cutlass.Constexpr[int],
        t: ThreadIndex,
    ):
        """Add a chunk of this warpgroup's half of the columns."""
        lane, width = t.lane, self.traits.dq_columns
        quarter = lane // 4 % 4  # which of four neighbouring keys a lane has, then which of four groups of 8 columns
        base = sums.kv_sum.iterator.toint() + (t.group * width + (chunk * COLUMN_TILE + quarter * 8 + lane % 4 * 2)) * 4
        for half in cutlass.range_constexpr(2):
            low, high = (cute.make_rmem_tensor((4,), Int32) for _ in range(2))
            factor = Float32(1.0)
            if const_expr(self.traits.config.deterministic):
                factor = shared.factors[t.row + 8 * half, place.index]
            for j in cutlass.range_constexpr(4):
                first, second = (acc[4 * j + 2 * half + e] for e in range(2))
                if const_expr(self.traits.config.deterministic):
                    low[j], high[j] = self.integers(first * factor, second * factor)
                else:
                    low[j], high[j] = first.bitcast(Int32), second.bitcast(Int32)
            transpose_quad(low, quarter, 4)
            transpose_quad(high, quarter, 4)
            keys = t.thread // 32 * 16 + 8 * half + lane // 16 * 4
            for i in cutlass.range_constexpr(4):
                row = shared.rows[keys + i, place.index] | place.hidden
                address = base + Int64(row) * (4 * self.traits.head_dim)
                self.reduce(address, row, low[i], high[i])

    @cute.jit
    def integers(self, first: Float32, second: Float32):
        """Two numbers rounded to integers, as the words of one integer of 64 bits: the second times 2^32, plus the
        first with its sign."""
        low = cute.arch.inline_ptx("cvt.rni.s32.f32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[first])
        high = cute.arch.inline_ptx("cvt.rni.s32.f32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[second])
        return low, high + (low >> 31)

    @cute.jit
    def reduce(self, address: Int64, row: Int32, first: Int32, second: Int32):
        """Add two words to the sums at `address`, if the row exists."""
        guard = "{ .reg .pred p; setp.ge.s32 p, {$r1}, 0; "
        if const_expr(self.traits.config.deterministic):
            cute.arch.inline_ptx(
                guard + ".reg .b64 v; mov.b64 v, {{$r2}, {$r3}}; @p red.relaxed.gpu.global.add.u64 [{$r0}], v; }",
                read_only_args=[address, row, first, second],
            )
        else:
            cute.arch.inline_ptx(
                guard + "@p red.relaxed.gpu.global.add.v2.f32 [{$r0}], {{$r2}, {$r3}}; }",
                read_only_args=[address, row, first.bitcast(Float32), second.bitcast(Float32)],
            )
