"""The sinks that the softmax warps read: of rows behind a tile's last head they read none beyond the array's end."""

import types

import numpy as np
import pytest

from tests.emulator.numeric_cute import numeric

pytest.importorskip("cutlass")

from tsmla_kernels.sm90.latent.memory import Piece
from tsmla_kernels.sm90.latent.softmax import RowResults
from tsmla_kernels.sm90.sparse.config import SparseConfig
from tsmla_kernels.sm90.sparse.scores import SparseScores

CUTE = types.SimpleNamespace(
    make_rmem_tensor=lambda shape, dtype: np.full(shape, np.nan),
    arch=types.SimpleNamespace(rcp_approx=lambda x: 1 / x),
    math=types.SimpleNamespace(log2=lambda x, fastmath: np.log2(x)),
)
CUTLASS = types.SimpleNamespace(min=min, range_constexpr=range)


class Float32(float):
    """Not the DSL's."""

    inf = np.inf


class Sinks(list[float]):
    """Of all heads."""

    def __getitem__(self, head: int) -> float:  # type: ignore[override]
        assert 0 <= head < len(self)
        return super().__getitem__(head)


@pytest.mark.parametrize(("heads", "tile_rows"), [(1, 64), (9, 64), (16, 64), (48, 32), (64, 64), (72, 64), (100, 32)])
def test_rows_have_sinks_of_heads(heads: int, tile_rows: int) -> None:
    config = SparseConfig("bfloat16", heads, "v4", head_dim=512, sinks=True, tile_rows=tile_rows)
    tile = config.shape
    finish_row = numeric(RowResults.finish_row, share_beside_sink=lambda lse, sink: sink, Float32=Float32)
    sinks_of = numeric(SparseScores.sinks_of, Float32=Float32)
    for function in (finish_row, sinks_of):
        function.__globals__.update(cute=CUTE, cutlass=CUTLASS)  # type: ignore[attr-defined]
    row_results, scores = RowResults(tile, 3), types.SimpleNamespace(config=config)
    inverses = []
    for first in range(0, heads, tile.tile_rows):
        valid = min(tile.tile_rows, heads - first)
        piece = {Piece.SLOT: -1, Piece.VALID_ROWS: valid, Piece.ROW_IN_REQUEST: first, Piece.ROW: first}
        inverse, lse = np.zeros((64, 3)), np.full(heads, np.nan)
        results = types.SimpleNamespace(inverse=inverse, lse=lse, partial_lse=None, out_scale=1.0, rank=0)
        held = types.SimpleNamespace(results=types.SimpleNamespace(sinks=Sinks(range(1, heads + 1))))
        for t in range(128):  # every thread of the warps reads; those of rows finish them
            sinks = sinks_of(scores, piece, t, held)
            if t % 4 == 0 and t < 2 * tile.p_rows:  # rows without a head have sums, too
                for e in range(2):
                    finish_row(row_results, t // 2 + e, (2.0, 1.0), piece, 0, results, sinks[e])
        assert np.isfinite(lse[first : first + valid]).all()
        inverses.extend(inverse[:valid, 0])
    assert inverses == [head / 2 for head in range(1, heads + 1)]
