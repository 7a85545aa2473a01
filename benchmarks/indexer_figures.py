"""The figures, tables and sentences of the indexer's records, of `indexer_logits.py` and `select_topk.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import roofline_figures
from backward_figures import mean_and_worst, relative_times
from figure_pages import between_markers, drawn, provenance

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
    try:
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
        _draw_logits(times, figures / "indexer_logits_relative.png")
        measured = [(floors[point], us[OURS], us.get("deep_gemm")) for point, us in times.items()]
        roofline_figures.draw_floors({"decode and prefill": measured}, figures / "indexer_logits_floor.png")
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise ValueError(f"{results}: {type(error).__name__} {error}") from error
    image = "![time of the indexer's logits over DeepGEMM's]({}indexer_logits_relative.png)"
    return _write(figures, page, "indexer_logits", "The indexer's logits", said, image, lines)


def _draw_logits(times: dict[tuple[str, int, int, int], dict[str, float]], path: Path) -> None:
    """A panel for each number of requests of a decode step, and one for prefill; a line a number of query tokens."""
    ratios = {point: us[OURS] / us["deep_gemm"] for point, us in times.items() if {OURS, "deep_gemm"} <= us.keys()}
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
        panels[0].set_ylabel("time / DeepGEMM's")
        panels[0].figure.supxlabel("keys of a request", fontsize=9)


def write_topk(results: Path, figures: Path, page: Path) -> str:
    """Write the figure and the table of the record of `select_topk.py`, and the page's sentence; return it."""
    rows = json.loads(results.read_text())
    try:
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
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise ValueError(f"{results}: {type(error).__name__} {error}") from error
    image = "![time of top-k over the best peer's]({}select_topk_relative.png)"
    return _write(figures, page, "select_topk", "Top-k", said, image, lines)


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


def _write(figures: Path, page: Path, name: str, title: str, said: str, image: str, lines: Sequence[str]) -> str:
    """The full page, and the sentence with its figure between the page's comments; returns the sentence."""
    floor = f"![time by the floor of the bytes and operations]({name}_floor.png)"
    full = [f"# {title}", f"Microseconds. {said}", image.format(""), floor, "\n".join(lines)]
    (figures / f"{name}.md").write_text("\n\n".join(full) + "\n")
    folder = figures.relative_to(page.parent).as_posix()
    body = f"{said} All points: [{name}.md]({folder}/{name}.md).\n\n{image.format(f'{folder}/')}"
    page.write_text(between_markers(page.read_text(), name, body))
    return said
