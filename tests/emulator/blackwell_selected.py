"""What FlashInfer's and cuDNN's kernels for Blackwell compute from their operands, in numpy: their stand-ins for both
front ends."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tsmla_kernels.sm100 import logits_config, sparse_config

Array = np.ndarray


def logits(operands: dict[str, Array], shape: tuple[int, ...]) -> Array:
    """The logits by the operands' names. Each CTA writes the splits of its share, whole; what no share has is NaN. A
    page outside of the cache is a fault."""
    cache, tables, lens = operands["k_cache"], operands["block_tables"], operands["seq_lens"]
    q = operands["q"].astype(np.float32)
    result = np.full(shape, np.nan, np.float32)
    pages, size = cache.shape[:2]
    flat = cache.reshape(pages, -1)
    keys = flat[:, : size * 128].copy().view(ml_dtypes.float8_e4m3fn).reshape(pages, size, 128).astype(np.float32)
    scales = flat[:, size * 128 :].copy().view(np.float32)
    assert (tables >= 0).all() and (tables < pages).all()
    done = 0
    for (token, split), (last, end) in itertools.pairwise(operands["schedule"]):
        while (token, split) < (last, end):
            if split * logits_config.SPLIT_KEYS >= lens[token]:
                token, split = token + 1, 0
                continue
            first = split * logits_config.SPLIT_KEYS
            position = first + np.arange(logits_config.SPLIT_KEYS)
            page = tables[token, position // size]
            products = np.maximum(q[token] @ keys[page, position % size].T, 0)
            result[token, position] = (operands["weights"][token] @ products) * scales[page, position % size]
            split, done = split + 1, done + 1
    assert done == (-(-lens // logits_config.SPLIT_KEYS)).sum()
    return result


class Attended(NamedTuple):
    """The results of cuDNN's kernel in float32."""

    out: Array
    max_logits: Array
    lse: Array


def attention(operands: dict[str, Array], sizes: tuple[int, int]) -> Attended:
    """The results by the operands' names. Rows without keys get lse +inf. sizes: of the two operands that encode the
    logits' scale."""
    high, low = (size - 1 for size in sizes)
    scale = np.array(high << 16 | low, np.uint32).view(np.float32)
    q, rows = (operands[name].astype(np.float32) for name in ("q", "rows"))
    indices, lengths = operands["indices"], operands["lengths"]
    assert indices.shape[1] % sparse_config.INDEX_BLOCK == 0 and (indices < len(rows)).all()
    seen = (indices >= 0) & (np.arange(indices.shape[1]) < lengths[:, None])
    keys = np.where(seen[..., None], rows[np.maximum(indices, 0)], 0)
    scores = np.where(seen[:, None], np.einsum("qhd,qkd->qhk", q, keys) * scale, -np.inf)
    greatest = scores.max(-1)
    shifted = np.exp(scores - np.where(np.isfinite(greatest), greatest, 0)[..., None])
    total = shifted.sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, greatest + np.log(total), np.inf)
    out = np.einsum("qhk,qkl->qhl", shifted, keys[..., :512]) / np.maximum(total, 1e-30)[..., None]
    return Attended(out, greatest, lse)
