"""xla decode on the CPU against the version that gathers the whole cache first: time and peak memory.

    python benchmarks/decode_cpu.py            writes benchmarks/results/cpu/decode_xla.json

Each version runs in a process of its own. Peak memory is measured twice: what the compiled program says it allocates
(arguments, outputs, temporaries), and how far the process's resident set rises above what it was before the inputs
existed. Both are given as a multiple of cache + inputs + outputs. The bars: at most 1.3 x that, and 1.5 x the speed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "cpu" / "decode_xla.json"
VERSIONS = ("xla", "gather")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--keys", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--only", choices=VERSIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options)))
        return 0

    rows = {}
    for version in VERSIONS:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", version]
        rows[version] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        print(version, rows[version], flush=True)
    result = {
        "command": shlex.join(["python", "benchmarks/decode_cpu.py", *sys.argv[1:]]),
        "machine": machine(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "b": options.batch,
        "s": 1,
        "h": options.heads,
        "keys": options.keys,
        "page": options.page,
        "dtype": options.dtype,
        **rows,
        "speedup": round(rows["gather"]["ms"] / rows["xla"]["ms"], 2),
        "speedup_of_cpu_time": round(rows["gather"]["cpu_ms"] / rows["xla"]["cpu_ms"], 2),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"speedup {result['speedup']} x; peak memory {rows['xla']['compiled_peak_ratio']} x of cache + inputs + outputs"
    )
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time and memory of one version, in this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    pages_each = -(-options.keys // options.page)
    num_pages = options.batch * pages_each
    shape = (num_pages, options.page, 576)
    q_shape = (options.batch, 1, options.heads, 576)
    struct = jax.ShapeDtypeStruct
    arguments = (
        struct(q_shape, options.dtype),
        struct(shape, options.dtype),
        struct((options.batch, pages_each), jnp.int32),
        struct((options.batch,), jnp.int32),
    )
    compiled = jax.jit(decode_of(options.only, options)).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    needed = memory.argument_size_in_bytes + memory.output_size_in_bytes

    before = resident()
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(options.dtype)
    q = jnp.asarray(rng.standard_normal(q_shape, np.float32).astype(dtype))
    # One page of numbers, repeated: no float32 copy of the cache, which would raise the resident set's peak by itself.
    page = rng.standard_normal(shape[1:], np.float32).astype(dtype)
    host = np.empty(shape, dtype)
    host[:] = page
    cache = jax.block_until_ready(jnp.asarray(host))
    if not np.shares_memory(host, np.asarray(cache)):
        del host
    tables = jnp.asarray(rng.permutation(num_pages).reshape(options.batch, pages_each), jnp.int32)
    lens = jnp.full((options.batch,), options.keys, jnp.int32)
    # From here on the peak is the program's.
    reset_peak()
    times, cpu_times = [], []
    for _ in range(options.repeats + 1):
        start, cpu_start = time.perf_counter(), time.process_time()
        jax.block_until_ready(compiled(q, cache, tables, lens))
        times.append(time.perf_counter() - start)
        cpu_times.append(time.process_time() - cpu_start)
    return {
        "ms": round(1e3 * statistics.median(times[1:]), 1),
        "ms_min": round(1e3 * min(times[1:]), 1),
        "cpu_ms": round(1e3 * statistics.median(cpu_times[1:]), 1),
        "needed_mb": round(needed / 1e6, 1),
        "compiled_temporaries_mb": round(memory.temp_size_in_bytes / 1e6, 1),
        "compiled_peak_ratio": round((needed + memory.temp_size_in_bytes) / needed, 3),
        "resident_peak_mb": round((peak_resident() - before) / 1e6, 1),
        "resident_peak_ratio": round((peak_resident() - before) / needed, 3),
    }


def decode_of(version: str, options: argparse.Namespace) -> Callable[..., Any]:
    """decode(q, kv_cache, block_tables, seq_lens) of the version."""
    import jax
    import jax.numpy as jnp

    import tsmla_jax

    scale = 192**-0.5
    if version == "xla":
        return functools.partial(tsmla_jax.mla_decode, softmax_scale=scale, implementation="xla")

    def gather_everything(q: jax.Array, kv_cache: jax.Array, tables: jax.Array, lens: jax.Array) -> jax.Array:
        kv = kv_cache[tables].reshape(q.shape[0], -1, q.shape[-1])
        scores = jnp.einsum("bshd,bkd->bshk", q, kv, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(jnp.arange(kv.shape[1]) < lens[:, None, None, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        return jnp.einsum("bshk,bkl->bshl", weights, kv[..., :512])

    return gather_everything


def resident() -> int:
    """Bytes of this process in memory now."""
    return status("VmRSS")


def peak_resident() -> int:
    """The most bytes of this process in memory since reset_peak, or ever where that is not possible."""
    try:
        return status("VmHWM")
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def machine() -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return f"{model or platform.processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def commit() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(git, check=False, capture_output=True, text=True).stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
