"""mla_decode lowered for CUDA on a machine that needs no GPU: what is embedded, and what it costs.

A stand-in takes the kernel's place: same operands, compiled in a fraction of a second.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tests.emulator.standin import DECODE
from tests.jax.ops.programs import lower
from tsmla_jax.ops import device, kernel_call
from tsmla_jax.ops.mla_decode import cute
from tsmla_jax.ops.mla_decode.api import OPERATION
from tsmla_kernels import object_cache

ARCH = "sm_90a"
Struct = jax.ShapeDtypeStruct
attend: Callable[..., Any] = partial(tsmla_jax.mla_decode, softmax_scale=0.135, implementation="cute")


@pytest.fixture(autouse=True)
def standin(cache_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute, "MLA_DECODE", DECODE)
    monkeypatch.setenv("CUTE_DSL_ARCH", ARCH)
    cute._transformable.cache_clear()
    kernel_call._module.cache_clear()


def specs(
    batch: Any = 4, pages: Any = 32, max_pages: Any = 8, *, heads: int = 16, q_len: int = 1
) -> tuple[Struct, ...]:
    return (
        Struct((batch, q_len, heads, 576), jnp.bfloat16),
        Struct((pages, 64, 576), jnp.bfloat16),
        Struct((batch, max_pages), jnp.int32),
        Struct((batch,), jnp.int32),
    )


def operands_of_call(text: str) -> str:
    """The types of the custom call, without the megabytes of the object."""
    (line,) = (line for line in text.splitlines() if device.TARGET in line)
    return line[line.rindex("} : (") + 4 :]


def test_lowering_embeds_the_object_and_the_runtimes_own_call() -> None:
    text = lower(attend, *specs())
    module = object_cache.load_or_compile(DECODE, cute.sm90_decode.decode_config(cute_spec()), ARCH).module
    assert text.count(f"@{device.TARGET}(") == 1
    assert 'key = "' in text and 'module = "\\7FELF' in text
    assert len(module) < len(text) < 8 * len(module)
    types = operands_of_call(text)
    assert types.startswith("(tensor<64x576xbf16>, tensor<32x64x576xbf16>, tensor<4x8xi32>, tensor<4xi32>")
    assert "(tensor<64x512xbf16>, tensor<64xf32>, " in types  # then the workspaces, which nothing reads
    assert "tensor<264x4xi32>)" in types  # no device to ask: the architecture's number of multiprocessors


def cute_spec(heads: int = 16) -> Any:
    return OPERATION.spec_of(*specs(heads=heads), softmax_scale=1.0)


def test_target_is_the_one_cutlass_would_call() -> None:
    ffi = pytest.importorskip("cutlass.jax.ffi")
    assert ffi.get_cutlass_call_ffi_version() == 2
    assert ffi.get_cutlass_call_ffi_name(True, 2) == device.TARGET
    by_triton = jax.export.DisabledSafetyCheck.custom_call(device.TRITON_TARGET)
    assert {*tsmla_jax.export_disabled_checks()} - {by_triton} <= {*ffi.get_export_disabled_safety_checks()}


def test_new_sizes_lower_without_compiling(builds: Path) -> None:
    lower(attend, *specs())
    assert len(builds.read_text().splitlines()) == 1
    for batch, pages, max_pages in ((5, 32, 8), (4, 70_000, 8), (128, 32, 100)):
        text = lower(attend, *specs(batch, pages, max_pages))
        assert f"tensor<{pages}x64x576xbf16>, tensor<{batch}x{max_pages}xi32>" in operands_of_call(text)
    lower(attend, *specs(heads=32))
    assert len(builds.read_text().splitlines()) == 2  # another number of heads is another kernel


def test_scales_are_operands_and_not_part_of_the_kernel(builds: Path) -> None:
    texts = [lower(partial(attend, softmax_scale=scale), *specs()) for scale in (0.1, 0.2)]
    assert texts[0] != texts[1] and len(builds.read_text().splitlines()) == 1
    # A Python number costs no computation on the device: it is a constant operand.
    assert re.search(r"stablehlo.constant dense<\[1.0+e-01, 1.0+e\+00\]> : tensor<2xf32>", texts[0])
    assert "stablehlo.multiply" not in texts[0]
    traced = lower(lambda *args: attend(*args[:4], softmax_scale=args[4]), *specs(), Struct((), jnp.float32))
    assert "stablehlo.multiply" in traced and len(builds.read_text().splitlines()) == 1


def test_the_call_is_all_that_runs_on_the_device() -> None:
    # A launch of anything else would cost as much as a small batch's attention.
    text = lower(partial(attend, return_lse=True, q_scale=0.5, kv_scale=2.0), *specs(q_len=2))
    ran = set(re.findall(r"stablehlo\.(\w+)", text))
    assert ran == {"custom_call", "reshape", "constant"}


def test_ragged_queries() -> None:
    q, kv, tables, lens = specs()
    text = lower(
        partial(attend, max_q_len=4),
        Struct((9, 16, 576), q.dtype),
        kv,
        tables,
        lens,
        cu_seqlens_q=Struct((5,), jnp.int32),
    )
    assert operands_of_call(text).startswith(
        "(tensor<144x576xbf16>, tensor<32x64x576xbf16>, tensor<4x8xi32>, tensor<4xi32>, tensor<5xi32>, tensor<2xf32>)"
    )


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_of_heads_and_batch(check_vma: bool) -> None:
    # Every device has the whole cache, and the other operands differ: a custom call needs one declared kind of both.
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    rows = P("data", None, "model")
    mapped = jax.shard_map(
        attend, mesh=mesh, in_specs=(rows, P(), P("data"), P("data")), out_specs=rows, check_vma=check_vma
    )
    text = lower(mapped, *specs(4, heads=32))
    assert operands_of_call(text).startswith("(tensor<32x576xbf16>, tensor<32x64x576xbf16>, tensor<2x8xi32>")
    if check_vma:  # and the results are known to differ along both axes, so that nobody takes them for replicated
        claimed = jax.shard_map(attend, mesh=mesh, in_specs=(rows, P(), P("data"), P("data")), out_specs=P("data"))
        with pytest.raises(ValueError, match="model"):
            lower(claimed, *specs(4, heads=32))


def test_donated_cache_stays_donated() -> None:
    def step(q: Any, kv: Any, tables: Any, lens: Any) -> Any:
        return attend(q, kv, tables, lens), kv.at[0].set(0)

    lowered = jax.jit(step, donate_argnums=1).trace(*specs()).lower(lowering_platforms=("cuda",))
    assert re.search(r"%arg1: tensor<32x64x576xbf16> {[^}]*(tf.aliasing_output|jax.buffer_donor)", lowered.as_text())


def test_export_once_for_all_sizes(builds: Path) -> None:
    b, p, m = export.symbolic_shape("b, p, m")
    exported = export.export(jax.jit(attend), platforms=["cuda"], disabled_checks=tsmla_jax.export_disabled_checks())(
        *specs(b, p, m)
    )
    again = export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
    text = lower(again.call, *specs(7, 99, 3))
    assert len(builds.read_text().splitlines()) == 1
    assert device.TARGET in text


def test_export_over_several_devices_through_shard_map() -> None:
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    layout = (P("data", None, "model"), P(), P("data"), P("data"))
    args = [
        Struct(struct.shape, struct.dtype, sharding=NamedSharding(mesh, spec))
        for struct, spec in zip(specs(4, heads=32), layout, strict=True)
    ]
    mapped = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=layout, out_specs=layout[0]))
    checks = tsmla_jax.export_disabled_checks()
    again = export.deserialize(export.export(mapped, platforms=["cuda"], disabled_checks=checks)(*args).serialize())
    assert again.nr_devices == 4 and device.TARGET in again.mlir_module()


def test_export_without_the_checks_is_refused_by_jax() -> None:
    with pytest.raises(ValueError, match=device.TARGET):
        export.export(jax.jit(attend), platforms=["cuda"])(*specs())


WARM = """
import sys
import jax, jax.numpy as jnp
jax.devices()
from tests.emulator.standin import DECODE
import tsmla_jax
from tsmla_jax.ops.mla_decode import cute
cute.MLA_DECODE = DECODE
S = jax.ShapeDtypeStruct
args = (S((4, 1, 16, 576), jnp.bfloat16), S((32, 64, 576), jnp.bfloat16), S((4, 8), jnp.int32), S((4,), jnp.int32))
attend = lambda *a: tsmla_jax.mla_decode(*a, softmax_scale=0.1, implementation="cute")
text = jax.jit(attend).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
import json
names = {name.partition(".")[0] for name in sys.modules}
imported = sorted(names & {"cutlass", "cuda", "torch", "flax"})
print(json.dumps({"size": len(text), "imported": imported}))
"""


def test_warm_process_imports_no_cutlass_and_compiles_nothing(builds: Path, child_environment: dict[str, str]) -> None:
    lower(attend, *specs())
    run = subprocess.run(
        [sys.executable, "-c", WARM], env=child_environment, check=True, capture_output=True, text=True, timeout=120
    )
    said = json.loads(run.stdout)
    assert said["imported"] == [] and said["size"] > 10_000
    assert len(builds.read_text().splitlines()) == 1


# ---- what can't be


def test_without_a_gpu_or_an_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTE_DSL_ARCH")
    monkeypatch.setattr(device, "gpu", lambda: None)
    with pytest.raises(NotImplementedError, match="implementation='cute' can't run this call: there is no NVIDIA GPU"):
        lower(attend, *specs())


def test_an_architecture_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    monkeypatch.setattr(device, "gpu", lambda: None)
    with pytest.raises(NotImplementedError, match="the architecture is sm_80; mla_decode is written for sm_90a"):
        lower(attend, *specs())


class FakeGpu:
    def __init__(self, core_count: int = 78, compute_capability: str = "9.0") -> None:
        self.core_count, self.compute_capability = core_count, compute_capability


def have(monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu) -> None:
    monkeypatch.setattr(device, "gpu", lambda: gpus[0])
    monkeypatch.setattr(device, "gpus", lambda: list(gpus))


def test_device_decides_architecture_and_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, FakeGpu())
    assert device.target_arch() == ARCH and device.num_sms(ARCH) == 78
    assert device.why_not(DECODE) == []
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    assert device.why_not(DECODE) == ["CUTE_DSL_ARCH is sm_100a, but the GPU here is sm_90a"]
    monkeypatch.setenv("CUTE_DSL_ARCH", ARCH)
    monkeypatch.setattr(device, "runtime_library", lambda: None)
    assert "nvidia-cutlass-dsl" in device.why_not(DECODE)[0]


@pytest.mark.parametrize("counts", [(132, 114), (114, 132), (132, 78, 114)])
def test_a_program_is_planned_for_the_gpu_with_the_fewest_multiprocessors(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may run on any of them. GPUs of another architecture can't run it."""
    have(monkeypatch, *map(FakeGpu, counts), FakeGpu(40, "8.9"))
    monkeypatch.setattr(device, "register_custom_calls", lambda: None)
    assert device.num_sms(ARCH) == min(counts)
    assert f"tensor<{2 * min(counts)}x4xi32>)" in operands_of_call(lower(attend, *specs()))


def test_the_gpus_are_those_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program over several hosts must be the same on each."""
    everywhere = [FakeGpu(132), FakeGpu(114)]
    monkeypatch.setattr(jax, "local_devices", lambda backend: everywhere[:1])
    monkeypatch.setattr(jax, "devices", lambda backend: everywhere)
    assert device.gpu() is everywhere[0] and device.num_sms(ARCH) == 114
    with device.planned_for(ARCH):
        assert device.gpus() == [] and device.num_sms(ARCH) == 132


def test_nobody_chooses_a_kernel_for_a_gpu_that_is_not_there() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    explained = tsmla_jax.explain("mla_decode", *specs(), softmax_scale=1.0)
    assert explained.chosen == "xla" and explained.reasons["cute"] == ("jax's default device is a cpu",)
    named = tsmla_jax.explain("mla_decode", *specs(), softmax_scale=1.0, implementation="cute")
    assert named.chosen == "cute" and named.reasons["cute"] == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q": jnp.float32, "kv": jnp.float32}, "q.dtype is float32"),
        ({"page": 8}, "page size is 8"),
        ({"latent_dim": 448}, "latent_dim is 448"),
    ],
)
def test_reasons_are_all_said(changes: dict[str, Any], reason: str) -> None:
    q, kv, tables, lens = specs()
    q = Struct(q.shape, changes.get("q", q.dtype))
    kv = Struct((32, changes.get("page", 64), 576), changes.get("kv", kv.dtype))
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        lower(partial(attend, latent_dim=changes.get("latent_dim", 512)), q, kv, tables, lens)


@pytest.mark.parametrize("q_dtype", [jnp.float8_e4m3fn, jnp.bfloat16])
def test_an_fp8_cache_is_passed_as_it_is(q_dtype: Any) -> None:
    q, kv, tables, lens = specs()
    q, kv = Struct(q.shape, q_dtype), Struct(kv.shape, jnp.float8_e4m3fn)
    types = operands_of_call(lower(partial(attend, q_scale=0.5, kv_scale=0.25), q, kv, tables, lens))
    assert "tensor<32x64x576xf8E4M3FN>" in types and "(tensor<64x512xbf16>, tensor<64xf32>, " in types


def test_symbolic_heads_are_refused() -> None:
    (h,) = export.symbolic_shape("h")
    with pytest.raises(NotImplementedError, match="num_heads is h; the kernels are compiled for a number"):
        jax.eval_shape(attend, *specs(heads=h))  # type: ignore[arg-type]


def test_another_platform_is_refused_with_the_alternative() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    with pytest.raises(NotImplementedError, match="implementation='xla' runs anywhere"):
        jax.jit(attend).trace(*specs()).lower(lowering_platforms=("tpu",))


def test_tracing_compiles_nothing(builds: Path) -> None:
    out, lse = jax.eval_shape(partial(attend, return_lse=True), *specs(q_len=2))
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((4, 2, 16, 512), jnp.bfloat16, (4, 2, 16), jnp.float32)
    assert builds.read_text() == ""
