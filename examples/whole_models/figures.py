"""Write the tables and plots of whole models from their records (`make figures`): of `generate`, of the engines' steps,
and of keys and models on several GPUs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import benchmarks.table as tb
from benchmarks import figures
from benchmarks.plots import Mark, Style, chart
from benchmarks.records import WIDTH
from examples.whole_models import growth

CUSTOM = "CUSTOM"
"""Our backend in vLLM."""
Backend = tuple[str, str, str]
"""vLLM's backend of decode, its backend of prefill, and the dtype of its cache ("auto": the weights' dtype)."""


def milliseconds(us: float | None) -> str:
    return tb.number(us and us / 1e3, 2)


def of_row(head: str, cell: Callable[[tb.Row], str]) -> tb.Column:
    """A column of a record whose points are single rows."""
    return head, lambda point: cell(point.rows[tb.OURS])


SHARED: tuple[tb.Column, ...] = (
    of_row("of floor", lambda row: f"{row['floor_us'] / row['us']:.0%}"),
    of_row("tokens/s", lambda row: f"{row['tokens_per_s']:,}"),
)
B = of_row("B", lambda row: str(row["b"]))
FLOOR = of_row("floor", lambda row: milliseconds(row["floor_us"]))

# ---- generate, beside vLLM

BEFORE = "bc479d4"
"""A commit before the kernels of few tokens, a peer of some rows."""


def of_checkpoints(rows: list[tb.Row]) -> list[tb.Row]:
    """vLLM's rows with the weights of a checkpoint: rows with dummy weights only compare backends with each other."""
    return [row for row in rows if row["peer"] == "vllm"]


def vllm_beside(loaded: tb.Loaded) -> list[tb.Row]:
    """vLLM's rows of the same texts over caches of the weights' dtype, of the record that lies beside."""
    path = loaded.path.with_name("vllm.json")
    rows = of_checkpoints(json.loads(path.read_text())) if path.exists() else []
    context = loaded.rows[0]["context"]
    return [row for row in rows if row["context"] == context and row["kv"] == "auto"]


def fastest(loaded: tb.Loaded) -> dict[str, dict[tuple[str, int], float]]:
    """Microseconds by mode and batch with the fastest of vLLM's own backends that were timed, and with ours."""
    found: dict[str, dict[tuple[str, int], float]] = {"vLLM": {}, "vLLM with tsmla": {}}
    for row in vllm_beside(loaded):
        times, key = found["vLLM with tsmla" if row["backend"] == CUSTOM else "vLLM"], (row["mode"], row["b"])
        times[key] = min(row["us"], times.get(key, row["us"]))
    return {name: times for name, times in found.items() if times}


def same_checkpoint(loaded: tb.Loaded) -> str:
    """A sentence on which of our rows beside vLLM's had the weights and the prompts that vLLM had."""
    times, context = {key for each in fastest(loaded).values() for key in each}, loaded.rows[0]["context"]
    beside = [row for row in loaded.rows if row["peer"] == tb.OURS and row["context"] == context]
    beside = [row for row in beside if (row["mode"], row["b"]) in times]
    read = [row for row in beside if "--checkpoints" in row.get("command", "")]
    if not read:
        return "tsmla's weights were drawn on the GPU. "
    said = "tsmla read the same checkpoint and had the same prompts"
    if len(read) == len(beside):
        return f"{said}. "
    rows = "; ".join(f"{row['mode']}, B {row['b']}" for row in read)
    others = "its other rows beside vLLM's have weights that were drawn on the GPU, and those of decode caches of noise"
    return f"{said} in {rows}; {others}. "


def generate() -> tb.Record:
    def step(row: tb.Row, context: int) -> str:
        sliced = f", {row['layers']} layers" if "slice" in row["mode"] else ""
        return row["mode"] + sliced + ("" if row["context"] == context else f", {row['context']:,} tokens")

    def columns(loaded: tb.Loaded) -> Iterator[tb.Column]:
        context = loaded.rows[0]["context"]
        yield of_row("model, step", lambda row: step(row, context))
        yield from (B, FLOOR, of_row("**tsmla**", lambda row: f"**{milliseconds(row['us'])}**"), *SHARED)
        if any(BEFORE in point.rows for point in loaded.points):
            yield BEFORE, lambda point: milliseconds(point.us(BEFORE))
            yield f"/ {BEFORE}", lambda point: tb.quotient(point.us(tb.OURS), point.us(BEFORE))
        for name, times in fastest(loaded).items():

            def theirs(row: tb.Row, times: dict[tuple[str, int], float] = times) -> float | None:
                return times.get((row["mode"], row["b"])) if row["context"] == context else None

            yield of_row(name, lambda row, theirs=theirs: milliseconds(theirs(row)))
            yield of_row(f"/ {name}", lambda row, theirs=theirs: tb.quotient(row["us"], theirs(row)))

    def caption(loaded: tb.Loaded) -> str:
        said = (
            f"Milliseconds a step, random weights, {loaded.rows[0]['context']} tokens of context unless others are "
            f"named. The floor takes experts that are chosen evenly; tokens of random weights choose somewhat fewer of "
            f"them. {tb.provenance(loaded.rows)}"
        )
        if not (rows := vllm_beside(loaded)):
            return said
        own = ", ".join(sorted({row["backend"] for row in rows} - {CUSTOM}))
        backends = [f"the fastest of its own backends that were timed ({own})"] * bool(own)
        backends += ["ours"] * any(row["backend"] == CUSTOM for row in rows)
        version = ", ".join(sorted({row["vllm"] for row in rows}))
        said += f" vLLM {version} read a checkpoint of random weights, in runs of its own, with "
        return f"{said}{' and with '.join(backends)}. {same_checkpoint(loaded)}{tb.provenance(rows)}"

    def marks(loaded: tb.Loaded) -> Iterator[Mark]:
        context, peers = loaded.rows[0]["context"], fastest(loaded)
        for row in sorted((point.rows[tb.OURS] for point in loaded.points), key=lambda row: row["b"]):
            if not row["mode"].endswith("decode"):
                continue
            longer = "" if row["context"] == context else f",\n{row['context']:,} tokens"
            times = {"tsmla": row["us"], "floor": row["floor_us"]}
            if not longer:
                times |= {name: of[key] for name, of in peers.items() if (key := (row["mode"], row["b"])) in of}
            for name, us in times.items():
                yield Mark(row["mode"] + longer, name, row["b"], us / 1e3)

    colours = {"vLLM": "tab:orange", "vLLM with tsmla": "tab:cyan", "tsmla": "tab:blue", "floor": "0.4"}
    style = Style("ms a step", "texts", log=True, one=False, colours=colours, log_y=(0.5, 1, 2, 5, 10, 20, 50))
    return tb.Record(
        "generate", "", ("mode", "b", "context", "layers"), caption,
        short=lambda loaded: [tb.table(loaded.points, [*columns(loaded)])],
        panels=(tb.Panel("generate_decode", "milliseconds a decode step", chart(marks, style), shown=True),),
    )  # fmt: skip


# ---- vLLM's steps


def backend_of(row: tb.Row) -> Backend:
    return row["backend"], row["prefill"], row["kv"]


def cache_of(kv: str) -> str:
    return "" if kv == "auto" else f", {kv} cache"


def title_of(backend: Backend) -> str:
    """A backend's name as a column's title, with the backend of prefill if it is not the usual one."""
    name, prefill, kv = backend
    said = "**tsmla**" if name == CUSTOM else name
    return said + (f", prefill {prefill}" if prefill != (CUSTOM if name == CUSTOM else "auto") else "") + cache_of(kv)


def backends_of(loaded: tb.Loaded) -> list[Backend]:
    return sorted({backend_of(row) for row in loaded.rows}, key=lambda x: (x[2], x[0] == CUSTOM, x))


def compared(point: tb.Point, kv: str) -> float | None:
    """The time with our backend over that with the fastest other over such a cache."""
    ours, theirs = ([peer for peer in point.rows if peer[2] == kv and (peer[0] == CUSTOM) is custom]
                    for custom in (True, False))  # fmt: skip
    best = point.best(*ours)
    other = point.best(*theirs)
    return best / other if best and other else None


def vllm() -> tb.Record:
    name: tb.Column = "step, context, B", lambda p: f"{p['mode']}, {p['context']}, {p['b']}"

    def kvs(loaded: tb.Loaded) -> list[str]:
        return sorted({kv for _, _, kv in backends_of(loaded) if any(compared(p, kv) for p in loaded.points)})

    def columns(loaded: tb.Loaded) -> Iterator[tb.Column]:
        yield name
        for backend in backends_of(loaded):
            yield title_of(backend), lambda point, backend=backend: milliseconds(point.us(backend))
        for kv in kvs(loaded):
            head = f"tsmla / best other{cache_of(kv)}"
            yield head, lambda point, kv=kv: f"{ratio:.2f}" if (ratio := compared(point, kv)) else "-"

    def caption(loaded: tb.Loaded) -> str:
        found = {
            f"{step}{cache_of(kv)}": tb.mean_and_worst(
                compared(p, kv) for p in loaded.points if p["mode"].endswith(step)
            )
            for kv in kvs(loaded)
            for step in ("decode", "prefill")
        }
        sentences = [f"{what} {ratios}" for what, ratios in found.items() if ratios]
        said = f"Its time with tsmla's backend over the best other: {', '.join(sentences)}, geometric means. "
        versions = ", ".join(sorted({row["vllm"] for row in loaded.rows}))
        return (
            f"Milliseconds of a step of vLLM {versions} by attention backend, all other parts its own, random weights. "
            f"{said if sentences else ''}{tb.provenance(loaded.rows)}"
        )

    def full(loaded: tb.Loaded) -> list[str]:
        return [tb.table(loaded.points, [*columns(loaded)]), *equal_tokens(loaded, name)]

    def marks(loaded: tb.Loaded) -> Iterator[Mark]:
        for backend, p in itertools.product(backends_of(loaded), sorted(loaded.points, key=lambda p: p.key)):
            if p["mode"].endswith("decode") and (us := p.us(backend)):
                panel = f"{p['mode']}, {p['context']} tokens of context"
                yield Mark(panel, title_of(backend).replace("*", ""), p["b"], us / 1e3)

    style = Style(
        "ms a step", "requests", log=True, width=(1.6, 2.4), one=False, dashed=lambda line: "cache" in line,
        colours={"tsmla": "tab:blue", "tsmla, fp8 cache": "tab:blue", "FLASHMLA": "C1", "FLASHMLA, fp8 cache": "C1",
                 "FLASH_ATTN_MLA": "C2", "FLASH_ATTN_MLA, fp8 cache": "C2"},
    )  # fmt: skip
    return tb.Record(
        "vllm", "vLLM's steps", ("mode", "context", "b"), caption, full,
        lambda loaded: [tb.table(loaded.points, [*columns(loaded)])],
        (tb.Panel("vllm_decode", "milliseconds a decode step of vLLM by backend", chart(marks, style), shown=True),),
        peer=backend_of, rows_of=of_checkpoints, order=lambda point: (point["mode"].endswith("prefill"), *point.key),
    )  # fmt: skip


# The README shows these steps: mode, context, requests, and the cache's dtype ("auto": the weights' dtype).
SHORT = (("decode", 512, 64, "auto"), ("decode", 16000, 1, "auto"), ("decode", 16000, 256, "fp8"),
         ("prefill", 16000, 1, "auto"))  # fmt: skip


def vllm_steps() -> tb.Record:
    """The README's table: a few of vLLM's steps, with the fastest other backend and with ours."""

    def caption(loaded: tb.Loaded) -> str:
        versions = ", ".join(sorted({row["vllm"] for row in loaded.rows}))
        said = (
            f"Milliseconds of a step of vLLM {versions}, a model of DeepSeek-V2-Lite's shape with random weights. "
            f"{tb.provenance(loaded.rows)}"
        )
        return textwrap.fill(said, WIDTH)

    def short(loaded: tb.Loaded) -> list[str]:
        heads = ["step", "fastest other backend", "**tsmla**", "tsmla / other"]
        lines = []
        for (mode, context, b, kv), point in itertools.product(SHORT, loaded.points):
            if point["mode"].endswith(mode) and (point["context"], point["b"]) == (context, b):
                ours, theirs = ([peer for peer in point.rows if peer[2] == kv and (peer[0] == CUSTOM) is custom]
                                for custom in (True, False))  # fmt: skip
                if (ratio := compared(point, kv)) is not None:
                    requests = f"{b} request{'s' * (b > 1)}{cache_of(kv)}"
                    times = (milliseconds(point.best(*peers)) for peers in (theirs, ours))
                    lines.append([f"{mode}, {context:,} tokens, {requests}", *times, f"{ratio:.2f}"])
        return [tb.table_of(heads, lines)]

    return tb.Record(
        "vllm", "", ("mode", "context", "b"), caption, short=short, peer=backend_of, rows_of=of_checkpoints,
        readme="README.md", part="vllm_steps",
    )  # fmt: skip


def equal_share(texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """The share of the texts' tokens that are those of the others, place by place; all texts have as many."""
    pairs = [pair for text, other in zip(texts, others, strict=True) for pair in zip(text, other, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def equal_tokens(loaded: tb.Loaded, name: tb.Column) -> list[str]:
    """A sentence and a table of the share of tokens that two backends chose alike; empty if no two have tokens."""

    def cell(point: tb.Point, pair: tuple[Backend, Backend]) -> str:
        rows = [point.rows[each] for each in pair if "tokens" in point.rows.get(each, ())]
        return f"{equal_share(rows[0]['tokens'], rows[1]['tokens']):.2f}" if len(rows) == 2 else "-"

    pairs = [pair for pair in itertools.combinations(backends_of(loaded), 2) if pair[0][2] == pair[1][2]]
    points = [point for point in sorted(loaded.points, key=lambda point: point.key)
              if any(cell(point, pair) != "-" for pair in pairs)]  # fmt: skip
    if not points:
        return []
    sentence = (
        "The share of each request's first greedy tokens that is equal with two backends. Tokens of random weights are "
        "near ties, and one that differs changes those after it: what two of vLLM's own backends share is the measure."
    )
    columns = [(" = ".join(map(title_of, pair)), lambda point, pair=pair: cell(point, pair)) for pair in pairs]
    return ["## Equal tokens", sentence, tb.table(points, [name, *columns])]


def slices(
    record: str, engine: str, key: str, ours: str, peer: Callable[[tb.Row], str],
    through: Callable[[tb.Row], str] = lambda _: "",
) -> tb.Record:
    """An engine's steps of models of drawn weights: each step, and what attention's kernels take of it.

    key: where a row has the engine's version; ours: the name of this project's backend; peer: a row's backend;
    through: the engine's own backend that runs a row's kernels, if any, ours or its own ones."""

    def others(point: tb.Point) -> list[str]:
        """The other backends, except for those of another run than ours: another commit says so."""
        commit = point.rows.get(ours, {}).get("commit")
        return [name for name, row in point.rows.items() if name != ours and commit in (None, row["commit"])]

    def least(point: tb.Point, field: str, *backends: str) -> float | None:
        return min((us for each in backends if (us := point.rows.get(each, {}).get(field))), default=None)

    def step(point: tb.Point, *backends: str) -> float | None:
        """The time of a step, where the host did nothing else."""
        return point.best(*(each for each in backends if not point.rows.get(each, {}).get("disturbed")))

    def ratio(point: tb.Point, kind: Callable[..., float | None]) -> float | None:
        """Our time of a kind over that of the fastest other backend."""
        own, theirs = kind(point, ours), kind(point, *others(point))
        return own / theirs if own and theirs else None

    def attention(point: tb.Point, *backends: str) -> float | None:
        return least(point, "attention_us", *backends)

    def graph(point: tb.Point, *backends: str) -> float | None:
        return least(point, "graph_us", *backends)

    def cache(point: tb.Point) -> str:
        return "16 bits" if point["kv"] == "auto" else str(point["kv"])

    def shown(kind: Callable[..., float | None], digits: int) -> Callable[[tb.Point], str]:
        return lambda point: "-" if (found := ratio(point, kind)) is None else f"{found:.{digits}f}"

    def gpus(point: tb.Point) -> str:
        return f", {point['gpus']} GPUs" if point["gpus"] > 1 else ""

    def kind_of(point: tb.Point) -> str:
        called = f" through {point['through']}" if point["through"] else ""
        return f"{point['mode']}{called}, {cache(point)}"

    def name(point: tb.Point) -> str:
        return f"{kind_of(point)}, {point['context']}, {point['b']}{gpus(point)}"

    def columns(loaded: tb.Loaded) -> Sequence[tb.Column]:
        has_graphs, has_attention = (any(x in row for row in loaded.rows) for x in ("graph_us", "attention_us"))
        of_attention: tuple[tb.Column, ...] = (
            ("attention, us", lambda p: tb.number(attention(p, *others(p)), 0)),
            ("tsmla's", lambda p: tb.number(attention(p, ours), 0)),
            ("attention: tsmla / other", shown(attention, 2)),
        )
        return (
            ("step, cache, context, B", name),
            ("other backend", lambda p: ", ".join(others(p)) or "-"),
            ("ms", lambda p: milliseconds(step(p, *others(p)))),
            ("**tsmla**, ms", lambda p: f"**{milliseconds(step(p, ours))}**"),
            ("tsmla / other", shown(step, 3)),
            *([("graph: tsmla / other", shown(graph, 3))] if has_graphs else []),
            *(of_attention if has_attention else ()),
        )

    def caption(loaded: tb.Loaded) -> str:
        first = loaded.rows[0]
        found: dict[str, list[tuple[float | None, ...]]] = {}
        for point in loaded.points:
            ratios = ratio(point, step), ratio(point, graph), ratio(point, attention)
            found.setdefault(f"{kind_of(point)}{gpus(point)}", []).append(ratios)
        said = []
        for what, each in found.items():
            means = (tb.mean_and_worst(kind) for kind in zip(*each, strict=True))
            named = zip(("", "graphs ", "attention "), means, strict=True)
            if text := ", ".join(f"{kind}{mean}" for kind, mean in named if mean):
                said.append(f"{what}: {text}")
        layers = {row["mode"].rpartition(" ")[0]: row["layers"] for row in loaded.rows}
        kinds = {
            "attention_us": "Attention is its kernels of a step, those that convert selected positions and join a "
            "query's parts among them. ",
            "graph_us": "A graph is that of a step, all its layers, replayed without the host. ",
        }
        return (
            f"Milliseconds of a step of {engine} {first[key]} with layers of a model's shape and all its experts, one "
            f"layer dense ({', '.join(f'{name}: {count} layers' for name, count in layers.items())}), by attention "
            f"backend; weights are drawn on the GPU, the same for all. "
            f"{''.join(text for name, text in kinds.items() if any(name in row for row in loaded.rows))}Steps are left "
            f"out where the host was busy with other work: they took more than 1.25 times what their kernels took, or "
            f"one run of an engine 1.25 times what another run of it took. With tsmla over "
            f"the other backend: {'; '.join(said)}; geometric means. {tb.provenance(loaded.rows)}"
        )

    def steps(rows: list[tb.Row]) -> list[tb.Row]:
        steps = (row for row in rows if not row["mode"].endswith(("serving", "checks")))
        return [{**row, "gpus": row.get("tensor_parallel", 1), "through": through(row)} for row in steps]

    return tb.Record(
        record, "", ("mode", "kv", "through", "gpus", "context", "b"), caption,
        short=lambda loaded: [tb.table([point for point in loaded.points if ours in point.rows], columns(loaded))],
        peer=peer, rows_of=steps, order=lambda point: (point["mode"].endswith("prefill"), *point.key),
    )  # fmt: skip


def vllm_slices() -> tb.Record:
    return slices("vllm_slices", "vLLM", "vllm", CUSTOM, lambda row: row["backend"])


def vllm_slices_two() -> tb.Record:
    """On two GPUs, beside one."""
    return dataclasses.replace(vllm_slices(), folder="h200x2", part="vllm_slices_two")


def sglang_slices() -> tb.Record:
    """SGLang's: with its backend `tsmla`, or with its own backends of FlashMLA on these kernels."""
    return slices("sglang_slices", "SGLang", "sglang", "tsmla", _sglang_backend, _sglang_part)


def _sglang_part(row: tb.Row) -> str:
    """What a row's --decode, or in a row of prompts its --prefill, names; empty without it."""
    return str(row.get(row["mode"].rpartition(" ")[2], ""))


def _sglang_backend(row: tb.Row) -> str:
    """The backend of a row's steps: ours also if it is FlashMLA's on these kernels."""
    return str(row.get("flash_mla") or _sglang_part(row) or row["backend"])


def vllm_prompts() -> tb.Record:
    def starts(loaded: tb.Loaded) -> tuple[list[str], dict[tuple[int, int], dict[str, list[float]]]]:
        """The backends, ours last, and the milliseconds of each start by context and batch."""
        found: dict[tuple[int, int], dict[str, list[float]]] = {}
        for row in loaded.rows:
            found.setdefault((row["context"], row["b"]), {}).setdefault(row["backend"], []).append(row["us"] / 1e3)
        names = {row["backend"] for row in loaded.rows}
        return sorted(names, key=lambda name: (name == CUSTOM, name)), dict(sorted(found.items()))

    def ratio(each: dict[str, list[float]]) -> float:
        mean = {name: sum(times) / len(times) for name, times in each.items()}
        return mean.pop(CUSTOM) / min(mean.values())

    def caption(loaded: tb.Loaded) -> str:
        names, found = starts(loaded)
        versions = ", ".join(sorted({row["vllm"] for row in loaded.rows}))
        return (
            f"Milliseconds of 4,096 tokens of prompts in vLLM {versions}, with tsmla's backend for prompts and with "
            f"{' and '.join(sorted({*names} - {CUSTOM}))}. An engine was started several times with each in turn: each "
            f"start's time. The mean with tsmla's over the other's: "
            f"{tb.mean_and_worst(map(ratio, found.values()))}. {tb.provenance(loaded.rows)}"
        )

    def short(loaded: tb.Loaded) -> list[str]:
        names, found = starts(loaded)
        heads = ["prompt, B", *("**tsmla**" if name == CUSTOM else name for name in names), "tsmla / other"]
        lines = [[f"{context}, {b}", *(", ".join(tb.number(ms, 2) for ms in each[name]) for name in names),
                  f"{ratio(each):.2f}"] for (context, b), each in found.items()]  # fmt: skip
        return [tb.table_of(heads, lines)]

    return tb.Record("vllm_prompts", "", (), caption, short=short, folder="h100")


def fp8_models() -> tb.Record:
    """Models with fp8 weights: both kinds of products, beside vLLM."""
    titles = {"tsmla": "**quantised**", "tsmla_exact": "exact", "vllm": "vLLM"}

    def peer_of(row: tb.Row) -> str:
        return "vllm" if row["peer"].startswith("vllm") else row["peer"]

    def fastest_rows(rows: list[tb.Row]) -> list[tb.Row]:
        """A row for each point and peer: vLLM's of its fastest kernels."""
        found: dict[tuple[Any, ...], tb.Row] = {}
        for row in rows:
            key = (*(row[name] for name in ("mode", "layers", "context", "b")), peer_of(row))
            if key not in found or row["us"] < found[key]["us"]:
                found[key] = row
        return list(found.values())

    def name(point: tb.Point) -> str:
        return f"{point['mode']}, {point['layers']} layers, {point['context']:,} tokens, B {point['b']}"

    def columns(loaded: tb.Loaded) -> list[tb.Column]:
        there = [peer for peer in titles if any(peer in point.rows for point in loaded.points)]
        columns: list[tb.Column] = [(tb.EMPTY, name)]
        for peer in there:
            columns.append((titles[peer], lambda point, peer=peer: milliseconds(point.us(peer))))
        for peer in there[:-1] if "vllm" in there else ():
            ratio = f"{titles[peer].strip('*')} / vLLM"
            columns.append((ratio, lambda point, peer=peer: tb.quotient(point.us(peer), point.us("vllm"))))
        return columns

    def caption(loaded: tb.Loaded) -> str:
        said = (
            "Milliseconds of a step, or of 4,096 tokens of prompts, of models with fp8 weights that are drawn at "
            "random: with activations quantised, as vLLM does it, and with exact products, the default."
        )
        ratios = tb.mean_and_worst(point.ratio("tsmla", "vllm") for point in loaded.points)
        over = f" The quantised time over vLLM's with its fastest kernels: {ratios}, geometric mean." if ratios else ""
        return f"{said}{over} {tb.provenance(loaded.rows)}"

    return tb.Record(
        "fp8_models", "Models with fp8 weights", ("mode", "layers", "context", "b"), caption,
        tb.whole(columns), lambda loaded: [tb.table(loaded.points, columns(loaded))], peer=peer_of,
        rows_of=fastest_rows, order=lambda point: (point["mode"].partition(" ")[0], *point.key),
    )  # fmt: skip


# ---- several GPUs

MESH = ("data_parallel", "expert_parallel", "context_parallel")
TWO, FOUR = "h100x2", "h200x4"
"""The folders of the records of two H100s, and of up to four H200s."""


def context_parallel(folder: str) -> tb.Record:
    def counts(loaded: tb.Loaded) -> list[int]:
        return sorted({n for point in loaded.points for n in point.rows if n > 1})

    def columns(loaded: tb.Loaded) -> Iterator[tb.Column]:
        yield "B, H, keys, values", lambda point: ", ".join(str(value) for value in point.key)
        for n in (1, *counts(loaded)):
            yield (
                (f"floor of {n}" if n > 1 else "floor of one"),
                (lambda point, n=n: tb.number(point.rows[n]["floor_us"]) if n in point.rows else "-"),
            )
            yield (f"{n} GPUs" if n > 1 else "one GPU"), lambda point, n=n: tb.number(point.us(n))
            if n > 1:
                yield f"{n} GPUs / one", lambda point, n=n: tb.quotient(point.us(n), point.us(1))
        if most := kernels_of(loaded):
            yield f"kernels of {most}", lambda point: tb.number(point.rows[most].get("kernels_us"))

    def kernels_of(loaded: tb.Loaded) -> int | None:
        """The GPUs of rows with the time of their kernels; None if there are no such rows."""
        return max((row["context_parallel"] for row in loaded.rows if "kernels_us" in row), default=None)

    def caption(loaded: tb.Loaded) -> str:
        found = {n: tb.mean_and_worst(point.ratio(n, 1) for point in loaded.points) for n in counts(loaded)}
        said = ", ".join(f"{n} GPUs {ratios}" for n, ratios in found.items() if ratios)
        most = kernels_of(loaded)
        of_kernels = (
            f"Kernels of {most}: their time in a profile of the same run, with the exchange. The steps took longer: "
            f"the queries of each were new arrays, for which CUDA graphs were probably made anew (not tested). "
        )
        return (
            f"Decode attention with the keys of a text on several GPUs, microseconds a layer of "
            f"{loaded.rows[0]['layers']} in one program, bf16; with values, each head's result is projected to that "
            f"many columns, on several GPUs before they merge. Time over one GPU's: {said}, geometric means. "
            f"{of_kernels if most else ''}{tb.provenance(loaded.rows)}"
        )

    def marks(loaded: tb.Loaded) -> Iterator[Mark]:
        for n, point in itertools.product(counts(loaded), loaded.points):
            if (ratio := point.ratio(n, 1)) is not None:
                values = f"\n{point['values']} values" if point["values"] else ""
                name = f"B {point['b']}, H {point['heads']}\n{point['keys'] // 1024}k keys{values}"
                yield Mark("", f"{n} GPUs", name, ratio)

    def tables(loaded: tb.Loaded) -> list[str]:
        return [tb.table(loaded.points, [*columns(loaded)])]

    style = Style("time / one GPU's", dots=True, width=(6.5, 0), in_order=True, broken=(0.5,))
    panel = tb.Panel("context_parallel", "time on several GPUs over one's", chart(marks, style), shown=True)
    first = folder == TWO
    return tb.Record(
        "context_parallel", "Context parallelism" if first else "", ("b", "heads", "keys", "values"), caption, tables,
        tables, (panel,) if first else (), peer=lambda row: row["context_parallel"], folder=folder,
        part="" if first else "context_parallel_four", rows_of=lambda rows: [{"values": 0, **row} for row in rows],
    )  # fmt: skip


def generate_mesh(folder: str) -> tb.Record:
    def step(row: tb.Row) -> str:
        """The name of a row's model and step, without its mesh."""
        length = f" of {row['context']:,} tokens" if row["mode"].endswith("prompt") else ""
        products = f", {row['products']} products" if "products" in row else ""
        return f"{row['mode']}{length}{products}, {row['layers']} layers{context(row)}"

    def context(row: tb.Row) -> str:
        """The context of a step, if it is not that of most."""
        return f", {row['context']:,} tokens" if row["mode"].endswith("decode") and row["context"] != 512 else ""

    def mesh(row: tb.Row) -> str:
        """The axes of a row's mesh that are split, and where collectives run if a flag says so; empty on one device."""
        axes = [f"{axis.partition('_')[0]} {row[axis]}" for axis in MESH if row.get(axis, 1) > 1]
        return ", ".join([*axes, *([f"collectives {row['collectives']}"] if "collectives" in row else [])])

    def short(loaded: tb.Loaded) -> list[str]:
        single = {(step(row), row["b"]): row["tokens_per_s"] for row in loaded.rows if not mesh(row)}

        def speedup(row: tb.Row) -> str:
            # A copy of the model is compared with one GPU that has as many texts.
            point = step(row), row["b"] // row.get("data_parallel", 1)
            return tb.quotient(row["tokens_per_s"], single.get(point) if mesh(row) else None)

        columns = (
            of_row("model, step", step), of_row("mesh", lambda row: mesh(row) or "one GPU"), B, FLOOR,
            of_row("**ms**", lambda row: f"**{milliseconds(row['us'])}**"), *SHARED,
            of_row("/ one GPU's tokens/s", speedup),
            of_row("GB a GPU", lambda row: tb.number(row.get("memory_gb"), 1)),
            of_row("exchanges, ms", lambda row: " to ".join(map(milliseconds, row.get("exchanges_us", ()))) or "-"),
        )  # fmt: skip
        return [tb.table(loaded.points, columns)]

    part = "generate_mesh" if folder == TWO else "generate_mesh_four"

    def caption(loaded: tb.Loaded) -> str:
        profiled = (
            "GB a GPU is the most memory that jax had in use. Exchanges are NCCL's kernels in a profile, on the GPU "
            "with the least and on that with the most: waiting for other GPUs is in them. "
            if any("memory_gb" in row for row in loaded.rows)
            else ""
        )
        return (
            f"Milliseconds on several GPUs, random weights: a step, of texts of {loaded.rows[0]['context']} tokens "
            f"unless a row says another length, or a whole prompt. B counts the texts of all GPUs; the floor is one "
            f"GPU's. Several copies of a model (data) are compared with one GPU that has the texts of one copy, split "
            f"experts and split keys (context) with one GPU that has all texts. {profiled}{tb.provenance(loaded.rows)}"
        )

    return tb.Record("generate", "", (), caption, short=short, folder=folder, part=part)


def growth_predicted() -> tb.Record:
    def links(loaded: tb.Loaded) -> tb.Loaded:
        return tb.load(loaded.path.parent.parent / TWO / "generate.json", generate_mesh(TWO))

    def caption(loaded: tb.Loaded) -> str:
        near = growth.wires_of(links(loaded))[1].near
        return (
            f"Attention over shared keys, kernels in microseconds a layer, on four GPUs as they were profiled and as "
            f"they are predicted by the time on one of them and the exchanges of two H100s: {near.latency:.1f} us "
            f"each, and {near.rate / 1e3:.0f} GB/s, merging included. {tb.provenance(loaded.rows)}"
        )

    def short(loaded: tb.Loaded) -> list[str]:
        heads = ["texts x keys, heads", "one GPU", "four", "predicted", "/ four"]
        return [tb.table_of(heads, [*growth.predictions(loaded, links(loaded))])]

    return tb.Record("context_parallel", "", (), caption, short=short, folder=FOUR, part="growth_predicted")


def growth_beyond() -> tb.Record:
    def caption(_: tb.Loaded) -> str:
        network = growth.NETWORK
        return (
            f"DeepSeek-V3 in fp8, texts of {growth.CONTEXT:,} tokens: milliseconds a step, and tokens a second of each "
            f"GPU, computed from steps on one and two H100s and not measured. Between hosts of 8 an exchange is taken "
            f"to have {network.latency:.0f} us and {network.rate / 1e3:.0f} GB/s for each GPU."
        )

    def short(loaded: tb.Loaded) -> list[str]:
        heads = ["GPUs", "mesh", *(f"{texts} texts a GPU" for texts in growth.LOADS)]
        return [tb.table_of(heads, [*growth.extrapolations(loaded)])]

    return tb.Record("generate", "", (), caption, short=short, folder=TWO, part="growth_beyond")


RECORDS = (
    generate(), vllm(), vllm_steps(), vllm_slices(), vllm_slices_two(), sglang_slices(), vllm_prompts(), fp8_models(),
    context_parallel(TWO), generate_mesh(TWO), context_parallel(FOUR), generate_mesh(FOUR), growth_predicted(),
    growth_beyond(),
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(figures.main(records=RECORDS))
