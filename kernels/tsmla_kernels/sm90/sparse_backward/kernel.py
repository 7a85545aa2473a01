"""The gradient of sparse_mla over plain caches of 16 bits, for Hopper.

There are three main launches: `prepare` computes the terms of query rows and zeroes the sums; `differentiate` computes
dq and the sums of the caches' gradients; `finish` rounds these sums. If deterministic, `weigh` runs before
`differentiate`, to find bounds that make the sums exact integers. A CTA of `differentiate` takes up to 64 heads of one
token and the keys that the token selected, 64 at a time:

  warpgroups 0 and 1   all products (products.py); they add the keys' gradients to the sums in global memory (sums.py)
  warps 8 to 11        gather keys; the first of them also copies Q and dO (gather.py)
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from tsmla_kernels.sm90.sparse_backward.config import BLOCK, TILE_HEADS, SparseBackwardConfig
from tsmla_kernels.sm90.sparse_backward.gather import Gatherer
from tsmla_kernels.sm90.sparse_backward.memory import (
    COMPUTE_REGISTERS,
    GATHER_WARP,
    GROUPS,
    OTHER_REGISTERS,
    THREADS,
    Copies,
    Item,
    Keys,
    Mma,
    Operands,
    Saved,
    Sums,
    Traits,
    init_mbarriers,
    make_storage,
    shared_memory,
)
from tsmla_kernels.sm90.sparse_backward.products import Consumer
from tsmla_kernels.sm90.sparse_backward.rows import CTA_ROWS, CTA_VECTORS, ROW_THREADS, VECTOR, WARP_ROWS, RowKernels
from tsmla_kernels.sm90.sparse_backward.weigh import (
    WEIGH_BLOCK,
    WEIGH_GATHER_WARP,
    WEIGH_STAGES,
    WEIGH_THREADS,
    Weigher,
)


class SparseMlaBackward:
    """One compiled gradient: `config` is static. The launcher takes a stream and the operands of record.py."""

    def __init__(self, config: SparseBackwardConfig) -> None:
        self.config = config
        self.traits = Traits(config)
        self.storage = make_storage(self.traits)
        self.rows = RowKernels(self.traits)
        self.gatherer = Gatherer(self.traits, self.traits.keys)
        self.consumer = Consumer(self.traits)
        self.weigher = Weigher(self.traits, self.consumer)

    def named(self, tensors: tuple[cute.Tensor, ...]) -> Operands:
        """The operands by name. For an operand that the config does not have another stands, which nothing reads."""
        config, rest = self.config, list(tensors)
        caches = 1 + config.two_caches
        q = rest.pop(0)
        read = tuple(rest.pop(0) for _ in range(caches))
        indices = rest.pop(0)
        lengths = rest.pop(0) if config.lengths else indices
        sinks = rest.pop(0) if config.sinks else indices
        scales, out, lse, d_out, d_lse, d_q = (rest.pop(0) for _ in range(6))
        written = tuple(rest.pop(0) for _ in range(caches))
        sink_terms = rest.pop(0) if config.sinks else lse
        kv_sum, row_terms, *bounds = rest
        row_weights, key_norms, key_bounds, key_counts = bounds or (row_terms, row_terms, indices, indices)
        sums = Sums(
            kv_sum=kv_sum, row_terms=row_terms, row_weights=row_weights, key_norms=key_norms, key_bounds=key_bounds,
            key_counts=key_counts,
        )  # fmt: skip
        return Operands(
            q=q, caches=read, indices=indices, lengths=lengths, sinks=sinks, scales=scales, out=out, lse=lse,
            d_out=d_out, d_lse=d_lse, d_q=d_q, d_caches=written, sink_terms=sink_terms, sums=sums,
        )  # fmt: skip

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *tensors: cute.Tensor) -> None:
        """Launch the kernels on `stream`."""
        x = self.named(tensors)
        sums, keys = x.sums, Keys(x.caches, x.indices, x.lengths)
        saved = Saved(x.out, x.lse, x.d_out, x.d_lse, x.sinks, x.scales)
        rows = Int32(sums.row_terms.shape[1])
        tiles = (Int32(x.q.shape[1]) + TILE_HEADS - 1) // TILE_HEADS
        self.prepare(saved, x.q, x.caches, sums, x.sink_terms).launch(
            grid=[(rows + CTA_ROWS - 1) // CTA_ROWS, 1, 1], block=[ROW_THREADS, 1, 1], stream=stream
        )
        copies, mma = self.gatherer.make_copies(x.q, x.d_out), self.consumer.make_mmas()
        if const_expr(self.config.deterministic):
            self.weigh(copies, keys, sums, x.scales, mma, tiles, Int32(x.q.shape[1])).launch(
                grid=[Int32(x.q.shape[0]) * tiles, 1, 1], block=[WEIGH_THREADS, 1, 1], stream=stream, use_pdl=True
            )
        self.differentiate(copies, keys, sums, x.scales, x.d_q, mma, tiles).launch(
            grid=[Int32(x.q.shape[0]) * tiles, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1,
            use_pdl=True,
        )  # fmt: skip
        vectors = cutlass.Int64(sums.kv_sum.shape[0]) * (self.traits.head_dim // VECTOR)
        self.finish(sums, x.d_caches).launch(
            grid=[Int32((vectors + CTA_VECTORS - 1) // CTA_VECTORS), 1, 1], block=[ROW_THREADS, 1, 1], stream=stream,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def prepare(
        self,
        saved: Saved,
        q: cute.Tensor,
        caches: tuple[cute.Tensor, ...],
        sums: Sums,
        sink_terms: cute.Tensor,
    ):
        """Run before the main kernel: write the rows' terms, and zero the sums. Deterministic: write the rows' weights
        and the keys' lengths, too."""
        cute.arch.griddepcontrol_launch_dependents()
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        first_row, rows = cta * CTA_ROWS + warp * WARP_ROWS, sums.row_terms.shape[1]
        self.rows.prepare_rows(saved, sums, sink_terms, first_row)
        if const_expr(self.config.deterministic):
            for row in cutlass.range(first_row, cutlass.min(first_row + WARP_ROWS, rows), unroll=1):
                self.rows.weigh_row(saved, q, sums, row)
            warps = ROW_THREADS // 32
            self.rows.measure_keys(caches, sums, cta * warps + warp, ctas * warps)
        self.rows.zero_sums(sums, cta, ctas)

    @cute.kernel
    def weigh(
        self,
        copies: Copies,
        keys: Keys,
        sums: Sums,
        scales: cute.Tensor,
        mma: Mma,
        tiles: Int32,
        heads: Int32,
    ):
        """Run one CTA, only if deterministic: bound what a token's tile of heads adds to its keys' gradients."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        storage = utils.SmemAllocator().allocate(self.weigher.storage)
        shared, partial = self.weigher.shared_memory(storage)
        if warp_idx == 0:
            with cute.arch.elect_one():
                self.weigher.init_mbarriers(shared)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        item, length = self.item(keys, tiles, WEIGH_BLOCK)
        if group < WEIGH_STAGES:
            self.weigher.run(sums, Float32(scales[0]), heads, shared, partial, mma, item, group)
        else:
            if warp_idx == WEIGH_GATHER_WARP:
                self.weigher.gatherer.copy_q(copies, shared, item)
            self.weigher.gatherer.run(keys, sums, shared, item, length, warp_idx - WEIGH_GATHER_WARP)

    @cute.jit
    def item(self, keys: Keys, tiles: Int32, block: cutlass.Constexpr[int]):
        """The work of this CTA, in blocks of so many keys, and the token's length."""
        cta = cute.arch.block_idx()[0]
        token = cta // tiles
        length = Int32(keys.indices.shape[1])
        if const_expr(self.config.lengths):
            length = cutlass.min(cutlass.max(keys.lengths[token], 0), length)
        return Item(token, (cta - token * tiles) * TILE_HEADS, (length + block - 1) // block), length

    @cute.kernel
    def differentiate(
        self,
        copies: Copies,
        keys: Keys,
        sums: Sums,
        scales: cute.Tensor,
        d_q: cute.Tensor,
        mma: Mma,
        tiles: Int32,
    ):
        """Run one CTA: set up the barriers, then give each warp its role."""
        tidx = cute.arch.thread_idx()[0]
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tidx // 128)
        shared = shared_memory(utils.SmemAllocator().allocate(self.storage))
        if warp_idx == GATHER_WARP:
            for copy in copies:
                cpasync.prefetch_descriptor(copy.atom)
        if warp_idx == 0:
            with cute.arch.elect_one():
                init_mbarriers(shared)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        item, length = self.item(keys, tiles, BLOCK)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if group == GROUPS:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp_idx == GATHER_WARP:
                self.gatherer.copy_queries(copies, shared, item)
            self.gatherer.run(keys, sums, shared, item, length, warp_idx - GATHER_WARP)
        else:
            cute.arch.setmaxregister_increase(COMPUTE_REGISTERS)
            self.consumer.run(sums, Float32(scales[0]), d_q, shared, mma, item, group)

    @cute.kernel
    def finish(self, sums: Sums, d_caches: tuple[cute.Tensor, ...]):
        """Run after the main kernel: write the caches' gradients."""
        cute.arch.griddepcontrol_wait()
        self.rows.store_keys(sums, d_caches, cute.arch.block_idx()[0])
