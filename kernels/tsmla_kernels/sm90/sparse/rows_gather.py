"""The warps that fill the ring of the kernel that has Q in registers, by `cp.async` of 16 bytes: a bulk copy would not
write WGMMA's layout, in which neighbouring chunks of a row are apart."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from tsmla_kernels.sm90.latent.memory import Described, Piece
from tsmla_kernels.sm90.sparse.config import BLOCK, GATHER_WARPS
from tsmla_kernels.sm90.sparse.gather import SelectedRows
from tsmla_kernels.sm90.sparse.memory import Gather
from tsmla_kernels.sm90.sparse.rows_stages import KEYS, LINE, STAGES_OF_BLOCK, TILE
from tsmla_kernels.sm90.warp import element, kept, uniform

LANES = 8  # lanes that copy a row: each copies one chunk of 16 bytes of every tile of columns
AT_ONCE = GATHER_WARPS * 32 // LANES  # rows that all gathering warps copy at once: half of a stage


class RowGatherer(SelectedRows):
    """The copies into the ring. Warp w copies rows 4 w to 4 w + 3 of every 16. A row whose slot does not exist becomes
    zeros."""

    @cute.jit
    def run(self, gather: Gather, warp: Int32):
        """Fill the ring, and refill each stage when it is released, until the CTA's work ends."""
        index, phase, number = Int32(0), Int32(0), Int32(0)
        lane = cute.arch.lane_idx()
        first = warp * 4 + lane // LANES
        chunk = lane % LANES
        place = kept(first * LINE + ((chunk ^ (first & 7)) << 4))
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
                self.announce_rows(index, gather)
                running = Int32(0)
            else:
                index, phase = self.copy_query(piece, first, chunk, place, (index, phase), gather)
                keys = piece[Piece.KEYS]
                column, left = b_begin * BLOCK + first, STAGES_OF_BLOCK * (b_end - b_begin)
                selected = element(gather.indices, Int64(piece[Piece.REQUEST]) * gather.indices.shape[1], 4)
                low, high = self.slot_at(selected, column, keys), self.slot_at(selected, column + AT_ONCE, keys)
                for _ in cutlass.range(left, unroll=1):
                    cute.arch.mbarrier_wait(gather.empty + index, phase ^ 1)
                    there = gather.ring + (index * (2 * self.ring.stage_elements) + place)
                    exist = self.copy_key(low, column, there, chunk, gather)
                    exist |= self.copy_key(high, column + AT_ONCE, there + AT_ONCE * LINE, chunk, gather) << 4
                    column += KEYS
                    # The next slots are loaded before their stage is released.
                    low, high = self.slot_at(selected, column, keys), self.slot_at(selected, column + AT_ONCE, keys)
                    exist = cute.arch.warp_redux_sync(exist << (lane // LANES), "or")
                    self.store_exist(exist, index, warp, gather)
                    self.announce_rows(index, gather)
                    index, phase = self.ring.advance(index, phase)
                number += 1

    @cute.jit
    def copy_query(
        self, piece: Described, first: Int32, chunk: Int32, place: Int32, stage: tuple[Int32, Int32], gather: Gather
    ):
        """Copy a piece's Q, 32 rows a stage. first, place: this lane's first row, and its place in a stage. stage: the
        index and phase of the first stage. Return those of the stage behind Q."""
        index, phase = stage
        source, step = self.query_row(piece, first, gather)
        source += chunk * 16
        rope = Int64(0)
        if const_expr(self.config.split_q):
            rope = self.rope_row(piece, first, gather) + chunk * 16
        left = piece[Piece.VALID_ROWS] - first
        for _ in cutlass.range(uniform(piece[Piece.Q_STAGES]), unroll=1):
            cute.arch.mbarrier_wait(gather.empty + index, phase ^ 1)
            there = gather.ring + (index * (2 * self.ring.stage_elements) + place)
            for half in cutlass.range_constexpr(2):
                row, exists = source + half * (AT_ONCE * step), Int32(left > AT_ONCE * half)
                self.copy_tiles(there + half * (AT_ONCE * LINE), row, exists, self.config.q_dim)
                if const_expr(self.config.split_q):
                    to = there + (half * (AT_ONCE * LINE) + self.config.q_dim // TILE * (KEYS * LINE))
                    columns = self.config.head_dim - self.config.q_dim
                    self.copy_tiles(to, rope + half * (AT_ONCE * self.rope_step(gather)), exists, columns)
            source += KEYS * step
            if const_expr(self.config.split_q):
                rope += KEYS * self.rope_step(gather)
            left -= KEYS
            self.announce_rows(index, gather)
            index, phase = self.ring.advance(index, phase)
        return index, phase

    @cute.jit
    def copy_key(self, slot: Int32, column: Int32, there: Int32, chunk: Int32, gather: Gather):
        """Copy this lane's part of the row of `slot` to `there`. Return whether the row exists."""
        row = self.locate(slot, column, gather)
        self.copy_tiles(there, row.address + chunk * 16, row.exists, self.config.head_dim)
        return row.exists

    @cute.jit
    def query_row(self, piece: Described, row: Int32, gather: Gather):
        """The address of a row of a piece's Q, of its latent columns if they are apart; and bytes from row to row."""
        row_bytes = self.config.q_dim * 2
        at, step = Int64(piece[Piece.ROW] + row), row_bytes
        if const_expr(self.config.heads_first):
            tokens = Int64(gather.q.shape[1])
            at, step = (piece[Piece.ROW_IN_REQUEST] + row) * tokens + piece[Piece.REQUEST], tokens * row_bytes
        return gather.q.iterator.toint() + at * row_bytes, step

    @cute.jit
    def rope_row(self, piece: Described, row: Int32, gather: Gather):
        """The address of the rope columns of a row of a piece's Q."""
        return gather.q_rope.iterator.toint() + Int64(piece[Piece.ROW] + row) * self.rope_step(gather)

    def rope_step(self, gather: Gather) -> Int32:
        """Bytes from row to row of q_rope."""
        return gather.q_rope.shape[1] * 2

    def copy_tiles(self, there: Int32, source: Int64, exists: Int32, columns: int) -> None:
        """Copy 16 bytes of each tile of `columns` columns of a row. If the row does not exist, nothing is read, and
        they become 0."""
        copies = "".join(
            f"cp.async.cg.shared.global.L2::128B [{{$r0}}+{tile * KEYS * LINE}], [{{$r1}}+{tile * LINE}], 16, {{$r2}};"
            for tile in range(columns // TILE)
        )
        cute.arch.inline_ptx(copies, read_only_args=[there, source, exists * 16])

    @cute.jit
    def store_exist(self, exist: Int32, index: Int32, warp: Int32, gather: Gather):
        """Store which of this warp's rows of stage `index` exist, as byte `warp` of the stage's first word of
        `valid`."""
        if cute.arch.lane_idx() == 0:
            there = gather.valid.iterator.toint() + (index * (4 * GATHER_WARPS) + warp)
            pointer = cute.make_ptr(cutlass.Uint8, there, cute.AddressSpace.smem, assumed_align=1)
            cute.make_tensor(pointer, cute.make_layout(1))[0] = cutlass.Uint8(exist)

    @cute.jit
    def announce_rows(self, index: Int32, gather: Gather):
        """Arrive on `full`: each lane when its copies have landed, and one lane at once, for what it has stored."""
        cute.arch.sync_warp()
        full = (gather.full + index).toint()
        cute.arch.inline_ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", read_only_args=[full])
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(gather.full + index)
