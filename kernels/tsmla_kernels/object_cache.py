"""Compiled objects on disk: the first process that asks for one compiles it, and all later ones load it.

An entry is one file, named by a hash of what its bytes depend on (`_identity`) and by the DSL's version. It carries a
description of itself and a checksum; a damaged entry is reported and compiled again, never loaded; nor is one that
another user can have written, for it is native code. Files are written under another name and then renamed, so a reader
sees all of an entry or nothing. With a warm cache nothing of the DSL is imported, and a machine that has only the DSL's
runtime can use entries that were compiled elsewhere.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tsmla_kernels import __version__, object_files
from tsmla_kernels.catalog import KERNELS
from tsmla_kernels.compile import CompiledObject, check_arch, compile_kernel
from tsmla_kernels.kernel import Config, Kernel
from tsmla_kernels.object_files import SUFFIX, DamagedEntry, UntrustedDirectory

# Read by the DSL when it generates code. CUTE_DSL_ARCH is not one of them: the architecture is an argument here.
_CODE_VARIABLES = tuple(
    f"CUTE_DSL_{name}"
    for name in (
        "DEBUG", "LINEINFO", "COMPILER_OPT", "COMPILER_BACKEND", "ENABLE_ASSERTIONS", "ENABLE_PYIR", "ENABLE_TVM_FFI",
        "AUTO_M2S", "LOC_TRACEBACKS", "DRYRUN",
    )
)  # fmt: skip
# The sources that turn any kernel into an object.
_COMPILER_SOURCES = ("tsmla_kernels.kernel", "tsmla_kernels.compile", "tsmla_kernels.entry")

PREBUILT = "tsmla_objects"
"""The package of objects that `tsmla wheel` made, if it is installed."""

_lock = threading.RLock()
_loaded: dict[str, CompiledObject] = {}


@dataclass(frozen=True)
class Entry:
    """One file of the cache.

    Attributes:
      path: the file. size: its bytes.
      description: kernel, config (JSON), arch, host, package, dsl, sources, environment, seconds, created, log, and
        made_of if the kernel is made of another package; empty if the file is damaged.
      problem: why no process of this installation will load the entry, None if a process may load it.
    """

    path: Path
    size: int
    description: dict[str, Any]
    problem: str | None


@dataclass(frozen=True)
class Pruned:
    """The result of `prune`.

    Attributes:
      removed: the entries that are gone.
      kept: the entries that should have been removed but could not be, each with the reason.
    """

    removed: list[Entry]
    kept: list[tuple[Entry, str]]


def directory() -> Path:
    """TSMLA_CACHE_DIR, else tsmla in the XDG cache directory, else ~/.cache/tsmla. It need not exist.

    If the name begins with ~ and there is no home directory (a container's user without an entry in passwd and without
    HOME), the result is a folder of this user's among the temporary files, with a warning."""
    named, base = os.environ.get("TSMLA_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    try:
        if named:
            return Path(named).expanduser()
        # The XDG specification: a path that is not absolute is ignored.
        return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "tsmla"
    except RuntimeError as e:
        place = Path(object_files.temporary_files(), f"tsmla-{os.geteuid()}")
        warnings.warn(
            f"tsmla: compiled kernels are kept in {place} ({e}); TSMLA_CACHE_DIR names another directory",
            RuntimeWarning,
            stacklevel=2,
        )
        return place


def make_directory(where: Path | None = None) -> None:
    """Make `directory()`, or `where`, if it doesn't exist; OSError if it can't be made. Only this user may write to it,
    or no kernel would be loaded from it. All users may read what root compiles, unless the umask forbids it."""
    place = directory() if where is None else where
    place.mkdir(parents=True, exist_ok=True, mode=0o755 if os.geteuid() == 0 else 0o700)


def prebuilt_directory() -> Path | None:
    """The folder of the package PREBUILT, None if it isn't installed. Imports nothing."""
    spec = importlib.util.find_spec(PREBUILT)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(places[0]) if places else None


def programs_directory() -> Path:
    """Where `tsmla generate` lets jax keep compiled programs, if nothing else names a place. It need not exist."""
    return directory() / "xla"


def load_or_compile(kernel: Kernel, config: Config, arch: str) -> CompiledObject:
    """The object of `kernel` for `config` and `arch`: from this process, from the user's folder, from the package
    PREBUILT, or compiled and stored.

    If several processes want the same object, one compiles it and the others wait. If the user's folder can't be
    written, each process compiles what is not stored; if others may write to it, what is not prebuilt. Both warn.

    Raises:
      ValueError: the kernel isn't written for `arch`.
      ModuleNotFoundError: it must be compiled and the CuTe DSL isn't installed.
      RuntimeError: the kernel doesn't compile.
    """
    check_arch(kernel, arch)
    identity = _identity(kernel, config, arch)
    path = _path(identity)
    with _lock:
        if (found := _loaded.get(str(path))) is None:
            try:
                object_files.check_directory(path.parent)
                found = _read_usable(path, identity) or _read_prebuilt(identity)
                found = found or _compile_once(kernel, config, arch, path, identity)
            except UntrustedDirectory as e:
                if (found := _read_prebuilt(identity)) is None:
                    warnings.warn(f"tsmla: compiling a kernel without its cache: {e}", RuntimeWarning, stacklevel=2)
                    found = compile_kernel(kernel, config, arch)
            _loaded[str(path)] = found
        return found


def is_stored(kernel: Kernel, config: Config, arch: str) -> bool:
    """Whether a sound entry is on disk already, the user's or a prebuilt one."""
    return stored(kernel, config, arch) is not None


def stored(kernel: Kernel, config: Config, arch: str) -> Path | None:
    """The file of a sound entry, the user's or else a prebuilt one; None if there is none."""
    check_arch(kernel, arch)
    identity = _identity(kernel, config, arch)
    for where in (directory(), prebuilt_directory()):
        if where is not None and not _why_untrusted(where):
            path = _path(identity, where)
            if _read_usable(path, identity) is not None:
                return path
    return None


def _why_untrusted(where: Path, *otherwise: str) -> str | None:
    """Why the files of a folder may be another user's code; None if they can't be. otherwise: as in check_directory."""
    try:
        object_files.check_directory(where, *otherwise)
    except UntrustedDirectory as e:
        return str(e)
    return None


def _read_prebuilt(identity: dict[str, Any]) -> CompiledObject | None:
    """The object in the package PREBUILT; None if there is none, with a warning if its folder can't be trusted."""
    where = prebuilt_directory()
    if where is None:
        return None
    if reason := _why_untrusted(where, ""):  # this folder is pip's
        warnings.warn(f"tsmla: ignoring prebuilt kernels: {reason}", RuntimeWarning, stacklevel=3)
        return None
    return _read_usable(_path(identity, where), identity)


def check_writable() -> None:
    """OSError or UntrustedDirectory if no entry can be stored, with the directory and the reason. Makes the directory
    if there is none."""
    where = directory()
    try:
        make_directory()
        with tempfile.TemporaryFile(dir=where):
            pass
    except OSError as e:
        raise OSError(
            f"the cache of compiled kernels {where} can't be written ({e.strerror or e}); TSMLA_CACHE_DIR names another"
            " directory"
        ) from None
    object_files.check_directory(where)


def why_not_kept() -> str | None:
    """Why processes of this user can't keep what they compile, None if they can. Makes nothing."""
    where = directory()
    if reason := _why_untrusted(where):
        return reason
    with contextlib.suppress(OSError):  # a name that is too long, or a folder that can't be searched
        existing = next((path for path in (where, *where.parents) if path.exists()), where)
        if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
            return None
    return f"the cache of compiled kernels {where} can't be written; TSMLA_CACHE_DIR names another directory"


def entries() -> list[Entry]:
    """Every entry of the cache, damaged ones included, by path.

    UntrustedDirectory if others may write into the cache's directory."""
    object_files.check_directory(directory())
    return _entries_of(_files(object_files.is_entry))


def prebuilt_entries() -> list[Entry]:
    """Every object of the package PREBUILT, by path; none if the package isn't installed."""
    if (where := prebuilt_directory()) is None:
        return []
    reason = _why_untrusted(where, "")
    found = _entries_of([path for path in object_files.in_directory(where) if object_files.is_entry(path.name)])
    return [replace(entry, problem=entry.problem or reason) for entry in found]


def _entries_of(paths: list[Path]) -> list[Entry]:
    found = []
    for path in paths:
        size = 0
        try:
            size = path.stat().st_size
            description, _ = object_files.read(path)
            problem = _staleness(description)
        except FileNotFoundError:
            continue  # another process has pruned it
        except (DamagedEntry, OSError) as e:
            description, problem = {}, str(e)
        found.append(Entry(path, size, description, problem))
    return found


def prune(*, everything: bool = False, older_than_days: float | None = None) -> Pruned:
    """Remove entries that will not be loaded any more, or those older than some days too, or all.

    Entries of another version of the package, its kernels or the DSL are removed too: an installation that still has
    that version compiles them again. Locks and half-written files go if they are older than an hour; all other files
    stay.

    Raises:
      ValueError: older_than_days is negative or not finite.
      UntrustedDirectory: others may write into the cache's directory.
    """
    if older_than_days is not None and not 0 <= older_than_days < float("inf"):
        raise ValueError(f"older_than_days: got {older_than_days}; legal: a number of days, at least 0")
    done = Pruned([], [])
    for entry in entries():
        age = time.time() - entry.description.get("created", 0)
        old = older_than_days is not None and age > older_than_days * 86400
        if everything or old or entry.problem:
            try:
                entry.path.unlink(missing_ok=True)
                done.removed.append(entry)
            except OSError as e:
                done.kept.append((entry, e.strerror or str(e)))
    # Files that a killed process left. A live process holds its files for minutes at most.
    for path in _files(object_files.is_leftover):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 3600:
                path.unlink()
    return done


# ---- the identity of an entry


def _identity(kernel: Kernel, config: Config, arch: str) -> dict[str, Any]:
    return {
        "kernel": kernel.name,
        "config": kernel.config_json(config),
        "arch": arch,
        "host": _host(),
        "package": __version__,
        "sources": sources_digest(kernel),
        "environment": {name: os.environ[name] for name in _CODE_VARIABLES if name in os.environ},
        **_made_of(kernel),
    }


def _made_of(kernel: Kernel) -> dict[str, str]:
    """The version of the package whose code the objects hold, for kernels that are made of one."""
    package = kernel.package
    return {} if package is None else {"made_of": f"{package.distribution} {package.version}"}


def _path(identity: dict[str, Any], where: Path | None = None) -> Path:
    """The file of an entry in a folder, by default the user's."""
    where = directory() if where is None else where
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    # The DSL's version is in the name, not in the digest, so that a machine without the DSL finds the entry.
    stem = f"{identity['kernel']}-{identity['arch']}-{digest}"
    if (version := dsl_version()) is not None:
        return where / f"{stem}-dsl{version}{SUFFIX}"
    known = sorted(where.glob(f"{stem}-dsl*{SUFFIX}"), key=_natural)
    return known[-1] if known else where / f"{stem}-dsl-none{SUFFIX}"


def _natural(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name.rpartition("-dsl")[2])]


@functools.cache
def dsl_version() -> str | None:
    """The installed CuTe DSL's version, without importing it; None if it isn't installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("nvidia-cutlass-dsl")
    # Unpacked without metadata: the version is in the package's source.
    spec = importlib.util.find_spec("cutlass")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).read_text()
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    return found.group(1) if found else None


@functools.cache
def _host() -> str:
    return f"{platform.system()} {platform.machine()} {platform.libc_ver()[0] or 'unknown libc'}".lower()


@functools.cache
def sources_digest(kernel: Kernel) -> str:
    """A hash of the sources of a kernel's launcher, of all that it imports from its own package, of the kernel's record
    and of what compiles it. Imports none of them."""
    module = kernel.launcher.partition(":")[0]
    pending, files = [module], {}
    while pending:
        name = pending.pop()
        spec = _find_spec(name)
        if spec is None and name == module:
            raise ModuleNotFoundError(f"No module named {module!r}, which a kernel is made of", name=module)
        if name not in files and spec is not None and spec.origin is not None:
            files[name] = Path(spec.origin).read_bytes()
            pending += _imports(files[name], module.partition(".")[0])
    # The record imports how a config is chosen, which makes no difference: the config is in the identity itself.
    for name in (kernel.operands.__module__, *_COMPILER_SOURCES):
        if (spec := _find_spec(name)) is not None and spec.origin is not None:
            files[name] = Path(spec.origin).read_bytes()
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])}\n".encode())
        digest.update(files[name])
    return digest.hexdigest()


def _imports(source: bytes, package: str) -> list[str]:
    """Names from `package` that a source imports at its top level, some of them attributes and not modules. An import
    under TYPE_CHECKING makes no code."""
    found = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import):
            found += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            found += [statement.module, *(f"{statement.module}.{alias.name}" for alias in statement.names)]
    return [name for name in found if name.partition(".")[0] == package]


def _find_spec(name: str) -> Any:
    """The spec of a module, None if there is no such module. importlib.util.find_spec would import the parent, and so
    cutlass where the name is an attribute of a kernel's module."""
    top, *names = name.split(".")
    spec = importlib.util.find_spec(top)
    for part in names:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec


def _staleness(description: dict[str, Any]) -> str | None:
    """Why this installation will never load the entry that has this description; None if it may load it."""
    if description["host"] != _host():
        return f"for a {description['host']} host; this one is {_host()}"
    if description["package"] != __version__:
        return f"of version {description['package']}; this is {__version__}"
    if dsl_version() not in (None, description["dsl"]):
        return f"made by CuTe DSL {description['dsl']}; installed is {dsl_version()}"
    kernel = KERNELS.get(description["kernel"])
    if kernel is not None and description["sources"] != sources_digest(kernel):
        return "its kernel's sources have changed"
    if kernel is not None and (made_of := _made_of(kernel)) and description.get("made_of") != made_of["made_of"]:
        return f"made of {description.get('made_of')}; this installation wants {made_of['made_of']}"
    return None


# ---- files


def _compile_once(kernel: Kernel, config: Config, arch: str, path: Path, identity: dict[str, Any]) -> CompiledObject:
    with _only_process(path):
        # The process that held the lock before has probably stored the object.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _read_usable(path, identity)
        if found is None:
            found = compile_kernel(kernel, config, arch)
            # The version that the DSL itself reports.
            path = path.with_name(f"{path.name.rpartition('-dsl')[0]}-dsl{found.dsl}{SUFFIX}")
            _store(path, identity, found)
    return found


def _store(path: Path, identity: dict[str, Any], compiled: CompiledObject) -> None:
    description = {
        **identity,
        "dsl": compiled.dsl,
        "seconds": round(compiled.seconds, 3),
        "created": time.time(),
        "log": compiled.log,
    }
    content = object_files.pack(description, compiled.module)
    try:
        make_directory(path.parent)
        descriptor, temporary = tempfile.mkstemp(
            prefix=object_files.TEMPORARY_PREFIX, suffix=object_files.TEMPORARY_SUFFIX, dir=path.parent
        )
        try:
            with os.fdopen(descriptor, "wb") as file:
                with contextlib.suppress(OSError):  # a file system without modes
                    os.fchmod(descriptor, 0o600 | path.parent.stat().st_mode & 0o044)  # the folder's readers read it
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as e:
        warnings.warn(
            f"tsmla: the compiled {compiled.kernel} can't be stored in {path.parent} ({e}): every process will compile"
            " it again; TSMLA_CACHE_DIR names another directory",
            RuntimeWarning,
            stacklevel=2,
        )


def _read_usable(path: Path, identity: dict[str, Any]) -> CompiledObject | None:
    """The object at `path`. None if it can't be used, with a warning if the file exists."""
    try:
        description, module = object_files.read(path)
        if different := [name for name, value in identity.items() if description.get(name) != value]:
            raise DamagedEntry(f"{path.name} describes another object: {', '.join(different)}")
        fields = ("kernel", "config", "arch", "dsl", "seconds", "log")
        return CompiledObject(module=module, **{name: description[name] for name in fields})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (DamagedEntry, OSError) as e:
        warnings.warn(
            f"tsmla: ignoring a cached kernel and compiling it again: {e} (in {path.parent})",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def _files(is_ours: Callable[[str], bool]) -> list[Path]:
    return [path for path in object_files.in_directory(directory()) if is_ours(path.name)]


@contextlib.contextmanager
def _only_process(path: Path) -> Iterator[None]:
    """Hold the lock beside `path`. On file systems without locks several processes may compile the same object: each
    stores a right one, and the last stays."""
    import fcntl

    lock = path.with_name(path.name + object_files.LOCK_SUFFIX)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a directory that can't be written has nothing to protect
            make_directory(lock.parent)
            file = stack.enter_context(open(lock, "ab"))
            stack.callback(_unlink, lock)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unlink(lock: Path) -> None:
    """Remove a lock. Later processes find the entry and need no lock; those that wait have the file open already."""
    with contextlib.suppress(OSError):
        lock.unlink()
