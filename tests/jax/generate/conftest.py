"""Fixtures of the tests of generation: one tiny checkpoint, loaded once."""

from pathlib import Path
from typing import Any

import pytest

from tests.jax.generate.tiny import write_tiny
from tsmla_jax.generate import ModelConfig, command, load_model


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command would write to the user's cache, for this process and all later ones."""
    monkeypatch.setattr(command, "keep_compiled_programs", lambda: None)
    monkeypatch.setattr(command, "put_collectives_in_graphs", lambda: None)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 checkpoint directory in f32 with toy dimensions."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_model(tiny_checkpoint: Path) -> tuple[ModelConfig, Any]:
    """Config and parameters of tiny_checkpoint."""
    config = ModelConfig.from_hf(tiny_checkpoint)
    return config, load_model(tiny_checkpoint, config)
