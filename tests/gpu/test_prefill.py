"""The prefill kernel inside jax on a GPU: right, compiled once, differentiated, transformed, with NaN beside data."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tests.oracles.gradients import Packed
from tsmla_jax.nn import MLAConfig, functional, param_shapes
from tsmla_jax.ops import kernel_call
from tsmla_kernels import object_cache

pytestmark = pytest.mark.gpu

SCALE = 192**-0.5
Results = tuple[jax.Array, jax.Array]


@pytest.fixture(autouse=True)
def needs_the_kernel() -> None:
    kwargs = attend("cute", [1], [1]).keywords
    kwargs.pop("implementation")
    reasons = tsmla_jax.explain("mla_prefill", *arrays([1], [1]), **kwargs, implementation="cute").reasons["cute"]
    if reasons:
        pytest.skip("; ".join(reasons))


def offsets(lens: Sequence[int]) -> jax.Array:
    return jnp.asarray([0, *itertools.accumulate(lens)], jnp.int32)


def arrays(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    heads: int = 3,
    dims: tuple[int, int] = (192, 128),
    dtype: Any = jnp.bfloat16,
    padding: int = 5,
) -> list[jax.Array]:
    """q, k and v with rows of NaN behind the last request."""
    rng = np.random.default_rng(sum(q_lens) + sum(kv_lens))
    given = []
    for lens, width in ((q_lens, dims[0]), (kv_lens, dims[0]), (kv_lens, dims[1])):
        x = rng.normal(size=(sum(lens) + padding, heads, width))
        x[sum(lens) :] = np.nan
        given.append(jnp.asarray(x, dtype))
    return given


def attend(implementation: str | None, q_lens: Sequence[int], kv_lens: Sequence[int], **kwargs: Any) -> Any:
    fixed = {
        "cu_seqlens_q": offsets(q_lens),
        "cu_seqlens_kv": offsets(kv_lens),
        "max_q_len": max(q_lens),
        "max_kv_len": max(kv_lens),
        "softmax_scale": SCALE,
        "return_lse": True,
        **kwargs,
    }
    return partial(tsmla_jax.mla_prefill, implementation=implementation, **fixed)


def packed(q_lens: Sequence[int], kv_lens: Sequence[int], **options: Any) -> Packed:
    """The call of `attend` with these options, for the definition in float64."""
    scales = {"scale": options.get("softmax_scale", SCALE), "v_scale": options.get("v_scale", 1.0)}
    return Packed(q_lens, kv_lens, causal=options.get("causal", True), **scales)


def in_torch(arrays: Sequence[Any]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.float64(x)) for x in arrays]


def oracle(q: Any, k: Any, v: Any, q_lens: Sequence[int], kv_lens: Sequence[int], **options: Any) -> Any:
    """out and lse in float64, on the host: the reference would compile anew for every case."""
    return [x.numpy() for x in packed(q_lens, kv_lens, **options).results(*in_torch((q, k, v)))]


def assert_right(got: Results, want: Any) -> None:
    """P and out are rounded to the inputs' dtype."""
    out = np.float64(got[0])
    assert np.isfinite(out).all()
    step = 2**-8 if got[0].dtype == jnp.bfloat16 else 2**-11
    assert np.linalg.norm(out - want[0]) <= step * np.linalg.norm(want[0])
    np.testing.assert_allclose(out, want[0], atol=4 * step, rtol=2 * step)
    np.testing.assert_allclose(np.asarray(got[1]), want[1], atol=1e-5, rtol=1e-5)


LENS = {
    "one": ([128], [128]),
    "not a multiple of a tile": ([300, 65, 129, 1], [300, 65, 129, 1]),
    "new tokens behind a context": ([5, 64, 200], [700, 65, 1000]),
    "more queries than keys": ([300, 129, 64], [50, 128, 63]),
    "zero lengths": ([0, 70, 0, 40, 0], [30, 0, 0, 40, 0]),
    "many": ([17 * i % 200 for i in range(300)], [31 * i % 250 for i in range(300)]),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", LENS)
def test_right(name: str, causal: bool) -> None:
    lens = LENS[name]
    args = arrays(*lens)
    got = jax.jit(attend("cute", *lens, causal=causal))(*args)
    assert_right(got, oracle(*args, *lens, causal=causal))


@pytest.mark.parametrize("dims", [(192, 128), (128, 128), (64, 64), (256, 256)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_head_dims_and_dtypes(dims: tuple[int, int], dtype: Any) -> None:
    lens = ([300, 64], [300, 200])
    args = arrays(*lens, heads=5, dims=dims, dtype=dtype)
    assert_right(attend("cute", *lens)(*args), oracle(*args, *lens))


@pytest.mark.parametrize(("heads", "keys"), [(20, 200), (7, 9000), (10, 17000), (17, 5000)])
def test_heads_in_sections(heads: int, keys: int) -> None:
    """Sections of equally many heads, and a last one of fewer; those of the second request differ from the first's."""
    lens = ([300, 200], [keys, 250])
    args = arrays(*lens, heads=heads)
    assert_right(attend("cute", *lens)(*args), oracle(*args, *lens))


def assert_right_in_fp8(got: Results, want: Any, lse_rtol: float = 0.0, v_scale: float = 1.0) -> None:
    """P is rounded to e4m3, and the tensor cores keep 13 bits of what they add up: on an H200 at most 2.7 % in out's
    norm, 0.053 v_scale in one element beyond 2^-4 of it, 1.6e-3 in lse."""
    out, lse = np.float64(got[0]), np.asarray(got[1])
    assert got[0].dtype == jnp.bfloat16 and np.isfinite(out).all()
    assert np.linalg.norm(out - want[0]) <= 0.03 * np.linalg.norm(want[0])
    np.testing.assert_allclose(out, want[0], atol=2**-4 * v_scale, rtol=2**-4)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want[1]))
    seen = ~np.isneginf(want[1])
    np.testing.assert_allclose(lse[seen], want[1][seen], atol=6e-3, rtol=lse_rtol)


FP8 = jnp.float8_e4m3fn


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", LENS)
def test_fp8(name: str, causal: bool) -> None:
    lens = LENS[name]
    args = arrays(*lens, dtype=FP8)
    got = jax.jit(attend("cute", *lens, causal=causal))(*args)
    assert_right_in_fp8(got, oracle(*args, *lens, causal=causal))


def test_fp8_over_many_blocks() -> None:
    lens = ([1500, 3], [4000, 2500])
    args = arrays(*lens, heads=5, dtype=FP8)
    assert_right_in_fp8(attend("cute", *lens)(*args), oracle(*args, *lens))


def test_fp8_scales_are_read_at_every_call() -> None:
    lens = ([200, 30], [200, 50])
    args = arrays(*lens, dtype=FP8)
    run = jax.jit(lambda *s: attend("cute", *lens, q_scale=s[0], k_scale=s[1], v_scale=s[2])(*args))
    for q_scale, k_scale, v_scale in ((1.0, 1.0, 1.0), (0.5, 3.0, 0.25), (2.0, 0.1, 2.0)):
        want = oracle(*args, *lens, softmax_scale=SCALE * q_scale * k_scale, v_scale=v_scale)
        assert_right_in_fp8(run(*map(jnp.float32, (q_scale, k_scale, v_scale))), want, v_scale=v_scale)


def test_fp8_maximum_that_rises_from_block_to_block() -> None:
    """Blocks are read from the last to the first."""
    lens = ([150], [1500])
    q, k, v = arrays(*lens, dtype=jnp.float32, padding=0)
    for steps in (1.02, 1.3, 2.0, 3.0):
        growth = np.linspace(steps, 0.0, 1500)[:, None, None]
        args = [x.astype(FP8) for x in (jnp.abs(q), jnp.abs(k) * growth, v)]
        # Products of one sign: what each of them loses to the 13 bits of a step's greatest adds up. Measured: 1.4e-3
        # of lse beyond the 6e-3.
        assert_right_in_fp8(attend("cute", *lens)(*args), oracle(*args, *lens), lse_rtol=2e-3)


def test_fp8_scores_further_apart_than_the_exponents_of_floats() -> None:
    """P is made before it is known whether its maximum will do: here it overflows again and again."""
    lens = ([1500, 3], [4000, 2500])
    args = arrays(*lens, dtype=FP8)
    scale = 60 * SCALE
    out, lse = attend("cute", *lens, softmax_scale=scale)(*args)
    want = oracle(*args, *lens, softmax_scale=scale)
    assert np.linalg.norm(np.float64(out) - want[0]) <= 0.03 * np.linalg.norm(want[0])
    np.testing.assert_allclose(np.asarray(lse), want[1], atol=0.4)  # of scores up to 300, in 13 bits


def test_fp8_a_nan_in_one_query_stays_with_it() -> None:
    """Rows that one thread holds share the look at their sums."""
    lens = ([300], [1500])
    q, k, v = arrays(*lens, dtype=FP8, padding=0)
    out, lse = attend("cute", *lens)(q.at[::16].set(jnp.nan), k, v)
    others = np.arange(300) % 16 > 0
    assert np.isnan(np.float32(out)[~others]).all()
    assert_right_in_fp8((out[others], lse[others]), [x[others] for x in oracle(q, k, v, *lens)])


def test_fp8_repeated_calls_are_bitwise_the_same() -> None:
    lens = ([700, 300, 20], [700, 300, 20])
    args = arrays(*lens, heads=16, dtype=FP8)
    run = jax.jit(attend("cute", *lens))
    first = np.asarray(run(*args)[0].view(jnp.uint16))
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(run(*args)[0].view(jnp.uint16)), first)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, FP8])
def test_nan_of_a_request_stays_with_it(dtype: Any) -> None:
    lens = [100, 200, 65]
    q, k, v = arrays(lens, lens, padding=0, dtype=dtype)
    v, k = v.at[100:300].set(jnp.nan), k.at[100:300].set(jnp.nan)
    out, _ = attend("cute", lens, lens)(q, k, v)
    finite = np.isfinite(np.float32(out)).all((1, 2))
    assert finite[:100].all() and finite[300:].all() and not finite[100:300].any()


def test_none_chooses_the_kernel() -> None:
    lens = ([100], [100])
    args = arrays(*lens)
    kwargs = attend(None, *lens).keywords
    kwargs.pop("implementation")
    assert tsmla_jax.explain("mla_prefill", *args, **kwargs).chosen == "cute"


def test_scales_are_read_at_every_call() -> None:
    lens = ([200, 30], [200, 50])
    args = arrays(*lens)
    run = jax.jit(lambda scale, v_scale: attend("cute", *lens, softmax_scale=scale, v_scale=v_scale)(*args))
    for scale, v_scale in ((0.05, 1.0), (0.1, 0.5), (0.02, 2.0)):
        want = oracle(*args, *lens, softmax_scale=scale, v_scale=v_scale)
        assert_right(run(jnp.float32(scale), jnp.float32(v_scale)), want)


def test_new_sizes_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    attend("cute", [10], [10])(*arrays([10], [10]))

    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(object_cache, "compile_kernel", refuse)
    object_cache._loaded.clear()
    kernel_call._module.cache_clear()
    for lens, heads in (([30], 1), ([1, 2, 3], 7), ([500, 20], 16)):
        args = arrays(lens, lens, heads)
        assert_right(jax.jit(attend("cute", lens, lens))(*args), oracle(*args, lens, lens))


def test_vmap() -> None:
    lens = ([100, 30], [100, 60])
    q, k, v = arrays(*lens)
    qs = jnp.stack([q, -q])
    got = jax.vmap(attend("cute", *lens), (0, None, None))(qs, k, v)
    for i in range(2):
        assert_right((got[0][i], got[1][i]), oracle(qs[i], k, v, *lens))


def test_repeated_calls_are_bitwise_the_same() -> None:
    lens = ([700, 300, 20], [700, 300, 20])
    args = arrays(*lens, heads=16)
    run = jax.jit(attend("cute", *lens))
    first = np.asarray(run(*args)[0].view(jnp.uint16))
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(run(*args)[0].view(jnp.uint16)), first)


def test_several_gpus_share_heads() -> None:
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    lens = ([300], [300])
    args = arrays(*lens, heads=8)
    mesh = Mesh(np.array(devices[:2]), ("x",))
    sharded = [jax.device_put(a, NamedSharding(mesh, P(None, "x"))) for a in args]
    compiled = jax.jit(attend("cute", *lens)).lower(*sharded).compile()
    assert "all-gather" not in compiled.as_text()
    assert_right(compiled(*sharded), oracle(*args, *lens))


@pytest.mark.parametrize("causal", [True, False])
def test_kv_and_rope_as_the_layer_makes_them(causal: bool) -> None:
    lens = ([300, 0, 64], [300, 50, 200])
    rng = np.random.default_rng(5)
    shapes = [(sum(lens[0]), 4, 192), (sum(lens[1]) + 3, 4, 256), (sum(lens[1]) + 3, 64)]
    q, kv, k_rope = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
    kv, k_rope = kv.at[sum(lens[1]) :].set(jnp.nan), k_rope.at[sum(lens[1]) :].set(jnp.nan)
    kwargs = attend("cute", *lens, causal=causal).keywords
    got = jax.jit(partial(tsmla_jax.mla_prefill_kv, **kwargs))(q, kv, k_rope)
    rope = jnp.broadcast_to(k_rope[:, None], (*kv.shape[:2], 64))
    k = jnp.concatenate([kv[..., :128], rope], -1)
    v = kv[..., 128:]
    assert_right(got, oracle(q, k, v, *lens, causal=causal))
    same = attend("cute", *lens, causal=causal)(q, k, v)
    np.testing.assert_array_equal(np.float32(got[0]), np.float32(same[0]))


def test_a_layer_over_32k_tokens_needs_no_more_than_twice_its_keys_and_values() -> None:
    """Beside inputs and weights: the queries, kv as the projection gives it and the results; no k of every head."""
    config = MLAConfig(
        hidden_size=7168,
        num_attention_heads=128,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        q_lora_rank=1536,
    )
    tokens = 32768
    struct = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    params = {name: struct(shape) for name, shape in param_shapes(config).items()}

    def layer(params: Any, x: jax.Array, cu_seqlens: jax.Array) -> Any:
        return functional.prefill(params, config, x, cu_seqlens_q=cu_seqlens, max_q_len=tokens, implementation="cute")

    lowered = jax.jit(layer).lower(params, struct((tokens, 7168)), jax.ShapeDtypeStruct((2,), jnp.int32))
    needs = lowered.compile().memory_analysis()
    expanded = tokens * 128 * (192 + 128) * 2
    print(f"temporary {needs.temp_size_in_bytes / expanded:.2f}, results {needs.output_size_in_bytes / expanded:.2f}")
    assert needs.temp_size_in_bytes + needs.output_size_in_bytes <= 2 * expanded


# ---- gradients


def gradient_oracle(
    arrays: Sequence[Any], lens: tuple[Sequence[int], Sequence[int]], cotangents: Sequence[Any], **options: Any
) -> list[Any]:
    """The gradients of q, k and v in float64, for cotangents of out and lse."""
    return [x.numpy() for x in packed(*lens, **options).want(*in_torch((*arrays, *cotangents)))]


def make_cotangents(rows: int, heads: int, padding: int, dtype: Any = jnp.bfloat16) -> Results:
    """Cotangents of out and lse, NaN in the rows of no request."""
    rng = np.random.default_rng(rows)
    d_out, d_lse = rng.normal(size=(rows + padding, heads, 128)), rng.normal(size=(rows + padding, heads))
    d_out[rows:], d_lse[rows:] = np.nan, np.nan
    return jnp.asarray(d_out, dtype), jnp.asarray(d_lse, jnp.float32)


def gradients_of(run: Any, cotangents: Results, *args: jax.Array) -> tuple[jax.Array, ...]:
    return jax.vjp(run, *args)[1](cotangents)


def assert_right_gradients(got: Sequence[jax.Array], want: Sequence[Any]) -> None:
    """P and dS are rounded to the inputs' dtype, and so is the out that the backward pass reads."""
    for g, w in zip(got, want, strict=True):
        step = 2**-7 if g.dtype == jnp.bfloat16 else 2**-10
        assert np.isfinite(np.float64(g)).all()
        assert np.linalg.norm(np.float64(g) - w) <= step * np.linalg.norm(w)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", LENS)
def test_gradients(name: str, causal: bool) -> None:
    lens = LENS[name]
    args, cotangents = arrays(*lens), make_cotangents(sum(lens[0]), 3, 5)
    got = jax.jit(partial(gradients_of, attend("cute", *lens, causal=causal)))(cotangents, *args)
    assert_right_gradients(got, gradient_oracle(args, lens, cotangents, causal=causal))


def test_gradients_in_float16_and_under_vmap() -> None:
    lens = LENS["not a multiple of a tile"]
    args, cotangents = arrays(*lens, dtype=jnp.float16), make_cotangents(sum(lens[0]), 3, 5, jnp.float16)
    twice = [jnp.stack([x, -x]) for x in cotangents]
    got = jax.vmap(partial(gradients_of, attend("cute", *lens)), (0, None, None, None))(tuple(twice), *args)
    for i, sign in enumerate((1, -1)):
        want = gradient_oracle(args, lens, [sign * x for x in cotangents])
        assert_right_gradients([x[i] for x in got], want)


def test_gradients_of_the_scales() -> None:
    lens = LENS["new tokens behind a context"]
    args, cotangents = arrays(*lens), make_cotangents(sum(lens[0]), 3, 5)

    def run(scale: jax.Array, v_scale: jax.Array, *args: jax.Array) -> Results:
        return attend("cute", *lens, softmax_scale=scale, v_scale=v_scale)(*args)

    scales = {"softmax_scale": 0.1, "v_scale": 1.5}
    got = jax.jit(partial(gradients_of, run))(cotangents, *map(jnp.float32, scales.values()), *args)
    want = gradient_oracle(args, lens, cotangents, **scales)
    assert_right_gradients(got[2:], want)
    for g, d, x, scale in ((got[0], want[0], args[0], 0.1), (got[1], want[2], args[2], 1.5)):
        terms = np.where(d == 0, 0, d * np.float64(x)) / scale
        assert abs(float(g) - terms.sum()) <= 2**-7 * np.linalg.norm(terms) + 2**-7 * abs(terms.sum())


def layer_arrays(lens: tuple[Sequence[int], Sequence[int]], heads: int = 4) -> list[jax.Array]:
    """q, kv and k_rope with rows of NaN behind the last request."""
    rng = np.random.default_rng(5)
    given = []
    for rows, *widths in ((sum(lens[0]), heads, 192), (sum(lens[1]), heads, 256), (sum(lens[1]), 64)):
        x = rng.normal(size=(rows + 5, *widths))
        x[rows:] = np.nan
        given.append(jnp.asarray(x, jnp.bfloat16))
    return given


def attend_kv(lens: tuple[Sequence[int], Sequence[int]], **options: Any) -> Any:
    return partial(tsmla_jax.mla_prefill_kv, **attend("cute", *lens, **options).keywords)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_kv_and_rope(causal: bool) -> None:
    lens = LENS["not a multiple of a tile"]
    q, kv, k_rope = layer_arrays(lens)
    cotangents = make_cotangents(sum(lens[0]), 4, 5)
    got = jax.jit(partial(gradients_of, attend_kv(lens, causal=causal)))(cotangents, q, kv, k_rope)
    rope = jnp.broadcast_to(k_rope[:, None], (*kv.shape[:2], 64))
    expanded = (q, jnp.concatenate([kv[..., :128], rope], -1), kv[..., 128:])
    d_q, d_k, d_v = gradient_oracle(expanded, lens, cotangents, causal=causal)
    want = (d_q, np.concatenate([d_k[..., :128], d_v], -1), d_k[..., 128:].sum(1))
    assert_right_gradients(got, want)


@pytest.mark.parametrize("shared_rope", [False, True])
def test_deterministic_gradients_are_bitwise_the_same(shared_rope: bool) -> None:
    lens = ([2000, 300, 20], [2000, 300, 20])
    args = layer_arrays(lens, 16) if shared_rope else arrays(*lens, heads=16)
    call = attend_kv(lens, deterministic=True) if shared_rope else attend("cute", *lens, deterministic=True)
    run = jax.jit(partial(gradients_of, call, make_cotangents(sum(lens[0]), 16, 5)))
    first = [np.asarray(x.view(jnp.uint16)) for x in run(*args)]
    for _ in range(10):
        for got, want in zip(run(*args), first, strict=True):
            np.testing.assert_array_equal(np.asarray(got.view(jnp.uint16)), want)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("shared_rope", [False, True])
def test_memory_of_the_gradient(shared_rope: bool, heads: int, deterministic: bool) -> None:
    """Beside operands and results: out, the sums of dq in float32, 8 numbers a row and head (lse, its cotangent, the
    rows' terms), and sums of the shared rope columns, whose number does not grow with the heads."""
    tokens = 16384
    struct = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    d_out, d_lse = struct((tokens, heads, 128)), jax.ShapeDtypeStruct((tokens, heads), jnp.float32)
    lens = ([tokens], [tokens])
    if shared_rope:
        call = attend_kv(lens, deterministic=deterministic)
        inputs = [struct((tokens, heads, 192)), struct((tokens, heads, 256)), struct((tokens, 64))]
    else:
        call = attend("cute", *lens, deterministic=deterministic)
        inputs = [struct((tokens, heads, width)) for width in (192, 192, 128)]
    needs = jax.jit(partial(gradients_of, call)).lower((d_out, d_lse), *inputs).compile().memory_analysis()
    rope_sums = (16 if deterministic else 1) * tokens * 64 * 4 if shared_rope else 0
    numbers = (needs.temp_size_in_bytes - rope_sums) / (tokens * heads * 4)
    print(f"beside operands, results and {rope_sums} bytes of rope sums {numbers:.1f} float32 numbers a row and head")
    assert numbers <= 192 + 128 / 2 + 8
