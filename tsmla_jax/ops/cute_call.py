"""Launching compiled CuTe DSL kernels from jax: one primitive for all of them.

The primitive carries which kernel and which config, not its code; the object is looked up (in the cache on disk, else
compiled) when a program is lowered for CUDA. What is lowered is the DSL runtime's own custom call with the object
inside, so an exported program needs nothing of this package to run but `register_custom_calls()`. With a warm cache
nothing of cutlass is imported.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax.interpreters import mlir

from tsmla_kernels import launch, object_cache
from tsmla_kernels.catalog import Config, Kernel

TARGET = "CuteDSLRT_NvJaxCutlassCall_v2"
"""The runtime's custom call that XLA may record into a CUDA graph (for jax from 0.9.1 on)."""

NUM_SMS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148, "sm_107a": 148}
"""Multiprocessors to plan for where there is no device to ask: H100 SXM, H200; B200; B300; as B300, for want of a
published number. It decides into how many pieces work is cut, not what comes out."""

_TYPE = "CuteDSLRT_NvJaxCutlassCallTypes_v2"
_register_lock = threading.Lock()
_registered = False


# ---- the device


def gpu() -> Any | None:
    """This process' first CUDA device, None if it has none."""
    try:
        return jax.local_devices(backend="cuda")[0]
    except (RuntimeError, IndexError):
        return None


def target_arch() -> str | None:
    """The architecture to compile for: that of the GPU, else CUTE_DSL_ARCH, else None."""
    device = gpu()
    if device is None:
        return os.environ.get("CUTE_DSL_ARCH") or None
    return f"sm_{device.compute_capability.replace('.', '')}a"


def num_sms(arch: str) -> int:
    """Multiprocessors of the GPU, or of the architecture's data-centre part where there is none."""
    device = gpu()
    return NUM_SMS[arch] if device is None else device.core_count


def why_not(kernel: Kernel) -> list[str]:
    """Why `kernel` can be neither run nor compiled in this process; empty if it can."""
    arch, named = target_arch(), os.environ.get("CUTE_DSL_ARCH")
    if arch is None:
        return [
            "there is no NVIDIA GPU that jax can use (to lower for one without having it, set CUTE_DSL_ARCH, e.g. to"
            f" {kernel.archs[0]})"
        ]
    if gpu() is not None and named and named != arch:
        return [f"CUTE_DSL_ARCH is {named}, but the GPU here is {arch}"]
    if arch not in kernel.archs:
        return [f"the architecture is {arch}; {kernel.name} is written for {', '.join(kernel.archs)}"]
    if gpu() is not None and runtime_library() is None:
        return [f"{launch.LIBRARY} was not found; it is part of nvidia-cutlass-dsl"]
    return []


def why_not_made(kernel: Kernel, config: Config) -> list[str]:
    """Why `kernel` can't be had for `config`: the package of its code isn't installed, and no object is stored."""
    package, arch = kernel.package, target_arch()
    if package is None or arch is None or importlib.util.find_spec(package.module) is not None:
        return []
    if object_cache.is_stored(kernel, config, arch):
        return []
    return [f"{kernel.name} is made of {package.distribution}, which is not installed: {package.install}"]


def why_not_by_default() -> list[str]:
    """Why a kernel that could be named is not what an ordinary call should run."""
    device = getattr(jax.config, "jax_default_device", None)
    platform = jax.default_backend() if device is None else getattr(device, "platform", device)
    return [] if platform in ("gpu", "cuda") else [f"jax's default device is a {platform}"]


# ---- the runtime library


def runtime_library() -> Path | None:
    """The DSL's runtime, of jax's CUDA version if those of both are there; None if there is none."""
    return launch.runtime_library("cu12" if importlib.util.find_spec("jax_cuda12_plugin") else "cu13")


def register_custom_calls() -> None:
    """Make the runtime's custom call known to XLA; once per process. Lowering on a machine with a GPU does it, so only
    a process that runs a deserialized export without tracing anything has to call this.

    Raises FileNotFoundError if the runtime isn't installed."""
    global _registered
    with _register_lock:
        if _registered:
            return
        path = runtime_library()
        if path is None:
            raise FileNotFoundError(f"{launch.LIBRARY} was not found; it is part of nvidia-cutlass-dsl")
        library = ctypes.CDLL(str(path))

        def symbol(name: str) -> Any:
            function = getattr(library, f"CuteDSLRT_NvJaxCutlassCall{name}_v2")
            function.restype = ctypes.c_void_p
            return function

        jax.ffi.register_ffi_type(
            _TYPE,
            {
                "type_id": jax.ffi.pycapsule(symbol("StateTypeId")()),
                "type_info": jax.ffi.pycapsule(symbol("StateTypeInfo")()),
            },
            platform="CUDA",
        )
        stages = {"instantiate": "Instantiate", "prepare": "Prepare", "execute": "Execute"}
        handlers = {stage: jax.ffi.pycapsule(symbol(name)) for stage, name in stages.items()}
        jax.ffi.register_ffi_target(TARGET, handlers, platform="CUDA")
        _registered = True


def export_disabled_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What jax.export.export(..., disabled_checks=) needs for programs with kernels: jax guarantees for its own custom
    calls that they stay as they are, and this one is not its own."""
    return [jax.export.DisabledSafetyCheck.custom_call(TARGET)]


# ---- the primitive

cute_call_p = jax.extend.core.Primitive("tsmla_cute_call")
cute_call_p.multiple_results = True


def cute_call(
    kernel: Kernel, config: Config, inputs: Sequence[jax.Array], result_shapes: Sequence[tuple[Any, ...]], *, arch: str
) -> list[jax.Array]:
    """Run `kernel` for `config` on `inputs`; the results are its output operands, workspaces included.

    Args:
      inputs: the kernel's input operands, in order. result_shapes: the shapes of its outputs, in order.
      arch: what to compile for; the kernel must be written for it.

    Raises ValueError if an array isn't what the kernel's operands say.
    """
    operands = kernel.operands(config)
    expected = [operand for operand in operands if not operand.output]
    results = [operand for operand in operands if operand.output]
    for operand, array in zip(expected, inputs, strict=True):
        operand.check(array.shape, jnp.dtype(array.dtype).name)
    for operand, shape in zip(results, result_shapes, strict=True):
        operand.check(shape, operand.dtype)
    # Under shard_map some operands vary over more mesh axes than others; a custom call wants them alike.
    axes = frozenset[str]().union(*(_varying(array) for array in inputs))
    outputs: list[jax.Array] = cute_call_p.bind(
        *(_vary_over(array, axes) for array in inputs),
        kernel=kernel,
        config=config,
        arch=arch,
        result_shapes=tuple(map(tuple, result_shapes)),
    )
    return [_vary_over(array, axes) for array in outputs]


def named_axes(shape: Any) -> tuple[Any, ...]:
    """The mesh axes of each dimension of an operand of a custom partitioning; none where its sharding isn't one of
    named axes."""
    spec = tuple(shape.sharding.spec) if isinstance(shape.sharding, jax.sharding.NamedSharding) else ()
    return spec + (None,) * (len(shape.shape) - len(spec))


def _varying(array: jax.Array) -> frozenset[str]:
    """The mesh axes along which shard_map's check_vma takes the array to differ."""
    aval = jax.typeof(array)
    kind = getattr(aval, "mat", None)  # jax before 0.10 has it on the type itself
    return getattr(aval, "vma", frozenset()) if kind is None else kind.varying


def _vary_over(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(sorted(axes - _varying(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


@cute_call_p.def_abstract_eval
def _abstract(
    *_: Any, kernel: Kernel, config: Config, arch: str, result_shapes: tuple[tuple[Any, ...], ...]
) -> list[Any]:
    return [
        jax.core.ShapedArray(shape, jnp.dtype(operand.dtype))
        for operand, shape in zip(_outputs(kernel, config), result_shapes, strict=True)
    ]


@cute_call_p.def_impl
def _impl(*arrays: jax.Array, **params: Any) -> list[jax.Array]:
    return _jitted(*arrays, **params)


@functools.partial(jax.jit, static_argnames=("kernel", "config", "arch", "result_shapes"))
def _jitted(*arrays: jax.Array, **params: Any) -> list[jax.Array]:
    return cute_call_p.bind(*arrays, **params)


def _custom_call(
    *arrays: jax.Array, kernel: Kernel, config: Config, arch: str, result_shapes: tuple[tuple[Any, ...], ...]
) -> Sequence[jax.Array]:
    module, key = _module(kernel, config, arch)
    if gpu() is not None:
        register_custom_calls()
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(operand.dtype))
        for operand, shape in zip(_outputs(kernel, config), result_shapes, strict=True)
    ]
    inputs = [operand.name for operand in kernel.operands(config) if not operand.output]
    aliases = {
        inputs.index(operand.alias): i
        for i, operand in enumerate(_outputs(kernel, config))
        if operand.alias is not None
    }
    call = jax.ffi.ffi_call(TARGET, structs, input_output_aliases=aliases)
    return call(*arrays, module=module, key=key)


def _elsewhere(*_: Any, kernel: Kernel, **__: Any) -> Sequence[jax.Array]:
    raise NotImplementedError(
        f"{kernel.name}: implementation='cute' runs on NVIDIA GPUs alone, and this program is being lowered for another"
        " platform; implementation='xla' runs anywhere"
    )


def _outputs(kernel: Kernel, config: Config) -> list[Any]:
    return [operand for operand in kernel.operands(config) if operand.output]


@functools.cache
def _module(kernel: Kernel, config: Config, arch: str) -> tuple[bytes, bytes]:
    """The object and the key by which the runtime knows it again."""
    module = object_cache.load_or_compile(kernel, config, arch).module
    return module, hashlib.sha256(module).digest()


mlir.register_lowering(cute_call_p, mlir.lower_fun(_elsewhere, multiple_results=True))
mlir.register_lowering(cute_call_p, mlir.lower_fun(_custom_call, multiple_results=True), platform="cuda")
