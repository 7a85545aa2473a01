"""A compute warpgroup: its 64 rows of every tile, as one sequence of key blocks that tiles do not interrupt."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from tsmla_kernels.sm90.prefill.config import GROUP_ROWS
from tsmla_kernels.sm90.prefill.gemms import Gemms
from tsmla_kernels.sm90.prefill.memory import (
    TILE_SLOTS,
    WARPGROUP_THREADS,
    Barrier,
    Buffers,
    KernelTraits,
    Mma,
    Products,
    Results,
    Rows,
    Scale,
    Shared,
    Stage,
    ThreadIndex,
    Tile,
    release,
)
from tsmla_kernels.sm90.prefill.softmax import LaggingSoftmax, Softmax
from tsmla_kernels.sm90.warp import LN_2, LOG2_E, LOWEST, WarpHelpers


class Warpgroup(NamedTuple):
    """What a compute warpgroup works with. `next_rows` has a maximum and a sum of its own: the next tile's."""

    shared: Shared
    thread: ThreadIndex
    products: Products
    rows: Rows
    next_rows: Rows
    results: Results
    out_scale: Float32


class Cursor(NamedTuple):
    """Where the warpgroup is in its sequence of key blocks. A tile's blocks go from the last to the first."""

    v_keys: Int32  # keys of the request from the first one of block `v` on; V's rows behind them must be zeroed
    v: Stage  # of the block whose P is ready, and whose P V comes next
    k: Stage  # of the next block
    q_phase: Int32
    blocks: Int32  # of the tile; 0 after the last tile
    keys: Int32  # of the tile's request
    unmasked: Int32  # keys that all rows of the warpgroup see
    tile: Int32  # how many tiles come before this one


class Attention(WarpHelpers):
    """Device code of the compute warpgroups."""

    def __init__(self, traits: KernelTraits) -> None:
        self.traits = traits
        self.stages = traits.stages
        self.gemms = Gemms(traits)
        self.softmax = Softmax(traits)
        self.lagging_softmax = LaggingSoftmax(traits, self.softmax)

    @cute.jit
    def run(self, shared: Shared, mma: Mma, scales: cute.Tensor, results: Results, group: Int32):
        """All tiles of this CTA, for warpgroup `group`."""
        wg = self.set_up(shared, mma, scales, results, group)
        cute.arch.mbarrier_wait(shared.q.full + group, 0)
        blocks = self.uniform(shared.tiles[Tile.BLOCKS, 0])
        if blocks > 0:
            cursor = self.first_block(wg, blocks)
            while cursor.blocks > 0:
                cursor = self.finish_tile(wg, cursor)
            self.last_values(wg, cursor)

    @cute.jit
    def set_up(self, shared: Shared, mma: Mma, scales: cute.Tensor, results: Results, group: Int32):
        """The warpgroup's operands, accumulators and softmax state."""
        traits = self.traits
        t = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        lane = t % 32
        thread = ThreadIndex(group, t, lane, (t // 32) * 16 + lane // 4)
        scale = scales[Scale.LOGITS] * LOG2_E
        out_scale = scales[Scale.OUTPUT]
        products = self.gemms.operands(shared, mma, thread)
        rows = Rows(
            self.row_view(products.acc_s, traits.block),
            self.row_view(products.acc_o, traits.v_head_dim),
            cute.make_rmem_tensor((2,), Float32),
            cute.make_rmem_tensor((2,), Float32),
            cute.make_rmem_tensor((2,), Int32),
            scale,
        )
        next_rows = rows._replace(
            maximum=cute.make_rmem_tensor((2,), Float32), total=cute.make_rmem_tensor((2,), Float32)
        )
        rows.maximum.fill(LOWEST)
        rows.total.fill(0.0)
        return Warpgroup(shared, thread, products, rows, next_rows, results, out_scale)

    def row_view(self, accumulator: cute.Tensor, columns: int):
        """A lane's part of an accumulator as [its 2 rows, its columns]."""
        return cute.make_tensor(accumulator.iterator, cute.make_layout((2, (2, columns // 8)), stride=(2, (1, 4))))

    @cute.jit
    def first_block(self, wg: Warpgroup, blocks: Int32):
        """The first block of the first tile alone, up to its P; returns the cursor behind it."""
        shared, thread, products, rows = wg.shared, wg.thread, wg.products, wg.rows
        self.gemms.start_turns(thread.group)
        keys, unmasked = self.limits(wg, Int32(0))
        cute.arch.mbarrier_wait(shared.k.full, 0)
        self.gemms.scores(products, shared.k.memory, Int32(0))
        warpgroup.wait_group(0)
        release(shared.k.empty)
        n = blocks - 1
        if (n + 1) * self.traits.block > unmasked:
            self.softmax.mask(rows, n, thread.lane)
        self.softmax.update_maximum(rows)
        for i in cutlass.range_constexpr(2):
            self.softmax.exponentiate(rows, i)
        self.softmax.operand_p.write(products.acc_s, products.p_target)
        v_keys = keys - n * self.traits.block
        first = Stage(Int32(0), Int32(0))
        return Cursor(v_keys, first, self.following(first), Int32(0), blocks, keys, unmasked, Int32(0))

    @cute.jit
    def finish_tile(self, wg: Warpgroup, cursor: Cursor):
        """The tile's other blocks, and the next tile's first block; P of the tile's first block of keys is ready."""
        shared, group = wg.shared, wg.thread.group
        cursor = self.other_blocks(wg, cursor)
        v_keys = cursor.v_keys
        if cursor.blocks > 1:
            v_keys = cursor.keys
        # All scores of the tile are done, so Q may be replaced.
        if const_expr(not self.traits.fp8) or cursor.blocks == 1:
            release(shared.q.empty + group)
        q_phase = cursor.q_phase ^ 1
        cute.arch.mbarrier_wait(shared.q.full + group, q_phase)
        blocks = self.uniform(shared.tiles[Tile.BLOCKS, (cursor.tile + 1) % TILE_SLOTS])
        self.zero_rows(shared.v, cursor.v, v_keys, wg.thread)
        cursor = cursor._replace(blocks=blocks, v_keys=v_keys, q_phase=q_phase)
        k, v, keys, unmasked, tile = cursor.k, cursor.v, cursor.keys, cursor.unmasked, cursor.tile
        if blocks > 0:
            # Assigned one by one: the order of a branch's results decides which registers they get.
            started = self.start_tile(wg, cursor)
            k, v, v_keys = started.k, started.v, started.v_keys
            blocks, keys, unmasked = started.blocks, started.keys, started.unmasked
            tile = started.tile
        return Cursor(v_keys, v, k, q_phase, blocks, keys, unmasked, tile)

    @cute.jit
    def other_blocks(self, wg: Warpgroup, cursor: Cursor):
        """The tile's blocks after its first: those that need a mask come first, then those without one."""
        shared, thread, products, rows = wg.shared, wg.thread, wg.products, wg.rows
        masked = self.masked_blocks(cursor)
        for b in cutlass.range(masked, unroll=1):
            n = cursor.blocks - 2 - b
            self.zero_rows(shared.v, cursor.v, cursor.v_keys, thread)
            self.gemms.issue(shared, products, cursor.k, cursor.v, thread.group)
            release(shared.k.empty + cursor.k.index)
            self.release_q(shared.q.empty + thread.group, n)
            self.softmax.mask(rows, n, thread.lane)
            self.softmax.finish_block(products, rows, shared.v, cursor.v)
            v_keys = cursor.keys - n * self.traits.block
            cursor = cursor._replace(k=self.following(cursor.k), v=cursor.k, v_keys=v_keys)
        for b in cutlass.range(masked, cursor.blocks - 1, unroll=1):
            self.gemms.issue(shared, products, cursor.k, cursor.v, thread.group)
            release(shared.k.empty + cursor.k.index)
            self.release_q(shared.q.empty + thread.group, cursor.blocks - 2 - b)
            if const_expr(self.traits.fp8):
                self.lagging_softmax.finish_block(products, rows, shared.v, cursor.v.index)
            else:
                self.softmax.finish_block(products, rows, shared.v, cursor.v)
            cursor = cursor._replace(k=self.following(cursor.k), v=cursor.k)
        return cursor

    @cute.jit
    def start_tile(self, wg: Warpgroup, cursor: Cursor):
        """The next tile's first scores beside this tile's last values, then this tile's epilogue."""
        traits, shared, thread, products = self.traits, wg.shared, wg.thread, wg.products
        blocks, k = cursor.blocks, cursor.k
        keys, unmasked = self.limits(wg, (cursor.tile + 1) % TILE_SLOTS)
        skips = Int32(0)
        skipped = k
        if const_expr(traits.fp8 and traits.causal):
            # In a tile with more rows than a block has keys, the upper rows see nothing of the last block.
            if blocks > 1 and unmasked + GROUP_ROWS - 1 <= (blocks - 1) * traits.block:
                skips = Int32(1)
                blocks -= 1
                self.gemms.wait(shared.k.full + k.index, k.phase)
                release(shared.k.empty + k.index)
                k = self.following(k)
        n = blocks - 1
        self.gemms.issue(shared, products, k, cursor.v, thread.group)
        release(shared.k.empty + k.index)
        if const_expr(traits.fp8 and traits.causal):
            if skips == 1:
                self.gemms.wait(shared.v.full + skipped.index, skipped.phase)
                release(shared.v.empty + skipped.index)
        if (n + 1) * traits.block > unmasked:
            self.softmax.mask(wg.rows, n, thread.lane)
        wg.next_rows.maximum.fill(LOWEST)
        wg.next_rows.total.fill(0.0)
        self.softmax.update_maximum(wg.next_rows)
        for i in cutlass.range_constexpr(2):
            self.softmax.exponentiate(wg.next_rows, i)
        cute.arch.mbarrier_wait(shared.v.full + cursor.v.index, cursor.v.phase)  # as in `Softmax.finish_block`
        warpgroup.wait_group(0)
        release(shared.v.empty + cursor.v.index)
        self.softmax.operand_p.write(products.acc_s, products.p_target)
        self.store(wg, cursor)
        products.acc_o.fill(0.0)
        for i in cutlass.range_constexpr(2):
            wg.rows.maximum[i], wg.rows.total[i] = wg.next_rows.maximum[i], wg.next_rows.total[i]
        v_keys = keys - n * traits.block
        return Cursor(v_keys, k, self.following(k), cursor.q_phase, blocks, keys, unmasked, cursor.tile + 1)

    @cute.jit
    def last_values(self, wg: Warpgroup, cursor: Cursor):
        """O += P V of the last tile's last block, and that tile's epilogue."""
        shared, group = wg.shared, wg.thread.group
        cute.arch.mbarrier_wait(shared.v.full + cursor.v.index, cursor.v.phase)
        self.gemms.take_turn(group)
        self.gemms.values(wg.products, shared.v.memory, cursor.v.index)
        if group < self.traits.groups - 1:
            self.gemms.pass_turn(group)
        warpgroup.wait_group(0)
        self.store(wg, cursor)

    @cute.jit
    def following(self, stage: Stage):
        """The stage after `stage`."""
        index, phase = self.advance(stage.index, stage.phase)
        return Stage(index, phase)

    @cute.jit
    def masked_blocks(self, cursor: Cursor):
        """How many of a tile's blocks after its first need a mask, or zeros in V of the block before. With fp8 also
        the block that finds rows without a maximum, which saw nothing of the first block."""
        masked = cursor.blocks - 1 - cutlass.max(cursor.unmasked, 0) // self.traits.block
        if const_expr(self.traits.fp8) or cursor.v_keys < self.traits.block:
            masked = cutlass.max(masked, 1)
        return cutlass.min(cutlass.max(masked, 0), cursor.blocks - 1)

    @cute.jit
    def limits(self, wg: Warpgroup, slot: Int32):
        """(keys of the request, keys that all rows of this warpgroup see); `rows.limit` gets those of this thread's
        rows."""
        tiles, thread, limit = wg.shared.tiles, wg.thread, wg.rows.limit
        keys = self.uniform(tiles[Tile.KEYS, slot])
        unmasked = keys
        if const_expr(self.traits.causal):
            first = self.uniform(tiles[Tile.FIRST_ROW_KEYS, slot]) + thread.group * GROUP_ROWS
            unmasked = cutlass.min(keys, first)
            for i in cutlass.range_constexpr(2):
                limit[i] = cutlass.min(keys, first + thread.row + 8 * i)
        else:
            for i in cutlass.range_constexpr(2):
                limit[i] = keys
        return keys, unmasked

    @cute.jit
    def release_q(self, barrier: cute.Pointer, n: Int32):
        """fp8: release Q after the scores of the tile's last block, `n` = 0. Without turns the next tile's scores would
        otherwise wait for it."""
        if const_expr(self.traits.fp8):
            if n == 0:
                release(barrier)

    @cute.jit
    def zero_rows(self, v: Buffers, stage: Stage, keys: Int32, thread: ThreadIndex):
        """Zero V's rows past a request's keys: P is 0 there, but V may be NaN, and 0 * NaN must not reach O.

        Each warpgroup writes the same zeros. With fp8 the transpose warps have done it.
        """
        traits = self.traits
        if const_expr(not traits.fp8):
            if keys < traits.block:
                v_words = cute.make_tensor(
                    cute.recast_ptr(v.memory, cute.make_swizzle(0, 4, 3), dtype=Float32),
                    cute.make_layout(
                        (32, traits.block, traits.v_tiles, traits.stages),
                        stride=(1, 32, 32 * traits.block, traits.v_elements // 2),
                    ),
                )
                cute.arch.mbarrier_wait(v.full + stage.index, stage.phase)
                for row in cutlass.range(cutlass.max(keys, 0) + thread.thread // 32, traits.block, 4, unroll=1):
                    for c in cutlass.range_constexpr(traits.v_tiles):
                        v_words[thread.thread % 32, row, c, stage.index] = Float32(0.0)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=Barrier.V_ZEROED + thread.group, number_of_threads=WARPGROUP_THREADS)

    @cute.jit
    def store(self, wg: Warpgroup, cursor: Cursor):
        """The epilogue of the cursor's tile: O over the rows' sums to `out`, and the rows' log-sum-exp to `lse`. Rows
        without keys get 0 and -inf."""
        traits, thread, rows, out, lse = self.traits, wg.thread, wg.rows, wg.results.out, wg.results.lse
        tiles, slot = wg.shared.tiles, cursor.tile % TILE_SLOTS
        first_row = tiles[Tile.FIRST_ROW, slot] + thread.group * GROUP_ROWS
        group_rows = tiles[Tile.ROWS, slot] - thread.group * GROUP_ROWS
        head = tiles[Tile.HEAD, slot]
        quad = thread.lane % 4
        column_groups = traits.v_head_dim // 8
        for i in cutlass.range_constexpr(2):
            row = thread.row + 8 * i
            total = rows.total[i]
            total += cute.arch.shuffle_sync_bfly(total, offset=1)
            total += cute.arch.shuffle_sync_bfly(total, offset=2)
            factor, row_lse = Float32(0.0), -Float32.inf
            if total > 0.0 or total != total:
                factor = wg.out_scale / total
                row_lse = (rows.maximum[i] + cute.math.log2(total, fastmath=True)) * LN_2
            out_row = Int64(first_row + row) * wg.results.heads + head
            # A lane holds 2 columns of each group of 8. The four lanes of a row exchange columns so that each has the
            # 8 columns, 16 bytes, of one group in four, and a row's stores fill whole sectors.
            line = cute.make_tensor(
                (out.iterator + (out_row * traits.v_head_dim + quad * 8)).align(16),
                cute.make_layout((8, column_groups // 4), stride=(1, 32)),
            )
            pairs = cute.make_rmem_tensor((8,), traits.out_dtype)
            words = cute.recast_tensor(pairs, Int32)
            for g in cutlass.range_constexpr(column_groups // 4):
                for j in cutlass.range_constexpr(4):
                    pairs[2 * j] = (rows.o[i, 8 * g + 2 * j] * factor).to(traits.out_dtype)
                    pairs[2 * j + 1] = (rows.o[i, 8 * g + 2 * j + 1] * factor).to(traits.out_dtype)
                self.transpose_quad(words, quad)
                if row < group_rows:
                    cute.autovec_copy(pairs, line[None, g])
            if row < group_rows and quad == 0:
                lse[first_row + row, head] = row_lse
