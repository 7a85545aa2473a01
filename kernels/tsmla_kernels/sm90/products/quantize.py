"""quantize_blocks in one launch: e4m3 activations with a scale for 128 columns. Half a warp has a block, eight columns
per lane, so shuffles find the block's maximum and no warp waits for another."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Uint32, const_expr

from tsmla_kernels.cache_ops.kernels import load, row_address, store
from tsmla_kernels.contract.products import BLOCK, INVERSE_MAX, LEAST_AMAX
from tsmla_kernels.sm90.products.config import QUANTIZE_CTAS, QuantizeConfig
from tsmla_kernels.sm90.products.gated import inverse_of, quotient
from tsmla_kernels.sm90.warp import DTYPES, divide
from tsmla_kernels.sparse_cache.values import greatest_bits, power_of_two, scale_exponent

THREADS = 256
LANE_VALUES = 8
BLOCK_LANES = BLOCK // LANE_VALUES
CTA_BLOCKS = THREADS // BLOCK_LANES
AT_ONCE = 2
"""So many blocks a lane loads before it quantises the first."""
INFINITY_BITS, NAN_BITS = 0x7F800000, 0x7FC00000


class QuantizeBlocks:
    """quantize_blocks: `config` is static, all sizes are dynamic.

    Operands of the launcher: x [R, K] in config.in_dtype; values [R, K] e4m3; scales [R, K / 128] f32, rounded up.
    """

    def __init__(self, config: QuantizeConfig) -> None:
        self.config = config
        self.in_dtype = DTYPES[config.in_dtype]

    @cute.jit
    def __call__(self, stream: cuda.CUstream, x: cute.Tensor, values: cute.Tensor, scales: cute.Tensor):
        blocks = Int32(scales.shape[0]) * Int32(scales.shape[1])
        ctas = cutlass.min((blocks + (CTA_BLOCKS - 1)) // CTA_BLOCKS, self.config.num_ctas)
        self.quantize(x, values, scales).launch(
            grid=[cutlass.max(ctas, 1), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=QUANTIZE_CTAS,
            preferred_smem_carveout=10,  # in percent; without this number the DSL would ask a GPU for it
        )

    @cute.kernel
    def quantize(self, x: cute.Tensor, values: cute.Tensor, scales: cute.Tensor):
        blocks = Int32(scales.shape[0]) * Int32(scales.shape[1])
        first = cute.arch.block_idx()[0] * CTA_BLOCKS + cute.arch.thread_idx()[0] // 32 * 2
        step = cute.arch.grid_dim()[0] * CTA_BLOCKS
        held = cute.make_rmem_tensor((LANE_VALUES, AT_ONCE), self.in_dtype)
        wide = cute.make_rmem_tensor((LANE_VALUES,), Float32)
        for pair in cutlass.range(first, blocks, AT_ONCE * step, unroll=1):
            for i in cutlass.range_constexpr(AT_ONCE):
                if pair + i * step < blocks:
                    row, column = self.place(scales, pair + i * step)
                    column = column * BLOCK + cute.arch.thread_idx()[0] % BLOCK_LANES * LANE_VALUES
                    held[None, i].fill(0.0)
                    if column < Int32(x.shape[1]):
                        address = row_address(x, row, column * (self.in_dtype.width // 8))
                        held[None, i].store(load(self.in_dtype, address, LANE_VALUES).load())
            for i in cutlass.range_constexpr(AT_ONCE):
                if pair + i * step < blocks:
                    wide.store(held[None, i].load().to(Float32))
                    self.quantize_block(wide, values, scales, pair + i * step)

    @cute.jit
    def place(self, scales: cute.Tensor, pair: Int32) -> tuple[Int32, Int32]:
        """The row of the half warp's block of the two blocks `pair` and pair + 1, and the block's index in that row. If
        no block is left for the warp's second half, it takes the last block once more, and writes the same."""
        of_row = Int32(scales.shape[1])
        last = Int32(scales.shape[0]) * of_row - 1
        block = cutlass.min(pair + cute.arch.thread_idx()[0] // BLOCK_LANES % 2, last)
        row = divide(block, of_row)
        return row, block - row * of_row

    @cute.jit
    def quantize_block(self, wide: cute.Tensor, values: cute.Tensor, scales: cute.Tensor, pair: Int32) -> None:
        """Quantise the lane's values of its block, which `place` finds, and write them and the scale."""
        lane = cute.arch.thread_idx()[0] % BLOCK_LANES
        row, index = self.place(scales, pair)
        column = index * BLOCK + lane * LANE_VALUES
        scale = self.scale(wide)
        if column < Int32(values.shape[1]):
            store(Float8E4M3FN, row_address(values, row, column), wide)
        if lane == 0:
            scales[row, index] = scale

    @cute.jit
    def scale(self, wide: cute.Tensor) -> Float32:
        """Return the scale of the half warp's block. Divide the lane's values by it."""
        bits = greatest_bits(wide, LANE_VALUES)
        for offset in cutlass.range_constexpr(BLOCK_LANES.bit_length() - 1):
            bits = cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, offset=1 << offset))
        nothing = Uint32(NAN_BITS).bitcast(Float32)
        if const_expr(self.config.power_of_two):
            exponent = scale_exponent(bits, LEAST_AMAX)
            scale, inverse = power_of_two(exponent), power_of_two(-exponent)
            if bits >= INFINITY_BITS:
                scale, inverse = nothing, nothing
            for i in cutlass.range_constexpr(LANE_VALUES):
                wide[i] = wide[i] * inverse
        else:
            scale = cute.arch.fmax(bits.bitcast(Float32), Float32(LEAST_AMAX)) * Float32(INVERSE_MAX)
            if bits >= INFINITY_BITS:
                scale = nothing
            inverse = inverse_of(scale)
            for i in cutlass.range_constexpr(LANE_VALUES):
                wide[i] = quotient(wide[i], scale, inverse)
        return scale
