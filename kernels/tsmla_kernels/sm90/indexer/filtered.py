"""The common way to a row's top-k: a histogram, a bin in which the k-th largest lies, and few keys beside it.

A CTA holds its share of a short row. Of a long one it holds a sample, from which a bound is guessed that about 1.3 k
columns reach; these alone are kept when the row is read. The guess is checked: a row with fewer such columns than k, or
with more than there is room for, or with too many different keys in one bin, is left to `ExactSearch`. Of too many
equal keys in one bin the first are selected.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64, const_expr

from tsmla_kernels.sm90.indexer.common import ClusterSearch, Found, Total, add_one, add_to, bound, entry, position_of
from tsmla_kernels.sm90.indexer.config import BINS
from tsmla_kernels.sm90.indexer.rows import NAN, NAN_BIN, bin_floor, global_column, least_float, ordered, pair_bins
from tsmla_kernels.sm90.warp import quotient

LAST_BIN = BINS - 1  # no float's: more columns than the buffers hold count here
PLENTY = 1 << 26  # more than are ever selected
ABOVE_MARKS = 0x0F0F0F0F  # of a word of marks: columns above the bin; the other bits are of equals
EQUAL = 1 << 13  # counts of equals go above those of other selected columns, which are at most 4096
SIGMAS = 5.0  # between the columns expected above the guessed bound and k


class Span(NamedTuple):
    """A CTA's share of a row, as vectors of 16 bytes; a chunk is one for each thread.

    Attributes:
      address: of the row's first vector. lead: columns there that are not the row's. behind: where its columns end.
      begin: the CTA's first vector. full: vectors that lie in the array as a whole.
      chunks: of every CTA. held: those of them in shared memory, every `stride`th.
    """

    address: Int64
    lead: Int32
    behind: Int32
    begin: Int32
    full: Int32
    chunks: Int32
    held: Int32
    stride: Int32


class FilteredSearch(ClusterSearch):
    """Device functions of the common way."""

    @cute.jit
    def span(self, logits: cute.Tensor, first: Int64, columns: Int32, place: cutlass.Constexpr):
        """The Span of the row of `columns` from element `first` of the array on."""
        config = self.config
        lead = Int32(first & 3)
        begin = first - Int64(lead)
        elements = Int64(logits.shape[0]) * Int64(logits.shape[1])
        full = (lead + columns + 3) >> 2
        whole = (elements - begin) >> 2
        chunks = quotient(full + (config.cluster * config.threads - 1), config.cluster * config.threads)
        if Int64(full) > whole:
            full = Int32(whole)
        held, stride = chunks, Int32(1)
        if chunks > config.held:
            held, stride = Int32(config.held), chunks // config.held
        return Span(
            address=logits.iterator.toint() + begin * 4,
            lead=lead,
            behind=lead + columns,
            begin=place.rank * chunks * config.threads,
            full=full,
            chunks=chunks,
            held=held,
            stride=stride,
        )

    @cute.jit
    def hold(self, span: cutlass.Constexpr, shared: cutlass.Constexpr, place: cutlass.Constexpr):
        """Ask for the chunks that are held. Each thread reads what it has asked for, and waits for that alone."""
        target = Int32(shared.held.iterator.toint()) + place.thread * 16
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
    def search(
        self, span: cutlass.Constexpr, shared: cutlass.Constexpr, place: cutlass.Constexpr, output: cutlass.Constexpr
    ):
        """Select and write the k largest; False, and nothing written, if the row is none of the common."""
        config = self.config
        k = Int32(config.k)
        target, whole = k, span.chunks <= config.held
        if not whole:
            target = sample_target(config.k, span)
        self.count_held(span, shared, place)
        self.find(shared.sample, shared, place, target)
        common, above = Boolean(False), Int32(0)
        index = shared.found[Found.BIN]
        crowded, many = index, shared.found[Found.INSIDE] > config.listed
        if index > NAN_BIN and not many:
            if whole:
                common = Boolean(True)
                above = self.split_held(span, shared, place, index)
            else:
                if const_expr(config.streams):
                    self.stream(span, shared, place, least_float(bin_floor(index)))
                    self.find(shared.counts, shared, place, k)
                    index = shared.found[Found.BIN]
                    if index > NAN_BIN and index < LAST_BIN and shared.found[Found.INSIDE] <= config.listed:
                        common = Boolean(True)
                        above = self.split_kept(span, shared, place, index)
        if common:
            self.total_above(shared, place, above)
            self.finish(span, shared, place)
        elif crowded > NAN_BIN and many:
            common = self.split_equals(span, shared, place, crowded)
        if common:
            self.write_marked(span, shared, place, output)
        return common

    # ---- reading

    @cute.jit
    def mend_vector(self, span: cutlass.Constexpr, vector: Int32, values: cute.Tensor):
        """Make what is no column of the row NaN, and bring the columns behind the array's last whole vector. True if
        there were any."""
        changed = Boolean(False)
        if vector * 4 < span.lead or vector * 4 + 4 > span.behind:
            changed = Boolean(True)
            for i in cutlass.range_constexpr(4):
                element = vector * 4 + i
                if element < span.lead or element >= span.behind:
                    values[i] = Float32(NAN)
                elif vector >= span.full:
                    values[i] = global_column(span.address, element)
        return changed

    def held_vector(self, shared: cutlass.Constexpr, place: cutlass.Constexpr, index: Int32) -> cute.Tensor:
        """The thread's vector of a chunk that is held, in shared memory."""
        at = shared.held.iterator + (index * self.config.threads + place.thread) * 4
        return cute.make_tensor(at.align(16), cute.make_layout(4))

    @cute.jit
    def count_held(self, span: cutlass.Constexpr, shared: cutlass.Constexpr, place: cutlass.Constexpr):
        """Count the columns that are held by bins."""
        values = cute.make_rmem_tensor((4,), Float32)
        base = Int32(shared.sample.bins.iterator.toint())
        vector = span.begin + place.thread
        cute.arch.inline_ptx("cp.async.wait_all;")
        for index in cutlass.range(span.held, unroll=1):
            source = self.held_vector(shared, place, index)
            cute.autovec_copy(source, values)
            if self.mend_vector(span, vector, values):
                cute.autovec_copy(values, source)
            for i in cutlass.range_constexpr(2):
                for at in pair_bins(values[2 * i], values[2 * i + 1]):
                    add_one(base + at)
            vector += span.stride * self.config.threads
        cute.arch.sync_threads()

    @cute.jit
    def stream(self, span: cutlass.Constexpr, shared: cutlass.Constexpr, place: cutlass.Constexpr, low: Float32):
        """Keep the columns of the share that are at least `low`, and count them by bins."""
        threads, depth = self.config.threads, self.config.depth
        counts = Int32(shared.counts.bins.iterator.toint())
        begin = Int32(shared.held.iterator.toint()) + place.thread * 4
        at, last = begin, begin + self.config.kept * (threads * 4)
        values = cute.make_rmem_tensor((4 * depth,), Float32)
        vector, after = span.begin + place.thread, span.begin + span.chunks * threads
        share = span._replace(full=cutlass.min(span.full, after), behind=cutlass.min(span.behind, after * 4))
        number = Int32(0)  # of a column among the thread's
        for _ in cutlass.range((span.chunks + (depth - 1)) // depth, unroll=1):
            for i in cutlass.range_constexpr(depth):
                found = global_vector(share.address, vector + i * threads, share.full)
                for j in cutlass.range_constexpr(4):
                    values[4 * i + j] = found[j]
            for i in cutlass.range_constexpr(depth):
                part = cute.make_tensor(values.iterator + 4 * i, cute.make_layout(4))
                self.mend_vector(share, vector, part)
                for j in cutlass.range_constexpr(2):
                    for side, offset in enumerate(pair_bins(part[2 * j], part[2 * j + 1])):
                        column = 2 * j + side
                        ends = (low, threads * 4, last)
                        at = keep(part[column], at, number + column, (counts, offset), ends)
                vector += threads
                number += 4
        shared.kept[place.thread] = quotient(at - begin, threads * 4)
        if at == last:
            shared.counts.bins[LAST_BIN] = Int32(PLENTY)
        cute.arch.sync_threads()

    # ---- above the bin, and in it

    @cute.jit
    def split_held(self, span: cutlass.Constexpr, shared: cutlass.Constexpr, place: cutlass.Constexpr, index: Int32):
        """Mark the columns above the bin, and list those in it, of all that are held. Returns how many are above."""
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
                        self.list(span, shared, values[i], (span.begin + local) * 4 + i)
            local += self.config.threads
        return above

    @cute.jit
    def split_kept(self, span: cutlass.Constexpr, shared: cutlass.Constexpr, place: cutlass.Constexpr, index: Int32):
        """Mark the columns above the bin, and list those in it, of all that were kept. Returns how many are above."""
        above = Int32(0)
        at = Int32(shared.held.iterator.toint()) + place.thread * 4
        count = shared.kept[place.thread]
        # As often for all lanes: where a loop is left one by one and two branches meet behind it, ptxas was seen not to
        # bring the warp together again.
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
                    # What is kept has the bin alone.
                    self.list(span, shared, global_column(span.address, element), element)
            at += self.config.threads * 4
        return above

    @cute.jit
    def split_equals(self, span: cutlass.Constexpr, shared: cutlass.Constexpr, place: cutlass.Constexpr, index: Int32):
        """Mark the columns above a bin, and those in it as equals. True if these are equal and the k-th largest."""
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
                    self.mend_vector(share, share.begin + local, part)
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
        return self.share_marked(shared, place, (above, inside), (ordered(lowest), ordered(highest)))

    @cute.jit
    def share_marked(
        self, shared: cutlass.Constexpr, place: cutlass.Constexpr, counts: cutlass.Constexpr, keys: cutlass.Constexpr
    ):
        """How many equals the CTA writes, and where: of a thread's (above, equals) and (least, greatest) of these. True
        if the cluster's equals have one key and hold the k-th largest."""
        for word, count in zip((Total.ABOVE, Total.INSIDE), counts, strict=True):
            count = cute.arch.warp_redux_sync(count, "add")
            if place.lane == 0:
                add_to(shared.totals, word, count)
        for word, kind, key in zip((Total.LEAST, Total.GREATEST), ("umin", "umax"), keys, strict=True):
            key = cute.arch.warp_redux_sync(key, kind)
            if place.lane == 0:
                bound(shared.totals, word, kind, key)
        self.meet()
        above, equals = (self.of_clusters(shared, place, word) for word in (Total.ABOVE, Total.INSIDE))
        cluster = Int32(self.config.cluster)
        needed = Int32(self.config.k) - self.before(above, cluster, place.lane)
        enough = (needed > 0) & (needed <= self.before(equals, cluster, place.lane))
        least, greatest = self.bounds(shared, place)
        base, earlier = self.before(above, place.rank, place.lane), self.before(equals, place.rank, place.lane)
        if place.thread == 0:
            shared.totals[Total.BASE] = base + cutlass.min(earlier, needed)
            shared.found[Found.NEEDED] = cutlass.max(needed - earlier, 0)
        return enough & (least == greatest)

    @cute.jit
    def total_above(self, shared: cutlass.Constexpr, place: cutlass.Constexpr, above: Int32):
        """Add up the cluster's need of what each CTA has above the bin."""
        if const_expr(self.config.cluster > 1):
            above = cute.arch.warp_redux_sync(above, "add")
            if place.lane == 0:
                add_to(shared.totals, Total.ABOVE, above)

    @cute.jit
    def list(self, span: cutlass.Constexpr, shared: cutlass.Constexpr, value: Float32, element: Int32):
        """Add a column to those whose bin is the k-th largest's."""
        slot = cute.arch.atomic_add(shared.totals.iterator + Total.INSIDE, Int32(1), sem="relaxed", scope="cta")
        shared.listed[slot] = entry(ordered(value), element - span.lead)

    @cute.jit
    def mark(self, span: cutlass.Constexpr, shared: cutlass.Constexpr, element: Int32):
        """Mark a column as selected."""
        local = quotient(element, 4) - span.begin
        bit = Int32(1) << ((local & 3) * 8 + (element & 3))
        cute.arch.inline_ptx(
            "red.relaxed.cta.shared::cta.or.b32 [{$r0}], {$r1};", read_only_args=[mark_of(shared, local), bit]
        )

    # ---- what is written

    @cute.jit
    def finish(self, span: cutlass.Constexpr, shared: cutlass.Constexpr, place: cutlass.Constexpr):
        """Mark those of the listed keys that are selected."""
        keys = shared.listed
        self.meet()
        if const_expr(self.config.cluster > 1):
            keys = shared.merged
            self.merge_listed(shared, place)
        count, needed = shared.found[Found.INSIDE], shared.found[Found.NEEDED]
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
    def merge_listed(self, shared: cutlass.Constexpr, place: cutlass.Constexpr):
        """The cluster's listed keys, and where the CTA's columns go before any of these is selected."""
        counts = self.of_clusters(shared, place, Total.INSIDE)
        base = self.before(self.of_clusters(shared, place, Total.ABOVE), place.rank, place.lane)
        if place.thread == 0:
            shared.totals[Total.BASE] = base
        offset = Int32(0)
        for rank in cutlass.range(self.config.cluster, unroll=1):
            of_rank = cute.arch.shuffle_sync(counts, rank)
            if place.thread < of_rank:
                low, high = self.remote(shared.listed, place.thread, rank, 2)
                shared.merged[offset + place.thread] = (Uint64(Uint32(high)) << Uint64(32)) | Uint64(Uint32(low))
            offset += of_rank
        cute.arch.sync_threads()

    @cute.jit
    def write_marked(
        self, span: cutlass.Constexpr, shared: cutlass.Constexpr, place: cutlass.Constexpr, output: cutlass.Constexpr
    ):
        """Write the positions that are marked, in order, of equals as many as are needed; by value, sort them first."""
        if const_expr(self.config.cluster > 1):
            cute.arch.cluster_arrive()  # nothing of another CTA is read from here on
        cute.arch.sync_threads()
        words = quotient(span.chunks + 3, 4)
        begin, count = place.thread * words, Int32(0)
        for i in cutlass.range(words, unroll=1):
            word = marks(shared, begin + i)
            count += cute.arch.popc(word & ABOVE_MARKS) + cute.arch.popc(word & ~ABOVE_MARKS) * EQUAL
        through = self.running(count, place.lane)
        if place.lane == 31:
            shared.above[place.warp] = through
        cute.arch.sync_threads()
        chosen = shared.above[cutlass.min(place.lane, self.config.warps - 1)]
        first = self.before(chosen, place.warp, place.lane) + through - count
        by_value, base = self.config.order == "value", Int32(0)
        if const_expr(self.config.cluster > 1):
            base = shared.totals[Total.BASE]
        total = self.before(chosen, Int32(self.config.warps), place.lane)
        needed = shared.found[Found.NEEDED]
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
            while word != 0:
                bit = 31 - Int32(cute.arch.clz(word & -word))
                column = position + (quotient(bit, 8) * 4 + (bit & 3))
                if const_expr(by_value):
                    key = ordered(global_column(span.address, column + span.lead))
                    self.enter(shared.entries, base + at, entry(key, column))
                else:
                    shared.sample.bins[at] = column
                word = word & (word - 1)
                at += 1
        if const_expr(not by_value):
            cute.arch.sync_threads()
            for i in cutlass.range(place.thread, total, self.config.threads, unroll=1):
                self.put(output, place.row, base + i, shared.sample.bins[i])
        if const_expr(self.config.cluster > 1):
            cute.arch.cluster_wait()
        if const_expr(by_value):
            self.sort_entries(shared, place, output)


def sample_target(k: int, span: Span) -> Int32:
    """How many columns of the sample are to be above the guessed bound: about k of the row and SIGMAS deviations."""
    # Approximate: a division and a root that round exactly call functions.
    return cute.arch.inline_ptx(
        "{ .reg .f32 s, t; cvt.rn.f32.s32 s, {$r0}; cvt.rn.f32.s32 t, {$r1}; rcp.approx.ftz.f32 t, t;"
        f" mul.f32 s, s, t; mul.f32 s, s, {float_bits(k)}; sqrt.approx.ftz.f32 t, s;"
        f" fma.rn.f32 s, t, {float_bits(SIGMAS)}, s; add.f32 s, s, {float_bits(4)}; cvt.rzi.s32.f32 {{$w0}}, s; }}",
        write_only_types=[Int32],
        read_only_args=[span.held, span.chunks],
    )


def float_bits(value: float) -> str:
    """A float as PTX writes it."""
    return "0f" + struct.pack(">f", value).hex().upper()


def mark_of(shared: cutlass.Constexpr, vector: Int32) -> Int32:
    """The address of the word of marks in which a vector of the CTA's has its byte: scattered, so that threads that
    read neighbouring words, each several, do so from different banks."""
    word = quotient(vector, 4)
    return Int32(shared.marks.iterator.toint()) + (word ^ (quotient(word, 16) & 31)) * 4


def marks(shared: cutlass.Constexpr, word: Int32) -> Int32:
    """A word of marks: a byte for each of four vectors, a bit for each of its columns."""
    return shared.marks[word ^ (quotient(word, 16) & 31)]


def global_vector(address: Int64, vector: Int32, full: Int32):
    """Four columns in global memory; NaN for those behind the last whole vector."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .f32 a, b, c, d; setp.lt.s32 p, {$r1}, {$r2};"
        " mov.f32 a, 0f7FC00000; mov.f32 b, a; mov.f32 c, a; mov.f32 d, a;"
        " @p ld.global.nc.L1::no_allocate.v4.f32 {a, b, c, d}, [{$r0}];"
        " mov.f32 {$w0}, a; mov.f32 {$w1}, b; mov.f32 {$w2}, c; mov.f32 {$w3}, d; }",
        write_only_types=[Float32] * 4,
        read_only_args=[address + Int64(vector) * 16, vector, full],
    )


def keep(
    value: Float32, at: Int32, number: Int32, counter: tuple[Int32, Int32], ends: tuple[Float32, int, Int32]
) -> Int32:
    """Where the thread's next column goes: `at`, or behind it where `value` is at least the bound and is counted and
    kept, as bin and number in a word."""
    low, step, last = ends
    return cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .b32 t, v; setp.ge.f32 p, {$r0}, {$r1}; mad.lo.s32 v, {$r5}, 65536, {$r3};"
        " @p st.shared.b32 [{$r2}], v; add.s32 t, {$r4}, {$r5}; @p red.relaxed.cta.shared::cta.add.u32 [t], 1;"
        f" add.s32 t, {{$r2}}, {step}; min.s32 t, t, {{$r6}}; selp.b32 {{$w0}}, t, {{$r2}}, p; }}",
        write_only_types=[Int32],
        read_only_args=[value, low, at, number, *counter, last],
    )
