"""An architecture of Blackwell to compile for, one cache for all that is compiled here, and the package's host code."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tsmla_jax.ops import device, kernel_call
from tsmla_jax.ops.mla_decode import cute as decode
from tsmla_jax.ops.mla_prefill import cute as prefill
from tsmla_kernels import object_cache

ARCH = "sm_100a"


@pytest.fixture(scope="session")
def compiled_objects(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all tests' objects, in pytest's own cache: an object is found again only for the same sources,
    config and versions, and carries its compilation's log. TSMLA_BLACKWELL_CACHE names another folder."""
    if named := os.environ.get("TSMLA_BLACKWELL_CACHE"):
        return Path(named)
    kept = getattr(request.config, "cache", None)  # none with -p no:cacheprovider
    if kept is None:
        return tmp_path_factory.mktemp("blackwell-objects")
    path: Path = kept.mkdir("blackwell-objects")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TSMLA_CACHE_DIR", str(path))
        object_cache.prune()  # removes objects that no test will ask for any more
    return path


@pytest.fixture(autouse=True)
def blackwell(compiled_objects: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if device.gpu() is not None:
        pytest.skip("lowers for an architecture that this machine's GPU isn't of")
    monkeypatch.setenv("TSMLA_CACHE_DIR", str(compiled_objects))
    monkeypatch.setenv("CUTE_DSL_ARCH", ARCH)
    forget()
    yield
    forget()


def forget() -> None:
    """Drop programs that an earlier test traced with other functions in the place of real ones."""
    decode._transformable.cache_clear()
    prefill._transformable.cache_clear()
    kernel_call._module.cache_clear()
    object_cache._loaded.clear()
