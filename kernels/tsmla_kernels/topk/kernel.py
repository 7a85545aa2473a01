"""select_topk in one launch: the exact top-k of float32 rows, ties by position. DESIGN.md in this folder gives the
reasons.

The CTAs of a cluster share a row. Most rows are searched by `FilteredSearch`, or by `RegisterSearch` if they are short
and few. `ExactSearch` searches rows that these cannot decide, and sorts rows of at most k columns by value.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Boolean, Int32, Int64, const_expr

from tsmla_kernels.sm90.warp import quotient, remainder
from tsmla_kernels.topk.bins import BinSearch
from tsmla_kernels.topk.candidates import Candidates
from tsmla_kernels.topk.cluster import Cluster
from tsmla_kernels.topk.config import BINS, TopkConfig
from tsmla_kernels.topk.exact import ExactSearch
from tsmla_kernels.topk.filtered import PLENTY, FilteredSearch
from tsmla_kernels.topk.memory import Arrays, Output, Place, Shared, shared_tensors, storage_of
from tsmla_kernels.topk.registers import RegisterSearch
from tsmla_kernels.topk.span import Span, span_of
from tsmla_kernels.topk.writer import Writer


class SelectTopk:
    """The launcher of select_topk for one `config`. Rows and columns are dynamic.

    Operands of the launcher: logits [T, N] f32; seq_lens [T] i32; if config.row_starts, row_starts [T] i32; if
    config.page_size is not 0, block_tables [T, M] i32, or [B, M] if config.row_requests; if config.row_requests,
    row_requests [T] i32; indices [T, k] i32 or, if config.bits, the words of the selection [T, W] i32; if
    config.page_size is not 0, counts [T] i32; if config.scores, scores [T, k] f32.
    """

    def __init__(self, config: TopkConfig) -> None:
        self.config = config
        self.cluster = Cluster(config.cluster)
        bins, candidates = BinSearch(config, self.cluster), Candidates(config, self.cluster)
        self.writer = Writer(config, self.cluster)
        self.exact = ExactSearch(config, cluster=self.cluster, bins=bins, writer=self.writer)
        self.registers = RegisterSearch(config, bins=bins, candidates=candidates, writer=self.writer)
        self.filtered = FilteredSearch(
            config, cluster=self.cluster, bins=bins, candidates=candidates, writer=self.writer
        )

    @cute.jit
    def __call__(self, stream: cuda.CUstream, logits: cute.Tensor, seq_lens: cute.Tensor, *others: cute.Tensor):
        config = self.config
        self.storage = storage_of(config)
        operands = iter(others)
        row_starts = next(operands) if const_expr(config.row_starts) else None
        block_tables = next(operands) if const_expr(config.page_size > 0) else None
        row_requests = next(operands) if const_expr(config.row_requests) else None
        indices = next(operands)
        counts = next(operands) if const_expr(config.page_size > 0) else None
        scores = next(operands) if const_expr(config.scores) else None
        arrays = Arrays(
            logits=logits,
            seq_lens=seq_lens,
            row_starts=row_starts,
            block_tables=block_tables,
            row_requests=row_requests,
            indices=indices,
            counts=counts,
            scores=scores,
        )
        self.select(arrays).launch(
            grid=[arrays.indices.shape[0] * config.cluster, 1, 1],
            block=[config.threads, 1, 1],
            cluster=[config.cluster, 1, 1],
            min_blocks_per_mp=config.least_ctas,
            stream=stream,
            use_pdl=config.follows,
        )

    @cute.kernel
    def select(self, arrays: Arrays):
        config, logits = self.config, arrays.logits
        storage = utils.SmemAllocator().allocate(self.storage)
        shared = shared_tensors(storage, config)
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if const_expr(config.follows):
            cute.arch.griddepcontrol_wait()
        place = Place(quotient(block, config.cluster), remainder(block, config.cluster), warp, thread & 31, thread)
        columns = Int32(logits.shape[1])
        first = Int64(place.row) * Int64(columns)
        length, table = arrays.seq_lens[place.row], place.row
        if const_expr(config.row_requests):
            table = arrays.row_requests[place.row]
        if const_expr(config.row_starts):
            start = cutlass.min(cutlass.max(arrays.row_starts[place.row], 0), columns)
            first += Int64(start)
            columns -= start
        if const_expr(not config.eager):
            columns = cutlass.min(cutlass.max(length, 0), columns)
        span = span_of(config, logits, first, columns, place)
        values = None
        if const_expr(config.in_registers):
            values = self.registers.load_row(span, place)
        else:
            self.filtered.hold(span, shared, place)
        self.clear(span, shared, place)
        self.writer.clear_entries(shared, place)
        length = cutlass.min(cutlass.max(length, 0), columns)
        span = span._replace(behind=span.lead + length)
        address = logits.iterator.toint() + first * 4
        output = Output(arrays.indices, arrays.block_tables, arrays.scores, table, address)
        if const_expr(config.page_size > 0):
            if place.rank == 0 and thread == 0:
                arrays.counts[place.row] = cutlass.min(length, config.k)
        cute.arch.sync_threads()

        if length <= config.k:
            if const_expr(self.writer.by_value):
                self.select_exactly(logits, first, length, storage, place, output)
            else:
                self.writer.put_all(length, place, output)
        else:
            common = Boolean(False)
            if span.chunks <= config.most_chunks:
                if const_expr(config.in_registers):
                    common = self.registers.search(span, values, shared, place, output)
                else:
                    common = self.filtered.search(span, shared, place, output)
            if not common:
                self.select_exactly(logits, first, length, storage, place, output)

    @cute.jit
    def select_exactly(
        self, logits: cute.Tensor, first: Int64, length: Int32, storage: cute.struct, place: Place, output: Output
    ):  # fmt: skip
        """Write the top-k of any row: `length` columns from element `first` of logits on."""
        shared, barriers = shared_tensors(storage, self.config), storage.barriers.data_ptr()
        self.exact.select(logits, first, length, storage.columns.data_ptr(), barriers, shared, place, output)

    @cute.jit
    def clear(self, span: Span, shared: Shared, place: Place):
        """Clear the marks and the bins. The lowest bin gets PLENTY, so that every search of a histogram finds a bin."""
        zeros = cute.make_rmem_tensor((4,), Int32)
        zeros.fill(0)
        bins = shared.sample.bins.iterator
        for i in cutlass.range(place.thread, self.config.histograms * (BINS // 4), self.config.threads, unroll=1):
            cute.autovec_copy(zeros, cute.make_tensor((bins + i * 4).align(16), cute.make_layout(4)))
        if const_expr(not self.config.in_registers) and span.chunks <= self.config.most_chunks:
            for i in cutlass.range(quotient(span.chunks + 3, 4), unroll=1):
                shared.marks[i * self.config.threads + place.thread] = Int32(0)
        if place.thread == 0:
            shared.sample.bins[0] = Int32(PLENTY)
            shared.kept.bins[0] = Int32(PLENTY)
