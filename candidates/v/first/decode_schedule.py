"""Which CTA of decode attends to which keys: found in the kernel, by one warp, from the lengths on the device."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.choose import ROWS
from tsmla_kernels.sm90.warp_helpers import WarpHelpers, quotient, remainder

DESCRIPTOR_WORDS = 10


class DecodeSchedule(WarpHelpers):
    """The schedule of a decode kernel, which sets these.

    Attributes:
      heads, max_q_len, page_size, ragged, causal, invariant, tile_rows, max_tiles: as in choose.DecodeConfig.
      block: keys of a pipeline stage.
      overhead: what starting a piece costs, in key blocks: Q, the first keys' latency, the epilogue.
      least_payload: key blocks worth a cluster's while: each piece more is one more partial result to merge.
      descriptors: places in the ring of pieces' descriptions.
    """

    heads: int
    max_q_len: int
    page_size: int
    ragged: bool
    causal: bool
    invariant: bool
    tile_rows: int
    max_tiles: int
    block: int
    overhead: int
    least_payload: int
    descriptors: int

    @cute.jit
    def divide(self, a: Int32, b: Int32):
        """a // b for a >= 0 and b > 0. The compiler's own takes four times the instructions, and in code that runs once
        every instruction waits to be fetched."""
        inverse = cute.arch.rcp_approx(Float32(b))
        q = Int32(Float32(a) * inverse)
        q += Int32(Float32(a - q * b) * inverse)
        rest = a - q * b
        if rest < 0:
            q -= 1
        if rest >= b:
            q += 1
        return q

    @cute.jit
    def prefetch(self, array: cute.Tensor, offset: Int32):
        """The 128 bytes that element `offset` begins, into the L2 cache, if the array is so long."""
        if Int64(offset) < Int64(array.shape[0]) * array.shape[1]:
            cute.arch.prefetch((array.iterator + offset).to_llvm_ptr(), cache_level="L2")

    @cute.jit
    def request(self, r: Int32, seq_lens: cute.Tensor, cu_seqlens_q: cute.Tensor, width: Int32, all_rows: Int32):
        """(keys, first row, query rows, row tiles, key blocks) of request r."""
        # Clamped to what the table, the row tiles and `out` hold: a wrong length must not lead outside of them.
        keys = cutlass.min(cutlass.max(seq_lens[r], 0), width * self.page_size)
        blocks = cutlass.max(quotient(keys + self.block - 1, self.block), 1)
        first = r * (self.max_q_len * self.heads)
        rows = Int32(self.max_q_len * self.heads)
        tiles = Int32(self.max_tiles)
        if const_expr(self.ragged):
            first = cutlass.min(cutlass.max(cu_seqlens_q[r] * self.heads, 0), all_rows)
            rows = cutlass.min(cutlass.max(cu_seqlens_q[r + 1] * self.heads - first, 0), rows)
            rows = cutlass.min(rows, all_rows - first)
            tiles = quotient(rows + self.tile_rows - 1, self.tile_rows)
        return keys, first, rows, tiles, blocks

    @cute.jit
    def chunk_blocks(self, block_tables: cute.Tensor, seq_lens: cute.Tensor, partial_lse: cute.Tensor):
        """(key blocks of a piece, slots of a row tile) when batch_invariant."""
        slots = partial_lse.shape[0] // (seq_lens.shape[0] * self.max_tiles)
        table_blocks = quotient(block_tables.shape[1] * self.page_size + self.block - 1, self.block)
        return cutlass.max((table_blocks + slots - 1) // slots, 1), slots

    @cute.jit
    def span(self, blocks: Int32, chunk: Int32, fixed: Int32):
        """Length of a row tile on the schedule's line; `fixed` where all tiles take the same, 0 otherwise."""
        length = blocks + self.overhead
        if const_expr(self.invariant):
            length = blocks + self.overhead * ((blocks + chunk - 1) // chunk)
        if fixed > 0:
            length = fixed
        return length

    @cute.jit
    def begin_schedule(self, schedule: cutlass.Constexpr):
        """Find this cluster's share of the batch.

        The batch is laid out as a line of row tiles, request by request, each `overhead` + its key blocks long; every
        cluster takes an equal interval of it. Where whole tiles balance as well, each cluster takes whole tiles; where
        all tiles are of one length and fewer than the clusters, each is cut into as many equal pieces as there are
        clusters for it, so that no piece is a sliver.
        """
        block_tables, seq_lens, cu_seqlens_q, partial_lse, split_info, _, walk, parts, part, rank, all_rows = schedule
        lane = cute.arch.lane_idx()
        batch, width = seq_lens.shape[0], block_tables.shape[1]
        chunk = Int32(1)
        if const_expr(self.invariant):
            chunk, _ = self.chunk_blocks(block_tables, seq_lens, partial_lse)

        # The first 32 requests stay in registers: few batches have more, and what is read again is waited for again.
        total, units, longest = Int32(0), Int32(0), Int32(0)
        _, _, _, tiles, blocks = self.request(cutlass.min(lane, batch - 1), seq_lens, cu_seqlens_q, width, all_rows)
        if lane < batch:
            total, units, longest = tiles * self.span(blocks, chunk, Int32(0)), tiles, blocks
        for base in cutlass.range(32, batch, 32, unroll=4):
            # Loads without a branch, so that several are under way at once.
            r = cutlass.min(base + lane, batch - 1)
            _, _, _, tiles_there, blocks_there = self.request(r, seq_lens, cu_seqlens_q, width, all_rows)
            cost = tiles_there * self.span(blocks_there, chunk, Int32(0))
            if base + lane < batch:
                total += cost
                units += tiles_there
                longest = cutlass.max(longest, blocks_there)
        total = cute.arch.warp_redux_sync(total, "add")
        longest = cute.arch.warp_redux_sync(longest, "max")
        units = cute.arch.warp_redux_sync(units, "add") if const_expr(self.ragged) else batch * self.max_tiles
        payload = cutlass.max(self.divide(total + parts - 1, parts), self.least_payload)
        whole, fixed = Int32(0), Int32(0)
        if const_expr(not self.invariant):
            share = self.divide(units + parts - 1, parts)
            if share * (longest + self.overhead) <= payload + self.overhead:
                whole, fixed = Int32(1), Int32(1)
                payload = share
            elif units > 0 and units < parts and total == units * (longest + self.overhead):
                cuts = self.divide(parts, units)
                payload = cutlass.max(self.divide(longest + cuts - 1, cuts), self.least_payload)
                fixed = cuts * payload
        begin = part * payload

        # The row tile in which the interval begins.
        r, tile, start = batch, Int32(0), Int32(0)
        searching = Int32(1)
        if const_expr(not self.ragged and not self.invariant):
            if fixed > 0:
                # All requests have as many row tiles, and these one length.
                searching = Int32(0)
                unit = begin
                if whole == 0:
                    unit = self.divide(begin, fixed)
                r = unit // self.max_tiles
                tile = unit - r * self.max_tiles
                start = unit * fixed
        base = Int32(0)
        while searching == 1 and base < batch:
            cost, unit = Int32(0), Int32(1)
            if base + lane < batch:
                unit = self.span(blocks, chunk, fixed)
                cost = tiles * unit
            prefix = cost
            for step in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(prefix, offset=1 << step, mask_and_clamp=0)
                if lane >= (1 << step):
                    prefix += other
            before = cute.arch.popc(cute.arch.vote_ballot_sync(start + prefix <= begin))
            if before < 32:
                searching = Int32(0)
                r = base + before
                start += cute.arch.shuffle_sync(prefix - cost, before)
                unit = cute.arch.shuffle_sync(unit, before)
                tile = self.divide(begin - start, unit)
                start += tile * unit
            else:
                start += cute.arch.shuffle_sync(prefix, 31)
                base += 32
                _, _, _, tiles, blocks = self.request(
                    cutlass.min(base + lane, batch - 1), seq_lens, cu_seqlens_q, width, all_rows
                )
        if lane == 0:
            walk[0] = r
            walk[1] = tile
            walk[2] = start
            walk[3] = begin
            walk[4] = begin + payload
            walk[5] = whole
            walk[6] = Int32(-1)  # next chunk of the row tile; -1: not begun
            walk[7] = fixed
            if rank == 0:
                if const_expr(not self.invariant):
                    split_info[2 * part, 3] = 0
                    split_info[2 * part + 1, 3] = 0
        if const_expr(self.invariant and self.ragged):
            # Row tiles that a short query does not have: nobody else writes their entries.
            for at in cutlass.range(part * 32 + lane, batch, parts * 32, unroll=1):
                _, _, _, tiles_there, _ = self.request(at, seq_lens, cu_seqlens_q, width, all_rows)
                for t in cutlass.range(tiles_there, self.max_tiles, unroll=1):
                    split_info[parts + at * self.max_tiles + t, 3] = 0
        cute.arch.sync_warp()

    @cute.jit
    def next_piece(self, piece: Int32, schedule: cutlass.Constexpr):
        """Describe this cluster's next piece of work: some key blocks of one row tile, or none: the end."""
        (
            block_tables, seq_lens, cu_seqlens_q, partial_lse, split_info, descriptor, walk, parts, part, rank,
            all_rows,
        ) = schedule  # fmt: skip
        lane = cute.arch.lane_idx()
        batch, width = seq_lens.shape[0], block_tables.shape[1]
        cute.arch.sync_warp()
        r, tile, start, begin, end, whole, k = walk[0], walk[1], walk[2], walk[3], walk[4], walk[5], walk[6]
        fixed = walk[7]
        cute.arch.sync_warp()
        chunk, slots = Int32(1), Int32(1)
        if const_expr(self.invariant):
            chunk, slots = self.chunk_blocks(block_tables, seq_lens, partial_lse)
        # The start-up costs come first in a tile's length, where they are counted in it.
        lead = Int32(0)
        if const_expr(not self.invariant):
            if fixed == 0:
                lead = Int32(self.overhead)
        at = remainder(piece, self.descriptors)
        found = Int32(0)
        while found == 0 and r < batch and start + lead < end:
            keys, first, rows, tiles, blocks = self.request(r, seq_lens, cu_seqlens_q, width, all_rows)
            unit = self.span(blocks, chunk, fixed)
            b_begin, b_end = Int32(0), blocks
            slot = Int32(-1)
            row_base = first + tile * self.tile_rows
            rows_here = cutlass.min(rows - tile * self.tile_rows, self.tile_rows)
            leave = Int32(1)
            if tile < tiles:
                if const_expr(self.invariant):
                    chunks = (blocks + chunk - 1) // chunk
                    step = chunk + self.overhead
                    if k < 0:
                        k = (cutlass.max(begin - start, 0) + step - 1) // step
                    if k < chunks and start + k * step < end:
                        found = Int32(1)
                        leave = Int32(0)
                        b_begin = k * chunk
                        b_end = cutlass.min(b_begin + chunk, blocks)
                        first_slot = (r * self.max_tiles + tile) * slots
                        if chunks > 1:
                            slot = first_slot + k
                        if k == 0 and rank == 0 and lane == 0:
                            entry = parts + r * self.max_tiles + tile
                            count = chunks
                            if chunks == 1:
                                count = Int32(0)
                            split_info[entry, 0] = row_base
                            split_info[entry, 1] = rows_here
                            split_info[entry, 2] = first_slot
                            split_info[entry, 3] = count
                        k += 1
                else:
                    if whole == 0:
                        b_begin = cutlass.max(begin - start - lead, 0)
                        b_end = cutlass.min(end - start - lead, blocks)
                    if b_begin < b_end:
                        found = Int32(1)
                        if b_begin > 0:
                            slot = 2 * part
                        elif b_end < blocks:
                            slot = 2 * part + 1
            if found == 1:
                if lane == 0:
                    descriptor[0, at] = b_begin
                    descriptor[1, at] = b_end
                    descriptor[2, at] = keys
                    descriptor[3, at] = keys + 1 - rows // self.heads  # keys that the first query token sees
                    descriptor[4, at] = tile * self.tile_rows + rank * ROWS  # first row in its request
                    descriptor[5, at] = row_base + rank * ROWS  # first row of q and out
                    descriptor[6, at] = cutlass.min(rows_here - rank * ROWS, ROWS)  # rows that count
                    descriptor[7, at] = slot
                    descriptor[8, at] = r
                    q_rows = cutlass.min(rows_here, ROWS)
                    descriptor[9, at] = 1 + quotient(q_rows - 1, self.block)  # stages that Q takes
            if const_expr(not self.invariant):
                if slot >= 0 and rank == 0 and lane == 0:
                    # For `combine`. The clusters from `owner` on have one piece each.
                    owner = self.divide(start + lead, end - begin)
                    split_info[slot, 0] = row_base
                    split_info[slot, 1] = rows_here
                    split_info[slot, 2] = 2 * owner + 1
                    split_info[slot, 3] = self.divide(start + lead + blocks - 1, end - begin) - owner + 1
            if leave == 1:
                start += unit
                tile += 1
                k = Int32(-1)
                if tile >= tiles:
                    start -= (tile - tiles) * unit  # a request without queries has no length
                    tile = Int32(0)
                    r += 1
        if lane == 0:
            if found == 0:
                descriptor[0, at] = 0
                descriptor[1, at] = 0
            walk[0] = r
            walk[1] = tile
            walk[2] = start
            walk[6] = k
        cute.arch.sync_warp()
