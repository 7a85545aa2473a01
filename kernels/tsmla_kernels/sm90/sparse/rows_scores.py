"""S = Q K^T, softmax and P of plain rows of 16 bits, with keys in shared memory and Q in registers."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, OperandSource

from tsmla_kernels.sm90.constants import LOG2_E
from tsmla_kernels.sm90.latent.memory import Blocks, Described, Piece, Place, Results, Running, Scored, Shared, Taken
from tsmla_kernels.sm90.latent.scores import ScoreMma, ScoreWalk
from tsmla_kernels.sm90.latent.shape import ROWS
from tsmla_kernels.sm90.latent.softmax import RowResults, sync_softmax
from tsmla_kernels.sm90.sparse.config import LATENT_DIM, SparseConfig
from tsmla_kernels.sm90.sparse.memory import Arrays
from tsmla_kernels.sm90.sparse.rows_softmax import RowSoftmax
from tsmla_kernels.sm90.sparse.rows_stages import KEYS, STAGES_OF_BLOCK, TILE, RowStages
from tsmla_kernels.sm90.warp import kept, uniform

EARLY_STEPS = 9  # 16-column steps of Q K^T that remain when P V of the stage before may begin


class RowScratch(NamedTuple):
    """Shared memory of the softmax warpgroup: Q's last columns, and Gather.valid. A stage's first word of `valid` has a
    byte for each gathering warp: which of its eight rows exist."""

    q: cute.Pointer
    valid: cute.Tensor


class RowQueries(NamedTuple):
    """Q's columns in registers (`registers`), and the last columns in shared memory, as an operand (`shared`) and as
    rows (`rows`)."""

    registers: cute.Tensor
    shared: cute.Tensor
    rows: cute.Tensor


class RowHeld(NamedTuple):
    """The values that a softmax thread keeps from piece to piece.

    Attributes:
      mma: the MMAs of Q K^T. q: Q in the form that they take.
      acc: S of a stage, and then P. r_p: P in the dtype in which it is stored. p_offset: the offset in a stage of the
        16 bytes of P that the lane gives to stmatrix.
      running: the lane's maxima, sums and, if the call returns greatest logits, greatest scores.
      scale: the logits' scale, base 2. results: the arrays for finished rows.
      place: the thread's place. signals: 1 if the lane arrives in Ring.signal.
      valid: as in RowScratch. scales: the operand.
    """

    mma: ScoreMma
    q: RowQueries
    acc: cute.Tensor
    r_p: cute.Tensor
    p_offset: Int32
    running: Running
    scale: Float32
    results: Results
    place: Place
    signals: Int32
    valid: cute.Tensor
    scales: cute.Tensor


class RowScores:
    """S = Q K^T, softmax and P.

    Attributes:
      depth: the width of a key. shared_steps: how many of Q's 16-column steps, the last ones, are in shared memory.
      q_columns: how many columns shared memory has of Q: whole tiles.
      sums_later: as in latent.scores.Scores.
    """

    def __init__(self, config: SparseConfig, stages: RowStages) -> None:
        self.config, self.ring, self.stages, self.sums_later = config, stages.ring, stages, False
        self.block, self.depth = KEYS, config.head_dim
        self.shared_steps, self.q_columns = config.q_shared_steps, config.q_shared_columns
        self.softmax = RowSoftmax(KEYS, config.max_logits)
        self.row_results = RowResults(config.shape, self.ring.inverses_kept)

    def mma(self) -> ScoreMma:
        """Two MMAs for a stage's Q K^T: the first takes Q from registers, the second from shared memory."""
        dtype, k_major = self.ring.dtype, OperandMajorMode.K
        shape = (ROWS, self.block)
        return ScoreMma(
            sm90.make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), shape, OperandSource.RMEM),
            sm90.make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), shape),
        )

    @cute.jit
    def score(self, arrays: Arrays, shared: Shared, scratch: RowScratch, mma: ScoreMma):
        """Run warpgroup 0: see latent.scores.ScoreWalk."""
        walk: ScoreWalk[RowHeld] = ScoreWalk(self)
        walk.run(self.begin(arrays, shared, scratch, mma), shared)

    def wait_for_piece(self, number: Int32, index: Int32, phase: Int32, shared: Shared) -> None:
        """Wait until piece `number` has been described, and its first stage, `index`, is full."""
        cute.arch.mbarrier_wait(shared.full + index, phase)

    @cute.jit
    def begin(self, arrays: Arrays, shared: Shared, scratch: RowScratch, mma: ScoreMma) -> RowHeld:
        """Set up the softmax warpgroup's registers."""
        atom = warpgroup.make_smem_layout_atom(self.stages.swizzle, self.ring.dtype)
        tile = cute.tile_to_shape(atom, (ROWS, self.q_columns), (0, 1))
        q_rows = cute.make_tensor(cute.recast_ptr(scratch.q, tile.inner, dtype=self.ring.dtype), tile.outer)
        tidx, _, _ = cute.arch.thread_idx()
        t = tidx % 128
        lane = t % 32
        warp_here = cute.arch.make_warp_uniform(t // 32)
        results = Results(
            inverse=shared.inverse,
            lse=arrays.lse,
            partial_lse=arrays.partial_lse,
            out_scale=arrays.scales[1],
            rank=Int32(0),
            sinks=arrays.sinks,
            max_logits=arrays.max_logits,
        )
        m, l = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
        highest = cute.make_rmem_tensor((2,), Float32) if const_expr(self.config.max_logits) else None
        acc = cute.make_rmem_tensor(mma.main.get_slice(t).partition_shape_C((ROWS, self.block)), Float32)
        # Lanes 0 to 15 give stmatrix the first 16 bytes of 16 rows of P, lanes 16 to 31 the next 16 bytes of the same
        # rows. P's swizzle permutes these groups of 16 bytes.
        p_row = warp_here * 16 + lane % 16
        in_row = ((lane // 16) ^ ((p_row >> 1) & 3)) << 4
        return RowHeld(
            mma=mma,
            q=self.queries(q_rows, mma, t),
            acc=acc,
            r_p=cute.make_rmem_tensor(acc.shape, self.ring.p_dtype),
            p_offset=kept(self.ring.p_offset + p_row * self.ring.p_row_bytes + in_row),
            running=Running(m, l, highest),
            scale=arrays.scales[0] * LOG2_E * arrays.scales[1],
            results=results,
            place=Place(t, warp_here, lane, warp_here * 16 + lane // 4),
            signals=Int32(self.ring.signals(lane)),
            valid=scratch.valid,
            scales=arrays.scales,
        )

    def queries(self, q_rows: cute.Tensor, mma: ScoreMma, t: Int32) -> RowQueries:
        """Q in the form that the MMAs take. q_rows: its last columns, in shared memory."""
        assert mma.shared is not None
        shape = mma.main.get_slice(t).partition_shape_A((ROWS, self.depth - 16 * self.shared_steps))
        r_q = cute.make_rmem_tensor(shape, self.ring.dtype)
        return RowQueries(r_q, mma.shared.make_fragment_A(mma.shared.get_slice(t).partition_A(q_rows)), q_rows)

    @cute.jit
    def take_q(
        self, piece: Described, number: Int32, index: Int32, phase: Int32, held: RowHeld, shared: Shared
    ) -> Taken:
        """Read Q into registers. Rows 32 to 63 of a row tile, if it has them, are in the next stage."""
        t = held.place.thread
        load_q = cute.make_tiled_copy_A(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.ring.dtype), held.mma.main
        )
        # A stage holds 32 rows of Q, those of two warps. `t % 64` makes warps 2 and 3 read their stage as warps 0 and 1
        # read theirs.
        thr_load_q = load_q.get_slice(t % 64)
        q_atom = warpgroup.make_smem_layout_atom(self.stages.swizzle, self.ring.dtype)
        tile = cute.tile_to_shape(q_atom, (self.block, LATENT_DIM), (0, 1)).outer
        # The copy's tile must have 64 rows, but the slices of threads 0 to 63 touch only its first 32. So the two
        # halves of the tile are a mode of stride 0: rows 32 to 63 lie on rows 0 to 31.
        q_tile_layout = cute.make_layout(
            ((*tile.shape[0], 2), tile.shape[1]), stride=((*tile.stride[0], 0), tile.stride[1])
        )
        first_index, q_index = index, index
        index, phase = self.ring.advance(index, phase)
        q_stages = uniform(piece[Piece.Q_STAGES])
        if q_stages == 2:
            cute.arch.mbarrier_wait(shared.full + index, phase)
            if held.place.warp >= 2:
                q_index = index
        source = thr_load_q.partition_S(cute.make_tensor(shared.keys[None, None, q_index].iterator, q_tile_layout))
        target = thr_load_q.retile(held.q.registers)
        for k in cutlass.range_constexpr(self.depth // 16 - self.shared_steps):
            cute.copy(load_q, source[None, None, k], target[None, None, k])
        self.keep_last_columns((first_index, index), q_stages, held, shared)
        self.ring.signal(shared.ready, first_index, held.place.lane)
        if q_stages == 2:
            self.ring.signal(shared.ready, index, held.place.lane)
            index, phase = self.ring.advance(index, phase)
        return Taken(index, phase, held.scale)

    @cute.jit
    def keep_last_columns(self, stages: tuple[Int32, Int32], q_stages: Int32, held: RowHeld, shared: Shared):
        """Copy Q's last columns from one or two `stages` to their place, as 16-byte words in the same order."""
        t = held.place.thread
        first_index, second_index = stages
        tiles = self.q_columns // TILE
        sync_softmax()  # all four warps' products with the previous Q are done
        words = cute.make_layout((4, 128, 2, tiles), stride=(1, 4, 512, KEYS * TILE // 2))
        there = cute.make_tensor(
            cute.recast_ptr(held.q.rows.iterator, cute.make_swizzle(0, 4, 3), dtype=Float32),
            cute.make_layout((4, 128, 2, tiles, 2), stride=(1, 4, 512, ROWS * TILE // 2, KEYS * TILE // 2)),
        )
        word = cute.make_rmem_tensor((4,), Float32)
        for h in cutlass.range(q_stages, unroll=1):
            stage_of = first_index
            if h == 1:
                stage_of = second_index
            last_columns = shared.keys[None, None, stage_of].iterator + self.block * (self.depth - self.q_columns)
            here = cute.make_tensor(cute.recast_ptr(last_columns, cute.make_swizzle(0, 4, 3), dtype=Float32), words)
            for tile in cutlass.range_constexpr(tiles):
                for i in cutlass.range_constexpr(2):
                    cute.autovec_copy(here[None, t, i, tile], word)
                    cute.autovec_copy(word, there[None, t, i, tile, h])
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_softmax()

    @cute.jit
    def score_blocks(self, blocks: Blocks, number: Int32, taken: Taken, held: RowHeld, shared: Shared) -> Scored:
        """Do Q K^T, softmax and P for a piece's key blocks, stage by stage."""
        # Modes: query row of two, and key of eight.
        s = cute.make_tensor(held.acc.iterator, cute.make_layout((2, (2, self.block // 8)), stride=(2, (1, 4))))
        place = held.place
        index, phase = taken.index, taken.phase
        self.softmax.begin_rows(held.running)
        previous, address = index, self.ring.address(shared.keys, index)
        following, phase_following = self.ring.advance(index, phase)
        arrived, stored = Int32(0), Int32(0)
        for b in cutlass.range(STAGES_OF_BLOCK * blocks.begin, STAGES_OF_BLOCK * blocks.end, unroll=1):
            if arrived == 0:
                cute.arch.mbarrier_wait(shared.full + index, phase)
            self.multiply(address, stored, previous, held, shared)
            exist = held.valid[0, index]
            warpgroup.wait_group(0)
            previous, index, phase = index, following, phase_following
            address_here = address
            ahead = self.ring.look_ahead(index, phase, shared)
            arrived, address = ahead.arrived, ahead.address
            following, phase_following = ahead.following, ahead.phase
            if const_expr(self.config.two_scales):
                self.scale_second_cache(s, b, held)
            if exist != -1:
                self.mask_keys(s, exist, place.lane)
            self.softmax.run(s, held.running, held.scale, place, shared, previous)
            if const_expr(self.config.two_scales):
                self.scale_second_cache(s, b, held)
            held.r_p.store(held.acc.load().to(self.ring.dtype))
            self.ring.store_p(address_here + held.p_offset, cute.recast_tensor(held.r_p, Int32))
            stored = held.signals
        return Scored(index, phase, previous)

    @cute.jit
    def multiply(self, address: Int32, stored: Int32, previous: Int32, held: RowHeld, shared: Shared):
        """Issue Q K^T of the stage at `address` into `acc`. Before the last steps, let the value warps begin P V of the
        stage before."""
        mma_qk, mma_qk_shared, acc = held.mma.main, held.mma.shared, held.acc
        stage_keys = self.stages.stage_keys(shared, address)
        t_k = mma_qk.make_fragment_B(mma_qk.get_slice(held.place.thread).partition_B(stage_keys))
        steps = self.depth // 16
        # cp.async has written the keys as ordinary stores do.
        cute.arch.fence_proxy("async.shared", space="cta")
        warpgroup.fence()
        mma_qk.set(Field.ACCUMULATE, False)
        mma_qk_shared.set(Field.ACCUMULATE, True)
        for k in cutlass.range_constexpr(steps):
            if const_expr(k == steps - EARLY_STEPS):
                # As much time before the end as value warps take to wake up: see decode's Scores16bit.
                self.ring.signal_if(stored, shared.ready, previous)
            if const_expr(k < steps - self.shared_steps):
                cute.gemm(mma_qk, acc, held.q.registers[None, None, k], t_k[None, None, k], acc)
            else:
                q_step = held.q.shared[None, None, k - steps + self.q_columns // 16]
                cute.gemm(mma_qk_shared, acc, q_step, t_k[None, None, k], acc)
            mma_qk.set(Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def scale_second_cache(self, numbers: cute.Tensor, b: Int32, held: RowHeld):
        """Multiply the second cache's scores, or P, of stage b of the piece by the second cache's scale divided by the
        first cache's."""
        window = self.config.window
        if (b + 1) * self.block > window:
            ratio = held.scales[2] / held.scales[1]
            for c in cutlass.range_constexpr(self.block // 4):
                scale = Float32(1.0)
                if b * self.block + (held.place.lane % 4 * 2 + (c // 2 * 8 + c % 2)) >= window:
                    scale = ratio
                for i in cutlass.range_constexpr(2):
                    numbers[i, c] = numbers[i, c] * scale

    @cute.jit
    def mask_keys(self, s: cute.Tensor, exist: Int32, lane: Int32):
        """Set the scores of keys that do not exist to -inf. Byte w of `exist` has the rows that gathering warp w
        copied."""
        mine = exist >> (lane % 4 // 2 * 8 + lane % 2 * 2)
        for c in cutlass.range_constexpr(self.block // 4):
            if ((mine >> (c // 2 % 2 * 16 + c // 4 * 4 + c % 2)) & 1) == 0:
                for i in cutlass.range_constexpr(2):
                    s[i, c] = -Float32.inf

    def zero_keys(self, piece: Described, b_end: Int32, last: Int32, held: RowHeld, shared: Shared) -> None:
        """Do nothing: gathering warps zero the rows that do not exist."""

    @cute.jit
    def finish_piece(self, piece: Described, number: Int32, held: RowHeld, shared: Shared):
        """Reduce the sums and greatest scores of the four lanes of a row. Write the row's factor for the epilogue,
        its log-sum-exp and, if the call returns them, its greatest logit."""
        for i in cutlass.range_constexpr(2):
            total, row = held.running.l[i], held.place.row_low + 8 * i
            sink = None
            if const_expr(self.config.sinks):
                # Rows past the last head read the last head's sink.
                sink = held.results.sinks[cutlass.min(piece[Piece.ROW_IN_REQUEST] + row, self.config.num_heads - 1)]
            total += cute.arch.shuffle_sync_bfly(total, offset=1)
            total += cute.arch.shuffle_sync_bfly(total, offset=2)
            highest = None
            if const_expr(self.config.max_logits):
                top = held.running.highest[i]
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
                highest = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2)) * held.scale
            if held.place.lane % 4 == 0:
                sums = (total, held.running.m[i])
                self.row_results.finish_row(row, sums, piece, number, held.results, sink, highest)
