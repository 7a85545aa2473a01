"""The example of the PyTorch front end, and its lines in the README, run as they are."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_engine.py"


def run_engine() -> None:
    spec = importlib.util.spec_from_file_location("example_torch_engine", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()


def test_torch_engine(capsys: pytest.CaptureFixture[str]) -> None:
    run_engine()
    assert "relative error against expanded attention" in capsys.readouterr().out


@pytest.mark.gpu
def test_torch_engine_under_a_graph(capsys: pytest.CaptureFixture[str]) -> None:
    run_engine()
    assert "replays of a CUDA graph on cuda" in capsys.readouterr().out


def test_the_readmes_lines_run() -> None:
    readme = (EXAMPLE.parents[1] / "README.md").read_text()
    (block,) = (text for text in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "import torch" in text)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["out"].shape == (8, 1, 16, 512) and names["out"].dtype == torch.bfloat16
