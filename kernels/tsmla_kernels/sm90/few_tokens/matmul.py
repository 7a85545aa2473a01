"""few_token_matmul: the RMS norm of up to 16 tokens, a product with a weight, and the residual's sum, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.few_tokens.config import TILE_ROWS, TOKEN_TILE, UNIT, MatmulConfig
from tsmla_kernels.sm90.few_tokens.tile import (
    LOAD_BYTES,
    Exchange,
    Operands,
    Rows,
    Shared,
    TileProduct,
    lane,
    row_of,
    silu_product,
    start,
)
from tsmla_kernels.sm90.storage import storage_of_fields


class Arrays(NamedTuple):
    """The arrays of a launch.

    Attributes:
      x: [T, K] bf16, or wider rows that begin with these columns. weight: [N, K]. out: [T, N] or, if gated, [T, N / 2],
      bf16.
      scales: [N / 128 rounded up, K / 128] f32, if weights are block-scaled. norm: [K] bf16, if there is a norm.
      residual: the shape and dtype of out, if config.residual.
    """

    x: cute.Tensor
    weight: cute.Tensor
    out: cute.Tensor
    scales: cute.Tensor | None = None
    norm: cute.Tensor | None = None
    residual: cute.Tensor | None = None


class FewTokenMatmul:
    """few_token_matmul: `config` is static, all sizes are dynamic. A CTA has TILE_ROWS weight rows; if gated, eight
    from the weight's first half and the corresponding eight from its second half."""

    def __init__(self, config: MatmulConfig) -> None:
        self.config = config
        self.normed = config.eps is not None
        self.product = TileProduct(narrow=config.narrow, token_tiles=config.token_tiles, normed=self.normed)
        self.exchange = Exchange(config.token_tiles, self.normed)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        config = self.config
        names = ["x", "weight", *["scales"] * config.narrow, *["norm"] * self.normed, *["residual"] * config.residual]
        arrays = Arrays(**dict(zip([*names, "out"], operands, strict=True)))

        self.storage = storage_of_fields(self.exchange.fields, self.config)
        start(self.multiply(arrays), stream, cute.ceil_div(arrays.weight.shape[0], TILE_ROWS))

    @cute.kernel
    def multiply(self, arrays: Arrays):
        """Compute a CTA's columns of the result for all tokens."""
        config = self.config
        tile = cute.arch.block_idx()[0]
        place = lane()
        storage = utils.SmemAllocator().allocate(self.storage)
        shared = self.exchange.shared(storage)
        rows, terms = Int32(arrays.weight.shape[0]), Int32(arrays.weight.shape[1])
        half = rows // 2 if const_expr(config.gated) else Int32(TOKEN_TILE)
        begin = tile * (TOKEN_TILE if const_expr(config.gated) else TILE_ROWS)
        weight, pitch = arrays.weight.iterator.toint(), Int64(terms) * (arrays.weight.element_type.width // 8)
        units = terms // UNIT
        cute.arch.griddepcontrol_launch_dependents()
        if begin + half + TOKEN_TILE <= rows:
            top = weight + Int64(begin) * pitch
            self.product.prefetch(Rows(top, top + Int64(half) * pitch, pitch), place.warp, units)
        first = cutlass.min(begin + place.row, rows - 1)
        second = cutlass.min(first + half, rows - 1)
        tokens = Int32(arrays.out.shape[0])
        quad = place.quad
        operands = Operands(
            first=weight + Int64(first) * pitch + quad * LOAD_BYTES,
            second=weight + Int64(second) * pitch + quad * LOAD_BYTES,
            tokens=[
                row_of(arrays.x, cutlass.min(place.row + i * TOKEN_TILE, tokens - 1)) + quad * self.product.quad_bytes
                for i in range(config.token_tiles)
            ],
            norm=arrays.norm.iterator.toint() + quad * self.product.quad_bytes if const_expr(self.normed) else Int64(0),
            first_scales=row_of(arrays.scales, first // UNIT) if const_expr(config.narrow) else Int64(0),
            second_scales=row_of(arrays.scales, second // UNIT) if const_expr(config.narrow) else Int64(0),
        )
        sums = self.product.sums()
        cute.arch.griddepcontrol_wait()
        self.product.add(operands, place.warp, units, sums)
        self.exchange.publish(shared, sums, place)
        self.store(arrays, shared, begin, terms)

    @cute.jit
    def store(self, arrays: Arrays, shared: Shared, begin: Int32, terms: Int32) -> None:
        """Store the CTA's columns: each thread one column of one token."""
        config = self.config
        thread = cute.arch.thread_idx()[0]
        value, lane_index = thread // 32, thread % 32
        values = (2 if const_expr(config.gated) else 4) * config.token_tiles
        tokens, columns = Int32(arrays.out.shape[0]), Int32(arrays.out.shape[1])
        if value < values:
            per_tile = values // config.token_tiles
            token = value // per_tile * TOKEN_TILE + lane_index % 4 * 2 + value % 2
            column = begin + lane_index // 4 + value % per_tile // 2 * TOKEN_TILE
            if (token < tokens) & (column < columns):
                factor = Float32(1.0)
                if const_expr(self.normed):
                    factor = self.exchange.inverse_norm(shared, token, terms, config.eps)
                if const_expr(config.gated):
                    gate = value // 2 * 4 + value % 2
                    parts = [self.exchange.total(shared, gate + 2 * i, lane_index) * factor for i in range(2)]
                    result = silu_product(parts[0], parts[1], config.limit)
                else:
                    result = self.exchange.total(shared, value, lane_index) * factor
                if const_expr(config.residual):
                    result = result + arrays.residual[token, column].to(Float32)
                arrays.out[token, column] = result.to(BFloat16)
