"""Common parts of the benchmarks of sparse attention: random packed rows, the numbers in them, and errors."""

from __future__ import annotations

import functools
from typing import Any

import torch

import tsmla_bridge
from benchmarks.floors import LATENT, PAGE
from benchmarks.harness import Case, Errors, Object, Run, device

WINDOW = 128
V4_DATA, V4_ROWS, V4_PAGE = PAGE * 576, PAGE * 584, 37440
"""Bytes of a V4 page: its data, its data and scales, and all of it."""


def _e4m3(rows: int, width: int) -> Any:
    """Random e4m3 of standard deviation 64, as bytes."""
    values = torch.randn(rows, width, device=device()) * 64
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def v32_cache(rows: int) -> Any:
    """Random V3.2 rows, [rows / PAGE, PAGE, 656]."""
    packed = torch.empty((rows, 656), dtype=torch.uint8, device=device())
    for part in packed.split(1 << 20):
        part[:, :512] = _e4m3(len(part), 512)
        scales = torch.exp2(torch.randint(-8, -4, (len(part), 4), device=device()).float())
        part[:, 512:528] = scales.view(torch.uint8)
        part[:, 528:] = torch.randn(len(part), 64, device=device()).bfloat16().view(torch.uint8)
    return packed.view(-1, PAGE, 656)


def v4_pages(count: int) -> Any:
    """Random V4 pages, [count, V4_PAGE]."""
    pages = torch.zeros((count, V4_PAGE), dtype=torch.uint8, device=device())
    data = pages[:, :V4_DATA].unflatten(1, (PAGE, 576))
    data[..., :448] = _e4m3(count * PAGE, 448).view(count, PAGE, 448)
    data[..., 448:] = torch.randn(count, PAGE, 64, device=device()).bfloat16().view(torch.uint8)
    pages[:, V4_DATA:V4_ROWS] = torch.randint(119, 123, (count, PAGE * 8), device=device()).to(torch.uint8)
    return pages


def values(cache: Any, slots: Any) -> Any:
    """The numbers in the rows of slots [n], float32 [n, 576], or [n, 512] of V4 pages. They are exact, as scales are
    powers of two."""
    if cache.dim() == 3:
        rows = cache.view(-1, 656)[slots]
        latent = rows[:, :512].contiguous().view(torch.float8_e4m3fn).float().view(-1, 4, 128)
        scales = rows[:, 512:528].contiguous().view(torch.float32)
        rope = rows[:, 528:].contiguous().view(torch.bfloat16).float()
        return torch.cat([(latent * scales[..., None]).view(-1, 512), rope], 1)
    page, offset = slots // PAGE, slots % PAGE
    data = cache[:, :V4_DATA].unflatten(1, (PAGE, 576))[page, offset]
    exponents = cache[:, V4_DATA:V4_ROWS].unflatten(1, (PAGE, 8))[page, offset]
    factors = torch.exp2(exponents[:, :7].float() - 127)
    nope = data[:, :448].contiguous().view(torch.float8_e4m3fn).float().view(-1, 7, 64) * factors[..., None]
    return torch.cat([nope.view(-1, 448), data[:, 448:].contiguous().view(torch.bfloat16).float()], 1)


def widened(*caches: Any) -> Any:
    """All rows of packed caches in bf16, [N, width]."""
    parts = []
    for cache in caches:
        slots = torch.arange(len(cache) * PAGE, device=device())
        parts += [values(cache, some).bfloat16() for some in slots.split(1 << 18)]
    return torch.cat(parts)


def errors_of(out: Any, q: Any, keys: dict[int, Any], scale: float, sinks: Any = None, lse: Any = None) -> Any:
    """Errors against float64 on the tokens of `keys`, which has the rows that each of them selects: rel_err of out
    (norm of the difference over norm) and, with an lse, lse_err, its greatest difference. out may have more heads than
    q [T, H, D]."""
    found, out = Errors(), out.reshape(len(q), -1, LATENT)[:, : q.shape[1]]
    for token, rows in keys.items():
        rows = rows.double()
        scores = q[token].double() @ rows.T * scale
        found.add(out[token], None if lse is None else lse[token][: q.shape[1]], scores, rows[:, :LATENT], sinks)
    return found.fields()


def options_of(h: int, tokens: int, is_v4: bool, **more: Any) -> Object:
    """sparse_mla and its options for `h` heads and `tokens` tokens, of the form "direct" unless `more` names
    another."""
    v4 = {"layout": "v4", "window": WINDOW, "sinks": True} if is_v4 else {}
    return "sparse_mla", {"num_heads": h, "page_size": PAGE, "num_tokens": tokens, "form": "direct", **v4, **more}


class PackedCase(Case):
    """A case over packed caches: the window's and the compressed one of V4, or V3.2's. `sections` has the slots of each
    token in each of them."""

    is_v4: bool
    caches: tuple[Any, ...]
    sections: list[Any]
    sinks: Any
    lengths: Any = None

    @property
    def scale(self) -> float:
        return float((512 if self.is_v4 else 192) ** -0.5)

    @property
    def width(self) -> int:
        return 512 if self.is_v4 else 576

    @functools.cached_property
    def indices(self) -> Any:
        return torch.cat(self.sections, 1)

    def call(self, q: Any, **more: Any) -> Run:
        """Our function on these queries."""
        v4 = {"compressed_kv_cache": self.caches[-1], "window": WINDOW, "sinks": self.sinks} if self.is_v4 else {}
        options = {"softmax_scale": self.scale, "return_lse": True, **v4, **more}
        return functools.partial(tsmla_bridge.sparse_mla, q, self.caches[0], self.indices, self.lengths, **options)

    def selected(self, token: int) -> Any:
        """The numbers in the rows that a token selects."""
        slots = [section[token].long() for section in self.sections]
        return torch.cat([values(cache, at[at >= 0]) for cache, at in zip(self.caches, slots, strict=True)])
