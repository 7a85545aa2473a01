"""The warpgroups that compute sparse_mla's gradient. For a token's heads and a block of its keys:

    S = Q K^T    P = exp2(S scale - lse)    dP = dO V^T    dS = scale P (share dP + shift)
    dQ += dS K   dKV^T = Q^T dS + dO^T (share P)

Warpgroup 0 computes S and warpgroup 1 dP. Each gives the other its scores of half of the keys, so that each computes P
and dS of one half. Then each has half of dQ's columns, in registers for all blocks, and half of dKV's, which go to the
sums.
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
from tsmla_kernels.sm90.sparse_backward.config import BLOCK, TILE_HEADS
from tsmla_kernels.sm90.sparse_backward.memory import (
    CHUNK_TILES,
    COLUMN_TILE,
    COMPUTE_WARPS,
    GROUP_KEYS,
    SLOTS_KEPT,
    Barrier,
    Chunk,
    Item,
    Mma,
    Shared,
    Sums,
    Term,
    ThreadIndex,
    Traits,
    leave,
)
from tsmla_kernels.sm90.sparse_backward.sums import GROUP_CHUNKS, SumStaging
from tsmla_kernels.sm90.warp import store_matrices, transpose_quad

COMPUTE_THREADS = 32 * COMPUTE_WARPS
HALF = GROUP_KEYS * TILE_HEADS // 128  # scores of half of a block's keys that a thread has


class Consumer:
    """Device code of a compute warpgroup."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits
        self.staging = SumStaging(traits)

    def make_mmas(self) -> Mma:
        dtype, k_major, mn_major = self.traits.dtype, OperandMajorMode.K, OperandMajorMode.MN

        def mma(a_major: OperandMajorMode, b_major: OperandMajorMode, rows: int, columns: int) -> cute.TiledMma:
            return sm90.make_trivial_tiled_mma(dtype, dtype, a_major, b_major, Float32, (1, 1, 1), (rows, columns))

        return Mma(
            scores_first=mma(k_major, k_major, TILE_HEADS, BLOCK),
            scores=mma(k_major, k_major, TILE_HEADS, BLOCK),
            dq=mma(k_major, mn_major, TILE_HEADS, self.traits.dq_width),
            dkv_first=mma(mn_major, mn_major, COLUMN_TILE, BLOCK),
            dkv=mma(mn_major, mn_major, COLUMN_TILE, BLOCK),
        )

    # ---- a CTA's work

    @cute.jit
    def run(self, sums: Sums, scale: Float32, d_q: cute.Tensor, shared: Shared, mma: Mma, item: Item, group: Int32):
        """Run one compute warpgroup."""
        thread = cute.arch.thread_idx()[0] % 128
        lane = thread % 32
        t = ThreadIndex(group, thread, lane, (thread // 32) * 16 + lane // 4)
        # Set these flags once, here: a change while products run would serialise the products.
        for products, adds in zip(mma, (False, True, True, False, True), strict=True):
            products.set(Field.ACCUMULATE, adds)
        thr = mma.dq.get_slice(thread)
        dq = cute.make_rmem_tensor(thr.partition_shape_C((TILE_HEADS, self.traits.dq_columns)), Float32)
        dq.fill(0.0)
        terms = self.terms(sums, item, Int32(d_q.shape[1]), t)
        cute.arch.mbarrier_wait(shared.queries_full, 0)
        count = Int32(0)
        for block in cutlass.range(item.blocks, unroll=1):
            cute.arch.mbarrier_wait(shared.keys_full, block & 1)
            acc = cute.make_rmem_tensor(mma.scores.get_slice(thread).partition_shape_C((TILE_HEADS, BLOCK)), Float32)
            if const_expr(self.traits.rope_columns > 0):
                if group == 0:
                    self.multiply_scores(acc, mma, shared.q, shared.keys, self.traits.q, t)
                else:
                    self.multiply_scores(acc, mma, shared.d_out, shared.keys, self.traits.d_out, t)
            else:
                queries = shared.q.toint()
                if group == 1:
                    queries = shared.d_out.toint()
                memory = cute.make_ptr(self.traits.dtype, queries, cute.AddressSpace.smem, assumed_align=1024)
                self.multiply_scores(acc, mma, memory, shared.keys, self.traits.q, t)
            s, dp = self.exchange(acc, shared, t)
            self.probabilities(s, dp, terms, scale, shared.valid[group, block % SLOTS_KEPT], shared, t)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=Barrier.WRITTEN, number_of_threads=COMPUTE_THREADS)
            self.add_dq(dq, mma, shared, t)
            for chunk in cutlass.range_constexpr(GROUP_CHUNKS):
                first = t.group * (GROUP_CHUNKS * CHUNK_TILES) + chunk * CHUNK_TILES
                self.put_chunk(mma, shared, first, Chunk(count, block % SLOTS_KEPT), CHUNK_TILES, chunk == 0, t)
                count += 1
            if const_expr(self.traits.rope_columns > 0):
                if group == 0:
                    rope = Int32(self.traits.values.columns // COLUMN_TILE)
                    self.put_chunk(mma, shared, rope, Chunk(count, block % SLOTS_KEPT), 1, False, t)
                    count += 1
        self.store_dq(dq, d_q, item, t)

    @cute.jit
    def terms(self, sums: Sums, item: Item, heads: Int32, t: ThreadIndex):
        """The terms of this thread's two heads, [Term, 2]. Rows past the token's last head have those of a row that
        sees no key."""
        terms = cute.make_rmem_tensor((len(Term), 2), Float32)
        terms.fill(0.0)
        for i in cutlass.range_constexpr(2):
            terms[Term.LSE, i] = -Float32.inf
            head = item.first_head + t.row + 8 * i
            if head < heads:
                row = Int64(item.token) * heads + head
                for term in cutlass.range_constexpr(len(Term)):
                    terms[term, i] = sums.row_terms[Int32(term), row]
        return terms

    # ---- a block of keys

    @cute.jit
    def multiply_scores(
        self,
        acc: cute.Tensor,
        mma: Mma,
        queries: cute.Pointer,
        keys: cute.Pointer,
        block: Block,
        t: ThreadIndex,
    ):
        """Compute S = Q K^T or dP = dO V^T: over as many columns of the keys as `block`, of Q or dO, has."""
        thr = mma.scores.get_slice(t.thread)
        of_keys = self.traits.keys._replace(columns=block.columns)
        a = mma.scores.make_fragment_A(thr.partition_A(operand(self.traits.dtype, queries, Int32(0), block)))
        b = mma.scores.make_fragment_B(thr.partition_B(operand(self.traits.dtype, keys, Int32(0), of_keys)))
        warpgroup.fence()
        cute.gemm(mma.scores_first, acc, a[None, None, 0], b[None, None, 0], acc)
        for k in cutlass.range_constexpr(1, block.columns // 16):
            cute.gemm(mma.scores, acc, a[None, None, k], b[None, None, k], acc)
        warpgroup.commit_group()
        warpgroup.wait_group(0)

    @cute.jit
    def exchange(self, acc: cute.Tensor, shared: Shared, t: ThreadIndex):
        """Give the other warpgroup its half of the keys' scores, and take this one's half from it. Returns S and dP."""
        first = t.group == 0
        part = shared.exchange.toint() + t.thread * 16
        mine, other = part + t.group * (128 * HALF * 4), part + (1 - t.group) * (128 * HALF * 4)
        s, dp = (cute.make_rmem_tensor((HALF,), Float32) for _ in range(2))
        for quad in cutlass.range_constexpr(HALF // 4):
            four = [cutlass.select_(first, acc[HALF + 4 * quad + j], acc[4 * quad + j]) for j in range(4)]
            cute.arch.inline_ptx(
                f"st.shared.v4.f32 [{{$r0}} + {quad * 128 * 16}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
                read_only_args=[mine, *four],
            )
        cute.arch.barrier(barrier_id=Barrier.EXCHANGED, number_of_threads=COMPUTE_THREADS)
        for quad in cutlass.range_constexpr(HALF // 4):
            pointer = cute.make_ptr(Float32, other + quad * 128 * 16, cute.AddressSpace.smem, assumed_align=16)
            received = cute.make_rmem_tensor((4,), Float32)
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), received)
            for j in cutlass.range_constexpr(4):
                at = 4 * quad + j
                kept = cutlass.select_(first, acc[at], acc[HALF + at])
                s[at] = cutlass.select_(first, kept, received[j])
                dp[at] = cutlass.select_(first, received[j], kept)
        return s, dp

    @cute.jit
    def probabilities(
        self,
        s: cute.Tensor,
        dp: cute.Tensor,
        terms: cute.Tensor,
        scale: Float32,
        valid: Int32,
        shared: Shared,
        t: ThreadIndex,
    ):
        """Compute P and dS of this warpgroup's keys, and store them to shared memory."""
        p, ds = (cute.make_rmem_tensor((HALF,), self.traits.dtype) for _ in range(2))
        bits = valid >> (t.lane % 4 * 2)
        for i in cutlass.range_constexpr(GROUP_KEYS // 8):
            for half in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    at = 4 * i + 2 * half + e
                    power = s[at] * (scale * LOG2_E) + terms[Term.LSE, half]
                    weight = cute.math.exp2(power, fastmath=True)
                    if ((bits >> (8 * i + e)) & 1) == 0:
                        weight = Float32(0.0)
                    share = terms[Term.SHARE, half]
                    p[at] = (weight * share).to(self.traits.dtype)
                    ds[at] = (weight * scale * (dp[at] * share + terms[Term.SHIFT, half])).to(self.traits.dtype)
        # A lane gives the address of 16 bytes: row lane % 8 of matrix lane / 8. Matrix w is word w of
        # the lanes: rows from 8 (w % 2) and keys from 8 (w / 2) on.
        row = t.thread // 32 * 16 + t.lane // 8 % 2 * 8 + t.lane % 8
        chunk = t.group * (GROUP_KEYS // 8) + t.lane // 16
        offset = row * (BLOCK * self.traits.element_bytes) + (chunk ^ row // 2 % 4) * 16
        for memory, values in ((shared.p, p), (shared.ds, ds)):
            words = cute.recast_tensor(values, Int32)
            store_matrices(memory.toint() + offset, *(words[w] for w in range(4)))

    @cute.jit
    def add_dq(self, dq: cute.Tensor, mma: Mma, shared: Shared, t: ThreadIndex):
        """Issue dQ += dS K, for this warpgroup's half of the columns."""
        block = self.traits.keys
        part = block._replace(columns=self.traits.dq_columns)
        offset = t.group * (self.traits.dq_columns * block.pitch * self.traits.element_bytes)
        thr = mma.dq.get_slice(t.thread)
        keys = transposed(operand(self.traits.dtype, shared.keys, offset, part))
        a = mma.dq.make_fragment_A(thr.partition_A(operand(self.traits.dtype, shared.ds, Int32(0), self.traits.scores)))
        b = mma.dq.make_fragment_B(thr.partition_B(keys))
        warpgroup.fence()
        for k in cutlass.range_constexpr(BLOCK // 16):
            cute.gemm(mma.dq, dq, a[None, None, k], b[None, None, k], dq)
        warpgroup.commit_group()

    @cute.jit
    def put_chunk(
        self,
        mma: Mma,
        shared: Shared,
        first: Int32,
        chunk: Chunk,
        tiles: cutlass.Constexpr[int],
        releases: cutlass.Constexpr[bool],
        t: ThreadIndex,
    ):
        """Compute `tiles` column tiles, from `first` on, of the keys' gradient, and hand them to the reducer warp. A
        single tile has rope columns, which are no values. `releases`: release the keys when the products before these
        are done."""
        shape = mma.dkv.get_slice(t.thread).partition_shape_C((COLUMN_TILE, BLOCK))
        accumulators = [cute.make_rmem_tensor(shape, Float32) for _ in range(tiles)]
        for i in cutlass.range_constexpr(tiles):
            self.multiply_keys(accumulators[i], mma, shared, first + i, tiles > 1, t)
        warpgroup.commit_group()
        if const_expr(releases):
            warpgroup.wait_group(1)
            leave(shared.keys_empty)
        warpgroup.wait_group(0)
        self.staging.put(shared, accumulators, chunk.count, chunk.place, t)

    @cute.jit
    def multiply_keys(
        self,
        acc: cute.Tensor,
        mma: Mma,
        shared: Shared,
        tile: Int32,
        values: cutlass.Constexpr[bool],
        t: ThreadIndex,
    ):
        """Issue column tile number `tile` of dKV^T: Q^T dS and, if these are columns of values too, dO^T P."""
        columns = Block(TILE_HEADS, COLUMN_TILE, COLUMN_TILE, TILE_HEADS)
        thr = mma.dkv.get_slice(t.thread)
        offset = tile * self.traits.bytes_of(columns)
        pairs = [(shared.q, shared.ds), (shared.d_out, shared.p)] if const_expr(values) else [(shared.q, shared.ds)]
        warpgroup.fence()
        for i in cutlass.range_constexpr(len(pairs)):
            queries, scores = pairs[i]
            a = mma.dkv.make_fragment_A(
                thr.partition_A(transposed(operand(self.traits.dtype, queries, offset, columns)))
            )
            weights = transposed(operand(self.traits.dtype, scores, Int32(0), self.traits.scores))
            b = mma.dkv.make_fragment_B(thr.partition_B(weights))
            for k in cutlass.range_constexpr(TILE_HEADS // 16):
                products = mma.dkv_first if const_expr(i == 0 and k == 0) else mma.dkv
                cute.gemm(products, acc, a[None, None, k], b[None, None, k], acc)

    # ---- results

    @cute.jit
    def store_dq(self, dq: cute.Tensor, d_q: cute.Tensor, item: Item, t: ThreadIndex):
        """Store this warpgroup's half of dQ's columns."""
        heads, groups, quad = Int32(d_q.shape[1]), self.traits.dq_columns // 8, t.lane % 4
        # A lane's part of the accumulator as [2 rows, a quarter of the columns]: 2 of every 8 columns.
        values = cute.make_tensor(dq.iterator, cute.make_layout((2, (2, groups)), stride=(2, (1, 4))))
        for i in cutlass.range_constexpr(2):
            head = item.first_head + t.row + 8 * i
            at_row = (Int64(item.token) * heads + head) * self.traits.head_dim + t.group * self.traits.dq_columns
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
                if head < heads:
                    cute.autovec_copy(pairs, line[None, g])
