"""`--compile_only`: each benchmark of kernels names its objects without a GPU, and ends."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("absl", reason="the benchmarks' flags")
from absl import flags
from absl.testing import flagsaver

from tsmla_kernels import object_cache
from tsmla_kernels.kernel import Kernel

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
POINTS = {  # all of them where none is named
    "decode": "1,2,16,4096/4,2,16,81920",
    "indexer_logits": "64,4,131072/prefill,4096,8192",
    "indexer_topk": "1,1,8192",
    "prefill": "",
    "prefill_backward": "",
    "select_topk": "64,8192",
    "sparse_mla": "v32,8,1,16/v4-512,8,1,16",
    "sparse_mla_prefill": "random,512,16",
}
KERNELS = {
    "decode": {"mla_decode": 1},
    "indexer_logits": {"indexer_logits": 2},
    "indexer_topk": {"indexer_logits": 1, "select_topk": 2},
    "prefill": {"mla_prefill": 2},
    "prefill_backward": {"mla_prefill": 1, "mla_prefill_backward": 3},
    "select_topk": {"select_topk": 2},
    "sparse_mla": {"sparse_mla": 2},
    "sparse_mla_prefill": {"sparse_mla": 2},
}
"""How many objects of each kernel the points need."""


@pytest.mark.parametrize("name", POINTS)
def test_objects(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, int] = {}

    def is_stored(kernel: Kernel, config: Any, arch: str) -> bool:
        assert isinstance(config, kernel.config) and arch == "sm_90a"
        found[kernel.name] = found.get(kernel.name, 0) + 1
        return True

    monkeypatch.setattr(object_cache, "is_stored", is_stored)
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])  # as for a program of that folder
    benchmark = importlib.import_module(name)
    flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(compile_only=True, points=POINTS[name]), pytest.raises(SystemExit) as ended:
        benchmark.main([])
    assert ended.value.code == 0 and found == KERNELS[name]
    count = sum(found.values())
    assert capsys.readouterr().out == f"{count} objects in {object_cache.directory()}, 0 of them new\n"
