"""Compiled objects: in the form that the runtime loads, for any host of the same kind, with a report of resources."""

import ctypes
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.emulator.standin import DECODE, SCALE, ScaleConfig
from tsmla_jax.ops import device
from tsmla_kernels import launch
from tsmla_kernels.catalog import KERNELS, MLA_DECODE, MLA_PREFILL
from tsmla_kernels.compile import CompiledObject, compile_kernel
from tsmla_kernels.kernel import Kernel, Operand
from tsmla_kernels.resources import cubin_of, resource_report

ARCH = "sm_90a"
RUNTIME_CUDA_ERROR = 1  # CuteDSLRT_Error_CudaError: it got as far as the (missing) driver


@pytest.fixture(scope="module")
def scale() -> CompiledObject:
    return compile_kernel(SCALE, ScaleConfig(width=64), ARCH)


def test_object_describes_itself(scale: CompiledObject) -> None:
    assert (scale.kernel, scale.arch) == ("scale", ARCH)
    assert ScaleConfig(**json.loads(scale.config)) == ScaleConfig(width=64)
    assert scale.seconds > 0 and re.fullmatch(r"\d+\.\d+\.\d+.*", scale.dsl)


def test_object_has_what_the_dsl_gives_its_own_custom_call(scale: CompiledObject) -> None:
    cute = pytest.importorskip("cutlass.cute")
    import cuda.bindings.driver as cuda
    from cutlass.jax.compile import _EXPORT_PREFIX  # what cutlass_call compiles under

    assert cute and cuda
    for symbol in ("args_spec", "function_name", "kernel_info", "version", "cuda_init", "cuda_load_to_device"):
        assert f"{_EXPORT_PREFIX}_{symbol}".encode() in scale.module


def test_runtime_accepts_the_object(scale: CompiledObject) -> None:
    # Without a GPU the runtime still parses, links and finds the entry; only then it asks for the driver.
    path = device.runtime_library()
    assert path is not None
    runtime = ctypes.CDLL(str(path))

    def load(content: bytes) -> tuple[int, int]:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        size = ctypes.c_size_t(len(content))
        loaded = runtime.CuteDSLRT_Module_Create_From_Bytes(
            ctypes.byref(module), content, size, None, ctypes.c_size_t(0)
        )
        if loaded:
            return loaded, -1
        found = runtime.CuteDSLRT_Module_Get_Function(ctypes.byref(function), module, b"cutlass_call")
        runtime.CuteDSLRT_Module_Destroy(module)
        return loaded, found

    loaded, found = load(scale.module)
    assert loaded == 0 and found in (0, RUNTIME_CUDA_ERROR)
    assert load(scale.module[: len(scale.module) // 2])[0] != 0


def test_launcher_says_why_it_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "runtime_library", lambda: None)
    launch._runtime.cache_clear()
    with pytest.raises(
        FileNotFoundError, match=r"libcute_dsl_runtime\.so was not found; it is part of nvidia-cutlass-dsl"
    ):
        launch.Launcher(SCALE, ScaleConfig(width=64), ARCH)
    monkeypatch.undo()


def test_launcher_needs_a_gpu() -> None:
    if device.gpu() is not None:
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="scale: the CuTe DSL runtime says CuteDSLRT_Error_CudaError"):
        launch.Launcher(SCALE, ScaleConfig(width=64), ARCH)


def test_host_code_needs_no_recent_processor(scale: CompiledObject, tmp_path: Path) -> None:
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("needs objdump, of binutils")
    file = tmp_path / "scale.o"
    file.write_bytes(scale.module)
    code = subprocess.run([objdump, "-d", str(file)], check=True, capture_output=True, text=True).stdout
    assert "xmm" in code or "ldr" in code  # it was disassembled
    assert not re.search(r"[yz]mm\d", code), "AVX: this object would crash a host that has less than this machine"


def test_report_of_a_good_kernel(scale: CompiledObject) -> None:
    report = resource_report(scale)
    (kernel,) = report.kernels
    assert "scale" in kernel.name and 0 < kernel.registers <= 64 and kernel.code_bytes > 0
    assert kernel.stack_bytes == 0 and report.serialised == ()


def test_report_finds_local_memory() -> None:
    report = resource_report(compile_kernel(SCALE, ScaleConfig(width=32, fault="local_memory"), ARCH))
    assert report.kernels[0].stack_bytes >= 64 * 4


def test_report_finds_serialised_wgmma(scale: CompiledObject) -> None:
    # A remark of ptxas, wrapped and coloured as the DSL prints it. The real kernels' tests show that there are remarks.
    said = (
        "\x1b[96mremark[ptxas]:\x1b[0m\n   ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async\n"
        "          instructions are\n          serialized due to insufficient register resources for the function\n"
        "          'attend'\n          ptxas info    : 0 bytes gmem\n"
    )
    serialised = resource_report(CompiledObject("scale", "{}", ARCH, scale.module, "4.8.1", 1.0, said)).serialised
    assert len(serialised) == 1 and serialised[0].startswith("(C7512)") and serialised[0].endswith("'attend'")


@pytest.mark.parametrize("module", [b"\x7fELF", b"\x7fELF....\x7fELF"])
def test_no_cubin_is_said(module: bytes) -> None:
    with pytest.raises(ValueError, match=f"module: got {len(module)} bytes without a cubin"):
        cubin_of(module)


def test_wrong_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"arch: got 'sm_80'; scale is written for sm_90a"):
        compile_kernel(SCALE, ScaleConfig(width=64), "sm_80")


def test_what_does_not_compile_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"scale: ScaleConfig.*this config is made not to compile"):
        compile_kernel(SCALE, ScaleConfig(width=64, fault="trace"), ARCH)


def test_operand_rejects_other_arrays() -> None:
    operand = Operand("kv_cache", "bfloat16", (None, 64, 576))
    operand.check((7, 64, 576), "bfloat16")
    for shape, dtype in (((7, 32, 576), "bfloat16"), ((7, 64, 576), "float16"), ((64, 576), "bfloat16")):
        with pytest.raises(ValueError, match=r"kv_cache: got .*; the kernel takes bfloat16\[any, 64, 576\]"):
            operand.check(shape, dtype)


def test_decode_operands_are_those_of_the_launcher() -> None:
    import inspect

    from tests.emulator.standin_kernels import Decode
    from tsmla_kernels.sm90.decode.memory import Arrays

    def names_of(**options: str) -> list[str]:
        config = MLA_DECODE.from_options({"num_heads": "16", **options})
        return [operand.name for operand in MLA_DECODE.operands(config)]

    names = names_of()
    assert ["q", "kv_cache", *(name for name in Arrays._fields if name not in Arrays._field_defaults)] == names
    assert {"q", "kv_cache", *Arrays._fields} == set(names_of(visible_lens="true"))
    assert list(inspect.signature(Decode.__call__).parameters)[2:] == names
    assert DECODE.operands is MLA_DECODE.operands


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "num_heads is needed"),
        ({"num_heads": "16", "pages": "1"}, "got option 'pages'; legal: batch_invariant, "),
        ({"num_heads": "0"}, "got num_heads=0; legal: an int from 1 to 2147483647"),
        ({"num_heads": "128", "tensor_parallel": "3"}, "got tensor_parallel=3; it must divide num_heads=128"),
        ({"num_heads": "16", "causal": "yes"}, "got causal=yes; legal: true or false"),
        ({"num_heads": "16", "dtype": "float32"}, "no kernel for it: q.dtype is float32"),
    ],
)
def test_config_options_are_checked(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^--config: {re.escape(message)}"):
        MLA_DECODE.from_options(options)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_record_has_the_rules_of_its_kernel(kernel: Kernel) -> None:
    options = {"num_heads": "16"}
    config = kernel.from_options(options)
    spec = kernel.spec_from_options(options)
    assert kernel.reasons(spec) == [] and isinstance(config, kernel.config)
    assert config == kernel.config_for(spec, **dict.fromkeys(kernel.flags, False))
    for name in kernel.flags:
        assert kernel.from_options({**options, name: "true"}) == kernel.config_for(
            spec, **{**dict.fromkeys(kernel.flags, False), name: True}
        )
        with pytest.raises(ValueError, match=f"^--config: got {name}=yes; legal: true or false"):
            kernel.from_options({**options, name: "yes"})


def test_a_shared_rope_is_refused_where_the_kernel_reads_none() -> None:
    with pytest.raises(ValueError, match=r"^--config: no kernel for it: q.dtype is float8_e4m3fn; .* k and v"):
        MLA_PREFILL.from_options({"dtype": "float8_e4m3fn", "shared_rope": "true"})
