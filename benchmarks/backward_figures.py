"""The figure, the table and the README's sentence of the record of `prefill_backward.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import roofline_figures
from figure_pages import between_markers, drawn, mean_and_worst, provenance, reading, relative_times

OURS = "tsmla"
NAMES = {
    "tsmla": "**tsmla**",
    "tsmla_deterministic": "deterministic",
    "tsmla_kv": "kv and k_rope",
    "tsmla_jit": "in jax.jit",
    "cudnn": "cuDNN",
    "cudnn_jax": "cuDNN, jax",
    "fa4": "FA4 SM90",
    "tokamax": "tokamax",
    "fa4_deterministic": "FA4, det.",
    "cudnn_jax_deterministic": "cuDNN, jax, det.",
    "cudnn_deterministic": "cuDNN, det.",
}
PEERS = ("cudnn", "cudnn_jax", "fa4", "tokamax")


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Times over that of cuDNN through torch by length, a panel for each number of heads; under the line is faster."""
    us = {(row["h"], row["length"], row["peer"]): float(row["us"]) for row in rows if row["b"] == 1}
    heads, lengths = (sorted({key[i] for key in us}) for i in (0, 1))
    with drawn(path, (1.6 + 2.2 * len(heads), 3.6), len(heads)) as panels:
        for axes, h in zip(panels, heads, strict=True):
            for peer in ("tsmla", "tsmla_deterministic", "fa4", "cudnn_jax", "tokamax"):
                at = [n for n in lengths if {(h, n, peer), (h, n, "cudnn")} <= us.keys()]
                if not at:
                    continue
                ratios = [us[h, n, peer] / us[h, n, "cudnn"] for n in at]
                label = f"tsmla, {NAMES[peer]}" if peer.startswith("tsmla_") else NAMES[peer].strip("*")
                axes.plot([lengths.index(n) for n in at], ratios, marker="o", markersize=4, linewidth=1, label=label)
            axes.axhline(1, color="0.4", linewidth=1)
            axes.set_title(f"H = {h}", fontsize=10)
            axes.set_xticks(range(len(lengths)), [f"{n // 1024}k" for n in lengths], fontsize=8)
        panels[0].set_ylabel("time / cuDNN's")
        panels[0].set_ylim(bottom=0)
        panels[-1].legend(frameon=False, fontsize=8)
        panels[0].figure.supxlabel("tokens of the request", fontsize=9)


def write(results: Path, figures: Path, readme: Path) -> str:
    """Write the figure and the table of the record of `prefill_backward.py`, and the README's sentence; return it."""
    import matplotlib

    matplotlib.use("agg")
    rows = json.loads(results.read_text())
    with reading(results):
        times: dict[str, dict[str, float]] = {}
        for row in rows:
            times.setdefault(row["point"], {})[row["peer"]] = float(row["us"])
        rates = {row["point"]: float(row["tflops"]) for row in rows if row["peer"] == OURS}
        shown = [peer for peer in NAMES if any(peer in row for row in times.values())]
        heads = ["B x T, H", *(NAMES[peer] for peer in shown), "TFLOP/s"]
        lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
        for point, us in times.items():
            cells = (f"{us[peer]:.0f}" if peer in us else "-" for peer in shown)
            lines.append(f"| {point} | {' | '.join(cells)} | {rates[point]:.0f} |")
        means = [
            f"{name} {mean_and_worst(ratios)}"
            for name, peers in (("the best peer", PEERS), *((NAMES[p], (p,)) for p in PEERS))
            if (ratios := relative_times(times, OURS, *peers))
        ]
        repeats = relative_times(times, "tsmla_deterministic", OURS)
        said = (
            f"The gradient of prefill on Hopper, the backward pass alone, causal {rows[0]['dtype']}: tsmla's time over "
            f"{', '.join(means)}, geometric means; deterministic over default {mean_and_worst(repeats)}. "
        )
        said += provenance(rows)
        figures.mkdir(parents=True, exist_ok=True)
        draw(rows, figures / "prefill_backward_relative.png")
        shown_rates = {peer: NAMES[peer] for peer in shown}
        roofline_figures.draw_rates(rows, shown_rates, figures / "prefill_backward_rates.png")
    image = "![time of the backward pass over cuDNN's](prefill_backward_relative.png)"
    rate = "![arithmetic rates of the backward pass](prefill_backward_rates.png)"
    page = ["# The gradient of MLA prefill", f"Microseconds. {said}", image, rate, "\n".join(lines)]
    (figures / "prefill_backward.md").write_text("\n\n".join(page) + "\n")
    link = f"All points: [prefill_backward.md]({figures.relative_to(readme.parent).as_posix()}/prefill_backward.md)."
    readme.write_text(between_markers(readme.read_text(), "prefill_backward", f"{said} {link}"))
    return said
