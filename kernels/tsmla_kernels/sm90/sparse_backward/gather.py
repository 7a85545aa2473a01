"""The warps that gather keys, and the copies of queries, for sparse_mla's gradient."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from tsmla_kernels.sm90.operands import Block, TmaCopy
from tsmla_kernels.sm90.sparse.union import NO_SLOT
from tsmla_kernels.sm90.sparse_backward.bounds import REACH_MASK, scale_of
from tsmla_kernels.sm90.sparse_backward.memory import (
    GATHER_ROWS,
    SLOTS_KEPT,
    Copies,
    Item,
    Keys,
    Shared,
    Sums,
    Traits,
)

ROW_LANES = 8  # lanes that copy 128 bytes of one row together
COPIED_ROWS = 32 // ROW_LANES  # rows that a warp copies at once
CHUNK = 16  # bytes of one cp.async
LINE_COLUMNS = 64  # columns of a row that ROW_LANES lanes copy at once
ALL_ROWS = (1 << GATHER_ROWS) - 1


class Gatherer:
    """Device code of the gathering warps. Warp w copies rows 16 w to 16 w + 15 of each block."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    # ---- queries

    def make_copies(self, q: cute.Tensor, d_out: cute.Tensor) -> Copies:
        """The TMA loads of a tile of heads."""
        return Copies(self.make_copy(q, self.traits.q), self.make_copy(d_out, self.traits.d_out))

    def make_copy(self, x: cute.Tensor, block: Block) -> TmaCopy:
        """The TMA load of `block` from x [T, H, columns]."""
        tiles = block.columns // block.width
        token = cute.assume(x.stride[0], divby=64)
        by_columns = cute.make_tensor(
            x.iterator,
            cute.make_layout((x.shape[1], block.width, tiles, x.shape[0]), stride=(x.stride[1], 1, block.width, token)),
        )
        shape = (block.rows, block.width, tiles)
        layout = cute.tile_to_shape(block.layout_atom(self.traits.dtype), shape, (0, 1, 2))
        return TmaCopy(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), by_columns, layout, shape))

    @cute.jit
    def copy_queries(self, copies: Copies, shared: Shared, item: Item):
        """Copy Q and dO of the CTA's heads. TMA fills the rows past the token's last head with zeros."""
        traits = self.traits
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                shared.queries_full, traits.bytes_of(traits.q) + traits.bytes_of(traits.d_out)
            )
        self.copy_rows(copies.q, shared.q, traits.q, shared.queries_full, item)
        self.copy_rows(copies.d_out, shared.d_out, traits.d_out, shared.queries_full, item)

    @cute.jit
    def copy_rows(self, copy: TmaCopy, memory: cute.Pointer, block: Block, full: cute.Pointer, item: Item):
        """Copy one operand's rows of the CTA's heads."""
        tiles = block.columns // block.width
        swizzle = block.layout_atom(self.traits.dtype).inner
        strides = ((block.width, 8 * block.width), 1, block.width * block.pitch)
        layout = cute.make_layout(((8, block.rows // 8), block.width, tiles), stride=strides)
        target = cute.make_tensor(cute.recast_ptr(memory, swizzle, dtype=self.traits.dtype), layout)
        shape = (block.rows, block.width, tiles)
        source = cute.local_tile(cute.domain_offset((item.first_head, 0, 0, 0), copy.tensor), shape, (0, 0, 0, None))
        tma_target, tma_source = cpasync.tma_partition(
            copy.atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 3), cute.group_modes(source, 0, 3)
        )
        cute.copy(copy.atom, tma_source[None, item.token], tma_target, tma_bar_ptr=full)

    # ---- keys

    @cute.jit
    def run(
        self,
        keys: Keys,
        sums: Sums,
        shared: Shared,
        item: Item,
        length: Int32,
        columns: Int32,
        warp: Int32,
        groups: cutlass.Constexpr[bool],
    ):
        """Gather one block of keys after another, each after the compute warps have released its buffer. Lane i knows
        the slot of row i % 16 of its warp. columns: of the call's indices. groups: whether keys are those of groups of
        tokens."""
        lane = cute.arch.lane_idx()
        column = warp * GATHER_ROWS + lane % GATHER_ROWS
        for block in cutlass.range(item.blocks, unroll=1):
            slot = self.slot_at(keys, item, column, length, groups)
            bits = self.bits_at(keys, item, column, length, groups)
            row = self.row_of(slot, column, keys, groups)
            place = block % SLOTS_KEPT
            if row < 0:
                bits = Int32(0)
            for token in cutlass.range_constexpr(self.traits.config.tokens if const_expr(groups) else 1):
                selected = cute.arch.vote_ballot_sync((bits >> token) & 1 == 1) & ALL_ROWS
                if lane == 0:
                    shared.valid[warp, token, place] = selected
            if lane < GATHER_ROWS:
                shared.rows[warp * GATHER_ROWS + lane, place] = row
                if const_expr(self.traits.config.deterministic):
                    scale = Int32(REACH_MASK)  # no number exceeds an infinite reach
                    if row >= 0:
                        scale = scale_of(sums.key_bounds[row], sums.key_counts[row], columns)
                    shared.scales[warp * GATHER_ROWS + lane, place] = scale
            cute.arch.mbarrier_wait(shared.keys_empty, (block + 1) & 1)
            memory = shared.keys.toint()
            self.copy_keys(keys, memory, row, warp, 0, self.traits.early_columns)
            cute.arch.cp_async_commit_group()
            self.copy_keys(keys, memory, row, warp, self.traits.early_columns, self.traits.head_dim)
            cute.arch.cp_async_commit_group()
            self.announce(shared, 0, 1)
            self.announce(shared, 1, 0)
            column += self.traits.keys.rows

    @cute.jit
    def announce(self, shared: Shared, full: Int32, later: cutlass.Constexpr[int]):
        """Say on barrier `full` of `keys_full` that this thread's copies for it have arrived; `later` groups of copies
        may still be under way."""
        cute.arch.cp_async_wait_group(later)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(shared.keys_full + full)

    @cute.jit
    def slot_at(self, keys: Keys, item: Item, column: Int32, length: Int32, groups: cutlass.Constexpr[bool]):
        """The slot in column `column` of the item's indices, or a slot that no cache has if the column is not
        active."""
        slot = Int32(NO_SLOT) if const_expr(groups) else Int32(-1)
        if column < length:
            slot = keys.indices[item.indices, column]
        return slot

    @cute.jit
    def bits_at(self, keys: Keys, item: Item, column: Int32, length: Int32, groups: cutlass.Constexpr[bool]):
        """A bit for each token of a group, set if the token selects the slot of column `column`; 1 for a lone token."""
        bits = Int32(1)
        if const_expr(groups):
            if column < length:
                bits = Int32(keys.bits[item.indices, column])
        return bits

    @cute.jit
    def row_of(self, slot: Int32, column: Int32, keys: Keys, groups: cutlass.Constexpr[bool]):
        """The row in kv_sum of the slot in column `column`; -1 if the slot does not exist."""
        config = self.traits.config
        compressed = column >= config.window if const_expr(config.two_caches) else False
        if const_expr(groups):
            compressed, slot = slot < 0, slot & NO_SLOT
        row = self.checked(slot, keys.caches[0], config.page_size, config.page_span)
        if const_expr(config.two_caches):
            if compressed:
                row = self.checked(slot, keys.caches[1], config.compressed_page_size, config.compressed_page_span)
                if row >= 0:
                    row += keys.caches[0].shape[0] * keys.caches[0].shape[1]
        return row

    @cute.jit
    def checked(
        self, slot: Int32, cache: cute.Tensor, page_size: cutlass.Constexpr[int], page_span: cutlass.Constexpr[int]
    ):
        """The slot, or -1 if the cache does not have it."""
        row = slot
        if slot < 0 or slot >= cache.shape[0] * cache.shape[1]:
            row = Int32(-1)
        if const_expr(page_span > 0):
            if slot % page_span >= page_size:
                row = Int32(-1)
        return row

    @cute.jit
    def copy_keys(
        self, keys: Keys, memory: Int32, row: Int32, warp: Int32, first: cutlass.Constexpr[int],
        end: cutlass.Constexpr[int],
    ):  # fmt: skip
        """Start the copies of columns `first` to `end` of this warp's rows of a block to the buffer at `memory`. A row
        that does not exist becomes zeros: P is 0 there, but 0 * NaN is NaN."""
        lane = cute.arch.lane_idx()
        block = self.traits.keys
        row_tile = block.width * self.traits.element_bytes  # bytes of a row in one column tile
        tile_bytes = block.pitch * row_tile
        chunk = lane % ROW_LANES
        chunks = row_tile // CHUNK
        of_first = keys.caches[0].shape[0] * keys.caches[0].shape[1]
        for part in cutlass.range(GATHER_ROWS // COPIED_ROWS, unroll=1):  # the warp has few registers
            mine = part * COPIED_ROWS + lane // ROW_LANES
            source_row = cute.arch.shuffle_sync(row, offset=mine)
            base, size = keys.caches[0].iterator.toint(), Int32(CHUNK)
            if source_row < 0:
                source_row, size = Int32(0), Int32(0)
            if const_expr(self.traits.config.two_caches):
                if source_row >= of_first:
                    source_row -= of_first
                    base = keys.caches[1].iterator.toint()
            source = base + Int64(source_row) * self.traits.row_bytes + chunk * CHUNK
            at = warp * GATHER_ROWS + mine
            target = memory + (chunk // chunks) * tile_bytes + at * row_tile
            target += (chunk % chunks ^ (at // 2) % chunks) * CHUNK  # swizzled as `layout_atom` says
            for line in cutlass.range_constexpr(first // LINE_COLUMNS, end // LINE_COLUMNS):
                cute.arch.inline_ptx(
                    f"cp.async.cg.shared.global [{{$r0}} + {line * (ROW_LANES // chunks) * tile_bytes}],"
                    f" [{{$r1}} + {line * ROW_LANES * CHUNK}], 16, {{$r2}};",
                    read_only_args=[target, source, size],
                )
