"""The gradient of mla_prefill on torch tensors: its values, what the kernel is given, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import tsmla_bridge
from tests.emulator.launcher import NUM_SMS, Gpu
from tests.oracles.gradients import Packed, Tensors
from tsmla_bridge import operators
from tsmla_bridge.ops import mla_prefill
from tsmla_bridge.runtime import loaded_kernels
from tsmla_kernels.sm90.prefill.backward.config import BackwardConfig

PACKED = {
    "ragged": Packed([3, 1, 5], [3, 4, 9]),
    "empty requests": Packed([0, 4, 3, 0], [2, 0, 6, 0]),
    "queries that see nothing": Packed([5, 2], [3, 2]),
    "not causal": Packed([3, 0, 5], [7, 2, 0], causal=False),
    "scaled values": Packed([4], [4], v_scale=0.5, padding=0),
}
KERNEL = Packed([3, 0, 70], [3, 2, 90], dims=(192, 128), scale=0.1)


def gradients(packed: Packed, numbers: Tensors, **changed: Any) -> Tensors:
    """dq, dk and dv of the sum of the results times their cotangents."""
    *given, dout, dlse = numbers
    q, k, v = (x.detach().clone().requires_grad_() for x in given)
    out, lse = tsmla_bridge.mla_prefill(q, k, v, **(packed.options(str(q.device)) | changed), return_lse=True)
    return torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("name", PACKED)
def test_values(name: str, implementation: str | None) -> None:
    numbers = PACKED[name].numbers(torch.float64)
    got = gradients(PACKED[name], numbers, implementation=implementation)
    for a, b in zip(got, PACKED[name].want(*numbers), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_in_other_dtypes(dtype: torch.dtype) -> None:
    packed = PACKED["ragged"]
    numbers = packed.numbers(dtype)
    step = 2e-5 if dtype == torch.float32 else 2**-6  # out is rounded before it meets its cotangent
    for got, want in zip(gradients(packed, numbers), packed.want(*numbers), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=step, atol=step)


def test_a_result_alone() -> None:
    """Cotangents that autograd makes: expanded ones, and zeros for lse."""
    packed = PACKED["ragged"]
    q, k, v, *_ = (x.nan_to_num().requires_grad_() for x in packed.numbers(torch.float64))
    tsmla_bridge.mla_prefill(q, k, v, **packed.options()).sum().backward()
    ones, zeros = torch.ones(v[:1].shape, dtype=v.dtype).expand(len(q), -1, -1), torch.zeros(q.shape[:2])
    for x, want in zip((q, k, v), packed.want(q, k, v, ones, zeros), strict=True):
        assert x.grad is not None
        torch.testing.assert_close(x.grad, want, rtol=1e-12, atol=1e-12)


def test_what_is_saved_is_linear_in_tokens() -> None:
    packed = PACKED["ragged"]
    saved: list[torch.Tensor] = []
    q, k, v, *_ = (x.requires_grad_() for x in packed.numbers(torch.float32))
    options = packed.options()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out, lse = tsmla_bridge.mla_prefill(q, k, v, **options, return_lse=True)
    places = [x.data_ptr() for x in (out, lse, q, k, v, options["cu_seqlens_q"], options["cu_seqlens_kv"])]
    assert [x.data_ptr() for x in saved] == places


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    torch._dynamo.reset()
    packed = PACKED["ragged"]
    *given, dout, dlse = (x.nan_to_num() for x in packed.numbers(torch.float32))
    options = packed.options()

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = tsmla_bridge.mla_prefill(q * 2, k, v, **options, return_lse=True)
        return (out * dout).sum() + (lse.nan_to_num(neginf=0) * dlse).sum()

    found = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)):
        leaves = [x.clone().requires_grad_() for x in given]
        function(*leaves).backward()
        found.append([x.grad for x in leaves])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_opcheck() -> None:
    packed = PACKED["ragged"]
    q, k, v, dout, dlse = (x.nan_to_num() for x in packed.numbers(torch.float32))
    cu_q, cu_kv = (packed.options()[name] for name in ("cu_seqlens_q", "cu_seqlens_kv"))
    rest = (cu_q, cu_kv, None, None, None, None, 0.3, 1.0, 5, 9, True, False, False, None)
    torch.library.opcheck(mla_prefill.OPERATORS.forward, (*(x.clone().requires_grad_() for x in (q, k, v)), *rest))
    out, lse, _ = mla_prefill.OPERATORS.forward(q, k, v, *rest)
    torch.library.opcheck(mla_prefill.OPERATORS.backward, (dout, dlse, out, lse, q, k, v, *rest))
    for name, wrong in (("dlse", (dout, dlse[1:], out, lse)), ("lse", (dout, dlse, out, lse.double()))):
        with pytest.raises(ValueError, match=f"{name}: got"):
            mla_prefill.OPERATORS.backward(*wrong, q, k, v, *rest)


# ---- what the kernel is given


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel(gpu: Gpu, causal: bool, deterministic: bool) -> None:
    packed = dataclasses.replace(KERNEL, causal=causal)
    q, k, v, dout, dlse = packed.numbers(torch.bfloat16)
    q.requires_grad_()
    options = packed.options() | {"k_scale": 2.0, "v_scale": torch.tensor(3.0), "deterministic": deterministic}
    out, lse = tsmla_bridge.mla_prefill(q, k, v, **options, return_lse=True)
    with gpu.on_stream(7):
        (dq,) = torch.autograd.grad((out, lse), q, (dout, dlse), retain_graph=True)
    _, (stream, operands) = gpu.launches
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": options["cu_seqlens_q"], "cu_seqlens_kv": options["cu_seqlens_kv"]}
    given |= {"out": out, "lse": lse, "dout": dout, "dlse": dlse, "dq": dq}
    for name, tensor in given.items():
        assert operands[name].data_ptr() == tensor.data_ptr() and operands[name].shape == tensor.shape, name
    assert stream == 7 and operands["scales"].shape == (2,)
    assert operands["dk"].shape == k.shape and operands["dv"].shape == v.shape
    assert operands["progress"].shape == (NUM_SMS,)  # the kernel's grid is as large as this
    tiles = len(q) // 64 + 3
    assert operands["dq_sum"].shape == (2, 2, len(q) // 8 + 3, 768) and operands["row_terms"].shape == (2, tiles, 2, 64)
    assert operands["turns"].shape == ((2, tiles, 2) if deterministic else (1, 1, 2))
    config = BackwardConfig(dtype="bfloat16", causal=causal, deterministic=deterministic)
    assert ("mla_prefill_backward", config, -1) in loaded_kernels._loaded
    scaled = dataclasses.replace(packed, scale=packed.scale * 2, v_scale=3.0)
    want = scaled.want(q, k, v, dout, dlse)[0]
    assert (dq.double() - want).norm() < 2**-7 * want.norm()
    gaps = torch.cat((dout, dout), -1)[..., :128], torch.stack((dlse, dlse), -1)[..., 0]  # these are made dense
    assert torch.equal(torch.autograd.grad((out, lse), q, gaps)[0], dq)


def test_torch_asks_for_deterministic_gradients(gpu: Gpu) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        gradients(KERNEL, KERNEL.numbers(torch.float16))
    finally:
        torch.use_deterministic_algorithms(False)
    assert ("mla_prefill_backward", BackwardConfig(dtype="float16", deterministic=True), -1) in loaded_kernels._loaded


def test_what_the_kernel_cannot_serve(gpu: Gpu) -> None:
    """fp8 has a kernel for the results alone."""
    numbers = KERNEL.numbers(torch.bfloat16)
    numbers = *(x.to(torch.float8_e4m3fn) for x in numbers[:3]), *numbers[3:]
    got = gradients(KERNEL, numbers)
    assert len(gpu.launches) == 1 and got[0].dtype == torch.float8_e4m3fn
    message = (
        r"the gradient of mla_prefill: implementation='cute' can't run this call: q\.dtype is float8_e4m3fn; the sm_90"
        " prefill gradient takes bfloat16 or float16"
    )
    with pytest.raises(NotImplementedError, match=message):
        gradients(KERNEL, numbers, implementation="cute")


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 3), (3, 0)])
def test_without_queries_or_keys_nothing_is_launched(gpu: Gpu, q_len: int, kv_len: int) -> None:
    packed = dataclasses.replace(KERNEL, q_lens=[q_len], kv_lens=[kv_len], padding=0)
    numbers = packed.numbers(torch.bfloat16)
    for got, like in zip(gradients(packed, numbers), numbers[:3], strict=True):
        assert got.shape == like.shape and not got.any()
    assert not gpu.launches


def test_without_a_derivative_the_operator_is_not_called(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "call_attention", lambda *_: pytest.fail("an operator is called"))
    q, k, v, *_ = KERNEL.numbers(torch.bfloat16)
    assert not tsmla_bridge.mla_prefill(q, k, v, **KERNEL.options()).requires_grad
    with torch.no_grad():
        tsmla_bridge.mla_prefill(q.requires_grad_(), k, v, **KERNEL.options(), out=v.new_empty(len(q), 2, 128))
    assert len(gpu.launches) == 2


# ---- what is refused


def test_a_second_derivative() -> None:
    packed = PACKED["ragged"]
    q, k, v, *_ = (x.nan_to_num().requires_grad_() for x in packed.numbers(torch.float64))
    for implementation in (None, "reference"):
        out = tsmla_bridge.mla_prefill(q, k, v, **packed.options(), implementation=implementation)
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        if implementation == "reference":
            dq.square().sum().backward()
        else:
            with pytest.raises(NotImplementedError, match="the gradient of mla_prefill has no derivative in this"):
                dq.square().sum().backward()
    assert k.grad is not None and k.grad.any()


@pytest.mark.parametrize("name", ["softmax_scale", "q_scale", "k_scale", "v_scale"])
def test_the_derivative_of_a_scale(name: str) -> None:
    packed = PACKED["ragged"]
    q, k, v, *_ = packed.numbers(torch.float32)
    scale = torch.tensor(0.5, requires_grad=True)
    options = packed.options() | {name: scale}
    with pytest.raises(NotImplementedError, match=rf"{name}: got a tensor that requires a derivative; legal: a number"):
        tsmla_bridge.mla_prefill(q, k, v, **options)
    tsmla_bridge.mla_prefill(q, k, v, **options, implementation="reference").nansum().backward()
    assert scale.grad is not None
    with torch.no_grad():
        tsmla_bridge.mla_prefill(q, k, v, **options)


def test_results_in_the_callers_memory_have_no_derivative() -> None:
    packed = PACKED["ragged"]
    q, k, v, *_ = (x.requires_grad_() for x in packed.numbers(torch.float32))
    out = torch.empty(len(q), 2, 16)
    with pytest.raises(
        NotImplementedError, match="out: got a tensor; results that have a derivative go only to new memory"
    ):
        tsmla_bridge.mla_prefill(q, k, v, **packed.options(), out=out)


def test_a_flag_that_is_none() -> None:
    packed = PACKED["ragged"]
    q, k, v, *_ = packed.numbers(torch.float32)
    with pytest.raises(TypeError, match="deterministic: got int; legal: True or False"):
        tsmla_bridge.mla_prefill(q, k, v, **packed.options(), deterministic=1)  # type: ignore[arg-type]
