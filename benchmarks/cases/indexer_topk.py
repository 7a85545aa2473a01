"""indexer_topk, 2,048 keys in order of position, with points and operands of indexer_logits. Functions of a point:

  tsmla           indexer_topk, with a workspace that the library makes
  tsmla_two       our two kernels one after the other, all logits in memory; the lengths of rows are given
  tsmla_logits    the first of the two alone
  deep_gemm       its logits alone
  vllm_cooperative, vllm_persistent, vllm_rows, sgl, cudnn, cudnn_ordered
                  a top-k of deep_gemm's logits alone

The page of the record compares ours with the sum of deep_gemm's time and the least time of vLLM's and SGLang's top-k.

The positions of tsmla and tsmla_two are compared first: they must be equal.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch

import tsmla_bridge
from benchmarks import peers, table
from benchmarks.cases.indexer_logits import HEADS, Logits, Point, options_of
from benchmarks.floors import PAGE
from benchmarks.harness import Object, Run, device
from benchmarks.peers import sparse
from benchmarks.records.operations import peers_sum

K = 2048


class Selection(Logits):
    common: ClassVar = {"h": HEADS, "page": PAGE, "k": K}
    peers: ClassVar = {"deep_gemm": "deep_gemm", **sparse.TOPK}

    @classmethod
    def objects(cls, point: Point) -> Iterable[Object]:
        yield "indexer_logits", options_of(point)
        yield "indexer_topk", {**options_of(point), "k": K}
        sizes = {"num_tokens": point.b * point.s, "num_columns": point.keys}
        yield "select_topk", {**sizes, "k": K, "order": "position"}

    @classmethod
    def best_peer(cls, us: Mapping[str, float]) -> float | None:
        """The sum of DeepGEMM's time and the least time of vLLM's and SGLang's top-k, as on the page of the record."""
        return peers_sum(table.Point((), {name: {"us": each} for name, each in us.items()}))

    def ours(self) -> dict[str, Run]:
        score = super().ours()["tsmla"]
        out = torch.empty(len(self.q), K, dtype=torch.int32, device=device())
        options = {"cu_seqlens_q": self.offsets, "out": out}
        selected = functools.partial(tsmla_bridge.indexer_topk, *self.operands, K, **options)
        found = {"tsmla": selected, "tsmla_logits": score}
        found["tsmla_two"] = lambda: tsmla_bridge.select_topk(score(), self.seen, K, order="position")
        assert torch.equal(found["tsmla"](), found["tsmla_two"]()), f"ours select different keys at {self.point}"
        return found

    def of_peer(self, name: str) -> Run:
        if name == "deep_gemm":
            return super().of_peer(name)
        if peers.why_not("deep_gemm") is not None:
            raise ValueError("DeepGEMM, which makes the logits, is not here")
        peers.load("deep_gemm")
        return sparse.topk(name, super().of_peer("deep_gemm")(), self.seen, K)
