"""The engine with the caches of V3.2 and V4: pages, rings and compressor states, for many texts and drafts."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import make_checkpoint
from tests.jax.generate.tiny import tiny_config, write_tiny
from tsmla_jax.generate import Engine, EngineOptions, ModelConfig, load_model
from tsmla_jax.generate import step as steps
from tsmla_jax.generate.caches import CacheLayout, cache_bytes, default_page_size, init_cache, window_rows
from tsmla_jax.generate.contexts import bound_of_context
from tsmla_jax.generate.model import Batch, Scales, StepOptions, forward, rope_tables, shared_steps
from tsmla_jax.generate.pages import pages_for
from tsmla_jax.generate.plan import make_plan, make_serving_plan
from tsmla_jax.nn import Step
from tsmla_jax.ops.indexer_topk import api as indexer_api
from tsmla_jax.ops.sparse_mla import api
from tsmla_kernels.cli import command as cli

NEW = 12
# The first two share a step of the size that the others' chunks have: every size compiles each kind of layer once more.
PROMPTS = [np.random.default_rng(n).integers(0, 101, n).tolist() for n in (25, 1, 150, 100)]
# Too few pages and state slots for all texts at once: some wait, and get pages and state slots that were another's.
OPTIONS = {
    "v3.2": EngineOptions(page_size=16, chunk=64, max_batch=3, num_pages=11),
    "v4": EngineOptions(page_size=128, chunk=64, max_batch=3, num_pages=2),
}


class Case:
    """A tiny model and its greedy texts."""

    def __init__(self, model: str, directory: Path) -> None:
        # Layers of two kinds compile in less time than of three; the window alone is in both of them.
        kinds = {"num_hidden_layers": 2, "compress_ratios": [4, 128]} if model == "v4" else {}
        self.model, self.directory = model, write_tiny(directory, model=model, **kinds)
        self.config = ModelConfig.from_hf(self.directory)
        self.params = load_model(self.directory, self.config)
        self.options = OPTIONS[model]
        self.greedy = Engine(self.params, self.config, self.options).generate(PROMPTS, NEW)


@pytest.fixture(scope="module", params=OPTIONS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("sparse"))


def all_logits(
    config: ModelConfig, params: Any, text: list[int], cache_dtype: str, q_scale: float | None = None
) -> np.ndarray:
    """Logits after every token of a text that is prefilled at once, without an engine."""
    page_size, length = default_page_size(config), len(text)
    pages = pages_for(length, page_size)
    layout = CacheLayout(pages, page_size, 1, window_rows(config, length, length), 0, cache_dtype)
    tables, lens, cu = jnp.arange(pages, dtype=jnp.int32)[None], jnp.asarray([length]), jnp.asarray([0, length])
    step = Step.ragged(tables, lens, cu, total_tokens=length, page_size=page_size)
    batch = Batch(jnp.asarray(text, jnp.int32), step, state_slots=jnp.zeros(1, jnp.int32))
    caches = [init_cache(config.layer(index).attention, layout) for index in range(config.num_layers)]
    scales = Scales(jnp.float32(0.02) if cache_dtype == "float8_e4m3fn" else None, q_scale)
    options = StepOptions("prefill", page_size=page_size, window_rows=layout.window_rows)
    run = jax.jit(forward, static_argnames=("config", "options"))
    return np.asarray(run(params, config, caches, batch, step.slot_mapping, scales, options)[0])


@pytest.mark.sampled(2)
def test_texts_are_those_of_one_prefill(case: Case) -> None:
    # The longest: past an entry of ratio 128, past the ring of the window, more keys than the indexers choose.
    prompt, new = PROMPTS[2], case.greedy.tokens[2]
    best = all_logits(case.config, case.params, [*prompt, *new[:-1]], "float32").argmax(axis=1)
    assert best[len(prompt) - 1 :].tolist() == new
    assert len({tuple(text) for text in case.greedy.tokens}) > 2


@pytest.mark.sampled(2)
def test_company_chunks_pages_and_drafts_do_not_change_a_text(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(case.params, case.config, case.options)
    # An order in which no step has a shape that the fixture's had not.
    order = (1, 0, 3, 2)
    again = engine.generate([PROMPTS[index] for index in order], NEW).tokens
    assert again == [case.greedy.tokens[index] for index in order]
    # The checks see what each step reads and writes: slots inside the caches and written once, states that follow on.
    monkeypatch.setenv("TSMLA_CHECK", "1")
    # Chunks that fill up their steps, so that few shapes are compiled.
    other = replace(case.options, chunk=50, page_size=2 * case.options.page_size, num_pages=None, speculative=3)
    drafted = Engine(case.params, case.config, other).generate(PROMPTS[2:], NEW)
    assert drafted.tokens == case.greedy.tokens[2:]
    assert drafted.figures.drafted_tokens > drafted.figures.accepted_tokens


def test_figures_state_the_memory(case: Case) -> None:
    figures = case.greedy.figures
    leaves = jax.tree.leaves(case.params)
    assert figures.weight_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    if case.model == "v3.2":
        # Two layers of a latent, its rope and an indexer key.
        per_token, per_text, pages = 2 * (32 + 8 + 12) * 4, 0, 11 * 16
    else:
        # An entry and an indexer key per 4 tokens, an entry per 128; a window of 7 + 64 rows, made whole pages of 64,
        # in two layers; two states of 8 rows (kv and score of two series) and one of 128, each with its positions.
        per_token = (16 + 12) * 4 // 4 + 16 * 4 / 128
        states = 8 * (2 * 2 * 16 * 4 + 4) + 8 * (2 * 2 * 12 * 4 + 4) + 128 * (2 * 16 * 4 + 4)
        per_text, pages = 2 * 128 * 16 * 4 + states, 2 * 128
    assert (figures.cache_bytes_per_token, figures.cache_bytes_per_text) == (per_token, per_text)
    assert figures.cache_bytes == per_token * pages + 3 * per_text
    assert figures.peak_pages == figures.cache_pages == case.options.num_pages
    ops = {"indexer_topk", "sparse_mla", "experts"}
    ops |= {"compress_write_kv_cache"} if case.model == "v4" else {"attention over selected keys"}
    # An operation whose reasons differ between kinds of layers is there once for each.
    assert {choice.op.partition(" (")[0] for choice in case.greedy.choices} == ops


def test_packed_pages_of_real_widths() -> None:
    """Bytes of the packed layouts' pages: 656 and 132 a token in V3.2; in V4 whole pages, padded to 576."""
    v32, v4 = real_widths("v3.2"), real_widths("v4")
    layout = CacheLayout(num_pages=3, page_size=64, state_slots=2, window_rows=0, spare=0, dtype="packed")
    assert cache_bytes(v32, layout).per_token == v32.num_layers * (656 + 132)
    # 256 tokens are 64 entries of ratio 4, with as many indexer keys, in two layers, and 2 of ratio 128 in one.
    layout = replace(layout, page_size=default_page_size(v4), window_rows=window_rows(v4, 512, 10_000))
    assert (layout.page_size, layout.window_rows) == (256, 640)
    assert cache_bytes(v4, layout).per_token * 256 == 2 * (37440 + 64 * 132) + 3 * 576
    assert window_rows(v4, 512, 100) == 128 and window_rows(v4, 4, 10_000) == 192 and window_rows(v32, 512, 100) == 0


def test_rows_of_indices_are_made_once_a_step() -> None:
    fields = tiny_config("v4", num_hidden_layers=7, compress_ratios=[0, 4, 128, 4, 128, 4, 128], num_hash_layers=0)
    config = ModelConfig.from_hf(fields)
    ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    batch = Batch(ints((4,)), Step(ints((2, 3)), ints((2,)), ints((4,)), ints((3,)), 2), ints((2,)))
    options = StepOptions("decode", page_size=128, window_rows=64)
    steps = jax.eval_shape(lambda batch: shared_steps(config, batch, rope_tables(config, 8), options), batch)
    assert set(steps) == {"sliding", "csa", "hca"} and steps["csa"].rows is None
    # The window of 8 and all entries of three pages, made a multiple of 4 columns.
    assert steps["hca"].rows.indices.shape == (4, 12) and steps["sliding"].rows.indices.shape == (4, 8)
    for rows in (0, 100, -64):  # 0, the default, would divide page numbers by 0
        wrong = replace(options, window_rows=rows)
        with pytest.raises(ValueError, match=rf"options.window_rows = {rows}; legal for DeepSeek-V4: .* of 64"):
            jax.eval_shape(lambda batch, wrong=wrong: shared_steps(config, batch, rope_tables(config, 8), wrong), batch)


def test_the_command_runs_them(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(PROMPTS))
    options = case.options
    paging = ["--page-size", options.page_size, "--cache-pages", options.num_pages, "--max-batch", options.max_batch]
    arguments = ["--checkpoint", case.directory, "--prompt-ids", tmp_path / "ids.json", "--max-new-tokens", NEW]
    arguments += [*paging, "--chunk", options.chunk, "--json", tmp_path / "out.json"]
    assert cli.run(cli.parse(["tsmla", "generate", *map(str, arguments)])) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["tokens"] == case.greedy.tokens
    figures, output = case.greedy.figures, capsys.readouterr().out
    text = f" and {figures.cache_bytes_per_text} bytes/text" if figures.cache_bytes_per_text else ""
    assert f"{figures.cache_bytes_per_token} bytes/token{text} (float32)" in output
    words = " ".join(output.split())
    assert f"weights {figures.weight_bytes / 1e6:.1f} MB (float32)" in words
    assert "sparse_mla xla (not cute: " in words
    # Sampling is the engine's for every model.
    assert (
        cli.run(cli.parse(["tsmla", "generate", *map(str, [*arguments, "--temperature", "0.8", "--seed", "3"])])) == 0
    )
    assert json.loads((tmp_path / "out.json").read_text())["tokens"] != case.greedy.tokens


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--page-size", "64"], "--page-size 64; legal for this model: a multiple of 128"),
        (["--cache-dtype", "packed"], "holds a latent of 512 and a rope of 64, the model has 16 and 8"),
        (["--implementation", "cute"], "sparse_mla: implementation='cute'"),
        (["--cache-pages", "1"], "need 2 pages of 256; the cache has 1"),
        (["--max-new-tokens", "4000"], "max_position_embeddings"),
    ],
)
def test_wrong_options_get_one_line(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path, model="v4")
    (tmp_path / "ids.json").write_text(json.dumps([[1] * 250]))
    fixed = ["--checkpoint", tmp_path, "--prompt-ids", tmp_path / "ids.json"]
    assert cli.run(cli.parse(["tsmla", "generate", *map(str, fixed), *arguments])) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and named in captured.err


def test_a_decode_step_of_one_text_is_explained_with_the_whole_context() -> None:
    """Only a prompt's first chunk has none; with many drafts one text's step may be as long as a chunk."""
    config = replace(real_widths("v3.2"), max_position_embeddings=2**16)
    plan = make_serving_plan(config, EngineOptions(num_pages=1024, max_batch=1, speculative=300), "bfloat16")
    forms = {choice.implementation for choice in plan.choices if choice.op.startswith("attention over selected keys")}
    assert forms == {"direct"}


def real_widths(model: str) -> ModelConfig:
    return ModelConfig.from_hf(make_checkpoint.make_config(900, "bfloat16", False, False, model))


@pytest.mark.parametrize("model", ["v2", "v3", "v3.2", "v4"])
def test_the_cache_is_what_the_model_is_served_with(model: str) -> None:
    """Packed where it has that layout and parameters of 16 bits; what is asked for stays what it is."""
    config, tiny = real_widths(model), ModelConfig.from_hf(tiny_config(model))

    def found(config: ModelConfig, dtype: str, cache_dtype: str | None = None) -> str:
        return make_plan(config, EngineOptions(cache_dtype=cache_dtype), [[1]], 2, dtype).layout.dtype

    for dtype in ("bfloat16", "float16"):
        assert found(config, dtype) == ("packed" if model in ("v3.2", "v4") else dtype)
        assert found(tiny, dtype) == found(config, dtype, dtype) == dtype
        assert found(config, dtype, "float8_e4m3fn") == "float8_e4m3fn"
    assert found(config, "float32") == "float32"


@pytest.mark.parametrize("model", ["v3.2", "v4"])
def test_the_default_runs_hoppers_kernels(model: str, on_hopper: None) -> None:
    plan = make_plan(real_widths(model), EngineOptions(), [[1]], 2, "bfloat16")
    sparse = [choice for choice in plan.choices if choice.op.startswith(("sparse_mla", "indexer_topk"))]
    assert {choice.op.partition(" (")[0] for choice in sparse} == {"sparse_mla", "indexer_topk"}
    assert all(choice.implementation == "cute" and "as xla" not in choice.why for choice in sparse), sparse
    plan = make_plan(real_widths(model), EngineOptions(cache_dtype="bfloat16"), [[1]], 2, "bfloat16")
    assert any("the logits as xla computes them: q's dtype" in choice.why for choice in plan.choices)


def test_prefill_steps_say_how_long_their_texts_are() -> None:
    """By which V3.2's layers choose their form: the block tables hold the longest text of the run."""
    config, chunk = real_widths("v3.2"), 4096
    config = replace(config, attention=replace(config.attention, index_topk=2048))
    plan = make_plan(config, EngineOptions(chunk=chunk), [[1]], 2, "bfloat16")
    bound = partial(bound_of_context, config, chunk=chunk)
    assert [bound(plan, cached=cached) for cached in (1, 4096, 4097, 20000)] == [4096, 4096, None, None]
    assert bound(replace(plan, q_dtype="float8_e4m3fn"), cached=1) is None
    assert bound_of_context(real_widths("v3"), plan, chunk=chunk, cached=1) is None
    for options, most in (
        (StepOptions("fresh"), 64),
        (StepOptions("prefill"), None),
        (StepOptions("prefill", most_cached=128), 192),
    ):
        prompts = jax.tree.map(jnp.asarray, steps.no_prompts(64, 1, 8))
        assert steps._pack_prompts(prompts, steps.StepConfig(config, options, 1, greedy=True)).step.max_seq_len == most


def test_the_command_says_that_the_cache_is_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "num_hidden_layers": 1}
    config = ModelConfig.from_hf(write_tiny(tmp_path, model="v3.2", **widths))
    (tmp_path / "ids.json").write_text("[[1, 2, 3]]")
    arguments = ["--checkpoint", tmp_path, "--prompt-ids", tmp_path / "ids.json", "--max-new-tokens", 2]
    arguments += ["--dtype", "bf16", "--json", tmp_path / "out.json"]
    assert cli.run(cli.parse(["tsmla", "generate", *map(str, arguments)])) == 0
    output = capsys.readouterr().out
    assert "788 bytes/token (packed by default; --cache-dtype bf16 rounds no key), " in output
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["cache_dtype"] == "packed"
    engine = Engine(load_model(tmp_path, config, dtype="bfloat16"), config, EngineOptions(cache_dtype="packed"))
    assert record["tokens"] == engine.generate([[1, 2, 3]], 2).tokens


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen as on a Hopper GPU."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    for each in (api, indexer_api):
        table = {name: replace(found, why_not_by_default=list) for name, found in each.OPERATION.table.items()}
        monkeypatch.setitem(vars(each.OPERATION), "table", table)


@pytest.mark.parametrize(
    ("model", "why_not"), [("v3.2", ""), ("v4", "q.dtype is float8_e4m3fn and kv_cache has v4 rows of uint8")]
)
def test_the_choices_on_hopper_follow_the_queries(model: str, why_not: str, on_hopper: None) -> None:
    config, options = real_widths(model), EngineOptions(cache_dtype="packed")

    def attention(**changes: Any) -> list[Any]:
        plan = make_plan(config, replace(options, **changes), [[1]], 2, "bfloat16")
        return [choice for choice in plan.choices if choice.op.startswith("sparse_mla")]

    assert {choice.implementation for choice in attention()} == {"cute"}
    narrow = attention(q_dtype="float8_e4m3fn")
    assert {choice.implementation for choice in narrow} == {"xla" if why_not else "cute"}
    assert all(why_not in choice.why for choice in narrow)


@pytest.mark.parametrize("model", ["v3.2", pytest.param("v4", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dtype", ["packed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bfloat16", "float8_e4m3fn"))]
)
@pytest.mark.slow
def test_narrow_caches_and_queries_cost_little_accuracy(model: str, dtype: str, tmp_path: Path) -> None:
    # Real widths, for the packed layouts; keys are chosen all, so that a choice at the edge of them is no error.
    own = {"v3.2": {"kv_lora_rank": 512}, "v4": {"head_dim": 512, "compress_ratios": [4, 128]}}[model]
    sizes = {"num_hidden_layers": 2, "qk_rope_head_dim": 64, "index_head_dim": 64, "index_topk": 256}
    write_tiny(tmp_path, model=model, **sizes, **own)
    config = ModelConfig.from_hf(tmp_path)
    params = load_model(tmp_path, config)
    exact = all_logits(config, params, PROMPTS[2], "float32")
    queries = [None] if dtype == "bfloat16" else [None, 0.05]
    found = [all_logits(config, params, PROMPTS[2], dtype, q_scale) for q_scale in queries]
    errors = [np.abs(logits - exact).mean() / np.abs(exact).mean() for logits in found]
    # Rounding to bf16 is off by up to 2^-9 and to e4m3 by 2^-4 of a value; a layer's errors add up at random.
    assert min(errors) > 0 and max(errors) < (2**-7 if dtype == "bfloat16" else 2**-2)
    assert len(set(errors)) == len(queries)
