"""The engine: one cache for many texts; chunks, turns and drafts change no text."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsmla_jax.generate import Engine, EngineOptions, Generation, ModelConfig
from tsmla_jax.generate import step as steps
from tsmla_jax.generate.model import Batch, Scales, StepOptions, decoder_layer, forward
from tsmla_jax.nn import Step

Model = tuple[ModelConfig, Any]

PROMPTS = [np.random.default_rng(n).integers(0, 101, n).tolist() for n in (5, 1, 21, 9, 14)]
# One chunk for all tests, so that they share compiled programs.
OPTIONS = EngineOptions(page_size=4, chunk=16, max_batch=3, num_pages=40)
NEW = 12


@pytest.fixture(scope="module")
def greedy(tiny_model: Model) -> Generation:
    config, params = tiny_model
    return Engine(params, config, OPTIONS).generate(PROMPTS, NEW)


def test_a_step_ends_before_another_one_is_compiled(tiny_model: Model) -> None:
    """Or the compiler's seconds, which are no step's, would hide those of the prompts."""
    config, params = tiny_model
    ready = []

    def compiles(step: str, seconds: float | None) -> None:
        session = engine._opened()
        ready.append([started.tokens.is_ready() for started in session.started])

    engine = Engine(params, config, OPTIONS, compiles)
    engine.generate(PROMPTS[:2], 3)
    assert [True] in ready and all(map(all, ready))


def test_figures_add_up(greedy: Generation, tiny_model: Model) -> None:
    config, _ = tiny_model
    figures = greedy.figures
    assert [len(tokens) for tokens in greedy.tokens] == [NEW] * len(PROMPTS)
    assert figures.prompt_tokens == sum(map(len, PROMPTS)) and figures.generated_tokens == NEW * len(PROMPTS)
    assert figures.decoded_tokens == (NEW - 1) * len(PROMPTS) and figures.acceptance is None
    assert figures.cache_bytes_per_token == 2 * (32 + 8) * 4 == config.num_layers * config.attention.cache_dim * 4
    assert figures.cache_bytes == figures.cache_bytes_per_token * 40 * 4
    assert figures.prefill_tokens_per_second > 0 and figures.decode_tokens_per_second > 0
    assert [choice.op for choice in greedy.choices] == ["mla_prefill", "mla_decode", "experts"]
    assert all(choice.implementation and choice.why for choice in greedy.choices)


def test_company_does_not_change_a_text(greedy: Generation, tiny_model: Model) -> None:
    config, params = tiny_model
    engine = Engine(params, config, OPTIONS)
    assert engine.generate(PROMPTS[4:1:-1], NEW).tokens == greedy.tokens[4:1:-1]


def test_a_small_cache_makes_texts_take_turns(greedy: Generation, tiny_model: Model) -> None:
    config, params = tiny_model
    # 8 pages hold the longest text (21 + 12 - 1 tokens) and nothing beside it.
    small = Engine(params, config, replace(OPTIONS, num_pages=8)).generate(PROMPTS, NEW)
    assert small.tokens == greedy.tokens
    assert small.figures.peak_pages == 8 and small.figures.decode_steps > greedy.figures.decode_steps


def test_chunks_and_pages_do_not_change_the_text(
    greedy: Generation, tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, params = tiny_model
    # The checks see what each step reads and writes: pages in use, slots inside the cache and written once.
    monkeypatch.setenv("TSMLA_CHECK", "1")
    assert Engine(params, config, replace(OPTIONS, chunk=6, page_size=8)).generate(PROMPTS, NEW).tokens == greedy.tokens


def test_an_end_token_ends_its_text_alone(greedy: Generation, tiny_model: Model) -> None:
    config, params = tiny_model
    end = greedy.tokens[2][4]
    expected = [text[: text.index(end) + 1] if end in text else text for text in greedy.tokens]
    assert len(expected[2]) <= 5
    for speculative in (0, 3):
        engine = Engine(params, replace(config, eos_token_ids=(end,)), replace(OPTIONS, speculative=speculative))
        assert engine.generate(PROMPTS, NEW).tokens == expected


def test_speculation_changes_neither_greedy_nor_sampled_text(greedy: Generation, tiny_model: Model) -> None:
    config, params = tiny_model
    assert Engine(params, config, replace(OPTIONS, speculative=3)).generate(PROMPTS, NEW).tokens == greedy.tokens
    # Sharp enough that drafts are accepted, flat enough that seeds differ.
    sampled = replace(OPTIONS, temperature=0.5, top_p=0.9, seed=7)
    plain = Engine(params, config, sampled).generate(PROMPTS, NEW)
    drafted = Engine(params, config, replace(sampled, speculative=3)).generate(PROMPTS, NEW)
    assert drafted.tokens == plain.tokens != greedy.tokens
    assert drafted.figures.drafted_tokens > 0 and drafted.figures.acceptance is not None
    assert Engine(params, config, replace(sampled, seed=8)).generate(PROMPTS, NEW).tokens != plain.tokens


def test_texts_without_drafts_keep_their_rows(tiny_model: Model) -> None:
    """A dense step: the kernel writes every row of it, and no other kernel has to clear rows that it left."""
    state = steps.init_state(3, 2)._replace(
        tokens=jnp.array([5, 6, 7]), cached=jnp.array([4, 9, 7]), remaining=jnp.array([1, 0, 2]),
        block_tables=jnp.array([[0, 1], [2, 3], [4, 5]]),
    )  # fmt: skip
    config = steps.StepConfig(tiny_model[0], StepOptions("decode", page_size=8), 3, True)
    batch = steps._pack_texts(state, steps.no_drafts(3), config)
    assert batch.step.cu_seqlens_q is None and batch.tokens.tolist() == [5, 0, 7]
    assert batch.step.seq_lens.tolist() == [5, 0, 8] and batch.step.slot_mapping.tolist() == [[4], [-1], [39]]
    assert batch.step.owned_tokens(3).tolist() == [True, False, True]
    packed = steps._pack_texts(state, steps.no_drafts(3, 1), config)
    assert packed.step.cu_seqlens_q is not None and packed.step.cu_seqlens_q.tolist() == [0, 1, 1, 2]
    assert packed.tokens[:2].tolist() == [5, 7] and packed.step.owned_tokens(6).tolist() == [True] * 2 + [False] * 4


def test_accepted_drafts_save_steps(tiny_model: Model) -> None:
    """A model that repeats one token for ever accepts every draft after the first few."""
    config, params = tiny_model
    loop = {**params, "lm_head": jnp.zeros_like(params["lm_head"])}
    result = Engine(loop, config, replace(OPTIONS, speculative=3)).generate([[0] * 21] * 3, NEW)
    assert result.tokens == [[0] * NEW] * 3
    # The first token comes from prefill, the other 11 four at a time.
    assert result.figures.decode_steps == 3 and result.figures.acceptance == 1.0


def test_tokens_are_streamed_as_they_come(greedy: Generation, tiny_model: Model) -> None:
    config, params = tiny_model
    seen: list[list[int]] = [[] for _ in PROMPTS]
    ended: list[int] = []
    order: list[int] = []

    def take(index: int, tokens: list[int], done: bool) -> None:
        assert tokens and index not in ended
        seen[index] += tokens
        order.append(index)
        if done:
            ended.append(index)

    Engine(params, config, OPTIONS).generate(PROMPTS, NEW, take)
    assert seen == greedy.tokens and sorted(ended) == [0, 1, 2, 3, 4]
    assert order.index(1) < len(order) - 1 - order[::-1].index(0)


def test_nothing_is_compiled_twice(greedy: Generation, tiny_model: Model) -> None:
    config, params = tiny_model
    compiled: list[str] = []
    ended: list[str] = []

    def note(step: str, seconds: float | None) -> None:
        (compiled if seconds is None else ended).append(step)

    engine = Engine(params, config, OPTIONS, note)
    engine.generate(PROMPTS, NEW)
    # The rests of the chunks decide which shapes are needed.
    shapes = {f"prefill of {tokens} tokens, up to 3 texts" for tokens in (1, 4, 16)}
    shapes |= {f"prefill of {tokens} tokens after cached ones, up to 1 texts" for tokens in (1, 4, 16)}
    assert {*compiled} <= shapes | {"decode of 4 tokens, up to 4 texts"}
    assert ended == compiled and len(compiled) == len({*compiled}) >= 2
    compiled.clear()
    before = decoder_layer._cache_size()
    other = [prompt[::-1] for prompt in PROMPTS[:-1]] + [PROMPTS[-1][:3]]
    assert engine.generate(other, NEW).figures.compile_seconds == 0 and not compiled
    assert decoder_layer._cache_size() == before


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [("bfloat16", Scales()), ("float8_e4m3fn", Scales(0.5)), ("float8_e4m3fn", Scales(0.5, q_scale=0.03))],
)
@pytest.mark.sampled(3)
def test_narrow_caches_and_queries_cost_little_accuracy(dtype: str, scales: Scales, tiny_model: Model) -> None:
    config, params = tiny_model
    tokens = jnp.asarray(PROMPTS[2], jnp.int32)
    length = len(PROMPTS[2])
    tables, lens, cu = jnp.arange(6, dtype=jnp.int32)[None], jnp.asarray([length]), jnp.asarray([0, length])
    batch = Batch(tokens, Step.ragged(tables, lens, cu, total_tokens=length, page_size=4))

    def all_logits(cache_dtype: str, scales: Scales) -> np.ndarray:
        """Logits after every token, all of them read back from the cache."""
        caches = [jnp.full((6, 4, 40), jnp.nan, cache_dtype) for _ in range(config.num_layers)]
        step = jax.jit(forward, static_argnames=("config", "options"))
        rows = jnp.arange(length)
        return np.asarray(step(params, config, caches, batch, rows, scales, StepOptions("decode"))[0])

    exact = all_logits("float32", Scales())
    error = np.abs(all_logits(dtype, scales) - exact).mean() / np.abs(exact).mean()
    # Rounding to bf16 is off by up to 2^-9 and to e4m3 by 2^-4 of a value; a layer's errors add up at random.
    assert 0 < error < {"bfloat16": 2**-7, "float8_e4m3fn": 2**-2}[dtype]


def test_fp8_queries_decode_by_their_scale(tiny_model: Model) -> None:
    """Texts over an fp8 cache: of one q_scale, of another, and with queries that its fp8 can't hold."""
    config, params = tiny_model
    narrow = replace(OPTIONS, cache_dtype="float8_e4m3fn", q_dtype="float8_e4m3fn")
    texts = [Engine(params, config, replace(narrow, q_scale=scale)).generate(PROMPTS[:2], 4) for scale in (1.0, 2.0**9)]
    # The first token comes from a prefill, whose queries are those of the parameters' dtype.
    assert [text[0] for text in texts[0].tokens] == [text[0] for text in texts[1].tokens]
    assert texts[0].tokens != texts[1].tokens


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"page_size": 0}, "page_size = 0"),
        ({"num_pages": 0}, "num_pages = 0"),
        ({"max_batch": 0}, "max_batch = 0(?=; legal: an int, 1 to 1024)"),
        ({"chunk": 0}, "chunk = 0"),
        ({"speculative": -1}, "speculative = -1"),
        ({"chunk": 16.0}, "chunk = 16.0"),
        ({"seed": -1}, "seed = -1(?=; legal: an int, 0 to 2)"),
        ({"seed": 1.5}, "seed = 1.5(?=; legal: an int, 0 to 2)"),
        ({"seed": 2**32}, "seed = 4294967296(?=; legal: an int, 0 to 2)"),
        ({"temperature": -0.5}, "temperature = -0.5"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": 1e-40}, "temperature = 1e-40"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"kv_scale": 0.0}, "kv_scale = 0.0"),
        ({"q_scale": float("inf")}, "q_scale = inf"),
        ({"kv_scale": 1e-50}, "kv_scale = 1e-50"),
    ],
)
def test_options_are_checked(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}; legal: "):
        EngineOptions(**options)


@pytest.mark.parametrize("name", ["kv_scale", "q_scale", "temperature"])
@pytest.mark.parametrize("value", ["a", None, True])
def test_numbers_of_other_types_are_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name}: got {type(value).__name__}; legal: a number"):
        EngineOptions(**{name: value})


def test_other_types_are_refused_by_name(tiny_model: Model) -> None:
    config, params = tiny_model
    make: Any = Engine
    for arguments, message in (
        ((None, config), "params: got NoneType; legal: a dict, as load_model returns it"),
        ((params, None), "config: got NoneType; legal: ModelConfig"),
        ((params, config, {"seed": 1}), "options: got dict; legal: EngineOptions, or None"),
        ((params, config, {}), "options: got dict; legal: EngineOptions, or None"),
    ):
        with pytest.raises(TypeError, match=f"^{message}"):
            make(*arguments)
    for option in ("temperature", "top_p"):
        with pytest.raises(TypeError, match=f"^{option}: got str; legal: a number"):
            EngineOptions(**{option: "0.5"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_dtype": "fp8"}, "cache_dtype = 'fp8'; legal with parameters of float32: float32, float8_e4m3fn"),
        ({"cache_dtype": "packed"}, "cache_dtype = 'packed': only DeepSeek-V3.2, GLM-5 and V4 have this"),
        ({"q_dtype": "float8_e4m3fn"}, "q_dtype = 'float8_e4m3fn'; legal with parameters of float32 and a cache of"),
        ({"expert_parallel": 3}, "expert_parallel = 3: "),
    ],
)
def test_options_that_never_fit_are_refused_by_the_constructor(
    options: dict[str, Any], message: str, tiny_model: Model
) -> None:
    config, params = tiny_model
    with pytest.raises(ValueError) as error:
        Engine(params, config, replace(OPTIONS, **options))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("prompts", "new", "options", "message"),
    [
        ([], 4, {}, "prompts: none given"),
        ([[1], []], 4, {}, "prompt 1: empty"),
        ([[1, 101]], 4, {}, "prompt 0: token id 101; legal: 0 to 100"),
        ([[1], [-1]], 4, {}, "prompt 1: token id -1"),
        ([[1.5]], 4, {}, "prompt 0: token id 1.5; legal: 0 to 100"),
        ([[1]], 0, {}, "max_new_tokens = 0"),
        ([[1], [1] * 20], 4, {"num_pages": 5}, "prompt 1: 20 tokens and 4 new ones need 6 pages of 4; the cache has 5"),
        ([[1] * 4000], 97, {}, "prompt 0: 4000 tokens and 97 new ones; the model was made for 4096"),
        ([[1]], 4, {"cache_dtype": "int8"}, "cache_dtype = 'int8'; legal"),
        ([[1]], 4, {"q_dtype": "float16"}, "q_dtype = 'float16'; legal with parameters of float32 and a cache of"),
        ([[1]], 4, {"implementation": "cudnn"}, "implementation: got 'cudnn'; legal"),
    ],
)
def test_what_cannot_run_is_refused(
    prompts: list[list[int]], new: int, options: dict[str, Any], message: str, tiny_model: Model
) -> None:
    config, params = tiny_model
    with pytest.raises((ValueError, NotImplementedError)) as error:
        Engine(params, config, replace(OPTIONS, **options)).generate(prompts, new)
    assert str(error.value).startswith(message)
