"""The merge kernel on a GPU against float64, inside jax and from torch: every dtype, in place, with parts that saw
nothing and NaN in what has no share."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax

pytestmark = pytest.mark.gpu

STEP = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-22}


@pytest.fixture(autouse=True)
def needs_the_kernel() -> None:
    arrays = [jax.ShapeDtypeStruct((3, 128), jnp.bfloat16)] * 2, [jax.ShapeDtypeStruct((3,), jnp.float32)] * 2
    if reasons := tsmla_jax.explain("merge_attention_states", *arrays).reasons["cute"]:
        pytest.skip("; ".join(reasons))


merge = functools.partial(tsmla_jax.merge_attention_states, implementation="cute")


def parts_of(parts: int, rows: tuple[int, ...], width: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """outs and lses; some parts of some rows saw nothing, of some rows all, and their outs are NaN."""
    rng = np.random.default_rng(parts + width)
    outs = rng.normal(size=(parts, *rows, width)).astype(jnp.dtype(dtype))
    lses = (rng.normal(size=(parts, *rows)) * 5 + rng.choice([0, -3000, 80], size=rows)).astype(np.float32)
    nothing = (rng.random(lses.shape) < 0.2) | (rng.random(rows) < 0.1)
    lses[nothing], outs[nothing] = -np.inf, np.nan
    return outs, lses


def oracle(outs: np.ndarray, lses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    wide = np.float64(lses)
    high = np.maximum(wide.max(0), -1e300)
    shares = np.exp(wide - high)
    total = shares.sum(0)
    seen = total > 0
    total = np.where(seen, total, 1)
    terms = np.where(np.isneginf(wide)[..., None], 0, np.float64(outs)) * (shares / total)[..., None]
    return terms.sum(0), np.where(seen, high + np.log(total), -np.inf)


def assert_right(got: Any, want: tuple[np.ndarray, np.ndarray]) -> None:
    step = STEP[jnp.dtype(got[0].dtype).name]
    np.testing.assert_allclose(np.float64(got[0]), want[0], rtol=step, atol=2**-20)
    np.testing.assert_allclose(np.float64(got[1]), want[1], rtol=2**-22, atol=1e-6)


@pytest.mark.parametrize("dtype", list(STEP))
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize(("rows", "width"), [((5, 3), 128), ((1,), 512), ((37, 16), 64), ((7, 100), 8)])
def test_right(dtype: str, parts: int, rows: tuple[int, ...], width: int) -> None:
    outs, lses = parts_of(parts, rows, width, dtype)
    assert_right(jax.jit(merge)(list(outs), list(lses)), oracle(outs, lses))


@pytest.mark.parametrize("width", [128, 512])
def test_many_rows_in_place(width: int) -> None:
    """Rows whose threads are in one warp, and in two."""
    outs, lses = parts_of(2, (4099, 16), width, "bfloat16")
    given = [jnp.asarray(x) for x in (*outs, *lses)]
    addresses = given[0].unsafe_buffer_pointer(), given[2].unsafe_buffer_pointer()
    run = jax.jit(lambda a, b, c, d: merge([a, b], [c, d]), donate_argnums=(0, 2))
    got = run(*given)
    assert (got[0].unsafe_buffer_pointer(), got[1].unsafe_buffer_pointer()) == addresses
    assert_right(got, oracle(outs, lses))


def test_parts_that_are_not_donated_stay_as_they_were() -> None:
    outs, lses = (jnp.asarray(x) for x in parts_of(2, (300, 4), 128, "float32"))
    before = np.asarray(outs), np.asarray(lses)
    merge(outs, lses)
    np.testing.assert_array_equal(np.asarray(outs), before[0])
    np.testing.assert_array_equal(np.asarray(lses), before[1])


def test_a_nan_with_a_share_is_the_rows() -> None:
    outs, lses = np.ones((2, 4, 128), np.float32), np.zeros((2, 4), np.float32)
    outs[1, 2], lses[0, 3] = np.nan, np.nan
    out, lse = (np.asarray(x) for x in merge(list(outs), list(lses)))
    np.testing.assert_array_equal(np.isnan(out).all(1), [False, False, True, True])
    np.testing.assert_array_equal(np.isnan(lse), [False, False, False, True])
    assert (out[:2] == 1).all()


def test_torch_launches_the_same_kernel() -> None:
    torch = pytest.importorskip("torch")
    import tsmla_bridge

    outs, lses = parts_of(2, (300, 16), 128, "float32")
    wide = torch.randn(300, 16, 192, device="cuda")
    wide[..., :128] = torch.from_numpy(outs[1]).cuda()
    given = [torch.from_numpy(outs[0]).cuda(), wide[..., :128]], [torch.from_numpy(x).cuda() for x in lses]
    got = tsmla_bridge.merge_attention_states(*given, implementation="cute")
    assert_right([x.cpu().numpy() for x in got], oracle(outs, lses))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = tsmla_bridge.merge_attention_states(*given)
    again[0].zero_()
    graph.replay()
    assert torch.equal(again[0], got[0]) and torch.equal(again[1], got[1])
