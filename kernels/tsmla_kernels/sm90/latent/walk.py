"""The walk through a cluster's share: one warp describes the share's pieces in shared memory, one after the other."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from tsmla_kernels.sm90.latent.memory import (
    Busy,
    Described,
    Piece,
    Request,
    Schedule,
    ScheduleKind,
    ScheduleState,
    Share,
    SplitEntry,
    Track,
)
from tsmla_kernels.sm90.latent.shape import OVERHEAD, ROWS, LatentShape
from tsmla_kernels.sm90.latent.share import ALL_KEYS, BatchShare
from tsmla_kernels.sm90.warp import divide, quotient, remainder


class TileOnLine(NamedTuple):
    """A row tile on its line: how many tiles its request has on the line, the tile's key blocks, its length, and the
    part of this length that comes before the key blocks."""

    tiles: Int32
    blocks: Int32
    cost: Int32
    lead: Int32


class TileRows(NamedTuple):
    """The rows of a row tile: the first row, counted in the request and counted in out, and how many rows."""

    in_request: Int32
    row: Int32
    rows: Int32


class KeyBlocks(NamedTuple):
    """Key blocks [begin, end) of a piece, and its slot of partial_out; the slot is -1 if the piece is a whole tile."""

    begin: Int32
    end: Int32
    slot: Int32


class Walk(Protocol):
    """Describes a CTA's pieces one after the other. batch: shares the batch out to the clusters."""

    @property
    def batch(self) -> BatchShare: ...

    def begin(self, schedule: Schedule, early: tuple[Int32, Int32, Int32]) -> None:
        """Find this cluster's share of the batch. early: the result of early_numbers."""

    def next_piece(self, number: Int32, schedule: Schedule) -> None:
        """Describe this cluster's next piece as piece `number`, or the end of its work."""


class PieceWalk:
    """Finds a cluster's pieces in its share of the batch.

    Attributes:
      batch: shares the batch out to the clusters. pieces_kept: as in Ring.
      heads, q_rows, tile_rows, max_tiles, ragged, batch_invariant, visible_lens: as in LatentShape.
    """

    def __init__(self, shape: LatentShape, *, batch: BatchShare, pieces_kept: int) -> None:
        self.batch, self.pieces_kept = batch, pieces_kept
        self.heads, self.q_rows = shape.num_heads, shape.q_rows
        self.tile_rows, self.max_tiles = shape.tile_rows, shape.max_tiles
        self.ragged, self.batch_invariant = shape.ragged, shape.batch_invariant
        self.visible_lens = shape.visible_lens

    @cute.jit
    def begin(self, schedule: Schedule, early: tuple[Int32, Int32, Int32]):
        """Find this cluster's share of the batch. early: the result of early_numbers."""
        split_info, state = schedule.split_info, schedule.state
        num_clusters, cluster_index = schedule.num_clusters, schedule.cluster_index
        lane = cute.arch.lane_idx()
        batch = schedule.seq_lens.shape[0]
        r, tile, tile_start, begin, length = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        kind, equal_cost, tracks = Int32(ScheduleKind.CUT), Int32(0), Int32(self.max_tiles)
        alone = cutlass.Boolean(False)
        if const_expr(self.batch.equal_row_counts):
            # A single request needs no measuring. It may be short, so a path of less code matters.
            blocks = self.batch.request(Int32(0), early, schedule).blocks
            alone = batch == 1 and self.batch.tracks_fit(blocks, num_clusters)
            if alone:
                track = self.batch.track_of(tracks, schedule)
                length = cutlass.max(divide(blocks + track.clusters - 1, track.clusters), self.batch.min_share)
                begin, equal_cost = (cluster_index - track.index * track.clusters) * length, track.clusters * length
                if track.index >= tracks:
                    r = batch
        if not alone:
            share = self.batch.share(schedule, early)
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
            if const_expr(self.batch.may_use_tracks):
                state[ScheduleState.TRACKS] = tracks
            if schedule.rank == 0:
                if const_expr(not self.batch_invariant):
                    for which in cutlass.range_constexpr(2):
                        slot = 2 * cluster_index + which
                        split_info[slot, SplitEntry.PIECES] = 0
        if const_expr(self.batch_invariant and self.ragged):
            # Clear the entries of row tiles that a short query does not have: no cluster describes these tiles.
            for i in cutlass.range(cluster_index * 32 + lane, batch, num_clusters * 32, unroll=1):
                tiles_of_request = self.batch.request_at(i, schedule).tiles
                for t in cutlass.range(tiles_of_request, self.max_tiles, unroll=1):
                    split_info[num_clusters + i * self.max_tiles + t, SplitEntry.PIECES] = 0
        cute.arch.sync_warp()

    @cute.jit
    def next_piece(self, number: Int32, schedule: Schedule):
        """Describe this cluster's next piece as piece `number`, or the end of its work."""
        pieces, state, rank, lane = schedule.pieces, schedule.state, schedule.rank, cute.arch.lane_idx()
        requests = self.batch.cluster_requests(state)
        cute.arch.sync_warp()
        r, tile = state[ScheduleState.REQUEST], state[ScheduleState.TILE]
        tile_start, begin = state[ScheduleState.TILE_START], state[ScheduleState.BEGIN]
        end, kind = state[ScheduleState.END], state[ScheduleState.KIND]
        piece_of_tile, equal_cost = state[ScheduleState.PIECE_OF_TILE], state[ScheduleState.EQUAL_COST]
        tracks = state[ScheduleState.TRACKS] if const_expr(self.batch.may_use_tracks) else Int32(1)
        track = self.batch.track_of(tracks, schedule)
        cute.arch.sync_warp()
        fixed = self.batch.fixed_pieces(schedule)
        lead = self.lead(kind)
        place, found = remainder(number, self.pieces_kept), Int32(0)
        while found == 0 and r < schedule.seq_lens.shape[0] and tile_start + lead < end:
            if const_expr(self.batch.may_sort_requests):
                if kind == ScheduleKind.PACKED:
                    r = cutlass.max(Int32(requests[tile_start]), 0)
            request = self.batch.request_at(r, schedule)
            tiles = self.batch.on_line(request.tiles, tracks)
            tile_cost = self.batch.cost_on_line(request.blocks, fixed.blocks, kind, equal_cost, end - begin)
            b_begin, b_end, slot = Int32(0), request.blocks, Int32(-1)
            first_row = (track.index + tile) * self.tile_rows
            tile_rows = cutlass.min(request.rows - first_row, self.tile_rows)
            rows = TileRows(first_row, request.first_row + first_row, tile_rows)
            tile_done = Int32(1)
            if tile < tiles:
                if const_expr(self.batch_invariant):
                    cuts = (request.blocks + fixed.blocks - 1) // fixed.blocks
                    step = fixed.blocks + OVERHEAD
                    if piece_of_tile < 0:
                        piece_of_tile = (cutlass.max(begin - tile_start, 0) + step - 1) // step
                    if piece_of_tile < cuts and tile_start + piece_of_tile * step < end:
                        found = Int32(1)
                        tile_done = Int32(0)
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
                    if const_expr(self.batch.may_sort_requests):
                        if kind == ScheduleKind.PACKED:
                            b_begin, b_end = self.packed_piece(tile_start, request.blocks, track, schedule)
                    if b_begin < b_end:
                        found = Int32(1)
                        if b_begin > 0:
                            slot = 2 * schedule.cluster_index
                        elif b_end < request.blocks:
                            slot = 2 * schedule.cluster_index + 1
            if found == 1:
                if const_expr(schedule.visible_lens is not None):
                    self.note_fewest_keys(Described(pieces, place), rows, schedule.visible_lens)
                if lane == 0:
                    self.describe(Described(pieces, place), KeyBlocks(b_begin, b_end, slot), r, request, rows, rank)
            if const_expr(not self.batch_invariant):
                if slot >= 0 and rank == 0 and lane == 0:
                    share = Share(
                        request=r, tile=tile, tile_start=tile_start, begin=begin, length=end - begin, kind=kind,
                        equal_cost=equal_cost, tracks=tracks,
                    )  # fmt: skip
                    line = TileOnLine(tiles, request.blocks, tile_cost, lead)
                    self.note_cut(slot, rows, share, line, track, schedule)
            if tile_done == 1:
                tile_start += tile_cost
                tile += 1
                piece_of_tile = Int32(-1)
                if tile >= tiles:
                    tile_start -= (tile - tiles) * tile_cost  # a request without queries takes no part of the line
                    tile = Int32(0)
                    r += 1
                if const_expr(self.batch.may_sort_requests):
                    if kind == ScheduleKind.PACKED:
                        r = Int32(0)  # any index that lets the walk go on: `requests` has the request's index
        if lane == 0:
            if found == 0:
                pieces[Piece.BLOCK_BEGIN, place] = 0
                pieces[Piece.BLOCK_END, place] = 0
            state[ScheduleState.REQUEST] = r
            state[ScheduleState.TILE] = tile
            state[ScheduleState.TILE_START] = tile_start
            state[ScheduleState.PIECE_OF_TILE] = piece_of_tile
        cute.arch.sync_warp()

    @cute.jit
    def lead(self, kind: Int32):
        """How much of a tile's length on the line is start-up cost, which comes before its key blocks."""
        lead = Int32(0)
        if const_expr(not self.batch_invariant):
            if kind == ScheduleKind.LINE:
                lead = Int32(OVERHEAD)
        return lead

    @cute.jit
    def packed_piece(self, i: Int32, blocks: Int32, track: Track, schedule: Schedule):
        """Key blocks (begin, end) of a cluster's i-th piece if requests are dealt out by length. Its request has
        `blocks` blocks. If begin == end, this piece is empty, but the next one may have blocks."""
        requests = self.batch.cluster_requests(schedule.state)
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
                    shorter = self.batch.request_at(Int32(requests[1]), schedule).blocks
                cut_at = self.batch.cut(blocks, shorter)
                if odd == 1:
                    begin = cut_at
                else:
                    end = cut_at
        return begin, end

    @cute.jit
    def describe(self, piece: Described, blocks: KeyBlocks, r: Int32, request: Request, rows: TileRows, rank: Int32):
        """Write a piece's description: key `blocks` of request `r`, and this CTA's part of the row tile's `rows`."""
        piece[Piece.BLOCK_BEGIN] = blocks.begin
        piece[Piece.BLOCK_END] = blocks.end
        piece[Piece.KEYS] = request.keys
        if const_expr(not self.visible_lens):
            piece[Piece.FIRST_TOKEN_KEYS] = request.keys + 1 - request.rows // self.heads
        piece[Piece.ROW_IN_REQUEST] = rows.in_request + rank * ROWS
        piece[Piece.ROW] = rows.row + rank * ROWS
        piece[Piece.VALID_ROWS] = cutlass.min(rows.rows - rank * ROWS, ROWS)
        piece[Piece.SLOT] = blocks.slot
        piece[Piece.REQUEST] = r
        q_rows = cutlass.min(rows.rows, ROWS)
        piece[Piece.Q_STAGES] = 1 + quotient(q_rows - 1, self.q_rows)

    @cute.jit
    def note_fewest_keys(self, piece: Described, rows: TileRows, visible_lens: cute.Tensor):
        """Write the fewest keys that a token of the row tile's `rows` sees. The whole warp calls it."""
        lane = cute.arch.lane_idx()
        first, last = rows.row // self.heads, (rows.row + rows.rows - 1) // self.heads
        fewest = Int32(ALL_KEYS)
        for token in cutlass.range(first + lane, cutlass.min(last + 1, visible_lens.shape[0]), 32, unroll=1):
            fewest = cutlass.min(fewest, visible_lens[token])
        fewest = cute.arch.warp_redux_sync(fewest, "min")
        if lane == 0:
            piece[Piece.FEWEST_KEYS] = fewest

    @cute.jit
    def note_fixed_cut(self, entry: Int32, rows: TileRows, first_slot: Int32, cuts: Int32, schedule: Schedule):
        """Write the SplitEntry of a row tile if batch_invariant. The entry says 0 pieces if the tile is not cut."""
        split_info = schedule.split_info
        count = cuts
        if cuts == 1:
            count = Int32(0)
        split_info[entry, SplitEntry.ROW] = rows.row
        split_info[entry, SplitEntry.ROWS] = rows.rows
        split_info[entry, SplitEntry.SLOT] = first_slot
        split_info[entry, SplitEntry.PIECES] = count

    @cute.jit
    def note_cut(self, slot: Int32, rows: TileRows, share: Share, line: TileOnLine, track: Track, schedule: Schedule):
        """Write the SplitEntry of the current row tile. The tile has `count` pieces; each of the `count` clusters from
        `owner` on has one of them."""
        split_info = schedule.split_info
        owner = divide(share.tile_start + line.lead, share.length)
        count = divide(share.tile_start + line.lead + line.blocks - 1, share.length) - owner + 1
        # The flags are an estimate, but all clusters of the tile must find the same flags.
        busy = Int32(0)
        if share.kind == ScheduleKind.LINE:
            if share.tile_start > owner * share.length:
                busy += Busy.FIRST
            rest = (owner + count) * share.length - (share.tile_start + line.cost) - line.lead
            if rest > 0 and (share.tile + 1 < line.tiles or share.request + 1 < schedule.seq_lens.shape[0]):
                busy += Busy.LAST
        if const_expr(self.batch.may_sort_requests):
            if share.kind == ScheduleKind.PACKED:
                owner, count = track.position - remainder(track.position, 2), Int32(2)
        split_info[slot, SplitEntry.ROW] = rows.row
        split_info[slot, SplitEntry.ROWS] = rows.rows
        split_info[slot, SplitEntry.SLOT] = 2 * (track.index * track.clusters + owner) + 1
        split_info[slot, SplitEntry.PIECES] = count + busy
