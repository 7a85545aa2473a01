"""The example of the PyTorch front end, and its lines in the README, run as they are."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_engine.py"


def test_torch_engine(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("example_torch_engine", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    assert "relative error against expanded attention" in capsys.readouterr().out


def test_the_readmes_lines_run() -> None:
    readme = (EXAMPLE.parents[1] / "README.md").read_text()
    (block,) = (text for text in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "import torch" in text)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["out"].shape == (8, 1, 16, 512) and names["out"].dtype == torch.bfloat16
