"""The plan of a run, made only from sizes and dtypes, so that it needs no weights. Making one checks that the options
go together, that texts fit the model's length and the cache's pages, and that the implementation can run."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from tsmla_jax.generate.caches import (
    PACKED,
    CacheLayout,
    default_cache_dtype,
    default_page_size,
    packed_reasons,
    page_multiple,
    window_rows,
)
from tsmla_jax.generate.config import ModelConfig
from tsmla_jax.generate.explaining import Choice, explain_experts, explain_step
from tsmla_jax.generate.mesh import ONE_DEVICE, MeshShape, check_mesh
from tsmla_jax.generate.model import Params
from tsmla_jax.generate.pages import pages_for
from tsmla_kernels.contract import FP8, is_scale

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Texts of a decode step. No other sizes are compiled: a smaller batch has rows of padding."""

LEAST_TEMPERATURE = 1e-30
"""Least temperature of sampling. Logits divided by less may be infinite in f32, and then nothing can be drawn."""

SHORT_PROMPT = 256
"""A prefill step takes at most one prompt for each SHORT_PROMPT tokens of the chunk, or 4 if that is more. Shorter
prompts may leave room in it.
"""

Program = Literal["step", "layer"]


@dataclass(frozen=True)
class EngineOptions:
    """How to generate.

    Attributes:
      page_size: tokens a page, Z; None is `caches.default_page_size`. In V4 a multiple of `caches.page_multiple`, which
        is 128 for layers of ratios 4 and 128.
      num_pages: pages of each device's cache; None makes room for max_batch of the given texts at once: each cache has
        room for its replica's share. `Engine.admit` needs a number, as it doesn't know the texts that will come.
      max_batch: texts that decode together, over all replicas; at most the last of BATCH_SIZES.
      chunk: most prompt tokens of one prefill step of a replica.
      speculative: most tokens drafted for a text in a step; 0 for none.
      temperature: 0 is greedy, else finite and at least LEAST_TEMPERATURE.
      top_p: the smallest set of most likely tokens whose probability reaches it is sampled from.
      seed: the seed of the random numbers that tokens are sampled by.
      cache_dtype: None is `caches.default_cache_dtype`: "packed" for V3.2, GLM-5 and V4 with parameters of 16 bits,
        else the parameters' dtype. "float8_e4m3fn" halves a bf16 cache; "packed" is these models' fp8 layout, which
        has scales, for latents and for indexer keys; the parameters' dtype rounds no key. With parameters of float32
        "bfloat16" and "float16" are legal, too.
      kv_scale: a cache of "float8_e4m3fn" holds values / kv_scale.
      q_dtype: the dtype of absorbed queries, which are decode's queries in V2 and V3, and all queries in V3.2 and V4.
        None takes the parameters' dtype; "float8_e4m3fn", for fp8 and packed caches, multiplies queries and keys in
        fp8, with the error that docs/guides/fp8.md states.
      q_scale: an fp8 query holds values / q_scale.
      implementation: the implementation of the attention operations; None takes the best that can run.
      program: "step" compiles a step as one program, the fastest to run; "layer" compiles a layer of each kind, in a
        fraction of the time. None is "layer" where jax's default backend is cpu, else "step"; on a mesh it is "step".
      data_parallel: how many copies of the model the mesh has (`MeshShape`).
      expert_parallel: how many replicas a copy has, each of which attends for texts of its own. The experts of a copy
        are split over expert_parallel x context_parallel devices.
      context_parallel: how many devices share the keys of one text.

    Raises:
      ValueError: a value is not legal. `check` refuses a page size, dtypes and a mesh that don't go with a model, and
        `make_plan` an unknown implementation.
      TypeError: temperature, top_p, kv_scale or q_scale is not a number.
    """

    page_size: int | None = None
    num_pages: int | None = None
    max_batch: int = 32
    chunk: int = 2048
    speculative: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    cache_dtype: str | None = None
    kv_scale: float = 1.0
    q_dtype: str | None = None
    q_scale: float = 1.0
    implementation: str | None = None
    program: Program | None = None
    data_parallel: int = 1
    expert_parallel: int = 1
    context_parallel: int = 1

    def __post_init__(self) -> None:
        counts = ("chunk", "data_parallel", "expert_parallel", "context_parallel")
        if not is_count(self.seed, 0) or self.seed >= 2**32:
            raise ValueError(f"seed = {self.seed}; legal: an int, 0 to 2**32 - 1")
        for name, least in (*((count, 1) for count in counts), ("speculative", 0)):
            if not is_count(value := getattr(self, name), least):
                raise ValueError(f"{name} = {value}; legal: an int, at least {least}")
        if not is_count(self.max_batch, 1) or self.max_batch > BATCH_SIZES[-1]:
            raise ValueError(f"max_batch = {self.max_batch}; legal: an int, 1 to {BATCH_SIZES[-1]}")
        if self.program not in ("step", "layer", None):
            raise ValueError(f"program = {self.program!r}; legal: 'step', 'layer', None")
        if self.program == "layer" and self.mesh.size > 1:
            raise ValueError("program = 'layer'; legal on a mesh: 'step', None")
        for name in ("page_size", "num_pages"):
            value = getattr(self, name)
            if value is not None and not is_count(value, 1):
                raise ValueError(f"{name} = {value}; legal: an int, at least 1, or None")
        for name in ("temperature", "top_p", "kv_scale", "q_scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"{name}: got {type(value).__name__}; legal: a number")
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature = {self.temperature}; legal: 0 (greedy), or a finite number, {LEAST_TEMPERATURE} or more"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}; legal: above 0, at most 1")
        for name in ("kv_scale", "q_scale"):
            value = getattr(self, name)
            if not is_scale(value):
                raise ValueError(f"{name} = {value}; legal: a positive number, 1.2e-38 to 8.5e37")

    @property
    def mesh(self) -> MeshShape:
        """The sizes of the mesh."""
        return MeshShape(self.data_parallel, self.expert_parallel, self.context_parallel)

    def check(self, config: ModelConfig, dtype: str) -> None:
        """Raises a ValueError unless mesh, page size and dtypes go with this model, with parameters of this dtype and
        with jax's devices.
        """
        check_mesh(config, self.mesh)
        _page_size(config, self)
        _dtypes(config, self, dtype)


@dataclass(frozen=True)
class Plan:
    """The shapes of a run.

    Attributes:
      batch: texts of a replica that decode together.
      max_pages: width of the block tables.
      prefill_sizes: the sizes in tokens that a prefill step may be padded to; the chunk is the last.
      dtype, q_dtype: names of the dtypes of the activations and of the absorbed queries.
      layout: the layout of a device's caches.
      at_once: whether a step is one program.
      choices: which implementation runs attention, the choice of keys and V4's compression, and why; after
        `with_experts`, the experts, too.
      mesh: the shape of the devices' mesh.
    """

    batch: int
    max_pages: int
    prefill_sizes: tuple[int, ...]
    dtype: str
    q_dtype: str
    layout: CacheLayout
    at_once: bool
    choices: tuple[Choice, ...]
    mesh: MeshShape = ONE_DEVICE

    def with_experts(self, params: Params) -> Plan:
        """This plan with the choices for the experts added, which depend on the experts' weights."""
        return replace(self, choices=(*self.choices, *explain_experts(params, jnp.dtype(self.dtype))))

    @property
    def span(self) -> int:
        """How many tokens an entry of a block table stands for: a page on each device that shares a text's keys."""
        return self.layout.page_size * self.mesh.context

    @property
    def rows(self) -> int:
        """How many rows a decode step has if all texts are in it."""
        return next(size for size in BATCH_SIZES if size >= self.batch)

    @property
    def prefill_rows(self) -> int:
        """The most prompts that a prefill step of a replica can take."""
        return min(self.batch, max(4, self.prefill_sizes[-1] // SHORT_PROMPT))


def make_plan(
    config: ModelConfig, options: EngineOptions, prompts: Sequence[Sequence[int]], max_new_tokens: int, dtype: str
) -> Plan:
    """Checks prompts and options against each other, and makes the plan for these prompts, with a cache of
    options.num_pages pages or of as many as the prompts need.

    Args:
      config: the model.
      options: how to generate.
      prompts: token ids.
      max_new_tokens: how many tokens to generate after each prompt, at most.
      dtype: the dtype of the parameters.

    Raises:
      ValueError: a mesh that does not go with the model or jax's devices, no prompt or an empty one, an id outside the
        vocabulary, max_new_tokens below 1, a text longer than the cache or the model allows, a page size or a dtype of
        the cache or the queries that does not go with the model or its parameters, an unknown implementation.
      NotImplementedError: the implementation that was asked for can't run this.
    """
    if len(prompts) == 0:
        raise ValueError("prompts: none given; legal: at least one")
    for index, prompt in enumerate(prompts):
        _check_prompt(config, f"prompt {index}", prompt, max_new_tokens)
    options.check(config, dtype)
    span = _page_size(config, options) * options.context_parallel
    # The last token that is generated never enters the cache.
    lengths = [len(prompt) + max_new_tokens - 1 for prompt in prompts]
    needs = [pages_for(length, span) for length in lengths]
    batch = _texts_of_replica(options, min(options.max_batch, len(prompts)))
    num_pages = options.num_pages or sum(sorted(needs)[-batch:])
    for index, need in enumerate(needs):
        _check_room(f"prompt {index}", prompts[index], max_new_tokens, need, num_pages, span)
    return _plan(config, options, batch, num_pages, max(lengths), dtype)


def make_serving_plan(config: ModelConfig, options: EngineOptions, dtype: str) -> Plan:
    """The plan for texts that are not known yet: options.max_batch of them, each as long as the cache and the model
    allow.

    Raises:
      ValueError: options.num_pages is None; or as `make_plan`, for the options.
      NotImplementedError: the implementation that was asked for can't run this.
    """
    if options.num_pages is None:
        raise ValueError("num_pages = None; legal for texts that come one by one: at least 1")
    options.check(config, dtype)
    held = options.num_pages * _page_size(config, options) * options.context_parallel
    longest = min(held, config.max_position_embeddings)
    return _plan(config, options, _texts_of_replica(options, options.max_batch), options.num_pages, longest, dtype)


def is_count(value: object, least: int = 0) -> bool:
    """Whether `value` is an int of Python or numpy, not a bool, and at least `least`."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def _texts_of_replica(options: EngineOptions, texts: int) -> int:
    """The most texts that one replica has, if `texts` texts are shared out evenly."""
    return -(-texts // options.mesh.replicas)


def check_text(config: ModelConfig, plan: Plan, name: str, tokens: Sequence[int], limit: int) -> tuple[list[int], int]:
    """Returns the prompt's ids and how many pages the text needs. Raises a ValueError if the plan can't serve this
    text; except for an illegal `limit`, its message begins with `name`.
    """
    ids = _check_prompt(config, name, tokens, limit)
    need = pages_for(len(ids) + limit - 1, plan.span)
    _check_room(name, ids, limit, need, min(plan.max_pages, plan.layout.num_pages), plan.span)
    return ids, need


def _page_size(config: ModelConfig, options: EngineOptions) -> int:
    page_size = default_page_size(config) if options.page_size is None else options.page_size
    if page_size % page_multiple(config):
        raise ValueError(
            f"page_size = {page_size}; legal for this model: a multiple of {page_multiple(config)}, so "
            f"that a page holds whole compressed entries"
        )
    return page_size


def _plan(config: ModelConfig, options: EngineOptions, batch: int, num_pages: int, longest: int, dtype: str) -> Plan:
    """The plan for `batch` texts of a replica, the longest of which has `longest` tokens."""
    page_size = _page_size(config, options)
    cache_dtype, q_dtype = _dtypes(config, options, dtype)
    layout = CacheLayout(
        num_pages=num_pages,
        page_size=page_size,
        state_slots=batch,
        window_rows=window_rows(config, max(options.chunk, options.speculative + 1), longest),
        spare=options.speculative,
        dtype=cache_dtype,
    )
    max_pages = pages_for(longest, page_size * options.context_parallel)
    choices = explain_step(
        config,
        dtype=jnp.dtype(dtype),
        q_dtype=jnp.dtype(q_dtype),
        layout=layout,
        batch=batch,
        max_pages=max_pages,
        chunk=options.chunk,
        max_q_len=options.speculative + 1,
        context=options.context_parallel,
        implementation=options.implementation,
    )
    sizes = sorted({max(1, options.chunk // 16), max(1, options.chunk // 4), options.chunk})
    one_device = options.mesh.size == 1
    program = options.program or ("layer" if one_device and jax.default_backend() == "cpu" else "step")
    return Plan(batch, max_pages, tuple(sizes), dtype, q_dtype, layout, program == "step", tuple(choices), options.mesh)


def _dtypes(config: ModelConfig, options: EngineOptions, dtype: str) -> tuple[str, str]:
    """The dtypes of the caches and of the queries."""
    cache_dtype = _cache_dtype(config, options.cache_dtype or default_cache_dtype(config, dtype), dtype)
    return cache_dtype, _q_dtype(options.q_dtype or dtype, cache_dtype, dtype)


def _cache_dtype(config: ModelConfig, cache_dtype: str, dtype: str) -> str:
    legal = [dtype, FP8, *(["bfloat16", "float16"] if dtype == "float32" else [])]
    reasons = packed_reasons(config)
    if cache_dtype == PACKED and reasons:
        raise ValueError(f"cache_dtype = 'packed': {'; '.join(reasons)}; legal here: {', '.join(legal)}, or None")
    if cache_dtype not in (*legal, PACKED):
        raise ValueError(
            f"cache_dtype = {cache_dtype!r}; legal with parameters of {dtype}: "
            f"{', '.join(legal if reasons else [*legal, PACKED])}, or None"
        )
    return cache_dtype


def _q_dtype(q_dtype: str, cache_dtype: str, dtype: str) -> str:
    legal = [dtype, *([FP8] if cache_dtype in (FP8, PACKED) else [])]
    if q_dtype not in legal:
        raise ValueError(
            f"q_dtype = {q_dtype!r}; legal with parameters of {dtype} and a cache of {cache_dtype}: "
            f"{', '.join(legal)}, or None"
        )
    return q_dtype


def _check_prompt(config: ModelConfig, name: str, tokens: Sequence[int], max_new_tokens: int) -> list[int]:
    """The ids of a prompt, which may be an array, as ints; ValueError if the model can't continue it."""
    if not is_count(max_new_tokens, 1):
        raise ValueError(f"max_new_tokens = {max_new_tokens}; legal: an int, at least 1")
    if len(tokens) == 0:  # an array has no truth value
        raise ValueError(f"{name}: empty; legal: at least one token")
    ids: list[int] = []
    for token in np.asarray(tokens).tolist() if hasattr(tokens, "dtype") else tokens:
        try:
            ids.append(operator.index(token))
        except TypeError:
            ids.append(-1)
        if not 0 <= ids[-1] < config.vocab_size:
            raise ValueError(f"{name}: token id {token}; legal: 0 to {config.vocab_size - 1}")
    if len(tokens) + max_new_tokens > config.max_position_embeddings:
        raise ValueError(
            f"{name}: {len(tokens)} tokens and {max_new_tokens} new ones; the model was made for "
            f"{config.max_position_embeddings} in all (max_position_embeddings)"
        )
    return ids


def _check_room(name: str, tokens: Sequence[int], new: int, need: int, num_pages: int, span: int) -> None:
    if need > num_pages:
        raise ValueError(
            f"{name}: {len(tokens)} tokens and {new} new ones need {need} pages of {span}; the cache has {num_pages}"
        )
