"""What of the MLA layer has a derivative, as docs/guides/derivatives.md says, and how deterministic= reaches the
kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx", reason="MLAttention needs flax: pip install 'tsmla-jax[flax]'")

import tsmla_jax  # noqa: E402
from tsmla_jax.nn import MLAConfig, MLAttention, Step, functional  # noqa: E402

CONFIG = MLAConfig(
    hidden_size=24, num_attention_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
)
TABLES, SEQ_LENS = jnp.asarray([[1, 3], [0, 2]], jnp.int32), jnp.asarray([7, 3], jnp.int32)
CU_SEQLENS = jnp.asarray([0, 2, 4], jnp.int32)


def cache() -> jax.Array:
    return jax.random.normal(jax.random.key(5), (4, 4, CONFIG.cache_dim))


def dense_step() -> Step:
    return Step.dense(TABLES, SEQ_LENS, new_tokens=2, page_size=4)


def ragged_step() -> Step:
    return Step(TABLES, SEQ_LENS, dense_step().slot_mapping.reshape(-1), CU_SEQLENS, max_q_len=2)


@pytest.fixture
def layer() -> Any:
    return MLAttention(CONFIG, rngs=nnx.Rngs(0))


def loss(x: jax.Array, layer: Any, implementation: str | None) -> jax.Array:
    y, _ = functional.prefill_with_context(
        layer.params, CONFIG, x, cache(), ragged_step(), context_chunk=3, implementation=implementation
    )
    return jnp.square(y).sum()


@pytest.mark.slow
def test_a_context_has_a_gradient_outside_of_jit_alone(layer: Any) -> None:
    x = jax.random.normal(jax.random.key(1), (4, 24))
    got, want = (jax.grad(loss)(x, layer, implementation) for implementation in (None, "reference"))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    message = "prefill_with_context under jax.jit has no derivative in this implementation; train with prefill"
    with pytest.raises(NotImplementedError, match=message):
        jax.jit(lambda x: jax.grad(loss)(x, layer, None))(x)


def test_decode_is_refused(layer: Any) -> None:
    def decode_loss(layer: Any) -> jax.Array:
        return layer.decode(jnp.ones((2, 2, 24)), cache(), dense_step())[0].sum()

    with pytest.raises(NotImplementedError, match=r"mla_decode has no derivative .*; train through mla_prefill"):
        nnx.jit(nnx.grad(decode_loss))(layer)


def call_functional(layer: Any, x: jax.Array, **options: Any) -> Any:
    return functional.prefill(layer.params, CONFIG, x, cu_seqlens_q=CU_SEQLENS, max_q_len=2, **options)


def call_prefill(layer: Any, x: jax.Array, **options: Any) -> Any:
    return layer.prefill(x, cu_seqlens_q=CU_SEQLENS, max_q_len=2, **options)


def call_ragged(layer: Any, x: jax.Array, **options: Any) -> Any:
    return layer(x, cu_seqlens_q=CU_SEQLENS, max_q_len=2, **options)


def call_padded(layer: Any, x: jax.Array, **options: Any) -> Any:
    return layer(x.reshape(2, 2, 24), **options)


@pytest.mark.parametrize("call", [call_functional, call_prefill, call_ragged, call_padded])
@pytest.mark.sampled(2)
def test_deterministic_reaches_the_operation(
    layer: Any, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, attend = [], tsmla_jax.mla_prefill_kv

    def record(*args: Any, **options: Any) -> Any:
        asked.append(options["deterministic"])
        return attend(*args, **options)

    monkeypatch.setattr(tsmla_jax, "mla_prefill_kv", record)
    x = jnp.ones((4, 24))
    call(layer, x)
    call(layer, x, deterministic=True)
    assert asked == [False, True]
