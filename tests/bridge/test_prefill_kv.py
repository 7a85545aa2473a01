"""mla_prefill_kv on torch tensors: results and gradients, what the kernels are given, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import tsmla_bridge
from tests.emulator.launcher import Gpu
from tests.oracles.gradients import Packed, Tensors
from tsmla_bridge.ops import mla_prefill_kv
from tsmla_bridge.runtime import loaded_kernels
from tsmla_kernels.sm90.prefill.backward.config import BackwardConfig
from tsmla_kernels.sm90.prefill.config import PrefillConfig

ROPE = 8
RAGGED = Packed([3, 0, 1, 5], [3, 2, 4, 9])
KERNEL = Packed([3, 0, 70], [3, 2, 90], dims=(192, 128), scale=0.1)


def options_of(packed: Packed, **changed: Any) -> dict[str, Any]:
    options = packed.options() | changed
    del options["v_scale"]
    return options


def gradients(packed: Packed, numbers: Tensors, **changed: Any) -> Tensors:
    """dq, dkv and dk_rope of the sum of the results times their cotangents."""
    *given, dout, dlse = numbers
    leaves = [x.detach().clone().requires_grad_() for x in given]
    results = tsmla_bridge.mla_prefill_kv(*leaves, **options_of(packed, **changed), return_lse=True)
    return torch.autograd.grad(results, leaves, (dout, dlse))


@pytest.mark.parametrize("rope_dim", [ROPE, 0])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_values(implementation: str | None, causal: bool, rope_dim: int) -> None:
    packed = dataclasses.replace(RAGGED, causal=causal)
    numbers = packed.kv_numbers(torch.float64, rope_dim=rope_dim)
    q, k, v = packed.expanded(*numbers[:3])
    options = options_of(packed, implementation=implementation)
    got = tsmla_bridge.mla_prefill_kv(*numbers[:3], **options, return_lse=True)
    for a, b in zip(got, packed.results(q, k, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch.equal(tsmla_bridge.mla_prefill_kv(*numbers[:3], **options), got[0])
    found = gradients(packed, numbers, implementation=implementation)
    for a, b in zip(found, packed.want_kv(*numbers), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    torch._dynamo.reset()
    *given, dout, dlse = (x.nan_to_num() for x in RAGGED.kv_numbers(torch.float32, rope_dim=ROPE))
    options = options_of(RAGGED)

    def loss(q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
        out, lse = tsmla_bridge.mla_prefill_kv(q * 2, kv, k_rope, **options, return_lse=True)
        return (out * dout).sum() + (lse.nan_to_num(neginf=0) * dlse).sum()

    found = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)):
        leaves = [x.clone().requires_grad_() for x in given]
        function(*leaves).backward()
        found.append([x.grad for x in leaves])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_compiled_into_the_callers_memory() -> None:
    torch._dynamo.reset()
    given, options = RAGGED.kv_numbers(torch.float32, rope_dim=ROPE)[:3], options_of(RAGGED)
    out, lse = torch.empty(len(given[0]), 2, 16), torch.empty(len(given[0]), 2)

    def call(*given: torch.Tensor) -> Any:
        return tsmla_bridge.mla_prefill_kv(*given, **options, return_lse=True, out=out, lse=lse)

    torch.compile(call, fullgraph=True, backend="aot_eager")(*given)
    for got, want in zip((out, lse), tsmla_bridge.mla_prefill_kv(*given, **options, return_lse=True), strict=True):
        assert torch.equal(got, want)


def test_opcheck() -> None:
    q, kv, k_rope, dout, dlse = (x.nan_to_num() for x in RAGGED.kv_numbers(torch.float32, rope_dim=ROPE))
    offsets = (RAGGED.options()[name] for name in ("cu_seqlens_q", "cu_seqlens_kv"))
    rest = (*offsets, None, None, None, None, 0.3, 1.0, 5, 9, True, False, False, None)  # no selection, sinks, scales
    leaves = (x.clone().requires_grad_() for x in (q, kv, k_rope))
    torch.library.opcheck(mla_prefill_kv.OPERATORS.forward, (*leaves, *rest))
    out, lse, _ = mla_prefill_kv.OPERATORS.forward(q, kv, k_rope, *rest)
    torch.library.opcheck(mla_prefill_kv.OPERATORS.backward, (dout, dlse, out, lse, q, kv, k_rope, *rest))


# ---- what the kernels are given


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_kernels_read_in_place(gpu: Gpu, deterministic: bool) -> None:
    q, kv, k_rope, dout, dlse = KERNEL.kv_numbers(torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, kv, k_rope)]
    options = options_of(KERNEL, deterministic=deterministic)
    results = tsmla_bridge.mla_prefill_kv(*leaves, **options, return_lse=True)
    found = torch.autograd.grad(results, leaves, (dout, dlse))
    (_, forward), (_, backward) = gpu.launches
    given = {"q": q, "kv": kv, "k_rope": k_rope, **dict(zip(("out", "lse"), results, strict=True))}
    for name, tensor in given.items():
        assert forward[name].data_ptr() == backward[name].data_ptr() == tensor.data_ptr(), name
    for name, tensor in zip(("dq", "dkv", "dk_rope"), found, strict=True):
        assert backward[name].data_ptr() == tensor.data_ptr() and tensor.shape == given[name[1:]].shape
    partials = 16 if deterministic else 1  # their number does not grow with the heads
    assert backward["rope_sum"].shape == (partials, len(kv), 64)
    config = {"dtype": "bfloat16", "rope_dim": 64}
    assert ("mla_prefill", PrefillConfig(**config), -1) in loaded_kernels._loaded
    assert (
        "mla_prefill_backward", BackwardConfig(**config, deterministic=deterministic), -1
    ) in loaded_kernels._loaded  # fmt: skip
    for got, want in zip(found, KERNEL.want_kv(q, kv, k_rope, dout, dlse), strict=True):
        assert (got.double() - want).norm() < 2**-7 * want.norm()


@pytest.mark.parametrize(("dtype", "rope_dim"), [(torch.float8_e4m3fn, 64), (torch.bfloat16, 32)])
def test_what_is_not_read_in_place_goes_to_mla_prefill(gpu: Gpu, dtype: torch.dtype, rope_dim: int) -> None:
    q, kv, k_rope, *_ = KERNEL.kv_numbers(torch.float32, rope_dim=rope_dim)
    given = [x.nan_to_num().to(dtype) for x in (q, kv, k_rope)]
    tsmla_bridge.mla_prefill_kv(*given, **options_of(KERNEL))
    assert set(gpu.operands) >= {"k", "v"}


def test_rope_columns_of_another_width_have_the_kernels_gradient(gpu: Gpu) -> None:
    """The forward kernel reads 128 rope columns in place, the backward kernel does not."""
    numbers = KERNEL.kv_numbers(torch.bfloat16, rope_dim=128)
    found = gradients(KERNEL, numbers)
    assert [("kv" in operands, "dk" in operands) for _, operands in gpu.launches] == [(True, False), (False, True)]
    for got, want in zip(found, KERNEL.want_kv(*numbers), strict=True):
        assert (got.double() - want).norm() < 2**-7 * want.norm()


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 3), (3, 0)])
def test_without_queries_or_keys_nothing_is_launched(gpu: Gpu, q_len: int, kv_len: int) -> None:
    packed = dataclasses.replace(KERNEL, q_lens=[q_len], kv_lens=[kv_len], padding=0)
    numbers = packed.kv_numbers(torch.bfloat16)
    for got, like in zip(gradients(packed, numbers), numbers[:3], strict=True):
        assert got.shape == like.shape and not got.any()
    assert not gpu.launches


# ---- what is refused


def test_arguments_that_are_not_legal() -> None:
    q, kv, k_rope, *_ = RAGGED.kv_numbers(torch.float32, rope_dim=ROPE)
    options = options_of(RAGGED)
    for name, changed, message in (
        ("k_rope", k_rope[:-1], r"k_rope: got shape \[19, 8\]; its Tk must equal kv's, 20"),
        ("k_rope", k_rope[:, None], r"k_rope: got shape \[20, 1, 8\]; legal: \[Tk, R\]"),
        ("kv", kv[..., :16], r"kv: got shape \[20, 2, 16\]; its last axis must be wider than K - R = 16"),
        ("kv", kv.double(), "kv: got dtype float64; q, kv and k_rope must have one dtype, and q has float32"),
        ("q", q[0], r"q: got shape \[2, 24\]; legal: \[Tq, H, K\]"),
    ):
        with pytest.raises(ValueError, match=message):
            tsmla_bridge.mla_prefill_kv(**{"q": q, "kv": kv, "k_rope": k_rope, name: changed}, **options)


def test_derivatives_that_are_refused() -> None:
    q, kv, k_rope, *_ = (x.nan_to_num() for x in RAGGED.kv_numbers(torch.float64, rope_dim=ROPE))
    leaves = [x.requires_grad_() for x in (q, kv, k_rope)]
    options = options_of(RAGGED)
    (dq,) = torch.autograd.grad(tsmla_bridge.mla_prefill_kv(*leaves, **options).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="the gradient of mla_prefill_kv has no derivative in this"):
        dq.sum().backward()
    scale = torch.tensor(0.3, requires_grad=True)
    with pytest.raises(NotImplementedError, match="softmax_scale: got a tensor that requires a derivative"):
        tsmla_bridge.mla_prefill_kv(*leaves, **options | {"softmax_scale": scale})
    with pytest.raises(
        NotImplementedError, match="out: got a tensor; results that have a derivative go only to new memory"
    ):
        tsmla_bridge.mla_prefill_kv(*leaves, **options, out=q.new_empty(len(q), 2, 16))


def test_a_kernel_that_is_named_and_cannot_run() -> None:
    q, kv, k_rope, *_ = RAGGED.kv_numbers(torch.bfloat16, rope_dim=ROPE)
    with pytest.raises(NotImplementedError, match="mla_prefill_kv: implementation='cute' can't run this call: the ten"):
        tsmla_bridge.mla_prefill_kv(q, kv, k_rope, **options_of(RAGGED), implementation="cute")
