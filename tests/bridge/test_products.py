"""Products with block scales on torch tensors: against tsmla_jax, in the caller's memory, compiled, and bad input."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tsmla_bridge
import tsmla_jax
from tests.bridge.inputs import TorchInAGraph
from tsmla_bridge import products_reference

GENERATOR = torch.Generator().manual_seed(0)
TERMS, COLUMNS, ROWS = 336, 264, 21


def operands(*groups: int) -> dict[str, torch.Tensor]:
    x, x_scales = tsmla_bridge.quantize_blocks(torch.randn(ROWS, TERMS, generator=GENERATOR))
    weight, _ = tsmla_bridge.quantize_blocks(torch.randn(*groups, COLUMNS, TERMS, generator=GENERATOR))
    weight_scales = (torch.rand(*groups, 3, 3, generator=GENERATOR) + 0.5) * 0.01
    return {"x": x, "weight": weight, "x_scales": x_scales, "weight_scales": weight_scales}


DENSE = operands()
GROUPED = operands(3) | {"cu_rows": torch.tensor([0, 0, 9, 17], dtype=torch.int32)}
CALLS: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {
    "block_scaled_matmul": (tsmla_bridge.block_scaled_matmul, DENSE),
    "grouped_block_scaled_matmul": (tsmla_bridge.grouped_block_scaled_matmul, GROUPED),
}


def as_jax(tensor: torch.Tensor) -> jax.Array:
    if tensor.dtype == torch.float8_e4m3fn:
        return jax.lax.bitcast_convert_type(jnp.asarray(tensor.view(torch.uint8).numpy()), jnp.float8_e4m3fn)
    return jnp.asarray(tensor.numpy())


def test_no_row_is_quantised_to_no_row() -> None:
    for power_of_two in (False, True):
        values, scales = tsmla_bridge.quantize_blocks(torch.zeros(0, 200), power_of_two=power_of_two)
        assert values.shape == (0, 200) and values.dtype == torch.float8_e4m3fn and scales.shape == (0, 2)


@pytest.mark.parametrize("op", CALLS)
def test_it_means_what_jax_means(op: str) -> None:
    function, given = CALLS[op]
    want = getattr(tsmla_jax, op)(**{name: as_jax(x) for name, x in given.items()}, out_dtype="float32")
    got = function(**given, out_dtype=torch.float32)
    np.testing.assert_allclose(got.numpy(), np.asarray(want), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("out_dtype", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize("op", CALLS)
def test_gated_calls_mean_what_jax_means(op: str, out_dtype: str) -> None:
    function, given = CALLS[op]
    if op.startswith("grouped"):
        given = given | {
            "rows": torch.tensor([3, 3, 20, 0, 1, 2, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 19, -1], dtype=torch.int32)
        }
    form: Any = {"gated": True, "limit": 2.0}
    want = getattr(tsmla_jax, op)(**{name: as_jax(x) for name, x in given.items()}, out_dtype="float32", **form)
    dtype = getattr(torch, out_dtype)
    got = function(**given, out_dtype=dtype, **form)
    memory = tuple(map(torch.empty_like, got)) if isinstance(got, tuple) else torch.empty_like(got)
    assert function(**given, out_dtype=dtype, out=memory, **form) is memory
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    others = (memory, compiled(**given, out_dtype=dtype, **form))
    into = tuple(map(torch.empty_like, got)) if isinstance(got, tuple) else torch.empty_like(got)
    compiled(**given, out_dtype=dtype, out=into, **form)
    if not isinstance(got, tuple):
        np.testing.assert_allclose(got.numpy(), np.asarray(want), rtol=1e-4, atol=1e-4)
        assert all(torch.equal(got, other) for other in (*others, into))
        return
    values, scales = got
    factors = scales.repeat_interleave(128, -1)[:, : values.shape[1]]
    np.testing.assert_allclose(values.float() * factors, np.asarray(want), atol=float(np.abs(want).max()) * 2**-4)
    for other in (*others, into):
        assert torch.equal(other[0].view(torch.uint8), values.view(torch.uint8)) and torch.equal(other[1], scales)


@pytest.mark.parametrize("op", CALLS)
def test_packed_weights_mean_what_jax_means(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products_reference, "torch", TorchInAGraph())
    stack = (3,) if "grouped" in op else ()
    given = {
        "x": torch.randn(ROWS, 96, generator=GENERATOR),
        "weight": torch.randint(0, 256, (*stack, 40, 48), generator=GENERATOR).byte(),
        "weight_scales": torch.randint(120, 130, (*stack, 40, 3), generator=GENERATOR).byte(),
    }
    given |= {"cu_rows": GROUPED["cu_rows"]} if stack else {}
    form: dict[str, Any] = {"x_scales": None, "gated": True}
    want = getattr(tsmla_jax, op)(**{name: as_jax(x) for name, x in given.items()}, **form, out_dtype="float32")
    got = CALLS[op][0](**given, **form, out_dtype=torch.float32)
    np.testing.assert_allclose(got.numpy(), np.asarray(want), rtol=1e-5, atol=1e-5)


def test_weights_of_16_bits_mean_what_jax_means() -> None:
    x, weight = torch.randn(ROWS, 96, generator=GENERATOR), torch.randn(4, 40, 96, generator=GENERATOR)
    given = {"x": x.half(), "weight": weight.half(), "cu_rows": GROUPED["cu_rows"]}
    form: dict[str, Any] = {"x_scales": None, "weight_scales": None, "gated": True}
    want = tsmla_jax.grouped_block_scaled_matmul(
        **{name: as_jax(x) for name, x in given.items()}, **form, out_dtype="float32"
    )  # fmt: skip
    multiply = tsmla_bridge.grouped_block_scaled_matmul
    got = multiply(**given, **form, out_dtype=torch.float32)
    np.testing.assert_allclose(got.numpy(), np.asarray(want), rtol=1e-5, atol=1e-5)
    compiled = torch.compile(multiply, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**given, **form, out_dtype=torch.float32), got)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_blocks_are_quantised_as_in_jax(power_of_two: bool) -> None:
    x = torch.randn(5, 300, generator=GENERATOR) * torch.logspace(-12, 6, 5)[:, None]
    x[2], x[3, 7] = 0, torch.inf
    values, scales = tsmla_bridge.quantize_blocks(x, power_of_two=power_of_two)
    want, of_jax = tsmla_jax.quantize_blocks(x.numpy(), power_of_two=power_of_two)
    np.testing.assert_array_equal(scales.numpy(), np.asarray(of_jax))
    assert (values.view(torch.uint8) == torch.from_numpy(np.array(want).view(np.uint8))).float().mean() > 0.999
    assert values.is_contiguous() and scales.shape == (5, 3)


@pytest.mark.parametrize("op", CALLS)
def test_memory_of_the_caller_and_a_compiled_call(op: str) -> None:
    function, given = CALLS[op]
    want, out = function(**given), torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)
    assert function(**given, out=out) is out and torch.equal(out, want)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**given), want)
    into = torch.zeros_like(out)
    assert torch.equal(compiled(**given, out=into), want) and torch.equal(into, want)


def test_rows_of_no_group_are_zero() -> None:
    x = GROUPED["x"].clone()
    x.view(torch.uint8)[17:] = 0x7F
    out = tsmla_bridge.grouped_block_scaled_matmul(**GROUPED | {"x": x})
    assert not out[17:].any() and out.isfinite().all()
    nothing = {"x": x[:0], "x_scales": GROUPED["x_scales"][:0], "cu_rows": torch.zeros(4, dtype=torch.int32)}
    assert tsmla_bridge.grouped_block_scaled_matmul(**GROUPED | nothing).shape == (0, COLUMNS)


def test_errors_name_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply: Any = tsmla_bridge.block_scaled_matmul
    with pytest.raises(TypeError, match=r"out_dtype: got str; legal: a torch.dtype"):
        multiply(**DENSE, out_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"out_dtype: got 'float64'; legal"):
        multiply(**DENSE, out_dtype=torch.float64)
    with pytest.raises(ValueError, match=r"out: got float32"):
        multiply(**DENSE, out=torch.empty(ROWS, COLUMNS))
    meta = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in DENSE.items()}
    for given in (DENSE, meta):  # eager, and as an operator
        with pytest.raises(TypeError, match=r"out: got 3 tensors; legal: one tensor, or None"):
            multiply(**given, out=(given["x"],) * 3)
    with pytest.raises(
        TypeError, match=r"out: got 1 tensors; legal: values and scales, a tuple of two tensors, or None"
    ):
        multiply(**DENSE, gated=True, out_dtype=torch.float8_e4m3fn, out=torch.empty(ROWS, COLUMNS // 2))
    with pytest.raises(NotImplementedError, match="the tensors are on cpu"):
        multiply(**DENSE, implementation="cute")
    with pytest.raises(NotImplementedError, match="the tensors are on cpu"):
        tsmla_bridge.quantize_blocks(torch.ones(2, 128), implementation="cute")
    monkeypatch.setenv("TSMLA_CHECK", "1")
    wrong = GROUPED | {"cu_rows": torch.tensor([0, 9, 3, 17], dtype=torch.int32)}
    with pytest.raises(ValueError, match=r"cu_rows: got \[0, 9, 3, 17\]; legal: from 0, never decreasing"):
        tsmla_bridge.grouped_block_scaled_matmul(**wrong)
