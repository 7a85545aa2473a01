"""The plan of a run, made before a weight is read: do the options go together, does everything fit, can it run?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from tsmla_jax.generate.caches import (
    PACKED,
    CacheLayout,
    default_page_size,
    packed_reasons,
    page_multiple,
    window_rows,
)
from tsmla_jax.generate.config import ModelConfig
from tsmla_jax.generate.explaining import Choice, explain_step
from tsmla_jax.generate.pages import pages_for


@dataclass(frozen=True)
class EngineOptions:
    """How to generate.

    Attributes:
      page_size: tokens a page, Z; None is `caches.default_page_size`. In V4 a multiple of its ratios, so of 128.
      num_pages: pages of the cache; None makes it hold max_batch of the given prompts at once.
      max_batch: texts that decode together.
      chunk: most prompt tokens of one prefill step. The indexers of V3.2 and V4 score each of them against every key
        of its text, in f32: a bound for their memory.
      speculative: most tokens drafted a step; 0 for none.
      temperature: 0 is greedy.
      top_p: the smallest set of most likely tokens whose probability reaches it is sampled from.
      seed: of the sampling.
      cache_dtype: None takes the parameters' dtype; "float8_e4m3fn" halves a bf16 cache; "packed" is the fp8 layout
        with scales of V3.2 and V4.
      kv_scale: an fp8 cache holds values / kv_scale.
      implementation: of the operations; None is the best that can run.
    """

    page_size: int | None = None
    num_pages: int | None = None
    max_batch: int = 32
    chunk: int = 512
    speculative: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    cache_dtype: str | None = None
    kv_scale: float = 1.0
    implementation: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("chunk", 1), ("speculative", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)}; legal: at least {least}")
        for name in ("page_size", "num_pages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}; legal: at least 1, or None")
        if self.seed >= 2**32:
            raise ValueError(f"seed = {self.seed}; legal: below 2**32")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature}; legal: 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}; legal: above 0, at most 1")
        if not 0 < self.kv_scale < float("inf"):
            raise ValueError(f"kv_scale = {self.kv_scale}; legal: a positive number")


@dataclass(frozen=True)
class Plan:
    """One call of `Engine.generate`.

    Attributes:
      needs: pages that each prompt and its continuation may take.
      batch: texts that decode together.
      max_pages: width of the block tables.
      dtype: name of the dtype of the activations.
      layout: of the caches.
      choices: which implementation runs each operation and why.
    """

    needs: tuple[int, ...]
    batch: int
    max_pages: int
    dtype: str
    layout: CacheLayout
    choices: tuple[Choice, ...]


def make_plan(
    config: ModelConfig, options: EngineOptions, prompts: Sequence[Sequence[int]], max_new_tokens: int, dtype: str
) -> Plan:
    """Checks prompts and options against each other.

    Args:
      config: the model.
      options: how to generate.
      prompts: token ids.
      max_new_tokens: for each prompt.
      dtype: of the parameters.

    Raises:
      ValueError: no prompt or an empty one, an id outside the vocabulary, a text longer than the cache or the model, a
        page size or cache dtype that does not go with the model or its parameters, an unknown implementation.
      NotImplementedError: the implementation that was asked for can't run this.
    """
    _check_prompts(config, prompts, max_new_tokens)
    page_size = default_page_size(config) if options.page_size is None else options.page_size
    if page_size % page_multiple(config):
        raise ValueError(
            f"page_size = {page_size}; legal for this model: a multiple of {page_multiple(config)}, of which a page "
            f"holds whole compressed entries"
        )
    # The last token that is generated never enters the cache.
    lengths = [len(prompt) + max_new_tokens - 1 for prompt in prompts]
    needs = tuple(pages_for(length, page_size) for length in lengths)
    batch = min(options.max_batch, len(prompts))
    num_pages = options.num_pages or sum(sorted(needs)[-batch:])
    for index, need in enumerate(needs):
        if need > num_pages:
            raise ValueError(
                f"prompt {index}: {len(prompts[index])} tokens and {max_new_tokens} new ones need {need} pages of "
                f"{page_size}; the cache has {num_pages}"
            )
    step_tokens = max(options.chunk, options.speculative + 1)
    layout = CacheLayout(
        num_pages=num_pages,
        page_size=page_size,
        state_slots=batch,
        window_rows=window_rows(config, step_tokens, max(lengths)),
        spare=options.speculative,
        dtype=_cache_dtype(config, options.cache_dtype or dtype, dtype),
    )
    choices = explain_step(
        config,
        dtype=jnp.dtype(dtype),
        layout=layout,
        batch=batch,
        max_pages=max(needs),
        chunk=options.chunk,
        max_q_len=options.speculative + 1,
        implementation=options.implementation,
    )
    return Plan(needs, batch, max(needs), dtype, layout, tuple(choices))


def _cache_dtype(config: ModelConfig, cache_dtype: str, dtype: str) -> str:
    legal = [dtype, "float8_e4m3fn", *(["bfloat16", "float16"] if dtype == "float32" else [])]
    reasons = packed_reasons(config)
    if cache_dtype == PACKED and reasons:
        raise ValueError(f"cache_dtype = 'packed': {'; '.join(reasons)}; legal here: {', '.join(legal)}")
    if cache_dtype not in (*legal, PACKED):
        raise ValueError(
            f"cache_dtype = {cache_dtype!r}; legal with parameters of {dtype}: "
            f"{', '.join(legal if reasons else [*legal, PACKED])}"
        )
    return cache_dtype


def _check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if not prompts:
        raise ValueError("prompts: none given; legal: at least one")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {max_new_tokens}; legal: at least 1")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index}: empty; legal: at least one token")
        for token in prompt:
            if not 0 <= token < config.vocab_size:
                raise ValueError(f"prompt {index}: token id {token}; legal: 0 to {config.vocab_size - 1}")
        if len(prompt) + max_new_tokens > config.max_position_embeddings:
            raise ValueError(
                f"prompt {index}: {len(prompt)} tokens and {max_new_tokens} new ones; the model was made for "
                f"{config.max_position_embeddings} (max_position_embeddings)"
            )
