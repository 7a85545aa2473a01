"""few_token_index_key: the layer norm, the rope and the quantisation of up to 16 tokens' indexer keys, and their write
into the packed cache, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from tsmla_kernels.cache_ops.kernels import DTYPES, is_written, load, values_at, widened
from tsmla_kernels.contract.layouts import INDEXER
from tsmla_kernels.sm90.few_tokens.index_key_config import IndexKeyConfig
from tsmla_kernels.sm90.few_tokens.tile import start
from tsmla_kernels.sparse_cache.config import LANE_VALUES, ROW_LANES, IndexerWriteConfig
from tsmla_kernels.sparse_cache.kernels import IndexerRows
from tsmla_kernels.sparse_cache.values import power_of_two


class Arrays(NamedTuple):
    """The arrays of a launch, for T tokens.

    Attributes:
      keys: [T, 128] bf16, or wider rows that begin with these columns. norm_weight, norm_bias: [128] in
        config.norm_dtype. cos, sin: [T, R / 2] f32. slot_mapping: [T] i32.
      new_k_cache: [P, Z, 132] u8, the same memory as k_cache, which is not read.
    """

    keys: cute.Tensor
    norm_weight: cute.Tensor
    norm_bias: cute.Tensor
    cos: cute.Tensor
    sin: cute.Tensor
    slot_mapping: cute.Tensor
    k_cache: cute.Tensor
    new_k_cache: cute.Tensor


class FewTokenIndexKey:
    """few_token_index_key: `config` is static, all other sizes are dynamic. Half a warp of the only CTA has a token."""

    def __init__(self, config: IndexKeyConfig) -> None:
        self.config = config
        self.rows = IndexerRows(IndexerWriteConfig("bfloat16", config.rope_dim, 0, config.rope_layout))

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        start(self.write(Arrays(*operands)), stream, Int32(1))

    @cute.kernel
    def write(self, arrays: Arrays):
        """Write a token's key."""
        thread, tokens = cute.arch.thread_idx()[0], Int32(arrays.slot_mapping.shape[0])
        lane, row = thread % ROW_LANES, thread // ROW_LANES
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        token = cutlass.min(row, tokens - 1)
        columns = self.rows.rotation.columns(lane)
        values = widened(self.rows.values_of(arrays.keys, token, columns), Float32(1.0))
        self.normalise(arrays, values, columns)
        angles = self.rows.rotation.angles(arrays.cos, arrays.sin, token, lane)
        self.rows.rotation.rotate(values, angles, lane)
        values, exponent = self.rows.quantized(values, INDEXER.key_floor)
        slot = arrays.slot_mapping[token]
        if is_written(row < tokens, arrays.new_k_cache, slot):
            page_size = Int32(arrays.new_k_cache.shape[1])
            page = slot // page_size
            offset = slot - page * page_size
            address = arrays.new_k_cache.iterator.toint() + Int64(page) * Int64(page_size) * INDEXER.row_bytes
            self.rows.store_values(address + Int64(offset) * INDEXER.head_dim, columns, values)
            if lane == 0:
                scale = address + Int64(page_size) * INDEXER.head_dim + Int64(offset) * INDEXER.scale_bytes
                values_at(Float32, scale, 1)[0] = power_of_two(exponent)

    @cute.jit
    def normalise(self, arrays: Arrays, values: cute.Tensor, columns: list[Int32]) -> None:
        """The layer norm of a row in place. columns: where the lane's groups of neighbouring values begin."""
        mean = self.sum(values) / Float32(INDEXER.head_dim)
        squares = cute.make_rmem_tensor((LANE_VALUES,), Float32)
        for i in cutlass.range_constexpr(LANE_VALUES):
            values[i] = values[i] - mean
            squares[i] = values[i] * values[i]
        factor = cute.math.rsqrt(self.sum(squares) / Float32(INDEXER.head_dim) + Float32(self.config.eps))
        count, dtype = LANE_VALUES // len(columns), DTYPES[self.config.norm_dtype]
        for i in cutlass.range_constexpr(len(columns)):
            address = Int64(columns[i]) * (dtype.width // 8)
            weight, bias = (
                load(dtype, array.iterator.toint() + address, count) for array in (arrays.norm_weight, arrays.norm_bias)
            )
            for j in cutlass.range_constexpr(count):
                normed = values[i * count + j] * factor
                values[i * count + j] = normed * weight[j].to(Float32) + bias[j].to(Float32)

    @cute.jit
    def sum(self, values: cute.Tensor):
        """The sum of a row, of which each of ROW_LANES lanes has LANE_VALUES values."""
        total = values[0]
        for i in cutlass.range_constexpr(1, LANE_VALUES):
            total = total + values[i]
        for step in cutlass.range_constexpr(ROW_LANES.bit_length() - 1):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        return total
