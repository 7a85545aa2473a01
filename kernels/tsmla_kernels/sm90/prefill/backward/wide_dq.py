"""The warpgroup that computes dQ of prefill with 256 columns of keys and of values, and the additions to the sums in
global memory straight from registers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from tsmla_kernels.sm90.prefill.backward.config import BLOCK_ROWS, Q_ROWS, ROPE_PARTIALS
from tsmla_kernels.sm90.prefill.backward.memory import (
    DQ_GROUP,
    GROUPS,
    NO_HEAD,
    TILE_SLOTS,
    Mma,
    Shared,
    Step,
    Sums,
    Tile,
    Traits,
)
from tsmla_kernels.sm90.prefill.backward.parts import Parts
from tsmla_kernels.sm90.prefill.memory import ThreadIndex
from tsmla_kernels.sm90.warp import release, uniform

WARPS = 4  # of a warpgroup
SIXTEEN = 16  # neighbouring columns of an accumulator, of which a lane has four in each of its rows


class RegisterSums:
    """Device code of a warpgroup that adds from its registers to the sums of dQ or of the shared rope columns."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits
        self.parts = Parts(traits)

    @cute.jit
    def add_dq(
        self, sums: Sums, shared: Shared, acc: cute.Tensor, at: Step, part: cutlass.Constexpr[int], t: ThreadIndex
    ):
        """Add part of a step's columns of dQ: whole blocks of 8 rows, for which dq_sum has room at a request's end."""
        traits, tiles, slot = self.traits, shared.tiles, at.slot
        half, first_column = divmod(part * traits.dq_part, traits.dq_columns)
        values = self.parts.rows_of(acc, traits.dq_part)
        rows = tiles[Tile.ROWS, slot] - at.queries * Q_ROWS
        block = tiles[Tile.FIRST_BLOCK, slot] + at.queries * (Q_ROWS // BLOCK_ROWS)
        line = (Int64(tiles[Tile.HEAD, slot]) * GROUPS + half) * sums.dq_sum.shape[2] + block
        for i in cutlass.range_constexpr(2):
            block_in_tile = t.thread // 32 * 2 + i
            address = sums.dq_sum.iterator.toint()
            address += (line + block_in_tile) * (BLOCK_ROWS * traits.dq_columns * 4) + t.lane * 16
            if block_in_tile * BLOCK_ROWS < rows:
                for c in cutlass.range_constexpr(traits.dq_part // SIXTEEN):
                    offset = (first_column + c * SIXTEEN) * (BLOCK_ROWS * 4)
                    self.add_four(address, offset, [values[i, 4 * c + j] for j in range(4)])

    @cute.jit
    def add_rope(self, sums: Sums, shared: Shared, dk: cute.Tensor, slot: Int32, t: ThreadIndex):
        """Add the shared rope columns of dK to their sums."""
        traits, tiles = self.traits, shared.tiles
        head, first_key = tiles[Tile.HEAD, slot], tiles[Tile.FIRST_KEY, slot]
        keys = tiles[Tile.KEYS, slot]
        partial, before = Int32(0), head
        if const_expr(traits.deterministic):
            partial, before = head % ROPE_PARTIALS, head // ROPE_PARTIALS
        turn = self.turn(sums.rope_turns, partial, tiles[Tile.ROPE_TURN, slot])
        self.take_turn(turn, before, t)
        values = self.parts.rows_of(dk, traits.qk_head_dim)
        first = traits.nope_columns // SIXTEEN
        for i in cutlass.range_constexpr(2):
            key = t.row + 8 * i
            row = first_key + key
            line = Int64(partial) * sums.rope_sum.shape[1] + row
            address = sums.rope_sum.iterator.toint() + (line * traits.rope_columns + t.lane % 4 * 4) * 4
            if key < keys:
                for c in cutlass.range_constexpr(traits.rope_columns // SIXTEEN):
                    # The order of `sum_position`: odd rows swap neighbouring groups of 16 columns.
                    target = address + (c ^ (row & 1)) * (4 * SIXTEEN)
                    self.add_four(target, 0, [values[i, 4 * (first + c) + j] for j in range(4)])
        self.pass_turn(turn, t)

    def add_four(self, address: Int64, offset: int, four: list[Float32]):
        """Add four numbers to those `offset` bytes after `address` in global memory."""
        cute.arch.inline_ptx(
            f"red.relaxed.gpu.global.add.v4.f32 [{{$r0}} + {offset}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
            read_only_args=[address, *four],
        )

    @cute.jit
    def turn(self, turns: cute.Tensor, line: Int32, tile: Int32) -> Int64:
        """The address of the first of a tile's two counters; `line` is a head or a partial sum."""
        return turns.iterator.toint() + (Int64(line) * turns.shape[1] + tile) * 8

    @cute.jit
    def take_turn(self, turn: Int64, order: Int32, t: ThreadIndex):
        """If deterministic, wait in one lane until the four warps of each of `order` other tiles have added. This wait
        ends for the reason that `Reducer.add` gives."""
        if const_expr(self.traits.deterministic):
            if t.lane == 0:
                cute.arch.inline_ptx(
                    "{ .reg .pred p; .reg .b32 n; AGAIN: ld.acquire.gpu.global.b32 n, [{$r0}];"
                    " setp.lt.s32 p, n, {$r1}; @p bra AGAIN; }",
                    read_only_args=[turn, order * WARPS],
                )
            cute.arch.sync_warp()

    @cute.jit
    def pass_turn(self, turn: Int64, t: ThreadIndex):
        """If deterministic, count this warp's addition."""
        if const_expr(self.traits.deterministic):
            cute.arch.sync_warp()
            if t.lane == 0:
                cute.arch.inline_ptx("red.release.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[turn])


class QueryConsumer:
    """Device code of warpgroup 2, which computes dQ from the dS that warpgroup 1 stores. It computes one part of the
    columns after the other, because its registers have no room for all of them."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits
        self.parts = Parts(traits)
        self.register_sums = RegisterSums(traits)

    @cute.jit
    def compute(self, sums: Sums, shared: Shared, mma: Mma):
        """Run warpgroup 2."""
        t = self.parts.thread_index(Int32(DQ_GROUP))
        tiles, count = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(shared.k.full, tiles)
        head = uniform(shared.tiles[Tile.HEAD, tiles])
        while head != NO_HEAD:
            slot = tiles % TILE_SLOTS
            steps = uniform(shared.tiles[Tile.STEPS, slot])
            self.zero_keys(shared, slot, t)
            for step in cutlass.range(steps, unroll=1):
                at = Step(self.parts.stage(count), slot, self.traits.query_tile(step, steps))
                self.put_dq(sums, shared, mma, at, t)
                count += 1
            cute.arch.sync_warp()  # all lanes have read the descriptor
            release(shared.k.empty)
            tiles += 1
            cute.arch.mbarrier_wait(shared.k.full, tiles & 1)
            head = uniform(shared.tiles[Tile.HEAD, tiles % TILE_SLOTS])

    @cute.jit
    def put_dq(self, sums: Sums, shared: Shared, mma: Mma, at: Step, t: ThreadIndex):
        """Compute dQ of a step, and add it to its sums."""
        tiles, slot, stage = shared.tiles, at.slot, at.stage
        turn = self.register_sums.turn(sums.turns, tiles[Tile.HEAD, slot], tiles[Tile.FIRST_TERMS, slot] + at.queries)
        cute.arch.mbarrier_wait(shared.ds.full + stage.index, stage.phase)
        parts = self.traits.qk_head_dim // self.traits.dq_part
        for part in cutlass.range_constexpr(parts):
            acc = self.parts.issue_dq(shared, mma, stage, t._replace(group=Int32(part)))
            if const_expr(part == 0):
                self.register_sums.take_turn(turn, tiles[Tile.ORDER, slot], t)
            warpgroup.wait_group(0)
            if const_expr(part == parts - 1):
                release(shared.ds.empty + stage.index)
            self.register_sums.add_dq(sums, shared, acc, at, part, t)
        self.register_sums.pass_turn(turn, t)

    @cute.jit
    def zero_keys(self, shared: Shared, slot: Int32, t: ThreadIndex):
        """Zero the rows of K past a request's keys, for the reason that `Consumer.zero_keys` gives. Warpgroup 0 may
        read them before or after: it masks their scores."""
        keys = uniform(shared.tiles[Tile.KEYS, slot])
        if keys < self.traits.key_rows:
            self.parts.zero_rows(shared.k.memory, Int32(0), self.traits.k, keys, t)
            self.parts.zeroed(t)
