"""few_token_matmul of one token, whose weights come through a ring, with the norm and the residual's sum."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.few_tokens.config import HALVES, TOKEN_TILE, UNIT, WARPS, MatmulConfig
from tsmla_kernels.sm90.few_tokens.matmul import Arrays
from tsmla_kernels.sm90.few_tokens.ring import PREFETCHED, ROWS, Ring, Scales, Shared, TileScales, Weights, launch
from tsmla_kernels.sm90.few_tokens.tile import Lane, lane, row_of, silu_product
from tsmla_kernels.sm90.storage import storage_of_fields


class OneTokenMatmul:
    """few_token_matmul of one token through a ring: `config` is static, all sizes are dynamic. A tile has sixteen
    weight rows; if gated, eight from the weight's first half and the corresponding eight from its second half; with
    HALVES eight."""

    def __init__(self, config: MatmulConfig) -> None:
        self.config = config
        self.normed, self.halves = config.eps is not None, config.form == HALVES
        self.ring = Ring(config.form, config.loads, narrow=config.narrow)
        self.tile_rows = TOKEN_TILE if self.halves or config.gated else ROWS

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        config = self.config
        names = ["x", "weight", *["scales"] * config.narrow, *["norm"] * self.normed, *["residual"] * config.residual]
        arrays = Arrays(**dict(zip([*names, "out"], operands, strict=True)))

        self.storage = storage_of_fields(self.ring.fields, config)
        launch(self.multiply(arrays), stream, cute.ceil_div(arrays.out.shape[1], self.tile_rows))

    @cute.kernel
    def multiply(self, arrays: Arrays):
        """Compute the columns of a CTA's tiles."""
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        shared = self.ring.shared(utils.SmemAllocator().allocate(self.storage))
        tiles = cute.ceil_div(Int32(arrays.out.shape[1]), self.tile_rows)
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        cute.arch.griddepcontrol_launch_dependents()
        if warp < WARPS:
            ahead = cutlass.max(PREFETCHED // self.rows(arrays, first).bytes, 1)
            for tile in cutlass.range(first, cutlass.min(tiles, first + step * ahead), step, unroll=1):
                self.ring.prefetch(self.rows(arrays, tile))
        self.ring.open(shared)
        cute.arch.griddepcontrol_wait()
        count = Int32(0)
        if warp >= WARPS:
            for tile in cutlass.range(first, tiles, step, unroll=1):
                rows, scales = self.rows(arrays, tile), self.scales(arrays, tile)
                count = self.ring.fill(shared, rows, scales, count, warp)
        else:
            factor, turn = self.put_terms(arrays, shared), Int32(0)
            place, held = lane(), self.ring.held_scales()
            for tile in cutlass.range(first, tiles, step, unroll=1):
                totals = cute.make_rmem_tensor((4,), Float32)
                totals.fill(0.0)
                rows, scales = self.rows(arrays, tile), self.scales(arrays, tile)
                following = self.scales(arrays, cutlass.min(tile + step, tiles - 1))
                given = TileScales(scales, following, held)
                count = self.ring.multiply(shared, place, rows, given, shared.terms, count, Float32(1.0), totals)
                self.store(arrays, shared, place, totals, tile, turn, factor)
                turn += 1

    def rows(self, arrays: Arrays, tile: Int32) -> Weights:
        """A tile's weights."""
        pitch = Int32(arrays.weight.shape[1]) * (arrays.weight.element_type.width // 8)
        begin = tile * self.tile_rows
        first = arrays.weight.iterator.toint() + Int64(begin) * Int64(pitch)
        if const_expr(self.halves):
            return Weights(first, first + pitch // 2, Int64(pitch), pitch // 2)
        if const_expr(self.config.gated):
            return Weights(first, first + Int64(arrays.out.shape[1]) * Int64(pitch), Int64(pitch), pitch)
        # If the last tile has eight rows, these come twice; sums of rows past the last are not stored.
        second = cutlass.min(begin + TOKEN_TILE, Int32(arrays.out.shape[1]) - TOKEN_TILE)
        return Weights(first, row_of(arrays.weight, second), Int64(pitch), pitch)

    def scales(self, arrays: Arrays, tile: Int32) -> Scales:
        """Where a tile's scales begin."""
        if const_expr(not self.config.narrow):
            return Scales(Int64(0), Int64(0))
        begin = tile * self.tile_rows
        first = row_of(arrays.scales, begin // UNIT)
        if const_expr(self.halves):
            return Scales(first, first + Int32(arrays.scales.shape[1]) // 2 * 4)
        if const_expr(self.config.gated):
            return Scales(first, row_of(arrays.scales, (begin + Int32(arrays.out.shape[1])) // UNIT))
        return Scales(first, first)

    @cute.jit
    def put_terms(self, arrays: Arrays, shared: Shared):
        """Bring the token's terms to shared memory. Returns the factor of the sums."""
        norm = arrays.norm.iterator.toint() if const_expr(self.normed) else Int64(0)
        terms = Int32(arrays.weight.shape[1])
        return self.ring.put_row(shared, arrays.x.iterator.toint(), norm, terms, self.config.eps)

    @cute.jit
    def store(
        self,
        arrays: Arrays,
        shared: Shared,
        place: Lane,
        totals: cute.Tensor,
        tile: Int32,
        turn: Int32,
        factor: Float32,
    ) -> None:
        """Store a tile's columns."""
        result = self.ring.total(shared, place, totals, turn) * factor
        index = cute.arch.lane_idx()
        column = tile * self.tile_rows + index
        if place.warp == turn % WARPS:
            if const_expr(self.config.gated):
                up = cute.arch.shuffle_sync_bfly(result, offset=TOKEN_TILE)
                result = silu_product(result, up, self.config.limit)
            if (index < self.tile_rows) & (column < arrays.out.shape[1]):
                if const_expr(self.config.residual):
                    result = result + arrays.residual[0, column].to(Float32)
                arrays.out[0, column] = result.to(BFloat16)
