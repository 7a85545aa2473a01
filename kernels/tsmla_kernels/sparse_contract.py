"""The contract of the sparse ops: layouts, shape and dtype rules, error texts. One place for every front end.

Imports neither jax nor torch: an argument is an `Array(shape, dtype name)` as in `contract`, so the JAX ops, the torch
bridge and the kernels all raise the same text for the same mistake.

Axes: T query tokens, H query heads, D key width, L value (latent) width, R rope width, K selected entries a token,
P pages, Z page size, M pages a request at most, B requests, E compressed entries, C channels of a compressor head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tsmla_kernels.contract import FLOATS, FP8, Array, attention_out_dtype, static_int

PLAIN_CACHE_DTYPES = (*FLOATS, FP8)
QUERY_DTYPES = (*FLOATS, FP8)

INDEX_ROW_ALIGNMENT = 4
"""Rows of int32 indices are padded to a multiple of this: 16 bytes, what a vector load or a TMA gather needs."""


@dataclass(frozen=True)
class IndexerLayout:
    """The V3.2 indexer's key page: all the e4m3 keys of the page, then one f32 scale a key."""

    head_dim: int = 128
    scale_bytes: int = 4
    query_floor: float = 1e-10
    key_floor: float = 1e-4

    @property
    def row_bytes(self) -> int:
        return self.head_dim + self.scale_bytes

    def head_dim_of(self, row_bytes: int) -> int:
        return row_bytes - self.scale_bytes


@dataclass(frozen=True)
class V32Layout:
    """The V3.2 packed row: `latent_dim` e4m3, one f32 scale a group of 128, then the rope part in bf16."""

    latent_dim: int = 512
    rope_dim: int = 64
    group: int = 128
    floor: float = 1e-4

    @property
    def num_scales(self) -> int:
        return self.latent_dim // self.group

    @property
    def row_bytes(self) -> int:
        return self.latent_dim + 4 * self.num_scales + 2 * self.rope_dim


@dataclass(frozen=True)
class V4Layout:
    """The V4 packed page: rows of 448 e4m3 | 64 bf16, then 8 bytes of UE8M0 scales a row; the page padded to rows.

    Seven of the eight scale bytes are used (one a group of 64 channels); the last is zero.
    """

    head_dim: int = 512
    rope_dim: int = 64
    group: int = 64
    scale_row_bytes: int = 8
    page_size: int = 64
    floor: float = 1e-4

    @property
    def nope_dim(self) -> int:
        return self.head_dim - self.rope_dim

    @property
    def num_scales(self) -> int:
        return self.nope_dim // self.group

    @property
    def data_row_bytes(self) -> int:
        return self.nope_dim + 2 * self.rope_dim

    @property
    def row_bytes(self) -> int:
        return self.data_row_bytes + self.scale_row_bytes

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of `page_size` rows, padded up to a multiple of the data row so that pages tile rows."""
        need = page_size * self.row_bytes
        return -(-need // self.data_row_bytes) * self.data_row_bytes


INDEXER = IndexerLayout()
V32_PACKED = V32Layout()
V4_PACKED = V4Layout()


def _show(shape: Sequence[int]) -> str:
    return "[" + ", ".join(str(n) for n in shape) + "]"


def check_rank(name: str, array: Array, axes: str) -> None:
    """Raise ValueError unless `array` has as many axes as the legend `axes` ("T K") names."""
    if len(array.shape) != len(axes.split()):
        legal = "[" + ", ".join(axes.split()) + "]"
        raise ValueError(f"{name}: got shape {_show(array.shape)} of rank {len(array.shape)}; legal: {legal}")


def check_dtype(name: str, array: Array, legal: Sequence[str]) -> None:
    """Raise ValueError unless the dtype of `array` is one of `legal`."""
    if array.dtype not in legal:
        raise ValueError(f"{name}: got dtype {array.dtype}; legal: {', '.join(legal)}")


def check_ints(name: str, array: Array, axes: str) -> None:
    """Raise ValueError unless `array` is int32 with the axes of the legend."""
    check_rank(name, array, axes)
    check_dtype(name, array, ("int32",))


def check_size(name: str, array: Array, axis: int, want: int, what: str) -> None:
    """Raise ValueError unless `axis` of `array` has size `want`, which is `what`."""
    if array.shape[axis] != want:
        raise ValueError(f"{name}: got shape {_show(array.shape)}; axis {axis} must be {want} ({what})")


def check_scale(name: str, scale: Array | float | None, *, optional: bool = True) -> None:
    """Raise ValueError / TypeError unless `scale` is a float or a floating scalar array, or None where optional."""
    legal = "a float or a float32 scalar array" + (", or None for 1" if optional else "")
    if isinstance(scale, Array):
        if scale.shape != () or scale.dtype not in ("float32", "float64"):
            raise ValueError(f"{name}: got an array {scale.dtype}{_show(scale.shape)}; legal: {legal}")
    elif isinstance(scale, bool) or not (isinstance(scale, int | float) or (scale is None and optional)):
        raise TypeError(f"{name}: got {type(scale).__name__}; legal: {legal}")


def check_page_span(name: str, span: int, page_size: int) -> int:
    """`span` as an int: a page's stride in rows may be wider than the page, never narrower, or pages would overlap."""
    span = static_int(name, span, minimum=1)
    if span < page_size:
        raise ValueError(f"{name}: got {span}; legal: at least the page size {page_size}, or pages would overlap")
    return span


@dataclass(frozen=True)
class CacheSpec:
    """How the rows of one sparse KV cache are stored, resolved from its shape and dtype.

    `layout` is "plain" ([P, Z, D] of floats), "v32" ([P, Z, 656] u8) or "v4" ([P, page_bytes] u8). `span` is the
    distance between two pages counted in slots: a slot is `page * span + offset`.
    """

    layout: str
    num_pages: int
    page_size: int
    span: int
    head_dim: int
    dtype: str

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.span


def cache_spec(name: str, cache: Array, *, page_size: int | None = None, page_span: int | None = None) -> CacheSpec:
    """Resolve a sparse KV cache's layout from its shape and dtype.

    Raises ValueError for a shape or dtype no layout has, a page size the array can't hold, or a stride
    narrower than the page.
    """
    if cache.dtype != "uint8":
        check_dtype(name, cache, (*PLAIN_CACHE_DTYPES, "uint8"))
        check_rank(name, cache, "P Z D")
    elif len(cache.shape) == 2:
        return _v4_cache_spec(name, cache, page_size, page_span)
    elif len(cache.shape) != 3 or cache.shape[2] != V32_PACKED.row_bytes:
        raise ValueError(
            f"{name}: got shape {_show(cache.shape)} of uint8; legal: [P, Z, {V32_PACKED.row_bytes}] (V3.2 rows) or "
            f"[P, page_bytes] (V4 pages)"
        )
    num_pages, stride, width = cache.shape
    _check_pages(name, cache)
    # A plain cache strided wider than its pages is the array [P, span, D] of which page_size rows are used.
    size = stride if page_size is None else static_int("page_size", page_size, minimum=1)
    if check_page_span("page_span", stride if page_span is None else page_span, size) != stride:
        raise ValueError(f"page_span: got {page_span}; legal: {name}'s axis 1, {stride}")
    if cache.dtype == "uint8":
        head_dim = V32_PACKED.latent_dim + V32_PACKED.rope_dim
        return CacheSpec("v32", num_pages, size, stride, head_dim, cache.dtype)
    return CacheSpec("plain", num_pages, size, stride, width, cache.dtype)


def _v4_cache_spec(name: str, cache: Array, page_size: int | None, page_span: int | None) -> CacheSpec:
    size = static_int("page_size", V4_PACKED.page_size if page_size is None else page_size, minimum=1)
    num_pages, page_bytes = cache.shape
    _check_pages(name, cache)
    if page_bytes < size * V4_PACKED.row_bytes:
        raise ValueError(
            f"{name}: got pages of {page_bytes} bytes; {size} rows of {V4_PACKED.row_bytes} need at least "
            f"{size * V4_PACKED.row_bytes}: the stride is narrower than the page"
        )
    if page_bytes % V4_PACKED.data_row_bytes:
        raise ValueError(
            f"{name}: got pages of {page_bytes} bytes; legal: a multiple of {V4_PACKED.data_row_bytes}, "
            f"{V4_PACKED.page_bytes(size)} for {size} rows"
        )
    span = check_page_span("page_span", size if page_span is None else page_span, size)
    return CacheSpec("v4", num_pages, size, span, V4_PACKED.head_dim, cache.dtype)


def _check_pages(name: str, cache: Array) -> None:
    if min(cache.shape) < 1:
        raise ValueError(f"{name}: got shape {_show(cache.shape)}; every axis must be at least 1")


@dataclass(frozen=True)
class SparseMLASpec:
    """The static facts of one sparse_mla call. `window` columns of the indices select from `cache`, the others from
    `compressed`; without a compressed cache all of them select from `cache`."""

    num_tokens: int
    num_heads: int
    head_dim: int
    latent_dim: int
    num_selected: int
    window: int
    cache: CacheSpec
    compressed: CacheSpec | None
    q_dtype: str
    out_dtype: str
    lse_dtype: str


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
    softmax_scale: Array | float = 1.0,
    q_scale: Array | float | None = None,
    kv_scale: Array | float | None = None,
    compressed_kv_scale: Array | float | None = None,
) -> SparseMLASpec:
    """The spec of sparse_mla, or ValueError / TypeError naming the argument that is not legal."""
    check_rank("q", q, "T H D")
    check_dtype("q", q, QUERY_DTYPES)
    check_ints("indices", indices, "T K")
    num_tokens, num_heads, head_dim = q.shape
    if num_heads < 1:
        raise ValueError(f"q: got shape {_show(q.shape)}; H must be at least 1")
    check_size("indices", indices, 0, num_tokens, "T, q's tokens")
    latent_dim = static_int("latent_dim", latent_dim, minimum=1)
    if latent_dim > head_dim:
        raise ValueError(f"latent_dim: got {latent_dim}; it must be at most q's last axis D = {head_dim}")
    cache = cache_spec("kv_cache", kv_cache, page_size=page_size, page_span=page_span)
    _check_key_width("kv_cache", cache, head_dim)
    if lengths is not None:
        check_ints("lengths", lengths, "T")
        check_size("lengths", lengths, 0, num_tokens, "T, q's tokens")
    if sinks is not None:
        check_rank("sinks", sinks, "H")
        check_dtype("sinks", sinks, FLOATS)
        check_size("sinks", sinks, 0, num_heads, "H, q's heads")
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
        if window is None:
            raise ValueError(
                "window: got None; compressed_kv_cache is given, so the number of leading columns of indices that "
                "select from kv_cache must be"
            )
        window = static_int("window", window)
        if window > columns:
            raise ValueError(f"window: got {window}; it must be at most K = {columns}, the columns of indices")
        if columns % INDEX_ROW_ALIGNMENT:
            raise ValueError(
                f"indices: got K = {columns} with compressed_kv_cache; legal: a multiple of "
                f"{INDEX_ROW_ALIGNMENT}, rows of 16 bytes (as build_mixed_sparse_indices makes them)"
            )
        compressed = cache_spec(
            "compressed_kv_cache",
            compressed_kv_cache,
            page_size=compressed_page_size,
            page_span=compressed_page_span,
        )
        _check_key_width("compressed_kv_cache", compressed, head_dim)
    check_scale("softmax_scale", softmax_scale, optional=False)
    check_scale("q_scale", q_scale)
    for name, scale, of in (("kv_scale", kv_scale, cache), ("compressed_kv_scale", compressed_kv_scale, compressed)):
        check_scale(name, scale)
        if scale is not None and (of is None or of.layout != "plain"):
            raise ValueError(f"{name}: got a scale for {'no cache' if of is None else 'packed rows'}; legal: None")
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
        out_dtype=attention_out_dtype(q.dtype),
        lse_dtype="float64" if q.dtype == "float64" else "float32",
    )


def _check_key_width(name: str, cache: CacheSpec, head_dim: int) -> None:
    if cache.head_dim != head_dim:
        raise ValueError(f"{name}: got keys of width {cache.head_dim} ({cache.layout}); q's D is {head_dim}")


@dataclass(frozen=True)
class IndexerCacheSpec:
    """An indexer key cache: u8 [P, Z, Di + 4] packed pages, or plain floats [P, Z, Di]."""

    num_pages: int
    page_size: int
    head_dim: int
    packed: bool

    def as_plain(self) -> CacheSpec:
        """The cache's slots, as those of a plain cache."""
        return CacheSpec("plain", self.num_pages, self.page_size, self.page_size, self.head_dim, "")


def indexer_cache_spec(k_cache: Array) -> IndexerCacheSpec:
    """The layout of an indexer cache, or ValueError."""
    check_dtype("k_cache", k_cache, ("uint8", *FLOATS))
    packed = k_cache.dtype == "uint8"
    check_rank("k_cache", k_cache, "P Z Di+4" if packed else "P Z Di")
    num_pages, page_size, width = k_cache.shape
    _check_pages("k_cache", k_cache)
    if not packed:
        return IndexerCacheSpec(num_pages, page_size, width, False)
    head_dim = width - INDEXER.scale_bytes
    if head_dim < 1 or (page_size * head_dim) % INDEXER.scale_bytes:
        raise ValueError(
            f"k_cache: got shape {_show(k_cache.shape)} of uint8; legal: [P, Z, Di + {INDEXER.scale_bytes}] with "
            f"Z * Di a multiple of {INDEXER.scale_bytes}, as the f32 scales follow the keys of a page"
        )
    return IndexerCacheSpec(num_pages, page_size, head_dim, True)


@dataclass(frozen=True)
class IndexerLogitsSpec:
    """The static facts of one indexer_logits call; its result is [T, M * Z]."""

    num_tokens: int
    num_heads: int
    head_dim: int
    max_pages: int
    cache: IndexerCacheSpec


def indexer_logits_spec(
    *, q: Array, weights: Array, k_cache: Array, block_tables: Array, seq_lens: Array
) -> IndexerLogitsSpec:
    """The spec of indexer_logits, or ValueError naming the argument that is not legal."""
    check_rank("q", q, "T Hi Di")
    check_dtype("q", q, QUERY_DTYPES)
    check_rank("weights", weights, "T Hi")
    check_dtype("weights", weights, ("float32", "float64"))
    check_ints("block_tables", block_tables, "T M")
    check_ints("seq_lens", seq_lens, "T")
    num_tokens, num_heads, head_dim = q.shape
    check_size("weights", weights, 0, num_tokens, "T, q's tokens")
    check_size("weights", weights, 1, num_heads, "Hi, q's heads")
    check_size("block_tables", block_tables, 0, num_tokens, "T, one row a token: see expand_decode_metadata")
    check_size("seq_lens", seq_lens, 0, num_tokens, "T, one length a token: see expand_decode_metadata")
    cache = indexer_cache_spec(k_cache)
    if cache.head_dim != head_dim:
        raise ValueError(f"k_cache: got keys of width {cache.head_dim}; q's Di is {head_dim}")
    if cache.packed and q.dtype != FP8:
        raise ValueError(f"q: got dtype {q.dtype}; with a packed k_cache legal: {FP8} (see indexer_quantize)")
    return IndexerLogitsSpec(num_tokens, num_heads, head_dim, block_tables.shape[1], cache)


@dataclass(frozen=True)
class TopKSpec:
    """The static facts of one select_topk call."""

    num_tokens: int
    num_columns: int
    k: int


def topk_spec(*, logits: Array, seq_lens: Array, k: int) -> TopKSpec:
    """The spec of select_topk, or ValueError / TypeError naming the argument that is not legal."""
    check_rank("logits", logits, "T N")
    check_dtype("logits", logits, FLOATS)
    check_ints("seq_lens", seq_lens, "T")
    check_size("seq_lens", seq_lens, 0, logits.shape[0], "T, the rows of logits")
    return TopKSpec(logits.shape[0], logits.shape[1], static_int("k", k, minimum=1))


@dataclass(frozen=True)
class CompressSpec:
    """The static facts of one compress_kv call. `overlap` is how many windows one pooled entry spans: 2 when the rows
    hold both series (ratio 4), else 1; `num_entries` is the static bound on entries completed by one call."""

    num_tokens: int
    num_requests: int
    num_entries: int
    ratio: int
    overlap: int
    channels: int
    num_states: int
    ring: int

    @property
    def window(self) -> int:
        """Tokens pooled into one entry."""
        return self.ratio * self.overlap


def max_compressed_entries(num_tokens: int, num_requests: int, ratio: int) -> int:
    """The most entries that `num_tokens` new tokens of `num_requests` requests can complete."""
    return min(num_tokens, num_tokens // ratio + num_requests)


def compress_spec(
    *,
    kv_score: Array,
    ape: Array,
    state: Array,
    state_positions: Array,
    state_slots: Array,
    seq_lens: Array,
    cu_seqlens_q: Array,
    ratio: int,
    overlap: bool,
) -> CompressSpec:
    """The spec of compress_kv, or ValueError / TypeError naming the argument that is not legal."""
    ratio = static_int("ratio", ratio, minimum=1)
    series = 2 if overlap else 1
    check_rank("kv_score", kv_score, "T 2 W")
    check_dtype("kv_score", kv_score, ("float32",))
    check_size("kv_score", kv_score, 1, 2, "kv, score")
    num_tokens, _, width = kv_score.shape
    if width < 1 or width % series:
        raise ValueError(
            f"kv_score: got shape {_show(kv_score.shape)}; its width must be a positive multiple of {series}, the "
            f"number of series"
        )
    check_rank("ape", ape, "ratio W")
    check_dtype("ape", ape, ("float32",))
    check_size("ape", ape, 0, ratio, "ratio")
    check_size("ape", ape, 1, width, "kv_score's width")
    check_rank("state.kv_score", state, "N ring 2 W")
    check_dtype("state.kv_score", state, ("float32",))
    check_size("state.kv_score", state, 2, 2, "kv, score")
    check_size("state.kv_score", state, 3, width, "kv_score's width")
    num_states, ring = state.shape[:2]
    if ring < ratio * series:
        raise ValueError(
            f"state.kv_score: got a ring of {ring} tokens; legal: at least {ratio * series}, the tokens pooled "
            f"into one entry (ratio {ratio} x {series} series)"
        )
    check_ints("state.positions", state_positions, "N ring")
    check_size("state.positions", state_positions, 0, num_states, "N, as in state.kv_score")
    check_size("state.positions", state_positions, 1, ring, "ring, as in state.kv_score")
    check_ints("seq_lens", seq_lens, "B")
    num_requests = seq_lens.shape[0]
    check_ints("state_slots", state_slots, "B")
    check_size("state_slots", state_slots, 0, num_requests, "B, seq_lens's requests")
    check_ints("cu_seqlens_q", cu_seqlens_q, "B+1")
    check_size("cu_seqlens_q", cu_seqlens_q, 0, num_requests + 1, "B + 1, B from seq_lens")
    return CompressSpec(
        num_tokens=num_tokens,
        num_requests=num_requests,
        num_entries=max_compressed_entries(num_tokens, num_requests, ratio),
        ratio=ratio,
        overlap=series,
        channels=width // series,
        num_states=num_states,
        ring=ring,
    )


CACHE_LAYOUTS = ("plain", "packed")


def resolve_cache_dtype(layout: str, cache_dtype: str) -> str:
    """The storage dtype of a V4 cache, by name.

    The packed layout takes only fp8 names and is stored as uint8; the plain layout maps every fp8 name to float8_e4m3fn
    and everything else ("auto", "bfloat16", "float16", ...) to bfloat16.
    Raises ValueError for an unknown layout, or for a packed layout asked to hold anything but fp8.
    """
    if layout not in CACHE_LAYOUTS:
        raise ValueError(f"layout: got {layout!r}; legal: {', '.join(CACHE_LAYOUTS)}")
    is_fp8 = cache_dtype.startswith(("fp8", "float8"))
    if layout == "packed":
        if not is_fp8:
            raise ValueError(f"cache_dtype: got {cache_dtype!r}; the packed layout holds fp8 only")
        return "uint8"
    return FP8 if is_fp8 else "bfloat16"
