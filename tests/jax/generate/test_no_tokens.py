"""Steps and their parts without tokens: results without rows, by every form of a product."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax.generate.tiny import write_tiny
from tsmla_jax.generate import ModelConfig, load_model, model, moe, streams
from tsmla_jax.generate.caches import CacheLayout, default_page_size, init_cache, window_rows
from tsmla_jax.generate.config import StreamsConfig
from tsmla_jax.generate.model import Batch, Scales, StepOptions
from tsmla_jax.nn import Step, context_parallel
from tsmla_jax.nn.norms import Norm, rms_norm, rms_norm_fixed_order
from tsmla_jax.nn.products import expert_choice, grouped_matmul, norm_rope, row_blocks, tiles, triton
from tsmla_jax.nn.products.block_scaled import BlockScaled
from tsmla_jax.nn.products.linear import contract, linear, linear_by_kernel
from tsmla_jax.nn.products.scaled_rows import scaled_rows


def narrow(*shape: int) -> BlockScaled:
    scales = jnp.ones((*shape[:-2], *(-(-size // 128) for size in shape[-2:])))
    return BlockScaled(jnp.ones(shape, jnp.float8_e4m3fn), scales)


@pytest.fixture(params=["as on a CPU", "by kernels"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How products and choices are made; kernels by their interpreter."""
    if request.param == "by kernels":
        monkeypatch.setattr(triton, "why_no_triton", list)
    name: str = request.param
    return name


@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 256), (0, 3, 256)])
def test_linears(shape: tuple[int, ...], form: str) -> None:
    x = jnp.zeros(shape, jnp.bfloat16)
    for weight in (narrow(192, 256), jnp.ones((192, 256), jnp.bfloat16)):
        out = jax.jit(linear)(x, weight)
        assert out.shape == (*shape[:-1], 192) and out.dtype == jnp.bfloat16
    assert contract(x.reshape(*shape[:-1], 2, 128), narrow(192, 256), axes=2).shape == (*shape[:-1], 192)
    assert linear_by_kernel(jnp.zeros((0, 256), jnp.bfloat16), narrow(192, 256)).shape == (0, 192)
    mlp = moe.gated_mlp(x, narrow(256, 256), narrow(256, 128))
    assert mlp.shape == shape


@pytest.mark.parametrize("scaled", [False, True])
def test_experts(scaled: bool, form: str) -> None:
    make: Any = narrow if scaled else lambda *shape: jnp.ones(shape, jnp.bfloat16)
    x, chosen = jnp.zeros((0, 256), jnp.bfloat16), jnp.zeros((0, 2))
    out = jax.jit(moe.mix_experts)(x, chosen.astype(jnp.int32), chosen, make(4, 256, 256), make(4, 256, 128))
    assert out.shape == (0, 256) and out.dtype == jnp.float32
    for blocks in (row_blocks.make_blocks, row_blocks.blocks_by_kernel):
        made = blocks(jnp.zeros((0, 2), jnp.int32), 4, 16)
        assert made.rows.size == made.groups.size == 0 and made.places.shape == (0, 2)
        for gated in (False, True):
            given, tile = (
                (scaled_rows(x), tiles.Tile(64, 128, 4, 3, half=True)) if scaled else (x, tiles.Tile(64, 64, 4, 3))
            )
            product = grouped_matmul.grouped_matmul(given, make(4, 256, 256), made, tile, gated=gated, gather=True)
            assert jax.tree.leaves(product)[0].shape == (0, 128 if gated else 256)
    assert scaled_rows(x).scales.shape == (0, 2)


def test_routers(form: str) -> None:
    config = moe.MoEConfig(8, 2, 16, 1, "noaux_tc", 4, 2, True, 1.0)
    x, weights, bias = jnp.zeros((0, 128), jnp.bfloat16), jnp.ones((8, 128)), jnp.zeros(8)
    params, ids = {"router": weights, "correction_bias": bias}, jnp.zeros(0, jnp.int32)
    for valid in (None, ids > 0):
        experts, scores = moe.choose_experts(params, x, config, ids, valid)
        assert experts.shape == scores.shape == (0, 3) and experts.dtype == jnp.int32
    assert expert_choice.choose(jnp.zeros((0, 8)), bias, None, moe.choice_of(config))[0].shape == (0, 3)
    assert moe.route(x, weights, bias, config)[1].shape == (0, 2)


def test_norms_and_streams(form: str) -> None:
    x, weight = jnp.zeros((0, 256), jnp.bfloat16), jnp.ones(256)
    assert rms_norm(x, weight, 1e-6).shape == rms_norm_fixed_order(x, weight, 1e-6).shape == (0, 256)
    rope = norm_rope.Rope(jnp.zeros(0, jnp.int32), jnp.ones((4, 64)))
    for by_kernel in (False, True):
        call = partial(norm_rope.norm_rope, x, norm_rope.Columns(0, 2, 128), 1e-6, rope, by_kernel=by_kernel)
        assert jax.jit(call)().shape == (0, 2, 128)
    config, some = StreamsConfig(2, 3, 1e-6, 1e-6), jnp.zeros((0, 2, 256), jnp.bfloat16)
    params = {"fn": jnp.ones((8, 512)), "base": jnp.ones(8), "scale": jnp.ones(3)}
    read, write, mix = jax.jit(lambda: streams.read_streams(params, some, Norm(weight, 1e-6), config))()
    assert read.shape == (0, 256) and write.shape == (0, 2) and mix.shape == (0, 2, 2)
    assert jax.jit(streams.write_streams)(read, write, mix, some).shape == some.shape
    closing = {"fn": jnp.ones((2, 512)), "base": jnp.ones(2), "scale": jnp.ones(1)}
    assert jax.jit(lambda: streams.close_streams(closing, some, config))().shape == (0, 256)


@pytest.fixture(scope="module", params=["v2", "v3", "v3.2", "v4"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, Any]:
    directory = write_tiny(tmp_path_factory.mktemp("none"), model=request.param)
    config = ModelConfig.from_hf(directory)
    return config, load_model(directory, config, dtype="bfloat16")


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.sampled(3)
def test_whole_steps(tiny: tuple[ModelConfig, Any], fold: bool, form: str) -> None:
    config, params = tiny
    params = model.fold(params, config) if fold else params
    page_size = default_page_size(config)
    layout = CacheLayout(2, page_size, 1, window_rows(config, 8, 8), 0, "bfloat16")
    tables, none = jnp.arange(2, dtype=jnp.int32)[None], jnp.zeros(1, jnp.int32)
    step = Step.ragged(tables, none, jnp.zeros(2, jnp.int32), total_tokens=0, max_q_len=1, page_size=page_size)
    batch = Batch(jnp.zeros(0, jnp.int32), step, state_slots=none)
    caches = [init_cache(config.layer(index).attention, layout) for index in range(config.num_layers)]
    for phase in ("prefill", "fresh", "decode"):
        options = StepOptions(phase, page_size=page_size, window_rows=layout.window_rows)  # type: ignore[arg-type]
        run = jax.jit(model.forward, static_argnames=("config", "options"))
        logits, written = run(params, config, caches, batch, jnp.zeros(0, jnp.int32), Scales(), options)
        assert logits.shape == (0, config.vocab_size)
        for before, after in zip(jax.tree.leaves(caches), jax.tree.leaves(written), strict=True):
            np.testing.assert_array_equal(np.asarray(before), np.asarray(after))


def test_merges_of_devices() -> None:
    mesh = jax.make_mesh((2,), ("keys",))
    out, lse = jnp.zeros((0, 3, 8)), jnp.zeros((0, 3))
    run = jax.shard_map(
        lambda out, lse: context_parallel.merge(out, lse, "keys"),
        mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False,
    )  # fmt: skip
    merged, merged_lse = run(out, lse)
    assert merged.shape == out.shape and merged_lse.shape == lse.shape
