"""The warpgroup that computes the keys' gradients of a block, dKV = dS^T Q + (share P)^T dO, and half of dQ's columns
or more.

dKV is computed in chunks of columns. A chunk is added to the sums in global memory while the products of the next one
run. P^T and dS^T stay in registers for all chunks of a block, since a chunk's products would be bound by reading them
from shared memory.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from tsmla_kernels.sm90.sparse_backward.config import BLOCK, LATENT_DIM, TILE_HEADS
from tsmla_kernels.sm90.sparse_backward.memory import (
    ACCUMULATORS,
    SLOTS_KEPT,
    THREADS,
    Barrier,
    Item,
    Mma,
    Shared,
    Sums,
    ThreadIndex,
    Traits,
)
from tsmla_kernels.sm90.sparse_backward.products import Addresses, Products, addresses
from tsmla_kernels.sm90.sparse_backward.sums import Adder
from tsmla_kernels.sm90.warp import load_transposed, release


class KeyGradients:
    """Device code of this warpgroup."""

    def __init__(self, traits: Traits, products: Products) -> None:
        self.traits, self.products, self.adder = traits, products, Adder(traits)
        self.chunks = traits.head_dim // traits.chunk_columns
        assert self.chunks % ACCUMULATORS == 0  # so that a block's last chunk is always in the same accumulator

    @cute.jit
    def run(self, sums: Sums, d_q: cute.Tensor, shared: Shared, mma: Mma, item: Item):
        """Run the warpgroup."""
        thread = cute.arch.thread_idx()[0] % 128
        lane = thread % 32
        t = ThreadIndex(Int32(1), thread, lane, (thread // 32) * 16 + lane // 4)
        widths = self.traits.adder_dq
        first = sum(self.traits.scorer_dq)
        dq = self.products.make_dq(mma, widths, t)
        thr = mma.dkv.get_slice(thread)
        acc = [
            cute.make_rmem_tensor(thr.partition_shape_C((BLOCK, self.traits.chunk_columns)), Float32)
            for _ in range(ACCUMULATORS)
        ]
        p, ds = (cute.make_rmem_tensor(thr.partition_shape_A((BLOCK, TILE_HEADS)), self.traits.dtype) for _ in range(2))
        at = addresses(shared)
        cute.arch.mbarrier_wait(shared.queries_full, 0)
        if item.blocks > 0:
            cute.arch.barrier_arrive(barrier_id=Barrier.READ, number_of_threads=THREADS)
        for block in cutlass.range(item.blocks, unroll=1):
            place = block % SLOTS_KEPT
            cute.arch.barrier(barrier_id=Barrier.WRITTEN, number_of_threads=THREADS)
            warpgroup.fence()
            self.products.issue_dq(dq, mma, widths, first, None, at, t)
            warpgroup.commit_group()
            if block > 0:  # the last chunk of the block before, while dQ is computed
                self.add_last(acc, sums, shared, block - 1, t)
            for scores, memory in ((p, shared.p), (ds, shared.ds)):
                self.load_transposed_scores(scores, memory, t)
            self.issue_chunk(acc[0], mma, p, ds, at, 0, t)
            warpgroup.wait_group(1)
            release(shared.keys_empty)
            if block + 1 < item.blocks:
                cute.arch.barrier_arrive(barrier_id=Barrier.READ, number_of_threads=THREADS)
            for chunk in cutlass.range_constexpr(1, self.chunks):
                self.issue_chunk(acc[chunk % ACCUMULATORS], mma, p, ds, at, chunk, t)
                warpgroup.wait_group(1)
                column = Int32((chunk - 1) * self.traits.chunk_columns)
                self.adder.add(acc[(chunk - 1) % ACCUMULATORS], sums, shared, place, column, t)
            warpgroup.wait_group(0)
        if item.blocks > 0:
            self.add_last(acc, sums, shared, item.blocks - 1, t)
        self.products.store_dq(dq, widths, d_q, Int32(first), item, t)

    def add_last(self, acc: list[cute.Tensor], sums: Sums, shared: Shared, block: Int32, t: ThreadIndex) -> None:
        """Add the last chunk of a block."""
        last = self.chunks - 1
        column = Int32(last * self.traits.chunk_columns)
        self.adder.add(acc[last % ACCUMULATORS], sums, shared, block % SLOTS_KEPT, column, t)

    @cute.jit
    def issue_chunk(
        self,
        acc: cute.Tensor,
        mma: Mma,
        p: cute.Tensor,
        ds: cute.Tensor,
        at: Addresses,
        chunk: cutlass.Constexpr[int],
        t: ThreadIndex,
    ):
        """Issue the products of a chunk of columns."""
        column = chunk * self.traits.chunk_columns
        warpgroup.fence()
        self.products.issue_keys(acc, (mma.dkv_first, mma.dkv), ds, at.q, column, t)
        if const_expr(column < LATENT_DIM):  # the columns behind the latent ones have no values
            self.products.issue_keys(acc, (mma.dkv, mma.dkv), p, at.d_out, column, t)
        warpgroup.commit_group()

    @cute.jit
    def load_transposed_scores(self, scores: cute.Tensor, memory: cute.Pointer, t: ThreadIndex):
        """Load P^T or dS^T as the operand A of dKV's products: 16 keys of each warp, 16 heads for each product."""
        packed = cute.recast_tensor(scores, Int32)
        # A lane gives the address of 16 bytes: row lane % 8 of matrix lane / 8. Matrix w is word w of the lanes: keys
        # from 8 (w % 2) and heads from 8 (w / 2) on.
        head = t.lane // 16 * 8 + t.lane % 8
        chunk = t.thread // 32 * 2 + t.lane // 8 % 2
        address = memory.toint() + head * (BLOCK * self.traits.element_bytes) + (chunk ^ head % 8) * 16
        for k in cutlass.range_constexpr(TILE_HEADS // 16):
            loaded = load_transposed(address + k * (16 * BLOCK * self.traits.element_bytes))
            for w in cutlass.range_constexpr(4):
                packed[4 * k + w] = loaded[w]
