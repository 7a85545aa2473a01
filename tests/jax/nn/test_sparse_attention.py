"""V3.2's, GLM-5's and V4's layers against transformers' own, eager, float32: prefill, 300 decode steps, any split."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.jax.nn import hf_layers
from tsmla_jax.nn import Step, v4, v32
from tsmla_jax.ops.selected.compressor import CompressorState

Run = Callable[..., tuple[jax.Array, Any]]
SPLIT_LENGTH = 140  # past an entry of either ratio, past the window, more entries than are chosen
MAX_CALL = 2 * 90


def build(
    name: str, dtype: Any = jnp.float32, indexer_dtype: Any = jnp.float32, **options: Any
) -> tuple[Run, Any, np.ndarray, np.ndarray]:
    """run(x, cache, seq_lens, cu_seqlens_q), which gives its cache away; empty caches; input and output. options: of
    the layer's attend."""
    case = hf_layers.case(name)
    pages = -(-case.x.shape[1] // case.page_size)
    tables = jnp.asarray(np.random.default_rng(0).permutation(2 * pages).reshape(2, pages), jnp.int32)

    # Unoptimised code compiles in half the time, and its speed is not under test.
    @functools.partial(jax.jit, donate_argnums=1, compiler_options={"xla_backend_optimization_level": 0})
    def run(x: jax.Array, cache: Any, seq_lens: jax.Array, cu: jax.Array) -> tuple[jax.Array, Any]:
        step = case.step(tables, seq_lens, cu, x.shape[0])
        return case.family.attend(case.params, case.config, x, cache, step, **options)

    return run, case.cache(2 * pages, dtype, indexer_dtype), case.x, case.y


built = functools.cache(build)


def ints(x: object) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


@pytest.mark.parametrize("name", ["v3.2", "glm-5", "sliding", "csa, few chosen", "hca"])
@pytest.mark.sampled(3)
def test_prefill_and_300_decode_steps(name: str) -> None:
    run, cache, x, y = build(name)
    length = x.shape[1]
    prompt = length - 300
    out, cache = run(np.concatenate(x[:, :prompt]), cache, ints([prompt, prompt]), ints([0, prompt, 2 * prompt]))
    got = [np.asarray(out).reshape(2, prompt, -1)]
    for position in range(prompt, length):
        out, cache = run(x[:, position], cache, ints([position + 1] * 2), ints([0, 1, 2]))
        got.append(np.asarray(out)[:, None])
    np.testing.assert_allclose(np.concatenate(got, axis=1), y, rtol=1e-5, atol=1e-5)


def call(
    run: Run, x: np.ndarray, y: np.ndarray, cache: Any, done: list[int], counts: list[int], total: int, padding: float
) -> tuple[Any, list[int]]:
    """The caches after counts[r] more tokens of each text, padded to total; holds the output to y."""
    rows = [x[r, done[r] : done[r] + n] for r, n in enumerate(counts)]
    padded = np.concatenate([*rows, np.full((total - sum(counts), x.shape[2]), padding, np.float32)])
    done = [a + n for a, n in zip(done, counts, strict=True)]
    out, cache = run(padded, cache, ints(done), ints([0, counts[0], sum(counts)]))
    for r, first in ((0, 0), (1, counts[0])):
        want = y[r, done[r] - counts[r] : done[r]]
        np.testing.assert_allclose(np.asarray(out)[first : first + counts[r]], want, rtol=1e-5, atol=1e-5)
    return cache, done


@pytest.mark.parametrize("name", ["v3.2", "csa"])
@pytest.mark.sampled(2)
def test_ragged_chunks_with_padding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")  # the layers pass their own checks
    run, cache, x, y = build(name)
    done = [0, 0]
    for counts in ([50, 3], [1, 140], [199, 0], [0, 90]):
        cache, done = call(run, x, y, cache, done, counts, 200, np.nan)


@functools.cache
def caches_after_one_call(name: str) -> list[np.ndarray]:
    run, empty, x, _ = built(name)
    x = np.concatenate(x[:, :SPLIT_LENGTH])
    cache = run(x, jax.tree.map(jnp.copy, empty), ints([SPLIT_LENGTH] * 2), ints([0, SPLIT_LENGTH, len(x)]))[1]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(cache)]


@settings(max_examples=8)
@given(data=st.data())
@pytest.mark.parametrize("name", ["v3.2", "csa, few chosen", "hca"])
@pytest.mark.sampled(3)
def test_no_split_shows_in_outputs_or_caches(name: str, data: st.DataObject) -> None:
    run, empty, x, y = built(name)
    want = caches_after_one_call(name)
    cache, done = jax.tree.map(jnp.copy, empty), [0, 0]
    while min(done) < SPLIT_LENGTH:
        sizes = st.sampled_from([0, 1, 2, 5, 31, MAX_CALL // 2])
        counts = [min(SPLIT_LENGTH - n, data.draw(sizes)) for n in done]
        if not any(counts):  # texts that have tokens left take one
            counts = [min(SPLIT_LENGTH - n, 1) for n in done]
        cache, done = call(run, x, y, cache, done, counts, MAX_CALL, 0.0)
    for got, whole in zip(jax.tree.leaves(cache), want, strict=True):
        np.testing.assert_allclose(np.asarray(got), whole, rtol=1e-5, atol=1e-5)


def whole_error(name: str, dtype: Any, indexer_dtype: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Error and output of the whole input at once over narrow caches."""
    run, cache, x, y = build(name, dtype, indexer_dtype, **options)
    length = x.shape[1]
    out, _ = run(np.concatenate(x), cache, ints([length, length]), ints([0, length, 2 * length]))
    return np.asarray(out, np.float32).reshape(y.shape) - y, y


@pytest.mark.parametrize(("dtype", "kv_scale", "tolerance"), [("bfloat16", None, 0.02), ("float8_e4m3fn", 0.03, 0.06)])
@pytest.mark.sampled(2)
def test_narrow_caches_come_close(dtype: str, kv_scale: float | None, tolerance: float) -> None:
    error, y = whole_error("csa", jnp.dtype(dtype), jnp.uint8, kv_scale=kv_scale)
    assert np.sqrt((error**2).mean()) < tolerance * np.sqrt((y**2).mean())


@pytest.mark.parametrize(("name", "implementation"), [("v3.2", "xla"), ("csa", "reference")])
@pytest.mark.sampled(2)
def test_queries_of_e4m3_by_their_scale(name: str, implementation: str) -> None:
    """With scales far from 1, beyond which the queries saturate: an unscaled query or logit would be seen."""
    options = {"kv_scale": 2.0**-6, "implementation": implementation}
    narrow = jnp.float8_e4m3fn, jnp.float32
    wide, y = whole_error(name, *narrow, **options)
    size = np.sqrt((y**2).mean())
    scaled, _ = whole_error(name, *narrow, **options, q_scale=jnp.float32(2.0**-5))
    assert 0 < np.sqrt(((scaled - wide) ** 2).mean()) < 0.03 * size
    saturated, _ = whole_error(name, *narrow, **options, q_scale=2.0**-14)
    assert np.sqrt(((saturated - wide) ** 2).mean()) > 0.05 * size


def test_fp8_indexer_keys_choose_nearly_the_same() -> None:
    error, y = whole_error("v3.2", jnp.bfloat16, jnp.uint8)
    # Some tokens choose another key at the edge of their 12; most choose the same ones.
    assert np.median(np.abs(error).max(-1)) < 0.02 * np.abs(y).max()


def test_v4_config_of_both_spellings() -> None:
    fields = hf_layers.case("csa").fields
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
        ({"o_groups": 4}, "legal: a multiple of o_groups = 4"),
        ({"qk_rope_head_dim": 7}, "even"),
        ({"compress_rope_theta": 0.5}, r"rope_theta: got 0\.5; legal: a finite number above 1"),
        ({"rms_norm_eps": -1e-6}, r"rms_norm_eps: got -1e-06; legal: a finite number, at least 0"),
    ],
)
def test_refuses_v4_configs(change: dict[str, Any], message: str) -> None:
    fields = {**hf_layers.V4_FIELDS, "index_topk": 5, **change}
    with pytest.raises(ValueError, match=message):
        v4.V4Config.from_hf({k: value for k, value in fields.items() if value is not None}, 1)


@pytest.mark.parametrize(
    ("name", "missing", "misshapen"),
    [
        ("v3.2", "indexer.wk.weight", "indexer.k_norm.bias"),
        ("glm-5", "indexer.wq_b.weight", "indexer.weights_proj.weight"),
        ("csa", "kv_proj.weight", "sinks"),
    ],
)
def test_refuses_weights(name: str, missing: str, misshapen: str) -> None:
    case = hf_layers.case(name)
    tensors = case.tensors
    assert set(case.family.hf_attention_shapes(case.config)) == set(tensors)
    with pytest.raises(ValueError, match=f"tensor '{missing}' is missing"):
        case.family.params_from_hf(case.config, {k: t for k, t in tensors.items() if k != missing})
    with pytest.raises(ValueError, match=f"tensor '{misshapen}' must have shape"):
        case.family.params_from_hf(case.config, {**tensors, misshapen: np.zeros(7)})


def test_refuses_v32_configs_caches_and_steps() -> None:
    case = hf_layers.case("v3.2")
    with pytest.raises(ValueError, match="index_topk"):
        v32.V32Config.from_hf({k: value for k, value in case.fields.items() if k != "index_topk"})
    with pytest.raises(ValueError, match="q_lora_rank: got None; legal: a positive integer"):
        v32.V32Config.from_hf({**case.fields, "q_lora_rank": None})
    with pytest.raises(ValueError, match="kv_dtype: got uint8 with kv_lora_rank=32"):
        v32.init_cache(case.config, 1, 4, kv_dtype=jnp.uint8)
    dense = Step.dense(ints([[0]]), ints([1]), page_size=16)
    with pytest.raises(ValueError, match=r"ragged x \[T, E\] needs cu_seqlens_q"):
        v32.attend(case.params, case.config, case.x[0, :1], case.cache(1), dense)
    cache = case.cache(1)
    step = Step.ragged(ints([[0]]), ints([1]), ints([0, 1]), total_tokens=1, max_q_len=1, page_size=16)
    with pytest.raises(ValueError, match=r"must have the same pages.*got shapes \(\d+, \d+, \d+\) and \(9, 4, 8\)"):
        v32.attend(case.params, case.config, case.x[0, :1], cache._replace(indexer=jnp.zeros((9, 4, 8))), step)


@pytest.mark.parametrize("kind", ["hca", "sliding"])
@pytest.mark.sampled(2)
def test_the_packed_cache_of_a_real_head(kind: v4.Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "q_lora_rank": 16, "o_groups": 1, "o_lora_rank": 8}
    config = v4.V4Config(kind=kind, ratio=128 if kind == "hca" else 0, **sizes)
    rng = np.random.default_rng(0)
    params = {
        name: rng.standard_normal(shape).astype(np.float32) * (0.1 if len(shape) > 1 else 1)
        for name, shape in v4.param_shapes(config).items()
    }
    x = rng.standard_normal((300, 32)).astype(np.float32)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(x: jax.Array, cache: v4.V4Cache) -> jax.Array:
        window = Step.ragged(ints([[0, 1, 2, 3, 4]]), ints([300]), ints([0, 300]), total_tokens=300, page_size=64)
        table = v4.rope_table(config, 300)
        step = v4.make_step(
            config, window, state_slots=ints([0]), compressed_tables=ints([[0]]), cos_sin=table, page_size=64
        )
        return v4.attend(params, config, x, cache, step)[0]

    pages = {"window_pages": 5, "compressed_pages": 1, "num_states": 1, "page_size": 64}
    exact, packed = (
        np.asarray(run(x, v4.init_cache(config, **pages, dtype=dtype))) for dtype in (jnp.float32, jnp.uint8)
    )
    assert 0 < np.sqrt(((packed - exact) ** 2).mean()) < 0.03 * np.sqrt((exact**2).mean())


def test_states_are_a_pytree_of_the_public_type() -> None:
    cache = hf_layers.case("hca").cache(1)
    assert isinstance(cache.compressor, CompressorState)
    assert cache.indexer is None and cache.indexer_compressor is None
