"""The calls that compute-sanitizer watches: right on a GPU, and no dead program elsewhere."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.small_grid import CALLS, apart, failures, main


@pytest.mark.parametrize("op", CALLS)
def test_runs_without_a_gpu(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--op", op, "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "all as on the CPU\n"


@pytest.mark.gpu
@pytest.mark.parametrize("op", CALLS)
def test_on_a_gpu(op: str) -> None:
    assert failures(op, torch.device("cuda")) == []


def test_what_differs_is_found() -> None:
    one = torch.tensor([1.0, -torch.inf, torch.nan])
    assert apart(one, one) == 0
    assert apart(torch.tensor([1.1, -torch.inf, torch.nan]), one) == pytest.approx(0.1, rel=1e-6)
    assert apart(torch.tensor([1.0, 2.0, torch.nan]), one) == float("inf")
    assert apart(torch.tensor([1.0, -torch.inf, 0.0]), one) == float("inf")
    assert apart(one[:2], one) == float("inf")
