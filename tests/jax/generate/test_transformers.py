"""Greedy tokens against transformers' own models (DeepSeek-V2, V3, V3.2, V4; eager) on the same checkpoints."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jax.generate.transformers_models import (
    SIZES,
    reference_tokens,
    torch,
)
from tsmla_jax.generate import Engine, EngineOptions, ModelConfig, load_model

NEW_TOKENS = 64
LENGTHS = (1, 17, 33, 71)
# For the sparse models: the third prompt reaches the first entry of ratio 128 while it is being continued, the fourth
# the third one; all but the first are longer than the indexers choose keys for.
SPARSE_NEW_TOKENS = 40
SPARSE_LENGTHS = (1, 23, 110, 365)


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Toy matrices: threads only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(directory: Path) -> tuple[ModelConfig, Any]:
    config = replace(ModelConfig.from_hf(directory), eos_token_ids=())
    return config, load_model(directory, config)


@pytest.mark.parametrize("name", ["v3", "v2-lite", "v2"])
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, SIZES["vocab_size"], length).tolist() for length in LENGTHS]
    expected = reference_tokens(name, prompts, NEW_TOKENS, tmp_path)
    assert len({tuple(text) for text in expected}) == len(prompts)

    config, params = load(tmp_path)
    # The chunk cuts the longest prompt, so that chunks with and without cached context are both used.
    options = EngineOptions(page_size=16, chunk=64)
    assert Engine(params, config, options).generate(prompts, NEW_TOKENS).tokens == expected
    speculative = Engine(params, config, replace(options, speculative=4)).generate(prompts, NEW_TOKENS)
    assert speculative.tokens == expected
    assert speculative.figures.drafted_tokens > speculative.figures.accepted_tokens > 0


@pytest.mark.parametrize(("name", "page_size"), [("v3.2", 16), ("v4", 128)])
def test_greedy_tokens_of_sparse_models_equal_transformers(name: str, page_size: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, SIZES["vocab_size"], length).tolist() for length in SPARSE_LENGTHS]
    expected = reference_tokens(name, prompts, SPARSE_NEW_TOKENS, tmp_path)
    assert len({tuple(text) for text in expected}) == len(prompts)

    config, params = load(tmp_path)
    # Texts of different lengths share the chunks and decode together.
    options = EngineOptions(page_size=page_size, chunk=64)
    assert Engine(params, config, options).generate(prompts, SPARSE_NEW_TOKENS).tokens == expected
