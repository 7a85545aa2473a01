"""Calls of mla_decode from several threads at once, each on a stream of its own, compared to the bit with the same
calls made alone before.

    python3 -m tests.gpu.stress [--dtype NAME] [--kv-dtype NAME] [--threads 8] [--calls 200] [--small]

test_bridge.py makes these calls too. As a program of its own, without jax, compute-sanitizer can watch them:

    compute-sanitizer --tool racecheck python3 -m tests.gpu.stress --threads 1 --calls 4 --small

Run it without the sanitizer first, so that the kernels are compiled. Several sanitizers on one GPU do not end, and nor
does racecheck with two threads: both hang in torch's own calls (empty, linspace). After --patience seconds the program
prints the stack of every thread and ends.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

import tsmla_bridge
from tests.oracles.inputs import decode_numbers
from tsmla_bridge import Workspace, decode_workspace_size

SCALES = (192**-0.5, 0.05, 0.1)
# Requests, query tokens, heads, pages a request.
SHAPES = [(1, 1, 16, 40), (4, 2, 16, 9), (17, 1, 16, 3), (3, 4, 16, 12), (9, 1, 128, 6)]
SMALL = [(2, 1, 16, 4), (3, 2, 16, 3), (2, 1, 128, 3)]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Attend = Callable[[int, float, Workspace | None], Sequence[torch.Tensor]]


def arrays(
    *shape: int, dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None, **options: Any
) -> Tensors:
    """decode_numbers on the GPU."""
    q, cache, table, lens = (torch.from_numpy(x).to("cuda") for x in decode_numbers(*shape, **options))
    return q.to(dtype), cache.to(kv_dtype or dtype), table.to(torch.int32), lens.to(torch.int32)


def assert_same_bits(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def failures(
    shapes: Sequence[tuple[int, int, int, int]], dtype: torch.dtype, kv_dtype: torch.dtype, threads: int, calls: int
) -> list[BaseException]:
    """The errors of `calls` calls of each thread, of random shapes and scales, half of them with a workspace."""
    inputs = [arrays(*shape, dtype=dtype, kv_dtype=kv_dtype, seed=i) for i, shape in enumerate(shapes)]

    def attend(which: int, scale: float, workspace: Workspace | None = None) -> Sequence[torch.Tensor]:
        return tsmla_bridge.mla_decode(*inputs[which], softmax_scale=scale, return_lse=True, workspace=workspace)

    sizes = {"max_batch": max(s[0] for s in shapes), "max_q_len": max(s[1] for s in shapes), "dtype": dtype}
    size = max(decode_workspace_size(num_heads=s[2], kv_dtype=kv_dtype, **sizes) for s in shapes)
    return in_threads(attend, len(shapes), size, threads, calls)


def in_threads(attend: Attend, inputs: int, size: int, threads: int, calls: int) -> list[BaseException]:
    """The errors of `calls` calls of each thread, half of them with a workspace of `size` bytes.

    attend: a call on inputs of this number, below `inputs`, with this scale and workspace.
    """
    wants = {(i, scale): attend(i, scale, None) for i in range(inputs) for scale in SCALES}
    torch.cuda.synchronize()
    found: list[BaseException] = []

    def work(seed: int) -> None:
        rng, stream = random.Random(seed), torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                workspace = Workspace(size)
                for _ in range(calls):
                    call = rng.randrange(inputs), rng.choice(SCALES)
                    got = attend(*call, workspace if rng.random() < 0.5 else None)
                    stream.synchronize()
                    assert_same_bits(got, wants[call])
        except BaseException as error:
            found.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="mla_decode from several threads, each on its own stream")
    dtypes = ("bfloat16", "float16", "float8_e4m3fn")
    parser.add_argument("--dtype", choices=dtypes, default="bfloat16", help="of the queries")
    parser.add_argument("--kv-dtype", choices=dtypes, help="of the cache; the queries' by default")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--calls", type=int, default=200, help="of each thread")
    parser.add_argument("--small", action="store_true", help="three small shapes")
    parser.add_argument("--patience", type=float, default=40, help="seconds")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.patience, exit=True)
    dtype = getattr(torch, args.dtype)
    kv_dtype = getattr(torch, args.kv_dtype or args.dtype)
    found = failures(SMALL if args.small else SHAPES, dtype, kv_dtype, args.threads, args.calls)
    print(f"{args.threads} threads of {args.calls} calls: {len(found)} failed {found[:1]}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
