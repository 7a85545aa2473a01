"""The usual search for a row's top-k: a histogram finds the bin of the k-th largest, and the few keys in it are ranked.

A CTA holds all of its share of a short row in shared memory, but only a sample of a long one. The sample gives a guess:
a bound that about 1.3 k columns reach. Only these columns are kept when the row is read. The guess is checked: a row
goes to `ExactSearch` if fewer than k columns reach the bound, or if a thread has no room for its kept columns. A row of
any length goes there if the k-th largest is -inf or NaN, or if its bin has more columns than can be listed. But if the
first histogram's bin has too many columns and all of them are equal, the first of them are selected here.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.warp import quotient, running_sum, sum_before
from tsmla_kernels.topk.bins import BinSearch
from tsmla_kernels.topk.bits import joined_nibbles
from tsmla_kernels.topk.candidates import BinCounts, Candidates
from tsmla_kernels.topk.cluster import Cluster
from tsmla_kernels.topk.config import BINS, TopkConfig
from tsmla_kernels.topk.keys import NAN_BIN, bin_floor, entry, least_float, ordered, pair_bins, position_of
from tsmla_kernels.topk.memory import (
    Output,
    Place,
    Result,
    Shared,
    Total,
    add_one,
    add_to,
    global_column,
    global_vector,
)
from tsmla_kernels.topk.span import Span, mend_vector, sample_target
from tsmla_kernels.topk.writer import Writer

LAST_BIN = BINS - 1
"""A bin that no float falls into. Its count is set to PLENTY if a thread runs out of room."""
PLENTY = 1 << 26
"""More columns than are ever selected."""
ABOVE_MARKS = 0x0F0F0F0F
"""The bits of a word of marks for columns above the bin. The other bits are for columns that are equal."""
EQUAL = 1 << 13
"""The summand for one equal column in a count of marked columns. The lower bits of the count are for columns above the
bin, at most 4096."""


class Kept(NamedTuple):
    """How a thread keeps columns.

    Attributes:
      low: the least float that is kept.
      counts: the address of the histogram of kept columns.
      step: bytes between two kept columns of the thread. last: the address at which the thread's room ends.
    """

    low: Float32
    counts: Int32
    step: int
    last: Int32


class FilteredSearch:
    """Device functions of the search."""

    def __init__(
        self, config: TopkConfig, *, cluster: Cluster, bins: BinSearch, candidates: Candidates, writer: Writer
    ) -> None:
        self.config, self.cluster, self.bins = config, cluster, bins
        self.candidates, self.writer = candidates, writer

    @cute.jit
    def hold(self, span: Span, shared: Shared, place: Place):
        """Start the copies of the held chunks. Each thread reads only what it copied itself, so it waits only for its
        own copies."""
        target = Int32(shared.columns.iterator.toint()) + place.thread * 16
        vector = span.begin + place.thread
        for _ in cutlass.range(span.held, unroll=1):
            size = Int32(0)
            if vector < span.full:
                size = Int32(16)
            cute.arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
                read_only_args=[target, span.address + Int64(cutlass.min(vector, span.full - 1)) * 16, size],
            )
            target += self.config.threads * 16
            vector += span.stride * self.config.threads

    @cute.jit
    def search(self, span: Span, shared: Shared, place: Place, output: Output):
        """Select and write the k greatest. Returns False, with nothing written, if the row needs ExactSearch."""
        config = self.config
        k = Int32(config.k)
        target, whole = k, span.chunks <= config.held
        if not whole:
            target = sample_target(config.k, span)
        self.count_held(span, shared, place)
        self.bins.find(shared.sample, shared, place, target)
        common, above = Boolean(False), Int32(0)
        index = shared.results[Result.BIN]
        crowded, many = index, shared.results[Result.INSIDE] > config.listed
        if index > NAN_BIN and not many:
            if whole:
                common = Boolean(True)
                above = self.split_held(span, shared, place, index)
            else:
                if const_expr(config.streams):
                    self.stream(span, shared, place, least_float(bin_floor(index)))
                    self.bins.find(shared.kept, shared, place, k)
                    index = shared.results[Result.BIN]
                    if index > NAN_BIN and index < LAST_BIN and shared.results[Result.INSIDE] <= config.listed:
                        common = Boolean(True)
                        above = self.split_kept(span, shared, place, index)
        if common:
            self.candidates.total_above(shared, place, above)
            self.finish(span, shared, place)
        elif crowded > NAN_BIN and many:
            common = self.split_equals(span, shared, place, crowded)
        if common:
            self.write_marked(span, shared, place, output)
        return common

    # ---- reading

    def held_vector(self, shared: Shared, place: Place, index: Int32) -> cute.Tensor:
        """The thread's vector of a held chunk: a view of shared memory."""
        at = shared.columns.iterator + (index * self.config.threads + place.thread) * 4
        return cute.make_tensor(at.align(16), cute.make_layout(4))

    @cute.jit
    def count_held(self, span: Span, shared: Shared, place: Place):
        """Count the held columns in the bins of shared.sample."""
        values = cute.make_rmem_tensor((4,), Float32)
        base = Int32(shared.sample.bins.iterator.toint())
        vector = span.begin + place.thread
        cute.arch.inline_ptx("cp.async.wait_all;")
        for index in cutlass.range(span.held, unroll=1):
            source = self.held_vector(shared, place, index)
            cute.autovec_copy(source, values)
            if mend_vector(span, vector, values):
                cute.autovec_copy(values, source)
            for i in cutlass.range_constexpr(2):
                for at in pair_bins(values[2 * i], values[2 * i + 1]):
                    add_one(base + at)
            vector += span.stride * self.config.threads
        cute.arch.sync_threads()

    @cute.jit
    def stream(self, span: Span, shared: Shared, place: Place, low: Float32):
        """Keep the columns of the share that are at least `low`, and count them in the bins of shared.kept."""
        threads, depth = self.config.threads, self.config.depth
        counts = Int32(shared.kept.bins.iterator.toint())
        begin = Int32(shared.columns.iterator.toint()) + place.thread * 4
        at, last = begin, begin + self.config.kept * (threads * 4)
        values = cute.make_rmem_tensor((4 * depth,), Float32)
        vector, after = span.begin + place.thread, span.begin + span.chunks * threads
        share = span._replace(full=cutlass.min(span.full, after), behind=cutlass.min(span.behind, after * 4))
        kept = Kept(low=low, counts=counts, step=threads * 4, last=last)
        number = Int32(0)  # counts the thread's columns
        for _ in cutlass.range((span.chunks + (depth - 1)) // depth, unroll=1):
            for i in cutlass.range_constexpr(depth):
                found = global_vector(share.address, vector + i * threads, share.full)
                for j in cutlass.range_constexpr(4):
                    values[4 * i + j] = found[j]
            for i in cutlass.range_constexpr(depth):
                part = cute.make_tensor(values.iterator + 4 * i, cute.make_layout(4))
                mend_vector(share, vector, part)
                for j in cutlass.range_constexpr(2):
                    for side, offset in enumerate(pair_bins(part[2 * j], part[2 * j + 1])):
                        column = 2 * j + side
                        at = keep(kept, part[column], number + column, offset, at)
                vector += threads
                number += 4
        shared.kept_counts[place.thread] = quotient(at - begin, threads * 4)
        if at == last:
            shared.kept.bins[LAST_BIN] = Int32(PLENTY)
        cute.arch.sync_threads()

    # ---- above the bin, and in it

    @cute.jit
    def split_held(self, span: Span, shared: Shared, place: Place, index: Int32):
        """Mark the held columns above the bin, and list the held columns in it. Returns how many of the thread's
        columns are above the bin."""
        low, high = least_float(bin_floor(index)), least_float(bin_floor(index + 1))
        values = cute.make_rmem_tensor((4,), Float32)
        above, local = Int32(0), place.thread
        for chunk in cutlass.range(span.held, unroll=1):
            cute.autovec_copy(self.held_vector(shared, place, chunk), values)
            mask, inside = Int32(0), Boolean(False)
            for i in cutlass.range_constexpr(4):
                is_above = values[i] >= high
                mask |= Int32(is_above) << i
                inside = inside | ((values[i] >= low) & ~is_above)
            cute.arch.inline_ptx(
                "st.shared.u8 [{$r0}], {$r1};", read_only_args=[mark_of(shared, local) + (local & 3), mask]
            )
            above += cute.arch.popc(mask)
            if inside:
                for i in cutlass.range_constexpr(4):
                    if (values[i] >= low) & ~(values[i] >= high):
                        self.candidates.add(span, shared, values[i], (span.begin + local) * 4 + i)
            local += self.config.threads
        return above

    @cute.jit
    def split_kept(self, span: Span, shared: Shared, place: Place, index: Int32):
        """Mark the kept columns above the bin, and list the kept columns in it. Returns how many of the thread's
        columns are above the bin."""
        above = Int32(0)
        at = Int32(shared.columns.iterator.toint()) + place.thread * 4
        count = shared.kept_counts[place.thread]
        # All lanes run the loop equally often: when lanes left a loop one by one and two branches met behind it, ptxas
        # was seen to leave out the warp's reconvergence (DESIGN.md, "Warps stay whole").
        for i in cutlass.range(cute.arch.warp_redux_sync(count, "max"), unroll=1):
            word = cute.arch.inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[at])
            number = word & 0xFFFF
            vector = span.begin + place.thread + quotient(number, 4) * self.config.threads
            element = vector * 4 + (number & 3)
            if i < count:
                if word >= (index + 1) << 18:
                    above += 1
                    self.mark(span, shared, element)
                elif word >= index << 18:
                    # A kept word has the column's bin, not its value.
                    self.candidates.add(span, shared, global_column(span.address, element), element)
            at += self.config.threads * 4
        return above

    @cute.jit
    def split_equals(self, span: Span, shared: Shared, place: Place, index: Int32):
        """Mark the columns above a bin, and the columns in it as equals. Returns whether all columns in the bin are
        equal and the k-th greatest is one of them."""
        threads, streams = self.config.threads, self.config.streams
        low, high = least_float(bin_floor(index)), least_float(bin_floor(index + 1))
        depth = self.config.depth if const_expr(streams) else 1
        values = cute.make_rmem_tensor((4 * depth,), Float32)
        lowest, highest = Float32(float("inf")), Float32(float("-inf"))
        above, inside, local, after = Int32(0), Int32(0), place.thread, span.begin + span.chunks * threads
        share = span._replace(full=cutlass.min(span.full, after), behind=cutlass.min(span.behind, after * 4))
        for chunk in cutlass.range((span.chunks + (depth - 1)) // depth, unroll=1):
            for i in cutlass.range_constexpr(depth):
                part = cute.make_tensor(values.iterator + 4 * i, cute.make_layout(4))
                if const_expr(streams):
                    found = global_vector(share.address, share.begin + local + i * threads, share.full)
                    for j in cutlass.range_constexpr(4):
                        part[j] = found[j]
                else:
                    cute.autovec_copy(self.held_vector(shared, place, chunk), part)
            for i in cutlass.range_constexpr(depth):
                part = cute.make_tensor(values.iterator + 4 * i, cute.make_layout(4))
                if const_expr(streams):
                    mend_vector(share, share.begin + local, part)
                mask = Int32(0)
                for j in cutlass.range_constexpr(4):
                    if part[j] >= high:
                        mask |= 1 << j
                    elif part[j] >= low:
                        mask |= 16 << j
                        lowest, highest = cute.arch.fmin(lowest, part[j]), cute.arch.fmax(highest, part[j])
                if mask != 0:
                    address = mark_of(shared, local) + (local & 3)
                    cute.arch.inline_ptx("st.shared.u8 [{$r0}], {$r1};", read_only_args=[address, mask])
                above += cute.arch.popc(mask & ABOVE_MARKS)
                inside += cute.arch.popc(mask & ~ABOVE_MARKS)
                local += threads
        counts = BinCounts(above=above, inside=inside, least=ordered(lowest), greatest=ordered(highest))
        return self.candidates.share_equals(shared, place, counts)

    @cute.jit
    def mark(self, span: Span, shared: Shared, element: Int32):
        """Mark the column with the index `element`, counted from span.address, as selected."""
        local = quotient(element, 4) - span.begin
        bit = Int32(1) << ((local & 3) * 8 + (element & 3))
        cute.arch.inline_ptx(
            "red.relaxed.cta.shared::cta.or.b32 [{$r0}], {$r1};", read_only_args=[mark_of(shared, local), bit]
        )

    # ---- writing

    @cute.jit
    def finish(self, span: Span, shared: Shared, place: Place):
        """Mark the candidates that are selected."""
        keys = shared.candidates
        self.cluster.meet()
        if const_expr(self.config.cluster > 1):
            keys = shared.cluster_candidates
            self.candidates.merge(shared, place)
        count, needed = shared.results[Result.INSIDE], shared.results[Result.NEEDED]
        first, after = span.begin * 4, (span.begin + span.chunks * self.config.threads) * 4
        for index in cutlass.range(place.warp, count, self.config.warps, unroll=1):
            own, greater = keys[index], Int32(0)
            for other in cutlass.range(place.lane, count, 32, unroll=1):
                greater += Int32(keys[other] > own)
            greater = cute.arch.warp_redux_sync(greater, "add")
            element = position_of(own) + span.lead
            if place.lane == 0 and greater < needed:
                if const_expr(self.config.cluster == 1):
                    self.mark(span, shared, element)
                elif element < first:
                    add_to(shared.totals, Total.BASE, Int32(1))
                elif element < after:
                    self.mark(span, shared, element)

    @cute.jit
    def write_marked(self, span: Span, shared: Shared, place: Place, output: Output):
        """Write, in order, the positions of the columns that are marked as above the bin, and of as many of the first
        equal columns as are needed; or the bits of these columns. If results are sorted by value, sort them first."""
        if const_expr(self.config.cluster > 1):
            cute.arch.cluster_arrive()  # from here on this CTA reads no other CTA's shared memory
        cute.arch.sync_threads()
        if const_expr(self.writer.bits is not None):
            self.writer.bits.clear(shared, place, output)
        words = quotient(span.chunks + 3, 4)
        begin, count = place.thread * words, Int32(0)
        for i in cutlass.range(words, unroll=1):
            word = marks(shared, begin + i)
            count += cute.arch.popc(word & ABOVE_MARKS) + cute.arch.popc(word & ~ABOVE_MARKS) * EQUAL
        through = running_sum(count, place.lane)
        if place.lane == 31:
            shared.warp_above[place.warp] = through
        cute.arch.sync_threads()
        chosen = shared.warp_above[cutlass.min(place.lane, self.config.warps - 1)]
        first = sum_before(chosen, place.warp, place.lane) + through - count
        by_value, base = self.writer.by_value, Int32(0)
        if const_expr(self.config.cluster > 1):
            base = shared.totals[Total.BASE]
        total = sum_before(chosen, Int32(self.config.warps), place.lane)
        needed = shared.results[Result.NEEDED]
        at = (first & (EQUAL - 1)) + cutlass.min(quotient(first, EQUAL), needed)
        total = (total & (EQUAL - 1)) + cutlass.min(quotient(total, EQUAL), needed)
        needed -= quotient(first, EQUAL)
        for i in cutlass.range(words, unroll=1):
            word = marks(shared, begin + i)
            equals = quotient(word, 16) & ABOVE_MARKS
            word = word & ABOVE_MARKS
            if needed >= cute.arch.popc(equals):
                needed -= cute.arch.popc(equals)
                word = word | equals
            else:
                while needed > 0:
                    word = word | (equals & -equals)
                    equals = equals & (equals - 1)
                    needed -= 1
            position = (span.begin + (begin + i) * 4) * 4 - span.lead
            if const_expr(self.writer.bits is not None):
                self.writer.bits.add(shared, position, joined_nibbles(word))
            else:
                while word != 0:
                    bit = 31 - Int32(cute.arch.clz(word & -word))
                    column = position + (quotient(bit, 8) * 4 + (bit & 3))
                    if const_expr(by_value):
                        key = ordered(global_column(span.address, column + span.lead))
                        self.writer.enter(shared.entries, base + at, entry(key, column))
                    else:
                        shared.sample.bins[at] = column
                    word = word & (word - 1)
                    at += 1
        if const_expr(self.writer.bits is not None):
            cute.arch.sync_threads()
            self.writer.bits.put(shared, place, output)
        elif const_expr(not by_value):
            cute.arch.sync_threads()
            for i in cutlass.range(place.thread, total, self.config.threads, unroll=1):
                self.writer.put(output, place.row, base + i, shared.sample.bins[i])
        if const_expr(self.config.cluster > 1):
            cute.arch.cluster_wait()
        if const_expr(by_value):
            self.writer.put_entries(shared, place, output)


def mark_of(shared: Shared, vector: Int32) -> Int32:
    """The address of the word of marks that has the byte of vector `vector` of the CTA. Words are permuted, so
    that threads that each read several neighbouring words use different banks."""
    word = quotient(vector, 4)
    return Int32(shared.marks.iterator.toint()) + (word ^ (quotient(word, 16) & 31)) * 4


def marks(shared: Shared, word: Int32) -> Int32:
    """Word `word` of marks: one byte for each of four neighbouring vectors (see Shared.marks)."""
    return shared.marks[word ^ (quotient(word, 16) & 31)]


def keep(kept: Kept, value: Float32, number: Int32, offset: Int32, at: Int32) -> Int32:
    """If `value` is at least kept.low: store one word at address `at`, with `offset`, the byte offset of the column's
    bin, in the upper half and `number`, the column's index in the thread, in the lower half; and count the column in
    this bin. Returns the address for the next column."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .b32 t, v; setp.ge.f32 p, {$r0}, {$r1}; mad.lo.s32 v, {$r5}, 65536, {$r3};"
        " @p st.shared.b32 [{$r2}], v; add.s32 t, {$r4}, {$r5}; @p red.relaxed.cta.shared::cta.add.u32 [t], 1;"
        f" add.s32 t, {{$r2}}, {kept.step}; min.s32 t, t, {{$r6}}; selp.b32 {{$w0}}, t, {{$r2}}, p; }}",
        write_only_types=[Int32],
        read_only_args=[value, kept.low, at, number, kept.counts, offset, kept.last],
    )
