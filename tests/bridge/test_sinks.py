"""Sinks and greatest logits of prefill on torch tensors: values, gradients, what the kernels are given, compilation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tsmla_bridge
from tests.emulator.launcher import Gpu
from tests.oracles.gradients import Packed, Tensors

RAGGED = Packed([3, 0, 5, 2], [3, 4, 9, 0])
KERNEL = Packed([3, 0, 70], [3, 2, 90], dims=(192, 128), scale=0.1)
SINKS = torch.tensor([-1.0, 2.5])


def by_hand(packed: Packed, sinks: torch.Tensor, *given: torch.Tensor) -> Tensors:
    """out, lse and the greatest logits in float64: a softmax over the keys and one logit more."""
    q, k, v = (x.double() for x in given)
    _, lse = packed.results(q, k, v)
    out, greatest = torch.zeros((*q.shape[:2], v.shape[2]), dtype=torch.float64), torch.full_like(lse, -torch.inf)
    starts = itertools.pairwise([0, *itertools.accumulate(packed.q_lens)])
    keys = itertools.pairwise([0, *itertools.accumulate(packed.kv_lens)])
    rows = []
    for (first_q, stop_q), (first_k, stop_k) in zip(starts, keys, strict=True):
        for i in range(stop_q - first_q):
            seen = max(0, i + 1 + (stop_k - first_k) - (stop_q - first_q))
            logits = packed.scale * torch.einsum("hd,khd->hk", q[first_q + i], k[first_k : first_k + seen])
            weights = torch.cat([logits, sinks.double()[:, None]], 1).softmax(1)[:, :-1]
            rows.append(torch.einsum("hk,khv->hv", weights, v[first_k : first_k + seen]) * packed.v_scale)
            if seen:
                greatest[first_q + i] = logits.detach().amax(1)
    return torch.cat([torch.stack(rows), out[len(rows) :]]), lse, greatest


def call(packed: Packed, *given: torch.Tensor, **options: Any) -> Any:
    return tsmla_bridge.mla_prefill(*given, **packed.options() | options, return_lse=True, return_max_logits=True)


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_values_and_gradients(implementation: str | None) -> None:
    q, k, v, dout, dlse = RAGGED.numbers(torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, SINKS.double())]
    found = call(RAGGED, *leaves[:3], sinks=leaves[3], implementation=implementation)
    wanted = by_hand(RAGGED, leaves[3], *leaves[:3])
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    seen = wanted[1] != -torch.inf
    with_lse = torch.autograd.grad((wanted[0][seen], wanted[1][seen]), leaves, (dout[seen], dlse[seen]))
    for got, want in zip(torch.autograd.grad(found[:2], leaves, (dout, dlse)), with_lse, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_gradients_of_a_sink_with_all_weight() -> None:
    """lse is without the sink, and keeps its gradient."""
    q, k, v, dout, dlse = RAGGED.numbers(torch.float64)
    leaves = [x.float().requires_grad_() for x in (q, k, v, torch.tensor([95.0, torch.inf]))]
    got = torch.autograd.grad(call(RAGGED, *leaves[:3], sinks=leaves[3])[:2], leaves, (dout.float(), dlse.float()))
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    lse = call(RAGGED, *exact)[1]
    want = torch.autograd.grad(lse, exact[:2], dlse)
    for a, b in zip(got, (*want, torch.zeros_like(v), torch.zeros(2)), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-6)


def test_what_is_returned() -> None:
    q, k, v, *_ = (x.nan_to_num() for x in RAGGED.numbers(torch.float32))
    call = lambda **options: tsmla_bridge.mla_prefill(q, k, v, **RAGGED.options(), **options)  # noqa: E731
    out, lse, greatest = call(return_lse=True, return_max_logits=True)
    assert torch.equal(call(), out)
    assert all(map(torch.equal, call(return_max_logits=True), (out, greatest)))
    place = torch.empty_like(out)
    results = call(return_lse=True, return_max_logits=True, out=place)
    assert results[0] is place and all(map(torch.equal, results, (out, lse, greatest)))


@pytest.mark.parametrize("shared_rope", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_kernels(gpu: Gpu, compiled: bool, shared_rope: bool) -> None:
    """The stand-in of the kernels, which are given the sinks in float32."""
    numbers = KERNEL.kv_numbers(torch.bfloat16) if shared_rope else KERNEL.numbers(torch.bfloat16)
    leaves = [x.clone().requires_grad_() for x in (*numbers[:3], SINKS.half())]
    function: Callable[..., Any] = tsmla_bridge.mla_prefill_kv if shared_rope else tsmla_bridge.mla_prefill
    options = {**KERNEL.options(), "return_lse": True, "return_max_logits": True}
    options.pop("v_scale")

    def run(*given: torch.Tensor) -> Any:
        return function(*given[:3], sinks=given[3], **options)

    found = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves) if compiled else run(*leaves)
    wanted = [x.detach().double().requires_grad_() for x in (*numbers[:3], SINKS)]
    expanded = KERNEL.expanded(*wanted[:3]) if shared_rope else wanted[:3]
    want = by_hand(KERNEL, wanted[3], *expanded)
    for got, right in zip(found, want, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-2, atol=1e-2)
    seen = want[1] != -torch.inf
    cotangents = numbers[3].nan_to_num(), numbers[4].nan_to_num()
    of_out = torch.autograd.grad(found[0], leaves, cotangents[0], retain_graph=True)
    right = torch.autograd.grad(want[0][seen], wanted, cotangents[0][seen].double(), retain_graph=True)
    for got, exact in zip(of_out, right, strict=True):
        assert (got.double() - exact).norm() < 2**-6 * exact.norm()
    gradients = torch.autograd.grad(found[:2], leaves, cotangents)
    right = torch.autograd.grad((want[0][seen], want[1][seen]), wanted, tuple(x[seen].double() for x in cotangents))
    assert [x.dtype for x in gradients] == [x.dtype for x in leaves]
    for got, exact in zip(gradients, right, strict=True):
        assert (got.double() - exact).norm() < 2**-6 * exact.norm()
    forward, *_, backward = (operands for _, operands in gpu.launches)
    assert forward["sinks"].dtype == torch.float32 and forward["max_logits"].shape == found[1].shape
    assert backward["sinks"].dtype == backward["dsinks"].dtype == torch.float32


def test_what_is_refused(gpu: Gpu) -> None:
    q, k, v, *_ = KERNEL.numbers(torch.bfloat16)
    with pytest.raises(ValueError, match=r"sinks: got shape \[3\]; axis 0 must be 2"):
        call(KERNEL, q, k, v, sinks=torch.zeros(3))
    given = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    with pytest.raises(NotImplementedError, match="return_max_logits is True with float8_e4m3fn"):
        call(KERNEL, *given)
    with pytest.raises(TypeError, match="return_max_logits: got int; legal: True or False"):
        tsmla_bridge.mla_prefill(q, k, v, **KERNEL.options(), return_max_logits=1)
