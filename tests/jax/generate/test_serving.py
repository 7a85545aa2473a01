"""Texts one by one: admit, step, drop; the batch sizes and prefill sizes that are compiled; the state on the device."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsmla_jax.generate import Engine, EngineOptions, ModelConfig, contexts
from tsmla_jax.generate import engine as engines
from tsmla_jax.generate import step as steps

Model = tuple[ModelConfig, Any]

PROMPTS = [np.random.default_rng(n).integers(0, 101, n).tolist() for n in (5, 3, 21, 9)]
OPTIONS = EngineOptions(page_size=4, chunk=16, max_batch=3, num_pages=40)
NEW = 7


@pytest.fixture(scope="module")
def alone(tiny_model: Model) -> list[list[int]]:
    """Each text as it comes without company."""
    config, params = tiny_model
    engine = Engine(params, config, OPTIONS)
    return [engine.generate([prompt], NEW).tokens[0] for prompt in PROMPTS]


def drain(engine: Engine, texts: dict[int, list[int]], steps_at_most: int = 100) -> None:
    """Steps until every text has ended, whose tokens are added to `texts`."""
    waiting = set(texts)
    for _ in range(steps_at_most):
        for text_id, tokens, finished in engine.step():
            texts[text_id] += tokens
            waiting -= {text_id} if finished else set()
        if not waiting:
            return
    raise AssertionError(f"texts {waiting} did not end")


@pytest.mark.parametrize("program", ["step", "layer"])
@pytest.mark.parametrize("speculative", [0, 2])
@pytest.mark.sampled(2)
def test_texts_come_and_go(program: Any, speculative: int, tiny_model: Model, alone: list[list[int]]) -> None:
    config, params = tiny_model
    engine = Engine(params, config, replace(OPTIONS, program=program, speculative=speculative))
    assert engine.step() == []
    texts: dict[int, list[int]] = {7: [], 8: []}
    assert engine.admit(7, PROMPTS[0], NEW) and engine.admit(8, PROMPTS[2], NEW)
    for _ in range(3):
        for text_id, tokens, _ in engine.step():
            texts[text_id] += tokens
    # The third text comes while the others are under way; the fourth finds no row.
    assert engine.admit(5, PROMPTS[1], NEW) and not engine.admit(6, PROMPTS[3], NEW)
    engine.drop(7)
    assert engine.admit(6, PROMPTS[3], NEW)
    dropped = texts.pop(7)
    texts |= {5: [], 6: []}
    drain(engine, texts)
    assert [texts[8], texts[5], texts[6]] == [alone[2], alone[1], alone[3]]
    assert dropped == alone[0][: len(dropped)]
    assert engine.step() == []


def test_a_text_that_is_dropped_before_its_prefill_leaves_no_trace(tiny_model: Model, alone: list[list[int]]) -> None:
    config, params = tiny_model
    engine = Engine(params, config, replace(OPTIONS, num_pages=8))
    assert engine.admit(0, PROMPTS[2], NEW) and not engine.admit(1, PROMPTS[2], NEW)
    engine.drop(0)
    with pytest.raises(ValueError, match=r"text_id = 0; legal: a text under way"):
        engine.drop(0)
    texts: dict[int, list[int]] = {1: []}
    assert engine.admit(1, PROMPTS[2], NEW)
    drain(engine, texts)
    assert texts[1] == alone[2]


def test_the_host_reads_one_step_behind(tiny_model: Model) -> None:
    config, params = tiny_model
    engine = Engine(params, config, OPTIONS)
    engine.admit(0, PROMPTS[0], 3)
    # The prefill and two decode steps run; their tokens come a step later, the last ones when there is no other step.
    assert [len(found) for found in (engine.step(), engine.step(), engine.step(), engine.step())] == [0, 1, 1, 1]
    assert engine.figures.decode_steps == 2 and engine.step() == []


def test_a_decode_step_brings_nothing_to_the_device(tiny_model: Model) -> None:
    """The device would wait for the copy between two steps."""
    config, params = tiny_model
    engine = Engine(params, config, replace(OPTIONS, program="step"))
    assert engine.admit(0, PROMPTS[0], NEW)
    for _ in range(2):
        engine.step()
    with jax.transfer_guard_host_to_device("disallow"):
        drain(engine, {0: []})


def test_an_end_token_stops_a_text_on_the_device(tiny_model: Model, alone: list[list[int]]) -> None:
    config, params = tiny_model
    end = alone[0][2]
    engine = Engine(params, replace(config, eos_token_ids=(end,)), OPTIONS)
    texts: dict[int, list[int]] = {0: []}
    engine.admit(0, PROMPTS[0], NEW)
    drain(engine, texts)
    assert texts[0] == alone[0][: alone[0].index(end) + 1]
    # The row and the pages serve the next text, which runs through all its tokens.
    assert end not in alone[1]
    texts = {1: []}
    engine.admit(1, PROMPTS[1], NEW)
    drain(engine, texts)
    assert texts[1] == alone[1]


def test_compiled_sizes_are_few_and_known(tiny_model: Model) -> None:
    config, params = tiny_model
    compiled: list[str] = []
    note = lambda step, seconds: None if seconds is None else compiled.append(step)  # noqa: E731
    engine = Engine(params, config, replace(OPTIONS, max_batch=5), note)
    engine.compile_ahead([2])
    decodes = {f"decode of {size} tokens, up to {size} texts" for size in (2, 8)}
    first = {f"prefill of {size} tokens, up to 4 texts" for size in (1, 4, 16)}
    more = {f"prefill of {size} tokens after cached ones, up to 1 texts" for size in (1, 4, 16)}
    assert {*compiled} == decodes | first | more
    engine.compile_ahead([2])
    for text in range(5):
        assert engine.admit(text, PROMPTS[text % 4], 2)
    drain(engine, {text: [] for text in range(5)})
    assert len(compiled) == len({*compiled}) == 8
    with pytest.raises(ValueError, match=r"batch_sizes: got 3; legal: 1, 2, 4, 8"):
        engine.compile_ahead([3])


@pytest.mark.parametrize(("expanded_bytes", "passes"), [(1 << 29, {(8, 1), (32, 1)}), (1, {(8, 1), (8, 4)})])
@pytest.mark.sampled(2)
def test_long_prompts_after_their_first_chunk(
    tiny_model: Model, expanded_bytes: int, passes: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one program a step: the passes over the cached part are 1, 4, 8, ... chunks in all, and enough."""
    monkeypatch.setattr(contexts, "MAX_EXPANDED_BYTES", expanded_bytes)
    config, params = tiny_model
    prompt = np.random.default_rng(5).integers(0, 101, 31).tolist()
    compiled: list[str] = []
    texts = []
    for program in ("layer", "step"):
        options = replace(OPTIONS, program=program, chunk=8)  # type: ignore[arg-type]
        engine = Engine(params, config, options, lambda step, seconds: compiled.append(step) if seconds else None)
        texts.append(engine.generate([prompt], 3).tokens)
    assert texts[0] == texts[1]
    found = [step for step in compiled if " after " in step]
    after = [f"prefill of 8 tokens after {most}cached ones, up to 1 texts" for most in ("", "up to 8 ", "up to 32 ")]
    assert found == after
    assert {kind.passes for kind, *_ in engine._compiled if kind.passes} == passes


def test_a_step_takes_over_the_caches_and_the_state(tiny_model: Model) -> None:
    config, params = tiny_model
    engine = Engine(params, config, replace(OPTIONS, program="step"))
    engine.admit(0, PROMPTS[0], NEW)
    engine.step()
    session = engine._opened()
    before = [*session.caches, *session.state]
    engine.step()
    assert all(array.is_deleted() for array in before if array is not session.state.block_tables)
    assert not any(array.is_deleted() for array in jax.tree.leaves(params))


def test_drafts_wait_for_a_step_that_raised(tiny_model: Model) -> None:
    """A text becomes NaN in a decode step that accepts another one's drafts: those tokens are read before the next step
    drafts behind them, in the pages that the text has."""
    config, params = tiny_model
    spoiled = {**params, "embed": params["embed"].at[7].set(jnp.nan)}  # the third text's second token
    prompts = {0: [67, 53, 65, 25, 62], 6: [85, 17, 9, 87, 2], 5: [86, 55, 3, 77, 73]}
    engine = Engine(spoiled, config, replace(OPTIONS, max_batch=4, speculative=6))
    texts: dict[int, list[int]] = {text: [] for text in prompts}
    for text, prompt in prompts.items():
        assert engine.admit(text, prompt, 12 if text == 6 else 30)
    with pytest.raises(FloatingPointError, match=r"text 5: .* \(a decode step\)"):
        drain(engine, texts)
    del texts[5]
    drain(engine, texts)
    alone = Engine(params, config, OPTIONS)
    for text, tokens in texts.items():
        assert [tokens] == alone.generate([prompts[text]], len(tokens)).tokens


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_step_that_is_broken_off_is_not_gone_on_from(phase: str, tiny_model: Model, alone: list[list[int]]) -> None:
    config, params = tiny_model
    seen: list[str] = []

    def interrupt(step: str, seconds: float | None) -> None:
        if step.startswith(phase) and seconds is None and phase not in seen:
            seen.append(phase)
            raise KeyboardInterrupt

    engine = Engine(params, config, OPTIONS, interrupt)
    texts: dict[int, list[int]] = {0: []}
    assert engine.admit(0, PROMPTS[2], NEW)
    with pytest.raises(KeyboardInterrupt):
        drain(engine, texts)
    for go_on in (engine.step, lambda: engine.admit(1, [5], 1), lambda: engine.drop(0), engine.compile_ahead):
        with pytest.raises(RuntimeError, match=r"off \(KeyboardInterrupt\), and its texts are lost; legal: close"):
            go_on()
    engine.close()
    assert engine.generate([PROMPTS[2]], NEW).tokens == [alone[2]]


def test_ctrl_c_while_tokens_are_waited_for_loses_none(
    tiny_model: Model, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, params = tiny_model
    engine = Engine(params, config, OPTIONS)
    texts: dict[int, list[int]] = {0: [], 1: []}
    assert engine.admit(0, PROMPTS[0], NEW) and engine.admit(1, PROMPTS[2], NEW)
    calls = iter(range(100))

    class Interrupted:
        """numpy, whose every second asarray is interrupted."""

        def __getattr__(self, name: str) -> Any:
            if name == "asarray" and next(calls) % 2 == 0:
                raise KeyboardInterrupt
            return getattr(np, name)

    monkeypatch.setattr(engines, "np", Interrupted())
    for _ in range(40):
        try:
            drain(engine, texts, 1)
        except (KeyboardInterrupt, AssertionError):
            continue
    assert [texts[0], texts[1]] == [alone[0], alone[2]]


def test_tokens_of_a_dropped_text_are_not_returned_later(tiny_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while the second of two steps is read: the first one's tokens wait for the next call."""
    config, params = tiny_model
    engine = Engine(params, config, OPTIONS)
    assert engine.admit(0, PROMPTS[0], NEW) and engine.admit(1, PROMPTS[1], NEW)
    engine.step()
    calls = iter([False, True, False])

    class Interrupted:
        """numpy, whose asarray is interrupted unless `calls` says that it is not."""

        def __getattr__(self, name: str) -> Any:
            if name == "asarray" and not next(calls):
                raise KeyboardInterrupt
            return getattr(np, name)

    with monkeypatch.context() as patch:
        patch.setattr(engines, "np", Interrupted())
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                engine.step()
    engine.drop(0)
    assert engine.admit(0, PROMPTS[2], 1)
    assert {text_id for text_id, *_ in engine.step()} == {1}


@pytest.mark.parametrize("speculative", [0, 3])
@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray, tuple])
def test_prompts_may_be_arrays(kind: Any, speculative: int, tiny_model: Model, alone: list[list[int]]) -> None:
    config, params = tiny_model
    engine = Engine(params, config, replace(OPTIONS, speculative=speculative))
    assert engine.generate([kind(PROMPTS[0])], NEW).tokens == [alone[0]]
    with pytest.raises(ValueError, match=r"text 1: token id \[\d+\]; legal: 0 to 100"):
        engine.admit(1, np.asarray(PROMPTS[0])[:, None], NEW)  # type: ignore[arg-type]


def test_what_cannot_be_admitted_is_refused(tiny_model: Model) -> None:
    config, params = tiny_model
    with pytest.raises(ValueError, match=r"num_pages = None; legal for texts that come one by one"):
        Engine(params, config, replace(OPTIONS, num_pages=None)).admit(0, [1], 1)
    engine = Engine(params, config, replace(OPTIONS, num_pages=5))
    with pytest.raises(ValueError, match="the engine is closed; legal: after open"):
        _ = engine.plan
    for text_id, tokens, limit, message in (
        (0, [], 1, "text 0: empty"),
        (1, [101], 1, "text 1: token id 101; legal: 0 to 100"),
        (2, [1], 0, "max_new_tokens = 0"),
        (3, [1] * 20, 2, "text 3: 20 tokens and 2 new ones need 6 pages of 4; the cache has 5"),
        (2, [1], 2.5, "max_new_tokens = 2.5; legal: an int, at least 1"),
        (-1, [1], 1, "text_id = -1; legal"),
        (1.5, [1], 1, "text_id = 1.5; legal: an int"),
    ):
        with pytest.raises(ValueError) as error:
            engine.admit(text_id, tokens, limit)
        assert str(error.value).startswith(message)
    assert engine.admit(4, [1], 1)
    with pytest.raises(ValueError, match="text_id = 4; legal"):
        engine.admit(4, [1], 1)
    with pytest.raises(ValueError, match="admitted texts are under way"):
        engine.generate([[1]], 1)
    engine.close()
    assert engine.generate([[1]], 1).tokens


def test_an_array_is_a_prompt(tiny_model: Model, alone: list[list[int]]) -> None:
    config, params = tiny_model
    prompt = np.array(PROMPTS[0], np.int32)
    assert Engine(params, config, OPTIONS).generate([prompt], NEW).tokens == [alone[0]]


def test_rows_without_a_text_stay_as_they_are() -> None:
    state = steps.init_state(3, 2)
    kept = steps.drop_row(state._replace(remaining=state.remaining + 5), np.int32(1))
    assert kept.remaining.tolist() == [5, 0, 5]


@pytest.mark.parametrize("speculative", [0, 2])
def test_logits_that_are_no_numbers_are_no_token(speculative: int, tiny_model: Model, alone: list[list[int]]) -> None:
    """The text is named and ended; what the others say is neither lost nor changed."""
    config, params = tiny_model
    spoiled = {**params, "embed": params["embed"].at[100].set(jnp.nan)}
    engine = Engine(spoiled, config, replace(OPTIONS, speculative=speculative))
    clean = [index for index, prompt in enumerate(PROMPTS) if 100 not in [*prompt, *alone[index]]][:2]
    texts: dict[int, list[int]] = {index: [] for index in clean}
    for index in clean:
        assert engine.admit(index, PROMPTS[index], NEW)
    assert engine.admit(9, [5, 100, 6], NEW)
    with pytest.raises(FloatingPointError, match=r"text 9: the logits of its new token 1 are .* \(a prefill step\)"):
        drain(engine, texts)
    drain(engine, texts)
    assert [texts[index] for index in clean] == [alone[index] for index in clean]
    assert engine.admit(10, PROMPTS[clean[0]], NEW)  # the row is free again
    with pytest.raises(FloatingPointError, match=r"text 1: .* token 1 "):
        engine.close()
        engine.generate([PROMPTS[clean[0]], [100]], NEW)
