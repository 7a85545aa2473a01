"""A step counts slots by the page size that it was made with; layers refuse caches of other pages."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax.nn import hf_layers
from tsmla_jax.nn import MLAConfig, MLAttention, Step, functional, param_shapes, v4, v32
from tsmla_jax.sparse import init_v4_cache

SPEC = jax.ShapeDtypeStruct
CONFIG = MLAConfig(hidden_size=16, num_attention_heads=2, kv_lora_rank=16, qk_rope_head_dim=8)
PARAMS = {name: SPEC(shape, jnp.float32) for name, shape in param_shapes(CONFIG).items()}
CACHE = SPEC((8, 64, CONFIG.cache_dim), jnp.float32)
TABLES, LENS = np.asarray([[3, 1], [4, 2]], np.int32), np.asarray([70, 5], np.int32)
STARTS = np.arange(3, dtype=np.int32)
OTHER = "step: got one made with page_size=16, but kv_cache's pages have 64 slots; legal: a step made with"


def dense(page_size: Any) -> Step:
    return Step.dense(TABLES, LENS, page_size=page_size)


def ragged(page_size: Any) -> Step:
    return Step.ragged(TABLES, LENS, STARTS, total_tokens=2, page_size=page_size)


def decode(step: Step) -> Any:
    x = SPEC((2, 1, 16) if step.cu_seqlens_q is None else (2, 16), jnp.float32)
    return jax.eval_shape(lambda params, x, cache: functional.decode(params, CONFIG, x, cache, step), PARAMS, x, CACHE)


def prefill(step: Step) -> Any:
    x = SPEC((2, 16), jnp.float32)
    return jax.eval_shape(
        lambda params, x, cache: functional.prefill_with_context(params, CONFIG, x, cache, step, context_chunk=64),
        PARAMS, x, CACHE,
    )  # fmt: skip


def through_jit(step: Step) -> Step:
    return jax.jit(lambda step: step)(step)


def through_scan(step: Step) -> Step:
    return jax.lax.scan(lambda step, _: (step, None), step, None, length=2)[0]


def through_vmap(step: Step) -> Step:
    return jax.tree.map(lambda x: x[0], jax.vmap(lambda x: jax.tree.map(lambda leaf: leaf + x, step))(jnp.arange(1)))


def through_leaves(step: Step) -> Step:
    leaves, structure = jax.tree.flatten(step)
    return jax.tree.unflatten(structure, leaves)


@pytest.mark.parametrize("call", [decode, prefill])
@pytest.mark.parametrize("make", [dense, ragged])
def test_a_cache_of_other_pages_is_refused(call: Callable[[Step], Any], make: Callable[[int], Step]) -> None:
    if (call, make) == (prefill, dense):
        return  # refused as dense
    call(make(64))
    with pytest.raises(ValueError, match=OTHER):
        call(make(16))
    call(replace(make(16), page_size=None))  # made by hand: it does not say


@pytest.mark.parametrize("through", [through_jit, through_scan, through_vmap, through_leaves])
def test_a_step_keeps_its_page_size(through: Callable[[Step], Step]) -> None:
    for make in (dense, ragged):
        assert through(make(16)).page_size == 16
        with pytest.raises(ValueError, match=OTHER):
            decode(through(make(16)))


def test_a_layer_refuses_such_a_step() -> None:
    layer = MLAttention(CONFIG, params={name: jnp.zeros(each.shape) for name, each in PARAMS.items()})
    with pytest.raises(ValueError, match=OTHER):
        layer.decode(jnp.zeros((2, 1, 16)), jnp.zeros(CACHE.shape), dense(16))


def test_page_sizes_that_are_none() -> None:
    for make in (dense, ragged):
        for page_size, error in ((0, ValueError), (16.0, TypeError), (None, TypeError), (jnp.float32(16), TypeError)):
            with pytest.raises(error, match="page_size: got"):
                make(page_size)
        with pytest.raises(TypeError, match=r"page_size: got .* legal: a static int"):
            jax.eval_shape(lambda size, make=make: make(size).slot_mapping, jnp.int32(16))


def test_v32_refuses_another_page_size() -> None:
    case = hf_layers.case("v3.2")
    step = Step.ragged(np.zeros((1, 1), np.int32), LENS[1:], STARTS[:2], total_tokens=1, page_size=32)
    message = "step: got one made with page_size=32, but cache.kv's pages have 16 slots"
    with pytest.raises(ValueError, match=message):
        v32.attend(case.params, case.config, case.x[0, :1], case.cache(1), step)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.uint8])
@pytest.mark.parametrize("kind", ["sliding", "csa", "hca"])
def test_v4_refuses_other_page_sizes(kind: v4.Kind, dtype: Any) -> None:
    """Of the window's cache and of the compressed ones, in floats and in packed pages, whose shape has no Z."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "q_lora_rank": 16, "o_groups": 1, "o_lora_rank": 8}
    config = v4.V4Config(kind=kind, ratio={"sliding": 0, "csa": 4, "hca": 128}[kind], **sizes)
    params = {name: SPEC(shape, jnp.float32) for name, shape in v4.param_shapes(config).items()}

    def attend(page_size: int, entries: int) -> Any:
        def run(params: Any, x: jax.Array) -> Any:
            pages = {"window_pages": 4, "compressed_pages": 2, "num_states": 1}
            cache = v4.init_cache(config, **pages, page_size=64, compressed_page_size=32, dtype=dtype)
            window = Step.ragged(jnp.asarray(TABLES[:1]), LENS[1:], STARTS[:2], total_tokens=1, page_size=page_size)
            step = v4.make_step(
                config, window, state_slots=jnp.zeros(1, jnp.int32), compressed_tables=jnp.asarray(TABLES[:1]),
                cos_sin=v4.rope_table(config, 99), page_size=page_size, compressed_page_size=entries,
            )  # fmt: skip
            return v4.attend(params, config, x, cache, step)[0]

        return jax.eval_shape(run, params, SPEC((1, 32), jnp.float32))

    attend(64, 32)
    got = "37440 bytes, not 9792" if dtype == jnp.uint8 else "64 slots"
    with pytest.raises(ValueError, match=f"step: got one made with page_size=16, but cache.window's pages have {got}"):
        attend(16, 32)
    if kind == "sliding":
        attend(64, 16)  # without compressed caches their page size says nothing
        return
    message = "step: got one made with compressed_page_size=16, but cache.compressed's pages have"
    with pytest.raises(ValueError, match=message):
        attend(64, 16)


def test_make_step_refuses_another_page_size_than_its_steps() -> None:
    window = Step.ragged(jnp.asarray(TABLES[:1]), LENS[1:], STARTS[:2], total_tokens=1, page_size=16)
    config = v4.V4Config("sliding", 0, 32, 2, 16, o_groups=1, o_lora_rank=8)
    with pytest.raises(ValueError, match="page_size: got 64; legal: 16, with which the step was made"):
        v4.make_step(
            config, window, state_slots=jnp.zeros(1, jnp.int32), compressed_tables=jnp.asarray(TABLES[:1]),
            cos_sin=v4.rope_table(config, 99), page_size=64,
        )  # fmt: skip


def test_packed_pages_of_every_size_differ() -> None:
    """So that the bytes of a packed page tell its size."""

    def width(page_size: int) -> int:
        make = partial(init_v4_cache, 1, layout="packed", cache_dtype="fp8", page_size=page_size)
        return jax.eval_shape(make).shape[1]

    widths = [width(page_size) for page_size in range(1, 130)]
    assert len(set(widths)) == len(widths)


def test_a_step_for_other_tokens_is_refused_by_name() -> None:
    def call(x: tuple[int, ...], step: Step) -> None:
        jax.eval_shape(lambda params, cache: functional.decode(params, CONFIG, jnp.ones(x), cache, step), PARAMS, CACHE)

    made, legal = "step: got one made for new tokens", "; legal: a step made with"
    for x, given in (((2, 2, 16), "[2, 2]"), ((3, 1, 16), "[3, 1]")):
        text = f"{made} [2, 1], but x has {given}{legal} new_tokens={x[1]} for {x[0]} requests"
        with pytest.raises(ValueError, match=re.escape(text)):
            call(x, dense(64))
    with pytest.raises(ValueError, match=re.escape(f"{made} [2], but x has [4]{legal} total_tokens=4")):
        call((4, 16), ragged(64))
