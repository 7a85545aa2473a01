"""Figures that stand in for rooflines: times by their floor, arithmetic rates under the device's, times over peers'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from figure_pages import FLOPS_PER_S, drawn

Row = Mapping[str, Any]
Floor = tuple[float, float, float | None]
"""Microseconds of a point: its floor, our time, and the best peer's if there is one."""

OURS = "tsmla"
COLOURS = {
    "tsmla": "tab:blue",
    "tsmla_fp8": "tab:cyan",
    "tsmla_deterministic": "tab:cyan",
    "tsmla_kv": "tab:purple",
    "fa3": "tab:green",
    "fa4": "tab:orange",
    "cudnn": "tab:red",
}


def draw_floors(found: Mapping[str, Sequence[Floor]], path: Path) -> None:
    """Times by the floor of their bytes and operations, ours and the best peer's; a panel a name, a dot a point."""
    with drawn(path, (max(6.5, 1.6 + 2.4 * len(found)), 3.8), len(found)) as panels:
        for axes, (title, points) in zip(panels, found.items(), strict=True):
            points = [point for point in points if point[0] > 0]  # the records round to 0.01
            floors = [floor for floor, _, _ in points]
            axes.plot([min(floors), max(floors)], [min(floors), max(floors)], color="0.4", linewidth=1, label="floor")
            for label, colour, times in (
                ("best peer", "tab:orange", [best for _, _, best in points]),
                ("tsmla", "tab:blue", [ours for _, ours, _ in points]),
            ):
                at = [(floor, us) for floor, us in zip(floors, times, strict=True) if us]
                if at:
                    axes.scatter(*zip(*at, strict=True), s=14, alpha=0.6, linewidths=0, color=colour, label=label)
            axes.set(xscale="log", yscale="log")
            axes.minorticks_off()
            axes.set_title(title, fontsize=9)
            axes.grid(True, axis="x", alpha=0.3)
        panels[0].set_ylabel("time, us")
        panels[0].figure.supxlabel("floor, us", fontsize=9)
        panels[-1].legend(frameon=False, fontsize=8, loc="upper left")


def draw_rates(rows: Sequence[Row], names: Mapping[str, str], path: Path) -> None:
    """TFLOP/s of every point, a dot a peer of `names`; the lines are rates of plain matrix products."""
    points = list(dict.fromkeys(row["point"] for row in rows))
    drawn_peers = [peer for peer in names if any(row["peer"] == peer for row in rows)]
    with drawn(path, (8.4, 4.2), 1) as (axes,):
        for i, peer in enumerate(drawn_peers):
            at = [row for row in rows if row["peer"] == peer and row.get("tflops")]
            xs = [points.index(row["point"]) + 0.12 * (i - (len(drawn_peers) - 1) / 2) for row in at]
            label = names[peer].strip("*")
            axes.scatter(xs, [row["tflops"] for row in at], s=22, linewidths=0, color=COLOURS.get(peer), label=label)
        for dtype, rate in FLOPS_PER_S.items():
            if dtype == "bf16" or any(row["peer"] == f"{OURS}_{dtype}" for row in rows):
                axes.axhline(rate / 1e12, color="0.4", linewidth=1, linestyle="-" if dtype == "bf16" else "--")
                line = 0, rate / 1e12
                axes.annotate(f"matrix product, {dtype}", line, (0, 3), textcoords="offset points", fontsize=8)
        axes.set_xticks(range(len(points)), points, fontsize=8, rotation=30, ha="right")
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        axes.set_ylabel("TFLOP/s")
        axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower right")


def draw_ratios(times: Mapping[str, Mapping[str, float]], names: Mapping[str, str], path: Path) -> None:
    """Our time over each peer's, a dot a point and peer; under the line is faster."""
    points = [point for point, us in times.items() if OURS in us]
    peers = [peer for peer in names if peer != OURS and any(peer in times[point] for point in points)]
    highest = 1.0
    with drawn(path, (8.4, 3.8), 1) as (axes,):
        for i, peer in enumerate(peers):
            at = [(points.index(p), times[p][OURS] / times[p][peer]) for p in points if peer in times[p]]
            xs = [x + 0.12 * (i - (len(peers) - 1) / 2) for x, _ in at]
            axes.scatter(
                xs,
                [ratio for _, ratio in at],
                s=22,
                linewidths=0,
                color=COLOURS.get(peer),
                label=f"over {names[peer].strip('*')}",
            )
            highest = max([highest, *(ratio for _, ratio in at)])
        axes.axhline(1, color="0.4", linewidth=1)
        axes.set_xticks(range(len(points)), points, fontsize=8, rotation=30, ha="right")
        axes.set_ylim(0, 1.05 * highest)
        axes.set_ylabel("tsmla's time / a peer's")
        axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower right")
