"""The operands of TokenSpeed's kernels made from a call's arrays, and the call's results made from theirs: rules that
both front ends compute (tsmla_kernels.arrays), so that a call is safe for any input.

Decode reads whole tiles of 128 keys. So block tables are widened to whole tiles, and entries that a request doesn't use
get the number after the last page, which the copy engine reads as zeros: entries past a request's end can hold
anything. Each query token's visible keys are counted here, also for lengths outside the table. Ragged queries become
[B, max_q_len, H, D], with each request's tokens at the end of its row. The kernels' lse has base 2.

One case stays unsafe: a slot beyond a request's length in the last page that it uses must hold a finite number, since
the matrix product multiplies it by a weight of 0. Caches that start as zeros and get finite tokens satisfy this; for
others TSMLA_CHECK=1 names the request that is wrong (`not_finite`).

Prefill's causal loop never ends at a tile whose queries all see no key. A request with many more queries than keys has
such a tile. Its queries that see nothing therefore become a request of their own without keys, which the kernel
handles. A tile of v includes rows behind its request, with a weight of 0, so they must not be NaN. Rows behind the last
request become zeros here; rows of another request are that request's to keep finite.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from tsmla_kernels.arrays import Array, Library, row_owner
from tsmla_kernels.sm100.config import KEY_TILE, PREFILL_ROWS, DecodeConfig, PrefillConfig

if TYPE_CHECKING:
    from tsmla_kernels.contract import DecodeSpec, Dim, PrefillSpec

LN_2 = math.log(2.0)


class Attended(NamedTuple):
    """The results of attention, or those of a kernel for it: out has one axis more than lse."""

    out: Array
    lse: Array


# ---- decode


class DecodeArrays(NamedTuple):
    """The arrays of a call of mla_decode, without its scales."""

    q: Array
    kv_cache: Array
    block_tables: Array
    seq_lens: Array
    cu_seqlens_q: Array | None = None
    visible_lens: Array | None = None


class DecodeOperands(NamedTuple):
    """The first operands of the kernels, in their order."""

    q: Array
    kv_cache: Array
    block_tables: Array
    seq_lens: Array
    visible_lens: Array


def decode_operands(library: Library, spec: DecodeSpec, config: DecodeConfig, given: DecodeArrays) -> DecodeOperands:
    """The operands for the arrays of a call."""
    xp, tokens = library.xp, config.max_q_len
    seq_lens = xp.clip(given.seq_lens, 0, spec.max_pages * spec.page_size)
    q, visible_lens, lengths = given.q, given.visible_lens, None
    if given.cu_seqlens_q is not None:
        starts = given.cu_seqlens_q[:-1]
        lengths = given.cu_seqlens_q[1:] - starts
        rows = (starts - (tokens - xp.clip(lengths, 0, tokens)))[:, None] + library.arange(tokens)
        rows = xp.clip(rows, 0, spec.total_q_len - 1)
        q, visible_lens = library.take(q, rows), None if visible_lens is None else visible_lens[rows]
    if visible_lens is None:
        visible_lens = visible_keys(library, seq_lens, lengths, tokens=tokens, causal=spec.causal)
    else:
        visible_lens = xp.minimum(xp.clip(visible_lens, 0), seq_lens[:, None])
    pieces = spec.page_size // config.page_size  # of a page, each a page to the kernel
    kv_cache = given.kv_cache.reshape(spec.num_pages * pieces, config.page_size, spec.head_dim)
    tables = given.block_tables[:, :, None] * pieces + library.arange(pieces)
    tables = tables.reshape(spec.batch, spec.max_pages * pieces)
    tables = whole_tiles(library, tables, seq_lens, config.page_size, spec.num_pages * pieces)
    return DecodeOperands(q, kv_cache, tables, seq_lens, visible_lens)


def decode_results(
    library: Library, spec: DecodeSpec, found: Attended, visible_lens: Array, cu_seqlens_q: Array | None
) -> Attended:
    """The results of a call from those of the kernels, [B, S, H, L] and [B, S, H] of base 2, and their visible_lens."""
    xp, tokens = library.xp, spec.max_q_len
    out, lse, seen = found.out, found.lse, (visible_lens > 0)[:, :, None]
    if cu_seqlens_q is not None:
        request, position, owned = row_owner(library, cu_seqlens_q, spec.total_q_len)
        padding = tokens - xp.clip(cu_seqlens_q[1:] - cu_seqlens_q[:-1], 0, tokens)
        slot = xp.clip(position + padding[request], 0, tokens - 1)
        out, lse = out[request, slot], lse[request, slot]
        seen = (owned & (position < tokens))[:, None] & seen[request, slot]
    return Attended(xp.where(seen[..., None], out, 0), xp.where(seen, lse * LN_2, -math.inf))


def visible_keys(library: Library, seq_lens: Array, q_lens: Array | None, *, tokens: int, causal: bool) -> Array:
    """How many keys each query token sees, [B, tokens] int32.

    Args:
      seq_lens: [B] int32, at least 0. q_lens: [B] int32, the queries of each ragged request, which end at the row's
        end; None for `tokens` each.
    """
    slots = library.arange(tokens)
    if not causal:
        return seq_lens[:, None] + 0 * slots
    # A request with more tokens than a row has only its first `tokens` computed.
    ends = seq_lens if q_lens is None else seq_lens - library.xp.clip(q_lens - tokens, 0)
    return library.xp.clip(ends[:, None] - (tokens - 1) + slots, 0)


def whole_tiles(library: Library, block_tables: Array, seq_lens: Array, page_size: int, num_pages: Dim) -> Array:
    """The table [B, M] widened to whole key tiles; unused entries name a page that doesn't exist."""
    xp, (batch, max_pages) = library.xp, block_tables.shape
    pages_a_tile = KEY_TILE // page_size
    width = -(-max_pages // pages_a_tile) * pages_a_tile
    behind = xp.broadcast_to(xp.zeros_like(block_tables[:, :1]), (batch, width - max_pages))
    used = library.arange(width) * page_size < seq_lens[:, None]
    nowhere = xp.zeros_like(seq_lens[:1]) + num_pages
    return xp.where(used, xp.concatenate([block_tables, behind], 1), nowhere)


def not_finite(library: Library, spec: DecodeSpec, kv_cache: Array, block_tables: Array, seq_lens: Array) -> Array:
    """Which requests leave a slot of their last page unused that is not finite, [B]."""
    xp, most = library.xp, spec.max_pages * spec.page_size
    last = xp.clip(seq_lens, 1, most) - 1
    request = library.arange(spec.batch)
    pages = xp.clip(block_tables[request, last // spec.page_size], 0, spec.num_pages - 1)
    values = xp.asarray(library.take(kv_cache, pages), dtype=xp.float32)[..., : spec.latent_dim]
    unused = library.arange(spec.page_size) > (last % spec.page_size)[:, None]
    return (seq_lens > 0) & (unused & ~xp.isfinite(values).all(-1)).any(-1)


# ---- prefill


class PrefillArrays(NamedTuple):
    """The arrays of a call of mla_prefill, and the first operands of the kernel, in their order."""

    q: Array
    k: Array
    v: Array
    cu_seqlens_q: Array
    cu_seqlens_kv: Array


class PrefillOperands(NamedTuple):
    """The kernel's operands, and the call's own offsets for its results, clipped."""

    operands: PrefillArrays
    starts_q: Array
    starts_kv: Array


def prefill_operands(
    library: Library, spec: PrefillSpec, config: PrefillConfig, given: PrefillArrays
) -> PrefillOperands:
    """The operands for the arrays of a call."""
    xp = library.xp
    starts_q = xp.clip(given.cu_seqlens_q, 0, spec.total_q_len)
    starts_kv = xp.clip(given.cu_seqlens_kv, 0, spec.total_kv_len)
    kernel_q, kernel_kv = starts_q, starts_kv
    if config.causal and spec.max_q_len > PREFILL_ROWS:
        kernel_q, kernel_kv = unseeing_apart(library, starts_q, starts_kv)
    else:  # A request's first tile holds its last query. If one is longer than max_q_len, nothing is computed.
        too_long = (starts_q[1:] - starts_q[:-1] > spec.max_q_len).any()
        starts_q = kernel_q = xp.where(too_long, 0, starts_q)
    owned = library.arange(spec.total_kv_len)[:, None, None] < starts_kv[-1]
    v = xp.where(owned, given.v, xp.zeros_like(given.v[:1]))
    return PrefillOperands(PrefillArrays(given.q, given.k, v, kernel_q, kernel_kv), starts_q, starts_kv)


def prefill_results(library: Library, spec: PrefillSpec, found: Attended, made: PrefillOperands) -> Attended:
    """The results of a call from those of the kernel, [Tq, H, V] and [Tq, H]."""
    xp, starts_q, starts_kv = library.xp, made.starts_q, made.starts_kv
    request, position, owned = row_owner(library, starts_q, spec.total_q_len)
    queries, keys = (starts[1:] - starts[:-1] for starts in (starts_q, starts_kv))
    visible = keys[request]
    if spec.causal:
        visible = xp.minimum(visible, position + 1 + visible - queries[request])
    seen = (owned & (position < spec.max_q_len) & (visible > 0))[:, None]
    return Attended(xp.where(seen[..., None], found.out, 0), xp.where(seen, found.lse, -math.inf))


class Offsets(NamedTuple):
    """Offsets of queries and of keys."""

    queries: Array
    keys: Array


def unseeing_apart(library: Library, starts_q: Array, starts_kv: Array) -> Offsets:
    """Offsets [2 B + 1]: each request's queries that see no key under a causal mask come before it as a request without
    keys."""
    xp = library.xp
    q_lens, kv_lens = (starts[1:] - starts[:-1] for starts in (starts_q, starts_kv))
    unseeing = xp.minimum(xp.clip(q_lens - kv_lens, 0), xp.clip(q_lens, 0))
    return Offsets(_cut(xp, starts_q, starts_q[:-1] + unseeing), _cut(xp, starts_kv, starts_kv[:-1]))


def _cut(xp: Any, starts: Array, middles: Array) -> Array:
    """Offsets [2 B + 1] that cut each request of `starts` [B + 1] in two, at `middles` [B]."""
    return xp.concatenate([xp.stack([starts[:-1], middles], 1).reshape(-1), starts[-1:]], 0)
