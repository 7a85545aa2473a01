"""Products with e4m3 weights that have a scale for each block of 128 x 128, beside DeepGEMM's. A point is "linear" or
"experts"; tokens; and the weight's rows and columns. For experts these are the rows and columns of the joined gate and
up projections, and say whose experts they are: 4096 x 7168 of DeepSeek-V3 (256 experts, 8 a token), 4096 x 4096 of V4
(256 and 6), 2816 x 2048 of V2-Lite (64 and 6).

"tsmla" multiplies activations of e4m3, which are quantised outside of what is timed; "tsmla_exact" those of bf16. For
experts both run two products. The first product makes silu(gate) * up, which "tsmla" also quantises. It reads tokens by
their index; where models copy the rows first (COPIED_PAIRS), it reads the copy, and the copying is timed, too.
For experts "deep_gemm" is only the two products, of random rows in the layout that it asks for, without what is
between: masked below MANY_TOKENS, contiguous from there on. "cublas", for "linear" only, multiplies bf16 with weights
that were widened before. Tokens choose experts at random, and all functions get the same choices. Some rows of ours are
compared with float64 over activations that are not quantised (norm of the difference over norm): rel_err of exact
products, own_err of quantised ones.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch

import tsmla_bridge
from benchmarks.floors import FLOPS_PER_S, bytes_per_s
from benchmarks.harness import Case, Object, Run, device, ints, randn
from tsmla_jax.nn.products.tiles import COPIED_PAIRS

WEIGHT_SCALE = 2.0**-11
MANY_TOKENS = 1024
LINEARS = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (36864, 7168), (7168, 18432))
EXPERTS = {(4096, 7168): (256, 8), (4096, 4096): (256, 6), (2816, 2048): (64, 6)}
"""How many experts there are, and how many of them each token has, by the size of the gate and up projections."""
FORMS = {"tsmla": "float8_e4m3fn", "tsmla_exact": "bfloat16"}
PRODUCTS = {"tsmla": "quantized", "tsmla_exact": "exact"}
"""The name that `nn` has for the products of each of our rows; FORMS has the dtypes of their activations."""


class Point(NamedTuple):
    op: str
    t: int
    n: int
    k: int


def experts_of(point: Point) -> tuple[int, int]:
    """How many experts there are, and how many of them each token has; 2 and 2 for sizes that are not in EXPERTS."""
    return EXPERTS.get((point.n, point.k), (2, 2))


def copies_rows(point: Point, name: str) -> bool:
    """Whether rows are copied before the first product of experts, in one of our forms."""
    count, top_k = experts_of(point)
    return any(fewest * count <= point.t * top_k <= most * count for fewest, most in COPIED_PAIRS[PRODUCTS[name]])


def rows_of(x: Any, rows: Any) -> Any:
    """The rows of x. e4m3 is indexed as bytes, since not every release of torch can index float8."""
    return x.view(torch.uint8)[rows].view(x.dtype) if x.dtype == torch.float8_e4m3fn else x[rows]


def weight(*shape: int) -> tuple[Any, Any]:
    """Random e4m3 of magnitudes below 1 [..., N, K], and a scale for each block of 128 x 128, or less at the ends."""
    bits = torch.empty(shape, dtype=torch.uint8, device=device())
    for part in bits.view(-1, shape[-1]).split(1 << 16):
        part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8, device=device()) & 0xB7)
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    return bits.view(torch.float8_e4m3fn), torch.rand(blocks, device=device()) * WEIGHT_SCALE + WEIGHT_SCALE


def widened(values: Any, scales: Any) -> Any:
    """The numbers that a weight [N, K] with its scales stands for, in float32."""
    wide = scales.repeat_interleave(128, 0)[: values.shape[0]].repeat_interleave(128, 1)[:, : values.shape[1]]
    return values.float() * wide


class Products(Case):
    points: ClassVar = (
        *(Point("experts", t, 4096, 7168) for t in (1, 16, 64, 256, 1024, 2048, 4096)),
        *(Point("experts", t, *size) for size in ((4096, 4096), (2816, 2048)) for t in (16, 256, 4096)),
        *(Point("linear", t, *matrix) for matrix, t in itertools.product(LINEARS, (1, 16, 64, 256, 1024, 4096))),
    )
    peers: ClassVar = {"deep_gemm": "deep_gemm", "cublas": "cudnn"}  # cuBLAS comes with torch, as cuDNN does
    patience = 90

    def __init__(self, point: Point) -> None:
        super().__init__(point)
        torch.manual_seed(0)
        self.x = randn(point.t, point.k)
        self.quantised = tsmla_bridge.quantize_blocks(self.x)
        self.experts = point.op == "experts"
        self.width = point.n // 2
        self.count, self.top_k = experts_of(point) if self.experts else (1, 1)
        stack = (self.count,) if self.experts else ()
        self.weights = [weight(*stack, point.n, point.k)]
        if self.experts:
            self.weights.append(weight(*stack, point.k, self.width))
            chosen = torch.stack([torch.randperm(self.count) for _ in range(point.t)])[:, : self.top_k]
            order = chosen.flatten().argsort(stable=True)
            self.counts = torch.bincount(chosen.flatten(), minlength=self.count)
            self.picked = ints(order // chosen.shape[1])
            self.cu_rows = ints([0, *self.counts.cumsum(0).tolist()])
        self.iterations = 9

    @classmethod
    def objects(cls, point: Point) -> Iterable[Object]:
        sizes = {"num_tokens": point.t, "in_features": point.k, "out_features": point.n}
        yield "quantize_blocks", {"dtype": "bfloat16", **sizes}
        for name, dtype in FORMS.items():
            if point.op == "linear":
                yield "block_scaled_matmul", {"dtype": dtype, **sizes}
                continue
            count, top_k = experts_of(point)
            grouped = {"dtype": dtype, "num_tokens": point.t * top_k, "num_groups": count}
            picked = not copies_rows(point, name)
            first = {"gated": True, "picked": picked, "quantized": dtype == "float8_e4m3fn", "in_features": point.k}
            yield "grouped_block_scaled_matmul", {**grouped, **first, "out_features": point.n}
            yield "grouped_block_scaled_matmul", {**grouped, "in_features": point.n // 2, "out_features": point.k}

    def ours(self) -> dict[str, Run]:
        return {name: functools.partial(self.run, name) for name in FORMS}

    def run(self, name: str) -> Any:
        """The result of one of our forms."""
        quantised = name == "tsmla"
        x: Any = self.quantised[0] if quantised else self.x
        x_scales = self.quantised[1] if quantised else None
        if not self.experts:
            return tsmla_bridge.block_scaled_matmul(x, self.weights[0][0], x_scales, self.weights[0][1])
        (gate_up, of_gate_up), (down, of_down) = self.weights
        form: dict[str, Any] = {"rows": self.picked, "gated": True, "out_dtype": getattr(torch, FORMS[name])}
        if copies_rows(self.point, name):
            form["rows"] = None
            x, x_scales = rows_of(x, self.picked), None if x_scales is None else rows_of(x_scales, self.picked)
        inner = tsmla_bridge.grouped_block_scaled_matmul(x, gate_up, x_scales, of_gate_up, self.cu_rows, **form)
        values, scales = inner if isinstance(inner, tuple) else (inner, None)
        return tsmla_bridge.grouped_block_scaled_matmul(values, down, scales, of_down, self.cu_rows)

    def of_peer(self, name: str) -> Run:
        if name == "cublas":
            if self.experts:
                raise NotImplementedError("cuBLAS is timed for one matrix, not for experts")
            wide = widened(*self.weights[0]).bfloat16()
            return lambda: self.x @ wide.T
        if self.experts:
            return self.deep_gemm_experts()
        import deep_gemm  # type: ignore[import-not-found]

        out = torch.empty(self.point.t, self.point.n, dtype=torch.bfloat16, device=device())
        return lambda: deep_gemm.fp8_gemm_nt(self.quantised, self.weights[0], out)

    def deep_gemm_experts(self) -> Run:
        """DeepGEMM's two products, of random rows in the layout that it asks for."""
        import deep_gemm

        if self.point.t >= MANY_TOKENS:
            padded = (self.counts + 127) // 128 * 128
            index = torch.full((int(padded.sum()),), -1, dtype=torch.int32)
            for expert, begin in enumerate((padded.cumsum(0) - padded).tolist()):
                index[begin : begin + int(self.counts[expert])] = expert
            function, sizes, rest = deep_gemm.m_grouped_fp8_gemm_nt_contiguous, (len(index),), (index.to(device()),)
        else:
            most, expected = max(16, int(self.counts.max()) + 15 & ~15), max(1, self.point.t * self.top_k // self.count)
            function, sizes = deep_gemm.m_grouped_fp8_gemm_nt_masked, (self.count, most)
            rest = ints(self.counts), expected
        products = []
        for weights in self.weights:
            x = tsmla_bridge.quantize_blocks(randn(*sizes, weights[0].shape[2]))
            out = torch.empty(*sizes, weights[0].shape[1], dtype=torch.bfloat16, device=device())
            products.append((x, weights, out))

        def run() -> Any:
            for given in products:
                function(*given, *rest)
            return products[-1][2]

        return run

    def wanted(self, token_rows: Any) -> Any:
        """The float64 result of some rows, from activations that are not quantised."""
        if not self.experts:
            return self.x[token_rows].double() @ widened(*self.weights[0]).double().T
        found = []
        for place in token_rows.tolist():
            expert = int(torch.searchsorted(self.cu_rows, place, right=True)) - 1
            up, down = (widened(values[expert], scales[expert]).double() for values, scales in self.weights)
            gate, other = (up @ self.x[self.picked[place]].double()).chunk(2)
            found.append(down @ (torch.nn.functional.silu(gate) * other))
        return torch.stack(found)

    def floor_us(self, name: str) -> float:
        t, n, k = self.point[1:]
        products = [(t * self.top_k, n, k), (t * self.top_k, k, n // 2)] if self.experts else [(t, n, k)]
        used = int((self.counts > 0).sum()) if self.experts else 1
        moved = sum(used * columns * depth + 2 * rows * columns for rows, columns, depth in products)
        flops = sum(2 * rows * columns * depth for rows, columns, depth in products)
        rate = FLOPS_PER_S["fp8" if name in ("tsmla", "deep_gemm") else "bf16"]
        card = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        return max(flops / rate, moved / bytes_per_s(card)) * 1e6

    def row(self, name: str, us: float, results: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.point._asdict()
        if name in FORMS:
            rows = torch.arange(0, len(results), max(1, len(results) // 4), device=device())[:4]
            want = self.wanted(rows)
            field = "own_err" if name == "tsmla" else "rel_err"
            found[field] = round(float((results[rows].double() - want).norm() / want.norm()), 5)
        return found
