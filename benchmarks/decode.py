"""Time the Hopper decode kernel against every peer at hand, and against the floor, on one GPU in one run.

    python3 benchmarks/decode.py --peers DIR --out FILE.json [--dtype fp8] [--points 1,1,16,4096/...] [--seconds 500]
        [--jit]

DIR holds a module `peers` with `load()`, `flashmla`, `fa3_mla` and `fa4_mla` (each takes q, cache, table, lengths,
scale and causal, and returns a function without arguments) and, for fp8, `flashmla_fp8` (which takes the scales of q
and the cache too); without it ours runs alone. With an fp8 cache ours is timed twice: "tsmla" with queries of fp8, as
the peer's are, and "tsmla_bf16_q" with queries of bf16. All functions of a point are timed interleaved, as CUDA-graph
replays with the L2 cache flushed before each (by reading), medians; ours is the compiled object that jax launches,
launched on torch's stream. With --jit ours is timed through jax.jit too ("tsmla_jit": the host's clock over a chain of
calls inside one jitted function, L2 not flushed). Errors are against float64 over what the inputs stand for, on two of
the requests. A table goes to standard output as it is made; rows go to FILE.json, the schema figures.py reads.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

from absl import app, flags
from compiling import compile_all
from floors import BYTES_PER_KEY, BYTES_PER_S, FLOPS_PER_S, LATENT, ROPE
from harness import (
    ARCH,
    JIT,
    POINTS,
    Record,
    allocate,
    has_fa4,
    launch,
    least_seconds,
    load_peers,
    time_all,
    within_budget,
)

LENGTHS = flags.DEFINE_enum("lengths", "both", ["fixed", "varlen", "both"], "equal lengths, or uniform in [1/2, 3/2]")
CACHE = flags.DEFINE_enum("dtype", "bf16", ["bf16", "fp8"], "of the cache")

PAGE = 64
E4M3 = "float8_e4m3fn"
Q_SCALE, KV_SCALE = 0.03, 0.02  # of random numbers of variance 1: what is beyond 448 of them saturates
HEADS, TOKENS = (16, 32, 64, 128), (1, 2, 4, 8)
SIZES = ((1, 4096), (1, 32768), (4, 81920), (16, 8192), (64, 8192), (128, 4096), (32, 81920))
Point = tuple[int, int, int, int]  # b, s, h, keys


def config_of(s: int, h: int, q_dtype: str, kv_dtype: str) -> Any:
    from tsmla_kernels.catalog import MLA_DECODE

    return MLA_DECODE.from_options(
        {"num_heads": str(h), "max_q_len": str(s), "page_size": str(PAGE), "dtype": q_dtype, "kv_dtype": kv_dtype}
    )


def modes() -> dict[str, tuple[str, str]]:
    """Our rows' names, and the dtypes of q and the cache that each is for."""
    if CACHE.value == "bf16":
        return {"tsmla": ("bfloat16", "bfloat16")}
    return {"tsmla": (E4M3, E4M3), "tsmla_bf16_q": ("bfloat16", E4M3)}


@functools.cache
def launcher(s: int, h: int, q_dtype: str, kv_dtype: str) -> Any:
    from tsmla_kernels.catalog import MLA_DECODE
    from tsmla_kernels.launch import Launcher

    return Launcher(MLA_DECODE, config_of(s, h, q_dtype, kv_dtype), ARCH)


class Inputs:
    """Random q and cache of a point, a shuffled block table, and the lengths."""

    def __init__(self, point: Point, varlen: bool) -> None:
        import torch

        self.b, self.s, self.h, keys = point
        generator = torch.Generator().manual_seed(int(time.time() * 1e3) % 2**31)
        self.lens = torch.full((self.b,), keys, dtype=torch.int32)
        if varlen:
            self.lens = torch.randint(keys // 2, keys * 3 // 2 + 1, (self.b,), generator=generator, dtype=torch.int32)
        pages_of = (self.lens + PAGE - 1) // PAGE
        pages = int(pages_of.sum())
        order = torch.randperm(pages, generator=generator, dtype=torch.int32)
        table = torch.zeros((self.b, int(pages_of.max())), dtype=torch.int32)
        begin = 0
        for r, count in enumerate(pages_of.tolist()):
            table[r, :count] = order[begin : begin + count]
            begin += count
        narrow = CACHE.value == "fp8"
        self.kv_scale = KV_SCALE if narrow else 1.0
        dtype = torch.float8_e4m3fn if narrow else torch.bfloat16
        self.cache = torch.empty((pages, PAGE, LATENT + ROPE), dtype=dtype, device="cuda")
        for chunk in self.cache.split(4096):
            chunk.copy_((torch.randn(chunk.shape, device="cuda") / self.kv_scale).clamp(-448, 448).to(dtype))
        q = torch.randn((self.b, self.s, self.h, LATENT + ROPE), device="cuda")
        self.q = q.to(torch.bfloat16)
        self.q8 = (q / Q_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn) if narrow else None
        self.table, self.lens_gpu = table.cuda(), self.lens.cuda()
        self.scale = (128 + ROPE) ** -0.5

    @property
    def total_keys(self) -> int:
        return int(self.lens.sum())

    def floor_us(self) -> float:
        rows = self.s * self.h
        flops = 2 * rows * self.total_keys * (2 * LATENT + ROPE)
        moved = self.total_keys * BYTES_PER_KEY[CACHE.value] + self.b * rows * (2 * LATENT + ROPE) * 2
        return max(flops / FLOPS_PER_S[CACHE.value], moved / BYTES_PER_S) * 1e6

    def queries(self, q_dtype: str) -> tuple[Any, float]:
        """q of that dtype, and its scale."""
        return (self.q8, Q_SCALE) if q_dtype == E4M3 else (self.q, 1.0)

    def ours(self, q_dtype: str, kv_dtype: str) -> Callable[[], tuple[Any, Any]]:
        import torch

        from tsmla_kernels.sm90.decode.config import workspace_shapes

        q, q_scale = self.queries(q_dtype)
        rows, token_rows = self.b * self.s * self.h, (self.b, self.s, self.h)
        out = torch.empty((rows, LATENT), dtype=torch.bfloat16, device="cuda")
        lse = torch.empty((rows,), dtype=torch.float32, device="cuda")
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        shapes = workspace_shapes(config_of(self.s, self.h, q_dtype, kv_dtype), sms, self.b, self.table.shape[1])
        scales = torch.tensor([self.scale * q_scale * self.kv_scale, self.kv_scale], device="cuda")
        inputs = [q.view(rows, -1), self.cache, self.table, self.lens_gpu, self.lens_gpu, scales]
        results = (out.view(*token_rows, LATENT), lse.view(token_rows))
        return launch(launcher(self.s, self.h, q_dtype, kv_dtype), [*inputs, out, lse, *allocate(shapes)], results)

    def errors(self, run: Callable[[], tuple[Any, Any]], ours: bool, q_dtype: str) -> tuple[float, float]:
        """Relative error of out (norm) and greatest error of lse, against float64 over what the inputs stand
        for, of two requests."""
        import torch

        out, lse = run()
        torch.cuda.synchronize()
        out = out.reshape(self.b, self.s, self.h, LATENT)
        differs, norm, worst = 0.0, 0.0, 0.0
        for r in sorted({0, self.b - 1}):
            n = int(self.lens[r])
            used = self.table[r, : (n + PAGE - 1) // PAGE].tolist()
            keys = torch.cat([self.cache[page] for page in used])[:n].double() * self.kv_scale
            q, q_scale = self.queries(q_dtype)
            visible = n - (self.s - 1) + torch.arange(self.s, device="cuda")
            for token in range(self.s):
                scores = (q[r, token].double() @ keys[: visible[token]].T) * (self.scale * q_scale)
                want = torch.softmax(scores, -1) @ keys[: visible[token], :LATENT]
                differs += float((out[r, token].double() - want).square().sum())
                norm += float(want.square().sum())
                if ours:
                    worst = max(worst, float((lse[r, token].double() - torch.logsumexp(scores, -1)).abs().max()))
        return math.sqrt(differs / norm), worst


def jit_us(inputs: Inputs) -> float:
    """Microseconds a call inside a jitted chain of calls, where each needs the one before: of 36 less 12 calls, so
    that what a chain costs as a whole is not in it, and less what hands a result on to the next call."""
    import jax
    import jax.numpy as jnp

    import tsmla_jax

    operands = [jnp.from_dlpack(t) for t in (inputs.q, inputs.cache, inputs.table, inputs.lens_gpu)]

    def attend(q: Any, cache: Any, table: Any, lens: Any) -> Any:
        return tsmla_jax.mla_decode(q, cache, table, lens, softmax_scale=inputs.scale, implementation="cute")

    def halve(q: Any, *_: Any) -> Any:
        return q[..., :LATENT] * 0.5

    def best(step: Callable[..., Any], calls: int) -> float:
        @jax.jit
        def chain(q: Any, *others: Any) -> Any:
            for _ in range(calls):
                q = q.at[..., :LATENT].set(step(q, *others))
            return q

        return least_seconds(lambda: chain(*operands).block_until_ready(), 7)

    with_it, without = (best(step, 36) - best(step, 12) for step in (attend, halve))
    return (with_it - without) / 24 * 1e6


def peer(peers: Any, name: str, inputs: Inputs, cache: Any) -> Callable[[], tuple[Any, Any]]:
    """A peer's call on the same inputs."""
    import torch

    if CACHE.value == "fp8":
        scales = (torch.tensor([scale], device="cuda") for scale in (Q_SCALE, KV_SCALE))
        return peers.flashmla_fp8(inputs.q8, cache, inputs.table, inputs.lens_gpu, inputs.scale, True, *scales)
    make = getattr(peers, {"flashmla": "flashmla", "fa3": "fa3_mla", "fa4": "fa4_mla"}[name])
    return make(inputs.q, cache, inputs.table, inputs.lens_gpu, inputs.scale, True)


def peer_names(loaded: Any) -> list[str]:
    """The peers at hand for the cache's dtype."""
    if CACHE.value == "fp8":
        return ["flashmla"] if "flashmla_fp8" in loaded else []
    return [name for name in ("flashmla", "fa3") if name in loaded] + ["fa4"] * has_fa4()


def functions_of(inputs: Inputs, point: Point, peers: Any, names: list[str]) -> dict[str, Callable[[], Any]]:
    """Every function that runs this point: ours, and the peers that can."""
    import torch

    functions = {name: inputs.ours(*dtypes) for name, dtypes in modes().items()}
    cache4 = inputs.cache.view(-1, PAGE, 1, LATENT + ROPE)
    for name in names:
        try:
            run = peer(peers, name, inputs, cache4)
            run()
            functions[name] = run
        except Exception as error:
            print(f"{name} failed at {point}: {type(error).__name__}: {str(error)[:120]}")
    torch.cuda.synchronize()
    return functions


def main(argv: list[str]) -> int:
    del argv
    points = [tuple(map(int, p.split(","))) for p in POINTS.value.split("/")] if POINTS.value else [
        (b, s, h, keys) for h, s, (b, keys) in itertools.product(HEADS, TOKENS, SIZES)
    ]  # fmt: skip
    dtypes = modes().values()
    compile_all(("mla_decode", config_of(s, h, *pair)) for _, s, h, _ in points for pair in dtypes)
    peers, loaded = load_peers()
    names = peer_names(loaded) if peers else []
    record = Record(dtype=CACHE.value, page=PAGE)
    lengths = {"fixed": [False], "varlen": [True], "both": [False, True]}[LENGTHS.value]
    for varlen, point in within_budget(itertools.product(lengths, points)):
        b, s, h, keys = point
        inputs = Inputs(point, varlen)
        functions = functions_of(inputs, point, peers, names)
        floor = inputs.floor_us()
        times = time_all(functions, 20 if floor < 1000 else 10)
        case = {"b": b, "s": s, "h": h, "keys": keys, "varlen": varlen, "floor_us": round(floor, 2)}
        for name, us in times.items():
            ours = name in modes()
            rel_err, lse_err = inputs.errors(functions[name], ours, modes().get(name, modes()["tsmla"])[0])
            errors = {"rel_err": float(f"{rel_err:.3e}")} | ({"lse_err": float(f"{lse_err:.2e}")} if ours else {})
            record.add(**case, peer=name, us=round(us, 2), **errors)
        if JIT.value and CACHE.value == "bf16":
            times["tsmla_jit"] = round(jit_us(inputs), 2)
            record.add(**case, peer="tsmla_jit", us=times["tsmla_jit"], rel_err=record.rows[-1]["rel_err"])
        best = min((us for name, us in times.items() if not name.startswith("tsmla")), default=math.nan)
        print(
            f"{b:3d} {s} {h:3d} {keys:6d} {'var' if varlen else '   '} floor {floor:7.1f} "
            + " ".join(f"{name} {us:7.1f}" for name, us in times.items())
            + f"  {floor / times['tsmla']:4.0%}  x{times['tsmla'] / best:.2f}",
            flush=True,
        )
        del inputs, functions
    return 0


if __name__ == "__main__":
    app.run(main)
