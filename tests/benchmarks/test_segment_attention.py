"""What benchmarks/segment_attention.py hands to cuDNN and to us, without a GPU."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def benchmark(request: pytest.FixtureRequest) -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))  # as for a program of that folder
    request.addfinalizer(lambda: sys.path.remove(str(ROOT / "benchmarks")))
    spec = importlib.util.spec_from_file_location("segment_attention", ROOT / "benchmarks" / "segment_attention.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["segment_attention"] = module
    spec.loader.exec_module(module)
    return module


def test_cudnns_layout(benchmark: ModuleType) -> None:
    """As the docstring of jax's operation has it, and with padding between segments."""
    packed = benchmark.packed_layout(np.array([[1, 2, 3], [4, 5, 0]]), 3)
    assert packed.starts.tolist() == [[0, 1, 2, -1], [0, 1, -1, -1]]
    assert packed.lens.tolist() == [[1, 1, 1], [1, 1, -1]]
    packed = benchmark.packed_layout(np.array([[0, 7, 7, 0, 3, 3, 3]]), 2)
    assert packed.starts.tolist() == [[1, 4, -1]] and packed.lens.tolist() == [[2, 3]]


def test_points(benchmark: ModuleType) -> None:
    for name in benchmark.DEFAULT.split("/"):
        assert benchmark.Point.parse(name).name == name
    ids = benchmark.Point.parse("3x160h2s5").ids()
    assert [sorted(set(row) - {0}) for row in ids.tolist()] == [[1, 2, 3, 4, 5]] * 3
    with pytest.raises(ValueError, match="got point '4x4096'; legal: ROWSxTOKENShHEADSsSEGMENTS"):
        benchmark.Point.parse("4x4096")


@pytest.mark.usefixtures("quick_compilation")
def test_our_errors(benchmark: ModuleType) -> None:
    """Of bf16 against the reference, at a size for a CPU."""
    point = benchmark.Point(1, 24, 2, 3)
    found = {name: peer for name, peer in benchmark.peers(point, "xla").items() if name != "cudnn"}
    for errors in benchmark.errors(point, found).values():
        assert len(errors) == 4 and all(1e-5 < error < 1e-2 for error in errors)
