"""The sums of the caches' gradients in global memory, to which compute warpgroups add from their registers: float32, or
int32 if deterministic.

Of an accumulator [BLOCK keys, COLUMN_TILE columns] a thread has two keys, 8 apart, and 2 of every 8 columns. Additions
are fastest if a warp's instruction has 128 contiguous bytes of a key. So lanes that have different keys exchange
columns.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.sparse_backward.bounds import ROUNDER, ROUNDER_BITS, inverse_of, split_scale
from tsmla_kernels.sm90.sparse_backward.config import BLOCK
from tsmla_kernels.sm90.sparse_backward.memory import COLUMN_TILE, Shared, Sums, ThreadIndex, Traits
from tsmla_kernels.sm90.warp import transpose_quad


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
        place: Int32,
        column: Int32,
        t: ThreadIndex,
    ):
        """Add a chunk of columns, from `column` on."""
        for tile in cutlass.range_constexpr(self.traits.chunk_columns // COLUMN_TILE):
            base = sums.kv_sum.iterator.toint() + (column + tile * COLUMN_TILE) * 4
            part = cute.make_tensor(acc.iterator + tile * (BLOCK * COLUMN_TILE // 128), cute.make_layout(16))
            for half in cutlass.range_constexpr(2):
                if const_expr(self.traits.config.deterministic):
                    self.carry(part, half, sums, shared, place, column + tile * COLUMN_TILE, t)
                    self.add_integers(part, half, base, shared, place, t)
                else:
                    self.add_floats(part, half, base, shared, place, t)

    @cute.jit
    def add_floats(
        self,
        acc: cute.Tensor,
        half: cutlass.Constexpr[int],
        base: Int64,
        shared: Shared,
        place: Int32,
        t: ThreadIndex,
    ):
        """Add one of a thread's two keys: two lanes exchange halves of the columns of two neighbouring keys, so that 8
        lanes have a key's 32 columns, each two pairs of them, 8 columns apart. kv_sum has this order
        (DESIGN.md)."""
        upper = t.lane // 4 % 2 == 1
        low = [acc[4 * j + 2 * half + e] for j in range(2) for e in range(2)]
        high = [acc[4 * (2 + j) + 2 * half + e] for j in range(2) for e in range(2)]
        received = [
            cute.arch.shuffle_sync_bfly(cutlass.select_(upper, one, other), offset=4)
            for one, other in zip(low, high, strict=True)
        ]
        even_key = [cutlass.select_(upper, other, one) for one, other in zip(low, received, strict=True)]
        odd_key = [cutlass.select_(upper, one, other) for one, other in zip(high, received, strict=True)]
        base += t.lane % 8 * 16
        keys = t.thread // 32 * 16 + 8 * half + t.lane // 8 * 2
        for i in cutlass.range_constexpr(2):
            row = shared.rows[keys + i, place]
            cute.arch.inline_ptx(
                "{ .reg .pred p; .reg .b64 l; setp.ge.s32 p, {$r1}, 0; mov.b64 l, 0x14F0000000000000; "
                "@p red.relaxed.gpu.global.add.L2::cache_hint.v4.f32 [{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}}, l; }",
                read_only_args=[
                    base + Int64(row) * (4 * self.traits.head_dim),
                    row,
                    *(even_key if const_expr(i == 0) else odd_key),
                ],
            )

    @cute.jit
    def carry(
        self,
        acc: cute.Tensor,
        half: cutlass.Constexpr[int],
        sums: Sums,
        shared: Shared,
        place: Int32,
        column: Int32,
        t: ThreadIndex,
    ):
        """If a number of one of a thread's two keys is not below the key's reach, take the multiples of the reach off
        the numbers, and add them to kv_carry. Numbers that are not finite have a key whose scale says so."""
        _, reach = split_scale(shared.scales[t.row + 8 * half, place])
        most = Float32(0.0)
        for i in cutlass.range_constexpr(8):
            most = cute.arch.inline_ptx(
                "{ .reg .f32 a; abs.f32 a, {$r1}; max.NaN.f32 {$w0}, {$r0}, a; }",
                write_only_types=[Float32], read_only_args=[most, acc[i // 2 * 4 + 2 * half + i % 2]],
            )  # fmt: skip
        if not (most < reach):
            row = shared.rows[t.row + 8 * half, place]
            first = sums.kv_carry.iterator.toint() + (column + t.lane % 4 * 2) * 4
            first += Int64(row) * (4 * self.traits.head_dim)
            inverse = inverse_of(reach)
            for j in cutlass.range_constexpr(4):
                for e in cutlass.range_constexpr(2):
                    at = 4 * j + 2 * half + e
                    times = acc[at] * inverse
                    whole = cute.arch.inline_ptx(
                        "cvt.rni.s32.f32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[times]
                    )
                    acc[at] = (times - Float32(whole)) * reach
                    if whole != 0 and row >= 0:
                        cute.arch.inline_ptx(
                            "red.relaxed.gpu.global.add.u32 [{$r0}], {$r1};",
                            read_only_args=[first + (8 * j + e) * 4, whole],
                        )

    @cute.jit
    def add_integers(
        self,
        acc: cute.Tensor,
        half: cutlass.Constexpr[int],
        base: Int64,
        shared: Shared,
        place: Int32,
        t: ThreadIndex,
    ):
        """Add one of a thread's two keys as integers: four lanes transpose 4 x 4 pairs of columns of four keys."""
        quarter = t.lane // 4 % 4  # the lane's key among four; after the transpose, its group of 8 columns
        base += (quarter * 8 + t.lane % 4 * 2) * 4
        low, high = (cute.make_rmem_tensor((4,), Int32) for _ in range(2))
        factor, _ = split_scale(shared.scales[t.row + 8 * half, place])
        for j in cutlass.range_constexpr(4):
            first, second = (acc[4 * j + 2 * half + e] for e in range(2))
            low[j], high[j] = self.integers(first * factor, second * factor)
        transpose_quad(low, quarter, 4)
        transpose_quad(high, quarter, 4)
        keys = t.thread // 32 * 16 + 8 * half + t.lane // 16 * 4
        for i in cutlass.range_constexpr(4):
            row = shared.rows[keys + i, place]
            cute.arch.inline_ptx(
                "{ .reg .pred p; .reg .b64 v; setp.ge.s32 p, {$r1}, 0; mov.b64 v, {{$r2}, {$r3}}; "
                "@p red.relaxed.gpu.global.add.u64 [{$r0}], v; }",
                read_only_args=[base + Int64(row) * (4 * self.traits.head_dim), row, low[i], high[i]],
            )

    @cute.jit
    def integers(self, first: Float32, second: Float32):
        """Two numbers rounded to integers, as the words of one integer of 64 bits: the second times 2^32, plus the
        first with its sign."""
        low, high = ((x + ROUNDER).bitcast(Int32) - ROUNDER_BITS for x in (first, second))
        return low, high + (low >> 31)
