"""Which tiles a cluster computes, and in which order: every warp finds them for itself."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from tsmla_kernels.sm90.products.config import ProductConfig
from tsmla_kernels.sm90.products.memory import (
    TILE_SLOTS,
    TILE_WORDS,
    Arrays,
    Place,
    Shared,
    Tile,
    Walk,
    wait_busily,
)
from tsmla_kernels.sm90.warp import advance, divide, quotient, release, uniform

SECTION = 16
"""How many tiles of rows a section has. The tiles in flight at a time are a section's tiles of rows times some tiles of
columns. They read about as many bytes of x as of the weights, and both stay in L2."""


class Found(NamedTuple):
    """The group that holds a tile.

    Attributes:
      group: the group's index. -1: there are no more tiles.
      index: the tile's index within the group.
      row: the group's first row of the result. rows: how many rows the group has.
    """

    group: Int32
    index: Int32
    row: Int32
    rows: Int32


class Tiles:
    """Device functions that number the tiles group by group; in a group by sections of SECTION tiles of rows; in a
    section by columns. Rows past the last group form a group of their own, without terms."""

    def __init__(self, config: ProductConfig) -> None:
        self.config = config

    def below(self, rows: Int32) -> Int32:
        """How many tiles of rows hold `rows` rows; with multicast, how many pairs of tiles."""
        return (rows + (self.config.cluster_tokens - 1)) // self.config.cluster_tokens

    def columns(self, arrays: Arrays) -> Int32:
        """How many tiles of columns of the result there are."""
        return (Int32(arrays.out.shape[1]) + (self.config.width - 1)) // self.config.width

    def blocks(self, arrays: Arrays) -> Int32:
        """How many blocks of terms there are."""
        terms = self.config.block_terms
        return quotient(Int32(arrays.x.shape[1]) + (terms - 1), terms)

    def start(self) -> Walk:
        return Walk(Int32(0), Int32(0))

    @cute.jit
    def find(self, item: Int32, walk: Walk, arrays: Arrays, place: Place) -> tuple[Tile, Walk]:
        """The tile with the index `item`, with the blocks of terms that this CTA sums, and the Walk for the next call.

        `item` must not fall from call to call, because the search goes on from `walk`."""
        total, columns, blocks = Int32(arrays.out.shape[0]), self.columns(arrays), self.blocks(arrays)
        group, index, row, rows = Int32(0), item, Int32(0), total
        if const_expr(self.config.grouped):
            found, walk = self.find_group(item, walk, arrays, columns)
            group, index, row, rows = found.group, found.index, found.row, found.rows
            if group == arrays.cu_rows.shape[0] - 1:
                blocks = Int32(0)
        elif item >= self.below(total) * columns:
            group = Int32(-1)
        tile = Tile(group, row, rows, Int32(0), Int32(0), Int32(0))
        if group >= 0:
            tile = self.within(tile, index, columns, blocks, place)
        return tile, walk

    @cute.jit
    def hand(self, shared: Shared, tile: Tile, slot: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """Hand `tile` to the math warps in slot `slot`. Returns the next slot and the phase of its barriers."""
        wait_busily(shared.tile_empty + slot, phase)
        with cute.arch.elect_one():
            words = cute.make_tensor(shared.tiles + slot * TILE_WORDS, cute.make_layout(TILE_WORDS))
            for i in cutlass.range_constexpr(len(tile)):
                words[i] = tile[i]
            cute.arch.mbarrier_arrive(shared.tile_full + slot)
        return advance(slot, phase, TILE_SLOTS)

    @cute.jit
    def take(self, shared: Shared, slot: Int32, phase: Int32) -> tuple[Tile, Int32, Int32]:
        """The tile that `hand` put into slot `slot`; the next slot, and the phase of its barriers."""
        wait_busily(shared.tile_full + slot, phase)
        words = cute.make_tensor(shared.tiles + slot * TILE_WORDS, cute.make_layout(TILE_WORDS))
        tile = Tile(*(uniform(words[i]) for i in range(len(Tile._fields))))
        release(shared.tile_empty + slot)
        slot, phase = advance(slot, phase, TILE_SLOTS)
        return tile, slot, phase

    @cute.jit
    def within(self, tile: Tile, index: Int32, columns: Int32, blocks: Int32, place: Place) -> Tile:
        """The tile with the index `index` in the group that `tile` gives by its fields group, row and rows."""
        config = self.config
        length = SECTION * config.tokens // config.cluster_tokens
        section = divide(index, columns * length)
        rest = index - section * (columns * length)
        of_rows = self.below(tile.rows)
        below = cutlass.min(of_rows - section * length, length)
        column = divide(rest, below)
        height = config.cluster_tokens
        if const_expr(config.level):
            height = divide((tile.rows + 7) // 8 + of_rows - 1, of_rows) * 8
        offset = (section * length + rest - column * below) * height
        rows = tile.rows - offset
        if const_expr(config.level):
            rows = cutlass.min(rows, height)
        if const_expr(config.multicast):
            height = Int32(config.tokens)
            if const_expr(config.plain):
                # Rows that one CTA has room for are shared out: each CTA has those of one math warpgroup.
                if rows <= config.tokens:
                    height = Int32(config.tokens // config.groups)
            offset += place.rank * height
            rows = cutlass.min(rows - place.rank * height, height)
        begin, end = Int32(0), blocks
        if const_expr(config.splits > 1):
            begin, end = (quotient(blocks * (place.rank + i), config.splits) for i in range(2))
        return Tile(tile.group, tile.row + offset, rows, column, begin, end)

    @cute.jit
    def find_group(self, item: Int32, walk: Walk, arrays: Arrays, columns: Int32) -> tuple[Found, Walk]:
        """Find the group of tile `item`. Returns the group, and how far the groups have been searched."""
        total, last = Int32(arrays.out.shape[0]), Int32(arrays.cu_rows.shape[0]) - 1
        lane = cute.arch.lane_idx()
        first, before = walk.group, walk.tiles
        group, index, row, rows = Int32(-1), Int32(0), Int32(0), Int32(0)
        searching = Int32(1)
        while searching == 1:
            begin, end = total, total
            if first + lane <= last:
                begin = cutlass.min(cutlass.max(arrays.cu_rows[first + lane], 0), total)
            if first + lane < last:
                end = cutlass.min(cutlass.max(arrays.cu_rows[first + lane + 1], begin), total)
            tiles = self.below(end - begin) * columns
            through = tiles
            for step in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(through, offset=1 << step, mask_and_clamp=0)
                if lane >= 1 << step:
                    through += other
            skipped = cute.arch.popc(cute.arch.vote_ballot_sync(before + through <= item))
            if skipped < 32:
                searching = Int32(0)
                group = first + skipped
                row, rows = cute.arch.shuffle_sync(begin, skipped), cute.arch.shuffle_sync(end - begin, skipped)
                index = item - before - cute.arch.shuffle_sync(through - tiles, skipped)
            else:
                before += cute.arch.shuffle_sync(through, 31)
                first += 32
                if first > last:
                    searching = Int32(0)
        return Found(group, index, row, rows), Walk(first, before)
