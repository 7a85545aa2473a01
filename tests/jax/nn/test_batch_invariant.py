"""nn.batch_invariant: a row's bits don't depend on the other rows, results and derivatives are those of XLA."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax
from tsmla_jax.nn import MLAConfig, Step, batch_invariant, functional, init_params
from tsmla_jax.nn.products import triton
from tsmla_jax.ops import device

CONFIG = MLAConfig(
    hidden_size=128, num_attention_heads=4, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
)
LOW_RANK = MLAConfig(
    hidden_size=128, num_attention_heads=2, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
    q_lora_rank=48, attention_bias=True, output_gate="head",
)  # fmt: skip


def random(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(f"uint{8 * x.dtype.itemsize}")


SHAPES = {  # terms, columns: several loads, a last load that is not full, fewer terms than a load
    "loads": (1024, 200), "ragged": (200, 130), "few": (24, 8),
}  # fmt: skip


@pytest.mark.parametrize("terms, columns", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_of_a_product_has_the_same_bits_in_any_batch(terms: int, columns: int, dtype: Any) -> None:
    x, weight = random(0, 301, terms, dtype=dtype), random(1, columns, terms, dtype=dtype)
    together = bits(batch_invariant.linear(x, weight))
    for rows in (slice(0, 1), slice(3, 20), slice(100, 230)):
        assert (bits(batch_invariant.linear(x[rows], weight)) == together[rows]).all()
    order = np.random.default_rng(0).permutation(301)
    assert (bits(batch_invariant.linear(x[order], weight)) == together[order]).all()
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    error = np.abs(np.asarray(batch_invariant.linear(x, weight), np.float64) - exact).max()
    assert error < (1e-4 if dtype == jnp.float32 else 2**-8 * np.abs(exact).max())


def test_hopper_takes_its_kernel_by_the_weight_and_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kernels can run follows from the weight alone; which of them does, from the number of tiles, too."""
    taken: list[int] = []

    def kernel(x: jax.Array, weight: jax.Array, *others: Any, out_dtype: str, implementation: str) -> jax.Array:
        taken.append(len(x))
        assert implementation == "cute" and weight.shape[0] == 1 and others[2].shape == (2,)
        within = jnp.arange(len(x)) < others[2][1] - others[2][0]
        return jnp.dot(x * within[:, None], weight[0].T, preferred_element_type=out_dtype)

    monkeypatch.setattr(batch_invariant, "grouped_block_scaled_matmul", kernel)
    monkeypatch.setattr(batch_invariant, "_LEAST_TILES", 4)
    x, weight = random(0, 300, 128, dtype=jnp.bfloat16), random(1, 512, 128, dtype=jnp.bfloat16)
    batch_invariant.linear(x, weight)
    assert not taken  # there is no Hopper GPU
    assert "GPU" in batch_invariant.why_not_large_tiles(128, 512, "bfloat16", "bfloat16")[0]
    assert "16 bits" in batch_invariant.why_not_large_tiles(128, 512, "float32", "float32")[0]
    monkeypatch.setattr(batch_invariant, "why_not_large_tiles", lambda *_: [])
    for rows in (300, 129, 128, 1):
        # A program is traced for GPUs and for this machine, which interprets the kernel in Pallas.
        out = jax.jit(partial(batch_invariant.linear, out_dtype=jnp.float32))(x[:rows], weight)
        assert out.dtype == jnp.float32 and out.shape == (rows, 512)
    assert taken == [300, 129]
    jax.jit(batch_invariant.linear_by_heads)(x[:, None].repeat(2, 1), weight[None].repeat(2, 0))
    assert taken == [300, 129]


@pytest.mark.skipif(triton.plgpu is None, reason="this jax has no Pallas for Triton")
def test_a_program_for_gpus_has_the_kernels() -> None:
    """The interpreter's loops, which a CPU runs, would add in another order on a GPU."""

    def model(x: jax.Array, weight: jax.Array) -> jax.Array:
        normed = batch_invariant.rms_norm(x, weight[0], 1e-6)
        return batch_invariant.log_softmax(batch_invariant.linear(normed, weight))

    arrays = random(0, 5, 32), random(1, 20, 32)
    text = jax.jit(model).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"@{device.TRITON_TARGET}") == 3 and "stablehlo.while" not in text
    checks = tsmla_jax.export_disabled_checks()
    jax.export.export(jax.jit(model), platforms=["cuda"], disabled_checks=checks)(*arrays).serialize()
    assert device.TRITON_TARGET not in jax.jit(model).trace(*arrays).lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("width", [2048, 3000, 24])
def test_norms_and_softmax_of_a_row(width: int) -> None:
    x, weight = 3 * random(0, 37, width), random(1, width)
    normed, logs = batch_invariant.rms_norm(x, weight, 1e-6), batch_invariant.log_softmax(x)
    for rows in (slice(0, 1), slice(5, 18)):
        assert (bits(batch_invariant.rms_norm(x[rows], weight, 1e-6)) == bits(normed)[rows]).all()
        assert (bits(batch_invariant.log_softmax(x[rows])) == bits(logs)[rows]).all()
    want = np.asarray(x, np.float64)
    np.testing.assert_allclose(logs, jax.nn.log_softmax(x), rtol=2e-6, atol=2e-6)
    want = want / np.sqrt((want**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(weight, np.float64)
    np.testing.assert_allclose(normed, want, rtol=2e-6, atol=1e-6)


def test_derivatives_are_those_of_the_plain_operations() -> None:
    x, weight, norm = random(0, 9, 64), random(1, 40, 64), random(2, 64)

    def by(matmul: Any, rms_norm: Any, log_softmax: Any) -> Any:
        def loss(x: jax.Array, weight: jax.Array, norm: jax.Array) -> jax.Array:
            return (log_softmax(matmul(rms_norm(x, norm), weight)) * random(3, 9, 40)).sum()

        return jax.grad(loss, (0, 1, 2))(x, weight, norm)

    def plain_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight

    def norm_of(x: jax.Array, weight: jax.Array) -> jax.Array:
        return batch_invariant.rms_norm(x, weight, 1e-6)

    got = by(batch_invariant.linear, norm_of, batch_invariant.log_softmax)
    want = by(lambda x, weight: x @ weight.T, plain_norm, jax.nn.log_softmax)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [CONFIG, LOW_RANK], ids=["", "low rank, biases, a gate"])
def test_a_layer_with_wrapped_parameters(config: MLAConfig) -> None:
    """Its decode step gives a token the same bits in any batch, and what the plain parameters give but for rounding."""
    params = functional.fold(init_params(jax.random.key(0), config, jnp.float32), config)
    wrapped, x = batch_invariant.wrap(params), random(1, 40, 128)
    cache = random(2, 40, 64, config.cache_dim)

    @jax.jit
    def decode(params: Any, x: jax.Array, tables: jax.Array, lens: jax.Array) -> jax.Array:
        step = Step.dense(tables, lens, page_size=64)
        return functional.decode(params, config, x[:, None], cache, step, batch_invariant=True)[0]

    batch = x, jnp.arange(40, dtype=jnp.int32)[:, None], jnp.arange(3, 43, dtype=jnp.int32)
    together = decode(wrapped, *batch)
    for rows in (slice(0, 1), slice(7, 20)):
        assert (bits(decode(wrapped, *(array[rows] for array in batch))) == bits(together)[rows]).all()
    norms = 1 if config.q_lora_rank is None else 2
    # A program is traced for GPUs and for this machine.
    assert str(jax.make_jaxpr(decode)(wrapped, *batch)).count("name=batch_invariant_rows") == 2 * norms
    np.testing.assert_allclose(together, decode(params, *batch), rtol=1e-4, atol=1e-5)

    @jax.jit
    def prefill(params: Any) -> jax.Array:
        starts = jnp.array([0, 13, 40], jnp.int32)
        return functional.prefill(params, config, x, cu_seqlens_q=starts, max_q_len=27)[0]

    np.testing.assert_allclose(prefill(wrapped), prefill(params), rtol=1e-4, atol=1e-5)


def test_what_is_refused() -> None:
    x, weight = random(0, 3, 8), random(1, 4, 8)
    with pytest.raises(TypeError, match=r"x: got int32; legal: bfloat16, float16, float32"):
        batch_invariant.linear(x.astype(jnp.int32), weight)
    with pytest.raises(TypeError, match=r"weight: got bfloat16; legal: float32, as x has"):
        batch_invariant.linear(x, weight.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"weight: got shape \(8, 4\) with x \(3, 8\); legal: \[N, K\]"):
        batch_invariant.linear(x, weight.T)
    with pytest.raises(ValueError, match=r"weight: got shape \(4,\) with x \(3, 8\); legal: \[C\]"):
        batch_invariant.rms_norm(x, jnp.ones(4), 1e-6)
    with pytest.raises(TypeError, match=r"logits: got int32"):
        batch_invariant.log_softmax(x.astype(jnp.int32))
    for empty in (x[:, :0], x[0, 0]):
        with pytest.raises(ValueError, match=r"logits: got shape \(.*\); legal: \[..., C\] with C of at least 1"):
            batch_invariant.log_softmax(empty)
    with pytest.raises(TypeError, match="x: got list; legal: an array"):
        batch_invariant.linear([1.0], weight)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weight: got BatchInvariant; legal: an array, as its values are"):
        batch_invariant.linear(x, batch_invariant.BatchInvariant(weight))  # type: ignore[arg-type]
    for dtype in (jnp.int32, jnp.float64, bool):
        with pytest.raises(TypeError, match=r"out_dtype: got .*; legal: bfloat16, float16, float32, or None for x's"):
            batch_invariant.linear(x, weight, out_dtype=dtype)
    with pytest.raises(TypeError, match="weight: got int32; legal: bfloat16"):
        batch_invariant.rms_norm(x, jnp.ones(8, jnp.int32), 1e-6)
    for eps in (jnp.float32(1e-6), True, "1"):
        with pytest.raises(TypeError, match=r"eps: got .*; legal: a positive number, static"):
            batch_invariant.rms_norm(x, weight[0], eps)  # type: ignore[arg-type]
    for number in (0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match=r"eps: got .*; legal: a positive number below infinity"):
            batch_invariant.rms_norm(x, weight[0], number)
    params = init_params(jax.random.key(0), CONFIG, jnp.float32)
    with pytest.raises(ValueError, match=r"params: got no 'in_proj'; legal: what functional.fold made"):
        batch_invariant.wrap(params)
    params = functional.fold(params, CONFIG)
    with pytest.raises(TypeError, match=r"params: 'o_proj' is of int8; legal: arrays of bfloat16, float16, float32"):
        batch_invariant.wrap(params | {"o_proj": params["o_proj"].astype(jnp.int8)})


def test_nothing_to_multiply() -> None:
    x, weight = random(0, 3, 8), random(1, 4, 8)
    assert batch_invariant.linear(x[:0], weight).shape == (0, 4)
    assert (batch_invariant.linear(x[:, :0], weight[:, :0]) == 0).all()
    assert batch_invariant.log_softmax(x[:0]).shape == (0, 8)
