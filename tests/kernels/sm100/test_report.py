"""The report for whoever has a Blackwell: its checks are calls that kernels take; the command runs without a GPU."""

from __future__ import annotations

import functools

import jax
import pytest

from tests.gpu import report
from tsmla_jax.ops import device


@pytest.mark.parametrize("name", report.arrays())
def test_each_check_is_a_call_of_a_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "why_not_made", lambda kernel, config: [])
    call = report.arrays()[name]()
    got, want = (jax.eval_shape(functools.partial(call, implementation=each)) for each in ("cute", "reference"))
    assert got == want


@pytest.mark.slow
def test_the_command_runs_on_the_emulated_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--emulated", "sm_100a"]) == 0
    assert all(line.endswith(" right") for line in capsys.readouterr().out.splitlines()[1:])
