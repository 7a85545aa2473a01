"""The ring of shared-memory stages that decode's keys and queries go through: filling it, handing stages on."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from tsmla_kernels.sm90.decode.memory import (
    COPY_STATE_WORDS,
    FIRST_PIECES_THREADS,
    PIECE_BARRIERS,
    READ_THREADS,
    Barrier,
    CopyState,
    Described,
    Piece,
)
from tsmla_kernels.sm90.warp import WarpHelpers, quotient, remainder

TABLE_AHEAD = 32  # block-table entries read at once
FIRST_COPIES = 3  # stages that are asked for before the warps take their roles


class DecodeRing(WarpHelpers):
    """The ring of a decode kernel, which sets these.

    Attributes:
      page_size, cluster: as in config.DecodeConfig.
      depth: columns of a key.
      block: keys of a stage. box: those of one TMA copy, for a page may be shorter than a stage.
      q_rows: query rows that a stage takes.
      column_tiles: groups of 64 columns.
      stage_elements: elements from one stage to the next. itemsize: bytes of one.
      pieces_kept: places in the ring of pieces' descriptions.
      releasing_lanes: lanes of a value warp that arrive on `empty`. Must include every lane that reads `rescale` or
        `moved`, because racecheck tracks only arriving lanes.
    """

    page_size: int
    cluster: int
    depth: int
    block: int
    box: int
    q_rows: int
    column_tiles: int
    stage_elements: int
    itemsize: int
    pieces_kept: int
    releasing_lanes: int

    @cute.jit
    def begin_copies(self, copies: cutlass.Constexpr):
        """Ask for the first stages, of the first piece alone, by the warp that has just described it."""
        state = copies.state
        lane = cute.arch.lane_idx()
        if lane < COPY_STATE_WORDS:
            state[lane] = Int32(0)
        cute.arch.sync_warp()
        filled = Int32(0)
        while filled < FIRST_COPIES and (
            state[CopyState.NEXT_PIECE] == 0 or state[CopyState.BLOCK] < state[CopyState.BLOCK_END]
        ):
            self.produce(filled, copies)
            filled += 1
        if lane == 0:
            state[CopyState.FILLED] = filled
        cute.arch.sync_warp()

    @cute.jit
    def fill_ring(self, copies: cutlass.Constexpr):
        """Fill the stages that begin_copies left, by the same warp, or by another that sees what it noted."""
        state = copies.state
        # The first copies need but the first piece's description; the others are there at the barrier.
        behind = Int32(1)
        for i in cutlass.range(state[CopyState.FILLED], self.stages, unroll=1):
            if (
                behind == 1
                and state[CopyState.NEXT_PIECE] == 1
                and state[CopyState.BLOCK] == state[CopyState.BLOCK_END]
            ):
                behind = Int32(0)
                self.meet_for_first_pieces()
            self.produce(i, copies)
        if behind == 1:
            self.meet_for_first_pieces()

    def meet_for_first_pieces(self) -> None:
        """The scheduling and the copying warp: the first pieces are described."""
        cute.arch.barrier(barrier_id=Barrier.FIRST_PIECES, number_of_threads=FIRST_PIECES_THREADS)

    @cute.jit
    def produce(self, index: Int32, copies: cutlass.Constexpr):
        """Fill the free stage `index` with what comes next: rows of Q, as many as keys, a block of keys, or the end.

        Its state lies in shared memory: the registers of this warp are taken by O.
        """
        state, pieces, full = copies.state, copies.pieces, copies.full
        lane = cute.arch.lane_idx()
        stage_bytes = self.block * self.depth * self.itemsize
        cute.arch.sync_warp()
        b, b_end, first_page = state[CopyState.BLOCK], state[CopyState.BLOCK_END], state[CopyState.FIRST_PAGE]
        if b < b_end:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + index, stage_bytes)
            if quotient(b * self.block + self.block - 1, self.page_size) >= first_page + TABLE_AHEAD:
                first_page = quotient(b * self.block, self.page_size)
                under_way = remainder(state[CopyState.NEXT_PIECE] - 1, self.pieces_kept)
                cute.arch.sync_warp()
                self.read_table(Described(pieces, under_way), first_page, lane, copies)
            self.copy_keys(index, b, first_page, copies)
            cute.arch.sync_warp()
            if lane == 0:
                state[CopyState.BLOCK] = b + 1
        elif state[CopyState.ENDED] == 0:
            # A piece begins: its Q, in one or two stages; or there is none.
            number, q_stage = state[CopyState.NEXT_PIECE], state[CopyState.Q_STAGES]
            piece = Described(pieces, remainder(number, self.pieces_kept))
            b_begin, b_end, q_stages = piece[Piece.BLOCK_BEGIN], piece[Piece.BLOCK_END], piece[Piece.Q_STAGES]
            cute.arch.sync_warp()
            if b_begin == b_end:
                # The end. The consumers read the same description.
                if lane == 0:
                    state[CopyState.ENDED] = 1
                    cute.arch.mbarrier_arrive(full + index)
            else:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + index, stage_bytes)
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
    def boxes(self, s_k: cute.Tensor, keys: cutlass.Constexpr[int]):
        """The ring as TMA boxes of `keys` rows: (keys, 64, tiles, box in block, box in columns, stage)."""
        tiles = self.column_tiles if const_expr(keys == self.block) else 1
        return cute.make_tensor(
            s_k.iterator,
            cute.make_layout(
                ((8, keys // 8), 64, tiles, self.block // keys, self.column_tiles // tiles, self.stages),
                stride=((64, 512), 1, 64 * self.block, 64 * keys, 64 * self.block * tiles, self.stage_elements),
            ),
        )

    @cute.jit
    def q_boxes(self, s_k: cute.Tensor):
        """The ring as TMA boxes of Q's rows: where they have the keys' type, as many as keys."""
        return self.boxes(s_k, self.block)

    @cute.jit
    def copy_q(self, index: Int32, row: Int32, copies: cutlass.Constexpr):
        """`q_rows` rows of Q, from `row` on, into stage `index`."""
        tma = copies.tma
        boxes = self.q_boxes(copies.keys)
        g_q = cute.local_tile(cute.domain_offset((row, 0, 0), tma.q), (self.q_rows, 64, self.column_tiles), (0, 0, 0))
        t_qs, t_qg = cpasync.tma_partition(
            tma.q_atom, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 3), cute.group_modes(g_q, 0, 3)
        )
        cute.copy(tma.q_atom, t_qg, t_qs[None, 0, 0, index], tma_bar_ptr=copies.full + index)

    @cute.jit
    def read_table(self, piece: cutlass.Constexpr, first_page: Int32, lane: Int32, copies: cutlass.Constexpr):
        """The next TABLE_AHEAD pages of a piece's request, from position `first_page` of its table on, into `pages`.

        0 past its last page, where the table may hold anything.
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
    def copy_keys(self, index: Int32, b: Int32, first_page: Int32, copies: cutlass.Constexpr):
        """Block b of the request into stage `index`; in a cluster each CTA copies every other block, for both."""
        tma, pages, full = copies.tma, copies.pages, copies.full
        boxes = self.boxes(copies.keys, self.box)
        tiles = self.column_tiles if const_expr(self.box == self.block) else 1
        g_k = cute.local_tile(tma.keys, (self.box, 64, tiles), (None, 0, None, None))  # (.., box, columns, page)
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

    def signals(self, lane: Int32) -> cutlass.Boolean:
        """Whether a lane arrives in `signal`."""
        return lane % 4 == 0

    @cute.jit
    def signal(self, ready: cute.Pointer, index: Int32, lane: Int32):
        """One warp has done its part with a stage: Q's rows are in registers, or P is in shared memory.

        The eight lanes that write row factors arrive, each for its own: so racecheck can follow it too.
        """
        cute.arch.sync_warp()
        if self.signals(lane):
            cute.arch.mbarrier_arrive(ready + index)

    def signal_if(self, holds: Int32, ready: cute.Pointer, index: Int32) -> None:
        """signal, behind a warp's barrier, by the lanes where `holds` is 1. Without a branch: there the compiler would
        part the WGMMAs before from those behind, which begin late then."""
        cute.arch.inline_ptx(
            "{ .reg .pred holds; setp.ne.s32 holds, {$r0}, 0; @holds mbarrier.arrive.shared::cta.b64 _, [{$r1}]; }",
            read_only_args=[holds, (ready + index).toint()],
        )

    def q_is_read(self, number: Int32) -> None:
        """The scores' word that they have read a piece's Q, where the values' warps write its stage next by ordinary
        stores. `ready` says so too, but by eight lanes of a warp for all, and racecheck counts those alone."""
        cute.arch.barrier_arrive(
            barrier_id=Barrier.Q_READ + remainder(number, PIECE_BARRIERS), number_of_threads=READ_THREADS
        )

    def wait_for_q_read(self, number: Int32) -> None:
        """The values' part of it."""
        cute.arch.barrier(barrier_id=Barrier.Q_READ + remainder(number, PIECE_BARRIERS), number_of_threads=READ_THREADS)

    def keys_are_read(self, number: Int32) -> None:
        """Likewise, that they have read the keys of a piece's last block, where they do so by ordinary loads and the
        values zero some."""
        cute.arch.barrier_arrive(
            barrier_id=Barrier.KEYS_READ + remainder(number, PIECE_BARRIERS), number_of_threads=READ_THREADS
        )

    def wait_for_keys_read(self, number: Int32) -> None:
        """The values' part of it."""
        cute.arch.barrier(
            barrier_id=Barrier.KEYS_READ + remainder(number, PIECE_BARRIERS), number_of_threads=READ_THREADS
        )

    @cute.jit
    def release(self, index: Int32, empty: cute.Pointer):
        """One warp is done with a stage: told to every CTA that may write it."""
        if const_expr(self.releasing_lanes > 1):
            cute.arch.sync_warp()
            if cute.arch.lane_idx() < self.releasing_lanes:
                self.arrive(empty + index)
        else:
            with cute.arch.elect_one():
                self.arrive(empty + index)

    @cute.jit
    def arrive(self, barrier: cute.Pointer):
        """An arrival at `barrier` of each CTA of the cluster."""
        if const_expr(self.cluster == 1):
            cute.arch.mbarrier_arrive(barrier)
        else:
            for peer in cutlass.range_constexpr(self.cluster):
                cute.arch.mbarrier_arrive(barrier, peer)
