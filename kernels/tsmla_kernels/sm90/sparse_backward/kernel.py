"""The gradient of sparse_mla over plain caches of 16 bits, for Hopper.

`prepare` computes the terms of query rows and zeroes the sums; `differentiate` computes dq and the sums of the caches'
gradients; `finish` rounds these sums. If deterministic, `count` runs before `differentiate`, and the sums are exact
integers (bounds.py). A CTA of `differentiate` takes up to 64 heads of one token, or all heads of a group of tokens
(DESIGN.md), and the keys that they select, 64 at a time:

  warpgroup 0          scores, P and dS (scores.py)
  warpgroups 1 and 2   the keys' gradients (key_gradients.py), which they add to the sums in global memory (sums.py)
  warps 12 to 15       gather keys; the first of them also copies Q and dO (gather.py)
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from tsmla_kernels.sm90.sparse.union import UnionArrays, UnionMaker
from tsmla_kernels.sm90.sparse_backward.config import BLOCK, TILE_HEADS, WORTH, SparseBackwardConfig
from tsmla_kernels.sm90.sparse_backward.counts import COUNT_THREADS, COUNT_WARPS, Counter
from tsmla_kernels.sm90.sparse_backward.gather import Gatherer
from tsmla_kernels.sm90.sparse_backward.key_gradients import KeyGradients
from tsmla_kernels.sm90.sparse_backward.memory import (
    ADDING_GROUPS,
    COMPUTE_REGISTERS,
    GATHER_WARP,
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
    Unions,
    init_mbarriers,
    make_storage,
    shared_memory,
)
from tsmla_kernels.sm90.sparse_backward.products import Products
from tsmla_kernels.sm90.sparse_backward.rows import CTA_ROWS, CTA_VECTORS, ROW_THREADS, VECTOR, WARP_ROWS, RowKernels
from tsmla_kernels.sm90.sparse_backward.scores import Scorer


class Work(NamedTuple):
    """A launch over tiles of heads: how many heads a token has, how many CTAs there are, and whether a tile has a group
    of tokens."""

    copies: Copies
    keys: Keys
    heads: Int32
    ctas: Int32
    groups: bool


class Sizes(NamedTuple):
    """How many heads a token has, and how many columns the indices of the call have."""

    heads: Int32
    columns: Int32


class SparseMlaBackward:
    """One compiled gradient: `config` is static. The launcher takes a stream and the operands of record.py."""

    def __init__(self, config: SparseBackwardConfig) -> None:
        self.config = config
        self.traits = Traits(config)
        self.storage = make_storage(self.traits)
        self.rows = RowKernels(self.traits)
        self.gatherer = Gatherer(self.traits)
        self.products = Products(self.traits)
        self.scorer = Scorer(self.traits, self.products)
        self.key_gradients = KeyGradients(self.traits, self.products)
        self.counter = Counter(self.traits, self.gatherer)
        self.unions = UnionMaker(config, WORTH) if config.tokens > 1 else None

    def named(self, tensors: tuple[cute.Tensor, ...]) -> Operands:
        """The operands by name. An operand that the config does not have is another one here; nothing reads it."""
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
        kv_sum, row_terms = rest.pop(0), rest.pop(0)
        unions = Unions(*[rest.pop() for _ in range(4)][::-1]) if config.tokens > 1 else Unions(*(indices,) * 4)
        of_integers = rest or (kv_sum, row_terms, row_terms, indices, indices)
        sums = Sums(kv_sum, row_terms, *of_integers)
        return Operands(
            q=q, caches=read, indices=indices, lengths=lengths, sinks=sinks, scales=scales, out=out, lse=lse,
            d_out=d_out, d_lse=d_lse, d_q=d_q, d_caches=written, sink_terms=sink_terms, sums=sums, unions=unions,
        )  # fmt: skip

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *tensors: cute.Tensor) -> None:
        """Launch the kernels on `stream`."""
        x = self.named(tensors)
        sums = x.sums
        saved = Saved(x.out, x.lse, x.d_out, x.d_lse, x.sinks, x.scales)
        rows = Int32(sums.row_terms.shape[1])
        if const_expr(self.unions is not None):
            lengths = x.lengths if const_expr(self.config.lengths) else None
            unions = x.unions
            self.unions.launch(
                stream,
                UnionArrays(x.indices, lengths, unions.slots, unions.bits, unions.lengths, unions.token_lengths),
            )
        self.prepare(saved, x.q, x.caches, sums, x.sink_terms).launch(
            grid=[(rows + CTA_ROWS - 1) // CTA_ROWS, 1, 1], block=[ROW_THREADS, 1, 1], stream=stream
        )
        works = [self.alone(x)]
        if const_expr(self.unions is not None):
            works = [self.together(x), *works]
        mma = self.products.make_mmas()
        if const_expr(self.config.deterministic):
            keys = Keys(x.caches, x.indices, x.lengths, x.indices)
            tokens = Int32(x.q.shape[0])
            self.count(keys, sums, tokens, Int32(x.q.shape[1])).launch(
                grid=[(tokens + COUNT_WARPS - 1) // COUNT_WARPS, 1, 1], block=[COUNT_THREADS, 1, 1], stream=stream,
                use_pdl=True,
            )  # fmt: skip
        columns = Int32(x.indices.shape[1])
        for work in works:
            sizes = Sizes(work.heads, columns)
            self.differentiate(work.copies, work.keys, sums, x.scales, x.d_q, mma, sizes, work.groups).launch(
                grid=[work.ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=True
            )
        vectors = cutlass.Int64(sums.kv_sum.shape[0]) * (self.traits.head_dim // VECTOR)
        self.finish(sums, x.d_caches, columns).launch(
            grid=[Int32((vectors + CTA_VECTORS - 1) // CTA_VECTORS), 1, 1], block=[ROW_THREADS, 1, 1], stream=stream,
            use_pdl=True,
        )  # fmt: skip

    def alone(self, x: Operands) -> Work:
        """The launch whose tiles each have heads of one token."""
        heads = Int32(x.q.shape[1])
        tiles = (heads + TILE_HEADS - 1) // TILE_HEADS
        lengths = x.unions.token_lengths if self.config.tokens > 1 else x.lengths
        copies = self.gatherer.make_copies(x.q, x.d_out)
        return Work(copies, Keys(x.caches, x.indices, lengths, x.indices), heads, Int32(x.q.shape[0]) * tiles, False)

    def together(self, x: Operands) -> Work:
        """The launch whose tiles each have all heads of a group of tokens."""
        heads = Int32(x.q.shape[0]) * Int32(x.q.shape[1])

        def as_one_token(rows: cute.Tensor) -> cute.Tensor:
            layout = cute.make_layout((1, heads, rows.shape[2]), stride=(rows.stride[0], rows.stride[1], 1))
            return cute.make_tensor(rows.iterator, layout)

        copies = self.gatherer.make_copies(as_one_token(x.q), as_one_token(x.d_out))
        keys = Keys(x.caches, x.unions.slots, x.unions.lengths, x.unions.bits)
        return Work(copies, keys, heads, Int32(x.unions.lengths.shape[0]), True)

    @cute.kernel
    def prepare(
        self,
        saved: Saved,
        q: cute.Tensor,
        caches: tuple[cute.Tensor, ...],
        sums: Sums,
        sink_terms: cute.Tensor,
    ):
        """Run before the main kernel: write the rows' terms, and zero the sums. If deterministic, also write the rows'
        weights and the lengths of the keys' values."""
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
    def count(self, keys: Keys, sums: Sums, tokens: Int32, heads: Int32):
        """Run between `prepare` and the main kernel, only if deterministic: bound and count what is added to each
        key."""
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.counter.run(keys, sums, tokens, heads)

    @cute.jit
    def item(self, keys: Keys, heads: Int32, groups: cutlass.Constexpr[bool]):
        """The work of this CTA in blocks of keys, how many keys it has, and whether it has work."""
        cta = cute.arch.block_idx()[0]
        token, first_head, indices = Int32(0), cta * TILE_HEADS, cta
        if const_expr(not groups):
            tiles = (heads + TILE_HEADS - 1) // TILE_HEADS
            token = cta // tiles
            first_head, indices = (cta - token * tiles) * TILE_HEADS, token
        columns = Int32(keys.indices.shape[1])
        length, runs = columns, Int32(1)
        if const_expr(self.config.lengths or self.config.tokens > 1):
            given = keys.lengths[indices]
            length = cutlass.min(cutlass.max(given, 0), columns)
            if const_expr(self.config.tokens > 1):
                runs = Int32(given >= 0)
        return Item(token, heads, first_head, indices, (length + BLOCK - 1) // BLOCK), length, runs

    @cute.kernel
    def differentiate(
        self,
        copies: Copies,
        keys: Keys,
        sums: Sums,
        scales: cute.Tensor,
        d_q: cute.Tensor,
        mma: Mma,
        sizes: Sizes,
        groups: cutlass.Constexpr[bool],
    ):
        """Run one CTA: set up the barriers, then give each warp its role."""
        tidx = cute.arch.thread_idx()[0]
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tidx // 128)
        shared = shared_memory(utils.SmemAllocator().allocate(self.storage), self.config.tokens)
        if warp_idx == GATHER_WARP:
            for copy in copies:
                cpasync.prefetch_descriptor(copy.atom)
        if warp_idx == 0:
            with cute.arch.elect_one():
                init_mbarriers(shared)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if const_expr(self.config.tokens > 1):  # the lengths are made by a kernel that may not have ended
            cute.arch.griddepcontrol_wait()
        item, length, runs = self.item(keys, sizes.heads, groups)
        if const_expr(self.config.tokens == 1):
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.products.set_flags(mma)
        if runs == 1:
            if group == 1 + ADDING_GROUPS:
                cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
                if warp_idx == GATHER_WARP:
                    self.gatherer.copy_queries(copies, shared, item)
                warp = warp_idx - GATHER_WARP
                self.gatherer.run(keys, sums, shared, item, length, sizes.columns, warp, groups)
            else:
                cute.arch.setmaxregister_increase(COMPUTE_REGISTERS)
                if group == 0:
                    self.scorer.run(sums, Float32(scales[0]), d_q, shared, mma, item, groups)
                else:
                    self.key_gradients.run(sums, d_q, shared, mma, item, group - 1)

    @cute.kernel
    def finish(self, sums: Sums, d_caches: tuple[cute.Tensor, ...], columns: Int32):
        """Run after the main kernel: write the caches' gradients."""
        cute.arch.griddepcontrol_wait()
        self.rows.store_keys(sums, d_caches, cute.arch.block_idx()[0], columns)
