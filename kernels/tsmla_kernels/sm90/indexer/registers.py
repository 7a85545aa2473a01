"""The way to a short row's top-k that holds it in registers: a CTA a row, 16 columns a thread.

A warp has neighbouring columns, in chunks of 128. So the counts of selected columns of a thread's chunks fit into the
bytes of one word, and one scan of a warp says where each chunk's positions go: neither marks nor a second look at the
row.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr

from tsmla_kernels.sm90.indexer.common import Found, add_one, entry
from tsmla_kernels.sm90.indexer.filtered import FilteredSearch, Span, global_vector
from tsmla_kernels.sm90.indexer.rows import NAN, NAN_BIN, bin_floor, global_column, least_float, ordered, pair_bins

VECTOR = 4  # columns
CHUNK_MASK = (1 << VECTOR) - 1


class RegisterSearch(FilteredSearch):
    """Device functions of this way. Masks have a bit for each of a thread's columns, in order."""

    @cute.jit
    def load_row(self, span: cutlass.Constexpr, place: cutlass.Constexpr):
        """Ask for the thread's columns. NaN for those behind the array's last whole vector."""
        values = cute.make_rmem_tensor((VECTOR * self.config.held,), Float32)
        for chunk in cutlass.range_constexpr(self.config.held):
            found = global_vector(span.address, self.vector_of(place, chunk), span.full)
            for i in cutlass.range_constexpr(VECTOR):
                values[VECTOR * chunk + i] = found[i]
        return values

    def vector_of(self, place, chunk):
        """The index in the row of the thread's vector of a chunk."""
        return (place.warp * self.config.held + chunk) * 32 + place.lane

    def column_of(self, span: Span, place, column):
        """The position in the row of one of the thread's columns."""
        return self.vector_of(place, column // VECTOR) * VECTOR + column % VECTOR - span.lead

    @cute.jit
    def search_registers(
        self,
        span: cutlass.Constexpr,
        values: cute.Tensor,
        shared: cutlass.Constexpr,
        place: cutlass.Constexpr,
        output: cutlass.Constexpr,
    ):
        """Select and write the k largest; False, and nothing written, if the row is none of the common."""
        config = self.config
        self.mend_values(span, values, place)
        base = Int32(shared.sample.bins.iterator.toint())
        for i in cutlass.range_constexpr(VECTOR * config.held // 2):
            for at in pair_bins(values[2 * i], values[2 * i + 1]):
                add_one(base + at)
        cute.arch.sync_threads()
        self.find(shared.sample, shared, place, Int32(config.k))
        index, inside, needed = (shared.found[word] for word in (Found.BIN, Found.INSIDE, Found.NEEDED))
        common, above = Boolean(False), Int32(0)
        if index > NAN_BIN:
            low, high = least_float(bin_floor(index)), least_float(bin_floor(index + 1))
            within = Int32(0)
            for i in cutlass.range_constexpr(VECTOR * config.held):
                if values[i] >= high:
                    above |= 1 << i
                elif values[i] >= low:
                    within |= 1 << i
            if inside <= config.listed:
                common = Boolean(True)
                above |= self.greatest_within(span, (values, within), shared, place, (inside, needed))
            else:
                common = self.are_equal((values, above, within), shared, place)
                if common:
                    above |= self.first_within(within, shared, place)
        if common:
            self.write_values(span, (values, above), shared, place, output)
        return common

    @cute.jit
    def mend_values(self, span: cutlass.Constexpr, values: cute.Tensor, place: cutlass.Constexpr):
        """Make what is no column of the row NaN, and bring the columns behind the array's last whole vector."""
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
    def greatest_within(
        self,
        span: cutlass.Constexpr,
        columns: cutlass.Constexpr,
        shared: cutlass.Constexpr,
        place: cutlass.Constexpr,
        counts: cutlass.Constexpr,
    ):
        """Those of the thread's columns in the bin that are selected. `columns` are its values and its mask of the bin,
        `counts` the row's columns in the bin, and how many of them are selected. Each is ranked among the others."""
        values, within = columns
        inside, needed = counts
        most, chosen = cute.arch.warp_redux_sync(cute.arch.popc(within), "max"), Int32(0)
        rest = within
        for _ in cutlass.range(most, unroll=1):
            if rest != 0:
                column = lowest(rest)
                self.list(span, shared, value_at(values, column), self.column_of(span, place, column) + span.lead)
                rest = rest & (rest - 1)
        cute.arch.sync_threads()
        rest = within
        for _ in cutlass.range(most, unroll=1):
            column, greater = lowest(rest), Int32(0)
            own = entry(ordered(value_at(values, column)), self.column_of(span, place, column))
            for other in cutlass.range(inside, unroll=4):
                greater += Int32(shared.listed[other] > own)
            if rest != 0 and greater < needed:
                chosen |= rest & -rest
            rest = rest & (rest - 1)
        return chosen

    @cute.jit
    def are_equal(self, columns: cutlass.Constexpr, shared: cutlass.Constexpr, place: cutlass.Constexpr):
        """Whether the row's columns in the bin are equal. `columns` are a thread's values, and its masks of those above
        the bin and in it."""
        values, above, within = columns
        least, greatest = Float32(float("inf")), Float32(float("-inf"))
        for i in cutlass.range_constexpr(VECTOR * self.config.held):
            if (within >> i) & 1 == 1:
                least, greatest = cute.arch.fmin(least, values[i]), cute.arch.fmax(greatest, values[i])
        counts = cute.arch.popc(above), cute.arch.popc(within)
        return self.share_marked(shared, place, counts, (ordered(least), ordered(greatest)))

    @cute.jit
    def first_within(self, within: Int32, shared: cutlass.Constexpr, place: cutlass.Constexpr):
        """Those of the thread's columns in the bin that are selected, if these are equal: the first in the row."""
        starts = self.starts(within, shared, place)
        needed, chosen = shared.found[Found.NEEDED], Int32(0)
        for chunk in cutlass.range_constexpr(self.config.held):
            number = starts[chunk]
            for i in cutlass.range_constexpr(VECTOR * chunk, VECTOR * chunk + VECTOR):
                if (within >> i) & 1 == 1:
                    if number < needed:
                        chosen |= 1 << i
                    number += 1
        cute.arch.sync_threads()  # before the warps' counts are others
        return chosen

    @cute.jit
    def starts(self, mask: Int32, shared: cutlass.Constexpr, place: cutlass.Constexpr):
        """How many columns that are in the mask come before those of each of the thread's chunks. A byte a chunk: a
        warp has 128 columns of one."""
        held = self.config.held
        own = Int32(0)
        for chunk in cutlass.range_constexpr(held):
            own |= cute.arch.popc(mask & (CHUNK_MASK << (VECTOR * chunk))) << (8 * chunk)
        through = Uint32(self.running(own, place.lane))
        totals = cute.arch.shuffle_sync(through, 31)
        before = through - Uint32(own)
        starts, base = cute.make_rmem_tensor((held,), Int32), Int32(0)
        for chunk in cutlass.range_constexpr(held):
            starts[chunk] = base + Int32((before >> (8 * chunk)) & 255)
            base += Int32((totals >> (8 * chunk)) & 255)
        if place.lane == 0:
            shared.above[place.warp] = base
        cute.arch.sync_threads()
        of_warps = shared.above[cutlass.min(place.lane, self.config.warps - 1)]
        first = self.before(of_warps, place.warp, place.lane)
        for chunk in cutlass.range_constexpr(held):
            starts[chunk] += first
        return starts

    @cute.jit
    def write_values(
        self,
        span: cutlass.Constexpr,
        columns: cutlass.Constexpr,
        shared: cutlass.Constexpr,
        place: cutlass.Constexpr,
        output: cutlass.Constexpr,
    ):
        """Write the positions of the selected columns, in order; by value, sort them first. `columns` are the thread's
        values and its mask."""
        config, (values, mask) = self.config, columns
        by_value = config.order == "value"
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
            self.sort_entries(shared, place, output)
        else:
            cute.arch.sync_threads()
            for i in cutlass.range(place.thread, config.k, config.threads, unroll=4):
                self.put(output, place.row, i, shared.sample.bins[i])


def lowest(mask: Int32) -> Int32:
    """The number of the lowest bit that is set; -1 for none."""
    return 31 - Int32(cute.arch.clz(mask & -mask))


@cute.jit
def value_at(values: cute.Tensor, index: Int32):
    """One of a power of two of values in registers, by selections: an array that is indexed would leave them."""
    left = [values[i] for i in range(cute.size(values))]
    for step in cutlass.range_constexpr(cute.size(values).bit_length() - 1):
        left = [select(index, step, left[i], left[i + 1]) for i in range(0, len(left), 2)]
    return left[0]


@cute.jit
def select(index: Int32, bit: cutlass.Constexpr, zero: Float32, one: Float32):
    """`one` where a bit of the index is set, else `zero`."""
    value = zero
    if (index >> bit) & 1 == 1:
        value = one
    return value
