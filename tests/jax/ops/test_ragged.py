"""Packed tokens: who owns a row, what it sees, and the way to padded rows and back."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.jax.ops.programs import ints
from tsmla_jax.ops import ragged

# Rows of no request in front and behind; one request has no token.
OFFSETS, ROWS, LONGEST = ints([2, 4, 4, 7]), 9, 3
OWNER = jax.jit(ragged.row_owner, static_argnums=1)
PAD = jax.jit(ragged.to_padded, static_argnums=2)
PACK = jax.jit(ragged.to_packed, static_argnums=(2, 3))


def test_rows_and_their_requests() -> None:
    request, position, owned = OWNER(OFFSETS, ROWS)
    assert owned.tolist() == [row in range(2, 7) for row in range(ROWS)]
    assert request[2:7].tolist() == [0, 0, 2, 2, 2] and position[2:7].tolist() == [0, 1, 0, 1, 2]
    assert request.min() >= 0 and request.max() <= 2 and position.min() >= 0
    assert OWNER(ints([0, 40_000]), 40_000)[1][-1] == 39_999


def test_keys_that_a_row_sees() -> None:
    _, seen = jax.jit(ragged.seen_keys, static_argnums=2)(ints([9, 4, 1]), OFFSETS, ROWS)
    assert seen.tolist() == [0, 0, 8, 9, 0, 0, 1, 0, 0]


def test_padded_and_back() -> None:
    packed = jnp.arange(10.0, 17.0)  # the last request's last row is the last
    padded = PAD(packed, OFFSETS, LONGEST)
    assert padded[0, :2].tolist() == [12, 13] and padded[2].tolist() == [14, 15, 16]
    np.testing.assert_array_equal(PACK(padded, OFFSETS, ROWS, -1.0), [-1, -1, 12, 13, 14, 15, 16, -1, -1])
    np.testing.assert_array_equal(PACK(padded[:, :2], OFFSETS, ROWS, -1.0), [-1, -1, 12, 13, 14, 15, -1, -1, -1])
