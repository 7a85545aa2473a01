"""SGLang's decode attention through its import of `flash_mla`: these kernels by `tsmla_bridge.engines.flash_mla`, and
sgl-flash-mla's own ("legacy"), with the arguments of SGLang 0.5.23's backends dsa, dsv4 and flashmla.

Modes (those of V4 have lengths and sinks):

  v3.2 decode                      2048 random slots of a request's packed rows
  v4-flash, v4-pro window decode   a window of 128 slots
  v4-flash, v4-pro c4 decode       the window, and 512 (pro: 1024) random slots, as many as the indexer selects
  v4-flash, v4-pro c128 decode     the window, and 128 random slots, as many as 16,384 tokens have entries
  v3 decode, v3 fp8 decode         a dense cache, requests of different lengths

h is how many heads a GPU has: all of a model's, or an eighth of them. For sgl-flash-mla SGLang pads sparse models'
queries to 64 or 128 heads, and makes a schedule once a step. Here both are done before the timing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch

from benchmarks.cases import packed, sparse_mla
from benchmarks.cases.decode import DecodeBf16, DecodeFp8
from benchmarks.cases.decode import Point as DensePoint
from benchmarks.cases.packed import WINDOW
from benchmarks.floors import LATENT, PAGE, floor_us
from benchmarks.harness import Case, Object, Run, device, ints, randn
from benchmarks.peers import sparse
from tsmla_bridge.engines import flash_mla
from tsmla_bridge.engines.flash_mla import selected
from tsmla_bridge.ops.sparse_mla import WARM_TOKENS

PEER = "legacy"
V32, DENSE, DENSE_FP8 = "v3.2 decode", "v3 decode", "v3 fp8 decode"
WINDOW_ONLY = "window"
SELECTED = {"v4-flash": 512, "v4-pro": 1024}
COMPRESSED_BY_128 = 128  # entries of a context of 16,384 tokens


class Point(NamedTuple):
    mode: str
    b: int
    h: int
    keys: int  # how many keys a token selects; in dense modes about the mean number of a request's keys


def v4_mode(model: str, layer: str) -> str:
    return f"{model} {layer} decode"


MODES = {V32: 2048} | {
    v4_mode(model, layer): WINDOW + more
    for model, selected in SELECTED.items()
    for layer, more in (("c4", selected), ("c128", COMPRESSED_BY_128), (WINDOW_ONLY, 0))
}
"""Slots that a token selects."""
BATCHES = (1, 8, 32, 64, 128)


def heads_of(mode: str) -> tuple[int, int]:
    """An eighth of the heads of a sparse mode's model, and all of them."""
    heads = 64 if mode.startswith("v4-flash") else 128
    return heads // 8, heads


class Sparse(packed.PackedCase):
    """A point of a sparse mode, with its inputs."""

    def __init__(self, point: Point) -> None:
        super().__init__(point)
        mode, b, h, count = point
        self.is_v4 = mode != V32
        self.caches = sparse_mla.caches_of(self.is_v4, b, sparse_mla.CONTEXT)
        self.q = randn(b, h, self.width)
        requests = torch.arange(b, device=device())[:, None]
        more = count - WINDOW * self.is_v4
        within = sparse_mla.COMPRESSED if self.is_v4 else sparse_mla.CONTEXT
        drawn = torch.stack([torch.randperm(within, device=device())[:more] for _ in range(b)])
        self.sections = [(drawn + requests * within).int()] if more else []
        self.sinks = torch.randn(h, device=device()) if self.is_v4 else None
        if self.is_v4:
            span = sparse_mla.WINDOW_PAGES * PAGE
            first = torch.randint(0, span - WINDOW, (b, 1), device=device())
            self.sections.insert(0, (requests * span + first + torch.arange(WINDOW, device=device())).int())
        self.caches = self.caches[: len(self.sections)]
        self.counts = [ints([each.shape[1]] * b) for each in self.sections] if self.is_v4 else []

    @staticmethod
    def objects(point: Point) -> Iterable[Object]:
        is_v4 = point.mode != V32
        for tokens in {point.b, *WARM_TOKENS}:
            name, options = packed.options_of(point.h, tokens, is_v4)
            options |= {"form": "auto", "lengths": is_v4, "num_selected": point.keys}
            yield name, options | ({"window": ""} if point.keys == WINDOW else {})

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that SGLang passes, apart from the schedule."""
        near, *far = (each[:, None] for each in self.sections)
        found: dict[str, Any] = {
            "q": self.q[:, None], "block_table": None, "cache_seqlens": None, "head_dim_v": LATENT,
            "softmax_scale": self.scale, "is_fp8_kvcache": True, "indices": near, "use_legacy": True,
        }  # fmt: skip
        if not self.is_v4:
            return found | {"k_cache": self.caches[0].unsqueeze(2), "kv_format": "V32"}
        rows = [sparse.v4_rows(pages) for pages in self.caches]
        found |= {"k_cache": rows[0], "topk_length": self.counts[0], "attn_sink": self.sinks}
        if far:
            found |= {"extra_k_cache": rows[1], "extra_indices_in_kvcache": far[0], "extra_topk_length": self.counts[1]}
        return found

    def run(self) -> Run:
        selected.read_no_lse()  # as TSMLA_SGLANG=flash_mla does, since SGLang reads no lse
        return functools.partial(
            flash_mla.flash_mla_with_kvcache, **self.arguments, tile_scheduler_metadata=flash_mla.get_mla_metadata()[0]
        )

    def run_peer(self) -> Run:
        given = self.arguments
        padded = {"q": sparse.padded(given["q"], -2)}
        if self.is_v4:
            padded["attn_sink"] = sparse.padded(self.sinks, -1)
        return sparse.package_decode(given | padded)

    def floor_us(self, name: str) -> float:
        pairs, row = self.point.b * self.point.keys, 584 if self.is_v4 else 656
        columns = self.point.h * (self.width + LATENT)
        return floor_us(2 * pairs * columns, pairs * (row + 4) + self.point.b * columns * 2)

    def errors(self, out: Any) -> dict[str, float]:
        keys = {token: self.selected(token) for token in {0, self.point.b - 1}}
        return packed.errors_of(out, self.q, keys, self.scale, self.sinks)


class Dense:
    """A point of a dense mode, with the inputs that decode_bf16 or decode_fp8 has for as many keys in mode "varlen"."""

    def __init__(self, point: Point) -> None:
        kind = DecodeFp8 if point.mode == DENSE_FP8 else DecodeBf16
        self.inputs = kind(DensePoint(point.b, 1, point.h, point.keys, "varlen"))
        self.iterations = self.inputs.iterations

    @staticmethod
    def objects(point: Point) -> Iterable[Object]:
        kind = DecodeFp8 if point.mode == DENSE_FP8 else DecodeBf16
        yield next(iter(kind.objects(DensePoint(point.b, 1, point.h, point.keys, "varlen"))))

    @property
    def arguments(self) -> dict[str, Any]:
        given = self.inputs
        fp8 = isinstance(given, DecodeFp8)
        q, q_scale = given.q["float8_e4m3fn" if fp8 else "bfloat16"]
        found: dict[str, Any] = {
            "q": q, "k_cache": given.cache.unsqueeze(2), "block_table": given.table, "cache_seqlens": given.lens_there,
            "head_dim_v": LATENT, "softmax_scale": 192**-0.5, "causal": True, "is_fp8_kvcache": fp8, "use_legacy": True,
        }  # fmt: skip
        if fp8:
            scales = {"descale_q": q_scale, "descale_k": given.kv_scale}
            found |= {name: torch.full((1,), scale, device=device()) for name, scale in scales.items()}
        return found

    def run(self) -> Run:
        return functools.partial(
            flash_mla.flash_mla_with_kvcache, **self.arguments, tile_scheduler_metadata=flash_mla.get_mla_metadata()[0]
        )

    def run_peer(self) -> Run:
        return sparse.package_dense(self.arguments)

    def floor_us(self, name: str) -> float:
        return self.inputs.floor_us("tsmla")

    def errors(self, out: Any) -> dict[str, float]:
        return {"rel_err": self.inputs.row(PEER, 0.0, (out, None))["rel_err"]}


class SGLang(Case):
    points = (
        *(Point(mode, b, h, count) for mode, count in MODES.items() for h in heads_of(mode) for b in BATCHES),
        *(Point(mode, b, h, 4096) for mode in (DENSE, DENSE_FP8) for h in (16, 128) for b in (1, 16, 64)),
    )
    common: ClassVar = {"page": PAGE, "s": 1}
    peers: ClassVar = {PEER: PEER}

    def __init__(self, point: Point) -> None:
        super().__init__(point)
        self.side = (Dense if point.mode in (DENSE, DENSE_FP8) else Sparse)(point)
        self.iterations = self.side.iterations

    @classmethod
    def objects(cls, point: Point) -> Iterable[Object]:
        return (Dense if point.mode in (DENSE, DENSE_FP8) else Sparse).objects(point)

    def ours(self) -> dict[str, Run]:
        return {"tsmla": self.side.run()}

    def of_peer(self, name: str) -> Run:
        return self.side.run_peer()

    def floor_us(self, name: str) -> float:
        return self.side.floor_us(name)

    def row(self, name: str, us: float, results: Any) -> dict[str, Any]:
        mode, b, h, keys = self.point
        return {"mode": mode, "b": b, "h": h, "keys": keys, **self.side.errors(results[0])}
