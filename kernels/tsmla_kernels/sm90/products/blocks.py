"""The products of a stage's block of terms, in five forms.

WeightBlocks and TokenBlocks multiply e4m3 by e4m3: M of the WGMMA are weight rows in WeightBlocks and tokens in
TokenBlocks. WideBlocks multiplies activations of 16 bits by weights of e4m3 that are widened in registers, which is
exact, and PackedBlocks by packed weights. PlainBlocks multiplies activations by weights of their own 16 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import OperandSource

from tsmla_kernels.sm90.products.config import BLOCK, GROUP_ROWS, ProductConfig
from tsmla_kernels.sm90.products.memory import Mma, Shared, layout_atom
from tsmla_kernels.sm90.warp import DTYPES, quotient, release, uniform

EARLY_TOKENS = 64
"""The scales of at most this many tokens are read while the product runs, those of the other tokens after it."""
AHEAD = 2
"""For this many steps of 16 terms a lane holds the weights as e4m3."""
WIDE = 4
"""For this many steps of 16 terms a lane holds the weights in 16 bits; as many steps are in flight."""

ONE_BYTE = 0x4440
"""A selector of prmt, less the byte's index: that byte in the low one of a word, zeros in the others."""


class Held(NamedTuple):
    """A lane's registers for weights that it widens, kept from block to block.

    Attributes:
      narrow: [4, AHEAD], four pairs of e4m3, or four words of packed weights, for each step of 16 terms.
      wide: [4, WIDE], four pairs of 16-bit numbers for each step.
    """

    narrow: cute.Tensor
    wide: cute.Tensor


class Part(NamedTuple):
    """A thread's part of a product of a block.

    Attributes:
      group: the thread's math warpgroup.
      wave: the product's index among the warpgroup's config.waves products of the block.
      thread: the thread's index in the warpgroup.
    """

    group: Int32
    wave: int
    thread: Int32


class Quantized:
    """The common part of WeightBlocks and TokenBlocks. Each scale in a stage is a token's scale times the scale of a
    block of weights."""

    def __init__(self, config: ProductConfig) -> None:
        self.config = config

    def mma(self) -> cute.TiledMma:
        """A tiled MMA for the product of a block."""
        k_major, shape = OperandMajorMode.K, (GROUP_ROWS, self.config.columns)
        return sm90.make_trivial_tiled_mma(Float8E4M3FN, Float8E4M3FN, k_major, k_major, Float32, (1, 1, 1), shape)

    def held(self) -> Held | None:
        """None: the WGMMAs read both operands from shared memory."""
        return None

    @cute.jit
    def issue(self, mma: Mma, acc: cute.Tensor, rows: Int32, columns: Int32, thread: Int32) -> None:
        """Issue the product of the rows and the columns at these addresses."""
        thr = mma.first.get_slice(thread)
        a = mma.first.make_fragment_A(thr.partition_A(operand(uniform(rows), GROUP_ROWS, Float8E4M3FN)))
        b = mma.first.make_fragment_B(thr.partition_B(operand(uniform(columns), self.config.columns, Float8E4M3FN)))
        warpgroup.fence()
        cute.gemm(mma.first, acc, a[None, None, 0], b[None, None, 0], acc)
        for step in cutlass.range_constexpr(1, BLOCK // 32):
            cute.gemm(mma.more, acc, a[None, None, step], b[None, None, step], acc)
        warpgroup.commit_group()


class WeightBlocks:
    """Device functions for products whose M are weight rows, so that few tokens cost little. wave_scales: bytes from a
    wave's scales to the next wave's. halves: how many scales a token has: one, or if gated one for each half of the
    weight. If gated, a lane's first row is of the first half, and its second row of the second half."""

    wave_scales = 0

    def __init__(self, config: ProductConfig) -> None:
        self.config, self.products = config, Quantized(config)
        self.mma, self.held = self.products.mma, self.products.held
        self.halves = 1 + config.gated

    def scale_offset(self, column: Int32, group: Int32, thread: Int32) -> Int32:
        """The byte offset, in a stage's scales, of the lane's first scale. A lane has two tokens of every eight."""
        block = scale_block(self.config, column, group)
        return block * (self.config.block_scales * 4) + thread % 4 * 8

    @cute.jit
    def multiply(self, shared: Shared, mma: Mma, acc: cute.Tensor, held: Held | None, index: Int32, part: Part) -> None:
        """Issue a wave's product in stage `index`."""
        config = self.config
        group, wave, thread = part
        rows = shared.weight.toint() + index * (config.rows * BLOCK)
        rows += (group * config.waves + wave) * (GROUP_ROWS * BLOCK)
        self.products.issue(mma, acc, rows, shared.x.toint() + index * (config.tokens * BLOCK), thread)

    @cute.jit
    def add(self, sums: cute.Tensor, acc: cute.Tensor, scales: Int32, empty: cute.Pointer | None) -> None:
        """Wait for the product, multiply it by the lane's scales, which lie at the address `scales`, and add it to a
        wave's `sums`. Then, if `empty` is not None, arrive on it: the warp has finished reading the stage."""
        config = self.config
        # If there are many tokens, only the first ones' scales are read now: registers are scarce while a product runs.
        early = min(config.tokens, EARLY_TOKENS)
        factors = self.of_halves(scales, range(early))
        warpgroup.wait_group(0)
        self.add_some(sums, acc, factors, 0)
        if const_expr(early < config.tokens):
            factors = self.of_halves(scales, range(early, config.tokens))
            self.add_some(sums, acc, factors, early // 2)
        leave(empty, self.config)

    def of_halves(self, scales: Int32, tokens: range) -> list[cute.Tensor]:
        """A list of `factors`: if gated, one for each half of the weight; otherwise one for the whole weight."""
        pitch = 4 * self.config.block_scales
        return [self.factors(scales + half * pitch, tokens) for half in range(self.halves)]

    def factors(self, scales: Int32, tokens: range) -> cute.Tensor:
        """The scales of the lane's tokens among `tokens`."""
        found = cute.make_rmem_tensor((len(tokens) // 4,), Float32)
        for i in range(len(tokens) // 8):
            address = scales + 4 * tokens.start + 32 * i
            pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=8)
            pair = cute.make_tensor(found.iterator + 2 * i, cute.make_layout(2))
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(2)), pair)
        return found

    def add_some(self, sums: cute.Tensor, acc: cute.Tensor, factors: list[cute.Tensor], first: int) -> None:
        """Multiply products by their factors, and add them to the sums: the values for which there are factors, of
        which value `first` is the first."""
        for i in range(2 * cute.size(factors[0])):
            half = i // 2 % 2 % self.halves
            sums[first + i] = sums[first + i] + acc[first + i] * factors[half][2 * (i // 4) + i % 2]


class TokenBlocks:
    """Device functions for products whose M are tokens, so that a lane has two scales. wave_scales: bytes from a wave's
    scales to the next wave's. If gated, eight columns of the product that come from the weight's first half and
    eight from its second half alternate, and a lane has two scales for each half."""

    def __init__(self, config: ProductConfig) -> None:
        self.config, self.products = config, Quantized(config)
        self.mma, self.held = self.products.mma, self.products.held
        self.wave_scales = 0 if config.gated else config.block_scales * 4

    def scale_offset(self, column: Int32, group: Int32, thread: Int32) -> Int32:
        """The byte offset, in a stage's scales, of the scale of the lane's first token. The scale of
        the lane's second token, which is eight tokens further, lies 32 bytes further."""
        return (group * GROUP_ROWS + thread // 32 * 16 + thread % 32 // 4) * 4

    @cute.jit
    def multiply(self, shared: Shared, mma: Mma, acc: cute.Tensor, held: Held | None, index: Int32, part: Part) -> None:
        """Issue a wave's product in stage `index`."""
        config = self.config
        group, wave, thread = part
        rows = shared.x.toint() + index * (config.tokens * BLOCK) + group * (GROUP_ROWS * BLOCK)
        columns = shared.weight.toint() + index * (config.rows * BLOCK) + wave * (BLOCK * BLOCK)
        self.products.issue(mma, acc, rows, columns, thread)

    @cute.jit
    def add(self, sums: cute.Tensor, acc: cute.Tensor, scales: Int32, empty: cute.Pointer | None) -> None:
        """Wait for the product, and add it to a wave's `sums` as in WeightBlocks."""
        gated = self.config.gated
        pitch = 4 * self.config.block_scales
        factors = [load_scale(scales + half * pitch + row * 32) for half in range(1 + gated) for row in range(2)]
        warpgroup.wait_group(0)
        leave(empty, self.config)
        for i in cutlass.range_constexpr(BLOCK // 2):
            sums[i] = sums[i] + acc[i] * factors[i // 2 % 2 + 2 * (i // 4 % 2 * gated)]


class WideBlocks:
    """Device functions for x of 16 bits: weights are the operand in registers, widened there. tokens: how many of the
    tile's tokens are multiplied, from the first one on. wave_scales: bytes from a wave's scale to the next wave's. If
    gated, a lane's first row is of the weight's first half, and its second row of the second half."""

    wave_scales = 0

    def __init__(self, config: ProductConfig, tokens: int) -> None:
        self.config, self.tokens = config, tokens
        self.dtype = DTYPES[config.x_dtype]

    def mma(self) -> cute.TiledMma:
        """A tiled MMA for the product of a block."""
        k_major, shape = OperandMajorMode.K, (GROUP_ROWS, self.tokens)
        return sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, k_major, k_major, Float32, (1, 1, 1), shape, OperandSource.RMEM
        )

    def scale_offset(self, column: Int32, group: Int32, thread: Int32) -> Int32:
        """The byte offset of the weights' scale in a stage's scales."""
        return scale_block(self.config, column, group) * 4

    def held(self) -> Held:
        """Registers for a lane's weights."""
        return Held(cute.make_rmem_tensor((4, AHEAD), Int32), cute.make_rmem_tensor((4, WIDE), Int32))

    @cute.jit
    def multiply(self, shared: Shared, mma: Mma, acc: cute.Tensor, held: Held, index: Int32, part: Part) -> None:
        """Issue a wave's product in stage `index`."""
        config = self.config
        group, wave, thread = part
        narrow, wide = held.narrow, held.wide
        thr = mma.first.get_slice(thread)
        halves = self.operands(shared, mma, index, thread)
        mine = (group * config.waves + wave) * GROUP_ROWS + thread // 32 * 16 + thread % 32 // 4  # and eight further
        here = shared.weight.toint() + index * (config.rows * BLOCK) + mine * BLOCK
        here += ((mine % 8) * 16) ^ (thread % 4 * 2)
        shape = thr.partition_shape_A((GROUP_ROWS, 16))
        for step in cutlass.range_constexpr(AHEAD):
            self.read(here, step, narrow)
        for step in cutlass.range_constexpr(BLOCK // 16):
            if const_expr(step >= WIDE):
                warpgroup.wait_group(WIDE - 1)
            for i in cutlass.range_constexpr(4):
                wide[i, step % WIDE] = widened(narrow[i, step % AHEAD], self.config.x_dtype)
            if const_expr(step + AHEAD < BLOCK // 16):
                self.read(here, step + AHEAD, narrow)
            pairs = cute.recast_tensor(wide[None, step % WIDE], self.dtype)
            weight = cute.make_tensor(pairs.iterator, cute.make_layout(shape))
            warpgroup.fence()
            kind = mma.first if step == 0 else mma.more
            cute.gemm(kind, acc, weight[None, None, 0], halves[step // 4][None, None, step % 4], acc)
            warpgroup.commit_group()

    def operands(self, shared: Shared, mma: Mma, index: Int32, thread: Int32) -> list[cute.Tensor]:
        """The halves of x's block in stage `index`, of 64 terms each, as operands."""
        thr, half_bytes = mma.first.get_slice(thread), self.config.tokens * BLOCK
        x = shared.x.toint() + index * (2 * half_bytes)
        return [
            mma.first.make_fragment_B(
                thr.partition_B(operand(uniform(x + half * half_bytes), self.tokens, self.dtype))
            )
            for half in range(2)
        ]  # fmt: skip

    def read(self, here: Int32, step: int, narrow: cute.Tensor) -> None:
        """Read the lane's weights of step `step`: terms 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of its two rows, where q is
        lane % 4."""
        address = here ^ (step * 16)
        for i in range(4):
            narrow[i, step % AHEAD] = load_pair(address + (i % 2) * (8 * BLOCK) + (i // 2) * 8)

    @cute.jit
    def add(self, sums: cute.Tensor, acc: cute.Tensor, scales: Int32, empty: cute.Pointer | None) -> None:
        """Wait for the product, and add it to a wave's `sums` as in WeightBlocks, but with one scale, the weights'."""
        gated = self.config.gated
        factors = [load_scale(scales + 4 * half) for half in range(1 + gated)]
        warpgroup.wait_group(0)
        leave(empty, self.config)
        for i in cutlass.range_constexpr(self.tokens // 2):
            sums[i] = sums[i] + acc[i] * factors[i // 2 % 2 * gated]


class PackedBlocks:
    """Device functions for x of bfloat16 and packed weights, which become bfloat16 in registers and are multiplied by
    their scales there, both exactly. So the tensor cores add the products to a wave's sums, and a wave does not wait
    for the one before. Otherwise as WideBlocks."""

    wave_scales = 0

    def __init__(self, config: ProductConfig, tokens: int) -> None:
        self.config, self.tokens, self.dtype = config, tokens, BFloat16
        self.products = WideBlocks(config, tokens)
        self.mma, self.held = self.products.mma, self.products.held

    def scale_offset(self, column: Int32, group: Int32, thread: Int32) -> Int32:
        """Always 0, because `multiply` finds the exponents by itself."""
        return Int32(0)

    @cute.jit
    def multiply(self, shared: Shared, mma: Mma, acc: cute.Tensor, held: Held, index: Int32, part: Part) -> None:
        """Issue a wave's product in stage `index`. acc: the wave's sums."""
        config = self.config
        group, wave, thread = part
        narrow, wide = held.narrow, held.wide
        shape = mma.first.get_slice(thread).partition_shape_A((GROUP_ROWS, 16))
        halves = self.products.operands(shared, mma, index, thread)
        mine = (group * config.waves + wave) * GROUP_ROWS + thread // 32 * 16 + thread % 32 // 4  # and eight further
        here = shared.weight.toint() + index * (config.rows * config.weight_bytes) + mine * config.weight_bytes
        here += mine // 2 % 4 * 16
        exponents = shared.scales.toint() + index * (config.scale_words * 4) + mine * 4
        of_rows = [load_word(exponents + 32 * row) for row in range(2)]
        selector = thread % 4 + ONE_BYTE
        scales = [Int32(0), Int32(0)]
        for step in cutlass.range_constexpr(AHEAD):
            self.read(here, step, narrow)
        for step in cutlass.range_constexpr(BLOCK // 16):
            if const_expr(step >= WIDE or wave > 0):
                warpgroup.wait_group(WIDE - 1)
            if const_expr(step % 2 == 0):
                scales = [power(of_rows[row], step // 2) for row in range(2)]
            for i in cutlass.range_constexpr(4):
                wide[i, step % WIDE] = unpacked(narrow[i, step % AHEAD], selector, scales[i % 2])
            if const_expr(step + AHEAD < BLOCK // 16):
                self.read(here, step + AHEAD, narrow)
            pairs = cute.recast_tensor(wide[None, step % WIDE], self.dtype)
            weight = cute.make_tensor(pairs.iterator, cute.make_layout(shape))
            warpgroup.fence()
            cute.gemm(mma.more, acc, weight[None, None, 0], halves[step // 4][None, None, step % 4], acc)
            warpgroup.commit_group()

    def read(self, here: Int32, step: int, narrow: cute.Tensor) -> None:
        """Read the eight bytes of step `step` of the lane's two rows, as two words each. A lane needs one byte of every
        word; the four lanes of a row read the same words."""
        for row in range(2):
            words = load_words((here ^ (step // 2 * 16)) + (row * (8 * self.config.weight_bytes) + step % 2 * 8))
            for half in range(2):
                narrow[2 * half + row, step % AHEAD] = words[half]

    @cute.jit
    def add(self, sums: cute.Tensor, acc: cute.Tensor, scales: Int32, empty: cute.Pointer | None) -> None:
        """After the last wave wait for all products, and arrive on `empty`, as in WeightBlocks. The products are in
        the sums already."""
        if const_expr(empty is not None):
            warpgroup.wait_group(0)
            leave(empty, self.config)


class PlainBlocks:
    """Device functions for weights of x's 16 bits. M are tokens, and N are all weight rows of the tile: no block of
    them has a scale of its own, so the tensor cores add all terms to the sums."""

    def __init__(self, config: ProductConfig) -> None:
        self.config, self.dtype = config, DTYPES[config.x_dtype]

    def mma(self) -> cute.TiledMma:
        """A tiled MMA for the product of a block."""
        k_major, shape = OperandMajorMode.K, (GROUP_ROWS, self.config.rows)
        return sm90.make_trivial_tiled_mma(self.dtype, self.dtype, k_major, k_major, Float32, (1, 1, 1), shape)

    def held(self) -> Held | None:
        """None: the WGMMAs read both operands from shared memory."""
        return None

    @cute.jit
    def multiply(self, shared: Shared, mma: Mma, sums: cute.Tensor, index: Int32, part: Part) -> None:
        """Issue the product of the block in stage `index` for all waves at once; it is added to their sums."""
        config = self.config
        thr = mma.more.get_slice(part.thread)
        rows = shared.x.toint() + index * (config.tokens * BLOCK) + part.group * (GROUP_ROWS * BLOCK)
        columns = shared.weight.toint() + index * (config.rows * BLOCK)
        a = mma.more.make_fragment_A(thr.partition_A(operand(uniform(rows), GROUP_ROWS, self.dtype)))
        b = mma.more.make_fragment_B(thr.partition_B(operand(uniform(columns), config.rows, self.dtype)))
        acc = cute.make_tensor(sums.iterator, cute.make_layout(thr.partition_shape_C((GROUP_ROWS, config.rows))))
        warpgroup.fence()
        for step in cutlass.range_constexpr(config.block_terms // 16):
            cute.gemm(mma.more, acc, a[None, None, step], b[None, None, step], acc)
        warpgroup.commit_group()


@cute.jit
def leave(barrier: cute.Pointer | None, config: ProductConfig) -> None:
    """Arrive on `barrier`, if there is one, once for the calling warp, when all its lanes have finished. With multicast
    arrive on the same barrier of the cluster's other CTA, too, which fills this CTA's stages. Only reads precede the
    arrival, so it needs no fence over the cluster, which would take 0.4 us."""
    if const_expr(barrier is not None):
        cute.arch.sync_warp()
        if const_expr(config.multicast):
            lane = cute.arch.lane_idx()
            if lane < 2:
                cute.arch.mbarrier_arrive(barrier, lane)
        else:
            release(barrier)


def scale_block(config: ProductConfig, column: Int32, group: Int32) -> Int32:
    """The index, among tile `column`'s blocks of 128 weight rows, of the block that holds warpgroup `group`'s rows; if
    gated, of the block that holds its rows of the weight's first half."""
    if config.gated:
        return Int32(0)
    first = column * config.rows
    return quotient(first + group * (config.waves * GROUP_ROWS), BLOCK) - quotient(first, BLOCK)


def load_scale(address: Int32) -> Float32:
    """A scale in shared memory."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


def load_pair(address: Int32) -> Int32:
    """Load two bytes of shared memory."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 h; ld.shared.b16 h, [{$r0}]; cvt.u32.u16 {$w0}, h; }",
        write_only_types=[Int32],
        read_only_args=[address],
    )


def load_word(address: Int32) -> Int32:
    """Load a word of shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )  # fmt: skip


def load_words(address: Int32) -> tuple[Int32, Int32]:
    """Load two neighbouring words of shared memory."""
    first, second = cute.arch.inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int32] * 2, read_only_args=[address]
    )
    return first, second


def power(exponents: Int32, byte: int) -> Int32:
    """2 to the power of (e - 127) as bfloat16, in both halves of the result, where e is byte `byte` of a word. If e is
    0, the result is 0 in place of 2^-127."""
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 p; prmt.b32 p, {{$r0}}, 0, {0x0404 | byte << 4 | byte << 12}; shr.u32 {{$w0}}, p, 1; }}",
        write_only_types=[Int32],
        read_only_args=[exponents],
    )


def unpacked(word: Int32, selector: Int32, scale: Int32) -> Int32:
    """The two e2m1 numbers in one byte of `word`, times `scale`, exactly, as a pair of bfloat16. selector: ONE_BYTE
    plus the byte's index.

    A shift moves exponent and mantissa to the low bits of bfloat16's exponent and the high bit of its mantissa. This
    gives the number times 2^-126, also of a subnormal; a multiplication undoes the factor."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 b, s, m, f; mov.b32 f, 0x7E807E80; prmt.b32 b, {$r0}, 0, {$r1}; mul.lo.u32 b, b, 0x40040;"
        " shl.b32 s, b, 6; and.b32 m, b, 0x01C001C0; and.b32 s, s, 0x80008000; or.b32 m, m, s; mul.rn.bf16x2 m, m, f;"
        " mul.rn.bf16x2 {$w0}, m, {$r2}; }",
        write_only_types=[Int32],
        read_only_args=[word, selector, scale],
    )


def widened(pair: Int32, dtype: str) -> Int32:
    """Convert two numbers of e4m3 to the 16-bit dtype `dtype`, exactly."""
    halves = "{ .reg .b16 h; cvt.u16.u32 h, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, h; }"
    if dtype == "bfloat16":  # no instruction does this conversion: it goes by way of float32
        halves = (
            "{ .reg .b16 h, l, u; .reg .b32 p; .reg .f32 a, b; cvt.u16.u32 h, {$r0}; cvt.rn.f16x2.e4m3x2 p, h;"
            " mov.b32 {l, u}, p; cvt.f32.f16 a, l; cvt.f32.f16 b, u; cvt.rn.bf16x2.f32 {$w0}, b, a; }"
        )
    return cute.arch.inline_ptx(halves, write_only_types=[Int32], read_only_args=[pair])


def operand(address: Int32, rows: int, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """`rows` rows of 128 bytes of a stage from `address` on, as a WGMMA operand."""
    layout = cute.tile_to_shape(layout_atom(dtype), (rows, BLOCK * 8 // dtype.width), (0, 1))
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=1024)
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=dtype), layout.outer)
