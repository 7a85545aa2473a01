"""Common parts of the benchmarks: flags, cases, timing on one GPU, and recording."""

from __future__ import annotations

import concurrent.futures
import datetime
import json
import math
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from absl import flags

from benchmarks import peers

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory beside jax
OUT = flags.DEFINE_string("out", None, "where the rows go")
POINTS = flags.DEFINE_string("points", None, "points separated by /, instead of all")
SECONDS = flags.DEFINE_float("seconds", 540.0, "start no points after this long; run.py ends the one under way")
COMMIT = flags.DEFINE_string("commit", None, "recorded with the rows; git's by default")
COMPILE_ONLY = flags.DEFINE_bool("compile_only", False, "compile what the points need, and end")

ARCH, OURS = "sm_90a", "tsmla"
HEAD = ["git", "rev-parse", "--short", "HEAD"]
PACKAGES = (
    "torch", "jax", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl", "flash_attn", "flash-attn-4",
    "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend",
)  # fmt: skip
FIRST_PATIENCE = 180  # the least patience, in seconds, for a process' first word, which comes after imports and inputs
PLACES = {"--out": "FILE", "--peers": "DIR", "--checkpoints": "WEIGHTS", "--compare": "FILE",
          "--compilation_cache": "DIR", "--profile": "DIR"}  # fmt: skip
"""Flags whose values are paths, and the word that a recorded command has in the place of each path."""

Run = Callable[[], Any]
# an operation, and the options of `tsmla compile --config` for what a call loads
Object = tuple[str, Mapping[str, Any]]


class Case:
    """A benchmark of one operation at one point; its subclasses hold the operands and say what is timed.

    Attributes:
      points: all that are measured by default, tuples of plain values or names.
      common: fields of all rows.
      peers: the names of the peers that may run, and the library of `benchmarks.peers` that each needs.
      read: if points are names, the function that reads one; ValueError if there is no such point.
      point: the point of this object.
      iterations: replays of each function.
      patience: seconds without a word after which the process of the points is ended; before its first word at least
        FIRST_PATIENCE.
    """

    points: ClassVar[tuple[Any, ...]] = ()
    common: ClassVar[dict[str, Any]] = {}
    peers: ClassVar[Mapping[str, str]] = {}
    read: ClassVar[Callable[[str], Any] | None] = None
    iterations = 20
    patience = 40

    def __init__(self, point: Any) -> None:
        self.point = point

    @classmethod
    def parse(cls, text: str) -> Any:
        """The point of a text: the name itself, or values separated by commas.

        Raises:
          ValueError: `text` is no point; the message says what is legal.
        """
        if cls.read is not None:
            cls.read(text)
            return text
        like = cls.points[0]
        values = text.split(",")
        try:
            point = [type(each)(value) for each, value in zip(like, values, strict=True)]
        except ValueError as error:
            raise ValueError(f"--points: got {text!r}; legal: like {cls.text(like)}") from error
        return like._make(point) if hasattr(like, "_make") else tuple(point)

    @staticmethod
    def text(point: Any) -> str:
        """The text of a point, from which `parse` makes the point again."""
        return point if isinstance(point, str) else ",".join(map(str, point))

    @classmethod
    def objects(cls, point: Any) -> Iterable[Object]:
        """Calls whose kernels are compiled before a point's clock runs, or by --compile_only: operations and their
        options. Kernels of other calls are compiled when the point runs."""
        return ()

    @classmethod
    def best_peer(cls, us: Mapping[str, float]) -> float | None:
        """The time that a run's summary compares ours with, from a point's times by name: the least of the peers'; None
        if there is none."""
        return min((us[name] for name in cls.peers if name in us), default=None)

    def ours(self) -> dict[str, Run]:
        """Our functions, by the names of their rows; the first is `OURS`."""
        raise NotImplementedError

    def of_peer(self, name: str) -> Run:
        """A peer's function. An exception leaves the peer out, but an error of CUDA ends the process."""
        raise NotImplementedError

    def floor_us(self, name: str) -> float:
        """The microseconds that the point's bytes or operations take at the rates of `floors`, which were measured; 0
        if the record has no such time."""
        return 0.0

    def row(self, name: str, us: float, results: Any) -> dict[str, Any]:
        """The fields of a function's row, beside `common`, its name, its time and its floor."""
        raise NotImplementedError

    def time(self, functions: dict[str, Run]) -> dict[str, float]:
        """Microseconds of each function, by name."""
        return time_all(functions, self.iterations)

    def rows(self, skipped: set[tuple[str, Any]], hear: Callable[[str], None]) -> list[dict[str, Any]]:
        """The rows of the point. `hear` is told `OURS` before our functions are made, and each peer's name before that
        peer's function is made."""
        functions: dict[str, Run] = {}
        hear(OURS)
        for name, run in self.ours().items():
            run()
            functions[name] = run
        for name, library in self.peers.items():
            if (name, self.point) not in skipped and peers.why_not(library) is None:
                hear(name)
                if (started := self.started(name)) is not None:
                    functions[name] = started
        rows = []
        for name, us in self.time(functions).items():
            results = functions[name]()
            synchronize()
            floor = {"floor_us": round(self.floor_us(name), 2)} if self.floor_us(name) else {}
            rows.append({**self.row(name, us, results), **floor, "peer": name, "us": round(us, 2)})
        return rows

    def started(self, name: str) -> Run | None:
        """A peer's function after a first run; None if it failed. An error of CUDA ends the process."""
        try:
            peers.load(self.peers[name])
            run = self.of_peer(name)
            run()
            synchronize()
            return run
        except Exception as error:
            if "CUDA error" in str(error):
                raise
            print(f"{name} failed at {self.text(self.point)}: {type(error).__name__}: {str(error)[:120]}", flush=True)
            return None


class Errors:
    """Errors against float64 over rows that are added: rel_err of out (norm of the difference over norm) and, if their
    lse is given, lse_err, its greatest difference."""

    def __init__(self) -> None:
        self.differs, self.norm, self.worst = 0.0, 0.0, None

    def add(self, out: Any, lse: Any, scores: Any, values: Any, sinks: Any = None) -> None:
        """Add rows [..., n, V], and their lse [..., n] or None, of attention with scaled scores [..., n, N] over values
        [..., N, V], both float64. `sinks` [n] take weight in `out` and are not in `lse`."""
        want_lse = scores.logsumexp(-1)
        want = scores.softmax(-1) @ values
        if sinks is not None:
            want *= (want_lse - sinks.double()).sigmoid()[..., None]
        self.differs += float((out.double() - want).square().sum())
        self.norm += float(want.square().sum())
        if lse is not None:
            self.worst = max(self.worst or 0.0, float((lse.double() - want_lse).abs().max()))

    def fields(self) -> dict[str, float]:
        found = {"rel_err": float(f"{math.sqrt(self.differs / self.norm):.3e}")}
        return found if self.worst is None else found | {"lse_err": float(f"{self.worst:.2e}")}


# ---- the device


def device() -> str:
    """The device of the operands: "cuda", or "cpu" without a GPU, where ours are the reference implementations."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def randn(*shape: int, dtype: str = "bfloat16") -> Any:
    """Random normal numbers on the device."""
    return torch.randn(shape, device=device()).to(getattr(torch, dtype))


def ints(values: Any) -> Any:
    """An int32 tensor on the device."""
    return torch.as_tensor(values, dtype=torch.int32, device=device())


def time_all(functions: dict[str, Run], iterations: int) -> dict[str, float]:
    """Median microseconds of each function: CUDA-graph replays, interleaved in rotating order, with the L2 cache
    flushed before each replay.

    The order rotates because at the power limit it matters what ran before. The flush reads: a flush that writes leaves
    the cache full of lines that have yet to go to memory, which adds 8 to 10 us to a function that reads 150 MB.
    """
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
            share_scales(stream.cuda_stream)
            function()
        graphs[name].replay()
    events: dict[str, list[Any]] = {name: [] for name in graphs}
    order = list(graphs)
    for i in range(iterations):
        for name in order[i % len(order) :] + order[: i % len(order)]:
            flush.amax()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[name].replay()
            stop.record()
            events[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: sorted(a.elapsed_time(b) for a, b in pairs)[iterations // 2] * 1e3 for name, pairs in events.items()}


def share_scales(stream: int) -> None:
    """Let the capture on a stream use the scales that our calls on that stream have written, as in the graph of a model
    all layers use the scales that the first one wrote. Otherwise a graph of one call would write them at every replay,
    and its time would include that."""
    from tsmla_bridge.runtime import devices, scales

    index, capture = torch.cuda.current_device(), devices.capture_id(stream)
    if capture is not None:
        scales._of_capture[index, stream] = (capture, {**scales._of_stream.get((index, stream), {})})


def least_seconds(function: Run, turns: int) -> float:
    """The shortest of `turns` times of `function` on the host's clock, after a call to warm up. The function waits for
    what it starts."""
    function()
    return min(timeit.repeat(function, number=1, repeat=turns))


# ---- points


def in_processes(
    measure: Callable[..., None], points: list[Any], skipped: set[tuple[str, Any]], patience: float = 40
) -> Iterator[tuple[Any, Any]]:
    """The points and their rows, until --seconds are over. The points run in a process; if it ends or hangs, another
    one runs the points left.

    measure(points, skipped, said, argv) runs in a process of its own and puts what `Case.rows` tells `hear` into
    `said`, a pipe's end, as ("at", name, point), and ("rows", point, rows) after each point.

    Raises:
      RuntimeError: a process ended or hung, and the last name that it had said was ours, or it had said none.
    """
    spawn = multiprocessing.get_context("spawn")
    left, end = list(points), time.monotonic() + SECONDS.value
    while left and time.monotonic() < end:
        heard_from, said = spawn.Pipe(duplex=False)
        process = spawn.Process(target=measure, args=(left, skipped, said, sys.argv), daemon=True)
        process.start()
        said.close()  # the child's is then the only open one, so that its end is seen here
        at, heard, wait = None, time.monotonic(), max(FIRST_PATIENCE, patience)
        while left and time.monotonic() < end:
            if not heard_from.poll(1):
                if time.monotonic() < heard + wait:
                    continue
                break
            try:
                kind, *rest = heard_from.recv()
            except EOFError:
                break
            heard, wait = time.monotonic(), patience
            if kind == "rows":
                left.remove(rest[0])
                yield rest[0], rest[1]
            else:
                at = (rest[0], rest[1])
        process.kill()
        process.join()
        if left and time.monotonic() < end:
            if at is None or at[0].startswith(OURS):
                place = "before its first call" if at is None else f"at {at}"
                raise RuntimeError(f"the process ended or hung {place}, where no peer's code ran")
            print(f"{at[0]} ended its process at {at[1]}", flush=True)
            skipped = skipped | {at}


# ---- compiling ahead


def compile_all(wanted: Iterable[Object]) -> None:
    """Compile what these calls load, in up to one process per core: before the clock runs, or with --compile_only on
    another machine, without a GPU. If TSMLA_CACHE_DIR names a folder, the objects go there, and a run elsewhere finds
    them in a copy of it. With --compile_only the program ends then."""
    from tsmla_kernels import catalog, object_cache

    known = catalog.KERNELS | catalog.CHAINS
    texts = [(name, {key: str(x).lower() if isinstance(x, bool) else str(x) for key, x in options.items()})
             for name, options in wanted]  # fmt: skip
    found = [known[name].objects_for(options) for name, options in texts]
    pairs = list(dict.fromkeys((kernel.name, config) for objects in found for kernel, config in objects))
    missing = [pair for pair in pairs if not object_cache.is_stored(catalog.KERNELS[pair[0]], pair[1], ARCH)]
    if missing:
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(min(len(missing), os.cpu_count() or 1), spawn) as pool:
            list(pool.map(_compile_one, missing))
    if COMPILE_ONLY.value:
        print(f"{len(pairs)} objects in {object_cache.directory()}, {len(missing)} of them new")
        sys.exit(0)


def _compile_one(wanted: tuple[str, Any]) -> None:
    from tsmla_kernels import object_cache
    from tsmla_kernels.catalog import KERNELS

    name, config = wanted
    object_cache.load_or_compile(KERNELS[name], config, ARCH)


# ---- recording


class Record:
    """Rows of results. Each gets the fields `common` and the run's provenance, and is written to --out, if that is
    given, as soon as it is added."""

    def __init__(self, **common: Any) -> None:
        self.rows: list[dict[str, Any]] = []
        self.common = common | {
            "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU",
            "commit": COMMIT.value or subprocess.run(HEAD, capture_output=True, text=True).stdout.strip(),
            "date": datetime.date.today().isoformat(),
            "versions": versions(),
            "command": command(sys.argv),
        }

    def add(self, **row: Any) -> None:
        self.rows.append(self.common | row)
        self.write()

    def write(self) -> None:
        """Write the rows as they are now; `add` does it by itself."""
        if OUT.value:
            with open(OUT.value, "w") as file:
                file.write("[\n" + ",\n".join(map(json.dumps, self.rows)) + "\n]\n")


def command(argv: list[str]) -> str:
    """The command of a run, to be given in a clone: words stand in the place of paths on this machine."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    said = " ".join(argv[1:])
    for name, place in PLACES.items():
        said = re.sub(rf"{name}[= ]\S+", f"{name} {place}", said)
    return f"python -m {module.name if module else 'benchmarks.run'} {said}".rstrip()


def versions() -> dict[str, str]:
    """Versions of Python, of those of PACKAGES that are installed here, and of the peers in --peers."""
    from importlib import metadata

    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | peers.versions()
