"""Time the Hopper kernel of sparse_mla against every peer at hand, and against the floor, on one GPU in one run.

    python3 benchmarks/sparse_mla.py --peers DIR --out FILE.json [--points v32,8,1,16/...] [--seconds 500]
        [--skip flashmla,v32,128,2,64/...]

DIR holds a module `peers_sparse` with `load(names)`, `flashmla_v32`, `flashmla_v4`, `legacy_v32`, `legacy_v4` and
`fa3_sparse`, and a module `peers` with `load()`; without DIR ours runs alone. A point is a mode, requests B, query
tokens a request S and heads H. Mode v32: 2048 slots of packed V3.2 rows; v4-512 and v4-1024: a window of 128 and as
many compressed slots of V4 pages, with sinks. FlashMLA and SGLang's kernels ("legacy") get queries of 64 or 128 heads,
padded beforehand; FA3 reads the same values as a bf16 cache of pages of one token. Slots are random ones of a request.

All functions of a point are timed interleaved, as CUDA-graph replays with the L2 cache flushed before each, medians;
ours is the compiled object, launched on torch's stream. Errors are against float64 over what the packed rows hold, on
the first and the last token. A peer may end the process with an illegal access, so a process of its own runs the
points, and another one the points that are left, without that peer at that point. Rows go to FILE.json.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from absl import app, flags
from compiling import compile_all
from floors import BYTES_PER_S, FLOPS_PER_S
from harness import ARCH, POINTS, Record, allocate, in_processes, launch, load_peers, print_ratios, started, time_all

SKIP = flags.DEFINE_string("skip", "", "points of peers to leave out, separated by /")

PAGE, LATENT = 64, 512
DATA_BYTES, ROWS_BYTES, PAGE_BYTES = PAGE * 576, PAGE * 584, 37440
"""Of a V4 page: its data, its data and scales, and all of it."""
CONTEXT = 32768  # slots of a request that V3.2's are drawn from
WINDOW, WINDOW_PAGES, COMPRESSED = 128, 4, 8192
HEADS, TOKENS, BATCHES = (8, 16, 64, 128), (1, 2, 4), (1, 8, 32, 64, 128)
MODES = {"v32": 2048, "v4-512": 512, "v4-1024": 1024}
"""The slots of each mode, the window's apart."""


class Point(NamedTuple):
    mode: str
    b: int
    s: int
    h: int

    @property
    def is_v4(self) -> bool:
        return self.mode != "v32"

    @property
    def tokens(self) -> int:
        return self.b * self.s

    @property
    def keys(self) -> int:
        """Slots of a token."""
        return MODES[self.mode] + WINDOW * self.is_v4

    @property
    def head_dim(self) -> int:
        return 512 if self.is_v4 else 576

    @property
    def floor_us(self) -> float:
        pairs, row = self.tokens * self.keys, 584 if self.is_v4 else 656
        moved = pairs * (row + 4) + self.tokens * self.h * (self.head_dim + LATENT) * 2
        flops = 2 * pairs * self.h * (self.head_dim + LATENT)
        return max(flops / FLOPS_PER_S["bf16"], moved / BYTES_PER_S) * 1e6

    @classmethod
    def parse(cls, text: str) -> Point:
        mode, *sizes = text.split(",")
        return cls(mode, *map(int, sizes))


# ---- our kernel


def config(point: Point) -> Any:
    from tsmla_kernels.catalog import SPARSE_MLA

    options = {"num_heads": str(point.h), "page_size": str(PAGE), "num_tokens": str(point.tokens)}
    if point.is_v4:
        options |= {"layout": "v4", "window": str(WINDOW), "sinks": "true"}
    return SPARSE_MLA.from_options(options)


@functools.cache
def launcher(wanted: Any) -> Any:
    from tsmla_kernels.catalog import SPARSE_MLA
    from tsmla_kernels.launch import Launcher

    return Launcher(SPARSE_MLA, wanted, ARCH)


# ---- inputs


def e4m3_bytes(rows: int, width: int) -> Any:
    """Random numbers of e4m3, of size 64, as bytes."""
    import torch

    values = torch.randn(rows, width, device="cuda") * 64
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def v32_cache(rows: int) -> Any:
    """Random V3.2 rows, [rows / PAGE, PAGE, 656]."""
    import torch

    packed = torch.empty((rows, 656), dtype=torch.uint8, device="cuda")
    for part in packed.split(1 << 20):
        part[:, :512] = e4m3_bytes(len(part), 512)
        scales = torch.exp2(torch.randint(-8, -4, (len(part), 4), device="cuda").float())
        part[:, 512:528] = scales.view(torch.uint8)
        part[:, 528:] = torch.randn(len(part), 64, device="cuda").bfloat16().view(torch.uint8)
    return packed.view(-1, PAGE, 656)


def v4_pages(count: int) -> Any:
    """Random V4 pages, [count, PAGE_BYTES]."""
    import torch

    pages = torch.zeros((count, PAGE_BYTES), dtype=torch.uint8, device="cuda")
    data = pages[:, :DATA_BYTES].unflatten(1, (PAGE, 576))
    data[..., :448] = e4m3_bytes(count * PAGE, 448).view(count, PAGE, 448)
    data[..., 448:] = torch.randn(count, PAGE, 64, device="cuda").bfloat16().view(torch.uint8)
    pages[:, DATA_BYTES:ROWS_BYTES] = torch.randint(119, 123, (count, PAGE * 8), dtype=torch.uint8, device="cuda")
    return pages


def widened(packed: Any) -> Any:
    """What V3.2 rows [P, Z, 656] hold as bf16, [P * Z, 576]."""
    import torch

    packed = packed.view(-1, 656)
    rows = torch.empty((len(packed), 576), dtype=torch.bfloat16, device="cuda")
    for part, narrow in zip(rows.split(1 << 18), packed.split(1 << 18), strict=True):
        part.copy_(v32_values(narrow))
    return rows


class Caches:
    """Random packed caches for all points of a kind of mode: for V4 the window's and the compressed one."""

    def __init__(self, is_v4: bool) -> None:
        self.is_v4 = is_v4
        batch = max(BATCHES)
        self.bf16 = None
        if is_v4:
            self.arrays = [v4_pages(batch * WINDOW_PAGES), v4_pages(batch * COMPRESSED // PAGE)]
        else:
            self.arrays = [v32_cache(batch * CONTEXT)]

    def as_bf16(self) -> Any:
        """The rows [N, 576] of V3.2's cache in bf16."""
        if self.bf16 is None:
            self.bf16 = widened(self.arrays[0])
        return self.bf16


def v32_values(rows: Any) -> Any:
    """What V3.2 rows [n, 656] hold, [n, 576] float32; exact, as scales are powers of two."""
    import torch

    latent = rows[:, :512].view(torch.float8_e4m3fn).float().view(-1, 4, 128)
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    rope = rows[:, 528:].contiguous().view(torch.bfloat16).float()
    return torch.cat([(latent * scales[..., None]).view(-1, 512), rope], 1)


def v4_values(pages: Any, slots: Any) -> Any:
    """What the rows of V4 slots [n] hold, [n, 512] float32."""
    import torch

    page, offset = slots // PAGE, slots % PAGE
    data = pages[:, :DATA_BYTES].unflatten(1, (PAGE, 576))[page, offset]
    exponents = pages[:, DATA_BYTES:ROWS_BYTES].unflatten(1, (PAGE, 8))[page, offset]
    factors = torch.exp2(exponents[:, :7].float() - 127)
    nope = data[:, :448].contiguous().view(torch.float8_e4m3fn).float().view(-1, 7, 64) * factors[..., None]
    return torch.cat([nope.view(-1, 448), data[:, 448:].contiguous().view(torch.bfloat16).float()], 1)


def errors_of(
    results: tuple[Any, Any], q: Any, keys: dict[int, Any], scale: float, sinks: Any, *, with_lse: bool
) -> dict[str, float]:
    """rel_err of out (norm) and, with_lse, lse_err, the greatest one, against float64 on the tokens of `keys`, which
    has the rows that each of them selects. `results` may have more heads than q [T, H, D]."""
    import torch

    differs, norm, worst = 0.0, 0.0, 0.0
    out, lse = results
    out = out.reshape(len(q), -1, LATENT)[:, : q.shape[1]]
    for token, rows in keys.items():
        rows = rows.double()
        scores = q[token].double() @ rows.T * scale
        want_lse = torch.logsumexp(scores, -1)
        want = torch.softmax(scores, -1) @ rows[:, :LATENT]
        if sinks is not None:
            want *= torch.sigmoid(want_lse - sinks.double())[:, None]
        differs += float((out[token].double() - want).square().sum())
        norm += float(want.square().sum())
        if with_lse:
            worst = max(worst, float((lse[token].double() - want_lse).abs().max()))
    found = {"rel_err": float(f"{math.sqrt(differs / norm):.3e}")}
    return found | ({"lse_err": float(f"{worst:.2e}")} if with_lse else {})


class Inputs:
    """Queries, indices and sinks of a point."""

    def __init__(self, point: Point, caches: Caches) -> None:
        import torch

        self.point, self.caches = point, caches
        b, s, h = point.b, point.s, point.h
        self.q = torch.randn((b * s, h, point.head_dim), device="cuda").bfloat16()
        request = torch.arange(b, device="cuda").repeat_interleave(s)[:, None]
        if point.is_v4:
            within = WINDOW_PAGES * PAGE
            first = torch.randint(0, within - WINDOW, (b * s, 1), device="cuda")
            near = request * within + first + torch.arange(WINDOW, device="cuda")
            self.sections = [near.int(), self._drawn(request, COMPRESSED)]
        else:
            self.sections = [self._drawn(request, CONTEXT)]
        self.indices = torch.cat(self.sections, 1)
        self.sinks = torch.randn(h, device="cuda") if point.is_v4 else None
        self.scale = 512**-0.5 if point.is_v4 else 192**-0.5

    def _drawn(self, request: Any, within: int) -> Any:
        """Different slots of each token's request, [T, K]."""
        import torch

        count = MODES[self.point.mode]
        rows = [torch.randperm(within, device="cuda")[:count] for _ in range(len(request))]
        return (torch.stack(rows) + request * within).int()

    def ours(self) -> Callable[[], tuple[Any, Any]]:
        import torch

        from tsmla_kernels.sm90.sparse.config import workspace_shapes

        point, chosen = self.point, config(self.point)
        rows = point.tokens * point.h
        out = torch.empty((rows, LATENT), dtype=torch.bfloat16, device="cuda")
        lse = torch.empty((rows,), dtype=torch.float32, device="cuda")
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        workspaces = allocate(workspace_shapes(chosen, sms, point.tokens, point.keys))
        scales = torch.tensor([self.scale, 1.0, 1.0], device="cuda")
        inputs = [self.q.view(rows, -1), *self.caches.arrays, self.indices]
        inputs += [] if self.sinks is None else [self.sinks]
        results = (out.view(point.tokens, point.h, LATENT), lse.view(point.tokens, point.h))
        return launch(launcher(chosen), [*inputs, scales, out, lse, *workspaces], results)

    def of_peer(self, peers: Any, name: str) -> Callable[[], tuple[Any, Any]]:
        import torch

        point = self.point
        if name == "fa3":
            counts = torch.full((point.tokens,), point.keys, dtype=torch.int32, device="cuda")
            return peers.fa3_sparse(self.q, self.caches.as_bf16(), self.indices, counts, self.scale)
        shape = (point.b, point.s)
        q = peers.pad_heads(self.q).view(*shape, -1, point.head_dim)
        sections = [x.view(*shape, -1).contiguous() for x in self.sections]
        if not point.is_v4:
            return getattr(peers, f"{name}_v32")(q, self.caches.arrays[0], sections[0], self.scale)
        sinks = torch.nn.functional.pad(self.sinks, (0, q.shape[2] - point.h))
        near, far = self.caches.arrays
        return getattr(peers, f"{name}_v4")(
            q, near, PAGE, sections[0], self.scale, sinks=sinks, extra=far, extra_z=PAGE, extra_indices=sections[1]
        )

    def errors(self, results: tuple[Any, Any], ours: bool) -> dict[str, float]:
        """errors_of on the first and the last token."""
        keys = {token: self._keys(token) for token in {0, self.point.tokens - 1}}
        return errors_of(results, self.q, keys, self.scale, self.sinks, with_lse=ours)

    def _keys(self, token: int) -> Any:
        import torch

        slots = [section[token].long() for section in self.sections]
        if self.point.is_v4:
            return torch.cat([v4_values(x, at) for x, at in zip(self.caches.arrays, slots, strict=True)])
        return v32_values(self.caches.arrays[0].view(-1, 656)[slots[0]])


# ---- the processes


def peers_at_hand() -> tuple[Any, list[str]]:
    """The module of peers and the names of those that loaded."""
    peers, loaded = load_peers("peers_sparse", ("flashmla", "legacy"))
    if peers is None:
        return None, []
    names = [name for name in ("flashmla", "legacy") if loaded.get(name) is True]
    return peers, names + (["fa3"] if "fa3" in load_peers()[1] else [])


def measure(points: list[Point], skipped: set[tuple[str, Point]], said: Any, argv: list[str]) -> None:
    """In a process of its own: put ("at", peer, point) before each function's first run, and ("rows", point, rows)
    after each point, into `said`, a pipe's end."""
    import torch

    flags.FLAGS(argv)
    peers, names = peers_at_hand()
    caches: dict[bool, Caches] = {}
    for point in points:
        if point.is_v4 not in caches:
            caches[point.is_v4] = Caches(point.is_v4)
        inputs = Inputs(point, caches[point.is_v4])
        makers = {
            name: functools.partial(inputs.of_peer, peers, name)
            for name in names
            if not (name == "fa3" and point.is_v4)
        }
        functions = started({"tsmla": inputs.ours, **makers}, point, skipped, said)
        times = time_all(functions, 20 if point.floor_us < 200 else 10)
        rows = []
        for name, us in times.items():
            results = functions[name]()
            torch.cuda.synchronize()
            rows.append({"peer": name, "us": round(us, 2)} | inputs.errors(results, name == "tsmla"))
        said.send(("rows", point, rows))
        del inputs, functions


def points_of(text: str) -> list[Point]:
    return [Point.parse(each) for each in text.split("/") if each]


def main(argv: list[str]) -> int:
    del argv
    points = points_of(POINTS.value or "") or [
        Point(mode, b, s, h) for b, mode, h, s in itertools.product(BATCHES, MODES, HEADS, TOKENS)
    ]
    skipped = {(name, Point.parse(rest)) for name, _, rest in (x.partition(",") for x in SKIP.value.split("/") if x)}
    compile_all(("sparse_mla", config(point)) for point in points if ("tsmla", point) not in skipped)
    record, ratios = Record(dtype="bf16", page=PAGE, varlen=False), {"packed": [], "fa3": []}
    for point, rows in in_processes(measure, points, skipped):
        case = {"b": point.b, "s": point.s, "h": point.h, "keys": point.keys, "mode": point.mode}
        for row in rows:
            record.add(**case, floor_us=round(point.floor_us, 2), **row)
        times = {row["peer"]: row["us"] for row in rows}
        packed = [us for name, us in times.items() if name in ("flashmla", "legacy") and "tsmla" in times]
        said = " ".join(f"{row['peer']} {row['us']:.1f} ({row['rel_err']:.1e})" for row in rows)
        if packed:
            ratios["packed"].append(times["tsmla"] / min(packed))
            said += f"  x{ratios['packed'][-1]:.2f}"
        if {"fa3", "tsmla"} <= times.keys():
            ratios["fa3"].append(times["tsmla"] / times["fa3"])
            said += f"  fa3 x{ratios['fa3'][-1]:.2f}"
        print(f"{point.mode:8s}{point.b:4d} {point.s} {point.h:3d} floor {point.floor_us:6.1f} {said}", flush=True)
    print_ratios(ratios)
    return 0


if __name__ == "__main__":
    app.run(main)
