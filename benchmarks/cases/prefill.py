"""mla_prefill, causal. The inputs are random normal bf16, which "tsmla_fp8" takes rounded to e4m3. A point is requests
x tokens and heads, as 4x4096h128; 16 or 32 ragged requests and heads, as ragged32h16; or new tokens, older ones
and heads, as 512on65536h128. Head dims are 192 and 128, or both 256 where the name ends in -256. Errors are those of
the last head, against float64 over the inputs that a function was given.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

import tsmla_bridge
from benchmarks.harness import Case, Errors, Object, Run, ints, randn
from benchmarks.peers import dense

QK_DIM, V_DIM = 192, 128
WIDE = "-256"  # the end of a point's name whose head dims are both 256
# a seed and the bounds of a request's tokens, by the number of requests
RAGGED = {16: (1, 200, 4000), 32: (0, 64, 4096)}


def head_dims(name: str) -> tuple[int, int]:
    """The head dims of a point's keys and of its values."""
    return (256, 256) if name.endswith(WIDE) else (QK_DIM, V_DIM)


def lengths_of(name: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Query and key tokens of each request, and heads.

    Raises:
      ValueError: there is no such point.
    """
    name = name.removesuffix(WIDE)
    if found := re.fullmatch(r"(?:(\d+)x)?(\d+)h(\d+)", name):
        lens = (int(found[2]),) * int(found[1] or 1)
        return lens, lens, int(found[3])
    if found := re.fullmatch(r"(\d+)on(\d+)h(\d+)", name):
        new, old, heads = map(int, found.groups())
        return (new,), (old + new,), heads
    if found := re.fullmatch(r"ragged(16|32)h(\d+)", name):
        seed, *bounds = RAGGED[int(found[1])]
        rng = random.Random(seed)
        lens = tuple(rng.randint(*bounds) for _ in range(int(found[1])))
        return lens, lens, int(found[2])
    raise ValueError(f"--points: got {name!r}; legal: like 4x4096h128, 4096h16-256, ragged32h16, 512on65536h128")


class Prefill(Case):
    read = staticmethod(lengths_of)
    points = (
        "1x8192h128", "4x4096h128", "1x32768h16", "16x1024h128", "1x2048h128", "1x2048h16", "1x4096h16", "1x8192h16",
        "1x8192h32", "1x8192h64", "4x4096h64", "ragged32h16", "ragged32h32", "ragged32h64", "ragged32h128",
        "512on65536h128", *(f"1x{length}h{h}-256" for h in (16, 64) for length in (4096, 8192, 16384)),
    )  # fmt: skip
    common: ClassVar = {"dtype": "bf16", "causal": True}
    peers: ClassVar = {"fa3": "fa3", "fa4": "fa4", "cudnn": "cudnn"}

    def __init__(self, point: str) -> None:
        super().__init__(point)
        self.q_lens, self.kv_lens, self.heads = lengths_of(point)
        k_dim, v_dim = self.dims = head_dims(point)
        self.scale, widths = k_dim**-0.5, ((self.q_lens, k_dim), (self.kv_lens, k_dim), (self.kv_lens, v_dim))
        wide = [randn(sum(lens), self.heads, width) for lens, width in widths]
        self.inputs = {"tsmla": wide, "tsmla_fp8": [x.to(torch.float8_e4m3fn) for x in wide]}
        self.cu = tuple(ints([0, *itertools.accumulate(lens)]) for lens in (self.q_lens, self.kv_lens))
        self.longest = max(self.q_lens), max(self.kv_lens)

    @classmethod
    def objects(cls, point: str) -> Iterable[Object]:
        widths = dict(zip(("qk_head_dim", "v_head_dim"), head_dims(point), strict=True))
        return [("mla_prefill", {"dtype": dtype, **widths}) for dtype in ("bfloat16", "float8_e4m3fn")]

    def ours(self) -> dict[str, Run]:
        return {name: functools.partial(
            tsmla_bridge.mla_prefill, *inputs, cu_seqlens_q=self.cu[0], cu_seqlens_kv=self.cu[1],
            max_q_len=self.longest[0], max_kv_len=self.longest[1], softmax_scale=self.scale, return_lse=True,
        ) for name, inputs in self.inputs.items()}  # fmt: skip

    def of_peer(self, name: str) -> Run:
        q, k, v = self.inputs["tsmla"]
        if name == "cudnn":
            if len({*self.q_lens, *self.kv_lens}) > 1:
                raise ValueError("cuDNN takes requests of one length")
            return dense.cudnn_prefill(q, k, v, len(self.q_lens), self.scale)
        make = dense.fa3_prefill if name == "fa3" else dense.fa4_prefill
        return make(q, k, v, self.cu, self.longest, self.scale)

    @property
    def flops(self) -> int:
        """Operations of the products over the pairs that the causal mask leaves."""
        pairs = sum(n * m - n * (n - 1) // 2 for n, m in zip(self.q_lens, self.kv_lens, strict=True))
        return 2 * self.heads * pairs * sum(self.dims)

    def row(self, name: str, us: float, results: Any) -> dict[str, Any]:
        q, k, v = (x[:, -1].double() for x in self.inputs.get(name, self.inputs["tsmla"]))
        out, lse = results[0][:, -1], results[1][:, -1] if name in self.inputs else None
        row, key, errors = 0, 0, Errors()
        for n, m in zip(self.q_lens, self.kv_lens, strict=True):
            for first in range(0, n, 2048):
                at = slice(row + first, row + min(n, first + 2048))
                scores = q[at] @ k[key : key + m].T * self.scale
                seen = torch.arange(first, first + len(scores), device=q.device)[:, None] + (m - n)
                scores = scores.masked_fill(torch.arange(m, device=q.device) > seen, -math.inf)
                errors.add(out[at], None if lse is None else lse[at], scores, v[key : key + m])
            row, key = row + n, key + m
        case = {"point": self.point, "b": len(self.q_lens), "h": self.heads, "tq": len(q), "tk": len(k)}
        case |= {"head_dims": list(self.dims), "tflops": round(self.flops / us / 1e6, 1), **errors.fields()}
        return case | ({"dtype": "fp8"} if name == "tsmla_fp8" else {})
