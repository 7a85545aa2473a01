"""Writes select_topk's results: positions or slots, and their scores; or the words of a selection. Results that are
sorted by value are first collected as entries."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint64, const_expr

from tsmla_kernels.sm90.warp import quotient
from tsmla_kernels.topk.bits import BitWriter
from tsmla_kernels.topk.cluster import Cluster
from tsmla_kernels.topk.config import TopkConfig
from tsmla_kernels.topk.keys import position_of
from tsmla_kernels.topk.memory import Output, Place, Shared, global_column
from tsmla_kernels.topk.sort import EntrySort

NOWHERE = -1
"""An index that names no position."""


class Writer:
    """Device functions that write the selected columns. by_value: whether results are sorted by value. bits: the
    BitWriter that writes words in the place of positions, or None."""

    def __init__(self, config: TopkConfig, cluster: Cluster) -> None:
        self.config, self.cluster = config, cluster
        self.by_value = config.order == "value"
        self.bits = BitWriter(config) if config.bits else None
        self.sort = EntrySort(config.sorted_entries, config.threads)

    @cute.jit
    def put(self, output: Output, row: Int32, index: Int32, position: Int32):
        """Write a selected position, or its slot, and its score. The slot is NOWHERE if the position is past the block
        table."""
        value = position
        if const_expr(self.config.page_size > 0):
            size = self.config.page_size
            page = quotient(position, size) if const_expr(size & (size - 1) == 0) else position // size
            width = output.block_tables.shape[1]
            value = Int32(NOWHERE)
            if page < width:
                at = output.block_tables.iterator + (Int64(output.table) * Int64(width) + Int64(page))
                value = cute.make_tensor(at, cute.make_layout(1))[0] * size + (position - page * size)
        score = global_column(output.address, position) if const_expr(self.config.scores) else None
        self.write(output, row, index, value, score)

    def put_none(self, output: Output, row: Int32, index: Int32) -> None:
        """Write NOWHERE, and the score -inf, as result `index` of the row."""
        self.write(output, row, index, Int32(NOWHERE), Float32(-float("inf")))

    def write(self, output: Output, row: Int32, index: Int32, value: Int32, score: Float32 | None) -> None:
        """Write one index, and its score if scores are written."""
        at = Int64(row) * self.config.k + Int64(index)
        cute.make_tensor(output.indices.iterator + at, cute.make_layout(1))[0] = value
        if output.scores is not None:
            cute.make_tensor(output.scores.iterator + at, cute.make_layout(1))[0] = score

    @cute.jit
    def put_all(self, length: Int32, place: Place, output: Output):
        """Write every position of a row of at most k columns, and NOWHERE as the results behind them; or write the bits
        of these positions."""
        cute.arch.inline_ptx("cp.async.wait_all;")
        if const_expr(self.bits is not None):
            self.bits.put_all(length, place, output)
        else:
            step = self.cluster.size * self.config.threads
            first = place.rank * self.config.threads + place.thread
            for i in cutlass.range(first, self.config.k, step, unroll=1):
                if i < length:
                    self.put(output, place.row, i, i)
                else:
                    self.put_none(output, place.row, i)

    @cute.jit
    def clear_entries(self, shared: Shared, place: Place):
        """Fill the entries with 0, which is below the entry of every key."""
        if const_expr(self.by_value):
            for i in cutlass.range(place.thread, self.config.sorted_entries, self.config.threads, unroll=1):
                shared.entries[i] = Uint64(0)

    @cute.jit
    def enter(self, entries: cute.Tensor, index: Int32, value: Uint64):
        """Write one entry, with the index `index`, into the shared memory of the cluster's first CTA."""
        if const_expr(self.cluster.size == 1):
            entries[index] = value
        else:
            cute.arch.inline_ptx(
                "{ .reg .b32 a; mapa.shared::cluster.u32 a, {$r0}, 0; st.shared::cluster.u64 [a], {$r1}; }",
                read_only_args=[entries.iterator.toint() + index * 8, value],
            )

    @cute.jit
    def put_entries(self, shared: Shared, place: Place, output: Output):
        """Write the entries in descending order, after a bitonic sort in the first CTA."""
        self.cluster.meet()
        if place.rank == 0:
            entries = shared.entries
            self.sort.descending(entries, place.thread)
            for i in cutlass.range(place.thread, self.config.k, self.config.threads, unroll=1):
                if entries[i] > Uint64(0):
                    self.put(output, place.row, i, position_of(entries[i]))
                else:
                    self.put_none(output, place.row, i)
