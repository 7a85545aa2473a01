"""Decode's attention with the keys of each text on several GPUs of one host, beside the same on one of them:

    python -m examples.whole_models.context_parallel --out FILE.json [--points 4,16,131072/...] [--devices 4]

A point is B texts, H heads and keys of each text; bf16, pages of 64, one new token a text. --devices is the most GPUs
that share a text: each point runs on 1, 2, 4, ... of them, up to all that there are by default.

What is timed is a step of 8 layers in one program, each over a cache of its own and with queries that the layer before
made: `tsmla_jax.mla_decode` on one GPU, and `nn.context_parallel.mla_decode` and `merge` on several. Rows whose
"values" are not 0 are of layers that also project each head's result to that many columns, as a model's do: on several
GPUs before they are merged. Rows are microseconds a layer; floor_us is the time of the bytes of a GPU's keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tsmla_jax
from benchmarks import harness
from benchmarks.floors import LATENT, PAGE, ROPE, bytes_per_s
from examples.whole_models.models import within_budget
from examples.whole_models.random_model import noise
from tsmla_jax.nn import context_parallel

DEVICES = flags.DEFINE_integer("devices", None, "most GPUs that share a text, all by default", lower_bound=2)

LAYERS = 8
STEPS = 20
"""Steps that are started one after the other: the host's time for a step is not what is asked for."""


class Layers(NamedTuple):
    """A step on a mesh, for B texts of H heads.

    Attributes:
      step: from queries, which are donated, caches, and the layers' matrices of values (none if these are not
        projected), to the next queries.
      caches, matrices: shapes of one layer's, on the mesh.
      q: the shape of the queries.
    """

    step: Callable[[jax.Array, list[jax.Array], list[jax.Array]], jax.Array]
    caches: jax.ShapeDtypeStruct
    matrices: jax.ShapeDtypeStruct | None
    q: jax.ShapeDtypeStruct


def make_layers(mesh: Mesh, batch: int, heads: int, keys: int, values: int) -> Layers:
    """The step of a point; values: columns that each head's result is projected to, 0 for no projection."""
    devices = mesh.devices.size
    columns = -(-keys // (PAGE * devices))
    tables = jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns)
    lens = jnp.full(batch, keys, jnp.int32)
    width = values or LATENT

    def attend(q: jax.Array, cache: jax.Array, matrix: jax.Array | None) -> jax.Array:
        options: dict[str, Any] = {"softmax_scale": 192**-0.5, "latent_dim": LATENT}
        if devices == 1:
            out, lse = tsmla_jax.mla_decode(q, cache, tables, lens, return_lse=True, **options)
            out, lse = out[:, 0], lse[:, 0]
        else:
            out, lse = context_parallel.mla_decode(q, cache, tables, lens, context_axis="context", **options)
        if matrix is not None:
            out = jnp.einsum("bhl,hvl->bhv", out, matrix)
        return out if devices == 1 else context_parallel.merge(out, lse, "context")[0]

    def layers(q: jax.Array, caches: list[jax.Array], matrices: list[jax.Array]) -> jax.Array:
        for layer, cache in enumerate(caches):
            out = attend(q, cache, matrices[layer] if matrices else None)
            q = jnp.concatenate([*[out[:, None]] * (LATENT // width), q[..., LATENT:]], axis=-1)
        return q

    def struct(spec: P, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    mapped = jax.shard_map(layers, mesh=mesh, in_specs=(P(), P("context"), P()), out_specs=P(), check_vma=False)
    return Layers(
        # The queries stay where they are, as the state of an engine does. New arrays seem to cost new graphs.
        jax.jit(mapped, donate_argnums=0),
        struct(P("context"), devices * batch * columns, PAGE, LATENT + ROPE),
        struct(P(), heads, values, LATENT) if values else None,
        struct(P(), batch, 1, heads, LATENT + ROPE),
    )


def make_run(made: Layers) -> Callable[[], Any]:
    """A function that runs STEPS steps and waits for the last."""
    seeds = itertools.count()

    def noisy(like: jax.ShapeDtypeStruct) -> jax.Array:
        return noise(next(seeds), like.shape, like.dtype, like.sharding)

    caches = [noisy(made.caches) for _ in range(LAYERS)]
    matrices = [noisy(made.matrices) for _ in range(LAYERS)] if made.matrices else []
    state = [noisy(made.q)]

    def run() -> Any:
        for _ in range(STEPS):
            state[0] = made.step(state[0], caches, matrices)
        return jax.block_until_ready(state[0])

    return run


VALUES = (0, 128)
POINTS = ((4, 16, 131072), (4, 128, 131072), (1, 16, 131072), (1, 128, 131072), (16, 128, 32768))


def device_counts() -> list[int]:
    """1, 2, 4, ... up to the devices that the flag allows."""
    most = DEVICES.value or jax.device_count()
    return [1 << power for power in range(most.bit_length())]


def measure(record: harness.Record, point: Sequence[int], counts: Sequence[int], values: int) -> None:
    """One point, on each of these counts of GPUs."""
    batch, heads, keys = point
    for devices in counts:
        mesh = jax.make_mesh((devices,), ("context",), (AxisType.Auto,), devices=jax.devices()[:devices])
        run = make_run(make_layers(mesh, batch, heads, keys, values))
        us = harness.least_seconds(run, 10) / (STEPS * LAYERS) * 1e6
        floor = batch * keys / devices * (LATENT + ROPE) * 2 / bytes_per_s(jax.devices()[0].device_kind) * 1e6
        case = {"b": batch, "heads": heads, "keys": keys, "values": values, "context_parallel": devices}
        record.add(**case, us=round(us, 1), floor_us=round(floor, 1))
        said = f"B {batch:3d} H {heads:3d} {keys:6d} keys, {values:3d} values on {devices}"
        print(f"{said}: {us:8.1f} us, floor {floor:8.1f}", flush=True)


def main(argv: list[str]) -> None:
    del argv
    texts = harness.POINTS.value.split("/") if harness.POINTS.value else ()
    counts = device_counts()
    record = harness.Record(mode="decode attention", peer="tsmla", layers=LAYERS)
    for point in within_budget([tuple(map(int, text.split(","))) for text in texts] or POINTS):
        for values in VALUES:
            measure(record, point, counts, values)


if __name__ == "__main__":
    app.run(main)
