"""S = Q K^T, softmax and P of decode, queries and cache of 16 bits: Q in registers."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, OperandSource, SmemLayoutAtomKind

from tsmla_kernels.sm90.constants import LOG2_E
from tsmla_kernels.sm90.decode.config import ROWS, DecodeConfig
from tsmla_kernels.sm90.decode.memory import (
    Arrays,
    Described,
    KeyRange,
    Piece,
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
from tsmla_kernels.sm90.warp import kept, uniform

EARLY_STEPS = 9  # 16-column steps of Q K^T that are still to come when the values' warpgroups are let loose


class Held(NamedTuple):
    """What the softmax warpgroup holds from piece to piece.

    Attributes:
      mma_qk, mma_qk_shared: Q K^T with Q from registers, and from shared memory.
      r_q: Q in registers. t_q_rope: the rest of it, as an operand of mma_qk_shared. q_rope: the same, as rows.
      acc, probabilities: S and P of a block, which may be one. r_p: P as it is stored.
      p_offset: where the lane's row of P lies in a stage.
      running: the rows' maxima and sums. scale: of the logits, base 2. results: where rows are finished.
      place: of the thread. signals: 1 if its lane arrives in `signal`.
    """

    mma_qk: cute.TiledMma
    mma_qk_shared: cute.TiledMma
    r_q: cute.Tensor
    t_q_rope: cute.Tensor
    q_rope: cute.Tensor
    acc: cute.Tensor
    probabilities: cute.Tensor
    r_p: cute.Tensor
    p_offset: Int32
    running: Running
    scale: Float32
    results: Results
    place: Place
    signals: Int32


class Scores16bit(Scores):
    """Q K^T of queries and keys of 16 bits.

    Attributes:
      shared_steps: Q's 16-column steps that stay in shared memory, for which there are no registers: the rope's, where
        L is 512.
      q_dtype, q_elements: of Q in shared memory.
    """

    def __init__(self, config: DecodeConfig, ring: Ring) -> None:
        super().__init__(config, ring)
        self.shared_steps = 4 if self.depth > 512 else 0
        self.q_dtype = ring.q_dtype
        self.q_elements = max(ROWS * 16 * self.shared_steps, 8)

    def mma(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """Q K^T of a block, with Q from registers and from shared memory."""
        dtype, k_major = self.ring.dtype, OperandMajorMode.K
        shape = (ROWS, self.block)
        return (
            sm90.make_trivial_tiled_mma(
                dtype, dtype, k_major, k_major, Float32, (1, 1, 1), shape, OperandSource.RMEM
            ),
            sm90.make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), shape),
        )

    @cute.jit
    def begin(self, arrays: Arrays, shared: Shared, scratch: Scratch, mma: cutlass.Constexpr, rank: Int32):
        """What the softmax warpgroup holds from piece to piece, a Held."""
        mma_qk, mma_qk_shared = mma
        atom = warpgroup.make_smem_layout_atom(self.ring.keys_swizzle, self.ring.dtype)
        q_atom = cute.tile_to_shape(atom, (ROWS, 64), (0, 1))
        q_rope = cute.make_tensor(cute.recast_ptr(scratch.q, q_atom.inner, dtype=self.q_dtype), q_atom.outer)
        tidx, _, _ = cute.arch.thread_idx()
        t = tidx % 128
        lane = kept(t % 32)
        signals = Int32(self.ring.signals(lane))
        warp_here = cute.arch.make_warp_uniform(t // 32)
        scale = arrays.scales[0] * LOG2_E
        results = Results(shared.inverse, arrays.lse, arrays.partial_lse, arrays.scales[1], rank)

        register_columns = self.depth - 16 * self.shared_steps
        r_q = cute.make_rmem_tensor(mma_qk.get_slice(t).partition_shape_A((ROWS, register_columns)), self.ring.dtype)
        t_q_rope = mma_qk_shared.make_fragment_A(mma_qk_shared.get_slice(t).partition_A(q_rope))
        acc = cute.make_rmem_tensor(mma_qk.get_slice(t).partition_shape_C((ROWS, self.block)), Float32)
        probabilities = cute.make_rmem_tensor(acc.layout, Float32) if const_expr(self.softmax.speculates) else acc

        # A lane's row of P, of 64 bytes: its first 16 bytes, or the second, exchanged by the swizzle.
        r_p = cute.make_rmem_tensor(acc.layout, self.ring.dtype)
        p_row = warp_here * 16 + lane % 16
        p_offset = kept(self.ring.p_offset + p_row * 64 + (((lane // 16) ^ ((p_row >> 1) & 3)) << 4))

        place = Place(t, warp_here, lane, warp_here * 16 + lane // 4)
        running = Running(cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32))
        return Held(
            mma_qk, mma_qk_shared, r_q, t_q_rope, q_rope, acc, probabilities, r_p, p_offset, running, scale, results,
            place, signals,
        )  # fmt: skip

    @cute.jit
    def take_q(self, piece: Described, number: Int32, stage: Stage, held: Held, shared: Shared):
        """Q into registers. Its rows 32 and up are in the next stage, if the row tile has as many."""
        t, s_k = held.place.thread, shared.keys
        # Q's rows lie in two stages of 32: a warp reads the one that holds its 16 rows, as if it were the first.
        load_q = cute.make_tiled_copy_A(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.ring.dtype), held.mma_qk
        )
        thr_load_q = load_q.get_slice(t % 64)
        q_atom = warpgroup.make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, self.ring.dtype)
        tile_layout = cute.tile_to_shape(
            q_atom, (self.block, self.depth - 16 * self.shared_steps), (0, 1)
        ).outer
        # 64 rows for the copy's tile, of which slices 0 to 63 touch the first 32 alone.
        q_shape = ((*tile_layout.shape[0], 2), tile_layout.shape[1])
        q_stride = ((*tile_layout.stride[0], 0), tile_layout.stride[1])
        q_tile_layout = cute.make_layout(q_shape, stride=q_stride)

        first_index, q_index = stage.index, stage.index
        index, phase = self.ring.advance(stage.index, stage.phase)
        q_stages = uniform(piece[Piece.Q_STAGES])
        if q_stages == 2:
            cute.arch.mbarrier_wait(shared.full + index, phase)
            if held.place.warp >= 2:
                q_index = index
        q_stage = s_k[None, None, q_index]
        q_tile = cute.make_tensor(q_stage.iterator, q_tile_layout)
        cute.copy(load_q, thr_load_q.partition_S(q_tile), thr_load_q.retile(held.r_q))
        if const_expr(self.shared_steps > 0):
            self.keep_q_rope((first_index, index), q_stages, held, shared)
        self.ring.signal(shared.ready, first_index, held.place.lane)
        if q_stages == 2:
            self.ring.signal(shared.ready, index, held.place.lane)
            index, phase = self.ring.advance(index, phase)
        return Taken(index, phase, held.scale)

    @cute.jit
    def keep_q_rope(
        self, stages: tuple[Int32, Int32], q_stages: Int32, held: Held, shared: Shared
    ):
        """Rows of Q's rope from one or two `stages` to where they stay, as 16-byte words: the same bytes in the same
        order."""
        t, s_k = held.place.thread, shared.keys
        first_index, second_index = stages
        words = cute.make_layout((4, 128, 2), stride=(1, 4, 512))
        rope_there = cute.make_tensor(
            cute.recast_ptr(held.q_rope.iterator, cute.make_swizzle(0, 4, 3), dtype=Float32),
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
        self.sync_softmax()

    @cute.jit
    def score_blocks(self, piece: Described, number: Int32, blocks: KeyRange, taken: Taken, held: Held, shared: Shared):
        """Q K^T, softmax and P of a piece's key blocks."""
        mma_qk, mma_qk_shared, acc = held.mma_qk, held.mma_qk_shared, held.acc
        place, running = held.place, held.running
        by_rows = cute.make_layout((2, (2, self.block // 8)), stride=(2, (1, 4)))
        scores = ThreadScores(
            cute.make_tensor(acc.iterator, by_rows), cute.make_tensor(held.probabilities.iterator, by_rows)
        )
        steps = self.depth // 16
        index, phase = taken.index, taken.phase
        self.softmax.begin_rows(running)
        seen_by_all = self.softmax.seen_by_all(piece)
        previous, address = index, self.ring.address(shared.keys, index)
        following, phase_following = self.ring.advance(index, phase)
        arrived, stored = Int32(0), Int32(0)
        for b in cutlass.range(blocks.begin, blocks.end, unroll=1):
            stage_keys, _ = self.ring.stage_tensors(shared, address)
            t_k = mma_qk.make_fragment_B(mma_qk.get_slice(place.thread).partition_B(stage_keys))
            if arrived == 0:
                cute.arch.mbarrier_wait(shared.full + index, phase)
            warpgroup.fence()
            mma_qk.set(Field.ACCUMULATE, False)
            mma_qk_shared.set(Field.ACCUMULATE, True)
            for k in cutlass.range_constexpr(steps):
                if const_expr(k == steps - EARLY_STEPS):
                    # The tensor cores take turns: P V of the block before runs during this block's softmax. It
                    # is let loose as long before the end of Q K^T as its warps take to wake up: a step that
                    # meets P V there waits for a whole instruction of it, eight times its own length.
                    self.ring.signal_if(stored, shared.ready, previous)
                if const_expr(k < steps - self.shared_steps):
                    cute.gemm(mma_qk, acc, held.r_q[None, None, k], t_k[None, None, k], acc)
                else:
                    q_step = held.t_q_rope[None, None, k - steps + self.shared_steps]
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
                self.softmax.mask(scores.s, b, piece, place)
            self.softmax.run(scores, running, held.scale, place, shared, previous)
            held.r_p.store(held.probabilities.load().to(self.ring.dtype))
            # All four warps have read these keys' rope columns: P may overwrite them.
            self.sync_softmax()
            self.ring.store_p(address_here + held.p_offset, cute.recast_tensor(held.r_p, Int32))
            stored = held.signals
        return Scored(index, phase, previous)

    @cute.jit
    def finish_piece(self, piece: Described, number: Int32, b_end: Int32, last: Int32, held: Held, shared: Shared):
        """Zero the keys past the end, and finish the rows. P is 0 there, but unused slots may hold NaN: 0 * NaN must
        not reach O."""
        zero_words = cute.make_tensor(
            cute.recast_ptr(shared.keys.iterator, cute.make_swizzle(0, 4, 3), dtype=Float32),
            cute.make_layout(
                (32, self.block, self.latent // 64, self.ring.stages),
                stride=(1, 32, 32 * self.block, self.ring.stage_elements // 2),
            ),
        )
        for row in cutlass.range(
            cutlass.max(piece[Piece.KEYS] - (b_end - 1) * self.block, 0), self.block, unroll=1
        ):
            for c in cutlass.range_constexpr(self.latent // 256):
                zero_words[held.place.lane, row, held.place.warp + 4 * c, last] = Float32(0.0)
        self.softmax.finish(held.running, held.place, piece, number, held.results)
