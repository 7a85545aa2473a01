"""Records of the indexer, of the caches' kernels, of a sparse layer and of products with fp8 weights, and the errors of
records of attention."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import benchmarks.table as tb
from benchmarks import plots
from benchmarks.plots import Mark, Style, chart
from benchmarks.table import OURS

# ---- the indexer

TOPK = {"vllm_cooperative": "vLLM, cooperative", "vllm_persistent": "vLLM, persistent", "vllm_rows": "vLLM, rows",
        "sgl": "SGLang"}  # fmt: skip
TOPK_MODES = {"value": "by value", "equal": "equal rows", "halfzero": "half zeros"}
"""Modes that only our kernel is timed in, and the headings of their columns."""
NAME: tb.Column = "B, S, keys", lambda p: f"{p['b']}, {p['s']}, {p['keys']}" + ", prefill" * (p["mode"] == "prefill")


def by_keys(ratio: Callable[[tb.Point], float | None], label: str) -> plots.Draw:
    """A plot with a panel for each number of requests of a decode step and one for prefill, and a line for each number
    of query tokens."""

    def mark(p: tb.Point) -> Mark:
        return Mark(f"{p['mode']}, B = {p['b']}", f"S = {p['s']}", p["keys"], ratio(p))

    style = Style(label, "keys of a request", x_name=thousands, width=(2, 1.8))
    return chart(lambda loaded: map(mark, sorted(loaded.points, key=lambda point: point.key)), style)


def indexer_record(
    name: str, title: str, caption: Callable[[tb.Loaded], str], columns: tb.Columns, relative: tuple[str, plots.Draw],
    key: tuple[str, ...] = ("mode", "b", "s", "keys"), peer: Callable[..., str] = lambda row: row["peer"],
) -> tb.Record:  # fmt: skip
    """A record with a caption and a plot in the README's part, and all points on its full page."""
    panel = tb.Panel(f"{name}_relative", relative[0], relative[1], shown=True)
    return tb.Record(name, title, key, caption, tb.whole(columns), panels=(panel,), unit="Microseconds. ", peer=peer)


def logits() -> tb.Record:
    def caption(loaded: tb.Loaded) -> str:
        ratios = tb.mean_and_worst(point.ratio(OURS, "deep_gemm") for point in loaded.points)
        said = f"tsmla's time over DeepGEMM's: {ratios}, geometric mean. 64 heads of 128, e4m3. "
        return said + tb.provenance(loaded.rows)

    columns = (NAME, tb.FLOOR, tb.time("DeepGEMM", "deep_gemm"), tb.our_time(),
               tb.over("/ DeepGEMM", OURS, "deep_gemm"), tb.OF_FLOOR)  # fmt: skip
    draw = by_keys(lambda point: point.ratio(OURS, "deep_gemm"), "time / DeepGEMM's")
    return indexer_record(
        "indexer_logits", "The indexer's logits", caption, lambda _: columns,
        ("time of the indexer's logits over DeepGEMM's", draw),
    )  # fmt: skip


def topk() -> tb.Record:
    def caption(loaded: tb.Loaded) -> str:
        ratios = tb.mean_and_worst(point.ratio(OURS, *TOPK) for point in loaded.points)
        said = (
            f"tsmla's time over the best peer's: {ratios}, geometric mean. The {loaded.rows[0]['k']} largest, ours in "
        )
        return f"{said}ascending positions. {tb.provenance(loaded.rows)}"

    def marks(loaded: tb.Loaded) -> Iterable[Mark]:
        return (Mark("", f"{p['b']} row" + "s" * (p["b"] > 1), p["keys"], p.ratio(OURS, *TOPK))
                for p in sorted(loaded.points, key=lambda point: point.key))  # fmt: skip

    name: tb.Column = "rows x keys", lambda point: f"{point['b']} x {point['keys']}"
    columns = (name, tb.FLOOR, *(tb.time(title, peer) for peer, title in TOPK.items()), tb.our_time(),
               tb.over("/ best peer", OURS, *TOPK), *(tb.time(x, mode) for mode, x in TOPK_MODES.items()))  # fmt: skip
    style = Style("time / best peer's", "keys of a row", x_name=thousands, width=(7, 0))
    return indexer_record(
        "select_topk", "Top-k", caption, lambda _: columns,
        ("time of top-k over the best peer's", chart(marks, style)), ("b", "keys"),
        lambda row: row["peer"] if row["mode"] == "position" else row["mode"],
    )  # fmt: skip


def peers_sum(point: tb.Point) -> float | None:
    """The sum of DeepGEMM's time and that of the fastest top-k of vLLM's and SGLang's, each timed alone; None if either
    is missing."""
    score, best = point.us("deep_gemm"), point.best(*TOPK)
    return score + best if score is not None and best is not None else None


def over_sum(point: tb.Point) -> float | None:
    ours, theirs = point.us(OURS), peers_sum(point)
    return ours / theirs if ours and theirs else None


def selection() -> tb.Record:
    def columns(loaded: tb.Loaded) -> Sequence[tb.Column]:
        peers = {peer for point in loaded.points for peer in point.rows}
        sizes = sorted(int(peer.removeprefix("tsmla_")) for peer in peers if peer.removeprefix("tsmla_").isdigit())
        return (
            NAME, tb.FLOOR, ("DeepGEMM, top-k", lambda p: f"{us:.1f}" if (us := peers_sum(p)) else "-"),
            tb.time("two kernels", "tsmla_two"), tb.our_time(),
            ("/ DeepGEMM, top-k", lambda p: f"{ratio:.2f}" if (ratio := over_sum(p)) else "-"),
            tb.over("/ two kernels", OURS, "tsmla_two"), *(tb.time(f"{size} MiB", f"tsmla_{size}") for size in sizes),
        )  # fmt: skip

    def caption(loaded: tb.Loaded) -> str:
        points, first = loaded.points, loaded.rows[0]
        mean = tb.mean_and_worst(map(over_sum, points))
        said = f"Geometric means of tsmla's time over the sum of DeepGEMM's and the fastest top-k's: {mean}"
        if one := tb.mean_and_worst(over_sum(point) for point in points if point["s"] == 1):
            said += f"; with one token a request {one}"
        two = tb.mean_and_worst(point.ratio(OURS, "tsmla_two") for point in points)
        said += f". Over our two kernels one after the other: {two}; "
        said += "they are given the rows' lengths and keep all logits. "
        return f"{said}The {first['k']} largest of {first['h']} heads of 128, e4m3. {tb.provenance(loaded.rows)}"

    draw = by_keys(over_sum, "time / DeepGEMM's and top-k's")
    return indexer_record(
        "indexer_topk", "The indexer's selection", caption, columns, ("time of indexer_topk over the peers'", draw),
    )  # fmt: skip


# ---- caches

MANY_TOKENS = 4096  # the fewest that the caption compares: with fewer tokens the launch takes most of the time


def copies(name: str, title: str, what: str) -> tb.Record:
    """A record of the case `cache` or `merge`: times beside the time of copying the same bytes."""

    def dtypes(row: tb.Row) -> str:
        return " to ".join(dict.fromkeys(row["dtypes"]))

    def caption(loaded: tb.Loaded) -> str:
        many = [row["us"] / row["copy_us"] for row in loaded.rows if row["tokens"] >= MANY_TOKENS]
        said = (
            f"{what} {min(many):.2f} to {max(many):.2f} times a copy of the same bytes from {MANY_TOKENS} tokens on: "
        )
        return f"{said}[{name}.md]({{}}{name}.md)."

    def full(loaded: tb.Loaded) -> list[str]:
        cells = {(f"`{row['op']}`, {dtypes(row)}", row["tokens"]): f"{row['us']:.1f} ({row['us'] / row['copy_us']:.2f})"
                 for row in loaded.rows}  # fmt: skip
        tokens = sorted({row["tokens"] for row in loaded.rows})
        lines = [[line, *(cells.get((line, count), "-") for count in tokens)]
                 for line in dict.fromkeys(line for line, _ in cells)]  # fmt: skip
        return [tb.table_of([tb.EMPTY, *(f"T {count}" for count in tokens)], lines)]

    def full_caption(loaded: tb.Loaded) -> str:
        return f"Microseconds, and in brackets over the time of copying the same bytes. {tb.provenance(loaded.rows)}"

    def marks(loaded: tb.Loaded) -> Iterator[Mark]:
        for row in loaded.rows:
            line = dtypes(row).replace("float8_e4m3fn", "fp8").replace("bfloat16", "bf16")
            yield Mark(row["op"], line, row["tokens"], row["us"] / row["copy_us"])

    style = Style("time / copying the same bytes", "tokens", log=True, x_name=thousands)
    panel = tb.Panel(f"{name}_relative", "time over that of copying the same bytes", chart(marks, style))
    return tb.Record(name, title, (), caption, full, panels=(panel,), peer=lambda row: OURS, full_caption=full_caption)


def thousands(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def compress() -> tb.Record:
    kinds = {"v4_4": "V4, 1 in 4", "v4_128": "V4, 1 in 128", "indexer_4": "V4's indexer, 1 in 4"}

    def name(point: tb.Point) -> str:
        mode, b = point.key
        return f"prefill of {b} tokens" if mode == "prefill" else f"decode, B {b}, {mode} complete an entry"

    def cell(kind: str) -> Callable[[tb.Point], str]:
        return lambda p: f"{p.us(kind):.1f} ({p.rows[kind]['floor_us']:.1f})" if kind in p.rows else "-"

    columns: Sequence[tb.Column] = ((tb.EMPTY, name), *((title, cell(kind)) for kind, title in kinds.items()))
    said = "`compress_write_kv_cache`, microseconds, and in brackets the floor of its bytes."
    return tb.Record(
        "compress", "", ("mode", "b"), lambda loaded: f"{said} {tb.provenance(loaded.rows)}",
        short=lambda loaded: [tb.table(loaded.points, columns)], peer=lambda row: row["kind"],
    )  # fmt: skip


# ---- a sparse layer

ENGINES = "engines"
STEP, ON_HOST = "step", "step by the host's clock"  # older records also have rows of parts of a step


def sparse_layer() -> tb.Record:
    ours, theirs = (OURS, STEP), (ENGINES, STEP)
    columns: Sequence[tb.Column] = (
        ("B, H", lambda point: f"{point['b']}, {point['h']}"), tb.time("engines' kernels", theirs), tb.our_time(ours),
        tb.over("/ engines'", ours, theirs),
        tb.time("by the host's clock: engines'", (ENGINES, ON_HOST)), tb.time("tsmla", (OURS, ON_HOST)),
    )  # fmt: skip

    def caption(loaded: tb.Loaded) -> str:
        ratios, first = tb.mean_and_worst(point.ratio(ours, theirs) for point in loaded.points), loaded.rows[0]
        compared = f"tsmla's time over theirs: {ratios}, geometric mean. " if ratios else ""
        return (
            f"A decode step of a V3.2 layer without its projections, {first['keys']:,} keys a request, {first['k']:,} "
            f"of them selected, microseconds by the GPU's clock: ours one function of jax, the engines' kernels one "
            f"CUDA graph. {compared}{tb.provenance(loaded.rows)}"
        )

    def tables(loaded: tb.Loaded) -> list[str]:
        return [tb.table(loaded.points, columns)]

    def marks(loaded: tb.Loaded) -> Iterable[Mark]:
        return (Mark(f"H = {p['h']}", title, p["b"], p.us(peer))
                for p in sorted(loaded.points, key=lambda point: (point["h"], point["b"]))
                for peer, title in ((theirs, "engines' kernels"), (ours, "tsmla")))  # fmt: skip

    colours = {"engines' kernels": "tab:orange", "tsmla": "tab:blue"}
    style = Style("us a step", "requests", bars=True, spread=0.4, width=(2, 3), one=False, colours=colours)
    return tb.Record(
        "sparse_layer", "A sparse layer", ("b", "h"), caption, tables, tables,
        (tb.Panel("sparse_layer", "microseconds of a sparse layer's step", chart(marks, style), shown=True),),
        peer=lambda row: (row["peer"], row["part"]), order=lambda point: point.key,
    )  # fmt: skip


# ---- errors, of the records in ERRORS

ERROR_PEERS = {
    "tsmla": "tsmla", "tsmla_bf16_q": "tsmla, bf16 q", "tsmla_fp8": "tsmla, fp8", "tsmla fp8 queries": "tsmla, fp8 q",
    "tsmla_deterministic": "tsmla, det.", "flashmla": "FlashMLA", "legacy": "SGLang", "fa3": "FA3", "fa4": "FA4",
    "cudnn": "cuDNN",
}  # fmt: skip
ERRORS = {
    "errors_decode": {"decode_bf16": "decode, bf16", "decode_fp8": "decode, fp8", "sparse_mla": "sparse decode"},
    "errors_prefill": {"prefill": "prefill", "prefill_fa4": "prefill, earlier run",
                       "sparse_mla_prefill": "sparse prefill", "prefill_backward": "gradient, bf16"},
}  # fmt: skip
"""The plots of errors, and the panels of each: a record's name and a title."""


def errors_of(row: tb.Row) -> Iterator[float]:
    for name in ("rel_err", "dq_err", "dk_err", "dv_err"):
        if row.get(name):
            yield float(row[name])


def write_errors(results: Path, figures: Path) -> str:
    """Draw the relative errors that the folder's records in ERRORS hold, and write errors.md, a caption and a table of
    them, if there are any. Return the caption, or "none recorded".

    Raises:
      ValueError: a record can't be read.
    """
    used: list[tb.Row] = []
    lines: list[Sequence[str]] = []
    for plot, titles in ERRORS.items():
        found: dict[str, dict[str, list[float]]] = {}
        for name, title in titles.items():
            if not (path := results / f"{name}.json").exists():
                continue
            with tb.reading(path):
                rows = {peer: [row for row in json.loads(path.read_text()) if row["peer"] == peer]
                        for peer in ERROR_PEERS}  # fmt: skip
                errors = {peer: [error for row in mine for error in errors_of(row)] for peer, mine in rows.items()}
            for peer, each in errors.items():
                if each:
                    lse = max((row["lse_err"] for row in rows[peer] if row.get("lse_err")), default=None)
                    small = "-" if lse is None else f"{lse:.0e}".replace("e-0", "e-")
                    ends = f"{min(each):.2%}", f"{max(each):.2%}"
                    lines.append((title, ERROR_PEERS[peer], str(len(rows[peer])), *ends, small))
                    found.setdefault(title, {})[ERROR_PEERS[peer].replace(", ", ",\n")] = each
                    used += rows[peer]
        if found:
            plots.draw_errors(found, figures / f"{plot}.png")
    if not used:
        return "none recorded"
    said = (
        "Errors relative to attention in float64 over the values that the inputs stand for (norm of the difference "
        "over norm); of fp8 queries in sparse prefill, out's over the bf16 queries that they were rounded from; of "
        "the gradient, those of q, k and v. The last column has the greatest absolute error of the logsumexp over the "
        f"values of the inputs, where it was measured. {tb.provenance(used)}"
    )
    heads = ["call", "kernel", "points", "least", "greatest", "of lse"]
    body = tb.table_of(heads, lines).replace("|---|---:|", "|---|---|", 1)
    (figures / "errors.md").write_text(f"# Errors\n\n{said}\n\n{body}\n")
    return said


# ---- products

EXPERTS_OF = {(4096, 7168): "V3's experts", (4096, 4096): "V4's experts", (2816, 2048): "V2-Lite's experts"}
"""The model that has such experts, by the size of their gate and up projections."""
PRODUCT_PEERS = {"deep_gemm": "DeepGEMM", "cublas": "cuBLAS, bf16"}


def fp8_products() -> tb.Record:
    def name(point: tb.Point) -> str:
        op, t, n, k = point.key
        return f"{t:,} token{'s' * (t > 1)}, {EXPERTS_OF[n, k] if op == 'experts' else f'{n} x {k}'}"

    columns: Sequence[tb.Column] = (
        (tb.EMPTY, name), tb.FLOOR, *(tb.time(title, peer) for peer, title in PRODUCT_PEERS.items()),
        tb.our_time(), tb.time("exact", "tsmla_exact"), tb.over("/ DeepGEMM", OURS, "deep_gemm"),
        tb.over("exact / cuBLAS", "tsmla_exact", "cublas"),
    )  # fmt: skip

    def caption(loaded: tb.Loaded) -> str:
        compared = {f"{ours} over {PRODUCT_PEERS[peer]}": tb.mean_and_worst(p.ratio(ours, peer) for p in loaded.points)
                    for ours, peer in itertools.product((OURS, "tsmla_exact"), PRODUCT_PEERS)}  # fmt: skip
        said = ", ".join(f"{kind} {ratios}" for kind, ratios in compared.items() if ratios)
        over = f"Geometric means of times: {said}. " if said else ""
        return (
            "Products with e4m3 weights, microseconds: of activations in e4m3, and exact ones of bf16. A point of "
            "experts has both of their products, and ours also what is between them. cuBLAS multiplies bf16 with "
            f"weights that were widened before. {over}{tb.provenance(loaded.rows)}"
        )

    return tb.Record(
        "fp8_products", "Products with fp8 weights", ("op", "t", "n", "k"), caption, tb.whole(lambda _: columns),
        lambda loaded: [tb.table(loaded.points, columns)],
        order=lambda point: (point["op"] != "experts", point["n"] * point["k"], point["t"]),
    )  # fmt: skip


RECORDS = (
    copies("cache", "Cache kernels", "The kernels of the cache take"), copies("merge", "Merging", "Merging takes"),
    compress(), sparse_layer(), logits(), topk(), selection(), fp8_products(),
)  # fmt: skip
