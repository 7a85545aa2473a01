"""The decode kernel inside jax on a GPU: its ways to share a batch out, compiled once, transformed, captured, exported,
started cold. test_decode_values.py has the values that it shares with torch."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tests.oracles.attention import batched_decode, fp8_lse_error
from tests.oracles.inputs import decode_numbers, poisoned_cache
from tsmla_jax.ops import kernel_call
from tsmla_jax.ops.mla_decode import cute
from tsmla_kernels import object_cache
from tsmla_kernels.catalog import MLA_DECODE
from tsmla_kernels.launch import ArrayView, Launcher
from tsmla_kernels.sm90.decode import config as decode_config
from tsmla_kernels.sm90.decode.config import workspace_shapes
from tsmla_kernels.sm90.latent import shape as latent_shape

pytestmark = pytest.mark.gpu

SCALE = 192**-0.5
Results = tuple[jax.Array, jax.Array]


@pytest.fixture(autouse=True)
def needs_the_kernel() -> None:
    if reasons := tsmla_jax.explain("mla_decode", *arrays(1, 1, 16, 1), softmax_scale=SCALE).reasons["cute"]:
        pytest.skip("; ".join(reasons))


def arrays(*shape: int, dtype: Any = jnp.bfloat16, **options: Any) -> list[jax.Array]:
    """decode_numbers in jax's types."""
    types = (dtype, dtype, jnp.int32, jnp.int32)
    return [jnp.asarray(x, t) for x, t in zip(decode_numbers(*shape, **options), types, strict=True)]


def attend(implementation: str | None, **kwargs: Any) -> Callable[..., Results]:
    return partial(
        tsmla_jax.mla_decode, **{"softmax_scale": SCALE, "return_lse": True, "implementation": implementation, **kwargs}
    )


oracle = partial(batched_decode, scale=SCALE)


def assert_right(got: Results, *args: jax.Array, **kwargs: Any) -> None:
    """FlashMLA's tolerances for out, against float64 on the same inputs."""
    want, want_lse = oracle(*args, **kwargs)
    out = np.float64(got[0])
    np.testing.assert_allclose(out, want, atol=8e-4, rtol=2.01 / 128)
    if (norm := np.sum(want**2) + np.sum(out**2)) > 0:
        assert 1 - 2 * np.sum(out * want) / norm < 5e-6
    np.testing.assert_allclose(np.float64(got[1]), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("q_len", "heads", "batch", "shortest", "longest"),
    [
        pytest.param(1, 16, 131, 500, 520, id="each cluster takes a whole request"),
        pytest.param(1, 16, 16, 5000, 5050, id="requests of nearly one length, cut alike"),
        pytest.param(4, 16, 16, 4000, 12000, id="one piece a cluster"),
        pytest.param(1, 128, 16, 1000, 3000, id="equal shares of a line"),
        pytest.param(1, 16, 120, 700, 3000, id="a long and a short request for two clusters"),
        pytest.param(1, 128, 128, 600, 1800, id="whole requests by their length"),
        pytest.param(2, 128, 20, 100, 6000, id="two row tiles side by side"),
        pytest.param(8, 128, 30, 100, 900, id="eight row tiles side by side"),
        pytest.param(10, 128, 9, 200, 2000, id="ten row tiles, one after the other"),
        pytest.param(4, 128, 40, 6000, 20000, id="a long run, row tiles one after the other"),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_every_way_to_share_a_batch_out(
    q_len: int, heads: int, batch: int, shortest: int, longest: int, dtype: Any
) -> None:
    """DecodeSchedule's ways, as 132 multiprocessors take them; a request of a ragged batch has no keys."""
    lengths = np.random.default_rng(batch).integers(shortest, longest + 1, batch)
    if longest > 2 * shortest:
        lengths[batch // 2] = 0
    args = arrays(batch, q_len, heads, -(-longest // 64), lengths=lengths, dtype=dtype)
    got = jax.jit(attend("cute"))(*args)
    some = np.array([0, batch // 2, batch - 1, lengths.argmax(), lengths.argmin()])
    want, want_lse = oracle(args[0][some], args[1], args[2][some], args[3][some])
    out, lse = np.float64(got[0])[some], np.float64(got[1])[some]
    narrow = dtype == jnp.float8_e4m3fn
    assert np.linalg.norm(out - want) < 2**-8 * np.linalg.norm(want)
    assert np.all(np.isfinite(np.asarray(got[0], np.float32)))
    step = fp8_lse_error(576) if narrow else 1e-5
    np.testing.assert_allclose(lse, want_lse, atol=step, rtol=step)


@pytest.mark.parametrize("batch", [256, 512, 1024])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_large_ragged_batches(batch: int, heads: int, dtype: Any) -> None:
    """Requests of 0 to 3 query tokens, some without keys, and rows of padding."""
    rng = np.random.default_rng(batch)
    lengths = np.where(rng.random(batch) < 0.1, 0, rng.integers(1, 400, batch)).astype(np.int32)
    lengths[:2] = 4000, 0
    cache, tables = poisoned_cache(rng, lengths.tolist(), 64, 576)
    cache = (cache / 3).astype(dtype)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, batch))]).astype(np.int32)
    total, padding = int(offsets[-1]), 5
    q = (rng.standard_normal((total + padding, heads, 576), np.float32) / 4).astype(dtype)
    q[total:] = np.nan
    run = jax.jit(attend("cute", max_q_len=3))
    args = map(jnp.asarray, (q, cache, tables, lengths))
    out, lse = (np.float64(x) for x in run(*args, cu_seqlens_q=jnp.asarray(offsets)))
    assert np.isfinite(out).all() and not out[total:].any() and np.all(lse[total:] == -np.inf)
    step = fp8_lse_error(576) if dtype == jnp.float8_e4m3fn else 1e-5
    for r in [0, 1, batch // 3, batch - 1, *rng.integers(0, batch, 12)]:
        mine = slice(offsets[r], offsets[r + 1])
        if mine.start == mine.stop:
            continue
        want, want_lse = oracle(q[mine][None], cache, tables[r : r + 1], lengths[r : r + 1])
        assert np.linalg.norm(out[mine] - want[0]) <= 2**-8 * np.linalg.norm(want[0])
        np.testing.assert_allclose(lse[mine], want_lse[0], atol=step, rtol=step)


@pytest.mark.parametrize("exponent", [31, 32])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_caches_of_more_elements_than_32_bits_count(exponent: int, heads: int, dtype: Any) -> None:
    """Pages before, at and behind element 2**exponent of the cache, among pages of NaN."""
    edge = 2**exponent // (64 * 576)
    num_pages = edge + 40
    q, small, tables, lens = decode_numbers(3, 2, heads, 6, lengths=[330, 384, 65])
    used = tables < len(small)
    in_use_first = np.argsort(~np.isin(np.arange(len(small)), tables[used]), kind="stable")
    moved = np.empty(len(small), np.int32)
    moved[in_use_first] = [0, edge - 1, edge, edge + 1, num_pages - 1, *range(edge + 3, edge + len(small) - 2)]
    far = np.where(used, moved[np.where(used, tables, 0)], tables).astype(np.int32)

    @partial(jax.jit, donate_argnums=0)
    def fill(cache: jax.Array, pages: jax.Array) -> jax.Array:
        return cache.at[jnp.asarray(moved)].set(pages)

    pages = jnp.asarray(small.astype(dtype))
    cache = fill(jnp.full((num_pages, 64, 576), jnp.nan, dtype), pages)
    args = (jnp.asarray(q.astype(dtype)), cache, jnp.asarray(far), jnp.asarray(lens.astype(np.int32)))
    out, lse = jax.jit(attend("cute"))(*args)
    want, want_lse = oracle(np.asarray(args[0]), np.asarray(pages), tables, lens)
    assert np.linalg.norm(np.float64(out) - want) < 2**-8 * np.linalg.norm(want)
    step = fp8_lse_error(576) if dtype == jnp.float8_e4m3fn else 1e-5
    np.testing.assert_allclose(np.float64(lse), want_lse, atol=step, rtol=step)


@lru_cache(maxsize=12)
def small_values(batch: int, keys: int) -> tuple[jax.Array, ...]:
    """A cache of values around 0.1, as in FlashMLA's test, its table and lengths, of two or more the last 0."""
    _, cache_, tables, lens = arrays(batch, 1, 1, -(-keys // 64))
    lens = jnp.minimum(lens, keys)
    return cache_ * 0.3, tables, lens.at[-1].set(0) if batch > 1 else lens


@pytest.mark.parametrize("heads", [1, 3, 9, 63, 64, 126, 128])
@pytest.mark.parametrize("q_len", [1, 2, 4])
def test_grid_of_flashmla(q_len: int, heads: int) -> None:
    """The sizes, the spread of the data and the tolerances of FlashMLA's own test."""
    run = jax.jit(attend("cute"))
    for batch, keys in itertools.product((1, 2, 6, 64), (20, 140, 4096)):
        q = jax.random.normal(jax.random.key(heads * keys + batch), (batch, q_len, heads, 576)) / 10
        args = (q.astype(jnp.bfloat16), *small_values(batch, keys))
        assert_right(run(*args), *args)


def test_none_chooses_the_kernel() -> None:
    args = arrays(2, 1, 16, 4)
    assert tsmla_jax.explain("mla_decode", *args, softmax_scale=SCALE).chosen == "cute"
    np.testing.assert_array_equal(attend(None)(*args)[0], attend("cute")(*args)[0])


def test_scales_are_read_at_every_call() -> None:
    args = arrays(2, 1, 16, 4)
    run = jax.jit(lambda scale, kv_scale: attend("cute", softmax_scale=scale, kv_scale=kv_scale)(*args))
    for scale, kv_scale in ((0.05, 1.0), (0.1, 0.5), (0.2, 2.0)):
        scale, kv_scale = jnp.float32(scale), jnp.float32(kv_scale)
        out, lse = run(scale, kv_scale)
        want_out, want_lse = oracle(*args, scale=float(scale), kv_scale=float(kv_scale))
        # Few keys carry sharp distributions: FlashMLA's absolute bound is not for them. 2^-8 is bf16's own step.
        assert np.linalg.norm(np.float64(out) - want_out) < 2**-8 * np.linalg.norm(want_out)
        np.testing.assert_allclose(np.asarray(lse), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("q_dtype", [jnp.float8_e4m3fn, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("batch", "q_len", "heads", "max_pages"), [(1, 1, 16, 64), (5, 2, 128, 20), (3, 4, 16, 9), (64, 2, 9, 3)]
)
def test_fp8_cache(batch: int, q_len: int, heads: int, max_pages: int, q_dtype: Any) -> None:
    """NaN in unused slots; one compiled function over several scales."""
    q, cache_, *others = arrays(batch, q_len, heads, max_pages)
    kv, narrow = cache_.astype(jnp.float8_e4m3fn), q_dtype == jnp.float8_e4m3fn
    q = q.astype(q_dtype)

    def call(name: str | None, q: jax.Array, scale: jax.Array, kv_scale: jax.Array) -> Results:
        scales = {"kv_scale": kv_scale, **({"q_scale": jnp.float32(0.5)} if narrow else {})}
        return attend(name, softmax_scale=scale, **scales)(q, kv, *others)

    run = jax.jit(partial(call, "cute"))
    for scale, kv_scale in ((0.05, 1.0), (0.1, 0.5)):
        scale, kv_scale = jnp.float32(scale), jnp.float32(kv_scale)
        out, lse = run(q, scale, kv_scale)
        of_scores = float(scale) * (0.5 if narrow else 1.0)
        want_out, want_lse = oracle(q, kv, *others, scale=of_scores, kv_scale=float(kv_scale))
        assert out.dtype == (jnp.bfloat16 if narrow else q_dtype)
        assert np.linalg.norm(np.float64(out) - want_out) < 2**-8 * np.linalg.norm(want_out)
        step = fp8_lse_error(576) if narrow else 1e-5
        np.testing.assert_allclose(np.asarray(lse), want_lse, atol=step, rtol=step)
    assert run._cache_size() == 1


@pytest.mark.parametrize("size", [1e-20, 1e-3, 7e4, 1e30])
@pytest.mark.parametrize(("q_len", "heads"), [(1, 16), (2, 128)])
def test_bf16_queries_beyond_f16_over_an_fp8_cache(q_len: int, heads: int, size: float) -> None:
    """The kernel multiplies them in f16: nothing is lost for their size, and infinities stay in their rows."""
    q, cache_, *others = arrays(3, q_len, heads, 9)
    q, kv = (q.astype(jnp.float32) * size).astype(jnp.bfloat16), cache_.astype(jnp.float8_e4m3fn)
    scale = 0.05 / size
    run = jax.jit(attend("cute", softmax_scale=jnp.float32(scale)))
    out, lse = run(q, kv, *others)
    want_out, want_lse = oracle(q, kv, *others, scale=scale)
    assert np.linalg.norm(np.float64(out) - want_out) < 2**-8 * np.linalg.norm(want_out)
    np.testing.assert_allclose(np.asarray(lse), want_lse, atol=1e-5, rtol=1e-5)

    longest = int(np.argmax(others[1]))
    with_infinity, _ = run(q.at[longest, -1, 5, 7].set(jnp.inf), kv, *others)
    expected = np.array(out, np.float32)
    expected[longest, -1, 5] = np.nan
    np.testing.assert_array_equal(np.asarray(with_infinity, np.float32), expected)


def test_new_sizes_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    attend("cute")(*arrays(2, 1, 16, 4))

    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(object_cache, "compile_kernel", refuse)
    object_cache._loaded.clear()
    kernel_call._module.cache_clear()
    for batch, max_pages in ((3, 4), (2, 7), (17, 1), (1, 200)):
        args = arrays(batch, 1, 16, max_pages)
        assert_right(jax.jit(attend("cute"))(*args), *args)


def test_vmap() -> None:
    q, kv, tables, lens = arrays(3, 1, 16, 4)
    qs = jnp.stack([q, -q])
    got = jax.vmap(attend("cute"), (0, None, None, None))(qs, kv, tables, lens)
    for i in range(2):
        assert_right((got[0][i], got[1][i]), qs[i], kv, tables, lens)


def test_batch_invariant_rows_are_bitwise_the_same() -> None:
    q, kv, tables, lens = arrays(8, 1, 16, 40)
    run = jax.jit(attend("cute", batch_invariant=True))
    together = run(q, kv, tables, lens)
    for i in (0, 3, 7):
        alone = run(q[i : i + 1], kv, tables[i : i + 1], lens[i : i + 1])
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_array_equal(np.asarray(a[0]), np.asarray(b[i]))


def test_several_launches_of_a_batch_invariant_call_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arrays(8, 1, 16, 40)
    whole = jax.jit(attend("cute", batch_invariant=True))(*args)
    monkeypatch.setattr(latent_shape, "INVARIANT_WORKSPACE", 1 << 20)
    cute._transformable.cache_clear()
    config = MLA_DECODE.from_options({"num_heads": "16", "batch_invariant": "true"})
    assert len(decode_config.launches(config, 8, 40)) > 1
    for a, b in zip(jax.jit(attend("cute", batch_invariant=True))(*args), whole, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    cute._transformable.cache_clear()


def test_repeated_calls_are_bitwise_the_same() -> None:
    args = arrays(5, 2, 16, 30)
    run = jax.jit(attend("cute"))
    first = np.asarray(run(*args)[0])
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(run(*args)[0]), first)


def test_inside_a_loop_with_a_donated_cache() -> None:
    # Many launches in one program: XLA records them into a CUDA graph, and the cache is written in place.
    q, kv, tables, lens = arrays(2, 1, 16, 4, lengths=[256, 256])
    kv, lens = jnp.nan_to_num(kv), jnp.full_like(lens, 100)
    tables = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    values = jnp.asarray(np.random.default_rng(3).normal(size=(32, 576)) / 3, jnp.bfloat16)

    def step(implementation: str, kv: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        kv = kv.at[tables[0, 0], i].set(values[i])
        return kv, attend(implementation)(q, kv, tables, lens)[0]

    def run(implementation: str) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
        return lambda kv: jax.lax.scan(partial(step, implementation), kv, jnp.arange(32))

    want_kv, want = jax.jit(run("reference"))(kv)
    got_kv, got = jax.jit(run("cute"), donate_argnums=0)(kv)
    np.testing.assert_array_equal(np.asarray(got_kv), np.asarray(want_kv))
    np.testing.assert_allclose(np.float32(got), np.float32(want), atol=2e-3, rtol=2e-2)


def test_derivative_is_refused() -> None:
    q, *others = arrays(2, 1, 16, 2)
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda q: attend("cute")(q, *others)[0].astype(jnp.float32).sum())(q)


def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    with pytest.raises(NotImplementedError, match="CUTE_DSL_ARCH is sm_100a, but the GPU here is"):
        attend("cute")(*arrays(1, 1, 16, 1))


def test_several_gpus_share_heads_and_batch() -> None:
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    mesh = Mesh(np.array(devices[:2]), ("x",))
    args = arrays(4, 1, 32, 4)
    for specs in ((P(None, None, "x"), P(), P(), P()), (P("x"), P(), P("x"), P("x"))):
        sharded = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]
        compiled = jax.jit(attend("cute")).lower(*sharded).compile()
        assert "all-gather" not in compiled.as_text()
        assert_right(compiled(*sharded), *args)


# ---- without jax


def test_launcher_runs_the_same_object_on_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")
    args = arrays(5, 1, 16, 9)
    want = attend("cute")(*args)
    config = MLA_DECODE.from_options({"num_heads": "16"})
    launcher = Launcher(MLA_DECODE, config, "sm_90a")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    q, kv, tables, lens = (torch.from_numpy(np.array(np.float32(a) if i < 2 else a)).cuda() for i, a in enumerate(args))
    q, kv = q.bfloat16().reshape(-1, 576), kv.bfloat16()
    scales = torch.tensor([SCALE, 1.0], device="cuda")
    out = torch.empty(q.shape[0], 512, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(q.shape[0], device="cuda")
    shapes = workspace_shapes(config, sms, tables.shape[0], tables.shape[1])
    workspaces = [torch.empty(shape, dtype=getattr(torch, dtype), device="cuda") for shape, dtype in shapes.values()]
    tensors = [q, kv, tables, lens, lens, scales, out, lse, *workspaces]
    views = [ArrayView(t.data_ptr(), tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors]

    launcher(torch.cuda.current_stream().cuda_stream, views)
    torch.cuda.synchronize()
    np.testing.assert_array_equal(out.float().cpu().numpy(), np.float32(want[0]).reshape(-1, 512))

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    out.zero_()
    with torch.cuda.graph(graph, stream=stream):
        launcher(stream.cuda_stream, views)
    graph.replay()
    torch.cuda.synchronize()
    np.testing.assert_array_equal(out.float().cpu().numpy(), np.float32(want[0]).reshape(-1, 512))

    with pytest.raises(ValueError, match=r"scales: got float32\[3\]; the kernel takes float32\[2\]"):
        launcher(0, [*views[:5], ArrayView(scales.data_ptr(), (3,), "float32"), *views[6:]])
    with pytest.raises(ValueError, match=r"q: got address .*; it must be a multiple of 16"):
        launcher(0, [views[0]._replace(address=views[0].address + 2), *views[1:]])


# ---- other processes

CHILD = """
import json, sys
import numpy as np
import jax, jax.numpy as jnp
jax.block_until_ready(jnp.zeros(8) + 1)
arrays = [jnp.asarray(np.load(f"{sys.argv[1]}/{i}.npy")) for i in range(4)]
arrays[:2] = [a.astype(jnp.bfloat16) for a in arrays[:2]]
jax.block_until_ready(arrays)
import tsmla_jax
attend = jax.jit(lambda *a: tsmla_jax.mla_decode(*a, softmax_scale=192**-0.5, implementation="cute"))
np.save(sys.argv[2], np.float32(attend(*arrays)))
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules} & {"cutlass", "torch", "flax"})))
"""


def children(tmp_path: Path, count: int, environment: dict[str, str]) -> list[tuple[list[str], np.ndarray]]:
    """Run CHILD in `count` processes at once; the heavy modules that each imported, and its output."""
    for i, array in enumerate(arrays(3, 1, 16, 5)):
        np.save(tmp_path / f"{i}.npy", np.asarray(array.astype(jnp.float32) if i < 2 else array))
    environment = {**environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment.pop("JAX_PLATFORMS", None)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), str(tmp_path / f"out{i}.npy")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    said = [child.communicate(timeout=300)[0] for child in started]
    assert [child.returncode for child in started] == [0] * count
    return [(json.loads(text), np.load(tmp_path / f"out{i}.npy")) for i, text in enumerate(said)]


def test_a_warm_process_compiles_nothing(tmp_path: Path, child_environment: dict[str, str]) -> None:
    args = arrays(3, 1, 16, 5)
    want = np.float32(attend("cute")(*args)[0])
    ((imported, got),) = children(tmp_path, 1, child_environment)
    np.testing.assert_array_equal(got, want)
    assert imported == []


def test_four_processes_with_an_empty_cache_are_all_right(tmp_path: Path, child_environment: dict[str, str]) -> None:
    want = np.float32(attend("cute")(*arrays(3, 1, 16, 5))[0])
    environment = {**child_environment, "TSMLA_CACHE_DIR": str(tmp_path / "empty")}
    for _, got in children(tmp_path, 4, environment):
        np.testing.assert_array_equal(got, want)
    assert len(list((tmp_path / "empty").glob("*.obj"))) == 1


EXPORTED = """
import sys
import numpy as np
import jax, jax.numpy as jnp
from jax import export
import tsmla_jax
tsmla_jax.register_custom_calls()
call = jax.jit(export.deserialize(bytearray(open(sys.argv[1], "rb").read())).call)
arrays = [jnp.asarray(np.load(f"{sys.argv[2]}/{i}.npy")) for i in range(4)]
arrays[:2] = [a.astype(jnp.bfloat16) for a in arrays[:2]]
np.save(sys.argv[3], np.float32(call(*arrays)))
"""


def test_export_runs_in_another_process(tmp_path: Path, child_environment: dict[str, str]) -> None:
    b, p, m = export.symbolic_shape("b, p, m")
    struct = jax.ShapeDtypeStruct
    exported = export.export(
        jax.jit(attend("cute", return_lse=False)),
        platforms=["cuda"],
        disabled_checks=tsmla_jax.export_disabled_checks(),
    )(
        struct((b, 1, 16, 576), jnp.bfloat16),
        struct((p, 64, 576), jnp.bfloat16),
        struct((b, m), jnp.int32),
        struct((b,), jnp.int32),
    )
    (tmp_path / "blob").write_bytes(exported.serialize())
    args = arrays(3, 1, 16, 5)
    for i, array in enumerate(args):
        np.save(tmp_path / f"{i}.npy", np.asarray(array.astype(jnp.float32) if i < 2 else array))
    environment = {**child_environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment.pop("JAX_PLATFORMS", None)
    arguments = [str(tmp_path / "blob"), str(tmp_path), str(tmp_path / "out.npy")]
    subprocess.run([sys.executable, "-c", EXPORTED, *arguments], env=environment, check=True, timeout=300)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), np.float32(attend("cute")(*args)[0]))
