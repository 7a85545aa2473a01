"""Draw the figures and write the tables of README.md and benchmarks/README.md from the records (`make figures`).

Every number shown comes from `benchmarks/results/<device>/decode_<dtype>.json`: a list of objects, one a point and
peer, with b, s, h, keys, varlen, page, dtype, peer (ours is "tsmla"), us, floor_us, rel_err, device, commit, date and
versions. Each file gives two PNGs and a full table under `benchmarks/figures/`, and the README's short table between
the comments `<!-- decode_<dtype> -->` and `<!-- /decode_<dtype> -->`. benchmarks/README.md has the others' between
comments of their names: of `sparse_mla.py`, whose record has a `mode` too and gives a PNG for each of its modes and
one full table; of the other programs that time kernels, figures and a full table (of `compress.py` a table); of
`generate.py`, `vllm_steps.py` and `context_parallel.py`. All records that have errors give one figure of them. That of
`decode_cpu.py` gives a page of its own.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import backward_figures
import indexer_figures
import model_figures
import overview_figures
import prefill_figures
import roofline_figures
import sparse_figures
from figure_pages import BYTES_PER_S, FLOPS_PER_S, between_markers, drawn, provenance, reading

ROOT = Path(__file__).resolve().parent.parent
OURS = "tsmla"
# Compared with nobody: the same kernel as XLA runs it, since the peers are timed as kernels; and bf16 queries over an
# fp8 cache, which no peer takes.
OURS_TOO = {"tsmla_jit": "in jax.jit", "tsmla_bf16_q": "bf16 queries"}
PEER_NAMES = {OURS: "tsmla", "flashmla": "FlashMLA", "legacy": "SGLang", "fa3": "FA3", "fa4": "FA4 SM90"}
MODE_NAMES = {"v32": "V3.2", "v4-512": "V4, 128 + 512", "v4-1024": "V4, 128 + 1024"}
# The README shows these (B, S, H, keys), of uniform lengths; the full tables are beside the figures.
SHORT_TABLE = (
    (1, 1, 16, 4096),
    (4, 1, 16, 81920),
    (64, 1, 16, 8192),
    (16, 1, 128, 8192),
    (64, 4, 128, 8192),
    (32, 4, 128, 81920),
)
# Of the sparse record, all modes.
SHORT_SPARSE = (("v32", 1, 1, 16), ("v32", 8, 1, 16), ("v32", 64, 1, 16), ("v32", 64, 1, 128), ("v32", 128, 2, 128),
                ("v4-512", 64, 1, 64), ("v4-1024", 64, 1, 128))  # fmt: skip
MANY_TOKENS = 4096  # that a sentence about copies is of: fewer are bound by the launch

LATENT, ROPE = 512, 64
BYTES_PER_KEY = {"bf16": 2 * (LATENT + ROPE), "fp8": LATENT + ROPE}

Row = dict[str, object]


@dataclass(frozen=True, order=True)
class Case:
    """One point of the grid: requests, query tokens a request, heads, keys a request, ragged lengths, page size, and
    of the sparse record the mode."""

    h: int
    s: int
    b: int
    keys: int
    varlen: bool
    page: int
    mode: str = ""


@dataclass(frozen=True)
class Point:
    """A case with what was measured: microseconds by peer, and the floor."""

    case: Case
    floor_us: float
    us: dict[str, float]

    def best_peer_us(self) -> float | None:
        """The fastest of the others that read the same cache, or None where only we were measured. FA3's sparse form
        reads a bf16 cache."""
        left_out = {OURS, "fa3"} if self.case.mode else {OURS}
        others = [us for peer, us in self.us.items() if peer in PEER_NAMES.keys() - left_out]
        return min(others) if others else None

    def ratio(self) -> float | None:
        """Our time over the best peer's; under 1 is faster. None where either is missing."""
        best = self.best_peer_us()
        return self.us[OURS] / best if OURS in self.us and best else None


def load(path: Path) -> tuple[list[Point], list[Row]]:
    """Read a results file into its points, sorted, and its rows.

    Raises:
      ValueError: the file is no list of rows with the fields that this module reads, or a row's time is not positive.
    """
    rows = json.loads(path.read_text())
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: a list of objects was expected")
    points: dict[Case, Point] = {}
    # A point measured again replaces the older one.
    for row in sorted(rows, key=lambda row: str(row.get("date"))):
        try:
            sizes = row["h"], row["s"], row["b"], row["keys"]
            case = Case(*sizes, bool(row["varlen"]), row["page"], row.get("mode", ""))
            peer, us, floor_us = str(row["peer"]), float(row["us"]), float(row["floor_us"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: {row}: {type(error).__name__} {error}") from error
        if not (us > 0 and floor_us > 0):
            raise ValueError(f"{path}: {row}: us and floor_us must be positive")
        points.setdefault(case, Point(case, floor_us, {})).us[peer] = us
    return [points[case] for case in sorted(points)], rows


def summary(points: Sequence[Point], rows: Sequence[Row]) -> str:
    """One paragraph: how many points, our times relative to the best peer's, and what was measured on what and when."""
    ratios = [ratio for point in points if (ratio := point.ratio()) is not None]
    said = f"{len(points)} points"
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        said += (
            f"; tsmla's time over the best peer's: geometric mean {mean:.2f}, best {min(ratios):.2f}, "
            f"worst {max(ratios):.2f}, ahead at {sum(ratio < 1 for ratio in ratios)} of {len(ratios)}"
        )

    def distinct(field: str) -> str:
        return ", ".join(sorted({str(row[field]) for row in rows if field in row})) or "unrecorded"

    return f"{said}. Device: {distinct('device')}; commit {distinct('commit')}; {distinct('date')}."


def table(points: Sequence[Point], among: Sequence[Point] = ()) -> str:
    """A Markdown table, a row a point; times in microseconds. It has the columns that the points `among` need, too."""
    measured = {name for point in (*points, *among) for name in point.us}
    peers = [peer for peer in PEER_NAMES if peer != OURS and peer in measured]
    too = [name for name in OURS_TOO if name in measured]
    heads = ["B, S, H, keys", "floor", *(PEER_NAMES[peer] for peer in peers), "**tsmla**", "/ best peer", "of floor"]
    heads += [OURS_TOO[name] for name in too]
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for point in points:
        case, ours, ratio = point.case, point.us.get(OURS), point.ratio()
        name = f"{case.b}, {case.s}, {case.h}, {MODE_NAMES.get(case.mode, case.keys)}" + ", ragged" * case.varlen
        cells = [
            name,
            f"{point.floor_us:.1f}",
            *(f"{point.us[peer]:.1f}" if peer in point.us else "-" for peer in peers),
            f"**{ours:.1f}**" if ours else "-",
            f"{ratio:.2f}" if ratio else "-",
            f"{point.floor_us / ours:.0%}" if ours else "-",
        ]
        cells += [f"{point.us[name]:.1f}" if name in point.us else "-" for name in too]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def short(points: Sequence[Point]) -> list[Point]:
    """The points that the README shows; as many others where none of them was measured."""
    uniform = [point for point in points if not point.case.varlen]
    chosen = [p for p in uniform if (p.case.b, p.case.s, p.case.h, p.case.keys) in SHORT_TABLE]
    return chosen or (uniform or list(points))[: len(SHORT_TABLE)]


def draw_roofline(points: Sequence[Point], dtype: str, path: Path) -> None:
    """Attained arithmetic rate over arithmetic intensity, ours and the best peer's, under the device's roof.

    The rate is that of the floor times floor / time, so that ragged points stand by their real work.
    """
    from matplotlib import pyplot

    def roof(intensity: float) -> float:
        return min(intensity * BYTES_PER_S, FLOPS_PER_S[dtype]) / 1e12

    def intensity(case: Case) -> float:
        return 2 * case.s * case.h * (LATENT + ROPE + LATENT) / BYTES_PER_KEY[dtype]

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    xs = sorted({intensity(point.case) for point in points})
    corner = FLOPS_PER_S[dtype] / BYTES_PER_S
    line = sorted({xs[0] / 1.3, corner, xs[-1] * 1.3})
    axes.plot(line, [roof(x) for x in line], color="0.4", linewidth=1, label="floor: bandwidth, matrix rate")
    series = [("best peer", "tab:orange", -1, [(point, point.best_peer_us()) for point in points])]
    series.append(("tsmla", "tab:blue", 1, [(point, point.us.get(OURS)) for point in points]))
    for label, colour, side, times in series:
        # Set apart a little: both have the same intensities.
        at = [(intensity(point.case) * 1.04**side, point, us) for point, us in times if us]
        ys = [roof(intensity(point.case)) * point.floor_us / us for _, point, us in at]
        axes.scatter([x for x, _, _ in at], ys, s=14, alpha=0.6, color=colour, linewidths=0, label=label)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of cache", ylabel="TFLOP/s")
    axes.set_title(f"MLA decode, {dtype}", fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_relative(points: Sequence[Point], label: str, path: Path) -> None:
    """Our time over the best peer's, a panel for each number of heads, a dot a point; under the line is faster."""
    heads = sorted({point.case.h for point in points})
    sizes = sorted({(point.case.b, point.case.keys) for point in points}, key=lambda size: (size[0] * size[1], size))
    same_keys = len({keys for _, keys in sizes}) == 1
    tokens = sorted({point.case.s for point in points})
    with drawn(path, (8.4, 3.1 * -(-len(heads) // 2) + 0.6), len(heads), columns=2) as panels:
        for axes, h in zip(panels, heads, strict=True):
            for i, s in enumerate(tokens):
                at = [point for point in points if point.case.h == h and point.case.s == s and point.ratio()]
                xs = [sizes.index((p.case.b, p.case.keys)) + 0.16 * (i - (len(tokens) - 1) / 2) for p in at]
                axes.scatter(xs, [point.ratio() for point in at], s=18, linewidths=0, label=f"S = {s}")
            axes.axhline(1, color="0.4", linewidth=1)
            axes.set_title(f"H = {h}", fontsize=10)
            names = [str(b) if same_keys else f"{b} x {keys // 1024}k" for b, keys in sizes]
            axes.set_xticks(range(len(sizes)), names, fontsize=8)
        ratios = [ratio for point in points if (ratio := point.ratio())]
        panels[0].set_ylim(0, 1.05 * max([1.0, *ratios]))
        panels[0].figure.supylabel(f"time / best peer's, {label}", fontsize=10)
        panels[0].figure.supxlabel("B" if same_keys else "B x keys", fontsize=10)
        panels[-1].legend(frameon=False, fontsize=8, ncols=2, loc="lower right")


def write(results: Path, figures: Path, readme: Path) -> str:
    """Write the figures, the full table and the README's table of one results file; return its summary."""
    import matplotlib

    matplotlib.use("agg")
    points, rows = load(results)
    if not points:
        raise ValueError(f"{results}: no rows")
    name = results.stem
    dtype = name.removeprefix("decode_")
    if dtype not in FLOPS_PER_S:
        raise ValueError(f"{results}: named decode_{dtype}.json; known: {', '.join(FLOPS_PER_S)}")
    figures.mkdir(parents=True, exist_ok=True)
    draw_roofline(points, dtype, figures / f"{name}_roofline.png")
    draw_relative(points, dtype, figures / f"{name}_relative.png")
    said = summary(points, rows)
    unit = f"Microseconds, medians, {dtype}, page {', '.join(sorted({str(point.case.page) for point in points}))}."
    images = [f"![{kind} of decode, {dtype}]({name}_{kind}.png)" for kind in ("relative", "roofline")]
    full = [f"# MLA decode, {dtype}", f"{unit} {said}", *images]
    for heads in sorted({point.case.h for point in points}):
        full += [f"## {heads} heads", table([point for point in points if point.case.h == heads], points)]
    (figures / f"{name}.md").write_text("\n\n".join(full) + "\n")
    folder = figures.relative_to(readme.parent).as_posix()
    shown = short(points)
    body = f"{unit} {said} All points: [{name}.md]({folder}/{name}.md)."
    image = f"![time of decode over the best peer's, {dtype}]({folder}/{name}_relative.png)"
    readme.write_text(between_markers(readme.read_text(), name, "\n\n".join([body, table(shown), image])))
    return said


def write_sparse(results: Path, figures: Path, page: Path) -> str:
    """Write the figures, the full table and the short table of the record of `sparse_mla.py`; return its summary."""
    import matplotlib

    matplotlib.use("agg")
    points, rows = load(results)
    modes = [mode for mode in MODE_NAMES if any(point.case.mode == mode for point in points)]
    if not modes or any(point.case.mode not in MODE_NAMES for point in points):
        raise ValueError(f"{results}: its rows need a mode; known: {', '.join(MODE_NAMES)}")
    figures.mkdir(parents=True, exist_ok=True)
    sentences, images = [], []
    for mode in modes:
        mine = [point for point in points if point.case.mode == mode]
        sentence = f"{MODE_NAMES[mode]}: {summary(mine, []).partition('. Device')[0]}"
        if fa3 := [point.us[OURS] / point.us["fa3"] for point in mine if {OURS, "fa3"} <= point.us.keys()]:
            mean = math.exp(sum(map(math.log, fa3)) / len(fa3))
            sentence += f"; over FA3's on a bf16 cache {mean:.2f}, worst {max(fa3):.2f}"
        sentences.append(f"{sentence}.")
        draw_relative(mine, MODE_NAMES[mode], figures / f"sparse_mla_{mode}_relative.png")
        images.append(f"sparse_mla_{mode}_relative.png")
    said = f"Microseconds, medians, bf16 queries over packed caches. {' '.join(sentences)} {provenance(rows)}"
    floors = {
        MODE_NAMES[mode]: [
            (p.floor_us, p.us[OURS], p.best_peer_us()) for p in points if p.case.mode == mode and OURS in p.us
        ]
        for mode in modes
    }
    roofline_figures.draw_floors(floors, figures / "sparse_mla_floor.png")
    pictures = [f"![time of sparse_mla over the best peer's]({{}}{name})" for name in images]
    full = ["# Sparse MLA, decode", said, "![time of sparse_mla by its floor](sparse_mla_floor.png)"]
    for mode, picture in zip(modes, pictures, strict=True):
        mine = [point for point in points if point.case.mode == mode]
        full += [f"## {MODE_NAMES[mode]}", picture.format(""), table(mine, points)]
    (figures / "sparse_mla.md").write_text("\n\n".join(full) + "\n")
    folder = figures.relative_to(page.parent).as_posix()
    shown = [p for p in points if (p.case.mode, p.case.b, p.case.s, p.case.h) in SHORT_SPARSE] or points[:6]
    shown.sort(key=lambda point: list(MODE_NAMES).index(point.case.mode))
    body = f"{said} All points: [sparse_mla.md]({folder}/sparse_mla.md)."
    text = "\n\n".join([body, table(shown), pictures[0].format(f"{folder}/")])
    page.write_text(between_markers(page.read_text(), "sparse_mla", text))
    return said


COPIES = {"cache": ("Cache kernels", "The kernels of the cache take"), "merge": ("Merging", "Merging takes")}


def write_copies(results: Path, figures: Path, page: Path) -> str:
    """Write the figure and the full table of a record of `cache.py` and the sentence; return the table's summary."""
    name = results.stem
    title, what = COPIES[name]
    rows = json.loads(results.read_text())
    with reading(results):
        tokens = sorted({row["tokens"] for row in rows})
        times = {(row["op"], tuple(row["dtypes"]), row["tokens"]): row for row in rows}
        lines = [
            "| | " + " | ".join(f"T {count}" for count in tokens) + " |",
            "|---" + "|---:" * len(tokens) + "|",
        ]
        for op, dtypes in dict.fromkeys((op, dtypes) for op, dtypes, _ in times):
            found = (times.get((op, dtypes, count)) for count in tokens)
            cells = (f"{row['us']:.1f} ({row['us'] / row['copy_us']:.2f})" if row else "-" for row in found)
            lines.append(f"| `{op}`, {' to '.join(dict.fromkeys(dtypes))} | {' | '.join(cells)} |")
        said = f"Microseconds, and in brackets over the time of copying the same bytes. {provenance(rows)}"
        many = [row["us"] / row["copy_us"] for row in rows if row["tokens"] >= MANY_TOKENS]
        least, most = min(many), max(many)
    overview_figures.draw_copies(rows, figures / f"{name}_relative.png")
    image = f"![time over that of copying the same bytes]({name}_relative.png)"
    (figures / f"{name}.md").write_text("\n\n".join([f"# {title}", said, image, "\n".join(lines)]) + "\n")
    sentence = (
        f"{what} {least:.2f} to {most:.2f} times a copy of the same bytes from {MANY_TOKENS} tokens on: "
        f"[{name}.md]({figures.relative_to(page.parent).as_posix()}/{name}.md)."
    )
    page.write_text(between_markers(page.read_text(), name, sentence))
    return said


def write_cpu(results: Path, figures: Path) -> str:
    """Write a sentence about the record of `decode_cpu.py`, a page of its own; return it."""
    record = json.loads(results.read_text())
    with reading(results):
        xla, gather = record["xla"], record["gather"]
        said = (
            f"On a CPU ({record['machine']}; commit {record['commit'][:7]}, {record['date'][:10]}), {record['dtype']} "
            f"decode of B {record['b']}, S {record['s']}, H {record['h']} over {record['keys']} keys: xla takes "
            f"{xla['ms']:.0f} ms, the version that gathers the cache first {gather['ms']:.0f} ms (medians); compiled "
            f"peak memory, as a multiple of cache, inputs and outputs, is {xla['compiled_peak_ratio']:.2f} against "
            f"{gather['compiled_peak_ratio']:.2f}."
        )
    figures.mkdir(parents=True, exist_ok=True)
    (figures / "decode_cpu.md").write_text(f"# MLA decode on a CPU\n\n{said}\n")
    return said


def main(argv: Sequence[str] | None = None) -> int:
    """Do it for every recorded file; 0 when each was written, 2 with one line when one can't be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "h200")
    parser.add_argument(
        "--mesh-results", type=Path, default=ROOT / "benchmarks" / "results" / "h100x2", help="of several GPUs"
    )
    parser.add_argument(
        "--h100-results", type=Path, default=ROOT / "benchmarks" / "results" / "h100", help="of what an H100 ran alone"
    )
    parser.add_argument(
        "--cpu-results", type=Path, default=ROOT / "benchmarks" / "results" / "cpu" / "decode_xla.json", metavar="FILE"
    )
    parser.add_argument("--figures", type=Path, default=ROOT / "benchmarks" / "figures")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks" / "README.md", help="of what is not decode")
    arguments = parser.parse_args(argv)
    readme, page, figures = (path.resolve() for path in (arguments.readme, arguments.page, arguments.figures))
    written = [(path, partial(write, path, figures, readme)) for path in arguments.results.glob("decode_*.json")]
    tables = (
        ("prefill", prefill_figures.write),
        ("prefill_backward", backward_figures.write),
        ("segment_attention", prefill_figures.write_segments),
        ("cache", write_copies),
        ("merge", write_copies),
        ("sparse_mla", write_sparse),
        ("sparse_mla_prefill", sparse_figures.write_prefill),
        ("sparse_layer", sparse_figures.write_layer),
        ("indexer_logits", indexer_figures.write_logits),
        ("select_topk", indexer_figures.write_topk),
        ("indexer_topk", indexer_figures.write_indexer_topk),
        ("compress", overview_figures.write_compress),
        ("generate", model_figures.write),
        ("vllm", model_figures.write_vllm),
    )
    of_several = (("context_parallel", model_figures.write_context), ("generate", model_figures.write_mesh))
    of_h100 = (("vllm_prompts", model_figures.write_vllm_prompts),)
    folders = (arguments.results, tables), (arguments.mesh_results, of_several), (arguments.h100_results, of_h100)
    for folder, named in folders:
        for name, function in named:
            if (path := folder / f"{name}.json").exists():
                written.append((path, partial(function, path, figures, page)))
    if arguments.cpu_results.exists():
        written.append((arguments.cpu_results, partial(write_cpu, arguments.cpu_results, figures)))
    if not written:
        print(f"nothing recorded under {arguments.results}")
    written.sort(key=lambda each: each[0])
    if written:
        written.append((Path("errors"), partial(overview_figures.write_errors, arguments.results, figures)))
        written.append((Path("cache_bytes"), partial(overview_figures.draw_bytes, figures / "cache_bytes.png")))
    for path, function in written:
        try:
            print(f"{path.name}: {function()}")
        except (ValueError, OSError) as error:
            print(f"figures: error: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
