"""benchmarks/context_parallel.py on simulated devices, at a size for a CPU."""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("absl", reason="the benchmarks' flags")
from absl import flags
from absl.testing import flagsaver

B, HEADS, KEYS = 2, 4, 4000


class Rows:
    """What the benchmark's record is told."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        self.rows.append(row)


@pytest.mark.usefixtures("quick_compilation")
def test_a_point_on_one_device_and_on_two(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).resolve().parents[2] / "benchmarks"), *sys.path])
    benchmark = importlib.import_module("context_parallel")
    monkeypatch.setattr(benchmark, "STEPS", 1)
    monkeypatch.setattr(benchmark, "least_seconds", lambda run, turns: float(np.isfinite(np.float32(run())).all()))
    flags.FLAGS.mark_as_parsed()
    rows = Rows()
    with flagsaver.flagsaver(devices=2, step_layers=2):
        benchmark.measure(rows, B, HEADS, KEYS)
    one, two = rows.rows
    assert (one["context_parallel"], two["context_parallel"]) == (1, 2)
    assert one["us"] == two["us"] == 500_000  # of one "second" for two layers: all results are finite
    assert one["floor_us"] == pytest.approx(2 * two["floor_us"], abs=0.15) and two["floor_us"] > 1
    assert "(1.00 times)" in capsys.readouterr().out
