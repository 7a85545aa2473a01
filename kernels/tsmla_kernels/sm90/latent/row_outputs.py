"""Stores a piece's O, whose rows lie in the registers of a WGMMA accumulator, to `out` or to the workspaces."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.latent.combine import partial_row
from tsmla_kernels.sm90.latent.memory import Described, Piece
from tsmla_kernels.sm90.latent.shape import ROWS, LatentShape
from tsmla_kernels.sm90.latent.softmax import tree
from tsmla_kernels.sm90.warp import DTYPES, element, transpose_quad


class OutPlace(NamedTuple):
    """A thread of a value warpgroup: its half of the columns (0 or 1), its lane, and the first of its two rows."""

    half: Int32
    lane: Int32
    row_low: Int32


class OutArrays(Protocol):
    """The operands that take a piece's result."""

    @property
    def out(self) -> cute.Tensor: ...

    @property
    def partial_out(self) -> cute.Tensor: ...

    @property
    def partial_lse(self) -> cute.Tensor: ...


class RowOutputs:
    """Stores O, query rows by latents, of which a warpgroup has all rows and half of the latents.

    Attributes:
      latent, half: the latents of a row, and of a warpgroup. out_dtype, partial_dtype: dtypes of the two operands.
    """

    def __init__(self, shape: LatentShape) -> None:
        self.shape, self.latent, self.half = shape, shape.latent_dim, shape.latent_dim // 2
        self.out_dtype, self.partial_dtype = DTYPES[shape.out_dtype], DTYPES[shape.partial_dtype]

    @cute.jit
    def store(
        self,
        o: cute.Tensor,
        inverses: tuple[Float32, Float32],
        place: OutPlace,
        piece: Described,
        arrays: OutArrays,
        rank: Int32,
    ):
        """Store O times the rows' factors to `out` or to the piece's slot of partial_out. inverses: the factors of the
        lane's two rows."""
        half, lane = place.half, place.lane
        out_row, valid_rows, slot = piece[Piece.ROW], piece[Piece.VALID_ROWS], piece[Piece.SLOT]
        quad = lane % 4
        groups = self.half // 8
        column = half * self.half + quad * 8
        for i in cutlass.range_constexpr(2):
            row = place.row_low + 8 * i
            factor = inverses[i]
            # A lane has 2 columns of each group of 8. It stores 8 columns at once, as many as it has of four groups.
            if slot < 0:
                # The four lanes of a row exchange columns, so that each lane has one whole group of the four.
                line = cute.make_tensor(
                    element(arrays.out, Int64(out_row + row) * self.latent + column, 16),
                    cute.make_layout((8, groups // 4), stride=(1, 32)),
                )
                pairs = cute.make_rmem_tensor((8,), self.out_dtype)
                words = cute.recast_tensor(pairs, Int32)
                for g in cutlass.range_constexpr(groups // 4):
                    for j in cutlass.range_constexpr(4):
                        pairs[2 * j] = (o[i, 8 * g + 2 * j] * factor).to(self.out_dtype)
                        pairs[2 * j + 1] = (o[i, 8 * g + 2 * j + 1] * factor).to(self.out_dtype)
                    transpose_quad(words, quad)
                    if row < valid_rows:
                        cute.autovec_copy(pairs, line[None, g])
            else:
                # Columns are stored in lane order, which takes the fewest instructions; `combine` exchanges them.
                tile_row = rank * ROWS + row
                partial_lse = arrays.partial_lse
                if const_expr(self.shape.partial_needs_scale):
                    factor, scale = self.fit(o, i, factor)
                    if quad == 0 and row < valid_rows:
                        partial_lse[slot, 1 + half, tile_row] = scale
                line = cute.make_tensor(
                    element(arrays.partial_out, partial_row(slot, tile_row, self.shape) * self.latent + column, 16),
                    cute.make_layout((8, groups // 4), stride=(1, 32)),
                )
                eight = cute.make_rmem_tensor((8,), self.partial_dtype)
                for g in cutlass.range_constexpr(groups // 4):
                    for j in cutlass.range_constexpr(8):
                        eight[j] = (o[i, 8 * g + j] * factor).to(self.partial_dtype)
                    if row < valid_rows:
                        cute.autovec_copy(eight, line[None, g])

    @cute.jit
    def fit(self, o: cute.Tensor, i: cutlass.Constexpr[int], factor: Float32):
        """Return (factor / scale, scale) such that row i of O times factor / scale is in f16's range.

        The scale is a power of 2, so scaling loses no bits. f16 then keeps 11 bits of a number that is at least 2^-14
        of the greatest in the row's half; bf16 would keep 8.
        """
        tops = [cute.math.absf(o[i, c]) for c in range(self.half // 4)]
        # factor / scale must also be finite for a row of zeros.
        top = cute.arch.fmax(tree(cute.arch.fmax, tops), 2.0**-100)
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2))
        # The greatest power of 2 that is at most top * factor and has a reciprocal.
        power = (top * factor).bitcast(Int32) & 0x7F800000
        power = cutlass.min(cutlass.max(power, 1 << 23), 253 << 23)
        return factor * (Int32(254 << 23) - power).bitcast(Float32), power.bitcast(Float32)
