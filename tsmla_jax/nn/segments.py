"""Attention over rows [B, S] of packed segments, the batches of trainers (MaxText, TransformerEngine, SkyRL tx).

Axes: B rows, S tokens a row, H heads, K / V the widths of keys and values, N nope and R rope columns with K = N + R.

Segment ids are data: they become the ragged offsets of `mla_prefill` on the device, under `jax.jit` with static shapes.
Every leaf of `Segments` leads with B, so `shard_map` and vmap split a batch and its segments alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np

import tsmla_jax
from tsmla_jax.ops import checks
from tsmla_jax.ops.exporting import exportable
from tsmla_jax.ops.inputs import Scale, describe
from tsmla_jax.ops.operation import Preference
from tsmla_kernels.contract import VALUES, values
from tsmla_kernels.contract.rules import check_dtype, static_int

# In `cu_seqlens` padding attends to itself like a segment, because to mla_prefill all rows between the first offset and
# the last belong to requests. It is cut into pieces, so that in rows of S tokens its cost is linear in its length.
_PADDING_PIECES, _LEAST_PIECE = 16, 128


class Offsets(NamedTuple):
    """The requests of a call of `mla_prefill`: where their queries and where their keys begin, [requests + 1] i32."""

    queries: jax.Array
    keys: jax.Array


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """The segments of tokens in rows [B, S], as a pytree. Make it once for all layers, by `from_ids`.

    Attributes:
        starts: [B, N] i32, the token at which each segment or run of padding starts, in order; S in unused columns.
        valid: [B, S] bool, the tokens that have a result: False in padding, and in rows of too many segments.
        overflow: [B] bool, the rows that have more than max_segments segments. Their results are NaN.
        row_len: S.
    """

    starts: jax.Array
    valid: jax.Array
    overflow: jax.Array
    row_len: int = field(metadata={"static": True})

    @classmethod
    def from_ids(cls, ids: jax.Array, *, max_segments: int) -> Segments:
        """The segments of rows of ids.

        Args:
            ids: [B, S] integers or booleans, 0 for padding. A run of one id is a segment; padding may stand anywhere.
                For one segment a row, `from_ids(mask, max_segments=1)` takes a mask of the tokens in use.
            max_segments: static, the most segments that a row may have (max_segments_per_seq in TransformerEngine and
                MaxText). The gradient's workspace grows with it.

        Raises:
            TypeError, ValueError: ids are neither integers nor booleans, have another rank or a symbolic S, or are
                integers of numpy that jax would cut to other values; max_segments is not an integer above 0. With
                TSMLA_CHECK=1 also a row of too many segments, or an id with more than one run in a row.
        """
        return segments_of("ids", ids, max_segments)

    @property
    def cu_seqlens(self) -> jax.Array:
        """[requests + 1] i32: the requests of the B S tokens, row after row, for `mla_prefill` or
        `nn.functional.prefill`.

        A row's padding makes requests, too, in pieces; requests that a row does not use have length 0.
        """
        piece = max(_LEAST_PIECE, -(-self.row_len // _PADDING_PIECES))
        cuts = jnp.arange(0, self.row_len, piece, dtype=jnp.int32)
        padding = ~(self.valid[:, ::piece] | self.overflow[:, None])
        starts = jnp.append(self.starts, jnp.where(padding, cuts, self.row_len), axis=1).sort(axis=1)
        return jnp.append(self._bounds(starts), jnp.asarray(self.valid.size, jnp.int32))

    @property
    def offsets(self) -> Offsets:
        """The requests of `mla_prefill` that give each token of a segment its segment, and padding nothing.

        Each segment and each run of padding makes two requests. The first has its queries and, for a segment, its keys;
        the second has no queries and, for padding, its keys. In rows of too many segments every token sees keys.
        """
        ends = jnp.append(self.starts[:, 1:], jnp.full_like(self.starts[:, :1], self.row_len), axis=1)
        sees = jnp.take_along_axis(self.valid | self.overflow[:, None], self.starts, axis=1, mode="clip")
        last = jnp.asarray(self.valid.size, jnp.int32)

        def requests(behind: jax.Array) -> jax.Array:
            pairs = jnp.stack([self.starts, behind], axis=2)
            return jnp.append(self._bounds(pairs.reshape(pairs.shape[0], 2 * pairs.shape[1])), last)

        queries, keys = requests(ends), requests(jnp.where(sees, ends, self.starts))
        return Offsets(queries, keys)

    def _bounds(self, tokens: jax.Array) -> jax.Array:
        """Places in rows [B, N] as places in the B S tokens [B N]."""
        return (tokens + self.row_len * jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]).reshape(-1)


def segments_of(name: str, ids: jax.Array, max_segments: int) -> Segments:
    """`Segments.from_ids`, with errors that call the ids `name`."""
    describe(name, ids)
    given, ids = ids, jnp.asarray(ids)
    if not (jnp.issubdtype(ids.dtype, jnp.integer) or ids.dtype == jnp.bool_):
        raise TypeError(f"{name}: got dtype {ids.dtype}; legal: integers or booleans")
    if isinstance(given, np.ndarray) and (given != given.astype(ids.dtype)).any():
        raise ValueError(f"{name}: got {given.dtype} beyond {ids.dtype}; legal: ids of 32 bits, or jax_enable_x64")
    if ids.ndim != 2:
        raise ValueError(f"{name}: got shape {ids.shape}; legal: [B, S]")
    check_static_length(name, ids.shape)
    max_segments = static_int("max_segments", max_segments, minimum=1)
    # Ids are compared at full width: cut to 32 bits, two 64-bit ids could become equal, or become padding.
    ids = ids.astype(jnp.int32) if ids.dtype == jnp.bool_ else ids
    ids = checks.behind(partial(values.segment_ids, name, max_segments), ids)
    row_len = ids.shape[1]
    changes = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)[:, :row_len]
    used = ids != 0
    overflow = (changes & used).sum(axis=1) > max_segments
    # A run starts after the tokens of all runs before it. XLA makes one kernel of this, but four of a search.
    run = jnp.cumsum(changes, axis=1, dtype=jnp.int32)[:, None]
    runs = jnp.arange(min(row_len, 2 * max_segments + 1), dtype=jnp.int32)[:, None]
    starts = (run <= runs).sum(axis=2, dtype=jnp.int32)
    return Segments(starts, used & ~overflow[:, None], overflow, row_len)


@overload
def segment_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    softmax_scale: Scale,
    causal: bool = True,
    deterministic: bool = False,
    sinks: jax.Array | None = None,
    return_max_logits: Literal[False] = False,
    implementation: Preference = None,
) -> jax.Array: ...


@overload
def segment_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    softmax_scale: Scale,
    causal: bool = True,
    deterministic: bool = False,
    sinks: jax.Array | None = None,
    return_max_logits: Literal[True],
    implementation: Preference = None,
) -> tuple[jax.Array, jax.Array]: ...


def segment_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    softmax_scale: Scale,
    causal: bool = True,
    deterministic: bool = False,
    sinks: jax.Array | None = None,
    return_max_logits: bool = False,
    implementation: Preference = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention within each segment of each row: `mla_prefill` on the packed rows, with a gradient.

    Args:
        q: [B, S, H, K]; dtypes as in `mla_prefill`.
        k, v: [B, S, H, K] and [B, S, H, V] in q's dtype.
        segments: the segments of the rows. If arrays are sharded, call this in `shard_map` over rows and heads: ragged
            offsets count through all rows of a call, so automatic partitioning would gather the rows.
        softmax_scale: factor of the logits; 1 if q is scaled already, as in MaxText.
        causal: whether a token sees its segment only up to itself; otherwise it sees the whole segment.
        deterministic, sinks, return_max_logits, implementation: as in `mla_prefill`.

    Returns:
        out [B, S, H, V] in q's dtype, bfloat16 when q is fp8; with return_max_logits also max_logits [B, S, H], -inf
        for padding. Padding gives 0, attends to nothing, and no derivative passes through it (with
        implementation="reference" its q, k and v must be finite for that). Rows of more than max_segments segments are
        NaN.

    Raises:
        TypeError, ValueError: an argument is not legal.
        NotImplementedError: the named implementation can't run this call; the message gives every reason.
    """
    q, k, v = _packed(segments, q=q, k=k, v=v)
    attend = partial(tsmla_jax.mla_prefill, k=k, v=v, softmax_scale=softmax_scale, causal=causal)
    attend = partial(attend, deterministic=deterministic, sinks=sinks, implementation=implementation)
    attend = partial(attend, return_max_logits=return_max_logits)
    return _results(attend_within(segments, q, attend))


@overload
def segment_attention_kv(
    q: jax.Array,
    kv: jax.Array,
    k_rope: jax.Array,
    segments: Segments,
    *,
    softmax_scale: Scale,
    causal: bool = True,
    deterministic: bool = False,
    sinks: jax.Array | None = None,
    return_max_logits: Literal[False] = False,
    implementation: Preference = None,
) -> jax.Array: ...


@overload
def segment_attention_kv(
    q: jax.Array,
    kv: jax.Array,
    k_rope: jax.Array,
    segments: Segments,
    *,
    softmax_scale: Scale,
    causal: bool = True,
    deterministic: bool = False,
    sinks: jax.Array | None = None,
    return_max_logits: Literal[True],
    implementation: Preference = None,
) -> tuple[jax.Array, jax.Array]: ...


def segment_attention_kv(
    q: jax.Array,
    kv: jax.Array,
    k_rope: jax.Array,
    segments: Segments,
    *,
    softmax_scale: Scale,
    causal: bool = True,
    deterministic: bool = False,
    sinks: jax.Array | None = None,
    return_max_logits: bool = False,
    implementation: Preference = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`segment_attention` on the output of kv_b_proj as it is. Hopper's kernel reads this in place, if the kernel takes
    the dtype and the widths; else keys and values are built from it first, as in `mla_prefill_kv`.

    Args:
        q: [B, S, H, K], rope columns last.
        kv: [B, S, H, N + V]: a head's keys without rope columns, then its values.
        k_rope: [B, S, R], rotated, for all heads.
        segments, softmax_scale, causal, deterministic, sinks, return_max_logits, implementation: as in
            `segment_attention`.

    Returns:
        The results of `segment_attention`.
    Raises:
        TypeError, ValueError, NotImplementedError: as `segment_attention`.
    """
    q, kv, k_rope = _packed(segments, q=q, kv=kv, k_rope=k_rope)
    attend = partial(tsmla_jax.mla_prefill_kv, kv=kv, k_rope=k_rope, softmax_scale=softmax_scale, causal=causal)
    attend = partial(attend, deterministic=deterministic, sinks=sinks, implementation=implementation)
    attend = partial(attend, return_max_logits=return_max_logits)
    return _results(attend_within(segments, q, attend))


_AXES = {"q": "[B, S, H, K]", "k": "[B, S, H, K]", "v": "[B, S, H, V]", "kv": "[B, S, H, N + V]", "k_rope": "[B, S, R]"}


def _packed(segments: Segments, **arrays: jax.Array) -> list[jax.Array]:
    """The arrays, of which q is the first, with their axes B and S joined into one.

    Raises a TypeError or ValueError if an argument has another type or dtype, or a shape that doesn't fit the segments'
    B and S, or the other arrays: the operation would say the shapes of the joined arrays.
    """
    if not isinstance(segments, Segments):
        raise TypeError(f"segments: got {type(segments).__name__}; legal: Segments, which Segments.from_ids makes")
    rows = segments.valid.shape
    for name, x in arrays.items():
        check_dtype(name, describe(name, x), VALUES)
        axes = _AXES[name]
        if x.ndim != axes.count(",") + 1 or x.shape[:2] != rows:
            raise ValueError(f"{name}: got shape {x.shape}; legal: {axes} with the segments' B, S = {rows}")
        heads, columns = arrays["q"].shape[2:]
        if name != "k_rope" and x.shape[2] != heads:
            raise ValueError(f"{name}: got shape {x.shape}; legal: {axes} with q's H = {heads}")
        if name == "k" and x.shape[3] != columns:
            raise ValueError(f"k: got shape {x.shape}; legal: {axes} with q's K = {columns}")
        if name != "k_rope" and 0 in x.shape[2:]:
            raise ValueError(f"{name}: got shape {x.shape}; legal: {axes} with at least one head and one column")
    if "kv" in arrays:
        kv, rope = arrays["kv"].shape, arrays["k_rope"].shape
        if rope[2] >= columns:
            raise ValueError(
                f"k_rope: got shape {rope}; legal: {_AXES['k_rope']} with R of at most K - 1 = {columns - 1}"
            )
        if kv[3] <= columns - rope[2]:
            raise ValueError(
                f"kv: got shape {kv}; legal: {_AXES['kv']} with V of at least 1 beside N = {columns - rope[2]}"
            )
    return [joined(name, x) for name, x in arrays.items()]


def joined(name: str, x: jax.Array) -> jax.Array:
    """x [B, S, ...] as [B S, ...]; ValueError if an explicit mesh splits S, so that no device has a whole row."""
    x = jnp.asarray(x)
    parts = jax.typeof(x).sharding.spec
    if len(parts) > 1 and parts[1] is not None:
        got = f"{x.shape} with {x.shape[1]} tokens split over {parts[1]!r}"
        raise ValueError(f"{name}: got shape {got}; legal: a mesh that splits only rows and heads")
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def check_static_length(name: str, shape: tuple[Any, ...]) -> None:
    """ValueError if S of rows [B, S, ...] is symbolic, as jax.export allows: S is the static bound of a request."""
    if not isinstance(shape[1], int):
        raise ValueError(f"{name}: got shape {shape}; legal: a static number of tokens in a row, not {shape[1]}")


def _results(found: tuple[jax.Array, ...]) -> jax.Array | tuple[jax.Array, jax.Array]:
    """One result by itself, two as a tuple."""
    return found if len(found) == 2 else found[0]


def attend_within(segments: Segments, q: jax.Array, attend: Callable[..., Any]) -> tuple[jax.Array, ...]:
    """The results of `attend`, a call of mla_prefill on q [B S, ...] without its offsets, in rows [B, S]. For padding
    out is 0, and lse and max_logits are -inf. In rows of too many segments every result is NaN.
    """
    (rows, row_len), offsets = segments.valid.shape, segments.offsets
    # A NaN in a query reaches only the query's results. XLA may fuse this with the operation that makes the queries.
    crowded = jnp.broadcast_to(segments.overflow[:, None], segments.valid.shape)
    q = jnp.where(crowded.reshape(-1, *(1,) * (q.ndim - 1)), jnp.asarray(jnp.nan, q.dtype), q)
    found = attend(q, cu_seqlens_q=offsets.queries, cu_seqlens_kv=offsets.keys, max_q_len=row_len, max_kv_len=row_len)
    return tuple(x.reshape(rows, row_len, *x.shape[1:]) for x in (found if isinstance(found, tuple) else (found,)))
