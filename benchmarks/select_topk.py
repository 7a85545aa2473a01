"""Time the Hopper top-k kernel against every peer at hand, and against reading the logits once, on one GPU in one run.

    python3 benchmarks/select_topk.py --peers DIR --out FILE.json [--points 64,131072/...] [--seconds 500]

DIR holds a module `peers_sparse` with `load()`, `vllm_cooperative` (of up to 32 rows), `vllm_persistent`, `vllm_rows`
and `sgl_fast_topk`: each takes logits and lengths, and returns a function without arguments; without DIR ours runs
alone. All functions of a point (rows, columns) are timed interleaved, as CUDA-graph replays with the L2 cache flushed
before each, medians; ours is the compiled object, launched on torch's stream, and checked against torch on every row
first. The peers write positions in any order, ours ascending (mode "position") or by value (mode "value"). Modes
"equal" and "halfzero" are ours by position: rows of one value, and rows with zeros in their lower half. Rows go to
FILE.json.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from absl import app
from compiling import compile_all
from floors import BYTES_PER_S
from harness import ARCH, POINTS, Record, launch, load_peers, print_ratios, time_all, within_budget

ROWS, COLUMNS, K = (1, 8, 64, 128, 4096), (8192, 32768, 131072), 2048
MODES = {"position": "position", "value": "value", "equal": "position", "halfzero": "position"}
"""Order of the indices in each mode."""
PEERS = {
    "vllm_cooperative": ("vllm_cooperative", 32),
    "vllm_persistent": ("vllm_persistent", math.inf),
    "vllm_rows": ("vllm_rows", math.inf),
    "sgl": ("sgl_fast_topk", math.inf),
}
"""Name of each peer's function, and the most rows that it takes."""
CHECKED_ELEMENTS = 1 << 26  # at once


def config(rows: int, columns: int, mode: str) -> Any:
    """The configuration of our kernel for a point."""
    from tsmla_kernels.contract.sparse import TopKSpec
    from tsmla_kernels.sm90.topk.config import topk_config

    return topk_config(TopKSpec(rows, columns, K, MODES[mode]))


def logits_of(rows: int, columns: int, mode: str) -> Any:
    """Logits [rows, columns] f32 of a mode."""
    import torch

    logits = torch.empty(rows, columns, device="cuda")
    if mode == "equal":
        return logits.fill_(1.0)
    logits.normal_()
    return logits.clamp_(min=0) if mode == "halfzero" else logits


def ours(logits: Any, lengths: Any, mode: str) -> Callable[[], Any]:
    """The launch of our kernel, which returns the indices."""
    import torch

    from tsmla_kernels.catalog import SELECT_TOPK
    from tsmla_kernels.launch import Launcher

    launcher = Launcher(SELECT_TOPK, config(*logits.shape, mode), ARCH)
    indices = torch.empty(logits.shape[0], K, dtype=torch.int32, device="cuda")
    return launch(launcher, [logits, lengths, indices], indices)


def check(run: Callable[[], Any], logits: Any, mode: str) -> None:
    """AssertionError unless the indices are the exact ones: ties by position, in the mode's order."""
    import torch

    indices = run().long()
    columns = torch.arange(logits.shape[1], device="cuda")
    step = max(1, CHECKED_ELEMENTS // logits.shape[1])
    for part, got in zip(logits.split(step), indices.split(step), strict=True):
        bits = (part + 0.0).view(torch.int32).long()
        # Ascending with the floats; unique, and greater for the lower of two positions that tie.
        keys = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits) * (1 << 31) - columns
        want = torch.topk(keys, K).indices
        if MODES[mode] == "position":
            want = want.sort().values
        assert torch.equal(got, want), f"wrong indices at {tuple(logits.shape)}, mode {mode}"


def functions_of(rows: int, columns: int, peers: Any) -> dict[tuple[str, str], Callable[[], Any]]:
    """The functions of a point by (peer, mode), ours checked; they keep their operands alive."""
    import torch

    functions: dict[tuple[str, str], Callable[[], Any]] = {}
    lengths = torch.full((rows,), columns, dtype=torch.int32, device="cuda")
    random = logits_of(rows, columns, "position")
    for mode in MODES:
        logits = random if mode in ("position", "value") else logits_of(rows, columns, mode)
        functions["tsmla", mode] = ours(logits, lengths, mode)
        check(functions["tsmla", mode], logits, mode)
    for name, (function, most_rows) in PEERS.items() if peers else ():
        if rows <= most_rows:
            try:
                run = getattr(peers, function)(random, lengths)
                run()
                torch.cuda.synchronize()
                functions[name, "position"] = run
            except Exception as error:
                print(f"{name} failed at {rows}, {columns}: {type(error).__name__}: {str(error)[:120]}")
    return functions


def main(argv: list[str]) -> int:
    del argv
    points = list(itertools.product(ROWS, COLUMNS))
    if POINTS.value:
        points = [(int(rows), int(columns)) for rows, columns in (p.split(",") for p in POINTS.value.split("/"))]
    compile_all(("select_topk", config(*point, mode)) for point in points for mode in MODES)
    peers, _ = load_peers("peers_sparse")
    record, ratios = Record(k=K), []
    for rows, columns in within_budget(points):
        functions = functions_of(rows, columns, peers)
        named = {f"{peer} {mode}": run for (peer, mode), run in functions.items()}
        times = time_all(named, 20 if rows * columns < 1 << 27 else 10)
        floor = rows * (columns + K) * 4 / BYTES_PER_S * 1e6
        for (peer, mode), us in zip(functions, times.values(), strict=True):
            case = {"b": rows, "keys": columns, "mode": mode, "floor_us": round(floor, 2)}
            record.add(**case, peer=peer, us=round(us, 2))
        said = " ".join(f"{name} {us:.1f}" for name, us in times.items())
        best = min((us for name, us in times.items() if not name.startswith("tsmla")), default=math.nan)
        ratios.append(times["tsmla position"] / best)
        print(f"{rows:5d} {columns:6d} floor {floor:6.1f} {said}  x{ratios[-1]:.2f}", flush=True)
        del functions, named
    print_ratios({"over the best peer": ratios})
    return 0


if __name__ == "__main__":
    app.run(main)
