"""The packed caches, byte for byte against the definition, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.jax.ops.programs import ints
from tests.oracles import sparse as oracle
from tsmla_jax import sparse
from tsmla_jax.ops.selected import numerics
from tsmla_kernels.contract.layouts import cache_spec
from tsmla_kernels.contract.rules import Array

pytestmark = pytest.mark.usefixtures("optimised_module")

# Compiled as a whole: eagerly, each operation would be compiled for every small shape.
PACK_V32, UNPACK_V32 = jax.jit(sparse.pack_v32_rows), jax.jit(sparse.unpack_v32_rows)
PACK_V4, UNPACK_V4 = jax.jit(sparse.pack_v4_rows), jax.jit(sparse.unpack_v4_rows)
WRITE_V4 = jax.jit(sparse.write_v4_cache, static_argnames=("page_size", "page_span"))
WRITE_V32 = jax.jit(sparse.write_packed_kv_cache)
EXPONENT = jax.jit(numerics.scale_exponent, static_argnums=1)


def values(seed: int, *shape: int) -> np.ndarray:
    """Rows of magnitudes from far below the scales' floor to thousands."""
    rng = np.random.default_rng(seed)
    magnitude = np.exp2(rng.integers(-24, 12, (*shape[:-1], 1)))
    return (rng.standard_normal(shape) * magnitude).astype(np.float32)


@settings(max_examples=200)
@given(mantissa=st.integers(0, 2**23 - 1), exponent=st.integers(-126, 127))
def test_scale_exponents_at_every_edge(mantissa: int, exponent: int) -> None:
    # 1.75 is where the quotient by 448 = 1.75 * 2^8 crosses a power of two.
    edges = [0, mantissa, 2**23 - 1, 0x600000 - 1, 0x600000, 0x600001]
    amax = np.asarray([(((exponent + 127) << 23) | m) for m in edges], np.uint32).view(np.float32)
    got = np.asarray(EXPONENT(jnp.asarray(amax), 1e-4))
    assert got.tolist() == [oracle.scale_exponent(a, 1e-4) for a in amax]


def test_v32_rows_are_the_bytes_of_the_definition() -> None:
    latent, rope = values(0, 6, 512), values(1, 6, 64)
    latent[0] = 0
    latent[1, :128] = 448 * 2.0**-3  # exactly on a power of two
    latent[2, 5] = np.nextafter(np.float32(56), np.float32(57))  # one ulp above it
    got = np.asarray(PACK_V32(latent, rope))
    for row, x, r in zip(got, latent, rope, strict=True):
        assert row.tobytes() == oracle.v32_row(x, r)


def test_a_v32_row_written_out_by_hand() -> None:
    latent, rope = np.zeros(512, np.float32), np.zeros(64, np.float32)
    latent[0], latent[1], latent[128] = 448.0, -1.0, 896.0
    rope[0] = 1.0
    row = np.asarray(PACK_V32(latent, rope))
    assert row[[0, 1, 2, 128]].tolist() == [0x7E, 0xB8, 0x00, 0x7E]  # 448 and -1 as e4m3, 0, 896 / 2
    assert row[512:528].view(np.float32).tolist() == [1.0, 2.0, 2.0**-22, 2.0**-22]  # the floor: 1e-4 / 448 < 2^-22
    assert row[528:530].tolist() == [0x80, 0x3F]
    assert row[530:].max() == 0


def test_a_v4_page_written_out_by_hand() -> None:
    kv = np.zeros((1, 512), np.float32)
    kv[0, 0], kv[0, 64], kv[0, 448] = 448.0, -2.0, 1.0
    cache = WRITE_V4(jnp.zeros((1, 37440), jnp.uint8), kv, ints([3]))
    page = np.asarray(cache)[0]
    assert page[3 * 576 : 3 * 576 + 2].tolist() == [0x7E, 0x00]
    assert page[3 * 576 + 64] == 0xF8  # -2 / 2^-7 = -256
    assert page[3 * 576 + 448 : 3 * 576 + 450].tolist() == [0x80, 0x3F]
    assert page[64 * 576 + 24 : 64 * 576 + 32].tolist() == [127, 120, 105, 105, 105, 105, 105, 0]
    assert np.count_nonzero(page) == 2 + 2 + 7


def test_v4_pages_are_the_bytes_of_the_definition() -> None:
    page_size = 8
    kv = values(2, 2 * page_size, 512)
    page_bytes = len(oracle.v4_page(kv[:page_size], page_size))
    assert page_bytes == sparse.init_v4_cache(1, layout="packed", cache_dtype="fp8", page_size=page_size).shape[1]
    order = np.random.default_rng(0).permutation(2 * page_size)
    write = jax.jit(sparse.write_v4_cache, static_argnames="page_size", donate_argnums=0)
    cache = write(jnp.zeros((3, page_bytes), jnp.uint8), kv[order], ints(order + page_size), page_size=page_size)
    got = np.asarray(cache)
    assert got[0].max() == 0
    assert got[1].tobytes() == oracle.v4_page(kv[:page_size], page_size)
    assert got[2].tobytes() == oracle.v4_page(kv[page_size:], page_size)


def test_v4_pages_of_64_rows_have_the_known_sizes() -> None:
    assert sparse.init_v4_cache(2, layout="packed", cache_dtype="fp8_e4m3").shape == (2, 37440)
    assert 64 * 584 == 37376 and 37440 == 65 * 576


def test_indexer_pages_are_the_bytes_of_the_definition() -> None:
    keys = values(3, 8, 128)
    cache = jax.jit(sparse.write_indexer_cache)(
        jnp.zeros((3, 4, 132), jnp.uint8), keys, ints([4, 5, 6, 7, 11, 10, 9, 8])
    )
    got = np.asarray(cache)
    assert got[0].max() == 0
    assert got[1].tobytes() == oracle.indexer_page(keys[:4])
    assert got[2].tobytes() == oracle.indexer_page(keys[:3:-1])


@settings(max_examples=20)
@given(seed=st.integers(0, 2**16))
def test_packing_what_was_unpacked_changes_nothing(seed: int) -> None:
    latent, rope = values(seed, 4, 512), values(seed + 1, 4, 64)
    rows = PACK_V32(latent, rope)
    unpacked = UNPACK_V32(rows)
    assert np.array_equal(UNPACK_V32(PACK_V32(*unpacked))[0], unpacked[0])
    bound = np.abs(latent).reshape(4, 4, 128).max(-1, keepdims=True).repeat(128, -1).reshape(4, 512)
    assert (np.abs(unpacked[0] - latent) <= np.maximum(np.maximum(bound, 1e-4) / 448 * 32, np.abs(latent) / 16)).all()
    assert np.array_equal(np.asarray(unpacked[1]), rope.astype(ml_dtypes.bfloat16))
    data, scales = PACK_V4(latent)
    again = UNPACK_V4(data, scales)
    assert np.array_equal(UNPACK_V4(*PACK_V4(again)), again)
    assert np.array_equal(again[:, 448:], latent[:, 448:].astype(ml_dtypes.bfloat16).astype(np.float32))


def test_every_ue8m0_byte() -> None:
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(np.asarray(numerics.ue8m0_to_f32(jnp.asarray(codes))), want, equal_nan=True)


def test_per_tensor_fp8_is_rounded_to_bf16_then_divided_then_clamped() -> None:
    # All bf16 from 0.008 to 2: for some, x / 7 lies halfway between two e4m3 and x * (1 / 7) does not.
    every = np.arange(0x3C00, 0x4000, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    kv = np.concatenate([every.reshape(2, 512), values(5, 58, 512), np.full((4, 512), 3e4, np.float32)])
    scale = np.float32(7)
    write = jax.jit(lambda cache, kv, slots, scale: sparse.write_v4_cache(cache, kv, slots, kv_scale=scale))
    cache = write(jnp.zeros((2, 64, 512), jnp.float8_e4m3fn), kv, jnp.arange(64, dtype=jnp.int32), scale)
    want = oracle.e4m3(kv.astype(ml_dtypes.bfloat16).astype(np.float32) / scale)
    assert np.array_equal(np.asarray(cache)[0].view(np.uint8), want.view(np.uint8))
    assert float(cache[0, 63, 0]) == 448.0


def test_skipped_slots_and_plain_writes() -> None:
    kv = values(6, 3, 16)
    cache = WRITE_V4(jnp.ones((2, 2, 16), jnp.bfloat16), kv, ints([-1, 2, -1]))
    assert np.array_equal(np.asarray(cache)[1, 0], kv[1].astype(ml_dtypes.bfloat16))
    assert np.array_equal(np.asarray(cache).reshape(4, 16)[[0, 1, 3]], np.ones((3, 16)))
    packed = jnp.full((2, 4, 656), 7, jnp.uint8)
    got = WRITE_V32(packed, values(0, 2, 512), values(1, 2, 64), ints([-1, 6]))
    assert np.asarray(got).reshape(8, 656)[6].tolist() == list(
        oracle.v32_row(values(0, 2, 512)[1], values(1, 2, 64)[1])
    )
    assert (np.delete(np.asarray(got).reshape(8, 656), 6, 0) == 7).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_derivative_of_plain_writes(dtype: Any) -> None:
    """A written row's cotangent goes to the token, the others' to the cache."""
    cotangent = jnp.arange(64, dtype=dtype).reshape(2, 2, 16)

    def loss(cache: jax.Array, kv: jax.Array) -> jax.Array:
        return (sparse.write_v4_cache(cache, kv, ints([-1, 2])) * cotangent).sum()

    of_cache, of_kv = jax.jit(jax.grad(loss, (0, 1)))(jnp.ones((2, 2, 16), dtype), jnp.ones((2, 16)))
    np.testing.assert_array_equal(of_cache, cotangent.at[1, 0].set(0))
    np.testing.assert_array_equal(of_kv, jnp.stack([jnp.zeros(16), cotangent[1, 0].astype(jnp.float32)]))


@pytest.mark.parametrize(
    "cache", [((500, 64, 512), "bfloat16"), ((500, 64, 512), "float8_e4m3fn"), ((500, 37440), "uint8")]
)
def test_writing_a_few_rows_copies_no_cache(cache: tuple[tuple[int, ...], str]) -> None:
    shape = jax.ShapeDtypeStruct
    write = jax.jit(sparse.write_v4_cache, donate_argnums=0)
    compiled = write.lower(shape(*cache), shape((4, 512), jnp.float32), shape((4,), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20


def test_vmap_over_caches() -> None:
    kv = values(7, 6, 512).reshape(2, 3, 512)
    caches = jnp.zeros((2, 1, 5184), jnp.uint8)  # 8 rows a page
    slots = ints([[0, 1, 2], [5, -1, 3]])

    def write(cache: jax.Array, kv: jax.Array, slots: jax.Array) -> jax.Array:
        return sparse.write_v4_cache(cache, kv, slots, page_size=8)

    got = jax.jit(jax.vmap(write))(caches, kv, slots)
    for i in range(2):
        assert np.array_equal(got[i], WRITE_V4(caches[i], kv[i], slots[i], page_size=8))


def test_cache_dtypes() -> None:
    resolve = sparse.resolve_cache_dtype
    assert resolve("packed", "fp8") == resolve("packed", "fp8_e4m3") == jnp.uint8
    assert resolve("plain", "fp8_ds_mla") == resolve("plain", "float8_e4m3fn") == jnp.float8_e4m3fn
    assert resolve("plain", "auto") == resolve("plain", "bfloat16") == jnp.bfloat16
    assert resolve("plain", "float16") == jnp.float16 and resolve("plain", "float32") == jnp.float32


def test_the_width_of_a_packed_cache_is_an_int() -> None:
    with pytest.raises(TypeError, match=r"^head_dim: got str; legal: a static int"):
        sparse.init_v4_cache(1, layout="packed", cache_dtype="fp8", head_dim="512")


@pytest.mark.parametrize(("shape", "dtype"), [((1, 1, 1), "float32"), ((1, 1, 656), "uint8"), ((1, 1152), "uint8")])
def test_one_page_of_one_row_is_a_cache(shape: tuple[int, ...], dtype: str) -> None:
    assert cache_spec("kv_cache", Array(shape, dtype), page_size=1).num_slots == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sparse.pack_v32_rows(np.zeros((2, 500)), np.zeros((2, 64))), "latent: got shape.*must be 512"),
        (lambda: sparse.pack_v32_rows(np.zeros((2, 512)), np.zeros((3, 64))), "k_rope: got rows"),
        (lambda: sparse.unpack_v32_rows(np.zeros((2, 656), np.float32)), "rows: got dtype float32; legal: uint8"),
        (
            lambda: sparse.unpack_v4_rows(np.zeros((5, 576), np.uint8), np.zeros((1, 8), np.uint8)),
            r"scales: got rows \[1\]; data has \[5\]",
        ),
        (lambda: sparse.resolve_cache_dtype("packed", "bfloat16"), "cache_dtype: got 'bfloat16'"),
        (lambda: sparse.resolve_cache_dtype("dense", "fp8"), "layout: got 'dense'"),
        (
            lambda: sparse.resolve_cache_dtype("plain", "fp8_e5m2"),
            "cache_dtype: got 'fp8_e5m2'; legal with layout 'plain'",
        ),
        (
            lambda: sparse.resolve_cache_dtype("plain", "bfloat61"),
            "cache_dtype: got 'bfloat61'; legal with layout 'plain'",
        ),
        (lambda: sparse.resolve_cache_dtype("packed", None), "cache_dtype: got None; legal with layout 'packed': fp8"),
        (lambda: sparse.init_v4_cache(1, layout="plain", cache_dtype="auto", head_dim=0), "head_dim: got 0; legal"),
        (lambda: sparse.init_v4_cache(1, layout="packed", cache_dtype="fp8", head_dim=64), "head_dim: got 64"),
        (lambda: write_v4(jnp.zeros((1, 37375), jnp.uint8)), "need at least 37376: the stride is narrower"),
        (lambda: write_v4(jnp.zeros((0, 37440), jnp.uint8)), "kv_cache: got shape.*at least 1"),
        (lambda: write_v4(jnp.zeros((1, 37441), jnp.uint8)), "multiple of 576, 37440 for 64 rows"),
        (lambda: write_v4(jnp.zeros((1, 37440), jnp.uint8), page_span=63), "page_span: got 63"),
        (
            lambda: write_v4(jnp.zeros((1, 37440), jnp.uint8), kv_scale=2.0),
            "kv_scale: got a scale with a cache of uint8",
        ),
        (lambda: write_v4(jnp.zeros((1, 4, 512), jnp.float8_e4m3fn), kv_scale=0.0), "kv_scale: got 0.0; legal"),
        (
            lambda: write_v4(jnp.zeros((1, 4, 512), jnp.float8_e4m3fn), kv_scale=jnp.ones(512)),
            r"kv_scale: got an array of shape \[512\]",
        ),
        (lambda: write_v4(jnp.zeros((1, 4, 656), jnp.uint8)), "kv: got shape|656 bytes"),
        (
            lambda: sparse.write_v4_cache(jnp.zeros((1, 4, 8)), jnp.zeros((1, 1, 8)), ints([0])),
            r"^kv: got shape \[1, 1, 8\] of rank 3; legal: \[T, D\]",
        ),
        (lambda: write_v4(jnp.zeros((1, 4, 512), jnp.int8)), "kv_cache: got dtype int8"),
        (lambda: write_v4(jnp.zeros((0, 4, 512), jnp.bfloat16)), "kv_cache: got shape.*at least 1"),
        (
            lambda: sparse.write_indexer_cache(jnp.zeros((1, 3, 7), jnp.uint8), np.zeros((1, 3)), ints([0])),
            "k_cache",
        ),
        (
            lambda: sparse.write_packed_kv_cache(
                jnp.zeros((1, 4, 576), jnp.bfloat16), np.zeros((1, 512)), np.zeros((1, 64)), ints([0])
            ),
            r"kv_cache: got bfloat16 of shape \[1, 4, 576\]; legal: uint8 \[P, Z, 656\]",
        ),
    ],
)
def test_refuses(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def write_v4(cache: jax.Array, **kwargs: object) -> jax.Array:
    return sparse.write_v4_cache(cache, np.zeros((1, 512), np.float32), ints([0]), **kwargs)


def test_checks_see_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    cache, kv = jnp.zeros((1, 4, 16), jnp.bfloat16), np.zeros((2, 16), np.float32)
    with pytest.raises(ValueError, match="slot_mapping: token 1 goes to slot 4; legal: -1, or 0 to 3"):
        sparse.write_v4_cache(cache, kv, ints([0, 4]))
    with pytest.raises(ValueError, match="tokens 0 and 1 both go to slot 2"):
        sparse.write_v4_cache(cache, kv, ints([2, 2]))
    with pytest.raises(ValueError, match="token 1 goes to slot 3; legal: -1, or 0 to 3, of each 4 the first 3"):
        sparse.write_v4_cache(cache, kv, ints([2, 3]), page_size=3)
