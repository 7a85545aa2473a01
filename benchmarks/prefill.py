"""Time the Hopper prefill kernel against every peer at hand on one GPU in one run.

    python3 benchmarks/prefill.py --peers DIR --out FILE.json [--points 1x8192h128/...] [--seconds 500] [--jit]

DIR holds a module `peers` with `load()`, `_fa3` and `cudnn_prefill` (which take what their signatures say and run on
torch's current stream); flash_attn.cute, if it can be imported, is FlashAttention-4. Without DIR ours runs alone. All
functions of a point are timed interleaved, as CUDA-graph replays with the L2 cache flushed before each, medians; ours
is the compiled object that jax launches, launched on torch's stream. With --jit ours is timed through jax.jit too
("tsmla_jit": the host's clock over calls one after another, L2 not flushed). Head dims are 192 and 128, masks causal,
inputs random normal bf16; "tsmla_fp8" takes them rounded to e4m3. Errors are against float64 on one head, of the inputs
that a function was given. A table goes to standard output as it is made, rows
go to FILE.json, and the geometric means over the points that both ran come last.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from absl import app, flags
from compiling import compile_all
from harness import (
    ARCH,
    JIT,
    POINTS,
    Record,
    allocate,
    has_fa4,
    launch,
    least_seconds,
    load_peers,
    time_all,
    within_budget,
)

ITERATIONS = flags.DEFINE_integer("iterations", 20, "replays of each")

DTYPE, QK_DIM, V_DIM = "bf16", 192, 128


@dataclass(frozen=True)
class Point:
    """Query and key tokens of each request, and heads."""

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int

    @property
    def flops(self) -> int:
        """Of the products over the pairs that the causal mask leaves."""
        pairs = sum(n * m - n * (n - 1) // 2 for n, m in zip(self.q_lens, self.kv_lens, strict=True))
        return 2 * self.heads * pairs * (QK_DIM + V_DIM)


def equal(batch: int, length: int, heads: int) -> Point:
    return Point(f"{batch}x{length}h{heads}", (length,) * batch, (length,) * batch, heads)


def ragged(heads: int) -> Point:
    """32 requests of 64 to 4096 tokens, the same in every run."""
    rng = random.Random(0)
    lens = tuple(rng.randint(64, 4096) for _ in range(32))
    return Point(f"ragged32h{heads}", lens, lens, heads)


ALL = (
    equal(1, 8192, 128),
    equal(4, 4096, 128),
    equal(1, 32768, 16),
    equal(16, 1024, 128),
    equal(1, 2048, 128),
    equal(1, 2048, 16),
    equal(1, 4096, 16),
    equal(1, 8192, 16),
    equal(1, 8192, 32),
    equal(1, 8192, 64),
    equal(4, 4096, 64),
    ragged(16),
    ragged(32),
    ragged(64),
    ragged(128),
    Point("512on65536h128", (512,), (65536 + 512,), 128),
)


class Inputs:
    """Random q, k and v of a point."""

    def __init__(self, point: Point) -> None:
        import torch

        self.point, self.scale = point, QK_DIM**-0.5
        rows, keys, h = sum(point.q_lens), sum(point.kv_lens), point.heads
        make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        self.q, self.k, self.v = make(rows, h, QK_DIM), make(keys, h, QK_DIM), make(keys, h, V_DIM)
        self.cu_q, self.cu_kv = (
            torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device="cuda")
            for lens in (point.q_lens, point.kv_lens)
        )

    def in_fp8(self) -> Inputs:
        """The same rounded to e4m3."""
        import torch

        rounded = copy.copy(self)
        rounded.q, rounded.k, rounded.v = (x.to(torch.float8_e4m3fn) for x in (self.q, self.k, self.v))
        return rounded

    def ours(self) -> Callable[[], tuple[Any, Any]]:
        import torch

        from tsmla_kernels.sm90.prefill.config import prefill_workspaces

        out = torch.empty((*self.q.shape[:2], V_DIM), dtype=torch.bfloat16, device="cuda")
        lse = torch.empty(self.q.shape[:2], dtype=torch.float32, device="cuda")
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        workspaces = allocate(prefill_workspaces(len(self.point.q_lens), sms))
        scales = torch.tensor([self.scale, 1.0], device="cuda")
        inputs = [self.q, self.k, self.v, self.cu_q, self.cu_kv, scales]
        dtype = str(self.q.dtype).removeprefix("torch.")
        return launch(launcher(dtype), [*inputs, out, lse, *workspaces], (out, lse))

    def fa3(self, peers: Any) -> Callable[[], Any]:
        longest = max(self.point.q_lens), max(self.point.kv_lens)
        q, k, v, offsets = self.q, self.k, self.v, (self.cu_q, self.cu_kv)
        return lambda: peers._fa3(q, k, v, None, *offsets, None, *longest, None, self.scale, True)

    def fa4(self) -> Callable[[], Any]:
        from flash_attn.cute.interface import _flash_attn_fwd  # type: ignore[import-not-found]

        lengths = {
            "cu_seqlens_q": self.cu_q,
            "cu_seqlens_k": self.cu_kv,
            "max_seqlen_q": max(self.point.q_lens),
            "max_seqlen_k": max(self.point.kv_lens),
        }
        q, k, v = self.q, self.k, self.v
        return lambda: _flash_attn_fwd(q, k, v, **lengths, softmax_scale=self.scale, causal=True)[:2]

    def cudnn(self, peers: Any) -> Callable[[], Any]:
        """For requests of one length, with as many keys."""
        batch, length = len(self.point.q_lens), self.point.q_lens[0]
        q, k, v = (x.view(batch, length, *x.shape[1:]).transpose(1, 2) for x in (self.q, self.k, self.v))
        run = peers.cudnn_prefill(q, k, v, self.scale)
        return lambda: (run().transpose(1, 2).reshape(*self.q.shape[:2], V_DIM), None)

    def errors(self, out: Any, lse: Any) -> tuple[float, float]:
        """Relative error of out (norm) and greatest error of lse on the last head, against float64."""
        import torch

        head, row, key = self.point.heads - 1, 0, 0
        differs, norm, worst = 0.0, 0.0, 0.0
        for n, m in zip(self.point.q_lens, self.point.kv_lens, strict=True):
            keys, values = (x[key : key + m, head].float().double() for x in (self.k, self.v))
            for first in range(0, n, 2048):
                last = min(n, first + 2048)
                at = slice(row + first, row + last)
                scores = self.q[at, head].float().double() @ keys.T * self.scale
                seen = torch.arange(first, last, device="cuda")[:, None] + (m - n)
                scores = scores.masked_fill(torch.arange(m, device="cuda") > seen, -math.inf)
                want = torch.softmax(scores, -1) @ values
                differs += float((out[at, head].double() - want).square().sum())
                norm += float(want.square().sum())
                if lse is not None:
                    worst = max(worst, float((lse[at, head].double() - torch.logsumexp(scores, -1)).abs().max()))
            row, key = row + n, key + m
        return math.sqrt(differs / norm), worst

    def jit_us(self) -> float:
        """Microseconds a call of one jitted function, called again and again."""
        import jax
        import jax.numpy as jnp

        import tsmla_jax

        bounds: dict[str, Any] = {"max_q_len": max(self.point.q_lens), "max_kv_len": max(self.point.kv_lens)}

        @jax.jit
        def call(q: Any, k: Any, v: Any, cu_q: Any, cu_kv: Any) -> Any:
            offsets: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
            return tsmla_jax.mla_prefill(q, k, v, **offsets, **bounds, softmax_scale=self.scale, implementation="cute")

        arrays = [jnp.from_dlpack(t) for t in (self.q, self.k, self.v, self.cu_q, self.cu_kv)]
        calls = 10

        def several() -> None:
            for _ in range(calls):
                out = call(*arrays)
            out.block_until_ready()

        return least_seconds(several, 3) / calls * 1e6


def config(dtype: str) -> Any:
    """The configuration of our kernel for inputs of this dtype."""
    from tsmla_kernels.catalog import MLA_PREFILL

    return MLA_PREFILL.from_options({"dtype": dtype})


@functools.cache
def launcher(dtype: str) -> Any:
    from tsmla_kernels.catalog import MLA_PREFILL
    from tsmla_kernels.launch import Launcher

    return Launcher(MLA_PREFILL, config(dtype), ARCH)


def functions_of(inputs: Inputs, rounded: Inputs, peers: Any, names: list[str]) -> dict[str, Callable[[], Any]]:
    """Every function that runs this point."""
    makers: dict[str, Callable[[], Callable[[], Any]]] = {"tsmla": inputs.ours, "tsmla_fp8": rounded.ours}
    if "fa3" in names:
        makers["fa3"] = functools.partial(inputs.fa3, peers)
    if "fa4" in names:
        makers["fa4"] = inputs.fa4
    same = len({*inputs.point.q_lens, *inputs.point.kv_lens}) == 1
    if same and hasattr(peers, "cudnn_prefill"):
        makers["cudnn"] = functools.partial(inputs.cudnn, peers)
    import torch

    functions = {}
    for name, make in makers.items():
        try:
            run = make()
            run()
            torch.cuda.synchronize()
            functions[name] = run
        except Exception as error:
            print(f"{name} failed at {inputs.point.name}: {type(error).__name__}: {str(error)[:120]}")
    return functions


def print_means(times: dict[str, dict[str, float]]) -> None:
    """Ours over each peer's, and fp8's over bf16's, over the points that both ran."""
    peers = sorted({name for row in times.values() for name in row} - {"tsmla", "tsmla_jit", "tsmla_fp8"})
    for ours, peer in (*(("tsmla", peer) for peer in peers), ("tsmla_fp8", "tsmla")):
        ratios = {point: row[ours] / row[peer] for point, row in times.items() if {ours, peer} <= row.keys()}
        if ratios:
            mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
            worst = max(ratios, key=lambda point: ratios[point])
            print(
                f"{ours} over {peer}: {mean:.3f} of its time in {len(ratios)} points; most {ratios[worst]:.3f}, {worst}"
            )


def main(argv: list[str]) -> int:
    del argv
    points = {point.name: point for point in ALL}
    chosen = [points[name] for name in POINTS.value.split("/")] if POINTS.value else list(ALL)
    compile_all(("mla_prefill", config(dtype)) for dtype in ("bfloat16", "float8_e4m3fn"))
    peers, loaded = load_peers()
    names = [name for name in ("fa3",) if name in loaded] + ["fa4"] * (peers is not None and has_fa4())
    record = Record(dtype=DTYPE, head_dims=[QK_DIM, V_DIM], causal=True)
    times: dict[str, dict[str, float]] = {}
    for point in within_budget(chosen):
        inputs = Inputs(point)
        rounded = inputs.in_fp8()
        # One version of FA4 reads out of bounds here, and takes the process with it.
        able = [n for n in names if (n, point.name) != ("fa4", "1x32768h16")]
        functions = functions_of(inputs, rounded, peers, able)
        times[point.name] = time_all(functions, ITERATIONS.value)
        errors = {}
        for name, function in functions.items():
            out, lse = function()
            given = rounded if name == "tsmla_fp8" else inputs
            errors[name] = given.errors(out, lse if name.startswith("tsmla") else None)
        if JIT.value:
            times[point.name]["tsmla_jit"] = inputs.jit_us()
            errors["tsmla_jit"] = errors["tsmla"]
        case = {"b": len(point.q_lens), "h": point.heads, "tq": sum(point.q_lens), "tk": sum(point.kv_lens)}
        for name, us in times[point.name].items():
            rel_err, lse_err = errors[name]
            rest = {"lse_err": float(f"{lse_err:.2e}")} if name.startswith("tsmla") else {}
            rest |= {"dtype": "fp8"} if name == "tsmla_fp8" else {}
            rates = {"us": round(us, 2), "tflops": round(point.flops / us / 1e6, 1), "rel_err": float(f"{rel_err:.3e}")}
            record.add(point=point.name, **case, peer=name, **rates, **rest)
        print(
            f"{point.name:15s} "
            + "  ".join(f"{n} {us:8.1f} us {point.flops / us / 1e6:4.0f} T" for n, us in times[point.name].items()),
            flush=True,
        )
        del inputs, rounded, functions
    print_means(times)
    return 0


if __name__ == "__main__":
    app.run(main)
