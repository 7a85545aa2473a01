"""Cost of an eager call on the host, in microseconds: ours through torch, and FlashMLA's operator called the same way.

The GPU is given little to do: B 4, S 1, H 16, 256 keys, and for sparse_mla 256 slots of V3.2 rows. Every function is
called 300 times in a row without waiting, and then waited for; a call's time ends when the call returns. The functions
take turns, so that a slow moment of the host meets all of them. Times are medians, and 90th percentiles. The record
also has functions of older versions of this file.
"""

from __future__ import annotations

import functools
import platform
import statistics
import time
from typing import Any, ClassVar

import torch

import tsmla_bridge
from benchmarks.harness import Case, Run, device, ints, randn, synchronize
from benchmarks.peers import dense

CALLS, ROUNDS, WARM = 300, 7, 20
BATCH, HEADS, PAGES, PAGE = 4, 16, 4, 64
SCALE = 192**-0.5


class Overhead(Case):
    points = ((BATCH, 1, HEADS, PAGES * PAGE),)
    common: ClassVar = {"b": BATCH, "s": 1, "h": HEADS, "keys": PAGES * PAGE,
                        "host": platform.processor() or platform.machine()}  # fmt: skip
    patience = 240
    peers: ClassVar = {"FlashMLA's operator": "flashmla"}

    def __init__(self, point: Any) -> None:
        super().__init__(point)
        pages = ints(range(BATCH * PAGES)).view(BATCH, PAGES)
        q, cache = randn(BATCH, 1, HEADS, 576), randn(BATCH * PAGES, PAGE, 576)
        self.given = q, cache, pages, ints([PAGES * PAGE] * BATCH)

    def ours(self) -> dict[str, Run]:
        packed = torch.zeros(BATCH * PAGES, PAGE, 656, dtype=torch.uint8, device=device())
        given = self.given[0][:, 0], packed, ints(range(PAGES * PAGE)).repeat(BATCH, 1)
        return {
            "tsmla": functools.partial(tsmla_bridge.mla_decode, *self.given, softmax_scale=SCALE),
            "tsmla: sparse_mla": functools.partial(tsmla_bridge.sparse_mla, *given, softmax_scale=SCALE),
        }

    def of_peer(self, name: str) -> Run:
        return dense.flashmla(*self.given, SCALE)

    def time(self, functions: dict[str, Run]) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in functions}
        for turn in range(ROUNDS + 1):
            for name, function in functions.items():
                for _ in range(CALLS if turn else WARM):
                    begin = time.perf_counter_ns()
                    function()
                    times[name].append((time.perf_counter_ns() - begin) / 1e3)
                synchronize()
        taken = {name: each[WARM:] for name, each in times.items()}
        self.late = {name: round(statistics.quantiles(each, n=10)[-1], 2) for name, each in taken.items()}
        return {name: statistics.median(each) for name, each in taken.items()}

    def row(self, name: str, us: float, results: Any) -> dict[str, Any]:
        return {"function": name.removeprefix("tsmla: "), "us_p90": self.late[name]}
