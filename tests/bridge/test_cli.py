"""`tsmla` of the distribution without jax."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulator.standin import SCALE
from tsmla_bridge import cli
from tsmla_kernels import __version__, commands


def test_without_a_command_the_help_comes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("doctor", "compile", "cache", "come with the distribution tsmla-jax"))


def test_doctor_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["version"] == __version__ and report["packages"]["torch"]
    assert [engine["engine"] for engine in report["engines"]] == ["vllm", "sglang"]
    assert cli.main(["doctor"]) == 0
    assert "--attention-backend tsmla" in capsys.readouterr().out


def test_doctor_says_why_nothing_is_kept(
    cache_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        assert cli.main(["doctor"]) == 0
        return capsys.readouterr().out

    assert f"Cache of compiled kernels\n  {cache_directory}\n\n" in said()
    cache_directory.mkdir(exist_ok=True)
    cache_directory.chmod(0o775)
    assert "each process compiles what isn't in it: " in (text := said()) and "may be written by others" in text
    cache_directory.chmod(0o700)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert f"{cache_directory} can't be written; TSMLA_CACHE_DIR names another" in said()
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cache"]["directory"] == str(cache_directory)


def test_compile_and_cache(
    cache_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(commands.KERNELS, "scale", SCALE)
    assert cli.main(["compile", "--kernel", "scale", "--config", "wide", "--arch", "sm_90a", "--jobs", "1"]) == 0
    assert "1 compiled for sm_90a into" in capsys.readouterr().out
    assert cli.main(["cache", "list"]) == 0
    assert "scale sm_90a" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["compile", "--kernel", "x", "--config", "wide"], "tsmla compile: error: argument --kernel: invalid choice"),
        (["compile", "--config", "wide", "--jobs", "0"], "tsmla compile: error: --jobs: got 0; legal: an int >= 1"),
    ],
)
def test_a_wrong_option_is_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = cli.main(argv)
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    shown = capsys.readouterr()
    assert status == 2 and not shown.out and shown.err.startswith(said) and shown.err.count("\n") == 1


def test_no_jax_is_imported() -> None:
    code = "import sys; from tsmla_bridge import cli; cli.main(['cache', 'list']); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
