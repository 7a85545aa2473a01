"""What the softmax warpgroup of every decode kernel does with a piece: the frame of S = Q K^T, softmax and P."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tsmla_kernels.sm90.decode.config import DecodeConfig
from tsmla_kernels.sm90.decode.memory import SOFTMAX_THREADS, Arrays, Barrier, KeyRange, Scratch, Shared, Stage
from tsmla_kernels.sm90.decode.ring import Ring
from tsmla_kernels.sm90.decode.softmax import Softmax


class Scores:
    """A base of what computes S = Q K^T, softmax and P. Each kind of operands has a class of its own, with
    `begin`, `take_q`, `score_blocks` and `finish_piece`, and with q_dtype and q_elements of Q in shared memory.
    """

    def __init__(self, config: DecodeConfig, ring: Ring) -> None:
        self.config, self.ring = config, ring
        self.softmax = Softmax(config, ring.inverses_kept)
        self.block, self.depth, self.latent = config.block, config.head_dim, config.latent_dim

    @cute.jit
    def score(self, arrays: Arrays, shared: Shared, scratch: Scratch, mma: cutlass.Constexpr, rank: Int32):
        """Warpgroup 0: Q once a piece, then for every block of keys Q K^T, softmax and P."""
        held = self.begin(arrays, shared, scratch, mma, rank)
        index, phase, number = Int32(0), Int32(0), Int32(0)
        running = Int32(1)
        while running == 1:
            cute.arch.mbarrier_wait(shared.full + index, phase)
            piece, b_begin, b_end = self.ring.described(number, shared.pieces)
            if b_begin == b_end:
                running = Int32(0)
                self.ring.signal(shared.ready, index, held.place.lane)
            else:
                taken = self.take_q(piece, number, Stage(index, phase), held, shared)
                scored = self.score_blocks(piece, number, KeyRange(b_begin, b_end), taken, held, shared)
                self.finish_piece(piece, number, b_end, scored.last, held, shared)
                index, phase = scored.index, scored.phase
                self.ring.signal(shared.ready, scored.last, held.place.lane)
                number += 1

    def sync_softmax(self) -> None:
        """The four warps of the softmax warpgroup meet."""
        cute.arch.barrier(barrier_id=Barrier.SOFTMAX, number_of_threads=SOFTMAX_THREADS)

    def any_of_warps(self, holds: Int32) -> Int32:
        """Whether `holds` is 1 in any thread of the scores' warpgroup, which meets here."""
        return cute.arch.inline_ptx(
            "{ .reg .pred holds, any; setp.ne.s32 holds, {$r0}, 0; "
            f"barrier.cta.red.or.pred any, {Barrier.SOFTMAX:d}, {SOFTMAX_THREADS}, holds; "
            "selp.s32 {$w0}, 1, 0, any; }",
            write_only_types=[Int32],
            read_only_args=[holds],
        )
