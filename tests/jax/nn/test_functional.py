"""The functional form under jax's transformations, with other dtypes and fp8 caches, and with arguments it refuses."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tsmla_jax
from tsmla_jax.nn import MLAConfig, YarnConfig, functional, init_params, param_shapes, param_specs
from tsmla_jax.nn.params import check_params

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


@functools.cache
def inputs() -> tuple[dict[str, jax.Array], jax.Array]:
    params = init_params(jax.random.key(0), CONFIG)
    return params, jax.random.normal(jax.random.key(1), (TOTAL, CONFIG.hidden_size))


jitted_decode = jax.jit(
    functools.partial(functional.decode, config=CONFIG), static_argnames=("max_q_len", "implementation")
)
jitted_prefill_with_context = jax.jit(
    functools.partial(functional.prefill_with_context, config=CONFIG),
    static_argnames=("max_q_len", "context_chunk", "implementation"),
)


@functools.partial(jax.jit, static_argnames=("implementation",))
def prefill(params: Any, x: jax.Array, cu: Any = CU, implementation: str | None = "xla") -> Any:
    return functional.prefill(params, CONFIG, x, cu_seqlens_q=cu, max_q_len=9, implementation=implementation)


@jax.jit
def dense(params: Any, x: jax.Array) -> jax.Array:
    """One request, written out with a full score matrix: what prefill means, and differentiable by jax alone."""
    length = x.shape[0]
    cos, sin = functional.rope_cos_sin(CONFIG, jnp.arange(length))
    q = jnp.concatenate(functional.project_q(params, CONFIG, x, cos, sin), axis=-1)
    k, v = functional.expand_kv(params, *functional.project_latent(params, CONFIG, x, cos, sin))
    scores = jnp.einsum("qhd,khd->hqk", q, k) * CONFIG.softmax_scale
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    return functional.project_out(params, CONFIG, jnp.einsum("hqk,khv->qhv", jax.nn.softmax(scores), v))


def decode_arguments(dtype: Any = jnp.float32, cache_dtype: Any = None, seed: int = 2) -> dict[str, Any]:
    """Two requests with 9 and 6 tokens, of which 2 each are new, over a cache of which the old tokens are written."""
    rng = np.random.default_rng(seed)
    tables = jnp.asarray([[3, 1, 6], [5, 0, 2**31 - 1]], jnp.int32)
    cache = jnp.asarray(rng.normal(size=(8, PAGE, CONFIG.cache_dim)), dtype).astype(cache_dtype or dtype)
    seq_lens = jnp.asarray([9, 6], jnp.int32)
    positions = seq_lens[:, None] - 2 + jnp.arange(2)
    mapping = functional.slots_of(tables, jnp.arange(2)[:, None], positions, page_size=PAGE)
    x = jnp.asarray(rng.normal(size=(2, 2, CONFIG.hidden_size)), dtype)
    return {"x": x, "kv_cache": cache, "block_tables": tables, "seq_lens": seq_lens, "slot_mapping": mapping}


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
    for x, extra in ((spec((3, 2, 7168), jnp.bfloat16), {}), (spec((9, 7168), jnp.bfloat16), {"max_q_len": 4})):
        y, out_cache = jax.eval_shape(
            lambda p, x, c, tables, lens, slots, cu, extra=extra: functional.decode(
                p,
                config,
                x,
                c,
                block_tables=tables,
                seq_lens=lens,
                slot_mapping=slots,
                cu_seqlens_q=cu if extra else None,
                **extra,
            ),
            params,
            x,
            cache,
            ints((3, 8)),
            ints((3,)),
            ints(x.shape[:-1]),
            ints((4,)),
        )
        assert (y.shape, y.dtype) == (x.shape, jnp.bfloat16)
        assert (out_cache.shape, out_cache.dtype) == (cache.shape, cache.dtype)
    y, out_cache = jax.eval_shape(
        lambda p, x, c, tables, lens, slots, cu: functional.prefill_with_context(
            p,
            config,
            x,
            c,
            cu_seqlens_q=cu,
            max_q_len=512,
            block_tables=tables,
            context_lens=lens,
            slot_mapping=slots,
            context_chunk=256,
        ),
        params,
        spec((1024, 7168), jnp.bfloat16),
        cache,
        ints((3, 8)),
        ints((3,)),
        ints((1024,)),
        ints((4,)),
    )
    assert (y.shape, out_cache.shape) == ((1024, 7168), cache.shape)


@pytest.mark.parametrize("path", ["decode", "context"])
def test_a_donated_cache_is_updated_in_place(path: str) -> None:
    """A bf16 cache of 20 MB: the compiled program aliases it, and needs nowhere near its size beside it."""
    spec = jax.ShapeDtypeStruct
    params = {name: spec(shape, jnp.bfloat16) for name, shape in param_shapes(CONFIG).items()}
    cache = spec((1024, 256, CONFIG.cache_dim), jnp.bfloat16)
    ints = functools.partial(spec, dtype=jnp.int32)

    def step(params: Any, kv_cache: Any, x: Any, tables: Any, lens: Any, slots: Any, cu: Any) -> Any:
        if path == "decode":
            where = {"block_tables": tables, "seq_lens": lens, "slot_mapping": slots}
            return functional.decode(params, CONFIG, x, kv_cache, cu_seqlens_q=cu, max_q_len=4, **where)
        return functional.prefill_with_context(
            params,
            CONFIG,
            x,
            kv_cache,
            cu_seqlens_q=cu,
            max_q_len=4,
            block_tables=tables,
            context_lens=lens,
            slot_mapping=slots,
            context_chunk=8,
        )

    arguments = (cache, spec((8, 48), jnp.bfloat16), ints((3, 64)), ints((3,)), ints((8,)), ints((4,)))
    memory = jax.jit(step, donate_argnums=1).lower(params, *arguments).compile().memory_analysis()
    size = cache.size * cache.dtype.itemsize
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < 0.2 * size


@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_sharded_over_heads_by_jit(path: str) -> None:
    """Parameters placed by param_specs over two devices: the same numbers."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=2")
    params, x = inputs()
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("heads",))
    placed = {
        name: jax.device_put(params[name], NamedSharding(mesh, spec))
        for name, spec in param_specs(CONFIG, "heads").items()
    }
    assert len(placed["w_uk"].sharding.device_set) == 2 and not placed["w_uk"].sharding.is_fully_replicated
    if path == "prefill":
        run = jax.jit(lambda params: prefill(params, x)[0][:8])
    else:
        run = jax.jit(lambda params: functional.decode(params, CONFIG, implementation="xla", **decode_arguments())[0])
    np.testing.assert_allclose(run(placed), run(params), atol=1e-5)


@pytest.mark.parametrize("path", ["decode", "context"])
def test_shard_map_over_heads_gives_partial_sums(path: str) -> None:
    """What an engine writes: each device holds some heads, attends, and the outputs are summed."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=2")
    params, _ = inputs()
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("heads",))
    arguments = decode_arguments()
    seq_lens = arguments["seq_lens"]

    def run(params: Any, arguments: Any) -> jax.Array:
        if path == "decode":
            return functional.decode(params, CONFIG, implementation="xla", **arguments)[0]
        y, _ = functional.prefill_with_context(
            params,
            CONFIG,
            arguments["x"].reshape(4, CONFIG.hidden_size),
            arguments["kv_cache"],
            cu_seqlens_q=jnp.asarray([0, 2, 4], jnp.int32),
            max_q_len=2,
            block_tables=arguments["block_tables"],
            context_lens=seq_lens - 2,
            slot_mapping=arguments["slot_mapping"].reshape(-1),
            context_chunk=3,
            implementation="xla",
        )
        return y.reshape(arguments["x"].shape)

    sharded = jax.shard_map(
        lambda params, arguments: jax.lax.psum(run(params, arguments), "heads"),
        mesh=mesh,
        in_specs=(param_specs(CONFIG, "heads"), PartitionSpec()),
        out_specs=PartitionSpec(),
    )
    expected, _ = jitted_decode(params, implementation="xla", **arguments)
    np.testing.assert_allclose(jax.jit(sharded)(params, arguments), expected, atol=1e-5)


def test_shard_map_over_the_batch() -> None:
    """Each device serves one request: chunked context, whose loop is as long as that request's context."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=2")
    params, _ = inputs()
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("batch",))
    arguments = decode_arguments()

    def local(x: jax.Array, tables: jax.Array, context_lens: jax.Array, slots: jax.Array) -> jax.Array:
        y, _ = functional.prefill_with_context(
            params,
            CONFIG,
            x[0],
            arguments["kv_cache"],
            cu_seqlens_q=jnp.asarray([0, 2], jnp.int32),
            max_q_len=2,
            block_tables=tables,
            context_lens=context_lens,
            slot_mapping=slots[0],
            context_chunk=3,
            implementation="xla",
        )
        return y[None]

    split = PartitionSpec("batch")
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(split,) * 4, out_specs=split))
    got = run(arguments["x"], arguments["block_tables"], arguments["seq_lens"] - 2, arguments["slot_mapping"])
    expected, _ = jitted_decode(params, implementation="xla", **arguments)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_decode_equals_prefill_through_the_cache() -> None:
    """Absorbed over the cache and expanded without it are one function of the tokens."""
    params, _ = inputs()
    x = jax.random.normal(jax.random.key(4), (9, CONFIG.hidden_size))
    y, latent, k_rope = prefill(params, x, cu=jnp.asarray([0, 9], jnp.int32), implementation="reference")
    tables = jnp.asarray([[2, 0, 1]], jnp.int32)
    slots = functional.slots_of(tables, jnp.zeros(9, jnp.int32), jnp.arange(9), page_size=PAGE)
    np.testing.assert_array_equal(slots, [8, 9, 10, 11, 0, 1, 2, 3, 4])
    cache = jnp.full((3, PAGE, CONFIG.cache_dim), jnp.nan)
    cache = jax.jit(tsmla_jax.write_kv_cache)(cache, latent[:6], k_rope[:6], slots[:6])
    got, cache = jitted_decode(
        params,
        x=x[None, 6:],
        kv_cache=cache,
        block_tables=tables,
        seq_lens=jnp.asarray([9], jnp.int32),
        slot_mapping=slots[None, 6:],
    )
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
    np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=0.05)


@pytest.mark.parametrize("quantise_q", [False, True])
def test_fp8_cache_is_dequantised_by_its_scale(quantise_q: bool) -> None:
    """kv_scale reaches the write, the gather of the context and the decode: with a scale far from 1 all paths agree."""
    params, _ = inputs()
    x = jax.random.normal(jax.random.key(4), (9, CONFIG.hidden_size))
    expected = dense(params, x)
    tables = jnp.asarray([[2, 0, 1]], jnp.int32)
    slots = functional.slots_of(tables, jnp.zeros(9, jnp.int32), jnp.arange(9), page_size=PAGE)
    kv_scale = jnp.float32(0.031)
    cache = jnp.zeros((3, PAGE, CONFIG.cache_dim), jnp.float8_e4m3fn)
    common = {"block_tables": tables, "kv_scale": kv_scale}
    for begin, end in ((0, 4), (4, 7)):
        y, cache = jitted_prefill_with_context(
            params,
            x=x[begin:end],
            kv_cache=cache,
            cu_seqlens_q=jnp.asarray([0, end - begin], jnp.int32),
            max_q_len=4,
            context_lens=jnp.asarray([begin], jnp.int32),
            slot_mapping=slots[begin:end],
            context_chunk=3,
            **common,
        )
        np.testing.assert_allclose(y, expected[begin:end], atol=0.15)
    y, cache = jitted_decode(
        params,
        x=x[None, 7:],
        kv_cache=cache,
        seq_lens=jnp.asarray([9], jnp.int32),
        slot_mapping=slots[None, 7:],
        q_scale=0.02 if quantise_q else None,
        **common,
    )
    assert cache.dtype == jnp.float8_e4m3fn and y.dtype == jnp.float32
    np.testing.assert_allclose(y[0], expected[7:], atol=0.15)
    assert np.abs(expected).max() > 0.5  # so that 0.15 tells right from wrong by the scale


def test_positions_and_slots() -> None:
    cu = jnp.asarray([0, 2, 2, 5], jnp.int32)
    requests, positions = functional.ragged_positions(cu, jnp.asarray([7, 3, 0], jnp.int32), 7)
    np.testing.assert_array_equal(requests[:5], [0, 0, 2, 2, 2])
    np.testing.assert_array_equal(positions, [7, 8, 0, 1, 2, -1, -1])
    tables = jnp.asarray([[5, 1], [9, 9], [0, 2**31 - 1]], jnp.int32)
    got = functional.slots_of(tables, requests, positions, page_size=4)
    np.testing.assert_array_equal(got, [5 * 0 + 7 % 4 + 1 * 4, -1, 0, 1, 2, -1, -1])


def test_refused_arguments() -> None:
    params, x = inputs()
    with pytest.raises(ValueError, match=r"x\.shape=\(10, 47\) must be \[T, E\] with E = 48"):
        prefill(params, x[:, :47])
    with pytest.raises(ValueError, match=r"x\.shape=\(1, 10, 48\) must be \[T, E\]"):
        prefill(params, x[None])
    with pytest.raises(ValueError, match="cu_seqlens_q: got dtype float32; legal: int32"):
        prefill(params, x, cu=CU.astype(np.float32))
    with pytest.raises(ValueError, match=r"cu_seqlens_q: got shape \(1, 4\); legal: a vector"):
        prefill(params, x, cu=CU[None])
    with pytest.raises(ValueError, match="seq_lens: got dtype int64; legal: int32"):
        functional.decode(params, CONFIG, **{**decode_arguments(), "seq_lens": np.asarray([9, 6])})
    with pytest.raises(ValueError, match="implementation: got 'fast'"):
        prefill(params, x, implementation="fast")
    with pytest.raises(TypeError, match="max_q_len"):
        jax.jit(lambda n: functional.prefill(params, CONFIG, x, cu_seqlens_q=CU, max_q_len=n))(5)
    arguments = decode_arguments()
    with pytest.raises(ValueError, match="x \\[B, S, E\\] must have neither"):
        functional.decode(params, CONFIG, max_q_len=2, **arguments)
    with pytest.raises(ValueError, match="ragged x \\[T, E\\] needs cu_seqlens_q and max_q_len"):
        functional.decode(params, CONFIG, **{**arguments, "x": x})
    with pytest.raises(ValueError, match="kv_cache"):
        functional.decode(params, CONFIG, **{**arguments, "kv_cache": arguments["kv_cache"][..., :-1]})
    with pytest.raises(ValueError, match="block_tables: got dtype float32; legal: int32"):
        functional.decode(params, CONFIG, **{**arguments, "block_tables": jnp.zeros((2, 3))})
    with pytest.raises(ValueError, match="context_chunk=0 must be >= 1"):
        functional.prefill_with_context(
            params,
            CONFIG,
            x,
            arguments["kv_cache"],
            cu_seqlens_q=CU,
            max_q_len=5,
            block_tables=jnp.zeros((3, 2), jnp.int32),
            context_lens=jnp.zeros(3, jnp.int32),
            slot_mapping=jnp.zeros(TOTAL, jnp.int32),
            context_chunk=0,
        )


def test_parameters_are_checked_by_name() -> None:
    params, _ = inputs()
    check_params(params, CONFIG)
    with pytest.raises(ValueError, match="'w_uk' is missing"):
        check_params({name: value for name, value in params.items() if name != "w_uk"}, CONFIG)
    with pytest.raises(ValueError, match="'q_proj' is unknown"):
        check_params({**params, "q_proj": params["w_uk"]}, CONFIG)
    with pytest.raises(ValueError, match=r"'o_proj' must have shape \(4, 12, 48\), got \(1,\)"):
        check_params({**params, "o_proj": jnp.zeros(1)}, CONFIG)


def test_random_parameters_keep_the_scale() -> None:
    """Unit inputs stay near unit size through every projection."""
    params = init_params(jax.random.key(3), CONFIG, jnp.bfloat16)
    assert {name: value.shape for name, value in params.items()} == param_shapes(CONFIG)
    assert all(value.dtype == jnp.bfloat16 for value in params.values())
    x = jax.random.normal(jax.random.key(1), (64, CONFIG.hidden_size))

    @jax.jit
    def every_projection(params: Any, x: jax.Array) -> tuple[jax.Array, ...]:
        cos, sin = functional.rope_cos_sin(CONFIG, jnp.arange(64))
        q_nope, _ = functional.project_q(params, CONFIG, x, cos, sin)
        latent, k_rope = functional.project_latent(params, CONFIG, x, cos, sin)
        k, v = functional.expand_kv(params, latent, k_rope)
        return q_nope, latent, k, v, functional.project_out(params, CONFIG, v)

    for array in every_projection(params, x):
        assert 0.7 < float(jnp.std(array)) < 1.4
