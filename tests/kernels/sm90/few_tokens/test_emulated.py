"""The compiled kernels of few tokens on the emulated machine, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.emulator.ptx import machine
from tests.emulator.ptx.arrays import launch
from tests.emulator.ptx.machine import Order
from tests.kernels.object_checks import all_but_slow
from tsmla_jax import sparse
from tsmla_jax.generate import moe
from tsmla_jax.generate.config import MoEConfig
from tsmla_jax.nn.norms import rms_norm
from tsmla_jax.ops.selected import layouts
from tsmla_kernels.catalog import KERNELS
from tsmla_kernels.contract.layouts import V4_PACKED
from tsmla_kernels.sm90.constants import FP8
from tsmla_kernels.sm90.decode.config import DecodeConfig
from tsmla_kernels.sm90.few_tokens.config import (
    PACKED,
    ChoiceSpec,
    ExpertsSpec,
    MatmulSpec,
    QueriesSpec,
    RouterSpec,
    WindowConfig,
)
from tsmla_kernels.sm90.few_tokens.index_key_config import IndexKeySpec
from tsmla_kernels.sm90.few_tokens.latent_config import InputsSpec, OutputsSpec
from tsmla_kernels.sm90.few_tokens.streams_config import SUMS, ReadStreamsSpec, WriteStreamsSpec
from tsmla_kernels.sm90.few_tokens.values_config import ValuesSpec
from tsmla_kernels.sm90.latent.shape import workspace_shapes

pytestmark = pytest.mark.skipif(machine.COMPILER is None, reason="needs g++, which builds the machine")

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
DTYPES = {"bfloat16": BF16, FP8: E4M3}
ORDERS = (Order(0, 4), Order(1, 1))
EPS = 1e-6


class Draw:
    """Random arrays; `wide` of weights and activations are their values in float64."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def bf16(self, *shape: int) -> np.ndarray:
        return self.rng.normal(size=shape).astype(BF16)

    def weight(self, dtype: str, *shape: int) -> np.ndarray:
        return self.rng.normal(size=shape).astype(DTYPES[dtype])

    def scales(self, *shape: int) -> np.ndarray:
        blocks = (-(-size // 128) for size in shape[-2:])
        return self.rng.uniform(0.5, 2, size=(*shape[:-2], *blocks)).astype(np.float32)


def wide(weight: np.ndarray, scales: np.ndarray | None = None) -> np.ndarray:
    found = weight.astype(np.float64)
    if weight.dtype != E4M3 or scales is None:
        return found
    each = np.repeat(np.repeat(scales, 128, axis=-2)[..., : weight.shape[-2], :], 128, axis=-1)
    return found[: len(each)] * each


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * weight.astype(np.float64)


def gated(both: np.ndarray, limit: float | None) -> np.ndarray:
    gate, up = np.split(both, 2, axis=-1)
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-gate)) * up


def run(name: str, spec: Any, arrays: dict[str, np.ndarray], written: str) -> None:
    """Run the call in several orders of warps, and leave its result in `arrays`."""
    kernel = KERNELS[name]
    assert kernel.reasons(spec) == []
    results = []
    for order in ORDERS:
        arrays[written].fill(np.nan)
        assert launch(kernel, kernel.config_for(spec), arrays, order).hazards == []
        results.append(arrays[written].copy())
    for result in results[1:]:
        np.testing.assert_array_equal(result.view(np.uint8), results[0].view(np.uint8))


def close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    found = got.astype(np.float64)
    assert np.linalg.norm(found - want) <= tolerance * np.linalg.norm(want)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "spec",
    [
        MatmulSpec(3, 384, 256, FP8, EPS, residual=True),
        MatmulSpec(16, 2432, 48, "bfloat16", EPS, gated=True),
        MatmulSpec(1, 2048, 24, FP8, EPS, residual=True),
        MatmulSpec(1, 3456, 48, FP8, EPS, gated=True),
        slow(MatmulSpec(1, 256, 40, "bfloat16", EPS)),
        slow(MatmulSpec(1, 4096, 4104, "bfloat16")),
        slow(MatmulSpec(1, 7168, 64, "bfloat16", EPS)),
        slow(MatmulSpec(1, 4096, 4112, "bfloat16", EPS, gated=True)),
        slow(MatmulSpec(1, 4608, 2144, FP8, EPS)),
        slow(MatmulSpec(1, 1408, 136, FP8, residual=True)),
        slow(MatmulSpec(1, 1280, 4352, FP8, EPS, gated=True, limit=3.0)),
        slow(MatmulSpec(9, 512, 256, FP8, None, gated=True, limit=3.0)),
    ],
)
def test_a_product(spec: MatmulSpec) -> None:
    """Rows of x are wider than the weight has terms; the last tile has eight rows."""
    draw, columns = Draw(), spec.rows // (2 if spec.gated else 1)
    x, weight = draw.bf16(spec.tokens, spec.terms + 64), draw.weight(spec.weight_dtype, spec.rows, spec.terms)
    scales, norm, residual = draw.scales(spec.rows, spec.terms), draw.bf16(spec.terms), draw.bf16(spec.tokens, columns)
    x[:, spec.terms :] = np.nan
    arrays = {"x": x, "weight": weight, "weight_scales": scales, "norm_weight": norm, "residual": residual}
    arrays["out"] = np.empty((spec.tokens, columns), BF16)
    run("few_token_matmul", spec, arrays, "out")
    own = x[:, : spec.terms]
    want = (normed(own, norm) if spec.eps else own.astype(np.float64)) @ wide(weight, scales).T
    want = gated(want, spec.limit) if spec.gated else want
    close(arrays["out"], want + residual.astype(np.float64) * spec.residual, 4e-3)


@pytest.mark.parametrize(
    "spec",
    [
        ExpertsSpec(11, 3, 256, 128, FP8, EPS, 10.0, residual=False),
        slow(ExpertsSpec(1, 8, 256, 128, "bfloat16", EPS)),
        ExpertsSpec(1, 5, 256, 2048, FP8, EPS),
        slow(ExpertsSpec(1, 3, 2176, 1024, "bfloat16", EPS)),
        slow(ExpertsSpec(1, 3, 2176, 1408, FP8, EPS, residual=False)),
        slow(ExpertsSpec(16, 4, 256, 128, "bfloat16", EPS)),
    ],
)
def test_experts(spec: ExpertsSpec) -> None:
    """A row of padding has no experts and is NaN; a stack has an unused matrix behind its last."""
    draw, (tokens, choices, hidden, width) = Draw(), dataclasses.astuple(spec)[:4]
    count, padding = 9, tokens // 2 if tokens > 1 else None
    experts = np.stack([draw.rng.permutation(count)[:choices] for _ in range(tokens)]).astype(np.int32)
    weights = draw.rng.uniform(size=(tokens, choices)).astype(np.float32)
    spare = spec.weight_dtype == FP8
    up = draw.weight(spec.weight_dtype, count + spare, 2 * width, hidden)
    down = draw.weight(spec.weight_dtype, count + spare, hidden, width)
    up_scales, down_scales = draw.scales(count, 2 * width, hidden), draw.scales(count, hidden, width)
    x, norm, residual = draw.bf16(tokens, hidden), draw.bf16(hidden), draw.bf16(tokens, hidden)
    if padding is not None:
        experts[padding] = count
        x[padding] = residual[padding] = np.nan
    arrays = {"x": x, "weight": up, "weight_scales": up_scales, "norm_weight": norm, "experts": experts}
    arrays["out"] = np.empty((tokens * choices, width), BF16)
    run("few_token_experts_up", spec, arrays, "out")
    inner, exists = arrays["out"], experts.reshape(-1) < count
    assert np.isnan(inner[~exists].astype(np.float64)).all()  # not written
    own, rows = wide(up, up_scales), normed(x, norm)
    want = [gated(own[experts[pair // choices, pair % choices]] @ rows[pair // choices], spec.limit)
            for pair in np.flatnonzero(exists)]  # fmt: skip
    close(inner[exists], np.array(want), 5e-3)

    arrays = {"x": inner, "weight": down, "weight_scales": down_scales, "experts": experts, "weights": weights}
    arrays |= {"residual": residual, "out": np.empty((tokens, hidden), BF16)}
    run("few_token_experts_down", dataclasses.replace(spec, eps=None, limit=None), arrays, "out")
    own, total = wide(down, down_scales), residual.astype(np.float64) if spec.residual else np.zeros((tokens, hidden))
    for pair in np.flatnonzero(exists):
        token, choice = divmod(int(pair), choices)
        total[token] += weights[token, choice] * (own[experts[token, choice]] @ inner[pair].astype(np.float64))
    real = np.arange(tokens) != padding
    close(arrays["out"][real], total[real], 3e-3)


CHOICES = {
    "groups of 32": ChoiceSpec(
        256, 128, FP8, 256, 8, 1, "noaux_tc", "sigmoid", 8, 4, norm_topk_prob=True, routed_scaling_factor=2.5, eps=EPS
    ),
    "softmax": ChoiceSpec(256, 128, "bfloat16", 64, 6, 2, eps=EPS, ahead=True),
    "groups of 20": ChoiceSpec(
        256, 128, "bfloat16", 160, 6, 2, "group_limited_greedy", "softmax", 8, 3, routed_scaling_factor=16.0
    ),
    "many tiles": ChoiceSpec(256, 640, "bfloat16", 8, 2, 2, eps=EPS),
    "sqrtsoftplus": ChoiceSpec(256, 128, FP8, 40, 3, 1, "noaux_tc", "sqrtsoftplus", norm_topk_prob=True, limit=2.0),
}


@pytest.mark.parametrize("name", all_but_slow(CHOICES, ("softmax", "many tiles")))
def test_a_choice_of_experts(name: str) -> None:
    """As the definition in XLA makes it, ties and NaN included."""
    spec, draw = CHOICES[name], Draw()
    count, choices = spec.num_experts + spec.num_shared, spec.top_k + spec.num_shared
    sizes = (count, 2 * spec.width, 256)
    up, scales = draw.weight(spec.weight_dtype, *sizes), draw.scales(*sizes)
    x, norm, bias = draw.bf16(1, 256), draw.bf16(256), draw.rng.normal(size=spec.num_experts).astype(np.float32)
    config = MoEConfig(
        spec.num_experts,
        spec.top_k,
        spec.width,
        spec.num_shared,
        cast(Any, spec.routing),
        spec.n_group,
        spec.topk_group,
        norm_topk_prob=spec.norm_topk_prob,
        routed_scaling_factor=spec.routed_scaling_factor,
        scoring=cast(Any, spec.scoring),
    )
    for kind in ("normal", "ties", "NaN"):
        logits = 2 * draw.rng.normal(size=(1, spec.num_experts)).astype(np.float32)
        if kind == "ties":
            logits, bias = logits.round(), np.zeros_like(bias)
        if kind == "NaN":
            logits[0, spec.num_experts // 2] = np.nan
        arrays = {"x": x, "weight": up, "weight_scales": scales, "norm_weight": norm, "logits": logits, "bias": bias}
        arrays |= {"out": np.empty((choices, spec.width), BF16), "experts": np.empty((1, choices), np.int32)}
        arrays["weights"] = np.empty((1, choices), np.float32)
        arrays["down"] = draw.weight(spec.weight_dtype, count, 256, spec.width)
        run("few_token_choose_up", spec, arrays, "out")
        experts, weights = (np.asarray(part) for part in moe._route(jnp.array(logits), jnp.array(bias), config, None))
        shared = np.arange(spec.num_experts, count, dtype=np.int32)
        np.testing.assert_array_equal(arrays["experts"][0], np.concatenate([experts[0], shared]))
        np.testing.assert_allclose(arrays["weights"][0, : spec.top_k], weights[0], rtol=1e-5, atol=1e-6)
        assert (arrays["weights"][0, spec.top_k :] == 1).all()
        own = normed(x, norm)[0] if spec.eps else x[0].astype(np.float64)
        want = [gated(wide(up, scales)[expert] @ own, spec.limit) for expert in arrays["experts"][0]]
        close(arrays["out"], np.array(want), 5e-3)


@pytest.mark.parametrize(
    ("spec", "low"),
    [
        (QueriesSpec(3, 2, 128, 512, 64, FP8, FP8, False, "halves", EPS), 64),
        slow(QueriesSpec(1, 2, 128, 512, 64, "bfloat16", "bfloat16", True, "interleaved", EPS), None),
        slow(QueriesSpec(11, 1, 128, 256, 32, "bfloat16", FP8, True, "halves", EPS), 128),
    ],
)
def test_queries_and_the_cache(spec: QueriesSpec, low: int | None) -> None:
    """One token has no slot. low: the columns of the low-rank query; None for queries that lie beside the latent."""
    draw, tokens, heads = Draw(), spec.tokens, spec.heads
    nope, latent, rope = spec.nope_dim, spec.latent_dim, spec.rope_dim
    joint = draw.bf16(tokens, (heads * (nope + rope) if low is None else low) + latent + rope)
    q = joint if low is None else draw.bf16(tokens, heads * (nope + rope))
    w_uk, norm = (draw.bf16(heads, latent, nope).astype(np.float32) / 8).astype(BF16), draw.bf16(latent)
    cos, sin = (draw.rng.normal(size=(tokens, rope // 2)).astype(np.float32) for _ in range(2))
    slots = draw.rng.permutation(24)[:tokens].astype(np.int32)
    if tokens > 1:
        slots[1] = -1
    q_scale, kv_scale = (
        np.array([factor if dtype == FP8 else 1], np.float32)
        for factor, dtype in ((0.5, spec.q_dtype), (2, spec.kv_dtype))
    )
    cache = draw.weight(spec.kv_dtype, 3, 8, latent + rope)
    before = cache.copy().reshape(-1, latent + rope)
    absorbed = np.empty((tokens, heads, latent + rope), DTYPES[spec.q_dtype])
    arrays = {"q": q, "joint": joint, "w_uk": w_uk, "norm_weight": norm, "cos": cos, "sin": sin,
              "slot_mapping": slots, "q_scale": q_scale, "kv_scale": kv_scale, "kv_cache": cache,
              "new_kv_cache": cache, "absorbed": absorbed}  # fmt: skip
    run("few_token_queries", spec, arrays, "absorbed")

    def rotated(x: np.ndarray) -> np.ndarray:
        half = rope // 2
        a, b = (x[..., 0::2], x[..., 1::2]) if spec.rope_interleave else (x[..., :half], x[..., half:])
        c, s = (angle.reshape(tokens, *[1] * (x.ndim - 2), half) for angle in (cos, sin))
        pairs = a * c - b * s, b * c + a * s
        if spec.rope_layout == "interleaved":
            return np.stack(pairs, axis=-1).reshape(x.shape)
        return np.concatenate(pairs, axis=-1)

    own = q[:, : heads * (nope + rope)].astype(np.float64).reshape(tokens, heads, -1)
    latents = np.einsum("thn,hln->thl", own[..., :nope], w_uk.astype(np.float64))
    want = np.concatenate([latents, rotated(own[..., nope:])], axis=-1) / q_scale[0]
    close(arrays["absorbed"], want, 0.03 if spec.q_dtype == FP8 else 3e-3)
    row = joint[:, -(latent + rope) :]
    rows = np.concatenate([normed(row[:, :latent], norm), rotated(row[:, latent:].astype(np.float64))], axis=-1)
    flat, written = cache.reshape(-1, latent + rope), slots >= 0
    close(flat[slots[written]], rows[written] / kv_scale[0], 0.03 if spec.kv_dtype == FP8 else 4e-3)
    others = np.setdiff1d(np.arange(len(flat)), slots[written])
    np.testing.assert_array_equal(flat[others].view(np.uint8), before[others].view(np.uint8))


@pytest.mark.parametrize("tokens", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_queries_and_packed_rows(tokens: int) -> None:
    """Rows bit by bit as `write_packed_kv_cache` makes them of normed latents; one token has no slot."""
    draw, heads = Draw(), 1
    joint, q = draw.bf16(tokens, 128 + 576), draw.bf16(tokens, heads * 192)
    w_uk, norm = draw.bf16(heads, 512, 128), draw.bf16(512)
    cos, sin = (draw.rng.normal(size=(tokens, 32)).astype(np.float32) for _ in range(2))
    slots = np.array([9, -1, 3], np.int32)[:tokens]
    one, cache = np.ones(1, np.float32), draw.rng.integers(0, 255, size=(2, 8, 656), dtype=np.uint8)
    spec = QueriesSpec(tokens, heads, 128, 512, 64, "bfloat16", PACKED, True, "interleaved", EPS)
    latent = rms_norm(jnp.array(joint[:, 128:640]), jnp.array(norm), EPS)
    given = (jnp.array(cache), latent, *(jnp.array(part) for part in (joint[:, 640:], slots, cos, sin)))
    want = np.asarray(sparse.write_packed_kv_cache(*given, rope_interleave=True, rope_layout="interleaved"))
    arrays = {"q": q, "joint": joint, "w_uk": w_uk, "norm_weight": norm, "cos": cos, "sin": sin,
              "slot_mapping": slots, "q_scale": one, "kv_scale": one, "kv_cache": cache, "new_kv_cache": cache,
              "absorbed": np.empty((tokens, heads, 576), BF16)}  # fmt: skip
    run("few_token_queries", spec, arrays, "absorbed")
    np.testing.assert_array_equal(cache, want)
    own = q.astype(np.float64)
    close(arrays["absorbed"][:, 0, :512], own[:, :128] @ w_uk[0].astype(np.float64).T, 3e-3)


@pytest.mark.parametrize(
    "spec", [IndexKeySpec(3, "bfloat16", 64, "halves", EPS), slow(IndexKeySpec(16, "float32", 64, "interleaved", EPS))]
)
def test_indexer_keys(spec: IndexKeySpec) -> None:
    """As `write_indexer_cache` writes the layer norm of keys; one token has no slot."""
    draw, tokens = Draw(), spec.tokens
    keys = draw.bf16(tokens, 160)
    dtype = DTYPES.get(spec.norm_dtype, np.float32)
    weight, bias = (draw.rng.normal(size=128).astype(dtype) for _ in range(2))
    cos, sin = (draw.rng.normal(size=(tokens, spec.rope_dim // 2)).astype(np.float32) for _ in range(2))
    slots = draw.rng.permutation(24)[:tokens].astype(np.int32)
    slots[1] = -1
    cache = draw.rng.integers(0, 120, size=(3, 8, 132), dtype=np.uint8)
    own = keys[:, :128].astype(np.float64)
    own = own - own.mean(axis=1, keepdims=True)
    own = own / np.sqrt((own * own).mean(axis=1, keepdims=True) + EPS) * weight.astype(np.float64)
    given = (jnp.array(cache), jnp.array(own + bias.astype(np.float64), jnp.float32), jnp.array(slots))
    angles = jnp.array(cos), jnp.array(sin)
    want = np.asarray(sparse.write_indexer_cache(*given, *angles, rope_layout=spec.rope_layout))
    arrays = {"keys": keys, "norm_weight": weight, "norm_bias": bias, "cos": cos, "sin": sin, "slot_mapping": slots}
    kernel = KERNELS["few_token_index_key"]
    assert kernel.reasons(spec) == []
    for order in ORDERS:
        arrays |= {"k_cache": cache.copy()}
        arrays["new_k_cache"] = arrays["k_cache"]
        assert launch(kernel, kernel.config_for(spec), arrays, order).hazards == []
        got = arrays["k_cache"].reshape(3, 8 * 132)
        values, right = (part.reshape(3, -1)[:, : 8 * 128] for part in (got, want))
        # A value that lies half-way between two of e4m3 may be rounded to either.
        assert (values != right).mean() < 2e-3
        np.testing.assert_array_equal(got[:, 8 * 128 :], want.reshape(3, -1)[:, 8 * 128 :])


@pytest.mark.parametrize(
    "spec", [RouterSpec(5, 256, 9, EPS), slow(RouterSpec(1, 384, 7, EPS)), slow(RouterSpec(16, 1280, 64))]
)
def test_a_router(spec: RouterSpec) -> None:
    """Logits have the error of float32."""
    draw = Draw()
    x, norm = draw.bf16(spec.tokens, spec.terms + 8), draw.bf16(spec.terms)
    router = draw.rng.normal(size=(spec.experts, spec.terms)).astype(np.float32)
    arrays = {"x": x, "router": router, "norm_weight": norm}
    arrays["logits"] = np.empty((spec.tokens, spec.experts), np.float32)
    run("few_token_router", spec, arrays, "logits")
    own = x[:, : spec.terms]
    want = (normed(own, norm) if spec.eps else own.astype(np.float64)) @ router.astype(np.float64).T
    close(arrays["logits"], want, 1e-6)


@pytest.mark.parametrize(("page_size", "rank"), [(64, 256), slow(2, 1536)])
def test_a_window_row(page_size: int, rank: int) -> None:
    """As in XLA, but for values half-way between two; one token has no slot, one a slot past the cache; one has tiny
    values."""
    draw, tokens = Draw(), 11
    joint = draw.bf16(tokens, rank + 512 + 64)
    joint[:, rank + 512 :] = np.nan
    joint[3, rank : rank + 512] = (joint[3, rank : rank + 512].astype(np.float32) * 1e-7).astype(BF16)
    norms = [draw.rng.normal(size=columns).astype(np.float32) for columns in (rank, 512)]
    cos, sin = (draw.rng.normal(size=(tokens, 32)).astype(np.float32) for _ in range(2))
    slots = np.arange(tokens, dtype=np.int32) - 3
    slots[8], slots[9] = -1, 3 * page_size
    cache = draw.rng.integers(0, 255, size=(3, V4_PACKED.page_bytes(page_size)), dtype=np.uint8)
    inside = (slots >= 0) & (slots < 3 * page_size)
    rows = normed(joint[:, rank : rank + 512], norms[1])
    even, odd = rows[:, 448::2].copy(), rows[:, 449::2].copy()
    rows[:, 448::2], rows[:, 449::2] = even * cos - odd * sin, odd * cos + even * sin
    given = jnp.array(cache), jnp.array(rows.astype(np.float32)), jnp.where(inside, slots, -1)
    want = np.asarray(layouts.write_v4_cache(*given, page_size=page_size))
    kernel, config = KERNELS["few_token_window"], WindowConfig(page_size, rank, EPS, EPS)
    for order in ORDERS:
        arrays = {"joint": joint, "low_norm_weight": norms[0], "norm_weight": norms[1], "cos": cos, "sin": sin}
        arrays |= {"slot_mapping": slots, "kv_cache": cache.copy(), "low": np.empty((tokens, rank), BF16)}
        arrays["new_kv_cache"] = arrays["kv_cache"]
        assert launch(kernel, config, arrays, order).hazards == []
        found, written = arrays["kv_cache"], want != cache
        np.testing.assert_array_equal(found[~written] != cache[~written], found[~written] != want[~written])
        assert (found != want).sum() <= 0.002 * written.sum()
        close(arrays["low"], normed(joint[:, :rank], norms[0]), 3e-3)


@pytest.mark.parametrize(
    ("heads", "keys", "rows"), [(16, 300, 24), (16, 20, 16), slow(16, 0, 8), slow(128, 200, 8), slow(40, 500, 8)]
)
def test_attention_of_a_token(heads: int, keys: int, rows: int) -> None:
    """mla_decode's first kernel, and the merging of its pieces with W_UV; 20 keys are one piece, of 0 there is none."""
    draw, config = Draw(), DecodeConfig("bfloat16", heads, 1, cluster=2 if heads > 64 else 1, merged=False)
    q, cache = draw.bf16(heads, 576), draw.bf16(9, 64, 576)
    tables, lens = draw.rng.permutation(9)[None].astype(np.int32), np.array([keys], np.int32)
    arrays = {"q": q, "kv_cache": cache, "block_tables": tables, "seq_lens": lens, "cu_seqlens_q": lens}
    arrays |= {"scales": np.array([576**-0.5, 1], np.float32), "lse": np.empty(heads, np.float32)}
    latents = arrays["out"] = np.full((heads, 512), np.nan, BF16)
    for name, (sizes, dtype) in workspace_shapes(config.shape, 12, 1, 9).items():
        arrays[name] = np.full(sizes, 7 if dtype == "int32" else np.nan, dtype)
    assert launch(KERNELS["mla_decode"], config, arrays, ORDERS[0]).hazards == []
    w_uv, shape = draw.bf16(heads, rows, 512), config.shape
    spec = ValuesSpec(1, heads, 512, rows, shape.tile_rows, shape.partial_dtype, shape.partial_is_lane_order)
    arrays |= {"latents": latents, "w_uv": w_uv, "out": np.empty((1, heads * rows), BF16)}
    run("few_token_values", spec, arrays, "out")
    own = wide(cache[tables[0]].reshape(-1, 576)[:keys])
    scores = wide(q) @ own.T * 576**-0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-1e30))
    weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1e-30)
    want = np.einsum("hk,kl,hvl->hv", weights, own[:, :512], wide(w_uv))
    close(arrays["out"], want.reshape(1, -1), 1e-2)


@pytest.mark.parametrize(
    "spec",
    [
        InputsSpec(1, 2304, 1064, 24, (40, 16)),
        InputsSpec(1, 256, 40, 0, (32,)),
        slow(InputsSpec(1, 4096, 32, 16, (8,))),
    ],
)
def test_inputs(spec: InputsSpec) -> None:
    """All products; a CTA has more tiles than one, of several weights."""
    draw, tokens = Draw(), spec.tokens
    x, weights = draw.bf16(tokens, spec.terms), [draw.bf16(rows, spec.terms) for rows in (spec.rows, *spec.pooled)]
    arrays = {"x": x, "weight": weights[0], "out": np.empty((tokens, spec.rows - spec.tail), BF16)}
    arrays["tail"] = np.full((tokens, spec.tail), np.nan, BF16)
    for i, rows in enumerate(spec.pooled):
        arrays |= {f"pooled_weight_{i}": weights[1 + i], f"pooled_{i}": np.full((tokens, rows), np.nan, np.float32)}
    run("few_token_inputs", spec, arrays, "out")
    first, *others = (wide(x) @ wide(weight).T for weight in weights)
    close(arrays["out"], first[:, : spec.rows - spec.tail], 3e-3)
    close(arrays["tail"], first[:, spec.rows - spec.tail :], 3e-3)
    for i, want in enumerate(others):
        close(arrays[f"pooled_{i}"], want, 1e-6)


@pytest.mark.parametrize(
    "spec",
    [OutputsSpec(1, 2, 1024, 32), slow(OutputsSpec(1, 10, 2560, 208)), slow(OutputsSpec(1, 3, 256, 48, 128, 128))],
)
def test_outputs(spec: OutputsSpec) -> None:
    """The last columns of every head are rotated back first."""
    draw, tokens, rope = Draw(), spec.tokens, spec.rope_dim
    heads, weight = draw.bf16(tokens, spec.groups * spec.terms), draw.bf16(spec.groups, spec.rows, spec.terms)
    cos, sin = (draw.rng.normal(size=(tokens, rope // 2)).astype(np.float32) for _ in range(2))
    arrays = {"heads": heads, "weight": weight, "cos": cos, "sin": sin}
    arrays["out"] = np.empty((tokens, spec.groups * spec.rows), BF16)
    run("few_token_outputs", spec, arrays, "out")
    turned = heads.astype(np.float64).reshape(tokens, -1, spec.head_dim)
    even, odd = turned[..., -rope::2].copy(), turned[..., 1 - rope :: 2].copy()
    turned[..., -rope::2] = even * cos[:, None] + odd * sin[:, None]
    turned[..., 1 - rope :: 2] = odd * cos[:, None] - even * sin[:, None]
    grouped = turned.astype(BF16).astype(np.float64).reshape(tokens, spec.groups, spec.terms)
    want = np.einsum("tgk,gnk->tgn", grouped, wide(weight))
    close(arrays["out"], want.reshape(tokens, -1), 3e-3)


def mixed(out: np.ndarray, write: np.ndarray, mix: np.ndarray, streams: np.ndarray) -> np.ndarray:
    """The streams [T, N, C] with a block's result written, as bf16."""

    def near(x: np.ndarray) -> np.ndarray:
        return x.astype(BF16).astype(np.float64)

    own = near(near(write)[..., None] * out.astype(np.float64)[:, None])
    return (own + near(np.einsum("tmn,tmc->tnc", near(mix), streams.astype(np.float64)))).astype(BF16)


@pytest.mark.parametrize(
    ("tokens", "count", "columns", "written"), [(1, 4, 2080, True), (3, 4, 256, False), slow(16, 3, 96, True)]
)
def test_streams(tokens: int, count: int, columns: int, written: bool) -> None:
    """The two launches of a mix, beside float64; a token's NaN stays with it."""
    draw, rows = Draw(), (2 + count) * count
    streams, out = draw.bf16(tokens, count, columns), draw.bf16(tokens, columns)
    write = draw.rng.uniform(0, 2, size=(tokens, count)).astype(np.float32)
    mix = draw.rng.uniform(size=(tokens, count, count)).astype(np.float32) / count
    fn = (draw.rng.normal(size=(rows, count * columns)) / np.sqrt(count * columns)).astype(np.float32)
    if tokens > 1:
        streams[1, 0, 5] = np.nan
    parts = columns // 32
    arrays = {"streams": streams.reshape(tokens, -1), "fn": fn, "out": out, "write": write}
    arrays |= {"mix": mix.reshape(tokens, -1), "new_streams": np.empty((tokens, count * columns), BF16)}
    arrays["sums"] = np.empty((parts, tokens, SUMS), np.float32)
    run("few_token_write_streams", WriteStreamsSpec(tokens, count, columns, written), arrays, "sums")
    want = mixed(out, write, mix, streams) if written else streams
    new, real = want.astype(np.float64).reshape(tokens, -1), np.arange(tokens) != 1
    if written:
        close(arrays["new_streams"][real], new[real], 1e-3)
        assert (arrays["new_streams"].view(np.uint16) == want.reshape(tokens, -1).view(np.uint16))[real].mean() > 0.99
        new = arrays["new_streams"].astype(np.float64)
    sums = arrays["sums"].astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(sums[real, :rows], new[real] @ fn.astype(np.float64).T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sums[real, rows], (new[real] ** 2).sum(axis=1), rtol=1e-5)

    spec, base, scale = (
        ReadStreamsSpec(tokens, count, columns, norm_eps=1e-5),
        draw.rng.normal(size=rows),
        np.array([1.5, 0.7, 2.0]),
    )
    weight = draw.rng.normal(size=columns).astype(np.float32)
    streams = new.astype(BF16)
    arrays |= {"streams": streams, "base": base.astype(np.float32), "scale": scale.astype(np.float32)}
    arrays |= {"norm_weight": weight, "read": np.empty((tokens, columns), BF16)}
    arrays |= {"write": np.empty((tokens, count), np.float32), "mix": np.empty((tokens, count**2), np.float32)}
    arrays["sums"] = np.where(np.arange(SUMS) > rows, np.float32(np.nan), arrays["sums"])
    run("few_token_read_streams", spec, arrays, "read")
    logits = sums[:, :rows] / np.sqrt(sums[:, rows : rows + 1] / (count * columns) + 1e-5)
    read, write, mix = np.split(logits, [count, 2 * count], axis=1)
    read_base, write_base, mix_base = np.split(base, [count, 2 * count])
    shares = 1 / (1 + np.exp(-(read * scale[0] + read_base))) + spec.eps
    x = np.einsum("tn,tnc->tc", shares, new.reshape(tokens, count, columns)).astype(BF16).astype(np.float64)
    x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + spec.input_eps) * weight.astype(np.float64)
    close(arrays["read"][real], x[real], 4e-3)
    write = 2 / (1 + np.exp(-(write * scale[1] + write_base)))
    np.testing.assert_allclose(arrays["write"][real], write[real], rtol=1e-4)
    mix = np.exp((mix * scale[2] + mix_base).reshape(tokens, count, count))
    mix = mix / mix.sum(axis=2, keepdims=True) + spec.eps
    for turn in range(2 * spec.rounds - 1):
        mix = mix / (mix.sum(axis=1 + turn % 2, keepdims=True) + spec.eps)
    np.testing.assert_allclose(arrays["mix"][real], mix.reshape(tokens, -1)[real], rtol=1e-4, atol=1e-6)
    if tokens > 1:
        assert all(np.isnan(arrays[name][1].astype(np.float64)).all() for name in ("read", "write", "mix"))


def test_streams_behind_the_last_layer() -> None:
    """The two launches that read streams without a mix, beside float64."""
    draw, count, columns = Draw(), 4, 288
    streams, out = draw.bf16(1, count, columns), draw.bf16(1, columns)
    write = draw.rng.uniform(0, 2, size=(1, count)).astype(np.float32)
    mix = draw.rng.uniform(size=(1, count, count)).astype(np.float32) / count
    fn = (draw.rng.normal(size=(count, count * columns)) / np.sqrt(count * columns)).astype(np.float32)
    arrays = {"streams": streams.reshape(1, -1), "fn": fn, "out": out, "write": write, "mix": mix.reshape(1, -1)}
    arrays |= {"new_streams": np.empty((1, count * columns), BF16)}
    arrays["sums"] = np.empty((columns // 32, 1, SUMS), np.float32)
    run("few_token_write_streams", WriteStreamsSpec(1, count, columns, mixes=False), arrays, "sums")
    new = mixed(out, write, mix, streams).astype(np.float64)
    base, scale = (draw.rng.normal(size=size).astype(np.float32) for size in (count, 1))
    weight, spec = draw.rng.normal(size=columns).astype(np.float32), ReadStreamsSpec(1, count, columns, mixes=False)
    arrays |= {"streams": arrays["new_streams"], "base": base, "scale": scale, "norm_weight": weight}
    arrays |= {"read": np.empty((1, columns), BF16)}
    arrays["sums"] = np.where(np.arange(SUMS) > count, np.float32(np.nan), arrays["sums"])
    run("few_token_read_streams", spec, arrays, "read")
    logits = fn.astype(np.float64) @ new.reshape(-1) / np.sqrt((new**2).mean() + spec.norm_eps) * scale + base
    x = ((1 / (1 + np.exp(-logits)) + spec.eps) @ new[0]).astype(BF16).astype(np.float64)
    close(arrays["read"][0], x / np.sqrt((x * x).mean() + spec.input_eps) * weight, 6e-3)
