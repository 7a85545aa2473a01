"""The product that the kernels of few tokens share: TILE_ROWS weight rows times up to 16 tokens, by `mma.sync`.

In few_token_queries a warp has the rows and all terms. Otherwise a CTA has the rows; its warps share the terms, a unit
of 128 at a time, and add their sums through shared memory. The order of the terms in a tensor core's product is free,
so a lane loads 16 contiguous bytes of each of its two weight rows, and the same terms of its token, straight to
registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.cache_ops.kernels import load
from tsmla_kernels.sm90.constants import LOG2_E
from tsmla_kernels.sm90.few_tokens.config import TILE_ROWS, TOKEN_TILE, UNIT, WARPS

THREADS = 32 * WARPS
CTAS = 2
"""CTAs of a multiprocessor: the next kernel starts beside this one."""
LOAD_BYTES = 16
LINE = 128
"""Bytes that a prefetch brings to L2."""


def start(kernel: Any, stream: cuda.CUstream, *grid: Int32, ctas: int = CTAS, threads: int = THREADS) -> None:
    """Launch `kernel` over `grid` CTAs with `threads` threads each.

    The kernel before may still run. ctas: how many CTAs of a multiprocessor the compiler leaves registers for.
    """
    kernel.launch(
        grid=[*grid, *[1] * (3 - len(grid))],
        block=[threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=ctas,
        preferred_smem_carveout=100,  # as attention: changing the split of L1 and shared memory takes 2 us
        use_pdl=True,
    )


class Lane(NamedTuple):
    """A thread's place: its warp; `row`, the index of its weight row in each half of the TILE_ROWS rows, and of its
    token in each tile of tokens; and `quad`, which quarter of each 64 bytes of a weight row it loads."""

    warp: Int32
    row: Int32
    quad: Int32


class Operands(NamedTuple):
    """The addresses at which a lane's operands begin.

    Attributes:
      first, second: of its two weight rows, at the lane's quarter.
      tokens: of the lane's token of each token tile, at the terms of that quarter.
      norm: of the norm's weight at these terms; 0 without a norm.
      first_scales, second_scales: of the scales of the blocks that have the weight rows; 0 without scales.
    """

    first: Int64
    second: Int64
    tokens: list[Int64]
    norm: Int64
    first_scales: Int64
    second_scales: Int64


class Rows(NamedTuple):
    """The weight rows of a product: the addresses of the first eight and of the other eight, and the bytes from row to
    row."""

    first: Int64
    second: Int64
    pitch: Int64


class Sums(NamedTuple):
    """A lane's sums, f32: products [4 token_tiles], as `mma.sync` has them, and squares [token_tiles] of its tokens'
    terms."""

    products: cute.Tensor
    squares: cute.Tensor


def row_of(array: cute.Tensor, row: Int32) -> Int64:
    """The address of a row of an array of two axes."""
    return array.iterator.toint() + Int64(row) * Int64(array.shape[1]) * (array.element_type.width // 8)


def matrix_of(stack: cute.Tensor, index: Int32) -> Int64:
    """The address of a matrix of an array of three axes."""
    size = Int64(stack.shape[1]) * Int64(stack.shape[2]) * (stack.element_type.width // 8)
    return stack.iterator.toint() + Int64(index) * size


def lane() -> Lane:
    """This thread's place."""
    thread = cute.arch.thread_idx()[0]
    return Lane(cute.arch.make_warp_uniform(thread // 32), thread % 32 // 4, thread % 4)


class TileProduct:
    """Device functions of the product. narrow: weights are e4m3 with scales; normed: tokens' terms are multiplied by a
    norm's weight and their squares are summed."""

    def __init__(self, *, narrow: bool, token_tiles: int, normed: bool) -> None:
        self.narrow, self.token_tiles, self.normed = narrow, token_tiles, normed
        self.row_bytes = UNIT if narrow else 2 * UNIT  # of a unit
        self.loads = self.row_bytes // (4 * LOAD_BYTES)  # of a row
        self.products = 4 if narrow else 2  # of a load
        self.quad_bytes = 2 * LOAD_BYTES if narrow else LOAD_BYTES  # of x

    def sums(self) -> Sums:
        """Registers for a lane's sums, zeros."""
        found = Sums(
            cute.make_rmem_tensor((4 * self.token_tiles,), Float32), cute.make_rmem_tensor((self.token_tiles,), Float32)
        )
        for part in found:
            part.fill(0.0)
        return found

    @cute.jit
    def prefetch(self, rows: Rows, first: Int32, units: Int32) -> None:
        """Bring the units first, first + WARPS, ... below `units` to L2. This is safe while the kernel before this one
        still writes the weights, because its stores go through L2."""
        lines = self.row_bytes // LINE
        index = cute.arch.lane_idx()
        row, line = index // lines % TILE_ROWS, index % lines
        each = 32 // (TILE_ROWS * lines)  # units of one instruction
        begin = rows.first if row < TOKEN_TILE else rows.second
        begin += Int64(row % TOKEN_TILE) * rows.pitch + line * LINE
        for unit in cutlass.range(first + index // (TILE_ROWS * lines) * WARPS, units, each * WARPS, unroll=1):
            address = begin + Int64(unit) * self.row_bytes
            cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])

    @cute.jit
    def add(self, operands: Operands, first: Int32, units: Int32, sums: Sums) -> None:
        """Add the products of the units first, first + WARPS, ... below `units`."""
        for unit in cutlass.range(first, units, WARPS, unroll=1):
            weights = cute.make_rmem_tensor((8 * self.loads,), Int32)
            self.load_weights(operands, unit, weights)
            self.add_unit(operands, unit, weights, sums)

    def load_weights(self, operands: Operands, unit: Int32, weights: cute.Tensor) -> None:
        """Load a unit of the lane's two rows."""
        for step in range(self.loads):
            offset = Int64(unit) * self.row_bytes + step * 4 * LOAD_BYTES
            for side, row in enumerate((operands.first, operands.second)):
                words = load(Int32, row + offset, 4)
                for i in range(4):
                    weights[(2 * step + side) * 4 + i] = words[i]

    @cute.jit
    def add_unit(self, operands: Operands, unit: Int32, weights: cute.Tensor, sums: Sums) -> None:
        """Add the product of a unit whose weights are loaded."""
        part = sums.products
        if const_expr(self.narrow):
            part = cute.make_rmem_tensor((4 * self.token_tiles,), Float32)
            part.fill(0.0)
        for step in cutlass.range_constexpr(self.loads):
            terms = [self.load_terms(operands, unit, step, tile, sums) for tile in range(self.token_tiles)]
            for product in cutlass.range_constexpr(self.products):
                first, second = (self.weight_words(weights, (2 * step + side) * 4, product) for side in range(2))
                a = [first[0], second[0], first[1], second[1]]
                for tile in cutlass.range_constexpr(self.token_tiles):
                    multiply_add(part, 4 * tile, a, [terms[tile][2 * product + i] for i in range(2)])
        if const_expr(self.narrow):
            scales = [
                load(Float32, row + Int64(unit) * 4, 1)[0] for row in (operands.first_scales, operands.second_scales)
            ]
            for i in cutlass.range_constexpr(4 * self.token_tiles):
                sums.products[i] = sums.products[i] + part[i] * scales[i // 2 % 2]

    def weight_words(self, weights: cute.Tensor, begin: int, product: int) -> tuple[Int32, Int32]:
        """The four weights of one row that a lane gives to a product, as two pairs of bf16."""
        if not self.narrow:
            return weights[begin + 2 * product], weights[begin + 2 * product + 1]
        found: tuple[Int32, Int32] = widened(weights[begin + product])
        return found

    def load_terms(self, operands: Operands, unit: Int32, step: int, tile: int, sums: Sums) -> list[Int32]:
        """The lane's terms of its token in `tile`, as pairs of bf16. If normed, they are multiplied by the norm's
        weight, and the squares of the unmultiplied terms are added to `sums`."""
        found = []
        for part in range(self.quad_bytes // LOAD_BYTES):
            offset = Int64(unit) * (2 * UNIT) + step * 4 * self.quad_bytes + part * LOAD_BYTES
            words = load(Int32, operands.tokens[tile] + offset, 4)
            if self.normed:
                weight = load(Int32, operands.norm + offset, 4)
                for i in range(4):
                    sums.squares[tile] = add_squares(sums.squares[tile], words[i])
                    found.append(times(words[i], weight[i]))
            else:
                found += [words[i] for i in range(4)]
        return found


def multiply_add(sums: cute.Tensor, begin: int, a: list[Int32], b: list[Int32]) -> None:
    """sums[begin : begin + 4] += A B, of 16 rows, 16 terms and 8 tokens in bf16."""
    done = cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}},"
        " {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *(sums[begin + i] for i in range(4))],
    )
    for i in range(4):
        sums[begin + i] = done[i]


def widened(word: Int32) -> tuple[Int32, Int32]:
    """Four e4m3 numbers as two pairs of bf16, exactly. No instruction does that at once: it goes by way of f16 and
    float32."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 a, b, l, u; .reg .b32 p, q; .reg .f32 v, w, x, y; mov.b32 {a, b}, {$r0};"
        " cvt.rn.f16x2.e4m3x2 p, a; cvt.rn.f16x2.e4m3x2 q, b;"
        " mov.b32 {l, u}, p; cvt.f32.f16 v, l; cvt.f32.f16 w, u;"
        " mov.b32 {l, u}, q; cvt.f32.f16 x, l; cvt.f32.f16 y, u;"
        " cvt.rn.bf16x2.f32 {$w0}, w, v; cvt.rn.bf16x2.f32 {$w1}, y, x; }",
        write_only_types=[Int32, Int32],
        read_only_args=[word],
    )


def times(a: Int32, b: Int32) -> Int32:
    """The products of two pairs of bf16, rounded."""
    return cute.arch.inline_ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b]
    )  # fmt: skip


def add_squares(total: Float32, pair: Int32) -> Float32:
    """The total plus the squares of a pair of bf16."""
    low, high = (pair << 16).bitcast(Float32), (pair & Int32(-65536)).bitcast(Float32)
    return total + low * low + high * high


class Shared(NamedTuple):
    """Sums that a CTA's warps exchange in shared memory, f32: the lanes' products [WARPS, 4 token_tiles, 32], and, if
    there is a norm, the tokens' squares [WARPS, 8 token_tiles]."""

    products: cute.Tensor
    squares: cute.Tensor


class Exchange:
    """Device functions that add the sums of a CTA's warps."""

    def __init__(self, token_tiles: int, normed: bool) -> None:
        self.token_tiles, self.normed = token_tiles, normed
        self.product_words = WARPS * 4 * token_tiles * 32
        self.square_words = WARPS * TOKEN_TILE * token_tiles if normed else 4

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a CTA's storage for `shared`."""
        words = {"products": self.product_words, "squares": self.square_words}
        return {name: cute.struct.Align[cute.struct.MemRange[Float32, n], 16] for name, n in words.items()}

    def shared(self, storage: Any) -> Shared:
        """The arrays in a CTA's storage, whose fields `products` and `squares` have product_words and square_words
        words."""
        products = cute.make_layout((WARPS, 4 * self.token_tiles, 32), stride=(128 * self.token_tiles, 32, 1))
        squares = cute.make_layout((WARPS, TOKEN_TILE * self.token_tiles), stride=(TOKEN_TILE * self.token_tiles, 1))
        if not self.normed:
            squares = cute.make_layout((1, 1), stride=(1, 1))
        return Shared(storage.products.get_tensor(products), storage.squares.get_tensor(squares))

    @cute.jit
    def publish(self, shared: Shared, sums: Sums, place: Lane) -> None:
        """Store a lane's sums where `total` and `inverse_norm` read them, and meet the other warps."""
        for i in cutlass.range_constexpr(4 * self.token_tiles):
            shared.products[place.warp, i, place.row * 4 + place.quad] = sums.products[i]
        if const_expr(self.normed):
            for tile in cutlass.range_constexpr(self.token_tiles):
                square = sums.squares[tile]
                square = square + cute.arch.shuffle_sync_bfly(square, offset=1)
                square = square + cute.arch.shuffle_sync_bfly(square, offset=2)
                if place.quad == 0:
                    shared.squares[place.warp, tile * TOKEN_TILE + place.row] = square
        cute.arch.sync_threads()

    def total(self, shared: Shared, value: Int32, lane_index: Int32) -> Float32:
        """The sum over the warps of a lane's value."""
        found = shared.products[0, value, lane_index]
        for warp in range(1, WARPS):
            found = found + shared.products[warp, value, lane_index]
        return found

    def inverse_norm(self, shared: Shared, token: Int32, terms: Int32, eps: float | None) -> Float32:
        """1 / sqrt(mean of the token's squares + eps)."""
        found = shared.squares[0, token]
        for warp in range(1, WARPS):
            found = found + shared.squares[warp, token]
        return cute.math.rsqrt(found / Float32(terms) + Float32(eps))


def warp_sum(value: Float32) -> Float32:
    """The sum of a warp's values, in each lane."""
    for step in range(5):
        value = value + cute.arch.shuffle_sync_bfly(value, offset=1 << step)
    return value


@cute.jit
def block_sum(value: Float32, shared: cute.Tensor):
    """The sum of the values of all threads, in each of them; `shared` has WARPS words."""
    total, thread = warp_sum(value), cute.arch.thread_idx()[0]
    if thread % 32 == 0:
        shared[thread // 32] = total
    cute.arch.sync_threads()
    total = shared[0]
    for warp in cutlass.range_constexpr(1, WARPS):
        total = total + shared[warp]
    return total


def power(value: Float32) -> Float32:
    """e to the power of a value."""
    return cute.math.exp2(value * Float32(LOG2_E), fastmath=True)


def sigmoid(value: Float32) -> Float32:
    """1 / (1 + e to the power of -value), with an approximate quotient."""
    return cute.arch.rcp_approx(power(-value) + 1.0)


def silu_product(gate: Float32, up: Float32, limit: float | None) -> Float32:
    """silu(gate) * up. If there is a limit, gate is first clipped to at most `limit`, and up to [-limit, limit]. NaN
    stays NaN."""
    if limit is not None:
        bound = Float32(limit)
        gate = clip("min.NaN.f32", gate, bound)
        up = clip("max.NaN.f32", clip("min.NaN.f32", up, bound), -bound)
    return gate * sigmoid(gate) * up


def clip(instruction: str, a: Float32, b: Float32) -> Float32:
    """The lesser or the greater of two numbers, as `instruction` says; NaN if either is NaN."""
    return cute.arch.inline_ptx(
        instruction + " {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )
