"""compress_write_kv_cache. A point is a kind of V4's compressors, a number, and a mode. The kinds:

  v4_4        pools 8 tokens of 512 channels into an entry of packed pages
  v4_128      pools 128 tokens of 512 channels into an entry of packed pages
  indexer_4   pools 8 tokens of 128 channels into a packed key

In modes "none", "some" and "all" the number counts the requests of a decode step with one new token each, and no
request, the first of every `ratio` requests, or all of them complete an entry. Mode "prefill" is one request of that
number of tokens from position 0 on. `bytes` counts what is read of windows and new tokens, and what is written.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import torch

import tsmla_bridge
from benchmarks.floors import BYTES_PER_S, PAGE
from benchmarks.harness import Case, device, ints, time_all

KINDS = {"v4_4": (4, 2, 512), "v4_128": (128, 1, 512), "indexer_4": (4, 2, 128)}
"""ratio, series and channels of each kind."""
LENGTH = 4096  # the fewest tokens of a text in a decode step


class Compress(Case):
    points = (
        *itertools.product(KINDS, (1, 8, 128), ("none", "some", "all")),
        *((kind, tokens, "prefill") for kind in KINDS for tokens in (4096, 32768)),
    )
    common: ClassVar = {"page": PAGE, "op": "compress_write_kv_cache"}

    def rows(self, skipped: set[tuple[str, Any]], hear: Callable[[str], None]) -> list[dict[str, Any]]:
        kind, number, mode = self.point
        ratio, series, channels = KINDS[kind]
        width, window, is_v4 = series * channels, ratio * series, channels == 512
        if mode == "prefill":
            lens, each, entries = [number], number, number // ratio
        else:
            ends = {"none": [1] * number, "some": [i % ratio for i in range(number)], "all": [0] * number}[mode]
            lens, each, entries = [LENGTH + end for end in ends], 1, ends.count(0)
        batch, columns, row = len(lens), -(-max(lens) // (PAGE * ratio)), 2 * width * 4
        tokens = batch * each
        cache = torch.zeros((batch * columns, 65 * 576) if is_v4 else (batch * columns, PAGE, 132), dtype=torch.uint8)
        state = torch.randn(batch, window, 2, width, device=device())
        read = tokens * row + (0 if mode == "prefill" else entries * window * channels * 8)
        size = read + min(tokens, batch * window) * row + entries * (584 if is_v4 else 132)
        call = functools.partial(
            tsmla_bridge.compress_write_kv_cache, cache.to(device()), torch.randn(tokens, 2, width, device=device()),
            torch.randn(ratio, width, device=device()), state, ints([[0] * window] * batch),
            torch.ones(channels, dtype=torch.bfloat16, device=device()), torch.randn(40960, 64, device=device()),
            ints(range(batch * columns)).view(batch, columns), state_slots=ints(range(batch)), seq_lens=ints(lens),
            cu_seqlens_q=ints(range(0, tokens + 1, each)), ratio=ratio, overlap=series == 2, eps=1e-6,
        )  # fmt: skip
        hear("tsmla")
        call()
        us = time_all({"us": call}, 30)["us"]
        floor = round(size / BYTES_PER_S * 1e6, 2)
        return [{"kind": kind, "b": number, "mode": mode, "bytes": size, "floor_us": floor, "us": round(us, 2)}]
