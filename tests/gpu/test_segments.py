"""Attention over packed rows on a GPU: the kernels, forward and backward, beside "xla" in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsmla_jax.nn import Segments, segment_attention, segment_attention_kv
from tsmla_jax.ops import device
from tsmla_kernels.catalog import MLA_PREFILL

pytestmark = pytest.mark.gpu

HEADS, LEN, MAX_SEGMENTS = 4, 700, 4
SHAPES = {
    segment_attention: ((HEADS, 192), (HEADS, 192), (HEADS, 128)),
    segment_attention_kv: ((HEADS, 192), (HEADS, 256), (64,)),
}


def ids() -> np.ndarray:
    """Padding in front, between and behind, a row of nothing else, a row without, and a row of too many segments."""
    rows = np.zeros((5, LEN), np.int32)
    rows[0, 10:200], rows[0, 200:201], rows[0, 330:600] = 1, 2, 3
    rows[1, :129], rows[1, 129:640] = 7, 5
    rows[3] = 1
    rows[4] = np.arange(LEN) // 100 + 1
    return rows


@pytest.mark.parametrize("function", SHAPES, ids=lambda function: function.__name__)
def test_values_and_gradients(function: Callable[..., jax.Array]) -> None:
    if reasons := device.why_not(MLA_PREFILL):
        pytest.skip("; ".join(reasons))
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [
        jax.random.normal(key, (5, LEN, *shape), jnp.bfloat16)
        for key, shape in zip(keys, SHAPES[function], strict=False)
    ]
    used = jnp.asarray((ids() != 0) & (np.arange(5) != 4)[:, None])
    weight = jnp.where(used[..., None, None], jax.random.normal(keys[3], (5, LEN, HEADS, 128)), 0)

    def run(implementation: str, dtype: Any) -> Any:
        def attend(ids: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
            segments = Segments.from_ids(ids, max_segments=MAX_SEGMENTS)
            out = function(*arrays, segments, softmax_scale=192**-0.5, implementation=implementation)
            return jnp.where(used[..., None, None], out * weight, 0).astype(jnp.float32).sum(), out

        derivative = jax.jit(jax.value_and_grad(attend, (1, 2, 3), has_aux=True))
        return derivative(jnp.asarray(ids()), *(x.astype(dtype) for x in arrays))

    ((_, got), gradients), ((_, expected), exact) = run("cute", jnp.bfloat16), run("xla", jnp.float32)
    assert np.isnan(np.float32(got)[4]).all() and not np.float32(got)[:4][ids()[:4] == 0].any()
    # A row of too many segments holds NaN in its queries, so its keys' and values' gradients are NaN, too.
    for mine, theirs in zip((got, *gradients), (expected, *exact), strict=True):
        a, b = np.float32(mine)[:4], np.float32(theirs)[:4]
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)
