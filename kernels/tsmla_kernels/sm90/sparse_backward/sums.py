"""The sums of the caches' gradients in global memory (float32; int32 if deterministic): how a compute warpgroup hands
over its numbers, and the reducer warps that add them.

A compute warpgroup has the gradient of a block transposed, [columns, keys]. It stores up to CHUNK_TILES column tiles of
all keys to shared memory, a row for each key, and goes on. Its reducer warp adds each key's row to that key's sums, by
a bulk reduction per key.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.sparse_backward.config import BLOCK, LATENT_DIM
from tsmla_kernels.sm90.sparse_backward.memory import (
    CHUNK_TILES,
    COLUMN_TILE,
    GROUPS,
    SLOTS_KEPT,
    SUM_PITCH,
    Item,
    Shared,
    Sums,
    ThreadIndex,
    Traits,
    leave,
)

GROUP_COLUMNS = LATENT_DIM // GROUPS
GROUP_CHUNKS = GROUP_COLUMNS // (CHUNK_TILES * COLUMN_TILE)
PITCH_BYTES = 4 * SUM_PITCH


class SumStaging:
    """Device code of a compute warpgroup that stores numbers for its reducer warp."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    @cute.jit
    def put(self, shared: Shared, tiles: list[cute.Tensor], count: Int32, place: Int32, t: ThreadIndex):
        """Store the warpgroup's accumulators of column tiles [COLUMN_TILE, BLOCK], once the buffer is free. `count`:
        how many calls came before. `place`: the block's index among those kept. Deterministic: store integers.

        In an accumulator a lane has, of every 8 keys, 2 keys in each of 2 columns that are 8 apart.
        """
        base = shared.sums.toint() + t.group * (BLOCK * PITCH_BYTES)
        base += (t.lane % 4 * 2) * PITCH_BYTES + (t.thread // 32 * 16 + t.lane // 4) * 4
        factors = cute.make_rmem_tensor((BLOCK // 4,), Float32)
        if const_expr(self.traits.config.deterministic):
            for i in cutlass.range_constexpr(BLOCK // 8):
                for e in cutlass.range_constexpr(2):
                    factors[2 * i + e] = shared.factors[8 * i + t.lane % 4 * 2 + e, place]
        cute.arch.mbarrier_wait(shared.sums_empty + t.group, (count + 1) & 1)
        for tile in cutlass.range_constexpr(len(tiles)):
            for i in cutlass.range_constexpr(BLOCK // 8):
                for half in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        offset = (8 * i + e) * PITCH_BYTES + (tile * COLUMN_TILE + half * 8) * 4
                        number = tiles[tile][4 * i + 2 * half + e]
                        if const_expr(self.traits.config.deterministic):
                            rounded = f"cvt.rni.s32.f32 n, {{$r1}}; st.shared.b32 [{{$r0}} + {offset}], n;"
                            cute.arch.inline_ptx(
                                f"{{ .reg .b32 n; {rounded} }}", read_only_args=[base, number * factors[2 * i + e]]
                            )
                        else:
                            cute.arch.inline_ptx(
                                f"st.shared.f32 [{{$r0}} + {offset}], {{$r1}};", read_only_args=[base, number]
                            )
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        leave(shared.sums_full + t.group)


class Reducer:
    """Device code of a reducer warp, which adds what compute warpgroup `group` stored. Lane i has key i of a block."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    @cute.jit
    def run(self, sums: Sums, shared: Shared, item: Item, group: Int32):
        """Add the chunks of one block after another."""
        lane = cute.arch.lane_idx()
        source = shared.sums.toint() + group * (BLOCK * PITCH_BYTES) + lane * PITCH_BYTES
        count = Int32(0)
        for block in cutlass.range(item.blocks, unroll=1):
            row, target = Int32(-1), Int64(0)
            for chunk in cutlass.range_constexpr(GROUP_CHUNKS):
                cute.arch.mbarrier_wait(shared.sums_full + group, count & 1)
                if const_expr(chunk == 0):
                    row = shared.rows[lane, block % SLOTS_KEPT]
                    first = Int64(row) * self.traits.head_dim + group * GROUP_COLUMNS
                    target = sums.kv_sum.iterator.toint() + first * 4
                offset = chunk * CHUNK_TILES * COLUMN_TILE * 4
                self.add(shared, source, target + offset, CHUNK_TILES, row, group)
                count += 1
            if const_expr(self.traits.rope_columns > 0):
                if group == 0:
                    cute.arch.mbarrier_wait(shared.sums_full + group, count & 1)
                    self.add(shared, source, target + LATENT_DIM * 4, 1, row, group)
                    count += 1
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def add(
        self, shared: Shared, source: Int32, target: Int64, tiles: cutlass.Constexpr[int], row: Int32, group: Int32
    ):
        """Add `tiles` column tiles of the lane's key, and release the buffer."""
        kind = "s32" if self.traits.config.deterministic else "f32"
        if row >= 0:
            cute.arch.inline_ptx(
                f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.{kind} [{{$r0}}], [{{$r1}}], "
                f"{tiles * COLUMN_TILE * 4};",
                read_only_args=[target, source],
            )
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.mbarrier_arrive(shared.sums_empty + group)
