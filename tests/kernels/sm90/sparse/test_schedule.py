"""The sparse kernel's schedule without a GPU: tokens without lengths are shared out although none is looked at, and
many tokens are dealt out in turn."""

import numpy as np
import pytest

from tests.emulator.schedule_checks import check, check_fixed_cuts
from tests.emulator.schedule_interpreter import Interpreter, Piece
from tsmla_kernels.sm90.latent.shape import OVERHEAD
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
    config = SparseConfig("bfloat16", heads, tile_rows=tile_rows).shape
    lens = np.full(tokens, selected)
    pieces, split_info = interpreter.run(config, CTAS, lens, selected, equal_lengths=True)
    check(interpreter.flags, config, CTAS, lens, np.ones(tokens, int), pieces, split_info)


@pytest.mark.parametrize("equal_lengths", [False, True])
@pytest.mark.parametrize(
    ("heads", "tile_rows", "tokens", "selected"),
    [(16, 64, 33, 2048), (72, 64, 7, 1000), (128, 64, 3, 70), (9, 64, 2, 1), (33, 32, 5, 700), (128, 32, 3, 2048)],
)
def test_tokens_are_cut_at_fixed_columns(
    interpreter: Interpreter, heads: int, tile_rows: int, tokens: int, selected: int, equal_lengths: bool
) -> None:
    config = SparseConfig("bfloat16", heads, tile_rows=tile_rows, batch_invariant=True).shape
    lens = np.random.default_rng(tokens).integers(-5, selected + 200, tokens)
    pieces, split_info = interpreter.run(config, CTAS, lens, selected, equal_lengths=equal_lengths)
    lens = np.full(tokens, selected) if equal_lengths else np.clip(lens, 0, selected)
    check_fixed_cuts(config, CTAS, lens, np.ones(tokens, int), selected, pieces, split_info)


LENGTHS = {
    "equal": np.full(70, 1000),
    "no rest": np.full(60, 640),
    "a rest of a few": np.full(103, 2048),
    "a prompt's": np.arange(1, 131),
    "some empty": np.where(np.arange(90) % 7, 700, 0),
    "one request after the other": np.concatenate([np.full(80, 64), np.full(80, 2048)]),
    "too few for rounds": np.full(25, 1000),
}


@pytest.mark.parametrize("ctas", [CTAS, 13])
@pytest.mark.parametrize(("heads", "tile_rows"), [(16, 64), (128, 64), (130, 64), (33, 32), (128, 32)])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.sampled(7)
def test_many_tokens_are_dealt_out(
    interpreter: Interpreter, heads: int, tile_rows: int, lengths: str, ctas: int
) -> None:
    lens, config = LENGTHS[lengths], SparseConfig("bfloat16", heads, tile_rows=tile_rows).shape
    width = int(lens.max())
    pieces, split_info = interpreter.run(config, ctas, lens, width, dealt=True)
    check(interpreter.flags, config, ctas, lens, np.ones(len(lens), int), pieces, split_info)
    if np.all(lens == width):
        equal, _ = interpreter.run(config, ctas, lens, width, dealt=True, equal_lengths=True)
        assert loads(equal, ctas).max() == loads(pieces, ctas).max()


@pytest.mark.parametrize("lengths", ["equal", "a rest of a few", "a prompt's"])
def test_dealt_tiles_balance(interpreter: Interpreter, lengths: str) -> None:
    """No CTA has more than a piece's start above the mean; those of runs have up to a tile."""
    lens, config = LENGTHS[lengths], SparseConfig("bfloat16", 64).shape
    pieces, _ = interpreter.run(config, CTAS, lens, int(lens.max()), dealt=True)
    load = loads(pieces, CTAS)
    assert load.max() <= load.mean() + OVERHEAD


def test_neighbours_are_under_way_together(interpreter: Interpreter) -> None:
    """A round is CTAS neighbouring tokens, one for each CTA, forwards and backwards in turn."""
    lens, config = LENGTHS["equal"], SparseConfig("bfloat16", 64).shape
    pieces, _ = interpreter.run(config, CTAS, lens, int(lens.max()), dealt=True, equal_lengths=True)
    for i in range(len(lens) // CTAS):
        turn = {piece.cluster: piece.request for c in range(CTAS) for piece in of(pieces, c)[i : i + 1]}
        tokens = range(i * CTAS, (i + 1) * CTAS)
        assert [turn[c] for c in range(CTAS)] == list(reversed(tokens) if i % 2 else tokens)


def of(pieces: list[Piece], cta: int) -> list[Piece]:
    """A CTA's pieces, in order."""
    return [piece for piece in pieces if piece.cluster == cta]


def loads(pieces: list[Piece], ctas: int) -> np.ndarray:
    """What each CTA's pieces cost, in key blocks."""
    return np.array([sum(p.end - p.begin + OVERHEAD for p in of(pieces, cta)) for cta in range(ctas)])
