"""The warpgroups that compute prefill's gradient. Scores are transposed, so that their rows are keys:

    S = K Q^T, P = exp2(S scale - lse), dV += P dO, dP = V dO^T, dS = P (dP - delta), dK += dS Q, dQ += dS^T K

Each warpgroup has half of a tile's keys. P and dS stay in its registers, as operands of dV and dK. dQ sums over all
keys, so dS is also stored to shared memory, and each warpgroup computes half of dQ's columns one step later.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, OperandSource
from cutlass.utils import hopper_helpers as sm90

from tsmla_kernels.sm90.operands import Block, operand, transposed
from tsmla_kernels.sm90.prefill.backward.config import KEY_ROWS, Q_ROWS
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
from tsmla_kernels.sm90.prefill.backward.selection import SelectedQueries
from tsmla_kernels.sm90.prefill.backward.sums import SumStaging
from tsmla_kernels.sm90.prefill.memory import Buffers, Selection, Stage, ThreadIndex
from tsmla_kernels.sm90.warp import store_matrices, transpose_quad, uniform

FAR = 2**31 - 1
ZERO_BARRIER = 1  # ids 1 and 2, one per warpgroup: its 128 threads have zeroed the rows past a request's end


class Consumer:
    """Device code of a compute warpgroup."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits
        self.staging = SumStaging(traits)
        self.selected_queries = SelectedQueries()

    def make_mmas(self) -> Mma:
        dtype, k_major, mn_major = self.traits.dtype, OperandMajorMode.K, OperandMajorMode.MN

        def mma(a_major, b_major, shape, source=OperandSource.SMEM):
            return sm90.make_trivial_tiled_mma(dtype, dtype, a_major, b_major, Float32, (1, 1, 1), shape, source)

        scores, dq = (GROUP_KEYS, Q_ROWS), (Q_ROWS, self.traits.dq_columns)
        return Mma(
            mma(k_major, k_major, scores),
            mma(k_major, k_major, scores),
            mma(k_major, mn_major, (GROUP_KEYS, self.traits.qk_head_dim), OperandSource.RMEM),
            mma(k_major, mn_major, (GROUP_KEYS, self.traits.v_head_dim), OperandSource.RMEM),
            mma(mn_major, mn_major, dq),
            mma(mn_major, mn_major, dq),
        )

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
        thread = cute.arch.thread_idx()[0] % 128
        lane = thread % 32
        t = ThreadIndex(group, thread, lane, (thread // 32) * 16 + lane // 4)
        # Set these flags once, here: a change while products run would serialise the products.
        for products, adds in zip(mma, (False, True, True, True, False, True), strict=True):
            products.set(Field.ACCUMULATE, adds)
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
                stage, previous = self.stage(count), self.stage(count - 1)
                tile = self.traits.query_tile(step, steps)
                self.probabilities(acc, factors, shared, mma, selection, Step(stage, slot, tile), t)
                self.keys_products(acc, factors, shared, mma, stage, t)
                warpgroup.wait_group(1)
                self.leave(shared.dout.empty)
                cute.arch.mbarrier_wait(shared.ds.full + previous.index, previous.phase)
                warpgroup.wait_group(0)
                # All lanes arrive, because all read the rows' terms and compute-sanitizer's racecheck tracks only
                # lanes that arrive.
                cute.arch.mbarrier_arrive(shared.q.empty + stage.index)
                if step > 0:
                    self.put_dq(shared, mma, previous, tiles, t)
                count += 1
            if steps > 0:
                last = self.stage(count - 1)
                cute.arch.mbarrier_wait(shared.ds.full + last.index, last.phase)
                self.put_dq(shared, mma, last, tiles, t)
            self.leave(shared.k.empty)
            self.leave(shared.v.empty)
            if const_expr(self.traits.rope_columns > 0):
                columns = range(self.traits.nope_columns, self.traits.qk_head_dim)
                dk = self.rows_of(acc.dk, self.traits.qk_head_dim)
                self.staging.put(shared, dk, columns, shared.tiles[Tile.FIRST_KEY, slot], (count + tiles) & 1, t)
            dv_column = self.traits.nope_columns if self.traits.rope_columns else 0
            dk_columns = range(self.traits.nope_columns)
            dv_columns = range(dv_column, dv_column + self.traits.v_head_dim)
            self.store(gradients.dk, dk_columns, acc.dk, factors.logits, shared.tiles, slot, t)
            self.store(gradients.dv, dv_columns, acc.dv, factors.output, shared.tiles, slot, t)
            tiles += 1
            cute.arch.mbarrier_wait(shared.k.full, tiles & 1)
            head = uniform(shared.tiles[Tile.HEAD, tiles % TILE_SLOTS])

    def stage(self, count: Int32) -> Stage:
        """The stage of step number `count`, and the stage's parity. Steps are counted from 0 over all tiles.

        Steps take the two stages in turn. A wait for step -1 returns at once."""
        return Stage(count & 1, (count >> 1) & 1)

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

    def rows_of(self, accumulator: cute.Tensor, columns: int) -> cute.Tensor:
        """A lane's part of an accumulator as [2 rows, a quarter of the columns]: 2 of every 8 columns."""
        layout = cute.make_layout((2, (2, columns // 8)), stride=(2, (1, 4)))
        return cute.make_tensor(accumulator.iterator, layout)

    @cute.jit
    def leave(self, barrier: cute.Pointer):
        """Arrive once for the calling warp, which has finished reading a buffer or writing its part of one."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

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
        self.multiply_scores(acc.s, mma, Operand(shared.k, self.traits.k), Operand(shared.q, self.traits.q), stage, t)
        warpgroup.wait_group(0)
        s = self.rows_of(acc.s, Q_ROWS)
        diagonal = uniform(shared.tiles[Tile.DIAGONAL, slot]) - step * Q_ROWS
        keys = uniform(shared.tiles[Tile.KEYS, slot])
        if diagonal > 1 - KEY_ROWS or keys < KEY_ROWS:
            self.mask(s, diagonal, keys, t)
        if const_expr(self.traits.selection):
            self.selected_queries.mask(s, words, t)
        self.powers(acc, factors, shared, stage, t)
        dout = self.dout_stage(stage)
        cute.arch.mbarrier_wait(shared.dout.full + dout.index, dout.phase)
        keys, queries = Operand(shared.v, self.traits.v), Operand(shared.dout, self.traits.dout)
        self.multiply_scores(acc.dp, mma, keys, queries, dout, t)
        cute.arch.mbarrier_wait(shared.ds.empty + stage.index, stage.phase ^ 1)
        warpgroup.wait_group(0)

    def powers(self, acc: Accumulators, factors: Factors, shared: Shared, stage: Stage, t: ThreadIndex):
        """Compute P from S."""
        for g in range(Q_ROWS // 8):
            lse = self.terms(shared, stage, Term.LSE, g, t)
            for i in range(2):
                for e in range(2):
                    at = 4 * g + 2 * i + e
                    power = acc.s[at] * factors.logits_log2 + lse[e]
                    acc.p_float[at] = cute.math.exp2(power, fastmath=True)

    @cute.jit
    def multiply_scores(
        self,
        acc: cute.Tensor,
        mma: Mma,
        keys: Operand,
        queries: Operand,
        stage: Stage,
        t: ThreadIndex,
    ):
        """Issue S = K Q^T or dP = V dO^T."""
        key_block, query_block = keys.block, queries.block
        half = Block(GROUP_KEYS, key_block.columns, key_block.width, key_block.pitch)
        key_offset = t.group * (GROUP_KEYS * key_block.width * self.traits.element_bytes)
        thr = mma.scores.get_slice(t.thread)
        a = mma.scores.make_fragment_A(
            thr.partition_A(operand(self.traits.dtype, keys.buffers.memory, key_offset, half))
        )
        query_offset = stage.index * self.traits.bytes_of(query_block)
        b = mma.scores.make_fragment_B(
            thr.partition_B(operand(self.traits.dtype, queries.buffers.memory, query_offset, query_block))
        )  # fmt: skip
        warpgroup.fence()
        cute.gemm(mma.scores_first, acc, a[None, None, 0], b[None, None, 0], acc)
        for k in cutlass.range_constexpr(1, key_block.columns // 16):
            cute.gemm(mma.scores, acc, a[None, None, k], b[None, None, k], acc)
        warpgroup.commit_group()

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
                delta = self.terms(shared, stage, Term.DELTA, 2 * k + g, t)
                for i in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        at = 4 * g + 2 * i + e
                        ds = p[at] * (acc.dp[8 * k + at] * factors.output + delta[e])
                        acc.ds[8 * k + at] = ds.to(self.traits.dtype)
            cute.make_tensor(acc.p.iterator + 8 * k, cute.make_layout(8)).store(p.load().to(self.traits.dtype))
        self.multiply_keys(acc.dv, mma.dv, acc.p, shared.dout, self.traits.dout, self.dout_stage(stage), t)
        self.multiply_keys(acc.dk, mma.dk, acc.ds, shared.q, self.traits.q, stage, t)
        packed = cute.recast_tensor(acc.ds, Int32)
        target = shared.ds.memory.toint() + stage.index * self.traits.bytes_of(self.traits.ds)
        key = t.group * GROUP_KEYS + (t.thread // 32) * 16 + t.lane % 16
        target += key * (Q_ROWS * self.traits.element_bytes) + ((t.lane // 16) ^ (t.lane % 8)) * 16
        for k in cutlass.range_constexpr(Q_ROWS // 16):
            store_matrices(target ^ (32 * k), *(packed[4 * k + w] for w in range(4)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.leave(shared.ds.full + stage.index)

    @cute.jit
    def multiply_keys(
        self,
        acc: cute.Tensor,
        mma: cute.TiledMma,
        scores: cute.Tensor,
        buffers: Buffers,
        block: Block,
        stage: Stage,
        t: ThreadIndex,
    ):
        """Issue acc += `scores` times the block in `stage` (P dO or dS Q)."""
        queries = operand(self.traits.dtype, buffers.memory, stage.index * self.traits.bytes_of(block), block)
        b = mma.make_fragment_B(mma.get_slice(t.thread).partition_B(transposed(queries)))
        warpgroup.fence()
        for k in cutlass.range_constexpr(Q_ROWS // 16):
            cute.gemm(mma, acc, scores[None, None, k], b[None, None, k], acc)
        warpgroup.commit_group()

    @cute.jit
    def terms(self, shared: Shared, stage: Stage, term: Term, g: cutlass.Constexpr[int], t: ThreadIndex):
        """Load `term` of the two queries that this lane has among the g-th 8 queries."""
        address = shared.row_terms.iterator.toint()
        address += ((stage.index * len(Term) + term) * Q_ROWS + g * 8 + (t.lane % 4) * 2) * 4
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=8)
        pair = cute.make_rmem_tensor((2,), Float32)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(2)), pair)
        return pair

    @cute.jit
    def mask(self, s: cute.Tensor, diagonal: Int32, keys: Int32, t: ThreadIndex):
        """Set a score to -inf if its query does not see its key, or if the key is past the request's end."""
        for i in cutlass.range_constexpr(2):
            key = t.group * GROUP_KEYS + t.row + 8 * i
            first_seeing = key + diagonal - (t.lane % 4) * 2
            if key >= keys:
                first_seeing = Int32(FAR)
            for c in cutlass.range_constexpr(Q_ROWS // 4):
                s[i, c] = cutlass.select_((c // 2) * 8 + c % 2 >= first_seeing, s[i, c], -Float32.inf)

    # ---- dQ

    @cute.jit
    def put_dq(self, shared: Shared, mma: Mma, stage: Stage, tiles: Int32, t: ThreadIndex):
        """Compute this warpgroup's half of dQ's columns for a step, and store them for the reducer warp."""
        block = self.traits.k
        part = Block(block.rows, self.traits.dq_columns, block.width, block.pitch)
        offset = t.group * (self.traits.dq_columns * block.pitch * self.traits.element_bytes)
        keys = transposed(operand(self.traits.dtype, shared.k.memory, offset, part))
        ds_offset = stage.index * self.traits.bytes_of(self.traits.ds)
        ds = transposed(operand(self.traits.dtype, shared.ds.memory, ds_offset, self.traits.ds))
        thr = mma.dq.get_slice(t.thread)
        a, b = mma.dq.make_fragment_A(thr.partition_A(ds)), mma.dq.make_fragment_B(thr.partition_B(keys))
        acc = cute.make_rmem_tensor(thr.partition_shape_C((Q_ROWS, self.traits.dq_columns)), Float32)
        warpgroup.fence()
        cute.gemm(mma.dq_first, acc, a[None, None, 0], b[None, None, 0], acc)
        for k in cutlass.range_constexpr(1, KEY_ROWS // 16):
            cute.gemm(mma.dq, acc, a[None, None, k], b[None, None, k], acc)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        self.leave(shared.ds.empty + stage.index)
        phase = stage.index
        if const_expr(self.traits.rope_columns > 0):
            phase ^= tiles & 1  # each tile before also used the buffer once for rope columns
        columns = range(self.traits.dq_columns)
        self.staging.put(shared, self.rows_of(acc, self.traits.dq_columns), columns, Int32(0), phase, t)

    # ---- the ends of requests

    @cute.jit
    def zero_keys(self, shared: Shared, slot: Int32, t: ThreadIndex):
        """Zero the rows of K and V past a request's keys. dS and P are 0 there, but K and V may be NaN, and 0 * NaN
        must not reach dQ. Each warpgroup zeroes what it reads: all keys of its columns of K, and its own keys of V."""
        keys = uniform(shared.tiles[Tile.KEYS, slot])
        if keys < KEY_ROWS:
            k, v = self.traits.k, self.traits.v
            columns = Block(KEY_ROWS, self.traits.dq_columns, k.width, k.pitch)
            offset = t.group * (self.traits.dq_columns * k.pitch * self.traits.element_bytes)
            self.zero_rows(shared.k.memory, offset, columns, keys, t)
            half = Block(GROUP_KEYS, v.columns, v.width, v.pitch)
            offset = t.group * (GROUP_KEYS * v.width * self.traits.element_bytes)
            self.zero_rows(shared.v.memory, offset, half, cutlass.max(keys - t.group * GROUP_KEYS, 0), t)
            self.zeroed(t)

    @cute.jit
    def zero_queries(self, shared: Shared, stage: Stage, rows: Int32, t: ThreadIndex):
        """Zero the rows of Q and dO past a request's queries, for the reason given in zero_keys. Both warpgroups write
        the same zeros, and each waits only for its own threads."""
        q, dout = self.traits.q, self.traits.dout
        self.zero_rows(shared.q.memory, stage.index * self.traits.bytes_of(q), q, rows, t)
        dout_index = self.dout_stage(stage).index
        self.zero_rows(shared.dout.memory, dout_index * self.traits.bytes_of(dout), dout, rows, t)
        self.zeroed(t)

    @cute.jit
    def zero_rows(self, memory: cute.Pointer, offset: Int32, block: Block, first: Int32, t: ThreadIndex):
        """Zero the rows of a block from `first` on."""
        chunks = block.width // 8  # chunks of 16 bytes in a row of a column tile
        address = memory.toint() + offset
        for row in cutlass.range(first + t.thread // chunks, block.rows, 128 // chunks, unroll=1):
            for tile in cutlass.range_constexpr(block.columns // block.width):
                at = address + (tile * block.pitch + row) * (2 * block.width) + (t.thread % chunks) * 16
                cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {0, 0, 0, 0};", read_only_args=[at])

    @cute.jit
    def zeroed(self, t: ThreadIndex):
        """Make this warpgroup's zeros visible to WGMMA."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=ZERO_BARRIER + t.group, number_of_threads=128)

    # ---- results

    @cute.jit
    def store(
        self,
        target: cute.Tensor,
        columns: cutlass.Constexpr[range],
        acc: cute.Tensor,
        factor: Float32,
        tiles: cute.Tensor,
        slot: Int32,
        t: ThreadIndex,
    ):
        """Store dK or dV of this warpgroup's keys, times `factor`: the first columns of `acc` go to `columns` of
        `target`."""
        head, first = tiles[Tile.HEAD, slot], tiles[Tile.FIRST_KEY, slot]
        keys = tiles[Tile.KEYS, slot]
        heads, width = target.shape[1], target.shape[2]
        groups, quad = len(columns) // 8, t.lane % 4
        values = self.rows_of(acc, len(columns))
        for i in cutlass.range_constexpr(2):
            key = t.group * GROUP_KEYS + t.row + 8 * i
            at_row = Int64(first + key) * heads + head
            # A lane has 2 columns of each group of 8. The four lanes of a row exchange columns, so that of every four
            # groups each lane has one whole (8 columns, 16 bytes), and a row's stores fill whole sectors.
            line = cute.make_tensor(
                (target.iterator + (at_row * width + columns.start + quad * 8)).align(16),
                cute.make_layout((8, groups // 4), stride=(1, 32)),
            )
            pairs = cute.make_rmem_tensor((8,), self.traits.dtype)
            words = cute.recast_tensor(pairs, Int32)
            for g in cutlass.range_constexpr(groups // 4):
                for j in cutlass.range_constexpr(4):
                    pairs[2 * j] = (values[i, 8 * g + 2 * j] * factor).to(self.traits.dtype)
                    pairs[2 * j + 1] = (values[i, 8 * g + 2 * j + 1] * factor).to(self.traits.dtype)
                transpose_quad(words, quad)
                if key < keys:
                    cute.autovec_copy(pairs, line[None, g])
