"""The gradients of mla_prefill and mla_prefill_kv on torch tensors, on a GPU: their values, the bits of jax, captured,
compiled, and the memory that they take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import pytest
import torch

import tsmla_bridge
import tsmla_jax
from tests.gpu.stress import assert_same_bits
from tests.oracles.gradients import Packed, Tensors
from tsmla_bridge.ops import mla_prefill, mla_prefill_kv

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_in_torch")]

SCALE = 192**-0.5
RAGGED = Packed([200, 0, 65, 1, 300], [200, 130, 300, 64, 250], heads=4, dims=(192, 128), scale=SCALE)
# The last rows of the gradients are of no request; the first 50 queries of the last request see no key when causal.


class Form(NamedTuple):
    """One of the two operations: in torch and in jax, its operators, its inputs and its gradients in float64."""

    call: Callable[..., Any]
    in_jax: Callable[..., Any]
    operator: Any
    backward_operator: Any
    numbers: Callable[..., Tensors]
    want: Callable[..., Tensors]


FORMS = {
    "k and v": Form(
        tsmla_bridge.mla_prefill,
        tsmla_jax.mla_prefill,
        mla_prefill.OPERATORS.forward,
        mla_prefill.OPERATORS.backward,
        Packed.numbers,
        Packed.want,
    ),
    "kv and k_rope": Form(
        tsmla_bridge.mla_prefill_kv,
        tsmla_jax.mla_prefill_kv,
        mla_prefill_kv.OPERATORS.forward,
        mla_prefill_kv.OPERATORS.backward,
        Packed.kv_numbers,
        Packed.want_kv,
    ),
}
both_forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def options_of(packed: Packed, **changed: Any) -> dict[str, Any]:
    """The arguments that both operations take."""
    options = packed.options("cuda") | changed
    del options["v_scale"]
    return options


def gradients(form: Form, numbers: Tensors, options: dict[str, Any]) -> Tensors:
    """The gradients of the inputs of the sum of the results times their cotangents."""
    *given, dout, dlse = numbers
    leaves = [x.detach().requires_grad_() for x in given]
    results = form.call(*leaves, **options, return_lse=True)
    return torch.autograd.grad(results, leaves, (dout, dlse))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 4e-3), (torch.float16, 6e-4)])
@both_forms
def test_values(form: Form, dtype: torch.dtype, error: float, causal: bool, deterministic: bool) -> None:
    packed = dataclasses.replace(RAGGED, causal=causal)
    numbers = form.numbers(packed, dtype, "cuda")
    found = gradients(form, numbers, options_of(packed, deterministic=deterministic))
    for got, want in zip(found, form.want(packed, *numbers), strict=True):
        assert got.dtype == dtype and not got[-packed.padding :].any()
        assert (got.double() - want).norm() < error * want.norm()
    if causal:
        assert not found[0][266:316].any()


def test_scaled_values() -> None:
    packed = dataclasses.replace(RAGGED, v_scale=0.7)
    numbers = packed.numbers(torch.bfloat16, "cuda")
    found = gradients(FORMS["k and v"], numbers, packed.options("cuda"))
    for got, want in zip(found, packed.want(*numbers), strict=True):
        assert (got.double() - want).norm() < 4e-3 * want.norm()


def test_gradient_of_a_sum() -> None:
    """The cotangent of out has strides of 0, that of lse is made by autograd."""
    q, k, v, *_ = (x.nan_to_num().requires_grad_() for x in RAGGED.numbers(torch.bfloat16, "cuda"))
    tsmla_bridge.mla_prefill(q, k, v, **RAGGED.options("cuda")).sum().backward()
    want = RAGGED.want(q, k, v, torch.ones(len(q), 4, 128, device="cuda"), torch.zeros(len(q), 4, device="cuda"))
    assert v.grad is not None
    assert (v.grad.double() - want[2]).norm() < 4e-3 * want[2].norm()


@both_forms
def test_gradient_of_fp8_is_that_of_torch_operations(form: Form) -> None:
    *given, dout, dlse = form.numbers(RAGGED, torch.bfloat16, "cuda")
    numbers = (*(x.to(torch.float8_e4m3fn) for x in given), dout, dlse)
    found = gradients(form, numbers, options_of(RAGGED))
    for got, want in zip(found, form.want(RAGGED, *numbers), strict=True):
        assert (got.double() - want).norm() < 2**-4 * want.norm()


@both_forms
def test_deterministic_gradients_repeat(form: Form) -> None:
    packed = Packed([700, 1348], [700, 1348], heads=16, dims=(192, 128), scale=SCALE)
    numbers, options = form.numbers(packed, torch.bfloat16, "cuda"), options_of(packed, deterministic=True)
    first = gradients(form, numbers, options)
    for _ in range(10):
        assert_same_bits(gradients(form, numbers, options), first)


@pytest.mark.parametrize("causal", [True, False])
@both_forms
def test_bits_of_jax(form: Form, causal: bool) -> None:
    packed = dataclasses.replace(RAGGED, causal=causal)
    numbers, options = form.numbers(packed, torch.bfloat16, "cuda"), options_of(packed, deterministic=True)
    got = gradients(form, numbers, options)
    offsets = {name: options.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_kv")}

    def in_jax(*given: Any) -> Any:
        *inputs, dout, dlse, offsets = given

        def attend(*inputs: Any) -> Any:
            return form.in_jax(*inputs, **offsets, **options, return_lse=True, implementation="cute")

        return jax.vjp(attend, *inputs)[1]((dout, dlse))

    assert_same_bits(got, tsmla_bridge.jax_function(in_jax)(*numbers, offsets))


@both_forms
def test_compiled(form: Form) -> None:
    pytest.importorskip("triton", reason="torch.compile makes Triton kernels")
    *given, dout, dlse = (x.nan_to_num() for x in form.numbers(RAGGED, torch.bfloat16, "cuda"))
    options = options_of(RAGGED, deterministic=True)

    def loss(q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        out, lse = form.call(q * 2, *others, **options, return_lse=True)
        return (out.float() * dout).sum() + (lse.nan_to_num(neginf=0) * dlse).sum()

    found = []
    for function in (loss, torch.compile(loss, fullgraph=True)):
        leaves = [x.detach().requires_grad_() for x in given]
        found.append(torch.autograd.grad(function(*leaves), leaves))
    assert_same_bits(*found)


@both_forms
def test_in_a_graph(form: Form) -> None:
    numbers, options = form.numbers(RAGGED, torch.bfloat16, "cuda"), options_of(RAGGED, deterministic=True)
    gradients(form, numbers, options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(form, numbers, options)
    for factor in (1.0, 0.5):
        for x in numbers:
            x.mul_(factor)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(found, gradients(form, numbers, options))


@both_forms
def test_opcheck(form: Form) -> None:
    packed = dataclasses.replace(RAGGED, padding=0)
    *given, dout, dlse = form.numbers(packed, torch.bfloat16, "cuda")
    offsets = (packed.options("cuda")[name] for name in ("cu_seqlens_q", "cu_seqlens_kv"))
    rest = (*offsets, None, None, None, None, SCALE, 1.0, 300, 300, False, True, False, None)
    torch.library.opcheck(form.operator, (*(x.clone().requires_grad_() for x in given), *rest))
    out, lse, _ = form.operator(*given, *rest)
    torch.library.opcheck(form.backward_operator, (dout, dlse, out, lse, *given, *rest))


@pytest.mark.parametrize("deterministic", [False, True])
@both_forms
def test_memory(form: Form, deterministic: bool) -> None:
    """Beside operands and results: dq in float32, 4 float32 numbers a row and head, and the sums of k_rope's gradient,
    whose number does not grow with the heads. Blocks of 2 MiB are what torch's allocator counts in."""
    tokens, heads = 8192, 16
    packed = Packed([tokens], [tokens], heads=heads, dims=(192, 128), scale=SCALE, padding=0)
    *given, dout, dlse = form.numbers(packed, torch.bfloat16, "cuda")
    leaves = [x.requires_grad_() for x in given]
    results = form.call(*leaves, **options_of(packed, deterministic=deterministic), return_lse=True)
    torch.autograd.grad(results, leaves, (dout, dlse), retain_graph=True)  # what the first call loads stays
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = torch.autograd.grad(results, leaves, (dout, dlse))
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before - sum(x.numel() * x.element_size() for x in found)
    rope_sums = (16 if deterministic else 1) * tokens * 64 * 4 if form is FORMS["kv and k_rope"] else 0
    print(f"beside operands and results {taken / (tokens * heads * 4):.1f} float32 numbers a row and head")
    assert taken <= tokens * heads * 4 * (192 + 4) + rope_sums + (2 << 20)
