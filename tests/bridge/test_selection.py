"""Keys selected by bits on torch tensors: results, gradients, what the kernels are given, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
import torch

import tsmla_bridge
import tsmla_jax
from tests.emulator.launcher import Gpu

Q_LENS, KV_LENS, HEADS = (3, 0, 5, 40), (7, 4, 5, 150), 2
TOKENS, KEYS = sum(Q_LENS) + 2, sum(KV_LENS) + 2


def offsets(lens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(np.concatenate([[0], np.cumsum(lens)]), dtype=torch.int32)


OPTIONS: dict[str, Any] = {
    "cu_seqlens_q": offsets(Q_LENS),
    "cu_seqlens_kv": offsets(KV_LENS),
    "max_q_len": max(Q_LENS),
    "max_kv_len": max(KV_LENS),
    "softmax_scale": 0.1,
}


def numbers(dtype: torch.dtype, dims: tuple[int, int] = (24, 16)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, HEADS, dims[0]), (KEYS, HEADS, dims[0]), (KEYS, HEADS, dims[1]))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def selection(*, rows: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(-1, max(KV_LENS), (TOKENS, 60), generator=generator, dtype=torch.int32)
    positions[4] = -1
    order = torch.randperm(TOKENS, generator=generator).to(torch.int32)
    order[1::6] = -1
    words = tsmla_bridge.selection_bits(positions, max(KV_LENS))
    return {"selection": words, "selection_rows": order} if rows else {"selection": words}


def as_jax(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


@pytest.mark.parametrize("given", [(), ("lengths", "starts")])
def test_bits_are_those_of_jax(given: tuple[str, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    positions = torch.randint(-9, 300, (7, 50), generator=generator, dtype=torch.int32)
    each = {name: torch.randint(0, 60, (7,), generator=generator, dtype=torch.int32) for name in given}
    words = tsmla_bridge.selection_bits(positions, 260, **each)
    np.testing.assert_array_equal(words.numpy(), tsmla_jax.selection_bits(positions.numpy(), 260, **as_jax(each)))
    out = torch.empty_like(words)
    assert tsmla_bridge.selection_bits(positions, 260, **each, out=out) is out and torch.equal(out, words)
    with pytest.raises(ValueError, match=r"out: got .*legal: .*\[7, 12\]"):
        tsmla_bridge.selection_bits(positions, 260, out=out[:3])


def test_compiled_bits() -> None:
    torch._dynamo.reset()
    positions = torch.tensor([[3, 9, -1], [40, 3, 3]], dtype=torch.int32)
    out = torch.empty(2, 4, dtype=torch.int32)

    def run(positions: torch.Tensor) -> torch.Tensor:
        tsmla_bridge.selection_bits(positions + 1, 60, out=out)
        return tsmla_bridge.selection_bits(positions + 1, 60)

    got = torch.compile(run, fullgraph=True, backend="aot_eager")(positions)
    want = tsmla_bridge.selection_bits(positions + 1, 60)
    assert torch.equal(got, want) and torch.equal(out, want)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [True, False])
def test_values_are_those_of_jax(rows: bool, causal: bool) -> None:
    q, k, v = numbers(torch.float32)
    options = {**OPTIONS, **selection(rows=rows), "causal": causal, "return_lse": True}
    got = tsmla_bridge.mla_prefill(q, k, v, **options)
    definition = functools.partial(tsmla_jax.mla_prefill, **as_jax(options), implementation="reference")
    want = jax.jit(definition)(q.numpy(), k.numpy(), v.numpy())
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.numpy(), b, atol=3e-6)
    joint, rope = torch.cat((k[..., :-8], v), -1), k[:, 0, -8:].contiguous()
    shared = torch.cat((k[..., :-8], rope[:, None].expand(-1, HEADS, -1)), -1)
    by_kv, expanded = (
        tsmla_bridge.mla_prefill_kv(q, joint, rope, **options), tsmla_bridge.mla_prefill(q, shared, v, **options)
    )  # fmt: skip
    for a, b in zip(by_kv, expanded, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients() -> None:
    """By the formulas of the saved lse, against automatic differentiation of the definition."""
    found = []
    for implementation in (None, "reference"):
        leaves = [x.requires_grad_() for x in numbers(torch.float64)]
        out, lse = tsmla_bridge.mla_prefill(
            *leaves, **OPTIONS, **selection(), return_lse=True, implementation=implementation
        )
        (out.sin().sum() + lse.nan_to_num(neginf=0).sum()).backward()
        found.append([x.grad for x in leaves])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    torch._dynamo.reset()
    options, selected = OPTIONS, selection()

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = tsmla_bridge.mla_prefill(q * 2, k, v, **options, **selected, return_lse=True)
        return out.sin().sum() + lse.nan_to_num(neginf=0).sum()

    found = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)):
        leaves = [x.requires_grad_() for x in numbers(torch.float32)]
        function(*leaves).backward()
        found.append([x.grad for x in leaves])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_the_callers_memory() -> None:
    q, k, v = numbers(torch.float32)
    want = tsmla_bridge.mla_prefill(q, k, v, **OPTIONS, **selection(), return_lse=True)
    out, lse = (torch.empty_like(x) for x in want)
    tsmla_bridge.mla_prefill(q, k, v, **OPTIONS, **selection(), return_lse=True, out=out, lse=lse)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


@pytest.mark.parametrize("rows", [True, False])
def test_what_the_kernels_are_given(gpu: Gpu, rows: bool) -> None:
    """Results and gradients of the kernels' own operands; without rows token t has row t."""
    given, selected = numbers(torch.bfloat16, (192, 128)), selection(rows=rows)
    found = []
    for implementation in (None, "reference"):
        leaves = [x.clone().requires_grad_() for x in given]
        out = tsmla_bridge.mla_prefill(*leaves, **OPTIONS, **selected, implementation=implementation)
        out.float().sin().sum().backward()
        found.append([out.detach(), *(x.grad for x in leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)
    operands = [operands for _, operands in gpu.launches if "selection_rows" in operands]
    assert len(operands) == 2
    for each in operands:
        assert torch.equal(each["selection"], selected["selection"])
        if rows:
            assert torch.equal(each["selection_rows"], selected["selection_rows"])


def test_illegal_selections() -> None:
    q, k, v = numbers(torch.float32)
    words = selection()["selection"]
    with pytest.raises(ValueError, match=r"selection: got shape \[50, 4\]; its W must be a multiple of 4, at least 8"):
        tsmla_bridge.mla_prefill(q, k, v, **OPTIONS, selection=words[:, :4])
    with pytest.raises(ValueError, match=r"selection_rows: got an array without selection"):
        tsmla_bridge.mla_prefill(q, k, v, **OPTIONS, selection_rows=words[:, 0])


def test_checked_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    q, k, v = numbers(torch.float32)
    selected = selection()
    selected["selection_rows"][3] = TOKENS
    with pytest.raises(ValueError, match=rf"selection_rows: got {TOKENS} for query token 3; legal: -1 to R - 1"):
        tsmla_bridge.mla_prefill(q, k, v, **OPTIONS, **selected)
