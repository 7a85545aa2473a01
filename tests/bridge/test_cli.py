"""`tsmla` of the distribution without jax."""

from __future__ import annotations

import json

import pytest

from tsmla_bridge import cli
from tsmla_kernels import __version__


def test_without_a_command_the_help_comes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    said = capsys.readouterr().out
    assert "doctor" in said and "come with the distribution tsmla-jax" in said


def test_doctor_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["version"] == __version__ and report["packages"]["torch"]
    assert [engine["engine"] for engine in report["engines"]] == ["vllm", "sglang"]
    assert cli.main(["doctor"]) == 0
    assert "--attention-backend tsmla" in capsys.readouterr().out
