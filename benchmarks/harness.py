"""What the benchmarks of kernels share: their flags, launching, timing on one GPU, and recording."""

from __future__ import annotations

import datetime
import importlib
import json
import math
import multiprocessing
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import flags

PEERS = flags.DEFINE_string("peers", None, "folder of the module of peers, and of versions.json: their versions")
OUT = flags.DEFINE_string("out", None, "where the rows go")
POINTS = flags.DEFINE_string("points", None, "points separated by /, instead of all")
SECONDS = flags.DEFINE_float("seconds", 540.0, "stop starting points after this long")
COMMIT = flags.DEFINE_string("commit", None, "recorded with the rows; git's by default")
JIT = flags.DEFINE_bool("jit", False, "time ours through jax.jit too")

ARCH = "sm_90a"
OURS = "tsmla"
PACKAGES = (
    "torch", "jax", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl", "flash_attn", "flash-attn-4",
    "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
)  # fmt: skip
PATIENCE = 40  # seconds without a word after which a process is ended
FIRST_PATIENCE = 180  # before its first word, which follows imports, peers' libraries and inputs
Point = TypeVar("Point")


def load_peers(name: str = "peers", *which: Any) -> tuple[Any, Any]:
    """The module `name` of the folder that --peers names and what its `load(*which)` returns; (None, ()) without
    one."""
    if not PEERS.value:
        return None, ()
    sys.path.insert(0, PEERS.value)
    peers = importlib.import_module(name)
    return peers, peers.load(*which)


def has_fa4() -> bool:
    """Whether FlashAttention-4 (flash_attn.cute) can be imported."""
    try:
        importlib.import_module("flash_attn.cute.interface")
    except ImportError:
        return False
    return True


def within_budget(points: Iterable[Point]) -> Iterator[Point]:
    """The points in turn, until --seconds have passed; torch's memory is given back after each."""
    import torch

    begun = time.monotonic()
    for point in points:
        if time.monotonic() - begun > SECONDS.value:
            print(f"stopped after {SECONDS.value:.0f} s, before {point}")
            return
        yield point
        torch.cuda.empty_cache()


def launch(launcher: Any, tensors: list[Any], results: Any) -> Callable[[], Any]:
    """A function that launches a compiled object (a tsmla_kernels.launch.Launcher) on `tensors`, on torch's current
    stream, and returns `results`. It keeps the tensors alive."""
    import torch

    from tsmla_kernels.launch import ArrayView

    views = [ArrayView(t.data_ptr(), tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors]

    def run() -> Any:
        launcher(torch.cuda.current_stream().cuda_stream, views)
        return results

    run.keep = tensors  # type: ignore[attr-defined]
    return run


def allocate(shapes: dict[str, tuple[tuple[int, ...], str]]) -> list[Any]:
    """Uninitialised workspaces of these shapes and dtypes on the GPU."""
    import torch

    return [torch.empty(shape, dtype=getattr(torch, dtype), device="cuda") for shape, dtype in shapes.values()]


def started(
    makers: dict[str, Callable[[], Callable[[], Any]]], point: Any, skipped: set[tuple[str, Any]], said: Any
) -> dict[str, Callable[[], Any]]:
    """The functions that `makers` make, by name, without those that fail at their first run; ours may not.

    Puts ("at", name, point) into `said`, a pipe's end, before each one's first run, as in_processes wants to hear."""
    import torch

    functions = {}
    for name, make in makers.items():
        if (name, point) in skipped:
            continue
        said.send(("at", name, point))
        try:
            run = make()
            run()
            torch.cuda.synchronize()
            time_all({name: run}, 1)
            functions[name] = run
        except Exception as error:
            if "CUDA" in str(error) or name == OURS:
                raise  # nothing runs in this process any more
            print(f"{name} failed at {tuple(point)}: {type(error).__name__}: {str(error)[:120]}", flush=True)
    return functions


def in_processes(
    measure: Callable[..., None], points: list[Point], skipped: set[tuple[str, Point]]
) -> Iterator[tuple[Point, Any]]:
    """The points and their rows; a process that ends or hangs is followed by another one for the points left.

    measure(points, skipped, said, argv) runs in a process of its own and puts ("rows", point, rows) into `said`."""
    spawn = multiprocessing.get_context("spawn")
    left, end = list(points), time.monotonic() + SECONDS.value
    while left and time.monotonic() < end:
        heard_from, said = spawn.Pipe(duplex=False)
        process = spawn.Process(target=measure, args=(left, skipped, said, sys.argv), daemon=True)
        process.start()
        said.close()  # the child's is then the only one, and its end is seen here
        at, heard, patience = None, time.monotonic(), FIRST_PATIENCE
        while left and time.monotonic() < end:
            if not heard_from.poll(1):
                if time.monotonic() < heard + patience:
                    continue
                break
            try:
                kind, *rest = heard_from.recv()
            except EOFError:
                break
            heard, patience = time.monotonic(), PATIENCE
            if kind == "rows":
                left.remove(rest[0])
                yield rest[0], rest[1]
            else:
                at = (rest[0], rest[1])
        process.kill()
        process.join()
        if left and time.monotonic() < end:
            if at is None or at[0] == OURS:
                raise RuntimeError(f"the process ended at {at}; nothing of a peer's ran there")
            print(f"{at[0]} ended its process at {tuple(at[1])}", flush=True)
            skipped = skipped | {at}


class Record:
    """Rows of results, written to --out as they come; `common` and the run's provenance go into each of them."""

    def __init__(self, **common: Any) -> None:
        import torch

        self.rows: list[dict[str, Any]] = []
        self.common = common | {
            "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU",
            "commit": COMMIT.value or head(),
            "date": datetime.date.today().isoformat(),
            "versions": versions(),
            "command": "python3 " + " ".join(sys.argv),
        }

    def add(self, **row: Any) -> None:
        self.rows.append(self.common | row)
        if OUT.value:
            with open(OUT.value, "w") as file:
                file.write("[\n" + ",\n".join(map(json.dumps, self.rows)) + "\n]\n")


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


def print_ratios(ratios: Mapping[str, Sequence[float]]) -> None:
    """A line for each list of ratios of times: its geometric mean and its worst. Left out are empty lists, and those
    with a NaN for a peer that did not run."""
    for name, found in ratios.items():
        if found and not math.isnan(sum(found)):
            mean = statistics.geometric_mean(found)
            print(f"{name}: geometric mean of {len(found)} points {mean:.3f}, worst {max(found):.3f}")


def head() -> str:
    """The commit that is checked out, abbreviated."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def versions() -> dict[str, str]:
    """Of the packages that are installed here, and those that versions.json in the folder of the peers names."""
    from importlib import metadata

    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    path = Path(PEERS.value or ".") / "versions.json"
    return found | (json.loads(path.read_text()) if PEERS.value and path.exists() else {})
