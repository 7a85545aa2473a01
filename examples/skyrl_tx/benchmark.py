"""SkyRL tx's DeepSeek-V3 model before and after `latent_attention`: tokens a second, and memory, on one GPU.

    python examples/skyrl_tx/benchmark.py [--shape v3-slice] [--batch 16] [--prompt 1024] [--new 256] [--rows 4]
        [--train 4096]

Weights are random, in bfloat16, with one LoRA adapter of rank 32. "generate" is tx's own generator: B prompts of 3/4 to
all of --prompt tokens, then --new tokens each, greedily; its tokens a second count the new ones, and prompts are in its
time. "train" is the gradient of the LoRA parameters over --rows rows of 3/4 to all of --train tokens. Each figure comes
from a process of its own, because the peak of memory is one of the process; the first call, which compiles, is not
timed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType
from latent_attention import deepseekv3, install

try:
    from skyrl.tinker.types import SamplingParams
except ModuleNotFoundError as error:
    if error.name not in ("skyrl", "skyrl.tinker"):
        raise
    from tx.tinker.types import SamplingParams

ATTENTIONS, TASKS = ("tx", "tsmla"), ("generate", "train")
CALLS, RANK = 3, 32


@dataclass(frozen=True)
class Shape:
    """The fields of tx's model config that change from model to model; dense layers come first."""

    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    n_routed_experts: int
    n_group: int = 1
    topk_group: int = 1
    vocab_size: int = 32768
    num_experts_per_tok: int = 6
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    first_k_dense_replace: int = 1
    n_shared_experts: int = 2


SHAPES = {
    # A few experts: attention is what changes, and tx's ragged_dot over many experts would hide it.
    "v3-slice": Shape(7168, 18432, 2048, 4, 128, 1536, 8, n_shared_experts=1, num_experts_per_tok=2),
    "v2-lite-slice": Shape(2048, 10944, 1408, 12, 16, None, 8, num_experts_per_tok=2),
    "toy": Shape(24, 16, 8, 2, 2, 12, 4, vocab_size=64, num_experts_per_tok=2, kv_lora_rank=16, qk_nope_head_dim=8,
                 qk_rope_head_dim=4, v_head_dim=6),
}  # fmt: skip


class Config:
    """tx's ModelConfig of a shape."""

    rms_norm_eps, rope_theta, rope_scaling, attention_bias = 1e-6, 10000.0, None, False
    rope_parameters, mhc_expansion_rate = {"rope_theta": 10000.0}, 1  # the package skyrl reads these in place of rope_*
    routed_scaling_factor, norm_topk_prob, tie_word_embeddings, output_hidden_states = 1.0, True, False, False
    max_lora_adapters, max_lora_rank, shard_attention_heads = 1, RANK, True
    loss_chunk_size, gradient_checkpointing = 0, False

    def __init__(self, shape: Shape) -> None:
        vars(self).update(asdict(shape))


@dataclass(frozen=True)
class Load:
    """How much is generated and trained on."""

    batch: int = 16
    prompt: int = 1024
    new: int = 256
    rows: int = 4
    train: int = 4096


def measure(attention: str, task: str, shape: Shape, load: Load) -> dict[str, float | None]:
    """Tokens a second, the device's peak of memory in bytes (None where it is not told), and the cache's elements a
    token and layer."""
    if attention == "tsmla":
        install()
    mesh = jax.make_mesh((1, 1, 1), ("fsdp", "ep", "tp"), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        model = deepseekv3.DeepseekV3ForCausalLM(Config(shape), dtype=dtype, rngs=nnx.Rngs(0))
        tokens_per_second = generated(model, load) if task == "generate" else trained(model, load)
        ids = jnp.zeros((1, 32), jnp.int32)
        cache = jax.eval_shape(lambda: model(ids, attention_mask=jnp.ones_like(ids)).kv_cache)
        elements = (cache.keys[0].size + cache.values[0].size) / ids.size
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "tokens_per_second": tokens_per_second,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "cache_elements": elements,
    }


def padded(rows: int, length: int, vocabulary: int) -> tuple[jax.Array, jax.Array]:
    """Random tokens [rows, length] and the mask of those in use, 3/4 to all of each row, padded behind."""
    rng = np.random.default_rng(0)
    lens = rng.integers(length * 3 // 4, length + 1, rows)
    mask = jnp.asarray(np.arange(length) < lens[:, None], jnp.int32)
    return jnp.asarray(rng.integers(0, vocabulary, (rows, length)), jnp.int32), mask


def generated(model: Any, load: Load) -> float:
    """New tokens a second of tx's generator."""
    ids, mask = padded(load.batch, load.prompt, model.config.vocab_size)
    sampling = [SamplingParams(max_tokens=load.new, temperature=0.0, seed=0)] * load.batch
    adapters = jnp.zeros(load.batch, jnp.int32)

    def run() -> None:  # tx brings the tokens to the host: nothing is left to wait for
        model.generate(ids, mask, sampling_params=sampling, adapter_indices=adapters)

    return load.batch * load.new / seconds(run)


def trained(model: Any, load: Load) -> float:
    """Tokens a second, padding not counted, of the gradient of the LoRA parameters."""
    ids, mask = padded(load.rows, load.train, model.config.vocab_size)
    graph, lora, rest = nnx.split(model, model.is_lora_param, ...)
    adapters = jnp.zeros(load.rows, jnp.int32)

    @jax.jit
    def step(lora: Any, rest: Any) -> Any:
        def loss(lora: Any) -> jax.Array:
            merged = nnx.merge(graph, lora, rest)
            hidden = merged(ids, attention_mask=mask, adapter_indices=adapters).last_hidden_state
            logprobs = merged.compute_logprobs(hidden[:, :-1], ids[:, 1:], adapters)
            return -(logprobs * mask[:, 1:]).sum() / mask[:, 1:].sum()

        return jax.value_and_grad(loss)(lora)

    return float(mask.sum()) / seconds(lambda: jax.block_until_ready(step(lora, rest)))


def seconds(run: Any) -> float:
    """The median of CALLS calls, after one that compiles."""
    run()
    taken = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return sorted(taken)[CALLS // 2]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="v3-slice")
    for name, value in asdict(Load()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", nargs=2, metavar=("ATTENTION", "TASK"), help="one figure, as JSON")
    arguments = parser.parse_args(argv)
    load = Load(**{name: getattr(arguments, name) for name in asdict(Load())})
    if arguments.only:
        print(json.dumps(measure(*arguments.only, SHAPES[arguments.shape], load)))
        return
    print(f"{arguments.shape}, {load}")
    print(f"{'task':>10} {'attention':>10} {'tokens/s':>10} {'peak GB':>8} {'cached elements a token and layer':>35}")
    for task in TASKS:
        for attention in ATTENTIONS:
            command = [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv), "--only", attention, task]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:  # for example, no memory for all scores
                lines = done.stderr.strip().splitlines()
                print(f"{task:>10} {attention:>10} failed: {lines[-1][:160] if lines else done.returncode}")
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            peak = "-" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 1e9:.2f}"
            rate, elements = found["tokens_per_second"], found["cache_elements"]
            print(f"{task:>10} {attention:>10} {rate:10.1f} {peak:>8} {elements:35.0f}")


if __name__ == "__main__":
    main()
