"""Merging what several CTAs of decode found for the same rows: a second, small kernel."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.choose import ROWS
from tsmla_kernels.sm90.decode_schedule import DecodeSchedule
from tsmla_kernels.sm90.warp_helpers import LN_2, LOWEST, element, quotient, remainder

COMBINE_SPARE_BYTES = 100 << 10
COMBINE_THREADS = 512  # of a CTA, in two groups, each of which merges one row tile
COMBINE_PIECES = {32: 2, 16: 8}  # that a thread reads at once, by the bits of partial_out's elements
STORED, COLLECTED = 3, 5  # barriers of `attend`: the first of each of the values' warpgroups, that of both
THERE = 0x7B1D_96C4_E85A_F023  # a word of split_info where a piece is there: nothing that may lie there before
PATIENCE = 1 << 26  # looks at such a word, half a minute's: what will never come stops the kernel
PLAN, SCRATCH, FACTORS, LINES = 0, 1024, 9216, 17408  # bytes from the ring's begin, when its last keys are read
FACTORS_BYTES = 4096  # of one entry
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

        Each cluster of `attend` left word of the pieces that it made; here its CTAs merge an equal portion of those row
        tiles' outputs, so that nothing has to be searched for or shared out. When batch_invariant a row tile's portions
        go to one CTA, or to several where there are some to spare.
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
        group = cute.arch.make_warp_uniform(tidx // (COMBINE_THREADS // 2))
        entry = cute.make_rmem_tensor((4,), Int32)
        cute.arch.griddepcontrol_wait()
        if const_expr(self.invariant):
            groups = ctas * 2
            units = split_info.shape[0] - parts
            portions = cutlass.max(groups // units, 1)
            first_item = cta * 2 + group
            for item in cutlass.range(first_item, units * portions, groups, unroll=1):
                cute.autovec_copy(split_info[parts + item // portions, None], entry)
                self.merge(
                    partial_out, partial_lse, out, lse, of_warps, entry, Int32(0), entry[1], item % portions, portions,
                    Int32(0), 1, group,
                )  # fmt: skip
        else:
            part, rank = quotient(cta, self.cluster), remainder(cta, self.cluster)
            # The piece that ends a row tile and the one that starts another: a group each, or both groups for the one.
            start = cute.make_rmem_tensor((4,), Int32)
            cute.autovec_copy(split_info[2 * part, None], entry)
            cute.autovec_copy(split_info[2 * part + 1, None], start)
            portion, portions = part - quotient(entry[2], 2), entry[3]
            if (entry[3] == 0) or (start[3] > 0 and group == 1):
                portion, portions = Int32(0), start[3]
            member, members = Int32(0), Int32(1)
            if entry[3] == 0 or start[3] == 0:
                member, members = group, Int32(2)
            if (entry[3] == 0) or (start[3] > 0 and group == 1):
                for i in cutlass.range_constexpr(4):
                    entry[i] = start[i]
            rows = cutlass.min(entry[1] - rank * ROWS, ROWS)
            self.merge(
                partial_out, partial_lse, out, lse, of_warps, entry, rank * ROWS, rows, portion, portions, member,
                members, group,
            )  # fmt: skip

    # ---- by the values' warpgroups of `attend`

    @cute.jit
    def place_in_grid(self):
        """(thread, cluster, CTA of it, half of the columns): found where they are wanted, for registers are lacking."""
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
            first, count = self.first_and_count(shared, slot - 2 * part)
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
    def words_at(self, address: Int32, count: cutlass.Constexpr[int], dtype: cutlass.Constexpr = Int32):
        """Shared memory at an address."""
        return cute.make_tensor(
            cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=min(16, 4 * count)),
            cute.make_layout(count),
        )

    @cute.jit
    def collect(self, merged: cutlass.Constexpr):
        """Merge this CTA's portions of the row tiles that its cluster shares with others, when all pieces are there.

        Every cluster that has a piece of a row tile merges an equal portion of its output, so that nothing has to be
        searched for or shared out. Each clears the words that it was told by, for the next launch. All of the portions'
        lines come to shared memory at once; meanwhile the pieces' factors are found.
        """
        pieces, split_info, shared, ring, parts = merged
        partial_out, partial_lse, out, lse = pieces
        tidx, part, rank, half = self.place_in_grid()
        t = tidx - 128
        _, ends = self.first_and_count(shared, 0)
        _, starts = self.first_and_count(shared, 1)
        units_of_row = self.latent // 8
        ring_at = self.uniform(ring.toint())
        if ends + starts > 0:
            if t < 2:
                # The portion of the piece that ends a row tile, and of that which starts another.
                plan = self.words_at(ring_at + PLAN + t * 32, 8)
                both = shared[2, t]
                first, count = both & 0xFFFF, both >> 16
                rows = cutlass.min(shared[1, t] - rank * ROWS, ROWS)
                here, begin = Int32(0), Int32(0)
                if count > 0 and rows > 0:
                    here = (self.divide(rows * units_of_row - 1, count) + 8) & -8  # in eights: 128 bytes of a line
                    begin = (part - quotient(first, 2)) * here
                    here = cutlass.max(cutlass.min(here, rows * units_of_row - begin), 0)
                row = quotient(begin, units_of_row)
                plan[0], plan[1], plan[2], plan[3] = count, first, begin, here
                plan[4] = row
                plan[5] = quotient(begin + here - 1, units_of_row) - row + 1
                plan[6] = shared[0, t] + rank * ROWS
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
            cute.arch.barrier(barrier_id=COLLECTED, number_of_threads=256)
            lines_at = ring_at + LINES
            for e in cutlass.range(2, unroll=1):
                plan = self.words_at(ring_at + PLAN + e * 32, 8)
                count, first = self.uniform(plan[0]), self.uniform(plan[1])
                begin, here = self.uniform(plan[2]), self.uniform(plan[3])
                if here > 0:
                    self.fetch(partial_out, lines_at, first, count, begin, here, rank, t)
                    lines_at += here * count * 16
            for e in cutlass.range(2, unroll=1):
                plan = self.words_at(ring_at + PLAN + e * 32, 8)
                if self.uniform(plan[3]) > 0:
                    self.weigh(partial_lse, lse, plan, ring_at + FACTORS + e * FACTORS_BYTES, rank, t)
            cute.arch.inline_ptx("cp.async.wait_all;")
            cute.arch.barrier(barrier_id=COLLECTED, number_of_threads=256)
            lines_at = ring_at + LINES
            for e in cutlass.range(2, unroll=1):
                plan = self.words_at(ring_at + PLAN + e * 32, 8)
                count, here = self.uniform(plan[0]), self.uniform(plan[3])
                if here > 0:
                    self.sum(out, plan, lines_at, ring_at + FACTORS + e * FACTORS_BYTES, ring_at + SCRATCH, t)
                    lines_at += here * count * 16

    @cute.jit
    def spread_of(self, here: Int32):
        """How many of 256 threads have a unit each, as a power of 2; the others take other pieces of the same units."""
        return cutlass.min(cutlass.max(32 - Int32(cute.arch.clz(here - 1)), 3), 8)

    @cute.jit
    def fetch(
        self,
        partial_out: cute.Tensor,
        lines_at: Int32,
        first: Int32,
        count: Int32,
        begin: Int32,
        here: Int32,
        rank: Int32,
        t: Int32,
    ):
        """Ask for a portion's lines: [piece, unit] of 16 bytes from lines_at on."""
        bits = self.spread_of(here)
        share, member, u = Int32(256) >> bits, t >> bits, t & ((Int32(1) << bits) - 1)
        for base in cutlass.range(0, count, share, unroll=1):
            i = base + member
            source = self.partial_row(self.slot(first, i), rank * ROWS) * self.latent + (begin + u) * 8
            for c in cutlass.range(0, here, Int32(1) << bits, unroll=1):
                if i < count and c + u < here:
                    cute.arch.inline_ptx(
                        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
                        read_only_args=[
                            lines_at + (i * here + c + u) * 16, element(partial_out, source + c * 8, 16).toint()
                        ],
                    )  # fmt: skip

    @cute.jit
    def weigh(
        self, partial_lse: cute.Tensor, lse: cute.Tensor, plan: cute.Tensor, factors_at: Int32, rank: Int32, t: Int32
    ):
        """What a portion's pieces are multiplied by: [half of the columns, row, piece] from factors_at on; and lse."""
        count, first, begin, here = (self.uniform(plan[i]) for i in range(4))
        first_row, rows, row_base = (self.uniform(plan[i]) for i in range(4, 7))
        bits = cutlass.min(32 - Int32(cute.arch.clz(count - 1)), 5)
        together = Int32(1) << bits  # lanes that share a row
        j = t & (together - 1)
        for base in cutlass.range(0, rows, Int32(256) >> bits, unroll=1):
            row = base + (t >> bits)
            counts = row < rows
            row = cutlass.min(row, rows - 1)
            at = rank * ROWS + first_row + row
            top = Float32(LOWEST)
            for p in cutlass.range(0, count, together, unroll=1):
                values = self.values_of(partial_lse, first, p + j, count, at)
                value = values[0]
                cute.arch.prefetch((values.iterator + self.tile_rows).to_llvm_ptr(), cache_level="L1")
                cute.arch.prefetch((values.iterator + 2 * self.tile_rows).to_llvm_ptr(), cache_level="L1")
                if p + j < count:
                    top = cute.arch.fmax(top, value)
            step = Int32(1)
            while step < together:
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=step))
                step *= 2
            total = Float32(0.0)
            for p in cutlass.range(0, count, together, unroll=1):
                value = self.values_of(partial_lse, first, p + j, count, at)[0]
                if p + j < count:
                    total += cute.math.exp2(value - top, fastmath=True)
            step = Int32(1)
            while step < together:
                total += cute.arch.shuffle_sync_bfly(total, offset=step)
                step *= 2
            inverse, found = Float32(0.0), -Float32.inf
            if total > 0.0 or total != total:
                inverse = cute.arch.rcp_approx(total)
                found = (top + cute.math.log2(total, fastmath=True)) * LN_2
            for p in cutlass.range(0, count, together, unroll=1):
                values = self.values_of(partial_lse, first, p + j, count, at)
                factor = cute.math.exp2(values[0] - top, fastmath=True) * inverse
                if counts and p + j < count:
                    for h in cutlass.range_constexpr(2):
                        place = self.words_at(factors_at + ((h * rows + row) * count + p + j) * 4, 1, Float32)
                        place[0] = factor * values[1 + h]
            unit = (first_row + row) * (self.latent // 8)
            if counts and j == 0 and unit >= begin and unit < begin + here:
                lse[row_base + first_row + row] = found

    @cute.jit
    def values_of(self, partial_lse: cute.Tensor, first: Int32, i: Int32, count: Int32, row: Int32):
        """(lse, factor of either half) of a row of piece i, or of the last."""
        slot = self.slot(first, cutlass.min(i, count - 1))
        return cute.make_tensor(
            element(partial_lse, self.partial_row(3 * slot, row), 4), cute.make_layout(3, stride=self.tile_rows)
        )

    @cute.jit
    def sum(self, out: cute.Tensor, plan: cute.Tensor, lines_at: Int32, factors_at: Int32, scratch: Int32, t: Int32):
        """Add up a portion's lines by their factors, into `out`."""
        count, begin, here = self.uniform(plan[0]), self.uniform(plan[2]), self.uniform(plan[3])
        first_row, rows, row_base = (self.uniform(plan[i]) for i in range(4, 7))
        units_of_row = self.latent // 8
        bits = self.spread_of(here)
        share, member, u = Int32(256) >> bits, t >> bits, t & ((Int32(1) << bits) - 1)
        acc = cute.make_rmem_tensor((8,), Float32)
        line = cute.make_rmem_tensor((8,), self.partial_dtype)
        for c in cutlass.range(0, here, Int32(1) << bits, unroll=1):
            unit = cutlass.min(c + u, here - 1)
            place = begin + unit
            row, column = quotient(place, units_of_row) - first_row, remainder(place, units_of_row)
            factor_at = factors_at + (quotient(column, units_of_row // 2) * rows + row) * (count * 4)
            acc.fill(0.0)
            for base in cutlass.range(0, count, share, unroll=2):
                i = cutlass.min(base + member, count - 1)
                factor = self.words_at(factor_at + i * 4, 1, Float32)[0]
                if base + member >= count:
                    factor = Float32(0.0)
                source = cute.make_ptr(
                    self.partial_dtype, lines_at + (i * here + unit) * 16, cute.AddressSpace.smem, assumed_align=16
                )
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(8)), line)
                for k in cutlass.range_constexpr(8):
                    acc[k] += factor * line[k].to(Float32)
            if share > 1:
                mine = self.words_at(scratch + t * 32, 8, Float32)
                if member > 0:
                    cute.autovec_copy(acc, mine)
                cute.arch.barrier(barrier_id=COLLECTED, number_of_threads=256)
                if member == 0:
                    for m in cutlass.range(1, share, unroll=1):
                        theirs = self.words_at(scratch + ((m << bits) + u) * 32, 8, Float32)
                        for k in cutlass.range_constexpr(8):
                            acc[k] += theirs[k]
                cute.arch.barrier(barrier_id=COLLECTED, number_of_threads=256)
            narrow = cute.make_rmem_tensor((8,), self.out_dtype)
            for k in cutlass.range_constexpr(8):
                narrow[k] = acc[k].to(self.out_dtype)
            if const_expr(self.swapped):
                self.transpose_quad(cute.recast_tensor(narrow, Int32), t % 4)
            if member == 0 and c + u < here:
                target = element(out, Int64(row_base + first_row + row) * self.latent + column * 8, 16)
                cute.autovec_copy(narrow, cute.make_tensor(target, cute.make_layout(8)))

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
        part: Int32,
        parts: Int32,
        group: Int32,
    ):
        """Part `part` of `parts` of one portion of `rows` rows of a row tile: each piece's result weighted by exp2(its
        lse), over the weights.

        A thread has a unit, 8 columns of a row, and eight lanes 128 bytes of a piece; where there are threads to spare,
        several share a unit and take every so many pieces: four of a warp, and further warps. A running maximum keeps
        the weights at most 1.
        """
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
            threads = COMBINE_THREADS // 2
            unroll = COMBINE_PIECES[self.partial_dtype.width]
            t = tidx % threads
            # Units worked on at once: 2 ** bits.
            bits = Int32((threads // COMBINE_SHARE).bit_length() - 1)
            if const_expr(not self.invariant):
                bits = 32 - Int32(cute.arch.clz(here - 1))
                bits = cutlass.min(cutlass.max(bits, 3), threads.bit_length() - 1)
            spread, share = Int32(1) << bits, Int32(threads) >> bits
            member = (t >> 3) & (share - 1)
            eight = t >> (threads.bit_length() + 2 - bits)
            acc = cute.make_rmem_tensor((8,), Float32)
            lines = cute.make_rmem_tensor((8, unroll), self.partial_dtype)
            weights = cute.make_rmem_tensor((unroll,), Float32)
            scales = cute.make_rmem_tensor((unroll,), Float32)
            for base in cutlass.range(0, here, spread, unroll=1):
                unit = base + eight * 8 + t % 8
                counts = unit < here
                unit = begin + cutlass.min(unit, here - 1)
                row, column = first_row + quotient(unit, units_of_row), remainder(unit, units_of_row) * 8
                scale_of = 1 + quotient(column, self.latent // 2)
                acc.fill(0.0)
                weight, highest = Float32(0.0), Float32(LOWEST)
                for step in cutlass.range(0, count, unroll * share, unroll=1):
                    for u in cutlass.range_constexpr(unroll):
                        i = step + u * share + member
                        slot = self.slot(first, cutlass.min(i, count - 1))
                        values = cute.make_tensor(
                            element(partial_lse, self.partial_row(3 * slot, row), 4),
                            cute.make_layout(3, stride=self.tile_rows),
                        )
                        weights[u], scales[u] = values[0], values[scale_of]
                        if i >= count:
                            weights[u] = -Float32.inf
                        line = cute.make_tensor(
                            element(partial_out, self.partial_row(slot, row) * self.latent + column, 16),
                            cute.make_layout(8),
                        )
                        cute.autovec_copy(line, lines[None, u])
                    cute.arch.sync_warp()  # keeps the compiler from waiting for one load before it issues the next
                    top = highest
                    for u in cutlass.range_constexpr(unroll):
                        top = cute.arch.fmax(top, weights[u])
                    factor = cute.math.exp2(highest - top, fastmath=True)
                    highest = top
                    weight = weight * factor
                    for c in cutlass.range_constexpr(8):
                        acc[c] = acc[c] * factor
                    for u in cutlass.range_constexpr(unroll):
                        w = cute.math.exp2(weights[u] - top, fastmath=True)
                        weight += w
                        w = w * scales[u]
                        for c in cutlass.range_constexpr(8):
                            acc[c] += w * lines[c, u].to(Float32)
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
                if const_expr(not self.invariant):
                    if share > 4:
                        self.merge_warps(
                            out, lse, of_warps, acc, weight, highest, row_base + row, begin + eight * 8, counts, member,
                            share // 4, group,
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
                        self.transpose_quad(cute.recast_tensor(narrow, Int32), t % 4)
                    if counts and member == 0:
                        target = cute.make_tensor(
                            element(out, Int64(row_base + row) * self.latent + column, 16),
                            cute.make_layout(8),
                        )
                        cute.autovec_copy(narrow, target)
                        if column == 0:
                            lse[row_base + row] = value

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
            cute.autovec_copy(acc, cute.make_tensor((of_acc.iterator + (warp_idx * 64 + lane * 8)).align(16), 8))
            of_highest[lane, warp_idx] = highest
            of_weight[lane, warp_idx] = weight
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=COMBINE_THREADS // 2)
        if cute.arch.make_warp_uniform(member) < 4 and counts:
            # A lane has two columns.
            eighth = lane // 4
            top = Float32(LOWEST)
            for w in cutlass.range_constexpr(COMBINE_THREADS // 64):
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
