"""The producer: one warp that claims tiles and copies Q, K and V into shared memory."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from tsmla_kernels.sm90.operands import TmaCopy
from tsmla_kernels.sm90.prefill.config import GROUP_ROWS
from tsmla_kernels.sm90.prefill.memory import (
    TILE_SLOTS,
    TILE_WORDS,
    Buffers,
    Copies,
    KernelTraits,
    PlanWord,
    Progress,
    Schedule,
    Shared,
    Tile,
)
from tsmla_kernels.sm90.warp import advance

NO_TILE = 2**31 - 1  # TILES_END for rows past the plan's last row: greater than every tile's index
# A CTA claims its next tile when this many blocks of its present tile are left, with the one that it copies then (or at
# once, if the tile has fewer). If it claimed earlier, the next tile would wait for a long tile's end while other CTAs
# have no more work. If it claimed later, the copies would wait for the next tile's descriptor.
CLAIMED_AHEAD = 2
EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000  # L2 policies: Q is read once, K and V often


class Box(NamedTuple):
    """The extent of one copy in rows and column tiles. `pitch` is the number of column tiles in a whole buffer."""

    rows: int
    column_tiles: int
    pitch: int


class Producer:
    """Device code of the producer warp."""

    def __init__(self, traits: KernelTraits) -> None:
        self.traits = traits
        self.stages = traits.stages
        self.q_box = Box(GROUP_ROWS, traits.k_column_tiles, traits.k_column_tiles)
        self.k_box = Box(traits.block, traits.nope_column_tiles, traits.k_column_tiles)
        self.rope_box = Box(traits.block, traits.rope_column_tiles, traits.k_column_tiles)
        self.v_box = Box(traits.block, traits.v_column_tiles, traits.v_column_tiles)

    @cute.jit
    def copy_tiles(self, copies: Copies, schedule: Schedule, shared: Shared, heads: Int32) -> None:
        """Claim tiles until no tile is left. For each block copy K, and V of the block before (fp8: V of the same
        block). For each tile copy Q. A copy starts when its buffer's readers have released it."""
        traits = self.traits
        tiles, q, k, landing = shared.tiles, shared.q, shared.k, shared.landing
        lane = cute.arch.lane_idx()
        tile = cute.arch.block_idx()[0]
        cute.arch.griddepcontrol_wait()
        base = self.claim(tile, Int32(0), Int32(0), schedule, tiles, heads)

        index, phase = Int32(0), Int32(1)  # the stage of K; V is one block behind
        v_index, v_phase = Int32(-1), Int32(1)
        v_row, v_head = Int32(0), Int32(0)
        q_phase = Int32(1)
        slot = Int32(0)
        running = Int32(1)
        while running == 1:
            blocks, kv_begin, head = tiles[Tile.BLOCKS, slot], tiles[Tile.FIRST_KEY, slot], tiles[Tile.HEAD, slot]
            row = tiles[Tile.FIRST_ROW, slot]
            if blocks == 0:
                running = Int32(0)
            for b in cutlass.range(blocks, unroll=1):
                kv_row = kv_begin + (blocks - 1 - b) * traits.block
                cute.arch.mbarrier_wait(k.empty + index, phase)
                self.copy_k(copies, k, index, kv_row, head)
                if const_expr(traits.fp8):
                    # No delay here: the transpose warps released this buffer long before K's buffer became free.
                    cute.arch.mbarrier_wait(landing.empty + index, phase)
                    self.copy_v(copies.v, landing, index, kv_row, head)
                else:
                    if v_index >= 0:
                        cute.arch.mbarrier_wait(landing.empty + v_index, v_phase)
                        self.copy_v(copies.v, landing, v_index, v_row, v_head)
                    v_index, v_phase = index, phase
                    v_row, v_head = kv_row, head
                index, phase = advance(index, phase, self.stages)
                if b == 0:
                    self.copy_q(copies.q, q, q_phase, row, head)
                    q_phase ^= 1
                if b == cutlass.max(blocks - CLAIMED_AHEAD, 0):
                    claimed = Int32(0)
                    if lane == 0:
                        claimed = cute.arch.atomic_add(schedule.progress.iterator, Int32(1), sem="relaxed", scope="gpu")
                    tile = cute.arch.shuffle_sync(claimed, offset=0)
                    base = self.claim(tile, base, (slot + 1) % TILE_SLOTS, schedule, tiles, heads)
            slot = (slot + 1) % TILE_SLOTS
        if v_index >= 0:
            cute.arch.mbarrier_wait(landing.empty + v_index, v_phase)
            self.copy_v(copies.v, landing, v_index, v_row, v_head)
        if const_expr(traits.fp8):
            # Wake the transpose warps, so that they read the last descriptor and stop.
            cute.arch.mbarrier_wait(landing.empty + index, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(landing.full + index)
        for group in cutlass.range(traits.groups, unroll=1):
            cute.arch.mbarrier_wait(q.empty + group, q_phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(q.full + group)

    @cute.jit
    def claim(
        self, tile: Int32, base: Int32, slot: Int32, schedule: Schedule, tiles: cute.Tensor, heads: Int32
    ) -> Int32:
        """Write the descriptor of the tile with index `tile` to `slot` of the ring. Returns the index of the plan's row
        that has the tile.

        `base` is what the claim before returned. If `tile` is past the last tile, the descriptor is all zeros.
        """
        traits, plan = self.traits, schedule.plan
        lane = cute.arch.lane_idx()
        entries = plan.shape[0]
        words = cute.make_rmem_tensor((TILE_WORDS,), Int32)
        words.fill(0)
        if tile < schedule.progress[Progress.TILES]:
            # A CTA claims tiles in ascending order, so the search starts at `base`. It looks at 32 rows at a time.
            searching = Int32(1)
            while searching == 1:
                tiles_end = Int32(NO_TILE)
                if base + lane < entries:
                    tiles_end = plan[base + lane, PlanWord.TILES_END]
                skipped = cute.arch.popc(cute.arch.vote_ballot_sync(tiles_end <= tile))
                base += skipped
                if skipped < 32:
                    searching = Int32(0)
            index = tile
            if base > 0:
                previous = base - 1
                index = tile - plan[previous, PlanWord.TILES_END]
            q_begin, q_len = plan[base, PlanWord.FIRST_ROW], plan[base, PlanWord.ROWS]
            kv_begin, kv_len = plan[base, PlanWord.FIRST_KEY], plan[base, PlanWord.KEYS]
            head_tiles, section_heads = plan[base, PlanWord.HEAD_TILES], plan[base, PlanWord.SECTION_HEADS]
            section = index // (section_heads * head_tiles)
            index -= section * section_heads * head_tiles
            heads_in_section = cutlass.min(section_heads, heads - section * section_heads)
            row_tile = head_tiles - 1 - index // heads_in_section  # causal: the tiles with most keys first
            row = row_tile * traits.tile_rows
            rows = cutlass.min(q_len - row, traits.tile_rows)
            if const_expr(traits.tile_rows != traits.block):
                # Count tiles from the last row, so that the partial tile is the first, which sees the fewest keys. If
                # a tile has as many rows as a block has keys, tiles begin at row 0 instead: a tile's diagonal then
                # often begins at a block's first key, so that fewer blocks need a mask.
                aligned_row = q_len - (head_tiles - row_tile) * traits.tile_rows
                row = cutlass.max(aligned_row, 0)
                rows = aligned_row + traits.tile_rows - row
            visible = kv_len
            if const_expr(traits.causal):
                visible = cutlass.max(cutlass.min(kv_len, kv_len - q_len + row + rows), 0)
            words[Tile.BLOCKS] = cutlass.max((visible + traits.block - 1) // traits.block, 1)
            words[Tile.KEYS] = kv_len
            words[Tile.FIRST_ROW_KEYS] = kv_len - q_len + row + 1
            words[Tile.FIRST_ROW] = q_begin + row
            words[Tile.ROWS] = rows
            words[Tile.HEAD] = section * section_heads + index % heads_in_section
            words[Tile.FIRST_KEY] = kv_begin
        if lane == 0:
            for word in Tile:
                tiles[word, slot] = words[word]
        cute.arch.sync_warp()
        return base

    @cute.jit
    def copy_q(self, copy: TmaCopy, q: Buffers, phase: Int32, row: Int32, head: Int32) -> None:
        """Copy Q of a tile, 64 rows for each compute warpgroup."""
        for group in cutlass.range(self.traits.groups, unroll=1):
            cute.arch.mbarrier_wait(q.empty + group, phase)
            self.expect(q.full + group, self.traits.q_elements)
            q_row = row + group * GROUP_ROWS
            self.copy_box(copy, q, group, q_row, head, self.q_box)

    @cute.jit
    def copy_k(self, copies: Copies, k: Buffers, index: Int32, row: Int32, head: Int32) -> None:
        """Copy K of a block. Shared rope columns need a separate copy."""
        traits = self.traits
        self.expect(k.full + index, traits.k_elements)
        self.copy_box(copies.k, k, index, row, head, self.k_box)
        if const_expr(traits.rope_column_tiles > 0):
            rope = k._replace(memory=k.memory + traits.nope_column_tiles * 64 * traits.block)
            self.copy_box(copies.rope, rope, index, row, Int32(0), self.rope_box)

    @cute.jit
    def copy_v(self, copy: TmaCopy, v: Buffers, index: Int32, row: Int32, head: Int32) -> None:
        """Copy V of a block."""
        self.expect(v.full + index, self.traits.v_elements)
        self.copy_box(copy, v, index, row, head, self.v_box)

    @cute.jit
    def expect(self, full: cute.Pointer, elements: cutlass.Constexpr[int]) -> None:
        """Arrive on `full`; its phase completes when TMA has written `elements` elements."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, elements * self.traits.element_bytes)

    @cute.jit
    def copy_box(
        self, copy: TmaCopy, buffers: Buffers, index: Int32, row: Int32, head: Int32, box: cutlass.Constexpr[Box]
    ) -> None:
        """Copy the box of `head` whose first row is `row` to the first column tiles of buffer `index`."""
        traits = self.traits
        smem = cute.make_tensor(
            cute.recast_ptr(buffers.memory, traits.layout_atom().inner, dtype=traits.dtype),
            cute.make_layout(
                ((8, box.rows // 8), 64, box.column_tiles, 8),
                stride=((64, 512), 1, 64 * box.rows, 64 * box.rows * box.pitch),
            ),
        )
        gmem = cute.local_tile(
            cute.domain_offset((row, 0, 0, 0), copy.tensor), (box.rows, 64, box.column_tiles), (0, 0, 0, None)
        )
        target, source = cpasync.tma_partition(
            copy.atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 3), cute.group_modes(gmem, 0, 3)
        )
        policy = EVICT_FIRST if const_expr(box.rows == GROUP_ROWS) else EVICT_LAST
        cute.copy(
            copy.atom,
            source[None, head],
            target[None, index],
            tma_bar_ptr=buffers.full + index,
            cache_policy=Int64(policy),
        )
