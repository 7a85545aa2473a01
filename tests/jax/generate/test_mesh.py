"""A model on a mesh of simulated devices: the tokens of one device, whatever the batch and the lengths."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.jax.generate.tiny import tiny_config, write_tiny
from tsmla_jax.generate import Engine, EngineOptions, ModelConfig, load_model, model
from tsmla_jax.generate.mesh import MeshShape, check_mesh, make_mesh, put_params
from tsmla_jax.generate.plan import make_plan
from tsmla_jax.generate.programs import _Elements
from tsmla_jax.generate.step import no_drafts
from tsmla_jax.nn import Step

Model = tuple[ModelConfig, Any]

PROMPTS = [np.random.default_rng(n).integers(0, 101, n).tolist() for n in (5, 1, 21, 9, 14)]
OPTIONS = EngineOptions(page_size=4, chunk=16, max_batch=5, num_pages=24)
NEW = 6


@pytest.fixture(scope="module")
def greedy(tiny_model: Model) -> list[list[int]]:
    config, params = tiny_model
    return Engine(params, config, OPTIONS).generate(PROMPTS, NEW).tokens


@pytest.fixture(scope="module")
def engine(tiny_model: Model) -> Engine:
    """Two copies of the model, two replicas each, whose texts have their keys on two devices each."""
    config, params = tiny_model
    return Engine(params, config, replace(OPTIONS, data_parallel=2, expert_parallel=2, context_parallel=2))


def drain(engine: Engine, texts: dict[int, list[int]]) -> None:
    """Steps until no text is under way; their tokens are added to `texts`."""
    while engine._opened().texts:
        for number, tokens, _ in engine.step():
            texts[number] += tokens


def test_tokens_are_those_of_one_device(engine: Engine, greedy: list[list[int]]) -> None:
    """Five texts on four replicas, the longest in two chunks; later one, and three replicas without any."""
    texts: dict[int, list[int]] = {number: [] for number in range(5)}
    for number in (0, 2, 1, 3, 4):
        assert engine.admit(number, PROMPTS[number], NEW)
    assert not engine.admit(5, PROMPTS[1], NEW)
    # No replica has more texts than it must.
    places = [text.replica for text in engine._opened().texts.values()]
    assert sorted(places[:4]) == [0, 1, 2, 3]
    drain(engine, texts)
    assert [texts[number] for number in range(5)] == greedy
    assert engine.admit(7, PROMPTS[2], NEW) and engine.admit(1, PROMPTS[1], NEW)
    engine.step()
    engine.drop(1)
    texts[7] = []
    drain(engine, texts)
    assert texts[7] == greedy[2] and engine.figures.cache_pages == 8 * OPTIONS.num_pages


def test_arrays_without_elements_stay_outside_of_a_mesh() -> None:
    """jaxlib 0.11 ends the process over one that enters shard_map."""
    drafts = no_drafts(4)
    inside = _Elements.of(drafts, parts=2)
    assert [array.shape for array in inside.arrays] == [(4,)]
    of_device = inside.whole()
    assert type(of_device) is type(drafts) and of_device.tokens.shape == (2, 0) and of_device.tokens.dtype == np.int32
    assert of_device.lens is drafts.lens  # shard_map cuts those that enter


def test_a_step_is_one_program_that_takes_over_its_buffers(engine: Engine) -> None:
    assert engine.admit(0, PROMPTS[0], NEW)
    engine.step()
    engine.step()  # the first decode step, which may have to be compiled
    session = engine._opened()
    before = [*session.caches, *session.state]
    programs = session.programs.decode._cache_size()
    engine.step()
    engine.step()
    assert all(array.is_deleted() for array in before if array is not session.state.block_tables)
    assert session.programs.decode._cache_size() == programs
    # A device has its quarter of the experts, and the shared one.
    stack = engine._params["layers"][1]["mlp"]["gate_up"]
    assert {shard.data.shape[0] for shard in stack.addressable_shards} == {8 // 4 + 1}
    engine.close()


def test_experts_split_for_another_mesh_are_refused(tiny_checkpoint: Path, tiny_model: Model) -> None:
    """Where experts lie in a stack depends on the mesh: on another one a token would visit other experts."""
    config, whole = tiny_model
    split = load_model(tiny_checkpoint, config, mesh=MeshShape(expert=2))
    assert put_params(make_mesh(MeshShape(context=2)), split, config)["layers"][1]["mlp"] == split["layers"][1]["mlp"]
    for options in (OPTIONS, replace(OPTIONS, data_parallel=2), replace(OPTIONS, expert_parallel=4)):
        with pytest.raises(
            ValueError, match=r"^params: gate_up of layer 1 has shape \(10, 32, 32\), as if it were split"
        ):
            Engine(split, config, options)
    # Whole experts are split, also where they lie on the mesh's devices already.
    mesh = make_mesh(MeshShape(expert=2))
    assert mesh is not None
    everywhere = jax.device_put(whole, NamedSharding(mesh, PartitionSpec()))
    placed = put_params(mesh, everywhere, config)["layers"][1]["mlp"]
    for name in ("gate_up", "down"):
        np.testing.assert_array_equal(placed[name], split["layers"][1]["mlp"][name])


def generated(model: str, directory: Path, options: EngineOptions, **mesh: Any) -> tuple[Any, Any]:
    """The tokens of one device and of a mesh."""
    kinds: dict[str, Any] = {"num_hidden_layers": 2, "compress_ratios": [4, 128]} if model == "v4" else {}
    kinds["vocab_size"] = 104  # which is split over 2 or 4 devices; 101 are not
    config = ModelConfig.from_hf(write_tiny(directory, model=model, **kinds))
    params = load_model(directory, config)
    results = [Engine(params, config, given).generate(PROMPTS, NEW) for given in (options, replace(options, **mesh))]
    return results[0].tokens, results[1].tokens


@pytest.mark.slow
@pytest.mark.parametrize("model", ["v2", "v3.2", "v4"])
def test_other_models(model: str, tmp_path: Path) -> None:
    options = replace(OPTIONS, page_size=128) if model == "v4" else OPTIONS
    one, mesh = generated(model, tmp_path, options, data_parallel=2, expert_parallel=2, context_parallel=2)
    assert mesh == one


@pytest.mark.parametrize("model", ["v3.2", "v4"])
def test_what_runs_where_devices_share_keys(model: str) -> None:
    """The indexers select among a device's own keys, with their scores; the plan knows the shapes of each step."""
    config = ModelConfig.from_hf(tiny_config(model))
    options = replace(OPTIONS, page_size=128, context_parallel=8, num_pages=None)
    plan = make_plan(config, options, [[1] * 300], NEW, "float32")
    assert plan.max_pages == plan.layout.num_pages == 1
    ops = {choice.op.partition(" (")[0] for choice in plan.choices}
    of_model = {"v3.2": "attention over selected keys", "v4": "compress_write_kv_cache"}
    assert ops == {"indexer_topk", "sparse_mla", of_model[model]}


@pytest.mark.parametrize(("columns", "page_size", "context"), [(2, 128, 4), (3, 256, 2)])
def test_a_whole_step_on_a_mesh_has_angles_for_every_position(
    columns: int, page_size: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry of a device's block table stands for a page on each device."""
    config, rows = ModelConfig.from_hf(tiny_config("v4")), []

    class MadeSteps(Exception):
        pass

    def shared_steps(config: Any, batch: Any, ropes: Any, options: Any) -> None:
        rows.extend(len(table) for table in ropes.values())
        raise MadeSteps

    monkeypatch.setattr(model, "shared_steps", shared_steps)
    tokens = np.zeros(3, np.int32)
    step = Step(np.zeros((1, columns), np.int32), tokens[:1], tokens, tokens[:2], 3)  # type: ignore[arg-type]
    options = model.StepOptions("decode", page_size=page_size, mesh=MeshShape(context=context))
    with pytest.raises(MadeSteps):
        model.forward({}, config, [], model.Batch(tokens, step), tokens, model.Scales(), options)  # type: ignore[arg-type]
    assert set(rows) == {columns * context * page_size}


@pytest.mark.slow
@pytest.mark.parametrize(("context", "speculative"), [(2, 3), (4, 0), (8, 3)])
def test_texts_of_v4_come_and_go(context: int, speculative: int, tmp_path: Path) -> None:
    """Texts of more pages than devices and of fewer; one is dropped, and another gets its row, ring and states."""
    # Layers of two kinds compile in less time than of three.
    kinds = {} if context == 2 else {"num_hidden_layers": 2, "compress_ratios": [4, 128]}
    config = ModelConfig.from_hf(write_tiny(tmp_path, model="v4", **kinds))
    params = load_model(tmp_path, config)
    prompts = [np.random.default_rng(n).integers(0, 101, n).tolist() for n in (600, 200, 150)]
    options = EngineOptions(page_size=128, chunk=256, max_batch=2, num_pages=7, speculative=speculative)
    one = Engine(params, config, options).generate(prompts, NEW).tokens
    engine = Engine(params, config, replace(options, context_parallel=context))
    texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    assert engine.admit(1, prompts[1], NEW) and engine.admit(0, prompts[0], NEW)
    engine.step()
    engine.drop(1)
    assert engine.admit(2, prompts[2], NEW)
    drain(engine, texts)
    assert engine.admit(1, prompts[1], NEW)
    drain(engine, texts)
    assert [texts[number] for number in range(3)] == one


@pytest.mark.slow
def test_drafts_and_samples_on_a_mesh(tmp_path: Path) -> None:
    options = replace(OPTIONS, speculative=3, temperature=0.5, top_p=0.9, seed=7)
    one, mesh = generated("v3", tmp_path, options, expert_parallel=2, context_parallel=2)
    assert mesh == one


def test_a_mesh_that_does_not_fit_is_refused_in_one_line(tiny_model: Model) -> None:
    config, params = tiny_model
    with pytest.raises(
        ValueError,
        match=r"^data_parallel = 3, expert_parallel = 4, context_parallel = 1: needs 12 devices, and jax has 8 \(cpu\);"
        r" what fits: data_parallel = 2; JAX_NUM_CPU_DEVICES=12 in the environment simulates that many$",
    ):
        Engine(params, config, EngineOptions(data_parallel=3, expert_parallel=4))
    with pytest.raises(ValueError, match=r"what fits: products of the three up to 8; JAX_NUM_CPU_DEVICES=9"):
        check_mesh(replace(config, mlp_layers=("dense",) * config.num_layers), MeshShape(1, 1, 9))
    with pytest.raises(
        ValueError, match=r"^expert_parallel = 3: 8 experts on .* = 3 devices; legal products: 1, 2, 4, 8$"
    ):
        check_mesh(config, MeshShape(1, 3, 1))
    with pytest.raises(ValueError, match=r"^context_parallel = 3: 8 experts"):
        check_mesh(config, MeshShape(1, 1, 3))
    dense = ModelConfig.from_hf(tiny_config("v2", n_routed_experts=None))
    with pytest.raises(ValueError, match=r"^expert_parallel = 2: the model has no experts; legal: 1"):
        check_mesh(dense, MeshShape(1, 2, 1))
    v4 = ModelConfig.from_hf(tiny_config("v4"))
    check_mesh(v4, MeshShape(2, 2, 2))
    with pytest.raises(ValueError, match=r"^context_parallel = 3: 8 experts on .*; legal products: 1, 2, 4, 8$"):
        check_mesh(v4, MeshShape(1, 1, 3))
    with pytest.raises(ValueError, match=r"^program = 'layer'; legal on a mesh: 'step', None$"):
        EngineOptions(program="layer", data_parallel=2)


def test_several_processes_take_all_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = ModelConfig.from_hf(tiny_config("v2", n_routed_experts=None))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"the 2 processes have 8 \(cpu\); what fits: data_parallel = 4$"):
        check_mesh(dense, MeshShape(1, 1, 2))
    for context in (3, 9):
        with pytest.raises(ValueError, match=r"; what fits: values of the three whose product is 8$"):
            check_mesh(dense, MeshShape(1, 1, context))
