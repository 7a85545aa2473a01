"""Decode's attention with keys on one device and on two, at a size for a CPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

pytest.importorskip("absl", reason="the benchmarks' flags")
from benchmarks import harness
from examples.whole_models import context_parallel


class Rows:
    """What the record is told."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        self.rows.append(row)


@pytest.mark.parametrize("values", [0, 128])
def test_keys_on_one_device_and_on_two(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(step: Any, turns: int) -> float:
        return float(np.isfinite(np.float32(step())).all())

    monkeypatch.setattr(context_parallel, "STEPS", 1)
    monkeypatch.setattr(context_parallel, "LAYERS", 2)
    monkeypatch.setattr(harness, "least_seconds", seconds)
    assert len(jax.devices()) > 1
    record = Rows()
    context_parallel.measure(record, (2, 4, 4000), (1, 2), values)
    one, two = record.rows
    assert one["values"] == two["values"] == values
    assert (one["context_parallel"], two["context_parallel"]) == (1, 2)
    assert one["us"] == two["us"] == 500_000  # of one "second" for two layers: all results are finite
    assert one["floor_us"] == pytest.approx(2 * two["floor_us"], abs=0.15) and two["floor_us"] > 1


@pytest.mark.parametrize("devices", [1, 2])
def test_queries_are_donated(devices: int) -> None:
    """A step takes the memory of its queries, and its result is the next step's queries as it is."""
    mesh = jax.make_mesh((devices,), ("context",), (AxisType.Auto,), devices=jax.devices()[:devices])
    made = context_parallel.make_layers(mesh, batch=2, heads=4, keys=300, values=128)
    assert made.matrices is not None
    q, cache, matrix = (
        jax.device_put(jnp.full(x.shape, 0.1, x.dtype), x.sharding) for x in (made.q, made.caches, made.matrices)
    )
    following = made.step(q, [cache], [matrix])
    assert q.is_deleted() and (following.shape, following.dtype) == (made.q.shape, made.q.dtype)
    assert following.sharding.is_equivalent_to(made.q.sharding, following.ndim)
