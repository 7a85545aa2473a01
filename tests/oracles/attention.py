"""An independent definition: numpy, float64, one request, token and head at a time, no jax."""

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
