"""The kernels of V4's streams against XLA: by their interpreter on a CPU and by themselves on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsmla_jax.generate import streams
from tsmla_jax.generate.config import StreamsConfig
from tsmla_jax.nn.norms import Norm
from tsmla_jax.nn.products import streams as kernels

BACKENDS = pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])


def by_kernel(
    params: dict[str, jax.Array], x: jax.Array, norm: Norm, config: StreamsConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`streams.read_streams` by the kernels."""
    rounds, eps = config.sinkhorn_iterations, config.eps
    return kernels.read_by_kernel(params, x, norm, rounds=rounds, eps=eps, norm_eps=config.norm_eps)


def random_inputs(count: int, width: int, tokens: int) -> tuple[dict[str, jax.Array], jax.Array, Norm]:
    rng = np.random.default_rng(count * tokens)
    rows = (2 + count) * count
    shapes = {"fn": (rows, count * width), "base": (rows,), "scale": (3,)}
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    params["fn"] /= 8  # weights of a mix between some percent and 1
    x = rng.standard_normal((tokens, count, width)).astype(np.float32)
    norm = Norm(jnp.asarray(rng.standard_normal(width), jnp.float32), 1e-6)
    return jax.tree.map(jnp.asarray, params), jnp.asarray(x, jnp.bfloat16), norm


@BACKENDS
@pytest.mark.parametrize(
    ("count", "width", "tokens"),
    [(4, 512, 1), (4, 256, 16), (3, 384, 70), (1, 128, 17), (8, 128, 3), (4, 4096, 5), (4, 7168, 2), (4, 256, 700)],
)
@pytest.mark.sampled(3)
def test_the_kernels_do_what_xla_does(count: int, width: int, tokens: int, backend: str) -> None:
    if jax.default_backend() != backend:
        pytest.skip(f"jax's default device is no {backend}")
    params, x, norm = random_inputs(count, width, tokens)
    config = StreamsConfig(count, sinkhorn_iterations=20, eps=1e-6, norm_eps=1e-5)
    got = jax.jit(lambda *arrays: by_kernel(*arrays, norm, config))(params, x)
    # By default XLA leaves out the rounding of the input before its norm.
    exactly = {"xla_allow_excess_precision": False}
    by_xla = jax.jit(lambda *arrays: streams.read_streams(*arrays, norm, config), compiler_options=exactly)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "why_not", lambda x: ["it is compared with XLA"])
        wanted = by_xla(params, x)
    assert [(array.shape, array.dtype) for array in got] == [(array.shape, array.dtype) for array in wanted]
    # A value may round to either side, before its norm and behind it, by 2^-8 of it each time.
    np.testing.assert_allclose(*(array[0].astype(jnp.float32) for array in (got, wanted)), rtol=2**-6, atol=1e-4)
    for index in (1, 2):
        np.testing.assert_allclose(got[index], wanted[index], rtol=2e-5, atol=5e-6)
    exact = np.asarray(got[0] == wanted[0]).mean()
    assert exact > 0.98


@BACKENDS
def test_what_is_no_number_shows_and_stays_in_its_token(backend: str) -> None:
    if jax.default_backend() != backend:
        pytest.skip(f"jax's default device is no {backend}")
    params, x, norm = random_inputs(4, 256, 20)
    config = StreamsConfig(4, sinkhorn_iterations=20, eps=1e-6, norm_eps=1e-5)
    clean = by_kernel(params, x, norm, config)
    spoilt = by_kernel(params, x.at[7, 2, 100].set(jnp.nan), norm, config)
    others = np.arange(20) != 7
    for before, after in zip(clean, spoilt, strict=True):
        assert np.isnan(np.asarray(after[7], np.float32)).all()
        np.testing.assert_array_equal(np.asarray(before)[others], np.asarray(after)[others])


@BACKENDS
def test_sums_are_those_of_f32(backend: str) -> None:
    """What is left when the greater parts cancel: f32 has 24 bits, and one bf16 or two have 8 or 16."""
    if jax.default_backend() != backend:
        pytest.skip(f"jax's default device is no {backend}")
    signs = jnp.where(jnp.arange(512) % 2 == 0, 1.0, -1.0)
    fn = jnp.broadcast_to(1 + 2.0**-9 + jnp.where(signs > 0, 2.0**-18, 0), (24, 512)).astype(jnp.float32)
    sums = kernels._project(fn, signs.astype(jnp.bfloat16).reshape(1, 4, 128)).sum(axis=0)[0]
    np.testing.assert_array_equal(sums[:24], 256 * 2.0**-18)
    assert sums[24] == 512 and not np.asarray(sums[25:]).any()


@pytest.mark.parametrize("count", [3, 4])
def test_divisors_without_an_eps(count: int) -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("it is a case of the interpreter")
    params, x, norm = random_inputs(count, 128, 2)
    config = StreamsConfig(count, sinkhorn_iterations=3, eps=0.0, norm_eps=1e-5)
    got, wanted = (read(params, x, norm, config) for read in (by_kernel, streams.read_streams))
    np.testing.assert_allclose(got[2], wanted[2], rtol=2e-5, atol=5e-6)


def test_streams_take_the_kernels_where_they_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    params, x, norm = random_inputs(4, 256, 3)
    config = StreamsConfig(4, sinkhorn_iterations=20, eps=1e-6, norm_eps=1e-5)

    def traced() -> str:
        return str(jax.make_jaxpr(lambda *arrays: streams.read_streams(*arrays, norm, config))(params, x))

    assert "pallas_call" not in traced()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "project_streams" in traced() and "read_streams" in traced()
    assert "there are no tokens" in kernels.why_not(x[:0])
    assert "dtype is float32; legal: bfloat16" in kernels.why_not(x.astype(jnp.float32))[0]
    assert "4 streams of 200; legal: at most 8" in kernels.why_not(x[..., :200])[0]
