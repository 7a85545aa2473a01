"""Which CTA of decode attends to which keys: found in the kernel, by one warp, from the lengths on the device."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.decode.config import ROWS
from tsmla_kernels.sm90.warp import WarpHelpers, quotient, remainder

DESCRIPTOR_WORDS = 10
LINE, WHOLE, CUT, PACKED = 0, 1, 2, 3  # how the batch is shared out: see `share`
LONG = 1 << 16  # keys of a cluster, from which on none is left without work for the sake of lanes
LEAST_PACKED = 32  # key blocks of a cluster, at least, for which requests are put in order
# Beside an entry's number of pieces: its first piece's cluster, or its last one's, has another row tile to merge too.
FIRST_BUSY, LAST_BUSY = 1 << 16, 1 << 17
SORTED = 128  # requests, at most, that are put in order by their length: so that their numbers are bytes
ITEMS = 16  # of them, at most, that a cluster takes
# Where a cluster is in its share of the batch; behind that its requests, if they are given out by their length, or the
# number of lanes.
WALK_WORDS = 8 + ITEMS // 4


class DecodeSchedule(WarpHelpers):
    """The schedule of a decode kernel, which sets these.

    Attributes:
      heads, max_q_len, page_size, ragged, causal, invariant, tile_rows, max_tiles: as in choose.DecodeConfig.
      block: keys of a pipeline stage. q_rows: query rows that one takes.
      overhead: what starting a piece costs, in key blocks: Q, the first keys' latency, the epilogue.
      least_payload: key blocks worth a cluster's while: each piece more is one more partial result to merge.
      descriptors: places in the ring of pieces' descriptions.
      few: whether partial results are small.
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
    q_rows: int
    overhead: int
    least_payload: int
    descriptors: int
    few: bool

    @property
    def alike(self) -> bool:
        """Whether all requests have as many query rows, and cuts may depend on the batch."""
        return not self.ragged and not self.invariant

    @property
    def side_by_side(self) -> bool:
        """Whether the row tiles of a request may be laid out in lanes."""
        return self.alike and self.max_tiles > 1

    @property
    def packs(self) -> bool:
        """Whether requests may be given out by their length."""
        return self.alike and self.max_tiles == 1

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
    def numbers(self, r: Int32, seq_lens: cute.Tensor, cu_seqlens_q: cute.Tensor):
        """What the operands say of request r: its length and, if ragged, its first query token and the next's."""
        begin, end = Int32(0), Int32(0)
        if const_expr(self.ragged):
            begin, end = cu_seqlens_q[r], cu_seqlens_q[r + 1]
        return seq_lens[r], begin, end

    @cute.jit
    def early_numbers(self, seq_lens: cute.Tensor, cu_seqlens_q: cute.Tensor):
        """The numbers of the lane's request of the first 32, asked for at once and by all warps: a branch would have to
        wait for the answer."""
        return self.numbers(cutlass.min(cute.arch.lane_idx(), seq_lens.shape[0] - 1), seq_lens, cu_seqlens_q)

    @cute.jit
    def request(self, r: Int32, numbers: cutlass.Constexpr, width: Int32, all_rows: Int32):
        """(keys, first row, query rows, row tiles, key blocks) of request r, of which `numbers` are."""
        length, begin, end = numbers
        # Clamped to what the table, the row tiles and `out` hold: a wrong length must not lead outside of them.
        keys = cutlass.min(cutlass.max(length, 0), width * self.page_size)
        blocks = cutlass.max(quotient(keys + self.block - 1, self.block), 1)
        first = r * (self.max_q_len * self.heads)
        rows = Int32(self.max_q_len * self.heads)
        tiles = Int32(self.max_tiles)
        if const_expr(self.ragged):
            first = cutlass.min(cutlass.max(begin * self.heads, 0), all_rows)
            rows = cutlass.min(cutlass.max(end * self.heads - first, 0), rows)
            rows = cutlass.min(rows, all_rows - first)
            tiles = quotient(rows + self.tile_rows - 1, self.tile_rows)
        return keys, first, rows, tiles, blocks

    @cute.jit
    def lane(self, lanes: Int32, parts: Int32, part: Int32):
        """(clusters of a lane, this cluster's lane), where the row tiles of a request are laid out side by side."""
        columns, lane = parts, Int32(0)
        if const_expr(self.side_by_side):
            if lanes > 1:
                columns = parts // self.max_tiles
                lane = self.divide(part, columns)
        return columns, lane

    @cute.jit
    def sort(self, batch: Int32, order: cute.Tensor):
        """Put `order`, keys that all differ, in descending order: each goes where as many are greater."""
        lane = cute.arch.lane_idx()
        cute.arch.sync_warp()
        mine = cute.make_rmem_tensor((SORTED // 32,), Int32)
        rank = cute.make_rmem_tensor((SORTED // 32,), Int32)
        for k in cutlass.range_constexpr(SORTED // 32):
            mine[k], rank[k] = order[lane + 32 * k], Int32(0)
        for j in cutlass.range(batch, unroll=4):
            other = order[j]
            for k in cutlass.range_constexpr(SORTED // 32):
                if other > mine[k]:
                    rank[k] += 1
        cute.arch.sync_warp()
        for k in cutlass.range_constexpr(SORTED // 32):
            if lane + 32 * k < batch:
                order[rank[k]] = mine[k]
        cute.arch.sync_warp()

    @cute.jit
    def sorted_blocks(self, order: cute.Tensor, i: Int32, batch: Int32):
        """Key blocks of the request that is the i-th by length; 0 if there are not so many."""
        blocks = Int32(0)
        if i < batch:
            blocks = quotient(order[i], SORTED)
        return blocks

    @cute.jit
    def cut(self, longer: Int32, shorter: Int32):
        """Where the longer of two requests is cut, in blocks, so that of two clusters one takes what is before, the
        other the rest and the shorter one. Not at all, if the rest would be less than what it costs to merge it."""
        at = cutlass.min(quotient(longer + shorter + self.overhead + 1, 2), longer)
        if longer - at <= self.overhead:
            at = longer
        return at

    @cute.jit
    def packed(self, batch: Int32, columns: Int32, order: cute.Tensor):
        """The greatest share of a cluster, if requests are given out by their length: see `share`."""
        lane = cute.arch.lane_idx()
        worst = Int32(0)
        if batch <= columns:
            for pair in cutlass.range(lane, quotient(columns + 1, 2), 32, unroll=1):
                longer = self.sorted_blocks(order, pair, batch)
                shorter = self.sorted_blocks(order, columns - 1 - pair, batch)
                at = longer
                rest = shorter + self.overhead
                if columns - 1 - pair > pair:
                    at = self.cut(longer, shorter)
                    if at < longer:
                        rest += longer - at + self.overhead
                worst = cutlass.max(worst, cutlass.max(at + self.overhead, rest))
        else:
            for column in cutlass.range(lane, columns, 32, unroll=1):
                load, turn = Int32(0), Int32(0)
                for first in cutlass.range(0, batch, columns, unroll=1):
                    i = first + column
                    if turn == 1:
                        i = first + columns - 1 - column
                    if i < batch:
                        load += quotient(order[i], SORTED) + self.overhead
                    turn ^= 1
                worst = cutlass.max(worst, load)
        return cute.arch.warp_redux_sync(worst, "max")

    @cute.jit
    def chunk_blocks(self, block_tables: cute.Tensor, seq_lens: cute.Tensor, partial_lse: cute.Tensor):
        """(key blocks of a piece, slots of a row tile) when batch_invariant."""
        slots = partial_lse.shape[0] // (seq_lens.shape[0] * self.max_tiles)
        table_blocks = quotient(block_tables.shape[1] * self.page_size + self.block - 1, self.block)
        return cutlass.max((table_blocks + slots - 1) // slots, 1), slots

    @cute.jit
    def on_line(self, tiles: Int32, lanes: Int32):
        """Row tiles of a request that follow each other on the schedule's line."""
        if const_expr(self.side_by_side):
            if lanes > 1:
                tiles = Int32(1)
        return tiles

    @cute.jit
    def span(self, blocks: Int32, chunk: Int32, way: Int32, fixed: Int32, payload: Int32):
        """Length of a row tile on the schedule's line; `fixed` where all tiles take the same, 0 otherwise."""
        length = blocks + self.overhead
        if const_expr(self.invariant):
            length = blocks + self.overhead * ((blocks + chunk - 1) // chunk)
        else:
            if way == CUT:
                length = self.divide(blocks + payload - 1, payload) * payload
            if fixed > 0:
                length = fixed
        return length

    @cute.jit
    def pieces(self, tiles: Int32, blocks: Int32, payload: Int32, batch: Int32):
        """Pieces of at most `payload` blocks that a batch of up to 32 requests, a lane's of `tiles` tiles and `blocks`
        blocks each, makes."""
        count = Int32(0)
        if cute.arch.lane_idx() < batch:
            count = tiles * self.divide(blocks + payload - 1, payload)
        return cute.arch.warp_redux_sync(count, "add")

    @cute.jit
    def ids(self, walk: cute.Tensor):
        """A cluster's requests, by their number, or -1, where requests are given out by their length."""
        return cute.make_tensor(cute.recast_ptr(walk.iterator + 8, dtype=cutlass.Int8), cute.make_layout(ITEMS))

    @cute.jit
    def note(self, column: Int32, columns: Int32, batch: Int32, order: cute.Tensor, walk: cute.Tensor):
        """Note this cluster's requests, before the ring's first stage, where `order` lies, is filled."""
        lane = cute.arch.lane_idx()
        ids = self.ids(walk)
        at = lane * columns + column
        if remainder(lane, 2) == 1:
            at = (lane + 1) * columns - 1 - column
        if batch <= columns:
            at = quotient(column, 2)
            if lane > 0:
                at = columns - 1 - at
                if lane > 1 or at <= quotient(column, 2):
                    at = batch
        if lane < ITEMS:
            r = Int32(-1)
            if at < batch:
                r = SORTED - 1 - remainder(order[at], SORTED)
            ids[lane] = cutlass.Int8(r)
        cute.arch.sync_warp()
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def begin_schedule(self, schedule: cutlass.Constexpr, early: cutlass.Constexpr):
        """Find this cluster's share of the batch, with `early` of early_numbers."""
        block_tables, seq_lens, cu_seqlens_q, _, split_info, _, walk, parts, part, rank, all_rows, _ = schedule
        lane = cute.arch.lane_idx()
        batch, width = seq_lens.shape[0], block_tables.shape[1]
        r, tile, start, begin, payload = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        way, fixed, lanes = Int32(CUT), Int32(0), Int32(self.max_tiles)
        alone = cutlass.Boolean(False)
        if const_expr(self.alike):
            # One request, so that there is nothing to compare: it may be short, and the less code the sooner it begins.
            _, _, _, _, blocks = self.request(Int32(0), early, width, all_rows)
            alone = batch == 1 and self.lanes_fit(blocks, parts)
            if alone:
                columns, tile_lane = self.lane(lanes, parts, part)
                payload = cutlass.max(self.divide(blocks + columns - 1, columns), self.least_payload)
                begin, fixed = (part - tile_lane * columns) * payload, columns * payload
                if tile_lane >= lanes:
                    r = batch
        if not alone:
            r, tile, start, begin, payload, way, fixed, lanes = self.share(schedule, early)
        if lane == 0:
            walk[0] = r
            walk[1] = tile
            walk[2] = start
            walk[3] = begin
            walk[4] = begin + payload
            walk[5] = way
            walk[6] = Int32(-1)  # next chunk of the row tile; -1: not begun
            walk[7] = fixed
            if const_expr(self.side_by_side):
                walk[8] = lanes
            if rank == 0:
                if const_expr(not self.invariant):
                    split_info[2 * part, 3] = 0
                    split_info[2 * part + 1, 3] = 0
        if const_expr(self.invariant and self.ragged):
            # Row tiles that a short query does not have: nobody else writes their entries.
            for at in cutlass.range(part * 32 + lane, batch, parts * 32, unroll=1):
                _, _, _, tiles_there, _ = self.request(at, self.numbers(at, seq_lens, cu_seqlens_q), width, all_rows)
                for t in cutlass.range(tiles_there, self.max_tiles, unroll=1):
                    split_info[parts + at * self.max_tiles + t, 3] = 0
        cute.arch.sync_warp()

    @cute.jit
    def lanes_fit(self, total: Int32, parts: Int32):
        """Whether row tiles are laid out side by side, in lanes of a line of `total` blocks each.

        Clusters that walk the same keys at the same time read them from memory once: that is worth as much as a
        sixteenth of the clusters, if not in a long run, in which the arithmetic is the bound.
        """
        fit = cutlass.Boolean(True)
        if const_expr(self.side_by_side):
            each = parts // self.max_tiles
            left = parts - each * self.max_tiles
            fit = left == 0 or (left * 16 <= parts and total <= each * (LONG // self.block))
        return fit

    @cute.jit
    def share(self, schedule: cutlass.Constexpr, early: cutlass.Constexpr):
        """This cluster's share of a batch: (request, row tile, where that begins on the line, where the share does, its
        length, way, length of all tiles or 0, lanes).

        The batch is laid out as a line of row tiles, request by request, each `overhead` + its key blocks long, or as
        one line for each row tile of a request (`lanes`).
        - LINE: every cluster of the line takes an equal interval of it.
        As pieces have to be merged, there are better ways where they balance nearly as well, within a sixteenth:
        - WHOLE: each cluster takes as many whole tiles.
        - CUT: each cluster takes one piece, and all but a tile's last are of one length.
        - PACKED: whole requests in the order of their length, given out to the clusters from the first to the last,
          then from the last to the first, and so on. Where there are no more requests than clusters, the i-th longest
          and the i-th shortest (of as many as clusters: those that there are not have no length) go to two clusters,
          which cut the longer one.
        """
        block_tables, seq_lens, cu_seqlens_q, partial_lse, _, _, walk, parts, part, _, all_rows, order = schedule
        lane = cute.arch.lane_idx()
        batch, width = seq_lens.shape[0], block_tables.shape[1]
        chunk = Int32(1)
        if const_expr(self.invariant):
            chunk, _ = self.chunk_blocks(block_tables, seq_lens, partial_lse)

        # The first 32 requests stay in registers: few batches have more, and what is read again is waited for again.
        total, units, longest = Int32(0), Int32(0), Int32(0)
        lanes = Int32(self.max_tiles) if const_expr(self.side_by_side) else Int32(1)
        none = Int32(0)
        _, _, _, tiles, blocks = self.request(cutlass.min(lane, batch - 1), early, width, all_rows)
        tiles = self.on_line(tiles, lanes)
        if lane < batch:
            total, units, longest = tiles * self.span(blocks, chunk, none, none, none), tiles, blocks
        for base in cutlass.range(32, batch, 32, unroll=4):
            # Loads without a branch, so that several are under way at once.
            r = cutlass.min(base + lane, batch - 1)
            numbers = self.numbers(r, seq_lens, cu_seqlens_q)
            _, _, _, tiles_there, blocks_there = self.request(r, numbers, width, all_rows)
            tiles_there = self.on_line(tiles_there, lanes)
            if const_expr(self.packs):
                if base + lane < SORTED:
                    order[base + lane] = blocks_there * SORTED + (SORTED - 1 - base - lane)
            cost = tiles_there * self.span(blocks_there, chunk, none, none, none)
            if base + lane < batch:
                total += cost
                units += tiles_there
                longest = cutlass.max(longest, blocks_there)
        total = cute.arch.warp_redux_sync(total, "add")
        longest = cute.arch.warp_redux_sync(longest, "max")
        units = cute.arch.warp_redux_sync(units, "add") if const_expr(self.ragged) else batch * tiles
        if const_expr(self.side_by_side):
            if not self.lanes_fit(total, parts):
                lanes, tiles = Int32(1), Int32(self.max_tiles)
                total, units = total * tiles, units * tiles
        columns, tile_lane = self.lane(lanes, parts, part)
        column = part - tile_lane * columns
        payload = cutlass.max(self.divide(total + columns - 1, columns), self.least_payload)
        way, fixed = Int32(LINE), Int32(0)
        if const_expr(not self.invariant):
            slack = quotient(payload, 16)
            share = self.divide(units + columns - 1, columns)
            if share * (longest + self.overhead) <= payload + self.overhead + slack:
                way, fixed = Int32(WHOLE), Int32(1)
                payload = share
            else:
                if units > 0 and units < columns:
                    cuts = self.divide(columns, units)
                    piece = cutlass.max(self.divide(longest + cuts - 1, cuts), self.least_payload)
                    if piece <= payload + cutlass.min(slack, 8):
                        way, payload, fixed = Int32(CUT), piece, cuts * piece
                if way == LINE and batch <= 32:
                    # Two pieces in one cluster cost less than these blocks.
                    most = payload + cutlass.min(quotient(payload, 32) if const_expr(self.few) else slack, 3)
                    if self.pieces(tiles, blocks, most, batch) <= columns:
                        least = cutlass.max(payload - self.overhead - 1, self.least_payload)
                        while least < most:
                            middle = quotient(least + most, 2)
                            if self.pieces(tiles, blocks, middle, batch) <= columns:
                                most = middle
                            else:
                                least = middle + 1
                        way, payload = Int32(CUT), most
                if const_expr(self.packs):
                    # Not for little work: the order takes a microsecond or two to find.
                    sortable = batch <= cutlass.min(ITEMS * columns, SORTED) and 2 * batch > columns
                    if way == LINE and sortable and payload >= LEAST_PACKED and longest < (1 << 24):
                        order[lane] = blocks * SORTED + (SORTED - 1 - lane)
                        self.sort(batch, order)
                        if self.packed(batch, columns, order) <= payload + self.overhead + slack:
                            way, fixed = Int32(PACKED), Int32(1)
        begin = column * payload

        # The row tile in which the interval begins.
        r, tile, start = batch, Int32(0), Int32(0)
        searching = Int32(1)
        if tile_lane >= lanes:
            searching = Int32(0)  # a cluster that is left over
        if const_expr(self.alike):
            if searching == 1 and fixed > 0:
                # All requests have as many row tiles, and these one length.
                searching = Int32(0)
                unit = begin
                if way == CUT:
                    unit = self.divide(begin, fixed)
                r = unit
                if const_expr(self.max_tiles > 1):
                    if lanes == 1:
                        r = unit // self.max_tiles
                        tile = unit - r * self.max_tiles
                start = unit * fixed
                if const_expr(self.packs):
                    if way == PACKED:
                        r, begin, start = Int32(0), Int32(0), Int32(0)
                        payload = cutlass.max(self.divide(batch - 1, columns) + 1, 2)
                        self.note(column, columns, batch, order, walk)
        base = Int32(0)
        while searching == 1 and base < batch:
            cost, unit = Int32(0), Int32(1)
            if base + lane < batch:
                unit = self.span(blocks, chunk, way, fixed, payload)
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
                next_r = cutlass.min(base + lane, batch - 1)
                numbers = self.numbers(next_r, seq_lens, cu_seqlens_q)
                _, _, _, tiles, blocks = self.request(next_r, numbers, width, all_rows)
                tiles = self.on_line(tiles, lanes)
        return r, tile, start, begin, payload, way, fixed, lanes

    @cute.jit
    def item(self, i: Int32, column: Int32, columns: Int32, batch: Int32, blocks: Int32, schedule: cutlass.Constexpr):
        """(first block, the block after its last) of a cluster's i-th piece where requests are given out by their
        length, of a request of so many blocks. 0, 0: there is none, but there may be a next."""
        block_tables, seq_lens, cu_seqlens_q, _, _, _, walk, _, _, _, all_rows, _ = schedule
        ids = self.ids(walk)
        begin, end = Int32(0), blocks
        if ids[i] < 0:
            end = Int32(0)
        elif batch <= columns:
            pair, odd = quotient(column, 2), remainder(column, 2)
            if i == 1:
                end = blocks * odd
            elif columns - 1 - pair > pair:
                shorter = Int32(0)
                if ids[1] >= 0:
                    r = Int32(ids[1])
                    numbers = self.numbers(r, seq_lens, cu_seqlens_q)
                    _, _, _, _, shorter = self.request(r, numbers, block_tables.shape[1], all_rows)
                where = self.cut(blocks, shorter)
                if odd == 1:
                    begin = where
                else:
                    end = where
        return begin, end

    @cute.jit
    def next_piece(self, piece: Int32, schedule: cutlass.Constexpr):
        """Describe this cluster's next piece of work: some key blocks of one row tile, or none: the end."""
        (
            block_tables, seq_lens, cu_seqlens_q, partial_lse, split_info, descriptor, walk, parts, part, rank,
            all_rows, _,
        ) = schedule  # fmt: skip
        lane = cute.arch.lane_idx()
        batch, width = seq_lens.shape[0], block_tables.shape[1]
        ids = self.ids(walk)
        cute.arch.sync_warp()
        r, tile, start, begin, end, way, k = walk[0], walk[1], walk[2], walk[3], walk[4], walk[5], walk[6]
        fixed = walk[7]
        lanes = walk[8] if const_expr(self.side_by_side) else Int32(1)
        columns, tile_lane = self.lane(lanes, parts, part)
        column = part - tile_lane * columns
        cute.arch.sync_warp()
        chunk, slots = Int32(1), Int32(1)
        if const_expr(self.invariant):
            chunk, slots = self.chunk_blocks(block_tables, seq_lens, partial_lse)
        # The start-up costs come first in a tile's length, where they are counted in it.
        lead = Int32(0)
        if const_expr(not self.invariant):
            if way == LINE:
                lead = Int32(self.overhead)
        at = remainder(piece, self.descriptors)
        found = Int32(0)
        while found == 0 and r < batch and start + lead < end:
            if const_expr(self.packs):
                if way == PACKED:
                    r = cutlass.max(Int32(ids[start]), 0)
            keys, first, rows, tiles, blocks = self.request(r, self.numbers(r, seq_lens, cu_seqlens_q), width, all_rows)
            tiles = self.on_line(tiles, lanes)
            unit = self.span(blocks, chunk, way, fixed, end - begin)
            b_begin, b_end = Int32(0), blocks
            slot = Int32(-1)
            first_row = (tile_lane + tile) * self.tile_rows  # in the request
            row_base = first + first_row
            rows_here = cutlass.min(rows - first_row, self.tile_rows)
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
                    if way != WHOLE:
                        b_begin = cutlass.max(begin - start - lead, 0)
                        b_end = cutlass.min(end - start - lead, blocks)
                    if const_expr(self.packs):
                        if way == PACKED:
                            b_begin, b_end = self.item(start, column, columns, batch, blocks, schedule)
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
                    descriptor[4, at] = first_row + rank * ROWS  # first row in its request
                    descriptor[5, at] = row_base + rank * ROWS  # first row of q and out
                    descriptor[6, at] = cutlass.min(rows_here - rank * ROWS, ROWS)  # rows that count
                    descriptor[7, at] = slot
                    descriptor[8, at] = r
                    q_rows = cutlass.min(rows_here, ROWS)
                    descriptor[9, at] = 1 + quotient(q_rows - 1, self.q_rows)  # stages that Q takes
            if const_expr(not self.invariant):
                if slot >= 0 and rank == 0 and lane == 0:
                    # For `combine`. The clusters from `owner` on have one piece each.
                    owner = self.divide(start + lead, end - begin)
                    count = self.divide(start + lead + blocks - 1, end - begin) - owner + 1
                    # As far as can be seen from here; what matters is that all clusters of the tile find the same.
                    busy = Int32(0)
                    if way == LINE:
                        if start > owner * (end - begin):
                            busy += FIRST_BUSY
                        rest = (owner + count) * (end - begin) - (start + unit) - lead
                        if rest > 0 and (tile + 1 < tiles or r + 1 < batch):
                            busy += LAST_BUSY
                    if const_expr(self.packs):
                        if way == PACKED:
                            owner, count = column - remainder(column, 2), Int32(2)
                    split_info[slot, 0] = row_base
                    split_info[slot, 1] = rows_here
                    split_info[slot, 2] = 2 * (tile_lane * columns + owner) + 1
                    split_info[slot, 3] = count + busy
            if leave == 1:
                start += unit
                tile += 1
                k = Int32(-1)
                if tile >= tiles:
                    start -= (tile - tiles) * unit  # a request without queries has no length
                    tile = Int32(0)
                    r += 1
                if const_expr(self.packs):
                    if way == PACKED:
                        r = Int32(0)  # which it is, `ids` say
        if lane == 0:
            if found == 0:
                descriptor[0, at] = 0
                descriptor[1, at] = 0
            walk[0] = r
            walk[1] = tile
            walk[2] = start
            walk[6] = k
        cute.arch.sync_warp()
