"""Packed texts in training: a check that refuses weights without a gradient, and the texts' rows in pages, as the
kernels that choose keys read them.

Axes: T tokens or entries of all texts, packed one text after the other, B texts, P pages, M pages a text at most.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tsmla_jax.nn.checkpoints.weights import Params
from tsmla_jax.nn.inputs import check_tokens
from tsmla_jax.nn.products.block_scaled import BlockScaled
from tsmla_kernels.contract import FLOATS

_PAGE = 64


def check_trainable(params: Params, x: jax.Array, hidden_size: int) -> None:
    """The errors of `check_tokens` for x [T, E]; ValueError for a parameter that is block-scaled or of 8-bit floats,
    which have no gradient."""
    check_tokens(x, hidden_size, "T E")
    for name, value in params.items():
        if isinstance(value, BlockScaled) or value.dtype.name.startswith("float8"):
            kind = "block-scaled float8_e4m3fn" if isinstance(value, BlockScaled) else value.dtype.name
            raise ValueError(f"params[{name!r}]: got {kind}, which has no gradient; legal: {', '.join(FLOATS)}")


class Pages(NamedTuple):
    """Rows in pages that each belong to one text.

    rows  [P, Z, D]
    tables  [B, M] i32, the pages of each text; columns after its last page hold other pages
    """

    rows: jax.Array
    tables: jax.Array

    @property
    def capacity(self) -> int:
        """The most rows of a text."""
        return self.tables.shape[1] * self.rows.shape[1]


def in_pages(rows: jax.Array, lens: jax.Array, owners: tuple[jax.Array, jax.Array], max_len: int) -> Pages:
    """Packed rows [T, D] in pages of their texts: the kernels read pages of several keys, and texts start anywhere.

    Args:
        rows: packed texts.
        lens: [B], rows of each text.
        owners: the text and the position of each row; padding has a negative position.
        max_len: bound of a text's rows.
    """
    text, position = owners
    pages = (lens + (_PAGE - 1)) // _PAGE
    first = jnp.cumsum(pages) - pages
    count = rows.shape[0] // _PAGE + lens.shape[0]
    slots = jnp.where(position >= 0, first[text] * _PAGE + position, count * _PAGE)
    held = jnp.zeros((count * _PAGE, rows.shape[1]), rows.dtype).at[slots].set(rows, mode="drop")
    columns = max(1, -(-max_len // _PAGE))
    tables = jnp.minimum(first[:, None] + jnp.arange(columns, dtype=jnp.int32), count - 1)
    return Pages(held.reshape(count, _PAGE, -1), tables.astype(jnp.int32))


def all_keys(cu_seqlens: jax.Array, max_len: int, num_tokens: int) -> dict[str, jax.Array]:
    """The arguments of `indexer_loss` for all keys of packed texts, in pages of one token."""
    tables = cu_seqlens[:-1, None] + jnp.arange(max_len, dtype=jnp.int32)
    return {
        "block_tables": jnp.minimum(tables, num_tokens - 1).astype(jnp.int32),
        "seq_lens": jnp.diff(cu_seqlens).astype(jnp.int32),
        "cu_seqlens_q": cu_seqlens,
    }
