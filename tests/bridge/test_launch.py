"""From torch tensors to a launch, on the stand-in for the GPU: which addresses and sizes the kernel is given."""

from __future__ import annotations

import ctypes
import random
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tsmla_bridge
from tests.bridge.conftest import NUM_SMS, Gpu, on_stream
from tests.bridge.inputs import Inputs, assert_close, inputs
from tsmla_bridge import Workspace, decode, devices, ops, prefill, scales, tensors
from tsmla_kernels.catalog import KERNELS, MLA_DECODE, Operand
from tsmla_kernels.contract import PrefillSpec
from tsmla_kernels.launch import launch_of

BF16 = 2**-7  # bf16's own step, of results of size one
KERNEL = {"q_dtype": "bfloat16", "kv_dtype": "bfloat16", "latent_dim": 256, "rope_dim": 64, "heads": 3}


def served(seq_lens: list[int], **shape: Any) -> Inputs:
    return inputs(seq_lens, **(KERNEL | shape))


def assert_right(got: Any, case: Inputs, **changed: Any) -> None:
    want_out, want_lse = case.want(**changed)
    assert_close(got[0], want_out, BF16)
    assert_close(got[1], want_lse, 1e-4)


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
    options = case.options | {"batch_invariant": batch_invariant, "kv_scale": 2.0, "return_lse": True}
    got = tsmla_bridge.mla_decode(*case.arrays, **options)
    assert_right(got, case, kv_scale=2.0)
    stream, operands = gpu.launches[-1]
    assert stream == 0 and len(gpu.launches) == 1
    config = decode.sm90_decode.decode_config(_spec(case))
    assert list(operands) == [operand.name for operand in MLA_DECODE.operands(config)]


def _spec(case: Inputs) -> Any:
    offsets = case.options.get("cu_seqlens_q")
    options = (case.case.latent_dim, case.case.max_q_len, True, False, None)
    return decode.plan_for(*case.arrays, offsets, options).spec


def test_nothing_is_copied(gpu: Gpu) -> None:
    case = served([5, 33])
    out = tsmla_bridge.mla_decode(*case.arrays, **case.options)
    _, operands = gpu.launches[-1]
    for name, tensor in zip(("q", "kv_cache", "block_tables", "seq_lens"), case.arrays, strict=True):
        assert operands[name].data_ptr() == tensor.data_ptr(), name
    assert operands["out"].data_ptr() == out.data_ptr()


def test_a_plan_serves_all_calls_of_its_shapes(gpu: Gpu) -> None:
    for seed in range(3):
        case = served([5, 33], seed=seed)
        assert_right(tsmla_bridge.mla_decode(*case.arrays, **case.options, return_lse=True), case)
    assert len(decode._plans) == 1 and gpu.loads == 1
    tsmla_bridge.mla_decode(*served([5, 33, 7]).arrays, **case.options)
    assert len(decode._plans) == 2 and gpu.loads == 1  # another batch: the same kernel


# ---- the plan of the latest call, and calls that are unlike it


def test_like_calls_are_not_looked_at_one_by_one(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = served([5, 33]), served([40, 7], seed=1)
    tsmla_bridge.mla_decode(*first.arrays, **first.options)
    monkeypatch.setattr(decode, "plan_for", None)
    cache = torch.zeros(len(first.kv_cache), *second.kv_cache.shape[1:], dtype=second.kv_cache.dtype)
    cache[: len(second.kv_cache)] = second.kv_cache  # as many pages as the first has
    arrays = (second.q, cache, second.block_tables, second.seq_lens)
    for scale in (0.3, torch.tensor(0.1)):
        options = second.options | {"softmax_scale": scale, "kv_scale": 2.0, "return_lse": True}
        got = tsmla_bridge.mla_decode(*arrays, **options)
        assert_right(got, second, scale=float(scale), kv_scale=2.0)


def _unlike(case: Inputs) -> dict[str, tuple[Inputs | str, dict[str, Any]]]:
    """Arguments that differ from the case's in one thing, with what they must give: a case's results, or an error."""
    q, cache, tables, lens = case.arrays
    other = served([33], seed=1)
    rest = {"kv_cache": cache, "block_tables": tables, "seq_lens": lens}
    pool = torch.full((len(cache), 2, *cache.shape[1:]), torch.nan, dtype=cache.dtype)
    pool[:, 1] = cache
    wide = torch.full((3, tables.shape[1] + 3), 2**31 - 1, dtype=torch.int32)
    wide[:2, : tables.shape[1]] = tables
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
    half = served([5, 33], q_dtype="float16", kv_dtype="float16")
    small = served([5, 33], kv_dtype="float8_e4m3fn")
    return {
        "fewer requests": (other, {"q": other.q, **dict(zip(rest, other.arrays[1:], strict=True))}),
        "ragged": (case, {"q": q[:, 0], "cu_seqlens_q": offsets, "max_q_len": 1}),
        "dtypes": (half, {"q": half.q, **dict(zip(rest, half.arrays[1:], strict=True))}),
        "the cache's dtype": (small, {"q": small.q, **dict(zip(rest, small.arrays[1:], strict=True))}),
        "the cache's strides": (case, {"kv_cache": pool[:, 1]}),
        "the cache's head axis": (case, {"kv_cache": cache[:, None]}),
        "the table's strides": (case, {"block_tables": wide[:2, : tables.shape[1]]}),
        "a pair for q": (case, {"q": (q[..., :256], q[..., 256:])}),
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
    arguments = dict(zip(("q", "kv_cache", "block_tables", "seq_lens"), case.arrays, strict=True))
    for name, (want, changed) in _unlike(case).items():
        tsmla_bridge.mla_decode(**arguments, **case.options)  # the latest
        given = arguments | case.options | changed | {"return_lse": True}
        if isinstance(want, str):
            before = len(gpu.launches)
            with pytest.raises((ValueError, TypeError, NotImplementedError), match=want):
                tsmla_bridge.mla_decode(**given)
            assert len(gpu.launches) == before, name
        else:
            out, lse = tsmla_bridge.mla_decode(**given)
            rows = len(want.q)
            assert_right((out.view(rows, 1, *out.shape[-2:]), lse.view(rows, 1, -1)), want)


def test_what_torch_has_to_see_it_sees_after_a_like_call(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    case = served([5, 33])
    tsmla_bridge.mla_decode(*case.arrays, **case.options)
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        tsmla_bridge.mla_decode(*case.arrays, **case.options)
    assert "tsmla.mla_decode.default" in seen
    with FakeTensorMode() as mode:
        arrays = [mode.from_tensor(x) for x in case.arrays]
        assert type(tsmla_bridge.mla_decode(*arrays, **case.options)) is FakeTensor
    monkeypatch.setattr(ops, "is_traced", lambda *given: True)
    with torch.no_grad():  # a plan made here must not serve calls that ask for a derivative
        tsmla_bridge.mla_decode(case.q.requires_grad_(), *case.arrays[1:], **case.options)
    assert decode.plan_of_latest(*case.arrays, None, (256, None, True, False, None)) is None


def test_without_torchs_guard_all_calls_are_looked_at_one_by_one(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_Guards", None)
    case = served([5, 33])
    for _ in range(2):
        assert_right(tsmla_bridge.mla_decode(*case.arrays, **case.options, return_lse=True), case)
    assert len(decode._plans) == 1


# ---- views


def test_cache_with_its_head_axis(gpu: Gpu) -> None:
    case = served([5, 33])
    cache = case.kv_cache[:, None]
    got = tsmla_bridge.mla_decode(case.q, cache, *case.arrays[2:], **case.options, return_lse=True)
    assert_right(got, case)
    assert gpu.launches[-1][1]["kv_cache"].data_ptr() == cache.data_ptr()


def test_cache_that_is_one_layer_of_a_pool(gpu: Gpu) -> None:
    case = served([5, 33, 0])
    pool = torch.full((len(case.kv_cache), 3, *case.kv_cache.shape[1:]), torch.nan, dtype=case.kv_cache.dtype)
    for layer in range(3):
        pool[:, layer] = case.kv_cache
        cache = pool[:, layer]
        got = tsmla_bridge.mla_decode(case.q, cache, *case.arrays[2:], **case.options, return_lse=True)
        assert_right(got, case)
        operands = gpu.launches[-1][1]
        assert operands["kv_cache"].data_ptr() == cache.data_ptr()
        end = operands["kv_cache"].data_ptr() + operands["kv_cache"].numel() * 2
        assert end <= pool.data_ptr() + pool.numel() * 2
        pool[:, layer] = torch.nan


def test_cache_that_is_a_range_of_pages(gpu: Gpu) -> None:
    case = served([5, 33])
    pool = torch.cat((torch.full_like(case.kv_cache, torch.nan), case.kv_cache))
    cache = pool[len(case.kv_cache) :]
    got = tsmla_bridge.mla_decode(case.q, cache, *case.arrays[2:], **case.options, return_lse=True)
    assert_right(got, case)


def test_query_as_its_two_halves(gpu: Gpu) -> None:
    case = served([5, 33], s=2)
    halves = case.q[..., :256], case.q[..., 256:]
    got = tsmla_bridge.mla_decode(halves, *case.arrays[1:], **case.options, return_lse=True)
    assert_right(got, case)
    assert gpu.launches[-1][1]["q"].data_ptr() == case.q.data_ptr()
    for latent, rope in ((halves[0], halves[1].clone()), (halves[0].clone(), halves[1]), (halves[1], halves[0])):
        with pytest.raises(ValueError, match=r"q: got a pair .* torch\.cat\(q, -1\) makes one of them"):
            tsmla_bridge.mla_decode((latent, rope), *case.arrays[1:], **case.options)
    with pytest.raises(ValueError, match="q: got 3 tensors; legal: one, or the pair"):
        tsmla_bridge.mla_decode((*halves, halves[0]), *case.arrays[1:], **case.options)


@pytest.mark.parametrize("extra", [1, 5])
def test_table_that_is_the_first_columns_of_a_wider_one(gpu: Gpu, extra: int) -> None:
    case = served([5, 33, 0])
    rows, width = case.block_tables.shape
    wide = torch.full((rows + 1, width + extra), 2**31 - 1, dtype=torch.int32)
    table = wide[:rows, :width]
    table.copy_(case.block_tables)
    got = tsmla_bridge.mla_decode(case.q, case.kv_cache, table, case.seq_lens, **case.options, return_lse=True)
    assert_right(got, case)
    assert gpu.launches[-1][1]["block_tables"].data_ptr() == table.data_ptr()


def test_no_stride_is_ignored(gpu: Gpu) -> None:
    case = served([5, 33], s=2)
    q, cache, tables, lens = case.arrays
    gapped = torch.cat((q, q), 1)[:, :2]
    shifted = torch.cat((tables, tables), 1)[:, tables.shape[1] :]
    for wrong, message in (
        ({"q": gapped}, r"q: got shape .* with strides .*; the kernel takes row-major tensors without gaps"),
        ({"q": q.transpose(1, 2).contiguous().transpose(1, 2)}, "q: got shape"),
        ({"kv_cache": torch.cat((cache, cache), -1)[..., :320]}, r"kv_cache: got shape .* rows of D elements"),
        ({"kv_cache": torch.cat((cache, cache[:, :3]), 1)[:, :16]}, "a multiple of Z \\* D = 5120 elements apart"),
        ({"kv_cache": cache.transpose(1, 2).contiguous().transpose(1, 2)}, "kv_cache: got shape"),
        ({"block_tables": tables.t().contiguous().t()}, "block_tables: got shape"),
        ({"block_tables": shifted}, "block_tables: got shape"),  # its last row ends with the memory
        ({"seq_lens": torch.stack((lens, lens), 1)[:, 0]}, "seq_lens: got shape"),
    ):
        given = {"q": q, "kv_cache": cache, "block_tables": tables, "seq_lens": lens} | wrong
        with pytest.raises(ValueError, match=message):
            tsmla_bridge.mla_decode(**given, **case.options)
    with pytest.raises(ValueError, match=r"block_tables: got shape"):  # pieces are cut by the table's width
        wide = torch.cat((tables, tables), 1)[:, : tables.shape[1]]
        tsmla_bridge.mla_decode(q, cache, wide, lens, **case.options, batch_invariant=True)
    assert not gpu.launches


def test_a_table_slice_is_checked_at_every_call(gpu: Gpu) -> None:
    case = served([5, 33])
    rows, width = case.block_tables.shape
    wide = torch.full((2 * rows, width + 1), -5, dtype=torch.int32)
    wide[:rows, :width], wide[rows:, 1:] = case.block_tables, case.block_tables
    tsmla_bridge.mla_decode(case.q, case.kv_cache, wide[:rows, :width], case.seq_lens, **case.options)
    with pytest.raises(ValueError, match="block_tables: got shape"):  # the same shape and strides, but at the end
        tsmla_bridge.mla_decode(case.q, case.kv_cache, wide[rows:, 1:], case.seq_lens, **case.options)


def test_addresses_must_be_aligned(gpu: Gpu) -> None:
    case = served([5, 33])
    shifted = torch.cat((case.q.flatten(), case.q.flatten()))[1 : 1 + case.q.numel()].view(case.q.shape)
    with pytest.raises(ValueError, match=r"q: got address .*; it must be a multiple of 16"):
        tsmla_bridge.mla_decode(shifted, *case.arrays[1:], **case.options)


# ---- memory


def test_with_out_and_a_workspace_nothing_is_allocated(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    case = served([5, 33], s=2)
    size = tsmla_bridge.decode_workspace_size(
        max_batch=2, num_heads=3, max_q_len=2, page_size=16, latent_dim=256, device="cuda:0"
    )
    workspace = Workspace(size, "cpu")
    options = case.options | {"return_lse": True, "workspace": workspace}
    want = tsmla_bridge.mla_decode(*case.arrays, **options)
    out, lse = torch.full_like(want[0], torch.nan), torch.full_like(want[1], torch.nan)
    launched: list[Any] = []
    (plan,) = decode._plans.values()
    monkeypatch.setattr(plan, "launch", lambda stream, addresses: launched.append(addresses))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_strided", "zeros", "full", "linspace", "stack"):
            patch.setattr(torch, name, None)
        patch.setattr(devices, "new_tensor", None)
        patch.setattr(devices, "borrow", None)
        tsmla_bridge.mla_decode(*case.arrays, **options, out=out, lse=lse)
    (addresses,) = launched
    inside = range(workspace.buffer.data_ptr(), workspace.buffer.data_ptr() + size)
    assert all(address in inside for address in addresses[-3:])
    assert addresses[6:8] == (out.data_ptr(), lse.data_ptr())


def test_a_workspace_is_enough_for_what_it_is_sized_for(gpu: Gpu) -> None:
    size = tsmla_bridge.decode_workspace_size(
        max_batch=4, num_heads=3, max_q_len=3, page_size=16, latent_dim=256, max_pages=8, batch_invariant=True,
        device="cuda:0",
    )  # fmt: skip
    workspace = Workspace(size, "cpu")
    for lens, s in (([5, 33], 1), ([5, 33, 0, 9], 3), ([50] * 4, 2)):
        case = served(lens, s=s)
        options = case.options | {"workspace": workspace, "batch_invariant": True}
        got = tsmla_bridge.mla_decode(*case.arrays, **options, return_lse=True)
        assert_right(got, case)
        tsmla_bridge.mla_decode(*case.arrays, **options)  # without lse it lies in the workspace too


def test_a_workspace_says_when_it_does_not_do(gpu: Gpu) -> None:
    case = served([5, 33])
    with pytest.raises(ValueError, match=r"workspace: got 64 bytes; this call of mla_decode needs \d+"):
        tsmla_bridge.mla_decode(*case.arrays, **case.options, workspace=Workspace(64, "cpu"))
    with pytest.raises(ValueError, match="workspace: got one on meta; it must be on q's device, cpu"):
        tsmla_bridge.mla_decode(*case.arrays, **case.options, workspace=Workspace(1 << 22, "meta"))
    workspace = Workspace(1 << 22, "cpu")
    with on_stream(gpu, 7):
        tsmla_bridge.mla_decode(*case.arrays, **case.options, workspace=workspace)
    with on_stream(gpu, 8):
        with pytest.raises(ValueError, match=r"the one of stream 0x7 for a call on stream 0x8; each stream needs its"):
            tsmla_bridge.mla_decode(*case.arrays, **case.options, workspace=workspace)
        workspace.release()
        tsmla_bridge.mla_decode(*case.arrays, **case.options, workspace=workspace)
    with on_stream(gpu, 9, capture=1):  # a graph's own matter
        tsmla_bridge.mla_decode(*case.arrays, **case.options, workspace=workspace)
    with pytest.raises(NotImplementedError, match="latent_dim is 128"):
        tsmla_bridge.decode_workspace_size(max_batch=1, num_heads=3, latent_dim=128, device="cuda:0")


# ---- scales


def test_scales_are_those_of_the_call(gpu: Gpu) -> None:
    case = served([5, 33])
    options = case.options | {"return_lse": True}
    for scale, kv_scale in ((0.05, 1.0), (0.1, 0.5), (0.05, 1.0), (0.2, 2.0)):
        options["softmax_scale"] = scale
        assert_right(
            tsmla_bridge.mla_decode(*case.arrays, **options, kv_scale=kv_scale), case, scale=scale, kv_scale=kv_scale
        )
    changing = torch.tensor(0.5)
    for value in (0.5, 3.0):
        changing.fill_(value)
        got = tsmla_bridge.mla_decode(*case.arrays, **options, kv_scale=changing, q_scale=torch.tensor(2.0))
        assert_right(got, case, scale=0.2, kv_scale=value, q_scale=2.0)


def test_numbers_are_written_once_a_stream_and_once_a_capture(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    case = served([5, 33])
    written: list[int] = []
    write = scales._write
    monkeypatch.setattr(scales, "_write", lambda pair, index: written.append(gpu.stream) or write(pair, index))

    def call(scale: float = 0.1) -> int:
        tsmla_bridge.mla_decode(*case.arrays, **(case.options | {"softmax_scale": scale}))
        return gpu.launches[-1][1]["scales"].data_ptr()

    places = {call(), call(), call()}
    assert written == [0] and len(places) == 1
    with on_stream(gpu, 7):
        places.add(call())
        places.add(call())
    assert written == [0, 7] and len(places) == 2
    for capture in (1, 2):  # what a graph reads, the graph has written
        with on_stream(gpu, 7, capture):
            inside = {call(), call()}
            assert len(inside) == 1 and not inside & places
            assert call(0.2) not in inside
    assert written == [0, 7, 7, 7, 7, 7]
    for i in range(2 * scales.MAX_PAIRS):
        scales.on_device((1.0 + i, 1.0), -1, 0)
    assert len(scales._of_stream[-1, 0]) <= scales.MAX_PAIRS


def test_operators_keep_no_scales(gpu: Gpu) -> None:
    """torch.compile runs them on memory that it takes back: its warm-up's, or its graph's."""
    case = served([5, 33])
    arguments = (*case.arrays, None, None, case.case.scale, 2.0, 256, None, True, False, None)
    for capture in (None, 1):
        with on_stream(gpu, 7, capture):
            out, _ = torch.ops.tsmla.mla_decode(*arguments)
            assert_close(out, case.want()[0] * 2, 2 * BF16)
            latent, slots = torch.ones(1, 320, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
            cache = torch.zeros(1, 16, 320, dtype=torch.bfloat16)
            torch.ops.tsmla.write_kv_cache(cache, latent, None, slots, None, 2.0, None)
            assert cache.sum() == 160
    assert len(gpu.launches) == 4 and not scales._of_stream and not scales._of_capture
    with on_stream(gpu, 7):
        tsmla_bridge.mla_decode(*case.arrays, **case.options)
        (kept,) = scales._of_stream[-1, 7].values()
        torch.ops.tsmla.mla_decode(*case.arrays, None, None, case.case.scale, 1.0, *arguments[8:])
    assert gpu.launches[-1][1]["scales"].data_ptr() == kept.data_ptr()  # what is there is used


@pytest.mark.parametrize("pair", [(0.1, 1.0), (1e-30, 3e38), (-3e38, 3e38), (np.inf, 1.0), (np.nan, 2.0), (0.0, -0.0)])
def test_a_pair_is_written_to_the_bit(gpu: Gpu, pair: tuple[float, float]) -> None:
    got = scales._write(pair, -1).numpy()
    np.testing.assert_array_equal(got, np.asarray(pair, np.float32))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_scales_are_multiplied_as_jax_does(on_gpu: bool, request: pytest.FixtureRequest) -> None:
    if on_gpu:
        request.getfixturevalue("gpu")
    from tsmla_jax.ops.mla_decode import cute

    rng = random.Random(0)
    for _ in range(200):
        numbers = [rng.uniform(1e-3, 3.0), rng.choice([None, rng.uniform(0.1, 9.0)]), rng.uniform(1e-3, 3.0)]
        as_tensors = [None if x is None or rng.random() < 0.4 else torch.tensor(x) for x in numbers]
        given = [x if t is None else t for x, t in zip(numbers, as_tensors, strict=True)]
        pair = scales.product(given[0], given[1], given[2], given[2])
        got = pair.numpy() if isinstance(pair, torch.Tensor) else np.asarray(pair, np.float32)
        want = cute._scales(*(x.numpy() if isinstance(x, torch.Tensor) else x for x in given))
        np.testing.assert_array_equal(got, np.asarray(want))


# ---- threads, captures


def test_threads_and_streams_do_not_meet(gpu: Gpu) -> None:
    cases = [served([5 + i, 33 - i, i], s=1 + i % 3, seed=i) for i in range(6)]
    wants = [case.want() for case in cases]
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        rng = random.Random(thread)
        try:
            gpu.stream = 100 + thread
            for _ in range(20):
                i = rng.randrange(len(cases))
                scale = rng.choice([None, cases[i].case.scale * (1 + thread)])
                options = cases[i].options | ({} if scale is None else {"softmax_scale": scale})
                got = tsmla_bridge.mla_decode(*cases[i].arrays, **options, return_lse=True)
                want = wants[i] if scale is None else cases[i].want(scale=scale)
                assert_close(got[0], want[0], BF16)
                assert_close(got[1], want[1], 1e-3)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert gpu.loads == 3  # S is 1, 2 or 3


def test_a_kernel_is_not_loaded_during_a_capture(gpu: Gpu) -> None:
    case = served([5, 33])
    message = "mla_decode: the first call with these static sizes loads its kernel"
    with on_stream(gpu, 7, capture=1), pytest.raises(RuntimeError, match=message):
        tsmla_bridge.mla_decode(*case.arrays, **case.options)
    tsmla_bridge.mla_decode(*case.arrays, **case.options)
    with on_stream(gpu, 7, capture=1):
        tsmla_bridge.mla_decode(*served([5, 33, 1]).arrays, **case.options)


def test_one_launch_serves_several_threads_at_once() -> None:
    """Each takes its own block of arguments, although they are in the middle of a launch at the same time."""
    operands = (Operand("x", "float32", (None, 4)), Operand("y", "float32", (None,), output=True))
    barrier = threading.Barrier(4)
    blocks: list[int | None] = []

    def run(arguments: ctypes.c_void_p, count: ctypes.c_size_t) -> int:
        blocks.append(arguments.value)
        barrier.wait(timeout=30)
        return 0

    launch = launch_of("k", operands, ((3, 4), (3,)), run, lambda error: None)
    threads = [threading.Thread(target=launch, args=(i, (16, 32))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(blocks)) == 4


def test_a_launch_that_failed_says_so_and_the_next_one_runs() -> None:
    """By the runtime's answer, and by the error that the entry leaves behind."""
    found: list[int] = []

    def run(arguments: ctypes.c_void_p, count: ctypes.c_size_t) -> int:
        assert arguments.value is not None
        pointers = (ctypes.c_void_p * count.value).from_address(arguments.value)
        streams, errors = (ctypes.c_int64.from_address(pointers[at]) for at in (0, count.value - 1))
        found.append(streams.value)
        errors.value = 700 if streams.value == 7 else 0
        return int(streams.value == 8)

    def check(error: int) -> None:
        raise RuntimeError(f"runtime's error {error}")

    launch = launch_of("k", (Operand("x", "float32", (None, 4)),), ((3, 4),), run, check)
    for stream, message in ((7, "k: the launch failed with CUDA error 700"), (8, "runtime's error 1")):
        launch(1, (16,))
        with pytest.raises(RuntimeError, match=message):
            launch(stream, (16,))
    launch(9, (16,))
    with pytest.raises(ValueError, match="same size"):  # an address too many
        launch(9, (16, 32))
    assert found == [1, 7, 1, 8, 9]


def test_prefill_goes_to_the_catalogs_kernel(gpu: Gpu) -> None:
    if prefill._kernel()[0] is None:
        pytest.skip("the catalog has no prefill kernel")
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(7, 2, 192, generator=generator).bfloat16() for _ in range(2))
    v = torch.randn(7, 2, 128, generator=generator).bfloat16()
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_q_len": 4, "max_kv_len": 4, "softmax_scale": 0.1}
    for return_lse in (False, True):
        got = tsmla_bridge.mla_prefill(q, k, v, **options, v_scale=2.0, return_lse=return_lse)
        want = tsmla_bridge.mla_prefill(
            q, k, v, **options, v_scale=2.0, return_lse=return_lse, implementation="reference"
        )
        for a, b in zip(*((x if return_lse else (x,)) for x in (got, want)), strict=True):
            assert torch.equal(a, b)
    assert len(gpu.launches) == 2
    assert gpu.launches[-1][1]["progress"].shape == (NUM_SMS,)  # the kernel's grid is as large as this
    wide = torch.cat((k, k), -1)[..., :192]
    with pytest.raises(ValueError, match="k: got shape"):
        tsmla_bridge.mla_prefill(q, wide, v, **options)


def test_prefill_in_fp8_goes_to_its_kernel_or_says_why_not(gpu: Gpu) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(7, 2, 192, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    v = torch.randn(7, 2, 128, generator=generator).to(torch.float8_e4m3fn)
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_q_len": 4, "max_kv_len": 4, "softmax_scale": 0.1}
    scales_ = {"q_scale": 2.0, "k_scale": 0.5, "v_scale": torch.tensor(3.0)}
    spec = PrefillSpec(2, 7, 7, 4, 4, 2, 192, 128, "float8_e4m3fn", "float8_e4m3fn", "bfloat16", "float32", True, False)
    if reasons := prefill.why_not(spec, q.device):
        with pytest.raises(NotImplementedError, match=re.escape("; ".join(reasons))):
            tsmla_bridge.mla_prefill(q, k, v, **options, **scales_)
        assert not gpu.launches
    else:
        want = tsmla_bridge.mla_prefill(q, k, v, **options, **scales_, implementation="reference")
        got = tsmla_bridge.mla_prefill(q, k, v, **options, **scales_)
        assert got.dtype == torch.bfloat16 and len(gpu.launches) == 1
        torch.testing.assert_close(got, want)


def test_writes_and_gathers_go_to_the_catalogs_kernels(gpu: Gpu) -> None:
    if "write_kv_cache" not in KERNELS:
        pytest.skip("the catalog has no cache kernels")
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(5, 80, generator=generator).bfloat16()
    latent, k_rope = kv[:, :64], kv[:, 64:]
    slots = torch.tensor([3, -1, 70, 16, 99], dtype=torch.int32)
    cache = torch.randn(5, 16, 80, generator=generator).to(torch.float8_e4m3fn)
    wanted = cache.clone()
    tsmla_bridge.write_kv_cache(wanted, latent, k_rope, slots, kv_scale=0.5, implementation="reference")
    assert not gpu.launches
    for given in (cache, cache.clone()[:, None]):
        written = tsmla_bridge.write_kv_cache(given, latent, k_rope, slots, kv_scale=torch.tensor(0.5))
        assert written is given and torch.equal(given.view(cache.shape).float(), wanted.float())
        operands = gpu.launches[-1][1]
        assert operands["kv_cache"].data_ptr() == given.data_ptr()
        assert operands["latent"].data_ptr() == kv.data_ptr() and operands["latent"].shape == (5, 80)
    tables = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    starts, lens = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([20, 9], dtype=torch.int32)
    arrays = (cache, tables, starts, lens)
    want = tsmla_bridge.gather_kv_cache(*arrays, total_len=33, kv_scale=0.5, implementation="reference")
    assert torch.equal(tsmla_bridge.gather_kv_cache(*arrays, total_len=33, kv_scale=0.5), want)
    assert len(gpu.launches) == 3 and gpu.launches[-1][1]["kv_cache"].data_ptr() == cache.data_ptr()

    pool = torch.zeros(5, 2, 16, 80, dtype=torch.bfloat16)[:, 0]  # its pages have gaps: torch operations
    tsmla_bridge.write_kv_cache(pool, latent, k_rope, slots)
    assert len(gpu.launches) == 3 and pool.any()
    with pytest.raises(NotImplementedError, match=r"write_kv_cache: .* kv_cache has strides .* the kernel can't read"):
        tsmla_bridge.write_kv_cache(pool, latent, k_rope, slots, implementation="cute")


@pytest.mark.parametrize("k_rope", [None, torch.empty(2, 0, dtype=torch.bfloat16)])
def test_latents_without_rope_columns_go_to_the_kernel(gpu: Gpu, k_rope: torch.Tensor | None) -> None:
    latent, slots = torch.randn(2, 64).bfloat16(), torch.tensor([17, 3], dtype=torch.int32)
    cache = torch.zeros(2, 16, 64, dtype=torch.bfloat16)
    tsmla_bridge.write_kv_cache(cache, latent, k_rope, slots)
    ((_, operands),) = gpu.launches
    assert operands["k_rope"].data_ptr() == latent.data_ptr()  # an address there must be
    assert torch.equal(cache.view(32, 64)[slots], latent)


def test_a_cache_narrower_than_one_store_is_written_by_torch(gpu: Gpu) -> None:
    cache, slots = torch.zeros(2, 16, 8, dtype=torch.float8_e4m3fn), torch.tensor([17, 3], dtype=torch.int32)
    latent = torch.ones(2, 8, dtype=torch.bfloat16)
    tsmla_bridge.write_kv_cache(cache, latent, None, slots)
    assert not gpu.launches and cache.float().sum() == 16
    with pytest.raises(NotImplementedError, match="L is 8; with a float8_e4m3fn cache the cache kernels take multi"):
        tsmla_bridge.write_kv_cache(cache, latent, None, slots, implementation="cute")


def test_merges_go_to_the_catalogs_kernel(gpu: Gpu) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5, 3, 24, generator=generator).bfloat16()
    outs = [torch.randn(5, 3, 16, generator=generator).bfloat16(), wide[..., :16], wide[..., 8:]]
    lses = [torch.randn(5, 3, generator=generator), torch.randn(3, 5, generator=generator).T, torch.zeros(5, 3)]
    lses[0][2], outs[0][2], lses[2][:] = -torch.inf, torch.nan, -torch.inf
    want = tsmla_bridge.merge_attention_states(outs, lses, implementation="reference")
    assert not gpu.launches
    got = tsmla_bridge.merge_attention_states(outs, lses)
    ((stream, operands),) = gpu.launches
    assert stream == 0 and [x.dtype for x in got] == [torch.bfloat16, torch.float32]
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert operands["out_1"].data_ptr() == wide.data_ptr() and operands["out_1"].shape == (15, 24)
    assert operands["lse_0"].data_ptr() == lses[0].data_ptr()
    assert torch.isfinite(got[0]).all()

    one = tsmla_bridge.merge_attention_states([wide[4, 2, 8:]], [torch.tensor(2.0)])  # a row of no other's stride
    assert torch.equal(one[0], wide[4, 2, 8:]) and one[1] == 2 and len(gpu.launches) == 2
    none = tsmla_bridge.merge_attention_states([out[:0] for out in outs], [lse[:0] for lse in lses])
    assert none[0].shape == (0, 3, 16) and len(gpu.launches) == 2


def test_merges_that_the_kernel_cannot_serve_are_torchs(gpu: Gpu) -> None:
    outs, lses = torch.randn(2, 5, 3, 16), torch.randn(2, 5, 3)
    turned = [out.transpose(0, 1) for out in torch.randn(2, 3, 5, 16)]
    derived = outs.clone().requires_grad_()
    for given, reason in (
        (turned, r"outs\[0\] has strides .* which the kernel can't read"),
        (list(outs.double()), "outs' dtype is float64; the merge kernel takes bfloat16, float16, float32"),
        (list(outs[..., 1:]), "L is 15; in float32 the merge kernel takes a multiple of 4"),
        (list(derived), "a derivative is asked for; the kernel has none"),
    ):
        out, _ = tsmla_bridge.merge_attention_states(given, list(lses))
        want = torch.softmax(lses.to(out.dtype), 0)[..., None] * torch.stack(given)
        torch.testing.assert_close(out, want.sum(0))
        with pytest.raises(NotImplementedError, match=reason):
            tsmla_bridge.merge_attention_states(given, list(lses), implementation="cute")
    out.sum().backward()
    assert derived.grad is not None and not gpu.launches


def test_the_stand_in_has_some_multiprocessors() -> None:
    assert NUM_SMS > 1  # one alone would have no pieces to combine
