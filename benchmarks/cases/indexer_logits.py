"""indexer_logits beside DeepGEMM's kernels and cudnn-frontend's. Some tokens of ours and of cudnn-frontend's are
checked against torch first. A point is requests, query tokens of each and keys of each. Mode "decode" has DeepGEMM as
vLLM calls it: 4 tokens of a request go as 4 requests. In mode "prefill", from 64 tokens on, the newest tokens of one
request see its keys, each up to its own position, and DeepGEMM's keys lie in one piece, as cudnn-frontend's do at all
points. Every query has 64 heads of 128, keys are packed in pages of 64, and a row of logits has a column for each key.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch

import tsmla_bridge
from benchmarks.floors import PAGE, floor_us
from benchmarks.harness import Case, Object, Run, device, ints, randn
from benchmarks.peers import sparse

HEADS, DIM = 64, 128
ROW = DIM + 4  # bytes of a key
CHECKED_TOKENS = 16
STEP = 2.0**-12
"""The part of the sum of |weight| |q| |k| by which a logit may be off: fp8 WGMMA aligns 32 products to the largest of
them."""


class Point(NamedTuple):
    b: int
    s: int
    keys: int


class Logits(Case):
    points: ClassVar = (
        *itertools.starmap(Point, itertools.product((1, 8, 64), (1, 2, 4), (8192, 32768, 131072))),
        *(Point(1, 4096, keys) for keys in (8192, 32768, 131072)),
    )
    common: ClassVar = {"h": HEADS, "page": PAGE}
    peers: ClassVar = {"deep_gemm": "deep_gemm", "cudnn": "cudnn_frontend"}

    def __init__(self, point: Point) -> None:
        super().__init__(point)
        b, s, keys = point
        count = b * (keys // PAGE)
        rows = torch.empty(count, PAGE * DIM, dtype=torch.float8_e4m3fn, device=device())
        for part in rows.split(1 << 14):
            part.copy_(torch.randn(part.shape, device=device()))
        scales = torch.rand(count, PAGE, device=device()) + 0.1
        self.cache = torch.cat((rows.view(torch.uint8), scales.view(torch.uint8)), 1).view(count, PAGE, ROW)
        self.tables = torch.randperm(count, device=device()).int().view(b, -1)
        self.q, self.weights = randn(b * s, HEADS, DIM, dtype="float8_e4m3fn"), torch.randn(b * s, HEADS).to(device())
        self.lens = ints([keys] * b)
        self.offsets = ints(range(0, b * s + 1, s)) if s > 1 else None
        self.seen = (keys - s + 1 + ints(range(s))).repeat(b)  # keys that each token sees
        self.iterations = 20 if self.floor_us("") < 500 else 10

    @classmethod
    def objects(cls, point: Point) -> Iterable[Object]:
        yield "indexer_logits", options_of(point)

    @property
    def operands(self) -> tuple[Any, ...]:
        return self.q, self.weights, self.cache, self.tables, self.lens

    def ours(self) -> dict[str, Run]:
        out = torch.empty(len(self.q), self.point.keys, device=device())

        def run() -> Any:
            return tsmla_bridge.indexer_logits(*self.operands, cu_seqlens_q=self.offsets, out=out)

        self.check(run())
        return {"tsmla": run}

    def keys_of(self, request: int) -> tuple[Any, Any]:
        """A request's keys [N, 128] and scales [N], in order."""
        raw = self.cache[self.tables[request].long()].view(-1, PAGE * ROW)
        keys = raw[:, : PAGE * DIM].contiguous().view(torch.float8_e4m3fn).view(-1, DIM)
        return keys, raw[:, PAGE * DIM :].contiguous().view(torch.float32).view(-1)

    def check(self, logits: Any) -> None:
        """Check some tokens' logits: AssertionError if one is off by more than STEP allows, or isn't -inf in the
        column of a key that its token doesn't see."""
        for token in range(0, len(logits), max(1, len(logits) // CHECKED_TOKENS)):
            keys, scales = self.keys_of(token // self.point.s)
            q, weights, seen = self.q[token].float(), self.weights[token], int(self.seen[token])
            want = (keys.float() @ q.T).relu() @ weights * scales
            bound = (keys.float().abs() @ q.abs().T) @ weights.abs() * scales * STEP
            assert torch.isneginf(logits[token, seen:]).all(), f"columns without a key at {self.point}"
            assert ((logits[token] - want).abs() <= bound)[:seen].all(), f"wrong logits at {self.point}"

    def of_peer(self, name: str) -> Run:
        b, s, keys = self.point
        if name == "cudnn":
            rows, scales = map(torch.stack, zip(*map(self.keys_of, range(b)), strict=True))
            run = sparse.cudnn_logits(self.q.view(b, s, HEADS, DIM), (rows, scales), self.weights, keys - s)
            self.check(run().view(b * s, keys))
            return run
        if s >= 64:
            if b > 1:
                raise NotImplementedError("DeepGEMM's logits of prompts are measured for one request")
            return sparse.deep_gemm_prefill(self.q, self.keys_of(0), self.weights, self.seen)
        q = self.q.view(b, s, HEADS, DIM)
        return sparse.deep_gemm_paged(q, self.cache, self.weights, self.seen.view(b, s), self.tables, keys)

    def floor_us(self, name: str) -> float:
        b, s, keys = self.point
        pairs = b * (s * keys - s * (s - 1) // 2)  # pairs of a query token and a key that it sees
        return floor_us(2 * pairs * HEADS * DIM, b * keys * ROW + pairs * 4, "fp8")

    def row(self, name: str, us: float, results: Any) -> dict[str, Any]:
        b, s, keys = self.point
        case = {"b": b, "s": s, "keys": keys, "mode": "prefill" if s >= 64 else "decode"}
        return case | ({"length": s} if s >= 64 else {})


def options_of(point: Point) -> dict[str, Any]:
    """The options of the logits' kernel; the selection's kernel has `k` beside them."""
    sizes = {"num_tokens": point.b * point.s, "num_requests": point.b, "num_columns": point.keys}
    return sizes | {"index_n_heads": HEADS, "page_size": PAGE, "ragged": point.s > 1}
