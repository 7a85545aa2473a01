"""S = Q K^T, softmax and P of decode, queries and cache of e4m3: fp8 WGMMA, Q in shared memory, P as f16."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field

from tsmla_kernels.sm90.constants import LOG2_E
from tsmla_kernels.sm90.decode.config import ROWS, DecodeConfig
from tsmla_kernels.sm90.decode.memory import (
    Arrays,
    Described,
    KeyRange,
    Place,
    Results,
    Running,
    Scored,
    Scratch,
    Shared,
    Stage,
    Taken,
    ThreadScores,
)
from tsmla_kernels.sm90.decode.ring import Ring
from tsmla_kernels.sm90.decode.scores import Scores
from tsmla_kernels.sm90.warp import kept, quotient

EARLY_STEPS = 8  # 32-column steps of Q K^T that are still to come when the values' warpgroups are let loose


class Held(NamedTuple):
    """What the softmax warpgroup holds from piece to piece.

    Attributes:
      mma_qk: Q K^T. q: Q in shared memory. t_q: the same, as its operand.
      acc, probabilities: S and P of a block, which may be one. r_p: P as it is stored.
      p_offset: where the lane's row of P lies in a stage.
      running: the rows' maxima and sums. scale: of the logits, base 2. results: where rows are finished.
      place: of the thread. signals: 1 if its lane arrives in `signal`.
    """

    mma_qk: cute.TiledMma
    q: cute.Tensor
    t_q: cute.Tensor
    acc: cute.Tensor
    probabilities: cute.Tensor
    r_p: cute.Tensor
    p_offset: Int32
    running: Running
    scale: Float32
    results: Results
    place: Place
    signals: Int32


class ScoresFp8(Scores):
    """Q K^T of queries and keys of e4m3. q_dtype, q_elements: of Q in shared memory."""

    def __init__(self, config: DecodeConfig, ring: Ring) -> None:
        super().__init__(config, ring)
        self.q_dtype, self.q_elements = ring.dtype, ROWS * config.head_dim

    def mma(self) -> cute.TiledMma:
        """Q K^T of a block."""
        dtype, k_major = self.ring.dtype, OperandMajorMode.K
        return sm90.make_trivial_tiled_mma(
            dtype, dtype, k_major, k_major, Float32, (1, 1, 1), (ROWS, self.block)
        )

    @cute.jit
    def begin(self, arrays: Arrays, shared: Shared, scratch: Scratch, mma_qk: cute.TiledMma, rank: Int32):
        """What the softmax warpgroup holds from piece to piece, a Held."""
        q_tile = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(self.ring.q_swizzle, self.q_dtype), (ROWS, self.depth), (0, 1)
        )
        s_q = cute.make_tensor(cute.recast_ptr(scratch.q, q_tile.inner, dtype=self.q_dtype), q_tile.outer)
        tidx, _, _ = cute.arch.thread_idx()
        t = tidx % 128
        lane = kept(t % 32)
        signals = Int32(self.ring.signals(lane))
        warp_here = cute.arch.make_warp_uniform(t // 32)
        scale = arrays.scales[0] * LOG2_E
        results = Results(shared.inverse, arrays.lse, arrays.partial_lse, arrays.scales[1], rank)

        t_q = mma_qk.make_fragment_A(mma_qk.get_slice(t).partition_A(s_q))
        acc = cute.make_rmem_tensor(mma_qk.get_slice(t).partition_shape_C((ROWS, self.block)), Float32)
        probabilities = cute.make_rmem_tensor(acc.layout, Float32) if const_expr(self.softmax.speculates) else acc

        # A lane's row of P, of 128 bytes: its first 16 bytes, or the second, exchanged by the swizzle.
        r_p = cute.make_rmem_tensor(acc.layout, self.ring.p_dtype)
        p_row = warp_here * 16 + lane % 16
        p_offset = kept(self.ring.p_offset + p_row * 128 + (((lane // 16) ^ (p_row & 7)) << 4))

        place = Place(t, warp_here, lane, warp_here * 16 + lane // 4)
        running = Running(cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32))
        return Held(mma_qk, s_q, t_q, acc, probabilities, r_p, p_offset, running, scale, results, place, signals)

    @cute.jit
    def take_q(self, piece: Described, number: Int32, stage: Stage, held: Held, shared: Shared):
        """Q from its stage to where it stays, in 16-byte words: the same bytes in the same order."""
        t = held.place.thread
        q_words = cute.make_layout((4, 128, ROWS * self.depth // (16 * 128)), stride=(1, 4, 512))
        plain = cute.make_swizzle(0, 4, 3)
        q_there = cute.make_tensor(cute.recast_ptr(held.q.iterator, plain, dtype=Float32), q_words)
        word = cute.make_rmem_tensor((4,), Float32)
        q_here = cute.make_tensor(
            cute.recast_ptr(shared.keys[None, None, stage.index].iterator, plain, dtype=Float32), q_words
        )
        # All four warps have read the Q that is there.
        self.sync_softmax()
        for i in cutlass.range(cute.size(q_words, mode=[2]), unroll=3):
            cute.autovec_copy(q_here[None, t, i], word)
            cute.autovec_copy(word, q_there[None, t, i])
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync_softmax()
        self.ring.q_is_read(number)
        self.ring.signal(shared.ready, stage.index, held.place.lane)
        index, phase = self.ring.advance(stage.index, stage.phase)
        return Taken(index, phase, held.scale)

    @cute.jit
    def score_blocks(self, piece: Described, number: Int32, blocks: KeyRange, taken: Taken, held: Held, shared: Shared):
        """Q K^T, softmax and P of a piece's key blocks."""
        mma_qk, acc = held.mma_qk, held.acc
        place, running = held.place, held.running
        by_rows = cute.make_layout((2, (2, self.block // 8)), stride=(2, (1, 4)))
        scores = ThreadScores(
            cute.make_tensor(acc.iterator, by_rows), cute.make_tensor(held.probabilities.iterator, by_rows)
        )
        steps = self.depth // 32
        index, phase = taken.index, taken.phase
        self.softmax.begin_rows(running)
        seen_by_all = self.softmax.seen_by_all(piece)
        previous, address = index, self.ring.address(shared.keys, index)
        following, phase_following = self.ring.advance(index, phase)
        arrived, stored = Int32(0), Int32(0)
        # The blocks with a mask in a loop of their own: to jump over it takes 20 cycles of the others.
        unmasked = cutlass.min(cutlass.max(quotient(seen_by_all, self.block), blocks.begin), blocks.end)
        for masked in cutlass.range_constexpr(2):
            first, last = (blocks.begin, unmasked) if const_expr(masked == 0) else (unmasked, blocks.end)
            for b in cutlass.range(first, last, unroll=1):
                stage_keys, _ = self.ring.stage_tensors(shared, address)
                t_k = mma_qk.make_fragment_B(mma_qk.get_slice(place.thread).partition_B(stage_keys))
                if arrived == 0:
                    cute.arch.mbarrier_wait(shared.full + index, phase)
                warpgroup.fence()
                mma_qk.set(Field.ACCUMULATE, False)
                for k in cutlass.range_constexpr(steps):
                    if const_expr(k == steps - EARLY_STEPS):
                        # The tensor cores take turns, as in Scores16bit.
                        self.ring.signal_if(stored, shared.ready, previous)
                    cute.gemm(mma_qk, acc, held.t_q[None, None, k], t_k[None, None, k], acc)
                    mma_qk.set(Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                previous, index, phase = index, following, phase_following
                address_here = address
                ahead = self.ring.look_ahead(index, phase, shared)
                arrived, address = ahead.arrived, ahead.address
                following, phase_following = ahead.following, ahead.phase
                if const_expr(masked == 1):
                    self.softmax.mask(scores.s, b, piece, place)
                self.softmax.run(scores, running, held.scale, place, shared, previous)
                held.r_p.store(held.probabilities.load().to(self.ring.p_dtype))
                self.ring.store_p(address_here + held.p_offset, cute.recast_tensor(held.r_p, Int32))
                stored = held.signals
        return Scored(index, phase, previous)

    @cute.jit
    def finish_piece(self, piece: Described, number: Int32, b_end: Int32, last: Int32, held: Held, shared: Shared):
        """Finish the rows."""
        self.softmax.finish(held.running, held.place, piece, number, held.results)
