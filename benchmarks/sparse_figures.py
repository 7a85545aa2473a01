"""The figures, tables and sentences of the records of `sparse_mla_prefill.py` and `sparse_layer.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
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

OURS, OURS_FP8, PEER, COPY = "tsmla", "tsmla fp8 queries", "flashmla", "widen"
MODES = {
    "random": "V3.2, random keys",
    "shared80": "V3.2, 80 % shared with the token before",
    "prompt": "V3.2, the first tokens of a text",
    "v4": "V4, 128 + 512",
}
SHORT_PREFILL = [(mode, 4096, h) for mode in MODES for h in (16, 32, 64, 128)]
WHOLE, SUM, ON_HOST = "step", "parts", "step by the host's clock"
ENGINES = "engines"

Times = Mapping[tuple[Any, ...], Mapping[str, float]]


def write_prefill(results: Path, figures: Path, page: Path) -> str:
    """Write the figures and the tables of the record of `sparse_mla_prefill.py`; return its summary."""
    rows = json.loads(results.read_text())
    with reading(results):
        times: dict[tuple[str, int, int], dict[str, float]] = {}
        floors = {}
        for row in rows:
            point = row["mode"], row["length"], row["h"]
            times.setdefault(point, {})[row["peer"]] = float(row["us"])
            if row["peer"] == OURS:
                floors[point] = float(row["floor_us"])
        times = {point: times[point] for point in sorted(floors, key=lambda p: ([*MODES].index(p[0]), *p[1:]))}
        said = _summary(rows, times)
        heads = ["T, H", "floor", "FlashMLA", "**tsmla**", "/ FlashMLA", "of floor", "fp8 queries"]

        def table(mode: str, *, short: bool = False) -> str:
            shown = [point for point in times if point[0] == mode and (not short or point in SHORT_PREFILL)]
            cells = [_cells(f"{t}, {h}", floors[mode, t, h], times[mode, t, h]) for _, t, h in shown]
            if short:
                cells = [[f"{each[0]}, {MODES[mode]}", *each[1:]] for each in cells]
            return table_of([heads[0] + ", selection" * short, *heads[1:]], cells)

        modes = list(dict.fromkeys(point[0] for point in times))
        tables = [table(mode, short=True) for mode in modes]
        shown = "\n".join([*tables[0].split("\n")[:2], *(line for each in tables for line in each.split("\n")[2:])])
        _draw_prefill(times, figures / "sparse_mla_prefill_relative.png")
        measured = {"V3.2": [], "V4": []}
        for point, us in times.items():
            measured["V4" if point[0] == "v4" else "V3.2"].append((floors[point], us[OURS], us.get(PEER)))
        measured = {name: found for name, found in measured.items() if found}
        roofline_figures.draw_floors(measured, figures / "sparse_mla_prefill_floor.png")
    image = "![time of sparse prefill over FlashMLA's]({}sparse_mla_prefill_relative.png)"
    full = ["# Sparse MLA, prefill", said, image, "![time by its floor](sparse_mla_prefill_floor.png)"]
    full += [block for mode in modes for block in (f"## {MODES[mode]}", table(mode))]
    write_part(figures, page, "sparse_mla_prefill", full, [said, shown, image])
    return said


def _summary(rows: list[dict[str, Any]], times: Times) -> str:
    """Our time over FlashMLA's by heads, what FlashMLA's time leaves out, and the error of fp8 queries."""
    said = "Microseconds, medians, bf16 queries. "
    if all_of_them := relative_times(times, OURS, PEER):
        said += f"tsmla's time over FlashMLA's {mean_and_worst(all_of_them)}, geometric mean; "
        by_heads = {
            h: relative_times({point: us for point, us in times.items() if point[2] == h}, OURS, PEER)
            for h in sorted({point[2] for point in times})
        }
        said += ", ".join(f"{h} heads {mean_and_worst(found)}" for h, found in by_heads.items() if found)
        said += ". FlashMLA reads a bf16 copy of the keys, and has its queries padded to 64 or 128 heads. "
    if copies := [float(row["us"]) for row in rows if row["peer"] == COPY]:
        said += f"Making the copy of V3.2's context of 131,072 keys takes {min(copies):.0f} to {max(copies):.0f} us, "
        said += "which are not in its time. "
    if fp8 := relative_times(times, OURS_FP8, OURS):
        errors = [row["rel_err"] for row in rows if row["peer"] == OURS_FP8]
        said += f"fp8 queries take {mean_and_worst(fp8)} of the time of bf16 queries, and out's error against "
        said += f"the bf16 queries that they were rounded from is {min(errors):.1%} to {max(errors):.1%}. "
    return said + provenance(rows)


def _cells(name: str, floor: float, us: Mapping[str, float]) -> list[str]:
    ours = us[OURS]
    cells = [name, number(floor), number(us.get(PEER)), f"**{ours:.1f}**", quotient(ours, us.get(PEER))]
    return [*cells, f"{floor / ours:.0%}", number(us.get(OURS_FP8))]


def _draw_prefill(times: Times, path: Path) -> None:
    """A panel a mode, a line a number of tokens, by heads; under the line is faster."""
    modes = list(dict.fromkeys(point[0] for point in times))
    heads = sorted({point[2] for point in times})
    tokens = sorted({point[1] for point in times})
    with drawn(path, (8.4, 3.0 * -(-len(modes) // 2) + 0.6), len(modes), columns=2) as panels:
        for axes, mode in zip(panels, modes, strict=True):
            for t in tokens:
                at = [(heads.index(h), times[mode, t, h][OURS] / times[mode, t, h][PEER]) for h in heads
                      if PEER in times.get((mode, t, h), {})]  # fmt: skip
                if at:
                    colour = f"C{tokens.index(t)}"
                    axes.plot(*zip(*at, strict=True), marker="o", markersize=4, linewidth=1, color=colour,
                              label=f"T = {t}")  # fmt: skip
            axes.axhline(1, color="0.4", linewidth=1)
            axes.set_xticks(range(len(heads)), [str(h) for h in heads], fontsize=8)
            axes.set_xlim(-0.4, len(heads) - 0.6)
            axes.set_title(MODES[mode], fontsize=9)
            axes.legend(frameon=False, fontsize=7, loc="lower right")
        panels[0].set_ylim(bottom=0)
        panels[0].figure.supylabel("time / FlashMLA's", fontsize=9)
        panels[0].figure.supxlabel("heads", fontsize=9)


def write_layer(results: Path, figures: Path, page: Path) -> str:
    """Write the figure and the tables of the record of `sparse_layer.py`; return its summary."""
    rows = json.loads(results.read_text())
    with reading(results):
        times: dict[tuple[int, int], dict[str, dict[str, float]]] = {}
        kernels = {}
        for row in rows:
            point = row["b"], row["h"]
            times.setdefault(point, {}).setdefault(row["peer"], {})[row["part"]] = float(row["us"])
            if row["peer"] == ENGINES:
                kernels[point] = row["kernels"]
        times = {point: times[point] for point in sorted(times)}
        wholes = {point: {peer: us[WHOLE] for peer, us in each.items()} for point, each in times.items()}
        ratios = relative_times(wholes, OURS, ENGINES)
        compared = f"tsmla's time over theirs {mean_and_worst(ratios)}, geometric mean. " if ratios else ""
        first = rows[0]
        said = (
            f"A decode step of a V3.2 layer without its projections, {first['keys']:,} keys a request, "
            f"{first['k']:,} of them selected, microseconds by the GPU's clock: ours one function of jax, the engines' "
            f"kernels one CUDA graph. {compared}{provenance(rows)}"
        )
        heads = ["B, H", "engines' kernels", "**tsmla**", "/ engines'", "sum of parts: engines'", "tsmla"]
        heads += ["by the host's clock: engines'", "tsmla"]
        lines = []
        for (b, h), each in times.items():
            ours, theirs = each[OURS], each.get(ENGINES, {})
            cells = [f"{b}, {h}", number(theirs.get(WHOLE)), f"**{ours[WHOLE]:.1f}**"]
            cells.append(quotient(ours[WHOLE], theirs.get(WHOLE)))
            lines.append(cells + [number(us.get(part)) for part in (SUM, ON_HOST) for us in (theirs, ours)])
        table = table_of(heads, lines)
        _draw_layer(wholes, figures / "sparse_layer.png")
    image = "![microseconds of a sparse layer's step]({}sparse_layer.png)"
    full = ["# A sparse layer", said, image, table]
    for peer, title in ((OURS, "Our parts"), (ENGINES, "The engines' parts")):
        full += _parts(peer, title, times, kernels)
    write_part(figures, page, "sparse_layer", full, [said, table, image])
    return said


def _parts(peer: str, title: str, times: Mapping[tuple[int, int], Any], kernels: Mapping[Any, str]) -> list[str]:
    """The blocks of a peer's parts, each timed alone; none where it was not measured."""
    points = [point for point, each in times.items() if peer in each]
    if not points:
        return []
    names = dict.fromkeys(part for point in points for part in times[point][peer] if part not in (WHOLE, SUM, ON_HOST))
    heads = ["", *(f"{b}, {h}" for b, h in points)]
    lines = [[f"`{part}`", *(number(times[point][peer].get(part)) for point in points)] for part in names]
    if peer == ENGINES:
        lines.append(["top-k, attention", *(kernels[point] for point in points)])
    return [f"## {title}", "Microseconds by B, H; each part alone.", table_of(heads, lines)]


def _draw_layer(wholes: Mapping[tuple[int, int], Mapping[str, float]], path: Path) -> None:
    """A panel a number of heads, two bars a number of requests."""
    heads = sorted({h for _, h in wholes})
    batches = sorted({b for b, _ in wholes})
    with drawn(path, (2 + 3 * len(heads), 3.6), len(heads)) as panels:
        for axes, h in zip(panels, heads, strict=True):
            for side, peer, label, colour in ((-0.2, ENGINES, "engines' kernels", "tab:orange"),
                                              (0.2, OURS, "tsmla", "tab:blue")):  # fmt: skip
                at = [(batches.index(b) + side, wholes[b, h][peer]) for b in batches if peer in wholes.get((b, h), {})]
                if at:
                    axes.bar(*zip(*at, strict=True), width=0.36, color=colour, label=label)
            axes.set_xticks(range(len(batches)), [str(b) for b in batches], fontsize=8)
            axes.set_title(f"H = {h}", fontsize=9)
        panels[0].set_ylabel("us a step")
        panels[0].legend(frameon=False, fontsize=8, loc="upper left")
        panels[0].figure.supxlabel("requests", fontsize=9)
