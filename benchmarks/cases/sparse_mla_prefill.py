"""sparse_mla on a prompt's tokens over packed caches, beside FlashMLA's sparse prefill. A token selects, by mode:

  random              2048 random slots of a context of 131,072 V3.2 rows, ascending
  shared80, shared95  the same, where neighbouring tokens share 80 or 95 % of their slots
  prompt              the first tokens of a text: all tokens up to its own if these are at most 2048 (by lengths), else
                      2048 random ones of them
  prompt80            the same, where neighbouring tokens share at least 80 %
  v4                  a window of 128, and 512 random compressed slots of V4 pages, with sinks

Functions of a point:

  tsmla              bf16 queries over the packed cache, each token for itself
  tsmla union        the same, where neighbouring tokens gather the union of their slots once; 8, 16 or 32 heads
  tsmla fp8 queries  e4m3 queries, V3.2 rows; its rel_err is against the bf16 queries that they were rounded from, and
                     own_err against the e4m3 ones
  flashmla           over a bf16 copy of the rows, queries of 64 or 128 heads, padded beforehand
  widen              making that copy of the whole context, V3.2 only: an engine does so before it calls FlashMLA

Modes prompt and prompt80 also have the expanded form, on random q and k of 192 columns and v of 128. The errors of the
masks are against float64 over these inputs, rounded to e4m3 for fp8. A row's `form` is mask, dense, bits, topk or topk
bits:

  tsmla mask, tsmla mask fp8    the same selection as bits, in bf16 and in e4m3
  tsmla dense, tsmla dense fp8  all keys: the kernel without a selection, only for comparison
  tsmla bits                    the bits of the selection, from positions
  tsmla topk, tsmla topk bits   select_topk of random logits of the causal prefix: positions, and bits in their place
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch

import tsmla_bridge
from benchmarks.cases import packed
from benchmarks.cases.packed import WINDOW
from benchmarks.cases.prefill import QK_DIM, V_DIM
from benchmarks.floors import BYTES_PER_S, FLOPS_PER_S, LATENT, PAGE
from benchmarks.harness import Errors, Object, Run, device, ints, randn
from benchmarks.peers import sparse
from tsmla_kernels.sm90.sparse.union_config import HEADS

FP8, E4M3 = "tsmla fp8 queries", torch.float8_e4m3fn
UNION = "tsmla union"
MASK, DENSE, BITS = "tsmla mask", "tsmla dense", "tsmla bits"
TOPK, TOPK_BITS = "tsmla topk", "tsmla topk bits"
MASK_FP8, DENSE_FP8 = f"{MASK} fp8", f"{DENSE} fp8"
EXPANDED = {MASK: "mask", MASK_FP8: "mask", DENSE: "dense", DENSE_FP8: "dense", BITS: "bits"}
"""The functions of the expanded form, and the form of each."""
SELECTIONS = {TOPK: "topk", TOPK_BITS: "topk bits"}
"""The functions that select keys for the expanded form, and the form of each."""
FORMS = {**EXPANDED, **SELECTIONS, UNION: "union", "widen": "widen"}
"""The form of each function; all others are direct."""
SELECTED = {"random": 2048, "shared80": 2048, "shared95": 2048, "prompt": 2048, "prompt80": 2048, "v4": 512}
"""The most slots that a token selects in each mode, without the window's slots."""
CONTEXT, COMPRESSED = 1 << 17, 1 << 15  # V3.2's slots to select from, and V4's compressed ones
SHARED = {"shared80": 0.8, "shared95": 0.95, "prompt80": 0.8}
"""The part of a token's slots that the token before has, too, by mode; in prompt80 the least part."""
PROMPTS = ("prompt", "prompt80")
SAMPLE = 8  # tokens whose results are compared with float64's


class Point(NamedTuple):
    mode: str
    t: int
    h: int


def draw(mode: str, tokens: int, count: int, within: int) -> Any:
    """For each token `count` different slots below `within`, int32 [tokens, count], ascending. In modes of PROMPTS they
    are positions as `draw_prompt` draws them."""
    if mode in PROMPTS:
        return draw_prompt(tokens, count, SHARED.get(mode, 0.0))
    rows, kept = [torch.randperm(within, device=device())[:count]], round(count * SHARED.get(mode, 0.0))
    for _ in range(1, tokens):
        order = torch.rand(within, device=device())
        if mode in SHARED:
            order[rows[-1]] = 2.0
            order[rows[-1][torch.randperm(count, device=device())[:kept]]] = -1.0
        rows.append(order.topk(count, largest=False).indices)
    return torch.stack(rows).sort(1).values.int()


def draw_prompt(tokens: int, count: int, shared: float) -> Any:
    """For each token `count` different positions up to its own, or all of these if they are fewer: int32
    [tokens, count], ascending, then -1. If a token has `count`, at least the part `shared` of them are the token
    before's, too."""
    columns, kept = torch.arange(count, device=device()), round(count * shared)
    chosen = [columns] * min(count, tokens)
    for at in range(count, tokens):
        order = torch.rand(at + 1, device=device())
        order[chosen[-1][torch.randperm(count, device=device())[:kept]]] = -1.0
        chosen.append(order.topk(count, largest=False).indices.sort().values)
    return torch.where(columns <= torch.arange(tokens, device=device())[:, None], torch.stack(chosen), -1).int()


@functools.lru_cache(1)
def caches_of(is_v4: bool) -> tuple[tuple[Any, ...], Any]:
    """Random packed caches for all points of V4, or for all of V3.2, and the same rows in bf16."""
    pages = -(-(max(point.t for point in SparsePrefill.points) + WINDOW) // PAGE)
    caches = (packed.v4_pages(pages), packed.v4_pages(COMPRESSED // PAGE)) if is_v4 else (packed.v32_cache(CONTEXT),)
    return caches, packed.widened(*caches)


class SparsePrefill(packed.PackedCase):
    points = tuple(itertools.starmap(Point, (
        *itertools.product(SELECTED, (512, 2048, 4096), (16, 32, 64, 128)),
        *itertools.product(PROMPTS, (8192, 16384), (16, 64, 128)),
    )))  # fmt: skip
    common: ClassVar = {"dtype": "bf16", "page": PAGE}
    peers: ClassVar = {"flashmla": "flashmla", "widen": "vllm_c"}
    iterations = 10

    def __init__(self, point: Point) -> None:
        super().__init__(point)
        mode, t, h = point
        torch.manual_seed(24)
        self.is_v4 = mode == "v4"
        self.caches, self.bf16 = caches_of(self.is_v4)
        self.q = randn(t, h, self.width)
        self.sections = [draw(mode, t, SELECTED[mode], COMPRESSED if self.is_v4 else CONTEXT)]
        if self.is_v4:
            near = torch.arange(t, device=device())[:, None] + torch.arange(WINDOW, device=device())
            self.sections.insert(0, near.int())
        counts = torch.arange(1, t + 1, device=device()).clamp(max=SELECTED[mode]).int()
        self.lengths = counts if mode in PROMPTS else None
        self.sinks = torch.randn(h, device=device()) if self.is_v4 else None

    @classmethod
    def objects(cls, point: Point) -> Iterable[Object]:
        lengths = {"lengths": True} if point.mode in PROMPTS else {}
        for dtype in ("bfloat16",) if point.mode == "v4" else ("bfloat16", "float8_e4m3fn"):
            yield packed.options_of(point.h, point.t, point.mode == "v4", dtype=dtype, **lengths)
            if point.h in HEADS and dtype == "bfloat16":
                _, options = packed.options_of(point.h, point.t, point.mode == "v4", **lengths)
                yield "sparse_mla_union", options
            if lengths:
                yield "mla_prefill", {"dtype": dtype}
                yield "mla_prefill", {"dtype": dtype, "selection": True}
        if lengths:
            yield "selection_bits", lengths
            for bits in (False, True):
                sizes = {"num_tokens": point.t, "num_columns": point.t, "k": SELECTED[point.mode]}
                yield "select_topk", {**sizes, "bits": bits}

    @classmethod
    def best_peer(cls, us: Mapping[str, float]) -> float | None:
        """FlashMLA's time: "widen" is only a copy."""
        return us.get("flashmla")

    def ours(self) -> dict[str, Run]:
        found = {"tsmla": self.call(self.q, form="direct")}
        if self.point.h in HEADS:
            found[UNION] = self.call(self.q, form="union")
        if not self.is_v4:
            found[FP8] = self.call(self.q.to(E4M3))
        return found | self.expanded() if self.lengths is not None else found

    def expanded(self) -> dict[str, Run]:
        """The functions of the expanded form and of its selection. Tokens that select all keys up to their own need no
        bits."""
        t, h = self.point[1:]
        self.qkv = [randn(t, h, width) for width in (QK_DIM, QK_DIM, V_DIM)]
        tokens, offsets = torch.arange(t, device=device(), dtype=torch.int32), ints([0, t])
        bits = functools.partial(tsmla_bridge.selection_bits, self.sections[0], t, lengths=self.lengths)
        rows = torch.where(tokens < SELECTED[self.point.mode], -1, tokens)
        options = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_q_len": t, "max_kv_len": t}
        options |= {"softmax_scale": self.scale, "return_lse": True}
        dense = functools.partial(tsmla_bridge.mla_prefill, **options)
        mask = functools.partial(dense, selection=bits(), selection_rows=rows)
        narrow = [x.to(E4M3) for x in self.qkv]
        calls = {MASK: (mask, self.qkv), MASK_FP8: (mask, narrow), DENSE: (dense, self.qkv), DENSE_FP8: (dense, narrow)}
        logits = torch.randn(t, t, device=device())
        topk = functools.partial(tsmla_bridge.select_topk, logits, tokens + 1, SELECTED[self.point.mode])
        selections = {
            TOPK: functools.partial(topk, order="position"),
            TOPK_BITS: functools.partial(topk, return_bits=True),
        }
        attentions = {name: functools.partial(call, *given) for name, (call, given) in calls.items()}
        return {BITS: bits, **selections, **attentions}

    def of_peer(self, name: str) -> Run:
        if name == "widen":
            if self.is_v4:
                raise ValueError("vLLM's operator copies V3.2 rows, not V4 pages")
            return sparse.widen(self.caches[0], CONTEXT)
        indices = self.indices
        if self.is_v4:
            indices = torch.cat([self.sections[0], self.sections[1] + len(self.caches[0]) * PAGE], 1)
        sinks = None if self.sinks is None else sparse.padded(self.sinks, -1)
        return sparse.prefill(sparse.padded(self.q, -2), self.bf16, indices, self.scale, self.lengths, sinks)

    def floor_us(self, name: str) -> float:
        """The time of the arithmetic or of the bytes, whichever is longer, for attention over slots; of the arithmetic
        alone for attention in the expanded form, and of the bytes alone for everything else. Each row of the context is
        read at most once."""
        if name == "widen":
            return CONTEXT * (656 + 1152) / BYTES_PER_S * 1e6
        t, h = self.point[1:]
        if name == BITS:
            return (self.indices.numel() * 4 + t * t / 8) / BYTES_PER_S * 1e6
        if name in SELECTIONS:
            written = t / 8 if name == TOPK_BITS else self.indices.shape[1] * 4
            return t * ((t + 1) / 2 * 4 + written) / BYTES_PER_S * 1e6
        if name in EXPANDED:
            rate = FLOPS_PER_S["fp8" if name in (MASK_FP8, DENSE_FP8) else "bf16"]
            return t * (t + 1) * h * (QK_DIM + V_DIM) / rate * 1e6
        pairs = int(self.lengths.sum()) if self.lengths is not None else self.indices.numel()
        rows = min(pairs, COMPRESSED + t + WINDOW if self.is_v4 else CONTEXT)
        size = 2 * self.width if name == "flashmla" else 584 if self.is_v4 else 656
        moved = rows * size + pairs * 4 + t * h * (self.width * (1 if name == FP8 else 2) + LATENT * 2)
        scores = self.width * (FLOPS_PER_S["bf16"] / FLOPS_PER_S["fp8"] if name == FP8 else 1)
        return max(2 * pairs * h * (scores + LATENT) / FLOPS_PER_S["bf16"], moved / BYTES_PER_S) * 1e6

    def row(self, name: str, us: float, results: Any) -> dict[str, Any]:
        """The fields of a function's row. Attention over a selection has errors on a sample of tokens, ours with
        lse_err, fp8 queries also with own_err; the copy in bf16 has the error over all its rows."""
        mode, t, h = self.point
        case = {"mode": mode, "length": t, "h": h, "keys": self.indices.shape[1]}
        case |= {"form": FORMS.get(name, "direct")}
        if name in (DENSE, DENSE_FP8, BITS, *SELECTIONS):
            return case
        if name == "widen":
            return case | {"rel_err": float((results.float() - self.bf16.float()).norm() / self.bf16.float().norm())}
        sample = sorted({(t - 1) * i // (SAMPLE - 1) for i in range(SAMPLE)})
        if name in EXPANDED:
            return case | self.expanded_errors(results, sample, torch.bfloat16 if name == MASK else E4M3)
        keys = {token: self.selected(token) for token in sample}
        find = functools.partial(packed.errors_of, results[0], keys=keys, scale=self.scale, sinks=self.sinks)
        if name != FP8:
            return case | find(self.q, lse=results[1] if name in ("tsmla", UNION) else None)
        own = find(self.q.to(E4M3), lse=results[1])
        return case | find(self.q) | {"own_err": own["rel_err"], "lse_err": own["lse_err"]}

    def expanded_errors(self, results: Any, sample: list[int], dtype: Any) -> dict[str, Any]:
        """rel_err of out and lse_err on the sample's tokens, against float64 of the inputs as `dtype` rounds them."""
        errors = Errors()
        for token in sample:
            keys = self.sections[0][token].long()
            q, k, v = (x.to(dtype).double() for x in (self.qkv[0][token], *(x[keys[keys >= 0]] for x in self.qkv[1:])))
            scores = torch.einsum("hd,khd->hk", q, k) * self.scale
            errors.add(*(x[token][:, None] for x in results), scores[:, None], v.transpose(0, 1))
        return errors.fields()
