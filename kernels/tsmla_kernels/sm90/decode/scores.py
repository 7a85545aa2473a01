"""The softmax warpgroup's walk through its pieces, for every kind of operands: Q K^T, softmax and P."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from tsmla_kernels.sm90.constants import LOG2_E
from tsmla_kernels.sm90.decode.config import ROWS, DecodeConfig
from tsmla_kernels.sm90.decode.memory import (
    Arrays,
    Barrier,
    Described,
    Place,
    Results,
    Running,
    Scratch,
    Shared,
)
from tsmla_kernels.sm90.decode.ring import Ring
from tsmla_kernels.sm90.decode.softmax import Softmax
from tsmla_kernels.sm90.warp import kept


class ScoreMma(NamedTuple):
    """The MMA of Q K^T of a block."""

    main: cute.TiledMma


class Held(NamedTuple):
    """What the softmax warpgroup holds from piece to piece, if it has scores as rows by keys.

    Attributes:
      mma: of Q K^T, with `main`. q: Q, as the kind of operands has it.
      acc, probabilities: S and P of a block, which share registers unless the softmax speculates.
      r_p: P as it is stored. p_offset: of the lane's row of P in a stage.
      running: the lane's maxima and sums. scale: of the logits, base 2. results: of finished rows.
      place: of the thread. signals: 1 if the lane arrives in Ring.signal.
      visible_lens: as in Arrays.
    """

    mma: Any
    q: Any
    acc: cute.Tensor
    probabilities: cute.Tensor
    r_p: cute.Tensor
    p_offset: Int32
    running: Running
    scale: Float32
    results: Results
    place: Place
    signals: Int32
    visible_lens: cute.Tensor | None = None


class Scores:
    """The base of the classes that compute S = Q K^T, softmax and P, one for each kind of operands.

    A subclass defines `mma`, `take_q`, `score_blocks` and `finish_piece`; `begin`, or `kept_q_rows` and `queries` for
    `begin`; and q_dtype and q_elements, the dtype and the size of Q's place in shared memory.

    Attributes:
      sums_later: whether a piece's last P V begins before the row sums are finished, and value warps wait for SUMS.
    """

    def __init__(self, config: DecodeConfig, ring: Ring) -> None:
        self.config, self.ring, self.sums_later = config, ring, config.transposed_out
        self.softmax = Softmax(config, ring.inverses_kept)
        self.block, self.depth, self.latent = config.block, config.head_dim, config.latent_dim

    @cute.jit
    def score(self, arrays: Arrays, shared: Shared, scratch: Scratch, mma: Any, rank: Int32):
        """Warpgroup 0: take Q once a piece; then Q K^T, softmax and P for every block of keys."""
        held = self.begin(arrays, shared, scratch, mma, rank)
        index, phase, number = Int32(0), Int32(0), Int32(0)
        running = Int32(1)
        while running == 1:
            self.wait_for_piece(number, index, phase, shared)
            blocks = self.ring.described(number, shared.pieces)
            if blocks.begin == blocks.end:
                running = Int32(0)
                self.ring.signal(shared.ready, index, held.place.lane)
            else:
                piece = blocks.piece
                taken = self.take_q(piece, number, index, phase, held, shared)
                scored = self.score_blocks(blocks, number, taken, held, shared)
                index, phase = scored.index, scored.phase
                if const_expr(self.sums_later):
                    self.zero_keys(piece, blocks.end, scored.last, held, shared)
                    self.ring.signal(shared.ready, scored.last, held.place.lane)
                    self.finish_piece(piece, number, held, shared)
                    self.ring.arrive_for(Barrier.SUMS, number)
                else:
                    self.zero_keys(piece, blocks.end, scored.last, held, shared)
                    self.finish_piece(piece, number, held, shared)
                    self.ring.signal(shared.ready, scored.last, held.place.lane)
                number += 1

    def wait_for_piece(self, number: Int32, index: Int32, phase: Int32, shared: Shared) -> None:
        """Wait until piece `number` has been described, and its first stage, `index`, is full."""
        cute.arch.mbarrier_wait(shared.full + index, phase)

    def zero_keys(self, piece: Described, b_end: Int32, last: Int32, held: Any, shared: Shared) -> None:
        """Zero the keys past the end, in stage `last`, unless value warps do."""

    @cute.jit
    def begin(self, arrays: Arrays, shared: Shared, scratch: Scratch, mma: Any, rank: Int32) -> Any:
        """Set up what the softmax warpgroup holds from piece to piece."""
        q_rows = self.kept_q_rows(scratch)
        tidx, _, _ = cute.arch.thread_idx()
        t = tidx % 128
        lane = kept(t % 32)
        signals = Int32(self.ring.signals(lane))
        warp_here = cute.arch.make_warp_uniform(t // 32)
        scale = arrays.scales[0] * LOG2_E
        results = Results(shared.inverse, arrays.lse, arrays.partial_lse, arrays.scales[1], rank)
        q = self.queries(q_rows, mma, t)
        acc = cute.make_rmem_tensor(mma.main.get_slice(t).partition_shape_C((ROWS, self.block)), Float32)
        probabilities = cute.make_rmem_tensor(acc.layout, Float32) if const_expr(self.softmax.speculates) else acc
        # The lane stores rows of P by 16 bytes, its first or second ones; the swizzle permutes them.
        r_p = cute.make_rmem_tensor(acc.layout, self.ring.p_dtype)
        p_row = warp_here * 16 + lane % 16
        p_offset = kept(self.ring.p_offset + p_row * (2 * self.block) + (((lane // 16) ^ self.swizzle(p_row)) << 4))
        place = Place(t, warp_here, lane, warp_here * 16 + lane // 4)
        running = Running(cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32))
        return Held(
            mma, q, acc, probabilities, r_p, p_offset, running, scale, results, place, signals, arrays.visible_lens
        )

    def swizzle(self, p_row: Int32) -> Int32:
        """What the swizzle of P does to the numbers of a row's 16-byte groups: an exclusive or with this."""
        return p_row & 7 if self.block == 64 else (p_row >> 1) & 3
