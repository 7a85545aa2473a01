"""The sparse kernel's schedule without a GPU: tokens without lengths are shared out although none is looked at."""

import numpy as np
import pytest

from tests.emulator.schedule_interpreter import Interpreter
from tests.kernels.sm90.decode.test_schedule import check, check_fixed_cuts
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


@pytest.mark.parametrize("equal_lengths", [False, True])
@pytest.mark.parametrize(("heads", "tokens", "selected"), [(16, 33, 2048), (72, 7, 1000), (128, 3, 70), (9, 2, 1)])
def test_tokens_are_cut_at_fixed_columns(
    interpreter: Interpreter, heads: int, tokens: int, selected: int, equal_lengths: bool
) -> None:
    config = SparseConfig("bfloat16", heads, batch_invariant=True).decode
    lens = np.random.default_rng(tokens).integers(-5, selected + 200, tokens)
    pieces, split_info = interpreter.run(config, CTAS, lens, selected, equal_lengths=equal_lengths)
    lens = np.full(tokens, selected) if equal_lengths else np.clip(lens, 0, selected)
    check_fixed_cuts(config, CTAS, lens, np.ones(tokens, int), selected, pieces, split_info)
