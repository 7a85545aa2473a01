"""Figures over several records or none: errors, bytes of a cached token, caches' kernels, and the compressor."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from figure_pages import between_markers, drawn, provenance, reading

from tsmla_kernels.contract.layouts import INDEXER, V4_PACKED, V32_PACKED

Row = Mapping[str, Any]

OURS = "tab:blue"
PEERS = {
    "tsmla": "tsmla",
    "tsmla_bf16_q": "tsmla,\nbf16 q",
    "tsmla_fp8": "tsmla,\nfp8",
    "tsmla fp8 queries": "tsmla,\nfp8 q",
    "tsmla_deterministic": "tsmla,\ndet.",
    "flashmla": "FlashMLA",
    "legacy": "SGLang",
    "fa3": "FA3",
    "fa4": "FA4",
    "cudnn": "cuDNN",
}
ERRORS = {
    "errors_decode": {"decode_bf16": "decode, bf16", "decode_fp8": "decode, fp8", "sparse_mla": "sparse decode"},
    "errors_prefill": {
        "prefill": "prefill",
        "prefill_fa4": "prefill, earlier run",
        "sparse_mla_prefill": "sparse prefill",
        "prefill_backward": "gradient, bf16",
    },
}
"""The figures of errors, and the panels of each: a record's name and a title."""
COMPRESSORS = {"v4_4": "V4, 1 in 4", "v4_128": "V4, 1 in 128", "indexer_4": "V4's indexer, 1 in 4"}
V3_HEADS, V3_KEY_AND_VALUE, PAGE = 128, 192 + 128, 64


def write_errors(results: Path, figures: Path) -> str:
    """Draw the relative errors that the records of the folder `results` hold, and write a page with their caption, if
    there are any; return it.

    Raises:
      ValueError: a record can't be read.
    """
    rows: list[Row] = []
    lines = ["| call | kernel | points | least | greatest | of lse |", "|---|---|---:|---:|---:|---:|"]
    for image, titles in ERRORS.items():
        found = {}
        for name, title in titles.items():
            if (path := results / f"{name}.json").exists():
                try:
                    mine = [row for row in json.loads(path.read_text()) if row["peer"] in PEERS]
                    errors = {
                        peer: [e for row in mine if row["peer"] == peer for e in _errors_of(row)] for peer in PEERS
                    }
                except (KeyError, TypeError, ValueError) as error:
                    raise ValueError(f"{path}: {type(error).__name__} {error}") from error
                if any(errors.values()):
                    found[title] = {peer: each for peer, each in errors.items() if each}
                    rows += mine
                    for peer, each in found[title].items():
                        lse = [row["lse_err"] for row in mine if row["peer"] == peer and row.get("lse_err")]
                        cells = [f"{min(each):.2%}", f"{max(each):.2%}", _small(max(lse)) if lse else "-"]
                        points = sum(row["peer"] == peer for row in mine)
                        name = PEERS[peer].replace("\n", " ")
                        lines.append(f"| {title} | {name} | {points} | {' | '.join(cells)} |")
        if found:
            _draw_errors(found, figures / f"{image}.png")
    if not rows:
        return "none recorded"
    said = (
        "Errors relative to attention in float64 over the values that the inputs stand for (norm of the difference "
        "over norm); of the gradient, those of q, k and v. The last column has the greatest absolute error of the "
        f"logsumexp, where it was measured. {provenance(rows)}"
    )
    (figures / "errors.md").write_text(f"# Errors\n\n{said}\n\n" + "\n".join(lines) + "\n")
    return said


def _draw_errors(found: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Errors by peer, a panel for each of `found`."""
    columns = [len(errors) for errors in found.values()]
    jitter = random.Random(0)
    with drawn(path, (1.2 + 0.6 * sum(columns), 3.8), len(found), width_ratios=columns) as panels:
        for axes, (title, errors) in zip(panels, found.items(), strict=True):
            for i, (peer, each) in enumerate(errors.items()):
                xs = [i + jitter.uniform(-0.25, 0.25) for _ in each]
                colour = OURS if peer.startswith("tsmla") else "tab:orange"
                axes.scatter(xs, each, s=9, alpha=0.5, linewidths=0, color=colour)
            axes.set_xticks(range(len(errors)), [PEERS[peer] for peer in errors], fontsize=7, rotation=45)
            axes.set_xlim(-0.6, len(errors) - 0.4)
            axes.set_yscale("log")
            axes.set_title(title, fontsize=9)
        panels[0].minorticks_off()
        panels[0].set_yticks(
            [1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1], ["0.1%", "0.2%", "0.5%", "1%", "2%", "5%", "10%"]
        )
        panels[0].set_ylabel("relative error")


def _small(error: float) -> str:
    return f"{error:.0e}".replace("e-0", "e-")


def _errors_of(row: Row) -> Iterator[float]:
    for name in ("rel_err", "dq_err", "dk_err", "dv_err"):
        if row.get(name):
            yield float(row[name])


def bytes_a_token() -> dict[str, float]:
    """Bytes of a layer's cache that one token takes in each format. V4's entries stand for 4 or 128 tokens; its windows
    of the newest tokens don't grow with the text and are left out."""
    dense = V32_PACKED.latent_dim + V32_PACKED.rope_dim
    v4_entry = V4_PACKED.page_bytes(PAGE) / PAGE
    return {
        "V3's keys and values, expanded, bf16": V3_HEADS * V3_KEY_AND_VALUE * 2,
        "latent, bf16 or f16": dense * 2,
        "V3.2: packed, and the indexer's keys": V32_PACKED.row_bytes + INDEXER.row_bytes,
        "latent, fp8": dense,
        "V4, 1 in 4: packed, and the indexer's keys": (v4_entry + INDEXER.row_bytes) / 4,
        "V4, 1 in 128: packed": v4_entry / 128,
    }


def draw_bytes(path: Path) -> str:
    """A bar a format; returns what is drawn."""
    formats = bytes_a_token()
    with drawn(path, (6.5, 2.8), 1) as (axes,):
        axes.barh(range(len(formats)), list(formats.values()), color=OURS, height=0.6)
        axes.set_yticks(range(len(formats)), list(formats), fontsize=8)
        axes.invert_yaxis()
        for i, count in enumerate(formats.values()):
            axes.annotate(f"{count:,.0f}" if count > 100 else f"{count:.2g}", (count, i), (3, 0),
                          textcoords="offset points", va="center", fontsize=8)  # fmt: skip
        axes.set(xscale="log", xlim=(1, 4e5))
        axes.set_xlabel("bytes a token and layer", fontsize=9)
        axes.grid(False, axis="y")
        axes.grid(True, axis="x", alpha=0.3)
    return "bytes a token by cache format"


def draw_copies(rows: Sequence[Row], path: Path) -> None:
    """Times over that of copying the same bytes, a panel an operation and a line a pair of dtypes."""
    operations = list(dict.fromkeys(row["op"] for row in rows))
    with drawn(path, (1.6 + 2.2 * len(operations), 3.6), len(operations)) as panels:
        for axes, op in zip(panels, operations, strict=True):
            for dtypes in dict.fromkeys(tuple(row["dtypes"]) for row in rows if row["op"] == op):
                mine = sorted((row["tokens"], row["us"] / row["copy_us"]) for row in rows
                              if row["op"] == op and tuple(row["dtypes"]) == dtypes)  # fmt: skip
                label = " to ".join(dict.fromkeys(dtypes)).replace("float8_e4m3fn", "fp8").replace("bfloat16", "bf16")
                axes.plot(*zip(*mine, strict=True), marker="o", markersize=4, linewidth=1, label=label)
            axes.axhline(1, color="0.4", linewidth=1)
            axes.set(xscale="log")
            axes.set_title(op, fontsize=9)
            axes.legend(frameon=False, fontsize=7, loc="lower right")
        panels[0].set_ylim(bottom=0)  # at the end: it holds the top too
        panels[0].set_ylabel("time / copying the same bytes")
        panels[0].figure.supxlabel("tokens", fontsize=9)


def write_compress(results: Path, figures: Path, page: Path) -> str:
    """Write the figure and the table of the record of `compress.py`, and the page's part; return its caption."""
    rows = json.loads(results.read_text())
    with reading(results):
        us = {(row["mode"], row["kind"], row["b"]): (float(row["us"]), float(row["floor_us"])) for row in rows}
        sizes = list(dict.fromkeys((mode, b) for mode, _, b in us))
        kinds = [kind for kind in COMPRESSORS if any(kind == each for _, each, _ in us)]
        lines = ["| | " + " | ".join(COMPRESSORS[kind] for kind in kinds) + " |", "|---" + "|---:" * len(kinds) + "|"]
        for mode, b in sizes:
            name = f"prefill of {b} tokens" if mode == "prefill" else f"decode, B {b}, {mode} complete an entry"
            cells = [us.get((mode, kind, b)) for kind in kinds]
            texts = (f"{cell[0]:.1f} ({cell[1]:.1f})" if cell else "-" for cell in cells)
            lines.append(f"| {name} | {' | '.join(texts)} |")
        said = f"`compress_write_kv_cache`, microseconds, and in brackets the floor of its bytes. {provenance(rows)}"
    page.write_text(between_markers(page.read_text(), "compress", f"{said}\n\n" + "\n".join(lines)))
    return said
