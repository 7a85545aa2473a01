"""The kernels that write V3.2's packed rows and the indexer's keys, and that quantise the indexer's queries. One launch
does rope, quantisation and the write. DESIGN.md in this folder gives the reasons.

A warp works on a packed row, and half a warp on an indexer row. Shuffles find a row's maximum, and a warp never waits
for another warp.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, const_expr

from tsmla_kernels.cache_ops.kernels import DTYPES, is_written, load, row_address, store, values_at, widened
from tsmla_kernels.contract.layouts import INDEXER, V32_PACKED
from tsmla_kernels.sparse_cache.config import (
    LANE_VALUES,
    ROW_LANES,
    WARPS,
    IndexerQuantizeConfig,
    IndexerWriteConfig,
    PackedWriteConfig,
)
from tsmla_kernels.sparse_cache.values import RowRotation, ask, greatest_bits, power_of_two, scale_exponent

THREADS = 32 * WARPS
LATENT_VALUES = V32_PACKED.latent_dim // 32
"""How many latent values a lane has."""
GROUP_LANES = V32_PACKED.group // LATENT_VALUES
SCALES_AT = V32_PACKED.latent_dim
ROPE_AT = SCALES_AT + 4 * V32_PACKED.num_scales


class WritePackedKvCache:
    """write_packed_kv_cache: `config` is static, tokens, pages and the page size are dynamic.

    Operands of the launcher: kv_cache [P, Z, 656] u8, which is not read; latent [T, 512] and k_rope [T, 64], or wider
    rows that begin with these columns, every row at a multiple of 16 bytes; slot_mapping [T] of config.slot_dtype;
    cos and sin [T, 32] f32, only if config.rotates; new_kv_cache, the same memory as kv_cache.
    """

    def __init__(self, config: PackedWriteConfig) -> None:
        self.config = config
        self.in_dtype = DTYPES[config.in_dtype]
        self.half = V32_PACKED.rope_dim // 2

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
        kv_cache: cute.Tensor,
        latent: cute.Tensor,
        k_rope: cute.Tensor,
        slot_mapping: cute.Tensor,
        *others: cute.Tensor,
    ):
        cos, sin = others[:2] if const_expr(self.config.rotates) else (None, None)
        self.write(latent, k_rope, slot_mapping, cos, sin, others[-1]).launch(
            grid=[cute.ceil_div(slot_mapping.shape[0], WARPS), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def write(
        self,
        latent: cute.Tensor,
        k_rope: cute.Tensor,
        slot_mapping: cute.Tensor,
        cos: cute.Tensor | None,
        sin: cute.Tensor | None,
        cache: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, row = thread & 31, block * WARPS + (thread >> 5)
        token = cutlass.min(row, slot_mapping.shape[0] - 1)
        slot = slot_mapping[token]
        values = load(self.in_dtype, row_address(latent, token, lane * (LATENT_VALUES * self.in_dtype.width // 8)), 16)
        pair = self.pair(row_address(k_rope, token, 0), lane)
        if const_expr(self.config.rotates):
            angle = [load(Float32, row_address(table, token, lane * 4), 1)[0] for table in (cos, sin)]
            turned = pair[0] * angle[0] - pair[1] * angle[1], pair[1] * angle[0] + pair[0] * angle[1]
            # Round to the inputs' dtype, as a separate rotation would do before the packing.
            pair = [value.to(self.in_dtype).to(Float32) for value in turned]

        bits = greatest_bits(values, LATENT_VALUES)
        for step in cutlass.range_constexpr(GROUP_LANES.bit_length() - 1):
            bits = cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, offset=1 << step))
        exponent = scale_exponent(bits, V32_PACKED.floor)
        if is_written(row < slot_mapping.shape[0], cache, slot):
            address = cache.iterator.toint() + Int64(slot) * V32_PACKED.row_bytes
            store(Float8E4M3FN, address + Int64(lane * LATENT_VALUES), widened(values, power_of_two(-exponent)))
            if lane % GROUP_LANES == 0:
                values_at(Float32, address + Int64(SCALES_AT + lane // GROUP_LANES * 4), 1)[0] = power_of_two(exponent)
            self.store_pair(address + ROPE_AT, lane, pair)

    @cute.jit
    def pair(self, address: Int64, index: Int32):
        """The two members, in float32, of one pair of the rope vector at `address`."""
        size = self.in_dtype.width // 8
        if const_expr(self.config.rope_interleave):
            both = load(self.in_dtype, address + Int64(index * (2 * size)), 2)
            return [both[i].to(Float32) for i in range(2)]
        return [
            load(self.in_dtype, address + Int64((index + i * self.half) * size), 1)[0].to(Float32) for i in range(2)
        ]

    @cute.jit
    def store_pair(self, address: Int64, index: Int32, pair: list[Float32]):
        """Write the two members of a pair to the rope part of a row."""
        if const_expr(self.config.rope_layout == "interleaved"):
            both = cute.make_rmem_tensor((2,), BFloat16)
            for i in cutlass.range_constexpr(2):
                both[i] = pair[i].to(BFloat16)
            cute.autovec_copy(both, values_at(BFloat16, address + Int64(index * 4), 2))
        else:
            for i in cutlass.range_constexpr(2):
                values_at(BFloat16, address + Int64((index + i * self.half) * 2), 1)[0] = pair[i].to(BFloat16)


class IndexerRows:
    """Device functions for rows of the indexer's 128 values. Half a warp has a row; lanes count from 0 to 15 in it."""

    def __init__(self, config: IndexerWriteConfig | IndexerQuantizeConfig) -> None:
        self.config: Any = config
        self.in_dtype = DTYPES[config.in_dtype]
        self.rotation = RowRotation(config)

    @cute.jit
    def values_of(self, array: cute.Tensor, row: Int32, columns: list[Int32]):
        """A lane's values of a row, in the array's dtype. `columns` is the result of RowRotation.columns."""
        values = cute.make_rmem_tensor((LANE_VALUES,), self.in_dtype)
        count = LANE_VALUES // len(columns)
        for i in cutlass.range_constexpr(len(columns)):
            part = load(self.in_dtype, row_address(array, row, columns[i] * (self.in_dtype.width // 8)), count)
            for j in cutlass.range_constexpr(count):
                values[i * count + j] = part[j]
        return values

    @cute.jit
    def store_values(self, address: Int64, columns: list[Int32], values: cute.Tensor):
        """Write a lane's values, rounded to e4m3, into a row at an address."""
        count = LANE_VALUES // len(columns)
        for i in cutlass.range_constexpr(len(columns)):
            part = cute.make_rmem_tensor((count,), Float32)
            for j in cutlass.range_constexpr(count):
                part[j] = values[i * count + j]
            store(Float8E4M3FN, address + Int64(columns[i]), part)

    @cute.jit
    def quantized(self, values: cute.Tensor, floor: cutlass.Constexpr[float]):
        """The lane's values divided by the row's power-of-two scale, and the scale's exponent. All lanes of the warp
        call this function."""
        bits = greatest_bits(values, LANE_VALUES)
        for step in cutlass.range_constexpr(ROW_LANES.bit_length() - 1):
            bits = cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, offset=1 << step))
        exponent = scale_exponent(bits, floor)
        return widened(values, power_of_two(-exponent)), exponent


class WriteIndexerCache(IndexerRows):
    """write_indexer_cache into packed pages: `config` is static, tokens, pages and the page size are dynamic.

    Operands of the launcher: k_cache [P, Z, 132] u8, which is not read; k [T, 128], or wider rows that begin with these
    columns, every row at a multiple of 16 bytes; slot_mapping [T] of config.slot_dtype; cos and sin [T, R / 2] f32,
    only if config.rope_dim > 0; new_k_cache, the same memory as k_cache.
    """

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
        k_cache: cute.Tensor,
        k: cute.Tensor,
        slot_mapping: cute.Tensor,
        *others: cute.Tensor,
    ):
        cos, sin = others[:2] if const_expr(self.config.rope_dim > 0) else (None, None)
        self.write(k, slot_mapping, cos, sin, others[-1]).launch(
            grid=[cute.ceil_div(slot_mapping.shape[0], 2 * WARPS), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def write(
        self,
        k: cute.Tensor,
        slot_mapping: cute.Tensor,
        cos: cute.Tensor | None,
        sin: cute.Tensor | None,
        cache: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, row = thread % ROW_LANES, block * (2 * WARPS) + thread // ROW_LANES
        token = cutlass.min(row, slot_mapping.shape[0] - 1)
        slot = slot_mapping[token]
        columns = self.rotation.columns(lane)
        values = widened(self.values_of(k, token, columns), Float32(1.0))
        if const_expr(self.config.rope_dim > 0):
            self.rotation.rotate(values, self.rotation.angles(cos, sin, token, lane), lane)
        values, exponent = self.quantized(values, INDEXER.key_floor)
        if is_written(row < slot_mapping.shape[0], cache, slot):
            page_size = cache.shape[1]
            page = slot // page_size
            offset = slot - page * page_size
            address = cache.iterator.toint() + Int64(page) * Int64(page_size) * INDEXER.row_bytes
            self.store_values(address + Int64(offset) * INDEXER.head_dim, columns, values)
            if lane == 0:
                scale = address + Int64(page_size) * INDEXER.head_dim + Int64(offset) * INDEXER.scale_bytes
                values_at(Float32, scale, 1)[0] = power_of_two(exponent)


class IndexerQuantize(IndexerRows):
    """indexer_quantize: `config` is static, the number of tokens is dynamic.

    Operands of the launcher: q [T * Hi, 128], or wider rows that begin with these columns, every row at a multiple of
    16 bytes; weights [T * Hi]; cos and sin [T, R / 2] f32, only if config.rope_dim > 0; q8 [T * Hi, 128] e4m3;
    folded_weights [T * Hi] f32.
    """

    @cute.jit
    def __call__(self, stream: cuda.CUstream, q: cute.Tensor, weights: cute.Tensor, *others: cute.Tensor):
        cos, sin = others[:2] if const_expr(self.config.rope_dim > 0) else (None, None)
        q8, folded = others[-2:]
        self.quantize(q, weights, cos, sin, q8, folded).launch(
            grid=[cute.ceil_div(weights.shape[0], self.config.warps * self.config.warp_rows), 1, 1],
            block=[32 * self.config.warps, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def quantize(
        self,
        q: cute.Tensor,
        weights: cute.Tensor,
        cos: cute.Tensor | None,
        sin: cute.Tensor | None,
        q8: cute.Tensor,
        folded: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        config, num_rows = self.config, weights.shape[0]
        lane, first = thread % ROW_LANES, (block * config.warps + (thread >> 5)) * config.warp_rows
        columns, weight_bytes = self.rotation.columns(lane), weights.element_type.width // 8
        rotates, one_token = config.rope_dim > 0, config.num_heads % config.warp_rows == 0
        rows, held, factors, angles = [], [], [], []
        for u in cutlass.range_constexpr(config.unroll):
            # Lanes past the last row work on the last row, and write the same values to it again.
            row = cutlass.min(first + 2 * u + (thread >> 4) % 2, num_rows - 1)
            rows.append(row)
            held.append(self.values_of(q, row, columns))
            factors.append(ask(config.weights_dtype, weights.iterator.toint() + Int64(row) * weight_bytes))
            if const_expr(rotates and (u == 0 or not one_token)):
                angles.append(self.rotation.angles(cos, sin, row // config.num_heads, lane))
        for u in cutlass.range_constexpr(config.unroll):
            values = widened(held[u], Float32(1.0))
            if const_expr(rotates):
                self.rotation.rotate(values, angles[0 if one_token else u], lane)
            values, exponent = self.quantized(values, INDEXER.query_floor)
            self.store_values(row_address(q8, rows[u], 0), columns, values)
            if lane == 0:
                folded[rows[u]] = factors[u] * Float32(config.constant) * power_of_two(exponent)
