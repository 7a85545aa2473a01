"""mla_decode on a CPU: the implementation "xla" against the version that gathers the whole cache first.

Peak memory is what the compiled program says that it allocates (arguments, outputs, temporaries), as a multiple of
cache, inputs and outputs. The bars: at most 1.3 times that, and 1.5 times the speed.
"""

from __future__ import annotations

import functools
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import tsmla_jax
from benchmarks.floors import PAGE
from benchmarks.harness import Case

REPEATS, SCALE = 7, 192**-0.5


def gather(q: jax.Array, kv_cache: jax.Array, tables: jax.Array, lens: jax.Array) -> jax.Array:
    """Decode over a copy of all pages."""
    kv = kv_cache[tables].reshape(q.shape[0], -1, q.shape[-1])
    scores = jnp.einsum("bshd,bkd->bshk", q, kv, preferred_element_type=jnp.float32) * SCALE
    scores = jnp.where(jnp.arange(kv.shape[1]) < lens[:, None, None, None], scores, -jnp.inf)
    return jnp.einsum("bshk,bkl->bshl", jax.nn.softmax(scores, axis=-1).astype(q.dtype), kv[..., :512])


def machine() -> str:
    """The processor, as the system names it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


class DecodeXla(Case):
    points = ((8, 16, 32768),)
    common: ClassVar = {"s": 1, "page": PAGE, "dtype": "bfloat16", "machine": machine()}

    def rows(self, skipped: set[tuple[str, Any]], hear: Callable[[str], None]) -> list[dict[str, Any]]:
        batch, heads, keys = self.point
        cpu, pages = jax.devices("cpu")[0], batch * -(-keys // PAGE)
        rng = np.random.default_rng(0)
        page = rng.standard_normal((PAGE, 576), np.float32).astype(jnp.bfloat16)
        arrays = (
            rng.standard_normal((batch, 1, heads, 576), np.float32).astype(jnp.bfloat16),
            np.broadcast_to(page, (pages, PAGE, 576)), rng.permutation(pages).reshape(batch, -1).astype(np.int32),
            np.full(batch, keys, np.int32),
        )  # fmt: skip
        given = jax.device_put(arrays, cpu)
        xla = functools.partial(tsmla_jax.mla_decode, softmax_scale=SCALE, implementation="xla")
        found = []
        for name, function in {"xla": xla, "gather": gather}.items():
            hear("tsmla")
            compiled = jax.jit(function).lower(*given).compile()
            memory, times = compiled.memory_analysis(), []
            for _ in range(REPEATS + 1):
                begin = time.perf_counter()
                jax.block_until_ready(compiled(*given))
                times.append(time.perf_counter() - begin)
            needed = memory.argument_size_in_bytes + memory.output_size_in_bytes
            case = {"b": batch, "h": heads, "keys": keys, "peer": name, "us": statistics.median(times[1:]) * 1e6}
            found.append(case | {"compiled_peak_ratio": round((needed + memory.temp_size_in_bytes) / needed, 3)})
        return found
