"""The inputs of the benchmark of sparse_mla's prefill: slots drawn like an indexer's, and objects for every point."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("absl", reason="the benchmarks' flags")
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # as for a program of that folder
    return importlib.import_module("sparse_mla_prefill")


def test_a_record_names_the_peers_versions(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = sys.modules["harness"]
    (tmp_path / "versions.json").write_text('{"FlashMLA": "of vLLM 0.26.0"}')
    monkeypatch.setattr(harness, "PEERS", SimpleNamespace(value=str(tmp_path)))
    assert harness.versions()["FlashMLA"] == "of vLLM 0.26.0"
    monkeypatch.setattr(harness, "PEERS", SimpleNamespace(value=None))
    assert set(harness.versions()) >= {"python", "torch"} and "FlashMLA" not in harness.versions()


@pytest.mark.parametrize("mode", ["random", "shared80"])
def test_slots_of_a_token_differ_and_neighbours_share_what_they_should(benchmark: ModuleType, mode: str) -> None:
    slots = benchmark.draw(mode, 12, 200, 5000, "cpu")
    assert slots.dtype == torch.int32 and slots.shape == (12, 200)
    rows = [set(row.tolist()) for row in slots]
    assert all(len(row) == 200 and min(row) >= 0 and max(row) < 5000 for row in rows)
    shared = [len(a & b) for a, b in zip(rows[1:], rows[:-1], strict=True)]
    assert all(count == 160 if mode == "shared80" else count < 40 for count in shared)


def test_a_prompts_tokens_select_earlier_ones(benchmark: ModuleType) -> None:
    slots = benchmark.draw("prompt", 40, 16, 5000, "cpu")
    for token, row in enumerate(slots.tolist()):
        count = min(token + 1, 16)
        assert row[count:] == [-1] * (16 - count) and len(set(row[:count])) == count
        assert max(row[:count]) <= token


def test_every_point_has_an_object(benchmark: ModuleType) -> None:
    for mode in benchmark.SELECTED:
        point = benchmark.Point.parse(f"{mode},4096,128")
        assert benchmark.config(point).shape.tile_rows == 64
        assert point.floor_us("tsmla") > point.floor_us(benchmark.FP8)
    assert benchmark.config(benchmark.Point("random", 512, 16), "float8_e4m3fn").fp8_queries
