"""S = Q K^T, softmax and P of decode for queries and cache of e4m3, by fp8 WGMMA. Q is in shared memory. P is f16 or
e4m3."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field

from tsmla_kernels.sm90.decode.config import DecodeConfig
from tsmla_kernels.sm90.decode.memory import Scratch, ThreadScores
from tsmla_kernels.sm90.decode.scores import Held, Scores
from tsmla_kernels.sm90.decode.stages import Stages
from tsmla_kernels.sm90.latent.memory import Barrier, Blocks, Described, Scored, Shared, Taken
from tsmla_kernels.sm90.latent.scores import ScoreMma
from tsmla_kernels.sm90.latent.shape import ROWS
from tsmla_kernels.sm90.latent.softmax import sync_softmax
from tsmla_kernels.sm90.warp import quotient

EARLY_STEPS = 8  # 32-column steps of Q K^T that remain when the previous block's P V may begin


class Queries(NamedTuple):
    """Q in shared memory, as an operand (`shared`) and as rows (`rows`)."""

    shared: cute.Tensor
    rows: cute.Tensor


class ScoresFp8(Scores):
    """Q K^T with queries and keys of e4m3. q_dtype, q_elements: dtype and element count of Q in shared memory."""

    def __init__(self, config: DecodeConfig, stages: Stages) -> None:
        super().__init__(config, stages)
        self.q_dtype, self.q_elements = self.ring.dtype, ROWS * config.head_dim

    def mma(self) -> ScoreMma:
        """The MMA of Q K^T of a block."""
        dtype, k_major = self.ring.dtype, OperandMajorMode.K
        shape = (ROWS, self.block)
        return ScoreMma(sm90.make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), shape))

    def kept_q_rows(self, scratch: Scratch) -> cute.Tensor:
        """Q in shared memory."""
        atom = warpgroup.make_smem_layout_atom(self.stages.q_swizzle, self.q_dtype)
        q_tile = cute.tile_to_shape(atom, (ROWS, self.depth), (0, 1))
        return cute.make_tensor(cute.recast_ptr(scratch.q, q_tile.inner, dtype=self.q_dtype), q_tile.outer)

    def queries(self, q_rows: cute.Tensor, mma: ScoreMma, t: Int32) -> Queries:
        """Q in the form that the MMA takes."""
        return Queries(mma.main.make_fragment_A(mma.main.get_slice(t).partition_A(q_rows)), q_rows)

    @cute.jit
    def take_q(self, piece: Described, number: Int32, index: Int32, phase: Int32, held: Held, shared: Shared) -> Taken:
        """Copy the query rows from their stage to Q's place, as 16-byte words in the same order."""
        t = held.place.thread
        q_words = self.words_of_rows()
        tiles = self.depth // 64
        plain = cute.make_swizzle(0, 4, 3)
        q_there = cute.make_tensor(cute.recast_ptr(held.q.rows.iterator, plain, dtype=Float32), q_words)
        word = cute.make_rmem_tensor((4,), Float32)
        q_here = cute.make_tensor(
            cute.recast_ptr(shared.keys[None, None, index].iterator, plain, dtype=Float32), q_words
        )
        # All four warps must have read the previous Q before it is overwritten.
        sync_softmax()
        if const_expr(self.config.p_rows == ROWS):
            for i in cutlass.range(cute.size(q_words, mode=[2]), unroll=3):
                cute.autovec_copy(q_here[None, t, i], word)
                cute.autovec_copy(word, q_there[None, t, i])
        else:
            # A thread has few words: it loads all of them before it stores the first.
            words = cute.make_rmem_tensor((4, cute.size(q_words, mode=[2])), Float32)
            at_once = q_words.shape[1][1]
            for to_words in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(cute.size(q_words, mode=[2])):
                    if at_once * i + t * at_once // 128 < tiles:
                        if const_expr(to_words == 0):
                            cute.autovec_copy(q_here[None, t, i], words[None, i])
                        else:
                            cute.autovec_copy(words[None, i], q_there[None, t, i])
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_softmax()
        self.ring.arrive_for(Barrier.Q_READ, number)
        self.ring.signal(shared.ready, index, held.place.lane)
        index, phase = self.ring.advance(index, phase)
        return Taken(index, phase, held.scale)

    def words_of_rows(self) -> cute.Layout:
        """The layout of the words of p_rows rows of Q: (one of four words, thread, turn).

        A tile of 64 columns has 64 rows of 64 bytes, of which the first p_rows are copied.
        """
        rows, tile = self.config.p_rows, ROWS * 64 // 4
        if rows == ROWS:
            return cute.make_layout((4, 128, self.depth // 32), stride=(1, 4, 512))
        at_once = 128 // (4 * rows)  # tiles
        turns = -(-(self.depth // 64) // at_once)
        return cute.make_layout((4, (128 // at_once, at_once), turns), stride=(1, (4, tile), tile * at_once))

    @cute.jit
    def score_blocks(self, blocks: Blocks, number: Int32, taken: Taken, held: Held, shared: Shared) -> Scored:
        """Do Q K^T, softmax and P for a piece's key blocks."""
        mma_qk, acc = held.mma.main, held.acc
        place, running = held.place, held.running
        by_rows = cute.make_layout((2, (2, self.block // 8)), stride=(2, (1, 4)))
        scores = ThreadScores(
            cute.make_tensor(acc.iterator, by_rows), cute.make_tensor(held.probabilities.iterator, by_rows)
        )
        steps = self.depth // 32
        index, phase = taken.index, taken.phase
        self.softmax.begin_rows(running)
        seen_by_all = self.softmax.seen_by_all(blocks.piece)
        previous, address = index, self.ring.address(shared.keys, index)
        following, phase_following = self.ring.advance(index, phase)
        arrived, stored = Int32(0), Int32(0)
        # Masked blocks have a separate loop: in a common loop the jump over the mask would cost each unmasked block 20
        # cycles.
        unmasked = cutlass.min(cutlass.max(quotient(seen_by_all, self.block), blocks.begin), blocks.end)
        for masked in cutlass.range_constexpr(2):
            first, last = (blocks.begin, unmasked) if const_expr(masked == 0) else (unmasked, blocks.end)
            for b in cutlass.range(first, last, unroll=1):
                stage_keys = self.stages.stage_keys(shared, address)
                t_k = mma_qk.make_fragment_B(mma_qk.get_slice(place.thread).partition_B(stage_keys))
                if arrived == 0:
                    cute.arch.mbarrier_wait(shared.full + index, phase)
                warpgroup.fence()
                mma_qk.set(Field.ACCUMULATE, False)
                for k in cutlass.range_constexpr(steps):
                    if const_expr(k == steps - EARLY_STEPS):
                        # Let the value warps begin the previous block's P V, as in Scores16bit.
                        self.ring.signal_if(stored, shared.ready, previous)
                    cute.gemm(mma_qk, acc, held.q.shared[None, None, k], t_k[None, None, k], acc)
                    mma_qk.set(Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                previous, index, phase = index, following, phase_following
                address_here = address
                ahead = self.ring.look_ahead(index, phase, shared)
                arrived, address = ahead.arrived, ahead.address
                following, phase_following = ahead.following, ahead.phase
                if const_expr(masked == 1):
                    self.softmax.mask(scores.s, b, blocks.piece, place, held.visible_lens)
                self.softmax.run(scores, running, held.scale, place, shared, previous)
                held.r_p.store(self.in_order_of_p(held.probabilities).load().to(self.ring.p_dtype))
                self.ring.store_p(address_here + held.p_offset, cute.recast_tensor(held.r_p, Int32))
                stored = held.signals
        return Scored(index, phase, previous)

    @cute.jit
    def finish_piece(self, piece: Described, number: Int32, held: Held, shared: Shared):
        """Finish the rows of a piece: see Softmax.finish."""
        self.softmax.finish(held.running, held.place, piece, number, held.results)
