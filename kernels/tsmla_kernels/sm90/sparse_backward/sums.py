"""The sums of the caches' gradients in global memory, to which the compute warpgroups add from their registers: float32,
or, if deterministic, int32.

A thread of an accumulator [BLOCK keys, columns] has two keys, 8 apart, and 2 of every 8 columns.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.sparse_backward.memory import COLUMN_TILE, Shared, Sums, ThreadIndex, Traits


class KeyRows(NamedTuple):
    """A thread's two keys of a block: the address of each key's sums, and the row, which is -1 if it does not exist.
    Deterministic: what the key's numbers are multiplied by before they are rounded to integers."""

    addresses: tuple[Int64, Int64]
    rows: tuple[Int32, Int32]
    factors: tuple[Float32, Float32]


class Adder:
    """Device code of a compute warpgroup that adds a block's gradient to the sums."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    @cute.jit
    def rows(self, sums: Sums, shared: Shared, place: Int32, t: ThreadIndex):
        """This thread's keys. `place`: the block's index among those whose rows are kept."""
        addresses, rows, factors = [], [], []
        for half in cutlass.range_constexpr(2):
            row = shared.rows[t.row + 8 * half, place]
            rows.append(row)
            addresses.append(sums.kv_sum.iterator.toint() + Int64(row) * (4 * self.traits.head_dim))
            factor = Float32(1.0)
            if const_expr(self.traits.config.deterministic):
                factor = shared.factors[t.row + 8 * half, place]
            factors.append(factor)
        return KeyRows((addresses[0], addresses[1]), (rows[0], rows[1]), (factors[0], factors[1]))

    @cute.jit
    def add(self, acc: cute.Tensor, keys: KeyRows, first: Int32, tiles: cutlass.Constexpr[int], t: ThreadIndex):
        """Add `tiles` column tiles, from tile `first` on."""
        for half in cutlass.range_constexpr(2):
            address = keys.addresses[half] + first * (COLUMN_TILE * 4)
            if const_expr(self.traits.config.deterministic):
                self.add_integers(acc, half, address, keys.rows[half], keys.factors[half], tiles, t)
            else:
                self.add_vectors(acc, half, address, keys.rows[half], tiles, t)

    @cute.jit
    def add_vectors(
        self,
        acc: cute.Tensor,
        half: cutlass.Constexpr[int],
        address: Int64,
        row: Int32,
        tiles: cutlass.Constexpr[int],
        t: ThreadIndex,
    ):
        """Add float32. Neighbouring lanes exchange pairs of columns, so that each has 4 of every 16 in a row."""
        odd = t.lane % 2 == 1
        address += t.lane % 2 * 32 + t.lane % 4 // 2 * 16
        for i in cutlass.range_constexpr(tiles * COLUMN_TILE // 16):
            a = [acc[8 * i + 2 * half + e] for e in range(2)]
            b = [acc[8 * i + 4 + 2 * half + e] for e in range(2)]
            sent = [cutlass.select_(odd, a[e], b[e]) for e in range(2)]
            received = [cute.arch.shuffle_sync_bfly(sent[e], offset=1) for e in range(2)]
            four = [cutlass.select_(odd, received[e], a[e]) for e in range(2)]
            four += [cutlass.select_(odd, b[e], received[e]) for e in range(2)]
            cute.arch.inline_ptx(
                "{ .reg .pred p; setp.ge.s32 p, {$r1}, 0; "
                f"@p red.relaxed.gpu.global.add.v4.f32 [{{$r0}} + {i * 64}], "
                "{{$r2}, {$r3}, {$r4}, {$r5}}; }",
                read_only_args=[address, row, *four],
            )

    @cute.jit
    def add_integers(
        self,
        acc: cute.Tensor,
        half: cutlass.Constexpr[int],
        address: Int64,
        row: Int32,
        factor: Float32,
        tiles: cutlass.Constexpr[int],
        t: ThreadIndex,
    ):
        """Add int32, two as one number of 64 bits: the second times 2^32, plus the first with its sign."""
        address += t.lane % 4 * 8
        for i in cutlass.range_constexpr(tiles * COLUMN_TILE // 8):
            two = [acc[4 * i + 2 * half + e] * factor for e in range(2)]
            cute.arch.inline_ptx(
                "{ .reg .pred p; .reg .b32 a, b, c; .reg .b64 v; setp.ge.s32 p, {$r1}, 0; "
                "cvt.rni.s32.f32 a, {$r2}; cvt.rni.s32.f32 b, {$r3}; shr.s32 c, a, 31; add.s32 b, b, c; "
                "mov.b64 v, {a, b}; "
                f"@p red.relaxed.gpu.global.add.u64 [{{$r0}} + {i * 32}], v; }}",
                read_only_args=[address, row, *two],
            )
