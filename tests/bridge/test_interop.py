"""Torch tensors as jax arrays and back: the same memory, and what was launched before is done before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tsmla_bridge
import tsmla_jax
from tests.bridge.inputs import inputs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.uint8]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_memory_is_the_same(device: str, dtype: torch.dtype) -> None:
    tensor = torch.arange(64 * 32, device=device).remainder(7).reshape(64, 32).to(dtype)
    array = tsmla_bridge.to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert f"torch.{array.dtype}" == str(dtype) and array.shape == (64, 32)
    assert array.device.platform == ("gpu" if device == "cuda" else "cpu")
    back = tsmla_bridge.to_torch(array)
    assert back.data_ptr() == tensor.data_ptr() and back.dtype == dtype and back.device == tensor.device
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))

    made = jax.device_put(jnp.arange(2048).astype(array.dtype), array.device)
    assert tsmla_bridge.to_torch(made).data_ptr() == made.unsafe_buffer_pointer()


def test_what_would_be_a_copy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor: got strides \[1, 4\] of shape \[4, 4\]; legal: a contiguous one"):
        tsmla_bridge.to_jax(torch.ones(4, 4).t())
    with pytest.raises(ValueError, match=r"tensor: got a view that negates or conjugates .*; legal: its \.resolve_neg"):
        tsmla_bridge.to_jax(torch._neg_view(torch.ones(64)))
    with pytest.raises(ValueError, match="tensor: got a view that negates or conjugates"):
        tsmla_bridge.to_jax(torch.ones(64, dtype=torch.complex64).conj())
    with pytest.raises(ValueError, match="tensor: got a FakeTensor; legal: a tensor whose own memory"):
        tsmla_bridge.to_jax(FakeTensorMode().from_tensor(torch.ones(64)))
    odd = torch.ones(65)[1:]
    with pytest.raises(ValueError, match=r"(?i)copy"):
        tsmla_bridge.to_jax(odd)
    sharded = jax.device_put(
        jnp.ones(8), jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.sharding.PartitionSpec("x"))
    )
    with pytest.raises(ValueError, match="array: got one on 2 devices; legal: on one"):
        tsmla_bridge.to_torch(sharded)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_a_dtype_that_jax_would_narrow_is_named(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=f"tensor: got dtype {name}; legal: one that jax has without jax_enable_x64"):
        tsmla_bridge.to_jax(torch.ones(64, dtype=dtype))
    with jax.enable_x64(True):
        assert tsmla_bridge.to_jax(torch.ones(64, dtype=dtype)).dtype.name == name


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(TypeError, match=r"tensor: got ndarray; legal: a torch\.Tensor"):
        tsmla_bridge.to_jax(np.ones(4))
    with pytest.raises(TypeError, match=r"array: got Tensor; legal: a jax\.Array"):
        tsmla_bridge.to_torch(torch.ones(4))
    narrow = [getattr(jnp, name) for name in ("int1", "int2", "int4") if hasattr(jnp, name)]  # by the version of jax
    for array in (jax.random.key(0), *(jnp.zeros(4, dtype) for dtype in narrow)):
        with pytest.raises(TypeError, match=r"array: got dtype .*; legal: one that torch takes through DLPack"):
            tsmla_bridge.to_torch(array)


def test_a_jax_function_takes_tensors_in_any_structure() -> None:
    def function(state: dict[str, Any], factor: float, *, shift: Any) -> Any:
        return {"x": state["x"] * factor + shift, "kept": state["kept"], "pair": (state["x"].sum(), None)}

    on_tensors = tsmla_bridge.jax_function(function)
    x, kept = torch.arange(16.0), torch.ones(4, dtype=torch.int32)
    got = on_tensors({"x": x, "kept": kept}, 2.0, shift=torch.tensor(1.0))
    assert torch.equal(got["x"], x * 2 + 1) and torch.equal(got["kept"], kept)
    assert got["pair"][0] == x.sum() and got["pair"][1] is None
    with pytest.raises(ValueError, match="requires a derivative"):
        on_tensors({"x": x.requires_grad_(), "kept": kept}, 2.0, shift=0.0)
    with torch.no_grad():
        on_tensors({"x": x, "kept": kept}, 2.0, shift=0.0)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="requires a derivative"):
        dual = torch.autograd.forward_ad.make_dual(torch.arange(16.0), torch.ones(16))
        on_tensors({"x": dual, "kept": kept}, 2.0, shift=0.0)


def test_an_operation_of_jax_on_tensors() -> None:
    case = inputs([5, 33], s=2)
    decode = tsmla_bridge.jax_function(lambda *arrays: tsmla_jax.mla_decode(*arrays, **case.options, return_lse=True))
    want = tsmla_bridge.mla_decode(*case.arrays, **case.options, return_lse=True)
    for a, b in zip(decode(*case.arrays), want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


# ---- order on the device: each of these gives wrong values if one side doesn't wait for the other


def late(tensor: torch.Tensor, value: float) -> None:
    """Set `tensor` at the end of some milliseconds of work on torch's current stream."""
    torch.cuda._sleep(50_000_000)
    tensor.fill_(value)


def slow_in_jax() -> Callable[[jax.Array], jax.Array]:
    """A function of jax that gives its argument again, after milliseconds of products whose result is 1."""
    size = 4096
    operand = jnp.full((size, size), 1.0 / size)

    def function(x: jax.Array) -> jax.Array:
        product = jax.lax.fori_loop(0, 30, lambda _, y: y @ operand, operand)
        return x + product[0, 0] * size - 1.0

    return jax.jit(function)


@pytest.mark.gpu
def test_jax_waits_for_torch() -> None:
    stream = torch.cuda.Stream()
    for i in range(1, 6):
        x = torch.zeros(1 << 16, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            late(x, float(i))
            got = jnp.asarray(tsmla_bridge.to_jax(x)) + 0
        assert float(got.sum()) == i * x.numel()


@pytest.mark.gpu
def test_torch_waits_for_jax() -> None:
    function = slow_in_jax()
    start = jnp.ones(1 << 16)
    function(start).block_until_ready()
    for stream in (torch.cuda.Stream(), torch.cuda.default_stream()):
        with torch.cuda.stream(stream):
            got = tsmla_bridge.to_torch(function(start)).clone()
        stream.synchronize()  # of what torch did alone: the comparison runs on another stream
        torch.testing.assert_close(got, torch.ones_like(got), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_a_tensor_may_be_written_to_again_after_the_call() -> None:
    function = slow_in_jax()
    on_tensors = tsmla_bridge.jax_function(function)
    stream = torch.cuda.Stream()
    for i in range(1, 6):
        x = torch.zeros(1 << 16, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            late(x, float(i))
            got = on_tensors(x)
            x.fill_(-100.0)
            total = got.sum()
        stream.synchronize()
        torch.testing.assert_close(total.cpu(), torch.tensor(float(i * x.numel())), rtol=1e-3, atol=0)


@pytest.mark.gpu
def test_memory_that_torch_gave_up_is_not_reused_too_early() -> None:
    function = slow_in_jax()
    on_tensors = tsmla_bridge.jax_function(function)
    for i in range(1, 6):
        x = torch.full((1 << 16,), float(i), device="cuda")
        got = on_tensors(x)
        del x
        others = [torch.full((1 << 16,), -100.0, device="cuda") for _ in range(8)]
        torch.testing.assert_close(got.mean().cpu(), torch.tensor(float(i)), rtol=1e-3, atol=0)
        del others


@pytest.mark.parametrize("function", [tsmla_bridge.to_jax, tsmla_bridge.to_torch, tsmla_bridge.jax_function])
def test_without_jax_it_says_what_to_install(function: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ImportError, match="need the package jax: pip install jax"):
        function(torch.ones(2))
