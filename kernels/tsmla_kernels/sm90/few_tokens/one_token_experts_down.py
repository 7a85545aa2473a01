"""few_token_experts_down of one token: the second products of its experts, whose weights come through a ring, and their
weighted sum with the residual, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.few_tokens.config import HALVES, MOST_TOKENS, TOKEN_TILE, UNIT, WARPS, ExpertsConfig
from tsmla_kernels.sm90.few_tokens.experts_down import Arrays
from tsmla_kernels.sm90.few_tokens.ring import (
    COMPUTE_THREADS,
    NO_SCALES,
    PAIRS,
    ROWS,
    VECTOR,
    Ring,
    Scales,
    Shared,
    TileScales,
    Weights,
    launch,
)
from tsmla_kernels.sm90.few_tokens.tile import Lane, lane, matrix_of
from tsmla_kernels.sm90.storage import storage_of_fields
from tsmla_kernels.sm90.warp import divide


class Tables(NamedTuple):
    """The token's experts, i32, and their weights, f32, in shared memory. An expert that does not exist is -1."""

    experts: cute.Tensor
    weights: cute.Tensor


class OneTokenExpertsDown:
    """few_token_experts_down of one token: `config` is static, all other sizes are dynamic. A tile has sixteen columns
    of the result, with HALVES eight, and goes through all experts."""

    def __init__(self, config: ExpertsConfig) -> None:
        self.config = config
        self.halves = config.form == HALVES
        self.ring = Ring(config.form, config.loads, narrow=config.narrow)
        self.tile_rows = TOKEN_TILE if self.halves else ROWS

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *operands: cute.Tensor):
        names = ["x", "weight", *["scales"] * self.config.narrow, "experts", "weights"]
        names += [*["residual"] * self.config.residual, "out"]
        arrays = Arrays(**dict(zip(names, operands, strict=True)))

        fields = self.ring.fields | {
            "experts": cute.struct.MemRange[Int32, MOST_TOKENS],
            "weights": cute.struct.MemRange[Float32, MOST_TOKENS],
        }
        self.storage = storage_of_fields(fields, self.config)
        launch(self.multiply(arrays), stream, cute.ceil_div(arrays.out.shape[1], self.tile_rows))

    @cute.kernel
    def multiply(self, arrays: Arrays):
        """Compute the columns of a CTA's tiles."""
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        storage = utils.SmemAllocator().allocate(self.storage)
        shared = self.ring.shared(storage)
        table = cute.make_layout(MOST_TOKENS)
        tables = Tables(storage.experts.get_tensor(table), storage.weights.get_tensor(table))
        tiles = cute.ceil_div(Int32(arrays.out.shape[1]), self.tile_rows)
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        cute.arch.griddepcontrol_launch_dependents()
        self.ring.open(shared)
        cute.arch.griddepcontrol_wait()
        pairs, width = self.ring.held(), Int32(arrays.weight.shape[2])
        if warp < WARPS:  # on their way while the experts are read
            self.ring.load_terms(arrays.x.iterator.toint(), self.config.choices * width, pairs)
        if thread < self.config.choices:
            tables.experts[thread] = self.expert(arrays, thread)
            tables.weights[thread] = arrays.weights[0, thread]
        cute.arch.sync_threads()
        count = Int32(0)
        if warp >= WARPS:
            for tile in cutlass.range(first, tiles, step, unroll=1):
                for place in cutlass.range(self.config.choices, unroll=1):
                    expert = tables.experts[place]
                    if expert >= 0:
                        rows, scales = self.rows(arrays, expert, tile), self.scales(arrays, expert, tile)
                        count = self.ring.fill(shared, rows, scales, count, warp)
        else:
            self.clear(pairs, width, tables)
            factor = self.ring.put_terms(shared, pairs, self.config.choices * width, Int64(0), None)
            here, held, turn = lane(), self.ring.held_scales(), Int32(0)
            for tile in cutlass.range(first, tiles, step, unroll=1):
                totals = cute.make_rmem_tensor((4,), Float32)
                totals.fill(0.0)
                for place in cutlass.range(self.config.choices, unroll=1):
                    expert = tables.experts[place]
                    if expert >= 0:
                        rows, scales = self.rows(arrays, expert, tile), self.scales(arrays, expert, tile)
                        terms = shared.terms + place * width * 2
                        weight = tables.weights[place]
                        following = None
                        if const_expr(self.config.narrow):
                            following = self.following(arrays, tables, place, cutlass.min(tile + step, tiles - 1), tile)
                        given = TileScales(scales, following, held)
                        count = self.ring.multiply(shared, here, rows, given, terms, count, weight, totals)
                self.store(arrays, shared, here, totals, tile, turn, factor)
                turn += 1

    @cute.jit
    def expert(self, arrays: Arrays, place: Int32):
        """The expert of a choice; -1 if it does not exist. A stack of e4m3 matrices may have unused ones at its end, so
        its scales are counted."""
        expert = arrays.experts[0, place]
        count = Int32((arrays.scales if const_expr(self.config.narrow) else arrays.weight).shape[0])
        if expert >= count:
            expert = Int32(-1)
        return expert

    def rows(self, arrays: Arrays, expert: Int32, tile: Int32) -> Weights:
        """A tile's weights of an expert."""
        pitch = Int32(arrays.weight.shape[2]) * (arrays.weight.element_type.width // 8)
        matrix, begin = matrix_of(arrays.weight, expert), tile * self.tile_rows
        first = matrix + Int64(begin) * Int64(pitch)
        if const_expr(self.halves):
            return Weights(first, first + pitch // 2, Int64(pitch), pitch // 2)
        # If the last tile has eight rows, these come twice; sums of rows past the last are not stored.
        second = cutlass.min(begin + TOKEN_TILE, Int32(arrays.out.shape[1]) - TOKEN_TILE)
        return Weights(first, matrix + Int64(second) * Int64(pitch), Int64(pitch), pitch)

    def scales(self, arrays: Arrays, expert: Int32, tile: Int32) -> Scales:
        """Where a tile's scales of an expert begin."""
        if const_expr(not self.config.narrow):
            return Scales(Int64(0), Int64(0))
        blocks = Int32(arrays.scales.shape[2])
        first = matrix_of(arrays.scales, expert) + Int64(tile * self.tile_rows // UNIT) * Int64(blocks) * 4
        return Scales(first, first + blocks // 2 * 4 if const_expr(self.halves) else first)

    @cute.jit
    def following(self, arrays: Arrays, tables: Tables, place: Int32, later: Int32, tile: Int32):
        """The scales behind those of a tile and the choice `place`: the next choice's, or the first one's of the tile
        `later`; none if that expert does not exist."""
        behind = place + 1
        if behind == self.config.choices:
            behind, tile = Int32(0), later
        expert = tables.experts[behind]
        first, second = Int64(NO_SCALES), Int64(NO_SCALES)
        if expert >= 0:
            scales = self.scales(arrays, expert, tile)
            first, second = scales.first, scales.second
        return Scales(first, second)

    @cute.jit
    def clear(self, pairs: cute.Tensor, width: Int32, tables: Tables) -> None:
        """Replace a thread's terms of experts that do not exist, which may hold any values, by 0."""
        for i in cutlass.range_constexpr(self.config.loads):
            place = divide((cute.arch.thread_idx()[0] + i * COMPUTE_THREADS) * VECTOR, width)
            if tables.experts[cutlass.min(place, self.config.choices - 1)] < 0:
                for j in cutlass.range_constexpr(PAIRS):
                    pairs[i * PAIRS + j] = Int32(0)

    @cute.jit
    def store(
        self,
        arrays: Arrays,
        shared: Shared,
        here: Lane,
        totals: cute.Tensor,
        tile: Int32,
        turn: Int32,
        factor: Float32,
    ) -> None:
        """Store a tile's columns."""
        result = self.ring.total(shared, here, totals, turn) * factor
        index = cute.arch.lane_idx()
        column = tile * self.tile_rows + index
        if here.warp == turn % WARPS:
            if (index < self.tile_rows) & (column < arrays.out.shape[1]):
                if const_expr(self.config.residual):
                    result = result + arrays.residual[0, column].to(Float32)
                arrays.out[0, column] = result.to(BFloat16)
