"""The functional form under jax's transformations, with other dtypes and fp8 caches, and with arguments it refuses."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import tsmla_jax
from tests.jax.nn.drawn import draw_mla, draw_v32
from tsmla_jax.nn import MLAConfig, Step, YarnConfig, functional, param_shapes, param_specs, v32
from tsmla_jax.nn.checkpoints.weights import check_params

CONFIG = MLAConfig(
    hidden_size=48,
    num_attention_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    q_lora_rank=24,
    yarn=YarnConfig(40.0, 64, mscale_all_dim=1.0),
)
PAGE = 4
CU = np.asarray([0, 5, 5, 8], np.int32)  # three requests of 5, 0 and 3 tokens
TOTAL = 10


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@functools.cache
def inputs() -> tuple[dict[str, jax.Array], jax.Array]:
    return draw_mla(jax.random.key(0), CONFIG), normal(1, TOTAL, CONFIG.hidden_size)


jitted_decode = jax.jit(functools.partial(functional.decode, config=CONFIG), static_argnames=("implementation",))
jitted_prefill_with_context = jax.jit(
    functools.partial(functional.prefill_with_context, config=CONFIG),
    static_argnames=("context_chunk", "implementation"),
)


@functools.partial(jax.jit, static_argnames=("implementation",))
def prefill(params: Any, x: jax.Array, cu: Any = CU, implementation: str | None = "xla") -> Any:
    return functional.prefill(params, CONFIG, x, cu_seqlens_q=cu, max_q_len=9, implementation=implementation)


def expand_kv(params: Any, latent: jax.Array, k_rope: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values per head from the cached form: k [T, H, N + R] and v [T, H, V]."""
    k_nope, v = jnp.split(functional.expand_joint_kv(params, latent), [CONFIG.qk_nope_head_dim], axis=-1)
    shared = jnp.broadcast_to(k_rope[:, None, :], (*k_nope.shape[:2], k_rope.shape[-1]))
    return jnp.concatenate([k_nope, shared], axis=-1), v


@jax.jit
def dense(params: Any, x: jax.Array) -> jax.Array:
    """One request, written out with a full score matrix: the definition of prefill, differentiable by jax alone."""
    length = x.shape[0]
    cos, sin = functional.rope_cos_sin(CONFIG, jnp.arange(length))
    q = jnp.concatenate(functional.project_q(params, CONFIG, x, cos, sin), axis=-1)
    k, v = expand_kv(params, *functional.project_latent(params, CONFIG, x, cos, sin))
    scores = jnp.einsum("qhd,khd->hqk", q, k) * CONFIG.softmax_scale
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    return functional.project_out(params, CONFIG, jnp.einsum("hqk,khv->qhv", jax.nn.softmax(scores), v))


def decode_arguments(dtype: Any = jnp.float32, cache_dtype: Any = None, seed: int = 2) -> dict[str, Any]:
    """Two requests with 9 and 6 tokens, 2 of each new, over a cache that holds the old tokens."""
    rng = np.random.default_rng(seed)
    tables = jnp.asarray([[3, 1, 6], [5, 0, 2**31 - 1]], jnp.int32)
    cache = jnp.asarray(rng.normal(size=(8, PAGE, CONFIG.cache_dim)), dtype).astype(cache_dtype or dtype)
    step = Step.dense(tables, jnp.asarray([9, 6], jnp.int32), new_tokens=2, page_size=PAGE)
    x = jnp.asarray(rng.normal(size=(2, 2, CONFIG.hidden_size)), dtype)
    return {"x": x, "kv_cache": cache, "step": step}


def as_ragged(step: Step) -> Step:
    """A dense step's tokens packed: as many requests, their new tokens one behind the other."""
    requests, new = step.slot_mapping.shape
    cu_seqlens_q = jnp.arange(requests + 1, dtype=jnp.int32) * new
    return Step(step.block_tables, step.seq_lens, step.slot_mapping.reshape(-1), cu_seqlens_q, new)


def test_gradient_of_the_expanded_path() -> None:
    """Every parameter's gradient equals that of the written-out attention; padding and other requests don't leak in."""
    params, x = inputs()

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(prefill(params, x)[0][:8]))

    def expected_loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(dense(params, x[:5]))) + jnp.sum(jnp.sin(dense(params, x[5:8])))

    got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)
    expected = jax.jit(jax.value_and_grad(expected_loss, argnums=(0, 1)))(params, x)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for name, gradient in got[1][0].items():
        np.testing.assert_allclose(gradient, expected[1][0][name], atol=2e-5, err_msg=name)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(got[1][1], expected[1][1], atol=2e-5)
    assert np.abs(expected[1][0]["w_uk"]).max() > 1e-2


def test_eval_shape_of_the_published_sizes() -> None:
    """DeepSeek-V3's own sizes, without computing anything: names, shapes and dtypes of every path."""
    config = MLAConfig(7168, 128, q_lora_rank=1536, yarn=YarnConfig(40.0, 4096, mscale_all_dim=1.0))
    spec = jax.ShapeDtypeStruct
    params = {name: spec(shape, jnp.bfloat16) for name, shape in param_shapes(config).items()}
    cache = spec((64, 64, 576), jnp.bfloat16)
    ints = functools.partial(spec, dtype=jnp.int32)
    y, latent, k_rope = jax.eval_shape(
        lambda p, x, cu: functional.prefill(p, config, x, cu_seqlens_q=cu, max_q_len=512),
        params,
        spec((1024, 7168), jnp.bfloat16),
        ints((4,)),
    )
    assert (y.shape, latent.shape, k_rope.shape) == ((1024, 7168), (1024, 512), (1024, 64))
    ragged = Step(ints((3, 8)), ints((3,)), ints((1024,)), ints((4,)), 512)
    paths = {
        (3, 2, 7168): (functional.decode, Step(ints((3, 8)), ints((3,)), ints((3, 2)))),
        (9, 7168): (functional.decode, Step(ints((3, 8)), ints((3,)), ints((9,)), ints((4,)), 4)),
        (1024, 7168): (functools.partial(functional.prefill_with_context, context_chunk=256), ragged),
    }
    for shape, (path, step) in paths.items():
        y, out_cache = jax.eval_shape(
            lambda p, *arguments, path=path: path(p, config, *arguments), params, spec(shape, jnp.bfloat16), cache, step
        )
        assert (y.shape, y.dtype) == (shape, jnp.bfloat16)
        assert (out_cache.shape, out_cache.dtype) == (cache.shape, cache.dtype)


@pytest.mark.parametrize("path", ["decode", "context"])
def test_a_donated_cache_is_updated_in_place(path: str) -> None:
    """A bf16 cache of 20 MB: the compiled program aliases it, and needs nowhere near its size beside it."""
    spec = jax.ShapeDtypeStruct
    params = {name: spec(shape, jnp.bfloat16) for name, shape in param_shapes(CONFIG).items()}
    cache = spec((1024, 256, CONFIG.cache_dim), jnp.bfloat16)
    ints = functools.partial(spec, dtype=jnp.int32)

    context = functools.partial(functional.prefill_with_context, context_chunk=8)
    run = functional.decode if path == "decode" else context
    step = Step(ints((3, 64)), ints((3,)), ints((8,)), ints((4,)), 4)
    jitted = jax.jit(lambda params, cache, x, step: run(params, CONFIG, x, cache, step), donate_argnums=1)
    memory = jitted.lower(params, cache, spec((8, 48), jnp.bfloat16), step).compile().memory_analysis()
    size = cache.size * cache.dtype.itemsize
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < 0.2 * size


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("prefill", AxisType.Auto),
        ("decode", AxisType.Auto),
        ("gradient", AxisType.Explicit),
        ("decode", AxisType.Explicit),
    ],
)
@pytest.mark.sampled(2)
def test_sharded_over_heads_by_jit(path: str, kind: AxisType) -> None:
    """Parameters placed by param_specs over two devices: the same numbers."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=2")
    params, x = inputs()
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("heads",), axis_types=(kind,))
    placed = {
        name: jax.device_put(params[name], NamedSharding(mesh, spec))
        for name, spec in param_specs(CONFIG, "heads").items()
    }
    assert len(placed["w_uk"].sharding.device_set) == 2 and not placed["w_uk"].sharding.is_fully_replicated
    arguments = decode_arguments()

    def run(params: Any) -> Any:
        if path == "decode":
            return functional.decode(params, CONFIG, implementation="xla", **arguments)[0]
        if path == "gradient":
            return jax.grad(lambda params: jnp.mean(prefill(params, x)[0][:8] ** 2))(params)
        return prefill(params, x)[0][:8]

    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), jax.jit(run)(placed), jax.jit(run)(params))


@pytest.mark.parametrize("path", ["decode", "context"])
def test_shard_map_over_heads_gives_partial_sums(path: str) -> None:
    """As an engine does: each device holds some heads, attends, and the outputs are summed."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=2")
    params, _ = inputs()
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("heads",))
    arguments = decode_arguments()

    def run(params: Any, arguments: Any) -> jax.Array:
        x, cache, step = arguments["x"], arguments["kv_cache"], arguments["step"]
        if path == "decode":
            return functional.decode(params, CONFIG, x, cache, step, implementation="xla")[0]
        y, _ = functional.prefill_with_context(
            params, CONFIG, x.reshape(4, -1), cache, as_ragged(step), context_chunk=3, implementation="xla"
        )
        return y.reshape(x.shape)

    sharded = jax.shard_map(
        lambda params, arguments: jax.lax.psum(run(params, arguments), "heads"),
        mesh=mesh,
        in_specs=(param_specs(CONFIG, "heads"), PartitionSpec()),
        out_specs=PartitionSpec(),
    )
    expected, _ = jitted_decode(params, implementation="xla", **arguments)
    np.testing.assert_allclose(jax.jit(sharded)(params, arguments), expected, atol=1e-5)


@pytest.mark.parametrize("path", ["decode", "prefill", "v32"])
def test_shard_map_over_heads_adds_the_bias_once(path: str) -> None:
    """o_proj_bias is on every device, and the caller sums what they return."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=2")
    config = dataclasses.replace(CONFIG, attention_bias=True)
    layer = v32.V32Config(config, index_n_heads=2, index_head_dim=16, index_topk=4) if path == "v32" else config
    params = (draw_v32 if path == "v32" else draw_mla)(jax.random.key(0), layer)
    params["o_proj_bias"] = normal(1, *params["o_proj_bias"].shape)
    arguments = decode_arguments()

    def run(params: Any) -> jax.Array:
        if path == "decode":
            return functional.decode(params, config, implementation="xla", **arguments)[0]
        x = arguments["x"].reshape(-1, config.hidden_size)
        texts: Any = {"cu_seqlens_q": jnp.asarray([0, len(x)], jnp.int32), "max_q_len": len(x), "implementation": "xla"}
        if path == "prefill":
            return functional.prefill(params, config, x, **texts)[0]
        return v32.prefill(params, layer, x, dense=True, index_loss=False, **texts).y

    sharded = jax.shard_map(
        lambda params: jax.lax.psum(run(params), "heads"),
        mesh=Mesh(np.asarray(jax.devices()[:2]), ("heads",)),
        in_specs=((v32.param_specs if path == "v32" else param_specs)(layer, "heads"),),
        out_specs=PartitionSpec(),
    )
    np.testing.assert_allclose(jax.jit(sharded)(params), jax.jit(run)(params), atol=1e-5)


def test_shard_map_over_the_batch() -> None:
    """Each device serves one request: chunked context, whose loop is as long as that request's context."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=2")
    params, _ = inputs()
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("batch",))
    arguments = decode_arguments()

    def local(x: jax.Array, step: Step) -> jax.Array:
        y, _ = functional.prefill_with_context(
            params, CONFIG, x[0], arguments["kv_cache"], as_ragged(step), context_chunk=3, implementation="xla"
        )
        return y[None]

    split = PartitionSpec("batch")
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(split, split), out_specs=split))
    got = run(arguments["x"], arguments["step"])
    expected, _ = jitted_decode(params, implementation="xla", **arguments)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_decode_equals_prefill_through_the_cache() -> None:
    """Absorbed over the cache and expanded without it are one function of the tokens."""
    params, _ = inputs()
    x = normal(4, 9, CONFIG.hidden_size)
    y, latent, k_rope = prefill(params, x, cu=jnp.asarray([0, 9], jnp.int32), implementation="reference")
    tables = jnp.asarray([[2, 0, 1]], jnp.int32)
    slots = functional.slots_of(tables, jnp.zeros(9, jnp.int32), jnp.arange(9), page_size=PAGE)
    np.testing.assert_array_equal(slots, [8, 9, 10, 11, 0, 1, 2, 3, 4])
    cache = jnp.full((3, PAGE, CONFIG.cache_dim), jnp.nan)
    cache = jax.jit(tsmla_jax.write_kv_cache)(cache, latent[:6], k_rope[:6], slots[:6])
    step = Step.dense(tables, jnp.asarray([9], jnp.int32), new_tokens=3, page_size=PAGE)
    np.testing.assert_array_equal(step.slot_mapping[0], slots[6:])
    got, cache = jitted_decode(params, x=x[None, 6:], kv_cache=cache, step=step)
    expected = dense(params, x)
    np.testing.assert_allclose(got[0], expected[6:], atol=1e-5)
    np.testing.assert_allclose(
        cache.reshape(-1, CONFIG.cache_dim)[np.asarray(slots)], jnp.concatenate([latent, k_rope], axis=1), atol=1e-5
    )
    np.testing.assert_allclose(y[:5], expected[:5], atol=1e-5)


def test_bfloat16_stays_near_float32() -> None:
    params, x = inputs()
    low = {name: jnp.asarray(np.asarray(value).astype(jnp.bfloat16)) for name, value in params.items()}
    exact = {name: jnp.asarray(np.asarray(value).astype(np.float32)) for name, value in low.items()}
    x_low = x[:8].astype(jnp.bfloat16)
    cu = jnp.asarray([0, 8], jnp.int32)
    y, latent, k_rope = prefill(low, x_low, cu=cu)
    assert y.dtype == latent.dtype == k_rope.dtype == jnp.bfloat16
    expected = np.asarray(dense(exact, x_low.astype(jnp.float32)))
    # Plain bf16 arithmetic over the same weights, as the yardstick.
    plain = np.asarray(dense(low, x_low)).astype(np.float32)
    error = np.abs(np.asarray(y).astype(np.float32) - expected).max()
    assert error <= 2 * np.abs(plain - expected).max() + 1e-3
    arguments = decode_arguments(jnp.bfloat16)
    wide = {**arguments, "x": arguments["x"].astype(jnp.float32), "kv_cache": arguments["kv_cache"].astype(jnp.float32)}
    got, _ = jitted_decode(low, **arguments)
    assert got.dtype == jnp.bfloat16
    expected, _ = jitted_decode(exact, **wide)
    assert np.linalg.norm(got.astype(jnp.float32) - expected) < 1e-2 * np.linalg.norm(expected)


def assert_near(got: Any, want: Any) -> None:
    """Two arrays that differ as rounding to e4m3 makes them, which has no direction: a wrong scale has."""
    got, want = np.float64(got), np.float64(want)
    assert np.linalg.norm(got - want) < 0.08 * np.linalg.norm(want)
    assert abs((got * want).sum() / (want * want).sum() - 1) < 0.02


@pytest.mark.parametrize("quantise_q", [False, True])
def test_fp8_cache_is_dequantised_by_its_scale(quantise_q: bool) -> None:
    """kv_scale reaches the write, the gather of the context and the decode: with a scale far from 1 all paths agree."""
    params, _ = inputs()
    x = normal(4, 9, CONFIG.hidden_size)
    expected = dense(params, x)
    tables = jnp.asarray([[2, 0, 1]], jnp.int32)
    cache = jnp.zeros((3, PAGE, CONFIG.cache_dim), jnp.float8_e4m3fn)
    kv_scale = jnp.float32(0.031)
    for begin, end in ((0, 4), (4, 7)):
        cu = jnp.asarray([0, end - begin], jnp.int32)
        sizes = {"total_tokens": end - begin, "max_q_len": 4, "page_size": PAGE}
        step = Step.ragged(tables, jnp.asarray([end], jnp.int32), cu, **sizes)
        y, cache = jitted_prefill_with_context(
            params, x=x[begin:end], kv_cache=cache, step=step, context_chunk=3, kv_scale=kv_scale
        )
        assert_near(y, expected[begin:end])
    step = Step.dense(tables, jnp.asarray([9], jnp.int32), new_tokens=2, page_size=PAGE)
    q_scale = 0.02 if quantise_q else None
    y, cache = jitted_decode(params, x=x[None, 7:], kv_cache=cache, step=step, q_scale=q_scale, kv_scale=kv_scale)
    assert cache.dtype == jnp.float8_e4m3fn and y.dtype == jnp.float32
    assert_near(y[0], expected[7:])


def test_too_few_passes_over_the_context_give_nan() -> None:
    params, _ = inputs()
    x, cache = normal(5, 2, CONFIG.hidden_size), jnp.ones((3, PAGE, CONFIG.cache_dim))
    tables, lens = jnp.asarray([[2, 0, 1]], jnp.int32), jnp.asarray([9], jnp.int32)
    step = Step.ragged(tables, lens, jnp.asarray([0, 2], jnp.int32), total_tokens=2, page_size=PAGE)

    def run(passes: int | None) -> jax.Array:
        chunks: Any = {"context_chunk": 4, "context_passes": passes}
        return functional.prefill_with_context(params, CONFIG, x, cache, step, **chunks)[0]

    counted, enough, too_few = (jax.jit(run, static_argnums=0)(passes) for passes in (None, 2, 1))
    np.testing.assert_array_equal(counted, enough)
    assert np.isnan(too_few).all()


def test_positions_and_slots() -> None:
    cu = jnp.asarray([0, 2, 2, 5], jnp.int32)
    requests, positions = functional.ragged_positions(cu, jnp.asarray([7, 3, 0], jnp.int32), 7)
    np.testing.assert_array_equal(requests[:5], [0, 0, 2, 2, 2])
    np.testing.assert_array_equal(positions, [7, 8, 0, 1, 2, -1, -1])
    tables = jnp.asarray([[5, 1], [9, 9], [0, 2**31 - 1]], jnp.int32)
    got = functional.slots_of(tables, requests, positions, page_size=4)
    np.testing.assert_array_equal(got, [5 * 0 + 7 % 4 + 1 * 4, -1, 0, 1, 2, -1, -1])
    step = Step.ragged(tables, jnp.asarray([9, 3, 3], jnp.int32), cu, total_tokens=7, page_size=4)
    np.testing.assert_array_equal(step.slot_mapping, got)
    np.testing.assert_array_equal(step.context_lens, [7, 3, 0])
    assert step.max_q_len == 7 and len(jax.tree.leaves(step)) == 4


def test_refused_arguments() -> None:
    params, x = inputs()
    arguments = decode_arguments()

    def decode(**fields: Any) -> Any:
        step = dataclasses.replace(arguments["step"], **fields)
        return functional.decode(params, CONFIG, **{**arguments, "step": step})

    with pytest.raises(ValueError, match=r"x: got shape \[10, 47\]; legal: \[T, E\] with E = 48"):
        prefill(params, x[:, :47])
    with pytest.raises(ValueError, match=r"x: got shape \[1, 10, 48\]; legal: \[T, E\]"):
        prefill(params, x[None])
    with pytest.raises(ValueError, match="cu_seqlens_q: got dtype float32; legal: int32"):
        prefill(params, x, cu=CU.astype(np.float32))
    with pytest.raises(ValueError, match=r"cu_seqlens_q: got shape \[1, 4\] of rank 2; legal: \[B \+ 1\]"):
        prefill(params, x, cu=CU[None])
    with pytest.raises(ValueError, match="seq_lens: got dtype int64; legal: int32"):
        decode(seq_lens=np.asarray([9, 6]))
    with pytest.raises(ValueError, match="implementation: got 'fast'"):
        prefill(params, x, implementation="fast")
    with pytest.raises(TypeError, match="max_q_len"):
        jax.jit(lambda n: functional.prefill(params, CONFIG, x, cu_seqlens_q=CU, max_q_len=n))(5)
    with pytest.raises(ValueError, match="x \\[B, S, E\\] must have neither"):
        decode(max_q_len=2)
    with pytest.raises(ValueError, match="ragged x \\[T, E\\] needs cu_seqlens_q and max_q_len"):
        functional.decode(params, CONFIG, **{**arguments, "x": x})
    with pytest.raises(ValueError, match="kv_cache"):
        functional.decode(params, CONFIG, **{**arguments, "kv_cache": arguments["kv_cache"][..., :-1]})
    with pytest.raises(ValueError, match="block_tables: got dtype float32; legal: int32"):
        decode(block_tables=jnp.zeros((2, 3)))
    context = functools.partial(functional.prefill_with_context, params, CONFIG, x[:4], arguments["kv_cache"])
    with pytest.raises(ValueError, match="context_chunk: got 0; legal: an int >= 1"):
        context(as_ragged(arguments["step"]), context_chunk=0)
    with pytest.raises(ValueError, match="ragged x \\[T, E\\] needs cu_seqlens_q and max_q_len"):
        context(arguments["step"], context_chunk=3)


def test_parameters_are_checked_by_name() -> None:
    params, shapes = inputs()[0], param_shapes(CONFIG)
    check_params(params, shapes)
    with pytest.raises(ValueError, match="'w_uk' is missing"):
        check_params({name: value for name, value in params.items() if name != "w_uk"}, shapes)
    with pytest.raises(ValueError, match="'q_proj' is unknown"):
        check_params({**params, "q_proj": params["w_uk"]}, shapes)
    with pytest.raises(ValueError, match=r"'o_proj' must have shape \(4, 12, 48\), got \(1,\)"):
        check_params({**params, "o_proj": jnp.zeros(1)}, shapes)


def test_random_parameters_keep_the_scale() -> None:
    """Unit inputs stay near unit size through every projection."""
    params = draw_mla(jax.random.key(3), CONFIG, jnp.bfloat16)
    assert {name: value.shape for name, value in params.items()} == param_shapes(CONFIG)
    assert all(value.dtype == jnp.bfloat16 for value in params.values())
    x = normal(1, 64, CONFIG.hidden_size)

    @jax.jit
    def every_projection(params: Any, x: jax.Array) -> tuple[jax.Array, ...]:
        cos, sin = functional.rope_cos_sin(CONFIG, jnp.arange(64))
        q_nope, _ = functional.project_q(params, CONFIG, x, cos, sin)
        latent, k_rope = functional.project_latent(params, CONFIG, x, cos, sin)
        k, v = expand_kv(params, latent, k_rope)
        return q_nope, latent, k, v, functional.project_out(params, CONFIG, v)

    for array in every_projection(params, x):
        assert 0.7 < np.std(array) < 1.4
