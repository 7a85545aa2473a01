"""The arguments and results of writing the packed caches and of quantising for them: write_packed_kv_cache,
write_indexer_cache and indexer_quantize.

Imports neither jax nor torch. Axes: T tokens, Hi indexer heads, Di indexer width, R rope width, P pages, Z page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tsmla_kernels.contract.cache import ROPE_LAYOUTS
from tsmla_kernels.contract.layouts import V32_PACKED, CacheSpec, IndexerCacheSpec, cache_spec, indexer_cache_spec
from tsmla_kernels.contract.rules import (
    FLOATS,
    INDICES,
    Array,
    Dim,
    check_array,
    check_at_least_one,
    check_dtype,
    check_ints,
    check_rank,
    check_size,
    listed,
    show,
    static_bool,
    static_int,
)


@dataclass(frozen=True)
class Rotation:
    """Rope on columns [offset, offset + dim) of a row. `layout` says where the members of a pair lie, before and after:
    "interleaved" (columns 2i and 2i + 1) or "halves" (i and i + dim / 2)."""

    dim: int
    offset: int
    layout: str


@dataclass(frozen=True)
class PackedWriteSpec:
    """The static facts of one write_packed_kv_cache call. `rotates`: whether cos and sin are given."""

    num_tokens: Dim
    cache: CacheSpec
    in_dtype: str
    rope_dtype: str
    rotates: bool
    rope_interleave: bool
    rope_layout: str
    slot_dtype: str = "int32"


@dataclass(frozen=True)
class IndexerWriteSpec:
    """The static facts of one write_indexer_cache call."""

    num_tokens: Dim
    cache: IndexerCacheSpec
    in_dtype: str
    rotation: Rotation | None
    slot_dtype: str = "int32"


@dataclass(frozen=True)
class IndexerQuantizeSpec:
    """The static facts of one indexer_quantize call."""

    num_tokens: Dim
    num_heads: int
    head_dim: int
    in_dtype: str
    weights_dtype: str
    rotation: Rotation | None


def packed_write_spec(
    *,
    kv_cache: Array,
    latent: Array,
    k_rope: Array,
    slot_mapping: Array,
    cos: Array | None = None,
    sin: Array | None = None,
    rope_interleave: bool = True,
    rope_layout: str = "interleaved",
    slot_dtypes: Sequence[str] = INDICES,
) -> PackedWriteSpec:
    """The spec of write_packed_kv_cache, or ValueError / TypeError naming the argument that is not legal. slot_dtypes
    as in cache_write_spec."""
    if kv_cache.dtype != "uint8" or len(kv_cache.shape) != 3 or kv_cache.shape[2] != V32_PACKED.row_bytes:
        got = f"{kv_cache.dtype} of shape {show(kv_cache.shape)}"
        raise ValueError(f"kv_cache: got {got}; legal: uint8 [P, Z, {V32_PACKED.row_bytes}]")
    cache = cache_spec("kv_cache", kv_cache)
    check_rank("latent", latent, "T 512")
    tokens = (latent.shape[0], "T, latent's tokens")
    check_ints("slot_mapping", slot_mapping, "T", tokens, dtypes=slot_dtypes)
    check_packed_rows(latent, k_rope)
    _angle_width(cos, sin, tokens, V32_PACKED.rope_dim // 2)
    rope_interleave = static_bool("rope_interleave", rope_interleave)
    _check_layout(rope_layout)
    return PackedWriteSpec(
        num_tokens=latent.shape[0],
        cache=cache,
        in_dtype=latent.dtype,
        rope_dtype=k_rope.dtype,
        rotates=cos is not None,
        rope_interleave=rope_interleave,
        rope_layout=rope_layout,
        slot_dtype=slot_mapping.dtype,
    )


def check_packed_rows(latent: Array, k_rope: Array) -> None:
    """ValueError unless latent is [*N, 512] and k_rope [*N, 64], both of floats."""
    for name, array, width in (("latent", latent, V32_PACKED.latent_dim), ("k_rope", k_rope, V32_PACKED.rope_dim)):
        check_dtype(name, array, FLOATS)
        check_width(name, array, width)
    rows, rope_rows = list(latent.shape[:-1]), list(k_rope.shape[:-1])
    if rope_rows != rows:
        raise ValueError(f"k_rope: got rows {rope_rows}; latent has {rows}")


def check_width(name: str, array: Array, width: int, unit: str = "") -> None:
    """ValueError unless the last axis is `width` wide."""
    if not array.shape or array.shape[-1] != width:
        raise ValueError(f"{name}: got shape {list(array.shape)}; its last axis must be {width}{unit}")


def indexer_write_spec(
    *,
    k_cache: Array,
    k: Array,
    slot_mapping: Array,
    cos: Array | None = None,
    sin: Array | None = None,
    rope_offset: int = 0,
    rope_layout: str = "halves",
    slot_dtypes: Sequence[str] = INDICES,
) -> IndexerWriteSpec:
    """The spec of write_indexer_cache, or ValueError / TypeError naming the argument that is not legal. slot_dtypes as
    in cache_write_spec."""
    cache = indexer_cache_spec(k_cache)
    check_array("k", k, "T Di", FLOATS)
    check_size("k", k, 1, cache.head_dim, "Di, k_cache's key width")
    tokens = (k.shape[0], "T, k's tokens")
    check_ints("slot_mapping", slot_mapping, "T", tokens, dtypes=slot_dtypes)
    rotation = _rotation(cos, sin, tokens, cache.head_dim, rope_offset, rope_layout)
    return IndexerWriteSpec(k.shape[0], cache, k.dtype, rotation, slot_mapping.dtype)


def indexer_quantize_spec(
    *,
    q: Array,
    weights: Array,
    cos: Array | None = None,
    sin: Array | None = None,
    rope_offset: int = 0,
    rope_layout: str = "halves",
) -> IndexerQuantizeSpec:
    """The spec of indexer_quantize, or ValueError / TypeError naming the argument that is not legal."""
    check_array("q", q, "T Hi Di", FLOATS)
    num_tokens, num_heads, head_dim = q.shape
    check_at_least_one("q", q.shape, 1, "Hi")
    check_at_least_one("q", q.shape, 2, "Di")
    tokens = (num_tokens, "T, q's tokens")
    check_array("weights", weights, "T Hi", FLOATS, tokens, (num_heads, "Hi, q's heads"))
    rotation = _rotation(cos, sin, tokens, head_dim, rope_offset, rope_layout)
    return IndexerQuantizeSpec(num_tokens, num_heads, head_dim, q.dtype, weights.dtype, rotation)


def _rotation(
    cos: Array | None, sin: Array | None, tokens: tuple[Dim, str], head_dim: int, offset: int, layout: str
) -> Rotation | None:
    """The rotation by cos and sin; None if these are not given."""
    _check_layout(layout)
    offset = static_int("rope_offset", offset)
    half = _angle_width(cos, sin, tokens, None)
    if half is None:
        return None
    if half < 1 or offset + 2 * half > head_dim:
        raise ValueError(
            f"cos: got width R / 2 = {half} with rope_offset = {offset}; legal: columns [rope_offset, rope_offset + R)"
            f" inside of Di = {head_dim}"
        )
    return Rotation(2 * half, offset, layout)


def _angle_width(cos: Array | None, sin: Array | None, tokens: tuple[Dim, str], half: int | None) -> int | None:
    """R / 2 of cos and sin [T, R / 2], which must be `half` if that is given; None if neither cos nor sin is given.
    `tokens`: T, and the words that say whose."""
    if cos is None or sin is None:
        if cos is not sin:
            missing = "cos" if cos is None else "sin"
            raise ValueError(f"{missing}: got None; legal: cos and sin, or neither")
        return None
    for name, array in (("cos", cos), ("sin", sin)):
        check_array(name, array, "T R / 2", ("float32",), tokens)
        width = cos.shape[1] if half is None else half
        if array.shape[1] != width:
            raise ValueError(f"{name}: got shape {show(array.shape)}; legal: [T, R / 2] = {show((tokens[0], width))}")
    return int(cos.shape[1])


def _check_layout(layout: str) -> None:
    if layout not in ROPE_LAYOUTS:
        raise ValueError(f"rope_layout: got {layout!r}; legal: {listed([repr(name) for name in ROPE_LAYOUTS])}")
