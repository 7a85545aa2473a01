"""`tsmla compile` and `tsmla cache`: filling the cache of compiled kernels ahead of use, and maintaining it.

Neither needs a GPU, jax or torch.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib.util
import json
import multiprocessing
import os
import signal
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

from tsmla_kernels import object_cache
from tsmla_kernels.catalog import CHAINS, KERNELS
from tsmla_kernels.cli.parsing import read_text
from tsmla_kernels.compile import CompiledObject
from tsmla_kernels.kernel import Chain, Config, Kernel
from tsmla_kernels.resources import resource_report

_BAR_WIDTH = 24


class Wanted(NamedTuple):
    """A compiled object, named by its kernel, configuration and architecture.

    `tsmla cache list --json` prints these three, and `tsmla compile --list` reads them."""

    kernel: Kernel
    config: Config
    arch: str


# ---- tsmla compile


def add_compile_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tsmla compile`."""
    presets = _presets(list(_named().values()))
    archs = list(dict.fromkeys(arch for kernel in KERNELS.values() for arch in kernel.archs))
    parser.add_argument(
        "--arch",
        help=f"architecture to compile for, one of {', '.join(archs)} (default: CUTE_DSL_ARCH, else {archs[0]}; with"
        " --list every line's own)",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--config",
        action="append",
        metavar="PRESET|NAME=VALUE[,NAME=VALUE...]",
        help=f"what to compile: a preset ({', '.join(presets)}), options, or a preset followed by options, as in"
        " deepseek-v3,tensor_parallel=8,max_q_len=2; may be repeated",
    )
    what.add_argument(
        "--list",
        type=Path,
        metavar="FILE",
        help="compile what its lines name, which `tsmla cache list --json` printed, here or elsewhere, of any version",
    )
    parser.add_argument(
        "--kernel",
        action="append",
        choices=sorted(_named()),
        metavar="KERNEL",
        help="compile this kernel alone, with options that others may not know (default: every one for the"
        f" architecture), one of {', '.join(sorted(KERNELS))}; or {', '.join(CHAINS)}: the kernels that a call of it"
        " launches; may be repeated",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="processes to compile in (default: one a core, %(default)s)",
    )


def run_compile(args: argparse.Namespace) -> int:
    """Compile the kernels that the cache lacks. Returns 1 if one doesn't compile or can't be stored, or if a line of
    --list is not legal; ValueError for an illegal config or architecture, ModuleNotFoundError if something must be
    compiled and there is no CuTe DSL, ValueError or OSError for a directory that nothing can be stored in."""
    if args.jobs < 1:
        raise ValueError(f"--jobs: got {args.jobs}; legal: an int >= 1")
    illegal: list[str] = []
    wanted = _of_configs(args) if args.list is None else _of_list(args, illegal)
    wanted = list(dict.fromkeys(wanted))
    missing = missing_of(wanted)
    if len(wanted) > len(missing):
        print(f"{len(wanted) - len(missing)} of {len(wanted)} in the cache already")
    failures = compile_all(missing, args.jobs)
    if wanted:
        archs = ", ".join(sorted({each.arch for each in wanted}))
        print(f"{len(missing) - failures} compiled for {archs} into {object_cache.directory()}")
    else:
        print("nothing to compile: --list has no line of this version for this --kernel and --arch")
    print(*illegal, sep="\n", end="\n" * bool(illegal), file=sys.stderr)
    return 1 if failures or illegal else 0


def missing_of(wanted: Sequence[Wanted]) -> list[Wanted]:
    """The objects that are not stored. If there are some, and none can be compiled, ModuleNotFoundError; or if none can
    be stored, and would be compiled in vain, ValueError or OSError."""
    unwritable: Exception | None = None
    try:
        object_cache.check_writable()
    except (OSError, ValueError) as e:
        unwritable = e
    missing = []
    for each in wanted:
        if not object_cache.is_stored(*each):
            if unwritable is not None:
                raise unwritable
            missing.append(each)
    if missing and importlib.util.find_spec("cutlass") is None:  # once, not for each of them
        raise ModuleNotFoundError("compiling needs the CuTe DSL, package nvidia-cutlass-dsl", name="cutlass")
    return missing


def _of_configs(args: argparse.Namespace) -> list[Wanted]:
    """The objects that every --config names, for one architecture."""
    variable = os.environ.get("CUTE_DSL_ARCH")
    arch = args.arch or variable or next(iter(KERNELS.values())).archs[0]
    kernels = _kernels(args.kernel, arch, "CUTE_DSL_ARCH" if variable and not args.arch else "--arch")
    return [Wanted(kernel, config, arch) for text in args.config for kernel, config in configs(text, kernels)]


def _of_list(args: argparse.Namespace, illegal: list[str]) -> list[Wanted]:
    """The objects that the lines of --list name. Lines that name no object of this version add their error to
    `illegal`."""
    kernels = _kernels(args.kernel, args.arch)
    return [
        wanted
        for wanted in listed(args.list, illegal)
        if any(wanted.kernel in each.kernels for each in kernels) and args.arch in (None, wanted.arch)
    ]


def listed(path: Path, illegal: list[str]) -> list[Wanted]:
    """The objects that the lines of a file name that --list gives; adds the other lines' errors to `illegal`.
    ValueError if the file can't be read or is empty."""
    found = []
    lines = read_text("--list", path).splitlines()
    if not lines:
        raise ValueError(f"--list {path}: is empty; legal: lines that `tsmla cache list --json` printed")
    for number, line in enumerate(lines, 1):
        try:
            found.append(wanted_of(line))
        except ValueError as e:
            illegal.append(f"--list {path}, line {number}: {e}")
    return found


def _named() -> dict[str, Kernel | Chain]:
    """The kernels and chains that --kernel may name, by name."""
    return {**KERNELS, **CHAINS}


def _presets(kernels: Sequence[Kernel | Chain]) -> list[str]:
    return sorted({name for kernel in kernels for name, _ in kernel.presets})


def _kernels(names: Sequence[str] | None, arch: str | None, source: str = "--arch") -> list[Kernel | Chain]:
    """The kernels of --kernel, or all, that can be compiled for an architecture, which comes from `source`; raises
    ValueError if there are none."""
    named = [_named()[name] for name in names or _named()]
    kernels = [kernel for kernel in named if arch is None or arch in kernel.archs]
    if not kernels:
        legal = dict.fromkeys(each for kernel in named for each in kernel.archs)
        raise ValueError(f"{source}: got {arch!r}; legal: {', '.join(legal)}")
    return kernels


def wanted_of(line: str) -> Wanted:
    """The object that a line of `tsmla cache list --json` names; ValueError if this version has none like it."""
    try:
        said = json.loads(line)
        name, arch, fields = said["kernel"], said["arch"], said["config"]
        if not isinstance(fields, dict):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"got {line!r:.400}; legal: a line that `tsmla cache list --json` printed") from None
    if not isinstance(name, str) or name not in KERNELS:
        raise ValueError(f"got kernel {name!r}; legal: {', '.join(KERNELS)}")
    kernel = KERNELS[name]
    if arch not in kernel.archs:
        raise ValueError(f"got arch {arch!r}; {name} is written for {', '.join(kernel.archs)}")
    return Wanted(kernel, kernel.config_from_fields(fields), arch)


def configs(text: str, kernels: Sequence[Kernel | Chain]) -> list[tuple[Kernel, Config]]:
    """The kernels and configs that one --config names, for each of `kernels` that know it."""
    first, *rest = text.split(",")
    preset, options = (None, [first, *rest]) if "=" in first else (first, rest)
    given = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or not name or not value:
            raise ValueError(f"--config: got {option!r} in {text!r}; legal: NAME=VALUE, after a preset or alone")
        given[name] = value
    found: list[tuple[Kernel, Config]] = []
    for kernel in kernels:
        of_preset = [dict(options) for name, options in kernel.presets if name == preset] if preset else [{}]
        for number, options_of in enumerate(of_preset):
            try:
                found += kernel.objects_for({**options_of, **given})
            except ValueError as error:
                if number:  # a second preset of this name, for another operation, which these options don't fit
                    continue
                raise ValueError(f"{error} (kernel {kernel.name}; --kernel names those to compile)") from None
    if not found:
        raise ValueError(f"--config: got preset {preset!r}; legal: {', '.join([*_presets(kernels), 'NAME=VALUE'])}")
    return found


def compile_all(missing: Sequence[Wanted], jobs: int) -> int:
    """Compile each in `jobs` processes, and show the progress. Returns how many failed. OSError if one of the processes
    is ended from outside."""
    failures = 0
    with _Progress(len(missing), sys.stderr) as progress:
        if jobs == 1 or len(missing) <= 1:
            for each in missing:
                failures += progress.done(_compile_one(*each))
            return failures
        # A new interpreter for each, because the DSL keeps state in its process and forking a started jax isn't safe.
        context = multiprocessing.get_context("spawn")
        with (
            _interruptible(),
            concurrent.futures.ProcessPoolExecutor(min(jobs, len(missing)), mp_context=context) as pool,
        ):
            try:
                with _children_ignore_interrupts():
                    pending = [pool.submit(_compile_one, *each) for each in missing]
                for future in concurrent.futures.as_completed(pending):
                    failures += progress.done(future.result())
            except KeyboardInterrupt:
                for child in multiprocessing.active_children():
                    child.terminate()
                raise
            except BrokenProcessPool:
                raise OSError(
                    "a process that compiled was ended, as the system does if memory runs out; fewer --jobs need less"
                    " memory, and what is stored already is not compiled again"
                ) from None
    return failures


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt inside: this process compiles nothing, and has children to end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _children_ignore_interrupts() -> Iterator[None]:
    """Processes started inside get no SIGINT, which a terminal sends to all: this process ends them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@dataclass(frozen=True)
class _Outcome:
    what: str
    seconds: float
    error: str | None
    resources: str = ""


def _compile_one(kernel: Kernel, config: Config, arch: str) -> _Outcome:
    start = time.perf_counter()
    error, resources = None, ""
    try:
        resources = _resources_of(object_cache.load_or_compile(kernel, config, arch))
        if not object_cache.is_stored(kernel, config, arch):
            error = f"compiled, and not stored in {object_cache.directory()}"
    except (RuntimeError, ModuleNotFoundError) as e:
        error = str(e)
    return _Outcome(f"{kernel.name} {kernel.config_json(config)}", time.perf_counter() - start, error, resources)


def _resources_of(compiled: CompiledObject) -> str:
    """A summary for those who change a kernel: registers of each device function, local memory, serialised WGMMA."""
    report = resource_report(compiled)
    registers = " and ".join(str(function.registers) for function in report.kernels)
    local = max((function.stack_bytes for function in report.kernels), default=0)
    return f"{registers} registers, {local} bytes of local memory" + ", WGMMA serialised" * bool(report.serialised)


class _Progress:
    """A line an object, and on a terminal a bar below them."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self.total, self.stream, self.count = total, stream, 0
        self.start = time.perf_counter()
        self.bar = stream.isatty()

    def __enter__(self) -> _Progress:
        if self.total and not self.bar:
            self.stream.write(f"compiling {self.total} kernel{'s' * (self.total > 1)}\n")
        self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar and self.total:
            self.stream.write("\n")

    def done(self, outcome: _Outcome) -> bool:
        """Show one more as finished; returns whether it failed."""
        self.count += 1
        failed = outcome.error is not None
        clear = "\r\x1b[K" if self.bar else ""
        said = f"failed: {outcome.error}" if failed else f"compiled in {outcome.seconds:.1f} s: {outcome.resources}"
        self.stream.write(f"{clear}[{self.count}/{self.total}] {outcome.what} {said}\n")
        self._draw()
        return failed

    def _draw(self) -> None:
        if self.bar and self.total:
            filled = _BAR_WIDTH * self.count // self.total
            elapsed = time.perf_counter() - self.start
            bar = "#" * filled + "." * (_BAR_WIDTH - filled)
            self.stream.write(f"\r\x1b[K[{bar}] {self.count}/{self.total} kernels, {elapsed:.0f} s")
            self.stream.flush()


# ---- tsmla cache


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tsmla cache`."""
    parser.add_argument(
        "action",
        nargs="?",
        default="list",
        choices=("list", "verify", "prune"),
        help="list the entries (default), verify their checksums, or prune those that are damaged or will not be used",
    )
    parser.add_argument(
        "--json", action="store_true", help="with list: a line of JSON an object, for `tsmla compile --list`"
    )
    parser.add_argument("--all", action="store_true", help="with prune: remove every entry")
    parser.add_argument(
        "--older-than", type=float, metavar="DAYS", help="with prune: also remove what was compiled DAYS ago or earlier"
    )


def run_cache(args: argparse.Namespace) -> int:
    """Returns 1 if verify finds a damaged entry, or prune can't remove one."""
    if args.action != "prune" and (args.all or args.older_than is not None):
        raise ValueError(f"--all, --older-than: got {args.action}; they go with prune")
    if args.json:
        if args.action != "list":
            raise ValueError(f"--json: got {args.action}; it goes with list")
        for line in _as_json(object_cache.entries()):
            print(line)
        return 0
    if args.action == "prune":
        if args.older_than is not None and not 0 <= args.older_than < float("inf"):
            raise ValueError(f"--older-than: got {args.older_than}; legal: a number of days, at least 0")
        done = object_cache.prune(everything=args.all, older_than_days=args.older_than)
        for entry in done.removed:
            print(f"{entry.path.name}: {entry.problem or 'removed as asked'}")
        for entry, reason in done.kept:
            print(f"{entry.path.name}: can't be removed: {reason}", file=sys.stderr)
        print(f"{len(done.removed)} entries, {_megabytes(sum(entry.size for entry in done.removed))} removed")
        return 1 if done.kept else 0
    prebuilt = object_cache.prebuilt_entries()
    entries = object_cache.entries()
    if args.action == "verify":
        entries += prebuilt
    damaged = [entry for entry in entries if not entry.description]
    for entry in damaged if args.action == "verify" else entries:
        print(_line(entry))
    size = _megabytes(sum(entry.size for entry in entries))
    summary = f"{len(entries)} entries, {size} in {object_cache.directory()}"
    if args.action == "verify":
        summary += f"; {len(damaged)} damaged"
    print(summary)
    if prebuilt and args.action == "list":
        usable = sum(not entry.problem for entry in prebuilt)
        size, where = _megabytes(sum(entry.size for entry in prebuilt)), object_cache.prebuilt_directory()
        print(f"{len(prebuilt)} prebuilt objects, {usable} of them for this installation, {size} in {where}")
    programs = _sizes_of_files(object_cache.programs_directory()) if args.action == "list" else []
    if programs:
        size = _megabytes(sum(programs))
        print(f"{len(programs)} files of jax's compilation cache, {size} in {object_cache.programs_directory()}")
    return 1 if args.action == "verify" and damaged else 0


def _sizes_of_files(folder: Path) -> list[int]:
    """The sizes of the files in a folder, without those that another process removes meanwhile; none if the folder
    can't be read."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                status = entry.stat()
                if stat.S_ISREG(status.st_mode):
                    found.append(status.st_size)
    return found


def _as_json(entries: Sequence[object_cache.Entry]) -> list[str]:
    """A line of JSON for each kernel, config and architecture in undamaged entries of any version, sorted."""
    found = set()
    for said in (entry.description for entry in entries if entry.description):
        config = json.loads(said["config"])
        found.add(json.dumps({"kernel": said["kernel"], "arch": said["arch"], "config": config}))
    return sorted(found)


def _line(entry: object_cache.Entry) -> str:
    said = entry.description
    if not said:
        return f"{entry.path.name}: damaged: {entry.problem}"
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(said["created"]))
    state = f", unused: {entry.problem}" if entry.problem else ""
    return (
        f"{said['kernel']} {said['arch']} {said['config']}: {_megabytes(entry.size)}, DSL {said['dsl']}, {made},"
        f" compiled in {said['seconds']:.1f} s{state}"
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB"
