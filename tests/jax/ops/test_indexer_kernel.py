"""indexer_logits through its kernel's custom call, lowered without a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax
from tests.jax.ops.programs import calls, lower
from tsmla_jax.ops import device

HEADS, DIM, PAGES, Z, M, T = 8, 128, 5, 16, 2, 4
RUN = functools.partial(tsmla_jax.indexer_logits, implementation="cute")

pytestmark = pytest.mark.usefixtures("cache_directory")


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


def test_one_custom_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    flat, ragged = arrays(), arrays(2) | {"cu_seqlens_q": jnp.asarray([0, 1, T], jnp.int32)}
    for given in (flat, ragged):
        run = functools.partial(RUN, **{name: x for name, x in given.items() if name != "weights"})
        assert calls(jax.make_jaxpr(lambda weights, run=run: run(weights=weights))(given["weights"])) == 1
    text = lower(lambda *given: RUN(**dict(zip(flat, given, strict=True))), *flat.values())
    assert text.count(f"@{device.TARGET}(") == 1
    empty = flat | {"block_tables": flat["block_tables"][:, :0]}
    assert device.TARGET not in lower(lambda *given: RUN(**dict(zip(empty, given, strict=True))), *empty.values())
