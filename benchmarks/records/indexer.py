"""Records of the indexer: its logits, the top-k of them, and both as one operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks import plots
from benchmarks.plots import Mark, Style, chart
from benchmarks.table import (
    FLOOR,
    OF_FLOOR,
    OURS,
    Column,
    Loaded,
    Panel,
    Point,
    Record,
    mean_and_worst,
    our_time,
    over,
    provenance,
    time,
    whole,
)

TOPK = {"vllm_cooperative": "vLLM, cooperative", "vllm_persistent": "vLLM, persistent", "vllm_rows": "vLLM, rows",
        "sgl": "SGLang"}  # fmt: skip
TOPK_MODES = {"value": "by value", "equal": "equal rows", "halfzero": "half zeros"}
"""Times of ours alone, beside those of ascending positions."""
NAME: Column = "B, S, keys", lambda p: f"{p['b']}, {p['s']}, {p['keys']}" + ", prefill" * (p["mode"] == "prefill")
KEY = ("mode", "b", "s", "keys")


def by_keys(ratio: Callable[[Point], float | None], label: str) -> plots.Draw:
    """A panel for each number of requests of a decode step, and one for prefill; a line a number of query tokens."""

    def marks(loaded: Loaded) -> Iterator[Mark]:
        for p in sorted(loaded.points, key=lambda point: point.key):
            if (found := ratio(p)) is not None:
                yield Mark(f"{p['mode']}, B = {p['b']}", f"S = {p['s']}", p["keys"], found)

    return chart(marks, Style(label, "keys of a request", x_name=thousands, width=(2, 1.8)))


def thousands(keys: int) -> str:
    return f"{keys // 1024}k"


def indexer_record(
    name: str, title: str, key: tuple[str, ...], caption: Callable[[Loaded], str],
    columns: Callable[[Loaded], Sequence[Column]], relative: tuple[str, plots.Draw],
    best: tuple[str, Callable[[Point], float | None]], peer: Callable[..., str] = lambda row: row["peer"],
) -> Record:  # fmt: skip
    """A record whose short page has a caption and a plot. best: the floors' title, and the time of the best peer."""
    panels = (
        Panel(f"{name}_relative", relative[0], relative[1], shown=True),
        Panel(f"{name}_floor", "time by the floor of the bytes and operations",
              plots.floors(lambda _: best[0], best[1])),
    )  # fmt: skip
    return Record(name, title, key, caption, whole(columns), panels=panels, unit="Microseconds. ", peer=peer)


def logits() -> Record:
    def caption(loaded: Loaded) -> str:
        ratios = mean_and_worst(point.ratio(OURS, "deep_gemm") for point in loaded.points)
        said = f"tsmla's time over DeepGEMM's {ratios}, geometric mean. 64 heads of 128, e4m3. "
        return said + provenance(loaded.rows)

    def peer(point: Point) -> float | None:
        return point.us("deep_gemm")

    columns = (NAME, FLOOR, time("DeepGEMM", "deep_gemm"), our_time(), over("/ DeepGEMM", OURS, "deep_gemm"), OF_FLOOR)
    draw = by_keys(lambda point: point.ratio(OURS, "deep_gemm"), "time / DeepGEMM's")
    return indexer_record(
        "indexer_logits", "The indexer's logits", KEY, caption, lambda _: columns,
        ("time of the indexer's logits over DeepGEMM's", draw), ("decode and prefill", peer),
    )  # fmt: skip


def topk() -> Record:
    def caption(loaded: Loaded) -> str:
        ratios = mean_and_worst(point.ratio(OURS, *TOPK) for point in loaded.points)
        said = (
            f"tsmla's time over the best peer's {ratios}, geometric mean. The {loaded.rows[0]['k']} largest, ours in "
        )
        return f"{said}ascending positions. {provenance(loaded.rows)}"

    def marks(loaded: Loaded) -> Iterator[Mark]:
        for point in sorted(loaded.points, key=lambda point: point.key):
            if (ratio := point.ratio(OURS, *TOPK)) is not None:
                rows = point["b"]
                yield Mark("", f"{rows} row" + "s" * (rows > 1), point["keys"], ratio)

    name: Column = "rows x keys", lambda point: f"{point['b']} x {point['keys']}"
    columns = (name, FLOOR, *(time(title, peer) for peer, title in TOPK.items()), our_time(),
               over("/ best peer", OURS, *TOPK), *(time(name, mode) for mode, name in TOPK_MODES.items()))  # fmt: skip
    style = Style("time / best peer's", "keys of a row", x_name=thousands, width=(7, 0))
    return indexer_record(
        "select_topk", "Top-k", ("b", "keys"), caption, lambda _: columns,
        ("time of top-k over the best peer's", chart(marks, style)), ("top 2048", lambda point: point.best(*TOPK)),
        peer=lambda row: row["peer"] if row["mode"] == "position" else row["mode"],
    )  # fmt: skip


def peers_sum(point: Point) -> float | None:
    """DeepGEMM's time and the fastest top-k's, each alone."""
    score, best = point.us("deep_gemm"), point.best(*TOPK)
    return score + best if score is not None and best is not None else None


def over_sum(point: Point) -> float | None:
    ours, theirs = point.us(OURS), peers_sum(point)
    return ours / theirs if ours and theirs else None


def selection() -> Record:
    def columns(loaded: Loaded) -> Sequence[Column]:
        peers = {peer for point in loaded.points for peer in point.rows}
        sizes = sorted(int(peer.removeprefix("tsmla_")) for peer in peers if peer.removeprefix("tsmla_").isdigit())
        return (
            NAME, FLOOR, ("DeepGEMM, top-k", lambda p: f"{us:.1f}" if (us := peers_sum(p)) else "-"),
            time("two kernels", "tsmla_two"), our_time(),
            ("/ DeepGEMM, top-k", lambda p: f"{ratio:.2f}" if (ratio := over_sum(p)) else "-"),
            over("/ two kernels", OURS, "tsmla_two"), *(time(f"{size} MiB", f"tsmla_{size}") for size in sizes),
        )  # fmt: skip

    def caption(loaded: Loaded) -> str:
        points, first = loaded.points, loaded.rows[0]
        said = (
            f"tsmla's time over the sum of DeepGEMM's and the fastest top-k's {mean_and_worst(map(over_sum, points))}, "
        )
        if one := mean_and_worst(over_sum(point) for point in points if point["s"] == 1):
            said += f"with one token a request {one}, "
        said += "over our two kernels one after the other, which are given the rows' lengths and keep all logits, "
        said += (
            f"{mean_and_worst(point.ratio(OURS, 'tsmla_two') for point in points)}, geometric means. The {first['k']} "
        )
        return f"{said}largest of {first['h']} heads of 128, e4m3. {provenance(loaded.rows)}"

    draw = by_keys(over_sum, "time / DeepGEMM's and top-k's")
    return indexer_record(
        "indexer_topk", "The indexer's selection", KEY, caption, columns,
        ("time of indexer_topk over the peers'", draw), ("logits and top-k", peers_sum),
    )  # fmt: skip


RECORDS = (logits(), topk(), selection())
