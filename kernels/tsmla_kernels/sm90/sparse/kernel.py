"""sparse_mla for Hopper: launch, shared memory, set-up and the warps' roles.

DESIGN.md in this folder gives the reasons. The common parts (latent) treat a query token as a request with one query
token. The four warpgroups of a CTA, for which rows of 16 bits and many heads have the modules rows_*.py:

  warpgroup 0   softmax: S^T = K Q^T, softmax, P into shared memory (scores.py, scores_fp8.py for e4m3 queries); it also
                takes Q (query.py). rows_scores.py: S = Q K^T, and Q stays in registers
  1 and 2       values: O^T[half] += V^T[half] P^T and the epilogue (values.py); the first warp of 2
                also describes the pieces after the first one. rows_values.py: O[half] += P V[half]
  3             four warps gather the selected rows of the cache (gather.py, rows_gather.py); the first of them
                also finds the CTA's share and describes its first piece

A second, small kernel merges the results of tokens that several CTAs shared (latent/combine.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync

from tsmla_kernels.sm90.constants import FP8
from tsmla_kernels.sm90.latent.combine import COMBINE_THREADS, Combine, Optional
from tsmla_kernels.sm90.latent.memory import Piece, Schedule, SplitEntry
from tsmla_kernels.sm90.latent.registers import Registers
from tsmla_kernels.sm90.latent.ring import Ring
from tsmla_kernels.sm90.latent.scores import ScoreMma
from tsmla_kernels.sm90.latent.shape import ROWS
from tsmla_kernels.sm90.latent.share import MAX_SORTED, STATE_WORDS, BatchShare
from tsmla_kernels.sm90.latent.walk import PieceWalk, Walk
from tsmla_kernels.sm90.sparse.config import GATHER_WARPS, MIN_STAGES, SparseConfig
from tsmla_kernels.sm90.sparse.deal import DEALT_STATE_WORDS, DealtWalk
from tsmla_kernels.sm90.sparse.gather import Gatherer, SelectedRows
from tsmla_kernels.sm90.sparse.memory import GATHER_WARP, PIECES_KEPT, Arrays, Gather, Query, Scratch
from tsmla_kernels.sm90.sparse.rows_gather import RowGatherer
from tsmla_kernels.sm90.sparse.rows_scores import RowScores, RowScratch
from tsmla_kernels.sm90.sparse.rows_stages import RowStages, rows_ring
from tsmla_kernels.sm90.sparse.rows_values import RowValues
from tsmla_kernels.sm90.sparse.scores import SparseScores
from tsmla_kernels.sm90.sparse.scores_fp8 import SparseScoresFp8
from tsmla_kernels.sm90.sparse.stages import Stages, sparse_ring
from tsmla_kernels.sm90.sparse.values import PlainValues, SparseValues, V4Values
from tsmla_kernels.sm90.sparse.whole import WholeWalk
from tsmla_kernels.sm90.storage import checked_storage
from tsmla_kernels.sm90.warp import prefetch

THREADS = 512


class Roles(NamedTuple):
    """The contents of a CTA's stages, the work of its warpgroups, and the registers of each."""

    stages: Stages | RowStages
    gatherer: SelectedRows
    scores: Any
    values: SparseValues | RowValues
    registers: Registers


def roles_with_q_in_registers(config: SparseConfig, ring: Ring, walk: Walk) -> Roles:
    """The roles of a CTA whose MMAs have keys in shared memory."""
    stages = RowStages(config, ring)
    gatherer = RowGatherer(config, ring)
    values = RowValues(config, stages, walk, gatherer)
    return Roles(stages, gatherer, RowScores(config, stages), values, Registers(128, 168, 160, 24))


def roles_with_keys_in_registers(config: SparseConfig, ring: Ring, walk: Walk) -> Roles:
    """The roles of a CTA whose MMAs have K and V^T in registers."""
    stages = Stages(config, ring)
    gatherer = Gatherer(config, stages)
    scores = (SparseScoresFp8 if config.fp8_queries else SparseScores)(config, stages)
    plain = SparseValues if config.kv_dtype == FP8 else PlainValues
    of_rows = {"v32": SparseValues, "v4": V4Values, "plain": plain}[config.layout]
    # With tiles of 64 rows value warps need more registers, and leave fewer to gathering warps. V4's gathering warps
    # keep rows' scales, so they get eight more, which the softmax warps give up.
    if config.shape.p_rows < ROWS:
        registers = Registers(128, 136, 168, 40)
    elif config.layout == "v4":
        registers = Registers(128, 128, 176, 32)
    else:
        registers = Registers(128, 136, 176, 24)
    return Roles(stages, gatherer, scores, of_rows(config, stages, walk, gatherer), registers)


class SparseMla:
    """One compiled sparse_mla: `config` is static. The launcher takes a stream and the operands of record.py."""

    def __init__(self, config: SparseConfig) -> None:
        if config.stages < MIN_STAGES:
            raise ValueError(f"{config} leaves {config.stages} stages of shared memory; {MIN_STAGES} are needed")
        self.config = config
        self.ring = rows_ring(config) if config.q_in_registers else sparse_ring(config)
        self.q_elements = config.q_bytes * 8 // self.ring.q_dtype.width
        equal_lengths = not config.lengths
        self.walk: Walk
        if config.dealt:
            self.walk = DealtWalk(config.shape, pieces_kept=PIECES_KEPT, equal_lengths=equal_lengths)
        elif config.whole:
            self.walk = WholeWalk(config.shape, pieces_kept=PIECES_KEPT, equal_lengths=equal_lengths)
        else:
            batch = BatchShare(config.shape, equal_lengths=equal_lengths)
            self.walk = PieceWalk(config.shape, batch=batch, pieces_kept=PIECES_KEPT)
        # Bytes for the bits of the keys' tokens, if a row tile has several tokens.
        self.keys_with_bits = self.ring.stages * self.ring.block if config.tokens > 1 else 0
        self.state_words = DEALT_STATE_WORDS if config.dealt else STATE_WORDS
        self.combine = Combine(config.shape, config.sinks)
        roles = roles_with_q_in_registers if config.q_in_registers else roles_with_keys_in_registers
        self.stages, self.gatherer, self.scores, self.values, self.registers = roles(config, self.ring, self.walk)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, q: cute.Tensor, *others: cute.Tensor):
        config = self.config
        operands = list(others)
        q_rope = operands.pop(0) if const_expr(config.split_q) else None
        caches = tuple(operands.pop(0) for _ in range(1 + config.two_caches))
        indices = operands.pop(0)
        if const_expr(config.lengths):
            lengths = operands.pop(0)
        else:
            lengths = cute.make_tensor(indices.iterator, cute.make_layout((indices.shape[0],)))
        sinks = operands.pop(0) if const_expr(config.sinks) else None
        max_logits = operands.pop(3) if const_expr(config.max_logits) else None  # behind scales, out and lse
        arrays = Arrays(indices, lengths, sinks, *operands)
        self.launch(stream, q, caches, arrays._replace(max_logits=max_logits, q_rope=q_rope))

    @cute.jit
    def launch(self, stream: cuda.CUstream, q: cute.Tensor, caches: tuple[cute.Tensor, ...], arrays: Arrays):
        """Launch the kernel that attends and the one that merges pieces."""
        self.launch_attend(stream, q, caches, arrays)
        if const_expr(not self.config.whole):
            self.launch_merge(stream, arrays)

    @cute.jit
    def launch_attend(self, stream: cuda.CUstream, q: cute.Tensor, caches: tuple[cute.Tensor, ...], arrays: Arrays):
        """Launch the kernel that attends."""
        config = self.config
        q_map = None if const_expr(config.q_in_registers) else tuple(self.scores.query.tensor_map(q))

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, self.ring.stages]
            empty: cute.struct.MemRange[Int64, self.ring.stages]
            ready: cute.struct.MemRange[Int64, self.ring.stages]
            q_full: cute.struct.MemRange[Int64, 1]
            pieces: cute.struct.MemRange[Int32, PIECES_KEPT * len(Piece)]
            rescale: cute.struct.Align[cute.struct.MemRange[Float32, self.ring.stages * ROWS], 16]
            moved: cute.struct.Align[cute.struct.MemRange[Int32, self.ring.stages * 4], 16]
            valid: cute.struct.Align[cute.struct.MemRange[Int32, self.ring.stages * GATHER_WARPS], 16]
            of_tokens: cute.struct.Align[cute.struct.MemRange[Uint8, self.keys_with_bits], 16]
            inverse: cute.struct.Align[cute.struct.MemRange[Float32, self.ring.inverses_kept * ROWS], 16]
            schedule_state: cute.struct.MemRange[Int32, self.state_words]
            exchange: cute.struct.Align[cute.struct.MemRange[Float32, config.exchanged_words], 16]
            q: cute.struct.Align[cute.struct.MemRange[self.ring.q_dtype, self.q_elements], 1024]
            ring: cute.struct.Align[cute.struct.MemRange[self.ring.dtype, self.ring.elements], 1024]

        self.storage = checked_storage(Storage, config)
        ctas = self.num_ctas(arrays)
        self.attend(q, caches, q_map, arrays, self.scores.mma(), self.values.mma(), ctas).launch(
            grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    @cute.jit
    def launch_merge(self, stream: cuda.CUstream, arrays: Arrays):
        """Launch the kernel that merges pieces. Of a group that another launch computed anew it merges nothing."""
        ctas = self.num_ctas(arrays)
        lengths = arrays.token_lengths if const_expr(self.config.tokens > 1) else None
        self.combine.merge_pieces(
            arrays.partial_out,
            arrays.partial_lse,
            arrays.split_info,
            arrays.out,
            arrays.lse,
            ctas,
            Optional(arrays.sinks, lengths, arrays.max_logits),
        ).launch(grid=[ctas, 1, 1], block=[COMBINE_THREADS, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1)

    def num_ctas(self, arrays: Arrays) -> Int32:
        """How many CTAs share the work: see latent.shape.workspace_shapes."""
        if const_expr(self.config.whole):
            tiles = arrays.lengths.shape[0] * self.config.shape.max_tiles
            return cutlass.min(Int32(tiles), Int32(arrays.split_info.shape[0] // 2))
        entries = arrays.split_info.shape[0]
        if const_expr(self.config.batch_invariant):
            return Int32(entries - arrays.lengths.shape[0] * self.config.shape.max_tiles)
        return Int32(entries // 2)

    @cute.kernel
    def attend(
        self,
        q: cute.Tensor,
        caches: tuple[cute.Tensor, ...],
        q_map: tuple[cute.CopyAtom, cute.Tensor] | None,
        arrays: Arrays,
        score_mma: ScoreMma,
        value_mma: cute.TiledMma,
        ctas: Int32,
    ):
        """Run one CTA, unless this launch has no row tile."""
        if const_expr(self.config.skips):
            # The next kernel's CTAs do not fit beside these, so they start as these end.
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
            if self.works(arrays.lengths):
                self.run(q, caches, q_map, arrays, score_mma, value_mma, ctas)
            else:
                self.leave(arrays)
        else:
            self.run(q, caches, q_map, arrays, score_mma, value_mma, ctas)

    @cute.jit
    def run(
        self,
        q: cute.Tensor,
        caches: tuple[cute.Tensor, ...],
        q_map: tuple[cute.CopyAtom, cute.Tensor] | None,
        arrays: Arrays,
        score_mma: ScoreMma,
        value_mma: cute.TiledMma,
        ctas: Int32,
    ):
        """Set up the barriers, find the first piece of work, then give each warpgroup its role."""
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tidx // 128)
        config = self.config
        storage = utils.SmemAllocator().allocate(self.storage)
        shared = self.ring.views(storage, self.stages.keys(storage.ring.data_ptr()))
        query = self.query_of(storage, q, q_map)
        if const_expr(query is not None):
            if warp_idx == 4:
                cpasync.prefetch_descriptor(query.atom)
        if warp_idx == 0:
            self.ring.init_barriers(shared)
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(storage.q_full.data_ptr(), 1)
            cute.arch.mbarrier_init_fence()
        if const_expr(not self.config.skips):
            # Before this wait the kernel before may still write the operands, and the last call's `combine` may still
            # read the workspaces.
            cute.arch.griddepcontrol_wait()
        early = self.early_numbers(cta, arrays.lengths)
        if warp_idx > GATHER_WARP:
            self.prefetch_operands(q, arrays.indices, warp_idx - GATHER_WARP - 1)
        if const_expr(config.whole and query is not None):
            if warp_idx == 0:
                # Q's rows follow from the CTA's index, so Q need not wait for the token's length.
                self.scores.query.request(self.walk.first_row(cta), query)

        state = storage.schedule_state.get_tensor(cute.make_layout(self.state_words))
        # Requests are sorted in the first stage, before any row is copied there.
        order = cute.make_tensor(cute.recast_ptr(storage.ring.data_ptr(), dtype=Int32), cute.make_layout(MAX_SORTED))
        schedule = Schedule(
            block_tables=arrays.indices,
            seq_lens=arrays.lengths,
            cu_seqlens_q=arrays.lengths,
            partial_lse=arrays.partial_lse,
            split_info=arrays.split_info,
            pieces=shared.pieces,
            state=state,
            num_clusters=ctas,
            cluster_index=cta,
            rank=Int32(0),
            all_rows=arrays.lse.shape[0],
            order=order,
        )
        if warp_idx == GATHER_WARP:
            self.walk.begin(schedule, early)
            self.walk.next_piece(Int32(0), schedule)
        valid = storage.valid.get_tensor(cute.make_layout((GATHER_WARPS, self.ring.stages), stride=(1, GATHER_WARPS)))
        of_tokens = self.bits_of_stages(storage) if const_expr(self.config.tokens > 1) else None
        cute.arch.sync_threads()
        if group == 3:
            self.registers.set(self.registers.copies)
            gather = Gather(
                q=q,
                q_rope=arrays.q_rope,
                caches=caches,
                indices=arrays.indices,
                ring=storage.ring.data_ptr().toint(),
                full=shared.full,
                empty=shared.empty,
                valid=valid,
                pieces=shared.pieces,
                bits=arrays.bits,
                of_tokens=of_tokens,
            )
            self.gatherer.run(gather, warp_idx - GATHER_WARP)
        else:
            if group == 0:
                self.registers.set(self.registers.scores)
                self.scores.score(arrays, shared, self.scratch(storage, query, valid, of_tokens), score_mma)
            else:
                self.registers.set(self.registers.values)
                self.values.accumulate(arrays, shared, value_mma, group - 1, warp_idx, schedule)
            # Gathering warps, which end first, must not call this: `combine` would launch and occupy the SM while it
            # waits.
            cute.arch.griddepcontrol_launch_dependents()

    def early_numbers(self, cta: Int32, lengths: cute.Tensor) -> tuple[Int32, Int32, Int32]:
        """The lengths that the schedule needs first, loaded by all warps."""
        if self.config.whole:
            return self.walk.early_numbers(cta, lengths)
        return self.walk.batch.early_numbers(lengths, lengths)

    def query_of(
        self, storage: cute.struct, q: cute.Tensor, q_map: tuple[cute.CopyAtom, cute.Tensor] | None
    ) -> Query | None:
        """The copy of Q; None if Q goes through the ring."""
        if q_map is None:
            return None
        atom, tma = q_map
        return Query(atom, tma, q, storage.q.data_ptr(), storage.q_full.data_ptr())

    def scratch(
        self, storage: cute.struct, query: Query | None, valid: cute.Tensor, of_tokens: cute.Tensor | None
    ) -> Scratch | RowScratch:
        """Shared memory of the softmax warpgroup."""
        if query is None:
            return RowScratch(storage.q.data_ptr(), valid)
        return Scratch(query, storage.exchange.data_ptr(), valid, of_tokens)

    def bits_of_stages(self, storage: cute.struct) -> cute.Tensor:
        """The bits of the keys' tokens: `of_tokens` of Gather."""
        keys, stages = self.ring.block, self.ring.stages
        return storage.of_tokens.get_tensor(cute.make_layout((keys, stages), stride=(1, keys)))

    @cute.jit
    def leave(self, arrays: Arrays):
        """Tell `combine` that this CTA has no piece."""
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        slot = 2 * cta + tidx
        if tidx < 2:
            arrays.split_info[slot, SplitEntry.PIECES] = Int32(0)

    @cute.jit
    def works(self, lengths: cute.Tensor):
        """Whether this launch has any row tile, that is, any length that is not negative. All threads of the CTA must
        call it, and all get the answer."""
        tidx, _, _ = cute.arch.thread_idx()
        mine = Int32(0)
        for i in cutlass.range(tidx, lengths.shape[0], THREADS, unroll=4):
            mine |= Int32(lengths[i] >= 0)
        found = cute.arch.inline_ptx(
            "{ .reg .pred mine, any; setp.ne.s32 mine, {$r0}, 0; "
            f"barrier.cta.red.or.pred any, 0, {THREADS}, mine; "
            "selp.s32 {$w0}, 1, 0, any; }",
            write_only_types=[Int32],
            read_only_args=[mine],
        )
        return found != 0

    @cute.jit
    def prefetch_operands(self, q: cute.Tensor, indices: cute.Tensor, warp: Int32):
        """Prefetch indices and q into the L2 cache, in three idle warps, while the schedule is computed."""
        cta, _, _ = cute.arch.block_idx()
        line = (cta * 3 + warp) * 32 + cute.arch.lane_idx()
        prefetch(indices, line * 32)
        prefetch(q, line * 64)
