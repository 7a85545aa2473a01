"""The operations with kernels under jax's transformations: a grid of the rows of rows.py. An emulation takes the place
of the kernels; "xla" runs in the same grid; the reference is the oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tests.emulator import operations
from tests.jax.ops.programs import calls, collectives, lower, placed
from tests.jax.ops.rows import ROWS, Arrays, Axes, Row, Split, arrays_of, reference, wanted, widened
from tsmla_jax.ops import device, kernel_call
from tsmla_jax.ops.explain import OPERATIONS

pytestmark = [
    pytest.mark.sampled(5),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="emulates the kernels on CPUs"),
    pytest.mark.usefixtures("for_hopper"),
]


@pytest.fixture(autouse=True, scope="module")
def emulated() -> Iterator[None]:
    with operations.emulated():
        yield


def cells(of: Callable[[Row], Sequence[Any]], *implementations: str) -> Any:
    """A test's cells: a row, an implementation ("cute" and "xla" unless some are named), and each of what `of` says of
    the row."""
    names = implementations or ("cute", "xla")
    found = [(op, name, each) for op, row in ROWS.items() for each in of(row) for name in names]
    return pytest.mark.parametrize(("op", "name", "cell"), found, ids=lambda x: str(x).replace(" ", ""))


def assert_close(got: Any, want: Any, tolerance: float = 2.0**-7) -> None:
    """Of the same sizes; infinities and NaN in the same places; numbers as near as two roundings to bfloat16, few bytes
    off by one rounding."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        x, y = np.asarray(a), np.asarray(b)
        if x.dtype.itemsize > 1 and np.issubdtype(x.dtype, np.integer):
            np.testing.assert_array_equal(x, y)
            continue
        if x.dtype.itemsize == 1:
            assert x.dtype == y.dtype and np.mean(x.view(np.uint8) != y.view(np.uint8)) < 0.002
            continue
        x, y = x.astype(np.float64), y.astype(np.float64)
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite])
        off = np.abs(x[finite] - y[finite])
        assert np.linalg.norm(off) <= tolerance * np.linalg.norm(y[finite]) + 1e-5
        assert off.max(initial=0) <= 2 * tolerance * np.abs(y[finite]).max(initial=0) + 1e-5


def test_every_operation_with_a_kernel_has_a_row() -> None:
    rows = {name.partition("-")[0] for name in ROWS}
    assert rows == {name for name, operation in OPERATIONS.items() if "cute" in operation.table}


def joined(results: Sequence[Any], join: Callable[[Sequence[Any]], Any]) -> Any:
    return jax.tree.map(lambda *leaves: join(leaves), *results)


# ---- jit, vmap


@cells(lambda row: [True, False])
def test_jit(op: str, name: str, cell: bool) -> None:
    """`cell`: compiled, or operation by operation."""
    row = ROWS[op]
    run = row.run(name)
    assert calls(jax.make_jaxpr(run)(*arrays_of(op))) == (row.kernels if name == "cute" else 0)
    assert_close((jax.jit(run) if cell else run)(*arrays_of(op)), wanted(op))


def over_axes(op: str, name: str, axes: Axes) -> tuple[Callable[..., Any], Arrays, Any]:
    """The mapped function, three calls' operands, and what the calls return one by one."""
    seeds = (0, 1, 0)
    each = [[arrays_of(op, 0 if axis is None else seed)[i] for i, axis in enumerate(axes)] for seed in seeds]
    operands = zip(zip(*each, strict=True), axes, strict=True)
    given = tuple(rows[0] if axis is None else jnp.stack(rows, axis) for rows, axis in operands)
    return jax.vmap(ROWS[op].run(name), axes), given, joined([reference(op, one) for one in each], np.stack)


@cells(lambda row: row.folded)
def test_vmap_is_one_call(op: str, name: str, cell: Axes) -> None:
    mapped, given, want = over_axes(op, name, cell)
    program = jax.make_jaxpr(mapped)(*given)
    assert name == "xla" or (calls(program) == ROWS[op].kernels and "scan" not in str(program))
    assert_close(jax.jit(mapped)(*given), want)


@cells(lambda row: row.in_turn)
def test_vmap_of_calls_one_after_another(op: str, name: str, cell: Axes) -> None:
    mapped, given, want = over_axes(op, name, cell)
    program = jax.make_jaxpr(mapped)(*given)
    assert name == "xla" or (calls(program) == ROWS[op].kernels and "scan" in str(program))
    assert_close(jax.jit(mapped)(*given), want)


@cells(lambda row: [*row.folded, *row.in_turn][:1], "reference")
def test_vmap_of_the_reference(op: str, name: str, cell: Axes) -> None:
    mapped, given, want = over_axes(op, name, cell)
    assert_close(jax.jit(mapped)(*given), want)


def test_the_reference_eagerly() -> None:
    op = "merge_attention_states"
    assert_close(ROWS[op].run("reference")(*arrays_of(op)), wanted(op))


@cells(lambda row: [row.scale] if row.scale else [])
def test_vmap_over_a_scale(op: str, name: str, cell: str) -> None:
    scales = jnp.asarray([0.05, 0.1, 0.2], jnp.float32)
    given = arrays_of(op)
    got = jax.jit(jax.vmap(lambda scale: ROWS[op].run(name, **{cell: scale})(*given)))(scales)
    assert_close(got, joined([reference(op, given, **{cell: scale}) for scale in scales], np.stack))


def test_vmap_twice() -> None:
    q, *others = arrays_of("mla_decode")
    qs = jnp.stack([jnp.stack([q, q[::-1]]), -jnp.stack([q, q[::-1]])])
    inner = jax.vmap(ROWS["mla_decode"].run("cute"), (0, None, None, None))
    got = jax.vmap(inner, (0, None, None, None))(qs, *others)
    want = [[jax.jit(ROWS["mla_decode"].run("reference"))(q, *others) for q in row] for row in qs]
    assert_close(got, joined([joined(row, np.stack) for row in want], np.stack))


# ---- several devices


@cells(lambda row: list(row.splits))
def test_partitioning_moves_nothing(op: str, name: str, cell: str, mesh: Mesh) -> None:
    split = ROWS[op].splits[cell]
    args = placed(mesh, arrays_of(op), *split.operands)
    compiled = jax.jit(ROWS[op].run(name)).lower(*args).compile()
    got = compiled(*args)
    assert_close(got, wanted(op))
    if name == "cute":
        assert collectives(compiled) == list(split.moves)
        for leaf, spec in zip(jax.tree.leaves(got), split.results, strict=True):
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim), (leaf.sharding, spec)


@pytest.mark.parametrize("name", ["cute", "xla"])
@pytest.mark.parametrize("op", ["mla_decode", "sparse_mla-v32", "sparse_mla-v4"])
def test_heads_and_tokens_that_are_split_along_one_axis(op: str, name: str, mesh: Mesh) -> None:
    """q is split as it comes, and the other arrays are moved."""
    heads, whole = P(*(None,) * (arrays_of(op)[0].ndim - 2), "model"), [P()] * op.count("v4")
    specs = [heads, P(), P("model"), P("model")] if op == "mla_decode" else [heads, P(), *whole, P("model"), P("model")]
    assert_close(jax.jit(ROWS[op].run(name))(*placed(mesh, arrays_of(op), *specs)), wanted(op))


@cells(lambda row: ["gathered"] if row.gathered else [])
def test_axes_that_cannot_be_split_are_gathered_and_right(op: str, name: str, cell: str, mesh: Mesh) -> None:
    assert_close(jax.jit(ROWS[op].run(name))(*placed(mesh, arrays_of(op), *ROWS[op].gathered)), wanted(op))


@cells(lambda row: list(row.splits) or ["whole"])
def test_explicit_axes(op: str, name: str, cell: str) -> None:
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    split = ROWS[op].splits.get(cell, Split((), ()))
    args = placed(explicit, arrays_of(op), *split.operands)
    got = jax.jit(ROWS[op].run(name))(*args)
    assert_close(got, wanted(op))
    with jax.set_mesh(explicit):
        assert_close(jax.jit(ROWS[op].run(name))(*args), wanted(op))


@cells(lambda row: [split for split in row.splits if row.splits[split].mapped])
def test_shard_map(op: str, name: str, cell: str, mesh: Mesh) -> None:
    split, given = ROWS[op].splits[cell], arrays_of(op)
    specs = (*split.operands, *(P(),) * (len(given) - len(split.operands)))
    results = jax.tree.unflatten(jax.tree.structure(wanted(op)), split.results)
    for check_vma in (True, False):
        mapped = jax.jit(jax.shard_map(ROWS[op].run(name), mesh=mesh, in_specs=specs, out_specs=results,
                                       check_vma=check_vma))  # fmt: skip
        compiled = mapped.lower(*given).compile()
        assert collectives(compiled) == []
        assert_close(compiled(*given), wanted(op))


@cells(lambda row: ["own"])
def test_shard_map_of_a_call_for_each_device(op: str, name: str, cell: str) -> None:
    """Pages, requests and tokens are a device's own, and slots, tables and offsets count from its first ones."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    axes = ROWS[op].own or (0,) * len(arrays_of(op))
    each = [[arrays_of(op, 0 if axis is None else seed)[i] for i, axis in enumerate(axes)] for seed in (0, 1)]
    operands = zip(zip(*each, strict=True), axes, strict=True)
    whole = [pair[0] if axis is None else jnp.concatenate(pair, axis) for pair, axis in operands]
    specs = tuple(P() if axis is None else P(*(None,) * axis, "x") for axis in axes)
    run = jax.jit(jax.shard_map(ROWS[op].run(name), mesh=mesh, in_specs=specs, out_specs=P("x")))
    assert_close(run(*whole), joined([reference(op, one) for one in each], np.concatenate))


# ---- export


def described(op: str, shapes: Sequence[str]) -> list[jax.ShapeDtypeStruct]:
    scope = export.SymbolicScope()
    pairs = zip(shapes, arrays_of(op), strict=True)
    return [jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), x.dtype) for shape, x in pairs]


def portable(row: Row) -> Sequence[str]:
    return row.shapes if row.portable is None else row.portable


@cells(lambda row: ["sizes"] if portable(row) else [], "xla", "reference")
def test_export_with_symbolic_sizes_and_eval_shape(op: str, name: str, cell: str) -> None:
    run = ROWS[op].run(name)
    again = export.deserialize(export.export(jax.jit(run))(*described(op, portable(ROWS[op]))).serialize())
    assert_close(again.call(*arrays_of(op)), wanted(op))
    shaped = jax.eval_shape(run, *arrays_of(op))
    assert [x.shape for x in jax.tree.leaves(shaped)] == [x.shape for x in jax.tree.leaves(wanted(op))]


@cells(lambda row: ["sizes"], "cute")
def test_export_for_cuda_with_symbolic_sizes(op: str, name: str, cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_call, "_module", lambda *_: (b"object", b"key"))  # its bytes are not needed
    checks = tsmla_jax.export_disabled_checks()
    make = export.export(jax.jit(ROWS[op].run(name)), platforms=["cuda"], disabled_checks=checks)
    shapes = described(op, ROWS[op].shapes)
    again = export.deserialize(make(*shapes).serialize())
    assert lower(again.call, *arrays_of(op)).count(f"@{device.TARGET}(") == ROWS[op].kernels
    with pytest.raises(ValueError, match=device.TARGET):
        export.export(jax.jit(ROWS[op].run(name)), platforms=["cuda"])(*shapes)


# ---- derivatives


def derived(op: str, name: str, mode: str, wide: bool = False) -> Any:
    """The gradient of the operands that have one, or the tangent along ones."""
    row, given = ROWS[op], [*(widened(op, arrays_of(op)) if wide else arrays_of(op))]
    kinds = (jnp.float32, jnp.bfloat16)
    inputs = row.inputs or tuple(i for i, x in enumerate(given) if x.dtype in kinds)

    def loss(*values: jax.Array) -> jax.Array:
        """Results with weights that differ, and the operands: results without a derivative leave theirs."""
        operands = [*given]
        for i, value in zip(inputs, values, strict=True):
            operands[i] = value
        total = sum(jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32).sum() for x in values)
        for x in jax.tree.leaves(row.run(name)(*operands)):
            x = jnp.where(jnp.isfinite(x.astype(jnp.float32)), x, 0).astype(jnp.float32)
            total += (x * (1 + jnp.arange(x.shape[-1]) / x.shape[-1])).sum()
        return total

    values = [given[i] for i in inputs]
    if mode == "reverse":
        return jax.jit(jax.grad(loss, tuple(range(len(values)))))(*values)
    return jax.jit(lambda *v: jax.jvp(loss, v, tuple(map(jnp.ones_like, v))))(*values)


MODES = {"both": ("reverse", "forward"), "reverse": ("reverse",)}


@cells(lambda row: MODES.get(row.derivative, ()))
def test_derivatives_are_those_of_the_reference(op: str, name: str, cell: str) -> None:
    if (op.startswith("indexer_logits"), name) == (True, "xla"):  # whose own derivative is that of wider values
        with pytest.raises(NotImplementedError, match="indexer_logits of quantised values has no derivative"):
            derived(op, name, cell)
        return
    got, want = derived(op, name, cell), derived(op, "reference", cell, ROWS[op].wide)
    assert_close(jax.tree.map(jnp.float32, got), jax.tree.map(jnp.float32, want))


@cells(lambda row: () if row.derivative in ("", *MODES) else ("reverse", "forward"))
def test_derivatives_are_refused_with_the_alternative(op: str, name: str, cell: str) -> None:
    with pytest.raises(NotImplementedError, match=ROWS[op].derivative):
        derived(op, name, cell)


@cells(lambda row: ["remat"] if row.derivative == "reverse" else [], "cute")
def test_checkpoint(op: str, name: str, cell: str) -> None:
    first, *others = arrays_of(op)
    run = ROWS[op].run(name)

    def loss(call: Callable[..., Any], first: jax.Array) -> jax.Array:
        leaves = jax.tree.leaves(call(first, *others))
        return sum(jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32).sum() for x in leaves) + first.sum()

    got, want = (jax.jit(jax.grad(functools.partial(loss, each)))(first) for each in (jax.checkpoint(run), run))
    assert_close(got, want)


def test_constants_in_a_differentiated_function_are_fine() -> None:
    given = arrays_of("mla_decode")
    for name in ("cute", "xla"):
        out = ROWS["mla_decode"].run(name)(*given)[0].astype(jnp.float32)
        slope = jax.grad(lambda w, name=name: (ROWS["mla_decode"].run(name)(*given)[0].astype(jnp.float32) * w).sum())
        np.testing.assert_allclose(slope(jnp.float32(1)), out.sum(), rtol=1e-5)
