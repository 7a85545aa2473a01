"""The warps that fill the stages: one warp has TMA copy weights and x, the others load the scales. If an index picks
x's rows, these other warps copy them instead of TMA."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync

from tsmla_kernels.sm90.operands import TmaCopy
from tsmla_kernels.sm90.products.config import BLOCK, ProductConfig
from tsmla_kernels.sm90.products.memory import Arrays, Place, Shared, Tile, Tma, layout_atom, wait_busily
from tsmla_kernels.sm90.products.picked import PickedRows
from tsmla_kernels.sm90.products.tiles import Tiles
from tsmla_kernels.sm90.warp import DTYPES, advance, quotient

SCALE_WARPS = 3
EVICT_FIRST, EVICT_NORMAL, EVICT_LAST = 0x12F0000000000000, 0x1000000000000000, 0x14F0000000000000  # L2's policies


class Copies:
    """Device functions of the warps that fill the stages. scales_of_lane: how many of x's scales of a block a lane
    loads."""

    def __init__(self, config: ProductConfig, tiles: Tiles) -> None:
        self.config, self.tiles = config, tiles
        self.x_dtype = DTYPES[config.x_dtype]
        self.weight_dtype = self.x_dtype if config.plain else Uint8 if config.packed else Float8E4M3FN
        self.row_items = config.weight_bytes * 8 // self.weight_dtype.width  # of a weight row in a block
        self.scales_of_lane = 0 if config.wide else -(-config.tokens // 32)
        self.weight_scales_of_lane = config.rows // 32 if config.packed else config.scale_blocks * (not config.plain)
        self.scale_dtype = Int32 if config.packed else Float32
        read_once = config.grouped or config.tokens < 128
        self.picked = PickedRows(config)
        self.weight_policy = EVICT_FIRST if read_once else EVICT_NORMAL

    @cute.jit
    def tensor_maps(self, arrays: Arrays) -> Tma:
        """The TMA loads: weights as (row, term, group), x as (row, term). Terms past the last one are read as 0."""
        config, weight, x = self.config, arrays.weight, arrays.x
        # TMA needs rows at multiples of 16 bytes. The host has checked this.
        pitch = cute.assume(x.stride[0], divby=16)
        groups, weight_pitch = 1, pitch
        if const_expr(config.packed):
            weight_pitch = cute.assume(weight.stride[len(weight.shape) - 2], divby=16)
        stride = weight_pitch
        if const_expr(config.grouped):
            groups, stride = weight.shape[0], cute.assume(weight.stride[0], divby=16)
        weights = self.weight_rows(arrays, weight_pitch, (groups, stride))
        tokens = cute.make_tensor(x.iterator, cute.make_layout(x.shape, stride=(pitch, 1)))
        weight_box, x_box = (*self.box_rows(), self.row_items), (config.tokens, config.block_terms // config.x_boxes)
        weight_layout, x_layout = self.weight_box_layout(), self.box_layout(self.x_dtype, x_box)
        load = cpasync.CopyBulkTensorTileG2SOp()
        load_weights = cpasync.CopyBulkTensorTileG2SMulticastOp() if config.multicast else load
        return Tma(
            TmaCopy(*cpasync.make_tiled_tma_atom(load_weights, weights, weight_layout, weight_box)),
            TmaCopy(*cpasync.make_tiled_tma_atom(load, tokens, x_layout, x_box)),
        )

    def weight_rows(self, arrays: Arrays, pitch: Int64, groups: tuple[Int32, Int64]) -> cute.Tensor:
        """The weights as (row, term, group), or, if gated, as (row of eight, half, eight rows, term, group): a tile has
        eight rows of the first half, the same eight of the second half, the next eight of the first, and so on. So a
        lane of the math warps has a row of the first half and the same row of the second. groups: how many there are,
        and the stride from one group's weight to the next."""
        (count, stride), terms = groups, arrays.x.shape[1]
        if const_expr(self.config.packed):
            terms = arrays.weight.shape[len(arrays.weight.shape) - 1]  # bytes
        width = arrays.out.shape[1]
        layout = cute.make_layout((width, terms, count), stride=(pitch, 1, stride))
        if const_expr(self.config.gated):
            strides = (pitch, width * pitch, 8 * pitch, 1, stride)
            layout = cute.make_layout((8, 2, width // 8, terms, count), stride=strides)
        return cute.make_tensor(arrays.weight.iterator, layout)

    def box_rows(self) -> tuple[int, ...]:
        """The weight rows that a CTA loads for a tile, in the modes of `weight_rows`."""
        rows = self.config.loaded_rows
        return (8, 2, rows // 16) if self.config.gated else (rows,)

    def weight_box_layout(self) -> cute.ComposedLayout:
        """The layout of a stage's weights in shared memory, in the modes of `weight_rows`."""
        if not self.config.gated:
            return self.box_layout(self.weight_dtype, (*self.box_rows(), self.row_items))
        pitch = self.row_items
        rows = cute.make_layout((*self.box_rows(), pitch), stride=(pitch, 8 * pitch, 16 * pitch, 1))
        return cute.make_composed_layout(layout_atom(self.weight_dtype).inner, 0, rows)

    def box_layout(self, dtype: type[cutlass.Numeric], box: tuple[int, int]) -> cute.ComposedLayout:
        return cute.tile_to_shape(layout_atom(dtype), box, (0, 1))

    # ---- weights and x

    @cute.jit
    def run(self, tma: Tma, arrays: Arrays, shared: Shared, place: Place) -> None:
        """Run the producer warp: copy the blocks of all tiles of this CTA. If config.handed hand the tiles to the
        math warps."""
        index, phase = Int32(0), Int32(1)
        slot, turn = Int32(0), Int32(1)
        item = place.cluster
        tile, walk = self.tiles.find(item, self.tiles.start(), arrays, place)
        if const_expr(self.config.handed):
            slot, turn = self.tiles.hand(shared, tile, slot, turn)
        while tile.group >= 0:
            for b in cutlass.range(tile.begin, tile.end, unroll=1):
                wait_busily(shared.empty + index, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(shared.full + index, self.config.copied_bytes)
                if const_expr(not self.config.picked):
                    self.copy_x(tma.x, shared, index, tile, b)
                self.copy_weights(tma.weight, shared, index, tile, b, place)
                index, phase = advance(index, phase, self.config.stages)
            item += place.clusters
            tile, walk = self.tiles.find(item, walk, arrays, place)
            if const_expr(self.config.handed):
                slot, turn = self.tiles.hand(shared, tile, slot, turn)

    @cute.jit
    def copy_x(self, copy: TmaCopy, shared: Shared, index: Int32, tile: Tile, b: Int32) -> None:
        """Copy block `b` of `config.tokens` rows of x, from the tile's first row on. Some of these rows may belong to
        the next group; rows past x's end become 0."""
        config = self.config
        rows, terms = config.tokens, config.block_terms // config.x_boxes
        boxes = self.boxes_at(shared.x, self.x_dtype, rows, config.x_boxes)
        for i in cutlass.range_constexpr(config.x_boxes):
            first = (tile.row, b * config.block_terms + i * terms)
            box = cute.local_tile(cute.domain_offset(first, copy.tensor), (rows, terms), (0, 0))
            target, source = cpasync.tma_partition(
                copy.atom, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 2), cute.group_modes(box, 0, 2)
            )
            full = shared.full + index
            cute.copy(copy.atom, source, target[None, i, index], tma_bar_ptr=full, cache_policy=Int64(EVICT_LAST))

    @cute.jit
    def copy_weights(self, copy: TmaCopy, shared: Shared, index: Int32, tile: Tile, b: Int32, place: Place) -> None:
        """Copy block `b` of the tile's weight rows; with multicast half of them, into the stages of both CTAs."""
        config = self.config
        modes = (*self.box_rows(), self.row_items)
        parts, part = config.rows // config.loaded_rows, 0
        if const_expr(config.multicast):
            part = place.rank
        boxes = self.boxes_at(shared.weight, self.weight_dtype, config.loaded_rows, parts)
        if const_expr(config.gated):
            boxes = cute.make_tensor(boxes.iterator, self.gated_boxes(parts))
        where: tuple[Int32, ...] = (tile.column * parts + part, b, tile.group)
        if const_expr(config.gated):
            where = (0, 0, *where)
        tiled = cute.local_tile(copy.tensor, modes, (None,) * (len(modes) + 1))
        target, source = cpasync.tma_partition(
            copy.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(boxes, 0, len(modes)),
            cute.group_modes(tiled, 0, len(modes)),
        )
        both = {"mcast_mask": cutlass.Int16(3)} if const_expr(config.multicast) else {}
        cute.copy(
            copy.atom,
            source[None, *where],
            target[None, part, index],
            tma_bar_ptr=shared.full + index,
            cache_policy=Int64(self.weight_policy),
            **both,
        )

    def gated_boxes(self, parts: int) -> cute.Layout:
        """The weights of all stages as (row of eight, half, eight rows, term, part of the tile's rows, stage)."""
        rows, pitch = self.config.loaded_rows, self.row_items
        return cute.make_layout(
            (8, 2, rows // 16, pitch, parts, self.config.stages),
            stride=(pitch, 8 * pitch, 16 * pitch, 1, rows * pitch, parts * rows * pitch),
        )

    def boxes_at(self, memory: cute.Pointer, dtype: type[cutlass.Numeric], rows: int, boxes: int) -> cute.Tensor:
        """The boxes of all stages as (row, term, box, stage). A row of a box has 128 bytes; of packed weights, whose
        terms are counted in bytes here, 64."""
        terms = self.config.weight_bytes if dtype is Uint8 else BLOCK * 8 // dtype.width
        return cute.make_tensor(
            cute.recast_ptr(memory, layout_atom(dtype).inner, dtype=dtype),
            cute.make_layout(
                ((8, rows // 8), terms, boxes, self.config.stages),
                stride=((terms, 8 * terms), 1, rows * terms, boxes * rows * terms),
            ),
        )

    # ---- scales

    @cute.jit
    def run_scales(self, arrays: Arrays, shared: Shared, place: Place, turn: Int32) -> None:
        """Run scale warp `turn`: load the scales of every SCALE_WARPS-th block of all tiles of this CTA. The warp loads
        its next block's scales before it waits for a stage, because a load takes longer than a block."""
        config = self.config
        index, phase, ahead = turn, Int32(1), turn  # ahead: how many other warps' blocks come before this warp's next
        item = place.cluster
        held = max(self.scales_of_lane + self.weight_scales_of_lane, 1)
        values = cute.make_rmem_tensor((held,), self.scale_dtype)
        rows = cute.make_rmem_tensor((-(-config.tokens // 32) if config.picked else 1,), Int32)
        tile, walk = self.tiles.find(item, self.tiles.start(), arrays, place)
        while tile.group >= 0:
            b = tile.begin + ahead
            if const_expr(config.picked):
                self.picked.numbers(arrays, tile, rows)
            if b < tile.end:
                self.load_scales(arrays, tile, b, values, rows)
            while b < tile.end:
                wait_busily(shared.empty + index, phase)
                if const_expr(config.picked):
                    self.picked.copy(arrays, shared, index, tile, b, rows)
                if const_expr(config.packed):
                    self.store_exponents(shared, index, values)
                elif const_expr(not config.plain):
                    self.store_scales(shared, index, values)
                if const_expr(config.picked):
                    self.picked.wait()
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(shared.full + index)
                index += SCALE_WARPS
                if index >= config.stages:
                    index -= config.stages
                    phase ^= 1
                b += SCALE_WARPS
                if b < tile.end:
                    self.load_scales(arrays, tile, b, values, rows)
            ahead = b - tile.end
            item += place.clusters
            tile, walk = self.tiles.find(item, walk, arrays, place)

    @cute.jit
    def load_scales(self, arrays: Arrays, tile: Tile, b: Int32, values: cute.Tensor, rows: cute.Tensor) -> None:
        """Load a lane's scales of block `b` into `values`: first the scales of every 32nd token, then those of the
        weights. Rows of x that belong to other groups get 0. rows: as `PickedRows.numbers` finds them."""
        config = self.config
        lane = cute.arch.lane_idx()
        for i in cutlass.range_constexpr(self.scales_of_lane):
            scale = Float32(0.0)
            if lane + 32 * i < cutlass.min(tile.rows, config.tokens):
                scale = arrays.x_scales[rows[i] if const_expr(config.picked) else tile.row + lane + 32 * i, b]
            values[i] = scale
        if const_expr(config.packed):
            self.load_exponents(arrays, tile, b, values)
        elif const_expr(not config.plain):
            self.load_weight_scales(arrays, tile, b, values)

    @cute.jit
    def load_weight_scales(self, arrays: Arrays, tile: Tile, b: Int32, values: cute.Tensor) -> None:
        """Load the weights' scales of block `b` behind those of x."""
        config = self.config
        blocks = quotient(Int32(arrays.out.shape[1]) + (BLOCK - 1), BLOCK)
        for i in cutlass.range_constexpr(config.scale_blocks):
            row = quotient(tile.column * config.width, BLOCK)
            row = row + i * blocks if const_expr(config.gated) else cutlass.min(row + i, blocks - 1)
            if const_expr(config.grouped):
                values[self.scales_of_lane + i] = arrays.weight_scales[tile.group, row, b]
            else:
                values[self.scales_of_lane + i] = arrays.weight_scales[row, b]

    @cute.jit
    def load_exponents(self, arrays: Arrays, tile: Tile, b: Int32, values: cute.Tensor) -> None:
        """Load the exponents of block `b` of every 32nd row of the tile's packed weights, the four of a row as one
        word. Rows past the last one get 0."""
        config = self.config
        lane, columns = cute.arch.lane_idx(), Int32(arrays.out.shape[1])
        pitch = Int32(arrays.weight_scales.shape[len(arrays.weight_scales.shape) - 1])
        start = arrays.weight_scales.iterator.toint() + Int64(b) * 4
        if const_expr(config.grouped):
            start += Int64(tile.group) * Int64(arrays.weight_scales.stride[0])
        for i in cutlass.range_constexpr(config.rows // 32):
            row, column = lane + 32 * i, Int32(0)
            if const_expr(config.gated):
                # Eight rows of the weight's first half and eight of its second half alternate.
                column = tile.column * config.width + row // 16 * 8 + row % 8
                row = column + row // 8 % 2 * columns
            else:
                row = tile.column * config.rows + row
                column = row
            exponents = Int32(0)
            if column < columns:
                address = start + Int64(row) * Int64(pitch)
                exponents = cute.make_tensor(
                    cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4), cute.make_layout(1)
                )[0]
            values[i] = exponents

    @cute.jit
    def store_exponents(self, shared: Shared, index: Int32, values: cute.Tensor) -> None:
        """Store the exponents of a block into stage `index`, a word for each row of the tile."""
        first = shared.scales.toint() + index * (self.config.scale_words * 4) + cute.arch.lane_idx() * 4
        for i in cutlass.range_constexpr(self.config.rows // 32):
            there = cute.make_ptr(Int32, first + i * 128, cute.AddressSpace.smem, assumed_align=4)
            cute.make_tensor(there, cute.make_layout(1))[0] = values[i]

    @cute.jit
    def store_scales(self, shared: Shared, index: Int32, values: cute.Tensor) -> None:
        """Store the scales of a block into stage `index`: for each block of weight rows, the products of its scale and
        the tokens' scales, or its scale alone if x has 16 bits."""
        config = self.config
        lane = cute.arch.lane_idx()
        first = shared.scales + index * config.scale_words
        for block in cutlass.range_constexpr(config.scale_blocks):
            scales = cute.make_tensor(first + block * config.block_scales, cute.make_layout(config.block_scales))
            scale = values[self.scales_of_lane + block]
            if const_expr(config.wide):
                if lane == 0:
                    scales[0] = scale
            for i in cutlass.range_constexpr(self.scales_of_lane):
                if config.tokens % 32 == 0 or lane < config.tokens:
                    scales[lane + 32 * i] = values[i] * scale
