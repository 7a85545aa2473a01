"""The kernels of V4's residual streams for up to 16 tokens: a mix is two launches.

few_token_write_streams writes a block's result to the streams, and multiplies them with the matrix that the next mix's
weights come from. few_token_read_streams adds its partial sums, and makes the next block's normed input and the weights
by which the block's result goes back.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from tsmla_kernels.cache_ops.kernels import load, store
from tsmla_kernels.sm90.few_tokens.config import WARPS
from tsmla_kernels.sm90.few_tokens.streams_config import (
    COLUMNS,
    SUMS,
    ReadStreamsConfig,
    WriteStreamsConfig,
    mix_rows,
)
from tsmla_kernels.sm90.few_tokens.tile import LINE, THREADS, block_sum, power, row_of, sigmoid, start, warp_sum

VECTOR = 8
"""Columns that a thread of few_token_read_streams loads at a time."""
QUAD = 4
"""Words of the partial sums that a thread loads at a time."""
QUADS = SUMS // QUAD


class WriteArrays(NamedTuple):
    """The arrays of a launch of few_token_write_streams, for T tokens with N streams of C columns.

    Attributes:
      streams: [T, N C] bf16. fn: [(2 + N) N, N C] f32, or [N, N C] if nothing is mixed.
      sums: [C / COLUMNS, T, SUMS] f32: the partial products of the streams with fn, then the partial sum of the
        streams' squares. Other words are not written.
      out, write, mix: the block's result [T, C] bf16, and the weights [T, N] and [T, N N] f32 of the writing and the
        mixing. new: the streams after it, [T, N C]. None if nothing is written.
    """

    streams: cute.Tensor
    fn: cute.Tensor
    sums: cute.Tensor
    out: cute.Tensor | None = None
    write: cute.Tensor | None = None
    mix: cute.Tensor | None = None
    new: cute.Tensor | None = None


class FewTokenWriteStreams:
    """few_token_write_streams: `config` is static, all other sizes are dynamic. A CTA has COLUMNS columns of all
    streams; each of its warps has some rows of fn."""

    def __init__(self, config: WriteStreamsConfig) -> None:
        self.config = config
        self.rows = mix_rows(config.count, config.mixes)
        self.each = -(-self.rows // WARPS)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        names = [
            "streams",
            "fn",
            *["out", "write", "mix"] * self.config.written,
            "sums",
            *["new"] * self.config.written,
        ]
        arrays = WriteArrays(**dict(zip(names, operands, strict=True)))
        start(self.write(arrays), stream, arrays.sums.shape[0])

    @cute.kernel
    def write(self, arrays: WriteArrays):
        """Write a CTA's columns of all tokens, and compute their partial sums."""
        count, rows = self.config.count, self.rows
        thread, part = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(thread // 32), cute.arch.lane_idx()
        columns = Int32(arrays.streams.shape[1]) // count
        column = part * COLUMNS + lane
        cute.arch.griddepcontrol_launch_dependents()
        if thread < rows * count:
            address = row_of(arrays.fn, thread // count) + (thread % count * columns + part * COLUMNS) * 4
            cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])
        cute.arch.griddepcontrol_wait()
        weights = cute.make_rmem_tensor((self.each, count), Float32)
        for i in cutlass.range_constexpr(self.each):
            row = cutlass.min(warp + i * WARPS, rows - 1)
            for stream in cutlass.range_constexpr(count):
                weights[i, stream] = arrays.fn[row, stream * columns + column]
        for token in cutlass.range(arrays.streams.shape[0], unroll=1):
            values = self.values(arrays, token, columns, column)
            if const_expr(arrays.new is not None):
                for stream in cutlass.range_constexpr(count):
                    if warp == stream % WARPS:
                        arrays.new[token, stream * columns + column] = values[stream].to(BFloat16)
            sums = cute.make_rmem_tensor((self.each + 1,), Float32)
            sums.fill(0.0)
            for stream in cutlass.range_constexpr(count):
                for i in cutlass.range_constexpr(self.each):
                    sums[i] = sums[i] + values[stream] * weights[i, stream]
                sums[self.each] = sums[self.each] + values[stream] * values[stream]
            for i in cutlass.range_constexpr(self.each + 1):
                sums[i] = warp_sum(sums[i])
            for i in cutlass.range_constexpr(self.each):
                if (lane == i) & (warp + i * WARPS < rows):
                    arrays.sums[part, token, warp + i * WARPS] = sums[i]
            if (lane == self.each) & (warp == 0):
                arrays.sums[part, token, rows] = sums[self.each]

    @cute.jit
    def values(self, arrays: WriteArrays, token: Int32, columns: Int32, column: Int32) -> cute.Tensor:
        """A column of a token's streams, written, in f32."""
        count = self.config.count
        found = cute.make_rmem_tensor((count,), Float32)
        for stream in cutlass.range_constexpr(count):
            found[stream] = arrays.streams[token, stream * columns + column].to(Float32)
        if const_expr(arrays.new is None):
            return found
        out = arrays.out[token, column].to(Float32)
        new = cute.make_rmem_tensor((count,), Float32)
        for stream in cutlass.range_constexpr(count):
            mixed = Float32(0.0)
            for other in cutlass.range_constexpr(count):
                mixed = mixed + rounded(arrays.mix[token, other * count + stream]) * found[other]
            own = rounded(rounded(arrays.write[token, stream]) * out)
            new[stream] = rounded(own + rounded(mixed))
        return new


class ReadArrays(NamedTuple):
    """The arrays of a launch of few_token_read_streams, for T tokens with N streams of C columns.

    Attributes:
      sums: [S, T, SUMS] f32, of few_token_write_streams. streams: [T, N C] bf16, as it has written them.
      base, scale: [(2 + N) N] and [3] f32, or [N] and [1]. norm: the weight of the input's norm, [C] f32.
      read: the block's input, [T, C] bf16. write, mix: [T, N] and [T, N N] f32, or None.
    """

    sums: cute.Tensor
    streams: cute.Tensor
    base: cute.Tensor
    scale: cute.Tensor
    norm: cute.Tensor
    read: cute.Tensor
    write: cute.Tensor | None = None
    mix: cute.Tensor | None = None


class FewTokenReadStreams:
    """few_token_read_streams: `config` is static, all other sizes are dynamic. A token has two CTAs: the first one
    makes the block's input, the second one the weights of the writing and the mixing."""

    def __init__(self, config: ReadStreamsConfig) -> None:
        self.config = config
        self.rows = mix_rows(config.count, config.mixes)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        arrays = ReadArrays(*operands)

        @cute.struct
        class Storage:
            sums: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * SUMS], 16]
            squares: cute.struct.MemRange[Float32, WARPS]

        self.storage = Storage
        start(self.mix(arrays), stream, arrays.read.shape[0], Int32(2 if self.config.mixes else 1))

    @cute.kernel
    def mix(self, arrays: ReadArrays):
        """Make a token's input, or its weights."""
        token, half, _ = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        storage = utils.SmemAllocator().allocate(self.storage)
        shared = storage.sums.get_tensor(cute.make_layout((WARPS, SUMS), stride=(SUMS, 1)))
        squares = storage.squares.get_tensor(cute.make_layout(WARPS))
        cute.arch.griddepcontrol_launch_dependents()
        self.prefetch(arrays)
        cute.arch.griddepcontrol_wait()
        if half == 0:
            self.read(arrays, shared, squares, token)
        elif const_expr(self.config.mixes):
            terms = self.terms(arrays)
            sums = self.sums(arrays, shared, token)
            if thread < 32:
                self.weigh(arrays, self.logit(arrays, sums, terms), token, thread)

    @cute.jit
    def prefetch(self, arrays: ReadArrays) -> None:
        """Bring the parameters to L2. This is safe while the kernel before this one still writes them, because its
        stores go through L2."""
        thread = cute.arch.thread_idx()[0]
        for line in cutlass.range(thread, Int32(arrays.norm.shape[0]) * 4 // LINE, THREADS, unroll=1):
            address = arrays.norm.iterator.toint() + line * LINE
            cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])
        for array in (arrays.base, arrays.scale):
            cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[array.iterator.toint()])

    @cute.jit
    def terms(self, arrays: ReadArrays):
        """The base and the scale of this lane's row of fn; of the last row past it."""
        index = cutlass.min(cute.arch.lane_idx(), self.rows - 1)
        return arrays.base[index], arrays.scale[cutlass.min(index // self.config.count, 2)]

    @cute.jit
    def logit(self, arrays: ReadArrays, sums: Float32, terms: tuple[Float32, Float32]):
        """The logit of this lane's row of fn. sums: as `sums` returns it; terms: as `terms` does."""
        base, scale = terms
        return sums * self.factor(arrays, sums) * scale + base

    @cute.jit
    def sums(self, arrays: ReadArrays, shared: cute.Tensor, token: Int32):
        """The sum that this lane's index has, over all parts of the token: a lane's row of fn, or the squares."""
        thread = cute.arch.thread_idx()[0]
        quad = thread % QUADS
        total = cute.make_rmem_tensor((QUAD,), Float32)
        total.fill(0.0)
        tokens = Int32(arrays.sums.shape[1])
        for part in cutlass.range(thread // QUADS, arrays.sums.shape[0], THREADS // QUADS, unroll=4):
            address = arrays.sums.iterator.toint() + Int64(part * tokens + token) * (4 * SUMS) + quad * (4 * QUAD)
            found = load(Float32, address, QUAD)
            for i in cutlass.range_constexpr(QUAD):
                total[i] = total[i] + found[i]
        for i in cutlass.range_constexpr(QUAD):
            for step in cutlass.range_constexpr(3, 5):
                total[i] = total[i] + cute.arch.shuffle_sync_bfly(total[i], offset=1 << step)
            if thread % 32 < QUADS:
                shared[thread // 32, quad * QUAD + i] = total[i]
        cute.arch.sync_threads()
        found = Float32(0.0)
        for warp in cutlass.range_constexpr(WARPS):
            found = found + shared[warp, thread % 32]
        return found

    @cute.jit
    def factor(self, arrays: ReadArrays, sums: Float32):
        """The inverse root of the mean of all streams' squares. sums: as `sums` returns it."""
        square = cute.arch.shuffle_sync(sums, self.rows)
        return cute.math.rsqrt(square / Float32(arrays.streams.shape[1]) + Float32(self.config.norm_eps))

    @cute.jit
    def read(self, arrays: ReadArrays, shared: cute.Tensor, squares: cute.Tensor, token: Int32) -> None:
        """Make the block's input: the mix of the streams, normed."""
        config, thread = self.config, cute.arch.thread_idx()[0]
        columns = Int32(arrays.read.shape[1])
        chunks, row = columns // VECTOR, row_of(arrays.streams, token)
        loaded = cute.make_rmem_tensor((config.loads, config.count, VECTOR), BFloat16)
        loaded.fill(BFloat16(0.0))
        for i in cutlass.range_constexpr(config.loads):
            chunk = thread + i * THREADS
            if chunk < chunks:
                for stream in cutlass.range_constexpr(config.count):
                    values = load(BFloat16, row + (stream * columns + chunk * VECTOR) * 2, VECTOR)
                    for j in cutlass.range_constexpr(VECTOR):
                        loaded[i, stream, j] = values[j]
        weights = cute.make_rmem_tensor((config.loads, VECTOR), Float32)
        weights.fill(0.0)
        for i in cutlass.range_constexpr(config.loads):
            chunk = thread + i * THREADS
            if chunk < chunks:
                values = load(Float32, arrays.norm.iterator.toint() + chunk * (4 * VECTOR), VECTOR)
                for j in cutlass.range_constexpr(VECTOR):
                    weights[i, j] = values[j]
        terms = self.terms(arrays)
        logit = self.logit(arrays, self.sums(arrays, shared, token), terms)
        x = cute.make_rmem_tensor((config.loads, VECTOR), Float32)
        x.fill(0.0)
        for stream in cutlass.range_constexpr(config.count):
            share = sigmoid(cute.arch.shuffle_sync(logit, stream)) + Float32(config.eps)
            for i in cutlass.range_constexpr(config.loads):
                for j in cutlass.range_constexpr(VECTOR):
                    x[i, j] = x[i, j] + share * loaded[i, stream, j].to(Float32)
        square = Float32(0.0)
        for i in cutlass.range_constexpr(config.loads):
            for j in cutlass.range_constexpr(VECTOR):
                x[i, j] = rounded(x[i, j])
                square = square + x[i, j] * x[i, j]
        square = block_sum(square, squares)
        norm = cute.math.rsqrt(square / Float32(columns) + Float32(config.input_eps))
        for i in cutlass.range_constexpr(config.loads):
            chunk = thread + i * THREADS
            if chunk < chunks:
                values = cute.make_rmem_tensor((VECTOR,), Float32)
                for j in cutlass.range_constexpr(VECTOR):
                    values[j] = x[i, j] * norm * weights[i, j]
                store(BFloat16, row_of(arrays.read, token) + chunk * (2 * VECTOR), values)

    @cute.jit
    def weigh(self, arrays: ReadArrays, logit: Float32, token: Int32, lane: Int32) -> None:
        """Make the weights of the writing and the mixing, by a warp, each of whose lanes has all of them. logit: as
        `logit` returns it."""
        config, count = self.config, self.config.count
        mix = cute.make_rmem_tensor((count, count), Float32)
        for row in cutlass.range_constexpr(count):
            most = Float32(-float("inf"))
            for column in cutlass.range_constexpr(count):
                mix[row, column] = cute.arch.shuffle_sync(logit, (2 + row) * count + column)
                most = cute.arch.fmax(most, mix[row, column])
            total = Float32(0.0)
            for column in cutlass.range_constexpr(count):
                mix[row, column] = power(mix[row, column] - most)
                total = total + mix[row, column]
            for column in cutlass.range_constexpr(count):
                mix[row, column] = mix[row, column] / total + Float32(config.eps)
        self.divide(mix, rows=False)
        for _ in cutlass.range(config.rounds - 1, unroll=1):
            self.divide(mix, rows=True)
            self.divide(mix, rows=False)
        for stream in cutlass.range_constexpr(count):
            own = cute.arch.shuffle_sync(logit, count + stream)
            if lane == stream:
                arrays.write[token, stream] = sigmoid(own) * 2.0
        for row in cutlass.range_constexpr(count):
            for column in cutlass.range_constexpr(count):
                if lane == row * count + column:
                    arrays.mix[token, row * count + column] = mix[row, column]

    def divide(self, mix: cute.Tensor, *, rows: bool) -> None:
        """Divide each row, or each column, by its sum."""
        count = self.config.count
        for i in range(count):
            places = [(i, j) if rows else (j, i) for j in range(count)]
            total = Float32(self.config.eps)
            for place in places:
                total = total + mix[place]
            inverse = cute.arch.rcp_approx(total)
            for place in places:
                mix[place] = mix[place] * inverse


def rounded(value: Float32) -> Float32:
    """The value rounded to bf16."""
    return value.to(BFloat16).to(Float32)
