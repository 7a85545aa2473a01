"""On CPU tensors: the definitions in torch operations, against the numpy oracle and against jax's definitions."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tsmla_bridge
import tsmla_jax
from tests.bridge.inputs import assert_close, inputs, tensor
from tests.oracles import attention as oracle

# float32 sums of some dozens of products of size one; bf16's own step, 2^-8, for results in bf16.
F32, BF16 = 2e-5, 2**-7


def test_a_hidden_key_reaches_nobody() -> None:
    case = inputs([40], s=3, q_dtype="float32", kv_dtype="float32")
    last = (case.block_tables[0, 39 // 16], 39 % 16, 3)
    case.kv_cache[last] = case.case.kv_cache[last] = torch.nan
    out, lse = tsmla_bridge.mla_decode(*case.arrays, **case.options, return_lse=True)
    want, want_lse = case.want()
    assert not np.isnan(want[0, :2]).any() and torch.isnan(out[0, 2]).all()
    np.testing.assert_allclose(out[0, :2].numpy(), want[0, :2], atol=1e-5)
    np.testing.assert_allclose(lse[0, :2].numpy(), want_lse[0, :2], atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        {"seq_lens": [5, 33, 0, 16], "s": 1},
        {"seq_lens": [5, 2, 0, 40], "s": 4},
        {"seq_lens": [9, 3, 20], "q_lens": [2, 0, 3], "s": 3, "padding_rows": 2},
        {"seq_lens": [7, 1], "latent_dim": 48, "rope_dim": 0},
    ],
)
def test_decode(shape: dict[str, Any], causal: bool) -> None:
    case = inputs(**shape)
    got = tsmla_bridge.mla_decode(*case.arrays, **case.options, causal=causal, return_lse=True)
    for a, b in zip(got, case.want(causal=causal), strict=True):
        assert_close(a, b, F32)


def test_decode_in_fp8_with_scales() -> None:
    case = inputs([20, 7], q_dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn")
    scales = {"q_scale": 0.5, "kv_scale": torch.tensor(0.25)}
    out, lse = tsmla_bridge.mla_decode(*case.arrays, **case.options, **scales, return_lse=True)
    want_out, want_lse = case.want(q_scale=0.5, kv_scale=0.25)
    assert out.dtype == torch.bfloat16
    assert_close(out, want_out, BF16)
    assert_close(lse, want_lse, F32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_decode_dtypes_are_those_of_jax(dtype: str) -> None:
    if dtype == "float64" and not jax.config.jax_enable_x64:
        dtype = "float32"
    case = inputs([20, 7], q_dtype=dtype, kv_dtype="float8_e4m3fn")
    got = tsmla_bridge.mla_decode(*case.arrays, **case.options, kv_scale=2.0, return_lse=True)
    arrays = (case.case.q, case.case.kv_cache, case.case.block_tables, case.case.seq_lens)
    options = {**case.case.options(), "kv_scale": 2.0, "return_lse": True, "implementation": "reference"}
    want = jax.jit(partial(tsmla_jax.mla_decode, **options))(*arrays)
    for a, b in zip(got, want, strict=True):
        assert str(a.dtype) == f"torch.{b.dtype}" and a.shape == b.shape
        assert_close(a, np.asarray(b, np.float64), BF16)


def test_the_reference_on_a_cpu_can_be_differentiated() -> None:
    case = inputs([20, 7], s=2)
    kv_cache = torch.nan_to_num(case.kv_cache)
    q = case.q.clone().requires_grad_()
    scale = torch.tensor(0.2, requires_grad=True)
    out = tsmla_bridge.mla_decode(
        q, kv_cache, case.block_tables, case.seq_lens, softmax_scale=scale, latent_dim=case.case.latent_dim
    )
    out.square().sum().backward()

    def loss(q: jax.Array, scale: jax.Array) -> jax.Array:
        arrays = (jnp.asarray(kv_cache.numpy()), case.case.block_tables, case.case.seq_lens)
        out = tsmla_jax.mla_decode(
            q, *arrays, softmax_scale=scale, latent_dim=case.case.latent_dim, implementation="reference"
        )
        return (out**2).sum()

    want = jax.jit(jax.grad(loss, argnums=(0, 1)))(case.case.q, np.float32(0.2))
    assert_close(q.grad, np.asarray(want[0]), 1e-4)
    assert_close(scale.grad, np.asarray(want[1]), 1e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_prefill(causal: bool) -> None:
    rng = np.random.default_rng(1)
    cu_q, cu_kv = np.asarray([0, 3, 3, 8], np.int32), np.asarray([0, 5, 9, 11], np.int32)
    q, k = (rng.standard_normal((n, 2, 24), np.float32) for n in (10, 13))
    v = rng.standard_normal((13, 2, 16), np.float32)
    q[8:], k[11:], v[11:] = np.nan, np.nan, np.nan
    given = {"cu_seqlens_q": tensor(cu_q), "cu_seqlens_kv": tensor(cu_kv), "max_q_len": 5, "max_kv_len": 5}
    options = {"softmax_scale": 0.2, "v_scale": 2.0, "causal": causal}
    got = tsmla_bridge.mla_prefill(tensor(q), tensor(k), tensor(v), **given, **options, return_lse=True)
    want_out, want_lse = oracle.prefill(q, k, v, cu_q, cu_kv, scale=0.2, causal=causal)
    assert_close(got[0], 2 * want_out, F32)
    assert_close(got[1], want_lse, F32)


def test_bounds_leave_tokens_out_as_in_jax() -> None:
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((9, 2, 8), np.float32) for _ in range(3))
    options = {"max_q_len": 2, "max_kv_len": 3, "softmax_scale": 0.3, "return_lse": True}
    cu = np.asarray([0, 4, 9], np.int32)
    got = tsmla_bridge.mla_prefill(
        tensor(q), tensor(k), tensor(v), cu_seqlens_q=tensor(cu), cu_seqlens_kv=tensor(cu), **options
    )
    definition = jax.jit(partial(tsmla_jax.mla_prefill, implementation="reference", **options))
    want = definition(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    for a, b in zip(got, want, strict=True):
        assert_close(a, np.asarray(b), F32)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_write_has_the_bits_of_jax(dtype: str, scale: float | None) -> None:
    rng = np.random.default_rng(3)
    latent, k_rope = (jnp.asarray(rng.standard_normal((6, n)) * 300, jnp.bfloat16) for n in (24, 8))
    cache = jnp.asarray(rng.standard_normal((5, 16, 32)), dtype)
    slots = np.asarray([3, -1, 79, 16, 80, 15], np.int32)
    ours = tensor(cache)
    given = ours[:, None] if dtype == "float16" else ours
    got = tsmla_bridge.write_kv_cache(given, tensor(latent), tensor(k_rope), tensor(slots), kv_scale=scale)
    assert got is given
    want = tsmla_jax.write_kv_cache(cache, latent, k_rope, slots, kv_scale=scale)
    np.testing.assert_array_equal(ours.float().numpy(), np.asarray(want, np.float32))
    again = tensor(cache)
    tsmla_bridge.write_kv_cache(again, tensor(latent), tensor(k_rope), tensor(slots).long(), kv_scale=scale)
    assert torch.equal(again.float(), ours.float())


def test_write_of_nothing_legal_leaves_the_cache_as_it_is() -> None:
    cache = torch.arange(2 * 16 * 8.0).reshape(2, 16, 8)
    before = cache.clone()
    for slots in (
        torch.tensor([-1, 32, -(2**31), 2**31 - 1], dtype=torch.int32),
        torch.tensor([-1, 32, 2**32, -(2**63)]),
    ):
        tsmla_bridge.write_kv_cache(cache, torch.zeros(4, 8), None, slots)
        assert torch.equal(cache, before)


def test_write_into_a_layer_of_a_pool() -> None:
    pool = torch.zeros(5, 3, 16, 8)
    tsmla_bridge.write_kv_cache(pool[:, 1], torch.ones(2, 8), None, torch.tensor([17, 79], dtype=torch.int32))
    assert pool.sum() == 16 and pool[1, 1, 1].sum() == 8 and pool[4, 1, 15].sum() == 8


def test_fp8_rounds_and_saturates_as_in_jax() -> None:
    exact = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    exact = np.sort(exact[np.isfinite(exact)])
    middle = (exact[1:] + exact[:-1]) / 2
    values = np.concatenate([exact, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)])
    values = np.append(values, np.asarray([448.1, 464, 465, 480, 1e9, np.inf, -449, -np.inf], np.float32))
    values = np.pad(values, (0, -len(values) % 8)).reshape(-1, 8).astype(np.float32)
    cache = jnp.zeros((-(-len(values) // 16), 16, 8), jnp.float8_e4m3fn)
    slots = np.arange(len(values), dtype=np.int32)
    got = tsmla_bridge.write_kv_cache(tensor(cache), tensor(values), None, tensor(slots))
    want = np.asarray(tsmla_jax.write_kv_cache(cache, values, None, slots, implementation="xla"))
    np.testing.assert_array_equal(got.view(torch.uint8).numpy(), want.view(np.uint8))


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", None), ("float32", 0.3), ("float8_e4m3fn", 0.7)])
def test_gather_has_the_bits_of_jax(dtype: str, scale: float | None) -> None:
    rng = np.random.default_rng(4)
    cache = jnp.asarray(rng.standard_normal((7, 16, 8)), dtype)
    tables = np.asarray([[3, 1, 2**31 - 1], [5, 0, 2], [-7, 6, 4]], np.int32)
    starts, lens = np.asarray([2, 0, 17], np.int32), np.asarray([20, 0, 9], np.int32)
    given = (tensor(tables), tensor(starts), tensor(lens))
    got = tsmla_bridge.gather_kv_cache(tensor(cache), *given, total_len=33, kv_scale=scale)
    want = tsmla_jax.gather_kv_cache(cache, tables, starts, lens, total_len=33, kv_scale=scale)
    assert str(got.dtype) == f"torch.{want.dtype}"
    np.testing.assert_array_equal(got.float().numpy(), np.asarray(want, np.float32))
    half = tsmla_bridge.gather_kv_cache(tensor(cache), *given, total_len=33, out_dtype=torch.float16)
    assert half.dtype == torch.float16


def test_merge_is_that_of_jax_and_has_derivatives() -> None:
    rng = np.random.default_rng(5)
    outs = rng.standard_normal((3, 5, 2, 8), np.float32)
    lses = rng.standard_normal((3, 5, 2), np.float32)
    lses[0, 0], lses[:, 1] = -np.inf, -np.inf
    outs[0, 0], outs[:, 1] = np.nan, np.nan
    ours_outs, ours_lses = tensor(outs).requires_grad_(), tensor(lses).requires_grad_()
    got = tsmla_bridge.merge_attention_states(ours_outs, list(ours_lses))
    want = jax.jit(tsmla_jax.merge_attention_states)(outs, lses)
    for a, b in zip(got, want, strict=True):
        assert_close(a.detach(), np.asarray(b), F32)
    (got[0].square().sum() + got[1][[0, 2, 3, 4]].sum()).backward()

    def loss(outs: jax.Array, lses: jax.Array) -> jax.Array:
        out, lse = tsmla_jax.merge_attention_states(outs, lses)
        return (out**2).sum() + lse[jnp.asarray([0, 2, 3, 4])].sum()

    wanted = jax.jit(jax.grad(loss, argnums=(0, 1)))(outs, lses)
    assert_close(ours_outs.grad, np.asarray(wanted[0]), F32)
    assert_close(ours_lses.grad, np.asarray(wanted[1]), F32)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_lse_of_plus_infinity_is_a_part_without_keys(count: int) -> None:
    """FlashAttention and FlashMLA write it. Results and gradients are those of -inf, bit by bit."""
    generator = torch.Generator().manual_seed(count)
    outs, lses = torch.randn(count, 9, 2, 4, generator=generator), torch.randn(count, 9, 2, generator=generator)
    for part in range(count):
        lses[part, part :: count + 1], outs[part, part :: count + 1] = torch.inf, torch.nan
    lses[:, 8], outs[:, 8] = torch.inf, torch.nan
    lses[-1, 7] = -torch.inf
    results = []
    for each in (lses, lses.masked_fill(lses == torch.inf, -torch.inf)):
        operands = outs.clone().requires_grad_(), each.clone().requires_grad_()
        out, lse = tsmla_bridge.merge_attention_states(*operands)
        (out.square().sum() + lse[lse.isfinite()].sum()).backward()
        results.append((out.detach(), lse.detach(), *(x.grad for x in operands)))
    for got, want in zip(*results, strict=True):
        assert not got.isnan().any() and torch.equal(got, want)
    assert (results[0][1][8] == -torch.inf).all() and (results[0][0][8] == 0).all()


def test_a_merge_of_float64_lses_is_one_in_float64() -> None:
    outs = torch.tensor([[[1.0, -1.0]], [[2.0, 5.0]]])
    lses = torch.tensor([[3e4], [3e4 + 1e-3]], dtype=torch.float64, requires_grad=True)
    out, lse = tsmla_bridge.merge_attention_states(outs, lses)
    weights = torch.tensor([1e-3, -1e-3], dtype=torch.float64).neg().sigmoid()
    torch.testing.assert_close(out[0], (weights @ outs[:, 0].double()).float())
    torch.testing.assert_close(lse[0], lses.detach().logsumexp(0)[0], rtol=1e-15, atol=0)
    lse.sum().backward()
    torch.testing.assert_close(lses.grad[:, 0], weights, rtol=1e-11, atol=0)


def test_results_go_where_they_are_asked_to() -> None:
    case = inputs([20, 7], s=2)
    want = tsmla_bridge.mla_decode(*case.arrays, **case.options, return_lse=True)
    out, lse = torch.empty_like(want[0]), torch.empty_like(want[1])
    got = tsmla_bridge.mla_decode(*case.arrays, **case.options, return_lse=True, out=out, lse=lse)
    assert got[0] is out and got[1] is lse
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    with pytest.raises(ValueError, match=r"lse: got a place for lse without return_lse=True"):
        tsmla_bridge.mla_decode(*case.arrays, **case.options, lse=lse)
    with pytest.raises(ValueError, match=r"out: got float16\[2, 2, 2, 32\]; legal: float32\[2, 2, 2, 32\]"):
        tsmla_bridge.mla_decode(*case.arrays, **case.options, out=out.half())


@pytest.mark.parametrize(("batch", "q_len", "pages"), [(0, 1, 3), (2, 0, 3), (2, 1, 0)])
def test_nobody_and_nothing(batch: int, q_len: int, pages: int) -> None:
    tables, lens = torch.zeros(batch, 4, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    q, cache = torch.ones(batch, q_len, 3, 48), torch.zeros(pages, 16, 48)
    out, lse = tsmla_bridge.mla_decode(q, cache, tables, lens, softmax_scale=1.0, latent_dim=32, return_lse=True)
    assert out.shape == (batch, q_len, 3, 32) and not out.any() and torch.all(lse == -torch.inf)
