"""Merging what several CTAs of decode found for the same rows: a second, small kernel."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.decode.config import ROWS
from tsmla_kernels.sm90.decode.schedule import FIRST_BUSY, LAST_BUSY, DecodeSchedule
from tsmla_kernels.sm90.warp import LN_2, LOWEST, element, quotient, remainder

COMBINE_SPARE_BYTES = 100 << 10
COMBINE_GROUP = 256  # threads that merge one row tile together
COMBINE_GROUPS = 2  # of a CTA
COMBINE_THREADS = COMBINE_GROUP * COMBINE_GROUPS
COMBINE_PIECES = {32: 2, 16: 8}  # that a thread reads at once, by the bits of partial_out's elements
COMBINE_SHARE = 4  # threads that share a unit when batch_invariant: the order of additions must not follow the batch


class DecodeCombine(DecodeSchedule):
    """The combine of a decode kernel, which sets these.

    Attributes:
      latent: L. cluster: CTAs of `attend` that share keys, each with ROWS rows.
      out_dtype: of the output. partial_dtype: of partial_out.
      swapped: whether partial_out has columns as a WGMMA accumulator's lanes hold them: 2 from each of four groups of 8
        together, of which the quad has four.
    """

    latent: int
    cluster: int
    out_dtype: type[cutlass.Numeric]
    partial_dtype: type[cutlass.Numeric]
    swapped: bool

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
        """Merge the pieces of every row tile that was cut.

        Each cluster of `attend` left word of the pieces that it made; here its CTAs merge a portion of those row tiles'
        outputs, half of one where they have two tiles, so that nothing has to be searched for or shared out. When
        batch_invariant a row tile's portions go to one CTA, or to several where there are some to spare.
        """
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()

        warps = COMBINE_THREADS // 32

        @cute.struct
        class Storage:
            acc: cute.struct.Align[cute.struct.MemRange[Float32, 64 * warps], 16]
            highest: cute.struct.MemRange[Float32, 8 * warps]
            weight: cute.struct.MemRange[Float32, 8 * warps]
            # So much that the multiprocessor keeps the division of memory that `attend` had: changing it takes 2 us.
            spare: cute.struct.MemRange[Int32, COMBINE_SPARE_BYTES // 4]

        storage = utils.SmemAllocator().allocate(Storage)
        of_warps = (
            storage.acc.get_tensor(cute.make_layout((64, warps), stride=(1, 64))),
            storage.highest.get_tensor(cute.make_layout((8, warps), stride=(1, 8))),
            storage.weight.get_tensor(cute.make_layout((8, warps), stride=(1, 8))),
        )
        tidx, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tidx // COMBINE_GROUP)
        entry = cute.make_rmem_tensor((4,), Int32)
        cute.arch.griddepcontrol_wait()
        if const_expr(self.invariant):
            groups = ctas * COMBINE_GROUPS
            units = split_info.shape[0] - parts
            portions = cutlass.max(groups // units, 1)
            first_item = cta * COMBINE_GROUPS + group
            for item in cutlass.range(first_item, units * portions, groups, unroll=1):
                cute.autovec_copy(split_info[parts + item // portions, None], entry)
                self.merge(
                    partial_out, partial_lse, out, lse, of_warps, entry, Int32(0), entry[1], item % portions, portions,
                    1, Int32(0), 1, group,
                )  # fmt: skip
        else:
            part, rank = quotient(cta, self.cluster), remainder(cta, self.cluster)
            # The piece that ends a row tile and the one that starts another: a group each, or both groups for the one.
            start = cute.make_rmem_tensor((4,), Int32)
            cute.autovec_copy(split_info[2 * part, None], entry)
            cute.autovec_copy(split_info[2 * part + 1, None], start)
            place = part - quotient(entry[2], 2)
            if (entry[3] == 0) or (start[3] > 0 and group == 1):
                place = Int32(0)
            member, members = Int32(0), Int32(1)
            if entry[3] == 0 or start[3] == 0:
                member, members = group, Int32(2)
            if (entry[3] == 0) or (start[3] > 0 and group == 1):
                for i in cutlass.range_constexpr(4):
                    entry[i] = start[i]
            # Portions are halves where some cluster has another row tile too: those take one, the others two.
            first_busy, last_busy = remainder(quotient(entry[3], FIRST_BUSY), 2), quotient(entry[3], LAST_BUSY)
            entry[3] = remainder(entry[3], FIRST_BUSY)
            taken = 1 + (first_busy | last_busy)
            portion, portions = taken * place, taken * entry[3] - first_busy - last_busy
            if place == 0:
                taken -= first_busy
            else:
                portion -= first_busy
            if place == entry[3] - 1:
                taken -= last_busy
            rows = cutlass.min(entry[1] - rank * ROWS, ROWS)
            self.merge(
                partial_out, partial_lse, out, lse, of_warps, entry, rank * ROWS, rows, portion, portions, taken,
                member, members, group,
            )  # fmt: skip

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
        """Row `row` of a slot, as one of all of partial_out's: when batch_invariant there may be very many."""
        if const_expr(self.invariant):
            slot = Int64(slot)
        return slot * self.tile_rows + row

    @cute.jit
    def merge(
        self,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        of_warps: cutlass.Constexpr,
        entry: cute.Tensor,
        first_row: Int32,
        rows: Int32,
        portion: Int32,
        portions: Int32,
        taken: Int32,
        part: Int32,
        parts: Int32,
        group: Int32,
    ):
        """Part `part` of `parts` of so many `taken` portions from `portion` on, of `portions` of `rows` rows of a row
        tile: each piece's result weighted by exp2(its lse), over the weights.

        A thread has a unit, 8 columns of a row, and eight lanes 128 bytes of a piece; where there are threads to spare,
        several share a unit and take every so many pieces: four of a warp, and further warps. A running maximum keeps
        the weights at most 1.
        """
        count = entry[3]
        units = rows * (self.latent // 8)
        here = Int32(0)
        if count > 0:
            here = (self.divide(units - 1, portions) + 8) & -8  # in eights: 128 bytes of a line
        begin = portion * here
        here = cutlass.min(taken * here, units - begin)
        if parts > 1:
            half = quotient(here + 15, 16) * 8
            begin += part * half
            here = cutlass.min(here - part * half, half)
        if here > 0:
            # A thread's loads that are under way at once: of several pieces, or where these are few of several units.
            pieces = COMBINE_PIECES[self.partial_dtype.width]
            operands = (partial_out, partial_lse, out, lse, of_warps, entry, first_row, begin, here, group)
            if const_expr(self.invariant):
                self.merge_units(operands, 1, pieces)
            else:
                if here <= COMBINE_GROUP or count > 4:
                    self.merge_units(operands, 1, pieces)
                elif const_expr(pieces == 2):
                    self.merge_units(operands, 2, 2)
                elif count > 2:
                    self.merge_units(operands, 2, 4)
                else:
                    self.merge_units(operands, 4, 2)

    @cute.jit
    def merge_units(
        self,
        operands: cutlass.Constexpr,
        units_at_once: cutlass.Constexpr[int],
        pieces_at_once: cutlass.Constexpr[int],
    ):
        """`here` units of a row tile from `begin` on: so many of a thread at once, or one that it may share."""
        partial_out, partial_lse, out, lse, of_warps, entry, first_row, begin, here, group = operands
        row_base, first, count = entry[0], entry[2], entry[3]
        units_of_row = self.latent // 8
        tidx, _, _ = cute.arch.thread_idx()
        t = tidx % COMBINE_GROUP
        # Units worked on at once: 2 ** bits.
        bits = Int32((COMBINE_GROUP // COMBINE_SHARE).bit_length() - 1)
        if const_expr(units_at_once > 1):
            bits = Int32(COMBINE_GROUP.bit_length() - 1)
        elif const_expr(not self.invariant):
            bits = 32 - Int32(cute.arch.clz(here - 1))
            bits = cutlass.min(cutlass.max(bits, 3), COMBINE_GROUP.bit_length() - 1)
        spread, share = Int32(1) << bits, Int32(COMBINE_GROUP) >> bits
        member = (t >> 3) & (share - 1)
        eight = t >> (COMBINE_GROUP.bit_length() + 2 - bits)
        acc = cute.make_rmem_tensor((8, units_at_once), Float32)
        lines = cute.make_rmem_tensor((8, pieces_at_once, units_at_once), self.partial_dtype)
        weights = cute.make_rmem_tensor((pieces_at_once, units_at_once), Float32)
        scales = cute.make_rmem_tensor((pieces_at_once, units_at_once), Float32)
        weight = cute.make_rmem_tensor((units_at_once,), Float32)
        highest = cute.make_rmem_tensor((units_at_once,), Float32)
        rows = cute.make_rmem_tensor((units_at_once,), Int32)
        columns = cute.make_rmem_tensor((units_at_once,), Int32)
        for base in cutlass.range(0, here, spread * units_at_once, unroll=1):
            first_unit = base + eight * 8 + t % 8
            acc.fill(0.0)
            weight.fill(0.0)
            highest.fill(LOWEST)
            for v in cutlass.range_constexpr(units_at_once):
                unit = begin + cutlass.min(first_unit + v * COMBINE_GROUP, here - 1)
                rows[v], columns[v] = first_row + quotient(unit, units_of_row), remainder(unit, units_of_row) * 8
            for step in cutlass.range(0, count, pieces_at_once * share, unroll=1):
                for v in cutlass.range_constexpr(units_at_once):
                    scale_of = 1 + quotient(columns[v], self.latent // 2)
                    for u in cutlass.range_constexpr(pieces_at_once):
                        i = step + u * share + member
                        slot = self.slot(first, cutlass.min(i, count - 1))
                        values = cute.make_tensor(
                            element(partial_lse, self.partial_row(3 * slot, rows[v]), 4),
                            cute.make_layout(3, stride=self.tile_rows),
                        )
                        weights[u, v], scales[u, v] = values[0], values[scale_of]
                        if i >= count:
                            weights[u, v] = -Float32.inf
                        line = cute.make_tensor(
                            element(partial_out, self.partial_row(slot, rows[v]) * self.latent + columns[v], 16),
                            cute.make_layout(8),
                        )
                        cute.autovec_copy(line, lines[None, u, v])
                cute.arch.sync_warp()  # keeps the compiler from waiting for one load before it issues the next
                for v in cutlass.range_constexpr(units_at_once):
                    top = highest[v]
                    for u in cutlass.range_constexpr(pieces_at_once):
                        top = cute.arch.fmax(top, weights[u, v])
                    factor = cute.math.exp2(highest[v] - top, fastmath=True)
                    highest[v] = top
                    weight[v] = weight[v] * factor
                    for c in cutlass.range_constexpr(8):
                        acc[c, v] = acc[c, v] * factor
                    for u in cutlass.range_constexpr(pieces_at_once):
                        w = cute.math.exp2(weights[u, v] - top, fastmath=True)
                        weight[v] += w
                        w = w * scales[u, v]
                        for c in cutlass.range_constexpr(8):
                            acc[c, v] += w * lines[c, u, v].to(Float32)
            if const_expr(units_at_once == 1):
                step = Int32(1)
                while step < cutlass.min(share, 4):
                    other = cute.arch.shuffle_sync_bfly(highest[0], offset=8 * step)
                    top = cute.arch.fmax(highest[0], other)
                    mine = cute.math.exp2(highest[0] - top, fastmath=True)
                    theirs = cute.math.exp2(other - top, fastmath=True)
                    highest[0] = top
                    weight[0] = weight[0] * mine + cute.arch.shuffle_sync_bfly(weight[0], offset=8 * step) * theirs
                    for c in cutlass.range_constexpr(8):
                        acc[c, 0] = acc[c, 0] * mine + cute.arch.shuffle_sync_bfly(acc[c, 0], offset=8 * step) * theirs
                    step *= 2
            counts = first_unit < here
            if const_expr(not self.invariant and units_at_once == 1):
                if share > 4:
                    self.merge_warps(
                        out, lse, of_warps, acc, weight[0], highest[0], row_base + rows[0], begin + eight * 8, counts,
                        member, share // 4, group,
                    )  # fmt: skip
                    counts = cutlass.Boolean(False)
            if (share <= 4) or self.invariant:
                for v in cutlass.range_constexpr(units_at_once):
                    factor = Float32(0.0)
                    value = -Float32.inf
                    if weight[v] > 0.0 or weight[v] != weight[v]:
                        factor = cute.arch.rcp_approx(weight[v])
                        value = (highest[v] + cute.math.log2(weight[v], fastmath=True)) * LN_2
                    narrow = cute.make_rmem_tensor((8,), self.out_dtype)
                    for c in cutlass.range_constexpr(8):
                        narrow[c] = (acc[c, v] * factor).to(self.out_dtype)
                    if const_expr(self.swapped):
                        self.transpose_quad(cute.recast_tensor(narrow, Int32), t % 4)
                    if const_expr(v > 0):
                        counts = first_unit + v * COMBINE_GROUP < here
                    if counts and member == 0:
                        target = cute.make_tensor(
                            element(out, Int64(row_base + rows[v]) * self.latent + columns[v], 16),
                            cute.make_layout(8),
                        )
                        cute.autovec_copy(narrow, target)
                        if columns[v] == 0:
                            lse[row_base + rows[v]] = value

    @cute.jit
    def merge_warps(
        self,
        out: cute.Tensor,
        lse: cute.Tensor,
        of_warps: cutlass.Constexpr,
        acc: cute.Tensor,
        weight: Float32,
        highest: Float32,
        row: Int32,
        unit: Int32,
        counts: cutlass.Boolean,
        member: Int32,
        sharers: Int32,
        group: Int32,
    ):
        """The end of `merge` where `sharers` warps share eight units: their sums through shared memory, and out."""
        lane = self.kept(cute.arch.lane_idx())  # so that what comes of it is not found before the loads
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        of_acc, of_highest, of_weight = of_warps
        if lane < 8:
            cute.autovec_copy(
                acc[None, 0], cute.make_tensor((of_acc.iterator + (warp_idx * 64 + lane * 8)).align(16), 8)
            )
            of_highest[lane, warp_idx] = highest
            of_weight[lane, warp_idx] = weight
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=COMBINE_GROUP)
        if cute.arch.make_warp_uniform(member) < 4 and counts:
            # A lane has two columns.
            eighth = lane // 4
            top = Float32(LOWEST)
            for w in cutlass.range_constexpr(COMBINE_GROUP // 32):
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
            at = remainder(unit, self.latent // 8) * 8
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
