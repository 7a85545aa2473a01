"""A long prefill through one DeepSeek-V4 layer on the CPU: how long it takes and how much memory it needs.

    python benchmarks/v4_prefill_cpu.py        writes benchmarks/results/cpu/v4_prefill.json

The layer has the real widths and 64 heads; parameters and inputs are random. Memory is what the compiled program says
it allocates (arguments, outputs, temporaries) and the process's peak resident set. The bar: 8 GiB and minutes, not
hours.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "cpu" / "v4_prefill.json"
RATIOS = {"csa": 4, "hca": 128, "sliding": 0}
PAGE = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--kinds", nargs="+", choices=sorted(RATIOS), default=["csa", "hca"])
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--only", choices=sorted(RATIOS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options)))
        return 0
    rows = {}
    for kind in options.kinds:  # a process each, or the second would start from the peak of the first
        command = [sys.executable, __file__, *sys.argv[1:], "--only", kind]
        rows[kind] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        print(kind, rows[kind], flush=True)
    result = {
        "command": shlex.join(["python", "benchmarks/v4_prefill_cpu.py", *sys.argv[1:]]),
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "tokens": options.tokens,
        "heads": options.heads,
        "hidden": options.hidden,
        "dtype": options.dtype,
        "layers": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and bytes of one layer of the kind `options.only`."""
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    import jax
    import jax.numpy as jnp
    import numpy as np

    from tsmla_jax.nn import Step, v4

    jax.config.update("jax_platforms", "cpu")
    kind, tokens = options.only, options.tokens
    config = v4.V4Config(
        kind=kind,
        ratio=RATIOS[kind],
        hidden_size=options.hidden,
        num_attention_heads=options.heads,
        q_lora_rank=1024,
    )
    dtype = jnp.dtype(options.dtype)
    rng = np.random.default_rng(0)

    def random(shape: tuple[int, ...]) -> jax.Array:
        values = rng.standard_normal(shape, np.float32) * (shape[0] ** -0.5 if len(shape) > 1 else 1)
        return jnp.asarray(values, dtype)

    params = {name: random(shape) for name, shape in v4.param_shapes(config).items()}
    window_pages, compressed_pages = -(-tokens // PAGE), max(1, -(-tokens // max(config.ratio, 1) // PAGE))
    cache = v4.init_cache(
        config, window_pages=window_pages, compressed_pages=compressed_pages, num_states=1, page_size=PAGE
    )
    table = v4.rope_table(config, tokens)

    def run(
        params: dict[str, jax.Array], x: jax.Array, cache: v4.V4Cache, table: jax.Array
    ) -> tuple[jax.Array, v4.V4Cache]:
        window = Step.ragged(
            jnp.arange(window_pages, dtype=jnp.int32)[None],
            jnp.asarray([tokens], jnp.int32),
            jnp.asarray([0, tokens], jnp.int32),
            total_tokens=tokens,
            page_size=PAGE,
        )
        step = v4.make_step(
            config,
            window,
            state_slots=jnp.zeros(1, jnp.int32),
            compressed_tables=jnp.arange(compressed_pages, dtype=jnp.int32)[None],
            cos_sin=table,
            page_size=PAGE,
        )
        return v4.attend(params, config, x, cache, step)

    x = random((tokens, options.hidden))
    begin = time.perf_counter()
    compiled = jax.jit(run, donate_argnums=2).lower(params, x, cache, table).compile()
    compile_s = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    begin, cpu = time.perf_counter(), time.process_time()
    out, _ = jax.block_until_ready(compiled(params, x, cache, table))
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    if not np.isfinite(np.asarray(out, np.float32)).all():
        raise RuntimeError(f"the {kind} layer returned values that are not finite")
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_s, 2),
        "compile_seconds": round(compile_s, 2),
        "program_gib": round((total - memory.alias_size_in_bytes) / 2**30, 3),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
    }


if __name__ == "__main__":
    raise SystemExit(main())
