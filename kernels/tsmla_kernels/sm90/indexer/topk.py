"""select_topk in one launch: the exact top-k of float32 rows, ties by position. DESIGN.md beside this says why it looks
as it does.

A row is shared out to the CTAs of a cluster. Most rows go the way of `FilteredSearch`, which reads them once; those
with many equal or unusual keys go that of `ExactSearch`.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Boolean, Int32, Int64, Uint64, const_expr

from tsmla_kernels.sm90.indexer.common import (
    GROUPS,
    Arrays,
    Found,
    Histogram,
    Output,
    Place,
    Shared,
    Total,
    entry,
    position_of,
)
from tsmla_kernels.sm90.indexer.config import BINS, TopkConfig
from tsmla_kernels.sm90.indexer.exact import ExactSearch
from tsmla_kernels.sm90.indexer.filtered import PLENTY
from tsmla_kernels.sm90.indexer.registers import RegisterSearch
from tsmla_kernels.sm90.indexer.rows import ordered
from tsmla_kernels.sm90.indexer.sort import EntrySort
from tsmla_kernels.sm90.storage import checked_storage
from tsmla_kernels.sm90.warp import quotient, remainder


def storage_of(config: TopkConfig) -> Any:
    """The struct of a CTA's shared memory. Raises ValueError if it exceeds Hopper's.

    held: what the CTA holds of a row, and what it keeps. marks: the columns that are selected. kept: how many a thread
    keeps. bins, groups: histograms and the sums of their groups. above, inside: a warp's columns above the bin and in
    it. listed, owners: the CTA's keys of the bin and their warps. merged, ranks: the cluster's keys of the bin and how
    many of these are greater. entries: the selected keys to be sorted.
    """

    def words(count: int) -> Any:
        return cute.struct.MemRange[Int32, count]

    def keys(count: int) -> Any:
        return cute.struct.Align[cute.struct.MemRange[Uint64, count], 16]

    fields = {
        "barriers": cute.struct.MemRange[Int64, config.warps * config.stages],
        "held": cute.struct.Align[cute.struct.MemRange[cutlass.Float32, config.held_words], 128],
        "bins": cute.struct.Align[words(config.histograms * BINS), 16],
        "marks": cute.struct.Align[words(config.mark_words), 16],
        "listed": keys(config.listed),
        "merged": keys(config.listed),
        "entries": keys(config.sorted_entries),
        "owners": words(config.listed),
        "ranks": words(config.listed),
        "kept": words(config.threads),
        "groups": words(2 * GROUPS),
        "above": words(config.warps),
        "inside": words(config.warps),
        "found": words(len(Found)),
        "totals": words(len(Total)),
    }
    return checked_storage(cute.struct(type("Storage", (), {"__annotations__": fields})), config)


class SelectTopk(ExactSearch, RegisterSearch):
    """select_topk: `config` is static, rows and columns are dynamic.

    Operands of the launcher: logits [T, N] f32, seq_lens [T] i32, row_starts [T] i32 (with config.row_starts),
    block_tables [T, M] i32 (with config.page_size; with config.row_requests [B, M]), row_requests [T] i32 (with
    config.row_requests), indices [T, k] i32, counts [T] i32 (with config.page_size), scores [T, k] f32 (with
    config.scores).
    """

    def __init__(self, config: TopkConfig) -> None:
        self.config = config
        self.cluster, self.warps = config.cluster, config.warps
        self.by_value = config.order == "value"
        self.sort = EntrySort(config.sorted_entries, config.threads)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, logits: cute.Tensor, seq_lens: cute.Tensor, *others: cute.Tensor):
        config = self.config
        self.storage = storage_of(config)
        slots, operands = config.page_size > 0, iter((logits, seq_lens, *others))
        given = (True, True, config.row_starts, slots, config.row_requests, True, slots, config.scores)
        arrays = Arrays._make([next(operands) if const_expr(has) else None for has in given])
        self.select(arrays).launch(
            grid=[arrays.indices.shape[0] * self.cluster, 1, 1],
            block=[self.config.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            min_blocks_per_mp=config.least_ctas,
            stream=stream,
            use_pdl=config.follows,
        )

    @cute.kernel
    def select(self, arrays: Arrays):
        config, logits = self.config, arrays.logits
        storage = utils.SmemAllocator().allocate(self.storage)
        shared = self.shared_tensors(storage)
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if const_expr(config.follows):
            cute.arch.griddepcontrol_wait()
        place = Place(quotient(block, self.cluster), remainder(block, self.cluster), warp, thread & 31, thread)
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
        span = self.span(logits, first, columns, place)
        values = None
        if const_expr(config.in_registers):
            values = self.load_row(span, place)
        else:
            self.hold(span, shared, place)
        self.clear(span, shared, place)
        self.clear_entries(shared, place)
        length = cutlass.min(cutlass.max(length, 0), columns)
        span = span._replace(behind=span.lead + length)
        address = logits.iterator.toint() + first * 4
        output = Output(arrays.indices, arrays.block_tables, arrays.scores, table, address)
        if const_expr(config.page_size > 0):
            if place.rank == 0 and thread == 0:
                arrays.counts[place.row] = cutlass.min(length, config.k)
        cute.arch.sync_threads()

        if length <= config.k:
            if const_expr(self.by_value):
                self.select_any(logits, (first, length), storage, place, output)
            else:
                self.select_all(length, place, output)
        else:
            common = Boolean(False)
            if span.chunks <= config.most_chunks:
                if const_expr(config.in_registers):
                    common = self.search_registers(span, values, shared, place, output)
                else:
                    common = self.search(span, shared, place, output)
            if not common:
                self.select_any(logits, (first, length), storage, place, output)

    @cute.jit
    def select_any(
        self,
        logits: cute.Tensor,
        share: cutlass.Constexpr,
        storage: cutlass.Constexpr,
        place: cutlass.Constexpr,
        output: cutlass.Constexpr,
    ):
        """Any row by ExactSearch: `share` is its first element and its length."""
        shared, barriers = self.shared_tensors(storage), storage.barriers.data_ptr()
        first, length = share
        cute.arch.inline_ptx("cp.async.wait_all;")
        self.meet()
        cute.arch.fence_view_async_shared()
        self.init_stages(barriers)
        row = self.plan(logits, first, length, storage.held.data_ptr(), barriers)
        self.clear_entries(shared, place)
        self.clear_bins(shared, place)
        self.begin_copies(row)
        self.meet()  # the entries and bins are empty
        if length <= self.config.k:
            self.walk(row, self.enter_all, (shared.entries,), Int32(0), Int32(0), Int32(0))
            self.sort_entries(shared, place, output)
        else:
            self.select_some(row, shared, place, output)

    @cute.jit
    def shared_tensors(self, storage: cutlass.Constexpr):
        """The parts of shared memory as tensors."""
        config = self.config
        listed = cute.make_layout(config.listed)
        warps = cute.make_layout(self.warps)
        bins, groups = cute.make_layout(BINS), cute.make_layout(GROUPS)
        again = (config.histograms - 1) * BINS
        return Shared(
            held=storage.held.get_tensor(cute.make_layout(config.held_words)),
            marks=storage.marks.get_tensor(cute.make_layout(config.mark_words)),
            kept=storage.kept.get_tensor(cute.make_layout(config.threads)),
            sample=Histogram(storage.bins.get_tensor(bins), storage.groups.get_tensor(groups)),
            counts=Histogram(
                cute.make_tensor(storage.bins.data_ptr() + again, bins),
                cute.make_tensor(storage.groups.data_ptr() + GROUPS, groups),
            ),
            found=storage.found.get_tensor(cute.make_layout(len(Found))),
            totals=storage.totals.get_tensor(cute.make_layout(len(Total))),
            above=storage.above.get_tensor(warps),
            inside=storage.inside.get_tensor(warps),
            listed=storage.listed.get_tensor(listed),
            owners=storage.owners.get_tensor(listed),
            merged=storage.merged.get_tensor(listed),
            ranks=storage.ranks.get_tensor(listed),
            entries=storage.entries.get_tensor(cute.make_layout(config.sorted_entries)),
        )

    @cute.jit
    def clear(self, span: cutlass.Constexpr, shared: cutlass.Constexpr, place: cutlass.Constexpr):
        """Empty bins, but for enough columns in the lowest, and no marks."""
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
            shared.counts.bins[0] = Int32(PLENTY)

    @cute.jit
    def clear_entries(self, shared: cutlass.Constexpr, place: cutlass.Constexpr):
        """Entries below every key."""
        if const_expr(self.by_value):
            for i in cutlass.range(place.thread, self.config.sorted_entries, self.config.threads, unroll=1):
                shared.entries[i] = Uint64(0)

    @cute.jit
    def select_all(self, length: Int32, place: cutlass.Constexpr, output: cutlass.Constexpr):
        """Every column of a row of at most k is selected."""
        cute.arch.inline_ptx("cp.async.wait_all;")
        step = self.cluster * self.config.threads
        first = place.rank * self.config.threads + place.thread
        for i in cutlass.range(first, self.config.k, step, unroll=1):
            if i < length:
                self.put(output, place.row, i, i)
            else:
                self.put_none(output, place.row, i)

    @cute.jit
    def enter(self, entries: cute.Tensor, index: Int32, value: Uint64):
        """Write one of the first CTA's entries."""
        if const_expr(self.cluster == 1):
            entries[index] = value
        else:
            cute.arch.inline_ptx(
                "{ .reg .b32 a; mapa.shared::cluster.u32 a, {$r0}, 0; st.shared::cluster.u64 [a], {$r1}; }",
                read_only_args=[entries.iterator.toint() + index * 8, value],
            )

    @cute.jit
    def enter_all(
        self, row: cutlass.Constexpr, context: cutlass.Constexpr, unit: Int32, values: cute.Tensor, a: Int32, b: Int32
    ):
        """Of a walk: each column of a unit to the entries."""
        (entries,) = context
        for i in cutlass.range_constexpr(4):
            position = self.position(row, unit, i)
            if position >= 0 and position < row.length:
                self.enter(entries, position, entry(ordered(values[i]), position))
        return a, b

    @cute.jit
    def sort_entries(self, shared: cutlass.Constexpr, place: cutlass.Constexpr, output: cutlass.Constexpr):
        """Write the entries in descending order, by a bitonic sort in the first CTA."""
        self.meet()
        if place.rank == 0:
            entries = shared.entries
            self.sort.descending(entries, place.thread)
            for i in cutlass.range(place.thread, self.config.k, self.config.threads, unroll=1):
                if entries[i] > Uint64(0):
                    self.put(output, place.row, i, position_of(entries[i]))
                else:
                    self.put_none(output, place.row, i)
