"""The second, small kernel: it merges the results of several CTAs for the same rows."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.constants import LN_2, LOG2_E, LOWEST
from tsmla_kernels.sm90.latent.memory import Busy, CombineBarrier, SplitEntry
from tsmla_kernels.sm90.latent.shape import ROWS, LatentShape
from tsmla_kernels.sm90.latent.softmax import share_beside_sink
from tsmla_kernels.sm90.warp import DTYPES, divide, element, kept, quotient, remainder, transpose_quad

SPARE_BYTES = 100 << 10
GROUP_THREADS = 256  # threads that merge a slice of a row tile together
GROUPS = 2  # thread groups of a CTA
COMBINE_THREADS = GROUP_THREADS * GROUPS
PIECES_AT_ONCE = {32: 2, 16: 8}  # pieces that a thread loads at once, by the bits of partial_out's elements
# How many threads share an octet if batch_invariant: the order of additions must not depend on the batch.
INVARIANT_SHARERS = 4


class WarpSums(NamedTuple):
    """Shared memory in which warps add up their sums: [columns or octets, warp]."""

    acc: cute.Tensor
    highest: cute.Tensor
    weight: cute.Tensor


class Optional(NamedTuple):
    """Operands that a call may lack: sinks [H]; token_lengths [T]; max_logits [N], where the greatest logits go."""

    sinks: cute.Tensor | None = None
    token_lengths: cute.Tensor | None = None
    max_logits: cute.Tensor | None = None


class Merge(NamedTuple):
    """Operands and shared memory of a thread group.

    Attributes:
      partial_out, partial_lse, out, lse, optional: operands.
      sums: scratch in shared memory.
      entry: the row tile's SplitEntry, in registers. group: the index of this thread group in the CTA.
    """

    partial_out: cute.Tensor
    partial_lse: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    sums: WarpSums
    entry: cute.Tensor
    group: Int32
    optional: Optional


class Slice(NamedTuple):
    """A thread group's part of a row tile. The row tile is cut into `slices` slices. Slices [index, index + taken) are
    cut into `members` equal parts, of which the group merges the part with index `member`."""

    index: Int32
    slices: Int32
    taken: Int32
    member: Int32
    members: Int32


class Octets(NamedTuple):
    """The octets [begin, begin + size). An octet has 8 columns of a row; octets are counted from row `first_row` of a
    row tile."""

    first_row: Int32
    begin: Int32
    size: Int32


class Team(NamedTuple):
    """The threads that share an octet: this thread's index in its group, its index among the sharers, and how many
    sharers there are."""

    thread: Int32
    member: Int32
    sharers: Int32


class Merged(NamedTuple):
    """A thread's octets: weighted sums, sums of the weights, greatest log weights, rows and columns."""

    acc: cute.Tensor
    weight: cute.Tensor
    highest: cute.Tensor
    rows: cute.Tensor
    columns: cute.Tensor


class Loaded(NamedTuple):
    """A thread's loads of several pieces: for each piece and octet eight columns, a log weight and a scale."""

    lines: cute.Tensor
    weights: cute.Tensor
    scales: cute.Tensor


@cute.jit
def partial_row(slot: Int32, row: Int32, shape: LatentShape):
    """The index of row `row` of slot `slot` among the rows of all slots of partial_out. With shape.partial_numbers
    times the slot's index, the result is an index into partial_lse. It has 64 bits if batch_invariant, because there
    are many slots then."""
    if const_expr(shape.batch_invariant):
        slot = Int64(slot)
    return slot * shape.tile_rows + row


class Combine:
    """The combine kernel.

    Attributes:
      sinks: whether heads have sinks.
      latent: L. out_dtype, partial_dtype: the dtypes of out and of partial_out.
      batch_invariant, cluster, tile_rows, partial_is_lane_order: as in LatentShape.
    """

    def __init__(self, shape: LatentShape, sinks: bool = False) -> None:
        self.shape, self.sinks = shape, sinks
        self.batch_invariant, self.cluster = shape.batch_invariant, shape.cluster
        self.tile_rows, self.latent = shape.tile_rows, shape.latent_dim
        self.out_dtype, self.partial_dtype = DTYPES[shape.out_dtype], DTYPES[shape.partial_dtype]
        self.partial_is_lane_order = shape.partial_is_lane_order

    @cute.kernel
    def merge_pieces(
        self,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        split_info: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        num_clusters: Int32,
        optional: Optional,
    ):
        """Merge the pieces of every row tile that was cut.

        Each cluster of `attend` described its pieces in split_info. Here the CTAs with the indices of that
        cluster's CTAs merge slices of these pieces' row tiles, so neither a search nor a schedule is needed. If
        batch_invariant, a thread group merges a row tile, or a slice of one if there are at least twice as many groups
        as tiles.

        If there are token_lengths, a row tile is left out if its first row's token has a length that is not negative.
        """
        # Allow the next call's `attend` to launch. Its CTAs need a whole multiprocessor each, so they start only as the
        # CTAs of this kernel end.
        cute.arch.griddepcontrol_launch_dependents()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()

        warps = COMBINE_THREADS // 32

        @cute.struct
        class Storage:
            acc: cute.struct.Align[cute.struct.MemRange[Float32, 64 * warps], 16]
            highest: cute.struct.MemRange[Float32, 8 * warps]
            weight: cute.struct.MemRange[Float32, 8 * warps]
            # The spare bytes make the multiprocessor keep the split between L1 cache and shared memory that `attend`
            # needs: changing that split takes 2 us.
            spare: cute.struct.MemRange[Int32, SPARE_BYTES // 4]

        storage = utils.SmemAllocator().allocate(Storage)
        sums = WarpSums(
            storage.acc.get_tensor(cute.make_layout((64, warps), stride=(1, 64))),
            storage.highest.get_tensor(cute.make_layout((8, warps), stride=(1, 8))),
            storage.weight.get_tensor(cute.make_layout((8, warps), stride=(1, 8))),
        )
        tidx, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tidx // GROUP_THREADS)
        entry = cute.make_rmem_tensor((len(SplitEntry),), Int32)
        merge = Merge(
            partial_out=partial_out, partial_lse=partial_lse, out=out, lse=lse, sums=sums, entry=entry, group=group,
            optional=optional,
        )  # fmt: skip
        cute.arch.griddepcontrol_wait()
        if const_expr(self.batch_invariant):
            groups = ctas * GROUPS
            row_tiles = split_info.shape[0] - num_clusters
            slices = cutlass.max(groups // row_tiles, 1)
            first_item = cta * GROUPS + group
            for work_item in cutlass.range(first_item, row_tiles * slices, groups, unroll=1):
                cute.autovec_copy(split_info[num_clusters + work_item // slices, None], entry)
                part = Slice(work_item % slices, slices, 1, Int32(0), 1)
                self.merge(merge, Int32(0), entry[SplitEntry.ROWS], part)
        else:
            cluster_index, rank = quotient(cta, self.cluster), remainder(cta, self.cluster)
            # A cluster makes up to two pieces of row tiles that were cut. If it made two, each thread group merges a
            # part of one of these tiles; if it made one, both groups share the work.
            start_entry = cute.make_rmem_tensor((len(SplitEntry),), Int32)
            slot = 2 * cluster_index
            next_slot = slot + 1
            cute.autovec_copy(split_info[slot, None], entry)
            cute.autovec_copy(split_info[next_slot, None], start_entry)
            position = cluster_index - quotient(entry[SplitEntry.SLOT], 2)
            if (entry[SplitEntry.PIECES] == 0) or (start_entry[SplitEntry.PIECES] > 0 and group == 1):
                position = Int32(0)
            member, members = Int32(0), Int32(1)
            if entry[SplitEntry.PIECES] == 0 or start_entry[SplitEntry.PIECES] == 0:
                member, members = group, Int32(2)
            if (entry[SplitEntry.PIECES] == 0) or (start_entry[SplitEntry.PIECES] > 0 and group == 1):
                for word in cutlass.range_constexpr(len(SplitEntry)):
                    entry[word] = start_entry[word]
            # If one of the tile's clusters has a second tile, slices are halves: that cluster takes one, others two.
            first_busy = remainder(quotient(entry[SplitEntry.PIECES], Busy.FIRST), 2)
            last_busy = quotient(entry[SplitEntry.PIECES], Busy.LAST)
            entry[SplitEntry.PIECES] = remainder(entry[SplitEntry.PIECES], Busy.FIRST)
            if const_expr(optional.token_lengths is not None):
                if entry[SplitEntry.PIECES] > 0:
                    if optional.token_lengths[entry[SplitEntry.ROW] // self.shape.num_heads] >= 0:
                        entry[SplitEntry.PIECES] = Int32(0)
            pieces = entry[SplitEntry.PIECES]
            taken = 1 + (first_busy | last_busy)
            index, slices = taken * position, taken * pieces - first_busy - last_busy
            if position == 0:
                taken -= first_busy
            else:
                index -= first_busy
            if position == pieces - 1:
                taken -= last_busy
            rows = cutlass.min(entry[SplitEntry.ROWS] - rank * ROWS, ROWS)
            self.merge(merge, rank * ROWS, rows, Slice(index, slices, taken, member, members))

    @cute.jit
    def slot(self, first: Int32, i: Int32):
        """The slot of piece i of a row tile whose first slot is `first`. A cluster has two slots: an even one for a
        piece that continues or ends a tile, and an odd one for a piece that starts a tile."""
        slot = first + i
        if const_expr(not self.batch_invariant):
            slot = first + 2 * i - 1
            if i == 0:
                slot = first
        return slot

    @cute.jit
    def merge(self, merge: Merge, first_row: Int32, rows: Int32, part: Slice):
        """Merge a Slice of `rows` rows of a row tile, from `first_row` on. The result is the mean of the pieces'
        results, weighted by exp2(their lse).

        A thread has an octet, 8 columns of a row; eight lanes have 64 columns. If there are more threads than
        octets, several share an octet and each takes some of the pieces: up to four lanes of a warp, then further
        warps. A running maximum keeps the weights at most 1.
        """
        if const_expr(self.shape.max_logits):
            self.merge_max_logits(merge, first_row, rows, part)
        count = merge.entry[SplitEntry.PIECES]
        tile_octets = rows * (self.latent // 8)
        size = Int32(0)
        if count > 0:
            size = (divide(tile_octets - 1, part.slices) + 8) & -8  # a multiple of eight octets, 64 columns
        begin = part.index * size
        size = cutlass.min(part.taken * size, tile_octets - begin)
        if part.members > 1:
            half = quotient(size + 15, 16) * 8
            begin += part.member * half
            size = cutlass.min(size - part.member * half, half)
        if size > 0:
            # A thread loads from several pieces at once, and for several octets if the pieces are few.
            pieces = PIECES_AT_ONCE[self.partial_dtype.width]
            octets = Octets(first_row, begin, size)
            if const_expr(self.batch_invariant):
                self.merge_octets(merge, octets, 1, pieces)
            else:
                if size <= GROUP_THREADS or count > 4:
                    self.merge_octets(merge, octets, 1, pieces)
                elif const_expr(pieces == 2):
                    self.merge_octets(merge, octets, 2, 2)
                elif count > 2:
                    self.merge_octets(merge, octets, 2, 4)
                else:
                    self.merge_octets(merge, octets, 4, 2)

    @cute.jit
    def merge_max_logits(self, merge: Merge, first_row: Int32, rows: Int32, part: Slice):
        """If `part` is a row tile's first one, write the greatest logits of `rows` of its rows, from `first_row` on. A
        thread has a row. NaN in any piece gives NaN."""
        tidx, _, _ = cute.arch.thread_idx()
        t, entry = tidx % GROUP_THREADS, merge.entry
        if entry[SplitEntry.PIECES] > 0 and part.index == 0 and part.member == 0 and t < rows:
            top = -Float32.inf
            for i in cutlass.range(entry[SplitEntry.PIECES], unroll=1):
                slot = self.slot(entry[SplitEntry.SLOT], i)
                numbers = partial_row(self.shape.partial_numbers * slot, first_row + t, self.shape)
                place = element(merge.partial_lse, numbers + 3 * self.tile_rows, 4)
                value = cute.make_tensor(place, cute.make_layout(1))[0]
                if value > top or value != value:
                    top = value
            merge.optional.max_logits[entry[SplitEntry.ROW] + first_row + t] = top

    @cute.jit
    def merge_octets(
        self,
        merge: Merge,
        octets: Octets,
        octets_at_once: cutlass.Constexpr[int],
        pieces_at_once: cutlass.Constexpr[int],
    ):
        """Merge `octets`. A thread merges `octets_at_once` of them at a time, or shares one with other threads."""
        entry, size = merge.entry, octets.size
        count = entry[SplitEntry.PIECES]
        tidx, _, _ = cute.arch.thread_idx()
        t = tidx % GROUP_THREADS
        # At a time the group works on 2 ** bits octets, or on octets_at_once times as many.
        bits = Int32((GROUP_THREADS // INVARIANT_SHARERS).bit_length() - 1)
        if const_expr(octets_at_once > 1):
            bits = Int32(GROUP_THREADS.bit_length() - 1)
        elif const_expr(not self.batch_invariant):
            bits = 32 - Int32(cute.arch.clz(size - 1))
            bits = cutlass.min(cutlass.max(bits, 3), GROUP_THREADS.bit_length() - 1)
        spread, sharers = Int32(1) << bits, Int32(GROUP_THREADS) >> bits
        team = Team(t, (t >> 3) & (sharers - 1), sharers)
        eight = t >> (GROUP_THREADS.bit_length() + 2 - bits)
        acc = cute.make_rmem_tensor((8, octets_at_once), Float32)
        lines = cute.make_rmem_tensor((8, pieces_at_once, octets_at_once), self.partial_dtype)
        weights = cute.make_rmem_tensor((pieces_at_once, octets_at_once), Float32)
        scales = cute.make_rmem_tensor((pieces_at_once, octets_at_once), Float32)
        weight = cute.make_rmem_tensor((octets_at_once,), Float32)
        highest = cute.make_rmem_tensor((octets_at_once,), Float32)
        rows = cute.make_rmem_tensor((octets_at_once,), Int32)
        columns = cute.make_rmem_tensor((octets_at_once,), Int32)
        merged, loaded = Merged(acc, weight, highest, rows, columns), Loaded(lines, weights, scales)
        for base in cutlass.range(0, size, spread * octets_at_once, unroll=1):
            first_octet = base + eight * 8 + t % 8
            acc.fill(0.0)
            weight.fill(0.0)
            highest.fill(LOWEST)
            for v in cutlass.range_constexpr(octets_at_once):
                octet = octets.begin + cutlass.min(first_octet + v * GROUP_THREADS, size - 1)
                rows[v] = octets.first_row + quotient(octet, self.latent // 8)
                columns[v] = remainder(octet, self.latent // 8) * 8
            for step in cutlass.range(0, count, pieces_at_once * sharers, unroll=1):
                self.load_pieces(step, merge, merged, loaded, team)
                cute.arch.sync_warp()  # otherwise the compiler waits for one load before it issues the next
                self.add_pieces(merged, loaded)
            if const_expr(octets_at_once == 1):
                self.merge_lanes(merged, sharers)
            counts = first_octet < size
            if const_expr(not self.batch_invariant and octets_at_once == 1):
                if sharers > 4:
                    row = entry[SplitEntry.ROW] + rows[0]
                    self.merge_warps(merge, merged, row, octets.begin + eight * 8, counts, team)
                    counts = cutlass.Boolean(False)
            if (sharers <= 4) or self.batch_invariant:
                for v in cutlass.range_constexpr(octets_at_once):
                    if const_expr(v > 0):
                        counts = first_octet + v * GROUP_THREADS < size
                    self.write_octet(v, counts, merge, merged, team)

    @cute.jit
    def load_pieces(self, step: Int32, merge: Merge, merged: Merged, loaded: Loaded, team: Team):
        """Load, for each of the thread's octets, the thread's pieces among those from piece `step` on. Pieces past the
        last one get weight 0."""
        first, count = merge.entry[SplitEntry.SLOT], merge.entry[SplitEntry.PIECES]
        rows, columns = merged.rows, merged.columns
        lines, weights, scales = loaded.lines, loaded.weights, loaded.scales
        for v in cutlass.range_constexpr(cute.size(rows)):
            scale_of = 1 + quotient(columns[v], self.latent // 2)
            for u in cutlass.range_constexpr(cute.size(weights, mode=[0])):
                i = step + u * team.sharers + team.member
                slot = self.slot(first, cutlass.min(i, count - 1))
                values = cute.make_tensor(
                    element(merge.partial_lse, partial_row(self.shape.partial_numbers * slot, rows[v], self.shape), 4),
                    cute.make_layout(3, stride=self.tile_rows),
                )
                weights[u, v], scales[u, v] = values[0], values[scale_of]
                if i >= count:
                    weights[u, v] = -Float32.inf
                line = cute.make_tensor(
                    element(merge.partial_out, partial_row(slot, rows[v], self.shape) * self.latent + columns[v], 16),
                    cute.make_layout(8),
                )
                cute.autovec_copy(line, lines[None, u, v])

    @cute.jit
    def add_pieces(self, merged: Merged, loaded: Loaded):
        """Add the loaded pieces to a thread's octets, relative to the running maximum of the log weights."""
        acc, weight, highest = merged.acc, merged.weight, merged.highest
        lines, weights, scales = loaded.lines, loaded.weights, loaded.scales
        for v in cutlass.range_constexpr(cute.size(weight)):
            top = highest[v]
            for u in cutlass.range_constexpr(cute.size(weights, mode=[0])):
                top = cute.arch.fmax(top, weights[u, v])
            factor = cute.math.exp2(highest[v] - top, fastmath=True)
            highest[v] = top
            weight[v] = weight[v] * factor
            for c in cutlass.range_constexpr(8):
                acc[c, v] = acc[c, v] * factor
            for u in cutlass.range_constexpr(cute.size(weights, mode=[0])):
                w = cute.math.exp2(weights[u, v] - top, fastmath=True)
                weight[v] += w
                w = w * scales[u, v]
                for c in cutlass.range_constexpr(8):
                    acc[c, v] += w * lines[c, u, v].to(Float32)

    @cute.jit
    def merge_lanes(self, merged: Merged, sharers: Int32):
        """Add up the sums of the lanes of a warp that share an octet."""
        acc, weight, highest = merged.acc, merged.weight, merged.highest
        step = Int32(1)
        while step < cutlass.min(sharers, 4):
            other = cute.arch.shuffle_sync_bfly(highest[0], offset=8 * step)
            top = cute.arch.fmax(highest[0], other)
            mine = cute.math.exp2(highest[0] - top, fastmath=True)
            theirs = cute.math.exp2(other - top, fastmath=True)
            highest[0] = top
            weight[0] = weight[0] * mine + cute.arch.shuffle_sync_bfly(weight[0], offset=8 * step) * theirs
            for c in cutlass.range_constexpr(8):
                acc[c, 0] = acc[c, 0] * mine + cute.arch.shuffle_sync_bfly(acc[c, 0], offset=8 * step) * theirs
            step *= 2

    @cute.jit
    def write_octet(self, v: cutlass.Constexpr[int], counts: cutlass.Boolean, merge: Merge, merged: Merged, team: Team):
        """Write the thread's octet with index v. If this is its row's first octet, also write the row's log-sum-exp."""
        out, lse, row_base = merge.out, merge.lse, merge.entry[SplitEntry.ROW]
        acc, weight, rows, columns = merged.acc, merged.weight, merged.rows, merged.columns
        factor = Float32(0.0)
        value = -Float32.inf
        if weight[v] > 0.0 or weight[v] != weight[v]:
            factor = cute.arch.rcp_approx(weight[v])
            value = (merged.highest[v] + cute.math.log2(weight[v], fastmath=True)) * LN_2
            if const_expr(self.sinks):
                factor = factor * self.keys_share(value, row_base + rows[v], merge)
        narrow = cute.make_rmem_tensor((8,), self.out_dtype)
        for c in cutlass.range_constexpr(8):
            narrow[c] = (acc[c, v] * factor).to(self.out_dtype)
        if const_expr(self.partial_is_lane_order):
            transpose_quad(cute.recast_tensor(narrow, Int32), team.thread % 4)
        if counts and team.member == 0:
            target = cute.make_tensor(
                element(out, Int64(row_base + rows[v]) * self.latent + columns[v], 16),
                cute.make_layout(8),
            )
            cute.autovec_copy(narrow, target)
            if columns[v] == 0:
                lse[row_base + rows[v]] = value

    @cute.jit
    def keys_share(self, lse: Float32, row: Int32, merge: Merge):
        """The keys' part of row `row`'s weight; the rest belongs to its head's sink. `lse` is in base e."""
        return share_beside_sink(lse * LOG2_E, merge.optional.sinks[row % self.shape.num_heads])

    @cute.jit
    def merge_warps(self, merge: Merge, merged: Merged, row: Int32, octet: Int32, counts: cutlass.Boolean, team: Team):
        """Add up, through shared memory, the sums of the warps that share the eight octets from octet `octet` on.

        Store the result. If these are the row's first octets, also store the row's log-sum-exp.
        """
        lse, sharers = merge.lse, team.sharers // 4
        lane = kept(cute.arch.lane_idx())  # so that addresses are not computed before the loads
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        of_acc, of_highest, of_weight = merge.sums.acc, merge.sums.highest, merge.sums.weight
        if lane < 8:
            cute.autovec_copy(
                merged.acc[None, 0], cute.make_tensor((of_acc.iterator + (warp_idx * 64 + lane * 8)).align(16), 8)
            )
            of_highest[lane, warp_idx] = merged.highest[0]
            of_weight[lane, warp_idx] = merged.weight[0]
        cute.arch.barrier(barrier_id=CombineBarrier.GROUP + merge.group, number_of_threads=GROUP_THREADS)
        if cute.arch.make_warp_uniform(team.member) < 4 and counts:
            # A lane has two columns.
            eighth = lane // 4
            top = Float32(LOWEST)
            for w in cutlass.range_constexpr(GROUP_THREADS // 32):
                top = cute.arch.fmax(top, of_highest[eighth, warp_idx + cutlass.min(w, sharers - 1)])
            total = Float32(0.0)
            columns = cute.make_rmem_tensor((2,), Float32)
            columns.fill(0.0)
            for w in cutlass.range(warp_idx, warp_idx + sharers, unroll=4):
                share = cute.math.exp2(of_highest[eighth, w] - top, fastmath=True)
                total += share * of_weight[eighth, w]
                for c in cutlass.range_constexpr(2):
                    columns[c] += share * of_acc[2 * lane + c, w]
            factor = Float32(0.0)
            value = -Float32.inf
            if total > 0.0 or total != total:
                factor = cute.arch.rcp_approx(total)
                value = (top + cute.math.log2(total, fastmath=True)) * LN_2
                if const_expr(self.sinks):
                    factor = factor * self.keys_share(value, row, merge)
            first_column = remainder(octet, self.latent // 8) * 8
            column = 2 * lane
            if const_expr(self.partial_is_lane_order):
                # Of 32 columns a lane has two: the pair with index lane // 4 % 4 in the group of 8 with index lane % 4.
                column = lane // 16 * 32 + lane % 4 * 8 + lane // 4 % 4 * 2
            pair = cute.make_rmem_tensor((2,), self.out_dtype)
            for c in cutlass.range_constexpr(2):
                pair[c] = (columns[c] * factor).to(self.out_dtype)
            target = element(merge.out, Int64(row) * self.latent + first_column + column, 4)
            cute.autovec_copy(pair, cute.make_tensor(target, cute.make_layout(2)))
            if first_column == 0 and lane == 0:
                lse[row] = value
