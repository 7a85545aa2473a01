"""mla_decode with the number of keys that each token sees, in place of the causal rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax
from tests.jax.ops.programs import assert_same
from tests.oracles import attention as oracle
from tests.oracles.inputs import Paged, paged
from tsmla_jax.ops.mla_decode import api

LENS, S = [40, 1, 0, 65], 3
VISIBLE = np.asarray([[38, 40, 7], [1, 0, 1], [0, 0, 0], [65, 13, 64]], np.int32)
UNSOUND = np.asarray([[-1, 41, 2**31 - 1], [-(2**31), 0, 5], [9, 9, 9], [66, -5, 64]], np.int32)
Q_LENS = [3, 0, 1, 2]


def packed(visible: np.ndarray) -> np.ndarray:
    """Those of the ragged call's tokens, and two rows of padding."""
    return np.concatenate([*(row[:n] for row, n in zip(visible, Q_LENS, strict=True)), np.full(2, 9)]).astype(np.int32)


def case(ragged: bool) -> Paged:
    return paged(LENS, s=S, q_lens=Q_LENS if ragged else None, padding_rows=2, seed=1)


def attend(name: str | None, inputs: Paged, visible: np.ndarray, **options: Any) -> Callable[..., Any]:
    arrays = (inputs.q, inputs.kv_cache, inputs.block_tables, inputs.seq_lens, visible)

    def run(q: Any, kv_cache: Any, block_tables: Any, seq_lens: Any, visible_lens: Any) -> Any:
        return tsmla_jax.mla_decode(
            q, kv_cache, block_tables, seq_lens, visible_lens=visible_lens, return_lse=True, implementation=name,
            **inputs.options(), **options,
        )  # fmt: skip

    return jax.jit(run)(*arrays)


def wanted(inputs: Paged, visible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By the oracle, every token as a request of its own."""
    outs, lses = [], []
    for b, rows in enumerate(inputs.per_request()):
        for i, row in enumerate(rows):
            length = int(np.clip(visible[b][i], 0, LENS[b]))
            out, lse = oracle.decode(
                [row[None]], inputs.kv_cache, inputs.block_tables[b : b + 1], [length], scale=inputs.scale,
                latent_dim=inputs.latent_dim,
            )  # fmt: skip
            outs += out
            lses += lse
    return np.concatenate(outs), np.concatenate(lses)


@pytest.mark.parametrize("visible", [VISIBLE, UNSOUND], ids=["sound", "unsound"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", ["reference", "xla"])
def test_equals_the_oracle(name: str, ragged: bool, visible: np.ndarray) -> None:
    inputs = case(ragged)
    out, lse = map(np.asarray, attend(name, inputs, packed(visible) if ragged else visible))
    want, want_lse = wanted(inputs, visible)
    out, lse = out.reshape(-1, *out.shape[-2:]), lse.reshape(-1, lse.shape[-1])
    np.testing.assert_allclose(out[: len(want)], want, atol=2e-6)
    np.testing.assert_allclose(lse[: len(want)], want_lse, atol=2e-6)
    assert not out[len(want) :].any() and np.isneginf(lse[len(want) :]).all()


@pytest.mark.parametrize("name", ["reference", "xla"])
def test_nan_reaches_no_token_that_does_not_see_it(name: str) -> None:
    """One token a request, which sees fewer keys than its request has."""
    inputs = paged([40, 20], seed=1)
    cache = np.array(inputs.kv_cache)
    page_size = cache.shape[1]
    cache[inputs.block_tables[0, 35 // page_size], 35 % page_size] = np.nan
    visible = np.asarray([[30], [20]], np.int32)
    got = attend(name, replace(inputs, kv_cache=cache), visible)
    assert_same(got, attend(name, inputs, visible))


def test_the_causal_rule_is_a_special_case() -> None:
    inputs = case(False)
    causal = np.asarray(LENS)[:, None] - (S - 1) + np.arange(S)
    got = attend("xla", inputs, causal.astype(np.int32))
    arrays = (inputs.q, inputs.kv_cache, inputs.block_tables, inputs.seq_lens)
    want = tsmla_jax.mla_decode(*arrays, **inputs.options(), return_lse=True, implementation="xla")
    assert_same(got, want)


@pytest.mark.parametrize(
    ("visible", "options", "said"),
    [
        (VISIBLE[:, :2], {}, r"visible_lens: got shape \[4, 2\]; it must be q's without the last two axes, \[4, 3\]"),
        (VISIBLE.astype(np.float32), {}, "visible_lens: got dtype float32; legal: int32"),
        (VISIBLE[0], {}, "visible_lens: got shape"),
        (VISIBLE, {"causal": False}, "causal: got False with visible_lens"),
    ],
)
def test_what_is_not_legal(visible: np.ndarray, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        attend("xla", case(False), visible, **options)


@pytest.mark.parametrize("ragged", [False, True])
def test_unsound_values_are_named(ragged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    inputs, visible = case(ragged), VISIBLE.copy()
    given: dict[str, Any] = {"return_lse": True, "implementation": "reference", **inputs.options()}
    arrays = (inputs.q, inputs.kv_cache, inputs.block_tables, inputs.seq_lens)
    tsmla_jax.mla_decode(*arrays, visible_lens=packed(visible) if ragged else visible, **given)
    visible[3, 1] = 66
    token = 5 if ragged else 10
    with pytest.raises(ValueError, match=f"visible_lens: token {token} sees 66 keys; legal: 0 to 65, the keys of "):
        tsmla_jax.mla_decode(*arrays, visible_lens=packed(visible) if ragged else visible, **given)


# ---- the kernel's call, on CPUs by an emulation


def arrays(ragged: bool, copies: int = 1) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    tokens = (13,) if ragged else (8, 2)
    shapes = ((*tokens, 4, 320), (24, 16, 320))
    q, kv_cache = (jnp.asarray(rng.normal(size=(copies, *shape)) / 3, jnp.bfloat16) for shape in shapes)
    tables = jnp.asarray(np.stack([rng.permutation(24).reshape(8, 3) for _ in range(copies)]), jnp.int32)
    lens, visible = (jnp.asarray(rng.integers(0, 48, (copies, *shape)), jnp.int32) for shape in ((8,), tokens))
    given = [q, kv_cache, tables, lens, visible]
    return [x[0] for x in given] if copies == 1 else given


def test_the_kernel_is_chosen_on_hopper(cache_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    table = api.OPERATION.table
    on_hopper = replace(table["cute"], why_not_by_default=list)
    monkeypatch.setitem(vars(api.OPERATION), "table", {**table, "cute": on_hopper})
    q, kv_cache, tables, lens, visible = arrays(False)
    explanation = tsmla_jax.explain(
        "mla_decode", q, kv_cache, tables, lens, softmax_scale=1.0, latent_dim=256, visible_lens=visible
    )
    assert explanation.chosen == "cute"
