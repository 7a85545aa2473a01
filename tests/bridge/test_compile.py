"""The operations under torch.compile, fake tensors, opcheck and export, on a CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tsmla_bridge
from tests.bridge.inputs import inputs
from tsmla_bridge import Workspace
from tsmla_bridge.ops import cache_ops, merge, mla_decode, mla_prefill
from tsmla_bridge.tokenspeed_mla import tokenspeed_mla_decode, tokenspeed_mla_prefill

I32 = torch.int32
CU = torch.tensor([0, 2, 5], dtype=I32)
PREFILL = {"cu_seqlens_q": CU, "cu_seqlens_kv": CU, "max_q_len": 3, "max_kv_len": 3, "softmax_scale": 0.3}


def decode(scale: float | torch.Tensor, **options: Any) -> Callable[..., Any]:
    return lambda *arrays: tsmla_bridge.mla_decode(
        *arrays, softmax_scale=scale, latent_dim=32, return_lse=True, **options
    )


def prefill(q: torch.Tensor, v: torch.Tensor) -> Any:
    return tsmla_bridge.mla_prefill(q, q, v, **PREFILL, k_scale=torch.tensor(0.5), return_lse=True)


def step(
    cache: torch.Tensor, latent: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What an engine compiles: write, attend, write again, gather."""
    slots = torch.arange(2, dtype=I32)
    cache = tsmla_bridge.write_kv_cache(cache, latent * 2, None, slots, kv_scale=2.0)
    q = torch.ones(2, 1, 3, cache.shape[-1])
    out = tsmla_bridge.mla_decode(q, cache, tables, lens, softmax_scale=0.1, latent_dim=32)
    tsmla_bridge.write_kv_cache(cache, latent, None, slots + 2)
    return out, tsmla_bridge.gather_kv_cache(cache, tables, lens * 0, lens, total_len=12, kv_scale=0.5)


def merge_of_sums(*outs: torch.Tensor) -> Any:
    return tsmla_bridge.merge_attention_states(list(outs), [out.sum(-1) for out in outs])


def cases() -> dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]:
    plain, ragged = inputs([5, 20], s=2), inputs([5, 20], q_lens=[1, 2], s=2)
    ragged_options = {"cu_seqlens_q": ragged.options["cu_seqlens_q"], "max_q_len": 2}
    halves = decode(0.1)
    cache, latent = torch.randn(4, 16, 48), torch.randn(2, 48)
    tables, lens = torch.tensor([[0, 1], [2, 3]], dtype=I32), torch.tensor([4, 8], dtype=I32)
    q, v = torch.randn(5, 2, 16), torch.randn(5, 2, 8)
    space = torch.empty(64, dtype=torch.int8)
    return {
        "decode": (decode(0.1), plain.arrays),
        "decode with tensor scales": (decode(torch.tensor(0.1), q_scale=2.0, kv_scale=torch.tensor(3.0)), plain.arrays),
        "decode of a pair": (lambda q, *rest: halves((q[..., :32], q[..., 32:]), *rest), plain.arrays),
        "ragged decode": (decode(0.1, **ragged_options), ragged.arrays),
        "prefill": (prefill, (q, v)),
        "step": (step, (cache, latent, tables, lens)),
        "merge": (merge_of_sums, (torch.randn(3, 2, 8), torch.randn(3, 2, 8))),
        "tokenspeed decode": (
            lambda q, *rest: tokenspeed_mla_decode(q, rest[0], space, 32, 16, *rest[1:], 32, 0.1, return_lse=True),
            plain.arrays,
        ),
        "tokenspeed decode with a window": (
            lambda q, *rest: tokenspeed_mla_decode(q, rest[0], space, 32, 16, *rest[1:], 32, 0.1, window_left=3),
            plain.arrays,
        ),
        "tokenspeed prefill": (
            lambda q, v: tokenspeed_mla_prefill(q.bfloat16(), q.bfloat16(), v.bfloat16(), CU, CU, 3, 2, 0.1),
            (q, v),
        ),
    }


def assert_equal(got: Any, want: Any) -> None:
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, False) for name in cases()), ("decode", True), ("step", True), ("prefill", True)]
)
def test_compiled_whole(name: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    function, arguments = cases()[name]
    kept = [argument.clone() for argument in arguments]
    want = function(*arguments)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert_equal(compiled(*kept), want)
    for a, b in zip(kept, arguments, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())  # what is written in place is written by both


def test_into_the_callers_memory_when_compiled() -> None:
    torch._dynamo.reset()
    case = inputs([5, 20], s=2)
    want = decode(0.1)(*case.arrays)
    workspace = Workspace(256, "cpu")

    def function(out: torch.Tensor, lse: torch.Tensor, *arrays: torch.Tensor) -> Any:
        decode(0.1, out=out, lse=lse, workspace=workspace)(*arrays)
        return out + 1, decode(0.1, workspace=workspace)(*arrays)[0]

    out, lse = torch.zeros_like(want[0]), torch.zeros_like(want[1])
    got = torch.compile(function, fullgraph=True, backend="aot_eager")(out, lse, *case.arrays)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    assert torch.equal(got[0], want[0] + 1) and torch.equal(got[1], want[0])

    def prefill_into(out: torch.Tensor, q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tsmla_bridge.mla_prefill(q, q, v, **PREFILL, out=out) * 2

    q, v = torch.randn(5, 2, 16), torch.randn(5, 2, 8)
    wanted, place = tsmla_bridge.mla_prefill(q, q, v, **PREFILL), torch.zeros(5, 2, 8)
    assert torch.equal(torch.compile(prefill_into, fullgraph=True, backend="aot_eager")(place, q, v), wanted * 2)
    assert torch.equal(place, wanted)


def test_what_eager_calls_refuse_is_refused_when_compiled() -> None:
    torch._dynamo.reset()
    case = inputs([5, 20], s=2)
    lse = torch.zeros(2, 2, case.arrays[0].shape[2])
    options = {"softmax_scale": 0.1, "latent_dim": 32}
    for wrong, said in (({"lse": lse}, "lse: got a place for lse"), ({"return_lse": 1}, "return_lse: got int")):
        for run in (tsmla_bridge.mla_decode, torch.compile(tsmla_bridge.mla_decode, backend="aot_eager")):
            with pytest.raises((ValueError, TypeError), match=said):
                run(*case.arrays, **options, **wrong)


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    function, arguments = cases()["step"]
    kept = [argument.clone() for argument in arguments]
    for a, b in zip(torch.compile(function, fullgraph=True)(*kept), function(*arguments), strict=True):
        torch.testing.assert_close(a, b)


def decode_arguments(**changed: Any) -> tuple[Any, ...]:
    case = inputs([5, 20], s=2)
    given = {"cu_seqlens_q": None, "visible_lens": None, "scales": None, "max_q_len": None} | changed
    optional = (given["cu_seqlens_q"], given["visible_lens"], given["scales"], 0.1, 1.0)
    return (*case.arrays, *optional, 32, given["max_q_len"], True, False, False, None)


def opchecks() -> list[tuple[Any, tuple[Any, ...]]]:
    place, place_lse = torch.empty(2, 2, 2, 32), torch.empty(2, 2, 2)
    q, v = torch.randn(5, 2, 16), torch.randn(5, 2, 8)
    packed = (q, q, v, CU, CU, None, None, None, None, 0.3, 1.0, 3, 3, True, False, False, None)
    cache, tables = torch.randn(4, 16, 48), torch.tensor([[0, 1], [2, 3]], dtype=I32)
    lens, latent = torch.tensor([4, 8], dtype=I32), torch.randn(2, 48)
    decode_into = torch.ops.tsmla.mla_decode_into.default
    return [
        (mla_decode.decode_operator, decode_arguments()),
        (mla_decode.decode_operator, decode_arguments(scales=torch.tensor([0.1, 2.0]))),
        (mla_decode.decode_operator, decode_arguments(visible_lens=torch.tensor([[3, 5], [20, 1]], dtype=I32))),
        (decode_into, (*decode_arguments(), place, place_lse, torch.empty(64, dtype=torch.uint8))),
        (decode_into, (*decode_arguments(), place, None, None)),
        (mla_prefill.OPERATORS.forward, packed),
        (torch.ops.tsmla.mla_prefill_into.default, (*packed, torch.empty(5, 2, 8), torch.empty(5, 2), None)),
        (cache_ops.write_operator, (cache, latent, None, lens, None, 2.0, None)),
        (cache_ops.gather_operator, (cache, tables, lens * 0, lens, 12, torch.tensor(2.0), None, torch.float16, None)),
        (merge.merge_operator, ([torch.randn(3, 2, 8)] * 2, [torch.randn(3, 2)] * 2, None)),
    ]


@pytest.mark.parametrize(("operator", "arguments"), opchecks(), ids=lambda x: getattr(x, "_name", ""))
def test_opcheck(operator: Any, arguments: tuple[Any, ...]) -> None:
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("name", [name for name in cases() if name != "step"])
def test_fake_results_are_shaped_as_real_ones(name: str) -> None:
    function, arguments = cases()[name]
    if "tensor scales" in name or "prefill" in name or "ragged" in name or "tokenspeed" in name:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
    else:
        mode = FakeTensorMode()
    with mode:
        got = function(*(mode.from_tensor(argument) for argument in arguments))
    want = function(*arguments)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()


def test_meta_tensors_have_shapes_alone() -> None:
    q = torch.empty(2, 1, 4, 576, dtype=torch.float8_e4m3fn, device="meta")
    cache = torch.empty(9, 64, 576, dtype=torch.float8_e4m3fn, device="meta")
    tables, lens = torch.empty(2, 3, dtype=I32, device="meta"), torch.empty(2, dtype=I32, device="meta")
    out = tsmla_bridge.mla_decode(q, cache, tables, lens, softmax_scale=0.1)
    assert out.shape == (2, 1, 4, 512) and out.dtype == torch.bfloat16 and out.is_meta


def test_the_operator_of_decode_has_no_derivative() -> None:
    operator, arguments = opchecks()[0]
    q = arguments[0].clone().requires_grad_()
    out, _ = operator(q, *arguments[1:])
    with pytest.raises(NotImplementedError, match="mla_decode has no derivative in this implementation"):
        out.sum().backward()


def test_exported() -> None:
    case = inputs([5, 20], s=2)

    class Module(torch.nn.Module):
        def forward(self, *arrays: torch.Tensor) -> Any:
            return decode(0.1)(*arrays)

    exported = torch.export.export(Module(), case.arrays)
    assert_equal(exported.module()(*case.arrays), decode(0.1)(*case.arrays))


def test_every_operator_comes_with_the_package(child_environment: dict[str, str]) -> None:
    """An exported program calls operators that its process may never have named."""
    code = (
        "import torch, tsmla_bridge.ops; names = [n for n, m in tsmla_bridge._MODULES.items() if m.startswith('ops.')];"
        "print(*(name for name in names if not hasattr(torch.ops.tsmla, name)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=child_environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_the_report_is_importable_first(child_environment: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-c", "import tsmla_bridge.report"], env=child_environment, check=True)
