"""The arguments and results of the operations on the paged cache: write_kv_cache, rope_write_kv_cache and
gather_kv_cache.

Imports neither jax nor torch. Axes: T tokens, H query heads, L latent width, R rope width, D = L + R, P pages, Z page
size (tokens a page), B requests, M block-table width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tsmla_kernels.contract.rules import (
    FLOATS,
    FP8,
    INDICES,
    VALUES,
    Array,
    Dim,
    Scale,
    attention_out_dtype,
    cache_shape,
    check_at_least_one,
    check_dtype,
    check_ints,
    check_rank,
    check_scale,
    check_static_last,
    least_latent_dim,
    listed,
    named_axes,
    show,
    static_bool,
    static_dim,
    table_shape,
)

ROPE_LAYOUTS = ("interleaved", "halves")


@dataclass(frozen=True)
class CacheWriteSpec:
    """One call of write_kv_cache, which writes rows of in_dtype into a cache of kv_dtype, at slots of slot_dtype."""

    num_tokens: Dim
    latent_dim: int
    rope_dim: int
    num_pages: Dim
    page_size: int
    in_dtype: str
    kv_dtype: str
    slot_dtype: str = "int32"

    @property
    def head_dim(self) -> int:
        """D, the width of a row of the cache."""
        return self.latent_dim + self.rope_dim


@dataclass(frozen=True)
class CacheGatherSpec:
    """One call of gather_kv_cache; total_len: how many rows the result has, which is static."""

    batch: Dim
    total_len: Dim
    head_dim: int
    num_pages: Dim
    page_size: int
    max_pages: Dim
    kv_dtype: str
    out_dtype: str


@dataclass(frozen=True)
class RopeWriteSpec:
    """One call of rope_write_kv_cache: `write` describes the write into the cache, the other fields the query. q_nope,
    q_rope, latent and k_rope have write.in_dtype."""

    write: CacheWriteSpec
    num_heads: Dim
    q_dtype: str
    rope_interleave: bool
    rope_layout: str


def cache_write_spec(
    *,
    kv_cache: Array,
    latent: Array,
    k_rope: Array | None,
    slot_mapping: Array,
    kv_scale: Scale = None,
    slot_dtypes: Sequence[str] = INDICES,
) -> CacheWriteSpec:
    """The spec of write_kv_cache, or ValueError / TypeError naming the argument that is not legal. slot_dtypes: the
    dtypes of slot_mapping that the front end takes."""
    num_pages, page_size, head_dim = cache_shape(kv_cache)
    check_dtype("latent", latent, FLOATS)
    check_rank("latent", latent, "T L")
    check_static_last("latent", latent)
    num_tokens, latent_dim = latent.shape
    if not 1 <= latent_dim <= head_dim:
        raise ValueError(
            f"latent: got shape {show(latent.shape)}; its width L must be between 1 and kv_cache's D = {head_dim}"
        )
    rope_dim = head_dim - latent_dim
    if rope_dim > latent_dim:
        raise ValueError(
            f"latent: got shape {show(latent.shape)}; legal: [T, L] with L from {least_latent_dim(head_dim)} to"
            f" {head_dim}, as no model has more columns of k_rope than of latent in kv_cache's D = {head_dim}; latent"
            " comes before k_rope"
        )
    if k_rope is None:
        if rope_dim:
            raise ValueError(
                f"k_rope: got None; kv_cache's D = {head_dim} leaves {rope_dim} columns after latent's L = {latent_dim}"
            )
    else:
        check_rank("k_rope", k_rope, "T R")
        if k_rope.shape[0] != num_tokens or k_rope.shape[1] != rope_dim:
            raise ValueError(
                f"k_rope: got shape {show(k_rope.shape)}; legal: [T, R] = [{num_tokens}, {rope_dim}],"
                f" T from latent and R = kv_cache's D {head_dim} - L {latent_dim}"
            )
        if k_rope.dtype != latent.dtype:
            raise ValueError(f"k_rope: got dtype {k_rope.dtype}; it must be latent's, {latent.dtype}")
    check_ints("slot_mapping", slot_mapping, "T", (num_tokens, "T from latent"), dtypes=slot_dtypes)
    check_scale("kv_scale", kv_scale)
    return CacheWriteSpec(
        num_tokens=num_tokens,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        num_pages=num_pages,
        page_size=page_size,
        in_dtype=latent.dtype,
        kv_dtype=kv_cache.dtype,
        slot_dtype=slot_mapping.dtype,
    )


def cache_gather_spec(
    *,
    kv_cache: Array,
    block_tables: Array,
    starts: Array,
    lens: Array,
    total_len: Dim,
    kv_scale: Scale = None,
    out_dtype: str | None = None,
) -> CacheGatherSpec:
    """The spec of gather_kv_cache, or ValueError / TypeError naming the argument that is not legal.

    out_dtype None means the cache's dtype, bfloat16 for an fp8 cache."""
    num_pages, page_size, head_dim = cache_shape(kv_cache)
    batch, max_pages = table_shape(block_tables)
    for name, array in (("starts", starts), ("lens", lens)):
        check_ints(name, array, "B", (batch, "B from block_tables"))
    total_len = static_dim("total_len", total_len)
    check_scale("kv_scale", kv_scale)
    if out_dtype is not None and out_dtype not in FLOATS:
        raise ValueError(f"out_dtype: got {out_dtype}; legal: {listed(FLOATS)}")
    return CacheGatherSpec(
        batch=batch,
        total_len=total_len,
        head_dim=head_dim,
        num_pages=num_pages,
        page_size=page_size,
        max_pages=max_pages,
        kv_dtype=kv_cache.dtype,
        out_dtype=out_dtype or attention_out_dtype(kv_cache.dtype),
    )


def rope_write_spec(
    *,
    kv_cache: Array,
    q_nope: Array,
    q_rope: Array,
    latent: Array,
    k_rope: Array,
    slot_mapping: Array,
    cos: Array,
    sin: Array,
    q_scale: Scale = None,
    kv_scale: Scale = None,
    q_dtype: str | None = None,
    rope_interleave: bool = True,
    rope_layout: str = "interleaved",
) -> RopeWriteSpec:
    """The spec of rope_write_kv_cache, or ValueError / TypeError naming the argument that is not legal.

    q_dtype None means float8_e4m3fn if there is a q_scale, else q_nope's dtype."""
    write = cache_write_spec(
        kv_cache=kv_cache, latent=latent, k_rope=k_rope, slot_mapping=slot_mapping, kv_scale=kv_scale
    )
    tokens, rope_dim = write.num_tokens, write.rope_dim
    if rope_dim % 2 or not rope_dim:
        raise ValueError(
            f"k_rope: got shape {show(k_rope.shape)}; R must be even and at least 2 (without rope columns"
            " write_kv_cache is all there is to do)"
        )
    check_rank("q_nope", q_nope, "T H L")
    check_at_least_one("q_nope", q_nope.shape, 1, "H")
    num_heads = q_nope.shape[1]
    for name, array, axes, width in (
        ("q_nope", q_nope, "T H L", write.latent_dim),
        ("q_rope", q_rope, "T H R", rope_dim),
    ):
        check_rank(name, array, axes)
        shape = (tokens, num_heads, width)
        if array.shape != shape:
            raise ValueError(
                f"{name}: got shape {show(array.shape)}; legal: {show(named_axes(axes))} = {show(shape)}, T and L from"
                " latent, R from k_rope, H from q_nope"
            )
        if array.dtype != latent.dtype:
            raise ValueError(f"{name}: got dtype {array.dtype}; it must be latent's, {latent.dtype}")
    for name, array in (("cos", cos), ("sin", sin)):
        check_rank(name, array, "T R / 2")
        if array.shape != (tokens, rope_dim // 2):
            raise ValueError(
                f"{name}: got shape {show(array.shape)}; legal: [T, R / 2] = {show((tokens, rope_dim // 2))}, T from"
                " latent, R from k_rope"
            )
        check_dtype(name, array, ("float32",))
    check_scale("q_scale", q_scale)
    if q_dtype is None:
        q_dtype = latent.dtype if q_scale is None else FP8
    elif q_dtype not in VALUES:
        raise ValueError(f"q_dtype: got {q_dtype}; legal: {listed(VALUES)}")
    rope_interleave = static_bool("rope_interleave", rope_interleave)
    if rope_layout not in ROPE_LAYOUTS:
        raise ValueError(f"rope_layout: got {rope_layout!r}; legal: {listed([repr(name) for name in ROPE_LAYOUTS])}")
    return RopeWriteSpec(write, num_heads, q_dtype, rope_interleave, rope_layout)
