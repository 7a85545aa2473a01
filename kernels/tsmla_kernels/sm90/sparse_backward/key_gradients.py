"""The warpgroups that compute the keys' gradients of a block, dKV = dS^T Q + (share P)^T dO, and most of dQ's columns.

dKV is computed in chunks of columns, which a warpgroup adds to the sums in global memory as soon as it has them. While
one warpgroup adds, the other one's products run.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from tsmla_kernels.sm90.sparse_backward.config import BLOCK, LATENT_DIM
from tsmla_kernels.sm90.sparse_backward.memory import (
    ADDING_GROUPS,
    COMPUTE_THREADS,
    SLOTS_KEPT,
    Barrier,
    Item,
    Mma,
    Shared,
    Sums,
    ThreadIndex,
    Traits,
)
from tsmla_kernels.sm90.sparse_backward.products import Products
from tsmla_kernels.sm90.sparse_backward.sums import Adder
from tsmla_kernels.sm90.warp import release


class KeyGradients:
    """Device code of these warpgroups."""

    def __init__(self, traits: Traits, products: Products) -> None:
        self.traits, self.products, self.adder = traits, products, Adder(traits)
        self.chunks = traits.head_dim // traits.chunk_columns // ADDING_GROUPS  # of dKV that a warpgroup computes

    @cute.jit
    def run(self, sums: Sums, d_q: cute.Tensor, shared: Shared, mma: Mma, item: Item, group: Int32):
        """Run warpgroup `group` of ADDING_GROUPS."""
        thread = cute.arch.thread_idx()[0] % 128
        lane = thread % 32
        t = ThreadIndex(group, thread, lane, (thread // 32) * 16 + lane // 4)
        widths = self.traits.adder_dq
        first = sum(self.traits.scorer_dq) + group * sum(widths)
        dq = self.products.make_dq(mma, widths, t)
        acc = cute.make_rmem_tensor(
            mma.dkv.get_slice(thread).partition_shape_C((BLOCK, self.traits.chunk_columns)), Float32
        )
        cute.arch.mbarrier_wait(shared.queries_full, 0)
        if item.blocks > 0:
            cute.arch.barrier_arrive(barrier_id=Barrier.READ, number_of_threads=COMPUTE_THREADS)
        for block in cutlass.range(item.blocks, unroll=1):
            cute.arch.barrier(barrier_id=Barrier.WRITTEN, number_of_threads=COMPUTE_THREADS)
            place = block % SLOTS_KEPT
            for chunk in cutlass.range_constexpr(self.chunks):
                warpgroup.fence()
                if const_expr(chunk == 0):
                    self.products.issue_dq(dq, mma, widths, first, shared, t)
                    warpgroup.commit_group()
                column = (group * self.chunks + chunk) * self.traits.chunk_columns
                self.products.issue_keys(acc, (mma.dkv_first, mma.dkv), shared.ds, shared.q, column, t)
                # The columns behind the latent ones have no values.
                if const_expr((self.chunks + chunk) * self.traits.chunk_columns < LATENT_DIM) or group == 0:
                    self.products.issue_keys(acc, (mma.dkv, mma.dkv), shared.p, shared.d_out, column, t)
                warpgroup.commit_group()
                if const_expr(chunk == 0):
                    warpgroup.wait_group(1)
                    release(shared.keys_empty)
                warpgroup.wait_group(0)
                if const_expr(chunk == self.chunks - 1):
                    if block + 1 < item.blocks:
                        cute.arch.barrier_arrive(barrier_id=Barrier.READ, number_of_threads=COMPUTE_THREADS)
                self.adder.add(acc, sums, shared, place, column, t)
        self.products.store_dq(dq, widths, d_q, first, item, t)
