"""The kernels of the caches, and merging, beside two copies that move as many bytes, half of them read and half
written: the driver's own (memcpy_us) and a kernel of torch's (kernel_copy_us). `copy_us` is the faster of the two.

A point is an operation, its dtypes and tokens. Slots to write are drawn at random, all different, and pages to gather
at random, from a cache with room for twice as many tokens. `bytes` counts every value read or written once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

import tsmla_bridge
from benchmarks.floors import LATENT, PAGE, ROPE
from benchmarks.harness import ARCH, Case, Run, device, ints, randn, time_all

FP8, BF16 = "float8_e4m3fn", "bfloat16"
DTYPES = {
    "write_kv_cache": ((BF16, BF16), (BF16, FP8)), "rope_write_kv_cache": ((BF16, BF16), (FP8, FP8)),
    "gather_kv_cache": ((BF16, BF16), (FP8, BF16)), "write_packed_kv_cache": ((BF16, "uint8"),),
    "write_indexer_cache": ((BF16, "uint8"), ("float32", "uint8")), "indexer_quantize": ((BF16, FP8),),
}  # fmt: skip
"""Pairs of dtypes of each operation: the dtype of what it reads and of what it writes. For rope_write_kv_cache, which
reads bf16, they are the dtypes of the queries and of the cache that it writes."""
Call = tuple[Run, int]
"""A call, and the bytes that it moves."""


def pages(tokens: int, dtype: str, width: int = LATENT + ROPE) -> Any:
    """A cache of zeros with pages for at least 2 * `tokens` rows."""
    cache = torch.zeros(-(-2 * tokens // PAGE), PAGE, width, dtype=torch.uint8, device=device())
    return cache.to(getattr(torch, dtype))


def slots(tokens: int) -> Any:
    return torch.randperm(2 * tokens, device=device())[:tokens].int()


def angles(tokens: int) -> list[Any]:
    """Random numbers in the place of the tokens' cosines and sines."""
    return [torch.randn(tokens, ROPE // 2, device=device()) for _ in range(2)]


def size_of(*arrays: Any) -> int:
    return sum(array.numel() * array.element_size() for array in arrays)


def write_kv_cache(tokens: int, dtypes: tuple[str, str]) -> Call:
    given = pages(tokens, dtypes[1]), randn(tokens, LATENT), randn(tokens, ROPE), slots(tokens)
    size = size_of(*given[1:]) + 4 + tokens * given[0][0, 0].nbytes
    return functools.partial(tsmla_bridge.write_kv_cache, *given, kv_scale=torch.full((), 0.7, device=device())), size


def rope_write_kv_cache(tokens: int, dtypes: tuple[str, str]) -> Call:
    """A launch of the compiled object, because the operation exists only in jax."""
    from tsmla_kernels.catalog import ROPE_WRITE_KV_CACHE
    from tsmla_kernels.launch import ArrayView, Launcher

    rows = tokens * 16
    cache, factor = pages(tokens, dtypes[1]), torch.full((1,), 0.7, device=device())
    q = torch.empty(rows, LATENT + ROPE, dtype=getattr(torch, dtypes[0]), device=device())
    inputs = [randn(rows, LATENT), randn(rows, ROPE), randn(tokens, LATENT), randn(tokens, ROPE), slots(tokens)]
    arrays = [cache, *inputs, *angles(tokens), factor, factor, q, cache]
    launcher = Launcher(ROPE_WRITE_KV_CACHE, ROPE_WRITE_KV_CACHE.config(BF16, *dtypes), ARCH)
    views = [ArrayView(x.data_ptr(), tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in arrays]

    def run() -> Any:
        launcher(torch.cuda.current_stream().cuda_stream, views)
        return arrays  # among them are the results, whose memory the launch writes

    return run, size_of(*arrays[1:-1]) + tokens * cache[0, 0].nbytes


def gather_kv_cache(tokens: int, dtypes: tuple[str, str]) -> Call:
    """A gather of up to 32 requests of about equal length."""
    cache, requests = pages(tokens, dtypes[0]), min(tokens, 32)
    lens = [tokens // requests] * (requests - 1)
    lens.append(tokens - sum(lens))
    tables = torch.randint(0, len(cache), (requests, -(-max(lens) // PAGE)), device=device()).int()
    given = cache, tables, ints([0] * requests), ints(lens)
    options = {
        "total_len": tokens,
        "out_dtype": getattr(torch, dtypes[1]),
        "kv_scale": torch.tensor(0.7).to(device()),
    }
    run = functools.partial(tsmla_bridge.gather_kv_cache, *given, **options)
    return run, size_of(*given[1:], run()) + 4 + tokens * cache[0, 0].nbytes


def write_packed_kv_cache(tokens: int, dtypes: tuple[str, str]) -> Call:
    inputs = randn(tokens, LATENT), randn(tokens, ROPE), slots(tokens), *angles(tokens)
    cache = pages(tokens, dtypes[1], 656)
    return functools.partial(tsmla_bridge.write_packed_kv_cache, cache, *inputs), size_of(*inputs) + tokens * 656


def write_indexer_cache(tokens: int, dtypes: tuple[str, str]) -> Call:
    inputs = randn(tokens, 128, dtype=dtypes[0]), slots(tokens), *angles(tokens)
    cache = pages(tokens, dtypes[1], 132)
    return functools.partial(tsmla_bridge.write_indexer_cache, cache, *inputs), size_of(*inputs) + tokens * 132


def indexer_quantize(tokens: int, dtypes: tuple[str, str]) -> Call:
    given = randn(tokens, 64, 128), randn(tokens, 64), *angles(tokens)
    run = functools.partial(tsmla_bridge.indexer_quantize, *given)
    return run, size_of(*given, *run())


def merge_attention_states(tokens: int, dtypes: tuple[str, str]) -> Call:
    """A merge of the attention of `tokens` queries over two parts of their keys: 128 heads of 128 columns."""
    outs = [randn(tokens, 128, 128, dtype=dtypes[0]) for _ in range(2)]
    lses = [torch.randn(tokens, 128, device=device()) for _ in range(2)]
    run = functools.partial(tsmla_bridge.merge_attention_states, outs, lses)
    return run, size_of(*outs, *lses, *run())


class Cache(Case):
    points: ClassVar = tuple((op, *dtypes, tokens) for op, all_dtypes in DTYPES.items() for dtypes in all_dtypes
                             for tokens in (1, 128, 4096, 16384, 65536))  # fmt: skip
    common: ClassVar = {"page": PAGE}
    heads: ClassVar[dict[str, int]] = {"rope_write_kv_cache": 16, "merge_attention_states": 128}

    @classmethod
    def best_peer(cls, us: Mapping[str, float]) -> float | None:
        """The faster copy's time."""
        return us.get("copy")

    def rows(self, skipped: set[tuple[str, Any]], hear: Callable[[str], None]) -> list[dict[str, Any]]:
        op, *dtypes, tokens = self.point
        hear("tsmla")
        call, size = globals()[op](tokens, tuple(dtypes))
        source = torch.zeros(size // 8, dtype=torch.int32, device=device())
        target = torch.empty_like(source)
        copies = {"memcpy_us": lambda: target.copy_(source),
                  "kernel_copy_us": lambda: torch.bitwise_not(source, out=target)}  # fmt: skip
        call()
        times = {name: round(us, 2) for name, us in time_all({"us": call, **copies}, 30).items()}
        times["copy_us"] = min(times["memcpy_us"], times["kernel_copy_us"])
        heads = {"query_heads": self.heads[op]} if op in self.heads else {}
        return [{"op": op, "dtypes": dtypes, "tokens": tokens, **heads, "bytes": size, **times}]


class Merge(Cache):
    points: ClassVar = tuple(("merge_attention_states", dtype, dtype, tokens) for dtype in (BF16, "float32")
                             for tokens in (1, 128, 512, 4096))  # fmt: skip
