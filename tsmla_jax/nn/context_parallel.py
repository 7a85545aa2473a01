"""Context parallelism: the keys of every text dealt out to the devices of a mesh axis, a page at a time.

For functions inside `jax.shard_map`, where a mesh axis (`context_axis`) has N devices. Page j of a text, its tokens j Z
to (j + 1) Z - 1, lies on device j mod N and is that device's page j // N of the text. So the devices' shares of a text
differ by a page at most, however long it is, and grow in turn. A step describes whole texts (seq_lens, positions); its
block tables and slots are the device's own. Every device computes the queries of all tokens and attends over its own
cached keys; the partial results are merged by their logsumexps, which gives the same bits on every device. In MLA's
prefills, new tokens attend to each other without the cache: that part is split by tokens instead (`own_offsets`). With
DeepSeek-V4 the keys that are dealt out are the compressed entries, by the pages of their cache; every device has the
whole window.

Layout as in vLLM's decode context parallelism (cp_kv_cache_interleave_size); the merge is that of
`tsmla_jax.merge_attention_states`. Axes: B requests, T tokens, H heads, V width of a head's result, M entries of a
block table, P pages of a device, Z page size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

import tsmla_jax
from tsmla_jax.ops.operation import Preference
from tsmla_jax.ops.selected import metadata, numerics

FEW_TOKENS = 256
"""Tokens up to which partial results go to every device, in one exchange. The results of more tokens are exchanged so
that a device merges and projects a part of the tokens: two collectives, but a fraction of the bytes and of the work."""


def local_lens(seq_lens: jax.Array, context_axis: str, page_size: int) -> jax.Array:
    """How many of the first seq_lens keys of each text this device has; i32 of the same shape.

    Args:
        seq_lens: i32 of any shape.
        context_axis: the mesh axis.
        page_size: Z.
    """
    rank, world = lax.axis_index(context_axis), lax.axis_size(context_axis)
    return metadata.localize_context_lens(seq_lens, rank=rank, world=world, interleave=page_size)


class HeldContext(NamedTuple):
    """How many keys of each text's context a device has, for passes over them.

    Attributes:
        lens: [B] i32, the keys on this device.
        most_lens: [B] i32, the keys on the device that has most of the text. All devices take as many passes as these
            need.
        chunk: static, how many keys of each text a pass takes.
    """

    lens: jax.Array
    most_lens: jax.Array
    chunk: int


def held_context(context_lens: jax.Array, chunk: int, context_axis: str | None, page_size: int) -> HeldContext:
    """This device's part of the contexts. A pass takes `chunk` tokens of each text. Over a context_axis the devices
    share these tokens, and each device's part is rounded up to whole pages; with context_axis=None a device has all."""
    if context_axis is None:
        return HeldContext(context_lens, context_lens, chunk)
    world = lax.axis_size(context_axis)
    most = metadata.localize_context_lens(context_lens, rank=0, world=world, interleave=page_size)
    own_chunk = -(-chunk // (world * page_size)) * page_size
    return HeldContext(local_lens(context_lens, context_axis, page_size), most, own_chunk)


def local_positions(positions: jax.Array, context_axis: str, page_size: int) -> jax.Array:
    """Where positions of texts are among this device's keys; -1 for those of other devices, and for negative ones.

    Args:
        positions: i32 of any shape.
        context_axis: the mesh axis.
        page_size: Z.
    """
    page, world = positions // page_size, lax.axis_size(context_axis)
    here = (positions >= 0) & (page % world == lax.axis_index(context_axis))
    return jnp.where(here, page // world * page_size + positions % page_size, -1)


def global_positions(positions: jax.Array, context_axis: str, page_size: int) -> jax.Array:
    """The positions in their texts of this device's keys; negative ones stay negative.

    Args:
        positions: i32 of any shape, among this device's keys.
        context_axis: the mesh axis.
        page_size: Z.
    """
    page = positions // page_size * lax.axis_size(context_axis) + lax.axis_index(context_axis)
    return jnp.where(positions >= 0, page * page_size + positions % page_size, positions)


def mla_decode(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    context_axis: str,
    cu_seqlens_q: jax.Array | None = None,
    max_q_len: int | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """`tsmla_jax.mla_decode`, causal, over only this device's keys.

    Args:
        q: [B, S, H, D], or ragged [T, H, D] with cu_seqlens_q and max_q_len: all queries.
        kv_cache: [P, Z, D], this device's pages, which hold the new tokens' keys already.
        block_tables: [B, M] i32, this device's pages of each request.
        seq_lens: [B] i32, keys of each request on all devices, its new tokens included.
        context_axis: the mesh axis.
        cu_seqlens_q, max_q_len: with ragged queries, as in `tsmla_jax.mla_decode`.
        options: options of `tsmla_jax.mla_decode`: softmax_scale, latent_dim, q_scale, kv_scale, batch_invariant,
            implementation.

    Returns:
        out [T, H, L] (T is B S for dense q) and lse [T, H], for `merge`; rows without a key here have lse -inf.

    Raises:
        TypeError, ValueError, NotImplementedError: as `tsmla_jax.mla_decode`; TypeError also for another option.
    """
    for name in options:
        if name not in _DECODE_OPTIONS:  # causal and visible_lens count keys of whole texts, not a device's own keys
            raise TypeError(f"{name}: no option over a context_axis; legal: {', '.join(_DECODE_OPTIONS)}")
    page_size, rows = kv_cache.shape[1], q.reshape(-1, *q.shape[-2:])
    most = q.shape[1] if cu_seqlens_q is None else max_q_len
    if most == 1:
        lens = local_lens(seq_lens, context_axis, page_size)
        ragged: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "max_q_len": max_q_len}
        out, lse = tsmla_jax.mla_decode(q, kv_cache, block_tables, lens, return_lse=True, **ragged, **options)
    else:
        # On one device the tokens of a request see different numbers of keys: each token is a request of its own.
        new = cast(int, most) if cu_seqlens_q is None else jnp.diff(cu_seqlens_q)
        tokens = metadata.expand_decode_metadata(seq_lens, block_tables, new, total_tokens=rows.shape[0])
        lens = local_lens(tokens.seq_lens, context_axis, page_size)
        out, lse = tsmla_jax.mla_decode(rows[:, None], kv_cache, tokens.block_tables, lens, return_lse=True, **options)
    return out.reshape(*rows.shape[:-1], out.shape[-1]), lse.reshape(rows.shape[:-1])


_DECODE_OPTIONS = ("softmax_scale", "latent_dim", "q_scale", "kv_scale", "batch_invariant", "implementation")


def merge(out: jax.Array, lse: jax.Array, context_axis: str) -> tuple[jax.Array, jax.Array]:
    """The results over all keys from the results over each device's keys, by one exchange.

    Args:
        out, lse: [T, H, V] and [T, H], as `mla_decode` returns them.
        context_axis: the mesh axis.

    Returns:
        out and lse of all keys, the same on every device.
    """
    outs, lses = lax.all_gather((out, lse), context_axis)
    # One fusion of XLA reads what was gathered; the merge kernel takes each part as an array, which would be a copy.
    return tsmla_jax.merge_attention_states(outs, lses, implementation="xla")


def project_merged(
    out: jax.Array,
    lse: jax.Array,
    context_axis: str,
    project: Callable[..., jax.Array],
    *rows: jax.Array,
    heads: Callable[[jax.Array], jax.Array] | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """project(out of all keys, *rows), [T, E] on every device, from the results over each device's keys.

    Args:
        out, lse: [T, H, V] and [T, H], without sinks.
        context_axis: the mesh axis.
        project: a function from rows [t, H, V] and the same t rows of each of `rows` to [t, E]. It is called with all
            T rows, or with this device's part of them.
        rows: [T, ...] each, the same on every device.
        heads: a linear map of each head's result, from [t, H, V] to [t, H, W]; `project` then gets the mapped results.
            With few tokens each device maps before the exchange, which moves fewer bytes if W is less than V.
        sinks: [H], as in `tsmla_jax.sparse_mla`: they take weight from the keys of all devices once, after the merge.
            out then comes to `project` in float32 (float64 for float64).
    """
    shared = out.shape[0] > FEW_TOKENS
    if heads is not None and not shared:
        out = heads(out)
    merged = (merge_own_rows if shared else merge)(out, lse, context_axis)
    if shared:
        rows = tuple(own_rows(x, context_axis) for x in rows)
    whole = merged[0] if sinks is None else beside_sinks(*merged, sinks)
    projected = project(heads(whole) if heads is not None and shared else whole, *rows)
    return gather_rows(projected, out.shape[0], context_axis) if shared else projected


def beside_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> jax.Array:
    """Results [t, H, V] with logsumexps [t, H] beside sinks [H], in float32 (float64 for float64): out divided by
    1 + exp(sink - lse)."""
    dtype = jnp.promote_types(out.dtype, jnp.float32)
    # A row without a key is 0 already; -inf less a sink of -inf would make it NaN.
    share = jax.nn.sigmoid(jnp.where(jnp.isneginf(lse), 0, lse) - sinks.astype(dtype))
    return out.astype(dtype) * share[..., None]


def merge_own_rows(
    out: jax.Array, lse: jax.Array, context_axis: str, *parts: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """out and lse of this device's rows (`own_rows`) over all keys, from the results of all rows over each device's
    keys.

    parts: results (out, lse) of this device's rows over further keys, to be merged, too.
    """
    outs, lses = _exchanged(context_axis, out, lse)
    every = [*zip(outs, lses, strict=True), *parts]
    return tsmla_jax.merge_attention_states([one for one, _ in every], [one for _, one in every])


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _exchanged(context_axis: str, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """out and lse of this device's rows from each device, [N, t, ...], by one exchange."""
    packed = _to_rows_owners(_packed(out, lse), context_axis)
    return _unpacked(packed, out, lse)


@_exchanged.defjvp
def _exchanged_jvp(context_axis: str, primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> Any:
    # Integers have no derivative: the tangents are exchanged each for itself.
    d_out, d_lse = (_to_rows_owners(x, context_axis) for x in tangents)
    return _exchanged(context_axis, *primals), (d_out, d_lse)


def _to_rows_owners(x: jax.Array, context_axis: str) -> jax.Array:
    """Rows [T, ...] to the devices that own them: this device's rows from each device, [N, t, ...]."""
    return lax.all_to_all(_split_rows(x, context_axis), context_axis, split_axis=0, concat_axis=0)


def own_rows(x: jax.Array, context_axis: str) -> jax.Array:
    """This device's part of rows [T, ...], which are padded with zeros and cut into N equal parts, one a device."""
    return _split_rows(x, context_axis)[lax.axis_index(context_axis)]


def gather_rows(own: jax.Array, num_rows: int, context_axis: str) -> jax.Array:
    """All num_rows rows, from the part `own` that each device has (`own_rows`)."""
    return lax.all_gather(own, context_axis, tiled=True)[:num_rows]


def add_rows(x: jax.Array, context_axis: str) -> jax.Array:
    """The sums over the devices of their rows [T, ...], in x's dtype and the same bits on every device.

    The devices exchange rows, not sums, so that rows of 16 bits are added in float32 and rounded once. If there are
    many rows, each device adds up a part of them, and a second exchange gives all devices the sums.
    """

    def added(parts: jax.Array) -> jax.Array:
        return parts.astype(jnp.promote_types(x.dtype, jnp.float32)).sum(axis=0).astype(x.dtype)

    if x.shape[0] <= FEW_TOKENS:
        return added(lax.all_gather(x, context_axis))
    parts = _to_rows_owners(x, context_axis)
    return gather_rows(added(parts), x.shape[0], context_axis)


def own_offsets(cu_seqlens: jax.Array, num_rows: int, context_axis: str) -> tuple[jax.Array, jax.Array]:
    """Offsets of a device's part of causal attention of packed tokens to themselves, for `mla_prefill`.

    Args:
        cu_seqlens: [B + 1] i32, where requests begin among all tokens.
        num_rows: T, all tokens; each of N devices has ceil(T / N) in turn.
        context_axis: the mesh axis.

    Returns:
        cu_seqlens_q and cu_seqlens_kv [B + 1]: where requests begin among this device's rows, and among the keys that
        these rows see: a request that goes on past this device's last row has no keys past it.
    """
    each = -(-num_rows // lax.axis_size(context_axis))
    begin = lax.axis_index(context_axis) * each
    return jnp.clip(cu_seqlens - begin, 0, each), jnp.minimum(cu_seqlens, begin + each)


def whole_tables(block_tables: jax.Array, context_axis: str) -> jax.Array:
    """Block tables [B, N M] of whole texts from this device's, [B, M]: -1 for the pages of other devices."""
    world = lax.axis_size(context_axis)
    pages = jnp.arange(block_tables.shape[1] * world, dtype=jnp.int32)
    return jnp.where(pages % world == lax.axis_index(context_axis), block_tables[:, pages // world], -1)


def own_slots(slots: jax.Array, context_axis: str) -> jax.Array:
    """This device's part of rows of slots [T, W] that all devices have: [T, ceil(W / N)], padded with -1."""
    each = -(-slots.shape[1] // lax.axis_size(context_axis))
    padding = each * lax.axis_size(context_axis) - slots.shape[1]
    padded = jnp.pad(slots, ((0, 0), (0, padding)), constant_values=-1)
    return lax.dynamic_slice_in_dim(padded, lax.axis_index(context_axis) * each, each, axis=1)


def indexer_topk(
    q: jax.Array,
    weights: jax.Array,
    k_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    k: int,
    *,
    context_axis: str,
    implementation: Preference = None,
) -> tuple[jax.Array, jax.Array]:
    """For every query token, the slots on this device of those keys that are among the indexer's k best of all devices.

    Args:
        q, weights: [T, Hi, Di] and [T, Hi], all queries.
        k_cache: as in `tsmla_jax.indexer_topk`, this device's pages of Z keys.
        block_tables: [T, M] i32, this device's pages, one row a token.
        seq_lens: [T] i32, keys that each token sees here (`local_lens`).
        k: static.
        context_axis: the mesh axis.
        implementation: as in `tsmla_jax.indexer_topk` and `tsmla_jax.select_topk`.
    Returns:
        slots [T, min(k, M Z)] i32 in the order of positions, -1 after the last, and how many they are, [T] i32.
    """
    page_size = k_cache.shape[1]
    candidates = _candidates(q, weights, k_cache, block_tables, seq_lens, k, implementation)
    own = select_topk(*candidates, k, context_axis=context_axis, page_size=page_size, implementation=implementation)
    return metadata.positions_to_slots(own, block_tables, page_size), (own >= 0).sum(axis=1, dtype=jnp.int32)


def indexer_positions(
    q: jax.Array,
    weights: jax.Array,
    k_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    k: int,
    *,
    context_axis: str,
    implementation: Preference = None,
) -> jax.Array:
    """For each query token, the indexer's k best keys of all devices, as positions in their texts:
    [T, min(k, N M Z)] i32, best first, -1 after the last, the same on every device.

    Args:
      q, weights, k_cache, block_tables, seq_lens, k, implementation: as in `indexer_topk`.
      context_axis: the mesh axis over which the keys of a text are split.
    """
    page_size = k_cache.shape[1]
    positions, scores = _candidates(q, weights, k_cache, block_tables, seq_lens, k, implementation)
    return _best_positions(positions, scores, k, context_axis=context_axis, page_size=page_size)


def _candidates(
    q: jax.Array,
    weights: jax.Array,
    k_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    k: int,
    implementation: Preference,
) -> tuple[jax.Array, jax.Array]:
    """This device's k best keys for each token: their positions among its keys, ascending, and scores; [T, c] each."""
    q, weights, k_cache = map(lax.stop_gradient, (q, weights, k_cache))  # no gradient passes through the choice
    most = min(k, block_tables.shape[1] * k_cache.shape[1])
    return tsmla_jax.indexer_topk(
        q, weights, k_cache, block_tables, seq_lens, most, return_scores=True, implementation=implementation
    )


def own_positions(positions: jax.Array, *, context_axis: str, page_size: int) -> jax.Array:
    """Positions in the texts [T, K] as ascending positions among this device's keys. Negative positions and those of
    other devices' keys become -1, after the others."""
    return _ascending(local_positions(positions, context_axis, page_size))


def select_topk(
    positions: jax.Array,
    scores: jax.Array,
    k: int,
    *,
    context_axis: str,
    page_size: int,
    implementation: Preference = None,
) -> jax.Array:
    """This device's positions among the k best keys of each token on all devices, exact, with the rule of
    `tsmla_jax.select_topk` for equal scores.

    Each device proposes its c best keys. If N c is at most k, all of these are chosen. Else one exchange of N c
    candidates a token tells which key is the last of the k best, and each device keeps its own keys up to that one.
    With more than FEW_TOKENS tokens, each device finds the last key of its share of the tokens, and a second exchange,
    of two numbers a token, tells the other devices.

    Args:
        positions: [T, c] i32, the positions of this device's min(k, keys) best keys among its own, ascending; -1 after
            the last.
        scores: [T, c] f32, the scores of these keys.
        k: static.
        context_axis: the mesh axis.
        page_size: Z.
        implementation: as in `tsmla_jax.select_topk`.
    Returns:
        positions [T, c] i32 among this device's keys, ascending, -1 after the last.
    """
    if scores.shape[1] * lax.axis_size(context_axis) <= k:
        return positions
    here = positions >= 0
    whole = jnp.where(here, global_positions(positions, context_axis, page_size), _NOWHERE)
    packed = jnp.stack([lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.int32), whole], axis=-1)
    num_tokens = positions.shape[0]
    if num_tokens <= FEW_TOKENS:
        last = _last_of(lax.all_gather(packed, context_axis), k, implementation)
    else:
        mine = _to_rows_owners(packed, context_axis)
        last = gather_rows(_last_of(mine, k, implementation), num_tokens, context_axis)
    order, last_order, last_whole = numerics.ordered(scores.astype(jnp.float32)), last[:, :1], last[:, 1:]
    chosen = (order > last_order) | ((order == last_order) & (whole <= last_whole))
    return _ascending(jnp.where(here & chosen, positions, -1))


def _last_of(candidates: jax.Array, k: int, implementation: Preference) -> jax.Array:
    """The last of each token's k best candidates, [t, 2]: its score as an ordered integer, its position in the text. It
    and the candidates before it are the k best. If a token has fewer than k candidates, no candidate comes after what
    is returned.

    candidates: [N, t, c, 2], those of all devices, with N c above k."""
    devices, tokens, each, _ = candidates.shape
    bits, whole = jnp.moveaxis(candidates, 0, 1).reshape(tokens, devices * each, 2).transpose(2, 0, 1)
    there = whole != _NOWHERE
    scores = jnp.where(there, lax.bitcast_convert_type(bits, jnp.float32), jnp.nan)
    order, lens = numerics.ordered(scores), jnp.full(tokens, devices * each, jnp.int32)
    best = tsmla_jax.select_topk(scores, lens, k, order="position", implementation=implementation)
    last = jnp.take_along_axis(order, best, axis=1).min(axis=1, keepdims=True)
    # Of equal scores at the end of the k best, the first in the text are taken: positions serve as scores here.
    wanted = k - (order > last).sum(axis=1, keepdims=True, dtype=jnp.int32)
    equal = there & (order == last)
    earliness = jnp.where(equal, lax.bitcast_convert_type(_GREATEST - whole, jnp.float32), -jnp.inf)
    first = tsmla_jax.select_topk(earliness, lens, k, implementation=implementation)
    at = jnp.take_along_axis(first, jnp.maximum(wanted - 1, 0), axis=1)
    enough = equal.sum(axis=1, keepdims=True, dtype=jnp.int32) >= wanted
    position = jnp.where(enough, jnp.take_along_axis(whole, at, axis=1), _NOWHERE)
    return jnp.concatenate([last, position], axis=1)


def _best_positions(positions: jax.Array, scores: jax.Array, k: int, *, context_axis: str, page_size: int) -> jax.Array:
    """The k best keys of all devices for each token, as positions in the texts, best first; -1 after the last."""
    # Sorted by this key, then by position, both ascending; entries without a candidate come last.
    key = jnp.where(positions >= 0, ~numerics.ordered(scores), _NOWHERE)
    whole = jnp.where(positions >= 0, global_positions(positions, context_axis, page_size), _NOWHERE)
    packed = jnp.stack([key, whole], axis=-1)
    num_tokens = positions.shape[0]
    if num_tokens <= FEW_TOKENS:
        winners = _best_of(lax.all_gather(packed, context_axis), k)
    else:
        mine = _to_rows_owners(packed, context_axis)
        winners = gather_rows(_best_of(mine, k), num_tokens, context_axis)
    return jnp.where(winners == _NOWHERE, -1, winners)


def _best_of(candidates: jax.Array, k: int) -> jax.Array:
    """The positions in their texts [t, min(k, N c)] of the k best of the devices' candidates [N, t, c, 2]."""
    devices, tokens, each, _ = candidates.shape
    by_token = jnp.moveaxis(candidates, 0, 1).reshape(tokens, devices * each, 2)
    _, winners = lax.sort((by_token[..., 0], by_token[..., 1]), num_keys=2)
    return winners[:, :k]


def _ascending(positions: jax.Array) -> jax.Array:
    """Rows of positions in ascending order, negative ones as -1 after the others."""
    ordered = jnp.sort(jnp.where(positions < 0, _NOWHERE, positions), axis=1)
    return jnp.where(ordered == _NOWHERE, -1, ordered)


_NOWHERE = 2**31 - 1
_GREATEST = 0x7F000000
"""The bits of a large finite float32. Less a position, they are the bits of a smaller finite number."""


def _split_rows(x: jax.Array, context_axis: str) -> jax.Array:
    """Rows [T, ...] as [N, ceil(T / N), ...], padded with zeros."""
    world = lax.axis_size(context_axis)
    padding = -x.shape[0] % world
    padded = jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1)))
    return padded.reshape(world, padded.shape[0] // world, *x.shape[1:])


def _packed(out: jax.Array, lse: jax.Array) -> jax.Array:
    """out and lse as one array of integers [T, H, W], so that one collective moves both, bit by bit."""
    width = min(out.dtype.itemsize, lse.dtype.itemsize)
    integers = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[width]
    parts = (lax.bitcast_convert_type(array, integers) for array in (out, lse[..., None]))
    return jnp.concatenate([lax.collapse(part, lse.ndim) for part in parts], axis=-1)


def _unpacked(packed: jax.Array, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inverse of `_packed`, whose result `packed` may have more axes in front; `out` and `lse` give the dtypes
    and the width."""

    def part(integers: jax.Array, like: jax.Array) -> jax.Array:
        count = like.dtype.itemsize // integers.dtype.itemsize
        grouped = integers if count == 1 else integers.reshape(*integers.shape[:-1], integers.shape[-1] // count, count)
        return lax.bitcast_convert_type(grouped, like.dtype)

    columns = out.shape[-1] * (out.dtype.itemsize // packed.dtype.itemsize)
    return part(packed[..., :columns], out), part(packed[..., columns:], lse)[..., 0]
