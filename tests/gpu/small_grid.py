"""Every operation of the bridge on small inputs: odd sizes, ragged and empty requests, NaN where nothing may be read.

    python3 -m tests.gpu.small_grid [--op NAME] [--device cuda]

What comes out is compared with the same call on the CPU, which the reference answers. test_small_grid.py makes these
calls too. As a program of its own, without jax, compute-sanitizer can watch them, one operation and one sanitizer at
a time (run it once without, so that the kernels are compiled):

    compute-sanitizer --tool racecheck python3 -m tests.gpu.small_grid --op mla_prefill
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

import tsmla_bridge
from tests.oracles.inputs import poisoned_cache

LATENT, ROPE, PAGE = 512, 64, 64
FP8 = torch.float8_e4m3fn
SCALE = 192**-0.5


class Call(NamedTuple):
    """One call: a function of the bridge, its tensors on the CPU and its other arguments."""

    name: str
    function: Callable[..., Any]
    tensors: dict[str, torch.Tensor]
    options: dict[str, Any]

    def on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The results of the call on copies of its tensors there."""
        results = self.function(**{k: x.to(device, copy=True) for k, x in self.tensors.items()}, **self.options)
        return results if isinstance(results, tuple) else (results,)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return int32([0, *itertools.accumulate(lengths)])


def paged(lengths: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned cache and its block table."""
    cache, table = map(torch.from_numpy, poisoned_cache(np.random.default_rng(0), lengths, PAGE, LATENT + ROPE))
    return (cache * 0.5).to(dtype), table


def decode_calls(generator: torch.Generator) -> Iterator[Call]:
    """mla_decode: few rows and many, split and whole, ragged, in all pairs of dtypes."""
    kinds = [(torch.bfloat16,) * 2, (torch.float16,) * 2, (FP8, FP8), (torch.bfloat16, FP8)]
    cases = [(16, 1, [300, 0, 65]), (16, 4, [130, 2]), (128, 1, [200, 1]), (9, 2, [700])]
    for (dtype, kv_dtype), (heads, q_len, lengths) in itertools.product(kinds, cases):
        cache, table = paged(lengths, kv_dtype)
        q = normal(generator, len(lengths), q_len, heads, LATENT + ROPE, dtype=dtype)
        tensors = {"q": q, "kv_cache": cache, "block_tables": table, "seq_lens": int32(lengths)}
        for invariant in (False, True):
            name = f"{dtype} {kv_dtype} H {heads} S {q_len} {lengths}{' invariant' * invariant}"
            options = {"softmax_scale": SCALE, "return_lse": True, "batch_invariant": invariant}
            yield Call(name, tsmla_bridge.mla_decode, tensors, options)


def prefill_calls(generator: torch.Generator) -> Iterator[Call]:
    """mla_prefill: ragged, empty queries and empty keys, behind a context, causal and not."""
    lengths = [([70, 0, 5], [70, 30, 200]), ([3], [0]), ([130, 1], [131, 64])]
    for dtype, (q_lens, kv_lens) in itertools.product((torch.bfloat16, torch.float16, FP8), lengths):
        q = normal(generator, sum(q_lens), 3, 192, dtype=dtype)
        k, v = (normal(generator, sum(kv_lens) + 2, 3, width, dtype=torch.float32) for width in (192, 128))
        k[sum(kv_lens) :], v[sum(kv_lens) :] = float("nan"), float("nan")
        offsets = {f"cu_seqlens_{name}": offsets_of(lens) for name, lens in (("q", q_lens), ("kv", kv_lens))}
        bounds = {"max_q_len": max(q_lens), "max_kv_len": max(kv_lens)}
        for causal in (True, False):
            options = {**bounds, "softmax_scale": SCALE, "return_lse": True, "causal": causal}
            name = f"{dtype} {q_lens} over {kv_lens}{' causal' * causal}"
            yield Call(name, tsmla_bridge.mla_prefill, {"q": q, "k": k.to(dtype), "v": v.to(dtype), **offsets}, options)


def cache_calls(generator: torch.Generator) -> Iterator[Call]:
    """write_kv_cache, with slots that are left out, and gather_kv_cache of what was there before."""
    for dtype in (torch.bfloat16, FP8):
        cache, table = paged([100, 7, 64], dtype)
        latent, rope = (normal(generator, 33, width, dtype=torch.bfloat16) for width in (LATENT, ROPE))
        slots = torch.randperm(cache.shape[0] * PAGE, generator=generator)[:33].to(torch.int32)
        slots[::5] = -1
        rows = {"latent": latent, "k_rope": rope, "slot_mapping": slots}
        yield Call(f"write {dtype}", tsmla_bridge.write_kv_cache, {"kv_cache": cache, **rows}, {"kv_scale": 0.5})
        tables = {"block_tables": table, "starts": int32([3, 0, 10]), "lens": int32([90, 7, 0])}
        options = {"total_len": 97, "kv_scale": 0.5}
        yield Call(f"gather {dtype}", tsmla_bridge.gather_kv_cache, {"kv_cache": cache, **tables}, options)


def merge_calls(generator: torch.Generator) -> Iterator[Call]:
    """merge_attention_states of two and three parts, some rows of which saw no key."""
    for dtype, parts in ((torch.bfloat16, 2), (torch.float16, 3), (torch.float32, 2)):
        outs = normal(generator, parts, 19, 3, 128, dtype=dtype)
        lses = normal(generator, parts, 19, 3, dtype=torch.float32)
        for part in range(parts):
            lses[part, part :: parts + 1], outs[part, part :: parts + 1] = -torch.inf, 0
        yield Call(f"{dtype} {parts} parts", tsmla_bridge.merge_attention_states, {"outs": outs, "lses": lses}, {})


CALLS: dict[str, Callable[[torch.Generator], Iterator[Call]]] = {
    "mla_decode": decode_calls,
    "mla_prefill": prefill_calls,
    "kv_cache": cache_calls,
    "merge_attention_states": merge_calls,
}


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """The norm of the difference over that of `want`, of what is finite there; inf if the rest is not the same."""
    a, b = got.cpu().double(), want.double()
    finite = torch.isfinite(b)
    if a.shape != b.shape or not torch.equal(a[~finite].nan_to_num(7.0), b[~finite].nan_to_num(7.0)):
        return float("inf")
    return float((a - b)[finite].norm() / b[finite].norm().clamp(min=1e-30))


def failures(op: str, device: torch.device) -> list[str]:
    """The calls of `op` on `device` that differ from those on the CPU by more than P in fp8 explains."""
    found = []
    for call in CALLS[op](torch.Generator().manual_seed(0)):
        errors = [apart(a, b) for a, b in zip(call.on(device), call.on(torch.device("cpu")), strict=True)]
        if not max(errors) < 0.04:
            found.append(f"{op} {call.name}: {errors}")
    return found


def main(argv: list[str] | None = None) -> int:
    parser: Any = argparse.ArgumentParser(description="every operation of the bridge on small inputs")
    parser.add_argument("--op", choices=list(CALLS), action="append", help="all by default")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    found = [line for op in args.op or CALLS for line in failures(op, torch.device(args.device))]
    print("\n".join(found) or "all as on the CPU")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
