"""Queries of 16 bits become f16, the dtype in which they are multiplied by keys that are widened in registers.

bf16 queries that are too large or too small for f16 are multiplied by a power of 2.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.latent.softmax import any_of_warps, sync_softmax, tree
from tsmla_kernels.sm90.warp import kept, quotient, remainder

# bf16 queries become f16 unscaled if the greatest of a row tile's converted numbers is in [2^-4, 2^15): then only
# numbers below 2^-17 lose bits. The bounds are written as f16's bits.
PLAIN_FROM, PLAIN_TO = 11 << 10, 30 << 10
MOVE, FIND, SCALE = 0, 1, 2  # passes over Q: see `move` and `scaled_rows`
TILE = 4  # groups of 16 columns in a tile of 64
AT_ONCE = 4  # groups of 16 columns that a thread moves at once
WARPS = 4  # warps of the softmax warpgroup


def q_pair_place(pair):
    """The new place of pair `pair` among the eight pairs of 16 columns of Q. Of 16 columns of a key, lane q of a quad
    has the four from 4 q on, which WGMMA takes as columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9. Q's columns are permuted
    to match."""
    return 4 * (pair % 2) + pair // 2


class Row(NamedTuple):
    """A thread's row of Q.

    Attributes:
      target: the address to which the row is moved. source: the result of QuerySource.row. number: the row's index in
        the tile.
      first: the thread's index among the threads of the row; also the index of its first group of 16 columns.
      valid: -1, or 0 if the row is past the tile's end.
    """

    target: Int32
    source: Int32 | Int64
    number: Int32
    first: Int32
    valid: Int32


class Group(NamedTuple):
    """A group of 16 columns of a row: the index of its tile of 64 columns, and the group's index there (0 to 3)."""

    tile: Int32
    group: Int32


Sources = tuple[Int32, Int32] | tuple[Int32, Int64]
"""Two addresses of a row tile's Q, in shared or global memory, whose meaning a QuerySource knows."""


class QuerySource(Protocol):
    """The place from which rows of Q are read."""

    def row(self, sources: Sources, row: Int32, kind: int) -> Int32 | Int64:
        """The address of row `row`, in the pass `kind` over Q."""

    def words(self, source: Int32 | Int64, row: Int32, tile: Int32, chunk: Int32, kind: int) -> cute.Tensor:
        """Four words of the row at `source`: its 16 bytes with index `chunk` in the tile `tile` of 64 columns."""


class QueryCopy:
    """Moves a row tile's Q to its own place, in f16.

    Attributes:
      source: the place from which Q is read. q_dtype: the dtype of Q there.
      depth: columns of a row. p_rows: rows in Q's place.
      natural_from: the index of the first group of 16 columns that is not permuted; later groups are not either.
      as_they_are: whether the groups that are not permuted also keep their dtype.
      in_place: whether Q is read from the place to which it is moved.
    """

    def __init__(
        self,
        source: QuerySource,
        *,
        depth: int,
        p_rows: int,
        q_dtype: type[cutlass.Numeric],
        natural_from: int | None = None,
        as_they_are: bool = False,
        in_place: bool = False,
    ) -> None:
        self.source, self.depth, self.p_rows, self.q_dtype = source, depth, p_rows, q_dtype
        self.natural_from = depth // 16 if natural_from is None else natural_from
        self.as_they_are, self.in_place = as_they_are, in_place

    @cute.jit
    def keep(self, target: Int32, sources: Sources, valid_rows: Int32, t: Int32, tops: cute.Tensor):
        """Move Q to `target`, in f16. Return the factor by which the logits must be multiplied.

        The pairs of columns in each group of 16 are permuted: see q_pair_place. Rows past the tile's end become 0.
        tops: scratch.
        """
        top = self.move(target, sources, valid_rows, t)
        factor = Float32(1.0)
        if const_expr(self.q_dtype == cutlass.BFloat16):
            top = cutlass.max(top & 0xFFFF, (top >> 16) & 0xFFFF)
            big = any_of_warps(Int32(top >= PLAIN_TO))
            enough = any_of_warps(Int32(top >= PLAIN_FROM))
            if big != 0 or enough == 0:
                # Scale the greatest finite magnitude to [2^14, 2^15).
                top = self.scaled_rows(target, sources, valid_rows, t, Float32(1.0), FIND)
                top = cute.arch.warp_redux_sync(top, "max")
                if t % 32 == 0:
                    tops[t // 32, 0] = Int32(top).bitcast(Float32)
                sync_softmax()
                greatest = tree(cute.arch.fmax, [tops[w, 0] for w in range(WARPS)])
                power = (greatest.bitcast(Int32) & 0x7F800000) - (14 << 23)
                # Clamp to powers of 2 whose reciprocal is a normal number. If Q is 0, it stays 0.
                power = cutlass.min(cutlass.max(power, 1 << 23), 253 << 23)
                factor = power.bitcast(Float32)
                inverse = (Int32(254 << 23) - power).bitcast(Float32)
                self.scaled_rows(target, sources, valid_rows, t, inverse, SCALE)
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_softmax()
        return factor

    @cute.jit
    def move(self, target: Int32, sources: Sources, valid_rows: Int32, t: Int32):
        """Move Q to `target`, unscaled. Return, as a pair of f16, the greatest magnitudes of the numbers that the
        thread has converted to f16; NaN is ignored. If queries are f16, both are 0.

        A thread reads AT_ONCE groups of 16 columns before it writes the first one, because loads take time. If Q is
        moved in place, no barrier separates reading from writing, because one thread alone reads and writes a group, or
        zeroes it past the tile's end.
        """
        t = kept(t)  # so that addresses are computed for each piece anew, and need no registers between pieces
        number, first = remainder(t, self.p_rows), quotient(t, self.p_rows)
        source = self.source.row(sources, number, MOVE)
        row = Row(target + number * 128, source, number, first, -Int32(number < valid_rows))
        threads, groups, top = 128 // self.p_rows, self.depth // 16, Int32(0)
        ranges = [(0, self.natural_from), (self.natural_from, groups)]
        if const_expr(self.in_place):
            if number >= valid_rows:
                self.clear(row)
            if const_expr(self.as_they_are or self.q_dtype == cutlass.Float16):
                ranges.pop()
        for begin, end in ranges:
            natural = begin == self.natural_from
            # All threads have equally many groups, except that the first threads may have one more.
            each = (end - begin) // threads
            batched = each - each % AT_ONCE
            if const_expr(batched > 0):
                for base in cutlass.range(begin, begin + batched * threads, AT_ONCE * threads, unroll=1):
                    top = self.move_groups(row, quotient(base, TILE), (0, AT_ONCE), top, natural)
            if const_expr(batched < each):
                top = self.move_groups(row, begin // TILE, (batched, each), top, natural)
            if const_expr((end - begin) % threads > 0):
                if first < (end - begin) % threads:
                    top = self.move_groups(row, begin // TILE, (each, each + 1), top, natural)
        return top

    @cute.jit
    def clear(self, row: Row):
        """Zero this thread's groups of 16 columns."""
        threads = 128 // self.p_rows
        zeros = cute.make_rmem_tensor((4,), Int32)
        zeros.fill(0)
        for tile in cutlass.range(quotient(row.first, TILE), self.depth // 64, max(threads // TILE, 1), unroll=1):
            for group in cutlass.range_constexpr(0, TILE, threads):
                for h in cutlass.range_constexpr(2):
                    chunk = 2 * (remainder(row.first, TILE) + group) + h
                    cute.autovec_copy(zeros, self.place(row, tile, chunk))

    def place(self, row: Row, tile: Int32, chunk: Int32) -> cute.Tensor:
        """The place for eight columns of a row, those with index `chunk` in the tile `tile` of 64 columns."""
        return four_words(row.target + tile * (self.p_rows * 128) + ((chunk ^ (row.number & 7)) << 4))

    def group(self, row: Row, tile: Int32, n: int) -> Group:
        """The thread's n-th group of 16 columns, counted from 0 at the tile `tile` of 64 columns. The part of its
        address that depends on n is static, so that groups share the registers of their addresses."""
        threads = 128 // self.p_rows
        if threads <= TILE:
            return Group(tile + n * threads // TILE, row.first + n * threads % TILE)
        return Group(tile + n * (threads // TILE) + quotient(row.first, TILE), remainder(row.first, TILE))

    @cute.jit
    def move_groups(
        self,
        row: Row,
        tile: Int32,
        numbers: cutlass.Constexpr[tuple[int, int]],
        top: Int32,
        natural: cutlass.Constexpr[bool],
    ):
        """Move the thread's groups of 16 columns with the indices [numbers[0], numbers[1]), counted from the tile
        `tile` of 64 columns on (see `group`). Columns are permuted unless `natural`. Return `top`, or, if queries are
        bf16, the greatest of `top` and the magnitudes of the moved numbers.
        """
        places = [self.group(row, tile, n) for n in range(*numbers)]
        words = cute.make_rmem_tensor((4, 2, len(places)), Int32)
        for n in cutlass.range_constexpr(len(places)):
            for h in cutlass.range_constexpr(2):
                source = self.source.words(row.source, row.number, places[n].tile, 2 * places[n].group + h, MOVE)
                cute.autovec_copy(source, words[None, h, n])
        for n in cutlass.range_constexpr(len(places)):
            pairs = [words[i, h, n] for h in range(2) for i in range(4)]
            if const_expr(not self.in_place):
                pairs = [pair & row.valid for pair in pairs]
            if const_expr(self.q_dtype == cutlass.BFloat16):
                pairs = [two_halves((pair << 16).bitcast(Float32), (pair & -65536).bitcast(Float32)) for pair in pairs]
                for pair in pairs:
                    top = greater_halves(top, pair)
            if const_expr(not natural):
                pairs = [pairs[i] for i in sorted(range(8), key=q_pair_place)]
            for h in cutlass.range_constexpr(2):
                four = cute.make_rmem_tensor((4,), Int32)
                for i in cutlass.range_constexpr(4):
                    four[i] = pairs[4 * h + i]
                cute.autovec_copy(four, self.place(row, places[n].tile, 2 * places[n].group + h))
        return top

    @cute.jit
    def scaled_rows(
        self, target: Int32, sources: Sources, valid_rows: Int32, t: Int32, factor: Float32,
        kind: cutlass.Constexpr[int],
    ):  # fmt: skip
        """Make one pass over bf16 queries that are too large or too small for f16. FIND: return the thread's greatest
        finite magnitude, as the bits of an fp32. SCALE: move Q times `factor`."""
        number, first = remainder(t, self.p_rows), quotient(t, self.p_rows)
        source = self.source.row(sources, number, kind)
        row = Row(target + number * 128, source, number, first, -Int32(number < valid_rows))
        groups, at_once = self.depth // 16, 128 // self.p_rows
        words = cute.make_rmem_tensor((4, 2), Int32)
        ordered = cute.make_rmem_tensor((4, 2), Int32)
        top = Int32(0)
        for base in cutlass.range(0, groups, at_once, unroll=1):
            group = base + first
            if group < groups:
                words.fill(0)
                tile, chunk = group // 4, 2 * (group % 4)
                if number < valid_rows:
                    for h in cutlass.range_constexpr(2):
                        cute.autovec_copy(self.source.words(source, number, tile, chunk + h, kind), words[None, h])
                natural = group >= self.natural_from
                for i in cutlass.range_constexpr(8):
                    pair = words[i]
                    numbers = [(pair << 16).bitcast(Float32), (pair & -65536).bitcast(Float32)]
                    if const_expr(kind == FIND):
                        for value in numbers:
                            bits = value.bitcast(Int32) & 0x7FFFFFFF
                            top = cutlass.max(top, bits * Int32(bits < 0x7F800000))
                    else:
                        words[i] = two_halves(*[value * factor for value in numbers])
                        if const_expr(self.as_they_are):
                            if natural:
                                words[i] = two_bf16(*[value * factor for value in numbers])
                if const_expr(kind == SCALE):
                    for i in cutlass.range_constexpr(8):
                        place = q_pair_place(i)
                        ordered[place] = words[i]
                        if const_expr(self.natural_from < groups):
                            ordered[place] = words[place] if natural else words[i]
                    for h in cutlass.range_constexpr(2):
                        cute.autovec_copy(ordered[None, h], self.place(row, tile, chunk + h))
        return top


def two_halves(low: Float32, high: Float32) -> Int32:
    """Round two numbers to a pair of f16."""
    return cute.arch.inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[low, high]
    )


def two_bf16(low: Float32, high: Float32) -> Int32:
    """Round two numbers to a pair of bf16."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[low, high]
    )


def greater_halves(top: Int32, pair: Int32) -> Int32:
    """The greater of `top` and the magnitude of `pair`, for each of the two f16. NaN is ignored."""
    # `top` may be a constant, which max.f16x2 does not take: it is moved to a register first.
    return cute.arch.inline_ptx(
        "{ .reg .b32 size, was; mov.b32 was, {$r0}; abs.f16x2 size, {$r1}; max.f16x2 {$w0}, was, size; }",
        write_only_types=[Int32],
        read_only_args=[top, pair],
    )


def four_words(address: Int32) -> cute.Tensor:
    """Four words of shared memory at `address`."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(4))
