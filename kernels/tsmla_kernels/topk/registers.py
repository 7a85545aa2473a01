"""RegisterSearch: the top-k of a short row that one CTA holds in registers, 16 columns per thread.

A warp has neighbouring columns, in chunks of 128. So a warp's counts of selected columns, one for each chunk, fit into
the bytes of one word, and one scan of the warp says where each chunk's positions go. Marks and a second reading of the
row are not needed.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr

from tsmla_kernels.sm90.warp import running_sum, sum_before
from tsmla_kernels.topk.bins import BinSearch
from tsmla_kernels.topk.candidates import BinCounts, Candidates
from tsmla_kernels.topk.config import TopkConfig
from tsmla_kernels.topk.keys import NAN, NAN_BIN, bin_floor, entry, least_float, ordered, pair_bins
from tsmla_kernels.topk.memory import (
    Output,
    Place,
    Result,
    Shared,
    add_one,
    global_column,
    global_vector,
)
from tsmla_kernels.topk.span import Span
from tsmla_kernels.topk.writer import Writer

VECTOR = 4
"""Columns that a thread loads at once."""
CHUNK_MASK = (1 << VECTOR) - 1


class Columns(NamedTuple):
    """A thread's columns, and two masks: of its columns above the deciding bin, and of those in it."""

    values: cute.Tensor
    above: Int32
    inside: Int32


class RegisterSearch:
    """Device functions of the search. Masks have a bit for each of a thread's columns, in order."""

    def __init__(
        self, config: TopkConfig, *, bins: BinSearch, candidates: Candidates, writer: Writer
    ) -> None:  # fmt: skip
        self.config, self.bins, self.candidates, self.writer = config, bins, candidates, writer

    @cute.jit
    def load_row(self, span: Span, place: Place):
        """Load the thread's columns. Columns behind the array's last whole vector are NaN."""
        values = cute.make_rmem_tensor((VECTOR * self.config.held,), Float32)
        for chunk in cutlass.range_constexpr(self.config.held):
            found = global_vector(span.address, self.vector_of(place, chunk), span.full)
            for i in cutlass.range_constexpr(VECTOR):
                values[VECTOR * chunk + i] = found[i]
        return values

    def vector_of(self, place: Place, chunk: Int32 | int) -> Int32:
        """The index, among the row's vectors, of the thread's vector in chunk `chunk`."""
        return (place.warp * self.config.held + chunk) * 32 + place.lane

    def column_of(self, span: Span, place: Place, column: Int32 | int) -> Int32:
        """The position in the row of the thread's column with index `column`."""
        return self.vector_of(place, column // VECTOR) * VECTOR + column % VECTOR - span.lead

    @cute.jit
    def search(self, span: Span, values: cute.Tensor, shared: Shared, place: Place, output: Output):
        """Select and write the k greatest. Returns False, with nothing written, if the row needs ExactSearch."""
        config = self.config
        self.mend_values(span, values, place)
        base = Int32(shared.sample.bins.iterator.toint())
        for i in cutlass.range_constexpr(VECTOR * config.held // 2):
            for at in pair_bins(values[2 * i], values[2 * i + 1]):
                add_one(base + at)
        cute.arch.sync_threads()
        self.bins.find(shared.sample, shared, place, Int32(config.k))
        index, count, needed = (shared.results[word] for word in (Result.BIN, Result.INSIDE, Result.NEEDED))
        common, above = Boolean(False), Int32(0)
        if index > NAN_BIN:
            low, high = least_float(bin_floor(index)), least_float(bin_floor(index + 1))
            inside = Int32(0)
            for i in cutlass.range_constexpr(VECTOR * config.held):
                if values[i] >= high:
                    above |= 1 << i
                elif values[i] >= low:
                    inside |= 1 << i
            columns = Columns(values, above, inside)
            if count <= config.listed:
                common = Boolean(True)
                above |= self.greatest_inside(span, columns, shared, place, count, needed)
            else:
                common = self.are_equal(columns, shared, place)
                if common:
                    above |= self.first_inside(inside, shared, place)
        if common:
            self.write_values(span, values, above, shared, place, output)
        return common

    @cute.jit
    def mend_values(self, span: Span, values: cute.Tensor, place: Place):
        """Replace elements outside the row by NaN, and load the row's columns behind the array's last whole vector."""
        first, last = (self.vector_of(place, chunk) for chunk in (0, self.config.held - 1))
        if first * VECTOR < span.lead or last * VECTOR + VECTOR > span.behind:
            tail = cute.make_rmem_tensor((VECTOR - 1,), Float32)
            for i in cutlass.range_constexpr(VECTOR - 1):
                if span.full * VECTOR + i < span.behind:
                    tail[i] = global_column(span.address, span.full * VECTOR + i)
            for i in cutlass.range_constexpr(VECTOR * self.config.held):
                vector = self.vector_of(place, i // VECTOR)
                if const_expr(i % VECTOR < VECTOR - 1):
                    if vector == span.full:
                        values[i] = tail[i % VECTOR]
                    if const_expr(i < VECTOR - 1):
                        if vector * VECTOR + i < span.lead:
                            values[i] = Float32(NAN)
                if vector * VECTOR + i % VECTOR >= span.behind:
                    values[i] = Float32(NAN)

    @cute.jit
    def greatest_inside(
        self, span: Span, columns: Columns, shared: Shared, place: Place, count: Int32, needed: Int32
    ):  # fmt: skip
        """The mask of this thread's selected columns in the bin. The row's `count` columns of the bin are ranked
        against each other; the `needed` greatest win."""
        values, within = columns.values, columns.inside
        most, chosen = cute.arch.warp_redux_sync(cute.arch.popc(within), "max"), Int32(0)
        rest = within
        for _ in cutlass.range(most, unroll=1):
            if rest != 0:
                column = lowest(rest)
                value, position = value_at(values, column), self.column_of(span, place, column)
                self.candidates.add(span, shared, value, position + span.lead)
                rest = rest & (rest - 1)
        cute.arch.sync_threads()
        rest = within
        for _ in cutlass.range(most, unroll=1):
            column, greater = lowest(rest), Int32(0)
            own = entry(ordered(value_at(values, column)), self.column_of(span, place, column))
            for other in cutlass.range(count, unroll=4):
                greater += Int32(shared.candidates[other] > own)
            if rest != 0 and greater < needed:
                chosen |= rest & -rest
            rest = rest & (rest - 1)
        return chosen

    @cute.jit
    def are_equal(self, columns: Columns, shared: Shared, place: Place):
        """Whether all of the row's columns in the bin are equal and the k-th greatest is one of them."""
        values = columns.values
        least, greatest = Float32(float("inf")), Float32(float("-inf"))
        for i in cutlass.range_constexpr(VECTOR * self.config.held):
            if (columns.inside >> i) & 1 == 1:
                least, greatest = cute.arch.fmin(least, values[i]), cute.arch.fmax(greatest, values[i])
        counts = BinCounts(
            above=cute.arch.popc(columns.above),
            inside=cute.arch.popc(columns.inside),
            least=ordered(least),
            greatest=ordered(greatest),
        )
        return self.candidates.share_equals(shared, place, counts)

    @cute.jit
    def first_inside(self, inside: Int32, shared: Shared, place: Place):
        """The mask of this thread's selected columns in a bin whose columns are all equal: the lowest positions win."""
        starts = self.starts(inside, shared, place)
        needed, chosen = shared.results[Result.NEEDED], Int32(0)
        for chunk in cutlass.range_constexpr(self.config.held):
            number = starts[chunk]
            for i in cutlass.range_constexpr(VECTOR * chunk, VECTOR * chunk + VECTOR):
                if (inside >> i) & 1 == 1:
                    if number < needed:
                        chosen |= 1 << i
                    number += 1
        cute.arch.sync_threads()  # so that shared.warp_above may be written again
        return chosen

    @cute.jit
    def starts(self, mask: Int32, shared: Shared, place: Place):
        """A tensor with a count for each chunk: how many of the row's columns with a set bit come before the thread's
        columns of the chunk. A word has a byte for each chunk, for the warp's count there, which is at most 128."""
        held = self.config.held
        own = Int32(0)
        for chunk in cutlass.range_constexpr(held):
            own |= cute.arch.popc(mask & (CHUNK_MASK << (VECTOR * chunk))) << (8 * chunk)
        through = Uint32(running_sum(own, place.lane))
        totals = cute.arch.shuffle_sync(through, 31)
        before = through - Uint32(own)
        starts, base = cute.make_rmem_tensor((held,), Int32), Int32(0)
        for chunk in cutlass.range_constexpr(held):
            starts[chunk] = base + Int32((before >> (8 * chunk)) & 255)
            base += Int32((totals >> (8 * chunk)) & 255)
        if place.lane == 0:
            shared.warp_above[place.warp] = base
        cute.arch.sync_threads()
        chosen = shared.warp_above[cutlass.min(place.lane, self.config.warps - 1)]
        first = sum_before(chosen, place.warp, place.lane)
        for chunk in cutlass.range_constexpr(held):
            starts[chunk] += first
        return starts

    @cute.jit
    def write_values(
        self, span: Span, values: cute.Tensor, mask: Int32, shared: Shared, place: Place, output: Output
    ):  # fmt: skip
        """Write the positions of the selected columns in order; if results are sorted by value, sort them first. `mask`
        has a bit for each selected column of the thread."""
        config, by_value = self.config, self.writer.by_value
        starts = self.starts(mask, shared, place)
        for i in cutlass.range_constexpr(VECTOR * config.held):
            if (mask >> i) & 1 == 1:
                at, position = starts[i // VECTOR], self.column_of(span, place, i)
                if const_expr(by_value):
                    shared.entries[at] = entry(ordered(values[i]), position)
                else:
                    shared.sample.bins[at] = position
                starts[i // VECTOR] = at + 1
        if const_expr(by_value):
            self.writer.put_entries(shared, place, output)
        else:
            cute.arch.sync_threads()
            for i in cutlass.range(place.thread, config.k, config.threads, unroll=4):
                self.writer.put(output, place.row, i, shared.sample.bins[i])


def lowest(mask: Int32) -> Int32:
    """The index of the lowest bit that is set; -1 if no bit is."""
    return 31 - Int32(cute.arch.clz(mask & -mask))


@cute.jit
def value_at(values: cute.Tensor, index: Int32):
    """Element `index` of `values`, whose size must be a power of two. Selections find the element, because an array
    with a dynamic index would not stay in registers."""
    left = [values[i] for i in range(cute.size(values))]
    for step in cutlass.range_constexpr(cute.size(values).bit_length() - 1):
        left = [select(index, step, left[i], left[i + 1]) for i in range(0, len(left), 2)]
    return left[0]


@cute.jit
def select(index: Int32, bit: cutlass.Constexpr[int], zero: Float32, one: Float32):
    """`one` if bit `bit` of `index` is set, else `zero`."""
    value = zero
    if (index >> bit) & 1 == 1:
        value = one
    return value
