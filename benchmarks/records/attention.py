"""Records of attention: decode over dense and packed caches, prompts, gradients, and rows of several texts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

import benchmarks.table as tb
from benchmarks.plots import Draw, Mark, Style, chart
from benchmarks.table import OURS

# ---- one or a few tokens a request

PEERS = {"flashmla": "FlashMLA", "legacy": "SGLang", "fa3": "FA3", "fa4": "FA4 SM90"}
MODES = {"v32": "V3.2", "shared80": "V3.2, tokens share 80 %", "v4-512": "V4, 128 + 512", "v4-1024": "V4, 128 + 1024"}
UNION = "tsmla union"
DENSE, PACKED = ("flashmla", "fa3", "fa4"), ("flashmla", "legacy")
"""The peers that ours is compared with. FA3 is not in PACKED, because its sparse form reads a bf16 cache."""
# The README's part of a record shows these points (B, S, H, keys), of uniform lengths; its full page shows all.
SHORT = ((1, 1, 16, 4096), (4, 1, 16, 81920), (64, 1, 16, 8192), (16, 1, 128, 8192), (64, 4, 128, 8192),
         (32, 4, 128, 81920))  # fmt: skip
SHORT_SPARSE = (("v32", 1, 1, 16), ("v32", 8, 1, 16), ("v32", 64, 1, 16), ("v32", 64, 1, 128), ("v32", 128, 2, 128),
                ("v4-512", 64, 1, 64), ("v4-1024", 64, 1, 128))  # fmt: skip


def compared(points: Sequence[tb.Point], peers: Sequence[str]) -> str:
    """A text: how many points there are, and our times over the best peer's."""
    ratios = [ratio for point in points if (ratio := point.ratio(OURS, *peers)) is not None]
    if not ratios:
        return f"{len(points)} points"
    mean = statistics.geometric_mean(ratios)
    return (f"{len(points)} points; tsmla's time over the best peer's: geometric mean {mean:.2f}, best "
            f"{min(ratios):.2f}, worst {max(ratios):.2f}, ahead at {sum(ratio < 1 for ratio in ratios)} of "
            f"{len(ratios)}")  # fmt: skip


def decode_columns(peers: Sequence[str], keys: Callable[[tb.Point], str]) -> Sequence[tb.Column]:
    name: tb.Column = (
        "B, S, H, keys",
        lambda p: f"{p['b']}, {p['s']}, {p['h']}, {keys(p)}" + ", ragged" * bool(p["varlen"]),
    )
    others = [tb.time(title, peer) for peer, title in PEERS.items()]
    ours = [tb.our_time(), tb.over("/ best peer", OURS, *peers), tb.OF_FLOOR, tb.time("bf16 queries", "tsmla_bf16_q")]
    return name, tb.FLOOR, *others, *ours


def relative(peers: Sequence[str], of: Callable[[tb.Point], bool], label: str, *, same_keys: bool = False) -> Draw:
    """Our time over the best peer's, a panel for each number of heads, a dot a point."""

    def mark(p: tb.Point) -> Mark:
        at = (p["b"] * p["keys"], p["b"], p["keys"])
        return Mark(f"H = {p['h']}", f"S = {p['s']}", at, p.ratio(OURS, *peers))

    def name(x: tuple[int, ...]) -> str:
        return str(x[1]) if same_keys else f"{x[1]} x {x[2] // 1024}k"

    style = Style(f"time / best peer's, {label}", "B" if same_keys else "B x keys", dots=True, spread=0.16, x_name=name,
                  width=(0, 4.2), columns=2)  # fmt: skip
    return chart(lambda loaded: map(mark, filter(of, loaded.points)), style)


def decode(dtype: str) -> tb.Record:
    columns = decode_columns(DENSE, lambda point: str(point["keys"]))
    name = f"decode_{dtype}"

    def caption(loaded: tb.Loaded) -> str:
        pages = ", ".join(sorted({str(point["page"]) for point in loaded.points}))
        said = f"{compared(loaded.points, DENSE)}. {tb.provenance(loaded.rows)}"
        return f"Microseconds, medians, {dtype}, page {pages}. {said}"

    def short(loaded: tb.Loaded) -> list[str]:
        uniform = [point for point in loaded.points if not point["varlen"]]
        chosen = [p for p in uniform if (p["b"], p["s"], p["h"], p["keys"]) in SHORT]
        return [tb.table(chosen or (uniform or loaded.points)[: len(SHORT)], columns)]

    dots = relative(DENSE, lambda _: True, dtype)
    text = f"time of decode over the best peer's, {dtype}"
    panels = (tb.Panel(f"{name}_relative", text, dots, shown=True),)
    return tb.Record(
        name, f"MLA decode, {dtype}", ("h", "s", "b", "keys", "varlen", "page"), caption,
        tb.whole(lambda _: columns, lambda point: f"{point['h']} heads"), short, panels,
        order=lambda point: point.key,
    )  # fmt: skip


def sparse() -> tb.Record:
    columns = decode_columns(PACKED, lambda point: MODES[point["mode"]])
    of_unions = (*columns, tb.time("union", UNION), tb.over("union / direct", UNION, OURS))

    def columns_of(loaded: tb.Loaded) -> Sequence[tb.Column]:
        return of_unions if any(UNION in point.rows for point in loaded.points) else columns

    def caption(loaded: tb.Loaded) -> str:
        sentences = []
        for mode, title in MODES.items():
            if mine := [point for point in loaded.points if point["mode"] == mode]:
                sentence = f"{title}: {compared(mine, PACKED)}"
                if fa3 := [ratio for point in mine if (ratio := point.ratio(OURS, "fa3")) is not None]:
                    mean = statistics.geometric_mean(fa3)
                    sentence += f"; over FA3's on a bf16 cache {mean:.2f}, worst {max(fa3):.2f}"
                sentences.append(f"{sentence}.")
        said = " ".join(sentences)
        return f"Microseconds, medians, bf16 queries over packed caches. {said} {tb.provenance(loaded.rows)}"

    def short(loaded: tb.Loaded) -> list[str]:
        chosen = [p for p in loaded.points if (p["mode"], p["b"], p["s"], p["h"]) in SHORT_SPARSE]
        return [tb.table(chosen or loaded.points[:6], columns, loaded.points)]

    panels = []
    for mode, title in MODES.items():
        dots = relative(PACKED, lambda point, mode=mode: point["mode"] == mode, title, same_keys=True)
        text = "time of sparse_mla over the best peer's"
        panels.append(tb.Panel(f"sparse_mla_{mode}_relative", text, dots, shown=mode == "v32", section=title))
    return tb.Record(
        "sparse_mla", "Sparse MLA, decode", ("mode", "h", "s", "b", "keys", "varlen", "page"), caption,
        tb.whole(columns_of, lambda point: MODES[point["mode"]], panels), short, tuple(panels),
        order=lambda point: ([*MODES].index(point["mode"]), *point.key),
    )  # fmt: skip


# ---- SGLang's calls


def sglang() -> tb.Record:
    """Decode attention through SGLang's import of flash_mla."""
    columns: Sequence[tb.Column] = (
        ("model, B, H, keys", lambda p: f"{p['mode']}, {p['b']}, {p['h']}, {p['keys']}"),
        tb.time("sgl-flash-mla", "legacy"), tb.our_time(), tb.over("/ sgl-flash-mla", OURS, "legacy"),
    )  # fmt: skip

    def kind(mode: str) -> str:
        """The first word of a mode, which a model's modes have in common."""
        return mode.partition(" ")[0]

    def caption(loaded: tb.Loaded) -> str:
        kinds = dict.fromkeys(kind(point["mode"]) for point in loaded.points)
        ratios = {
            name: tb.mean_and_worst(p.ratio(OURS, "legacy") for p in loaded.points if kind(p["mode"]) == name)
            for name in kinds
        }
        said = ", ".join(f"{name} {each}" for name, each in ratios.items() if each)
        return (
            "Microseconds of a layer's decode attention as SGLang 0.5.23 calls flash_mla, all that the call does, with "
            "the heads H of a GPU, an eighth of a model's or all; SGLang pads those of sparse models to 64 or 128 for "
            f"its own kernels. tsmla's time over theirs: {said}, geometric means. {tb.provenance(loaded.rows)}"
        )

    def short(loaded: tb.Loaded) -> list[str]:
        return [tb.table([p for p in loaded.points if p["b"] in (1, 64)] or loaded.points, columns, loaded.points)]

    return tb.Record(
        "sglang", "SGLang's decode attention", ("mode", "b", "h", "keys"), caption, tb.whole(lambda _: columns), short
    )  # fmt: skip


# ---- a prompt over packed caches

FP8 = "tsmla fp8 queries"
PROMPT_MODES = {
    "random": "V3.2, random keys",
    "shared80": "V3.2, 80 % shared with the token before",
    "shared95": "V3.2, 95 % shared with the token before",
    "prompt": "V3.2, the first tokens of a text",
    "prompt80": "V3.2, the first tokens of a text, 80 % shared",
    "v4": "V4, 128 + 512",
}


UNION_COLUMNS: Sequence[tb.Column] = (
    tb.time("union", UNION), tb.over("union / FlashMLA", UNION, "flashmla"), tb.over("union / direct", UNION, OURS),
)  # fmt: skip
MASK, ALL_KEYS = "tsmla mask", "tsmla dense"
BITS = "tsmla bits"
MASK_COLUMNS: Sequence[tb.Column] = (
    tb.time("mask", MASK), tb.over("mask / FlashMLA", MASK, "flashmla"), tb.over("mask / dense", MASK, ALL_KEYS),
    tb.time("mask, fp8", f"{MASK} fp8"), tb.time("bits", BITS),
)  # fmt: skip
TOPK, TOPK_BITS = "tsmla topk", "tsmla topk bits"
TOPK_COLUMNS: Sequence[tb.Column] = (tb.time("top-k", TOPK), tb.time("top-k as bits", TOPK_BITS))


def sparse_prefill() -> tb.Record:
    def columns(name: tb.Column, loaded: tb.Loaded) -> Sequence[tb.Column]:
        ours = [tb.our_time(), tb.over("/ FlashMLA", OURS, "flashmla"), tb.OF_FLOOR, tb.time("fp8 queries", FP8)]
        union = UNION_COLUMNS if any(UNION in point.rows for point in loaded.points) else ()
        expanded = MASK_COLUMNS if any(MASK in point.rows for point in loaded.points) else ()
        topk = TOPK_COLUMNS if any(TOPK_BITS in point.rows for point in loaded.points) else ()
        return name, tb.FLOOR, tb.time("FlashMLA", "flashmla"), *ours, *union, *expanded, *topk

    def caption(loaded: tb.Loaded) -> str:
        points, said = loaded.points, "Microseconds, medians, bf16 queries. "
        if everywhere := tb.mean_and_worst(point.ratio(OURS, "flashmla") for point in points):
            by_heads = {
                h: tb.mean_and_worst(p.ratio(OURS, "flashmla") for p in points if p["h"] == h)
                for h in sorted({point["h"] for point in points})
            }
            said += f"tsmla's time over FlashMLA's: {everywhere}, geometric mean; "
            said += ", ".join(f"{h} heads {each}" for h, each in by_heads.items() if each)
            said += ". FlashMLA reads a bf16 copy of the keys, and has its queries padded to 64 or 128 heads. "
        if copies := [us for point in points if (us := point.us("widen"))]:
            said += f"Making the copy of V3.2's context of 131,072 keys takes {min(copies):.0f} to {max(copies):.0f} "
            said += "us, which are not in its time. "
        if fp8 := tb.mean_and_worst(point.ratio(FP8, OURS) for point in points):
            errors = [point.rows[FP8]["rel_err"] for point in points if FP8 in point.rows]
            said += f"fp8 queries take {fp8} of the time of bf16 queries, and out's error against the bf16 queries "
            said += f"that they were rounded from is {min(errors):.1%} to {max(errors):.1%}. "
        if unions := tb.mean_and_worst(point.ratio(UNION, "flashmla") for point in points):
            said += f"Tokens that gather the union of their slots once (union) take {unions} of FlashMLA's time, "
            said += f"{tb.mean_and_worst(point.ratio(UNION, OURS) for point in points)} of the direct form's. "
        if masks := tb.mean_and_worst(point.ratio(MASK, "flashmla") for point in points):
            pairs = (MASK, ALL_KEYS), (BITS, MASK)
            dense, bits = (tb.mean_and_worst(p.ratio(*pair) for p in points) for pair in pairs)
            said += f"The selection as bits in the expanded form (mask) takes {masks} of FlashMLA's time, {dense} of "
            said += f"what the same kernel takes for all keys; making the bits {bits} of the mask's time. "
        if topks := tb.mean_and_worst(point.ratio(TOPK_BITS, TOPK) for point in points):
            said += f"A top-k that writes the bits takes {topks} of the time of one that writes positions. "
        return said + tb.provenance(loaded.rows)

    def short(loaded: tb.Loaded) -> list[str]:
        name: tb.Column = "T, H, selection", lambda p: f"{p['length']}, {p['h']}, {PROMPT_MODES[p['mode']]}"
        return [tb.table([p for p in loaded.points if p["length"] == 4096], columns(name, loaded), loaded.points)]

    def mark(p: tb.Point) -> Mark:
        return Mark(PROMPT_MODES[p["mode"]], f"T = {p['length']}", p["h"], p.ratio(OURS, "flashmla"))

    full: tb.Column = "T, H", lambda p: f"{p['length']}, {p['h']}"
    style = Style("time / FlashMLA's", "heads", width=(0, 4.2), columns=2)
    lines = chart(lambda loaded: map(mark, loaded.points), style)
    panels = (tb.Panel("sparse_mla_prefill_relative", "time of sparse prefill over FlashMLA's", lines, shown=True),)
    return tb.Record(
        "sparse_mla_prefill", "Sparse MLA, prefill", ("mode", "length", "h"), caption,
        tb.whole(lambda loaded: columns(full, loaded), lambda point: PROMPT_MODES[point["mode"]]), short, panels,
        order=lambda point: ([*PROMPT_MODES].index(point["mode"]), *point.key[1:]),
    )  # fmt: skip


# ---- plain rows of 16 bits

PLAIN = ("flashmla", "fa3")
PLAIN_MODES = {
    "steps": "8,192 rows a request",
    "random": "131,072 rows",
    "prompt": "the first tokens of a text",
}


def sparse_plain() -> tb.Record:
    columns: Sequence[tb.Column] = (
        ("T, H, slots of", lambda p: f"{p['length']}, {p['h']}, {PLAIN_MODES[p['mode']]}"), tb.FLOOR,
        *(tb.time(PEERS[peer], peer) for peer in PLAIN), tb.our_time(), tb.over("/ best peer", OURS, *PLAIN),
        tb.OF_FLOOR,
    )  # fmt: skip

    def caption(loaded: tb.Loaded) -> str:
        said = compared(loaded.points, PLAIN)
        return (
            "Microseconds, medians, bf16 queries over plain bf16 rows of 576 columns, 2,048 slots a token. FlashMLA has"
            f" its queries padded to 64 or 128 heads. {said}. {tb.provenance(loaded.rows)}"
        )

    def short(loaded: tb.Loaded) -> list[str]:
        return [tb.table(loaded.points, columns)]

    return tb.Record(
        "sparse_mla_plain", "", ("mode", "length", "h"), caption, short=short,
        order=lambda point: ([*PLAIN_MODES].index(point["mode"]), *point.key[1:]),
    )  # fmt: skip


# ---- prompts, expanded

PREFILL_PEERS = {"fa3": "FA3", "fa4": "FA4 SM90", "cudnn": "cuDNN"}
SHORT_PREFILL = ("1x8192h128", "4x4096h128", "1x8192h64", "4x4096h64", "1x8192h32", "1x32768h16", "16x1024h128",
                 "ragged32h64")  # fmt: skip


def prefill() -> tb.Record:
    columns: Sequence[tb.Column] = (
        ("B x T, H", lambda point: point["point"]), *(tb.time(title, peer, 0) for peer, title in PREFILL_PEERS.items()),
        tb.our_time(digits=0), tb.over("/ FA3", OURS, "fa3"), tb.RATE, tb.time("fp8", "tsmla_fp8", 0),
        ("/ bf16", lambda point: tb.quotient(point.us("tsmla_fp8"), point.us(OURS))),
    )  # fmt: skip

    def earlier(loaded: tb.Loaded) -> tuple[str, tb.Loaded] | None:
        """The text on an earlier run with FA4, and its record, if there is one. Times of that run are compared only
        with each other."""
        path = loaded.path.with_name("prefill_fa4.json")
        if not path.exists():
            return None
        with tb.reading(path):
            old = tb.load(path, record)
        return f"tsmla's time over {tb.means(old.points, OURS, {'fa4': PREFILL_PEERS['fa4']})}", old

    def caption(loaded: tb.Loaded) -> str:
        first = loaded.rows[0]
        said = f"Causal {first['dtype']}, head dims 192 and 128, or both 256 where a point ends in -256, microseconds. "
        said += f"tsmla's time over {tb.means(loaded.points, OURS, PREFILL_PEERS)}, geometric means over the points "
        said += "that each ran. "
        if any("tsmla_fp8" in point.rows for point in loaded.points):
            said += "fp8 is tsmla's own, q, k and v in e4m3. "
        said += tb.provenance(loaded.rows)
        if old := earlier(loaded):
            row = old[1].rows[0]
            said += f" In a run of its own, {old[0]}; commit {row['commit']}; {row['date']}."
        return said

    def full(loaded: tb.Loaded) -> list[str]:
        blocks = [tb.table(loaded.points, columns)]
        if old := earlier(loaded):
            blocks += ["## A run with FA4", f"{old[0]}. {tb.provenance(old[1].rows)}", tb.table(old[1].points, columns)]
        return blocks

    def short(loaded: tb.Loaded) -> list[str]:
        chosen = {point.key[0]: point for point in loaded.points if point.key[0] in SHORT_PREFILL}
        return [tb.table([chosen[name] for name in SHORT_PREFILL if name in chosen] or loaded.points, columns,
                      loaded.points)]  # fmt: skip

    def marks(loaded: tb.Loaded) -> Iterable[Mark]:
        return (Mark("", f"over {title}", point.key[0], point.ratio(OURS, peer))
                for point in loaded.points for peer, title in PREFILL_PEERS.items())  # fmt: skip

    colours = {"over FA3": "tab:green", "over FA4 SM90": "tab:orange", "over cuDNN": "tab:red"}
    style = Style("tsmla's time / a peer's", dots=True, spread=0.12, width=(8.4, 0), angle=30, in_order=True,
                  colours=colours)  # fmt: skip
    panels = (tb.Panel("prefill_relative", "time of prefill over the peers'", chart(marks, style), shown=True),)
    record = tb.Record("prefill", "MLA prefill", ("point",), caption, full, short, panels)
    return record


# ---- the gradient

BACKWARD_PEERS = {"cudnn": "cuDNN", "fa4": "FA4 SM90"}


def prefill_backward() -> tb.Record:
    ours = {"tsmla_deterministic": "deterministic", "tsmla_kv": "kv and k_rope"}
    columns: Sequence[tb.Column] = (
        ("B x T, H", lambda point: point["point"]), ("**tsmla**", lambda point: f"{point.us(OURS):.0f}"),
        *(tb.time(title, peer, 0) for peer, title in (ours | BACKWARD_PEERS).items()), tb.RATE,
    )  # fmt: skip

    def caption(loaded: tb.Loaded) -> str:
        points = loaded.points
        best = tb.mean_and_worst(point.ratio(OURS, *BACKWARD_PEERS) for point in points)
        repeats = tb.mean_and_worst(point.ratio("tsmla_deterministic", OURS) for point in points)
        return (
            f"The gradient of prefill on Hopper, the backward pass alone, causal {loaded.rows[0]['dtype']}: tsmla's "
            f"time over the best peer {best}, {tb.means(points, OURS, BACKWARD_PEERS)}, geometric means; "
            f"deterministic over default {repeats}. {tb.provenance(loaded.rows)}"
        )

    def marks(loaded: tb.Loaded) -> Iterable[Mark]:
        names = {OURS: OURS, "tsmla_deterministic": "tsmla, deterministic", "fa4": "FA4 SM90"}
        points = sorted((p for p in loaded.points if p["b"] == 1), key=lambda p: (*p["head_dims"], p["h"], p["length"]))
        return (Mark(f"H = {p['h']}, V = {p['head_dims'][1]}", name, p["length"], p.ratio(peer, "cudnn"))
                for p in points for peer, name in names.items())  # fmt: skip

    style = Style("time / cuDNN's", "tokens of the request", x_name=lambda length: f"{length // 1024}k")
    panels = (tb.Panel("prefill_backward_relative", "time of the backward pass over cuDNN's", chart(marks, style)),)
    return tb.Record(
        "prefill_backward", "The gradient of MLA prefill", ("point",), caption, tb.whole(lambda _: columns),
        panels=panels, unit="Microseconds. ",
    )  # fmt: skip


def sparse_backward() -> tb.Record:
    repeats = "tsmla_deterministic"
    columns: Sequence[tb.Column] = (
        ("selections, D, H", lambda point: f"{point['mode']}, {point['d']}, {point['h']}"),
        ("**tsmla**", lambda point: f"{point.us(OURS):.0f}"), tb.time("cudnn-frontend", "cudnn", 0),
        tb.over("/ cudnn-frontend", OURS, "cudnn"), tb.time("deterministic", repeats, 0),
        tb.over("deterministic / default", repeats, OURS), tb.RATE,
    )  # fmt: skip

    def caption(loaded: tb.Loaded) -> str:
        first = loaded.rows[0]
        ratio = tb.mean_and_worst(point.ratio(repeats, OURS) for point in loaded.points)
        beside = tb.means(loaded.points, OURS, {"cudnn": "cudnn-frontend"})
        beside = f"Time over {beside}. " if beside else ""
        return (
            f"The gradient of sparse_mla on Hopper, the backward pass alone, {first['dtype']}: {first['t']} tokens that"
            f" select {first['k']} of {first['n']} slots. {beside}Deterministic over default {ratio}, geometric mean. "
            f"{tb.provenance(loaded.rows)}"
        )

    return tb.Record(
        "sparse_backward", "The gradient of sparse attention", ("mode", "d", "h"), caption,
        tb.whole(lambda _: columns), unit="Microseconds. ",
    )  # fmt: skip


# ---- rows of several texts

SEGMENT_PEERS = {"cudnn": "cuDNN", "tsmla": "**tsmla**", "tsmla_kv": "tsmla, kv"}
KINDS = {"forward": "forward_us", "with its gradient": "us"}


def segment_attention() -> tb.Record:
    def timed(loaded: tb.Loaded, field: str) -> list[tb.Point]:
        """The points with that field of their rows as the time."""
        return [tb.Point(point.key, {peer: {**row, "us": row[field]} for peer, row in point.rows.items()})
                for point in loaded.points]  # fmt: skip

    columns: Sequence[tb.Column] = (
        ("rows x tokens, heads, segments a row", lambda point: point["point"]),
        *(tb.time(title, peer) for peer, title in SEGMENT_PEERS.items()), tb.over("/ cuDNN", OURS, "cudnn"),
    )  # fmt: skip

    def caption(loaded: tb.Loaded) -> str:
        found = {kind: tb.mean_and_worst(point.ratio(OURS, "cudnn") for point in timed(loaded, name))
                 for kind, name in KINDS.items()}  # fmt: skip
        said = ", ".join(f"{kind} {each}" for kind, each in found.items() if each)
        compared = f"tsmla's time over cuDNN's: {said}, geometric means. " if said else ""
        first = loaded.rows[0]["dtype"]
        return f"Causal {first}, head dims 192 and 128, microseconds. {compared}{tb.provenance(loaded.rows)}"

    def full(loaded: tb.Loaded) -> list[str]:
        blocks = []
        for kind, name in KINDS.items():
            blocks += [f"## {kind.capitalize()}", tb.table(timed(loaded, name), columns)]
        errors = {row["peer"]: row["rel_err"] for row in loaded.rows if row["rel_err"]}
        lines = [[title, *(f"{error:.2%}" for error in errors[peer])] for peer, title in SEGMENT_PEERS.items()
                 if peer in errors]  # fmt: skip
        at = loaded.rows[0]["errors_at"]
        return [*blocks, "## Errors", f"Relative, at {at}, against the reference in float32.",
                tb.table_of(["", "out", "dq", "dk", "dv"], lines)]  # fmt: skip

    def marks(loaded: tb.Loaded) -> Iterable[Mark]:
        return (Mark(kind, SEGMENT_PEERS[peer].strip("*"), point.key[0], point.ratio(peer, "cudnn"))
                for kind, name in KINDS.items() for point in timed(loaded, name)
                for peer in (OURS, "tsmla_kv"))  # fmt: skip

    style = Style("time / cuDNN's", dots=True, spread=0.12, width=(0, 4.2), angle=30, in_order=True,
                  colours={"tsmla": "tab:blue", "tsmla, kv": "tab:purple"})  # fmt: skip
    text = "time of attention over packed rows over cuDNN's"
    return tb.Record(
        "segment_attention", "Packed rows", ("point",), caption, full,
        lambda loaded: [tb.table(timed(loaded, "us"), columns)],
        (tb.Panel("segment_attention", text, chart(marks, style), shown=True),),
    )  # fmt: skip


RECORDS = (
    decode("bf16"), decode("fp8"), sparse(), sglang(), sparse_prefill(), sparse_plain(), prefill(), prefill_backward(),
    sparse_backward(), segment_attention(),
)  # fmt: skip
