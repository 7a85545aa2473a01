"""Time indexer_topk on Hopper beside our two kernels, and beside DeepGEMM and the engines' top-k, on one GPU.

    python3 benchmarks/indexer_topk.py --peers DIR --out FILE.json [--points 64,4,131072/prefill,4096,8192/...]
        [--workspaces 32,64,128,256]

DIR is that of indexer_logits.py and of select_topk.py; without DIR ours runs alone. Points, operands and timing are
those of indexer_logits.py: requests, query tokens of each, keys of each, 64 heads of 128, packed keys in pages of 64;
2,048 keys are selected, in order of position. Functions of a point, all in one run:

    tsmla           tsmla_bridge.indexer_topk, with the workspace of the library; tsmla_32 and so on with one of as many
                    MiB, of --workspaces
    tsmla_two       our two kernels one after the other, all logits in memory; the lengths of rows are given
    tsmla_logits    the first of the two alone
    deep_gemm, and vllm_cooperative, vllm_persistent, vllm_rows and sgl on rows of its logits: what is compared is
                    deep_gemm's time and the least of theirs, each timed alone

Ours are compared with each other first: the positions must be equal. Rows go to FILE.json.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import indexer_logits
import select_topk
from absl import app, flags
from compiling import compile_all
from harness import ARCH, POINTS, Record, launch, load_peers, print_ratios, time_all, within_budget
from indexer_logits import HEADS, PAGE, Operands, Point

WORKSPACES = flags.DEFINE_string("workspaces", "", "MiB of further workspaces to time, separated by commas")
K = select_topk.K


def spec(point: Point) -> Any:
    """The spec of the call of a point, as the library makes it."""
    from tsmla_kernels.contract.layouts import IndexerCacheSpec
    from tsmla_kernels.contract.sparse import IndexerLogitsSpec, IndexerTopkSpec

    cache = IndexerCacheSpec(1, PAGE, indexer_logits.DIM, True)
    sizes = point.requests * point.tokens, point.requests, HEADS, indexer_logits.DIM, point.keys // PAGE
    return IndexerTopkSpec(IndexerLogitsSpec(*sizes, cache, point.tokens > 1, "float8_e4m3fn", "float32", "uint8"), K)


@functools.cache
def workspaces() -> dict[str, int]:
    """Bytes of each form of ours, by its name, as they are before the first of them is timed."""
    from tsmla_kernels.sm90.topk import chunks

    more = [int(text) for text in WORKSPACES.value.split(",") if text]
    return {"tsmla": chunks.WORKSPACE_BYTES} | {f"tsmla_{size}": size << 20 for size in more}


def configs(points: list[Point]) -> list[tuple[str, Any]]:
    """(kernel's name, configuration) of all that ours launches."""
    from tsmla_kernels.sm90.topk import chunks
    from tsmla_kernels.sm90.topk.config import topk_config

    wanted: list[tuple[str, Any]] = []
    for point in points:
        call = spec(point)
        scoring = (indexer_logits.config(point), chunks.chunks_of(call).logits)
        wanted += [("indexer_logits", config) for config in scoring]
        wanted.append(("select_topk", topk_config(call.topk)))
        for size in workspaces().values():
            wanted.append(("select_topk", chunks.chunks_of(call, workspace=size).topk))
    return list(dict.fromkeys(wanted))


def fused(point: Point, operands: Operands, size: int) -> Callable[[], Any]:
    """indexer_topk by the kernels, with chunks of `size` bytes of logits."""
    import torch

    import tsmla_bridge
    from tsmla_kernels.sm90.topk import chunks

    out = torch.empty(operands.q.shape[0], K, dtype=torch.int32, device="cuda")
    offsets = operands.offsets if point.tokens > 1 else None

    def run() -> Any:
        chunks.WORKSPACE_BYTES = size
        return tsmla_bridge.indexer_topk(*operands[:5], K, cu_seqlens_q=offsets, out=out, implementation="cute")

    return run


def two_kernels(point: Point, operands: Operands) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(the launch of our logits kernel, that and the launch of our top-k on its logits, which returns positions)."""
    import torch

    from tsmla_kernels.catalog import SELECT_TOPK
    from tsmla_kernels.launch import Launcher
    from tsmla_kernels.sm90.topk.config import topk_config

    score = indexer_logits.ours(point, operands)
    logits = score()
    positions = torch.empty(logits.shape[0], K, dtype=torch.int32, device="cuda")
    launcher = Launcher(SELECT_TOPK, topk_config(spec(point).topk), ARCH)
    choose = launch(launcher, [logits, seen_of(point), positions], positions)

    def both() -> Any:
        score()
        return choose()

    return score, both


def seen_of(point: Point) -> Any:
    """Keys that each query token sees, int32 [T]."""
    import torch

    of_request = point.keys - point.tokens + 1 + torch.arange(point.tokens, dtype=torch.int32, device="cuda")
    return of_request.repeat(point.requests)


def peers_of(point: Point, operands: Operands, peers: Any) -> dict[str, Callable[[], Any]]:
    """DeepGEMM's kernel, and each top-k that runs on its logits; they keep their operands alive."""
    import torch

    score = indexer_logits.deep_gemm(point, operands, peers)
    logits, seen = score(), seen_of(point)
    functions = {"deep_gemm": score}
    for name, (function, most_rows) in select_topk.PEERS.items():
        if len(logits) <= most_rows:
            try:
                functions[name] = getattr(peers, function)(logits, seen)
                functions[name]()
                torch.cuda.synchronize()
            except Exception as error:
                functions.pop(name, None)
                print(f"{name} failed at {tuple(point)}: {type(error).__name__}: {str(error)[:120]}")
    return functions


def functions_of(point: Point, operands: Operands, peers: Any) -> dict[str, Callable[[], Any]]:
    """The functions of a point by name; AssertionError unless ours agree."""
    import torch

    functions: dict[str, Callable[[], Any]] = {}
    functions["tsmla_logits"], functions["tsmla_two"] = two_kernels(point, operands)
    want = functions["tsmla_two"]()
    for name, size in workspaces().items():
        functions[name] = fused(point, operands, size)
        assert torch.equal(functions[name](), want), f"{name} selects other keys at {tuple(point)}"
    return functions | (peers_of(point, operands, peers) if peers else {})


def main(argv: list[str]) -> int:
    del argv
    points = [Point(*sizes) for sizes in (*indexer_logits.DECODE, *indexer_logits.PREFILL)]
    if POINTS.value:
        points = [indexer_logits.point_of(text) for text in POINTS.value.split("/")]
    compile_all(configs(points))
    peers, _ = load_peers("peers_sparse")
    record, ratios = Record(h=HEADS, page=PAGE, k=K), {"tsmla_two": [], "tsmla_logits": [], "peers": []}
    for point in within_budget(points):
        operands = indexer_logits.operands_of(point)
        functions = functions_of(point, operands, peers)
        times = time_all(functions, 20 if point.floor_us < 500 else 10)
        for peer, us in times.items():
            case = {"b": point.requests, "s": point.tokens, "keys": point.keys, "mode": point.mode}
            case |= {"length": point.tokens} if point.mode == "prefill" else {}
            record.add(**case, floor_us=round(point.floor_us, 2), peer=peer, us=round(us, 2))
        best = min((times[name] for name in select_topk.PEERS if name in times), default=math.nan)
        others = {name: times[name] for name in ("tsmla_two", "tsmla_logits")}
        others["peers"] = times.get("deep_gemm", math.nan) + best
        for name, us in others.items():
            ratios[name].append(times["tsmla"] / us)
        said = " ".join(f"{name} {us:.1f}" for name, us in times.items())
        over = " ".join(f"/{name} {found[-1]:.2f}" for name, found in ratios.items())
        print(f"{tuple(point)} floor {point.floor_us:.1f} {said}  {over}", flush=True)
        del operands, functions
    print_ratios({f"over {name}": found for name, found in ratios.items()})
    return 0


if __name__ == "__main__":
    app.run(main)
