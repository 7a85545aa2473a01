"""Fixtures of tests that launch kernels: one cache of compiled objects for all, and the GPU that torch needs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tsmla_bridge.runtime import loaded_kernels
from tsmla_kernels.catalog import MLA_DECODE


@pytest.fixture(scope="session")
def compiled_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that TSMLA_CACHE_DIR names, which may have been filled elsewhere; else one for all processes of this
    run. An object takes ten to twenty seconds to compile."""
    if named := os.environ.get("TSMLA_CACHE_DIR"):
        return Path(named)
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a folder of its own in one that all share
        root = root.parent
    return root / "gpu-objects"


@pytest.fixture(autouse=True)
def shared_cache(compiled_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test and its children use that cache, and compile for the GPU that is there."""
    monkeypatch.setenv("TSMLA_CACHE_DIR", str(compiled_cache))
    monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)


@pytest.fixture
def hopper_in_torch() -> None:
    """Skips a test of a kernel that torch launches where it can't."""
    if not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")
    if reasons := loaded_kernels.reasons(MLA_DECODE, torch.device("cuda")):
        pytest.skip("; ".join(reasons))
