"""select_topk of 2048 of each row's logits; every row of ours is checked against torch first. The peers write positions
in any order, except for cudnn_ordered, which writes them ascending; ours writes them ascending (mode "position") or by
value (mode "value"). In modes "equal" and "halfzero" only ours runs, by position: on rows of one value, and on rows
with zeros in place of their negative numbers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

import tsmla_bridge
from benchmarks.floors import floor_us
from benchmarks.harness import Case, Object, Run, device, ints
from benchmarks.peers import sparse

K = 2048
MODES = {"tsmla": "position", "tsmla value": "value", "tsmla equal": "position", "tsmla halfzero": "position"}
"""The order of the indices that each of our functions writes. The second word of a name is the mode of its row."""
CHECKED_ELEMENTS = 1 << 26  # logits that are checked at once


def is_exact(indices: Any, logits: Any, order: str) -> bool:
    """Whether each row of indices [T, k] names the largest logits (of equal logits the first), in `order`."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    step = max(1, CHECKED_ELEMENTS // logits.shape[1])
    for part, got in zip(logits.split(step), indices.split(step), strict=True):
        bits = (part + 0.0).view(torch.int32).long()
        # These integers ascend with the floats and are unique: of two equal floats, the first has the greater integer.
        keys = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits) * (1 << 31) - columns
        want = torch.topk(keys, got.shape[1]).indices
        if not torch.equal(got.long(), want.sort().values if order == "position" else want):
            return False
    return True


class SelectTopk(Case):
    points = tuple(itertools.product((1, 8, 64, 128, 4096), (8192, 32768, 131072)))
    common: ClassVar = {"k": K}
    peers = sparse.TOPK

    def __init__(self, point: tuple[int, int]) -> None:
        super().__init__(point)
        self.random = torch.randn(*point, device=device())
        self.lens = ints([point[1]] * point[0])
        self.iterations = 20 if point[0] * point[1] < 1 << 27 else 10

    @classmethod
    def objects(cls, point: tuple[int, int]) -> Iterable[Object]:
        for order in ("position", "value"):
            yield "select_topk", {"num_tokens": point[0], "num_columns": point[1], "k": K, "order": order}

    def ours(self) -> dict[str, Run]:
        found: dict[str, Run] = {}
        for name, order in MODES.items():
            mode = name.partition(" ")[2]
            logits = torch.ones_like(self.random) if mode == "equal" else self.random
            logits = logits.clamp(min=0) if mode == "halfzero" else logits
            found[name] = functools.partial(tsmla_bridge.select_topk, logits, self.lens, K, order=order)
            if not is_exact(found[name](), logits, order):
                raise AssertionError(f"wrong indices at {self.text(self.point)}, {name}")
        return found

    def of_peer(self, name: str) -> Run:
        return sparse.topk(name, self.random, self.lens, K)

    def floor_us(self, name: str) -> float:
        rows, columns = self.point
        return floor_us(0, rows * (columns + K) * 4)

    def row(self, name: str, us: float, results: Any) -> dict[str, Any]:
        return {"b": self.point[0], "keys": self.point[1], "mode": name.partition(" ")[2] or "position"}
