"""The figures, tables and sentences of the records of `indexer_logits.py`, `select_topk.py` and `indexer_topk.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import roofline_figures
from figure_pages import (
    drawn,
    mean_and_worst,
    number,
    provenance,
    quotient,
    reading,
    relative_times,
    table_of,
    write_part,
)

OURS = "tsmla"
TOPK_PEERS = {
    "vllm_cooperative": "vLLM, cooperative",
    "vllm_persistent": "vLLM, persistent",
    "vllm_rows": "vLLM, rows",
    "sgl": "SGLang",
}
# Times of ours alone, beside those of ascending positions.
TOPK_MODES = {"value": "by value", "equal": "equal rows", "halfzero": "half zeros"}


def write_logits(results: Path, figures: Path, page: Path) -> str:
    """Write the figure and the table of the record of `indexer_logits.py`, and the page's sentence; return it."""
    rows = json.loads(results.read_text())
    with reading(results):
        times: dict[tuple[str, int, int, int], dict[str, float]] = {}
        for row in rows:
            times.setdefault((row["mode"], row["b"], row["s"], row["keys"]), {})[row["peer"]] = float(row["us"])
        floors = {(row["mode"], row["b"], row["s"], row["keys"]): float(row["floor_us"]) for row in rows}
        lines = [
            "| B, S, keys | floor | DeepGEMM | **tsmla** | / DeepGEMM | of floor |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for point, us in times.items():
            mode, b, s, keys = point
            name = f"{b}, {s}, {keys}" + ", prefill" * (mode == "prefill")
            peer, ratio = (
                (f"{us['deep_gemm']:.1f}", f"{us[OURS] / us['deep_gemm']:.2f}") if "deep_gemm" in us else ("-", "-")
            )
            share = f"{floors[point] / us[OURS]:.0%}"
            lines.append(f"| {name} | {floors[point]:.1f} | {peer} | **{us[OURS]:.1f}** | {ratio} | {share} |")
        said = f"tsmla's time over DeepGEMM's {mean_and_worst(relative_times(times, OURS, 'deep_gemm'))}, "
        said += f"geometric mean. 64 heads of 128, e4m3. {provenance(rows)}"
        _draw_by_keys(_ratios(times, OURS, "deep_gemm"), "time / DeepGEMM's", figures / "indexer_logits_relative.png")
        measured = [(floors[point], us[OURS], us.get("deep_gemm")) for point, us in times.items()]
        roofline_figures.draw_floors({"decode and prefill": measured}, figures / "indexer_logits_floor.png")
    image = "![time of the indexer's logits over DeepGEMM's]({}indexer_logits_relative.png)"
    _write(figures, page, ("indexer_logits", "The indexer's logits"), said, image, "\n".join(lines))
    return said


Sizes = tuple[str, int, int, int]
"""Mode, requests, query tokens of each, keys of each."""


def _ratios(times: Mapping[Sizes, Mapping[str, float]], ours: str, theirs: str) -> dict[Sizes, float]:
    return {point: us[ours] / us[theirs] for point, us in times.items() if {ours, theirs} <= us.keys()}


def _draw_by_keys(ratios: Mapping[Sizes, float], label: str, path: Path) -> None:
    """A panel for each number of requests of a decode step, and one for prefill; a line a number of query tokens."""
    shown = sorted({(mode, b) for mode, b, _, _ in ratios})
    with drawn(path, (2 + 1.8 * len(shown), 3.6), len(shown)) as panels:
        for axes, (mode, b) in zip(panels, shown, strict=True):
            mine = {(s, keys): ratio for (m, n, s, keys), ratio in ratios.items() if (m, n) == (mode, b)}
            columns = sorted({keys for _, keys in mine})
            for s in sorted({s for s, _ in mine}):
                at = [keys for keys in columns if (s, keys) in mine]
                xs = [columns.index(keys) for keys in at]
                axes.plot(xs, [mine[s, keys] for keys in at], marker="o", markersize=4, linewidth=1, label=f"S = {s}")
            _key_axis(axes, columns)
            axes.set_title(f"{mode}, B = {b}", fontsize=9)
            axes.legend(frameon=False, fontsize=7, loc="lower right")
        panels[0].set_ylim(bottom=0)  # at the end: it holds the top too
        panels[0].set_ylabel(label)
        panels[0].figure.supxlabel("keys of a request", fontsize=9)


def write_topk(results: Path, figures: Path, page: Path) -> str:
    """Write the figure and the table of the record of `select_topk.py`, and the page's sentence; return it."""
    rows = json.loads(results.read_text())
    with reading(results):
        times: dict[tuple[int, int], dict[str, float]] = {}
        for row in rows:
            name = row["peer"] if row["mode"] == "position" else row["mode"]
            times.setdefault((row["b"], row["keys"]), {})[name] = float(row["us"])
        floors = {(row["b"], row["keys"]): float(row["floor_us"]) for row in rows}
        heads = ["rows x keys", "floor", *TOPK_PEERS.values(), "**tsmla**", "/ best peer", *TOPK_MODES.values()]
        lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
        for point, us in times.items():
            ratios = relative_times({"": us}, OURS, *TOPK_PEERS)
            cells = [f"{point[0]} x {point[1]}", f"{floors[point]:.1f}"]
            cells += [f"{us[peer]:.1f}" if peer in us else "-" for peer in TOPK_PEERS]
            cells += [f"**{us[OURS]:.1f}**", f"{ratios[0]:.2f}" if ratios else "-"]
            cells += [f"{us[mode]:.1f}" if mode in us else "-" for mode in TOPK_MODES]
            lines.append("| " + " | ".join(cells) + " |")
        said = f"tsmla's time over the best peer's {mean_and_worst(relative_times(times, OURS, *TOPK_PEERS))}, "
        said += f"geometric mean. The {rows[0]['k']} largest, ours in ascending positions. {provenance(rows)}"
        _draw_topk(times, figures / "select_topk_relative.png")
        best = {point: min((us[p] for p in TOPK_PEERS if p in us), default=None) for point, us in times.items()}
        measured = [(floors[point], us[OURS], best[point]) for point, us in times.items()]
        roofline_figures.draw_floors({f"top {rows[0]['k']}": measured}, figures / "select_topk_floor.png")
    image = "![time of top-k over the best peer's]({}select_topk_relative.png)"
    _write(figures, page, ("select_topk", "Top-k"), said, image, "\n".join(lines))
    return said


def _draw_topk(times: dict[tuple[int, int], dict[str, float]], path: Path) -> None:
    """A line a number of rows, by columns."""
    columns = sorted({keys for _, keys in times})
    with drawn(path, (7, 3.6), 1) as (axes,):
        for b in sorted({b for b, _ in times}):
            at = [
                (keys, relative_times({"": times[b, keys]}, OURS, *TOPK_PEERS))
                for keys in columns
                if (b, keys) in times
            ]
            points = [(columns.index(keys), ratios[0]) for keys, ratios in at if ratios]
            axes.plot(
                *zip(*points, strict=True), marker="o", markersize=4, linewidth=1, label=f"{b} row" + "s" * (b > 1)
            )
        _key_axis(axes, columns)
        axes.set_xlabel("keys of a row", fontsize=9)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("time / best peer's")
        axes.legend(frameon=False, fontsize=7, ncols=2, loc="lower right")


def _key_axis(axes: Any, columns: Sequence[int]) -> None:
    axes.axhline(1, color="0.4", linewidth=1)
    axes.set_xticks(range(len(columns)), [f"{keys // 1024}k" for keys in columns], fontsize=8)
    axes.set_xlim(-0.4, len(columns) - 0.6)


def write_indexer_topk(results: Path, figures: Path, page: Path) -> str:
    """Write the figure and the table of the record of `indexer_topk.py`, and the page's sentence; return it.

    The peers' time is the sum of DeepGEMM's and of the fastest top-k's, each timed alone."""
    rows = json.loads(results.read_text())
    with reading(results):
        times: dict[Sizes, dict[str, float]] = {}
        for row in rows:
            times.setdefault((row["mode"], row["b"], row["s"], row["keys"]), {})[row["peer"]] = float(row["us"])
        for us in times.values():
            if "deep_gemm" in us and (best := min((us[peer] for peer in TOPK_PEERS if peer in us), default=None)):
                us["peers"] = us["deep_gemm"] + best
        floors = {(row["mode"], row["b"], row["s"], row["keys"]): float(row["floor_us"]) for row in rows}
        sizes = sorted({int(name.removeprefix("tsmla_")) for us in times.values() for name in us
                        if name.removeprefix("tsmla_").isdigit()})  # fmt: skip
        heads = ["B, S, keys", "floor", "DeepGEMM, top-k", "two kernels", "**tsmla**", "/ DeepGEMM, top-k"]
        heads += ["/ two kernels", *(f"{size} MiB" for size in sizes)]
        lines = []
        for (mode, b, s, keys), us in times.items():
            cells = [f"{b}, {s}, {keys}" + ", prefill" * (mode == "prefill"), number(floors[mode, b, s, keys])]
            cells += [number(us.get("peers")), number(us.get("tsmla_two")), f"**{us[OURS]:.1f}**"]
            cells += [quotient(us[OURS], us.get("peers")), quotient(us[OURS], us.get("tsmla_two"))]
            lines.append([*cells, *(number(us.get(f"tsmla_{size}")) for size in sizes)])
        said = "tsmla's time over the sum of DeepGEMM's and the fastest top-k's "
        said += f"{mean_and_worst(relative_times(times, OURS, 'peers'))}, "
        one = {point: us for point, us in times.items() if point[2] == 1}
        if alone := relative_times(one, OURS, "peers"):
            said += f"with one token a request {mean_and_worst(alone)}, "
        said += "over our two kernels one after the other, which are given the rows' lengths and keep all logits, "
        said += f"{mean_and_worst(relative_times(times, OURS, 'tsmla_two'))}, "
        said += f"geometric means. The {rows[0]['k']} largest of {rows[0]['h']} heads of 128, e4m3. {provenance(rows)}"
        label = "time / DeepGEMM's and top-k's"
        _draw_by_keys(_ratios(times, OURS, "peers"), label, figures / "indexer_topk_relative.png")
        measured = [(floors[point], us[OURS], us.get("peers")) for point, us in times.items()]
        roofline_figures.draw_floors({"logits and top-k": measured}, figures / "indexer_topk_floor.png")
    image = "![time of indexer_topk over the peers']({}indexer_topk_relative.png)"
    _write(figures, page, ("indexer_topk", "The indexer's selection"), said, image, table_of(heads, lines))
    return said


def _write(figures: Path, page: Path, names: tuple[str, str], said: str, image: str, table: str) -> None:
    """The full page, and the sentence with its figure between the page's comments. names: of the record, and a
    title."""
    name, title = names
    floor = f"![time by the floor of the bytes and operations]({name}_floor.png)"
    full = [f"# {title}", f"Microseconds. {said}", image, floor, table]
    write_part(figures, page, name, full, [said, image])
