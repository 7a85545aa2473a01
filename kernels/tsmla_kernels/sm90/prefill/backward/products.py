"""The warpgroups that compute prefill's gradient. Scores are transposed, so that their rows are keys:

    S = K Q^T, P = exp(scale S - lse), dV += P dO, dP = V dO^T, dS = P (dP - delta), dK += dS Q, dQ += dS^T K

Each warpgroup has half of a tile's keys. P and dS stay in its registers, as operands of dV and dK. dQ sums over all
keys, so dS is also stored to shared memory, and each warpgroup computes half of dQ's columns one step later.
"""

from __future__ import annotations

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
    Accumulators,
    Factors,
    KeyGradients,
    Mma,
    Operand,
    Shared,
    Step,
    Term,
    Tile,
    Traits,
)
from tsmla_kernels.sm90.prefill.backward.parts import Parts
from tsmla_kernels.sm90.prefill.backward.selection import SelectedQueries
from tsmla_kernels.sm90.prefill.backward.sums import SumStaging
from tsmla_kernels.sm90.prefill.memory import Selection, Stage, ThreadIndex
from tsmla_kernels.sm90.warp import release, uniform


class Consumer:
    """Device code of a compute warpgroup."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits
        self.parts = Parts(traits)
        self.staging = SumStaging(traits)
        self.selected_queries = SelectedQueries(traits)

    # ---- tiles

    @cute.jit
    def compute(
        self,
        gradients: KeyGradients,
        factors: Factors,
        shared: Shared,
        mma: Mma,
        selection: Selection | None,
        group: Int32,
    ):
        """Run one compute warpgroup, which computes its half of the keys of every tile."""
        t = self.parts.thread_index(group)
        acc = self.accumulators(mma, t)
        # Registers are scarce, so these two counters also give all stages, slots and phases.
        tiles, count = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(shared.k.full, tiles)
        head = uniform(shared.tiles[Tile.HEAD, tiles])
        while head != NO_HEAD:
            slot = tiles % TILE_SLOTS
            steps = uniform(shared.tiles[Tile.STEPS, slot])
            acc.dk.fill(0.0)
            acc.dv.fill(0.0)
            cute.arch.mbarrier_wait(shared.v.full, tiles & 1)
            self.zero_keys(shared, slot, t)
            for step in cutlass.range(steps, unroll=1):
                stage, previous = self.parts.stage(count), self.parts.stage(count - 1)
                tile = self.traits.query_tile(step, steps)
                self.probabilities(acc, factors, shared, mma, selection, Step(stage, slot, tile), t)
                self.keys_products(acc, factors, shared, mma, stage, t)
                warpgroup.wait_group(1)
                release(shared.dout.empty)
                cute.arch.mbarrier_wait(shared.ds.full + previous.index, previous.phase)
                warpgroup.wait_group(0)
                # All lanes arrive, because all read the rows' terms and compute-sanitizer's racecheck tracks only
                # lanes that arrive.
                cute.arch.mbarrier_arrive(shared.q.empty + stage.index)
                if step > 0:
                    self.put_dq(shared, mma, previous, tiles, t)
                count += 1
            if steps > 0:
                last = self.parts.stage(count - 1)
                cute.arch.mbarrier_wait(shared.ds.full + last.index, last.phase)
                self.put_dq(shared, mma, last, tiles, t)
            release(shared.k.empty)
            release(shared.v.empty)
            if const_expr(self.traits.rope_columns > 0):
                columns = range(self.traits.nope_columns, self.traits.qk_head_dim)
                dk = self.parts.rows_of(acc.dk, self.traits.qk_head_dim)
                self.staging.put(shared, dk, columns, shared.tiles[Tile.FIRST_KEY, slot], (count + tiles) & 1, t)
            dv_column = self.traits.nope_columns if self.traits.rope_columns else 0
            dk_columns = range(self.traits.nope_columns)
            dv_columns = range(dv_column, dv_column + self.traits.v_head_dim)
            self.parts.store(gradients.dk, dk_columns, acc.dk, factors.logits, shared.tiles, slot, t)
            self.parts.store(gradients.dv, dv_columns, acc.dv, factors.output, shared.tiles, slot, t)
            tiles += 1
            cute.arch.mbarrier_wait(shared.k.full, tiles & 1)
            head = uniform(shared.tiles[Tile.HEAD, tiles % TILE_SLOTS])

    def accumulators(self, mma: Mma, t: ThreadIndex) -> Accumulators:
        scores, dk, dv = mma.scores.get_slice(t.thread), mma.dk.get_slice(t.thread), mma.dv.get_slice(t.thread)
        shape = (GROUP_KEYS, Q_ROWS)
        s, dp = (cute.make_rmem_tensor(scores.partition_shape_C(shape), Float32) for _ in range(2))
        p, ds = (cute.make_rmem_tensor(dv.partition_shape_A(shape), self.traits.dtype) for _ in range(2))
        return Accumulators(
            s=s,
            p_float=cute.make_rmem_tensor((GROUP_KEYS * Q_ROWS // 128,), Float32),
            dp=dp,
            p=p,
            ds=ds,
            dk=cute.make_rmem_tensor(dk.partition_shape_C((GROUP_KEYS, self.traits.qk_head_dim)), Float32),
            dv=cute.make_rmem_tensor(dv.partition_shape_C((GROUP_KEYS, self.traits.v_head_dim)), Float32),
        )

    def dout_stage(self, stage: Stage) -> Stage:
        """dO's stage in the step whose Q is in `stage`. dO has one buffer, so its parity changes with every step, as
        the index of Q's stage does."""
        return Stage(Int32(0), stage.index)

    # ---- a step

    @cute.jit
    def probabilities(
        self,
        acc: Accumulators,
        factors: Factors,
        shared: Shared,
        mma: Mma,
        selection: Selection | None,
        at: Step,
        t: ThreadIndex,
    ):
        """Compute S = K Q^T, P, and dP = V dO^T."""
        stage, slot, step = at
        if const_expr(self.traits.selection):
            # The words arrive while S is computed.
            words = self.selected_queries.load(selection, shared.tiles, at, t)
        cute.arch.mbarrier_wait(shared.q.full + stage.index, stage.phase)
        rows = uniform(shared.tiles[Tile.ROWS, slot]) - step * Q_ROWS
        if rows < Q_ROWS:
            dout = self.dout_stage(stage)
            cute.arch.mbarrier_wait(shared.dout.full + dout.index, dout.phase)
            self.zero_queries(shared, stage, rows, t)
        keys, queries = Operand(shared.k, self.traits.k), Operand(shared.q, self.traits.q)
        self.parts.multiply_scores(acc.s, mma, keys, queries, stage, t)
        warpgroup.wait_group(0)
        s = self.parts.rows_of(acc.s, Q_ROWS)
        diagonal = uniform(shared.tiles[Tile.DIAGONAL, slot]) - step * Q_ROWS
        keys = uniform(shared.tiles[Tile.KEYS, slot])
        if diagonal > 1 - self.traits.key_rows or keys < self.traits.key_rows:
            self.parts.mask(s, diagonal, keys, t)
        if const_expr(self.traits.selection):
            self.selected_queries.mask(s, words, t)
        self.powers(acc, factors, shared, stage, t)
        dout = self.dout_stage(stage)
        cute.arch.mbarrier_wait(shared.dout.full + dout.index, dout.phase)
        keys, queries = Operand(shared.v, self.traits.v), Operand(shared.dout, self.traits.dout)
        self.parts.multiply_scores(acc.dp, mma, keys, queries, dout, t)
        cute.arch.mbarrier_wait(shared.ds.empty + stage.index, stage.phase ^ 1)
        warpgroup.wait_group(0)

    def powers(self, acc: Accumulators, factors: Factors, shared: Shared, stage: Stage, t: ThreadIndex):
        """Compute P from S."""
        for g in range(Q_ROWS // 8):
            lse = self.parts.terms(shared, stage, Term.LSE, g, t)
            for i in range(2):
                for e in range(2):
                    at = 4 * g + 2 * i + e
                    power = acc.s[at] * factors.logits_log2 + lse[e]
                    acc.p_float[at] = cute.math.exp2(power, fastmath=True)

    @cute.jit
    def keys_products(
        self, acc: Accumulators, factors: Factors, shared: Shared, mma: Mma, stage: Stage, t: ThreadIndex
    ):
        """Compute dS from P and dP. Issue dV += P dO and dK += dS Q, and store dS to shared memory."""
        for k in cutlass.range_constexpr(Q_ROWS // 16):
            # A lane has 8 values for 16 queries. An operand in registers takes them in the accumulator's order.
            p = cute.make_rmem_tensor((8,), Float32)
            p.store(cute.make_tensor(acc.p_float.iterator + 8 * k, cute.make_layout(8)).load())
            for g in cutlass.range_constexpr(2):
                delta = self.parts.terms(shared, stage, Term.DELTA, 2 * k + g, t)
                for i in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        at = 4 * g + 2 * i + e
                        ds = p[at] * (acc.dp[8 * k + at] * factors.output + delta[e])
                        acc.ds[8 * k + at] = ds.to(self.traits.dtype)
            cute.make_tensor(acc.p.iterator + 8 * k, cute.make_layout(8)).store(p.load().to(self.traits.dtype))
        self.parts.multiply_keys(acc.dv, mma.dv, acc.p, shared.dout, self.traits.dout, self.dout_stage(stage), t)
        self.parts.multiply_keys(acc.dk, mma.dk, acc.ds, shared.q, self.traits.q, stage, t)
        self.parts.store_ds(shared, acc.ds, stage, t)

    # ---- dQ

    @cute.jit
    def put_dq(self, shared: Shared, mma: Mma, stage: Stage, tiles: Int32, t: ThreadIndex):
        """Compute this warpgroup's half of dQ's columns for a step, and store them for the reducer warp."""
        acc = self.parts.multiply_dq(shared, mma, stage, t)
        phase = stage.index
        if const_expr(self.traits.rope_columns > 0):
            phase ^= tiles & 1  # each tile before also used the buffer once for rope columns
        columns = range(self.traits.dq_columns)
        self.staging.put(shared, self.parts.rows_of(acc, self.traits.dq_columns), columns, Int32(0), phase, t)

    # ---- the ends of requests

    @cute.jit
    def zero_keys(self, shared: Shared, slot: Int32, t: ThreadIndex):
        """Zero the rows of K and V past a request's keys. dS and P are 0 there, but K and V may be NaN, and 0 * NaN
        must not reach dQ. Each warpgroup zeroes what it reads: all keys of its columns of K, and its own keys of V."""
        keys = uniform(shared.tiles[Tile.KEYS, slot])
        if keys < self.traits.key_rows:
            k, v = self.traits.k, self.traits.v
            columns = Block(self.traits.key_rows, self.traits.dq_columns, k.width, k.pitch)
            offset = t.group * (self.traits.dq_columns * k.pitch * self.traits.element_bytes)
            self.parts.zero_rows(shared.k.memory, offset, columns, keys, t)
            half = Block(GROUP_KEYS, v.columns, v.width, v.pitch)
            offset = t.group * (GROUP_KEYS * v.width * self.traits.element_bytes)
            self.parts.zero_rows(shared.v.memory, offset, half, cutlass.max(keys - t.group * GROUP_KEYS, 0), t)
            self.parts.zeroed(t)

    @cute.jit
    def zero_queries(self, shared: Shared, stage: Stage, rows: Int32, t: ThreadIndex):
        """Zero the rows of Q and dO past a request's queries, for the reason given in zero_keys. Both warpgroups write
        the same zeros, and each waits only for its own threads."""
        q, dout = self.traits.q, self.traits.dout
        self.parts.zero_rows(shared.q.memory, stage.index * self.traits.bytes_of(q), q, rows, t)
        dout_index = self.dout_stage(stage).index
        self.parts.zero_rows(shared.dout.memory, dout_index * self.traits.bytes_of(dout), dout, rows, t)
        self.parts.zeroed(t)
