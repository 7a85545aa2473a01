"""The softmax warpgroup's walk through its pieces, for every kind of operands: Q K^T, softmax and P."""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol, TypeVar

import cutlass.cute as cute
from cutlass import Int32, const_expr

from tsmla_kernels.sm90.latent.memory import Barrier, Blocks, Described, Place, Scored, Shared, Taken
from tsmla_kernels.sm90.latent.ring import Ring


class ScoreMma(NamedTuple):
    """The MMA of Q K^T (or K Q^T) of a block. If only some columns of Q are in registers, `shared` is the MMA of the
    other columns, which are in shared memory."""

    main: cute.TiledMma
    shared: cute.TiledMma | None = None


class HasPlace(Protocol):
    """The registers that a softmax warpgroup keeps from piece to piece: a type of its own for each kind of operands."""

    @property
    def place(self) -> Place: ...


Held = TypeVar("Held", bound=HasPlace, contravariant=True)


class Scores(Protocol[Held]):
    """The steps of the softmax warpgroup's walk: see ScoreWalk.

    Attributes:
      sums_later: whether a piece's last P V begins before the rows' factors are written, and value warps wait for SUMS.
    """

    @property
    def ring(self) -> Ring: ...

    @property
    def sums_later(self) -> bool: ...

    def wait_for_piece(self, number: Int32, index: Int32, phase: Int32, shared: Shared) -> None:
        """Wait until piece `number` has been described; `index` is its first stage."""

    def take_q(self, piece: Described, number: Int32, index: Int32, phase: Int32, held: Held, shared: Shared) -> Taken:
        """Take a piece's Q, and bring Q into the form in which it is multiplied."""

    def score_blocks(self, blocks: Blocks, number: Int32, taken: Taken, held: Held, shared: Shared) -> Scored:
        """Do Q K^T, softmax and P for a piece's key blocks."""

    def zero_keys(self, piece: Described, b_end: Int32, last: Int32, held: Held, shared: Shared) -> None:
        """Zero the keys past the request's end in stage `last`, unless other warps zero them."""

    def finish_piece(self, piece: Described, number: Int32, held: Held, shared: Shared) -> None:
        """Write the rows' factors for the epilogue, and their log-sum-exps."""


class ScoreWalk(Generic[Held]):
    """The softmax warpgroup's walk through its pieces, for which `steps` does the work."""

    def __init__(self, steps: Scores[Held]) -> None:
        self.steps = steps

    @cute.jit
    def run(self, held: Held, shared: Shared):
        """Run warpgroup 0: take Q once per piece; then do Q K^T, softmax and P for every block of keys."""
        index, phase, number = Int32(0), Int32(0), Int32(0)
        running = Int32(1)
        while running == 1:
            self.steps.wait_for_piece(number, index, phase, shared)
            blocks = self.steps.ring.described(number, shared.pieces)
            if blocks.begin == blocks.end:
                running = Int32(0)
                self.steps.ring.signal(shared.ready, index, held.place.lane)
            else:
                piece = blocks.piece
                taken = self.steps.take_q(piece, number, index, phase, held, shared)
                scored = self.steps.score_blocks(blocks, number, taken, held, shared)
                index, phase = scored.index, scored.phase
                if const_expr(self.steps.sums_later):
                    self.steps.zero_keys(piece, blocks.end, scored.last, held, shared)
                    self.steps.ring.signal(shared.ready, scored.last, held.place.lane)
                    self.steps.finish_piece(piece, number, held, shared)
                    self.steps.ring.arrive_for(Barrier.SUMS, number)
                else:
                    self.steps.zero_keys(piece, blocks.end, scored.last, held, shared)
                    self.steps.finish_piece(piece, number, held, shared)
                    self.steps.ring.signal(shared.ready, scored.last, held.place.lane)
                number += 1
