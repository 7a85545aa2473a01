"""V4's attention layer against transformers' own, eager, float32: every kind of layer, prefill and 300 decode steps."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tsmla_jax
from tests.jax.nn import hf_layers
from tsmla_jax.nn import deepseek_v4 as v4

PAGE, PROMPT, LENGTH = 8, 37, hf_layers.V4_LENGTH
SPLIT_LENGTH = 140  # past an entry of either ratio, past the window, more entries than are chosen


def build(
    name: str, dtype: Any = jnp.float32, indexer_dtype: Any = jnp.float32, kv_scale: float | None = None
) -> tuple[Any, ...]:
    fields, tensors, x, y = hf_layers.v4_layer(name)
    config = v4.V4Config.from_hf(fields, hf_layers.V4_LAYERS[name] % 3 if "few" not in name else 1)
    params = v4.v4_params_from_hf(config, {k: t for k, t in tensors.items() if "rotary" not in k})
    pages = -(-LENGTH // PAGE)
    rng = np.random.default_rng(0)
    tables = jnp.asarray(rng.permutation(2 * pages).reshape(2, pages), jnp.int32)
    cache = v4.init_v4_layer_cache(
        config,
        window_pages=2 * pages,
        compressed_pages=2 * pages,
        num_states=3,
        page_size=PAGE,
        dtype=dtype,
        indexer_dtype=indexer_dtype,
    )
    table = v4.v4_rope_table(config, LENGTH)

    # Not what is compiled but how fast: unoptimised code compiles in half the time.
    @functools.partial(jax.jit, donate_argnums=1, compiler_options={"xla_backend_optimization_level": 0})
    def run(x: jax.Array, cache: v4.V4Cache, seq_lens: jax.Array, cu: jax.Array) -> tuple[jax.Array, v4.V4Cache]:
        step = v4.make_step(
            config,
            seq_lens=seq_lens,
            cu_seqlens_q=cu,
            total_tokens=x.shape[0],
            state_slots=jnp.asarray([2, 0], jnp.int32),
            window_tables=tables,
            compressed_tables=tables[::-1],
            page_size=PAGE,
        )
        return v4.attend(params, config, x, cache, step, cos_sin=table, page_size=PAGE, kv_scale=kv_scale)

    return config, run, cache, x, y


def ints(x: object) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


@pytest.mark.parametrize("name", ["sliding", "csa, few chosen", "hca"])
def test_prefill_and_300_decode_steps(name: str) -> None:
    _, run, cache, x, y = build(name)
    out, cache = run(np.concatenate(x[:, :PROMPT]), cache, ints([PROMPT, PROMPT]), ints([0, PROMPT, 2 * PROMPT]))
    got = [np.asarray(out).reshape(2, PROMPT, -1)]
    for position in range(PROMPT, LENGTH):
        out, cache = run(x[:, position], cache, ints([position + 1] * 2), ints([0, 1, 2]))
        got.append(np.asarray(out)[:, None])
    np.testing.assert_allclose(np.concatenate(got, axis=1), y, rtol=1e-5, atol=1e-5)


def test_ragged_chunks_with_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")  # the layers pass their own checks
    _, run, cache, x, y = build("csa")
    done = [0, 0]
    for counts in [(50, 3), (1, 140), (199, 0), (0, 90)]:
        rows = [x[r, done[r] : done[r] + n] for r, n in enumerate(counts)]
        padded = np.concatenate([*rows, np.full((200 - sum(counts), x.shape[2]), np.nan, np.float32)])
        done = [a + n for a, n in zip(done, counts, strict=True)]
        out, cache = run(padded, cache, ints(done), ints([0, counts[0], sum(counts)]))
        out = np.asarray(out)
        for r, first in ((0, 0), (1, counts[0])):
            want = y[r, done[r] - counts[r] : done[r]]
            np.testing.assert_allclose(out[first : first + counts[r]], want, rtol=1e-5, atol=1e-5)


built = functools.cache(build)


@functools.cache
def caches_after_one_call(name: str) -> list[np.ndarray]:
    _, run, empty, x, _ = built(name)
    x = np.concatenate(x[:, :SPLIT_LENGTH])
    cache = run(x, jax.tree.map(jnp.copy, empty), ints([SPLIT_LENGTH] * 2), ints([0, SPLIT_LENGTH, len(x)]))[1]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(cache)]


@settings(max_examples=8)
@given(data=st.data())
@pytest.mark.parametrize("name", ["csa, few chosen", "hca"])
def test_no_split_shows_in_outputs_or_caches(name: str, data: st.DataObject) -> None:
    _, run, empty, x, y = built(name)
    want = caches_after_one_call(name)
    cache = hf_layers.run_split(data, run, empty, x, y, SPLIT_LENGTH)
    for got, whole in zip(jax.tree.leaves(cache), want, strict=True):
        np.testing.assert_allclose(np.asarray(got), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "kv_scale", "tolerance"), [("bfloat16", None, 0.02), ("float8_e4m3fn", 0.03, 0.06)])
def test_narrow_caches_come_close(dtype: str, kv_scale: float | None, tolerance: float) -> None:
    _, run, cache, x, y = build("csa", jnp.dtype(dtype), jnp.uint8, kv_scale)
    out, _ = run(np.concatenate(x), cache, ints([LENGTH, LENGTH]), ints([0, LENGTH, 2 * LENGTH]))
    error = np.asarray(out).reshape(y.shape) - y
    assert np.sqrt((error**2).mean()) < tolerance * np.sqrt((y**2).mean())


def test_config_of_both_spellings() -> None:
    fields = hf_layers.v4_layer("csa")[0]
    legacy = {
        **hf_layers.V4_FIELDS,
        "index_topk": 200,
        "compress_ratios": [0, 4, 128],
        "rope_scaling": dict(hf_layers.V4_YARN),
    }
    del legacy["layer_types"]
    for layer in range(3):
        assert v4.V4Config.from_hf(fields, layer) == v4.V4Config.from_hf(legacy, layer)
    assert v4.V4Config.from_hf(legacy, 2).ratio == 128
    assert v4.V4Config.from_hf(legacy, 0).yarn is None
    assert v4.V4Config.from_hf(legacy, 1).rope_theta == 40000.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": None}, "head_dim"),
        ({"layer_types": ["full_attention"] * 3}, "layer 1 has type 'full_attention'; legal"),
        ({"layer_types": None}, "layer_types"),
        ({"o_groups": 4}, "must be a multiple of self.o_groups"),
        ({"qk_rope_head_dim": 7}, "even"),
    ],
)
def test_refuses_configs(change: dict[str, Any], message: str) -> None:
    fields = {**hf_layers.V4_FIELDS, "index_topk": 5, **change}
    with pytest.raises(ValueError, match=message):
        v4.V4Config.from_hf({k: value for k, value in fields.items() if value is not None}, 1)


def test_refuses_weights_and_steps() -> None:
    fields, tensors, _, _ = hf_layers.v4_layer("csa")
    config = v4.V4Config.from_hf(fields, 1)
    with pytest.raises(ValueError, match=r"tensor 'kv_proj.weight' is missing"):
        v4.v4_params_from_hf(config, {k: t for k, t in tensors.items() if k != "kv_proj.weight"})
    with pytest.raises(ValueError, match="tensor 'sinks' must have shape"):
        v4.v4_params_from_hf(config, {**tensors, "sinks": np.zeros(7)})
    assert set(v4.v4_hf_shapes(config)) == {k for k in tensors if "rotary" not in k}


@pytest.mark.parametrize("kind", ["hca", "sliding"])
def test_the_packed_cache_of_a_real_head(kind: v4.Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    config = v4.V4Config(
        kind=kind,
        ratio=128 if kind == "hca" else 0,
        hidden_size=32,
        num_attention_heads=2,
        q_lora_rank=16,
        o_groups=1,
        o_lora_rank=8,
    )
    rng = np.random.default_rng(0)
    params = {
        name: rng.standard_normal(shape).astype(np.float32) * (0.1 if len(shape) > 1 else 1)
        for name, shape in v4.v4_param_shapes(config).items()
    }
    x = rng.standard_normal((300, 32)).astype(np.float32)
    results = []
    for dtype in (jnp.float32, jnp.uint8):
        cache = v4.init_v4_layer_cache(
            config, window_pages=5, compressed_pages=1, num_states=1, page_size=64, dtype=dtype
        )

        @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
        def run(x: jax.Array, cache: v4.V4Cache) -> jax.Array:
            step = v4.make_step(
                config,
                seq_lens=ints([300]),
                cu_seqlens_q=ints([0, 300]),
                total_tokens=300,
                state_slots=ints([0]),
                window_tables=ints([[0, 1, 2, 3, 4]]),
                compressed_tables=ints([[0]]),
                page_size=64,
            )
            return v4.attend(params, config, x, cache, step, cos_sin=v4.v4_rope_table(config, 300), page_size=64)[0]

        results.append(np.asarray(run(x, cache)))
    error = results[1] - results[0]
    assert 0 < np.sqrt((error**2).mean()) < 0.03 * np.sqrt((results[0] ** 2).mean())


def test_states_are_a_pytree_of_the_public_type() -> None:
    _, _, cache, _, _ = build("hca")
    assert isinstance(cache.compressor, tsmla_jax.CompressorState)
    assert cache.indexer is None and cache.indexer_compressor is None
