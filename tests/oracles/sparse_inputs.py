"""Calls of sparse_mla in numpy, poisoned wherever nothing may be read: bytes of 0xFF, NaN in every format, in slots
that no index selects, and 2^31 - 1 behind the lengths. Imports neither jax nor torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tests.oracles import sparse

POISON = 2**31 - 1
LAYOUTS = ("v32", "v4", "plain")


@dataclass(frozen=True)
class Call:
    """A call: its arrays and its other options by argument, and its caches as the oracle reads them."""

    arrays: dict[str, np.ndarray]
    options: dict[str, Any]
    caches: tuple[sparse.Cache, ...]

    def want(self) -> tuple[np.ndarray, np.ndarray]:
        """out and lse in float64."""
        rows = sparse.selected(
            self.arrays["indices"], self.arrays.get("lengths"), self.caches, self.options.get("window")
        )
        return sparse.quick_sparse_mla(
            self.arrays["q"],
            rows,
            scale=self.options["softmax_scale"],
            latent_dim=512,
            sinks=self.arrays.get("sinks"),
        )


def packed_rows(
    rng: np.random.Generator, layout: str, count: int, exponents: tuple[int, int], odd: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of random rows [count, row] and, for V4, of their scales [count, 8].

    exponents: the least and the greatest of the scales, of values of size 64; V3.2's writers make powers of two. odd:
    whether V3.2's scales are other numbers."""
    width = 512 if layout == "v32" else 448
    values = sparse.e4m3(rng.standard_normal((count, width)) * 64).view(np.uint8)
    size = 64 * 2.0 ** np.mean(exponents)
    rope = (rng.standard_normal((count, 64)) * size).astype(ml_dtypes.bfloat16).view(np.uint8)
    powers = rng.integers(exponents[0], exponents[1] + 1, (count, 7 if layout == "v4" else 4))
    if layout == "v4":
        return np.concatenate([values, rope], 1), np.pad((powers + 127).astype(np.uint8), ((0, 0), (0, 1)))
    scales = 2.0**powers
    if odd:
        scales *= rng.uniform(0.7, 1.4, scales.shape)
    return np.concatenate([values, scales.astype(np.float32).view(np.uint8), rope], 1), np.zeros((count, 0), np.uint8)


def cache(
    rng: np.random.Generator,
    layout: str,
    pages: int,
    page_size: int,
    *,
    gap: int = 0,
    width: int = 576,
    kv_dtype: str = "float8_e4m3fn",
    exponents: tuple[int, int] = (-8, -5),
    odd: bool = False,
) -> tuple[sparse.Cache, dict[str, int]]:
    """A random cache and the page_size and page_span to give with it; pages lie `gap` rows further apart than they have
    rows (V4: further apart in slots alone)."""
    span = page_size + gap
    if layout == "v4":
        data, scales = packed_rows(rng, layout, pages * page_size, exponents)
        size = -(-584 * page_size // 576) * 576
        array = np.full((pages, size), 0xFF, np.uint8)
        array[:, : 576 * page_size] = data.reshape(pages, -1)
        array[:, 576 * page_size : 584 * page_size] = scales.reshape(pages, -1)
        return sparse.Cache.of(array, page_size=page_size, span=span), {"page_size": page_size, "page_span": span}
    if layout == "v32":
        array = np.full((pages, span, 656), 0xFF, np.uint8)
        rows, _ = packed_rows(rng, layout, pages * page_size, exponents, odd)
        array[:, :page_size] = rows.reshape(pages, page_size, 656)
        scale = 1.0
    else:
        scale = 0.02
        array = np.full((pages, span, width), np.nan).astype(np.dtype(kv_dtype))
        rows = np.clip(rng.standard_normal((pages, page_size, width)) / scale, -448, 448)
        array[:, :page_size] = rows.astype(array.dtype)
    return sparse.Cache.of(array, page_size=page_size, scale=scale), {"page_size": page_size} if gap else {}


def poison(held: sparse.Cache, slots: np.ndarray) -> None:
    """Put NaN into every slot but these."""
    used = np.zeros(len(held.array) * held.span, bool)
    used[slots[held.has(slots)]] = True
    page, offset = np.divmod(np.flatnonzero(~used & held.has(np.arange(len(used)))), held.span)
    if held.array.ndim == 3:
        held.array.view(f"u{held.array.itemsize}")[page, offset] = np.iinfo(f"u{held.array.itemsize}").max
        return
    for start, size in ((0, 576), (576 * held.page_size, 8)):
        region = held.array[:, start : start + size * held.page_size]
        rows = region.reshape(len(region), held.page_size, size)  # a copy, as the pages' ends are not part of it
        rows[page, offset] = 0xFF
        region[:] = rows.reshape(region.shape)


def draw_together(rng: np.random.Generator, indices: np.ndarray, held: sparse.Cache, together: int) -> None:
    """Fill the rows of indices: every `together` of them draw different slots from an eighth more than they have
    columns, in an order of their own."""
    tokens, columns = indices.shape
    slots = np.arange(len(held.array) * held.span)
    slots = slots[held.has(slots)]
    for first in range(0, tokens, together):
        few = rng.choice(slots, min(len(slots), columns + columns // 8 + 1), replace=False)
        for row in indices[first : first + together]:
            drawn = rng.permutation(few)[:columns]
            row[:] = -1
            row[: len(drawn)] = drawn


def call(
    layout: str,
    *,
    tokens: int = 8,
    heads: int = 4,
    selected: int = 12,
    window: int | None = None,
    pages: int = 5,
    page_size: int = 8,
    gap: int = 0,
    lengths: bool = True,
    sinks: bool = False,
    dtype: str = "bfloat16",
    width: int | None = None,
    kv_dtype: str = "float8_e4m3fn",
    exponents: tuple[int, int] = (-8, -5),
    odd: bool = False,
    sizes: tuple[float, ...] = (1.0,),
    together: int = 0,
    seed: int = 0,
) -> Call:
    """A random call. Some indices are -1, some twice in a row; one token selects nothing, and one has length 0.

    window: with it there is a second cache, of 3 pages of 2 rows less. kv_dtype, width: of plain rows. exponents, odd:
    of packed rows' scales; their values are of size 64 * 2^exponent, and softmax_scale makes up for it. sizes: of the
    tokens' queries, in turn; their last 64 columns have the next token's. together: with it, every so many neighbouring
    tokens draw from few slots, each at most once, so that they share most of them.
    """
    rng = np.random.default_rng(seed)
    head_dim = 512 if layout == "v4" else width or 576
    rows: dict[str, Any] = {"gap": gap, "width": head_dim, "kv_dtype": kv_dtype, "exponents": exponents, "odd": odd}
    near, options = cache(rng, layout, pages, page_size, **rows)
    caches, arrays = (near,), {"kv_cache": near.array}
    cut = selected if window is None else window
    indices = rng.integers(-1, pages * near.span, (tokens, selected), np.int32)
    if layout == "plain":
        options["kv_scale"] = near.scale
    if window is not None:
        far, given = cache(rng, layout, 3, max(page_size - 2, 1), **rows)
        caches, arrays = (near, far), arrays | {"compressed_kv_cache": far.array}
        indices[:, cut:] = rng.integers(-1, 3 * far.span, (tokens, selected - cut), np.int32)
        options |= {f"compressed_{name}": value for name, value in given.items()} | {"window": window}
        if layout == "plain":
            options["compressed_kv_scale"] = far.scale
    if together:
        for section, held in zip((indices[:, :cut], indices[:, cut:]), caches, strict=False):
            draw_together(rng, section, held, together)
    indices[rng.random(indices.shape) < 0.05] = -1
    if selected > 2 and not together:
        indices[:, 1] = indices[:, 0]
    indices[3 % tokens] = -1
    if lengths:
        lens = rng.integers(0, selected + 1, tokens).astype(np.int32)
        lens[0], lens[1 % tokens] = selected, 0 if tokens > 1 else selected
        indices[np.arange(selected) >= lens[:, None]] = POISON
        arrays["lengths"] = lens
    for held, slots in zip(caches, (indices[:, :cut], indices[:, cut:]), strict=False):
        poison(held, slots)
    if sinks:
        arrays["sinks"] = rng.standard_normal(heads).astype(np.float32)
    q = rng.standard_normal((tokens, heads, head_dim))
    for columns, shift in ((slice(-64), 0), (slice(-64, None), 1)):
        q[..., columns] *= np.take(sizes, np.arange(tokens) + shift, mode="wrap")[:, None, None]
    q = q.astype(np.dtype(dtype))
    size = 1.0 if layout == "plain" else 64 * 2.0 ** np.mean(exponents)
    options["softmax_scale"] = float(192**-0.5 / size)
    return Call({"q": q, **arrays, "indices": indices}, options, caches)
