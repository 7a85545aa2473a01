"""Keys dealt out over devices: what each attends to, merged, is what one device attends to."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tests.jax.nn.drawn import draw_mla, draw_v32
from tsmla_jax.nn import MLAConfig, QueryScale, Step, context_parallel, functional, v4, v32
from tsmla_jax.nn.v4.weights import WEIGHTS as V4_WEIGHTS
from tsmla_jax.nn.v32.weights import WEIGHTS as V32_WEIGHTS

DEVICES, PAGE, COLUMNS = 3, 4, 3  # entries of a block table on each device
LENS = np.asarray([30, 1, 0, 17], np.int32)
CONFIG = MLAConfig(
    hidden_size=24,
    num_attention_heads=3,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    query_scale=QueryScale(0.5, 5),
    output_gate="head",
)
WIDTH = CONFIG.cache_dim
TABLES = np.arange(len(LENS) * COLUMNS, dtype=np.int32).reshape(len(LENS), COLUMNS)
WHOLE_TABLES = np.arange(len(LENS) * COLUMNS * DEVICES, dtype=np.int32).reshape(len(LENS), -1)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((DEVICES,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])


def dealt(cache: np.ndarray) -> np.ndarray:
    """The pages of WHOLE_TABLES as those of TABLES, of one device after the other: page j of a text is on device j
    mod N."""
    pages = cache.reshape(len(LENS), COLUMNS, DEVICES, *cache.shape[1:])
    return np.moveaxis(pages, 2, 0).reshape(-1, *cache.shape[1:])


def random_cache(dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(WHOLE_TABLES.size, PAGE, WIDTH)).astype(dtype)


def on_devices(mesh: Mesh, run: Callable[..., Any], *, written: bool = False) -> Any:
    """run(cache, ...) on the devices' own caches; with `written` it returns a result and the cache, else a result."""
    out_specs = (P(), P("context")) if written else P()
    return jax.jit(
        lambda cache, *rest: jax.shard_map(
            run, mesh=mesh, in_specs=(P("context"), *(P() for _ in rest)), out_specs=out_specs, check_vma=False
        )(cache, *rest)
    )


def test_positions_there_and_back(mesh: Mesh) -> None:
    def both(_: jax.Array) -> Any:
        positions = jnp.arange(-1, 30, dtype=jnp.int32)
        local = context_parallel.local_positions(positions, "context", PAGE)
        back = context_parallel.global_positions(local, "context", PAGE)
        count = context_parallel.local_lens(jnp.int32(30), "context", PAGE)
        return jax.lax.all_gather((local, back, count), "context")

    local, back, count = on_devices(mesh, both)(jnp.zeros(DEVICES))
    # Every position is on one device, whose own positions are 0, 1, 2, ...
    np.testing.assert_array_equal((local >= 0).sum(axis=0), [0] + [1] * 30)
    np.testing.assert_array_equal(back.max(axis=0), np.arange(-1, 30))
    for device in range(DEVICES):
        np.testing.assert_array_equal(np.sort(local[device][local[device] >= 0]), np.arange(count[device]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_of_one_token(mesh: Mesh, dtype: str) -> None:
    cache, q = random_cache(dtype), np.random.default_rng(1).normal(size=(len(LENS), 1, 3, WIDTH)).astype(dtype)
    options: dict[str, Any] = {"softmax_scale": 0.3, "latent_dim": CONFIG.kv_lora_rank}

    def run(cache: jax.Array, q: jax.Array) -> Any:
        out, lse = context_parallel.mla_decode(q, cache, TABLES, LENS, context_axis="context", **options)
        return context_parallel.merge(out, lse, "context")

    compiled = on_devices(mesh, run).lower(dealt(cache), q).compile()
    # out and lse as they are, at the same time: XLA's GPU compiler makes one kernel of two such collectives.
    collectives = re.findall(r" (all-\w+|collective-\w+|reduce-scatter)\(", compiled.as_text())
    assert collectives == ["all-gather"] * 2
    out, lse = compiled(dealt(cache), q)
    want_out, want_lse = tsmla_jax.mla_decode(q, cache, WHOLE_TABLES, LENS, return_lse=True, **options)
    # Parts are rounded to bfloat16 before they are merged, and the result is once more.
    step = 0 if dtype == "float32" else 2**-7
    np.testing.assert_allclose(lse, want_lse[:, 0], atol=1e-5)
    np.testing.assert_allclose(
        out.astype(np.float32), want_out[:, 0].astype(np.float32), rtol=step, atol=step / 2 + 1e-5
    )


@pytest.mark.parametrize("option", [{"causal": False}, {"visible_lens": LENS[:, None]}, {"return_lse": True}])
def test_options_of_whole_texts_are_refused(mesh: Mesh, option: dict[str, Any]) -> None:
    """They would hide or show other keys of a device than of the whole text."""
    q, given = jnp.zeros((len(LENS), 1, 3, WIDTH)), {"softmax_scale": 0.3, "latent_dim": CONFIG.kv_lora_rank}

    def run(cache: jax.Array) -> Any:
        return context_parallel.mla_decode(q, cache, TABLES, LENS, context_axis="context", **given, **option)

    with pytest.raises(TypeError, match=f"^{next(iter(option))}: no option over a context_axis; legal: softmax_scale"):
        on_devices(mesh, run)(dealt(random_cache()))


@pytest.mark.parametrize(("ragged", "few_tokens"), [(True, 256), (False, 0)])
def test_a_layer_decodes_several_tokens(
    mesh: Mesh, ragged: bool, few_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_parallel, "FEW_TOKENS", few_tokens)
    params, cache, lens = draw_mla(jax.random.key(0), CONFIG), random_cache(), LENS + 2
    new = np.asarray([0, 2, 3, 5, 7], np.int32)
    shape = (8,) if ragged else (len(LENS), 2)
    x = np.random.default_rng(1).normal(size=(*shape, CONFIG.hidden_size)).astype(np.float32)

    def run(tables: Any, axis: str | None, cache: jax.Array, x: jax.Array) -> Any:
        kind: dict[str, Any] = {"page_size": PAGE, "context_axis": axis}
        if ragged:
            step = Step.ragged(tables, lens, new, total_tokens=8, max_q_len=2, **kind)
        else:
            step = Step.dense(tables, lens, new_tokens=2, **kind)
        return functional.decode(params, CONFIG, x, cache, step, context_axis=axis)

    y, written = on_devices(mesh, partial(run, TABLES, "context"), written=True)(dealt(cache), x)
    want, want_written = jax.jit(partial(run, WHOLE_TABLES, None))(cache, x)
    kept = slice(None, 7) if ragged else slice(None)
    np.testing.assert_allclose(y[kept], want[kept], atol=1e-5)
    np.testing.assert_array_equal(written, dealt(np.asarray(want_written)))


def test_a_chunk_of_prompts_over_a_context(mesh: Mesh) -> None:
    params, cache = draw_mla(jax.random.key(0), CONFIG), random_cache()
    lens, new = LENS + np.asarray([4, 5, 0, 1], np.int32), np.asarray([0, 4, 9, 9, 10], np.int32)
    x = np.random.default_rng(1).normal(size=(11, CONFIG.hidden_size)).astype(np.float32)

    def run(tables: Any, axis: str | None, cache: jax.Array, x: jax.Array) -> Any:
        step = Step.ragged(tables, lens, new, total_tokens=11, page_size=PAGE, context_axis=axis)
        options: dict[str, Any] = {"context_chunk": 8, "context_axis": axis}
        return functional.prefill_with_context(params, CONFIG, x, cache, step, **options)

    y, written = on_devices(mesh, partial(run, TABLES, "context"), written=True)(dealt(cache), x)
    want, want_written = jax.jit(partial(run, WHOLE_TABLES, None))(cache, x)
    np.testing.assert_allclose(y[:10], want[:10], atol=1e-5)
    np.testing.assert_array_equal(written, dealt(np.asarray(want_written)))


@pytest.mark.parametrize("made_with", [None, "context"])
def test_a_step_of_another_axis_is_refused(made_with: str | None) -> None:
    """Its slots would be those of another way to deal out keys. A step remembers its axis through every change."""
    params, x = draw_mla(jax.random.key(0), CONFIG), jnp.zeros((2, CONFIG.hidden_size))
    offsets = jnp.asarray([0, 2, 2, 2, 2], jnp.int32)
    step = Step(jnp.asarray(TABLES), jnp.asarray(LENS), jnp.zeros(2, jnp.int32), offsets, 2, made_with)
    step = jax.tree.map(lambda leaf: leaf, step).checked(2)
    called_with = None if made_with else "context"
    with pytest.raises(ValueError, match=rf"^context_axis: got {called_with!r}; legal: the step's, {made_with!r}$"):
        functional.decode(params, CONFIG, x, jnp.asarray(random_cache()), step, context_axis=called_with)
    with pytest.raises(ValueError, match=r"^context_axis: got"):
        functional.prefill_with_context(
            params, CONFIG, x, jnp.asarray(random_cache()), step, context_chunk=8, context_axis=called_with
        )


def test_the_derivative_of_whole_prompts(mesh: Mesh) -> None:
    """Of one device, around `shard_map`, and inside it as the mean over the devices."""
    params, offsets = draw_mla(jax.random.key(0), CONFIG), np.asarray([0, 7, 7, 10], np.int32)
    x, cotangent = np.random.default_rng(1).normal(size=(2, 11, CONFIG.hidden_size)).astype(np.float32)

    def loss(axis: str | None, params: Any, x: jax.Array) -> jax.Array:
        y, *_ = functional.prefill(params, CONFIG, x, cu_seqlens_q=offsets, max_q_len=7, context_axis=axis)
        return (y * cotangent)[:10].sum()

    def inside(params: Any, x: jax.Array) -> Any:
        value, derivatives = jax.value_and_grad(partial(loss, "context"), argnums=(0, 1))(params, x)
        return value, jax.lax.pmean(derivatives, "context")

    def shared(run: Callable[..., Any]) -> Callable[..., Any]:
        return jax.shard_map(run, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)

    want = jax.jit(jax.value_and_grad(partial(loss, None), argnums=(0, 1)))(params, x)
    around = jax.value_and_grad(shared(partial(loss, "context")), argnums=(0, 1))
    for got in (jax.jit(around)(params, x), jax.jit(shared(inside))(params, x)):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4), got, want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_derivative_of_an_exchange_of_rows(mesh: Mesh, dtype: Any) -> None:
    """Each device's results have the gradient that they have in a merge of all rows."""
    rng, rows = np.random.default_rng(4), (DEVICES, 7, 3)
    out, lse = rng.standard_normal((*rows, 8)), rng.standard_normal(rows)
    cotangent = jnp.asarray(rng.standard_normal((7, 3, 8)), jnp.float32)

    def loss(out: jax.Array, lse: jax.Array) -> jax.Array:
        own, _ = context_parallel.merge_own_rows(out[0], lse[0], "context")
        merged = own.astype(jnp.float32) * context_parallel.own_rows(cotangent, "context")
        return jax.lax.psum(merged.sum(), "context")

    specs = (P("context"), P("context"))
    whole = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    given = jnp.asarray(out, dtype), jnp.asarray(lse, jnp.float32)
    got = jax.jit(jax.grad(whole, (0, 1)))(*given)
    want = jax.grad(lambda *x: (tsmla_jax.merge_attention_states(*x)[0].astype(jnp.float32) * cotangent).sum(), (0, 1))(
        *given
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-2, atol=1e-2)
    assert (np.float32(got[0]) != 0).all()


@pytest.mark.parametrize("few_tokens", [256, 0])
def test_the_best_keys_of_all_devices(mesh: Mesh, few_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties go to the lower position, also where the positions are on different devices; NaN is below every number."""
    monkeypatch.setattr(context_parallel, "FEW_TOKENS", few_tokens)
    rng = np.random.default_rng(2)
    logits = rng.integers(-2, 3, (len(LENS), COLUMNS * DEVICES * PAGE)).astype(np.float32)
    logits[0, [3, 8]], logits[3, [0, 9]], logits[0, 12] = np.nan, [-0.0, 0.0], -np.inf
    logits[1] *= np.float32(1e-40)  # subnormal, which XLA compares as 0 on CPUs
    shares = np.moveaxis(logits.reshape(len(LENS), COLUMNS, DEVICES, PAGE), 2, 0).reshape(DEVICES * len(LENS), -1)

    def run(k: int, logits: jax.Array) -> Any:
        lens = context_parallel.local_lens(jnp.asarray(LENS), "context", PAGE)
        positions = tsmla_jax.select_topk(logits, lens, min(k, logits.shape[1]), order="position")
        scores = jnp.take_along_axis(logits, jnp.maximum(positions, 0), axis=1)
        own = context_parallel.select_topk(positions, scores, k, context_axis="context", page_size=PAGE)
        return jax.lax.all_gather(own, "context")

    for k in (7, 29):
        own = on_devices(mesh, partial(run, k))(shares)
        want = np.asarray(tsmla_jax.select_topk(logits, LENS, k))
        assert own.shape == (DEVICES, len(LENS), min(k, shares.shape[1]))
        for row in range(len(LENS)):
            found = []
            for device in range(DEVICES):
                local = np.asarray(own[device, row])
                count = (local >= 0).sum()
                assert (local[count:] == -1).all() and (np.diff(local[:count]) > 0).all()
                found += list((local[:count] // PAGE * DEVICES + device) * PAGE + local[:count] % PAGE)
            assert sorted(found) == sorted(want[row][want[row] >= 0])


@pytest.mark.parametrize("few_tokens", [256, 0])
def test_rows_of_16_bits_are_rounded_once(mesh: Mesh, few_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sums on their way 256 + 1 would be 256 in bfloat16, and + 1 once more, too."""
    monkeypatch.setattr(context_parallel, "FEW_TOKENS", few_tokens)
    rows = np.random.default_rng(3).normal(size=(DEVICES, 5, 2)).astype(jnp.bfloat16)
    rows[:, 0] = np.asarray([[256], [1], [1]])
    added = on_devices(mesh, partial(context_parallel.add_rows, context_axis="context"))(rows.reshape(-1, 2))
    want = rows[0].astype(np.float32) + rows[1].astype(np.float32) + rows[2].astype(np.float32)
    assert added.dtype == jnp.bfloat16 and added[0, 0] == 258
    np.testing.assert_array_equal(added, want.astype(jnp.bfloat16))


INDEXER: dict[str, Any] = {"index_n_heads": 4, "index_head_dim": 12, "index_topk": 64}
V32 = v32.V32Config(mla=replace(CONFIG, q_lora_rank=12, query_scale=None, output_gate=None), **INDEXER)
V4 = v4.V4Config(
    kind="csa",
    ratio=4,
    hidden_size=24,
    num_attention_heads=4,
    q_lora_rank=12,
    head_dim=16,
    rope_dim=8,
    o_groups=2,
    o_lora_rank=6,
    **INDEXER,
)


@pytest.mark.parametrize("few_tokens", [256, 0])
def test_a_chunk_of_prompts_whose_indexer_chooses(mesh: Mesh, few_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of one device, with fewer of them than are chosen, and with more."""
    monkeypatch.setattr(context_parallel, "FEW_TOKENS", few_tokens)
    config = replace(V32, index_topk=7)
    params, rng = draw_v32(jax.random.key(0), config, jnp.float32), np.random.default_rng(1)
    lens, new = LENS + np.asarray([4, 5, 0, 1], np.int32), np.asarray([0, 4, 9, 9, 10], np.int32)
    x = rng.normal(size=(11, config.mla.hidden_size)).astype(np.float32)
    cache = v32.V32Cache(random_cache(), rng.normal(size=(WHOLE_TABLES.size, PAGE, 12)).astype(np.float32))

    def run(tables: Any, axis: str | None, cache: v32.V32Cache, x: jax.Array) -> Any:
        step = Step.ragged(jnp.asarray(tables), lens, new, total_tokens=11, page_size=PAGE, context_axis=axis)
        return v32.attend(params, config, x, cache, step, context_axis=axis)

    shared = v32.V32Cache(*map(dealt, cache))
    y, written = on_devices(mesh, partial(run, TABLES, "context"), written=True)(shared, x)
    want, want_written = jax.jit(partial(run, WHOLE_TABLES, None))(cache, x)
    np.testing.assert_allclose(y[:10], want[:10], atol=1e-5)
    for one, other in zip(written, want_written, strict=True):
        np.testing.assert_allclose(one, dealt(np.asarray(other)), atol=1e-6)


@pytest.mark.parametrize("model", ["v3.2", "v4"])
def test_a_chunk_of_a_prompt_keeps_no_scores_of_all_keys(mesh: Mesh, model: str) -> None:
    """Of 1,024 tokens and 65,536 keys (V4: entries) on each device they would be 256 MB; rows of the block table, one
    a token, are 4."""
    tokens, pages, page_size = 1024, 1024, 64
    f32, i32 = (partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.float32, jnp.int32))

    def cache() -> Any:
        if model == "v3.2":
            return v32.init_cache(V32, pages, page_size, kv_dtype=jnp.float32, indexer_dtype=jnp.float32)
        sizes = {"window_pages": 2, "compressed_pages": pages, "num_states": 1, "page_size": page_size}
        return v4.init_cache(V4, **sizes, dtype=jnp.float32, indexer_dtype=jnp.float32)

    def run(cache: Any, params: Any, x: jax.Array, tables: jax.Array, lens: jax.Array, cu: jax.Array) -> Any:
        options: dict[str, Any] = {"total_tokens": tokens, "page_size": page_size}
        if model == "v3.2":
            step = Step.ragged(tables, lens, cu, **options, context_axis="context")
            return v32.attend(params, V32, x, cache, step, context_axis="context")
        window = Step.ragged(jnp.zeros((1, 4 * DEVICES * pages), jnp.int32), lens, cu, **options)
        where = {"state_slots": jnp.zeros(1, jnp.int32), "compressed_tables": tables, "cos_sin": v4.rope_table(V4, 9)}
        v4_step = v4.make_step(V4, window, **where, page_size=page_size, context_axis="context")
        return v4.attend(params, V4, x, cache, v4_step, context_axis="context")

    weights, config = (V32_WEIGHTS, V32) if model == "v3.2" else (V4_WEIGHTS, V4)
    params = {name: f32(shape) for name, shape in weights.param_shapes(config).items()}
    caches = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((DEVICES * leaf.shape[0], *leaf.shape[1:]), leaf.dtype), jax.eval_shape(cache)
    )
    arguments = (params, f32((tokens, 24)), i32((1, pages)), i32((1,)), i32((2,)))
    compiled = on_devices(mesh, run, written=True).lower(caches, *arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 << 20
