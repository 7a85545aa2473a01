"""The float32 sums in global memory of dq and of the shared rope columns' gradient: where each value lies, and, unless
the config is wide, which warp adds it.

If the config is wide, warps add from registers (wide_dq.py), dq in the order of `wide_sum_position`. Else a
compute warp stores 16 rows of its warpgroup's columns to shared memory and goes on. A reducer warp, one for each
compute warpgroup, adds the values of the four warps with one bulk reduction. The values have the same order
(`sum_position`) in shared and in global memory.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from tsmla_kernels.sm90.prefill.backward.config import BLOCK_ROWS, Q_ROWS, ROPE_PARTIALS
from tsmla_kernels.sm90.prefill.backward.memory import GROUP_KEYS, NO_HEAD, TILE_SLOTS, Shared, Sums, Tile, Traits
from tsmla_kernels.sm90.prefill.memory import ThreadIndex


def sum_position(row: int, column: int, columns: int) -> int:
    """The index that the sum of (row, column) has in an array with `columns` sums in a row.

    In an accumulator lane q of a row has columns 2q, 2q + 1, 2q + 8 and 2q + 9 of each 16. These lie side by side, so
    that the four lanes of a row store 64 bytes. Odd rows swap neighbouring groups of 16 columns, so that the two rows
    that eight lanes store together use different banks.
    """
    sixteen, within = column // 16 ^ row % 2, column % 16
    return row * columns + sixteen * 16 + (within % 8) // 2 * 4 + within // 8 * 2 + within % 2


def wide_sum_position(row: int, column: int) -> int:
    """The index that the sum of (row, column) has in a block of BLOCK_ROWS rows if warps add it from registers:
    of each 16 columns the rows lie one after another, so that a warp adds 512 bytes side by side."""
    return column // 16 * (16 * BLOCK_ROWS) + row * 16 + sum_position(0, column % 16, 16)


class SumStaging:
    """Device code of a compute warp that stores values for its reducer warp."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    @cute.jit
    def put(
        self,
        shared: Shared,
        values: cute.Tensor,
        columns: cutlass.Constexpr[range],
        first_row: Int32,
        phase: Int32,
        t: ThreadIndex,
    ) -> None:
        """Store a warp's 16 rows of `columns` of an accumulator [2, columns], once the buffer is free.

        Only the parity of `first_row` counts. It must be that of the first row's index in global memory, because
        `sum_position` depends on it.
        """
        row_bytes = 4 * len(columns)
        warp = shared.sums.memory.toint() + t.group * self.traits.staging_bytes + t.thread // 32 * (16 * row_bytes)
        row = warp + t.lane // 4 * row_bytes + t.lane % 4 * 16
        odd = (t.lane // 4 + first_row) % 2
        targets = [row + 64 * odd, row + 64 * (odd ^ 1)]
        cute.arch.mbarrier_wait(shared.sums.empty + t.group, phase ^ 1)
        for i in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(len(columns) // 16):
                four = [values[i, 4 * (columns.start // 16 + c) + j] for j in range(4)]
                offset = i * BLOCK_ROWS * row_bytes + c // 2 * 128
                cute.arch.inline_ptx(
                    f"st.shared.v4.f32 [{{$r0}} + {offset}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
                    read_only_args=[targets[c % 2], *four],
                )
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.sums.full + t.group)


class Reducer:
    """Device code of a reducer warp: one lane adds the values that the warps of compute warpgroup `group` stored."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    @cute.jit
    def reduce_tiles(self, sums: Sums, shared: Shared, group: Int32) -> None:
        """Add the values of one tile of keys after another: dq of every step, then the shared rope columns of dk."""
        block_bytes = BLOCK_ROWS * self.traits.dq_columns * 4
        count, tiles = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(shared.k.full, tiles)
        head = shared.tiles[Tile.HEAD, tiles]
        while head != NO_HEAD:
            slot = tiles % TILE_SLOTS
            steps, rows = shared.tiles[Tile.STEPS, slot], shared.tiles[Tile.ROWS, slot]
            order = shared.tiles[Tile.ORDER, slot]
            line = (Int64(head) * 2 + group) * sums.dq_sum.shape[2] + shared.tiles[Tile.FIRST_BLOCK, slot]
            target = sums.dq_sum.iterator.toint() + line * block_bytes
            turn = self.turn(sums.turns, head, shared.tiles[Tile.FIRST_TERMS, slot], group)
            keys = shared.tiles[Tile.KEYS, slot] - group * GROUP_KEYS
            first_key, rope_turn = shared.tiles[Tile.FIRST_KEY, slot], shared.tiles[Tile.ROPE_TURN, slot]
            cute.arch.mbarrier_arrive(shared.k.empty)  # the descriptor may be overwritten
            for step in cutlass.range(steps, unroll=1):
                tile = self.traits.query_tile(step, steps)
                blocks = cutlass.min((rows - tile * Q_ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS, Q_ROWS // BLOCK_ROWS)
                at = target + Int64(tile) * (Q_ROWS // BLOCK_ROWS * block_bytes)
                self.add(shared, group, count, at, blocks * block_bytes, turn + Int64(tile) * 8, order)
                count += 1
            if const_expr(self.traits.rope_columns > 0):
                partial, before = Int32(0), head
                if const_expr(self.traits.deterministic):
                    partial, before = head % ROPE_PARTIALS, head // ROPE_PARTIALS
                row_bytes = self.traits.rope_columns * 4
                row = Int64(partial) * sums.rope_sum.shape[1] + first_key + group * GROUP_KEYS
                size = cutlass.min(cutlass.max(keys, 0), GROUP_KEYS) * row_bytes
                if steps == 0:
                    size = Int32(0)  # no query sees these keys, for any head: nothing to add, and no turn to wait for
                at = sums.rope_sum.iterator.toint() + row * row_bytes
                self.add(shared, group, count, at, size, self.turn(sums.rope_turns, partial, rope_turn, group), before)
                count += 1
            tiles += 1
            cute.arch.mbarrier_wait(shared.k.full, tiles & 1)
            head = shared.tiles[Tile.HEAD, tiles % TILE_SLOTS]
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def turn(self, turns: cute.Tensor, line: Int32, tile: Int32, group: Int32) -> Int64:
        """The address in `turns` of the counter for half `group` of tile `tile`; `line` is a head or a partial sum."""
        return turns.iterator.toint() + ((Int64(line) * turns.shape[1] + tile) * 2 + group) * 4

    @cute.jit
    def add(
        self, shared: Shared, group: Int32, count: Int32, target: Int64, size: Int32, turn: Int64, order: Int32
    ) -> None:
        """Add `size` bytes of the buffer to the sums at `target`.

        If deterministic, first wait until `order` other tiles have added to these sums. This wait ends, however few
        CTAs run at a time: the other tiles have lower indices, and CTAs claim tiles in ascending order. So running CTAs
        have claimed all of them already, and the unfinished tile with the lowest index waits for no other tile. A count
        above `order` also ends the wait: if wrong offsets let requests overlap, the requests share counters.
        """
        source = shared.sums.memory.toint() + group * self.traits.staging_bytes
        cute.arch.mbarrier_wait(shared.sums.full + group, count & 1)
        if size > 0:
            if const_expr(self.traits.deterministic):
                cute.arch.inline_ptx(
                    "{ .reg .pred p; .reg .b32 n; AGAIN: ld.acquire.gpu.global.b32 n, [{$r0}];"
                    " setp.lt.s32 p, n, {$r1}; @p bra AGAIN; fence.proxy.async.global; }",
                    read_only_args=[turn, order],
                )
            cute.arch.inline_ptx(
                "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
                read_only_args=[target, source, size],
            )
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.mbarrier_arrive(shared.sums.empty + group)
        if const_expr(self.traits.deterministic):
            if size > 0:
                cute.arch.cp_async_bulk_wait_group(0, read=False)
                cute.arch.inline_ptx(
                    "fence.proxy.async.global; red.release.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[turn]
                )
