"""Time vLLM's decode steps and prompts with one pair of attention backends: a whole engine, a model of random weights.

    python -m examples.whole_models.vllm_steps --backend CUSTOM --prefill CUSTOM --kv auto --out FILE.json
        [--points 1,512/...] [--model v2-lite,bf16] [--checkpoints DIR | --drawn] [--compare OTHER.json]

The model is one of generate.py's, by default DeepSeek-V2-Lite's shape (27 layers, 16 heads, 64 experts). The engine
runs in this process with full CUDA graphs for decode, without torch.compile unless --compile asks for vLLM's default,
and points are (requests, tokens of context). A step is the time between two steps of the engine that gave every request
a token: the median over all steps of a run, and over `--runs` runs, whose prompts are in the engine's prefix cache from
a run before. us_least is the shortest of these steps. Where the GPU waits for the host, the median moves with whatever
else the host does; and a step that is seen late makes the next one short, so us_least can be less than the GPU takes.
graph_us is what the GPU takes for the graph of a step, all layers, replayed many times in a row in the middle of a run:
no replay waits for the host. A step's metadata, its sampling and the host's time are outside of it.

A prefill row has the best rate of the batches of up to 131,072 tokens, medians over runs of prompts that no run had
before, as the time of 4,096 tokens.

With --checkpoints the weights are those that generate.py wrote there, and rows compare with generate.py's. With --drawn
they are drawn on the GPU (drawn.py), the same for every backend, and their peer is "vllm, drawn weights".
Without either they are vLLM's dummy weights, which send nearly all tokens to the same experts. Steps of the last two
only compare backends with each other. Each decode row has the first greedy tokens of each request, the same prompts
for every backend and in generate.py; --compare adds the share of tokens that is equal in that file's row of the same
step, batch and context.

--profile DIR runs some steps of each point more, and writes the GPU's time of each kernel in a step there; the row's
attention_us is what kernels of attention take, among them those that convert selected positions and join queries'
parts. --serve N ends with a run of N requests of mixed lengths: a row of mode "... serving" has what was compiled since
the engine's start, by vLLM's own monitor, and how much GPU memory is used after 20 of the requests and after all.
"""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

# Set before vllm is imported, so that the engine runs in this process, and nothing asks the network or compiles other
# kernels.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_USE_DEEP_GEMM": "0", "VLLM_MOE_USE_DEEP_GEMM": "0",
} | os.environ  # fmt: skip

from absl import app, flags

from benchmarks.harness import POINTS, Record
from examples.whole_models.models import (
    ATTENTION,
    CHECKPOINTS,
    KEPT_TOKENS,
    MODELS,
    checkpoint,
    config_folder,
    equal_share,
    mode_name,
    named_model,
    prefill_rows,
    prompt_rate,
    prompts,
    serving_row,
    within_budget,
)

BACKEND = flags.DEFINE_string("backend", "CUSTOM", "vLLM's decode backend: CUSTOM is this project's")
PREFILL = flags.DEFINE_string("prefill", None, "vLLM's MLA prefill backend; its own choice by default")
KV = flags.DEFINE_string("kv", "auto", "vLLM's --kv-cache-dtype: auto, fp8 or fp8_ds_mla")
RUNS = flags.DEFINE_integer("runs", 3, "runs of a point")
STEPS = flags.DEFINE_integer("steps", 48, "decode steps of a run", lower_bound=KEPT_TOKENS)
MAX_LEN = flags.DEFINE_integer("max_len", 16384, "longest request")
MODEL = flags.DEFINE_string("model", "v2-lite,bf16", "a model and the format of its weights, as in generate.py")
DRAWN = flags.DEFINE_bool("drawn", False, "weights that are drawn on the GPU, in place of vLLM's dummy weights")
LAYERS = flags.DEFINE_integer("layers", None, "layers of the model, if not its own number; not with --checkpoints")
PROFILE = flags.DEFINE_string("profile", None, "folder for the GPU's time of each kernel in a step")
SERVE = flags.DEFINE_integer("serve", 0, "requests of mixed lengths to run at the end: more than 20")
TENSOR_PARALLEL = flags.DEFINE_integer("tensor_parallel", 1, "GPUs that share the heads and the experts")
CONTEXT_PARALLEL = flags.DEFINE_integer("context_parallel", 1, "GPUs, of these, that share a request's keys (DCP)")
COMPILE = flags.DEFINE_bool("compile", False, "torch.compile and piecewise graphs too, as vLLM does by default")

ALL_POINTS = tuple((batch, context) for context in (512, 4096, 16000) for batch in (1, 16, 64, 256))
PROFILED_STEPS = 16
GRAPH_REPLAYS = 20  # in a row
BEFORE_REPLAYS = 4  # full steps of a run before a step's graph is replayed


def model() -> tuple[str, str]:
    """The key of --model among MODELS."""
    return named_model(MODEL.value)


class Run(NamedTuple):
    """A generation: seconds in all, milliseconds of each full step, and the tokens of each request."""

    seconds: float
    steps: list[float]
    tokens: list[list[int]]


def weights() -> tuple[Path, str]:
    """The folder of the model, and vLLM's format of its weights: "auto", or where there are none "drawn" or "dummy"."""
    folder = checkpoint(model())
    if folder is None:
        folder = config_folder(model(), LAYERS.value)
        if DRAWN.value:
            from examples.whole_models.drawn_weights import FORMAT

            return folder, FORMAT
        return folder, "dummy"
    if not (folder / "config.json").exists():
        raise app.UsageError(f"--checkpoints {CHECKPOINTS.value}: there is no {folder}; generate.py writes it")
    return folder, "auto"


def without_router_kernel() -> None:
    """Turns off vLLM's CuTe DSL kernel for the router, for every backend alike: it wants another version of the DSL
    than the backend CUSTOM, and compiles 64 variants at the start."""
    try:
        from vllm.model_executor.kernels.linear.cute_dsl import ll_bf16
    except ImportError:
        return  # a version without it
    ll_bf16._cutedsl_available = False


class Compilations(logging.Handler):
    """Keeps vLLM's messages on what is compiled after the engine's start, which its monitor writes."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "compil" in (said := record.getMessage()):
            self.said.append(said)


class LatestGraph:
    """The CUDA graph that was replayed last, and how long the GPU takes for it."""

    def __init__(self) -> None:
        import torch

        self.latest: torch.cuda.CUDAGraph | None = None
        self.batch, self.steps, self.us = 0, 0, math.nan
        replay = torch.cuda.CUDAGraph.replay

        def noted(graph: torch.cuda.CUDAGraph) -> None:
            self.latest = graph
            replay(graph)

        torch.cuda.CUDAGraph.replay = noted  # type: ignore[method-assign]

    def step(self, gave: int) -> None:
        """A step has given so many requests a token: in a run of `batch` requests that is timed, and is far enough,
        replay its graph, which writes what it has written before."""
        import torch

        self.steps += bool(self.batch) and gave == self.batch
        if self.latest is None or self.steps < BEFORE_REPLAYS:
            return
        self.batch = self.steps = 0
        self.latest.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(GRAPH_REPLAYS):
            self.latest.replay()
        end.record()
        torch.cuda.synchronize()
        self.us = begin.elapsed_time(end) / GRAPH_REPLAYS * 1e3


class Engine:
    """vLLM in this process."""

    def __init__(self, points: list[tuple[int, int]]) -> None:
        folder, load_format = weights()
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs

        without_router_kernel()
        most = max(batch for batch, _ in points)
        attention = {"backend": BACKEND.value} | ({"mla_prefill_backend": PREFILL.value} if PREFILL.value else {})
        sizes = sorted({1, 2, 4, 8, *(batch for batch, _ in points)})
        compilation: dict[str, Any] = {"cudagraph_capture_sizes": sizes}
        if not COMPILE.value:
            compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        known = inspect.signature(EngineArgs).parameters
        # It compiles and times kernels of its own at the start, which this model does not use.
        quick: dict[str, Any] = {name: False for name in ("enable_flashinfer_autotune",) if name in known}
        if TENSOR_PARALLEL.value > 1:
            quick |= {
                "tensor_parallel_size": TENSOR_PARALLEL.value,
                "decode_context_parallel_size": CONTEXT_PARALLEL.value,
            }
        self.llm = LLM(
            model=str(folder), load_format=load_format, skip_tokenizer_init=True, dtype="bfloat16", seed=0,
            block_size=64, enable_prefix_caching=True, gpu_memory_utilization=0.85,
            max_model_len=MAX_LEN.value, max_num_seqs=max(256, most), max_num_batched_tokens=8192,
            attention_config=attention, kv_cache_dtype=KV.value, disable_log_stats=True,
            compilation_config=compilation, **quick,
        )  # fmt: skip
        self.compilations = Compilations()
        logging.getLogger("vllm").addHandler(self.compilations)
        self.taken: list[tuple[float, int]] = []  # when a step ended, and how many requests it gave a token
        self.graph = LatestGraph()
        core = self.llm.llm_engine.engine_core
        get_output = core.get_output

        def timed(*arguments: Any, **options: Any) -> Any:
            output = get_output(*arguments, **options)
            gave = len(getattr(output, "outputs", None) or ())
            self.taken.append((time.perf_counter(), gave))
            self.graph.step(gave)
            return output

        core.get_output = timed

    @property
    def cache_tokens(self) -> int:
        config = self.llm.llm_engine.vllm_config.cache_config
        return int(config.num_gpu_blocks or 0) * config.block_size

    def graph_us(self, given: list[list[int]]) -> float:
        """Microseconds that the GPU takes for the graph of a step of these prompts; nan if they never ran at once."""
        self.graph.batch, self.graph.steps, self.graph.us = len(given), 0, math.nan
        self.generate(given, STEPS.value)
        self.graph.batch = 0
        return self.graph.us

    def generate(self, prompts: list[list[int]], count: int | list[int]) -> Run:
        """`count` greedy tokens for each prompt, or as many for each as it says."""
        from vllm import SamplingParams

        counts = [count] * len(prompts) if isinstance(count, int) else count
        each = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in counts]
        sampling = each[0] if isinstance(count, int) else each
        self.taken.clear()
        begin = time.perf_counter()
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(given, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        full = [(when, gave == len(prompts)) for when, gave in self.taken if gave]
        steps = [
            (after - before) * 1e3 for (before, first), (after, second) in itertools.pairwise(full) if first and second
        ]
        return Run(seconds, steps, [list(output.outputs[0].token_ids) for output in outputs])


def measure(engine: Engine, batch: int, context: int) -> tuple[dict[str, Any], float | None]:
    """The decode row of a point; and its prompt tokens a second, None if the batch is too large to measure them."""
    vocabulary = MODELS[model()]["vocab_size"]

    def seconds(given: list[list[int]], count: int) -> float:
        return engine.generate(given, count).seconds

    rate = prompt_rate(seconds, vocabulary, (batch, context), runs=RUNS.value)
    given = prompts(vocabulary, batch, context)
    first = engine.generate(given, STEPS.value)
    runs = [engine.generate(given, STEPS.value) for _ in range(RUNS.value)]
    medians = [statistics.median(run.steps) * 1e3 for run in runs if run.steps]
    if not medians:
        raise RuntimeError(
            f"no two steps in a row gave all {batch} requests a token; legal: a batch that the engine runs at once"
        )
    us = statistics.median(medians)
    graph_us = math.nan if COMPILE.value else engine.graph_us(given)
    row = {
        "mode": mode_name(model(), "decode"),
        "b": batch,
        "context": context,
        "us": round(us, 1),
        "us_of_runs": [round(each, 1) for each in medians],
        "us_least": round(min(min(run.steps) for run in runs if run.steps) * 1e3, 1),
        **({} if math.isnan(graph_us) else {"graph_us": round(graph_us, 1)}),
        "full_steps": len(runs[0].steps),
        "tokens_per_s": round(batch / us * 1e6),
        "tokens": [tokens[:KEPT_TOKENS] for tokens in first.tokens],
    }
    return row, rate


# ---- kernels of a step


def kernel_times(engine: Engine, given: list[list[int]], count: int) -> dict[str, tuple[float, float]]:
    """Calls and microseconds of each kernel in a run of `count` tokens."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        engine.generate(given, count)
        torch.cuda.synchronize()
    return {event.key: (event.count, event.device_time_total) for event in profiled.key_averages()}


def profile_step(engine: Engine, given: list[list[int]]) -> dict[str, tuple[float, float]]:
    """Calls and microseconds of each kernel in a decode step: of a longer run, less those of a shorter one."""
    short = kernel_times(engine, given, 2)
    long = kernel_times(engine, given, 2 + PROFILED_STEPS)
    found = {}
    for name, (calls, us) in long.items():
        calls_of_short, us_of_short = short.get(name, (0, 0.0))
        found[name] = ((calls - calls_of_short) / PROFILED_STEPS, (us - us_of_short) / PROFILED_STEPS)
    return {name: each for name, each in sorted(found.items(), key=lambda item: -item[1][1]) if each[1] > 0.01}


def profiled(engine: Engine, row: dict[str, Any], given: list[list[int]]) -> dict[str, Any]:
    """The fields of a point's profile; the kernels go into a file."""
    if not PROFILE.value:
        return {}
    kernels = profile_step(engine, given)
    name = f"{BACKEND.value}-{KV.value}-{row['b']}-{row['context']}.json"
    Path(PROFILE.value, name).write_text(json.dumps(kernels, indent=1))
    attention = sum(us for kernel, (_, us) in kernels.items() if ATTENTION.search(kernel))
    return {"attention_us": round(attention, 1), "kernels_us": round(sum(us for _, us in kernels.values()), 1)}


# ---- mixed requests


def serve(engine: Engine, count: int) -> dict[str, Any]:
    """The row of `count` mixed requests."""
    row = serving_row(model(), count, lambda given, counts: engine.generate(given, counts).seconds)
    return row | {"compiled": engine.compilations.said}


def main(arguments: list[str]) -> None:
    del arguments
    named = POINTS.value.split("/") if POINTS.value else ()
    points = [(int(batch), int(context)) for batch, context in (point.split(",") for point in named)]
    engine = Engine(points or list(ALL_POINTS))
    from vllm import __version__

    own_weights = "vllm, drawn weights" if DRAWN.value else "vllm, dummy weights"
    record = Record(
        peer="vllm" if CHECKPOINTS.value else own_weights,
        backend=BACKEND.value, prefill=PREFILL.value or "auto", kv=KV.value, vllm=__version__,
        layers=LAYERS.value or MODELS[model()]["num_hidden_layers"],
        **({"tensor_parallel": TENSOR_PARALLEL.value, "context_parallel": CONTEXT_PARALLEL.value}
           if TENSOR_PARALLEL.value > 1 else {}),
    )  # fmt: skip
    rates: dict[int, float] = {}
    for batch, context in within_budget(points or list(ALL_POINTS)):
        if batch * (context + STEPS.value) > engine.cache_tokens:
            print(f"{batch} requests of {context}: the cache holds {engine.cache_tokens} tokens", flush=True)
            continue
        row, rate = measure(engine, batch, context)
        if rate is not None:
            rates[context] = max(rate, rates.get(context, 0.0))
        share = equal_share(row)
        row |= profiled(engine, row, prompts(MODELS[model()]["vocab_size"], batch, context))
        record.add(**row, **({} if share is None else {"equal_tokens": round(share, 4)}))
        print({name: value for name, value in row.items() if name != "tokens"}, share, flush=True)
    for row in prefill_rows(model(), rates):
        record.add(**row)
    if SERVE.value:
        row = serve(engine, SERVE.value)
        record.add(**row)
        print(row, flush=True)


if __name__ == "__main__":
    app.run(main)
