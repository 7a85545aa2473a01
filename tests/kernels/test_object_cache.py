"""The cache on disk: stored objects are found again, damaged ones are never loaded, and processes share the work."""

import dataclasses
import hashlib
import json
import os
import pwd
import re
import stat
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.emulator.standin import SCALE, ScaleConfig
from tsmla_kernels import __version__, object_cache, object_files
from tsmla_kernels.compile import CompiledObject
from tsmla_kernels.kernel import Kernel

ARCH = "sm_90a"
CONFIG = ScaleConfig(width=64)


class FakeCompiler:
    """Objects at no cost; `calls` counts them."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, kernel: Kernel, config: ScaleConfig, arch: str) -> CompiledObject:
        self.calls += 1
        version = object_cache.dsl_version() or "4.8.1"
        return CompiledObject(kernel.name, kernel.config_json(config), arch, b"code" * 100, version, 1.5, "log")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    compiler = FakeCompiler()
    monkeypatch.setattr(object_cache, "compile_kernel", compiler)
    return compiler


def forget() -> None:
    """As a new process would find it."""
    object_cache._loaded.clear()


def only_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def test_second_process_loads_what_the_first_stored(cache_directory: Path, compiled: FakeCompiler) -> None:
    first = object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    forget()
    assert object_cache.load_or_compile(SCALE, CONFIG, ARCH) == first
    assert compiled.calls == 1
    assert only_file(cache_directory).name.startswith("scale-sm_90a-")


def test_one_process_reads_the_disk_once(cache_directory: Path, compiled: FakeCompiler) -> None:
    first = object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    only_file(cache_directory).unlink()
    assert object_cache.load_or_compile(SCALE, CONFIG, ARCH) is first


@pytest.mark.parametrize("damage", ["empty", "header", "half", "last byte", "flipped", "other file", "not an object"])
def test_damaged_entry_is_rebuilt_with_a_warning(cache_directory: Path, compiled: FakeCompiler, damage: str) -> None:
    good = object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    path = only_file(cache_directory)
    content = path.read_bytes()
    middle = len(content) - 200
    path.write_bytes(
        {
            "empty": b"",
            "header": content[:20],
            "half": content[: len(content) // 2],
            "last byte": content[:-1],
            "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "other file": content + b"more",
            "not an object": b"something else entirely" * 10,
        }[damage]
    )
    forget()
    with pytest.warns(RuntimeWarning, match="ignoring a cached kernel and compiling it again: scale-sm_90a") as said:
        assert object_cache.load_or_compile(SCALE, CONFIG, ARCH) == dataclasses.replace(good)
    assert len(said) == 1
    forget()
    assert object_cache.load_or_compile(SCALE, CONFIG, ARCH).module == good.module and compiled.calls == 2


def test_entry_under_another_name_is_not_taken_for_it(cache_directory: Path, compiled: FakeCompiler) -> None:
    object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    path = only_file(cache_directory)
    other = ScaleConfig(width=32)
    object_cache.load_or_compile(SCALE, other, ARCH)
    target = next(p for p in cache_directory.iterdir() if p != path)
    target.write_bytes(path.read_bytes())
    forget()
    with pytest.warns(RuntimeWarning, match="describes another object: config"):
        object_cache.load_or_compile(SCALE, other, ARCH)


def test_wrong_architecture_is_refused(compiled: FakeCompiler) -> None:
    with pytest.raises(ValueError, match=r"arch: got 'sm_100a'; scale is written for sm_90a"):
        object_cache.load_or_compile(SCALE, CONFIG, "sm_100a")


def test_objects_of_another_host_are_not_loaded(compiled: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    monkeypatch.setattr(object_cache, "_host", lambda: "linux aarch64 glibc")
    (entry,) = object_cache.entries()
    assert re.fullmatch("for a .* host; this one is linux aarch64 glibc", entry.problem or "")
    forget()
    object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    assert compiled.calls == 2


@pytest.mark.parametrize("change", ["config", "package", "sources", "dsl", "environment", "libc"])
def test_everything_the_code_depends_on_is_in_the_key(
    compiled: FakeCompiler, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    forget()
    config = CONFIG
    if change == "config":
        config = ScaleConfig(width=32)
    elif change == "package":
        monkeypatch.setattr(object_cache, "__version__", "0.0.1")
    elif change == "sources":
        monkeypatch.setattr(object_cache, "sources_digest", lambda kernel: "changed")
    elif change == "dsl":
        monkeypatch.setattr(object_cache, "dsl_version", lambda: "9.9.9")
    elif change == "libc":
        monkeypatch.setattr(object_cache.platform, "libc_ver", lambda: ("musl", "1.2"))
        monkeypatch.setattr(object_cache, "_host", object_cache._host.__wrapped__)
    else:
        monkeypatch.setenv("CUTE_DSL_COMPILER_OPT", "--opt-level 1")
    object_cache.load_or_compile(SCALE, config, ARCH)
    assert compiled.calls == 2


def test_sources_digest_follows_imports_of_the_same_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "digested"
    package.mkdir()
    files = {
        "__init__": "",
        "kernel": "import os\nfrom digested import tiles\nfrom digested.roles import (\n    load,\n)\n",
        "tiles": "ROWS = 64\n",
        "roles": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from digested import spec\nload = 1\n",
        "spec": "A = 1\n",
        "unrelated": "B = 1\n",
    }
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    kernel = dataclasses.replace(SCALE, launcher="digested.kernel:Kernel")

    def digest() -> str:
        object_cache.sources_digest.cache_clear()
        return object_cache.sources_digest(kernel)

    before = digest()
    for name, matters in (("kernel", True), ("tiles", True), ("roles", True), ("spec", False), ("unrelated", False)):
        path = package / f"{name}.py"
        path.write_text(files[name] + "# changed\n")
        assert (digest() != before) is matters, name
        path.write_text(files[name])
        assert digest() == before
    object_cache.sources_digest.cache_clear()
    assert not [name for name in sys.modules if name.startswith("digested")]  # hashed, not imported


def test_sources_digests_import_no_kernel(child_environment: dict[str, str]) -> None:
    """A process that finds its objects in the cache must not pay for importing cutlass: two seconds."""
    code = """
import sys
from tsmla_kernels import __version__, object_cache, object_files
from tsmla_kernels.catalog import KERNELS
before = set(sys.modules)
for kernel in KERNELS.values():
    assert object_cache.sources_digest(kernel)
print(sorted(name for name in set(sys.modules) - before if name.startswith(("cutlass", "tsmla_kernels"))))
"""
    said = subprocess.run(
        [sys.executable, "-c", code], env=child_environment, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "[]"


def test_machine_without_the_dsl_finds_the_entry(compiled: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    there = object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    forget()
    monkeypatch.setattr(object_cache, "dsl_version", lambda: None)
    assert object_cache.load_or_compile(SCALE, CONFIG, ARCH) == there
    assert compiled.calls == 1


def test_unwritable_directory_costs_a_warning(
    tmp_path: Path, compiled: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TSMLA_CACHE_DIR", str(blocked / "below"))
    with pytest.warns(RuntimeWarning, match="can't be stored"):
        assert object_cache.load_or_compile(SCALE, CONFIG, ARCH).module
    assert object_cache.load_or_compile(SCALE, CONFIG, ARCH) and compiled.calls == 1


@pytest.mark.parametrize(("mask", "by_root"), [(0, 0o755), (0o022, 0o755), (0o002, 0o755), (0o077, 0o700)])
def test_what_root_compiles_may_be_read_by_all(
    cache_directory: Path, compiled: FakeCompiler, mask: int, by_root: int
) -> None:
    """As in an image that root fills, for a service of another user; nobody else may write."""
    before = os.umask(mask)
    try:
        object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    finally:
        os.umask(before)
    mode = by_root if os.geteuid() == 0 else 0o700
    assert stat.S_IMODE(cache_directory.stat().st_mode) == mode
    assert stat.S_IMODE(only_file(cache_directory).stat().st_mode) == mode & 0o644


def test_a_file_is_read_by_those_who_read_its_folder(cache_directory: Path, compiled: FakeCompiler) -> None:
    cache_directory.mkdir(mode=0o750)
    cache_directory.chmod(0o750)
    object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    assert stat.S_IMODE(only_file(cache_directory).stat().st_mode) == 0o640


def test_a_file_system_without_modes(compiled: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("fchmod")

    monkeypatch.setattr(object_cache.os, "fchmod", refuse)
    object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    assert object_cache.is_stored(SCALE, CONFIG, ARCH)


def test_a_directory_that_can_not_be_looked_at_is_said_to_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CACHE_DIR", "/tmp/" + "a" * 300)
    assert "can't be written; TSMLA_CACHE_DIR names another directory" in (object_cache.why_not_kept() or "")


def test_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert object_cache.directory() == Path(os.environ["TSMLA_CACHE_DIR"])
    monkeypatch.delenv("TSMLA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert object_cache.directory() == tmp_path / "tsmla"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert object_cache.directory() == tmp_path / "home" / ".cache" / "tsmla"


@pytest.mark.parametrize("named", [None, "~/kernels"])
def test_a_user_without_a_home(
    named: str | None, tmp_path: Path, compiled: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a container's: no HOME, and no entry in passwd. What is compiled is kept among the temporary files."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "TSMLA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    if named is not None:
        monkeypatch.setenv("TSMLA_CACHE_DIR", named)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = tmp_path / f"tsmla-{os.geteuid()}"
    with pytest.warns(RuntimeWarning, match=f"kept in {place} .*; TSMLA_CACHE_DIR names another directory"):
        object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    assert stat.S_IMODE(place.stat().st_mode) == (0o755 if os.geteuid() == 0 else 0o700)
    forget()
    with pytest.warns(RuntimeWarning, match="kept in"):
        object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    assert compiled.calls == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if named is None:  # that one is in no home
        assert object_cache.directory() == tmp_path / "cache" / "tsmla"


def test_a_user_without_a_home_and_without_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(object_cache.Path, "home", none_at_home)
    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.delenv("TSMLA_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.warns(RuntimeWarning, match=r"kept in /tmp/tsmla-"):
        assert object_cache.directory().parent == Path("/tmp")


def none_at_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_interrupted_write_leaves_no_entry(
    cache_directory: Path, compiled: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(object_cache.os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    assert list(cache_directory.iterdir()) == []
    assert object_cache.load_or_compile(SCALE, CONFIG, ARCH) and len(object_cache.entries()) == 1


def test_entries_and_prune(cache_directory: Path, compiled: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [ScaleConfig(width) for width in (32, 64, 96, 128)]
    for config in configs[:3]:
        object_cache.load_or_compile(SCALE, config, ARCH)
    with monkeypatch.context() as patch:
        patch.setattr(object_cache, "__version__", "0.0.1")
        object_cache.load_or_compile(SCALE, configs[3], ARCH)
    by_config = {entry.description["config"]: entry for entry in object_cache.entries()}
    assert {json.loads(config)["width"] for config in by_config} == {32, 64, 96, 128}
    assert by_config[SCALE.config_json(configs[0])].problem is None
    assert "of version 0.0.1" in (by_config[SCALE.config_json(configs[3])].problem or "")
    damaged = by_config[SCALE.config_json(configs[1])].path
    damaged.write_bytes(b"short")
    assert [entry.path for entry in object_cache.entries() if not entry.description] == [damaged]

    stale = {damaged, by_config[SCALE.config_json(configs[3])].path}
    assert {entry.path for entry in object_cache.prune().removed} == stale
    assert len(object_cache.entries()) == 2 and object_cache.prune(older_than_days=1).removed == []
    monkeypatch.setattr(object_cache.time, "time", lambda: time.monotonic() + 2 * 86400 + 4e9)
    assert len(object_cache.prune(older_than_days=1).removed) == 2 and object_cache.entries() == []
    monkeypatch.undo()


def test_prune_everything(cache_directory: Path, compiled: FakeCompiler) -> None:
    object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    entry = only_file(cache_directory)
    for left in (cache_directory / ".writing-x.obj.tmp", cache_directory / f"{entry.name}.lock"):
        left.write_text("")
        os.utime(left, (0, 0))
    assert len(object_cache.prune(everything=True).removed) == 1 and list(cache_directory.iterdir()) == []


def test_prune_leaves_the_files_of_others(cache_directory: Path, compiled: FakeCompiler) -> None:
    object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    others = ["uv.lock", "Cargo.lock", "model.obj", "scale-sm_90a-1234-dsl4.8.1.obj", "x.obj.tmp", "notes-dsl.obj.lock"]
    for name in others:
        (cache_directory / name).write_text("kept")
        os.utime(cache_directory / name, (0, 0))
    assert len(object_cache.entries()) == 1
    object_cache.prune(everything=True, older_than_days=0)
    assert sorted(path.name for path in cache_directory.iterdir()) == sorted(others)


@pytest.mark.parametrize("days", [-1.0, float("nan"), float("inf")])
def test_prune_refuses_ages_that_are_none(days: float, compiled: FakeCompiler) -> None:
    object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    with pytest.raises(ValueError, match=r"older_than_days: got .*; legal: a number of days, at least 0"):
        object_cache.prune(older_than_days=days)
    assert len(object_cache.entries()) == 1


def test_one_bad_file_does_not_keep_prune_from_the_others(cache_directory: Path, compiled: FakeCompiler) -> None:
    object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    name = only_file(cache_directory).name
    folder, pipe = (cache_directory / f"{kind}-{name}".replace("-scale", "") for kind in ("a_folder", "a_pipe"))
    folder.mkdir()
    os.mkfifo(pipe)
    done = object_cache.prune(everything=True)
    assert {entry.path.name for entry in done.removed} == {name, pipe.name}
    assert [entry.path.name for entry, reason in done.kept] == [folder.name] and done.kept[0][1]


GOOD = {
    "kernel": "scale", "config": "{}", "arch": ARCH, "host": "h", "package": "0", "sources": "s", "environment": {},
    "dsl": "4", "seconds": 1.0, "created": 1.0, "log": "",
}  # fmt: skip
ODD = [b"", b"[]", b"3", b"null", b"\xff", b"{", b"[" * 100_000, b'{"kernel": "scale"}'] + [
    json.dumps({**GOOD, **change}).encode()
    for change in (
        {"kernel": 3}, {"host": None}, {"dsl": "4\x1b[2J"}, {"created": "today"}, {"created": 1e300},
        {"created": float("nan")}, {"seconds": None}, {"environment": []}, {"made_of": 1}, {"log": 0},
        {"config": "width 32"}, {"config": "[]"}, {"config": "[" * 100_000},
    )
]  # fmt: skip


@pytest.mark.parametrize("header", [*ODD, None], ids=range(len(ODD) + 1))
def test_an_odd_description_is_a_damaged_entry(
    cache_directory: Path, compiled: FakeCompiler, header: bytes | None
) -> None:
    object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    path = only_file(cache_directory)
    size = 2**63 if header is None else len(header)
    content = b"TSMLAOB1" + struct.pack("<Q", size) + (header or b"") + b"code"
    path.write_bytes(content + hashlib.sha256(content).digest())
    (entry,) = object_cache.entries()
    assert entry.description == {} and entry.problem and "description" in entry.problem
    forget()
    with pytest.warns(RuntimeWarning, match="ignoring a cached kernel"):
        assert object_cache.load_or_compile(SCALE, CONFIG, ARCH).module
    path.write_bytes(content + hashlib.sha256(content).digest())
    assert [each.path for each in object_cache.prune().removed] == [path]


def test_a_description_without_the_package_it_is_made_of(cache_directory: Path, compiled: FakeCompiler) -> None:
    """Of a kernel that is made of one: stale, not an error."""
    description = {**GOOD, "kernel": "mla_decode_sm100", "host": object_cache._host(), "package": __version__}
    description |= {"dsl": object_cache.dsl_version() or "4", "sources": "x"}
    for kernel in object_cache.KERNELS.values():
        description["kernel"], description["sources"] = kernel.name, object_cache.sources_digest(kernel)
        assert (object_cache._staleness(description) is None) == (kernel.package is None)


def test_a_file_that_others_may_write_is_not_run(cache_directory: Path, compiled: FakeCompiler) -> None:
    object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    path = only_file(cache_directory)
    path.chmod(0o666)
    (entry,) = object_cache.entries()
    assert "may be written by others (mode 666)" in (entry.problem or "") and "chmod" in (entry.problem or "")
    forget()
    with pytest.warns(RuntimeWarning, match="may be written by others"):
        object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    assert compiled.calls == 2 and not path.stat().st_mode & 0o022  # written anew, and ours


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_directory_that_others_may_write_is_not_used(
    cache_directory: Path, compiled: FakeCompiler, mode: int
) -> None:
    object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    cache_directory.chmod(mode)
    said = f"{cache_directory} may be written by others .*chmod go-w .*TSMLA_CACHE_DIR"
    for refused in (object_cache.entries, object_cache.prune, object_cache.check_writable):
        with pytest.raises(ValueError, match=said):
            refused()
    forget()
    assert not object_cache.is_stored(SCALE, CONFIG, ARCH)
    with pytest.warns(RuntimeWarning, match=said):
        assert object_cache.load_or_compile(SCALE, CONFIG, ARCH).module
    assert compiled.calls == 2
    cache_directory.chmod(0o755)
    assert object_cache.is_stored(SCALE, CONFIG, ARCH)


@pytest.mark.parametrize(
    ("owner", "user", "reason"),
    [(1000, 1000, None), (0, 1000, None), (1001, 1000, "belongs to another user (uid 1001)")],
)
def test_only_this_user_and_root_are_trusted(
    owner: int, user: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_files.os, "geteuid", lambda: user)
    status = os.stat_result((stat.S_IFREG | 0o600, 1, 1, 1, owner, owner, 1, 0, 0, 0))
    assert object_files.why_untrusted(status) == reason


COMPILE = """
import hashlib
from tsmla_kernels import __version__, object_cache, object_files
from tsmla_kernels.kernel import Kernel
from tests.emulator.standin import SCALE, ScaleConfig
print(hashlib.sha256(object_cache.load_or_compile(SCALE, ScaleConfig(width=64), "sm_90a").module).hexdigest())
"""


def test_four_processes_with_an_empty_cache_compile_once(
    cache_directory: Path, builds: Path, child_environment: dict[str, str]
) -> None:
    children = [
        subprocess.Popen([sys.executable, "-c", COMPILE], env=child_environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    digests = {child.communicate(timeout=120)[0] for child in children}
    assert [child.returncode for child in children] == [0] * 4 and len(digests) == 1
    assert len(builds.read_text().splitlines()) == 1
    (entry,) = object_cache.entries()
    assert entry.problem is None and [entry.path] == list(cache_directory.iterdir())  # no lock, no half-written file


def test_processes_without_locks_each_get_a_right_object(
    cache_directory: Path, builds: Path, child_environment: dict[str, str]
) -> None:
    no_locks = "import fcntl\ndef flock(*_):\n    raise OSError('no locks here')\nfcntl.flock = flock\n"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", no_locks + COMPILE], env=child_environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    digests = {child.communicate(timeout=120)[0] for child in children}
    assert [child.returncode for child in children] == [0] * 2 and len(digests) == 1
    assert 1 <= len(builds.read_text().splitlines()) <= 2 and len(object_cache.entries()) == 1
