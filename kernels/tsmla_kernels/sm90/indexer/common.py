"""What all ways of select_topk share: words of shared memory, a cluster's meeting, and the search of a histogram."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64, const_expr

from tsmla_kernels.sm90.indexer.config import BINS, TopkConfig
from tsmla_kernels.sm90.indexer.rows import global_column
from tsmla_kernels.sm90.warp import quotient

GROUPS = 32  # of bins, whose sums are searched first
GROUP_BINS = BINS // GROUPS
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


class Histogram(NamedTuple):
    """Counts of the bins, and the sums of their groups."""

    bins: cute.Tensor
    groups: cute.Tensor


class Shared(NamedTuple):
    """A CTA's shared memory but for the row: see storage_of in topk.py."""

    held: cute.Tensor
    marks: cute.Tensor
    kept: cute.Tensor
    sample: Histogram
    counts: Histogram
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


class Arrays(NamedTuple):
    """The arrays of a launch, of cute.Tensor; those that may be Any are None where the config has no use for one."""

    logits: cute.Tensor
    seq_lens: cute.Tensor
    row_starts: Any
    block_tables: Any
    row_requests: Any
    indices: cute.Tensor
    counts: Any
    scores: Any


class Output(NamedTuple):
    """Where a row's results go, and what they are made of.

    Attributes:
      indices, block_tables, scores: the launch's arrays.
      table: the row's of the block tables.
      address: of the row's first logit.
    """

    indices: cute.Tensor
    block_tables: cute.Tensor | None
    scores: cute.Tensor | None
    table: Int32
    address: Int64


class ClusterSearch:
    """Device functions of a CTA in its cluster. `config` is the kernel's."""

    config: TopkConfig
    cluster: int
    warps: int

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
    def find(self, histogram: cutlass.Constexpr, shared: cutlass.Constexpr, place: cutlass.Constexpr, needed: Int32):
        """The bin that holds the cluster's key number `needed`, counted from the greatest, into Found. All threads."""
        lane = place.lane
        groups = GROUPS // self.warps
        for i in cutlass.range_constexpr(groups):
            group = place.warp * groups + i
            counts = self.four(histogram.bins.iterator + (group * GROUP_BINS + lane * 4))
            total = cute.arch.warp_redux_sync(counts[0] + counts[1] + counts[2] + counts[3], "add")
            if lane == 0:
                histogram.groups[group] = total
        self.meet()
        if place.warp == 0:
            # Lanes descend as the keys do.
            count = Int32(0)
            for rank in cutlass.range_constexpr(self.cluster):
                count += self.remote(histogram.groups, 31 - lane, Int32(rank))[0]
            before, first = self.lane_of(count, needed, lane)
            needed -= before
            at = (31 - first) * GROUP_BINS + (31 - lane) * 4
            sums = cute.make_rmem_tensor((4,), Int32)
            sums.fill(0)
            for rank in cutlass.range_constexpr(self.cluster):
                of_rank = self.remote(histogram.bins, at, Int32(rank), 4)
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
    def of_clusters(self, shared: cutlass.Constexpr, place: cutlass.Constexpr, word: cutlass.Constexpr):
        """A word of every CTA's totals, one a lane; the last CTA's in the lanes behind."""
        return self.remote(shared.totals, Int32(word), cutlass.min(place.lane, self.cluster - 1))[0]

    @cute.jit
    def bounds(self, shared: cutlass.Constexpr, place: cutlass.Constexpr):
        """The least and the greatest key that the cluster has in the bin."""
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
    def put(self, output: cutlass.Constexpr, row: Int32, index: Int32, position: Int32):
        """Write a selected position, or its slot, NOWHERE for one behind the block table; and its score."""
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
        """Write that no position is selected."""
        self.write(output, row, index, Int32(NOWHERE), Float32(-float("inf")))

    def write(self, output: Output, row: Int32, index: Int32, value: Int32, score: Float32 | None) -> None:
        """Write one of the indices, and its score where scores are written."""
        at = Int64(row) * self.config.k + Int64(index)
        cute.make_tensor(output.indices.iterator + at, cute.make_layout(1))[0] = value
        if output.scores is not None:
            cute.make_tensor(output.scores.iterator + at, cute.make_layout(1))[0] = score


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
