"""indexer_logits through its kernel's custom call, lowered and emulated without a GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import tsmla_jax
from tests.emulator.decode import emulated
from tests.jax.ops.programs import calls, collectives, lower
from tsmla_jax.ops import device
from tsmla_jax.ops.indexer_logits import cute

HEADS, DIM, PAGES, Z, M, T = 8, 128, 5, 16, 2, 4
RUN = functools.partial(tsmla_jax.indexer_logits, implementation="cute")
REFERENCE = functools.partial(tsmla_jax.indexer_logits, implementation="reference")

pytestmark = pytest.mark.usefixtures("cache_directory", "quick_compilation")


def arrays(rows: int = T) -> dict[str, jax.Array]:
    """Arguments with a row of the block table for each of `rows` requests."""
    rng = np.random.default_rng(1)
    return {
        "q": jnp.asarray(rng.standard_normal((T, HEADS, DIM)), jnp.float8_e4m3fn),
        "weights": jnp.asarray(rng.standard_normal((T, HEADS)), jnp.float32),
        "k_cache": jnp.asarray(rng.standard_normal((PAGES, Z, DIM)), jnp.float8_e4m3fn),
        "block_tables": jnp.asarray(rng.integers(0, PAGES, (rows, M)), jnp.int32),
        "seq_lens": jnp.asarray(rng.integers(0, M * Z + 1, rows), jnp.int32),
    }


def emulate(q: jax.Array, weights: jax.Array, k_cache: jax.Array, *tables: jax.Array, **_: object) -> list[jax.Array]:
    """What the custom call of these arrays returns."""
    offsets = {"cu_seqlens_q": tables[2]} if len(tables) == 3 else {}
    return [REFERENCE(q, weights, k_cache, *tables[:2], **offsets)]


def test_one_custom_call_however_it_is_transformed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    flat, ragged = arrays(), arrays(2) | {"cu_seqlens_q": jnp.asarray([0, 1, T], jnp.int32)}
    for given in (flat, ragged):
        run = functools.partial(RUN, **{name: x for name, x in given.items() if name != "weights"})
        assert calls(jax.make_jaxpr(lambda weights, run=run: run(weights=weights))(given["weights"])) == 1
        slope = functools.partial(jax.jvp, lambda weights, run=run: run(weights=weights))
        assert calls(jax.make_jaxpr(slope)((given["weights"],), (given["weights"],))) == 1
    text = lower(lambda *given: RUN(**dict(zip(flat, given, strict=True))), *flat.values())
    assert text.count(f"@{device.TARGET}(") == 1
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), {name: flat[name] for name in flat if name != "k_cache"})
    mapped = jax.vmap(lambda given: RUN(**given, k_cache=flat["k_cache"]))
    assert calls(jax.make_jaxpr(mapped)(twice)) == 1
    empty = flat | {"block_tables": flat["block_tables"][:, :0]}
    assert device.TARGET not in lower(lambda *given: RUN(**dict(zip(empty, given, strict=True))), *empty.values())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("ragged", [False, True])
def test_tokens_stay_where_they_are(kind: AxisType, ragged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("emulates the kernel on CPUs")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    given = arrays(2) | {"cu_seqlens_q": jnp.asarray([0, 1, T], jnp.int32)} if ragged else arrays()
    mesh = Mesh(np.asarray(jax.devices()[:2]), "x", axis_types=(kind,))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x",), ()))
    split = ("q", "weights") if ragged else ("q", "weights", "block_tables", "seq_lens")
    placed: dict[str, Any] = {name: jax.device_put(x, rows if name in split else whole) for name, x in given.items()}
    with emulated(cute._transformable, by=emulate):
        compiled = jax.jit(RUN).lower(**placed).compile()
        assert bool(collectives(compiled)) == ragged  # a request's tokens may lie anywhere
        got = compiled(**placed)
    np.testing.assert_allclose(np.asarray(got), REFERENCE(**given), rtol=1e-5, atol=1e-5)
