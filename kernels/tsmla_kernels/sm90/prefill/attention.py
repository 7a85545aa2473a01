"""A compute warpgroup: it computes attention for its 64 rows of every tile, and goes without a break through the key
blocks of all tiles."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from tsmla_kernels.sm90.constants import LN_2, LOG2_E, LOWEST
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
    Selection,
    Shared,
    Stage,
    ThreadIndex,
    Tile,
)
from tsmla_kernels.sm90.prefill.selection import SelectedKeys
from tsmla_kernels.sm90.prefill.softmax import LaggingSoftmax, Softmax
from tsmla_kernels.sm90.warp import advance, release, transpose_quad, uniform


class Warpgroup(NamedTuple):
    """The memory and registers of a compute warpgroup. `next_rows` is `rows` with the next tile's maxima and sums."""

    shared: Shared
    thread: ThreadIndex
    products: Products
    rows: Rows
    next_rows: Rows
    results: Results
    out_scale: Float32
    selection: Selection | None


class Cursor(NamedTuple):
    """A position in the sequence of key blocks. A tile's blocks go from the last to the first."""

    v_keys: Int32  # the request's keys from block `v`'s first key on; V's rows after these must be zeroed
    v: Stage  # the block whose P is ready; its P V comes next
    k: Stage  # the block after block `v`
    q_phase: Int32
    blocks: Int32  # key blocks of the tile; 0 after the last tile
    keys: Int32  # keys of the tile's request
    unmasked_keys: Int32  # keys that all rows of the warpgroup see
    tile: Int32  # how many tiles this CTA had before this one


class Attention:
    """Device code of the compute warpgroups."""

    def __init__(self, traits: KernelTraits) -> None:
        self.traits = traits
        self.stages = traits.stages
        self.gemms = Gemms(traits)
        self.softmax = Softmax(traits)
        self.lagging_softmax = LaggingSoftmax(traits, self.softmax)
        self.selected_keys = SelectedKeys(traits)

    @cute.jit
    def run(
        self, shared: Shared, mma: Mma, scales: cute.Tensor, results: Results, selection: Selection | None, group: Int32
    ) -> None:
        """Run compute warpgroup `group`: attention of its rows of all tiles of this CTA."""
        wg = self.set_up(shared, mma, scales, results, selection, group)
        cute.arch.mbarrier_wait(shared.q.full + group, 0)
        blocks = uniform(shared.tiles[Tile.BLOCKS, 0])
        if blocks > 0:
            cursor = self.first_block(wg, blocks)
            while cursor.blocks > 0:
                cursor = self.finish_tile(wg, cursor)
            self.last_values(wg, cursor)

    @cute.jit
    def set_up(
        self, shared: Shared, mma: Mma, scales: cute.Tensor, results: Results, selection: Selection | None, group: Int32
    ) -> Warpgroup:
        """Make the warpgroup's operands, accumulators and softmax state."""
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
        if const_expr(traits.selection):
            rows = rows._replace(selected=self.selected_keys.registers())
        next_rows = rows._replace(
            maximum=cute.make_rmem_tensor((2,), Float32), total=cute.make_rmem_tensor((2,), Float32)
        )
        rows.maximum.fill(LOWEST)
        rows.total.fill(0.0)
        return Warpgroup(
            shared=shared, thread=thread, products=products, rows=rows, next_rows=next_rows, results=results,
            out_scale=out_scale, selection=selection,
        )  # fmt: skip

    def row_view(self, accumulator: cute.Tensor, columns: int) -> cute.Tensor:
        """A lane's part of an accumulator as [its 2 rows, its columns]."""
        return cute.make_tensor(accumulator.iterator, cute.make_layout((2, (2, columns // 8)), stride=(2, (1, 4))))

    @cute.jit
    def first_block(self, wg: Warpgroup, blocks: Int32) -> Cursor:
        """Compute P of the first tile's first block. Returns the cursor after this block."""
        shared, thread, products, rows = wg.shared, wg.thread, wg.products, wg.rows
        self.gemms.start_turns(thread.group)
        keys, unmasked_keys = self.limits(wg, Int32(0))
        self.load_selection(wg, blocks - 1)
        cute.arch.mbarrier_wait(shared.k.full, 0)
        self.gemms.scores(products, shared.k.memory, Int32(0))
        warpgroup.wait_group(0)
        release(shared.k.empty)
        block_index = blocks - 1
        self.softmax.start_tile(rows, block_index, unmasked_keys, thread.lane)
        self.softmax.write_p(products.acc_s, products.p_target)
        v_keys = keys - block_index * self.traits.block
        stage = Stage(Int32(0), Int32(0))
        return Cursor(
            v_keys=v_keys, v=stage, k=self.next_stage(stage), q_phase=Int32(0), blocks=blocks, keys=keys,
            unmasked_keys=unmasked_keys, tile=Int32(0),
        )  # fmt: skip

    @cute.jit
    def finish_tile(self, wg: Warpgroup, cursor: Cursor) -> Cursor:
        """Compute the tile's blocks after its first one. Then start the next tile; if there is none, return a cursor
        with 0 blocks."""
        shared, group = wg.shared, wg.thread.group
        cursor = self.other_blocks(wg, cursor)
        v_keys = cursor.v_keys
        if cursor.blocks > 1:
            v_keys = cursor.keys
        # All scores of the tile are done. With fp8 `issue` has already released Q, unless the tile has one block.
        if const_expr(not self.traits.fp8) or cursor.blocks == 1:
            release(shared.q.empty + group)
        q_phase = cursor.q_phase ^ 1
        cute.arch.mbarrier_wait(shared.q.full + group, q_phase)
        blocks = uniform(shared.tiles[Tile.BLOCKS, (cursor.tile + 1) % TILE_SLOTS])
        self.zero_rows(shared.v, cursor.v, v_keys, wg.thread)
        cursor = cursor._replace(blocks=blocks, v_keys=v_keys, q_phase=q_phase)
        k, v, tile = cursor.k, cursor.v, cursor.tile
        keys, unmasked_keys = cursor.keys, cursor.unmasked_keys
        if blocks > 0:
            # The fields are assigned here one by one, and not as one Cursor: the order in which an `if` yields its
            # results decides which registers they get.
            next_tile = self.start_tile(wg, cursor)
            k, v, v_keys = next_tile.k, next_tile.v, next_tile.v_keys
            blocks, keys, unmasked_keys = next_tile.blocks, next_tile.keys, next_tile.unmasked_keys
            tile = next_tile.tile
        return Cursor(
            v_keys=v_keys, v=v, k=k, q_phase=q_phase, blocks=blocks, keys=keys, unmasked_keys=unmasked_keys, tile=tile
        )

    @cute.jit
    def other_blocks(self, wg: Warpgroup, cursor: Cursor) -> Cursor:
        """Compute the tile's blocks after its first one: those that need a mask, then the others."""
        shared, thread, products, rows = wg.shared, wg.thread, wg.products, wg.rows
        masked = self.masked_blocks(cursor)
        for b in cutlass.range(masked, unroll=1):
            block_index = cursor.blocks - 2 - b
            self.zero_rows(shared.v, cursor.v, cursor.v_keys, thread)
            self.load_selection(wg, block_index)
            self.issue(wg, cursor, block_index)
            if const_expr(self.traits.selection):
                self.selected_keys.mask(rows, block_index, thread.lane, limited=True)
            else:
                self.softmax.mask(rows, block_index, thread.lane)
            self.softmax.finish_block(products, rows, shared.v, cursor.v)
            v_keys = cursor.keys - block_index * self.traits.block
            cursor = cursor._replace(k=self.next_stage(cursor.k), v=cursor.k, v_keys=v_keys)
        for b in cutlass.range(masked, cursor.blocks - 1, unroll=1):
            self.load_selection(wg, cursor.blocks - 2 - b)
            self.issue(wg, cursor, cursor.blocks - 2 - b)
            if const_expr(self.traits.selection):
                self.selected_keys.mask(rows, cursor.blocks - 2 - b, thread.lane, limited=False)
            if const_expr(self.traits.fp8):
                self.lagging_softmax.finish_block(products, rows, shared.v, cursor.v.index)
            else:
                self.softmax.finish_block(products, rows, shared.v, cursor.v)
            cursor = cursor._replace(k=self.next_stage(cursor.k), v=cursor.k)
        return cursor

    @cute.jit
    def load_selection(self, wg: Warpgroup, block_index: Int32) -> None:
        """Load the words of a block's keys, if the call has a selection. They arrive while S is computed."""
        if const_expr(self.traits.selection):
            self.selected_keys.load(wg.selection, wg.rows.selected, block_index)

    @cute.jit
    def issue(self, wg: Warpgroup, cursor: Cursor, block_index: Int32) -> None:
        """Compute S of the tile's next block while O += P V of the block before runs, and release K.

        With fp8 also release Q after block 0, the tile's last one, so that the next tile's Q can arrive during this
        block's softmax.
        """
        shared, group = wg.shared, wg.thread.group
        self.gemms.issue(shared, wg.products, cursor.k, cursor.v, group)
        release(shared.k.empty + cursor.k.index)
        if const_expr(self.traits.fp8):
            if block_index == 0:
                release(shared.q.empty + group)

    @cute.jit
    def start_tile(self, wg: Warpgroup, cursor: Cursor) -> Cursor:
        """Issue the next tile's first Q K^T together with this tile's last P V, and store this tile."""
        traits, shared, thread, products = self.traits, wg.shared, wg.thread, wg.products
        blocks, k = cursor.blocks, cursor.k
        keys, unmasked_keys = self.limits(wg, (cursor.tile + 1) % TILE_SLOTS)
        skips_block = Int32(0)
        skipped_stage = k
        if const_expr(traits.fp8 and traits.causal):
            # A tile has more rows than a block has keys, so its first rows may see no key of its last block.
            if blocks > 1 and unmasked_keys + GROUP_ROWS - 1 <= (blocks - 1) * traits.block:
                skips_block = Int32(1)
                blocks -= 1
                self.gemms.wait(shared.k.full + k.index, k.phase)
                release(shared.k.empty + k.index)
                k = self.next_stage(k)
        block_index = blocks - 1
        self.load_selection(wg, block_index)
        self.gemms.issue(shared, products, k, cursor.v, thread.group)
        release(shared.k.empty + k.index)
        if const_expr(traits.fp8 and traits.causal):
            if skips_block == 1:
                self.gemms.wait(shared.v.full + skipped_stage.index, skipped_stage.phase)
                release(shared.v.empty + skipped_stage.index)
        wg.next_rows.maximum.fill(LOWEST)
        wg.next_rows.total.fill(0.0)
        self.softmax.start_tile(wg.next_rows, block_index, unmasked_keys, thread.lane)
        cute.arch.mbarrier_wait(shared.v.full + cursor.v.index, cursor.v.phase)  # reason: see `Softmax.finish_block`
        warpgroup.wait_group(0)
        release(shared.v.empty + cursor.v.index)
        self.softmax.write_p(products.acc_s, products.p_target)
        self.store(wg, cursor)
        products.acc_o.fill(0.0)
        for i in cutlass.range_constexpr(2):
            wg.rows.maximum[i], wg.rows.total[i] = wg.next_rows.maximum[i], wg.next_rows.total[i]
        v_keys = keys - block_index * traits.block
        return Cursor(
            v_keys=v_keys, v=k, k=self.next_stage(k), q_phase=cursor.q_phase, blocks=blocks, keys=keys,
            unmasked_keys=unmasked_keys, tile=cursor.tile + 1,
        )  # fmt: skip

    @cute.jit
    def last_values(self, wg: Warpgroup, cursor: Cursor) -> None:
        """Add the last P V to O, and store the last tile."""
        shared, group = wg.shared, wg.thread.group
        cute.arch.mbarrier_wait(shared.v.full + cursor.v.index, cursor.v.phase)
        self.gemms.take_turn(group)
        self.gemms.values(wg.products, shared.v.memory, cursor.v.index)
        if group < self.traits.groups - 1:
            self.gemms.pass_turn(group)
        warpgroup.wait_group(0)
        self.store(wg, cursor)

    @cute.jit
    def next_stage(self, stage: Stage) -> Stage:
        """The stage after `stage`."""
        index, phase = advance(stage.index, stage.phase, self.stages)
        return Stage(index, phase)

    @cute.jit
    def masked_blocks(self, cursor: Cursor) -> Int32:
        """How many blocks after a tile's first one need a mask, or zeros in V of the block before.

        With fp8 the block after the tile's first always counts, because rows that saw no key of the first block have no
        maximum yet.
        """
        masked = cursor.blocks - 1 - cutlass.max(cursor.unmasked_keys, 0) // self.traits.block
        if const_expr(self.traits.fp8) or cursor.v_keys < self.traits.block:
            masked = cutlass.max(masked, 1)
        return cutlass.min(cutlass.max(masked, 0), cursor.blocks - 1)

    @cute.jit
    def limits(self, wg: Warpgroup, slot: Int32) -> tuple[Int32, Int32]:
        """Return (the request's keys, the keys that all rows of this warpgroup see, selected or not), and set
        `rows.limit`. If the call has a selection, set `rows.selected.places` too."""
        tiles, thread, limit = wg.shared.tiles, wg.thread, wg.rows.limit
        keys = uniform(tiles[Tile.KEYS, slot])
        unmasked_keys = keys
        if const_expr(self.traits.causal):
            first_row_keys = uniform(tiles[Tile.FIRST_ROW_KEYS, slot]) + thread.group * GROUP_ROWS
            unmasked_keys = cutlass.min(keys, first_row_keys)
            for i in cutlass.range_constexpr(2):
                limit[i] = cutlass.min(keys, first_row_keys + thread.row + 8 * i)
        else:
            for i in cutlass.range_constexpr(2):
                limit[i] = keys
        if const_expr(self.traits.selection):
            self.selected_keys.find_rows(wg.selection, wg.rows.selected, tiles, slot, thread)
            if const_expr(not (self.traits.turns or self.traits.fp8)):
                cute.arch.sync_warp()  # all lanes have read the descriptor before one of them releases its slot
        return keys, unmasked_keys

    @cute.jit
    def zero_rows(self, v: Buffers, stage: Stage, keys: Int32, thread: ThreadIndex) -> None:
        """Zero V's rows past a request's keys. P is 0 there, but V may be NaN, and 0 * NaN must not reach O.

        Each warpgroup writes the same zeros. With fp8 the transpose warps have already written zeros.
        """
        traits = self.traits
        if const_expr(not traits.fp8):
            if keys < traits.block:
                v_words = cute.make_tensor(
                    cute.recast_ptr(v.memory, cute.make_swizzle(0, 4, 3), dtype=Float32),
                    cute.make_layout(
                        (32, traits.block, traits.v_column_tiles, traits.stages),
                        stride=(1, 32, 32 * traits.block, traits.v_elements // 2),
                    ),
                )
                cute.arch.mbarrier_wait(v.full + stage.index, stage.phase)
                for row in cutlass.range(cutlass.max(keys, 0) + thread.thread // 32, traits.block, 4, unroll=1):
                    for c in cutlass.range_constexpr(traits.v_column_tiles):
                        v_words[thread.thread % 32, row, c, stage.index] = Float32(0.0)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=Barrier.V_ZEROED + thread.group, number_of_threads=WARPGROUP_THREADS)

    @cute.jit
    def store(self, wg: Warpgroup, cursor: Cursor) -> None:
        """Store the cursor's tile: out, the rows' log-sum-exps and, if the call returns them, greatest logits. Rows
        without keys get 0, -inf and -inf."""
        traits, thread, rows, out, lse = self.traits, wg.thread, wg.rows, wg.results.out, wg.results.lse
        tiles, slot = wg.shared.tiles, cursor.tile % TILE_SLOTS
        first_row = tiles[Tile.FIRST_ROW, slot] + thread.group * GROUP_ROWS
        group_rows = tiles[Tile.ROWS, slot] - thread.group * GROUP_ROWS
        head = tiles[Tile.HEAD, slot]
        quad = thread.lane % 4
        sink = Float32(0.0)
        if const_expr(traits.sinks):
            sink = wg.results.sinks[head]
        column_groups = traits.v_head_dim // 8
        for i in cutlass.range_constexpr(2):
            row = thread.row + 8 * i
            total = rows.total[i]
            total += cute.arch.shuffle_sync_bfly(total, offset=1)
            total += cute.arch.shuffle_sync_bfly(total, offset=2)
            factor, row_lse = Float32(0.0), -Float32.inf
            row_maximum = -Float32.inf
            if total > 0.0 or total != total:
                factor = wg.out_scale / total
                row_lse = (rows.maximum[i] + cute.math.log2(total, fastmath=True)) * LN_2
                if const_expr(traits.sinks):
                    # The keys' share of the weight beside the sink's; 0 where the exponential overflows.
                    factor = factor / (1.0 + cute.math.exp2((sink - row_lse) * LOG2_E, fastmath=True))
                if const_expr(traits.max_logits):
                    row_maximum = rows.maximum[i] * LN_2 + (total - total)  # NaN where the row's lse is NaN
            row_index = Int64(first_row + row) * wg.results.heads + head
            # A lane has 2 columns of each group of 8. The four lanes of a row exchange columns, so that of every four
            # groups each lane has one whole (8 columns, 16 bytes), and a row's stores fill whole sectors.
            out_row = cute.make_tensor(
                (out.iterator + (row_index * traits.v_head_dim + quad * 8)).align(16),
                cute.make_layout((8, column_groups // 4), stride=(1, 32)),
            )
            pairs = cute.make_rmem_tensor((8,), traits.out_dtype)
            words = cute.recast_tensor(pairs, Int32)
            for g in cutlass.range_constexpr(column_groups // 4):
                for j in cutlass.range_constexpr(4):
                    pairs[2 * j] = (rows.o[i, 8 * g + 2 * j] * factor).to(traits.out_dtype)
                    pairs[2 * j + 1] = (rows.o[i, 8 * g + 2 * j + 1] * factor).to(traits.out_dtype)
                transpose_quad(words, quad)
                if row < group_rows:
                    cute.autovec_copy(pairs, out_row[None, g])
            if row < group_rows and quad == 0:
                lse[first_row + row, head] = row_lse
                if const_expr(traits.max_logits):
                    wg.results.max_logits[first_row + row, head] = row_maximum
