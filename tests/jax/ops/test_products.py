"""Products with block scales: their definition, the portable form, the kernel's call."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax
from tests.jax.ops.programs import ints, kernels, lower
from tsmla_jax.ops import device
from tsmla_jax.ops.block_scaled_matmul.reference import power

pytestmark = pytest.mark.usefixtures("cache_directory")

ROWS, COLUMNS, TERMS, GROUPS = 12, 512, 336, 3
FLOAT32 = {"out_dtype": "float32"}


def operands(*groups: int, rows: int = ROWS, columns: int = COLUMNS, terms: int = TERMS) -> dict[str, Any]:
    rng = np.random.default_rng(rows + terms)
    blocks = -(-terms // 128)
    return {
        "x": jnp.asarray(rng.standard_normal((rows, terms)), jnp.float8_e4m3fn),
        "weight": jnp.asarray(rng.standard_normal((*groups, columns, terms)), jnp.float8_e4m3fn),
        "x_scales": jnp.asarray(rng.uniform(0.5, 2, (rows, blocks)), jnp.float32),
        "weight_scales": jnp.asarray(rng.uniform(0.5, 2, (*groups, -(-columns // 128), blocks)), jnp.float32),
    }


def grouped(offsets: list[int], **sizes: int) -> dict[str, Any]:
    return operands(len(offsets) - 1, **sizes) | {"cu_rows": ints(offsets)}


OPTIONS = ("out_dtype", "gated", "limit", "implementation")
_MULTIPLY = jax.jit(tsmla_jax.block_scaled_matmul, static_argnames=OPTIONS)
_MULTIPLY_GROUPS = jax.jit(tsmla_jax.grouped_block_scaled_matmul, static_argnames=OPTIONS)


def multiply(*arrays: Any, **options: Any) -> Any:
    """The product in numpy, compiled as a whole: eagerly, each operation would be compiled for itself."""
    return jax.device_get(_MULTIPLY(*arrays, **options))


def multiply_groups(*arrays: Any, **options: Any) -> Any:
    """The grouped product, as `multiply`."""
    return jax.device_get(_MULTIPLY_GROUPS(*arrays, **options))


def exact(x: Any, weight: Any, x_scales: Any, weight_scales: Any) -> np.ndarray:
    """The product in float64."""
    rows, columns = (np.asarray(values, np.float64) for values in (x, weight))
    ours = np.repeat(x_scales, 128, 1)[:, : rows.shape[1]]
    theirs = np.repeat(np.repeat(weight_scales, 128, 0)[: columns.shape[0]], 128, 1)[:, : columns.shape[1]]
    return (rows * ours) @ (columns * theirs).T


@pytest.mark.parametrize("name", ["reference", "xla"])
@pytest.mark.parametrize(("rows", "columns", "terms"), [(12, 264, 336), (1, 8, 16), (5, 128, 384)])
def test_a_product_of_any_size(name: str, rows: int, columns: int, terms: int) -> None:
    given = operands(rows=rows, columns=columns, terms=terms)
    out = multiply(**given, **FLOAT32, implementation=name)
    np.testing.assert_allclose(out, exact(**given), rtol=1e-5, atol=1e-4)
    rounded = multiply(**given, implementation=name)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(rounded), out, rtol=1e-2)


@pytest.mark.parametrize("name", ["reference", "xla"])
@pytest.mark.parametrize("offsets", [[0, 0, 5, 9], [0, 0, 12, 12], [0, 0, 0, 0], [0, 12]])
def test_groups_without_rows_with_all_and_rows_of_none(name: str, offsets: list[int]) -> None:
    given = {argument: np.array(x) for argument, x in grouped(offsets, columns=136).items()}
    given["x"][offsets[-1] :] = given["x_scales"][offsets[-1] :] = np.nan
    out = multiply_groups(**given, **FLOAT32, implementation=name)
    want = np.zeros((ROWS, 136))
    for group in range(len(offsets) - 1):
        own = slice(offsets[group], offsets[group + 1])
        parts = (given["x"][own], given["weight"][group], given["x_scales"][own], given["weight_scales"][group])
        want[own] = exact(*parts)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["reference", "xla"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_without_scales_meet_the_weights_as_they_are(name: str, dtype: str) -> None:
    rng = np.random.default_rng(5)
    dense, stack = jax.device_get((operands(), grouped([0, 0, 5, 9])))
    ones = np.ones((ROWS, 3), np.float32)
    for function, given in (
        (multiply, dense),
        (multiply_groups, stack),
    ):
        given["x"], given["x_scales"] = np.asarray(jnp.asarray(rng.standard_normal((ROWS, TERMS)), dtype)), None
        out = function(**given, **FLOAT32, implementation=name)
        if given is dense:
            want = exact(**dense | {"x_scales": ones})
        else:
            want = np.zeros((ROWS, COLUMNS))
            for group, own in enumerate((slice(0, 0), slice(0, 5), slice(5, 9))):
                parts = (stack["x"][own], stack["weight"][group], ones[own], stack["weight_scales"][group])
                want[own] = exact(*parts)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-3)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def packed(*groups: int, columns: int, terms: int) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """A random weight of e2m1, the exponents of its scales, and its numbers in float64."""
    rng = np.random.default_rng(columns)
    codes = rng.integers(0, 16, (*groups, columns, terms))
    exponents = rng.integers(118, 130, (*groups, columns, -(-terms // 32)))
    values = E2M1[codes] * np.repeat(2.0 ** (exponents - 127), 32, -1)[..., :terms]
    bytes_of = codes[..., ::2] + 16 * codes[..., 1::2]
    return jnp.asarray(bytes_of, jnp.uint8), jnp.asarray(exponents, jnp.uint8), values


@pytest.mark.parametrize("name", ["reference", "xla"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_packed_weights(name: str, dtype: str) -> None:
    x = jnp.asarray(np.random.default_rng(1).standard_normal((7, 336)), dtype)
    wide = np.asarray(x, np.float64)
    weight, exponents, values = packed(columns=40, terms=336)
    out = multiply(x, weight, None, exponents, **FLOAT32, implementation=name)
    np.testing.assert_allclose(out, wide @ values.T, rtol=1e-5, atol=1e-4)
    weight, exponents, values = packed(4, columns=16, terms=336)  # one more than there are groups
    cu_rows, rows = ints([0, 2, 2, 6]), ints([3, 1, 0, 6, 6, 2, 5])
    form = {"rows": rows, "gated": True, **FLOAT32, "implementation": name}
    got = multiply_groups(x, weight, None, np.asarray(exponents)[:3], cu_rows, **form)
    for group, picks in ((0, [3, 1]), (2, [0, 6, 6, 2])):
        want = gated_of(wide[picks] @ values[group].T, None)
        np.testing.assert_allclose(got[:2] if group == 0 else got[2:6], want, rtol=1e-5, atol=1e-4)
    assert not got[6:].any()


def test_the_least_and_the_greatest_scale_of_packed_weights() -> None:
    exponents = jnp.array([0, 1, 127, 254, 255], jnp.uint8)
    np.testing.assert_array_equal(jax.jit(power)(exponents), np.float32([2.0**-127, 2.0**-126, 1, 2.0**127, np.nan]))
    weight, x = jnp.full((1, 16), 0x22, jnp.uint8), jnp.ones((1, 32), jnp.bfloat16)
    for exponent, want in ((30, 32 * 2.0**-97), (240, 32 * 2.0**113), (255, np.nan)):
        scales = np.full((1, 1), exponent, np.uint8)
        out = multiply(x, weight, None, scales, **FLOAT32, implementation="reference")
        np.testing.assert_array_equal(np.float64(out), want)


def test_packed_calls_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    weight, exponents, _ = packed(3, columns=512, terms=256)
    x, cu_rows = jnp.ones((9, 256), jnp.bfloat16), ints([0, 2, 2, 9])
    dense = functools.partial(tsmla_jax.block_scaled_matmul, implementation="cute")
    stack = functools.partial(tsmla_jax.grouped_block_scaled_matmul, implementation="cute")
    ((_, config),) = kernels(jax.make_jaxpr(lambda *given: dense(given[0], given[1], None, given[2]))(
        x, weight[0], exponents[0]
    ))  # fmt: skip
    assert config.packed and config.x_dtype == "bfloat16"
    call = jax.make_jaxpr(lambda *given: stack(given[0], given[1], None, given[2], given[3], rows=cu_rows[:3]))
    ((_, config),) = kernels(call(x, weight, exponents, cu_rows))
    assert config.packed and config.picked
    for change, text in (
        (
            (x.astype(jnp.float16), weight[0], exponents[0]),
            "x's dtype is float16; .* takes bfloat16 with packed weights",
        ),
        (
            (x[:, :160], weight[0, :, :80], exponents[0, :, :5]),
            "K is 160; .* takes a multiple of 128 with packed weights",
        ),
    ):
        with pytest.raises(NotImplementedError, match=text):
            dense(change[0], change[1], None, change[2])
    for given, text in (
        ((x[:, :255], weight[0], None, exponents[0]), r"x: got shape \[9, 255\]; K must be even, and static, with a"),
        ((x, weight[0, :, :64], None, exponents[0]), r"weight: got shape \[512, 64\]; axis 1 must be 128 \(K / 2, of"),
        ((x, weight[0], None, exponents[0, :, :4]), r"weight_scales: got shape \[512, 4\]; axis 1 must be 8 \(K / 32"),
        ((x, weight[0], None, jnp.ones((512, 8))), r"weight_scales: got dtype float32; legal: uint8"),
        ((x, weight[0], jnp.ones((9, 2)), exponents[0]), r"x_scales: got an array with a weight of uint8; legal: None"),
        (
            (x.astype(jnp.float8_e4m3fn), weight[0], None, exponents[0]),
            r"x: got dtype float8_e4m3fn with a weight of ui",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            tsmla_jax.block_scaled_matmul(*given)


@pytest.mark.parametrize("name", ["reference", "xla"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_16_bits(name: str, dtype: str) -> None:
    rng = np.random.default_rng(3)
    x, weight = rng.standard_normal((9, 104)), rng.standard_normal((4, 32, 104))
    x[7:] = weight[3] = np.nan  # one weight more than there are groups
    x, weight = jnp.asarray(x, dtype), jnp.asarray(weight, dtype)
    given, form = (x, weight, None, None, ints([0, 0, 5, 7])), {**FLOAT32, "implementation": name}
    out = multiply_groups(*given, **form)
    gated = multiply_groups(*given, rows=ints([6, 0, 0, 3, 2, 5, 4, 8]), gated=True, **form)
    rows, columns = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    for group, own, picks in ((1, slice(0, 5), [6, 0, 0, 3, 2]), (2, slice(5, 7), [5, 4])):
        np.testing.assert_allclose(out[own], rows[own] @ columns[group].T, rtol=1e-5, atol=1e-4)
        want = gated_of(rows[picks] @ columns[group].T, None)
        np.testing.assert_allclose(gated[own], want, rtol=1e-5, atol=1e-4)
    assert not out[7:].any() and not gated[7:].any()


def test_calls_of_the_kernel_with_weights_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    x, weight, cu_rows = jnp.ones((9, 256), jnp.bfloat16), jnp.ones((3, 512, 256), jnp.bfloat16), ints([0, 2, 2, 9])
    multiply: Any = tsmla_jax.grouped_block_scaled_matmul
    call = functools.partial(multiply, implementation="cute", gated=True, rows=cu_rows)
    ((_, config),) = kernels(jax.make_jaxpr(lambda *given: call(*given[:2], None, None, given[2]))(x, weight, cu_rows))
    assert config.plain and config.picked and config.gated and config.tokens_first
    for change, text in (
        ((x.astype(jnp.float16), weight, None, None, cu_rows), r"x: got dtype float16; legal: bfloat16"),
        (
            (x, weight, None, jnp.ones((3, 4, 2)), cu_rows),
            r"weight_scales: got an array with a weight of bfloat16; legal",
        ),
        (
            (x, weight, jnp.ones((9, 2)), None, cu_rows),
            r"x_scales: got an array with a weight of bfloat16; legal: None",
        ),
        (
            (x, weight[:2], None, None, cu_rows),
            r"weight: got shape \[2, 512, 256\]; axis 0 must be at least 3 \(E, cu_",
        ),
        ((x, weight[0], None, None, cu_rows), r"weight: got shape \[512, 256\] of rank 2; legal: \[E, N, K\]"),
        ((x, weight, None, None, cu_rows[:1]), r"cu_rows: got shape \[1\]; axis 0 must be at least 2 \(E \+ 1\)"),
        (
            (x, weight.astype(jnp.float8_e4m3fn), None, None, cu_rows),
            r"weight_scales: got None with a weight of float8_e4m3fn; legal: an array, or None with a weight of bf",
        ),
        (
            (x, weight.astype(jnp.float32), None, None, cu_rows),
            r"weight: got dtype float32; legal: float8_e4m3fn, uint8, bfloat16, float16$",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            multiply(*change)
    with pytest.raises(ValueError, match=r"weight: got dtype bfloat16; legal: float8_e4m3fn, uint8"):
        tsmla_jax.block_scaled_matmul(x, weight[0], None, jnp.ones((4, 2)))


def gated_of(product: np.ndarray, limit: float | None) -> np.ndarray:
    """silu(gate) * up of a product in float64."""
    gate, up = np.split(product, 2, axis=-1)
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize("name", ["reference", "xla"])
@pytest.mark.parametrize("limit", [None, 0.75])
def test_gated_products_and_picked_rows(name: str, limit: float | None) -> None:
    """Dense and grouped; rows of a group in any order, one of them twice; indices behind the last group are not read,
    and nor are rows of x that none picks."""
    given = jax.device_get(operands(columns=256))
    given["weight_scales"] = given["weight_scales"] / 40
    form: Any = {"gated": True, "limit": limit, "implementation": name}
    out = multiply(**given, **FLOAT32, **form)
    np.testing.assert_allclose(out, gated_of(exact(**given), limit), rtol=1e-4, atol=1e-5)
    values, scales = multiply(**given, out_dtype="float8_e4m3fn", **form)
    want, factors = jax.jit(functools.partial(tsmla_jax.quantize_blocks, implementation="reference"))(out)
    np.testing.assert_allclose(scales, factors, rtol=1e-4)
    assert (values == np.asarray(want)).mean() > 0.99

    stack, rows = jax.device_get(grouped([0, 0, 5, 9], columns=256)), [3, 7, 7, 0, 11, 2, 3, 8, 4, -5, 1 << 30]
    stack["weight_scales"] = stack["weight_scales"] / 40
    stack["x"] = np.array(stack["x"])
    stack["x"][1] = np.nan
    out = multiply_groups(**stack, rows=ints(rows), **FLOAT32, **form)
    plain = multiply_groups(**stack, rows=ints(rows), **FLOAT32, implementation=name)
    assert out.shape == (11, 128) and plain.shape == (11, 256) and not np.any(out[9:]) and not np.any(plain[9:])
    for group, own in ((1, slice(0, 5)), (2, slice(5, 9))):
        picked = np.array(rows[own])
        parts = (stack["x"][picked], stack["weight"][group], stack["x_scales"][picked], stack["weight_scales"][group])
        np.testing.assert_allclose(plain[own], exact(*parts), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(out[own], gated_of(exact(*parts), limit), rtol=1e-4, atol=1e-5)
    values, scales = multiply_groups(**stack, rows=ints(rows), out_dtype="float8_e4m3fn", **form)
    assert values.shape == (11, 128) and scales.shape == (11, 1)
    restored = np.float32(values) * scales
    np.testing.assert_allclose(restored, out, atol=np.abs(out).max() * 2**-4)


def test_gated_calls_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """One custom call, whose configuration says the form; results of e4m3 are two arrays."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    dense, stack, rows = operands(), grouped([0, 2, 2, 9]), ints([0, 5, 5, 3, 1, 9, 11, 2, 2, 0])
    for out_dtype, results in (("bfloat16", 1), ("float8_e4m3fn", 2)):
        form = {"implementation": "cute", "gated": True, "limit": 7.0, "out_dtype": out_dtype}
        run = functools.partial(tsmla_jax.block_scaled_matmul, **form)
        run_grouped = functools.partial(tsmla_jax.grouped_block_scaled_matmul, **form)
        assert lower(run, **dense).count(f"@{device.TARGET}(") == 1
        assert lower(run_grouped, **stack, rows=rows).count(f"@{device.TARGET}(") == 1
        program = jax.make_jaxpr(lambda given, run=run_grouped: run(**given))(stack | {"rows": rows})
        ((_, config),) = kernels(program)
        assert config.gated and config.picked and config.limit == 7.0 and config.out_dtype == out_dtype
        assert [out.shape for out in program.out_avals] == [(10, COLUMNS // 2), (10, 2)][:results]
        nothing = jax.tree.leaves(run(**dense | {"x": dense["x"][:0], "x_scales": dense["x_scales"][:0]}))
        assert [out.shape for out in nothing] == [(0, COLUMNS // 2), (0, 2)][:results]


@pytest.mark.parametrize("power_of_two", [False, True])
def test_quantised_blocks(power_of_two: bool) -> None:
    x = np.random.default_rng(0).standard_normal((4, 3, 300), np.float32)
    x *= np.float32(10.0) ** np.arange(-9, 3, 3, np.float32)[:, None, None]
    x[1, 1] = 0
    x[2, 0, 5], x[2, 1, 200] = np.nan, np.inf
    values, scales = tsmla_jax.quantize_blocks(x, power_of_two=power_of_two)
    assert values.shape == x.shape and scales.shape == (4, 3, 3)
    restored = np.float32(values) * np.repeat(scales, 128, -1)[..., :300]
    sound = np.repeat(np.isfinite(scales), 128, -1)[..., :300]
    assert (~sound).sum() == 256 and np.isnan(restored[~sound]).all()
    amax = np.repeat(np.abs(np.pad(x, [(0, 0)] * 2 + [(0, 84)])).reshape(4, 3, 3, 128).max(-1), 128, -1)[..., :300]
    assert (np.abs(restored - x)[sound] <= (amax * 2.0**-4)[sound]).all()
    if power_of_two:
        assert (np.frexp(np.asarray(scales)[np.isfinite(scales)])[0] == 0.5).all()
    else:
        np.testing.assert_allclose(np.float32(values)[sound].max(), 448)


def test_one_custom_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    run = functools.partial(tsmla_jax.block_scaled_matmul, implementation="cute")
    given = operands()
    assert lower(run, **given).count(f"@{device.TARGET}(") == 1
    stack = grouped([0, 2, 2, 9])
    run_grouped = functools.partial(tsmla_jax.grouped_block_scaled_matmul, implementation="cute")
    assert lower(run_grouped, **stack).count(f"@{device.TARGET}(") == 1
    for function, arrays in ((run, given), (run_grouped, stack)):
        wide = arrays | {"x": arrays["x"].astype(jnp.bfloat16), "x_scales": None}
        assert lower(function, **wide).count(f"@{device.TARGET}(") == 1
        empty = arrays | {"x": arrays["x"][:0], "x_scales": arrays["x_scales"][:0]}
        assert device.TARGET not in lower(function, **empty)


def test_quantising_is_one_custom_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    run = functools.partial(tsmla_jax.quantize_blocks, implementation="cute")
    x = jnp.ones((2, 3, 264), jnp.bfloat16)
    assert lower(run, x).count(f"@{device.TARGET}(") == 1
    assert device.TARGET not in lower(run, x[:0])
    with pytest.raises(NotImplementedError, match="K is 12; the kernel of quantize_blocks takes a multiple of 8"):
        run(jnp.ones((2, 12)))


def test_the_rows_decide_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    run = functools.partial(tsmla_jax.block_scaled_matmul, implementation="cute")
    for rows, tokens in ((1, 8), (16, 16), (60, 64), (900, 128)):
        ((_, config),) = kernels(jax.make_jaxpr(lambda given: run(**given))(operands(rows=rows)))
        assert config.tokens == tokens


def test_the_definition_has_a_derivative() -> None:
    given = operands(rows=2, columns=8, terms=16)
    rest = {key: x for key, x in given.items() if key != "x_scales"}

    def total(scales: jax.Array) -> jax.Array:
        return tsmla_jax.block_scaled_matmul(**rest, x_scales=scales, **FLOAT32, implementation="reference").sum()

    slope = jax.grad(total)(given["x_scales"])
    np.testing.assert_allclose(slope[:, 0], exact(**given).sum(1) / given["x_scales"][:, 0], rtol=1e-4)


def test_no_row_is_quantised_to_no_row() -> None:
    for power_of_two in (False, True):
        values, scales = tsmla_jax.quantize_blocks(jnp.zeros((0, 200), jnp.bfloat16), power_of_two=power_of_two)
        assert values.shape == (0, 200) and values.dtype == jnp.float8_e4m3fn and scales.shape == (0, 2)


def test_errors_name_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, stack = operands(), grouped([0, 2, 2, 9])
    for change, text in (
        ({"x": dense["x"].astype(jnp.bfloat16)}, r"x_scales: got an array with x of bfloat16; legal: None"),
        ({"x_scales": None}, r"x_scales: got None; legal: float32 \[T, K/128\] with x of float8_e4m3fn"),
        ({"x": ints([[1]])}, r"x: got dtype int32; legal: float8_e4m3fn, float16"),
        ({"weight": dense["weight"][:, :128]}, r"weight: got shape \[512, 128\]; axis 1 must be 336 \(K, x's terms\)"),
        ({"x_scales": dense["x_scales"][:, :2]}, r"x_scales: got shape \[12, 2\]; axis 1 must be 3 \(K / 128 rounded"),
        ({"weight_scales": dense["weight_scales"][:3]}, r"weight_scales: got shape \[3, 3\]; axis 0 must be 4"),
        ({"weight": stack["weight"]}, r"weight: got shape \[3, 512, 336\] of rank 3; legal: \[N, K\]"),
        ({"out_dtype": "float8_e4m3fn"}, r"out_dtype: got 'float8_e4m3fn'; legal: 'float16'.* and with gated 'float8"),
        ({"limit": 2.0}, r"limit: got 2.0 without gated; legal: None, or with gated a number above 0"),
        ({"gated": True, "limit": -1.0}, r"limit: got -1.0; legal: None, or with gated a number above 0"),
    ):
        with pytest.raises(ValueError, match=text):
            tsmla_jax.block_scaled_matmul(**dense | change)
    with pytest.raises(ValueError, match=r"cu_rows: got shape \[2\]; axis 0 must be 4 \(E \+ 1"):
        tsmla_jax.grouped_block_scaled_matmul(**stack | {"cu_rows": ints([0, 4])})
    for change, text in (
        ({"weight": stack["weight"][:2]}, r"weight: got shape \[2, 512, 336\]; axis 0 must be at least 3 \(E"),
        ({"rows": ints([[1]])}, r"rows: got shape \[1, 1\] of rank 2; legal: \[R\]"),
        ({"rows": ints([1]).astype(np.float32)}, r"rows: got dtype float32; legal: int32"),
    ):
        with pytest.raises(ValueError, match=text):
            tsmla_jax.grouped_block_scaled_matmul(**stack | change)
    odd = {"weight": dense["weight"][:5], "weight_scales": dense["weight_scales"][:1]}
    with pytest.raises(ValueError, match=r"weight: got shape \[5, 336\]; N must be even, and static, with gated"):
        tsmla_jax.block_scaled_matmul(**dense | odd, gated=True)
    with pytest.raises(ValueError, match=r"limit: got 10+; legal: None, or with gated a number above 0"):
        tsmla_jax.block_scaled_matmul(**dense, gated=True, limit=10**400)
    with pytest.raises(TypeError, match=r"limit: got str; legal: None, or with gated a static number above 0"):
        tsmla_jax.block_scaled_matmul(**dense, gated=True, limit="1")
    with pytest.raises(ValueError, match=r"x: got dtype int32; legal: float16"):
        tsmla_jax.quantize_blocks(ints([[1]]))
    monkeypatch.setenv("TSMLA_CHECK", "1")
    with pytest.raises(ValueError, match=r"cu_rows: got \[0, 4, 2, 9\]; legal: from 0, never decreasing, .* 12"):
        tsmla_jax.grouped_block_scaled_matmul(**stack | {"cu_rows": ints([0, 4, 2, 9])})
    with pytest.raises(ValueError, match=r"cu_rows: got \[0, 4, 2147483647, -2147483648\]; legal: from 0, never decr"):
        tsmla_jax.grouped_block_scaled_matmul(**stack | {"cu_rows": ints([0, 4, 2**31 - 1, -(2**31)])})
    with pytest.raises(ValueError, match=r"rows: got 12 at 1; legal: 0 to 11, x's rows"):
        tsmla_jax.grouped_block_scaled_matmul(**stack, rows=ints([3, 12, 1, 0, 0, 0, 0, 0, 0, -1]))
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    with pytest.raises(NotImplementedError, match=r"K is 20; the sm_90 kernel .* takes a multiple of 16"):
        tsmla_jax.block_scaled_matmul(**operands(terms=20), implementation="cute")
