"""Every test of the kernels compiles into a cache of its own."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(cache_directory: Path) -> Path:
    return cache_directory
