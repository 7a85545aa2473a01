"""Which CTA takes which row tiles of a prefill: they are dealt out in turn, and the rest is shared out as in decode."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from tsmla_kernels.sm90.latent.memory import Described, Piece, Schedule
from tsmla_kernels.sm90.latent.shape import OVERHEAD, LatentShape
from tsmla_kernels.sm90.latent.share import STATE_WORDS, BatchShare
from tsmla_kernels.sm90.latent.walk import KeyBlocks, PieceWalk, TileRows
from tsmla_kernels.sm90.warp import divide, remainder

MIN_ROUNDS = 3  # with fewer tiles for each CTA, sharing out all tiles as in decode balances as well
# Further words of the schedule's state: how many rounds there are, and how many are done.
ROUNDS, ROUND = STATE_WORDS, STATE_WORDS + 1
DEALT_STATE_WORDS = STATE_WORDS + 2


class DealtWalk:
    """Deals row tiles out in turn, in rounds of one tile for each CTA: forwards, then backwards, and so on. So the
    CTAs' loads balance even if lengths rise from token to token, and neighbouring tokens, which often select the same
    rows, are worked on at the same time. At least one tile is left after the last round. The tiles that are left are
    the rest: they are shared out, and cut if that balances, as a batch of their own, which `of_rest` walks.

    If there are too few tiles, or if lengths would leave CTAs too unequal, there are no rounds, and the rest is the
    whole batch.
    """

    def __init__(self, shape: LatentShape, *, pieces_kept: int, equal_lengths: bool) -> None:
        self.batch = BatchShare(shape, equal_lengths=equal_lengths, ends_batch=True)
        self.of_rest = PieceWalk(shape, batch=self.batch, pieces_kept=pieces_kept)
        self.pieces_kept, self.tile_rows, self.max_tiles = pieces_kept, shape.tile_rows, shape.max_tiles

    @cute.jit
    def begin(self, schedule: Schedule, early: tuple[Int32, Int32, Int32]):
        """Find out how many rounds there are, and this CTA's share of the rest. early: what early_numbers returned."""
        rounds = self.rounds(schedule)
        rest = self.rest(rounds, schedule)
        length, first_token, end_token = early
        if rounds > 0:
            length, _, _ = self.batch.early_numbers(rest.seq_lens, rest.seq_lens)
        if cute.arch.lane_idx() == 0:
            schedule.state[ROUNDS] = rounds
            schedule.state[ROUND] = Int32(0)
        self.of_rest.begin(rest, (length, first_token, end_token))

    @cute.jit
    def rounds(self, schedule: Schedule):
        """How many rounds are dealt out; 0 if there are fewer than MIN_ROUNDS tiles for each CTA, or if the rounds
        would leave CTAs too unequal."""
        tiles, ctas = schedule.seq_lens.shape[0] * self.max_tiles, schedule.num_clusters
        rounds = Int32(0)
        if tiles >= MIN_ROUNDS * ctas:
            rounds = divide(tiles - 1, ctas)  # so that a tile is left
            if const_expr(not self.batch.equal_lengths):
                if not self.balances(rounds, schedule):
                    rounds = Int32(0)
        return rounds

    @cute.jit
    def balances(self, rounds: Int32, schedule: Schedule):
        """Whether in these rounds the busiest CTA's load is above the CTAs' mean load by at most 1/32 of the mean or by
        at most OVERHEAD."""
        lane, ctas = cute.arch.lane_idx(), schedule.num_clusters
        last = schedule.seq_lens.shape[0] - 1
        most, total = Int32(0), Int32(0)
        for base in cutlass.range(0, ctas, 32, unroll=1):
            cta = cutlass.min(base + lane, ctas - 1)
            load = Int32(0)
            for i in cutlass.range(rounds, unroll=8):
                number = cutlass.min(self.tile_of(i, cta, ctas) // self.max_tiles, last)
                request = self.batch.request_at(number, schedule)
                cost = request.blocks + OVERHEAD
                load += cost * request.tiles if const_expr(self.batch.skips) else cost
            most = cutlass.max(most, load)
            if base + lane < ctas:
                total += load
        most = cute.arch.warp_redux_sync(most, "max")
        mean = divide(cute.arch.warp_redux_sync(total, "add"), ctas)
        return most <= mean + cutlass.max(mean >> 5, OVERHEAD)

    @cute.jit
    def next_round(self, i: Int32, rounds: Int32, schedule: Schedule):
        """The first round from `i` on whose row tile for this CTA belongs to this launch; `rounds` or more if there is
        no such round. Each request must have one row tile. The lanes look at 32 rounds at once."""
        lane, found = cute.arch.lane_idx(), Int32(0)
        while found == 0 and i < rounds:
            taken = Int32(0)
            if i + lane < rounds:
                mine = self.tile_of(i + lane, schedule.cluster_index, schedule.num_clusters)
                taken = Int32(schedule.seq_lens[mine] >= 0)
            ballot = cute.arch.vote_ballot_sync(taken == 1)
            if ballot != 0:
                i += cute.arch.popc((ballot & -ballot) - 1)
                found = Int32(1)
            else:
                i += 32
        return i

    def tile_of(self, i: Int32, cta: Int32, ctas: Int32) -> Int32:
        """The row tile that a CTA takes in round i."""
        # Odd rounds run backwards: -1 - cta is ~cta.
        odd = remainder(i, 2)
        return (i + odd) * ctas + (cta ^ -odd)

    def rest(self, rounds: Int32, schedule: Schedule) -> Schedule:
        """The schedule of the rest. If only some of a request's tiles are in the rounds, all tiles of this request
        belong to the rest, and next_piece skips those in the rounds."""
        first = rounds * schedule.num_clusters // self.max_tiles
        lens = schedule.seq_lens
        return schedule._replace(
            seq_lens=cute.make_tensor(lens.iterator + first, cute.make_layout((lens.shape[0] - first,)))
        )

    @cute.jit
    def next_piece(self, number: Int32, schedule: Schedule):
        """Describe this CTA's next piece as piece `number`, or the end of its work."""
        pieces, state, lane = schedule.pieces, schedule.state, cute.arch.lane_idx()
        cute.arch.sync_warp()
        rounds, i = state[ROUNDS], state[ROUND]
        cute.arch.sync_warp()
        rest = self.rest(rounds, schedule)
        dealt = schedule.seq_lens.shape[0] - rest.seq_lens.shape[0]
        if const_expr(self.batch.skips):
            i = self.next_round(i, rounds, schedule)
            if lane == 0:
                state[ROUND] = i
        row_tile = self.tile_of(i, schedule.cluster_index, schedule.num_clusters)
        piece = Described(pieces, remainder(number, self.pieces_kept))
        if i < rounds and row_tile < dealt * self.max_tiles:
            r = row_tile // self.max_tiles
            request = self.batch.request_at(r, schedule)
            first = (row_tile - r * self.max_tiles) * self.tile_rows
            rows = TileRows(first, request.first_row + first, cutlass.min(request.rows - first, self.tile_rows))
            if lane == 0:
                state[ROUND] = i + 1
                blocks = KeyBlocks(Int32(0), request.blocks, Int32(-1))
                self.of_rest.describe(piece, blocks, r, request, rows, schedule.rank)
            cute.arch.sync_warp()
        else:
            self.of_rest.next_piece(number, rest)
            if lane == 0:
                if piece[Piece.BLOCK_BEGIN] != piece[Piece.BLOCK_END]:
                    piece[Piece.REQUEST] = piece[Piece.REQUEST] + dealt
            cute.arch.sync_warp()
