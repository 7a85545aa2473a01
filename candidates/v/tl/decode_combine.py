"""Merging what several CTAs of decode found for the same rows: by those CTAs when they have done with their keys or, when
batch_invariant, by a second, small kernel."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.choose import ROWS
from tsmla_kernels.sm90.decode_schedule import DecodeSchedule
from tsmla_kernels.sm90.decode_softmax import LN_2, LOWEST
from tsmla_kernels.sm90.warp_helpers import element, quotient, remainder

COMBINE_SPARE_BYTES = 100 << 10
COMBINE_THREADS = 512  # of a CTA of `combine`, in two groups, each of which merges one row tile
MERGE_SHARE = 4  # threads that share a unit when batch_invariant: the order of additions must not follow the batch
STORED, COLLECTED, MERGED = 3, 5, 6  # barriers of `attend`, the first and the last of each of the values' warpgroups
THERE = 0x7B1D_96C4_E85A_F023  # a word of split_info where a piece is there: nothing that may lie there before
PATIENCE = 1 << 26  # looks at such a word, half a minute's: a kernel of which a part is missing is stopped, not waited for


class DecodeCombine(DecodeSchedule):
    """The merging of a decode kernel, which sets these.

    Attributes:
      latent: L. cluster: CTAs of `attend` that share keys, each with ROWS rows.
      out_dtype: of the output. partial_dtype: of partial_out.
      swapped: whether partial_out has columns as a WGMMA accumulator's lanes hold them: 2 from each of four groups of 8
        together, of which the quad has four.
      narrow: whether the cache is fp8 and widened in the kernel.
    """

    latent: int
    cluster: int
    out_dtype: type[cutlass.Numeric]
    partial_dtype: type[cutlass.Numeric]
    swapped: bool
    narrow: bool

    @property
    def group_threads(self) -> int:
        """Threads that merge one row tile: half of `combine`, or a warpgroup of the values."""
        return COMBINE_THREADS // 2 if self.invariant else 128

    @property
    def pieces_at_once(self) -> int:
        """Pieces that a thread has under way, and as many again that it adds up: as its registers allow."""
        return 4 if self.invariant or self.narrow or self.partial_dtype == Float32 else 8

    # ---- when batch_invariant

    @cute.kernel
    def combine(
        self,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        split_info: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        parts: Int32,
    ):
        """Merge the pieces of every row tile that was cut: a tile's portions go to one CTA, or to several where there are
        some to spare."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()

        @cute.struct
        class Storage:
            # So much that the multiprocessor keeps the division of memory that `attend` had: changing it takes 2 us.
            spare: cute.struct.MemRange[Int32, COMBINE_SPARE_BYTES // 4]

        utils.SmemAllocator().allocate(Storage)
        tidx, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tidx // self.group_threads)
        entry = cute.make_rmem_tensor((4,), Int32)
        pieces = (partial_out, partial_lse, out, lse)
        cute.arch.griddepcontrol_wait()
        groups = ctas * 2
        units = split_info.shape[0] - parts
        portions = cutlass.max(groups // units, 1)
        first_item = cta * 2 + group
        for item in cutlass.range(first_item, units * portions, groups, unroll=1):
            cute.autovec_copy(split_info[parts + item // portions, None], entry)
            self.merge(pieces, None, entry, Int32(0), entry[1], item % portions, portions, Int32(0), 1, group)

    # ---- otherwise, by the values' warpgroups of `attend`

    @cute.jit
    def place_in_grid(self):
        """(thread, cluster, CTA of it, half of the columns): found where they are wanted, for registers to keep them, or
        what comes of them, are lacking."""
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        tidx, cta = self.kept(tidx), self.kept(cta)
        half = cute.arch.make_warp_uniform(quotient(tidx, 128)) - 1
        return tidx, quotient(cta, self.cluster), remainder(cta, self.cluster), half

    @cute.jit
    def first_and_count(self, shared: cute.Tensor, which: Int32):
        """The slot of the first piece of a row tile, and how many pieces it was cut into."""
        both = self.uniform(shared[2, which])
        return both & 0xFFFF, both >> 16

    @cute.jit
    def word(self, split_info: cute.Tensor, slot: Int32, piece: Int32, rank: Int32, half: Int32, parts: Int32):
        """The address of what slot `slot`'s cluster is told of piece `piece`: that this half of its columns is there."""
        return element(split_info, (slot * parts + piece) * split_info.shape[1] + (2 * rank + half) * 2, 8).toint()

    @cute.jit
    def announce(self, slot: Int32, merged: cutlass.Constexpr):
        """This half of a piece is stored: if it is one of several, told to all clusters that have another."""
        _, split_info, shared, _, parts = merged
        if slot >= 0:
            tidx, part, rank, half = self.place_in_grid()
            which = slot - 2 * part
            first, count = self.first_and_count(shared, which)
            mine = quotient(slot - first + 1, 2)
            cute.arch.barrier(barrier_id=STORED + half, number_of_threads=128)
            for base in cutlass.range(0, count, 128, unroll=1):
                i = base + tidx % 128
                word = self.word(split_info, self.slot(first, i), mine, rank, half, parts)
                if i < count:
                    cute.arch.inline_ptx(
                        "fence.acq_rel.gpu; st.relaxed.gpu.global.b64 [{$r0}], {$r1};",
                        read_only_args=[word, Int64(THERE)],
                    )

    @cute.jit
    def collect(self, merged: cutlass.Constexpr):
        """Merge this CTA's portions of the row tiles that its cluster shares with others, when all pieces are there.

        Every cluster that has a piece of a row tile merges an equal portion of its output, so that nothing has to be
        searched for or shared out. Each clears the words that it was told by, for the next launch.
        """
        pieces, split_info, shared, of_warps, parts = merged
        tidx, part, rank, half = self.place_in_grid()
        # The piece that ends a row tile and the one that starts another: a group each, or both groups for the one.
        _, ends = self.first_and_count(shared, 0)
        _, starts = self.first_and_count(shared, 1)
        if ends + starts > 0:
            t = tidx % 128 + 128 * half
            for slot_here in cutlass.range_constexpr(2):
                count = (ends, starts)[slot_here]
                for base in cutlass.range(0, 2 * count, 256, unroll=1):
                    i = base + t
                    counts = i < 2 * count
                    i = cutlass.min(i, 2 * count - 1)
                    half_there = Int32(i >= count)
                    word = self.word(split_info, 2 * part + slot_here, i - half_there * count, rank, half_there, parts)
                    missing, looks = Int32(1), Int32(0)
                    while missing > 0:
                        told = Int64(THERE)
                        if counts:
                            told = cute.arch.inline_ptx(
                                "ld.acquire.gpu.global.b64 {$w0}, [{$r0}];", write_only_types=[Int64],
                                read_only_args=[word],
                            )  # fmt: skip
                        missing = self.uniform(Int32(told != Int64(THERE)))
                        looks += 1
                        if looks == PATIENCE:
                            cute.arch.inline_ptx("trap;")
                    if counts:
                        cute.arch.inline_ptx("st.relaxed.gpu.global.b64 [{$r0}], {$r1};", read_only_args=[word, Int64(0)])
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 4:
                self.stamp(split_info, 13)
            cute.arch.barrier(barrier_id=COLLECTED, number_of_threads=256)
            which, member, members = half, Int32(0), Int32(1)
            if ends == 0 or starts == 0:
                which, member, members = Int32(starts > 0), half, Int32(2)
            entry = cute.make_rmem_tensor((4,), Int32)
            entry[0], entry[1] = shared[0, which], self.uniform(shared[1, which])
            entry[2], entry[3] = self.first_and_count(shared, which)
            rows = cutlass.min(entry[1] - rank * ROWS, ROWS)
            portion = part - quotient(entry[2], 2)
            self.merge(
                pieces, of_warps, entry, rank * ROWS, rows, portion, entry[3], member, members, half
            )

    # ---- both

    @cute.jit
    def slot(self, first: Int32, i: Int32):
        """Where piece i of an entry lies: a cluster's slots are (the end of a tile, the start of one)."""
        slot = first + i
        if const_expr(not self.invariant):
            slot = first + 2 * i - 1
            if i == 0:
                slot = first
        return slot

    @cute.jit
    def partial_row(self, slot: Int32, row: Int32):
        """Row `row` of a slot, as one of all rows of partial_out: when batch_invariant there may be very many."""
        if const_expr(self.invariant):
            slot = Int64(slot)
        return slot * self.tile_rows + row

    @cute.jit
    def merge(
        self,
        pieces: cutlass.Constexpr,
        of_warps: cutlass.Constexpr,
        entry: cute.Tensor,
        first_row: Int32,
        rows: Int32,
        portion: Int32,
        portions: Int32,
        part: Int32,
        parts: Int32,
        group: Int32,
    ):
        """Part `part` of `parts` of one portion of `rows` rows of a row tile: each piece's result weighted by exp2(its
        lse), over the weights.

        A thread has a unit, 8 columns of a row, and eight lanes 128 bytes of a piece; where there are threads to spare,
        several share a unit and take every so many pieces: four of a warp, and further warps. A running maximum keeps
        the weights at most 1. What is read next is under way while what was read before is added up.
        """
        partial_out, partial_lse, out, lse = pieces
        row_base, first, count = entry[0], entry[2], entry[3]
        units_of_row = self.latent // 8
        units = rows * units_of_row
        here = Int32(0)
        if count > 0:
            here = (self.divide(units - 1, portions) + 8) & -8  # in eights: 128 bytes of a line
        begin = portion * here
        here = cutlass.min(here, units - begin)
        if parts > 1:
            half = quotient(here + 15, 16) * 8
            begin += part * half
            here = cutlass.min(here - part * half, half)
        if here > 0:
            tidx, _, _ = cute.arch.thread_idx()
            threads = self.group_threads
            unroll = self.pieces_at_once
            t = tidx % threads
            # Units worked on at once: 2 ** bits.
            bits = Int32((threads // MERGE_SHARE).bit_length() - 1)
            if const_expr(not self.invariant):
                bits = 32 - Int32(cute.arch.clz(here - 1))
                bits = cutlass.min(cutlass.max(bits, 3), threads.bit_length() - 1)
            share_bits = threads.bit_length() - 1 - bits
            share = Int32(1) << share_bits
            member = (t >> 3) & (share - 1)
            eight = t >> (share_bits + 3)
            acc = cute.make_rmem_tensor((8,), Float32)
            lines = cute.make_rmem_tensor((8, unroll, 2), self.partial_dtype)
            weights = cute.make_rmem_tensor((unroll, 2), Float32)
            scales = cute.make_rmem_tensor((unroll, 2), Float32)
            weight, highest = Float32(0.0), Float32(LOWEST)
            # A step is `unroll` pieces of a unit; its reads are issued one step before.
            round_bits = share_bits + unroll.bit_length() - 1
            rounds = (count + (Int32(1) << round_bits) - 1) >> round_bits
            steps = ((here + (Int32(1) << bits) - 1) >> bits) * rounds
            base, round_here = Int32(0), Int32(0)
            base_next, round_next = Int32(0), Int32(0)
            for step in cutlass.range(0, steps + 1, unroll=1):
                if step < steps:
                    row, column = self.place(begin + cutlass.min(base_next + eight * 8 + t % 8, here - 1))
                    row += first_row
                    scale_of = 1 + quotient(column, self.latent // 2)
                    for u in cutlass.range_constexpr(unroll):
                        i = (round_next << round_bits) + (u << share_bits) + member
                        slot = self.slot(first, cutlass.min(i, count - 1))
                        values = cute.make_tensor(
                            element(partial_lse, self.partial_row(slot * 3, row), 4),
                            cute.make_layout(3, stride=self.tile_rows),
                        )
                        weights[u, 1], scales[u, 1] = values[0], values[scale_of]
                        if i >= count:
                            weights[u, 1] = -Float32.inf
                        line = cute.make_tensor(
                            element(partial_out, self.partial_row(slot, row) * self.latent + column, 16),
                            cute.make_layout(8),
                        )
                        cute.autovec_copy(line, lines[None, u, 1])
                    cute.arch.sync_warp()  # keeps the compiler from waiting for one load before it issues the next
                if step > 0:
                    if round_here == 0:
                        acc.fill(0.0)
                        weight, highest = Float32(0.0), Float32(LOWEST)
                    top = highest
                    for u in cutlass.range_constexpr(unroll):
                        top = cute.arch.fmax(top, weights[u, 0])
                    factor = cute.math.exp2(highest - top, fastmath=True)
                    highest = top
                    weight = weight * factor
                    for c in cutlass.range_constexpr(8):
                        acc[c] = acc[c] * factor
                    for u in cutlass.range_constexpr(unroll):
                        w = cute.math.exp2(weights[u, 0] - top, fastmath=True)
                        weight += w
                        w = w * scales[u, 0]
                        for c in cutlass.range_constexpr(8):
                            acc[c] += w * lines[c, u, 0].to(Float32)
                    if round_here + 1 == rounds:
                        unit = base + eight * 8 + t % 8
                        self.put(
                            out, lse, of_warps, acc, weight, highest, row_base + first_row, begin, unit, unit < here,
                            member, share, group,
                        )  # fmt: skip
                base, round_here = base_next, round_next
                round_next += 1
                if round_next == rounds:
                    round_next = Int32(0)
                    base_next += Int32(1) << bits
                for u in cutlass.range_constexpr(unroll):
                    weights[u, 0], scales[u, 0] = weights[u, 1], scales[u, 1]
                    for c in cutlass.range_constexpr(8):
                        lines[c, u, 0] = lines[c, u, 1]

    @cute.jit
    def place(self, unit: Int32):
        """(row, first column) of a unit."""
        units_of_row = self.latent // 8
        return quotient(unit, units_of_row), remainder(unit, units_of_row) * 8

    @cute.jit
    def put(
        self,
        out: cute.Tensor,
        lse: cute.Tensor,
        of_warps: cutlass.Constexpr,
        acc: cute.Tensor,
        weight: Float32,
        highest: Float32,
        row_base: Int32,
        begin: Int32,
        unit: Int32,
        counts: cutlass.Boolean,
        member: Int32,
        share: Int32,
        group: Int32,
    ):
        """Add up what the `share` threads of a unit found, over its weight, and store it if it `counts`."""
        step = Int32(1)
        while step < cutlass.min(share, 4):
            other = cute.arch.shuffle_sync_bfly(highest, offset=8 * step)
            top = cute.arch.fmax(highest, other)
            mine = cute.math.exp2(highest - top, fastmath=True)
            theirs = cute.math.exp2(other - top, fastmath=True)
            highest = top
            weight = weight * mine + cute.arch.shuffle_sync_bfly(weight, offset=8 * step) * theirs
            for c in cutlass.range_constexpr(8):
                acc[c] = acc[c] * mine + cute.arch.shuffle_sync_bfly(acc[c], offset=8 * step) * theirs
            step *= 2
        row, column = self.place(begin + unit)
        row += row_base
        if const_expr(not self.invariant):
            if share > 4:
                self.put_of_warps(
                    out, lse, of_warps, acc, weight, highest, begin + (unit & -8), counts, row_base, member, share // 4,
                    group,
                )  # fmt: skip
                counts = cutlass.Boolean(False)
        if (share <= 4) or self.invariant:
            factor = Float32(0.0)
            value = -Float32.inf
            if weight > 0.0 or weight != weight:
                factor = cute.arch.rcp_approx(weight)
                value = (highest + cute.math.log2(weight, fastmath=True)) * LN_2
            narrow = cute.make_rmem_tensor((8,), self.out_dtype)
            for c in cutlass.range_constexpr(8):
                narrow[c] = (acc[c] * factor).to(self.out_dtype)
            if const_expr(self.swapped):
                self.transpose_quad(cute.recast_tensor(narrow, Int32), cute.arch.lane_idx() % 4)
            if counts and member == 0:
                target = cute.make_tensor(
                    element(out, Int64(row) * self.latent + column, 16), cute.make_layout(8)
                )
                cute.autovec_copy(narrow, target)
                if column == 0:
                    lse[row] = value

    @cute.jit
    def put_of_warps(
        self,
        out: cute.Tensor,
        lse: cute.Tensor,
        of_warps: cutlass.Constexpr,
        acc: cute.Tensor,
        weight: Float32,
        highest: Float32,
        unit: Int32,
        counts: cutlass.Boolean,
        row_base: Int32,
        member: Int32,
        sharers: Int32,
        group: Int32,
    ):
        """The end of `put` where `sharers` warps share eight units: their sums through shared memory, and out."""
        lane = self.kept(cute.arch.lane_idx())  # so that what comes of it is not found before the loads
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4  # among the values' warps
        of_acc, of_highest, of_weight = of_warps
        if lane < 8:
            cute.autovec_copy(acc, cute.make_tensor((of_acc.iterator + (warp_idx * 64 + lane * 8)).align(16), 8))
            of_highest[lane, warp_idx] = highest
            of_weight[lane, warp_idx] = weight
        cute.arch.barrier(barrier_id=MERGED + group, number_of_threads=self.group_threads)
        if cute.arch.make_warp_uniform(member) < 4 and counts:
            # A lane has two columns.
            eighth = lane // 4
            top = Float32(LOWEST)
            for w in cutlass.range_constexpr(self.group_threads // 32):
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
            row, at = self.place(unit)
            row += row_base
            column = 2 * lane
            if const_expr(self.swapped):
                # Of 32 columns, group lane % 4 and in it the pair of lane // 4 % 4.
                column = lane // 16 * 32 + lane % 4 * 8 + lane // 4 % 4 * 2
            pair = cute.make_rmem_tensor((2,), self.out_dtype)
            for c in cutlass.range_constexpr(2):
                pair[c] = (columns[c] * factor).to(self.out_dtype)
            target = element(out, Int64(row) * self.latent + at + column, 4)
            cute.autovec_copy(pair, cute.make_tensor(target, cute.make_layout(2)))
            if at == 0 and lane == 0:
                lse[row] = value
