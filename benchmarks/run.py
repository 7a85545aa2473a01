"""Run a benchmark of kernels on this machine's GPU, beside every peer at hand.

    python -m benchmarks.run CASE --out FILE.json [--peers DIR] [--points 1,1,16,4096,fixed/...] [--seconds 500]
    python -m benchmarks.run --list

A case bears the name of its record, and its file says what it measures. Unless the file says otherwise, ours is the
public operation on torch tensors, and times are medians of CUDA-graph replays, interleaved over all functions of a
point, with the L2 cache flushed before each. A peer may end its process with an illegal access: so the points run in a
process of their own, and if that ends, another one runs the points left, without that peer at that point.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from absl import app, flags

from benchmarks import harness, peers
from benchmarks.cases import CASES, case

LIST = flags.DEFINE_bool("list", False, "say what can run here")
SKIP = flags.DEFINE_string("skip", "", "points of peers to leave out, as flashmla,v32,128,2,64, separated by /")


def measure(points: list[Any], skipped: set[tuple[str, Any]], said: Any, argv: list[str]) -> None:
    """Measure points and send their rows, in a process that harness.in_processes has made."""
    kind = case(flags.FLAGS(argv)[1])
    for point in points:
        rows = kind(point).rows(skipped, lambda name, point=point: said.send(("at", name, point)))
        said.send(("rows", point, rows))
        torch.cuda.empty_cache()


def show_list() -> None:
    """Print for each case which of ours and the peers can run here, and what each of the others lacks."""
    for name in CASES:
        try:
            reasons = {harness.OURS: peers.no_gpu()}
            reasons |= {peer: peers.why_not(library) for peer, library in case(name).peers.items()}
        except ImportError as error:
            reasons = {harness.OURS: str(error)}
        print(f"{name}: {', '.join(peer for peer, reason in reasons.items() if reason is None) or 'nothing'}")
        for peer, reason in reasons.items():
            if reason is not None:
                print(f"    without {peer}: {reason}")


def compared(kind: type[harness.Case], rows: list[dict[str, Any]]) -> tuple[str, float]:
    """A point's times as text, and our time over `Case.best_peer`; NaN if either is missing. If a function has several
    rows, the first counts."""
    us: dict[str, float] = {}
    for row in rows:
        us.setdefault(row.get("peer", harness.OURS), row["us"])
    us |= {"copy": rows[-1]["copy_us"]} if "copy_us" in rows[-1] else {}
    best = kind.best_peer(us)
    ratio = us[harness.OURS] / best if best is not None and harness.OURS in us else math.nan
    return "  ".join(f"{name} {time:.1f}" for name, time in us.items()), ratio


def main(argv: list[str]) -> int:
    if LIST.value:
        show_list()
        return 0
    if len(argv) != 2 or argv[1] not in CASES:
        raise app.UsageError(f"CASE: got {' '.join(argv[1:]) or 'none'}; legal: {', '.join(CASES)}")
    kind = case(argv[1])
    texts = harness.POINTS.value.split("/") if harness.POINTS.value else ()
    points = [kind.parse(text) for text in texts] or list(kind.points)
    skipped = {(peer, kind.parse(rest)) for peer, _, rest in (x.partition(",") for x in SKIP.value.split("/") if x)}
    harness.compile_all(wanted for point in points for wanted in kind.objects(point))
    record, ratios = harness.Record(**kind.common), []
    for point, rows in harness.in_processes(measure, points, skipped, kind.patience):
        for row in rows:
            record.add(**row)
        said, ratio = compared(kind, rows)
        ratios += [] if math.isnan(ratio) else [ratio]
        print(f"{kind.text(point)}: {said}" + ("" if math.isnan(ratio) else f"  x{ratio:.2f}"), flush=True)
    if ratios:
        mean = statistics.geometric_mean(ratios)
        print(f"over the best peer: geometric mean of {len(ratios)} points {mean:.3f}, worst {max(ratios):.3f}")
    return 0 if record.rows else 1


if __name__ == "__main__":
    app.run(main)
