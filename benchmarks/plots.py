"""The plots of records. `chart` returns the function that draws one, for a `table.Panel`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.table import Loaded

Draw = Callable[[Loaded, Path], bool]


class Mark(NamedTuple):
    """A dot, a bar or a point of a line: the panel and the line that it is in, and its place. It is left out if y is
    None."""

    panel: str
    line: str
    x: Any
    y: Any


@contextlib.contextmanager
def drawn(
    path: Path, size: tuple[float, float], panels: int, *, columns: int | None = None, widths: Sequence[float] = ()
) -> Iterator[Sequence[Any]]:
    """The axes of panels that share a y axis, to draw on; the figure is written to `path` at the end. The panels stand
    side by side, or in rows of `columns`."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    columns = min(columns or panels, panels)
    figure, grid = pyplot.subplots(-(-panels // columns), columns, figsize=size, sharey=True, squeeze=False,
                                   width_ratios=widths or None, layout="constrained")  # fmt: skip
    axes = [*grid.flat]
    for each in axes[panels:]:
        each.set_visible(False)
    for each in axes[:panels]:
        each.grid(True, axis="y", alpha=0.3)
    try:
        yield axes[:panels]
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)


class Style(NamedTuple):
    """How marks are drawn.

    y, x: the names of the axes.
    dots, bars: whether marks are dots or bars; if neither, they are joined by lines.
    spread: how far the marks of different lines stand apart at a place; not used on a logarithmic x axis.
    x_name: the text of a place on the x axis.
    log: whether the x axis is logarithmic.
    width: the plot's width in inches is width[0], and width[1] more for each panel in a row (on average).
    columns: panels in a row; None puts all in one row.
    angle: by how many degrees the texts of places are turned.
    one: whether to draw a line at 1.
    colours: colours of lines by name; the others get matplotlib's.
    dashed: whether the line of a name is dashed.
    in_order: whether places stand in the order of the marks; else they are sorted.
    log_y: the ticks of a logarithmic y axis; empty for a linear one.
    broken: the heights of broken horizontal lines.
    """

    y: str
    x: str = ""
    dots: bool = False
    spread: float = 0.0
    x_name: Callable[[Any], str] = str
    log: bool = False
    width: tuple[float, float] = (1.6, 2.2)
    columns: int | None = None
    angle: int = 0
    one: bool = True
    colours: Mapping[str, str] = {}
    dashed: Callable[[str], bool] = lambda line: False
    in_order: bool = False
    log_y: tuple[float, ...] = ()
    bars: bool = False
    broken: tuple[float, ...] = ()


def chart(marks: Callable[[Loaded], Iterable[Mark]], style: Style) -> Draw:
    """The function that draws times, or times over others': a panel for each of the marks' panels, and in it a line, or
    a row of dots or of bars, for each of their lines. That function returns whether there was anything to draw."""

    def draw(loaded: Loaded, path: Path) -> bool:
        if not (found := [mark for mark in marks(loaded) if mark.y is not None]):
            return False
        panels, lines = (list(dict.fromkeys(each)) for each in ((m.panel for m in found), (m.line for m in found)))
        places = list(dict.fromkeys(mark.x for mark in found))
        xs = places if style.in_order else sorted(places)
        rows = -(-len(panels) // style.columns) if style.columns else 1
        size = (style.width[0] + style.width[1] * len(panels) / rows, 3.6 if rows == 1 else 3.05 * rows + 0.6)
        with drawn(path, size, len(panels), columns=style.columns) as axes:
            for each, panel in zip(axes, panels, strict=True):
                _panel(each, [mark for mark in found if mark.panel == panel], lines, xs, style)
                each.set_title(panel, fontsize=9)
            if style.log_y:
                axes[0].set(yscale="log", ylim=(style.log_y[0], style.log_y[-1]))
                axes[0].set_yticks(style.log_y, [f"{y:g}" for y in style.log_y])
                axes[0].minorticks_off()
            else:
                axes[0].set_ylim(0, 1.05 * max([float(style.one), *(mark.y for mark in found)]))
            axes[0].figure.supylabel(style.y, fontsize=10)
            axes[0].figure.supxlabel(style.x, fontsize=9)
        return True

    return draw


def _panel(axes: Any, marks: Sequence[Mark], lines: Sequence[str], xs: Sequence[Any], style: Style) -> None:
    lines = [line for line in lines if any(mark.line == line for mark in marks)]
    for i, line in enumerate(lines):
        at = sorted((xs.index(mark.x), mark.y) for mark in marks if mark.line == line)
        places = [xs[x] if style.log else x + style.spread * (i - (len(lines) - 1) / 2) for x, _ in at]
        ys, colour = [y for _, y in at], style.colours.get(line, f"C{i}")
        if style.bars:
            axes.bar(places, ys, width=0.36, label=line, color=colour)
        elif style.dots:
            axes.scatter(places, ys, s=20, linewidths=0, label=line, color=colour)
        else:
            axes.plot(places, ys, "--" if style.dashed(line) else "-", marker="o", markersize=4, linewidth=1,
                      label=line, color=colour)  # fmt: skip
    if style.one:
        axes.axhline(1, color="0.4", linewidth=1)
    for y in style.broken:
        axes.axhline(y, color="0.4", linewidth=1, linestyle="--")
    if style.log:
        axes.set(xscale="log")
        axes.minorticks_off()
    turned = {"rotation": style.angle, "ha": "right"} if style.angle else {}
    axes.set_xticks(xs if style.log else range(len(xs)), [style.x_name(x) for x in xs], fontsize=8, **turned)
    if any(lines):
        axes.legend(frameon=False, fontsize=7, loc="best", ncols=2 if len(lines) > 3 and style.width[0] != 1.6 else 1)


def draw_errors(found: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Draw relative errors by peer to the file `path`, with a panel for each of `found`."""
    columns = [len(errors) for errors in found.values()]
    jitter = random.Random(0)
    with drawn(path, (1.2 + 0.6 * sum(columns), 3.8), len(found), widths=columns) as panels:
        for axes, (title, errors) in zip(panels, found.items(), strict=True):
            for i, (peer, each) in enumerate(errors.items()):
                xs = [i + jitter.uniform(-0.25, 0.25) for _ in each]
                colour = "tab:blue" if peer.startswith("tsmla") else "tab:orange"
                axes.scatter(xs, each, s=9, alpha=0.5, linewidths=0, color=colour)
            axes.set_xticks(range(len(errors)), errors, fontsize=7, rotation=45)
            axes.set_xlim(-0.6, len(errors) - 0.4)
            axes.set_yscale("log")
            axes.set_title(title, fontsize=9)
        panels[0].minorticks_off()
        ticks = [1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1]
        panels[0].set_yticks(ticks, [f"{tick:.1%}".replace(".0%", "%") for tick in ticks])
        panels[0].set_ylabel("relative error")
