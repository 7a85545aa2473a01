"""Time whole models with random weights, through the engine: decode steps, prefill, and compilation.

    python -m examples.whole_models.generate --out FILE.json [--points v2-lite,bf16,1/v2-lite,bf16,prefill/...]
        [--seconds 500] [--context 512] [--checkpoints DIR [--compare VLLM.json]] [--layers N] [--data_parallel N]
        [--expert_parallel N] [--context_parallel N]

A point is a model (v2-lite; v3-slice: one dense layer and 5 of experts in bf16, 9 in fp8; v3.2-slice, glm-5-slice,
glm-5.2-slice, of whose layers 3 have no indexer, and v4-slice, of the Flash model: 6 layers, in fp8), the format of its
weights (bf16, or fp8: e4m3 with scales for blocks of 128 x 128 in the matrices that `load_model` leaves so), and a
batch size, "prefill", or "prompt" and a number of tokens (v2-lite,bf16,prompt131072). Weights are made on the device;
texts are random ids, so that tokens choose their experts nearly evenly. A decode row is the median step of 64, of B
texts of --context tokens over caches of noise; a prefill row is prompts of --context tokens, a chunk at a time; a
prompt row is the whole prefill of one text. floor_us is the time of the bytes that a decode step must read (the caches,
and once each weight, of the experts only as many as B tokens can be expected to choose if all are equally likely), or
of the products of a prefill. compile_s is how long it takes to compile the decode step, tracing included; warm_s is the
same with --compilation_cache, whose folder a run with --compile_only fills.

With --checkpoints weights are those of a checkpoint in that folder, which is written there from a seed unless it is
there already (v2-lite takes 31 GB, in fp8 16), and the texts of decode rows are prefilled, so that their tokens mean
something. Rows have the first of them; --compare adds the share of them that is equal in a record of vllm_steps.py,
which reads the same checkpoints and has the same prompts.

--fp8_products quantized --fp8_products exact measures both products with fp8 weights, in turn and of the same weights.

--layers makes a slice that fits one GPU's memory, where a mesh is to be compared with one GPU. On a mesh a batch is
that of all replicas, a prefill step has a chunk for each of them, and floor_us is the floor of one device: the bytes
that it must read, or its share of the products, without collectives. A second run without the three flags makes the
rows of one device to compare with: with as many texts for split experts or keys, with one copy's texts for several
copies. If XLA's flag for collectives in CUDA graphs is set (docs/guides/several-gpus.md), rows of a mesh say so.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

# Set before jax is imported: v3-slice needs nearly all of the GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax
import numpy as np
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.floors import FLOPS_PER_S, bytes_per_s
from benchmarks.harness import COMPILE_ONLY, POINTS, Record
from examples.whole_models.floors import decode_bytes, prefill_products
from examples.whole_models.models import (
    CHECKPOINTS,
    KEPT_TOKENS,
    MODELS,
    checkpoint,
    equal_share,
    mode_name,
    prompts,
    within_budget,
)
from examples.whole_models.random_checkpoint import write_checkpoint
from examples.whole_models.random_model import noise, random_params, shapes
from tsmla_jax.generate import Engine, EngineOptions, ModelConfig, load_model
from tsmla_jax.generate import step as steps
from tsmla_jax.generate.caches import default_page_size
from tsmla_jax.generate.mesh import MeshShape, make_mesh, param_specs
from tsmla_jax.generate.model import fold
from tsmla_jax.generate.session import StepKind
from tsmla_jax.nn import MLAConfig, V32Config
from tsmla_jax.nn.products.block_scaled import with_products

CHUNK = flags.DEFINE_integer("chunk", 4096, "prompt tokens of a prefill step")
CONTEXT = flags.DEFINE_integer("context", 512, "tokens of context of decode and prefill rows", lower_bound=1)
CACHE = flags.DEFINE_string("compilation_cache", None, "folder of jax's compilation cache; a new one by default")
DATA = flags.DEFINE_integer("data_parallel", 1, "copies of the model", lower_bound=1)
EXPERT = flags.DEFINE_integer("expert_parallel", 1, "devices of a copy that have texts of their own", lower_bound=1)
LAYERS = flags.DEFINE_integer("layers", None, "layers of a model, instead of its own number", lower_bound=2)
FP8_PRODUCTS = flags.DEFINE_multi_enum(
    "fp8_products", [], ["quantized", "exact"], "products with fp8 weights, instead of the default ones; each has rows"
)
CONTEXT_DEVICES = flags.DEFINE_integer("context_parallel", 1, "devices that share the keys of a text", lower_bound=1)

STEPS = 64
BATCHES = (1, 16, 64, 256)


def mesh_shape() -> MeshShape:
    """The mesh that the flags ask for."""
    return MeshShape(DATA.value, EXPERT.value, CONTEXT_DEVICES.value)


def shapes_here(config: ModelConfig, narrow: bool) -> dict[str, Any]:
    """`shapes` on the mesh that the flags ask for."""
    return shapes(config, narrow, mesh_shape().expert_shards)


def placed(params: Any) -> Any:
    """Descriptions of parameters, and of where they lie on that mesh."""
    mesh = make_mesh(mesh_shape())
    if mesh is None:
        return params
    specs = param_specs(params, mesh_shape().expert_shards)
    specs = jax.tree.broadcast(specs, params, is_leaf=lambda node: isinstance(node, P))
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        params,
        specs,
    )


def fields_of(model: tuple[str, str]) -> dict[str, Any]:
    """config.json of a model, with --layers layers."""
    return MODELS[model] | ({"num_hidden_layers": LAYERS.value} if LAYERS.value else {})


def config_of(model: tuple[str, str]) -> ModelConfig:
    """The model's configuration, with --layers layers; no token ends a text."""
    return steps.without_ends(ModelConfig.from_hf(fields_of(model)))


def params_of(model: tuple[str, str]) -> Any:
    """The parameters of a model: those of its checkpoint, if checkpoints are asked for."""
    config, narrow = config_of(model), model[1] == "fp8"
    directory = checkpoint(model)
    if directory is None:
        return random_params(config, shapes_here(config, narrow), make_mesh(mesh_shape()))
    if not isinstance(config.attention, MLAConfig):
        raise app.UsageError(f"--checkpoints: no checkpoint of {','.join(model)} is made; legal: points of V2 and V3")
    if not (directory / "config.json").exists():
        write_checkpoint(directory, fields_of(model))
    return load_model(directory, config, keep_fp8=narrow, mesh=mesh_shape(), progress=True)


PEERS = {None: "tsmla", "quantized": "tsmla", "exact": "tsmla_exact"}
"""The peer of a row by its products with fp8 weights, as in `fp8_products.json`; None: the default ones."""


def forms() -> list[str | None]:
    """The products with fp8 weights that are measured."""
    return list(FP8_PRODUCTS.value) or [None]


def decode_floor(config: ModelConfig, narrow: bool, batch: int) -> float:
    """Microseconds that a device needs to read what a decode step must."""
    moved = decode_bytes(config, narrow, batch, CONTEXT.value, mesh_shape())
    return moved / bytes_per_s(jax.devices()[0].device_kind) * 1e6


def prefill_floor(config: ModelConfig, tokens: int, length: int) -> float:
    """Microseconds of a device's share of the products for that many tokens of prompts of `length` tokens."""
    return prefill_products(config, tokens, length) / FLOPS_PER_S["bf16"] * 1e6 / mesh_shape().size


def prompts_of_prefill() -> int:
    """How many prompts the first prefill has, on all replicas: 32 for each if prompts have up to 512 tokens, fewer if
    they are longer. The prefill that is timed has twice as many."""
    return min(32, max(4, 16384 // CONTEXT.value)) * mesh_shape().replicas


def admit_texts(engine: Engine, config: ModelConfig, batch: int, limit: int) -> None:
    """Admit texts of --context tokens, to be prefilled."""
    for text, prompt in enumerate(prompts(config.vocab_size, batch, CONTEXT.value)):
        assert engine.admit(text, prompt, limit)


def place_texts(engine: Engine, config: ModelConfig, batch: int, limit: int) -> None:
    """Admit texts as if their prompts of --context tokens had been prefilled, over caches of noise."""
    admit_texts(engine, config, batch, limit)
    session = engine._opened()
    for replica in session.replicas:
        replica.arrived.clear()
    for layer, cache in enumerate(session.caches):
        leaves, structure = jax.tree.flatten(cache)
        noisy = [noise(layer, leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves]
        session.caches[layer] = jax.tree.unflatten(structure, noisy)
    arrays = [np.zeros(array.shape, np.int32) for array in session.state]
    state = type(session.state)(*arrays)
    for text in session.texts.values():
        text.cached, text.scheduled, text.generated = CONTEXT.value, 1, [text.prompt[0]]
        row = text.replica * session.plan.rows + text.row
        state.tokens[row], state.cached[row], state.remaining[row] = text.prompt[0], CONTEXT.value, limit - 1
        state.block_tables[row, : len(text.table.pages)] = text.table.pages
    session.state = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), state, session.state)


def time_decode(engine: Engine, config: ModelConfig, batch: int, *, prefilled: bool) -> tuple[float, list[list[int]]]:
    """Median microseconds of a step of `batch` texts, and the first tokens of each text.

    The host reads tokens as usual. prefilled: whether the texts' prompts are prefilled; otherwise the caches hold
    noise."""
    (admit_texts if prefilled else place_texts)(engine, config, batch, STEPS + 12)
    texts: dict[int, list[int]] = defaultdict(list)

    def step() -> int:
        new = engine.step()
        for text, tokens, _ in new:
            texts[text] += tokens
        return len(new)

    while engine.figures.decode_steps < 8:
        step()
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        assert step() == batch
        times.append(time.perf_counter() - begin)
    engine.close()
    return sorted(times)[STEPS // 2] * 1e6, [texts[text][:KEPT_TOKENS] for text in range(batch)]


def time_prefill(engine: Engine, config: ModelConfig, count: int, length: int) -> float:
    """Microseconds that the prefill of `count` prompts of `length` tokens takes, from when the engine is open on."""
    engine.open()
    jax.block_until_ready(engine._opened().caches)
    waiting, begin = deque(enumerate(prompts(config.vocab_size, count, length))), time.perf_counter()
    done = 0
    while done < count:
        while waiting and engine.admit(*waiting[0], 1):
            waiting.popleft()
        done += len(engine.step())
    taken = time.perf_counter() - begin
    engine.close()
    return taken * 1e6


def options(config: ModelConfig, batch: int, length: int) -> EngineOptions:
    """The options of an engine for texts of `length` tokens and some more."""
    mesh, page_size = mesh_shape(), default_page_size(config)
    pages = -(-batch // mesh.replicas) * ((length + STEPS) // (page_size * mesh.context) + 2)
    return EngineOptions(
        max_batch=batch,
        num_pages=pages,
        chunk=CHUNK.value,
        program="step",  # as on a GPU, wherever this runs
        data_parallel=mesh.data,
        expert_parallel=mesh.expert,
        context_parallel=mesh.context,
    )


def compile_step(config: ModelConfig, narrow: bool, what: str, products: str | None) -> None:
    """Compiles the steps of a point into the cache and prints how long that takes, tracing included. With --checkpoints
    those of a decode row's prompts are among them."""
    replicas = mesh_shape().replicas
    params = with_products(shapes_here(config, narrow), products)
    params = placed(jax.eval_shape(lambda params: fold(params, config), params))
    if what.startswith("prompt"):
        engine = Engine(params, config, options(config, 1, int(what.removeprefix("prompt"))))
        engine.compile_ahead()
        print(f"steps of {what}: compiled in {engine.figures.compile_seconds:.1f} s", flush=True)
        return
    batch = prompts_of_prefill() if what == "prefill" else int(what)
    engine = Engine(params, config, options(config, batch, CONTEXT.value))
    engine.open()
    plan = engine.plan
    calls = {}
    if what != "prefill":
        calls["decode"] = engine.call(StepKind("decode", plan.rows), steps.no_drafts(replicas * plan.rows))
    if what == "prefill" or CHECKPOINTS.value:
        kind = StepKind("fresh", plan.prefill_rows)
        each = -(-batch // replicas) * CONTEXT.value
        size = next(size for size in plan.prefill_sizes if size >= min(CHUNK.value, each))
        calls["prefill"] = engine.call(kind, engine._no_prompts(kind, size))
    for step, (run, arguments) in calls.items():
        begin = time.perf_counter()
        lowered = run.lower(*arguments)
        traced = time.perf_counter()
        lowered.compile()
        seconds = time.perf_counter() - traced
        print(f"{step} of {what}: traced in {traced - begin:.1f} s, compiled in {seconds:.1f} s", flush=True)


def measure(record: Record, params: Any, model: tuple[str, str], what: str, products: str | None) -> None:
    """One point: a batch size, "prefill", or "prompt" and its tokens."""
    config, narrow = config_of(model), model[1] == "fp8"
    params = with_products(params, products)
    row: dict[str, Any]
    if what == "prefill":
        replicas = mesh_shape().replicas
        batch, tokens = prompts_of_prefill(), CHUNK.value * replicas
        engine = Engine(params, config, options(config, batch, CONTEXT.value))
        time_prefill(engine, config, batch, CONTEXT.value)
        us = time_prefill(engine, config, 2 * batch, CONTEXT.value) * tokens / (2 * batch * CONTEXT.value)
        floor = prefill_floor(config, tokens, CONTEXT.value)
        row = {"b": max(1, tokens // CONTEXT.value), "mode": mode_name(model, "prefill")}
    elif what.startswith("prompt"):
        tokens = int(what.removeprefix("prompt"))
        engine = Engine(params, config, options(config, 1, tokens))
        time_prefill(engine, config, 1, tokens)
        us, floor = time_prefill(engine, config, 1, tokens), prefill_floor(config, tokens, tokens)
        row = {"b": 1, "mode": mode_name(model, "prompt"), "context": tokens, "chunk": CHUNK.value}
    else:
        batch = tokens = int(what)
        engine = Engine(params, config, options(config, batch, CONTEXT.value))
        engine.compile_ahead(prefill=False)
        compiled = engine.figures.compile_seconds
        prefilled = bool(CHECKPOINTS.value)
        us, texts = time_decode(engine, config, batch, prefilled=prefilled)
        floor = decode_floor(config, narrow, batch)
        row = {"b": batch, "mode": mode_name(model, "decode")}
        row["warm_s" if CACHE.value else "compile_s"] = round(compiled, 1)
        if prefilled:
            row |= {"context": CONTEXT.value, "tokens": texts}
            row |= {} if (share := equal_share(row)) is None else {"equal_tokens": round(share, 4)}
    rate = tokens / us * 1e6
    attention = config.layer(0).attention
    heads = (attention.mla if isinstance(attention, V32Config) else attention).num_attention_heads
    sizes: dict[str, Any] = {"context": CONTEXT.value, "layers": config.num_layers, "heads": heads}
    sizes |= {"products": products} if products else {}
    if mesh_shape().size > 1:
        sizes |= {f"{axis}_parallel": size for axis, size in dataclasses.asdict(mesh_shape()).items()}
        if "+COLLECTIVES" in os.environ.get("XLA_FLAGS", ""):
            sizes["collectives"] = "in graphs"
    record.add(**sizes | row, peer=PEERS[products], us=round(us, 1), floor_us=round(floor, 1), tokens_per_s=round(rate))
    extra = " ".join(f"{key} {value}" for key, value in row.items() if key.endswith(("_s", "equal_tokens")))
    print(f"{row['mode']:22s} {products or ''} B {row['b']:4d} {us:9.1f} us, floor {floor:8.1f} ({floor / us:4.0%}), "
          f"{rate:9.0f} tokens/s {extra}", flush=True)  # fmt: skip


def all_points() -> Iterable[tuple[str, str, str]]:
    for model, weights in MODELS:
        for what in (*map(str, BATCHES), "prefill"):
            yield model, weights, what


def main(argv: list[str]) -> int:
    del argv
    points = [tuple(point.split(",")) for point in POINTS.value.split("/")] if POINTS.value else list(all_points())
    # A cache of this run's own: what is found in it was compiled by this run.
    jax.config.update("jax_compilation_cache_dir", CACHE.value or tempfile.mkdtemp())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if COMPILE_ONLY.value:
        for model, weights, what in points:
            for products in forms():
                compile_step(config_of((model, weights)), weights == "fp8", what, products)
        return 0
    record = Record()
    params: dict[tuple[str, str], Any] = {}
    for model, weights, what in within_budget(points):
        if (model, weights) not in params:
            params.clear()
            params[model, weights] = params_of((model, weights))
        for products in forms():
            measure(record, params[model, weights], (model, weights), what, products)
    return 0


if __name__ == "__main__":
    app.run(main)
