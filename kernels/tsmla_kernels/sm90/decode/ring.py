"""The ring of shared-memory stages that decode's keys and queries go through: filling it, handing stages on."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from tsmla_kernels.sm90.warp import WarpHelpers, quotient, remainder

TABLE_AHEAD = 32  # block-table entries read at once
Q_THREADS = 384  # of the scores' warpgroup and the two of the values
FIRST_COPIES = 3  # stages that are asked for before the warps take their roles


class DecodeRing(WarpHelpers):
    """The ring of a decode kernel, which sets these.

    Attributes:
      page_size, cluster: as in choose.DecodeConfig.
      depth: columns of a key.
      block: keys of a stage. box: those of one TMA copy, for a page may be shorter than a stage.
      q_rows: query rows that a stage takes.
      column_tiles: groups of 64 columns.
      stage_elements: elements from one stage to the next. itemsize: bytes of one.
      descriptors: places in the ring of pieces' descriptions.
      leavers: lanes of a warp of the values that arrive when it leaves a stage: all that read what the scores said of
        their maxima, if racecheck is to follow that.
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
    descriptors: int
    leavers: int

    @cute.jit
    def begin_copies(self, copies: cutlass.Constexpr):
        """Ask for the first stages, of the first piece alone, by the warp that has just described it."""
        fill = copies[7]
        lane = cute.arch.lane_idx()
        if lane < 8:
            fill[lane] = Int32(0)
        cute.arch.sync_warp()
        filled = Int32(0)
        while filled < FIRST_COPIES and (fill[3] == 0 or fill[0] < fill[1]):
            self.produce(filled, copies)
            filled += 1
        if lane == 0:
            fill[6] = filled
        cute.arch.sync_warp()

    @cute.jit
    def fill_ring(self, copies: cutlass.Constexpr):
        """Fill the stages that begin_copies left, by the same warp, or by another that sees what it noted."""
        fill = copies[7]
        # The first copies need but the first piece's description; the others are there at the barrier.
        behind = Int32(1)
        for i in cutlass.range(fill[6], self.stages, unroll=1):
            if behind == 1 and fill[3] == 1 and fill[0] == fill[1]:
                behind = Int32(0)
                cute.arch.barrier(barrier_id=2, number_of_threads=64)
            self.produce(i, copies)
        if behind == 1:
            cute.arch.barrier(barrier_id=2, number_of_threads=64)

    @cute.jit
    def produce(self, index: Int32, copies: cutlass.Constexpr):
        """Fill the free stage `index` with what comes next: rows of Q, as many as keys, a block of keys, or the end.

        Its state lies in shared memory: the registers of this warp are taken by O.
        """
        (
            tma_q, tma_q_tensor, tma_k, tma_k_tensor, block_tables, s_k, descriptor, fill, pages, full, rank,
        ) = copies[:11]  # fmt: skip
        lane = cute.arch.lane_idx()
        stage_bytes = self.block * self.depth * self.itemsize
        cute.arch.sync_warp()
        b, b_end, first = fill[0], fill[1], fill[2]
        if b < b_end:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + index, stage_bytes)
            if quotient(b * self.block + self.block - 1, self.page_size) >= first + TABLE_AHEAD:
                first = quotient(b * self.block, self.page_size)
                under_way = remainder(fill[3] - 1, self.descriptors)  # fill[3] is the piece after this one
                cute.arch.sync_warp()
                self.read_table(block_tables, descriptor, under_way, fill, pages, first, lane)
            self.copy_keys(tma_k, tma_k_tensor, self.boxes(s_k, self.box), pages, full, index, b, first, rank)
            cute.arch.sync_warp()
            if lane == 0:
                fill[0] = b + 1
        elif fill[5] == 0:
            # A piece begins: its Q, in one or two stages; or there is none.
            piece, q_part = fill[3], fill[4]
            at = remainder(piece, self.descriptors)
            b_begin, b_end, q_stages = descriptor[0, at], descriptor[1, at], descriptor[9, at]
            cute.arch.sync_warp()
            if b_begin == b_end:
                # The end. The consumers read the same descriptor.
                if lane == 0:
                    fill[5] = 1
                    cute.arch.mbarrier_arrive(full + index)
            else:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + index, stage_bytes)
                row = descriptor[5, at] + q_part * self.q_rows
                self.copy_q(tma_q, tma_q_tensor, self.q_boxes(s_k), full, index, row)
                if lane == 0:
                    fill[4] = q_part + 1
                if q_part + 1 == q_stages:
                    self.read_table(
                        block_tables, descriptor, at, fill, pages, quotient(b_begin * self.block, self.page_size), lane
                    )
                    if lane == 0:
                        fill[0] = b_begin
                        fill[1] = b_end
                        fill[3] = piece + 1
                        fill[4] = 0
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
    def copy_q(
        self,
        tma_q: cute.CopyAtom,
        tma_q_tensor: cute.Tensor,
        boxes: cute.Tensor,
        barriers: cute.Pointer,
        index: Int32,
        row: Int32,
    ):
        """`q_rows` rows of Q, from `row` on, into box `index`."""
        g_q = cute.local_tile(
            cute.domain_offset((row, 0, 0), tma_q_tensor), (self.q_rows, 64, self.column_tiles), (0, 0, 0)
        )
        t_qs, t_qg = cpasync.tma_partition(
            tma_q, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 3), cute.group_modes(g_q, 0, 3)
        )
        cute.copy(tma_q, t_qg, t_qs[None, 0, 0, index], tma_bar_ptr=barriers + index)

    @cute.jit
    def read_table(
        self,
        block_tables: cute.Tensor,
        descriptor: cute.Tensor,
        at: Int32,
        fill: cute.Tensor,
        pages: cute.Tensor,
        first: Int32,
        lane: Int32,
    ):
        """The next TABLE_AHEAD pages of piece `at`'s request, from position `first` of its table on, into `pages`.

        0 past its last page, where the table may hold anything.
        """
        position = first + lane
        page = Int32(0)
        if position < block_tables.shape[1] and position * self.page_size < descriptor[2, at]:
            page = block_tables[descriptor[8, at], position]
        pages[lane] = page
        if lane == 0:
            fill[2] = first
        cute.arch.sync_warp()

    @cute.jit
    def copy_keys(
        self,
        tma_k: cute.CopyAtom,
        tma_k_tensor: cute.Tensor,
        boxes: cute.Tensor,
        pages: cute.Tensor,
        full: cute.Pointer,
        index: Int32,
        b: Int32,
        first: Int32,
        rank: Int32,
    ):
        """Block b of the request into box `index`; in a cluster each CTA copies every other block, for both."""
        tiles = self.column_tiles if const_expr(self.box == self.block) else 1
        g_k = cute.local_tile(tma_k_tensor, (self.box, 64, tiles), (None, 0, None, None))  # (.., box, columns, page)
        t_ks, t_kg = cpasync.tma_partition(
            tma_k,
            0,
            cute.make_layout(1),
            cute.group_modes(boxes, 0, 3),
            cute.group_modes(g_k, 0, 3),
        )
        for h in cutlass.range_constexpr(self.block // self.box):
            key = b * self.block + h * self.box
            page = pages[quotient(key, self.page_size) - first]
            box = quotient(remainder(key, self.page_size), self.box)
            for c in cutlass.range(self.column_tiles // tiles, unroll=1):
                if const_expr(self.cluster == 1):
                    cute.copy(tma_k, t_kg[None, box, c, page], t_ks[None, h, c, index], tma_bar_ptr=full + index)
                elif remainder(b, 2) == rank:
                    cute.copy(
                        tma_k, t_kg[None, box, c, page], t_ks[None, h, c, index], tma_bar_ptr=full + index,
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

    def q_is_read(self, piece: Int32) -> None:
        """The scores' word that they have read a piece's Q, where the values' warps write its stage next by ordinary
        stores. `ready` says so too, but by eight lanes of a warp for all, and racecheck counts those alone."""
        cute.arch.barrier_arrive(barrier_id=self._q_barrier(piece), number_of_threads=Q_THREADS)

    def wait_for_q_read(self, piece: Int32) -> None:
        """The values' part of it."""
        cute.arch.barrier(barrier_id=self._q_barrier(piece), number_of_threads=Q_THREADS)

    def keys_are_read(self, piece: Int32) -> None:
        """Likewise, that they have read the keys of a piece's last block, where they do so by ordinary loads and the
        values zero some."""
        cute.arch.barrier_arrive(barrier_id=4 + self._q_barrier(piece), number_of_threads=Q_THREADS)

    def wait_for_keys_read(self, piece: Int32) -> None:
        """The values' part of it."""
        cute.arch.barrier(barrier_id=4 + self._q_barrier(piece), number_of_threads=Q_THREADS)

    def _q_barrier(self, piece: Int32) -> Int32:
        """One of four: the scores are fewer pieces ahead of the values."""
        return 3 + remainder(piece, 4)

    @cute.jit
    def leave(self, index: Int32, empty: cute.Pointer):
        """One warp is done with a stage: told to every CTA that may write it."""
        if const_expr(self.leavers > 1):
            cute.arch.sync_warp()
            if cute.arch.lane_idx() < self.leavers:
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
