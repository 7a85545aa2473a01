"""A launch from any thread, and one that failed: of a runtime that is stood in for."""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tsmla_kernels import launch as launching
from tsmla_kernels.kernel import Operand
from tsmla_kernels.launch import launch_of


def test_one_launch_serves_several_threads_at_once() -> None:
    """Each takes its own block of arguments, although they are in the middle of a launch at the same time."""
    operands = (Operand("x", "float32", (None, 4)), Operand("y", "float32", (None,), output=True))
    barrier = threading.Barrier(4)
    blocks: list[int | None] = []

    def run(arguments: ctypes.c_void_p, count: ctypes.c_size_t) -> int:
        blocks.append(arguments.value)
        barrier.wait(timeout=30)
        return 0

    launch = launch_of("k", operands, ((3, 4), (3,)), run, lambda error: None)
    threads = [threading.Thread(target=launch, args=(i, (16, 32))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(blocks)) == 4


def test_a_launch_that_failed_says_so_and_the_next_one_runs() -> None:
    """By the runtime's answer, and by the error that the entry leaves behind."""
    found: list[int] = []

    def run(arguments: ctypes.c_void_p, count: ctypes.c_size_t) -> int:
        assert arguments.value is not None
        pointers = (ctypes.c_void_p * count.value).from_address(arguments.value)
        streams, errors = (ctypes.c_int64.from_address(pointers[at]) for at in (0, count.value - 1))
        found.append(streams.value)
        errors.value = 700 if streams.value == 7 else 0
        return int(streams.value == 8)

    def check(error: int) -> None:
        raise RuntimeError(f"runtime's error {error}")

    launch = launch_of("k", (Operand("x", "float32", (None, 4)),), ((3, 4),), run, check)
    for stream, message in ((7, "k: the launch failed with CUDA error 700"), (8, "runtime's error 1")):
        launch(1, (16,))
        with pytest.raises(RuntimeError, match=message):
            launch(stream, (16,))
    launch(9, (16,))
    with pytest.raises(ValueError, match="same size"):  # an address too many
        launch(9, (16, 32))
    assert found == [1, 7, 1, 8, 9]


def test_the_runtime_of_the_preferred_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = {version: tmp_path / version / "lib" / launching.LIBRARY for version in ("cu12", "cu13")}
    for path in libraries.values():
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(launching.importlib.util, "find_spec", lambda name: package)
    assert [launching.runtime_library(version) for version in libraries] == list(libraries.values())
    libraries["cu13"].unlink()
    assert launching.runtime_library("cu13") == libraries["cu12"]


@pytest.mark.parametrize(
    ("cuda", "version"),
    [("12.8", "cu12"), ("12", "cu12"), ("13.0", "cu13"), ("14.1", "cu13"), (None, "cu13"), ("none", "cu13")],
)
def test_the_runtime_of_the_cuda_that_torch_has(
    cuda: str | None, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that serves a torch for CUDA 12 may refuse the runtime for CUDA 13. Without torch it is the newer."""
    for name in ("cu12", "cu13"):
        path = tmp_path / name / "lib" / launching.LIBRARY
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(launching.importlib.util, "find_spec", lambda name: package)
    torch = None if cuda == "none" else SimpleNamespace(version=SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert launching.runtime_library() == tmp_path / version / "lib" / launching.LIBRARY
    assert launching.runtime_library("cu13") == tmp_path / "cu13" / "lib" / launching.LIBRARY
