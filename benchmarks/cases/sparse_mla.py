"""sparse_mla of decode steps over packed caches. A token selects, by mode:

  v32               2048 random slots of its request's 32,768 V3.2 rows
  shared80          2048 random slots of 131,072 rows, 80 % of them those of the token before in its request
  v4-512, v4-1024   a window of 128, and 512 or 1024 compressed slots of V4 pages, with sinks

"tsmla" is the form "direct". In shared80 ours also runs in the form "union" ("tsmla union"); a row's `form` says which.
FlashMLA and SGLang's frozen build of it ("legacy") get queries of 64 or 128 heads, padded beforehand. FA3 runs only in
mode v32, and reads the same values as a bf16 cache of pages of one token. Errors are against float64 over what the
packed rows hold, on the first and the last token.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch

from benchmarks.cases import packed
from benchmarks.cases.packed import WINDOW
from benchmarks.cases.sparse_mla_prefill import draw
from benchmarks.floors import LATENT, PAGE, floor_us
from benchmarks.harness import Object, Run, device, randn
from benchmarks.peers import sparse

CONTEXT, COMPRESSED = 32768, 8192  # slots of a request to select from: V3.2's, and V4's compressed ones
WINDOW_PAGES = 4
LONG = 1 << 17  # slots of a request to select from in shared80
UNION = "tsmla union"
MODES = {"v32": 2048, "shared80": 2048, "v4-512": 512, "v4-1024": 1024}
"""How many slots a token selects in each mode, without the window's slots."""


class Point(NamedTuple):
    mode: str
    b: int
    s: int
    h: int


@functools.cache
def caches_of(is_v4: bool, batch: int, context: int) -> tuple[Any, ...]:
    """Random packed caches for `batch` requests: V3.2's with `context` rows a request, or V4's window and compressed
    pages, for which `context` is ignored."""
    if not is_v4:
        return (packed.v32_cache(batch * context),)
    return packed.v4_pages(batch * WINDOW_PAGES), packed.v4_pages(batch * COMPRESSED // PAGE)


@functools.cache
def as_bf16(batch: int) -> Any:
    return packed.widened(*caches_of(False, batch, CONTEXT))


class SparseDecode(packed.PackedCase):
    points = (
        *(Point(mode, b, s, h) for b, mode, h, s in itertools.product((1, 8, 32, 64, 128), ("v32", "v4-512", "v4-1024"),
                                                                      (8, 16, 64, 128), (1, 2, 4))),
        *(Point("shared80", b, 4, 16) for b in (1, 8, 32, 64)),
    )  # fmt: skip
    common: ClassVar = {"dtype": "bf16", "page": PAGE, "varlen": False}
    peers: ClassVar = {"flashmla": "flashmla", "legacy": "legacy", "fa3": "fa3"}

    def __init__(self, point: Point) -> None:
        super().__init__(point)
        mode, b, s, h = point
        self.is_v4, self.shares = mode.startswith("v4"), mode == "shared80"
        self.tokens, count = b * s, MODES[mode]
        self.caches = caches_of(self.is_v4, b, LONG if self.shares else CONTEXT)
        self.q = randn(self.tokens, h, self.width)
        request = torch.arange(b, device=device()).repeat_interleave(s)[:, None]
        within = COMPRESSED if self.is_v4 else LONG if self.shares else CONTEXT
        if self.shares:
            drawn = torch.cat([draw(mode, s, count, within) for _ in range(b)])
        else:
            drawn = torch.stack([torch.randperm(within, device=device())[:count] for _ in range(self.tokens)])
        self.sections = [(drawn + request * within).int()]
        if self.is_v4:
            first = torch.randint(0, WINDOW_PAGES * PAGE - WINDOW, (self.tokens, 1), device=device())
            near = request * WINDOW_PAGES * PAGE + first + torch.arange(WINDOW, device=device())
            self.sections.insert(0, near.int())
        self.sinks = torch.randn(h, device=device()) if self.is_v4 else None
        if self.floor_us("") > 200:
            self.iterations = 10

    @classmethod
    def objects(cls, point: Point) -> Iterable[Object]:
        name, options = packed.options_of(point.h, point.b * point.s, point.mode.startswith("v4"))
        yield name, options
        if point.mode == "shared80":
            yield "sparse_mla_union", options

    def ours(self) -> dict[str, Run]:
        found = {"tsmla": self.call(self.q, form="direct")}
        return found | {UNION: self.call(self.q, form="union")} if self.shares else found

    def of_peer(self, name: str) -> Run:
        if name == "fa3":
            if self.is_v4 or self.shares:
                raise ValueError("FA3 takes no V4 pages, and shared80's cache in bf16 would be too large")
            return sparse.fa3(self.q, as_bf16(self.point.b), self.indices, self.scale)
        by_request = (self.point.b, self.point.s)
        q = sparse.padded(self.q, -2).view(*by_request, -1, self.width)
        near, *far = (x.view(*by_request, -1).contiguous() for x in self.sections)
        if not self.is_v4:
            return sparse.v32(name, q, self.caches[0], near, self.scale)
        return sparse.v4(name, q, self.caches, (near, far[0]), self.scale, sparse.padded(self.sinks, -1))

    def floor_us(self, name: str) -> float:
        pairs, row = self.tokens * self.indices.shape[1], 584 if self.is_v4 else 656
        columns = self.point.h * (self.width + LATENT)
        return floor_us(2 * pairs * columns, pairs * (row + 4) + self.tokens * columns * 2)

    def row(self, name: str, us: float, results: Any) -> dict[str, Any]:
        keys = {token: self.selected(token) for token in {0, self.tokens - 1}}
        lse = results[1] if name in ("tsmla", UNION) else None
        errors = packed.errors_of(results[0], self.q, keys, self.scale, self.sinks, lse)
        mode, b, s, h = self.point
        form = {"form": "union" if name == UNION else "direct"}
        return {"b": b, "s": s, "h": h, "keys": self.indices.shape[1], "mode": mode, **form, **errors}
