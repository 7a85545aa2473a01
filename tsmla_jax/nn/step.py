"""The new tokens of one step and where they belong: the arguments that every layer of a model shares.

Axes: B requests, S new tokens a request, T new tokens in all (ragged, packed one request after the other), M pages a
request at most, Z page size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

import jax
import jax.numpy as jnp

from tsmla_jax.nn import context_parallel
from tsmla_jax.ops.exporting import exportable
from tsmla_jax.ops.inputs import check_mesh_axis, describe_ints
from tsmla_jax.ops.ragged import row_owner
from tsmla_jax.ops.selected import checks
from tsmla_kernels import contract
from tsmla_kernels.contract.layouts import V4_PACKED
from tsmla_kernels.contract.paging import has_slots
from tsmla_kernels.contract.rules import static_dim

_T = TypeVar("_T")


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """One step over a paged cache; a pytree whose sizes and axis are static. Make it once for all layers.

    New tokens are either dense (x is [B, S, E]; cu_seqlens_q and max_q_len are None) or ragged (x is [T, E]).

    Attributes:
        block_tables: [B, M] i32, the pages of each request.
        seq_lens: [B] i32, how many tokens each request has, new ones included. New token i of S has position
            seq_lens - S + i.
        slot_mapping: [B, S] or [T] i32, the slots of the new tokens (page * Z + offset); a token with -1 is not
            written.
        cu_seqlens_q: [B + 1] i32, where each request's new tokens start; tokens from cu_seqlens_q[B] on are padding.
        max_q_len: static bound of the new tokens of a request.
        context_axis: static, the mesh axis whose devices share the keys (`nn.context_parallel`); slot_mapping and
            block_tables are then the device's own.
        page_size: static, Z of the caches that slot_mapping is for; layers refuse caches with other pages. A step made
            by hand may have None: then the size of pages is not checked.
        max_seq_len: static bound of seq_lens: V3.2's layers choose the form of their attention by it, and may leave out
            pages after it when they choose keys. None takes the capacity of the block tables.
    """

    block_tables: jax.Array
    seq_lens: jax.Array
    slot_mapping: jax.Array
    cu_seqlens_q: jax.Array | None = None
    max_q_len: int | None = field(default=None, metadata={"static": True})
    context_axis: str | None = field(default=None, metadata={"static": True})
    page_size: int | None = field(default=None, metadata={"static": True})
    max_seq_len: int | None = field(default=None, metadata={"static": True})

    @classmethod
    def dense(
        cls,
        block_tables: jax.Array,
        seq_lens: jax.Array,
        *,
        new_tokens: int = 1,
        page_size: int,
        context_axis: str | None = None,
    ) -> Step:
        """The step that brings `new_tokens` (S) tokens of every request.

        Args:
            block_tables: [B, M] i32.
            seq_lens: [B] i32, the new tokens included.
            new_tokens: S, static.
            page_size: Z of the caches, static.
            context_axis: as in `ragged`.

        Raises:
            TypeError, ValueError: an argument has the wrong type, shape or dtype; page_size is less than 1, or another
                size less than 0; or context_axis is not a mesh axis of a `jax.shard_map` around the call.
        """
        page_size = contract.static_int("page_size", page_size, minimum=1)
        new_tokens = static_dim("new_tokens", new_tokens)
        _check_requests(block_tables, seq_lens)
        seq_lens = jnp.asarray(seq_lens)
        positions = _here(dense_positions(seq_lens, new_tokens), page_size, context_axis)
        requests = jnp.arange(seq_lens.shape[0], dtype=jnp.int32)[:, None]
        slots = slots_of(block_tables, requests, positions, page_size=page_size)
        return cls(block_tables, seq_lens, slots, context_axis=context_axis, page_size=page_size)

    @classmethod
    def ragged(
        cls,
        block_tables: jax.Array,
        seq_lens: jax.Array,
        cu_seqlens_q: jax.Array,
        *,
        total_tokens: int,
        max_q_len: int | None = None,
        max_seq_len: int | None = None,
        page_size: int,
        context_axis: str | None = None,
    ) -> Step:
        """The step of `total_tokens` (T) packed tokens, padding included.

        Args:
            block_tables: [B, M] i32.
            seq_lens: [B] i32, the new tokens included.
            cu_seqlens_q: [B + 1] i32, where each request's new tokens start.
            total_tokens: T, static.
            page_size: Z of the caches, static.
            max_q_len: static bound of the new tokens of a request; None is T.
            max_seq_len: static bound of seq_lens; None takes the capacity of the block tables.
            context_axis: the mesh axis whose devices share the keys (`nn.context_parallel`); the block tables are then
                the device's own, and tokens whose page is on another device have slot -1.

        Raises:
            TypeError, ValueError: an argument has the wrong type, shape or dtype; page_size is less than 1, or another
                size less than 0; or context_axis is not a mesh axis of a `jax.shard_map` around the call.
        """
        page_size = contract.static_int("page_size", page_size, minimum=1)
        total_tokens = static_dim("total_tokens", total_tokens)
        for name, bound in (("max_q_len", max_q_len), ("max_seq_len", max_seq_len)):
            if bound is not None:
                static_dim(name, bound)
        num_requests = _check_requests(block_tables, seq_lens)
        describe_ints("cu_seqlens_q", cu_seqlens_q, "B + 1", (num_requests + 1, "B + 1, of block_tables's requests"))
        requests, positions = ragged_positions(cu_seqlens_q, seq_lens - jnp.diff(cu_seqlens_q), total_tokens)
        positions = _here(positions, page_size, context_axis)
        slots = slots_of(block_tables, requests, positions, page_size=page_size)
        max_q_len = total_tokens if max_q_len is None else max_q_len
        return cls(
            block_tables,
            seq_lens,
            slots,
            cu_seqlens_q=cu_seqlens_q,
            max_q_len=max_q_len,
            context_axis=context_axis,
            page_size=page_size,
            max_seq_len=max_seq_len,
        )

    @property
    def new_lens(self) -> jax.Array:
        """[B] i32, how many new tokens each request has. new_lens, context_lens, ragged_tokens and checked raise a
        ValueError for a dense step.
        """
        return jnp.diff(needed_when_ragged(self.cu_seqlens_q))

    @property
    def context_lens(self) -> jax.Array:
        """[B] i32, how many tokens of each request are in the cache already."""
        return self.seq_lens - self.new_lens

    def owned_tokens(self, total_tokens: int) -> jax.Array:
        """[T] bool, whether each packed token belongs to a request; the others are padding. In a dense step (T = B S)
        the tokens that seq_lens counts belong to requests.
        """
        if self.cu_seqlens_q is None:
            return (dense_positions(self.seq_lens, self.slot_mapping.shape[1]) >= 0).reshape(-1)
        return jnp.arange(total_tokens, dtype=jnp.int32) < self.cu_seqlens_q[-1]

    def ragged_tokens(self, total_tokens: int) -> tuple[jax.Array, jax.Array]:
        """The request and the position of each packed token, as `ragged_positions` returns them. Raises a ValueError if
        the step was made for another number of tokens.
        """
        self._check_tokens("total_tokens", total_tokens)
        return ragged_positions(needed_when_ragged(self.cu_seqlens_q), self.context_lens, total_tokens)

    def check_axis(self, context_axis: str | None) -> None:
        """Raises a ValueError if a layer is called with another axis than the step was made with: the slots would be
        wrong.
        """
        check_axis(context_axis, self.context_axis)

    def check_pages(self, name: str, cache: jax.Array) -> None:
        """Raises a ValueError if a layer's cache, called `name`, has pages of another size than the step was made
        with; nothing is checked if page_size is None.
        """
        check_pages(name, cache, self.page_size, "page_size")

    def checked(self, total_tokens: int) -> Step:
        """This step. Under TSMLA_CHECK=1 it is an error if its cu_seqlens_q doesn't fit total_tokens tokens."""
        cu_seqlens_q = jnp.asarray(needed_when_ragged(self.cu_seqlens_q))
        return replace(self, cu_seqlens_q=checks.cu_seqlens(cu_seqlens_q, total_tokens))

    def positions(self, shape: tuple[int, ...]) -> jax.Array:
        """The position of each new token of x [*shape, E], i32; negative for padding. Raises a ValueError for dense x
        in a ragged step, the reverse, and a step that was made for other tokens.
        """
        if len(shape) == 1:
            needed_when_ragged(self.max_q_len)
            return self.ragged_tokens(*shape)[1]
        refuse_ragged_arguments(self.cu_seqlens_q, self.max_q_len)
        self._check_tokens("new_tokens", *shape)
        return dense_positions(self.seq_lens, shape[1])

    def _check_tokens(self, argument: str, *shape: int) -> None:
        """Raises a ValueError unless the step's new tokens have x's shape.

        argument: the argument of `dense` or `ragged` that an error names.
        """
        if (made := tuple(self.slot_mapping.shape)) != shape:
            requests = f" for {shape[0]} requests" if len(shape) == 2 else ""
            raise ValueError(
                f"step: got one made for new tokens {list(made)}, but x has {list(shape)}; legal: a step made with"
                f" {argument}={shape[-1]}{requests}"
            )


def check_step(step: object, kind: type, made_by: str) -> None:
    """Raises a ValueError unless `step` is a `kind`.

    made_by: the functions that make one, for the message.
    """
    if not isinstance(step, kind):
        got = "None" if step is None else f"a {type(step).__name__}"
        raise ValueError(f"step: got {got}; legal: a {kind.__name__}, which {made_by} makes")


def check_axis(context_axis: str | None, made_with: str | None) -> None:
    """Raises a ValueError if a layer is called with another axis than its step was made with."""
    if context_axis != made_with:
        raise ValueError(f"context_axis: got {context_axis!r}; legal: the step's, {made_with!r}")


def check_pages(name: str, cache: jax.Array, page_size: int | None, size_name: str) -> None:
    """Raises a ValueError unless a cache ([P, Z, width], or [P, bytes of a page] with V4's packed rows) has pages of
    page_size slots, as the step's slots assume. A page_size of None, and a cache of another rank, are not checked.

    size_name: the argument by which the step was given page_size.
    """
    if page_size is None or cache.ndim not in (2, 3):
        return
    packed = cache.ndim == 2
    if cache.shape[1] != (V4_PACKED.page_bytes(page_size) if packed else page_size):
        got = f"{cache.shape[1]} bytes, not {V4_PACKED.page_bytes(page_size)}" if packed else f"{cache.shape[1]} slots"
        raise ValueError(
            f"step: got one made with {size_name}={page_size}, but {name}'s pages have {got}; legal: a step made with"
            " the cache's own page size, as its slots count by it"
        )


def _check_requests(block_tables: jax.Array, seq_lens: jax.Array) -> contract.Dim:
    """The number of requests, B. Raises a TypeError or ValueError unless block_tables and seq_lens are [B, M] and [B]
    i32."""
    num_requests = describe_ints("block_tables", block_tables, "B M").shape[0]
    describe_ints("seq_lens", seq_lens, "B", (num_requests, "B, block_tables's requests"))
    return num_requests


def _here(positions: jax.Array, page_size: int, context_axis: str | None) -> jax.Array:
    check_mesh_axis("context_axis", context_axis)
    if context_axis is None:
        return positions
    return context_parallel.local_positions(positions, context_axis, page_size)


def needed_when_ragged(argument: _T | None) -> _T:
    """cu_seqlens_q or max_q_len of a step; raises a ValueError if it is None."""
    if argument is None:
        raise ValueError("ragged x [T, E] needs cu_seqlens_q and max_q_len, or a step that Step.ragged made")
    return argument


def refuse_ragged_arguments(cu_seqlens_q: jax.Array | None, max_q_len: int | None) -> None:
    """Raises a ValueError if dense x [B, S, E] comes with the arguments of ragged x."""
    if cu_seqlens_q is not None or max_q_len is not None:
        raise ValueError(
            "cu_seqlens_q and max_q_len, and steps that Step.ragged makes, go with ragged x [T, E];"
            " x [B, S, E] must have neither"
        )


def dense_positions(seq_lens: jax.Array, new_tokens: int) -> jax.Array:
    """Positions [B, S] i32 of the last `new_tokens` (S) tokens of requests with seq_lens [B] tokens; negative where a
    request has fewer.
    """
    return seq_lens[:, None] - new_tokens + jnp.arange(new_tokens, dtype=jnp.int32)


def ragged_positions(cu_seqlens_q: jax.Array, starts: jax.Array, total: int) -> tuple[jax.Array, jax.Array]:
    """The request of each packed token, and the token's position in it.

    Args:
        cu_seqlens_q: [B + 1] i32.
        starts: [B] i32, position of each request's first new token (how many tokens are cached before it).
        total: T, static; tokens from cu_seqlens_q[B] on are padding.

    Returns:
        request ids [T] i32 and positions [T] i32; padding has some request's id and position -1.
    """
    cu_seqlens_q, starts = jnp.asarray(cu_seqlens_q), jnp.asarray(starts)
    request, local, owned = row_owner(cu_seqlens_q, total)
    return request, jnp.where(owned, starts[request] + local, -1).astype(jnp.int32)


def slots_of(block_tables: jax.Array, requests: jax.Array, positions: jax.Array, *, page_size: int) -> jax.Array:
    """The slot_mapping of tokens: page * Z + offset.

    Args:
        block_tables: [B, M] i32.
        requests, positions: i32 of one shape; the row of `block_tables` and the position of each token.
        page_size: Z, static.

    Returns:
        i32 of the same shape; -1 (skipped by `write_kv_cache`) if the position is negative or past the table, or its
        page is negative or too large for slots of i32.
    """
    block_tables = jnp.asarray(block_tables)
    if 0 in (size for size in block_tables.shape if isinstance(size, int)):
        return jnp.full_like(positions, -1, jnp.int32)
    page_index = positions // page_size
    pages = block_tables[requests, jnp.clip(page_index, 0, block_tables.shape[1] - 1)]
    inside = (positions >= 0) & (page_index < block_tables.shape[1]) & has_slots(pages, page_size)
    return jnp.where(inside, pages * page_size + positions % page_size, -1).astype(jnp.int32)
