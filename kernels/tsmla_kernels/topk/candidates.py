"""Candidates: the columns in the deciding bin, of which some are selected."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from tsmla_kernels.sm90.warp import sum_before
from tsmla_kernels.topk.cluster import Cluster
from tsmla_kernels.topk.config import TopkConfig
from tsmla_kernels.topk.keys import entry, joined, ordered
from tsmla_kernels.topk.memory import Place, Result, Shared, Total, add_to, bound
from tsmla_kernels.topk.span import Span


class BinCounts(NamedTuple):
    """How many of a thread's columns are above the deciding bin, and how many are in it; the least and the greatest key
    of the columns in it."""

    above: Int32
    inside: Int32
    least: Uint32
    greatest: Uint32


class Candidates:
    """Device functions that list candidates and share them out to the CTAs of a cluster."""

    def __init__(self, config: TopkConfig, cluster: Cluster) -> None:
        self.config, self.cluster = config, cluster

    @cute.jit
    def add(self, span: Span, shared: Shared, value: Float32, element: Int32):
        """List a column as a candidate: `value` is its logit, `element` its index from span.address on."""
        slot = cute.arch.atomic_add(shared.totals.iterator + Total.INSIDE, Int32(1), sem="relaxed", scope="cta")
        shared.candidates[slot] = entry(ordered(value), element - span.lead)

    @cute.jit
    def merge(self, shared: Shared, place: Place):
        """Gather the cluster's candidates. Total.BASE becomes the number of columns above the bin in the CTAs before
        this one. The selected candidates of those CTAs are added later; then the CTA's results begin at BASE."""
        counts = self.cluster.totals(shared, place, Total.INSIDE)
        base = sum_before(self.cluster.totals(shared, place, Total.ABOVE), place.rank, place.lane)
        if place.thread == 0:
            shared.totals[Total.BASE] = base
        offset = Int32(0)
        for rank in cutlass.range(self.cluster.size, unroll=1):
            count = cute.arch.shuffle_sync(counts, rank)
            if place.thread < count:
                low, high = self.cluster.remote(shared.candidates, place.thread, rank, 2)
                shared.cluster_candidates[offset + place.thread] = joined(low, high)
            offset += count
        cute.arch.sync_threads()

    @cute.jit
    def total_above(self, shared: Shared, place: Place, above: Int32):
        """Add `above`, the number of the thread's columns above the bin, to the CTA's total. Only clusters of several
        CTAs need this total."""
        if const_expr(self.config.cluster > 1):
            above = cute.arch.warp_redux_sync(above, "add")
            if place.lane == 0:
                add_to(shared.totals, Total.ABOVE, above)

    @cute.jit
    def share_equals(self, shared: Shared, place: Place, counts: BinCounts):
        """Returns whether all of the cluster's columns in the bin are equal and the k-th greatest is one of them. For
        that case also stores how many columns in the bin this CTA can select at most (Result.NEEDED), and where the
        CTA's results begin (Total.BASE)."""
        for word, count in ((Total.ABOVE, counts.above), (Total.INSIDE, counts.inside)):
            count = cute.arch.warp_redux_sync(count, "add")
            if place.lane == 0:
                add_to(shared.totals, word, count)
        for word, kind, key in ((Total.LEAST, "umin", counts.least), (Total.GREATEST, "umax", counts.greatest)):
            key = cute.arch.warp_redux_sync(key, kind)
            if place.lane == 0:
                bound(shared.totals, word, kind, key)
        self.cluster.meet()
        above, equals = (self.cluster.totals(shared, place, word) for word in (Total.ABOVE, Total.INSIDE))
        cluster = Int32(self.config.cluster)
        needed = Int32(self.config.k) - sum_before(above, cluster, place.lane)
        enough = (needed > 0) & (needed <= sum_before(equals, cluster, place.lane))
        least, greatest = self.cluster.bounds(shared, place)
        base, earlier = sum_before(above, place.rank, place.lane), sum_before(equals, place.rank, place.lane)
        if place.thread == 0:
            shared.totals[Total.BASE] = base + cutlass.min(earlier, needed)
            shared.results[Result.NEEDED] = cutlass.max(needed - earlier, 0)
        return enough & (least == greatest)
