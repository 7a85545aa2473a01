"""What an eager call costs the host, in microseconds: ours through torch, and FlashMLA's operator called the same way.

The GPU is given little to do (B 4, S 1, H 16, 256 keys; sparse_mla as many slots of V3.2 rows; queries in two tensors
as an engine's products leave them), and every function is called 300 times in a row without waiting, then waited for; a
call's time is that until it returns. The functions take turns, so that a slow moment of the host meets all of them.
Medians and 90th percentiles.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch

import tsmla_bridge
from benchmarks import peers
from benchmarks.harness import Case, Run, device, ints, randn, synchronize
from benchmarks.peers import dense

CALLS, ROUNDS = 300, 7
BATCH, HEADS, PAGES, PAGE = 4, 16, 4, 64
SCALE = 192**-0.5


def functions() -> dict[str, Run]:
    """Ways to make the same call."""
    q, cache = randn(BATCH, 1, HEADS, 576), randn(BATCH * PAGES, PAGE, 576)
    tables, lens = ints(range(BATCH * PAGES)).view(BATCH, PAGES), ints([PAGES * PAGE] * BATCH)
    kv_scale = torch.ones((), device=device())
    out, lse = torch.empty_like(q[..., :512]), torch.empty(BATCH, 1, HEADS, device=device())
    size = tsmla_bridge.decode_workspace_size(max_batch=BATCH, num_heads=HEADS)
    memory = {"out": out, "lse": lse, "workspace": tsmla_bridge.Workspace(size), "return_lse": True}
    wide = torch.zeros(BATCH, 1, HEADS, 192, dtype=q.dtype, device=device())
    wide[..., 128:] = q[..., 512:]
    halves = q[..., :512].contiguous(), wide[..., 128:]
    packed = torch.zeros(BATCH * PAGES, PAGE, 656, dtype=torch.uint8, device=device())
    indices = ints(range(PAGES * PAGE)).repeat(BATCH, 1)
    need = tsmla_bridge.sparse_workspace_size(max_tokens=BATCH, num_heads=HEADS, max_selected=PAGES * PAGE)
    sparse_memory = {"out": out[:, 0], "lse": lse[:, 0], "workspace": tsmla_bridge.Workspace(need), "return_lse": True}

    def ours(query: Any = q, **options: Any) -> Any:
        return tsmla_bridge.mla_decode(query, cache, tables, lens, softmax_scale=SCALE, **options)

    def sparse(**options: Any) -> Any:
        return tsmla_bridge.sparse_mla(q[:, 0], packed, indices, softmax_scale=SCALE, **options)

    found: dict[str, Run] = {
        "tsmla": ours,
        "tsmla, with lse": lambda: ours(return_lse=True),
        "tsmla, with lse, out= and a workspace": lambda: ours(**memory),
        "tsmla, kv_scale a tensor": lambda: ours(kv_scale=kv_scale),
        "tsmla, q in two tensors": lambda: ours(halves),
        "tsmla, q in two tensors, lse, out= and a workspace": lambda: ours(halves, **memory),
        "sparse_mla": sparse,
        "sparse_mla, with lse, out= and a workspace": lambda: sparse(**sparse_memory),
    }
    if peers.why_not("flashmla") is None:
        peers.load("flashmla")
        found["FlashMLA's operator"] = dense.flashmla(q, cache, tables, lens, SCALE)
    return found


class Overhead(Case):
    points = ((BATCH, 1, HEADS, PAGES * PAGE),)
    common: ClassVar = {"b": BATCH, "s": 1, "h": HEADS, "keys": PAGES * PAGE,
                        "host": platform.processor() or platform.machine()}  # fmt: skip
    patience = 240
    peers: ClassVar = {"FlashMLA's operator": "flashmla"}

    def rows(self, skipped: set[tuple[str, Any]], hear: Callable[[str], None]) -> list[dict[str, Any]]:
        hear("tsmla")
        calls = functions()
        for function in calls.values():
            for _ in range(20):
                function()
        synchronize()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, function in calls.items():
                for _ in range(CALLS):
                    begin = time.perf_counter_ns()
                    function()
                    times[name].append((time.perf_counter_ns() - begin) / 1e3)
                synchronize()
        found = []
        for name, taken in times.items():
            median, late = round(statistics.median(taken), 2), round(statistics.quantiles(taken, n=10)[-1], 2)
            print(f"{name:50s} {median:6.2f} us   90 % below {late:6.2f} us", flush=True)
            found.append({"function": name, "us": median, "us_p90": late})
        return found
