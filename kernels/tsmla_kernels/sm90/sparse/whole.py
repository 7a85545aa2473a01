"""The walk of a call of few row tiles and few keys: each CTA has one whole row tile, and nothing is merged."""

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
    """Gives CTA c the row tile c: there are as many CTAs as row tiles. So a CTA's share follows from its own token's
    length, and no schedule is computed, whose code would take longer than a block of keys.

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
        """The `numbers` of the CTA's token. All warps load these early, as in BatchShare.early_numbers."""
        return self.batch.numbers(cta // self.max_tiles, lengths, lengths)

    def first_row(self, cta: Int32) -> Int32:
        """The first query row of the CTA's row tile, counted in q."""
        token = cta // self.max_tiles
        return token * self.heads + (cta - token * self.max_tiles) * self.tile_rows

    @cute.jit
    def begin(self, schedule: Schedule, early: tuple[Int32, Int32, Int32]):
        """Describe the CTA's row tile as piece 0. early: the result of early_numbers."""
        if cute.arch.lane_idx() == 0:
            token = schedule.cluster_index // self.max_tiles
            request = self.batch.request(token, early, schedule)
            first = (schedule.cluster_index - token * self.max_tiles) * self.tile_rows
            rows = TileRows(first, request.first_row + first, cutlass.min(request.rows - first, self.tile_rows))
            blocks = KeyBlocks(Int32(0), request.blocks, Int32(-1))
            self.pieces.describe(Described(schedule.pieces, Int32(0)), blocks, token, request, rows, schedule.rank)
        cute.arch.sync_warp()

    @cute.jit
    def next_piece(self, number: Int32, schedule: Schedule):
        """Describe the end of the CTA's work as piece `number`, unless it is piece 0."""
        if number > 0 and cute.arch.lane_idx() == 0:
            piece = Described(schedule.pieces, remainder(number, self.pieces_kept))
            piece[Piece.BLOCK_BEGIN] = Int32(0)
            piece[Piece.BLOCK_END] = Int32(0)
        cute.arch.sync_warp()
