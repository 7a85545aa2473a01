"""Common parts of the benchmarks of whole models: the models, their checkpoints, prompts, and tokens compared."""

from __future__ import annotations

import itertools
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks import harness

CHECKPOINTS = flags.DEFINE_string("checkpoints", None, "folder of checkpoints of random weights, one a model")
COMPARE = flags.DEFINE_string("compare", None, "rows of another run, to compare tokens with")

KEPT_TOKENS = 8  # of each text
ATTENTION = re.compile(
    r"tsmla|flash(?!infer::norm)|sm90::(decode|fwd)|smxx::|mla_combine|mla_metadata|sched_meta|prepare_varlen"
    r"|convert_req_index|concat_?mla",
    re.I,
)
"""Matches the names of an engine's kernels of decode attention, of all backends, and of kernels that run only for
them."""

_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
_COMMON = {
    "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "moe_layer_freq": 1, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 163840, "tie_word_embeddings": False, "bos_token_id": 100000,
    "eos_token_id": 100001, "torch_dtype": "bfloat16",
}  # fmt: skip
V2_LITE = {
    **_COMMON, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400,
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
V3 = {
    **_COMMON, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
V32 = {
    **V3, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
}  # fmt: skip
GLM_5 = {
    **V3, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "vocab_size": 154880,
    "hidden_size": 6144, "intermediate_size": 12288, "num_attention_heads": 64, "num_key_value_heads": 64,
    "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "rope_theta": 1000000.0, "rope_scaling": None,
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
}  # fmt: skip
V4_FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_act": "silu",
    "attention_bias": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 1048576, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16", "vocab_size": 129280, "hidden_size": 4096,
    "moe_intermediate_size": 2048, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
    "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128,
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 6, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus",
    "swiglu_limit": 10.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0, "compress_ratios": [128, 4, 128, 4, 128, 4], "num_hash_layers": 1,
}  # fmt: skip
FP8 = {
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    }
}  # fmt: skip
MODELS: dict[tuple[str, str], dict[str, Any]] = {
    ("v2-lite", "bf16"): V2_LITE,
    ("v2-lite", "fp8"): {**V2_LITE, **FP8},
    ("v3-slice", "bf16"): {**V3, "num_hidden_layers": 6},
    ("v3-slice", "fp8"): {**V3, **FP8, "num_hidden_layers": 10},
    ("v3.2-slice", "fp8"): {**V32, **FP8, "num_hidden_layers": 6},
    ("glm-5-slice", "fp8"): {**GLM_5, **FP8, "num_hidden_layers": 6},
    ("glm-5.2-slice", "fp8"): {**GLM_5, **FP8, "num_hidden_layers": 6, "index_topk_freq": 4},
    ("v4-slice", "fp8"): {**V4_FLASH, **FP8, "num_hidden_layers": 6},
}
"""config.json of each model, by its name and the format of its weights."""


PROMPT_TOKENS = 4096  # tokens of an engine's prefill row, as many as a chunk of generate.py has
MOST_RATED_TOKENS = 131072  # most prompt tokens of a batch whose rate an engine's program measures
LONGEST_SERVED = 8192  # tokens of a prompt among mixed requests
FIRST_SERVED = 20  # mixed requests after which the memory is measured first


def named_model(text: str) -> tuple[str, str]:
    """The key among MODELS of a --model "name,weights"; app.UsageError if there is none."""
    name, _, weights = text.partition(",")
    if (name, weights) not in MODELS:
        legal = " ".join(",".join(key) for key in MODELS)
        raise app.UsageError(f"--model {text}; legal: {legal}")
    return name, weights


def config_folder(model: tuple[str, str], layers: int | None) -> Path:
    """A new folder with the model's config.json and no weights, of `layers` layers if given."""
    folder = Path(tempfile.mkdtemp(prefix=model[0]))
    changed = {"num_hidden_layers": layers} if layers else {}
    (folder / "config.json").write_text(json.dumps(MODELS[model] | changed))
    return folder


def mode_name(model: tuple[str, str], step: str) -> str:
    """The mode of a row: "v2-lite decode", "v2-lite fp8 prefill"."""
    return f"{model[0]}{' fp8' if model[1] == 'fp8' else ''} {step}"


def prompts(vocab_size: int, batch: int, context: int, *, draw: int = 0) -> list[list[int]]:
    """Random prompts, the same in every program: `batch` of `context` tokens; others for each `draw`."""
    rng = random.Random(batch * 100003 + context + (draw << 40))
    return [[rng.randrange(vocab_size) for _ in range(context)] for _ in range(batch)]


def mixed_requests(vocab_size: int, count: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of 1 to LONGEST_SERVED tokens, as many between 1 and 2 as between the half of the longest and the
    longest, and the lengths of their answers, 1 to 64."""
    rng = random.Random(5)
    lengths = [round(LONGEST_SERVED ** rng.random()) for _ in range(count)]
    given = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    return given, [rng.randrange(1, 65) for _ in range(count)]


def serving_row(
    model: tuple[str, str], count: int, seconds: Callable[[list[list[int]], list[int]], float]
) -> dict[str, Any]:
    """The row of `count` mixed requests; the first FIRST_SERVED are not timed.

    Args:
      seconds: the seconds that an engine takes, from the prompts and the number of tokens to generate for each.
    """
    given, counts = mixed_requests(MODELS[model]["vocab_size"], count)
    seconds(given[:FIRST_SERVED], counts[:FIRST_SERVED])
    before = used_bytes()
    taken = seconds(given[FIRST_SERVED:], counts[FIRST_SERVED:])
    return {
        "mode": mode_name(model, "serving"),
        "b": count,
        "context": max(map(len, given)),
        "us": round(taken * 1e6, 1),
        "tokens_per_s": round(sum(counts[FIRST_SERVED:]) / taken),
        "used_bytes": [before, used_bytes()],
    }


def used_bytes() -> int:
    """The GPU's memory in use."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def prompt_rate(
    seconds: Callable[[list[list[int]], int], float], vocab_size: int, point: tuple[int, int], *, runs: int
) -> float | None:
    """Prompt tokens a second of a point (requests, tokens of each), the median of `runs`; None if the batch is too
    large to measure them.

    Args:
      seconds: the seconds that an engine takes, from the prompts and the number of tokens to generate for all of them.
    """
    batch, context = point
    if batch * context > MOST_RATED_TOKENS:
        return None
    seconds(prompts(vocab_size, batch, context, draw=1), 2)  # first use of this batch
    draws = (prompts(vocab_size, batch, context, draw=2 + run) for run in range(runs))
    return batch * context / statistics.median(seconds(given, 1) for given in draws)


def prefill_rows(model: tuple[str, str], rates: Mapping[int, float]) -> Iterator[dict[str, Any]]:
    """The rows of PROMPT_TOKENS tokens of prompts, from the tokens a second for each number of tokens of a prompt."""
    for context, rate in rates.items():
        shape = {"mode": mode_name(model, "prefill"), "b": max(1, PROMPT_TOKENS // context), "context": context}
        yield {**shape, "us": round(PROMPT_TOKENS / rate * 1e6, 1), "tokens_per_s": round(rate)}


def equal_share(row: dict[str, Any]) -> float | None:
    """The share of a row's tokens that are equal in --compare's row of the same step and texts; None without such a
    row."""
    if not COMPARE.value:
        return None
    for other in json.loads(Path(COMPARE.value).read_text()):
        if "tokens" in other and all(other[name] == row[name] for name in ("mode", "b", "context")):
            pairs = zip(itertools.chain(*row["tokens"]), itertools.chain(*other["tokens"]), strict=True)
            return statistics.fmean(ours == theirs for ours, theirs in pairs)
    return None


def checkpoint(model: tuple[str, str]) -> Path | None:
    """The model's folder in --checkpoints, complete if it has a config.json; None without that flag."""
    return Path(CHECKPOINTS.value, "-".join(model)) if CHECKPOINTS.value else None


def within_budget(points: Iterable[Any]) -> Iterator[Any]:
    """The points in turn, until --seconds have passed."""
    begun = time.monotonic()
    for point in points:
        if time.monotonic() - begun > harness.SECONDS.value:
            print(f"stopped after {harness.SECONDS.value:.0f} s, before {point}")
            return
        yield point
