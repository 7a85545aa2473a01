"""mla_decode from torch tensors to a launch, on the stand-in for the GPU: which addresses and sizes the kernel gets."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tsmla_bridge
from tests.bridge.inputs import Inputs, assert_right, attend, served
from tests.emulator.launcher import Gpu
from tsmla_bridge import operators
from tsmla_bridge.ops import mla_decode, plans
from tsmla_bridge.runtime import devices, tensors
from tsmla_kernels import contract
from tsmla_kernels.sm90.decode import config as sm90_decode
from tsmla_kernels.sm90.latent import shape as latent_shape

POISON = 2**31 - 1


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[contract.DecodeSpec]:
    """The spec of each call whose arguments were checked, for it was unlike those before."""
    specs: list[contract.DecodeSpec] = []
    make = contract.decode_spec

    @functools.wraps(make)
    def kept(**given: Any) -> contract.DecodeSpec:
        specs.append(make(**given))
        return specs[-1]

    monkeypatch.setattr(contract, "decode_spec", kept)
    return specs


@pytest.mark.parametrize(
    "shape",
    [
        {"seq_lens": [5, 33, 0, 16]},
        {"seq_lens": [5, 2, 0, 40], "s": 4},
        {"seq_lens": [5, 20], "s": 24, "heads": 4},
        {"seq_lens": [9, 3, 20], "q_lens": [2, 0, 3], "s": 3, "padding_rows": 2},
        {"seq_lens": [40, 7], "page_size": 32, "q_dtype": "float16", "kv_dtype": "float16", "rope_dim": 0},
        {"seq_lens": [40, 7, 0], "kv_dtype": "float8_e4m3fn"},
        {"seq_lens": [40, 7], "s": 2, "q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn"},
    ],
)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_decode(gpu: Gpu, shape: dict[str, Any], batch_invariant: bool) -> None:
    case = served(**shape)
    assert_right(attend(case, batch_invariant=batch_invariant, kv_scale=2.0), case, kv_scale=2.0)
    ((stream, _),) = gpu.launches
    assert stream == 0


def test_nothing_is_copied(gpu: Gpu) -> None:
    case = served([5, 33])
    out, _ = attend(case)
    for name, tensor in case.named.items():
        assert gpu.operands[name].data_ptr() == tensor.data_ptr(), name
    assert gpu.operands["out"].data_ptr() == out.data_ptr()


# ---- plans: found again, and not mistaken for another


def test_a_plan_serves_all_calls_of_its_shapes(gpu: Gpu, described: list[contract.DecodeSpec]) -> None:
    for seed in range(3):
        case = served([5, 33], seed=seed)
        assert_right(attend(case), case)
    assert len(described) == 1 and gpu.loads == 1
    attend(served([5, 33, 7]))
    attend(served([5, 33]))
    assert len(described) == 2 and gpu.loads == 1  # another batch: the same kernel


def test_a_plan_holds_no_value_of_a_call(gpu: Gpu, described: list[contract.DecodeSpec]) -> None:
    first, second = served([5, 33]), served([40, 7], seed=1)
    attend(first)
    cache = torch.zeros(len(first.kv_cache), *second.kv_cache.shape[1:], dtype=second.kv_cache.dtype)
    cache[: len(second.kv_cache)] = second.kv_cache  # as many pages as the first has
    for scale in (0.3, torch.tensor(0.1)):
        got = attend(second, kv_cache=cache, softmax_scale=scale, kv_scale=2.0)
        assert_right(got, second, scale=float(scale), kv_scale=2.0)
    assert len(described) == 1


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("visible", [False, True])
@pytest.mark.parametrize("pair", [False, True])
def test_a_call_like_the_latest_is_looked_up_by_its_options_alone(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, pair: bool, visible: bool, ragged: bool
) -> None:
    case = served([5, 33], s=2, q_lens=[2, 1] if ragged else None, heads=4)
    changed: dict[str, Any] = {"implementation": "cute"}
    if pair:
        changed["q"] = split_queries(case)["dense"]
    if visible:
        changed["visible_lens"] = torch.full(case.q.shape[:-2], 3, dtype=torch.int32)
    attend(case, **changed)
    monkeypatch.setattr(mla_decode, "plan_for", None)
    attend(case, **changed)
    assert len(gpu.launches) == 2


def test_plans_do_not_pile_up(gpu: Gpu, described: list[contract.DecodeSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_PLANS", 2)
    cases = [served([5] * batch) for batch in (1, 2, 3)]
    for case, batch_invariant in zip((*cases, cases[0]), (True, False, False, False), strict=True):
        assert_right(attend(case, batch_invariant=batch_invariant), case)
    assert [spec.batch for spec in described] == [1, 2, 3, 1]  # the third drops the others
    assert len(plans._plans) == 2 and len(plans.latest_plans) == 1


def test_without_torchs_guard_plans_are_found_too(
    gpu: Gpu, described: list[contract.DecodeSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "TensorGuards", None)
    case = served([5, 33])
    for _ in range(2):
        assert_right(attend(case), case)
    assert len(described) == 1


def views(case: Inputs) -> dict[str, dict[str, Any]]:
    """Arguments that hold the case's values in other memory, poisoned around them, or under another shape."""
    q, cache, tables, _ = case.arrays
    pool = torch.full((len(cache), 3, *cache.shape[1:]), torch.nan, dtype=cache.dtype)
    pool[:, 2] = cache
    behind = torch.cat((torch.full_like(cache, torch.nan), cache))[len(cache) :]
    wide = torch.full((len(tables) + 1, tables.shape[1] + 3), POISON, dtype=torch.int32)
    wide[:-1, :-3] = tables
    return {
        "head axis": {"kv_cache": cache[:, None]},
        "layer of a pool": {"kv_cache": pool[:, 2]},
        "range of pages": {"kv_cache": behind},
        "the first columns of a table": {"block_tables": wide[:-1, :-3]},
        "the halves of q": {"q": (q[..., :256], q[..., 256:])},
    }


def _unlike(case: Inputs) -> dict[str, tuple[Inputs | str, dict[str, Any]]]:
    """Arguments that differ from the case's in one thing, with what they must give: a case's results, or an error."""
    q, _, tables, lens = case.arrays
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
    fewer, half = served([33], seed=1), served([5, 33], q_dtype="float16", kv_dtype="float16")
    small = served([5, 33], kv_dtype="float8_e4m3fn")
    return {
        "fewer requests": (fewer, fewer.named),
        "ragged": (case, {"q": q[:, 0], "cu_seqlens_q": offsets, "max_q_len": 1}),
        "dtypes": (half, half.named),
        "the cache's dtype": (small, small.named),
        **{name: (case, changed) for name, changed in views(case).items()},
        "q's strides": ("q: got shape", {"q": torch.cat((q, q), -1)[..., :320]}),
        "q's dtype": ("q.dtype|kv_cache", {"q": q.half()}),
        "one dtype of lengths": ("seq_lens", {"seq_lens": lens.long()}),
        "one device": ("on meta; it must be on q's device", {"seq_lens": lens.to("meta")}),
        "no tensor": ("seq_lens", {"seq_lens": lens.tolist()}),
        "offsets without a bound": ("q: got shape .* because cu_seqlens_q is given", {"cu_seqlens_q": offsets}),
        "the latent's width": ("latent_dim", {"latent_dim": 320 + 1}),
        "an option without a hash": ("implementation", {"implementation": ["cute"]}),
        "a table for more requests": ("block_tables", {"block_tables": torch.cat((tables, tables))}),
    }


def test_a_call_unlike_the_latest_is_noticed(gpu: Gpu) -> None:
    case = served([5, 33])
    for name, (want, changed) in _unlike(case).items():
        attend(case)  # the latest
        if isinstance(want, str):
            before = len(gpu.launches)
            with pytest.raises((ValueError, TypeError, NotImplementedError), match=want):
                attend(case, **changed)
            assert len(gpu.launches) == before, name
        else:
            out, lse = attend(case, **changed)
            rows = len(want.q)
            assert_right((out.view(rows, 1, *out.shape[-2:]), lse.view(rows, 1, -1)), want)


def test_what_torch_has_to_see_it_sees_after_a_like_call(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    case = served([5, 33])
    attend(case)
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        attend(case)
    assert "tsmla.mla_decode.default" in seen
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) for name, x in case.named.items()}
        assert type(attend(case, **fakes)[0]) is FakeTensor
    asked: list[Any] = []
    monkeypatch.setattr(operators, "is_traced", lambda *given, **options: bool(asked.append(given)))
    q = case.q.clone().requires_grad_()
    with torch.no_grad():  # a plan made here must not serve calls that ask for a derivative
        attend(case, q=q)
    attend(case, q=q)
    assert len(asked) == 2


# ---- views


def test_views_are_read_as_they_are(gpu: Gpu) -> None:
    case = served([5, 33, 0])
    for changed in views(case).values():
        assert_right(attend(case, **changed), case)
        ((name, view),) = changed.items()
        start = view[0] if isinstance(view, tuple) else view
        assert gpu.operands[name].data_ptr() == start.data_ptr()


def test_no_view_is_read_beyond_its_memory(gpu: Gpu) -> None:
    case = served([5, 33, 0])
    for name in ("layer of a pool", "the first columns of a table"):
        ((argument, view),) = views(case)[name].items()
        attend(case, **{argument: view})
        operand, end = gpu.operands[argument], view.untyped_storage().data_ptr() + view.untyped_storage().nbytes()
        assert operand.data_ptr() + operand.numel() * operand.element_size() <= end


def split_queries(case: Inputs) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Queries whose two parts are tensors of their own, as vLLM has them: the rope part lies in a wider tensor."""
    latent, rope = case.q[..., :256].clone(), case.q[..., 256:]
    wide = torch.full((*rope.shape[:-1], 192), math.nan, dtype=rope.dtype)
    wide[..., 128:] = rope
    parts = {"dense": rope.clone(), "rope of a joined query": rope, "wide": wide[..., 128:]}
    heads_first = latent.movedim(-2, 0).contiguous().movedim(0, -2)
    return {name: (latent, part) for name, part in parts.items()} | {"heads first": (heads_first, parts["wide"])}


@pytest.mark.parametrize("which", ["dense", "rope of a joined query", "wide", "heads first"])
@pytest.mark.parametrize("ragged", [False, True])
def test_queries_in_two_tensors_are_not_copied(gpu: Gpu, which: str, ragged: bool) -> None:
    case = served([5, 33, 0], s=2, q_lens=[1, 2, 2] if ragged else None, heads=4)
    latent, rope = split_queries(case)[which]
    for _ in range(2):  # the second call finds the plan of the first
        assert_right(attend(case, q=(latent, rope)), case)
        assert gpu.operands["q"].data_ptr() == latent.data_ptr()
        assert gpu.operands["q_rope"].data_ptr() == rope.data_ptr()
        assert gpu.operands["q_rope"].shape[1] == {"dense": 64, "rope of a joined query": 320}.get(which, 192)
        assert gpu.operands["q"].dim() == (3 if which == "heads first" else 2)
        assert_right(attend(case), case)  # one tensor, by a plan of its own
        assert "q_rope" not in gpu.operands
    assert gpu.loads == 2


def test_a_pair_on_a_cpu_may_be_any() -> None:
    case = served([5, 33], s=2, heads=4)
    for pair in split_queries(case).values():
        assert_right(attend(case, q=pair), case)


def test_rope_columns_that_all_heads_share_are_refused(gpu: Gpu) -> None:
    case = served([5, 33], s=1, heads=4)
    shared = case.q[:, :, :1, 256:].clone().expand(2, 1, 4, 64)
    with pytest.raises(ValueError, match="q: got a pair"):
        attend(case, q=(case.q[..., :256].clone(), shared))


def test_a_pair_parted_at_another_column_is_refused(gpu: Gpu) -> None:
    case = served([5, 33], s=2)
    for pair in (
        (case.q[..., :192].clone(), case.q[..., 192:].clone()),
        (case.q[..., :264].clone(), case.q[..., 264:]),
    ):
        with pytest.raises(ValueError, match=r"q: got a pair of \d+ and \d+ columns; legal: 256 .* and 64"):
            attend(case, q=pair)
    assert not gpu.launches


def test_a_swapped_pair_is_refused() -> None:
    """Rope first, in tensors of their own, in one tensor of which both are columns, and under torch.compile."""
    case = served([5, 33], s=2)
    latent, rope = case.q[..., :256].contiguous(), case.q[..., 256:].contiguous()
    message = r"q: got a pair of 64 and 256 columns; legal: 256 latent ones \(latent_dim\) and 64"
    for pair in ((rope, latent), (case.q[..., :64], case.q[..., 64:])):
        with pytest.raises(ValueError, match=message):
            attend(case, q=pair)
    with pytest.raises(Exception, match="q: got a pair of 64 and 256 columns"):
        torch.compile(lambda *pair: attend(case, q=pair), backend="eager", fullgraph=True)(rope, latent)


def test_a_pair_of_every_other_column_is_not_one_tensor() -> None:
    case = served([5, 33], s=2)
    wide = torch.zeros(*case.q.shape[:-1], 2 * case.q.shape[-1], dtype=case.q.dtype)
    with pytest.raises(ValueError, match="q: got a pair"):  # the second begins 256 elements behind the first
        attend(case, q=(wide[..., :512:2], wide[..., 256:384:2]))


def test_rope_columns_at_odd_addresses_are_refused(gpu: Gpu) -> None:
    case = served([5, 33], s=2)
    latent, rope = split_queries(case)["dense"]
    attend(case, q=(latent, rope))
    shifted = torch.empty(rope.numel() + 1, dtype=rope.dtype)[1:].view(rope.shape).copy_(rope)
    with pytest.raises(ValueError, match="q_rope: got address 0x"):
        attend(case, q=(latent, shifted))


def test_a_pair_that_is_no_query_is_refused(gpu: Gpu) -> None:
    case = served([5, 33], s=2)
    latent, rope = case.q[..., :256], case.q[..., 256:]
    uneven = torch.zeros(2, 2, 4, 64, dtype=rope.dtype)[:, :, :3]  # rows of no one stride
    three_heads = split_queries(case)["heads first"]
    for pair in ((latent, rope.clone()), (latent.clone(), uneven), (rope, latent), three_heads):
        with pytest.raises(ValueError, match=r"q: got a pair .* torch\.cat\(q, -1\) makes one of them"):
            attend(case, q=pair)
    with pytest.raises(ValueError, match="q: got a tuple of 3; legal: one tensor, or the pair"):
        attend(case, q=(latent, rope, latent))


def test_no_stride_is_ignored(gpu: Gpu) -> None:
    case = served([5, 33], s=2)
    q, cache, tables, lens = case.arrays
    shifted = torch.cat((tables, tables), 1)[:, tables.shape[1] :]
    for wrong, message in (
        ({"q": torch.cat((q, q), 1)[:, :2]}, r"q: got shape .* with strides .*; the kernel takes row-major tensors wi"),
        ({"q": q.transpose(1, 2).contiguous().transpose(1, 2)}, "q: got shape"),
        ({"kv_cache": torch.cat((cache, cache), -1)[..., :320]}, r"kv_cache: got shape .* rows of D elements"),
        ({"kv_cache": torch.cat((cache, cache[:, :3]), 1)[:, :16]}, "a multiple of Z \\* D = 5120 elements apart"),
        ({"kv_cache": cache.transpose(1, 2).contiguous().transpose(1, 2)}, "kv_cache: got shape"),
        ({"block_tables": tables.t().contiguous().t()}, "block_tables: got shape"),
        ({"block_tables": shifted}, "block_tables: got shape"),  # its last row ends with the memory
        ({"seq_lens": torch.stack((lens, lens), 1)[:, 0]}, "seq_lens: got shape"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(case, **wrong)
    with pytest.raises(ValueError, match=r"block_tables: got shape"):  # pieces are cut by the table's width
        attend(case, block_tables=torch.cat((tables, tables), 1)[:, : tables.shape[1]], batch_invariant=True)
    assert not gpu.launches


def test_a_table_slice_is_checked_at_every_call(gpu: Gpu) -> None:
    case = served([5, 33])
    rows, width = case.block_tables.shape
    wide = torch.full((2 * rows, width + 1), -5, dtype=torch.int32)
    wide[:rows, :width], wide[rows:, 1:] = case.block_tables, case.block_tables
    attend(case, block_tables=wide[:rows, :width])
    with pytest.raises(ValueError, match="block_tables: got shape"):  # the same shape and strides, but at the end
        attend(case, block_tables=wide[rows:, 1:])


def test_addresses_must_be_aligned(gpu: Gpu) -> None:
    case = served([5, 33])
    shifted = torch.cat((case.q.flatten(), case.q.flatten()))[1 : 1 + case.q.numel()].view(case.q.shape)
    with pytest.raises(ValueError, match=r"q: got address .*; it must be a multiple of 16"):
        attend(case, q=shifted)


# ---- memory


def workspace_size(**sizes: Any) -> int:
    """For calls of `served` inputs."""
    options = {"num_heads": 3, "page_size": 16, "latent_dim": 256, "device": "cuda:0"}
    return tsmla_bridge.decode_workspace_size(**(options | sizes))


def test_the_device_that_a_workspace_is_for_decides(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(devices, "num_sms", lambda index: asked.append(index) or 4)
    workspace_size(max_batch=1, device="cuda:3")
    tsmla_bridge.sparse_workspace_size(max_tokens=1, num_heads=4, device="cuda:3")
    assert asked == [3, 3]


def test_with_out_and_a_workspace_nothing_is_allocated(gpu: Gpu) -> None:
    case = served([5, 33], s=2)
    workspace = tsmla_bridge.Workspace(workspace_size(max_batch=2, max_q_len=2), "cpu")
    want = attend(case, workspace=workspace)
    out, lse = torch.full_like(want[0], torch.nan), torch.full_like(want[1], torch.nan)
    gpu.runs = False
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_strided", "zeros", "full", "linspace", "stack"):
            patch.setattr(torch, name, None)
        for name in ("new_tensor", "borrow"):
            patch.setattr(tsmla_bridge.runtime.devices, name, None)
        attend(case, workspace=workspace, out=out, lse=lse)
    addresses = {name: operand.data_ptr() for name, operand in gpu.operands.items()}
    inside = range(workspace.buffer.data_ptr(), workspace.buffer.data_ptr() + workspace.size)
    assert all(addresses[name] in inside for name in ("partial_out", "partial_lse", "split_info"))
    assert (addresses["out"], addresses["lse"]) == (out.data_ptr(), lse.data_ptr())


@pytest.mark.parametrize("shape", [{"s": 2}, {"s": 3, "q_lens": [2, 0, 3, 1, 1], "padding_rows": 2}])
@pytest.mark.parametrize("each", [1, 2, 3])
def test_a_large_invariant_batch_takes_several_launches(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], each: int
) -> None:
    lens = [40, 33, 5, 0, 17]
    case = served(lens, **shape)
    attend(case, batch_invariant=True)
    whole = gpu.operands["partial_out"].numel()
    assert len(gpu.launches) == 1
    for kept in (plans._plans, plans.latest_plans):
        kept.clear()
    width = case.block_tables.shape[1]
    config = sm90_decode.DecodeConfig("bfloat16", 3, shape["s"], 256, page_size=16, batch_invariant=True)
    slot = sm90_decode.workspace_shapes(config, 1, 1, width)["partial_out"][0]
    monkeypatch.setattr(latent_shape, "INVARIANT_WORKSPACE", each * slot[0] * slot[1] * (slot[2] * 4 + 12))
    sizes = {"max_batch": 5, "max_q_len": shape["s"], "max_pages": width, "ragged": "q_lens" in shape}
    size = workspace_size(**sizes, batch_invariant=True)
    for options in ({}, {"workspace": tsmla_bridge.Workspace(size, "cpu")}):
        gpu.launches.clear()
        assert_right(attend(case, batch_invariant=True, **options), case)
        assert len(gpu.launches) == -(-len(lens) // each)
        assert all(seen["partial_out"].numel() < whole for _, seen in gpu.launches)


@pytest.mark.parametrize("shape", [{"s": 2}, {"s": 3, "q_lens": [2, 0, 3, 1, 1], "padding_rows": 2}])
@pytest.mark.parametrize("which", ["dense", "wide", "heads first"])
def test_several_launches_of_queries_in_two_tensors(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], which: str
) -> None:
    monkeypatch.setattr(latent_shape, "INVARIANT_WORKSPACE", 1)  # one request in each
    case = served([40, 33, 5, 0, 17], heads=4, **shape)
    assert_right(attend(case, q=split_queries(case)[which], batch_invariant=True, implementation="cute"), case)
    assert len(gpu.launches) == 5


def test_a_workspace_is_enough_for_what_it_is_sized_for(gpu: Gpu) -> None:
    size = workspace_size(max_batch=4, max_q_len=3, max_pages=8, batch_invariant=True)
    options = {"workspace": tsmla_bridge.Workspace(size, "cpu"), "batch_invariant": True}
    for lens, s in (([5, 33], 1), ([5, 33, 0, 9], 3), ([50] * 4, 2)):
        case = served(lens, s=s)
        assert_right(attend(case, **options), case)
        attend(case, **options, return_lse=False)  # then lse lies in the workspace too


def test_a_workspace_says_when_it_does_not_do(gpu: Gpu) -> None:
    case = served([5, 33])
    with pytest.raises(ValueError, match=r"workspace: got 64 bytes; this call of mla_decode needs \d+"):
        attend(case, workspace=tsmla_bridge.Workspace(64, "cpu"))
    with pytest.raises(ValueError, match="workspace: got one on meta; it must be on q's device, cpu"):
        attend(case, workspace=tsmla_bridge.Workspace(1 << 22, "meta"))
    workspace = tsmla_bridge.Workspace(1 << 22, "cpu")
    with gpu.on_stream(7):
        attend(case, workspace=workspace)
    with gpu.on_stream(8):
        with pytest.raises(ValueError, match=r"the one of stream 0x7 for a call on stream 0x8; each stream needs its"):
            attend(case, workspace=workspace)
        workspace.release()
        attend(case, workspace=workspace)
    with gpu.on_stream(9, capture=1):  # whoever replays the graph sees to it
        attend(case, workspace=workspace)
    with pytest.raises(NotImplementedError, match="latent_dim is 128"):
        workspace_size(max_batch=1, latent_dim=128)


@pytest.mark.parametrize("name", ["max_tokens", "num_heads", "max_selected"])
def test_sizes_of_sparse_workspaces_are_checked(name: str) -> None:
    sizes: dict[str, Any] = {"max_tokens": 4, "num_heads": 16}
    with pytest.raises(TypeError, match=f"^{name}: got float; legal: a static int"):
        tsmla_bridge.sparse_workspace_size(**sizes | {name: 1.5})
    with pytest.raises(ValueError, match=f"^{name}: got -1"):
        tsmla_bridge.sparse_workspace_size(**sizes | {name: -1})


@pytest.mark.parametrize("name", ["max_batch", "num_heads", "max_q_len", "max_pages"])
def test_sizes_of_decode_workspaces_are_checked(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: got float; legal: a static int >= [01]$"):
        workspace_size(**{"max_batch": 1, name: 1.5})
    with pytest.raises(ValueError, match=f"^{name}: got -1"):
        workspace_size(**{"max_batch": 1, name: -1})
