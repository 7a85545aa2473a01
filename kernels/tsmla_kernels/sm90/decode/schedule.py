"""Which CTA of decode attends to which keys: found in the kernel, by one warp, from the lengths on the device."""

from __future__ import annotations

from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.decode.config import ROWS
from tsmla_kernels.sm90.decode.memory import (
    Busy,
    Described,
    FixedPieces,
    KeyBlocks,
    Measure,
    Piece,
    Request,
    ScheduleState,
    Share,
    Sharing,
    SplitEntry,
    TileOnLine,
    TileRows,
    Track,
    Walk,
)
from tsmla_kernels.sm90.warp import WarpHelpers, quotient, remainder

LONG_RUN_KEYS = 1 << 16  # of a cluster, from which on no cluster is left without work for the sake of tracks
MIN_SORTED_SHARE = 32  # key blocks of a cluster, at least, for which requests are sorted
MAX_SORTED = 128  # requests that are sorted by length, at most: so that their numbers are bytes
MAX_SORTED_BLOCKS = 1 << 24  # of a request that is sorted by length: beside its number in a word
MAX_REQUESTS = 16  # of them, at most, that a cluster takes
# A ScheduleState; its last word may be the first of the cluster's requests, a byte each.
STATE_WORDS = ScheduleState.TRACKS + MAX_REQUESTS // 4


class ScheduleKind(IntEnum):
    """How the batch is shared out: see `share`."""

    LINE = 0
    WHOLE = 1
    CUT = 2
    PACKED = 3


class DecodeSchedule(WarpHelpers):
    """The schedule of a decode kernel, which sets these.

    Attributes:
      heads, max_q_len, page_size, ragged, causal, batch_invariant, tile_rows, max_tiles: as in config.DecodeConfig.
      block: keys of a pipeline stage. q_rows: query rows that one takes.
      overhead: what starting a piece costs, in key blocks: Q, the first keys' latency, the epilogue.
      min_share: key blocks worth a cluster's while: each piece more is one more partial result to merge.
      pieces_kept: places in the ring of pieces' descriptions.
      few_rows: whether partial results are small.
    """

    heads: int
    max_q_len: int
    page_size: int
    ragged: bool
    causal: bool
    batch_invariant: bool
    tile_rows: int
    max_tiles: int
    block: int
    q_rows: int
    overhead: int
    min_share: int
    pieces_kept: int
    few_rows: bool

    @property
    def equal_row_counts(self) -> bool:
        """Whether all requests have as many query rows, and cuts may depend on the batch."""
        return not self.ragged and not self.batch_invariant

    @property
    def may_use_tracks(self) -> bool:
        """Whether the row tiles of a request may be laid out side by side, each on a track of its own."""
        return self.equal_row_counts and self.max_tiles > 1

    @property
    def may_sort_requests(self) -> bool:
        """Whether requests may be given out by their length."""
        return self.equal_row_counts and self.max_tiles == 1

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
    def request(self, r: Int32, numbers: cutlass.Constexpr, schedule: cutlass.Constexpr):
        """Size of request r, a Request. `numbers` is what `self.numbers(r)` returned."""
        length, begin, end = numbers
        width, all_rows = schedule.block_tables.shape[1], schedule.all_rows
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
        return Request(keys, first, rows, tiles, blocks)

    @cute.jit
    def request_at(self, r: Int32, schedule: cutlass.Constexpr):
        """The same of a request whose numbers have not been read."""
        return self.request(r, self.numbers(r, schedule.seq_lens, schedule.cu_seqlens_q), schedule)

    @cute.jit
    def track_of(self, tracks: Int32, schedule: cutlass.Constexpr):
        """This cluster's track, a Track."""
        clusters, index = schedule.num_clusters, Int32(0)
        if const_expr(self.may_use_tracks):
            if tracks > 1:
                clusters = schedule.num_clusters // self.max_tiles
                index = self.divide(schedule.cluster_index, clusters)
        return Track(index, clusters, schedule.cluster_index - index * clusters)

    @cute.jit
    def sort(self, batch: Int32, order: cute.Tensor):
        """Put `order`, keys that all differ, in descending order: each goes where as many are greater."""
        lane = cute.arch.lane_idx()
        cute.arch.sync_warp()
        mine = cute.make_rmem_tensor((MAX_SORTED // 32,), Int32)
        rank = cute.make_rmem_tensor((MAX_SORTED // 32,), Int32)
        for k in cutlass.range_constexpr(MAX_SORTED // 32):
            mine[k], rank[k] = order[lane + 32 * k], Int32(0)
        for j in cutlass.range(batch, unroll=4):
            other = order[j]
            for k in cutlass.range_constexpr(MAX_SORTED // 32):
                if other > mine[k]:
                    rank[k] += 1
        cute.arch.sync_warp()
        for k in cutlass.range_constexpr(MAX_SORTED // 32):
            if lane + 32 * k < batch:
                order[rank[k]] = mine[k]
        cute.arch.sync_warp()

    @cute.jit
    def sorted_blocks(self, order: cute.Tensor, i: Int32, batch: Int32):
        """Key blocks of the request that is the i-th by length; 0 if the batch has no such request."""
        blocks = Int32(0)
        if i < batch:
            blocks = quotient(order[i], MAX_SORTED)
        return blocks

    @cute.jit
    def cut(self, longer: Int32, shorter: Int32):
        """Where the longer of two requests is cut, in blocks, so that of two clusters one takes what is before, the
        other the rest and the shorter one. Not at all, if the rest would be less than what it costs to merge it."""
        cut_at = cutlass.min(quotient(longer + shorter + self.overhead + 1, 2), longer)
        if longer - cut_at <= self.overhead:
            cut_at = longer
        return cut_at

    @cute.jit
    def greatest_packed(self, batch: Int32, clusters: Int32, order: cute.Tensor):
        """The greatest share of a cluster, if requests are given out by their length: see `share`."""
        lane = cute.arch.lane_idx()
        worst = Int32(0)
        if batch <= clusters:
            for pair in cutlass.range(lane, quotient(clusters + 1, 2), 32, unroll=1):
                longer = self.sorted_blocks(order, pair, batch)
                shorter = self.sorted_blocks(order, clusters - 1 - pair, batch)
                cut_at = longer
                rest = shorter + self.overhead
                if clusters - 1 - pair > pair:
                    cut_at = self.cut(longer, shorter)
                    if cut_at < longer:
                        rest += longer - cut_at + self.overhead
                worst = cutlass.max(worst, cutlass.max(cut_at + self.overhead, rest))
        else:
            for position in cutlass.range(lane, clusters, 32, unroll=1):
                load, turn = Int32(0), Int32(0)
                for first in cutlass.range(0, batch, clusters, unroll=1):
                    i = first + position
                    if turn == 1:
                        i = first + clusters - 1 - position
                    if i < batch:
                        load += quotient(order[i], MAX_SORTED) + self.overhead
                    turn ^= 1
                worst = cutlass.max(worst, load)
        return cute.arch.warp_redux_sync(worst, "max")

    @cute.jit
    def fixed_pieces(self, schedule: cutlass.Constexpr):
        """How row tiles are cut when batch_invariant, a FixedPieces."""
        slots = schedule.partial_lse.shape[0] // (schedule.seq_lens.shape[0] * self.max_tiles)
        table_blocks = quotient(schedule.block_tables.shape[1] * self.page_size + self.block - 1, self.block)
        return FixedPieces(cutlass.max((table_blocks + slots - 1) // slots, 1), slots)

    @cute.jit
    def on_line(self, tiles: Int32, tracks: Int32):
        """Row tiles of a request that follow each other on one line."""
        if const_expr(self.may_use_tracks):
            if tracks > 1:
                tiles = Int32(1)
        return tiles

    @cute.jit
    def cost_on_line(self, blocks: Int32, piece_blocks: Int32, kind: Int32, equal_cost: Int32, share_length: Int32):
        """Length of a row tile on the line; `equal_cost` where that is not 0."""
        length = blocks + self.overhead
        if const_expr(self.batch_invariant):
            length = blocks + self.overhead * ((blocks + piece_blocks - 1) // piece_blocks)
        else:
            if kind == ScheduleKind.CUT:
                length = self.divide(blocks + share_length - 1, share_length) * share_length
            if equal_cost > 0:
                length = equal_cost
        return length

    @cute.jit
    def count_pieces(self, tiles: Int32, blocks: Int32, piece_blocks: Int32, batch: Int32):
        """Pieces of at most `piece_blocks` blocks that a batch of up to 32 requests makes. A lane's request has `tiles`
        tiles of `blocks` blocks each."""
        count = Int32(0)
        if cute.arch.lane_idx() < batch:
            count = tiles * self.divide(blocks + piece_blocks - 1, piece_blocks)
        return cute.arch.warp_redux_sync(count, "add")

    @cute.jit
    def cluster_requests(self, state: cute.Tensor):
        """A cluster's requests, by their number, or -1, where requests are given out by their length."""
        return cute.make_tensor(
            cute.recast_ptr(state.iterator + ScheduleState.TRACKS, dtype=cutlass.Int8), cute.make_layout(MAX_REQUESTS)
        )

    @cute.jit
    def note_requests(self, position: Int32, clusters: Int32, batch: Int32, order: cute.Tensor, state: cute.Tensor):
        """Note this cluster's requests, before the ring's first stage, where `order` lies, is filled."""
        lane = cute.arch.lane_idx()
        requests = self.cluster_requests(state)
        i = lane * clusters + position
        if remainder(lane, 2) == 1:
            i = (lane + 1) * clusters - 1 - position
        if batch <= clusters:
            i = quotient(position, 2)
            if lane > 0:
                i = clusters - 1 - i
                if lane > 1 or i <= quotient(position, 2):
                    i = batch
        if lane < MAX_REQUESTS:
            r = Int32(-1)
            if i < batch:
                r = MAX_SORTED - 1 - remainder(order[i], MAX_SORTED)
            requests[lane] = cutlass.Int8(r)
        cute.arch.sync_warp()
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def begin_schedule(self, schedule: cutlass.Constexpr, early: cutlass.Constexpr):
        """Find this cluster's share of the batch, with `early` of early_numbers."""
        split_info, state = schedule.split_info, schedule.state
        num_clusters, cluster_index = schedule.num_clusters, schedule.cluster_index
        lane = cute.arch.lane_idx()
        batch = schedule.seq_lens.shape[0]
        r, tile, tile_start, begin, length = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        kind, equal_cost, tracks = Int32(ScheduleKind.CUT), Int32(0), Int32(self.max_tiles)
        alone = cutlass.Boolean(False)
        if const_expr(self.equal_row_counts):
            # One request, so that there is nothing to compare: it may be short, and the less code the sooner it begins.
            blocks = self.request(Int32(0), early, schedule).blocks
            alone = batch == 1 and self.tracks_fit(blocks, num_clusters)
            if alone:
                track = self.track_of(tracks, schedule)
                length = cutlass.max(self.divide(blocks + track.clusters - 1, track.clusters), self.min_share)
                begin, equal_cost = (cluster_index - track.index * track.clusters) * length, track.clusters * length
                if track.index >= tracks:
                    r = batch
        if not alone:
            share = self.share(schedule, early)
            r, tile, tile_start = share.request, share.tile, share.tile_start
            begin, length, kind = share.begin, share.length, share.kind
            equal_cost, tracks = share.equal_cost, share.tracks
        if lane == 0:
            state[ScheduleState.REQUEST] = r
            state[ScheduleState.TILE] = tile
            state[ScheduleState.TILE_START] = tile_start
            state[ScheduleState.BEGIN] = begin
            state[ScheduleState.END] = begin + length
            state[ScheduleState.KIND] = kind
            state[ScheduleState.PIECE_OF_TILE] = Int32(-1)
            state[ScheduleState.EQUAL_COST] = equal_cost
            if const_expr(self.may_use_tracks):
                state[ScheduleState.TRACKS] = tracks
            if schedule.rank == 0:
                if const_expr(not self.batch_invariant):
                    slot = 2 * cluster_index
                    split_info[slot, SplitEntry.PIECES] = 0
                    split_info[slot + 1, SplitEntry.PIECES] = 0
        if const_expr(self.batch_invariant and self.ragged):
            # Row tiles that a short query does not have: nobody else writes their entries.
            for i in cutlass.range(cluster_index * 32 + lane, batch, num_clusters * 32, unroll=1):
                tiles_of_request = self.request_at(i, schedule).tiles
                for t in cutlass.range(tiles_of_request, self.max_tiles, unroll=1):
                    split_info[num_clusters + i * self.max_tiles + t, SplitEntry.PIECES] = 0
        cute.arch.sync_warp()

    @cute.jit
    def tracks_fit(self, total: Int32, num_clusters: Int32):
        """Whether row tiles are laid out side by side, on tracks of `total` blocks each.

        Clusters that walk the same keys at the same time read them from memory once: that is worth as much as a
        sixteenth of the clusters, if not in a long run, in which the arithmetic is the bound.
        """
        fit = cutlass.Boolean(True)
        if const_expr(self.may_use_tracks):
            each = num_clusters // self.max_tiles
            left = num_clusters - each * self.max_tiles
            fit = left == 0 or (left * 16 <= num_clusters and total <= each * (LONG_RUN_KEYS // self.block))
        return fit

    @cute.jit
    def share(self, schedule: cutlass.Constexpr, early: cutlass.Constexpr):
        """This cluster's share of a batch, a Share.

        The batch is laid out as a line of row tiles, request by request, each `overhead` + its key blocks long, or as
        one line for each row tile of a request (`tracks`).
        - LINE: every cluster of the line takes an equal interval of it.
        As pieces have to be merged, there are better ways where they balance nearly as well, within a sixteenth:
        - WHOLE: each cluster takes as many whole tiles.
        - CUT: each cluster takes one piece, and all but a tile's last are of one length.
        - PACKED: whole requests in the order of their length, given out to the clusters from the first to the last,
          then from the last to the first, and so on. Where there are no more requests than clusters, the i-th longest
          and the i-th shortest (of as many as clusters: those that there are not have no length) go to two clusters,
          which cut the longer one.
        """
        piece_blocks = Int32(1)
        if const_expr(self.batch_invariant):
            piece_blocks = self.fixed_pieces(schedule).blocks
        measure = self.measure(piece_blocks, schedule, early)
        track = self.track_of(measure.tracks, schedule)
        sharing = self.choose(measure, track, schedule)
        return self.find_start(measure, track, sharing, piece_blocks, schedule)

    @cute.jit
    def measure(self, piece_blocks: Int32, schedule: cutlass.Constexpr, early: cutlass.Constexpr):
        """What the batch comes to, a Measure: tracks if they fit."""
        order = schedule.order
        lane = cute.arch.lane_idx()
        batch = schedule.seq_lens.shape[0]
        # The first 32 requests stay in registers: few batches have more, and what is read again is waited for again.
        total, row_tiles, longest = Int32(0), Int32(0), Int32(0)
        tracks = Int32(self.max_tiles) if const_expr(self.may_use_tracks) else Int32(1)
        none = Int32(0)
        request = self.request(cutlass.min(lane, batch - 1), early, schedule)
        tiles, blocks = self.on_line(request.tiles, tracks), request.blocks
        if lane < batch:
            total = tiles * self.cost_on_line(blocks, piece_blocks, none, none, none)
            row_tiles, longest = tiles, blocks
        for base in cutlass.range(32, batch, 32, unroll=4):
            # Loads without a branch, so that several are under way at once.
            other = self.request_at(cutlass.min(base + lane, batch - 1), schedule)
            other_tiles = self.on_line(other.tiles, tracks)
            if const_expr(self.may_sort_requests):
                if base + lane < MAX_SORTED:
                    order[base + lane] = other.blocks * MAX_SORTED + (MAX_SORTED - 1 - base - lane)
            cost = other_tiles * self.cost_on_line(other.blocks, piece_blocks, none, none, none)
            if base + lane < batch:
                total += cost
                row_tiles += other_tiles
                longest = cutlass.max(longest, other.blocks)
        total = cute.arch.warp_redux_sync(total, "add")
        longest = cute.arch.warp_redux_sync(longest, "max")
        row_tiles = cute.arch.warp_redux_sync(row_tiles, "add") if const_expr(self.ragged) else batch * tiles
        if const_expr(self.may_use_tracks):
            if not self.tracks_fit(total, schedule.num_clusters):
                tracks, tiles = Int32(1), Int32(self.max_tiles)
                total, row_tiles = total * tiles, row_tiles * tiles
        return Measure(total, row_tiles, longest, tracks, tiles, blocks)

    @cute.jit
    def choose(self, measure: cutlass.Constexpr, track: cutlass.Constexpr, schedule: cutlass.Constexpr):
        """How the batch is shared out: a Sharing."""
        row_tiles, longest, blocks = measure.row_tiles, measure.longest, measure.blocks
        clusters, order = track.clusters, schedule.order
        batch = schedule.seq_lens.shape[0]
        length = cutlass.max(self.divide(measure.total + clusters - 1, clusters), self.min_share)
        kind, equal_cost = Int32(ScheduleKind.LINE), Int32(0)
        if const_expr(not self.batch_invariant):
            slack = quotient(length, 16)
            tiles_each = self.divide(row_tiles + clusters - 1, clusters)
            if tiles_each * (longest + self.overhead) <= length + self.overhead + slack:
                kind, equal_cost = Int32(ScheduleKind.WHOLE), Int32(1)
                length = tiles_each
            else:
                if row_tiles > 0 and row_tiles < clusters:
                    cuts = self.divide(clusters, row_tiles)
                    cut_blocks = cutlass.max(self.divide(longest + cuts - 1, cuts), self.min_share)
                    if cut_blocks <= length + cutlass.min(slack, 8):
                        kind, length, equal_cost = Int32(ScheduleKind.CUT), cut_blocks, cuts * cut_blocks
                if kind == ScheduleKind.LINE and batch <= 32:
                    # Two pieces in one cluster cost less than these blocks.
                    most = length + cutlass.min(quotient(length, 32) if const_expr(self.few_rows) else slack, 3)
                    if self.count_pieces(measure.tiles, blocks, most, batch) <= clusters:
                        least = cutlass.max(length - self.overhead - 1, self.min_share)
                        while least < most:
                            middle = quotient(least + most, 2)
                            if self.count_pieces(measure.tiles, blocks, middle, batch) <= clusters:
                                most = middle
                            else:
                                least = middle + 1
                        kind, length = Int32(ScheduleKind.CUT), most
                if const_expr(self.may_sort_requests):
                    # Not for little work: the order takes a microsecond or two to find.
                    sortable = batch <= cutlass.min(MAX_REQUESTS * clusters, MAX_SORTED) and 2 * batch > clusters
                    if (
                        kind == ScheduleKind.LINE
                        and sortable
                        and length >= MIN_SORTED_SHARE
                        and longest < MAX_SORTED_BLOCKS
                    ):
                        lane = cute.arch.lane_idx()
                        order[lane] = blocks * MAX_SORTED + (MAX_SORTED - 1 - lane)
                        self.sort(batch, order)
                        if self.greatest_packed(batch, clusters, order) <= length + self.overhead + slack:
                            kind, equal_cost = Int32(ScheduleKind.PACKED), Int32(1)
        return Sharing(kind, length, equal_cost)

    @cute.jit
    def find_start(
        self,
        measure: cutlass.Constexpr,
        track: cutlass.Constexpr,
        sharing: cutlass.Constexpr,
        piece_blocks: Int32,
        schedule: cutlass.Constexpr,
    ):
        """The cluster's share, with the row tile in which it begins."""
        tracks, tiles, blocks = measure.tracks, measure.tiles, measure.blocks
        kind, length, equal_cost = sharing.kind, sharing.length, sharing.equal_cost
        lane = cute.arch.lane_idx()
        batch = schedule.seq_lens.shape[0]
        begin = track.position * length
        r, tile, tile_start = batch, Int32(0), Int32(0)
        searching = Int32(1)
        if track.index >= tracks:
            searching = Int32(0)  # a cluster that is left over
        if const_expr(self.equal_row_counts):
            if searching == 1 and equal_cost > 0:
                # All requests have as many row tiles, and these one length.
                searching = Int32(0)
                row_tile = begin
                if kind == ScheduleKind.CUT:
                    row_tile = self.divide(begin, equal_cost)
                r = row_tile
                if const_expr(self.max_tiles > 1):
                    if tracks == 1:
                        r = row_tile // self.max_tiles
                        tile = row_tile - r * self.max_tiles
                tile_start = row_tile * equal_cost
                if const_expr(self.may_sort_requests):
                    if kind == ScheduleKind.PACKED:
                        r, begin, tile_start = Int32(0), Int32(0), Int32(0)
                        length = cutlass.max(self.divide(batch - 1, track.clusters) + 1, 2)
                        self.note_requests(track.position, track.clusters, batch, schedule.order, schedule.state)
        base = Int32(0)
        while searching == 1 and base < batch:
            cost, tile_cost = Int32(0), Int32(1)
            if base + lane < batch:
                tile_cost = self.cost_on_line(blocks, piece_blocks, kind, equal_cost, length)
                cost = tiles * tile_cost
            prefix = cost
            for step in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(prefix, offset=1 << step, mask_and_clamp=0)
                if lane >= (1 << step):
                    prefix += other
            before = cute.arch.popc(cute.arch.vote_ballot_sync(tile_start + prefix <= begin))
            if before < 32:
                searching = Int32(0)
                r = base + before
                tile_start += cute.arch.shuffle_sync(prefix - cost, before)
                tile_cost = cute.arch.shuffle_sync(tile_cost, before)
                tile = self.divide(begin - tile_start, tile_cost)
                tile_start += tile * tile_cost
            else:
                tile_start += cute.arch.shuffle_sync(prefix, 31)
                base += 32
                request = self.request_at(cutlass.min(base + lane, batch - 1), schedule)
                tiles, blocks = self.on_line(request.tiles, tracks), request.blocks
        return Share(r, tile, tile_start, begin, length, kind, equal_cost, tracks)

    @cute.jit
    def packed_piece(self, i: Int32, blocks: Int32, track: cutlass.Constexpr, schedule: cutlass.Constexpr):
        """(first block, the block after its last) of a cluster's i-th piece where requests are given out by their
        length, of a request of `blocks` blocks. 0, 0: there is none, but there may be a next."""
        requests = self.cluster_requests(schedule.state)
        begin, end = Int32(0), blocks
        if requests[i] < 0:
            end = Int32(0)
        elif schedule.seq_lens.shape[0] <= track.clusters:
            pair, odd = quotient(track.position, 2), remainder(track.position, 2)
            if i == 1:
                end = blocks * odd
            elif track.clusters - 1 - pair > pair:
                shorter = Int32(0)
                if requests[1] >= 0:
                    shorter = self.request_at(Int32(requests[1]), schedule).blocks
                cut_at = self.cut(blocks, shorter)
                if odd == 1:
                    begin = cut_at
                else:
                    end = cut_at
        return begin, end

    @cute.jit
    def describe(
        self,
        piece: cutlass.Constexpr,
        blocks: cutlass.Constexpr,
        r: Int32,
        request: cutlass.Constexpr,
        rows: cutlass.Constexpr,
        rank: Int32,
    ):
        """Write the description of a piece: key `blocks` of request `r`, and this CTA's of the row tile's `rows`."""
        piece[Piece.BLOCK_BEGIN] = blocks.begin
        piece[Piece.BLOCK_END] = blocks.end
        piece[Piece.KEYS] = request.keys
        piece[Piece.FIRST_TOKEN_KEYS] = request.keys + 1 - request.rows // self.heads
        piece[Piece.ROW_IN_REQUEST] = rows.in_request + rank * ROWS
        piece[Piece.ROW] = rows.row + rank * ROWS
        piece[Piece.VALID_ROWS] = cutlass.min(rows.rows - rank * ROWS, ROWS)
        piece[Piece.SLOT] = blocks.slot
        piece[Piece.REQUEST] = r
        q_rows = cutlass.min(rows.rows, ROWS)
        piece[Piece.Q_STAGES] = 1 + quotient(q_rows - 1, self.q_rows)

    @cute.jit
    def note_fixed_cut(
        self, entry: Int32, rows: cutlass.Constexpr, first_slot: Int32, cuts: Int32, schedule: cutlass.Constexpr
    ):
        """Tell `combine` of a row tile's pieces, when batch_invariant: none, if the only one is the whole tile."""
        split_info = schedule.split_info
        count = cuts
        if cuts == 1:
            count = Int32(0)
        split_info[entry, SplitEntry.ROW] = rows.row
        split_info[entry, SplitEntry.ROWS] = rows.rows
        split_info[entry, SplitEntry.SLOT] = first_slot
        split_info[entry, SplitEntry.PIECES] = count

    @cute.jit
    def note_cut(
        self,
        slot: Int32,
        rows: cutlass.Constexpr,
        walk: cutlass.Constexpr,
        line: cutlass.Constexpr,
        track: cutlass.Constexpr,
        schedule: cutlass.Constexpr,
    ):
        """Tell `combine` of the pieces of the row tile under way. The clusters from `owner` on have one each."""
        split_info = schedule.split_info
        begin, end = walk.begin, walk.end
        owner = self.divide(walk.tile_start + line.lead, end - begin)
        count = self.divide(walk.tile_start + line.lead + line.blocks - 1, end - begin) - owner + 1
        # As far as can be seen from here; what matters is that all clusters of the tile find the same.
        busy = Int32(0)
        if walk.kind == ScheduleKind.LINE:
            if walk.tile_start > owner * (end - begin):
                busy += Busy.FIRST
            rest = (owner + count) * (end - begin) - (walk.tile_start + line.cost) - line.lead
            if rest > 0 and (walk.tile + 1 < line.tiles or walk.request + 1 < schedule.seq_lens.shape[0]):
                busy += Busy.LAST
        if const_expr(self.may_sort_requests):
            if walk.kind == ScheduleKind.PACKED:
                owner, count = track.position - remainder(track.position, 2), Int32(2)
        split_info[slot, SplitEntry.ROW] = rows.row
        split_info[slot, SplitEntry.ROWS] = rows.rows
        split_info[slot, SplitEntry.SLOT] = 2 * (track.index * track.clusters + owner) + 1
        split_info[slot, SplitEntry.PIECES] = count + busy

    @cute.jit
    def next_piece(self, number: Int32, schedule: cutlass.Constexpr):
        """Describe this cluster's next piece of work: some key blocks of one row tile, or none: the end."""
        pieces, state, rank = schedule.pieces, schedule.state, schedule.rank
        lane = cute.arch.lane_idx()
        batch = schedule.seq_lens.shape[0]
        requests = self.cluster_requests(state)
        cute.arch.sync_warp()
        r, tile = state[ScheduleState.REQUEST], state[ScheduleState.TILE]
        tile_start, begin = state[ScheduleState.TILE_START], state[ScheduleState.BEGIN]
        end, kind = state[ScheduleState.END], state[ScheduleState.KIND]
        piece_of_tile, equal_cost = state[ScheduleState.PIECE_OF_TILE], state[ScheduleState.EQUAL_COST]
        tracks = state[ScheduleState.TRACKS] if const_expr(self.may_use_tracks) else Int32(1)
        track = self.track_of(tracks, schedule)
        cute.arch.sync_warp()
        fixed = FixedPieces(Int32(1), Int32(1))
        if const_expr(self.batch_invariant):
            fixed = self.fixed_pieces(schedule)
        # The start-up costs come first in a tile's length, where they are counted in it.
        lead = Int32(0)
        if const_expr(not self.batch_invariant):
            if kind == ScheduleKind.LINE:
                lead = Int32(self.overhead)
        place = remainder(number, self.pieces_kept)
        found = Int32(0)
        while found == 0 and r < batch and tile_start + lead < end:
            if const_expr(self.may_sort_requests):
                if kind == ScheduleKind.PACKED:
                    r = cutlass.max(Int32(requests[tile_start]), 0)
            request = self.request_at(r, schedule)
            tiles = self.on_line(request.tiles, tracks)
            tile_cost = self.cost_on_line(request.blocks, fixed.blocks, kind, equal_cost, end - begin)
            b_begin, b_end = Int32(0), request.blocks
            slot = Int32(-1)
            first_row = (track.index + tile) * self.tile_rows
            row = request.first_row + first_row
            rows = TileRows(first_row, row, cutlass.min(request.rows - first_row, self.tile_rows))
            leave = Int32(1)
            if tile < tiles:
                if const_expr(self.batch_invariant):
                    cuts = (request.blocks + fixed.blocks - 1) // fixed.blocks
                    step = fixed.blocks + self.overhead
                    if piece_of_tile < 0:
                        piece_of_tile = (cutlass.max(begin - tile_start, 0) + step - 1) // step
                    if piece_of_tile < cuts and tile_start + piece_of_tile * step < end:
                        found = Int32(1)
                        leave = Int32(0)
                        b_begin = piece_of_tile * fixed.blocks
                        b_end = cutlass.min(b_begin + fixed.blocks, request.blocks)
                        row_tile = r * self.max_tiles + tile
                        first_slot = row_tile * fixed.slots
                        if cuts > 1:
                            slot = first_slot + piece_of_tile
                        if piece_of_tile == 0 and rank == 0 and lane == 0:
                            self.note_fixed_cut(schedule.num_clusters + row_tile, rows, first_slot, cuts, schedule)
                        piece_of_tile += 1
                else:
                    if kind != ScheduleKind.WHOLE:
                        b_begin = cutlass.max(begin - tile_start - lead, 0)
                        b_end = cutlass.min(end - tile_start - lead, request.blocks)
                    if const_expr(self.may_sort_requests):
                        if kind == ScheduleKind.PACKED:
                            b_begin, b_end = self.packed_piece(tile_start, request.blocks, track, schedule)
                    if b_begin < b_end:
                        found = Int32(1)
                        if b_begin > 0:
                            slot = 2 * schedule.cluster_index
                        elif b_end < request.blocks:
                            slot = 2 * schedule.cluster_index + 1
            if found == 1:
                if lane == 0:
                    self.describe(Described(pieces, place), KeyBlocks(b_begin, b_end, slot), r, request, rows, rank)
            if const_expr(not self.batch_invariant):
                if slot >= 0 and rank == 0 and lane == 0:
                    walk = Walk(r, tile, tile_start, begin, end, kind)
                    self.note_cut(slot, rows, walk, TileOnLine(tiles, request.blocks, tile_cost, lead), track, schedule)
            if leave == 1:
                tile_start += tile_cost
                tile += 1
                piece_of_tile = Int32(-1)
                if tile >= tiles:
                    tile_start -= (tile - tiles) * tile_cost  # a request without queries has no length
                    tile = Int32(0)
                    r += 1
                if const_expr(self.may_sort_requests):
                    if kind == ScheduleKind.PACKED:
                        r = Int32(0)  # which it is, `requests` say
        if lane == 0:
            if found == 0:
                pieces[Piece.BLOCK_BEGIN, place] = 0
                pieces[Piece.BLOCK_END, place] = 0
            state[ScheduleState.REQUEST] = r
            state[ScheduleState.TILE] = tile
            state[ScheduleState.TILE_START] = tile_start
            state[ScheduleState.PIECE_OF_TILE] = piece_of_tile
        cute.arch.sync_warp()
