"""Time the Hopper indexer_logits kernel against DeepGEMM's, on one GPU in one run.

    python3 benchmarks/indexer_logits.py --peers DIR --out FILE.json [--points 64,4,131072/prefill,4096,8192/...]

DIR holds a module `peers_sparse` with `load()`, `deep_gemm_paged` and `deep_gemm_prefill`; without DIR ours runs alone.
All functions of a point (requests, query tokens of each, keys) are timed interleaved, as CUDA-graph replays with the L2
cache flushed before each, medians; ours is the compiled object, launched on torch's stream, and checked against torch
first. Modes: "decode" (DeepGEMM as vLLM calls it: 4 tokens go flat), and "prefill", in which one request's `length`
newest tokens see its `keys`, each up to its own position; DeepGEMM's keys then lie in one piece. Every query has 64
heads of 128, keys are packed in pages of 64, and a row of logits is as wide as the keys. Rows go to FILE.json.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from absl import app
from compiling import compile_all
from floors import BYTES_PER_S, FLOPS_PER_S
from harness import ARCH, POINTS, Record, launch, load_peers, print_ratios, time_all, within_budget

HEADS, DIM, PAGE = 64, 128, 64
ROW = DIM + 4  # bytes of a key
DECODE = tuple(itertools.product((1, 8, 64), (1, 2, 4), (8192, 32768, 131072)))
PREFILL = tuple((1, 4096, keys) for keys in (8192, 32768, 131072))
CHECKED_TOKENS = 16
STEP = 2.0**-12
"""Of the sum of |weight| |q| |k| that logits may be off by: fp8 WGMMA aligns 32 products to the largest of them."""


class Point(NamedTuple):
    """Requests, query tokens of each, keys of each."""

    requests: int
    tokens: int
    keys: int

    @property
    def mode(self) -> str:
        return "prefill" if self.tokens >= 64 else "decode"

    @property
    def pairs(self) -> int:
        """Pairs of a query token and a key that it sees."""
        return self.requests * (self.tokens * self.keys - self.tokens * (self.tokens - 1) // 2)

    @property
    def floor_us(self) -> float:
        """The larger of what the products and what the bytes take."""
        moved = self.requests * self.keys * ROW + self.pairs * 4
        return max(2 * self.pairs * HEADS * DIM / FLOPS_PER_S["fp8"], moved / BYTES_PER_S) * 1e6


class Operands(NamedTuple):
    """What both kernels read. keys, scales: of each request in order, without pages."""

    q: Any
    weights: Any
    cache: Any
    tables: Any
    lens: Any
    offsets: Any
    pages: Any


def config(point: Point) -> Any:
    """The configuration of our kernel for a point."""
    from tsmla_kernels.contract.layouts import IndexerCacheSpec
    from tsmla_kernels.contract.sparse import IndexerLogitsSpec
    from tsmla_kernels.sm90.logits.config import logits_config

    cache = IndexerCacheSpec(1, PAGE, DIM, True)
    tokens, pages = point.requests * point.tokens, point.keys // PAGE
    types = ("float8_e4m3fn", "float32", "uint8")
    return logits_config(
        IndexerLogitsSpec(tokens, point.requests, HEADS, DIM, pages, cache, point.tokens > 1, *types)
    )


def operands_of(point: Point) -> Operands:
    """Random operands; pages in random order."""
    import torch

    tokens, count = point.requests * point.tokens, point.requests * (point.keys // PAGE)
    keys = torch.empty(count, PAGE * DIM, dtype=torch.float8_e4m3fn, device="cuda")
    for part in keys.split(1 << 14):
        part.copy_(torch.randn(part.shape, device="cuda"))
    scales = torch.rand(count, PAGE, device="cuda") + 0.1
    cache = torch.cat((keys.view(torch.uint8), scales.view(torch.uint8)), 1).view(count, PAGE, ROW)
    pages = torch.randperm(count, device="cuda").int().view(point.requests, -1)
    return Operands(
        torch.randn(tokens, HEADS, DIM, device="cuda").to(torch.float8_e4m3fn),
        torch.randn(tokens, HEADS, device="cuda"),
        cache,
        pages,
        torch.full((point.requests,), point.keys, dtype=torch.int32, device="cuda"),
        torch.arange(0, tokens + 1, point.tokens, dtype=torch.int32, device="cuda"),
        pages.long(),
    )


def ours(point: Point, operands: Operands) -> Callable[[], Any]:
    """The launch of our kernel, which returns the logits."""
    import torch

    from tsmla_kernels.catalog import INDEXER_LOGITS
    from tsmla_kernels.launch import Launcher

    logits = torch.empty(operands.q.shape[0], point.keys, device="cuda")
    offsets = [operands.offsets] if point.tokens > 1 else []
    given = [*operands[:5], *offsets, logits]
    return launch(Launcher(INDEXER_LOGITS, config(point), ARCH), given, logits)


def keys_of(operands: Operands, request: int) -> tuple[Any, Any]:
    """A request's keys [N, 128] and scales [N], in order."""
    import torch

    raw = operands.cache[operands.pages[request]].view(-1, PAGE * ROW)
    keys = raw[:, : PAGE * DIM].contiguous().view(torch.float8_e4m3fn).view(-1, DIM)
    return keys, raw[:, PAGE * DIM :].contiguous().view(torch.float32).view(-1)


def check(run: Callable[[], Any], point: Point, operands: Operands) -> float:
    """The largest error of some tokens' logits in units of STEP; AssertionError if it is above 1."""
    import torch

    logits, worst = run(), 0.0
    for token in range(0, len(logits), max(1, len(logits) // CHECKED_TOKENS)):
        request, i = divmod(token, point.tokens)
        keys, scales = keys_of(operands, request)
        seen = point.keys - point.tokens + 1 + i
        q, weights = operands.q[token].float(), operands.weights[token]
        want = (keys.float() @ q.T).relu() @ weights * scales
        bound = (keys.float().abs() @ q.abs().T) @ weights.abs() * scales * STEP
        assert torch.isneginf(logits[token, seen:]).all(), f"columns without a key at {point}"
        worst = max(worst, ((logits[token] - want).abs() / bound)[:seen].max().item())
    assert worst <= 1, f"wrong logits at {point}: {worst:.2f} times the bound"
    return worst


def deep_gemm(point: Point, operands: Operands, peers: Any) -> Callable[[], Any]:
    """DeepGEMM's kernel for the point."""
    import torch

    seen = point.keys - point.tokens + 1 + torch.arange(point.tokens, dtype=torch.int32, device="cuda")
    if point.mode == "prefill":
        return peers.deep_gemm_prefill(
            operands.q, *keys_of(operands, 0), operands.weights, torch.zeros_like(seen), seen
        )
    q = operands.q.view(point.requests, point.tokens, HEADS, DIM)
    lens = seen.expand(point.requests, -1).contiguous()
    return peers.deep_gemm_paged(q, operands.cache, operands.weights, lens, operands.tables, point.keys)


def point_of(text: str) -> Point:
    """"64,4,131072" or "prefill,4096,8192"."""
    first, tokens, keys = text.split(",")
    return Point(1 if first == "prefill" else int(first), int(tokens), int(keys))


def main(argv: list[str]) -> int:
    del argv
    points = [Point(*sizes) for sizes in (*DECODE, *PREFILL)]
    if POINTS.value:
        points = [point_of(text) for text in POINTS.value.split("/")]
    compile_all(("indexer_logits", config(point)) for point in points)
    peers, _ = load_peers("peers_sparse")
    record, ratios = Record(h=HEADS, page=PAGE), {"decode": [], "prefill": []}
    for point in within_budget(points):
        operands = operands_of(point)
        functions = {"tsmla": ours(point, operands)}
        error = check(functions["tsmla"], point, operands)
        if peers:
            functions["deep_gemm"] = deep_gemm(point, operands, peers)
        times = time_all(functions, 20 if point.floor_us < 500 else 10)
        for peer, us in times.items():
            case = {"b": point.requests, "s": point.tokens, "keys": point.keys, "mode": point.mode}
            if point.mode == "prefill":
                case |= {"b": 1, "length": point.tokens}
            record.add(**case, floor_us=round(point.floor_us, 2), peer=peer, us=round(us, 2))
        said = " ".join(f"{name} {us:.1f}" for name, us in times.items())
        ratio = times["tsmla"] / times.get("deep_gemm", math.nan)
        ratios[point.mode].append(ratio)
        print(f"{tuple(point)} floor {point.floor_us:.1f} {said} x{ratio:.2f} error {error:.2f}", flush=True)
        del operands, functions
    print_ratios(ratios)
    return 0


if __name__ == "__main__":
    app.run(main)
