"""What the pages that `make figures` writes share: parts of the README, where their numbers come from, and plots."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

# Measured on an H200: the reads of a large copy, and a plain matrix product on random data.
BYTES_PER_S = 4.35e12
FLOPS_PER_S = {"bf16": 798e12, "fp8": 1596e12}


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
