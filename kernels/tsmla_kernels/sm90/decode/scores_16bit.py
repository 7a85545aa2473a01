"""S = Q K^T, softmax and P of decode for queries and cache of 16 bits. Q is in registers; in some kernels its rope
columns are in shared memory instead."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, OperandSource, SmemLayoutAtomKind

from tsmla_kernels.sm90.decode.config import DecodeConfig
from tsmla_kernels.sm90.decode.memory import Scratch, ThreadScores
from tsmla_kernels.sm90.decode.scores import Held, Scores
from tsmla_kernels.sm90.decode.stages import Stages
from tsmla_kernels.sm90.latent.memory import Blocks, Described, Piece, Scored, Shared, Taken
from tsmla_kernels.sm90.latent.scores import ScoreMma
from tsmla_kernels.sm90.latent.shape import ROWS
from tsmla_kernels.sm90.latent.softmax import sync_softmax
from tsmla_kernels.sm90.warp import uniform

EARLY_STEPS = 9  # 16-column steps of Q K^T that remain when the previous block's P V may begin


class Queries(NamedTuple):
    """Q's columns in registers (`registers`), and the last columns in shared memory, as an operand (`shared`) and as
    rows (`rows`)."""

    registers: cute.Tensor
    shared: cute.Tensor
    rows: cute.Tensor


class Scores16bit(Scores):
    """Q K^T with queries and keys of 16 bits.

    Attributes:
      shared_steps: how many of Q's 16-column steps stay in shared memory, because registers are short: the steps of the
        rope columns if L is 512 and O has 64 rows.
      q_dtype, q_elements: the dtype and the element count of Q's place in shared memory.
    """

    def __init__(self, config: DecodeConfig, stages: Stages) -> None:
        super().__init__(config, stages)
        self.shared_steps = 4 if self.depth > 512 and not config.transposed_out else 0
        self.q_dtype = self.ring.q_dtype
        self.q_elements = max(ROWS * 16 * self.shared_steps, 8)

    def mma(self) -> ScoreMma:
        """Two MMAs for a block's Q K^T: the first takes Q from registers, the second from shared memory."""
        dtype, k_major = self.ring.dtype, OperandMajorMode.K
        shape = (ROWS, self.block)
        return ScoreMma(
            sm90.make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), shape, OperandSource.RMEM),
            sm90.make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), shape),
        )

    def kept_q_rows(self, scratch: Scratch) -> cute.Tensor:
        """The columns of Q that stay in shared memory."""
        atom = warpgroup.make_smem_layout_atom(self.stages.keys_swizzle, self.ring.dtype)
        q_atom = cute.tile_to_shape(atom, (ROWS, 64), (0, 1))
        return cute.make_tensor(cute.recast_ptr(scratch.q, q_atom.inner, dtype=self.q_dtype), q_atom.outer)

    def queries(self, q_rows: cute.Tensor, mma: ScoreMma, t: Int32) -> Queries:
        """Q in the form that the MMAs take."""
        shape = mma.main.get_slice(t).partition_shape_A((ROWS, self.depth - 16 * self.shared_steps))
        r_q = cute.make_rmem_tensor(shape, self.ring.dtype)
        return Queries(r_q, mma.shared.make_fragment_A(mma.shared.get_slice(t).partition_A(q_rows)), q_rows)

    @cute.jit
    def take_q(self, piece: Described, number: Int32, index: Int32, phase: Int32, held: Held, shared: Shared) -> Taken:
        """Read Q into registers. Rows 32 to 63 of a row tile, if it has them, are in the next stage."""
        t, s_k = held.place.thread, shared.keys
        # A stage holds 32 rows of Q, those of two warps. `t % 64` makes warps 2 and 3 read their stage as warps 0 and 1
        # read theirs.
        load_q = cute.make_tiled_copy_A(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.ring.dtype), held.mma.main
        )
        thr_load_q = load_q.get_slice(t % 64)
        q_atom = warpgroup.make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, self.ring.dtype)
        tile_layout = cute.tile_to_shape(q_atom, (self.block, self.depth - 16 * self.shared_steps), (0, 1)).outer
        # The copy's tile must have 64 rows, but the slices of threads 0 to 63 touch only its first 32. So the two
        # halves of the tile are a mode of stride 0: rows 32 to 63 lie on rows 0 to 31.
        q_shape = ((*tile_layout.shape[0], 2), tile_layout.shape[1])
        q_stride = ((*tile_layout.stride[0], 0), tile_layout.stride[1])
        q_tile_layout = cute.make_layout(q_shape, stride=q_stride)

        first_index, q_index = index, index
        index, phase = self.ring.advance(index, phase)
        q_stages = Int32(1)
        if const_expr(self.config.q_may_take_two_stages):
            q_stages = uniform(piece[Piece.Q_STAGES])
            if q_stages == 2:
                cute.arch.mbarrier_wait(shared.full + index, phase)
                if held.place.warp >= 2:
                    q_index = index
        q_stage = s_k[None, None, q_index]
        q_tile = cute.make_tensor(q_stage.iterator, q_tile_layout)
        cute.copy(load_q, thr_load_q.partition_S(q_tile), thr_load_q.retile(held.q.registers))
        if const_expr(self.shared_steps > 0):
            self.keep_q_rope((first_index, index), q_stages, held, shared)
        self.ring.signal(shared.ready, first_index, held.place.lane)
        if const_expr(self.config.q_may_take_two_stages):
            if q_stages == 2:
                self.ring.signal(shared.ready, index, held.place.lane)
                index, phase = self.ring.advance(index, phase)
        return Taken(index, phase, held.scale)

    @cute.jit
    def keep_q_rope(self, stages: tuple[Int32, Int32], q_stages: Int32, held: Held, shared: Shared):
        """Copy Q's rope columns from one or two `stages` to their place, as 16-byte words in the same order."""
        t, s_k = held.place.thread, shared.keys
        first_index, second_index = stages
        words = cute.make_layout((4, 128, 2), stride=(1, 4, 512))
        rope_there = cute.make_tensor(
            cute.recast_ptr(held.q.rows.iterator, cute.make_swizzle(0, 4, 3), dtype=Float32),
            cute.make_layout((4, 128, 2, 2), stride=(1, 4, 512, 1024)),
        )
        rope_word = cute.make_rmem_tensor((4,), Float32)
        for h in cutlass.range(q_stages, unroll=1):
            stage_of = first_index
            if h == 1:
                stage_of = second_index
            rope_here = cute.make_tensor(
                cute.recast_ptr(
                    s_k[None, None, stage_of].iterator + self.block * self.latent,
                    cute.make_swizzle(0, 4, 3), dtype=Float32,
                ),
                words,
            )  # fmt: skip
            for i in cutlass.range_constexpr(2):
                cute.autovec_copy(rope_here[None, t, i], rope_word)
                cute.autovec_copy(rope_word, rope_there[None, t, i, h])
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_softmax()

    @cute.jit
    def score_blocks(self, blocks: Blocks, number: Int32, taken: Taken, held: Held, shared: Shared) -> Scored:
        """Do Q K^T, softmax and P for a piece's key blocks."""
        mma_qk, mma_qk_shared, acc = held.mma.main, held.mma.shared, held.acc
        place, running = held.place, held.running
        by_rows = cute.make_layout((2, (2, self.block // 8)), stride=(2, (1, 4)))
        scores = ThreadScores(
            cute.make_tensor(acc.iterator, by_rows), cute.make_tensor(held.probabilities.iterator, by_rows)
        )
        steps = self.depth // 16
        index, phase = taken.index, taken.phase
        self.softmax.begin_rows(running)
        seen_by_all = self.softmax.seen_by_all(blocks.piece)
        previous, address = index, self.ring.address(shared.keys, index)
        following, phase_following = self.ring.advance(index, phase)
        arrived, stored = Int32(0), Int32(0)
        for b in cutlass.range(blocks.begin, blocks.end, unroll=1):
            stage_keys = self.stages.stage_keys(shared, address)
            t_k = mma_qk.make_fragment_B(mma_qk.get_slice(place.thread).partition_B(stage_keys))
            if arrived == 0:
                cute.arch.mbarrier_wait(shared.full + index, phase)
            warpgroup.fence()
            mma_qk.set(Field.ACCUMULATE, False)
            mma_qk_shared.set(Field.ACCUMULATE, True)
            for k in cutlass.range_constexpr(steps):
                if const_expr(k == steps - EARLY_STEPS):
                    # Q K^T and P V take turns: P V of the previous block runs during this block's softmax. The value
                    # warps are signalled before the end of Q K^T, by as much time as they take to wake up. With an
                    # earlier signal, steps of Q K^T would wait for whole instructions of P V, which take eight
                    # times as long.
                    self.ring.signal_if(stored, shared.ready, previous)
                if const_expr(k < steps - self.shared_steps):
                    cute.gemm(mma_qk, acc, held.q.registers[None, None, k], t_k[None, None, k], acc)
                else:
                    q_step = held.q.shared[None, None, k - steps + self.shared_steps]
                    cute.gemm(mma_qk_shared, acc, q_step, t_k[None, None, k], acc)
                mma_qk.set(Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            previous, index, phase = index, following, phase_following
            address_here = address
            ahead = self.ring.look_ahead(index, phase, shared)
            arrived, address = ahead.arrived, ahead.address
            following, phase_following = ahead.following, ahead.phase
            if (b + 1) * self.block > seen_by_all:
                self.softmax.mask(scores.s, b, blocks.piece, place, held.visible_lens)
            self.softmax.run(scores, running, held.scale, place, shared, previous)
            held.r_p.store(held.probabilities.load().to(self.ring.dtype))
            # P overwrites these keys' rope columns, so all four warps must have read them.
            sync_softmax()
            self.ring.store_p(address_here + held.p_offset, cute.recast_tensor(held.r_p, Int32))
            stored = held.signals
        return Scored(index, phase, previous)

    @cute.jit
    def zero_keys(self, piece: Described, b_end: Int32, last: Int32, held: Held, shared: Shared):
        """Zero the keys past the end.

        P is 0 past the end, but unused slots may hold NaN, and 0 * NaN must not reach O.
        """
        zero_words = cute.make_tensor(
            cute.recast_ptr(shared.keys.iterator, cute.make_swizzle(0, 4, 3), dtype=Float32),
            cute.make_layout(
                (32, self.block, self.latent // 64, self.ring.stages),
                stride=(1, 32, 32 * self.block, self.ring.stage_elements // 2),
            ),
        )
        for row in cutlass.range(cutlass.max(piece[Piece.KEYS] - (b_end - 1) * self.block, 0), self.block, unroll=1):
            for c in cutlass.range_constexpr(self.latent // 256):
                zero_words[held.place.lane, row, held.place.warp + 4 * c, last] = Float32(0.0)

    @cute.jit
    def finish_piece(self, piece: Described, number: Int32, held: Held, shared: Shared):
        """Finish the rows of a piece: see Softmax.finish."""
        self.softmax.finish(held.running, held.place, piece, number, held.results)
