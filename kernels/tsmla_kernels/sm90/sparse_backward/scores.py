"""The warpgroup that computes the scores of sparse_mla's gradient: S, dP, P and dS of each block, and some of dQ's
columns."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from tsmla_kernels.sm90.constants import LOG2_E
from tsmla_kernels.sm90.sparse_backward.config import BLOCK, LATENT_DIM, TILE_HEADS
from tsmla_kernels.sm90.sparse_backward.memory import (
    COMPUTE_THREADS,
    GATHER_ROWS,
    SLOTS_KEPT,
    Barrier,
    Item,
    Mma,
    Shared,
    Sums,
    Term,
    ThreadIndex,
    Traits,
)
from tsmla_kernels.sm90.sparse_backward.products import Columns, Products
from tsmla_kernels.sm90.warp import release, store_matrices

SCORES = BLOCK * TILE_HEADS // 128  # scores of a block that a thread has


class Scorer:
    """Device code of this warpgroup."""

    def __init__(self, traits: Traits, products: Products) -> None:
        self.traits, self.products = traits, products

    @cute.jit
    def run(
        self,
        sums: Sums,
        scale: Float32,
        d_q: cute.Tensor,
        shared: Shared,
        mma: Mma,
        item: Item,
        groups: cutlass.Constexpr[bool],
    ):
        """Run the warpgroup. groups: whether the tile has a group of tokens."""
        thread = cute.arch.thread_idx()[0] % 128
        lane = thread % 32
        t = ThreadIndex(Int32(0), thread, lane, (thread // 32) * 16 + lane // 4)
        first = Int32(0)
        dq = self.products.make_dq(mma, self.traits.scorer_dq, t)
        self.load_terms(sums, item, shared, t)
        cute.arch.mbarrier_wait(shared.queries_full, 0)
        of_block = mma.scores.get_slice(thread).partition_shape_C((TILE_HEADS, BLOCK))
        s, dp = (cute.make_rmem_tensor(of_block, Float32) for _ in range(2))
        early = self.traits.early_columns
        before = Columns(0, early)
        for block in cutlass.range(item.blocks, unroll=1):
            place = block % SLOTS_KEPT
            cute.arch.mbarrier_wait(shared.keys_full, block & 1)
            warpgroup.fence()
            self.issue_scores(s, dp, mma, shared, before, before, t)
            cute.arch.mbarrier_wait(shared.keys_full + 1, block & 1)
            self.issue_scores(s, dp, mma, shared, Columns(early, self.traits.head_dim), Columns(early, LATENT_DIM), t)
            warpgroup.wait_group(1)
            self.weigh(s, scale, shared, place, groups, t)
            warpgroup.wait_group(0)
            p, ds = self.probabilities(s, dp, scale, shared, t)
            cute.arch.barrier(barrier_id=Barrier.READ, number_of_threads=COMPUTE_THREADS)
            self.store_scores(p, ds, shared, t)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier_arrive(barrier_id=Barrier.WRITTEN, number_of_threads=COMPUTE_THREADS)
            cute.arch.barrier(barrier_id=Barrier.SCORED, number_of_threads=128)
            warpgroup.fence()
            self.products.issue_dq(dq, mma, self.traits.scorer_dq, first, shared, t)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            cute.arch.sync_warp()
            release(shared.keys_empty)
        self.products.store_dq(dq, self.traits.scorer_dq, d_q, first, item, t)

    @cute.jit
    def load_terms(self, sums: Sums, item: Item, shared: Shared, t: ThreadIndex):
        """Copy the terms of the tile's heads to shared memory. Rows past the token's last head get those of a row that
        sees no key."""
        if t.thread < TILE_HEADS:
            head = item.first_head + t.thread
            row = Int64(item.token) * item.heads + head
            for term in cutlass.range_constexpr(len(Term)):
                value = -Float32.inf if const_expr(term == Term.LSE) else Float32(0.0)
                if head < item.heads:
                    value = sums.row_terms[Int32(term), row]
                shared.terms[term, t.thread] = value
        cute.arch.barrier(barrier_id=Barrier.SCORED, number_of_threads=128)

    @cute.jit
    def valid(
        self, shared: Shared, place: Int32, half: cutlass.Constexpr[int], groups: cutlass.Constexpr[bool],
        t: ThreadIndex,
    ):  # fmt: skip
        """For one of this thread's two heads, bits for the block's keys, 32 in a word, set if the head's token selects
        the key and its row exists; the first one of a word is that of this thread's first score."""
        token, bits = Int32(0), []
        if const_expr(groups):
            token = (t.row + 8 * half) // (TILE_HEADS // self.traits.config.tokens)
        for word in cutlass.range_constexpr(BLOCK // 32):
            first, second = (shared.valid[2 * word + i, token, place] for i in range(2))
            bits.append((first | second << GATHER_ROWS) >> (t.lane % 4 * 2))
        return bits

    @cute.jit
    def issue_scores(
        self,
        s: cute.Tensor,
        dp: cute.Tensor,
        mma: Mma,
        shared: Shared,
        of_keys: cutlass.Constexpr[Columns],
        of_values: cutlass.Constexpr[Columns],
        t: ThreadIndex,
    ):
        """Issue S = Q K^T over some columns of the keys, and dP = dO V^T over some of the values, as two groups."""
        products = (mma.scores_first, mma.scores)
        self.products.issue(products, s, shared.q, self.traits.q, shared.keys, of_keys, t)
        warpgroup.commit_group()
        self.products.issue(products, dp, shared.d_out, self.traits.d_out, shared.keys, of_values, t)
        warpgroup.commit_group()

    @cute.jit
    def weigh(
        self,
        s: cute.Tensor,
        scale: Float32,
        shared: Shared,
        place: Int32,
        groups: cutlass.Constexpr[bool],
        t: ThreadIndex,
    ):
        """Put P in place of S, not yet multiplied by what the sink leaves."""
        for half in cutlass.range_constexpr(2):
            lse = shared.terms[Int32(Term.LSE), t.row + 8 * half]
            bits = self.valid(shared, place, half, groups, t)
            for i in cutlass.range_constexpr(BLOCK // 8):
                for e in cutlass.range_constexpr(2):
                    at = 4 * i + 2 * half + e
                    weight = cute.math.exp2(s[at] * (scale * LOG2_E) + lse, fastmath=True)
                    if ((bits[i // 4] >> (8 * (i % 4) + e)) & 1) == 0:
                        weight = Float32(0.0)
                    s[at] = weight

    @cute.jit
    def probabilities(
        self, weights: cute.Tensor, dp: cute.Tensor, scale: Float32, shared: Shared, t: ThreadIndex
    ):  # fmt: skip
        """P, times what the sink leaves, and dS of a block."""
        p, ds = (cute.make_rmem_tensor((SCORES,), self.traits.dtype) for _ in range(2))
        for half in cutlass.range_constexpr(2):
            share, shift = (shared.terms[Int32(term), t.row + 8 * half] for term in (Term.SHARE, Term.SHIFT))
            for i in cutlass.range_constexpr(BLOCK // 8):
                for e in cutlass.range_constexpr(2):
                    at = 4 * i + 2 * half + e
                    weight = weights[at]
                    p[at] = (weight * share).to(self.traits.dtype)
                    ds[at] = (weight * scale * (dp[at] * share + shift)).to(self.traits.dtype)
        return p, ds

    @cute.jit
    def store_scores(self, p: cute.Tensor, ds: cute.Tensor, shared: Shared, t: ThreadIndex):
        """Store P and dS to shared memory."""
        # A lane gives the address of 16 bytes: row lane % 8 of matrix lane / 8. Matrix w is word w of
        # the lanes: rows from 8 (w % 2) and keys from 8 (w / 2) on.
        row = t.thread // 32 * 16 + t.lane // 8 % 2 * 8 + t.lane % 8
        for pair in cutlass.range_constexpr(SCORES // 8):
            first, chunk = 4 * pair, 2 * pair + t.lane // 16
            offset = row * (BLOCK * self.traits.element_bytes) + (chunk ^ row % 8) * 16
            for memory, values in ((shared.p, p), (shared.ds, ds)):
                words = cute.recast_tensor(values, Int32)
                store_matrices(memory.toint() + offset, *(words[first + w] for w in range(4)))
