"""An independent definition of the sparse ops: numpy in float64, loops, no jax; bytes through ml_dtypes and struct."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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


def v32_values(rows: np.ndarray) -> np.ndarray:
    """What V3.2 rows [..., 656] of bytes hold, [..., 576]: each value times the scale of its 128 channels."""
    rows = np.ascontiguousarray(rows)
    latent = rows[..., :512].view(ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(*rows.shape[:-1], 4, 128)
    scales = np.ascontiguousarray(rows[..., 512:528]).view(np.float32).astype(np.float64)
    rope = np.ascontiguousarray(rows[..., 528:]).view(ml_dtypes.bfloat16).astype(np.float64)
    return np.concatenate([(latent * scales[..., None]).reshape(*rows.shape[:-1], 512), rope], -1)


def v4_values(data: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """What V4 rows [..., 576] of bytes and their scale bytes [..., 8] hold, [..., 512]: 2^(byte - 127) scales 64."""
    nope = np.ascontiguousarray(data[..., :448]).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    factors = np.exp2(scales[..., :7].astype(np.float64) - 127)
    nope = (nope.reshape(*data.shape[:-1], 7, 64) * factors[..., None]).reshape(*data.shape[:-1], 448)
    rope = np.ascontiguousarray(data[..., 448:]).view(ml_dtypes.bfloat16).astype(np.float64)
    return np.concatenate([nope, rope], -1)


@dataclass(frozen=True)
class Cache:
    """A cache as sparse_mla takes it: plain [P, Z, D], V3.2 rows u8 [P, Z, 656], or V4 pages u8 [P, bytes].

    page_size: rows used of a page. span: slots from one page to the next. scale: of the values of a plain cache."""

    array: np.ndarray
    page_size: int
    span: int
    scale: float = 1.0

    @classmethod
    def of(cls, array: np.ndarray, *, page_size: int | None = None, span: int | None = None, scale: float = 1.0):
        """With sparse_mla's defaults of the page's size and of the span."""
        stride = 64 if array.ndim == 2 else array.shape[1]
        size = stride if page_size is None else page_size
        return cls(array, size, (size if array.ndim == 2 else stride) if span is None else span, scale)

    @property
    def head_dim(self) -> int:
        if self.array.dtype != np.uint8:
            return self.array.shape[-1]
        return 512 if self.array.ndim == 2 else 576

    def has(self, slots: np.ndarray) -> np.ndarray:
        """Which slots name a row."""
        return (slots >= 0) & (slots < len(self.array) * self.span) & (slots % self.span < self.page_size)

    def rows(self, slots: np.ndarray) -> np.ndarray:
        """What the rows of these slots hold, [n, D]."""
        page, offset = slots // self.span, slots % self.span
        if self.array.ndim == 3:
            rows = self.array[page, offset]
            return v32_values(rows) if self.array.dtype == np.uint8 else rows.astype(np.float64) * self.scale
        data = self.array[:, : 576 * self.page_size].reshape(len(self.array), self.page_size, 576)
        scales = self.array[:, 576 * self.page_size : 584 * self.page_size]
        return v4_values(data[page, offset], scales.reshape(len(self.array), self.page_size, 8)[page, offset])


def selected(
    indices: np.ndarray, lengths: np.ndarray | None, caches: Sequence[Cache], window: int | None = None
) -> Iterator[np.ndarray]:
    """The rows [n_t, D] that each token attends to: those of its valid slots, a row twice for a slot given twice."""
    for t, row in enumerate(indices):
        row = row[: len(row) if lengths is None else max(lengths[t], 0)]
        sections = [row] if window is None else [row[:window], row[window:]]
        parts = [cache.rows(slots[cache.has(slots)]) for cache, slots in zip(caches, sections, strict=True)]
        yield np.concatenate(parts)


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
    q: np.ndarray, rows: Iterable[np.ndarray], *, scale: float, latent_dim: int, sinks: np.ndarray | None = None
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


def quick_sparse_mla(
    q: np.ndarray, rows: Iterable[np.ndarray], *, scale: float, latent_dim: int, sinks: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """`sparse_mla` a token at a time, which is quick at a GPU's sizes."""
    num_tokens, num_heads, _ = q.shape
    out, lse = np.zeros((num_tokens, num_heads, latent_dim)), np.full((num_tokens, num_heads), -np.inf)
    for t, kv in enumerate(rows):
        if len(kv):
            scores = q[t].astype(np.float64) @ kv.T * scale
            maximum = scores.max(-1, keepdims=True)
            weights = np.exp(scores - maximum)
            total = weights.sum(-1, keepdims=True)
            lse[t] = (maximum + np.log(total))[:, 0]
            out[t] = weights @ kv[:, :latent_dim] / total
    if sinks is not None:
        seen = np.where(np.isneginf(lse), 0, lse)
        out /= 1 + np.exp(sinks.astype(np.float64) - seen)[..., None]
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
