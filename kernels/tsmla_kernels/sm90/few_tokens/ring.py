"""The product of one token, whose weights come through a ring in shared memory.

Two warps copy the weights by bulk copies, so that many bytes are on their way without registers; eight warps multiply
them. A stage has the same SEGMENT bytes of sixteen weight rows, in two sets of eight. A warp has 128 bytes of each row:
with e4m3 weights, a block that has one scale.

The tensor cores' small product computes all pairs of sixteen rows and eight columns, of which one token needs a column.
Columns take the token's terms in different orders, and a row's sum is read at a column whose order it has. So rows may
be loaded in different orders: even rows begin with the first half of the 128 bytes, and odd rows with the other one,
which keeps the loads from shared memory free of bank conflicts. With the form HALVES a stage has eight rows, the first
and the second half of their terms, and the token's terms of columns 2, 3, 6 and 7 come from the second half.

E4m3 weights are widened to f16, which is exact and takes one instruction for two of them. The token's terms are
multiplied by a power of two that brings the largest one to at least 2^14, so that f16 loses nothing of those that
matter; the sums are divided by it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr

from tsmla_kernels.cache_ops.kernels import load
from tsmla_kernels.sm90.few_tokens.config import HALVES, LOADED_TERMS, MOST_TERMS, TOKEN_TILE, UNIT, WARPS
from tsmla_kernels.sm90.few_tokens.tile import CTAS, LINE, LOAD_BYTES, Lane, multiply_add, start
from tsmla_kernels.sm90.warp import quotient, release, remainder

COMPUTE_THREADS = 32 * WARPS
COPYING = 2
"""Warps that copy, after those that multiply: a warp issues the sixteen copies of a stage one by one, so that one warp
alone would hardly keep up with the memory."""
THREADS = COMPUTE_THREADS + 32 * COPYING
PIECE = 128
"""Bytes of a weight row that a warp multiplies at a time."""
SEGMENT = PIECE * WARPS
ROWS = 2 * TOKEN_TILE
STAGE_BYTES = ROWS * SEGMENT
STAGES = 4
PREFETCHED = STAGES * SEGMENT
"""Bytes of each row of a CTA's first tiles that come to L2 before the kernel before this one has ended."""
MULTIPROCESSORS = 132
"""CTAs of a launch, at most: each takes tiles in turns."""
SUMS, READY = 1, 2
"""Named barriers: of the warps that multiply, and of all warps, for the experts."""
VECTOR = LOADED_TERMS // COMPUTE_THREADS
"""Terms that a thread loads at a time."""
PAIRS = VECTOR // 2
SCALED = 14
"""The exponent of the largest scaled term."""


class Shared(NamedTuple):
    """A CTA's shared memory.

    Attributes:
      stages, terms: addresses of the ring, and of the token's terms in 16 bits.
      full, empty: barriers of the stages.
      sums: [2, WARPS, ROWS] f32, the warps' sums of two tiles in turns.
      reduced: [2, WARPS] f32: of the terms, each warp's sum of squares and its greatest magnitude.
    """

    stages: Int32
    terms: Int32
    full: cute.Pointer
    empty: cute.Pointer
    sums: cute.Tensor
    reduced: cute.Tensor


class Weights(NamedTuple):
    """A tile's weights: the addresses of its first row of each set, the bytes from row to row, and how many bytes of
    each row belong to the tile."""

    first: Int64
    second: Int64
    pitch: Int64
    bytes: Int32


class Scales(NamedTuple):
    """Addresses of the scales of a tile's two sets of rows, from the tile's first term on; 0 if there are none."""

    first: Int64
    second: Int64


class Held(NamedTuple):
    """Scales that a thread has loaded ahead.

    Attributes:
      factors: [2] f32, of its next piece of both sets of rows.
      source: [1] i64, where the scales of the tile that begins with this piece lie; 0 if none are loaded.
    """

    factors: cute.Tensor
    source: cute.Tensor


class TileScales(NamedTuple):
    """The scales that `multiply` reads with a tile, and those that it loads ahead.

    Attributes:
      own: the tile's.
      following: the next tile's, as far as they are known; None for bf16 weights.
      held: as `held_scales` makes it; bf16 weights need none.
    """

    own: Scales
    following: Scales | None
    held: Held | None


NO_SCALES = 0
"""The address in `Scales` of a tile that has none, or that is not known."""


class Ring:
    """Device functions. narrow: weights are e4m3 with scales. halves: the form of the tiles is HALVES. loads: as in
    MatmulConfig."""

    def __init__(self, form: str, loads: int, *, narrow: bool) -> None:
        self.halves, self.loads, self.narrow = form == HALVES, loads, narrow
        self.piece_terms = PIECE if narrow else PIECE // 2

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a CTA's storage for `shared`."""
        return {
            "stages": cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, STAGES * STAGE_BYTES], 128],
            "terms": cute.struct.Align[cute.struct.MemRange[BFloat16, MOST_TERMS], 128],
            "full": cute.struct.MemRange[Int64, STAGES],
            "empty": cute.struct.MemRange[Int64, STAGES],
            "sums": cute.struct.Align[cute.struct.MemRange[Float32, 2 * WARPS * ROWS], 16],
            "reduced": cute.struct.MemRange[Float32, 2 * WARPS],
        }

    def shared(self, storage: Any) -> Shared:
        """The arrays in a CTA's storage."""
        return Shared(
            stages=Int32(storage.stages.data_ptr().toint()),
            terms=Int32(storage.terms.data_ptr().toint()),
            full=storage.full.data_ptr(),
            empty=storage.empty.data_ptr(),
            sums=storage.sums.get_tensor(cute.make_layout((2, WARPS, ROWS), stride=(WARPS * ROWS, ROWS, 1))),
            reduced=storage.reduced.get_tensor(cute.make_layout((2, WARPS), stride=(WARPS, 1))),
        )

    @cute.jit
    def open(self, shared: Shared) -> None:
        """Set up the barriers, by all threads of the CTA."""
        if cute.arch.thread_idx()[0] == 0:
            for i in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(shared.full + i, 1)
                cute.arch.mbarrier_init(shared.empty + i, WARPS)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    @cute.jit
    def prefetch(self, rows: Weights) -> None:
        """Bring a tile's first bytes to L2. This is safe while the kernel before this one still writes the weights,
        because its stores go through L2."""
        thread = cute.arch.thread_idx()[0]
        row = thread % ROWS
        begin = rows.first if row < TOKEN_TILE else rows.second
        begin += Int64(row % TOKEN_TILE) * rows.pitch
        for line in cutlass.range(
            thread // ROWS, cutlass.min(rows.bytes, PREFETCHED) // LINE, COMPUTE_THREADS // ROWS, unroll=1
        ):
            cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[begin + line * LINE])

    @cute.jit
    def fill(self, shared: Shared, rows: Weights, scales: Scales, count: Int32, warp: Int32):
        """Copy a tile through the ring, by the warps that copy, in turns, and bring its scales to L2, which the warps
        that multiply would wait for in every stage. count: the stages filled before. Returns the stages filled after
        it."""
        index = cute.arch.lane_idx()
        begin = rows.first if index < TOKEN_TILE else rows.second
        begin += Int64(index % TOKEN_TILE) * rows.pitch
        for segment in cutlass.range(cute.ceil_div(rows.bytes, SEGMENT), unroll=1):
            if remainder(count, COPYING) == warp - WARPS:
                stage, phase = remainder(count, STAGES), quotient(count, STAGES) & 1
                size = cutlass.min(rows.bytes - segment * SEGMENT, SEGMENT)
                cute.arch.mbarrier_wait(shared.empty + stage, phase ^ 1)
                if index == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(shared.full + stage, size * ROWS)
                cute.arch.sync_warp()
                if index < ROWS:
                    cute.arch.inline_ptx(
                        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                        " [{$r0}], [{$r1}], {$r2}, [{$r3}];",
                        read_only_args=[
                            shared.stages + stage * STAGE_BYTES + index * SEGMENT,
                            begin + Int64(segment) * SEGMENT,
                            size,
                            Int32((shared.full + stage).toint()),
                        ],
                    )
                elif const_expr(self.narrow):
                    if index < ROWS + 2:
                        scale = (scales.first if index == ROWS else scales.second) + segment * (WARPS * 4)
                        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[scale])
            count += 1
        return count

    # ---- the token's terms

    def held(self) -> cute.Tensor:
        """Registers for a thread's share of the terms, as pairs of bf16."""
        return cute.make_rmem_tensor((self.loads * PAIRS,), Int32)

    @cute.jit
    def load_terms(self, source: Int64, count: Int32, pairs: cute.Tensor) -> None:
        """Load this thread's share of `count` terms at `source`; 0 past the last. All loads are on their way before the
        first is used, so that a CTA waits for the memory once."""
        thread = cute.arch.thread_idx()[0]
        pairs.fill(0)
        for i in cutlass.range_constexpr(self.loads):
            index = thread + i * COMPUTE_THREADS
            if index < count // VECTOR:
                found = load(Int32, source + Int64(index) * (2 * VECTOR), PAIRS)
                for j in cutlass.range_constexpr(PAIRS):
                    pairs[i * PAIRS + j] = found[j]

    @cute.jit
    def put_terms(self, shared: Shared, pairs: cute.Tensor, terms: Int32, norm: Int64, eps: float | None):
        """Bring loaded terms to shared memory, as `multiply` reads them, normed unless eps is None. norm: the address
        of the norm's weight. Returns the factor of the sums."""
        normed = const_expr(eps is not None)
        factor, scale, inverse = Float32(1.0), Float32(1.0), Float32(1.0)
        if const_expr(normed or self.narrow):
            square, most = self.measure(pairs, self.weights(norm, terms) if normed else None)
            square, most = self.reduce(shared, square, most)
            if const_expr(normed):
                factor = cute.math.rsqrt(square / Float32(terms) + Float32(eps))
            scale, inverse = self.scale_of(most * factor)
        dtype = Float16 if self.narrow else BFloat16
        for i in cutlass.range_constexpr(self.loads):
            index = cute.arch.thread_idx()[0] + i * COMPUTE_THREADS
            if index < terms // VECTOR:
                # The weights come from the L1 cache: there are too few registers to hold them since they were measured.
                weights = load(Int32, norm + Int64(index) * (2 * VECTOR), PAIRS) if normed else None
                values = cute.make_rmem_tensor((VECTOR,), Float32)
                for j in cutlass.range_constexpr(PAIRS):
                    both = pair_of(pairs[i * PAIRS + j])
                    for k in cutlass.range_constexpr(2):
                        values[2 * j + k] = both[k] * factor
                        if const_expr(normed):
                            values[2 * j + k] = values[2 * j + k] * pair_of(weights[j])[k]
                rounded = cute.make_rmem_tensor((VECTOR,), dtype)
                rounded.store((values.load() * scale).to(dtype))
                place = index
                if const_expr(self.narrow):
                    # A lane's sixteen terms are two vectors, which lie 128 bytes apart: so lanes load different banks.
                    place = (index & -UNIT // VECTOR) + (index & 1) * 8 + ((index >> 1) & 7)
                target = shared.terms + place * LOAD_BYTES
                pointer = cute.make_ptr(Int32, target, cute.AddressSpace.smem, assumed_align=LOAD_BYTES)
                words = cute.recast_tensor(rounded, Int32)
                cute.autovec_copy(words, cute.make_tensor(pointer, cute.make_layout(PAIRS)))
        cute.arch.barrier(barrier_id=SUMS, number_of_threads=COMPUTE_THREADS)
        return inverse

    def weights(self, norm: Int64, terms: Int32) -> cute.Tensor:
        """The norm's weights of this thread's share of the terms."""
        found = self.held()
        self.load_terms(norm, terms, found)
        return found

    @cute.jit
    def measure(self, pairs: cute.Tensor, weights: cute.Tensor | None):
        """The sum of the squares of this thread's terms, and their greatest magnitude, times the norm's weights if
        there are any."""
        square, most = Float32(0.0), Float32(0.0)
        for i in cutlass.range_constexpr(self.loads * PAIRS):
            both, scales = pair_of(pairs[i]), pair_of(Int32(0) if weights is None else weights[i])
            for k in cutlass.range_constexpr(2):
                square = square + both[k] * both[k]
                product = both[k] if const_expr(weights is None) else both[k] * scales[k]
                most = cute.arch.fmax(most, cute.arch.fmax(product, -product))
        return square, most

    @cute.jit
    def put_row(self, shared: Shared, source: Int64, norm: Int64, terms: Int32, eps: float | None):
        """Load the terms at `source`, and bring them to shared memory, normed unless eps is None. Returns the factor of
        the sums."""
        pairs = self.held()
        self.load_terms(source, terms, pairs)
        return self.put_terms(shared, pairs, terms, norm, eps)

    @cute.jit
    def reduce(self, shared: Shared, square: Float32, most: Float32):
        """The sum over all threads of `square`, and the maximum of `most`."""
        thread = cute.arch.thread_idx()[0]
        for step in cutlass.range_constexpr(5):
            square = square + cute.arch.shuffle_sync_bfly(square, offset=1 << step)
            most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, offset=1 << step))
        if thread % 32 == 0:
            shared.reduced[0, thread // 32] = square
            shared.reduced[1, thread // 32] = most
        cute.arch.barrier(barrier_id=SUMS, number_of_threads=COMPUTE_THREADS)
        square, most = shared.reduced[0, 0], shared.reduced[1, 0]
        for warp in cutlass.range_constexpr(1, WARPS):
            square = square + shared.reduced[0, warp]
            most = cute.arch.fmax(most, shared.reduced[1, warp])
        return square, most

    @cute.jit
    def scale_of(self, most: Float32):
        """The power of two that brings magnitudes up to `most` below 2^(SCALED + 1), and its inverse; 1 with bf16
        weights. Both are finite also if `most` is 0 or is not."""
        scale, inverse = Float32(1.0), Float32(1.0)
        if const_expr(self.narrow):
            exponent = cutlass.max((most.bitcast(Int32) >> 23) & 255, SCALED + 1)
            scale = ((254 + SCALED - exponent) << 23).bitcast(Float32)
            inverse = ((exponent - SCALED) << 23).bitcast(Float32)
        return scale, inverse

    # ---- the product

    @cute.jit
    def multiply(
        self,
        shared: Shared,
        place: Lane,
        rows: Weights,
        scales: TileScales,
        terms: Int32,
        count: Int32,
        factor: Float32,
        totals: cute.Tensor,
    ):
        """Add a tile's products, times `factor`, by a warp that multiplies.

        Args:
          terms: the address in shared memory of the terms that the tile's first set of rows begins with.
          count: the stages read before.
          totals: [4] f32, as `mma.sync` has them.

        Returns:
          the stages read after it.
        """
        (own, following, held), parity = scales, place.row & 1
        x = terms + place.quad * LOAD_BYTES
        if const_expr(self.halves):
            # Columns 2, 3, 6 and 7 are of the second set's terms.
            x += ((place.row >> 1) & 1) * (rows.bytes // PIECE) * (2 * self.piece_terms)
        weights = shared.stages + place.row * SEGMENT + place.warp * PIECE + place.quad * LOAD_BYTES
        segments = cute.ceil_div(rows.bytes, SEGMENT)
        if const_expr(self.narrow):
            if held.source[0] != own.first:
                self.load_scales(held, own, place.warp, rows.bytes)
        for segment in cutlass.range(segments, unroll=1):
            stage, phase = remainder(count, STAGES), quotient(count, STAGES) & 1
            piece = segment * WARPS + place.warp
            has_piece = piece * PIECE < rows.bytes
            factors = cute.make_rmem_tensor((2,), Float32)
            if const_expr(self.narrow):
                # The next stage's come while this stage is waited for and multiplied: a warp that waited for its
                # scales in every stage would be slower than the memory.
                for i in cutlass.range_constexpr(2):
                    factors[i] = held.factors[i]
                if segment + 1 < segments:
                    self.load_scales(held, own, piece + WARPS, rows.bytes)
                elif following.first != NO_SCALES:
                    self.load_scales(held, following, place.warp, rows.bytes)
            cute.arch.mbarrier_wait(shared.full + stage, phase)
            if has_piece:
                sums = self.piece(weights + stage * STAGE_BYTES, x + piece * (2 * self.piece_terms), parity)
                for i in cutlass.range_constexpr(4):
                    if const_expr(self.narrow):
                        totals[i] = totals[i] + sums[i] * (factors[i // 2] * factor)
                    else:
                        totals[i] = totals[i] + sums[i] * factor
            cute.arch.sync_warp()
            release(shared.empty + stage)
            count += 1
        if const_expr(self.narrow):
            held.source[0] = following.first
        return count

    def held_scales(self) -> Held:
        """Registers for scales, without any."""
        found = Held(cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((1,), Int64))
        found.factors.fill(0.0)
        found.source.fill(NO_SCALES)
        return found

    @cute.jit
    def load_scales(self, held: Held, scales: Scales, piece: Int32, row_bytes: Int32) -> None:
        """Begin to load a piece's scales, if rows have that piece."""
        if piece * PIECE < row_bytes:
            held.factors[0] = load(Float32, scales.first + piece * 4, 1)[0]
            held.factors[1] = load(Float32, scales.second + piece * 4, 1)[0]

    def piece(self, weights: Int32, x: Int32, parity: Int32) -> cute.Tensor:
        """The sums [4] of a warp's PIECE bytes of each row."""
        parts = [cute.make_rmem_tensor((4,), Float32) for _ in range(2)]
        for part in parts:
            part.fill(0.0)
        for step in range(2):
            half = (parity ^ step) * (PIECE // 2)
            first, second = (shared_words(weights + half + side * (TOKEN_TILE * SEGMENT)) for side in range(2))
            if self.narrow:
                for vector in range(2):
                    terms = shared_words(x + half + vector * PIECE)
                    for i in range(2):
                        (a, c), (b, d) = (halves_of(rows[2 * vector + i]) for rows in (first, second))
                        multiply_add_halves(parts[i], [a, b, c, d], [terms[2 * i], terms[2 * i + 1]])
            else:
                terms = shared_words(x + half)
                for i in range(2):
                    a = [first[2 * i], second[2 * i], first[2 * i + 1], second[2 * i + 1]]
                    multiply_add(parts[i], 0, a, [terms[2 * i], terms[2 * i + 1]])
        for i in range(4):
            parts[0][i] = parts[0][i] + parts[1][i]
        return parts[0]

    @cute.jit
    def total(self, shared: Shared, place: Lane, totals: cute.Tensor, turn: Int32):
        """The sum over the warps of a tile's row `lane`, in lanes 0 to 15; with HALVES of row `lane`, in lanes 0 to 7.
        It has a meaning in the warp with index turn modulo WARPS. turn: the tiles before."""
        buffer = turn & 1
        odd = (place.row & 1) == 1
        first = totals[1] if odd else totals[0]
        second = totals[3] if odd else totals[2]
        if place.quad == 0:
            shared.sums[buffer, place.warp, place.row] = first
        if place.quad == int(self.halves):
            shared.sums[buffer, place.warp, TOKEN_TILE + place.row] = second
        cute.arch.barrier(barrier_id=SUMS, number_of_threads=COMPUTE_THREADS)
        row = cute.arch.lane_idx() % ROWS
        total = shared.sums[buffer, 0, row]
        for warp in cutlass.range_constexpr(1, WARPS):
            total = total + shared.sums[buffer, warp, row]
        if const_expr(self.halves):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=TOKEN_TILE)
        return total


def launch(kernel: Any, stream: cuda.CUstream, tiles: Int32) -> None:
    """Launch `kernel` with at most MULTIPROCESSORS CTAs for so many tiles."""
    start(kernel, stream, cutlass.min(Int32(tiles), MULTIPROCESSORS), ctas=CTAS, threads=THREADS)


def shared_words(address: Int32) -> cute.Tensor:
    """Load the four words at an address of shared memory."""
    words = cute.make_rmem_tensor((4,), Int32)
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=LOAD_BYTES)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), words)
    return words


def pair_of(word: Int32) -> tuple[Float32, Float32]:
    """A pair of bf16 in float32."""
    return (word << 16).bitcast(Float32), (word & Int32(-65536)).bitcast(Float32)


def halves_of(word: Int32) -> tuple[Int32, Int32]:
    """Four e4m3 numbers as two pairs of f16, exactly."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 a, b; mov.b32 {a, b}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, a; cvt.rn.f16x2.e4m3x2 {$w1}, b; }",
        write_only_types=[Int32, Int32],
        read_only_args=[word],
    )


def multiply_add_halves(sums: cute.Tensor, a: list[Int32], b: list[Int32]) -> None:
    """sums += A B, of 16 rows, 16 terms and 8 columns in f16."""
    done = cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{$w0}, {$w1}, {$w2}, {$w3}},"
        " {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *(sums[i] for i in range(4))],
    )
    for i in range(4):
        sums[i] = done[i]
