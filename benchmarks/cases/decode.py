"""mla_decode over a dense cache, bf16 or fp8: a shuffled block table, lengths that are all `keys` or drawn from half to
three halves of `keys`.

With an fp8 cache ours is timed with queries of fp8, as the peer's are ("tsmla"); with probabilities of fp8 as well, if
there are more than 32 query rows ("tsmla_fp8_p"); and with queries of bf16 ("tsmla_bf16_q"). Errors are against float64
over what the inputs stand for, on the first and the last request.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch

import tsmla_bridge
from benchmarks.floors import BYTES_PER_KEY, LATENT, PAGE, ROPE, floor_us
from benchmarks.harness import Case, Errors, Object, Run, device, ints
from benchmarks.peers import dense
from tsmla_kernels.sm90.latent.shape import FEW_ROWS

E4M3 = "float8_e4m3fn"
Q_SCALE, KV_SCALE = 0.03, 0.02  # for random numbers of variance 1: numbers beyond 448 times the scale saturate
SCALE = 192**-0.5
SIZES = ((1, 4096), (1, 32768), (4, 81920), (16, 8192), (64, 8192), (128, 4096), (32, 81920))


class Point(NamedTuple):
    b: int
    s: int
    h: int
    keys: int
    lengths: str


class Mode(NamedTuple):
    """How ours is called: the dtypes of queries and cache, and whether probabilities may be rounded to fp8."""

    q: str
    kv: str
    fp8_probabilities: bool = False


class DecodeBf16(Case):
    dtype = "bf16"
    all_modes: ClassVar[dict[str, Mode]] = {"tsmla": Mode("bfloat16", "bfloat16")}
    points = tuple(
        Point(b, s, h, keys, lengths)
        for lengths, h, s, (b, keys) in itertools.product(("fixed", "varlen"), (16, 32, 64, 128), (1, 2, 4, 8), SIZES)
    )
    common: ClassVar = {"dtype": dtype, "page": PAGE}
    peers: ClassVar = {"flashmla": "flashmla", "fa3": "fa3", "fa4": "fa4"}

    def __init__(self, point: Point) -> None:
        super().__init__(point)
        b, s, h, keys, lengths = point
        lens = torch.full((b,), keys, dtype=torch.int32)
        if lengths == "varlen":
            lens = torch.randint(keys // 2, keys * 3 // 2 + 1, (b,), dtype=torch.int32)
        counts = (lens + PAGE - 1) // PAGE
        order, table = torch.randperm(int(counts.sum())), torch.zeros(b, int(counts.max()), dtype=torch.int32)
        for row, pages in zip(table, order.split(counts.tolist()), strict=True):
            row[: len(pages)] = pages
        narrow = self.dtype == "fp8"
        self.kv_scale, cache_dtype = (KV_SCALE, torch.float8_e4m3fn) if narrow else (1.0, torch.bfloat16)
        self.cache = torch.empty(len(order), PAGE, LATENT + ROPE, dtype=cache_dtype, device=device())
        for part in self.cache.split(4096):
            part.copy_((torch.randn(part.shape, device=device()) / self.kv_scale).clamp(-448, 448).to(cache_dtype))
        q = torch.randn(b, s, h, LATENT + ROPE, device=device())
        self.q = {"bfloat16": (q.bfloat16(), 1.0)}
        if narrow:
            self.q[E4M3] = ((q / Q_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn), Q_SCALE)
        self.lens, self.table, self.lens_there = lens, ints(table), ints(lens)
        if self.floor_us("") > 1000:
            self.iterations = 10

    @classmethod
    def modes(cls, point: Point) -> dict[str, Mode]:
        """The modes of a point: if it has few query rows, those alone that don't ask for fp8 probabilities, since the
        kernel then rounds none."""
        many = point.s * point.h > FEW_ROWS
        return {name: mode for name, mode in cls.all_modes.items() if many or not mode.fp8_probabilities}

    @classmethod
    def objects(cls, point: Point) -> Iterable[Object]:
        for mode in cls.modes(point).values():
            yield "mla_decode", {
                "num_heads": point.h, "max_q_len": point.s, "page_size": PAGE, "dtype": mode.q, "kv_dtype": mode.kv,
                "fp8_probabilities": str(mode.fp8_probabilities).lower(),
            }  # fmt: skip

    def ours(self) -> dict[str, Run]:
        def run(mode: Mode) -> Run:
            q, q_scale = self.q[mode.q]
            return functools.partial(
                tsmla_bridge.mla_decode, q, self.cache, self.table, self.lens_there, softmax_scale=SCALE,
                q_scale=q_scale, kv_scale=self.kv_scale, return_lse=True, fp8_probabilities=mode.fp8_probabilities,
            )  # fmt: skip

        return {name: run(mode) for name, mode in self.modes(self.point).items()}

    def of_peer(self, name: str) -> Run:
        return getattr(dense, name)(self.q["bfloat16"][0], self.cache, self.table, self.lens_there, SCALE)

    def floor_us(self, name: str) -> float:
        keys, rows = int(self.lens.sum()), self.point.s * self.point.h
        moved = keys * BYTES_PER_KEY[self.dtype] + self.point.b * rows * (2 * LATENT + ROPE) * 2
        return floor_us(2 * rows * keys * (2 * LATENT + ROPE), moved, self.dtype)

    def row(self, name: str, us: float, results: Any) -> dict[str, Any]:
        """The fields of a row: the point's, rel_err of out (norm of the difference over norm) and, for our functions,
        lse_err, the greatest error of lse."""
        b, s, h, keys, lengths = self.point
        q, q_scale = self.q[self.all_modes.get(name, self.all_modes["tsmla"]).q]
        out, lse, errors = results[0].reshape(b, s, h, LATENT), results[1], Errors()
        for r, token in itertools.product(sorted({0, b - 1}), range(s)):
            n = int(self.lens[r])
            rows = self.cache[self.table[r, : -(-n // PAGE)].long()].flatten(0, 1)[: n - (s - 1) + token]
            rows = rows.double() * self.kv_scale
            scores = q[r, token].double() @ rows.T * (SCALE * q_scale)
            errors.add(out[r, token], lse[r, token] if name in self.all_modes else None, scores, rows[:, :LATENT])
        return {"b": b, "s": s, "h": h, "keys": keys, "varlen": lengths == "varlen", **errors.fields()}


class DecodeFp8(DecodeBf16):
    dtype = "fp8"
    all_modes: ClassVar = {
        "tsmla": Mode(E4M3, E4M3), "tsmla_fp8_p": Mode(E4M3, E4M3, True), "tsmla_bf16_q": Mode("bfloat16", E4M3)
    }  # fmt: skip
    common: ClassVar = {"dtype": dtype, "page": PAGE}
    peers: ClassVar = {"flashmla": "flashmla_fp8"}

    def of_peer(self, name: str) -> Run:
        scales = torch.tensor([Q_SCALE], device=device()), torch.tensor([KV_SCALE], device=device())
        return dense.flashmla_fp8(self.q[E4M3][0], self.cache, self.table, self.lens_there, SCALE, scales)
