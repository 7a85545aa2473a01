"""A report of what the kernels compute on this machine's GPU: V3.2's operations on small random inputs, each kernel
against the reference, with its time. Meant for GPUs on which nobody has run them, such as a Blackwell.

    python3 -m tests.gpu.report                        every operation, each in a process of its own
    python3 -m tests.gpu.report --op sparse_mla        one
    python3 -m tests.gpu.report --emulated sm_100a     without a GPU: kernels of all architectures on the machine of
                                                       tests/emulator/ptx, through the torch front end

The exit status is the number of lines that are not "right".
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

PACKAGES = ("jax", "torch", "nvidia-cutlass-dsl", "tokenspeed-mla", "flashinfer-python", "nvidia-cudnn-frontend")
LIMITS = {"bfloat16": 2.0**-6, "float16": 2.0**-8, "float32": 2e-3}
"""The legal greatest difference over the greatest magnitude, by dtype. Integers and bytes must be equal."""
PATIENCE = 600
"""Seconds for one operation, which may compile several kernels."""


def arrays() -> dict[str, Callable[[], Callable[..., Any]]]:
    """For each check a function that draws its inputs and returns the call, a function of `implementation`."""
    import jax.numpy as jnp
    import numpy as np

    import tsmla_jax
    from tsmla_jax import sparse
    from tsmla_kernels.contract.layouts import V4_PACKED

    rng = np.random.default_rng(0)
    bf16, fp8, i32 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32
    pages, size, batch, width = 48, 64, 4, 9
    lens = jnp.asarray([576, 1, 130, 321], i32)
    tables = jnp.asarray(rng.permutation(pages)[: batch * width].reshape(batch, width), i32)
    slots = jnp.asarray(rng.permutation(pages * size)[:300], i32)

    def normal(*shape: int, dtype: Any = bf16) -> Any:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    def call(function: Callable[..., Any], *given: Any, **options: Any) -> Callable[..., Any]:
        return functools.partial(function, *given, **options)

    angles = normal(300, 32, dtype=jnp.float32), normal(300, 32, dtype=jnp.float32)
    packed = functools.partial(sparse.pack_v32_rows, normal(pages, size, 512), normal(pages, size, 64))
    keys = functools.partial(
        sparse.write_indexer_cache,
        jnp.zeros((pages, size, 132), jnp.uint8),
        normal(pages * size, 128),
        jnp.arange(pages * size, dtype=i32),
        implementation="reference",
    )

    def v4_pages() -> Any:
        rows, every = normal(pages * size, 512), jnp.arange(pages * size, dtype=i32)
        return sparse.write_v4_cache(jnp.zeros((pages, V4_PACKED.page_bytes(size)), jnp.uint8), rows, every)

    q8, weights = normal(300, 64, 128, dtype=fp8), normal(300, 64, dtype=jnp.float32)
    offsets = jnp.asarray([0, 3, 3, 90, 300], i32)
    indices = jnp.asarray(rng.integers(-1, pages * size, (16, 512)), i32)
    scale: dict[str, Any] = {"softmax_scale": 0.07}
    prefill = {"cu_seqlens_q": offsets, "max_q_len": 210, **scale}
    parts = normal(2, 300, 64, 512), normal(2, 300, 64, dtype=jnp.float32)
    return {
        "write_packed_kv_cache": lambda: call(
            sparse.write_packed_kv_cache, packed(), normal(300, 512), normal(300, 64), slots, *angles
        ),
        "write_indexer_cache": lambda: call(sparse.write_indexer_cache, keys(), normal(300, 128), slots),
        "indexer_quantize": lambda: call(sparse.indexer_quantize, normal(300, 64, 128), normal(300, 64)),
        "indexer_logits": lambda: call(
            tsmla_jax.indexer_logits, q8, weights, keys(), tables, lens, cu_seqlens_q=offsets
        ),
        "indexer_topk": lambda: call(
            tsmla_jax.indexer_topk, q8, weights, keys(), tables, lens, cu_seqlens_q=offsets, k=64
        ),
        "select_topk": lambda: call(
            tsmla_jax.select_topk, normal(32, 8192, dtype=jnp.float32), jnp.full((32,), 8001, i32), k=2048
        ),
        "selection_bits": lambda: call(tsmla_jax.selection_bits, indices, pages * size),
        "sparse_mla": lambda: call(tsmla_jax.sparse_mla, normal(16, 128, 576), packed(), indices, **scale),
        "sparse_mla, plain": lambda: call(
            tsmla_jax.sparse_mla, normal(16, 64, 576), normal(pages, size, 576), indices, **scale
        ),
        "sparse_mla, V4's two caches": lambda: call(
            tsmla_jax.sparse_mla,
            normal(16, 64, 512),
            v4_pages(),
            indices,
            compressed_kv_cache=v4_pages(),
            window=128,
            sinks=normal(64, dtype=jnp.float32),
            **scale,
        ),
        "mla_decode": lambda: call(
            tsmla_jax.mla_decode, normal(batch, 1, 16, 576), normal(pages, size, 576), tables, lens, **scale
        ),
        "mla_decode, fp8": lambda: call(
            tsmla_jax.mla_decode,
            normal(batch, 2, 64, 576, dtype=fp8),
            normal(pages, size, 576, dtype=fp8),
            tables,
            lens,
            **scale,
        ),
        "mla_prefill": lambda: call(
            tsmla_jax.mla_prefill, normal(300, 16, 192), normal(300, 16, 192), normal(300, 16, 128), **prefill
        ),
        "merge_attention_states": lambda: call(tsmla_jax.merge_attention_states, list(parts[0]), list(parts[1])),
        "gather_kv_cache": lambda: call(
            tsmla_jax.gather_kv_cache, normal(pages, size, 576), tables, jnp.zeros((batch,), i32), lens, total_len=1028
        ),
    }


def check(name: str) -> dict[str, Any]:
    """The line of one operation: the greatest difference between the kernel's results and the reference's, and the
    median time of a call in us."""
    import jax
    import numpy as np

    call = arrays()[name]()
    kernel = jax.jit(functools.partial(call, implementation="cute"))
    got, want = jax.tree.leaves(kernel()), jax.tree.leaves(call(implementation="reference"))
    found, right = 0.0, len(got) == len(want)
    for a, b in zip(got, want, strict=False):
        dtype = b.dtype.name
        x, y = (np.asarray(v if dtype in ("int32", "uint8") else v.astype("float32"), np.float64) for v in (a, b))
        same = np.array_equal(np.isfinite(x), np.isfinite(y)) and a.dtype == b.dtype
        finite = np.isfinite(y) & np.isfinite(x)
        error = float(abs(x - y)[finite].max(initial=0) / max(abs(y)[finite].max(initial=0), 1e-30))
        found = max(found, error)
        right &= same and error <= LIMITS.get(dtype, 2.0**-3 if dtype.startswith("float8") else 0.0)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        jax.block_until_ready(kernel())
        times.append(1e6 * (time.perf_counter() - begin))
    return {"right": bool(right), "error": found, "us": round(statistics.median(times), 1)}


def emulated(arch: str) -> list[tuple[str, str]]:
    """(operation, what was found) of the kernels of all architectures, compiled for `arch`."""
    import pytest
    import torch

    from tests.emulator.ptx import launcher
    from tests.gpu.small_grid import CALLS, wrong
    from tests.kernels.on_machine import forget
    from tests.kernels.test_on_machine import FAST, FOR_ALL_ARCHITECTURES

    lines, cpu = [], torch.device("cpu")
    for op in FOR_ALL_ARCHITECTURES:
        for call in CALLS[op](torch.Generator().manual_seed(0)):
            if not call.name.startswith(FAST[op]):
                continue
            want = call.on(cpu)
            with pytest.MonkeyPatch.context() as patch:
                forget()
                launcher.install(patch, arch)
                found = wrong(call, call.on(cpu), want) + launcher.EmulatedLauncher.hazards
            forget()
            lines.append((f"{op} {call.name}", "; ".join(found) or "right"))
    return lines


def versions() -> str:
    """The machine and the packages, in a line."""
    installed = []
    for package in PACKAGES:
        try:
            installed.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            installed.append(f"no {package}")
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().replace("\n", "; ")
    except (OSError, subprocess.CalledProcessError):
        gpus = "no NVIDIA GPU"
    return f"{gpus}; Python {platform.python_version()}; {', '.join(installed)}"


def in_a_process(name: str) -> str:
    """The result of `check` in a process of its own, or how that failed: a fault of a kernel ends no other check."""
    command = [sys.executable, "-m", "tests.gpu.report", "--op", name, "--line"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return f"no result after {PATIENCE} s"
    if run.returncode:
        said = run.stderr.strip().splitlines()
        return f"failed: {said[-1] if said else f'status {run.returncode}'}"
    line = json.loads(run.stdout.strip().splitlines()[-1])
    return f"{'right' if line['right'] else 'WRONG'}, error {line['error']:.2g}, {line['us']} us"


def main(argv: list[str] | None = None) -> int:
    parser: Any = argparse.ArgumentParser(description="what the kernels compute on this machine's GPU")
    parser.add_argument("--op", help="one operation; all by default")
    parser.add_argument("--line", action="store_true", help="check --op in this process, and print JSON")
    parser.add_argument("--emulated", metavar="ARCH", help="kernels of all architectures, without a GPU")
    args = parser.parse_args(argv)
    if args.line:
        print(json.dumps(check(args.op)))
        return 0
    print(versions())
    if args.emulated:
        lines = emulated(args.emulated)
    else:
        lines = [(name, in_a_process(name)) for name in ([args.op] if args.op else arrays())]
    for name, found in lines:
        print(f"{name:40} {found}")
    return sum(not found.startswith("right") for _, found in lines)


if __name__ == "__main__":
    sys.exit(main())
