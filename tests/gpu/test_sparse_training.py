"""Training of V3.2's layer on a GPU: every parameter's gradient by the kernels in all forms, and a model."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax
from tsmla_jax.nn import MLAConfig, v32

pytestmark = pytest.mark.gpu

CONFIG = v32.V32Config(
    MLAConfig(hidden_size=128, num_attention_heads=4, q_lora_rank=64, kv_lora_rank=512),
    index_n_heads=4,
    index_head_dim=64,
    index_topk=16,
)
TOKENS, MAX_LEN = 256, 100
OFFSETS = jnp.asarray([0, 100, 100, 103, 200], jnp.int32)
USED = 200


@pytest.fixture(autouse=True)
def needs_the_kernel() -> None:
    q, cache = jnp.zeros((2, 4, 576), jnp.bfloat16), jnp.zeros((2, 1, 576), jnp.bfloat16)
    found = tsmla_jax.explain(
        "sparse_mla", q, cache, jnp.zeros((2, 16), jnp.int32), softmax_scale=0.1, implementation="cute"
    )
    if reasons := found.reasons["cute"]:
        pytest.skip("; ".join(reasons))


def loss(params: Any, x: jax.Array, selected: jax.Array, **options: Any) -> jax.Array:
    """A loss of y and of the indexer, over the same choice in every call."""
    given = {"cu_seqlens_q": OFFSETS, "max_q_len": MAX_LEN, **options}
    if not options.get("dense"):
        given["selected"] = selected
    found = v32.prefill(params, CONFIG, x, **given)
    assert found.index_loss is not None
    return jnp.sin(found.y[:USED].astype(jnp.float32)).sum() / 100 + found.index_loss.sum()


@pytest.mark.parametrize("options", [{"form": "direct"}, {"form": "mask"}, {"dense": True}], ids=str)
def test_the_gradient_of_every_parameter(options: dict[str, Any]) -> None:
    """An error from float32 of at most 1.5 times that of XLA in bfloat16; a hundredth is left for what both round."""
    wide = v32.init_params(jax.random.key(0), CONFIG)
    x = jax.random.normal(jax.random.key(1), (TOKENS, CONFIG.mla.hidden_size))
    narrow, narrow_x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (wide, x))
    choose = functools.partial(v32.prefill, cu_seqlens_q=OFFSETS, max_q_len=MAX_LEN, index_loss=False)
    selected = choose(narrow, CONFIG, narrow_x).selected
    assert selected is not None
    assert (selected == choose(narrow, CONFIG, narrow_x, implementation="xla").selected).all()

    def gradient(params: Any, x: jax.Array, **others: Any) -> Any:
        return jax.jit(jax.grad(functools.partial(loss, **options, **others), (0, 1)))(params, x, selected)

    found = gradient(narrow, narrow_x)
    in_xla = gradient(narrow, narrow_x, implementation="xla")
    want = gradient(wide, x, implementation="xla")
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(want)]
    for path, *gradients in zip(paths, *map(jax.tree.leaves, (found, in_xla, want)), strict=True):
        a, b, c = (np.float64(np.asarray(gradient, np.float32)) for gradient in gradients)
        size = np.linalg.norm(c)
        assert size > 0 and np.linalg.norm(a - c) <= 1.5 * np.linalg.norm(b - c) + 1e-2 * size, path


def test_a_model_trains_as_the_reference_does() -> None:
    pytest.importorskip("flax", reason="needs flax: pip install 'tsmla-jax[flax]'")
    pytest.importorskip("optax", reason="needs optax: pip install optax")
    path = Path(__file__).parents[2] / "examples" / "train_sparse.py"
    spec = importlib.util.spec_from_file_location("train_sparse", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    losses = example.train(60, 20, None, jnp.bfloat16)
    assert losses[-1].model < 0.25 * losses[0].model
