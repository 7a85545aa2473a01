"""The figures and tables of whole models, of `generate.py` and `vllm_steps.py`, and of keys shared by several GPUs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from figure_pages import (
    between_markers,
    drawn,
    equal_tokens,
    mean_and_worst,
    number,
    provenance,
    quotient,
    reading,
    relative_times,
    table_of,
    write_part,
)

Row = Mapping[str, Any]
Backend = tuple[str, str, str]
"""vLLM's backend of decode, that of prefill, and the dtype of its cache ("auto": that of the weights)."""

OURS = "tsmla"
CUSTOM = "CUSTOM"
"""Our backend in vLLM."""
MESH = ("data_parallel", "expert_parallel", "context_parallel")


def vllm_rows(results: Path) -> list[Row]:
    """The rows of vllm.json beside `results` that have the weights of a checkpoint; none where there is no such file.
    Dummy weights compare backends with each other alone."""
    path = results.with_name("vllm.json")
    rows = json.loads(path.read_text()) if path.exists() else []
    return [row for row in rows if row["peer"] == "vllm"]


def fastest(rows: Sequence[Row], context: int, *, custom: bool) -> dict[tuple[str, int], float]:
    """Microseconds of vLLM by mode and batch, of texts of `context` tokens over caches of the weights' dtype: with our
    backend, or with the fastest of the others that were timed."""
    found: dict[tuple[str, int], float] = {}
    for row in rows:
        if (row["context"], row["kv"], row["backend"] == CUSTOM) == (context, "auto", custom):
            key = row["mode"], row["b"]
            found[key] = min(row["us"], found.get(key, row["us"]))
    return found


def write(results: Path, figures: Path, page: Path) -> str:
    """Write the figure and the table of the record of `generate.py`, with vLLM's steps of the same weights from
    vllm.json beside it; return its caption."""
    ours = json.loads(results.read_text())
    with reading(results):
        rows = vllm_rows(results)
        context = ours[0]["context"]
        peers = {
            name: times
            for name, custom in (("vLLM", False), ("vLLM with tsmla", True))
            if (times := fastest(rows, context, custom=custom))
        }
        heads = ["model, step", "B", "floor", "**tsmla**", "of floor", "tokens/s"]
        heads += [head for name in peers for head in (name, f"/ {name}")]
        lines = []
        for row in ours:
            us, key = row["us"], (row["mode"], row["b"]) if row["context"] == context else None
            longer = "" if row["context"] == context else f", {row['context']:,} tokens"
            sliced = f", {row['layers']} layers" if "slice" in row["mode"] else ""
            cells = [row["mode"] + sliced + longer, str(row["b"])]
            cells += [number(row["floor_us"] / 1e3, 2), f"**{us / 1e3:.2f}**"]
            cells += [f"{row['floor_us'] / us:.0%}", f"{row['tokens_per_s']:,}"]
            for times in peers.values():
                cells += [number(times.get(key, 0) / 1e3, 2), quotient(us, times.get(key))]
            lines.append(cells)
        said = (
            f"Milliseconds a step, random weights, {context} tokens of context unless others are named. The floor "
            f"takes experts that are chosen evenly; tokens of random weights choose somewhat fewer of them. "
            f"{provenance(ours)}"
        )
        if peers:
            used = [row for row in rows if row["context"] == context and row["kv"] == "auto"]
            said += f" {_said_of_vllm(used)}"
        draw(ours, peers, figures / "generate_decode.png")
    image = f"![milliseconds a decode step]({figures.relative_to(page.parent).as_posix()}/generate_decode.png)"
    page.write_text(between_markers(page.read_text(), "generate", "\n\n".join([said, table_of(heads, lines), image])))
    return said


def _said_of_vllm(rows: Sequence[Row]) -> str:
    """The backends that were timed, and where the rows come from."""
    own = ", ".join(sorted({row["backend"] for row in rows} - {CUSTOM}))
    backends = [f"the fastest of its own backends that were timed ({own})"] * bool(own)
    backends += ["ours"] * any(row["backend"] == CUSTOM for row in rows)
    version = ", ".join(sorted({row["vllm"] for row in rows}))
    said = f"vLLM {version} read the same checkpoint and had the same prompts, in runs of its own, with "
    return f"{said}{' and with '.join(backends)}. {provenance(rows)}"


def draw(rows: Sequence[Row], peers: Mapping[str, Mapping[tuple[str, int], float]], path: Path) -> None:
    """Milliseconds a decode step by batch size, ours, the peers' and the floor, a panel a model and context; peers have
    the first row's context."""
    models = list(dict.fromkeys((row["mode"], row["context"]) for row in rows if row["mode"].endswith("decode")))
    batches = sorted({row["b"] for row in rows if row["mode"].endswith("decode")})
    usual = rows[0]["context"]
    colours = {"vLLM": "tab:orange", "vLLM with tsmla": "tab:cyan"}
    with drawn(path, (1.6 + 2.2 * len(models), 3.6), len(models)) as panels:
        for axes, (model, context) in zip(panels, models, strict=True):
            own = [row for row in rows if (row["mode"], row["context"]) == (model, context)]
            mine = sorted((row["b"], row["us"] / 1e3, row["floor_us"] / 1e3) for row in own)
            measured, times, floors = zip(*mine, strict=True)
            axes.plot(measured, times, marker="o", markersize=4, linewidth=1, color="tab:blue", label="tsmla")
            for name, theirs in peers.items() if context == usual else ():
                if at := [(b, theirs[model, b] / 1e3) for b in measured if (model, b) in theirs]:
                    axes.plot(*zip(*at, strict=True), marker="x", markersize=4, linewidth=1, color=colours[name],
                              label=name)  # fmt: skip
            axes.plot(measured, floors, marker="_", linewidth=1, color="0.4", label="floor")
            axes.set(xscale="log", yscale="log", xlim=(batches[0] / 1.4, batches[-1] * 1.4))
            axes.set_xticks(batches, [str(b) for b in batches], fontsize=8)
            axes.minorticks_off()
            axes.set_ylim(0.5, 50)
            axes.set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
            longer = "" if context == usual else f",\n{context:,} tokens"
            axes.set_title(f"{model}{longer}", fontsize=9)
            axes.legend(frameon=False, fontsize=7, loc="upper left")
        panels[0].set_ylabel("ms a step")
        panels[0].figure.supxlabel("texts", fontsize=9)


def write_vllm(results: Path, figures: Path, page: Path) -> str:
    """Write the figure and the tables of the record of `vllm_steps.py`; return its summary."""
    with reading(results):
        rows = vllm_rows(results)
        times: dict[tuple[str, int, int], dict[Backend, float]] = {}
        for row in rows:
            backend = row["backend"], row["prefill"], row["kv"]
            times.setdefault((row["mode"], row["context"], row["b"]), {})[backend] = row["us"] / 1e3
        backends = sorted({each for us in times.values() for each in us}, key=lambda x: (x[2], x[0] == CUSTOM, x))
        points = sorted(times, key=lambda point: (point[0].endswith("prefill"), *point))
        kvs = sorted({kv for us in times.values() for _, _, kv in us if all(_compared(us, kv))})
        heads = ["step, context, B", *map(_name, backends), *(f"tsmla / best other{_cache(kv)}" for kv in kvs)]
        lines = []
        for mode, context, b in points:
            us = times[mode, context, b]
            cells = [f"{mode}, {context}, {b}", *(number(us.get(backend), 2) for backend in backends)]
            lines.append(cells + [quotient(*_compared(us, kv)) for kv in kvs])
        sentences = []
        for kv in kvs:
            for step in ("decode", "prefill"):
                alike = [_compared(us, kv) for point, us in times.items() if point[0].endswith(step)]
                if ratios := [ours / theirs for ours, theirs in alike if ours and theirs]:
                    sentences.append(f"{step}{_cache(kv)} {mean_and_worst(ratios)}")
        compared = f"Its time with tsmla's backend over the best other: {', '.join(sentences)}, geometric means. "
        said = (
            f"Milliseconds of a step of vLLM {', '.join(sorted({row['vllm'] for row in rows}))} by attention backend, "
            f"all other parts its own, random weights. {compared if sentences else ''}{provenance(rows)}"
        )
        _draw_vllm(times, backends, figures / "vllm_decode.png")
        table = table_of(heads, lines)
        equal = _equal_tokens(rows, backends)
    image = "![milliseconds a decode step of vLLM by backend]({}vllm_decode.png)"
    write_part(figures, page, "vllm", ["# vLLM's steps", said, image, table, *equal], [said, table, image])
    return said


def write_vllm_prompts(results: Path, figures: Path, page: Path) -> str:
    """Write the table of a record of `vllm_steps.py` that has prompts alone, of several starts of each backend; return
    its caption."""
    rows = json.loads(results.read_text())
    with reading(results):
        starts: dict[tuple[int, int], dict[str, list[float]]] = {}
        for row in rows:
            starts.setdefault((row["context"], row["b"]), {}).setdefault(row["backend"], []).append(row["us"] / 1e3)
        backends = sorted({name for each in starts.values() for name in each}, key=lambda name: (name == CUSTOM, name))
        lines, ratios = [], []
        for (context, b), each in sorted(starts.items()):
            means = {name: sum(times) / len(times) for name, times in each.items()}
            ratios.append(means[CUSTOM] / min(ms for name, ms in means.items() if name != CUSTOM))
            cells = [", ".join(number(ms, 2) for ms in each[name]) for name in backends]
            lines.append([f"{context}, {b}", *cells, f"{ratios[-1]:.2f}"])
        heads = ["prompt, B", *("**tsmla**" if name == CUSTOM else name for name in backends), "tsmla / other"]
        said = (
            f"Milliseconds of 4,096 tokens of prompts in vLLM {', '.join(sorted({row['vllm'] for row in rows}))} by "
            f"attention backend, its own for prompts with {' and '.join(sorted({*backends} - {CUSTOM}))}, of an engine "
            f"that was started several times, with each in turn: each start's time. The mean with tsmla's over the "
            f"other's: {mean_and_worst(ratios)}. {provenance(rows)}"
        )
    page.write_text(between_markers(page.read_text(), "vllm_prompts", f"{said}\n\n{table_of(heads, lines)}"))
    return said


def _equal_tokens(rows: Sequence[Row], backends: Sequence[Backend]) -> list[str]:
    """A sentence and a table of the share of tokens that two backends chose alike; empty where no two have tokens."""
    texts: dict[tuple[str, int, int], dict[Backend, list[list[int]]]] = {}
    for row in rows:
        if "tokens" in row:
            backend = row["backend"], row["prefill"], row["kv"]
            texts.setdefault((row["mode"], row["context"], row["b"]), {})[backend] = row["tokens"]
    pairs = [pair for pair in itertools.combinations(backends, 2) if pair[0][2] == pair[1][2]]
    pairs = [pair for pair in pairs if any(set(pair) <= set(each) for each in texts.values())]
    lines = []
    for (mode, context, b), each in sorted(texts.items()):
        shares = [
            f"{equal_tokens(*(each[one] for one in pair)):.2f}" if set(pair) <= set(each) else "-" for pair in pairs
        ]
        if set(shares) != {"-"}:
            lines.append([f"{mode}, {context}, {b}", *shares])
    if not lines:
        return []
    heads = ["step, context, B", *(" = ".join(_name(one) for one in pair) for pair in pairs)]
    sentence = (
        "The share of each request's first greedy tokens that is equal with two backends. Tokens of random weights are "
        "near ties, and one that differs changes those behind it: what two of vLLM's own backends share is the measure."
    )
    return ["## Equal tokens", sentence, table_of(heads, lines)]


def _cache(kv: str) -> str:
    return "" if kv == "auto" else f", {kv} cache"


def _name(backend: Backend) -> str:
    """For a column; the backend of prefill where it is not the usual one."""
    name, prefill, kv = backend
    usual = CUSTOM if name == CUSTOM else "auto"
    said = "**tsmla**" if name == CUSTOM else name
    return said + (f", prefill {prefill}" if prefill != usual else "") + _cache(kv)


def _compared(us: Mapping[Backend, float], kv: str) -> tuple[float | None, float | None]:
    """The times with our backend and with the fastest other over such a cache."""
    ours, theirs = ([us[x] for x in us if x[2] == kv and (x[0] == CUSTOM) == custom] for custom in (True, False))
    return min(ours, default=None), min(theirs, default=None)


def _draw_vllm(
    times: Mapping[tuple[str, int, int], Mapping[Backend, float]], backends: Sequence[Backend], path: Path
) -> None:
    """A panel a model and context, a line a backend, by requests."""
    panels_of = sorted({(mode, context) for mode, context, _ in times if mode.endswith("decode")})
    batches = sorted({b for mode, _, b in times if mode.endswith("decode")})
    others = sorted({name for name, _, _ in backends} - {CUSTOM})
    colours = {CUSTOM: "tab:blue"} | {name: f"C{i}" for i, name in enumerate(others, 1)}
    with drawn(path, (1.6 + 2.4 * len(panels_of), 3.6), len(panels_of)) as panels:
        for axes, (mode, context) in zip(panels, panels_of, strict=True):
            for backend in backends:
                at = [(b, us[backend]) for b in batches if backend in (us := times.get((mode, context, b), {}))]
                if at:
                    line = "--" if backend[2] != "auto" else "-"
                    axes.plot(*zip(*at, strict=True), marker="o", markersize=4, linewidth=1, linestyle=line,
                              color=colours[backend[0]], label=_name(backend).replace("*", ""))  # fmt: skip
            axes.set(xscale="log", xlim=(batches[0] / 1.4, batches[-1] * 1.4))
            axes.set_xticks(batches, [str(b) for b in batches], fontsize=8)
            axes.minorticks_off()
            axes.set_title(f"{mode}, {context} tokens of context", fontsize=9)
            axes.legend(frameon=False, fontsize=7, loc="upper left")
        panels[0].set_ylim(bottom=0)
        panels[0].set_ylabel("ms a step")
        panels[0].figure.supxlabel("requests", fontsize=9)


def write_context(results: Path, figures: Path, page: Path) -> str:
    """Write the figure and the table of the record of `context_parallel.py`; return its summary."""
    rows = json.loads(results.read_text())
    with reading(results):
        times: dict[tuple[int, int, int], dict[int, Row]] = {}
        for row in rows:
            times.setdefault((row["b"], row["heads"], row["keys"]), {})[row["context_parallel"]] = row
        counts = sorted({count for each in times.values() for count in each if count > 1})
        heads = ["B, H, keys", "floor of one", "one GPU"]
        heads += [head for n in counts for head in (f"floor of {n}", f"{n} GPUs", f"{n} GPUs / one")]
        lines = []
        for (b, h, keys), each in times.items():
            one = each.get(1, {})
            cells = [f"{b}, {h}, {keys}", number(one.get("floor_us")), number(one.get("us"))]
            for n in counts:
                some = each.get(n, {})
                cells += [number(some.get("floor_us")), number(some.get("us"))]
                cells.append(quotient(some.get("us"), one.get("us")))
            lines.append(cells)
        us = {point: {str(n): float(row["us"]) for n, row in each.items()} for point, each in times.items()}
        means = [f"{n} GPUs {mean_and_worst(found)}" for n in counts if (found := relative_times(us, str(n), "1"))]
        said = (
            f"Decode attention with the keys of a text on several GPUs, microseconds a layer of {rows[0]['layers']} in "
            f"one program, bf16. Time over one GPU's: {', '.join(means)}, geometric means. {provenance(rows)}"
        )
        _draw_context(us, counts, figures / "context_parallel.png")
        table = table_of(heads, lines)
    image = "![time on several GPUs over one's]({}context_parallel.png)"
    full = ["# Context parallelism", said, image, table]
    write_part(figures, page, "context_parallel", full, [said, table, image])
    return said


def _draw_context(us: Mapping[tuple[int, int, int], Mapping[str, float]], counts: Sequence[int], path: Path) -> None:
    """A dot a point and number of GPUs; the line is all of one GPU's time, a broken one its N-th part."""
    with drawn(path, (6.5, 3.6), 1) as (axes,):
        for i, n in enumerate(counts):
            at = [(x, each[str(n)] / each["1"]) for x, each in enumerate(us.values()) if {"1", str(n)} <= each.keys()]
            axes.scatter(*zip(*at, strict=True), s=22, linewidths=0, color=f"C{i}", label=f"{n} GPUs")
            axes.axhline(1 / n, color=f"C{i}", linewidth=1, linestyle="--")
        axes.axhline(1, color="0.4", linewidth=1)
        names = [f"B {b}, H {h}\n{keys // 1024}k keys" for b, h, keys in us]
        axes.set_xticks(range(len(names)), names, fontsize=7)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("time / one GPU's")
        axes.legend(frameon=False, fontsize=8, loc="lower right")


def write_mesh(results: Path, figures: Path, page: Path) -> str:
    """Write the table of the record of `generate.py` on several GPUs; return its caption. Rows of one GPU beside those
    of a mesh are what a mesh is compared with."""
    rows = json.loads(results.read_text())
    with reading(results):
        single = {(_step(row), row["b"]): row for row in rows if not _mesh(row)}
        heads = ["model, step", "mesh", "B", "floor", "**ms**", "of floor", "tokens/s", "/ one GPU's tokens/s"]
        lines = []
        for row in rows:
            # A copy of the model is compared with one GPU that has as many texts.
            point = (_step(row), row["b"] // row.get("data_parallel", 1))
            one = single.get(point) if _mesh(row) else None
            cells = [_step(row), _mesh(row) or "one GPU", str(row["b"])]
            cells += [
                number(row["floor_us"] / 1e3, 2),
                f"**{row['us'] / 1e3:.2f}**",
                f"{row['floor_us'] / row['us']:.0%}",
                f"{row['tokens_per_s']:,}",
            ]
            lines.append([*cells, quotient(row["tokens_per_s"], one["tokens_per_s"] if one else None)])
        said = (
            f"Milliseconds on several GPUs, random weights: a step, of texts of {rows[0]['context']} tokens where none "
            f"is said, or a whole prompt; B is that of all GPUs, and the floor that of one. Several copies of a model "
            f"(data) are beside one GPU with the texts of one copy, split experts and split keys (context) beside one "
            f"with all texts. {provenance(rows)}"
        )
    page.write_text(between_markers(page.read_text(), "generate_mesh", f"{said}\n\n{table_of(heads, lines)}"))
    return said


def _step(row: Row) -> str:
    """What a row is of, the mesh apart."""
    length = f" of {row['context']:,} tokens" if row["mode"].endswith("prompt") else ""
    return f"{row['mode']}{length}, {row['layers']} layers"


def _mesh(row: Row) -> str:
    """The axes of a row's mesh that are split, and where collectives run if not as XLA has them; empty on one GPU."""
    axes = [f"{axis.partition('_')[0]} {row[axis]}" for axis in MESH if row.get(axis, 1) > 1]
    return ", ".join([*axes, *([f"collectives {row['collectives']}"] if "collectives" in row else [])])
