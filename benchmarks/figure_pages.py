"""What the pages that `make figures` writes share: parts of the README, where their numbers come from, and plots."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

# Measured on an H200: the reads of a large copy, and a plain matrix product on random data.
BYTES_PER_S = 4.35e12
# An H100's products are as fast.
H100_BYTES_PER_S = 3.09e12
FLOPS_PER_S = {"bf16": 798e12, "fp8": 1596e12}


def bytes_per_s(device: str) -> float:
    """What the memory of a GPU of that name reads a second, as it was measured."""
    return H100_BYTES_PER_S if "H100" in device else BYTES_PER_S


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


def provenance(rows: Sequence[Row]) -> str:
    """What rows were measured on and when."""
    said = {name: ", ".join(sorted({str(row[name]) for row in rows})) for name in ("device", "commit", "date")}
    return f"Device: {said['device']}; commit {said['commit']}; {said['date']}."


@contextlib.contextmanager
def reading(results: Path) -> Iterator[None]:
    """Turns what a row lacks into a ValueError that names the record."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise ValueError(f"{results}: {type(error).__name__} {error}") from error


def equal_tokens(texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """The share of the texts' tokens that are those of the others, place by place; all texts have as many."""
    pairs = [pair for text, other in zip(texts, others, strict=True) for pair in zip(text, other, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def table_of(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column has names, the others numbers."""
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def quotient(ours: float | None, theirs: float | None) -> str:
    """A cell of one time over another; "-" where one is missing."""
    return f"{ours / theirs:.2f}" if ours and theirs else "-"


def number(value: float | None, digits: int = 1) -> str:
    """A cell of a time; "-" where it is missing."""
    return f"{value:.{digits}f}" if value else "-"


def relative_times(times: Mapping[Any, Mapping[str, float]], ours: str, *peers: str) -> list[float]:
    """Our time over the fastest of the peers', at the points that ours and one of them ran."""
    found = []
    for row in times.values():
        others = [row[peer] for peer in peers if peer in row]
        if ours in row and others:
            found.append(row[ours] / min(others))
    return found


def mean_and_worst(ratios: Sequence[float]) -> str:
    """The geometric mean of ratios of times, the worst of them, and their number; of a single one that alone."""
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    if len(ratios) == 1:
        return f"{mean:.2f} (1 point)"
    return f"{mean:.2f} (worst {max(ratios):.2f}, {len(ratios)} points)"


def write_part(figures: Path, page: Path, name: str, full: Sequence[str], body: Sequence[str]) -> None:
    """Write the blocks `full` as the page NAME.md of `figures`, and between the comments of that name in `page` those
    of `body`, in which {} stands for the folder of figures; the first gets a link to the full page."""
    figures.mkdir(parents=True, exist_ok=True)
    (figures / f"{name}.md").write_text("\n\n".join(block.replace("{}", "") for block in full) + "\n")
    folder = figures.relative_to(page.parent).as_posix()
    linked = [f"{body[0]} All points: [{name}.md]({{}}{name}.md).", *body[1:]]
    text = "\n\n".join(linked).replace("{}", f"{folder}/")
    page.write_text(between_markers(page.read_text(), name, text))


@contextlib.contextmanager
def drawn(
    path: Path,
    size: tuple[float, float],
    panels: int,
    *,
    columns: int | None = None,
    width_ratios: Sequence[float] | None = None,
) -> Iterator[Sequence[Any]]:
    """The axes of panels with one y axis, to draw on; written to `path` at the end. They stand side by side, or in rows
    of `columns`."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    columns = min(columns or panels, panels)
    figure, grid = pyplot.subplots(-(-panels // columns), columns, figsize=size, sharey=True, squeeze=False,
                                   width_ratios=width_ratios, layout="constrained")  # fmt: skip
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
