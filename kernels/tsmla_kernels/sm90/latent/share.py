"""Which cluster gets which part of a batch. One warp of each CTA computes this from the lengths on the device."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from tsmla_kernels.sm90.constants import MOST_KEYS
from tsmla_kernels.sm90.latent.memory import (
    FixedPieces,
    Measure,
    Request,
    Schedule,
    ScheduleKind,
    ScheduleState,
    Share,
    Sharing,
    Track,
)
from tsmla_kernels.sm90.latent.shape import OVERHEAD, LatentShape
from tsmla_kernels.sm90.warp import divide, quotient, remainder

LONG_RUN_KEYS = 1 << 16  # if a cluster has more keys than this, tracks must leave no cluster idle
MIN_SORTED_SHARE = 32  # requests are sorted only if a share has at least this many key blocks
MAX_SORTED = 128  # most requests that are sorted by length, because their indices are kept in bytes
MAX_SORTED_BLOCKS = 1 << 24  # a sorted request has fewer key blocks: one word holds this count and the request's index
ALL_KEYS = (1 << 31) - 1  # a length that no request exceeds
MAX_REQUESTS = 16  # most sorted requests that a cluster takes
# How many words the schedule's state has. The indices of a cluster's sorted requests, one byte each, begin in the word
# TRACKS.
STATE_WORDS = ScheduleState.TRACKS + MAX_REQUESTS // 4


class BatchShare:
    """Shares a batch out to the clusters of the grid, by its requests' lengths.

    Attributes:
      heads, max_q_len, page_size, ragged, batch_invariant, tile_rows, max_tiles, block, few_rows, min_share, skips: as
        in LatentShape.
      equal_row_counts: whether all requests have the same number of query rows, and cuts may depend on the batch.
      may_use_tracks: whether the row tiles of a request may lie side by side, each on its own track.
      may_sort_requests: whether requests may be dealt out by length.
      equal_lengths: whether every request has as many keys as its row of the table; then seq_lens is not read.
      ends_batch: whether the schedule's requests are the last ones of a larger batch, which has `all_rows` rows of out.
    """

    def __init__(self, shape: LatentShape, *, equal_lengths: bool = False, ends_batch: bool = False) -> None:
        self.equal_lengths, self.ends_batch = equal_lengths, ends_batch
        self.heads, self.max_q_len, self.page_size = shape.num_heads, shape.max_q_len, shape.page_size
        self.ragged, self.batch_invariant = shape.ragged, shape.batch_invariant
        self.tile_rows, self.max_tiles = shape.tile_rows, shape.max_tiles
        self.block, self.few_rows = shape.block, shape.few_rows
        self.min_share, self.skips = shape.min_share, shape.skips
        self.equal_row_counts = not shape.ragged and not shape.batch_invariant and not shape.skips
        self.may_use_tracks = self.equal_row_counts and shape.max_tiles > 1
        self.may_sort_requests = self.equal_row_counts and shape.max_tiles == 1 and not equal_lengths

    @cute.jit
    def numbers(self, r: Int32, seq_lens: cute.Tensor, cu_seqlens_q: cute.Tensor) -> tuple[Int32, Int32, Int32]:
        """(length, first query token, the next request's first query token) of request r. The tokens are 0 unless
        ragged."""
        begin, end = Int32(0), Int32(0)
        if const_expr(self.ragged):
            begin, end = cu_seqlens_q[r], cu_seqlens_q[r + 1]
        length = Int32(ALL_KEYS) if const_expr(self.equal_lengths) else seq_lens[r]
        return length, begin, end

    @cute.jit
    def request(self, r: Int32, numbers: tuple[Int32, Int32, Int32], schedule: Schedule) -> Request:
        """The size of request r. `numbers`: the result of `self.numbers(r)`."""
        length, begin, end = numbers
        width, all_rows = schedule.block_tables.shape[1], schedule.all_rows
        # A wrong length must not lead outside the table, the row tiles or `out`. If the call's table is the first
        # columns of a wider one, `width` is the wider one's. `width` is clamped before it is multiplied, because
        # width * page_size may exceed 32 bits.
        keys = cutlass.min(cutlass.max(length, 0), cutlass.min(width, MOST_KEYS // self.page_size) * self.page_size)
        blocks = cutlass.max(quotient(keys + self.block - 1, self.block), 1)
        first = r * (self.max_q_len * self.heads)
        rows = Int32(self.max_q_len * self.heads)
        tiles = Int32(self.max_tiles)
        if const_expr(self.ragged):
            first = cutlass.min(cutlass.max(begin * self.heads, 0), all_rows)
            rows = cutlass.min(cutlass.max(end * self.heads - first, 0), rows)
            rows = cutlass.min(rows, all_rows - first)
            tiles = quotient(rows + self.tile_rows - 1, self.tile_rows)
        if const_expr(self.ends_batch):
            if const_expr(self.max_q_len == 1):
                first += all_rows - schedule.seq_lens.shape[0] * self.heads
            else:
                # The last request may have fewer tokens. The rows of a request are a power of 2.
                of_request = self.max_q_len * self.heads
                requests = quotient(all_rows + of_request - 1, of_request)
                first += (requests - schedule.seq_lens.shape[0]) * of_request
        if const_expr(self.skips):
            rows = cutlass.min(rows, all_rows - first) * Int32(length >= 0)
            tiles = quotient(rows + self.tile_rows - 1, self.tile_rows)
        return Request(keys, first, rows, tiles, blocks)

    @cute.jit
    def request_at(self, r: Int32, schedule: Schedule) -> Request:
        """The size of request r, computed from `self.numbers(r)`."""
        return self.request(r, self.numbers(r, schedule.seq_lens, schedule.cu_seqlens_q), schedule)

    @cute.jit
    def track_of(self, tracks: Int32, schedule: Schedule) -> Track:
        """This cluster's track if there are `tracks` tracks."""
        clusters, index = schedule.num_clusters, Int32(0)
        if const_expr(self.may_use_tracks):
            if tracks > 1:
                clusters = schedule.num_clusters // self.max_tiles
                index = divide(schedule.cluster_index, clusters)
        return Track(index, clusters, schedule.cluster_index - index * clusters)

    @cute.jit
    def fixed_pieces(self, schedule: Schedule) -> FixedPieces:
        """How row tiles are cut if batch_invariant; otherwise (1, 1), which nothing uses."""
        blocks, slots = Int32(1), Int32(1)
        if const_expr(self.batch_invariant):
            slots = schedule.partial_lse.shape[0] // (schedule.seq_lens.shape[0] * self.max_tiles)
            table_blocks = quotient(schedule.block_tables.shape[1] * self.page_size + self.block - 1, self.block)
            blocks = cutlass.max((table_blocks + slots - 1) // slots, 1)
        return FixedPieces(blocks, slots)

    @cute.jit
    def on_line(self, tiles: Int32, tracks: Int32):
        """How many row tiles a request has on one line: all of its `tiles`, or one if each tile has its own track."""
        if const_expr(self.may_use_tracks):
            if tracks > 1:
                tiles = Int32(1)
        return tiles

    @cute.jit
    def cost_on_line(self, blocks: Int32, piece_blocks: Int32, kind: Int32, equal_cost: Int32, share_length: Int32):
        """The length on the line of a row tile of `blocks` key blocks. If `equal_cost` is not 0, the length is
        `equal_cost`."""
        length = blocks + OVERHEAD
        if const_expr(self.batch_invariant):
            length = blocks + OVERHEAD * ((blocks + piece_blocks - 1) // piece_blocks)
        else:
            if kind == ScheduleKind.CUT:
                length = divide(blocks + share_length - 1, share_length) * share_length
            if equal_cost > 0:
                length = equal_cost
        return length

    @cute.jit
    def cluster_requests(self, state: cute.Tensor):
        """A cluster's requests if requests are dealt out by length: their indices, or -1 for no request."""
        return cute.make_tensor(
            cute.recast_ptr(state.iterator + ScheduleState.TRACKS, dtype=cutlass.Int8), cute.make_layout(MAX_REQUESTS)
        )

    @cute.jit
    def cut(self, longer: Int32, shorter: Int32):
        """The key block at which the longer of two requests is cut. One cluster takes the blocks before that one, and
        another cluster the rest and the shorter request. If the rest has at most OVERHEAD blocks, there is no cut and
        the result is `longer`."""
        cut_at = cutlass.min(quotient(longer + shorter + OVERHEAD + 1, 2), longer)
        if longer - cut_at <= OVERHEAD:
            cut_at = longer
        return cut_at

    @cute.jit
    def early_numbers(self, seq_lens: cute.Tensor, cu_seqlens_q: cute.Tensor):
        """The `numbers` of the request whose index is this lane's index. All warps load these early: if only
        one warp did, its branch would wait for the data."""
        return self.numbers(cutlass.min(cute.arch.lane_idx(), seq_lens.shape[0] - 1), seq_lens, cu_seqlens_q)

    @cute.jit
    def tracks_fit(self, total: Int32, num_clusters: Int32):
        """Whether row tiles may lie side by side, on tracks of `total` blocks each.

        Clusters that walk the same keys at the same time read them from memory once. This is worth leaving up to a
        sixteenth of the clusters idle, unless a cluster has more than LONG_RUN_KEYS keys: then arithmetic is the limit,
        and no cluster may be idle.
        """
        fit = cutlass.Boolean(True)
        if const_expr(self.may_use_tracks):
            each = num_clusters // self.max_tiles
            left = num_clusters - each * self.max_tiles
            fit = left == 0 or (left * 16 <= num_clusters and total <= each * (LONG_RUN_KEYS // self.block))
        return fit

    @cute.jit
    def share(self, schedule: Schedule, early: tuple[Int32, Int32, Int32]) -> Share:
        """This cluster's share of a batch.

        The row tiles of the batch lie on a line, request by request. A tile is OVERHEAD + its key blocks long. If the
        requests have several row tiles, the first, second, ... tile of every request may lie on a line of its own, a
        track. A ScheduleKind says which part of its line a cluster takes:
        - LINE: an interval; all clusters' intervals have the same length.
        The other kinds leave fewer pieces to merge. One is chosen if its longest share is at most about a sixteenth
        longer than LINE's:
        - WHOLE: whole tiles, equally many for each cluster, but fewer or none for the last ones.
        - CUT: at most one piece for each cluster; all pieces of a tile but the last have the same length.
        - PACKED: whole requests, sorted by length and dealt out to the clusters forwards, then backwards, and so on. If
          the batch has no more requests than clusters, empty requests pad it to the number of clusters. Then two
          clusters share the i-th longest and the i-th shortest request, and cut the longer one.
        """
        piece_blocks = self.fixed_pieces(schedule).blocks
        if const_expr(self.equal_lengths):
            measure = self.measure_equal(piece_blocks, schedule, early)
        else:
            measure = self.measure(piece_blocks, schedule, early)
        track = self.track_of(measure.tracks, schedule)
        sharing = self.choose(measure, track, schedule)
        found = self.find_start(measure, track, sharing, piece_blocks, schedule)
        if const_expr(self.may_sort_requests):
            # `order` lies in the ring's first stage, which a copy may fill only after all lanes have used `order`.
            cute.arch.sync_warp()
            cute.arch.fence_proxy("async.shared", space="cta")
        return found

    @cute.jit
    def measure(self, piece_blocks: Int32, schedule: Schedule, early: tuple[Int32, Int32, Int32]) -> Measure:
        """Measure the batch, laid on tracks (see `share`) if these fit, otherwise on one line."""
        order = schedule.order
        lane = cute.arch.lane_idx()
        batch = schedule.seq_lens.shape[0]
        # The sizes of the first 32 requests stay in registers, because loading them again would mean another wait.
        total, row_tiles, longest = Int32(0), Int32(0), Int32(0)
        tracks = Int32(self.max_tiles) if const_expr(self.may_use_tracks) else Int32(1)
        none = Int32(0)
        request = self.request(cutlass.min(lane, batch - 1), early, schedule)
        tiles, blocks = self.on_line(request.tiles, tracks), request.blocks
        if lane < batch:
            total = tiles * self.cost_on_line(blocks, piece_blocks, none, none, none)
            row_tiles, longest = tiles, blocks
        for base in cutlass.range(32, batch, 32, unroll=4):
            # The loads are not in a branch, so that several are in flight.
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
        if const_expr(self.ragged or self.skips):
            row_tiles = cute.arch.warp_redux_sync(row_tiles, "add")
        else:
            row_tiles = batch * tiles
        if const_expr(self.may_use_tracks):
            if not self.tracks_fit(total, schedule.num_clusters):
                tracks, tiles = Int32(1), Int32(self.max_tiles)
                total, row_tiles = total * tiles, row_tiles * tiles
        return Measure(total, row_tiles, longest, tracks, tiles, blocks)

    @cute.jit
    def measure_equal(self, piece_blocks: Int32, schedule: Schedule, early: tuple[Int32, Int32, Int32]) -> Measure:
        """Measure a batch of equal requests as `measure` does, but from the size of one request."""
        batch = schedule.seq_lens.shape[0]
        request = self.request(Int32(0), early, schedule)
        tracks = Int32(self.max_tiles) if const_expr(self.may_use_tracks) else Int32(1)
        tiles, none = self.on_line(request.tiles, tracks), Int32(0)
        row_tiles = batch * tiles
        total = row_tiles * self.cost_on_line(request.blocks, piece_blocks, none, none, none)
        if const_expr(self.may_use_tracks):
            if not self.tracks_fit(total, schedule.num_clusters):
                tracks, tiles = Int32(1), Int32(self.max_tiles)
                total, row_tiles = total * tiles, row_tiles * tiles
        return Measure(total, row_tiles, request.blocks, tracks, tiles, request.blocks)

    @cute.jit
    def choose(self, measure: Measure, track: Track, schedule: Schedule) -> Sharing:
        """Choose how the batch is shared out: see `share`."""
        row_tiles, longest, blocks = measure.row_tiles, measure.longest, measure.blocks
        clusters, order = track.clusters, schedule.order
        batch = schedule.seq_lens.shape[0]
        length = cutlass.max(divide(measure.total + clusters - 1, clusters), self.min_share)
        kind, equal_cost = Int32(ScheduleKind.LINE), Int32(0)
        if const_expr(not self.batch_invariant):
            slack = quotient(length, 16)
            tiles_each = divide(row_tiles + clusters - 1, clusters)
            if tiles_each * (longest + OVERHEAD) <= length + OVERHEAD + slack:
                kind, equal_cost = Int32(ScheduleKind.WHOLE), Int32(1)
                length = tiles_each
            else:
                if row_tiles > 0 and row_tiles < clusters:
                    cuts = divide(clusters, row_tiles)
                    cut_blocks = cutlass.max(divide(longest + cuts - 1, cuts), self.min_share)
                    if cut_blocks <= length + cutlass.min(slack, 8):
                        kind, length, equal_cost = Int32(ScheduleKind.CUT), cut_blocks, cuts * cut_blocks
                if kind == ScheduleKind.LINE and batch <= 32:
                    # The greatest length of a share that is accepted if no cluster then has more than one piece.
                    most = length + cutlass.min(quotient(length, 32) if const_expr(self.few_rows) else slack, 3)
                    if self.count_pieces(measure.tiles, blocks, most, batch) <= clusters:
                        least = cutlass.max(length - OVERHEAD - 1, self.min_share)
                        while least < most:
                            middle = quotient(least + most, 2)
                            if self.count_pieces(measure.tiles, blocks, middle, batch) <= clusters:
                                most = middle
                            else:
                                least = middle + 1
                        kind, length = Int32(ScheduleKind.CUT), most
                if const_expr(self.may_sort_requests):
                    # If shares are short, requests are not sorted: sorting takes one or two microseconds.
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
                        if self.greatest_packed(batch, clusters, order) <= length + OVERHEAD + slack:
                            kind, equal_cost = Int32(ScheduleKind.PACKED), Int32(1)
        return Sharing(kind, length, equal_cost)

    @cute.jit
    def count_pieces(self, tiles: Int32, blocks: Int32, piece_blocks: Int32, batch: Int32):
        """How many pieces of at most `piece_blocks` blocks a batch of up to 32 requests makes. A lane's request has
        `tiles` tiles of `blocks` blocks each."""
        count = Int32(0)
        if cute.arch.lane_idx() < batch:
            count = tiles * divide(blocks + piece_blocks - 1, piece_blocks)
        return cute.arch.warp_redux_sync(count, "add")

    @cute.jit
    def sort(self, batch: Int32, order: cute.Tensor):
        """Sort the `batch` words of `order` in descending order. The words are distinct, so a word's place is how many
        words are greater."""
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
        """How many key blocks the i-th longest request has, with i from 0; 0 if the batch has no such request."""
        blocks = Int32(0)
        if i < batch:
            blocks = quotient(order[i], MAX_SORTED)
        return blocks

    @cute.jit
    def greatest_packed(self, batch: Int32, clusters: Int32, order: cute.Tensor):
        """The greatest share of a cluster, in key blocks plus OVERHEAD for each piece, if requests are dealt out by
        length."""
        lane = cute.arch.lane_idx()
        worst = Int32(0)
        if batch <= clusters:
            for pair in cutlass.range(lane, quotient(clusters + 1, 2), 32, unroll=1):
                longer = self.sorted_blocks(order, pair, batch)
                shorter = self.sorted_blocks(order, clusters - 1 - pair, batch)
                cut_at = longer
                rest = shorter + OVERHEAD
                if clusters - 1 - pair > pair:
                    cut_at = self.cut(longer, shorter)
                    if cut_at < longer:
                        rest += longer - cut_at + OVERHEAD
                worst = cutlass.max(worst, cutlass.max(cut_at + OVERHEAD, rest))
        else:
            for position in cutlass.range(lane, clusters, 32, unroll=1):
                load, turn = Int32(0), Int32(0)
                for first in cutlass.range(0, batch, clusters, unroll=1):
                    i = first + position
                    if turn == 1:
                        i = first + clusters - 1 - position
                    if i < batch:
                        load += quotient(order[i], MAX_SORTED) + OVERHEAD
                    turn ^= 1
                worst = cutlass.max(worst, load)
        return cute.arch.warp_redux_sync(worst, "max")

    @cute.jit
    def find_start(
        self, measure: Measure, track: Track, sharing: Sharing, piece_blocks: Int32, schedule: Schedule
    ) -> Share:
        """Find the row tile in which the cluster's share begins."""
        tracks, tiles, blocks = measure.tracks, measure.tiles, measure.blocks
        kind, length, equal_cost = sharing.kind, sharing.length, sharing.equal_cost
        lane = cute.arch.lane_idx()
        batch = schedule.seq_lens.shape[0]
        begin = track.position * length
        r, tile, tile_start = batch, Int32(0), Int32(0)
        searching = Int32(1)
        if track.index >= tracks:
            searching = Int32(0)  # this cluster is left idle
        if const_expr(self.equal_row_counts):
            if searching == 1 and equal_cost > 0:
                # All requests have the same number of row tiles, and every tile takes `equal_cost` of the line,
                # whatever its own length is.
                searching = Int32(0)
                row_tile = begin
                if kind == ScheduleKind.CUT:
                    row_tile = divide(begin, equal_cost)
                r = row_tile
                if const_expr(self.max_tiles > 1):
                    if tracks == 1:
                        r = row_tile // self.max_tiles
                        tile = row_tile - r * self.max_tiles
                tile_start = row_tile * equal_cost
                if const_expr(self.may_sort_requests):
                    if kind == ScheduleKind.PACKED:
                        r, begin, tile_start = Int32(0), Int32(0), Int32(0)
                        length = cutlass.max(divide(batch - 1, track.clusters) + 1, 2)
                        self.note_requests(track.position, track.clusters, batch, schedule.order, schedule.state)
        if const_expr(self.equal_lengths):
            if searching == 1:
                searching = Int32(0)
                cost = self.cost_on_line(blocks, piece_blocks, kind, equal_cost, length)
                row_tile = divide(begin, cost)
                tile_start = row_tile * cost
                r = divide(row_tile, tiles)
                tile = row_tile - r * tiles
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
                tile = divide(begin - tile_start, tile_cost)
                tile_start += tile * tile_cost
            else:
                tile_start += cute.arch.shuffle_sync(prefix, 31)
                base += 32
                request = self.request_at(cutlass.min(base + lane, batch - 1), schedule)
                tiles, blocks = self.on_line(request.tiles, tracks), request.blocks
        return Share(
            request=r, tile=tile, tile_start=tile_start, begin=begin, length=length, kind=kind, equal_cost=equal_cost,
            tracks=tracks,
        )  # fmt: skip

    @cute.jit
    def note_requests(self, position: Int32, clusters: Int32, batch: Int32, order: cute.Tensor, state: cute.Tensor):
        """Copy this cluster's requests from `order` to `state`, because the ring's first stage, where `order` lies, is
        filled next."""
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
