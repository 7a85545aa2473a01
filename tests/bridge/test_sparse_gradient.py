"""The gradient of sparse_mla on torch tensors: its values, what the kernel is given, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tsmla_bridge
from tests.emulator.launcher import Gpu
from tsmla_bridge.ops import sparse_mla
from tsmla_bridge.runtime import loaded_kernels
from tsmla_kernels.sm90.sparse_backward.config import SparseBackwardConfig

TOKENS, HEADS, SELECTED, WINDOW, PAGE = 6, 3, 12, 4, 8
Tensors = dict[str, torch.Tensor]
NAMES = ("q", "kv_cache", "compressed_kv_cache", "sinks")

CASES: dict[str, dict[str, Any]] = {
    "one cache": {},
    "sinks": {"sinks": True},
    "two caches": {"two": True, "sinks": True},
    "gaps": {"page_size": 5},
    "no lengths": {"lengths": False},
}


def call(dtype: torch.dtype = torch.float64, *, two: bool = False, sinks: bool = False, lengths: bool = True,
         page_size: int = PAGE, width: int = 576) -> tuple[Tensors, dict[str, Any]]:  # fmt: skip
    """A call: -1, duplicates, no key at all, NaN in slots that no token selects, and 2^31 - 1 behind the lengths."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    window = WINDOW if two else SELECTED
    indices = torch.randint(-1, 5 * PAGE - 3, (TOKENS, SELECTED), generator=generator, dtype=torch.int32)
    indices[:, window:] %= 3 * PAGE
    indices[:, 1], indices[3] = indices[:, 0], -1
    given = {"q": normal(TOKENS, HEADS, width), "kv_cache": normal(5, PAGE, width)}
    given["kv_cache"][-1, -2:] = torch.nan
    if two:
        given["compressed_kv_cache"] = normal(3, PAGE, width)
    if sinks:
        given["sinks"] = normal(HEADS).to(torch.float64 if dtype == torch.float64 else torch.float32)
    if lengths:
        given["lengths"] = torch.tensor([12, 0, 3, 12, 7, 1], dtype=torch.int32)
        indices[torch.arange(SELECTED) >= given["lengths"][:, None]] = 2**31 - 1
    given["indices"] = indices
    options: dict[str, Any] = {"softmax_scale": 0.05, "page_size": page_size}
    return given, options | ({"window": WINDOW} if two else {})


def attend(given: Tensors, options: dict[str, Any], **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = tsmla_bridge.sparse_mla(**given, **(options | changed), return_lse=True)  # type: ignore[assignment]
    return found


def gradients(
    given: Tensors, options: dict[str, Any], compiled: bool = False, **changed: Any
) -> dict[str, torch.Tensor]:
    """The gradients of the sum of the results times random numbers."""
    generator = torch.Generator().manual_seed(9)
    leaves = {name: given[name].clone().requires_grad_() for name in NAMES if name in given}

    def run(leaves: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        return attend(given | leaves, options, **changed)

    out, lse = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(leaves)
    d_out, d_lse = (torch.randn(x.shape, generator=generator).to(x.dtype) for x in (out, lse))
    found = torch.autograd.grad((out, lse), list(leaves.values()), (d_out, d_lse * lse.isfinite()))
    return dict(zip(leaves, found, strict=True))


def wide(given: Tensors) -> Tensors:
    return {name: x.double() if name in NAMES else x for name, x in given.items()}


@pytest.mark.parametrize("case", CASES)
def test_compiled_is_eager(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's explicit gradient, in chunks of two tokens, and torch's own of the definition."""
    torch._dynamo.reset()
    monkeypatch.setattr("tsmla_bridge.sparse_reference.BACKWARD_SCORES", 2 * 576 * SELECTED)
    given, options = call(**CASES[case])
    want, got = gradients(given, options), gradients(given, options, compiled=True)
    assert got.keys() == want.keys()
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-10, atol=1e-10)


def test_rows_that_overflow_have_gradients_of_nan() -> None:
    torch._dynamo.reset()
    given, options = call(sinks=True)
    given["q"][0] *= 1e308
    want, got = gradients(given, options), gradients(given, options, compiled=True)
    for name, x in want.items():
        assert x.isnan().any()
        torch.testing.assert_close(got[name], x, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel(gpu: Gpu, case: str, dtype: torch.dtype) -> None:
    given, options = call(dtype, **CASES[case])
    with gpu.on_stream(7):
        got = gradients(given, options)
    _, (stream, operands) = gpu.launches
    assert stream == 7 and operands["scales"].shape == (3,)
    for name, gradient in got.items():
        if name != "sinks":
            assert operands[f"d_{name}"].data_ptr() == gradient.data_ptr() and gradient.dtype == dtype
    slots = sum(given[name].shape[0] * PAGE for name in NAMES[1:3] if name in given)
    assert operands["kv_sum"].shape == (slots, 576) and operands["row_terms"].shape == (3, TOKENS * HEADS)
    configs = [config for name, config, _ in loaded_kernels._loaded if name == "sparse_mla_backward"]
    page_size, page_span = (5, PAGE) if case == "gaps" else (0, 0)
    two = case == "two caches"
    assert configs == [
        SparseBackwardConfig(
            dtype=str(dtype).removeprefix("torch."), head_dim=576, page_size=page_size, page_span=page_span,
            window=WINDOW if two else None, lengths=case != "no lengths", sinks="sinks" in given,
        )
    ]  # fmt: skip
    want = gradients(wide(given), options, implementation="reference")
    for name, gradient in got.items():
        assert (gradient.double() - want[name]).norm() < 2**-6 * want[name].norm()


@pytest.mark.parametrize("by_torch", [False, True])
def test_deterministic(gpu: Gpu, by_torch: bool) -> None:
    given, options = call(torch.bfloat16)
    torch.use_deterministic_algorithms(by_torch)
    try:
        gradients(given, options, deterministic=not by_torch)
    finally:
        torch.use_deterministic_algorithms(False)
    (config,) = (config for name, config, _ in loaded_kernels._loaded if name == "sparse_mla_backward")
    assert config.deterministic
    _, operands = gpu.launches[1]
    assert operands["kv_sum"].dtype == torch.int32 and operands["key_counts"].shape == (5 * PAGE,)
    with pytest.raises(TypeError, match="deterministic: got int; legal: True or False"):
        attend(given, options, deterministic=1)


def test_nothing_but_the_operands_is_saved(gpu: Gpu) -> None:
    given, options = call(torch.bfloat16)
    given["q"].requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out, lse = attend(given, options)
    known = {x.data_ptr() for x in (out, lse, *given.values())}
    assert {x.data_ptr() for x in saved} <= known


def test_opcheck() -> None:
    given, _ = call(torch.float32, sinks=True)
    inputs = [given.get(name) for name in sparse_mla.SparseInputs._fields]
    rest = (None, [0.05, 1.0, 1.0], 512, None, None, None, None, None, False, "auto", None, False, False, None)
    leaves = [x.nan_to_num().requires_grad_() if x is not None and x.is_floating_point() else x for x in inputs]
    torch.library.opcheck(sparse_mla.sparse_operator, (*leaves, *rest), rtol=1e-3, atol=1e-3)
    out, lse, _ = sparse_mla.sparse_operator(*inputs, *rest)
    d_out, d_lse = torch.ones_like(out), torch.ones_like(lse)
    torch.library.opcheck(sparse_mla.backward_operator, (d_out, d_lse, out, lse, *inputs, *rest))
    for name, wrong in (("d_lse", (d_out, d_lse[1:], out, lse)), ("lse", (d_out, d_lse, out, lse.double()))):
        with pytest.raises(ValueError, match=f"{name}: got"):
            sparse_mla.backward_operator(*wrong, *inputs, *rest)


def test_without_tokens_or_columns_nothing_is_launched(gpu: Gpu) -> None:
    given, options = call(torch.bfloat16, lengths=False)
    for part in ({"q": given["q"][:0], "indices": given["indices"][:0]}, {"indices": given["indices"][:, :0]}):
        found = gradients(given | part, options)
        assert not any(x.any() for x in found.values())
    assert not gpu.launches


def test_the_bits_of_a_call_without_a_derivative(gpu: Gpu) -> None:
    given, options = call(torch.bfloat16)
    want = attend(given, options)
    given["q"].requires_grad_()
    with torch.no_grad():
        assert torch.equal(attend(given, options)[0], want[0])


# ---- what is refused


def refused(given: Tensors, options: dict[str, Any], message: str, **changed: Any) -> None:
    leaf = given["q"].detach().requires_grad_()
    with pytest.raises(NotImplementedError, match=message):
        attend(given | {"q": leaf}, options, **changed)


def test_caches_and_scales_without_a_gradient(gpu: Gpu) -> None:
    given, options = call(torch.bfloat16)
    message = "sparse_mla has no derivative in this implementation; "
    packed = {"kv_cache": torch.zeros(5, PAGE, 656, dtype=torch.uint8)}
    refused(given | packed, options, f"{message}kv_cache: got v32 rows of uint8; a gradient needs plain rows")
    fp8 = {"kv_cache": given["kv_cache"].to(torch.float8_e4m3fn)}
    refused(given | fp8, options, f"{message}kv_cache: got plain rows of float8_e4m3fn")
    refused(given, options, f"{message}kv_scale: got a scale; a gradient needs None", kv_scale=2.0)
    scale = torch.tensor(0.1, requires_grad=True)
    refused(given, options, "softmax_scale: got a tensor that requires a derivative", softmax_scale=scale)
    out = torch.empty(TOKENS, HEADS, 512, dtype=torch.bfloat16)
    refused(given, options, "out: got a tensor; results that have a derivative go only to new memory", out=out)


def test_widths_that_the_kernel_does_not_take(gpu: Gpu) -> None:
    given, options = call(torch.bfloat16)
    narrow = {name: given[name][..., :512].contiguous() for name in ("q", "kv_cache")}
    leaf = narrow["q"].requires_grad_()
    out, _ = attend(given | narrow, options)
    out.float().sum().backward()
    assert leaf.grad is not None and leaf.grad.shape == leaf.shape


def test_a_second_derivative() -> None:
    given, _ = call(torch.float32, lengths=False)
    inputs = [given.get(name) for name in sparse_mla.SparseInputs._fields]
    rest = (None, [0.05, 1.0, 1.0], 512, None, None, None, None, None, False, "auto", None, False, False, None)
    q = given["q"].requires_grad_()
    out, *_ = sparse_mla.sparse_operator(*inputs, *rest)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="the gradient of sparse_mla has no derivative in this"):
        dq.square().sum().backward()
