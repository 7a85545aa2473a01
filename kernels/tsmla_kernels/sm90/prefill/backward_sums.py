"""The sums of dq in global memory: how a warp adds what it computed, asynchronously, and in which order.

A warp copies eight query rows of a warpgroup's columns to its own part of shared memory, and a bulk reduction adds them
from there: the warp goes on. Such a block lies in global memory as it does in shared memory (`dq_position`).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.prefill.backward_config import BLOCK_ROWS, Q_ROWS
from tsmla_kernels.sm90.prefill.backward_memory import COMPUTE_WARPS, Shared, Sums, ThreadIndex, Tile, Traits
from tsmla_kernels.sm90.warp import WarpHelpers


def dq_position(row: int, column: int) -> int:
    """Where in a block of dq_sum, BLOCK_ROWS rows of a warpgroup's columns, an element lies.

    A lane has columns 2q, 2q + 1, 2q + 8 and 2q + 9 of 16: they lie side by side, so that a row's four lanes store 64
    bytes. Odd rows swap neighbouring sixteens: the two rows that eight lanes store meet in no bank.
    """
    sixteen, within = column // 16 ^ row % 2, column % 16
    return row * 96 + sixteen * 16 + (within % 8) // 2 * 4 + within // 8 * 2 + within % 2


class QuerySums(WarpHelpers):
    """Device code of a compute warp that adds to dq's sums."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits
        self.block_bytes = BLOCK_ROWS * traits.dq_columns * 4

    @cute.jit
    def add(self, sums: Sums, shared: Shared, dq: cute.Tensor, slot: Int32, tile: Int32, t: ThreadIndex):
        """Add a warp's sixteen rows of dq [2, columns] of a tile of queries."""
        warp = t.group * (COMPUTE_WARPS // 2) + t.thread // 32
        count = self.traits.staged_blocks
        staging = shared.dq.iterator.toint() + warp * (count * self.block_bytes)
        odd = (t.lane // 4) % 2
        row = staging + (t.lane // 4) * (self.traits.dq_columns * 4) + (t.lane % 4) * 16
        targets = [row + 64 * odd, row + 64 * (odd ^ 1)]
        for first in cutlass.range_constexpr(0, 2, count):
            if t.lane == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(count):
                for c in cutlass.range_constexpr(self.traits.dq_columns // 16):
                    values = [dq[first + i, 4 * c + j] for j in range(4)]
                    self.store_four(targets[c % 2], i * self.block_bytes + c // 2 * 128, values)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            if const_expr(first == 0):
                self.await_turn(sums, shared, slot, tile, t)
            if t.lane == 0:
                self.reduce_blocks(sums, shared, staging, first, slot, tile, t)

    @cute.jit
    def reduce_blocks(
        self,
        sums: Sums,
        shared: Shared,
        staging: Int32,
        first: cutlass.Constexpr,
        slot: Int32,
        tile: Int32,
        t: ThreadIndex,
    ):
        """One lane: what the warp has in shared memory, its block `first` and those after it, less what is past the
        request's end."""
        count, warp = self.traits.staged_blocks, t.thread // 32
        rows = shared.tiles[Tile.ROWS, slot] - tile * Q_ROWS - warp * 2 * BLOCK_ROWS - first * BLOCK_ROWS
        block = shared.tiles[Tile.FIRST_BLOCK, slot] + tile * (Q_ROWS // BLOCK_ROWS) + warp * 2 + first
        line = (Int64(shared.tiles[Tile.HEAD, slot]) * 2 + t.group) * sums.dq_sum.shape[2] + block
        size = cutlass.min((rows + BLOCK_ROWS - 1) // BLOCK_ROWS, count) * self.block_bytes
        if rows > 0:
            cute.arch.inline_ptx(
                "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
                read_only_args=[sums.dq_sum.iterator.toint() + line * self.block_bytes, staging, size],
            )
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def complete(self, t: ThreadIndex):
        """All that this warp added is in the sums: shared memory may go."""
        if t.lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    def store_four(self, address: Int32, offset: int, values: list[Float32]):
        """Four float32 to shared memory, `offset` bytes from an address."""
        cute.arch.inline_ptx(
            f"st.shared.v4.f32 [{{$r0}} + {offset}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
            read_only_args=[address, *values],
        )

    # ---- deterministic: the order

    @cute.jit
    def turn(self, sums: Sums, shared: Shared, slot: Int32, tile: Int32, t: ThreadIndex):
        """The address of this warp's counter of a tile of dq."""
        terms = shared.tiles[Tile.FIRST_TERMS, slot] + tile
        line = Int64(shared.tiles[Tile.HEAD, slot]) * sums.turns.shape[1] + terms
        return sums.turns.iterator.toint() + (line * 8 + t.group * 4 + t.thread // 32) * 4

    @cute.jit
    def await_turn(self, sums: Sums, shared: Shared, slot: Int32, tile: Int32, t: ThreadIndex):
        """Wait until all tiles of smaller keys are in the sums. They were claimed before this one, and every
        CTA runs, so that they get there."""
        if const_expr(self.traits.deterministic):
            counter, order = self.turn(sums, shared, slot, tile, t), shared.tiles[Tile.ORDER, slot]
            cute.arch.inline_ptx(
                "{ .reg .pred p; .reg .b32 n; AGAIN: ld.acquire.gpu.global.b32 n, [{$r0}];"
                " setp.ne.s32 p, n, {$r1}; @p bra AGAIN; fence.proxy.async; }",
                read_only_args=[counter, order],
            )
            cute.arch.sync_warp()

    @cute.jit
    def pass_turn(self, sums: Sums, shared: Shared, slot: Int32, tile: Int32, t: ThreadIndex):
        """Once all that this warp added is in the sums, the tile of the next keys may add."""
        if const_expr(self.traits.deterministic):
            if t.lane == 0:
                counter, order = self.turn(sums, shared, slot, tile, t), shared.tiles[Tile.ORDER, slot]
                cute.arch.cp_async_bulk_wait_group(0, read=False)
                cute.arch.inline_ptx(
                    "fence.proxy.async; fence.acq_rel.gpu; st.release.gpu.global.b32 [{$r0}], {$r1};",
                    read_only_args=[counter, order + 1],
                )
            cute.arch.sync_warp()
