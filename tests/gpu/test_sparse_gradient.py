"""The gradient of sparse_mla by its kernel on a GPU: through jax and through torch, the bits of the deterministic mode,
and its memory. small_grid.py has its values at odd sizes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tsmla_bridge
import tsmla_jax
from tests.gpu.front_ends import tensor

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_in_torch")]

TOKENS, HEADS, SELECTED, SLOTS = 300, 80, 200, 512
SCALE = 0.05


@functools.cache
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "q": rng.standard_normal((TOKENS, HEADS, 576), np.float32),
        "kv_cache": rng.standard_normal((SLOTS // 64, 64, 576), np.float32),
        "indices": rng.integers(-1, SLOTS, (TOKENS, SELECTED), np.int32),
        "lengths": rng.integers(0, SELECTED + 1, TOKENS).astype(np.int32),
    }


def on_gpu() -> dict[str, torch.Tensor]:
    dtypes = {"q": torch.bfloat16, "kv_cache": torch.bfloat16}
    return {name: tensor(x).to(dtypes.get(name, torch.int32)) for name, x in arrays().items()}


def by_torch(deterministic: bool) -> tuple[torch.Tensor, ...]:
    """The gradients of q and the cache."""
    given = on_gpu()
    leaves = [given.pop(name).requires_grad_() for name in ("q", "kv_cache")]
    out = tsmla_bridge.sparse_mla(*leaves, **given, softmax_scale=SCALE, deterministic=deterministic)
    assert isinstance(out, torch.Tensor)
    return torch.autograd.grad(out.float().square().sum(), leaves)


@pytest.mark.parametrize("deterministic", [False, True])
def test_jax_and_torch_agree_with_the_reference(deterministic: bool) -> None:
    given = {name: jnp.asarray(x, jnp.bfloat16 if x.dtype == np.float32 else jnp.int32) for name, x in arrays().items()}
    q, kv = given.pop("q"), given.pop("kv_cache")

    def loss(q: jax.Array, kv: jax.Array, implementation: str) -> jax.Array:
        options = {"softmax_scale": SCALE, "deterministic": deterministic, "implementation": implementation}
        return (tsmla_jax.sparse_mla(q, kv, **given, **options).astype(jnp.float32) ** 2).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    want = [np.asarray(x, np.float32) for x in gradients(q, kv, "reference")]
    found = [np.asarray(x, np.float32) for x in gradients(q, kv, "cute")]
    through_torch = [x.float().cpu().numpy() for x in by_torch(deterministic)]
    for got in (found, through_torch):
        for a, b in zip(got, want, strict=True):
            assert np.linalg.norm(a - b) < 1e-2 * np.linalg.norm(b)


def test_the_bits_of_deterministic_calls() -> None:
    first, *others = (by_torch(True) for _ in range(5))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_memory_is_linear_in_tokens_and_slots() -> None:
    given = on_gpu()
    leaves = [given.pop(name).requires_grad_() for name in ("q", "kv_cache")]
    out = tsmla_bridge.sparse_mla(*leaves, **given, softmax_scale=SCALE)
    assert isinstance(out, torch.Tensor)
    d_out = torch.ones_like(out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out, leaves, d_out)
    gradients = sum(x.numel() for x in leaves) * 2
    sums = SLOTS * 576 * 4 + 3 * TOKENS * HEADS * 4
    lse = TOKENS * HEADS * 4
    assert torch.cuda.max_memory_allocated() - before < 1.1 * (gradients + sums + lse) + (1 << 21)
