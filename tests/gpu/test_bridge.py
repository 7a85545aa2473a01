"""The PyTorch front end on a GPU: the same bits as through jax, captured, threaded, compiled, without allocations.
test_decode_values.py has decode's values, test_bridge_gradient.py prefill's gradient."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

import tsmla_bridge
import tsmla_jax
from tests.gpu import stress
from tests.gpu.stress import arrays, assert_same_bits
from tests.oracles.attention import fp8_lse_error
from tsmla_bridge import Workspace, decode_workspace_size, tokenspeed_mla
from tsmla_bridge.ops import mla_decode

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_in_torch")]

SCALE = 192**-0.5
STRESS_CALLS = int(os.environ.get("TSMLA_STRESS_CALLS", "200"))  # of each thread


def attend(*args: torch.Tensor, **options: Any) -> Any:
    return tsmla_bridge.mla_decode(*args, **({"softmax_scale": SCALE, "return_lse": True} | options))


def lse_step(q_dtype: torch.dtype) -> float:
    """How far lse may be off, absolutely and of its own size."""
    return fp8_lse_error(576) if q_dtype == torch.float8_e4m3fn else 1e-5


# ---- results


BITS = [
    (torch.bfloat16, torch.bfloat16, {}),
    (torch.bfloat16, torch.bfloat16, {"batch_invariant": True}),
    (torch.bfloat16, torch.bfloat16, {"causal": False}),
    (torch.bfloat16, torch.bfloat16, {"kv_scale": 0.7}),
    (torch.bfloat16, torch.float8_e4m3fn, {"kv_scale": 0.7}),
    (torch.float8_e4m3fn, torch.float8_e4m3fn, {"q_scale": 1.3, "kv_scale": 0.7}),
]


@pytest.mark.parametrize(("dtype", "kv_dtype", "options"), BITS)
@pytest.mark.parametrize(("batch", "q_len", "heads", "max_pages"), [(1, 1, 16, 64), (7, 2, 128, 20), (33, 4, 16, 5)])
def test_the_bits_are_those_of_jax(
    batch: int,
    q_len: int,
    heads: int,
    max_pages: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    options: dict[str, Any],
) -> None:
    args = arrays(batch, q_len, heads, max_pages, dtype=dtype, kv_dtype=kv_dtype)
    through_jax = tsmla_bridge.jax_function(
        lambda *given: tsmla_jax.mla_decode(
            *given, softmax_scale=SCALE, return_lse=True, implementation="cute", **options
        )
    )
    assert_same_bits(attend(*args, **options), through_jax(*args))


def test_scales_as_tensors() -> None:
    q, cache, *others = arrays(7, 3, 16, 12)
    args = (q.to(torch.float8_e4m3fn), cache.to(torch.float8_e4m3fn), *others)
    scales = {"q_scale": 1.3, "kv_scale": 0.7}
    want = attend(*args, **scales)
    got = attend(*args, **{name: torch.tensor(value, device="cuda") for name, value in scales.items()})
    # The scales' product may round the other way, and with it a probability.
    torch.testing.assert_close(got[0], want[0], atol=8e-4, rtol=2.01 / 128)
    torch.testing.assert_close(got[1], want[1], atol=1e-5, rtol=1e-5)


def test_the_bits_are_those_of_jax_with_ragged_queries_and_tensor_scales() -> None:
    q, *others = arrays(4, 3, 16, 6)
    rows = q.reshape(12, 16, 576)[:9].contiguous()
    rows[6:] = torch.nan
    offsets = torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32, device="cuda")
    scales = {"softmax_scale": torch.tensor(SCALE, device="cuda"), "kv_scale": torch.tensor(0.3, device="cuda")}
    options = {"max_q_len": 3, "q_scale": 1.7, "return_lse": True}

    def in_jax(args: Any, arrays: dict[str, Any]) -> Any:
        return tsmla_jax.mla_decode(*args, **arrays, **options, implementation="cute")

    given = {"cu_seqlens_q": offsets, **scales}
    want = tsmla_bridge.jax_function(in_jax)((rows, *others), given)
    assert_same_bits(attend(rows, *others, **given, **options), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_cache_kernels_read_views_and_have_the_bits_of_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(300, 2112, generator=generator).bfloat16().cuda()[:, 1536:]  # of a projection that has q too
    latent, rope = rows[:, :512], rows[:, 512:]
    slots = torch.randperm(640, generator=generator)[:300].to(torch.int32).cuda()
    scale = torch.tensor(0.7, device="cuda")
    before = torch.randn(10, 64, 576, generator=generator).to(dtype).cuda()
    tables = torch.randperm(10, generator=generator).to(torch.int32).view(2, 5).cuda()
    starts, lens = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([3, 64], [290, 200]))
    found = []
    for implementation in ("cute", "reference"):
        cache = before.clone()
        tsmla_bridge.write_kv_cache(cache, latent, rope, slots, kv_scale=scale, implementation=implementation)
        gathered = tsmla_bridge.gather_kv_cache(
            cache, tables, starts, lens, total_len=500, kv_scale=scale, implementation=implementation
        )
        found.append((cache, gathered))
    assert_same_bits(*found)
    wide_slots = slots.long()
    wide_slots[::7] += 2**32
    kept = torch.where(wide_slots < 2**31, slots, -1)
    want, *others = (before.clone() for _ in range(3))
    tsmla_bridge.write_kv_cache(want, latent, rope, kept, kv_scale=scale, implementation="reference")
    for cache, implementation in zip(others, ("cute", None), strict=True):
        tsmla_bridge.write_kv_cache(cache, latent, rope, wide_slots, kv_scale=scale, implementation=implementation)
        assert_same_bits(cache, want)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_prefill_has_the_bits_of_jax(dtype: torch.dtype, causal: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(300, 4, width, generator=generator).to("cuda", dtype) for width in (192, 192, 128))
    cu = torch.tensor([0, 130, 130, 290], dtype=torch.int32, device="cuda")
    options = {"max_q_len": 160, "max_kv_len": 160, "softmax_scale": SCALE, "causal": causal, "return_lse": True}

    def in_jax(q: Any, k: Any, v: Any, cu: Any) -> Any:
        return tsmla_jax.mla_prefill(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, implementation="cute", **options)

    got = tsmla_bridge.mla_prefill(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, **options)
    assert_same_bits(got, tsmla_bridge.jax_function(in_jax)(q, k, v, cu))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads", [4, 1])
def test_prefill_of_values_in_a_wider_tensor_has_the_bits_of_dense_ones(
    dtype: torch.dtype, causal: bool, heads: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(300, heads, width, generator=generator).to("cuda", dtype) for width in (192, 192, 128))
    wide = torch.full((300, heads, 256), torch.nan, device="cuda").to(dtype)
    wide.view(torch.uint8)[..., 128 * dtype.itemsize :] = v.view(torch.uint8)
    cu = torch.tensor([0, 130, 130, 290], dtype=torch.int32, device="cuda")
    options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_q_len": 160, "max_kv_len": 160, "softmax_scale": SCALE}
    options |= {"causal": causal, "return_lse": True}
    assert_same_bits(
        tsmla_bridge.mla_prefill(q, k, wide[..., 128:], **options), tsmla_bridge.mla_prefill(q, k, v, **options)
    )


# ---- views


def test_views_are_read_as_they_are() -> None:
    q, cache, tables, lens = arrays(5, 2, 16, 9)
    want = attend(q, cache, tables, lens)
    pool = torch.full((len(cache), 3, *cache.shape[1:]), torch.nan, dtype=cache.dtype, device="cuda")
    pool[:, 1] = cache
    behind = torch.cat((torch.full_like(cache, torch.nan), cache))[len(cache) :]
    wide = torch.full((6, 14), 2**31 - 1, dtype=torch.int32, device="cuda")
    wide[:5, :9] = tables
    for given in (
        (q, cache[:, None], tables),
        (q, pool[:, 1], tables),
        (q, behind, tables),
        ((q[..., :512], q[..., 512:]), cache, tables),
        (q, cache, wide[:5, :9]),
    ):
        assert_same_bits(attend(*given, lens), want)


# ---- streams, graphs, threads


def test_the_current_stream_is_used() -> None:
    """The kernel sees a copy that was launched before it on the same stream, though the copy comes late."""
    q, cache, tables, lens = arrays(5, 1, 16, 9)
    want = attend(q, cache, tables, lens)
    stream, late = torch.cuda.Stream(), torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        got = attend(late, cache, tables, lens)
    stream.synchronize()
    assert_same_bits(got, want)


@pytest.mark.parametrize("with_memory", [False, True])
def test_a_graph_sees_new_lengths_and_scales(with_memory: bool) -> None:
    q, cache, tables, lens = arrays(6, 1, 16, 9, lengths=[576] * 6)
    cache = cache.nan_to_num()
    tables = torch.arange(54, dtype=torch.int32, device="cuda").view(6, 9)
    scale = torch.tensor(1.0, device="cuda")
    memory: dict[str, Any] = {}
    if with_memory:
        size = decode_workspace_size(max_batch=6, num_heads=16)
        memory = {"out": torch.empty(6, 1, 16, 512, dtype=torch.bfloat16, device="cuda"),
                  "lse": torch.empty(6, 1, 16, device="cuda"), "workspace": Workspace(size)}  # fmt: skip
    attend(q, cache, tables, lens, kv_scale=scale, **memory)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = attend(q, cache, tables, lens, kv_scale=scale, **memory)
        second = attend(q, cache, tables, lens)  # its scale is a number
        third = attend(q, cache, tables, lens)
    for round_, value in enumerate((1.0, 0.5, 3.0)):
        lens.copy_(torch.randint(0, 577, (6,), generator=torch.Generator().manual_seed(round_)))
        scale.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(first, attend(q, cache, tables, lens, kv_scale=scale))
        assert_same_bits(second, attend(q, cache, tables, lens))
        assert_same_bits(third, second)


def test_graphs_on_several_streams_keep_their_scales() -> None:
    """Numbers that a capture wrote belong to its graph: they outlive eager calls and other captures."""
    args = arrays(3, 1, 16, 5)
    attend(*args)
    graphs = []
    for i in range(4):
        graph, scale = torch.cuda.CUDAGraph(), 0.01 * (i + 1)
        with torch.cuda.graph(graph):
            out = attend(*args, softmax_scale=scale)
        graphs.append((graph, scale, out))
        torch.full((1 << 20,), torch.nan, device="cuda")
    for graph, scale, out in graphs * 2:
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(out, attend(*args, softmax_scale=scale))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("bfloat16", "bfloat16"), ("float8_e4m3fn", "float8_e4m3fn"), ("float16", "float8_e4m3fn")],
)
def test_threads_on_streams(dtype: str, kv_dtype: str) -> None:
    """8 threads on 8 streams make calls of random shapes, each compared with the same call made alone."""
    dtypes = (getattr(torch, name) for name in (dtype, kv_dtype))
    found = stress.failures(stress.SHAPES, *dtypes, threads=8, calls=STRESS_CALLS)
    assert not found, found[0]


def test_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    args = [x.to("cuda:0") for x in arrays(3, 1, 16, 5)]
    there = [x.to("cuda:1") for x in args]
    with torch.cuda.device(0):  # jax, in the same process, may have made another one current
        got = attend(*there)
        assert got[0].device.index == 1 and torch.cuda.current_device() == 0
        assert_same_bits([x.to("cuda:0") for x in got], attend(*args))
    with pytest.raises(ValueError, match=r"kv_cache: got a tensor on cuda:0; it must be on q's device, cuda:1"):
        attend(there[0], *args[1:])


# ---- torch.compile, and the drop-in


def test_compiled() -> None:
    pytest.importorskip("triton", reason="torch.compile makes Triton kernels")
    args = arrays(4, 2, 16, 5)
    cache = args[1].nan_to_num()
    slots = torch.tensor([7, 9, -1], dtype=torch.int32, device="cuda")
    row = torch.ones(3, 512, dtype=torch.bfloat16, device="cuda")

    def step(q: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        tsmla_bridge.write_kv_cache(cache, row * 2, row[:, :64], slots)
        return tsmla_bridge.mla_decode(q + 1, cache, tables, lens, softmax_scale=SCALE) * 2

    mine, theirs = cache.clone(), cache.clone()
    want = step(args[0], mine, *args[2:])
    got = torch.compile(step, fullgraph=True)(args[0], theirs, *args[2:])
    assert torch.equal(got, want) and torch.equal(mine, theirs)


def test_compiled_into_graphs() -> None:
    """torch.compile's own graphs, whose warm-up and capture take back the memory that was not returned."""
    pytest.importorskip("triton", reason="torch.compile makes Triton kernels")
    args = arrays(4, 2, 16, 5)

    def step(q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return tsmla_bridge.mla_decode(q + 1, *others, softmax_scale=SCALE, kv_scale=0.7) * 2

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for round_ in range(5):
        q = args[0] + round_
        want = step(q, *args[1:])
        assert torch.equal(compiled(q, *args[1:]).clone(), want)


def test_opcheck() -> None:
    q, cache, tables, lens = arrays(4, 2, 16, 5)
    arguments = (q, cache, tables, lens, None, None, None, SCALE, 1.0, 512, None, True, False, False, None)
    torch.library.opcheck(mla_decode.decode_operator, arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_tokenspeed_decode(dtype: torch.dtype) -> None:
    q, cache, tables, lens = arrays(5, 2, 16, 9)
    q, cache = q.to(dtype), cache.nan_to_num().to(dtype)
    sms = tokenspeed_mla.get_num_sm(torch.device("cuda"))
    workspace = torch.empty(sms * 16 * 8 * 513 * 4, dtype=torch.int8, device="cuda")

    def call(**options: Any) -> Any:
        return tokenspeed_mla.tokenspeed_mla_decode(
            q, cache[:, None], workspace, 512, 64, tables, lens, 576, SCALE, 0.5, return_lse=True, enable_pdl=True,
            **options,
        )  # fmt: skip

    out, lse = call()
    # Written at full size and scaled by the kernel: half of what mla_decode gives.
    want, want_lse = attend(q.float(), cache.float(), tables, lens, implementation="reference")
    torch.testing.assert_close(out.float() * 2, want, atol=8e-4, rtol=2.01 / 128)
    torch.testing.assert_close(lse * np.log(2), want_lse, atol=lse_step(dtype), rtol=lse_step(dtype))
    visible = lens[:, None] - 1 + torch.arange(2, dtype=torch.int32, device="cuda")
    again = call(local_visible_lens=visible)
    torch.testing.assert_close(again[0].float() * 2, want, atol=8e-4, rtol=2.01 / 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_tokenspeed_window(dtype: torch.dtype) -> None:
    q, cache, tables, lens = (x.to(dtype) if x.is_floating_point() else x for x in arrays(5, 2, 16, 9))

    def call(*given: torch.Tensor, window: int) -> Any:
        workspace = torch.empty(1 << 24, dtype=torch.int8, device=given[0].device)
        return tokenspeed_mla.tokenspeed_mla_decode(
            *given[:2], workspace, 512, 64, *given[2:], 576, SCALE, window_left=window, return_lse=True
        )

    for window in (1, 64, 100):
        out, lse = call(q, cache, tables, lens, window=window)
        want, want_lse = call(*(x.cpu() for x in (q.float(), cache.float(), tables, lens)), window=window)
        torch.testing.assert_close(out.float().cpu(), want, atol=2e-3, rtol=4.01 / 128)  # rounded twice: it is merged
        torch.testing.assert_close(lse.cpu(), want_lse, atol=lse_step(dtype), rtol=lse_step(dtype))


def test_a_derivative_is_refused() -> None:
    q, *others = arrays(2, 1, 16, 2)
    out, lse = attend(q.requires_grad_(), *others)
    with pytest.raises(NotImplementedError, match="mla_decode has no derivative in this implementation"):
        out.float().sum().backward()
    with torch.no_grad():
        assert_same_bits(attend(q, *others), (out.detach(), lse.detach()))


def test_allocations() -> None:
    args = arrays(4, 1, 16, 4)
    size = decode_workspace_size(max_batch=4, num_heads=16)
    memory = {"out": torch.empty(4, 1, 16, 512, dtype=torch.bfloat16, device="cuda"),
              "lse": torch.empty(4, 1, 16, device="cuda"), "workspace": Workspace(size)}  # fmt: skip
    for options, count in ((memory, 0), ({}, 3)):  # out, lse, and one for all partial results
        attend(*args, **options)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        attend(*args, **options)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == count
