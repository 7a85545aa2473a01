"""The plan of prefill's gradient: tiles of keys, the longest requests first, and the claiming of tiles by CTAs."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from tsmla_kernels.sm90.prefill.backward.config import BLOCK_ROWS, Q_ROWS
from tsmla_kernels.sm90.prefill.backward.memory import NO_HEAD, TILE_SLOTS, TILE_WORDS, Tile, Traits
from tsmla_kernels.sm90.prefill.copies import NO_TILE
from tsmla_kernels.sm90.prefill.memory import PlanWord, Progress, Schedule
from tsmla_kernels.sm90.prefill.plan import PlanWriter, Request, Requests

SECTION_HEADS = 16  # heads of a section: the first tiles of all its heads come first, because they are the longest
SEEN_BY_ALL = -(2**30)  # Tile.DIAGONAL if not causal: all queries see all keys, and int32 does not overflow


class BackwardPlanner(PlanWriter):
    """Device code that writes the plan and claims tiles. The plan has a row for each request, and two for the keys that
    belong to no request: those before the first request and those after the last. No query sees these keys."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    @cute.jit
    def make_plan(self, requests: Requests, schedule: Schedule, heads: Int32) -> None:
        """Write the plan and the counters, in one CTA: the requests with the most queries first."""
        tiled_by_keys = Requests(
            requests.cu_seqlens_kv, requests.cu_seqlens_q, requests.total_kv, requests.total_q, requests.batch
        )
        # Every tile is claimed, also each CTA's first one: see `Reducer.add`.
        self.write_plan(tiled_by_keys, schedule, heads, Int32(0))

    @cute.jit
    def write_row(self, plan: cute.Tensor, position: Int32, request: Request, index: Int32, heads: Int32) -> None:
        """Write a request's row of the plan, except for `TILES_END`. Here `request.rows` are keys, and `request.keys`
        are queries."""
        plan[position, PlanWord.FIRST_ROW] = request.first_key
        plan[position, PlanWord.ROWS] = request.keys
        plan[position, PlanWord.FIRST_KEY] = request.first_row
        plan[position, PlanWord.KEYS] = request.rows
        key_rows = self.traits.key_rows
        plan[position, PlanWord.HEAD_TILES] = (request.rows + key_rows - 1) // key_rows
        plan[position, PlanWord.REQUEST] = index

    # ---- claiming (one warp)

    @cute.jit
    def claim(self, tile: Int32, position: Int32, tiles: cute.Tensor, slot: Int32, schedule: Schedule, heads: Int32):
        """Write the descriptor of tile `tile` to `slot`: NO_HEAD in all words, if `tile` is past the last tile. Returns
        the index of the plan's row that has the tile."""
        lane = cute.arch.lane_idx()
        plan, key_rows = schedule.plan, self.traits.key_rows
        words = cute.make_rmem_tensor((TILE_WORDS,), Int32)
        words.fill(NO_HEAD)
        if tile < schedule.progress[Progress.TILES]:
            position = self.search(tile, position, plan)
            index = tile
            if position > 0:
                before = position - 1
                index = tile - plan[before, PlanWord.TILES_END]
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
                sees_first_key = order * key_rows - (keys - rows)  # the first query that sees the tile's first key
                first_step = cutlass.max(sees_first_key, 0) // Q_ROWS
                diagonal = sees_first_key - first_step * Q_ROWS
            words[Tile.HEAD] = section * SECTION_HEADS + index % section_heads
            words[Tile.FIRST_KEY] = first_key + order * key_rows
            words[Tile.KEYS] = cutlass.min(keys - order * key_rows, key_rows)
            words[Tile.STEPS] = cutlass.max((rows + Q_ROWS - 1) // Q_ROWS - first_step, 0)
            words[Tile.FIRST_ROW] = first_row + first_step * Q_ROWS
            words[Tile.ROWS] = rows - first_step * Q_ROWS
            words[Tile.FIRST_TERMS] = first_index(first_row, request, Q_ROWS) + first_step
            words[Tile.DIAGONAL] = diagonal
            words[Tile.FIRST_BLOCK] = first_index(first_row, request, BLOCK_ROWS) + first_step * (Q_ROWS // BLOCK_ROWS)
            words[Tile.ORDER] = order
            words[Tile.ROPE_TURN] = first_index(first_key, request, key_rows) + order
        if lane == 0:
            for i in cutlass.range_constexpr(TILE_WORDS):
                tiles[i, slot] = words[i]
        cute.arch.sync_warp()
        return position

    @cute.jit
    def search(self, tile: Int32, position: Int32, plan: cute.Tensor):
        """The index of the plan's row that has tile `tile`. Tiles are claimed in ascending order, so the search starts
        at `position`, the index of the row that has the tile claimed before."""
        lane = cute.arch.lane_idx()
        searching = Int32(1)
        while searching == 1:
            tiles_end = Int32(NO_TILE)
            if position + lane < plan.shape[0]:
                tiles_end = plan[position + lane, PlanWord.TILES_END]
            passed = cute.arch.popc(cute.arch.vote_ballot_sync(tiles_end <= tile))
            position += passed
            if passed < 32:
                searching = Int32(0)
        return position

    @cute.jit
    def claim_next(self, position: Int32, tiles: cute.Tensor, slot: Int32, schedule: Schedule, heads: Int32):
        """Claim the next tile for the slot after `slot`. Returns the index of the tile's row in the plan, and its
        slot."""
        claimed = Int32(0)
        if cute.arch.lane_idx() == 0:
            claimed = cute.arch.atomic_add(
                schedule.progress.iterator + Progress.NEXT_TILE, Int32(1), sem="relaxed", scope="gpu"
            )
        slot = (slot + 1) % TILE_SLOTS
        position = self.claim(cute.arch.shuffle_sync(claimed, offset=0), position, tiles, slot, schedule, heads)
        return position, slot


def first_index(first: Int32, request: Int32, size: int) -> Int32:
    """The index of a request's first tile in an array of tiles of `size` rows. `first` is the request's first row or
    key, `request` its index. No two requests share a tile: the array has room for an incomplete tile of each."""
    return first // size + request
