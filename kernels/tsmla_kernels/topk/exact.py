"""ExactSearch: the top-k of any row. Histograms of the keys in one bin narrow the bin down until its keys are few or
equal; a last walk writes the selected columns in the order of positions."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from tsmla_kernels.sm90.warp import running_sum, sum_before
from tsmla_kernels.topk.bins import BinSearch
from tsmla_kernels.topk.cluster import Cluster
from tsmla_kernels.topk.config import UNIT, TopkConfig
from tsmla_kernels.topk.keys import (
    NAN_BIN,
    bin_floor,
    entry,
    joined,
    key_of,
    least_float,
    ordered,
    pair_bins,
    position_of,
)
from tsmla_kernels.topk.memory import Output, Place, Result, Shared, Total, add_one, add_to, bound
from tsmla_kernels.topk.rows import Row, RowWalker
from tsmla_kernels.topk.writer import NOWHERE, Writer

BIN_BITS = 12
EVERYWHERE = (1 << 31) - 1
"""A limit of positions that excludes no position."""


class KeyRange(NamedTuple):
    """Keys from `least` to `greatest`, both included."""

    least: Uint32
    greatest: Uint32


class FloatCounts(NamedTuple):
    """Context of count_floats: the histogram's bins."""

    bins: cute.Tensor


class KeyCounts(NamedTuple):
    """Context of count_keys: the histogram's bins, the range of keys that are counted, and by how many bits a key's
    distance from the least one is shifted right to give its bin."""

    bins: cute.Tensor
    keys: KeyRange
    shift: Int32


class Classes(NamedTuple):
    """Context of classify_unit.

    Attributes:
      keys: the range of the bin's keys. low: the least float of the range. high: the least float above the range.
      few: whether the bin's columns are listed; otherwise only the bounds of their keys are found.
    """

    shared: Shared
    place: Place
    keys: KeyRange
    low: Float32
    high: Float32
    few: Boolean


class Located(NamedTuple):
    """Context of locate: a key, and which of the warp's columns with that key is to be found, counted from 1."""

    shared: Shared
    place: Place
    key: Uint32
    number: Int32


class Selection(NamedTuple):
    """Context of emit, which selects all keys above `key`, and keys equal to `key` at positions up to `limit`.
    low, high: the floats of `key` and of the next greater key."""

    shared: Shared
    place: Place
    output: Output
    key: Uint32
    limit: Int32
    low: Float32
    high: Float32


class Entries(NamedTuple):
    """Context of enter_all: the first CTA's entries."""

    entries: cute.Tensor


class ExactSearch:
    """Device functions that select from any row."""

    def __init__(self, config: TopkConfig, *, cluster: Cluster, bins: BinSearch, writer: Writer) -> None:
        self.config, self.cluster, self.bins, self.writer = config, cluster, bins, writer
        self.rows = RowWalker(config)

    @cute.jit
    def select(
        self, logits: cute.Tensor, first: Int64, length: Int32, stages: cute.Pointer, barriers: cute.Pointer,
        shared: Shared, place: Place, output: Output,
    ):  # fmt: skip
        """Write the top-k of a row: `length` columns from element `first` of the array on. stages: shared memory for
        the row's copies."""
        cute.arch.inline_ptx("cp.async.wait_all;")
        self.cluster.meet()
        cute.arch.fence_view_async_shared()
        self.rows.init_stages(barriers)
        row = self.rows.plan(logits, first, length, stages, barriers)
        self.writer.clear_entries(shared, place)
        self.bins.clear(shared, place)
        self.rows.begin_copies(row)
        self.cluster.meet()  # the entries and bins are empty
        if length <= self.config.k:
            self.rows.walk(row, self.enter_all, Entries(shared.entries), Int32(0), Int32(0), Int32(0))
            self.writer.put_entries(shared, place, output)
        else:
            self.select_some(row, shared, place, output)

    @cute.jit
    def enter_all(
        self, row: Row, context: Entries, unit: Int32, values: cute.Tensor, first: Int32, second: Int32
    ):  # fmt: skip
        """Walk callback: write an entry for every column of a unit that lies in the row."""
        for i in cutlass.range_constexpr(4):
            position = self.rows.position(row, unit, i)
            if position >= 0 and position < row.length:
                self.writer.enter(context.entries, position, entry(ordered(values[i]), position))
        return first, second

    @cute.jit
    def select_some(self, row: Row, shared: Shared, place: Place, output: Output):
        """Write the k greatest of a row of more than k columns."""
        bins = shared.sample.bins
        self.rows.walk(row, self.count_floats, FloatCounts(bins), Int32(0), Int32(0), Int32(0))
        if place.rank == 0 and place.thread == 0:
            # Columns of the units outside of the row were counted as NaN: subtract them.
            add_to(bins, NAN_BIN, row.length - row.units * UNIT)
        cute.arch.sync_threads()
        self.bins.find(shared.sample, shared, place, Int32(self.config.k))
        index = shared.results[Result.BIN]
        least, greatest = bin_floor(index), bin_floor(index + 1) - 1
        copied = self.classify(row, shared, place, KeyRange(least, greatest), row.chunks)
        least, greatest = self.cluster.bounds(shared, place)
        searching = (shared.results[Result.INSIDE] > self.config.listed) & (least < greatest)
        while searching:
            # The bin has more columns than can be ranked, and they are not all equal: count its keys in finer bins.
            shift = cutlass.max(Int32(32 - BIN_BITS) - Int32(cute.arch.clz(greatest - least)), 0)
            needed = shared.results[Result.NEEDED]
            cute.arch.sync_threads()
            self.bins.clear(shared, place)
            counts = KeyCounts(bins, KeyRange(least, greatest), shift)
            self.rows.walk(row, self.count_keys, counts, copied, Int32(0), Int32(0))
            copied += row.chunks
            cute.arch.sync_threads()
            self.bins.find(shared.sample, shared, place, needed)
            least += Uint32(shared.results[Result.BIN]) << Uint32(shift)
            # The last finer bin may reach beyond the keys that were counted.
            greatest = cutlass.min(greatest, least + ((Uint32(1) << Uint32(shift)) - 1))
            copied = self.classify(row, shared, place, KeyRange(least, greatest), copied)
            least, greatest = self.cluster.bounds(shared, place)
            searching = (shared.results[Result.INSIDE] > self.config.listed) & (least < greatest)
        key, limit, offset = least, Int32(EVERYWHERE), Int32(0)
        if shared.results[Result.INSIDE] <= self.config.listed:
            key, limit, offset = self.rank_candidates(shared, place)
        else:
            limit, offset, copied = self.share_equals(row, shared, place, key, copied)
        if const_expr(self.cluster.size > 1 and not self.writer.by_value):
            cute.arch.cluster_arrive()  # from here on this CTA reads no other CTA's shared memory
        if const_expr(self.writer.bits is not None):
            cute.arch.sync_threads()  # the bins have been read
            self.writer.bits.clear(shared, place, output)
            cute.arch.sync_threads()
        selection = Selection(
            shared, place, output, key=key, limit=limit, low=least_float(key), high=least_float(key + 1)
        )
        self.rows.walk(row, self.emit, selection, copied, offset, Int32(0))
        if const_expr(self.writer.by_value):
            self.writer.put_entries(shared, place, output)
        elif const_expr(self.cluster.size > 1):
            cute.arch.cluster_wait()
        elif const_expr(self.writer.bits is not None):
            cute.arch.sync_threads()
            self.writer.bits.put(shared, place, output)

    @cute.jit
    def count_floats(
        self, row: Row, context: FloatCounts, unit: Int32, values: cute.Tensor, first: Int32, second: Int32
    ):
        """Walk callback: count a unit's columns in the bins that pair_bins gives."""
        base = context.bins.iterator.toint()
        for i in cutlass.range_constexpr(2):
            for at in pair_bins(values[2 * i], values[2 * i + 1]):
                add_one(base + at)
        return first, second

    @cute.jit
    def count_keys(
        self, row: Row, context: KeyCounts, unit: Int32, values: cute.Tensor, first: Int32, second: Int32
    ):  # fmt: skip
        """Walk callback: count a unit's keys in the range by their distance from the range's least key."""
        least, greatest = context.keys
        base = context.bins.iterator.toint()
        for i in cutlass.range_constexpr(4):
            key, position = ordered(values[i]), self.rows.position(row, unit, i)
            if key >= least and key <= greatest and position >= 0 and position < row.length:
                add_one(base + (Int32((key - least) >> Uint32(context.shift)) << 2))
        return first, second

    @cute.jit
    def classify(self, row: Row, shared: Shared, place: Place, keys: KeyRange, copied: Int32):
        """Count the columns above and inside the range `keys`. List the columns inside or, if they are many, find the
        bounds of their keys. Then wait for the cluster. Returns `copied` for the warp's next walk."""
        for i in cutlass.range(place.thread, self.config.listed, self.config.threads, unroll=1):
            shared.candidate_ranks[i] = Int32(0)
        few = shared.results[Result.INSIDE] <= self.config.listed
        low, high = least_float(keys.least), least_float(keys.greatest + 1)
        classes = Classes(shared, place, keys, low=low, high=high, few=few)
        above, inside = self.rows.walk(row, self.classify_unit, classes, copied, Int32(0), Int32(0))
        above = cute.arch.warp_redux_sync(above, "add")
        inside = cute.arch.warp_redux_sync(inside, "add")
        if place.lane == 0:
            shared.warp_above[place.warp] = above
            shared.warp_inside[place.warp] = inside
            add_to(shared.totals, Total.ABOVE, above)
            if not few:
                add_to(shared.totals, Total.INSIDE, inside)
        self.cluster.meet()
        return copied + row.chunks

    @cute.jit
    def classify_unit(
        self, row: Row, context: Classes, unit: Int32, values: cute.Tensor, above: Int32, inside: Int32
    ):  # fmt: skip
        """Walk callback of classify: adds to this lane's counts of columns above and inside the range of keys."""
        shared, few = context.shared, context.few
        maybe = Boolean(False)
        for i in cutlass.range_constexpr(4):
            is_above = values[i] >= context.high
            above += Int32(is_above)
            maybe = maybe | ~((values[i] < context.low) | is_above)  # a NaN may be inside
        if cute.arch.vote_any_sync(maybe):
            least, greatest = context.keys
            lowest, highest = Uint32(0xFFFFFFFF), Uint32(0)
            for i in cutlass.range_constexpr(4):
                key, position = ordered(values[i]), self.rows.position(row, unit, i)
                if key >= least and key <= greatest and position >= 0 and position < row.length:
                    inside += 1
                    lowest, highest = cutlass.min(lowest, key), cutlass.max(highest, key)
                    if few:
                        slot = cute.arch.atomic_add(
                            shared.totals.iterator + Total.INSIDE, Int32(1), sem="relaxed", scope="cta"
                        )
                        shared.candidates[slot] = entry(key, position)
                        shared.candidate_warps[slot] = context.place.warp
            if not few:
                lowest = cute.arch.warp_redux_sync(lowest, "umin")
                highest = cute.arch.warp_redux_sync(highest, "umax")
                if context.place.lane == 0:
                    bound(shared.totals, Total.LEAST, "umin", lowest)
                    bound(shared.totals, Total.GREATEST, "umax", highest)
        return above, inside

    @cute.jit
    def rank_candidates(self, shared: Shared, place: Place):
        """Rank the candidates. Returns (the k-th greatest key, the last position at which a key equal to it is
        selected, the index in the row's results of the warp's first result)."""
        count, needed = shared.results[Result.INSIDE], shared.results[Result.NEEDED]
        keys, mine, own, base = shared.candidates, Int32(0), count, Int32(0)
        if const_expr(self.cluster.size > 1):
            keys = shared.cluster_candidates
            counts = self.cluster.totals(shared, place, Total.INSIDE)
            mine, own = sum_before(counts, place.rank, place.lane), cute.arch.shuffle_sync(counts, place.rank)
            base = sum_before(self.cluster.totals(shared, place, Total.ABOVE), place.rank, place.lane)
            offset = Int32(0)
            for rank in cutlass.range_constexpr(self.cluster.size):
                count_of_rank = cute.arch.shuffle_sync(counts, rank)
                if place.thread < count_of_rank:
                    low, high = self.cluster.remote(shared.candidates, place.thread, Int32(rank), 2)
                    keys[offset + place.thread] = joined(low, high)
                offset += count_of_rank
        if place.thread == 0:
            shared.totals[Total.BASE] = base
        cute.arch.sync_threads()
        self.rank_keys(keys, shared.candidate_ranks, count, place)
        cute.arch.sync_threads()
        if place.thread < count:
            rank = shared.candidate_ranks[place.thread]
            if rank < needed:
                at = place.thread - mine
                if at < 0:
                    add_to(shared.totals, Total.BASE, Int32(1))
                elif at < own:
                    add_to(shared.warp_above, shared.candidate_warps[at], Int32(1))
                if rank == needed - 1:
                    last = keys[place.thread]
                    shared.results[Result.KEY] = key_of(last)
                    shared.results[Result.LIMIT] = position_of(last)
        cute.arch.sync_threads()
        chosen = shared.warp_above[cutlass.min(place.lane, self.config.warps - 1)]
        first = shared.totals[Total.BASE] + sum_before(chosen, place.warp, place.lane)
        return Uint32(shared.results[Result.KEY]), shared.results[Result.LIMIT], first

    @cute.jit
    def rank_keys(self, keys: cute.Tensor, ranks: cute.Tensor, count: Int32, place: Place):
        """Add to each key's rank how many keys are greater. A warp compares 32 keys with one part of all keys."""
        batches = (count + 31) >> 5
        parts = Int32(self.config.warps) // batches
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
    def share_equals(self, row: Row, shared: Shared, place: Place, key: Uint32, copied: Int32):
        """Share out the columns of a bin whose columns all have the key `key`. Returns (the last position at which the
        warp selects such a column, the index in the row's results of the warp's first result, `copied` for the warp's
        next walk)."""
        lane, warp = place.lane, place.warp
        needed = shared.results[Result.NEEDED]
        base = sum_before(self.cluster.totals(shared, place, Total.ABOVE), place.rank, lane)
        equals = sum_before(self.cluster.totals(shared, place, Total.INSIDE), place.rank, lane)
        base += cutlass.min(needed, equals)
        needed = cutlass.max(needed - equals, 0)
        slot = cutlass.min(lane, self.config.warps - 1)
        inside = shared.warp_inside[slot]
        taken = cutlass.max(cutlass.min(needed - (running_sum(inside, lane) - inside), inside), 0)
        first = base + sum_before(shared.warp_above[slot] + taken, warp, lane)
        inside, taken = cute.arch.shuffle_sync(inside, warp), cute.arch.shuffle_sync(taken, warp)
        limit = Int32(EVERYWHERE)
        if taken == 0:
            limit = Int32(NOWHERE)
        elif taken < inside:
            self.rows.walk(row, self.locate, Located(shared, place, key, taken), copied, Int32(0), Int32(0))
            copied += row.chunks
            cute.arch.sync_warp()
            limit = shared.candidate_ranks[warp]
        return limit, first, copied

    @cute.jit
    def locate(
        self, row: Row, context: Located, unit: Int32, values: cute.Tensor, seen: Int32, second: Int32
    ):  # fmt: skip
        """Walk callback: the warp has `seen` columns with the key before this unit. If the
        `context.number`-th of the warp's columns with the key is in the unit, store that column's position in the
        warp's word of candidate_ranks."""
        mask = Int32(0)
        for i in cutlass.range_constexpr(4):
            position = self.rows.position(row, unit, i)
            if ordered(values[i]) == context.key and position >= 0 and position < row.length:
                mask |= 1 << i
        through = running_sum(cute.arch.popc(mask), context.place.lane)
        number = seen + through - cute.arch.popc(mask)
        for i in cutlass.range_constexpr(4):
            if (mask >> i) & 1 == 1:
                number += 1
                if number == context.number:
                    context.shared.candidate_ranks[context.place.warp] = self.rows.position(row, unit, i)
        return seen + cute.arch.shuffle_sync(through, 31), second

    @cute.jit
    def emit(
        self, row: Row, context: Selection, unit: Int32, values: cute.Tensor, index: Int32, second: Int32
    ):  # fmt: skip
        """Walk callback: write the selected columns of a unit, from `index` of the row's results on, or set their
        bits."""
        key, limit = context.key, context.limit
        begin = unit * UNIT - row.lead
        floor = context.low
        if begin > limit:
            floor = context.high
        mask = Int32(0)
        for i in cutlass.range_constexpr(4):
            mask |= Int32(values[i] >= floor) << i
        if key == 0 or (begin <= limit and begin + (UNIT - 1) > limit):
            mask = Int32(0)
            for i in cutlass.range_constexpr(4):
                other, position = ordered(values[i]), self.rows.position(row, unit, i)
                if other > key or (other == key and position <= limit):
                    if position >= 0 and position < row.length:
                        mask |= 1 << i
        if const_expr(self.writer.bits is not None):
            self.writer.bits.add(context.shared, self.rows.position(row, unit, 0), mask)
        elif cute.arch.vote_any_sync(mask != 0):
            count = cute.arch.popc(mask)
            through = running_sum(count, context.place.lane)
            at = index + through - count
            for i in cutlass.range_constexpr(4):
                if (mask >> i) & 1 == 1:
                    position = self.rows.position(row, unit, i)
                    if const_expr(self.writer.by_value):
                        self.writer.enter(context.shared.entries, at, entry(ordered(values[i]), position))
                    else:
                        self.writer.put(context.output, context.place.row, at, position)
                    at += 1
            index += cute.arch.shuffle_sync(through, 31)
        return index, second
