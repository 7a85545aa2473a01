"""The sparse kernel's schedule without a GPU: tokens without lengths are shared out although none is looked at."""

import numpy as np
import pytest

from tests.emulator.schedule_interpreter import Interpreter
from tests.kernels.sm90.decode.test_schedule import check
from tsmla_kernels.sm90.sparse.config import SparseConfig

CTAS = 20


@pytest.fixture(scope="module")
def interpreter() -> Interpreter:
    return Interpreter()


@pytest.mark.parametrize(
    ("heads", "tile_rows", "tokens", "selected"),
    [
        (16, 64, 1, 2048),
        (16, 64, 3, 70),
        (64, 32, 1, 640),
        (128, 32, 2, 2048),
        (128, 64, 15, 1000),
        (16, 64, 50, 640),
        (7, 64, 2, 0),
    ],
)
def test_tokens_without_lengths(
    interpreter: Interpreter, heads: int, tile_rows: int, tokens: int, selected: int
) -> None:
    config = SparseConfig("bfloat16", heads, tile_rows=tile_rows).decode
    lens = np.full(tokens, selected)
    pieces, split_info = interpreter.run(config, CTAS, lens, selected, equal_lengths=True)
    check(interpreter.flags, config, CTAS, lens, np.ones(tokens, int), pieces, split_info)
