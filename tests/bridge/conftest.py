"""The stand-in for the GPU, and no plan, kernel or scale of another test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.emulator import launcher
from tsmla_bridge.ops import plans
from tsmla_bridge.runtime import loaded_kernels, scales


@pytest.fixture(autouse=True)
def gpu_in_torch(request: pytest.FixtureRequest) -> None:
    """Skips a test marked gpu where torch is one for CPUs: that jax has a GPU says nothing of torch."""
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """No plan, kernel or scale of another test."""
    kept = (plans._plans, plans.latest_plans, loaded_kernels._loaded, scales._of_stream, scales._of_capture)
    for cache in kept:
        cache.clear()
    yield
    for cache in kept:
        cache.clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[launcher.Gpu]:
    """From here on CPU tensors are on a Hopper GPU that runs the stand-in."""
    gpu = launcher.install(monkeypatch)
    yield gpu
    assert not gpu.borrowed
