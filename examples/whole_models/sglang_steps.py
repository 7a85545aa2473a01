"""Time SGLang's decode steps and prompts with one attention backend: a whole engine, a model of random weights.

    python -m examples.whole_models.sglang_steps --backend tsmla --kv auto --out FILE.json
        [--points 1,512/...] [--model v2-lite,bf16] [--layers N] [--compare OTHER.json] [--profile DIR] [--serve N]

The model is one of generate.py's. Its weights are drawn on the GPU (drawn.py), the same for every backend, so rows
only compare backends with each other. Points are (requests, tokens of context). SGLang's scheduler runs in a process
of its own, with its CUDA graphs of decode and its overlapped schedule. A step is what each further token of all
requests takes: the time of a run of --steps tokens less that of a run of 2 tokens, over the tokens between them; both
runs find their prompts in the engine's prefix cache. The row has the median of --runs such pairs.

A prefill row has the best rate of the batches of up to 131,072 tokens, medians over runs of prompts that no run had
before, as the time of 4,096 tokens. Each decode row has the first greedy tokens of each request; --compare adds the
share of tokens that is equal in that file's row of the same step, batch and context.

A model with an indexer needs --backend dsa; --decode and --prefill then name the parts of that backend that decode and
take prompts. With any other --backend they name attention backends.

--serve N runs N requests of mixed lengths at the end. Their row has the compiled kernels that were new on disk after
them, in the caches that TSMLA_CACHE_DIR and TRITON_CACHE_DIR name, and the GPU's memory in use after the first
requests and at the end.

--profile DIR runs some steps of each point more under SGLang's profiler; the row's kernels_us is what all kernels of a
step take there, and attention_us what those of attention take.

The environment has to name this project's plug-in, as an installed wheel does; the script adds one that draws the
weights. flash_mla in a row is "tsmla" if TSMLA_SGLANG=flash_mla was set, so that SGLang's backends of FlashMLA ran on
these kernels.
"""

from __future__ import annotations

import collections
import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "SGLANG_DISABLE_REQUEST_LOGGING": "1"} | os.environ

from absl import app, flags

from benchmarks.harness import POINTS, Record
from examples.whole_models.models import (
    ATTENTION,
    KEPT_TOKENS,
    MODELS,
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

MODEL = flags.DEFINE_string("model", "v2-lite,bf16", "a model and the format of its weights, as in generate.py")
LAYERS = flags.DEFINE_integer("layers", None, "layers of the model, if not its own number")
BACKEND = flags.DEFINE_string("backend", "tsmla", "SGLang's --attention-backend: tsmla is this project's")
DECODE = flags.DEFINE_string("decode", None, "the backend of decode steps, if not --backend's")
PREFILL = flags.DEFINE_string("prefill", None, "the backend of prompts, if not --backend's")
KV = flags.DEFINE_string("kv", "auto", "SGLang's --kv-cache-dtype: auto or fp8_e4m3")
RUNS = flags.DEFINE_integer("runs", 3, "pairs of runs of a point")
STEPS = flags.DEFINE_integer("steps", 48, "tokens of a run", lower_bound=KEPT_TOKENS)
MAX_LEN = flags.DEFINE_integer("max_len", 16640, "longest request")
MEMORY = flags.DEFINE_float("memory", 0.8, "SGLang's --mem-fraction-static: the share of memory for weights and cache")
PROFILE = flags.DEFINE_string("profile", None, "folder for the GPU's time of each kernel in a step")
SERVE = flags.DEFINE_integer("serve", 0, "requests of mixed lengths to run at the end: more than 20")

ALL_POINTS = ((1, 4096), (16, 4096), (64, 4096), (1, 16000))
FEWEST_TOKENS = 2  # of the run whose time is taken off
PROFILED_STEPS = 16
CACHES = ("TSMLA_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables that name a cache of compiled kernels: this project's and Triton's."""
WEIGHTS = "tsmla_drawn"
"""The plug-in that draws the weights."""


def name_plugin(folder: Path) -> None:
    """Name sglang_weights.py as a plug-in of SGLang, in this process and in those that it begins."""
    described = folder / f"{WEIGHTS}-0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {WEIGHTS}\nVersion: 0\n")
    entry = f"[sglang.srt.plugins]\n{WEIGHTS} = examples.whole_models.sglang_weights:register\n"
    (described / "entry_points.txt").write_text(entry)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def model() -> tuple[str, str]:
    """The key of --model among MODELS."""
    return named_model(MODEL.value)


def attention_backends() -> dict[str, str]:
    """SGLang's options for --backend, --decode and --prefill."""
    parts = {"decode": DECODE.value, "prefill": PREFILL.value}
    option = "dsa_{}_backend" if BACKEND.value == "dsa" else "{}_attention_backend"
    return {"attention_backend": BACKEND.value} | {option.format(part): name for part, name in parts.items() if name}


class Engine:
    """SGLang's engine, whose scheduler is another process.

    Args:
      options: SGLang's, beside those that the flags give or in their place.
    """

    def __init__(self, batches: list[int], **options: Any) -> None:
        folder = config_folder(model(), LAYERS.value)
        name_plugin(folder)
        import sglang

        self.version: str = sglang.__version__
        if BACKEND.value == "dsa":  # otherwise SGLang captures some 50 graphs of prompts
            options.setdefault("cuda_graph_backend_prefill", "disabled")
        given = dict(
            model_path=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", random_seed=0,
            kv_cache_dtype=KV.value, page_size=64, context_length=MAX_LEN.value,
            mem_fraction_static=MEMORY.value, chunked_prefill_size=8192, max_running_requests=max(64, *batches),
            cuda_graph_bs_decode=sorted({1, 2, 4, 8, *batches}), sampling_backend="pytorch", mm_feature_transport="cpu",
            disable_flashinfer_autotune=True, log_level="warning",
        )  # fmt: skip
        self.engine = sglang.Engine(**given | attention_backends() | options)

    def generate(self, given: list[list[int]], count: int | list[int]) -> tuple[float, list[list[int]]]:
        """`count` greedy tokens for each prompt, or as many for each as it says: the seconds that all took, and the
        tokens."""
        counts = [count] * len(given) if isinstance(count, int) else count
        sampling = [{"temperature": 0.0, "max_new_tokens": each, "ignore_eos": True} for each in counts]
        begin = time.perf_counter()
        outputs = self.engine.generate(input_ids=given, sampling_params=sampling)
        return time.perf_counter() - begin, [list(output["output_ids"]) for output in outputs]


def measure(engine: Engine, batch: int, context: int) -> tuple[dict[str, Any], float | None]:
    """The decode row of a point; and its prompt tokens a second, None if the batch is too large to measure them."""
    vocabulary = MODELS[model()]["vocab_size"]

    def seconds(given: list[list[int]], count: int) -> float:
        return engine.generate(given, count)[0]

    rate = prompt_rate(seconds, vocabulary, (batch, context), runs=RUNS.value)
    given = prompts(vocabulary, batch, context)
    _, tokens = engine.generate(given, STEPS.value)
    engine.generate(given, FEWEST_TOKENS)  # the first run that finds its prompts cached has kernels to compile
    found = []
    for _ in range(RUNS.value):
        short, long = (engine.generate(given, count)[0] for count in (FEWEST_TOKENS, STEPS.value))
        found.append((long - short) / (STEPS.value - FEWEST_TOKENS) * 1e6)
    us = statistics.median(found)
    row = {
        "mode": mode_name(model(), "decode"),
        "b": batch,
        "context": context,
        "us": round(us, 1),
        "us_of_runs": [round(each, 1) for each in found],
        "tokens_per_s": round(batch / us * 1e6),
        "tokens": [each[:KEPT_TOKENS] for each in tokens],
    }
    return row, rate


def kernel_times(engine: Engine, given: list[list[int]], count: int) -> dict[str, float]:
    """Microseconds of each kernel in a run of `count` tokens."""
    with tempfile.TemporaryDirectory() as folder:
        engine.engine.start_profile(output_dir=folder, activities=["GPU"], with_stack=False, record_shapes=False)
        engine.generate(given, count)
        engine.engine.stop_profile()
        (trace,) = Path(folder).glob("**/*.trace.json.gz")
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    found: dict[str, float] = collections.defaultdict(float)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            found[event["name"]] += event["dur"]
    return found


def profiled(engine: Engine, row: dict[str, Any], given: list[list[int]]) -> dict[str, Any]:
    """The fields of a point's profile; the kernels go into a file."""
    engine.generate(given, FEWEST_TOKENS)  # puts the prompts into the prefix cache, if they are there no more
    short = kernel_times(engine, given, FEWEST_TOKENS)
    long = kernel_times(engine, given, FEWEST_TOKENS + PROFILED_STEPS)
    kernels = {name: (us - short.get(name, 0.0)) / PROFILED_STEPS for name, us in long.items()}
    kernels = {name: us for name, us in sorted(kernels.items(), key=lambda item: -item[1]) if us > 0.01}
    name = f"{BACKEND.value}-{KV.value}-{row['b']}-{row['context']}.json"
    Path(PROFILE.value, name).write_text(json.dumps(kernels, indent=1))
    attention = sum(us for kernel, us in kernels.items() if ATTENTION.search(kernel))
    return {"attention_us": round(attention, 1), "kernels_us": round(sum(kernels.values()), 1)}


def cached_kernels() -> dict[str, int]:
    """The files in each cache that has a variable."""
    folders = {name: os.environ.get(name) for name in CACHES}
    return {name: sum(each.is_file() for each in Path(folder).rglob("*")) for name, folder in folders.items() if folder}


def serve(engine: Engine, count: int) -> dict[str, Any]:
    """The row of `count` mixed requests."""
    before = cached_kernels()
    row = serving_row(model(), count, lambda given, counts: engine.generate(given, counts)[0])
    return row | {"compiled": {name: files - before[name] for name, files in cached_kernels().items()}}


def main(arguments: list[str]) -> None:
    del arguments
    named = POINTS.value.split("/") if POINTS.value else ()
    points = [(int(batch), int(context)) for batch, context in (point.split(",") for point in named)]
    engine = Engine([batch for batch, _ in points or ALL_POINTS])
    record = Record(
        peer="sglang, drawn weights", backend=BACKEND.value, kv=KV.value, sglang=engine.version,
        layers=LAYERS.value or MODELS[model()]["num_hidden_layers"],
        **{name: flag.value for name, flag in (("decode", DECODE), ("prefill", PREFILL)) if flag.value},
        **({"flash_mla": "tsmla"} if os.environ.get("TSMLA_SGLANG") == "flash_mla" else {}),
    )  # fmt: skip
    rates: dict[int, float] = {}
    for batch, context in within_budget(points or ALL_POINTS):
        row, rate = measure(engine, batch, context)
        if rate is not None:
            rates[context] = max(rate, rates.get(context, 0.0))
        share = equal_share(row)
        record.add(**row, **({} if share is None else {"equal_tokens": round(share, 4)}))
        print({name: value for name, value in row.items() if name != "tokens"}, share, flush=True)
    timed = list(record.rows)
    for row in prefill_rows(model(), rates):
        record.add(**row)
    for row in timed if PROFILE.value else ():
        row |= profiled(engine, row, prompts(MODELS[model()]["vocab_size"], row["b"], row["context"]))
        record.write()
    if SERVE.value:
        record.add(**serve(engine, SERVE.value))
        print(record.rows[-1], flush=True)
    engine.engine.shutdown()


if __name__ == "__main__":
    app.run(main)
