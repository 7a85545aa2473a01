"""Products of activations (e4m3 or 16 bits) with block-scaled weights in one launch, dense or grouped, for Hopper; of
groups also with weights of 16 bits.

DESIGN.md in this folder gives the reasons. out = x W^T is computed as W x^T, where M of the WGMMAs are weight rows, or,
with config.tokens_first, as x W^T, where M are rows of x. Warpgroups of a CTA:

  0 to groups - 1   math: products (blocks.py), their float32 sums (sums.py), and the results (results.py)
  the last          first warp: TMA copies of weights and x; other warps: scales, picked rows of x (copies.py)
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from tsmla_kernels.sm90.products.config import ProductConfig
from tsmla_kernels.sm90.products.copies import SCALE_WARPS, Copies
from tsmla_kernels.sm90.products.memory import (
    TILE_SLOTS,
    Arrays,
    Mma,
    Place,
    Shared,
    Tma,
    make_storage,
    shared_memory,
)
from tsmla_kernels.sm90.products.sums import Sums, meet_cluster
from tsmla_kernels.sm90.products.tiles import Tiles
from tsmla_kernels.sm90.warp import quotient, remainder


class BlockScaledMatmul:
    """block_scaled_matmul, or grouped_block_scaled_matmul: `config` is static, all sizes are dynamic.

    Operands of the launcher: the arrays of memory.Arrays that the config has, in that order.
    """

    def __init__(self, config: ProductConfig) -> None:
        if config.stages < SCALE_WARPS:
            raise ValueError(f"{config} leaves {config.stages} stages of shared memory; {SCALE_WARPS} are needed")
        if not config.has_room:
            raise ValueError(f"{config} has more sums than its stages have room for")
        if config.multicast and not config.may_multicast:
            raise ValueError(
                f"{config} has multicast; legal: with tokens_first, splits of 1, and x in order if it is x"
            )
        self.config = config
        self.copy_warp = config.threads // 32
        self.storage = make_storage(config)
        self.tiles = Tiles(config)
        self.copies, self.sums = Copies(config, self.tiles), Sums(config, self.tiles)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        config = self.config
        scaled = not config.wide, not config.plain
        given = (True, True, *scaled, config.grouped, config.picked, True, config.quantized)
        operand = iter(operands)
        arrays = Arrays._make([next(operand) if const_expr(has) else None for has in given])
        clusters = Int32(config.num_sms * config.ctas // config.cluster)
        if const_expr(not config.grouped):
            tiles = self.tiles.below(Int32(arrays.out.shape[0])) * self.tiles.columns(arrays)
            clusters = cutlass.max(cutlass.min(tiles, clusters) if const_expr(config.persistent) else tiles, 1)
        self.multiply(self.copies.tensor_maps(arrays), arrays, self.sums.mma()).launch(
            grid=[clusters * config.cluster, 1, 1],
            block=[config.threads + 128, 1, 1],
            cluster=[config.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=config.ctas,
            preferred_smem_carveout=100,  # in percent; without this number the DSL would ask a GPU for it
        )

    @cute.kernel
    def multiply(self, tma: Tma, arrays: Arrays, mma: Mma):
        """Run one CTA: set up the barriers, then give each warp its role."""
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        shared = shared_memory(utils.SmemAllocator().allocate(self.storage))
        if warp == self.copy_warp:
            for copy in tma:
                cpasync.prefetch_descriptor(copy.atom)
        if warp == 0:
            self.init_barriers(shared)
        cute.arch.mbarrier_init_fence()
        block, grid = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        size = config.cluster
        place = Place(quotient(block, size), remainder(block, size), quotient(grid, size))
        if const_expr(size > 1):
            meet_cluster()
        else:
            cute.arch.sync_threads()
        if group == config.groups:
            cute.arch.setmaxregister_decrease(config.registers[1])
            if warp == self.copy_warp:
                self.copies.run(tma, arrays, shared, place)
            else:
                self.copies.run_scales(arrays, shared, place, warp - self.copy_warp - 1)
            if const_expr(config.splits > 1):
                for _ in cutlass.range_constexpr(2):  # the math warps meet twice, and all threads must
                    meet_cluster()
        else:
            cute.arch.setmaxregister_increase(config.registers[0])
            self.sums.run(arrays, shared, mma, place, group)
        if const_expr(config.multicast):
            meet_cluster()  # a CTA must not end while the other one arrives on its barriers

    @cute.jit
    def init_barriers(self, shared: Shared):
        """Initialise the barriers, one stage per lane, with the number of arrivals that complete a phase."""
        lane = cute.arch.lane_idx()
        if lane < self.config.stages:
            cute.arch.mbarrier_init(shared.full + lane, 2)
            cute.arch.mbarrier_init(shared.empty + lane, self.copy_warp * (2 if self.config.multicast else 1))
        if const_expr(self.config.handed):
            if lane < TILE_SLOTS:
                cute.arch.mbarrier_init(shared.tile_full + lane, 1)
                cute.arch.mbarrier_init(shared.tile_empty + lane, self.copy_warp)
