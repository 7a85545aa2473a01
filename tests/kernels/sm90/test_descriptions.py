"""The descriptions of pieces in decode's and sparse_mla's shared memory: written before a copying warp reads them, and
kept until the last value warp has left the piece. The scheduling warp, a value warp, describes a piece `lookahead`
pieces before it comes to it, and nothing but the ring's stages keeps the other warps from being further ahead.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("cutlass")

from tsmla_kernels.sm90.decode.config import FP8, DecodeConfig
from tsmla_kernels.sm90.decode.kernel import MlaDecode
from tsmla_kernels.sm90.decode.memory import LOOKAHEAD
from tsmla_kernels.sm90.sparse.config import SparseConfig
from tsmla_kernels.sm90.sparse.kernel import SparseMla

PIECES = 60


class Descriptions(NamedTuple):
    """What decides how far warps are apart.

    Attributes:
      stages: of the ring. kept: descriptions that are kept. lookahead: how many pieces ahead one is written.
      q_stages: stages that Q takes before a piece's blocks.
      reads_early: 1 where a copying warp reads a description before it waits for the piece's first stage.
    """

    stages: int
    kept: int
    lookahead: int
    q_stages: int
    reads_early: int


def of_decode(config: DecodeConfig) -> Descriptions:
    kernel = MlaDecode(config)
    lookahead = getattr(kernel.values, "lookahead", LOOKAHEAD)
    return Descriptions(kernel.ring.stages, kernel.ring.pieces_kept, lookahead, 1, 0)


def of_sparse(config: SparseConfig) -> Descriptions:
    kernel = SparseMla(config)
    q_stages = int(config.q_in_registers)  # Q then goes through the ring
    return Descriptions(kernel.ring.stages, kernel.ring.pieces_kept, kernel.values.lookahead, q_stages, 1)


DECODE = {
    f"{latent} + {rope} of {dtype} over {kv_dtype}, {heads} heads": DecodeConfig(
        dtype, heads, 1, latent, rope, kv_dtype=kv_dtype, cluster=2 if heads > 64 else 1
    )
    for latent, rope in itertools.product((512, 256), (64, 0))
    for dtype, kv_dtype in (("bfloat16", None), (FP8, FP8), ("bfloat16", FP8))
    for heads in (16, 32, 128)
}
SPARSE = {
    f"{layout} {width} of {kv_dtype}, {dtype} queries, {heads} heads, tiles of {tile_rows}": SparseConfig(
        dtype,
        heads,
        layout,
        kv_dtype,
        width,
        page_size=64 * (layout == "v4"),
        page_span=64 * (layout == "v4"),
        tile_rows=tile_rows,
    )
    for layout, kv_dtype, width, tile_rows in (
        ("v32", "uint8", 576, 64),
        ("v4", "uint8", 512, 64),
        ("plain", FP8, 576, 64),
        ("plain", FP8, 512, 64),
        ("plain", "bfloat16", 512, 64),
        ("plain", "bfloat16", 576, 32),
        ("plain", "bfloat16", 576, 64),
        ("plain", "float16", 512, 64),
    )
    for dtype, heads in itertools.product(("bfloat16", FP8), (16, 32, 64))
    if dtype != FP8 or layout == "v32" or kv_dtype == FP8
}


def check(ring: Descriptions, blocks: list[int]) -> None:
    """Walk through pieces of these numbers of blocks, each warp as far from the others as the ring lets it be."""
    firsts = [0, *itertools.accumulate(ring.q_stages + n for n in blocks)]  # each piece's first use of a stage
    piece_of = [piece for piece, n in enumerate(blocks) for _ in range(ring.q_stages + n)]
    for piece, first in enumerate(firsts[:-1]):
        # The last use that the scheduling warp must have released: it is then in that piece, or behind it.
        released = first - ring.reads_early - ring.stages
        under_way = 0 if released < 0 else piece_of[released]
        assert piece < under_way + ring.lookahead, f"piece {piece} is not described in piece {under_way}"
        # A value warp stores the results of this piece, whose stages it has all released.
        behind = firsts[piece + 1] + ring.stages
        done = max(p for p in range(piece, len(blocks)) if p == piece or firsts[p + 1] <= behind)
        assert done + ring.lookahead < piece + ring.kept, f"piece {piece} is written over by piece {done}'s warp"


@pytest.mark.parametrize("ring", [
    *(pytest.param(of_decode(config), id=f"decode, {name}") for name, config in DECODE.items()),
    *(pytest.param(of_sparse(config), id=f"sparse, {name}") for name, config in SPARSE.items()),
])  # fmt: skip
def test_a_description_is_there_when_it_is_read(ring: Descriptions) -> None:
    check(ring, [1] * PIECES)
    rng = np.random.default_rng(ring.stages)
    for most in (2, 3, 9):
        for _ in range(20):
            check(ring, rng.integers(1, most + 1, PIECES).tolist())
