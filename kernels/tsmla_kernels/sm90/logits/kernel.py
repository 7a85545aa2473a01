"""indexer_logits in one launch: the score of every cached key for every query token, for Hopper.

DESIGN.md in this folder gives the reasons. Warpgroups of a CTA:

  config.groups warpgroups   math: products of keys and queries in fp8, and their epilogue (products.py)
  the last warpgroup         first warp: the producer finds the CTA's share and copies (share.py, copies.py);
                             the other warps write -inf into the columns that a token does not see (fill.py)
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from tsmla_kernels.sm90.logits.config import BLOCK, HEAD_DIM, Q_STAGES, LogitsConfig
from tsmla_kernels.sm90.logits.copies import Producer
from tsmla_kernels.sm90.logits.fill import Fill
from tsmla_kernels.sm90.logits.memory import Arrays, Buffers, Mma, Piece, Position, Request, Share, Shared, Tma
from tsmla_kernels.sm90.logits.products import Math
from tsmla_kernels.sm90.storage import checked_storage
from tsmla_kernels.sm90.warp import prefetch


class IndexerLogits:
    """The launcher of indexer_logits for one `config`. All sizes but Hi, Di and Z are dynamic.

    Operands of the launcher: q [T, Hi, 128] e4m3; weights [T, Hi] f32; k_cache, u8 [P, Z, 132] if config.packed,
    otherwise e4m3 [P, Z, 128]; block_tables [B, M] i32; seq_lens [B] i32; if config.ragged, cu_seqlens_q [B + 1] i32
    (otherwise B is T); logits [T, M * Z] f32. If config.writes_rows, the T rows can be a chunk of a call's rows, with
    `first` rows of the call before the chunk. Then row_lens and row_requests [first + T] i32 follow: for each row of
    the call up to the chunk's last one, how many keys the row sees, and its request. The launch writes only the
    chunk's entries.
    """

    def __init__(self, config: LogitsConfig) -> None:
        if config.stages < 4:
            raise ValueError(f"{config} leaves {config.stages} stages of shared memory; 4 are needed")
        if config.writes_rows and not config.ragged:
            raise ValueError(f"{config} writes rows that are known: each request has one")
        self.config = config
        self.producer_warp = 4 * config.groups
        self.producer, self.math, self.fill = Producer(config), Math(config), Fill(config)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        config = self.config
        offsets = operands[5] if const_expr(config.ragged) else None
        logits, *by_products = operands[5 + config.ragged :]
        row_lens, row_requests = by_products if const_expr(config.writes_rows) else (None, None)
        arrays = Arrays._make([*operands[:5], offsets, logits, row_lens, row_requests])

        @cute.struct
        class Storage:
            q_full: cute.struct.MemRange[Int64, Q_STAGES]
            q_empty: cute.struct.MemRange[Int64, Q_STAGES]
            keys_full: cute.struct.MemRange[Int64, config.stages]
            keys_empty: cute.struct.MemRange[Int64, config.stages]
            pieces: cute.struct.MemRange[Int32, Q_STAGES * len(Piece)]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, config.stages * BLOCK], 128]
            weights: cute.struct.Align[cute.struct.MemRange[Float32, Q_STAGES * config.weight_words], 128]
            q: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, Q_STAGES * config.q_bytes], 1024]
            keys: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, config.stages * BLOCK * HEAD_DIM], 1024]

        self.storage = checked_storage(Storage, config)
        self.score(self.producer.tensor_maps(arrays), arrays, self.math.mma()).launch(
            grid=[config.num_ctas, 1, 1], block=[128 * (config.groups + 1), 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def score(self, tma: Tma, arrays: Arrays, mma: Mma):
        """Run one CTA: set up the barriers, then give each warp its role."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        storage = utils.SmemAllocator().allocate(self.storage)
        shared = self.shared_memory(storage)
        if warp > self.producer_warp:
            self.prefetch_operands(arrays, warp - self.producer_warp - 1)
        if warp == 0:
            self.init_barriers(shared)
        share = Share(Position(*[Int32(0)] * 3), Request(*[Int32(0)] * 3), Int32(0))
        if warp == self.producer_warp:
            # This warp loads the lengths while warp 0 sets up the barriers.
            cpasync.prefetch_descriptor(tma.q.atom)
            cpasync.prefetch_descriptor(tma.keys.atom)
            block_idx, _, _ = cute.arch.block_idx()
            share = self.producer.line.share(arrays, block_idx, self.config.num_ctas)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if group == self.config.groups:
            cute.arch.setmaxregister_decrease(self.config.registers[2])
            if warp == self.producer_warp:
                self.producer.run(tma, arrays, shared, share)
            else:
                self.run_beside_producer(arrays, warp - self.producer_warp - 1)
        else:
            cute.arch.setmaxregister_increase(self.config.registers[1])
            self.math.run(arrays.logits, shared, mma, group)

    @cute.jit
    def run_beside_producer(self, arrays: Arrays, warp: Int32):
        """Run the three warps next to the producer."""
        # A top-k of these logits may start as soon as its CTAs have room. It waits for this kernel's end before it
        # reads the logits.
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.config.writes_rows):
            self.fill.write_rows(arrays, warp)
        self.fill.run(arrays, warp)

    def shared_memory(self, storage: cute.struct) -> Shared:
        """Views of the allocated `storage`."""
        q = storage.q.data_ptr(), storage.weights.data_ptr(), storage.q_full.data_ptr(), storage.q_empty.data_ptr()
        keys = (
            storage.keys.data_ptr(), storage.scales.data_ptr(), storage.keys_full.data_ptr(),
            storage.keys_empty.data_ptr(),
        )  # fmt: skip
        return Shared(
            Buffers(*q),
            Buffers(*keys),
            storage.pieces.get_tensor(cute.make_layout((len(Piece), Q_STAGES), stride=(1, len(Piece)))),
        )

    @cute.jit
    def init_barriers(self, shared: Shared):
        """Initialise the barriers, one stage per lane, with the number of arrivals that complete a phase."""
        lane = cute.arch.lane_idx()
        if lane < Q_STAGES:
            cute.arch.mbarrier_init(shared.q.full + lane, 1)
            cute.arch.mbarrier_init(shared.q.empty + lane, 4 * self.config.groups)
        if lane < self.config.stages:
            cute.arch.mbarrier_init(shared.keys.full + lane, 1)
            cute.arch.mbarrier_init(shared.keys.empty + lane, 4 * self.config.q_groups)

    @cute.jit
    def prefetch_operands(self, arrays: Arrays, warp: Int32):
        """Prefetch the block table into the L2 cache while the lengths are being loaded."""
        block_idx, _, _ = cute.arch.block_idx()
        prefetch(arrays.block_tables, ((block_idx * 3 + warp) * 32 + cute.arch.lane_idx()) * 32)
