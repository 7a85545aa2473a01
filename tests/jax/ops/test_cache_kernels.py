"""The cache kernels without a GPU: what they compile to, what is lowered around them, and what jax's transformations
make of them, where an emulation takes their place and the reference is the oracle."""

import functools
import inspect
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tests.emulator import decode as cute_emulation
from tests.jax.ops.programs import calls, collectives, lower
from tsmla_jax.ops import device, kernel_call, transforms
from tsmla_jax.ops.gather_kv_cache import cute as gather_cute
from tsmla_jax.ops.gather_kv_cache import reference as gather_reference
from tsmla_jax.ops.gather_kv_cache.api import OPERATION as GATHER
from tsmla_jax.ops.rope_write_kv_cache import cute as rope_cute
from tsmla_jax.ops.rope_write_kv_cache import reference as rope_reference
from tsmla_jax.ops.rope_write_kv_cache.api import OPERATION as ROPE_WRITE
from tsmla_jax.ops.write_kv_cache import cute as write_cute
from tsmla_jax.ops.write_kv_cache import reference as write_reference
from tsmla_jax.ops.write_kv_cache.api import OPERATION as WRITE
from tsmla_kernels import compile, object_cache
from tsmla_kernels.cache_ops import config as cache_config
from tsmla_kernels.cache_ops.config import ARCHS, GatherConfig, RopeWriteConfig, WriteConfig, tiling
from tsmla_kernels.catalog import GATHER_KV_CACHE, ROPE_WRITE_KV_CACHE, WRITE_KV_CACHE
from tsmla_kernels.cli import objects as kernel_commands
from tsmla_kernels.kernel import Kernel
from tsmla_kernels.resources import resource_report

pytestmark = pytest.mark.usefixtures("for_hopper", "quick_compilation")

ARCH = "sm_90a"
BF16, F16, F32, FP8 = "bfloat16", "float16", "float32", "float8_e4m3fn"
PAGES, PAGE, LATENT, ROPE, TOKENS, HEADS, REQUESTS, TOTAL = 8, 16, 32, 16, 6, 4, 4, 40
Struct = jax.ShapeDtypeStruct
Arrays = tuple[jax.Array, ...]


# ---- objects

CONFIGS = [
    (WRITE_KV_CACHE, WriteConfig(BF16, BF16)),
    (WRITE_KV_CACHE, WriteConfig(BF16, FP8)),
    (WRITE_KV_CACHE, WriteConfig(F32, F16, 256, 0)),
    (WRITE_KV_CACHE, WriteConfig(BF16, FP8, slot_dtype="int64")),
    (ROPE_WRITE_KV_CACHE, RopeWriteConfig(BF16, BF16, BF16)),
    (ROPE_WRITE_KV_CACHE, RopeWriteConfig(BF16, FP8, FP8)),
    (ROPE_WRITE_KV_CACHE, RopeWriteConfig(F16, F16, FP8, rope_interleave=False, rope_layout="halves")),
    (GATHER_KV_CACHE, GatherConfig(BF16, BF16)),
    (GATHER_KV_CACHE, GatherConfig(FP8, BF16)),
    (GATHER_KV_CACHE, GatherConfig(FP8, F32, 512)),
]


@pytest.mark.slow  # tests/kernels/test_cache_kernels.py has objects for sm_90a in every run
@pytest.mark.parametrize("arch", ARCHS)
def test_everything_stays_in_registers(arch: str) -> None:
    for kernel, config in CONFIGS:
        compiled = object_cache.load_or_compile(kernel, config, arch)
        (found,) = resource_report(compiled).kernels  # one launch
        assert found.stack_bytes == 0, f"{config}: {found.stack_bytes} bytes of local memory a thread"
        # Five CTAs of 288 threads on a multiprocessor, of 65536 registers and 2048 threads.
        assert found.registers <= 40 or arch != ARCH, (config, found.registers)
        assert len(compiled.module) < 64 << 10  # it travels in every program that calls it


def test_operands_are_those_of_the_launchers() -> None:
    for kernel, config in CONFIGS:
        operands = kernel.operands(config)
        launcher = compile.resolve(kernel.launcher)
        names = list(inspect.signature(launcher.__call__).parameters)[2:]
        if names[-1] == "operands":
            names[-1:] = launcher.arrays._fields
        assert names == [operand.name for operand in operands]
        inputs = [operand.name for operand in operands if not operand.output]
        assert [operand.name for operand in operands] == inputs + [o.name for o in operands if o.output]
        assert all(operand.alias in inputs for operand in operands if operand.alias)
        assert type(config)(**json.loads(kernel.config_json(config))) == config


@pytest.mark.parametrize(
    ("options", "dtypes"),
    [
        ("deepseek-v3", (BF16, BF16, BF16)),
        ("deepseek-v3,dtype=float8_e4m3fn,tensor_parallel=8,max_q_len=2", (BF16, FP8, FP8)),
        ("dtype=float16,kv_dtype=float8_e4m3fn,num_heads=16", (F16, F16, FP8)),
    ],
)
def test_options_name_the_configs_that_calls_get(options: str, dtypes: tuple[str, str, str]) -> None:
    in_dtype, q_dtype, kv_dtype = dtypes
    kernels = (WRITE_KV_CACHE, ROPE_WRITE_KV_CACHE, GATHER_KV_CACHE)
    found = [config for _, config in kernel_commands.configs(options, kernels)]
    given = {op: [Struct(s.shape, in_dtype if s.dtype == BF16 else s.dtype) for s in structs(op)] for op in OPS}
    for arrays in given.values():
        arrays[0] = Struct(arrays[0].shape, kv_dtype)
    assert found == [
        cache_config.write_config(WRITE.spec_of(*given[OPS[0]])),
        cache_config.rope_write_config(ROPE_WRITE.spec_of(*given[OPS[1]], q_dtype=q_dtype)),
        cache_config.gather_config(GATHER.spec_of(*given[OPS[2]], total_len=1, out_dtype=in_dtype)),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("pages=1", "got option 'pages'; legal: batch_invariant"),
        ("dtype=float64", "no kernel for it: latent.dtype is float64"),
        ("rope_dim=3", "no kernel for it: rope_dim (R) is 3; with a bfloat16 cache the cache kernels take multi"),
        ("rope_layout=pairs", "got rope_layout=pairs; legal: interleaved or halves"),
    ],
)
def test_options_are_checked(options: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^--config: {re.escape(message)}"):
        kernel_commands.configs(options, [WRITE_KV_CACHE])


def test_a_row_is_shared_by_whole_threads() -> None:
    for columns, dtype in itertools.product((16, 48, 320, 512, 576, 2048, 4096), (BF16, FP8, F32)):
        shared = tiling(columns, dtype)
        assert shared.vector * shared.chunks == columns
        assert shared.threads <= 288 or shared.rows == 1
    assert tiling(576, FP8).threads == tiling(576, BF16).threads == 288  # nine whole warps at DeepSeek's width
    assert tiling(576, FP8, BF16) == tiling(576, BF16)


# ---- lowering


def structs(op: str, tokens: Any = 7, pages: Any = 32, kv_dtype: Any = FP8) -> tuple[Struct, ...]:
    kv = Struct((pages, 64, 576), kv_dtype)
    latent, k_rope = Struct((tokens, 512), BF16), Struct((tokens, 64), BF16)
    slots, angles = Struct((tokens,), "int32"), Struct((tokens, 32), F32)
    heads = Struct((tokens, 16, 512), BF16), Struct((tokens, 16, 64), BF16)
    return {
        "write_kv_cache": (kv, latent, k_rope, slots),
        "rope_write_kv_cache": (kv, *heads, latent, k_rope, slots, angles, angles),
        "gather_kv_cache": (kv, Struct((tokens, 9), "int32"), slots, slots),
    }[op]


def call(op: str, **options: Any) -> Callable[..., Any]:
    fixed: dict[str, Any] = {"total_len": 100} if op == "gather_kv_cache" else {}
    return functools.partial(getattr(tsmla_jax, op), implementation="cute", **fixed, **options)


OPS = ("write_kv_cache", "rope_write_kv_cache", "gather_kv_cache")


@pytest.mark.parametrize("op", OPS)
def test_the_call_is_all_that_runs_on_the_device(op: str) -> None:
    text = lower(lambda scale, *args: call(op)(*args, kv_scale=scale), Struct((), F32), *structs(op))
    assert set(re.findall(r"stablehlo\.(\w+)", text)) <= {
        "custom_call", "reshape", "constant", "output_operand_alias"
    }  # fmt: skip
    assert text.count(f"@{device.TARGET}(") == 1


@pytest.mark.parametrize("op", OPS[:2])
def test_the_cache_is_written_in_place(op: str) -> None:
    text = lower(call(op), *structs(op), donate=(0,))
    result = "[]" if op == "write_kv_cache" else "[1]"
    assert f"output_tuple_indices = {result}, operand_index = 0" in text
    assert re.search(r"%arg0: tensor<32x64x576xf8E4M3FN> {[^}]*(tf.aliasing_output|jax.buffer_donor)", text)


def test_a_numbers_scale_is_a_constant_operand() -> None:
    text = lower(call("write_kv_cache", kv_scale=0.25), *structs("write_kv_cache"))
    assert "stablehlo.constant dense<2.5" in text and "xf32>" in text
    assert "stablehlo.constant dense<1.0" in lower(call("write_kv_cache"), *structs("write_kv_cache"))


@pytest.mark.parametrize("op", OPS)
def test_new_sizes_and_scales_compile_nothing(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_call._module.cache_clear()
    lower(call(op), *structs(op))
    monkeypatch.setattr(object_cache, "compile_kernel", None)
    lower(call(op, kv_scale=3.0), *structs(op, 9, 70_000))
    kernel_call._module.cache_clear()
    object_cache._loaded.clear()
    lower(call(op), *structs(op, 1, 1))


def test_export_once_for_all_sizes() -> None:
    t, p = export.symbolic_shape("t, p")
    for op in OPS:
        make = export.export(jax.jit(call(op)), platforms=["cuda"], disabled_checks=tsmla_jax.export_disabled_checks())
        again = export.deserialize(make(*structs(op, t, p)).serialize())
        assert device.TARGET in lower(again.call, *structs(op, 5, 99))
    rows = Struct(export.symbolic_shape("n"), "int32")

    def gather(rows: jax.Array, *args: jax.Array) -> jax.Array:
        return tsmla_jax.gather_kv_cache(*args, total_len=rows.shape[0], implementation="cute")

    make = export.export(jax.jit(gather), platforms=["cuda"], disabled_checks=tsmla_jax.export_disabled_checks())
    again = export.deserialize(make(rows, *structs("gather_kv_cache")).serialize())
    assert "tensor<33x576xbf16>" in lower(again.call, Struct((33,), "int32"), *structs("gather_kv_cache"))


def test_nobody_chooses_a_kernel_for_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    explained = tsmla_jax.explain("write_kv_cache", *structs("write_kv_cache"))
    assert explained.chosen == "xla" and explained.reasons["cute"] == ("jax's default device is a cpu",)
    assert tsmla_jax.explain("write_kv_cache", *structs("write_kv_cache"), implementation="cute").chosen == "cute"
    # On Blackwell they can be named; None does not choose them before they have run there.
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    monkeypatch.setattr(device, "why_not_by_default", lambda: [])
    assert device.TARGET in lower(call("write_kv_cache"), *structs("write_kv_cache"))
    write = WRITE.spec_of(*structs("write_kv_cache"))
    for operation, spec in ((WRITE, write), (GATHER, GATHER.spec_of(*structs("gather_kv_cache"), total_len=1))):
        assert operation.why_not("cute", spec, named=False) == [
            'the kernel is untested on sm_100a; pass implementation="cute" to use it anyway'
        ]
    monkeypatch.setenv("CUTE_DSL_ARCH", ARCH)
    assert WRITE.why_not("cute", write, named=False) == []


@pytest.mark.parametrize(
    ("op", "changes", "reason"),
    [
        ("write_kv_cache", {0: Struct((4, 16, 576), F32)}, "kv_cache.dtype is float32; the cache kernels take bf"),
        ("write_kv_cache", {0: Struct((4, 16, 584), FP8), 2: Struct((7, 72), BF16)}, "rope_dim (R) is 72"),
        ("rope_write_kv_cache", {"q_dtype": F32}, "q_dtype is float32; the cache kernels take bfloat16, float16, fl"),
        ("gather_kv_cache", {0: Struct((4, 16, 577), BF16)}, "latent_dim + rope_dim (D) is 577; with bfloat16"),
        ("gather_kv_cache", {0: Struct((4, 16, 16384), BF16)}, "latent_dim + rope_dim (D) is 16384; with bfloat16"),
    ],
)  # fmt: skip
def test_reasons_are_said(op: str, changes: dict[Any, Any], reason: str) -> None:
    arrays = [changes.get(i, array) for i, array in enumerate(structs(op))]
    options = {name: value for name, value in changes.items() if isinstance(name, str)}
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        lower(call(op, **options), *arrays)


# ---- transformations, on CPUs


def emulate(
    *arrays: jax.Array, kernel: Kernel, config: Any, arch: str, result_shapes: tuple[tuple[int, ...], ...]
) -> list[jax.Array]:
    """What the kernels compute from their own operands, through the references."""
    if kernel is WRITE_KV_CACHE:
        *given, scale = arrays
        if not config.rope_dim:
            given[2] = given[1][:, :0]
        spec = WRITE.spec_of(*given)
        return [write_reference.write_kv_cache(*given, spec=spec, kv_scale=scale[0])]
    if kernel is GATHER_KV_CACHE:
        *given, scale = arrays
        spec = GATHER.spec_of(*given, total_len=result_shapes[0][0], out_dtype=config.out_dtype)
        return [gather_reference.gather_kv_cache(*given, spec=spec, kv_scale=scale[0])]
    kv, q_nope, q_rope, latent, *given, q_scale, kv_scale = arrays
    tokens = latent.shape[0]
    heads = (array.reshape(tokens, -1, array.shape[-1]) for array in (q_nope, q_rope))
    given = [kv, *heads, latent, *given]
    layouts = {"rope_interleave": config.rope_interleave, "rope_layout": config.rope_layout}
    spec = ROPE_WRITE.spec_of(*given, q_dtype=config.q_dtype, **layouts)
    q, written = rope_reference.rope_write_kv_cache(*given, spec=spec, q_scale=q_scale[0], kv_scale=kv_scale[0])
    return [q.reshape(result_shapes[0]), written]


@pytest.fixture
def emulated() -> Iterator[None]:
    if jax.default_backend() != "cpu":
        pytest.skip("emulates the kernels on CPUs")
    traced = [cute._transformable for cute in (write_cute, rope_cute, gather_cute)]
    with cute_emulation.emulated(*traced, by=emulate):
        yield


pytest_emulated = pytest.mark.usefixtures("emulated")


def arrays(op: str, seed: int = 0, dtype: Any = jnp.float32) -> Arrays:
    rng = np.random.default_rng(seed)

    def drawn(*shape: int, dtype: Any = dtype) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    kv = drawn(PAGES, PAGE, LATENT + ROPE, dtype=jnp.bfloat16)
    latent, k_rope = drawn(TOKENS, LATENT), drawn(TOKENS, ROPE)
    slots = jnp.asarray([PAGES * PAGE - 1, -1, 3, PAGES * PAGE, -(2**31), 40 + seed], jnp.int32)
    angles = drawn(TOKENS, ROPE // 2, dtype=jnp.float32), drawn(TOKENS, ROPE // 2, dtype=jnp.float32)
    tables = jnp.asarray(rng.integers(0, PAGES, (REQUESTS, 3)), jnp.int32).at[1, 2].set(2**31 - 1)
    starts, lens = jnp.asarray([5, 0, 47, 16], jnp.int32), jnp.asarray([20, 9 + seed, 1, 0], jnp.int32)
    heads = drawn(TOKENS, HEADS, LATENT), drawn(TOKENS, HEADS, ROPE)
    return {
        "write_kv_cache": (kv, latent, k_rope, slots),
        "rope_write_kv_cache": (kv, *heads, latent, k_rope, slots, *angles),
        "gather_kv_cache": (kv, tables, starts, lens),
    }[op]


def run(op: str, name: str, **options: Any) -> Callable[..., Any]:
    own = {"gather_kv_cache": {"total_len": TOTAL}, "rope_write_kv_cache": {"q_dtype": BF16}}.get(op, {})
    return functools.partial(getattr(tsmla_jax, op), implementation=name, **{"kv_scale": 0.7, **own, **options})


@functools.cache
def wanted(op: str) -> Any:
    """The reference's results on arrays(op)."""
    return jax.jit(run(op, "reference"))(*arrays(op))


def assert_same(got: Any, want: Any) -> None:
    # XLA may contract the rotation's products and sums in one program and not in the other, and then round to bf16.
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2.0**-7, atol=1e-5)


@pytest_emulated
@pytest.mark.parametrize("op", OPS)
def test_jitted(op: str) -> None:
    assert_same(jax.jit(run(op, "cute"))(*arrays(op)), wanted(op))


@pytest_emulated
def test_eager() -> None:
    assert_same(run("write_kv_cache", "cute")(*arrays("write_kv_cache")), wanted("write_kv_cache"))


@pytest_emulated
def test_a_cache_without_rope_columns() -> None:
    kv, latent, _, slots = arrays("write_kv_cache")
    got, want = (
        jax.jit(lambda *args, name=name: run("write_kv_cache", name)(*args[:2], None, args[2]))(
            kv[..., :LATENT], latent, slots
        )
        for name in ("cute", "reference")
    )
    assert_same(got, want)


@pytest_emulated
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("which", ["all", "cache", "others"])
def test_vmap_folds_into_one_call(op: str, which: str) -> None:
    first, second = arrays(op, 0), arrays(op, 3)
    axes = tuple(0 if which == "all" or (which == "cache") == (i == 0) else None for i in range(len(first)))
    args = [a if axis is None else jnp.stack([a, b, a]) for a, b, axis in zip(first, second, axes, strict=True)]
    batched = jax.vmap(run(op, "cute"), axes)
    assert calls(jax.make_jaxpr(batched)(*args)) == 1
    assert_same(jax.jit(batched)(*args), jax.jit(jax.vmap(run(op, "reference"), axes))(*args))


@pytest_emulated
def test_vmap_of_a_gather_that_asks_for_more_than_fits() -> None:
    kv, tables, starts, lens = arrays("gather_kv_cache")
    many = jnp.stack([lens, lens * 3, jnp.zeros_like(lens)])
    results = [
        jax.jit(jax.vmap(run("gather_kv_cache", name), (None, None, None, 0)))(kv, tables, starts, many)
        for name in ("cute", "reference")
    ]
    assert_same(*results)


@pytest_emulated
@pytest.mark.parametrize("op", OPS[1:])
def test_vmap_over_scales_takes_as_many_calls(op: str) -> None:
    scales = jnp.asarray([0.5, 2.0], jnp.float32)

    def over(name: str) -> Any:
        return jax.jit(jax.vmap(lambda scale: run(op, name, kv_scale=scale)(*arrays(op))))(scales)

    assert_same(over("cute"), over("reference"))


@pytest_emulated
def test_vmap_of_more_slots_than_int32_counts_takes_as_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "MAX_SLOTS", 2 * PAGES * PAGE - 1)
    args = [jnp.stack([a, b]) for a, b in zip(arrays(OPS[0]), arrays(OPS[0], 3), strict=True)]
    mapped = jax.vmap(run(OPS[0], "cute"))
    assert "scan" in str(jax.make_jaxpr(mapped)(*args))
    assert_same(jax.jit(mapped)(*args), jax.jit(jax.vmap(run(OPS[0], "reference")))(*args))


@pytest_emulated
@pytest.mark.parametrize(("op", "reverse"), [*((op, True) for op in OPS), ("rope_write_kv_cache", False)])
def test_derivatives_are_those_of_the_reference(op: str, reverse: bool) -> None:
    args = arrays(op)
    inexact = tuple(i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.inexact))

    def loss(name: str, *values: jax.Array) -> jax.Array:
        given = list(args)
        for i, value in zip(inexact, values, strict=True):
            given[i] = value
        results = jax.tree.leaves(run(op, name)(*given))
        return sum((x.astype(jnp.float32) * jnp.arange(1.0, 1 + x.shape[-1])).sum() for x in results)  # type: ignore[return-value]

    def derived(name: str) -> Any:
        # A tangent of every parameter at once, or the gradient of them all.
        values = [args[i] for i in inexact]
        if reverse:
            return jax.jit(jax.grad(functools.partial(loss, name), tuple(range(len(values)))))(*values)
        return jax.jit(lambda *v: jax.jvp(functools.partial(loss, name), v, tuple(map(jnp.ones_like, v))))(*values)

    # The reference's cotangents meet bf16 roundings in another order.
    for a, b in zip(jax.tree.leaves(derived("cute")), jax.tree.leaves(derived("reference")), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2**-7, atol=1e-5)


@pytest_emulated
def test_a_write_whose_result_no_loss_needs_costs_no_derivative() -> None:
    # As in training with a cache: the layer writes it, and attends over its own keys.
    kv, latent, k_rope, slots = arrays("write_kv_cache")

    def loss(latent: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (latent**2).sum(), tsmla_jax.write_kv_cache(kv, latent, k_rope, slots, implementation="cute")

    grad, _ = jax.jit(jax.grad(loss, has_aux=True))(latent)
    np.testing.assert_allclose(grad, 2 * latent, rtol=1e-6)


# ---- partitioning


def placed(mesh: Mesh, given: Arrays, *specs: P) -> list[jax.Array]:
    specs += (P(),) * (len(given) - len(specs))
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(given, specs, strict=True)]


@pytest_emulated
@pytest.mark.parametrize("pages", [P(), P("data"), P(("data", "model")), P("model")], ids=str)
def test_pages_stay_where_they_are(mesh: Mesh, pages: P) -> None:
    args = placed(mesh, arrays("write_kv_cache"), pages)
    compiled = jax.jit(run("write_kv_cache", "cute")).lower(*args).compile()
    assert collectives(compiled) == []
    got = compiled(*args)
    assert got.sharding.is_equivalent_to(args[0].sharding, 3)
    assert_same(got, wanted("write_kv_cache"))


@pytest_emulated
def test_pages_and_heads_stay_where_they_are(mesh: Mesh) -> None:
    args = placed(mesh, arrays("rope_write_kv_cache"), P("data"), P(None, "model"), P(None, "model"))
    compiled = jax.jit(run("rope_write_kv_cache", "cute")).lower(*args).compile()
    assert collectives(compiled) == []
    q, written = compiled(*args)
    assert q.addressable_shards[0].data.shape == (TOKENS, HEADS // 2, LATENT + ROPE)
    assert written.addressable_shards[0].data.shape == (PAGES // 4, PAGE, LATENT + ROPE)
    assert_same((q, written), wanted("rope_write_kv_cache"))


@pytest_emulated
def test_what_cannot_be_split_is_gathered_and_right(mesh: Mesh) -> None:
    for op, specs in (
        ("write_kv_cache", (P(None, None, "model"), P(None, "data"), P(), P())),
        ("rope_write_kv_cache", (P(None, "data"), P(None, None, "data"))),
        ("gather_kv_cache", (P("data"), P("data"), P("data"), P("data"))),
    ):
        args = placed(mesh, arrays(op), *specs)
        assert_same(jax.jit(run(op, "cute"))(*args), wanted(op))


@pytest_emulated
@pytest.mark.parametrize("op", OPS)
def test_explicit_axes(op: str) -> None:
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    specs = {"rope_write_kv_cache": (P("x"), P(None, "y"), P(None, "y")), "write_kv_cache": (P("x"),)}.get(op, ())
    args = placed(mesh, arrays(op), *specs)
    assert_same(jax.jit(run(op, "cute"))(*args), wanted(op))
    with jax.set_mesh(mesh):
        assert_same(jax.jit(run(op, "cute"))(*args), wanted(op))


@pytest_emulated
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_pages_of_each_device(mesh: Mesh, check_vma: bool) -> None:
    kv, latent, k_rope, slots = arrays("write_kv_cache")
    caches, many = jnp.concatenate([kv] * 4), [jnp.concatenate([a] * 4) for a in (latent, k_rope, slots)]
    mapped = jax.shard_map(
        run("write_kv_cache", "cute"), mesh=mesh, in_specs=(P("data"),) * 4, out_specs=P("data"), check_vma=check_vma
    )
    assert_same(jax.jit(mapped)(caches, *many), jnp.concatenate([wanted("write_kv_cache")] * 4))


def test_another_platform_is_refused_with_the_alternative() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    with pytest.raises(NotImplementedError, match="implementation='xla' runs anywhere"):
        run("write_kv_cache", "cute")(*arrays("write_kv_cache"))


def test_a_warm_cache_imports_no_cutlass(child_environment: dict[str, str]) -> None:
    kernel_call._module.cache_clear()
    lower(call("write_kv_cache"), *structs("write_kv_cache"))
    code = f"""
import sys, jax, tsmla_jax
S = jax.ShapeDtypeStruct
args = S((9, 64, 576), "{FP8}"), S((3, 512), "{BF16}"), S((3, 64), "{BF16}"), S((3,), "int32")
write = lambda *a: tsmla_jax.write_kv_cache(*a, implementation="cute")
jax.jit(write).trace(*args).lower(lowering_platforms=("cuda",))
print(sorted({{name.partition(".")[0] for name in sys.modules}} & {{"cutlass", "cuda", "torch", "flax"}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=child_environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stderr
