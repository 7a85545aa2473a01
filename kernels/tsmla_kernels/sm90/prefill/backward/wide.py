"""The warpgroups that compute the gradient of prefill with 256 columns of keys and of values. The registers of a
warpgroup have no room for dK and dV, so each warpgroup has one of them, for all 64 keys of a tile:

    warpgroup 0   S = K Q^T, P = exp(scale S - lse), dV += P dO, half of dQ's columns
    warpgroup 1   dP = V dO^T, dS = P (dP - delta), dK += dS Q, the other half

Warpgroup 0 passes P to warpgroup 1 in float32, each thread to the thread that has the same place in the accumulator.
Warpgroup 1 stores dS for dQ. Each issues the next step's S or dP before the present step's dV or dK, so that the tensor
cores have work while it computes P or dS. dQ is added to the sums in global memory straight from registers.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import Field

from tsmla_kernels.sm90.operands import Block
from tsmla_kernels.sm90.prefill.backward.config import BLOCK_ROWS, Q_ROWS, ROPE_PARTIALS
from tsmla_kernels.sm90.prefill.backward.memory import (
    GROUP_KEYS,
    NO_HEAD,
    TILE_SLOTS,
    Factors,
    KeyGradients,
    Mma,
    Operand,
    Shared,
    Step,
    Sums,
    Term,
    Tile,
    Traits,
)
from tsmla_kernels.sm90.prefill.backward.parts import Parts
from tsmla_kernels.sm90.prefill.backward.selection import WARP_QUERIES, SelectedQueries
from tsmla_kernels.sm90.prefill.memory import Buffers, Selection, ThreadIndex
from tsmla_kernels.sm90.warp import release, uniform

WARPS = 4  # of a warpgroup
P_BYTES = 128 * 16  # 128 threads pass P of eight queries, four numbers each
SIXTEEN = 16  # neighbouring columns of an accumulator, of which a lane has four in each of its rows


class Registers(NamedTuple):
    """A warpgroup's registers that live from step to step: `operand` is P or dS, as an operand of WGMMA; `total` is dV
    or dK; `words` has a step's words of a selection. A step's scores have an accumulator of their own, which would be
    spilled if it lived as long."""

    operand: cute.Tensor
    total: cute.Tensor
    words: cute.Tensor


class Place(NamedTuple):
    """A thread: `t` with the index of its warpgroup, and `keys` with index 0, because both warpgroups have all keys."""

    t: ThreadIndex
    keys: ThreadIndex


class WideConsumer:
    """Device code of both compute warpgroups."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits
        self.parts = Parts(traits)
        self.selected_queries = SelectedQueries(traits)

    @cute.jit
    def compute(
        self,
        gradients: KeyGradients,
        sums: Sums,
        factors: Factors,
        shared: Shared,
        mma: Mma,
        selection: Selection | None,
        group: Int32,
    ):
        """Run compute warpgroup `group`."""
        thread = cute.arch.thread_idx()[0] % 128
        lane = thread % 32
        t = ThreadIndex(group, thread, lane, (thread // 32) * 16 + lane // 4)
        place = Place(t, t._replace(group=Int32(0)))
        # Set these flags once, here: a change while products run would serialise the products.
        for products, adds in zip(mma, (False, True, True, True, False, True), strict=True):
            products.set(Field.ACCUMULATE, adds)
        if group == 0:
            self.compute_values(gradients, sums, factors, shared, mma, selection, place)
        else:
            self.compute_keys(gradients, sums, factors, shared, mma, place)

    def registers(self, total_mma: cute.TiledMma, columns: int, t: ThreadIndex) -> Registers:
        total = total_mma.get_slice(t.thread)
        return Registers(
            cute.make_rmem_tensor(total.partition_shape_A((GROUP_KEYS, Q_ROWS)), self.traits.dtype),
            cute.make_rmem_tensor(total.partition_shape_C((GROUP_KEYS, columns)), Float32),
            cute.make_rmem_tensor((Q_ROWS // WARP_QUERIES,), Int32),
        )

    # ---- warpgroup 0: P, dV

    @cute.jit
    def compute_values(
        self,
        gradients: KeyGradients,
        sums: Sums,
        factors: Factors,
        shared: Shared,
        mma: Mma,
        selection: Selection | None,
        place: Place,
    ):
        """Run warpgroup 0."""
        traits, keys = self.traits, place.keys
        r = self.registers(mma.dv, traits.v_head_dim, keys)
        tiles, count = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(shared.k.full, tiles)
        head = uniform(shared.tiles[Tile.HEAD, tiles])
        while head != NO_HEAD:
            slot = tiles % TILE_SLOTS
            steps = uniform(shared.tiles[Tile.STEPS, slot])
            r.total.fill(0.0)
            self.zero_keys(shared, slot, place)
            if steps > 0:
                first = Step(self.parts.stage(count), slot, self.traits.query_tile(Int32(0), steps))
                self.load_words(r, shared, selection, first, keys)
                first_scores = self.issue_scores(shared, mma, first, keys)
                warpgroup.wait_group(0)
                self.probabilities(r, first_scores, factors, shared, first, count, keys)
                self.load_p(r, shared, keys)
                for step in cutlass.range(1, steps, unroll=1):
                    at = Step(self.parts.stage(count), slot, self.traits.query_tile(step - 1, steps))
                    following = Step(self.parts.stage(count + 1), slot, self.traits.query_tile(step, steps))
                    self.load_words(r, shared, selection, following, keys)
                    scores = self.issue_scores(shared, mma, following, keys)
                    self.issue_values(r, shared, mma, at, keys)
                    warpgroup.wait_group(1)
                    self.probabilities(r, scores, factors, shared, following, count + 1, keys)
                    self.finish_values(shared, at)
                    self.put_dq(sums, shared, mma, at, place.t)
                    self.load_p(r, shared, keys)
                    count += 1
                last = Step(self.parts.stage(count), slot, self.traits.query_tile(steps - 1, steps))
                self.issue_values(r, shared, mma, last, keys)
                self.finish_values(shared, last)
                self.put_dq(sums, shared, mma, last, place.t)
                count += 1
            release(shared.k.empty)
            release(shared.v.empty)
            first_column = traits.nope_columns if traits.rope_columns else 0
            columns = range(first_column, first_column + traits.v_head_dim)
            self.parts.store(gradients.dv, columns, r.total, factors.output, shared.tiles, slot, keys)
            tiles += 1
            cute.arch.mbarrier_wait(shared.k.full, tiles & 1)
            head = uniform(shared.tiles[Tile.HEAD, tiles % TILE_SLOTS])

    @cute.jit
    def load_words(self, r: Registers, shared: Shared, selection: Selection | None, at: Step, t: ThreadIndex):
        """Load the words of a step's selection, if there is one. They arrive while S is computed."""
        if const_expr(self.traits.selection):
            r.words.store(self.selected_queries.load(selection, shared.tiles, at, t).load())

    @cute.jit
    def issue_scores(self, shared: Shared, mma: Mma, at: Step, t: ThreadIndex) -> cute.Tensor:
        """Issue S = K Q^T, and return its accumulator."""
        traits, stage = self.traits, at.stage
        cute.arch.mbarrier_wait(shared.q.full + stage.index, stage.phase)
        self.zero_queries(shared, shared.q, traits.q, at, Int32(0), t)
        keys, queries = Operand(shared.k, traits.k), Operand(shared.q, traits.q)
        scores = self.new_scores(mma, t)
        self.parts.multiply_scores(scores, mma, keys, queries, stage, t)
        return scores

    def new_scores(self, mma: Mma, t: ThreadIndex) -> cute.Tensor:
        """An accumulator of S or dP."""
        shape = mma.scores.get_slice(t.thread).partition_shape_C((GROUP_KEYS, Q_ROWS))
        return cute.make_rmem_tensor(shape, Float32)

    @cute.jit
    def probabilities(
        self,
        r: Registers,
        scores: cute.Tensor,
        factors: Factors,
        shared: Shared,
        at: Step,
        count: Int32,
        t: ThreadIndex,
    ):
        """Replace S by P, and pass it to the other warpgroup. `count` is the step's index over all tiles."""
        traits, stage, slot = self.traits, at.stage, at.slot
        s = self.parts.rows_of(scores, Q_ROWS)
        diagonal = uniform(shared.tiles[Tile.DIAGONAL, slot]) - at.queries * Q_ROWS
        keys = uniform(shared.tiles[Tile.KEYS, slot])
        if diagonal > 1 - traits.key_rows or keys < traits.key_rows:
            self.parts.mask(s, diagonal, keys, t)
        if const_expr(traits.selection):
            self.selected_queries.mask(s, r.words, t)
        for g in cutlass.range_constexpr(Q_ROWS // 8):
            lse = self.parts.terms(shared, stage, Term.LSE, g, t)
            for i in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    at_value = 4 * g + 2 * i + e
                    power = scores[at_value] * factors.logits_log2 + lse[e]
                    scores[at_value] = cute.math.exp2(power, fastmath=True)
        # All lanes arrive: see `Consumer.compute`.
        cute.arch.mbarrier_arrive(shared.q.empty + stage.index)
        cute.arch.mbarrier_wait(shared.p.empty, (count & 1) ^ 1)
        for g in cutlass.range_constexpr(Q_ROWS // 8):
            four = [scores[4 * g + j] for j in range(4)]
            cute.arch.inline_ptx(
                f"st.shared.v4.f32 [{{$r0}} + {g * P_BYTES}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
                read_only_args=[shared.p.memory.toint() + t.thread * 16, *four],
            )
        cute.arch.sync_warp()
        release(shared.p.full)

    @cute.jit
    def load_p(self, r: Registers, shared: Shared, t: ThreadIndex):
        """Write P in 16 bits to the operand, from what this thread has passed to the other warpgroup: a copy in
        registers would be spilled while dQ is computed."""
        for g in cutlass.range_constexpr(Q_ROWS // 8):
            four = cute.make_tensor(r.operand.iterator + 4 * g, cute.make_layout(4))
            four.store(self.passed(shared, g, t).load().to(self.traits.dtype))

    @cute.jit
    def passed(self, shared: Shared, g: cutlass.Constexpr[int], t: ThreadIndex) -> cute.Tensor:
        """P of this thread's keys and of its two among the g-th 8 queries."""
        p = cute.make_rmem_tensor((4,), Float32)
        address = shared.p.memory.toint() + t.thread * 16 + g * P_BYTES
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), p)
        return p

    def pack(self, r: Registers, scores: cute.Tensor):
        """Write dS in 16 bits to the operand."""
        cute.make_tensor(r.operand.iterator, scores.layout).store(scores.load().to(self.traits.dtype))

    @cute.jit
    def issue_values(self, r: Registers, shared: Shared, mma: Mma, at: Step, t: ThreadIndex):
        """Issue dV += P dO."""
        stage = at.stage
        cute.arch.mbarrier_wait(shared.dout.full + stage.index, stage.phase)
        self.zero_queries(shared, shared.dout, self.traits.dout, at, Int32(0), t)
        self.parts.multiply_keys(r.total, mma.dv, r.operand, shared.dout, self.traits.dout, stage, t)

    @cute.jit
    def finish_values(self, shared: Shared, at: Step):
        """Wait for dV and for the step's dS, and release dO."""
        cute.arch.mbarrier_wait(shared.ds.full + at.stage.index, at.stage.phase)
        warpgroup.wait_group(0)
        release(shared.dout.empty + at.stage.index)

    # ---- warpgroup 1: dS, dK

    @cute.jit
    def compute_keys(
        self, gradients: KeyGradients, sums: Sums, factors: Factors, shared: Shared, mma: Mma, place: Place
    ):
        """Run warpgroup 1."""
        traits, keys = self.traits, place.keys
        r = self.registers(mma.dk, traits.qk_head_dim, keys)
        tiles, count = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(shared.k.full, tiles)
        head = uniform(shared.tiles[Tile.HEAD, tiles])
        while head != NO_HEAD:
            slot = tiles % TILE_SLOTS
            steps = uniform(shared.tiles[Tile.STEPS, slot])
            r.total.fill(0.0)
            cute.arch.mbarrier_wait(shared.v.full, tiles & 1)
            self.zero_keys(shared, slot, place)
            if steps > 0:
                first = Step(self.parts.stage(count), slot, self.traits.query_tile(Int32(0), steps))
                first_dp = self.issue_dp(shared, mma, first, keys)
                self.finish_dp(first_dp, factors, shared, first, count, keys, pending=0)
                self.pack(r, first_dp)
                self.store_ds(r, shared, first, keys)
                for step in cutlass.range(1, steps, unroll=1):
                    at = Step(self.parts.stage(count), slot, self.traits.query_tile(step - 1, steps))
                    following = Step(self.parts.stage(count + 1), slot, self.traits.query_tile(step, steps))
                    dp = self.issue_dp(shared, mma, following, keys)
                    self.issue_keys(r, shared, mma, at, keys)
                    self.finish_dp(dp, factors, shared, following, count + 1, keys, pending=1)
                    self.finish_keys(shared, at)
                    self.pack(r, dp)
                    self.store_ds(r, shared, following, keys)
                    self.put_dq(sums, shared, mma, at, place.t)
                    self.parts.load_ds(shared, r.operand, following.stage, keys)
                    count += 1
                last = Step(self.parts.stage(count), slot, self.traits.query_tile(steps - 1, steps))
                self.issue_keys(r, shared, mma, last, keys)
                self.finish_keys(shared, last)
                self.put_dq(sums, shared, mma, last, place.t)
                count += 1
            release(shared.k.empty)
            release(shared.v.empty)
            if const_expr(traits.rope_columns > 0):
                if steps > 0:
                    self.add_rope(sums, shared, r.total, slot, keys)
            columns = range(traits.nope_columns)
            self.parts.store(gradients.dk, columns, r.total, factors.logits, shared.tiles, slot, keys)
            tiles += 1
            cute.arch.mbarrier_wait(shared.k.full, tiles & 1)
            head = uniform(shared.tiles[Tile.HEAD, tiles % TILE_SLOTS])

    @cute.jit
    def issue_dp(self, shared: Shared, mma: Mma, at: Step, t: ThreadIndex) -> cute.Tensor:
        """Issue dP = V dO^T, and return its accumulator."""
        traits, stage = self.traits, at.stage
        cute.arch.mbarrier_wait(shared.dout.full + stage.index, stage.phase)
        self.zero_queries(shared, shared.dout, traits.dout, at, Int32(1), t)
        values, queries = Operand(shared.v, traits.v), Operand(shared.dout, traits.dout)
        dp = self.new_scores(mma, t)
        self.parts.multiply_scores(dp, mma, values, queries, stage, t)
        return dp

    @cute.jit
    def finish_dp(
        self,
        dp: cute.Tensor,
        factors: Factors,
        shared: Shared,
        at: Step,
        count: Int32,
        t: ThreadIndex,
        *,
        pending: cutlass.Constexpr[int],
    ):
        """Wait for dP, but not for the `pending` products that were issued after it. Release dO, and replace dP by
        dS."""
        stage = at.stage
        cute.arch.mbarrier_wait(shared.p.full, count & 1)
        cute.arch.mbarrier_wait(shared.q.full + stage.index, stage.phase)  # the rows' terms arrive with Q
        warpgroup.wait_group(pending)
        release(shared.dout.empty + stage.index)
        for g in cutlass.range_constexpr(Q_ROWS // 8):
            delta = self.parts.terms(shared, stage, Term.DELTA, g, t)
            p = self.passed(shared, g, t)
            for i in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    at_value = 4 * g + 2 * i + e
                    dp[at_value] = p[2 * i + e] * (dp[at_value] * factors.output + delta[e])
        cute.arch.sync_warp()
        release(shared.p.empty)

    @cute.jit
    def store_ds(self, r: Registers, shared: Shared, at: Step, t: ThreadIndex):
        """Store dS once its buffer is free."""
        cute.arch.mbarrier_wait(shared.ds.empty + at.stage.index, at.stage.phase ^ 1)
        self.parts.store_ds(shared, r.operand, at.stage, t)

    @cute.jit
    def issue_keys(self, r: Registers, shared: Shared, mma: Mma, at: Step, t: ThreadIndex):
        """Issue dK += dS Q."""
        self.zero_queries(shared, shared.q, self.traits.q, at, Int32(1), t)
        self.parts.multiply_keys(r.total, mma.dk, r.operand, shared.q, self.traits.q, at.stage, t)

    @cute.jit
    def finish_keys(self, shared: Shared, at: Step):
        """Wait for dK and for the step's dS, and release Q. All lanes arrive: see `Consumer.compute`."""
        cute.arch.mbarrier_wait(shared.ds.full + at.stage.index, at.stage.phase)
        warpgroup.wait_group(0)
        cute.arch.mbarrier_arrive(shared.q.empty + at.stage.index)

    @cute.jit
    def add_rope(self, sums: Sums, shared: Shared, dk: cute.Tensor, slot: Int32, t: ThreadIndex):
        """Add the shared rope columns of dK to their sums."""
        traits, tiles = self.traits, shared.tiles
        head, first_key = tiles[Tile.HEAD, slot], tiles[Tile.FIRST_KEY, slot]
        keys = tiles[Tile.KEYS, slot]
        partial, before = Int32(0), head
        if const_expr(traits.deterministic):
            partial, before = head % ROPE_PARTIALS, head // ROPE_PARTIALS
        turn = self.turn(sums.rope_turns, partial, tiles[Tile.ROPE_TURN, slot], Int32(0))
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

    # ---- dQ

    @cute.jit
    def put_dq(self, sums: Sums, shared: Shared, mma: Mma, at: Step, t: ThreadIndex):
        """Compute this warpgroup's half of dQ's columns for a step, and add it to the sums in global memory: whole
        blocks of 8 rows, for which dq_sum has room at a request's end."""
        traits, tiles, slot = self.traits, shared.tiles, at.slot
        acc = self.parts.multiply_dq(shared, mma, at.stage, t)
        values = self.parts.rows_of(acc, traits.dq_columns)
        head, rows = tiles[Tile.HEAD, slot], tiles[Tile.ROWS, slot] - at.queries * Q_ROWS
        terms = tiles[Tile.FIRST_TERMS, slot] + at.queries
        block = tiles[Tile.FIRST_BLOCK, slot] + at.queries * (Q_ROWS // BLOCK_ROWS)
        turn = self.turn(sums.turns, head, terms, t.group)
        self.take_turn(turn, tiles[Tile.ORDER, slot], t)
        line = (Int64(head) * 2 + t.group) * sums.dq_sum.shape[2] + block
        for i in cutlass.range_constexpr(2):
            block_in_tile = t.thread // 32 * 2 + i
            address = sums.dq_sum.iterator.toint()
            address += (line + block_in_tile) * (BLOCK_ROWS * traits.dq_columns * 4) + t.lane * 16
            if block_in_tile * BLOCK_ROWS < rows:
                for c in cutlass.range_constexpr(traits.dq_columns // SIXTEEN):
                    offset = c * (BLOCK_ROWS * SIXTEEN * 4)
                    self.add_four(address, offset, [values[i, 4 * c + j] for j in range(4)])
        self.pass_turn(turn, t)

    def add_four(self, address: Int64, offset: int, four: list[Float32]):
        """Add four numbers to those `offset` bytes after `address` in global memory."""
        cute.arch.inline_ptx(
            f"red.relaxed.gpu.global.add.v4.f32 [{{$r0}} + {offset}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
            read_only_args=[address, *four],
        )

    @cute.jit
    def turn(self, turns: cute.Tensor, line: Int32, tile: Int32, half: Int32) -> Int64:
        """The address of a counter; `line` is a head or a partial sum."""
        return turns.iterator.toint() + ((Int64(line) * turns.shape[1] + tile) * 2 + half) * 4

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

    # ---- the ends of requests

    @cute.jit
    def zero_keys(self, shared: Shared, slot: Int32, place: Place):
        """Zero the rows of K and V past a request's keys, for the reason that `Consumer.zero_keys` gives: K in this
        warpgroup's half of dQ's columns, V in the warpgroup that reads it."""
        traits, t = self.traits, place.t
        keys = uniform(shared.tiles[Tile.KEYS, slot])
        if keys < traits.key_rows:
            k = traits.k
            columns = Block(k.rows, traits.dq_columns, k.width, k.pitch)
            offset = t.group * (traits.dq_columns * k.pitch * traits.element_bytes)
            self.parts.zero_rows(shared.k.memory, offset, columns, keys, t)
            if t.group == 1:
                self.parts.zero_rows(shared.v.memory, Int32(0), traits.v, keys, t)
            self.parts.zeroed(t)

    @cute.jit
    def zero_queries(
        self, shared: Shared, buffers: Buffers, block: cutlass.Constexpr[Block], at: Step, group: Int32, t: ThreadIndex
    ):
        """Zero the rows of Q or dO past a request's queries. Both warpgroups write the same zeros before they read the
        block, and each waits only for its own threads."""
        rows = uniform(shared.tiles[Tile.ROWS, at.slot]) - at.queries * Q_ROWS
        if rows < Q_ROWS:
            offset = at.stage.index * self.traits.bytes_of(block)
            self.parts.zero_rows(buffers.memory, offset, block, rows, t)
            self.parts.zeroed(t._replace(group=group))
