"""Rows of one token from requests of several, lengths under context parallelism, and positions as slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from tests.jax.ops.programs import ints
from tests.oracles import sparse as oracle
from tsmla_jax import sparse

EXPAND = jax.jit(sparse.expand_decode_metadata, static_argnames="total_tokens")


def test_the_example_of_the_semantics() -> None:
    tables = ints([[1, 2], [3, 4], [5, 6], [7, 8]])
    got = EXPAND(ints([10, 7, 12, 0]), tables, ints([3, 1, 4, 0]), total_tokens=10)
    assert got.seq_lens.tolist() == [8, 9, 10, 7, 9, 10, 11, 12, 0, 0]
    assert got.block_tables[:, 0].tolist() == [1, 1, 1, 3, 5, 5, 5, 5, 0, 0]
    assert got.request_ids.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, -1, -1]
    assert got.decode_lens.tolist() == [1] * 10


@settings(max_examples=60)
@given(
    requests=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=3, max_size=3),
    padding=st.integers(0, 2),
)
def test_ragged_equals_a_loop(requests: list[tuple[int, int]], padding: int) -> None:
    seq_lens, decode_lens = (list(x) for x in zip(*requests, strict=True))
    total = 12 + padding
    tables = [[10 * r + 1, 10 * r + 2] for r in range(3)]
    got = EXPAND(ints(seq_lens), ints(tables), ints(decode_lens), total_tokens=total)
    want = oracle.metadata(seq_lens, tables, decode_lens, total)
    assert got.seq_lens.tolist() == [length for length, _ in want]
    assert got.block_tables.tolist() == [table for _, table in want]


@pytest.mark.parametrize("each", [1, 3, np.int64(2)])
def test_uniform_clamps_and_equals_ragged(each: int | np.integer) -> None:
    seq_lens, tables = [0, 1, 2, 7], [[r, r + 1] for r in range(4)]
    got = sparse.expand_decode_metadata(ints(seq_lens), ints(tables), each, total_tokens=4 * each + 2)
    want = oracle.metadata(seq_lens, tables, [each] * 4, 4 * each + 2)
    assert got.seq_lens.tolist() == [length for length, _ in want]
    assert min(got.seq_lens.tolist()) == 0
    assert got.block_tables.tolist() == [table for _, table in want]


def test_no_request_and_no_row() -> None:
    got = sparse.expand_decode_metadata(ints([]), jnp.zeros((0, 3), jnp.int32), 1, total_tokens=2)
    assert got.seq_lens.tolist() == [0, 0]
    assert got.block_tables.shape == (2, 3)
    none = sparse.expand_decode_metadata(ints([4]), ints([[1]]), ints([0]), total_tokens=0)
    assert none.seq_lens.shape == (0,)


@given(world=st.integers(1, 5), interleave=st.integers(1, 4), length=st.integers(0, 60))
def test_localized_lengths_count_the_tokens_dealt_out(world: int, interleave: int, length: int) -> None:
    for rank in range(world):
        got = sparse.localize_context_lens(ints([length]), rank=rank, world=world, interleave=interleave)
        assert got.tolist() == [sum((token // interleave) % world == rank for token in range(length))]


def test_localized_lengths_with_a_traced_rank() -> None:
    mesh = Mesh(np.asarray(jax.devices()[:4]), "x")

    @jax.shard_map(mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec("x"))
    def local(lens: jax.Array) -> jax.Array:
        return sparse.localize_context_lens(lens, rank=jax.lax.axis_index("x"), world=4, interleave=2)[None]

    got = local(ints([0, 1, 7, 8, 19]))
    assert got.sum(axis=0).tolist() == [0, 1, 7, 8, 19]
    assert got[3].tolist() == [0, 0, 1, 2, 4]


def test_positions_become_slots() -> None:
    tables = ints([[3, 1], [0, 2]])
    got = sparse.positions_to_slots(ints([[0, 5, -1], [7, 4, 3]]), tables, 4)
    assert got.tolist() == [[12, 5, -1], [11, 8, 3]]
    wide = sparse.positions_to_slots(ints([[0, 5, -1], [7, 4, 3]]), tables, 4, page_span=6)
    assert wide.tolist() == sparse.remap_slots(got, 4, 6).tolist() == [[18, 7, -1], [15, 12, 3]]


def test_numbers_too_large_for_int32_do_not_wrap() -> None:
    tables, last = ints([[2**26, -1, 2**25 - 1]]), 2**31 - 1
    positions = ints([[0, 64, 191]])
    assert sparse.positions_to_slots(positions, tables, 64).tolist() == [[-1, -1, last]]
    assert sparse.positions_to_slots(positions, tables, 64, page_span=128).tolist() == [[-1, -1, -1]]
    assert sparse.remap_slots(ints([last, 2**30 - 1, -5]), 64, 128).tolist() == [-1, last - 64, -1]
    assert sparse.expand_pools(ints([[2**30, 1]]), ints([9]), 4, tail=False).tolist() == [[-1] * 4 + [4, 5, 6, 7]]


def test_a_position_past_the_table_has_no_slot() -> None:
    """As `slots` and a top-k say it: the last key must not count once more for each position past it."""
    tables = ints([[3, 1], [0, 2]])
    assert sparse.positions_to_slots(ints([[7, 8], [2**31 - 1, 0]]), tables, 4).tolist() == [[7, -1], [-1, 0]]
    assert sparse.window_slots(ints([8, 9]), tables, page_size=4, window=3).tolist() == [[6, 7, -1], [11, -1, -1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sparse.expand_decode_metadata(ints([1, 2]), ints([[0]]), 1, total_tokens=4), "block_tables.*B"),
        (lambda: sparse.expand_decode_metadata(ints([1]), ints([[0]]), 3, total_tokens=2), "total_tokens: got 2"),
        (lambda: sparse.expand_decode_metadata(jnp.ones(1), ints([[0]]), 3, total_tokens=3), "seq_lens: got dtype"),
        (lambda: sparse.expand_decode_metadata(ints([1]), ints([[0]]), ints([1, 1]), total_tokens=2), "decode_lens"),
        (lambda: sparse.localize_context_lens(ints([1]), rank=2, world=2), "rank: got 2"),
        (lambda: sparse.localize_context_lens(ints([1]), rank=np.int64(2), world=2), "rank: got 2"),
        (lambda: sparse.localize_context_lens(ints([1]), rank=0, world=2, interleave=0), "interleave: got 0"),
        (lambda: sparse.remap_slots(ints([1]), 4, 3), "page_span: got 3.*at least the page size 4"),
        (lambda: sparse.positions_to_slots(ints([[1]]), ints([[1]]), 4, page_span=2), "page_span: got 2"),
        (lambda: sparse.remap_slots(jnp.ones(1), 4, 5), "slots: got dtype float32; legal: int32"),
    ],
)
def test_refuses(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_rank_of_another_type_is_refused_and_a_traced_one_is_legal() -> None:
    with pytest.raises(TypeError, match=r"^rank: got float; legal: an int, 0 to world - 1 = 1, or an int32 sc"):
        sparse.localize_context_lens(ints([1]), rank=0.0, world=2)
    localize = jax.jit(lambda lens, rank: sparse.localize_context_lens(lens, rank=rank, world=2))
    assert localize(ints([3]), jnp.int32(1)).tolist() == [1]
    for rank in (jnp.float32(1), jnp.arange(2), jnp.array(True)):
        with pytest.raises(
            TypeError, match=r"^rank: got \w+ of shape \[2?\]; legal: an int, 0 to world - 1 = 1, or an"
        ):
            localize(ints([3, 4]), rank)


def test_lengths_are_int32_whatever_integer_the_rank_is() -> None:
    with jax.enable_x64(True):
        for rank in (1, np.int64(1), jnp.int64(1), jnp.uint8(1)):
            found = sparse.localize_context_lens(ints([3, 4]), rank=rank, world=2)
            assert found.dtype == jnp.int32 and found.tolist() == [1, 2]


def test_checks_see_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    with pytest.raises(ValueError, match="decode_lens: 5 query tokens in all; legal: at most total_tokens = 4"):
        sparse.expand_decode_metadata(ints([9, 9]), ints([[0], [0]]), ints([3, 2]), total_tokens=4)
    with pytest.raises(ValueError, match="decode_lens: request 1 has -1"):
        sparse.expand_decode_metadata(ints([9, 9]), ints([[0], [0]]), ints([3, -1]), total_tokens=4)
    with pytest.raises(ValueError, match="row 1 asks for position 4 in column 0; legal: at most 3, what its"):
        sparse.positions_to_slots(ints([[3], [4]]), ints([[0], [0]]), 4)
    with pytest.raises(Exception, match="row 1 asks for position 4"):
        jax.block_until_ready(jax.jit(lambda x: sparse.positions_to_slots(x, ints([[0], [0]]), 4))(ints([[3], [4]])))
