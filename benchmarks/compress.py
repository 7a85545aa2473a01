"""Time compress_write_kv_cache on one GPU: decode steps of several requests, and prefill.

    python3 benchmarks/compress.py --out FILE.json [--points v4_4,128,some/...] [--seconds 60]

A point is a kind of compressor (V4's: v4_4 pools 8 tokens of 512 channels into packed pages, v4_128 pools 128,
indexer_4 pools 8 of 128 channels into packed keys), a number of requests, and which of them complete an entry in a
decode step of one token: none, all, or some, one in `ratio`. Mode "prefill" is one request of that number of tokens
from position 0 on. The compiled object, launched on torch's stream: CUDA-graph replays with the L2 cache flushed before
each, medians. `bytes` counts what is read of windows and new tokens, and what is written; rows go to FILE.json.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from absl import app
from floors import BYTES_PER_S
from harness import ARCH, POINTS, Record, launch, time_all, within_budget

KINDS = {"v4_4": (4, 2, 512, "v4"), "v4_128": (128, 1, 512, "v4"), "indexer_4": (4, 2, 128, "indexer")}
"""ratio, series, channels and cache of each kind."""
ROPE, LENGTH, PAGE = 64, 4096, 64


def arrays_of(config: Any, lens: list[int], each: int) -> list[Any]:
    """The operands of a call: requests of these lengths with `each` new tokens."""
    import torch

    def ints(values: Any) -> Any:
        return torch.as_tensor(values, dtype=torch.int32, device="cuda")

    batch, width, tables = len(lens), 2 * config.width, -(-max(lens) // (PAGE * config.ratio))
    shape = (batch * tables, 65 * 576) if config.cache == "v4" else (batch * tables, PAGE, 132)
    cache = torch.zeros(shape, dtype=torch.uint8, device="cuda")
    state, held = torch.randn(batch, config.window, width, device="cuda"), ints([[0] * config.window] * batch)
    inputs = [torch.randn(batch * each, width, device="cuda"), torch.randn(config.ratio, config.width, device="cuda")]
    inputs += [ints(range(batch)), ints(lens), ints(range(0, batch * each + 1, each))]
    inputs += [torch.ones(config.channels, dtype=torch.bfloat16, device="cuda")]
    inputs += [torch.randn(8192, ROPE, device="cuda"), ints(range(batch * tables)).reshape(batch, tables)]
    return [cache, state, held, *inputs, torch.ones(1, device="cuda"), cache, state, held]


def call_of(kind: str, number: int, mode: str) -> tuple[Callable[[], Any], int]:
    """The launch of a point, and the bytes that it moves."""
    from tsmla_kernels.catalog import COMPRESS_WRITE_KV_CACHE
    from tsmla_kernels.contract.compress import CompressWriteSpec
    from tsmla_kernels.contract.sparse import CompressSpec
    from tsmla_kernels.launch import Launcher
    from tsmla_kernels.sparse_cache.compress_config import compress_write_config

    ratio, series, channels, cache = KINDS[kind]
    pooling = CompressSpec(number, number, ratio, series, channels, number, ratio * series)
    spec = CompressWriteSpec(pooling, cache, number, PAGE, "bfloat16", ROPE, 1e-6)
    config = compress_write_config(spec)
    if mode == "prefill":
        lens, each, entries = [number], number, number // ratio
    else:
        ends = {"none": [1] * number, "some": [i % ratio for i in range(number)], "all": [0] * number}[mode]
        lens, each, entries = [LENGTH + end for end in ends], 1, ends.count(0)
    tokens = len(lens) * each
    row = 2 * config.width * 4  # of a token
    kept = min(tokens, len(lens) * config.window)
    read = tokens * row if mode == "prefill" else tokens * row + entries * config.window * channels * 8
    size = read + kept * row + entries * (584 if cache == "v4" else 132)
    arrays = arrays_of(config, lens, each)
    return launch(Launcher(COMPRESS_WRITE_KV_CACHE, config, ARCH), arrays, arrays), size


def main(argv: list[str]) -> int:
    del argv
    points = list(itertools.product(KINDS, (1, 8, 128), ("none", "some", "all")))
    points += [(kind, tokens, "prefill") for kind in KINDS for tokens in (4096, 32768)]
    if POINTS.value:
        points = [(kind, int(n), mode) for kind, n, mode in (p.split(",") for p in POINTS.value.split("/"))]
    record = Record(page=PAGE)
    for kind, number, mode in within_budget(points):
        call, size = call_of(kind, number, mode)
        us = round(time_all({"us": call}, 30)["us"], 2)
        floor = round(size / BYTES_PER_S * 1e6, 2)
        record.add(op="compress_write_kv_cache", kind=kind, b=number, mode=mode, bytes=size, floor_us=floor, us=us)
        print(f"{kind:10s} {number:6d} {mode:8s} {us:7.2f} us, floor {floor:6.2f}", flush=True)
    return 0


if __name__ == "__main__":
    app.run(main)
