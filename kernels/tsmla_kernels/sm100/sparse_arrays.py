"""The operands of FlashInfer's and cuDNN's kernels made from a call's arrays, and the call's results made from theirs:
rules that both front ends compute (tsmla_kernels.arrays)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tsmla_kernels.arrays import Array, Library
from tsmla_kernels.contract.layouts import CacheSpec, valid_slots
from tsmla_kernels.sm100.dense_arrays import Attended
from tsmla_kernels.sm100.logits_config import SPLIT_KEYS, padded_columns
from tsmla_kernels.sm100.sparse_config import HEADS, INDEX_BLOCK, widens

if TYPE_CHECKING:
    from tsmla_kernels.contract.sparse import IndexerLogitsSpec, SparseMLASpec


# ---- the indexer's logits


class LogitsOperands(NamedTuple):
    """The operands of FlashInfer's kernel that a call doesn't have as they are.

    Attributes:
      block_tables: [T, padded pages] int32; entries that are not used name page 0.
      schedule: as `schedule` makes it.
    """

    block_tables: Array
    schedule: Array


def logits_operands(
    library: Library, spec: IndexerLogitsSpec, block_tables: Array, seen: Array, num_ctas: int
) -> LogitsOperands:
    """The operands for rows of the block table [T, M] and how many keys each token sees [T], 0 to M * Z."""
    xp, page_size = library.xp, spec.cache.page_size
    pages = padded_columns(spec) // page_size
    used = library.arange(pages) * page_size < seen[:, None]
    tables = _padded(library, block_tables, pages, 0)
    tables = xp.where(used, xp.clip(tables, 0, spec.cache.num_pages - 1), 0)
    return LogitsOperands(tables, schedule(library, seen, num_ctas))


def schedule(library: Library, seen: Array, num_ctas: int) -> Array:
    """Where each CTA's share of the splits begins, [num_ctas + 1, 2] int32: the token, and the split among the token's.
    The last entry is the end of all shares. `seen` [T]: how many keys each token sees."""
    xp = library.xp
    ends = xp.cumsum(-(-seen // SPLIT_KEYS), 0, dtype=xp.int32)
    total = ends[-1]
    cta = library.arange(num_ctas + 1)
    first = cta * (total // num_ctas) + xp.minimum(cta, total % num_ctas)
    token = (ends <= first[:, None]).sum(-1, dtype=xp.int32)
    before = xp.where(token > 0, ends[xp.clip(token - 1, 0)], 0)
    return xp.stack([token, first - before], -1)


def visible_logits(library: Library, logits: Array, seen: Array, columns: int) -> Array:
    """The first columns of the kernel's logits, with -inf from the first key on that a token does not see."""
    visible = library.arange(columns) < seen[:, None]
    return library.xp.where(visible, logits[:, :columns], -float("inf"))


# ---- attention over selected rows


class SparseOperands(NamedTuple):
    """The operands of cuDNN's kernel, for Q = T * ceil(H / 64) rows of 64 query heads.

    Attributes:
      q: [Q, 64, D]. rows: [N, D] of q's dtype. indices: [Q, padded columns] int32, -1 for no row. lengths: [Q] int32,
        the number of columns before the padding.
    """

    q: Array
    rows: Array
    indices: Array
    lengths: Array


class Selected(NamedTuple):
    """Rows of q's dtype [N, D], and for each token the indices of its rows among them [T, K], -1 for none."""

    rows: Array
    indices: Array


Gather = Callable[[Array, Array, CacheSpec], Array]
"""The function of (cache, slots, its spec) that gives the slots' rows in q's dtype. All slots are valid."""


def sparse_operands(library: Library, spec: SparseMLASpec, q: Array, selected: Selected) -> SparseOperands:
    """The operands for queries [T, H, D] and their selected rows: heads are padded to rows of 64, and each row of a
    token has the token's indices, in whole blocks."""
    xp, rows = library.xp, spec.num_tokens * -(-spec.num_heads // HEADS)
    groups, columns = rows // spec.num_tokens, -(-spec.num_selected // INDEX_BLOCK) * INDEX_BLOCK
    indices = _padded(library, selected.indices, columns, -1)[:, None]
    indices = xp.broadcast_to(indices, (spec.num_tokens, groups, columns)).reshape(rows, columns)
    return SparseOperands(
        q=_padded(library, q, groups * HEADS, 0).reshape(rows, HEADS, spec.head_dim),
        rows=selected.rows,
        indices=indices,
        lengths=xp.full_like(indices[:, 0], spec.num_selected),
    )


def selected_rows(
    library: Library,
    spec: SparseMLASpec,
    caches: Sequence[Array],
    indices: Array,
    lengths: Array | None,
    gather: Gather,
) -> Selected:
    """The rows that the call's indices [T, K] select, of which the first `lengths` [T] count. One plain cache of q's
    dtype is taken as it is. Otherwise `gather` makes rows of q's dtype: of all slots of a cache, or of the selected
    ones if these are fewer."""
    xp, first = library.xp, 0
    counted = None if lengths is None else library.arange(spec.num_selected) < lengths[:, None]
    bounds = (0, spec.window) if spec.compressed is None else (0, spec.window, spec.num_selected)
    rows, places = [], []
    for i, (cache, layout) in enumerate(zip(caches, spec.caches, strict=True)):
        columns = slice(bounds[i], bounds[i + 1])
        slots = indices[:, columns]
        valid = valid_slots(slots, layout)
        if counted is not None:
            valid = valid & counted[:, columns]
        if not widens(spec):
            return Selected(cache.reshape(-1, spec.head_dim), xp.where(valid, slots, -1))
        count = slots.shape[0] * slots.shape[1]
        if count < layout.num_slots:
            rows.append(gather(cache, xp.where(valid, slots, 0).reshape(-1), layout))
            own = library.arange(count).reshape(slots.shape)
        else:
            every, count = library.arange(layout.num_slots), layout.num_slots
            rows.append(gather(cache, xp.where(valid_slots(every, layout), every, 0), layout))
            own = slots
        places.append(xp.where(valid, own + first, -1))
        first += count
    return Selected(xp.concatenate(rows, 0), xp.concatenate(places, 1))


def sparse_results(
    library: Library, spec: SparseMLASpec, found: Attended, indices: Array, sinks: Array | None, kv_scale: float
) -> Attended:
    """The results of a call from those of the kernel's rows, [Q, 64, L] and [Q, 64], and the tokens' indices [T, K].

    Args:
      sinks: [H] float32. kv_scale: the factor of the keys' rows.
    """
    xp, tokens = library.xp, spec.num_tokens
    out = found.out.reshape(tokens, -1, spec.latent_dim)[:, : spec.num_heads]
    lse = found.lse.reshape(tokens, -1)[:, : spec.num_heads]
    empty = (indices < 0).all(-1)[:, None]
    factor = xp.full_like(lse, kv_scale)
    if sinks is not None:
        factor = factor / (1 + xp.exp(sinks - xp.where(empty, 0, lse)))
    scaled = xp.asarray(out * factor[..., None], dtype=out.dtype)
    return Attended(xp.where(empty[..., None], 0, scaled), xp.where(empty, -float("inf"), lse))


def _padded(library: Library, array: Array, width: int, value: int) -> Array:
    """The array with `value` behind its second axis, up to `width`."""
    xp, shape = library.xp, (array.shape[0], width - array.shape[1], *array.shape[2:])
    if not shape[1]:
        return array
    return xp.concatenate([array, xp.broadcast_to(xp.full_like(array[:, :1], value), shape)], 1)
