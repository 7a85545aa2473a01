"""The wheel of compiled objects: what it holds, its bytes, and that installations of it compile nothing."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from tests.emulator.standin import SCALE, ScaleConfig
from tests.kernels.test_object_cache import ARCH, CONFIG, FakeCompiler, forget
from tsmla_kernels import object_cache
from tsmla_kernels.catalog import MLA_DECODE
from tsmla_kernels.cli import objects, wheel
from tsmla_kernels.sm90.decode.config import DecodeConfig
from tsmla_kernels.sm90.logits.config import LogitsConfig
from tsmla_kernels.sm90.sparse.config import SparseConfig
from tsmla_kernels.sparse_cache.config import IndexerQuantizeConfig
from tsmla_kernels.topk.config import TopkConfig


@pytest.fixture(autouse=True)
def catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(objects.KERNELS, "scale", SCALE)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    compiler = FakeCompiler()
    monkeypatch.setattr(object_cache, "compile_kernel", compiler)
    monkeypatch.setattr(objects, "_resources_of", lambda made: "")
    return compiler


def build(out: Path, *configs: ScaleConfig) -> Path:
    lines = [json.dumps({"kernel": "scale", "arch": ARCH, "config": {"width": config.width}}) for config in configs]
    (out.parent / "list.jsonl").write_text("\n".join(lines))
    parser = argparse.ArgumentParser()
    wheel.add_arguments(parser)
    assert wheel.run(parser.parse_args(["--out", str(out), "--list", str(out.parent / "list.jsonl")])) == 0
    (made,) = out.iterdir()
    return made


@pytest.fixture
def installed(tmp_path: Path, compiled: FakeCompiler, cache_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of a wheel with one object, on a machine whose cache is empty; one kernel was compiled."""
    site = tmp_path / "site"
    with zipfile.ZipFile(build(tmp_path / "dist", CONFIG)) as made:
        made.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    shutil.rmtree(cache_directory)
    forget()
    assert compiled.calls == 1
    package = site / object_cache.PREBUILT
    for path in (package, *package.iterdir()):
        path.chmod(path.stat().st_mode & ~0o022)
    return package


def test_an_installed_wheel_compiles_nothing(installed: Path, compiled: FakeCompiler, cache_directory: Path) -> None:
    assert object_cache.is_stored(SCALE, CONFIG, ARCH)
    assert object_cache.load_or_compile(SCALE, CONFIG, ARCH).module == b"code" * 100
    assert compiled.calls == 1 and not cache_directory.exists()
    assert object_cache.load_or_compile(SCALE, ScaleConfig(width=32), ARCH) and compiled.calls == 2
    assert object_cache.PREBUILT not in sys.modules


def test_a_machine_without_the_dsl_uses_it(
    installed: Path, compiled: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache, "dsl_version", lambda: None)
    assert object_cache.load_or_compile(SCALE, CONFIG, ARCH) and compiled.calls == 1


def test_the_users_folder_comes_first(installed: Path, compiled: FakeCompiler, cache_directory: Path) -> None:
    (entry,) = object_cache.prebuilt_entries()
    cache_directory.mkdir(mode=0o700)
    shutil.copy(entry.path, cache_directory)
    entry.path.write_bytes(b"damaged")
    assert object_cache.load_or_compile(SCALE, CONFIG, ARCH) and compiled.calls == 1


def test_a_cache_that_others_may_write_does_not_matter(
    installed: Path, compiled: FakeCompiler, cache_directory: Path
) -> None:
    cache_directory.mkdir()
    cache_directory.chmod(0o777)
    assert object_cache.load_or_compile(SCALE, CONFIG, ARCH) and compiled.calls == 1


@pytest.mark.parametrize("fault", ["damaged", "of others", "of another version"])
def test_objects_that_are_not_used(
    installed: Path, compiled: FakeCompiler, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = object_cache.prebuilt_entries()
    if fault == "damaged":
        entry.path.write_bytes(entry.path.read_bytes()[:-1])
        with pytest.warns(RuntimeWarning, match="does not match its checksum"):
            object_cache.load_or_compile(SCALE, CONFIG, ARCH)
    elif fault == "of others":
        installed.chmod(0o777)
        with pytest.warns(RuntimeWarning, match=r"ignoring prebuilt kernels: .* others .*chmod go-w .*\)$"):
            object_cache.load_or_compile(SCALE, CONFIG, ARCH)
        (entry,) = object_cache.prebuilt_entries()
        assert "may be written by others (mode 777)" in (entry.problem or "")
    else:
        monkeypatch.setattr(object_cache, "__version__", "9.9")
        object_cache.load_or_compile(SCALE, CONFIG, ARCH)
        assert "of version" in (object_cache.prebuilt_entries()[0].problem or "")
    assert compiled.calls == 2


def test_the_cache_command_knows_it(
    installed: Path, compiled: FakeCompiler, capsys: pytest.CaptureFixture[str]
) -> None:
    def cache(*argv: str) -> tuple[int, str]:
        parser = argparse.ArgumentParser()
        objects.add_cache_arguments(parser)
        return objects.run_cache(parser.parse_args(argv)), capsys.readouterr().out

    assert "1 prebuilt objects, 1 of them for this installation" in cache("list")[1]
    assert cache("verify") == (0, f"1 entries, 0.00 MB in {object_cache.directory()}; 0 damaged\n")
    assert "0 entries" in cache("prune", "--all")[1]
    (entry,) = object_cache.prebuilt_entries()
    entry.path.write_bytes(b"")
    status, said = cache("verify")
    assert status == 1 and "1 damaged" in said


def test_the_bytes_of_a_wheel(tmp_path: Path, compiled: FakeCompiler) -> None:
    """Its record has every file; the same objects make the same bytes; a second build compiles nothing."""
    configs = ScaleConfig(width=64), ScaleConfig(width=32)
    first = build(tmp_path / "one", *configs)
    assert build(tmp_path / "two", *reversed(configs)).read_bytes() == first.read_bytes() and compiled.calls == 2
    assert first.name.startswith("tsmla_objects-") and "-py3-none-linux_" in first.name
    with zipfile.ZipFile(first) as made:
        (record,) = (name for name in made.namelist() if name.endswith("/RECORD"))
        lines = [line.split(",") for line in made.read(record).decode().splitlines()]
        assert [line[0] for line in lines] == made.namelist()
        for path, digest, size in lines[:-1]:
            content = made.read(path)
            found = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={found}", len(content))
        assert sum(name.endswith(".obj") for name in made.namelist()) == 2


def test_a_kernel_that_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(object_cache, "compile_kernel", fail)
    (tmp_path / "list").write_text(json.dumps({"kernel": "scale", "arch": ARCH, "config": {"width": 64}}))
    parser = argparse.ArgumentParser()
    wheel.add_arguments(parser)
    given = parser.parse_args(["--out", str(tmp_path / "dist"), "--list", str(tmp_path / "list")])
    assert wheel.run(given) == 1 and not (tmp_path / "dist").exists()
    with pytest.raises(ValueError, match=r"--jobs: got 0; legal: an int >= 1"):
        wheel.run(parser.parse_args(["--jobs", "0"]))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "is empty; legal: lines that"),
        ('{"kernel": "gone"}\n', ', line 1: got \'{"kernel": "gone"}\'; legal: a line'),
    ],
)
def test_a_list_that_names_no_objects(lines: str, message: str, tmp_path: Path) -> None:
    given = tmp_path / "a list"
    given.write_text(lines)
    parser = argparse.ArgumentParser()
    wheel.add_arguments(parser)
    with pytest.raises(ValueError, match=f"^--list {given}:?{re.escape(message) if lines else ' ' + message}"):
        wheel.run(parser.parse_args(["--out", str(tmp_path / "dist"), "--list", str(given)]))
    assert not (tmp_path / "dist").exists()


def test_what_the_default_wheel_holds() -> None:
    """The first decode call of every preset, among others, each once."""
    wanted = wheel.wanted_by(wheel.calls())
    assert len(set(wanted)) == len(wanted) and {each.arch for each in wanted} == {"sm_90a"}
    decode = {each.config for each in wanted if each.kernel is MLA_DECODE}
    for heads in (2, 4, 8, 16, 32, 64, 128):
        for dtype, kv_dtype in (("bfloat16", None), ("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", None)):
            assert any(
                isinstance(config, DecodeConfig)
                and (config.num_heads, config.dtype, config.max_q_len) == (heads, dtype, new)
                and config.kv_dtype in (kv_dtype, kv_dtype or dtype)
                for config in decode
                for new in (1, 2, 4)
            )
    names = {each.kernel.name for each in wanted}
    assert {"sparse_mla", "indexer_logits", "select_topk", "write_packed_kv_cache", "compress_write_kv_cache"} <= names


def test_what_the_default_wheel_holds_of_v4() -> None:
    """Both models: layers of the window alone, of chosen entries and of all entries, few or many; and the choice."""
    wanted = wheel.wanted_by(wheel.calls())
    sparse = [each.config for each in wanted if isinstance(each.config, SparseConfig) and each.config.layout == "v4"]
    for heads in (8, 16, 32, 64, 128):
        found = {(x.window, x.compressed_page_size, x.whole) for x in sparse if x.num_heads == heads}
        assert found >= {(None, 0, True), (128, 64, False), (128, 2, True), (128, 2, False)}
    for k in (512, 1024):
        chosen = [each.config for each in wanted if isinstance(each.config, TopkConfig) and each.config.k == k]
        assert {x.in_registers for x in chosen} == {False, True} and {x.cluster for x in chosen} >= {1, 2, 4, 8}
    assert LogitsConfig(64, groups=3) in {each.config for each in wanted}
    quantize = {each.config for each in wanted if isinstance(each.config, IndexerQuantizeConfig)}
    assert {(x.rope_offset, x.rope_layout) for x in quantize} == {(0, "halves"), (64, "interleaved")}
