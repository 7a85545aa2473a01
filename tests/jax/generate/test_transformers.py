"""Greedy tokens against transformers' own models (DeepSeek, GLM, Youtu; eager) on the same checkpoints."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax.generate.transformers_models import (
    SIZES,
    reference_logits,
    reference_tokens,
    torch,
)
from tsmla_jax.generate import Engine, EngineOptions, ModelConfig, load_model
from tsmla_jax.generate.caches import CacheLayout, init_cache
from tsmla_jax.generate.model import Batch, Scales, StepOptions, forward
from tsmla_jax.nn import Step

NEW_TOKENS = 64
LENGTHS = (1, 17, 33, 71)
# For the sparse models: the third prompt reaches the first entry of ratio 128 while it is being continued, the fourth
# the third one; all but the first are longer than the indexers choose keys for. The third fills its two chunks, for
# every size of a chunk compiles each kind of layer once more.
SPARSE_NEW_TOKENS = 40
SPARSE_LENGTHS = (1, 23, 104, 365)


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


@pytest.mark.parametrize("name", ["v3", "v2-lite", "v2", "glm-4.7-flash", "youtu", "longcat-flash", "mistral-small-4"])
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


@pytest.mark.parametrize(("name", "page_size"), [("v3.2", 16), ("glm-5", 16), ("v4", 128)])
def test_greedy_tokens_of_sparse_models_equal_transformers(name: str, page_size: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, SIZES["vocab_size"], length).tolist() for length in SPARSE_LENGTHS]
    expected = reference_tokens(name, prompts, SPARSE_NEW_TOKENS, tmp_path)
    assert len({tuple(text) for text in expected}) == len(prompts)

    config, params = load(tmp_path)
    # Texts of different lengths share the chunks and decode together.
    options = EngineOptions(page_size=page_size, chunk=64)
    assert Engine(params, config, options).generate(prompts, SPARSE_NEW_TOKENS).tokens == expected
    if name == "glm-5":
        assert config.indexer_layers == (True, False, True, False)
        speculative = Engine(params, config, replace(options, speculative=3)).generate(prompts, SPARSE_NEW_TOKENS)
        assert speculative.tokens == expected


@pytest.mark.parametrize("name", ["glm-5", "glm-4.7-flash", "youtu", "longcat-flash", "mistral-small-4"])
@pytest.mark.sampled(2)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """Of all tokens of a text, whose second half comes in a step of its own. Either side's float32 is up to 1e-5 of the
    largest logit away from float64."""
    tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], 96).tolist()
    expected = reference_logits(name, tokens, tmp_path)
    config, params = load(tmp_path)
    layout = CacheLayout(num_pages=6, page_size=16, state_slots=1, window_rows=0, spare=0, dtype="float32")
    caches = [init_cache(config.layer(index).attention, layout) for index in range(config.num_layers)]
    found, done = [], 0
    for count in (48, 48):
        new = jnp.asarray(tokens[done : done + count], jnp.int32)
        done += count
        tables, lens = jnp.asarray([[3, 0, 5, 1, 4, 2]], jnp.int32), jnp.asarray([done], jnp.int32)
        starts = jnp.asarray([0, count], jnp.int32)
        step = Step.ragged(tables, lens, starts, total_tokens=count, max_q_len=count, page_size=16)
        rows, options = jnp.arange(count), StepOptions("prefill", page_size=16)
        scores, caches = forward(params, config, caches, Batch(new, step), rows, Scales(), options)
        found.append(np.asarray(scores))
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=0, atol=2e-5 * np.abs(expected).max())
