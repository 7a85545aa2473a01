"""The walk of a call of few row tiles and few keys: CTAs have whole row tiles, and nothing is merged."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tsmla_kernels.sm90.latent.memory import Described, Piece, Schedule
from tsmla_kernels.sm90.latent.shape import LatentShape
from tsmla_kernels.sm90.latent.share import BatchShare
from tsmla_kernels.sm90.latent.walk import KeyBlocks, PieceWalk, TileRows
from tsmla_kernels.sm90.warp import remainder


class WholeWalk:
    """Gives CTA c of n the row tiles c, c + n, c + 2 n and so on. So a CTA's share follows from its own tokens'
    lengths, and no schedule is computed, whose code would take longer than a block of keys.

    Attributes:
      batch: finds a token's rows and blocks. pieces: describes a piece.
      pieces_kept: as in Ring. heads, tile_rows, max_tiles: as in LatentShape.
    """

    def __init__(self, shape: LatentShape, *, pieces_kept: int, equal_lengths: bool) -> None:
        self.batch = BatchShare(shape, equal_lengths=equal_lengths)
        self.pieces = PieceWalk(shape, batch=self.batch, pieces_kept=pieces_kept)
        self.pieces_kept, self.heads = pieces_kept, shape.num_heads
        self.tile_rows, self.max_tiles = shape.tile_rows, shape.max_tiles

    @cute.jit
    def early_numbers(self, cta: Int32, lengths: cute.Tensor):
        """The `numbers` of the CTA's first token. All warps load these early, as in BatchShare.early_numbers."""
        return self.numbers(cta, lengths)

    @cute.jit
    def numbers(self, tile: Int32, lengths: cute.Tensor):
        """The `numbers` of a row tile's token."""
        return self.batch.numbers(tile // self.max_tiles, lengths, lengths)

    def first_row(self, cta: Int32) -> Int32:
        """The first query row of the CTA's first row tile, counted in q."""
        token = cta // self.max_tiles
        return token * self.heads + (cta - token * self.max_tiles) * self.tile_rows

    @cute.jit
    def begin(self, schedule: Schedule, early: tuple[Int32, Int32, Int32]):
        """Describe the CTA's first two pieces, so that the second one's Q can be requested as soon as there is room for
        it. early: the result of early_numbers."""
        if cute.arch.lane_idx() == 0:
            self.describe(Int32(0), early, schedule)
            self.describe_next(Int32(1), schedule)
        cute.arch.sync_warp()

    @cute.jit
    def next_piece(self, number: Int32, schedule: Schedule):
        """Describe the CTA's next piece as piece `number`, or the end of its work, unless `begin` has done it."""
        if number > 1 and cute.arch.lane_idx() == 0:
            self.describe_next(number, schedule)
        cute.arch.sync_warp()

    @cute.jit
    def describe_next(self, number: Int32, schedule: Schedule):
        """Describe piece `number`, which is not the first, or the end of the CTA's work."""
        tile = schedule.cluster_index + number * schedule.num_clusters
        if tile < schedule.seq_lens.shape[0] * self.max_tiles:
            self.describe(number, self.numbers(tile, schedule.seq_lens), schedule)
        else:
            piece = Described(schedule.pieces, remainder(number, self.pieces_kept))
            piece[Piece.BLOCK_BEGIN] = Int32(0)
            piece[Piece.BLOCK_END] = Int32(0)

    @cute.jit
    def describe(self, number: Int32, numbers: tuple[Int32, Int32, Int32], schedule: Schedule):
        """Describe the CTA's row tile `number` as the piece of that number. numbers: the `numbers` of its token."""
        tile = schedule.cluster_index + number * schedule.num_clusters
        token = tile // self.max_tiles
        request = self.batch.request(token, numbers, schedule)
        first = (tile - token * self.max_tiles) * self.tile_rows
        rows = TileRows(first, request.first_row + first, cutlass.min(request.rows - first, self.tile_rows))
        blocks = KeyBlocks(Int32(0), request.blocks, Int32(-1))
        piece = Described(schedule.pieces, remainder(number, self.pieces_kept))
        self.pieces.describe(piece, blocks, token, request, rows, schedule.rank)
