"""The tables of `scaling`: attention on four GPUs as predicted and as profiled, and meshes of 8, 16 and 64."""

from __future__ import annotations

import json
from collections.abc import Iterator

import benchmarks.table as tb
from benchmarks.floors import bytes_per_s
from examples.whole_models import scaling
from examples.whole_models.floors import decode_bytes
from examples.whole_models.models import FP8, MODELS, V3
from examples.whole_models.scaling import Attention, Link, Reading, Step, Wires
from tsmla_jax.generate import ModelConfig
from tsmla_jax.generate.mesh import MeshShape

NETWORK = Link(latency=30.0, rate=40e3)
"""Between hosts, assumed and not measured: a card of 400 Gbit/s for each GPU, at 80 % of its rate."""
WHOLE_V3 = {**V3, **FP8, "num_hidden_layers": 61, "first_k_dense_replace": 3}
CONTEXT = 4096
MESHES = (
    MeshShape(1, 8), MeshShape(2, 8), MeshShape(1, 16), MeshShape(8, 8), MeshShape(1, 64),
)  # fmt: skip
LOADS = (4, 16, 64, 256)
"""Texts of a GPU."""


def wires_of(loaded: tb.Loaded) -> tuple[scaling.Times, Wires]:
    """The times of attention in the record beside this one, and the links that they tell of."""
    rows = json.loads(loaded.path.with_name("context_parallel.json").read_text())
    times = scaling.attention_times(rows)
    return times, Wires(scaling.attention_link(times), NETWORK)


def predictions(loaded: tb.Loaded, links: tb.Loaded) -> Iterator[list[str]]:
    """Rows of a table: the kernels of attention on four GPUs, in microseconds a layer, as they were profiled and as
    they are predicted by one GPU's time and the links that another record tells of; and the quotient."""
    times, (_, wires) = scaling.attention_times(loaded.rows), wires_of(links)
    for row in loaded.rows:
        if "kernels_us" in row:
            at = Attention(row["b"], row["heads"], row["keys"], row.get("values", 0), row["context_parallel"])
            one, predicted = times[at._replace(gpus=1)][0], scaling.attention(times, wires.near, at)
            what = f"{at.texts} x {at.keys:,} keys, {at.heads} heads"
            cells = (tb.number(us) for us in (one, row["kernels_us"], predicted))
            yield [what, *cells, f"{predicted / row['kernels_us']:.2f}"]


def _slices(loaded: tb.Loaded) -> list[dict[int, tb.Row]]:
    """The rows of V3's slice on one GPU and on two that split its experts, by GPUs, for each number of texts."""
    found: dict[int, dict[int, tb.Row]] = {}
    for row in loaded.rows:
        alone = row.get("data_parallel", 1) == row.get("context_parallel", 1) == 1
        if row["mode"] == "v3-slice fp8 decode" and alone and "products" not in row:
            found.setdefault(row["b"], {})[row.get("expert_parallel", 1)] = row
    return [rows for rows in found.values() if rows.keys() >= {1, 2}]


def _step_of(row: tb.Row, gpus: int) -> Step:
    fields = MODELS["v3-slice", "fp8"]
    experts = row["layers"] - fields["first_k_dense_replace"]
    return Step(row["floor_us"], row["b"] / gpus, fields["hidden_size"], experts, gpus)


def extrapolations(loaded: tb.Loaded) -> Iterator[list[str]]:
    """Rows of a table of V3 whole: GPUs, mesh, and for each load milliseconds a step and tokens a second of a GPU."""
    _, wires = wires_of(loaded)
    config = ModelConfig.from_hf(WHOLE_V3)
    experts = WHOLE_V3["num_hidden_layers"] - WHOLE_V3["first_k_dense_replace"]
    slices = _slices(loaded)
    for mesh in MESHES:
        cells = []
        for texts in LOADS:
            rows = min(slices, key=lambda rows: abs(rows[2]["b"] / 2 - texts))
            reading = Reading.of([(_step_of(rows[n], n), rows[n]["us"]) for n in (1, 2)], wires)
            moved = decode_bytes(config, True, texts * mesh.size, CONTEXT, mesh)
            floor = moved / bytes_per_s(rows[1]["device"]) * 1e6
            step = Step(floor, texts, WHOLE_V3["hidden_size"], experts, mesh.expert)
            fixed = reading.fixed * config.num_layers / rows[1]["layers"]
            us = Reading(fixed, reading.factor).step(step, wires)
            cells.append(f"{us / 1e3:.1f}, {texts / us * 1e6:,.0f}")
        yield [str(mesh.size), f"data {mesh.data}, expert {mesh.expert}", *cells]
