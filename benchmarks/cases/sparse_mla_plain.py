"""sparse_mla over plain bf16 rows of 576 columns, beside FlashMLA's sparse prefill and FA3. A token selects, by mode:

  steps   2048 random slots of the 8,192 rows of its request; every 64th token is of the same request
  random  2048 random slots of 131,072 rows
  prompt  the first tokens of a text: all tokens up to its own if these are at most 2048 (by lengths), else 2048 random
          ones of them

Slots are ascending. FlashMLA gets queries of 64 or 128 heads, padded beforehand. To FA3 each row is a page, and a
token's slots are its block table. Errors are against float64 on some tokens.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch

import tsmla_bridge
from benchmarks.cases import packed
from benchmarks.cases.sparse_mla_prefill import SAMPLE, draw
from benchmarks.floors import LATENT, PAGE, ROPE, floor_us
from benchmarks.harness import Case, Object, Run, device, randn
from benchmarks.peers import sparse

WIDTH, SELECTED = LATENT + ROPE, 2048
REQUESTS, CONTEXT = 64, 8192  # requests of mode steps, and rows of each
MODES = {"steps": CONTEXT, "random": 1 << 17, "prompt": 0}
"""From how many rows a token selects; a prompt's tokens select from those up to their own."""
SCALE = 192**-0.5


class Point(NamedTuple):
    mode: str
    t: int
    h: int


@functools.cache
def rows_of() -> Any:
    """The rows of all points, [N, 576]."""
    return randn(REQUESTS * CONTEXT, WIDTH)


class SparsePlain(Case):
    points = tuple(itertools.starmap(Point, (
        *itertools.product(("steps",), (16, 64, 256), (16, 64, 128)),
        *itertools.product(("random", "prompt"), (4096,), (16, 64, 128)),
    )))  # fmt: skip
    common: ClassVar = {"dtype": "bf16", "page": PAGE}
    peers: ClassVar = {"flashmla": "flashmla", "fa3": "fa3"}
    iterations = 10

    def __init__(self, point: Point) -> None:
        super().__init__(point)
        mode, t, h = point
        torch.manual_seed(24)
        self.rows_held, self.q = rows_of(), randn(t, h, WIDTH)
        self.indices, self.lengths = draw(mode, t, SELECTED, MODES[mode]), None
        if mode == "steps":
            request = torch.arange(t, device=device(), dtype=torch.int32) % REQUESTS
            self.indices += request[:, None] * CONTEXT
        if mode == "prompt":
            self.lengths = torch.arange(1, t + 1, device=device()).clamp(max=SELECTED).int()

    @classmethod
    def objects(cls, point: Point) -> Iterable[Object]:
        rows = {"layout": "plain", "kv_dtype": "bfloat16", "num_selected": SELECTED, "lengths": point.mode == "prompt"}
        yield packed.options_of(point.h, point.t, False, **rows)

    def ours(self) -> dict[str, Run]:
        cache = self.rows_held.view(-1, PAGE, WIDTH)
        options = {"softmax_scale": SCALE, "return_lse": True, "form": "direct"}
        call = functools.partial(tsmla_bridge.sparse_mla, self.q, cache, self.indices, self.lengths, **options)
        return {"tsmla": call}

    def of_peer(self, name: str) -> Run:
        if name == "fa3":
            return sparse.fa3(self.q, self.rows_held, self.indices.clamp(min=0), SCALE, self.lengths)
        return sparse.prefill(sparse.padded(self.q, -2), self.rows_held, self.indices, SCALE, self.lengths, None)

    def floor_us(self, name: str) -> float:
        mode, t, h = self.point
        pairs = t * SELECTED if self.lengths is None else int(self.lengths.sum())
        within = {"steps": min(t, REQUESTS) * CONTEXT, "random": MODES["random"], "prompt": t}[mode]
        moved = min(pairs, within) * 2 * WIDTH + pairs * 4 + t * h * 2 * (WIDTH + LATENT)
        return floor_us(2 * pairs * h * (WIDTH + LATENT), moved)

    def row(self, name: str, us: float, results: Any) -> dict[str, Any]:
        mode, t, h = self.point
        found = {}
        for token in sorted({(t - 1) * i // (SAMPLE - 1) for i in range(SAMPLE)}):
            slots = self.indices[token].long()
            found[token] = self.rows_held[slots[slots >= 0]]
        lse = results[1] if name == "tsmla" else None
        out = results[0] if isinstance(results, (tuple, list)) else results
        errors = packed.errors_of(out, self.q, found, SCALE, lse=lse)
        return {"mode": mode, "length": t, "h": h, "keys": SELECTED, **errors}
