"""Paged decode inputs, poisoned wherever nothing may be read: NaN in unused slots and pages, 2^31 - 1 in unused table
entries. Imports neither jax nor torch, so that programs for compute-sanitizer can use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (numpy's bfloat16 and float8_e4m3fn)
import numpy as np

POISON = 2**31 - 1


def poisoned_cache(
    rng: np.random.Generator,
    lengths: Sequence[int],
    page_size: int,
    width: int,
    *,
    max_pages: int | None = None,
    num_pages: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """A float32 cache [P, Z, D] of normal values and its block table [B, M] for requests of these lengths.

    By default M is one more than the longest request needs, and P two more than all need."""
    pages_of = [-(-n // page_size) for n in lengths]
    max_pages = max(1, *pages_of) + 1 if max_pages is None else max_pages
    num_pages = sum(pages_of) + 2 if num_pages is None else num_pages
    cache = np.full((num_pages, page_size, width), np.nan, np.float32)
    tables = np.full((len(lengths), max_pages), POISON, np.int32)
    pages = rng.permutation(num_pages).astype(np.int32)
    first = 0
    for b, (length, count) in enumerate(zip(lengths, pages_of, strict=True)):
        tables[b, :count] = pages[first : first + count]
        first += count
        keys = np.full((count * page_size, width), np.nan, np.float32)
        keys[:length] = rng.standard_normal((length, width), np.float32)
        cache[tables[b, :count]] = keys.reshape(count, page_size, width)
    return cache, tables


def decode_numbers(
    batch: int,
    q_len: int,
    heads: int,
    max_pages: int,
    *,
    page: int = 64,
    dim: int = 576,
    seed: int = 0,
    lengths: Sequence[int] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q, cache, table and lengths (random ones unless given) of a uniform batch at a GPU's sizes, in float32."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, max_pages * page + 1, batch)
    keys[0] = max_pages * page
    if lengths is not None:
        keys = np.asarray(lengths)
    num_pages = batch * max_pages + 1
    cache, tables = poisoned_cache(rng, keys.tolist(), page, dim, max_pages=max_pages, num_pages=num_pages)
    return rng.standard_normal((batch, q_len, heads, dim), np.float32), cache / 3, tables, keys


@dataclass(frozen=True)
class Paged:
    """q is [B, S, H, D], or [T, H, D] with cu_seqlens_q; arrays are numpy, the cache already in its dtype."""

    q: np.ndarray
    kv_cache: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    latent_dim: int
    scale: float
    cu_seqlens_q: np.ndarray | None = None
    max_q_len: int | None = None

    def options(self) -> dict[str, object]:
        """The keyword arguments of mla_decode."""
        options: dict[str, object] = {"softmax_scale": self.scale, "latent_dim": self.latent_dim}
        if self.cu_seqlens_q is not None:
            options |= {"cu_seqlens_q": self.cu_seqlens_q, "max_q_len": self.max_q_len}
        return options

    def per_request(self) -> list[np.ndarray]:
        """q as one [S_b, H, D] array a request."""
        if self.cu_seqlens_q is None:
            return list(self.q)
        return [self.q[a:b] for a, b in zip(self.cu_seqlens_q[:-1], self.cu_seqlens_q[1:], strict=True)]


def paged(
    seq_lens: list[int],
    *,
    s: int = 1,
    heads: int = 2,
    page_size: int = 16,
    latent_dim: int = 32,
    rope_dim: int = 16,
    q_lens: list[int] | None = None,
    q_dtype: str = "float32",
    kv_dtype: str = "float32",
    padding_rows: int = 0,
    seed: int = 0,
) -> Paged:
    """Random inputs for these lengths; with q_lens the queries are ragged and `s` bounds them."""
    rng = np.random.default_rng(seed)
    batch, width = len(seq_lens), latent_dim + rope_dim
    cache, tables = poisoned_cache(rng, seq_lens, page_size, width)
    shape: tuple[int, ...] = (batch, s)
    offsets = None
    if q_lens is not None:
        offsets = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        shape = (int(offsets[-1]) + padding_rows,)
    q = rng.standard_normal((*shape, heads, width), np.float32)
    if offsets is not None:
        q[offsets[-1] :] = np.nan
    return Paged(
        q=q.astype(np.dtype(q_dtype)),
        kv_cache=cache.astype(np.dtype(kv_dtype)),
        block_tables=tables,
        seq_lens=np.asarray(seq_lens, np.int32),
        latent_dim=latent_dim,
        scale=width**-0.5,
        cu_seqlens_q=offsets,
        max_q_len=None if q_lens is None else s,
    )
