"""A mesh over the eight simulated devices, and an emulation of the prefill kernels."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType, Mesh

from tests.emulator import decode as cute_emulation
from tests.emulator import prefill as emulation
from tsmla_jax.ops.mla_prefill import backward, cute
from tsmla_jax.ops.mla_prefill_kv import cute as cute_kv


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


@pytest.fixture
def for_hopper(cache_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are made for Hopper."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")


@pytest.fixture
def emulated_prefill(for_hopper: None) -> Iterator[None]:
    """Calls are made for Hopper, and the emulation takes the place of the kernels."""
    traced = (cute._transformable, cute._differentiable, cute_kv._differentiable, backward._transformable)
    with cute_emulation.emulated(*traced, by=emulation.emulate):
        yield
