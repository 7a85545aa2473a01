"""Context parallelism: the keys of every text dealt out to the devices of a mesh axis, a page at a time.

For functions inside `jax.shard_map`, where a mesh axis (`context_axis`) has N devices. Page j of a text, its tokens j Z
to (j + 1) Z - 1, lies on device j mod N and is that device's page j // N of the text. So the devices' shares of a text
differ by a page at most, however long it is, and grow in turn. A step describes whole texts (seq_lens, positions); its
block tables and slots are the device's own. Every device computes the queries of all tokens and attends over its own
keys; the partial results are merged by their logsumexps, which gives the same bits on every device.

Layout as in vLLM's decode context parallelism (cp_kv_cache_interleave_size); the merge is that of
`tsmla_jax.merge_attention_states`. Axes: B requests, T tokens, H heads, V width of a head's result, M entries of a
block table, P pages of a device, Z page size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

import tsmla_jax
from tsmla_jax.sparse import metadata

FEW_TOKENS = 256
"""Tokens up to which partial results go to every device, in one collective. The results of more tokens are exchanged so
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
    """The keys of texts' contexts that a device has, as passes over them need it.

    Attributes:
        lens: [B] i32, of this device.
        most_lens: [B] i32, of the device that has most of each text, so that all take the same number of passes.
        chunk: static, how many of a text's a pass takes.
    """

    lens: jax.Array
    most_lens: jax.Array
    chunk: int


def held_context(context_lens: jax.Array, chunk: int, context_axis: str | None, page_size: int) -> HeldContext:
    """What a device has of contexts of which a pass takes `chunk` tokens a text: all of it without a context_axis, else
    its part, in whole pages."""
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
    """`tsmla_jax.mla_decode`, causal, over this device's keys alone.

    Args:
        q: [B, S, H, D], or ragged [T, H, D] with cu_seqlens_q and max_q_len: all queries.
        kv_cache: [P, Z, D], this device's pages, which hold the new tokens' keys already.
        block_tables: [B, M] i32, this device's pages of each request.
        seq_lens: [B] i32, keys of each request on all devices, its new tokens included.
        context_axis: the mesh axis.
        cu_seqlens_q, max_q_len: of ragged queries, as in `tsmla_jax.mla_decode`.
        options: of `tsmla_jax.mla_decode`: softmax_scale, latent_dim, scales, batch_invariant, implementation.

    Returns:
        out [T, H, L] (T is B S for dense q) and lse [T, H], for `merge`; rows without a key here have lse -inf.

    Raises:
        TypeError, ValueError, NotImplementedError: as `tsmla_jax.mla_decode`.
    """
    page_size, rows = kv_cache.shape[1], q.reshape(-1, *q.shape[-2:])
    most = q.shape[1] if cu_seqlens_q is None else max_q_len
    if most == 1:
        lens = local_lens(seq_lens, context_axis, page_size)
        ragged: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "max_q_len": max_q_len}
        out, lse = tsmla_jax.mla_decode(q, kv_cache, block_tables, lens, return_lse=True, **ragged, **options)
    else:
        # Which keys of a device the tokens of one request see has no common end: each token is a request of its own.
        new = cast(int, most) if cu_seqlens_q is None else jnp.diff(cu_seqlens_q)
        tokens = metadata.expand_decode_metadata(seq_lens, block_tables, new, total_tokens=rows.shape[0])
        lens = local_lens(tokens.seq_lens, context_axis, page_size)
        out, lse = tsmla_jax.mla_decode(rows[:, None], kv_cache, tokens.block_tables, lens, return_lse=True, **options)
    return out.reshape(*rows.shape[:-1], -1), lse.reshape(rows.shape[:-1])


def merge(out: jax.Array, lse: jax.Array, context_axis: str) -> tuple[jax.Array, jax.Array]:
    """The results over all keys from those over each device's keys: one collective.

    Args:
        out, lse: [T, H, V] and [T, H], as `mla_decode` returns them.
        context_axis: the mesh axis.

    Returns:
        out and lse of all keys, the same on every device.
    """
    outs, lses = _unpacked(lax.all_gather(_packed(out, lse), context_axis), out, lse)
    return tsmla_jax.merge_attention_states(outs, lses)


def project_merged(
    out: jax.Array, lse: jax.Array, context_axis: str, project: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """project(out of all keys), [T, E] on every device, from the results over each device's keys.

    Args:
        out, lse: [T, H, V] and [T, H].
        context_axis: the mesh axis.
        project: from rows [t, H, V] to [t, E]; each device may be given a part of the rows.
    """
    if out.shape[0] <= FEW_TOKENS:
        return project(merge(out, lse, context_axis)[0])
    return gather_rows(project(merge_own_rows(out, lse, context_axis)), out.shape[0], context_axis)


def merge_own_rows(out: jax.Array, lse: jax.Array, context_axis: str, *parts: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The results over all keys of this device's rows (`own_rows`), from all rows over each device's keys.

    parts: further results (out, lse) of this device's rows, over yet other keys.
    """
    packed = _split_rows(_packed(out, lse), context_axis)
    outs, lses = _unpacked(lax.all_to_all(packed, context_axis, split_axis=0, concat_axis=0), out, lse)
    every = [*zip(outs, lses, strict=True), *parts]
    return tsmla_jax.merge_attention_states([one for one, _ in every], [one for _, one in every])[0]


def own_rows(x: jax.Array, context_axis: str) -> jax.Array:
    """This device's part of rows [T, ...]: the first, second, ... of N equal ones, padded with zeros."""
    return _split_rows(x, context_axis)[lax.axis_index(context_axis)]


def gather_rows(own: jax.Array, num_rows: int, context_axis: str) -> jax.Array:
    """The num_rows rows whose parts are `own` on each device."""
    return lax.all_gather(own, context_axis, tiled=True)[:num_rows]


def own_offsets(cu_seqlens: jax.Array, num_rows: int, context_axis: str) -> tuple[jax.Array, jax.Array]:
    """Where requests begin, [B + 1] each, among this device's rows and among the keys that these rows see, of causal
    attention of packed tokens to themselves: a request that this device's last row cuts has no keys behind it."""
    each = -(-num_rows // lax.axis_size(context_axis))
    begin = lax.axis_index(context_axis) * each
    return jnp.clip(cu_seqlens - begin, 0, each), jnp.minimum(cu_seqlens, begin + each)


def select_topk(
    logits: jax.Array,
    seq_lens: jax.Array,
    k: int,
    *,
    context_axis: str,
    block_tables: jax.Array,
    page_size: int,
) -> tuple[jax.Array, jax.Array]:
    """This device's slots among the k best keys of each token on all devices, exact: `tsmla_jax.select_topk`'s order.

    Each device proposes its k best; one exchange of N k candidates a token decides.

    Args:
        logits: [T, M Z] f32, of this device's keys.
        seq_lens: [T] i32, keys of each token here (`local_lens`).
        k: static.
        context_axis: the mesh axis.
        block_tables: [T, M] i32, this device's pages.
        page_size: Z.

    Returns:
        slots [T, min(k, N M Z)] i32 in the order of positions, -1 behind the last, and how many they are, [T] i32.
    """
    best = min(k, logits.shape[1])
    positions = tsmla_jax.select_topk(logits, seq_lens, best, order="position")
    scores = jnp.take_along_axis(logits, jnp.maximum(positions, 0), axis=1)
    # Ascending keys, then ascending positions; where there is no candidate, behind all others.
    key = jnp.where(positions >= 0, -scores, jnp.nan)
    whole = jnp.where(positions >= 0, global_positions(positions, context_axis, page_size), _NOWHERE)
    packed = jnp.stack([lax.bitcast_convert_type(key, jnp.int32), whole], axis=-1)
    every = lax.all_gather(packed, context_axis, axis=1).reshape(logits.shape[0], -1, 2)
    keys = lax.bitcast_convert_type(every[..., 0], jnp.float32)
    _, winners = lax.sort((keys, every[..., 1]), num_keys=2)
    winners = winners[:, : min(k, winners.shape[1])]
    mine = local_positions(jnp.where(winners == _NOWHERE, -1, winners), context_axis, page_size)
    mine = jnp.sort(jnp.where(mine < 0, _NOWHERE, mine), axis=1)
    mine = jnp.where(mine == _NOWHERE, -1, mine)
    slots = metadata.positions_to_slots(mine, block_tables, page_size)
    return slots, (mine >= 0).sum(axis=1, dtype=jnp.int32)


_NOWHERE = 2**31 - 1


def _split_rows(x: jax.Array, context_axis: str) -> jax.Array:
    """Rows [T, ...] as [N, ceil(T / N), ...], padded with zeros."""
    world = lax.axis_size(context_axis)
    padding = -x.shape[0] % world
    padded = jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1)))
    return padded.reshape(world, -1, *x.shape[1:])


def _packed(out: jax.Array, lse: jax.Array) -> jax.Array:
    """out and lse as one array of integers [T, H, W], so that one collective moves both, bit by bit."""
    width = min(out.dtype.itemsize, lse.dtype.itemsize)
    integers = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[width]
    parts = (lax.bitcast_convert_type(array, integers) for array in (out, lse[..., None]))
    return jnp.concatenate([part.reshape(*lse.shape, -1) for part in parts], axis=-1)


def _unpacked(packed: jax.Array, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inverse, with more axes in front; out and lse as they were packed."""

    def part(integers: jax.Array, like: jax.Array) -> jax.Array:
        count = like.dtype.itemsize // integers.dtype.itemsize
        grouped = integers if count == 1 else integers.reshape(*integers.shape[:-1], -1, count)
        return lax.bitcast_convert_type(grouped, like.dtype)

    columns = out.shape[-1] * (out.dtype.itemsize // packed.dtype.itemsize)
    return part(packed[..., :columns], out), part(packed[..., columns:], lse)[..., 0]
