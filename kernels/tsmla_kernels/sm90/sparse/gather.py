"""The warps that fill the sparse kernel's ring: four warps gather the selected rows, each row by one bulk copy."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.contract.layouts import V4_PACKED
from tsmla_kernels.sm90.latent.memory import Barrier, Described, Piece
from tsmla_kernels.sm90.latent.ring import Ring
from tsmla_kernels.sm90.sparse.config import GATHER_WARPS, SparseConfig
from tsmla_kernels.sm90.sparse.memory import FIRST_PIECES_THREADS, GATHER_ROWS, Gather
from tsmla_kernels.sm90.sparse.stages import Stages
from tsmla_kernels.sm90.warp import element

ALL_ROWS = (1 << GATHER_ROWS) - 1
LINE = 128  # bytes
NO_SLOT = (1 << 31) - 1  # no cache has this slot; in unions over two caches it replaces -1, an inactive column


class Row(NamedTuple):
    """A row of a cache: whether its slot exists (1 or 0), its address, and the address of a V4 row's scales."""

    exists: Int32
    address: Int64
    scales: Int64


class Pages(NamedTuple):
    """The layout of a cache's slots in pages: page_size and page_span of SparseConfig."""

    size: int
    span: int


class SelectedRows:
    """The rows that a call selects: finds them, for warps that copy them.

    Attributes:
      row_bytes: as in SparseConfig. pages: the Pages of the caches. scales_apart: whether rows have scales elsewhere.
    """

    def __init__(self, config: SparseConfig, ring: Ring) -> None:
        self.config, self.ring, self.row_bytes = config, ring, config.row_bytes
        self.pages = (
            Pages(config.page_size, config.page_span),
            Pages(config.compressed_page_size, config.compressed_page_span),
        )
        self.scales_apart = config.layout == "v4"

    def meet_for_first_pieces(self) -> None:
        """Say, as the scheduling warp, that the first pieces have been described. The scheduling warp does not wait for
        the gathering warps, which may need a released stage of the first piece before they reach the second."""
        cute.arch.barrier_arrive(barrier_id=Barrier.FIRST_PIECES, number_of_threads=FIRST_PIECES_THREADS)

    def wait_for_first_pieces(self) -> None:
        """Wait, as a gathering warp, until the first pieces have been described."""
        cute.arch.barrier(barrier_id=Barrier.FIRST_PIECES, number_of_threads=FIRST_PIECES_THREADS)

    @cute.jit
    def slot_at(self, selected: cute.Pointer, column: Int32, keys: Int32):
        """The slot in column `column` of the token's indices; -1 if that column is not active."""
        slot = Int32(-1)
        if column < keys:
            slot = cute.make_tensor(selected, cute.make_layout(1 << 30))[column]
        return slot

    @cute.jit
    def locate(self, slot: Int32, column: Int32, gather: Gather) -> Row:
        """The row of `slot`, which stands in column `column` of the indices. If the indices are unions over two caches,
        the slot's upper bit says whether it is of the second cache."""
        of_second = column >= self.config.window if const_expr(self.config.two_caches) else None
        if const_expr(self.config.two_caches and self.config.tokens > 1):
            of_second = slot < 0
            slot = slot & NO_SLOT
        row = self.row_of(slot, gather.caches[0], self.pages[0])
        exists, address, scales = row.exists, row.address, row.scales
        if const_expr(self.config.two_caches):
            if of_second:
                other = self.row_of(slot, gather.caches[1], self.pages[1])
                exists, address, scales = other.exists, other.address, other.scales
        return Row(exists, address, scales)

    @cute.jit
    def row_of(self, slot: Int32, cache: cute.Tensor, pages: Pages) -> Row:
        """The row of a slot of `cache`."""
        base = cache.iterator.toint()
        offset, slots = Int32(0), cache.shape[0] * (pages.span if const_expr(self.scales_apart) else cache.shape[1])
        if const_expr(pages.span > 0):
            page = slot // pages.span
            offset = slot - page * pages.span
        exists = Int32(0)
        if slot >= 0 and slot < slots:
            exists = Int32(1)
            if const_expr(pages.span > pages.size):
                exists = Int32(offset < pages.size)
        if const_expr(self.scales_apart):
            begin = base + Int64(page) * cache.shape[1]
            address = begin + Int64(offset) * self.row_bytes
            scales = begin + pages.size * self.row_bytes + Int64(offset) * V4_PACKED.scale_row_bytes
        else:
            address = base + Int64(slot) * self.row_bytes
            scales = address
        return Row(exists, address, scales)


class Gatherer(SelectedRows):
    """The copies into the ring. Warp w of the gathering warps copies rows 16 w to 16 w + 15 of every block, which are
    the keys of softmax warp w. A row whose slot does not exist becomes zeros."""

    def __init__(self, config: SparseConfig, stages: Stages) -> None:
        super().__init__(config, stages.ring)
        self.stages, self.block, self.pitch = stages, stages.block, config.pitch

    @cute.jit
    def run(self, gather: Gather, warp: Int32):
        """Fill the ring, and refill each stage when it is released, until the CTA's work ends.

        Lane i has row i % 16 of its warp. Slots are read two blocks ahead and a V4 row's scales one block ahead.
        """
        index, phase, number = Int32(0), Int32(0), Int32(0)
        lane = cute.arch.lane_idx()
        running = Int32(1)
        while running == 1:
            if number == 1:
                self.wait_for_first_pieces()
            piece, b_begin, b_end = self.ring.described(number, gather.pieces)
            if b_begin == b_end:
                # A piece without blocks ends the CTA's work. The softmax and value warps read the same description.
                if number == 0:
                    self.wait_for_first_pieces()
                cute.arch.mbarrier_wait(gather.empty + index, phase ^ 1)
                if lane == 0:
                    cute.arch.mbarrier_arrive(gather.full + index)
                running = Int32(0)
            else:
                if const_expr(self.config.early_q):
                    if number > 0:
                        self.prefetch_query(piece, warp, gather)
                keys = piece[Piece.KEYS]
                column = b_begin * self.block + warp * GATHER_ROWS + lane % GATHER_ROWS
                selected = element(gather.indices, Int64(piece[Piece.REQUEST]) * gather.indices.shape[1], 4)
                slot = self.slot_at(selected, column, keys)
                following = self.slot_at(selected, column + self.block, keys)
                low, high = self.scales_of(slot, column, gather)
                for _ in cutlass.range(b_begin, b_end, unroll=1):
                    here, low_here, high_here = slot, low, high
                    slot = following
                    low, high = self.scales_of(slot, column + self.block, gather)
                    following = self.slot_at(selected, column + 2 * self.block, keys)
                    cute.arch.mbarrier_wait(gather.empty + index, phase ^ 1)
                    of_tokens = self.bits_at(piece, column, keys, gather)
                    row = self.locate(here, column, gather)
                    exist = self.copy_rows(row, index, warp, gather)
                    seen = exist
                    if const_expr(self.config.tokens > 1):
                        seen = self.store_bits(of_tokens * row.exists, index, warp, gather)
                    if const_expr(self.scales_apart):
                        self.store_scales(low_here, high_here, index, warp, gather)
                    self.announce(exist, seen, index, warp, gather)
                    column += self.block
                    index, phase = self.ring.advance(index, phase)
                number += 1

    @cute.jit
    def prefetch_query(self, piece: Described, warp: Int32, gather: Gather):
        """Prefetch a piece's Q into the L2 cache, before the softmax warpgroup requests it."""
        row_bytes = gather.q.shape[1] * gather.q.element_type.width // 8
        first = gather.q.iterator.toint() + Int64(piece[Piece.ROW]) * row_bytes
        size = piece[Piece.VALID_ROWS] * row_bytes
        begin, step = (warp * 32 + cute.arch.lane_idx()) * LINE, GATHER_WARPS * 32 * LINE
        for offset in cutlass.range(begin, size, step, unroll=1):
            line = cute.make_ptr(Int32, first + offset, cute.AddressSpace.gmem, assumed_align=16)
            cute.arch.prefetch(line.to_llvm_ptr(), cache_level="L2")

    @cute.jit
    def bits_at(self, piece: Described, column: Int32, keys: Int32, gather: Gather):
        """The bits of the tokens that select the slot in column `column` of the union; 0 if there is no union."""
        of_tokens = Int32(0)
        if const_expr(self.config.tokens > 1):
            if column < keys:
                address = gather.bits.iterator.toint() + Int64(piece[Piece.REQUEST]) * gather.bits.shape[1] + column
                pointer = cute.make_ptr(cutlass.Uint8, address, cute.AddressSpace.gmem, assumed_align=1)
                of_tokens = Int32(cute.make_tensor(pointer, cute.make_layout(1))[0])
        return of_tokens

    @cute.jit
    def store_bits(self, of_tokens: Int32, index: Int32, warp: Int32, gather: Gather):
        """Store, for stage `index`, the bits of the tokens that select each of this warp's rows. Return the bits of the
        tokens that select any of these rows."""
        lane = cute.arch.lane_idx()
        if lane < GATHER_ROWS:
            gather.of_tokens[warp * GATHER_ROWS + lane, index] = cutlass.Uint8(of_tokens)
        cute.arch.sync_warp()  # before a lane arrives at `full` for the warp
        return cute.arch.warp_redux_sync(of_tokens, "or")

    @cute.jit
    def scales_of(self, slot: Int32, column: Int32, gather: Gather):
        """The eight bytes of scales of a V4 row, as two words; (0, 0) if rows are not V4's or the row does not
        exist."""
        eight = cute.make_rmem_tensor((2,), Int32)
        eight.fill(0)
        if const_expr(self.scales_apart):
            row = self.locate(slot, column, gather)
            if row.exists == 1:
                pointer = cute.make_ptr(Int32, row.scales, cute.AddressSpace.gmem, assumed_align=8)
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(2)), eight)
        return eight[0], eight[1]

    @cute.jit
    def store_scales(self, low: Int32, high: Int32, index: Int32, warp: Int32, gather: Gather):
        """Store a V4 row's scales, as f16, to the stage's table: see Stages.scale_place."""
        lane = cute.arch.lane_idx()
        table = gather.ring + (index * self.ring.stage_elements + self.config.scales_offset)
        table += self.stages.scale_place(warp * GATHER_ROWS + lane % GATHER_ROWS)
        if lane < GATHER_ROWS:
            for group in cutlass.range_constexpr(V4_PACKED.num_scales):
                # A byte is the exponent of an f32.
                word, shift = (low, high)[group // 4], 8 * (group % 4)
                number = (((word >> shift) & 255) << 23).bitcast(Float32)
                there = table + group * self.stages.scales_of_group
                pointer = cute.make_ptr(cutlass.Float16, there, cute.AddressSpace.smem, assumed_align=2)
                cute.make_tensor(pointer, cute.make_layout(1))[0] = number.to(cutlass.Float16)
        cute.arch.sync_warp()

    @cute.jit
    def copy_rows(self, row: Row, index: Int32, warp: Int32, gather: Gather):
        """Copy this warp's rows of a block into the free stage `index`. Return a word whose bit r says whether row r
        exists."""
        lane = cute.arch.lane_idx()
        exist = cute.arch.vote_ballot_sync(row.exists == 1) & ALL_ROWS
        first = gather.ring + (index * self.ring.stage_elements + warp * (GATHER_ROWS * self.pitch))
        if row.exists == 1 and lane < GATHER_ROWS:
            copy_row(first + lane * self.pitch, row.address, self.row_bytes, (gather.full + index).toint())
        cute.arch.sync_warp()
        if exist != ALL_ROWS:
            self.clear_rows(first, exist)
        return exist

    @cute.jit
    def announce(self, exist: Int32, seen: Int32, index: Int32, warp: Int32, gather: Gather):
        """Tell the consumers of stage `index` which of this warp's rows exist, and the barrier `full` how many bytes
        will arrive. `seen` is this warp's word of `valid` for the stage.

        The copies may complete before this call, but the stage is not full until this warp has arrived at `full`.
        """
        if cute.arch.lane_idx() == 0:
            gather.valid[warp, index] = seen
            cute.arch.mbarrier_arrive_and_expect_tx(gather.full + index, cute.arch.popc(exist) * self.row_bytes)
        cute.arch.sync_warp()

    @cute.jit
    def clear_rows(self, first: Int32, exist: Int32):
        """Zero the rows of this warp that do not exist. Their P is 0, but the stage's old bytes may be NaN, and 0 * NaN
        is NaN."""
        lane = cute.arch.lane_idx()
        zeros = cute.make_rmem_tensor((4,), Int32)
        zeros.fill(0)
        for r in cutlass.range(GATHER_ROWS, unroll=1):
            if ((exist >> r) & 1) == 0:
                for chunk in cutlass.range(lane, self.row_bytes // 16, 32, unroll=1):
                    address = first + (r * self.pitch + chunk * 16)
                    target = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16)
                    cute.autovec_copy(zeros, cute.make_tensor(target, cute.make_layout(4)))
        cute.arch.fence_proxy("async.shared", space="cta")  # before the next copy into this stage
        cute.arch.sync_warp()


def copy_row(target: Int32, source: Int64, size: int, barrier: Int32) -> None:
    """Copy `size` bytes from global to shared memory; `barrier` counts them. Addresses and `size` are multiples of
    16."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, Int32(size), barrier],
    )
