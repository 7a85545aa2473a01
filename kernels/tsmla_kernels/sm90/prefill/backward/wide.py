"""The warpgroups that compute dK and dV of prefill with 256 columns of keys and of values. The registers of a
warpgroup have no room for both, so each warpgroup has one of them, for all 64 keys of a tile:

    warpgroup 0   S = K Q^T, P = exp(scale S - lse), dV += P dO
    warpgroup 1   dP = V dO^T, dS = P (dP - delta), dK += dS Q

Warpgroup 0 passes P to warpgroup 1 in float32, each thread to the thread that has the same place in the accumulator.
Warpgroup 1 stores dS for warpgroup 2, which computes dQ (wide_dq.py). Each issues the next step's S or dP before the
present step's dV or dK, so that the tensor cores have work while it computes P or dS.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from tsmla_kernels.sm90.operands import Block
from tsmla_kernels.sm90.prefill.backward.config import Q_ROWS
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
from tsmla_kernels.sm90.prefill.backward.wide_dq import RegisterSums
from tsmla_kernels.sm90.prefill.memory import Buffers, Selection, ThreadIndex
from tsmla_kernels.sm90.warp import release, store_matrices, uniform

P_BYTES = 128 * 16  # 128 threads pass P of eight queries, four numbers each


class Registers(NamedTuple):
    """A warpgroup's registers that live from step to step: `operand` is P or dS, as an operand of WGMMA; `total` is dV
    or dK; `words` has a step's words of a selection. A step's scores have an accumulator of their own, which would be
    spilled if it lived as long."""

    operand: cute.Tensor
    total: cute.Tensor
    words: cute.Tensor


class WideConsumer:
    """Device code of warpgroups 0 and 1."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits
        self.parts = Parts(traits)
        self.selected_queries = SelectedQueries(traits)
        self.register_sums = RegisterSums(traits)

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
        """Run warpgroup `group`."""
        t = self.parts.thread_index(Int32(0))  # index 0, because both warpgroups have all keys
        if group == 0:
            cute.arch.setmaxregister_increase(self.traits.registers[0])
            self.compute_values(gradients, factors, shared, mma, selection, t)
        else:
            cute.arch.setmaxregister_increase(self.traits.registers[1])
            self.compute_keys(gradients, sums, factors, shared, mma, t)

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
        factors: Factors,
        shared: Shared,
        mma: Mma,
        selection: Selection | None,
        t: ThreadIndex,
    ):
        """Run warpgroup 0."""
        traits = self.traits
        r = self.registers(mma.dv, traits.v_head_dim, t)
        tiles, count = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(shared.k.full, tiles)
        head = uniform(shared.tiles[Tile.HEAD, tiles])
        while head != NO_HEAD:
            slot = tiles % TILE_SLOTS
            steps = uniform(shared.tiles[Tile.STEPS, slot])
            r.total.fill(0.0)
            if steps > 0:
                first = Step(self.parts.stage(count), slot, self.traits.query_tile(Int32(0), steps))
                self.load_words(r, shared, selection, first, t)
                first_scores = self.issue_scores(shared, mma, first, t)
                warpgroup.wait_group(0)
                self.probabilities(r, first_scores, factors, shared, first, count, t)
                r.operand.store(self.rounded(r, first_scores).load())
                for step in cutlass.range(1, steps, unroll=1):
                    at = Step(self.parts.stage(count), slot, self.traits.query_tile(step - 1, steps))
                    following = Step(self.parts.stage(count + 1), slot, self.traits.query_tile(step, steps))
                    self.load_words(r, shared, selection, following, t)
                    scores = self.issue_scores(shared, mma, following, t)
                    self.issue_values(r, shared, mma, at, t)
                    warpgroup.wait_group(1)
                    self.probabilities(r, scores, factors, shared, following, count + 1, t)
                    p = self.rounded(r, scores)
                    self.finish_values(shared, at)
                    self.replace(r, p, count)
                    count += 1
                last = Step(self.parts.stage(count), slot, self.traits.query_tile(steps - 1, steps))
                self.issue_values(r, shared, mma, last, t)
                self.finish_values(shared, last)
                count += 1
            self.release_keys(shared)
            first_column = traits.nope_columns if traits.rope_columns else 0
            columns = range(first_column, first_column + traits.v_head_dim)
            self.parts.store(gradients.dv, columns, r.total, factors.output, shared.tiles, slot, t)
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
    def passed(self, shared: Shared, g: cutlass.Constexpr[int], t: ThreadIndex) -> cute.Tensor:
        """P of this thread's keys and of its two among the g-th 8 queries."""
        p = cute.make_rmem_tensor((4,), Float32)
        address = shared.p.memory.toint() + t.thread * 16 + g * P_BYTES
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), p)
        return p

    def rounded(self, r: Registers, scores: cute.Tensor) -> cute.Tensor:
        """P or dS in 16 bits, in registers of their own, because products may still read the operand of the step
        before."""
        operand = cute.make_rmem_tensor(r.operand.layout, self.traits.dtype)
        cute.make_tensor(operand.iterator, scores.layout).store(scores.load().to(self.traits.dtype))
        return operand

    def replace(self, r: Registers, operand: cute.Tensor, count: Int32) -> None:
        """Replace the operand, which no product reads any more. `count` is not negative.

        The assembler must not see that this is a copy: it would take one register for both, find it written while
        products run, and serialise them."""
        none = count >> 31
        target, words = cute.recast_tensor(r.operand, Int32), cute.recast_tensor(operand, Int32)
        for i in range(Q_ROWS // 4):
            target[i] = words[i] ^ none

    @cute.jit
    def issue_values(self, r: Registers, shared: Shared, mma: Mma, at: Step, t: ThreadIndex):
        """Issue dV += P dO."""
        stage = at.stage
        cute.arch.mbarrier_wait(shared.dout.full + stage.index, stage.phase)
        self.zero_queries(shared, shared.dout, self.traits.dout, at, Int32(0), t)
        self.parts.multiply_keys(r.total, mma.dv, r.operand, shared.dout, self.traits.dout, stage, t)

    @cute.jit
    def finish_values(self, shared: Shared, at: Step):
        """Wait for dV, and release dO."""
        warpgroup.wait_group(0)
        release(shared.dout.empty + at.stage.index)

    # ---- warpgroup 1: dS, dK

    @cute.jit
    def compute_keys(
        self, gradients: KeyGradients, sums: Sums, factors: Factors, shared: Shared, mma: Mma, t: ThreadIndex
    ):
        """Run warpgroup 1."""
        traits = self.traits
        r = self.registers(mma.dk, traits.qk_head_dim, t)
        tiles, count = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(shared.k.full, tiles)
        head = uniform(shared.tiles[Tile.HEAD, tiles])
        while head != NO_HEAD:
            slot = tiles % TILE_SLOTS
            steps = uniform(shared.tiles[Tile.STEPS, slot])
            r.total.fill(0.0)
            cute.arch.mbarrier_wait(shared.v.full, tiles & 1)
            self.zero_values(shared, slot, t)
            if steps > 0:
                first = Step(self.parts.stage(count), slot, self.traits.query_tile(Int32(0), steps))
                first_dp = self.issue_dp(shared, mma, first, t)
                r.operand.store(self.finish_dp(r, first_dp, factors, shared, first, count, t, pending=0).load())
                for step in cutlass.range(1, steps, unroll=1):
                    at = Step(self.parts.stage(count), slot, self.traits.query_tile(step - 1, steps))
                    following = Step(self.parts.stage(count + 1), slot, self.traits.query_tile(step, steps))
                    dp = self.issue_dp(shared, mma, following, t)
                    self.issue_keys(r, shared, mma, at, t)
                    ds = self.finish_dp(r, dp, factors, shared, following, count + 1, t, pending=1)
                    self.finish_keys(shared, at)
                    self.replace(r, ds, count)
                    count += 1
                last = Step(self.parts.stage(count), slot, self.traits.query_tile(steps - 1, steps))
                self.issue_keys(r, shared, mma, last, t)
                self.finish_keys(shared, last)
                count += 1
            self.release_keys(shared)
            if const_expr(traits.rope_columns > 0):
                if steps > 0:
                    self.register_sums.add_rope(sums, shared, r.total, slot, t)
            columns = range(traits.nope_columns)
            self.parts.store(gradients.dk, columns, r.total, factors.logits, shared.tiles, slot, t)
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
        r: Registers,
        dp: cute.Tensor,
        factors: Factors,
        shared: Shared,
        at: Step,
        count: Int32,
        t: ThreadIndex,
        *,
        pending: cutlass.Constexpr[int],
    ) -> cute.Tensor:
        """Wait for dP, but not for the `pending` products that were issued after it. Release dO, compute dS, store it
        in 16 bits for dQ, and return it."""
        stage = at.stage
        cute.arch.mbarrier_wait(shared.p.full, count & 1)
        cute.arch.mbarrier_wait(shared.q.full + stage.index, stage.phase)  # the rows' terms arrive with Q
        warpgroup.wait_group(pending)
        release(shared.dout.empty + stage.index)
        cute.arch.mbarrier_wait(shared.ds.empty + stage.index, stage.phase ^ 1)
        operand = cute.make_rmem_tensor(r.operand.layout, self.traits.dtype)
        packed, target = cute.recast_tensor(operand, Int32), self.parts.ds_address(shared, stage, t)
        # Each 16 queries' stores come before the next loads, or the assembler would load P of all 64 at once and spill.
        for k in cutlass.range_constexpr(Q_ROWS // 16):
            eight = cute.make_rmem_tensor((8,), Float32)
            for g in cutlass.range_constexpr(2):
                delta = self.parts.terms(shared, stage, Term.DELTA, 2 * k + g, t)
                p = self.passed(shared, 2 * k + g, t)
                for i in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        at_value = 4 * g + 2 * i + e
                        eight[at_value] = p[2 * i + e] * (dp[8 * k + at_value] * factors.output + delta[e])
            cute.make_tensor(operand.iterator + 8 * k, cute.make_layout(8)).store(eight.load().to(self.traits.dtype))
            store_matrices(target ^ (32 * k), *(packed[4 * k + w] for w in range(4)))
        self.parts.stored_ds(shared, stage)
        release(shared.p.empty)
        return operand

    @cute.jit
    def issue_keys(self, r: Registers, shared: Shared, mma: Mma, at: Step, t: ThreadIndex):
        """Issue dK += dS Q."""
        self.zero_queries(shared, shared.q, self.traits.q, at, Int32(1), t)
        self.parts.multiply_keys(r.total, mma.dk, r.operand, shared.q, self.traits.q, at.stage, t)

    @cute.jit
    def finish_keys(self, shared: Shared, at: Step):
        """Wait for dK, and release Q. All lanes arrive: see `Consumer.compute`."""
        warpgroup.wait_group(0)
        cute.arch.mbarrier_arrive(shared.q.empty + at.stage.index)

    @cute.jit
    def release_keys(self, shared: Shared):
        """Release K and V, and the descriptor of the tile before. All lanes have read it, so they meet."""
        cute.arch.sync_warp()
        release(shared.k.empty)
        release(shared.v.empty)

    # ---- the ends of requests

    @cute.jit
    def zero_values(self, shared: Shared, slot: Int32, t: ThreadIndex):
        """Zero the rows of V past a request's keys, for the reason that `Consumer.zero_keys` gives."""
        keys = uniform(shared.tiles[Tile.KEYS, slot])
        if keys < self.traits.key_rows:
            self.parts.zero_rows(shared.v.memory, Int32(0), self.traits.v, keys, t)
            self.parts.zeroed(t._replace(group=Int32(1)))

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
