"""Absorbed MLA decode over a paged latent cache, for Hopper: launch, shared memory, set-up and the warps' roles.

DESIGN.md in this folder gives the reasons. Warpgroups of a CTA share up to 64 query rows (token * H + head) and a ring
of stages of 32 or 64 keys:

  warpgroup 0   softmax: S = Q K^T, softmax, P into shared memory (scores_*.py)
  1 and 2       values: O[:, half] += P V[:, half] and the epilogue (values_*.py); first warp of 2: the
                schedule, but for the first piece, which the copying warp finds
  3             first warp: the copies (Q and keys go through the same ring); with a cache of 16 bits and more than 32
                query rows there is no warpgroup 3, and the first warp of 1 copies

A second, small kernel merges the results of row tiles that several CTAs (or clusters) shared. Both kernels use
programmatic dependent launch: the first behind the kernel before it on the stream, the second behind the first.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from tsmla_kernels.sm90.decode.config import DecodeConfig
from tsmla_kernels.sm90.decode.copies import TABLE_AHEAD, Copier
from tsmla_kernels.sm90.decode.memory import COPY_STATE_WORDS, PIECES_KEPT, Arrays, Copies, Scratch, Tma
from tsmla_kernels.sm90.decode.scores_16bit import Scores16bit
from tsmla_kernels.sm90.decode.scores_fp8 import ScoresFp8
from tsmla_kernels.sm90.decode.scores_mixed import ScoresMixed
from tsmla_kernels.sm90.decode.stages import Stages, decode_ring
from tsmla_kernels.sm90.decode.values_16bit import Values16bit
from tsmla_kernels.sm90.decode.values_few_rows import ValuesFewRows
from tsmla_kernels.sm90.decode.values_fp8 import ValuesFp8
from tsmla_kernels.sm90.latent.combine import COMBINE_THREADS, Combine, Optional
from tsmla_kernels.sm90.latent.memory import SCHEDULE_WARP, Piece, Schedule
from tsmla_kernels.sm90.latent.registers import Registers
from tsmla_kernels.sm90.latent.scores import ScoreMma
from tsmla_kernels.sm90.latent.shape import ROWS
from tsmla_kernels.sm90.latent.share import MAX_SORTED, STATE_WORDS, BatchShare
from tsmla_kernels.sm90.latent.walk import PieceWalk
from tsmla_kernels.sm90.storage import checked_storage
from tsmla_kernels.sm90.warp import kept, prefetch


class MlaDecode:
    """One compiled decode: `config` is static; all shapes but H, L, R, Z and S (if ragged, its bound) are dynamic.

    The launcher takes a stream, q [N, D] of N = T * H query rows, kv_cache [P, Z, D], and the fields of memory.Arrays.
    If config.split_q, it takes q [N, L], or [H, T, L] if config.heads_first, and q_rope [N, W] in place of q [N, D]. If
    config.visible_lens, it takes the array visible_lens [T] after cu_seqlens_q.
    """

    def __init__(self, config: DecodeConfig) -> None:
        if config.stages < 3:
            raise ValueError(f"{config} leaves {config.stages} stages of shared memory; 3 are needed")
        self.config, self.cluster = config, config.cluster
        self.ring = decode_ring(config)
        self.stages = stages = Stages(config, self.ring)
        self.walk = PieceWalk(config.shape, batch=BatchShare(config.shape), pieces_kept=PIECES_KEPT)
        self.copier = Copier(config, stages)
        self.combine = Combine(config.shape)
        self.scores: Scores16bit | ScoresFp8 | ScoresMixed
        self.values: Values16bit | ValuesFewRows | ValuesFp8
        if config.fp8_cache:
            self.threads = 512
            wide = config.p_rows == ROWS and not config.mixed
            self.registers = Registers(128, 104, 192, 24) if wide else Registers(128, 120, 184, 24)
            self.scores = ScoresMixed(config, stages) if config.mixed else ScoresFp8(config, stages)
            self.values = ValuesFp8(config, stages, self.walk, self.copier)
        elif config.transposed_out:
            self.threads = 512
            self.registers = Registers(128, 216, 136, 24)
            self.scores = Scores16bit(config, stages)
            self.values = ValuesFewRows(config, stages, self.walk, self.copier)
        else:
            self.threads = 384
            self.registers = Registers(168, 184, 160, 160)  # 184 + 2 x 160 is 3 x 168
            self.scores = Scores16bit(config, stages)
            self.values = Values16bit(config, stages, self.walk, self.copier)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, q: cute.Tensor, *others: cute.Tensor):
        if const_expr(self.config.split_q):
            q_rope, kv_cache, *rest = others
            tma = self.copier.tensor_maps(q, kv_cache, q_rope)
        else:
            kv_cache, *rest = others
            tma = self.copier.tensor_maps(q, kv_cache)
        # visible_lens, if given, is the fourth of these operands and the last field.
        fields = (*rest[:3], *rest[4:], rest[3]) if const_expr(self.config.visible_lens) else rest
        arrays = Arrays(*fields)
        score_mma, value_mma = self.scores.mma(), self.values.mma()

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, self.ring.stages]
            empty: cute.struct.MemRange[Int64, self.ring.stages]
            ready: cute.struct.MemRange[Int64, self.ring.stages]
            pieces: cute.struct.MemRange[Int32, PIECES_KEPT * len(Piece)]
            rescale: cute.struct.Align[cute.struct.MemRange[Float32, self.ring.stages * ROWS], 16]
            moved: cute.struct.Align[cute.struct.MemRange[Int32, self.ring.stages * 4], 16]
            inverse: cute.struct.Align[cute.struct.MemRange[Float32, self.ring.inverses_kept * ROWS], 16]
            schedule_state: cute.struct.MemRange[Int32, STATE_WORDS]
            copy_state: cute.struct.MemRange[Int32, COPY_STATE_WORDS]
            pages: cute.struct.MemRange[Int32, TABLE_AHEAD]
            exchange: cute.struct.Align[cute.struct.MemRange[Float32, self.config.exchanged_words], 16]
            q: cute.struct.Align[cute.struct.MemRange[self.scores.q_dtype, self.scores.q_elements], 1024]
            ring: cute.struct.Align[cute.struct.MemRange[self.ring.dtype, self.ring.elements], 1024]

        self.storage = checked_storage(Storage, self.config)
        num_clusters = self.num_clusters(arrays.seq_lens, arrays.split_info)
        grid = [num_clusters * self.cluster, 1, 1]
        self.attend(q, tma, arrays, score_mma, value_mma, num_clusters).launch(
            grid=grid, block=[self.threads, 1, 1], cluster=[self.cluster, 1, 1], stream=stream, min_blocks_per_mp=1,
            use_pdl=True,
        )  # fmt: skip
        if const_expr(self.config.merged):
            self.combine.merge_pieces(
                arrays.partial_out,
                arrays.partial_lse,
                arrays.split_info,
                arrays.out,
                arrays.lse,
                num_clusters,
                Optional(),
            ).launch(grid=grid, block=[COMBINE_THREADS, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1)

    def num_clusters(self, seq_lens: cute.Tensor, split_info: cute.Tensor) -> Int32:
        """How many clusters share the work. split_info has two entries for each cluster or, if batch_invariant, one
        for each cluster and max_tiles for each request."""
        if const_expr(self.config.batch_invariant):
            return Int32(split_info.shape[0] - seq_lens.shape[0] * self.config.shape.max_tiles)
        return Int32(split_info.shape[0] // 2)

    @cute.kernel
    def attend(
        self,
        q: cute.Tensor,
        tma: Tma,
        arrays: Arrays,
        score_mma: ScoreMma,
        value_mma: cute.TiledMma,
        num_clusters: Int32,
    ):
        """Run one CTA: set up the barriers, find the first piece of work, then give each warpgroup its role."""
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tidx // 128)
        rank = cute.arch.make_warp_uniform(block_idx % self.cluster)
        cluster_index = cute.arch.make_warp_uniform(block_idx // self.cluster)

        # Before this wait the previous kernel may still write q, the cache, lengths and tables, and the last call's
        # `combine` may still read the workspaces. The barriers are initialised while the lengths are being loaded.
        cute.arch.griddepcontrol_wait()
        early = self.walk.batch.early_numbers(arrays.seq_lens, arrays.cu_seqlens_q)
        smem = utils.SmemAllocator()
        storage = smem.allocate(self.storage)
        shared = self.ring.views(storage, self.stages.keys(storage.ring.data_ptr()))

        if warp_idx == self.copier.warp:
            cpasync.prefetch_descriptor(tma.q_atom)
            cpasync.prefetch_descriptor(tma.keys_atom)
            if const_expr(self.config.split_q):
                cpasync.prefetch_descriptor(tma.q_rope_atom)
        first_idle_warp = max(self.copier.warp, SCHEDULE_WARP) + 1
        if warp_idx >= first_idle_warp:
            self.prefetch_operands(q, arrays.block_tables, warp_idx - first_idle_warp)
        if warp_idx == 0:
            self.ring.init_barriers(shared)
        self.sync_barriers()

        state = storage.schedule_state.get_tensor(cute.make_layout(STATE_WORDS))
        # Requests are sorted in the first stage. Q comes there first, and this CTA copies its own Q, so no other CTA
        # can write there before the sorting is done.
        order = cute.make_tensor(cute.recast_ptr(storage.ring.data_ptr(), dtype=Int32), cute.make_layout(MAX_SORTED))
        schedule = Schedule(
            block_tables=arrays.block_tables, seq_lens=arrays.seq_lens, cu_seqlens_q=arrays.cu_seqlens_q,
            partial_lse=arrays.partial_lse, split_info=arrays.split_info, pieces=shared.pieces, state=state,
            num_clusters=num_clusters, cluster_index=cluster_index, rank=rank, all_rows=arrays.lse.shape[0],
            order=order, visible_lens=arrays.visible_lens,
        )  # fmt: skip
        copies = Copies(
            tma=tma, block_tables=arrays.block_tables, keys=shared.keys, pieces=shared.pieces,
            state=storage.copy_state.get_tensor(cute.make_layout(COPY_STATE_WORDS)),
            pages=storage.pages.get_tensor(cute.make_layout(TABLE_AHEAD)), full=shared.full, rank=rank,
        )  # fmt: skip
        if warp_idx == self.copier.warp:
            requested = self.copier.request_only_q(Int32(arrays.seq_lens.shape[0]), copies)
            if const_expr(self.copier.q_known_early):
                # The shuffle prevents the compiler from using the length, and thus waiting for it, before the request.
                length, begin, end = early
                early = (kept(length), begin, end)
            self.walk.begin(schedule, early)
            self.walk.next_piece(Int32(0), schedule)
            self.copier.begin(copies, requested)
        cute.arch.sync_threads()
        if const_expr(self.config.transposed_out):
            if group == 3:
                self.registers.set(self.registers.copies)
                if warp_idx == self.copier.warp:
                    self.copier.run(shared.empty, copies)
            else:
                if group == 0:
                    self.registers.set(self.registers.scores)
                    scratch = Scratch(storage.q.data_ptr(), storage.exchange.data_ptr())
                    self.scores.score(arrays, shared, scratch, score_mma, rank)
                else:
                    self.registers.set(self.registers.values)
                    self.values.accumulate(arrays, shared, value_mma, group - 1, warp_idx, schedule, copies)
                # Only warps that end their work may signal. If idle warps signalled at once, `combine` would launch at
                # once, and occupy the SM while it waits.
                cute.arch.griddepcontrol_launch_dependents()
        else:
            if group == 0:
                self.registers.set(self.registers.scores)
                scratch = Scratch(storage.q.data_ptr(), storage.exchange.data_ptr())
                self.scores.score(arrays, shared, scratch, score_mma, rank)
            else:
                self.registers.set(self.registers.values)
                self.values.accumulate(arrays, shared, value_mma, group - 1, warp_idx, schedule, copies)
            cute.arch.griddepcontrol_launch_dependents()
        self.end()

    @cute.jit
    def prefetch_operands(self, q: cute.Tensor, block_tables: cute.Tensor, warp: Int32):
        """Prefetch the block table, and q unless heads_first, into the L2 cache. Three idle warps do this while the
        schedule's first loads are in flight."""
        block_idx, _, _ = cute.arch.block_idx()
        line = (block_idx * 3 + warp) * 32 + cute.arch.lane_idx()
        prefetch(block_tables, line * 32)
        if const_expr(not self.config.heads_first):
            prefetch(q, line * (128 // self.ring.itemsize))

    @cute.jit
    def sync_barriers(self):
        """Make the barriers visible to the CTAs of the cluster, and wait until each CTA has done so."""
        cute.arch.mbarrier_init_fence()
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def end(self):
        """Wait until the peer has finished with this CTA's shared memory."""
        if const_expr(self.cluster > 1):
            # A CTA must not exit while its peer still writes or signals its shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
