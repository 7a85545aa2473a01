"""sparse_mla on torch tensors: by definition on a CPU, and as a launch on the stand-in for the GPU."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tsmla_bridge
import tsmla_jax
from tests.bridge.inputs import as_torch, assert_close, said
from tests.emulator.launcher import Gpu
from tests.gpu.small_grid import numbers
from tests.oracles import sparse_inputs, sparse_refusals
from tests.oracles.sparse_inputs import LAYOUTS, Call
from tsmla_bridge.ops import plans, sparse_mla
from tsmla_bridge.runtime.workspace import sparse_layout
from tsmla_kernels.sm90.latent import shape as latent_shape
from tsmla_kernels.sm90.sparse import config as sm90_sparse
from tsmla_kernels.sm90.sparse.record import SPARSE_MLA, Serving

BF16 = 2**-7
OPTIONS = ("window", "page_size", "page_span", "compressed_page_size", "compressed_page_span")


def tensors_of(case: Call) -> dict[str, torch.Tensor]:
    return {name: numbers(array) for name, array in case.arrays.items()}


def attend(case: Call, **changed: Any) -> Any:
    """The case with lse, some of its arguments changed."""
    return tsmla_bridge.sparse_mla(**(tensors_of(case) | case.options | {"return_lse": True} | changed))


def assert_right(got: Any, case: Call) -> None:
    for result, want, tolerance in zip(got, case.want(), (BF16, 1e-4), strict=True):
        assert_close(result, want, tolerance)


CASES: dict[str, dict[str, Any]] = {
    **{layout: {"layout": layout} for layout in LAYOUTS},
    "two caches": {"layout": "v4", "window": 4, "sinks": True},
    "two plain caches": {"layout": "plain", "window": 4, "sinks": True, "dtype": "float16"},
    "plain bf16": {"layout": "plain", "kv_dtype": "bfloat16", "window": 8},
    "plain bf16, 128 heads": {"layout": "plain", "kv_dtype": "bfloat16", "heads": 128},
    "pages with gaps": {"layout": "v32", "gap": 3},
    "V4 slots that were remapped": {"layout": "v4", "gap": 1, "window": 8},
    "without lengths": {"layout": "v32", "lengths": False, "heads": 7, "selected": 5},
    "V3.2 without rope": {"layout": "plain", "width": 512},
}


@pytest.mark.parametrize("name", CASES)
def test_by_definition(name: str) -> None:
    case = sparse_inputs.call(**CASES[name])
    assert_right(attend(case), case)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_launch(gpu: Gpu, name: str, batch_invariant: bool) -> None:
    case = sparse_inputs.call(**CASES[name])
    for _ in range(2):
        assert_right(attend(case, batch_invariant=batch_invariant), case)
    assert gpu.loads == 1 and len(gpu.launches) == 2


@pytest.mark.parametrize("layout", ["v32", "plain"])
def test_queries_of_e4m3(gpu: Gpu, layout: str) -> None:
    case = sparse_inputs.call(layout, dtype="float8_e4m3fn", sinks=True)
    for implementation in ("reference", "cute", None):
        got = attend(case, implementation=implementation)
        assert got[0].dtype == torch.bfloat16
        assert_right(got, case)
    assert len(gpu.launches) == 2 and gpu.operands["q"].dtype == torch.float8_e4m3fn


def test_wide_types_by_definition() -> None:
    case = sparse_inputs.call("plain", dtype="float64", sinks=True)
    scaled = {name: torch.tensor(0.5 * case.options[name]) for name in ("softmax_scale", "kv_scale")}
    got = attend(case, q_scale=2.0, **scaled, kv_cache=tensors_of(case)["kv_cache"].double() * 2)
    for result, want in zip(got, case.want(), strict=True):
        assert result.dtype == torch.float64
        assert_close(result, want, 1e-6)


def test_nothing_is_copied(gpu: Gpu) -> None:
    case = sparse_inputs.call("v4", window=4, sinks=True)
    given = tensors_of(case)
    out, _ = attend(case, **given)
    for name, array in given.items():
        assert gpu.operands[name].data_ptr() == array.data_ptr(), name
    assert gpu.operands["out"].data_ptr() == out.data_ptr()
    assert gpu.operands["scales"].tolist() == pytest.approx([case.options["softmax_scale"], 1, 1])


SPLIT = {"layout": "plain", "kv_dtype": "bfloat16", "heads": 128, "tokens": 5}
"""A call whose kernel reads a query in two tensors."""


def two_tensors(q: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The query's two parts as tensors of their own: dense, with rope columns of wider rows, and with heads in front of
    tokens in memory."""
    latent, rope = q[..., :512].clone(), q[..., 512:]
    wide = torch.full((*rope.shape[:-1], 192), torch.nan, dtype=rope.dtype)
    wide[..., 128:] = rope
    heads_first = latent.movedim(1, 0).contiguous().movedim(0, 1)
    return {"dense": (latent, rope.clone()), "wide": (latent, wide[..., 128:]), "first": (heads_first, wide[..., 128:])}


@pytest.mark.parametrize("which", ["dense", "wide", "first"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_queries_in_two_tensors_are_not_copied(gpu: Gpu, which: str, batch_invariant: bool) -> None:
    case = sparse_inputs.call(**SPLIT)
    q = tensors_of(case)["q"]
    latent, rope = two_tensors(q)[which]
    for _ in range(2):  # the second call finds the plan of the first
        assert_right(attend(case, q=(latent, rope), batch_invariant=batch_invariant), case)
        assert gpu.operands["q"].data_ptr() == latent.data_ptr()
        assert gpu.operands["q_rope"].data_ptr() == rope.data_ptr()
        assert gpu.operands["q_rope"].shape[1] == (64 if which == "dense" else 192)
        assert gpu.operands["q"].dim() == (3 if which == "first" else 2)
        assert_right(attend(case, batch_invariant=batch_invariant), case)  # one tensor, by a plan of its own
        assert "q_rope" not in gpu.operands
    attend(case, q=(q[..., :512], q[..., 512:]), batch_invariant=batch_invariant)  # columns of one tensor
    assert gpu.operands["q"].data_ptr() == q.data_ptr() and gpu.loads == 2


@pytest.mark.parametrize(
    "changed",
    [{"layout": "v32", "kv_dtype": None}, {"heads": 16}, {"tokens": 1}, {"heads": 16, "tokens": 40}],
    ids=str,
)
def test_a_pair_is_joined_for_other_kernels(gpu: Gpu, changed: dict[str, Any]) -> None:
    case = sparse_inputs.call(**{name: value for name, value in (SPLIT | changed).items() if value is not None})
    for pair in two_tensors(tensors_of(case)["q"]).values():
        assert_right(attend(case, q=pair), case)
        assert "q_rope" not in (gpu.operands if gpu.launches else {})


def test_a_pair_of_no_tokens(gpu: Gpu) -> None:
    case = sparse_inputs.call(**SPLIT)
    none = {name: tensors_of(case)[name][:0] for name in ("indices", "lengths")}
    for latent, rope in two_tensors(tensors_of(case)["q"]).values():
        out, lse = attend(case, q=(latent[:0], rope[:0]), **none)
        assert (out.shape, lse.shape) == ((0, 128, 512), (0, 128)) and not gpu.launches


def test_launches_of_some_tokens_join_what_has_heads_in_front(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_shape, "launches", lambda shape, tokens, selected: [(0, 3), (3, tokens)])
    case = sparse_inputs.call(**SPLIT)
    for which, pair in two_tensors(tensors_of(case)["q"]).items():
        gpu.launches.clear()
        assert_right(attend(case, q=pair), case)
        assert ["q_rope" in seen for _, seen in gpu.launches] == [which != "first"] * 2


def test_a_pair_by_definition_and_as_an_operator() -> None:
    case = sparse_inputs.call(**SPLIT)
    pair = two_tensors(tensors_of(case)["q"])["first"]
    assert_right(attend(case, q=pair), case)
    given = tensors_of(case) | case.options | {"return_lse": True}

    def run(*parts: torch.Tensor) -> Any:
        return tsmla_bridge.sparse_mla(**(given | {"q": parts}))

    assert_right(torch.compile(run, backend="eager", fullgraph=True)(*pair), case)
    latent, rope = (part.clone().requires_grad_() for part in pair)
    attend(case, q=(latent, rope), return_lse=False).float().sum().backward()
    assert latent.grad is not None and rope.grad is not None


def test_a_pair_that_is_no_query_is_refused(gpu: Gpu) -> None:
    case = sparse_inputs.call(**SPLIT)
    latent, rope = two_tensors(tensors_of(case)["q"])["dense"]
    for pair, message in (
        ((rope, latent), "q: got a pair of 64 and 512 columns; legal: 512 latent ones"),
        ((latent[:, ::2], rope[:, ::2]), r"q: got a pair .* torch\.cat\(q, -1\) makes one of them"),
        ((latent, rope.half()), "q: got a pair of dtypes bfloat16 and float16"),
        ((latent, rope, rope), "q: got a tuple of 3; legal: one tensor, or the pair"),
        ((latent, rope[:3]), "q: got a pair of shapes"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(case, q=pair)
    assert not gpu.launches


def test_calls_like_the_latest_and_others(gpu: Gpu) -> None:
    first = sparse_inputs.call("v32")
    others = {
        "no lengths": sparse_inputs.call("v32", lengths=False),
        "sinks": sparse_inputs.call("v32", sinks=True),
        "sinks without lengths": sparse_inputs.call("v32", lengths=False, sinks=True),
        "more tokens": sparse_inputs.call("v32", tokens=9),
        "another dtype": sparse_inputs.call("v32", dtype="float16"),
        "another layout": sparse_inputs.call("v4"),
        "another batch": sparse_inputs.call("v32", seed=1),
    }
    for other in others.values():
        for case in (first, other, first):
            assert_right(attend(case), case)


def test_scales_on_the_device_and_sinks_of_another_dtype(gpu: Gpu) -> None:
    case = sparse_inputs.call("plain", window=4, sinks=True)
    given = {name: torch.tensor(value) for name, value in case.options.items() if "scale" in name}
    sinks = tensors_of(case)["sinks"].double()
    assert_right(attend(case, **given, sinks=sinks), case)
    got = attend(case, softmax_scale=case.options["softmax_scale"] / 2, q_scale=torch.tensor(2.0))
    assert_right(got, case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 4])
def test_a_layer_of_a_pool(gpu: Gpu, layout: str, window: int | None) -> None:
    case = sparse_inputs.call(layout, window=window, lengths=False)
    given = tensors_of(case)
    changed = {}
    for name in [name for name in given if name.endswith("kv_cache")]:
        pool = torch.full((len(given[name]), 3, *given[name].shape[1:]), 0x7F, dtype=torch.uint8)
        pool[:, 1] = given[name].view(torch.uint8)
        changed[name] = pool.view(given[name].dtype)[:, 1]
    given["indices"][0, 0] = 2**31 - 1
    assert_right(attend(case, **(given | changed)), replaced(case, given["indices"]))
    for name, view in changed.items():
        operand = gpu.operands[name]
        end = view.untyped_storage().data_ptr() + view.untyped_storage().nbytes()
        assert operand.data_ptr() == view.data_ptr()
        assert operand.data_ptr() + operand.numel() <= end


def replaced(case: Call, indices: torch.Tensor) -> Call:
    return Call(case.arrays | {"indices": indices.numpy()}, case.options, case.caches)


def test_no_stride_is_ignored(gpu: Gpu) -> None:
    case = sparse_inputs.call("v32", sinks=True)
    for name, array in tensors_of(case).items():
        wrong = torch.stack((array, array), -1)[..., 0]
        with pytest.raises(ValueError, match=f"{name}: got shape .* with strides"):
            attend(case, **{name: wrong})
    assert not gpu.launches


@pytest.mark.parametrize(("tokens", "selected"), [(0, 4), (3, 0)])
def test_nothing_to_attend_to(gpu: Gpu, tokens: int, selected: int) -> None:
    q, indices = torch.ones(tokens, 3, 576).bfloat16(), torch.ones(tokens, selected, dtype=torch.int32)
    cache = torch.zeros(2, 4, 656, dtype=torch.uint8)
    out, lse = tsmla_bridge.sparse_mla(q, cache, indices, softmax_scale=1.0, return_lse=True)
    assert out.shape == (tokens, 3, 512) and not out.any() and torch.isneginf(lse).all()
    assert not gpu.launches


# ---- memory


def test_with_out_and_a_workspace_nothing_is_allocated(gpu: Gpu) -> None:
    case = sparse_inputs.call("v4", window=4, sinks=True)
    given = tensors_of(case)
    size = tsmla_bridge.sparse_workspace_size(max_tokens=8, num_heads=4, device="cuda:0")
    workspace = tsmla_bridge.Workspace(size, "cpu")
    want = attend(case, **given, workspace=workspace)
    out, lse = torch.full_like(want[0], torch.nan), torch.full_like(want[1], torch.nan)
    gpu.runs = False
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_strided", "zeros", "full", "linspace", "stack"):
            patch.setattr(torch, name, None)
        for name in ("new_tensor", "borrow"):
            patch.setattr(tsmla_bridge.runtime.devices, name, None)
        attend(case, **given, workspace=workspace, out=out, lse=lse)
    addresses = {name: operand.data_ptr() for name, operand in gpu.operands.items()}
    inside = range(workspace.buffer.data_ptr(), workspace.buffer.data_ptr() + workspace.size)
    assert all(addresses[name] in inside for name in ("partial_out", "partial_lse", "split_info"))
    assert (addresses["out"], addresses["lse"]) == (out.data_ptr(), lse.data_ptr())


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_workspace_is_enough_for_what_it_is_sized_for(gpu: Gpu, batch_invariant: bool) -> None:
    size = tsmla_bridge.sparse_workspace_size(
        max_tokens=9, num_heads=130, max_selected=700, batch_invariant=batch_invariant, device="cuda:0"
    )
    workspace = tsmla_bridge.Workspace(size, "cpu")
    for tokens, selected in ((9, 700), (1, 12), (5, 300)):
        case = sparse_inputs.call("v32", tokens=tokens, selected=selected, heads=130, pages=20, page_size=64)
        assert_right(attend(case, workspace=workspace, batch_invariant=batch_invariant), case)
    attend(case, workspace=workspace, batch_invariant=batch_invariant, return_lse=False)
    with pytest.raises(ValueError, match=r"workspace: got 64 bytes; this call of sparse_mla needs \d+"):
        attend(case, workspace=tsmla_bridge.Workspace(64, "cpu"))


@pytest.mark.parametrize("name", ["two caches", "without lengths"])
def test_many_invariant_tokens_take_several_launches(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = sparse_inputs.call(**CASES[name])
    want = attend(case, batch_invariant=True)
    assert len(gpu.launches) == 1
    for kept in (plans._plans, plans.latest_plans):
        kept.clear()
    monkeypatch.setattr(latent_shape, "INVARIANT_WORKSPACE", 3 * 64 * (512 * 4 + 12))
    heads = case.arrays["q"].shape[1]
    size = tsmla_bridge.sparse_workspace_size(
        max_tokens=8, num_heads=heads, max_selected=64, batch_invariant=True, device="cuda:0"
    )
    for options in ({}, {"workspace": tsmla_bridge.Workspace(size, "cpu")}):
        gpu.launches.clear()
        for got, whole in zip(attend(case, batch_invariant=True, **options), want, strict=True):
            assert torch.equal(got, whole)
        assert [len(seen["indices"]) for _, seen in gpu.launches] == [3, 3, 2]
    for kept in (plans._plans, plans.latest_plans):
        kept.clear()


def test_a_workspace_for_many_columns_serves_calls_of_fewer(gpu: Gpu) -> None:
    """Fewer columns are fewer slots a token, and may be more of them in a launch."""
    sizes = {"max_tokens": 5000, "num_heads": 128, "batch_invariant": True, "device": "cuda:0"}
    enough = tsmla_bridge.sparse_workspace_size(max_selected=2048, **sizes)
    sms = tsmla_bridge.runtime.devices.num_sms(0)
    assert enough < 1.1 * latent_shape.INVARIANT_WORKSPACE
    for tile_rows, selected in itertools.product((64, 32), (1, 512, 513, 700, 1500, 2048)):
        config = sm90_sparse.SparseConfig("bfloat16", 128, tile_rows=tile_rows, batch_invariant=True)
        assert sparse_layout(Serving(SPARSE_MLA, config), sms, 5000, selected).size <= enough


def test_a_workspace_serves_rows_of_any_kind(gpu: Gpu) -> None:
    """33 heads are one row tile or two, whose partial results take twice the room of one."""
    for options in ({"kv_dtype": "bfloat16"}, {}):
        case = sparse_inputs.call("plain", heads=33, selected=1500, **options)
        sizes = {"max_tokens": 8, "num_heads": 33, "max_selected": 1500}
        size = tsmla_bridge.sparse_workspace_size(**sizes, batch_invariant=True, device="cuda:0")
        memory = tsmla_bridge.Workspace(size, "cpu")
        assert_right(attend(case, batch_invariant=True, workspace=memory), case)


def test_a_workspace_serves_tokens_that_share_gathers(gpu: Gpu) -> None:
    for rows, heads in ({"layout": "v32"}, 8), ({"layout": "plain", "kv_dtype": "bfloat16"}, 16):
        case = sparse_inputs.call(**rows, tokens=23, heads=heads, selected=70)
        size = tsmla_bridge.sparse_workspace_size(max_tokens=23, num_heads=heads, max_selected=70, device="cuda:0")
        memory = tsmla_bridge.Workspace(size, "cpu")
        assert_right(attend(case, form="union", workspace=memory), case)
        assert "union_slots" in gpu.operands
        assert_right(attend(case, form="direct", workspace=memory), case)
        assert "union_slots" not in gpu.operands


def test_sizes_choose_the_form(gpu: Gpu) -> None:
    """The kernel is the stand-in: any slots will do."""
    gpu.runs = False
    q, slots = torch.zeros(2048, 16, 576).bfloat16(), torch.zeros(2048, 4, dtype=torch.int32)
    for options, union in (({}, True), ({"tokens_per_request": 1}, False), ({"form": "direct"}, False)):
        tsmla_bridge.sparse_mla(q, torch.zeros(2, 4, 656, dtype=torch.uint8), slots, softmax_scale=1.0, **options)
        assert ("union_slots" in gpu.operands) == union
    with pytest.raises(NotImplementedError, match="num_heads is 4; tokens share gathers with 8, 16, 32 heads"):
        attend(sparse_inputs.call("v32"), form="union")


# ---- what is refused


@pytest.mark.parametrize(("change", "message"), sparse_refusals.REFUSED)
def test_both_front_ends_say_the_same(change: dict[str, Any], message: str) -> None:
    given = sparse_refusals.ARGUMENTS | change
    got = said(ValueError, tsmla_bridge.sparse_mla, {name: as_torch(value) for name, value in given.items()})
    assert got == said(ValueError, tsmla_jax.sparse_mla, given)


def test_types_are_checked_after_legal_calls_too(gpu: Gpu) -> None:
    case = sparse_inputs.call("v32")
    attend(case)
    for changed, message in (
        ({"softmax_scale": None}, "softmax_scale: got NoneType"),
        ({"kv_scale": "1"}, "kv_scale: got str"),
        ({"return_lse": None}, "return_lse: got NoneType"),
        ({"q": [1.0]}, "q: got list"),
        ({"out": 3}, "out: got int"),
        ({"latent_dim": 512.0}, "latent_dim: got float"),
        ({"batch_invariant": 0}, "batch_invariant: got int"),
        ({"page_size": 8.0}, "page_size: got float"),
    ):
        with pytest.raises(TypeError, match=message):
            attend(case, **changed)
    with pytest.raises(ValueError, match="kv_scale: got a scale for packed rows"):
        attend(case, kv_scale=2.0)
    with pytest.raises(ValueError, match="indices: got a tensor on meta; it must be on q's device, cpu"):
        attend(case, indices=tensors_of(case)["indices"].to("meta"))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"layout": "v32", "dtype": "float32"}, r"q\.dtype is float32; the sm_90 sparse kernel takes"),
        ({"layout": "plain", "kv_dtype": "float32"}, "kv_cache.dtype is float32; the sm_90 sparse kernel takes packed"),
        ({"layout": "plain", "width": 640}, "keys are 640 wide; the sm_90 sparse kernel takes 512 or 576"),
    ],
)
def test_what_no_kernel_serves_is_refused_on_a_gpu(gpu: Gpu, case: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=f"sparse_mla: implementation='cute' can't run this call: .*{reason}"):
        attend(sparse_inputs.call(**case))
    with pytest.raises(ValueError, match="implementation: got 'cuda'; legal: None, 'cute', 'reference'"):
        attend(sparse_inputs.call("v32"), implementation="cuda")


def test_a_kernel_named_for_a_cpu_gives_the_reason() -> None:
    with pytest.raises(NotImplementedError, match="sparse_mla: implementation='cute' can't run this call: the tensors"):
        attend(sparse_inputs.call("v32"), implementation="cute")


def test_data_is_checked_when_asked(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    case = sparse_inputs.call("v32", lengths=False)
    assert_right(attend(case), case)
    indices = tensors_of(case)["indices"]
    indices[2, 3] = 40
    with pytest.raises(ValueError, match="indices: token 2 selects slot 40 in column 3, which is active; legal: -1"):
        attend(case, indices=indices)


# ---- torch.compile, fake tensors, derivatives


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["v32", "two caches", "two plain caches"])
def test_compiled_whole(name: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    case = sparse_inputs.call(**CASES[name])
    scale = torch.tensor(0.5)

    def step(given: dict[str, torch.Tensor]) -> Any:
        options = case.options | {"return_lse": True}
        plain = tsmla_bridge.sparse_mla(**(given | options))
        scaled = tsmla_bridge.sparse_mla(**(given | options | {"q_scale": scale}))
        return *plain, *scaled

    want = step(tensors_of(case))
    got = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)(tensors_of(case))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_into_the_callers_memory_when_compiled() -> None:
    torch._dynamo.reset()
    case = sparse_inputs.call("v32")
    want = attend(case)
    out, lse = torch.zeros_like(want[0]), torch.zeros_like(want[1])

    def step(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return tsmla_bridge.sparse_mla(**given, **case.options, return_lse=True, out=out, lse=lse)[0] + 1

    got = torch.compile(step, fullgraph=True, backend="aot_eager")(tensors_of(case))
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1]) and torch.equal(got, want[0] + 1)


def operator_arguments(name: str) -> tuple[Any, ...]:
    case = sparse_inputs.call(**CASES[name])
    given = tensors_of(case)
    greatest = name != "v32"
    options = (512, *(case.options.get(option) for option in OPTIONS), False, "auto", None, False, greatest, None)
    inputs = (given.get(field) for field in sparse_mla.SparseInputs._fields)
    scales = (None, [0.1, 1.0, 1.0]) if name == "v32" else (torch.tensor([0.1, 1.0, 1.0]), [])
    return (*inputs, *scales, *options)


@pytest.mark.parametrize("name", ["v32", "two caches"])
def test_opcheck(name: str) -> None:
    arguments = operator_arguments(name)
    torch.library.opcheck(sparse_mla.sparse_operator, arguments)
    q = arguments[0]
    out, lse = torch.empty(*q.shape[:2], 512, dtype=q.dtype), torch.empty(q.shape[:2])
    torch.library.opcheck(torch.ops.tsmla.sparse_mla_into.default, (*arguments, out, lse, None, torch.empty_like(lse)))


@pytest.mark.parametrize("name", ["v32", "two caches", "plain bf16, 128 heads", "without lengths"])
def test_greatest_logits(gpu: Gpu, name: str) -> None:
    """With lse and alone, into the caller's memory, by several launches and by definition."""
    case = sparse_inputs.call(**CASES[name])
    options = case.options | {"return_lse": True, "return_max_logits": True}
    want = jax.jit(functools.partial(tsmla_jax.sparse_mla, **options, implementation="reference"))(**case.arrays)
    for more in ({}, {"batch_invariant": True}, {"implementation": "reference"}):
        got = attend(case, return_max_logits=True, **more)
        for result, expected, tolerance in zip(got, want, (BF16, 1e-4, 1e-4), strict=True):
            assert_close(result, expected, tolerance)
        if "implementation" not in more:
            assert gpu.operands["max_logits"].data_ptr() == got[2].data_ptr()
    out, greatest = attend(case, return_lse=False, return_max_logits=True)
    results = attend(case, out=torch.empty_like(out), return_max_logits=True)
    assert torch.equal(results[0], out) and torch.equal(results[2], greatest)
    none = {name: x[:0] if name in ("q", "indices", "lengths") else x for name, x in tensors_of(case).items()}
    assert attend(case, **none, return_max_logits=True)[2].shape == (0, greatest.shape[1])


def test_what_has_no_greatest_logits(gpu: Gpu) -> None:
    case = sparse_inputs.call("v32", dtype="float8_e4m3fn")
    with pytest.raises(NotImplementedError, match="return_max_logits is True with q of float8_e4m3fn"):
        attend(case, return_max_logits=True)
    with pytest.raises(TypeError, match="return_max_logits: got int; legal: True or False"):
        attend(case, return_max_logits=1)


def test_fake_results_are_shaped_as_real_ones() -> None:
    case = sparse_inputs.call("v4", window=4, sinks=True)
    want = attend(case)
    with FakeTensorMode() as mode:
        got = attend(case, **{name: mode.from_tensor(x) for name, x in tensors_of(case).items()})
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()


def test_derivatives() -> None:
    arguments = operator_arguments("v32")
    out, *_ = sparse_mla.sparse_operator(arguments[0].requires_grad_(), *arguments[1:])
    with pytest.raises(NotImplementedError, match="sparse_mla has no derivative in this implementation"):
        out.sum().backward()
    case = sparse_inputs.call("v32", sinks=True, dtype="float32", lengths=False, tokens=2, selected=6)
    given = tensors_of(case)
    leaves = {name: given[name].requires_grad_() for name in ("q", "sinks")}
    out, lse = attend(case, **given)
    (out.sum() + lse.nan_to_num(neginf=0).sum()).backward()

    def loss(leaves: dict[str, jax.Array]) -> jax.Array:
        options = case.options | {"implementation": "reference", "return_lse": True}
        out, lse = tsmla_jax.sparse_mla(**(case.arrays | leaves), **options)
        return out.sum() + jax.numpy.nan_to_num(lse, neginf=0).sum()

    want = jax.jit(jax.grad(loss))({name: case.arrays[name] for name in leaves})
    for name, leaf in leaves.items():
        np.testing.assert_allclose(leaf.grad, want[name], rtol=1e-4, atol=1e-4)


def test_a_scale_byte_of_255_is_nan() -> None:
    """With a finite key beside it. As an infinity it would take weight 0 where the query is negative."""
    cache = torch.zeros(1, 37440, dtype=torch.uint8)
    cache[0, : 2 * 576] = 0x38  # e4m3's 1.0
    scales = cache[0, 64 * 576 :].view(-1, 8)
    scales[:2] = 127
    scales[1, 3] = 255
    q = torch.full((1, 1, 512), -1.0)
    slots = torch.tensor([[0, 1]], dtype=torch.int32)
    arguments = {"softmax_scale": 0.1, "return_lse": True}
    out, lse = tsmla_bridge.sparse_mla(q, cache, slots, **arguments)
    assert out.isnan().all() and lse.isnan().all()
    want = tsmla_jax.sparse_mla(*(x.numpy() for x in (q, cache, slots)), **arguments)
    assert all(np.isnan(x).all() for x in want)


@pytest.mark.parametrize("layout", ["v32", "v4"])
@pytest.mark.parametrize("heads", [8, 16, 40, 64, 96, 128, 256])
@pytest.mark.sampled(3)
def test_few_numbers_of_tokens_have_every_kernel_of_a_kind(layout: str, heads: int) -> None:
    """An engine loads the kernels of WARM_TOKENS before the first request, whatever numbers of tokens follow."""
    for selected, window in itertools.product((128, 256, 640, 2048), ("", "128") if layout == "v4" else ("",)):
        kind = {"num_heads": heads, "layout": layout, "num_selected": selected, "window": window, "lengths": "true"}

        def served(tokens: int, kind: dict[str, Any] = kind) -> Any:
            named = {**kind, "num_tokens": tokens, "tokens_per_request": 1}
            return SPARSE_MLA.from_options({name: str(value) for name, value in named.items()})

        wanted = {served(tokens) for tokens in (*range(1, 1000), 1 << 14)}
        assert wanted == {served(tokens) for tokens in sparse_mla.WARM_TOKENS}
