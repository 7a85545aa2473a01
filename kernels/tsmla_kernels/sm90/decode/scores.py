"""The common parts of decode's S = Q K^T, softmax and P, used if queries and cache both have 16 bits or are both
e4m3. The base class Scores also serves 16-bit queries over e4m3."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from tsmla_kernels.sm90.constants import LOG2_E
from tsmla_kernels.sm90.decode.config import DecodeConfig
from tsmla_kernels.sm90.decode.memory import Arrays, Scratch
from tsmla_kernels.sm90.decode.softmax import Softmax
from tsmla_kernels.sm90.decode.stages import Stages
from tsmla_kernels.sm90.latent.memory import Described, Place, Results, Running, Shared
from tsmla_kernels.sm90.latent.scores import ScoreMma, ScoreWalk
from tsmla_kernels.sm90.latent.shape import ROWS
from tsmla_kernels.sm90.warp import kept


class Queries(Protocol):
    """Q in the form that the MMAs take. Each kind of operands has a type of its own."""


class Held(NamedTuple):
    """The values that a softmax thread keeps from piece to piece, if its scores are S (query rows by keys), not S^T.

    Attributes:
      mma: the MMAs of Q K^T. q: Q in the form that they take.
      acc, probabilities: S and P of a block, which share registers unless the softmax speculates.
      r_p: P in the dtype in which it is stored. p_offset: the offset of the lane's row of P in a stage.
      running: the lane's maxima and sums. scale: the logits' scale, base 2. results: the arrays for finished rows.
      place: the thread's place. signals: 1 if the lane arrives in Ring.signal.
      visible_lens: as in Arrays.
    """

    mma: ScoreMma
    q: Queries
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

    A subclass defines `mma`, `take_q`, `score_blocks` and `finish_piece`; either `begin` itself, or `kept_q_rows` and
    `queries`, which `begin` calls; and q_dtype and q_elements, dtype and element count of Q's place in shared memory.

    Attributes:
      sums_later: as in latent.scores.Scores.
    """

    def __init__(self, config: DecodeConfig, stages: Stages) -> None:
        self.config, self.ring, self.stages, self.sums_later = config, stages.ring, stages, config.transposed_out
        self.softmax = Softmax(config, self.ring.inverses_kept)
        self.block, self.depth, self.latent = config.block, config.head_dim, config.latent_dim

    @cute.jit
    def score(self, arrays: Arrays, shared: Shared, scratch: Scratch, mma: ScoreMma, rank: Int32):
        """Run warpgroup 0: see latent.scores.ScoreWalk."""
        # The subclasses define the steps that this class lacks.
        walk: ScoreWalk[Held] = ScoreWalk(self)  # type: ignore[arg-type]
        walk.run(self.begin(arrays, shared, scratch, mma, rank), shared)

    def wait_for_piece(self, number: Int32, index: Int32, phase: Int32, shared: Shared) -> None:
        """Wait until piece `number` has been described, and its first stage, `index`, is full."""
        cute.arch.mbarrier_wait(shared.full + index, phase)

    def zero_keys(self, piece: Described, b_end: Int32, last: Int32, held: Held, shared: Shared) -> None:
        """Do nothing: the value warps zero the keys past the end. Scores16bit zeroes them here instead."""

    @cute.jit
    def begin(self, arrays: Arrays, shared: Shared, scratch: Scratch, mma: ScoreMma, rank: Int32) -> Held:
        """Set up the softmax warpgroup's registers."""
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
        # Each lane gives stmatrix the address of 16 bytes of P: lanes 0 to 15 the first 16 bytes of 16 rows, lanes 16
        # to 31 the next 16 bytes of the same rows. The swizzle permutes these groups of 16 bytes.
        r_p = cute.make_rmem_tensor(self.in_order_of_p(acc).shape, self.ring.p_dtype)
        p_row = warp_here * 16 + lane % 16
        in_row = ((lane // 16) ^ self.swizzle(p_row)) << 4
        p_offset = kept(self.ring.p_offset + p_row * self.ring.p_row_bytes + in_row)
        place = Place(t, warp_here, lane, warp_here * 16 + lane // 4)
        running = Running(cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32))
        return Held(
            mma=mma,
            q=q,
            acc=acc,
            probabilities=probabilities,
            r_p=r_p,
            p_offset=p_offset,
            running=running,
            scale=scale,
            results=results,
            place=place,
            signals=signals,
            visible_lens=arrays.visible_lens,
        )

    def swizzle(self, p_row: Int32) -> Int32:
        """The swizzle of row `p_row` of P: the row's 16-byte group n lies at index n ^ swizzle(p_row)."""
        return p_row & 7 if self.ring.p_row_bytes == 128 else (p_row >> 1) & 3

    def in_order_of_p(self, probabilities: cute.Tensor) -> cute.Tensor:
        """The lane's P of a block in the order of its words. A word of e4m3 has two keys of a group of eight and two of
        the next group. V^T is read in the same order."""
        if not self.config.fp8_p:
            return probabilities
        layout = cute.make_layout((2, 2, 2, self.block // 16), stride=(1, 4, 2, 8))
        return cute.make_tensor(probabilities.iterator, layout)
