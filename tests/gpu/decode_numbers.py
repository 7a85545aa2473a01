"""Inputs of decode at a GPU's sizes, for both front ends' tests there. Imports neither jax nor torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Numbers = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


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
) -> Numbers:
    """q, cache, table and lengths (random ones unless given), with NaN and impossible pages wherever nothing may be
    read."""
    rng = np.random.default_rng(seed)
    pages = batch * max_pages + 1
    keys = rng.integers(0, max_pages * page + 1, batch)
    keys[0] = max_pages * page
    if lengths is not None:
        keys = np.asarray(lengths)
    cache = rng.normal(size=(pages, page, dim)) / 3
    tables = rng.permutation(pages - 1).reshape(batch, max_pages)
    for request, length in enumerate(keys):
        used, rest = divmod(int(length), page)
        if rest:
            cache[tables[request, used], rest:] = np.nan
        tables[request, used + bool(rest) :] = 2**31 - 1  # entries past the end may hold anything
    return rng.normal(size=(batch, q_len, heads, dim)), cache, tables, keys
