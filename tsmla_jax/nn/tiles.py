"""Which tiles the products of `grouped_matmul` take, by their sizes: of the experts, and of block-scaled matrices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tsmla_jax.nn.block_scaled import BLOCK

BLOCKS_BY_KERNEL = 2048
"""Pairs of a row and a group up to which `make_blocks` is one kernel, and not several of XLA."""

HALF_PAIRS = range(17, 1025)
"""Pairs of a token and an expert for which block-scaled weights of experts are widened to f16 (`Tile.half`). For all
others, whose time is not that of reading weights, they are widened to bf16, as those of other matrices are."""


@dataclass(frozen=True)
class Tile:
    """The tile of a program.

    Attributes:
      columns: of the result.
      depth: terms of the sum that are loaded at once.
      warps, stages: of the program; loads run stages - 1 ahead.
      half: block-scaled weights are widened to f16 and not to bf16; x is f16, as `halved` makes it.
    """

    columns: int
    depth: int
    warps: int
    stages: int
    half: bool = False


def linear_tile(rows: int, columns: int) -> tuple[int, Tile]:
    """Rows of a block, and the tile, of `rows` rows times one block-scaled matrix [columns, K]."""
    block = 16 if rows <= 64 else 32 if rows <= 128 else 64 if rows <= 512 else 128
    # Fewer programs than a GPU has multiprocessors would leave some of them without work.
    programs = {part: columns // part * -(-rows // block) for part in (64, 32, 16)}
    part = next((part for part, count in programs.items() if count >= 132), 16)
    return block, Tile(part, BLOCK, 4, 4) if block < 128 else Tile(64, BLOCK, 8, 3)


def expert_tiles(pairs: int, num_experts: int, hidden: int, width: int, narrow: bool) -> tuple[int, Tile, Tile]:
    """Places of a block, and the tiles of the two products, for `pairs` pairs of token and expert.

    Until an expert has some ten rows the time is that of reading the weights: blocks are as low as a tensor core's
    tile. From some hundred on it is that of multiplying.
    hidden, width: C and I. narrow: whether the weights are block-scaled."""
    block, tiles = _expert_tiles(pairs, num_experts, hidden, width, narrow)
    up, down = (replace(tile, half=narrow and pairs in HALF_PAIRS) for tile in tiles)
    return block, up, down


def _expert_tiles(pairs: int, num_experts: int, hidden: int, width: int, narrow: bool) -> tuple[int, tuple[Tile, Tile]]:
    depth = 128 if width % 128 == 0 and hidden % 128 == 0 else 64
    if pairs <= 16:
        return 16, (Tile(32, depth, 4, 3), Tile(64, depth, 4, 4))
    if pairs <= 12 * num_experts:
        return 16, (Tile(64, depth, 4, 4), Tile(depth, depth, 4, 4))
    if pairs <= 48 * num_experts:
        return 32, (Tile(64, depth, 4, 3), Tile(depth, depth, 4, 3))
    if narrow:
        return 128, (Tile(64, depth, 8, 3), Tile(depth, depth, 8, 3))
    return 128, (Tile(depth, depth // 2, 8, 4), Tile(256 if hidden % 256 == 0 else 64, depth // 2, 8, 4))
