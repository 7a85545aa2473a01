"""Independent definitions in numpy and float64, without jax: one request, token and head at a time, which is obvious,
and one of decode that is quick; tests/oracles/test_attention.py compares the two."""

from __future__ import annotations

import numpy as np


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> tuple[np.ndarray, float]:
    """One query row [K] over keys [n, K] and values [n, V]: out [V] and lse; 0 and -inf without keys."""
    if len(k) == 0:
        return np.zeros(v.shape[1]), -np.inf
    logits = (k @ q) * scale
    maximum = logits.max()
    weights = np.exp(logits - maximum)
    return weights @ v / weights.sum(), maximum + np.log(weights.sum())


def decode(
    q, kv_cache, block_tables, seq_lens, *, scale, latent_dim, q_lens=None, causal=True, q_scale=1.0, kv_scale=1.0
):
    """q is a list of [S_b, H, D]; returns lists of out [S_b, H, L] and lse [S_b, H]."""
    outs, lses = [], []
    page_size = kv_cache.shape[1]
    for b, query in enumerate(q):
        n = int(seq_lens[b])
        keys = (
            np.stack([kv_cache[block_tables[b, j // page_size], j % page_size] for j in range(n)])
            if n
            else np.zeros((0, kv_cache.shape[2]))
        )
        keys = keys.astype(np.float64) * kv_scale
        query = query.astype(np.float64) * q_scale
        count, heads, _ = query.shape
        out, lse = np.zeros((count, heads, latent_dim)), np.zeros((count, heads))
        for i in range(count):
            visible = max(0, n - (count - 1) + i) if causal else n
            for h in range(heads):
                out[i, h], lse[i, h] = attend(query[i, h], keys[:visible], keys[:visible, :latent_dim], scale)
        outs.append(out)
        lses.append(lse)
    return outs, lses


def batched_decode(
    q, kv_cache, block_tables, seq_lens, *, scale, latent_dim=512, cu_seqlens_q=None, causal=True, kv_scale=1.0
):
    """`decode` a request at a time, which is quick at a GPU's sizes: out [..., H, L] and lse [..., H] for q [B, S, H,
    D], or [T, H, D] with cu_seqlens_q. Tokens of no request are 0 and -inf."""
    rows = np.asarray(q, np.float64).reshape(-1, *q.shape[-2:])
    starts = np.arange(len(seq_lens) + 1) * q.shape[1] if cu_seqlens_q is None else np.asarray(cu_seqlens_q)
    pages, tables = np.asarray(kv_cache), np.asarray(block_tables)
    out, lse = np.zeros((*rows.shape[:2], latent_dim)), np.full(rows.shape[:2], -np.inf)
    for r, n in enumerate(np.asarray(seq_lens)):
        used = tables[r, : -(-n // pages.shape[1])]
        keys = pages[used].astype(np.float64).reshape(-1, pages.shape[2])[:n] * kv_scale
        begin, tokens = starts[r], starts[r + 1] - starts[r]
        scores = rows[begin : begin + tokens] @ keys.T * scale
        for token in range(tokens):
            visible = n - (tokens - 1) + token if causal else n
            if visible <= 0:
                continue
            row = scores[token, :, :visible]
            maximum = row.max(-1, keepdims=True)
            weights = np.exp(row - maximum)
            total = weights.sum(-1, keepdims=True)
            out[begin + token] = weights @ keys[:visible, :latent_dim] / total
            lse[begin + token] = (maximum + np.log(total))[:, 0]
    return out.reshape(*q.shape[:-1], latent_dim), lse.reshape(q.shape[:-1])


def prefill(q, k, v, cu_q, cu_kv, *, scale, causal):
    """Packed q, k, v of any float dtype; returns out [Tq, H, V] and lse [Tq, H]; padding rows are 0 and -inf."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], -np.inf)
    for b in range(len(cu_q) - 1):
        n, m = cu_q[b + 1] - cu_q[b], cu_kv[b + 1] - cu_kv[b]
        for i in range(n):
            visible = max(0, min(m, i + m - n + 1)) if causal else m
            rows = slice(cu_kv[b], cu_kv[b] + visible)
            for h in range(q.shape[1]):
                out[cu_q[b] + i, h], lse[cu_q[b] + i, h] = attend(q[cu_q[b] + i, h], k[rows, h], v[rows, h], scale)
    return out, lse


def fp8_lse_error(head_dim: int) -> float:
    """The greatest error of lse with fp8 queries and cache, as a fraction of the greatest score.

    Hopper's fp8 tensor cores keep some 13 bits behind the leading one of a running sum (DeepSeek-V3's report, section
    3.3.2), and cut off the rest at each of their 32-column steps.
    """
    return -(-head_dim // 32) * 2.0**-13
