"""The compiled kernels that this process has loaded, and why a call can't have one."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from tsmla_bridge.runtime import devices, scales, tensors
from tsmla_bridge.runtime.tensors import Scale, dtype_name
from tsmla_kernels import contract, launch
from tsmla_kernels.kernel import PROVEN, Config, Kernel, untested, written_for

IMPLEMENTATIONS = ("cute", "reference")

ROW_ALIGN = 16
"""Alignment in bytes of the tensors that kernels read, except indices, and of rows that may lie apart."""

_lock = threading.Lock()


def check_implementation(implementation: object) -> None:
    """ValueError unless this is None or an implementation's name."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise contract.unknown_implementation(implementation, IMPLEMENTATIONS)


def is_by_definition(implementation: str | None, device: torch.device) -> bool:
    """Whether the definition runs a call of attention: if it is named, or if nothing is named and the device is a
    CPU. ValueError for an unknown name."""
    check_implementation(implementation)
    return implementation == "reference" or (implementation is None and devices.kind(device) == "cpu")


def check_operands(launcher: launch.Launcher, names: Sequence[str]) -> None:
    """NotImplementedError unless these are the kernel's operands: a kernel of another version takes others."""
    taken = [operand.name for operand in launcher.operands]
    if taken != list(names):
        raise NotImplementedError(f"{launcher.name}: takes {', '.join(taken)}; this version passes {', '.join(names)}")


def reasons(kernel: Kernel, device: torch.device) -> list[str]:
    """Why `kernel` can't run on `device`; empty if it can."""
    if devices.kind(device) != "cuda":
        return [f"the tensors are on {device}; the kernels run only on NVIDIA GPUs"]
    arch = devices.arch(devices.index_of(device))
    if found := kernel.arch_reasons(arch):
        return found
    if not _runtime_is_here():
        return [f"{launch.LIBRARY} was not found; it is part of nvidia-cutlass-dsl"]
    return []


def kernel_for(device: torch.device, *kernels: Kernel) -> Kernel:
    """The kernel among those of one operation that is written for `device`; the first one if there is none."""
    on_gpu = devices.kind(device) == "cuda"
    return written_for(devices.arch(devices.index_of(device)) if on_gpu else None, *kernels)


def why_not_made(kernel: Kernel, config: Config, device: torch.device) -> list[str]:
    """Why there is no object of `kernel` for a GPU: none is stored, and the package with the kernel's code isn't
    installed. Empty if there is one or it can be made."""
    return launch.why_not_made(kernel, config, devices.arch(devices.index_of(device)))


def check_named(op: str, implementation: str | None, device: torch.device) -> None:
    """NotImplementedError if a call of `op` names no implementation, and the kernels are untested on the device's
    architecture."""
    arch = devices.arch(devices.index_of(device))
    if implementation is None and arch not in PROVEN:
        raise contract.not_runnable(op, None, [f'{untested(arch)}, or "reference"'])


def _runtime_is_here() -> bool:
    """Whether the DSL's runtime library is installed. Once it was found no call looks for it again: the first look
    takes some tenths of a millisecond and a later one some hundredths, and many operations ask at every call."""
    global _found_runtime
    _found_runtime = _found_runtime or launch.runtime_library() is not None
    return _found_runtime


_found_runtime = False


def is_chosen(
    kernel: Kernel,
    implementation: str | None,
    device: torch.device,
    why_not: Callable[[], list[str]],
    op: str | None = None,
) -> bool:
    """Whether `kernel` runs a call of the operation `op` on `device`, and not torch operations. None for op is the
    operation of the kernel's name.

    `why_not` gives the reasons against this call, beside those against the device. If "cute" was named, all of them are
    raised as NotImplementedError. An unknown name raises ValueError."""
    check_implementation(implementation)
    if implementation == "reference" or (implementation is None and devices.kind(device) != "cuda"):
        return False
    if found := reasons(kernel, device) + why_not():
        if implementation == "cute":
            raise contract.not_runnable(op or kernel.name, "cute", found)
        return False
    return implementation == "cute" or devices.arch(devices.index_of(device)) in PROVEN


def unreadable(name: str, tensor: torch.Tensor) -> str:
    """The reason against a tensor whose layout a kernel doesn't take."""
    return f"{name} has strides {list(tensor.stride())} at address {tensor.data_ptr():#x}, which the kernel can't read"


def layout_reasons(
    given: Mapping[str, torch.Tensor], wide: Collection[str] = (), written: Collection[str] = ()
) -> list[str]:
    """Why a kernel can't read the tensors `given` by name: they are not row-major without gaps, or they don't begin at
    multiples of 16 bytes, which int32 and int64 tensors need not do. Rows of the tensors named in `wide` may be the
    first columns of wider rows, if these begin at multiples of 16 bytes. Nor can it read memory of the tensors named in
    `written`, which it writes: whether a row is read before it is overwritten would depend on the order of the CTAs."""
    found = []
    for name, tensor in given.items():
        if name in wide:
            step = tensor.stride(0) * tensor.element_size()
            apart = tensor.stride(0) >= tensor.shape[1]  # rows that expand makes are one row in memory
            dense = tensor.stride(-1) == 1 and step % ROW_ALIGN == 0 and apart
        else:
            dense = tensor.is_contiguous()
        is_index = tensor.dtype in (torch.int32, torch.int64)
        if not (dense and (is_index or tensor.data_ptr() % ROW_ALIGN == 0)):
            found.append(unreadable(name, tensor))
    for name in written:
        others = {other: tensor for other, tensor in given.items() if other != name}
        shared = tensors.sharing_memory(given[name], others)
        found += [f"{other} lies in memory of {name}, which the kernel writes" for other in shared]
    return found


def check_aligned(name: str, tensor: torch.Tensor) -> None:
    """ValueError unless the tensor, which a kernel is to write, begins at a multiple of 16 bytes."""
    if tensor.data_ptr() % ROW_ALIGN:
        raise ValueError(f"{name}: got address {tensor.data_ptr():#x}; legal for the kernel: a multiple of {ROW_ALIGN}")


def launcher(kernel: Kernel, config: Config, index: int) -> launch.Launcher:
    """The kernel for `config` on device `index`: from this process, from the cache on disk, or compiled.

    Raises, beside what Launcher raises, RuntimeError if it would have to be loaded while a CUDA graph is captured."""
    with _lock:
        loaded = _loaded.get((kernel.name, config, index))
        if loaded is None:
            if devices.is_capturing():
                raise RuntimeError(
                    f"{kernel.name}: the first call with these static sizes loads its kernel, which a CUDA graph can't"
                    " capture; make one such call before the capture"
                )
            loaded = _loaded[kernel.name, config, index] = _load(kernel, config, index)
        return loaded


def run_on(kernel: Kernel, config: Config, device: torch.device, arrays: Mapping[str, launch.ArrayView]) -> None:
    """`run` on the current stream of a CUDA device."""
    index = devices.index_of(device)
    with devices.made_current(index):
        run(kernel, config, index, devices.current_stream(index), arrays)


def run_scaled(
    kernel: Kernel,
    config: Config,
    device: torch.device,
    kv_scale: Scale | None,
    inputs: Mapping[str, launch.ArrayView],
    outputs: Mapping[str, launch.ArrayView],
) -> None:
    """`run_on` of a kernel whose operands are `inputs`, a cache's scale and `outputs`."""
    index = devices.index_of(device)
    with devices.made_current(index):
        stream = devices.current_stream(index)
        if isinstance(kv_scale, torch.Tensor):
            scale = kv_scale.to(torch.float32).reshape(1)
        else:
            scale = scales.on_device((1.0 if kv_scale is None else float(kv_scale), 1.0), index, stream)[:1]
        run(kernel, config, index, stream, {**inputs, "kv_scale": view(scale), **outputs})


def run(kernel: Kernel, config: Config, index: int, stream: int, arrays: Mapping[str, launch.ArrayView]) -> None:
    """Launch a kernel on `stream`, the current stream of device `index`, with its operands by name, in their order."""
    loaded = launcher(kernel, config, index)
    check_operands(loaded, tuple(arrays))
    loaded(stream, list(arrays.values()))


class LaunchPart(NamedTuple):
    """A launch that serves some of a call's requests or tokens, and for each operand how many bytes into the call's
    operand the launch begins."""

    launch: launch.Launch
    offsets: tuple[int, ...]


def all_of(parts: Sequence[LaunchPart]) -> launch.Launch:
    """One function that makes all launches of a call, one after the other in the same workspaces."""

    def launch_all(stream: int, addresses: Sequence[int]) -> None:
        for part in parts:
            part.launch(stream, tuple(map(operator.add, addresses, part.offsets)))

    return parts[0].launch if len(parts) == 1 else launch_all


def view(tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> launch.ArrayView:
    """A tensor's memory as an operand.

    shape: the operand's shape, if the tensor has another.
    """
    return launch.ArrayView(
        tensor.data_ptr(), tuple(tensor.shape) if shape is None else shape, dtype_name(tensor.dtype)
    )


def wide_view(rows: torch.Tensor) -> launch.ArrayView:
    """The memory of rows [T, W], which may be the first columns of wider ones, as an operand: the wider rows."""
    return view(rows, (rows.shape[0], rows.stride(0)))


_loaded: dict[tuple[str, Config, int], launch.Launcher] = {}


def _load(kernel: Kernel, config: Config, index: int) -> launch.Launcher:
    with torch.cuda.device(index):
        return launch.Launcher(kernel, config, devices.arch(index))
