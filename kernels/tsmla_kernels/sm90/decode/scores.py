"""What the softmax warpgroup of every decode kernel does with a piece: the frame of S = Q K^T, softmax and P."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tsmla_kernels.sm90.decode.memory import SOFTMAX_THREADS, Barrier, KeyRange, Stage


class ScoresFrame:
    """A base of the decode kernels, which set how Q is taken, blocks are scored and rows are finished."""

    @cute.jit
    def score(
        self,
        arrays: cutlass.Constexpr,
        ring: cutlass.Constexpr,
        q: cutlass.Constexpr,
        mma: cutlass.Constexpr,
        rank: Int32,
    ):
        """Warpgroup 0: Q once a piece, then for every block of keys Q K^T, softmax and P."""
        held = self.begin_scores(arrays, ring, q, mma, rank)
        index, phase, number = Int32(0), Int32(0), Int32(0)
        running = Int32(1)
        while running == 1:
            cute.arch.mbarrier_wait(ring.full + index, phase)
            piece, b_begin, b_end = self.described(number, ring.pieces)
            if b_begin == b_end:
                running = Int32(0)
                self.signal(ring.ready, index, held.place.lane)
            else:
                taken = self.take_q(piece, number, Stage(index, phase), held, ring)
                scored = self.score_blocks(piece, number, KeyRange(b_begin, b_end), taken, held, ring)
                self.finish_piece(piece, number, b_end, scored.last, held, ring)
                index, phase = scored.index, scored.phase
                self.signal(ring.ready, scored.last, held.place.lane)
                number += 1

    def sync_softmax(self) -> None:
        """The four warps of the softmax warpgroup meet."""
        cute.arch.barrier(barrier_id=Barrier.SOFTMAX, number_of_threads=SOFTMAX_THREADS)
