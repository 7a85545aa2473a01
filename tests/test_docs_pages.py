"""The documentation's pages as they are staged for the builder: links, tables, lists, code and records."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cases import CASES
from tsmla_kernels import contract
from tsmla_kernels.contract.layouts import INDEXER, V4_PACKED, V32_PACKED
from tsmla_kernels.kernel import ITEMSIZE
from tsmla_kernels.sm90.decode import config as decode

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
SHARED_BY_BENCHMARKS = ("benchmarks/harness.py", "benchmarks/peers/__init__.py", "examples/whole_models/models.py")
"""Modules whose flags several benchmarks have."""
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
WIDEST_CODE = 102  # columns that fit beside the sidebars


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """Text by path of every staged page, the code in it left out."""
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    assert spec and spec.loader
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    build.STAGE = tmp_path_factory.mktemp("docs")
    build.stage()
    return {path: CODE.sub("", path.read_text()) for path in build.STAGE.rglob("*.md")}


def _anchors(text: str) -> set[str]:
    """Of the headings, as Python-Markdown makes them, and of the objects that docstrings are shown of."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", re.sub(r"[`*]|\]\([^)]*\)", "", title)).strip().lower() for title in titles)
    return {re.sub(r"[\s-]+", "-", title) for title in plain} | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


def test_links_lead_to_pages_and_headings(pages: dict[Path, str]) -> None:
    broken = []
    for path, text in pages.items():
        for target in LINK.findall(re.sub(r"`[^`\n]*`", "", text)):
            file, _, anchor = target.partition("#")
            if "://" in file:
                continue
            page = (path.parent / file).resolve() if file else path
            if not page.exists() or (anchor and anchor not in _anchors(pages[page])):
                broken.append(f"{path.name}: {target}")
    assert broken == []


def _paragraphs(pages: dict[Path, str]) -> Iterator[tuple[str, list[str]]]:
    """The blocks of lines of every page."""
    for path, text in pages.items():
        for block in re.split(r"\n\s*\n", text):
            yield path.name, block.strip("\n").split("\n")


def test_tables_have_rows_of_one_width(pages: dict[Path, str]) -> None:
    """A table that follows a paragraph, or whose row has a cell too many, is shown as text or loses the cell."""
    found = 0
    for name, lines in _paragraphs(pages):
        rows = [line for line in lines if line.startswith("|")]
        if rows:
            found += 1
            assert rows == lines, f"{name}: {lines[0]}"
            widths = {len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row))) for row in rows}
            assert len(widths) == 1, f"{name}: {rows[0]}"
    assert found > 50


def test_lists_do_not_follow_a_paragraphs_line(pages: dict[Path, str]) -> None:
    """The builder would run them into the paragraph."""
    item = re.compile(r"(?:[-*]|\d+\.) ")
    for name, lines in _paragraphs(pages):
        assert item.match(lines[0]) or not any(item.match(line) for line in lines), f"{name}: {lines[0]}"


def test_a_page_has_one_title_and_no_heading_twice(pages: dict[Path, str]) -> None:
    for path, text in pages.items():
        headings = re.findall(r"^(#+) (.+)$", text, re.MULTILINE)
        assert [marks for marks, _ in headings].count("#") == 1 and headings[0][0] == "#", path.name
        assert len({title for _, title in headings}) == len(headings), path.name


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_code_fits_the_page(page: Path) -> None:
    blocks = CODE.findall(page.read_text()) + re.findall(r"^    .*$", page.read_text(), re.MULTILINE)
    assert [line for block in blocks for line in block.split("\n") if len(line) > WIDEST_CODE] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_programs_use_names_that_exist(page: Path) -> None:
    """Those that need a GPU or a checkpoint, and are not run as examples."""
    for program in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tsmla"):
                module = importlib.import_module(node.module)
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id.startswith("tsmla")
            ):
                assert hasattr(importlib.import_module(node.value.id), node.attr), node.attr


def test_every_record_says_how_it_was_made_and_every_command_exists() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    reproduce = page.partition("## Reproduce")[2]
    names = {path.stem for path in (BENCHMARKS / "results").rglob("*.json")}
    assert names <= set(re.findall(r"`(\w+)`", reproduce)) and names >= {*CASES}
    assert not re.search(r"^\|.*python", page, re.MULTILINE)  # commands are no cells of tables
    blocks = "\n".join(CODE.findall(reproduce)).replace("\\\n", "")
    commands = re.findall(r"^python -m ((?:benchmarks|examples)[.\w]*)([^#\n]*)", blocks, re.MULTILINE)
    assert len(commands) > 8
    shared = "".join((ROOT / name).read_text() for name in SHARED_BY_BENCHMARKS)
    for module, options in commands:
        path = ROOT / module.replace(".", "/")
        source = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text() + shared
        for option in re.findall(r"--(\w+)", options):
            assert f'"{option}"' in source, f"{module} --{option}"


def test_the_summary_comes_first() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert re.findall(r"^## (.*)$", page, re.MULTILINE)[0] == "Summary" and "<!-- readme summary -->" in page
    step, prompt = re.findall(r"(\d\.\d\d) of (?:its decode step|a prompt)'s", page.replace("\n", " "))
    assert f"decode {step} (worst" in (said := (BENCHMARKS / "README.md").read_text()) and f"prefill {prompt} (" in said


def test_the_bytes_of_a_token_are_those_of_the_layouts() -> None:
    page = (ROOT / "docs" / "performance.md").read_text().partition("## Memory a token")[2].partition("\n## ")[0]
    said = [float(text.replace(",", "")) for text in re.findall(r"\| ([\d.,]+) \|$", page, re.MULTILINE)]
    dense, v4 = V32_PACKED.latent_dim + V32_PACKED.rope_dim, V4_PACKED.page_bytes(64) / 64
    keys = INDEXER.row_bytes
    want = [128 * (192 + 128) * 2, dense * 2, V32_PACKED.row_bytes + keys, dense, (v4 + keys) / 4, v4 / 128]
    assert said == [round(size, 1 if size < 10 else None) for size in want] and sorted(want, reverse=True) == want


def _workspace(batch: int, heads: int, keys: int, batch_invariant: bool, *, whole: bool = False) -> float:
    """Megabytes of a decode call's largest launch on an H200, or of all of it in one launch."""
    spec = contract.DecodeSpec(
        batch=batch, total_q_len=batch, max_q_len=1, num_heads=heads, latent_dim=512, rope_dim=64, num_pages=1,
        page_size=64, max_pages=keys // 64, q_dtype="bfloat16", kv_dtype="bfloat16", ragged=False, causal=True,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    config = decode.decode_config(spec)
    largest = max(stop - first for first, stop in decode.launches(config, batch, spec.max_pages))
    shapes = decode.workspace_shapes(config, 132, batch if whole else largest, spec.max_pages)
    return sum(math.prod(shape) * ITEMSIZE[dtype] for shape, dtype in shapes.values()) / 1e6


def test_the_workspaces_of_decode_are_as_its_page_says() -> None:
    page = (ROOT / "docs" / "operations" / "mla_decode.md").read_text()
    assert f"{_workspace(64, 128, 8192, False):.0f} MB in all" in page
    assert f"({_workspace(64, 32, 8192, False):.0f} MB with at most 32" in page
    assert f"{_workspace(256, 128, 131072, True, whole=True) / 1e3:.2f} GB" in page
    assert _workspace(256, 128, 131072, True) * 1e6 < 1.01 * 2**28 and "at most 256 MiB" in page


def test_what_guides_say_of_decode_is_in_the_records() -> None:
    """Several tokens a request, queries in e4m3, errors over an fp8 cache, and the host's time."""

    def times(record: str, peer: str, field: str = "us") -> dict[tuple[int, ...], float]:
        rows = json.loads((BENCHMARKS / "results" / "h200" / f"{record}.json").read_text())
        names = ("b", "keys", "varlen", "h", "s")
        return {tuple(row[name] for name in names): row[field] for row in rows if row["peer"] == peer}

    bf16 = times("decode_bf16", "tsmla")
    shared = [us / bf16[*case[:4], 1] for case, us in bf16.items() if not case[2] and 1 < case[4] <= 64 // case[3]]
    page = (ROOT / "docs" / "guides" / "paged-caches.md").read_text()
    middle = statistics.median(shared)
    said = f"{min(shared):.2f} to {max(shared):.2f} times what one token takes, in the median {middle:.2f}"
    assert said in page.replace("\n", " ")

    fp8, wide = times("decode_fp8", "tsmla"), times("decode_fp8", "tsmla_bf16_q")
    many = [us / wide[case] for case, us in fp8.items() if case[3] * case[4] >= 64]
    said = f"take {min(many):.2f} to {max(many):.2f} of their time"
    for name in ("guides/fp8.md", "faq.md"):
        assert said in (ROOT / "docs" / name).read_text().replace("\n", " ")

    ours, theirs = (times("decode_fp8", peer, "rel_err") for peer in ("tsmla", "flashmla"))
    worse = [error / ours[case] for case, error in theirs.items()]
    for text in ((BENCHMARKS / "README.md").read_text(), (ROOT / "docs" / "guides" / "fp8.md").read_text()):
        assert f"{min(worse):.1f} to {max(worse):.0f} times" in text
    host = json.loads((BENCHMARKS / "results" / "h200" / "bridge_overhead.json").read_text())
    us = {row["function"]: row["us"] for row in host}
    theirs_us = us["FlashMLA's operator"]
    guide = (ROOT / "docs" / "guides" / "torch.md").read_text().replace("\n", " ")
    assert f"takes the host {us['tsmla']:.0f} us, FlashMLA's operator {theirs_us:.0f}" in guide
