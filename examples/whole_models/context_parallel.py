"""Decode's attention with the keys of each text on several GPUs of one host, beside the same on one of them:

    python -m examples.whole_models.context_parallel --out FILE.json [--points 4,16,131072/...] [--devices 4]

A point is B texts, H heads and keys of each text; bf16, pages of 64, one new token a text. --devices is the most GPUs
that share a text: each point runs on 1, 2, 4, ... of them, up to all that there are by default.

What is timed is a step of 8 layers in one program, each over a cache of its own and with queries that the layer before
made: `tsmla_jax.mla_decode` on one GPU, and `nn.context_parallel.mla_decode` and `merge` on all. Rows are microseconds
a layer; floor_us is the time of the bytes of a GPU's keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tsmla_jax
from benchmarks import harness
from benchmarks.floors import LATENT, PAGE, ROPE, bytes_per_s
from examples.whole_models.models import within_budget
from tsmla_jax.nn import context_parallel

DEVICES = flags.DEFINE_integer("devices", None, "most GPUs that share a text, all by default", lower_bound=2)

LAYERS = 8
STEPS = 20
"""Steps that are started one after the other: the host's time for a step is not what is asked for."""


def make_step(mesh: Mesh, batch: int, heads: int, keys: int) -> Callable[[], Any]:
    """A function that runs STEPS steps on the mesh and waits for the last."""
    devices = mesh.devices.size
    columns = -(-keys // (PAGE * devices))
    tables = jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns)
    lens = jnp.full(batch, keys, jnp.int32)

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P("context")), static_argnums=0)
    def noise(layer: int) -> jax.Array:
        shape = (devices * batch * columns, PAGE, LATENT + ROPE)
        return jax.random.normal(jax.random.key(layer), shape, jnp.bfloat16)

    def attend(q: jax.Array, cache: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"softmax_scale": 192**-0.5, "latent_dim": LATENT}
        if devices == 1:
            out, _ = tsmla_jax.mla_decode(q, cache, tables, lens, return_lse=True, **options)
            return out
        parts = context_parallel.mla_decode(q, cache, tables, lens, context_axis="context", **options)
        return context_parallel.merge(*parts, "context")[0][:, None]

    def layers(q: jax.Array, caches: list[jax.Array]) -> jax.Array:
        for cache in caches:
            q = jnp.concatenate([attend(q, cache), q[..., LATENT:]], axis=-1)
        return q

    caches = [noise(layer) for layer in range(LAYERS)]
    specs = {"in_specs": (P(), P("context")), "out_specs": P(), "check_vma": False}
    step = jax.jit(jax.shard_map(layers, mesh=mesh, **specs))
    q = jax.device_put(jnp.ones((batch, 1, heads, LATENT + ROPE), jnp.bfloat16), NamedSharding(mesh, P()))

    def run() -> Any:
        out = q
        for _ in range(STEPS):
            out = step(out, caches)
        return jax.block_until_ready(out)

    return run


POINTS = ((4, 16, 131072), (4, 128, 131072), (1, 16, 131072), (1, 128, 131072), (16, 128, 32768))


def device_counts() -> list[int]:
    """1, 2, 4, ... up to the devices that the flag allows."""
    most = DEVICES.value or jax.device_count()
    return [1 << power for power in range(most.bit_length())]


def measure(record: harness.Record, batch: int, heads: int, keys: int, counts: Sequence[int]) -> None:
    """One point, on each of these counts of GPUs."""
    for devices in counts:
        mesh = jax.make_mesh((devices,), ("context",), (AxisType.Auto,), devices=jax.devices()[:devices])
        us = harness.least_seconds(make_step(mesh, batch, heads, keys), 10) / (STEPS * LAYERS) * 1e6
        floor = batch * keys / devices * (LATENT + ROPE) * 2 / bytes_per_s(jax.devices()[0].device_kind) * 1e6
        case = {"b": batch, "heads": heads, "keys": keys, "context_parallel": devices}
        record.add(**case, us=round(us, 1), floor_us=round(floor, 1))
        print(f"B {batch:3d} H {heads:3d} {keys:6d} keys on {devices}: {us:8.1f} us, floor {floor:8.1f}", flush=True)


def main(argv: list[str]) -> None:
    del argv
    texts = harness.POINTS.value.split("/") if harness.POINTS.value else ()
    counts = device_counts()
    record = harness.Record(mode="decode attention", peer="tsmla", layers=LAYERS)
    for point in within_budget([tuple(map(int, text.split(","))) for text in texts] or POINTS):
        measure(record, *point, counts=counts)


if __name__ == "__main__":
    app.run(main)
