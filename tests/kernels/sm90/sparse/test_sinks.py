"""The sinks that the softmax warps read: of rows behind a tile's last head they read none beyond the array's end."""

import types
from typing import Any

import numpy as np
import pytest

from tests.emulator.numeric_cute import numeric

pytest.importorskip("cutlass")

from tsmla_kernels.sm90.decode.memory import Piece
from tsmla_kernels.sm90.decode.softmax import Softmax
from tsmla_kernels.sm90.sparse.config import SparseConfig

CUTE = types.SimpleNamespace(
    arch=types.SimpleNamespace(rcp_approx=lambda x: 1 / x),
    math=types.SimpleNamespace(log2=lambda x, fastmath: np.log2(x)),
)


class Float32(float):
    """Not the DSL's."""

    inf = np.inf


@pytest.mark.parametrize(("heads", "tile_rows"), [(1, 64), (9, 64), (16, 64), (48, 32), (64, 64), (72, 64), (100, 32)])
def test_rows_have_sinks_of_heads(heads: int, tile_rows: int) -> None:
    config = SparseConfig("bfloat16", heads, "v4", head_dim=512, sinks=True, tile_rows=tile_rows).decode
    read = set()

    def share_beside_sink(lse: float, head: int, sinks: Any) -> float:
        assert 0 <= head < heads
        read.add(head)
        return 0.5

    finish_row = numeric(Softmax.finish_row, share_beside_sink=share_beside_sink, Float32=Float32)
    finish_row.__globals__.update(cute=CUTE, cutlass=types.SimpleNamespace(min=min))  # type: ignore[attr-defined]
    softmax = Softmax(config, 3)
    for first in range(0, heads, config.tile_rows):
        valid = min(config.tile_rows, heads - first)
        piece = {Piece.SLOT: -1, Piece.VALID_ROWS: valid, Piece.ROW_IN_REQUEST: first, Piece.ROW: first}
        inverse, lse = np.zeros((64, 3)), np.full(heads, np.nan)
        results = types.SimpleNamespace(inverse=inverse, lse=lse, partial_lse=None, out_scale=1.0, rank=0, sinks=())
        for row in range(config.p_rows):  # those without a head have sums too
            finish_row(softmax, row, (2.0, 1.0), piece, 0, results)
        assert (inverse[:valid, 0] == 0.25).all() and np.isfinite(lse[first : first + valid]).all()
    assert read == set(range(heads))
