"""Build the documentation, strictly (`make docs`): the exit status is not 0 after any warning.

    python docs/build.py [--stage-only]

The pages of docs/ are copied to build/docs, with what they take from elsewhere in the tree: rows and results of the
README, and the tables and plots of benchmarks/figures. The kernels' own pages are added. A page asks
for what it takes by comments:

    <!-- runs -->            the README's table of what runs where; <!-- runs OP --> the row that names an operation
    <!-- readme NAME -->     a part of README.md or benchmarks/README.md that `make figures` writes
    <!-- figure NAME -->     a table of benchmarks/figures
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGE = ROOT / "build" / "docs"
FIGURES = ROOT / "benchmarks" / "figures"
KERNELS = ROOT / "kernels" / "tsmla_kernels"
# The kernels' pages by their names here.
KERNEL_PAGES = {
    "latent.md": KERNELS / "sm90/latent/DESIGN.md",
    "decode.md": KERNELS / "sm90/decode/DESIGN.md",
    "decode_log.md": KERNELS / "sm90/decode/LOG.md",
    "prefill.md": KERNELS / "sm90/prefill/DESIGN.md",
    "prefill_log.md": KERNELS / "sm90/prefill/LOG.md",
    "prefill_backward.md": KERNELS / "sm90/prefill/backward/DESIGN.md",
    "prefill_backward_wide.md": KERNELS / "sm90/prefill/backward/WIDE.md",
    "prefill_backward_log.md": KERNELS / "sm90/prefill/backward/LOG.md",
    "sparse_backward.md": KERNELS / "sm90/sparse_backward/DESIGN.md",
    "sparse_backward_log.md": KERNELS / "sm90/sparse_backward/LOG.md",
    "topk.md": KERNELS / "topk/DESIGN.md",
    "topk_log.md": KERNELS / "topk/LOG.md",
    "logits.md": KERNELS / "sm90/logits/DESIGN.md",
    "logits_log.md": KERNELS / "sm90/logits/LOG.md",
    "sparse.md": KERNELS / "sm90/sparse/DESIGN.md",
    "sparse_union.md": KERNELS / "sm90/sparse/UNION.md",
    "sparse_log.md": KERNELS / "sm90/sparse/LOG.md",
    "merge.md": KERNELS / "merge/DESIGN.md",
    "selection.md": KERNELS / "selection/DESIGN.md",
    "products.md": KERNELS / "sm90/products/DESIGN.md",
    "products_log.md": KERNELS / "sm90/products/LOG.md",
    "few_tokens.md": KERNELS / "sm90/few_tokens/DESIGN.md",
    "few_tokens_log.md": KERNELS / "sm90/few_tokens/LOG.md",
    "caches.md": KERNELS / "cache_ops/DESIGN.md",
    "sparse_caches.md": KERNELS / "sparse_cache/DESIGN.md",
}
KERNEL_NAMES = {source: name for name, source in KERNEL_PAGES.items()}
_COMMENT = re.compile(r"^<!-- (runs|readme|figure)(?: (\w+))? -->$", re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:]+)((?:#[^)]*)?)\)")


def main() -> int:
    """Stage the pages and build them; 0, or another exit status after a warning."""
    stage()
    if "--stage-only" in sys.argv[1:]:
        return 0
    builder = Path(sys.executable).with_name("zensical")
    command = [str(builder), "build", "--strict", "--clean", "--config-file", str(ROOT / "zensical.toml")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout, end="")
    # The builder goes on after what griffe, which reads the docstrings, warns of.
    status = done.returncode or int(re.search("^griffe: ", done.stdout, re.MULTILINE) is not None)
    if status == 0:
        print(f"open {ROOT / 'build' / 'site' / 'index.html'}, or serve it: python -m http.server -d build/site")
    return status


def stage() -> None:
    """Write build/docs anew."""
    shutil.rmtree(STAGE, ignore_errors=True)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    results = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    readme += results.replace("](figures/", "](benchmarks/figures/")
    for source in sorted((ROOT / "docs").rglob("*.md")):
        page = source.relative_to(ROOT / "docs")
        up = "../" * (len(page.parts) - 1)
        write(STAGE / page, filled(staged_links(source, up), readme, up))
    shutil.copy(ROOT / "docs" / "extra.css", STAGE)
    for source in sorted(FIGURES.glob("*.md")):
        write(STAGE / "figures" / source.name, source.read_text(encoding="utf-8"))
    for source in sorted(FIGURES.glob("*.png")):
        shutil.copy(source, STAGE / "figures" / source.name)
    for name, source in KERNEL_PAGES.items():
        write(STAGE / "kernels" / name, page_from(source))


def staged_links(source: Path, up: str) -> str:
    """A page of docs/, its links into the tree turned to where these pages and figures are staged."""

    def link(found: re.Match[str]) -> str:
        image, text, target, anchor = found.groups()
        path = (source.parent / target).resolve()
        if path in KERNEL_NAMES:
            target = f"{up}kernels/{KERNEL_NAMES[path]}"
        elif path.parent == FIGURES:
            target = f"{up}figures/{path.name}"
        return f"{image}[{text}]({target}{anchor})"

    return _LINK.sub(link, source.read_text(encoding="utf-8"))


def filled(page: str, readme: str, up: str) -> str:
    """A page with what its comments ask for; `up` leads from its folder to that of all pages."""
    return _COMMENT.sub(lambda found: insertion(readme, found[1], found[2], up), page)


def insertion(readme: str, kind: str, name: str | None, up: str) -> str:
    """The text that a comment of a page stands for. ValueError if there is no such part or row, OSError if there is no
    such table."""
    if kind == "runs":
        return rows(readme, name)
    if kind == "figure":
        text = (FIGURES / f"{name}.md").read_text(encoding="utf-8")
        return text.partition("\n")[2].strip()
    part = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", readme, re.DOTALL)
    if part is None:
        raise ValueError(f"README.md and benchmarks/README.md have no part {name!r}")
    return part[1].strip().replace("benchmarks/figures/", f"{up}figures/")


def rows(readme: str, operation: str | None) -> str:
    """The README's table of what runs where, or the row of it that names the operation."""
    table = re.search(r"^\| operation \|.*?(?=\n\n)", readme, re.DOTALL | re.MULTILINE)
    if table is None:
        raise ValueError("README.md has no table of the operations")
    head, line, *body = table[0].splitlines()
    # Operations with the same kernels share a row.
    found = [row for row in body if operation is None or f"`{operation}`" in row.split("|")[1]]
    if not found:
        raise ValueError(f"README.md's table has no row of {operation!r}")
    return "\n".join([head, line, *found])


def page_from(source: Path) -> str:
    """A page from elsewhere, its links to the kernels' pages kept and its links to other files made text."""

    def link(found: re.Match[str]) -> str:
        image, text, target, anchor = found.groups()
        name = KERNEL_NAMES.get((source.parent / target).resolve())
        if name is None:
            return f"`{Path(target).name}`" if not image else ""
        return f"[{text}]({name}{anchor})"

    return _LINK.sub(link, source.read_text(encoding="utf-8"))


def write(path: Path, text: str) -> None:
    """A page, its folder made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
