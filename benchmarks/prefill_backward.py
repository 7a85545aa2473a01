"""Time the gradient of MLA prefill on Hopper against every peer at hand on one GPU in one run: the backward pass alone.

    python3 benchmarks/prefill_backward.py --out FILE.json [--points 8192h16/...] [--names cudnn/...] [--seconds 100]

With --noerrors only times are measured.

"tsmla" is the compiled object that jax and torch launch, "tsmla_deterministic" the one whose gradients repeat bit by
bit, "tsmla_kv" the one that reads kv and shared rope columns. The peers are those of backward_peers.py; one that can't
be imported or does not run a point is left out and said. Head dims are 192 and 128, masks causal, inputs random normal
bf16. Times are medians of several calls, in turns: by CUDA events for what runs on torch's stream (cuDNN's backward
pass through autograd can't be captured into a CUDA graph), by the host's clock for jax. Errors are relative (Frobenius)
and against float64; they are measured on one request of 2048 tokens and 16 heads, and every row of a peer repeats them.
A table goes to standard output as it is made, rows go to FILE.json, and the geometric means over the points that both
ran come last.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from absl import app, flags
from backward_peers import IN_JAX, PEERS, Saved, as_torch
from compiling import compile_all
from harness import ARCH, POINTS, Record, allocate, launch, within_budget

from tsmla_kernels.catalog import MLA_PREFILL, MLA_PREFILL_BACKWARD

NAMES = flags.DEFINE_string("names", None, "peers separated by /, instead of all")
ROUNDS = flags.DEFINE_integer("rounds", 3, "turns of each peer at a point")
ERRORS = flags.DEFINE_bool("errors", True, "measure errors too")

DTYPE, QK_DIM, V_DIM, ROPE_DIM = "bf16", 192, 128, 64
NOPE_DIM = QK_DIM - ROPE_DIM
SCALE = QK_DIM**-0.5
TURN_MS = 40.0
"""How long a peer runs in one turn, at least twice."""

OPTIONS: dict[str, dict[str, str]] = {
    "tsmla": {},
    "tsmla_deterministic": {"deterministic": "true"},
    "tsmla_kv": {"shared_rope": "true"},
}
"""Ours, and the options of `tsmla compile` that each is compiled with."""


@dataclass(frozen=True)
class Point:
    """Tokens of each request, and heads."""

    name: str
    lens: tuple[int, ...]
    heads: int

    @property
    def flops(self) -> int:
        """Of the five products over the pairs that the causal mask leaves."""
        return self.heads * sum(n * (n + 1) // 2 for n in self.lens) * 2 * (3 * QK_DIM + 2 * V_DIM)


def ragged(heads: int) -> Point:
    """16 requests of 200 to 4000 tokens, the same in every run."""
    rng = random.Random(1)
    return Point(f"ragged16h{heads}", tuple(rng.randint(200, 4000) for _ in range(16)), heads)


CHECKED = Point("2048h16", (2048,), 16)
FAST = {"cudnn", "cudnn_jax", "fa4", "tokamax"}
"""The peers in their default modes. The fastest of them at a point is its best peer."""
ALL = (
    *(Point(f"{length}h{heads}", (length,), heads) for heads in (16, 64, 128) for length in (4096, 8192, 16384)),
    ragged(16),
)


class Inputs:
    """Random operands of a point, and the forward pass' results. All heads share k's rope columns."""

    def __init__(self, point: Point) -> None:
        import torch

        self.point = point
        rows, h = sum(point.lens), point.heads
        generator = torch.Generator(device="cuda").manual_seed(0)
        make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=generator)
        self.q, self.k, self.v, self.d_out = (make(rows, h, width) for width in (QK_DIM, QK_DIM, V_DIM, V_DIM))
        self.k[..., NOPE_DIM:] = self.k[:, :1, NOPE_DIM:]
        offsets = torch.tensor([0, *itertools.accumulate(point.lens)], dtype=torch.int32, device="cuda")
        scales = torch.tensor([SCALE, 1.0], device="cuda")
        self.static = [offsets, offsets, scales]
        self.out, self.lse = self.forward()

    def forward(self) -> tuple[Any, Any]:
        """out and lse by our kernel."""
        import torch

        from tsmla_kernels.sm90.prefill.config import prefill_workspaces

        results = torch.empty_like(self.v), torch.empty(self.q.shape[:2], dtype=torch.float32, device="cuda")
        workspaces = allocate(prefill_workspaces(len(self.point.lens), multiprocessors()))
        launch(launcher(None), [self.q, self.k, self.v, *self.static, *results, *workspaces], results)()
        torch.cuda.synchronize()
        return results

    def ours(self, name: str) -> Callable[[], list[Any]]:
        """The gradients of q, k and v, or of q, kv and k_rope."""
        import torch

        from tsmla_kernels.sm90.prefill.backward.config import backward_workspaces

        config = MLA_PREFILL_BACKWARD.from_options(OPTIONS[name])
        inputs = [self.q, self.k, self.v]
        if config.rope_dim:
            kv = torch.cat([self.k[..., :NOPE_DIM], self.v], -1).contiguous()
            inputs = [self.q, kv, self.k[:, 0, NOPE_DIM:].contiguous()]
        gradients = [torch.empty_like(x) for x in inputs]
        rows, heads = self.lse.shape
        workspaces = backward_workspaces(config, len(self.point.lens), rows, rows, heads, multiprocessors())
        saved = [self.out, self.lse, self.d_out, torch.zeros_like(self.lse)]
        return launch(launcher(name), [*inputs, *self.static, *saved, *gradients, *allocate(workspaces)], gradients)

    def in_float64(self) -> list[Any]:
        """The gradients of q, k and v of one request, one head after another."""
        import torch

        q, k, v, d_out = (x.double() for x in (self.q, self.k, self.v, self.d_out))
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        hidden = torch.ones(len(q), len(q), dtype=torch.bool, device="cuda").triu(1)
        for h in range(self.point.heads):
            weights = torch.softmax((q[:, h] @ k[:, h].T * SCALE).masked_fill(hidden, -math.inf), -1)
            d_weights = d_out[:, h] @ v[:, h].T
            d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True)) * SCALE
            gradients[0][:, h] = d_scores @ k[:, h]
            gradients[1][:, h] = d_scores.T @ q[:, h]
            gradients[2][:, h] = weights.T @ d_out[:, h]
        return gradients

    def saved(self) -> Saved:
        """What the peers take."""
        tensors = (self.q, self.k, self.v, self.out, self.lse, self.d_out)
        return Saved(self.point.lens, SCALE, *tensors, self.static[0])

    def functions(self) -> dict[str, Callable[[], Any]]:
        """Ours, and every peer that runs this point."""
        import torch

        found: dict[str, Callable[[], Any]] = {name: self.ours(name) for name in OPTIONS}
        for name in NAMES.value.split("/") if NAMES.value else PEERS:
            try:
                run = PEERS[name](self.saved())
                run()
                torch.cuda.synchronize()
                found[name] = run
            except Exception as error:
                print(f"{name} failed at {self.point.name}: {type(error).__name__}: {str(error)[:160]}", flush=True)
        return found


@functools.cache
def multiprocessors() -> int:
    import torch

    return torch.cuda.get_device_properties(0).multi_processor_count


@functools.cache
def launcher(name: str | None) -> Any:
    """That of the forward pass, or of one of OPTIONS."""
    from tsmla_kernels.launch import Launcher

    return Launcher(*kernel_and_config(name), ARCH)


def kernel_and_config(name: str | None) -> tuple[Any, Any]:
    if name is None:
        return MLA_PREFILL, MLA_PREFILL.from_options({})
    return MLA_PREFILL_BACKWARD, MLA_PREFILL_BACKWARD.from_options(OPTIONS[name])


def measured_errors() -> dict[str, list[float]]:
    """Relative errors of every peer's gradients of q, k and v at CHECKED."""
    inputs = Inputs(CHECKED)
    d_q, d_k, d_v = inputs.in_float64()
    found = {}
    for name, function in inputs.functions().items():
        if name == "tsmla_kv":
            got_q, d_kv, d_rope = function()
            got = [got_q, together(d_kv[..., :NOPE_DIM], d_rope), d_kv[..., NOPE_DIM:]]
            want = [d_q, together(d_k[..., :NOPE_DIM], d_k[..., NOPE_DIM:].sum(1)), d_v]
        else:
            got, want = as_torch(function()), [d_q, d_k, d_v]
        errors = [float((g.double() - w).norm() / w.norm()) for g, w in zip(got, want, strict=True)]
        found[name] = errors
        print(f"{CHECKED.name} {name:20s} relative errors " + " ".join(f"{error:.2e}" for error in errors), flush=True)
    return found


def together(nope: Any, rope: Any) -> Any:
    """The gradient of k without its rope columns, and that of the shared ones, as one vector."""
    import torch

    return torch.cat([nope.flatten(), rope.flatten()])


def seconds_on_torchs_stream(function: Callable[[], Any], calls: int) -> float:
    """What a number of calls take, by CUDA events, after one."""
    import torch

    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    function()
    start.record()
    for _ in range(calls):
        function()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def seconds_in_jax(function: Callable[[], Any], calls: int) -> float:
    """What a number of calls take, by the host's clock, after as many: jax's memory grows with the calls in flight."""
    import jax

    def several() -> None:
        for _ in range(calls):
            results = function()
        jax.block_until_ready(results)

    several()
    begun = time.perf_counter()
    several()
    return time.perf_counter() - begun


def time_in_turns(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median microseconds a call of each, over ROUNDS turns of TURN_MS."""
    clocks = {name: seconds_in_jax if name in IN_JAX else seconds_on_torchs_stream for name in functions}
    calls = {
        name: max(2, round(TURN_MS / 1e3 / clocks[name](function, 1))) for name, function in functions.items()
    }
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _, (name, function) in itertools.product(range(ROUNDS.value), functions.items()):
        times[name].append(clocks[name](function, calls[name]) / calls[name])
    return {name: statistics.median(each) * 1e6 for name, each in times.items()}


def print_means(times: dict[str, dict[str, float]]) -> None:
    """Ours over each peer's and over the best one's, and the other modes over ours, over the points that both ran."""
    best = {point: {"best peer": min(us for name, us in row.items() if name in FAST)} for point, row in times.items()
            if FAST & row.keys()}  # fmt: skip
    rows = {point: row | best.get(point, {}) for point, row in times.items()}
    pairs = [("tsmla", peer) for peer in ("best peer", *PEERS)]
    pairs += [("tsmla_deterministic", peer) for peer in ("tsmla", *(name for name in PEERS if "deterministic" in name))]
    for ours, peer in (*pairs, ("tsmla_kv", "tsmla")):
        ratios = {point: row[ours] / row[peer] for point, row in rows.items() if {ours, peer} <= row.keys()}
        if ratios:
            worst = max(ratios, key=lambda point: ratios[point])
            mean = statistics.geometric_mean(ratios.values())
            print(f"{ours} over {peer}: {mean:.3f} in {len(ratios)} points; most {ratios[worst]:.3f}, {worst}")


def mode_of(name: str) -> str:
    if name == "tsmla_kv":
        return "kv and k_rope"
    return "deterministic" if name.endswith("deterministic") else "default"


def main(argv: list[str]) -> int:
    del argv
    points = {point.name: point for point in ALL}
    chosen = [points[name] for name in POINTS.value.split("/")] if POINTS.value else list(ALL)
    wanted = [kernel_and_config(name) for name in (None, *OPTIONS)]
    compile_all((kernel.name, config) for kernel, config in wanted)
    record = Record(dtype=DTYPE, head_dims=[QK_DIM, V_DIM], causal=True)
    errors = measured_errors() if ERRORS.value else {}
    times: dict[str, dict[str, float]] = {}
    for point in within_budget(chosen):
        times[point.name] = time_in_turns(Inputs(point).functions())
        for name, us in times[point.name].items():
            case = {"length": max(point.lens), "b": len(point.lens), "h": point.heads, "mode": mode_of(name)}
            rates = {"us": round(us, 2), "tflops": round(point.flops / us / 1e6, 1)}
            rounded = (float(f"{error:.3e}") for error in errors.get(name, ()))
            record.add(
                point=point.name,
                **case,
                peer=name,
                **rates,
                **dict(zip(("dq_err", "dk_err", "dv_err"), rounded, strict=False)),
            )
        print(
            f"{point.name:12s} "
            + "  ".join(f"{n} {us:8.1f} us {point.flops / us / 1e6:4.0f} T" for n, us in times[point.name].items()),
            flush=True,
        )
    print_means(times)
    return 0


if __name__ == "__main__":
    app.run(main)
