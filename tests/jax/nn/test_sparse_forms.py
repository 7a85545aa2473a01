"""The forms of V3.2's attention: both compute the attention over the selected keys, and one rule chooses."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax
from tests.jax.nn.drawn import draw_v32
from tsmla_jax.nn import MLAConfig, Step, v32
from tsmla_jax.nn.v32 import expanded
from tsmla_kernels.contract.forms import StepSizes, selected_form

PAGE, PAGES = 16, 40
MLA = MLAConfig(
    hidden_size=48, num_attention_heads=2, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
    v_head_dim=16, rope_theta=1e4,
)  # fmt: skip
PACKED = MLAConfig(
    hidden_size=48, num_attention_heads=2, q_lora_rank=24, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, rope_theta=1e4,
)  # fmt: skip


def run(
    form: str, new: list[int], done: list[int], *, mla: MLAConfig = MLA, kv_dtype: Any = jnp.float32, top: int = 20,
    **options: Any,
) -> np.ndarray:  # fmt: skip
    """The outputs of `new` tokens of each request behind `done` tokens, which the direct form wrote; NaN where padding
    is and in unused slots."""
    config = v32.V32Config(mla, index_n_heads=2, index_head_dim=mla.qk_rope_head_dim * 2, index_topk=top)
    params = draw_v32(jax.random.key(0), config)
    indexer_dtype = jnp.float32
    cache = v32.init_cache(config, PAGES, PAGE, kv_dtype=kv_dtype, indexer_dtype=indexer_dtype)
    if kv_dtype == jnp.float32:
        cache = cache._replace(kv=np.full_like(cache.kv, np.nan))
    per = PAGES // len(new)
    tables = jnp.asarray(np.random.default_rng(1).permutation(PAGES)[: per * len(new)].reshape(-1, per), jnp.int32)
    longest = max(map(sum, zip(new, done, strict=True)))
    x = np.random.default_rng(1).standard_normal((len(new), longest, mla.hidden_size), np.float32)

    def step(counts: list[int], lens: list[int], cache: Any, padding: int, **options: Any) -> Any:
        rows = [x[r, n - count : n] for r, (count, n) in enumerate(zip(counts, lens, strict=True))]
        packed = np.concatenate([*rows, np.full((padding, mla.hidden_size), np.nan, np.float32)])
        cu = jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32)
        made = Step.ragged(tables, jnp.asarray(lens, jnp.int32), cu, total_tokens=len(packed), page_size=PAGE)
        attend = jax.jit(functools.partial(v32.attend, config=config, **options))
        return attend(params, x=packed, cache=cache, step=made)

    if any(done):
        _, cache = step(done, done, cache, 0, form="direct")
    lens = [a + b for a, b in zip(new, done, strict=True)]
    y, _ = step(new, lens, cache, 3, form=form, **options)
    return np.asarray(y)[: sum(new)]


@pytest.mark.parametrize("columns", [6, 35])
@pytest.mark.sampled(2)
def test_both_forms_attend_to_the_keys_that_they_are_given(columns: int) -> None:
    """Also where a token has fewer earlier keys than columns, and selects some of them."""
    rng = np.random.default_rng(2)
    drawn = np.stack([rng.permutation(40)[:columns] for _ in range(43)])
    drawn = np.where(drawn % 5 == 3, -1, drawn)
    drawn[:, 0] = np.where((drawn == 0).any(1), drawn[:, 0], 0)  # each token selects the first key, once
    selected = jnp.asarray(drawn, jnp.int32)
    direct, mask = (run(form, [40], [0], selected=selected) for form in ("direct", "mask"))
    np.testing.assert_allclose(mask, direct, atol=3e-5)
    assert np.abs(run("mask", [40], [0]) - mask).max() > 1e-3


@pytest.mark.parametrize(("new", "done"), [([50, 7], [0, 0]), ([30, 0, 9], [150, 60, 0])])
@pytest.mark.sampled(2)
def test_both_forms_compute_the_same(new: list[int], done: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded, "CHUNK_ROWS", 128)  # several chunks of context
    direct, mask = (run(form, new, done) for form in ("direct", "mask"))
    assert np.isfinite(mask).all()
    np.testing.assert_allclose(mask, direct, atol=3e-5)
    everything = run("mask", new, done, top=1000)
    assert np.abs(everything - direct).max() > 1e-3  # the selection counts


@pytest.mark.parametrize("first", [0, 31, 32, 77, 320])
def test_words_of_keys_from_one_on(first: int) -> None:
    rng = np.random.default_rng(3)
    positions = jnp.asarray(rng.integers(-1, 384, (4, 60)), jnp.int32)
    starts = jnp.asarray([first, 0, 383, 5], jnp.int32)
    words = tsmla_jax.selection_bits(positions, 384)
    got = expanded.words_from(words, starts, 200)
    assert np.array_equal(got, tsmla_jax.selection_bits(positions, 200, starts=starts))


def test_a_packed_cache_means_the_same() -> None:
    direct, mask = (run(form, [20, 9], [30, 0], mla=PACKED, kv_dtype=jnp.uint8) for form in ("direct", "mask"))
    np.testing.assert_allclose(mask, direct, atol=3e-5)


def test_a_scaled_cache_means_the_same() -> None:
    options: dict[str, Any] = {"kv_dtype": jnp.float8_e4m3fn, "kv_scale": 0.05}
    direct, mask = (run(form, [40, 9], [0, 0], **options) for form in ("direct", "mask"))
    np.testing.assert_allclose(mask, direct, atol=3e-5)


@pytest.mark.slow
def test_the_mask_has_a_gradient_outside_of_jit_alone() -> None:
    config = v32.V32Config(MLA, index_n_heads=2, index_head_dim=16, index_topk=20)
    params = draw_v32(jax.random.key(0), config)
    cache = v32.init_cache(config, 3, PAGE, kv_dtype=jnp.float32, indexer_dtype=jnp.float32)
    tables, starts = jnp.asarray([[2, 0, 1]], jnp.int32), jnp.asarray([0, 5], jnp.int32)
    step = Step.ragged(tables, jnp.asarray([40], jnp.int32), starts, total_tokens=5, page_size=PAGE)  # 35 are cached
    x = jax.random.normal(jax.random.key(1), (5, MLA.hidden_size))

    def loss(x: jax.Array, form: str) -> jax.Array:
        return jnp.square(v32.attend(params, config, x, cache, step, form=form)[0]).sum()

    got, want = (jax.grad(loss)(x, form) for form in ("mask", "direct"))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(NotImplementedError, match=r"v32\.attend in the form mask under jax\.jit has no derivative"):
        jax.jit(jax.grad(loss), static_argnums=1)(x, "mask")


def test_the_mask_is_refused_where_it_cannot_serve() -> None:
    with pytest.raises(ValueError, match=r"form: got 'mask'; legal: None or 'direct', as q_scale quantises"):
        run("mask", [5], [0], q_scale=0.1)
    with pytest.raises(ValueError, match=r"form: got 'dense'; legal: None, 'direct', 'mask'"):
        run("dense", [5], [0])


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        (StepSizes(4096, 1, 4096, 128, 2048), "mask"),
        (StepSizes(8192, 1, 8192, 128, 2048), "mask"),
        (StepSizes(16384, 1, 16384, 16, 2048), "mask"),
        (StepSizes(32768, 1, 32768, 128, 2048), "direct"),
        (StepSizes(65536, 1, 65536, 16, 2048), "direct"),
        (StepSizes(4096, 1, 131072, 128, 2048), "direct"),
        (StepSizes(64, 1, 4096, 128, 2048), "direct"),
        (StepSizes(64, 64, 4096, 128, 2048), "direct"),
        (StepSizes(8192, 4, 2048, 64, 2048), "mask"),
        (StepSizes(8192, 1, 8192, 64, 2048, columns=512), "mask"),
        (StepSizes(12288, 1, 12288, 64, 2048, columns=512), "direct"),
    ],
)
def test_sizes_choose_a_form(sizes: StepSizes, name: str) -> None:
    form = selected_form(sizes)
    assert form.name == name and form.why
    assert selected_form(sizes, forced="direct") == ("direct", "the caller asks for it")


def test_a_layers_form_says_why() -> None:
    config = v32.V32Config(PACKED, index_n_heads=2, index_head_dim=128, index_topk=2048)
    lens = jnp.array([4096], jnp.int32)
    tables = jnp.zeros((1, 2048), jnp.int32)

    def form_of(dtype: Any = jnp.bfloat16, *, max_seq_len: int | None = 4096, **options: Any) -> Any:
        made = Step.ragged(
            tables, lens, jnp.array([0, 4096], jnp.int32), total_tokens=4096, page_size=64, max_seq_len=max_seq_len
        )
        return v32.form_of(config, made, jax.ShapeDtypeStruct((4096, 48), dtype), **options)

    assert form_of().name == "mask" and "pairs of keys a token" in form_of().why
    assert form_of(max_seq_len=None).name == "direct"  # the tables hold 131,072 tokens
    assert "float32; the mask's kernel takes" in form_of(jnp.float32).why
    assert "q_scale quantises" in form_of(quantised=True).why
    assert form_of(form="direct").why == "the caller asks for it"
