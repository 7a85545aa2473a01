"""Compiling a kernel to the bytes that both front ends launch, for any architecture and without a GPU.

The bytes are a host object with the cubin inside, in the form that the DSL runtime's custom call takes as `module`. The
sizes that an operand leaves open are read at the launch, so one object serves every batch, page count and length.
cutlass is imported inside compile_kernel, because a process with a warm cache doesn't need it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import platform
import threading
import time
import warnings
from dataclasses import dataclass
from typing import Any

from tsmla_kernels.kernel import Config, Kernel

ENTRY_PREFIX = "cutlass_call"  # the name by which the runtime's custom call finds the entry
# The processor that the entry is compiled for. By default the DSL compiles for the one that it runs on, so an object
# made on a machine with AVX-512 would crash a machine without.
_HOST_TARGETS = {
    "x86_64": "llvm -mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64-v2",
    "aarch64": "llvm -mtriple=aarch64-unknown-linux-gnu",
}
# Makes the assembler report registers, spills and serialised WGMMA. Older versions of the DSL refuse the option.
_REMARKS = "remarks{ptx}"
_FIRST_WITH_REMARKS = (4, 7)

# Tracing changes the state of the whole process.
_lock = threading.RLock()


@dataclass(frozen=True)
class CompiledObject:
    """A kernel compiled for one config and architecture.

    Attributes:
      kernel: the kernel's name in the catalog. config: the kernel's config as JSON. arch: e.g. "sm_90a".
      module: the bytes that the runtime loads.
      dsl: the version of the CuTe DSL that compiled it.
      seconds: the time that compiling took.
      log: the output of the compiler and the assembler.
    """

    kernel: str
    config: str
    arch: str
    module: bytes
    dsl: str
    seconds: float
    log: str


def compile_kernel(kernel: Kernel, config: Config, arch: str) -> CompiledObject:
    """Compile `kernel` for `config` and `arch`. This takes seconds on one core, and needs no GPU.

    Raises:
      ValueError: the kernel isn't written for `arch`, or this machine's processor is neither x86-64 nor aarch64.
      ModuleNotFoundError: the CuTe DSL (nvidia-cutlass-dsl), or a package that the kernel is made of, isn't installed.
      RuntimeError: the kernel doesn't compile; the message carries the compiler's output.
    """
    check_arch(kernel, arch)
    host_target = _HOST_TARGETS.get(platform.machine())
    if host_target is None:
        raise ValueError(f"{kernel.name}: got a {platform.machine()} host; legal: {', '.join(_HOST_TARGETS)}")
    operands = kernel.operands(config)
    with _lock:
        start = time.perf_counter()
        try:
            import cuda.bindings.driver as cuda
            import cutlass
            import cutlass.cute as cute
        except ModuleNotFoundError as e:
            raise ModuleNotFoundError(
                f"{kernel.name} isn't in the cache for {config} on {arch}, and compiling it needs the CuTe DSL: {e};"
                " install nvidia-cutlass-dsl, or bring a cache that `tsmla compile` filled elsewhere",
                name=e.name,
            ) from e

        from tsmla_kernels.entry import entry, placeholders

        log = io.StringIO()
        try:
            with (
                _architecture(arch),
                contextlib.redirect_stderr(log),
                contextlib.redirect_stdout(log),
                warnings.catch_warnings(record=True) as warned,
            ):
                compiled = cute.compile(
                    entry,
                    cuda.CUstream(0),
                    *placeholders(operands),
                    launcher=resolve(kernel.launcher)(config),
                    operands=operands,
                    options=f"--host-target '{host_target}' {_remarks(cutlass.__version__)} {kernel.compiler_options}",
                )
                module = compiled.dump_to_object(ENTRY_PREFIX)
            # The DSL's warnings are advice for the author of a kernel, not for its caller.
            log.writelines(f"{warning.category.__name__}: {warning.message}\n" for warning in warned)
        except ModuleNotFoundError:  # the package that the kernel's code is from
            raise
        except Exception as e:
            said = f"\n{log.getvalue()}" if log.getvalue() else ""
            raise RuntimeError(f"{kernel.name}: {config} doesn't compile for {arch}: {e}{said}") from e
        return CompiledObject(
            kernel=kernel.name,
            config=kernel.config_json(config),
            arch=arch,
            module=bytes(module),
            dsl=cutlass.__version__,
            seconds=time.perf_counter() - start,
            log=log.getvalue(),
        )


def check_arch(kernel: Kernel, arch: str) -> None:
    """ValueError unless the kernel is written for `arch`."""
    if arch not in kernel.archs:
        raise ValueError(f"arch: got {arch!r}; {kernel.name} is written for {', '.join(kernel.archs)}")


def resolve(name: str) -> Any:
    """The object that "module:attribute" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _remarks(version: str) -> str:
    """The option that makes this version of the DSL report the assembler's remarks; "" if it has none."""
    major, minor = (int(number) for number in version.split(".")[:2])
    return _REMARKS if (major, minor) >= _FIRST_WITH_REMARKS else ""


@contextlib.contextmanager
def _architecture(arch: str) -> Any:
    """Compile for `arch` inside the context, whatever the GPU is and whatever CUTE_DSL_ARCH was at the DSL's import."""
    from cutlass.cutlass_dsl.cutlass import CuTeDSL

    environment = CuTeDSL._get_dsl().envar
    previous = environment.arch
    environment.arch = arch
    try:
        yield
    finally:
        environment.arch = previous
