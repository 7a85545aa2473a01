"""Tiles of the products of `grouped_matmul`, chosen by size: for experts, and for single block-scaled matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tsmla_jax.nn.products.block_scaled import BLOCK

BLOCKS_BY_KERNEL = 2048
"""Pairs of a row and a group up to which pairs are ranked by comparing each with every other: `make_blocks` is then one
kernel or two where Triton can run."""

WIDENED_PAIRS, WIDENED_BYTES = 256, 2**30
"""Pairs of each expert, on average, from which block-scaled weights of experts are widened before the products, and the
most bytes that the larger of their two stacks may have then. Widening rounds them to 16 bits, which MANY_ROWS
describes."""

PLAIN_PAIRS = 240
"""Pairs of each expert, on average, from which experts with weights of 16 bits take grouped_block_scaled_matmul, of
rows that are copied before: two of its CTAs then share the weights they load, and it is faster than Pallas' kernel.
Where Pallas' kernel can't run, fewer pairs take it, too, of rows that are not copied."""

COPIED_PAIRS = {"quantized": ((100.0, 150.0),), "exact": ((120.0, 150.0), (384.0, math.inf))}
"""By the products of block-scaled experts: fewest and most pairs of each expert, on average, with which rows are copied
before the first products. The kernel then finds them together and need not pick them. With exact products its tiles
have up to 152 rows then: between these ranges most experts' rows fill tiles of 128 rows better."""

FEW_ROWS = 8
"""Rows up to which `grouped_matmul` widens one block-scaled matrix to bf16. With more rows it widens to f16."""

MANY_ROWS = 512
"""Rows up to which `grouped_matmul` widens one block-scaled matrix as it reads it. For more, whose time is that of
multiplying, it is widened first, and XLA's product of 16 bits multiplies at more than twice the speed. That rounds the
weights times their scales to x's dtype, which a product that widens as it reads does not: in bf16, with scales that are
no powers of two, a result's error is 1.4 times that of rounding the result alone."""

MANY_WIDENED_ROWS = 1024
"""Rows up to which the kernel of block_scaled_matmul that widens weights is at least as fast as widening them first."""

MULTIPROCESSORS = 132
"""The multiprocessors of an H100 or H200. Programs of few rows mostly wait for memory, so two on each of them read a
matrix faster."""

LEAST_STEPS = 4
"""The fewest loads of a program: with fewer, it spends most of its time on the first."""


@dataclass(frozen=True)
class Tile:
    """The tile of a program.

    Attributes:
      columns: columns of the result that a program computes.
      depth: terms of the sum that are loaded at once.
      warps, stages: the program's warps, and its stages: loads run stages - 1 ahead.
      half: block-scaled weights are widened to f16 and not to bf16; x is `ScaledRows`, of f16.
      splits: programs that share the sums of a tile; another kernel adds what they made of their parts of the depth.
    """

    columns: int
    depth: int
    warps: int
    stages: int
    half: bool = False
    splits: int = 1


def fitting_stages(tile: Tile, block: int, itemsize: int, *, gated: bool, most: int) -> int:
    """The stages of a tile, fewer where loads in flight would take more than `most` bytes of shared memory.

    block: rows of x.
    itemsize: bytes of a weight.
    gated: whether two tiles of weights are loaded.
    """
    loads = tile.depth * (2 * block + itemsize * tile.columns * (2 if gated else 1))
    # One of the loads is in registers. Exchanges between threads take _EXCHANGED bytes of shared memory.
    return max(1, min(tile.stages, 1 + (most - _EXCHANGED) // loads))


_EXCHANGED = 4096


def linear_tile(rows: int, columns: int, depth: int) -> tuple[int, Tile]:
    """The rows of a block, and the tile, for `rows` rows times one block-scaled matrix [columns, depth]."""
    block = 16 if rows <= 16 else 32 if rows <= 64 else 128 if rows <= 128 else 256
    tile = Tile(64, BLOCK, 4, 4) if block <= 32 else Tile(64, BLOCK, 8, 3)
    programs = columns // tile.columns * -(-rows // block)
    wanted = MULTIPROCESSORS if block == 256 else 2 * MULTIPROCESSORS
    return block, replace(tile, half=rows > FEW_ROWS, splits=split_count(programs, depth // BLOCK, wanted))


def split_count(programs: int, steps: int, wanted: int, least_steps: int = LEAST_STEPS) -> int:
    """How many equal parts, each of at least least_steps steps, the steps of a sum are cut into: the fewest with which
    there are at least `wanted` programs, or else the most; 1 if there are fewer steps than least_steps."""
    legal = [count for count in range(1, steps + 1) if steps % count == 0 and steps // count >= least_steps]
    return next((count for count in legal if programs * count >= wanted), max(legal, default=1))


def expert_tiles(pairs: int, num_experts: int, hidden: int, width: int, narrow: bool) -> tuple[int, Tile, Tile]:
    """Places of a block, and the tiles of the two products, for `pairs` pairs of token and expert.

    Until an expert has some ten rows the time is that of reading the weights: blocks are as low as a tensor core's
    tile. From some hundred on it is that of multiplying. Block-scaled weights are widened to f16: to bf16 it takes five
    times the instructions.

    hidden, width: C and I.
    narrow: whether the weights are block-scaled.
    """
    if narrow:
        block, up, down = _narrow_expert_tiles(pairs, num_experts)
        return block, replace(up, half=True), replace(down, half=True)
    return _wide_expert_tiles(pairs, num_experts, hidden, width)


def _narrow_expert_tiles(pairs: int, num_experts: int) -> tuple[int, Tile, Tile]:
    if pairs <= 16:
        return 16, Tile(64, BLOCK, 4, 4), Tile(64, BLOCK, 2, 4)
    if pairs <= 4 * num_experts:
        return 16, Tile(64, BLOCK, 4, 4), Tile(128, BLOCK, 4, 4)
    if pairs <= 48 * num_experts:
        return 16 if pairs <= 12 * num_experts else 32, Tile(128, BLOCK, 4, 3), Tile(128, BLOCK, 4, 4)
    return 128, Tile(128, BLOCK, 8, 3), Tile(128, BLOCK, 8, 3)


def _wide_expert_tiles(pairs: int, num_experts: int, hidden: int, width: int) -> tuple[int, Tile, Tile]:
    depth = 128 if width % 128 == 0 and hidden % 128 == 0 else 64
    if pairs <= 16:
        return 16, Tile(32, depth, 4, 3), Tile(64, depth, 4, 4)
    if pairs <= 12 * num_experts:
        return 16, Tile(64, depth, 4, 4), Tile(depth, depth, 4, 4)
    if pairs <= 48 * num_experts:
        return 32, Tile(64, depth, 4, 3), Tile(depth, depth, 4, 3)
    return 128, Tile(depth, depth // 2, 8, 4), Tile(256 if hidden % 256 == 0 else 64, depth // 2, 8, 4)
