"""The arguments and results of the sparse operations: sparse_mla, indexer_logits, select_topk and indexer_topk.

Imports neither jax nor torch. Axes: T query tokens, H query heads, D key width, L value (latent) width, R rope width, K
selected entries a token, P pages, Z page size, M pages a request at most, B requests, E compressed entries, C channels
of a compressor head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tsmla_kernels.contract.attention import ResultDtypes
from tsmla_kernels.contract.layouts import CacheSpec, IndexerCacheSpec, cache_spec, indexer_cache_spec
from tsmla_kernels.contract.rules import (
    FLOATS,
    FP8,
    VALUES,
    Array,
    Dim,
    Scale,
    check_array,
    check_at_least_one,
    check_ints,
    check_scale,
    check_scales,
    listed,
    not_differentiable,
    static_bool,
    static_int,
)
from tsmla_kernels.contract.selection import SelectionBitsSpec, selection_words

INDEX_ROW_ALIGNMENT = 4
"""Rows of int32 indices are padded to a multiple of this: vector loads and TMA gathers need 16 bytes."""

SPARSE_FORMS = ("auto", "direct", "union")
"""How sparse_mla's kernel gathers: each token for itself, or neighbouring tokens the union of their slots once. "auto"
lets the sizes of the call decide. The results are those of the same selection."""

TOPK_ORDERS = ("value", "position")
"""The orders in which select_topk writes a row."""


@dataclass(frozen=True)
class SparseMLASpec(ResultDtypes):
    """The static facts of one sparse_mla call. The first `window` columns of the indices select from `cache`, the
    others from `compressed`, if there is such a cache. tokens_per_request: how many neighbouring tokens are of one
    request; 0 if that is not known. max_logits: whether the call returns the greatest logits."""

    num_tokens: int
    num_heads: int
    head_dim: int
    latent_dim: int
    num_selected: int
    window: int
    cache: CacheSpec
    compressed: CacheSpec | None
    q_dtype: str
    batch_invariant: bool = False
    form: str = "auto"
    tokens_per_request: int = 0
    deterministic: bool = False
    max_logits: bool = False

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """The one cache, or both."""
        return (self.cache,) if self.compressed is None else (self.cache, self.compressed)

    def without_sizes(self) -> SparseMLASpec:
        """The spec with its sizes set to 0: it is the same for a call on a part of the tokens or heads, and for one
        call in place of several."""
        cache, *others = (replace(cache, num_pages=0) for cache in self.caches)
        window = self.window if others else 0
        compressed = others[0] if others else None
        return replace(
            self, num_tokens=0, num_heads=0, num_selected=0, window=window, cache=cache, compressed=compressed
        )

    def with_sizes_of(
        self, q: tuple[Dim, ...], caches: Sequence[tuple[Dim, ...]], indices: tuple[Dim, ...]
    ) -> SparseMLASpec:
        """The spec with the same static facts, and with the sizes of arrays of these shapes."""
        cache, *others = (replace(of, num_pages=shape[0]) for of, shape in zip(self.caches, caches, strict=True))
        return replace(
            self,
            num_tokens=q[0],
            num_heads=q[1],
            num_selected=indices[1],
            window=self.window if others else indices[1],
            cache=cache,
            compressed=others[0] if others else None,
        )


def sparse_mla_spec(
    *,
    q: Array,
    kv_cache: Array,
    indices: Array,
    lengths: Array | None = None,
    sinks: Array | None = None,
    compressed_kv_cache: Array | None = None,
    window: int | None = None,
    latent_dim: int = 512,
    page_size: int | None = None,
    page_span: int | None = None,
    compressed_page_size: int | None = None,
    compressed_page_span: int | None = None,
    softmax_scale: Scale = 1.0,
    q_scale: Scale = None,
    kv_scale: Scale = None,
    compressed_kv_scale: Scale = None,
    batch_invariant: bool = False,
    form: str = "auto",
    tokens_per_request: int | None = None,
    deterministic: bool = False,
    return_max_logits: bool = False,
) -> SparseMLASpec:
    """The spec of sparse_mla, or ValueError / TypeError naming the argument that is not legal."""
    check_array("q", q, "T H D", VALUES)
    num_tokens, num_heads, head_dim = q.shape
    check_at_least_one("q", q.shape, 1, "H")
    tokens = (num_tokens, "T, q's tokens")
    check_ints("indices", indices, "T K", tokens)
    latent_dim = static_int("latent_dim", latent_dim, minimum=1)
    if latent_dim > head_dim:
        raise ValueError(f"latent_dim: got {latent_dim}; it must be at most q's last axis D = {head_dim}")
    cache = cache_spec("kv_cache", kv_cache, page_size=page_size, page_span=page_span)
    _check_key_width("kv_cache", cache, head_dim)
    if lengths is not None:
        check_ints("lengths", lengths, "T", tokens)
    if sinks is not None:
        check_array("sinks", sinks, "H", FLOATS, (num_heads, "H, q's heads"))
    columns, compressed = indices.shape[1], None
    if compressed_kv_cache is None:
        for name, value in (
            ("window", window),
            ("compressed_page_size", compressed_page_size),
            ("compressed_page_span", compressed_page_span),
        ):
            if value is not None:
                raise ValueError(f"{name}: got {value} without compressed_kv_cache; legal: None")
        window = columns
    else:
        window = _checked_window(window, columns)
        compressed = cache_spec(
            "compressed_kv_cache",
            compressed_kv_cache,
            page_size=compressed_page_size,
            page_span=compressed_page_span,
            prefix="compressed_",
        )
        _check_key_width("compressed_kv_cache", compressed, head_dim)
    check_sparse_scales(
        cache,
        compressed,
        softmax_scale=softmax_scale,
        q_scale=q_scale,
        kv_scale=kv_scale,
        compressed_kv_scale=compressed_kv_scale,
    )
    return SparseMLASpec(
        num_tokens=num_tokens,
        num_heads=num_heads,
        head_dim=head_dim,
        latent_dim=latent_dim,
        num_selected=columns,
        window=window,
        cache=cache,
        compressed=compressed,
        q_dtype=q.dtype,
        batch_invariant=static_bool("batch_invariant", batch_invariant),
        **_form(form, tokens_per_request),
        deterministic=static_bool("deterministic", deterministic),
        max_logits=static_bool("return_max_logits", return_max_logits),
    )


def _checked_window(window: int | None, columns: Dim) -> int:
    """The leading columns of indices that select from the first of two caches; ValueError / TypeError if they are not
    legal, or if `columns`, the columns of indices, are not."""
    if window is None:
        raise ValueError(
            "window: got None; compressed_kv_cache is given, so the number of leading columns of indices that select"
            " from kv_cache must be"
        )
    window = static_int("window", window)
    if window > columns:
        raise ValueError(f"window: got {window}; it must be at most K = {columns}, the columns of indices")
    if columns % INDEX_ROW_ALIGNMENT:
        raise ValueError(
            f"indices: got K = {columns} with compressed_kv_cache; legal: a multiple of {INDEX_ROW_ALIGNMENT}, rows of"
            " 16 bytes (as build_mixed_sparse_indices makes them)"
        )
    return window


def _form(form: str, tokens_per_request: int | None) -> dict[str, Any]:
    """The fields of a SparseMLASpec that these arguments give."""
    if form not in SPARSE_FORMS:
        raise ValueError(f"form: got {form!r}; legal: {listed([repr(name) for name in SPARSE_FORMS])}")
    if tokens_per_request is not None:
        tokens_per_request = static_int("tokens_per_request", tokens_per_request, minimum=1)
    return {"form": form, "tokens_per_request": tokens_per_request or 0}


def check_sparse_scales(
    cache: CacheSpec,
    compressed: CacheSpec | None,
    *,
    softmax_scale: Scale,
    q_scale: Scale,
    kv_scale: Scale,
    compressed_kv_scale: Scale,
) -> None:
    """ValueError / TypeError for a scale of sparse_mla that is not legal with these caches."""
    check_scales(softmax_scale=softmax_scale, q_scale=q_scale)
    for name, scale, rows in (("kv_scale", kv_scale, cache), ("compressed_kv_scale", compressed_kv_scale, compressed)):
        check_scale(name, scale)
        if scale is not None and (rows is None or rows.layout != "plain"):
            raise ValueError(f"{name}: got a scale for {'no cache' if rows is None else 'packed rows'}; legal: None")


def sparse_gradient_reasons(spec: SparseMLASpec, kv_scales: Sequence[object] = ()) -> list[str]:
    """Why only the reference implementation has a gradient of this call of sparse_mla; empty if another may have one.
    `kv_scales` are kv_scale and compressed_kv_scale."""
    reasons = [f"q: got {spec.q_dtype}; a gradient needs 16 bits or more"] if spec.q_dtype == FP8 else []
    names = ("kv_cache", "compressed_kv_cache")
    for name, cache, scale in zip(names, spec.caches, (*kv_scales, None, None), strict=False):
        if cache.layout != "plain" or cache.dtype == FP8:
            rows = f"{cache.layout} rows of {cache.dtype}"
            reasons.append(f"{name}: got {rows}; a gradient needs plain rows of 16 bits or more")
        if scale is not None:
            reasons.append(f"{name.removesuffix('_cache')}_scale: got a scale; a gradient needs None")
    return reasons


def check_sparse_gradient(spec: SparseMLASpec, kv_scales: Sequence[object] = ()) -> None:
    """NotImplementedError that names every argument with which a call of sparse_mla has no gradient."""
    if reasons := sparse_gradient_reasons(spec, kv_scales):
        raise not_differentiable("sparse_mla", f"{'; '.join(reasons)}; use implementation='reference'")


def _check_key_width(name: str, cache: CacheSpec, head_dim: int) -> None:
    if cache.head_dim != head_dim:
        raise ValueError(f"{name}: got keys of width {cache.head_dim} ({cache.layout}); q's D is {head_dim}")


@dataclass(frozen=True)
class IndexerLogitsSpec:
    """The static facts of one indexer_logits call; its result is [T, M * Z]. Without `ragged` each token is a request
    of its own."""

    num_tokens: int
    num_requests: int
    num_heads: int
    head_dim: int
    max_pages: int
    cache: IndexerCacheSpec
    ragged: bool
    q_dtype: str
    weights_dtype: str
    cache_dtype: str


def indexer_logits_spec(
    *,
    q: Array,
    weights: Array,
    k_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    cu_seqlens_q: Array | None = None,
) -> IndexerLogitsSpec:
    """The spec of indexer_logits, or ValueError naming the argument that is not legal."""
    check_array("q", q, "T Hi Di", VALUES)
    num_tokens, num_heads, head_dim = q.shape
    heads = (num_heads, "Hi, q's heads")
    check_array("weights", weights, "T Hi", ("float32", "float64"), (num_tokens, "T, q's tokens"), heads)
    if cu_seqlens_q is None:
        check_ints("block_tables", block_tables, "T M", (num_tokens, "T, one row a token: see expand_decode_metadata"))
        check_ints("seq_lens", seq_lens, "T", (num_tokens, "T, one length a token: see expand_decode_metadata"))
    else:
        check_ints("block_tables", block_tables, "B M")
        requests = block_tables.shape[0]
        check_ints("seq_lens", seq_lens, "B", (requests, "B from block_tables"))
        check_ints("cu_seqlens_q", cu_seqlens_q, "B + 1", (requests + 1, "B + 1, B from block_tables"))
    cache = indexer_cache_spec(k_cache)
    if cache.head_dim != head_dim:
        raise ValueError(f"k_cache: got keys of width {cache.head_dim}; q's Di is {head_dim}")
    if cache.packed and q.dtype != FP8:
        raise ValueError(f"q: got dtype {q.dtype}; with a packed k_cache legal: {FP8} (see indexer_quantize)")
    num_requests, max_pages = block_tables.shape
    return IndexerLogitsSpec(
        num_tokens=num_tokens,
        num_requests=num_requests,
        num_heads=num_heads,
        head_dim=head_dim,
        max_pages=max_pages,
        cache=cache,
        ragged=cu_seqlens_q is not None,
        q_dtype=q.dtype,
        weights_dtype=weights.dtype,
        cache_dtype=k_cache.dtype,
    )


@dataclass(frozen=True)
class TopKSpec:
    """The static facts of one select_topk call. `dtype` is that of the logits. page_size: the page size of the block
    table through which positions become slots; 0 if positions are written. row_starts: whether rows begin at columns of
    their own. bits: whether the words of the selection are written in the place of positions."""

    num_tokens: int
    num_columns: int
    k: int
    order: str = "value"
    dtype: str = "float32"
    page_size: int = 0
    row_starts: bool = False
    bits: bool = False

    @property
    def width(self) -> int:
        """Integers of a row of the result."""
        return selection_words(self.num_columns) if self.bits else self.k

    @property
    def selection(self) -> SelectionBitsSpec:
        """The spec of the selection_bits call that makes the words of the positions."""
        return SelectionBitsSpec(self.num_tokens, self.k, selection_words(self.num_columns), False, False)


def topk_spec(
    *,
    logits: Array,
    seq_lens: Array,
    k: int,
    order: str = "value",
    row_starts: Array | None = None,
    block_tables: Array | None = None,
    page_size: int | None = None,
    return_bits: bool = False,
) -> TopKSpec:
    """The spec of select_topk, or ValueError / TypeError naming the argument that is not legal."""
    check_array("logits", logits, "T N", FLOATS)
    rows = (logits.shape[0], "T, the rows of logits")
    check_ints("seq_lens", seq_lens, "T", rows)
    k = static_int("k", k, minimum=1)
    if order not in TOPK_ORDERS:
        raise ValueError(f"order: got {order!r}; legal: {listed([repr(name) for name in TOPK_ORDERS])}")
    if row_starts is not None:
        check_ints("row_starts", row_starts, "T", rows)
    if block_tables is None:
        if page_size is not None:
            raise ValueError(f"page_size: got {page_size} without block_tables; legal: None")
    else:
        check_ints("block_tables", block_tables, "T M", rows)
        if page_size is None:
            raise ValueError("page_size: got None with block_tables; legal: the tokens of a page")
        page_size = static_int("page_size", page_size, minimum=1)
    bits = static_bool("return_bits", return_bits)
    if bits and block_tables is not None:
        raise ValueError("return_bits: got True with block_tables; legal: False, as bits are those of positions")
    return TopKSpec(
        num_tokens=logits.shape[0], num_columns=logits.shape[1], k=k, order=order, dtype=logits.dtype,
        page_size=page_size or 0, row_starts=row_starts is not None, bits=bits,
    )  # fmt: skip


@dataclass(frozen=True)
class IndexerTopkSpec:
    """The static facts of one indexer_topk call: the logits that it never has all at once, and what is selected of
    them. return_slots: whether slots and counts are returned, and not positions. return_scores: whether the selected
    logits are returned, too. return_bits: whether the words of the selection are returned, and not positions."""

    logits: IndexerLogitsSpec
    k: int
    return_slots: bool = False
    return_scores: bool = False
    return_bits: bool = False

    @property
    def num_columns(self) -> int:
        """Columns of a row of logits."""
        return self.logits.max_pages * self.logits.cache.page_size

    @property
    def topk(self) -> TopKSpec:
        """The spec of the select_topk call that follows indexer_logits in the operation's definition. It writes slots
        only if no scores are returned, because scores are read at the positions that it writes."""
        page_size = self.logits.cache.page_size if self.return_slots and not self.return_scores else 0
        tokens, columns, bits = self.logits.num_tokens, self.num_columns, self.return_bits
        return TopKSpec(tokens, columns, self.k, "position", page_size=page_size, bits=bits)


def indexer_topk_spec(
    *,
    q: Array,
    weights: Array,
    k_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    k: int,
    cu_seqlens_q: Array | None = None,
    return_slots: bool = False,
    return_scores: bool = False,
    return_bits: bool = False,
) -> IndexerTopkSpec:
    """The spec of indexer_topk, or ValueError / TypeError naming the argument that is not legal."""
    logits = indexer_logits_spec(
        q=q, weights=weights, k_cache=k_cache, block_tables=block_tables, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q
    )
    spec = IndexerTopkSpec(
        logits,
        static_int("k", k, minimum=1),
        return_slots=static_bool("return_slots", return_slots),
        return_scores=static_bool("return_scores", return_scores),
        return_bits=static_bool("return_bits", return_bits),
    )
    for name in ("return_slots", "return_scores"):
        if spec.return_bits and getattr(spec, name):
            raise ValueError(f"return_bits: got True with {name}; legal: False, as bits are those of positions alone")
    return spec
