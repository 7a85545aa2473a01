"""indexer_logits on torch tensors: as tsmla_jax defines it, with the same words for what is not legal."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tsmla_bridge
import tsmla_jax
from tests.bridge.inputs import tensors_of
from tsmla_bridge.ops import indexer_logits as module
from tsmla_jax import sparse

HEADS, DIM, P, Z, M = 8, 32, 7, 4, 3
Q_LENS, LENS = (2, 0, 3, 1), (9, 5, 2, 12)
NAMES = ("q", "weights", "k_cache", "block_tables", "seq_lens", "cu_seqlens_q")
# Compiled as a whole: eagerly, each operation would be compiled by itself.
IN_JAX = jax.jit(functools.partial(tsmla_jax.indexer_logits, implementation="reference"))
WRITE = jax.jit(sparse.write_indexer_cache)


def problem(packed: bool, ragged: bool) -> dict[str, Any]:
    """Arguments as numpy and jax arrays; with `ragged` a row behind the last request's."""
    rng = np.random.default_rng(3)
    tokens, requests = sum(Q_LENS) + 1, len(LENS)
    q = jnp.asarray(rng.standard_normal((tokens, HEADS, DIM)), jnp.float8_e4m3fn if packed else jnp.float32)
    keys = rng.standard_normal((P * Z, DIM)).astype(np.float32)
    cache: Any = keys.reshape(P, Z, DIM)
    if packed:
        cache = WRITE(jnp.zeros((P, Z, DIM + 4), jnp.uint8), keys, jnp.arange(P * Z))
    rows = requests if ragged else tokens
    tables = rng.integers(0, P, (rows, M)).astype(np.int32)
    lens = np.asarray(LENS, np.int32) if ragged else rng.integers(0, M * Z + 1, tokens).astype(np.int32)
    weights = rng.standard_normal((tokens, HEADS)).astype(np.float32)
    given = {"q": q, "weights": weights, "k_cache": cache, "block_tables": tables, "seq_lens": lens}
    if ragged:
        given["cu_seqlens_q"] = np.cumsum([0, *Q_LENS]).astype(np.int32)
    return given


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("ragged", [True, False])
def test_as_jax_defines_it(packed: bool, ragged: bool) -> None:
    given = problem(packed, ragged)
    want = IN_JAX(**given)
    got = tsmla_bridge.indexer_logits(**tensors_of(given))
    assert np.array_equal(np.isneginf(want), np.isneginf(got.numpy()))
    np.testing.assert_allclose(got.numpy(), want, rtol=2e-5, atol=1e-5)
    out = torch.empty_like(got)
    assert tsmla_bridge.indexer_logits(**tensors_of(given), out=out) is out
    assert torch.equal(out, got)


def test_rows_of_no_request_see_no_key() -> None:
    """Those before the first request's, too."""
    given = problem(packed=False, ragged=True)
    given["cu_seqlens_q"] = np.minimum(given["cu_seqlens_q"] + 2, len(given["q"]) - 1).astype(np.int32)
    want = np.isfinite(tsmla_jax.indexer_logits(**given, implementation="reference"))
    assert not want[:2].any() and not want[-1].any() and want[2:-1].any()
    np.testing.assert_array_equal(tsmla_bridge.indexer_logits(**tensors_of(given)).isfinite(), want)
    positions = tsmla_bridge.indexer_topk(**tensors_of(given), k=3)
    np.testing.assert_array_equal(positions, tsmla_jax.indexer_topk(**given, k=3, implementation="reference"))


def test_as_an_operator() -> None:
    given = tensors_of(problem(packed=False, ragged=True))  # opcheck can't compare float8
    arguments = (*(given[name] for name in NAMES), None)
    torch.library.opcheck(module.logits_operator, arguments)
    torch.library.opcheck(module.logits_into_operator, (*arguments, torch.empty(sum(Q_LENS) + 1, M * Z)))
    compiled = torch.compile(tsmla_bridge.indexer_logits, backend="eager", fullgraph=True)
    assert torch.equal(compiled(**given), tsmla_bridge.indexer_logits(**given))


def test_weights_have_a_derivative() -> None:
    given = tensors_of(problem(packed=False, ragged=False))
    given["weights"].requires_grad_()
    logits = tsmla_bridge.indexer_logits(**given)
    logits[torch.isfinite(logits)].sum().backward()
    assert given["weights"].grad is not None and given["weights"].grad.abs().sum() > 0


@pytest.mark.parametrize(
    "change",
    [
        {"q": np.zeros((7, HEADS, DIM), np.float32)},
        {"block_tables": np.zeros((2, M), np.int32)},
        {"seq_lens": np.zeros(4, np.float32)},
        {"cu_seqlens_q": np.zeros(4, np.int32)},
        {"weights": np.zeros((7, 2), np.float32)},
        {"cu_seqlens_q": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_both_front_ends_say_the_same(change: dict[str, Any]) -> None:
    given = problem(packed=True, ragged=True) | change
    with pytest.raises(ValueError) as theirs:
        tsmla_jax.indexer_logits(**given)
    with pytest.raises(ValueError) as ours:
        tsmla_bridge.indexer_logits(**tensors_of({k: v for k, v in given.items() if v is not None}))
    assert str(ours.value) == str(theirs.value)


def test_what_the_kernel_does_not_take_is_named() -> None:
    given = tensors_of(problem(packed=False, ragged=False))
    with pytest.raises(NotImplementedError, match="the tensors are on cpu"):
        tsmla_bridge.indexer_logits(**given, implementation="cute")
    with pytest.raises(ValueError, match=r"out: got float32\[7, 3\]; legal: float32\[7, 12\]"):
        tsmla_bridge.indexer_logits(**given, out=torch.empty(7, 3))
