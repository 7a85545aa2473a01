"""Gated results: silu(gate) * up of a tile's sums, and their quantising to e4m3 with a scale for 128 columns of a
token."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from tsmla_kernels.contract.products import BLOCK, INVERSE_MAX, LEAST_AMAX
from tsmla_kernels.sm90.products.config import GROUP_ROWS, ProductConfig
from tsmla_kernels.sm90.products.memory import Arrays, Lane, Shared, Tile
from tsmla_kernels.sm90.products.staging import chunk_place, stage_pair, take
from tsmla_kernels.sm90.warp import remainder

LOG2_E = 1.4426950408889634
INFINITY_BITS, NAN_BITS, MAGNITUDE = 0x7F800000, 0x7FC00000, 0x7FFFFFFF
AMAX_BARRIER = 1
"""The named barrier of the math warps that exchange greatest magnitudes and scales."""


class Gate:
    """Device functions that make gated results of sums.

    A lane has a column of the gate and the same column of up. With tokens_first these two are four values apart, and
    a wave's results have the order of sums of half as many columns. Otherwise the two are two values apart, and a
    wave's results are [token of two, eight tokens].
    """

    def __init__(self, config: ProductConfig) -> None:
        self.config = config
        self.apart = 4 if config.tokens_first else 2

    @cute.jit
    def results(self, sums: cute.Tensor) -> cute.Tensor:
        """The results of a lane's sums of all waves, [values of a wave, wave]."""
        values, apart = self.config.columns // 4, self.apart
        found = cute.make_rmem_tensor((values, self.config.waves), Float32)
        for wave in cutlass.range_constexpr(self.config.waves):
            for i in cutlass.range_constexpr(values):
                gate = i // apart * (2 * apart) + i % apart
                found[i, wave] = self.gated(sums[gate, wave], sums[gate + apart, wave])
        return found

    @cute.jit
    def gated(self, gate: Float32, up: Float32) -> Float32:
        """silu(gate) * up. If config.limit is not None, gate and up are limited first; NaN stays NaN."""
        if const_expr(self.config.limit is not None):
            limit = Float32(self.config.limit)
            gate, up = least(gate, limit), greatest(least(up, limit), -limit)
        sigmoid = cute.arch.rcp_approx(cute.math.exp2(gate * Float32(-LOG2_E), fastmath=True) + 1.0)
        return gate * sigmoid * up

    # ---- e4m3

    @cute.jit
    def store_rows(self, arrays: Arrays, results: cute.Tensor, tile: Tile, staging: Int32, place: Lane) -> None:
        """Store e4m3 results and their scales if tokens are first. A warp has all 128 columns of its 16 tokens."""
        group, warp, lane = place
        count = cute.size(results)
        flat = cute.make_tensor(results.iterator, cute.make_layout(count))
        first = group * GROUP_ROWS + warp * 16
        for row in cutlass.range_constexpr(2):
            mine = [2 * row + 4 * (i // 2) + i % 2 for i in range(count // 2)]
            bits = Uint32(0)
            for i in mine:
                bits = cutlass.max(bits, magnitude(flat[i]))
            for step in cutlass.range_constexpr(2):
                bits = cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, offset=1 << step))
            scale = scale_of(bits)
            token = first + lane // 4 + 8 * row
            if lane % 4 == 0 and token < tile.rows:
                arrays.out_scales[tile.row + token, tile.column] = scale
            inverse = inverse_of(scale)
            for i in cutlass.range_constexpr(count // 4):
                a, b = (quotient(flat[mine[2 * i + j]], scale, inverse) for j in range(2))
                pair = narrow_pair(a, b)
                chunk = chunk_place(lane // 4 + 8 * row, Int32(i // 2), 8)
                stage_pair(staging + chunk + i % 2 * 8 + lane % 4 * 2, pair)
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(4):
            row, chunk = i * 4 + lane // 8, remainder(lane, 8)
            four = take(staging + chunk_place(row, chunk, 8))
            if first + row < tile.rows:
                address = self.address(arrays, tile.row + first + row, tile.column * BLOCK + chunk * 16)
                there = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=16)
                cute.autovec_copy(four, cute.make_tensor(there, cute.make_layout(4)))
        cute.arch.sync_warp()

    @cute.jit
    def store_columns(
        self, arrays: Arrays, shared: Shared, results: cute.Tensor, tile: Tile, staging: Int32, place: Lane
    ) -> None:  # fmt: skip
        """Store e4m3 results and their scales if weights are first. The math warps each have some of a token's 128
        columns: they find its greatest magnitude together."""
        config = self.config
        group, warp, lane = place
        values, warps = config.columns // 4, config.threads // 32
        number = group * 4 + warp
        amax = cute.make_tensor(shared.amax, cute.make_layout((config.tokens, warps + 1)))
        for i in cutlass.range_constexpr(values):
            bits = Uint32(0)
            for wave in range(config.waves):
                bits = cutlass.max(bits, magnitude(results[i, wave]))
            for step in cutlass.range_constexpr(2, 5):
                bits = cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, offset=1 << step))
            if lane < 4:
                amax[i // 2 * 8 + lane * 2 + i % 2, number] = bits.bitcast(Float32)
        self.meet()
        token = number * 32 + lane
        if token < config.tokens:
            bits = Uint32(0)
            for other in cutlass.range_constexpr(warps):
                bits = cutlass.max(bits, amax[token, other].bitcast(Uint32))
            scale = scale_of(bits)
            amax[token, warps] = scale
            if token < tile.rows:
                arrays.out_scales[tile.row + token, tile.column] = scale
        self.meet()
        for wave in cutlass.range_constexpr(config.waves):
            for i in cutlass.range_constexpr(0, values, 2):
                first = i // 2 * 8 + lane % 4 * 2
                scales = [amax[first + j, warps] for j in range(2)]
                a, b = (quotient(results[i + j, wave], scales[j], inverse_of(scales[j])) for j in range(2))
                pair = narrow_pair(a, b)
                stage_byte(staging + first * 8 + lane // 4, pair)
                stage_byte(staging + (first + 1) * 8 + lane // 4, pair >> 8)
            cute.arch.sync_warp()
            column = tile.column * BLOCK + (group * config.waves + wave) * (GROUP_ROWS // 2) + warp * 8
            for begin in cutlass.range_constexpr(0, config.tokens, 32):
                token = begin + lane
                if token < cutlass.min(tile.rows, config.tokens):
                    pointer = cute.make_ptr(Int32, staging + token * 8, cute.AddressSpace.smem, assumed_align=8)
                    two = cute.make_rmem_tensor((2,), Int32)
                    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(2)), two)
                    address = self.address(arrays, tile.row + token, column)
                    there = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=8)
                    cute.autovec_copy(two, cute.make_tensor(there, cute.make_layout(2)))
            cute.arch.sync_warp()

    def meet(self) -> None:
        """Wait for all math warps."""
        cute.arch.barrier(barrier_id=AMAX_BARRIER, number_of_threads=self.config.threads)

    def address(self, arrays: Arrays, row: Int32, column: Int32) -> Int64:
        """The address of an e4m3 result."""
        return arrays.out.iterator.toint() + Int64(row) * Int64(arrays.out.shape[1]) + Int64(column)


def least(a: Float32, b: Float32) -> Float32:
    """The lesser of two numbers; NaN if either is NaN."""
    return cute.arch.inline_ptx(
        "min.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )  # fmt: skip


def greatest(a: Float32, b: Float32) -> Float32:
    """The greater of two numbers; NaN if either is NaN."""
    return cute.arch.inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )  # fmt: skip


def magnitude(value: Float32) -> Uint32:
    """The bits of |value|. Compared as integers, they order values by magnitude, with NaN above all numbers."""
    return value.bitcast(Uint32) & MAGNITUDE


@cute.jit
def scale_of(bits: Uint32) -> Float32:
    """The scale of values whose greatest magnitude has these bits, as quantize_blocks defines it."""
    scale = cute.arch.fmax(bits.bitcast(Float32), Float32(LEAST_AMAX)) * Float32(INVERSE_MAX)
    if bits >= INFINITY_BITS:
        scale = Uint32(NAN_BITS).bitcast(Float32)
    return scale


def inverse_of(scale: Float32) -> Float32:
    """1 / scale, as precise as float32 is. A scale lies between 2^-43 and 2^120, or is NaN."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 r, e; rcp.approx.f32 r, {$r0}; neg.f32 e, {$r0}; fma.rn.f32 e, e, r, 0f3F800000;"
        " fma.rn.f32 {$w0}, r, e, r; }",
        write_only_types=[Float32],
        read_only_args=[scale],
    )


def quotient(value: Float32, scale: Float32, inverse: Float32) -> Float32:
    """value / scale, rounded to nearest, if its magnitude is at most 448. inverse: 1 / scale. div.rn would test for
    special cases, and takes a hundred cycles for 0, which rows past the group have."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 q, n, e; mul.rn.f32 q, {$r0}, {$r2}; neg.f32 n, q; fma.rn.f32 e, n, {$r1}, {$r0};"
        " fma.rn.f32 {$w0}, e, {$r2}, q; }",
        write_only_types=[Float32],
        read_only_args=[value, scale, inverse],
    )


def narrow_pair(a: Float32, b: Float32) -> Int32:
    """Two numbers as two bytes of e4m3, a in the low one."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, {$r1}, {$r0}; cvt.u32.u16 {$w0}, h; }",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )


def stage_byte(address: Int32, byte: Int32) -> None:
    """Store the low byte of `byte` in shared memory."""
    cute.arch.inline_ptx("st.shared.b8 [{$r0}], {$r1};", read_only_args=[address, byte])
