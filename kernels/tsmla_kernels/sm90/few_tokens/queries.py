"""few_token_queries: absorbed queries and the cache's rows of up to 16 tokens, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from tsmla_kernels.cache_ops.kernels import is_written, load, slot_address, store, values_at, widened
from tsmla_kernels.contract.layouts import V32_PACKED
from tsmla_kernels.sm90.constants import FP8
from tsmla_kernels.sm90.few_tokens.config import TILE_ROWS, TOKEN_TILE, UNIT, WARPS, QueriesConfig
from tsmla_kernels.sm90.few_tokens.tile import (
    LOAD_BYTES,
    THREADS,
    Operands,
    Rows,
    TileProduct,
    block_sum,
    lane,
    matrix_of,
    row_of,
    start,
)
from tsmla_kernels.sm90.warp import DTYPES
from tsmla_kernels.sparse_cache.kernels import ROPE_AT, SCALES_AT
from tsmla_kernels.sparse_cache.values import greatest_bits, power_of_two, scale_exponent

CTA_ROWS = TILE_ROWS * WARPS
VECTOR = 4
"""Latent columns of a thread."""


class Arrays(NamedTuple):
    """The arrays of a launch, for T tokens and H heads.

    Attributes:
      q: [T, H (N + R)] bf16, the heads' queries, or wider rows that begin with them. joint: [T, A + L + R] bf16, whose
        rows end with the latent and k_rope. w_uk: [H, L, N] bf16. norm_weight: [L] bf16.
      cos, sin: [T, R / 2] f32. slot_mapping: [T] i32. q_scale, kv_scale: [1] f32.
      absorbed: [T, H, L + R] in config.q_dtype. new_kv_cache: [P, Z, L + R], or [P, Z, 656] u8 of packed rows, the same
        memory as kv_cache, which is not read.
    """

    q: cute.Tensor
    joint: cute.Tensor
    w_uk: cute.Tensor
    norm_weight: cute.Tensor
    cos: cute.Tensor
    sin: cute.Tensor
    slot_mapping: cute.Tensor
    q_scale: cute.Tensor
    kv_scale: cute.Tensor
    kv_cache: cute.Tensor
    absorbed: cute.Tensor
    new_kv_cache: cute.Tensor


class FewTokenQueries:
    """few_token_queries: `config` is static, all sizes but N, L and R are dynamic. Each of the first CTAs has CTA_ROWS
    latent columns of a head, and each of its warps TILE_ROWS of them; the first CTA of a head also rotates the head's
    rope columns. One more CTA for each token normalises the latent, rotates k_rope, and writes both into the cache."""

    def __init__(self, config: QueriesConfig) -> None:
        self.config = config
        self.parts = config.latent_dim // CTA_ROWS
        self.units = config.nope_dim // UNIT
        self.half = config.rope_dim // 2
        self.product = TileProduct(narrow=False, token_tiles=config.token_tiles, normed=False)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        arrays = Arrays(*operands)

        @cute.struct
        class Storage:
            squares: cute.struct.MemRange[Float32, WARPS]

        self.storage = Storage
        start(self.absorb_and_write(arrays), stream, arrays.w_uk.shape[0] * self.parts + arrays.slot_mapping.shape[0])

    @cute.kernel
    def absorb_and_write(self, arrays: Arrays):
        """Compute a CTA's columns of a head's queries, or write a token's row."""
        index, heads = cute.arch.block_idx()[0], Int32(arrays.w_uk.shape[0])
        storage = utils.SmemAllocator().allocate(self.storage)
        squares = storage.squares.get_tensor(cute.make_layout(WARPS))
        cute.arch.griddepcontrol_launch_dependents()
        if index < heads * self.parts:
            self.absorb(arrays, index // self.parts, index % self.parts)
        else:
            cute.arch.griddepcontrol_wait()
            self.write_row(arrays, squares, index - heads * self.parts)

    @cute.jit
    def absorb(self, arrays: Arrays, head: Int32, part: Int32) -> None:
        """Compute the CTA's latent columns of a head's queries, and its rope columns if `part` is 0."""
        config, place = self.config, lane()
        pitch = 2 * config.nope_dim
        begin = part * CTA_ROWS + place.warp * TILE_ROWS
        top = matrix_of(arrays.w_uk, head) + Int64(begin) * pitch
        rows = Rows(top, top + TOKEN_TILE * pitch, Int64(pitch))
        self.product.prefetch(rows, Int32(0), Int32(self.units))
        count = Int32(arrays.slot_mapping.shape[0])
        column = head * (config.nope_dim + config.rope_dim)
        offset = Int64(place.row) * pitch + place.quad * LOAD_BYTES
        operands = Operands(
            first=rows.first + offset,
            second=rows.second + offset,
            tokens=[
                row_of(arrays.q, cutlass.min(place.row + i * TOKEN_TILE, count - 1))
                + (column * 2 + place.quad * LOAD_BYTES)
                for i in range(config.token_tiles)
            ],
            norm=Int64(0),
            first_scales=Int64(0),
            second_scales=Int64(0),
        )
        sums = self.product.sums()
        cute.arch.griddepcontrol_wait()
        for unit in cutlass.range_constexpr(self.units):
            self.product.add(operands, Int32(unit), Int32(unit + 1), sums)
        inverse = Float32(1.0) / arrays.q_scale[0]
        for i in cutlass.range_constexpr(4 * config.token_tiles):
            token = i // 4 * TOKEN_TILE + place.quad * 2 + i % 2
            if token < count:
                target = begin + place.row + i % 4 // 2 * TOKEN_TILE
                self.put(self.query_address(arrays, token, head, target), sums.products[i], inverse, config.q_dtype)
        if part == 0:
            for index in cutlass.range(cute.arch.thread_idx()[0], count * self.half, THREADS, unroll=1):
                token, pair = index // self.half, index % self.half
                source = row_of(arrays.q, token) + (column + config.nope_dim) * 2
                for value, target in zip(self.rotated(arrays, source, token, pair), self.targets(pair), strict=True):
                    address = self.query_address(arrays, token, head, target + config.latent_dim)
                    self.put(address, value, inverse, config.q_dtype)

    def query_address(self, arrays: Arrays, token: Int32, head: Int32, column: Int32) -> Int64:
        """The address of a column of a token's absorbed query."""
        row = token * Int32(arrays.absorbed.shape[1]) + head
        size = DTYPES[self.config.q_dtype].width // 8
        width = self.config.latent_dim + self.config.rope_dim
        return arrays.absorbed.iterator.toint() + (Int64(row) * width + column) * size

    def rotated(self, arrays: Arrays, source: Int64, token: Int32, pair: Int32) -> tuple[Float32, Float32]:
        """A pair of rope columns, rotated. source: the address of the first rope column."""
        members = (2 * pair, 2 * pair + 1) if self.config.rope_interleave else (pair, pair + self.half)
        x, y = (load(BFloat16, source + member * 2, 1)[0].to(Float32) for member in members)
        cos, sin = arrays.cos[token, pair], arrays.sin[token, pair]
        return x * cos - y * sin, y * cos + x * sin

    def targets(self, pair: Int32) -> tuple[Int32, Int32]:
        """The rope columns at which a rotated pair is stored."""
        if self.config.rope_layout == "interleaved":
            return 2 * pair, 2 * pair + 1
        return pair, pair + self.half

    def put(self, address: Int64, value: Float32, inverse: Float32, dtype: str) -> None:
        """Round a value to bf16, as a separate kernel would, multiply it by `inverse`, and store it in `dtype`."""
        scaled = value.to(BFloat16).to(Float32) * inverse
        if dtype == FP8:
            cute.arch.inline_ptx(
                "{ .reg .b16 h; .reg .b32 w; cvt.rn.satfinite.e4m3x2.f32 h, {$r1}, {$r1}; cvt.u32.u16 w, h;"
                " st.global.b8 [{$r0}], w; }",
                read_only_args=[address, scaled],
            )
        else:
            cute.make_tensor(
                cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=2), cute.make_layout(1)
            )[0] = scaled.to(BFloat16)

    @cute.jit
    def write_row(self, arrays: Arrays, squares: cute.Tensor, token: Int32) -> None:
        """Write a token's latent and k_rope into its slot."""
        config, thread = self.config, cute.arch.thread_idx()[0]
        width = config.latent_dim + config.rope_dim
        source = row_of(arrays.joint, token) + (Int32(arrays.joint.shape[1]) - width) * 2
        column = cutlass.min(thread * VECTOR, config.latent_dim - VECTOR)
        values = widened(load(BFloat16, source + column * 2, VECTOR), Float32(1.0))
        total = Float32(0.0)
        if thread * VECTOR < config.latent_dim:
            for i in cutlass.range_constexpr(VECTOR):
                total = total + values[i] * values[i]
        total = block_sum(total, squares)
        factor = cute.math.rsqrt(total / Float32(config.latent_dim) + Float32(config.eps))
        if thread * VECTOR < config.latent_dim:
            weight = load(BFloat16, arrays.norm_weight.iterator.toint() + column * 2, VECTOR)
            for i in cutlass.range_constexpr(VECTOR):
                normed = (values[i] * factor).to(BFloat16).to(Float32) * weight[i].to(Float32)
                values[i] = normed.to(BFloat16).to(Float32)
        slot = arrays.slot_mapping[token]
        if is_written(cutlass.Boolean(True), arrays.new_kv_cache, slot):
            row = slot_address(arrays.new_kv_cache, slot, 0)
            if const_expr(config.packed):
                self.store_packed(row, values)
            else:
                self.store_latent(arrays, row, values)
            if thread < self.half:
                rope = source + config.latent_dim * 2
                inverse, dtype, offset = Float32(1.0), "bfloat16", ROPE_AT
                if const_expr(not config.packed):
                    inverse, dtype = Float32(1.0) / arrays.kv_scale[0], config.kv_dtype
                    offset = config.latent_dim * (DTYPES[dtype].width // 8)
                for value, target in zip(self.rotated(arrays, rope, token, thread), self.targets(thread), strict=True):
                    self.put(row + offset + target * (DTYPES[dtype].width // 8), value, inverse, dtype)

    @cute.jit
    def store_latent(self, arrays: Arrays, row: Int64, values: cute.Tensor) -> None:
        """Store this thread's normed latent columns into a row of the cache."""
        config, thread = self.config, cute.arch.thread_idx()[0]
        inverse = Float32(1.0) / arrays.kv_scale[0]
        if thread * VECTOR < config.latent_dim:
            for i in cutlass.range_constexpr(VECTOR):
                values[i] = values[i] * inverse
            dtype = DTYPES[config.kv_dtype]
            store(dtype, row + thread * VECTOR * (dtype.width // 8), values)

    @cute.jit
    def store_packed(self, row: Int64, values: cute.Tensor) -> None:
        """Store this thread's normed latent columns into a packed row: a warp has the columns of one scale."""
        thread = cute.arch.thread_idx()[0]
        bits = greatest_bits(values, VECTOR)
        for step in cutlass.range_constexpr(5):
            bits = cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, offset=1 << step))
        exponent = scale_exponent(bits, V32_PACKED.floor)
        if thread * VECTOR < V32_PACKED.latent_dim:
            for i in cutlass.range_constexpr(VECTOR):
                values[i] = values[i] * power_of_two(-exponent)
            store(DTYPES[FP8], row + thread * VECTOR, values)
            if thread % 32 == 0:
                values_at(Float32, row + SCALES_AT + thread // 32 * 4, 1)[0] = power_of_two(exponent)
