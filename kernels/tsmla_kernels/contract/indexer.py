"""The arguments and results of what trains an indexer: indexer_selected_logits and indexer_loss.

Imports neither jax nor torch. Axes: T query tokens, Hi heads of the indexer, Di its width, H heads of the attention, D
key width, K selected slots a token, P pages, Z page size, M pages a request at most, B requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from tsmla_kernels.contract.layouts import CacheSpec, IndexerCacheSpec
from tsmla_kernels.contract.rules import (
    FLOATS,
    Array,
    Scale,
    check_array,
    check_at_least_one,
    check_ints,
    check_rank,
    check_scales,
    show,
)
from tsmla_kernels.contract.sparse import IndexerLogitsSpec

WEIGHTS = ("float32", "float64")
QUANTISED = "quantised to 8 bits; no gradient passes through it"


@dataclass(frozen=True)
class SelectedLogitsSpec:
    """The static facts of one indexer_selected_logits call; its result is [T, K]."""

    num_tokens: int
    num_heads: int
    head_dim: int
    num_selected: int
    cache: IndexerCacheSpec
    q_dtype: str
    weights_dtype: str
    cache_dtype: str


def indexer_selected_logits_spec(
    *, q: Array, weights: Array, k_cache: Array, indices: Array, lengths: Array | None = None
) -> SelectedLogitsSpec:
    """The spec of indexer_selected_logits, or ValueError naming the argument that is not legal."""
    num_tokens, num_heads, head_dim = _check_indexer("q", q, "weights", weights)
    cache = _key_cache("k_cache", k_cache, "q", head_dim)
    _check_selection(num_tokens, indices, lengths)
    return SelectedLogitsSpec(
        num_tokens=num_tokens,
        num_heads=num_heads,
        head_dim=head_dim,
        num_selected=indices.shape[1],
        cache=cache,
        q_dtype=q.dtype,
        weights_dtype=weights.dtype,
        cache_dtype=k_cache.dtype,
    )


@dataclass(frozen=True)
class IndexerLossSpec:
    """The static facts of one indexer_loss call; its result is [T].

    index: the logits' part. Its num_selected says how many keys a token can have: K, or M * Z if all keys of a request
    count. cache: the attention's keys. paged: whether block tables say which keys there are. ragged: whether the block
    tables have one row per request. num_requests: rows of the block tables.
    """

    index: SelectedLogitsSpec
    cache: CacheSpec
    num_heads: int
    head_dim: int
    q_dtype: str
    paged: bool
    ragged: bool
    num_requests: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.index.num_tokens

    @property
    def num_columns(self) -> int:
        """The most keys of a token."""
        return self.index.num_selected

    @property
    def all_logits(self) -> IndexerLogitsSpec:
        """The spec of the indexer_logits call whose keys count, if block tables say which keys there are."""
        index = self.index
        return IndexerLogitsSpec(
            num_tokens=index.num_tokens,
            num_requests=self.num_requests,
            num_heads=index.num_heads,
            head_dim=index.head_dim,
            max_pages=index.num_selected // index.cache.page_size,
            cache=index.cache,
            ragged=self.ragged,
            q_dtype=index.q_dtype,
            weights_dtype=index.weights_dtype,
            cache_dtype=index.cache_dtype,
        )


def indexer_loss_spec(
    *,
    index_q: Array,
    index_weights: Array,
    index_cache: Array,
    q: Array,
    kv_cache: Array,
    lse: Array,
    indices: Array | None = None,
    lengths: Array | None = None,
    block_tables: Array | None = None,
    seq_lens: Array | None = None,
    cu_seqlens_q: Array | None = None,
    sinks: Array | None = None,
    softmax_scale: Scale = 1.0,
) -> IndexerLossSpec:
    """The spec of indexer_loss, or ValueError / TypeError naming the argument that is not legal."""
    num_tokens, index_heads, index_dim = _check_indexer("index_q", index_q, "index_weights", index_weights)
    keys = _key_cache("index_cache", index_cache, "index_q", index_dim)
    tokens = (num_tokens, "T, index_q's tokens")
    _refuse_quantised("q", q)
    check_array("q", q, "T H D", FLOATS, tokens)
    check_at_least_one("q", q.shape, 1, "H")
    num_heads, head_dim = q.shape[1:]
    _refuse_quantised("kv_cache", kv_cache)
    pages = (keys.num_pages, "P of index_cache"), (keys.page_size, "Z of index_cache"), (head_dim, "q's D")
    check_array("kv_cache", kv_cache, "P Z D", FLOATS, *pages)
    check_array("lse", lse, "T H", WEIGHTS, tokens, (num_heads, "H, q's heads"))
    if sinks is not None:
        check_array("sinks", sinks, "H", FLOATS, (num_heads, "H, q's heads"))
    check_scales(softmax_scale=softmax_scale)
    paged = {"block_tables": block_tables, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
    num_requests = 0
    if indices is not None:
        for name, array in paged.items():
            if array is not None:
                raise ValueError(f"{name}: got an array beside indices; legal: None, as indices say which keys count")
        _check_selection(num_tokens, indices, lengths, "index_q")
        num_columns = indices.shape[1]
    else:
        if lengths is not None:
            raise ValueError("lengths: got an array without indices; legal: None")
        if block_tables is None or seq_lens is None:
            name = "indices" if block_tables is None else "seq_lens"
            raise ValueError(f"{name}: got None; legal: indices, or block_tables with seq_lens, say which keys count")
        if cu_seqlens_q is None:
            rows = (num_tokens, "T, one row a token")
            check_ints("block_tables", block_tables, "T M", rows)
            check_ints("seq_lens", seq_lens, "T", rows)
        else:
            check_ints("block_tables", block_tables, "B M")
            count = block_tables.shape[0]
            check_ints("seq_lens", seq_lens, "B", (count, "B from block_tables"))
            check_ints("cu_seqlens_q", cu_seqlens_q, "B + 1", (count + 1, "B + 1, B from block_tables"))
        num_requests, max_pages = block_tables.shape
        num_columns = max_pages * keys.page_size
    index = SelectedLogitsSpec(
        num_tokens=num_tokens,
        num_heads=index_heads,
        head_dim=index_dim,
        num_selected=num_columns,
        cache=keys,
        q_dtype=index_q.dtype,
        weights_dtype=index_weights.dtype,
        cache_dtype=index_cache.dtype,
    )
    return IndexerLossSpec(
        index=index,
        cache=CacheSpec("plain", keys.num_pages, keys.page_size, keys.page_size, head_dim, kv_cache.dtype),
        num_heads=num_heads,
        head_dim=head_dim,
        q_dtype=q.dtype,
        paged=indices is None,
        ragged=cu_seqlens_q is not None,
        num_requests=num_requests,
    )


def _check_indexer(q_name: str, q: Array, weights_name: str, weights: Array) -> tuple[int, int, int]:
    """T, Hi and Di of the indexer's queries."""
    _refuse_quantised(q_name, q)
    check_array(q_name, q, "T Hi Di", FLOATS)
    num_tokens, num_heads, head_dim = q.shape
    check_at_least_one(q_name, q.shape, 1, "Hi")
    sizes = (num_tokens, f"T, {q_name}'s tokens"), (num_heads, f"Hi, {q_name}'s heads")
    check_array(weights_name, weights, "T Hi", WEIGHTS, *sizes)
    return num_tokens, num_heads, head_dim


def _key_cache(name: str, cache: Array, q_name: str, head_dim: int) -> IndexerCacheSpec:
    _refuse_quantised(name, cache)
    check_rank(name, cache, "P Z Di")
    if any(size < 1 for size in cache.shape):
        raise ValueError(f"{name}: got shape {show(cache.shape)}; every axis must be at least 1")
    check_array(name, cache, "P Z Di", FLOATS)
    num_pages, page_size, width = cache.shape
    if width != head_dim:
        raise ValueError(f"{name}: got keys of width {width}; {q_name}'s Di is {head_dim}")
    return IndexerCacheSpec(num_pages, page_size, width, packed=False)


def _check_selection(num_tokens: int, indices: Array, lengths: Array | None, q_name: str = "q") -> None:
    tokens = (num_tokens, f"T, {q_name}'s tokens")
    check_ints("indices", indices, "T K", tokens)
    if lengths is not None:
        check_ints("lengths", lengths, "T", tokens)


def _refuse_quantised(name: str, array: Array) -> None:
    """ValueError if the values have 8 bits: an indexer is trained on values that are not quantised."""
    if array.dtype.startswith("float8") or array.dtype == "uint8":
        raise ValueError(f"{name}: got {array.dtype}, {QUANTISED}; legal: {', '.join(FLOATS)}")
