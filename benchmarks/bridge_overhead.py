"""What an eager call costs the host, in microseconds: ours through torch, and FlashMLA's operator called the same way.

    python3 benchmarks/bridge_overhead.py --out FILE.json [--peers DIR] [--calls 300] [--rounds 7]

DIR holds the module `peers` that benchmarks/decode.py takes. The GPU is given little to do (B 4, S 1, H 16, 256 keys;
sparse_mla as many slots of V3.2 rows; queries in two tensors as an engine's products leave them) and every function is
called `calls` times in a row without waiting, then waited for; a call's time is that until it returns. "its launch
alone" is what the compiled object takes for its two kernels: hosts differ in that by a factor of two. The functions
take turns, so that a slow moment of the host meets all of them. Medians and 90th percentiles; rows go to FILE.json.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

from absl import app, flags
from harness import Record, load_peers

CALLS = flags.DEFINE_integer("calls", 300, "calls in a row", lower_bound=1)
ROUNDS = flags.DEFINE_integer("rounds", 7, "turns of every function", lower_bound=1)

BATCH, HEADS, PAGES, PAGE = 4, 16, 4, 64


def functions() -> dict[str, Callable[[], Any]]:
    """Ways to make the same call."""
    import torch

    import tsmla_bridge
    from tsmla_bridge import tokenspeed_mla
    from tsmla_bridge.ops.decode_plans import DecodeInputs, DecodeOptions, plan_for

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, 1, HEADS, 576, generator=generator).bfloat16().cuda()
    cache = torch.randn(BATCH * PAGES, PAGE, 576, generator=generator).bfloat16().cuda()
    tables = torch.arange(BATCH * PAGES, dtype=torch.int32, device="cuda").view(BATCH, PAGES)
    lens = torch.full((BATCH,), PAGES * PAGE, dtype=torch.int32, device="cuda")
    scale, kv_scale = 192**-0.5, torch.tensor(1.0, device="cuda")
    out, lse = torch.empty(BATCH, 1, HEADS, 512, dtype=q.dtype, device="cuda"), torch.empty(BATCH, 1, HEADS).cuda()
    size = tsmla_bridge.decode_workspace_size(max_batch=BATCH, num_heads=HEADS)
    memory = {"out": out, "lse": lse, "workspace": tsmla_bridge.Workspace(size)}
    sms = tokenspeed_mla.get_num_sm(torch.device("cuda"))
    buffer = torch.empty(max(size, sms * HEADS * 8 * 513 * 4), dtype=torch.int8, device="cuda")
    cache4 = cache[:, None]

    options = DecodeOptions(512, None, causal=True, batch_invariant=False, implementation=None)
    plan: Any = plan_for(DecodeInputs(q, cache, tables, lens, None), options)
    scales_there = torch.tensor([scale, 1.0], device="cuda")
    inputs = (q, cache, tables, lens, lens, scales_there, out, lse)
    workspaces = (memory["workspace"].buffer.data_ptr() + offset for offset in plan.offsets)
    addresses = (*(tensor.data_ptr() for tensor in inputs), *workspaces)
    stream = torch.cuda.current_stream().cuda_stream

    halves = halves_of(q)
    heads_first = (halves[0].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3), halves[1])

    def ours(query: Any = q, **options: Any) -> Any:
        return tsmla_bridge.mla_decode(query, cache, tables, lens, softmax_scale=scale, **options)

    found: dict[str, Callable[[], Any]] = {
        "tsmla": ours,
        "tsmla, its launch alone": lambda: plan.launch(stream, addresses),
        "tsmla, with lse": lambda: ours(return_lse=True),
        "tsmla, with lse, out= and a workspace": lambda: ours(return_lse=True, **memory),
        "tsmla, kv_scale a tensor": lambda: ours(kv_scale=kv_scale),
        "tsmla, q in two tensors": lambda: ours(halves),
        "tsmla, q in two tensors, lse, out= and a workspace": lambda: ours(halves, return_lse=True, **memory),
        "tsmla, q in two tensors, heads in front": lambda: ours(heads_first),
        "tokenspeed_mla's function": lambda: tokenspeed_mla.tokenspeed_mla_decode(
            query=q, kv_cache=cache4, workspace_buffer=buffer, kv_lora_rank=512, qk_rope_head_dim=64,
            block_tables=tables, seq_lens=lens, max_seq_len=PAGES * PAGE, softmax_scale=scale, enable_pdl=True,
        ),
        "torch's operator": lambda: torch.ops.tsmla.mla_decode(
            q, cache, tables, lens, None, None, None, scale, 1.0, 512, None, True, False, None
        ),
    }  # fmt: skip
    found |= sparse_functions(scale)
    peers, loaded = load_peers()
    if "flashmla" in loaded:
        found["FlashMLA's operator"] = peers.flashmla(q, cache.view(-1, PAGE, 1, 576), tables, lens, scale, True)
    return found


def halves_of(q: Any) -> tuple[Any, Any]:
    """The query's latent columns, dense, and its rope columns, the last ones of wider rows."""
    import torch

    wide = torch.zeros(*q.shape[:-1], 192, dtype=q.dtype, device=q.device)
    wide[..., 128:] = q[..., 512:]
    return q[..., :512].contiguous(), wide[..., 128:]


def sparse_functions(scale: float) -> dict[str, Callable[[], Any]]:
    """Ways to call sparse_mla over packed rows."""
    import torch

    import tsmla_bridge
    from tsmla_bridge.ops import plans
    from tsmla_bridge.ops.sparse_plans import SparseInputs, SparseOptions, make_plan

    q = torch.randn(BATCH, HEADS, 576).bfloat16().cuda()
    cache = torch.zeros(BATCH * PAGES, PAGE, 656, dtype=torch.uint8, device="cuda")
    indices = torch.arange(PAGES * PAGE, dtype=torch.int32, device="cuda").repeat(BATCH, 1)
    inputs = SparseInputs(q, cache, None, indices, None, None)
    plan: Any = plans.find(inputs, SparseOptions(512, None, None, None, None, None, False, None), make_plan)
    workspace = tsmla_bridge.Workspace(plan.size)
    out, lse = torch.empty(BATCH, HEADS, 512, dtype=q.dtype, device="cuda"), torch.empty(BATCH, HEADS, device="cuda")
    factors = torch.tensor([scale, 1.0, 1.0], device="cuda")
    tensors = (q, cache, indices, factors, out, lse)
    base, stream = workspace.buffer.data_ptr(), torch.cuda.current_stream().cuda_stream
    addresses = (*(x.data_ptr() for x in tensors), *(base + offset for offset in plan.offsets))

    def launch() -> tuple[torch.Tensor, ...]:
        plan.launch(stream, addresses)
        return tensors  # which lie at these addresses

    def call(**options: Any) -> Any:
        return tsmla_bridge.sparse_mla(q, cache, indices, softmax_scale=scale, **options)

    memory = {"out": out, "lse": lse, "workspace": workspace, "return_lse": True}
    return {
        "sparse_mla": call,
        "sparse_mla, its launch alone": launch,
        "sparse_mla, with lse, out= and a workspace": lambda: call(**memory),
    }


def main(argv: list[str]) -> int:
    del argv
    import torch

    calls = functions()
    for function in calls.values():
        for _ in range(20):
            function()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS.value):
        for name, function in calls.items():
            taken = times[name]
            for _ in range(CALLS.value):
                begin = time.perf_counter_ns()
                function()
                taken.append((time.perf_counter_ns() - begin) / 1e3)
            torch.cuda.synchronize()
    host = platform.processor() or platform.machine()
    record = Record(b=BATCH, s=1, h=HEADS, keys=PAGES * PAGE, host=host)
    for name, taken in times.items():
        median, late = statistics.median(taken), statistics.quantiles(taken, n=10)[-1]
        record.add(function=name, us=round(median, 2), us_p90=round(late, 2))
        print(f"{name:50s} {median:6.2f} us   90 % below {late:6.2f} us")
    return 0


if __name__ == "__main__":
    app.run(main)
