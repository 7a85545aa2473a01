"""The warpgroups that compute sparse_mla's gradient. For a tile of heads and a block of keys:

    S = Q K^T    P = exp(scale S - lse)    dP = dO V^T    dS = scale P (share dP + shift)
    dQ += dS K   dKV = dS^T Q + (share P)^T dO

Each warpgroup computes S, dP, P and dS of half of the keys. Then each has half of dQ's columns, in registers for all
blocks, and half of dKV's, which it adds to the sums.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field
from cutlass.utils import hopper_helpers as sm90

from tsmla_kernels.sm90.constants import LOG2_E
from tsmla_kernels.sm90.operands import Block, operand, transposed
from tsmla_kernels.sm90.sparse_backward.config import BLOCK, LATENT_DIM, TILE_HEADS
from tsmla_kernels.sm90.sparse_backward.memory import (
    COLUMN_TILE,
    COMPUTE_WARPS,
    GATHER_ROWS,
    GROUP_KEYS,
    SLOTS_KEPT,
    Accumulators,
    Barrier,
    Item,
    Mma,
    Shared,
    Sums,
    Term,
    ThreadIndex,
    Traits,
)
from tsmla_kernels.sm90.sparse_backward.sums import Adder, Place
from tsmla_kernels.sm90.warp import release, store_matrices, transpose_quad

COMPUTE_THREADS = 32 * COMPUTE_WARPS
SCORES = GROUP_KEYS * TILE_HEADS // 128  # how many scores of its warpgroup's keys a thread has


class Consumer:
    """Device code of a compute warpgroup. adds_first: whether it adds a chunk before it issues the next chunk's
    products, and not after."""

    def __init__(self, traits: Traits, adds_first: bool = False) -> None:
        self.traits, self.adds_first = traits, adds_first
        self.adder = Adder(traits)
        self.chunks = traits.dq_columns // COLUMN_TILE  # of a warpgroup's half of dKV's columns

    def make_mmas(self) -> Mma:
        dtype, k_major, mn_major = self.traits.dtype, OperandMajorMode.K, OperandMajorMode.MN

        def mma(a_major: OperandMajorMode, b_major: OperandMajorMode, rows: int, columns: int) -> cute.TiledMma:
            return sm90.make_trivial_tiled_mma(dtype, dtype, a_major, b_major, Float32, (1, 1, 1), (rows, columns))

        return Mma(
            weigh_first=mma(k_major, k_major, TILE_HEADS, BLOCK),
            weigh=mma(k_major, k_major, TILE_HEADS, BLOCK),
            scores_first=mma(k_major, k_major, TILE_HEADS, GROUP_KEYS),
            scores=mma(k_major, k_major, TILE_HEADS, GROUP_KEYS),
            dq=mma(k_major, mn_major, TILE_HEADS, self.traits.dq_width),
            dkv_first=mma(mn_major, mn_major, BLOCK, COLUMN_TILE),
            dkv=mma(mn_major, mn_major, BLOCK, COLUMN_TILE),
        )

    def set_flags(self, mma: Mma) -> None:
        """Say which products add to their accumulators. Called once, before any role begins: a change while products
        run would serialise them."""
        for products, adds in zip(mma, (False, True, False, True, True, False, True), strict=True):
            products.set(Field.ACCUMULATE, adds)

    # ---- a CTA's work

    @cute.jit
    def run(
        self,
        sums: Sums,
        scale: Float32,
        d_q: cute.Tensor,
        shared: Shared,
        mma: Mma,
        item: Item,
        group: Int32,
        groups: cutlass.Constexpr[bool],
    ):
        """Run one compute warpgroup. groups: whether the tile has a group of tokens."""
        thread = cute.arch.thread_idx()[0] % 128
        lane = thread % 32
        t = ThreadIndex(group, thread, lane, (thread // 32) * 16 + lane // 4)
        thr = mma.dq.get_slice(thread)
        dq = cute.make_rmem_tensor(thr.partition_shape_C((TILE_HEADS, self.traits.dq_columns)), Float32)
        dq.fill(0.0)
        self.load_terms(sums, item, shared, t)
        cute.arch.mbarrier_wait(shared.queries_full, 0)
        if item.blocks > 0:
            of_keys = mma.scores.get_slice(thread).partition_shape_C((TILE_HEADS, GROUP_KEYS))
            s, dp = (cute.make_rmem_tensor(of_keys, Float32) for _ in range(2))
            of_chunk = mma.dkv.get_slice(thread).partition_shape_C((BLOCK, COLUMN_TILE))
            even, odd = (cute.make_rmem_tensor(of_chunk, Float32) for _ in range(2))
            odd.fill(0.0)
            acc = Accumulators(dq, s, dp, even, odd)
            cute.arch.mbarrier_wait(shared.keys_full, 0)
            warpgroup.fence()
            self.issue_scores(mma, s, shared.q, self.traits.q, shared, t)
            self.issue_scores(mma, dp, shared.d_out, self.traits.d_out, shared, t)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            for block in cutlass.range(item.blocks, unroll=1):
                place = block % SLOTS_KEPT
                p, ds = self.probabilities(s, dp, scale, shared, self.valid(shared, place, groups, t), t)
                cute.arch.barrier(barrier_id=Barrier.READ, number_of_threads=COMPUTE_THREADS)
                self.store_scores(p, ds, shared, t)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=Barrier.WRITTEN, number_of_threads=COMPUTE_THREADS)
                self.multiply_block(acc, sums, mma, shared, item, block, t)
            last = Place((item.blocks - 1) % SLOTS_KEPT, Int32(0))
            self.adder.add(odd, sums, shared, last, self.chunks - 1, t)
        self.store_dq(dq, d_q, item, t)

    @cute.jit
    def multiply_block(
        self,
        acc: Accumulators,
        sums: Sums,
        mma: Mma,
        shared: Shared,
        item: Item,
        block: Int32,
        t: ThreadIndex,
    ):
        """Compute dQ and dKV of a block, and S and dP of the next one.

        Each chunk of dKV is added while the next one is computed (a block's last chunk: during the next block's first),
        and the other products are spread over the chunks. In the last block S and dP are computed of the same keys
        again; nothing reads them.
        """
        place = Place(block % SLOTS_KEPT, Int32(0))
        # The first block has no block before it.
        before = Place((block + SLOTS_KEPT - 1) % SLOTS_KEPT, cutlass.select_(block == 0, Int32(-1), Int32(0)))
        following = cutlass.min(block + 1, item.blocks - 1)
        for chunk in cutlass.range_constexpr(self.chunks):
            computed, added = (acc.even, acc.odd) if const_expr(chunk % 2 == 0) else (acc.odd, acc.even)
            earlier, added_place = (chunk - 1, place) if const_expr(chunk > 0) else (self.chunks - 1, before)
            if const_expr(self.adds_first):
                self.adder.add(added, sums, shared, added_place, earlier, t)
            if const_expr(chunk == self.chunks - 2):
                cute.arch.mbarrier_wait(shared.keys_full, following & 1)
            warpgroup.fence()
            if const_expr(chunk == 0):
                self.issue_dq(acc.dq, mma, shared, t)
            if const_expr(chunk == self.chunks - 2):
                self.issue_scores(mma, acc.s, shared.q, self.traits.q, shared, t)
            if const_expr(chunk == self.chunks - 1):
                self.issue_scores(mma, acc.dp, shared.d_out, self.traits.d_out, shared, t)
            self.issue_keys(computed, mma, shared, chunk, t)
            warpgroup.commit_group()
            if const_expr(not self.adds_first):
                self.adder.add(added, sums, shared, added_place, earlier, t)
            warpgroup.wait_group(0)
            if const_expr(chunk == 0):
                cute.arch.sync_warp()  # all lanes have read the rows of the block before
                release(shared.keys_empty)
        if const_expr(self.chunks % 2 == 1):
            acc.odd.store(acc.even.load())

    @cute.jit
    def load_terms(self, sums: Sums, item: Item, shared: Shared, t: ThreadIndex):
        """Copy the terms of the tile's heads to shared memory. Rows past the token's last head get those of a row that
        sees no key."""
        if t.group == 0 and t.thread < TILE_HEADS:
            head = item.first_head + t.thread
            row = Int64(item.token) * item.heads + head
            for term in cutlass.range_constexpr(len(Term)):
                value = -Float32.inf if const_expr(term == Term.LSE) else Float32(0.0)
                if head < item.heads:
                    value = sums.row_terms[Int32(term), row]
                shared.terms[term, t.thread] = value
        cute.arch.barrier(barrier_id=Barrier.READ, number_of_threads=COMPUTE_THREADS)

    # ---- a block of keys

    @cute.jit
    def issue_scores(
        self,
        mma: Mma,
        acc: cute.Tensor,
        queries: cute.Pointer,
        heads: cutlass.Constexpr[Block],
        shared: Shared,
        t: ThreadIndex,
    ):
        """Issue S = Q K^T or dP = dO V^T of this warpgroup's keys."""
        block = self.traits.keys
        offset = t.group * (GROUP_KEYS * block.width * self.traits.element_bytes)
        half = block._replace(rows=GROUP_KEYS)
        self.issue((mma.scores_first, mma.scores), acc, queries, heads, shared.keys, offset, half, t)

    @cute.jit
    def issue(
        self,
        products: cutlass.Constexpr[tuple[cute.TiledMma, cute.TiledMma]],
        acc: cute.Tensor,
        queries: cute.Pointer,
        heads: cutlass.Constexpr[Block],
        keys: cute.Pointer,
        offset: Int32,
        block: cutlass.Constexpr[Block],
        t: ThreadIndex,
    ):
        """Issue A B^T: A is the block `heads` at `queries`; B has the rows of `block`, from `offset` bytes into `keys`
        on, and the columns of A."""
        thr = products[0].get_slice(t.thread)
        of_keys = block._replace(columns=heads.columns)
        a = products[0].make_fragment_A(thr.partition_A(operand(self.traits.dtype, queries, Int32(0), heads)))
        b = products[0].make_fragment_B(thr.partition_B(operand(self.traits.dtype, keys, offset, of_keys)))
        cute.gemm(products[0], acc, a[None, None, 0], b[None, None, 0], acc)
        for k in cutlass.range_constexpr(1, heads.columns // 16):
            cute.gemm(products[1], acc, a[None, None, k], b[None, None, k], acc)

    @cute.jit
    def valid(self, shared: Shared, place: Int32, groups: cutlass.Constexpr[bool], t: ThreadIndex):
        """For each of this thread's two heads, a bit for each of its warpgroup's keys, set if the head's token selects
        the key and its row exists."""
        warps, found = GROUP_KEYS // GATHER_ROWS, []
        for half in cutlass.range_constexpr(2):
            token = Int32(0)
            if const_expr(groups):
                token = (t.row + 8 * half) // (TILE_HEADS // self.traits.config.tokens)
            bits = shared.valid[t.group * warps, token, place]
            for warp in cutlass.range_constexpr(1, warps):
                bits |= shared.valid[t.group * warps + warp, token, place] << (warp * GATHER_ROWS)
            found.append(bits)
        return found[0], found[1]

    @cute.jit
    def probabilities(
        self,
        s: cute.Tensor,
        dp: cute.Tensor,
        scale: Float32,
        shared: Shared,
        valid: tuple[Int32, Int32],
        t: ThreadIndex,
    ):
        """P, times what the sink leaves, and dS of this warpgroup's keys."""
        p, ds = (cute.make_rmem_tensor((SCORES,), self.traits.dtype) for _ in range(2))
        terms = cute.make_rmem_tensor((len(Term), 2), Float32)
        for half in cutlass.range_constexpr(2):
            for term in cutlass.range_constexpr(len(Term)):
                terms[term, half] = shared.terms[term, t.row + 8 * half]
        bits = [valid[half] >> (t.lane % 4 * 2) for half in range(2)]
        for i in cutlass.range_constexpr(GROUP_KEYS // 8):
            for half in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    at = 4 * i + 2 * half + e
                    power = s[at] * (scale * LOG2_E) + terms[Term.LSE, half]
                    weight = cute.math.exp2(power, fastmath=True)
                    if ((bits[half] >> (8 * i + e)) & 1) == 0:
                        weight = Float32(0.0)
                    share = terms[Term.SHARE, half]
                    p[at] = (weight * share).to(self.traits.dtype)
                    ds[at] = (weight * scale * (dp[at] * share + terms[Term.SHIFT, half])).to(self.traits.dtype)
        return p, ds

    @cute.jit
    def store_scores(self, p: cute.Tensor, ds: cute.Tensor, shared: Shared, t: ThreadIndex):
        """Store P and dS to shared memory."""
        # A lane gives the address of 16 bytes: row lane % 8 of matrix lane / 8. Matrix w is word w of
        # the lanes: rows from 8 (w % 2) and keys from 8 (w / 2) on.
        row = t.thread // 32 * 16 + t.lane // 8 % 2 * 8 + t.lane % 8
        for pair in cutlass.range_constexpr(SCORES // 8):
            first, chunk = 4 * pair, t.group * (GROUP_KEYS // 8) + 2 * pair + t.lane // 16
            offset = row * (BLOCK * self.traits.element_bytes) + (chunk ^ row % 8) * 16
            for memory, values in ((shared.p, p), (shared.ds, ds)):
                words = cute.recast_tensor(values, Int32)
                store_matrices(memory.toint() + offset, *(words[first + w] for w in range(4)))

    @cute.jit
    def issue_dq(self, dq: cute.Tensor, mma: Mma, shared: Shared, t: ThreadIndex):
        """Issue dQ += dS K, for this warpgroup's half of the columns."""
        block = self.traits.keys
        part = block._replace(columns=self.traits.dq_columns)
        offset = t.group * (self.traits.dq_columns * block.pitch * self.traits.element_bytes)
        thr = mma.dq.get_slice(t.thread)
        keys = transposed(operand(self.traits.dtype, shared.keys, offset, part))
        a = mma.dq.make_fragment_A(thr.partition_A(operand(self.traits.dtype, shared.ds, Int32(0), self.traits.scores)))
        b = mma.dq.make_fragment_B(thr.partition_B(keys))
        for k in cutlass.range_constexpr(BLOCK // 16):
            cute.gemm(mma.dq, dq, a[None, None, k], b[None, None, k], dq)

    @cute.jit
    def issue_keys(self, acc: cute.Tensor, mma: Mma, shared: Shared, chunk: cutlass.Constexpr[int], t: ThreadIndex):
        """Issue a chunk of this warpgroup's half of dKV: dS^T Q and, if these are columns of values too, P^T dO."""
        first = t.group * self.chunks + chunk
        self.issue_part(acc, (mma.dkv_first, mma.dkv), shared.ds, shared.q, shared, first, t)
        if const_expr((self.chunks + chunk) * COLUMN_TILE < LATENT_DIM) or t.group == 0:
            self.issue_part(acc, (mma.dkv, mma.dkv), shared.p, shared.d_out, shared, first, t)

    @cute.jit
    def issue_part(
        self,
        acc: cute.Tensor,
        products: cutlass.Constexpr[tuple[cute.TiledMma, cute.TiledMma]],
        scores: cute.Pointer,
        queries: cute.Pointer,
        shared: Shared,
        tile: Int32,
        t: ThreadIndex,
    ):
        """Issue scores^T queries for one column tile of the queries."""
        thr = products[0].get_slice(t.thread)
        columns = Block(TILE_HEADS, COLUMN_TILE, COLUMN_TILE, TILE_HEADS)
        weights = transposed(operand(self.traits.dtype, scores, Int32(0), self.traits.scores))
        a = products[0].make_fragment_A(thr.partition_A(weights))
        of_queries = transposed(operand(self.traits.dtype, queries, tile * self.traits.bytes_of(columns), columns))
        b = products[0].make_fragment_B(thr.partition_B(of_queries))
        for k in cutlass.range_constexpr(TILE_HEADS // 16):
            product = products[0] if const_expr(k == 0) else products[1]
            cute.gemm(product, acc, a[None, None, k], b[None, None, k], acc)

    # ---- results

    @cute.jit
    def store_dq(self, dq: cute.Tensor, d_q: cute.Tensor, item: Item, t: ThreadIndex):
        """Store this warpgroup's half of dQ's columns."""
        groups, quad = self.traits.dq_columns // 8, t.lane % 4
        # A lane's part of the accumulator as [2 rows, a quarter of the columns]: 2 of every 8 columns.
        values = cute.make_tensor(dq.iterator, cute.make_layout((2, (2, groups)), stride=(2, (1, 4))))
        for i in cutlass.range_constexpr(2):
            head = item.first_head + t.row + 8 * i
            at_row = (Int64(item.token) * item.heads + head) * self.traits.head_dim + t.group * self.traits.dq_columns
            # The four lanes of a row exchange columns, so that of every four groups of 8 columns each lane has one
            # whole, and a row's stores fill whole sectors.
            line = cute.make_tensor(
                (d_q.iterator + (at_row + quad * 8)).align(16), cute.make_layout((8, groups // 4), stride=(1, 32))
            )
            pairs = cute.make_rmem_tensor((8,), self.traits.dtype)
            words = cute.recast_tensor(pairs, Int32)
            for g in cutlass.range_constexpr(groups // 4):
                for j in cutlass.range_constexpr(4):
                    pairs[2 * j] = values[i, 8 * g + 2 * j].to(self.traits.dtype)
                    pairs[2 * j + 1] = values[i, 8 * g + 2 * j + 1].to(self.traits.dtype)
                transpose_quad(words, quad)
                if head < item.heads:
                    cute.autovec_copy(pairs, line[None, g])
