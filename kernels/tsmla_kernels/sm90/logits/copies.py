"""The producer of indexer_logits: one warp that walks the CTA's share and copies queries, weights, keys and scales."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from tsmla_kernels.sm90.logits.config import BLOCK, HEAD_DIM, Q_STAGES, LogitsConfig
from tsmla_kernels.sm90.logits.memory import (
    Arrays,
    Extent,
    Piece,
    Position,
    Request,
    Share,
    Shared,
    Stage,
    Tma,
)
from tsmla_kernels.sm90.logits.share import Line
from tsmla_kernels.sm90.operands import TmaCopy
from tsmla_kernels.sm90.warp import advance, quotient, remainder

TABLE_AHEAD = 32  # block-table entries that are read at once, one per lane


def layout_atom() -> cute.ComposedLayout:
    """The swizzled layout of queries and keys in shared memory."""
    return warpgroup.make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, Float8E4M3FN)


def bulk_copy(target: cute.Pointer, source: Int64, size: Int32, barrier: cute.Pointer) -> None:
    """Copy `size` bytes, a multiple of 16, from global to shared memory by one thread."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[Int32(target.toint()), source, size, Int32(barrier.toint())],
    )


class Producer:
    """Device functions of the producer warp. box: how many keys one TMA copy has, min(BLOCK, page size)."""

    def __init__(self, config: LogitsConfig) -> None:
        self.config, self.line = config, Line(config)
        self.box = min(BLOCK, config.page_size)
        self.boxes = BLOCK // self.box
        self.stage_bytes = BLOCK * (HEAD_DIM + 4 * config.packed)

    @cute.jit
    def tensor_maps(self, arrays: Arrays) -> Tma:
        """The TMA loads of q, as a tensor [token and head, column], and of keys, as [key of a page, column, page]."""
        config, load, atom = self.config, cpasync.CopyBulkTensorTileG2SOp(), layout_atom()
        rows = Int32(arrays.q.shape[0]) * config.num_heads
        q = cute.make_tensor(arrays.q.iterator, cute.make_layout((rows, HEAD_DIM), stride=(HEAD_DIM, 1)))
        q_box = (config.columns, HEAD_DIM)
        keys = cute.make_tensor(
            cute.recast_ptr(arrays.k_cache.iterator, dtype=Float8E4M3FN),
            cute.make_layout(
                (config.page_size, HEAD_DIM, arrays.k_cache.shape[0]), stride=(HEAD_DIM, 1, arrays.k_cache.stride[0])
            ),
        )
        k_box = (self.box, HEAD_DIM)
        return Tma(
            TmaCopy(*cpasync.make_tiled_tma_atom(load, q, cute.tile_to_shape(atom, q_box, (0, 1)), q_box)),
            TmaCopy(*cpasync.make_tiled_tma_atom(load, keys, cute.tile_to_shape(atom, k_box, (0, 1)), k_box)),
        )

    @cute.jit
    def run(self, tma: Tma, arrays: Arrays, shared: Shared, share: Share) -> None:
        """Copy the queries and key blocks of all pieces of the CTA's share, then pass on an empty piece: the end."""
        position, request, left = share.position, share.request, share.blocks
        q_stage, stage = Stage(Int32(0), Int32(1)), Stage(Int32(0), Int32(1))
        while left > 0:
            count = cutlass.min(left, self.line.blocks(request, position.tile) - position.block)
            # Load the pages first: the copies of the queries are issued while the table is read.
            pages = self.read_table(arrays, position.request, self.first_entry(position.block), request.keys)
            self.begin_piece(tma, arrays, shared, q_stage, position, request, count)
            q_stage = Stage(*advance(q_stage.index, q_stage.phase, Q_STAGES))
            stage = self.copy_blocks(tma, arrays, shared, stage, position, Extent(request.keys, count, pages))
            left -= count
            if left > 0:
                position, request = self.line.next_tile(arrays, position, request)
        cute.arch.mbarrier_wait(shared.q.empty + q_stage.index, q_stage.phase)
        if cute.arch.lane_idx() == 0:
            shared.pieces[Piece.BLOCK_BEGIN, q_stage.index] = Int32(0)
            shared.pieces[Piece.BLOCK_END, q_stage.index] = Int32(0)
            cute.arch.mbarrier_arrive(shared.q.full + q_stage.index)

    @cute.jit
    def begin_piece(
        self, tma: Tma, arrays: Arrays, shared: Shared, q_stage: Stage,
        position: Position, request: Request, count: Int32,
    ) -> None:  # fmt: skip
        """Describe a piece, and copy its queries and weights."""
        config, index = self.config, q_stage.index
        end = request.tokens - position.tile * config.tile_tokens
        token = cutlass.max(end - config.tile_tokens, 0)
        row, tokens = request.row + token, end - token
        cute.arch.mbarrier_wait(shared.q.empty + index, q_stage.phase)
        full = shared.q.full + index
        if cute.arch.lane_idx() == 0:
            shared.pieces[Piece.BLOCK_BEGIN, index] = position.block
            shared.pieces[Piece.BLOCK_END, index] = position.block + count
            shared.pieces[Piece.ROW, index] = row
            shared.pieces[Piece.TOKENS, index] = tokens
            shared.pieces[Piece.FIRST_KEYS, index] = request.keys - request.tokens + 1 + token
            size = tokens * (config.num_heads * 4)
            cute.arch.mbarrier_arrive_and_expect_tx(full, size + config.q_bytes)
            source = arrays.weights.iterator.toint() + Int64(row) * (config.num_heads * 4)
            bulk_copy(shared.q.scales + index * config.weight_words, source, size, full)
        cute.arch.sync_warp()
        smem = cute.make_tensor(
            cute.recast_ptr(shared.q.memory, layout_atom().inner, dtype=Float8E4M3FN),
            cute.make_layout(
                ((8, config.columns // 8), HEAD_DIM, config.q_groups, Q_STAGES),
                stride=((HEAD_DIM, 8 * HEAD_DIM), 1, config.columns * HEAD_DIM, config.q_bytes),
            ),
        )
        for group in cutlass.range_constexpr(config.q_groups):
            first = (row + group * config.tokens) * config.num_heads
            box = cute.local_tile(cute.domain_offset((first, 0), tma.q.tensor), (config.columns, HEAD_DIM), (0, 0))
            target, source = cpasync.tma_partition(
                tma.q.atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(box, 0, 2)
            )
            cute.copy(tma.q.atom, source, target[None, group, index], tma_bar_ptr=full)

    @cute.jit
    def copy_blocks(
        self, tma: Tma, arrays: Arrays, shared: Shared, stage: Stage,
        position: Position, extent: Extent,
    ):  # fmt: skip
        """Copy a piece's blocks of keys, and return the stage after them."""
        keys, count, pages = extent.keys, extent.blocks, extent.pages
        index, phase = stage.index, stage.phase
        first_entry = self.first_entry(position.block)
        for b in cutlass.range(position.block, position.block + count, unroll=1):
            entry = self.first_entry(b)
            if entry + self.boxes > first_entry + TABLE_AHEAD:
                first_entry = entry
                pages = self.read_table(arrays, position.request, entry, keys)
            cute.arch.mbarrier_wait(shared.keys.empty + index, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(shared.keys.full + index, self.stage_bytes)
            for h in cutlass.range_constexpr(self.boxes):
                page = cute.arch.shuffle_sync(pages, entry + h - first_entry)
                self.copy_box(tma, arrays, shared, index, page, b, h)
            index, phase = advance(index, phase, self.config.stages)
        return Stage(index, phase)

    def first_entry(self, b: Int32) -> Int32:
        """The index of the block-table entry whose page has the first key of block `b`."""
        return quotient(b * BLOCK, self.config.page_size)

    @cute.jit
    def read_table(self, arrays: Arrays, r: Int32, first: Int32, keys: Int32):
        """Read entry `first` + lane of request r's block table. The result is 0 past the table's end and past the
        request's last page, where the table can hold anything. A page outside the cache is replaced by the nearest page
        inside: TMA checks the bounds of keys, but the plain copy of the scales does not."""
        entry = first + cute.arch.lane_idx()
        page = Int32(0)
        if entry < arrays.block_tables.shape[1] and entry * self.config.page_size < keys:
            page = cutlass.min(cutlass.max(arrays.block_tables[r, entry], 0), arrays.k_cache.shape[0] - 1)
        return page

    @cute.jit
    def copy_box(
        self, tma: Tma, arrays: Arrays, shared: Shared, index: Int32, page: Int32,
        b: Int32, h: cutlass.Constexpr[int],
    ) -> None:  # fmt: skip
        """Copy box `h` of block `b` from page `page` into stage `index`; if pages are packed, the box's scales too."""
        config, keys = self.config, shared.keys
        box = quotient(remainder(b * BLOCK, config.page_size), BLOCK)  # the box's index in its page
        smem = cute.make_tensor(
            cute.recast_ptr(keys.memory, layout_atom().inner, dtype=Float8E4M3FN),
            cute.make_layout(
                ((8, self.box // 8), HEAD_DIM, self.boxes, config.stages),
                stride=((HEAD_DIM, 8 * HEAD_DIM), 1, self.box * HEAD_DIM, BLOCK * HEAD_DIM),
            ),
        )
        tiled = cute.local_tile(tma.keys.tensor, (self.box, HEAD_DIM), (None, 0, None))
        target, source = cpasync.tma_partition(
            tma.keys.atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiled, 0, 2)
        )
        cute.copy(tma.keys.atom, source[None, box, page], target[None, h, index], tma_bar_ptr=keys.full + index)
        if const_expr(config.packed):
            behind = config.page_size * HEAD_DIM + box * (BLOCK * 4)
            address = arrays.k_cache.iterator.toint() + Int64(page) * config.page_bytes + behind
            with cute.arch.elect_one():
                bulk_copy(keys.scales + (index * BLOCK + h * self.box), address, Int32(self.box * 4), keys.full + index)
