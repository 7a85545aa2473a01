"""The cache kernels without a GPU: what they compile to, what is lowered around them, and on CPUs an emulation takes
their place and the reference is the oracle."""

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

import tsmla_jax
from tests.emulator import operations
from tests.jax.ops.programs import lower
from tsmla_jax.ops import device, kernel_call, transforms
from tsmla_jax.ops.gather_kv_cache.api import OPERATION as GATHER
from tsmla_jax.ops.rope_write_kv_cache.api import OPERATION as ROPE_WRITE
from tsmla_jax.ops.write_kv_cache.api import OPERATION as WRITE
from tsmla_kernels import compile, object_cache
from tsmla_kernels.cache_ops import config as cache_config
from tsmla_kernels.cache_ops.config import ARCHS, GatherConfig, RopeWriteConfig, WriteConfig, tiling
from tsmla_kernels.catalog import GATHER_KV_CACHE, ROPE_WRITE_KV_CACHE, WRITE_KV_CACHE
from tsmla_kernels.cli import objects as kernel_commands
from tsmla_kernels.resources import resource_report

pytestmark = pytest.mark.usefixtures("for_hopper")

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


# ---- on CPUs


@pytest.fixture
def emulated() -> Iterator[None]:
    if jax.default_backend() != "cpu":
        pytest.skip("emulates the kernels on CPUs")
    with operations.emulated():
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


def assert_same(got: Any, want: Any) -> None:
    # XLA may contract the rotation's products and sums in one program and not in the other, and then round to bf16.
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2.0**-7, atol=1e-5)


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
def test_vmap_of_a_gather_that_asks_for_more_than_fits() -> None:
    kv, tables, starts, lens = arrays("gather_kv_cache")
    many = jnp.stack([lens, lens * 3, jnp.zeros_like(lens)])
    results = [
        jax.jit(jax.vmap(run("gather_kv_cache", name), (None, None, None, 0)))(kv, tables, starts, many)
        for name in ("cute", "reference")
    ]
    assert_same(*results)


@pytest_emulated
def test_vmap_of_more_slots_than_int32_counts_takes_as_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "MAX_SLOTS", 2 * PAGES * PAGE - 1)
    args = [jnp.stack([a, b]) for a, b in zip(arrays(OPS[0]), arrays(OPS[0], 3), strict=True)]
    mapped = jax.vmap(run(OPS[0], "cute"))
    assert "scan" in str(jax.make_jaxpr(mapped)(*args))
    assert_same(jax.jit(mapped)(*args), jax.jit(jax.vmap(run(OPS[0], "reference")))(*args))


@pytest_emulated
def test_a_write_whose_result_no_loss_needs_costs_no_derivative() -> None:
    # As in training with a cache: the layer writes it, and attends over its own keys.
    kv, latent, k_rope, slots = arrays("write_kv_cache")

    def loss(latent: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (latent**2).sum(), tsmla_jax.write_kv_cache(kv, latent, k_rope, slots, implementation="cute")

    grad, _ = jax.jit(jax.grad(loss, has_aux=True))(latent)
    np.testing.assert_allclose(grad, 2 * latent, rtol=1e-6)


# ---- partitioning


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
