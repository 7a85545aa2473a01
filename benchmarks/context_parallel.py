"""Time decode's attention with the keys of each text on several GPUs of one host, beside the same on one of them.

    python3 benchmarks/context_parallel.py --out FILE.json [--devices 2] [--points 4,16,131072/...] [--profile FOLDER]

A point is B texts, H heads and keys of each text; bf16, pages of 64, one new token a text. What is timed is a step of
--step_layers layers in one program, each over a cache of its own and with queries that the layer before made:
`tsmla_jax.mla_decode` on one GPU, and `nn.context_parallel.mla_decode` and `merge` on all. Rows are microseconds a
layer. floor_us is the time of the bytes of a GPU's keys. --profile keeps a trace of each program for the times of its
kernels and of the collective, apart from the run that is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from floors import bytes_per_s
from harness import POINTS, Record, least_seconds, within_budget
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tsmla_jax.nn import context_parallel

DEVICES = flags.DEFINE_integer("devices", 2, "GPUs that share the keys", lower_bound=2)
LAYERS = flags.DEFINE_integer("step_layers", 8, "layers of a step", lower_bound=1)
PROFILE = flags.DEFINE_string("profile", None, "folder of traces")

PAGE, LATENT, WIDTH = 64, 512, 576
ALL_POINTS = [(4, 16, 131072), (4, 128, 131072), (1, 16, 131072), (1, 128, 131072), (16, 128, 32768)]
STEPS = 20
"""Steps that are started one after the other: the host's time for a step is not what is asked for."""


def mesh_of(devices: int) -> Mesh:
    """The first `devices` GPUs, on one axis."""
    return jax.make_mesh((devices,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def make_step(mesh: Mesh, batch: int, heads: int, keys: int) -> Callable[[], Any]:
    """A function that runs STEPS steps on the mesh and waits for the last."""
    devices = mesh.devices.size
    columns = -(-keys // (PAGE * devices))
    tables = jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns)
    lens = jnp.full(batch, keys, jnp.int32)

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P("context")), static_argnums=0)
    def noise(layer: int) -> jax.Array:
        shape = (devices * batch * columns, PAGE, WIDTH)
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

    caches = [noise(layer) for layer in range(LAYERS.value)]
    specs = {"in_specs": (P(), P("context")), "out_specs": P(), "check_vma": False}
    step = jax.jit(jax.shard_map(layers, mesh=mesh, **specs))
    q = jax.device_put(jnp.ones((batch, 1, heads, WIDTH), jnp.bfloat16), NamedSharding(mesh, P()))

    def run() -> Any:
        out = q
        for _ in range(STEPS):
            out = step(out, caches)
        return jax.block_until_ready(out)

    return run


def measure(record: Record, batch: int, heads: int, keys: int) -> None:
    """One point, on one GPU and on all."""
    times = {}
    for devices in (1, DEVICES.value):
        run = make_step(mesh_of(devices), batch, heads, keys)
        us = times[devices] = least_seconds(run, 10) / (STEPS * LAYERS.value) * 1e6
        if PROFILE.value:
            with jax.profiler.trace(f"{PROFILE.value}/{batch}_{heads}_{keys}_{devices}"):
                run()
        rate = bytes_per_s(jax.devices()[0].device_kind)
        floor = batch * keys / devices * WIDTH * 2 / rate * 1e6
        row = {"b": batch, "heads": heads, "keys": keys, "context_parallel": devices, "mode": "decode attention"}
        record.add(**row, peer="tsmla", us=round(us, 1), floor_us=round(floor, 1), layers=LAYERS.value)
    speedup = times[1] / times[DEVICES.value]
    print(f"B {batch:3d} H {heads:3d} {keys:6d} keys: {times[1]:8.1f} us on one, {times[DEVICES.value]:8.1f} on "
          f"{DEVICES.value} ({speedup:.2f} times)", flush=True)  # fmt: skip


def main(argv: list[str]) -> int:
    del argv
    points = ALL_POINTS
    if POINTS.value:
        points = [tuple(map(int, point.split(","))) for point in POINTS.value.split("/")]  # type: ignore[misc]
    record = Record()
    for batch, heads, keys in within_budget(points):
        measure(record, batch, heads, keys)
    return 0


if __name__ == "__main__":
    app.run(main)
