"""few_token_window: V4's latents, normed, rotated, quantised and written into the window's packed cache, and the norm
of the low-rank queries that lie beside them, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8

from tsmla_kernels.cache_ops.kernels import load, store, values_at
from tsmla_kernels.contract.layouts import V4_PACKED
from tsmla_kernels.sm90.few_tokens.config import LOW_COLUMNS, WARPS, WindowConfig
from tsmla_kernels.sm90.few_tokens.tile import row_of, start, warp_sum
from tsmla_kernels.sparse_cache.values import BIAS, greatest_bits, power_of_two, scale_exponent

VALUES = V4_PACKED.head_dim // 32
"""Columns of a latent that a lane has."""
GROUP_LANES = V4_PACKED.group // VALUES
NOPE_LANES = V4_PACKED.nope_dim // VALUES
VECTOR = LOW_COLUMNS // 32
"""Columns that a lane loads at a time."""


class Arrays(NamedTuple):
    """The arrays of a launch, for T tokens.

    Attributes:
      joint: [T, W] bf16, whose rows begin with the low-rank query and the latent.
      low_norm, norm: the weights of their norms, f32. cos, sin: [T, R / 2] f32. slot_mapping: [T] i32.
      kv_cache: [P, page bytes] uint8, which is not read.
      low: the normed query, [T, rank] bf16. new_kv_cache: the same memory as kv_cache.
    """

    joint: cute.Tensor
    low_norm: cute.Tensor
    norm: cute.Tensor
    cos: cute.Tensor
    sin: cute.Tensor
    slot_mapping: cute.Tensor
    kv_cache: cute.Tensor
    low: cute.Tensor
    new_kv_cache: cute.Tensor


class FewTokenWindow:
    """few_token_window: `config` is static, all other sizes are dynamic. A warp has a token's latent, and the next warp
    the token's query; four lanes have the columns of one scale."""

    def __init__(self, config: WindowConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        arrays = Arrays(*operands)
        start(self.write(arrays), stream, cute.ceil_div(arrays.slot_mapping.shape[0], WARPS // 2))

    @cute.kernel
    def write(self, arrays: Arrays):
        """Write a warp's latent into its slot, if the cache has that slot, or its normed query."""
        warp, lane = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32), cute.arch.lane_idx()
        token = cute.arch.block_idx()[0] * (WARPS // 2) + warp // 2
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if token < arrays.slot_mapping.shape[0]:
            if warp % 2 == 0:
                self.write_latent(arrays, token, lane)
            else:
                self.write_query(arrays, token, lane)

    @cute.jit
    def write_query(self, arrays: Arrays, token: Int32, lane: Int32) -> None:
        """Write a token's normed query."""
        loads, row = self.config.rank // LOW_COLUMNS, row_of(arrays.joint, token)
        values = cute.make_rmem_tensor((loads, VECTOR), Float32)
        for i in cutlass.range_constexpr(loads):
            found = load(BFloat16, row + (i * 32 + lane) * (2 * VECTOR), VECTOR)
            for j in cutlass.range_constexpr(VECTOR):
                values[i, j] = found[j].to(Float32)
        factor = inverse_root(values, self.config.rank, self.config.low_eps)
        for i in cutlass.range_constexpr(loads):
            index = i * 32 + lane
            weight = load(Float32, arrays.low_norm.iterator.toint() + index * (4 * VECTOR), VECTOR)
            scaled = cute.make_rmem_tensor((VECTOR,), Float32)
            for j in cutlass.range_constexpr(VECTOR):
                scaled[j] = values[i, j] * factor * weight[j]
            store(BFloat16, row_of(arrays.low, token) + index * (2 * VECTOR), scaled)

    @cute.jit
    def write_latent(self, arrays: Arrays, token: Int32, lane: Int32) -> None:
        """Norm and rotate a token's latent, and write it into its slot, if the cache has that slot."""
        page_size, slot = self.config.page_size, arrays.slot_mapping[token]
        source = row_of(arrays.joint, token) + (self.config.rank + lane * VALUES) * 2
        found, values = load(BFloat16, source, VALUES), cute.make_rmem_tensor((VALUES,), Float32)
        for i in cutlass.range_constexpr(VALUES):
            values[i] = found[i].to(Float32)
        weight = load(Float32, arrays.norm.iterator.toint() + lane * (4 * VALUES), VALUES)
        factor = inverse_root(values, V4_PACKED.head_dim, self.config.eps)
        for i in cutlass.range_constexpr(VALUES):
            values[i] = values[i] * factor * weight[i]
        if lane >= NOPE_LANES:
            pairs = (lane - NOPE_LANES) * (VALUES // 2)
            cos, sin = (
                load(Float32, row_of(part, token) + pairs * 4, VALUES // 2) for part in (arrays.cos, arrays.sin)
            )
            for i in cutlass.range_constexpr(VALUES // 2):
                even, odd = values[2 * i], values[2 * i + 1]
                values[2 * i] = even * cos[i] - odd * sin[i]
                values[2 * i + 1] = odd * cos[i] + even * sin[i]
        if (slot >= 0) & (Int64(slot) < Int64(arrays.new_kv_cache.shape[0]) * page_size):
            page, offset = slot // page_size, slot % page_size
            target = arrays.new_kv_cache.iterator.toint() + Int64(page) * Int64(arrays.new_kv_cache.shape[1])
            self.store_row(values, target, offset, lane)

    @cute.jit
    def store_row(self, values: cute.Tensor, page: Int64, offset: Int32, lane: Int32) -> None:
        """Store a lane's columns, and its group's scale. page: the page's address."""
        bits = greatest_bits(values, VALUES)
        for step in cutlass.range_constexpr(GROUP_LANES.bit_length() - 1):
            bits = cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, offset=1 << step))
        exponent = scale_exponent(bits, V4_PACKED.floor)
        row = page + Int64(offset) * V4_PACKED.data_row_bytes
        scales = page + self.config.page_size * V4_PACKED.data_row_bytes + Int64(offset) * V4_PACKED.scale_row_bytes
        if lane < NOPE_LANES:
            inverse = power_of_two(-exponent)
            for i in cutlass.range_constexpr(VALUES):
                values[i] = values[i] * inverse
            store(Float8E4M3FN, row + lane * VALUES, values)
            if lane % GROUP_LANES == 0:
                values_at(Uint8, scales + lane // GROUP_LANES, 1)[0] = Uint8(exponent + BIAS)
        else:
            store(BFloat16, row + V4_PACKED.nope_dim + (lane - NOPE_LANES) * (2 * VALUES), values)
            if lane == NOPE_LANES:
                values_at(Uint8, scales + V4_PACKED.num_scales, 1)[0] = Uint8(0)


def inverse_root(values: cute.Tensor, columns: int, eps: float) -> Float32:
    """1 / sqrt(the mean of a row's squares + eps), of a row whose columns a warp's lanes share."""
    square = Float32(0.0)
    for i in range(cute.size(values)):
        square = square + values[i] * values[i]
    return cute.math.rsqrt(warp_sum(square) / Float32(columns) + Float32(eps))
