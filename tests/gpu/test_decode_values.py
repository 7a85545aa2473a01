"""The decode kernels' values on a GPU, through jax and through torch: one grid, against float64 on the same inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu.front_ends import FRONT_ENDS, Arrays
from tests.oracles.attention import batched_decode, fp8_lse_error
from tests.oracles.inputs import decode_numbers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("hopper_in_torch"),
    pytest.mark.parametrize("front_end", FRONT_ENDS),
]

SCALE = 192**-0.5
FP8 = "float8_e4m3fn"
SHAPES = [(1, 1, 16, 64), (5, 1, 128, 20), (3, 4, 16, 9), (64, 2, 9, 3)]


def arrays(*shape: int, dtype: str = "bfloat16", kv_dtype: str | None = None, **options: Any) -> Arrays:
    """decode_numbers in the dtypes of a call."""
    q, cache, tables, lens = decode_numbers(*shape, **options)
    return q.astype(dtype), cache.astype(kv_dtype or dtype), tables, lens.astype(np.int32)


def assert_right(
    front_end: str, *args: np.ndarray, causal: bool = True, absolute: float = 8e-4, **options: Any
) -> Arrays:
    """FlashMLA's tolerances for out, or another absolute one. Returns the results."""
    got = FRONT_ENDS[front_end](*args, softmax_scale=SCALE, causal=causal, **options)
    q, kv_scale = args[0].astype(np.float64) * options.get("q_scale", 1.0), options.get("kv_scale", 1.0)
    offsets, latent_dim = options.get("cu_seqlens_q"), options.get("latent_dim", 512)
    want, want_lse = batched_decode(
        q, *args[1:], scale=SCALE, latent_dim=latent_dim, cu_seqlens_q=offsets, causal=causal, kv_scale=kv_scale
    )
    assert got[0].dtype == ("bfloat16" if args[0].dtype == FP8 else args[0].dtype)
    out = got[0].astype(np.float64)
    np.testing.assert_allclose(out, want, atol=absolute, rtol=2.01 / 128)
    if (norm := np.sum(want**2) + np.sum(out**2)) > 0:
        assert 1 - 2 * np.sum(out * want) / norm < 5e-6
    step = fp8_lse_error(args[0].shape[-1]) if args[0].dtype == FP8 else 1e-5
    np.testing.assert_allclose(got[1].astype(np.float64), want_lse, atol=step, rtol=step)
    return got


@pytest.mark.parametrize(("batch", "q_len", "heads", "max_pages"), SHAPES)
def test_right(front_end: str, batch: int, q_len: int, heads: int, max_pages: int) -> None:
    assert_right(front_end, *arrays(batch, q_len, heads, max_pages))


@pytest.mark.parametrize(("page", "q_len", "causal"), [(16, 3, True), (32, 3, False), (128, 3, True), (32, 1, True)])
def test_other_pages_and_dtypes(front_end: str, page: int, q_len: int, causal: bool) -> None:
    args = arrays(4, q_len, 16, 256 // page, page=page, dtype="float16", dim=320)
    assert_right(front_end, *args, latent_dim=256, causal=causal)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", None), (FP8, FP8), ("bfloat16", FP8)])
@pytest.mark.parametrize("latent_dim", [256, 512])
def test_many_short_requests(front_end: str, latent_dim: int, dtype: str, kv_dtype: str | None) -> None:
    """A CTA has eight pieces of one block in a row, more than the ring has stages and descriptions ahead.

    Few keys don't average the rounding of their probabilities to bfloat16, at most 2^-9 of each: out is then off by up
    to 2^-9 of the greatest latent, which cancels out of some sums."""
    lengths = np.random.default_rng(latent_dim).integers(0, 33, 1000)
    sizes = {"page": 16, "dim": latent_dim + 64, "lengths": lengths}
    args = arrays(1000, 1, 16, 2, dtype=dtype, kv_dtype=kv_dtype, **sizes)
    greatest = np.nanmax(np.abs(args[1][..., :latent_dim].astype(np.float64)))
    assert_right(front_end, *args, latent_dim=latent_dim, absolute=max(8e-4, 2**-9 * greatest))


def test_ragged_with_padding(front_end: str) -> None:
    q, *others = arrays(4, 3, 16, 6)
    ragged = q.reshape(12, 16, 576)[:9].copy()
    ragged[6:] = np.nan
    offsets = np.asarray([0, 3, 3, 4, 6], np.int32)
    out, lse = assert_right(front_end, ragged, *others, cu_seqlens_q=offsets, max_q_len=3)
    assert np.all(lse[6:] == -np.inf) and not out[6:].astype(np.float32).any()


@pytest.mark.parametrize(
    ("dtype", "q_len", "scales"),
    [("bfloat16", 2, {"kv_scale": 0.7}), ("float16", 1, {}), (FP8, 3, {"q_scale": 1.3, "kv_scale": 0.7})],
)
@pytest.mark.parametrize("heads", [16, 128])
def test_fp8_caches(front_end: str, dtype: str, q_len: int, scales: dict[str, float], heads: int) -> None:
    assert_right(front_end, *arrays(7, q_len, heads, 12, dtype=dtype, kv_dtype=FP8), **scales)
