"""Time a training step of MaxText's own MLA module: attention=tsmla beside MaxText's kernels.

    python examples/maxtext/benchmark.py MAXTEXT/src --rows 4 --length 4096                        # V2-Lite's 16 heads
    python examples/maxtext/benchmark.py MAXTEXT/src --rows 1 --length 8192 --heads 128 --width 7168 --q_lora_rank 1536
    python examples/maxtext/benchmark.py MAXTEXT/src --rows 4 --length 4096 --segments 6 --kernels tsmla,dot_product

MAXTEXT is a checkout of MaxText (written against e591f30 of 2026-08-22). The step is the gradient of the module's
output, weights and activations in bfloat16. Kernels run in turn; a time is the median over the rounds. MaxText imports
packages that an attention layer does not use: stand-ins replace those that are not installed, Google's clients of its
cloud, and MaxText's reader of configs, whose files are read here.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

PACKAGES = (
    "aqt", "cloud_tpu_diagnostics", "datasets", "drjax", "einshape", "fastapi", "grain", "immutabledict", "jinja2",
    "ml_collections", "ml_goodput_measurement", "omegaconf", "opentelemetry", "orbax", "pathwaysutils", "psutil",
    "pydantic", "qwix", "tensorboardX", "tensorflow", "tokamax", "transformers", "tunix", "typeguard", "uvicorn",
)  # fmt: skip
ALWAYS = ("google.api_core", "google.cloud", "maxtext.configs.pyconfig", "maxtext.configs.types")
ROUNDS, STEPS = 12, 8


class Attributes(type):
    """Gives a stand-in's class whatever attribute is asked for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn


class StandIn(metaclass=Attributes):
    """Anything that a missing package defines: a base class, a decorator, a call that does nothing."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        decorates = cls is StandIn and len(arguments) == 1 and callable(arguments[0]) and not options
        return arguments[0] if decorates else object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self


class Package(ModuleType):
    """A stand-in's module."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn


class Finder:
    """Finds stand-ins for ALWAYS, for the PACKAGES that are missing, and for what lies in these."""

    def __init__(self) -> None:
        missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
        self.names = (*ALWAYS, *missing)

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if not any(name == known or name.startswith(f"{known}.") for known in self.names):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stand-in has no code."""


def config_of(source: Path, **changes: Any) -> SimpleNamespace:
    """MaxText's config of DeepSeek-V2-Lite with these changes."""
    import yaml
    from maxtext.common.common_types import ShardMode

    found: dict[str, Any] = {}
    for name in ("base.yml", "models/deepseek2-16b.yml"):
        found |= yaml.safe_load((source / "maxtext/configs" / name).read_text())
    found |= {
        "dtype": jnp.bfloat16, "weight_dtype": jnp.bfloat16, "shard_mode": ShardMode.AUTO, "quantization": "",
        "dataset_type": "hf", "context_parallel_size": 1, "using_pipeline_parallelism": False,
    }  # fmt: skip
    return SimpleNamespace(**(found | changes))


def segments_of(rows: int, length: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Segment ids from 1 on and positions [rows, length] of `count` segments of about equal length."""
    cuts = np.linspace(0, length, count + 1).astype(int)
    ids = np.searchsorted(cuts, np.arange(length), side="right").astype(np.int32)
    positions = np.arange(length, dtype=np.int32) - cuts[ids - 1].astype(np.int32)
    return jnp.tile(ids, (rows, 1)), jnp.tile(positions, (rows, 1))


def step_of(kernel: str, source: Path, options: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    """The compiled step of a module with this kernel, and its arguments."""
    import maxtext.layers.attention_mla as mla
    from flax import nnx
    from maxtext.common.common_types import AttentionType

    heads, shape = options.heads, (options.rows, options.length, options.width)
    config = config_of(
        source, attention=kernel, packing=options.segments > 1, max_segments_per_seq=options.segments,
        emb_dim=options.width, num_query_heads=heads, num_kv_heads=heads, q_lora_rank=options.q_lora_rank,
        use_qk_clip=options.qk_clip,
    )  # fmt: skip
    axes = config.mesh_axes
    devices = np.asarray(jax.devices()[:1]).reshape((1,) * len(axes))
    mesh = Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))
    ids, positions = segments_of(options.rows, options.length, options.segments)
    with mesh:
        module = mla.MLA(
            config=config, num_query_heads=heads, num_kv_heads=heads, head_dim=192, max_target_length=options.length,
            mesh=mesh, attention_kernel=kernel, inputs_q_shape=shape, inputs_kv_shape=shape, dtype=jnp.bfloat16,
            weight_dtype=jnp.bfloat16, q_lora_rank=options.q_lora_rank, kv_lora_rank=512, qk_nope_head_dim=128,
            qk_rope_head_dim=64, v_head_dim=128, attention_type=AttentionType.MLA, rope_factor=config.rope_factor,
            mscale=config.mscale, max_position_embeddings=config.max_position_embeddings, rngs=nnx.Rngs(0),
        )  # fmt: skip
        graph, params, rest = nnx.split(module, nnx.Param, ...)

    def loss(params: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
        module = nnx.merge(graph, params, rest)
        out, _ = module(
            x, x, decoder_segment_ids=ids, inputs_positions=positions, deterministic=True, model_mode="train"
        )
        return (out.astype(jnp.float32) * weights.astype(jnp.float32)).sum()

    x, weights = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in (1, 2))
    with mesh:
        step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(params, x, weights).compile()
    return step, (params, x, weights)


def apart(a: Any, b: Any) -> float:
    """The greatest of the gradients' relative differences (norms)."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    wide = ((np.asarray(x, np.float32), np.asarray(y, np.float32)) for x, y in pairs)
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in wide)


def milliseconds(run: Callable[[], Any]) -> float:
    """The time of one of STEPS calls in a row."""
    begin = time.perf_counter()
    for _ in range(STEPS):
        last = run()
    jax.block_until_ready(last)
    return (time.perf_counter() - begin) / STEPS * 1e3


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="time MaxText's MLA module")
    parser.add_argument("source", type=Path, help="the folder src of a checkout of MaxText")
    parser.add_argument("--kernels", default="tsmla,cudnn_flash_jax", help="names of config.attention, the first ours")
    sizes = {"rows": 4, "length": 4096, "heads": 16, "width": 2048, "q_lora_rank": 0, "segments": 1}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--qk_clip", action="store_true", help="keep the greatest logits")
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args(arguments)
    sys.path[:0] = [str(options.source), str(Path(__file__).parent)]
    finder = Finder()
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    import tsmla_attention

    tsmla_attention.install()
    given = {name: value for name, value in vars(options).items() if name not in ("source", "json")}
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {given}; stand-ins: {', '.join(finder.names)}")
    steps = {name: step_of(name, options.source, options) for name in options.kernels.split(",")}
    gradients = {name: step(*inputs)[1] for name, (step, inputs) in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, (step, inputs) in steps.items():
            times[name].append(milliseconds(lambda step=step, inputs=inputs: step(*inputs)))
    first, rows = next(iter(steps)), {}
    for name, (step, _) in steps.items():
        ms = float(np.median(times[name]))
        row = {"ms": ms, "tokens_per_second": options.rows * options.length / ms * 1e3}
        row["temporary_mb"] = step.memory_analysis().temp_size_in_bytes / 1e6
        row["gradients_apart"] = apart(gradients[name], gradients[first])
        rows[name] = row
        print(f"  {name:18s} {ms:8.2f} ms, {row['tokens_per_second']:12,.0f} tokens/s, {row['temporary_mb']:8,.0f} MB"
              f" of temporaries, gradients {row['gradients_apart']:.1e} from {first}'s", flush=True)  # fmt: skip
    if options.json:
        run = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "options": given, "kernels": rows}
        Path(options.json).write_text(json.dumps(run, indent=1))


if __name__ == "__main__":
    main()
