"""dot_product_attention: `mla_prefill` with the arguments of `jax.nn.dot_product_attention`.

A batch [B, T, N, H] is B T packed tokens, and its lengths become requests of `mla_prefill` that leave the padding out:
a row's padding queries are a request without keys, and its padding keys a request without queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Literal, NamedTuple, cast, overload

import jax
import jax.numpy as jnp
from jax import lax

import tsmla_jax
from tsmla_jax.nn.segments import Segments, attend_within, check_static_length, joined, segments_of
from tsmla_jax.ops.inputs import Scale, describe, describe_as, describe_scale
from tsmla_jax.ops.operation import Preference
from tsmla_kernels.contract.rules import FLOATS, VALUES, check_scale, static_bool
from tsmla_kernels.contract.selection import WORD_KEYS, selection_words


@overload
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None = None,
    mask: jax.Array | None = None,
    *,
    scale: Scale | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: None = None,
    segment_ids: jax.Array | Segments | None = None,
    max_segments: int | None = None,
    dropout_rate: float = 0.0,
    sinks: jax.Array | None = None,
    deterministic: bool = False,
    implementation: Preference = None,
    return_residual: Literal[False] = False,
    return_max_logits: Literal[False] = False,
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None = None,
    mask: jax.Array | None = None,
    *,
    scale: Scale | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: None = None,
    segment_ids: jax.Array | Segments | None = None,
    max_segments: int | None = None,
    dropout_rate: float = 0.0,
    sinks: jax.Array | None = None,
    deterministic: bool = False,
    implementation: Preference = None,
    return_residual: Literal[True],
    return_max_logits: Literal[False] = False,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None = None,
    mask: jax.Array | None = None,
    *,
    scale: Scale | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: None = None,
    segment_ids: jax.Array | Segments | None = None,
    max_segments: int | None = None,
    dropout_rate: float = 0.0,
    sinks: jax.Array | None = None,
    deterministic: bool = False,
    implementation: Preference = None,
    return_residual: Literal[False] = False,
    return_max_logits: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None = None,
    mask: jax.Array | None = None,
    *,
    scale: Scale | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: None = None,
    segment_ids: jax.Array | Segments | None = None,
    max_segments: int | None = None,
    dropout_rate: float = 0.0,
    sinks: jax.Array | None = None,
    deterministic: bool = False,
    implementation: Preference = None,
    return_residual: Literal[True],
    return_max_logits: Literal[True],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None = None,
    mask: jax.Array | None = None,
    *,
    scale: Scale | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: None = None,
    segment_ids: jax.Array | Segments | None = None,
    max_segments: int | None = None,
    dropout_rate: float = 0.0,
    sinks: jax.Array | None = None,
    deterministic: bool = False,
    implementation: Preference = None,
    return_residual: bool = False,
    return_max_logits: bool = False,
) -> jax.Array | tuple[jax.Array, ...]:
    """softmax(scale q k^T) v by `mla_prefill`, with the arguments of `jax.nn.dot_product_attention`.

    Axes: B rows, T / S query / key tokens of a row, N heads, H / V the widths of keys and of values (192 and 128 in
    DeepSeek). Without B, the arrays are one row.

    Args:
        query: [B, T, N, H]; dtypes as in `mla_prefill`.
        key, value: [B, S, N, H] and [B, S, N, V] in query's dtype. They must have as many heads as query: for grouped
            queries repeat them, `jnp.repeat(key, groups, axis=-2)`.
        bias, local_window_size: refused; a window can be given as a mask.
        mask: [B or 1, 1, T or 1, S or 1] bool, whose first axes may be left out if they are 1. True for pairs that see
            each other, the same for all heads: it becomes the bits of a `mla_prefill` selection. The values of keys
            that no query sees must be finite.
        scale: positive factor of the logits, may be traced; None is H^-0.5.
        is_causal: query i sees key j iff j <= i, both counted from the first token (the alignment of jax.nn;
            `mla_prefill` aligns the last tokens).
        query_seq_lengths, key_value_seq_lengths: [B] int32 ([1] for one row), how many tokens of a row count; the
            others must be finite. If is_causal is set and a row's keys may be fewer than its queries, a second call
            computes the queries after the last key. With T at most S, one array given as both says that no row has
            such queries.
        segment_ids: [B, T] integers, 0 for padding: tokens see only their own segment, and T must be S. Or `Segments`,
            made once for all layers. Lengths and mask are refused together with segment_ids.
        max_segments: static, the most segments of a row (a row with more gives NaN); required if segment_ids is an
            array, refused otherwise.
        dropout_rate: only 0 is legal.
        sinks: [N] of floats, as in `mla_prefill`.
        deterministic, implementation: as in `mla_prefill`.
        return_residual: also return the logsumexp of the scaled logits, natural logarithm, without the sinks.
        return_max_logits: also return the greatest scaled logit of each query and head, as QK-clip wants it.

    Returns:
        out [B, T, N, V] in query's dtype, bfloat16 for fp8; with return_residual also [B, T, N] float32 (float64 for
        float64), and with return_max_logits then another such array. Queries past their row's length give 0 and -inf,
        and so do queries that see no key, where jax.nn gives the mean of all values.

    Raises:
        TypeError, ValueError: an argument is not legal.
        NotImplementedError: bias, windows, dropout, a mask with several heads, another number of heads in key or value
            than in query; or no named implementation can run this call: the message gives every reason.
    """
    one_row = len(describe("query", query).shape) == 3
    call = _Call.of(query, key, value, bias, mask, local_window_size, dropout_rate)
    scale = call.width**-0.5 if scale is None else scale
    check_scale("scale", describe_scale("scale", scale), optional=False)
    if sinks is not None:
        describe_as("sinks", sinks, "N", FLOATS, (call.query.shape[2], "N, query's heads"))
    is_causal = static_bool("is_causal", is_causal)
    q, k, v = (joined(name, x) for name, x in zip(("query", "key", "value"), call.arrays, strict=True))
    attend = cast(
        Attend,
        partial(
            tsmla_jax.mla_prefill,
            k=k,
            v=v,
            softmax_scale=scale,
            deterministic=deterministic,
            implementation=implementation,
            sinks=sinks,
            return_lse=True,
            return_max_logits=return_max_logits,
        ),
    )
    if segment_ids is not None:
        for name, given in (
            ("query_seq_lengths", query_seq_lengths),
            ("key_value_seq_lengths", key_value_seq_lengths),
            ("mask", mask),
        ):
            if given is not None:
                raise ValueError(f"{name}: got an array beside segment_ids; legal: None")
        segments = _segments(segment_ids, max_segments, call, one_row)
        results = attend_within(segments, q, partial(attend, causal=is_causal))
    else:
        if max_segments is not None:
            raise ValueError(f"max_segments: got {max_segments} without segment_ids; legal: None")
        batch, num_queries, num_keys = *call.query.shape[:2], call.key.shape[1]
        lengths = _Lengths(
            _checked("query_seq_lengths", query_seq_lengths, batch, num_queries),
            _checked("key_value_seq_lengths", key_value_seq_lengths, batch, num_keys),
            same=query_seq_lengths is not None and query_seq_lengths is key_value_seq_lengths,
        )
        results = _over_rows(call, partial(attend, q, selection=call.selection), lengths, is_causal)
    out, lse, *max_logits = (x[0] if one_row else x for x in results)
    found = (out, *[lse] * static_bool("return_residual", return_residual), *max_logits)
    return found if len(found) > 1 else out


Results = tuple[jax.Array, ...]
"""out, lse and, if asked for, the greatest logits."""

Attend = Callable[..., Results]
"""`mla_prefill` of a call's arrays, without the offsets and the mask."""


class _Call(NamedTuple):
    """The arrays of a call as [B, T or S, N, width], checked, and the mask as bits."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    selection: jax.Array | None

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.query, self.key, self.value

    @property
    def width(self) -> int:
        return self.query.shape[-1]

    @classmethod
    def of(
        cls,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: object,
        mask: jax.Array | None,
        local_window_size: object,
        dropout_rate: float,
    ) -> _Call:
        """The checked call; raises what the public function documents for these arguments."""
        for name, refused in (("bias", bias), ("local_window_size", local_window_size)):
            if refused is not None:
                kind = type(refused).__name__
                raise NotImplementedError(
                    f"{name}: got {kind}; legal: None (a mask [B or 1, 1, T or 1, S or 1] of bool is taken)"
                )
        if not (isinstance(dropout_rate, Real) and dropout_rate == 0):
            raise NotImplementedError(f"dropout_rate: got {dropout_rate}; legal: 0, as attention has no dropout here")
        found = {name: describe(name, x) for name, x in (("query", query), ("key", key), ("value", value))}
        rank = len(found["query"].shape)
        if rank not in (3, 4):
            raise ValueError(f"query: got shape {found['query'].shape}; legal: [B, T, N, H] or [T, N, H]")
        *rows, _, heads, width = found["query"].shape
        if 0 in (heads, width):
            raise ValueError(f"query: got shape {found['query'].shape}; legal: N and H of at least 1")
        for name, array in found.items():
            axes = {"query": "T, N, H", "key": "S, N, H", "value": "S, N, V"}[name]
            sizes = [*zip("B", rows, strict=False), ("N", heads), *([("H", width)] if name == "key" else [])]
            shared = ", ".join(f"{axis} = {size}" for axis, size in sizes)
            legal = f"[{'B, ' * (rank - 3)}{axes}] with query's {shared}"
            if len(array.shape) != rank or list(array.shape[:-3]) != rows:
                raise ValueError(f"{name}: got shape {array.shape}; legal: {legal}")
            if array.shape[-2] != heads:
                raise NotImplementedError(
                    f"{name}: got {array.shape[-2]} heads; legal: query's {heads} (grouped queries are not computed"
                    f" here; jnp.repeat({name}, groups, axis=-2) repeats the heads)"
                )
            if array.dtype not in VALUES:
                raise ValueError(f"{name}: got dtype {array.dtype}; legal: {', '.join(VALUES)}")
            if array.dtype != found["query"].dtype:
                raise ValueError(f"{name}: got dtype {array.dtype}; legal: query's, {found['query'].dtype}")
            if name == "key" and array.shape[-1] != width:
                raise ValueError(f"key: got shape {array.shape}; legal: {legal}")
            if name == "value" and array.shape[-3] != found["key"].shape[-3]:
                raise ValueError(
                    f"value: got shape {array.shape}; legal: {legal}, and key's S = {found['key'].shape[-3]}"
                )
        if found["value"].shape[-1] == 0:
            raise ValueError(f"value: got shape {found['value'].shape}; legal: V of at least 1")
        if not isinstance(width, int):
            raise ValueError(f"query: got shape {found['query'].shape}; legal: a static H, not {width}")
        query, key, value = (x[None] if rank == 3 else x for x in map(jnp.asarray, (query, key, value)))
        for name, x in (("query", query), ("key", key)):
            check_static_length(name, x.shape)
        return cls(query, key, value, None if mask is None else _bits(mask, query.shape[:2], key.shape[1]))


def _bits(mask: jax.Array, rows: Sequence[int], num_keys: int) -> jax.Array:
    """The mask as the bits [B T, W] that `mla_prefill` takes as its selection."""
    given = shape = describe("mask", mask).shape
    if jnp.dtype(mask.dtype) != jnp.bool_:
        raise ValueError(f"mask: got dtype {mask.dtype}; legal: bool, or None")
    batch, num_queries = rows
    sizes = [str(size) if size == 1 else f"{size} or 1" for size in (batch, num_queries, num_keys)]
    legal = f"[{sizes[0]}, 1, {sizes[1]}, {sizes[2]}]"
    shape = (*(1,) * (4 - len(shape)), *shape)
    pairs = zip(shape, (batch, shape[1], num_queries, num_keys), strict=len(shape) == 4)
    if len(shape) != 4 or any(size not in (1, whole) for size, whole in pairs):
        raise ValueError(f"mask: got shape {given}; legal: {legal}, with or without first axes of 1, or None")
    if shape[1] != 1:
        raise NotImplementedError(
            f"mask: got shape {given} with {shape[1]} heads; legal: {legal}, where all heads see the same keys"
        )
    words = selection_words(num_keys)
    whole = jnp.broadcast_to(jnp.reshape(mask, shape)[:, 0], (batch, num_queries, num_keys))
    bits = jnp.pad(whole, ((0, 0), (0, 0), (0, words * WORD_KEYS - num_keys))).reshape(-1, words, WORD_KEYS)
    packed = (bits.astype(jnp.uint32) << jnp.arange(WORD_KEYS, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(packed, jnp.int32)


def _segments(
    segment_ids: jax.Array | Segments, max_segments: int | None, call: _Call, one_row: bool
) -> Segments:  # fmt: skip
    """The segments of a call, made from ids if they are no `Segments` yet.

    one_row: whether ids are [T].
    """
    rows = call.query.shape[:2]
    if call.key.shape[1] != rows[1]:
        raise ValueError(f"key: got {call.key.shape[1]} tokens; legal: query's {rows[1]}, as segment_ids are of both")
    if isinstance(segment_ids, Segments):
        if max_segments is not None:
            raise ValueError(f"max_segments: got {max_segments} beside Segments, which have their own; legal: None")
        found = segment_ids
        if found.valid.shape != rows:
            raise ValueError(f"segment_ids: got Segments of rows {found.valid.shape}; legal: query's [B, T] = {rows}")
        return found
    if max_segments is None:
        raise ValueError("max_segments: got None; legal: a static int >= 1, the most segments of a row")
    legal, shape = rows[1:] if one_row else rows, describe("segment_ids", segment_ids).shape
    if shape != legal:
        raise ValueError(f"segment_ids: got shape {shape}; legal: query's {'[T]' if one_row else '[B, T]'} = {legal}")
    ids = segment_ids[None] if one_row else segment_ids
    return segments_of("segment_ids", ids, max_segments)


class _Lengths(NamedTuple):
    """How many queries and keys of each row count, [B] each; None if all do.

    same: whether both are the same array.
    """

    queries: jax.Array | None
    keys: jax.Array | None
    same: bool


def _checked(name: str, lengths: jax.Array | None, batch: int, tokens: int) -> jax.Array | None:
    """`lengths` clipped to 0 ... `tokens`, or None; ValueError if they are not int32 [B]."""
    if lengths is None:
        return None
    array = describe(name, lengths)
    if array.dtype != "int32" or array.shape != (batch,):
        raise ValueError(
            f"{name}: got {array.dtype} of shape {array.shape}; legal: int32 of shape [B] = [{batch}], or None"
        )
    return jnp.clip(lengths, 0, tokens)


def _over_rows(call: _Call, attend: Attend, lengths: _Lengths, is_causal: bool) -> Results:
    """The results [B, T, N, ...] of rows with these lengths."""
    queries, keys, same = lengths
    (batch, num_queries), num_keys = call.query.shape[:2], call.key.shape[1]
    every = jnp.arange(batch + 1, dtype=jnp.int32)

    def rows(starts_q: jax.Array, starts_kv: jax.Array, *, causal: bool) -> Results:
        found = attend(
            cu_seqlens_q=starts_q, cu_seqlens_kv=starts_kv, max_q_len=num_queries, max_kv_len=num_keys, causal=causal
        )
        return tuple(x.reshape(batch, num_queries, *x.shape[1:]) for x in found)

    if queries is None and keys is None and (num_queries == num_keys or not is_causal):
        return rows(every * num_queries, every * num_keys, causal=is_causal)
    q_lens = jnp.full(batch, num_queries, jnp.int32) if queries is None else queries
    kv_lens = jnp.full(batch, num_keys, jnp.int32) if keys is None else keys

    def part(first: jax.Array, count: jax.Array, kv_lens: jax.Array, *, causal: bool) -> Results:
        """The results of `count` queries of each row from `first` on; those of the others are 0 and -inf.

        A row is four requests: the queries before `first` without keys, the `count` queries with the row's keys, the
        later queries without keys, and the padding's keys without queries."""
        zero, end = jnp.zeros_like(first), jnp.full_like(first, num_queries)
        starts_q = jnp.stack([zero, first, first + count, end], axis=1) + every[:-1, None] * num_queries
        starts_kv = jnp.stack([zero, zero, kv_lens, kv_lens], axis=1) + every[:-1, None] * num_keys
        ends = (every[-1] * num_queries, every[-1] * num_keys)
        return rows(*(jnp.append(x, end) for x, end in zip((starts_q, starts_kv), ends, strict=True)), causal=causal)

    none = jnp.zeros_like(q_lens)
    if not is_causal:
        return part(none, q_lens, kv_lens, causal=False)
    # With as many queries as keys, mla_prefill's alignment (last tokens) and jax.nn's (first tokens) are the same.
    square = jnp.minimum(q_lens, kv_lens)
    found = part(none, square, square, causal=True)
    if num_queries <= num_keys and (same or keys is None):
        return found
    behind = part(square, q_lens - square, kv_lens, causal=False)
    first = jnp.arange(num_queries) < square[:, None]
    pairs = zip(found, behind, strict=True)
    return tuple(jnp.where(first.reshape(*first.shape, *(1,) * (a.ndim - 2)), a, b) for a, b in pairs)
