"""The warp that fills decode's ring: it copies queries and keys, stage by stage."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from tsmla_kernels.sm90.decode.config import DecodeConfig
from tsmla_kernels.sm90.decode.memory import (
    COPY_STATE_WORDS,
    FIRST_PIECES_THREADS,
    PIECES_KEPT,
    Copies,
    CopyState,
    Tma,
)
from tsmla_kernels.sm90.decode.stages import Stages
from tsmla_kernels.sm90.latent.memory import Barrier, Described, Piece
from tsmla_kernels.sm90.latent.shape import ROWS
from tsmla_kernels.sm90.warp import quotient, remainder

TABLE_AHEAD = 32  # block-table entries that are read at once
FIRST_COPIES = 3  # stages that are requested before the warps take their roles


class Copier:
    """The copies into the ring, made by warp `warp`.

    Attributes:
      ring, layout: the ring, and the contents of its stages. stage_bytes: bytes of a stage's keys, or of its rows of Q.
      heads: H. The other attributes are explained below or in DecodeConfig and Stages.
    """

    def __init__(self, config: DecodeConfig, layout: Stages) -> None:
        self.ring, self.layout = layout.ring, layout
        self.page_size, self.cluster = config.page_size, config.cluster
        self.stages, self.block, self.box, self.q_rows = layout.stages, layout.block, layout.box, layout.q_rows
        self.column_tiles = layout.column_tiles
        self.split_q, self.heads_first, self.heads = config.split_q, config.heads_first, config.num_heads
        # If heads come first, one copy of rows takes box_heads heads of box_tokens tokens.
        self.box_heads = min(config.num_heads, self.q_rows)
        self.box_tokens = self.q_rows // self.box_heads
        self.q_tiles = self.column_tiles - 1 if config.split_q else self.column_tiles  # column tiles of the array q
        self.stage_bytes = layout.block * layout.depth * self.ring.itemsize
        self.warp = 12 if config.transposed_out else 4
        # Whether P lies in the keys' rope columns (if R is not 0). The next copy then overwrites P, which ordinary
        # stores have written.
        self.p_in_keys = not config.fp8_cache
        # If true, the Q of a batch of one request takes one stage, whatever the request's length.
        self.q_known_early = not config.ragged and config.p_rows < ROWS

    def tensor_maps(self, q: cute.Tensor, kv_cache: cute.Tensor, q_rope: cute.Tensor | None = None) -> Tma:
        """TMA atoms and tensors of q, of the cache, and of q's rope columns if they are a separate array.

        The cache has four modes: (key, 64 columns, column tile, page). One copy brings a block's keys with all their
        columns. If pages are shorter than a block, a copy brings one column tile of one page's keys.
        """
        atom = warpgroup.make_smem_layout_atom(self.layout.keys_swizzle, self.ring.dtype)
        tiles = self.column_tiles if self.box == self.block else 1
        box_layout = cute.tile_to_shape(atom, (self.box, 64, tiles), (0, 1, 2))
        q_atom = warpgroup.make_smem_layout_atom(self.layout.q_swizzle, q.element_type)
        q_layout = cute.tile_to_shape(q_atom, (self.q_rows, 64, self.q_tiles), (0, 1, 2))
        row, page = kv_cache.stride[1], kv_cache.stride[0]
        keys = cute.make_tensor(
            kv_cache.iterator,
            cute.make_layout((self.page_size, 64, self.column_tiles, kv_cache.shape[0]), stride=(row, 1, 64, page)),
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        load_keys = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster > 1 else load
        q_box: tuple[int, ...]
        if const_expr(self.heads_first):
            shape, strides = (*q.shape[:2], 64, self.q_tiles), (*q.stride[:2], 1, 64)
            q_box = (self.box_heads, self.box_tokens, 64, self.q_tiles)
            q_layout = cute.make_composed_layout(
                q_layout.inner, 0, cute.make_layout(q_box, stride=self.heads_first_strides())
            )
        else:
            shape, strides = (q.shape[0], 64, self.q_tiles), (q.stride[0], 1, 64)
            q_box = (self.q_rows, 64, self.q_tiles)
        queries = cute.make_tensor(q.iterator, cute.make_layout(shape, stride=strides))
        tma = Tma(
            *cpasync.make_tiled_tma_atom(load, queries, q_layout, q_box),
            *cpasync.make_tiled_tma_atom(load_keys, keys, box_layout, (self.box, 64, tiles)),
        )
        if q_rope is None:
            return tma
        aligned = 128 // q.element_type.width
        ropes = cute.make_tensor(
            q_rope.iterator,
            # TMA needs rows at multiples of 16 bytes. The host has checked this.
            cute.make_layout((q_rope.shape[0], 64, 1), stride=(cute.assume(q_rope.shape[1], divby=aligned), 1, 64)),
        )
        rope_layout = cute.tile_to_shape(q_atom, (self.q_rows, 64, 1), (0, 1, 2))
        atom, ropes = cpasync.make_tiled_tma_atom(load, ropes, rope_layout, (self.q_rows, 64, 1))
        return tma._replace(q_rope_atom=atom, q_rope=ropes)

    def heads_first_strides(self) -> tuple[int, ...]:
        """Strides of (head, token, column, column tile) in a stage, whose rows lie token by token."""
        return (64, 64 * self.box_heads, 1, 64 * self.q_rows)

    @cute.jit
    def request_only_q(self, batch: Int32, copies: Copies) -> Int32:
        """Request Q if the batch has one request. That need not wait for the request's length, because every cluster
        that gets a piece begins with the same rows of Q. Return whether Q has been requested, for `begin`."""
        requested = Int32(0)
        if const_expr(self.q_known_early):
            if batch == 1:
                requested = Int32(1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(copies.full, self.stage_bytes)
                self.copy_q(Int32(0), Int32(0), copies)
        return requested

    @cute.jit
    def begin(self, copies: Copies, requested: Int32):
        """Request the first stages, all for the first piece. The copying warp calls this when it has described that
        piece. requested: the result of request_only_q."""
        state = copies.state
        lane = cute.arch.lane_idx()
        if lane < COPY_STATE_WORDS:
            state[lane] = Int32(0)
        cute.arch.sync_warp()
        filled = Int32(0)
        while filled < FIRST_COPIES and (
            state[CopyState.NEXT_PIECE] == 0 or state[CopyState.BLOCK] < state[CopyState.BLOCK_END]
        ):
            if const_expr(self.q_known_early):
                self.produce(filled, copies, requested)
                requested = Int32(0)
            else:
                self.produce(filled, copies)
            filled += 1
        if lane == 0:
            state[CopyState.FILLED] = filled
        cute.arch.sync_warp()

    @cute.jit
    def fill(self, copies: Copies):
        """Fill the stages that `begin` has not filled."""
        state = copies.state
        # The first copies need only the first piece's description. The next pieces have been described when the warps
        # meet at the barrier.
        waiting = Int32(1)
        for i in cutlass.range(state[CopyState.FILLED], self.stages, unroll=1):
            if (
                waiting == 1
                and state[CopyState.NEXT_PIECE] == 1
                and state[CopyState.BLOCK] == state[CopyState.BLOCK_END]
            ):
                waiting = Int32(0)
                self.meet_for_first_pieces()
            self.produce(i, copies)
        if waiting == 1:
            self.meet_for_first_pieces()

    def meet_for_first_pieces(self) -> None:
        """Meet at a barrier: the copying warp waits until the scheduling warp has described the first pieces."""
        cute.arch.barrier(barrier_id=Barrier.FIRST_PIECES, number_of_threads=FIRST_PIECES_THREADS)

    @cute.jit
    def run(self, empty: cute.Pointer, copies: Copies):
        """Fill the ring, and refill each stage when it is released, until the cluster's work ends."""
        state = copies.state
        self.fill(copies)
        index, phase = Int32(0), Int32(0)
        while state[CopyState.ENDED] == 0:
            cute.arch.mbarrier_wait(empty + index, phase)
            if const_expr(self.p_in_keys):
                cute.arch.fence_proxy("async.shared", space="cta")
            self.produce(index, copies)
            index, phase = self.ring.advance(index, phase)

    @cute.jit
    def refill(self, index: Int32, phase: Int32, empty: cute.Pointer, warp_idx: Int32, copies: Copies):
        """Wait, as the copying warp, until stage `index` is released, and fill it. index -1: no stage."""
        if warp_idx == self.warp and index >= 0:
            cute.arch.mbarrier_wait(empty + index, phase)
            self.produce(index, copies)

    @cute.jit
    def produce(self, index: Int32, copies: Copies, requested: Int32 | int = 0):
        """Fill the free stage `index` with what comes next: rows of Q, a block of keys, or nothing at the end of the
        work. requested: whether these rows of Q have already been requested.

        The copying warp's state lies in shared memory: see CopyState.
        """
        state, pieces, full = copies.state, copies.pieces, copies.full
        lane = cute.arch.lane_idx()
        cute.arch.sync_warp()
        b, b_end, first_page = state[CopyState.BLOCK], state[CopyState.BLOCK_END], state[CopyState.FIRST_PAGE]
        if b < b_end:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + index, self.stage_bytes)
            if quotient(b * self.block + self.block - 1, self.page_size) >= first_page + TABLE_AHEAD:
                first_page = quotient(b * self.block, self.page_size)
                under_way = remainder(state[CopyState.NEXT_PIECE] - 1, PIECES_KEPT)
                cute.arch.sync_warp()
                self.read_table(Described(pieces, under_way), first_page, lane, copies)
            self.copy_keys(index, b, first_page, copies)
            cute.arch.sync_warp()
            if lane == 0:
                state[CopyState.BLOCK] = b + 1
        elif state[CopyState.ENDED] == 0:
            # A piece begins with Q, in one or two stages. If there is no piece, the work ends.
            number, q_stage = state[CopyState.NEXT_PIECE], state[CopyState.Q_STAGES]
            piece = Described(pieces, remainder(number, PIECES_KEPT))
            b_begin, b_end, q_stages = piece[Piece.BLOCK_BEGIN], piece[Piece.BLOCK_END], piece[Piece.Q_STAGES]
            cute.arch.sync_warp()
            if b_begin == b_end:
                # The consumers read the same description, and end too.
                if lane == 0:
                    state[CopyState.ENDED] = 1
                    if requested == 0:
                        cute.arch.mbarrier_arrive(full + index)
            else:
                if requested == 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + index, self.stage_bytes)
                    self.copy_q(index, piece[Piece.ROW] + q_stage * self.q_rows, copies)
                if lane == 0:
                    state[CopyState.Q_STAGES] = q_stage + 1
                if q_stage + 1 == q_stages:
                    self.read_table(piece, quotient(b_begin * self.block, self.page_size), lane, copies)
                    if lane == 0:
                        state[CopyState.BLOCK] = b_begin
                        state[CopyState.BLOCK_END] = b_end
                        state[CopyState.NEXT_PIECE] = number + 1
                        state[CopyState.Q_STAGES] = 0
        cute.arch.sync_warp()

    @cute.jit
    def copy_q(self, index: Int32, row: Int32, copies: Copies):
        """Copy `q_rows` rows of Q, from `row` on, into stage `index`."""
        tma = copies.tma
        boxes = self.layout.q_boxes(copies.keys)
        if const_expr(self.split_q):
            if const_expr(self.heads_first):
                self.copy_heads(index, row, boxes, copies)
            else:
                self.copy_columns(index, row, tma.q_atom, tma.q, self.columns_of(boxes, 0, self.q_tiles), copies)
            rope = self.columns_of(boxes, self.q_tiles, 1)
            self.copy_columns(index, row, tma.q_rope_atom, tma.q_rope, rope, copies)
        else:
            self.copy_columns(index, row, tma.q_atom, tma.q, boxes, copies)

    def columns_of(self, boxes: cute.Tensor, first: int, tiles: int) -> cute.Tensor:
        """The part of Q's boxes that has `tiles` column tiles from `first` on."""
        shape = (*boxes.shape[:2], tiles, *boxes.shape[3:])
        layout = cute.make_layout(shape, stride=boxes.stride)
        return cute.make_tensor(boxes.iterator + first * boxes.stride[2], layout)

    @cute.jit
    def copy_heads(self, index: Int32, row: Int32, boxes: cute.Tensor, copies: Copies):
        """Copy the latent columns of `q_rows` rows, from `row` on, into stage `index`, if q is [H, T, L]."""
        tma = copies.tma
        token, head = quotient(row, self.heads), remainder(row, self.heads)
        q_box = (self.box_heads, self.box_tokens, 64, self.q_tiles)
        rows = cute.make_tensor(
            boxes.iterator,
            cute.make_layout((*q_box, self.stages), stride=(*self.heads_first_strides(), boxes.stride[5])),
        )
        g_q = cute.local_tile(cute.domain_offset((head, token, 0, 0), tma.q), q_box, (0, 0, 0, 0))
        t_qs, t_qg = cpasync.tma_partition(
            tma.q_atom, 0, cute.make_layout(1), cute.group_modes(rows, 0, 4), cute.group_modes(g_q, 0, 4)
        )
        cute.copy(tma.q_atom, t_qg, t_qs[None, index], tma_bar_ptr=copies.full + index)

    @cute.jit
    def copy_columns(
        self, index: Int32, row: Int32, atom: cute.CopyAtom, q: cute.Tensor, boxes: cute.Tensor, copies: Copies
    ):
        """Copy `q_rows` rows of `q`, from `row` on, into the column tiles of `boxes` in stage `index`."""
        g_q = cute.local_tile(cute.domain_offset((row, 0, 0), q), (self.q_rows, 64, q.shape[2]), (0, 0, 0))
        t_qs, t_qg = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 3), cute.group_modes(g_q, 0, 3)
        )
        cute.copy(atom, t_qg, t_qs[None, 0, 0, index], tma_bar_ptr=copies.full + index)

    @cute.jit
    def read_table(self, piece: Described, first_page: Int32, lane: Int32, copies: Copies):
        """Read TABLE_AHEAD entries of a request's block table, from position `first_page` on, into `pages`.

        Pages past the request's last one become 0, because the table may hold anything there.
        """
        block_tables, pages, state = copies.block_tables, copies.pages, copies.state
        position = first_page + lane
        page = Int32(0)
        if position < block_tables.shape[1] and position * self.page_size < piece[Piece.KEYS]:
            page = block_tables[piece[Piece.REQUEST], position]
        pages[lane] = page
        if lane == 0:
            state[CopyState.FIRST_PAGE] = first_page
        cute.arch.sync_warp()

    @cute.jit
    def copy_keys(self, index: Int32, b: Int32, first_page: Int32, copies: Copies):
        """Copy block b of the request into stage `index`. In a cluster of two each CTA copies every other block, into
        the rings of both CTAs."""
        tma, pages, full = copies.tma, copies.pages, copies.full
        boxes = self.layout.boxes(copies.keys, self.box)
        tiles = self.column_tiles if const_expr(self.box == self.block) else 1
        # Modes of g_k: three modes of a box, the box in its page, the column tile, the page.
        g_k = cute.local_tile(tma.keys, (self.box, 64, tiles), (None, 0, None, None))
        t_ks, t_kg = cpasync.tma_partition(
            tma.keys_atom, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 3), cute.group_modes(g_k, 0, 3)
        )
        for h in cutlass.range_constexpr(self.block // self.box):
            key = b * self.block + h * self.box
            page = pages[quotient(key, self.page_size) - first_page]
            box = quotient(remainder(key, self.page_size), self.box)
            for c in cutlass.range(self.column_tiles // tiles, unroll=1):
                if const_expr(self.cluster == 1):
                    cute.copy(
                        tma.keys_atom, t_kg[None, box, c, page], t_ks[None, h, c, index], tma_bar_ptr=full + index
                    )
                elif remainder(b, 2) == copies.rank:
                    cute.copy(
                        tma.keys_atom, t_kg[None, box, c, page], t_ks[None, h, c, index], tma_bar_ptr=full + index,
                        mcast_mask=cutlass.Int16((1 << self.cluster) - 1),
                    )  # fmt: skip
