"""What the tests of generation share: one tiny checkpoint, loaded once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.generate.tiny import write_tiny
from tsmla_jax.generate import ModelConfig, load_model


@pytest.fixture(autouse=True, scope="package")
def quick_compilation() -> Iterator[None]:
    """Toy models run for milliseconds and compile for seconds: half of that is optimisation."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 checkpoint directory in f32 with toy dimensions."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_model(tiny_checkpoint: Path) -> tuple[ModelConfig, Any]:
    """Config and parameters of tiny_checkpoint."""
    config = ModelConfig.from_hf(tiny_checkpoint)
    return config, load_model(tiny_checkpoint, config)
