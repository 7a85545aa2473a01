"""The gradient of sparse_mla: only the operator of the backward pass, over one plain bf16 cache, for 4096 tokens that
select 2048 slots each. Mode random: random slots of a context of 8192, ascending; shared80: neighbouring tokens share
80 % of them. "tsmla_deterministic" is the operator with gradients that repeat bit by bit. A function holds all operands
of its operator, because the replays of a CUDA graph read them where they were.

Errors are relative (Frobenius) and against float64. They are measured on CHECKED tokens of 16 heads in mode random, and
every row of a function with the same width repeats them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch

import tsmla_bridge
from benchmarks.cases.sparse_mla_prefill import draw
from benchmarks.floors import LATENT
from benchmarks.harness import Case, Object, Run, device, randn
from benchmarks.peers import sparse

TOKENS, SELECTED, CONTEXT = 4096, 2048, 8192
CHECKED = 64
SCALE = 192**-0.5
DETERMINISTIC = "tsmla_deterministic"
GRADIENTS = ("dq_err", "dkv_err")


class Point(NamedTuple):
    mode: str
    d: int
    h: int


class SparseBackward(Case):
    points = tuple(itertools.starmap(Point, itertools.product(("random", "shared80"), (576, 512), (16, 32, 64, 128))))
    common: ClassVar = {"dtype": "bf16"}
    peers: ClassVar = {"cudnn": "cudnn_frontend"}
    iterations = 10
    patience = 120  # cudnn-frontend compiles at its first call

    def __init__(self, point: Point, tokens: int = 0) -> None:
        super().__init__(point)
        torch.manual_seed(24)
        tokens = tokens or TOKENS
        self.q, self.kv = randn(tokens, point.h, point.d), randn(CONTEXT // 64, 64, point.d)
        self.d_out = randn(tokens, point.h, LATENT)
        self.indices = draw(point.mode, tokens, SELECTED, CONTEXT)

    @classmethod
    def objects(cls, point: Point) -> Iterable[Object]:
        plain = {"num_heads": point.h, "layout": "plain", "head_dim": point.d}
        yield "sparse_mla", {**plain, "num_tokens": TOKENS}
        for deterministic in (False, True):
            yield "sparse_mla_backward", {**plain, "num_tokens": TOKENS, "deterministic": deterministic}

    def ours(self) -> dict[str, Run]:
        return {"tsmla": self.operator(False), DETERMINISTIC: self.operator(True)}

    def of_peer(self, name: str) -> Run:
        out, lse = tsmla_bridge.sparse_mla(self.q, self.kv, self.indices, softmax_scale=SCALE, return_lse=True)
        return sparse.cudnn_gradient(self.q, self.kv, self.indices, (out, lse, self.d_out), SCALE)

    def operator(self, deterministic: bool) -> Run:
        """The backward operator with its operands."""
        out, lse = tsmla_bridge.sparse_mla(self.q, self.kv, self.indices, softmax_scale=SCALE, return_lse=True)
        inputs = (self.q, self.kv, None, self.indices, None, None)
        scales = torch.tensor([SCALE, 1.0, 1.0], device=device())
        options = (LATENT, *(None,) * 5, False, "auto", None, deterministic, False, None)
        given = (self.d_out, torch.zeros_like(lse), out, lse, *inputs, scales, [])
        return functools.partial(torch.ops.tsmla.sparse_mla_backward, *given, *options)

    def row(self, name: str, us: float, results: Any) -> dict[str, Any]:
        mode, d, h = self.point
        flops = 2 * self.indices.numel() * h * (3 * d + 2 * LATENT)
        case = {"t": len(self.q), "h": h, "k": self.indices.shape[1], "d": d, "n": CONTEXT, "mode": mode}
        errors = dict(zip(GRADIENTS, errors_of(name, d), strict=True))
        return case | {"tflops": round(flops / us / 1e6, 1)} | errors


@functools.cache
def errors_of(name: str, d: int) -> list[float]:
    """Relative errors of a function's gradients of q and the cache."""
    case = SparseBackward(Point("random", d, 16), CHECKED)
    leaves = [x.double().requires_grad_() for x in (case.q, case.kv)]
    out = tsmla_bridge.sparse_mla(*leaves, case.indices, softmax_scale=SCALE, implementation="reference")
    want = torch.autograd.grad(out, leaves, case.d_out.double())
    run = case.of_peer(name) if name in case.peers else case.ours()[name]
    pairs = zip(run(), want, strict=False)
    return [float(f"{float((got.double() - w).norm() / w.norm()):.3e}") for got, w in pairs]
