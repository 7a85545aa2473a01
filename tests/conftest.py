"""What every test shares: eight simulated CPU devices, repeatable property tests, what goes with the gpu marker."""

import collections
import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

from tests import speed
from tsmla_kernels import object_cache

speed.compile_quickly()
speed.collect_no_garbage()

# The suite's workers share the cores: torch's threads would spin, waiting for one another. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before the first backend starts: shard_map tests need several devices, and one CPU can pretend to be eight.
jax.config.update("jax_num_cpu_devices", 8)

# Timings on shared CI machines say nothing, and a failure must come back on the next run.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_freed() -> Iterator[None]:
    """Ends a module's compiled programs with it."""
    yield
    speed.forget_programs()


@contextlib.contextmanager
def _optimised() -> Iterator[None]:
    before = jax.config.read("jax_disable_most_optimizations")
    jax.clear_caches()  # a program that was compiled quickly would serve
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def optimised_compilation() -> Iterator[None]:
    """As on a user's machine: for a test of which bits come out however a program is compiled."""
    with _optimised():
        yield


@pytest.fixture(scope="module")
def optimised_module() -> Iterator[None]:
    """optimised_compilation for all tests of a module, which share their programs."""
    with _optimised():
        yield


@pytest.fixture
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of compiled objects of the test's own, and no architecture but the one that the test sets."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("TSMLA_CACHE_DIR", str(directory))
    monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
    object_cache._loaded.clear()
    yield directory
    object_cache._loaded.clear()


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
def shared_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test marked gpu, and its children, use that cache, and compile for the GPU that is there."""
    if request.node.get_closest_marker("gpu"):
        monkeypatch.setenv("TSMLA_CACHE_DIR", str(request.getfixturevalue("compiled_cache")))
        monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)


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


@functools.cache
def _why_no_gpu() -> str | None:
    """None where jax has an NVIDIA GPU, else the reason that a gpu test is skipped with."""
    try:
        devices = jax.devices("cuda")
    except RuntimeError as error:
        return f"needs an NVIDIA GPU that jax can use: {str(error).splitlines()[0]}"
    return None if devices else "needs an NVIDIA GPU that jax can use: there is none"


def pytest_configure(config: pytest.Config) -> None:
    """On a GPU programs are optimised as for a user and not shared: they are large, and few."""
    if config.option.markexpr != "gpu":
        speed.optimise_little()
        speed.compile_once()
        speed.share_programs()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow all cases of a test marked sampled(n) but every n-th, before the slow ones are left out."""
    seen: collections.Counter[str] = collections.Counter()
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1


def pytest_collection_finish() -> None:
    speed.collect_garbage_rarely()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _why_no_gpu()):
        pytest.skip(reason)
