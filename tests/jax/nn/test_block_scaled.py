"""Block-scaled weights, grouped products in the kernel's interpreter, and folded parameters, against plain products."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.emulator import operations
from tsmla_jax.generate import moe
from tsmla_jax.nn import MLAConfig, Step, functional, init_params
from tsmla_jax.nn.products import triton
from tsmla_jax.nn.products.block_scaled import BlockScaled, stack_size, with_products
from tsmla_jax.nn.products.grouped_matmul import grouped_matmul
from tsmla_jax.nn.products.linear import contract, joined_rows, linear, linear_by_kernel, split_rows
from tsmla_jax.nn.products.row_blocks import blocks_by_kernel, make_blocks, picked_rows, sort_rows
from tsmla_jax.nn.products.scaled_rows import scaled_rows
from tsmla_jax.nn.products.tiles import Tile, linear_tile
from tsmla_jax.ops import device


def narrow(rng: np.random.Generator, *shape: int) -> BlockScaled:
    blocks = tuple(-(-size // 128) for size in shape[-2:])
    values = jnp.asarray(rng.standard_normal(shape), jnp.float8_e4m3fn)
    return BlockScaled(values, jnp.asarray(rng.uniform(0.5, 2, (*shape[:-2], *blocks)), jnp.float32))


def widened(weight: BlockScaled) -> np.ndarray:
    """The definition: every value times the scale of its block."""
    rows, columns = weight.shape[-2:]
    scales = np.kron(np.asarray(weight.scales), np.ones((128, 128)))[..., :rows, :columns]
    return np.asarray(weight.values, np.float64) * scales


# Compiled as a whole: eagerly, each operation would be compiled for itself.
MIX, SORT = jax.jit(moe.mix_experts), jax.jit(sort_rows, static_argnums=1)


@jax.jit
def widen(weight: BlockScaled) -> jax.Array:
    return weight.widened(jnp.float32)


def apart(got: jax.Array, want: jax.Array) -> float:
    got, want = np.asarray(got, np.float32), np.asarray(want)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def test_products_with_block_scaled_weights() -> None:
    rng = np.random.default_rng(0)
    weight = narrow(rng, 200, 300)
    np.testing.assert_array_equal(np.asarray(weight.widened(jnp.float32)), widened(weight).astype(np.float32))
    x = rng.standard_normal((2, 3, 300)).astype(np.float32)
    expected = x @ widened(weight).T
    np.testing.assert_allclose(linear(x, weight), expected, rtol=2e-5, atol=2e-4)
    np.testing.assert_allclose(contract(x.reshape(2, 3, 3, 100), weight, axes=2), expected, rtol=2e-5, atol=2e-4)
    plain = rng.standard_normal((3, 100, 4, 5)).astype(np.float32)
    out = contract(jnp.asarray(x.reshape(2, 3, 3, 100)), jnp.asarray(plain), axes=2)
    np.testing.assert_allclose(out, np.tensordot(x.reshape(2, 3, 3, 100), plain, 2), rtol=2e-5, atol=2e-4)


def test_joined_weights_stay_narrow_where_blocks_allow() -> None:
    rng = np.random.default_rng(1)
    first, second = narrow(rng, 256, 130), narrow(rng, 72, 130)
    joined = joined_rows([first, second])
    assert isinstance(joined, BlockScaled)
    np.testing.assert_array_equal(widened(joined), np.concatenate([widened(first), widened(second)]))
    # The first one's last block would have rows of the second.
    assert not isinstance(joined_rows([second, first]), BlockScaled)


@pytest.mark.parametrize("make", [make_blocks, blocks_by_kernel])
@pytest.mark.parametrize(("rows", "most", "block"), [(1, 3, 16), (9, 2, 16), (40, 3, 32), (1100, 2, 16)])
def test_blocks_hold_every_pair_once(rows: int, most: int, block: int, make: Any) -> None:
    count = 5
    rng = np.random.default_rng(rows)
    groups = np.stack([rng.permutation(count)[:most] for _ in range(rows)]).astype(np.int32)
    if rows > 1:
        groups[3] = count
    blocks = make(jnp.asarray(groups), count, block)
    places, of_rows, of_blocks = (np.asarray(array) for array in (blocks.places, blocks.rows, blocks.groups))
    inside = groups < count
    assert len(np.unique(places[inside])) == inside.sum() and (places[~inside] >= len(of_rows)).all()
    np.testing.assert_array_equal(of_rows[places[inside]], np.nonzero(inside)[0])
    np.testing.assert_array_equal(of_blocks[places[inside] // block], groups[inside])
    empty = set(range(len(of_blocks))) - set((places[inside] // block).tolist())
    assert all(of_blocks[index] == count for index in empty)
    if make is make_blocks and rows > 1:  # else what gathers by the places may compute them again for every element
        assert "optimization_barrier" in str(jax.make_jaxpr(lambda x: make(x, count, block).places)(groups))


def test_stacks_avoid_sizes_that_are_counted_in_too_few_bits() -> None:
    assert stack_size(257, 4096, 7168) == 257 and stack_size(66, 2816, 2048) == 66
    assert stack_size(257, 7168, 2048) * 7168 * 2048 > 2**32 >= (stack_size(257, 7168, 2048) - 1) * 7168 * 2048


@pytest.mark.parametrize(
    ("scaled", "block", "tile"),
    [
        (False, 16, Tile(64, 128, 4, 3)),
        (False, 16, Tile(64, 64, 4, 3)),
        (True, 16, Tile(64, 128, 4, 3)),
        (True, 16, Tile(64, 64, 4, 3)),
        (True, 16, Tile(64, 128, 2, 4, half=True)),
        (True, 16, Tile(128, 128, 4, 3, half=True)),
        (True, 32, Tile(128, 128, 4, 4, half=True)),
        (True, 128, Tile(128, 128, 8, 3, half=True)),
    ],
)
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.sampled(5)
def test_grouped_products_equal_plain_ones(
    scaled: bool, block: int, tile: Tile, limit: float | None, backend: str
) -> None:
    """On a CPU by the kernel's interpreter; on a GPU by the kernel."""
    if jax.default_backend() != backend:
        pytest.skip(f"jax's default device is no {backend}")
    rng = np.random.default_rng(2)
    count, rows, hidden, width = 4, 7, 256, 128
    make: Any = narrow if scaled else lambda rng, *shape: jnp.asarray(rng.standard_normal(shape) / 16, jnp.bfloat16)
    gate_up, down = make(rng, count, 2 * width, hidden), make(rng, count, hidden, width)
    x = jnp.asarray(rng.standard_normal((rows, hidden)), jnp.bfloat16)
    groups = jnp.asarray(np.stack([rng.permutation(count)[:2] for _ in range(rows)]), jnp.int32)

    def experts(x: jax.Array, gate_up: Any, down: Any) -> jax.Array:
        blocks = make_blocks(groups, count, block)
        given = scaled_rows(x) if tile.half else x
        inner = grouped_matmul(given, gate_up, blocks, tile, gated=True, gather=True, limit=limit)
        return grouped_matmul(inner, down, blocks, tile)[blocks.places]

    out = np.asarray(jax.jit(experts)(x, gate_up, down), np.float64)
    wide_up, wide_down = (widened(w) if scaled else np.asarray(w, np.float64) for w in (gate_up, down))
    for row in range(rows):
        for index, group in enumerate(np.asarray(groups[row])):
            gate, up = np.split(wide_up[group] @ np.asarray(x[row], np.float64), 2)
            if limit is not None:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            expected = wide_down[group] @ (gate / (1 + np.exp(-gate)) * up)
            # bf16 rounds the hidden values to 8 bits, whose errors add up at random.
            tolerance = 2**-7 * np.abs(expected).max()
            np.testing.assert_allclose(out[row, index], expected, atol=tolerance)


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "by_kernel"),
    [
        (1, 3712, 2048, False),
        (1, 2112, 7168, True),
        (1, 64, 200, False),
        (512, 2112, 7168, True),
        (513, 2112, 7168, False),
    ],
)
def test_which_products_with_a_narrow_matrix_are_made_by_the_kernel(
    rows: int, columns: int, depth: int, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA would write the matrix widened before its product, for which many rows are worth it; of one row and a smaller
    matrix it widens where it reads."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x = jax.ShapeDtypeStruct((rows, depth), jnp.bfloat16)
    values = jax.ShapeDtypeStruct((columns, depth), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct((-(-columns // 128), -(-depth // 128)), jnp.float32)
    assert ("pallas_call" in str(jax.make_jaxpr(linear)(x, BlockScaled(values, scales)))) is by_kernel


@pytest.mark.parametrize(
    ("rows", "columns", "by_kernel"),
    [(1, 3712, False), (1, 7168, True), (16, 3712, True), (1024, 3712, True), (1025, 3712, False)],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_hopper_multiplies_narrow_weights_by_their_kernel(
    rows: int, columns: int, by_kernel: bool, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Pallas: of one row and a smaller matrix, and of many rows, by XLA."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x, values = jax.ShapeDtypeStruct((rows, 2048), dtype), jax.ShapeDtypeStruct((columns, 2048), jnp.float8_e4m3fn)
    weight = BlockScaled(values, jax.ShapeDtypeStruct((columns // 128, 16), jnp.float32))  # type: ignore[arg-type]
    with device.planned_for("sm_90a"):
        traced = str(jax.make_jaxpr(lambda x, weight: linear(x, weight))(x, weight))
    assert ("tsmla_kernel_call" in traced) is by_kernel and "pallas_call" not in traced


@pytest.mark.parametrize("tokens", [1, 16, 5000])
def test_hopper_multiplies_narrow_experts_by_their_kernel(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def stack(*shape: int) -> Any:
        scales = jax.ShapeDtypeStruct((shape[0], shape[1] // 128, shape[2] // 128), jnp.float32)
        return BlockScaled(jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn), scales)  # type: ignore[arg-type]

    x, shares = jax.ShapeDtypeStruct((tokens, 256), jnp.bfloat16), jax.ShapeDtypeStruct((tokens, 2), jnp.float32)
    experts, stacks = jax.ShapeDtypeStruct((tokens, 2), jnp.int32), (stack(8, 512, 256), stack(8, 256, 256))
    with device.planned_for("sm_90a"):
        assert not moe.takes_scaled_rows(jnp.bfloat16, *stacks, 2 * tokens)
        traced = str(jax.make_jaxpr(lambda *arrays: moe.mix_experts(*arrays))(x, experts, shares, *stacks))
    assert traced.count("tsmla_kernel_call") == 2 and "pallas_call" not in traced


@pytest.mark.parametrize(("products", "limit"), [(None, 0.01), ("quantized", 0.06)])
@pytest.mark.parametrize("tokens", [1, 30])
@pytest.mark.sampled(2)
def test_layers_by_calls_of_the_kernel(products: str | None, limit: float, tokens: int) -> None:
    """An MLP and a mixture of experts as on Hopper, whose kernels are emulated: one of the stacks has unused weights,
    one token has no expert but one, and gate and up are clipped."""
    if jax.default_backend() != "cpu":
        pytest.skip("emulates the kernels on CPUs")
    rng = np.random.default_rng(3)

    def stack(count: int, *shape: int) -> BlockScaled:
        values = jnp.asarray(rng.standard_normal((count, *shape)).clip(-3, 3) * 50, jnp.float8_e4m3fn)
        scales = rng.uniform(5e-4, 2e-3, (5, *(size // 128 for size in shape)))
        return BlockScaled(values, jnp.asarray(scales, jnp.float32), products)

    gate_up, down = stack(5, 512, 256), stack(6, 256, 256)
    x = jnp.asarray(rng.standard_normal((tokens, 256)), jnp.bfloat16)
    experts = np.asarray([rng.permutation(5)[:2] for _ in range(tokens)], np.int32)
    experts[0, 1] = 5
    shares = np.asarray(rng.random((tokens, 2)), np.float32)
    wide = [widen(replace(w, values=np.asarray(w.values)[:5])) for w in (gate_up, down)]
    first = [jax.tree.map(lambda x: np.asarray(x)[0], w) for w in (gate_up, down)]
    floats = np.asarray(x, np.float32)
    with device.planned_for("sm_90a"), operations.emulated():
        mix = jax.jit(lambda *arrays: moe.mix_experts(*arrays, 1.5))
        assert str(jax.make_jaxpr(mix)(x, experts, shares, gate_up, down)).count("tsmla_kernel_call") >= 2
        mixed = mix(x, experts, shares, gate_up, down)
        mlp = jax.jit(lambda x: moe.gated_mlp(x, *first, 1.5))(x)
    for got, want in (
        (mixed, jax.jit(lambda *arrays: moe.mix_experts(*arrays, 1.5))(floats, experts, shares, *wide)),
        (mlp, jax.jit(lambda *arrays: moe.gated_mlp(*arrays, 1.5))(floats, *(np.asarray(w)[0] for w in wide))),
    ):
        assert apart(got, want) < limit


def test_nothing_on_hopper_needs_pallas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A jax without its Triton backend: experts in fp8 and of 16 bits by a kernel, routers by XLA."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(triton, "plgpu", None)
    config = moe.MoEConfig(8, 2, 128, 0, "noaux_tc", 4, 2, True, 1.0)
    x = jax.ShapeDtypeStruct((40, 256), jnp.bfloat16)

    def stack(wide: bool, *shape: int) -> Any:
        if wide:
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        scales = jax.ShapeDtypeStruct((shape[0], shape[1] // 128, shape[2] // 128), jnp.float32)
        return BlockScaled(jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn), scales)  # type: ignore[arg-type]

    def step(params: Any, x: jax.Array) -> jax.Array:
        valid, tokens = jnp.ones(40, bool), jnp.zeros(40, jnp.int32)
        return moe.mixture_of_experts(params, x, valid, config, tokens)

    router = {
        "router": jax.ShapeDtypeStruct((8, 256), jnp.float32),
        "correction_bias": jax.ShapeDtypeStruct((8,), jnp.float32),
    }
    for wide in (False, True):
        params = router | {"gate_up": stack(wide, 8, 256, 256), "down": stack(wide, 8, 256, 128)}
        with device.planned_for("sm_90a"):
            traced = str(jax.make_jaxpr(step)(params, x))
        assert "pallas_call" not in traced and "ragged_dot" not in traced
        assert traced.count("tsmla_kernel_call") == 2


@pytest.mark.parametrize("rows", [1, 16, 20, 64, 65, 130])
@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_products_with_one_matrix_by_the_kernel(rows: int, backend: str) -> None:
    """By the kernel's interpreter or the kernel, with a last block of scales that has fewer rows, and with sums that
    several programs share."""
    if jax.default_backend() != backend:
        pytest.skip(f"jax's default device is no {backend}")
    rng = np.random.default_rng(3)
    weight, x = narrow(rng, 192, 1024), jnp.asarray(rng.standard_normal((rows, 1024)), jnp.bfloat16)
    assert linear_tile(rows, 192, 1024)[1].splits == 2
    expected = np.asarray(x, np.float64) @ widened(weight).T
    out = np.asarray(jax.jit(linear_by_kernel)(x, weight), np.float64)
    np.testing.assert_allclose(out, expected, atol=2**-8 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "splits", "half"),
    [(1, 2112, 7168, 8, False), (1, 24576, 1536, 1, False), (16, 7168, 16384, 4, True), (64, 24576, 1536, 1, True),
     (256, 7168, 16384, 2, True), (1, 64, 128, 1, False)],
)  # fmt: skip
def test_sums_are_shared_where_columns_are_few(rows: int, columns: int, depth: int, splits: int, half: bool) -> None:
    """V3's projections, and a matrix of one load."""
    block, tile = linear_tile(rows, columns, depth)
    assert (tile.splits, tile.half) == (splits, half)
    assert columns % tile.columns == 0 and depth // tile.depth % splits == 0 and block >= min(rows, 16)


def test_sums_that_cannot_be_shared_are_refused() -> None:
    rng, x = np.random.default_rng(5), jnp.ones((2, 384), jnp.bfloat16)
    blocks, weight = make_blocks(jnp.zeros((2, 1), jnp.int32), 1, 16), narrow(rng, 1, 128, 384)
    for splits, gated in ((2, False), (3, True)):
        with pytest.raises(ValueError, match=rf"tile\.splits: got {splits} with 3 loads and gated={gated}; legal: a"):
            grouped_matmul(x, weight, blocks, Tile(64, 128, 4, 3, splits=splits), gated=gated, gather=True)


def test_halved_products_need_scaled_activations() -> None:
    rng = np.random.default_rng(4)
    blocks = make_blocks(jnp.zeros((2, 1), jnp.int32), 1, 16)
    tile, x = Tile(64, 128, 4, 3, half=True), jnp.ones((2, 128), jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"tile\.half: got True with x of bfloat16 and block-scaled weights; legal: True, with"
    ):
        grouped_matmul(x, narrow(rng, 1, 64, 128), blocks, tile, gather=True)
    with pytest.raises(
        ValueError, match=r"tile\.half: got True with x of ScaledRows and plain weights; legal: True, with"
    ):
        grouped_matmul(scaled_rows(x), jnp.ones((1, 64, 128), jnp.bfloat16), blocks, tile, gather=True)
    with pytest.raises(ValueError, match=r"tile\.half: got False with x of ScaledRows"):
        grouped_matmul(scaled_rows(x), narrow(rng, 1, 64, 128), blocks, Tile(64, 128, 4, 3), gather=True)


@pytest.mark.parametrize(("rank", "bias", "latent"), [(None, False, 32), (None, True, 40), (24, True, 32)])
@pytest.mark.sampled(3)
def test_folded_parameters_mean_the_same(rank: int | None, bias: bool, latent: int) -> None:
    config = MLAConfig(
        hidden_size=40, num_attention_heads=3, kv_lora_rank=latent, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=12, q_lora_rank=rank, attention_bias=bias,
    )  # fmt: skip
    keys = iter(jax.random.split(jax.random.key(0), 9))
    rng = np.random.default_rng(0)
    params = {
        name: value + rng.standard_normal(value.shape, np.float32) if name.endswith("bias") else value
        for name, value in jax.jit(init_params, static_argnums=1)(next(keys), config).items()
    }
    folded = jax.jit(functional.fold, static_argnums=1)(params, config)
    x = jax.random.normal(next(keys), (6, 40))
    cu = jnp.asarray([0, 4, 6], jnp.int32)
    fixed: Any = {"cu_seqlens_q": cu, "max_q_len": 4, "implementation": "xla"}
    prefill = jax.jit(lambda params: functional.prefill(params, config, x, **fixed))
    plain_results, other_results = (prefill(p) for p in (params, folded))
    for plain, other in zip(plain_results, other_results, strict=True):
        np.testing.assert_allclose(other, plain, atol=1e-5)
    tables, lens = jnp.arange(4, dtype=jnp.int32).reshape(2, 2), jnp.asarray([5, 3], jnp.int32)
    step = Step.ragged(tables, lens, cu, total_tokens=6, max_q_len=4, page_size=4)
    cache = jax.random.normal(next(keys), (4, 4, config.cache_dim))
    for p in ({}, {"context_chunk": 2}):
        call: Any = functional.prefill_with_context if p else functional.decode
        run = jax.jit(lambda params, call=call, p=p: call(params, config, x, cache, step, implementation="xla", **p))
        plain, other = (run(one) for one in (params, folded))
        for expected, got in zip(plain, other, strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(("products", "limit"), [("quantized", 0.06), ("exact", 0.006)])
def test_products_as_the_weight_says(products: str, limit: float) -> None:
    """Linear and the mixture of experts by block_scaled_matmul, beside the weights widened to float32."""
    rng = np.random.default_rng(8)

    def weight(*shape: int) -> BlockScaled:
        blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
        values = jnp.asarray(rng.standard_normal(shape).clip(-3, 3) * 50, jnp.float8_e4m3fn)
        return BlockScaled(values, jnp.asarray(rng.uniform(5e-4, 2e-3, blocks), jnp.float32), products)

    x, dense = jnp.asarray(rng.standard_normal((3, 5, 272)), jnp.bfloat16), weight(392, 272)
    wide = np.asarray(x, np.float32)
    assert apart(jax.jit(linear)(x, dense), wide @ np.asarray(widen(dense)).T) < limit
    assert [part.products for part in split_rows(dense, 128)] == [products] * 2
    gate_up, down = weight(8, 256, 272), weight(7, 272, 128)  # one of the first stack is unused, and has no scales
    gate_up = replace(gate_up, scales=np.asarray(gate_up.scales)[:7])
    rows = np.asarray(x).reshape(15, -1)
    experts = np.asarray([rng.permutation(7)[:3] for _ in range(15)], np.int32)
    experts[2, 1] = 7
    shares = np.asarray(rng.random((15, 3)), np.float32)
    floats = [widen(BlockScaled(np.asarray(w.values)[:7], w.scales)) for w in (gate_up, down)]
    want = np.asarray(MIX(rows.astype(np.float32), experts, shares, *floats))
    assert apart(MIX(rows, experts, shares, gate_up, down), want) < limit
    changed = with_products({"down": down, "other": rows}, None)
    assert changed["down"].products is None and changed["other"] is rows
    with pytest.raises(ValueError, match="products: got 'fp8'; legal: None, 'quantized', 'exact'"):
        with_products(down, "fp8")
    one = MIX(rows[:1], experts[:1], shares[:1], gate_up, down)
    assert apart(one, want[:1]) < limit


def test_rows_sorted_by_group() -> None:
    rng = np.random.default_rng(9)
    for tokens, most, groups in ((1, 8, 20), (40, 3, 7), (900, 4, 9), (1024, 3, 40), (4100, 8, 256)):
        chosen = np.stack([rng.permutation(groups + 1)[:most] for _ in range(tokens)]).astype(np.int32)
        found = SORT(chosen, groups)
        order = np.argsort(chosen.ravel(), kind="stable")
        np.testing.assert_array_equal(found.rows, order // most)
        np.testing.assert_array_equal(np.asarray(found.places).ravel()[order], np.arange(chosen.size))
        np.testing.assert_array_equal(found.cu_rows, np.searchsorted(np.sort(chosen.ravel()), np.arange(groups + 1)))
        # What gathers by the places must not compute them again: so took the experts of V2-Lite's prompts 2 ms a layer.
        assert "optimization_barrier" in str(jax.make_jaxpr(lambda x, n=groups: sort_rows(x, n).places)(chosen))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32"])
def test_rows_picked_as_words(dtype: str) -> None:
    rng = np.random.default_rng(1)
    rows = jnp.asarray([3, 0, 3, 6], jnp.int32)
    for columns in (8, 6, 5):
        x = jnp.asarray(rng.standard_normal((7, columns)), dtype)
        picked = picked_rows(x, rows)
        assert picked.dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(picked, np.float32), np.asarray(x, np.float32)[np.asarray(rows)])
    moved = jax.make_jaxpr(lambda x: picked_rows(x, rows))(jnp.zeros((7, 8), dtype)).out_avals[0].shape
    words = str(jax.make_jaxpr(lambda x: picked_rows(x, rows))(jnp.zeros((7, 8), dtype)))
    assert moved == (4, 8) and ("i32[4,2]" in words or "i32[4,4]" in words) == (dtype != "float32")


def test_gated_activations_of_f16_keep_their_bits() -> None:
    """Products of 1e-4 and 1e-4, below the least number of f16, by both exact products."""
    rng = np.random.default_rng(10)

    def weight(*shape: int) -> BlockScaled:
        values = jnp.asarray(rng.standard_normal(shape).clip(-3, 3) * 50, jnp.float8_e4m3fn)
        blocks = (*shape[:-2], shape[-2] // 128, shape[-1] // 128)
        return BlockScaled(values, jnp.asarray(rng.uniform(1e-7, 2e-7, blocks), jnp.float32), "exact")

    x, shares = jnp.asarray(rng.standard_normal((6, 256)), jnp.float16), jnp.asarray(rng.random((6, 2)), jnp.float32)
    gate_up, down = weight(2, 512, 256), weight(2, 256, 256)
    down = replace(down, scales=np.asarray(down.scales) * np.float32(1e9))
    experts = jnp.asarray([[0, 1]] * 5 + [[1, 2]], jnp.int32)
    assert moe.takes_scaled_products(x.dtype, gate_up, down)
    floats = [np.float64(widen(w)) for w in (gate_up, down)]
    each = []
    for up, last in zip(*floats, strict=True):
        gate, other = np.split(np.float64(x) @ up.T, 2, axis=1)
        each.append((gate / (1 + np.exp(-gate)) * other) @ last.T)
    share = np.float64(shares)
    want = share[:, :1] * each[0] + share[:, 1:] * each[1]
    want[5] = share[5, 0] * each[1][5]
    for got, right in (
        (MIX(x, experts, shares, gate_up, down), want),
        (jax.jit(moe.gated_mlp)(x, *(jax.tree.map(lambda x: np.asarray(x)[0], w) for w in (gate_up, down))), each[0]),
    ):
        assert np.linalg.norm(np.float64(got) - right) < 1e-3 * np.linalg.norm(right)
