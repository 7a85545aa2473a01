"""Paged decode inputs, poisoned wherever nothing may be read: NaN in unused slots, 2^31 - 1 in unused table entries."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

POISON = 2**31 - 1


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
    pages_of = [-(-n // page_size) for n in seq_lens]
    max_pages = max(1, *pages_of) + 1
    num_pages = sum(pages_of) + 2
    cache = np.full((num_pages, page_size, width), np.nan, np.float32)
    tables = np.full((batch, max_pages), POISON, np.int32)
    pages = rng.permutation(num_pages).astype(np.int32)
    first = 0
    for b, (length, count) in enumerate(zip(seq_lens, pages_of, strict=True)):
        tables[b, :count] = pages[first : first + count]
        first += count
        keys = np.full((count * page_size, width), np.nan, np.float32)
        keys[:length] = rng.standard_normal((length, width), np.float32)
        cache[tables[b, :count]] = keys.reshape(count, page_size, width)
    shape: tuple[int, ...] = (batch, s)
    offsets = None
    if q_lens is not None:
        offsets = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        shape = (int(offsets[-1]) + padding_rows,)
    q = rng.standard_normal((*shape, heads, width), np.float32)
    if offsets is not None:
        q[offsets[-1] :] = np.nan
    return Paged(
        q=q.astype(jnp.dtype(q_dtype)),
        kv_cache=cache.astype(jnp.dtype(kv_dtype)),
        block_tables=tables,
        seq_lens=np.asarray(seq_lens, np.int32),
        latent_dim=latent_dim,
        scale=width**-0.5,
        cu_seqlens_q=offsets,
        max_q_len=None if q_lens is None else s,
    )
