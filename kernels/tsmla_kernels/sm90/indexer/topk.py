"""select_topk in one launch: the exact top-k of float32 rows, ties by position. DESIGN.md beside this says why it looks
as it does.

A row is shared out to the warps of a cluster. They count its columns in a histogram, look up the bin in which the k-th
largest lies, and put that bin's keys in order: by ranking them among each other, where they are few, else by further
histograms of them alone, until they are few or equal. What is above that key, and the first of its equals, are then
written in the order of their positions.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Boolean, Int32, Int64, Uint32, Uint64, const_expr

from tsmla_kernels.sm90.indexer.config import BINS, UNIT, TopkConfig
from tsmla_kernels.sm90.indexer.rows import NAN_BIN, RowWalker, bin_floor, least_float, ordered, pair_bins
from tsmla_kernels.sm90.warp import quotient, remainder

GROUPS = 32  # of bins, whose sums are searched first
GROUP_BINS = BINS // GROUPS
BIN_BITS = 12
EVERYWHERE = (1 << 31) - 1  # the limit of positions where there is none
NOWHERE = -1  # an index that names no position


class Found(enum.IntEnum):
    """Words that one thread of a CTA finds for all of them.

    BIN: the bin that holds the k-th largest key. NEEDED: keys of that bin that are selected. INSIDE: keys in it.
    KEY: the ordered number of the k-th largest. LIMIT: the last position at which an equal of it is selected.
    """

    BIN = 0
    NEEDED = 1
    INSIDE = 2
    KEY = 3
    LIMIT = 4


class Total(enum.IntEnum):
    """Words of a CTA that the cluster reads, of the columns of the CTA.

    ABOVE: those above the bin's keys. INSIDE: those that have one of them. LEAST, GREATEST: the bounds of these.
    BASE: selected columns of the CTAs before, which only the CTA itself reads.
    """

    ABOVE = 0
    INSIDE = 1
    LEAST = 2
    GREATEST = 3
    BASE = 4


class Shared(NamedTuple):
    """A CTA's shared memory but for the row: see Storage."""

    bins: cute.Tensor
    groups: cute.Tensor
    found: cute.Tensor
    totals: cute.Tensor
    above: cute.Tensor
    inside: cute.Tensor
    listed: cute.Tensor
    owners: cute.Tensor
    merged: cute.Tensor
    ranks: cute.Tensor
    entries: cute.Tensor


class Place(NamedTuple):
    """Where a thread is: row, CTA of the cluster, warp, lane, thread of the CTA."""

    row: Int32
    rank: Int32
    warp: Int32
    lane: Int32
    thread: Int32


class Output(NamedTuple):
    """What is written, and the block table that it goes through, or None."""

    indices: cute.Tensor
    block_tables: cute.Tensor | None


class SelectTopk(RowWalker):
    """select_topk: `config` is static, rows and columns are dynamic.

    Operands of the launcher: logits [T, N] f32, seq_lens [T] i32, row_starts [T] i32 (with config.row_starts),
    block_tables [T, M] i32 (with config.page_size), indices [T, k] i32, counts [T] i32 (with config.page_size).
    """

    def __init__(self, config: TopkConfig) -> None:
        self.config = config
        self.cluster, self.warps = config.cluster, config.warps
        self.by_value = config.order == "value"

    @cute.jit
    def __call__(self, stream: cuda.CUstream, logits: cute.Tensor, seq_lens: cute.Tensor, *others: cute.Tensor):
        config = self.config
        ring_columns = config.warps * config.stages * config.stage_units * UNIT

        @cute.struct
        class Storage:
            """bins, groups: the histogram and the sums of its groups. above, inside: a warp's columns above the bin
            and in it. listed, owners: the CTA's keys of the bin and their warps. merged, ranks: the cluster's keys of
            the bin and how many of these are greater. entries: the selected keys to be sorted."""

            barriers: cute.struct.MemRange[Int64, config.warps * config.stages]
            ring: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, ring_columns], 128]
            bins: cute.struct.Align[cute.struct.MemRange[Int32, BINS], 16]
            listed: cute.struct.Align[cute.struct.MemRange[Uint64, config.listed], 16]
            merged: cute.struct.Align[cute.struct.MemRange[Uint64, config.listed], 16]
            entries: cute.struct.Align[cute.struct.MemRange[Uint64, config.sorted_entries], 16]
            owners: cute.struct.MemRange[Int32, config.listed]
            ranks: cute.struct.MemRange[Int32, config.listed]
            groups: cute.struct.MemRange[Int32, GROUPS]
            above: cute.struct.MemRange[Int32, config.warps]
            inside: cute.struct.MemRange[Int32, config.warps]
            found: cute.struct.MemRange[Int32, len(Found)]
            totals: cute.struct.MemRange[Int32, len(Total)]

        self.storage = Storage
        others = list(others)
        row_starts = others.pop(0) if const_expr(config.row_starts) else None
        block_tables = others.pop(0) if const_expr(config.page_size > 0) else None
        indices = others.pop(0)
        counts = others.pop(0) if const_expr(config.page_size > 0) else None
        self.select(logits, seq_lens, row_starts, block_tables, indices, counts).launch(
            grid=[indices.shape[0] * self.cluster, 1, 1],
            block=[self.config.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def select(
        self,
        logits: cute.Tensor,
        seq_lens: cute.Tensor,
        row_starts: cute.Tensor | None,
        block_tables: cute.Tensor | None,
        indices: cute.Tensor,
        counts: cute.Tensor | None,
    ):
        config = self.config
        storage = utils.SmemAllocator().allocate(self.storage)
        shared = self.shared_tensors(storage)
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        place = Place(quotient(block, self.cluster), remainder(block, self.cluster), warp, thread & 31, thread)
        columns = Int32(logits.shape[1])
        ring, barriers = storage.ring.data_ptr(), storage.barriers.data_ptr()
        begin = Int64(place.row) * Int64(columns)

        self.init_stages(barriers)
        length = seq_lens[place.row]
        if const_expr(config.row_starts):
            start = cutlass.min(cutlass.max(row_starts[place.row], 0), columns)
            begin += Int64(start)
            columns -= start
        copied = columns
        if const_expr(config.eager):
            # Not where most of the copies would be in vain.
            if columns > config.row_columns:
                copied = cutlass.min(cutlass.max(length, 0), columns)
        else:
            copied = cutlass.min(cutlass.max(length, 0), columns)
        whole = self.plan(logits, begin, copied, ring, barriers)
        self.begin_copies(whole)
        self.clear(shared, place)
        length = cutlass.min(cutlass.max(length, 0), columns)
        row = self.shortened(whole, length)
        cute.arch.sync_threads()

        output = Output(indices, block_tables)
        if const_expr(config.page_size > 0):
            if place.rank == 0 and thread == 0:
                counts[place.row] = cutlass.min(length, config.k)
        if length > config.k:
            self.select_some(row, shared, place, output)
        else:
            self.select_all(row, shared, place, output)

    @cute.jit
    def shared_tensors(self, storage: cutlass.Constexpr):
        """The parts of shared memory as tensors."""
        listed = cute.make_layout(self.config.listed)
        warps = cute.make_layout(self.warps)
        return Shared(
            bins=storage.bins.get_tensor(cute.make_layout(BINS)),
            groups=storage.groups.get_tensor(cute.make_layout(GROUPS)),
            found=storage.found.get_tensor(cute.make_layout(len(Found))),
            totals=storage.totals.get_tensor(cute.make_layout(len(Total))),
            above=storage.above.get_tensor(warps),
            inside=storage.inside.get_tensor(warps),
            listed=storage.listed.get_tensor(listed),
            owners=storage.owners.get_tensor(listed),
            merged=storage.merged.get_tensor(listed),
            ranks=storage.ranks.get_tensor(listed),
            entries=storage.entries.get_tensor(cute.make_layout(self.config.sorted_entries)),
        )

    @cute.jit
    def clear(self, shared: cutlass.Constexpr, place: cutlass.Constexpr):
        """Empty bins, and entries below every key."""
        zeros = cute.make_rmem_tensor((4,), Int32)
        zeros.fill(0)
        for i in cutlass.range(place.thread, BINS // 4, self.config.threads, unroll=1):
            at = (shared.bins.iterator + i * 4).align(16)
            cute.autovec_copy(zeros, cute.make_tensor(at, cute.make_layout(4)))
        if const_expr(self.by_value):
            for i in cutlass.range(place.thread, self.config.sorted_entries, self.config.threads, unroll=1):
                shared.entries[i] = Uint64(0)

    @cute.jit
    def meet(self):
        """All threads of the cluster, and what each wrote into shared memory is seen by all."""
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def remote(self, tensor: cute.Tensor, index: Int32, rank: Int32, count: int = 1):
        """Neighbouring words from `index` on of what is `tensor` in a CTA of the cluster, whose elements have a word or
        two."""
        address = tensor.iterator.toint() + index * (tensor.element_type.width // 8)
        if const_expr(self.cluster == 1):
            pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4 * count)
            values = cute.make_rmem_tensor((count,), Int32)
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count)), values)
            return [values[i] for i in range(count)]
        names = ", ".join(f"{{$w{i}}}" for i in range(count))
        vector, target = (f".v{count}", f"{{ {names} }}") if count > 1 else ("", names)
        found = cute.arch.inline_ptx(
            "{ .reg .b32 a; mapa.shared::cluster.u32 a, {$r0}, {$r1};"
            f" ld.shared::cluster{vector}.u32 {target}, [a]; }}",
            write_only_types=[Int32] * count,
            read_only_args=[address, rank],
        )
        return list(found) if count > 1 else [found]

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

    # ---- rows of at most k columns

    @cute.jit
    def select_all(
        self, row: cutlass.Constexpr, shared: cutlass.Constexpr, place: cutlass.Constexpr, output: cutlass.Constexpr
    ):
        """Every column of the row is selected."""
        if const_expr(self.by_value):
            self.meet()  # the entries are cleared
            self.walk(row, self.enter_all, (shared.entries,), Int32(0), Int32(0), Int32(0))
            self.sort_entries(shared, place, output)
        else:
            self.await_copies(row)
            step = self.cluster * self.config.threads
            first = place.rank * self.config.threads + place.thread
            for i in cutlass.range(first, self.config.k, step, unroll=1):
                if i < row.length:
                    self.put(output, place.row, i, i)
                else:
                    self.write(output, place.row, i, Int32(NOWHERE))

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

    # ---- rows of more than k columns

    @cute.jit
    def select_some(
        self, row: cutlass.Constexpr, shared: cutlass.Constexpr, place: cutlass.Constexpr, output: cutlass.Constexpr
    ):
        """The k largest of a row of more."""
        bins = shared.bins
        self.walk(row, self.count_floats, (bins,), Int32(0), Int32(0), Int32(0))
        if place.rank == 0 and place.thread == 0:
            # The columns that are none of the row's count as NaN.
            add_to(bins, NAN_BIN, row.length - row.units * UNIT)
        cute.arch.sync_threads()
        self.find(shared, place, Int32(self.config.k))
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
            self.find(shared, place, needed)
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
            shared.bins[i] = Int32(0)
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
    def find(self, shared: cutlass.Constexpr, place: cutlass.Constexpr, needed: Int32):
        """The bin that holds the cluster's key number `needed`, counted from the greatest, into Found. All threads."""
        lane = place.lane
        groups = GROUPS // self.warps
        for i in cutlass.range_constexpr(groups):
            group = place.warp * groups + i
            counts = self.four(shared.bins.iterator + (group * GROUP_BINS + lane * 4))
            total = cute.arch.warp_redux_sync(counts[0] + counts[1] + counts[2] + counts[3], "add")
            if lane == 0:
                shared.groups[group] = total
        self.meet()
        if place.warp == 0:
            # Lanes descend as the keys do.
            count = Int32(0)
            for rank in cutlass.range_constexpr(self.cluster):
                count += self.remote(shared.groups, 31 - lane, Int32(rank))[0]
            before, first = self.lane_of(count, needed, lane)
            needed -= before
            at = (31 - first) * GROUP_BINS + (31 - lane) * 4
            sums = cute.make_rmem_tensor((4,), Int32)
            sums.fill(0)
            for rank in cutlass.range_constexpr(self.cluster):
                of_rank = self.remote(shared.bins, at, Int32(rank), 4)
                for i in cutlass.range_constexpr(4):
                    sums[i] += of_rank[i]
            before, first = self.lane_of(sums[0] + sums[1] + sums[2] + sums[3], needed, lane)
            needed -= before
            if lane == first:
                index, inside, passed = Int32(0), sums[0], sums[1] + sums[2] + sums[3]
                for i in cutlass.range_constexpr(3):
                    # From the greatest bin on: the first with which there are enough.
                    above = sum([sums[j] for j in range(4 - i, 4)], Int32(0))
                    if above < needed and above + sums[3 - i] >= needed:
                        index, inside, passed = Int32(3 - i), sums[3 - i], above
                shared.found[Found.BIN] = at + index
                shared.found[Found.NEEDED] = needed - passed
                shared.found[Found.INSIDE] = inside
        elif place.warp == 1:
            if lane == 0:
                shared.totals[Total.ABOVE] = Int32(0)
                shared.totals[Total.INSIDE] = Int32(0)
                shared.totals[Total.LEAST] = Int32(-1)
                shared.totals[Total.GREATEST] = Int32(0)
        cute.arch.sync_threads()

    @cute.jit
    def lane_of(self, count: Int32, needed: Int32, lane: Int32):
        """(counts of the lanes before it, lane) of the first lane with which there are `needed`."""
        through = self.running(count, lane)
        first = cute.arch.popc(cute.arch.vote_ballot_sync(through < needed))
        return cute.arch.shuffle_sync(through - count, first), first

    @cute.jit
    def running(self, count: Int32, lane: Int32):
        """The sum of the counts of a lane and those before it."""
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(count, offset=1 << step, mask_and_clamp=0)
            if lane >= 1 << step:
                count += other
        return count

    def four(self, at):
        """Four words of shared memory."""
        values = cute.make_rmem_tensor((4,), Int32)
        cute.autovec_copy(cute.make_tensor(at.align(16), cute.make_layout(4)), values)
        return values

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
    def of_clusters(self, shared: cutlass.Constexpr, place: cutlass.Constexpr, word: cutlass.Constexpr):
        """A word of every CTA's totals, one a lane; the last CTA's in the lanes behind."""
        return self.remote(shared.totals, Int32(word), cutlass.min(place.lane, self.cluster - 1))[0]

    @cute.jit
    def bounds(self, shared: cutlass.Constexpr, place: cutlass.Constexpr):
        """The least and the greatest key that the cluster has in the bin, where these are not listed."""
        least = Uint32(self.of_clusters(shared, place, Total.LEAST))
        greatest = Uint32(self.of_clusters(shared, place, Total.GREATEST))
        return cute.arch.warp_redux_sync(least, "umin"), cute.arch.warp_redux_sync(greatest, "umax")

    @cute.jit
    def before(self, counts: Int32, index: Int32, lane: Int32):
        """The sum of the counts of the lanes before `index`."""
        if lane >= index:
            counts = Int32(0)
        return cute.arch.warp_redux_sync(counts, "add")

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

    @cute.jit
    def put(self, output: cutlass.Constexpr, row: Int32, index: Int32, position: Int32):
        """Write a selected position, or its slot; NOWHERE for one behind the block table."""
        value = position
        if const_expr(self.config.page_size > 0):
            size = self.config.page_size
            page = quotient(position, size) if const_expr(size & (size - 1) == 0) else position // size
            width = output.block_tables.shape[1]
            value = Int32(NOWHERE)
            if page < width:
                at = output.block_tables.iterator + (Int64(row) * Int64(width) + Int64(page))
                value = cute.make_tensor(at, cute.make_layout(1))[0] * size + (position - page * size)
        self.write(output, row, index, value)

    def write(self, output: Output, row: Int32, index: Int32, value: Int32) -> None:
        """Write one of the indices."""
        at = output.indices.iterator + (Int64(row) * self.config.k + Int64(index))
        cute.make_tensor(at, cute.make_layout(1))[0] = value

    @cute.jit
    def sort_entries(self, shared: cutlass.Constexpr, place: cutlass.Constexpr, output: cutlass.Constexpr):
        """Write the entries in descending order, by a bitonic sort in the first CTA."""
        self.meet()
        if place.rank == 0:
            entries, places = shared.entries, self.config.sorted_entries
            size, earlier = Int32(2), Int32(places)
            while size <= places:
                stride = size >> 1
                while stride > 0:
                    # 32 neighbouring pairs are a warp's own 64 entries while they are at most 32 apart.
                    if cutlass.max(stride, earlier) > 32:
                        cute.arch.sync_threads()
                    else:
                        cute.arch.sync_warp()
                    for pair in cutlass.range(place.thread, places // 2, self.config.threads, unroll=1):
                        i = 2 * pair - (pair & (stride - 1))
                        one, other = entries[i], entries[i + stride]
                        if (one < other) == ((i & size) == 0):
                            entries[i], entries[i + stride] = other, one
                    earlier = stride
                    stride = stride >> 1
                size = size << 1
            cute.arch.sync_threads()
            for i in cutlass.range(place.thread, self.config.k, self.config.threads, unroll=1):
                if entries[i] > Uint64(0):
                    self.put(output, place.row, i, position_of(entries[i]))
                else:
                    self.write(output, place.row, i, Int32(NOWHERE))


def entry(key: Uint32, position: Int32) -> Uint64:
    """Greater for a greater key and, of equal ones, for the lower position."""
    return (Uint64(key) << Uint64(32)) | Uint64(Uint32(~position))


def position_of(value: Uint64) -> Int32:
    """The position in an entry."""
    return ~Int32(Uint32(value & Uint64(0xFFFFFFFF)))


def add_one(address: Int32) -> None:
    """Add 1 to a word of shared memory."""
    cute.arch.inline_ptx("red.relaxed.cta.shared::cta.add.u32 [{$r0}], 1;", read_only_args=[address])


def add_to(words: cute.Tensor, index: Int32, value: Int32) -> None:
    """Add to a word of the CTA's shared memory."""
    cute.arch.red(words.iterator + index, value, op="add", dtype="s32", sem="relaxed", scope="cta")


def bound(words: cute.Tensor, index: Int32, kind: str, value: Uint32) -> None:
    """Lower or raise a word of the CTA's shared memory to a value."""
    cute.arch.red(words.iterator + index, value, op=kind, dtype="u32", sem="relaxed", scope="cta")
