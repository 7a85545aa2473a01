"""The source from which decode reads Q: the one or two stages of the ring that hold it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tsmla_kernels.sm90.latent.query import four_words
from tsmla_kernels.sm90.warp import remainder


class StagedQuery:
    """Reads Q from stages of the ring that hold `q_rows` rows each."""

    def __init__(self, q_rows: int) -> None:
        self.q_rows = q_rows

    @cute.jit
    def row(self, sources: tuple[Int32, Int32], row: Int32, kind: cutlass.Constexpr[int]):
        """The address of row `row` of Q; `sources` are the addresses of the one or two stages that hold Q."""
        source, source_high = sources
        if row >= self.q_rows:
            source = source_high
        return source + remainder(row, self.q_rows) * 128

    @cute.jit
    def words(self, source: Int32, row: Int32, tile: Int32, chunk: Int32, kind: cutlass.Constexpr[int]):
        """Four words of row `row`, whose address is `source`: the chunk of 16 bytes with index `chunk` in column tile
        `tile` of 64 columns."""
        return four_words(source + tile * (self.q_rows * 128) + ((chunk ^ (row & 7)) << 4))
