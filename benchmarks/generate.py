"""Time whole models with random weights, through the engine: decode steps, prefill, and compilation.

    python3 benchmarks/generate.py --out FILE.json [--points v2-lite,bf16,1/v2-lite,bf16,prefill/...] [--seconds 500]
        [--checkpoints DIR [--compare VLLM.json]] [--layers N] [--data_parallel N] [--expert_parallel N]
        [--context_parallel N]

A point is a model (v2-lite, or v3-slice: one dense layer and 5 of experts in bf16, 10 in fp8), the format of its
weights (bf16, or fp8: e4m3 with scales for blocks of 128 x 128 in all matrices that a checkpoint of V3 has so), and a
batch size, "prefill", or "prompt" and a number of tokens (v2-lite,bf16,prompt131072). Weights are made on the device;
texts are random ids, so that tokens choose their experts nearly evenly. A decode row is the median step of 64, of B
texts of 512 tokens over caches of noise; a prefill row is prompts of 512 tokens, a chunk at a time; a prompt row is the
whole prefill of one text. floor_us is the time of the bytes that a step must read (weights once, of the experts those
that B tokens can be expected to choose if all are alike; the caches), or of the products of a prefill. compile_s is
what it takes to compile the decode step, tracing included; warm_s is the same with jax's compilation cache filled by a
run with --compile_only.

With --checkpoints weights are those of a checkpoint in that folder, which is written there from a seed unless it is
there already (v2-lite takes 31 GB, in fp8 16), and the texts of decode rows are prefilled, so that their tokens mean
something. Rows have the first of them; --compare adds the share of them that is equal in a record of vllm_steps.py,
which reads the same checkpoints and has the same prompts.

--layers makes a slice that fits one GPU's memory, where a mesh is to be compared with one. On a mesh a batch is that
of all replicas, a prefill step has a chunk for each of them, and floor_us is that of one device: the bytes that it must
read, or its share of the products; collectives have none. Rows on one device beside those of a mesh are what a second
run without the three flags records: of as many texts for split experts or keys, of a copy's texts for several copies.
With XLA's flag for collectives in CUDA graphs set (docs/guides/several-gpus.md), rows of a mesh say so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

# Before jax is: v3-slice needs nearly all of the GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from compiling import COMPILE_ONLY
from figure_pages import bytes_per_s
from harness import POINTS, Record, within_budget
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from random_checkpoint import write_checkpoint
from whole_models import CHECKPOINTS, KEPT_TOKENS, MODELS, checkpoint, equal_share, mode_name, prompts

from tsmla_jax.generate import Engine, EngineOptions, ModelConfig, load_model
from tsmla_jax.generate import step as steps
from tsmla_jax.generate.engine import StepKind
from tsmla_jax.generate.mesh import MeshShape, make_mesh, param_specs
from tsmla_jax.generate.model import fold
from tsmla_jax.nn import param_shapes
from tsmla_jax.nn.block_scaled import BLOCK, BlockScaled, stack_size

CHUNK = flags.DEFINE_integer("chunk", 4096, "prompt tokens of a prefill step")
CACHE = flags.DEFINE_string("compilation_cache", None, "folder of jax's compilation cache; a new one by default")
DATA = flags.DEFINE_integer("data_parallel", 1, "copies of the model", lower_bound=1)
EXPERT = flags.DEFINE_integer("expert_parallel", 1, "devices of a copy that have texts of their own", lower_bound=1)
LAYERS = flags.DEFINE_integer("layers", None, "layers of a model, instead of its own number", lower_bound=2)
CONTEXT_DEVICES = flags.DEFINE_integer("context_parallel", 1, "devices that share the keys of a text", lower_bound=1)

CONTEXT, STEPS = 512, 64
BATCHES = (1, 16, 64, 256)
FLOPS_PER_S = 798e12
"""Of a product of bf16 matrices of 8192 x 8192, as measured on an H200."""


def mesh_shape() -> MeshShape:
    """The mesh that the flags ask for."""
    return MeshShape(DATA.value, EXPERT.value, CONTEXT_DEVICES.value)


def shapes(config: ModelConfig, narrow: bool, shards: int = 1) -> dict[str, Any]:
    """The parameters' shapes and dtypes, as `load_model` would return them on a mesh of `shards` shards of experts."""

    def wide(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def matrix(*shape: int) -> Any:
        if not narrow:
            return wide(*shape)
        blocks = (-(-size // BLOCK) for size in shape[-2:])
        scales = wide(*shape[:-2], *blocks, dtype=jnp.float32)
        stack = (shards * stack_size(shape[0] // shards, *shape[1:]), *shape[1:]) if len(shape) == 3 else shape
        return BlockScaled(wide(*stack, dtype=jnp.float8_e4m3fn), scales)

    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    layers = []
    for index in range(config.num_layers):
        attention = {name: wide(*shape) for name, shape in param_shapes(config.attention).items()}
        for name, shape in param_shapes(config.attention).items():
            if narrow and len(shape) > 1 and not name.startswith("w_u"):
                inputs = 2 if name == "o_proj" else 1
                attention[name] = matrix(math.prod(shape[inputs:]), math.prod(shape[:inputs]))
        mlp: dict[str, Any] = {}
        if config.is_moe_layer(index):
            count, width = moe.num_experts + shards * moe.num_shared, moe.intermediate_size
            mlp = {"gate_up": matrix(count, 2 * width, hidden), "down": matrix(count, hidden, width)}
            mlp["router"] = wide(moe.num_experts, hidden, dtype=jnp.float32)
            if moe.routing == "noaux_tc":
                mlp["correction_bias"] = wide(moe.num_experts, dtype=jnp.float32)
        else:
            width = config.intermediate_size
            # Where a block of scales would have rows of gate and of up, `load_model` widens them.
            make = matrix if width % BLOCK == 0 else wide
            mlp = {"gate_up": make(2 * width, hidden), "down": make(hidden, width)}
        norms = {"attention_norm": wide(hidden), "mlp_norm": wide(hidden)}
        layers.append({"attention": attention, "mlp": mlp, **norms})
    vocabulary = wide(config.vocab_size, hidden)
    return {"embed": vocabulary, "lm_head": vocabulary, "norm": wide(hidden), "layers": layers}


def shapes_here(config: ModelConfig, narrow: bool) -> dict[str, Any]:
    """`shapes` on the mesh that the flags ask for."""
    return shapes(config, narrow, mesh_shape().expert_shards)


def placed(params: Any) -> Any:
    """Descriptions of parameters, and of where they lie on that mesh."""
    mesh = make_mesh(mesh_shape())
    if mesh is None:
        return params
    specs = jax.tree.broadcast(param_specs(params), params, is_leaf=lambda node: isinstance(node, P))
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        params,
        specs,
    )


def noise(seed: int, shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> jax.Array:
    """Uniform values of variance 1 / (last axis), or of a scale of such values in e4m3; without temporaries."""
    values: jax.Array = _noise(shape, jnp.dtype(dtype), sharding)(jnp.uint32(seed))
    return values


@functools.cache
def _noise(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    @functools.partial(jax.jit, out_shardings=sharding)
    def make(bits: jax.Array) -> jax.Array:
        for axis in range(len(shape)):
            bits = (bits ^ jax.lax.broadcasted_iota(jnp.uint32, shape, axis)) * jnp.uint32(0x9E3779B1)
            bits ^= bits >> 15
        uniform = (bits >> 8).astype(jnp.float32) / 2**23 - 1
        if dtype == jnp.float8_e4m3fn:
            return (uniform * 400).astype(dtype)
        return (uniform * math.sqrt(3 / shape[-1])).astype(dtype)

    return make


def config_of(model: tuple[str, str]) -> ModelConfig:
    """The model's configuration, with --layers layers; no token ends a text."""
    layers = {"num_hidden_layers": LAYERS.value} if LAYERS.value else {}
    return steps.without_ends(ModelConfig.from_hf({**MODELS[model], **layers}))


def params_of(model: tuple[str, str]) -> Any:
    """The parameters of a model: those of its checkpoint, if checkpoints are asked for."""
    config, narrow = config_of(model), model[1] == "fp8"
    directory = checkpoint(model)
    if directory is None:
        return random_params(config, narrow)
    if not (directory / "config.json").exists():
        write_checkpoint(directory, MODELS[model])
    return load_model(directory, config, keep_fp8=narrow, mesh=mesh_shape(), progress=True)


def random_params(config: ModelConfig, narrow: bool) -> dict[str, Any]:
    """Random parameters on the devices; norms are 1, and block scales bring e4m3 to the variance of the others."""
    seeds, mesh = iter(range(1, 1 << 20)), make_mesh(mesh_shape())
    params = shapes_here(config, narrow)

    def make(leaf: Any, spec: Any) -> Any:
        narrowed = isinstance(leaf, BlockScaled)
        sharding = None if mesh is None else NamedSharding(mesh, spec.values if narrowed else spec)
        if narrowed:
            values = noise(next(seeds), leaf.values.shape, leaf.values.dtype, sharding)
            scale = math.sqrt(3 / leaf.shape[-1]) / 400
            return BlockScaled(values, jnp.full(leaf.scales.shape, scale, jnp.float32, device=sharding))
        if len(leaf.shape) == 1:
            return jnp.full(leaf.shape, 0 if leaf.dtype == jnp.float32 else 1, leaf.dtype, device=sharding)
        return noise(next(seeds), leaf.shape, leaf.dtype, sharding)

    specs = jax.tree.broadcast(param_specs(params), params, is_leaf=lambda node: isinstance(node, P))
    return jax.tree.map(make, params, specs, is_leaf=lambda node: isinstance(node, BlockScaled))


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def decode_floor(config: ModelConfig, narrow: bool, batch: int) -> float:
    """Microseconds that a device needs to read what a decode step must."""
    moe, mesh = config.moe, mesh_shape()
    assert moe is not None
    params = shapes(config, narrow)
    total = _bytes({**params, "embed": ()})
    chosen = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** (batch / mesh.data)) / mesh.expert_shards
    for layer in params["layers"]:
        if "router" in layer["mlp"]:
            stacks = jax.tree.leaves([layer["mlp"]["gate_up"], layer["mlp"]["down"]])
            each = sum(math.prod(stack.shape[1:]) * stack.dtype.itemsize for stack in stacks)
            total += each * (chosen + moe.num_shared) - _bytes(stacks)
    total += batch / mesh.replicas * CONTEXT / mesh.context * config.attention.cache_dim * 2 * config.num_layers
    return total / bytes_per_s(jax.devices()[0].device_kind) * 1e6


def prefill_floor(config: ModelConfig, tokens: int, length: int) -> float:
    """Microseconds of a device's share of the products for that many tokens of prompts of `length` tokens; the head
    sees the last of each."""
    moe, attention = config.moe, config.attention
    assert moe is not None
    weights = 0.0
    for layer in shapes(config, False)["layers"]:
        weights += sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(layer["attention"]))
        matrices = sum(math.prod(layer["mlp"][name].shape) for name in ("gate_up", "down"))
        if "router" in layer["mlp"]:
            matrices *= (moe.top_k + moe.num_shared) / (moe.num_experts + moe.num_shared)
        weights += matrices
    widths = attention.qk_head_dim + attention.v_head_dim
    scores = config.num_layers * attention.num_attention_heads * widths * length / 2
    return 2 * tokens * (weights + scores) / FLOPS_PER_S * 1e6 / mesh_shape().size


def admit_texts(engine: Engine, config: ModelConfig, batch: int, limit: int) -> None:
    """Texts of CONTEXT tokens, to be prefilled."""
    for text, prompt in enumerate(prompts(config.vocab_size, batch, CONTEXT)):
        assert engine.admit(text, prompt, limit)


def place_texts(engine: Engine, config: ModelConfig, batch: int, limit: int) -> None:
    """Texts as if their prompts of CONTEXT tokens had been prefilled, over caches of noise."""
    admit_texts(engine, config, batch, limit)
    session = engine._opened()
    for replica in session.replicas:
        replica.arrived.clear()
    for layer, cache in enumerate(session.caches):
        session.caches[layer] = noise(layer, cache.shape, cache.dtype, cache.sharding)
    arrays = [np.zeros(array.shape, np.int32) for array in session.state]
    state = type(session.state)(*arrays)
    for text in session.texts.values():
        text.cached, text.scheduled, text.generated = CONTEXT, 1, [text.prompt[0]]
        row = text.replica * session.plan.rows + text.row
        state.tokens[row], state.cached[row], state.remaining[row] = text.prompt[0], CONTEXT, limit - 1
        state.block_tables[row, : len(text.table.pages)] = text.table.pages
    session.state = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), state, session.state)


def time_decode(engine: Engine, config: ModelConfig, batch: int, *, prefilled: bool) -> tuple[float, list[list[int]]]:
    """Median microseconds of a step of `batch` texts, and the first tokens of each text.

    The host reads tokens as ever. prefilled: the texts' prompts are, and not the caches of noise."""
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
    """Microseconds that the prefill of `count` prompts of `length` tokens takes."""
    waiting, begin = deque(enumerate(prompts(config.vocab_size, count, length))), time.perf_counter()
    done = 0
    while done < count:
        while waiting and engine.admit(*waiting[0], 1):
            waiting.popleft()
        done += len(engine.step())
    taken = time.perf_counter() - begin
    engine.close()
    return taken * 1e6


def options(batch: int, length: int = CONTEXT) -> EngineOptions:
    """For texts of `length` tokens and some more."""
    mesh = mesh_shape()
    pages = -(-batch // mesh.replicas) * (length // (64 * mesh.context) + 2)
    return EngineOptions(
        max_batch=batch,
        num_pages=pages,
        chunk=CHUNK.value,
        program="step",  # as on a GPU, wherever this runs
        data_parallel=mesh.data,
        expert_parallel=mesh.expert,
        context_parallel=mesh.context,
    )


def compile_step(config: ModelConfig, narrow: bool, what: str) -> None:
    """Compiles the steps of a point into the cache and prints how long that takes, tracing included. With --checkpoints
    those of a decode row's prompts are among them."""
    replicas = mesh_shape().replicas
    params = placed(jax.eval_shape(lambda params: fold(params, config), shapes_here(config, narrow)))
    if what.startswith("prompt"):
        engine = Engine(params, config, options(1, int(what.removeprefix("prompt"))))
        engine.compile_ahead()
        print(f"steps of {what}: compiled in {engine.figures.compile_seconds:.1f} s", flush=True)
        return
    batch = 32 * replicas if what == "prefill" else int(what)
    engine = Engine(params, config, options(batch))
    engine.open()
    plan = engine.plan
    calls = {}
    if what != "prefill":
        calls["decode"] = engine.call(StepKind("decode", plan.rows), steps.no_drafts(replicas * plan.rows))
    if what == "prefill" or CHECKPOINTS.value:
        kind = StepKind("fresh", plan.prefill_rows)
        each = -(-batch // replicas) * CONTEXT
        size = next(size for size in plan.prefill_sizes if size >= min(CHUNK.value, each))
        calls["prefill"] = engine.call(kind, engine._no_prompts(kind, size))
    for step, (run, arguments) in calls.items():
        begin = time.perf_counter()
        lowered = run.lower(*arguments)
        traced = time.perf_counter()
        lowered.compile()
        seconds = time.perf_counter() - traced
        print(f"{step} of {what}: traced in {traced - begin:.1f} s, compiled in {seconds:.1f} s", flush=True)


def measure(record: Record, params: Any, model: tuple[str, str], what: str) -> None:
    """One point: a batch size, "prefill", or "prompt" and its tokens."""
    config, narrow = config_of(model), model[1] == "fp8"
    row: dict[str, Any]
    if what == "prefill":
        replicas = mesh_shape().replicas
        batch, tokens = 32 * replicas, CHUNK.value * replicas
        engine = Engine(params, config, options(batch))
        time_prefill(engine, config, batch, CONTEXT)
        us = time_prefill(engine, config, 2 * batch, CONTEXT) * tokens / (2 * batch * CONTEXT)
        floor = prefill_floor(config, tokens, CONTEXT)
        row = {"b": tokens // CONTEXT, "mode": mode_name(model, "prefill")}
    elif what.startswith("prompt"):
        tokens = int(what.removeprefix("prompt"))
        engine = Engine(params, config, options(1, tokens))
        time_prefill(engine, config, 1, tokens)
        us, floor = time_prefill(engine, config, 1, tokens), prefill_floor(config, tokens, tokens)
        row = {"b": 1, "mode": mode_name(model, "prompt"), "context": tokens, "chunk": CHUNK.value}
    else:
        batch = tokens = int(what)
        engine = Engine(params, config, options(batch))
        engine.compile_ahead(prefill=False)
        compiled = engine.figures.compile_seconds
        prefilled = bool(CHECKPOINTS.value)
        us, texts = time_decode(engine, config, batch, prefilled=prefilled)
        floor = decode_floor(config, narrow, batch)
        row = {"b": batch, "mode": mode_name(model, "decode")}
        row["warm_s" if CACHE.value else "compile_s"] = round(compiled, 1)
        if prefilled:
            row |= {"context": CONTEXT, "tokens": texts}
            row |= {} if (share := equal_share(row)) is None else {"equal_tokens": round(share, 4)}
    rate = tokens / us * 1e6
    sizes = {"context": CONTEXT, "layers": config.num_layers, "heads": config.attention.num_attention_heads}
    if mesh_shape().size > 1:
        sizes |= {f"{axis}_parallel": size for axis, size in dataclasses.asdict(mesh_shape()).items()}
        if "+COLLECTIVES" in os.environ.get("XLA_FLAGS", ""):
            sizes["collectives"] = "in graphs"
    record.add(**sizes | row, peer="tsmla", us=round(us, 1), floor_us=round(floor, 1), tokens_per_s=round(rate))
    extra = " ".join(f"{key} {value}" for key, value in row.items() if key.endswith(("_s", "equal_tokens")))
    print(f"{row['mode']:22s} B {row['b']:4d} {us:9.1f} us, floor {floor:8.1f} ({floor / us:4.0%}), "
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
            compile_step(config_of((model, weights)), weights == "fp8", what)
        return 0
    record = Record()
    params: dict[tuple[str, str], Any] = {}
    for model, weights, what in within_budget(points):
        if (model, weights) not in params:
            params.clear()
            params[model, weights] = params_of((model, weights))
        measure(record, params[model, weights], (model, weights), what)
    return 0


if __name__ == "__main__":
    app.run(main)
