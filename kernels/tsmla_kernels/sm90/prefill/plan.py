"""The planner: one CTA turns the requests' lengths into tiles, those of the longest requests first."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Float32, Int32

from tsmla_kernels.sm90.prefill.memory import KernelTraits, PlanWord, Progress, Schedule

PLAN_THREADS = 256
LENGTH_CLASSES = 128  # classes of key lengths, four to each power of two
SHORTEST_CLASS = 508  # bits 21 and up of the float 1.0, which is keys + 1 of a request without keys
L2_BYTES = 32 << 20  # at most this many bytes of K and V should be in use at a time, so that they stay in L2
MAX_SECTION_HEADS = 16  # with more heads, CTAs finish the last section at uneven times


class Requests(NamedTuple):
    """The arrays that say where requests begin in the operands, the operands' lengths, and the number of requests."""

    cu_seqlens_q: cute.Tensor
    cu_seqlens_kv: cute.Tensor
    total_q: Int32
    total_kv: Int32
    batch: Int32


class Request(NamedTuple):
    """The query rows and keys of a request."""

    first_row: Int32
    rows: Int32
    first_key: Int32
    keys: Int32


class PlanWriter:
    """Device code that writes a plan of tiles of query rows. `schedule.plan` has a row for each request, and two for
    the query rows that belong to no request: those before the first request and those after the last. These two have no
    keys.

    The backward pass has tiles of keys: its planner passes the offsets of queries as those of keys and the other way
    round, and has its own `write_row`.
    """

    @cute.jit
    def write_plan(self, requests: Requests, schedule: Schedule, heads: Int32, next_tile: Int32) -> None:
        """Sort the requests by class of key length. Write their rows of the plan, how many tiles there are, and
        `next_tile`, the index of the tile that the first claim gets."""
        tidx = cute.arch.thread_idx()[0]
        lane, warp_idx = tidx % 32, tidx // 32
        cute.arch.griddepcontrol_launch_dependents()

        @cute.struct
        class Storage:
            positions: cute.struct.MemRange[Int32, LENGTH_CLASSES]
            warp_tiles: cute.struct.MemRange[Int32, PLAN_THREADS // 32]

        smem = utils.SmemAllocator()
        storage = smem.allocate(Storage)
        positions = storage.positions.get_tensor(cute.make_layout(LENGTH_CLASSES))
        warp_tiles = storage.warp_tiles.get_tensor(cute.make_layout(PLAN_THREADS // 32))
        entries = schedule.plan.shape[0]

        if tidx < LENGTH_CLASSES:
            positions[tidx] = Int32(0)
        cute.arch.sync_threads()
        for index in cutlass.range(tidx, entries, PLAN_THREADS, unroll=1):
            self.take_position(positions, self.request(requests, index).keys)
        cute.arch.sync_threads()
        if warp_idx == 0:
            self.counts_to_positions(positions, lane)
        cute.arch.sync_threads()
        for index in cutlass.range(tidx, entries, PLAN_THREADS, unroll=1):
            request = self.request(requests, index)
            self.write_row(schedule.plan, self.take_position(positions, request.keys), request, index, heads)
        cute.arch.sync_threads()
        total = self.accumulate_tiles(schedule.plan, warp_tiles, heads)
        if tidx == 0:
            schedule.progress[Progress.NEXT_TILE] = next_tile
            schedule.progress[Progress.TILES] = total

    @cute.jit
    def request(self, requests: Requests, index: Int32) -> Request:
        """Request `index`. Indices `batch` and `batch` + 1 stand for the query rows before the first request and after
        the last.

        Offsets are clamped to the operands, so that wrong offsets do not lead to reads or writes outside of them.
        """
        q_begin, q_end = Int32(0), requests.total_q
        kv_begin, kv_end = Int32(0), Int32(0)
        if index < requests.batch:
            q_begin, q_end = requests.cu_seqlens_q[index], requests.cu_seqlens_q[index + 1]
            kv_begin, kv_end = requests.cu_seqlens_kv[index], requests.cu_seqlens_kv[index + 1]
        elif index == requests.batch:
            q_end = requests.cu_seqlens_q[0]
        else:
            q_begin = requests.cu_seqlens_q[requests.batch]
        q_begin = cutlass.min(cutlass.max(q_begin, 0), requests.total_q)
        kv_begin = cutlass.min(cutlass.max(kv_begin, 0), requests.total_kv)
        q_len = cutlass.max(cutlass.min(q_end, requests.total_q) - q_begin, 0)
        kv_len = cutlass.max(cutlass.min(kv_end, requests.total_kv) - kv_begin, 0)
        return Request(q_begin, q_len, kv_begin, kv_len)

    @cute.jit
    def take_position(self, positions: cute.Tensor, keys: Int32) -> Int32:
        """Add 1 to the entry of the length class of `keys`; returns the entry's old value. Class 0 has the most
        keys."""
        length = cute.make_rmem_tensor((1,), Float32)
        length[0] = Float32(keys + 1)
        bits = cute.recast_tensor(length, Int32)[0]
        length_class = cutlass.max(LENGTH_CLASSES - 1 - ((bits >> 21) - SHORTEST_CLASS), 0)
        return cute.arch.atomic_add(positions.iterator + length_class, Int32(1), sem="relaxed", scope="cta")

    @cute.jit
    def counts_to_positions(self, positions: cute.Tensor, lane: Int32) -> None:
        """In one warp, replace each class's count by the number of requests in the classes before it."""
        counts = cute.make_rmem_tensor((LENGTH_CLASSES // 32,), Int32)
        lane_count = Int32(0)
        for i in cutlass.range_constexpr(LENGTH_CLASSES // 32):
            counts[i] = positions[lane * (LENGTH_CLASSES // 32) + i]
            lane_count += counts[i]
        position = self.prefix_sum(lane_count, lane) - lane_count
        for i in cutlass.range_constexpr(LENGTH_CLASSES // 32):
            positions[lane * (LENGTH_CLASSES // 32) + i] = position
            position += counts[i]

    @cute.jit
    def accumulate_tiles(self, plan: cute.Tensor, warp_tiles: cute.Tensor, heads: Int32) -> Int32:
        """Write `TILES_END`, the running sum of tiles, to every row of the plan. Returns the number of all tiles."""
        tidx = cute.arch.thread_idx()[0]
        lane, warp_idx = tidx % 32, tidx // 32
        entries = plan.shape[0]
        tiles_before = Int32(0)
        for chunk in cutlass.range(0, entries, PLAN_THREADS, unroll=1):
            index = chunk + tidx
            tiles = Int32(0)
            if index < entries:
                tiles = plan[index, PlanWord.HEAD_TILES] * heads
            tiles_end = self.prefix_sum(tiles, lane)
            if lane == 31:
                warp_tiles[warp_idx] = tiles_end
            cute.arch.sync_threads()
            for w in cutlass.range_constexpr(PLAN_THREADS // 32):
                count = warp_tiles[w]
                if w < warp_idx:
                    tiles_end += count
            if index < entries:
                plan[index, PlanWord.TILES_END] = tiles_before + tiles_end
            for w in cutlass.range_constexpr(PLAN_THREADS // 32):
                tiles_before += warp_tiles[w]
            cute.arch.sync_threads()
        return tiles_before

    @cute.jit
    def prefix_sum(self, value: Int32, lane: Int32) -> Int32:
        """Inclusive prefix sum over a warp's lanes."""
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(value, offset=1 << step, mask_and_clamp=0)
            if lane >= (1 << step):
                value += other
        return value


class Planner(PlanWriter):
    """The kernel that writes the forward pass' plan."""

    def __init__(self, traits: KernelTraits) -> None:
        self.traits = traits

    @cute.kernel
    def make_plan(
        self, cu_seqlens_q: cute.Tensor, cu_seqlens_kv: cute.Tensor, schedule: Schedule, heads: Int32, total_q: Int32,
        total_kv: Int32,
    ):  # fmt: skip
        """Write the plan and the counters, in one CTA."""
        requests = Requests(cu_seqlens_q, cu_seqlens_kv, total_q, total_kv, schedule.plan.shape[0] - 2)
        # A CTA's first tile has the CTA's own index. No CTA waits for another CTA's tile, so it does not matter when a
        # CTA starts.
        self.write_plan(requests, schedule, heads, Int32(schedule.progress.shape[0]))

    @cute.jit
    def write_row(self, plan: cute.Tensor, position: Int32, request: Request, index: Int32, heads: Int32) -> None:
        """Write a request's row of the plan, except for `TILES_END`."""
        traits = self.traits
        # The number of bytes of a head's keys may need more than 32 bits, so the divisors are applied one after the
        # other.
        l2_keys = L2_BYTES // (traits.element_bytes * (traits.qk_head_dim + traits.v_head_dim))
        together = l2_keys // cutlass.max(request.keys, 1)
        most = cutlass.min(cutlass.min(cutlass.max(together, 1), MAX_SECTION_HEADS), heads)
        head_tiles = (request.rows + traits.tile_rows - 1) // traits.tile_rows
        plan[position, PlanWord.FIRST_ROW] = request.first_row
        plan[position, PlanWord.ROWS] = request.rows
        plan[position, PlanWord.FIRST_KEY] = request.first_key
        plan[position, PlanWord.KEYS] = request.keys
        plan[position, PlanWord.HEAD_TILES] = head_tiles
        plan[position, PlanWord.SECTION_HEADS] = self.section_heads(most, heads)

    @cute.jit
    def section_heads(self, most: Int32, heads: Int32) -> Int32:
        """How many heads a section has, at most `most`. If the last section had few heads, its longest tiles would end
        long after all others. So all sections are equal, if they can then have at least half of `most`; otherwise they
        are as equal as possible."""
        section = most
        while (section > (most + 1) // 2) & (heads % section != 0):
            section -= 1
        if heads % section != 0:
            sections = (heads + most - 1) // most
            section = (heads + sections - 1) // sections
        return section
