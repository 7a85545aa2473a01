"""The GPU that kernels are compiled for and run on, and the runtime library that launches them from XLA."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jax

from tsmla_kernels import contract, launch
from tsmla_kernels.kernel import PROVEN, Config, Kernel, untested

TARGET = "CuteDSLRT_NvJaxCutlassCall_v2"
"""The runtime's custom call that XLA may record into a CUDA graph (for jax from 0.9.1 on)."""
TRITON_TARGET = "__gpu$xla.gpu.triton"
"""The custom call of a kernel in Pallas for Triton."""

NUM_SMS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148, "sm_107a": 148, "sm_120a": 188}
"""Multiprocessors to plan for where there is no device to ask: H100 SXM and H200; B200; B300; sm_107a, whose number is
not published, so B300's stands for it; RTX PRO 6000. The number decides into how many pieces work is cut, and so a
call's time. A GPU with fewer or more of them gives the same: no kernel needs all of its blocks to run at a time."""

_TYPE = "CuteDSLRT_NvJaxCutlassCallTypes_v2"
_planned: ContextVar[str | None] = ContextVar("_planned", default=None)
_register_lock = threading.Lock()
_registered = False


# ---- the device


@contextlib.contextmanager
def planned_for(arch: str) -> Iterator[None]:
    """Context manager: inside it this thread's `explain` judges calls for a GPU of this architecture with NUM_SMS
    multiprocessors, whatever GPU there is."""
    token = _planned.set(arch)
    try:
        yield
    finally:
        _planned.reset(token)


def gpus() -> list[Any]:
    """The CUDA devices of this process and of the processes that it computes with; none if this process has none."""
    return [] if gpu() is None else jax.devices("cuda")


def gpu() -> Any | None:
    """This process' first CUDA device; None if it has none, and inside `planned_for`."""
    if _planned.get() is not None:
        return None
    try:
        return jax.local_devices(backend="cuda")[0]
    except (RuntimeError, IndexError):
        return None


def target_arch() -> str | None:
    """The architecture to compile for: that of `planned_for`, else that of the GPU, else CUTE_DSL_ARCH, else None."""
    if (planned := _planned.get()) is not None:
        return planned
    device = gpu()
    if device is None:
        return os.environ.get("CUTE_DSL_ARCH") or None
    return _arch_of(device)


def _arch_of(device: Any) -> str:
    return f"sm_{device.compute_capability.replace('.', '')}a"


def arch_for(kernel: Kernel) -> str:
    """The architecture to compile `kernel` for; NotImplementedError where there is none to compile for."""
    arch = target_arch()
    if arch is None:
        raise contract.not_runnable(kernel.name, "cute", why_not(kernel))
    return arch


def num_sms(arch: str) -> int:
    """Multiprocessors to plan for: the fewest of any GPU of this architecture; NUM_SMS if there is no such GPU.

    A program is traced once, and may run on any of the GPUs or, the same in all processes, on all of them: so it is
    planned for the one on which too many blocks would take a second turn.
    """
    counts = [device.core_count for device in gpus() if _arch_of(device) == arch]
    return min(counts, default=NUM_SMS[arch])


def why_not(kernel: Kernel) -> list[str]:
    """Why `kernel` can be neither run nor compiled in this process; empty if it can."""
    arch, named = target_arch(), os.environ.get("CUTE_DSL_ARCH")
    if arch is None:
        return [
            "there is no NVIDIA GPU that jax can use (to lower for one without having it, set CUTE_DSL_ARCH, e.g. to"
            f" {kernel.archs[0]}; without it a program that is exported for GPUs has no kernels)"
        ]
    if gpu() is not None and named and named != arch:
        return [f"CUTE_DSL_ARCH is {named}, but the GPU here is {arch}"]
    if found := kernel.arch_reasons(arch):
        return found
    if gpu() is not None and runtime_library() is None:
        return [f"{launch.LIBRARY} was not found; it is part of nvidia-cutlass-dsl"]
    return []


def why_not_made(kernel: Kernel, config: Config) -> list[str]:
    """Why no object of `kernel` for `config` is stored or can be compiled: the package with its code isn't installed.
    Empty if that is not so."""
    arch = target_arch()
    return [] if arch is None else launch.why_not_made(kernel, config, arch)


def why_not_by_default() -> list[str]:
    """Why implementation=None should not choose a kernel on jax's default device; empty if it may."""
    if _planned.get() is not None:
        return []
    device = getattr(jax.config, "jax_default_device", None)
    platform = jax.default_backend() if device is None else getattr(device, "platform", device)
    return [] if platform in ("gpu", "cuda") else [f"jax's default device is a {platform}"]


def why_not_untested() -> list[str]:
    """The reasons of `why_not_by_default`, and one more if the architecture isn't in PROVEN."""
    arch = target_arch()
    if arch is None or arch in PROVEN:
        return why_not_by_default()
    return [*why_not_by_default(), untested(arch)]


# ---- the runtime library


def runtime_library() -> Path | None:
    """The DSL's runtime library for jax's CUDA version, else for another version; None if none is installed."""
    return launch.runtime_library("cu12" if importlib.util.find_spec("jax_cuda12_plugin") else "cu13")


def register_custom_calls() -> None:
    """Make the runtime's custom call known to XLA, once per process. Lowering on a machine with a GPU does so too, so
    only a process that runs a deserialized export without tracing anything has to call this function.

    Raises:
      FileNotFoundError: the runtime isn't installed.
    """
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
    """The `disabled_checks` of jax.export.export for programs with kernels. jax guarantees the stability of some of its
    own custom calls only, not of kernels in Pallas, and refuses to export others without this list."""
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in (TARGET, TRITON_TARGET)]
