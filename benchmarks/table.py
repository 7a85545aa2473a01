"""Records as points, and the pages that are made of them: declared as `Record`s, written by `write`."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

Row = Mapping[str, Any]
OURS = "tsmla"


@dataclass(frozen=True)
class Point:
    """One point of a record: its key, and each peer's row."""

    key: tuple[Any, ...]
    rows: dict[Any, Row]

    def __getitem__(self, name: str) -> Any:
        """A field that all rows of the point share."""
        return next(iter(self.rows.values()))[name]

    def us(self, peer: Any) -> float | None:
        """A peer's time; None if it was not measured here."""
        return float(self.rows[peer]["us"]) if peer in self.rows else None

    @property
    def floor(self) -> float:
        """The least microseconds that the point can take; our own floor, if peers have others."""
        return float(self.rows[OURS]["floor_us"] if OURS in self.rows else self["floor_us"])

    def best(self, *peers: Any) -> float | None:
        """The fastest of the peers' times; None if none of them was measured."""
        return min((us for peer in peers if (us := self.us(peer)) is not None), default=None)

    def ratio(self, ours: Any, *peers: Any) -> float | None:
        """Our time over the fastest peer's, below 1 if ours is less; None if either is missing."""
        mine, best = self.us(ours), self.best(*peers)
        return mine / best if mine is not None and best is not None else None


class Loaded(NamedTuple):
    """A record that was read: its file, its rows and its points."""

    path: Path
    rows: list[Row]
    points: list[Point]


Column = tuple[str, Callable[[Point], str]]
"""A column's heading, and a function of a point that gives its cell, "-" if there is nothing to show."""
Columns = Callable[[Loaded], Sequence[Column]]
Blocks = Callable[[Loaded], Sequence[str]]


class Panel(NamedTuple):
    """A plot: its file's stem, its text, and what draws it, if there is anything to draw. On the full page it stands
    below the heading of its `section`, or above all blocks without one; it is on the README, too, if `shown`."""

    file: str
    text: str
    draw: Callable[[Loaded, Path], bool]
    shown: bool = False
    section: str = ""


@dataclass(frozen=True)
class Record:
    """How a file of `benchmarks/results` is shown.

    Attributes:
      name: the file's stem, and the name of the record's part of a README.
      folder: the file's folder.
      title: the title of the full page; empty if there is no such page.
      key: the fields that tell points apart; none of them if each row is a point.
      caption: the paragraph that the full page and the README's part begin with.
      full: the full page's blocks below its plots.
      short: the blocks between caption and plots in the README's part.
      panels: the plots.
      unit: the text before the caption on the full page.
      peer: a function of a row that gives the name of its peer.
      order: a key by which points are sorted, instead of the file's order.
      readme: the README that has the part.
      part: the part's name, if it is not the record's name.
      rows_of: the rows to show, if not all.
      full_caption: the caption of the full page, if it differs from `caption`, which then has to link to that page.
    """

    name: str
    title: str
    key: tuple[str, ...]
    caption: Callable[[Loaded], str]
    full: Blocks = lambda _: ()
    short: Blocks = lambda _: ()
    panels: tuple[Panel, ...] = ()
    unit: str = ""
    peer: Callable[[Row], Any] = field(default=lambda row: row["peer"])
    order: Callable[[Point], Any] | None = None
    readme: str = "benchmarks/README.md"
    folder: str = "h200"
    part: str = ""
    rows_of: Callable[[list[Row]], list[Row]] = field(default=lambda rows: rows)
    full_caption: Callable[[Loaded], str] | None = None


# ---- reading


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors about missing or wrong parts of a record into a ValueError that names its file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise ValueError(f"{path}: {type(error).__name__} {error}") from error


def load(path: Path, record: Record) -> Loaded:
    """Read a record into its points. Of several rows of a point and a peer, the newest counts.

    Raises:
      ValueError: the file is no list of rows, has none, or a time is not positive.
      KeyError, TypeError: a row lacks a field, or its time is no number.
      OSError: the file can't be read.
    """
    rows = json.loads(path.read_text())
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("a list of objects was expected")
    if not (rows := record.rows_of(rows)):
        raise ValueError("no rows")
    points: dict[tuple[Any, ...], Point] = {}
    for index, row in enumerate(rows):
        key = tuple(row[name] for name in record.key) or (index,)
        if not row["us"] > 0:
            raise ValueError(f"{row}: us must be positive")
        found, peer = points.setdefault(key, Point(key, {})).rows, record.peer(row)
        if peer not in found or str(row.get("date")) >= str(found[peer].get("date")):
            found[peer] = row
    found_points = list(points.values())
    return Loaded(path, rows, sorted(found_points, key=record.order) if record.order else found_points)


# ---- words


def provenance(rows: Sequence[Row]) -> str:
    """The devices, commits and dates of rows, in a sentence."""
    said = {name: ", ".join(sorted({str(row[name]) for row in rows})) for name in ("device", "commit", "date")}
    return f"Device: {said['device']}; commit {said['commit']}; {said['date']}."


def mean_and_worst(ratios: Iterable[float | None]) -> str:
    """The geometric mean of ratios of times, as "0.90 (worst 1.03, 30 points)", or "0.90 (1 point)" for a single ratio.
    None is left out; the text is empty without ratios."""
    found = [ratio for ratio in ratios if ratio is not None]
    if not found:
        return ""
    mean = math.exp(sum(map(math.log, found)) / len(found))
    return f"{mean:.2f} (1 point)" if len(found) == 1 else f"{mean:.2f} (worst {max(found):.2f}, {len(found)} points)"


def means(points: Sequence[Point], ours: Any, peers: Mapping[Any, str]) -> str:
    """ "FA3 0.95 (...), cuDNN ...": our time over the time of each peer that was measured."""
    said = {name: mean_and_worst(point.ratio(ours, peer) for point in points) for peer, name in peers.items()}
    return ", ".join(f"{name} {each}" for name, each in said.items() if each)


# ---- tables

EMPTY = "\b"
"""A heading that takes no place."""


def number(value: float | None, digits: int = 1) -> str:
    """The cell of a time; "-" if the time is missing."""
    return f"{value:.{digits}f}" if value else "-"


def quotient(ours: float | None, theirs: float | None) -> str:
    """The cell of one time over another; "-" if one of them is missing."""
    return f"{ours / theirs:.2f}" if ours and theirs else "-"


def time(head: str, peer: Any, digits: int = 1) -> Column:
    return head, lambda point: number(point.us(peer), digits)


def our_time(peer: Any = OURS, digits: int = 1) -> Column:
    return "**tsmla**", lambda point: f"**{number(point.us(peer), digits)}**" if peer in point.rows else "-"


def over(head: str, ours: Any, *peers: Any) -> Column:
    return head, lambda point: quotient(point.us(ours), point.best(*peers))


FLOOR: Column = ("floor", lambda point: f"{point.floor:.1f}")
OF_FLOOR: Column = ("of floor", lambda point: f"{point.floor / us:.0%}" if (us := point.us(OURS)) else "-")
RATE: Column = ("TFLOP/s", lambda point: f"{point.rows[OURS]['tflops']:.0f}")


def table_of(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column has names, the others numbers."""
    lines = [("| " + " | ".join(heads) + " |").replace(f"{EMPTY} ", ""), "|---" + "|---:" * (len(heads) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def table(points: Sequence[Point], columns: Sequence[Column], among: Sequence[Point] = ()) -> str:
    """A table of `points`, without the columns that show nothing at any of the points `among`, by default `points`."""
    used = [column for column in columns if any(column[1](point) != "-" for point in among or points)]
    return table_of([head for head, _ in used], ([cell(point) for _, cell in used] for point in points))


def whole(columns: Columns, section: Callable[[Point], str] | None = None, panels: Sequence[Panel] = ()) -> Blocks:
    """The table of all points, or one below each section's heading, with its plot."""

    def blocks(loaded: Loaded) -> list[str]:
        if section is None:
            return [table(loaded.points, columns(loaded))]
        found = []
        for title in dict.fromkeys(map(section, loaded.points)):
            plots = [image(panel) for panel in panels if panel.section == title]
            mine = [point for point in loaded.points if section(point) == title]
            found += [f"## {title}", *plots, table(mine, columns(loaded), loaded.points)]
        return found

    return blocks


def image(panel: Panel) -> str:
    """The plot in Markdown; {} stands for the folder of figures."""
    return f"![{panel.text}]({{}}{panel.file}.png)"


# ---- pages


def between_markers(text: str, name: str, body: str) -> str:
    """`text` with what stands between `<!-- name -->` and `<!-- /name -->` replaced.

    Raises:
      ValueError: the two comments are not there once each, in this order.
    """
    opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(opening) != 1 or text.count(closing) != 1 or text.index(opening) > text.index(closing):
        raise ValueError(f"the README must hold {opening} and {closing} once each, in this order")
    head, _, rest = text.partition(opening)
    return f"{head}{opening}\n{body}\n{closing}{rest.partition(closing)[2]}"


def write(record: Record, path: Path, figures: Path, root: Path) -> str:
    """Write a record's plots, its full page and its part of a README of the tree `root`; return its caption.

    Raises:
      ValueError: the record can't be shown, or the README doesn't have the part's two comments once each, the opening
        one first.
      OSError: a file can't be read or written.
    """
    figures.mkdir(parents=True, exist_ok=True)
    with reading(path):
        loaded = load(path, record)
        said, short, blocks = record.caption(loaded), record.short(loaded), [*record.full(loaded)]
        wanted = [panel for panel in record.panels if not panel.section or f"## {panel.section}" in blocks]
        drawn = [panel for panel in wanted if panel.draw(loaded, figures / f"{panel.file}.png")]
        full = [f"# {record.title}", f"{record.unit}{(record.full_caption or (lambda _: said))(loaded)}"]
        full += [image(panel) for panel in drawn if not panel.section] + blocks
    if record.title:
        (figures / f"{record.name}.md").write_text("\n\n".join(full).replace("{}", "") + "\n")
    link = f" All points: [{record.name}.md]({{}}{record.name}.md)." if record.title and not record.full_caption else ""
    body = [said + link, *short, *(image(panel) for panel in drawn if panel.shown)]
    page = root / record.readme
    folder = figures.relative_to(page.parent).as_posix()
    text = between_markers(page.read_text(), record.part or record.name, "\n\n".join(body).replace("{}", f"{folder}/"))
    page.write_text(text)
    return said
