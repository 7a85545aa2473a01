"""The cache kernels on a GPU: bit for bit the reference, in place, for every dtype, page size and kind of value."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tsmla_jax
from tests.gpu.cache_inputs import slots_of, values
from tsmla_kernels import object_cache as objects
from tsmla_kernels.catalog import ROPE_WRITE_KV_CACHE, WRITE_KV_CACHE
from tsmla_kernels.launch import ArrayView, Launcher

pytestmark = pytest.mark.gpu

FP8 = jnp.float8_e4m3fn
INPUTS = (jnp.bfloat16, jnp.float16, jnp.float32)
CACHES = (jnp.bfloat16, jnp.float16, FP8)


@pytest.fixture(autouse=True)
def needs_the_kernel() -> None:
    of = jax.ShapeDtypeStruct
    arrays = of((4, 64, 576), FP8), of((1, 512), jnp.bfloat16), of((1, 64), jnp.bfloat16), of((1,), jnp.int32)
    if reasons := tsmla_jax.explain("write_kv_cache", *arrays).reasons["cute"]:
        pytest.skip("; ".join(reasons))


def assert_same_bits(got: jax.Array, want: jax.Array) -> None:
    """Equal bit for bit, but for which NaN it is."""
    assert got.dtype == want.dtype and got.shape == want.shape
    a, b = np.asarray(got), np.asarray(want)
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
    differs = a.view(unsigned) != b.view(unsigned)
    differs &= ~(np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32)))
    where = np.argwhere(differs)
    assert not where.size, f"{len(where)} differ, first at {where[0]}: {a[tuple(where[0])]} {b[tuple(where[0])]}"


def jitted(op: str, name: str, **options: Any) -> Any:
    return jax.jit(functools.partial(getattr(tsmla_jax, op), implementation=name, **options))


# ---- write_kv_cache


@pytest.mark.parametrize(("in_dtype", "kv_dtype"), list(itertools.product(INPUTS, CACHES)))
@pytest.mark.parametrize("scale", [None, 0.37])
def test_write_is_the_reference_bit_for_bit(in_dtype: Any, kv_dtype: Any, scale: float | None) -> None:
    cache = values((9, 32, 576), kv_dtype, 1)
    arrays = (cache, values((61, 512), in_dtype, 2), values((61, 64), in_dtype, 3), slots_of(61, 288))
    want = jitted("write_kv_cache", "reference", kv_scale=scale)(*arrays)
    assert_same_bits(jitted("write_kv_cache", "cute", kv_scale=scale)(*arrays), want)
    # And what the reference means, without jax's arithmetic (which may flush denormals on some backends).
    flat = np.array(cache).reshape(288, 576)
    with np.errstate(over="ignore", invalid="ignore"):
        rows = np.concatenate([np.asarray(x, np.float32) for x in arrays[1:3]], axis=1)
        rows = rows * (np.float32(1) / np.float32(1 if scale is None else scale))
        rows = (np.clip(rows, -448, 448) if kv_dtype == FP8 else rows).astype(kv_dtype)
    for row, slot in zip(rows, np.asarray(arrays[3]), strict=True):
        if 0 <= slot < 288:
            flat[slot] = row
    assert_same_bits(jnp.asarray(flat.reshape(9, 32, 576)), want)


@pytest.mark.parametrize("tokens", [0, 1, 7, 5000])
@pytest.mark.parametrize("page", [16, 64, 128])
def test_write_of_any_number_of_tokens_and_page_size(tokens: int, page: int) -> None:
    for kv_dtype in (jnp.bfloat16, FP8):
        cache = values((-(-8000 // page), page, 576), kv_dtype, 1)
        arrays = (cache, values((tokens, 512), jnp.bfloat16, 2), values((tokens, 64), jnp.bfloat16, 3))
        slots = slots_of(tokens, cache.shape[0] * page, tokens)
        got = jitted("write_kv_cache", "cute", kv_scale=1.7)(*arrays, slots)
        assert_same_bits(got, jitted("write_kv_cache", "xla", kv_scale=1.7)(*arrays, slots))


@pytest.mark.parametrize(("latent_dim", "rope_dim"), [(512, 0), (256, 64), (128, 32), (16, 16), (2048, 64)])
def test_write_of_other_widths(latent_dim: int, rope_dim: int) -> None:
    for kv_dtype in (jnp.bfloat16, FP8):
        cache = values((7, 16, latent_dim + rope_dim), kv_dtype, 1)
        k_rope = values((33, rope_dim), jnp.bfloat16, 3) if rope_dim else None
        arrays = (cache, values((33, latent_dim), jnp.bfloat16, 2), k_rope, slots_of(33, 112))
        want = jitted("write_kv_cache", "reference", kv_scale=0.5)(*arrays)
        assert_same_bits(jitted("write_kv_cache", "cute", kv_scale=0.5)(*arrays), want)


def test_scale_is_read_at_every_call() -> None:
    cache, latent, k_rope = jnp.zeros((4, 64, 576), FP8), values((8, 512), jnp.bfloat16), values((8, 64), jnp.bfloat16)
    slots = jnp.arange(8, dtype=jnp.int32) * 20
    cute, reference = jitted("write_kv_cache", "cute"), jitted("write_kv_cache", "reference")
    written = [cute(cache, latent, k_rope, slots, kv_scale=jnp.float32(s)) for s in (0.5, 3.0)]
    for scale, got in zip((0.5, 3.0), written, strict=True):
        assert_same_bits(got, reference(cache, latent, k_rope, slots, kv_scale=jnp.float32(scale)))
    assert (np.asarray(written[0]).view(np.uint8) != np.asarray(written[1]).view(np.uint8)).any()


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, FP8])
def test_a_donated_cache_is_written_in_place(kv_dtype: Any) -> None:
    write = jax.jit(functools.partial(tsmla_jax.write_kv_cache, implementation="cute"), donate_argnums=0)
    cache = jnp.zeros((64, 64, 576), kv_dtype)
    address = cache.unsafe_buffer_pointer()
    ones = jnp.ones((3, 512), jnp.bfloat16), jnp.ones((3, 64), jnp.bfloat16)
    written = write(cache, *ones, jnp.asarray([0, 4095, 77], jnp.int32))
    assert written.unsafe_buffer_pointer() == address and cache.is_deleted()
    rows = np.asarray(written, np.float32).reshape(4096, 576)
    assert rows.sum() == 3 * 576 and (rows[[0, 77, 4095]] == 1).all()


def test_a_cache_that_is_not_donated_stays_as_it_was() -> None:
    cache = jnp.zeros((2, 16, 576), jnp.bfloat16)
    arrays = jnp.ones((1, 512), jnp.bfloat16), jnp.ones((1, 64), jnp.bfloat16), jnp.zeros((1,), jnp.int32)
    written = jitted("write_kv_cache", "cute")(cache, *arrays)
    assert float(cache.astype(jnp.float32).sum()) == 0 and float(written.astype(jnp.float32).sum()) == 576


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, FP8])
def test_a_cache_of_more_than_2_to_the_31_elements(kv_dtype: Any) -> None:
    pages = 2**31 // (64 * 576) + 500
    cache = jnp.zeros((pages, 64, 576), kv_dtype)
    slots = jnp.asarray([0, pages * 64 - 1, 2**31 // 576, 2**31 // 576 + 1, pages * 64], jnp.int32)
    latent, k_rope = values((5, 512), jnp.bfloat16, 1), values((5, 64), jnp.bfloat16, 2)
    write = jax.jit(functools.partial(tsmla_jax.write_kv_cache, implementation="cute"), donate_argnums=0)
    cache = write(cache, latent, k_rope, slots, kv_scale=0.3)
    small = jitted("write_kv_cache", "reference", kv_scale=0.3)(
        jnp.zeros((1, 64, 576), kv_dtype), latent, k_rope, jnp.arange(5, dtype=jnp.int32)
    )
    taken = cache[slots[:4] // 64, slots[:4] % 64]
    assert_same_bits(taken, small[0, :4])
    count = jax.jit(lambda x: (x != 0).sum(axis=(1, 2)).sum())(cache)
    assert int(count) == int((small[0, :4] != 0).sum())
    # The same rows, by pages, the other way.
    tables = (slots[:4] // 64)[:, None]
    rows = jitted("gather_kv_cache", "cute", total_len=4)(cache, tables, slots[:4] % 64, jnp.ones(4, jnp.int32))
    assert_same_bits(rows, taken.astype(rows.dtype))


def test_in_a_loop_on_a_donated_cache() -> None:
    # Many launches in one program: XLA records them into a CUDA graph.
    latent, k_rope = values((32, 4, 512), jnp.bfloat16, 1), values((32, 4, 64), jnp.bfloat16, 2)

    def run(name: str, cache: jax.Array) -> jax.Array:
        def step(i: jax.Array, cache: jax.Array) -> jax.Array:
            slots = i + 32 * jnp.arange(4, dtype=jnp.int32)
            return tsmla_jax.write_kv_cache(cache, latent[i], k_rope[i], slots, kv_scale=2.0, implementation=name)

        return jax.lax.fori_loop(0, 32, step, cache)

    empty = np.zeros((8, 16, 576), ml_dtypes.float8_e4m3fn)
    want = jax.jit(functools.partial(run, "xla"))(jnp.asarray(empty))
    assert_same_bits(jax.jit(functools.partial(run, "cute"), donate_argnums=0)(jnp.asarray(empty)), want)


# ---- rope_write_kv_cache


def rope_arrays(tokens: int, heads: int, dtype: Any, kv_dtype: Any) -> tuple[jax.Array, ...]:
    latent, rope = 512, 64
    positions = np.random.default_rng(9).integers(0, 100_000, tokens)
    angles = jnp.asarray(positions[:, None] * 1e4 ** -(np.arange(rope // 2) / (rope // 2)), jnp.float32)
    drawn = [
        jnp.asarray(np.random.default_rng(i).normal(size=shape) * 3, dtype)
        for i, shape in enumerate([(tokens, heads, rope), (tokens, rope)])
    ]
    return (
        values((19, 16, latent + rope), kv_dtype, 1),
        values((tokens, heads, latent), dtype, 2),
        drawn[0],
        values((tokens, latent), dtype, 3),
        drawn[1],
        slots_of(tokens, 19 * 16),
        jnp.cos(angles),
        jnp.sin(angles),
    )


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize(
    ("dtype", "q_dtype", "kv_dtype"),
    [
        (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
        (jnp.bfloat16, FP8, FP8),
        (jnp.bfloat16, jnp.bfloat16, FP8),
        (jnp.float16, jnp.float16, jnp.float16),
        (jnp.float32, FP8, jnp.bfloat16),
    ],
)
def test_rope_write_is_the_separate_steps(
    dtype: Any, q_dtype: Any, kv_dtype: Any, interleave: bool, layout: str
) -> None:
    options = {"q_dtype": q_dtype, "rope_interleave": interleave, "rope_layout": layout}
    scales = {"q_scale": jnp.float32(0.61), "kv_scale": jnp.float32(1.3)}
    for tokens, heads in ((1, 1), (37, 9)):
        arrays = rope_arrays(tokens, heads, dtype, kv_dtype)
        got = jitted("rope_write_kv_cache", "cute", **options)(*arrays, **scales)
        want = jitted("rope_write_kv_cache", "reference", **options)(*arrays, **scales)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a[..., :512], b[..., :512])
            # The rotation is two products and a sum in float32, which compilers may contract: here and there a value
            # rounds the other way, once into the input's dtype and once into the result's.
            x, y = np.asarray(a[..., 512:], np.float32), np.asarray(b[..., 512:], np.float32)
            step = 2.0 ** -min(jnp.finfo(a.dtype).nmant, jnp.finfo(dtype).nmant)
            np.testing.assert_allclose(x, y, rtol=1.01 * step, atol=2.0**-9 if a.dtype == FP8 else 1e-5)
            assert np.mean((x != y) & ~np.isnan(x)) < 0.01


def test_rope_write_in_place_and_alone_on_the_device() -> None:
    arrays = rope_arrays(12, 8, jnp.bfloat16, FP8)
    run = jax.jit(
        functools.partial(tsmla_jax.rope_write_kv_cache, implementation="cute"),
        donate_argnums=0,
    )
    scales = {"q_scale": jnp.float32(0.5), "kv_scale": jnp.float32(0.5)}
    text = run.lower(*arrays, **scales).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert entry.count("custom-call(") == 1 and "fusion(" not in entry and "copy(" not in entry
    address = arrays[0].unsafe_buffer_pointer()
    q, written = run(*arrays, **scales)
    assert written.unsafe_buffer_pointer() == address and q.dtype == FP8


# ---- gather_kv_cache


@pytest.mark.parametrize("out_dtype", [None, *INPUTS])
@pytest.mark.parametrize("kv_dtype", CACHES)
def test_gather_is_the_reference_bit_for_bit(kv_dtype: Any, out_dtype: Any) -> None:
    cache = values((23, 32, 576), kv_dtype, 1).at[7].set(jnp.nan)
    rng = np.random.default_rng(2)
    tables = rng.permutation(np.setdiff1d(np.arange(23), [7]))[:20].reshape(5, 4).astype(np.int32)
    tables[3], tables[1, 2:] = 2**31 - 1, -1  # of no token asked for
    starts, lens = jnp.asarray([0, 3, 77, 0, 31], jnp.int32), jnp.asarray([128, 61, 1, 0, 40], jnp.int32)
    for total, scale in ((1, None), (229, jnp.float32(0.37)), (300, None)):
        options = {"total_len": total, "out_dtype": out_dtype, "kv_scale": scale}
        got = jitted("gather_kv_cache", "cute", **options)(cache, tables, starts, lens)
        assert_same_bits(got, jitted("gather_kv_cache", "reference", **options)(cache, tables, starts, lens))
        assert not np.asarray(got[230:], np.float32).any()


@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("requests", [1, 3, 31, 255, 256, 257, 700])
def test_gather_of_any_number_of_requests(requests: int, page: int) -> None:
    rng = np.random.default_rng(requests)
    cache = values((200, page, 576), FP8, 1)
    tables = rng.integers(0, 200, (requests, 3)).astype(np.int32)
    lens = (rng.integers(0, 2 * page, requests) * rng.integers(0, 2, requests)).astype(np.int32)
    starts = rng.integers(0, page + 1, requests).astype(np.int32)
    options = {"total_len": int(lens.sum()) + 5, "kv_scale": 0.7}
    got = jitted("gather_kv_cache", "cute", **options)(cache, tables, starts, lens)
    assert_same_bits(got, jitted("gather_kv_cache", "xla", **options)(cache, tables, starts, lens))


def test_gather_reads_only_inside_the_cache() -> None:
    cache = jnp.ones((3, 16, 576), jnp.bfloat16)
    tables = jnp.asarray([[2**31 - 1, -(2**31)], [0, 1], [2, 2]], jnp.int32)
    starts = jnp.asarray([0, 2**31 - 40, -7], jnp.int32)
    lens = jnp.asarray([32, 32, 32], jnp.int32)
    got = np.asarray(jitted("gather_kv_cache", "cute", total_len=96)(cache, tables, starts, lens), np.float32)
    want = np.asarray(jitted("gather_kv_cache", "reference", total_len=96)(cache, tables, starts, lens), np.float32)
    np.testing.assert_array_equal(got, want)


# ---- jax


def test_none_chooses_the_kernels() -> None:
    cache, tables, lens = jnp.zeros((4, 16, 576), FP8), jnp.zeros((2, 2), jnp.int32), jnp.ones(2, jnp.int32)
    assert tsmla_jax.explain("gather_kv_cache", cache, tables, lens, lens, total_len=4).chosen == "cute"
    assert tsmla_jax.explain("write_kv_cache", *rope_arrays(3, 2, jnp.bfloat16, FP8)[0:5:3], *_write()).chosen == "cute"
    assert tsmla_jax.explain("rope_write_kv_cache", *rope_arrays(3, 2, jnp.bfloat16, FP8)).chosen == "cute"


def _write() -> tuple[jax.Array, jax.Array]:
    return jnp.zeros((3, 64), jnp.bfloat16), jnp.zeros(3, jnp.int32)


def test_vmap() -> None:
    cache = jnp.stack([values((5, 16, 576), jnp.bfloat16, i) for i in range(3)])
    latent, k_rope = values((3, 9, 512), jnp.bfloat16, 7), values((3, 9, 64), jnp.bfloat16, 8)
    slots = jnp.stack([slots_of(9, 80, i) for i in range(3)])
    for axes in ((0, 0, 0, 0), (None, 0, None, 0), (0, None, 0, None)):
        args = [a if axis == 0 else a[0] for a, axis in zip((cache, latent, k_rope, slots), axes, strict=True)]
        got, want = (
            jax.jit(jax.vmap(functools.partial(tsmla_jax.write_kv_cache, implementation=name), axes))(*args)
            for name in ("cute", "reference")
        )
        assert_same_bits(got, want)


def test_gradients_are_those_of_the_reference() -> None:
    cache, latent = jnp.zeros((2, 16, 576), jnp.float32).astype(jnp.bfloat16), jnp.ones((4, 512), jnp.bfloat16)
    k_rope, slots = jnp.ones((4, 64), jnp.bfloat16), jnp.asarray([3, -1, 31, 7], jnp.int32)
    weights = values((2, 16, 576), jnp.bfloat16, 4).astype(jnp.float32)
    weights = jnp.where(jnp.isfinite(weights), weights, 1)

    def loss(name: str, latent: jax.Array, k_rope: jax.Array) -> jax.Array:
        written = tsmla_jax.write_kv_cache(cache, latent, k_rope, slots, kv_scale=0.5, implementation=name)
        return (written.astype(jnp.float32) * weights).sum()

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, name), (0, 1)))(latent, k_rope) for name in ("cute", "reference")
    )
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


def test_new_sizes_and_scales_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(pages: int, page: int, tokens: int, scale: float) -> jax.Array:
        cache = jnp.zeros((pages, page, 576), FP8)
        arrays = jnp.ones((tokens, 512), jnp.bfloat16), jnp.ones((tokens, 64), jnp.bfloat16)
        slots = jnp.arange(tokens, dtype=jnp.int32)
        return tsmla_jax.write_kv_cache(cache, *arrays, slots, kv_scale=scale, implementation="cute")

    write(4, 64, 3, 1.0)
    monkeypatch.setattr(objects, "compile_kernel", None)
    for pages, page, tokens, scale in ((5, 64, 3, 1.0), (4, 16, 17, 0.5), (100, 128, 1, 2.0)):
        assert int((write(pages, page, tokens, scale) != 0).sum()) == tokens * 576


# ---- without jax


def test_launcher_reads_the_first_columns_of_wider_rows() -> None:
    """As a bridge passes views: k_rope inside kv_a's output, q_rope inside q. A pitch is one more size, not a copy."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")
    tokens, heads = 21, 3
    arrays = rope_arrays(tokens, heads, jnp.bfloat16, FP8)
    want = jitted("rope_write_kv_cache", "cute")(*arrays, q_scale=1.0, kv_scale=1.0)
    written = jitted("write_kv_cache", "cute")(arrays[0], *arrays[3:6])

    def tensor(array: jax.Array) -> Any:
        """The same bits on torch's side of the device."""
        bits = np.asarray(array).view({1: np.uint8, 2: np.int16, 4: np.int32}[array.dtype.itemsize])
        return torch.from_numpy(bits.copy()).cuda()

    def in_wider_rows(array: jax.Array, before: int, after: int) -> Any:
        """[..., C] as the columns from `before` on of rows of before + C + after."""
        rows = tensor(array).reshape(-1, array.shape[-1])
        wide = torch.full((len(rows), before + rows.shape[1] + after), 0x7FC0, dtype=torch.int16, device="cuda")
        wide[:, before : before + rows.shape[1]] = rows
        return wide[:, before:]

    def view(t: Any, dtype: str) -> ArrayView:
        return ArrayView(t.data_ptr(), (*t.shape[:-1], t.stride(-2)) if t.dim() == 2 else tuple(t.shape), dtype)

    cache, *_, slots, cos, sin = map(tensor, arrays)
    q_nope, q_rope, latent, k_rope = (
        in_wider_rows(x, before, 8) for x, before in zip(arrays[1:5], (0, 128, 16, 512), strict=True)
    )
    inputs = [view(x, "bfloat16") for x in (q_nope, q_rope, latent, k_rope)]
    q = torch.empty((tokens * heads, 576), dtype=torch.uint8, device="cuda")
    one, stream = torch.ones(1, device="cuda"), torch.cuda.current_stream().cuda_stream
    fp8, f32 = "float8_e4m3fn", "float32"

    twice = cache.clone(), cache.clone()
    kv = [ArrayView(x.data_ptr(), tuple(cache.shape), fp8) for x in twice]
    scale = view(one, f32)
    launcher = Launcher(ROPE_WRITE_KV_CACHE, ROPE_WRITE_KV_CACHE.config("bfloat16", fp8, fp8), "sm_90a")
    angles = view(cos, f32), view(sin, f32)
    launcher(stream, [kv[0], *inputs, view(slots, "int32"), *angles, scale, scale, view(q, fp8), kv[0]])
    launcher = Launcher(WRITE_KV_CACHE, WRITE_KV_CACHE.config("bfloat16", fp8), "sm_90a")
    launcher(stream, [kv[1], *inputs[2:], view(slots, "int32"), scale, kv[1]])
    torch.cuda.synchronize()
    for got, expected in ((q, want[0]), (twice[0], want[1]), (twice[1], written)):
        bits = got.cpu().numpy().reshape(expected.shape).view(ml_dtypes.float8_e4m3fn)
        assert_same_bits(jnp.asarray(bits), expected)
