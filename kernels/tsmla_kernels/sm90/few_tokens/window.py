"""few_token_window: rows of V4's window, quantised and written into its packed cache, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8

from tsmla_kernels.cache_ops.kernels import load, store, values_at
from tsmla_kernels.contract.layouts import V4_PACKED
from tsmla_kernels.sm90.few_tokens.config import WARPS, WindowConfig
from tsmla_kernels.sm90.few_tokens.tile import row_of, start
from tsmla_kernels.sparse_cache.values import BIAS, greatest_bits, power_of_two, scale_exponent

VALUES = V4_PACKED.head_dim // 32
"""Columns of a lane."""
GROUP_LANES = V4_PACKED.group // VALUES
NOPE_LANES = V4_PACKED.nope_dim // VALUES


class Arrays(NamedTuple):
    """The arrays of a launch: rows [T, 512] f32; slot_mapping [T] i32; kv_cache [P, page bytes] uint8, which is not
    read; new_kv_cache, the same memory."""

    rows: cute.Tensor
    slot_mapping: cute.Tensor
    kv_cache: cute.Tensor
    new_kv_cache: cute.Tensor


class FewTokenWindow:
    """few_token_window: `config` is static, all other sizes are dynamic. A warp has a row; four lanes have the columns
    of one scale."""

    def __init__(self, config: WindowConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        arrays = Arrays(*operands)
        start(self.write(arrays), stream, cute.ceil_div(arrays.slot_mapping.shape[0], WARPS))

    @cute.kernel
    def write(self, arrays: Arrays):
        """Write a warp's row into its slot, if the cache has that slot."""
        thread, page_size = cute.arch.thread_idx()[0], self.config.page_size
        token, lane = cute.arch.block_idx()[0] * WARPS + thread // 32, thread % 32
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if token < arrays.slot_mapping.shape[0]:
            slot = arrays.slot_mapping[token]
            if (slot >= 0) & (Int64(slot) < Int64(arrays.new_kv_cache.shape[0]) * page_size):
                page, offset = slot // page_size, slot % page_size
                source = row_of(arrays.rows, token) + lane * (VALUES * 4)
                target = arrays.new_kv_cache.iterator.toint() + Int64(page) * Int64(arrays.new_kv_cache.shape[1])
                self.store_row(source, target, offset, lane)

    @cute.jit
    def store_row(self, source: Int64, page: Int64, offset: Int32, lane: Int32) -> None:
        """Store a lane's columns, which begin at the address `source`, and its group's scale. page: the page's
        address."""
        values = cute.make_rmem_tensor((VALUES,), Float32)
        for i in cutlass.range_constexpr(VALUES // 4):
            four = load(Float32, source + i * 16, 4)
            for j in cutlass.range_constexpr(4):
                values[4 * i + j] = four[j]
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
