"""Every operation of the bridge on small inputs: odd sizes, ragged and empty requests, NaN where nothing may be read.

    python3 -m tests.gpu.small_grid [--op NAME] [--device cuda]

What comes out is compared with the same call on the CPU, which the reference answers. test_small_grid.py makes these
calls too. As a program of its own, without jax, compute-sanitizer can watch them, one operation and one sanitizer at
a time (run it once without, so that the kernels are compiled):

    compute-sanitizer --tool racecheck python3 -m tests.gpu.small_grid --op mla_prefill
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import tsmla_bridge

LATENT, ROPE, PAGE = 512, 64, 64
FP8 = torch.float8_e4m3fn
Call = Callable[[torch.device], tuple[torch.Tensor, ...]]


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def paged(generator: torch.Generator, lengths: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache and its block table: unused slots are NaN, unused entries of the table no page at all."""
    width = max(-(-n // PAGE) for n in lengths) + 1
    cache = normal(generator, len(lengths) * width, PAGE, LATENT + ROPE, dtype=torch.float32, scale=0.5)
    table = torch.randperm(len(cache), generator=generator).view(len(lengths), width).to(torch.int32)
    for request, length in enumerate(lengths):
        for i, page in enumerate(table[request].tolist()):
            cache[page, max(0, min(PAGE, length - i * PAGE)) :] = float("nan")
        table[request, -(-length // PAGE) :] = 2**31 - 1
    return cache.to(dtype), table


def decode_calls(generator: torch.Generator) -> Iterator[tuple[str, Call]]:
    """mla_decode: few rows and many, split and whole, ragged, in all pairs of dtypes."""
    kinds = [(torch.bfloat16,) * 2, (torch.float16,) * 2, (FP8, FP8), (torch.bfloat16, FP8)]
    cases = [(16, 1, [300, 0, 65]), (16, 4, [130, 2]), (128, 1, [200, 1]), (9, 2, [700])]
    for (dtype, kv_dtype), (heads, q_len, lengths) in ((k, c) for k in kinds for c in cases):
        cache, table = paged(generator, lengths, kv_dtype)
        q = normal(generator, len(lengths), q_len, heads, LATENT + ROPE, dtype=dtype)
        lens = torch.tensor(lengths, dtype=torch.int32)
        for invariant in (False, True):

            def call(
                device: torch.device,
                tensors: tuple[torch.Tensor, ...] = (q, cache, table, lens),
                batch_invariant: bool = invariant,
            ) -> tuple[torch.Tensor, ...]:
                out, lse = tsmla_bridge.mla_decode(
                    *(t.to(device) for t in tensors), softmax_scale=192**-0.5, return_lse=True,
                    batch_invariant=batch_invariant,
                )  # fmt: skip
                return out, lse

            yield f"{dtype} {kv_dtype} H {heads} S {q_len} {lengths}{' invariant' * invariant}", call


def prefill_calls(generator: torch.Generator) -> Iterator[tuple[str, Call]]:
    """mla_prefill: ragged, empty queries and empty keys, behind a context, causal and not."""
    lengths = [([70, 0, 5], [70, 30, 200]), ([3], [0]), ([130, 1], [131, 64])]
    for dtype in (torch.bfloat16, torch.float16, FP8):
        for (q_lens, kv_lens), causal in ((pair, causal) for pair in lengths for causal in (True, False)):
            q = normal(generator, sum(q_lens), 3, 192, dtype=dtype)
            k = normal(generator, sum(kv_lens) + 2, 3, 192, dtype=torch.float32)
            v = normal(generator, sum(kv_lens) + 2, 3, 128, dtype=torch.float32)
            k[sum(kv_lens) :], v[sum(kv_lens) :] = float("nan"), float("nan")
            tensors = (q, k.to(dtype), v.to(dtype), offsets(q_lens), offsets(kv_lens))

            def call(
                device: torch.device,
                tensors: tuple[torch.Tensor, ...] = tensors,
                longest: tuple[int, int] = (max(q_lens), max(kv_lens)),
                causal: bool = causal,
            ) -> tuple[torch.Tensor, ...]:
                q, k, v, q_at, kv_at = (t.to(device) for t in tensors)
                out, lse = tsmla_bridge.mla_prefill(
                    q, k, v, cu_seqlens_q=q_at, cu_seqlens_kv=kv_at, max_q_len=longest[0], max_kv_len=longest[1],
                    softmax_scale=192**-0.5, causal=causal, return_lse=True,
                )  # fmt: skip
                return out, lse

            yield f"{dtype} {q_lens} over {kv_lens}{' causal' * causal}", call


def cache_calls(generator: torch.Generator) -> Iterator[tuple[str, Call]]:
    """write_kv_cache, with slots that are left out, and gather_kv_cache of what was there before."""
    for dtype in (torch.bfloat16, FP8):
        cache, table = paged(generator, [100, 7, 64], dtype)
        latent, rope = (normal(generator, 33, width, dtype=torch.bfloat16) for width in (LATENT, ROPE))
        slots = torch.randperm(cache.shape[0] * PAGE, generator=generator)[:33].to(torch.int32)
        slots[::5] = -1
        starts, lens = torch.tensor([3, 0, 10], dtype=torch.int32), torch.tensor([90, 7, 0], dtype=torch.int32)

        def write(
            device: torch.device, tensors: tuple[torch.Tensor, ...] = (cache, latent, rope, slots)
        ) -> tuple[torch.Tensor, ...]:
            copies = [t.to(device, copy=True) for t in tensors]
            return (tsmla_bridge.write_kv_cache(*copies, kv_scale=0.5).float(),)

        def gather(
            device: torch.device, tensors: tuple[torch.Tensor, ...] = (cache, table, starts, lens)
        ) -> tuple[torch.Tensor, ...]:
            return (tsmla_bridge.gather_kv_cache(*(t.to(device) for t in tensors), total_len=97, kv_scale=0.5),)

        yield f"write {dtype}", write
        yield f"gather {dtype}", gather


def merge_calls(generator: torch.Generator) -> Iterator[tuple[str, Call]]:
    """merge_attention_states of two and three parts, of which some rows saw no key."""
    for dtype, parts in ((torch.bfloat16, 2), (torch.float16, 3), (torch.float32, 2)):
        outs = [normal(generator, 19, 3, 128, dtype=dtype) for _ in range(parts)]
        lses = [normal(generator, 19, 3, dtype=torch.float32) for _ in range(parts)]
        for part, lse in enumerate(lses):
            lse[part :: parts + 1] = -torch.inf
            outs[part][part :: parts + 1] = 0

        def call(
            device: torch.device, outs: list[torch.Tensor] = outs, lses: list[torch.Tensor] = lses
        ) -> tuple[torch.Tensor, ...]:
            given = ([t.to(device, copy=True) for t in tensors] for tensors in (outs, lses))
            return tuple(tsmla_bridge.merge_attention_states(*given))

        yield f"{dtype} {parts} parts", call


CALLS: dict[str, Callable[[torch.Generator], Iterator[tuple[str, Call]]]] = {
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
    for name, call in CALLS[op](torch.Generator().manual_seed(0)):
        errors = [apart(a, b) for a, b in zip(call(device), call(torch.device("cpu")), strict=True)]
        if not max(errors) < 0.04:
            found.append(f"{op} {name}: {errors}")
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
