"""A cache of its own for every test, and no architecture but the one a test sets."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The stand-in kernels are named by module in the catalog's way, so the processes that compile must find them.
sys.path.insert(0, str(Path(__file__).parent))

from tsmla_kernels import object_cache

ARCH = "sm_90a"


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    directory = tmp_path / "cache"
    monkeypatch.setenv("TSMLA_CACHE_DIR", str(directory))
    monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
    object_cache._loaded.clear()
    yield directory
    object_cache._loaded.clear()


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each stand-in that was compiled, by any process."""
    path = tmp_path / "builds"
    path.touch()
    monkeypatch.setenv("STANDIN_BUILDS", str(path))
    return path


@pytest.fixture
def child_environment() -> dict[str, str]:
    """What a child process needs to import the packages and the stand-ins as this one does."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
