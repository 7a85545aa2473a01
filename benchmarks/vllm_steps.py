"""Time vLLM's decode steps and prompts with one pair of attention backends: a whole engine, a model of random weights.

    python3 benchmarks/vllm_steps.py --backend CUSTOM --prefill CUSTOM --kv auto --out FILE.json [--points 1,512/...]

The model has DeepSeek-V2-Lite's shape (27 layers, 16 heads, 64 experts), the engine runs in this process with full CUDA
graphs for decode, and points are (requests, tokens of context). A step is the time between two steps of the engine that
gave every request a token: the median over all steps of a run, and over `--runs` runs. Random weights send nearly all
tokens to the same experts, so steps compare backends with each other, not with a real model. Each row has the first
greedy tokens of each request, the same prompts for every backend; `--compare OTHER.json` adds the share of tokens that
is equal in that file's row of the same point.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

# Before vllm is imported: the engine in this process, and nothing that asks the network or compiles other kernels.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_USE_DEEP_GEMM": "0", "VLLM_MOE_USE_DEEP_GEMM": "0",
} | os.environ  # fmt: skip

from absl import app, flags
from harness import POINTS, Record, within_budget

BACKEND = flags.DEFINE_string("backend", "CUSTOM", "vLLM's decode backend: CUSTOM is this project's")
PREFILL = flags.DEFINE_string("prefill", None, "vLLM's MLA prefill backend; its own choice by default")
KV = flags.DEFINE_string("kv", "auto", "dtype of the cache: auto or fp8")
RUNS = flags.DEFINE_integer("runs", 3, "runs of a point")
STEPS = flags.DEFINE_integer("steps", 48, "decode steps of a run")
MAX_LEN = flags.DEFINE_integer("max_len", 16384, "longest request")
COMPARE = flags.DEFINE_string("compare", None, "rows of another backend, to compare tokens with")

MODEL = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1, "vocab_size": 102400, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False, "scoring_func": "softmax",
    "routed_scaling_factor": 1.0, "rope_theta": 10000.0, "rope_scaling": None, "rope_interleave": True,
    "max_position_embeddings": 163840, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
    "attention_dropout": 0.0, "tie_word_embeddings": False, "bos_token_id": 100000, "eos_token_id": 100001,
    "torch_dtype": "bfloat16", "dtype": "bfloat16",
}  # fmt: skip
ALL_POINTS = tuple((batch, context) for context in (512, 4096, 16000) for batch in (1, 16, 64, 256))
KEPT_TOKENS = 8  # of each request


class Run(NamedTuple):
    """A generation: seconds in all, milliseconds of each full step, and the tokens of each request."""

    seconds: float
    steps: list[float]
    tokens: list[list[int]]


class Engine:
    """vLLM in this process."""

    def __init__(self, points: list[tuple[int, int]]) -> None:
        from vllm import LLM

        folder = tempfile.mkdtemp(prefix="v2-lite")
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        most = max(batch for batch, _ in points)
        attention = {"backend": BACKEND.value} | ({"mla_prefill_backend": PREFILL.value} if PREFILL.value else {})
        sizes = sorted({1, 2, 4, 8, *(batch for batch, _ in points)})
        self.llm = LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0, block_size=64,
            enable_prefix_caching=False, gpu_memory_utilization=0.85, max_model_len=MAX_LEN.value,
            max_num_seqs=max(256, most), max_num_batched_tokens=8192, attention_config=attention,
            kv_cache_dtype=KV.value, disable_log_stats=True,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes},
        )  # fmt: skip
        self.taken: list[tuple[float, int]] = []  # when a step ended, and how many requests it gave a token
        core = self.llm.llm_engine.engine_core
        get_output = core.get_output

        def timed(*arguments: Any, **options: Any) -> Any:
            output = get_output(*arguments, **options)
            self.taken.append((time.perf_counter(), len(getattr(output, "outputs", None) or ())))
            return output

        core.get_output = timed

    @property
    def cache_tokens(self) -> int:
        config = self.llm.llm_engine.vllm_config.cache_config
        return int(config.num_gpu_blocks or 0) * config.block_size

    def generate(self, prompts: list[list[int]], count: int) -> Run:
        """`count` greedy tokens for each prompt."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        self.taken.clear()
        begin = time.perf_counter()
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(given, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        full = [(when, gave == len(prompts)) for when, gave in self.taken if gave]
        steps = [
            (after - before) * 1e3
            for (before, first), (after, second) in itertools.pairwise(full)
            if first and second
        ]
        return Run(seconds, steps, [list(output.outputs[0].token_ids) for output in outputs])


def measure(engine: Engine, batch: int, context: int) -> dict[str, Any]:
    """The row of a point."""
    rng = random.Random(batch * 100003 + context)
    prompts = [[rng.randrange(MODEL["vocab_size"]) for _ in range(context)] for _ in range(batch)]
    engine.generate(prompts, 2)  # first use of this batch
    prompt = [engine.generate(prompts, 1).seconds for _ in range(RUNS.value)]
    runs = [engine.generate(prompts, STEPS.value) for _ in range(RUNS.value)]
    medians = [statistics.median(run.steps) for run in runs if run.steps]
    step = statistics.median(medians) if medians else None
    return {
        "batch": batch,
        "context": context,
        "step_ms": step,
        "step_ms_of_runs": medians,
        "full_steps": len(runs[0].steps),
        "decode_tokens_per_s": batch / step * 1e3 if step else None,
        "prompt_tokens_per_s": batch * context / statistics.median(prompt),
        "tokens": [tokens[:KEPT_TOKENS] for tokens in runs[0].tokens],
    }


def equal_share(row: dict[str, Any]) -> float | None:
    """The share of tokens that are those of --compare's row of the same point and cache."""
    if not COMPARE.value:
        return None
    for other in json.loads(Path(COMPARE.value).read_text()):
        if all(other[name] == row[name] for name in ("batch", "context")):
            ours, theirs = (list(itertools.chain(*some["tokens"])) for some in (row, other))
            return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
    return None


def main(arguments: list[str]) -> None:
    del arguments
    named = POINTS.value.split("/") if POINTS.value else ()
    points = [(int(batch), int(context)) for batch, context in (point.split(",") for point in named)]
    engine = Engine(points or list(ALL_POINTS))
    from vllm import __version__

    record = Record(backend=BACKEND.value, prefill=PREFILL.value or "auto", kv=KV.value, vllm=__version__)
    for batch, context in within_budget(points or list(ALL_POINTS)):
        if batch * (context + STEPS.value) > engine.cache_tokens:
            print(f"{batch} requests of {context}: the cache holds {engine.cache_tokens} tokens", flush=True)
            continue
        row = measure(engine, batch, context)
        share = equal_share(row)
        record.add(**row, **({} if share is None else {"equal_tokens": share}))
        print({name: value for name, value in row.items() if name != "tokens"}, share, flush=True)


if __name__ == "__main__":
    app.run(main)
