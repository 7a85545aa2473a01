"""The PyTorch front end on a GPU: right, the same bits as through jax, captured, threaded, compiled, and cheap."""

from __future__ import annotations

import functools
import itertools
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tsmla_bridge
import tsmla_jax
from tests.gpu import stress
from tests.gpu.stress import Tensors, arrays, assert_same_bits
from tsmla_bridge import Workspace, decode, decode_workspace_size, kernels, prefill, tokenspeed_mla
from tsmla_kernels.catalog import MLA_DECODE
from tsmla_kernels.contract import DecodeSpec, PrefillSpec
from tsmla_kernels.sm90.decode import config as sm90_decode

pytestmark = pytest.mark.gpu

SCALE = 192**-0.5
MAX_OF_LAUNCHES = 2.2  # an eager mla_decode's median time on the host, over that of its two launches alone
STRESS_CALLS = int(os.environ.get("TSMLA_STRESS_CALLS", "200"))  # of each thread


@pytest.fixture(scope="module")
def compiled_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that is named, which several runs may share, or a new one."""
    named = os.environ.get("TSMLA_CACHE_DIR")
    return Path(named) if named else tmp_path_factory.mktemp("gpu-objects")


@pytest.fixture(autouse=True)
def shared_cache(compiled_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for the module: each object takes ten to twenty seconds to compile."""
    if not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")
    if reasons := kernels.reasons(MLA_DECODE, torch.device("cuda")):
        pytest.skip("; ".join(reasons))
    monkeypatch.setenv("TSMLA_CACHE_DIR", str(compiled_cache))


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """Loaded kernels stay from test to test: to load them again would compile nothing, but takes time."""
    yield


def attend(*args: torch.Tensor, **options: Any) -> Any:
    return tsmla_bridge.mla_decode(*args, **({"softmax_scale": SCALE, "return_lse": True} | options))


def assert_right(got: Any, *args: torch.Tensor, **options: Any) -> None:
    """FlashMLA's tolerances for out, against the reference in float32 on the same values."""
    wide = [args[0].float(), *args[1:]]
    want, want_lse = (x.double().cpu() for x in attend(*wide, **options, implementation="reference"))
    out, lse = (x.double().cpu() for x in got)
    torch.testing.assert_close(out, want, atol=8e-4, rtol=2.01 / 128)
    if (norm := float((want**2).sum() + (out**2).sum())) > 0:
        assert 1 - 2 * float((out * want).sum()) / norm < 5e-6
    step = lse_step(args[0].dtype)
    torch.testing.assert_close(lse, want_lse, atol=step, rtol=step)


def lse_step(q_dtype: torch.dtype) -> float:
    """How far lse may be off, absolutely and of its own size."""
    return sm90_decode.fp8_lse_error(576) if q_dtype == torch.float8_e4m3fn else 1e-5


# ---- results


@pytest.mark.parametrize(
    ("batch", "q_len", "heads", "max_pages"), [(1, 1, 16, 64), (5, 1, 128, 20), (3, 4, 16, 9), (64, 2, 9, 3)]
)
def test_right(batch: int, q_len: int, heads: int, max_pages: int) -> None:
    args = arrays(batch, q_len, heads, max_pages)
    assert_right(attend(*args), *args)


@pytest.mark.parametrize(("page", "causal"), [(16, True), (32, False), (128, True)])
def test_other_pages_and_dtypes(page: int, causal: bool) -> None:
    args = arrays(4, 3, 16, 256 // page, page=page, dtype=torch.float16, dim=320)
    assert_right(attend(*args, latent_dim=256, causal=causal), *args, latent_dim=256, causal=causal)


FP8_CASES = [
    ((torch.bfloat16, torch.float8_e4m3fn), 2, {"kv_scale": 0.7}),
    ((torch.float16, torch.float8_e4m3fn), 1, {}),
    ((torch.float8_e4m3fn, torch.float8_e4m3fn), 3, {"q_scale": 1.3, "kv_scale": 0.7}),
]


@pytest.mark.parametrize(("dtypes", "q_len", "options"), FP8_CASES)
@pytest.mark.parametrize("heads", [16, 128])
def test_fp8_caches(dtypes: tuple[torch.dtype, torch.dtype], q_len: int, options: dict[str, Any], heads: int) -> None:
    """Out right by the same tolerances; and as through jax."""
    q, cache, *others = arrays(7, q_len, heads, 12)
    args = (q.to(dtypes[0]), cache.to(dtypes[1]), *others)
    got = attend(*args, **options)
    assert got[0].dtype == (torch.bfloat16 if dtypes[0] == torch.float8_e4m3fn else dtypes[0])
    assert_right(got, *args, **options)
    through_jax = tsmla_bridge.jax_function(
        lambda *given: tsmla_jax.mla_decode(
            *given, softmax_scale=SCALE, return_lse=True, implementation="cute", **options
        )
    )
    assert_same_bits(got, through_jax(*args))
    tensors = {name: torch.tensor(value, device="cuda") for name, value in options.items()}
    again = attend(*args, **tensors)
    # The scales' product may round the other way, and with it a probability.
    torch.testing.assert_close(again[0], got[0], atol=8e-4, rtol=2.01 / 128)
    torch.testing.assert_close(again[1], got[1], atol=1e-5, rtol=1e-5)


def ragged() -> tuple[Tensors, dict[str, Any]]:
    q, *others = arrays(4, 3, 16, 6)
    offsets = torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32, device="cuda")
    rows = q.reshape(12, 16, 576)[:9].contiguous()
    rows[6:] = torch.nan
    return (rows, *others), {"cu_seqlens_q": offsets, "max_q_len": 3}  # type: ignore[return-value]


def test_ragged_with_padding() -> None:
    args, options = ragged()
    out, lse = attend(*args, **options)
    assert_right((out[:6], lse[:6]), args[0][:6].contiguous(), *args[1:], **options)
    assert not out[6:].any() and torch.all(lse[6:] == -torch.inf)


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}, {"causal": False}, {"kv_scale": 0.7}])
@pytest.mark.parametrize(("batch", "q_len", "heads", "max_pages"), [(1, 1, 16, 64), (7, 2, 128, 20), (33, 4, 16, 5)])
def test_the_bits_are_those_of_jax(batch: int, q_len: int, heads: int, max_pages: int, options: dict[str, Any]) -> None:
    args = arrays(batch, q_len, heads, max_pages)
    through_jax = tsmla_bridge.jax_function(
        lambda *given: tsmla_jax.mla_decode(
            *given, softmax_scale=SCALE, return_lse=True, implementation="cute", **options
        )
    )
    assert_same_bits(attend(*args, **options), through_jax(*args))


def test_the_bits_are_those_of_jax_with_ragged_queries_and_tensor_scales() -> None:
    args, options = ragged()
    scales = {
        "softmax_scale": torch.tensor(SCALE, device="cuda"),
        "q_scale": 1.7,
        "kv_scale": torch.tensor(0.3, device="cuda"),
    }

    def decode_in_jax(args: Any, offsets: Any, softmax_scale: Any, kv_scale: Any) -> Any:
        return tsmla_jax.mla_decode(
            *args, cu_seqlens_q=offsets, max_q_len=3, softmax_scale=softmax_scale, q_scale=1.7, kv_scale=kv_scale,
            return_lse=True, implementation="cute",
        )  # fmt: skip

    want = tsmla_bridge.jax_function(decode_in_jax)(
        args, options["cu_seqlens_q"], scales["softmax_scale"], scales["kv_scale"]
    )
    assert_same_bits(attend(*args, **options, **scales), want)


def test_cache_operations_have_the_bits_of_jax() -> None:
    generator = torch.Generator().manual_seed(0)
    latent, rope = (torch.randn(40, n, generator=generator).bfloat16().cuda() for n in (512, 64))
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        cache = torch.randn(9, 16, 576, generator=generator).to(dtype).cuda()
        slots = torch.randperm(144, generator=generator)[:40].to(torch.int32)
        slots[5], slots[17] = -1, 144
        slots = slots.cuda()
        write = tsmla_bridge.jax_function(lambda *args: tsmla_jax.write_kv_cache(*args, kv_scale=0.7))
        want = write(cache.clone(), latent, rope, slots)
        got = tsmla_bridge.write_kv_cache(cache, latent, rope, slots, kv_scale=0.7)
        assert_same_bits((got,), (want,))
        tables = torch.randperm(9, generator=generator).to(torch.int32).view(3, 3).cuda()
        starts = torch.tensor([3, 0, 20], dtype=torch.int32, device="cuda")
        lens = torch.tensor([30, 0, 7], dtype=torch.int32, device="cuda")
        gather = tsmla_bridge.jax_function(lambda *args: tsmla_jax.gather_kv_cache(*args, total_len=40, kv_scale=0.7))
        want = gather(cache, tables, starts, lens)
        got = tsmla_bridge.gather_kv_cache(cache, tables, starts, lens, total_len=40, kv_scale=0.7)
        assert_same_bits((got,), (want,))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_prefill(dtype: torch.dtype) -> None:
    """The catalog's kernel if there is one, else every reason why not."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(300, 4, 192, generator=generator).to("cuda", dtype) for _ in range(2))
    v = torch.randn(300, 4, 128, generator=generator).to("cuda", dtype)
    cu = torch.tensor([0, 130, 130, 290], dtype=torch.int32, device="cuda")
    given = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_q_len": 160, "max_kv_len": 160, "softmax_scale": SCALE}
    name = str(dtype).removeprefix("torch.")
    spec = PrefillSpec(3, 300, 300, 160, 160, 4, 192, 128, name, name, "bfloat16", "float32", True, True)
    if reasons := prefill.why_not(spec, q.device):
        with pytest.raises(NotImplementedError, match=re.escape("; ".join(reasons))):
            tsmla_bridge.mla_prefill(q, k, v, **given)
        return
    for causal in (True, False):
        out, lse = tsmla_bridge.mla_prefill(q, k, v, **given, causal=causal, return_lse=True)
        wide = [x.float() for x in (q, k, v)]
        want, want_lse = tsmla_bridge.mla_prefill(
            *wide, **given, causal=causal, return_lse=True, implementation="reference"
        )
        # Probabilities are rounded to the inputs' dtype, and values here are of size 1, few to a sum. Tensor cores add
        # products of fp8 with fewer bits than float32 has.
        step, lse_step = (2**-8, 1e-5) if dtype == torch.bfloat16 else (2**-4, 1e-3)
        torch.testing.assert_close(out.float(), want, atol=4 * step, rtol=2 * step)
        assert (out.float() - want).norm() <= step * want.norm()
        torch.testing.assert_close(lse, want_lse, atol=lse_step, rtol=lse_step)
        through_jax = tsmla_bridge.jax_function(
            lambda q, k, v, cu, causal=causal: tsmla_jax.mla_prefill(
                q, k, v, **(given | {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}), causal=causal, return_lse=True
            )
        )
        chosen = tsmla_jax.explain(
            "mla_prefill", *(jax.ShapeDtypeStruct(x.shape, getattr(jnp, name)) for x in (q, k, v)),
            **(given | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), jax.ShapeDtypeStruct((4,), jnp.int32))),
        ).chosen  # fmt: skip
        if chosen == "cute":
            assert_same_bits((out, lse), through_jax(q, k, v, cu))


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
    """What is launched before on the same stream is seen, though it comes late."""
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
    q, cache, tables, lens = arrays(6, 1, 16, 9)
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
    from tsmla_bridge import ops

    q, cache, tables, lens = arrays(4, 2, 16, 5)
    arguments = (q, cache, tables, lens, None, None, SCALE, 1.0, 512, None, True, False, None)
    torch.library.opcheck(ops.decode_op, arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_tokenspeed_decode(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    q, cache, tables, lens = arrays(5, 2, 16, 9)
    q, cache = q.to(dtype), cache.nan_to_num().to(dtype)
    spec = DecodeSpec(
        5, 10, 2, 16, 512, 64, 576, 46, 64, 9, name, name, "bfloat16", "float32", False, True, True, False
    )

    def call(**options: Any) -> Any:
        return tokenspeed_mla.tokenspeed_mla_decode(
            q, cache[:, None], workspace, 512, 64, tables, lens, 576, SCALE, 0.5, return_lse=True, enable_pdl=True,
            **options,
        )  # fmt: skip

    sms = tokenspeed_mla.get_num_sm(torch.device("cuda"))
    workspace = torch.empty(sms * 16 * 8 * 513 * 4, dtype=torch.int8, device="cuda")
    if reasons := sm90_decode.decode_reasons(spec):
        with pytest.raises(NotImplementedError, match=re.escape("; ".join(reasons))):
            call()
        pytest.skip("; ".join(reasons))
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


# ---- what a call costs on the host


def host_us(function: Callable[[], Any], calls: int = 200, rounds: int = 5) -> float:
    """Median microseconds that a call takes the host, without waiting for the GPU."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        for _ in range(calls):
            begin = time.perf_counter_ns()
            function()
            times.append((time.perf_counter_ns() - begin) / 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def test_a_call_costs_the_host_little() -> None:
    """Little over what CUDA takes for the launches, for hosts differ by a factor of two (bridge_overhead.json has the
    microseconds of one)."""
    args = arrays(4, 1, 16, 4)
    size = decode_workspace_size(max_batch=4, num_heads=16)
    out, workspace = torch.empty(4, 1, 16, 512, dtype=torch.bfloat16, device="cuda"), Workspace(size)
    memory = {"out": out, "workspace": workspace}
    found = {}
    for name, options in (("plain", {}), ("out and workspace", memory)):
        call = functools.partial(tsmla_bridge.mla_decode, *args, softmax_scale=SCALE, **options)
        call()
        found[name] = host_us(call)
    plan: Any = decode.plan_for(*args, None, (512, None, True, False, None))
    scales = torch.tensor([SCALE, 1.0], device="cuda")
    lens, first = args[3].data_ptr(), workspace.buffer.data_ptr()
    operands = [*(x.data_ptr() for x in args), lens, scales.data_ptr(), out.data_ptr(), first + plan.lse_offset]
    addresses = (*operands, *(first + offset for offset in plan.offsets))
    stream = torch.cuda.current_stream().cuda_stream
    found["launches"] = host_us(lambda: plan.launch(stream, addresses))
    assert max(found.values()) <= MAX_OF_LAUNCHES * found["launches"], found


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


def test_plans_do_not_pile_up() -> None:
    decode._plans.clear()
    for batch, pages in itertools.product(range(1, 5), range(1, 4)):
        attend(*arrays(batch, 1, 16, pages))
    assert len(decode._plans) == 12
