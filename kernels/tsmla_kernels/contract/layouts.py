"""The byte layouts of the sparse caches, and how an array's shape and dtype say which layout it has.

Imports neither jax nor torch. Axes: P pages, Z page size, D key width, Di width of an indexer key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tsmla_kernels.contract.rules import FP8, VALUES, Array, check_dtype, check_rank, show, static_int


@dataclass(frozen=True)
class IndexerLayout:
    """The V3.2 indexer's key page: all the e4m3 keys of the page, then one f32 scale per key."""

    head_dim: int = 128
    scale_bytes: int = 4
    query_floor: float = 1e-10
    key_floor: float = 1e-4

    @property
    def row_bytes(self) -> int:
        return self.head_dim + self.scale_bytes


@dataclass(frozen=True)
class V32Layout:
    """The V3.2 packed row: `latent_dim` e4m3, one f32 scale per group of 128, then the rope part in bf16."""

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
    """The V4 packed page: 448 e4m3 and 64 bf16 channels of each row, then 8 bytes of UE8M0 scales of each row, then
    padding to a multiple of a row's data_row_bytes.

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
        """Bytes of a page of `page_size` rows, rounded up to a multiple of data_row_bytes."""
        need = page_size * self.row_bytes
        return -(-need // self.data_row_bytes) * self.data_row_bytes


INDEXER = IndexerLayout()
V32_PACKED = V32Layout()
V4_PACKED = V4Layout()


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

    @property
    def rank(self) -> int:
        """Axes of the cache's array."""
        return 2 if self.layout == "v4" else 3


def cache_spec(
    name: str, cache: Array, *, page_size: int | None = None, page_span: int | None = None, prefix: str = ""
) -> CacheSpec:
    """Resolve a sparse KV cache's layout from its shape and dtype. prefix: the beginning of the names of page_size and
    page_span in an error.

    Raises ValueError for a shape or dtype no layout has, a page size the array can't hold, or a stride
    narrower than the page.
    """
    if cache.dtype != "uint8":
        check_dtype(name, cache, (*VALUES, "uint8"))
        check_rank(name, cache, "P Z D")
    elif len(cache.shape) == 2:
        return _v4_cache_spec(name, cache, page_size, page_span, prefix)
    elif len(cache.shape) != 3 or cache.shape[2] != V32_PACKED.row_bytes:
        raise ValueError(
            f"{name}: got shape {show(cache.shape)} of uint8; legal: [P, Z, {V32_PACKED.row_bytes}] (V3.2 rows) or "
            f"[P, page_bytes] (V4 pages)"
        )
    num_pages, stride, width = cache.shape
    check_pages(name, cache)
    # A cache whose stride is wider than its pages is an array [P, span, D] or, of V3.2's rows, [P, span, 656], with
    # page_size rows in use.
    size = stride if page_size is None else static_int(f"{prefix}page_size", page_size, minimum=1)
    if page_span is None and size > stride:
        raise ValueError(f"{prefix}page_size: got {size}; legal: at most {name}'s axis 1, {stride}")
    if check_page_span(f"{prefix}page_span", stride if page_span is None else page_span, size) != stride:
        raise ValueError(f"{prefix}page_span: got {page_span}; legal: {name}'s axis 1, {stride}")
    if cache.dtype == "uint8":
        head_dim = V32_PACKED.latent_dim + V32_PACKED.rope_dim
        return CacheSpec("v32", num_pages, size, stride, head_dim, cache.dtype)
    return CacheSpec("plain", num_pages, size, stride, width, cache.dtype)


def _v4_cache_spec(name: str, cache: Array, page_size: int | None, page_span: int | None, prefix: str) -> CacheSpec:
    size = static_int(f"{prefix}page_size", V4_PACKED.page_size if page_size is None else page_size, minimum=1)
    num_pages, page_bytes = cache.shape
    check_pages(name, cache)
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
    span = check_page_span(f"{prefix}page_span", size if page_span is None else page_span, size)
    return CacheSpec("v4", num_pages, size, span, V4_PACKED.head_dim, cache.dtype)


def check_pages(name: str, cache: Array) -> None:
    if any(size < 1 for size in cache.shape):
        raise ValueError(f"{name}: got shape {show(cache.shape)}; every axis must be at least 1")


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


def indexer_cache_spec(k_cache: Array, name: str = "k_cache") -> IndexerCacheSpec:
    """The layout of an indexer cache, or ValueError. name: the caller's name of the cache."""
    check_dtype(name, k_cache, ("uint8", *VALUES))
    packed = k_cache.dtype == "uint8"
    check_rank(name, k_cache, "P Z Di+4" if packed else "P Z Di")
    num_pages, page_size, width = k_cache.shape
    check_pages(name, k_cache)
    if not packed:
        return IndexerCacheSpec(num_pages, page_size, width, False)
    head_dim = width - INDEXER.scale_bytes
    if head_dim < 1 or (page_size * head_dim) % INDEXER.scale_bytes:
        raise ValueError(
            f"{name}: got shape {show(k_cache.shape)} of uint8; legal: [P, Z, Di + {INDEXER.scale_bytes}] with "
            f"Z * Di a multiple of {INDEXER.scale_bytes}, as the f32 scales follow the keys of a page"
        )
    return IndexerCacheSpec(num_pages, page_size, head_dim, True)


CACHE_LAYOUTS = ("plain", "packed")


FP8_NAMES = ("fp8", "fp8_e4m3", "fp8_ds_mla", "float8_e4m3fn")
"""The names of e4m3 caches that engines have."""
_PLAIN_NAMES = {"auto": "bfloat16", "bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}


def resolve_cache_dtype(layout: str, cache_dtype: str) -> str:
    """The storage dtype of a V4 cache, by name.

    The packed layout takes only the names of e4m3 and is stored as uint8; the plain layout takes these names and
    "auto", which is bfloat16, "bfloat16", "float16" and "float32".
    Raises ValueError for an unknown layout, or for a name that the layout doesn't take.
    """
    if layout not in CACHE_LAYOUTS:
        raise ValueError(f"layout: got {layout!r}; legal: {', '.join(CACHE_LAYOUTS)}")
    legal = FP8_NAMES if layout == "packed" else (*FP8_NAMES, *_PLAIN_NAMES)
    if cache_dtype not in legal:
        raise ValueError(f"cache_dtype: got {cache_dtype!r}; legal with layout {layout!r}: {', '.join(legal)}")
    if layout == "packed":
        return "uint8"
    return FP8 if cache_dtype in FP8_NAMES else _PLAIN_NAMES[cache_dtype]


def valid_slots(slots: Any, spec: CacheSpec) -> Any:
    """Which slots of an array (of jax, numpy or torch) name a row of the cache."""
    return slots_of_rows(slots, spec.num_slots, spec.page_size, spec.span)


def slots_of_rows(slots: Any, num_slots: int, page_size: int, page_span: int) -> Any:
    """Which slots are inside a cache of num_slots, and not in the gap behind a page strided wider than its rows."""
    inside = (slots >= 0) & (slots < num_slots)
    return inside if page_span == page_size else inside & (slots % page_span < page_size)
