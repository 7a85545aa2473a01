"""What the benchmarks of kernels share: how functions on one GPU are timed, and which versions ran."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable
from typing import Any


def time_all(functions: dict[str, Callable[[], Any]], iterations: int) -> dict[str, float]:
    """Median microseconds of each: CUDA-graph replays, interleaved in rotating order, the L2 cache flushed before each.

    The order rotates because at the power limit it matters what ran before. The flush reads: one that writes leaves the
    cache full of lines that have yet to go to memory, and what is timed pays for them: 8 to 10 us over 150 MB of reads.
    """
    import torch

    flush = torch.zeros(64 << 20, dtype=torch.float32, device="cuda")
    stream = torch.cuda.Stream()
    graphs = {}
    for name, function in functions.items():
        with torch.cuda.stream(stream):
            for _ in range(2):
                function()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], stream=stream):
            function()
        graphs[name].replay()
    events: dict[str, list[Any]] = {name: [] for name in graphs}
    order = list(graphs)
    for i in range(iterations):
        for name in order[i % len(order) :] + order[: i % len(order)]:
            flush.amax()
            start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            graphs[name].replay()
            stop.record()
            events[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: sorted(a.elapsed_time(b) for a, b in pairs)[iterations // 2] * 1e3 for name, pairs in events.items()}


def least_seconds(function: Callable[[], Any], turns: int) -> float:
    """The shortest time on the host's clock of `function`, which waits for what it starts, after a call to warm up."""
    function()
    taken = []
    for _ in range(turns):
        begin = time.perf_counter()
        function()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def head() -> str:
    """The commit that is checked out, abbreviated."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def versions() -> dict[str, str]:
    from importlib import metadata

    found = {"python": platform.python_version()}
    for name in ("torch", "jax", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl", "flash_attn"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
