"""Time sparse_mla's Hopper kernel on a prompt's tokens against FlashMLA's sparse prefill, on one GPU in one run.

    python3 benchmarks/sparse_mla_prefill.py --peers DIR --out benchmarks/results/h200/sparse_mla_prefill.json
        [--points random,4096,128/...] [--seconds 540] [--skip flashmla,random,512,64/...]

DIR holds a module `peers_sparse` with `load(names)`, `pad_heads`, `flashmla_prefill` and `widen_v32`; without DIR ours
runs alone. A point is a mode, tokens T and heads H. Mode random: 2048 random slots of a context of 131,072 V3.2 rows a
token, in ascending order, as select_topk's order "position" gives them; shared80: neighbouring tokens share 80 % of
them; prompt: the first tokens of a text, which select all of at most 2048 earlier ones (lengths); v4: a window of 128
and 512 random compressed slots of V4 pages, with sinks.

Rows are of four kinds, by `peer`:
  tsmla              bf16 queries straight from the packed cache
  tsmla fp8 queries  e4m3 queries, V3.2 rows; its rel_err is against the bf16 queries that they were rounded from, and
                     own_err against the e4m3 ones
  flashmla           over a bf16 copy of the rows, queries of 64 or 128 heads, padded beforehand
  widen              making that copy of the whole context, V3.2 only: an engine does so before it calls FlashMLA

All functions of a point are timed interleaved, as CUDA-graph replays with the L2 cache flushed before each, medians;
ours is the compiled object, launched on torch's stream. Errors are against float64 over what the packed rows hold, on a
sample of tokens. A process of its own runs the points, as in sparse_mla.py. Rows go to FILE.json.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from absl import app, flags
from compiling import compile_all
from floors import BYTES_PER_S, FLOPS_PER_S
from harness import OURS, POINTS, Record, allocate, in_processes, launch, load_peers, print_ratios, started, time_all
from sparse_mla import (
    LATENT,
    PAGE,
    SKIP,
    WINDOW,
    errors_of,
    launcher,
    v4_pages,
    v4_values,
    v32_cache,
    v32_values,
    widened,
)

FP8 = "tsmla fp8 queries"
SELECTED = {"random": 2048, "shared80": 2048, "prompt": 2048, "v4": 512}
"""The slots of each mode, the window's apart."""
TOKENS, HEADS = (512, 2048, 4096), (16, 32, 64, 128)
CONTEXT, COMPRESSED = 1 << 17, 1 << 15  # V3.2's slots to select from, and V4's compressed ones
SHARED = 0.8
SAMPLE = 8  # tokens that errors are found on
SEED = 24


class Point(NamedTuple):
    mode: str
    t: int
    h: int

    @property
    def is_v4(self) -> bool:
        return self.mode == "v4"

    @property
    def keys(self) -> int:
        """Columns of the indices."""
        return SELECTED[self.mode] + WINDOW * self.is_v4

    @property
    def pairs(self) -> int:
        """Selected slots of all tokens."""
        if self.mode != "prompt":
            return self.t * self.keys
        return sum(min(token + 1, self.keys) for token in range(self.t))

    @property
    def head_dim(self) -> int:
        return 512 if self.is_v4 else 576

    def floor_us(self, peer: str) -> float:
        """What the arithmetic takes, or the bytes where these take longer: each row of the context is read once."""
        rows = min(self.pairs, COMPRESSED + self.t + WINDOW if self.is_v4 else CONTEXT)
        if peer == "widen":
            return CONTEXT * (656 + 1152) / BYTES_PER_S * 1e6
        size = 2 * self.head_dim if peer == "flashmla" else 584 if self.is_v4 else 656
        q = self.head_dim * (1 if peer == FP8 else 2)
        moved = rows * size + self.pairs * 4 + self.t * self.h * (q + LATENT * 2)
        scores = self.head_dim * (FLOPS_PER_S["bf16"] / FLOPS_PER_S["fp8"] if peer == FP8 else 1)
        return max(2 * self.pairs * self.h * (scores + LATENT) / FLOPS_PER_S["bf16"], moved / BYTES_PER_S) * 1e6

    @classmethod
    def parse(cls, text: str) -> Point:
        mode, *sizes = text.split(",")
        return cls(mode, *map(int, sizes))


def config(point: Point, dtype: str = "bfloat16") -> Any:
    from tsmla_kernels.catalog import SPARSE_MLA

    options = {"num_heads": str(point.h), "page_size": str(PAGE), "num_tokens": str(point.t), "dtype": dtype}
    if point.mode == "prompt":
        options["lengths"] = "true"
    if point.is_v4:
        options |= {"layout": "v4", "window": str(WINDOW), "sinks": "true"}
    return SPARSE_MLA.from_options(options)


# ---- inputs


def draw(mode: str, tokens: int, count: int, within: int, device: str = "cuda") -> Any:
    """Different slots below `within` for each token, int32 [tokens, count], ascending; -1 behind a prompt's token."""
    import torch

    columns = torch.arange(count, device=device)
    if mode == "prompt":
        token = torch.arange(tokens, device=device)[:, None]
        chosen = [
            columns if at < count else torch.randperm(at + 1, device=device)[:count].sort().values
            for at in range(tokens)
        ]
        return torch.where(columns <= token, torch.stack(chosen), -1).int()
    rows, kept = [torch.randperm(within, device=device)[:count]], round(count * SHARED)
    held = torch.zeros(within, dtype=torch.bool, device=device)
    for _ in range(1, tokens):
        if mode == "shared80":
            old = rows[-1][torch.randperm(count, device=device)[:kept]]
            held.zero_()
            held[rows[-1]] = True
            # Twice as many as are wanted, because some are taken already or come twice.
            drawn = torch.randint(within, (2 * (count - kept) + 64,), device=device)
            fresh = torch.unique(drawn[~held[drawn]])
            fresh = fresh[torch.randperm(len(fresh), device=device)[: count - kept]]
            rows.append(torch.cat([old, fresh]))
        else:
            rows.append(torch.randperm(within, device=device)[:count])
    return torch.stack(rows).sort(1).values.int()


class Caches:
    """Random packed caches for all points of a kind of mode, and the same rows in bf16."""

    def __init__(self, is_v4: bool) -> None:
        import torch

        if is_v4:
            self.arrays = [v4_pages(-(-(max(TOKENS) + WINDOW) // PAGE)), v4_pages(COMPRESSED // PAGE)]
            every = [torch.arange(len(pages) * PAGE, device="cuda") for pages in self.arrays]
            wide = [v4_values(pages, slots).bfloat16() for pages, slots in zip(self.arrays, every, strict=True)]
            self.bf16 = torch.cat(wide)
        else:
            self.arrays = [v32_cache(CONTEXT)]
            self.bf16 = widened(self.arrays[0])


class Inputs:
    """Queries, indices, lengths and sinks of a point."""

    def __init__(self, point: Point, caches: Caches) -> None:
        import torch

        torch.manual_seed(SEED)
        self.point, self.caches = point, caches
        self.q = torch.randn((point.t, point.h, point.head_dim), device="cuda").bfloat16()
        chosen = draw(point.mode, point.t, SELECTED[point.mode], COMPRESSED if point.is_v4 else CONTEXT)
        self.sections = [chosen]
        if point.is_v4:
            near = torch.arange(point.t, device="cuda")[:, None] + torch.arange(WINDOW, device="cuda")
            self.sections = [near.int(), chosen]
        self.indices = torch.cat(self.sections, 1)
        counts = torch.arange(1, point.t + 1, device="cuda").clamp(max=point.keys).int()
        self.lengths = counts if point.mode == "prompt" else None
        self.sinks = torch.randn(point.h, device="cuda") if point.is_v4 else None
        self.scale = 512**-0.5 if point.is_v4 else 192**-0.5

    def ours(self, dtype: str = "bfloat16") -> Callable[[], tuple[Any, Any]]:
        import torch

        from tsmla_kernels.sm90.sparse.config import workspace_shapes

        point, chosen = self.point, config(self.point, dtype)
        rows = point.t * point.h
        out = torch.empty((rows, LATENT), dtype=torch.bfloat16, device="cuda")
        lse = torch.empty((rows,), dtype=torch.float32, device="cuda")
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        workspaces = allocate(workspace_shapes(chosen, sms, point.t, point.keys))
        scales = torch.tensor([self.scale, 1.0, 1.0], device="cuda")
        q = self.q.view(rows, -1).to(getattr(torch, dtype))
        optional = [x for x in (self.lengths, self.sinks) if x is not None]
        operands = [q, *self.caches.arrays, self.indices, *optional, scales, out, lse, *workspaces]
        return launch(launcher(chosen), operands, (out.view(point.t, point.h, LATENT), lse.view(point.t, point.h)))

    def flashmla(self, peers: Any) -> Callable[[], Any]:
        import torch

        q, indices = peers.pad_heads(self.q), self.indices
        if self.point.is_v4:
            first = len(self.caches.arrays[0]) * PAGE
            indices = torch.cat([self.sections[0], self.sections[1] + first], 1)
        sinks = None
        if self.sinks is not None:
            sinks = torch.nn.functional.pad(self.sinks, (0, q.shape[1] - self.point.h))
        return peers.flashmla_prefill(q, self.caches.bf16, indices, self.scale, lengths=self.lengths, sinks=sinks)

    def widen(self, peers: Any) -> Callable[[], Any]:
        import torch

        table = torch.arange(CONTEXT // PAGE, dtype=torch.int32, device="cuda")[None]
        starts = torch.zeros(1, dtype=torch.int32, device="cuda")
        return peers.widen_v32(self.caches.arrays[0], table, starts, torch.full_like(starts, CONTEXT))

    def makers(self, peers: Any, names: list[str]) -> dict[str, Callable[[], Callable[[], Any]]]:
        """The functions to time, by peer."""
        found: dict[str, Callable[[], Callable[[], Any]]] = {OURS: self.ours}
        if not self.point.is_v4:
            found[FP8] = functools.partial(self.ours, "float8_e4m3fn")
        if "flashmla" in names:
            found["flashmla"] = functools.partial(self.flashmla, peers)
        if "vllm_c" in names and not self.point.is_v4:
            found["widen"] = functools.partial(self.widen, peers)
        return found

    def errors(self, peer: str, results: Any) -> dict[str, float]:
        """rel_err of out, in norm, on a sample of tokens; ours also lse_err, the greatest one, and own_err."""
        import torch

        if peer == "widen":
            exact = widened(self.caches.arrays[0])
            return {"rel_err": float((results.float() - exact.float()).norm() / exact.float().norm())}
        last = self.point.t - 1
        keys = {token: self._keys(token) for token in sorted({last * i // (SAMPLE - 1) for i in range(SAMPLE)})}
        find = functools.partial(errors_of, keys=keys, scale=self.scale, sinks=self.sinks)
        found = find((results[0], results[-1]), self.q, with_lse=peer == OURS)
        if peer == FP8:
            own = find(results, self.q.to(torch.float8_e4m3fn), with_lse=True)
            found |= {"own_err": own["rel_err"], "lse_err": own["lse_err"]}
        return found

    def _keys(self, token: int) -> Any:
        """What the rows hold that a token selects."""
        import torch

        slots = [section[token].long() for section in self.sections]
        if self.point.is_v4:
            return torch.cat([v4_values(x, at) for x, at in zip(self.caches.arrays, slots, strict=True)])
        return v32_values(self.caches.arrays[0].view(-1, 656)[slots[0][slots[0] >= 0]])


# ---- the processes


def measure(points: list[Point], skipped: set[tuple[str, Point]], said: Any, argv: list[str]) -> None:
    """In a process of its own, as harness.in_processes wants it."""
    import torch

    flags.FLAGS(argv)
    peers, loaded = load_peers("peers_sparse", ("flashmla", "vllm_c"))
    names = [name for name in ("flashmla", "vllm_c") if peers is not None and loaded.get(name) is True]
    caches: dict[bool, Caches] = {}
    for point in points:
        if point.is_v4 not in caches:
            caches.clear()
            caches[point.is_v4] = Caches(point.is_v4)
        inputs = Inputs(point, caches[point.is_v4])
        functions = started(inputs.makers(peers, names), point, skipped, said)
        times = time_all(functions, 10)
        rows = []
        for name, us in times.items():
            results = functions[name]()
            torch.cuda.synchronize()
            floor = {"floor_us": round(point.floor_us(name), 2)}
            rows.append({"peer": name, "us": round(us, 2)} | floor | inputs.errors(name, results))
        said.send(("rows", point, rows))
        del inputs, functions
        torch.cuda.empty_cache()


def main(argv: list[str]) -> int:
    del argv
    given = [Point.parse(each) for each in (POINTS.value or "").split("/") if each]
    points = given or list(itertools.starmap(Point, itertools.product(SELECTED, TOKENS, HEADS)))
    skipped = {(name, Point.parse(rest)) for name, _, rest in (x.partition(",") for x in SKIP.value.split("/") if x)}
    kinds = [(point, "bfloat16") for point in points] + [(p, "float8_e4m3fn") for p in points if not p.is_v4]
    compile_all(("sparse_mla", config(*kind)) for kind in kinds)
    record, ratios = Record(dtype="bf16", page=PAGE), {OURS: [], FP8: []}
    for point, rows in in_processes(measure, points, skipped):
        for row in rows:
            record.add(mode=point.mode, length=point.t, h=point.h, keys=point.keys, **row)
        times = {row["peer"]: row["us"] for row in rows}
        said = " ".join(f"{row['peer']} {row['us']:.1f} ({row['rel_err']:.1e})" for row in rows)
        for name, found in ratios.items():
            if {name, "flashmla"} <= times.keys():
                found.append(times[name] / times["flashmla"])
                said += f"  {name} x{found[-1]:.2f}"
        print(f"{point.mode:9s}{point.t:5d} {point.h:3d} floor {point.floor_us(OURS):6.1f} {said}", flush=True)
    print_ratios({f"{name} over flashmla": found for name, found in ratios.items()})
    return 0


if __name__ == "__main__":
    app.run(main)
