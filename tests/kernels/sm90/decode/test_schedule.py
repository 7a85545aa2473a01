"""The decode kernels' schedule without a GPU: every key block of every row tile in exactly one piece, pieces that
`combine` finds again, and work in balance. See schedule_interpreter.py."""

import dataclasses
from collections import defaultdict

import numpy as np
import pytest

from tests.emulator.schedule_checks import check, check_fixed_cuts
from tests.emulator.schedule_interpreter import Interpreter, Piece
from tsmla_kernels.catalog import MLA_DECODE
from tsmla_kernels.sm90.latent.shape import OVERHEAD, LatentShape

PAGE = 64
KINDS = ("equal", "nearly equal", "ragged", "some empty", "one long")


@pytest.fixture(scope="module")
def interpreter() -> Interpreter:
    return Interpreter()


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("heads", "q_len"), [(16, 7), (1, 150), (128, 3), (40, 2)])
def test_a_piece_knows_the_fewest_keys_of_its_tokens(
    interpreter: Interpreter, heads: int, q_len: int, ragged: bool
) -> None:
    rng = np.random.default_rng(heads)
    config = dataclasses.replace(config_of(heads, q_len, ragged=ragged), causal=False, visible_lens=True)
    lens = rng.integers(0, 900, 5)
    queries = rng.integers(0, q_len + 1, 5) if ragged else np.full(5, q_len)
    starts = np.concatenate([[0], queries.cumsum()])
    visible = rng.integers(-3, 1000, starts[-1]).astype(np.int32)
    pieces, split_info = interpreter.run(config, 7, lens, 16, starts if ragged else None, visible_lens=visible)
    check(interpreter.flags, config, 7, lens, queries, pieces, split_info)
    for piece in pieces:
        first = int(starts[piece.request]) * heads + piece.row
        last = min(first + config.tile_rows, int(starts[piece.request + 1]) * heads) - 1
        assert piece.fewest_keys == visible[first // heads : last // heads + 1].min()


def config_of(heads: int, q_len: int, *, dtype: str = "bfloat16", ragged: bool = False) -> LatentShape:
    options = {"num_heads": heads, "max_q_len": q_len, "dtype": dtype, "kv_dtype": dtype, "ragged": ragged}
    return MLA_DECODE.from_options({name: str(value).lower() for name, value in options.items()}).shape


def shares(num_clusters: int, pieces: list[Piece]) -> np.ndarray:
    """Each cluster's work in key blocks, starts included."""
    work = np.zeros(num_clusters)
    for piece in pieces:
        work[piece.cluster] += piece.end - piece.begin + OVERHEAD
    return work


def lengths(kind: str, count: int, keys: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "equal":
        return np.full(count, keys)
    if kind == "nearly equal":
        return keys + rng.integers(-keys // 100, keys // 100 + 1, count)
    drawn = rng.integers(keys // 2, keys * 3 // 2, count)
    if kind == "some empty":
        drawn[rng.random(count) < 0.3] = 0
    if kind == "one long":
        drawn[count // 2] = keys * count
    return drawn


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in range(1, 5))])
@pytest.mark.parametrize(
    ("heads", "q_len", "dtype", "num_clusters"),
    [
        pytest.param(16, 1, "bfloat16", 12, id="one row tile"),
        pytest.param(16, 1, "bfloat16", 7, id="odd clusters"),
        pytest.param(128, 1, "float8_e4m3fn", 10, id="fp8"),
        pytest.param(128, 3, "bfloat16", 9, id="three row tiles on tracks"),
        pytest.param(128, 5, "bfloat16", 8, id="five row tiles on a line"),
        pytest.param(128, 4, "bfloat16", 17, id="tracks, a cluster left over"),
    ],
)
def test_every_block_once(
    interpreter: Interpreter, heads: int, q_len: int, dtype: str, num_clusters: int, turn: int
) -> None:
    rng = np.random.default_rng(num_clusters)
    config = config_of(heads, q_len, dtype=dtype)
    # Fewer requests than clusters, about as many, twice as many and more than 32; short and long.
    batches = ((1, 700), (3, 90), (5, 4000), (num_clusters - 1, 3000), (2 * num_clusters, 2500), (37, 900))
    for i, (count, keys) in enumerate(batches):
        kind = KINDS[(i + num_clusters + turn) % len(KINDS)]
        lens = lengths(kind, count, keys, rng)
        pieces, split_info = interpreter.run(config, num_clusters, lens, -(-int(lens.max()) // PAGE) + 1)
        check(interpreter.flags, config, num_clusters, lens, np.full(count, q_len), pieces, split_info)
        work = shares(num_clusters, pieces)
        # A sixteenth to spare cuts and one that tracks may leave without work; and starts.
        assert work.max() <= work.sum() / num_clusters * (1 + 1 / 16) ** 2 + 16, (kind, count, keys, work)


def test_ragged_queries(interpreter: Interpreter) -> None:
    rng = np.random.default_rng(1)
    for heads, q_len, num_clusters in ((16, 4, 12), (128, 4, 7)):
        config = config_of(heads, q_len, ragged=True)
        for count, keys in ((1, 300), (6, 2000), (40, 700)):
            queries = rng.integers(0, q_len + 1, count)
            lens = lengths("some empty", count, keys, rng)
            offsets = np.concatenate([[0], queries.cumsum()])
            pieces, split_info = interpreter.run(config, num_clusters, lens, 40, offsets)
            check(interpreter.flags, config, num_clusters, np.minimum(lens, 40 * PAGE), queries, pieces, split_info)


def test_lengths_beyond_the_table_are_cut_to_it(interpreter: Interpreter) -> None:
    lens = np.asarray([10**9, -5, 100])
    config = config_of(16, 1)
    pieces, split_info = interpreter.run(config, 6, lens, 3)
    check(interpreter.flags, config, 6, np.clip(lens, 0, 3 * PAGE), np.ones(3, int), pieces, split_info)


def test_requests_by_their_length_are_cut_less(interpreter: Interpreter) -> None:
    """As many requests as clusters: at most one of two is cut; twice as many: none is. And every cluster has work."""
    lens = np.random.default_rng(5).permutation(np.linspace(1500, 4500, 24).astype(int))
    config = config_of(16, 1)
    for num_clusters, most in ((24, 24), (12, 0)):
        pieces, split_info = interpreter.run(config, num_clusters, lens, 80)
        check(interpreter.flags, config, num_clusters, lens, np.ones(24, int), pieces, split_info)
        assert sum(piece.slot >= 0 for piece in pieces) <= most
        work = shares(num_clusters, pieces)
        assert work.min() > 0.7 * work.max()


def test_row_tiles_of_a_request_are_cut_alike(interpreter: Interpreter) -> None:
    """Side by side, so that clusters walk the same keys at the same time."""
    lens = np.random.default_rng(6).integers(500, 5000, 7)
    pieces, _ = interpreter.run(config_of(128, 4), 16, lens, 80)
    cuts = defaultdict(set)
    for piece in pieces:
        cuts[piece.request, piece.row].add((piece.begin, piece.end))
    for (request, _), edges in cuts.items():
        assert edges == cuts[request, 0]


@pytest.mark.parametrize(
    ("heads", "q_len", "dtype", "ragged"),
    [
        (16, 1, "bfloat16", False),
        (16, 4, "float8_e4m3fn", True),
        (128, 3, "bfloat16", True),
        (128, 2, "bfloat16", False),
    ],
)
def test_cuts_do_not_depend_on_the_batch(
    interpreter: Interpreter, heads: int, q_len: int, dtype: str, ragged: bool
) -> None:
    rng = np.random.default_rng(heads + q_len)
    config = dataclasses.replace(config_of(heads, q_len, dtype=dtype, ragged=ragged), batch_invariant=True)
    width = 40
    for count, num_clusters, kind in ((1, 12, "equal"), (5, 7, "some empty"), (35, 9, "one long")):
        lens = np.minimum(lengths(kind, count, 900, rng), width * PAGE)
        queries = rng.integers(0, q_len + 1, count) if ragged else np.full(count, q_len)
        offsets = np.concatenate([[0], queries.cumsum()]) if ragged else None
        pieces, split_info = interpreter.run(config, num_clusters, lens, width, offsets)
        check_fixed_cuts(config, num_clusters, lens, queries, width, pieces, split_info)
