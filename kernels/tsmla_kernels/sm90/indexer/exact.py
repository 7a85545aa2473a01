"""The way to the top-k of any row: histograms of the keys in one bin, until they are few or equal, then a last walk
that writes what is selected in the order of positions."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64, const_expr

from tsmla_kernels.sm90.indexer.common import (
    EVERYWHERE,
    NOWHERE,
    ClusterSearch,
    Found,
    Total,
    add_one,
    add_to,
    bound,
    entry,
    position_of,
)
from tsmla_kernels.sm90.indexer.config import BINS, UNIT
from tsmla_kernels.sm90.indexer.rows import NAN_BIN, RowWalker, bin_floor, least_float, ordered, pair_bins

BIN_BITS = 12


class ExactSearch(RowWalker, ClusterSearch):
    """Device functions that select the k largest of a row of more than k columns."""

    by_value: bool

    @cute.jit
    def select_some(
        self, row: cutlass.Constexpr, shared: cutlass.Constexpr, place: cutlass.Constexpr, output: cutlass.Constexpr
    ):
        """The k largest of a row of more."""
        bins = shared.sample.bins
        self.walk(row, self.count_floats, (bins,), Int32(0), Int32(0), Int32(0))
        if place.rank == 0 and place.thread == 0:
            # The columns that are none of the row's count as NaN.
            add_to(bins, NAN_BIN, row.length - row.units * UNIT)
        cute.arch.sync_threads()
        self.find(shared.sample, shared, place, Int32(self.config.k))
        index = shared.found[Found.BIN]
        least, greatest = bin_floor(index), bin_floor(index + 1) - 1
        copied = self.classify(row, shared, place, (least, greatest), row.chunks)
        least, greatest = self.bounds(shared, place)
        searching = (shared.found[Found.INSIDE] > self.config.listed) & (least < greatest)
        while searching:
            # More equals of one bin than are ranked, of more than one value: their own histogram.
            shift = cutlass.max(Int32(32 - BIN_BITS) - Int32(cute.arch.clz(greatest - least)), 0)
            needed = shared.found[Found.NEEDED]
            cute.arch.sync_threads()
            self.clear_bins(shared, place)
            self.walk(row, self.count_keys, (bins, least, greatest, shift), copied, Int32(0), Int32(0))
            copied += row.chunks
            cute.arch.sync_threads()
            self.find(shared.sample, shared, place, needed)
            least += Uint32(shared.found[Found.BIN]) << Uint32(shift)
            # What is above the keys that were counted is above these too.
            greatest = cutlass.min(greatest, least + ((Uint32(1) << Uint32(shift)) - 1))
            copied = self.classify(row, shared, place, (least, greatest), copied)
            least, greatest = self.bounds(shared, place)
            searching = (shared.found[Found.INSIDE] > self.config.listed) & (least < greatest)
        key, limit, offset = least, Int32(EVERYWHERE), Int32(0)
        if shared.found[Found.INSIDE] <= self.config.listed:
            key, limit, offset = self.rank_listed(shared, place)
        else:
            limit, offset, copied = self.share_equals(row, shared, place, key, copied)
        if const_expr(self.cluster > 1 and not self.by_value):
            cute.arch.cluster_arrive()  # nothing of another CTA is read from here on
        context = (shared, place, output, (key, limit, least_float(key), least_float(key + 1)))
        self.walk(row, self.emit, context, copied, offset, Int32(0))
        if const_expr(self.by_value):
            self.sort_entries(shared, place, output)
        elif const_expr(self.cluster > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def clear_bins(self, shared: cutlass.Constexpr, place: cutlass.Constexpr):
        """Empty bins for all threads of the CTA."""
        for i in cutlass.range(place.thread, BINS, self.config.threads, unroll=1):
            shared.sample.bins[i] = Int32(0)
        cute.arch.sync_threads()

    @cute.jit
    def count_floats(
        self, row: cutlass.Constexpr, context: cutlass.Constexpr, unit: Int32, values: cute.Tensor, a: Int32, b: Int32
    ):
        """Of a walk: count a unit's columns by pair_bins."""
        (bins,) = context
        base = bins.iterator.toint()
        for i in cutlass.range_constexpr(2):
            for at in pair_bins(values[2 * i], values[2 * i + 1]):
                add_one(base + at)
        return a, b

    @cute.jit
    def count_keys(
        self, row: cutlass.Constexpr, context: cutlass.Constexpr, unit: Int32, values: cute.Tensor, a: Int32, b: Int32
    ):
        """Of a walk: count a unit's keys from `least` to `greatest` by their distance from `least`."""
        bins, least, greatest, shift = context
        base = bins.iterator.toint()
        for i in cutlass.range_constexpr(4):
            key, position = ordered(values[i]), self.position(row, unit, i)
            if key >= least and key <= greatest and position >= 0 and position < row.length:
                add_one(base + (Int32((key - least) >> Uint32(shift)) << 2))
        return a, b

    @cute.jit
    def classify(
        self,
        row: cutlass.Constexpr,
        shared: cutlass.Constexpr,
        place: cutlass.Constexpr,
        keys: cutlass.Constexpr,
        copied: Int32,
    ):
        """Count the columns above the keys (least, greatest) and those with one of them, and list the latter, or else
        find their bounds. Returns the chunks copied so far; the cluster has met."""
        least, greatest = keys
        for i in cutlass.range(place.thread, self.config.listed, self.config.threads, unroll=1):
            shared.ranks[i] = Int32(0)
        few = shared.found[Found.INSIDE] <= self.config.listed
        context = (shared, place, keys, least_float(least), least_float(greatest + 1), few)
        above, inside = self.walk(row, self.place_unit, context, copied, Int32(0), Int32(0))
        above = cute.arch.warp_redux_sync(above, "add")
        inside = cute.arch.warp_redux_sync(inside, "add")
        if place.lane == 0:
            shared.above[place.warp] = above
            shared.inside[place.warp] = inside
            add_to(shared.totals, Total.ABOVE, above)
            if not few:
                add_to(shared.totals, Total.INSIDE, inside)
        self.meet()
        return copied + row.chunks

    @cute.jit
    def place_unit(
        self, row: cutlass.Constexpr, context: cutlass.Constexpr, unit: Int32, values: cute.Tensor, a: Int32, b: Int32
    ):
        """Of a walk: (columns above, columns inside) of classify, of the lane."""
        shared, place, keys, low, high, few = context
        maybe = Boolean(False)
        for i in cutlass.range_constexpr(4):
            is_above = values[i] >= high
            a += Int32(is_above)
            maybe = maybe | ~((values[i] < low) | is_above)  # a NaN may be inside
        if cute.arch.vote_any_sync(maybe):
            least, greatest = keys
            lowest, highest = Uint32(0xFFFFFFFF), Uint32(0)
            for i in cutlass.range_constexpr(4):
                key, position = ordered(values[i]), self.position(row, unit, i)
                if key >= least and key <= greatest and position >= 0 and position < row.length:
                    b += 1
                    lowest, highest = cutlass.min(lowest, key), cutlass.max(highest, key)
                    if few:
                        slot = cute.arch.atomic_add(
                            shared.totals.iterator + Total.INSIDE, Int32(1), sem="relaxed", scope="cta"
                        )
                        shared.listed[slot] = entry(key, position)
                        shared.owners[slot] = place.warp
            if not few:
                lowest = cute.arch.warp_redux_sync(lowest, "umin")
                highest = cute.arch.warp_redux_sync(highest, "umax")
                if place.lane == 0:
                    bound(shared.totals, Total.LEAST, "umin", lowest)
                    bound(shared.totals, Total.GREATEST, "umax", highest)
        return a, b

    @cute.jit
    def rank_listed(self, shared: cutlass.Constexpr, place: cutlass.Constexpr):
        """(the k-th largest key, the last position of an equal that is selected, where the warp's columns go), by
        ranking the keys that are listed."""
        count, needed = shared.found[Found.INSIDE], shared.found[Found.NEEDED]
        keys, mine, own, base = shared.listed, Int32(0), count, Int32(0)
        if const_expr(self.cluster > 1):
            keys = shared.merged
            counts = self.of_clusters(shared, place, Total.INSIDE)
            mine, own = self.before(counts, place.rank, place.lane), cute.arch.shuffle_sync(counts, place.rank)
            base = self.before(self.of_clusters(shared, place, Total.ABOVE), place.rank, place.lane)
            offset = Int32(0)
            for rank in cutlass.range_constexpr(self.cluster):
                of_rank = cute.arch.shuffle_sync(counts, rank)
                if place.thread < of_rank:
                    low, high = self.remote(shared.listed, place.thread, Int32(rank), 2)
                    keys[offset + place.thread] = (Uint64(Uint32(high)) << Uint64(32)) | Uint64(Uint32(low))
                offset += of_rank
        if place.thread == 0:
            shared.totals[Total.BASE] = base
        cute.arch.sync_threads()
        self.rank_keys(keys, shared.ranks, count, place)
        cute.arch.sync_threads()
        if place.thread < count:
            rank = shared.ranks[place.thread]
            if rank < needed:
                at = place.thread - mine
                if at < 0:
                    add_to(shared.totals, Total.BASE, Int32(1))
                elif at < own:
                    add_to(shared.above, shared.owners[at], Int32(1))
                if rank == needed - 1:
                    last = keys[place.thread]
                    shared.found[Found.KEY] = Int32(Uint32(last >> Uint64(32)))
                    shared.found[Found.LIMIT] = position_of(last)
        cute.arch.sync_threads()
        chosen = shared.above[cutlass.min(place.lane, self.warps - 1)]
        first = shared.totals[Total.BASE] + self.before(chosen, place.warp, place.lane)
        return Uint32(shared.found[Found.KEY]), shared.found[Found.LIMIT], first

    @cute.jit
    def rank_keys(self, keys: cute.Tensor, ranks: cute.Tensor, count: Int32, place: cutlass.Constexpr):
        """Add to each key's rank how many are greater: each 32 of them, against a part of all, to a warp."""
        batches = (count + 31) >> 5
        parts = Int32(self.warps) // batches
        size = (count + parts - 1) // parts
        part = place.warp // batches
        if part < parts:
            index = (place.warp - part * batches) * 32 + place.lane
            key, greater = keys[cutlass.min(index, count - 1)], Int32(0)
            for other in cutlass.range(part * size, cutlass.min((part + 1) * size, count), unroll=4):
                greater += Int32(keys[other] > key)
            if index < count:
                add_to(ranks, index, greater)

    @cute.jit
    def share_equals(
        self,
        row: cutlass.Constexpr,
        shared: cutlass.Constexpr,
        place: cutlass.Constexpr,
        key: Uint32,
        copied: Int32,
    ):
        """(the warp's last position at which an equal of `key` is selected, where its columns go, chunks copied), where
        all keys of the bin are `key`."""
        lane, warp = place.lane, place.warp
        needed = shared.found[Found.NEEDED]
        base = self.before(self.of_clusters(shared, place, Total.ABOVE), place.rank, lane)
        equals = self.before(self.of_clusters(shared, place, Total.INSIDE), place.rank, lane)
        base += cutlass.min(needed, equals)
        needed = cutlass.max(needed - equals, 0)
        slot = cutlass.min(lane, self.warps - 1)
        inside = shared.inside[slot]
        taken = cutlass.max(cutlass.min(needed - (self.running(inside, lane) - inside), inside), 0)
        first = base + self.before(shared.above[slot] + taken, warp, lane)
        inside, taken = cute.arch.shuffle_sync(inside, warp), cute.arch.shuffle_sync(taken, warp)
        limit = Int32(EVERYWHERE)
        if taken == 0:
            limit = Int32(NOWHERE)
        elif taken < inside:
            self.walk(row, self.locate, (shared, place, key, taken), copied, Int32(0), Int32(0))
            copied += row.chunks
            cute.arch.sync_warp()
            limit = shared.ranks[warp]
        return limit, first, copied

    @cute.jit
    def locate(
        self, row: cutlass.Constexpr, context: cutlass.Constexpr, unit: Int32, values: cute.Tensor, a: Int32, b: Int32
    ):
        """Of a walk that has seen `a` equals of a key: where number `taken` of them is, to the warp's word of ranks."""
        shared, place, key, taken = context
        mask = Int32(0)
        for i in cutlass.range_constexpr(4):
            position = self.position(row, unit, i)
            if ordered(values[i]) == key and position >= 0 and position < row.length:
                mask |= 1 << i
        through = self.running(cute.arch.popc(mask), place.lane)
        seen = a + through - cute.arch.popc(mask)
        for i in cutlass.range_constexpr(4):
            if (mask >> i) & 1 == 1:
                seen += 1
                if seen == taken:
                    shared.ranks[place.warp] = self.position(row, unit, i)
        return a + cute.arch.shuffle_sync(through, 31), b

    # ---- what is written

    @cute.jit
    def emit(
        self, row: cutlass.Constexpr, context: cutlass.Constexpr, unit: Int32, values: cute.Tensor, a: Int32, b: Int32
    ):
        """Of a walk: the selected columns of a unit, from index `a` on."""
        shared, place, output, (key, limit, low, high) = context
        begin = unit * UNIT - row.lead
        floor = low
        if begin > limit:
            floor = high
        mask = Int32(0)
        for i in cutlass.range_constexpr(4):
            mask |= Int32(values[i] >= floor) << i
        if key == 0 or (begin <= limit and begin + (UNIT - 1) > limit):
            mask = Int32(0)
            for i in cutlass.range_constexpr(4):
                other, position = ordered(values[i]), self.position(row, unit, i)
                if other > key or (other == key and position <= limit):
                    if position >= 0 and position < row.length:
                        mask |= 1 << i
        if cute.arch.vote_any_sync(mask != 0):
            count = cute.arch.popc(mask)
            through = self.running(count, place.lane)
            at = a + through - count
            for i in cutlass.range_constexpr(4):
                if (mask >> i) & 1 == 1:
                    position = self.position(row, unit, i)
                    if const_expr(self.by_value):
                        self.enter(shared.entries, at, entry(ordered(values[i]), position))
                    else:
                        self.put(output, place.row, at, position)
                    at += 1
            a += cute.arch.shuffle_sync(through, 31)
        return a, b
