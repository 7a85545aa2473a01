"""Fixtures of tests that launch kernels from torch: a module's tests share the objects that they compile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tsmla_bridge.runtime import loaded_kernels
from tsmla_kernels.catalog import MLA_DECODE


@pytest.fixture(scope="module")
def compiled_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that is named, which several runs may share, or a new one."""
    named = os.environ.get("TSMLA_CACHE_DIR")
    return Path(named) if named else tmp_path_factory.mktemp("gpu-objects")


@pytest.fixture(autouse=True)
def shared_cache(compiled_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for the module: each object takes ten to twenty seconds to compile."""
    if not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")
    if reasons := loaded_kernels.reasons(MLA_DECODE, torch.device("cuda")):
        pytest.skip("; ".join(reasons))
    monkeypatch.setenv("TSMLA_CACHE_DIR", str(compiled_cache))
