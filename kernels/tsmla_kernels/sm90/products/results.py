"""Device functions that store a tile's sums. Results of 16 bits go through the warp's part of shared memory, so that a
lane writes 16 bytes of a row; results of 32 bits do not."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.products.config import BLOCK, GROUP_ROWS, ProductConfig
from tsmla_kernels.sm90.products.gated import Gate
from tsmla_kernels.sm90.products.memory import Arrays, Lane, Shared, Tile
from tsmla_kernels.sm90.products.staging import chunk_place, take
from tsmla_kernels.sm90.warp import DTYPES, store_matrices, store_transposed


class Rows(NamedTuple):
    """A warp's rows if tokens are first: the index of its first row among the tile's tokens, the address of the warp's
    part of shared memory, and the lane."""

    first: Int32
    staging: Int32
    lane: Int32


class Results:
    """Device functions that store a lane's sums, whose order `Sums` gives."""

    def __init__(self, config: ProductConfig) -> None:
        self.config = config
        self.out_dtype = DTYPES[config.out_dtype]
        self.parts = 1 + config.gated
        self.values = config.columns // (2 * self.parts)
        self.gate = Gate(config) if config.gated else None

    @cute.jit
    def store(self, arrays: Arrays, shared: Shared, sums: cute.Tensor, tile: Tile, place: Lane) -> None:
        """Store the tile's sums or, if gated, the results that are made of them."""
        config = self.config
        staging = shared.staging.toint() + (place.group * 4 + place.warp) * config.staging_bytes
        if const_expr(not config.gated):
            self.store_waves(arrays.out, sums, tile, staging, place)
        else:
            results = self.gate.results(sums)
            if const_expr(not config.quantized):
                self.store_waves(arrays.out, results, tile, staging, place)
            elif const_expr(config.tokens_first):
                self.gate.store_rows(arrays, results, tile, staging, place)
            else:
                self.gate.store_columns(arrays, shared, results, tile, staging, place)

    @cute.jit
    def store_waves(self, out: cute.Tensor, results: cute.Tensor, tile: Tile, staging: Int32, place: Lane) -> None:
        """Store results of 16 or 32 bits, wave by wave."""
        config = self.config
        group, warp, lane = place
        for wave in cutlass.range_constexpr(config.waves):
            if const_expr(config.tokens_first):
                column = tile.column * config.width + wave * (BLOCK // self.parts)
                token = group * GROUP_ROWS + warp * 16
                if const_expr(config.out_dtype == "float32"):
                    self.store_word_rows(out, results[None, wave], tile, column, token, lane)
                else:
                    self.store_half_rows(out, results[None, wave], tile, column, Rows(token, staging, lane))
            else:
                column = tile.column * config.width
                column += ((group * config.waves + wave) * GROUP_ROWS + warp * 16) // self.parts
                if const_expr(config.out_dtype == "float32"):
                    self.store_words(out, results[None, wave], tile, column, lane)
                elif const_expr(config.gated):
                    self.store_gated_halves(out, results[None, wave], tile, column, staging, lane)
                else:
                    self.store_halves(out, results[None, wave], tile, column, staging, lane)

    @cute.jit
    def store_words(self, out: cute.Tensor, sums: cute.Tensor, tile: Tile, column: Int32, lane: Int32) -> None:
        """Store 32-bit results if weights are first. Eight lanes have neighbouring columns of a token."""
        columns, two = Int32(out.shape[1]), 2 // self.parts  # how many columns a lane has
        for i in cutlass.range_constexpr(self.values):
            token, mine = 8 * (i // (2 * two)) + (lane % 4) * 2 + i % 2, column + lane // 4 + 8 * (i // 2 % two)
            if token < tile.rows and mine < columns:
                address = out.iterator.toint() + (Int64(tile.row + token) * Int64(columns) + Int64(mine)) * 4
                pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
                cute.make_tensor(pointer, cute.make_layout(1))[0] = sums[i]

    @cute.jit
    def store_halves(
        self, out: cute.Tensor, sums: cute.Tensor, tile: Tile, column: Int32, staging: Int32, lane: Int32
    ) -> None:  # fmt: skip
        """Store 16-bit results if weights are first. They are transposed in the warp's part of shared memory, where 16
        columns of a token are 32 bytes."""
        config = self.config
        columns = Int32(out.shape[1])
        mine = column + lane % 2 * 8
        target = staging + ((lane // 16) * 8 + lane % 8) * 32 + (lane // 8 % 2) * 16
        for first in cutlass.range_constexpr(0, config.tokens, config.stored_tokens):
            for i in cutlass.range_constexpr(config.stored_tokens // 16):
                words = self.packed(sums, (first + 16 * i) // 2)
                store_transposed(target + i * 512, *(words[j] for j in range(4)))
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(config.stored_tokens // 16):
                token = first + 16 * i + lane // 2
                four = take(staging + i * 512 + lane * 16)
                if token < cutlass.min(tile.rows, config.tokens) and mine < columns:
                    self.put(out, tile.row + token, mine, four)
            cute.arch.sync_warp()

    @cute.jit
    def store_gated_halves(
        self, out: cute.Tensor, results: cute.Tensor, tile: Tile, column: Int32, staging: Int32, lane: Int32
    ) -> None:  # fmt: skip
        """Store gated 16-bit results if weights are first, as `store_halves` does, 32 tokens at a time. A warp has
        eight columns of a token, which are 16 bytes."""
        config = self.config
        for first in cutlass.range_constexpr(0, config.tokens, 32):
            words = self.packed(results, first // 4)
            store_transposed(staging + lane * 16, *(words[j] for j in range(4)))
            cute.arch.sync_warp()
            four = take(staging + lane * 16)
            if first + lane < cutlass.min(tile.rows, config.tokens) and column < Int32(out.shape[1]):
                self.put(out, tile.row + first + lane, column, four)
            cute.arch.sync_warp()

    @cute.jit
    def packed(self, sums: cute.Tensor, first: cutlass.Constexpr[int]) -> cute.Tensor:
        """The lane's eight values from value `first` on, as four words. A word has two columns of a product (see Sums).
        The words are [row of two, eight columns] of 16 columns or, if gated with weights first, [eight columns] of 32,
        because a lane then has one row. Values that the lane does not have are 0."""
        halves = cute.make_rmem_tensor((8,), self.out_dtype)
        for i in cutlass.range_constexpr(8):
            value = Float32(0.0)
            if const_expr(first + i < self.values):
                value = sums[first + i]
            halves[i] = value.to(self.out_dtype)
        return cute.recast_tensor(halves, Int32)

    @cute.jit
    def store_word_rows(
        self, out: cute.Tensor, sums: cute.Tensor, tile: Tile, column: Int32, first: Int32, lane: Int32
    ) -> None:  # fmt: skip
        """Store 32-bit results if tokens are first. `first` is the warp's first token."""
        columns = Int32(out.shape[1])
        for i in cutlass.range_constexpr(0, self.values, 2):
            token, mine = first + lane // 4 + 8 * (i // 2 % 2), column + 8 * (i // 4) + lane % 4 * 2
            if token < tile.rows and mine < columns:
                address = out.iterator.toint() + (Int64(tile.row + token) * Int64(columns) + Int64(mine)) * 4
                there = cute.make_tensor(
                    cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=8), cute.make_layout(2)
                )
                pair = cute.make_rmem_tensor((2,), Float32)
                pair[0], pair[1] = sums[i], sums[i + 1]
                cute.autovec_copy(pair, there)

    @cute.jit
    def store_half_rows(
        self, out: cute.Tensor, sums: cute.Tensor, tile: Tile, column: Int32, warp_rows: Rows
    ) -> None:  # fmt: skip
        """Store 16-bit results if tokens are first."""
        first, staging, lane = warp_rows
        columns = Int32(out.shape[1])
        width = self.config.pass_columns
        chunks = width // 8  # chunks of 16 bytes in a row; their order differs from row to row
        for done in cutlass.range_constexpr(0, BLOCK // self.parts, width):
            for i in cutlass.range_constexpr(width // 16):
                words = self.packed(sums, (done + 16 * i) // 2)
                row, chunk = lane % 16, 2 * i + lane // 16
                store_matrices(staging + chunk_place(row, chunk, chunks), *(words[j] for j in range(4)))
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(chunks // 2):
                row, chunk = i * (32 // chunks) + lane // chunks, lane % chunks
                four = take(staging + chunk_place(row, chunk, chunks))
                mine = column + done + chunk * 8
                if first + row < tile.rows and mine < columns:
                    self.put(out, tile.row + first + row, mine, four)
            cute.arch.sync_warp()

    def put(self, out: cute.Tensor, row: Int32, column: Int32, four: cute.Tensor) -> None:
        """Write eight 16-bit results of a row."""
        address = out.iterator.toint() + (Int64(row) * Int64(out.shape[1]) + Int64(column)) * 2
        there = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=16)
        cute.autovec_copy(four, cute.make_tensor(there, cute.make_layout(4)))
