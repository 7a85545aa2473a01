"""The documentation: its examples run, every operation has its page, and it builds without a warning."""

from __future__ import annotations

import doctest
import importlib.util
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tsmla_jax.ops.explain import OPERATIONS
from tsmla_kernels import __version__

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
EXAMPLES = re.compile(r"```pycon\n(.*?)```", re.DOTALL)


SLOW = ("sparse-training",)
"""Pages whose examples compile for half a minute."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.stem in SLOW else ())
        for page in PAGES
        if EXAMPLES.search(page.read_text())
    ],
    ids=lambda p: p.stem,
)
def test_examples(page: Path) -> None:
    """Those of one page share their names, as a reader types them one after the other."""
    code = "\n".join(EXAMPLES.findall(page.read_text()))
    test = doctest.DocTestParser().get_doctest(code, {}, page.name, str(page), 0)
    said: list[str] = []
    failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert tried and not failed, "".join(said)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_a_page(name: str) -> None:
    page = (DOCS / "operations" / f"{name}.md").read_text()
    for part in (f"# {name}\n", ">>> ", f"<!-- runs {name} -->"):
        assert part in page
    assert re.search(rf"^::: tsmla_jax(\.sparse)?\.{name}$", page, re.MULTILINE)
    assert f"({name}.md)" in (DOCS / "operations" / "index.md").read_text()


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "zensical.toml").read_text()
    assert [page.name for page in PAGES if f'"{page.relative_to(DOCS)}"' not in navigation] == []


def test_the_pages_can_be_staged() -> None:
    """Everything that they take from the README, the figures and the kernels is there."""
    done = subprocess.run(
        [sys.executable, DOCS / "build.py", "--stage-only"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    staged = (ROOT / "build" / "docs" / "operations" / "mla_decode.md").read_text()
    assert "| `mla_decode` | reference, xla |" in staged and "../figures/decode_bf16.md" in staged
    assert "<!-- " not in staged


def test_the_citation_is_of_this_version() -> None:
    citation = dict(re.findall(r"^([a-z-]+): (\S.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert citation["version"] == __version__ and citation["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "type"} <= set(citation)


def test_the_source_distribution_can_build_the_documentation(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"docs/build.py", "docs/index.md", "zensical.toml", "CITATION.cff", "Makefile", "README.md"} <= names
    assert not [name for name in names if name.startswith(("build/", ".lab/", "demo-checkpoint/"))]


@pytest.mark.slow
def test_it_builds_strictly() -> None:
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("needs zensical and mkdocstrings-python (make docs installs them)")
    done = subprocess.run([sys.executable, DOCS / "build.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "build" / "site" / "operations" / "mla_decode" / "index.html").read_text()
    assert "softmax_scale" in page and "logsumexp" in page
