"""The plan of prefill's gradient: tiles of keys, the longest requests first, and how CTAs claim them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Float32, Int32, const_expr

from tsmla_kernels.sm90.prefill.backward_config import BLOCK_ROWS, KEY_ROWS, Q_ROWS
from tsmla_kernels.sm90.prefill.backward_memory import (
    NO_HEAD,
    TILE_SLOTS,
    TILE_WORDS,
    Offsets,
    PlanWord,
    Progress,
    Request,
    Schedule,
    Tile,
    Traits,
)

PLAN_THREADS = 256
LENGTH_CLASSES = 128  # of numbers of queries, four to each power of two
SHORTEST_CLASS = 508  # of length 0: bits 21 and up of the float 1.0
SECTION_HEADS = 16  # heads whose tiles are taken together: their first tiles are the longest
FAR = 2**31 - 1
SEEN_BY_ALL = -(2**30)  # Tile.DIAGONAL without a mask: less the rows before a step it is still a 32-bit number


class Planner:
    """Device code of the plan. `schedule.plan` has a row for each request, and two for the keys of no request: those
    before the first and those after the last, which no query sees."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    @cute.jit
    def make_plan(self, offsets: Offsets, schedule: Schedule, heads: Int32):
        """One CTA: sort the requests by class of length, and write their rows of the plan and the number of tiles."""
        tidx = cute.arch.thread_idx()[0]
        lane, warp_idx = tidx % 32, tidx // 32

        @cute.struct
        class Storage:
            positions: cute.struct.MemRange[Int32, LENGTH_CLASSES]
            warp_tiles: cute.struct.MemRange[Int32, PLAN_THREADS // 32]

        smem = utils.SmemAllocator()
        storage = smem.allocate(Storage)
        positions = storage.positions.get_tensor(cute.make_layout(LENGTH_CLASSES))
        warp_tiles = storage.warp_tiles.get_tensor(cute.make_layout(PLAN_THREADS // 32))
        entries = schedule.plan.shape[0]
        batch = entries - 2

        if tidx < LENGTH_CLASSES:
            positions[tidx] = Int32(0)
        cute.arch.sync_threads()
        for e in cutlass.range(tidx, entries, PLAN_THREADS, unroll=1):
            self.take_position(positions, self.request(offsets, e, batch).rows)
        cute.arch.sync_threads()
        if warp_idx == 0:
            self.counts_to_positions(positions, lane)
        cute.arch.sync_threads()
        for e in cutlass.range(tidx, entries, PLAN_THREADS, unroll=1):
            request = self.request(offsets, e, batch)
            self.write_row(schedule.plan, self.take_position(positions, request.rows), request, e)
        cute.arch.sync_threads()
        total = self.accumulate_tiles(schedule.plan, warp_tiles, heads)
        if tidx == 0:
            progress = schedule.progress
            # The first tile of each CTA is the one of its own number.
            progress[Progress.NEXT_TILE] = Int32(progress.shape[0])
            progress[Progress.TILES] = total

    @cute.jit
    def request(self, offsets: Offsets, e: Int32, batch: Int32):
        """Request `e`; `batch` and `batch` + 1 are the keys before the first request and after the last.

        Clamped to the operands: wrong offsets must not lead to reads or writes outside.
        """
        q_begin, q_end = Int32(0), Int32(0)
        kv_begin, kv_end = Int32(0), offsets.total_kv
        if e < batch:
            q_begin, q_end = offsets.cu_seqlens_q[e], offsets.cu_seqlens_q[e + 1]
            kv_begin, kv_end = offsets.cu_seqlens_kv[e], offsets.cu_seqlens_kv[e + 1]
        elif e == batch:
            kv_end = offsets.cu_seqlens_kv[0]
        else:
            kv_begin = offsets.cu_seqlens_kv[batch]
        q_begin = cutlass.min(cutlass.max(q_begin, 0), offsets.total_q)
        kv_begin = cutlass.min(cutlass.max(kv_begin, 0), offsets.total_kv)
        q_len = cutlass.max(cutlass.min(q_end, offsets.total_q) - q_begin, 0)
        kv_len = cutlass.max(cutlass.min(kv_end, offsets.total_kv) - kv_begin, 0)
        return Request(q_begin, q_len, kv_begin, kv_len)

    @cute.jit
    def take_position(self, positions: cute.Tensor, rows: Int32):
        """Count one request of this many queries in its class, the longest class first; returns the count before."""
        as_float = cute.make_rmem_tensor((1,), Float32)
        as_float[0] = Float32(rows + 1)
        bits = cute.recast_tensor(as_float, Int32)[0]
        length_class = cutlass.max(LENGTH_CLASSES - 1 - ((bits >> 21) - SHORTEST_CLASS), 0)
        return cute.arch.atomic_add(positions.iterator + length_class, Int32(1), sem="relaxed", scope="cta")

    @cute.jit
    def counts_to_positions(self, positions: cute.Tensor, lane: Int32):
        """One warp: replace each class's count by the number of requests in the classes before it."""
        counts = cute.make_rmem_tensor((LENGTH_CLASSES // 32,), Int32)
        lane_count = Int32(0)
        for i in cutlass.range_constexpr(LENGTH_CLASSES // 32):
            counts[i] = positions[lane * (LENGTH_CLASSES // 32) + i]
            lane_count += counts[i]
        before = self.prefix_sum(lane_count, lane) - lane_count
        for i in cutlass.range_constexpr(LENGTH_CLASSES // 32):
            positions[lane * (LENGTH_CLASSES // 32) + i] = before
            before += counts[i]

    @cute.jit
    def write_row(self, plan: cute.Tensor, position: Int32, request: Request, e: Int32):
        """The row of request `e`, less its sum of tiles."""
        plan[position, PlanWord.FIRST_ROW] = request.first_row
        plan[position, PlanWord.ROWS] = request.rows
        plan[position, PlanWord.FIRST_KEY] = request.first_key
        plan[position, PlanWord.KEYS] = request.keys
        plan[position, PlanWord.HEAD_TILES] = (request.keys + KEY_ROWS - 1) // KEY_ROWS
        plan[position, PlanWord.REQUEST] = e

    @cute.jit
    def accumulate_tiles(self, plan: cute.Tensor, warp_tiles: cute.Tensor, heads: Int32):
        """Write the running sum of tiles to every row of the plan; returns the number of all tiles."""
        tidx = cute.arch.thread_idx()[0]
        lane, warp_idx = tidx % 32, tidx // 32
        entries = plan.shape[0]
        carried = Int32(0)
        for first in cutlass.range(0, entries, PLAN_THREADS, unroll=1):
            e = first + tidx
            tiles = Int32(0)
            if e < entries:
                tiles = plan[e, PlanWord.HEAD_TILES] * heads
            tiles_end = self.prefix_sum(tiles, lane)
            if lane == 31:
                warp_tiles[warp_idx] = tiles_end
            cute.arch.sync_threads()
            for w in cutlass.range_constexpr(PLAN_THREADS // 32):
                count = warp_tiles[w]
                if w < warp_idx:
                    tiles_end += count
            if e < entries:
                plan[e, PlanWord.TILES_END] = carried + tiles_end
            for w in cutlass.range_constexpr(PLAN_THREADS // 32):
                carried += warp_tiles[w]
            cute.arch.sync_threads()
        return carried

    @cute.jit
    def prefix_sum(self, value: Int32, lane: Int32):
        """Inclusive prefix sum over a warp's lanes."""
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(value, offset=1 << step, mask_and_clamp=0)
            if lane >= (1 << step):
                value += other
        return value

    # ---- claiming (one warp)

    @cute.jit
    def claim(self, tile: Int32, position: Int32, tiles: cute.Tensor, slot: Int32, schedule: Schedule, heads: Int32):
        """Describe tile number `tile` of the plan in a slot; returns the position in the plan where it was found."""
        lane = cute.arch.lane_idx()
        plan = schedule.plan
        words = cute.make_rmem_tensor((TILE_WORDS,), Int32)
        words.fill(NO_HEAD)
        if tile < schedule.progress[Progress.TILES]:
            position = self.search(tile, position, plan)
            index = tile
            if position > 0:
                index = tile - plan[position - 1, PlanWord.TILES_END]
            rows, keys = plan[position, PlanWord.ROWS], plan[position, PlanWord.KEYS]
            first_row, first_key = plan[position, PlanWord.FIRST_ROW], plan[position, PlanWord.FIRST_KEY]
            request = plan[position, PlanWord.REQUEST]
            head_tiles = plan[position, PlanWord.HEAD_TILES]
            section = index // (SECTION_HEADS * head_tiles)
            index -= section * SECTION_HEADS * head_tiles
            section_heads = cutlass.min(heads - section * SECTION_HEADS, SECTION_HEADS)
            order = index // section_heads  # the tiles that most queries see come first
            first_step, diagonal = Int32(0), Int32(SEEN_BY_ALL)
            if const_expr(self.traits.causal):
                sees_first_key = order * KEY_ROWS - (keys - rows)  # the first query that sees the tile's first key
                first_step = cutlass.max(sees_first_key, 0) // Q_ROWS
                diagonal = sees_first_key - first_step * Q_ROWS
            words[Tile.HEAD] = section * SECTION_HEADS + index % section_heads
            words[Tile.FIRST_KEY] = first_key + order * KEY_ROWS
            words[Tile.KEYS] = cutlass.min(keys - order * KEY_ROWS, KEY_ROWS)
            words[Tile.STEPS] = cutlass.max((rows + Q_ROWS - 1) // Q_ROWS - first_step, 0)
            words[Tile.FIRST_ROW] = first_row + first_step * Q_ROWS
            words[Tile.ROWS] = rows - first_step * Q_ROWS
            words[Tile.FIRST_TERMS] = first_index(first_row, request, Q_ROWS) + first_step
            words[Tile.DIAGONAL] = diagonal
            words[Tile.FIRST_BLOCK] = first_index(first_row, request, BLOCK_ROWS) + first_step * (Q_ROWS // BLOCK_ROWS)
            words[Tile.ORDER] = order
            words[Tile.ROPE_TURN] = first_index(first_key, request, KEY_ROWS) + order
        if lane == 0:
            for i in cutlass.range_constexpr(TILE_WORDS):
                tiles[i, slot] = words[i]
        cute.arch.sync_warp()
        return position

    @cute.jit
    def search(self, tile: Int32, position: Int32, plan: cute.Tensor):
        """The plan's row that has tile number `tile`. Tiles are claimed in order: the search starts where the last one
        ended."""
        lane = cute.arch.lane_idx()
        searching = Int32(1)
        while searching == 1:
            tiles_end = Int32(FAR)
            if position + lane < plan.shape[0]:
                tiles_end = plan[position + lane, PlanWord.TILES_END]
            passed = cute.arch.popc(cute.arch.vote_ballot_sync(tiles_end <= tile))
            position += passed
            if passed < 32:
                searching = Int32(0)
        return position

    @cute.jit
    def claim_next(self, position: Int32, tiles: cute.Tensor, slot: Int32, schedule: Schedule, heads: Int32):
        """Claim the next tile for the slot after `slot`; returns its position in the plan, and that slot."""
        claimed = Int32(0)
        if cute.arch.lane_idx() == 0:
            claimed = cute.arch.atomic_add(
                schedule.progress.iterator + Progress.NEXT_TILE, Int32(1), sem="relaxed", scope="gpu"
            )
        slot = (slot + 1) % TILE_SLOTS
        position = self.claim(cute.arch.shuffle_sync(claimed, offset=0), position, tiles, slot, schedule, heads)
        return position, slot


def first_index(first: Int32, request: Int32, size: int) -> Int32:
    """Where request `request`, whose rows or keys begin at `first`, begins in an array of tiles of `size` rows. Requests
    share no tile: each one has room for an incomplete tile."""
    return first // size + request
