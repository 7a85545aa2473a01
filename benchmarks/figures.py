"""Draw the figures, and write the tables of benchmarks/README.md and README.md's sentence of results, from the records
of kernels (`make figures`, which also runs examples/whole_models/figures.py for those of whole models).

Every number shown comes from `benchmarks/results`: lists of rows, one for each point and function. `benchmarks/records`
declares what records are shown as: plots and a full page in `benchmarks/figures`, and a part of a README between the
comments `<!-- NAME -->` and `<!-- /NAME -->`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import table
from benchmarks.records import RECORDS, operations, write_headline, write_summary
from benchmarks.table import Record

ROOT = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str] | None = None, records: Sequence[Record] = RECORDS) -> int:
    """Draw the records' plots, and write their pages and their parts of the READMEs. Return 0, or 2 after a line about
    the first record that can't be read or the first page that can't be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree whose records, pages and figures are meant")
    root = parser.parse_args(argv).root.resolve()
    results, figures = root / "benchmarks" / "results", root / "benchmarks" / "figures"
    files = ((record, results / record.folder / f"{record.name}.json") for record in records)
    written = [(path, partial(table.write, record, path, figures, root)) for record, path in files if path.exists()]
    if not written:
        print(f"nothing recorded under {results}")
        return 0
    page = root / "benchmarks" / "README.md"
    if page.exists():
        written.append((Path("summary"), partial(write_summary, results / "h200", page)))
    if (root / "README.md").exists():
        written.append((Path("headline"), partial(write_headline, results / "h200", root / "README.md")))
    written.append((Path("errors"), partial(operations.write_errors, results / "h200", figures)))
    for path, function in written:
        try:
            print(f"{path.name}: {function()}")
        except (ValueError, OSError) as error:
            print(f"figures: error: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
