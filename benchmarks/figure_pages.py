"""What the pages that `make figures` writes share: parts of the README, and where their numbers come from."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


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
