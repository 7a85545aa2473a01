"""`tsmla doctor`: which implementations this machine can run, and what to install for the others.

Imports jax alone. It looks the other packages up by their metadata, so that a broken one can't break the report.
"""

import argparse
import dataclasses
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tsmla_bridge.engines import versions as engine_versions
from tsmla_kernels import __version__, command_line
from tsmla_kernels.sm100 import config as sm100


@dataclasses.dataclass(frozen=True)
class Package:
    """A distribution that something here uses: the module it brings, its purpose, and our extra that installs it (None
    for a dependency that is always there)."""

    distribution: str
    module: str
    purpose: str
    extra: str | None = None


PACKAGES = (
    Package("jax", "jax", "everything"),
    Package("jaxlib", "jaxlib", "everything"),
    Package("jax-cuda13-plugin", "jax_cuda13_plugin", "NVIDIA GPUs, driver 580 or newer", "cuda13"),
    Package("jax-cuda12-plugin", "jax_cuda12_plugin", "NVIDIA GPUs, older drivers", "cuda12"),
    Package("nvidia-cutlass-dsl", "cutlass", 'compiling the kernels, implementation="cute"', "cuda13"),
    Package("flax", "flax", "tsmla_jax.nn.MLAttention", "flax"),
    Package("safetensors", "safetensors", "reading checkpoints", "hf"),
    Package("tokenizers", "tokenizers", "text prompts in tsmla generate", "hf"),
    Package("torch", "torch", "the PyTorch front end, tsmla_bridge", "torch"),
    Package("tokenspeed-mla", "tokenspeed_mla", "Blackwell kernels", "blackwell"),
    Package("matplotlib", "matplotlib", "make figures", "bench"),
)

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_CUDA13_DRIVER = 580


def install_command(extra: str) -> str:
    """The command that installs an extra of this package."""
    return f'pip install "tsmla-jax[{extra}]"'


def install_hint(module: str | None) -> str:
    """The end of a "No module named ..." message: the command that installs the module, or nothing if no extra does."""
    root = (module or "").partition(".")[0]
    extra = next((package.extra for package in PACKAGES if package.module == root and package.extra), None)
    return f": {install_command(extra)}" if extra else ""


@dataclasses.dataclass(frozen=True)
class Device:
    """One of jax's devices; `arch` is "sm_90" and the like for NVIDIA GPUs."""

    id: int
    platform: str
    kind: str
    arch: str | None


@dataclasses.dataclass(frozen=True)
class UsualCall:
    """What `explain` says of one usual call: the implementation that runs, and for the others why they can't."""

    op: str
    call: str
    chosen: str | None
    reasons: dict[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Report:
    """All that the doctor found. `advice` starts with what matters most."""

    version: str
    python: str
    system: str
    packages: dict[str, str | None]
    driver: str | None
    backend: str | None
    devices: tuple[Device, ...]
    operations: tuple[UsualCall, ...]
    architectures: dict[str, str]
    cache: command_line.CacheState
    engines: tuple[engine_versions.Found, ...]
    advice: tuple[str, ...]


def usual_calls() -> tuple[UsualCall, ...]:
    """The usual calls at DeepSeek's sizes, and which implementation runs each. Nothing is allocated."""
    import jax
    import jax.numpy as jnp

    from tsmla_jax.ops.explain import explain
    from tsmla_jax.sparse import CompressorState

    def of(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def usual(op: str, call: str, *args: Any, **kwargs: Any) -> UsualCall:
        explanation = explain(op, *args, **kwargs)
        return UsualCall(op, call, explanation.chosen, dict(explanation.reasons))

    bf16, fp8, i32, f32 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32, jnp.float32
    tables, lens, starts, slots = of((8, 64), i32), of((8,), i32), of((9,), i32), of((128,), i32)
    cache, fp8_cache = of((512, 64, 576), bf16), of((512, 64, 576), fp8)
    decode = {"block_tables": tables, "seq_lens": lens, "softmax_scale": 0.135}
    prefill = {
        "cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_q_len": 1024, "max_kv_len": 1024, "softmax_scale": 0.135,
    }  # fmt: skip
    row, row_rope = of((128, 512), bf16), of((128, 64), bf16)
    angles = [of((128, 32), f32)] * 2
    rope_write = (of((128, 128, 512), bf16), of((128, 128, 64), bf16), row, row_rope, slots, *angles)
    wide, values = of((4096, 128, 192), bf16), of((4096, 128, 128), bf16)
    kv = of((4096, 128, 256), bf16), of((4096, 64), bf16)
    parts = [of((64, 128, 512), bf16)] * 2, [of((64, 128), f32)] * 2
    state = CompressorState(of((8, 8, 2, 1024), f32), of((8, 8), i32))
    tokens, packed = of((64,), i32), of((512, 64, 656), jnp.uint8)
    index = of((64, 64, 128), fp8), of((64, 64), f32), of((512, 64, 132), jnp.uint8), of((64, 64), i32), tokens
    plain_index = of((64, 64, 128), bf16), of((64, 64), f32), of((512, 64, 128), bf16)
    chosen = of((64, 2048), i32)
    product = of((64, 7168), fp8), of((2112, 7168), fp8), of((64, 56), f32), of((17, 56), f32)
    stack = of((256, 4096, 7168), fp8), of((512, 56), f32), of((256, 32, 56), f32)
    experts = of((512, 7168), fp8), *stack, of((257,), i32)
    return (
        usual("mla_decode", "bf16", of((8, 1, 128, 576), bf16), cache, **decode),
        usual("mla_decode", "bf16 queries, fp8 cache", of((8, 1, 128, 576), bf16), fp8_cache, **decode),
        usual("mla_decode", "fp8", of((8, 1, 128, 576), fp8), fp8_cache, **decode),
        usual("mla_prefill", "bf16", wide, wide, values, **prefill),
        usual("mla_prefill_kv", "bf16", wide, *kv, **prefill),
        usual("write_kv_cache", "bf16", cache, row, row_rope, slots),
        usual("write_kv_cache", "fp8 cache", fp8_cache, row, row_rope, slots),
        usual("rope_write_kv_cache", "bf16", cache, *rope_write),
        usual("rope_write_kv_cache", "fp8 cache", fp8_cache, *rope_write),
        usual("gather_kv_cache", "bf16", cache, tables, lens, lens, total_len=4096),
        usual("merge_attention_states", "bf16", *parts),
        usual("sparse_mla", "packed V3.2 cache", of((64, 128, 576), bf16), packed, of((64, 2048), i32), tokens,
              softmax_scale=0.135),
        usual("indexer_logits", "V3.2", *index),
        usual("indexer_selected_logits", "bf16", *plain_index, chosen),
        usual("indexer_loss", "bf16, 2,048 selected keys", *plain_index, of((64, 128, 576), bf16), cache,
              of((64, 128), f32), indices=chosen, softmax_scale=0.135),
        usual("select_topk", "V3.2", of((64, 4096), f32), tokens, 2048),
        usual("indexer_topk", "V3.2", *index, 2048),
        usual("compress_kv", "V4, ratio 4", of((512, 2, 1024), f32), of((4, 1024), f32), state, state_slots=lens,
              seq_lens=lens, cu_seqlens_q=starts, ratio=4, overlap=True),
        usual("compress_write_kv_cache", "V4, ratio 4", of((512, 37440), jnp.uint8), of((512, 2, 1024), f32),
              of((4, 1024), f32), state, of((512,), bf16), of((4096, 64), f32), tables, state_slots=lens, seq_lens=lens,
              cu_seqlens_q=starts, ratio=4, overlap=True, eps=1e-6),
        usual("write_packed_kv_cache", "V3.2", packed, row, row_rope, slots, *angles),
        usual("write_indexer_cache", "V3.2", index[2], of((128, 128), bf16), slots, *angles),
        usual("indexer_quantize", "V3.2", of((128, 64, 128), bf16), of((128, 64), bf16), *angles),
        usual("block_scaled_matmul", "V3", *product),
        usual("grouped_block_scaled_matmul", "V3", *experts),
        usual("quantize_blocks", "bf16", of((64, 7168), bf16)),
    )  # fmt: skip


def _devices() -> tuple[str | None, tuple[Device, ...], str | None]:
    """jax's backend and devices; None, no devices and the reason if no backend starts."""
    # The report needs no memory, and other programs may be using the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError if JAX_PLATFORMS names no platform of this machine
        said = (str(error).splitlines() or ["no platform that it may use is there"])[0]
        asked = os.environ.get("JAX_PLATFORMS")
        return None, (), f"{said} (JAX_PLATFORMS={asked})" if asked else said
    return jax.default_backend(), tuple(map(_device, devices)), None


def _device(device: Any) -> Device:
    capability = getattr(device, "compute_capability", None) if device.platform == "gpu" else None
    arch = f"sm_{str(capability).replace('.', '')}" if capability else None
    return Device(device.id, device.platform, device.device_kind, arch)


def _driver() -> str | None:
    """The NVIDIA kernel driver's version, such as "580.65.06", or None without one."""
    if not _DRIVER_FILE.exists():
        return None
    words = _DRIVER_FILE.read_text().split()
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), "unknown")


def _architectures() -> dict[str, str]:
    """The kernels for each family of GPUs, in words."""
    ops = Path(__file__).parents[1] / "ops"
    kernels = sorted(path.parent.name for path in ops.rglob("cute.py"))
    hopper = f"kernels for {', '.join(kernels)}; the other operations run as xla"
    blackwell = f"mla_decode and mla_prefill: {sm100.NOTICE} (extra blackwell); the others run as xla"
    others = "every operation runs as xla; the products of experts and of fp8 matrices are in Pallas, as on Hopper"
    older = "every operation and product runs as xla"
    return {
        "Hopper (SM90)": hopper,
        "Blackwell (SM100, SM103, SM107)": blackwell,
        "Ampere, Ada and others (from SM80 on)": others,
        "older": older,
    }


def advise(
    packages: Mapping[str, str | None], driver: str | None, devices: tuple[Device, ...], failure: str | None
) -> tuple[str, ...]:
    """The steps to take, the most important first; empty if nothing is missing."""
    advice = []
    if failure:
        advice.append(f"jax starts no backend: {failure}")
    on_gpu = any(device.platform == "gpu" for device in devices)
    if driver is None:
        needs = "the kernels need a Hopper or Blackwell GPU"
        advice.append(f"No NVIDIA driver here: {needs}; xla and reference run on this machine.")
    elif not on_gpu:
        major = driver.partition(".")[0]
        extra = "cuda12" if major.isdigit() and int(major) < _CUDA13_DRIVER else "cuda13"
        if packages[f"jax-{extra}-plugin"] is None:
            advice.append(f"There is an NVIDIA driver ({driver}), but jax can't use it: {install_command(extra)}")
        else:
            advice.append(f"There is an NVIDIA driver ({driver}) and jax-{extra}-plugin, but jax uses no GPU: "
                          "see JAX_PLATFORMS and CUDA_VISIBLE_DEVICES")  # fmt: skip
    for package in PACKAGES:
        plugin = package.distribution.endswith("-plugin")
        if package.extra and not plugin and packages[package.distribution] is None:
            advice.append(f"{package.distribution} ({package.purpose}): {install_command(package.extra)}")
    return tuple(advice)


def examine() -> Report:
    """Look at this machine. Starts jax's backend; allocates nothing on a GPU."""
    packages = {package.distribution: engine_versions.version_of(package.distribution) for package in PACKAGES}
    driver = _driver()
    backend, devices, failure = _devices()
    return Report(
        version=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        packages=packages,
        driver=driver,
        backend=backend,
        devices=devices,
        operations=usual_calls() if devices else (),
        architectures=_architectures(),
        cache=command_line.examine_cache(),
        engines=engine_versions.examine(),
        advice=advise(packages, driver, devices, failure),
    )


def lines_of(call: UsualCall) -> list[str]:
    """A usual call and what runs it, then why the others don't, a line each."""
    refused = [f"  not {name}: {'; '.join(reasons)}" for name, reasons in call.reasons.items() if reasons]
    return [f"{call.op}, {call.call}: {call.chosen or 'nothing can run it'}", *refused]


def render(report: Report) -> str:
    """The report as text for a terminal."""
    lines = [f"tsmla {report.version}, Python {report.python}, {report.system}", ""]
    lines.append(f"Devices (jax backend: {report.backend or 'none'}; NVIDIA driver: {report.driver or 'none'})")
    for device in report.devices:
        lines.append(f"  {device.platform}:{device.id}  {device.kind}" + (f"  {device.arch}" if device.arch else ""))
    lines += ["", "Packages"]
    width = max(map(len, report.packages))
    for package in PACKAGES:
        version = report.packages[package.distribution] or "not installed"
        lines.append(f"  {package.distribution:{width}}  {version:14}  {package.purpose}")
    lines += ["", "Operations, and the implementation that runs the usual calls of DeepSeek's models"]
    said: set[str] = set()
    for operation in report.operations:
        # The same reason usually keeps the kernels from every call: it is given where it first stands.
        call, *reasons = lines_of(operation)
        lines += [f"  {call}", *(f"  {reason}" for reason in reasons if reason not in said)]
        said.update(reasons)
    lines += ["", "Kernels by architecture"]
    lines += [f"  {name}: {there}" for name, there in report.architectures.items()]
    lines += ["", *command_line.render_cache(report.cache), "", *engine_versions.render(report.engines)]
    if report.advice:
        lines += ["", "What is missing, and how to get it", *(f"  {line}" for line in report.advice)]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tsmla doctor`."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; 0, also where something is missing."""
    report = examine()
    print(json.dumps(dataclasses.asdict(report), indent=2) if arguments.json else render(report))
    return 0
