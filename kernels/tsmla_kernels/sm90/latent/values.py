"""O^T += V^T P^T with V^T widened to f16 in registers: the walk of the value warpgroups, widening, and the epilogue.

ldmatrix transposes V into registers; V^T is widened there, and f16 WGMMA reads V^T from registers. If P is e4m3, V^T
keeps its dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu.warpgroup import Field, OperandSource

from tsmla_kernels.sm90.latent.combine import partial_row
from tsmla_kernels.sm90.latent.memory import (
    SCHEDULE_WARP,
    Blocks,
    Described,
    Piece,
    Schedule,
    Shared,
    two_rows,
)
from tsmla_kernels.sm90.latent.ring import Ring
from tsmla_kernels.sm90.latent.shape import ROWS, LatentShape
from tsmla_kernels.sm90.latent.walk import Walk
from tsmla_kernels.sm90.warp import DTYPES, element

AHEAD = 2  # fragments of V^T (64 latents, 32 keys) that a warpgroup has in registers or is loading, as fp8
WIDE = 4  # halves of fragments (64 latents, 16 keys) that a warpgroup has in registers as f16


class Held(NamedTuple):
    """A value warpgroup's registers from piece to piece.

    Attributes:
      mma_pv: the MMA of V^T P^T. acc: its accumulators, O^T.
      o: `acc` with the modes (query row of two, latent of two, eight query rows, tile of latents).
      wide: halves of V^T's fragments in P's dtype. narrow: fragments in the keys' dtype. Both are None if V^T is not
        read into registers.
      offset: the offset of the lane's first values in a stage.
      thread, lane: the thread's index in its warpgroup and in its warp.
      factors: the factors of the lane's rows (see Shared.inverse), if the kernel reads these before it releases a
        piece's last stage; otherwise None.
    """

    mma_pv: cute.TiledMma
    acc: cute.Tensor
    o: cute.Tensor
    wide: cute.Tensor | None
    narrow: cute.Tensor | None
    offset: Int32
    thread: Int32
    lane: Int32
    factors: cute.Tensor | None = None


class Reading(NamedTuple):
    """The addresses from which values are read, in the stage of this block and in that of the next block; whether to
    wait for the next block's keys; and the barrier and parity of the next block's stage."""

    here: Int32
    next_here: Int32
    awaited: Int32
    full: cute.Pointer
    phase: Int32


class OutRows(NamedTuple):
    """A lane's rows of out.

    Attributes:
      inverse, kept: the rows' factors are column `kept` of Shared.inverse. factors: the same factors in registers, or
        None.
      first_latent, lane: the lane's first latent, and the lane's index in the warp.
    """

    inverse: cute.Tensor
    kept: Int32
    first_latent: Int32
    lane: Int32
    factors: cute.Tensor | None = None


class OutArrays(Protocol):
    """The operands to which O is stored: out [N, L], and partial_out with the pieces' results."""

    out: cute.Tensor
    partial_out: cute.Tensor


class Copier(Protocol):
    """The warps that fill the ring's stages."""

    def meet_for_first_pieces(self) -> None:
        """Meet the copying warps at a barrier, to tell them that the first pieces have been described."""


ReadValues = Callable[[Int32, int, cute.Tensor], None]
"""Reads a fragment of V^T: (address, fragment, destination)."""
StoreRows = Callable[[cute.Pointer, cute.Tensor, OutRows, Int32, type[cutlass.Numeric]], None]
"""Stores a lane's part of O: (target, O, rows, valid rows, dtype)."""


class Values(Protocol):
    """The steps of a value warpgroup's walk through its pieces: see ValueWalk."""

    @property
    def wide(self) -> WideValues: ...

    @property
    def ring(self) -> Ring: ...

    @property
    def walk(self) -> Walk: ...

    @property
    def copier(self) -> Copier: ...

    @property
    def lookahead(self) -> int:
        """How many pieces ahead the scheduling warp describes: after piece n it describes piece n + lookahead."""

    def fragments(self) -> tuple[cute.Tensor | None, cute.Tensor | None, cute.Tensor | None]:
        """`wide`, `narrow` and `factors` of Held."""

    def first_tile(self, half: Int32, warp: Int32) -> Int32:
        """The index of the first tile of 16 latents of warp `warp` of value warpgroup `half`."""

    def offset(self, half: Int32, first_tile: Int32, lane: Int32) -> Int32:
        """The offset in a stage of this lane's first values."""

    def first_latent(self, first_tile: Int32) -> Int32:
        """The column of out and partial_out that holds the first latent of tile `first_tile`."""

    def wait_for_piece(self, index: Int32, phase: Int32, shared: Shared) -> None:
        """Wait until the next piece has been described; `index` is its first stage."""

    def pass_q(
        self, piece: Described, number: Int32, index: Int32, phase: Int32, shared: Shared
    ) -> tuple[Int32, Int32]:
        """Release the stages that held Q, if Q goes through the ring. Return the stage after them and its parity."""

    def add_blocks(
        self, blocks: Blocks, number: Int32, index: Int32, phase: Int32, held: Held, shared: Shared
    ) -> tuple[Int32, Int32]:
        """Add P V of a piece's key blocks to O. Return the stage after them and its parity."""

    def look_at(self, piece: Described, held: Held, arrays: OutArrays) -> None:
        """Use a piece's O before it is stored. A kernel that has no such use does nothing here."""

    def wait_for_sums(self, number: Int32) -> None:
        """Wait until the factors of piece `number`'s rows have been written."""

    def store_rows(
        self, target: cute.Pointer, o: cute.Tensor, rows: OutRows, valid_rows: Int32, dtype: type[cutlass.Numeric]
    ) -> None:
        """Store a lane's part of O."""


class ValueWalk:
    """A value warpgroup's walk through its pieces, for which `steps` does the work."""

    def __init__(self, steps: Values) -> None:
        self.steps = steps

    @cute.jit
    def run(
        self,
        arrays: OutArrays,
        shared: Shared,
        mma_pv: cute.TiledMma,
        half: Int32,
        warp_idx: Int32,
        schedule: Schedule,
    ):
        """Run warpgroups 1 and 2: O^T[half] += V^T[half] P^T and the epilogue. One of their warps also schedules.

        A warp has a quarter of the half's latents, in tiles of 16 (if keys are fp8, a tile is 16 bytes of a key,
        which ldmatrix takes as one row). A lane has two latents of a tile: rows g and g + 8 of the product, where g is
        lane // 4.
        """
        tidx, _, _ = cute.arch.thread_idx()
        t = tidx % 128
        lane = t % 32
        rows = self.steps.wide.p_rows
        acc = cute.make_rmem_tensor(mma_pv.get_slice(t).partition_shape_C((self.steps.wide.half, rows)), Float32)
        mma_pv.set(Field.ACCUMULATE, True)
        # Modes: one of two query rows, one of two latents, group of eight query rows, tile of 64 latents.
        layout = cute.make_layout((2, 2, rows // 8, self.steps.wide.m_tiles), stride=(1, 2, 4, rows // 2))
        o = cute.make_tensor(acc.iterator, layout)
        wide, narrow, factors = self.steps.fragments()
        first_tile = self.steps.first_tile(half, t // 32)
        held = Held(
            mma_pv=mma_pv,
            acc=acc,
            o=o,
            wide=wide,
            narrow=narrow,
            offset=self.steps.offset(half, first_tile, lane),
            thread=t,
            lane=lane,
            factors=factors,
        )

        index, phase, number = Int32(0), Int32(0), Int32(0)
        if warp_idx == SCHEDULE_WARP:
            # The next pieces are described only now, so that the first copies do not wait for their descriptions.
            for i in cutlass.range(1, self.steps.lookahead, unroll=1):
                self.steps.walk.next_piece(i, schedule)
            self.steps.copier.meet_for_first_pieces()
        running = Int32(1)
        while running == 1:
            self.steps.wait_for_piece(index, phase, shared)
            blocks = self.steps.ring.described(number, shared.pieces)
            if blocks.begin == blocks.end:
                running = Int32(0)
            else:
                index, phase = self.steps.pass_q(blocks.piece, number, index, phase, shared)
                index, phase = self.steps.add_blocks(blocks, number, index, phase, held, shared)
                self.steps.look_at(blocks.piece, held, arrays)
                self.steps.wait_for_sums(number)
                kept_at, first_latent = number % self.steps.ring.inverses_kept, self.steps.first_latent(first_tile)
                out_rows = OutRows(shared.inverse, kept_at, first_latent, lane, factors)
                self.steps.wide.store(o, out_rows, blocks.piece, arrays, schedule.rank, self.steps.store_rows)
                if warp_idx == SCHEDULE_WARP:
                    self.steps.walk.next_piece(number + self.steps.lookahead, schedule)
                number += 1


class WideValues:
    """P V with V^T in registers: widened to f16, P's dtype; or, if P is e4m3, as it is.

    Attributes:
      halves: how many products take the 32 keys of a fragment of V^T.
      half: how many latents a value warpgroup has. m_tiles: how many tiles of 64 latents these are.
      neighbours: how many neighbouring latents a lane has.
      latent: L. p_rows, p_dtype: as in Ring. out_dtype, partial_dtype: the dtypes of out and of partial_out.
    """

    def __init__(self, shape: LatentShape, ring: Ring, neighbours: int = 2) -> None:
        self.shape, self.ring, self.neighbours = shape, ring, neighbours
        self.latent, self.half = shape.latent_dim, shape.latent_dim // 2
        self.m_tiles = self.half // 64
        self.out_dtype, self.partial_dtype = DTYPES[shape.out_dtype], DTYPES[shape.partial_dtype]
        self.p_dtype, self.p_rows = ring.p_dtype, ring.p_rows
        self.halves = 2 if ring.p_dtype.width == 16 else 1

    def mma(self) -> cute.TiledMma:
        """The MMA of V^T P^T: 64 latents by query rows."""
        dtype, k_major = self.p_dtype, OperandMajorMode.K
        return sm90.make_trivial_tiled_mma(
            dtype, dtype, k_major, k_major, Float32, (1, 1, 1), (64, self.p_rows), OperandSource.RMEM
        )

    def fragments(self) -> tuple[cute.Tensor, cute.Tensor, None]:
        """`wide`, `narrow` and `factors` of Held."""
        wide = cute.make_rmem_tensor((16 // self.halves, WIDE), self.p_dtype)
        return wide, cute.make_rmem_tensor((4, AHEAD), Int32), None

    @cute.jit
    def read_on(
        self, n: cutlass.Constexpr[int], reading: Reading, narrow: cute.Tensor, read_values: ReadValues
    ):  # fmt: skip
        """If half n, which `widen` has used, is the last half of a fragment, read another fragment in its place: the
        next unread one of this block, or else one of the next block's first ones, once that block's keys have
        arrived."""
        g, groups = n // self.halves, 2 * self.m_tiles
        if const_expr((n + 1) % self.halves == 0):
            if const_expr(g + AHEAD < groups):
                read_values(reading.here, g + AHEAD, narrow)
            else:
                if const_expr(g + AHEAD == groups):
                    if reading.awaited == 1:
                        cute.arch.mbarrier_wait(reading.full, reading.phase)
                read_values(reading.next_here, g % AHEAD, narrow)

    @cute.jit
    def widen(self, n: cutlass.Constexpr[int], narrow: cute.Tensor, wide: cute.Tensor):
        """Widen half n of the fragments of V^T to f16, with two keys of a latent side by side; or, if P is e4m3, order
        the bytes of fragment n, with four keys of a latent side by side."""
        if const_expr(self.halves == 1):
            packed = cute.recast_tensor(wide[None, n % WIDE], Int32)
            for i in cutlass.range_constexpr(4):
                low, high = narrow[i // 2 * 2, n % AHEAD], narrow[i // 2 * 2 + 1, n % AHEAD]
                packed[i] = Int32(cute.arch.prmt(low, high, 0x7531 if i % 2 else 0x6420))
        else:
            words = cute.make_rmem_tensor((2,), Int32)
            for i in cutlass.range_constexpr(2):
                word = narrow[2 * (n % 2) + i, n // 2 % AHEAD]
                words[i] = Int32(cute.arch.prmt(word, word, 0x3120))
            cute.make_tensor(wide[None, n % WIDE].iterator, cute.make_layout(8)).store(
                cute.recast_tensor(words, self.ring.dtype).load().to(self.p_dtype)
            )

    @cute.jit
    def rescale_out(self, o: cute.Tensor, rescale: cute.Tensor, flag: Int32, index: Int32, lane: Int32):
        """Multiply O's rows by `rescale`. The flag of lane i says whether the 16 rows from row 16 i on need that."""
        flags = cute.arch.vote_ballot_sync(flag != 0)
        if flags != 0:
            factors = cute.make_rmem_tensor((2,), Float32)
            for v in cutlass.range_constexpr(self.p_rows // 8):
                if (flags & (1 << (v // 2))) != 0:
                    factors.fill(1.0)
                    if lane < self.ring.releasing_lanes:
                        two_rows(rescale, index, v, lane, factors)
                    for i in cutlass.range_constexpr(2):
                        factors[i] = cute.arch.shuffle_sync(factors[i], lane % 4)
                    for i in cutlass.range_constexpr(2):
                        for tile in cutlass.range_constexpr(self.m_tiles):
                            for e in cutlass.range_constexpr(2):
                                o[i, e, v, tile] = o[i, e, v, tile] * factors[i]

    @cute.jit
    def store(
        self, o: cute.Tensor, rows: OutRows, piece: Described, arrays: OutArrays, rank: Int32, store_rows: StoreRows
    ):  # fmt: skip
        """Store O times the rows' factors to `out` or to the piece's slot of partial_out, by `store_rows`."""
        lane = rows.lane
        out_row, valid_rows, slot = piece[Piece.ROW], piece[Piece.VALID_ROWS], piece[Piece.SLOT]
        # The neighbouring latents of eight lanes fill whole sectors of memory.
        row_low, column = lane % 4 * 2, rows.first_latent + lane // 4 * self.neighbours
        if slot < 0:
            target = element(
                arrays.out, Int64(out_row + row_low) * self.latent + column, self.neighbours * self.out_dtype.width // 8
            )
            store_rows(target, o, rows, valid_rows, self.out_dtype)
        else:
            row = partial_row(slot, rank * ROWS + row_low, self.shape)
            target = element(
                arrays.partial_out, row * self.latent + column, self.neighbours * self.partial_dtype.width // 8
            )
            store_rows(target, o, rows, valid_rows, self.partial_dtype)

    @cute.jit
    def store_pairs(
        self, target: cute.Pointer, o: cute.Tensor, rows: OutRows, valid_rows: Int32, dtype: type[cutlass.Numeric]
    ):
        """Store a lane's part of O from `target` on: for two of every eight query rows, two neighbouring latents of
        each tile of 16."""
        lines = cute.make_tensor(
            target,
            cute.make_layout((2, 2, self.p_rows // 8, self.m_tiles), stride=(1, self.latent, 8 * self.latent, 16)),
        )
        pair = cute.make_rmem_tensor((2,), dtype)
        factors = cute.make_rmem_tensor((2,), Float32)
        for v in cutlass.range_constexpr(self.p_rows // 8):
            if 8 * v < valid_rows:
                two_rows(rows.inverse, rows.kept, v, rows.lane, factors)
                for i in cutlass.range_constexpr(2):
                    if rows.lane % 4 * 2 + (8 * v + i) < valid_rows:
                        for tile in cutlass.range_constexpr(self.m_tiles):
                            for e in cutlass.range_constexpr(2):
                                pair[e] = (o[i, e, v, tile] * factors[i]).to(dtype)
                            cute.autovec_copy(pair, lines[None, i, v, tile])
