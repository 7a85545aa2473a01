"""Indexer metadata: one row per query token from one row per request, lengths under context parallelism, slots,
and the tokens of pools.

Everything is static in shape and computed on the device: no host synchronisation (except under TSMLA_CHECK=1), and
capturable in a CUDA graph.
Source: the sparse-attention metadata builders of vLLM, with their length-0 underflow clamped.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsmla_jax.ops.exporting import exportable
from tsmla_jax.ops.inputs import describe, describe_ints
from tsmla_jax.ops.ragged import row_owner
from tsmla_jax.ops.selected import checks
from tsmla_kernels import contract
from tsmla_kernels.contract import rules
from tsmla_kernels.contract.layouts import check_page_span
from tsmla_kernels.contract.paging import has_slots

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Int32


@exportable
class DecodeMetadata(NamedTuple):
    """One row per query token.

    Attributes:
      seq_lens: [N] int32: how many keys the token sees, its own included; 0 for a padding row.
      block_tables: [N, M] int32: the block table of the token's request; zeros for a padding row.
      decode_lens: [N] int32, all ones: each row is now a request of one query token.
      request_ids: [N] int32: the request a row belongs to, -1 for a padding row.
    """

    seq_lens: jax.Array
    block_tables: jax.Array
    decode_lens: jax.Array
    request_ids: jax.Array


def expand_decode_metadata(
    seq_lens: Int32[Array, " B"],
    block_tables: Int32[Array, "B M"],
    decode_lens: int | Int32[Array, " B"],
    *,
    total_tokens: int,
) -> DecodeMetadata:
    """Flatten B requests of several query tokens into one-token rows (MTP, speculative decoding, prefill).

    Args:
      seq_lens: [B] int32, how many keys each request has, its new tokens included; 0 is legal and gives rows of length
        0.
      block_tables: [B, M] int32.
      decode_lens: an int m (every request has m tokens) or [B] int32; 0 gives a request no row.
      total_tokens: N, the static number of rows. Rows past the real ones are padding: length 0, page 0.

    Returns:
      DecodeMetadata. Row j of a request of m tokens has length max(seq_len - m + j + 1, 0).

    Raises:
      ValueError: shapes or dtypes disagree, m or total_tokens is negative, or m * B > total_tokens. TypeError:
      total_tokens isn't static.
      Under TSMLA_CHECK=1: ValueError when decode_lens are negative or sum past total_tokens.
    """
    requests = (describe_ints("seq_lens", seq_lens, "B").shape[0], "B, seq_lens's requests")
    num_requests, num_pages = describe_ints("block_tables", block_tables, "B M", requests).shape
    total_tokens = contract.static_int("total_tokens", total_tokens)
    seq_lens, block_tables = jnp.asarray(seq_lens), jnp.asarray(block_tables)
    if isinstance(decode_lens, int | np.integer):
        each = contract.static_int("decode_lens", decode_lens)
        if each * num_requests > total_tokens:
            raise ValueError(
                f"total_tokens: got {total_tokens}; {num_requests} requests of {each} tokens need {each * num_requests}"
            )
        lens = jnp.full((num_requests,), each, jnp.int32)
    else:
        describe_ints("decode_lens", decode_lens, "B", requests)
        lens = checks.decode_lens(jnp.asarray(decode_lens), total_tokens)
    ones = jnp.ones((total_tokens,), jnp.int32)
    if num_requests == 0:
        return DecodeMetadata(0 * ones, jnp.zeros((total_tokens, num_pages), jnp.int32), ones, -ones)
    cu_seqlens = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)])
    request, local, real = row_owner(cu_seqlens, total_tokens)
    length = jnp.maximum(seq_lens[request] - lens[request] + local + 1, 0)
    return DecodeMetadata(
        seq_lens=jnp.where(real, length, 0),
        block_tables=jnp.where(real[:, None], block_tables[request], 0),
        decode_lens=ones,
        request_ids=jnp.where(real, request, -1),
    )


def localize_context_lens(
    seq_lens: Int32[Array, "*N"], *, rank: int | Int32[Array, ""], world: int, interleave: int = 1
) -> Int32[Array, "*N"]:
    """How many of each request's tokens live on `rank` of `world`, tokens dealt out `interleave` at a time.

    Args:
      seq_lens: int32 of any shape, global lengths.
      rank: in [0, world); an int, or an int32 scalar of jax, which may be traced (jax.lax.axis_index).
      world, interleave: positive ints.

    Returns:
      int32 like seq_lens; 0 for an empty shard: its attention gives out 0 and lse -inf, which leave a merge unchanged.

    Raises:
      ValueError: world or interleave not positive, seq_lens not int32, or rank outside [0, world); the value of a rank
        that is a jax array is not checked. TypeError: world or interleave isn't static, or rank is no integer.
    """
    rules.check_dtype("seq_lens", describe("seq_lens", seq_lens), ("int32",))
    world = contract.static_int("world", world, minimum=1)
    interleave = contract.static_int("interleave", interleave, minimum=1)
    rank = _checked_rank(rank, world)
    seq_lens = jnp.asarray(seq_lens)
    full = seq_lens // (world * interleave)
    rest = seq_lens - full * (world * interleave)
    return full * interleave + jnp.clip(rest - rank * interleave, 0, interleave)


def _checked_rank(rank: Any, world: int) -> int | jax.Array:
    """`rank` as an int or an int32 scalar. TypeError unless it is an integer, ValueError for an int outside of [0,
    world)."""
    legal = f"0 to world - 1 = {world - 1}"
    if isinstance(rank, jax.Array):
        if rank.shape or not jnp.issubdtype(rank.dtype, jnp.integer):
            got = f"{rank.dtype} of shape {list(rank.shape)}"
            raise TypeError(f"rank: got {got}; legal: an int, {legal}, or an int32 scalar of jax")
        return rank.astype(jnp.int32)
    if isinstance(rank, bool) or not hasattr(rank, "__index__"):
        raise TypeError(f"rank: got {type(rank).__name__}; legal: an int, {legal}, or an int32 scalar of jax")
    if not 0 <= (index := operator.index(rank)) < world:
        raise ValueError(f"rank: got {rank}; legal: {legal}")
    return index


def positions_to_slots(
    positions: Int32[Array, "N K"],
    block_tables: Int32[Array, "N M"],
    page_size: int,
    *,
    page_span: int | None = None,
) -> Int32[Array, "N K"]:
    """Cache slots of positions within a sequence: block_table[position // Z] * span + position % Z; -1 for a position
    that is negative or past the table, or whose page is negative or too large for slots of int32.

    Args:
      positions: [N, K] int32; a negative one is "nothing here".
      block_tables: [N, M] int32, the table of each row's request.
      page_size: Z.
      page_span: the stride between pages in rows: Z, or more if pages are strided wider.

    Raises:
      TypeError, ValueError: shapes or dtypes disagree, page_size < 1, page_span < page_size, or a table of no page.
      Under TSMLA_CHECK=1: ValueError when a position lies past the block table.
    """
    num_rows = describe_ints("positions", positions, "N K").shape[0]
    max_pages = describe_ints("block_tables", block_tables, "N M", (num_rows, "N, positions's rows")).shape[1]
    page_size = contract.static_int("page_size", page_size, minimum=1)
    span = check_page_span("page_span", page_size if page_span is None else page_span, page_size)
    capacity = max_pages * page_size
    positions, block_tables = jnp.asarray(positions), jnp.asarray(block_tables)
    if capacity == 0:
        raise ValueError("block_tables: got shape [N, 0]; legal: at least one page a row")
    positions = checks.positions(positions, capacity)
    safe = jnp.clip(positions, 0, capacity - 1)
    pages = jnp.take_along_axis(block_tables, safe // page_size, axis=1)
    inside = (positions >= 0) & (positions < capacity) & has_slots(pages, span)
    return jnp.where(inside, pages * span + safe % page_size, -1)


def expand_pools(
    pools: Int32[Array, "N K"], positions: Int32[Array, " N"], pool_size: int, *, tail: bool = True
) -> Int32[Array, "N X"]:
    """Positions of the tokens of chosen pools, pool p being tokens p * pool_size to (p + 1) * pool_size - 1.

    The indexer of GLM-5.3-Flash chooses among pools of keys. A token sees a pool if it sees the pool's last key. It
    always sees the tail: the keys after the last such pool, up to its own.

    Args:
      pools: [N, K] int32; a negative one, or one too large for positions of int32, is "nothing here".
      positions: [N] int32, the position of each row's token, -1 for padding.
      pool_size: how many keys a pool has; static.
      tail: whether the tail's pool_size - 1 columns follow those of the pools; static.

    Returns:
      [N, K * pool_size + pool_size - 1] int32, or without the tail [N, K * pool_size]: positions for
      `positions_to_slots`, and -1 in unused columns and in padding rows.

    Raises:
      TypeError, ValueError: shapes or dtypes disagree, pool_size < 1, or tail is no bool.
    """
    rows = (describe_ints("pools", pools, "N K").shape[0], "N, pools's rows")
    describe_ints("positions", positions, "N", rows)
    pool_size = contract.static_int("pool_size", pool_size, minimum=1)
    pools, positions = jnp.asarray(pools), jnp.asarray(positions)
    keys = pools[:, :, None] * pool_size + jnp.arange(pool_size, dtype=jnp.int32)
    found = jnp.where(has_slots(pools, pool_size)[:, :, None], keys, -1).reshape(
        pools.shape[0], pools.shape[1] * pool_size
    )
    if contract.static_bool("tail", tail):
        seen = positions[:, None] + 1
        keys = seen // pool_size * pool_size + jnp.arange(pool_size - 1, dtype=jnp.int32)
        found = jnp.concatenate([found, jnp.where(keys < seen, keys, -1)], axis=1)
    return jnp.where(positions[:, None] >= 0, found, -1)


def remap_slots(slots: Int32[Array, "*N"], page_size: int, page_span: int) -> Int32[Array, "*N"]:
    """Slots of pages of `page_size` rows as rows of an array whose pages are `page_span` rows apart.

    slot -> (slot // page_size) * page_span + slot % page_size; -1 for a negative slot, and for one whose row would be
    too large for int32.

    Args:
      slots: int32 of any shape.
      page_size: Z.
      page_span: rows from one page to the next, at least Z.

    Raises:
      TypeError, ValueError: page_size < 1, a span narrower than the page, or slots that are not int32.
    """
    page_size = contract.static_int("page_size", page_size, minimum=1)
    span = check_page_span("page_span", page_span, page_size)
    rules.check_dtype("slots", describe("slots", slots), ("int32",))
    slots = jnp.asarray(slots)
    pages = slots // page_size
    return jnp.where(has_slots(pages, span), pages * span + slots % page_size, -1)
