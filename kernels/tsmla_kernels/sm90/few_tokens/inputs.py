"""few_token_inputs: the products of one token that V4's attention begins with, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.few_tokens.config import HALVES, TOKEN_TILE, WARPS
from tsmla_kernels.sm90.few_tokens.latent_config import InputsConfig
from tsmla_kernels.sm90.few_tokens.ring import PREFETCHED, Ring, Scales, Shared, TileScales, Weights, launch
from tsmla_kernels.sm90.few_tokens.tile import Lane, lane
from tsmla_kernels.sm90.storage import storage_of_fields


class Arrays(NamedTuple):
    """The arrays of a launch.

    Attributes:
      x: [1, K] bf16. weights: bf16 [N, K] each; the first one makes out and tail, each other one its own of pooled.
      out: [1, N or fewer] bf16. tail: the columns behind those of out, bf16. pooled: [1, N] f32 each.
    """

    x: cute.Tensor
    weights: tuple[cute.Tensor, ...]
    out: cute.Tensor
    tail: cute.Tensor | None
    pooled: tuple[cute.Tensor, ...]


class Tile(NamedTuple):
    """A tile: which weight it is of, its first row, and its weights."""

    weight: Int32
    begin: Int32
    rows: Weights


class FewTokenInputs:
    """few_token_inputs: `config` is static, all other sizes are dynamic. Weights come through a ring; a tile has eight
    rows of one of them, whose halves are multiplied at once."""

    def __init__(self, config: InputsConfig) -> None:
        self.config = config
        self.ring = Ring(HALVES, config.loads, narrow=False)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        arrays = self.arrays(operands)
        self.storage = storage_of_fields(self.ring.fields, self.config)
        launch(self.multiply(arrays), stream, self.tiles(arrays))

    def arrays(self, operands: tuple[cute.Tensor, ...]) -> Arrays:
        """The arrays of a launch, from its operands."""
        count, has_tail = 2 + self.config.pooled, int(self.config.tail)
        (x, *weights), (out, *results) = operands[:count], operands[count:]
        return Arrays(x, tuple(weights), out, results[0] if has_tail else None, tuple(results[has_tail:]))

    def tiles(self, arrays: Arrays) -> Int32:
        """The tiles of all weights."""
        found = Int32(0)
        for weight in arrays.weights:
            found += Int32(weight.shape[0]) // TOKEN_TILE
        return found

    @cute.kernel
    def multiply(self, arrays: Arrays):
        """Compute the columns of a CTA's tiles."""
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32)
        shared = self.ring.shared(utils.SmemAllocator().allocate(self.storage))
        tiles = self.tiles(arrays)
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        cute.arch.griddepcontrol_launch_dependents()
        if warp < WARPS:
            ahead = cutlass.max(PREFETCHED // Int32(arrays.x.shape[1]), 1)  # a row's half has so many bytes
            for index in cutlass.range(first, cutlass.min(tiles, first + step * ahead), step, unroll=1):
                self.ring.prefetch(self.tile(arrays, index).rows)
        self.ring.open(shared)
        cute.arch.griddepcontrol_wait()
        count, none = Int32(0), Scales(Int64(0), Int64(0))
        if warp >= WARPS:
            for index in cutlass.range(first, tiles, step, unroll=1):
                count = self.ring.fill(shared, self.tile(arrays, index).rows, none, count, warp)
        else:
            terms, turn = Int32(arrays.x.shape[1]), Int32(0)
            factor = self.ring.put_row(shared, arrays.x.iterator.toint(), Int64(0), terms, None)
            place, unscaled = lane(), TileScales(none, None, None)
            for index in cutlass.range(first, tiles, step, unroll=1):
                totals = cute.make_rmem_tensor((4,), Float32)
                totals.fill(0.0)
                tile = self.tile(arrays, index)
                count = self.ring.multiply(shared, place, tile.rows, unscaled, shared.terms, count, factor, totals)
                self.store(arrays, shared, place, totals, tile, turn)
                turn += 1

    @cute.jit
    def tile(self, arrays: Arrays, index: Int32) -> Tile:
        """The tile with this index among those of all weights."""
        weight, first = Int32(0), arrays.weights[0].iterator.toint()
        before, behind = Int32(0), Int32(arrays.weights[0].shape[0]) // TOKEN_TILE
        for i in cutlass.range_constexpr(1, 1 + self.config.pooled):
            if index >= behind:
                weight, first, before = Int32(i), arrays.weights[i].iterator.toint(), behind
            behind += Int32(arrays.weights[i].shape[0]) // TOKEN_TILE
        begin, pitch = (index - before) * TOKEN_TILE, Int32(arrays.x.shape[1]) * 2
        first += Int64(begin) * Int64(pitch)
        return Tile(weight, begin, Weights(first, first + pitch // 2, Int64(pitch), pitch // 2))

    @cute.jit
    def store(self, arrays: Arrays, shared: Shared, place: Lane, totals: cute.Tensor, tile: Tile, turn: Int32) -> None:
        """Store a tile's columns."""
        result = self.ring.total(shared, place, totals, turn)
        index = cute.arch.lane_idx()
        column = tile.begin + index
        if (place.warp == turn % WARPS) & (index < TOKEN_TILE):
            if tile.weight == 0:
                width = Int32(arrays.out.shape[1])
                if column < width:
                    arrays.out[0, column] = result.to(BFloat16)
                if const_expr(arrays.tail is not None):
                    if column >= width:
                        arrays.tail[0, column - width] = result.to(BFloat16)
            for i in cutlass.range_constexpr(self.config.pooled):
                if tile.weight == i + 1:
                    arrays.pooled[i][0, column] = result
