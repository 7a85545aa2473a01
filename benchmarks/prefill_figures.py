"""The figures, tables and sentences of the records of `prefill.py` and `segment_attention.py`."""

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

OURS, OURS_FP8 = "tsmla", "tsmla_fp8"
NAMES = {"fa3": "FA3", "fa4": "FA4 SM90", "cudnn": "cuDNN"}
# benchmarks/README.md shows these; the full table is beside the figures.
SHORT = ("1x8192h128", "4x4096h128", "1x8192h64", "4x4096h64", "1x8192h32", "1x32768h16", "16x1024h128", "ragged32h64")
SEGMENT_NAMES = {"cudnn": "cuDNN", "tsmla": "**tsmla**", "tsmla_kv": "tsmla, kv"}


def write(results: Path, figures: Path, page: Path) -> str:
    """Write the figures, the full and the short table of the record of `prefill.py`; return its summary. Where
    prefill_fa4.json lies beside it, a run with FA4, the page has that too, compared within itself alone."""
    rows = json.loads(results.read_text())
    with reading(results):
        us = _times(rows)
        first = rows[0]
        said = (
            f"Causal {first['dtype']}, head dims {first['head_dims'][0]} and {first['head_dims'][1]}, microseconds. "
            f"tsmla's time over {_means(us, NAMES)}, geometric means over the points that each ran. "
            + "fp8 is tsmla's own, q, k and v in e4m3. "
            * any(OURS_FP8 in times for times in us.values())
        )
        said += provenance(rows)
        shown = _table({point: us[point] for point in SHORT if point in us} or us, rows)
        full = ["# MLA prefill", "", "![time of prefill over the peers']({}prefill_relative.png)"]
        full += ["![arithmetic rates of prefill](prefill_rates.png)", _table(us, rows)]
    if (earlier := results.with_name("prefill_fa4.json")).exists():
        old = json.loads(earlier.read_text())
        with reading(earlier):
            means = _means(_times(old), {"fa4": NAMES["fa4"]})
            full += ["## A run with FA4", f"tsmla's time over {means}. {provenance(old)}", _table(_times(old), old)]
            said += f" In a run of its own, tsmla's time over {means}; commit {old[0]['commit']}; {old[0]['date']}."
    full[1] = said
    names = {OURS: "tsmla", **NAMES}
    roofline_figures.draw_ratios(us, names, figures / "prefill_relative.png")
    roofline_figures.draw_rates(rows, {**names, OURS_FP8: "tsmla, fp8"}, figures / "prefill_rates.png")
    write_part(figures, page, "prefill", full, [said, shown, full[2]])
    return said


def _times(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Microseconds by point and peer."""
    us: dict[str, dict[str, float]] = {}
    for row in rows:
        us.setdefault(row["point"], {})[row["peer"]] = float(row["us"])
    return us


def _means(us: Mapping[str, Mapping[str, float]], names: Mapping[str, str]) -> str:
    ratios = ((name, relative_times(us, OURS, peer)) for peer, name in names.items())
    return ", ".join(f"{name} {mean_and_worst(found)}" for name, found in ratios if found)


def _table(us: Mapping[str, Mapping[str, float]], rows: Sequence[Mapping[str, Any]]) -> str:
    """With the columns that any of the points needs."""
    peers = [peer for peer in NAMES if any(peer in times for times in us.values())]
    fp8 = any(OURS_FP8 in times for times in us.values())
    rates = {row["point"]: row["tflops"] for row in rows if row["peer"] == OURS}
    heads = ["B x T, H", *(NAMES[peer] for peer in peers), "**tsmla**", "/ FA3", "TFLOP/s", *["fp8", "/ bf16"] * fp8]
    lines = []
    for point, times in us.items():
        cells = [point, *(number(times.get(peer), 0) for peer in peers), f"**{times[OURS]:.0f}**"]
        cells += [quotient(times[OURS], times.get("fa3")), f"{rates[point]:.0f}"]
        lines.append(cells + [number(times.get(OURS_FP8), 0), quotient(times.get(OURS_FP8), times[OURS])] * fp8)
    return table_of(heads, lines)


def write_segments(results: Path, figures: Path, page: Path) -> str:
    """Write the figure and the tables of the record of `segment_attention.py`; return its summary."""
    rows = json.loads(results.read_text())
    with reading(results):
        kinds = {"forward": "forward_us", "with its gradient": "us"}
        times: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in kinds}
        for row in rows:
            for kind, field in kinds.items():
                times[kind].setdefault(row["point"], {})[row["peer"]] = float(row[field])
        errors = {row["peer"]: row["rel_err"] for row in rows if row["rel_err"]}
        peers = [peer for peer in SEGMENT_NAMES if any(peer in each for each in times["forward"].values())]
        blocks, sentences = [], []
        for kind, of_point in times.items():
            heads = ["rows x tokens, heads, segments a row", *(SEGMENT_NAMES[peer] for peer in peers)]
            heads += ["/ cuDNN"] * ("cudnn" in peers)
            lines = [
                [point, *(number(us.get(peer)) for peer in peers)]
                + [quotient(us.get(OURS), us.get("cudnn"))] * ("cudnn" in peers)
                for point, us in of_point.items()
            ]
            blocks += [f"## {kind.capitalize()}", table_of(heads, lines)]
            if ratios := relative_times(of_point, OURS, "cudnn"):
                sentences.append(f"{kind} {mean_and_worst(ratios)}")
        compared = f"tsmla's time over cuDNN's: {', '.join(sentences)}, geometric means. " if sentences else ""
        said = f"Causal {rows[0]['dtype']}, head dims 192 and 128, microseconds. {compared}{provenance(rows)}"
        lines = [[SEGMENT_NAMES[peer], *(f"{error:.2%}" for error in errors[peer])] for peer in peers if peer in errors]
        blocks += ["## Errors", f"Relative, at {rows[0]['errors_at']}, against the reference in float32."]
        blocks.append(table_of(["", "out", "dq", "dk", "dv"], lines))
        images = []
        if "cudnn" in peers:
            _draw_segments(times, figures / "segment_attention.png")
            images.append("![time of attention over packed rows over cuDNN's]({}segment_attention.png)")
    full = ["# Packed rows", said, *images, *blocks]
    write_part(figures, page, "segment_attention", full, [said, blocks[3], *images])
    return said


def _draw_segments(times: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """Our times over cuDNN's, a panel forward and one with the gradient; under the line is faster."""
    colours = {"tsmla": "tab:blue", "tsmla_kv": "tab:purple"}
    with drawn(path, (8.4, 3.8), len(times)) as panels:
        for axes, (kind, of_point) in zip(panels, times.items(), strict=True):
            for side, peer in ((-0.06, "tsmla"), (0.06, "tsmla_kv")):
                at = [(x + side, us[peer] / us["cudnn"]) for x, us in enumerate(of_point.values())
                      if {peer, "cudnn"} <= us.keys()]  # fmt: skip
                if at:
                    label = SEGMENT_NAMES[peer].strip("*")
                    axes.scatter(*zip(*at, strict=True), s=22, linewidths=0, color=colours[peer], label=label)
            axes.axhline(1, color="0.4", linewidth=1)
            axes.set_xticks(range(len(of_point)), [*of_point], fontsize=8, rotation=30, ha="right")
            axes.set_title(kind, fontsize=9)
            axes.legend(frameon=False, fontsize=8, loc="lower right")
        panels[0].set_ylim(bottom=0)
        panels[0].set_ylabel("time / cuDNN's")
