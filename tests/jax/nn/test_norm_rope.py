"""The kernel of V4's norms and ropes against XLA: by its interpreter on a CPU and by itself on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsmla_jax.nn.norms import Norm
from tsmla_jax.nn.products import norm_rope as module
from tsmla_jax.nn.products.norm_rope import Columns, Rope, norm_rope
from tsmla_jax.ops.selected import v4

TABLE = v4.rope_table(jnp.asarray(10.0 ** -(np.arange(32) / 8), jnp.float32), 100)
POSITIONS = jnp.asarray([3, 7, 99, -1, 0, 50], jnp.int32)
BACKENDS = pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])


def rows(dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal((6, 3000)), dtype)


@BACKENDS
@pytest.mark.parametrize("columns", [Columns(0, 5, 512), Columns(7, 1, 1024), Columns(64, 3, 576), Columns(1, 1, 64)])
@pytest.mark.parametrize("normed", ["", "plain", "weighted"])
@pytest.mark.parametrize("turned", ["", "forth", "back"])
@pytest.mark.sampled(5)
def test_the_kernel_does_what_xla_does(columns: Columns, normed: str, turned: str, backend: str) -> None:
    if jax.default_backend() != backend:
        pytest.skip(f"jax's default device is no {backend}")
    weight = jnp.asarray(np.random.default_rng(2).standard_normal(columns.width), jnp.float32)
    norm = {"": None, "plain": 1e-6, "weighted": Norm(weight, 1e-6)}[normed]
    rope = Rope(POSITIONS, TABLE, inverse=turned == "back") if turned else None
    # The dtype of the rows, by that of the results.
    results = {"float32": "bfloat16", "bfloat16": "bfloat16", "float16": "float16"}
    given = {name: rows(name) for name in ("bfloat16", "float16")}

    @jax.jit
    def by_kernel(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
        fixed = columns, norm, rope
        return {to: module.norm_rope_by_kernel(given[of], *fixed, jnp.dtype(to)) for to, of in results.items()}

    @jax.jit
    def by_xla(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {to: norm_rope(given[of], columns, norm, rope, dtype=to) for to, of in results.items()}

    of_kernel, of_xla = by_kernel(given), by_xla(given)
    for dtype in results:
        got, wanted = of_kernel[dtype], of_xla[dtype]
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype) == ((6, columns.heads, columns.width), dtype)
        # Sums in another order: a value may round to either side, twice where it is turned, too.
        step = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(
            *(np.asarray(array, np.float32) for array in (got, wanted)), rtol=2 * step + 1e-6, atol=8 * step
        )
        assert dtype == "float32" or np.asarray(got == wanted).mean() > 0.99


@BACKENDS
def test_a_row_does_not_depend_on_others(backend: str) -> None:
    if jax.default_backend() != backend:
        pytest.skip(f"jax's default device is no {backend}")
    x, columns, norm = rows(), Columns(8, 5, 512), 1e-6
    together = module.norm_rope_by_kernel(x, columns, norm, Rope(POSITIONS, TABLE), x.dtype)
    for row in range(6):
        rope = Rope(POSITIONS[row : row + 1], TABLE)
        alone = module.norm_rope_by_kernel(x[row : row + 1], columns, norm, rope, x.dtype)
        np.testing.assert_array_equal(np.asarray(alone[0]), np.asarray(together[row]))


def test_the_kernel_is_taken_where_it_can_run_and_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(by_kernel: bool) -> str:
        columns = Columns(0, 1, 512)
        return str(jax.make_jaxpr(lambda x: norm_rope(x, columns, 1e-6, by_kernel=by_kernel))(rows()))

    assert "pallas_call" not in traced(True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert norm_rope(rows()[:0], Columns(0, 2, 512), 1e-6, by_kernel=True).shape == (0, 2, 512)
    assert "pallas_call" in traced(True) and "pallas_call" not in traced(False)
    assert "dtype is float32; legal: bfloat16, float16" in module.why_not(jnp.float32, 512)[0]
    assert "rows are 9000 wide; the kernel holds at most 8192" in module.why_not(jnp.bfloat16, 9000)[0]
