"""An independent definition of the sparse ops: numpy in float64, loops, no jax; bytes through ml_dtypes and struct."""

from __future__ import annotations

import math
import struct

import ml_dtypes
import numpy as np


def metadata(seq_lens: list[int], tables: list[list[int]], decode_lens: list[int], total: int) -> list[tuple]:
    """(length, block table row) of every one-token row."""
    rows = []
    for length, table, count in zip(seq_lens, tables, decode_lens, strict=True):
        for j in range(count):
            rows.append((max(length - count + j + 1, 0), table))
    while len(rows) < total:
        rows.append((0, [0] * len(tables[0])))
    return rows


def scale_exponent(amax: float, floor: float) -> int:
    """ceil(log2(max(amax, floor) / 448)), the quotient an IEEE float32 one."""
    return math.ceil(math.log2(float(np.float32(max(np.float32(amax), np.float32(floor))) / np.float32(448))))


def e4m3(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)


def v32_row(latent: np.ndarray, rope: np.ndarray) -> bytes:
    """656 bytes: 512 e4m3 | 4 f32 scales | 64 bf16."""
    values, scales = b"", b""
    for group in latent.astype(np.float32).reshape(4, 128):
        scale = 2.0 ** scale_exponent(np.abs(group).max(), 1e-4)
        values += e4m3(group / np.float32(scale)).tobytes()
        scales += struct.pack("<f", scale)
    return values + scales + rope.astype(ml_dtypes.bfloat16).tobytes()


def v4_page(rows: np.ndarray, page_size: int) -> bytes:
    """Rows of 448 e4m3 | 64 bf16, then 8 scale bytes a row, then zeros up to a multiple of 576."""
    data, scales = b"", b""
    for row in rows.astype(np.float32):
        for group in row[:448].reshape(7, 64):
            exponent = scale_exponent(np.abs(group).max(), 1e-4)
            data += e4m3(group / np.float32(2.0**exponent)).tobytes()
            scales += bytes([exponent + 127])
        data += row[448:].astype(ml_dtypes.bfloat16).tobytes()
        scales += b"\0"
    page = data.ljust(576 * page_size, b"\0") + scales.ljust(8 * page_size, b"\0")
    return page.ljust(-(-len(page) // 576) * 576, b"\0")


def indexer_page(keys: np.ndarray) -> bytes:
    """All the keys of the page as e4m3, then one f32 scale a key."""
    values, scales = b"", b""
    for key in keys.astype(np.float32):
        scale = 2.0 ** scale_exponent(np.abs(key).max(), 1e-4)
        values += e4m3(key / np.float32(scale)).tobytes()
        scales += struct.pack("<f", scale)
    return values + scales


def indexer_logits(q: np.ndarray, weights: np.ndarray, keys: list[np.ndarray], num_columns: int) -> np.ndarray:
    """q [T, Hi, Di] and weights [T, Hi] over each token's own keys [n_t, Di], dequantised."""
    out = np.full((len(q), num_columns), -np.inf)
    for t, seen in enumerate(keys):
        for s, key in enumerate(seen.astype(np.float64)):
            out[t, s] = sum(
                float(w) * max(float(head @ key), 0.0)
                for w, head in zip(weights[t], q[t].astype(np.float64), strict=True)
            )
    return out


def topk(logits: np.ndarray, length: int, k: int) -> list[int]:
    """Largest first, ties by the lower index, -1 behind."""
    order = sorted(range(length), key=lambda s: (-logits[s], s))[:k]
    return order + [-1] * (k - len(order))


def sparse_mla(
    q: np.ndarray, rows: list[np.ndarray], *, scale: float, latent_dim: int, sinks: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """q [T, H, D] over each token's own rows [n_t, D]."""
    num_tokens, num_heads, _ = q.shape
    out, lse = np.zeros((num_tokens, num_heads, latent_dim)), np.full((num_tokens, num_heads), -np.inf)
    for t, kv in enumerate(rows):
        for h in range(num_heads):
            if not len(kv):
                continue
            logits = kv.astype(np.float64) @ q[t, h].astype(np.float64) * scale
            top = logits.max()
            weights = np.exp(logits - top)
            lse[t, h] = top + math.log(weights.sum())
            out[t, h] = weights @ kv[:, :latent_dim].astype(np.float64) / weights.sum()
            if sinks is not None:
                out[t, h] /= 1 + math.exp(float(sinks[h]) - lse[t, h])
    return out, lse


def compress(kv: np.ndarray, score: np.ndarray, ape: np.ndarray, ratio: int, overlap: bool) -> np.ndarray:
    """Pooled entries [n // ratio, C] of one whole sequence, kv and score [n, W]."""
    channels = kv.shape[1] // (2 if overlap else 1)
    entries = []
    for last in range(ratio - 1, len(kv), ratio):
        window = []
        for position in range(last - ratio + 1 - (ratio if overlap else 0), last + 1):
            if position >= 0:
                older = overlap and position <= last - ratio
                first = channels if overlap and not older else 0
                columns = slice(first, first + channels)
                biased = score[position, columns].astype(np.float64) + ape[position % ratio, columns]
                window.append((biased, kv[position, columns].astype(np.float64)))
        logits, values = (np.stack(x) for x in zip(*window, strict=True))
        weights = np.exp(logits - logits.max(0))
        entries.append((weights * values).sum(0) / weights.sum(0))
    return np.stack(entries) if entries else np.zeros((0, channels))


def norm_rope(x: np.ndarray, weight: np.ndarray, position: int, inv_freq: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm, then the pairs of the last channels turned by position * inv_freq."""
    x = x.astype(np.float64)
    x = x / math.sqrt((x * x).mean() + eps) * weight
    return rope(x, position, inv_freq)


def rope(x: np.ndarray, position: int, inv_freq: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64).copy()
    first = len(x) - 2 * len(inv_freq)
    for i, frequency in enumerate(inv_freq):
        a, b = x[first + 2 * i], x[first + 2 * i + 1]
        angle = position * float(frequency)
        x[first + 2 * i] = a * math.cos(angle) - b * math.sin(angle)
        x[first + 2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
    return x
