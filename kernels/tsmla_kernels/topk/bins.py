"""The search of a histogram for the bin that holds the cluster's n-th greatest key."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tsmla_kernels.sm90.warp import running_sum
from tsmla_kernels.topk.cluster import Cluster
from tsmla_kernels.topk.config import BINS, TopkConfig
from tsmla_kernels.topk.memory import GROUP_BINS, GROUPS, Histogram, Place, Result, Shared, Total


class BinSearch:
    """Device functions that clear and search histograms."""

    def __init__(self, config: TopkConfig, cluster: Cluster) -> None:
        self.config, self.cluster = config, cluster

    @cute.jit
    def clear(self, shared: Shared, place: Place):
        """Set the bins of the sample to 0, and wait until all threads of the CTA have done so."""
        for i in cutlass.range(place.thread, BINS, self.config.threads, unroll=1):
            shared.sample.bins[i] = Int32(0)
        cute.arch.sync_threads()

    @cute.jit
    def find(self, histogram: Histogram, shared: Shared, place: Place, needed: Int32):
        """Find the bin that holds the cluster's `needed`-th greatest key: write BIN, NEEDED and INSIDE of
        shared.results. Reset all words of shared.totals but BASE. All threads call this function."""
        lane = place.lane
        groups = GROUPS // self.config.warps
        for i in cutlass.range_constexpr(groups):
            group = place.warp * groups + i
            counts = four_words(histogram.bins.iterator + (group * GROUP_BINS + lane * 4))
            total = cute.arch.warp_redux_sync(counts[0] + counts[1] + counts[2] + counts[3], "add")
            if lane == 0:
                histogram.groups[group] = total
        self.cluster.meet()
        if place.warp == 0:
            # Lane 0 takes the group of the greatest keys, lane 31 that of the least.
            count = Int32(0)
            for rank in cutlass.range_constexpr(self.cluster.size):
                count += self.cluster.remote(histogram.groups, 31 - lane, Int32(rank))[0]
            before, first = first_lane_with(count, needed, lane)
            needed -= before
            at = (31 - first) * GROUP_BINS + (31 - lane) * 4
            sums = cute.make_rmem_tensor((4,), Int32)
            sums.fill(0)
            for rank in cutlass.range_constexpr(self.cluster.size):
                counts_of_rank = self.cluster.remote(histogram.bins, at, Int32(rank), 4)
                for i in cutlass.range_constexpr(4):
                    sums[i] += counts_of_rank[i]
            before, first = first_lane_with(sums[0] + sums[1] + sums[2] + sums[3], needed, lane)
            needed -= before
            if lane == first:
                index, inside, passed = Int32(0), sums[0], sums[1] + sums[2] + sums[3]
                for i in cutlass.range_constexpr(3):
                    # Find which of the lane's four bins holds its `needed`-th greatest key.
                    above = sum([sums[j] for j in range(4 - i, 4)], Int32(0))
                    if above < needed and above + sums[3 - i] >= needed:
                        index, inside, passed = Int32(3 - i), sums[3 - i], above
                shared.results[Result.BIN] = at + index
                shared.results[Result.NEEDED] = needed - passed
                shared.results[Result.INSIDE] = inside
        elif place.warp == 1:
            if lane == 0:
                shared.totals[Total.ABOVE] = Int32(0)
                shared.totals[Total.INSIDE] = Int32(0)
                shared.totals[Total.LEAST] = Int32(-1)
                shared.totals[Total.GREATEST] = Int32(0)
        cute.arch.sync_threads()


@cute.jit
def first_lane_with(count: Int32, needed: Int32, lane: Int32):
    """Find the first lane up to which the counts add up to `needed` or more. Returns (the sum of the counts before that
    lane, the lane)."""
    through = running_sum(count, lane)
    first = cute.arch.popc(cute.arch.vote_ballot_sync(through < needed))
    return cute.arch.shuffle_sync(through - count, first), first


def four_words(at: cute.Pointer) -> cute.Tensor:
    """Load four words of shared memory into registers."""
    values = cute.make_rmem_tensor((4,), Int32)
    cute.autovec_copy(cute.make_tensor(at.align(16), cute.make_layout(4)), values)
    return values
